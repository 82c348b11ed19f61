"""v2alpha1 over gRPC: the same world with other field numbers, and what only alpha has."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import google.api_core.exceptions as google_errors
import grpc
import pytest
from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport
from google.cloud.tpu_v2alpha1.services.tpu.transports.grpc import TpuGrpcTransport as TpuAlphaTransport

from tpucare.testbed.emulator.api.messages import UNKNOWN_FIELDS
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig

PROJECT, ZONE = "emulated", "us-central1-a"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"
QUICK: dict[str, object] = {
    "read": 0,
    "write": 0,
    "visible": 0,
    "list_lag_share": 0,
    "create_single": 0.1,
    "delete": 0.1,
    "operation_done": 0,
    "operation_lingers_share": 0,
}
SPOT: dict[str, Any] = {
    "accelerator_type": "v2-8",
    "runtime_version": "tpu-ubuntu2204-base",
    "scheduling_config": {"spot": True},
}


@pytest.fixture
def server() -> Iterator[EmulatorServer]:
    with EmulatorServer(WorldConfig.fast(latencies=QUICK)) as serving:
        yield serving


@pytest.fixture
def alpha(server: EmulatorServer) -> Iterator[tpu_v2alpha1.TpuClient]:
    channel = grpc.insecure_channel(server.endpoint)
    yield tpu_v2alpha1.TpuClient(transport=TpuAlphaTransport(channel=channel))
    channel.close()


@pytest.fixture
def stable(server: EmulatorServer) -> Iterator[tpu_v2.TpuClient]:
    channel = grpc.insecure_channel(server.endpoint)
    yield tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=channel))
    channel.close()


def finished(operation: Any) -> Any:
    """What an operation ended with; the official client polls it."""
    return operation.result(timeout=30)


def test_both_versions_show_one_world_each_with_its_own_numbers(
    alpha: tpu_v2alpha1.TpuClient, stable: tpu_v2.TpuClient
) -> None:
    node = tpu_v2alpha1.Node(
        accelerator_config={"type_": "V2", "topology": "2x2"},
        runtime_version="tpu-ubuntu2204-base",
        shielded_instance_config={"enable_secure_boot": True},
        autocheckpoint_enabled=True,
    )
    future = alpha.create_node(parent=PARENT, node_id="pod-0-a1", node=node)
    assert future.metadata.api_version == "v2alpha1"
    made = finished(future)
    assert isinstance(made, tpu_v2alpha1.Node)
    assert made.api_version == tpu_v2alpha1.Node.ApiVersion.V2_ALPHA1
    assert made.autocheckpoint_enabled
    seen = stable.get_node(name=made.name)
    assert seen.accelerator_config.topology == made.accelerator_config.topology == "2x2"
    assert seen.shielded_instance_config.enable_secure_boot
    assert [one.name for one in alpha.list_nodes(parent=PARENT)] == [
        one.name for one in stable.list_nodes(parent=PARENT)
    ]
    # 46 is the accelerator config of v2, 44 that of v2alpha1.
    numbers = [{field.number for field, _ in type(one).pb(one).ListFields()} for one in (seen, made)]
    assert [46 in numbers[0], 44 in numbers[0], 46 in numbers[1], 44 in numbers[1]] == [True, False, False, True]


def test_a_request_id_makes_a_repeated_call_harmless(alpha: tpu_v2alpha1.TpuClient, server: EmulatorServer) -> None:
    ask = {"parent": PARENT, "node_id": "pod-0-a1", "node": tpu_v2alpha1.Node(**SPOT), "request_id": str(uuid.uuid4())}
    first, second = alpha.create_node(ask), alpha.create_node(ask)
    assert first.operation.name == second.operation.name
    with pytest.raises(google_errors.AlreadyExists):
        alpha.create_node({**ask, "request_id": str(uuid.uuid4())})
    finished(first)
    gone = {"name": f"{PARENT}/nodes/pod-0-a1", "request_id": str(uuid.uuid4())}
    ended = alpha.delete_node(gone)
    finished(ended)
    assert alpha.delete_node(gone).operation.name == ended.operation.name
    with pytest.raises(google_errors.NotFound):
        alpha.delete_node({**gone, "request_id": str(uuid.uuid4())})


def unknown_numbers(message: Any) -> bytes:
    """What is left of the bytes of *message* when everything that its package knows is taken away."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return bytes(message.SerializeToString()).replace(bytes(known.SerializeToString()), b"", 1)


@pytest.mark.parametrize("pick", [lambda alpha, _: alpha, lambda _, stable: stable])
def test_what_no_package_knows_reaches_either_client(
    alpha: tpu_v2alpha1.TpuClient, stable: tpu_v2.TpuClient, server: EmulatorServer, pick: Callable[[Any, Any], Any]
) -> None:
    finished(alpha.create_node(parent=PARENT, node_id="pod-0-a1", node=tpu_v2alpha1.Node(**SPOT)))
    server.apply_order({"do": "health", "selector": "pod-0", "health": 99})
    server.apply_order({"do": "state", "selector": "pod-0", "state": "77"})
    server.apply_order({"do": "unknown-fields", "selector": "pod-0", "answers": True})
    client = pick(alpha, stable)
    node = client.get_node(name=f"{PARENT}/nodes/pod-0-a1")
    raw = type(node).pb(node)
    assert (raw.state, raw.health) == (77, 99)
    with pytest.warns(UserWarning, match="Unrecognized"):
        assert int(node.state) == 77
    # Once in the node, once more in the answer that it is.
    assert unknown_numbers(raw) == UNKNOWN_FIELDS * 2
    pager = client.list_nodes(parent=PARENT)
    (listed,) = pager
    assert unknown_numbers(type(listed).pb(listed)) == UNKNOWN_FIELDS
    operation = client.list_operations({"name": PARENT})
    assert operation.SerializeToString().endswith(UNKNOWN_FIELDS)
    server.apply_order({"do": "unknown-fields", "selector": "*", "on": False})
    plain = client.get_node(name=node.name)
    assert unknown_numbers(type(plain).pb(plain)) == b""
