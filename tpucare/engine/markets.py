"""
The markets of all projects, as the slots of this engine and the other processes of the state folder know them.

On the engine's thread only. Each change of a slot's memory is read for what it tells (`planner.markets.lessons`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from tpucare.model.markets import Market
from tpucare.model.memory import Memory
from tpucare.model.ports import Clock, MarketKnowledge
from tpucare.model.resources import Slot
from tpucare.planner.markets import Sign, count_slot, learn, lessons

# Signs after which a slot that waits for a place may ask, or has to wait longer.
_TURNS = frozenset({Sign.ASKED, Sign.REFUSED, Sign.GIVEN, Sign.DIED})


class MarketBook:
    """Keeps `Market`s by project and name, and who asks and lives there."""

    def __init__(self, clock: Clock, rng: random.Random, knowledge: MarketKnowledge | None) -> None:
        self._clock, self._rng, self._knowledge = clock, rng, knowledge
        self._projects: dict[str, dict[str, Market]] = {}
        self._changed = False
        if knowledge is not None:
            for project, learned in knowledge.own().items():
                for name, experience in learned.items():
                    self._market(project, name).own = experience
            self._read_others(knowledge)

    def of(self, project: str) -> Mapping[str, Market]:
        """Markets of *project*, by name; a live view."""
        return self._projects.setdefault(project, {})

    def restore_slot(self, slot: Slot, memory: Memory) -> None:
        self._count(slot, memory, 1)

    def remove_slot(self, slot: Slot, memory: Memory) -> None:
        self._count(slot, memory, -1)

    def change_slot(self, slot: Slot, before: Memory, after: Memory) -> bool:
        """Learn from the change of a slot's memory. Returns whether it may change where waiting slots ask."""
        if before.creates is after.creates and before.nodes is after.nodes and before.places is after.places:
            if before.run is after.run:
                return False
        else:
            self._count(slot, before, -1)
            self._count(slot, after, 1)
        now, turns = self._clock.now(), False
        for lesson in lessons(before, after, now):
            market = self._market(slot.project, lesson.market)
            market.own = learn(market, lesson, now, self._rng)
            self._changed = True
            turns = turns or lesson.sign in _TURNS
        return turns or len(before.creates) > len(after.creates)

    def _read_others(self, knowledge: MarketKnowledge) -> None:
        for learned in self._projects.values():
            for market in learned.values():
                market.others = ()
        for other in knowledge.of_others():
            for project, experiences in other.items():
                for name, experience in experiences.items():
                    self._market(project, name).others += (experience,)

    def exchange(self) -> None:
        """Keep what was learned, for later and other processes, and read what those learned meanwhile."""
        if self._knowledge is None:
            return
        self._read_others(self._knowledge)
        if self._changed:
            self._changed = False
            learned = {
                project: {name: market.own for name, market in known.items() if market.own.as_of is not None}
                for project, known in self._projects.items()
            }
            self._knowledge.save(learned)

    def _market(self, project: str, name: str) -> Market:
        return self._projects.setdefault(project, {}).setdefault(name, Market())

    def _count(self, slot: Slot, memory: Memory, sign: int) -> None:
        count_slot(self._projects.setdefault(slot.project, {}), slot.name, memory, sign)
