"""The figures of replays, for people and for scripts: spreads over histories, where time was lost, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpucare.model.text import length
from tpucare.testbed.replay.account import LOST, Account
from tpucare.training.cadence import daly_interval

ROUNDS_LEFT_OUT = 2
"""A place with room may be left out for so many rounds over all places, as in a storm (`no-starved-place`)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several histories."""

    mean: float
    deviation: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.mean(values), deviation, min(values), max(values))

    def as_json(self) -> dict[str, float]:
        figures = {"mean": self.mean, "sd": self.deviation, "min": self.least, "max": self.most}
        return {name: round(figure, 3) for name, figure in figures.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """NaN for no value."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else math.nan


@dataclass(frozen=True, slots=True)
class Figures:
    """
    What one policy came to over its histories.

    goodput, lost: percent    dollars: per productive hour, None where unknown    places: by zone, see `PlaceFigures`
    accept: minutes from room to an accepted create (median, 90 %, 99 %)
    own_pause: the seconds of it in which nothing was asked (median, 99 %, most), of those where a place moved lately
    """

    histories: int
    goodput: Spread
    creates: Spread
    dollars: Spread | None
    lost: Mapping[str, float]
    accept: tuple[float, ...]
    own_pause: tuple[float, ...]
    places: Mapping[str, PlaceFigures]
    left_out: int
    life_hours: float | None

    def as_json(self) -> dict[str, Any]:
        names = ("median", "p90", "p99"), ("median", "p99", "max")
        return {
            "histories": self.histories,
            "goodput_percent": self.goodput.as_json(),
            "creates_a_day": self.creates.as_json(),
            "dollars_per_productive_hour": self.dollars.as_json() if self.dollars is not None else None,
            "lost_percent": {kind: round(share, 3) for kind, share in self.lost.items()},
            "minutes_from_room_to_accepted": _named(names[0], self.accept),
            "seconds_of_own_pause": _named(names[1], self.own_pause),
            "places": {zone: place.as_json() for zone, place in self.places.items()},
            "left_out": self.left_out,
            "mean_life_hours": None if self.life_hours is None else round(self.life_hours, 3),
        }


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """Creates a day, the share of them that brought a node, and the share of the window with a node there; percent."""

    creates: float
    granted: float
    held: float

    def as_json(self) -> dict[str, float]:
        return {
            "creates_a_day": round(self.creates, 3),
            "granted_percent": round(self.granted, 2),
            "held_percent": round(self.held, 2),
        }


