"""start_fn in a process of its own: it reaches its node through the caretaker, ends with SIGINT, outlives nobody."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.local_remote import LocalRemote
from tpucare.api.attempt import Attempt, Host
from tpucare.api.hosts import exec_on_tpu, send_to_tpu
from tpucare.api.processes import ChildEnded, ProcessStarter, pack_error, unpack_error
from tpucare.model.errors import CommandFailed, ConfigError, NodeGone, Problem, QuotaExceeded, TpuCareError
from tpucare.model.resources import NodeKey, Worker

ZONE = "us-east5-a"
PATIENCE = 30.0
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def remote() -> Iterator[LocalRemote]:
    local = LocalRemote()
    yield local
    local.close()


@pytest.fixture
def attempt(remote: LocalRemote) -> Attempt:
    key = NodeKey("grant", ZONE, "pod-a1")
    workers = tuple(Worker(key, 7, number, f"127.0.0.{number + 1}") for number in range(2))
    return Attempt(remote, slot="pod", token="pod-a1.1", number=1, workers=workers)


@dataclass
class Context:
    host: str
    path: Path
    note: str = ""


Started = Callable[..., Any]


@pytest.fixture
def context(attempt: Attempt, tmp_path: Path) -> Context:
    return Context(Host(attempt), tmp_path)


def outcome(handle: Any) -> BaseException | None:
    error: BaseException | None = handle.exception(PATIENCE)
    return error


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_child_reaches_its_node_through_the_caretaker(
    attempt: Attempt, remote: LocalRemote, context: Context
) -> None:
    secret = "known without pickling"

    def start_fn(ctx: Context, worker: int) -> None:
        send_to_tpu(ctx.host, ZONE, "note", f"{secret} {worker}", worker)
        said = exec_on_tpu(ctx.host, ZONE, "cat note; echo; echo $TPUCARE_RUN $TPUCARE_WORKER", worker)
        # A plain name means this attempt too, and a thread of the child's own is given it by its Host.
        heard: list[str] = []
        thread = threading.Thread(
            target=lambda: heard.append(exec_on_tpu(ctx.host, ZONE, "echo from a thread", worker))
        )
        thread.start()
        thread.join()
        said += "\n" + exec_on_tpu("pod", ZONE, "echo plain", worker) + "\n" + heard[0]
        (ctx.path / str(worker)).write_text(f"{said}\n{os.getpid()} {type(ctx.host).__name__}")

    with ProcessStarter(start_fn) as starter:
        handles = [starter.start(attempt, Host(attempt), context, worker) for worker in (0, 1)]
        assert [outcome(handle) for handle in handles] == [None, None]
    for worker in (0, 1):
        *said, last = (context.path / str(worker)).read_text().split("\n")
        said = [line for line in said if line]
        assert said == [f"known without pickling {worker}", f"pod-a1.1 {worker}", "plain", "from a thread"]
        pid, kind = last.split()
        assert int(pid) != os.getpid()
        assert kind == "Host"
        assert (remote.home(attempt.workers[worker]) / "note").exists()


def test_once_the_attempt_is_over_calls_raise_in_flight_and_later(attempt: Attempt, context: Context) -> None:
    def start_fn(ctx: Context, worker: int) -> None:
        for number, command in enumerate(("sleep 60", "echo late")):
            try:
                exec_on_tpu(ctx.host, ZONE, command, worker)
            except NodeGone as gone:
                (ctx.path / str(number)).write_text(str(gone))

    with ProcessStarter(start_fn) as starter:
        handle = starter.start(attempt, Host(attempt), context, 0)
        until(lambda: attempt.calls_in_flight(0), "the call begins")
        attempt.end("its node was preempted")
        assert outcome(handle) is None
    for number in (0, 1):
        assert (context.path / str(number)).read_text() == "pod-a1 (attempt 1 of pod): its node was preempted"


def test_a_failed_command_fails_the_child_with_its_status(attempt: Attempt, context: Context) -> None:
    def start_fn(ctx: Context, worker: int) -> None:
        exec_on_tpu(ctx.host, ZONE, "echo why >&2; exit 7", worker)

    with ProcessStarter(start_fn) as starter:
        error = outcome(starter.start(attempt, Host(attempt), context, 0))
    assert isinstance(error, CommandFailed)
    assert error.exit_status == 7
    assert "why" in str(error)
    assert "exec_on_tpu" in str(error.__cause__)


class Unpicklable(Exception):
    def __init__(self, one: object, *, two: object) -> None:
        super().__init__("it broke")
        self.one, self.two = one, two


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (lambda: int("x"), ValueError, "invalid literal"),
        (lambda: sys.exit(3), SystemExit, "3"),
        (lambda: (_ for _ in ()).throw(Unpicklable(1, two=2)), Unpicklable, "it broke"),
        (lambda: (_ for _ in ()).throw(Unpicklable(threading.Lock(), two=2)), RuntimeError, "Unpicklable: it broke"),
        (lambda: os._exit(5), ChildEnded, "exit status 5"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ChildEnded, "signal SIGKILL"),
    ],
)
def test_how_a_call_ended_is_told(
    attempt: Attempt, context: Context, body: Callable[[], object], kind: type[BaseException], words: str
) -> None:
    with ProcessStarter(lambda ctx, worker: body()) as starter:
        error = outcome(starter.start(attempt, Host(attempt), context, 0))
        assert type(error) is kind
        assert words in str(error)


def test_an_exception_that_only_the_child_can_import_is_told(
    attempt: Attempt, context: Context, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "known_to_the_child.py").write_text(
        "class QuotaSpent(Exception):\n    pass\n\ndef work():\n    raise QuotaSpent('no quota\\nat all')\n"
    )

    def start_fn(ctx: Context, worker: int) -> None:
        sys.path.insert(0, str(library))
        importlib.import_module("known_to_the_child").work()

    with ProcessStarter(start_fn) as starter:
        error = outcome(starter.start(attempt, Host(attempt), context, 0))
    assert type(error) is RuntimeError
    assert str(error) == "known_to_the_child.QuotaSpent: no quota at all"
    assert 'known_to_the_child.py", line 5, in work' in str(error.__cause__)


def test_a_signal_without_a_name_is_told(attempt: Attempt, context: Context) -> None:
    with ProcessStarter(lambda ctx, worker: os.kill(os.getpid(), signal.SIGRTMIN + 3)) as starter:
        error = outcome(starter.start(attempt, Host(attempt), context, 0))
    assert isinstance(error, ChildEnded)
    assert error.exit_status == 128 + signal.SIGRTMIN + 3
    assert f"signal {signal.SIGRTMIN + 3}" in str(error)


def test_cancel_is_sigint_as_often_as_it_takes(attempt: Attempt, context: Context) -> None:
    def start_fn(ctx: Context, worker: int) -> None:
        told = os.open(ctx.path / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def interrupt(number: int, frame: object) -> None:
            os.write(told, b".")
            raise KeyboardInterrupt

        try:
            signal.signal(signal.SIGINT, interrupt)
            (ctx.path / "begun").touch()
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(600)

    with ProcessStarter(start_fn) as starter:
        handle = starter.start(attempt, Host(attempt), context, 0)
        until((context.path / "begun").exists, "it begins")
        until(lambda: handle.where().startswith("process "), "its process is known")
        handle.cancel()
        assert isinstance(outcome(handle), KeyboardInterrupt)
    assert len((context.path / "told").read_bytes()) >= 2


def test_a_context_that_cannot_be_pickled_is_told_before_a_process_begins(attempt: Attempt, context: Context) -> None:
    with ProcessStarter(lambda ctx, worker: None) as starter:
        with pytest.raises(ConfigError, match="the context of pod cannot be pickled"):
            starter.start(attempt, Host(attempt), {"lock": threading.Lock()}, 0)
        assert outcome(starter.start(attempt, Host(attempt), context, 0)) is None


def test_leaving_ends_children_that_will_not_go(attempt: Attempt, context: Context) -> None:
    def start_fn(ctx: Context, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (ctx.path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    before = set(psutil.Process().children(recursive=True))
    with ProcessStarter(start_fn) as starter:
        handle = starter.start(attempt, Host(attempt), context, 0)
        until(lambda: (context.path / "pid").exists() and (context.path / "pid").read_text(), "it begins")
    assert isinstance(outcome(handle), ChildEnded)
    assert not psutil.pid_exists(int((context.path / "pid").read_text()))
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_grandchild_that_holds_on_does_not_keep_the_call(attempt: Attempt, context: Context) -> None:
    def start_fn(ctx: Context, worker: int) -> None:
        pid = os.fork()
        if not pid:
            time.sleep(600)
        (ctx.path / "pid").write_text(str(pid))

    with ProcessStarter(start_fn) as starter:
        assert outcome(starter.start(attempt, Host(attempt), context, 0)) is None
        os.kill(int((context.path / "pid").read_text()), signal.SIGKILL)


def test_a_helper_that_was_killed_is_told(attempt: Attempt, context: Context) -> None:
    def start_fn(ctx: Context, worker: int) -> None:
        (ctx.path / "pid").write_text(str(os.getpid()))
        time.sleep(600)

    with ProcessStarter(start_fn) as starter:
        handle = starter.start(attempt, Host(attempt), context, 0)
        until(lambda: (context.path / "pid").exists() and (context.path / "pid").read_text(), "it begins")
        child = psutil.Process(int((context.path / "pid").read_text()))
        starter.helper.kill()
        assert isinstance(outcome(handle), ChildEnded)
        until(lambda: not child.is_running(), "the child ends with it")
        with pytest.raises(ChildEnded, match="helper"):
            starter.start(attempt, Host(attempt), context, 0)


UNGUARDED = """
    import os, sys, time
    from tpucare.api.attempt import Attempt, Host
    from tpucare.api.processes import ProcessStarter
    from tpucare.model.resources import NodeKey, Worker

    worker = Worker(NodeKey("p", "z", "n"), 1, 0, "h")
    attempt = Attempt(None, slot="pod", token="pod-a1.1", number=1, workers=(worker,))
    os.umask(0o027)
    os.environ["GIVEN"] = "by the script"
    print("begun", end=" ")
    with ProcessStarter(lambda ctx, worker: print(ctx, os.getcwd(), os.environ["GIVEN"], oct(os.umask(0)))) as starter:
        handle = starter.start(attempt, Host(attempt), {"made": "here"}, 0)
        assert handle.exception(30) is None
