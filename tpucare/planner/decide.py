"""
decide(slot, evidence, memory, now) -> Action: every choice of tpucare is made here and in the modules that it calls.

Pure. This module watches creates and deletes to their end, carries out the commands of people, and decides about slots
without a node or with several; `node` decides about one live node, `run` about a run on it, `placement` about the place
of a create. The table of evidence and action is docs/design.md §6. How memory changes is left to `remember`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tpucare.model.actions import (
    ADOPTING,
    ANY_CREATE,
    Action,
    AddSshKey,
    Create,
    Delete,
    EffectKind,
    Fact,
    FetchHostKeys,
    GetNode,
    GetOperation,
    Record,
    Stop,
    Wait,
)
from tpucare.model.causes import Cause, Reason
from tpucare.model.evidence import FRESH_FOR, Case, Evidence, Mark, Moment, NodeEvidence, Timers, request_read
from tpucare.model.lifecycles import CreateState, NodeStatus, RunState
from tpucare.model.memory import CreateIntent, DesiredState, End, Memory, NodeMemory
from tpucare.model.resources import DEAD_STATES, NodeKey, NodeState, OnSuccess, Slot, node_name
from tpucare.model.text import length
from tpucare.planner.backoff import DELETE_AGAIN_CAP, MISSING_READ_EVERY, RESEND_BACKOFF
from tpucare.planner.node import decide_by_workers, decide_hidden, decide_node
from tpucare.planner.placement import holds_quota
from tpucare.planner.predicates import (
    Furthest,
    deletion,
    effect_under_way,
    ending,
    get_node_when_due,
    is_quiet,
    job_mark,
    keeps_node,
    stop_before,
    unlisted_zones,
    without_job,
)
from tpucare.planner.queued import (
    clear_shells,
    decide_enqueue,
    direct_choice,
    free_number,
    queue_outlook,
    request_chore,
)
from tpucare.planner.run import end_done

# For an abandoned create, which no slot waits for.
POLL_ABANDONED_EVERY = timedelta(minutes=1)
# `down` waits so long for a zone that does not answer, and then ends without it.
DOWN_PATIENCE = timedelta(minutes=2)
# Deletes take minutes; a hanging one goes on when it is repeated.
DELETING_IS_STUCK = timedelta(minutes=10)
# Retries of a slot that failed though its job had trained.
TRY_FAILED_EVERY, TRY_FAILED_TIMES = timedelta(hours=1), 24
# A node labelled as the slot's is listed as such by then, or never.
ADOPTED_WITHIN = timedelta(minutes=5)
# A create whose answer was lost may arrive until then: 60 s after the call's deadline of 30 s.
CREATE_MAY_ARRIVE = timedelta(seconds=90)


def decide(slot: Slot, evidence: Evidence, memory: Memory, now: Moment) -> Action:
    """The next step for *slot*, by its present state; what just happened plays no part."""
    timers = Timers(now)
    action = _decide(Case(slot, evidence, memory, timers))
    if isinstance(action, Wait) and not (timers.observed_due is None and timers.wall_due is None):
        return replace(action, observed=timers.observed_due, wall=timers.wall_due)
    return action


def _decide(case: Case) -> Action:
    if not case.evidence.project.fresh:
        if len(case.evidence.nodes) == 1 and (action := decide_by_workers(case, case.evidence.nodes[0])):
            return action
        why = case.evidence.project.blind_why or "the first listing is under way"
        return Wait(Cause.NO_OBSERVATION, f"no observation: {why}")
    closed = case.evidence.closed
    if closed is not None and closed.is_sure and case.memory.wish is not DesiredState.DOWN:
        # A paused slot, too: the person who paused it did not ask for a longer life.
        over = f"{closed.why}; `tpucare apply` with a later bound starts it again"
        return _chore(case) or _empty_slot(case, closed.cause, closed.why, going=closed.why, over=over)
    if case.memory.wish is DesiredState.PAUSED:
        return _clear_dead(case) or clear_shells(case) or Wait(Cause.PAUSED, "paused")
    if chore := _chore(case):
        return chore
    if case.memory.wish is DesiredState.DOWN:
        return _take_down(case)
    if case.memory.end is not End.NONE:
        return _after_end(case)
    if case.rests:
        why = "nothing asks for this slice"
        return _empty_slot(case, Cause.RESTING, why, going="going to rest", over=f"resting: {why}")
    live = live_nodes(case.evidence, case.memory)
    if len(live) > 1:
        return _decide_several(case, live)
    if live:
        return decide_node(case, live[0])
    return _decide_no_node(case)


def live_nodes(evidence: Evidence, memory: Memory) -> list[NodeEvidence]:
    """Nodes of the slot that are neither dead nor being deleted, oldest first; also in unreachable zones."""
    return [seen for seen in evidence.nodes if _is_live(seen, memory)]


def _is_live(seen: NodeEvidence, memory: Memory) -> bool:
    if memory.has_given_up(seen.node.name):
        return False
    if memory.has_abandoned(seen.node.name):
        return False
    return seen.node.state is not NodeState.DELETING and seen.node.state not in DEAD_STATES


# --- chores: every create and delete is watched to its end -----------------------------------------------------------


def _chore(case: Case) -> Action | None:
    for seen in case.evidence.nodes:
        action = _node_chore(case, seen)
        if action is not None:
            return action
    theirs = {(node.key.zone, node.name, node.id) for node in case.evidence.foreign}
    for past in case.memory.nodes:
        if past.status is NodeStatus.TAKEN and (past.zone, past.name, past.id) in theirs:
            continue
        if case.evidence.node(past.name) is None and past.zone not in case.evidence.project.unreachable_since:
            key = NodeKey(case.slot.project, past.zone, past.name)
            if action := get_node_when_due(case, key, Cause.NODE_ABSENT, "it is remembered and not listed"):
                return action
    for intent in case.memory.creates:
        if action := _create_chore(case, intent):
            return action
    return request_chore(case)


def _clear_dead(case: Case) -> Action | None:
    """Deletes of dead nodes go on while a slot is paused, since those nodes hold quota that other slots need."""
    for seen in case.evidence.nodes:
        past = case.memory.node(seen.node.name)
        seen_now = seen.listed and not seen.zone_unreachable
        dead = past is not None and past.status is NodeStatus.DEAD
        if seen_now and dead and (delete := _delete_chore(case, seen)):
            return delete
    return None


def _node_chore(case: Case, seen: NodeEvidence) -> Action | None:
    if seen.zone_unreachable:
        return None
    if not seen.listed:
        # Absence from a list proves nothing; GetNode does.
        return get_node_when_due(case, seen.node.key, Cause.NODE_ABSENT, "it was listed before and is not now")
    if EffectKind.MISSED.of(seen.node.name) in case.evidence.ended_effects:
        return get_node_when_due(case, seen.node.key, Cause.NODE_ABSENT, "another call did not find it")
    if _is_readopted(case, seen):
        return Record(Fact.CREATE_KEPT, "its create was abandoned, and no other node serves", seen.node.name)
    return _delete_chore(case, seen)


def _is_readopted(case: Case, seen: NodeEvidence) -> bool:
    """
    The node of an abandoned create came, and no other node serves yet.

    It is kept: when grants take hours, a new create would take as long.
    """
    intent = case.memory.create(seen.node.name)
    if intent is None or not intent.abandoned or case.memory.has_given_up(seen.node.name):
        return False
    if not case.wants_node:
        return False
    others = live_nodes(case.evidence, case.memory)
    match seen.node.state:
        case NodeState.READY:
            return all(_is_being_made(other, case.memory) for other in others)
        case NodeState.CREATING:
            return not others
        case _:
            return False


def _is_being_made(seen: NodeEvidence, memory: Memory) -> bool:
    # A node may train long before its state CREATING ends.
    past = memory.node(seen.node.name)
    return seen.node.state is NodeState.CREATING and not (past is not None and past.launched)


def _delete_chore(case: Case, seen: NodeEvidence) -> Action | None:
    node, past = seen.node, case.memory.node(seen.node.name)
    if EffectKind.DELETE.of(node.name) in case.evidence.in_flight:
        return None
    if past is not None and past.delete is not None:
        if case.timers.passed(past.delete.next_at, DELETE_AGAIN_CAP):
            why = f"{past.delete.why or 'delete was asked for'} (repeated: still {node.state.name})"
            return replace(deletion(seen, past.delete.cause, why, past.delete.reason), again=True)
        return None
    if node.state in DEAD_STATES:
        return deletion(seen, Cause.REPORTED_DEAD, f"the cloud reports {node.state.name}", Reason.DEAD)
    if past is not None and past.was_shown_dead and node.state is not NodeState.DELETING:
        why = f"it was listed dead, and is {node.state.name} again"
        return deletion(seen, Cause.REVIVED, why, Reason.DEAD)
    if node.state is NodeState.DELETING and case.timers.lasted(seen.state_since, DELETING_IS_STUCK):
        # No memory says who asked for it (a person, or we before a kill); hanging, it would hold the fence for ever.
        why = f"it has been DELETING for {length(DELETING_IS_STUCK)}: repeated"
        return deletion(seen, Cause.DELETE_STUCK, why, Reason.SURPLUS)
    surplus = case.memory.has_abandoned(node.name) and node.state is not NodeState.DELETING
    if surplus and not effect_under_way(seen, case.evidence):
        return deletion(seen, Cause.CREATE_ABANDONED, "its create was abandoned before it came", Reason.SURPLUS)
    return None


def _due(last: Mark | None, timers: Timers, every: timedelta) -> bool:
    return last is None or timers.lasted(last, every, observations=0)


def _watch_abandoned(case: Case, intent: CreateIntent) -> Action | None:
    """Hourly GetNode for an abandoned create, whose operation may never end; a day of NOT_FOUND closes it."""
    this, key = EffectKind.GET_NODE.of(intent.name), NodeKey(case.slot.project, intent.zone, intent.name)
    if not intent.abandoned or this in case.evidence.in_flight or case.evidence.node(intent.name) is not None:
        return None
    if not _due(
        case.evidence.ended_effects.get(this) or case.evidence.creates_since.get(intent.name),
        case.timers,
        MISSING_READ_EVERY,
    ):
        return None
    return GetNode(key, Cause.CREATE_ABANDONED, "its create was abandoned, and its operation goes on")


def _create_chore(case: Case, intent: CreateIntent) -> Action | None:
    if ANY_CREATE in case.evidence.in_flight and not intent.state.is_accepted:
        return None
    if intent.state is CreateState.RUNNING:
        return _watch_abandoned(case, intent) or _get_operation_when_due(case, intent)
    if intent.state is CreateState.FAILED or case.evidence.node(intent.name) is not None:
        return None
    key = NodeKey(case.slot.project, intent.zone, intent.name)
    if intent.state in (CreateState.AWAITED, CreateState.REFUSED):
        return get_node_when_due(
            case, key, Cause.CREATE_UNDER_WAY, "its create was accepted, its operation is over or unknown"
        )
    is_sent_again = intent.state is CreateState.ANSWER_LOST and not intent.abandoned
    if intent.state is CreateState.SENT or is_sent_again:
        return None
    # Until then the call may still arrive, so NOT_FOUND would prove nothing.
    if not case.timers.passed(intent.asked_at + CREATE_MAY_ARRIVE, CREATE_MAY_ARRIVE):
        return None
    if intent.state is CreateState.UNREADABLE:
        return get_node_when_due(
            case, key, Cause.CREATE_UNDER_WAY, "its create was accepted, its operation is over or unknown"
        )
    return get_node_when_due(
        case, key, Cause.ANSWER_LOST, "the answer to its create was lost, and the call cannot arrive any more"
    )


def _get_operation_when_due(case: Case, intent: CreateIntent) -> GetOperation | None:
    this = EffectKind.GET_OPERATION.of(intent.name)
    vanished = case.evidence.node(intent.name) is None and case.memory.node(intent.name) is None
    known_before = EffectKind.GONE.of(intent.name) in case.evidence.ended_effects
    is_fresh = not case.timers.passed(intent.asked_at + FRESH_FOR, FRESH_FOR)
    every = case.evidence.project.poll_fresh_every if is_fresh else case.evidence.project.poll_every
    if vanished and known_before:
        every = timedelta(seconds=1)
    if intent.abandoned:
        every = max(every, POLL_ABANDONED_EVERY)
    last = case.evidence.ended_effects.get(this) or case.evidence.creates_since.get(intent.name)
    if this in case.evidence.in_flight or not (_due(last, case.timers, every)):
        return None
    return GetOperation(intent.name, intent.operation, Cause.CREATE_UNDER_WAY, "create under way")


# --- the desired state: down, or ended -------------------------------------------------------------------------------


def _take_down(case: Case) -> Action:
    """`down`: stop the run (SIGTERM, grace), delete; over when every node and create is gone."""
    if action := _clear_slot(case, Cause.DOWN, "down was asked for"):
        return action
    if case.memory.ours or case.memory.creates or case.memory.requests or case.evidence.in_flight:
        return _await_last(case)
    return Wait(Cause.DOWN, "down; nothing is left", ended=True)


def _empty_slot(case: Case, cause: Cause, why: str, *, going: str, over: str) -> Action:
    """As `_take_down`, at a bound of the fleet's file or without demand: for as long as that lasts, not for good."""
    if action := _clear_slot(case, cause, why):
        return action
    left = sorted({past.name for past in case.memory.ours} | case.memory.asked_for.keys())
    if left or case.evidence.in_flight:
        return Wait(cause, f"{going}: waiting until every node is gone ({', '.join(left)})")
    return Wait(cause, over)


