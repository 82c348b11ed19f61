"""
When a command or a call that took slots down may end: nothing is left of them, as far as that can be looked at.

A zone that does not answer is waited for only where something of those slots is, or may be; and not for ever, since it
may never answer again. What could not be looked at stays in memory. On the thread of the loop only.
"""

from __future__ import annotations

from collections.abc import Callable

from tpucare.engine.engine import Engine
from tpucare.model.ports import Clock
from tpucare.model.resources import NodeKey, Slot
from tpucare.planner.decide import DOWN_PATIENCE, not_looked_at


class Ending:
    """
    Of the slots that are meant.

    say:  told once what is waited for, whenever that changes
    left: what could not be looked at, once it is over
    """

    def __init__(self, engine: Engine, clock: Clock, is_meant: Callable[[Slot], bool], say: Callable[[str], None]):
        self._engine, self._clock, self._is_meant, self._say = engine, clock, is_meant, say
        self._zones: dict[str, set[str]] = {}
        self._silent_since: float | None = None
        self._told: frozenset[str] = frozenset()

    @property
    def left(self) -> tuple[NodeKey, ...]:
        return tuple(key for name in self._slots() for key in self._engine.out_of_reach(name))

    def tell_left(self, name: str) -> None:
        if left := self.left:
            nodes = ", ".join(key.name for key in left)
            self._say(f"{not_looked_at(left)}: {nodes}: remembered; `tpucare down {name}` again once that is possible")

    def is_over(self) -> bool:
        """To be asked after each step of the engine."""
        engine = self._engine
        names = self._slots()
        for name in names:
            track = engine.slots[name]
            self._zones.setdefault(track.slot.project, set()).update(engine.zones_of(name))
        projects = self._zones.keys() or engine.projects.keys()
        views = [engine.projects[project] for project in projects]
        if not all(engine.is_over(name) or engine.out_of_reach(name) for name in names):
            self._silent_since = None
            return False
        if not views or not all(view.fresh for view in views):
            return False
        return self._have_answered()

    def _slots(self) -> list[str]:
        return [name for name, track in self._engine.slots.items() if self._is_meant(track.slot)]

    def _have_answered(self) -> bool:
        """Only a listing that saw a zone can say that nothing is left there, whatever its labels."""
        engine, silent = self._engine, set[str]()
        for project, view in engine.projects.items():
            zones = view.unanswered or frozenset()
            # Where memory was lost a node may be anywhere.
            silent |= zones if engine.store.lost else zones & self._zones.get(project, set())
        waits, now = frozenset(silent), self._clock.monotonic()
        if waits and waits != self._told:
            longest = f"{DOWN_PATIENCE.total_seconds():.0f} s"
            self._say(f"waiting for {', '.join(sorted(waits))}, which did not answer yet; at most {longest}")
        self._told = waits
        self._silent_since = now if self._silent_since is None else self._silent_since
        return not waits or now - self._silent_since >= DOWN_PATIENCE.total_seconds()
