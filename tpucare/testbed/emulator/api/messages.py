"""
Translates records of the emulated cloud to raw protobuf messages of the official packages and back, for both versions
of the API: google.cloud.tpu_v2 and google.cloud.tpu_v2alpha1 have the same names with other field numbers.

A node is turned into bytes once per record, and a page joins those bytes, so that a listing of ten thousand nodes costs
the emulator about as much as copying it. Building them through proto-plus would take a second.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.location.locations_pb2 import ListLocationsResponse, Location  # type: ignore[import-untyped]
from google.longrunning.operations_pb2 import ListOperationsResponse, Operation  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]

from tpucare.model.accelerators import region_of
from tpucare.model.resources import QueuedState
from tpucare.testbed.emulator.world.instance_metadata import DEFAULT_SCOPE, default_account
from tpucare.testbed.emulator.world.policies import DEFAULT_NETWORK
from tpucare.testbed.emulator.world.queued_records import (
    QueuedNodeSpec,
    QueuedPage,
    QueuedRecord,
    QueuedSpec,
    Validity,
)
from tpucare.testbed.emulator.world.records import (
    AcceleratorConfig,
    DataDisk,
    GuestAttribute,
    NetworkConfig,
    NodePage,
    NodeRecord,
    NodeSpec,
    OperationRecord,
)
from tpucare.testbed.emulator.world.requests import offered_configs

TPU_PORT = 8470
CACHE_LIMIT = 50_000
_NODES_TAG = b"\x0a"  # field 1 of ListNodesResponse, length-delimited

UNKNOWN_FIELDS = b"\x88\x7d\x07" + b"\x92\x7d\x05later" + b"\x9a\x7d\x02\x08\x03"
"""
Fields of a service newer than every package: 2001 (the number 7), 2002 (the text `later`) and 2003 (a message with a
field of its own).
"""


class WireVersion:
    """One version of the API: `v2` or `v2alpha1`. Its messages have that version's field numbers."""

    def __init__(self, version: str) -> None:
        package = {"v2": tpu_v2, "v2alpha1": tpu_v2alpha1}[version]
        self.version = version
        self.types: Any = package.types
        names = package.types.Node.ApiVersion
        self.node_version = int(names.V2 if version == "v2" else names.V2_ALPHA1)
        """`Node.api_version` of nodes that are created through this version."""

    def pb(self, name: str) -> Any:
        """The raw protobuf class of that name."""
        return getattr(self.types, name).pb()

    @property
    def service(self) -> str:
        return f"google.cloud.tpu.{self.version}.Tpu"


class NodePages:
    """ListNodesResponse as bytes. Records are replaced and never changed, so each is translated once."""

    def __init__(self, wire: WireVersion) -> None:
        self._wire = wire
        self._chunks: dict[str, tuple[NodeRecord, bytes]] = {}

    def page(self, page: NodePage) -> bytes:
        rest = self._wire.pb("ListNodesResponse")(next_page_token=page.next_page_token, unreachable=page.unreachable)
        return b"".join([*map(self._chunk, page.nodes), rest.SerializeToString()])

    def _chunk(self, record: NodeRecord) -> bytes:
        known = self._chunks.get(record.name)
        if known is not None and known[0] is record:
            return known[1]
        if len(self._chunks) >= CACHE_LIMIT:
            self._chunks.clear()
        content: bytes = node_message(self._wire, record).SerializeToString()
        chunk = _NODES_TAG + _varint(len(content)) + content
        self._chunks[record.name] = (record, chunk)
        return chunk


def node_message(wire: WireVersion, record: NodeRecord) -> Any:
    """Node as the service shows it."""
    message = settings_message(wire, record.spec)
    message.name, message.id = record.name, record.id
    message.state, message.health = record.state, record.health
    message.health_description = record.health_description
    message.queued_resource, message.multislice_node = record.queued_resource, record.multislice
    message.api_version = record.spec.api_version
    message.create_time.FromDatetime(record.create_time)
    _fill_in(message, record)
    for pair in record.endpoints:
        endpoint = message.network_endpoints.add(ip_address=pair.internal, port=TPU_PORT)
        endpoint.access_config.external_ip = pair.external
    for symptom in record.symptoms:
        added = message.symptoms.add(
            symptom_type=symptom.symptom_type, details=symptom.details, worker_id=symptom.worker_id
        )
        added.create_time.FromDatetime(symptom.create_time)
    if record.unknown_fields:
        message.MergeFromString(UNKNOWN_FIELDS)
    return message


