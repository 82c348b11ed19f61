"""
What became of the runs of each slot, in truth: whether they advanced, and how they ended.

The machines know how far a run came, whoever asked it meanwhile. From that alone is judged whether a slot that was
given up had lost its right to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tpucare.model.memory import FailureKind, Memory
from tpucare.model.resources import Care
from tpucare.planner.predicates import INFRASTRUCTURE_BUDGET
from tpucare.planner.run import STALL_BUDGET
from tpucare.testbed.simulation.machines import RunEnd, RunMark

ADVANCES_AFTER = 3600.0
"""A run that lived this long in seconds, and two probes, and got further than any before it has advanced."""

# What may count as which failure: a run that stood still was stopped for it, and anything may interrupt one.
_COUNTS: Mapping[FailureKind, frozenset[RunEnd]] = MappingProxyType(
    {
        FailureKind.CRASH: frozenset({RunEnd.FAILED}),
        FailureKind.SETUP: frozenset({RunEnd.FAILED, RunEnd.STOPPED}),
        FailureKind.STALL: frozenset({RunEnd.STOOD_STILL}),
        FailureKind.INFRASTRUCTURE: frozenset(RunEnd),
    }
)


@dataclass(slots=True)
class _Row:
    """
    Ends of runs since the last one that advanced, by token; of a gang the worst end counts.

    unknown: of how many seconds that a run has lived nobody knows any more
    """

    advances_after: float
    furthest: int = 0
    job: str = ""
    served_job: str | None = None
    since: dict[str, float] = field(default_factory=dict)
    unknown: dict[str, float] = field(default_factory=dict)
    ends: dict[str, set[RunEnd]] = field(default_factory=dict)
    blameless: set[str] = field(default_factory=set)

    def begin(self, mark: RunMark) -> None:
        self.since.setdefault(mark.token, mark.seconds)
        if mark.job != self.job:
            # Another experiment, which begins at its beginning.
            self.furthest, self.ends, self.job = 0, {}, mark.job
            self.blameless.clear()

    def end(self, mark: RunMark) -> None:
        since, unknown = mark.seconds, 0.0
        if mark.worker == 0:
            since, unknown = self.since.pop(mark.token, mark.seconds), self.unknown.pop(mark.token, 0.0)
        if mark.blameless:
            self.blameless.add(mark.token)
        if mark.worker == 0 and mark.step > self.furthest:
            self.furthest = mark.step
            if mark.seconds - since >= self.advances_after:
                self.ends = {mark.token: self.ends.get(mark.token, set())}
                if mark.seconds - since - unknown >= self.advances_after:
                    self.served_job = mark.job
        if mark.how is RunEnd.FINISHED and not self.ends.get(mark.token):
            self.served_job = mark.job
            self.ends.clear()
            self.blameless.clear()
            return
        self.ends.setdefault(mark.token, set()).add(mark.how)

    def count(self, kinds: frozenset[RunEnd]) -> int:
        return sum(1 for ends in self.ends.values() if ends & kinds)


class Lives:
    """
    Fed with every beginning and end of a run; slots of which nothing is known have had none.

    probe: how often workers are asked, in seconds
    """

    def __init__(self, probe: float) -> None:
        # Whoever asks seldom cannot know how far a run came that died with its machine.
        self._advances_after = ADVANCES_AFTER + 2 * probe
        self._rows: dict[str, _Row] = {}

    def ran(self, mark: RunMark) -> None:
        row = self._rows.setdefault(mark.slot, _Row(self._advances_after))
        if mark.what == "start":
            row.begin(mark)
        else:
            row.end(mark)

    def lose_time(self, seconds: float, slot: str = "") -> None:
        """Of so many seconds that the runs of *slot* (of all, when empty) have lived nobody knows any more."""
        for row in [self._rows[slot]] if slot in self._rows else [] if slot else self._rows.values():
            for token in row.since:
                row.unknown[token] = row.unknown.get(token, 0.0) + seconds

    def is_blameless(self, slot: str, job: str) -> bool:
        """
        *job*, which it is to run now, had trained, and whatever ended of it since then ended because something was down
        that every run needs. A job that never trained may as well be a broken one.
        """
        row = self._rows.get(slot)
        if row is None or not row.served_job == row.job == job:
            return False
        failed = {token for token, ends in row.ends.items() if RunEnd.FAILED in ends}
        return bool(failed) and failed <= row.blameless

    def wronged(self, slot: str, memory: Memory, care: Care) -> str | None:
        """Why a slot that is given up with that *memory* should not have been; None: it was its own doing."""
        budgets = {
            FailureKind.CRASH: care.crash_budget,
            FailureKind.SETUP: care.setup_budget,
            FailureKind.STALL: STALL_BUDGET,
            FailureKind.INFRASTRUCTURE: INFRASTRUCTURE_BUDGET,
        }
        spent = [kind for kind, budget in budgets.items() if memory.counter(kind).failures > budget]
        if not spent:
            return "no budget is spent"
        row = self._rows.get(slot) or _Row(self._advances_after)
        counts = {kind: row.count(_COUNTS[kind]) for kind in spent}
        if any(count >= budgets[kind] for kind, count in counts.items()):
            return None
        told = ", ".join(f"{count} of {budgets[kind]} for {kind.value}" for kind, count in counts.items())
        return f"since a run of it advanced so many ended by themselves: {told}"
