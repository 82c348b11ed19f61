"""
Queued resources of a slot: when to ask for one, when it has to go, and which node holds the slot where a request and a
direct create both bring one.

Pure. A request stands beside at most one direct create (rule 5). It waits without a timeout of its own; once its node
is there, `decide` and `node` treat that as any other. How memory changes is left to `remember`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from tpucare.model.actions import DeleteRequest, EffectKind, Enqueue, Fact, GetRequest, Record
from tpucare.model.causes import Cause
from tpucare.model.evidence import Case, NodeEvidence, latest, request_read
from tpucare.model.lifecycles import NodeStatus, RequestState
from tpucare.model.memory import End, Memory, RequestIntent
from tpucare.model.resources import NodeKey, NodeState, Place, node_name
from tpucare.model.text import length
from tpucare.planner.backoff import DELETE_AGAIN_CAP, RESEND_BACKOFF
from tpucare.planner.placement import Choice, choose_place

# The service takes the node away within minutes; a forced delete meanwhile may hang (seen in axlearn).
SUSPENSION_PATIENCE = timedelta(minutes=5)
# A shell holds quota until it is gone; a delete that hangs for longer must not keep the slot from the queue.
SHELL_PATIENCE = timedelta(minutes=5)
# The service fails a request at the end of its validity, but some linger.
EXPIRED_LINGERS = timedelta(minutes=5)
# A call whose answer was lost may arrive until then: 60 s after its deadline of 30 s.
REQUEST_MAY_ARRIVE = timedelta(seconds=90)
READ_REQUEST_EVERY, READ_REQUEST_CAP = timedelta(seconds=10), timedelta(minutes=10)


class _Ending(NamedTuple):
    cause: Cause
    why: str


# --- asking for one --------------------------------------------------------------------------------------------------


def decide_enqueue(case: Case) -> Enqueue | None:
    """The request of a slot without a node, or the same once more after a lost answer; None where none is due."""
    standing = case.memory.standing_request
    if standing is not None:
        return _send_again(case, standing)
    if not case.evidence.queue.fresh:
        # A request of an earlier process may stand already, and only a listing shows it.
        return None
    if any(request.state.may_bring_node and not _is_hidden(case, request) for request in case.memory.requests):
        # Given up, and not deleted yet: until then it stands as well.
        return None
    place = queue_choice(case).place
    if place is None:
        return None
    number = free_number(case, place.zone)
    why = f"no node; standing in the queue for {place.accelerator_type} in {place.zone}"
    return Enqueue(node_name(case.slot.name, number), number, place, Cause.NO_NODE, why)


def _send_again(case: Case, request: RequestIntent) -> Enqueue | None:
    if request.state is not RequestState.ANSWER_LOST or EffectKind.ENQUEUE.of(request.name) in case.evidence.in_flight:
        return None
    place = case.slot.place(request.place)
    if place is None or not case.timers.passed(request.retry_at, RESEND_BACKOFF.cap):
        return None
    why = "the answer was lost: sending the same request again"
    return Enqueue(request.name, request.number, place, Cause.ANSWER_LOST, why, resend=True)


def queue_choice(case: Case) -> Choice:
    """The queued place to ask at, or why there is none."""
    held = {request.zone: request for request in case.memory.requests if _holds_back(case, request)}
    dark = case.evidence.queue.unreachable
    places = [place for place in case.slot.places if place.queued]
    choice = choose_place(_with_places(case, [p for p in places if p.zone not in held and p.zone not in dark]))
    if choice.place is not None:
        return choice
    reasons = [f"{zone}: {request.name} is not gone yet" for zone, request in sorted(held.items())]
    reasons += [f"{place.zone}: its queue does not answer" for place in places if place.zone in dark]
    waits = bool(reasons)
    if any(place.zone not in held and place.zone not in dark for place in places):
        reasons.append(choice.why)
    return Choice(None, "; ".join(reasons), needs_person=choice.needs_person and not waits)


def _holds_back(case: Case, request: RequestIntent) -> bool:
    """An ending request may hold the quota that the next one needs, so the next one waits for it, with a limit."""
    begun = request.deleted_at
    return begun is None or not case.timers.passed(begun + SHELL_PATIENCE, SHELL_PATIENCE)


def direct_choice(case: Case) -> Choice | None:
    """The place of a direct create; None where only queued places are declared."""
    places = [place for place in case.slot.places if not place.queued]
    return choose_place(_with_places(case, places)) if places else None


def _with_places(case: Case, places: list[Place]) -> Case:
    if len(places) == len(case.slot.places):
        return case
    return replace(case, slot=replace(case.slot, places=tuple(places)))


def free_number(case: Case, zone: str) -> int:
    """The next create number whose name no node and no queued resource of another owner has in *zone*."""
    taken = {node.name for node in case.evidence.foreign if node.key.zone == zone}
    taken |= {name for other, name in case.evidence.queue.foreign if other == zone}
    return next(n for n in itertools.count(case.memory.next_number) if node_name(case.slot.name, n) not in taken)


def queue_outlook(case: Case) -> Choice:
    """
    What the queue may bring, for people: `why` is empty where no queue is declared or used.

    `needs_person`: no request stands, and none can be asked for sooner or later without any person.
    """
    request = case.memory.standing_request
    if request is not None:
        return Choice(None, _request_words(request))
    if not any(place.queued for place in case.slot.places):
        return Choice(None, "", needs_person=True)
    if not case.evidence.queue.fresh:
        return Choice(None, "queued resources are not listed yet")
    return queue_choice(case)


def _request_words(request: RequestIntent) -> str:
    """`queued in us-central2-b since 03-02 14:05 UTC`"""
    since = f"since {request.asked_at:%m-%d %H:%M} UTC"
    match request.state:
        case RequestState.GRANTED:
            return f"granted in {request.zone}, its node is being made; queued {since}"
        case RequestState.ANSWER_LOST:
            return f"the answer to the request in {request.zone} was lost; sending it again soon"
        case _:
            return f"queued in {request.zone} {since}"


# --- watching each to its end ----------------------------------------------------------------------------------------


def request_chore(case: Case) -> Record | GetRequest | DeleteRequest | None:
    """The next step about the slot's requests, or about a direct create where the node of a request holds the slot."""
    holder = _holder(case)
    for request in case.memory.requests:
        if action := _chore_of(case, request, holder):
            return action
    if holder is None or case.memory.request(holder.node.name) is None:
        return None
    for intent in case.memory.creates:
        past = case.memory.node(intent.name)
        if intent.name != holder.node.name and not intent.abandoned and not (past is not None and past.launched):
            why = f"{holder.node.name} holds this slot"
            return Record(Fact.CREATE_SUPERSEDED, why, name=intent.name, cause=Cause.ANOTHER_NODE_HOLDS_SLOT)
    return None


