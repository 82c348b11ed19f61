"""
The states of a create, a queued request, a node and a run in a slot's memory, and the transitions between them.

Each lifecycle is an enum of states, an enum of events and one table. An event that the table does not list for a state
leaves it as it is, since answers come late, twice and in any order. Facts that never become untrue (launched on,
answered, made progress) are fields of `memory`, not states. Drawn in docs/design.md §7. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)
Happened = TypeVar("Happened", bound=StrEnum)
Table = Mapping[tuple[State, Happened], State]
Row = tuple[Iterable[State], Happened, State]


def _table(*rows: Row[State, Happened]) -> Table[State, Happened]:
    return MappingProxyType({(state, event): to for states, event, to in rows for state in states})


# --- a create: opened before the call, closed (and forgotten) when its node is settled or proven not to be there ------


class CreateState(StrEnum):
    """
    SENT:        the call is under way, or our process died before the answer
    ANSWER_LOST: the call may have arrived; it is sent again under the same name
    IN_DOUBT:    sent again and refused; the first call may have arrived, or used up that very quota
    RUNNING:     accepted; its operation is polled
    UNREADABLE:  accepted; we may not read its operation, so GetNode decides once no call can arrive any more
    AWAITED:     accepted; its operation is over or unknown, so GetNode decides
    REFUSED:     its operation failed before its node was listed, which may still happen, so GetNode decides
    FAILED:      its operation failed; its listed node is going away
    """

    SENT = "sent"
    ANSWER_LOST = "answer lost"
    IN_DOUBT = "in doubt"
    RUNNING = "running"
    UNREADABLE = "unreadable"
    AWAITED = "awaited"
    REFUSED = "refused"
    FAILED = "failed"

    @property
    def is_accepted(self) -> bool:
        """The service accepted the call, so it is never sent again."""
        return self not in (CreateState.SENT, CreateState.ANSWER_LOST, CreateState.IN_DOUBT)

    @property
    def has_refusal(self) -> bool:
        """`CreateIntent.refused` holds the service's error."""
        refusals = (CreateState.IN_DOUBT, CreateState.UNREADABLE, CreateState.REFUSED, CreateState.FAILED)
        return self in refusals


class CreateEvent(StrEnum):
    """Answers to calls about a create. EXISTS: ALREADY_EXISTS. FOUND: GetNode found a node of that name."""

    ACCEPTED = "accepted"
    EXISTS = "exists already"
    NO_ANSWER = "no answer"
    CALL_REFUSED = "sent again, refused"
    FOUND = "node found"
    OPERATION_OVER = "operation over"
    OPERATION_FAILED = "operation failed"
    NODE_FAILED = "operation failed, node listed"
    FORBIDDEN = "operation may not be read"
    PROCESS_DIED = "our process died"


_UNANSWERED = (CreateState.SENT, CreateState.ANSWER_LOST)

CREATES: Table[CreateState, CreateEvent] = _table(
    ((*_UNANSWERED, CreateState.AWAITED), CreateEvent.ACCEPTED, CreateState.RUNNING),
    (_UNANSWERED, CreateEvent.EXISTS, CreateState.AWAITED),
    ([CreateState.SENT], CreateEvent.NO_ANSWER, CreateState.ANSWER_LOST),
    ([CreateState.SENT], CreateEvent.PROCESS_DIED, CreateState.ANSWER_LOST),
    (_UNANSWERED, CreateEvent.CALL_REFUSED, CreateState.IN_DOUBT),
    ([CreateState.AWAITED], CreateEvent.CALL_REFUSED, CreateState.REFUSED),
    ([CreateState.ANSWER_LOST], CreateEvent.FOUND, CreateState.AWAITED),
    ([CreateState.IN_DOUBT], CreateEvent.FOUND, CreateState.REFUSED),
    ([CreateState.RUNNING], CreateEvent.OPERATION_OVER, CreateState.AWAITED),
    ([CreateState.RUNNING], CreateEvent.OPERATION_FAILED, CreateState.REFUSED),
    ([CreateState.RUNNING], CreateEvent.NODE_FAILED, CreateState.FAILED),
    ([CreateState.RUNNING], CreateEvent.FORBIDDEN, CreateState.UNREADABLE),
)


# --- a queued request: opened before the call, closed once GetQueuedResource says NOT_FOUND --------------------------


