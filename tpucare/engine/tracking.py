"""
The engine's mutable record of each slot and node between passes, frozen into evidence for each decision.

On the engine's thread only. Listings and reports go in; whether a decision may depend on the change comes out. Choices
are the planner's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from statistics import median

from tpucare.model import errors
from tpucare.model.actions import Action, EffectKey, Wait
from tpucare.model.causes import Cause
from tpucare.model.errors import NeedsPerson, NodeGone, NotPublished
from tpucare.model.evidence import (
    Closed,
    Evidence,
    FailedRead,
    Mark,
    NodeEvidence,
    Progress,
    ProjectEvidence,
    QueueEvidence,
    Voucher,
    request_read,
)
from tpucare.model.lifecycles import RequestState, RunState
from tpucare.model.memory import End, Memory
from tpucare.model.resources import Health, Node, NodeState, Slot, Worker
from tpucare.model.runs import Contact, NodeReport, Phase, WorkerReport

BAD_HEALTH = frozenset({Health.TIMEOUT, Health.UNHEALTHY_TENSORFLOW, Health.UNHEALTHY_MAINTENANCE})
GAPS_KEPT = 20
FRESH_SILENCE = timedelta(minutes=3)
# Seconds between two listings of queued resources: while a request ends or its call has no answer, while one waits, and
# else as a sweep. The node of a grant shows in the listing of nodes, so the queue itself need not be asked often.
QUEUE_ENDING, QUEUE_WAITING, QUEUE_SWEEP = 10.0, 30.0, 300.0


@dataclass(slots=True)
class ProgressTrack:
    """
    Signs of progress of one run; see `evidence.Progress`.

    The first step and checkpoint are only where the run begins: "restored at step 100" is no step made, and the
    checkpoint of an older run may be read late.
    """

    token: str = ""
    step: int | None = None
    checkpoint: int | None = None
    begun: Mark | None = None
    first_step: Mark | None = None
    log_bytes: int = 0
    signals: int = 0
    unchanged: int = 0
    still: int = 0
    last: Mark | None = None
    life: Mark | None = None
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    median_gap: timedelta | None = None
    steps: dict[int, int] = field(default_factory=dict)

    def apply_report(self, token: str, step: int | None, checkpoint: int | None, log_bytes: int, mark: Mark) -> None:
        if token != self.token:
            self.token, self.step, self.checkpoint, self.log_bytes = token, None, None, 0
            self.begun, self.first_step, self.last, self.life = mark, None, None, mark
            self.signals = 0
            self.gaps.clear()
            self.still = 0
            self.median_gap = None
            self.steps.clear()
        self.unchanged += 1
        self.still += 1
        if log_bytes != self.log_bytes:
            self.log_bytes, self.life, self.still = log_bytes, mark, 0
        if step is not None and self.first_step is None:
            self.first_step, self.life, self.unchanged, self.still = mark, mark, 0, 0
        moved = _differs(step, self.step) or _differs(checkpoint, self.checkpoint)
        self.step = self.step if step is None else step
        self.checkpoint = self.checkpoint if checkpoint is None else checkpoint
        if moved:
            self._count_signal(mark)

    def apply_other_steps(self, steps: Mapping[int, int], mark: Mark) -> None:
        """
        Steps of the other workers, by worker number, while worker 0 is silent, perhaps too busy to answer.

        Each is compared with the same worker's last step, since workers may count differently.
        """
        moved = any(_differs(step, self.steps.get(number)) for number, step in steps.items())
        self.steps.update(steps)
        if moved:
            self._count_signal(mark)

    def _count_signal(self, mark: Mark) -> None:
        if self.last is not None:
            self.gaps.append((mark.observed - self.last.observed).total_seconds())
            self.median_gap = timedelta(seconds=median(self.gaps))
        self.last, self.life, self.still = mark, mark, 0
        self.signals, self.unchanged = self.signals + 1, 0

    def shift_marks(self, now: Mark, length: timedelta, passes: int) -> None:
        """Move all marks by an unobserved span, which is no standstill."""
        self.begun = _later(self.begun, now, length, passes)
        self.first_step = _later(self.first_step, now, length, passes)
        self.last = _later(self.last, now, length, passes)
        self.life = _later(self.life, now, length, passes)

    def freeze(self) -> Progress:
        return Progress(
            self.token,
            self.signals,
            self.last,
            self.median_gap,
            self.life,
            self.unchanged,
            self.still,
            begun=self.begun,
            first_step=self.first_step,
        )


@dataclass(slots=True)
class NodeTrack:
    """One node of a slot, as observed by this process."""

    node: Node
    seen_since: Mark
    state_since: Mark
    listed: bool = True
    zone_unreachable_since: Mark | None = None
    reported_while_blind: bool = False
    own_observed: timedelta = timedelta()
    workers: tuple[Worker, ...] | None = None
    report: NodeReport | None = None
    generation: int = 0
    probe_due: float | None = None
    probing: bool = False
    voucher: Voucher = Voucher.UNASKED
    voucher_why: str = ""
    unanswered_since: Mark | None = None
    unhealthy_since: Mark | None = None
    silent_since: Mark | None = None
    silent_probes: int = 0
    answering_since: Mark | None = None
    refused_since: Mark | None = None
    refusals: int = 0
    changed_since: Mark | None = None
    ended_since: Mark | None = None
    ended_reports: int = 0
    phase_since: Mark | None = None
    lacking_since: Mark | None = None
    arrived_since: Mark | None = None
    arrived: set[int] = field(default_factory=set)
    progress: ProgressTrack = field(default_factory=ProgressTrack)
    _reported_at: float | None = None

    def apply_node(self, node: Node, mark: Mark) -> None:
        """Apply *node* as listed or read by GetNode."""
        if node.state is not self.node.state:
            self.state_since = mark
        if self.workers is not None and len(node.endpoints) < len(self.workers):
            self.lacking_since = mark
        if node.health not in BAD_HEALTH:
            self.unhealthy_since = None
        elif self.unhealthy_since is None:
            self.unhealthy_since = mark
        self.node = node

    @property
    def zone_unreachable(self) -> bool:
        return self.zone_unreachable_since is not None

    def mark_zone_unreachable(self, mark: Mark) -> None:
        """The node's zone does not answer: from now on only probes show the node."""
        if self.zone_unreachable_since is None:
            self.zone_unreachable_since, self.reported_while_blind = mark, False

    def start_own_clock(self) -> None:
        """Listings fail: from now on only probes show the node, and its own clock begins."""
        self.reported_while_blind, self.own_observed, self._reported_at = False, timedelta(), None

    def advance_own_clock(self, now: float, mark: Mark, cap: timedelta) -> Mark:
        """
        The mark of a report while listings fail, by the node's own clock.

        It begins where the observed clock stands, and moves by the gaps between reports, each at most *cap*.
        """
        if self._reported_at is not None:
            self.own_observed += min(timedelta(seconds=max(0.0, now - self._reported_at)), cap)
        self._reported_at = now
        return self.own_mark(mark, cap)

    def own_mark(self, mark: Mark, cap: timedelta) -> Mark:
        """Now, by the node's own clock; each poll interval, a third of *cap*, counts as one observation."""
        if not self.own_observed:
            return mark
        return Mark(mark.observed + self.own_observed, mark.passes + round(self.own_observed / (cap / 3)))

    def stop_own_clock(self, mark: Mark) -> None:
        """Listings succeed again: marks of the node's own clock move back to the observed clock's present."""
        if self.own_observed:
            self._shift(mark, timedelta(), 0)
        self.start_own_clock()

    def _shift(self, now: Mark, length: timedelta, passes: int) -> None:
        for name in (each.name for each in fields(self)):
            if isinstance(value := getattr(self, name), Mark):
                setattr(self, name, _later(value, now, length, passes))
        self.progress.shift_marks(now, length, passes)

    def mark_zone_reachable(self, mark: Mark) -> None:
        """
        The node's zone answers again: shift its marks by the time unseen, and count supporting observations anew.

        Observed time went on with the other zones, but not for this node (rule 11).
        """
        if self.zone_unreachable_since is None:
            return
        length, passes = (
            mark.observed - self.zone_unreachable_since.observed,
            mark.passes - self.zone_unreachable_since.passes,
        )
        self._shift(mark, length, passes)
        self.progress.unchanged = self.progress.still = 0
        self.silent_probes = 0
        self.zone_unreachable_since = None

    def discard_report(self) -> None:
        """Drop the report after our launch or stop; probes begun before it are void, too (`generation`)."""
        self.report = None
        self.generation += 1
        self.ended_since = None
        self.ended_reports = 0
        self.phase_since = None

    def apply_voucher(self, vouched: bool, error: Exception | None, mark: Mark) -> None:
        """Apply an answer of guest attributes. *vouched*: they had host keys of every worker."""
        before, self.voucher = self.voucher, _voucher_of(vouched, error)
        if self.voucher is not before:
            # Error texts of the API have an id per answer: keep the first, so that no repetition counts as news.
            self.voucher_why = str(error) if error is not None else ""
        unanswered = self.voucher is Voucher.UNANSWERED
        self.unanswered_since = (self.unanswered_since or mark) if unanswered else None

    def apply_report(self, report: NodeReport, mark: Mark) -> bool:
        """Apply a report; True when a decision may depend on the change."""
        # The first report in an unreachable zone allows a decision, whatever its content.
        heard_again = self.zone_unreachable and not self.reported_while_blind
        before, self.report, self.reported_while_blind = self.report, report, True
        contacts = [worker.contact for worker in report.workers]
        self._mark_contacts(contacts, mark)
        self._mark_run(before, report, mark)
        first = report.workers[0] if report.workers else None
        if first is not None and first.contact is Contact.ANSWERED:
            log_bytes = sum(worker.log_bytes for worker in report.workers)
            self.progress.apply_report(first.token, newest_step(report), newest_checkpoint(report), log_bytes, mark)
            self.progress.steps.update(_steps_of_others(report, first.token))
        elif self.progress.token:
            self.progress.apply_other_steps(_steps_of_others(report, self.progress.token), mark)
        return heard_again or before is None or before.workers != report.workers

    def _mark_contacts(self, contacts: list[Contact], mark: Mark) -> None:
        if Contact.SILENT in contacts:
            self.silent_since = self.silent_since or mark
            self.silent_probes += 1
        else:
            self.silent_since, self.silent_probes = None, 0
        came = {number for number, contact in enumerate(contacts) if contact is not Contact.SILENT} - self.arrived
        if came:
            self.arrived |= came
            self.arrived_since = mark
        self.refused_since = (self.refused_since or mark) if Contact.AUTH_REFUSED in contacts else None
        self.refusals = self.refusals + 1 if Contact.AUTH_REFUSED in contacts else 0
        self.changed_since = (self.changed_since or mark) if Contact.HOST_KEY_CHANGED in contacts else None
        answering = bool(contacts) and all(contact is Contact.ANSWERED for contact in contacts)
        self.answering_since = (self.answering_since or mark) if answering else None

    def _mark_run(self, before: NodeReport | None, report: NodeReport, mark: Mark) -> None:
        has_ended = _has_ended(report)
        self.ended_since = (self.ended_since or mark) if has_ended else None
        self.ended_reports = self.ended_reports + 1 if has_ended else 0
        phases = {(worker.token, worker.phase) for worker in report.workers}
        if before is None or self.phase_since is None or phases != {(w.token, w.phase) for w in before.workers}:
            self.phase_since = mark

    def freeze(self) -> NodeEvidence:
        return NodeEvidence(
            node=self.node,
            listed=self.listed,
            zone_unreachable=self.zone_unreachable,
            reported_while_blind=self.reported_while_blind,
            seen_since=self.seen_since,
            state_since=self.state_since,
            workers=self.workers,
            report=self.report,
            unhealthy_since=self.unhealthy_since,
            silent_since=self.silent_since,
            silent_probes=self.silent_probes,
            answering_since=self.answering_since,
            refused_since=self.refused_since,
            ended_since=self.ended_since,
            ended_reports=self.ended_reports,
            phase_since=self.phase_since,
            lacking_since=self.lacking_since,
            arrived_since=self.arrived_since,
            changed_since=self.changed_since,
            voucher=self.voucher,
            voucher_why=self.voucher_why,
            unanswered_since=self.unanswered_since,
            progress=self.progress.freeze(),
        )


