"""The daemon as a process of its own against a served emulator: it begins, is told things, is killed, begins again."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.service import MachinelessDeployment, fleet_text, machineless_deployment
from tpucare.adapters.state.store import open_reader

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[MachinelessDeployment]:
    with machineless_deployment(tmp_path) as made:
        yield made


def ready(home: MachinelessDeployment, slot: str = "pod-0") -> bool:
    return bool(home.slot(slot).get("state") == "READY")


def test_nodes_outlive_the_daemon_and_the_next_one_adopts_them(home: MachinelessDeployment) -> None:
    home.write(fleet_text(count=2))
    daemon = home.started()
    home.until(lambda: ready(home, "pod-0") and ready(home, "pod-1"))
    assert daemon.end(signal.SIGTERM, seconds=8) == 0
    assert "nodes are left alive" in daemon.text
    assert not home.socket.exists()
    assert home.nodes() == ["pod-0-a0", "pod-1-a0"]
    second = home.started()
    home.until(lambda: ready(home))
    assert second.end(signal.SIGKILL) == -signal.SIGKILL
    third = home.started()
    home.until(lambda: ready(home))
    assert third.end(signal.SIGINT) == 0
    assert home.nodes() == ["pod-0-a0", "pod-1-a0"]
    assert len(home.calls("CreateNode")) == 2
    assert home.calls("DeleteNode") == []


def test_a_second_daemon_on_the_store_is_one_line_that_names_the_first(home: MachinelessDeployment) -> None:
    first = home.started()
    second = home.run("daemon", code=4)
    (line,) = second.stderr.strip().splitlines()
    assert str(first.popen.pid) in line
    assert home.status() is not None, "the first one is not disturbed"


def test_files_that_go_wrong_while_it_runs_change_nothing(home: MachinelessDeployment) -> None:
    path = home.write(fleet_text())
    daemon = home.started()
    home.until(lambda: ready(home))
    home.write("name: [", "bad.yaml")
    home.until(lambda: "bad.yaml" in daemon.text)
    path.write_text("")
    home.until(lambda: daemon.text.count("pod.yaml") > 1)
    shutil.rmtree(home.fleets)
    home.until(lambda: "cannot be read" in daemon.text)
    home.until(lambda: (home.status() or {})["slots"])
    assert ready(home)
    assert home.calls("DeleteNode") == []
    assert home.calls("CreateNode") == ["projects/emulated/locations/us-central1-a/nodes/pod-0-a0"]


def test_a_changed_file_is_taken_in_and_hup_reads_what_it_names(home: MachinelessDeployment) -> None:
    (home.fleets / "conf.txt").write_text("one")
    path = home.write(fleet_text() + "  files: {conf.txt: ./conf.txt}\n")
    daemon = home.started()
    path.write_text(fleet_text(count=3) + "  files: {conf.txt: ./conf.txt}\n")
    home.until(lambda: len((home.status() or {})["slots"]) == 3)
    (home.fleets / "conf.txt").write_text("two")
    before = daemon.text.count("accepted, 3 slots")
    daemon.popen.send_signal(signal.SIGHUP)
    home.until(lambda: daemon.text.count("accepted, 3 slots") > before)


def test_a_lost_store_adopts_what_lives_and_sweeps_nothing(home: MachinelessDeployment) -> None:
    home.write(fleet_text())
    home.write(fleet_text("old"), "old.yaml")
    first = home.started()
    home.until(lambda: ready(home) and ready(home, "old-0"))
    first.end()
    for path in home.state.glob("tpucare.sqlite*"):
        path.unlink()
    (home.fleets / "old.yaml").unlink()
    home.started()
    home.until(lambda: ready(home) and home.ask("gc")["strays"])
    status = home.status()
    assert status is not None
    assert status["store_lost"] is True
    assert [row["node"] for row in status["strays"]] == ["old-0-a0"]
    assert home.nodes() == ["old-0-a0", "pod-0-a0"]
    assert home.calls("DeleteNode") == []
    refused = home.run("gc", "--apply", "--yes", code=1)
    assert "the store was lost" in refused.stderr
    assert home.calls("DeleteNode") == []
    home.run("confirm", "--store", "--yes")
    assert (home.status() or {})["store_lost"] is False
    refused = home.run("gc", "--apply", code=1)
    assert "--yes" in refused.stderr
    assert home.json("gc", "--apply", "--yes")["deleting"] == ["old-0-a0"]
    home.until(lambda: home.nodes() == ["pod-0-a0"])


def test_garbage_at_the_control_socket_does_not_disturb_it(home: MachinelessDeployment) -> None:
    home.write(fleet_text())
    daemon = home.started()
    rng = random.Random(11)
    lines = [
        b"\n",
        b"garbage\n",
        b'{"do": "down"}\n',
        b'{"do": "down", "target": "\\ud800"}\n',
        b'{"do": "apply", "text": "\\u0000", "folder": "/\\u0000"}\n',
        b'{"do": "events", "after": 99999999999999999999999, "limit": -5}\n',
        b'{"do": "status", "target": "' + b"x" * 3_000_000 + b'"}\n',
        b'{"do": "stat',
        *(rng.randbytes(rng.randrange(1, 200)) + b"\n" for _ in range(20)),
    ]
    for line in lines:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(5)
            channel.connect(str(home.socket))
            try:
                channel.sendall(line)
                channel.shutdown(socket.SHUT_WR)
                answer = channel.makefile("rb").readline()
            except OSError:
                continue
            assert not answer or json.loads(answer)["ok"] is False, line[:60]
    assert daemon.popen.poll() is None
    home.until(lambda: ready(home))


def test_the_service_manager_is_told(home: MachinelessDeployment, tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(60)
        daemon = home.daemon(NOTIFY_SOCKET=str(address), WATCHDOG_USEC="400000")
        said = manager.recv(4096).decode()
        assert said.startswith("READY=1\nSTATUS=")
        signs = 0
        while signs < 3:
            signs += manager.recv(4096) == b"WATCHDOG=1"
        daemon.popen.send_signal(signal.SIGTERM)
        while not said.startswith("STOPPING=1"):
            said = manager.recv(4096).decode()
        assert daemon.end() == 0


def test_every_line_of_a_json_log_is_an_object_with_its_kind(home: MachinelessDeployment) -> None:
    home.write(fleet_text())
    daemon = home.started("--log", "json")
    home.until(lambda: ready(home))
    daemon.end()
    rows = [json.loads(line) for line in daemon.text.splitlines()]
    assert {"start", "fleet", "create", "state", "stop"} <= {row["kind"] for row in rows}
    assert all({"at", "level", "event"} <= set(row) for row in rows)
    with open_reader(home.state) as store:
        kinds = [event.kind for _, event in store.events()]
    assert [row["kind"] for row in rows] == [kind for kind in kinds if kind != "seeing"]


def test_an_order_to_stop_is_answered_and_obeyed(home: MachinelessDeployment) -> None:
    daemon = home.started()
    assert home.ask("stop") == {}
    assert daemon.popen.wait(60) == 0


def test_a_store_that_cannot_be_trusted_is_one_line_and_a_code(home: MachinelessDeployment) -> None:
    home.started().end()
    (home.state / "tpucare.sqlite").write_bytes(b"x" * 5000)
    done = home.run("daemon", code=5)
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_store_that_is_taken_away_ends_the_daemon(home: MachinelessDeployment) -> None:
    home.write(fleet_text())
    daemon = home.started()
    home.until(lambda: ready(home))
    (home.state / "tpucare.sqlite").unlink()
    home.write(fleet_text(count=2))
    assert daemon.popen.wait(60) == 5
    assert "Traceback" not in daemon.text
    assert home.nodes() == ["pod-0-a0"]


def test_an_api_that_does_not_answer_keeps_nobody_from_stopping(tmp_path: Path) -> None:
    with socket.socket() as dead, machineless_deployment(tmp_path) as home:
        dead.bind(("127.0.0.1", 0))
        dead.listen()
        home.write(fleet_text())
        daemon = home.started(TPUCARE_ENDPOINT=f"127.0.0.1:{dead.getsockname()[1]}", TPUCARE_STATE=str(home.state))
        assert daemon.end(seconds=10) == 0


def test_what_it_needs_is_said_in_one_line(home: MachinelessDeployment) -> None:
    for env, code, text in (
        ({"TPUCARE_ENDPOINT": "nonsense"}, 3, "127.0.0.1:PORT"),
        ({"TPUCARE_POLL": "soon"}, 3, "TPUCARE_POLL"),
        ({"TPUCARE_EMULATOR": str(home.folder / "none")}, 3, "no emulator runs"),
    ):
        done = home.run("daemon", code=code, **env)
        (line,) = done.stderr.strip().splitlines()
        assert text in line