def clear_shells(case: Case) -> DeleteRequest | GetRequest | None:
    """Deletes of what is spent go on while a slot is paused, since shells hold quota that other slots need."""
    for request in case.memory.requests:
        if request.state is RequestState.SPENT:
            action = _chore_of(case, request, None)
            if isinstance(action, DeleteRequest | GetRequest):
                return action
    return None


def _chore_of(
    case: Case, request: RequestIntent, holder: NodeEvidence | None
) -> Record | GetRequest | DeleteRequest | None:
    busy = {kind.of(request.name) for kind in (EffectKind.ENQUEUE, EffectKind.DEQUEUE, EffectKind.GET_REQUEST)}
    if busy & case.evidence.in_flight:
        return None
    if _is_out_of_reach(case, request):
        return _give_up_hidden(case, request)
    ending = _ending_of(case, request, holder)
    if ending is not None and request.stands:
        return Record(Fact.REQUEST_ABANDONED, ending.why, name=request.name, cause=ending.cause)
    if request.name in case.evidence.queue.missing and _may_be_read(case, request):
        return _get_when_due(case, request)
    return _delete_when_due(case, request, ending) if ending is not None else None


def _is_out_of_reach(case: Case, request: RequestIntent) -> bool:
    """Its zone does not answer, or its node is another owner's now: to delete one would delete both (rule 2)."""
    if request.zone in case.evidence.queue.unreachable or request.zone in case.evidence.project.unreachable_since:
        return True
    past = case.memory.node(request.name)
    taken = past is not None and past.status is NodeStatus.TAKEN
    return taken or any(node.name == request.name and node.key.zone == request.zone for node in case.evidence.foreign)


