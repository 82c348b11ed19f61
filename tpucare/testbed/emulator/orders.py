"""
The orders to a running emulator, as strict records: one class per action of `Operator`, checked before it is applied.

An order is a JSON object whose `do` names the action; lengths are seconds or texts such as `90s`, states and health are
numbers or names. An unknown key, a length beyond ten years and a code that gRPC lacks are refused: a wrong order is a
ConfigError of one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from tpucare.model.errors import ConfigError
from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.world import latency as lengths
from tpucare.testbed.emulator.world.latency import Strict
from tpucare.testbed.emulator.world.queued_records import QueueState
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
"""At most ten years: a date of this world plus that length must still be a date."""
State = Annotated[int, number_of(NodeState)]
Shown = Annotated[int | Literal["never", "gone"], number_of(NodeState)]
HealthNumber = Annotated[int, number_of(Health)]
Code = Annotated[int, Field(ge=1, le=16)]
Answer = Mapping[str, Any]


class BaseOrder(Strict):
    """`apply` changes the world, under its lock, and returns the answer, for example the ids of changed nodes."""

    def apply(self, world: World, now: datetime) -> Answer:
        raise NotImplementedError


def touched(ids: Sequence[str]) -> Answer:
    return {"touched": list(ids)}


def length(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


# --- nodes, their workers and queued resources ------------------------------------------------------------------------


class Preempt(BaseOrder):
    """Preempt nodes."""

    do: Literal["preempt"]
    selector: str
    notice: Seconds | None = None
    visible_after: Seconds | None = None
    silent: bool = False
    shown: Shown = int(NodeState.PREEMPTED)
    burst: Seconds = 0.0

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(
            world.operator.preempt(
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
    """Kill the workers of nodes and show TERMINATED."""

    do: Literal["terminate"]
    selector: str

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.terminate(self.selector, now))


class RemoveNodes(BaseOrder):
    """Remove nodes at once: 404."""

    do: Literal["forget"]
    selector: str

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.remove(self.selector, now))


class SetHealth(BaseOrder):
    """Show a health value."""

    do: Literal["health"]
    selector: str
    health: HealthNumber
    description: str = ""

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.set_health(self.selector, self.health, now, self.description))


class SetState(BaseOrder):
    """Show a state, known or not."""

    do: Literal["state"]
    selector: str
    state: State

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.set_state(self.selector, self.state, now))


class UnknownFields(BaseOrder):
    """Show fields that no package knows, in nodes, and with `answers` in every answer."""

    do: Literal["unknown-fields"]
    selector: str
    on: bool = True
    answers: bool = False

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.show_unknown_fields(self.selector, now, on=self.on, answers=self.answers))


class FailQueued(BaseOrder):
    """Make queued resources FAILED with an error."""

    do: Literal["fail-queued"]
    selector: str
    code: Code = 13
    text: str = "an internal error has occurred"

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.fail_queued(self.selector, self.code, self.text, now))


class SetQueuedState(BaseOrder):
    """Show a state of queued resources, known or not."""

    do: Literal["queued-state"]
    selector: str
    state: Annotated[int, number_of(QueueState)]

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.set_queued_state(self.selector, self.state, now))


class Maintenance(BaseOrder):
    """Announce a maintenance, perhaps with a restart."""

    do: Literal["maintenance"]
    selector: str
    event: str = "TERMINATE_ON_HOST_MAINTENANCE"
    duration: Seconds = 300.0
    restart: bool = False

    def apply(self, world: World, now: datetime) -> Answer:
        duration = timedelta(seconds=self.duration)
        return touched(
            world.operator.maintenance(self.selector, now, event=self.event, duration=duration, restart=self.restart)
        )


class StickDeleting(BaseOrder):
    """Let deletes hang until they are repeated."""

    do: Literal["stick-deleting"]
    selector: str
    repeats: Annotated[int, Field(ge=1)] = 1

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.stick_deleting(self.selector, now, repeats=self.repeats))


class LoseWorker(BaseOrder):
    """Kill or silence one worker; the API does not show it."""

    do: Literal["lose-worker"]
    selector: str
    worker: Annotated[int, Field(ge=0)]
    silent: bool = False

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.lose_worker(self.selector, self.worker, now, silent=self.silent))


class RestoreWorker(BaseOrder):
    """Boot a lost worker again, or let a silent one answer."""

    do: Literal["restore-worker"]
    selector: str
    worker: Annotated[int, Field(ge=0)]

    def apply(self, world: World, now: datetime) -> Answer:
        return touched(world.operator.restore_worker(self.selector, self.worker, now))


class MissWorker(BaseOrder):
    """Let the next node lack a worker for ever."""

    do: Literal["miss-worker"]
    worker: int = -1
    zone: str = ""

    def apply(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.operator.miss_worker(self.worker, zone=self.zone)
        return {}


# --- the service: capacity, outages, the next calls -------------------------------------------------------------------


class SetCapacity(BaseOrder):
    """Set the capacity of a pool from now on; `amount` null is unlimited."""

    do: Literal["capacity"]
    zone: str
    accelerator: str = ""
    tier: Literal["spot", "on-demand", "reserved"] = "spot"
    amount: Annotated[int, Field(ge=0)] | None

    def apply(self, world: World, now: datetime) -> Answer:
        world.operator.set_capacity(self.zone, self.accelerator, self.tier, self.amount, now)
        return {}


class BeginOutage(BaseOrder):
    """Break the API, one zone of it, or its speed (`slow`: every answer takes `seconds` longer)."""

    do: Literal["outage"]
    kind: Literal["api", "internal", "zone", "slow"] = "api"
    duration: Seconds
    zone: str = ""
    seconds: Seconds = 30.0

    def apply(self, world: World, now: datetime) -> Answer:
        world.operator.outage(self.kind, timedelta(seconds=self.duration), now, zone=self.zone, seconds=self.seconds)
        return {}


class EndOutages(BaseOrder):
    """End all outages."""

    do: Literal["end-outages"]

    def apply(self, world: World, now: datetime) -> Answer:
        world.operator.end_outages(now)
        return {}


class FailNextCreate(BaseOrder):
    """Fail the next create, in its operation or in the call."""

    do: Literal["fail-next-create"]
    code: Code
    text: str
    in_operation: bool = True
    zone: str = ""

    def apply(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.operator.fail_next_create(self.code, self.text, in_operation=self.in_operation, zone=self.zone)
        return {}


class LoseNextAnswer(BaseOrder):
    """Lose the answer of the next call of a method."""

    do: Literal["lose-next-answer"]
    method: str
    applied: bool = True
    code: Code = 14

    def apply(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.operator.lose_next_answer(self.method, applied=self.applied, code=self.code)
        return {}


class FailNext(BaseOrder):
    """Refuse the next call of a method."""

    do: Literal["fail-next"]
    method: str
    code: Code
    text: str

    def apply(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        world.operator.fail_next(self.method, self.code, self.text)
        return {}


# --- all orders, distinguished by `do` --------------------------------------------------------------------------------


class Status(BaseOrder):
    """List every node that exists, whether or not the API shows it yet."""

    do: Literal["status"]

    def apply(self, world: World, now: datetime) -> Answer:
        world.advance(now)
        nodes = [
            {
                "name": record.path.node_id,
                "project": record.path.project,
                "zone": record.path.zone,
                "id": record.id,
                "type": record.spec.accelerator_type,
                "tier": record.spec.tier,
                "state": NodeState(record.state).name,
                "health": Health(record.health).name,
                "workers": [pair.internal for pair in record.endpoints],
            }
            for record in world.nodes()
        ]
        queued = [{"name": one.name, "state": one.state} for one in world.queued_resources()]
        return {"now": world.now.isoformat(), "zones": world.api.locations(), "nodes": nodes, "queued": queued}


Order = (
    Preempt
    | Terminate
    | RemoveNodes
    | SetCapacity
    | SetHealth
    | SetState
    | UnknownFields
    | FailQueued
    | SetQueuedState
    | Maintenance
    | BeginOutage
    | EndOutages
    | StickDeleting
    | LoseWorker
    | RestoreWorker
    | FailNextCreate
    | MissWorker
    | LoseNextAnswer
    | FailNext
    | Status
)

_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="do")])
ACTIONS: tuple[str, ...] = tuple(order.model_fields["do"].annotation.__args__[0] for order in Order.__args__)


def parse_order(raw: object) -> Order:
    """Raises: ConfigError: one line that names the action and the key, with the nearest right word."""
    if not isinstance(raw, Mapping):
        raise ConfigError('an order is a JSON object such as {"do": "preempt", "selector": "*"}')
    action = raw.get("do")
    if action is None:
        raise ConfigError(f'an order names its action, such as {{"do": "status"}}; there are {", ".join(ACTIONS)}')
    if action not in ACTIONS:
        raise ConfigError(f"no action {action!r}{_nearest(str(action), ACTIONS)}; there are {', '.join(ACTIONS)}")
    try:
        return _ORDER.validate_python(raw)
    except ValidationError as error:
        raise ConfigError(f"{action}: {_first_line(error)}") from None


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"][1:2])
    text = {"extra_forbidden": "unknown key", "missing": "is missing"}.get(first["type"], str(first["msg"]))
    return " ".join(f"{key}: {text}".split())


def _nearest(word: str, words: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {found[0]!r}?" if found else ""