def _fill_in(message: Any, record: NodeRecord) -> None:
    """Fill in fields that the caller left out, as the service does: full network names, account, topology, range."""
    project, zone, spec = record.path.project, record.path.zone, record.spec
    for network in message.network_configs if spec.networks else (message.network_config,):
        # In a network in custom mode subnetworks have other names, which a caller has to give.
        subnetwork = network.subnetwork or network.network.rpartition("/")[2] or DEFAULT_NETWORK
        network.network = _full(network.network or DEFAULT_NETWORK, f"projects/{project}/global/networks")
        network.subnetwork = _full(subnetwork, f"projects/{project}/regions/{region_of(zone)}/subnetworks")
    if not spec.service_account:
        message.service_account.email = default_account(project)
    if not spec.scopes:
        message.service_account.scope.append(DEFAULT_SCOPE)
    if spec.accelerator_config is None:
        for config in offered_configs(spec.accelerator_type):
            _fill_accelerator(message.accelerator_config, config)
    message.cidr_block = f"10.{128 + zlib.crc32(region_of(zone).encode()) % 64}.0.0/20"


def _full(name: str, folder: str) -> str:
    return name if "/" in name else f"{folder}/{name}"


def settings_message(wire: WireVersion, spec: NodeSpec) -> Any:
    """Node with only the settings that its caller gave."""
    message = wire.pb("Node")(
        accelerator_type=spec.accelerator_type,
        runtime_version=spec.runtime_version,
        description=spec.description,
        labels=spec.labels,
        metadata=spec.metadata,
        tags=spec.tags,
    )
    _add_settings(message, spec)
    if wire.version == "v2alpha1":
        message.autocheckpoint_enabled = spec.autocheckpoint
    return message


def _add_settings(message: Any, spec: NodeSpec) -> None:
    scheduling = message.scheduling_config
    scheduling.preemptible, scheduling.spot, scheduling.reserved = spec.preemptible, spec.spot, spec.reserved
    if spec.networks:
        for one in spec.networks:
            _fill_network(message.network_configs.add(), one)
    else:
        _fill_network(message.network_config, spec.network)
    message.service_account.email = spec.service_account
    message.service_account.scope.extend(spec.scopes)
    if spec.accelerator_config is not None:
        _fill_accelerator(message.accelerator_config, spec.accelerator_config)
    message.shielded_instance_config.enable_secure_boot = spec.secure_boot
    for disk in spec.data_disks:
        message.data_disks.add(source_disk=disk.source_disk, mode=disk.mode)


def _fill_network(message: Any, network: NetworkConfig) -> None:
    message.network, message.subnetwork = network.network, network.subnetwork
    message.enable_external_ips = network.enable_external_ips
    message.can_ip_forward, message.queue_count = network.can_ip_forward, network.queue_count


def _fill_accelerator(message: Any, config: AcceleratorConfig) -> None:
    setattr(message, _field(message, 1), config.type)
    message.topology = config.topology


def settings_of(wire: WireVersion, message: Any) -> NodeSpec:
    """The settings that a caller gave for a node; fields that only the service writes are ignored."""
    scheduling, config = message.scheduling_config, message.accelerator_config
    return NodeSpec(
        accelerator_type=message.accelerator_type,
        accelerator_config=AcceleratorConfig(getattr(config, _field(config, 1)), config.topology)
        if message.HasField("accelerator_config")
        else None,
        runtime_version=message.runtime_version,
        preemptible=scheduling.preemptible,
        spot=scheduling.spot,
        reserved=scheduling.reserved,
        network=_network_of(message.network_config),
        networks=tuple(_network_of(one) for one in message.network_configs),
        has_network=message.HasField("network_config"),
        service_account=message.service_account.email,
        scopes=tuple(message.service_account.scope),
        labels=dict(message.labels),
        metadata=dict(message.metadata),
        tags=tuple(message.tags),
        description=message.description,
        data_disks=tuple(DataDisk(disk.source_disk, disk.mode) for disk in message.data_disks),
        secure_boot=message.shielded_instance_config.enable_secure_boot,
        autocheckpoint=wire.version == "v2alpha1" and message.autocheckpoint_enabled,
        api_version=wire.node_version,
    )


def _network_of(message: Any) -> NetworkConfig:
    return NetworkConfig(
        network=message.network,
        subnetwork=message.subnetwork,
        enable_external_ips=message.enable_external_ips,
        can_ip_forward=message.can_ip_forward,
        queue_count=message.queue_count,
    )


