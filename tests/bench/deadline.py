"""
Deadlines on recorded capacity: what so many hours of work by a deadline cost, as a share of the same on demand.

    python -m tests.bench.deadline [--seeds N] [--engine N]

Policies without the engine, on the same capacity and the same account of boots, saves and losses as the rows of
`goodput_table`; a gang of 16 in nine zones whose work is 0.8 of the time until its deadline, which is the window's end:

    uniform progress  spot as long as the work is on the straight line to the deadline, on demand below it, back once it
                      is two boots ahead, on demand for good when no more time may be lost; places as EAGER asks them
                      (source: "Can't Be Late", NSDI '24; its multi-place variant UP(S))
    tpucare           the engine itself in virtual time, with `deadline` in its fleet; a history takes minutes
    optimum           with foresight of everything: the least cost by a Lagrange multiplier, on ticks of ten minutes
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from tests.bench.goodput import DATASET
from tpucare.model.memory import End
from tpucare.model.resources import Bounds, Care, DueWork, Provisioning
from tpucare.testbed.emulator.world.latency import around
from tpucare.testbed.replay.account import Saving
from tpucare.testbed.replay.engine import BEAT, SETUP_SECONDS, STOCKOUT, world_of_changes
from tpucare.testbed.replay.policies import DIES_WITHIN, REACTION_SECONDS, ROUND_PAUSE, SHOWN_AFTER
from tpucare.testbed.replay.recordings import Changes, at_least, changes_of, cheapest_first, load_dataset, window_of
from tpucare.testbed.simulation.campaign import workers
from tpucare.testbed.simulation.daemon import SimulatedDaemon
from tpucare.testbed.simulation.scenario import place, slots_of
from tpucare.testbed.simulation.time import START
from tpucare.testbed.simulation.workers import Script

RATIO, UNITS, KIND = 0.8, 16, "v4-128"
# Work is counted from what probes see: in `BEAT` they come each ten minutes.
PROBED = replace(BEAT, probe=60.0)
FREE, HALF_HOURLY = Saving(every=60.0, seconds=0.0), Saving()
"""No loss but the boots, as published work counts; and the saves and losses of the rows of goodput."""
TICK = 600.0


@dataclass(frozen=True, slots=True)
class Task:
    """`work` seconds within `by` seconds; prices of an hour: of spot by zone, and on demand in the cheapest zone."""

    rooms: Mapping[str, Sequence[tuple[float, float]]]
    prices: Mapping[str, float]
    on_demand: float
    work: float
    by: float
    boot: float
    saving: Saving

    @property
    def base(self) -> float:
        """Dollars of the work on demand."""
        return self.work / 3600.0 * self.on_demand

    @property
    def turn(self) -> float:
        """Seconds of training and its save."""
        return self.saving.interval(()) + self.saving.seconds


def task(dataset: str, seed: int, ratio: float = RATIO, boot: float = 720.0, saving: Saving = FREE) -> Task:
    traces = load_dataset(dataset)
    window = window_of(traces.values())
    capacity: dict[str, Changes] = {zone: changes_of(traces[zone], window, seed) for zone in cheapest_first(traces)}
    return Task(
        {zone: at_least(changes, UNITS, window.seconds) for zone, changes in capacity.items()},
        {zone: traces[zone].price or 0.0 for zone in capacity},
        min(trace.on_demand or 0.0 for trace in traces.values()),
        window.seconds * ratio,
        window.seconds,
        boot,
        saving,
    )


class UniformProgress:
    """One history; `cost` as a share of the work on demand, `late` when it missed its deadline."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.rng = task, random.Random(f"{seed}/deadline")
        self.stockout = around(STOCKOUT["median"], STOCKOUT["p95"])
        self.now, self.done, self.dollars, self.on_demand_seconds = 0.0, 0.0, 0.0, 0.0
        self._turn = 0
        self._order = cheapest_order(task)
        self._lost = ""

    @property
    def cost(self) -> float:
        return self.dollars / self.task.base

    @property
    def late(self) -> bool:
        return self.now > self.task.by + 1.0

    def run(self) -> UniformProgress:
        while self.done < self.task.work:
            if self._is_last_call():
                self._on_demand(self.task.work)
            elif self._line(self.now) > self.done:
                self._on_demand(None)
            else:
                self._ask()
        return self

    def _line(self, at: float) -> float:
        return self.task.work * min(1.0, at / self.task.by)

    def _is_last_call(self) -> bool:
        left = (self.task.work - self.done) * self.task.turn / self.task.saving.interval(())
        return self.task.by - self.now <= left + 2 * self.task.boot

    def _on_demand(self, until_done: float | None) -> None:
        """Work on demand until so much is done; None: until the line of two boots later is reached."""
        begun = self.now
        self.now += self.task.boot
        every, save = self.task.saving.interval(()), self.task.saving.seconds
        while self.done < self.task.work:
            if until_done is None and self.done >= self._line(self.now + 2 * self.task.boot):
                if not self._is_last_call():
                    break
                until_done = self.task.work
            step = min(60.0, self.task.work - self.done)
            self.now += step * (every + save) / every
            self.done += step
        self.now += save
        self._pay(self.now - begun, self.task.on_demand)
        self.on_demand_seconds += self.now - begun

    def _pay(self, seconds: float, price: float) -> None:
        self.dollars += seconds / 3600.0 * price

    def _ask(self) -> None:
        order = sorted(self._order, key=lambda zone: zone.rpartition("-")[0] == self._lost.rpartition("-")[0])
        if self._turn >= len(order):
            self._turn, self.now = 0, self.now + ROUND_PAUSE
            return
        zone = order[self._turn]
        self._turn += 1
        ends = next((end for begin, end in self.task.rooms[zone] if begin <= self.now < end), None)
        if ends is None:
            self.now += self.stockout.draw(self.rng) + REACTION_SECONDS
            return
        self._turn, self._lost = 0, zone
        self._live(zone, ends)

    def _live(self, zone: str, ends: float) -> None:
        """Live on spot until it is lost, the work is done, or the last call comes."""
        begun, trains = self.now, self.now + self.task.boot
        every, save = self.task.saving.interval(()), self.task.saving.seconds
        lost = min(ends + self.rng.random() * DIES_WITHIN, self.task.by)
        saved = self.done
        self.now = min(trains, lost)
        while self.now < lost:
            need = self.task.work - saved
            part = min(every, need)
            if self.now + part + save > lost:
                self.now = lost
                break
            self.now += part + save
            saved += part
            self.done = saved
            if saved >= self.task.work or self._is_last_call():
                self._pay(self.now - begun, self.task.prices[zone])
                return
        self._pay(lost - begun, self.task.prices[zone])
        self.now = lost + SHOWN_AFTER + REACTION_SECONDS


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lived:
    """cost: as a share of the work on demand    on_demand_hours: of nodes"""

    cost: float
    late: bool
    on_demand_hours: float


