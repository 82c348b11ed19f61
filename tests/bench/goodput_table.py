"""
    python -m tests.bench.goodput_table [ROW ...] [--policy NAME ...] [--seeds N] [--traces DIR] [--jobs N]

The engine on recorded capacity, and policies beside it: one line for each row and policy, with the spread over its
histories, where time was lost, and how long capacity was there before a create was accepted. Rows:

    orders    9 zones, 20 random orders of declaration       cheapest  9 zones, cheapest first
    halves    one half judged, the other one lived before    short     5 min to the first step, Daly, saves of 5 s
    triples   each set of 3 zones                            single    each zone alone
    eight     8 slots of 2 hosts, random orders

The policy `tpucare` is the engine itself; of the other ones see `testbed/replay/policies.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.goodput import CORES, DATASET, orders
from tpucare.testbed.replay.account import Saving
from tpucare.testbed.replay.policies import POLICIES
from tpucare.testbed.replay.recordings import cheapest_first, load_dataset
from tpucare.testbed.replay.replays import ENGINE, Replay, gang, live_replays, recorded_gang
from tpucare.testbed.replay.report import Figures, Spread, figures_of

SHORT = {"first_step_seconds": 5 * 60.0, "saving": Saving(every=None, seconds=5.0)}
Row = Callable[[str, int], list[Replay]]
"""The histories of a row, from the dataset and the number of seeds."""


def any_order(dataset: str, seeds: int, **settings: Any) -> list[Replay]:
    zones = cheapest_first(load_dataset(dataset))
    drawn = orders(2 * seeds) if dataset == DATASET else [zones] * (2 * seeds)
    return [recorded_gang(dataset, order, seed=1 + index % seeds, **settings) for index, order in enumerate(drawn)]


def cheapest(dataset: str, seeds: int) -> list[Replay]:
    zones = cheapest_first(load_dataset(dataset))
    return [recorded_gang(dataset, zones, seed=seed) for seed in range(1, seeds + 1)]


def some(count: int) -> Row:
    """Every set of so many zones, in declared order cheapest first; a seed for each set, or several for single ones."""

    def row(dataset: str, seeds: int) -> list[Replay]:
        sets = itertools.combinations(cheapest_first(load_dataset(dataset)), count)
        each = max(1, seeds // 3) if count == 1 else 1
        return [
            recorded_gang(dataset, zones, seed=1 + (index + seed) % 10)
            for index, zones in enumerate(sets)
            for seed in range(each)
        ]

    return row


def eight(dataset: str, seeds: int) -> list[Replay]:
    traces = load_dataset(dataset)
    drawn = orders(seeds)
    return [
        Replay(gang(order, "v4-16", 2, count=8), {zone: traces[zone] for zone in order}, seed=1 + index)
        for index, order in enumerate(drawn)
    ]


ROWS: Mapping[str, Row] = {
    "orders": any_order,
    "cheapest": cheapest,
    "second half": lambda dataset, seeds: any_order(dataset, seeds, window="second half after the first"),
    "first half": lambda dataset, seeds: any_order(dataset, seeds, window="first half after the second"),
    "second half, no experience": lambda dataset, seeds: any_order(dataset, seeds, window="second half"),
    "first half, no experience": lambda dataset, seeds: any_order(dataset, seeds, window="first half"),
    "short": lambda dataset, seeds: any_order(dataset, seeds, **SHORT),
    "triples": some(3),
    "single": some(1),
    "eight": eight,
}
ALIASES = {"halves": [name for name in ROWS if "half" in name]}


def spread(found: Spread | None) -> str:
    return f"{found.mean:.2f} (sd {found.deviation:.2f}, {found.least:.2f} to {found.most:.2f})" if found else "-"


def lines(name: str, policy: str, found: Figures) -> list[str]:
    accept = " / ".join(f"{value:.1f}" for value in found.accept)
    own = " / ".join(f"{value:.0f}" for value in found.own_pause)
    lost = ", ".join(f"{kind} {value:.1f}" for kind, value in found.lost.items())
    return [
        f"{name}, {policy}, n = {found.histories}",
        f"  goodput {spread(found.goodput)} %, creates a day {spread(found.creates)}, $ {spread(found.dollars)}",
        f"  room to accepted, min p50/p90/p99 {accept}; our own pause where a place moved lately, s p50/p99/max {own}",
        f"  lost, %: {lost}; left out for at most {found.left_out} creates elsewhere",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.goodput_table", description="Goodput on recordings.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join((*ROWS, *ALIASES))}; default: all")
    parser.add_argument("--policy", action="append", help=f"of {', '.join((ENGINE, *POLICIES))}; default: {ENGINE}")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--traces", default=DATASET, help="a shipped dataset or a folder")
    parser.add_argument("--jobs", type=int, default=CORES)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args()
    names = [name for row in chosen.rows or ROWS for name in ALIASES.get(row, [row])]
    if unknown := sorted(set(names) - set(ROWS)):
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join((*ROWS, *ALIASES))}")
    kept: dict[str, Any] = {}
    for name in names:
        for policy in chosen.policy or [ENGINE]:
            began = time.monotonic()
            replays = [replace(replay, policy=policy) for replay in ROWS[name](chosen.traces, chosen.seeds)]
            found = figures_of(live_replays(replays, chosen.jobs))
            kept[f"{name}, {policy}"] = found.as_json()
            print("\n".join(lines(name, policy, found)), f"\n  ({time.monotonic() - began:.0f} s)", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