def operations_message(operations: Sequence[Any], token: str = "") -> Any:
    return ListOperationsResponse(operations=operations, next_page_token=token)


def guest_message(
    wire: WireVersion, query_path: str, found: Mapping[int, Sequence[GuestAttribute]], worker_ids: Sequence[str]
) -> Any:
    """One entry per worker of *worker_ids*, in order; without ids: all workers up to the last with attributes."""
    numbers = [int(one) for one in worker_ids if one.isdigit()] or list(range(max(found, default=-1) + 1))
    answer = wire.pb("GetGuestAttributesResponse")()
    for number in numbers:
        entry = answer.guest_attributes.add(query_path=query_path)
        for item in found.get(number, ()):
            entry.query_value.items.add(namespace=item.namespace, key=item.key, value=item.value)
    return answer


def location_message(project: str, zone: str) -> Any:
    return Location(name=f"projects/{project}/locations/{zone}", location_id=zone, display_name=zone)


def locations_message(project: str, zones: Iterable[str]) -> Any:
    return ListLocationsResponse(locations=[location_message(project, zone) for zone in zones])


def accelerator_message(wire: WireVersion, parent: str, name: str) -> Any:
    message = wire.pb("AcceleratorType")(name=f"{parent}/acceleratorTypes/{name}")
    setattr(message, _field(message, 2), name)
    for config in offered_configs(name):
        _fill_accelerator(message.accelerator_configs.add(), config)
    return message


def runtime_message(wire: WireVersion, parent: str, name: str) -> Any:
    return wire.pb("RuntimeVersion")(name=f"{parent}/runtimeVersions/{name}", version=name)


def _field(message: Any, number: int) -> str:
    """Name of a field by its number: proto-plus appends an underscore to names of Python, such as `type`."""
    return str(message.DESCRIPTOR.fields_by_number[number].name)


