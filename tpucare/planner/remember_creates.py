"""
How memory changes by creates: an intent is opened before the call, and closed by what the calls and the operation say.

Pure. An intent that is settled because its node was seen is closed in `remember_seen`; where to ask next is
`placement`'s, whose memory of a place is kept here.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta

from tpucare.model.actions import Create, Look, Poll, Settle
from tpucare.model.errors import (
    AlreadyExists,
    CloudError,
    LostRace,
    NeedsPerson,
    NoCapacity,
    NodeGone,
    PreemptedMeanwhile,
    QuotaExceeded,
    Transient,
)
from tpucare.model.memory import CreateIntent, End, Memory, NodeMemory, PlaceMemory, Wish
from tpucare.model.resources import Node, Operation
from tpucare.planner import placement, remember_seen
from tpucare.planner.backoff import MISSING_LOOK_EVERY, RESEND_BACKOFF

BUDGET_WINDOW = timedelta(minutes=1)
MISSING_LOOKS = 24


def intend_create(memory: Memory, action: Create, now: datetime) -> Memory:
    past = memory.create(action.name)
    tries = past.tries + 1 if past is not None else 1
    intent = CreateIntent(
        name=action.name,
        number=action.number,
        zone=action.place.zone,
        place=action.place.key,
        asked_at=now,
        accelerator_type=action.place.accelerator_type,
        tries=tries,
        lost=past is not None,
        held_in_zone=action.held_in_zone,
        held_in_region=action.held_in_region,
    )
    # The create budget counts them after a restart too, whatever became of their intents.
    recent = tuple(asked for asked in memory.recent_creates if timedelta() <= now - asked < BUDGET_WINDOW)
    memory = replace(memory, recent_creates=(*recent, now))
    if not action.resend:
        # A node made from now on is as declared now: that is what `replace` asks for. What a person said of older nodes
        # was said before the last one became one of them.
        first = memory.asked_from if memory.asked_from is not None else action.number
        memory = replace(memory, replace_asked=False, fence_confirmed=False, asked_from=first)
        memory = placement.asked(memory, action.place.key, action.number)
    return remember_seen.number_after(memory.with_create(intent), action.name)


def supersede(memory: Memory, action: Settle, now: datetime, rng: random.Random) -> Memory:
    intent = memory.create(action.name)
    if intent is None:
        return memory
    memory = memory.with_create(replace(intent, superseded=True))
    if memory.wish is not Wish.UP or memory.end is not End.NONE:
        return memory
    # Another place goes first, where there is one: this one has not answered for a whole boot_timeout.
    place = placement.refused(memory.place(intent.place), Transient(action.why), held=False, now=now, rng=rng)
    return memory.with_place(intent.place, place)


def keep(memory: Memory, name: str) -> Memory:
    """The create that was given up holds the slot; those that were sent after it are given up instead."""
    creates = tuple(replace(intent, superseded=intent.name != name) for intent in memory.creates)
    return replace(memory, creates=creates)


def served(memory: Memory, past: NodeMemory) -> Memory:
    """
    The workers of *past* serve: its create is settled, whatever its operation still says, and the node is like any.

    A node may show CREATING, and its operation go on, for hours after that (cloud-tpu API: readiness is the workers').
    """
    intent = memory.create(past.name)
    if intent is None:
        return memory
    if intent.place:
        memory = placement.came_up(memory, intent.place, past.create_time)
    return memory.without_create(past.name)


def after_create(
    memory: Memory, action: Create, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    intent = memory.create(action.name)
    if intent is None:
        return memory
    key = action.place.key
    if isinstance(result, Operation):
        memory = memory.with_place(key, placement.quota_granted(memory.place(key)))
        return memory.with_create(replace(intent, accepted=True, lost=False, operation=result.name))
    if isinstance(error, AlreadyExists):
        # On a node with our labels this is success; GetNode tells.
        return memory.with_create(replace(intent, accepted=True, lost=False, operation=""))
    transient = isinstance(error, Transient) and not isinstance(error, LostRace)
    if transient or not isinstance(error, CloudError):
        return memory.with_create(replace(intent, lost=True, retry_at=now + RESEND_BACKOFF.delay(intent.tries, rng)))
    memory = memory.with_place(key, _refuse(memory, key, action, error, now, rng))
    if action.resend:
        # The first call may have arrived all the same, and used up the very quota that this answer complains of.
        return memory.with_create(replace(intent, lost=True, refused=str(error)))
    return memory.without_create(action.name)


def _refuse(
    memory: Memory, key: str, asked: Create | CreateIntent, error: CloudError, now: datetime, rng: random.Random
) -> PlaceMemory:
    region_wide = isinstance(error, QuotaExceeded) and error.region_wide
    held = asked.held_in_region if region_wide else asked.held_in_zone
    return placement.refused(memory.place(key), error, held=held, now=now, rng=rng)


def after_look(
    memory: Memory, action: Look, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    if isinstance(error, NodeGone):
        memory = _missing_for_long(memory, action.key.name, now)
        return remember_seen.gone(_came_to_nothing(memory, action.key.name, now, rng), action.key.name, now, rng)
    intent = memory.create(action.key.name)
    if isinstance(result, Node) and intent is not None and intent.missing:
        intent = replace(intent, missing=0)
        memory = memory.with_create(intent)
    if isinstance(result, Node) and intent is not None and intent.lost:
        return memory.with_create(replace(intent, lost=False, accepted=True))
    return memory


def _missing_for_long(memory: Memory, name: str, now: datetime) -> Memory:
    """
    A create that was given up and of which no node is there for a day is closed, whatever its operation says.

    The looks are an hour of observed time apart, so that a clock that was set closes none. Its number stays spent, so a
    node that comes later still is known as ours (`NodeMemory.asked`).
    """
    intent = memory.create(name)
    if intent is None or not intent.superseded or not intent.operation:
        return memory
    if intent.missing + 1 >= MISSING_LOOKS and now - intent.asked_at >= MISSING_LOOKS * MISSING_LOOK_EVERY:
        return memory.without_create(name)
    return memory.with_create(replace(intent, missing=intent.missing + 1))


def _came_to_nothing(memory: Memory, name: str, now: datetime, rng: random.Random) -> Memory:
    """Without its operation nobody says why: what was accepted and is not there found no capacity."""
    intent = memory.create(name)
    if intent is None or not intent.unread or intent.superseded:
        return memory
    failure = NoCapacity(f"{name} is not there, and its operation may not be read: {intent.refused}")
    return memory.with_place(intent.place, _refuse(memory, intent.place, intent, failure, now, rng))


def after_poll(
    memory: Memory, action: Poll, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    intent = memory.create(action.name)
    if intent is None:
        return memory
    if isinstance(error, NodeGone):
        return _operation_over(memory, intent)
    if isinstance(error, NeedsPerson):
        # Asked again it would be refused again. The create is accepted and stays open: GetNode tells what became of it.
        return memory.with_create(replace(intent, operation="", unread=True, refused=str(error)))
    if not isinstance(result, Operation) or not result.done:
        return memory
    if result.error is None:
        return _operation_over(memory, intent)
    failure = result.error
    if isinstance(failure, CloudError) and not isinstance(failure, PreemptedMeanwhile | LostRace):
        memory = memory.with_place(intent.place, _refuse(memory, intent.place, intent, failure, now, rng))
    if memory.node(action.name) is None:
        # The node may be listed a little later, or have failed too early to be listed: GetNode tells.
        return memory.with_create(replace(intent, operation="", accepted=True, refused=str(failure)))
    return memory.with_create(replace(intent, operation="", failed=True, refused=str(failure)))


def _operation_over(memory: Memory, intent: CreateIntent) -> Memory:
    if memory.node(intent.name) is not None:
        return memory.without_create(intent.name)
    return memory.with_create(replace(intent, operation=""))