class RequestState(StrEnum):
    """
    State of a queued resource of ours; our own delete of it stands beside any of these (`RequestIntent.deletes`).

    SENT:        the call is under way, or our process died before the answer
    ANSWER_LOST: the call may have arrived; it is sent again under the same request id
    AWAITED:     accepted, or in doubt; the next listing shows it, else GetQueuedResource decides
    WAITING:     it stands in the queue, for hours or days
    GRANTED:     its node is being made, or there (PROVISIONING, ACTIVE)
    SUSPENDING:  its node is being taken away
    SPENT:       SUSPENDED, FAILED or being deleted: it brings no node any more, and may hold quota until it is gone
    """

    SENT = "sent"
    ANSWER_LOST = "answer lost"
    AWAITED = "awaited"
    WAITING = "waiting"
    GRANTED = "granted"
    SUSPENDING = "suspending"
    SPENT = "spent"

    @property
    def may_bring_node(self) -> bool:
        return self not in (RequestState.SUSPENDING, RequestState.SPENT)

    @property
    def is_accepted(self) -> bool:
        """The service has it, so the call is never sent again."""
        return self not in (RequestState.SENT, RequestState.ANSWER_LOST)


class RequestEvent(StrEnum):
    """Answers to calls about a queued resource, and what listings show of it. EXISTS: ALREADY_EXISTS."""

    ACCEPTED = "accepted"
    EXISTS = "exists already"
    NO_ANSWER = "no answer"
    CALL_REFUSED = "sent again, refused"
    PROCESS_DIED = "our process died"
    SHOWN_WAITING = "shown waiting"
    SHOWN_GRANTED = "shown granted"
    SHOWN_SUSPENDING = "shown suspending"
    SHOWN_SPENT = "shown spent"
    DELETE_ACCEPTED = "our delete accepted"


_UNSETTLED = (RequestState.SENT, RequestState.ANSWER_LOST)
_UNSEEN = (*_UNSETTLED, RequestState.AWAITED)
_UNSPENT = (*_UNSEEN, RequestState.WAITING, RequestState.GRANTED, RequestState.SUSPENDING)

REQUESTS: Table[RequestState, RequestEvent] = _table(
    (_UNSETTLED, RequestEvent.ACCEPTED, RequestState.AWAITED),
    (_UNSETTLED, RequestEvent.EXISTS, RequestState.AWAITED),
    ([RequestState.SENT], RequestEvent.NO_ANSWER, RequestState.ANSWER_LOST),
    ([RequestState.SENT], RequestEvent.PROCESS_DIED, RequestState.ANSWER_LOST),
    (_UNSETTLED, RequestEvent.CALL_REFUSED, RequestState.AWAITED),
    # A grant that fails goes back into the queue.
    ((*_UNSEEN, RequestState.GRANTED), RequestEvent.SHOWN_WAITING, RequestState.WAITING),
    ((*_UNSEEN, RequestState.WAITING), RequestEvent.SHOWN_GRANTED, RequestState.GRANTED),
    (
        (*_UNSEEN, RequestState.WAITING, RequestState.GRANTED),
        RequestEvent.SHOWN_SUSPENDING,
        RequestState.SUSPENDING,
    ),
    (_UNSPENT, RequestEvent.SHOWN_SPENT, RequestState.SPENT),
    (_UNSPENT, RequestEvent.DELETE_ACCEPTED, RequestState.SPENT),
)


# --- a node: remembered from the first sight until GetNode says NOT_FOUND ---------------------------------------------


class NodeStatus(StrEnum):
    """
    State of a node; our own delete of it is `NodeMemory.delete`, beside any of these.

    LIVE:         not known to be dead, hidden or another owner's
    OUT_OF_SIGHT: no listing and no GetNode showed it for `fence_after`; the slot may create another elsewhere
    TAKEN:        it bears another owner's label, and is not touched
    DEAD:         proven dead (rule 1), though it may still be listed
    REVIVED:      listed alive after it was listed dead, so that this proves nothing; the slot uses it no more
    """

    LIVE = "live"
    OUT_OF_SIGHT = "out of sight"
    TAKEN = "taken"
    DEAD = "dead"
    REVIVED = "revived"


class NodeEvent(StrEnum):
    """Observations of a node by listings and GetNode."""

    LISTED = "listed as ours"
    SHOWN_DEAD = "listed dead"
    SHOWN_ALIVE = "listed alive"
    HIDDEN = "not heard of for fence_after"
    RELABELLED = "another owner's label"


