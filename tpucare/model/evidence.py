"""
Everything observed about a slot, and the two ways of asking how long something has lasted.

Wall time may jump, and a stopped process observes nothing; so a timeout counts *observed* time (design, rule 11):
the sum of the gaps between passes that saw something, each capped, with at least three observations that support it.
Frozen, standard library only. The engine gathers, `plan` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from tpucare.model.actions import EffectKey
from tpucare.model.memory import Memory, Publishing
from tpucare.model.resources import Node, Place, Provisioning, Slot, Worker
from tpucare.model.runs import NodeReport

POLL_OPERATION_EVERY = timedelta(seconds=10)
SUPPORTING_OBSERVATIONS = 3
CLOCK_SLACK = timedelta(seconds=10)


class Mark(NamedTuple):
    """An instant of observed time: how much had been observed, and in how many passes."""

    observed: timedelta
    passes: int


def latest(*marks: Mark | None) -> Mark | None:
    """The last of those marks that there are."""
    return max((mark for mark in marks if mark is not None), default=None)


@dataclass(frozen=True, slots=True)
class Moment:
    """
    Now, as `decide` sees it.

    wall:     the machine's clock, for backoffs that outlive the process
    observed: the project's observed time, for timeouts
    passes:   how many passes that is
    cloud:    the service's clock, as far as it is known
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
    Answers "has it lasted that long?" and remembers the earliest instant at which an answer would change.

    So every decision that waits knows when to be asked again, and none has to work it out.
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

        *longest* is what such a wait can be: one that lies further ahead is the work of a clock that was set back. By a
        little every clock is set back now and then, which must not end a wait that has just begun.
        """
        if instant is None or instant <= self.now.wall or instant - self.now.wall - CLOCK_SLACK > longest:
            return True
        if self.wall_due is None or instant < self.wall_due:
            self.wall_due = instant
        return False

    def reached(self, instant: datetime) -> bool:
        """True when the cloud's clock, as far as it is known, has reached *instant*."""
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
        """Ask again after that much observed time, whatever happens: for what no change of evidence tells of."""
        self._note(self.now.observed + length)

    def _note(self, due: timedelta) -> None:
        if self.observed_due is None or due < self.observed_due:
            self.observed_due = due


@dataclass(frozen=True, slots=True)
class Progress:
    """
    Signs of progress of one run, as this process saw them.

    signals:    how often step or checkpoint moved; the first of each is where the run begins
    last:       when it moved last
    median_gap: between two moves, of the last few
    life:       when anything moved last, the length of the log included
    unchanged:  reports since `last`, or since `told`, that showed no other step or checkpoint
    still:      reports since `life` that showed nothing move
    begun:      the first report of this run
    told:       when it told a step first
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
    What guest attributes said of a node's host keys when this process asked last.

    UNPUBLISHED: not of all workers, or the feature is off    UNANSWERED: the call brought no answer (14, 4, 13, 429)
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

    listed:   in the last listing. A node that is not, in a zone that answered, is looked for by name
    dark:     its zone did not answer the last listing: whatever stands here is old
    heard_alone: its workers were heard since it went dark, or since no listing comes any more
    workers:  addresses of all workers, or None while the node does not list them all
    ended_reports: in a row, that say that the run has ended
    lacking_since: it listed them all once, and not since then
    arrived_since: when a worker answered last that had not before
    changed_since: a worker shows another host key than it had
    voucher:  what guest attributes say of its host keys    unanswered_since: they were asked, and no answer came
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
    A dead or DELETING node of ours that still counts against a quota: its own one, apart from those of other shares.

    share: what has a quota apart within a generation: `single` devices and `pod` slices of v2 and v3 (Cloud TPU docs,
    quotas), sizes 1, 4 and 8 of v5e, which draw on `serving` (seen in the wild); empty where there is one only
    """

    zone: str
    generation: str
    on_demand: bool
    share: str = ""


class FailedRead(NamedTuple):
    """GetNode of a node fails: since when, how often in a row, how at last. `human`: only a person can change that."""

    since: Mark
    times: int
    error: type[Exception]
    human: bool


@dataclass(frozen=True, slots=True)
class ProjectEvidence:
    """
    What all slots of a project have in common at one moment.

    fresh:             the last listing of the project succeeded
    blind_why:         why it is not fresh
    complete:          every zone has answered since this process runs
    unanswered:        the zones that have not
    unreachable_since: zones that did not answer the last listing, and since when that is so
    holdings:          what dead nodes of ours still hold of quotas
    publishing:        where host keys are published, and where they were not, as the slots of the project remember
    store_lost:        memory was lost and nobody confirmed yet
    store_old:         memory may be that of a backup: no process cared for it for a while before this one
    poll_every:        between two GetOperation calls of one create; longer where many are open
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


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    All that `decide` may know of one slot.

    foreign:          nodes that bear this slot's name and another owner
    looked:           when an effect of that kind on that node ended last, or that was noted of it
    creates_since:    since when this process knows an open create
    elsewhere_answers: any other worker answered within the last minute
    may_be_canary:    no worker anywhere answers, and this slot is the one to go first
    failed_looks:     nodes of which GetNode says nothing
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

    def hidden_since(self, zone: str, name: str) -> Mark | None:
        """Since when nothing can be learned of a node that is not listed; None where it can."""
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
    """All that one decision about a slot is made from; `timers` note when it has to be made again."""

    slot: Slot
    evidence: Evidence
    memory: Memory
    timers: Timers


def holding_of(place: Place) -> Holding:
    """What a node at *place* holds of a quota while it is listed."""
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


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]
