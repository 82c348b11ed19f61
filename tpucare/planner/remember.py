"""
The transitions of a slot's memory: intents, results of effects, sightings of nodes, and the death of a process.

Pure. The memory of `intend` is written to disk before the effect, that of `remember` after it, that of `recover` once
at start, after a process was killed. Below are the parts: creates, deletes, runs, sightings. The next step is left to
`decide`, the memory of places to `placement`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType

from tpucare.model.actions import (
    Action,
    AddSshKey,
    Create,
    Delete,
    DeleteRequest,
    Enqueue,
    Fact,
    FetchHostKeys,
    GetNode,
    GetOperation,
    GetRequest,
    Launch,
    Record,
    SendNotice,
    Stop,
)
from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import (
    AlreadyExists,
    CloudError,
    CommandFailed,
    ConfigError,
    LostRace,
    NeedsPerson,
    NoCapacity,
    NodeGone,
    PreemptedMeanwhile,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from tpucare.model.lifecycles import (
    CreateEvent,
    CreateState,
    NodeEvent,
    NodeStatus,
    RequestEvent,
    RequestState,
    RunEvent,
    RunState,
)
from tpucare.model.memory import (
    ENDED_BY_PROGRESS,
    CreateIntent,
    DeleteIntent,
    End,
    FailureCounter,
    FailureKind,
    Memory,
    NodeMemory,
    Publishing,
    RequestIntent,
    RunMemory,
    StoredArchive,
    Trust,
)
from tpucare.model.resources import (
    DEAD_STATES,
    LABEL_NUMBER,
    PENDING_STATES,
    USABLE_STATES,
    Node,
    NodeState,
    Operation,
    QueuedResource,
    QueuedState,
    parse_node_name,
)
from tpucare.model.runs import Archive, LaunchResult, StopResult
from tpucare.planner import cadence, placement
from tpucare.planner.backoff import DELETE_AGAIN, DELETE_AGAIN_CAP, FAILURE_BACKOFF, MISSING_READ_EVERY, RESEND_BACKOFF
from tpucare.planner.predicates import run_number


def intend(memory: Memory, action: Action, now: datetime, rng: random.Random) -> Memory:
    """Memory with the intent of *action*, to be on disk before the effect begins."""
    match action:
        case Create():
            return intend_create(memory, action, now)
        case Enqueue():
            return intend_request(memory, action, now, rng)
        case DeleteRequest():
            return intend_request_delete(memory, action, now)
        case Delete():
            return intend_run_loss(intend_delete(memory, action, now), action, now, rng)
        case Launch():
            return intend_launch(memory, action, now)
        case Stop():
            return intend_stop(memory, action, now, rng)
        case SendNotice():
            past = memory.node(action.key.name)
            if past is not None:
                memory = memory.with_node(replace(past, noticed_at=now, noticed_checkpoint=action.checkpoint))
            return memory
        case Record():
            return _apply_record(memory, action, now, rng)
    return memory


def _apply_record(memory: Memory, action: Record, now: datetime, rng: random.Random) -> Memory:
    further = _is_further(memory, action)
    memory, run = record_furthest(memory, action.step, action.checkpoint), memory.run
    match action.fact:
        case Fact.CREATE_SUPERSEDED:
            return abandon_create(memory, action, now, rng)
        case Fact.CREATE_KEPT:
            return readopt_create(memory, action.name)
        case Fact.REQUEST_ABANDONED:
            return abandon_request(memory, action, now, rng)
        case Fact.NODE_OUT_OF_SIGHT:
            past = memory.node(action.name)
            return memory.with_node(past.after(NodeEvent.HIDDEN)) if past is not None else memory
        case Fact.RUN_ADOPTED:
            run = RunMemory(action.token, action.name, action.number, launched_at=now).after(RunEvent.COMPLETE)
            return mark_launched(replace(memory, run=run), action.name)
        case Fact.RUN_COMPLETE:
            return _run_after(memory, RunEvent.COMPLETE)
        case Fact.RUN_STOPPED:
            return _run_after(memory, RunEvent.QUIET)
        case Fact.RUN_OVER:
            return _run_after(memory, RunEvent.FOREIGN_END)
        case Fact.RUN_BACK:
            return _run_after(memory, RunEvent.FOREIGN_BACK)
        case Fact.FIRST_USE:
            return record_trust(memory, action.name, Trust.FIRST_USE, action.publisher, now)
        case Fact.SETUP_DONE:
            return reset_streak(memory, FailureKind.SETUP)
        case Fact.RUN_PROGRESSED:
            if further:
                memory = reset_streaks(memory)
            if run is None:
                return memory
            gap = action.gap.total_seconds() if action.gap is not None else run.gap_seconds
            memory = replace(memory, step_job=run.job, gap_seconds=gap)
            return replace(memory, run=replace(run, progressed=True, gap_seconds=gap))
        case Fact.RUN_FINISHED:
            return _run_after(memory, RunEvent.EXITED_0)
        case Fact.RUN_LASTED:
            return record_success(memory)
        case Fact.TRIED_AGAIN:
            return replace(memory.without_end(), tries=memory.tries + 1)
        case Fact.ENDED:
            if action.end is End.DONE:
                memory = record_success(memory)
            return replace(memory, end=action.end, end_why=action.why, end_cause=action.cause, ended_at=now)


def _run_after(memory: Memory, event: RunEvent) -> Memory:
    return replace(memory, run=memory.run.after(event)) if memory.run is not None else memory


def _is_further(memory: Memory, action: Record) -> bool:
    """The record's step or checkpoint is beyond the furthest; steps may restart with each epoch."""
    if action.step is not None and (memory.step is None or action.step > memory.step):
        return True
    if memory.checkpoint is None:
        return action.step is None and action.checkpoint is not None
    return action.checkpoint is not None and action.checkpoint > memory.checkpoint