_KNOWN = (NodeStatus.LIVE, NodeStatus.OUT_OF_SIGHT, NodeStatus.REVIVED)

NODES: Table[NodeStatus, NodeEvent] = _table(
    ([NodeStatus.OUT_OF_SIGHT, NodeStatus.TAKEN], NodeEvent.LISTED, NodeStatus.LIVE),
    ([NodeStatus.LIVE], NodeEvent.SHOWN_DEAD, NodeStatus.DEAD),
    # Its run may have lived all the while, so no dead listing of this node is proof any more.
    ([NodeStatus.DEAD], NodeEvent.SHOWN_ALIVE, NodeStatus.REVIVED),
    ([NodeStatus.LIVE], NodeEvent.HIDDEN, NodeStatus.OUT_OF_SIGHT),
    (_KNOWN, NodeEvent.RELABELLED, NodeStatus.TAKEN),
)


# --- a run: from the intent to launch it until nothing of it is left --------------------------------------------------


class RunState(StrEnum):
    """
    LAUNCHING: launch intended; not every worker is known to have accepted it
    RUNNING:   every worker accepted it
    FINISHED:  every worker exited 0 unasked; this stays true if the node is lost
    OVER:      a foreign run that ended, and whose node stays (`on_exit: leave`)
    STOPPING:  stop intended; its workers are not known to be quiet
    STUCK:     every worker got the stop, and processes or chips are still busy
    STOPPED:   we stopped it, and its workers are quiet
    ENDED:     gone without a stop of ours: its node is gone, or it had finished and the slot is wanted anew
    """

    LAUNCHING = "launching"
    RUNNING = "running"
    FINISHED = "finished"
    OVER = "over"
    STOPPING = "stopping"
    STUCK = "stuck"
    STOPPED = "stopped"
    ENDED = "ended"

    @property
    def is_wanted(self) -> bool:
        """It may live, and no stop was intended."""
        return self in (RunState.LAUNCHING, RunState.RUNNING, RunState.FINISHED, RunState.OVER)

    @property
    def is_stopping(self) -> bool:
        return self in (RunState.STOPPING, RunState.STUCK)

    @property
    def is_past(self) -> bool:
        """Nothing of it runs, so another run may be launched on its node."""
        return self in (RunState.STOPPED, RunState.ENDED)


class RunEvent(StrEnum):
    """Reports of workers about a run, our orders for it, and the end of its node."""

    COMPLETE = "every worker has it"
    EXITED_0 = "every worker exited 0"
    FOREIGN_END = "nothing of it lives"
    FOREIGN_BACK = "something of it lives again"
    STOP_ASKED = "stop asked for"
    NOT_FREE = "heard by all, not free"
    QUIET = "workers quiet"
    NODE_GONE = "node gone"
    WANTED_ANEW = "slot wanted anew after its end"
    WANTED_ON = "restart or replace asked for"


_WANTED = tuple(state for state in RunState if state.is_wanted)
_STOPPING = tuple(state for state in RunState if state.is_stopping)

RUNS: Table[RunState, RunEvent] = _table(
    ([RunState.LAUNCHING], RunEvent.COMPLETE, RunState.RUNNING),
    ([RunState.RUNNING], RunEvent.EXITED_0, RunState.FINISHED),
    ([RunState.RUNNING], RunEvent.FOREIGN_END, RunState.OVER),
    ([RunState.OVER], RunEvent.FOREIGN_BACK, RunState.RUNNING),
    ((*_WANTED, RunState.STOPPED, RunState.ENDED), RunEvent.STOP_ASKED, RunState.STOPPING),
    ([RunState.STOPPING], RunEvent.NOT_FREE, RunState.STUCK),
    ((*_WANTED, *_STOPPING), RunEvent.QUIET, RunState.STOPPED),
    ([RunState.LAUNCHING, RunState.RUNNING, RunState.OVER], RunEvent.NODE_GONE, RunState.ENDED),
    (_STOPPING, RunEvent.NODE_GONE, RunState.STOPPED),
    (_WANTED, RunEvent.WANTED_ANEW, RunState.ENDED),
    (_STOPPING, RunEvent.WANTED_ANEW, RunState.STOPPED),
    ([RunState.FINISHED], RunEvent.WANTED_ON, RunState.RUNNING),
)


def after(table: Table[State, Happened], state: State, event: Happened) -> State:
    """The state after *event*; *state* itself where the table lists no transition."""
    return table.get((state, event), state)
