"""
How memory changes by what is seen of a node: it is there, its workers answered, it is gone, it is somebody else's.

Pure. What is about to be done, and what came of it, is in `remember`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime

from tpucare.model.errors import NoCapacity
from tpucare.model.memory import BookName, CreateIntent, Memory, NodeMemory, Publishing, Trust
from tpucare.model.resources import (
    DEAD_STATES,
    LABEL_NUMBER,
    PENDING_STATES,
    USABLE_STATES,
    Node,
    NodeState,
    parse_node_name,
)
from tpucare.planner import placement


def absorb(memory: Memory, node: Node) -> Memory:
    """
    Memory after *node*, which is ours and of this slot, was seen.

    A node that no create of this store asked for may have been launched by whoever did: it is fenced like one that was.
    """
    intent = memory.create(node.name)
    past = memory.node(node.name)
    if past is None or past.id != node.id:
        past = _met(node, intent, memory)
        memory = memory.with_node(past)
    memory = in_sight(memory, node.name)
    memory = _live_or_dead(memory, node)
    if intent is not None and not intent.superseded and _settled(node):
        memory = memory.without_create(node.name)
        if node.state is NodeState.READY and intent.place:
            memory = placement.came_up(memory, intent.place, node.create_time)
    return number_after(memory, node.name)


def in_sight(memory: Memory, name: str) -> Memory:
    """The node is listed as ours: whatever was believed of it while it was not is over."""
    past = memory.node(name)
    if past is None or not (past.taken or past.out_of_sight or past.written_off):
        return memory
    return memory.with_node(replace(past, taken=False, out_of_sight=False, written_off=False))


def _live_or_dead(memory: Memory, node: Node) -> Memory:
    past = memory.node(node.name)
    assert past is not None
    if node.state in DEAD_STATES and not past.was_shown_dead:
        return _preempted(memory.with_node(replace(past, dead=True)), node.name, node.state.name)
    if past.dead and node.state in PENDING_STATES | USABLE_STATES:
        # That it was shown dead proves nothing, now or the next time: its run may have lived all the while.
        return memory.with_node(replace(past, dead=False, revived=True, delete_quiet=False))
    return memory


def _met(node: Node, intent: CreateIntent | None, memory: Memory) -> NodeMemory:
    return NodeMemory(
        name=node.name,
        zone=node.key.zone,
        id=node.id,
        create_time=node.create_time,
        place=intent.place if intent else "",
        launched=intent is None,
        attempt=memory.attempts if intent is None else 0,
        asked=intent is None and _was_asked_for(node, memory),
        queued=node.queued_resource,
    )


def _was_asked_for(node: Node, memory: Memory) -> bool:
    """
    Whether it is the late fruit of a create that was closed: it bears the number that its name tells, and this store
    has used that number. What is adopted bears no number, and what a lost store made bears one that was not used since.
    """
    parsed = parse_node_name(node.name)
    if parsed is None or parsed[0] != node.slot or node.labels.get(LABEL_NUMBER) != str(parsed[1]):
        return False
    return memory.has_asked_for(parsed[1])


def _settled(node: Node) -> bool:
    # While the node is CREATING its operation still has to say whether there is capacity; and a listing may show the
    # node before the call that made it was answered.
    return node.state is not NodeState.CREATING


def number_after(memory: Memory, name: str) -> Memory:
    parsed = parse_node_name(name)
    if parsed is None or parsed[1] < memory.next_number:
        return memory
    return replace(memory, next_number=parsed[1] + 1)


def _preempted(memory: Memory, name: str, what: str) -> Memory:
    """The node was lost. A launch that failed on it meanwhile was the cloud's doing, and is free of any book."""
    book = memory.book(BookName.PREEMPTION)
    book = replace(book, total=book.total + 1, reason=f"{name} {what}")
    memory = memory.with_book(BookName.PREEMPTION, book)
    run = memory.run
    if run is None or run.node != name or not run.launch_book:
        return memory
    entered = BookName(run.launch_book)
    book = memory.book(entered)
    book = replace(book, failures=max(0, book.failures - 1), total=max(0, book.total - 1), retry_at=None)
    return replace(memory.with_book(entered, book), run=replace(run, launch_book=""))


def answered(memory: Memory, name: str) -> Memory:
    """Every worker of the node answered at least once: its place serves."""
    past = memory.node(name)
    if past is None or past.answered:
        return memory
    memory = memory.with_node(replace(past, answered=True))
    if past.place and memory.place(past.place).unanswered_nodes:
        memory = memory.with_place(past.place, placement.acquitted(memory.place(past.place)))
    return memory


def refused(memory: Memory, name: str) -> Memory:
    """A worker listened and did not take our key: a guard on it may drop our packets from now on."""
    past = memory.node(name)
    return memory if past is None or past.refused else memory.with_node(replace(past, refused=True))


def believed(memory: Memory, name: str, trust: Trust, publisher: str, now: datetime) -> Memory:
    """The host keys of the node are believed; and what that tells of *publisher*, when it is not empty."""
    past = memory.node(name)
    if past is not None:
        memory = memory.with_node(replace(past, trust=trust))
    if not publisher:
        return memory
    told = Publishing(now, published=trust is Trust.VOUCHED)
    return replace(memory, publishing={**memory.publishing, publisher: told})


def gone(memory: Memory, name: str, now: datetime, rng: random.Random) -> Memory:
    """GetNode said NOT_FOUND."""
    past, intent = memory.node(name), memory.create(name)
    if past is not None:
        # A node whose create failed was never there to be preempted. One that was shown dead and lived on is lost only
        # now, so `is_leaving` would say too much.
        if not (past.dead or past.taken or past.is_being_deleted) and intent is None:
            memory = _preempted(memory, name, "is gone")
        memory = memory.without_node(name)
        if past.queued:
            memory = replace(memory, shell=past.queued)
    if intent is not None and (not intent.operation or intent.failed):
        memory = memory.without_create(name)
        if past is not None and not past.is_being_deleted and not intent.refused:
            # Nobody will say why: what is listed as CREATING and vanishes, though we did not have it deleted, found no
            # capacity.
            error = NoCapacity(f"{name} vanished while CREATING")
            place = placement.refused(memory.place(intent.place), error, held=False, now=now, rng=rng)
            memory = memory.with_place(intent.place, place)
    if memory.run is not None and memory.run.node == name:
        memory = replace(memory, run=replace(memory.run, stopped=True), restart_asked=False, replace_asked=False)
    return memory


def taken(memory: Memory, name: str) -> Memory:
    """
    The node bears another owner's label: it is not touched, and that is no preemption either.

    One on which a run of ours may live is remembered until GetNode says NOT_FOUND.
    """
    past, memory = memory.node(name), memory.without_create(name)
    if past is not None:
        memory = memory.with_node(replace(past, taken=True)) if past.in_doubt else memory.without_node(name)
    run = memory.run
    # What has finished has: whoever takes the node afterwards takes nothing back.
    lost = run is not None and run.node == name and not run.finished
    return replace(memory, run=None) if lost else memory
