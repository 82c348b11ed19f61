"""
Between queued resources and the messages of both versions of the API, and operations on either kind of resource.

The versions differ in more than numbers here: `multislice_params` is `multi_node_params` in v2alpha1, which also knows
`best_effort` and `guaranteed.reserved`; and its DeleteQueuedResource answers with the resource, v2's with Empty.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from google.longrunning.operations_pb2 import Operation  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]

from tpucare.testbed.emulator.api.messages import UNKNOWN_FIELDS, Wire, node_message, settings_message, spec_of
from tpucare.testbed.emulator.world.queue_records import (
    NodeWish,
    QueuedPage,
    QueuedRecord,
    QueuedSpec,
    QueueState,
    Validity,
)
from tpucare.testbed.emulator.world.records import NodeRecord, OperationRecord

_DATA = {
    QueueState.CREATING: "creating_data",
    QueueState.ACCEPTED: "accepted_data",
    QueueState.PROVISIONING: "provisioning_data",
    QueueState.DELETING: "deleting_data",
    QueueState.ACTIVE: "active_data",
    QueueState.SUSPENDING: "suspending_data",
    QueueState.SUSPENDED: "suspended_data",
}
"""The member of `QueuedResourceState` that stands beside each state; WAITING_FOR_RESOURCES has none."""


def queued_message(wire: Wire, record: QueuedRecord) -> Any:
    """QueuedResource as the service shows it."""
    message = wire.pb("QueuedResource")(name=record.name, reservation_name=record.spec.reservation_name)
    message.create_time.FromDatetime(record.create_time)
    state = message.state
    state.state, state.state_initiator = record.state, record.initiator
    if record.error is not None:
        state.failed_data.error.code, state.failed_data.error.message = record.error
    elif record.state in _DATA:
        getattr(state, _DATA[QueueState(record.state)]).SetInParent()
    for wish in record.spec.wishes:
        _fill_wish(wire, message.tpu.node_spec.add(), wish, record)
    _fill_tier(wire, message, record.spec)
    if record.spec.has_policy:
        _fill_policy(message.queueing_policy, record.spec.validity)
    if record.unknown_fields:
        message.MergeFromString(UNKNOWN_FIELDS)
    return message


def _fill_wish(wire: Wire, message: Any, wish: NodeWish, record: QueuedRecord) -> None:
    message.parent = wish.parent or record.path.parent
    if wish.count:
        params = getattr(message, _params_field(wire))
        params.node_count, params.node_id_prefix = wish.count, wish.prefix
    else:
        message.node_id = wish.node_id
    message.node.CopyFrom(settings_message(wire, wish.spec))


def _params_field(wire: Wire) -> str:
    return "multislice_params" if wire.version == "v2" else "multi_node_params"


def _fill_tier(wire: Wire, message: Any, spec: QueuedSpec) -> None:
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


def queued_spec_of(wire: Wire, message: Any) -> QueuedSpec:
    """What a caller asked for; fields that only the service writes are ignored."""
    alpha, guaranteed = wire.version == "v2alpha1", message.guaranteed
    tiers = {"spot": "spot", "guaranteed": "guaranteed"} | ({"best_effort": "best-effort"} if alpha else {})
    return QueuedSpec(
        wishes=tuple(_wish_of(wire, one) for one in message.tpu.node_spec),
        tier=next((tier for name, tier in tiers.items() if message.HasField(name)), ""),
        min_duration=guaranteed.min_duration.ToTimedelta() if guaranteed.HasField("min_duration") else None,
        reserved=alpha and guaranteed.reserved,
        reservation_name=message.reservation_name,
        validity=_validity_of(message.queueing_policy),
        has_policy=message.HasField("queueing_policy"),
    )


def _wish_of(wire: Wire, message: Any) -> NodeWish:
    params = getattr(message, _params_field(wire))
    return NodeWish(
        spec=spec_of(wire, message.node),
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


def queued_page(wire: Wire, page: QueuedPage) -> Any:
    """ListQueuedResourcesResponse."""
    return wire.pb("ListQueuedResourcesResponse")(
        queued_resources=[queued_message(wire, record) for record in page.resources],
        next_page_token=page.next_page_token,
        unreachable=page.unreachable,
    )


def operation_message(wire: Wire, record: OperationRecord) -> Any:
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


def _response(wire: Wire, record: OperationRecord) -> Any:
    match record.response:
        case NodeRecord():
            return node_message(wire, record.response)
        case QueuedRecord() if record.verb != "delete" or wire.version == "v2alpha1":
            return queued_message(wire, record.response)
    return Empty()
