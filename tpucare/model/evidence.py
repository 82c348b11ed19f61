"""
Everything observed about a slot, and timers over it.

Wall time may jump, and a stopped process observes nothing, so a timeout counts *observed* time (design, rule 11): the
sum of the gaps between successful listings, each capped, with at least three observations in support. The engine
gathers evidence (`engine.tracking`), the planner reads it. Frozen but for `Timers`; standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from tpucare.model.actions import EffectKey
from tpucare.model.causes import Cause
from tpucare.model.markets import Market
from tpucare.model.memory import Memory, Publishing
from tpucare.model.resources import Node, Place, Provisioning, Slot, Worker
from tpucare.model.runs import NodeReport

POLL_OPERATION_EVERY = timedelta(seconds=10)
# A stockout comes within two minutes, and the next create waits for it.
POLL_FRESH_EVERY, FRESH_FOR = timedelta(seconds=2), timedelta(minutes=2)
SUPPORTING_OBSERVATIONS = 3
CLOCK_SLACK = timedelta(seconds=10)


class Mark(NamedTuple):
    """An instant of observed time: the time observed until then, and in how many passes."""

    observed: timedelta
    passes: int


def latest(*marks: Mark | None) -> Mark | None:
    """The latest of *marks*, None ignored; None when all are."""
    return max((mark for mark in marks if mark is not None), default=None)


@dataclass(frozen=True, slots=True)
class Moment:
    """
    The present, by the clocks that a decision may read.

    wall:     the machine's clock, for backoffs that outlive the process
    observed: observed time of the project, for timeouts    passes: successful listings in it
    cloud:    the service's clock; None: not known
    """

    wall: datetime
    observed: timedelta
    passes: int
    cloud: datetime | None = None

    @property
    def mark(self) -> Mark:
        return Mark(self.observed, self.passes)


class Timers:
    """
    Compares durations with limits, and collects the earliest instant at which one of the answers changes.

    `decide` puts that instant into its Wait, so no decision computes its own wake-up.
    """

    def __init__(self, now: Moment) -> None:
        self.now = now
        self.observed_due: timedelta | None = None
        self.wall_due: datetime | None = None

    def lasted(self, since: Mark | None, length: timedelta, observations: int = SUPPORTING_OBSERVATIONS) -> bool:
        """True when *since* lies at least *length* of observed time and *observations* passes back."""
        if since is None:
            return False
        due = since.observed + length
        if self.now.observed >= due and self.now.passes - since.passes >= observations:
            return True
        self._note(max(due, self.now.observed))
        return False

    def passed(self, instant: datetime | None, longest: timedelta) -> bool:
        """
        True when wall time has reached *instant*, or it is None, or it lies further ahead than *longest*.

        *longest* is the longest possible wait: an instant beyond it means that the clock was set back. A small step
        back (`CLOCK_SLACK`) is usual, and ends no wait.
        """
        if instant is None or instant <= self.now.wall or instant - self.now.wall - CLOCK_SLACK > longest:
            return True
        if self.wall_due is None or instant < self.wall_due:
            self.wall_due = instant
        return False

    def reached(self, instant: datetime) -> bool:
        """True when the cloud's clock has reached *instant*; False while it is not known."""
        cloud = self.now.cloud
        if cloud is None:
            return False
        if cloud >= instant:
            return True
        due = self.now.wall + (instant - cloud)
        if self.wall_due is None or due < self.wall_due:
            self.wall_due = due
        return False

    def again(self, length: timedelta) -> None:
        """Decide again after that much observed time, for conditions that no change of evidence reports."""
        self._note(self.now.observed + length)

    def _note(self, due: timedelta) -> None:
        if self.observed_due is None or due < self.observed_due:
            self.observed_due = due


