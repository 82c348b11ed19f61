"""
Protobuf messages of google.cloud.tpu_v2 <-> records of `model`.

Raw protobuf throughout (`Type.pb(message)`): reading ten fields of a thousand nodes through proto-plus takes twelve
times as long. Enum numbers stay numbers, since the service may have more of them than the package.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from google.cloud.tpu_v2 import types
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from tpucare.adapters.google.classify import Where, classify
from tpucare.model.resources import (
    SSH_KEYS,
    Endpoint,
    Health,
    Node,
    NodeKey,
    NodeRequest,
    NodeState,
    Operation,
    Place,
    Provisioning,
    QueuedRequest,
    QueuedResource,
    QueuedState,
    shared_labels,
)

CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
HOST_KEYS = "hostkeys"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""The instant of a message without a timestamp."""

_METADATA = types.OperationMetadata.pb()


def node_of(key: NodeKey, raw: Any) -> Node:
    """*raw* is a protobuf Node; *key* comes from the request, since the name in *raw* may have a project number."""
    return Node(
        key=key,
        id=raw.id,
        create_time=_instant(raw.create_time),
        state=NodeState(raw.state),
        health=Health(raw.health),
        accelerator_type=raw.accelerator_type,
        provisioning=_provisioning(raw.scheduling_config),
        labels=dict(raw.labels),
        endpoints=tuple(
            Endpoint(_address(endpoint.ip_address), _address(endpoint.access_config.external_ip))
            for endpoint in raw.network_endpoints
        ),
        queued_resource=raw.queued_resource,
    )


def _address(text: str) -> str:
    """The address in canonical form; empty for any other text, since it goes into commands and files that ssh reads."""
    try:
        return str(ipaddress.ip_address(text)) if text else ""
    except ValueError:
        return ""


def rest_of(raw: Any) -> dict[str, Any]:
    """A protobuf Node as the REST API v2 writes it: camelCase, enums by name, 64-bit numbers as text, no defaults."""
    return dict(MessageToDict(raw))


def operation_of(raw: Any) -> Operation:
    """*raw* is a google.longrunning.Operation; its error, if any, is classified."""
    error = None
    if raw.done and raw.HasField("error"):
        error = classify(raw.error.code, raw.error.message, Where.OPERATION)
    return Operation(raw.name, raw.done, error, operation_time(raw))


def operation_time(raw: Any) -> datetime | None:
    """The service's clock when it accepted the operation; None if the metadata lacks it."""
    if not raw.metadata.Is(_METADATA.DESCRIPTOR):
        return None
    metadata = _METADATA()
    try:
        raw.metadata.Unpack(metadata)
    except DecodeError:
        return None
    return _instant(metadata.create_time) if metadata.HasField("create_time") else None


def create_request(request: NodeRequest) -> types.CreateNodeRequest:
    """CreateNode as one message."""
    node, key = _settings(request), request.key
    if (terms := _scheduling(request.place)) is not None:
        node.scheduling_config = terms
    return types.CreateNodeRequest(parent=parent_name(key.project, key.zone), node_id=key.name, node=node)


def _settings(request: NodeRequest | QueuedRequest) -> types.Node:
    """
    Settings of the node but for its terms.

    `enable_external_ips` is always set, since API and gcloud differ in its default.
    """
    place = request.place
    node = types.Node(
        accelerator_type=place.accelerator_type,
        runtime_version=place.runtime,
        network_config=types.NetworkConfig(
            network=place.network.name,
            subnetwork=place.network.subnetwork,
            enable_external_ips=place.network.external_ips,
        ),
        tags=list(place.network.tags),
        labels=dict(request.labels),
        metadata=dict(request.metadata),
    )
    if place.service_account:
        node.service_account = types.ServiceAccount(email=place.service_account, scope=[CLOUD_PLATFORM])
    return node


def host_keys_of(answers: Iterable[Any]) -> Mapping[int, tuple[str, ...]]:
    """`type base64` per worker number, from the protobuf GuestAttributes of all workers in order."""
    found = {
        number: tuple(
            f"{item.key} {item.value}".strip() for item in answer.query_value.items if item.namespace == HOST_KEYS
        )
        for number, answer in enumerate(answers)
    }
    return {number: keys for number, keys in found.items() if keys}


