"""
A table of every method that the emulator serves: its request, the resource it names, its effect on the world, and the
message of its answer. Without transport: `grpc` and `rest` serve the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

from google.cloud.location import locations_pb2  # type: ignore[import-untyped]
from google.longrunning import operations_pb2  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]

from tpucare.testbed.emulator.api import messages
from tpucare.testbed.emulator.api.messages import WireVersion, operation_message
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.queued_records import QueuedSpec
from tpucare.testbed.emulator.world.records import ApiError, CallFate, OperationRecord, parse_parent
from tpucare.testbed.emulator.world.world import World

Act = Callable[[World, Any, datetime, CallFate], Any]
"""Acts on the world, under its lock: (world, request message, now, fate) -> record."""

Show = Callable[[Any, Any], Any]
"""Translates outside the lock: (record, request message) -> message or bytes."""

T = TypeVar("T")

VERSIONS = ("v2", "v2alpha1")
OPERATIONS = "google.longrunning.Operations"
LOCATIONS = "google.cloud.location.Locations"

NAME = attrgetter("name")
PARENT = attrgetter("parent")


@dataclass(frozen=True, slots=True)
class Method:
    """
    One method of a service. `subject`: the resource name in a request, or its parent.

    answer: class of the answer where `show` gives bytes
    """

    request: Any
    subject: Callable[[Any], str]
    act: Act
    show: Show
    answer: Any = None


def wires() -> Mapping[str, WireVersion]:
    """Both versions of the API, by name."""
    return {version: WireVersion(version) for version in VERSIONS}


def long_running(wire: WireVersion, request: Any, subject: Callable[[Any], str], act: Act) -> Method:
    """A method that answers with an operation, whose messages are of the version that was called."""

    def begin(world: World, ask: Any, now: datetime, fate: CallFate) -> OperationRecord:
        return world.api.set_operation_version(act(world, ask, now, fate), wire.version)

    return Method(request, subject, begin, lambda record, _: operation_message(wire, record))


def node_methods(wire: WireVersion) -> Mapping[str, Method]:
    """Nodes, in either version. Only v2alpha1 has a request_id."""
    pages = messages.NodePages(wire)
    return {
        "ListNodes": Method(
            wire.pb("ListNodesRequest"),
            PARENT,
            lambda world, ask, now, fate: world.api.list_nodes(ask.parent, ask.page_size, ask.page_token, now, fate),
            lambda page, _: pages.page(page),
            answer=wire.pb("ListNodesResponse"),
        ),
        "GetNode": Method(
            wire.pb("GetNodeRequest"),
            NAME,
            lambda world, ask, now, fate: world.api.get_node(ask.name, now, fate),
            lambda record, _: messages.node_message(wire, record),
        ),
        "CreateNode": long_running(
            wire,
            wire.pb("CreateNodeRequest"),
            lambda ask: f"{ask.parent}/nodes/{ask.node_id}",
            lambda world, ask, now, fate: world.api.create_node(
                ask.parent, ask.node_id, messages.settings_of(wire, ask.node), now, fate, request_id=_request_id(ask)
            ),
        ),
        "DeleteNode": long_running(
            wire,
            wire.pb("DeleteNodeRequest"),
            NAME,
            lambda world, ask, now, fate: world.api.delete_node(ask.name, now, fate, request_id=_request_id(ask)),
        ),
        "StopNode": long_running(
            wire,
            wire.pb("StopNodeRequest"),
            NAME,
            lambda world, ask, now, fate: world.api.stop_node(ask.name, now, fate),
        ),
        "StartNode": long_running(
            wire,
            wire.pb("StartNodeRequest"),
            NAME,
            lambda world, ask, now, fate: world.api.start_node(ask.name, now, fate),
        ),
        "UpdateNode": long_running(
            wire,
            wire.pb("UpdateNodeRequest"),
            attrgetter("node.name"),
            lambda world, ask, now, fate: world.api.update_node(
                ask.node.name, list(ask.update_mask.paths), messages.settings_of(wire, ask.node), now, fate
            ),
        ),
        "GetGuestAttributes": Method(
            wire.pb("GetGuestAttributesRequest"),
            NAME,
            lambda world, ask, now, fate: world.api.guest_attributes(
                ask.name, ask.query_path, list(ask.worker_ids), now, fate
            ),
            lambda found, ask: messages.guest_message(wire, ask.query_path, found, ask.worker_ids),
        ),
    }


def _request_id(ask: Any) -> str:
    return getattr(ask, "request_id", "")


def catalogue_methods(wire: WireVersion) -> Mapping[str, Method]:
    """Accelerator types and runtime versions of a zone, and the service identity."""

    def accelerator(parent: str, name: str) -> Any:
        return messages.accelerator_message(wire, parent, name)

    def runtime(parent: str, name: str) -> Any:
        return messages.runtime_message(wire, parent, name)

    return {
        "ListAcceleratorTypes": Method(
            wire.pb("ListAcceleratorTypesRequest"),
            PARENT,
            lambda world, ask, *_: _offers(world, ask.parent, world.api.accelerator_types),
            lambda offers, ask: _catalogue(wire, "ListAcceleratorTypesResponse", offers, ask, accelerator),
        ),
        "GetAcceleratorType": Method(
            wire.pb("GetAcceleratorTypeRequest"),
            NAME,
            lambda world, ask, *_: _offer(ask.name, world.api.accelerator_types),
            lambda offer, _: accelerator(*offer),
        ),
        "ListRuntimeVersions": Method(
            wire.pb("ListRuntimeVersionsRequest"),
            PARENT,
            lambda world, ask, *_: _offers(world, ask.parent, world.api.runtime_versions),
            lambda offers, ask: _catalogue(wire, "ListRuntimeVersionsResponse", offers, ask, runtime),
        ),
        "GetRuntimeVersion": Method(
            wire.pb("GetRuntimeVersionRequest"),
            NAME,
            lambda world, ask, *_: _offer(ask.name, world.api.runtime_versions),
            lambda offer, _: runtime(*offer),
        ),
        "GenerateServiceIdentity": Method(
            wire.pb("GenerateServiceIdentityRequest"),
            PARENT,
            lambda _world, ask, *_: parse_parent(ask.parent)[0],
            lambda project, _: wire.pb("GenerateServiceIdentityResponse")(
                identity={"email": f"service-{project}@cloud-tpu.iam.gserviceaccount.com"}
            ),
        ),
    }


def operation_methods(known: Mapping[str, WireVersion]) -> Mapping[str, Method]:
    """google.longrunning.Operations: an operation is shown in the version of the API that began it."""

    def message(record: OperationRecord, _request: Any = None) -> Any:
        return operation_message(known[record.api_version], record)

    return {
        "GetOperation": Method(
            operations_pb2.GetOperationRequest,
            NAME,
            lambda world, ask, now, fate: world.api.get_operation(ask.name, now, fate),
            message,
        ),
        "ListOperations": Method(
            operations_pb2.ListOperationsRequest,
            NAME,
            lambda world, ask, now, fate: world.api.list_operations(ask.name, now, fate),
            lambda records, ask: messages.operations_message(*_page([message(one) for one in records], ask)),
        ),
        "CancelOperation": Method(
            operations_pb2.CancelOperationRequest,
            NAME,
            lambda world, ask, now, fate: world.api.cancel_operation(ask.name, now, fate),
            _empty,
        ),
        "DeleteOperation": Method(
            operations_pb2.DeleteOperationRequest,
            NAME,
            lambda world, ask, now, fate: world.api.delete_operation(ask.name, now, fate),
            _empty,
        ),
    }


def location_methods() -> Mapping[str, Method]:
    """google.cloud.location.Locations."""
    return {
        "ListLocations": Method(
            locations_pb2.ListLocationsRequest,
            NAME,
            lambda world, *_: world.api.locations(),
            lambda zones, ask: messages.locations_message(ask.name.rpartition("/")[2], zones),
        ),
        "GetLocation": Method(
            locations_pb2.GetLocationRequest,
            NAME,
            lambda world, ask, *_: _location(world, ask.name),
            lambda place, _: messages.location_message(*place),
        ),
    }


def _empty(_record: Any, _request: Any) -> Any:
    return Empty()


def _location(world: World, name: str) -> tuple[str, str]:
    project, zone = parse_parent(name)
    if zone not in world.api.locations():
        raise ApiError(5, f"Location {zone} is not found or access is unauthorized.")
    return project, zone


def _offers(world: World, parent: str, names: Callable[[str], Sequence[str]]) -> list[tuple[str, str]]:
    """(parent, name) of everything that *names* gives for the zone, or for all zones."""
    project, zone = parse_parent(parent)
    zones = world.api.locations() if zone == "-" else [zone]
    return [(f"projects/{project}/locations/{one}", name) for one in zones for name in names(one)]


def _offer(name: str, names: Callable[[str], Sequence[str]]) -> tuple[str, str]:
    parent, _, last = name.rpartition("/")
    place = parent.rpartition("/")[0]
    if last not in names(parse_parent(place)[1]):
        raise ApiError(5, f"Resource '{name}' was not found", resource=name)
    return place, last


def _catalogue(
    wire: WireVersion, answer: str, offers: Sequence[tuple[str, str]], ask: Any, show: Callable[[str, str], Any]
) -> Any:
    """One page of a catalogue."""
    page, token = _page(offers, ask)
    message = wire.pb(answer)(next_page_token=token)
    entries = getattr(message, message.DESCRIPTOR.fields_by_number[1].name)
    entries.extend(show(*offer) for offer in page)
    return message


def _page(entries: Sequence[T], ask: Any) -> tuple[Sequence[T], str]:
    """The entries of the requested page, and the token of the next; a token is the number of entries before it."""
    first = int(ask.page_token) if ask.page_token.isdigit() else 0
    last = first + (ask.page_size or len(entries))
    return entries[first:last], str(last) if last < len(entries) else ""


# --- queued resources, in either version, and methods of v2alpha1 alone -----------------------------------------------


def queue_methods(wire: WireVersion) -> Mapping[str, Method]:
    """Queued resources, in either version."""

    def create(world: World, ask: Any, now: datetime, fate: CallFate) -> OperationRecord:
        spec = _spec_of(wire, ask.queued_resource)
        return world.queued_api.create_queued_resource(
            ask.parent, ask.queued_resource_id, spec, now, fate, request_id=ask.request_id
        )

    return {
        "ListQueuedResources": Method(
            wire.pb("ListQueuedResourcesRequest"),
            PARENT,
            lambda world, ask, now, fate: world.queued_api.list_queued_resources(
                ask.parent, ask.page_size, ask.page_token, now, fate
            ),
            lambda page, _: messages.queued_page(wire, page),
        ),
        "GetQueuedResource": Method(
            wire.pb("GetQueuedResourceRequest"),
            NAME,
            lambda world, ask, now, fate: world.queued_api.get_queued_resource(ask.name, now, fate),
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
            lambda world, ask, now, fate: world.queued_api.delete_queued_resource(
                ask.name, ask.force, now, fate, request_id=ask.request_id
            ),
        ),
        "ResetQueuedResource": long_running(
            wire,
            wire.pb("ResetQueuedResourceRequest"),
            NAME,
            lambda world, ask, now, fate: world.queued_api.reset_queued_resource(ask.name, now, fate),
        ),
    }


def _spec_of(wire: WireVersion, message: Any) -> QueuedSpec:
    """Raises: ApiError (3): an instant or length out of range."""
    try:
        return messages.queued_spec_of(wire, message)
    except (ValueError, OverflowError) as error:
        raise texts.bad_argument(f"queueing_policy: {error}.") from None


def alpha_methods(wire: WireVersion) -> Mapping[str, Method]:
    """Methods of v2alpha1 alone: maintenance, and reservations (an emulated project has none)."""
    return {
        "SimulateMaintenanceEvent": long_running(
            wire,
            wire.pb("SimulateMaintenanceEventRequest"),
            NAME,
            lambda world, ask, now, fate: world.api.simulate_maintenance(ask.name, list(ask.worker_ids), now, fate),
        ),
        "PerformMaintenance": long_running(
            wire,
            wire.pb("PerformMaintenanceRequest"),
            NAME,
            lambda world, ask, now, fate: world.api.perform_maintenance(ask.name, now, fate),
        ),
        "PerformMaintenanceQueuedResource": long_running(
            wire,
            wire.pb("PerformMaintenanceQueuedResourceRequest"),
            NAME,
            lambda world, ask, now, fate: world.queued_api.perform_queued_maintenance(
                ask.name, list(ask.node_names), now, fate
            ),
        ),
        "ListReservations": Method(
            wire.pb("ListReservationsRequest"),
            PARENT,
            lambda _world, ask, *_: parse_parent(ask.parent),
            lambda *_: wire.pb("ListReservationsResponse")(),
        ),
    }


# --- the services and their methods -----------------------------------------------------------------------------------


def services() -> Mapping[str, Mapping[str, Method]]:
    """Methods by service, under the real services' names."""
    known = wires()
    return {
        **{wire.service: _of_version(wire) for wire in known.values()},
        OPERATIONS: operation_methods(known),
        LOCATIONS: location_methods(),
    }


def _of_version(wire: WireVersion) -> Mapping[str, Method]:
    both = {**node_methods(wire), **queue_methods(wire), **catalogue_methods(wire)}
    return {**both, **alpha_methods(wire)} if wire.version == "v2alpha1" else both