@dataclass(frozen=True, slots=True)
class Progress:
    """
    Signs of progress of one run, as this process saw them. A sign: step or checkpoint differs from the one before.

    signals:    number of signs; the first value of each is where the run begins, and no sign
    last:       when the last sign was seen
    median_gap: between two signs, of the last 20
    life:       when a sign, the first step or a longer log was seen last
    unchanged:  reports since `last`, or since `first_step`, without a sign
    still:      reports since `life` without any change
    begun:      when the first report came    first_step: when a step was first reported
    """

    token: str = ""
    signals: int = 0
    last: Mark | None = None
    median_gap: timedelta | None = None
    life: Mark | None = None
    unchanged: int = SUPPORTING_OBSERVATIONS
    still: int = SUPPORTING_OBSERVATIONS
    begun: Mark | None = None
    first_step: Mark | None = None


class Voucher(StrEnum):
    """
    The last answer of guest attributes about a node's host keys, in this process.

    UNPUBLISHED: keys of some workers are missing, or the feature is off    FORBIDDEN: PERMISSION_DENIED
    UNANSWERED:  the call failed (UNAVAILABLE, DEADLINE_EXCEEDED, INTERNAL, HTTP 429)
    """

    UNASKED = "unasked"
    VOUCHED = "vouched"
    UNPUBLISHED = "unpublished"
    FORBIDDEN = "forbidden"
    UNANSWERED = "unanswered"


@dataclass(frozen=True, slots=True)
class NodeEvidence:
    """
    One node of the slot. Marks are None where the condition does not hold now.

    listed:         in the last listing; else, where its zone answered, GetNode looks for it
    zone_unreachable: its zone did not answer the last listing, so the fields of the API are old
    reported_while_blind: its workers were probed since its zone, or every listing, stopped answering
    workers:        addresses of all workers; None while the node does not list them all
    ended_reports:  reports in a row by which the run has ended
    lacking_since:  it once listed all its workers, and does not now
    arrived_since:  when a worker answered for the first time, of the last such worker
    changed_since:  a worker shows another host key than before
    unanswered_since: guest attributes give no answer    voucher_why: their error
    """

    node: Node
    listed: bool
    zone_unreachable: bool
    seen_since: Mark
    state_since: Mark
    workers: tuple[Worker, ...] | None = None
    report: NodeReport | None = None
    unhealthy_since: Mark | None = None
    silent_since: Mark | None = None
    silent_probes: int = 0
    answering_since: Mark | None = None
    refused_since: Mark | None = None
    ended_since: Mark | None = None
    ended_reports: int = 0
    phase_since: Mark | None = None
    lacking_since: Mark | None = None
    arrived_since: Mark | None = None
    changed_since: Mark | None = None
    voucher: Voucher = Voucher.UNASKED
    voucher_why: str = ""
    unanswered_since: Mark | None = None
    progress: Progress = Progress()
    reported_while_blind: bool = False


class Holding(NamedTuple):
    """
    Quota that a dead or DELETING node of ours still holds.

    share: which quota of the generation: `single` devices or `pod` slices of v2 and v3 (Cloud TPU docs, quotas),
    `serving` for sizes 1, 4 and 8 of v5e (seen in the wild); empty where the generation has one quota
    """

    zone: str
    generation: str
    on_demand: bool
    share: str = ""


class FailedRead(NamedTuple):
    """GetNode of a node fails: `since`, `times` in a row, the last `error`. `human`: only a person can mend that."""

    since: Mark
    times: int
    error: type[Exception]
    human: bool


@dataclass(frozen=True, slots=True)
class ProjectEvidence:
    """
    Evidence that all slots of a project share at one moment.

    fresh:             the last listing of the project succeeded    blind_why: the error, when it did not
    complete:          every zone has answered since this process started    unanswered: the zones that have not
    unreachable_since: the zones missing from the last listing, and since when
    holdings:          quota that dead nodes of ours still hold
    publishing:        by `trust.publisher_of`: whether host keys are published there
    store_lost:        memory was lost, and no person has confirmed yet
    store_old:         memory may be a backup's: its last heartbeat is more than 10 min older than this process
    poll_every:        between two GetOperation calls of one create; longer when many are open
    poll_fresh_every:  the same for a create younger than FRESH_FOR
    markets:           what all slots learned of them, by name
    """

    fresh: bool
    blind_why: str = ""
    complete: bool = False
    unanswered: frozenset[str] = frozenset()
    unreachable_since: Mapping[str, Mark] = field(default_factory=dict)
    holdings: frozenset[Holding] = frozenset()
    publishing: Mapping[str, Publishing] = field(default_factory=dict)
    store_lost: bool = False
    store_old: bool = False
    poll_every: timedelta = POLL_OPERATION_EVERY
    poll_fresh_every: timedelta = POLL_FRESH_EVERY
    markets: Mapping[str, Market] = field(default_factory=dict)