def _clear_slot(case: Case, cause: Cause, why: str) -> Action | None:
    """The next step until no node and no create serves the slot: give up its create, stop its run, delete its node."""
    if intent := _open_create(case.memory):
        return Record(Fact.CREATE_SUPERSEDED, why, name=intent.name, cause=cause)
    for seen in live_nodes(case.evidence, case.memory):
        if seen.zone_unreachable:
            continue
        if wait := effect_under_way(seen, case.evidence):
            return wait
        return stop_before(case, seen, deletion(seen, cause, why, Reason.ASKED))
    return None


def _await_last(case: Case) -> Wait:
    """The Wait until every node and create is gone; after DOWN_PATIENCE without those that cannot be read."""
    left = {past.name: past.zone for past in case.memory.ours} | case.memory.asked_for
    hidden = {name: since for name, zone in left.items() if (since := _hidden_since(case, zone, name)) is not None}
    others = [key for key in case.evidence.in_flight if key.node not in hidden]
    if others or hidden.keys() != left.keys():
        return Wait(Cause.DOWN, f"going down: waiting until every node is gone ({', '.join(sorted(left))})")
    lasted = [case.timers.lasted(since, DOWN_PATIENCE) for since in hidden.values()]
    if not all(lasted):
        return Wait(Cause.ZONE_UNREACHABLE, f"going down: {', '.join(sorted({*left.values()}))} does not answer")
    keys = tuple(NodeKey(case.slot.project, zone, name) for name, zone in left.items())
    why = f"{unread_nodes(keys)}: remembered, and deleted once they can be"
    return Wait(Cause.ZONE_UNREACHABLE, f"going down: {why}", needs_person=True, out_of_reach=keys)