def _voucher_of(vouched: bool, error: Exception | None) -> Voucher:
    match error:
        case None:
            return Voucher.VOUCHED if vouched else Voucher.UNPUBLISHED
        case NotPublished():
            return Voucher.UNPUBLISHED
        case NeedsPerson(code=errors.PERMISSION_DENIED):
            return Voucher.FORBIDDEN
        case NeedsPerson():
            # FAILED_PRECONDITION: the node still boots, or the feature is off.
            return Voucher.UNPUBLISHED
    return Voucher.UNANSWERED


def _differs(value: int | None, known: int | None) -> bool:
    return value is not None and known is not None and value != known


def _later(mark: Mark | None, now: Mark, length: timedelta, passes: int) -> Mark | None:
    return min(Mark(mark.observed + length, mark.passes + passes), now) if mark is not None else None


def _has_ended(report: NodeReport) -> bool:
    """The run ended on a worker; a foreign run, which may never have been on some, on all."""
    over = [_is_over(worker) for worker in report.workers]
    foreign = [worker for worker in report.workers if worker.foreign is not None]
    if not foreign or any(worker.exit_status is not None for worker in foreign):
        return any(over)
    return any(worker.is_torn for worker in foreign) or all(over)


def _is_over(worker: WorkerReport) -> bool:
    return worker.contact is Contact.ANSWERED and (worker.exit_status is not None or not worker.alive)


