"""
What tpucare remembers of each slot because no listing or probe can tell it again. Frozen, standard library only.

The store writes these records as JSON under their field names; a field added later needs a default, a field removed
needs a migration. Instants are wall time (aware, UTC), since they outlive the process. Lengths of observed time are not
stored: a restart begins every timeout anew, which can only make tpucare wait longer (design, rule 11). How a memory
changes is left to `planner.remember`.
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
    REQUESTS,
    RUNS,
    CreateEvent,
    CreateState,
    NodeEvent,
    NodeStatus,
    RequestEvent,
    RequestState,
    RunEvent,
    RunState,
    after,
)
from tpucare.model.resources import Slot
from tpucare.model.runs import Archive

# A store without a heartbeat for so long may be a backup, taken before the daemon did more.
OLD_AFTER = timedelta(minutes=10)


class DesiredState(StrEnum):
    """The state that a person asked for."""

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


# Streaks that end when a run gets further than any before it; a streak of setup failures ends with a good setup.
ENDED_BY_PROGRESS = (FailureKind.INFRASTRUCTURE, FailureKind.CRASH, FailureKind.STALL)


class End(StrEnum):
    """How a slot ended whose desired state is still UP."""

    NONE = ""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FailureCounter:
    """`failures`: in a row, for backoff and budget. `total`: of all time, for reports. `reason`: of the last one."""

    failures: int = 0
    total: int = 0
    retry_at: datetime | None = None
    reason: str = ""


NO_FAILURES = FailureCounter()


class Refusal(StrEnum):
    """Why a place refused the last create; `OWN_*`: a dead node of ours held that quota."""

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
    What creates at one place came to.

    failures, kind, reason: refusals of one kind in a row, and the text of the last
    retry_at:         no create before that instant    since: when that row of refusals began
    blocked:          only a person can open the place    refusals: how often it was blocked in a row
    asked:            create number of the slot's last create there, -1 = none; unlike a clock it only grows
    unanswered_nodes: nodes in a row whose workers never answered
    held_nodes:       nodes in a row whose chips a process that is not ours held before the first launch
    own_quota_since:  since when a dead node of ours holds the quota
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
    """Why a node's host keys are trusted. VOUCHED: guest attributes list them. FIRST_USE: pinned at the first login."""

    NONE = ""
    VOUCHED = "vouched"
    FIRST_USE = "first-use"


@dataclass(frozen=True, slots=True)
class Publishing:
    """Whether guest attributes of a project and runtime listed host keys when tpucare last asked."""

    at: datetime
    published: bool


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """The environment that a run of the slot stored last. All slots of its scope use the newest one."""

    archive: Archive
    at: datetime


@dataclass(frozen=True, slots=True)
class CreateIntent:
    """
    A create from before its call until its node is there, or proven not to be (rule 5).

    operation: name of the operation, polled while `state` is RUNNING
    refused:   the service's error text
    abandoned: the slot waits for it no more; its node is deleted if it appears, unless the create is readopted
    held_in_zone, held_in_region: dead nodes of ours held that quota when the create was sent
    missing:   hourly GetNode calls in a row that found no node, since it was abandoned
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
        """The intent after *event*; only in state RUNNING has it an operation to poll."""
        state = after(CREATES, self.state, event)
        operation = (operation or self.operation) if state is CreateState.RUNNING else ""
        return replace(self, state=state, operation=operation, refused=refused or self.refused)


@dataclass(frozen=True, slots=True)
class RequestIntent:
    """
    A queued resource from before its call until GetQueuedResource says NOT_FOUND (rule 5). Its node has its name.

    place:       key of its place; empty where a listing alone told of it (after a lost store)
    request_id:  makes the repeated call harmless
    abandoned:   the slot waits for it no more: it is deleted, and its node too if it still comes
    why:         why it was abandoned, or why the service failed it
    valid_until: the service gives it up by then
    served:      its node came up    booked: its loss is counted
    doubtful:    it was found granted, so another process may have launched on its node
    deletes, deleted_at, delete_at: our deletes of it, the instant of the first one, and of the next
    """

    name: str
    number: int
    zone: str
    place: str
    asked_at: datetime
    request_id: str = ""
    state: RequestState = RequestState.SENT
    abandoned: bool = False
    why: str = ""
    valid_until: datetime | None = None
    tries: int = 1
    retry_at: datetime | None = None
    served: bool = False
    booked: bool = False
    doubtful: bool = False
    deletes: int = 0
    deleted_at: datetime | None = None
    delete_at: datetime | None = None

    def after(self, event: RequestEvent) -> RequestIntent:
        return replace(self, state=after(REQUESTS, self.state, event))

    @property
    def stands(self) -> bool:
        """It may bring the slot's next node, or has brought its present one."""
        return self.state.may_bring_node and not self.abandoned


