"""
How memory changes by deletes: asked for, asked again until the node is gone, taken back; and which place is to blame.

Pure. Which node is deleted, and why, is decided by `plan`; that one is gone is written down in `remember_seen`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta

from tpucare.model.actions import Delete, Reason
from tpucare.model.causes import Cause
from tpucare.model.errors import LostRace, NodeGone, RateLimited
from tpucare.model.memory import Memory, NodeMemory
from tpucare.planner import placement
from tpucare.planner.backoff import DELETE_AGAIN, DELETE_AGAIN_CAP
from tpucare.planner.remember_seen import gone


def intend_delete(memory: Memory, action: Delete, now: datetime) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        past = NodeMemory(action.key.name, action.key.zone, action.id, action.create_time, launched=True)
    first = not past.is_being_deleted
    tries = past.delete_tries + 1
    past = replace(
        past,
        delete_asked_at=past.delete_asked_at or now,
        delete_tries=tries,
        delete_next_at=now + min(DELETE_AGAIN * 2 ** min(tries - 1, 10), DELETE_AGAIN_CAP),
        delete_why=action.why if first else past.delete_why,
        delete_cause=action.cause if first else past.delete_cause,
        delete_reason=action.reason.value,
        # Nobody asks the workers of a node that was shown dead, so what they said is of before.
        delete_quiet=(past.delete_quiet or action.quiet) and not past.revived,
    )
    # A verdict that was taken back at a restart and is given again is still one node.
    if tries == 1 and past.place and (action.unanswered or action.held):
        memory = _count_useless(memory, past.place, action, now)
    memory = memory.with_node(past).without_create(action.key.name)
    # What a person asked of the slot's node is still to be done when another one goes, and is not done by saying again
    # what was asked before.
    replaced = first and action.reason is not Reason.SURPLUS
    # What a person said of older nodes was said before this one became one.
    return replace(
        memory,
        replace_asked=memory.replace_asked and not replaced,
        fence_confirmed=memory.fence_confirmed and not first,
    )


def _count_useless(memory: Memory, key: str, action: Delete, now: datetime) -> Memory:
    """One more node of no use in a row; from the second on the place is blocked."""
    place = memory.place(key)
    if action.unanswered:
        place = replace(place, unanswered_nodes=place.unanswered_nodes + 1)
        count, what, check = place.unanswered_nodes, "never answered", "network, firewall, key, OS Login"
    else:
        place = replace(place, held_nodes=place.held_nodes + 1)
        count, what, check = place.held_nodes, "had their chips held before any launch", "`runtime`, startup scripts"
    if count >= placement.UNANSWERED_LIMIT:
        place = placement.blocked(place, f"{count} nodes in a row {what} ({action.why}): check {check}", now=now)
    return memory.with_place(key, place)


def after_delete(memory: Memory, action: Delete, error: Exception | None, now: datetime, rng: random.Random) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        return memory
    if isinstance(error, NodeGone):
        return gone(memory, action.key.name, now, rng)
    if error is None:
        return memory.with_node(replace(past, delete_accepted=True))
    if isinstance(error, LostRace):
        return memory
    if isinstance(error, RateLimited):
        return memory.with_node(replace(past, delete_next_at=now + timedelta(minutes=1)))
    if past.delete_accepted:
        return memory
    return memory.with_node(
        replace(past, delete_next_at=now + min(DELETE_AGAIN / 12 * past.delete_tries, DELETE_AGAIN))
    )


def undelete(past: NodeMemory) -> NodeMemory:
    past = replace(past, delete_why="", delete_cause=Cause.UNRECORDED, delete_reason="")
    return replace(past, delete_asked_at=None, delete_next_at=None, delete_quiet=False)
