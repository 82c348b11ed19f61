"""What a run does on a worker, and how it ends: real screen, real processes, no SSH."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest

from tests.kits.bench_worker import Node, eventually, node
from tests.kits.local_server import serving
from tpucare.adapters.runner import scripts
from tpucare.model.resources import Job
from tpucare.model.runs import Failure, Phase

pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(shutil.which("screen") is None, reason="screen is not installed"),
]


@pytest.fixture
def one() -> Iterator[Node]:
    with node() as made:
        yield made


def pid_in(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def is_live(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_run_that_succeeds(one: Node) -> None:
    one.start('echo "hello from $TPUCARE_WORKER of $TPUCARE_WORKERS, $TPUCARE_RUN"')
    report = one.ended()
    assert (report.phase, report.exit_status, report.failure) == (Phase.EXITED, 0, Failure.NONE)
    assert (report.signalled, report.token, report.last_number) == (False, one.token(), 1)
    assert f"hello from 0 of 1, {one.token()}" in one.log()


@pytest.mark.parametrize(
    ("run", "status", "failure"),
    [
        ("exit 42", 42, Failure.CRASH),
        ("kill -9 $$", 137, Failure.CRASH),
        ("echo 'The TPU is already in use by process with pid 7.'; exit 1", 1, Failure.DIRTY_HOST),
        ("echo 'cp: error writing: No space left on device'; exit 1", 1, Failure.DISK_FULL),
    ],
)
def test_how_a_run_failed(one: Node, run: str, status: int, failure: Failure) -> None:
    one.start(run)
    report = one.ended()
    assert (report.exit_status, report.failure) == (status, failure)


def test_a_setup_that_fails(one: Node) -> None:
    assert one.launch(Job(run="true", setup="false; true")).complete
    report = one.ended()
    assert (report.exit_status, report.failure) == (1, Failure.SETUP)


AWAIT_PID = "while [ ! -s pid ]; do sleep 0.01; done"


@pytest.mark.parametrize(
    "leave",
    [
        "sleep 300 & echo $! >pid",
        "setsid sh -c 'echo $$ >pid; exec sleep 300' &\n" + AWAIT_PID,
        "nohup sleep 300 >/dev/null 2>&1 & echo $! >pid",
        "(setsid sh -c 'trap \"\" TERM HUP; (echo $$ >pid; while :; do sleep 1; done) & ' &)\n" + AWAIT_PID,
        "setsid env -i sh -c 'echo $$ >pid; exec 1>&- 2>&-; exec sleep 300' &\n" + AWAIT_PID,
    ],
    ids=["child", "setsid", "nohup", "double fork without TERM", "without environment"],
)
def test_what_outlives_the_main_process_is_gone_before_the_exit_is_told(
    one: Node, leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.start(leave + "\nexit 0")
    pid = pid_in(one.homes[0] / ".tpucare/work/pid")
    assert one.ended().exit_status == 0
    assert not is_live(pid)


def test_stop_sends_sigterm_and_the_run_may_save(one: Node) -> None:
    one.start("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    eventually(lambda: "ready" in one.log())
    assert one.stop(grace=30).quiet
    report = one.ended()
    assert (report.exit_status, report.signalled) == (0, True)
    assert "saved" in one.log()


def test_training_below_a_shell_has_its_grace_though_the_shell_dies_at_once(one: Node) -> None:
    below = "trap 'sleep 1; echo saved >saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    one.start(f"cat >below.sh <<'X'\n{below}\nX\nbash -c 'bash below.sh; true'", grace=30)
    eventually(lambda: "ready" in one.log())
    assert one.stop(grace=30).quiet
    assert (one.homes[0] / ".tpucare/work/saved").exists()


def test_a_run_that_ignores_sigterm_is_killed_after_the_grace(one: Node) -> None:
    one.start("trap '' TERM; echo ready; while :; do sleep 0.05; done")
    eventually(lambda: "ready" in one.log())
    assert one.stop(grace=0.3).quiet
    report = one.ended()
    assert (report.exit_status, report.signalled, report.alive) == (137, True, False)


def test_a_run_whose_runner_was_killed_is_seen_alive_and_can_be_stopped(one: Node) -> None:
    one.start("trap '' PIPE; echo $$ >pid; while :; do sleep 0.05; done")
    pid = pid_in(one.homes[0] / ".tpucare/work/pid")
    os.kill(json.loads((one.folder() / "phase").read_text())["pid"], 9)
    eventually(lambda: not is_live(json.loads((one.folder() / "phase").read_text())["pid"]))
    report = one.probe()
    assert (report.alive, report.exit_status) == (True, None)
    assert not one.launch(Job(run="true"), 2).complete
    assert one.stop(grace=0.2).quiet
    assert not is_live(pid)
    report = one.probe()
    assert (report.alive, report.phase, report.exit_status) == (False, Phase.RUN, None)


def test_stacks_of_a_hanging_run_come_into_its_log(one: Node) -> None:
    one.start("echo ready; sleep 300")
    eventually(lambda: "ready" in one.log())
    assert one.stop(grace=1, stacks=True).quiet
    assert "stacks of its processes" in one.log()
    assert "sleep 300" in one.log()


def test_a_relaunch_skips_the_setup_until_something_of_it_changes(one: Node) -> None:
    job = Job(run="true", setup="echo once >>setups", files={"a": b"1"})
    for number in (1, 2):
        assert one.launch(job, number).complete
        assert one.ended().exit_status == 0
    setups = one.homes[0] / ".tpucare/work/setups"
    assert setups.read_text() == "once\n"
    assert one.launch(Job(run="cat a", setup="echo once >>setups", files={"a": b"2"}), 3).complete
    assert one.ended().last_number == 3
    assert setups.read_text() == "once\nonce\n"


def test_a_flood_is_bounded_and_the_run_goes_on(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "LOG_BYTES", 1 << 20)
    one.start("yes flood | head -c 19999998; echo 'step 77'; echo the end")
    # Unasked until then: each probe brings a part, and a slow machine has time for many.
    eventually((one.folder() / "exit").exists)
    report = one.ended()
    assert (report.exit_status, report.step) == (0, 77)
    assert report.log_bytes > 19_999_998
    assert sum(path.stat().st_size for path in one.folder().glob("log.*")) < 1.6e6
    log = one.log()
    assert "the end" in log
    assert "were not fetched" in log
    assert len(log) < 300_000


def test_a_full_disk_is_told_and_ends_neither_runner_nor_log(one: Node) -> None:
    home = one.homes[0]
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tpucare-test", str(home)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs a privilege that is missing here")
    try:
        one.start("dd if=/dev/zero of=big bs=64k || true; head -c 500000 /dev/zero | tr '\\0' x; echo; exit 5")
        report = one.ended()
        assert (report.exit_status, report.failure) == (5, Failure.DISK_FULL)
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_steps_and_checkpoints_are_seen(one: Node) -> None:
    one.start(
        "mkdir -p ckpt/10 ckpt/200 ckpt/300.orbax-checkpoint-tmp; printf 'step 1\\nstep: 12\\nstep 12'; sleep 300"
    )
    eventually(lambda: one.probe().step == 12)
    assert one.probe(checkpoint="ckpt").checkpoint == 200
    # A pattern that never ends costs the step, not the probe.
    assert one.probe(progress="(s+)+$x").token == one.token()


def test_busy_chips_forbid_a_start_and_are_told(tmp_path: Path) -> None:
    chip = tmp_path / "accel0"
    chip.touch()
    with node(TPUCARE_DEVICE_GLOB=f"{tmp_path}/accel*") as made, chip.open():
        assert made.probe().chips_free  # A worker that never had a run is not asked in depth.
        (error,) = made.launch(Job(run="true")).workers
        assert "chips are not free" in str(error)
        report = made.probe()
        assert (report.alive, report.chips_free) == (True, False)


def test_a_lock_file_of_libtpu_that_nobody_holds_is_removed_at_a_launch(tmp_path: Path) -> None:
    """It survives a SIGKILL, and another user's keeps libtpu from loading: that looked like a dirty host."""
    (tmp_path / "accel0").touch()
    left = tmp_path / "libtpu_lockfile"
    left.touch()
    with node(TPUCARE_DEVICE_GLOB=f"{tmp_path}/accel*", TPUCARE_LIBTPU_LOCK=str(left)) as made:
        assert made.launch(Job(run=f"test ! -e {left}")).complete
        eventually(lambda: made.probe().exit_status == 0)