def _is_hidden(case: Case, request: RequestIntent) -> bool:
    """Neither a listing nor GetQueuedResource could show it for `fence_after`."""
    since = case.evidence.hidden_since(request.zone, request_read(request.name))
    return case.timers.lasted(since, case.slot.care.fence_after)


def _give_up_hidden(case: Case, request: RequestIntent) -> Record | None:
    if not request.stands or case.memory.node(request.name) is not None or not _is_hidden(case, request):
        return None
    why = f"{request.zone} does not answer for {length(case.slot.care.fence_after)}"
    return Record(Fact.REQUEST_ABANDONED, why, name=request.name, cause=Cause.ZONE_UNREACHABLE)


def _may_be_read(case: Case, request: RequestIntent) -> bool:
    """NOT_FOUND proves nothing while the call may still arrive; a request that is sent again is not asked for."""
    if request.state not in (RequestState.SENT, RequestState.ANSWER_LOST, RequestState.AWAITED):
        return True
    if request.state is not RequestState.AWAITED and request.stands and case.wants_node:
        return False
    return case.timers.passed(request.asked_at + REQUEST_MAY_ARRIVE, REQUEST_MAY_ARRIVE)


def _get_when_due(case: Case, request: RequestIntent) -> GetRequest | None:
    last = case.evidence.ended_effects.get(EffectKind.GET_REQUEST.of(request.name))
    failed, every = case.evidence.failed_reads.get(request_read(request.name)), READ_REQUEST_EVERY
    if failed is not None:
        every = min(READ_REQUEST_EVERY * 2 ** min(failed.times, 10), READ_REQUEST_CAP)
    if last is not None and not case.timers.lasted(last, every, observations=0):
        return None
    why = "it is remembered and not listed"
    return GetRequest(_key_of(case, request), Cause.REQUEST_ABSENT, why)


def _delete_when_due(case: Case, request: RequestIntent, ending: _Ending) -> DeleteRequest | None:
    if not request.state.is_accepted:
        # Not known to be there: GetQueuedResource decides, and a listing shows it if it comes late.
        return None
    if request.state is RequestState.SUSPENDING:
        since = case.evidence.queue.since.get(request.name)
        if not case.timers.lasted(since, SUSPENSION_PATIENCE):
            return None
    if request.doubtful and case.evidence.project.store_lost and case.wants_node and request.state.may_bring_node:
        # After a lost store nothing that may bring or have a node of ours goes before a person confirms (rule 6).
        return None
    if not case.timers.passed(request.delete_at, DELETE_AGAIN_CAP):
        return None
    again = request.deletes > 0
    why = f"{ending.why} (repeated: it is still there)" if again else ending.why
    return DeleteRequest(_key_of(case, request), ending.cause, why, again=again)


def _ending_of(case: Case, request: RequestIntent, holder: NodeEvidence | None) -> _Ending | None:
    """Why the request has to go; None: it stands, or serves."""
    past = case.memory.node(request.name)
    if request.abandoned:
        return _Ending(Cause.REQUEST_ABANDONED, request.why or "it was given up")
    if not request.state.may_bring_node:
        return _Ending(Cause.REQUEST_SPENT, request.why or "it brings no node any more")
    if past is not None and past.is_leaving:
        return _after_node(case, request)
    if past is not None:
        # Its node serves, or may: then all is decided about the node.
        return None if past.launched else _beside(holder, request)
    if unwanted := _not_wanted(case):
        return unwanted
    if request.doubtful:
        # A process before this one may train on its node, which only listings leave out.
        return _without_node(case, request)
    return _beside(holder, request) or _of_waiting(case, request)


