"""Runs that users' functions start, on real processes and sessions: what lives, what ended, what must not happen."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits import sshd
from tests.kits.bench_worker import NO_METADATA, eventually
from tests.kits.foreign_node import FOREIGN, ForeignNode, foreign_node, in_screen, own_attempt
from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.ssh.remote import ParamikoRemote
from tpucare.api.attempt import Attempt
from tpucare.api.exec_command import build
from tpucare.model.errors import CommandFailed, ConfigError, NodeGone
from tpucare.model.resources import Job, Worker
from tpucare.model.runs import Failure, Phase

pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(shutil.which("screen") is None, reason="screen is not installed"),
]

FOREVER = "sleep 300"


def screens(node: ForeignNode, worker: int = 0) -> dict[str, int]:
    """Live sessions: name -> process of its server."""
    found = (path.name.partition(".") for path in (node.homes[worker].parent / "s").iterdir())
    return {name: int(pid) for pid, _, name in found if _is_alive(int(pid))}


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_of(node: ForeignNode) -> list[int]:
    """Processes that bear the run's token."""
    mark = f"TPUCARE_RUN={node.token()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark in environ.split(b"\0"):
                found.append(int(entry.name))
    return found


def kill(pids: list[int]) -> None:
    """One may end meanwhile, as what runs in a screen does after the screen."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_screen(attempt: Attempt, worker: Any) -> None:
    assert attempt.run(worker, in_screen(FOREVER)).exit_status == 0


def nothing(attempt: Attempt, worker: Any) -> None:
    """A start_fn that starts nothing."""


@pytest.fixture
def in_a_screen() -> Iterator[ForeignNode]:
    with foreign_node(start_screen) as node:
        assert node.go().complete
        eventually(node.is_set_up)
        # `screen -dmS` returns before its socket can be listed.
        eventually(lambda: "model" in screens(node))
        yield node


# --- what lives ---


def test_every_worker_gets_its_call_and_its_own_copy_and_the_session_lives() -> None:
    with foreign_node(start_screen, workers=2) as node:
        assert node.go().complete
        eventually(node.is_set_up)
        assert node.lives() == [True, True]
        assert sorted(node.started) == [(1, 0), (1, 1)]
        assert node.prepared == [node.slot]
        assert all(worker.exit_status is None for worker in node.look().workers)


def test_one_call_for_all_workers() -> None:
    with foreign_node(lambda attempt, _: attempt.run(1, in_screen(FOREVER)), workers=2, all_workers=True) as node:
        node.go()
        eventually(node.is_set_up)
        assert [worker for _, worker in node.started] == ["all"]
        assert node.lives() == [False, True]
        assert [w.foreign.seen for w in node.look().workers if w.foreign is not None] == [False, True]


def test_a_session_that_was_killed_is_the_end_of_the_run_and_no_status_is_made_up(in_a_screen: ForeignNode) -> None:
    os.kill(screens(in_a_screen)["model"], signal.SIGKILL)
    kill(processes_of(in_a_screen))
    eventually(lambda: in_a_screen.lives() == [False])
    (report,) = in_a_screen.look().workers
    assert (report.phase, report.exit_status, report.failure) == (Phase.RUN, None, Failure.NONE)
    assert report.foreign is not None
    assert report.foreign.seen


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """One to clone, and a crontab that is nobody's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "crontab").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "crontab").chmod(0o755)
    folder = tmp_path / "job"
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run(["git", "init", "-q", "-b", "main", folder], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    return f"file://{folder}"


def test_the_script_of_exec_command_leaves_its_status_and_the_end_of_its_screen(
    repository: str, tmp_path: Path
) -> None:
    run = "for n in $(seq 300); do echo line $n; done; echo no such dataset; exit 3"
    script = build(repository, None, "main", "true", run, False, ())

    def start(attempt: Attempt, worker: Any) -> None:
        attempt.put(worker, "setup.sh", script.encode(), 0o700)
        assert attempt.run(worker, "bash setup.sh").exit_status == 0

    with foreign_node(start, env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}) as node:
        node.go()
        eventually(lambda: node.is_set_up() and not any(node.lives()))
        report = node.look()
        (worker,) = report.workers
        assert worker.foreign is not None
        assert (worker.phase, worker.exit_status, worker.foreign.status) == (Phase.RUN, None, 3)
        kept = node.launcher.logs.read(node.slot, 1).decode()
        assert [line for line in kept.splitlines() if line.startswith("line ")] == [f"line {n}" for n in range(1, 301)]
        assert "no such dataset" in kept
        # A status of another run is none of this one's.
        (node.homes[0] / ".tpucare-model" / "exit").write_text("0\nother-a1.1\n")
        assert node.look().workers[0].foreign == replace(worker.foreign, status=None)
        assert node.end().quiet


