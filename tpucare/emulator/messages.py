"""
Between the records of the emulated cloud and the raw protobuf messages of google.cloud.tpu_v2.

A node is turned into bytes once per record and a page is those bytes joined, so that a listing of ten thousand nodes
costs the emulator about as much as copying it. Building them through proto-plus would take a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.cloud.location.locations_pb2 import ListLocationsResponse, Location  # type: ignore[import-untyped]
from google.cloud.tpu_v2 import types
from google.longrunning.operations_pb2 import ListOperationsResponse, Operation  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]

from tpucare.emulator.records import (
    AcceleratorConfig,
    DataDisk,
    GuestAttribute,
    NetworkConfig,
    NodePage,
    NodeRecord,
    NodeSpec,
    OperationRecord,
)

TPU_PORT = 8470
CACHE_LIMIT = 50_000
API_VERSION = int(types.Node.ApiVersion.V2)

_NODE = types.Node.pb()
_NODE_PAGE = types.ListNodesResponse.pb()
_METADATA = types.OperationMetadata.pb()
_GUEST_ANSWER = types.GetGuestAttributesResponse.pb()
_NODES_TAG = b"\x0a"  # field 1 of ListNodesResponse, length-delimited


class NodePages:
    """ListNodesResponse as bytes. Records are replaced and never changed, so each is translated once."""

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[NodeRecord, bytes]] = {}

    def page(self, page: NodePage) -> bytes:
        rest = _NODE_PAGE(next_page_token=page.next_page_token, unreachable=page.unreachable)
        return b"".join([*map(self._chunk, page.nodes), rest.SerializeToString()])

    def _chunk(self, record: NodeRecord) -> bytes:
        known = self._chunks.get(record.name)
        if known is not None and known[0] is record:
            return known[1]
        if len(self._chunks) >= CACHE_LIMIT:
            self._chunks.clear()
        content: bytes = node_message(record).SerializeToString()
        chunk = _NODES_TAG + _varint(len(content)) + content
        self._chunks[record.name] = (record, chunk)
        return chunk


def node_message(record: NodeRecord) -> Any:
    """Node as the service shows it."""
    spec = record.spec
    message = _NODE(
        name=record.name,
        id=record.id,
        state=record.state,
        health=record.health,
        health_description=record.health_description,
        accelerator_type=spec.accelerator_type,
        runtime_version=spec.runtime_version,
        description=spec.description,
        labels=spec.labels,
        metadata=spec.metadata,
        tags=spec.tags,
        api_version=API_VERSION,
        network_endpoints=[
            {"ip_address": pair.internal, "port": TPU_PORT, "access_config": {"external_ip": pair.external}}
            for pair in record.endpoints
        ],
    )
    message.create_time.FromDatetime(record.create_time)
    _add_settings(message, spec)
    for symptom in record.symptoms:
        added = message.symptoms.add(
            symptom_type=symptom.symptom_type, details=symptom.details, worker_id=symptom.worker_id
        )
        added.create_time.FromDatetime(symptom.create_time)
    return message


def _add_settings(message: Any, spec: NodeSpec) -> None:
    scheduling = message.scheduling_config
    scheduling.preemptible, scheduling.spot, scheduling.reserved = spec.preemptible, spec.spot, spec.reserved
    network = message.network_config
    network.network, network.subnetwork = spec.network.network, spec.network.subnetwork
    network.enable_external_ips = spec.network.enable_external_ips
    network.can_ip_forward, network.queue_count = spec.network.can_ip_forward, spec.network.queue_count
    message.service_account.email = spec.service_account
    message.service_account.scope.extend(spec.scopes)
    if spec.accelerator_config is not None:
        config = message.accelerator_config
        setattr(config, _field(config, 1), spec.accelerator_config.type)
        config.topology = spec.accelerator_config.topology
    message.shielded_instance_config.enable_secure_boot = spec.secure_boot
    for disk in spec.data_disks:
        message.data_disks.add(source_disk=disk.source_disk, mode=disk.mode)


def spec_of(message: Any) -> NodeSpec:
    """What a caller said about a node; fields that only the service writes are ignored."""
    scheduling, network = message.scheduling_config, message.network_config
    config = message.accelerator_config
    return NodeSpec(
        accelerator_type=message.accelerator_type,
        accelerator_config=AcceleratorConfig(getattr(config, _field(config, 1)), config.topology)
        if message.HasField("accelerator_config")
        else None,
        runtime_version=message.runtime_version,
        preemptible=scheduling.preemptible,
        spot=scheduling.spot,
        reserved=scheduling.reserved,
        network=NetworkConfig(
            network=network.network,
            subnetwork=network.subnetwork,
            enable_external_ips=network.enable_external_ips,
            can_ip_forward=network.can_ip_forward,
            queue_count=network.queue_count,
        ),
        service_account=message.service_account.email,
        scopes=tuple(message.service_account.scope),
        labels=dict(message.labels),
        metadata=dict(message.metadata),
        tags=tuple(message.tags),
        description=message.description,
        data_disks=tuple(DataDisk(disk.source_disk, disk.mode) for disk in message.data_disks),
        secure_boot=message.shielded_instance_config.enable_secure_boot,
    )


def operation_message(record: OperationRecord) -> Any:
    """google.longrunning.Operation with OperationMetadata, and a Node, Empty or Status when it is done."""
    metadata = _METADATA(
        target=record.target, verb=record.verb, cancel_requested=record.cancel_requested, api_version="v2"
    )
    metadata.create_time.FromDatetime(record.create_time)
    if record.end_time is not None:
        metadata.end_time.FromDatetime(record.end_time)
    message = Operation(name=record.name, done=record.done)
    message.metadata.Pack(metadata)
    if record.done and record.error is not None:
        message.error.code, message.error.message = record.error
    elif record.done:
        message.response.Pack(Empty() if record.response is None else node_message(record.response))
    return message


def operations_message(records: Iterable[OperationRecord]) -> Any:
    return ListOperationsResponse(operations=[operation_message(record) for record in records])


def guest_message(query_path: str, found: Mapping[int, Sequence[GuestAttribute]], worker_ids: Sequence[str]) -> Any:
    """One entry per worker asked for, in order; all workers up to the last that said something if none was named."""
    numbers = [int(one) for one in worker_ids if one.isdigit()] or list(range(max(found, default=-1) + 1))
    answer = _GUEST_ANSWER()
    for number in numbers:
        entry = answer.guest_attributes.add(query_path=query_path)
        for item in found.get(number, ()):
            entry.query_value.items.add(namespace=item.namespace, key=item.key, value=item.value)
    return answer


def location_message(project: str, zone: str) -> Any:
    return Location(name=f"projects/{project}/locations/{zone}", location_id=zone, display_name=zone)


def locations_message(project: str, zones: Iterable[str]) -> Any:
    return ListLocationsResponse(locations=[location_message(project, zone) for zone in zones])


def accelerator_message(parent: str, name: str) -> Any:
    message = types.AcceleratorType.pb()(name=f"{parent}/acceleratorTypes/{name}")
    setattr(message, _field(message, 2), name)
    return message


def runtime_message(parent: str, name: str) -> Any:
    return types.RuntimeVersion.pb()(name=f"{parent}/runtimeVersions/{name}", version=name)


def accelerators_message(messages: Sequence[Any], token: str) -> Any:
    return types.ListAcceleratorTypesResponse.pb()(accelerator_types=messages, next_page_token=token)


def runtimes_message(messages: Sequence[Any], token: str) -> Any:
    return types.ListRuntimeVersionsResponse.pb()(runtime_versions=messages, next_page_token=token)


def _field(message: Any, number: int) -> str:
    """Name of a field by its number: proto-plus appends an underscore to names that Python knows, such as `type`."""
    return str(message.DESCRIPTOR.fields_by_number[number].name)


def _varint(value: int) -> bytes:
    """Length prefix of protobuf's wire format: seven bits a byte, lowest first."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
