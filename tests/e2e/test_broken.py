"""
The real thing, broken on purpose: its process, its store, its API, its workers, and the job itself.

What is played elsewhere: API outages (test_nothing_happens), refused keys and changed host keys (test_troubles), kills
(test_kills, test_failpoints), floods and fork-happy jobs on one worker (test_runner).
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.kits.deployment import TWO_HOSTS, Deployment, deployment
from tests.kits.service import fleet_text, machineless_deployment

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

FORKS = """\
trap '' TERM
(trap '' TERM; while :; do sleep 1000 & sleep 0.05; done) &
for n in $(seq 100000); do echo "step $n"; sleep 0.2; done
"""
FLOOD = """\
for n in $(seq 100000); do echo "step $n"; head -c 5000000 /dev/zero | tr '\\0' 'x'; echo; sleep 0.2; done
"""


def await_end(home: Deployment) -> int:
    """The daemon ends by itself; its exit status."""
    assert home.daemon is not None
    status = home.daemon.wait(60)
    home.daemon = None
    home.restarts.append(home.server.now())
    return status


def last_line(home: Deployment) -> str:
    return home.daemon_log.read_text().splitlines()[-1]


# --- the store -------------------------------------------------------------------------------------------------------


def cut(home: Deployment) -> None:
    path = home.state / "tpucare.sqlite"
    os.truncate(path, path.stat().st_size // 2)
    for log in home.state.glob("tpucare.sqlite-*"):
        log.unlink()


def overwrite(home: Deployment) -> None:
    (home.state / "tpucare.sqlite").write_bytes(random.Random(1).randbytes(50_000))


def take_away(home: Deployment) -> None:
    for path in home.state.glob("tpucare.sqlite*"):
        path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("harm", [cut, overwrite, take_away])
def test_a_store_that_was_harmed_while_nobody_looked(tmp_path: Path, harm: object) -> None:
    """It is not believed; moved out of the way, what lives is adopted, and no run is touched."""
    with deployment(tmp_path) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        home.kill()
        assert callable(harm)
        harm(home)
        if (home.state / "tpucare.sqlite").exists():
            home.start(ready=False)
            assert await_end(home) == 5
            assert "tpucare.sqlite" in last_line(home)
            take_away(home)
        home.start()
        home.await_(lambda: home.row("pod-0")["phase"] == "run", "the run is adopted")
        assert home.ask("status")["store_lost"] is True
        assert home.token("pod-0") == "pod-0-a0.1"
        assert list(home.runs()) == ["pod-0-a0.1"]
        assert home.audit("DeleteNode") == []


@pytest.mark.slow
def test_a_store_that_cannot_grow(tmp_path: Path) -> None:
    """As on a full disk, or one that turned read-only: what cannot be written is not done, and the daemon ends."""
    with deployment(tmp_path) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        assert home.daemon is not None
        psutil.Process(home.daemon.pid).rlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        home.order("preempt", selector="pod-0")
        assert await_end(home) == 5
        assert not [call for call in home.audit("CreateNode") if str(call["name"]).endswith("a1")]
        home.start()
        home.await_training("pod-0", "pod-0-a1")


@pytest.mark.slow
def test_a_store_that_is_deleted_under_the_daemon(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        take_away(home)
        home.order("preempt", selector="pod-0")
        assert await_end(home) == 5
        home.start()
        home.await_training("pod-0")
        home.await_(lambda: len(home.names()) == 1, "one node")


@pytest.mark.slow
def test_a_copied_store_on_the_same_machine(tmp_path: Path) -> None:
    """Whoever copies the state folder has two daemons of one owner: one's runs are not the other's to end."""
    with deployment(tmp_path) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        shutil.copytree(home.state, tmp_path / "copy", ignore=shutil.ignore_patterns("*.sock"))
        copied = {"TPUCARE_STATE": str(tmp_path / "copy")}
        plan = home.cli("plan", "--json", environment=copied, want=None)
        assert plan.status == 0 or "copied" in plan.err or "machine" in plan.err
        assert list(home.runs()) == ["pod-0-a0.1"]
        assert len(home.audit("CreateNode")) == 1


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stopped_for_a_minute(tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT: no timeout fires for time in which nobody looked; what happened meanwhile is made good."""
    with deployment(tmp_path) as home:
        care = {"unreachable_after": "10s", "stalled_after": "10s", "boot_timeout": "30s"}
        home.declare("pod", count=2, care=care)
        home.start()
        home.await_training("pod-0")
        home.await_training("pod-1")
        assert home.daemon is not None
        home.daemon.send_signal(signal.SIGSTOP)
        home.order("preempt", selector="pod-1")
        time.sleep(60)
        home.daemon.send_signal(signal.SIGCONT)
        home.await_training("pod-1", "pod-1-a1")
        home.await_(lambda: sorted(home.runs()) == ["pod-0-a0.1", "pod-1-a1.1"], "two runs")
        assert home.attempts("pod-0") == 1