def remember(
    memory: Memory, action: Action, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    """Memory after *action* ended with *result* or *error*."""
    match action:
        case Create():
            return after_create(memory, action, result, error, now, rng)
        case Delete():
            return after_delete(memory, action, error, now, rng)
        case Enqueue():
            return after_enqueue(memory, action, error, now, rng)
        case DeleteRequest() | GetRequest():
            return after_request_call(memory, action, error, now, rng)
        case Launch():
            return after_launch(memory, action, result, error, now, rng)
        case Stop():
            return after_stop(memory, action, result)
        case GetNode():
            return after_get_node(memory, action, result, error, now, rng)
        case GetOperation():
            return after_get_operation(memory, action, result, error, now, rng)
        case FetchHostKeys():
            # The result: guest attributes vouch for every worker.
            if error is None and result is True:
                return record_trust(memory, action.key.name, Trust.VOUCHED, action.publisher, now)
            return memory
        case AddSshKey():
            past = memory.node(action.key.name)
            return memory.with_node(replace(past, keyed=True)) if past is not None and error is None else memory
    return memory


def void_delete(memory: Memory, name: str) -> Memory:
    """Drop the delete of node *name*: it is not the node that was decided about."""
    past = memory.node(name)
    return memory.with_node(replace(past, delete=None)) if past is not None else memory


def recover(memory: Memory) -> Memory:
    """
    The memory of a killed process, as its successor needs it.

    A create without an answer may have arrived. A judged delete that was not accepted is judged anew, since the node
    may be well again, unless the slot has a successor of it. The next probe shows the outcome of a launch or stop.
    """
    succeeded = any(not intent.abandoned for intent in memory.creates)
    succeeded = succeeded or any(past.serves for past in memory.nodes)
    for intent in memory.creates:
        if not intent.state.is_accepted:
            memory = memory.with_create(replace(intent.after(CreateEvent.PROCESS_DIED), retry_at=None))
    for request in memory.requests:
        memory = memory.with_request(replace(request.after(RequestEvent.PROCESS_DIED), retry_at=None, delete_at=None))
    if memory.run is not None and memory.run.then_delete is Reason.JUDGED:
        # As with a judged delete: the run is stopped, and its node is judged anew.
        memory = replace(memory, run=replace(memory.run, then_delete=None))
    for past in memory.nodes:
        if past.launched:
            # Stores of earlier versions kept the create open until its operation was over.
            memory = close_create_of_serving_node(memory, past)
        delete = past.delete
        if delete is None:
            continue
        is_open_verdict = delete.reason is Reason.JUDGED and not delete.accepted
        kept = None if is_open_verdict and not succeeded else replace(delete, next_at=None)
        memory = memory.with_node(replace(past, delete=kept))
    return memory


# --- creates: an intent opens before the call, and closes by the answers of calls and operation -----------------------


# A create that is given up for these says nothing about its place.
UNWANTED = frozenset({Cause.RESTING, Cause.UNTIL_REACHED, Cause.COST_REACHED, Cause.ANOTHER_NODE_HOLDS_SLOT})
BUDGET_WINDOW = timedelta(minutes=1)
MISSING_READS = 24


def intend_create(memory: Memory, action: Create, now: datetime) -> Memory:
    """Open or resend a create, and take its number."""
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
        state=CreateState.SENT if past is None else CreateState.ANSWER_LOST,
        held_in_zone=action.held_in_zone,
        held_in_region=action.held_in_region,
    )
    # For the create budget of the next process, also after their intents are closed.
    recent = tuple(asked for asked in memory.recent_creates if timedelta() <= now - asked < BUDGET_WINDOW)
    memory = replace(memory, recent_creates=(*recent, now))
    if not action.resend:
        memory = _begin_ask(memory, action)
    return raise_next_number(memory.with_create(intent), action.name)


def _begin_ask(memory: Memory, action: Create | Enqueue) -> Memory:
    # The new node is as declared now, which fulfils `replace`. A confirmation was about nodes older than the last one,
    # which is an older node itself from now on.
    first = memory.asked_from if memory.asked_from is not None else action.number
    memory = replace(memory, replace_asked=False, fence_confirmed=False, asked_from=first)
    return placement.record_create(memory, action.place.key, action.number)


def abandon_create(memory: Memory, action: Record, now: datetime, rng: random.Random) -> Memory:
    """The slot waits for this create no more; its place counts a refusal, unless the slot wants no node any more."""
    intent = memory.create(action.name)
    if intent is None:
        return memory
    memory = memory.with_create(replace(intent, abandoned=True))
    if not memory.is_wanted or action.cause in UNWANTED:
        return memory
    # Another place goes first: this one left the create unanswered for a whole boot_timeout.
    return _refuse_place(memory, intent.place, Transient(action.why), now, rng)


