"""
A run that goes on: whatever is taken from the daemon (the API, a zone, its fleet files, its life, its store), it is
neither stopped, doubled nor moved. One deployment for all; each test finds the run alive and leaves it so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import psutil
import pytest

from tests.kits.deployment import FAR, NEAR, TWO_HOSTS, Deployment, deployment, environment_of

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

# Until it is ended; a test that fails must not leave it to the next one.
OUTAGE_SECONDS = 60


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("quiet")) as home:
        home.declare("pod", kind=TWO_HOSTS, zones=(NEAR, FAR))
        home.start()
        home.await_training("pod-0")
        home.await_(lambda: len(_lasting(home)) == 2, "each host has its part of the job")
        yield home


@pytest.fixture
def home(lived_in: Deployment) -> Iterator[Deployment]:
    """The run has the same processes afterwards, makes steps, and nothing was asked of the cloud that changes it."""
    token, pids = lived_in.token("pod-0"), _lasting(lived_in)
    asked = _changes_asked(lived_in)
    yield lived_in
    lived_in.await_(lambda: lived_in.row("pod-0")["training"], "the run is known to the daemon")
    reached = lived_in.row("pod-0")["step"] or 0
    lived_in.await_(lambda: (lived_in.row("pod-0")["step"] or 0) > reached, "it makes steps")
    assert lived_in.token("pod-0") == token
    assert lived_in.attempts("pod-0") == 1
    assert _lasting(lived_in) == pids, "other processes than before"
    assert _changes_asked(lived_in) == asked


def _lasting(home: Deployment) -> set[int]:
    """Pids of the job's shells: one per host; what a step needs comes and goes."""
    pids = home.runs().get("pod-0-a0.1", set())
    return {pid for pid in pids if _parent(pid) not in {0, *pids}}


