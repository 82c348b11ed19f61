"""
Recoveries, from the daemon's events and the workers' logs. Pure.

A recovery lasts from the instant at which the workers died (in the emulator's audit log) to the first step after it.
Its phases follow each other, except `delete`, which runs beside `create`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

PHASES = ("detect", "create", "boot", "launch", "first_step")

_STEP = re.compile(r"^step (\d+) loss ([0-9.]+)")
_RESUMED = re.compile(r"^resumed from step (\d+)")
_SAVED = re.compile(r"^saved step (\d+)")


@dataclass(frozen=True, slots=True)
class Life:
    """
    One run, by its log. `last`: its last step; `resumed`: the step at which it began, 0 for the beginning.

    `in_flight`: the largest number of steps during one save.
    """

    token: str
    resumed: int = 0
    last: int = 0
    saved: int = 0
    in_flight: int = 0
    loss: float | None = None


def read_life(token: str, log: str, save_every: int) -> Life:
    """The run in the log of its worker 0."""
    resumed = last = saved = in_flight = 0
    loss: float | None = None
    for line in log.splitlines():
        if found := _STEP.match(line):
            last, loss = int(found[1]), float(found[2])
            last_due = last // save_every * save_every
            if last_due > max(saved, resumed):
                in_flight = max(in_flight, last - last_due)
        elif found := _RESUMED.match(line):
            resumed = last = int(found[1])
        elif found := _SAVED.match(line):
            saved = int(found[1])
    return Life(token, resumed, last, saved, in_flight, loss)


@dataclass(frozen=True, slots=True)
class Recovery:
    """From one loss to the first step after it. `seconds` maps phases (and `delete`) to lengths."""

    lost_node: str
    new_node: str
    zone: str
    seconds: Mapping[str, float]
    resumed_from: int
    steps_redone: int
    allowed: int

    @property
    def total(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in PHASES)


@dataclass(frozen=True, slots=True)
class Told:
    """An event of the daemon, as `tpucare events --json` gives it."""

    at: datetime
    kind: str
    node: str
    text: str
    fields: Mapping[str, Any]


def recoveries(
    losses: Sequence[tuple[str, datetime]],
    events: Sequence[Told],
    lives: Sequence[Life],
    zones: Mapping[str, str],
    save_every: int,
) -> list[Recovery]:
    """
    One per loss that was followed by progress on a later node.

    losses: node and the instant at which its workers died   lives: in the order of their launches
    """
    found = []
    for node, lost_at in losses:
        after = next((event for event in events if event.kind == "progress" and event.at > lost_at), None)
        if after is None:
            continue
        before = [life for life in lives if life.token.startswith(f"{node}.")]
        next_life = next((life for life in lives if life.token.startswith(f"{after.node}.")), None)
        last = before[-1].last if before else 0
        resumed = next_life.resumed if next_life is not None else 0
        found.append(
            Recovery(
                lost_node=node,
                new_node=after.node,
                zone=zones.get(after.node, ""),
                seconds=_phases(node, after.node, lost_at, events),
                resumed_from=resumed,
                steps_redone=last - resumed,
                allowed=save_every + (before[-1].in_flight if before else 0),
            )
        )
    return found


def _phases(old: str, new: str, lost_at: datetime, events: Sequence[Told]) -> dict[str, float]:
    def first(kind: str, node: str, **fields: object) -> datetime | None:
        return next(
            (
                event.at
                for event in events
                if event.kind == kind
                and event.node == node
                and event.at >= lost_at
                and fields.items() <= dict(event.fields).items()
            ),
            None,
        )

    seen = first("state", old, state="PREEMPTED") or first("gone", old)
    marks = {
        "detect": seen,
        "create": first("create-accepted", new),
        "boot": first("answers", new),
        "launch": first("launched", new),
        "first_step": first("progress", new),
    }
    seconds, since = {}, lost_at
    for phase, at in marks.items():
        if at is not None:
            # Small slices may train before the launch's answer arrives: a phase is never negative.
            seconds[phase] = max(0.0, (at - since).total_seconds())
            since = max(since, at)
    deleted = first("delete-accepted", old)
    if deleted is not None and seen is not None:
        seconds["delete"] = max(0.0, (deleted - seen).total_seconds())
    return seconds
