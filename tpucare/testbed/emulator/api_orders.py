"""
Orders about the service as a whole: how much room a zone has, outages, and what becomes of the next call.

Each is one action of `World`. What happens to nodes that exist is in `node_orders`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field

from tpucare.testbed.emulator.order_fields import Answer, BaseOrder, Code, Seconds
from tpucare.testbed.emulator.world.world import World


class Capacity(BaseOrder):
    """Capacity of a pool from now on; `amount` null is unlimited."""

    do: Literal["capacity"]
    zone: str
    accelerator: str = ""
    tier: Literal["spot", "on-demand", "reserved"] = "spot"
    amount: Annotated[int, Field(ge=0)] | None

    def carry(self, world: World, now: datetime) -> Answer:
        world.set_capacity(self.zone, self.accelerator, self.tier, self.amount, now)
        return {}


class Outage(BaseOrder):
    """Break the API, one zone of it, or its speed (`slow`: every answer takes `seconds` longer)."""

    do: Literal["outage"]
    kind: Literal["api", "internal", "zone", "slow"] = "api"
    duration: Seconds
    zone: str = ""
    seconds: Seconds = 30.0

    def carry(self, world: World, now: datetime) -> Answer:
        world.outage(self.kind, timedelta(seconds=self.duration), now, zone=self.zone, seconds=self.seconds)
        return {}


class EndOutages(BaseOrder):
    """Everything answers again."""

    do: Literal["end-outages"]

    def carry(self, world: World, now: datetime) -> Answer:
        world.end_outages(now)
        return {}


class FailNextCreate(BaseOrder):
    """The next create fails, in its operation or in the call."""

    do: Literal["fail-next-create"]
    code: Code
    text: str
    in_operation: bool = True
    zone: str = ""

    def carry(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.fail_next_create(self.code, self.text, in_operation=self.in_operation, zone=self.zone)
        return {}


class LoseNextAnswer(BaseOrder):
    """The next call of a method gets no answer."""

    do: Literal["lose-next-answer"]
    method: str
    applied: bool = True
    code: Code = 14

    def carry(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.lose_next_answer(self.method, applied=self.applied, code=self.code)
        return {}


class FailNext(BaseOrder):
    """The next call of a method is refused."""

    do: Literal["fail-next"]
    method: str
    code: Code
    text: str

    def carry(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.fail_next(self.method, self.code, self.text)
        return {}
