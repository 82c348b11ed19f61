"""
Policies to compare with, without the engine: who holds no node asks one place after another, by a rule of its own.

They meet the same capacity, stockouts of the same lengths and nodes of the same boot time as the engine, and see the
loss of a node when the API shows it.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tpucare.model.accelerators import region_of
from tpucare.model.resources import Slot
from tpucare.testbed.emulator.world.latency import around
from tpucare.testbed.replay.account import Ask, Held, SlotLog
from tpucare.testbed.replay.engine import STOCKOUT, spot_zones
from tpucare.testbed.replay.recordings import Changes

REACTION_SECONDS = 1.0
"""From the news of a loss or a stockout to the next create."""
SHOWN_AFTER = 30.0
"""As in a calm world: from the death of a node until the API shows it."""
DIES_WITHIN = 60.0
"""As in the emulated world: nodes that lose their capacity die within this length."""
ROUND_PAUSE = 60.0
ROUND_PAUSE_GROWTH, ROUND_PAUSE_LONGEST = 1.6, 300.0


@dataclass(frozen=True, slots=True)
class PolicyView:
    """
    What a policy may look at.

    room_left: seconds for which a zone goes on to have room for one more node; 0: none now. Only an oracle knows
    """

    now: float
    zones: tuple[str, ...]
    prices: Mapping[str, float | None]
    first_step_seconds: float
    room_left: Callable[[str], float]
    next_change: Callable[[], float]


@dataclass(slots=True)
class Habits:
    """What one slot's policy remembers: places asked since the last node, the last place, where the last node was."""

    asked: list[str] = field(default_factory=list)
    last_asked: str = ""
    last_node: str = ""
    rounds: int = 0


Policy = Callable[[PolicyView, Habits], str | float]
"""The zone to ask now, or the instant at which to decide again."""


def ordered(view: PolicyView, habits: Habits) -> str | float:
    """The declared places from the first to the last, a minute's pause, and again; after each loss from the first."""
    left = [zone for zone in view.zones if zone not in habits.asked]
    return left[0] if left else view.now + ROUND_PAUSE


def round_robin(view: PolicyView, habits: Habits) -> str | float:
    """The declared places in a circle: the next after the one asked last, also after a loss."""
    if len(habits.asked) >= len(view.zones):
        return view.now + ROUND_PAUSE
    after = view.zones.index(habits.last_asked) + 1 if habits.last_asked in view.zones else 0
    return view.zones[after % len(view.zones)]


def eager(view: PolicyView, habits: Habits) -> str | float:
    """
    Stay until preempted; then the cheapest places first, those of the lost node's region last; pause when all refused.

    Source: SkyPilot's managed jobs, recovery strategy EAGER_NEXT_REGION.
    """
    lost = region_of(habits.last_node) if habits.last_node else ""

    def turn(zone: str) -> tuple[bool, float, int]:
        price = view.prices.get(zone)
        return region_of(zone) == lost, math.inf if price is None else price, view.zones.index(zone)

    left = [zone for zone in sorted(view.zones, key=turn) if zone not in habits.asked]
    if left:
        return left[0]
    return view.now + min(ROUND_PAUSE_LONGEST, ROUND_PAUSE * ROUND_PAUSE_GROWTH**habits.rounds)


def oracle(view: PolicyView, habits: Habits) -> str | float:
    """With foresight of one life: the place whose room lasts longest, and none whose room is too short for a step."""
    del habits
    left, best = max(((view.room_left(zone), zone) for zone in view.zones), default=(0.0, ""))
    return best if left > view.first_step_seconds else view.next_change()


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"ordered": ordered, "round robin": round_robin, "EAGER": eager, "oracle": oracle}
)


