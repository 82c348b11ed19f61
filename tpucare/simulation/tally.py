"""What a history came to: how much of the time slots trained, how often they recovered and how long each phase took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tpucare.model import Event, Slot
from tpucare.simulation.machines import RunMark

PHASES = ("create accepted", "READY", "all workers answer", "launched", "first progress")
"""Of a recovery, each counted from the one before it; the first from the loss or the end of the last run."""


@dataclass(slots=True)
class Tally:
    """
    Sums over one history or many; seconds. `phases`: (sum, count) by phase. `slot_seconds`: how long slots were wished
    to train, whether they could or not.
    """

    slot_seconds: float = 0.0
    trained_seconds: float = 0.0
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
    def node_days(self) -> float:
        return self.slot_seconds / 86400.0


class Watch:
    """Fills a Tally from what happens."""

    def __init__(self, slots: tuple[Slot, ...], setup_seconds: float) -> None:
        self.tally = Tally()
        self._setup = setup_seconds
        self._workers = {slot.name: max(place.workers for place in slot.places) for slot in slots}
        self._alive: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._reached: dict[str, tuple[int, float]] = {}

    def ran(self, mark: RunMark) -> None:
        if mark.slot not in self._workers:
            return
        if mark.what == "start":
            self._alive[mark.slot] += 1
            if self._alive[mark.slot] >= self._workers[mark.slot]:
                self._since[mark.slot] = mark.seconds + self._setup
            return
        self._alive[mark.slot] = max(0, self._alive[mark.slot] - 1)
        since = self._since.pop(mark.slot, None)
        if since is not None:
            self.tally.trained_seconds += max(0.0, mark.seconds - since)
            self._reached[mark.slot] = (0, mark.seconds)

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
        for since in self._since.values():
            self.tally.trained_seconds += max(0.0, now - since)
        self._since.clear()
