"""
Capacity, quota and rate limits: how much a zone has at each instant, which nodes use it, which limits a create breaks.

A supply is an endless or finite stream of changes (instant, amount), drawn lazily from a random stream of its own, so
that calls never shift the capacity of a zone. A pool is a supply's present amount and the claims on it.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

from tpucare.model.accelerators import Accelerator, region_of
from tpucare.model.errors import ConfigError
from tpucare.model.recording import RECORDING_FORMAT
from tpucare.testbed.emulator.world.config import Capacity, CapacityProcess, Quota

Change = tuple[datetime, int]
Supply = Iterator[Change]
"""Changes in order of time; the first is the amount at the start."""


CAPACITY_TIERS: Mapping[str, str] = {
    "spot": "spot",
    "preemptible": "spot",
    "on-demand": "on-demand",
    "reserved": "reserved",
}
"""Spot and preemptible nodes draw on one capacity and one quota."""


@dataclass(frozen=True, slots=True)
class Trace:
    """
    Ticks of measured capacity; shape: one entry per `interval`, gaps filled with the last value.

    begins: tick 0, in seconds of the clock that the traces of one dataset share
    price, on_demand: of an hour, as the file has them (`price_unit`); None: it has none. Prices of one dataset compare
    """

    name: str
    interval: timedelta
    maximum: int
    ticks: tuple[int, ...]
    zone: str = ""
    begins: float = 0.0
    price: float | None = None
    on_demand: float | None = None
    price_unit: str = ""

    @property
    def ends(self) -> float:
        """Seconds of the dataset's clock at the end of the last tick."""
        return self.begins + len(self.ticks) * self.interval.total_seconds()


def shipped_traces() -> tuple[str, ...]:
    """Names, as `<dataset>/<zone>`, of the traces that come with the package."""
    folder = resources.files("tpucare.testbed.emulator") / "traces"
    datasets = [entry for entry in folder.iterdir() if entry.is_dir() and entry.name != "LICENSES"]
    names = [f"{dataset.name}/{file.name}" for dataset in datasets for file in dataset.iterdir()]
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


@functools.cache
def load_trace(name: str) -> Trace:
    """A shipped trace by name, or a file by path. Raises: ConfigError: no such trace, or not of the format."""
    try:
        raw = json.loads(_trace_text(name))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"trace {name}: cannot be read: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != RECORDING_FORMAT or not raw.get("capacity"):
        raise ConfigError(f"trace {name}: not in format {RECORDING_FORMAT}")
    try:
        interval = timedelta(seconds=float(raw["interval_s"]))
        ticks = _without_gaps([None if tick is None else int(tick) for tick in raw["capacity"]])
        spot, on_demand, unit = _prices(raw.get("price") or {}, len(ticks))
        begins, zone = float(raw.get("start_s") or 0.0), str(raw.get("zone", ""))
        trace = Trace(name, interval, int(raw["max_capacity"]), ticks, zone, begins, spot, on_demand, unit)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"trace {name}: interval_s, max_capacity, capacity or price is malformed") from error
    if trace.interval <= timedelta() or min(ticks) < 0:
        raise ConfigError(f"trace {name}: interval_s and capacity must be positive")
    return trace


def _prices(raw: Mapping[str, Any], ticks: int) -> tuple[float | None, float | None, str]:
    """Spot price (the mean over the ticks, where it changes), price on demand, and their unit."""
    changes = [(int(tick), float(price)) for tick, price in raw.get("spot_changes") or ()]
    if changes:
        ends = [*(tick for tick, _ in changes[1:]), ticks]
        length = ends[-1] - changes[0][0]
        spot: float | None = sum(price * (end - tick) for (tick, price), end in zip(changes, ends, strict=True)) / max(
            1, length
        )
    else:
        spot = float(raw["spot"]) if raw.get("spot") is not None else None
    on_demand = float(raw["on_demand"]) if raw.get("on_demand") is not None else None
    return spot, on_demand, str(raw.get("unit", ""))


def _trace_text(name: str) -> str:
    shipped = resources.files("tpucare.testbed.emulator") / "traces" / f"{name}.json"
    if shipped.is_file():
        return shipped.read_text(encoding="utf-8")
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"trace {name}: neither a file nor one of {', '.join(shipped_traces())}")
    return path.read_text(encoding="utf-8")


def _without_gaps(ticks: list[int | None]) -> tuple[int, ...]:
    last = next((tick for tick in ticks if tick is not None), 0)
    filled = []
    for tick in ticks:
        last = last if tick is None else tick
        filled.append(last)
    return tuple(filled)


def supply(config: Capacity, start: datetime, rng: random.Random) -> Supply:
    """The stream of changes that *config* describes. Raises: ConfigError: an unreadable trace, at once."""
    if config.amount is not None:
        return iter([(start, config.amount)])
    if config.process is not None:
        return _from_process(config.process, start, rng)
    if config.schedule:
        return _from_schedule(config.schedule, start)
    return _from_trace(load_trace(config.trace), config.trace_from, start, rng)


def _from_schedule(schedule: tuple[tuple[float, int], ...], start: datetime) -> Supply:
    pairs = sorted(schedule, key=lambda pair: pair[0])
    if pairs[0][0] > 0:
        yield start, 0
    for offset, amount in pairs:
        yield start + timedelta(seconds=offset), amount


