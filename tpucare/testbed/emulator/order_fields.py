"""
What every order to a running world is made of: its base, and the kinds of fields that orders share.

Strict: an unknown key, a length beyond ten years, a code that gRPC lacks are refused. The orders themselves are in
`node_orders` and `api_orders`, and put together in `orders`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.world import latency as lengths
from tpucare.testbed.emulator.world.latency import Strict
from tpucare.testbed.emulator.world.world import World


def number_of(names: type[IntEnum]) -> BeforeValidator:
    """Numbers as they are, names of *names* as their numbers."""

    def convert(value: object) -> object:
        if isinstance(value, str) and value.isdigit():
            return int(value)
        known = {member.name: int(member) for member in names}
        return known.get(value.upper().replace("-", "_"), value) if isinstance(value, str) else value

    return BeforeValidator(convert)


Seconds = Annotated[lengths.Seconds, Field(le=10 * 365 * 86400)]
"""A date of this world plus ten years still is a date; infinity is none."""
State = Annotated[int, number_of(NodeState)]
Shown = Annotated[int | Literal["never", "gone"], number_of(NodeState)]
HealthNumber = Annotated[int, number_of(Health)]
Code = Annotated[int, Field(ge=1, le=16)]
Answer = Mapping[str, Any]


class BaseOrder(Strict):
    """`carry` acts on the world, under its lock, and says what was touched."""

    def carry(self, world: World, now: datetime) -> Answer:
        raise NotImplementedError


def touched(ids: Sequence[str]) -> Answer:
    return {"touched": list(ids)}


def length(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
