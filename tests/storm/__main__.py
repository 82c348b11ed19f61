"""
`python -m tests.storm`: storms of hours, close up; long ones of thirty days, in which people come rarely or never; and
months of a thousand slots, until enough node-days were lived.

Histories are lived in processes of their own. The figures go into docs/storms.md between its marks, whatever came out;
the exit code is 1 when a property broke or a kind of fault was too rare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

from pydantic import TypeAdapter

from tests.bench.report import renew
from tpucare.testbed.simulation.campaign import Plan, Sums, campaign
from tpucare.testbed.simulation.faults import EMERGENT, FAULTS
from tpucare.testbed.simulation.history import HistoryOutcome
from tpucare.testbed.simulation.tally import PHASES

PAGE = Path(__file__).parents[2] / "docs" / "storms.md"
BEGIN, END = "<!-- figures: begin (make storm) -->", "<!-- figures: end -->"
_OUTCOME: TypeAdapter[HistoryOutcome] = TypeAdapter(HistoryOutcome)
STORM_DAYS, LONG_DAYS, MONTH_DAYS, MONTH_SLOTS = 0.25, 30.0, 90.0, 1000
SOURCES = Path(__file__).parents[2] / "tpucare"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm")
    parser.add_argument("--node-days", type=float, default=1e6, help="to live in all (default 1,000,000)")
    parser.add_argument("--storms", type=int, default=160, help="storms of six hours at high (default 160)")
    parser.add_argument("--queues", type=int, default=80, help="such storms of slots in queues (default 80)")
    parser.add_argument("--long", type=int, default=16, help="storms of thirty days at high (default 16)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default 1)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kept", type=Path, help="files of outcomes: what these sources lived is not lived again")
    parser.add_argument("--no-page", action="store_true", help="leave docs/storms.md alone")
    options = parser.parse_args()
    parts = [
        ("storms", Plan(STORM_DAYS, "high"), options.storms),
        ("queues", Plan(STORM_DAYS, "high", queued=True), options.queues),
        ("long storms", Plan(LONG_DAYS, "high"), options.long),
        ("months", Plan(MONTH_DAYS, "low", count=MONTH_SLOTS), _months(options.node_days)),
    ]
    sums: dict[str, Sums] = {}
    for name, plan, count in parts:
        kept = Kept(options.kept.with_suffix(f".{name.replace(' ', '-')}.jsonl"), plan) if options.kept else None
        try:
            sums[name] = live(name, plan, range(options.first, options.first + count), options.jobs, kept)
        except OtherSources as error:
            print(error, file=sys.stderr)
            return 2
    if not options.no_page:
        write(sums)
    rare = _rare(sums["storms"], sums["queues"])
    if rare:
        print(f"too rare: {', '.join(rare)}", file=sys.stderr)
    return 0 if all(one.clean for one in sums.values()) and not rare else 1


def _months(node_days: float) -> int:
    return math.ceil(node_days / (MONTH_DAYS * MONTH_SLOTS))


class OtherSources(Exception):
    """Outcomes of other sources, or of another plan, are no part of this campaign."""


class Kept:
    """
    Outcomes in a file, so that a campaign that was ended goes on where it was.

    Its first line says which sources lived them, and by which plan: a campaign is of one state of the program.
    """

    def __init__(self, path: Path, plan: Plan, sources: Path = SOURCES) -> None:
        self._path = path
        self._head = json.dumps({"sources": fingerprint(sources), "plan": repr(plan)})

    def outcomes(self) -> list[HistoryOutcome]:
        """Raises: OtherSources: the file is of another campaign."""
        if not self._path.exists():
            self._path.write_text(f"{self._head}\n", encoding="utf-8")
        head, *lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        if head.rstrip("\n") != self._head:
            raise OtherSources(
                f"{self._path}: lived by other sources or another plan; move it away, or name another one"
            )
        # Who was killed while writing a line lives that history again.
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            self._path.write_text("".join([head, *whole]), encoding="utf-8")
        return [_OUTCOME.validate_json(line) for line in whole]

    def add(self, outcome: HistoryOutcome) -> None:
        with self._path.open("ab") as file:
            file.write(_OUTCOME.dump_json(outcome) + b"\n")


def fingerprint(sources: Path) -> str:
    """Of every module below *sources*, whatever a commit says of them."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(f"{path.relative_to(sources)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def live(name: str, plan: Plan, seeds: range, jobs: int, kept: Kept | None) -> Sums:
    """The histories of *seeds* that are not kept yet, and the sums of all. Raises: OtherSources."""
    sums = Sums()
    for outcome in kept.outcomes() if kept is not None else []:
        if outcome.seed in seeds and outcome.seed not in sums.digests:
            sums.add(outcome)
    left = [seed for seed in seeds if seed not in sums.digests]
    for outcome in campaign(plan, left, jobs):
        sums.add(outcome)
        if kept is not None:
            kept.add(outcome)
        verdict = str(outcome.broken[0]) if outcome.broken else "clean"
        print(f"{name} {sums.histories}/{len(seeds)}: seed {outcome.seed} {verdict}", flush=True)
    print("\n".join(sums.lines()), flush=True)
    return sums


def _rare(*storms: Sums) -> list[str]:
    """Kinds that did not occur often enough for the campaign to prove anything about them."""
    met = sum((one.tally.faults for one in storms), Counter[str]())
    return [f"{kind} ({met[kind]})" for kind, fault in FAULTS.items() if met[kind] < fault.enough]


def write(sums: dict[str, Sums], page: Path = PAGE) -> None:
    """Put the figures between the marks of *page*."""
    renew(page, BEGIN, END, "\n".join([*_table(sums), "", *_faults(sums)]))


def _table(sums: dict[str, Sums]) -> list[str]:
    rows: list[tuple[str, list[str]]] = []
    every = list(sums.values())
    rows.append(("histories", [f"{one.histories:,}" for one in every]))
    rows.append(("node-days", [f"{one.tally.node_days:,.0f}" for one in every]))
    rows.append(("histories that broke a promise", [f"{len(one.failed):,}" for one in every]))
    rows.append(("turns of the loop", [f"{one.tally.steps:,}" for one in every]))
    rows.append(("processes of the daemon", [f"{one.tally.restarts:,}" for one in every]))
    rows.append(("launches", [f"{one.tally.launches:,}" for one in every]))
    rows.append(("create calls", [f"{one.tally.creates:,}" for one in every]))
    rows.append(("availability", [f"{one.tally.availability:.1%}" for one in every]))
    rows.append(("goodput", [f"{one.tally.goodput:.1%}" for one in every]))
    rows.append(
        ("latest to train after calm, of its bound", [f"{max(one.tally.settled, default=0):.0%}" for one in every])
    )
    apart = sorted({what for one in every for what in one.tally.apart} | {"failed"})
    rows += [(f"counted apart: {what}", [f"{one.tally.apart[what]:,}" for one in every]) for what in apart]
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