def _hidden_since(case: Case, zone: str, name: str) -> Mark | None:
    """Since when node, or else queued resource, of that name cannot be read."""
    read = name if case.memory.request(name) is None or case.memory.node(name) is not None else request_read(name)
    return case.evidence.hidden_since(zone, read)


def unread_nodes(keys: Sequence[NodeKey]) -> str:
    """`2 nodes in ZONE could not be looked at`, for `down`."""
    zones = ", ".join(sorted({key.zone for key in keys}))
    return f"{len(keys)} node{'s' if len(keys) > 1 else ''} in {zones} could not be looked at"


def _after_end(case: Case) -> Action:
    if intent := _open_create(case.memory):
        why = f"the slot is {case.memory.end.value}"
        return Record(Fact.CREATE_SUPERSEDED, why, name=intent.name, cause=Cause.SLOT_ENDED)
    again = tries_again_at(case.slot, case.memory)
    if again is not None and case.timers.passed(again, TRY_FAILED_EVERY):
        return Record(Fact.TRIED_AGAIN, f"it had trained, and failed an hour ago ({case.memory.end_why})")
    for seen in live_nodes(case.evidence, case.memory):
        if seen.zone_unreachable:
            continue
        if wait := effect_under_way(seen, case.evidence):
            return wait
        if action := _end_node(case, seen):
            return action
    why = f"{case.memory.end.value}: {case.memory.end_why}"
    if again is not None:
        why = f"{why}; it had trained, and is tried again at {again:%H:%M}"
    return Wait(Cause.SLOT_ENDED, why, needs_person=case.memory.end is End.FAILED)


