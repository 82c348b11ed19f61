"""The methods for queued resources, in either version, and those that only v2alpha1 has."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tpucare.testbed.emulator.api import queue_messages as messages
from tpucare.testbed.emulator.api.messages import Wire
from tpucare.testbed.emulator.api.methods import NAME, PARENT, Method, long_running
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.queue_records import QueuedSpec
from tpucare.testbed.emulator.world.records import CallFate, OperationRecord, parse_parent
from tpucare.testbed.emulator.world.world import World


def queue_methods(wire: Wire) -> Mapping[str, Method]:
    """Queued resources, in either version."""

    def create(world: World, ask: Any, now: datetime, fate: CallFate) -> OperationRecord:
        spec = _spec_of(wire, ask.queued_resource)
        return world.create_queued_resource(
            ask.parent, ask.queued_resource_id, spec, now, fate, request_id=ask.request_id
        )

    return {
        "ListQueuedResources": Method(
            wire.pb("ListQueuedResourcesRequest"),
            PARENT,
            lambda world, ask, now, fate: world.list_queued_resources(
                ask.parent, ask.page_size, ask.page_token, now, fate
            ),
            lambda page, _: messages.queued_page(wire, page),
        ),
        "GetQueuedResource": Method(
            wire.pb("GetQueuedResourceRequest"),
            NAME,
            lambda world, ask, now, fate: world.get_queued_resource(ask.name, now, fate),
            lambda record, _: messages.queued_message(wire, record),
        ),
        "CreateQueuedResource": long_running(
            wire,
            wire.pb("CreateQueuedResourceRequest"),
            lambda ask: f"{ask.parent}/queuedResources/{ask.queued_resource_id}",
            create,
        ),
        "DeleteQueuedResource": long_running(
            wire,
            wire.pb("DeleteQueuedResourceRequest"),
            NAME,
            lambda world, ask, now, fate: world.delete_queued_resource(
                ask.name, ask.force, now, fate, request_id=ask.request_id
            ),
        ),
        "ResetQueuedResource": long_running(
            wire,
            wire.pb("ResetQueuedResourceRequest"),
            NAME,
            lambda world, ask, now, fate: world.reset_queued_resource(ask.name, now, fate),
        ),
    }


def _spec_of(wire: Wire, message: Any) -> QueuedSpec:
    """Raises: ApiError (3): an instant or length out of range."""
    try:
        return messages.queued_spec_of(wire, message)
    except (ValueError, OverflowError) as error:
        raise texts.bad_argument(f"queueing_policy: {error}.") from None


def alpha_methods(wire: Wire) -> Mapping[str, Method]:
    """What v2 has not: maintenance at will, and reservations (of which an emulated project has none)."""
    return {
        "SimulateMaintenanceEvent": long_running(
            wire,
            wire.pb("SimulateMaintenanceEventRequest"),
            NAME,
            lambda world, ask, now, fate: world.simulate_maintenance(ask.name, list(ask.worker_ids), now, fate),
        ),
        "PerformMaintenance": long_running(
            wire,
            wire.pb("PerformMaintenanceRequest"),
            NAME,
            lambda world, ask, now, fate: world.perform_maintenance(ask.name, now, fate),
        ),
        "PerformMaintenanceQueuedResource": long_running(
            wire,
            wire.pb("PerformMaintenanceQueuedResourceRequest"),
            NAME,
            lambda world, ask, now, fate: world.perform_queued_maintenance(ask.name, list(ask.node_names), now, fate),
        ),
        "ListReservations": Method(
            wire.pb("ListReservationsRequest"),
            PARENT,
            lambda _world, ask, *_: parse_parent(ask.parent),
            lambda *_: wire.pb("ListReservationsResponse")(),
        ),
    }
