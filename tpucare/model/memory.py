"""
The little that is remembered per slot and cannot be observed again. Frozen, standard library only.

The store writes these as JSON; a field added later needs a default, a field removed needs a migration.
Instants are wall time (aware, UTC): they outlive the process. Lengths of observed time are not remembered: a restart
lets every timeout begin again, which can only make tpucare wait longer (design, rule 11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from tpucare.model.causes import Cause, Reason
from tpucare.model.lifecycles import (
    CREATES,
    NODES,
    RUNS,
    CreateEvent,
    CreateState,
    NodeEvent,
    NodeStatus,
    RunEvent,
    RunState,
    after,
)

# Nobody cared on this store for so long that it may be a backup, whose daemon did more after it was taken.
OLD_AFTER = timedelta(minutes=10)


class DesiredState(StrEnum):
    """What a person wants of a slot."""

    UP = "up"
    PAUSED = "paused"
    DOWN = "down"


class FailureKind(StrEnum):
    """One counter each, with a budget and a backoff of its own; a preemption has neither."""

    PREEMPTION = "preemption"
    INFRASTRUCTURE = "infrastructure"
    SETUP = "setup"
    CRASH = "crash"
    STALL = "stall"


# Rows that end where a run gets further than any before it; those of setup end with a setup that serves.
ENDED_BY_PROGRESS = (FailureKind.INFRASTRUCTURE, FailureKind.CRASH, FailureKind.STALL)


class End(StrEnum):
    """How a slot ended, while its wish is still up."""

    NONE = ""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FailureCounter:
    """`failures` in a row count for the backoff and the budget, `total` for the reports."""

    failures: int = 0
    total: int = 0
    retry_at: datetime | None = None
    reason: str = ""


NO_FAILURES = FailureCounter()


class Refusal(StrEnum):
    """How a place answered the last create that it did not grant; `OWN_*`: a dead node of ours held that quota."""

    NONE = ""
    NO_CAPACITY = "no capacity"
    QUOTA = "quota"
    OWN_QUOTA = "own quota"
    OWN_REGION_QUOTA = "own quota of the region"
    RATE = "rate"
    TRANSIENT = "transient"
    REFUSED = "refused"
    HUMAN = "human"

    @property
    def is_own_quota(self) -> bool:
        return self in (Refusal.OWN_QUOTA, Refusal.OWN_REGION_QUOTA)


@dataclass(frozen=True, slots=True)
class PlaceMemory:
    """
    What a place gave: failures in a row, when it may be asked again, and whether only a person can help.

    `since`: when the row of refusals of that `kind` began. `asked`: number of the slot's last create there, -1 = none;
    numbers only grow, whatever becomes of the clock.
    Nodes in a row that were of no use: `unanswered_nodes` never answered, on `held_nodes` something that is not ours
    held the chips before any launch.
    """

    failures: int = 0
    retry_at: datetime | None = None
    kind: Refusal = Refusal.NONE
    reason: str = ""
    blocked: bool = False
    refusals: int = 0
    last_success: datetime | None = None
    own_quota_since: datetime | None = None
    unanswered_nodes: int = 0
    asked: int = -1
    since: datetime | None = None
    held_nodes: int = 0


class Trust(StrEnum):
    """Why the host keys of a node are believed: guest attributes vouched for all workers, or they were the first."""

    NONE = ""
    VOUCHED = "vouched"
    FIRST_USE = "first-use"


@dataclass(frozen=True, slots=True)
class Publishing:
    """Whether the guest attributes of a project and runtime brought host keys when they were asked for last."""

    at: datetime
    published: bool


@dataclass(frozen=True, slots=True)
class CreateIntent:
    """
    A create that was asked for, or is about to be; open until its node is settled or proven not to be there.

    `operation` is polled while `state` is RUNNING. `refused`: what the service said against it. `abandoned`: its name
    stays watched, and a node that appears under it is deleted, unless it is readopted. `held_*`: dead nodes of ours
    held that quota when it was asked for. `missing`: hourly looks in a row that found no node of it since it was
    abandoned.
    """

    name: str
    number: int
    zone: str
    place: str
    asked_at: datetime
    state: CreateState = CreateState.SENT
    abandoned: bool = False
    accelerator_type: str = ""
    tries: int = 1
    operation: str = ""
    refused: str = ""
    retry_at: datetime | None = None
    held_in_zone: bool = False
    held_in_region: bool = False
    missing: int = 0

    def after(self, event: CreateEvent, *, operation: str = "", refused: str = "") -> CreateIntent:
        """The intent after *event*; only a running operation has a name to poll."""
        state = after(CREATES, self.state, event)
        operation = (operation or self.operation) if state is CreateState.RUNNING else ""
        return replace(self, state=state, operation=operation, refused=refused or self.refused)


@dataclass(frozen=True, slots=True)
class DeleteIntent:
    """
    Our own delete of a node, repeated by rule 7 until the node is gone.

    `quiet`: every worker had answered "no run, chips free", so an accepted delete proves that nothing trains there.
    """

    asked_at: datetime
    reason: Reason
    cause: Cause = Cause.UNRECORDED
    why: str = ""
    next_at: datetime | None = None
    accepted: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """
    A node of this slot that was there once and is not proven to be gone.

    `launched`: a Launch intent was written for it, or a lost store cannot rule it out.
    `requested`: this store asked for it, though the create was closed before it came.
    `delete`: our own delete of it, until that is taken back; `delete_tries` counts on.
    `written_off`: a person said that nothing trains there, while it was taken or out of sight.
    `queued`: path of the queued resource that it came from.
    """

    name: str
    zone: str
    id: int
    create_time: datetime
    place: str = ""
    attempt: int = 0
    status: NodeStatus = NodeStatus.LIVE
    delete: DeleteIntent | None = None
    delete_tries: int = 0
    launched: bool = False
    answered: bool = False
    refused: bool = False
    stalls: int = 0
    keyed: bool = False
    infrastructure: int = 0
    noticed_at: datetime | None = None
    noticed_checkpoint: int | None = None
    requested: bool = False
    trust: Trust = Trust.NONE
    written_off: bool = False
    queued: str = ""

    def after(self, event: NodeEvent) -> NodeMemory:
        return replace(self, status=after(NODES, self.status, event))

    @property
    def serves(self) -> bool:
        """It may be the slot's node: not known to be dead, on its way out, or somebody else's."""
        return self.status is NodeStatus.LIVE and self.delete is None

    @property
    def is_leaving(self) -> bool:
        """Dead or on its way out: it is awaited until it is gone, whatever it is listed as."""
        return self.was_shown_dead or self.delete is not None

    @property
    def was_shown_dead(self) -> bool:
        """Whether that proved anything (DEAD) or not (REVIVED)."""
        return self.status in (NodeStatus.DEAD, NodeStatus.REVIVED)

    @property
    def is_adopted(self) -> bool:
        """Given by a person, or made before a store was lost: what works on it may be worth more than our run."""
        return self.launched and not self.place and not self.requested

    @property
    def may_be_training(self) -> bool:
        """Not proven to train no more (rule 1): a younger node of the slot has to wait for it."""
        proven = self.status is NodeStatus.DEAD or self.written_off
        return self.launched and not (
            proven or (self.delete is not None and self.delete.accepted and self.delete.quiet)
        )


@dataclass(frozen=True, slots=True)
class RunMemory:
    """
    The run that was last launched, or is about to be.

    `complete`: every worker accepted it, whatever became of it then. `stop_*`, `then_delete`: the last stop that was
    asked for, and why its node goes after it. `stops`: how often that was tried. `gap_seconds`: between its first signs
    of progress. `launch_book`: in which its failed launch was entered; it is given back where the node died meanwhile.
    `job`: which job it was launched with; empty: not known.
    """

    token: str
    node: str
    number: int
    launched_at: datetime
    state: RunState = RunState.LAUNCHING
    complete: bool = False
    stop_why: str = ""
    stop_cause: Cause = Cause.UNRECORDED
    then_delete: Reason | None = None
    progressed: bool = False
    stops: int = 0
    gap_seconds: float = 0.0
    job: str = ""
    launch_book: str = ""

    def after(self, event: RunEvent) -> RunMemory:
        complete = self.complete or event is RunEvent.COMPLETE
        return replace(self, state=after(RUNS, self.state, event), complete=complete)


@dataclass(frozen=True, slots=True)
class Memory:
    """
    Everything remembered of one slot.

    `step_job`: the job whose run told of a step last, as in `RunMemory.job`; `launched_job`: the one that was launched
    last, whose failures `books` counts. `asked_from`: the first create number that
    this store used; None: it used none, or was made by a version that did not keep it. `publishing`: by what
    `trust.publisher_of` names. `round_from`: the first create number of this round over the slot's places
    (`placement.in_turn`). `shell`: path of the queued resource that the slot's last node came from, which is gone.
    `step`, `checkpoint`: how far `step_job` ever got; `gap_seconds`: between its first signs of progress;
    `last_step`, `last_checkpoint`: where its last run was seen. `served_job`: the job that trained on this slot; it is
    tried again where it fails. `failed_since`: when the slot failed first, of those `tries`.
    """

    fleet: str
    wish: DesiredState = DesiredState.UP
    end: End = End.NONE
    end_why: str = ""
    end_cause: Cause = Cause.UNRECORDED
    ended_at: datetime | None = None
    next_number: int = 0
    attempts: int = 0
    creates: tuple[CreateIntent, ...] = ()
    nodes: tuple[NodeMemory, ...] = ()
    run: RunMemory | None = None
    places: Mapping[str, PlaceMemory] = field(default_factory=dict)
    books: Mapping[str, FailureCounter] = field(default_factory=dict)
    restart_asked: bool = False
    replace_asked: bool = False
    fence_confirmed: bool = False
    step: int | None = None
    checkpoint: int | None = None
    recent_creates: tuple[datetime, ...] = ()
    step_job: str = ""
    asked_from: int | None = None
    publishing: Mapping[str, Publishing] = field(default_factory=dict)
    round_from: int = 0
    shell: str = ""
    gap_seconds: float = 0.0
    last_step: int | None = None
    last_checkpoint: int | None = None
    served_job: str | None = None
    failed_since: datetime | None = None
    tries: int = 0
    launched_job: str = ""

    def without_end(self) -> Memory:
        """The slot is wanted again: whatever it had ended with."""
        return replace(self, end=End.NONE, end_why="", end_cause=Cause.UNRECORDED, ended_at=None)

    def has_asked_for(self, number: int) -> bool:
        return self.asked_from is not None and self.asked_from <= number < self.next_number

    def counter(self, kind: FailureKind) -> FailureCounter:
        return self.books.get(kind.value, NO_FAILURES)

    def with_counter(self, kind: FailureKind, counter: FailureCounter) -> Memory:
        return replace(self, books={**self.books, kind.value: counter})

    def place(self, key: str) -> PlaceMemory:
        return self.places.get(key, PlaceMemory())

    def with_place(self, key: str, place: PlaceMemory) -> Memory:
        return replace(self, places={**self.places, key: place})

    def node(self, name: str) -> NodeMemory | None:
        # Asked for ten times in each decision; a generator costs three times as much as the few names it compares.
        for node in self.nodes:
            if node.name == name:
                return node
        return None

    def serves(self, name: str) -> bool:
        """The node *name* is remembered, and may be the slot's."""
        past = self.node(name)
        return past is not None and past.serves

    def has_given_up(self, name: str) -> bool:
        """The node *name* is remembered, and may not be the slot's any more; one that was never met may become it."""
        past = self.node(name)
        return past is not None and not past.serves

    @property
    def ours(self) -> tuple[NodeMemory, ...]:
        """Nodes that are there for all that is known, without those that somebody took."""
        return tuple(node for node in self.nodes if node.status is not NodeStatus.TAKEN)

    def with_node(self, node: NodeMemory) -> Memory:
        """The same memory with *node* added, or put in the place of the entry of that name."""
        others = tuple(other for other in self.nodes if other.name != node.name)
        return replace(self, nodes=(*others, node))

    def without_node(self, name: str) -> Memory:
        return replace(self, nodes=tuple(node for node in self.nodes if node.name != name))

    @property
    def has_older_node_in_doubt(self) -> bool:
        """There is another node beside one that may still be training, or another is asked for."""
        asked = [intent for intent in self.creates if not intent.abandoned and self.node(intent.name) is None]
        return len(self.nodes) + len(asked) > 1 and any(node.may_be_training for node in self.nodes)

    def create(self, name: str) -> CreateIntent | None:
        for intent in self.creates:
            if intent.name == name:
                return intent
        return None

    def with_create(self, intent: CreateIntent) -> Memory:
        """The same memory with *intent* added, or put in the place of the one of that name."""
        others = tuple(other for other in self.creates if other.name != intent.name)
        return replace(self, creates=(*others, intent))

    def without_create(self, name: str) -> Memory:
        return replace(self, creates=tuple(intent for intent in self.creates if intent.name != name))


def is_old(marked: datetime | None, now: datetime) -> bool:
    """Whether a store last marked then may be a backup. A clock that was set makes it look like one, which is safe."""
    return marked is None or abs(now - marked) >= OLD_AFTER


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """
    A fleet as last accepted: the text that was read, where it lay, and what a person wants of it.

    `project`: where its nodes are, as it was resolved then; empty in stores of versions that did not keep it.
    """

    name: str
    text: str
    folder: str
    accepted_at: datetime
    wish: DesiredState = DesiredState.UP
    project: str = ""
