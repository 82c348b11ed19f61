"""
What the threat page promises, tried: hostile names through real scripts, modes of files, other people of the machine,
and text from workers on its way to a terminal. Host keys are tried in test_remote, secrets in tests/e2e.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.bench_worker import eventually, node
from tests.kits.service import REPOSITORY, MachinelessDeployment, fleet_text, machineless_deployment
from tpucare.adapters.runner.logs import LogKeeper
from tpucare.adapters.state.store import open_store
from tpucare.adapters.system import machine_id
from tpucare.fleetfile.parse import parse
from tpucare.model.errors import ConfigError
from tpucare.model.memory import End, FleetRecord, Memory
from tpucare.model.resources import Event, Job
from tpucare.model.text import plain, plain_lines

NOW = datetime(2026, 11, 21, tzinfo=UTC)
NOBODY = 65534

SHELL = '\'; touch pwned; echo "$(touch pwned)`touch pwned`" \\ $HOME * ~ ? [a] {b,c} !x & | < > # % ^ () é😀'
BRANCH = "b;$(touch${IFS}pwned)`touch${IFS}pwned`'\"&|<>()!#%{x}é"
ESCAPES = "\x1b]0;pwned\x07\x1b[2J\x1b[31m\x9b1m\x1bP+q\x1b\\\u202e\u2066ok\rno"


# --- names and values through the scripts on a worker ----------------------------------------------------------------


def commit(folder: Path, branch: str) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)

    folder.mkdir(parents=True)
    git("init", "-q", "-b", "main")
    (folder / "here.txt").write_text("fetched")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("checkout", "-q", "-b", branch)


@pytest.mark.machines
@pytest.mark.skipif(shutil.which("screen") is None, reason="screen is not installed")
def test_hostile_values_go_through_every_script_unharmed(tmp_path: Path) -> None:
    """Repository, branch, file names, variables, checkpoint and slot, from the launch to the run, with real bash."""
    repository = tmp_path / f"r {SHELL.replace('/', '')}"
    commit(repository, BRANCH)
    long, lines = "x" * 10_000 + SHELL, f"one\n{SHELL}\n\ttwo\r\n"
    report = "import json, os, sys; json.dump(dict(os.environ, here=open('here.txt').read()), open(sys.argv[1], 'w'))"
    with node() as one:
        out = tmp_path / "said.json"
        job = Job(
            repository=str(repository),
            branch=BRANCH,
            setup="cp here.txt was_set_up",
            run=f"test -f was_set_up && {sys.executable} -c \"{report}\" '{out}'",
            files={f"conf/{SHELL.replace('/', '')}.yaml": b"a: 1"},
            env={"LONG": long, "LINES_": lines, "SHELLS": SHELL},
            checkpoint=f"{one.homes[0]}/{SHELL}",
        )
        order = replace(one.order(job), slot=SHELL, fleet=SHELL)
        assert one.launcher.launch(order).complete
        eventually(lambda: one.ended().exit_status is not None)
        assert one.ended().exit_status == 0, one.log()
        said = json.loads(out.read_text())
        assert (said["LONG"], said["LINES_"], said["SHELLS"]) == (long, lines, SHELL)
        assert said["here"] == "fetched"
        assert (said["TPUCARE_SLOT"], said["TPUCARE_CHECKPOINT"]) == (SHELL, job.checkpoint)
        work = one.homes[0] / ".tpucare" / "work"
        assert (work / next(iter(job.files))).read_bytes() == b"a: 1"
        everywhere = [path.name for root in (one.remote.root, tmp_path) for path in root.rglob("*")]
        assert "pwned" not in everywhere
        folders = [one.homes[0] / ".tpucare", one.folder()]
        assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folders] == [0, 0]
        open_files = [path for path in one.folder().rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
        assert open_files == []


names = st.text(max_size=40) | st.sampled_from(
    [SHELL, BRANCH, ESCAPES, "x" * 10_000, "a\nb", "../../etc", "-rf", "{slot}"]
)


@settings(max_examples=60)
@given(name=names, branch=names, variable=names)
def test_a_fleet_is_refused_or_its_names_are_safe(name: str, branch: str, variable: str) -> None:
    declared = yaml.safe_load(fleet_text()) | {"name": name, "project": "my-project"}
    declared["job"] |= {"repository": "https://example.org/r", "branch": branch, "env": {variable: SHELL}}
    try:
        fleet = parse(yaml.safe_dump(declared, allow_unicode=True), file="f.yaml")
    except ConfigError as error:
        unsafe = [line for line in str(error).split("\n") if not line.isprintable()]
        if unsafe:
            raise AssertionError(unsafe) from error
        return
    (slot,) = fleet.slots()
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,23}-0", slot.name)
    assert slot.job is not None
    assert not slot.job.branch.startswith("-")
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) for key in slot.job.env)


# --- files of the daemon, and other people of its machine ------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[Path]:
    """A folder that everybody on this machine may enter, as /var/lib is."""
    folder = Path(tempfile.mkdtemp(prefix="tcsec", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def open_home(shared_folder: Path) -> Iterator[MachinelessDeployment]:
    """A daemon that was started by somebody who hides nothing: umask 0."""
    mask = os.umask(0)
    try:
        with machineless_deployment(shared_folder) as home:
            home.write(fleet_text())
            home.started("--log-level", "debug")
            home.until(lambda: home.slot().get("state") == "READY")
            LogKeeper(home.state / "logs").append("pod-0", 1, "pod-0-a0.1", 0, b"said\n")
            yield home
    finally:
        os.umask(mask)


def test_files_of_the_state_folder_are_closed(open_home: MachinelessDeployment) -> None:
    found = {path: path.stat() for path in [open_home.state, *open_home.state.rglob("*")]}
    assert len(found) >= 6
    assert any(stat.S_ISSOCK(one.st_mode) for one in found.values())
    too_open = [f"{path}: {stat.filemode(one.st_mode)}" for path, one in found.items() if one.st_mode & 0o077]
    assert too_open == [], "\n".join(too_open)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_store_key_and_socket_are_closed_to_others(open_home: MachinelessDeployment) -> None:
    targets = [path for path in open_home.state.rglob("*") if not path.is_dir()]
    assert {"control.sock", "tpucare.sqlite", "owner"} <= {path.name for path in targets}
    code = """
