"""
How memory changes: by what is seen, by what is about to be done, and by what came of it.

Pure. `intend` is written to disk before the effect, `remember` after it, `absorb` when a listing shows something new,
`recover` once at start, for what a killed process left half done.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta

from tpucare import placement
from tpucare.actions import Action, Create, Delete, Fact, Launch, Look, Notice, Poll, PushKey, Reason, Settle, Stop
from tpucare.backoff import BOOK_BACKOFF, DELETE_AGAIN, DELETE_AGAIN_CAP, RESEND_BACKOFF
from tpucare.errors import (
    AlreadyExists,
    CloudError,
    CommandFailed,
    ConfigError,
    LostRace,
    NoCapacity,
    NodeGone,
    PreemptedMeanwhile,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from tpucare.memory import Book, BookName, CreateIntent, End, Memory, NodeMemory, PlaceMemory, RunMemory, Wish
from tpucare.model import LaunchResult, Node, NodeState, Operation, StopResult, parse_node_name

BUDGET_WINDOW = timedelta(minutes=1)


# --- what is seen ----------------------------------------------------------------------------------------------------


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
    if node.state in (NodeState.PREEMPTED, NodeState.TERMINATED) and not past.dead:
        memory = _book_preemption(memory.with_node(replace(past, dead=True)), f"{node.name} {node.state.name}")
    if intent is not None and not intent.superseded and _settled(node):
        memory = memory.without_create(node.name)
        if node.state is NodeState.READY and intent.place:
            memory = memory.with_place(intent.place, placement.succeeded(memory.place(intent.place), node.create_time))
    return _number_after(memory, node.name)


def _met(node: Node, intent: CreateIntent | None, memory: Memory) -> NodeMemory:
    return NodeMemory(
        name=node.name,
        zone=node.key.zone,
        id=node.id,
        create_time=node.create_time,
        place=intent.place if intent else "",
        launched=intent is None,
        attempt=memory.attempts if intent is None else 0,
    )


def _settled(node: Node) -> bool:
    # While the node is CREATING its operation still has to say whether there is capacity; and a listing may show the
    # node before the call that made it was answered.
    return node.state is not NodeState.CREATING


def _number_after(memory: Memory, name: str) -> Memory:
    parsed = parse_node_name(name)
    if parsed is None or parsed[1] < memory.next_number:
        return memory
    return replace(memory, next_number=parsed[1] + 1)


def _book_preemption(memory: Memory, reason: str) -> Memory:
    book = memory.book(BookName.PREEMPTION)
    return memory.with_book(BookName.PREEMPTION, replace(book, total=book.total + 1, reason=reason))


def answered(memory: Memory, name: str) -> Memory:
    """Every worker of the node answered at least once: its place serves."""
    past = memory.node(name)
    if past is None or past.answered:
        return memory
    memory = memory.with_node(replace(past, answered=True))
    if past.place and memory.place(past.place).unanswered_nodes:
        memory = memory.with_place(past.place, placement.acquitted(memory.place(past.place)))
    return memory


def gone(memory: Memory, name: str, now: datetime, rng: random.Random) -> Memory:
    """GetNode said NOT_FOUND."""
    past, intent = memory.node(name), memory.create(name)
    if past is not None:
        # A node whose create failed was never there to be preempted.
        if not past.dead and past.delete_asked_at is None and intent is None:
            memory = _book_preemption(memory, f"{name} is gone")
        memory = memory.without_node(name)
    if intent is not None and (not intent.operation or intent.failed):
        memory = memory.without_create(name)
        if past is not None and past.delete_asked_at is None and not intent.refused:
            # Nobody will say why: what is listed as CREATING and vanishes found no capacity.
            error = NoCapacity(f"{name} vanished while CREATING")
            place = placement.refused(memory.place(intent.place), error, held=False, now=now, rng=rng)
            memory = memory.with_place(intent.place, place)
    if memory.run is not None and memory.run.node == name:
        memory = replace(memory, run=replace(memory.run, stopped=True), restart_asked=False, replace_asked=False)
    return memory


def lost_to_another(memory: Memory, name: str) -> Memory:
    """The node bears another owner's label: it is no business of ours, and no preemption either."""
    memory = memory.without_node(name).without_create(name)
    return replace(memory, run=None) if memory.run is not None and memory.run.node == name else memory