class Closed(NamedTuple):
    """The fleet has reached a bound. `is_sure`: it is taken down; else it makes no new node."""

    cause: Cause
    why: str
    is_sure: bool = False


@dataclass(frozen=True, slots=True)
class QueueEvidence:
    """
    The queued resources of the slot's project, as last listed. They are listed only where some slot uses them.

    fresh:   the last listing of them succeeded    unreachable: zones that did not answer it
    missing: requests of this slot that it left out    foreign: zone and name of others' with a name of this slot
    since:   since when this process knows each request of the slot in its present state
    """

    fresh: bool = False
    unreachable: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    foreign: frozenset[tuple[str, str]] = frozenset()
    since: Mapping[str, Mark] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    Evidence about one slot.

    foreign:          nodes with a name of this slot and another owner
    in_flight:        effects that have begun and not ended
    ended_effects:    when an effect of that kind on that node ended last, or its fact was observed
    creates_since:    since when this process knows each open create
    elsewhere_answers: a worker of another node answered within the last minute
    may_be_canary:    no worker anywhere answers, and this slot is the first that may act on silence
    failed_reads:     nodes whose GetNode fails, and `request_read` of requests whose GetQueuedResource fails
    closed:           the bound that the fleet has reached
    """

    project: ProjectEvidence
    nodes: tuple[NodeEvidence, ...] = ()
    foreign: tuple[Node, ...] = ()
    in_flight: frozenset[EffectKey] = frozenset()
    ended_effects: Mapping[EffectKey, Mark] = field(default_factory=dict)
    creates_since: Mapping[str, Mark] = field(default_factory=dict)
    elsewhere_answers: bool = False
    may_be_canary: bool = False
    failed_reads: Mapping[str, FailedRead] = field(default_factory=dict)
    closed: Closed | None = None
    queue: QueueEvidence = QueueEvidence()

    def hidden_since(self, zone: str, name: str) -> Mark | None:
        """Since when neither a listing nor GetNode can show the node; None while one can."""
        failed = self.failed_reads.get(name)
        unreachable, failing = self.project.unreachable_since.get(zone), failed.since if failed is not None else None
        return min([mark for mark in (unreachable, failing) if mark], default=None)

    def node(self, name: str) -> NodeEvidence | None:
        for seen in self.nodes:
            if seen.node.name == name:
                return seen
        return None


@dataclass(frozen=True, slots=True)
class Case:
    """The input of one decision about a slot; `timers` collect when to decide again."""

    slot: Slot
    evidence: Evidence
    memory: Memory
    timers: Timers

    @property
    def wants_node(self) -> bool:
        return self.evidence.closed is None and self.memory.wants_node(self.slot)

    @property
    def rests(self) -> bool:
        """No demand wants a node of this elastic slot."""
        return self.slot.elastic and not self.memory.awake


def request_read(name: str) -> str:
    """The key of GetQueuedResource of request *name* in `Evidence.failed_reads`; its node has its name, too."""
    return f"queued/{name}"


def holding_of(place: Place) -> Holding:
    """Quota that a node at *place* holds while it is listed."""
    return holding(place.zone, place.accelerator_type, place.provisioning)


def holding(zone: str, accelerator_type: str, provisioning: Provisioning) -> Holding:
    generation, _, size = accelerator_type.partition("-")
    share = ""
    if generation in ("v2", "v3"):
        share = "single" if size == "8" else "pod"
    elif generation == "v5litepod" and size in ("1", "4", "8"):
        share = "serving"
    on_demand = provisioning in (Provisioning.ON_DEMAND, Provisioning.RESERVED)
    return Holding(zone, generation, on_demand, share)
