"""The emulator as a service: the official client unmodified, time that runs by itself, machines, orders, files."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import google.api_core.exceptions as google_errors
import grpc
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud.tpu_v2 import TpuClient, types
from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport
from google.cloud.tpu_v2.services.tpu.transports.rest import TpuRestTransport

from tests.kits.emulated_calls import next_call
from tests.kits.hand_clock import HandClock
from tpucare.adapters.google.client import connect
from tpucare.model.errors import AnswerLost, ConfigError, NoCapacity
from tpucare.model.resources import NodeKey, NodeRequest, NodeState, Place, Provisioning
from tpucare.service import emulator_address
from tpucare.testbed.emulator.control_socket import request
from tpucare.testbed.emulator.machines.machines import WorkerMachines
from tpucare.testbed.emulator.orders import ORDERS, parse_order
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.machine_effects import Boot, Kill, MachineEffect, SetAttribute
from tpucare.testbed.emulator.world.records import NodePath

PROJECT, ZONE = "emulated", "us-central1-a"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"
QUICK: dict[str, object] = {
    "read": 0,
    "write": 0,
    "visible": 0,
    "list_lag_share": 0,
    "create_single": 0.1,
    "create_slice": 0.1,
    "boot_skew": 0,
    "boot_late": 0.05,
    "delete": 0.1,
    "operation_done": 0,
    "operation_lingers_share": 0,
}
FAST = WorldConfig.fast(latencies=QUICK)
SPOT: dict[str, Any] = {
    "accelerator_type": "v2-8",
    "runtime_version": "tpu-ubuntu2204-base",
    "scheduling_config": {"spot": True},
}


def official(endpoint: str) -> TpuClient:
    """The client as anybody would make it for a server without TLS; an endpoint with `http://` is one of REST."""
    if endpoint.startswith("http://"):
        host = endpoint.removeprefix("http://")
        rest = TpuRestTransport(host=host, url_scheme="http", credentials=AnonymousCredentials())  # type: ignore[no-untyped-call]
        return TpuClient(transport=rest)
    return TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(endpoint)))


def told(detail: Any) -> str:
    """What a detail of a refusal is about; over REST the client leaves it as JSON."""
    if isinstance(detail, dict):
        return str(detail.get("resourceName") or detail["violations"][0]["description"])
    return str(getattr(detail, "resource_name", "") or detail.violations[0].description)


def finished(operation: Any) -> Any:
    """What an operation ended with; the official client polls it."""
    return operation.result(timeout=30)


@pytest.fixture
def server() -> Iterator[EmulatorServer]:
    with EmulatorServer(FAST) as serving:
        yield serving


@pytest.fixture(params=["grpc", "rest"])
def client(server: EmulatorServer, request: pytest.FixtureRequest) -> Iterator[TpuClient]:
    made = official(server.endpoint if request.param == "grpc" else server.rest_endpoint)
    yield made
    made.transport.close()  # type: ignore[no-untyped-call]


# --- the official client -------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_the_official_client_sees_a_node_through_its_life(client: TpuClient) -> None:
    future = client.create_node(parent=PARENT, node_id="pod-0-a1", node=types.Node(**SPOT))
    assert future.metadata.verb == "create"
    made = finished(future)
    assert (made.name, made.state) == (f"{PARENT}/nodes/pod-0-a1", types.Node.State.READY)
    (endpoint,) = made.network_endpoints
    assert endpoint.port == 8470
    assert [node.name for node in client.list_nodes(parent=PARENT)] == [made.name]
    change = types.Node(name=made.name, labels={"a": "b"})
    updated = finished(client.update_node(node=change, update_mask={"paths": ["labels"]}))
    assert dict(updated.labels) == {"a": "b"}
    finished(client.delete_node(name=made.name))
    with pytest.raises(google_errors.NotFound) as missing:
        client.get_node(name=made.name)
    (detail,) = missing.value.details
    assert told(detail) == made.name


@pytest.mark.contract
def test_stop_and_start_of_a_node_on_demand(client: TpuClient) -> None:
    node = types.Node(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base")
    made = finished(client.create_node(parent=PARENT, node_id="pod-0-a1", node=node))
    assert finished(client.stop_node({"name": made.name})).state == types.Node.State.STOPPED
    assert finished(client.start_node({"name": made.name})).state == types.Node.State.READY


@pytest.mark.contract
@pytest.mark.parametrize("rest", [False, True])
def test_a_quota_refusal_bears_its_details(rest: bool) -> None:
    config = WorldConfig.fast(latencies=QUICK, quotas=[{"generation": "v2", "zone": ZONE, "limit": 0}])
    with EmulatorServer(config) as serving:
        client = official(serving.rest_endpoint if rest else serving.endpoint)
        with pytest.raises(google_errors.TooManyRequests) as refused:
            client.create_node(parent=PARENT, node_id="pod-0-a1", node=types.Node(**SPOT))
        (detail,) = refused.value.details
        assert "Quota limit" in told(detail)
        client.transport.close()  # type: ignore[no-untyped-call]


@pytest.mark.contract
def test_operations_and_locations_are_served_beside_the_nodes(client: TpuClient) -> None:
    name = client.create_node(parent=PARENT, node_id="pod-0-a1", node=types.Node(**SPOT)).operation.name
    listed = client.list_operations({"name": PARENT})
    assert [operation.name for operation in listed.operations] == [name]
    client.cancel_operation({"name": name})
    client.delete_operation({"name": name})
    with pytest.raises(google_errors.NotFound):
        client.get_operation({"name": name})
    zones = client.list_locations({"name": f"projects/{PROJECT}"}).locations
    assert {zone.location_id for zone in zones} == {ZONE, "europe-west4-a"}
    assert client.get_location({"name": PARENT}).name == PARENT
    with pytest.raises(google_errors.NotFound):
        client.get_location({"name": f"projects/{PROJECT}/locations/mars"})


@pytest.mark.contract
def test_the_catalogue_of_a_zone_is_served_in_pages(client: TpuClient) -> None:
    kinds = list(client.list_accelerator_types({"parent": PARENT, "page_size": 3}))
    assert len({kind.name for kind in kinds}) == len(kinds) > 3
    assert "v2-8" in {kind.type_ for kind in kinds}
    assert client.get_accelerator_type(name=f"{PARENT}/acceleratorTypes/v2-8").type_ == "v2-8"
    runtimes = {version.version for version in client.list_runtime_versions(parent=PARENT)}
    assert "tpu-ubuntu2204-base" in runtimes
    assert client.get_runtime_version(name=f"{PARENT}/runtimeVersions/tpu-ubuntu2204-base")
    with pytest.raises(google_errors.NotFound):
        client.get_accelerator_type(name=f"{PARENT}/acceleratorTypes/v9-8")
    everywhere = list(client.list_accelerator_types(parent=f"projects/{PROJECT}/locations/-"))
    assert len(everywhere) > len(kinds)
    assert client.generate_service_identity({"parent": PARENT}).identity.email.endswith("gserviceaccount.com")


@pytest.mark.contract
def test_guest_attributes_of_some_workers(client: TpuClient, server: EmulatorServer) -> None:
    node = types.Node(**{**SPOT, "accelerator_type": "v2-32"})
    name = finished(client.create_node(parent=PARENT, node_id="pod-0-a1", node=node)).name
    with server.lock:
        server.world.operator.set_guest_attribute(name, 2, "hostkeys", "ssh-ed25519", "AAAA")
    asked = client.get_guest_attributes({"name": name, "query_path": "hostkeys/", "worker_ids": ["2", "3"]})
    assert [len(entry.query_value.items) for entry in asked.guest_attributes] == [1, 0]
    assert len(client.get_guest_attributes({"name": name}).guest_attributes) == 4


@pytest.mark.contract
@pytest.mark.parametrize("dated", [True, False])
def test_answers_and_refusals_bear_a_date(dated: bool) -> None:
    with EmulatorServer(FAST, dated=dated) as serving, grpc.insecure_channel(serving.endpoint) as channel:
        stub = channel.unary_unary("/google.cloud.tpu.v2.Tpu/GetNode", types.GetNodeRequest.serialize, bytes)
        with pytest.raises(grpc.RpcError) as refused:
            stub(types.GetNodeRequest(name=f"{PARENT}/nodes/none"), timeout=10)
        headers = dict(refused.value.initial_metadata())  # type: ignore[attr-defined]
        assert ("date" in headers) is dated
        with pytest.raises(HTTPError) as missing:
            urlopen(f"{serving.rest_endpoint}/v2/{PARENT}/nodes/none", timeout=10)
        assert ("Date" in missing.value.headers) is dated


@pytest.mark.contract
def test_nonsense_in_a_request_is_an_invalid_argument(server: EmulatorServer) -> None:
    client = official(server.endpoint)  # over REST this client refuses such names by itself
    for act in (
        lambda: client.get_node(name="nonsense"),
        lambda: client.list_nodes(parent="nonsense"),
        lambda: client.list_nodes({"parent": PARENT, "page_token": "nonsense"}),
        lambda: client.list_accelerator_types(parent="nonsense"),
    ):
        with pytest.raises(google_errors.InvalidArgument):
            act()
    client.transport.close()  # type: ignore[no-untyped-call]


# --- time and machines ---------------------------------------------------------------------------------------------


class Stage:
    """Machines that only record their effects."""

    login_user = "actor"

    def __init__(
        self,
        *,
        on_host_keys: Callable[[NodePath, int, Mapping[str, str]], None],
        on_gone: Callable[[NodePath, int, str], None],
    ) -> None:
        self.on_host_keys, self.on_gone = on_host_keys, on_gone
        self.told: list[MachineEffect] = []
        self.closed = False
        self.killed = threading.Event()

    def apply(self, effect: MachineEffect) -> Future[None]:
        self.told.append(effect)
        done: Future[None] = Future()
        match effect:
            case Boot() if effect.worker == 0:
                self.on_host_keys(effect.path, 0, {"ssh-ed25519": "AAAA"})
            case Boot():
                done.set_exception(OSError("no room"))
                return done
            case SetAttribute():
                raise RuntimeError("stumbled")
            case Kill():
                self.killed.set()
        done.set_result(None)
        return done

    def close(self) -> None:
        self.closed = True


def wanted(name: str, accelerator: str = "v2-8") -> NodeRequest:
    place = Place(ZONE, accelerator, Provisioning.SPOT, "tpu-ubuntu2204-base")
    return NodeRequest(NodeKey(PROJECT, ZONE, name), place, {}, {})


def test_time_runs_by_itself_and_machines_hear_in_order() -> None:
    with EmulatorServer(FAST, machines=Stage) as serving:
        stage = serving.machines
        assert isinstance(stage, Stage)
        cloud = connect(serving.endpoint, monotonic=lambda: 0.0)
        cloud.create_node(wanted("pod-0-a1", "v2-32"))
        deadline = threading.Event()
        while len(stage.told) < 4 and not deadline.wait(0.02):
            pass
        serving.apply_order({"do": "preempt", "selector": "pod-0", "notice": "50ms", "visible_after": 0.1})
        assert stage.killed.wait(60)
        key = NodeKey(PROJECT, ZONE, "pod-0-a1")
        while cloud.get_node(key).state is not NodeState.PREEMPTED:
            deadline.wait(0.02)
        assert cloud.host_keys(key) == {0: ("ssh-ed25519 AAAA",)}
        stage.on_gone(NodePath(PROJECT, ZONE, "pod-0-a1"), 0, "fell over")
        cloud.close()
        with serving.lock:
            notes = [record for record in serving.world.audit if record["kind"] == "note"]
    assert [type(effect) for effect in stage.told] == [Boot] * 4 + [SetAttribute, Kill]
    assert [effect.at for effect in stage.told] == sorted(effect.at for effect in stage.told)
    said = [(note["event"], note["text"]) for note in notes]
    assert said.count(("machine-error", "OSError: no room")) == 3
    assert ("machine-error", "RuntimeError: stumbled") in said
    assert ("machine-gone", "fell over") in said
    assert stage.closed


def test_latency_is_not_spent_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorldConfig.fast(latencies={**QUICK, "write": 60})
    with EmulatorServer(config) as serving, ThreadPoolExecutor(1) as pool:
        slow, quick = (connect(serving.endpoint, monotonic=lambda: 0.0) for _ in range(2))
        arrived = next_call(serving.world, monkeypatch)
        create = pool.submit(slow.create_node, wanted("pod-0-a1"))
        assert arrived.wait(60)
        assert not quick.list_nodes(PROJECT).nodes
        assert not create.done()
        slow.close()
        quick.close()
        assert isinstance(create.exception(timeout=30), AnswerLost)


def test_nothing_of_a_server_is_left_after_it_stopped(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    serving = EmulatorServer(FAST, state_dir=tmp_path, audit_path=tmp_path / "audit.jsonl")
    serving.start()
    client = official(serving.endpoint)
    client.list_nodes(parent=PARENT)
    client.transport.close()  # type: ignore[no-untyped-call]
    serving.stop()
    serving.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name
    assert [path.name for path in tmp_path.iterdir()] == ["audit.jsonl"]


@pytest.mark.machines
def test_a_worker_answers_with_the_host_key_that_the_cloud_vouches_for(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    make = partial(WorkerMachines, tmp_path, ssh_port=port, metadata_port=0)
    with EmulatorServer(FAST, machines=make, ssh_port=port) as serving:
        machines = serving.machines
        assert isinstance(machines, WorkerMachines)
        cloud = connect(serving.endpoint, monotonic=lambda: 0.0)
        cloud.create_node(wanted("pod-0-a1"))
        key = NodeKey(PROJECT, ZONE, "pod-0-a1")
        pause = threading.Event()
        while not cloud.host_keys(key):
            pause.wait(0.05)
        (endpoint,) = cloud.get_node(key).endpoints
        with socket.create_connection((endpoint.external, port), timeout=10) as channel:
            assert channel.recv(8).startswith(b"SSH-2.0")
        serving.apply_order({"do": "preempt", "selector": "*"})
        while machines.survivors():
            pause.wait(0.05)
        with pytest.raises(OSError, match=r"refused|timed out"):
            socket.create_connection((endpoint.external, port), timeout=5)
        cloud.close()


# --- orders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """State folder of an emulator whose clock stands still, with one node."""
    folder, clock = tmp_path / "state", HandClock()
    audit = tmp_path / "audit.jsonl"
    with EmulatorServer(FAST, state_dir=folder, now=clock.now, audit_path=audit, ssh_port=2222) as serving:
        client = official(serving.endpoint)
        client.create_node(parent=PARENT, node_id="pod-0-a1", node=types.Node(**SPOT))
        client.transport.close()  # type: ignore[no-untyped-call]
        clock.seconds += 60
        yield folder


def order(folder: Path, **fields: object) -> dict[str, Any]:
    return request(emulator_address.find(folder).control, fields)


def test_a_running_emulator_is_found_and_obeys(state: Path) -> None:
    found = emulator_address.find(state)
    assert (found.project, found.ssh_port, found.pid) == (PROJECT, 2222, os.getpid())
    assert stat.S_IMODE(os.stat(found.control).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(state / emulator_address.FILE_NAME).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(state).st_mode) == 0o700
    assert order(state, do="health", selector="*", health="unhealthy-maintenance") == {"touched": ["pod-0-a1"]}
    (node,) = order(state, do="status")["nodes"]
    assert (node["name"], node["state"], node["health"]) == ("pod-0-a1", "READY", "UNHEALTHY_MAINTENANCE")
    client = official(found.endpoint)
    assert client.get_node(name=f"{PARENT}/nodes/pod-0-a1").health == types.Node.Health.UNHEALTHY_MAINTENANCE
    client.transport.close()  # type: ignore[no-untyped-call]


GOOD_ORDERS: list[dict[str, object]] = [
    {"do": "preempt", "selector": "pod-0", "notice": "30s", "burst": "1m", "shown": "never", "silent": True},
    {"do": "preempt", "selector": "*", "shown": "repairing"},
    {"do": "terminate", "selector": "*"},
    {"do": "forget", "selector": "*"},
    {"do": "capacity", "zone": ZONE, "accelerator": "v2", "amount": 0},
    {"do": "capacity", "zone": ZONE, "amount": None},
    {"do": "health", "selector": "*", "health": 3},
    {"do": "state", "selector": "*", "state": 77},
    {"do": "maintenance", "selector": "*"},
    {"do": "maintenance", "selector": "*", "duration": "5m", "restart": True},
    {"do": "outage", "duration": "1m"},
    {"do": "outage", "kind": "zone", "zone": ZONE, "duration": 60},
    {"do": "end-outages"},
    {"do": "unknown-fields", "selector": "*", "answers": True},
    {"do": "unknown-fields", "selector": "*", "on": False},
    {"do": "fail-queued", "selector": "*"},
    {"do": "queued-state", "selector": "*", "state": "accepted"},
    {"do": "stick-deleting", "selector": "*", "repeats": 2},
    {"do": "lose-worker", "selector": "*", "worker": 0, "silent": True},
    {"do": "restore-worker", "selector": "*", "worker": 0},
    {"do": "fail-next-create", "code": 8, "text": "no more capacity"},
    {"do": "miss-worker", "zone": ZONE},
    {"do": "lose-next-answer", "method": "CreateNode"},
    {"do": "fail-next", "method": "GetNode", "code": 14, "text": "gone fishing"},
    {"do": "status"},
]


def test_every_action_can_be_ordered(state: Path) -> None:
    assert {str(fields["do"]) for fields in GOOD_ORDERS} == set(ORDERS)
    for fields in GOOD_ORDERS:
        order(state, **fields)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"nonsense", "one JSON object"),
        (b"\xff\xfe", "one JSON object"),
        (b"[" * 30_000, "one JSON object"),
        (b"[]", "JSON object such as"),
        (b"{}", "an order names its action"),
        (b'{"do": "premept"}', "did you mean 'preempt'"),
        (b'{"do": ["preempt"]}', "no action"),
        (b'{"do": "preempt"}', "preempt: selector: is missing"),
        (b'{"do": "preempt", "selector": "*", "notce": 1}', "preempt: notce: unknown key"),
        (b'{"do": "preempt", "selector": "*", "notice": "soon"}', "not a length of time"),
        (b'{"do": "preempt", "selector": "*", "notice": 1e999}', "notice"),
        (b'{"do": "preempt", "selector": "*", "burst": 1e300}', "burst"),
        (b'{"do": "capacity", "zone": "mars", "amount": 1}', "no zone mars"),
        (b'{"do": "health", "selector": "*", "health": "splendid"}', "health"),
        (b'{"do": "lose-worker", "selector": "*", "worker": -1}', "worker"),
    ],
)
def test_a_wrong_order_gets_one_line(state: Path, line: bytes, said: str) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(emulator_address.find(state).control)
        channel.sendall(line + b"\n")
        answers = channel.makefile("rb")
        answer = json.loads(answers.readline())
        assert answer["ok"] is False
        assert said in answer["error"]
        assert "\n" not in answer["error"]
        assert "Traceback" not in answer["error"]
        channel.sendall(b'{"do": "status"}\n')
        assert json.loads(answers.readline())["ok"] is True
    with pytest.raises(ConfigError, match="did you mean"):
        order(state, do="premept")


def test_a_line_without_an_end_does_not_fill_the_memory(state: Path) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(emulator_address.find(state).control)
        channel.sendall(b"x" * 70_000)
        assert json.loads(channel.makefile("rb").readline())["ok"] is False


def test_an_order_and_its_effect_stand_in_the_audit_file(state: Path) -> None:
    order(state, do="preempt", selector="*")
    lines = (state.parent / "audit.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["action"] for record in records if record["kind"] == "operator"] == ["preempt"]
    assert [record["method"] for record in records if record["kind"] == "call"][:1] == ["CreateNode"]


def test_orders_are_checked_apart_from_any_emulator() -> None:
    assert parse_order({"do": "state", "selector": "*", "state": "repairing"})
    with pytest.raises(ConfigError):
        parse_order("preempt")


# --- files and ports -----------------------------------------------------------------------------------------------


def test_a_second_emulator_on_the_same_folder_or_port_is_refused(state: Path) -> None:
    found = emulator_address.find(state)
    with pytest.raises(ConfigError, match="already"):
        EmulatorServer(FAST, state_dir=state).start()
    with pytest.raises(ConfigError, match="port"):
        EmulatorServer(FAST, port=int(found.endpoint.rpartition(":")[2])).start()
    assert emulator_address.find(state) == found
    assert order(state, do="status")["nodes"]


def test_what_a_crashed_emulator_left_is_taken_over(tmp_path: Path) -> None:
    stale = emulator_address.Running("127.0.0.1:1", str(tmp_path / "control.sock"), PROJECT, 1)
    emulator_address.announce(tmp_path, stale)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(stale.control)
    with pytest.raises(ConfigError, match="no emulator answers"):
        request(stale.control, {"do": "status"})
    with EmulatorServer(FAST, state_dir=tmp_path):
        assert order(tmp_path, do="status")["nodes"] == []
    with pytest.raises(ConfigError, match="no emulator runs"):
        emulator_address.find(tmp_path)


def test_a_deep_folder_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30)
    with EmulatorServer(FAST, state_dir=folder):
        control = Path(emulator_address.find(folder).control)
        assert control.parent != folder
        assert order(folder, do="status")["zones"]
    assert not control.parent.exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"endpoint": 1, "what": 2}'])
def test_a_broken_discovery_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / emulator_address.FILE_NAME).write_text(content)
    with pytest.raises(ConfigError, match=emulator_address.FILE_NAME):
        emulator_address.find(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        EmulatorServer(FAST, state_dir=tmp_path / "file" / "state").start()


def test_a_stockout_in_real_time() -> None:
    with EmulatorServer(FAST) as serving:
        serving.apply_order({"do": "capacity", "zone": ZONE, "amount": 0})
        cloud = connect(serving.endpoint, monotonic=lambda: 0.0)
        operation = cloud.create_node(wanted("pod-0-a1"))
        pause = threading.Event()
        while not (operation := cloud.get_operation(operation.name)).done:
            pause.wait(0.02)
        assert isinstance(operation.error, NoCapacity)
        before = serving.now()
        seen = cloud.list_nodes(PROJECT).cloud_time
        assert seen is not None
        assert before - timedelta(seconds=1) <= seen <= serving.now(), "in whole seconds"
        cloud.close()
