"""The metadata server of a worker: what it says, in which form, and that clients of the real one understand it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from google.auth.compute_engine import Credentials
from google.auth.transport.requests import Request

from tpucare.model import accelerators
from tpucare.testbed.emulator.machines.metadata_server import MetadataServer
from tpucare.testbed.emulator.machines.worker_files import first_metadata
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.instance_metadata import bounds, topology
from tpucare.testbed.emulator.world.machine_effects import Boot
from tpucare.testbed.emulator.world.queued_records import QueuedNodeSpec, QueuedSpec
from tpucare.testbed.emulator.world.records import NetworkConfig, NodeSpec
from tpucare.testbed.emulator.world.world import World

PARENT = "projects/emulated/locations/us-central2-b"
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
ADDRESS = "127.0.0.1"
SPEC = NodeSpec(
    accelerator_type="v4-32",
    runtime_version="tpu-ubuntu2204-base",
    spot=True,
    service_account="trainer@emulated.iam.gserviceaccount.com",
    scopes=("https://www.googleapis.com/auth/devstorage.read_write",),
    network=NetworkConfig(enable_external_ips=True),
    metadata={"own": "value", "agent-worker-number": "forged"},
)


def world() -> World:
    return World(WorldConfig.calm(zones={"us-central2-b": {"accelerators": ["*"]}}), seed=3, start=START)


def boots(made: World) -> list[Boot]:
    """The workers that came up within an hour."""
    made.advance(made.now + timedelta(hours=1))
    return [effect for effect in made.take_effects() if isinstance(effect, Boot)]


class Server:
    """The server of worker 2 of a v4-32, and how to ask it."""

    def __init__(self, server: MetadataServer, boot: Boot) -> None:
        self._server, self.boot = server, boot
        self.host = f"{ADDRESS}:{server.port}"

    def ask(self, path: str, **headers: str) -> Any:
        connection = http.client.HTTPConnection(self.host, timeout=10)
        try:
            connection.request("GET", f"/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def says(self, path: str) -> str:
        status, body = self.ask(path)
        assert status == 200, path
        return str(body)

    def change(self, path: str, value: str) -> None:
        self._server.update(ADDRESS, {path: value})


@pytest.fixture
def worker() -> Iterator[Server]:
    with socket.socket() as free:
        free.bind((ADDRESS, 0))
        port = free.getsockname()[1]
    made = world()
    made.api.create_node(PARENT, "pod-0-a1", SPEC, made.now)
    boot = next(boot for boot in boots(made) if boot.worker == 2)
    server = MetadataServer(port)
    try:
        server.add(ADDRESS, first_metadata(boot))
        yield Server(server, boot)
    finally:
        server.close()


def test_what_training_code_looks_for(worker: Server) -> None:
    attributes = "instance/attributes/"
    assert worker.says(attributes + "accelerator-type") == "v4-32"
    assert worker.says(attributes + "agent-worker-number") == "2"
    assert worker.says(attributes + "instance-id") == "pod-0-a1"
    assert worker.says(attributes + "own") == "value"
    endpoints = worker.says(attributes + "worker-network-endpoints").split(",")
    assert [one.split(":")[2] for one in endpoints] == list(worker.boot.peers)
    environment = yaml.safe_load(worker.says(attributes + "tpu-env"))
    assert environment["ACCELERATOR_TYPE"] == "v4-32"
    assert (environment["CHIPS_PER_HOST_BOUNDS"], environment["HOST_BOUNDS"]) == ("2,2,1", "1,1,4")
    assert (environment["WORKER_ID"], environment["ZONE"]) == ("2", "us-central2-b")
    assert "\nTYPE: 'V4'\nTOPOLOGY: '2x2x4'\n" in worker.says(attributes + "tpu-env")
    assert "MEGASCALE_NUM_SLICES" not in environment


def test_what_every_instance_says(worker: Server) -> None:
    name = worker.says("instance/name")
    assert name.startswith("t1v-n-")
    assert name.endswith("-w-2")
    assert worker.says("instance/hostname") == f"{name}.us-central2-b.c.emulated.internal"
    assert worker.says("instance/zone").endswith("/zones/us-central2-b")
    assert worker.says("instance/network-interfaces/0/ip") == worker.boot.address
    assert worker.says("instance/scheduling/preemptible") == "TRUE"
    assert (worker.says("instance/preempted"), worker.says("instance/maintenance-event")) == ("FALSE", "NONE")
    whole = json.loads(worker.says("instance/?recursive=true"))
    assert isinstance(whole["id"], int)
    assert whole["networkInterfaces"]["0"]["accessConfigs"]["0"]["externalIp"] == worker.boot.address
    assert whole["attributes"]["agent-worker-number"] == "2"


def test_the_root_is_a_folder_with_and_without_its_slash(worker: Server) -> None:
    """Ray recognises Google's cloud by it."""
    connection = http.client.HTTPConnection(worker.host, timeout=10)
    for root in ("/computeMetadata/v1", "/computeMetadata/v1/"):
        connection.request("GET", root, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"instance/\nproject/\n")
    connection.close()