def test_what_was_started_without_a_session_lives_by_its_marks() -> None:
    with foreign_node(lambda attempt, _: attempt.run(0, f"setsid {FOREVER} </dev/null >/dev/null 2>&1 &")) as node:
        node.go()
        eventually(node.is_set_up)
        assert node.lives() == [True]
        assert node.end().quiet
        assert node.lives() == [False]


def test_a_call_that_blocks_is_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A call that blocks in `start_fn` for days would be stopped as a setup that takes too long. After 10 minutes it
    counts as the run.
    """
    with foreign_node(lambda attempt, _: attempt.run(0, FOREVER)) as node:
        node.go()
        eventually(lambda: node.lives() == [True])
        assert node.look().workers[0].phase is Phase.SETUP
        monkeypatch.setattr("tpucare.api.callback_launcher.LONG_CALL", timedelta(0))
        assert node.look().workers[0].phase is Phase.RUN


def test_somebody_elses_screen_is_left_alone() -> None:
    with foreign_node(start_screen) as node:
        node.remote.run(node.workers[0], f"screen -dmS mine {FOREVER}")
        node.go()
        eventually(node.is_set_up)
        node.remote.run(node.workers[0], f"screen -dmS later {FOREVER}")
        eventually(lambda: screens(node).keys() == {"mine", "model", "later"})
        assert node.end().quiet
        assert screens(node).keys() == {"mine", "later"}
        assert node.lives() == [False]


def test_a_session_that_a_reboot_brought_back_is_the_run_again(in_a_screen: ForeignNode) -> None:
    assert in_a_screen.lives() == [True]
    record = in_a_screen.folder() / "foreign"
    record.write_text(record.read_text().replace(in_a_screen.look().workers[0].boot_id, "another-boot"))
    kill(processes_of(in_a_screen))
    eventually(lambda: in_a_screen.look().workers[0].is_torn)
    in_a_screen.remote.run(in_a_screen.workers[0], f"screen -dmS model {FOREVER}")
    eventually(lambda: in_a_screen.lives() == [True])
    assert in_a_screen.end().quiet
    assert screens(in_a_screen) == {}


# --- setup that fails ---


def test_a_start_fn_that_raises_is_a_failed_setup_with_its_traceback_in_the_log() -> None:
    def start(attempt: Attempt, worker: Any) -> None:
        if worker == 1:
            raise ValueError("no such dataset")
        start_screen(attempt, worker)

    with foreign_node(start, workers=2) as node:
        node.go()
        eventually(lambda: node.look().workers[1].exit_status is not None)
        report = node.look().workers[1]
        assert (report.phase, report.exit_status, report.failure) == (Phase.EXITED, 1, Failure.SETUP)
        assert report.detail == "start_fn of worker 1: ValueError: no such dataset"
        eventually(lambda: b"no such dataset" in node.launcher.logs.read(node.slot, 1, 1))
        node.look()
        assert node.launcher.logs.read(node.slot, 1, 1).count(b"Traceback") == 1
        assert node.end().quiet


@pytest.mark.parametrize(
    ("error", "status"),
    [(CommandFailed("it failed", 7), 7), (SystemExit(3), 3), (SystemExit("why"), 1), (ConfigError("no"), 1)],
)
def test_the_status_is_what_the_call_itself_would_have_exited_with(error: BaseException, status: int) -> None:
    def start(_: Attempt, __: Any) -> None:
        raise error

    with foreign_node(start) as node:
        node.go()
        eventually(lambda: node.look().workers[0].exit_status == status)


def test_sys_exit_without_a_status_is_a_return() -> None:
    def start(_: Attempt, __: Any) -> None:
        sys.exit()

    with foreign_node(start) as node:
        node.go()
        eventually(node.is_set_up)


def test_a_creation_callback_that_raises_or_takes_something_else_is_a_failed_setup() -> None:
    def broken(host: str, ctx: object) -> object:
        raise RuntimeError(f"no context for {host}")

    def narrow(host: str) -> object:
        return host

    for created, text in ((broken, "no context for"), (narrow, "creation_callback has to take (host, ctx)")):
        with foreign_node(nothing, created=created) as node:
            node.go()
            eventually(node.has_failed)
            report = node.look().workers[0]
            assert (report.exit_status, report.failure) == (1, Failure.SETUP)
            assert report.detail.startswith("creation_callback: ")
            assert text in report.detail
            assert node.started == []


# --- launches again ---


def test_the_same_token_again_calls_nothing(in_a_screen: ForeignNode) -> None:
    assert in_a_screen.go().complete
    assert (len(in_a_screen.started), len(in_a_screen.prepared)) == (1, 1)


def test_another_process_that_finds_the_run_calls_nothing(in_a_screen: ForeignNode) -> None:
    in_a_screen.callbacks.close()
    other = in_a_screen.callbacks = in_a_screen.another_process()
    assert in_a_screen.lives() == [True]
    assert in_a_screen.is_set_up()
    assert other.launch(in_a_screen.order(FOREIGN)).complete
    assert len(in_a_screen.started) == 1
    assert in_a_screen.end().quiet


def test_another_process_that_finds_an_interrupted_setup_tells_so_and_begins_anew() -> None:
    hold = threading.Event()

    def start(attempt: Attempt, worker: Any) -> None:
        start_screen(attempt, worker)
        if attempt.token.endswith(".1"):
            hold.wait(30)

    with foreign_node(start) as node:
        node.go()
        eventually(lambda: screens(node))
        node.callbacks.close()
        node.callbacks = node.another_process()
        (report,) = node.look().workers
        assert report.foreign is not None
        assert report.foreign.lost
        assert node.end().quiet
        assert screens(node) == {}
        assert node.go(2).complete
        eventually(node.is_set_up)
        assert node.lives() == [True]
        assert node.prepared == [node.slot], "the same node: its context was made"
        hold.set()


def test_a_relaunch_waits_for_what_still_runs(in_a_screen: ForeignNode) -> None:
    (error,) = in_a_screen.go(2).workers
    assert isinstance(error, CommandFailed)
    assert in_a_screen.token() in str(error)
    assert len(in_a_screen.started) == 1


def test_a_run_that_was_stopped_is_not_begun_by_a_late_launch(in_a_screen: ForeignNode) -> None:
    assert in_a_screen.end().quiet
    (error,) = in_a_screen.go().workers
    assert "stopped" in str(error)
    assert in_a_screen.launch(Job(run="true"), 2).complete, "a runner may follow"


# --- stop ---


def test_a_stop_is_sigterm_first_also_to_what_runs_in_a_session() -> None:
    """
    SIGTERM to `screen` itself hangs up on the processes in it, so training ended without its grace. Servers of sessions
    get no SIGTERM; they end after the last process in them, or by SIGKILL.
    """
    train = """trap 'sleep 0.5; echo saved >~/saved; exit 0' TERM; touch ~/ready; while :; do sleep 0.05; done"""
    with foreign_node(lambda attempt, _: attempt.run(0, in_screen(train))) as node:
        node.go()
        eventually(node.is_set_up)
        eventually((node.homes[0] / "ready").exists)
        assert node.end(grace=20).quiet
        assert (node.homes[0] / "saved").read_text() == "saved\n"
        assert screens(node) == {}


def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    with foreign_node(
        lambda attempt, _: attempt.run(0, in_screen("trap : TERM HUP; while :; do sleep 0.05; done"))
    ) as n:
        n.go()
        eventually(n.is_set_up)
        assert n.end(grace=0.5).quiet
        assert screens(n) == {}


# --- nodes that die ---


def test_a_call_in_flight_ends_with_its_node_and_a_late_one_never_begins() -> None:
    met: list[BaseException] = []
    ended = threading.Event()

    def start(attempt: Attempt, worker: Any) -> None:
        for _ in range(2):
            try:
                attempt.run(worker, f"echo x >>$HOME/calls; {FOREVER}")
            except NodeGone as error:
                met.append(error)
        ended.set()

    with foreign_node(start) as node:
        node.go()
        eventually(lambda: (node.homes[0] / "calls").exists() and (node.homes[0] / "calls").read_text())
        node.callbacks.forget_node(node.key)
        assert ended.wait(20)
        assert ["the node is gone" in str(error) for error in met] == [True, True]
        assert (node.homes[0] / "calls").read_text() == "x\n"


def test_a_late_thread_cannot_reach_the_next_node_at_the_same_address() -> None:
    go_on, tried = threading.Event(), threading.Event()
    met: list[BaseException] = []

    def start(attempt: Attempt, worker: Any) -> None:
        if attempt.token.endswith("-a2.1"):
            start_screen(attempt, worker)
            return
        go_on.wait(30)
        try:
            own_attempt(attempt.slot).run(worker, "touch $HOME/late")
        except NodeGone as error:
            met.append(error)
        tried.set()

    with foreign_node(start) as node:
        node.go()
        eventually(lambda: node.started)
        node.callbacks.forget_node(node.key)
        key = node.key._replace(name=f"{node.slot}-a2")
        first = node.workers[0]
        node.key, node.workers = key, (Worker(key, 8, 0, first.host),)
        node.homes = [node.remote.home(node.workers[0])]
        node.go()
        eventually(node.is_set_up)
        go_on.set()
        assert tried.wait(20)
        assert len(met) == 1
        assert not (node.homes[0] / "late").exists()
        assert node.prepared == [node.slot] * 2
        assert [ctx for ctx, _ in node.started] == [1, 2]


def test_a_broken_connection_is_told_only_when_the_worker_answers_again() -> None:
    """
    A preemption breaks the connection before the cloud reports it, so a call in flight raised an error and `start_fn`
    failed. The call waits until the worker answers again or its node is given up.
    """
    met: list[str] = []

    def start(attempt: Attempt, worker: Any) -> None:
        try:
            attempt.run(worker, FOREVER)
        except NodeGone:
            met.append("gone")
        except Exception as error:
            met.append(type(error).__name__)

    with foreign_node(start) as node:
        node.go()
        eventually(lambda: node.lives() == [True] and processes_of(node))
        node.remote.silence(node.workers[0])
        kill(processes_of(node))
        assert threading.Event().wait(0.5) is False
        assert met == [], "nobody knows yet whether the node is gone"
        node.callbacks.forget_node(node.key)
        eventually(lambda: met == ["gone"])


def test_a_thread_that_outlives_its_node_is_told_with_the_place_where_it_hangs() -> None:
    begun, hold = threading.Event(), threading.Event()

    def hang(attempt: Attempt, worker: Any) -> None:
        begun.set()
        hold.wait(30)

    with foreign_node(hang, late_after=0.2) as node:
        node.go()
        assert begun.wait(20)
        node.callbacks.forget_node(node.key)
        eventually(lambda: node.events)
        (event,) = node.events
        assert (event.kind, event.level, event.slot) == ("late", "error", node.slot)
        assert "test_callback_launcher.py" in event.text
        hold.set()


# --- tmux ---


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_session_of_a_tmux_that_was_there_before_is_the_runs_and_the_others_stay() -> None:
    with foreign_node(lambda attempt, _: attempt.run(0, f"tmux new-session -d -s model '{FOREVER}'")) as node:
        worker = node.workers[0]
        assert node.remote.run(worker, f"tmux new-session -d -s mine '{FOREVER}'").exit_status == 0
        node.go()
        eventually(node.is_set_up)
        assert processes_of(node) == [], "the server is older than the run, and so is its environment"
        assert node.lives() == [True]
        node.remote.run(worker, f"tmux new-session -d -s later '{FOREVER}'")
        node.look()
        assert node.end().quiet
        left = node.remote.run(worker, "tmux list-sessions -F '#{session_name}'").stdout.decode().split()
        assert sorted(left) == ["later", "mine"]
        node.remote.run(worker, "tmux kill-server")


# --- over SSH ---


@pytest.fixture
def over_ssh(tmp_path: Path) -> Iterator[tuple[ForeignNode, sshd.Sshd]]:
    """A node of one worker behind a real sshd; the folders of sessions and the like are the test's own."""
    if not sshd.available():
        pytest.skip("no sshd here: apt-get install openssh-server")
    key = load_or_make_key(tmp_path / "key")
    server = sshd.Sshd(tmp_path / "worker", "127.2.7.1", sshd.free_port(), key.public)
    with foreign_node(start_and_block) as node:
        (node.remote.root / "s").mkdir(mode=0o700)
        known = {**NO_METADATA, "SCREENDIR": node.remote.root / "s", "TMUX_TMPDIR": node.remote.root}
        exports = "".join(f"export {name}={value}\n" for name, value in known.items())
        wrap = server.folder / "wrap.sh"
        wrap.write_text(wrap.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{exports}"))
        remote = ParamikoRemote(key, user="root", pins=tmp_path / "pins", nudge=lambda: None, port=server.start().port)
        node.reach(remote, server.address)
        yield node, server
        kill(processes_of(node))
        remote.close()
    server.stop()


def start_and_block(attempt: Attempt, worker: Any) -> None:
    """A session first; then the call goes on until the test lets it."""
    attempt.put(worker, "hello", attempt.slot.encode(), 0o600)
    start_screen(attempt, worker)
    assert attempt.run(worker, 'while [ ! -e "$HOME/go-on" ]; do sleep 0.05; done; cat hello').stdout != b""


def test_over_a_real_sshd_a_session_outlives_its_call_and_is_ended_by_a_stop(
    over_ssh: tuple[ForeignNode, sshd.Sshd],
) -> None:
    node, server = over_ssh
    assert node.go().complete
    eventually(lambda: node.lives() == [True] and (server.home / "hello").exists())
    assert node.look().workers[0].phase is Phase.SETUP
    (server.home / "go-on").touch()
    eventually(node.is_set_up)
    assert node.lives() == [True]
    assert node.end().quiet
    assert node.lives() == [False]


def test_over_a_real_sshd_a_node_that_dies_ends_the_call(over_ssh: tuple[ForeignNode, sshd.Sshd]) -> None:
    node, server = over_ssh
    met: list[tuple[str, float]] = []

    def start(attempt: Attempt, worker: Any) -> None:
        try:
            start_and_block(attempt, worker)
        except NodeGone as error:
            met.append((str(error), time.monotonic()))

    node.start_fn = start
    node.go()
    eventually(lambda: processes_of(node))
    server.stop()
    died = time.monotonic()
    node.callbacks.forget_node(node.key)
    eventually(lambda: met)
    assert "the node is gone" in met[0][0]
    assert met[0][1] - died < 5.0, "the thread does not wait for the network"