def newest_checkpoint(report: NodeReport) -> int | None:
    """The newest complete checkpoint that any worker reports."""
    return max((w.checkpoint for w in report.workers if w.checkpoint is not None), default=None)


def newest_step(report: NodeReport) -> int | None:
    return next((worker.step for worker in report.workers if worker.step is not None), None)


def _steps_of_others(report: NodeReport, token: str) -> dict[int, int]:
    """Steps of the run *token* on workers other than 0, by worker number."""
    workers = enumerate(report.workers)
    return {number: w.step for number, w in workers if number and w.token == token and w.step is not None}


def is_running(report: NodeReport) -> bool:
    return any(worker.alive and worker.phase is Phase.RUN for worker in report.workers)


@dataclass(slots=True)
class SlotTrack:
    """One slot: its declaration, memory, nodes, effects in flight and last action."""

    slot: Slot
    memory: Memory
    nodes: dict[str, NodeTrack] = field(default_factory=dict)
    in_flight: dict[EffectKey, Action] = field(default_factory=dict)
    ended_effects: dict[EffectKey, Mark] = field(default_factory=dict)
    failed_reads: dict[str, FailedRead] = field(default_factory=dict)
    creates_since: dict[str, Mark] = field(default_factory=dict)
    requests_since: dict[str, tuple[RequestState, Mark]] = field(default_factory=dict)
    action: Action = field(default_factory=lambda: Wait(Cause.NO_OBSERVATION, "not looked at yet"))
    wake_wall: float | None = None
    aside_until: float | None = None
    errors: int = 0
    erred_at: float = -math.inf
    wants_create_since: float | None = None
    braked: bool = False
    brake_lifted: bool = False
    held_node: str = ""
    held_at: timedelta = timedelta()
    told_person: str = ""

    def set_action(self, action: Action) -> None:
        """Keep *action* as the slot's current one."""
        self.action = action

    def evidence(
        self,
        project: ProjectEvidence,
        foreign: tuple[Node, ...],
        closed: Closed | None,
        queue: QueueEvidence,
        *,
        elsewhere_answers: bool,
        may_be_canary: bool,
    ) -> Evidence:
        nodes = list(self.nodes.values())
        if len(nodes) > 1:
            nodes.sort(key=lambda track: (track.node.create_time, track.node.name))
        return Evidence(
            project,
            nodes=tuple(track.freeze() for track in nodes),
            foreign=foreign,
            in_flight=frozenset(self.in_flight),
            ended_effects=dict(self.ended_effects),
            creates_since=dict(self.creates_since),
            elsewhere_answers=elsewhere_answers,
            may_be_canary=may_be_canary,
            failed_reads=dict(self.failed_reads),
            closed=closed,
            queue=queue,
        )

    @property
    def uses_queue(self) -> bool:
        """It may ask for a queued resource, has one, or a node of one."""
        if any(place.queued for place in self.slot.places) or self.memory.requests:
            return True
        return any(past.queued for past in self.memory.nodes)

    @property
    def queue_pause(self) -> float:
        """Seconds after which the queued resources are listed again, as far as this slot is concerned."""
        pause = QUEUE_SWEEP
        for request in self.memory.requests:
            is_ending = request.served and not self.memory.serves(request.name)
            if is_ending or not request.stands or not request.state.is_accepted:
                return QUEUE_ENDING
            if not request.served:
                pause = QUEUE_WAITING
        return pause

    def last_progress(self) -> tuple[int | None, int | None]:
        """Step and checkpoint of the last launched run, as seen by this process."""
        run = self.memory.run
        seen = self.nodes.get(run.node) if run is not None else None
        if run is None or seen is None or seen.progress.token != run.token:
            return None, None
        return seen.progress.step, seen.progress.checkpoint

    def mark_creates(self, mark: Mark) -> None:
        """Mark new open creates, and drop marks of creates and nodes that are gone."""
        names = {intent.name for intent in self.memory.creates}
        for name in names:
            self.creates_since.setdefault(name, mark)
        for name in list(self.creates_since):
            if name not in names:
                del self.creates_since[name]
        known = {"", *names, *self.nodes, *(past.name for past in self.memory.nodes)}
        if self.memory.requests or self.requests_since:
            known |= self._mark_requests(mark)
        for key in [key for key in self.ended_effects if key.node not in known]:
            del self.ended_effects[key]
        for name in [name for name in self.failed_reads if name not in known]:
            del self.failed_reads[name]

    def _mark_requests(self, mark: Mark) -> set[str]:
        """Mark requests in a new state, and drop marks of those that are gone. Returns the names that are known."""
        states = {request.name: request.state for request in self.memory.requests}
        self.requests_since = {
            name: past if (past := self.requests_since.get(name)) and past[0] is state else (state, mark)
            for name, state in states.items()
        }
        return {*states, *map(request_read, states)}

    def record_read(self, name: str, error: Exception | None, mark: Mark) -> bool:
        """Record the end of a GetNode of *name*; True when the outcome is another than the last time."""
        before = self.failed_reads.pop(name, None)
        if error is None or isinstance(error, NodeGone):
            return True
        since, times = (before.since, before.times + 1) if before is not None else (mark, 1)
        self.failed_reads[name] = FailedRead(since, times, type(error), isinstance(error, NeedsPerson))
        return before is None or before.error is not type(error)

    def hold_verdict(self, node: str, observed: timedelta) -> bool:
        """Hold the verdict on *node*; True when it was not held before."""
        news = not self.braked or self.held_node != node
        self.braked, self.brake_lifted = True, False
        self.held_node, self.held_at = node, observed
        return news

    def is_brake_lifted_for(self, node: str) -> bool:
        """A person confirmed the held verdict on *node*."""
        return self.brake_lifted and self.held_node == node

    def release_verdict(self) -> None:
        """Forget the held verdict and its confirmation."""
        self.braked = self.brake_lifted = False

    def forget_node(self, name: str) -> None:
        self.nodes.pop(name, None)
        self.failed_reads.pop(name, None)
        for key in [key for key in self.ended_effects if key.node == name]:
            del self.ended_effects[key]

    def is_busy(self, now: Mark) -> bool:
        """An open effect, create or delete, a booting node or fresh silence: list at the fast pace."""
        memory = self.memory
        deleting = any(past.is_leaving for past in memory.nodes)
        booting = any(track.node.state is NodeState.CREATING for track in self.nodes.values())
        marks = [seen.silent_since for seen in self.nodes.values() if seen.silent_since is not None]
        silent = any(now.observed - mark.observed < FRESH_SILENCE for mark in marks)
        left = memory.end is not End.NONE or (memory.run is not None and memory.run.state is RunState.OVER)
        ended = any(seen.ended_since is not None for seen in self.nodes.values()) and not left
        # A request may wait for days; it is fresh only until its call is answered.
        asking = memory.creates or any(not request.state.is_accepted for request in memory.requests)
        return bool(self.in_flight or asking or deleting or booting or silent or ended)
