"""How `ssh`, `scp` and `exec` find the workers of a slot while no daemon runs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tpucare.adapters.google import client
from tpucare.adapters.ssh.connection import NeverSent
from tpucare.adapters.state.store import open_store
from tpucare.cli import ssh as reaching
from tpucare.fleetfile import parse as fleets
from tpucare.fleetfile import python_fleet
from tpucare.model.errors import ConfigError, WorkerSilent
from tpucare.model.memory import FleetRecord, Memory, NodeMemory
from tpucare.model.resources import Endpoint, Node, NodeKey, NodeState, Worker
from tpucare.service.options import Options

NOW = datetime(2026, 11, 22, 7, 0, tzinfo=UTC)
ZONE = "us-central1-a"
INSIDE, BOTH = Endpoint("10.0.0.2"), Endpoint("10.0.0.2", "203.0.113.5")


def fleet_text(network: str = "", project: str = "project: my-project\n") -> str:
    tpu = f"tpu: {{type: v2-8, zones: [{ZONE}], provisioning: spot{network}}}\n"
    return f"name: pod\n{project}{tpu}job:\n  run: python3 train.py\n  checkpoint: gs://b/c\n  files: {{a: gone.txt}}\n"


def python_text(network: dict[str, object]) -> str:
    tpu = {"type": "v2-8", "zones": [ZONE], "provisioning": "spot", "network": network}
    return python_fleet.render("pod", [tpu], {}, project="my-project")


class Zone:
    """The cloud, of which one node is asked."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.asked: list[NodeKey] = []

    def get_node(self, key: NodeKey) -> Node:
        self.asked.append(key)
        return Node(key, 7, NOW, NodeState.READY, endpoints=(self._endpoint,))

    def close(self) -> None:
        pass


def hosts(
    monkeypatch: pytest.MonkeyPatch, state: Path, text: str, endpoint: Endpoint, *, place: str = "", project: str = ""
) -> list[str]:
    """Where the workers of slot pod-0 are said to be. `place`: key of the one that its node was asked for at."""
    zone = Zone(endpoint)
    monkeypatch.setattr(client, "connect", lambda *_, **__: zone)
    with open_store(state, machine_id="m", now=NOW) as store:
        store.save_fleet(FleetRecord("pod", text, "/nowhere", NOW, project=project))
        store.save({"pod-0": Memory("pod", nodes=(NodeMemory("pod-0-a3", ZONE, 7, NOW, place=place),))})
    found = reaching.workers(Options(state), "pod")
    assert zone.asked == [NodeKey("my-project", ZONE, "pod-0-a3")]
    return [worker.host for worker in found]


@pytest.mark.parametrize(
    ("network", "endpoint", "host"),
    [
        ("", BOTH, "203.0.113.5"),
        (", network: {external_ips: false}", INSIDE, "10.0.0.2"),
        (", network: {reach: internal}", BOTH, "10.0.0.2"),
    ],
)
def test_without_a_daemon_the_fleet_says_which_addresses_its_workers_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, network: str, endpoint: Endpoint, host: str
) -> None:
    text = fleet_text(network)
    parsed = fleets.parse(text, file="pod.yaml", folder=tmp_path, read_file=lambda _folder, _path: b"")
    assert hosts(monkeypatch, tmp_path, text, endpoint, place=parsed.places[0].key) == [host]


def test_so_does_the_fleet_of_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = python_text({"external_ips": False})
    place = python_fleet.parse_python(text).places[0].key
    assert hosts(monkeypatch, tmp_path, text, INSIDE, place=place) == ["10.0.0.2"]


@pytest.mark.parametrize(("endpoint", "host"), [(BOTH, "203.0.113.5"), (INSIDE, "10.0.0.2")])
@pytest.mark.parametrize("text", [fleet_text(), "name: pod\nproject: my-project\nof_another_version: 1\n"])
def test_an_adopted_node_and_one_of_a_fleet_that_cannot_be_read_tell_by_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, endpoint: Endpoint, host: str
) -> None:
    assert hosts(monkeypatch, tmp_path, text, endpoint) == [host]


def test_a_fleet_that_names_no_project_is_asked_for_where_it_was_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "another")
    assert hosts(monkeypatch, tmp_path, fleet_text(project=""), BOTH, project="my-project") == ["203.0.113.5"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            WorkerSilent("dropped during a command", host="10.0.0.2"),
            "dropped during a command; the command may still run",
        ),
        (NeverSent("the server opened no session", host="10.0.0.2"), "the server opened no session\n"),
        (ConfigError("10.0.0.2: no such key"), "10.0.0.2: no such key\n"),
    ],
)
def test_a_worker_that_cannot_be_used_is_named_by_its_number(error: Exception, line: str) -> None:
    worker = Worker(NodeKey("my-project", ZONE, "pod-0-a3"), 7, 1, "10.0.0.2")
    told = reaching._result(worker, error)
    assert told.stderr.startswith(f"tpucare: worker 1: {line}")