def live_by_engine(seed: int, saving: Saving = FREE, ratio: float = RATIO) -> Lived:
    """One history of the engine, with the same work, capacity and prices."""
    one, traces = task(DATASET, seed, ratio, saving=saving), load_dataset(DATASET)
    zones, window = cheapest_first(traces), window_of(traces.values())
    backup = min(zones, key=lambda zone: (traces[zone].on_demand or math.inf, zone))
    spot = [replace(place(zone, KIND, UNITS), price=one.prices[zone]) for zone in zones]
    on_demand = replace(place(backup, KIND, UNITS, Provisioning.ON_DEMAND), price=one.on_demand, entry=1)
    every, hours = saving.interval(()), one.work / 3600.0
    due = Bounds(deadline=DueWork(hours * one.turn / every, START + timedelta(seconds=one.by)))
    slots = [replace(slot, bounds=due) for slot in slots_of("gang", 1, *spot, on_demand, care=Care())]
    script = Script(SETUP_SECONDS, step_seconds=one.turn / every, save_every=round(every), steps=round(one.work))
    capacity = {zone: changes_of(traces[zone], window, seed) for zone in zones}
    daemon = SimulatedDaemon(config=world_of_changes(capacity, one.boot), seed=seed, script=script, settings=PROBED)
    held: dict[str, list[float]] = {}

    def audited(record: Mapping[str, Any]) -> None:
        if record["kind"] != "node":
            return
        at, key = (datetime.fromisoformat(record["at"]) - START).total_seconds(), f"{record['name']}/{record['id']}"
        if record["event"] == "created":
            price = one.on_demand if record["tier"] == "on-demand" else one.prices[record["name"].split("/")[3]]
            held[key] = [price, at]
        elif record["event"] == "failed":
            del held[key]
        elif record["event"] in ("preempted", "deleting", "gone") and len(held.get(key, ())) == 2:
            held[key].append(at)

    daemon.launcher.keep_history = False
    daemon.zone.world.on_audit(audited, keep=False)
    daemon.listen = lambda _event: None
    daemon.start()
    daemon.care_for_slots("gang", slots)
    while daemon.engine.slots["gang-0"].memory.end is End.NONE and daemon.clock.seconds < 1.5 * one.by:
        daemon.executor.sleep(timedelta(seconds=max(0.001, daemon.engine.step())))
    now = daemon.clock.seconds
    daemon.kill()
    lives = [(price, (ends[0] if ends else now) - begun) for price, begun, *ends in held.values()]
    dollars = sum(price * seconds / 3600.0 for price, seconds in lives)
    on_demand_hours = sum(seconds for price, seconds in lives if price == one.on_demand) / 3600.0
    return Lived(dollars / one.base, now > one.by, on_demand_hours)


