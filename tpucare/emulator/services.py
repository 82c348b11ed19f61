"""The services of the emulated cloud, put together: which method stands where, for every transport."""

from __future__ import annotations

from collections.abc import Mapping

from tpucare.emulator import messages
from tpucare.emulator.methods import (
    LOCATIONS,
    OPERATIONS,
    Method,
    catalogue_methods,
    location_methods,
    node_methods,
    operation_methods,
    wires,
)


def services() -> Mapping[str, Mapping[str, Method]]:
    """Methods by service, under the real services' names."""
    known = wires()
    return {
        **{wire.service: {**node_methods(wire), **catalogue_methods(wire)} for wire in known.values()},
        OPERATIONS: operation_methods(known, messages.operation_message),
        LOCATIONS: location_methods(),
    }
