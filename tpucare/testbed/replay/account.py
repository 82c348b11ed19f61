"""
The account of a history on recorded capacity: where each second of each slot went, and what it cost.

One account for the engine and for every policy beside it. A slot's time is either held by a node (booting, training,
saving, training what is lost with the node) or not (no room anywhere, rooms too short for a first step, waiting
although there is room). A run trains and saves in turns; one that is lost has only what was saved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from tpucare.testbed.replay.recordings import Changes, at_least, less
from tpucare.training.cadence import daly_interval

Span = tuple[float, float]

LIFE_AT_FIRST = 2 * 3600.0
"""The mean life that is assumed before one was seen; it weighs as much as one life."""
SHORTEST_INTERVAL, LONGEST_INTERVAL = 60.0, 2 * 3600.0
LATELY = 15 * 60.0
"""A place that gave or lost a node so lately is asked without a long pause."""


class TimeKind(StrEnum):
    """What a second of a slot was spent on."""

    USEFUL = "useful"
    NO_ROOM = "no room anywhere"
    TOO_SHORT = "room too short"
    WAITING = "asking elsewhere"
    PAUSING = "pausing"
    UNSEEN = "loss not shown"
    BOOT = "boot"
    BOOT_IN_VAIN = "boot in vain"
    SAVING = "saving"
    REDONE = "redone"


LOST = tuple(kind for kind in TimeKind if kind is not TimeKind.USEFUL)


@dataclass(frozen=True, slots=True)
class Saving:
    """Checkpoints: one after each `every` seconds of training (None: Daly's interval), each stops it for `seconds`."""

    every: float | None = 30 * 60.0
    seconds: float = 30.0

    def interval(self, lives: Sequence[float]) -> float:
        """Seconds of training between two saves, from the *lives* seen so far."""
        if self.every is not None:
            return self.every
        best = daly_interval(self.seconds, (LIFE_AT_FIRST + sum(lives)) / (1 + len(lives)))
        return min(LONGEST_INTERVAL, max(SHORTEST_INTERVAL, best))


@dataclass(slots=True)
class Ask:
    """One create that the cloud accepted to try; `told`: when it was refused for want of capacity."""

    zone: str
    at: float
    told: float = math.inf


@dataclass(slots=True)
class Held:
    """
    A node, from the create call to its loss. Seconds.

    trains: its first step, or when it would be; None: not known before it was lost
    freed:  when the zone counted its units as free again, at the latest when it was lost
    shown:  when the API showed its loss
    lost:   False when the end of the history cut it off
    units:  of the zone's recorded capacity; 0 on terms that do not share it    price: of an hour; None: unknown
    """

    zone: str
    at: float
    units: int
    until: float = math.inf
    trains: float | None = None
    freed: float = math.inf
    shown: float = 0.0
    lost: bool = True
    price: float | None = None


@dataclass(slots=True)
class SlotLog:
    """Everything that one slot asked for and held in its `zones`, in order of time."""

    zones: tuple[str, ...] = ()
    asks: list[Ask] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RoomWait:
    """
    One way from no node, with room somewhere, to an accepted create. Seconds.

    open:   while there was room
    idle:   the part of it in which the loss was shown and no create was under way: nothing but our own pause
    lately: a place gave or lost a node within LATELY before the room was there
    """

    open: float
    idle: float
    lately: bool


@dataclass(frozen=True, slots=True)
class Account:
    """
    The judged part of a history, over all its slots. Seconds, units of money of the recordings.

    creates, granted, node_seconds, lost: by zone, lost = nodes that were taken    paid: None where a node has no price
    waits: see `RoomWait`; one that the history cut off is not among them
    left_out: the most creates that a slot without a node sent elsewhere while a zone had room all along, unasked
    """

    slot_seconds: float
    spent: Mapping[TimeKind, float]
    creates: Mapping[str, int]
    granted: Mapping[str, int]
    node_seconds: Mapping[str, float]
    lost: Mapping[str, int]
    paid: float | None
    waits: tuple[RoomWait, ...]
    days: float
    left_out: int

    @property
    def goodput(self) -> float:
        """Percent."""
        return self.percent(TimeKind.USEFUL)

    def percent(self, kind: TimeKind) -> float:
        return 100.0 * self.spent.get(kind, 0.0) / self.slot_seconds

    @property
    def creates_a_day(self) -> float:
        return sum(self.creates.values()) / self.days

    @property
    def life_seconds(self) -> float | None:
        """The mean life of a node; those that were not lost count with the time that they lived so far."""
        losses = sum(self.lost.values())
        return sum(self.node_seconds.values()) / losses if losses else None

    @property
    def dollars(self) -> float | None:
        """Per productive hour of a slot; None without prices, infinite without a productive hour."""
        if self.paid is None:
            return None
        useful = self.spent.get(TimeKind.USEFUL, 0.0)
        return self.paid / (useful / 3600.0) if useful else math.inf


def settle(
    logs: Mapping[str, SlotLog],
    capacity: Mapping[str, Changes],
    *,
    until: float,
    judged_from: float,
    units: int,
    first_step_seconds: float,
    saving: Saving,
) -> Account:
    """
    The account of *logs* between *judged_from* and *until*.

    units: what the smallest node of the fleet takes of a zone's *capacity*
    """
    spent = dict.fromkeys(TimeKind, 0.0)
    creates: Counter[str] = Counter()
    granted: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    node_seconds = dict.fromkeys(capacity, 0.0)
    waits: list[RoomWait] = []
    paid: float | None = 0.0
    left_out = 0
    given = sorted(moment for log in logs.values() for held in log.held for moment in (held.at, held.until))
    for log in logs.values():
        for ask in log.asks:
            creates[ask.zone] += ask.at >= judged_from
        for held in log.held:
            creates[held.zone] += held.at >= judged_from
            granted[held.zone] += held.at >= judged_from
            length = _within((held.at, held.until), judged_from, until)
            node_seconds[held.zone] += length
            lost[held.zone] += held.lost and held.until >= judged_from
            paid = None if paid is None or held.price is None else paid + length / 3600.0 * held.price
        for kind, begin, end in held_time(log, saving):
            spent[kind] += _within((begin, end), judged_from, until)
        others = [held for other in logs.values() if other is not log for held in other.held]
        rooms = {zone: _room(capacity[zone], others, zone, units, until) for zone in log.zones}
        left_out = max(left_out, _left_out(log, rooms))
        for gap in _gaps(log.held, until):
            waited, idle, first = 0.0, 0.0, gap.end
            for kind, since, to in _gap_time(gap, rooms.values(), log.asks, first_step_seconds):
                spent[kind] += _within((since, to), judged_from, until)
                if kind is not TimeKind.NO_ROOM:
                    first = min(first, since)
                    waited += to - since
                    idle += to - since if since >= gap.shown and not _asks_at(log.asks, (since + to) / 2) else 0.0
            if gap.accepted and gap.end >= judged_from:
                waits.append(RoomWait(waited, idle, _lately(given, first)))
    seconds = until - judged_from
    return Account(
        seconds * len(logs),
        spent,
        dict(creates),
        dict(granted),
        node_seconds,
        dict(lost),
        paid,
        tuple(waits),
        seconds / 86400.0,
        left_out,
    )


def _within(span: Span, begin: float, end: float) -> float:
    return max(0.0, min(span[1], end) - max(span[0], begin))


def _lately(given: Sequence[float], at: float) -> bool:
    before = bisect_right(given, at)
    return before > 0 and at - given[before - 1] <= LATELY


def held_time(log: SlotLog, saving: Saving) -> Iterator[tuple[TimeKind, float, float]]:
    """The time in which the slot held a node, by kind, in order."""
    lives: list[float] = []
    for held in log.held:
        trains = held.trains
        if trains is None or trains >= held.until:
            kind = TimeKind.BOOT_IN_VAIN if held.lost else TimeKind.BOOT
            yield kind, held.at, held.until
            continue
        yield TimeKind.BOOT, held.at, trains
        yield from _trained(trains, held.until, saving.interval(lives), saving.seconds, lost=held.lost)
        lives.append(held.until - trains)


def _trained(
    since: float, until: float, every: float, save: float, *, lost: bool
) -> Iterator[tuple[TimeKind, float, float]]:
    turns = int((until - since) // (every + save))
    for turn in range(turns):
        begin = since + turn * (every + save)
        yield TimeKind.USEFUL, begin, begin + every
        yield TimeKind.SAVING, begin + every, begin + every + save
    rest = since + turns * (every + save)
    if lost:
        yield TimeKind.REDONE, rest, until
        return
    yield TimeKind.USEFUL, rest, min(until, rest + every)
    yield TimeKind.SAVING, min(until, rest + every), until


@dataclass(frozen=True, slots=True)
class _Gap:
    """Time without a node. `shown`: when the API showed why. `accepted`: a create ended it, not the window."""

    begin: float
    end: float
    shown: float
    accepted: bool


def _gaps(held: Sequence[Held], until: float) -> Iterator[_Gap]:
    at = shown = 0.0
    for one in held:
        if one.at > at:
            yield _Gap(at, one.at, shown, accepted=True)
        at, shown = max(at, one.until), max(shown, one.shown)
    if at < until:
        yield _Gap(at, until, shown, accepted=False)


def _room(changes: Changes, others: Iterable[Held], zone: str, units: int, until: float) -> list[Span]:
    """The spans in which one more node fits into a zone beside those of *others*."""
    used = [(held.at, min(held.freed, held.until), held.units) for held in others if held.zone == zone and held.units]
    return at_least(less(changes, used) if used else changes, units, until)


def _left_out(log: SlotLog, rooms: Mapping[str, Sequence[Span]]) -> int:
    """See `Account.left_out`."""
    creates = sorted(
        [(ask.at, ask.zone, False) for ask in log.asks] + [(held.at, held.zone, True) for held in log.held]
    )
    since: dict[str, tuple[float, int]] = {}
    most = 0
    for at, asked, granted in creates:
        if granted:
            since.clear()
            continue
        for zone, spans in rooms.items():
            index = bisect_right(spans, at, key=lambda span: span[0]) - 1
            if zone == asked or index < 0 or spans[index][1] <= at:
                since.pop(zone, None)
                continue
            opened, count = since.get(zone, (spans[index][0], 0))
            since[zone] = (spans[index][0], count + 1 if opened == spans[index][0] else 1)
            most = max(most, since[zone][1])
    return most


def _gap_time(
    gap: _Gap, rooms: Iterable[Sequence[Span]], asks: Sequence[Ask], first_step_seconds: float
) -> Iterator[tuple[TimeKind, float, float]]:
    """The time of a gap, cut where its kind changes."""
    begin, end = gap.begin, gap.end
    open_spans = [span for spans in rooms for span in _overlapping(spans, begin, end)]
    cuts = {begin, end, gap.shown}
    for since, to in open_spans:
        cuts.update((since, to, to - first_step_seconds))
    for ask in asks[bisect_right(asks, begin, key=lambda one: one.told) :]:
        if ask.at >= end:
            break
        cuts.update((ask.at, ask.told))
    for since, to in pairwise(sorted(cut for cut in cuts if begin <= cut <= end)):
        middle = (since + to) / 2
        left = max((stop - middle for start, stop in open_spans if start <= middle < stop), default=0.0)
        if left <= 0.0:
            kind = TimeKind.NO_ROOM
        elif left < first_step_seconds:
            kind = TimeKind.TOO_SHORT
        elif middle < gap.shown:
            kind = TimeKind.UNSEEN
        else:
            kind = TimeKind.WAITING if _asks_at(asks, middle) else TimeKind.PAUSING
        yield kind, since, to


def _overlapping(spans: Sequence[Span], begin: float, end: float) -> Iterator[Span]:
    index = bisect_right(spans, begin, key=lambda span: span[1])
    while index < len(spans) and spans[index][0] < end:
        yield spans[index]
        index += 1


def _asks_at(asks: Sequence[Ask], at: float) -> bool:
    index = bisect_right(asks, at, key=lambda ask: ask.at) - 1
    return index >= 0 and asks[index].told > at
