"""
The true course of the runs of each slot: whether they advanced, and how they ended.

The machines know the progress of a run even if no probe has read it. From this alone follows whether a slot was rightly
given up.
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
"""A run has advanced if it lived this many seconds and two probes, and got further than any run before it."""

# The true ends that may count as each failure: a hung run was stopped for it, and anything may interrupt a run.
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
    Ends of runs since the last one that advanced, by token; the worst end of a gang counts.

    unknown: seconds of a run's life of which the daemon has lost the knowledge
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
            # Another job, which begins at its beginning.
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
    Called with every start and end of a run; a slot without a record has had no run.

    probe: seconds between probes
    """

    def __init__(self, probe: float) -> None:
        # With rare probes the daemon cannot know the last steps of a run that died with its machine.
        self._advances_after = ADVANCES_AFTER + 2 * probe
        self._rows: dict[str, _Row] = {}

    def ran(self, mark: RunMark) -> None:
        row = self._rows.setdefault(mark.slot, _Row(self._advances_after))
        if mark.what == "start":
            row.begin(mark)
        else:
            row.end(mark)

    def lose_time(self, seconds: float, slot: str = "") -> None:
        """The daemon lost the knowledge of *seconds* in the lives of the runs of *slot* (of all, when empty)."""
        for row in [self._rows[slot]] if slot in self._rows else [] if slot else self._rows.values():
            for token in row.since:
                row.unknown[token] = row.unknown.get(token, 0.0) + seconds

    def is_blameless(self, slot: str, job: str) -> bool:
        """
        True when *job*, the current one, has trained, and every end of its runs since then was due to an outage that
        concerns every run. A job that never trained may be a broken one.
        """
        row = self._rows.get(slot)
        if row is None or not row.served_job == row.job == job:
            return False
        failed = {token for token, ends in row.ends.items() if RunEnd.FAILED in ends}
        return bool(failed) and failed <= row.blameless

    def wronged(self, slot: str, memory: Memory, care: Care) -> str | None:
        """Why a slot with that *memory* should not have been given up; None: it should."""
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