def with_ssh_key(metadata: Mapping[str, str], line: str) -> dict[str, str] | None:
    """*metadata* with *line* appended to its `ssh-keys`; None if it is there already."""
    lines = metadata.get(SSH_KEYS, "").splitlines()
    if line.strip() in (known.strip() for known in lines):
        return None
    return {**metadata, SSH_KEYS: "\n".join([*(known for known in lines if known.strip()), line.strip()])}


def queued_request(request: QueuedRequest) -> types.CreateQueuedResourceRequest:
    """
    CreateQueuedResource as one message. The terms stand on the resource, never in the node (seen in axlearn).

    A reservation is named as gcloud names it: any one of the project and zone.
    """
    key, place = request.key, request.place
    parent = parent_name(key.project, key.zone)
    spec = types.QueuedResource.Tpu.NodeSpec(parent=parent, node_id=key.name, node=_settings(request))
    resource = types.QueuedResource(tpu=types.QueuedResource.Tpu(node_spec=[spec]))
    if place.provisioning is Provisioning.SPOT:
        resource.spot = types.QueuedResource.Spot()
    else:
        resource.guaranteed = types.QueuedResource.Guaranteed()
    if place.provisioning is Provisioning.RESERVED:
        resource.reservation_name = f"{parent}/reservations/-"
    if place.valid_for is not None:
        resource.queueing_policy = types.QueuedResource.QueueingPolicy(valid_until_duration=place.valid_for)
    return types.CreateQueuedResourceRequest(
        parent=parent, queued_resource_id=key.name, queued_resource=resource, request_id=request.request_id
    )


def queued_of(key: NodeKey, raw: Any) -> QueuedResource:
    """*raw* is a protobuf QueuedResource; of several node_specs the labels count that all of them have alike."""
    error = None
    if raw.state.HasField("failed_data"):
        failure = raw.state.failed_data.error
        error = classify(failure.code, failure.message, Where.OPERATION)
    specs = raw.tpu.node_spec
    return QueuedResource(
        key=key,
        create_time=_instant(raw.create_time),
        state=QueuedState(raw.state.state),
        labels=shared_labels([spec.node.labels for spec in specs]),
        nodes=tuple(name for spec in specs for name in _names_of(spec, key.name)),
        error=error,
        suspended_by_service=raw.state.state_initiator == types.QueuedResourceState.StateInitiator.SERVICE,
    )


def _names_of(spec: Any, resource: str) -> tuple[str, ...]:
    """Names of the nodes of one node_spec; those of a multislice are numbered."""
    if not spec.HasField("multislice_params"):
        return (spec.node_id,)
    params = spec.multislice_params
    return tuple(f"{params.node_id_prefix or resource}-{number}" for number in range(params.node_count))


def queued_path(key: NodeKey) -> str:
    return f"{parent_name(key.project, key.zone)}/queuedResources/{key.name}"


def parent_name(project: str, zone: str) -> str:
    return f"projects/{project}/locations/{zone}"


def node_path(key: NodeKey) -> str:
    return f"{parent_name(key.project, key.zone)}/nodes/{key.name}"


def _instant(timestamp: Any) -> datetime:
    """EPOCH for a timestamp out of range: one bad node must not fail the listing of all others."""
    try:
        return cast(datetime, timestamp.ToDatetime(tzinfo=UTC))
    except (ValueError, OverflowError):
        return EPOCH


def _provisioning(scheduling: Any) -> Provisioning:
    if scheduling.spot:
        return Provisioning.SPOT
    if scheduling.preemptible:
        return Provisioning.PREEMPTIBLE
    return Provisioning.RESERVED if scheduling.reserved else Provisioning.ON_DEMAND


def _scheduling(place: Place) -> types.SchedulingConfig | None:
    match place.provisioning:
        case Provisioning.SPOT:
            return types.SchedulingConfig(spot=True)
        case Provisioning.PREEMPTIBLE:
            return types.SchedulingConfig(preemptible=True)
        case Provisioning.RESERVED:
            return types.SchedulingConfig(reserved=True)
        case _:
            return None