# --- the metadata server ---


class Metadata(http.server.ThreadingHTTPServer):
    """`instance/preempted` and `instance/maintenance-event`, with wait_for_change, as Compute Engine serves them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MetadataRequest)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.changed = threading.Condition()

    def handle_error(self, request: object, client_address: object) -> None:
        """A runner that ended while it waited has gone without reading its answer."""

    def change(self, entry: str, value: str) -> None:
        with self.changed:
            self.values[entry] = value
            self.changed.notify_all()


class MetadataRequest(http.server.BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        url = urlparse(self.path)
        entry, query = url.path.rpartition("/")[2], parse_qs(url.query)
        if self.headers["Metadata-Flavor"] != "Google":
            self.send_error(403)
            return
        with self.server.changed:
            if "wait_for_change" in query:
                self.server.changed.wait_for(lambda: self.server.values[entry] != query["last_etag"][0], 5)
            value = self.server.values[entry]
        self.send_response(200)
        self.send_header("ETag", value)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def metadata() -> AbstractContextManager[Metadata]:
    return serving(Metadata())


SAVE_ON_SIGTERM = """
trap 'echo told >>signals' TERM
echo ready
while [ ! -s "$TPUCARE_NOTICE" ] || [ ! -e go ]; do sleep 0.05 || true; done
cat "$TPUCARE_NOTICE"
"""


@pytest.mark.parametrize("sigterm", [True, False])
def test_a_preemption_gives_a_notice_and_one_sigterm(sigterm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "WATCH_AFTER_SECONDS", 0)
    with metadata() as server, node(GCE_METADATA_HOST=f"127.0.0.1:{server.server_port}") as made:
        assert made.launch(Job(run=SAVE_ON_SIGTERM), sigterm=sigterm).complete
        eventually(lambda: "ready" in made.log())
        server.change("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        eventually(lambda: made.probe().maintenance == "TERMINATE_ON_HOST_MAINTENANCE")
        server.change("preempted", "TRUE")
        eventually(lambda: made.probe().preempted)
        work = made.homes[0] / ".tpucare/work"
        if sigterm:
            eventually((work / "signals").exists)
        (work / "go").touch()
        report = made.ended()
        assert (report.exit_status, report.signalled, report.preempted) == (0, True, True)
        lines = (made.folder() / "notice").read_text().splitlines()
        assert [line.split()[1] for line in lines] == ["maintenance:", "preempted:"]
        signals = work / "signals"
        assert (signals.read_text() if signals.exists() else "") == ("told\n" if sigterm else "")
