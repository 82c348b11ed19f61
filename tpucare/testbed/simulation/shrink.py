"""
Finds a shorter story that still breaks the property, by leaving out strikes, slots and days.

Greedy: halves before quarters before single strikes. Every try is a whole history, so the number of tries is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpucare.testbed.simulation.history import History, HistoryOutcome
from tpucare.testbed.simulation.scenario import Scenario

TRIES = 60


@dataclass(slots=True)
class Shrunk:
    """The shortest scenario found, and the outcome of its history."""

    scenario: Scenario
    outcome: HistoryOutcome
    tries: int


def lived(scenario: Scenario) -> HistoryOutcome:
    return History(scenario).run()


def shrink(
    scenario: Scenario, outcome: HistoryOutcome, live: Callable[[Scenario], HistoryOutcome] = lived, tries: int = TRIES
) -> Shrunk:
    """Shrink *scenario*, whose *outcome* has a broken property. Runs at most *tries* histories."""
    search = _Search(scenario, outcome, live, tries)
    search.shorten()
    search.drop_strikes()
    search.drop_slots()
    search.drop_strikes()
    search.shorten()
    return Shrunk(search.scenario, search.outcome, search.tries)


class _Search:
    def __init__(
        self, scenario: Scenario, outcome: HistoryOutcome, live: Callable[[Scenario], HistoryOutcome], allowed: int
    ) -> None:
        self.scenario = scenario
        self.outcome = outcome
        self.rule = outcome.broken[0].rule
        self.tries = 0
        self._live = live
        self._allowed = allowed

    def _still_breaks(self, scenario: Scenario) -> bool:
        """True when *scenario* breaks the same property; it then replaces the one to shrink."""
        if self.tries >= self._allowed:
            return False
        self.tries += 1
        outcome = self._live(scenario)
        if not any(broken.rule == self.rule for broken in outcome.broken):
            return False
        self.scenario, self.outcome = scenario, outcome
        return True

    def shorten(self) -> None:
        """End the history when the property broke; if it broke in the calm, begin the calm after the last strike."""
        broke = self.outcome.broken[0].seconds / 86400.0
        last = max((one.at for one in self.scenario.strikes), default=0.0) / 86400.0
        for days in sorted({broke * 1.0001, last + 0.01}):
            if days < self.scenario.days * 0.99:
                strikes = tuple(one for one in self.scenario.strikes if one.at <= days * 86400.0)
                if self._still_breaks(replace(self.scenario, days=days, strikes=strikes)):
                    return

    def drop_strikes(self) -> None:
        size = max(1, len(self.scenario.strikes) // 2)
        while self.tries < self._allowed and self.scenario.strikes:
            if not self._drop_chunks(size):
                if size == 1:
                    return
                size //= 2

    def _drop_chunks(self, size: int) -> bool:
        """Try once to leave out each chunk of *size* strikes; True when a chunk was left out."""
        start, dropped = 0, False
        while start < len(self.scenario.strikes):
            if self._still_breaks(self.scenario.without(range(start, start + size))):
                dropped = True
            else:
                start += size
        return dropped

    def drop_slots(self) -> None:
        for slot in list(self.scenario.slots):
            names = [other.name for other in self.scenario.slots if other.name != slot.name]
            if names:
                self._still_breaks(self.scenario.of_slots(names))


def tell(shrunk: Shrunk, lines: int = 40) -> Sequence[str]:
    """The story for a person: its strikes, and the last lines of its log."""
    strikes = shrunk.scenario.strikes
    told = [f"  {one.at:>10.0f} s  {one.kind} {one.target} {one.length or ''}".rstrip() for one in strikes]
    return [f"slots: {', '.join(slot.name for slot in shrunk.scenario.slots)}", *told, *shrunk.outcome.told[-lines:]]