import os, socket, stat, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    for how in (os.O_RDONLY, os.O_RDWR):
        try:
            os.open(path, how)
        except OSError as error:
            continue
        print("opened", path)
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("connected", path)
    except OSError:
        pass
"""
    words = [sys.executable, "-c", code, str(NOBODY), *map(str, targets)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    # None of them leans on the folder alone.
    open_home.state.chmod(0o755)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    finally:
        open_home.state.chmod(0o700)
    assert done.stdout == ""


# --- what a worker or the cloud says, on its way to a terminal -------------------------------------------------------


def obeyed(text: str) -> list[str]:
    """Characters in *text* that a terminal would do something at, lines apart."""
    return [char for char in text if char not in "\n\t" and not char.isprintable()]


@settings(max_examples=200)
@given(st.text(max_size=200) | st.lists(st.sampled_from([*ESCAPES, "\x1b[", "m", "\x07", "a"])).map("".join))
def test_no_text_reaches_a_terminal_as_it_came(text: str) -> None:
    for told in (plain(text), plain_lines(text)):
        assert not [char for char in told if char in "\x1b\x9b\x07\r\u202e\u2066" or char < "\t"]
    assert "\n" not in plain(text)


@pytest.mark.parametrize(
    "words", [("events",), ("status",), ("logs", "pod-0"), ("events", "--json"), ("status", "--json")]
)
def test_commands_print_nothing_that_a_terminal_obeys(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A worker, a label or the API wrote it; store and logs keep it."""
    with open_store(tmp_path / "state", machine_id=machine_id(), now=NOW) as store:
        store.save_fleet(FleetRecord("pod", fleet_text(), str(tmp_path), NOW))
        memory = replace(Memory("pod"), end=End.FAILED, end_why=f"exited: {ESCAPES}", ended_at=NOW)
        store.save({"pod-0": memory}, [Event(NOW, "person", f"failed: {ESCAPES}", "pod-0", ESCAPES)])
    LogKeeper(tmp_path / "state" / "logs").append("pod-0", 1, "pod-0-a0.1", 0, f"{ESCAPES}\nstep 1\n".encode())
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TPUCARE_")}
    env = {**kept, "TPUCARE_STATE": str(tmp_path / "state"), "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tpucare.cli", *words]
    done = subprocess.run(command, env={**env, "TPUCARE_PROJECT": "p"}, capture_output=True, check=False, timeout=60)
    told = done.stdout.decode() + done.stderr.decode()
    assert "ok" in told, told
    assert obeyed(told) == []


def test_a_log_that_floods_is_bounded(tmp_path: Path) -> None:
    keeper = LogKeeper(tmp_path, limit_bytes_per_slot=1 << 20)
    for number in range(64):
        keeper.append("pod-0", 1, "pod-0-a0.1", 0, b"\x1b[2J" + b"y" * (1 << 16), start=number * 70_000)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 2 << 20
    assert b"\x1b" not in keeper.read("pod-0", 1)


@pytest.mark.parametrize("slot", ["..", "../../../tmp/pwned", "/tmp/pwned", "a/b", "", ESCAPES, "x" * 10_000])
def test_logs_stay_in_their_folder_whatever_the_slot_is_called(tmp_path: Path, slot: str) -> None:
    keeper = LogKeeper(tmp_path / "state" / "logs")
    keeper.append(slot, 1, "t-a0.1", 0, b"said\n")
    outside = [
        path for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "state" / "logs" not in path.parents
    ]
    assert outside == []
    assert not Path("/tmp/pwned").exists()


def test_the_daemon_listens_on_no_network(open_home: MachinelessDeployment) -> None:
    """Its only door is the socket in its state folder."""
    pid = open_home.processes[0].popen.pid
    inodes = {_target(pid, fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(fields[1])
    assert listening == []


def _target(pid: int, fd: str) -> str:
    """Empty when it was closed since it was listed."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""