def tries_again_at(slot: Slot, memory: Memory) -> datetime | None:
    """
    When a failed slot is tried again by itself; None: never.

    A job that had trained often fails through a dependency that comes back: a bucket, a package index, W&B.
    """
    if memory.end is not End.FAILED or memory.ended_at is None or memory.failed_since is None or slot.job is None:
        return None
    # `mark_taken` drops the run with its node; then the job that had trained counts as the failed one.
    failed_job = memory.run.job if memory.run is not None else memory.served_job
    has_trained = failed_job == memory.served_job == job_mark(slot.job)
    # Tries are counted, not hours: a daemon that was off for a day has tried nothing.
    if not has_trained or slot.job.foreign or memory.tries >= TRY_FAILED_TIMES:
        return None
    return memory.ended_at + TRY_FAILED_EVERY


def _end_node(case: Case, seen: NodeEvidence) -> Action | None:
    why = f"the slot is {case.memory.end.value}"
    if case.memory.end is End.DONE:
        # A foreign run is done only with `on_exit: delete`.
        goes = case.slot.care.on_success is OnSuccess.DELETE or (case.slot.job is not None and case.slot.job.foreign)
    else:
        # An on-demand node is kept until a person has looked at it. `timedelta.max`: keep_failed may be days, and a
        # clock that was set back only keeps the node longer. Hourly tries do not begin the time anew.
        failed_at = case.memory.failed_since or case.memory.ended_at
        kept_until = failed_at + case.slot.care.keep_failed if failed_at is not None else None
        due = kept_until is not None and case.timers.passed(kept_until, timedelta.max)
        goes = due and not keeps_node(seen)
    if goes:
        return stop_before(case, seen, deletion(seen, Cause.SLOT_ENDED, why, Reason.FINISHED))
    # The node is kept; a run that still lives there is stopped.
    tried = EffectKind.STOP.of(seen.node.name) in case.evidence.ended_effects
    runs = seen.report is not None and any(worker.alive for worker in seen.report.workers)
    return ending(seen, case.memory, Cause.SLOT_ENDED, why) if runs and not tried and seen.workers is not None else None


