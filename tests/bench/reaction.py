"""
Capacity comes back -> its create is accepted, and what asking costs until then: both sides, by how long it was away.

In virtual time; the time in which the cloud has yet to tell the last stockout is subtracted.
"""

from __future__ import annotations

import statistics
from datetime import timedelta

from tests.bench.report import Measure, percentile
from tests.kits.reaction import TOLD, Drought, droughts

MINUTES = timedelta(seconds=5), timedelta(minutes=14)
HOURS = timedelta(hours=1), timedelta(hours=6)


def reaction() -> list[Measure]:
    one = [*droughts(1, at_least=MINUTES[0], at_most=MINUTES[1], count=100)]
    eight = [*droughts(8, at_least=MINUTES[0], at_most=MINUTES[1], count=20)]
    rare = [*droughts(1, at_least=HOURS[0], at_most=HOURS[1], count=12)]
    many = [*droughts(8, at_least=HOURS[0], at_most=HOURS[1], count=4)]
    waits = [wait for drought in one for wait in drought.reactions]
    last = tuple(max(drought.reactions) for drought in eight)
    what = "capacity is there: create accepted"
    return [
        Measure("12a", f"{what}, median", 5.0, "s", (statistics.median(waits),), len(waits), _how(one)),
        Measure("12b", f"{what}, p99", 10.0, "s", (percentile(waits, 99),), len(waits), _how(one)),
        Measure("12c", f"{what}, the last of 8 slots", 15.0, "s", last, 1, _how(eight), never=True),
        *_both_sides("12d", one),
        *_both_sides("12e", eight),
        *_both_sides("12f", rare),
        *_both_sides("12g", many),
    ]


def _both_sides(row: str, seen: list[Drought]) -> list[Measure]:
    """The mean wait until the first slot's create, and creates a day of all slots while there is nothing."""
    firsts = tuple(min(drought.reactions) for drought in seen)
    days = sum(drought.lasted / timedelta(days=1) for drought in seen)
    asked = sum(len(drought.asked) for drought in seen)
    return [
        Measure(row, "dry place: capacity is there to the first create accepted", None, "s", firsts, 1, _how(seen)),
        Measure(row, "dry place: creates", None, "a day", (asked / days,), asked, _how(seen)),
    ]


def _how(seen: list[Drought]) -> str:
    slots = len(seen[0].reactions)
    hours = max(drought.lasted for drought in seen) > timedelta(hours=1)
    away = "1 to 6 h" if hours else "up to 14 min"
    who = f"{slots} slots" if slots > 1 else "1 slot"
    return f"{who}, one place, dry for {away}, stockouts told in {TOLD.total_seconds():.0f} s, virtual time"
