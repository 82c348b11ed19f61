"""
Orders about nodes, their workers and queued resources: how they end, and what the API says of those that live.

Each is one action of `World`. What becomes of calls, and how much room there is, is in `api_orders`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field

from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.order_fields import (
    Answer,
    BaseOrder,
    Code,
    HealthNumber,
    Seconds,
    Shown,
    State,
    length,
    number_of,
    touched,
)
from tpucare.testbed.emulator.world.queue_records import QueueState
from tpucare.testbed.emulator.world.world import World


class Preempt(BaseOrder):
    """Take nodes away."""

    do: Literal["preempt"]
    selector: str
    notice: Seconds | None = None
    visible_after: Seconds | None = None
    silent: bool = False
    shown: Shown = int(NodeState.PREEMPTED)
    burst: Seconds = 0.0

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(
            world.preempt(
                self.selector,
                now,
                notice=length(self.notice),
                visible_after=length(self.visible_after),
                silent=self.silent,
                shown=self.shown,
                burst=timedelta(seconds=self.burst),
            )
        )


class Terminate(BaseOrder):
    """Workers die, the node shows TERMINATED."""

    do: Literal["terminate"]
    selector: str

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.terminate(self.selector, now))


class Forget(BaseOrder):
    """The node is gone at once."""

    do: Literal["forget"]
    selector: str

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.forget(self.selector, now))


class SetHealth(BaseOrder):
    """Show a health value."""

    do: Literal["health"]
    selector: str
    health: HealthNumber
    description: str = ""

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.set_health(self.selector, self.health, now, self.description))


class SetState(BaseOrder):
    """Show a state, known or not."""

    do: Literal["state"]
    selector: str
    state: State

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.set_state(self.selector, self.state, now))


class UnknownFields(BaseOrder):
    """Show fields that no package knows, in nodes, and with `answers` in every answer."""

    do: Literal["unknown-fields"]
    selector: str
    on: bool = True
    answers: bool = False

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.show_unknown_fields(self.selector, now, on=self.on, answers=self.answers))


class FailQueued(BaseOrder):
    """Queued resources fail late."""

    do: Literal["fail-queued"]
    selector: str
    code: Code = 13
    text: str = "an internal error has occurred"

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.fail_queued(self.selector, self.code, self.text, now))


class SetQueuedState(BaseOrder):
    """Show a state of queued resources, known or not."""

    do: Literal["queued-state"]
    selector: str
    state: Annotated[int, number_of(QueueState)]

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.set_queued_state(self.selector, self.state, now))


class Maintenance(BaseOrder):
    """Announce a maintenance, perhaps with a restart."""

    do: Literal["maintenance"]
    selector: str
    event: str = "TERMINATE_ON_HOST_MAINTENANCE"
    duration: Seconds = 300.0
    restart: bool = False

    def carry(self, world: World, now: datetime) -> Answer:
        duration = timedelta(seconds=self.duration)
        return touched(world.maintenance(self.selector, now, event=self.event, duration=duration, restart=self.restart))


class StickDeleting(BaseOrder):
    """Deletes hang until repeated."""

    do: Literal["stick-deleting"]
    selector: str
    repeats: Annotated[int, Field(ge=1)] = 1

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.stick_deleting(self.selector, now, repeats=self.repeats))


class LoseWorker(BaseOrder):
    """One worker dies or falls silent; the API shows nothing."""

    do: Literal["lose-worker"]
    selector: str
    worker: Annotated[int, Field(ge=0)]
    silent: bool = False

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.lose_worker(self.selector, self.worker, now, silent=self.silent))


class RestoreWorker(BaseOrder):
    """Boot a lost worker again, or let a silent one answer."""

    do: Literal["restore-worker"]
    selector: str
    worker: Annotated[int, Field(ge=0)]

    def carry(self, world: World, now: datetime) -> Answer:
        return touched(world.restore_worker(self.selector, self.worker, now))


class MissWorker(BaseOrder):
    """The next node lacks a worker for ever."""

    do: Literal["miss-worker"]
    worker: int = -1
    zone: str = ""

    def carry(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.miss_worker(self.worker, zone=self.zone)
        return {}