# --- no node, or several ---------------------------------------------------------------------------------------------


def _open_create(memory: Memory) -> CreateIntent | None:
    return next((intent for intent in memory.creates if not intent.abandoned), None)


def _decide_no_node(case: Case) -> Action:
    if ANY_CREATE in case.evidence.in_flight:
        return Wait(Cause.CREATE_UNDER_WAY, "create is under way")
    if ADOPTING in case.evidence.ended_effects and not case.timers.lasted(
        case.evidence.ended_effects[ADOPTING], ADOPTED_WITHIN
    ):
        return Wait(Cause.ADOPTING, "a node is being adopted")
    if case.memory.run is not None and case.memory.run.state is RunState.FINISHED:
        return end_done(case.memory.run.node, Furthest(case.memory.step, case.memory.checkpoint))
    for past in case.memory.nodes:
        if action := _decide_unaccounted(case, past):
            return action
    intent, closed = _open_create(case.memory), None
    if intent is None or any(place.queued for place in case.slot.places):
        closed = _may_not_ask(case)
        if closed is None and (enqueue := decide_enqueue(case)):
            return enqueue
    if intent is not None:
        return _decide_open_create(case, intent)
    return closed or _decide_create(case)


def _may_not_ask(case: Case) -> Wait | None:
    """The Wait of a slot that may not ask for a node now; None where it may."""
    if case.slot.job is None and (case.slot.job_problem or case.memory.run is not None):
        # A node without a job would be billed and idle.
        return without_job(case.slot, "no node is created")
    if case.slot.lacks:
        why = f"{case.slot.lacks}; until then no node is created"
        return Wait(Cause.DECLARATION_INCOMPLETE, why, needs_person=True)
    if wait := unlisted_zones(case):
        return wait
    if closed := case.evidence.closed:
        return Wait(closed.cause, closed.why, needs_person=closed.cause is Cause.COST_UNKNOWN)
    return None