def recover(memory: Memory) -> Memory:
    """
    What a killed process left half done, as the next one has to see it.

    A create without an answer may have arrived. A delete that was judged, and not accepted, is judged anew: the node
    may be well again; unless its successor is there or asked for, which the slot has by now. A stop or launch under way
    is found out by the next probe.
    """
    succeeded = any(not intent.superseded for intent in memory.creates)
    succeeded = succeeded or any(past.delete_asked_at is None and not past.dead for past in memory.nodes)
    for intent in memory.creates:
        if not intent.accepted:
            memory = memory.with_create(replace(intent, lost=True, retry_at=None))
    for past in memory.nodes:
        judged = past.delete_reason == Reason.JUDGED and not past.delete_accepted
        if past.delete_asked_at is not None and judged and not succeeded:
            memory = memory.with_node(_undelete(past))
        elif past.delete_asked_at is not None:
            memory = memory.with_node(replace(past, delete_next_at=None))
    return memory


def _undelete(past: NodeMemory) -> NodeMemory:
    return replace(past, delete_asked_at=None, delete_why="", delete_reason="", delete_next_at=None, delete_quiet=False)


# --- what is about to be done ----------------------------------------------------------------------------------------


def intend(memory: Memory, action: Action, now: datetime, rng: random.Random) -> Memory:
    """Memory with the intent of *action*, to be on disk before the effect begins."""
    match action:
        case Create():
            return _intend_create(memory, action, now)
        case Delete():
            return _intend_delete(memory, action, now)
        case Launch():
            return _intend_launch(memory, action, now)
        case Stop():
            return _intend_stop(memory, action, now, rng)
        case Notice():
            past = memory.node(action.key.name)
            if past is not None:
                memory = memory.with_node(replace(past, noticed_at=now, noticed_checkpoint=action.checkpoint))
            return memory
        case Settle():
            return _settle(memory, action, now, rng)
    return memory


def _intend_create(memory: Memory, action: Create, now: datetime) -> Memory:
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
        # A node made from now on is as declared now: that is what `replace` asks for.
        memory = replace(memory, replace_asked=False)
    return _number_after(memory.with_create(intent), action.name)


def _intend_delete(memory: Memory, action: Delete, now: datetime) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        past = NodeMemory(action.key.name, action.key.zone, action.id, action.create_time, launched=True)
    first = past.delete_asked_at is None
    tries = past.delete_tries + 1
    past = replace(
        past,
        delete_asked_at=past.delete_asked_at or now,
        delete_tries=tries,
        delete_next_at=now + min(DELETE_AGAIN * 2 ** min(tries - 1, 10), DELETE_AGAIN_CAP),
        delete_why=action.why if first else past.delete_why,
        delete_reason=action.reason.value,
        delete_quiet=past.delete_quiet or action.quiet,
    )
    # A verdict that was taken back at a restart and is given again is still one node.
    if tries == 1 and action.unanswered and past.place:
        memory = _count_unanswered(memory, past.place, action.why, now)
    memory = memory.with_node(past).without_create(action.key.name)
    # What a person said of older nodes was said before this one became one.
    return replace(memory, replace_asked=False, fence_confirmed=memory.fence_confirmed and not first)


def _count_unanswered(memory: Memory, key: str, why: str, now: datetime) -> Memory:
    place = memory.place(key)
    place = replace(place, unanswered_nodes=place.unanswered_nodes + 1)
    if place.unanswered_nodes >= placement.UNANSWERED_LIMIT:
        text = f"{place.unanswered_nodes} nodes in a row never answered ({why}): check network, firewall, key, OS Login"
        place = placement.blocked(place, text, now=now)
    return memory.with_place(key, place)


def _intend_launch(memory: Memory, action: Launch, now: datetime) -> Memory:
    past = memory.node(action.key.name)
    attempts = memory.attempts
    if past is not None and not past.attempt:
        attempts += 1
        memory = memory.with_node(replace(past, attempt=attempts, launched=True))
    elif past is not None:
        memory = memory.with_node(replace(past, launched=True))
    run = RunMemory(action.token, action.key.name, action.number, launched_at=now)
    return replace(memory, run=run, attempts=attempts, restart_asked=False, fence_confirmed=False)


