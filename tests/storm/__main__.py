"""
`python -m tests.storm`: storms of hours, close up, and months of a thousand slots, until enough node-days were lived.

Histories are lived in processes of their own. The figures go into docs/storms.md between its marks, whatever came out;
the exit code is 1 when a property broke or a kind of fault was too rare.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from pydantic import TypeAdapter

from tests.bench.report import renew
from tpucare.simulation.campaign import Plan, Sums, campaign
from tpucare.simulation.faults import EMERGENT, FAULTS
from tpucare.simulation.history import Outcome
from tpucare.simulation.tally import PHASES

PAGE = Path(__file__).parents[2] / "docs" / "storms.md"
BEGIN, END = "<!-- figures: begin (make storm) -->", "<!-- figures: end -->"
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
STORM_DAYS, MONTH_DAYS, MONTH_SLOTS = 0.25, 90.0, 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm")
    parser.add_argument("--node-days", type=float, default=1e6, help="to live in all (default 1,000,000)")
    parser.add_argument("--storms", type=int, default=160, help="storms of six hours at high (default 160)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kept", type=Path, help="file of outcomes: what stands there is not lived again")
    parser.add_argument("--no-page", action="store_true", help="leave docs/storms.md alone")
    options = parser.parse_args()
    parts = [
        ("storms", Plan(STORM_DAYS, "high"), options.storms),
        ("months", Plan(MONTH_DAYS, "low", count=MONTH_SLOTS), _months(options.node_days)),
    ]
    sums: dict[str, Sums] = {}
    for name, plan, count in parts:
        kept = options.kept.with_suffix(f".{name}.jsonl") if options.kept is not None else None
        sums[name] = _live(name, plan, range(options.first, options.first + count), options.jobs, kept)
    if not options.no_page:
        write(sums)
    rare = _rare(sums["storms"])
    if rare:
        print(f"too rare: {', '.join(rare)}", file=sys.stderr)
    return 0 if all(one.clean for one in sums.values()) and not rare else 1


def _months(node_days: float) -> int:
    return math.ceil(node_days / (MONTH_DAYS * MONTH_SLOTS))


def _live(name: str, plan: Plan, seeds: range, jobs: int, kept: Path | None) -> Sums:
    sums = Sums()
    for outcome in _again(kept):
        if outcome.seed in seeds and outcome.seed not in sums.digests:
            sums.add(outcome)
    left = [seed for seed in seeds if seed not in sums.digests]
    for outcome in campaign(plan, left, jobs):
        sums.add(outcome)
        if kept is not None:
            with kept.open("ab") as file:
                file.write(_OUTCOME.dump_json(outcome) + b"\n")
        verdict = str(outcome.broken[0]) if outcome.broken else "clean"
        print(f"{name} {sums.histories}/{len(seeds)}: seed {outcome.seed} {verdict}", flush=True)
    print("\n".join(sums.lines()), flush=True)
    return sums


def _again(kept: Path | None) -> list[Outcome]:
    if kept is None or not kept.exists():
        return []
    return [_OUTCOME.validate_json(line) for line in kept.read_bytes().splitlines()]


def _rare(storms: Sums) -> list[str]:
    """Kinds that did not occur often enough for the campaign to prove anything about them."""
    met = storms.tally.faults
    return [f"{kind} ({met[kind]})" for kind, fault in FAULTS.items() if fault.drawn and met[kind] < fault.enough]


def write(sums: dict[str, Sums], page: Path = PAGE) -> None:
    """Put the figures between the marks of *page*."""
    renew(page, BEGIN, END, "\n".join([*_table(sums), "", *_faults(sums)]))


def _table(sums: dict[str, Sums]) -> list[str]:
    rows: list[tuple[str, list[str]]] = []
    every = list(sums.values())
    rows.append(("histories", [f"{one.histories:,}" for one in every]))
    rows.append(("node-days", [f"{one.tally.node_days:,.0f}" for one in every]))
    rows.append(("histories that broke a property", [f"{len(one.failed):,}" for one in every]))
    rows.append(("turns of the loop", [f"{one.tally.steps:,}" for one in every]))
    rows.append(("processes of the daemon", [f"{one.tally.restarts:,}" for one in every]))
    rows.append(("launches", [f"{one.tally.launches:,}" for one in every]))
    rows.append(("create calls", [f"{one.tally.creates:,}" for one in every]))
    rows.append(("availability", [f"{one.tally.availability:.1%}" for one in every]))
    rows.append(("latest to train after calm, of its bound", [f"{max(one.tally.settled):.0%}" for one in every]))
    rows.append(("slots failed by their own job, counted apart", [f"{one.tally.apart['failed']:,}" for one in every]))
    for phase in PHASES:
        rows.append((f"mean way to: {phase}", [_mean(one, phase) for one in every]))
    head = [f"| | {' | '.join(sums)} |", "|---|" + "---|" * len(sums)]
    return [*head, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows)]


def _mean(sums: Sums, phase: str) -> str:
    seconds, count = sums.tally.phases.get(phase, (0.0, 0))
    return f"{seconds / count:,.0f} virtual s" if count else ""


def _faults(sums: dict[str, Sums]) -> list[str]:
    head = f"| fault | what happens | low, high | {' | '.join(sums)} |"
    lines = [head, "|---|---|---|" + "---|" * len(sums)]
    for kind, fault in FAULTS.items():
        counts = " | ".join(f"{one.tally.faults[kind]:,}" for one in sums.values())
        lines.append(f"| {kind} | {fault.text} | {fault.low:g}, {fault.high:g} per {_whom(fault.span)} | {counts} |")
    for kind, text in EMERGENT.items():
        counts = " | ".join(f"{one.tally.faults[kind]:,}" for one in sums.values())
        lines.append(f"| {kind} | {text} | by itself | {counts} |")
    return lines


def _whom(span: str) -> str:
    return "slot and day" if span == "slot" else "day"


if __name__ == "__main__":
    sys.exit(main())
