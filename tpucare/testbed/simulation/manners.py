"""
Checks two properties: fewer listings while the API limits reads, and patience with machines whose guard blocks us.

Called with each failed listing and each delete; the machines know whether a guard blocks us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tpucare.model.causes import Reason
from tpucare.model.errors import RateLimited
from tpucare.model.memory import NodeMemory
from tpucare.model.resources import Health, NodeState, Slot
from tpucare.testbed.emulator.world.state import NodeLife
from tpucare.testbed.simulation.time import START

LIMITED_WINDOW = 300.0
LIMITED_LISTINGS = 26
"""Limit per process and window: half of the listings of a poll of 5 s."""


class Manners:
    """`blocked`: whether a guard of that node blocks us now, and its machines have no other fault."""

    def __init__(self, now: Callable[[], float], blocked: Callable[[NodeLife], bool]) -> None:
        self.now = now
        self.blocked = blocked
        self._limited: deque[float] = deque()

    def process_began(self) -> None:
        self._limited.clear()

    def listing_failed(self, error: Exception) -> str | None:
        """The finding about a failed listing; None = no finding."""
        if not isinstance(error, RateLimited):
            return None
        self._limited.append(self.now())
        while self._limited[0] <= self.now() - LIMITED_WINDOW:
            self._limited.popleft()
        count = len(self._limited)
        minutes = LIMITED_WINDOW / 60
        return f"{count} listings refused for their rate in {minutes:.0f} min" if count > LIMITED_LISTINGS else None

    def deleted(self, record: Mapping[str, Any], life: NodeLife | None, past: NodeMemory, slot: Slot) -> str | None:
        """The finding about a delete; None = no finding."""
        if (
            past.delete is None
            or past.delete.reason is not Reason.JUDGED
            or past.answered
            or life is None
            or not self.blocked(life)
        ):
            return None
        healthy = record["state"] == NodeState.READY and record["health"] in (Health.UNSPECIFIED, Health.HEALTHY)
        age = self.now() - (life.record.create_time - START).total_seconds()
        if not healthy or age >= slot.care.boot_timeout.total_seconds():
            return None
        return f"{life.path.node_id} is given up after {age:.0f} s ({past.delete.why}), and only its guard kept us out"