def _intend_stop(memory: Memory, action: Stop, now: datetime, rng: random.Random) -> Memory:
    run = memory.run
    number = int(action.token.rpartition(".")[2])
    if run is None or run.node != action.key.name:
        run = RunMemory(action.token, action.key.name, number, launched_at=now)
    then = action.then.value if action.then else run.then_delete
    run = replace(run, stop_why=action.why, then_delete=then, stopped=False, stops=run.stops + 1)
    memory = _far(replace(memory, run=run, restart_asked=False), action.step, action.checkpoint)
    if action.book is not None:
        memory = _enter(memory, action.book, action.why, action.advanced, now, rng)
        memory = _count_on_node(memory, action)
    if action.gives_up:
        memory = replace(memory, end=End.FAILED, end_why=action.why, ended_at=now)
    return memory


def _far(memory: Memory, step: int | None, checkpoint: int | None) -> Memory:
    """The furthest that training ever got is kept: a crash short of it is one more of the same row."""
    return replace(
        memory,
        step=step if step is not None else memory.step,
        checkpoint=checkpoint if checkpoint is not None else memory.checkpoint,
    )


def _enter(memory: Memory, name: BookName, why: str, advanced: bool, now: datetime, rng: random.Random) -> Memory:
    book = memory.book(name)
    failures = 1 if advanced else book.failures + 1
    backoff = BOOK_BACKOFF[name]
    retry_at = now + backoff.delay(failures, rng) if backoff is not None else None
    if name is BookName.INFRASTRUCTURE and failures == 1:
        retry_at = None
    return memory.with_book(name, Book(failures, book.total + 1, retry_at, why))


def _row_over(memory: Memory, name: BookName) -> Memory:
    """It went well once: the next failure is the first of a row again."""
    book = memory.book(name)
    return memory.with_book(name, replace(book, failures=0, retry_at=None)) if book.failures else memory


def _count_on_node(memory: Memory, action: Stop) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        return memory
    if action.book is BookName.STALL:
        return memory.with_node(replace(past, stalls=past.stalls + 1))
    if action.book is BookName.INFRASTRUCTURE:
        count = 1 if action.advanced else past.infrastructure + 1
        return memory.with_node(replace(past, infrastructure=count))
    return memory


def _settle(memory: Memory, action: Settle, now: datetime, rng: random.Random) -> Memory:
    further = action.step is not None and (memory.step is None or action.step > memory.step)
    memory, run = _far(memory, action.step, action.checkpoint), memory.run
    match action.fact:
        case Fact.CREATE_SUPERSEDED:
            return _supersede(memory, action, now, rng)
        case Fact.CREATE_KEPT:
            return _keep(memory, action.name)
        case Fact.RUN_ADOPTED:
            run = RunMemory(action.token, action.name, action.number, launched_at=now, complete=True)
            return _attempted(replace(memory, run=run), action.name)
        case Fact.RUN_COMPLETE:
            return replace(memory, run=replace(run, complete=True)) if run is not None else memory
        case Fact.RUN_STOPPED:
            return replace(memory, run=replace(run, stopped=True)) if run is not None else memory
        case Fact.RUN_OVER | Fact.RUN_BACK:
            return replace(memory, run=replace(run, over=action.fact is Fact.RUN_OVER)) if run is not None else memory
        case Fact.SETUP_DONE:
            return _row_over(memory, BookName.SETUP)
        case Fact.RUN_PROGRESSED:
            if further:
                memory = _row_over(memory, BookName.INFRASTRUCTURE)
            gap = action.gap.total_seconds() if action.gap is not None else 0.0
            return replace(memory, run=replace(run, progressed=True, gap_seconds=gap)) if run is not None else memory
        case Fact.ENDED:
            return replace(memory, end=action.end, end_why=action.why, ended_at=now)