@dataclass(frozen=True, slots=True)
class DeleteIntent:
    """
    Our delete of a node, repeated until the node is gone (rule 7).

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
    A node of this slot that was seen and is not proven gone.

    launched:     a Launch intent was written for it, or a lost store cannot rule that out (rule 1)
    requested:    this store asked for it, though the create was closed before the node came
    delete:       our delete of it, until that is void; `delete_tries` is never reset
    answered:     all workers answered once    refused: a worker refused our key    keyed: our key is in its metadata
    stalls, infrastructure: failures in a row of runs on this node
    written_off:  a person confirmed that nothing trains there, while the node was TAKEN or OUT_OF_SIGHT
    queued:       path of the queued resource that it came from
    price:        dollars an hour, None = not known
    billed_from:  its hours since then are not in `Memory.cost` yet; None: it never came up
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
    price: float | None = None
    billed_from: datetime | None = None

    def after(self, event: NodeEvent) -> NodeMemory:
        return replace(self, status=after(NODES, self.status, event))

    @property
    def serves(self) -> bool:
        """The slot may use it: not dead, not being deleted, in sight, and ours."""
        return self.status is NodeStatus.LIVE and self.delete is None

    @property
    def is_leaving(self) -> bool:
        """Dead or being deleted: tpucare waits until it is gone, whatever its listed state."""
        return self.was_shown_dead or self.delete is not None

    @property
    def was_shown_dead(self) -> bool:
        """Listed dead once; REVIVED: listed alive again since, so that this proves nothing."""
        return self.status in (NodeStatus.DEAD, NodeStatus.REVIVED)

    @property
    def is_adopted(self) -> bool:
        """Adopted by a person or after a lost store: never stop what runs there without asking."""
        return self.launched and not self.place and not self.requested

    @property
    def may_be_training(self) -> bool:
        """Launched on and not proven dead (rule 1): a younger node of the slot waits for it."""
        proven = self.status is NodeStatus.DEAD or self.written_off
        return self.launched and not (
            proven or (self.delete is not None and self.delete.accepted and self.delete.quiet)
        )


@dataclass(frozen=True, slots=True)
class RunMemory:
    """
    The run that was launched last, or is about to be.

    complete:    every worker accepted it once
    stop_why, stop_cause, then_delete: of the last stop, and the reason to delete the node after it
    stops:       how often that stop was tried
    gap_seconds: median between its first signs of progress
    launch_book: the FailureKind that counted its failed launch; uncounted where the node died meanwhile
    job:         `predicates.job_mark` of the job it runs; empty: not known
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
class Work:
    """
    Hours of training of `job` that no later run repeats (`planner.deadline`). Instants are the cloud's.

    hours:   until `since`, or in all while no run counts    since: from then on the run `token` counts, too
    begun:   hours when the run `token` began
    reached: hours when the last run ended, at `step`        step: None: no run told one
    saved:   number of the newest complete checkpoint        saved_hours: at it
    hours_of_work, by: the deadline for which a line was drawn, from `line_hours` at `line_from` on
    """

    job: str = ""
    hours: float = 0.0
    since: datetime | None = None
    token: str = ""
    begun: float = 0.0
    reached: float = 0.0
    step: int | None = None
    saved: int | None = None
    saved_hours: float = 0.0
    hours_of_work: float = 0.0
    by: datetime | None = None
    line_from: datetime | None = None
    line_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class BoundsTold:
    """How many notices were given of these bounds; a person who changes a bound is told anew."""

    until: datetime | None
    max_cost: float | None
    notices: int


