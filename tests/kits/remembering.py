"""Actions, and what memory becomes by them: what the tests of `remember` and its parts have in common."""

from __future__ import annotations

import random
from datetime import datetime
from typing import Any

from tests.kits.evidence import NOW, intent, memory, name_of, node, place, token
from tpucare.model.actions import Action, Create, Delete, GetNode, GetOperation, Launch, Stop
from tpucare.model.causes import Cause, Reason
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import Memory
from tpucare.planner.remember import forget_node, intend, remember

PLACE = place().key
RNG = random.Random(4)

ACCEPTED = memory(creates=(intent(10, state=CreateState.RUNNING, operation="op"),))
OPEN = memory(creates=(intent(10),))


def create(number: int = 10, **more: object) -> Create:
    return Create(name_of(number), number, place(), Cause.UNRECORDED, "why", **more)  # type: ignore[arg-type]


def delete(number: int = 0, reason: Reason = Reason.DEAD, **more: Any) -> Delete:
    what = node(number=number)
    return Delete(what.key, what.id, what.create_time, Cause.UNRECORDED, "why", reason, **more)


def launch(number: int = 0, n: int = 1) -> Launch:
    what = node(number=number)
    return Launch(what.key, what.id, token(number, n), n, Cause.UNRECORDED, "why")


def stop(number: int = 0, n: int = 1, **more: object) -> Stop:
    what = node(number=number)
    return Stop(what.key, what.id, token(number, n), Cause.UNRECORDED, "why", **more)  # type: ignore[arg-type]


def poll(number: int = 10) -> GetOperation:
    return GetOperation(name_of(number), "op", Cause.UNRECORDED, "why")


def look(number: int = 0) -> GetNode:
    return GetNode(node(number=number).key, Cause.UNRECORDED, "why")


def asked(known: Memory, action: Action, now: datetime = NOW) -> Memory:
    return intend(known, action, now, RNG)


def came(known: Memory, action: Action, result: object = None, error: Exception | None = None) -> Memory:
    return remember(known, action, result, error, NOW, RNG)


def vanished(known: Memory, name: str) -> Memory:
    return forget_node(known, name, NOW, RNG)