def _parent(pid: int) -> int:
    """Of a shell it is the runner, which bears no token; 0 when the process is gone."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return 0


def _await_more_steps(home: Deployment, count: int) -> None:
    """The job makes them, whatever the daemon knows of it."""
    reached = _newest_step(home)
    home.await_(lambda: _newest_step(home) >= reached + count, f"{count} more steps")


def _newest_step(home: Deployment) -> int:
    return max(int(folder.name) for folder in (home.bucket / "pod").iterdir())


def _changes_asked(home: Deployment) -> list[str]:
    return [str(one["method"]) for one in home.audit() if one.get("method") in ("CreateNode", "DeleteNode")]


def test_an_api_outage_changes_nothing(home: Deployment) -> None:
    home.order("outage", kind="api", duration=OUTAGE_SECONDS)
    home.await_event("blind")
    assert home.ask("status")["projects"][0]["seen"] is False
    _await_more_steps(home, 40)
    home.order("end-outages")
    home.await_(lambda: home.ask("status")["projects"][0]["seen"], "the daemon sees again", 30)


def test_a_zone_that_does_not_answer_keeps_its_nodes(home: Deployment) -> None:
    home.order("outage", kind="zone", zone=NEAR, duration=OUTAGE_SECONDS)
    home.await_event("unreachable")
    home.await_(lambda: home.ask("status")["projects"][0]["unreachable"] == [NEAR], "it is dark")
    _await_more_steps(home, 20)
    home.order("end-outages")
    home.await_(lambda: not home.ask("status")["projects"][0]["unreachable"], "it answers again")


def test_a_node_that_somebody_stopped_and_started_is_cared_for_again(home: Deployment) -> None:
    home.order("state", selector="pod-0", state="STOPPED")
    stopped = home.await_event("person", "pod-0")
    assert "which tpucare never asks for: start it" in stopped.text
    home.order("state", selector="pod-0", state="READY")
    home.await_(lambda: home.row("pod-0")["phase"] == "run", "it is ready again")


def test_a_fleet_file_that_cannot_be_read_is_told_once(home: Deployment) -> None:
    file = home.fleets / "pod.yaml"
    text = file.read_text()
    file.write_text("name: pod\ntpu: [")
    refused = home.await_event("fleet-refused")
    assert str(file) in refused.text
    file.write_text(text)
    # Once more the same problem is a new file with a problem; until then one line is enough.
    assert len(home.events("fleet-refused")) == 1


def test_an_emptied_folder_ends_nothing(home: Deployment) -> None:
    file = home.fleets / "pod.yaml"
    text = file.read_text()
    file.unlink()
    missing = home.await_event("fleet-missing")
    assert "runs on as last accepted" in missing.text
    home.restart()
    home.await_(lambda: home.row("pod-0")["training"], "cared for without any file")
    file.write_text(text)


def test_sigterm_leaves_the_nodes_and_a_later_start_adopts_them(home: Deployment) -> None:
    assert home.stop() == 0
    assert home.names() == ["pod-0-a0"]
    status = home.cli("status", "--json").json
    assert status["daemon"] is False
    assert [row["node"] for row in status["slots"]] == ["pod-0-a0"]
    home.start()


def test_a_killed_daemon_adopts(home: Deployment) -> None:
    for _ in range(2):
        home.restart()


def test_a_second_daemon_on_the_same_store_is_refused(home: Deployment) -> None:
    second = home.cli("daemon", want=4)
    assert len(second.err.splitlines()) == 1, second.err
    assert second.err.startswith("tpucare: ")


def test_a_corrupt_store_is_refused_and_left_as_it_is(home: Deployment) -> None:
    store = home.state / "tpucare.sqlite"
    home.stop()
    kept = home.folder / "kept.sqlite"
    shutil.copy2(store, kept)
    store.write_bytes(b"no store at all" * 300)
    broken = store.read_bytes()

    refused = home.cli("daemon", want=5)

    assert len(refused.err.splitlines()) == 1, refused.err
    assert str(store) in refused.err
    assert store.read_bytes() == broken
    shutil.copy2(kept, store)
    home.start()


def test_a_lost_store_adopts_by_labels_and_sweeps_nothing(home: Deployment) -> None:
    home.stop()
    for file in home.state.glob("tpucare.sqlite*"):
        file.unlink()
    home.start()
    home.await_(lambda: home.row("pod-0")["training"], "the run is adopted")
    assert home.ask("status")["store_lost"] is True
    assert home.cli("gc", "--json").json["strays"] == []
    home.cli("confirm", "--store", "--yes")
    assert home.ask("status")["store_lost"] is False


def test_a_paused_slot_is_observed_and_not_touched(home: Deployment) -> None:
    home.cli("pause", "pod")
    home.restart()
    row = home.row("pod-0")
    assert row["phase"] == "paused"
    home.await_(lambda: home.cli("plan", "pod").out.startswith("pod-0: wait: paused"), "the plan says so")
    home.cli("resume", "pod")
    home.await_(lambda: home.row("pod-0")["phase"] == "run", "cared for again")


def test_what_commands_print(home: Deployment) -> None:
    row = home.cli("status", "--json").json["slots"][0]
    shown = {key: row[key] for key in ("slot", "node", "zone", "type", "tier", "phase", "attempt", "workers")}
    assert shown == {
        "slot": "pod-0",
        "node": "pod-0-a0",
        "zone": NEAR,
        "type": TWO_HOSTS,
        "tier": "spot",
        "phase": "run",
        "attempt": 1,
        "workers": 2,
    }
    assert "pod-0-a0 2/2" in home.cli("status").out
    assert home.cli("plan").out.startswith("pod-0: wait: running")
    assert "step " in home.cli("logs", "pod").out
    kinds = [json.loads(line)["kind"] for line in home.cli("events", "pod", "--json", "-n", "5").out.splitlines()]
    assert 0 < len(kinds) <= 5


def test_exec_runs_on_all_workers_and_gives_the_worst_status(home: Deployment) -> None:
    said = home.cli("exec", "--json", "pod-0", "--", "test $(hostname | tail -c 2) = 0; echo is=$?", want=0).json
    assert [row["worker"] for row in said["workers"]] == [0, 1]
    assert all(row["stdout"].startswith("is=") for row in said["workers"])
    home.cli("exec", "--worker", "1", "pod-0", "--", "exit 9", want=9)


def test_every_run_process_bears_its_token(home: Deployment) -> None:
    """What the witness and the fence go by."""
    shells = _lasting(home)
    assert len(shells) == 2
    for pid in shells:
        environment = environment_of(pid)
        assert environment["TPUCARE_SLOT"] == "pod-0"
        assert environment["TPUCARE_ATTEMPT"] == "1"
        assert environment["TPUCARE_CHECKPOINT"] == str(home.bucket / "pod")
