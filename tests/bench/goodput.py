"""
Rows of placement: how much of a week a gang makes useful steps in, on measured spot capacity of nine zones.

The real engine in virtual time over the traces that are shipped (`testbed/emulator/traces`: Google Cloud H100, 7.3
days, with their licence): one gang of 16 hosts, no step before twelve minutes after its create was accepted, a
checkpoint of 30 s each 30 minutes. A change of capacity between two ticks is at an unknown instant, so that histories
differ by a seed. Goodput is the time of steps that were never made again, as a share of the window.
`goodput_table` has more windows, zones and policies beside it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from tests.bench.report import Measure
from tpucare.testbed.replay.account import Account
from tpucare.testbed.replay.recordings import cheapest_first, load_dataset
from tpucare.testbed.replay.replays import Replay, live_replays, recorded_gang

DATASET = "gcp-h100-2025"
SEEDS, ORDERS, CORES = 10, 20, 2
CHEAPEST_LIMIT = 84.0


def declared() -> tuple[str, ...]:
    """The nine zones, the cheapest first."""
    return cheapest_first(load_dataset(DATASET))


def orders(count: int) -> list[tuple[str, ...]]:
    """Random orders of declaration; the same ones each time."""
    rng, zones = random.Random("orders"), declared()
    return [tuple(rng.sample(zones, len(zones))) for _ in range(count)]


def nine_zones(seeds: int = SEEDS, some_orders: int = ORDERS, days: float | None = None) -> list[Measure]:
    def replay(zones: Sequence[str], seed: int) -> Replay:
        return recorded_gang(DATASET, zones, seed=seed, days=days)

    cheapest = [replay(declared(), seed) for seed in range(1, seeds + 1)]
    any_order = [replay(order, 1 + index % seeds) for index, order in enumerate(orders(some_orders))]
    found = live_replays([*cheapest, *any_order], CORES)
    return [
        *_measures("cheapest first", found[:seeds], CHEAPEST_LIMIT),
        *_measures(f"{some_orders} orders", found[seeds:]),
    ]


def _measures(what: str, found: Sequence[Account], limit: float | None = None) -> list[Measure]:
    spread = statistics.stdev(one.goodput for one in found) if len(found) > 1 else 0.0
    how = f"gang of 16, first step 12 min after create, saves of 30 s each 30 min; s = {spread:.1f}"
    goodput = tuple(one.goodput for one in found)
    creates = tuple(one.creates_a_day for one in found)
    return [
        Measure("9d", f"goodput on 9 measured zones, {what}", limit, "% of the window", goodput, 1, how, at_least=True),
        Measure("9d", f"creates on 9 measured zones, {what}", None, "a day", creates, 1, how),
    ]
