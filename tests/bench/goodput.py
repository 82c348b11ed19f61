"""
Row of placement: how much of a week a gang makes useful steps in, on measured spot capacity of nine zones.

The real engine in virtual time over the traces that are shipped (`testbed/emulator/traces`: Google Cloud H100, 7.3
days, with their licence): one gang of 16 hosts, no step before twelve minutes after its create was accepted, a
checkpoint of 30 s each 30 minutes. A change of capacity between two ticks is at an unknown instant, so that histories
differ by a seed. Goodput is the time of steps that were never made again, as a share of the window.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.bench.report import Measure
from tests.kits.harness import ObservedDaemon
from tpucare.engine.engine import Settings
from tpucare.model.resources import Care
from tpucare.testbed.emulator.world.capacity import load_trace
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.simulation.machines import RunMark, Script
from tpucare.testbed.simulation.scenario import place, slots_of

DATASET = "gcp-h100-2025"
CHEAPEST_FIRST = (
    "us-east4-a",
    "europe-west1-c",
    "us-central1-a",
    "us-central1-b",
    "us-central1-c",
    "us-west1-a",
    "us-west1-b",
    "asia-southeast1-b",
    "asia-southeast1-c",
)
GANG, HOSTS = "v4-128", 16
FIRST_STEP_SECONDS, SETUP_SECONDS = 12 * 60.0, 20.0
SAVE_EVERY_SECONDS, SAVE_SECONDS = 30 * 60.0, 30.0
STOCKOUT = {"median": 40, "p95": 90}
SEEDS, ORDERS, CORES = 10, 20, 2
CHEAPEST_LIMIT = 84.0
# A quiet gang is looked at each 30 s; a worker that dies hangs up, so that its node is looked at once.
BEAT = Settings(poll=30.0, fast_poll=1.0, probe=600.0, fast_probe=1.0)


@dataclass(frozen=True, slots=True)
class Week:
    """A history: places in that order, and the seed of what is unknown; `days` of the window, None = the trace."""

    zones: tuple[str, ...]
    seed: int
    days: float | None = None


@dataclass(slots=True)
class Ledger:
    """
    What a gang's runs came to. Seconds; `useful`: of steps that were never made again; `accepted`: creates.

    A run trains and saves in turns, and one that dies has only what was saved.
    """

    useful: float = 0.0
    accepted: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    _since: float | None = None

    def ran(self, mark: RunMark) -> None:
        if mark.what == "start" and mark.worker == 0:
            self._since = mark.seconds + SETUP_SECONDS
        elif mark.what == "end":
            self._end(mark.seconds, saved_only=True)

    def close(self, now: float) -> None:
        self._end(now, saved_only=False)

    def _end(self, now: float, *, saved_only: bool) -> None:
        if self._since is None:
            return
        turns, rest = divmod(max(0.0, now - self._since), SAVE_EVERY_SECONDS + SAVE_SECONDS)
        self.useful += turns * SAVE_EVERY_SECONDS + (0.0 if saved_only else min(rest, SAVE_EVERY_SECONDS))
        self._since = None

    def audited(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "call" and record["method"] == "CreateNode":
            zone = str(record["name"]).split("/")[3]
            self.asked[zone] = self.asked.get(zone, 0) + 1


@dataclass(frozen=True, slots=True)
class Found:
    """Percent of the window, creates a day, and how often each zone was asked."""

    goodput: float
    creates: float
    asked: Mapping[str, int]


def world_of(zones: Iterable[str]) -> WorldConfig:
    lengths = {"create_slice": FIRST_STEP_SECONDS - SETUP_SECONDS, "boot_late": 0.0, "stockout": STOCKOUT}
    pools = {zone: {"accelerators": ["*"], "capacity": [{"trace": f"{DATASET}/{zone}"}]} for zone in zones}
    return WorldConfig.calm(zones=pools, latencies=lengths, rates={"create": None}, audit_reads=False)


def live(week: Week) -> Found:
    daemon = ObservedDaemon(
        config=world_of(week.zones), seed=week.seed, script=Script(setup_seconds=SETUP_SECONDS), settings=BEAT
    )
    ledger = Ledger()
    daemon.launcher.keep_history = False
    daemon.launcher.on_run = ledger.ran
    daemon.zone.world.on_audit(ledger.audited, keep=False)
    daemon.listen = lambda _event: None
    daemon.start()
    places = tuple(place(zone, GANG, HOSTS) for zone in week.zones)
    daemon.care_for_slots("gang", list(slots_of("gang", 1, *places, care=Care())))
    trace = load_trace(f"{DATASET}/{week.zones[0]}")
    days = week.days or len(trace.ticks) * trace.interval.total_seconds() / 86400.0
    daemon.run(days=days)
    ledger.close(daemon.clock.seconds)
    daemon.kill()
    return Found(100.0 * ledger.useful / (days * 86400.0), sum(ledger.asked.values()) / days, ledger.asked)


def orders(count: int) -> list[tuple[str, ...]]:
    """Random orders of declaration; the same ones each time."""
    rng = random.Random("orders")
    return [tuple(rng.sample(CHEAPEST_FIRST, len(CHEAPEST_FIRST))) for _ in range(count)]


def nine_zones(seeds: int = SEEDS, some_orders: int = ORDERS) -> list[Measure]:
    cheapest = [Week(CHEAPEST_FIRST, seed) for seed in range(1, seeds + 1)]
    any_order = [Week(order, 1 + index % seeds) for index, order in enumerate(orders(some_orders))]
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("forkserver")) as pool:
        found = list(pool.map(live, [*cheapest, *any_order]))
    return [
        *_measures("cheapest first", found[:seeds], CHEAPEST_LIMIT),
        *_measures(f"{some_orders} orders", found[seeds:]),
    ]


def _measures(what: str, found: Sequence[Found], limit: float | None = None) -> list[Measure]:
    spread = statistics.stdev(one.goodput for one in found) if len(found) > 1 else 0.0
    how = f"gang of {HOSTS}, first step 12 min after create, saves of 30 s each 30 min; s = {spread:.1f}"
    goodput = tuple(one.goodput for one in found)
    creates = tuple(one.creates for one in found)
    return [
        Measure("9d", f"goodput on 9 measured zones, {what}", limit, "% of the window", goodput, 1, how, at_least=True),
        Measure("9d", f"creates on 9 measured zones, {what}", None, "a day", creates, 1, how),
    ]
