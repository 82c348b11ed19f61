"""
Many histories: seeds over processes, their sums, and the report of them.

Each history runs in one process; the same seeds give the same campaign, in whichever order they end.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tpucare.model.resources import Slot
from tpucare.model.text import counted
from tpucare.testbed.simulation.faults import EMERGENT, FAULTS
from tpucare.testbed.simulation.history import History, HistoryOutcome
from tpucare.testbed.simulation.queues import with_queues
from tpucare.testbed.simulation.scenario import CLOSE, MONTHS, WEEKS, Pace, Scenario, draw, month_slots, storm_slots
from tpucare.testbed.simulation.tally import PHASES, Tally

MONTH_LIFETIME: Mapping[str, str] = {"median": "3d", "p95": "16d"}
WEEKS_BEGIN = 3.0
MANY_SLOTS = 50
"""Longer histories, and those of more slots, use the pace of months unless the plan names another."""


@dataclass(frozen=True, slots=True)
class Plan:
    """
    The common settings of a campaign's histories. `slots` empty: those of storms, or `count` equal ones.

    world: as in a file of `tpucare emulator`; None: drawn from the seed
    queued: most fleets stand in queues, as drawn from the seed
    """

    days: float
    level: str
    slots: tuple[Slot, ...] = ()
    count: int = 0
    world: Mapping[str, Any] | None = None
    pace: Pace | None = None
    queued: bool = False

    def every_slot(self) -> tuple[Slot, ...]:
        return self.slots or (month_slots(self.count) if self.count else storm_slots())

    def beat(self) -> Pace:
        """The pace that is named, or the one for so many days and slots."""
        few = len(self.every_slot()) < MANY_SLOTS
        return self.pace or (CLOSE if self.days < WEEKS_BEGIN else WEEKS if few else MONTHS)

    def scenario(self, seed: int) -> Scenario:
        slots, pace = self.every_slot(), self.beat()
        slots = with_queues(seed, slots) if self.queued else slots
        lifetime = None if pace.close else MONTH_LIFETIME
        return draw(seed, slots, days=self.days, level=self.level, pace=pace, world=self.world, lifetime=lifetime)


def live(plan: Plan, seed: int, remember: int = 0, on_way: Callable[[float], None] = lambda _: None) -> HistoryOutcome:
    """Run one history; *plan* and *seed* are all that it needs, so that it can run in another process."""
    # `history` collects cycles now and then instead.
    with collector_off():
        return History(plan.scenario(seed), remember=remember, on_way=on_way).run()


def campaign(
    plan: Plan, seeds: Sequence[int], jobs: int = 1, on_way: Callable[[float], None] = lambda _: None
) -> Iterator[HistoryOutcome]:
    """
    Yield outcomes as histories end. With one job they run in this process in the order of seeds, with progress reports.

    The processes of several jobs end as soon as the caller stops iterating or dies.
    """
    if jobs <= 1 or len(seeds) == 1:
        for seed in seeds:
            yield live(plan, seed, on_way=on_way)
        return
    with workers(jobs) as pool:
        under_way = {pool.submit(live, plan, seed) for seed in seeds}
        for ended in as_completed(under_way):
            yield ended.result()


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes, which end as soon as the block raises or this process dies."""
    context = multiprocessing.get_context("forkserver")
    held, line = context.Pipe(duplex=False)
    with line, held, ProcessPoolExecutor(jobs, context, initializer=_end_with, initargs=(held,)) as pool:
        try:
            yield pool
        except BaseException:
            line.close()
            raise


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch the collector of reference cycles off for the block."""
    # A history makes millions of small records that reference counts free; scanning the living ones takes an eighth of
    # its time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end_with(held: Connection) -> None:
    """End this process when the other end of the connection is closed: by the parent, or by the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent ends this one

    def watch() -> None:
        wait([held])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(slots=True)
class Sums:
    """A campaign in figures; `failed` by seed."""

    histories: int = 0
    tally: Tally = field(default_factory=Tally)
    failed: dict[int, HistoryOutcome] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: HistoryOutcome) -> None:
        self.histories += 1
        self.tally.add(outcome.tally)
        self.digests[outcome.seed] = outcome.digest
        if outcome.broken:
            self.failed[outcome.seed] = outcome

    @property
    def clean(self) -> bool:
        return not self.failed

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "clean": self.clean,
            "histories": self.histories,
            "node_days": round(tally.node_days, 1),
            "node_hours": round(tally.node_hours, 1),
            "availability": round(tally.availability, 4),
            "goodput": round(tally.goodput, 4),
            "launches": tally.launches,
            "creates": tally.creates,
            "steps": tally.steps,
            "restarts": tally.restarts,
            "phases": {name: round(_mean(tally, name), 1) for name in PHASES if name in tally.phases},
            "settled_share_of_bound": round(max(tally.settled, default=0.0), 3),
            "apart": dict(sorted(tally.apart.items())),
            "faults": {kind: tally.faults[kind] for kind in (*FAULTS, *EMERGENT) if tally.faults[kind]},
            "broken": {
                str(seed): [{"rule": b.rule, "seconds": b.seconds, "text": b.text} for b in outcome.broken]
                for seed, outcome in sorted(self.failed.items())
            },
        }

    def lines(self) -> list[str]:
        tally, told = self.tally, []
        verdict = "no promise was broken" if self.clean else f"{len(self.failed)} of {self.histories} broke a promise"
        histories = counted(self.histories, "history", "histories")
        told.append(f"{histories}, {tally.node_days:,.0f} node-days: {verdict}")
        hours = f"{tally.node_hours:,.0f} node-hours READY"
        told.append(f"availability {tally.availability:.1%}, goodput {tally.goodput:.1%}, {hours}")
        calls = counted(tally.creates, "create call")
        told.append(f"{counted(tally.launches, 'launch', 'launches')}, {calls}")
        told.append(f"{counted(tally.steps, 'step')}, {counted(tally.restarts, 'process', 'processes')}")
        phases = ", ".join(f"{name} {_mean(tally, name):,.0f} s" for name in PHASES if name in tally.phases)
        told.append(f"of a recovery, on average: {phases or 'there was none'}")
        if tally.settled:
            told.append(f"after calm all trained within {max(tally.settled):.0%} of their bound at the latest")
        apart = ", ".join(f"{count} {what}" for what, count in sorted(tally.apart.items()))
        if apart:
            told.append(f"counted apart: {apart}")
        counts = [f"{kind} {tally.faults[kind]:,}" for kind in (*FAULTS, *EMERGENT) if tally.faults[kind]]
        if counts:
            told.append("faults: " + ", ".join(counts))
        return told


def _mean(tally: Tally, phase: str) -> float:
    seconds, count = tally.phases.get(phase, (0.0, 0))
    return seconds / count if count else 0.0
