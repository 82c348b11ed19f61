"""
What a project saw of the capacity of its places, as a recording that `tpucare simulate --traces` lives on.

The file is the one of the shipped traces, `spot-capacity-trace/1`. A daemon sees less than a prober: while it holds
nodes, at least their hosts are there; a create that brings a node shows room for it, a stockout shows none beyond what
is held, and a preemption takes what was lost. Between two sightings nothing is known, and a replay carries the last one
on. Pure; standard library only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from tpucare.model.causes import Reason
from tpucare.model.errors import NoCapacity
from tpucare.model.resources import Event, NodeState, Provisioning

RECORDING_FORMAT = "spot-capacity-trace/1"
SPOT_TERMS = (Provisioning.SPOT.value, Provisioning.PREEMPTIBLE.value)
_TAKEN = (NodeState.PREEMPTED.name, NodeState.TERMINATED.name)


class Sight(StrEnum):
    """What was seen of a node or a create."""

    GRANTED = "granted"
    REFUSED = "refused"
    PREEMPTED = "preempted"
    GIVEN_BACK = "given back"


@dataclass(frozen=True, slots=True)
class Sighting:
    """One sight in a zone: `hosts` of the node that was asked for, held, lost or given back."""

    at: datetime
    sight: Sight
    hosts: int


def sightings_of(events: Iterable[Event]) -> dict[tuple[str, str], list[Sighting]]:
    """
    What the event log tells of spot capacity, by (zone, accelerator type); *events* are in order.

    A create counts as granted when its node is READY, from the instant it was asked for: the room was there then.
    """
    asked: dict[str, tuple[tuple[str, str], int, datetime]] = {}
    held: set[str] = set()
    found: dict[tuple[str, str], list[Sighting]] = {}
    for event in events:
        node, fields = event.node, event.fields
        if event.kind == "create":
            if fields.get("terms", SPOT_TERMS[0]) in SPOT_TERMS and fields.get("hosts"):
                place = str(fields["zone"]), str(fields["accelerator_type"])
                asked[node] = (place, int(str(fields["hosts"])), event.at)
            continue
        if node not in asked:
            continue
        place, hosts, at = asked[node]
        sights = found.setdefault(place, [])
        if event.kind == "state" and fields.get("state") == NodeState.READY.name and node not in held:
            held.add(node)
            sights.append(Sighting(at, Sight.GRANTED, hosts))
        elif event.kind == "create-failed" and fields.get("error") == NoCapacity.__name__:
            sights.append(Sighting(event.at, Sight.REFUSED, hosts))
        elif node in held and (end := _end(event)) is not None:
            held.remove(node)
            sights.append(Sighting(event.at, end, hosts))
    return {place: sights for place, sights in found.items() if sights}


def _end(event: Event) -> Sight | None:
    """Whether the cloud took a node, or we gave it back; None: neither."""
    if event.kind == "state":
        return Sight.PREEMPTED if event.fields.get("state") in _TAKEN else None
    if event.kind == "delete":
        return Sight.PREEMPTED if event.fields.get("reason") == Reason.DEAD.value else Sight.GIVEN_BACK
    return Sight.PREEMPTED if event.kind in ("gone", "lost") else None


def recording(
    zone: str,
    machine: str,
    sightings: Iterable[Sighting],
    *,
    begins: datetime,
    ends: datetime,
    interval: timedelta = timedelta(minutes=10),
    price: float | None = None,
    on_demand: float | None = None,
) -> dict[str, Any]:
    """
    The content of the file `<zone>.json` of one zone, from *begins* to *ends*; earlier sightings tell what was held.

    Shape of `capacity`: one entry per *interval*, the hosts known to be there at its end; None where nothing is known.
    A preemption counts for its interval even if a new node came within it. `start_s` counts from the epoch, so that the
    recordings of all zones are aligned by it. Prices are dollars an hour of one node.
    """
    left = deque(sorted((one for one in sightings if one.at < ends), key=lambda one: one.at))
    held = 0
    capacity: list[int | None] = []
    for tick in range(-1, max(1, math.ceil((ends - begins) / interval))):
        seen: int | None = held or None
        lost: int | None = None
        while left and left[0].at < begins + (tick + 1) * interval:
            one = left.popleft()
            if one.sight is Sight.GRANTED:
                held += one.hosts
            elif one.sight is not Sight.REFUSED:
                held = max(0, held - one.hosts)
            seen = None if one.sight is Sight.GIVEN_BACK and not held else held
            if one.sight is Sight.PREEMPTED:
                lost = held if lost is None else min(lost, held)
        if tick >= 0:
            capacity.append(seen if lost is None else lost)
    prices: dict[str, Any] = {"spot": price, "on_demand": on_demand, "unit": "USD/h per node"}
    return {
        "format": RECORDING_FORMAT,
        "dataset": "own",
        "provider": "gcp",
        "region": zone.rpartition("-")[0],
        "zone": zone,
        "machine": machine,
        "signal": "own-creates",
        "start": begins.isoformat(),
        "start_s": begins.timestamp(),
        "interval_s": interval.total_seconds(),
        "max_capacity": max((amount for amount in capacity if amount), default=1),
        "capacity": capacity,
        "price": {name: value for name, value in prices.items() if value is not None} if price is not None else {},
    }