def test_every_machine_has_an_id_of_its_own() -> None:
    made = world()
    made.api.create_node(PARENT, "pod-0-a1", SPEC, made.now)
    assert len({boot.attributes["instance/id"] for boot in boots(made)}) == 4


def test_the_token_of_the_service_account(worker: Server) -> None:
    default = "instance/service-accounts/default/"
    token = json.loads(worker.says(default + "token"))
    assert (token["token_type"], token["expires_in"] > 300) == ("Bearer", True)
    assert json.loads(worker.says(default + "token?scopes=a,b")) == token
    assert worker.says(default) == "aliases\nemail\nscopes\ntoken\n"
    told = json.loads(worker.says(default + "?recursive=true"))
    assert told == {"aliases": ["default"], "email": SPEC.service_account, "scopes": list(SPEC.scopes)}
    assert set(json.loads(worker.says("instance/service-accounts/?recursive=true"))) == {
        "default",
        SPEC.service_account,
    }
    assert worker.ask("instance/service-accounts/nobody/token")[0] == 404


@pytest.mark.contract
def test_googles_own_library_gets_credentials(worker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", worker.host)
    monkeypatch.setattr("google.auth.compute_engine._metadata._GCE_METADATA_HOST", worker.host, raising=False)
    monkeypatch.setattr(
        "google.auth.compute_engine._metadata._METADATA_ROOT",
        f"http://{worker.host}/computeMetadata/v1/",
        raising=False,
    )
    credentials: Any = Credentials()  # type: ignore[no-untyped-call]
    credentials.refresh(Request())
    assert credentials.token == json.loads(worker.says("instance/service-accounts/default/token"))["access_token"]
    assert credentials.service_account_email == SPEC.service_account


@pytest.mark.contract
def test_jax_finds_its_slice(worker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = pytest.importorskip("jax._src.clusters.cloud_tpu_cluster")
    monkeypatch.setenv("GCE_METADATA_IP", worker.host)
    assert cluster.get_metadata("agent-worker-number") == ("2", 200)
    endpoints, _ = cluster.get_metadata("worker-network-endpoints")
    assert [one.split(":")[2] for one in endpoints.split(",")] == list(worker.boot.peers)


def test_who_may_not_ask(worker: Server) -> None:
    token = "instance/service-accounts/default/token"
    assert worker.ask(token, **{"Metadata-Flavor": "none"})[0] == 403
    assert worker.ask(token, **{"X-Forwarded-For": "10.0.0.1"})[0] == 403


def test_a_preemption_ends_a_long_poll(worker: Server) -> None:
    first = http.client.HTTPConnection(worker.host, timeout=30)
    first.request("GET", "/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"})
    etag = first.getresponse().headers["ETag"]
    first.close()
    poll = f"/computeMetadata/v1/instance/preempted?wait_for_change=true&last_etag={etag}"
    first.request("GET", poll, headers={"Metadata-Flavor": "Google"})
    worker.change("instance/preempted", "TRUE")
    assert first.getresponse().read() == b"TRUE"
    first.close()


def test_slices_of_a_multislice_know_each_other() -> None:
    made = world()
    spec = QueuedSpec((QueuedNodeSpec(SPEC, count=2, prefix="part"),))
    made.queued_api.create_queued_resource(PARENT, "q-0", spec, made.now)
    found = {boot.path.node_id: yaml.safe_load(boot.attributes["instance/attributes/tpu-env"]) for boot in boots(made)}
    assert [found[name]["MEGASCALE_SLICE_ID"] for name in ("part-0", "part-1")] == ["0", "1"]
    addresses = {env["MEGASCALE_COORDINATOR_ADDRESS"] for env in found.values()}
    assert addresses == {made.nodes()[0].endpoints[0].internal}
    assert {env["MEGASCALE_NUM_SLICES"] for env in found.values()} == {"2"}


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("v2-8", ("2,2,1", "1,1,1")),
        ("v3-32", ("2,2,1", "2,2,1")),
        ("v4-8", ("2,2,1", "1,1,1")),
        ("v4-16", ("2,2,1", "1,1,2")),
        ("v5litepod-1", ("1,1,1", "1,1,1")),
        ("v5litepod-8", ("2,4,1", "1,1,1")),
        ("v5litepod-16", ("2,2,1", "2,2,1")),
        ("v6e-32", ("2,2,1", "2,4,1")),
    ],
)
def test_how_chips_and_hosts_lie(kind: str, want: tuple[str, str]) -> None:
    assert bounds(accelerators.derive(kind)) == want


def test_a_size_that_is_not_listed_lies_as_its_listed_neighbours_do() -> None:
    for kind in accelerators.known_types():
        listed = accelerators.lookup(kind)
        assert topology(replace(listed, topology="")) == listed.topology, kind
    assert topology(accelerators.derive("v4-640")) == "4x4x20"
    assert topology(replace(accelerators.lookup("v4-8"), chips=96, topology="")) == ""
