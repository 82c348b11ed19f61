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

from tpucare.model.causes import Cause

# Nobody cared on this store for so long that it may be a backup, whose daemon did more after it was taken.
OLD_AFTER = timedelta(minutes=10)


class DesiredState(StrEnum):
    """What a person wants of a slot."""

    UP = "up"
    PAUSED = "paused"
    DOWN = "down"


class BookName(StrEnum):
    """Failures are booked apart, each with a budget and a backoff of its own; preemption is free."""

    PREEMPTION = "preemption"
    INFRASTRUCTURE = "infrastructure"
    SETUP = "setup"
    CRASH = "crash"
    STALL = "stall"


# Rows that end where a run gets further than any before it; those of setup end with a setup that serves.
ENDED_BY_PROGRESS = (BookName.INFRASTRUCTURE, BookName.CRASH, BookName.STALL)


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


NO_BOOK = FailureCounter()


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
    A create that was asked for, or is about to be.

    `accepted`: the call was answered; `operation` may then be polled. Open until the node's id was seen, the operation
    ended, or (operation unknown) GetNode is NOT_FOUND 60 s after the call's deadline. `superseded`: its name stays
    watched, and is deleted if it appears. `unread`: we may not read the operation, so that only GetNode tells of it.
    `held_*`: dead nodes of ours held that quota when it was asked for. `missing`: hourly looks in a row that found no
    node of it since it was given up.
    """

    name: str
    number: int
    zone: str
    place: str
    asked_at: datetime
    accelerator_type: str = ""
    tries: int = 1
    accepted: bool = False
    operation: str = ""
    lost: bool = False
    superseded: bool = False
    failed: bool = False
    refused: str = ""
    retry_at: datetime | None = None
    held_in_zone: bool = False
    held_in_region: bool = False
    unread: bool = False
    missing: int = 0


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """
    A node of this slot that was there once and is not proven to be gone.

    `launched`: a Launch intent was written for it, or a lost store cannot rule it out.
    `asked`: this store asked for it, though the create was closed before it came.
    `dead`: proven dead (rule 1), though it may still be listed. `revived`: listed alive after it was shown dead, so
    that this proved nothing; it serves no more. `taken`: it bears another owner's label now, and is not touched.
    `out_of_sight`: neither a listing nor GetNode told of it for `fence_after`; another may be asked for elsewhere.
    `written_off`: a person said that nothing trains there, while it was taken or out of sight.
    `delete_*`: our own delete, repeated by rule 7. `queued`: path of the queued resource that it came from.
    """

    name: str
    zone: str
    id: int
    create_time: datetime
    place: str = ""
    attempt: int = 0
    launched: bool = False
    dead: bool = False
    answered: bool = False
    refused: bool = False
    delete_asked_at: datetime | None = None
    delete_accepted: bool = False
    delete_tries: int = 0
    delete_next_at: datetime | None = None
    delete_why: str = ""
    delete_cause: Cause = Cause.UNRECORDED
    external: bool = True
    stalls: int = 0
    keyed: bool = False
    delete_reason: str = ""
    delete_quiet: bool = False
    infrastructure: int = 0
    noticed_at: datetime | None = None
    noticed_checkpoint: int | None = None
    asked: bool = False
    revived: bool = False
    taken: bool = False
    trust: Trust = Trust.NONE
    out_of_sight: bool = False
    written_off: bool = False
    queued: str = ""

    @property
    def serves(self) -> bool:
        """It may be the slot's node: not known to be dead, on its way out, or somebody else's."""
        return not (self.is_leaving or self.taken or self.out_of_sight)

    @property
    def is_leaving(self) -> bool:
        """Dead or on its way out: it is awaited until it is gone, whatever it is listed as."""
        return self.was_shown_dead or self.is_being_deleted

    @property
    def was_shown_dead(self) -> bool:
        """Whether that proved anything (`dead`) or not (`revived`)."""
        return self.dead or self.revived

    @property
    def is_being_deleted(self) -> bool:
        """Our own delete was asked for, whether or not it was accepted yet."""
        return self.delete_asked_at is not None

    @property
    def given(self) -> bool:
        """A person gave it to the slot, or a lost store made it: what works on it may be worth more than our run."""
        return self.launched and not self.place and not self.asked

    @property
    def in_doubt(self) -> bool:
        """Not proven to train no more (rule 1): a younger node of the slot has to wait for it."""
        proven = self.dead or self.written_off or (self.delete_accepted and self.delete_quiet)
        return self.launched and not proven


@dataclass(frozen=True, slots=True)
class RunMemory:
    """
    The run that was last launched, or is about to be. `complete`: every worker accepted it.

    `stop_why` is set from the intent to end it until it is known to be quiet. `stops`: how often that was tried;
    `stuck`: every worker heard it, and something does not let go. `gap_seconds`: between its first signs of progress.
    `launch_book`: in which its failed launch was entered; it is given back where the node died meanwhile.
    `finished`: every worker exited 0, and nothing had asked it to; what becomes of the node then takes nothing back.
    `over`: a foreign run that ended, and is left at that. `job`: which job it was launched with; empty: not known.
    """

    token: str
    node: str
    number: int
    launched_at: datetime
    complete: bool = False
    stop_why: str = ""
    stop_cause: Cause = Cause.UNRECORDED
    then_delete: str = ""
    stopped: bool = False
    progressed: bool = False
    stops: int = 0
    stuck: bool = False
    gap_seconds: float = 0.0
    over: bool = False
    job: str = ""
    launch_book: str = ""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """
    Everything remembered of one slot.

    `step_job`: the job whose run told of a step last, as in `RunMemory.job`; `launched_job`: the one that was launched
    last, whose failures the books hold. `asked_from`: the first create number that
    this store used; None: it used none, or was made by a version that did not keep it. `publishing`: by what
    `plan_trust.publisher_of` names. `round_from`: the first create number of this round over the slot's places
    (`placement.by_turn`). `shell`: path of the queued resource that the slot's last node came from, which is gone.
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

    def book(self, name: BookName) -> FailureCounter:
        return self.books.get(name.value, NO_BOOK)

    def with_book(self, name: BookName, book: FailureCounter) -> Memory:
        return replace(self, books={**self.books, name.value: book})

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
        return tuple(node for node in self.nodes if not node.taken)

    def with_node(self, node: NodeMemory) -> Memory:
        """The same memory with *node* added, or put in the place of the entry of that name."""
        others = tuple(other for other in self.nodes if other.name != node.name)
        return replace(self, nodes=(*others, node))

    def without_node(self, name: str) -> Memory:
        return replace(self, nodes=tuple(node for node in self.nodes if node.name != name))

    @property
    def has_elder_in_doubt(self) -> bool:
        """There is another node beside one that may still be training, or another is asked for."""
        asked = [intent for intent in self.creates if not intent.superseded and self.node(intent.name) is None]
        return len(self.nodes) + len(asked) > 1 and any(node.in_doubt for node in self.nodes)

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
