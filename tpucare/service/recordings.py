"""
Recordings of what the daemon saw of its places, for `tpucare simulate --traces`.

Made of the event logs of all stores of the state folder, as far back as they reach. One file for each zone: where
several accelerator types were asked for there, the one of which most was seen.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tpucare.model.errors import StoreError, TpuCareError
from tpucare.model.local_files import replace_file
from tpucare.model.recording import SPOT_TERMS, Sighting, recording, sightings_of
from tpucare.model.resources import Event, Provisioning
from tpucare.model.text import counted
from tpucare.service.options import Options
from tpucare.service.places import places
from tpucare.service.stores import Stores

Row = dict[str, Any]
_PAGE = 1000


def record_places(options: Options, folder: Path) -> list[Row]:
    """
    Write a recording per zone into *folder*; a row for each file.

    Raises: TpuCareError: nothing was seen of any place yet. OSError: a file cannot be written.
    """
    from tpucare.adapters.system import SystemClock

    found = sightings_of(_events(options))
    if not found:
        raise TpuCareError("no create was answered yet, so that nothing is known of any place: `tpucare apply FILE`")
    begins = min(one.at for sightings in found.values() for one in sightings)
    declared = places(options)["places"]
    spot = {(row["zone"], row["type"]): row["price"] for row in declared if row["terms"] in SPOT_TERMS}
    on_demand = {
        (row["zone"], row["type"]): row["price"] for row in declared if row["terms"] == Provisioning.ON_DEMAND.value
    }
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for place, sightings in sorted(_richest(found).items()):
        zone, kind = place
        made = recording(
            *(zone, kind, sightings),
            begins=begins,
            ends=SystemClock().now(),
            price=spot.get(place),
            on_demand=on_demand.get(place),
        )
        path = folder / f"{zone}.json"
        replace_file(path, f"{json.dumps(made)}\n".encode())
        rows.append({"file": str(path), "zone": zone, "type": kind, "sightings": len(sightings)})
    return rows


def told_row(row: Row) -> str:
    return f"{row['file']}: {row['type']}, {counted(row['sightings'], 'sighting')}"


def _richest(found: Mapping[tuple[str, str], list[Sighting]]) -> dict[tuple[str, str], list[Sighting]]:
    best: dict[str, tuple[str, str]] = {}
    for place, sightings in found.items():
        known = best.get(place[0])
        if known is None or len(sightings) > len(found[known]):
            best[place[0]] = place
    return {place: found[place] for place in best.values()}


def _events(options: Options) -> Iterator[Event]:
    """The events of all stores, in order."""
    logs: list[Iterable[Event]] = [_events_of(options, name) for name in Stores(options).names()]
    yield from heapq.merge(*logs, key=lambda event: event.at)


def _events_of(options: Options, name: str) -> Iterator[Event]:
    from tpucare.adapters.state.store import open_reader

    try:
        with open_reader(options.state, name=name) as store:
            last = 0
            while page := store.events(after=last, limit=_PAGE):
                last = page[-1][0]
                yield from (event for _, event in page)
    except StoreError:
        return