def _decide_create(case: Case) -> Create | Wait:
    choice = direct_choice(case)
    if choice is None:
        queue = queue_outlook(case)
        cause = Cause.QUEUED if case.memory.standing_request is not None else Cause.NO_PLACE_OPEN
        return Wait(cause, queue.why, needs_person=queue.needs_person)
    if choice.place is None:
        queue = queue_outlook(case)
        why = f"{queue.why}; {choice.why}" if queue.why else choice.why
        return Wait(Cause.NO_PLACE_OPEN, why, needs_person=choice.needs_person and queue.needs_person)
    number = free_number(case, choice.place.zone)
    return Create(
        node_name(case.slot.name, number),
        number,
        choice.place,
        choice.cause,
        f"no node; creating {choice.why}",
        held_in_zone=holds_quota(choice.place, case.evidence, region_wide=False),
        held_in_region=holds_quota(choice.place, case.evidence, region_wide=True),
    )


def _decide_unaccounted(case: Case, past: NodeMemory) -> Action | None:
    """The Wait for a remembered node that is not seen; None where the slot need not wait for it."""
    said = f"`tpucare confirm {case.slot.name}` if nothing trains there"
    if past.status is NodeStatus.TAKEN and past.may_be_training:
        why = f"{past.name} in {past.zone} has another owner's label now, and our run may live there"
        return Wait(Cause.NODE_TAKEN, f"{why}: `tpucare adopt-node` it back, or {said}", needs_person=True)
    out_of_sight = past.status is NodeStatus.OUT_OF_SIGHT and past.delete is None
    if out_of_sight and past.may_be_training and not case.slot.care.fence_proceed:
        since = length(case.slot.care.fence_after)
        why = f"{past.name} in {past.zone} was not seen for {since} and may still be training"
        why = f"{why}: {said}, and a node is created elsewhere"
        return Wait(Cause.NODE_OUT_OF_SIGHT, why, needs_person=True)
    if not past.serves or case.evidence.node(past.name) is not None:
        return None
    if case.evidence.hidden_since(past.zone, past.name) is not None:
        return decide_hidden(case, past.zone, past.name)
    return Wait(Cause.NODE_ABSENT, f"waiting until {past.name} in {past.zone} is read")


