"""
The states of a create, a node and a run as one slot remembers them, and what may follow what.

Each lifecycle is an enum of states, an enum of events and one table. An event that a table does not name for a state
changes nothing there: answers come late, twice and in any order. What is only ever gained (a node was launched on, its
workers answered, a run made progress) is no state and stays a field beside it. Drawn in docs/design.md, "Lifecycles".
Standard library only.
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
    SENT:        the call is under way, or its process died before the answer
    ANSWER_LOST: it may have arrived; it is sent again under the same name
    IN_DOUBT:    sent again and refused; the first call may have arrived all the same, or used up that very quota
    RUNNING:     accepted, and its operation is polled
    UNREADABLE:  accepted, and its operation may not be read; GetNode tells once the call cannot arrive any more
    AWAITED:     accepted, and its operation is over or unknown; GetNode tells
    REFUSED:     its operation failed before the node was listed, which may happen a little later; GetNode tells
    FAILED:      its operation failed, and the node that is listed is awaited until it is gone
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
        """The service is known to have taken the call, so that it is never sent again."""
        return self not in (CreateState.SENT, CreateState.ANSWER_LOST, CreateState.IN_DOUBT)

    @property
    def has_refusal(self) -> bool:
        """`CreateIntent.refused` tells what the service said against it."""
        refusals = (CreateState.IN_DOUBT, CreateState.UNREADABLE, CreateState.REFUSED, CreateState.FAILED)
        return self in refusals


class CreateEvent(StrEnum):
    """What the calls about a create told. `EXISTS`: ALREADY_EXISTS; `FOUND`: GetNode found a node of that name."""

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


# --- a node: remembered from the first sight until GetNode says NOT_FOUND ---------------------------------------------


class NodeStatus(StrEnum):
    """
    What is known of a node; our own delete of it is `NodeMemory.delete`, beside any of these.

    LIVE:         nothing speaks against it
    OUT_OF_SIGHT: neither a listing nor GetNode told of it for `fence_after`; another may be asked for elsewhere
    TAKEN:        it bears another owner's label now, and is not touched
    DEAD:         proven dead (rule 1), though it may still be listed
    REVIVED:      listed alive after it was shown dead, so that this proved nothing; it serves no more
    """

    LIVE = "live"
    OUT_OF_SIGHT = "out of sight"
    TAKEN = "taken"
    DEAD = "dead"
    REVIVED = "revived"


class NodeEvent(StrEnum):
    """What listings and GetNode told of a node."""

    LISTED = "listed as ours"
    SHOWN_DEAD = "listed dead"
    SHOWN_ALIVE = "listed alive"
    HIDDEN = "not heard of for fence_after"
    RELABELLED = "another owner's label"


_KNOWN = (NodeStatus.LIVE, NodeStatus.OUT_OF_SIGHT, NodeStatus.REVIVED)

NODES: Table[NodeStatus, NodeEvent] = _table(
    ([NodeStatus.OUT_OF_SIGHT, NodeStatus.TAKEN], NodeEvent.LISTED, NodeStatus.LIVE),
    ([NodeStatus.LIVE], NodeEvent.SHOWN_DEAD, NodeStatus.DEAD),
    # That it was shown dead proves nothing, now or the next time: its run may have lived all the while.
    ([NodeStatus.DEAD], NodeEvent.SHOWN_ALIVE, NodeStatus.REVIVED),
    ([NodeStatus.LIVE], NodeEvent.HIDDEN, NodeStatus.OUT_OF_SIGHT),
    (_KNOWN, NodeEvent.RELABELLED, NodeStatus.TAKEN),
)


# --- a run: from the intent to launch it until nothing of it is left --------------------------------------------------


class RunState(StrEnum):
    """
    LAUNCHING: asked for; not every worker is known to have it
    RUNNING:   every worker accepted it
    FINISHED:  every worker exited 0, and nothing had asked it to; what becomes of the node takes nothing back
    OVER:      a foreign run that ended, and is left at that
    STOPPING:  we want it to end, and its workers are not known to be quiet
    STUCK:     every worker heard the stop, and something does not let go
    STOPPED:   we ended it, and its workers are quiet
    ENDED:     nothing of it is left and we did not end it: its node is gone, or it had finished and is wanted anew
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
        """It may live, and nobody asked it to end."""
        return self in (RunState.LAUNCHING, RunState.RUNNING, RunState.FINISHED, RunState.OVER)

    @property
    def is_stopping(self) -> bool:
        return self in (RunState.STOPPING, RunState.STUCK)

    @property
    def is_past(self) -> bool:
        """Nothing of it is left, so that another may be launched on its node."""
        return self in (RunState.STOPPED, RunState.ENDED)


class RunEvent(StrEnum):
    """What workers told of a run, what we asked of it, and what became of its node."""

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
    """The state that follows *state* when *event* happened; the same where the table says nothing."""
    return table.get((state, event), state)
