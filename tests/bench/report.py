"""
What was measured, against which limit, and how it is told: bench.json for machines, a table in docs/performance.md.

Lengths of time on a shared machine say little, so a time is told only as a share of its limit; counts, intervals,
memory and shares of a core are told as they are.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BEGIN = "<!-- measured: begin (python -m tests.bench --write-docs) -->"
END = "<!-- measured: end -->"


@dataclass(frozen=True, slots=True)
class Measure:
    """
    One figure against its limit, if there is one.

    values:   one per repeat; their median is judged, or the worst where `never` (what must not happen even once)
    samples:  how many single observations stand behind each value
    at_least: the limit is a lower one
    told:     whether values mean something on another machine; a length of time does not
    """

    row: str
    what: str
    limit: float | None
    unit: str
    values: tuple[float, ...]
    samples: int = 1
    how: str = ""
    at_least: bool = False
    never: bool = False
    told: bool = True

    @property
    def worst(self) -> float:
        return min(self.values) if self.at_least else max(self.values)

    @property
    def judged(self) -> float:
        return self.worst if self.never else statistics.median(self.values)

    @property
    def held(self) -> bool:
        if self.limit is None:
            return True
        return self.judged >= self.limit if self.at_least else self.judged <= self.limit

    def share(self, value: float) -> float:
        """How much of what the limit allows *value* uses up: 1 is the limit itself, whichever way it points."""
        if self.limit is None:
            return 0.0
        over, under = (self.limit, value) if self.at_least else (value, self.limit)
        if under == 0:
            return 0.0 if over == 0 else math.inf
        return over / under


def percentile(samples: Iterable[float], percent: float) -> float:
    """The nearest-rank percentile: always one of the samples."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


# --- bench.json ------------------------------------------------------------------------------------------------------


def write_json(path: Path, measures: Sequence[Measure]) -> list[Measure]:
    """Put *measures* in the place of those of the same rows in *path*; returns all that stand there now."""
    fresh = {measure.row for measure in measures}
    kept = [measure for measure in read_json(path) if measure.row not in fresh]
    both = sorted([*kept, *measures], key=lambda measure: measure.row)
    content = {"machine": _machine(), "measures": [_plain(measure) for measure in both]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return both


def read_json(path: Path) -> list[Measure]:
    if not path.is_file():
        return []
    fields = Measure.__dataclass_fields__
    found = []
    for raw in json.loads(path.read_text(encoding="utf-8"))["measures"]:
        known = {key: value for key, value in raw.items() if key in fields}
        found.append(Measure(**{**known, "values": tuple(known["values"])}))
    return found


def _plain(measure: Measure) -> Mapping[str, object]:
    shares = [round(measure.share(value), 4) for value in measure.values]
    return {**asdict(measure), "held": measure.held, "shares_of_limit": shares}


def _machine() -> Mapping[str, object]:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "load": round(os.getloadavg()[0], 2),
    }


# --- the table -------------------------------------------------------------------------------------------------------


def table(measures: Sequence[Measure]) -> str:
    lines = [
        "| what | limit | held | measured | share of the limit | measured how |",
        "|---|---|---|---|---|---|",
    ]
    for measure in measures:
        cells = (measure.what, _limit(measure), _held(measure), _told(measure), _shares(measure), _how(measure))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _held(measure: Measure) -> str:
    if measure.limit is None:
        return ""
    return "yes" if measure.held else "**no**"


def _limit(measure: Measure) -> str:
    if measure.limit is None:
        return ""
    sign = "≥" if measure.at_least else "≤"
    return f"{sign} {number(measure.limit)} {measure.unit}".strip()


def _told(measure: Measure) -> str:
    return f"{number(measure.judged)} {measure.unit}".strip() if measure.told else ""


def _shares(measure: Measure) -> str:
    if measure.limit is None:
        return ""
    judged = number(measure.share(measure.judged))
    shares = [measure.share(value) for value in measure.values]
    if len(shares) == 1 or number(min(shares)) == number(max(shares)):
        return judged
    return f"{judged} ({number(min(shares))}–{number(max(shares))})"


def _how(measure: Measure) -> str:
    count = f"{len(measure.values)} × {measure.samples}" if len(measure.values) > 1 else f"{measure.samples}"
    return f"{measure.how}; n = {count}" if measure.how else f"n = {count}"


def number(value: float) -> str:
    """Three digits that mean something, without an exponent."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def write_docs(path: Path, measures: Sequence[Measure]) -> None:
    """Renew the table of *path*. Raises: as `renew`."""
    renew(path, BEGIN, END, table(measures))


def renew(path: Path, first: str, last: str, figures: str) -> None:
    """Put *figures* between the two markers of *path*. Raises: ValueError: it has none."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"{path} lacks the markers {first!r} and {last!r}")
    path.write_text(f"{before}{first}\n\n{figures}\n\n{last}{after}", encoding="utf-8")