def _from_process(process: CapacityProcess, start: datetime, rng: random.Random) -> Supply:
    """Exponential waits; during the stockout after a burst nothing is born."""
    now = start
    amount = min(process.maximum if process.initial is None else process.initial, process.maximum)
    barren_until = start
    yield now, amount
    total = process.births + process.deaths + process.bursts
    while total > 0:
        now += timedelta(hours=rng.expovariate(total))
        kind = rng.uniform(0, total)
        if kind < process.births:
            amount = min(process.maximum, amount + 1) if now >= barren_until else amount
        elif kind < process.births + process.deaths:
            amount = max(0, amount - 1)
        else:
            amount -= round(amount * process.burst_share)
            barren_until = now + timedelta(seconds=process.stockout.draw(rng))
        # A draw without a change is yielded too: the world reads one change ahead, and the search for it must end.
        yield now, amount


def _from_trace(trace: Trace, first: int, start: datetime, rng: random.Random) -> Supply:
    """The instant of a change between two ticks is unknown: uniform within the interval."""
    count = len(trace.ticks)
    before = trace.ticks[first % count]
    yield start, before
    for tick in itertools.count(1):
        amount = trace.ticks[(first + tick) % count]
        if amount == before:
            continue
        yield start + (tick - 1 + rng.random()) * trace.interval, amount
        before = amount


@dataclass(slots=True)
class Pool:
    """
    The capacity that some accelerators of a zone share on one tier, and the claims on it by node id.

    `capacity` None is unlimited. A pool of one unit holds whole nodes only: a slice fits entirely or not at all.
    """

    zone: str
    accelerator: str
    tier: str
    unit: str
    capacity: int | None
    burst_seconds: float = 60.0
    claims: dict[int, int] = field(default_factory=dict)
    used: int = 0

    def covers(self, accelerator: Accelerator, tier: str) -> bool:
        return self.tier == tier and self.accelerator in ("", accelerator.type, accelerator.generation)

    def claim(self, node_id: int, accelerator: Accelerator) -> bool:
        """Claim the units that a node needs; False, and nothing is claimed, when they do not fit."""
        need = units(self.unit, accelerator)
        if self.capacity is not None and self.used + need > self.capacity:
            return False
        self.claims[node_id] = need
        self.used += need
        return True

    def release(self, node_id: int) -> None:
        """Harmless when there is no claim."""
        self.used -= self.claims.pop(node_id, 0)

    def victims(self, rng: random.Random) -> list[int]:
        """Ids of nodes to end, chosen by chance, so that the rest fits. Their claims stay until `release`."""
        if self.capacity is None or self.used <= self.capacity:
            return []
        order = list(self.claims)
        rng.shuffle(order)
        over = self.used - self.capacity
        chosen: list[int] = []
        for node_id in order:
            if over <= 0:
                break
            over -= self.claims[node_id]
            chosen.append(node_id)
        return chosen


def units(unit: str, accelerator: Accelerator) -> int:
    """Units of a pool, or of a quota, that one node uses."""
    return {
        "nodes": 1,
        "hosts": accelerator.hosts,
        "chips": accelerator.chips,
        "cores": accelerator.cores,
    }[unit]


# --- quota and rate limits of a project -------------------------------------------------------------------------------


MINUTE = timedelta(minutes=1)


class QuotaUse:
    """
    Use of every limit, per project. A node counts from CREATING to the end of DELETING, dead ones included.

    The counts follow each create and delete, so that a question costs as much as there are limits, not nodes.
    """

    def __init__(self, quotas: Sequence[Quota]) -> None:
        self._quotas = tuple(quotas)
        self._used: Counter[tuple[str, int]] = Counter()

    def drop_limits(self) -> None:
        """Drop every limit."""
        self._quotas = ()

    def exceeded(self, project: str, zone: str, accelerator: Accelerator, tier: str) -> list[Quota]:
        """Every limit that one more such node would break."""
        broken = []
        for index, quota in self._of(zone, accelerator, tier):
            if self._used[project, index] + units(quota.unit, accelerator) > quota.limit:
                broken.append(quota)
        return broken

    def add(self, project: str, zone: str, accelerator: Accelerator, tier: str) -> None:
        for index, quota in self._of(zone, accelerator, tier):
            self._used[project, index] += units(quota.unit, accelerator)

    def remove(self, project: str, zone: str, accelerator: Accelerator, tier: str) -> None:
        for index, quota in self._of(zone, accelerator, tier):
            self._used[project, index] -= units(quota.unit, accelerator)

    def _of(self, zone: str, accelerator: Accelerator, tier: str) -> list[tuple[int, Quota]]:
        return [pair for pair in enumerate(self._quotas) if _counts(pair[1], zone, accelerator, tier)]


def _counts(quota: Quota, zone: str, accelerator: Accelerator, tier: str) -> bool:
    return (
        quota.tier == tier
        and quota.generation in ("", accelerator.generation)
        and (not quota.types or accelerator.type in quota.types)
        and quota.size in ("", "single-host" if accelerator.hosts == 1 else "multi-host")
        and (quota.zone == zone if quota.zone else quota.region == region_of(zone))
    )


class RateWindow:
    """Calls of the last minute, per project. A call refused for its rate does not count."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._calls: dict[str, deque[datetime]] = {}

    def admit(self, project: str, now: datetime) -> bool:
        if self.limit is None:
            return True
        calls = self._calls.setdefault(project, deque())
        while calls and calls[0] <= now - MINUTE:
            calls.popleft()
        if len(calls) >= self.limit:
            return False
        calls.append(now)
        return True