"""


def test_a_script_on_standard_input_needs_no_guard_and_a_child_has_its_folder_environment_and_output(
    tmp_path: Path,
) -> None:
    script = textwrap.dedent(UNGUARDED)
    ran = subprocess.run(
        [sys.executable, "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert ran.stdout == f"begun {{'made': 'here'}} {tmp_path} by the script 0o27\n"
    assert (ran.returncode, ran.stderr) == (0, "")


ORPHANS = """
    import os, sys, time
    from pathlib import Path
    from tpucare.api.attempt import Attempt, Host
    from tpucare.api.processes import ProcessStarter
    from tpucare.model.resources import NodeKey, Worker

    def start_fn(ctx, worker):
        Path(sys.argv[1], "child").write_text(str(os.getpid()))
        time.sleep(600)

    worker = Worker(NodeKey("p", "z", "n"), 1, 0, "h")
    attempt = Attempt(None, slot="pod", token="pod-a1.1", number=1, workers=(worker,))
    with ProcessStarter(start_fn) as starter:
        starter.start(attempt, Host(attempt), None, 0)
        Path(sys.argv[1], "helper").write_text(str(starter.helper.pid))
        time.sleep(600)
"""


def test_nothing_outlives_a_caretaker_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ORPHANS), str(tmp_path)]
    with subprocess.Popen(command) as caretaker:
        for name in ("helper", "child"):
            until(lambda file=tmp_path / name: file.exists() and file.read_text(), f"the {name} begins")  # type: ignore[misc]
        left = [psutil.Process(int((tmp_path / name).read_text())) for name in ("helper", "child")]
        caretaker.kill()
        caretaker.wait(PATIENCE)
    until(lambda: not any(process.is_running() for process in left), "helper and child end")


def test_a_daemonic_process_is_told_what_to_do_instead() -> None:
    """`multiprocessing` lets such a process have no children; that was an AssertionError."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe()

    def begin() -> None:
        try:
            with ProcessStarter(lambda *_: None):
                writer.send("begun")
        except ConfigError as error:
            writer.send(str(error))

    process = fork.Process(target=begin, daemon=True)
    process.start()
    assert reader.poll(PATIENCE)
    assert "use start_method='thread'" in reader.recv()
    process.join()


def test_no_zombie_is_left_while_it_goes_on(attempt: Attempt, context: Context) -> None:
    with ProcessStarter(lambda ctx, worker: None) as starter:
        for _ in range(5):
            assert outcome(starter.start(attempt, Host(attempt), context, 0)) is None
        helper = psutil.Process(starter.helper.pid)
        until(lambda: not helper.children(), "all are reaped")


def test_an_error_keeps_its_class_values_and_place() -> None:
    error = unpack_error(pack_error(CommandFailed("it failed", 7, "tail")))
    assert isinstance(error, CommandFailed)
    assert (str(error), error.exit_status, error.stderr_tail) == ("it failed", 7, "tail")


@pytest.mark.parametrize(
    "error",
    [
        CommandFailed("it failed", 7, host="10.0.0.1"),
        QuotaExceeded("used up", region_wide=True, advice="ask for more"),
        ConfigError.of([Problem(3, "job.run", "is missing")], "pod.yaml"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_what_it_knows_beside_its_text(error: TpuCareError) -> None:
    other = unpack_error(pack_error(error))
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
