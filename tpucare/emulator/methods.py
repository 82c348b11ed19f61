"""
Every method that the emulator serves, as a table: its request, which resource it names, how it acts on the world, and
how its answer looks on the wire. No gRPC here: `grpc` carries the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any

from google.cloud.location import locations_pb2  # type: ignore[import-untyped]
from google.cloud.tpu_v2 import types
from google.longrunning import operations_pb2  # type: ignore[import-untyped]
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]

from tpucare.emulator import messages
from tpucare.emulator.records import ApiError, CallFate, parse_parent
from tpucare.emulator.world import World

Act = Callable[[World, Any, datetime, CallFate], Any]
"""Acts on the world, under its lock: (world, request message, now, fate) -> record."""

Show = Callable[[Any, Any], Any]
"""Translates outside the lock: (record, request message) -> message or bytes."""


_NAME = attrgetter("name")
_PARENT = attrgetter("parent")


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service. `subject`: the resource name that a request is about, or its parent."""

    request: Any
    subject: Callable[[Any], str]
    act: Act
    show: Show


def services(pages: messages.NodePages) -> Mapping[str, Mapping[str, Method]]:
    """Methods by service, under the real service's names."""
    return {
        "google.cloud.tpu.v2.Tpu": {**_node_methods(pages), **_catalogue_methods()},
        "google.longrunning.Operations": _operation_methods(),
        "google.cloud.location.Locations": _location_methods(),
    }


def _operation(record: Any, _request: Any) -> Any:
    return messages.operation_message(record)


def _empty(_record: Any, _request: Any) -> Any:
    return Empty()


def _node_methods(pages: messages.NodePages) -> Mapping[str, Method]:
    return {
        "ListNodes": Method(
            types.ListNodesRequest.pb(),
            _PARENT,
            lambda world, ask, now, fate: world.list_nodes(ask.parent, ask.page_size, ask.page_token, now, fate),
            lambda page, _: pages.page(page),
        ),
        "GetNode": Method(
            types.GetNodeRequest.pb(),
            _NAME,
            lambda world, ask, now, fate: world.get_node(ask.name, now, fate),
            lambda record, _: messages.node_message(record),
        ),
        "CreateNode": Method(
            types.CreateNodeRequest.pb(),
            lambda ask: f"{ask.parent}/nodes/{ask.node_id}",
            lambda world, ask, now, fate: world.create_node(
                ask.parent, ask.node_id, messages.spec_of(ask.node), now, fate
            ),
            _operation,
        ),
        "DeleteNode": Method(
            types.DeleteNodeRequest.pb(),
            _NAME,
            lambda world, ask, now, fate: world.delete_node(ask.name, now, fate),
            _operation,
        ),
        "StopNode": Method(
            types.StopNodeRequest.pb(),
            _NAME,
            lambda world, ask, now, fate: world.stop_node(ask.name, now, fate),
            _operation,
        ),
        "StartNode": Method(
            types.StartNodeRequest.pb(),
            _NAME,
            lambda world, ask, now, fate: world.start_node(ask.name, now, fate),
            _operation,
        ),
        "UpdateNode": Method(
            types.UpdateNodeRequest.pb(),
            attrgetter("node.name"),
            lambda world, ask, now, fate: world.update_node(
                ask.node.name, list(ask.update_mask.paths), messages.spec_of(ask.node), now, fate
            ),
            _operation,
        ),
        "GetGuestAttributes": Method(
            types.GetGuestAttributesRequest.pb(),
            _NAME,
            lambda world, ask, now, fate: world.guest_attributes(
                ask.name, ask.query_path, list(ask.worker_ids), now, fate
            ),
            lambda found, ask: messages.guest_message(ask.query_path, found, ask.worker_ids),
        ),
    }