def readopt_create(memory: Memory, name: str) -> Memory:
    """Take the abandoned create *name* back as the slot's, and abandon the others."""
    creates = tuple(replace(intent, abandoned=intent.name != name) for intent in memory.creates)
    return replace(memory, creates=creates)


def close_create_of_serving_node(memory: Memory, past: NodeMemory) -> Memory:
    """
    Close the create of *past*, on which a run is launched, in any state of its operation.

    The node may stay CREATING, and its operation running, for hours after its workers serve.
    """
    intent = memory.create(past.name)
    if intent is None:
        return mark_request_served(memory, past.name, past.create_time)
    if intent.place:
        memory = placement.record_node_up(memory, intent.place, past.create_time)
    return memory.without_create(past.name)


def after_create(
    memory: Memory, action: Create, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    intent = memory.create(action.name)
    if intent is None:
        return memory
    key = action.place.key
    if isinstance(result, Operation):
        memory = memory.with_place(key, placement.end_quota_refusal(memory.place(key)))
        return memory.with_create(intent.after(CreateEvent.ACCEPTED, operation=result.name))
    if isinstance(error, AlreadyExists):
        # Success, if GetNode finds our labels on that node.
        return memory.with_create(intent.after(CreateEvent.EXISTS))
    transient = isinstance(error, Transient) and not isinstance(error, LostRace)
    if transient or not isinstance(error, CloudError):
        retry_at = now + RESEND_BACKOFF.delay(intent.tries, rng)
        return memory.with_create(replace(intent.after(CreateEvent.NO_ANSWER), retry_at=retry_at))
    memory = _refuse_place(memory, key, error, now, rng, action)
    if action.resend:
        # The first call may have arrived and used up the very quota that this refusal is about.
        return memory.with_create(intent.after(CreateEvent.CALL_REFUSED, refused=str(error)))
    return memory.without_create(action.name)


def _refuse_place(
    memory: Memory,
    key: str,
    error: CloudError,
    now: datetime,
    rng: random.Random,
    asked: Create | CreateIntent | None = None,
) -> Memory:
    """Count a refusal at its place. *asked*: the create that it answers, which says whether we held that quota."""
    region_wide = isinstance(error, QuotaExceeded) and error.region_wide
    held = asked is not None and (asked.held_in_region if region_wide else asked.held_in_zone)
    asked_at = asked.asked_at if isinstance(asked, CreateIntent) else None
    place = placement.record_refusal(memory.place(key), error, held=held, now=now, rng=rng, asked_at=asked_at)
    return memory.with_place(key, place)


def after_get_node(
    memory: Memory, action: GetNode, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    if isinstance(error, NodeGone):
        memory = _count_missing(memory, action.key.name, now)
        return forget_node(_refuse_unreadable_create(memory, action.key.name, now, rng), action.key.name, now, rng)
    intent = memory.create(action.key.name)
    if isinstance(result, Node) and intent is not None:
        return memory.with_create(replace(intent.after(CreateEvent.FOUND), missing=0))
    return memory


def _count_missing(memory: Memory, name: str, now: datetime) -> Memory:
    """
    Count a NOT_FOUND of an abandoned create; a day of them closes it, in any state of its operation.

    The GetNode calls are an hour of observed time apart, so a clock that is set closes none. The create number stays
    spent, so a node that comes even later is known as ours (`NodeMemory.requested`).
    """
    intent = memory.create(name)
    if intent is None or not intent.abandoned or intent.state is not CreateState.RUNNING:
        return memory
    if intent.missing + 1 >= MISSING_READS and now - intent.asked_at >= MISSING_READS * MISSING_READ_EVERY:
        return memory.without_create(name)
    return memory.with_create(replace(intent, missing=intent.missing + 1))


def _refuse_unreadable_create(memory: Memory, name: str, now: datetime, rng: random.Random) -> Memory:
    """An accepted create without a node, whose operation we may not read, counts as a stockout of its place."""
    intent = memory.create(name)
    if intent is None or intent.state is not CreateState.UNREADABLE or intent.abandoned:
        return memory
    failure = NoCapacity(f"{name} is not there, and its operation may not be read: {intent.refused}")
    return _refuse_place(memory, intent.place, failure, now, rng, intent)


def after_get_operation(
    memory: Memory, action: GetOperation, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    intent = memory.create(action.name)
    if intent is None:
        return memory
    if isinstance(error, NodeGone):
        return _operation_over(memory, intent)
    if isinstance(error, NeedsPerson):
        # Later reads would be refused, too. The create stays open, and GetNode decides.
        return memory.with_create(intent.after(CreateEvent.FORBIDDEN, refused=str(error)))
    if not isinstance(result, Operation) or not result.done:
        return memory
    if result.error is None:
        return _operation_over(memory, intent)
    failure = result.error
    if isinstance(failure, CloudError) and not isinstance(failure, PreemptedMeanwhile | LostRace):
        memory = _refuse_place(memory, intent.place, failure, now, rng, intent)
    if memory.node(action.name) is None:
        # The node may be listed a little later, or have failed too early to be listed, so GetNode decides.
        return memory.with_create(intent.after(CreateEvent.OPERATION_FAILED, refused=str(failure)))
    return memory.with_create(intent.after(CreateEvent.NODE_FAILED, refused=str(failure)))


def _operation_over(memory: Memory, intent: CreateIntent) -> Memory:
    if memory.node(intent.name) is not None:
        return memory.without_create(intent.name)
    return memory.with_create(intent.after(CreateEvent.OPERATION_OVER))


# --- queued requests: opened before the call, closed once GetQueuedResource says NOT_FOUND ----------------------------


def intend_request(memory: Memory, action: Enqueue, now: datetime, rng: random.Random) -> Memory:
    """Open a request and take its number, or send it once more under its request id."""
    past = memory.request(action.name)
    if past is not None:
        return memory.with_request(replace(past, tries=past.tries + 1))
    place = action.place
    request = RequestIntent(
        name=action.name,
        number=action.number,
        zone=place.zone,
        place=place.key,
        asked_at=now,
        request_id=str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        valid_until=now + place.valid_for if place.valid_for is not None else None,
    )
    return raise_next_number(_begin_ask(memory, action).with_request(request), action.name)


def after_enqueue(
    memory: Memory, action: Enqueue, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    request, key = memory.request(action.name), action.place.key
    if request is None:
        return memory
    if error is None:
        memory = memory.with_place(key, placement.end_quota_refusal(memory.place(key)))
        return memory.with_request(request.after(RequestEvent.ACCEPTED))
    if isinstance(error, AlreadyExists):
        # Ours, if GetQueuedResource finds our labels in its node_spec; the service may say so of one just made.
        return memory.with_request(request.after(RequestEvent.EXISTS))
    transient = isinstance(error, Transient) and not isinstance(error, LostRace)
    if transient or not isinstance(error, CloudError):
        retry_at = now + RESEND_BACKOFF.delay(request.tries, rng)
        return memory.with_request(replace(request.after(RequestEvent.NO_ANSWER), retry_at=retry_at))
    memory = _refuse_place(memory, key, error, now, rng)
    if action.resend:
        # The first call may have arrived.
        return memory.with_request(request.after(RequestEvent.CALL_REFUSED))
    return memory.without_request(action.name)


def abandon_request(memory: Memory, action: Record, now: datetime, rng: random.Random) -> Memory:
    """The slot waits for this request no more; a place that left it unanswered for too long counts a refusal."""
    request = memory.request(action.name)
    if request is None:
        return memory
    memory = memory.with_request(replace(request, abandoned=True, why=action.why, delete_at=None))
    if request.place and action.cause in (Cause.BOOT_TIMEOUT, Cause.REQUEST_EXPIRED):
        return _refuse_place(memory, request.place, NoCapacity(action.why), now, rng)
    return memory


def intend_request_delete(memory: Memory, action: DeleteRequest, now: datetime) -> Memory:
    request = memory.request(action.key.name)
    if request is None:
        return memory
    next_at = now + _delete_again(request.deletes)
    request = replace(request, deletes=request.deletes + 1, deleted_at=request.deleted_at or now, delete_at=next_at)
    return memory.with_request(request)


def after_request_call(
    memory: Memory,
    action: DeleteRequest | GetRequest,
    error: Exception | None,
    now: datetime,
    rng: random.Random,
) -> Memory:
    request = memory.request(action.key.name)
    if request is None:
        return memory
    if isinstance(error, NodeGone):
        return _close_request(memory, request, now, rng)
    if isinstance(action, DeleteRequest) and error is None:
        return memory.with_request(request.after(RequestEvent.DELETE_ACCEPTED))
    if isinstance(action, DeleteRequest) and isinstance(error, CloudError) and not isinstance(error, LostRace):
        pause = timedelta(minutes=1) if isinstance(error, RateLimited) else DELETE_AGAIN / 12 * request.deletes
        return memory.with_request(replace(request, delete_at=now + min(pause, DELETE_AGAIN)))
    return memory


def _close_request(memory: Memory, request: RequestIntent, now: datetime, rng: random.Random) -> Memory:
    """It is gone. One that stood, and that no delete of ours removed, was forgotten by the service: a refusal."""
    memory = memory.without_request(request.name)
    if request.stands and request.place and not request.deletes and memory.node(request.name) is None:
        forgotten = NoCapacity(f"the queued resource {request.name} is gone, and its node was not there")
        return _refuse_place(memory, request.place, forgotten, now, rng)
    return memory


_SHOWN: Mapping[QueuedState, RequestEvent] = MappingProxyType(
    {
        QueuedState.ACCEPTED: RequestEvent.SHOWN_WAITING,
        QueuedState.WAITING_FOR_RESOURCES: RequestEvent.SHOWN_WAITING,
        QueuedState.PROVISIONING: RequestEvent.SHOWN_GRANTED,
        QueuedState.ACTIVE: RequestEvent.SHOWN_GRANTED,
        QueuedState.SUSPENDING: RequestEvent.SHOWN_SUSPENDING,
        QueuedState.SUSPENDED: RequestEvent.SHOWN_SPENT,
        QueuedState.FAILED: RequestEvent.SHOWN_SPENT,
        QueuedState.DELETING: RequestEvent.SHOWN_SPENT,
    }
)


def apply_request(memory: Memory, resource: QueuedResource, now: datetime, rng: random.Random) -> Memory:
    """
    Memory after *resource*, which is ours and of this slot, was listed or read.

    One that this store does not know is adopted by its labels (rule 6). The loss of a node that came up is counted
    with the node; one that was taken away before that is counted here, and a failed request at its place.
    """
    known = memory.request(resource.name)
    request = known or _adopted_request(resource)
    event = _SHOWN.get(resource.state)
    if event is not None:
        request = request.after(event)
    if request == known:
        return memory
    was_standing = known is not None and known.stands
    memory = raise_next_number(memory.with_request(request), resource.name)
    if not was_standing or request.state.may_bring_node:
        return memory
    if resource.state is QueuedState.FAILED:
        error = resource.error if isinstance(resource.error, CloudError) else Transient("it is FAILED")
        memory = memory.with_request(replace(request, why=f"it failed: {error}", booked=True))
        if request.place and not isinstance(error, PreemptedMeanwhile):
            return _refuse_place(memory, request.place, error, now, rng)
        return memory
    memory = memory.with_request(replace(request, why=f"it is {resource.state.name}"))
    if resource.state is QueuedState.DELETING or not resource.suspended_by_service:
        return memory
    return _count_preemption(memory, resource.name, f"was taken away ({resource.state.name})")


def _adopted_request(resource: QueuedResource) -> RequestIntent:
    parsed = parse_node_name(resource.name)
    waiting = (QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)
    return RequestIntent(
        name=resource.name,
        number=parsed[1] if parsed is not None else 0,
        zone=resource.key.zone,
        place="",
        asked_at=resource.create_time,
        state=RequestState.AWAITED,
        # Another process may have launched on its node.
        doubtful=resource.state not in waiting,
    )


def mark_request_served(memory: Memory, name: str, came_at: datetime) -> Memory:
    """The node of request *name* came up; so its place gives nodes."""
    request = memory.request(name)
    if request is None or request.served:
        return memory
    memory = memory.with_request(replace(request, served=True))
    return placement.record_node_up(memory, request.place, came_at) if request.place else memory


# --- deletes: repeated until the node is gone, or void; useless nodes block their place -------------------------------


def intend_delete(memory: Memory, action: Delete, now: datetime) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        past = NodeMemory(action.key.name, action.key.zone, action.id, action.create_time, launched=True)
    first, tries = past.delete is None, past.delete_tries + 1
    delete = past.delete or DeleteIntent(now, action.reason, action.cause, action.why)
    delete = replace(
        delete,
        reason=action.reason,
        next_at=now + _delete_again(tries - 1),
        # The workers of a revived node were not probed since, so their last report proves nothing.
        quiet=(delete.quiet or action.quiet) and past.status is not NodeStatus.REVIVED,
    )
    past = replace(past, delete=delete, delete_tries=tries)
    # A verdict repeated after a restart is about the same node.
    if tries == 1 and past.place and (action.unanswered or action.held):
        memory = _count_useless(memory, past.place, action, now)
    memory = memory.with_node(past).without_create(action.key.name)
    # The first delete of the slot's node fulfils `replace`; the delete of a surplus node, or a repeated one, does not.
    replaced = first and action.reason is not Reason.SURPLUS
    # A confirmation was about the nodes older than this one, which is an older node itself from now on.
    return replace(
        memory,
        replace_asked=memory.replace_asked and not replaced,
        fence_confirmed=memory.fence_confirmed and not first,
    )


def _delete_again(before: int) -> timedelta:
    """The pause after a delete with so many before it."""
    pause: timedelta = min(DELETE_AGAIN * 2 ** min(before, 10), DELETE_AGAIN_CAP)
    return pause


def _count_useless(memory: Memory, key: str, action: Delete, now: datetime) -> Memory:
    """Count one more useless node of the place in a row; the second blocks it."""
    place = memory.place(key)
    if action.unanswered:
        place = replace(place, unanswered_nodes=place.unanswered_nodes + 1)
        count, what, check = place.unanswered_nodes, "never answered", "network, firewall, key, OS Login"
    else:
        place = replace(place, held_nodes=place.held_nodes + 1)
        count, what, check = place.held_nodes, "had their chips held before any launch", "`runtime`, startup scripts"
    if count >= placement.UNANSWERED_LIMIT:
        place = placement.block_place(place, f"{count} nodes in a row {what} ({action.why}): check {check}", now=now)
    return memory.with_place(key, place)


def after_delete(memory: Memory, action: Delete, error: Exception | None, now: datetime, rng: random.Random) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        return memory
    if isinstance(error, NodeGone):
        return forget_node(memory, action.key.name, now, rng)
    delete = past.delete
    if delete is None or isinstance(error, LostRace):
        return memory
    if error is None:
        delete = replace(delete, accepted=True)
    elif isinstance(error, RateLimited):
        delete = replace(delete, next_at=now + timedelta(minutes=1))
    elif not delete.accepted:
        delete = replace(delete, next_at=now + min(DELETE_AGAIN / 12 * past.delete_tries, DELETE_AGAIN))
    return memory.with_node(replace(past, delete=delete))


# --- runs: launches, stops, progress, failure counters ----------------------------------------------------------------


# A run that made progress and lived so long (wall time) has trained; one that crashes each minute has not.
SERVED_AFTER = timedelta(hours=1)


def intend_launch(memory: Memory, action: Launch, now: datetime) -> Memory:
    memory = mark_launched(_start_job(_record_training(memory, now), action.job), action.key.name)
    run = RunMemory(action.token, action.key.name, action.number, launched_at=now, job=action.job)
    return replace(memory, run=run, restart_asked=False, fence_confirmed=False)


def _start_job(memory: Memory, job: str) -> Memory:
    """Reset progress and failure streaks if *job* is another than the last one."""
    # Stores of earlier versions have no `launched_job`.
    known = memory.launched_job or memory.step_job or (memory.run.job if memory.run is not None else "")
    memory = replace(memory, launched_job=job)
    if not known or known == job:
        return memory
    for name in FailureKind:
        memory = reset_streak(memory, name)
    return replace(
        memory,
        step=None,
        checkpoint=None,
        step_job="",
        gap_seconds=0.0,
        last_step=None,
        last_checkpoint=None,
        save_seconds=0.0,
    )


def intend_stop(memory: Memory, action: Stop, now: datetime, rng: random.Random) -> Memory:
    memory = _record_training(memory, now)
    run = memory.run_on(action.key.name)
    if run is None:
        run = RunMemory(action.token, action.key.name, run_number(action.token), launched_at=now)
    run = replace(run, stop_why=action.why, stop_cause=action.cause, then_delete=action.then or run.then_delete)
    run = replace(run.after(RunEvent.STOP_ASKED), stops=run.stops + 1)
    memory = record_furthest(replace(memory, run=run, restart_asked=False), action.step, action.checkpoint)
    if action.failure is not None:
        memory = _count_failure(memory, action.failure, action.why, action.advanced, now, rng)
        memory = _count_on_node(memory, action)
    if action.served:
        # The next run may begin at step 0, so the furthest step of this one is no measure for it.
        memory = replace(record_success(memory), step=None, checkpoint=None)
    if action.gives_up:
        memory = _end_failed(memory, action, now)
    return memory


def intend_run_loss(memory: Memory, action: Delete, now: datetime, rng: random.Random) -> Memory:
    """The run goes with its node: count the failure that a Stop would count."""
    memory = _record_training(memory, now)
    if action.failure is not None:
        memory = _count_failure(
            record_furthest(memory, action.step, action.checkpoint),
            action.failure,
            action.why,
            action.advanced,
            now,
            rng,
        )
    if action.gives_up:
        memory = _end_failed(memory, action, now)
    return memory


def _end_failed(memory: Memory, action: Stop | Delete, now: datetime) -> Memory:
    since, tries = memory.failed_since or now, memory.tries if memory.failed_since is not None else 0
    memory = replace(memory, end=End.FAILED, end_why=action.why, end_cause=action.cause, ended_at=now)
    return replace(memory, failed_since=since, tries=tries)


def record_last_progress(memory: Memory, step: int | None, checkpoint: int | None) -> Memory:
    """Record step and checkpoint last seen of the present run; they may be behind the furthest."""
    last_step = step if step is not None else memory.last_step
    last_checkpoint = checkpoint if checkpoint is not None else memory.last_checkpoint
    if (last_step, last_checkpoint) == (memory.last_step, memory.last_checkpoint):
        return memory
    return replace(memory, last_step=last_step, last_checkpoint=last_checkpoint)


def record_save_cost(memory: Memory, seconds: float | None) -> Memory:
    """Record the cost of a save as the run measured it; a small difference is not worth a commit."""
    if seconds is None or not seconds > 0 or not cadence.differs(memory.save_seconds, seconds):
        return memory
    return replace(memory, save_seconds=seconds)


def record_archive(memory: Memory, archive: Archive, now: datetime) -> Memory:
    """Record the environment that a run stored for later nodes."""
    return replace(memory, stored=StoredArchive(archive, now))


def record_furthest(memory: Memory, step: int | None, checkpoint: int | None) -> Memory:
    """Record the furthest step and checkpoint; a crash short of them continues its streak."""
    if step is not None and step != memory.step and memory.run is not None:
        memory = replace(memory, step_job=memory.run.job)
    return replace(
        memory,
        step=step if step is not None else memory.step,
        checkpoint=checkpoint if checkpoint is not None else memory.checkpoint,
    )


def _count_failure(
    memory: Memory, kind: FailureKind, why: str, advanced: bool, now: datetime, rng: random.Random
) -> Memory:
    counter = memory.counter(kind)
    failures = 1 if advanced else counter.failures + 1
    if advanced:
        memory = replace(memory, failed_since=None)
    backoff = FAILURE_BACKOFF[kind]
    retry_at = now + backoff.delay(failures, rng) if backoff is not None else None
    if kind is FailureKind.INFRASTRUCTURE and failures == 1:
        retry_at = None
    return memory.with_counter(kind, FailureCounter(failures, counter.total + 1, retry_at, why))


def reset_streaks(memory: Memory) -> Memory:
    """End the streaks of failures that progress ends: the next failure is the first of its streak."""
    for name in ENDED_BY_PROGRESS:
        memory = reset_streak(memory, name)
    return replace(memory, failed_since=None)


def record_success(memory: Memory) -> Memory:
    """End the failure streaks, and record that the job of this run has trained."""
    return _record_trained_job(reset_streaks(memory))


def _record_trained_job(memory: Memory) -> Memory:
    """Record that the run's job has trained; the job of an adopted run is unknown and changes nothing."""
    run = memory.run
    return replace(memory, served_job=run.job) if run is not None and run.job else memory


def _record_training(memory: Memory, now: datetime) -> Memory:
    """Record that the run's job has trained, if the run made progress and lived for SERVED_AFTER."""
    run = memory.run
    if run is None or not run.progressed or now - run.launched_at < SERVED_AFTER:
        return memory
    if run.state.is_stopping or run.state is RunState.STOPPED:
        return memory
    return _record_trained_job(memory)


def reset_streak(memory: Memory, kind: FailureKind) -> Memory:
    """The next failure of *kind* is the first of a streak."""
    counter = memory.counter(kind)
    return memory.with_counter(kind, replace(counter, failures=0, retry_at=None)) if counter.failures else memory


def _count_on_node(memory: Memory, action: Stop) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        return memory
    if action.failure is FailureKind.STALL:
        return memory.with_node(replace(past, stalls=1 if action.advanced else past.stalls + 1))
    if action.failure is FailureKind.INFRASTRUCTURE:
        count = 1 if action.advanced else past.infrastructure + 1
        return memory.with_node(replace(past, infrastructure=count))
    return memory


def mark_launched(memory: Memory, name: str) -> Memory:
    """Record a run on node *name*, launched or found: the node is fenced (rule 1), and its create is closed."""
    past = memory.node(name)
    if past is None:
        return memory
    attempts = memory.attempts if past.attempt else memory.attempts + 1
    past = replace(past, attempt=past.attempt or attempts, launched=True)
    if past.place and memory.place(past.place).held_nodes:
        memory = memory.with_place(past.place, placement.reset_held(memory.place(past.place)))
    return close_create_of_serving_node(replace(memory.with_node(past), attempts=attempts), past)


def after_launch(
    memory: Memory, action: Launch, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    run = memory.run
    if run is None or run.token != action.token:
        return memory
    if isinstance(result, LaunchResult) and result.complete:
        return replace(memory, run=replace(run.after(RunEvent.COMPLETE), launch_book=""))
    errors = [e for e in result.workers if e is not None] if isinstance(result, LaunchResult) else [error]
    reason = next((str(e) for e in errors if e is not None), "launch failed")
    human = any(isinstance(e, CommandFailed | ConfigError) for e in errors)
    kind = FailureKind.SETUP if human else FailureKind.INFRASTRUCTURE
    memory = replace(memory, run=replace(run, launch_book=kind.value))
    return _count_failure(memory, kind, reason, advanced=False, now=now, rng=rng)


def after_stop(memory: Memory, action: Stop, result: object) -> Memory:
    # None: the run of another node was adopted meanwhile, and not stopped.
    run = memory.run_on(action.key.name)
    if run is None or not isinstance(result, StopResult):
        return memory
    if result.quiet:
        return replace(memory, run=run.after(RunEvent.QUIET))
    # A stop that some worker did not get is repeated; one that every worker got is not.
    deaf = any(isinstance(worker, Exception) for worker in result.workers)
    return memory if deaf else replace(memory, run=run.after(RunEvent.NOT_FREE))


# --- sightings: a node is listed, answers, is gone, or has another owner ----------------------------------------------


def apply_node(memory: Memory, node: Node) -> Memory:
    """
    Memory after *node*, which is ours and of this slot, was listed or read.

    A node that no create of this store asked for may have been launched on by its creator, so it is fenced (rule 1).
    """
    intent = memory.create(node.name)
    past = memory.node(node.name)
    if past is None or past.id != node.id:
        past = _first_memory(node, intent, memory)
        memory = memory.with_node(past)
        if intent is None and not past.requested:
            # A lost store forgot that demand wanted it (rule 6): only its hosts can say that they have no work.
            memory = replace(memory, awake=True)
    memory = mark_in_sight(memory, node.name)
    memory = _apply_state(memory, node)
    # While the node is CREATING, its operation may still end in a stockout, and the call may still be unanswered.
    if intent is not None and not intent.abandoned and node.state is not NodeState.CREATING:
        memory = memory.without_create(node.name)
        if node.state is NodeState.READY and intent.place:
            memory = placement.record_node_up(memory, intent.place, node.create_time)
    if node.state is NodeState.READY:
        memory = mark_request_served(memory, node.name, node.create_time)
    return raise_next_number(memory, node.name)


def mark_in_sight(memory: Memory, name: str) -> Memory:
    """End OUT_OF_SIGHT, TAKEN and a confirmation for a node that is listed as ours again."""
    past = memory.node(name)
    if past is None:
        return memory
    listed = replace(past.after(NodeEvent.LISTED), written_off=False)
    return memory if listed == past else memory.with_node(listed)


def _apply_state(memory: Memory, node: Node) -> Memory:
    past = memory.node(node.name)
    assert past is not None
    if node.state in DEAD_STATES and not past.was_shown_dead:
        return _count_preemption(memory.with_node(past.after(NodeEvent.SHOWN_DEAD)), node.name, node.state.name)
    if past.status is NodeStatus.DEAD and node.state in PENDING_STATES | USABLE_STATES:
        delete = replace(past.delete, quiet=False) if past.delete is not None else None
        return memory.with_node(replace(past.after(NodeEvent.SHOWN_ALIVE), delete=delete))
    return memory


def _first_memory(node: Node, intent: CreateIntent | None, memory: Memory) -> NodeMemory:
    request = memory.request(node.name)
    is_of_request = intent is None and request is not None and not request.doubtful
    asked = request if is_of_request else intent
    return NodeMemory(
        name=node.name,
        zone=node.key.zone,
        id=node.id,
        create_time=node.create_time,
        place=asked.place if asked else "",
        launched=asked is None,
        attempt=memory.attempts if asked is None else 0,
        requested=is_of_request or (intent is None and _was_requested(node, memory)),
        queued=node.queued_resource,
    )


def _was_requested(node: Node, memory: Memory) -> bool:
    """
    Whether *node* comes late from a closed create of this store: name and label agree on a number that it has used.

    Adopted nodes have no number label; the numbers of a lost store were not used by this one.
    """
    parsed = parse_node_name(node.name)
    if parsed is None or parsed[0] != node.slot or node.labels.get(LABEL_NUMBER) != str(parsed[1]):
        return False
    return memory.has_asked_for(parsed[1])


def raise_next_number(memory: Memory, name: str) -> Memory:
    parsed = parse_node_name(name)
    if parsed is None or parsed[1] < memory.next_number:
        return memory
    return replace(memory, next_number=parsed[1] + 1)


def _count_preemption(memory: Memory, name: str, what: str) -> Memory:
    """
    Count a preemption of node *name*, and uncount a failed launch on it, which the preemption explains.

    Of a node of a queued resource the node and the resource tell, in any order: it is counted once.
    """
    request = memory.request(name)
    if request is not None and request.booked:
        return memory
    if request is not None:
        memory = memory.with_request(replace(request, booked=True))
    counter = memory.counter(FailureKind.PREEMPTION)
    counter = replace(counter, total=counter.total + 1, reason=f"{name} {what}")
    memory = memory.with_counter(FailureKind.PREEMPTION, counter)
    run = memory.run_on(name)
    if run is None or not run.launch_book:
        return memory
    kind = FailureKind(run.launch_book)
    counter = memory.counter(kind)
    counter = replace(counter, failures=max(0, counter.failures - 1), total=max(0, counter.total - 1), retry_at=None)
    return replace(memory.with_counter(kind, counter), run=replace(run, launch_book=""))


def mark_answered(memory: Memory, name: str) -> Memory:
    """Every worker of the node answered once; so its place gives nodes that answer."""
    past = memory.node(name)
    if past is None or past.answered:
        return memory
    memory = memory.with_node(replace(past, answered=True))
    if past.place and memory.place(past.place).unanswered_nodes:
        memory = memory.with_place(past.place, placement.reset_unanswered(memory.place(past.place)))
    return memory


def mark_key_refused(memory: Memory, name: str) -> Memory:
    """A worker refused our key; a guard on it may drop our packets from now on."""
    past = memory.node(name)
    return memory if past is None or past.refused else memory.with_node(replace(past, refused=True))


def record_trust(memory: Memory, name: str, trust: Trust, publisher: str, now: datetime) -> Memory:
    """Trust the node's host keys; if *publisher* is not empty, record whether it publishes host keys."""
    past = memory.node(name)
    if past is not None:
        memory = memory.with_node(replace(past, trust=trust))
    if not publisher:
        return memory
    newest = Publishing(now, published=trust is Trust.VOUCHED)
    return replace(memory, publishing={**memory.publishing, publisher: newest})


def forget_node(memory: Memory, name: str, now: datetime, rng: random.Random) -> Memory:
    """GetNode said NOT_FOUND: drop the node, and close its create unless an operation runs."""
    past, intent = memory.node(name), memory.create(name)
    if past is not None:
        # No preemption: a node of a failed create never existed. A REVIVED node is lost only now and counts, so
        # `is_leaving` would leave out too much.
        request = memory.request(name)
        # While a request is granted its node may vanish in state CREATING, and be made anew.
        made_anew = request is not None and request.stands and not request.served
        counts = past.status not in (NodeStatus.DEAD, NodeStatus.TAKEN) and past.delete is None and intent is None
        if counts and not made_anew:
            memory = _count_preemption(memory, name, "is gone")
        memory = memory.without_node(name)
        if past.queued and request is None:
            memory = replace(memory, shell=past.queued)
    if intent is not None and intent.state is not CreateState.RUNNING:
        memory = memory.without_create(name)
        if past is not None and past.delete is None and not intent.state.has_refusal:
            # No error will follow: a node that vanished while CREATING, without a delete of ours, found no capacity.
            error = NoCapacity(f"{name} vanished while CREATING")
            memory = _refuse_place(memory, intent.place, error, now, rng)
    if run := memory.run_on(name):
        memory = replace(memory, run=run.after(RunEvent.NODE_GONE), restart_asked=False, replace_asked=False)
    return memory


def mark_taken(memory: Memory, name: str) -> Memory:
    """
    The node has another owner's label now: it is not touched, and counts as no preemption.

    A node on which our run may live stays in memory until GetNode says NOT_FOUND.
    """
    past, memory = memory.node(name), memory.without_create(name).without_request(name)
    if past is not None:
        fenced = past.may_be_training
        memory = memory.with_node(past.after(NodeEvent.RELABELLED)) if fenced else memory.without_node(name)
    run = memory.run_on(name)
    # A finished run stays finished.
    return replace(memory, run=None) if run is not None and run.state is not RunState.FINISHED else memory