def live_histories(seeds: Sequence[int], saving: Saving = FREE, ratio: float = RATIO, jobs: int = 2) -> list[Lived]:
    with workers(jobs) as pool:
        return list(pool.map(live_by_engine, seeds, [saving] * len(seeds), [ratio] * len(seeds)))


def cheapest_order(task: Task) -> list[str]:
    return sorted(task.rooms, key=lambda zone: (task.prices[zone], zone))


def optimum(task: Task) -> float:
    """The least cost as a share of the work on demand; saves and losses cost nothing but the boots."""
    ticks = int(task.by // TICK)
    is_open = {zone: _open_ticks(task.rooms.get(zone), ticks) for zone in [*task.rooms, ""]}
    low, high = 0.0, 4 * task.on_demand
    best = float("inf")
    for _ in range(40):
        worth = (low + high) / 2
        work, dollars = _plan(task, worth, is_open)
        if work >= task.work:
            best, high = min(best, dollars * task.work / work / task.base), worth
        else:
            low = worth
    return best


def _plan(task: Task, worth: float, is_open: Mapping[str, Sequence[bool]]) -> tuple[float, float]:
    """
    (work, dollars) of the plan that earns most when an hour of work is worth so many dollars.

    is_open: by place, the empty one on demand, whether a node can live there, for each tick
    """
    share = task.saving.interval(()) / task.turn
    places = list(is_open)
    price = {**task.prices, "": task.on_demand}
    hours = TICK / 3600.0
    # By state (a place, or None): what is earned at best from there on, and the (work, dollars) of that plan.
    nothing = (0.0, 0.0, 0.0)
    after: dict[str | None, tuple[float, float, float]] = dict.fromkeys([*places, None], nothing)
    for tick in reversed(range(len(is_open[""]))):
        now: dict[str | None, tuple[float, float, float]] = {}
        fresh: dict[str, tuple[float, float, float]] = {}
        for zone in places:
            if not is_open[zone][tick]:
                continue
            earned, work, dollars = after[zone]
            gain, paid = hours * share, hours * price[zone]
            held = (earned + worth * gain - paid, work + gain, dollars + paid)
            now[zone] = held
            lost = task.boot / 3600.0 * share
            fresh[zone] = (held[0] - worth * lost, held[1] - lost, held[2])
        idle = max([after[None], *fresh.values()])
        for zone in places:
            now[zone] = max(now.get(zone, idle), idle)
        now[None] = idle
        after = now
    _, work, dollars = after[None]
    return work * 3600.0, dollars


def _open_ticks(rooms: Sequence[tuple[float, float]] | None, ticks: int) -> list[bool]:
    if rooms is None:
        return [True] * ticks
    middles = ((tick + 0.5) * TICK for tick in range(ticks))
    return [any(begin <= middle < end for begin, end in rooms) for middle in middles]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.deadline", description="Cost of work by a deadline.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ratio", type=float, default=RATIO, help="work as a share of the time until the deadline")
    parser.add_argument("--engine", type=int, default=0, metavar="N", help="histories of the engine; default: none")
    chosen = parser.parse_args()
    for name, saving in {"no loss but boots": FREE, "saves of 30 s each 30 min": HALF_HOURLY}.items():
        print(name)
        _show([task(DATASET, seed, chosen.ratio, saving=saving) for seed in range(1, chosen.seeds + 1)])
        if chosen.engine:
            lived = live_histories(range(1, chosen.engine + 1), saving, chosen.ratio)
            hours, late = statistics.mean(one.on_demand_hours for one in lived), sum(one.late for one in lived)
            told = _told([one.cost for one in lived])
            print(f"  tpucare {told}, {hours:.1f} h on demand, {late} of {len(lived)} late")
    return 0


def _show(tasks: Sequence[Task]) -> None:
    lived = [UniformProgress(one, seed).run() for seed, one in enumerate(tasks, 1)]
    costs = [one.cost for one in lived]
    late, on_demand = sum(one.late for one in lived), statistics.mean(one.on_demand_seconds for one in lived) / 3600
    print(f"  uniform progress {_told(costs)}, {on_demand:.1f} h on demand, {late} of {len(lived)} late")
    print(f"  optimum {_told([optimum(one) for one in tasks[:3]])}")


def _told(costs: Sequence[float]) -> str:
    deviation = statistics.stdev(costs) if len(costs) > 1 else 0.0
    return f"{statistics.mean(costs):.3f} of on demand (sd {deviation:.3f}, {min(costs):.3f} to {max(costs):.3f})"


if __name__ == "__main__":
    sys.exit(main())