def _catalogue_methods() -> Mapping[str, Method]:
    return {
        "ListAcceleratorTypes": Method(
            types.ListAcceleratorTypesRequest.pb(),
            _PARENT,
            lambda world, ask, *_: _offers(world, ask.parent, world.accelerator_types),
            lambda offers, ask: messages.accelerators_message(*_page(offers, ask, messages.accelerator_message)),
        ),
        "GetAcceleratorType": Method(
            types.GetAcceleratorTypeRequest.pb(),
            _NAME,
            lambda world, ask, *_: _offer(ask.name, world.accelerator_types),
            lambda offer, _: messages.accelerator_message(*offer),
        ),
        "ListRuntimeVersions": Method(
            types.ListRuntimeVersionsRequest.pb(),
            _PARENT,
            lambda world, ask, *_: _offers(world, ask.parent, world.runtime_versions),
            lambda offers, ask: messages.runtimes_message(*_page(offers, ask, messages.runtime_message)),
        ),
        "GetRuntimeVersion": Method(
            types.GetRuntimeVersionRequest.pb(),
            _NAME,
            lambda world, ask, *_: _offer(ask.name, world.runtime_versions),
            lambda offer, _: messages.runtime_message(*offer),
        ),
        "GenerateServiceIdentity": Method(
            types.GenerateServiceIdentityRequest.pb(),
            _PARENT,
            lambda _world, ask, *_: parse_parent(ask.parent)[0],
            lambda project, _: types.GenerateServiceIdentityResponse.pb()(
                identity={"email": f"service-{project}@cloud-tpu.iam.gserviceaccount.com"}
            ),
        ),
    }


def _operation_methods() -> Mapping[str, Method]:
    return {
        "GetOperation": Method(
            operations_pb2.GetOperationRequest,
            _NAME,
            lambda world, ask, now, fate: world.get_operation(ask.name, now, fate),
            _operation,
        ),
        "ListOperations": Method(
            operations_pb2.ListOperationsRequest,
            _NAME,
            lambda world, ask, now, fate: world.list_operations(ask.name, now, fate),
            lambda records, _: messages.operations_message(records),
        ),
        "CancelOperation": Method(
            operations_pb2.CancelOperationRequest,
            _NAME,
            lambda world, ask, now, fate: world.cancel_operation(ask.name, now, fate),
            _empty,
        ),
        "DeleteOperation": Method(
            operations_pb2.DeleteOperationRequest,
            _NAME,
            lambda world, ask, now, fate: world.delete_operation(ask.name, now, fate),
            _empty,
        ),
    }


def _location_methods() -> Mapping[str, Method]:
    return {
        "ListLocations": Method(
            locations_pb2.ListLocationsRequest,
            _NAME,
            lambda world, *_: world.locations(),
            lambda zones, ask: messages.locations_message(ask.name.rpartition("/")[2], zones),
        ),
        "GetLocation": Method(
            locations_pb2.GetLocationRequest,
            _NAME,
            lambda world, ask, *_: _location(world, ask.name),
            lambda place, _: messages.location_message(*place),
        ),
    }


def _location(world: World, name: str) -> tuple[str, str]:
    project, zone = parse_parent(name)
    if zone not in world.locations():
        raise ApiError(5, f"Location {zone} is not found or access is unauthorized.")
    return project, zone


def _offers(world: World, parent: str, names: Callable[[str], Sequence[str]]) -> list[tuple[str, str]]:
    """(parent, name) of everything that *names* gives for the zone, or for all zones."""
    project, zone = parse_parent(parent)
    zones = world.locations() if zone == "-" else [zone]
    return [(f"projects/{project}/locations/{one}", name) for one in zones for name in names(one)]


def _offer(name: str, names: Callable[[str], Sequence[str]]) -> tuple[str, str]:
    parent, _, last = name.rpartition("/")
    place = parent.rpartition("/")[0]
    if last not in names(parse_parent(place)[1]):
        raise ApiError(5, f"Resource '{name}' was not found", resource=name)
    return place, last


def _page(offers: Sequence[tuple[str, str]], ask: Any, show: Callable[[str, str], Any]) -> tuple[list[Any], str]:
    """One page of a catalogue, and the token of the next; a token is the number of entries before it."""
    first = int(ask.page_token) if ask.page_token.isdigit() else 0
    last = first + (ask.page_size or len(offers))
    return [show(*offer) for offer in offers[first:last]], str(last) if last < len(offers) else ""