@dataclass(frozen=True, slots=True)
class Memory:
    """
    Everything remembered of one slot.

    books:          failure counters by the value of `FailureKind`, of the job `launched_job`
    step, checkpoint: the furthest that `step_job` ever got; `last_*`: where its last run was seen
    gap_seconds:    median between the first signs of progress of `step_job`
    served_job:     the job that trained on this slot, tried again hourly where it fails
    failed_since, tries: when that row of failures began, and the tries since
    next_number:    create number of the next node    attempts: nodes on which a run was launched
    asked_from:     the first create number this store used; None: none, or a version that did not keep it
    recent_creates: instants of the creates of the last minute, for the create budget
    round_from:     first create number of this round over the places (`placement.in_turn`)
    publishing:     by `trust.publisher_of`
    shell:          path of the queued resource that the slot's last node, now gone, came from
    fence_confirmed: a person confirmed that no older node trains
    awake:          demand wants a node of this slot; only an elastic slot needs that
    stored:         the environment that a run of this slot stored last (`Job.cache`)
    save_seconds:   for so long a save of `launched_job` blocks it, as its run measured it; 0: not known
    cost:           dollars of its nodes that have ended    unpriced_hours: of those whose price is not known
    counted_from:   after a lost store: hours of its nodes before that are in the cost of the fleet's first slot
    bounds_told:    bounds of the fleet and the notices given about them; kept by its first slot
    requests:       queued resources of this slot that are not proven gone
    work:           of a slot with a deadline
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
    awake: bool = False
    save_seconds: float = 0.0
    cost: float = 0.0
    unpriced_hours: float = 0.0
    counted_from: datetime | None = None
    bounds_told: BoundsTold | None = None
    stored: StoredArchive | None = None
    requests: tuple[RequestIntent, ...] = ()
    work: Work | None = None

    @property
    def is_wanted(self) -> bool:
        """The desired state is UP, and the slot has not ended."""
        return self.wish is DesiredState.UP and self.end is End.NONE

    def wants_node(self, slot: Slot) -> bool:
        """As `is_wanted`; for an elastic slot demand has to want it, too."""
        return self.is_wanted and (self.awake or not slot.elastic)

    def run_on(self, node: str) -> RunMemory | None:
        """The last run, if it was launched on *node*."""
        return self.run if self.run is not None and self.run.node == node else None

    def without_end(self) -> Memory:
        """The same memory of a slot that has not ended."""
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
        # Called ten times in each decision; a generator would cost three times as much.
        for node in self.nodes:
            if node.name == name:
                return node
        return None

    def serves(self, name: str) -> bool:
        """The node *name* is remembered and serves."""
        past = self.node(name)
        return past is not None and past.serves

    def has_given_up(self, name: str) -> bool:
        """The node *name* is remembered and serves no more; False for a node that was never seen."""
        past = self.node(name)
        return past is not None and not past.serves

    @property
    def ours(self) -> tuple[NodeMemory, ...]:
        """Nodes not proven gone, without those that bear another owner's label."""
        return tuple(node for node in self.nodes if node.status is not NodeStatus.TAKEN)

    def with_node(self, node: NodeMemory) -> Memory:
        """The same memory with *node* added, in place of an entry of that name."""
        others = tuple(other for other in self.nodes if other.name != node.name)
        return replace(self, nodes=(*others, node))

    def without_node(self, name: str) -> Memory:
        return replace(self, nodes=tuple(node for node in self.nodes if node.name != name))

    @property
    def has_older_node_in_doubt(self) -> bool:
        """A node may still be training beside another node or an open create."""
        asked = [intent for intent in self.creates if not intent.abandoned and self.node(intent.name) is None]
        return len(self.nodes) + len(asked) > 1 and any(node.may_be_training for node in self.nodes)

    def create(self, name: str) -> CreateIntent | None:
        for intent in self.creates:
            if intent.name == name:
                return intent
        return None

    def with_create(self, intent: CreateIntent) -> Memory:
        """The same memory with *intent* added, in place of one of that name."""
        others = tuple(other for other in self.creates if other.name != intent.name)
        return replace(self, creates=(*others, intent))

    def without_create(self, name: str) -> Memory:
        return replace(self, creates=tuple(intent for intent in self.creates if intent.name != name))

    def request(self, name: str) -> RequestIntent | None:
        for request in self.requests:
            if request.name == name:
                return request
        return None

    def with_request(self, request: RequestIntent) -> Memory:
        """The same memory with *request* added, or in place of one of that name."""
        if self.request(request.name) is None:
            return replace(self, requests=(*self.requests, request))
        return replace(self, requests=tuple(request if o.name == request.name else o for o in self.requests))

    def without_request(self, name: str) -> Memory:
        return replace(self, requests=tuple(request for request in self.requests if request.name != name))

    @property
    def asked_for(self) -> dict[str, str]:
        """Zone by name of every open create and queued request."""
        creates = {intent.name: intent.zone for intent in self.creates}
        return creates | {request.name: request.zone for request in self.requests}

    def has_abandoned(self, name: str) -> bool:
        """The slot waits no more for the create, or for the queued request, that brings the node *name*."""
        create, request = self.create(name), self.request(name)
        return (create is not None and create.abandoned) or (request is not None and request.abandoned)

    @property
    def standing_request(self) -> RequestIntent | None:
        """The request that stands for the slot: a granted one before others, then the oldest."""
        standing = [request for request in self.requests if request.stands]
        granted = (request for request in standing if request.state is RequestState.GRANTED)
        return next(granted, standing[0] if standing else None)


def is_old(marked: datetime | None, now: datetime) -> bool:
    """Whether a store with that last heartbeat may be a backup; True also where the clock was set, which is safe."""
    return marked is None or abs(now - marked) >= OLD_AFTER


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """
    A fleet as last accepted.

    text, folder: the file's content, and the folder it lay in
    project: of its nodes, as resolved then; empty in stores of versions that did not keep it
    """

    name: str
    text: str
    folder: str
    accepted_at: datetime
    wish: DesiredState = DesiredState.UP
    project: str = ""
