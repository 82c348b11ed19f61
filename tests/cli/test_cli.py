"""The command line: help and docs of every command, exit codes, questions, JSON; and the whole way on real machines."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import resource
import select
import shlex
import signal
import statistics
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_group

from tests.kits.bench_worker import eventually
from tests.kits.service import BEAT, QUICK, REPOSITORY, Process, fleet_text
from tpucare import cli
from tpucare.adapters.runner.logs import LogKeeper
from tpucare.adapters.state.store import open_reader
from tpucare.cli.app import HOMES, OTHER_WORDS, first_line, function_of, with_flags_first
from tpucare.cli.common import Exit, exit_code
from tpucare.cli.nodes import split_worker
from tpucare.model.errors import (
    AnswerLost,
    AuthRefused,
    CloudError,
    ConfigError,
    NeedsPerson,
    OwnCredentials,
    StoreLocked,
)
from tpucare.service import emulator_address
from tpucare.service.client import standalone
from tpucare.service.control_socket import NoDaemon, is_running, request
from tpucare.service.options import resolve
from tpucare.testbed.emulator.machines.sandbox import MachineError
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NodeSpec

pytestmark = pytest.mark.timeout(120)

DOCS = (REPOSITORY / "docs" / "cli.md").read_text("utf-8")
Run = Callable[..., "Done"]


class Done:
    """What a command in this process came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`tpucare WORDS...` in this process, with a state folder of its own and no terminal."""
    for name in [name for name in os.environ if name.startswith(("TPUCARE_", "GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPUCARE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in BEAT.items():
        monkeypatch.setenv(name, value)

    def call(*words: str) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["tpucare", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert "\x1b" not in said.out + said.err
        return Done(int(left.value.code or 0), said.out, said.err)

    return call


@pytest.fixture
def cloud(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EmulatorServer]:
    """An emulated cloud without machines, found by TPUCARE_EMULATOR."""
    folder = tmp_path / "emulator"
    with EmulatorServer(WorldConfig.fast(latencies=QUICK), state_dir=folder) as server:
        monkeypatch.setenv("TPUCARE_EMULATOR", str(folder))
        yield server


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    path = tmp_path / "pod.yaml"
    path.write_text(fleet_text())
    return path


def nodes(server: EmulatorServer) -> list[str]:
    with server.lock:
        return sorted(node.path.node_id for node in server.world.nodes())


# --- every command ---------------------------------------------------------------------------------------------------


def all_commands() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in HOMES:
        function = function_of(name)
        found.append((name,))
        if isinstance(function, typer.Typer):
            found += [(name, command) for command in get_group(function).commands]
    return found


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_every_command_has_help_with_an_example_and_a_row_in_the_docs(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words, "--help")
    assert done.code == 0
    assert re.search(rf"Example:\s+tpucare {re.escape(' '.join(words[:1]))}", done.out), done.out
    assert f"| `{' '.join(words)}" in DOCS, f"docs/cli.md has no row for {' '.join(words)}"


def test_the_list_of_commands_is_the_listed_ones(run: Run) -> None:
    out = run("--help").out
    for name in HOMES:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
        assert 10 < len(first_line(name)) < 120


def test_the_docs_name_no_command_that_is_not_there() -> None:
    rows = set(re.findall(r"^\| `([a-z][a-z-]*(?: [a-z-]+)?)[^`]*`", DOCS, re.MULTILINE))
    known = {" ".join(words) for words in all_commands()} | {" ".join(words[:1]) for words in all_commands()}
    assert {row for row in rows if row not in known and row.split()[0] not in known} == set()


def test_exit_codes_are_documented() -> None:
    for code in Exit:
        assert re.search(rf"^\| {int(code)} \|", DOCS, re.MULTILINE), code


def test_flags_of_the_program_are_documented_with_their_variables(run: Run) -> None:
    for flag in ("--state", "--endpoint", "--project", "--emulator"):
        variable = f"TPUCARE_{flag[2:].upper()}"
        assert flag in DOCS
        assert variable in DOCS
        assert variable in run("--help").out


def cpu_of(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_costs_at_most_twice_the_cpu_of_importing_typer_and_rich() -> None:
    helped = "import sys; sys.argv = ['tpucare', '--help']; from tpucare.cli import main; main()"
    bare = "import typer, rich"
    cpu_of(helped)
    pairs = [(cpu_of(helped), cpu_of(bare)) for _ in range(5)]
    ratio = statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)
    assert ratio <= 2.0, pairs


def imported(modules: Iterable[str], names: Collection[str]) -> list[str]:
    """Which of *names* are imported with *modules*."""
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {[*names]} if name in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return done.stdout.split()


def test_a_status_that_a_daemon_answers_reads_no_fleet_files() -> None:
    assert imported(["tpucare.service.status"], ["pydantic", "yaml", "tpucare.fleetfile.parse"]) == []


def test_command_modules_import_nothing_heavy() -> None:
    heavy = ["pydantic", "yaml", "paramiko", "google", "grpc", "structlog", "jinja2", "sqlite3", "rich"]
    modules = sorted({f"tpucare.cli.{module}" for module, _ in HOMES.values()})
    assert imported(modules, heavy) == []


@pytest.mark.parametrize(
    "words", [("fly",), ("status", "--fast"), ("down",), ("check",), ("logs", "pod", "--attempt", "x")]
)
def test_a_wrong_command_line_is_code_2(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.code == Exit.USAGE
    assert done.out == ""


def test_errors_have_codes_from_the_narrow_to_the_wide() -> None:
    errors = (ConfigError(""), StoreLocked(""), AnswerLost(""), AuthRefused(""), ZeroDivisionError())
    assert [exit_code(error) for error in errors] == [Exit.CONFIG, Exit.DAEMON, Exit.CLOUD, Exit.REMOTE, Exit.BUG]


def test_what_an_emulated_machine_cannot_do_is_no_bug() -> None:
    assert exit_code(MachineError("no sshd")) is Exit.FAILED
    namesake = type("MachineError", (Exception,), {})
    assert exit_code(namesake("of somebody else")) is Exit.BUG


# --- fleets ----------------------------------------------------------------------------------------------------------


def test_init_prints_fleets_that_pass_the_check(run: Run, tmp_path: Path) -> None:
    names = [line.split()[0] for line in run("init", "--list").out.splitlines()]
    assert "single" in names
    for name in names:
        text = run("init", "mine", "--template", name).out
        assert text.splitlines()[0].startswith("# ")
        assert "\nname: mine\n" in text
    path = tmp_path / "mine.yaml"
    path.write_text(run("init", "mine").out)
    assert run("check", str(path)).code == 0
    assert "there is no template nonsense; write one of" in run("init", "--template", "nonsense").err


def test_check_names_each_problem_with_its_place(run: Run, pod: Path) -> None:
    pod.write_text(fleet_text().replace("v2-8", "v2-9") + "care: {stalled_afer: 1h}\n")
    done = run("check", str(pod))
    assert done.code == Exit.CONFIG
    assert len(done.err.strip().splitlines()) == 2
    assert all(line.startswith(f"{pod}:") for line in done.err.strip().splitlines())
    assert "nearest: stalled_after" in done.err
    answer = run("check", str(pod), "--json").json
    assert (answer["ok"], len(answer["problems"])) == (False, 2)


def test_check_prints_the_schema_for_editors(run: Run) -> None:
    assert run("check", "--schema").json["properties"]["name"]


def test_two_files_of_one_name_fail_the_check_together(run: Run, pod: Path) -> None:
    other = pod.with_name("other.yaml")
    other.write_text(pod.read_text())
    assert run("check", str(pod)).code == 0
    assert run("check", str(pod), str(other)).code == Exit.CONFIG


def test_nothing_is_destroyed_without_a_yes(run: Run, cloud: EmulatorServer, pod: Path) -> None:
    run("apply", str(pod))
    for words in (("down", "pod"), ("apply", str(pod), "--replace"), ("confirm", "pod-0"), ("adopt-node", "x", "pod")):
        done = run(*words)
        assert (done.code, "--yes" in done.err) == (Exit.FAILED, True), words


def test_without_a_daemon_wishes_are_written_down_and_plan_decides_as_it_would(
    run: Run, cloud: EmulatorServer, pod: Path
) -> None:
    done = run("apply", str(pod))
    assert (done.code, done.out) == (0, "pod: new, 1 slot\n")
    assert "tpucare daemon" in done.err
    (row,) = run("plan", "--json").json["slots"]
    assert (row["slot"], row["action"]) == ("pod-0", "create")
    assert "v2-8 spot" in row["about"]
    assert nodes(cloud) == [], "a plan changes nothing"
    assert run("pause", "pod").out == "pod-0 paused\n"
    assert run("plan").out == "pod-0: wait: paused\n"
    answer = run("status", "--json").json
    assert (answer["daemon"], answer["slots"][0]["phase"]) == (False, "paused")
    assert "no daemon runs" in run("status").out
    run("resume", "pod")
    assert run("status", "pod", "--json").json["slots"][0]["phase"] == "waiting"
    kinds = [json.loads(line)["kind"] for line in run("events", "pod", "--json").out.splitlines()]
    assert kinds == ["fleet", "pause", "resume"]
    assert run("events", "-n", "1").out.endswith("pod-0: resumed\n")
    assert run("down", "pod", "--yes").code == 0


def test_status_stays_live_until_it_is_interrupted(run: Run, cloud: EmulatorServer, pod: Path) -> None:
    assert run("apply", str(pod)).code == 0
    command = [sys.executable, "-m", "tpucare.cli", "status", "--watch"]
    mine, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    watching = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        _read_until(mine, b"pod: accepted; it starts once a daemon runs")
        assert run("pause", "pod").code == 0
        _read_until(mine, b"paused")
        watching.send_signal(signal.SIGINT)
        _read_to_the_end(mine)
        assert watching.wait(30) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(mine)


def _read_until(terminal: int, wanted: bytes) -> None:
    """What a terminal shows; a program that ended, or shows nothing for a minute, fails."""
    shown = b""
    while wanted not in shown:
        readable, _, _ = select.select([terminal], [], [], 60)
        assert readable, shown
        shown += os.read(terminal, 1 << 16)


def _read_to_the_end(terminal: int) -> None:
    """A program whose terminal is full of what nobody has read waits, and does not end."""
    with contextlib.suppress(OSError):  # EIO: nobody else has it open any more.
        while select.select([terminal], [], [], 60)[0]:
            os.read(terminal, 1 << 16)


def test_plan_reads_the_folder_that_a_daemon_would_begin_with(run: Run, cloud: EmulatorServer, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "fleets"
    folder.mkdir(parents=True)
    (folder / "pod.yaml").write_text(fleet_text())
    (tmp_path / "state").chmod(0o700)
    assert run("plan").out.startswith("pod-0: create pod-0-a0 in us-central1-a")
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["fleets"], "no owner, no key, no store"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("status", "--json"), Exit.STORE, "no store here"),
        (("events",), Exit.STORE, "no store here"),
        (("down", "nobody", "--yes"), Exit.FAILED, "no fleet or slot nobody"),
        (("ssh", "nobody"), Exit.STORE, "no store here"),
        (("apply", "missing.yaml"), Exit.CONFIG, "missing.yaml: cannot be read"),
        (("--endpoint", "nonsense", "gc", "--apply"), Exit.CONFIG, "127.0.0.1:PORT"),
        (("--emulator", "nowhere", "status"), Exit.CONFIG, "no emulator runs"),
        (("logs", "pod"), Exit.FAILED, "no fleet or slot pod; no fleet is known yet"),
        (("emulator", "preempt", "x"), Exit.CONFIG, "no emulator runs"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_code(
    run: Run, words: tuple[str, ...], code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUCARE_PROJECT", "nobody")
    done = run(*words)
    assert text in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert done.code == code


def test_a_path_that_the_system_refuses_is_no_bug(run: Run, pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUCARE_STATE", "/tmp/" + "x" * 300)
    done = run("status")
    assert done.code == Exit.FAILED
    assert re.fullmatch(r"tpucare: /tmp/x{300}\S*: File name too long\n", done.err)
    assert run("apply", str(pod)).code == Exit.STORE


def in_a_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """*line* with `tpucare` as a command."""
    start = f'tpucare() {{ {shlex.quote(sys.executable)} -m tpucare.cli "$@"; }}\n'
    env = {name: value for name, value in os.environ.items() if not name.startswith("TPUCARE_")}
    env |= {"TPUCARE_STATE": str(folder / "state"), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(["bash", "-c", start + line], cwd=folder, env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("words", ["--help", "init", "check --schema"])
def test_a_reader_that_has_enough_is_no_failure(words: str, tmp_path: Path) -> None:
    done = in_a_shell(f"exec 3>&1; (tpucare {words}; echo $? >&3) | true", tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_closed_streams_are_as_good_as_ones_that_nobody_reads(tmp_path: Path) -> None:
    done = in_a_shell("(exec 3>&1; tpucare check --schema >&- <&- 2>&-; echo $? >&3)", tmp_path)
    assert done.stdout == "0\n"
    done = in_a_shell(
        "tpucare check --schema >&-; tpucare --endpoint 127.0.0.1:9 pause nobody >&- || echo $?", tmp_path
    )
    assert done.stdout == f"{int(Exit.FAILED)}\n"
    assert "no fleet or slot nobody" in done.stderr
    assert "unexpected" not in done.stderr


def test_a_full_disk_is_no_bug(tmp_path: Path) -> None:
    done = in_a_shell("tpucare init >/dev/full || echo $?", tmp_path)
    assert (done.stdout, done.stderr) == ("1\n", "tpucare: No space left on device\n")


def test_logs_outlive_the_node_and_cannot_drive_a_terminal(run: Run, tmp_path: Path) -> None:
    from tpucare.adapters.runner.logs import LogKeeper

    keeper = LogKeeper(tmp_path / "state" / "logs")
    keeper.append("pod-0", 1, "pod-0-a0.1", 0, b"step 1\n")
    keeper.append("pod-0", 2, "pod-0-a1.2", 0, b"\x1b]0;mine\x07step 2\n")
    keeper.append("pod-0", 2, "pod-0-a1.2", 3, b"other\n")
    assert "step 2" in run("logs", "pod").out
    assert "step 1" in run("logs", "pod-0", "--attempt", "1").out
    assert "other" in run("logs", "pod-0", "--worker", "3").out
    assert run("logs", "pod-0", "--list").out.splitlines()[1].startswith("attempt 2: pod-0-a1, 1 run, workers 0, 3, ")
    assert "kept: 1, 2" in run("logs", "pod-0", "--attempt", "9").err


# --- the emulator ----------------------------------------------------------------------------------------------------


def test_a_running_emulator_takes_orders(run: Run, cloud: EmulatorServer) -> None:
    said = run("emulator", "capacity", "us-central1-a", "0").out
    assert said == "capacity: zone us-central1-a, tier spot, amount 0\n"
    assert run("emulator", "outage", "1s").out == "outage: duration 1s, kind api\n"
    assert run("emulator", "end-outages").out == "end-outages: done\n"
    assert run("emulator", "status").json["nodes"] == []
    assert "there is no node pod-0; nodes: none" in run("emulator", "preempt", "pod-0").err
    spec = NodeSpec("v2-8", runtime_version="tpu-ubuntu2204-base", spot=True)
    with cloud.lock:
        cloud.world.operator.set_capacity("us-central1-a", "v2-8", "spot", None, cloud.now())
        cloud.world.api.create_node("projects/emulated/locations/us-central1-a", "pod-0-a1", spec, cloud.now())
    eventually(lambda: run("emulator", "status").json["nodes"][0]["state"] == "READY")
    assert run("emulator", "preempt", "pod-0").out == "preempt: pod-0-a1\n"
    eventually(lambda: run("emulator", "status").json["nodes"][0]["state"] == "PREEMPTED")
    assert "preempt: pod-0-a1 is PREEMPTED: nothing to do" in run("emulator", "preempt", "pod-0").err
    assert "there is no node cod; nodes: pod-0-a1" in run("emulator", "preempt", "cod").err
    assert run("emulator", "preempt", "pod-0", "--shown", "sideways").code == Exit.CONFIG
    assert "there is no node cod" in run("emulator", "state", "cod", "77").err
    assert "there is no node cod" in run("emulator", "unknown-fields", "cod", "--off").err
    assert run("emulator", "order", '{"do": "end-outages"}').code == 0
    assert run("emulator", "order", "{").code == Exit.USAGE
    with cloud.lock:
        assert [dict(entry)["action"] for entry in cloud.world.audit if entry["kind"] == "operator"][:2]


# --- the whole way, on real machines ---------------------------------------------------------------------------------


class Shell:
    """Commands and long processes with one environment, as a person has it in a terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("TPUCARE_", "GOOGLE_"))}
        self.env |= {**BEAT, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder)}
        self.processes: list[Process] = []

    def start(self, *words: str) -> Process:
        log = self.folder / f"{words[0]}-{len(self.processes)}.log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "tpucare.cli", *words]
            popen = subprocess.Popen(command, env=self.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        self.processes.append(Process(popen, log))
        return self.processes[-1]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tpucare.cli", *words]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )

    def json(self, *words: str) -> Any:
        done = self(*words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def slot(self) -> dict[str, Any]:
        """The daemon's row; asked directly, since a process per look would be most of the load here."""
        try:
            rows = request(self.folder / "emu" / "tpucare" / "control.sock", {"do": "status"})["slots"]
        except NoDaemon:
            return {}
        return dict(rows[0]) if rows else {}

    def until(self, true: Callable[[], object], seconds: float = 60) -> None:
        """Poll the outside of other processes: there is nothing to be notified by."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(ConfigError):
                if true():
                    return
            logs = "\n".join(process.text[-4000:] for process in self.processes)
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    # The emulator last, since it ends the machines.
    for process in reversed(made.processes):
        if process.popen.poll() is None:
            process.end(signal.SIGTERM, seconds=30)


@pytest.mark.machines
def test_from_the_emulator_to_nothing_left(shell: Shell, tmp_path: Path) -> None:
    emulator = tmp_path / "emu"
    world = tmp_path / "world.yaml"
    latencies = "".join(f"  {key}: {value}\n" for key, value in QUICK.items())
    zones = "zones: {us-central1-a: {accelerators: ['*']}}\n"
    world.write_text(f"speed: fast\n{zones}latencies:\n{latencies}")
    serving = shell.start(
        "--emulator", str(emulator), "emulator", str(world), "--ssh-port", "2389", "--metadata-port", "8389"
    )
    shell.until(lambda: emulator_address.find(emulator) and "export" in serving.text)
    shell.env["TPUCARE_EMULATOR"] = str(emulator)
    pod = tmp_path / "pod.yaml"
    pod.write_text(fleet_text(run="echo at $TPUCARE_SLOT; echo step 1; sleep 600"))

    daemon = shell.start("daemon")
    shell.until((emulator / "tpucare" / "control.sock").exists)
    assert shell("apply", str(pod)).returncode == 0
    shell.until(lambda: shell.slot().get("training") and shell.slot()["step"] == 1)
    assert (shell.slot()["node"], shell.slot()["phase"]) == ("pod-0-a0", "run")
    run = shell.slot()["run"]

    reached = shell("exec", "pod", "--", "echo on $(id -un) >&2; exit 7")
    assert (reached.returncode, reached.stderr.startswith("on ")) == (7, True)
    assert shell("ssh", "pod-0", "--", "echo", "hello").stdout == "hello\n"
    copied = shell("scp", str(pod), "pod-0:there.yaml")
    assert copied.returncode == 0, copied.stderr
    assert shell("scp", "pod-0:there.yaml", str(tmp_path / "back.yaml")).returncode == 0
    assert (tmp_path / "back.yaml").read_text() == pod.read_text()
    assert "Host pod-0 pod-0.0\n" in shell("ssh-config").stdout
    assert "at pod-0" in shell("logs", "pod").stdout

    assert daemon.end(signal.SIGTERM) == 0
    assert shell.json("emulator", "status")["nodes"][0]["state"] == "READY"
    assert shell("ssh", "pod-0", "--", "echo", "still").stdout == "still\n", "GetNode says where it is"
    assert shell("plan").stdout.startswith("pod-0: wait: running")

    again = shell.start("daemon")
    shell.until(lambda: shell.slot().get("training"))
    assert (shell.slot()["node"], shell.slot()["run"]) == ("pod-0-a0", run), "adopted: no second run"
    for path in (emulator / "tpucare" / "fleets").iterdir():
        path.unlink()
    shell.until(lambda: "runs on as last accepted" in again.text)
    assert shell.slot()["training"] is True

    down = shell("down", "pod", "--yes")
    assert (down.returncode, down.stdout) == (0, "pod: all its nodes are deleted\n")
    assert shell.json("emulator", "status")["nodes"] == []
    assert shell.json("status", "--json")["slots"] == []
    assert again.end(signal.SIGTERM) == 0
    assert serving.end(signal.SIGTERM, seconds=30) == 0
    assert not (emulator / emulator_address.FILE_NAME).exists()


# --- nodes of no fleet -----------------------------------------------------------------------------------------------


def test_gc_says_not_looked_where_it_could_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc` said "none" where nothing could be listed. It names what it could not look at and exits with 6."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    done = run("gc")
    assert (done.code, done.out) == (Exit.CLOUD, "")
    assert done.err.startswith("tpucare: nothing was listed: no Google Cloud project is set")


@pytest.mark.parametrize(
    ("blind", "line"),
    [
        ({"unseen_projects": ["p"]}, "p: not checked, its nodes could not be listed"),
        ({"unreachable": ["us-east1-d"]}, "us-east1-d: not checked, the zone does not answer"),
        ({"unseen_queues": ["p"]}, "p: not checked for queued resources, they could not be listed"),
    ],
)
def test_gc_says_none_only_where_all_was_looked_at(
    run: Run, monkeypatch: pytest.MonkeyPatch, blind: dict[str, Any], line: str
) -> None:
    seen = {
        "strays": [],
        "adopted": [],
        "deleting": [],
        "projects": ["p"],
        "unseen_projects": [],
        "unseen_queues": [],
        "unreachable": [],
        "store_lost": False,
    }
    monkeypatch.setattr("tpucare.service.client.request", lambda *_: seen)
    assert (run("gc").code, run("gc").out) == (0, "no orphan nodes in p\n")
    monkeypatch.setattr("tpucare.service.client.request", lambda *_: {**seen, **blind})
    done = run("gc")
    assert (done.code, done.out, done.err) == (Exit.CLOUD, "", f"{line}\n")


def test_gc_in_an_outage_is_no_empty_zone(run: Run, cloud: EmulatorServer) -> None:
    assert run("gc").out == "no orphan nodes in emulated\n"
    assert run("emulator", "outage", "10m").code == 0
    done = run("gc")
    assert (done.code, done.out) == (Exit.CLOUD, "")
    assert done.err.startswith("tpucare: nothing was listed: ")


@pytest.mark.parametrize(
    ("code", "said", "kind", "advice"),
    [
        (16, "Request had invalid credentials.", OwnCredentials, ""),
        (7, "Permission 'tpu.nodes.list' denied", NeedsPerson, "give the caller roles/tpu.admin on the project"),
    ],
)
def test_a_look_without_a_daemon_ends_with_the_error_of_the_listing(
    run: Run, cloud: EmulatorServer, code: int, said: str, kind: type[CloudError], advice: str
) -> None:
    with cloud.lock:
        cloud.world.operator.fail_next("ListNodes", code, said)
    with standalone(resolve(os.environ)) as here:
        here.runtime.engine.list_project("emulated")
        with pytest.raises(kind) as failed:
            here.observe()
    assert (failed.value.code, failed.value.message) == (code, f"listing emulated failed: {said}")
    assert failed.value.advice == advice
    with cloud.lock:
        cloud.world.operator.fail_next("ListNodes", code, said)
    done = run("gc")
    line = f"tpucare: nothing was listed: listing emulated failed: {said}"
    assert (done.code, done.err) == (Exit.CLOUD, f"{line} -> {advice}\n" if advice else f"{line}\n")


# --- what an edit changes ---------------------------------------------------------------------------------------------


def test_apply_says_what_it_changed_and_plan_of_a_file_what_it_would(
    run: Run, cloud: EmulatorServer, pod: Path, tmp_path: Path
) -> None:
    state = Path(os.environ["TPUCARE_STATE"])
    assert run("plan", str(pod)).out == ("pod: new, 1 slot\napply would request 1 node: v2-8 in us-central1-a\n")
    assert not state.exists(), "no owner, no key, no store"
    assert run("apply", str(pod)).out == "pod: new, 1 slot\n"
    assert run("apply", str(pod)).out == "pod: unchanged, 1 slot\n"
    pod.write_text(fleet_text(run="python3 other.py", count=2).replace("v2-8", "v3-8"))
    want = "pod: changed, 2 slots\n  count: 1 -> 2\n  tpu.type: v2-8 -> v3-8\n  job.run: python3 train.py -> "
    would = run("plan", str(pod)).out
    assert would.startswith(want)
    assert "live runs keep their old job" in would
    assert run("plan", str(pod)).out == would, "a plan changes nothing"
    assert run("apply", str(pod)).out.startswith(want)
    assert run("plan", "missing.yaml").code == Exit.CONFIG


# --- what one types by mistake, or out of habit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["status", "--state", "X"], ["--state", "X", "status"]),
        (["status", "--emulator=E", "pod", "--watch"], ["--emulator=E", "status", "pod", "--watch"]),
        (
            ["exec", "pod-0", "--project", "p", "--", "echo", "--state", "X"],
            ["--project", "p", "exec", "pod-0", "--", "echo", "--state", "X"],
        ),
        (["ssh", "pod-0", "echo", "--state"], ["ssh", "pod-0", "echo", "--state"]),
        (["ssh", "--state", "X", "pod-0", "--project"], ["--state", "X", "ssh", "pod-0", "--project"]),
        (["plan", "--state"], ["--state", "plan"]),
    ],
)
def test_flags_of_the_program_may_stand_behind_the_command(words: list[str], want: list[str]) -> None:
    assert with_flags_first(words) == want


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--worker", "2", "--", "echo", "x"], (2, ["echo", "x"])),
        (["-w", "1"], (1, [])),
        (["-L", "1:h:1", "--worker=3"], (3, ["-L", "1:h:1"])),
        (["-L", "1:h:1", "--", "x"], (None, ["-L", "1:h:1", "--", "x"])),
        (["--", "echo", "--worker", "2"], (None, ["echo", "--worker", "2"])),
        ([], (None, [])),
    ],
)
def test_the_worker_of_ssh_may_stand_behind_the_slot(words: list[str], want: tuple[int | None, list[str]]) -> None:
    assert split_worker(words) == want


@pytest.mark.parametrize(("word", "meant"), [("delete", "tpucare down FLEET"), ("list", "tpucare status")])
def test_a_word_of_another_tool_is_answered_with_ours(run: Run, word: str, meant: str) -> None:
    done = run(word, "pod")
    assert (done.code, meant in done.err) == (Exit.USAGE, True)
    assert all(known not in HOMES for known in OTHER_WORDS)


def test_a_first_look_says_how_to_begin(run: Run) -> None:
    done = run("status")
    assert (done.code, done.err) == (0, "")
    assert "tpucare init" in done.out


def test_a_name_that_nobody_knows_is_said_so(run: Run, cloud: EmulatorServer, pod: Path) -> None:
    assert run("apply", str(pod)).code == 0
    for words in (("logs", "pot"), ("events", "pot"), ("status", "pot"), ("down", "pot")):
        done = run(*words)
        assert (done.code, done.out) == (Exit.FAILED, "")
        assert done.err.startswith("tpucare: no fleet or slot pot; nearest: pod"), words


def test_init_fills_in_the_name_and_writes_over_nothing(run: Run, tmp_path: Path) -> None:
    assert "checkpoint: gs://my-bucket/mine " in run("init", "mine").out
    assert "checkpoint: gs://my-bucket/mine/{slot}" in run("init", "mine", "--template", "many").out
    for name in ("My Run", "pod-1"):
        assert run("init", name).code == Exit.CONFIG
    path = tmp_path / "mine.yaml"
    assert run("init", "mine", "-o", str(path)).code == 0
    assert path.read_text() == run("init", "mine").out
    done = run("init", "other", "-o", str(path))
    assert (done.code, "exists already" in done.err) == (Exit.FAILED, True)


def test_down_without_a_daemon_cares_for_the_store(run: Run, cloud: EmulatorServer, pod: Path, tmp_path: Path) -> None:
    marks = []
    for words in (("apply", str(pod)), ("pause", "pod"), ("down", "pod", "--yes")):
        assert run(*words).code == 0
        with open_reader(tmp_path / "state") as store:
            marks.append(store.marked)
    made, paused, down = marks
    assert made is not None
    assert paused == made, "an order alone is no care"
    assert down is not None
    assert down > made


def test_down_all_takes_every_fleet_down(run: Run, cloud: EmulatorServer, pod: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(fleet_text("other"))
    assert run("apply", str(pod)).code == run("apply", str(other)).code == 0
    assert run("down").code == run("down", "pod", "--all").code == Exit.USAGE
    done = run("down", "--all", "--yes")
    assert (done.code, done.out) == (0, "other: all its nodes are deleted\npod: all its nodes are deleted\n")
    assert run("down", "--all").out == "no fleet is up\n"


@pytest.mark.parametrize("has_daemon", [False, True])
def test_down_of_a_cluster_takes_its_pools_down_and_no_other_fleet(
    has_daemon: bool, run: Run, cloud: EmulatorServer, pod: Path, tmp_path: Path
) -> None:
    def up() -> list[str]:
        answer = json.loads(run("status", "--json").out)
        return sorted(row["fleet"] for row in answer["fleets"] if row["wish"] == "up")

    for name, key in (("lab", ""), ("big", "cluster: lab"), ("far", "cluster: other")):
        path = tmp_path / f"{name}.yaml"
        count = "{min: 0, max: 2}" if name == "lab" else 1
        tpu = "{type: v3-32, zones: [us-central1-a], network: {external_ips: false}}"
        path.write_text(f"name: {name}\ncount: {count}\ntpu: {tpu}\nray: {{{key}}}\n")
        assert run("apply", str(path)).code == 0
    assert run("apply", str(pod)).code == 0
    with contextlib.ExitStack() as stack:
        if has_daemon:
            log = stack.enter_context((tmp_path / "daemon.log").open("wb"))
            command = [sys.executable, "-m", "tpucare.cli", "daemon"]
            daemon = Process(subprocess.Popen(command, stdout=log, stderr=log), tmp_path / "daemon.log")
            stack.callback(daemon.end)
            eventually(lambda: is_running(tmp_path / "state" / "control.sock"), 30)
        done = run("down", "--cluster", "lab")
        assert (done.code, done.out) == (Exit.FAILED, "")
        assert has_daemon or "Whether hosts of big, lab work for jobs is not known: no daemon answers. " in done.err
        assert "The head of lab goes on. Stop the runs of big, lab and delete their nodes?" in done.err
        assert up() == ["big", "far", "lab", "pod"]
        done = run("down", "--cluster", "lab", "--yes")
        assert (done.code, done.out.splitlines()) == (
            0,
            [
                "big: all its nodes are deleted",
                "lab: all its nodes are deleted",
                "the head of lab goes on; Ctrl-C ends it, or `systemctl stop tpucare-ray@lab`",
            ],
        )
        assert up() == ["far", "pod"]
        assert run("down", "--cluster", "lab").out == "no pool of lab is up\n"
        done = run("down", "--cluster", "labs", "--yes")
        assert (done.code, "there are lab, other" in done.err) == (Exit.CONFIG, True)
        assert run("down", "--cluster", "other", "--yes", "--json").code == 0
        assert up() == ["pod"]


def test_logs_name_what_is_kept(run: Run, tmp_path: Path) -> None:
    keeper = LogKeeper(tmp_path / "state" / "logs")
    for worker in (0, 1, 2):
        keeper.append("pod-0", 1, "pod-0-a0.1", worker, b"one\ntwo\nthree\n")
    keeper.append("pod-0", 1, "pod-0-a0.2", 0, b"four\n")
    assert run("logs", "pod", "--list").out == ("attempt 1: pod-0-a0, 2 runs, workers 0 to 2, last line 0 s ago\n")
    assert run("logs", "pod", "--tail", "2").out == "--- run pod-0-a0.2 ---\nfour\n"
    assert run("logs", "pod", "--tail", "0").out == ""
    for words, text in (
        (("-w", "5"), "pod-0 has no kept log of worker 5 in attempt 1; kept: workers 0 to 2"),
        (("-a", "2", "-w", "1"), "pod-0 has no kept log of attempt 2; kept: 1"),
    ):
        done = run("logs", "pod", *words)
        assert (done.code, done.err) == (Exit.FAILED, f"tpucare: {text}\n")


def test_following_a_log_ends_with_the_slot(run: Run, cloud: EmulatorServer, pod: Path, tmp_path: Path) -> None:
    keeper = LogKeeper(Path(os.environ["TPUCARE_STATE"]) / "logs")
    assert run("apply", str(pod)).code == 0
    assert run("pause", "pod-0").code == run("down", "pod-0", "--yes").code == 0
    keeper.append("pod-0", 1, "pod-0-a0.1", 0, b"one\n")
    done = run("logs", "pod-0", "--follow")
    assert (done.code, done.out, done.err) == (0, "--- run pod-0-a0.1 ---\none\n", "pod-0: down\n")


def test_the_order_of_places_is_a_line_for_each_and_only_where_there_are_several(
    run: Run, cloud: EmulatorServer, pod: Path
) -> None:
    pod.write_text(fleet_text().replace("[us-central1-a]", "[us-central1-a, us-central1-b]"))
    would = run("plan", str(pod)).out.splitlines()
    assert would[2:] == run("apply", str(pod)).out.splitlines()[1:]
    title, *lines = would[2:]
    assert title == "pod asks its places by worth:"
    assert [line.split()[:3] for line in lines] == [["1", "us-central1-a", "v2-8"], ["2", "us-central1-b", "v2-8"]]
    assert lines[0].endswith("next: most worth")
    assert run("plan").out.splitlines()[1:] == would[2:]
    assert run("plan", "--json").json["places"][0]["turn"] == "next"
    shown = run("places", "pod")
    assert (shown.code, shown.out.splitlines()[0]) == (Exit.OK, title)
    assert len(shown.out.splitlines()) == 4
    assert run("places", "--json").json["places"][1]["zone"] == "us-central1-b"
    assert run("places", "pot").code == Exit.FAILED
    assert nodes(cloud) == []
