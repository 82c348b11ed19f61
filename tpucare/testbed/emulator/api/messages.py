"""
Between the records of the emulated cloud and the raw protobuf messages of the official packages, for both versions of
the API: google.cloud.tpu_v2 and google.cloud.tpu_v2alpha1 have the same names with other field numbers.

A node is turned into bytes once per record and a page is those bytes joined, so that a listing of ten thousand nodes
costs the emulator about as much as copying it. Building them through proto-plus would take a second. Queued resources
and operations have a module of their own, `queue_messages`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.location.locations_pb2 import ListLocationsResponse, Location  # type: ignore[import-untyped]
from google.longrunning.operations_pb2 import ListOperationsResponse  # type: ignore[import-untyped]

from tpucare.model.accelerators import region_of
from tpucare.testbed.emulator.world.instance_metadata import DEFAULT_SCOPE, default_account
from tpucare.testbed.emulator.world.policies import DEFAULT_NETWORK
from tpucare.testbed.emulator.world.records import (
    AcceleratorConfig,
    DataDisk,
    GuestAttribute,
    NetworkConfig,
    NodePage,
    NodeRecord,
    NodeSpec,
)
from tpucare.testbed.emulator.world.requests import offered_configs

TPU_PORT = 8470
CACHE_LIMIT = 50_000
_NODES_TAG = b"\x0a"  # field 1 of ListNodesResponse, length-delimited

UNKNOWN_FIELDS = b"\x88\x7d\x07" + b"\x92\x7d\x05later" + b"\x9a\x7d\x02\x08\x03"
"""
What a service newer than every package adds to a message: fields 2001 (the number 7), 2002 (the text `later`) and 2003
(a message with a field of its own).
"""


class Wire:
    """One version of the API: `v2` or `v2alpha1`. Its messages bear that version's field numbers."""

    def __init__(self, version: str) -> None:
        package = {"v2": tpu_v2, "v2alpha1": tpu_v2alpha1}[version]
        self.version = version
        self.types: Any = package.types
        names = package.types.Node.ApiVersion
        self.node_version = int(names.V2 if version == "v2" else names.V2_ALPHA1)
        """Which version a node was created with, as `Node.api_version` says."""

    def pb(self, name: str) -> Any:
        """The raw protobuf class of that name."""
        return getattr(self.types, name).pb()

    @property
    def service(self) -> str:
        return f"google.cloud.tpu.{self.version}.Tpu"


class NodePages:
    """ListNodesResponse as bytes. Records are replaced and never changed, so each is translated once."""

    def __init__(self, wire: Wire) -> None:
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


def node_message(wire: Wire, record: NodeRecord) -> Any:
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
    """What the service says of a node that its caller left out: networks by their full names, account, shape, range."""
    project, zone, spec = record.path.project, record.path.zone, record.spec
    for network in message.network_configs if spec.networks else (message.network_config,):
        # A network of one's own in custom mode has subnetworks by other names; those have to be said.
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


def settings_message(wire: Wire, spec: NodeSpec) -> Any:
    """Node with what its caller said about it, and nothing else."""
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


def spec_of(wire: Wire, message: Any) -> NodeSpec:
    """What a caller said about a node; fields that only the service writes are ignored."""
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
    wire: Wire, query_path: str, found: Mapping[int, Sequence[GuestAttribute]], worker_ids: Sequence[str]
) -> Any:
    """One entry per worker asked for, in order; all workers up to the last that said something if none was named."""
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


def accelerator_message(wire: Wire, parent: str, name: str) -> Any:
    message = wire.pb("AcceleratorType")(name=f"{parent}/acceleratorTypes/{name}")
    setattr(message, _field(message, 2), name)
    for config in offered_configs(name):
        _fill_accelerator(message.accelerator_configs.add(), config)
    return message


def runtime_message(wire: Wire, parent: str, name: str) -> Any:
    return wire.pb("RuntimeVersion")(name=f"{parent}/runtimeVersions/{name}", version=name)


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
