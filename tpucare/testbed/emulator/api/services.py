"""The services of the emulated cloud, put together: which method stands where, for every transport."""

from __future__ import annotations

from collections.abc import Mapping

from tpucare.testbed.emulator.api.messages import Wire
from tpucare.testbed.emulator.api.methods import (
    LOCATIONS,
    OPERATIONS,
    Method,
    catalogue_methods,
    location_methods,
    node_methods,
    operation_methods,
    wires,
)
from tpucare.testbed.emulator.api.queue_methods import alpha_methods, queue_methods


def services() -> Mapping[str, Mapping[str, Method]]:
    """Methods by service, under the real services' names."""
    known = wires()
    return {
        **{wire.service: _of_version(wire) for wire in known.values()},
        OPERATIONS: operation_methods(known),
        LOCATIONS: location_methods(),
    }


def _of_version(wire: Wire) -> Mapping[str, Method]:
    both = {**node_methods(wire), **queue_methods(wire), **catalogue_methods(wire)}
    return {**both, **alpha_methods(wire)} if wire.version == "v2alpha1" else both
