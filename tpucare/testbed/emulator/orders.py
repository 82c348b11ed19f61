"""
What an operator may ask of a running world, as strict records: one class per action of `World`, checked before it acts.

An order is a JSON object whose `do` names the action; lengths are seconds or texts such as `90s`, states and health
are numbers or names. A wrong order is a ConfigError of one line. Here they are told apart; what each does is in
`node_orders` and `api_orders`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from tpucare.model.errors import ConfigError
from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.api_orders import Capacity, EndOutages, FailNext, FailNextCreate, LoseNextAnswer, Outage
from tpucare.testbed.emulator.node_orders import (
    FailQueued,
    Forget,
    LoseWorker,
    Maintenance,
    MissWorker,
    Preempt,
    RestoreWorker,
    SetHealth,
    SetQueuedState,
    SetState,
    StickDeleting,
    Terminate,
    UnknownFields,
)
from tpucare.testbed.emulator.order_fields import Answer, BaseOrder
from tpucare.testbed.emulator.world.world import World


class Status(BaseOrder):
    """Every node that exists, whether or not the API shows it yet."""

    do: Literal["status"]

    def carry(self, world: World, now: datetime) -> Answer:
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
        return {"now": world.now.isoformat(), "zones": world.locations(), "nodes": nodes, "queued": queued}


Order = (
    Preempt
    | Terminate
    | Forget
    | Capacity
    | SetHealth
    | SetState
    | UnknownFields
    | FailQueued
    | SetQueuedState
    | Maintenance
    | Outage
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
    said = {"extra_forbidden": "unknown key", "missing": "is missing"}.get(first["type"], str(first["msg"]))
    return " ".join(f"{key}: {said}".split())


def _nearest(word: str, words: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {found[0]!r}?" if found else ""