@dataclass(slots=True)
class _Zone:
    """The room of a zone, as it is at `at`."""

    changes: Changes
    times: list[float]
    used: dict[int, int] = field(default_factory=dict)

    def amount(self, now: float) -> int:
        return self.changes[max(0, bisect_right(self.times, now) - 1)][1]

    def has_room(self, units: int, now: float) -> bool:
        return self.amount(now) - sum(self.used.values()) >= units

    def room_left(self, units: int, now: float) -> float:
        wanted = units + sum(self.used.values())
        index = max(0, bisect_right(self.times, now) - 1)
        if self.changes[index][1] < wanted:
            return 0.0
        short = next((at for at, amount in self.changes[index + 1 :] if amount < wanted), math.inf)
        return short - now


class PolicyLife:
    """One history of some slots under a policy; `run` lives it for *seconds*, and gives the log of each slot."""

    def __init__(
        self,
        policy: Policy,
        slots: Sequence[Slot],
        capacity: Mapping[str, Changes],
        prices: Mapping[str, float | None],
        *,
        seconds: float,
        seed: int,
        first_step_seconds: float,
    ) -> None:
        self.policy, self.slots, self.prices = policy, slots, prices
        self.seconds, self.first_step = seconds, first_step_seconds
        self.logs = {slot.name: SlotLog(spot_zones(slot)) for slot in slots}
        self.habits = [Habits() for _ in slots]
        self.zones = {zone: _Zone(changes, [at for at, _ in changes]) for zone, changes in capacity.items()}
        self.all_times = sorted({at for zone in self.zones.values() for at in zone.times})
        self.rng = random.Random(f"{seed}/policy")
        self.stockout = around(STOCKOUT["median"], STOCKOUT["p95"])
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def run(self) -> dict[str, SlotLog]:
        for zone, room in self.zones.items():
            for at in room.times[1:]:
                self.at(at, lambda zone=zone: self._shrink(zone))  # type: ignore[misc]
        for index in range(len(self.slots)):
            self._decide_at(0.0, index)
        while self._events and self._events[0][0] < self.seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        for log in self.logs.values():
            for held in log.held:
                if held.until > self.seconds:
                    held.until, held.lost = self.seconds, False
        return self.logs

    def _decide_at(self, when: float, index: int) -> None:
        self.at(when, lambda: self._decide(index))

    def _decide(self, index: int) -> None:
        slot, habits = self.slots[index], self.habits[index]
        log = self.logs[slot.name]
        units = {place.zone: place.workers for place in reversed(slot.places)}
        view = PolicyView(
            self.now,
            log.zones,
            self.prices,
            self.first_step,
            lambda zone: self.zones[zone].room_left(units[zone], self.now),
            lambda: (
                self.all_times[bisect_right(self.all_times, self.now)] if self.now < self.all_times[-1] else math.inf
            ),
        )
        chosen = self.policy(view, habits)
        if isinstance(chosen, float):
            habits.asked, habits.rounds = [], habits.rounds + 1
            self._decide_at(chosen, index)
            return
        habits.asked.append(chosen)
        habits.last_asked = chosen
        room = self.zones[chosen]
        if not room.has_room(units[chosen], self.now):
            told = self.now + self.stockout.draw(self.rng)
            log.asks.append(Ask(chosen, self.now, told))
            self._decide_at(told + REACTION_SECONDS, index)
            return
        held = Held(chosen, self.now, units[chosen], trains=self.now + self.first_step, price=self.prices.get(chosen))
        log.held.append(held)
        room.used[index] = units[chosen]
        habits.asked, habits.last_node, habits.rounds = [], chosen, 0

    def _shrink(self, zone: str) -> None:
        """Take nodes away, chosen by chance, until the rest fits."""
        room = self.zones[zone]
        holders = list(room.used)
        self.rng.shuffle(holders)
        for index in holders:
            if sum(room.used.values()) <= room.amount(self.now):
                return
            del room.used[index]
            held = self.logs[self.slots[index].name].held[-1]
            held.freed, held.until = self.now, self.now + self.rng.random() * DIES_WITHIN
            held.shown = held.until + SHOWN_AFTER
            self._decide_at(held.shown + REACTION_SECONDS, index)
