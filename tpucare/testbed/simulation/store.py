"""
A store without a disk, with the guarantees of `adapters.state.store`: for long histories, and kills at every commit.

A second object over the same `Disk` is the next process. It reads the same JSON as from a real disk, so that only data
which a file can hold outlives a kill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tpucare.adapters.state.market_files import Markets, decode_markets, encode_markets
from tpucare.adapters.state.store import FLEET, MEMORY
from tpucare.model.errors import StoreFull
from tpucare.model.memory import FleetRecord, Memory, is_old
from tpucare.model.resources import Event

OWNER = "o-simulated000"


class DiskFault(StrEnum):
    """A fault of the next commit. `TORN`: the process dies before the commit is on the disk; `CUT`: right after."""

    FULL = "disk-full"
    TORN = "torn-commit"
    CUT = "killed-after-commit"


class ProcessDied(Exception):
    """The process is killed at this point of its code."""


@dataclass(slots=True)
class Disk:
    """The data that outlives a process. `faults`: of the next commits, in order."""

    owner: str = OWNER
    lost: bool = False
    marked: datetime | None = None
    memories: dict[str, Memory] = field(default_factory=dict)
    fleets: dict[str, FleetRecord] = field(default_factory=dict)
    events: deque[tuple[int, Event]] = field(default_factory=lambda: deque(maxlen=1000))
    written: int = 0
    commits: int = 0
    faults: deque[DiskFault] = field(default_factory=deque)
    markets: bytes = b""


class DiskMarkets:
    """`ports.MarketKnowledge` over a `Disk`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def own(self) -> Markets:
        return decode_markets(self._disk.markets)

    def of_others(self) -> Sequence[Markets]:
        return ()

    def save(self, markets: Markets) -> None:
        self._disk.markets = encode_markets(markets)


class MemoryStore:
    """`ports.Store` over a `Disk`. Like a file, it holds exactly the committed data."""

    def __init__(self, disk: Disk, now: datetime | None = None) -> None:
        self.disk = disk
        self.old = now is not None and disk.marked is not None and is_old(disk.marked, now)

    @property
    def owner(self) -> str:
        return self.disk.owner

    @property
    def lost(self) -> bool:
        return self.disk.lost

    def mark_current(self, now: datetime) -> None:
        self.disk.marked = now

    def confirm(self) -> None:
        self.disk.lost = self.old = False

    def memories(self) -> dict[str, Memory]:
        stored = sorted(self.disk.memories.items())
        return {slot: MEMORY.decode(MEMORY.encode(memory), f"slot {slot}") for slot, memory in stored}

    def save(self, changes: Mapping[str, Memory], events: Sequence[Event] = ()) -> None:
        if not changes and not events:
            return
        disk = self.disk
        fault = disk.faults.popleft() if disk.faults else None
        if fault is DiskFault.FULL:
            raise StoreFull("the disk is full: the last transaction was not made")
        if fault is DiskFault.TORN:
            raise ProcessDied(fault.value)
        disk.memories.update(changes)
        for event in events:
            disk.written += 1
            disk.events.append((disk.written, event))
        disk.commits += 1
        if fault is DiskFault.CUT:
            raise ProcessDied(fault.value)

    def fleets(self) -> dict[str, FleetRecord]:
        stored = sorted(self.disk.fleets.items())
        return {name: FLEET.decode(FLEET.encode(record), f"fleet {name}") for name, record in stored}

    def save_fleet(self, record: FleetRecord) -> None:
        self.disk.fleets[record.name] = record

    def events(self, *, slot: str = "", after: int = 0, limit: int = 1000) -> list[tuple[int, Event]]:
        """Events with their numbers, oldest first; only the last thousand are kept."""
        found = [
            (number, event)
            for number, event in self.disk.events
            if number > after and (not slot or event.slot == slot or self._fleet_of(event.slot) == slot)
        ]
        return found[:limit]

    def _fleet_of(self, slot: str) -> str:
        memory = self.disk.memories.get(slot)
        return memory.fleet if memory is not None else slot.rpartition("-")[0]