# --- the API ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nonsense(answers: list[bytes]) -> Iterator[int]:
    """A port where every caller gets one of *answers*, and is hung up on."""
    listener = socket.create_server(("127.0.0.1", 0))
    rng = random.Random(7)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                channel, _ = listener.accept()
                with channel, contextlib.suppress(OSError):
                    channel.settimeout(1)
                    channel.recv(4096)
                    channel.sendall(rng.choice(answers))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_an_api_that_answers_nonsense(tmp_path: Path) -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\n\r\n<html>\x1b[2J</html>"
    settings_frame = b"\0\0\0\4\0\0\0\0\0"
    answers = [page, random.Random(1).randbytes(3000), settings_frame + b"\xff" * 500, b""]
    with nonsense(answers) as port, machineless_deployment(tmp_path) as home:
        home.write(fleet_text())
        daemon = home.started(TPUCARE_ENDPOINT=f"127.0.0.1:{port}")
        home.until(lambda: "listing" in daemon.text, 40)
        assert "\x1b" not in daemon.text
        assert "Traceback" not in daemon.text
        assert "no observation" in home.slot()["why"]
        assert daemon.end(seconds=15) == 0
        assert home.nodes() == []


# --- the workers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_accepts_and_says_nothing(tmp_path: Path) -> None:
    with deployment(tmp_path, pace={"TPUCARE_PROBE": "1"}) as home:
        home.declare("pod", count=2, care={"unreachable_after": "8s"})
        home.start()
        home.await_training("pod-0")
        home.await_training("pod-1")
        path = home.path("pod-0-a0")
        home.machines.hang(path, 0).result(10)
        home.cut_connections("pod-0-a0")
        home.await_training("pod-0", "pod-0-a1", 150)
        assert "silent" in home.await_event("delete", node="pod-0-a0").text
        assert home.attempts("pod-1") == 1
        home.allow_deletes("pod-0")


@pytest.mark.slow
def test_a_worker_that_never_comes_up(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.order("miss-worker", worker=1)
        home.declare("pod", kind=TWO_HOSTS, care={"boot_timeout": "15s"})
        home.start()
        home.await_training("pod-0", "pod-0-a1", 120)
        assert not [token for token in home.runs() if token.startswith("pod-0-a0")]
        home.allow_deletes("pod-0")


# --- the job ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("job", [FORKS, FLOOD], ids=["ignores SIGTERM and forks for ever", "floods its log"])
def test_a_job_that_does_not_behave(tmp_path: Path, job: str) -> None:
    with deployment(tmp_path) as home:
        home.declare("bad", run=job, live=False)
        home.declare("good")
        home.start()
        home.await_training("bad-0")
        home.await_training("good-0")
        home.await_steps("bad-0", least=30) if job is FORKS else home.await_training("bad-0")
        home.order("preempt", selector="bad-0")
        home.await_training("bad-0", "bad-0-a1")
        home.allow_deletes("bad-0")
        home.cli("down", "bad", "--yes")
        assert set(home.runs()) == {"good-0-a0.1"}
        assert home.names() == ["good-0-a0"]
        kept = sum(path.stat().st_size for path in (home.state / "logs").rglob("*") if path.is_file())
        assert kept < 64 << 20
