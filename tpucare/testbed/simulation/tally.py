"""Figures of a history: the share of time in which slots trained, their recoveries, and the length of each phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tpucare.model.resources import Event, Slot
from tpucare.testbed.simulation.machines import RunMark

PHASES = ("create accepted", "READY", "all workers answer", "launched", "first progress")
"""The phases of a recovery, each measured from the one before; the first from the loss or the end of the last run."""

LOST_AT_MOST = 3600
"""Steps between two checkpoints, and some more."""
_COSTS_NO_MORE = frozenset({"preempted", "silent", "stopped", "deleting", "gone"})


@dataclass(slots=True)
class Tally:
    """
    Sums over one history or many; seconds. `phases`: (sum, count) by phase. `slot_seconds`: time in which slots were
    meant to train. `good_seconds`: training time without steps that were lost and repeated, and without hangs.
    `node_seconds`: time in which nodes were READY, for which they are paid.
    """

    slot_seconds: float = 0.0
    trained_seconds: float = 0.0
    good_seconds: float = 0.0
    node_seconds: float = 0.0
    launches: int = 0
    creates: int = 0
    steps: int = 0
    restarts: int = 0
    phases: dict[str, tuple[float, int]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    settled: list[float] = field(default_factory=list)
    apart: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.slot_seconds += other.slot_seconds
        self.trained_seconds += other.trained_seconds
        self.good_seconds += other.good_seconds
        self.node_seconds += other.node_seconds
        self.launches += other.launches
        self.creates += other.creates
        self.steps += other.steps
        self.restarts += other.restarts
        self.faults.update(other.faults)
        self.settled.extend(other.settled)
        self.apart.update(other.apart)
        for phase, (seconds, count) in other.phases.items():
            before = self.phases.get(phase, (0.0, 0))
            self.phases[phase] = (before[0] + seconds, before[1] + count)

    @property
    def availability(self) -> float:
        return self.trained_seconds / self.slot_seconds if self.slot_seconds else 0.0

    @property
    def goodput(self) -> float:
        return self.good_seconds / self.slot_seconds if self.slot_seconds else 0.0

    @property
    def node_hours(self) -> float:
        return self.node_seconds / 3600.0

    @property
    def node_days(self) -> float:
        return self.slot_seconds / 86400.0


class TallyRecorder:
    """Fills a Tally from runs, nodes and events."""

    def __init__(self, slots: tuple[Slot, ...], setup_seconds: float, step_seconds: float = 1.0) -> None:
        self.tally = Tally()
        self._setup, self._step = setup_seconds, step_seconds
        self._workers = {slot.name: max(place.workers for place in slot.places) for slot in slots}
        self._alive: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._begun: dict[str, int] = {}
        self._furthest: dict[str, int] = {}
        self._ours: set[str] = set()
        self._ready: dict[str, float] = {}
        self._reached: dict[str, tuple[int, float]] = {}

    def ran(self, mark: RunMark) -> None:
        if mark.slot not in self._workers:
            return
        if mark.what == "start":
            self._alive[mark.slot] += 1
            if self._alive[mark.slot] >= self._workers[mark.slot]:
                self._since[mark.slot] = mark.seconds + self._setup
                self._count_redone(mark)
            return
        self._alive[mark.slot] = max(0, self._alive[mark.slot] - 1)
        since = self._since.pop(mark.slot, None)
        if since is not None:
            self._count_trained(mark.slot, mark.seconds - since, mark.step)
            self._reached[mark.slot] = (0, mark.seconds)

    def _count_redone(self, mark: RunMark) -> None:
        """Subtract the steps beyond the one at which the run begins: they are trained again."""
        lost = self._furthest.get(mark.slot, 0) - mark.step
        # A run that begins at 0, after more steps than could be lost, is another job and repeats none.
        if lost > 0 and (mark.step or lost <= LOST_AT_MOST):
            self.tally.good_seconds -= lost * self._step
        self._begun[mark.slot] = mark.step

    def _count_trained(self, slot: str, seconds: float, step: int | None) -> None:
        """*step*: the last one of the run; None: the run goes on and does not hang."""
        seconds = max(0.0, seconds)
        self.tally.trained_seconds += seconds
        if step is not None:
            self._furthest[slot] = step
            seconds = min(seconds, max(0, step - self._begun[slot]) * self._step)
        self.tally.good_seconds += seconds

    def node(self, name: str, event: str, slot: str, now: float) -> None:
        """Count an *event* of the audit log; *slot*: from the label, if the event has labels."""
        if event == "created" and slot in self._workers:
            self._ours.add(name)
        elif event == "ready" and name in self._ours:
            self._ready.setdefault(name, now)
        elif event in _COSTS_NO_MORE:
            self.tally.node_seconds += now - self._ready.pop(name, now)

    def told(self, event: Event, now: float) -> None:
        if event.kind == "launch":
            self.tally.launches += 1
        stage = {"create-accepted": 1, "answers": 3, "launched": 4, "progress": 5}.get(event.kind, 0)
        if event.kind == "state" and event.fields.get("state") == "READY":
            stage = 2
        if not stage:
            return
        before, at = self._reached.get(event.slot, (0, now))
        if stage == before == 1:
            # The create before it met a stockout: READY counts from the one that brought the node.
            seconds, count = self.tally.phases[PHASES[0]]
            self.tally.phases[PHASES[0]] = (seconds + now - at, count)
            self._reached[event.slot] = (stage, now)
        if stage <= before:
            return
        # A skipped phase (a run started again on its node) counts in no sum.
        if stage == before + 1:
            phase = PHASES[stage - 1]
            seconds, count = self.tally.phases.get(phase, (0.0, 0))
            self.tally.phases[phase] = (seconds + now - at, count + 1)
        self._reached[event.slot] = (stage, now)

    def close(self, now: float) -> None:
        for slot, since in self._since.items():
            self._count_trained(slot, now - since, None)
        self._since.clear()
        for since in self._ready.values():
            self.tally.node_seconds += now - since
        self._ready.clear()
