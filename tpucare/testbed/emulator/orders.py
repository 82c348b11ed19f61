"""
The orders to a running emulator, as strict records: one class per action of `Operator`, checked before it is applied.

A class names its fields, the method that it calls and, if it has a command of its own, the help of that command
(`tpucare.cli.emulator` makes the commands from the classes).

An order is a JSON object whose `do` names the action; lengths are seconds or texts such as `90s`, states and health are
numbers or names. An unknown key, a length beyond ten years and a code that gRPC lacks are refused: a wrong order is a
ConfigError of one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, GetPydanticSchema, ValidationError
from pydantic_core.core_schema import no_info_after_validator_function as after_validation

from tpucare.model.errors import ConfigError
from tpucare.model.resources import Health, NodeState, QueuedState
from tpucare.testbed.emulator.world import latency as lengths
from tpucare.testbed.emulator.world.latency import Strict
from tpucare.testbed.emulator.world.operator import Operator
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
Length = Annotated[
    timedelta,
    GetPydanticSchema(lambda _, schema: after_validation(lambda seconds: timedelta(seconds=seconds), schema(Seconds))),
]
State = Annotated[int, number_of(NodeState)]
Shown = Annotated[int | Literal["never", "gone"], number_of(NodeState)]
HealthNumber = Annotated[int, number_of(Health)]
Code = Annotated[int, Field(ge=1, le=16)]
Answer = Mapping[str, Any]
Method = Callable[..., Sequence[str] | None]
"""A method of `Operator`: its arguments are the fields of the order, its answer the ids of changed nodes, if any."""


class BaseOrder(Strict):
    """
    The fields of an order. With an `example` (of arguments) it has a command, `tpucare emulator DO`: its docstring is
    the help, required fields are arguments, and the other fields that have a description are options.
    """

    do: ClassVar[str]
    calls: ClassVar[Method]
    example: ClassVar[str | None]

    def apply(self, world: World, now: datetime) -> Answer:
        """Change the world, under its lock, and return the answer, for example the ids of changed nodes."""
        ids = type(self).calls(world.operator, now=now, **dict(self))
        return {} if ids is None else {"touched": list(ids)}


class NodesOrder(BaseOrder):
    selector: str = Field(title="NODES", description="Node, slot, zone/node, or * for all.")


class NextCallOrder(BaseOrder):
    """Takes effect at a later call: the method needs no time."""

    def apply(self, world: World, now: datetime) -> Answer:  # noqa: ARG002
        type(self).calls(world.operator, **dict(self))
        return {}


ORDERS: dict[str, type[BaseOrder]] = {}
"""All orders by their `do`."""


def order(
    do: str, calls: Method | None = None, *, example: str | None = None
) -> Callable[[type[BaseOrder]], type[BaseOrder]]:
    """Add a class to `ORDERS`. A class without `calls` has an `apply` of its own."""

    def declare(fields: type[BaseOrder]) -> type[BaseOrder]:
        fields.do, fields.example = do, example
        if calls is not None:
            fields.calls = calls
        ORDERS[do] = fields
        return fields

    return declare


@order("preempt", Operator.preempt, example="pod-0 --notice 10s")
class Preempt(NodesOrder):
    """Preempt nodes as the real cloud does."""

    notice: Length | None = Field(None, title="TIME", description="Time of the notice before, such as 30s.")
    silent: bool = Field(False, description="Workers stop answering instead of dying.")
    shown: Shown = Field(int(NodeState.PREEMPTED), description="State in the API; or never, or gone.")
    visible_after: Length | None = Field(None, title="TIME", description="Delay until the API shows it.")
    burst: Length = timedelta()


@order("terminate", Operator.terminate, example="pod-0")
class Terminate(NodesOrder):
    """Terminate nodes as the 24-hour limit of preemptible nodes does."""


@order("forget", Operator.remove)
class RemoveNodes(NodesOrder):
    """Remove nodes at once: 404."""


@order("capacity", Operator.set_capacity, example="us-central1-a 0")
class SetCapacity(BaseOrder):
    """Set the capacity of a pool from now on."""

    zone: str = Field(description="Zone, such as us-central1-a.")
    accelerator: str = Field("", description="Type or generation; default: all.")
    tier: Literal["spot", "on-demand", "reserved"] = Field("spot", description="spot, on-demand or reserved.")
    amount: Annotated[int, Field(ge=0)] | None = Field(
        description="Number of chips, hosts or slices; none = unlimited."
    )


@order("health", Operator.set_health, example="pod-0 unhealthy-maintenance")
class SetHealth(NodesOrder):
    """Set the health that the API shows for nodes."""

    health: HealthNumber = Field(
        title="value", description="healthy, timeout, unhealthy-tensorflow, unhealthy-maintenance, or a number."
    )
    description: str = ""


@order("state", Operator.set_state, example="pod-0 77")
class SetState(NodesOrder):
    """Set the state that the API shows for nodes, even an unknown one; their workers do not change."""

    state: State = Field(title="value", description="A name such as repairing, or a number.")


@order("unknown-fields", Operator.show_unknown_fields, example="pod-0 --answers")
class UnknownFields(NodesOrder):
    """Add fields to nodes that no client knows, as a newer service would."""

    on: bool = Field(True, description="Add or remove them.")
    answers: bool = Field(False, description="Also in every answer of the API.")


@order("fail-queued", Operator.fail_queued)
class FailQueued(NodesOrder):
    """Make queued resources FAILED with an error."""

    code: Code = 13
    text: str = "an internal error has occurred"


@order("queued-state", Operator.set_queued_state)
class SetQueuedState(NodesOrder):
    """Show a state of queued resources, known or not."""

    state: Annotated[int, number_of(QueuedState)]


@order("maintenance", Operator.maintenance, example="pod-0 --restart")
class Maintenance(NodesOrder):
    """Announce a maintenance event to workers."""

    event: str = "TERMINATE_ON_HOST_MAINTENANCE"
    duration: Length = Field("5m", validate_default=True, title="TIME", description="Duration.")
    restart: bool = Field(False, description="Also reboot the workers.")


@order("outage", Operator.outage, example="2m --kind zone --zone us-central1-a")
class BeginOutage(BaseOrder):
    """Make the API fail, fail in one zone, or answer slowly."""

    duration: Length = Field(description="Duration, such as 90s.")
    kind: Literal["api", "internal", "zone", "slow"] = Field("api", description="api, internal, zone or slow.")
    zone: str = Field("", description="Zone for --kind zone.")
    seconds: Seconds = 30.0


@order("end-outages", Operator.end_outages, example="")
class EndOutages(BaseOrder):
    """End all outages."""


@order("stick-deleting", Operator.stick_deleting)
class StickDeleting(NodesOrder):
    """Let deletes hang until they are repeated."""

    repeats: Annotated[int, Field(ge=1)] = 1


@order("lose-worker", Operator.lose_worker, example="pod-0 3")
class LoseWorker(NodesOrder):
    """Kill one worker; the API does not show it."""

    worker: int = Field(ge=0, description="Number of the worker.")
    silent: bool = Field(False, description="It stops answering instead of dying.")


@order("restore-worker", Operator.restore_worker, example="pod-0 3")
class RestoreWorker(NodesOrder):
    """Boot a lost worker again, or make a silent one answer."""

    worker: int = Field(ge=0, description="Number of the worker.")


@order("fail-next-create", Operator.fail_next_create)
class FailNextCreate(NextCallOrder):
    """Fail the next create, in its operation or in the call."""

    code: Code
    text: str
    in_operation: bool = True
    zone: str = ""


@order("miss-worker", Operator.miss_worker)
class MissWorker(NextCallOrder):
    """Let the next node lack a worker for ever."""

    worker: int = -1
    zone: str = ""


@order("lose-next-answer", Operator.lose_next_answer)
class LoseNextAnswer(NextCallOrder):
    """Lose the answer of the next call of a method."""

    method: str
    applied: bool = True
    code: Code = 14


@order("fail-next", Operator.fail_next)
class FailNext(NextCallOrder):
    """Refuse the next call of a method."""

    method: str
    code: Code
    text: str


@order("status")
class Status(BaseOrder):
    """List every node that exists, whether or not the API shows it yet."""

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


def parse_order(raw: object) -> BaseOrder:
    """Raises: ConfigError: one line that names the action and the key, with the nearest right word."""
    if not isinstance(raw, Mapping):
        raise ConfigError('an order is a JSON object such as {"do": "preempt", "selector": "*"}')
    action = raw.get("do")
    if action is None:
        raise ConfigError(f'an order names its action, such as {{"do": "status"}}; there are {", ".join(ORDERS)}')
    if not isinstance(action, str) or action not in ORDERS:
        raise ConfigError(f"no action {action!r}{_nearest(str(action), list(ORDERS))}; there are {', '.join(ORDERS)}")
    try:
        return ORDERS[action].model_validate({key: value for key, value in raw.items() if key != "do"})
    except ValidationError as error:
        raise ConfigError(f"{action}: {_first_line(error)}") from None


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"][:1])
    text = {"extra_forbidden": "unknown key", "missing": "is missing"}.get(first["type"], str(first["msg"]))
    return " ".join(f"{key}: {text}".split())


def _nearest(word: str, words: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {found[0]!r}?" if found else ""