def _varint(value: int) -> bytes:
    """Length prefix of protobuf's wire format: seven bits a byte, lowest first."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


# --- queued resources, and operations on either kind of resource ------------------------------------------------------
# The versions differ in more than numbers here: `multislice_params` is `multi_node_params` in v2alpha1, which also has
# `best_effort` and `guaranteed.reserved`; its DeleteQueuedResource answers with the resource, that of v2 with Empty.


_DATA = {
    QueuedState.CREATING: "creating_data",
    QueuedState.ACCEPTED: "accepted_data",
    QueuedState.PROVISIONING: "provisioning_data",
    QueuedState.DELETING: "deleting_data",
    QueuedState.ACTIVE: "active_data",
    QueuedState.SUSPENDING: "suspending_data",
    QueuedState.SUSPENDED: "suspended_data",
}
"""The field of `QueuedResourceState` that belongs to each state; WAITING_FOR_RESOURCES has none."""


def queued_message(wire: WireVersion, record: QueuedRecord) -> Any:
    """QueuedResource as the service shows it."""
    message = wire.pb("QueuedResource")(name=record.name, reservation_name=record.spec.reservation_name)
    message.create_time.FromDatetime(record.create_time)
    state = message.state
    state.state, state.state_initiator = record.state, record.initiator
    if record.error is not None:
        state.failed_data.error.code, state.failed_data.error.message = record.error
    elif record.state in _DATA:
        getattr(state, _DATA[QueuedState(record.state)]).SetInParent()
    for node in record.spec.nodes:
        _fill_node_spec(wire, message.tpu.node_spec.add(), node, record)
    _fill_tier(wire, message, record.spec)
    if record.spec.has_policy:
        _fill_policy(message.queueing_policy, record.spec.validity)
    if record.unknown_fields:
        message.MergeFromString(UNKNOWN_FIELDS)
    return message


def _fill_node_spec(wire: WireVersion, message: Any, node: QueuedNodeSpec, record: QueuedRecord) -> None:
    message.parent = node.parent or record.path.parent
    if node.count:
        params = getattr(message, _params_field(wire))
        params.node_count, params.node_id_prefix = node.count, node.prefix
    else:
        message.node_id = node.node_id
    message.node.CopyFrom(settings_message(wire, node.spec))


def _params_field(wire: WireVersion) -> str:
    return "multislice_params" if wire.version == "v2" else "multi_node_params"


def _fill_tier(wire: WireVersion, message: Any, spec: QueuedSpec) -> None:
    if spec.tier == "spot":
        message.spot.SetInParent()
    elif spec.tier == "best-effort" and wire.version == "v2alpha1":
        message.best_effort.SetInParent()
    elif spec.tier == "guaranteed":
        message.guaranteed.SetInParent()
        if spec.min_duration is not None:
            message.guaranteed.min_duration.FromTimedelta(spec.min_duration)
        if wire.version == "v2alpha1":
            message.guaranteed.reserved = spec.reserved


def _fill_policy(message: Any, validity: Validity) -> None:
    if validity.until is not None:
        message.valid_until_time.FromDatetime(validity.until)
    if validity.until_after is not None:
        message.valid_until_duration.FromTimedelta(validity.until_after)
    if validity.after is not None:
        message.valid_after_time.FromDatetime(validity.after)
    if validity.after_after is not None:
        message.valid_after_duration.FromTimedelta(validity.after_after)
    if validity.interval is not None:
        message.valid_interval.SetInParent()
        for name, instant in zip(("start_time", "end_time"), validity.interval, strict=True):
            if instant is not None:
                getattr(message.valid_interval, name).FromDatetime(instant)


def queued_spec_of(wire: WireVersion, message: Any) -> QueuedSpec:
    """The settings that a caller gave for a queued resource; fields that only the service writes are ignored."""
    alpha, guaranteed = wire.version == "v2alpha1", message.guaranteed
    tiers = {"spot": "spot", "guaranteed": "guaranteed"} | ({"best_effort": "best-effort"} if alpha else {})
    return QueuedSpec(
        nodes=tuple(_node_spec_of(wire, one) for one in message.tpu.node_spec),
        tier=next((tier for name, tier in tiers.items() if message.HasField(name)), ""),
        min_duration=guaranteed.min_duration.ToTimedelta() if guaranteed.HasField("min_duration") else None,
        reserved=alpha and guaranteed.reserved,
        reservation_name=message.reservation_name,
        validity=_validity_of(message.queueing_policy),
        has_policy=message.HasField("queueing_policy"),
    )


def _node_spec_of(wire: WireVersion, message: Any) -> QueuedNodeSpec:
    params = getattr(message, _params_field(wire))
    return QueuedNodeSpec(
        spec=settings_of(wire, message.node),
        parent=message.parent,
        node_id=message.node_id,
        count=params.node_count,
        prefix=params.node_id_prefix,
    )


def _validity_of(message: Any) -> Validity:
    interval = message.valid_interval
    return Validity(
        until=_instant(message, "valid_until_time"),
        until_after=_length(message, "valid_until_duration"),
        after=_instant(message, "valid_after_time"),
        after_after=_length(message, "valid_after_duration"),
        interval=(_instant(interval, "start_time"), _instant(interval, "end_time"))
        if message.HasField("valid_interval")
        else None,
    )


def _instant(message: Any, name: str) -> datetime | None:
    """Raises: ValueError: a date that no calendar has."""
    return getattr(message, name).ToDatetime(tzinfo=UTC) if message.HasField(name) else None


def _length(message: Any, name: str) -> timedelta | None:
    return getattr(message, name).ToTimedelta() if message.HasField(name) else None


def queued_page(wire: WireVersion, page: QueuedPage) -> Any:
    """ListQueuedResourcesResponse."""
    return wire.pb("ListQueuedResourcesResponse")(
        queued_resources=[queued_message(wire, record) for record in page.resources],
        next_page_token=page.next_page_token,
        unreachable=page.unreachable,
    )


def operation_message(wire: WireVersion, record: OperationRecord) -> Any:
    """google.longrunning.Operation with OperationMetadata, and a resource, Empty or Status when it is done."""
    metadata = wire.pb("OperationMetadata")(
        target=record.target, verb=record.verb, cancel_requested=record.cancel_requested, api_version=wire.version
    )
    metadata.create_time.FromDatetime(record.create_time)
    if record.end_time is not None:
        metadata.end_time.FromDatetime(record.end_time)
    message = Operation(name=record.name, done=record.done)
    message.metadata.Pack(metadata)
    if record.done and record.error is not None:
        message.error.code, message.error.message = record.error
    elif record.done:
        message.response.Pack(_response(wire, record))
    return message


def _response(wire: WireVersion, record: OperationRecord) -> Any:
    match record.response:
        case NodeRecord():
            return node_message(wire, record.response)
        case QueuedRecord() if record.verb != "delete" or wire.version == "v2alpha1":
            return queued_message(wire, record.response)
    return Empty()