def _decide_open_create(case: Case, intent: CreateIntent) -> Action:
    if case.timers.lasted(case.evidence.creates_since.get(intent.name), case.slot.care.boot_timeout):
        return Record(Fact.CREATE_SUPERSEDED, "unanswered at boot_timeout", name=intent.name, cause=Cause.BOOT_TIMEOUT)
    if intent.state is CreateState.ANSWER_LOST:
        place = case.slot.place(intent.place)
        if place is None or case.slot.bounds.excludes(place):
            # The same request cannot be sent again without that place.
            why = "its place is no longer declared" if place is None else "its place is above `max_price` now"
            return Record(Fact.CREATE_SUPERSEDED, why, name=intent.name, cause=Cause.PLACE_WITHDRAWN)
        if case.timers.passed(intent.retry_at, RESEND_BACKOFF.cap):
            why = "the answer was lost: sending the same name at the same place again"
            return Create(intent.name, intent.number, place, Cause.ANSWER_LOST, why, resend=True)
        why = f"the answer to the create of {intent.name} was lost; sending it again soon"
        return Wait(Cause.ANSWER_LOST, why)
    return Wait(Cause.CREATE_UNDER_WAY, f"create of {intent.name} is under way")


def _decide_several(case: Case, live: list[NodeEvidence]) -> Action:
    """
    Keep the node with a live run, else the newest; of two live runs the older launch stays.

    A node that does not answer is judged like any other (silence, boot_timeout), else it would hold the slot for ever.
    """
    names = ", ".join(seen.node.name for seen in live)
    if case.evidence.project.store_lost:
        why = f"several nodes ({names}) and a lost store: `tpucare confirm`"
        return Wait(Cause.STORE_LOST, why, needs_person=True)
    for seen in live:
        if wait := effect_under_way(seen, case.evidence):
            return wait
        if seen.zone_unreachable or seen.report is None or not seen.report.all_answer:
            if delete := _never_used(case, seen, live):
                return delete
            action = decide_node(case, seen)
            goes = isinstance(action, Stop) and action.then is not None
            waits_for_person = isinstance(action, Wait) and action.needs_person
            if goes or waits_for_person or isinstance(action, Delete | FetchHostKeys | AddSshKey | GetNode | Record):
                return action
            why = f"several nodes ({names}); waiting until every worker of each has answered"
            return Wait(Cause.SEVERAL_NODES, why)
    running = [seen for seen in live if not is_quiet(seen)]
    keep = _older_launch(running, case.memory) if running else _newest(live, case.memory)
    surplus = next(seen for seen in live if seen is not keep)
    why = f"{keep.node.name} holds this slot"
    delete = deletion(surplus, Cause.ANOTHER_NODE_HOLDS_SLOT, why, Reason.SURPLUS)
    return stop_before(case, surplus, delete)


def _never_used(case: Case, seen: NodeEvidence, live: list[NodeEvidence]) -> Delete | None:
    """
    A Delete of a node never launched on, in any state of its workers, beside the node on which our run lives.

    Without this row the slot would wait for a person to mend a node that it does not need.
    """
    past, run = case.memory.node(seen.node.name), case.memory.run
    if past is None or past.launched or seen.zone_unreachable or case.evidence.project.store_old or run is None:
        return None
    holds = next((other for other in live if other.node.name == run.node and other is not seen), None)
    if holds is None or holds.report is None or not holds.report.all_answer or is_quiet(holds):
        return None
    why = f"{holds.node.name} holds this slot"
    return deletion(seen, Cause.ANOTHER_NODE_HOLDS_SLOT, why, Reason.SURPLUS)


def _newest(live: list[NodeEvidence], memory: Memory) -> NodeEvidence:
    """The newest node, an adopted one before one that the slot created."""
    known = [(seen, memory.node(seen.node.name)) for seen in live]
    adopted = [seen for seen, past in known if past is not None and past.is_adopted]
    return (adopted or live)[-1]


def _older_launch(running: list[NodeEvidence], memory: Memory) -> NodeEvidence:
    if memory.run is not None:
        for seen in running:
            if seen.node.name == memory.run.node and memory.run.state.is_wanted:
                return seen
    return min(running, key=lambda seen: (seen.node.create_time, seen.node.name))