def _supersede(memory: Memory, action: Settle, now: datetime, rng: random.Random) -> Memory:
    intent = memory.create(action.name)
    if intent is None:
        return memory
    memory = memory.with_create(replace(intent, superseded=True))
    if memory.wish is not Wish.UP or memory.end is not End.NONE:
        return memory
    # Another place goes first, where there is one: this one has not answered for a whole boot_timeout.
    place = placement.refused(memory.place(intent.place), Transient(action.why), held=False, now=now, rng=rng)
    return memory.with_place(intent.place, place)


def _keep(memory: Memory, name: str) -> Memory:
    """The create that was given up holds the slot; those that were sent after it are given up instead."""
    creates = tuple(replace(intent, superseded=intent.name != name) for intent in memory.creates)
    return replace(memory, creates=creates)


def _attempted(memory: Memory, name: str) -> Memory:
    past = memory.node(name)
    if past is None or past.attempt:
        return memory
    attempts = memory.attempts + 1
    return replace(memory.with_node(replace(past, attempt=attempts, launched=True)), attempts=attempts)


# --- what came of it -------------------------------------------------------------------------------------------------


def remember(
    memory: Memory, action: Action, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    """Memory after *action* ended with *result* or *error*."""
    match action:
        case Create():
            return _after_create(memory, action, result, error, now, rng)
        case Delete():
            return _after_delete(memory, action, error, now, rng)
        case Launch():
            return _after_launch(memory, action, result, error, now, rng)
        case Stop():
            return _after_stop(memory, action, result)
        case Look():
            return _after_look(memory, action, result, error, now, rng)
        case Poll():
            return _after_poll(memory, action, result, error, now, rng)
        case PushKey():
            past = memory.node(action.key.name)
            if past is not None and error is None:
                return memory.with_node(replace(past, keyed=True))
            return gone(memory, action.key.name, now, rng) if isinstance(error, NodeGone) else memory
    return memory


def _after_create(
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
    if isinstance(error, Transient) and not isinstance(error, LostRace):
        retry_at = now + RESEND_BACKOFF.delay(intent.tries, rng)
        return memory.with_create(replace(intent, lost=True, retry_at=retry_at))
    if not isinstance(error, CloudError):
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


def _after_delete(memory: Memory, action: Delete, error: Exception | None, now: datetime, rng: random.Random) -> Memory:
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


def changed_meanwhile(memory: Memory, name: str) -> Memory:
    """The node that was to be deleted is not the one decided about: the intent is void."""
    past = memory.node(name)
    return memory.with_node(_undelete(past)) if past is not None else memory


def _after_launch(
    memory: Memory, action: Launch, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    run = memory.run
    if run is None or run.token != action.token:
        return memory
    if isinstance(result, LaunchResult) and result.complete:
        return replace(memory, run=replace(run, complete=True))
    errors = [e for e in result.workers if e is not None] if isinstance(result, LaunchResult) else [error]
    reason = next((str(e) for e in errors if e is not None), "launch failed")
    human = any(isinstance(e, CommandFailed | ConfigError) for e in errors)
    book = BookName.SETUP if human else BookName.INFRASTRUCTURE
    return _enter(memory, book, reason, advanced=False, now=now, rng=rng)


def _after_stop(memory: Memory, action: Stop, result: object) -> Memory:
    run = memory.run
    # Another node's run may have been adopted meanwhile: it was not stopped.
    if run is None or run.node != action.key.name or not isinstance(result, StopResult):
        return memory
    if result.quiet:
        return replace(memory, run=replace(run, stopped=True))
    # What every worker heard and did not obey is not asked again; what some did not hear is.
    deaf = any(isinstance(worker, Exception) for worker in result.workers)
    return memory if deaf else replace(memory, run=replace(run, stuck=True))


def _after_look(
    memory: Memory, action: Look, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    if isinstance(error, NodeGone):
        return gone(memory, action.key.name, now, rng)
    if isinstance(result, Node) and memory.create(action.key.name) is not None:
        intent = memory.create(action.key.name)
        assert intent is not None
        if intent.lost:
            memory = memory.with_create(replace(intent, lost=False, accepted=True))
    return memory


def _after_poll(
    memory: Memory, action: Poll, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    intent = memory.create(action.name)
    if intent is None:
        return memory
    if isinstance(error, NodeGone):
        return _operation_over(memory, intent)
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