def _named(names: Sequence[str], values: Sequence[float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else round(value, 3) for name, value in zip(names, values, strict=True)}


def figures_of(accounts: Sequence[Account]) -> Figures:
    waits = [wait for account in accounts for wait in account.waits]
    own_pause = [wait.idle for wait in waits if wait.lately]
    dollars = [account.dollars for account in accounts]
    lives = [account.life_seconds for account in accounts if account.life_seconds is not None]
    known = [one for one in dollars if one is not None and math.isfinite(one)]
    return Figures(
        len(accounts),
        Spread.of([account.goodput for account in accounts]),
        Spread.of([account.creates_a_day for account in accounts]),
        Spread.of(known) if len(known) == len(dollars) else None,
        {kind.value: statistics.mean(account.percent(kind) for account in accounts) for kind in LOST},
        tuple(quantile([wait.open / 60.0 for wait in waits], share) for share in (0.5, 0.9, 0.99)),
        tuple(quantile(own_pause, share) for share in (0.5, 0.99, 1.0)),
        {zone: _place_figures(accounts, zone) for zone in accounts[0].node_seconds},
        max(account.left_out for account in accounts),
        statistics.mean(lives) / 3600.0 if lives else None,
    )


def _place_figures(accounts: Sequence[Account], zone: str) -> PlaceFigures:
    days = sum(account.days for account in accounts)
    creates = sum(account.creates.get(zone, 0) for account in accounts)
    granted = sum(account.granted.get(zone, 0) for account in accounts)
    held = sum(account.node_seconds.get(zone, 0.0) for account in accounts)
    whole = sum(account.slot_seconds for account in accounts)
    return PlaceFigures(creates / days, 100.0 * granted / creates if creates else 0.0, 100.0 * held / whole)


def left_out_limit(places: int) -> int:
    return ROUNDS_LEFT_OUT * places


# --- for people ------------------------------------------------------------------------------------------------------


def comparison(found: Mapping[str, Figures]) -> list[str]:
    """A table of the policies side by side, then one of where the time went."""
    several = any(figures.histories > 1 for figures in found.values())

    def cell(spread: Spread | None, digits: int) -> str:
        if spread is None:
            return "-"
        return f"{spread.mean:.{digits}f}" + (f" ± {spread.deviation:.{digits}f}" if several else "")

    head = ["", "goodput %", "creates a day", "$ per productive hour"]
    rows = [[name, cell(one.goodput, 1), cell(one.creates, 0), cell(one.dollars, 2)] for name, one in found.items()]
    kinds = [kind for kind in next(iter(found.values())).lost if any(one.lost[kind] >= 0.05 for one in found.values())]
    lost_head = ["lost, % of the time", *found]
    lost_rows = [[kind, *(f"{one.lost[kind]:.1f}" for one in found.values())] for kind in kinds]
    sums = ["sum", *(f"{sum(one.lost.values()):.1f}" for one in found.values())]
    return [*_columns([head, *rows]), "", *_columns([lost_head, *lost_rows, sums])]


def place_lines(figures: Figures, name_of: Callable[[str], str]) -> list[str]:
    head = ["place", "creates a day", "granted %", "held % of the time"]
    rows = [
        [name_of(zone), f"{place.creates:.1f}", f"{place.granted:.0f}", f"{place.held:.1f}"]
        for zone, place in figures.places.items()
    ]
    return _columns([head, *rows])


def reaction_line(figures: Figures) -> str:
    """Empty when no create was accepted after a wait."""
    if math.isnan(figures.accept[0]):
        return ""
    median, most, rare = figures.accept
    line = f"room there to create accepted: median {median:.1f} min, 90 % {most:.1f} min, 99 % {rare:.1f} min"
    if math.isnan(figures.own_pause[0]):
        return line
    return f"{line}; of it not asking at all: median {figures.own_pause[0]:.0f} s, 99 % {figures.own_pause[1]:.0f} s"


def cadence_line(figures: Figures, save_seconds: float) -> str:
    """Empty when no node was lost."""
    if figures.life_hours is None:
        return ""
    interval = daly_interval(save_seconds, figures.life_hours * 3600.0)
    return (
        f"a node lives for {length(figures.life_hours * 3600.0)} on average: with saves of {length(save_seconds)} "
        f"the least is lost by one each {length(interval)} (Daly)"
    )


def verdict(own: Figures, foresight: Figures | None, places: int) -> tuple[bool, list[str]]:
    """Whether the promise about places was kept, and how good it was beside what foresight reaches."""
    told = []
    if foresight is not None and foresight.goodput.mean > 0:
        share = 100.0 * own.goodput.mean / foresight.goodput.mean
        told.append(f"that is {share:.1f} % of what a policy reaches that knows how long each place will last")
    limit = left_out_limit(places)
    kept = own.left_out <= limit
    how = "kept" if kept else "BROKEN"
    told.append(
        f"no-starved-place {how}: a place with room was left out for at most {own.left_out} creates elsewhere "
        f"(allowed: {limit}, two rounds over all places)"
    )
    return kept, told


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    pairs = [list(zip(row, widths, strict=True)) for row in rows]
    return ["  ".join([row[0][0].ljust(row[0][1]), *(cell.rjust(width) for cell, width in row[1:])]) for row in pairs]