def _beside(holder: NodeEvidence | None, request: RequestIntent) -> _Ending | None:
    if holder is None or holder.node.name == request.name:
        return None
    return _Ending(Cause.ANOTHER_NODE_HOLDS_SLOT, f"{holder.node.name} holds this slot")


def _of_waiting(case: Case, request: RequestIntent) -> _Ending | None:
    """Why a request without a node has to go, although the slot wants one."""
    first = case.memory.standing_request
    if first is not None and request.name != first.name:
        return _Ending(Cause.ANOTHER_REQUEST_STANDS, f"{first.name} stands for this slot")
    if request.state is RequestState.GRANTED:
        return _without_node(case, request)
    if case.memory.replace_asked:
        return _Ending(Cause.REPLACE_ASKED, "replace was asked for")
    if request.place and case.slot.place(request.place) is None:
        return _Ending(Cause.PLACE_WITHDRAWN, "its place is no longer declared")
    end = request.valid_until
    if end is not None and case.timers.passed(end + EXPIRED_LINGERS, timedelta.max):
        return _Ending(Cause.REQUEST_EXPIRED, f"not granted within {length(end - request.asked_at)}")
    return None


def _without_node(case: Case, request: RequestIntent) -> _Ending | None:
    """The service makes the node of a granted request again and again; at boot_timeout the slot waits no more."""
    gone = case.evidence.ended_effects.get(EffectKind.GONE.of(request.name))
    since = latest(case.evidence.queue.since.get(request.name), gone)
    if not case.timers.lasted(since, case.slot.care.boot_timeout):
        return None
    return _Ending(Cause.BOOT_TIMEOUT, "it was granted, and its node is not there at boot_timeout")


def _not_wanted(case: Case) -> _Ending | None:
    """Why the slot wants no node at all; None: it wants one."""
    memory, closed = case.memory, case.evidence.closed
    if closed is not None and closed.is_sure:
        return _Ending(closed.cause, closed.why)
    if case.wants_node:
        return None
    if memory.end is not End.NONE:
        return _Ending(Cause.SLOT_ENDED, f"the slot is {memory.end.value}")
    if memory.is_wanted:
        return _Ending(Cause.RESTING, "nothing asks for this slice")
    return _Ending(Cause.DOWN, "down was asked for")


def _after_node(case: Case, request: RequestIntent) -> _Ending | None:
    """Once its node goes the service suspends it; a forced delete is for one that this does not happen to."""
    past = case.memory.node(request.name)
    delete = past.delete if past is not None else None
    if delete is None or not case.timers.passed(delete.asked_at + SUSPENSION_PATIENCE, SUSPENSION_PATIENCE):
        return None
    return _Ending(Cause.REQUEST_SPENT, f"its node goes ({delete.why})" if delete.why else "its node goes")


def _holder(case: Case) -> NodeEvidence | None:
    """
    The node that holds the slot: one that serves and came up (READY, say, or launched on), the first of several.

    A node that is only being made holds nothing: most direct creates in a drought are listed CREATING for a moment,
    and for each of them the request would lose its place in the queue.
    """
    if not case.memory.requests:
        return None
    up = [seen for seen in case.evidence.nodes if _is_up(case.memory, seen)]
    return min(up, key=lambda seen: _turn(case.memory, seen), default=None)


def _is_up(memory: Memory, seen: NodeEvidence) -> bool:
    past = memory.node(seen.node.name)
    if past is None or not past.serves or seen.node.state is NodeState.DELETING:
        return False
    if memory.has_abandoned(seen.node.name):
        return False
    return past.launched or seen.node.state is not NodeState.CREATING


def _turn(memory: Memory, seen: NodeEvidence) -> tuple[bool, object, str]:
    past = memory.node(seen.node.name)
    return not (past is not None and past.launched), seen.node.create_time, seen.node.name


def _key_of(case: Case, request: RequestIntent) -> NodeKey:
    return NodeKey(case.slot.project, request.zone, request.name)
