"""What a history came to: how much of the time slots trained, how often they recovered and how long each phase took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tpucare.model.resources import Event, Slot
from tpucare.testbed.simulation.machines import RunMark

PHASES = ("create accepted", "READY", "all workers answer", "launched", "first progress")
"""Of a recovery, each counted from the one before it; the first from the loss or the end of the last run."""

LOST_AT_MOST = 3600
"""Steps between two checkpoints, and some more."""
_COSTS_NO_MORE = frozenset({"preempted", "silent", "stopped", "deleting", "gone"})


@dataclass(slots=True)
class Tally:
    """
    Sums over one history or many; seconds. `phases`: (sum, count) by phase. `slot_seconds`: how long slots were wished
    to train, whether they could or not. `good_seconds`: trained, without what was lost with a node and trained again,
    or went by in a standstill. `node_seconds`: how long nodes were READY, which is what they cost.
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
    """Fills a Tally from what happens."""

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
        """What was trained beyond the step at which the run begins is trained again."""
        lost = self._furthest.get(mark.slot, 0) - mark.step
        # Who begins at 0 and could not have lost so much is another experiment, and loses nothing.
        if lost > 0 and (mark.step or lost <= LOST_AT_MOST):
            self.tally.good_seconds -= lost * self._step
        self._begun[mark.slot] = mark.step

    def _count_trained(self, slot: str, seconds: float, step: int | None) -> None:
        """*step*: that was reached; None: the run goes on, and does not stand still."""
        seconds = max(0.0, seconds)
        self.tally.trained_seconds += seconds
        if step is not None:
            self._furthest[slot] = step
            seconds = min(seconds, max(0, step - self._begun[slot]) * self._step)
        self.tally.good_seconds += seconds

    def node(self, name: str, event: str, slot: str, now: float) -> None:
        """*event* of the audit log; *slot*: of the label, where the event tells labels."""
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
        if stage <= before:
            return
        # A phase that was skipped (a run was started again on its node) belongs to no sum.
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
