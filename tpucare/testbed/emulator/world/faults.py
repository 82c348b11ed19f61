"""
The fate of each call: latency, refusals, lost answers, outages. Drawn before the call.

An outage of a zone does not touch its machines: only the API cannot reach them.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.config import FaultRates, WorldConfig
from tpucare.testbed.emulator.world.records import ApiError, CallFate

FOR_EVER = datetime.max.replace(tzinfo=UTC)
OUTAGE_KINDS = ("api", "internal", "zone", "slow")


@dataclass(frozen=True, slots=True)
class ActiveOutage:
    """One outage; once `end` has passed, the next draw drops it."""

    kind: str
    zone: str
    start: datetime
    end: datetime
    seconds: float


@dataclass(frozen=True, slots=True)
class _Order:
    """The fate that an operator ordered for the next call of a method."""

    error: ApiError | None
    applied: bool
    late: float = 0.0


class Fates:
    """Draws the fate of every call from a stream of its own."""

    def __init__(self, config: WorldConfig, rng: random.Random, start: datetime) -> None:
        self._config = config
        self._rng = rng
        self._orders: dict[str, deque[_Order]] = defaultdict(deque)
        self._outages = [
            ActiveOutage(
                one.kind,
                one.zone,
                start + timedelta(seconds=one.at),
                start + timedelta(seconds=one.at + one.duration),
                one.seconds,
            )
            for one in config.faults.outages
        ]
        dark = [name for name, zone in config.zones.items() if zone.dark]
        self._outages += [ActiveOutage("zone", name, start, FOR_EVER, 0.0) for name in dark]

    def order(self, method: str, error: ApiError, *, applied: bool) -> None:
        """The next call of *method* gets this error; further orders for it wait for the calls after it."""
        self._orders[method].append(_Order(error, applied))

    def order_delay(self, method: str, seconds: float) -> None:
        """The next call of *method* takes effect after *seconds*, whether or not its caller still waits."""
        self._orders[method].append(_Order(None, applied=True, late=seconds))

    def cancel_orders(self, method: str = "") -> None:
        """Drop the orders for next calls (of *method*, or of all) that have not been used yet."""
        if method:
            self._orders.pop(method, None)
        else:
            self._orders.clear()

    def reconfigure(self, config: WorldConfig) -> None:
        """Draw by *config* from now on."""
        self._config = config

    def add_outage(self, outage: ActiveOutage) -> None:
        self._outages.append(outage)

    def end_outages(self) -> None:
        self._outages.clear()

    def dark_zones(self, now: datetime) -> frozenset[str]:
        """Zones that the API cannot reach now."""
        return frozenset(one.zone for one in self._current(now) if one.kind == "zone")

    def draw(self, method: str, zone: str, now: datetime, peer: str) -> CallFate:
        """*zone* is `-` or empty for calls that are not about a single zone."""
        latency = self._latency(method, now)
        error = self._outage_error(zone, now)
        if error is not None:
            return CallFate(latency, 0.0, error, applied=False, peer=peer)
        if self._orders[method]:
            order = self._orders[method].popleft()
            return CallFate(latency / 2 + order.late, latency / 2, order.error, applied=order.applied, peer=peer)
        return self._by_chance(self._config.faults.methods.get(method, self._config.faults.calls), latency, peer)

    def _latency(self, method: str, now: datetime) -> float:
        lengths = self._config.latencies
        is_read = method.startswith(("Get", "List"))
        drawn = (lengths.read if is_read else lengths.write).draw(self._rng)
        return drawn + sum(one.seconds for one in self._current(now) if one.kind == "slow")

    def _outage_error(self, zone: str, now: datetime) -> ApiError | None:
        kinds = {one.kind for one in self._current(now) if one.kind != "zone" or one.zone == zone}
        if "internal" in kinds:
            return texts.internal()
        return texts.unavailable() if kinds & {"api", "zone"} else None

    def _by_chance(self, rates: FaultRates, latency: float, peer: str) -> CallFate:
        lot = self._rng.random()
        half = latency / 2
        for share, error, applied in (
            (rates.unavailable, texts.unavailable, False),
            (rates.internal, texts.internal, False),
            (rates.lost_before, texts.lost, False),
            (rates.lost_after, texts.lost, True),
        ):
            if lot < share:
                return CallFate(half, half, error(), applied, peer)
            lot -= share
        if lot < rates.slow:
            extra = rates.slow_latency.draw(self._rng)
            # Half of the slow calls take effect late, perhaps after their caller has given up.
            late = self._rng.random() < 0.5
            return CallFate(half + extra * late, half + extra * (not late), peer=peer)
        return CallFate(half, half, peer=peer)

    def _current(self, now: datetime) -> list[ActiveOutage]:
        if not self._outages:
            return []
        self._outages = [one for one in self._outages if one.end > now]
        return [one for one in self._outages if one.start <= now]
