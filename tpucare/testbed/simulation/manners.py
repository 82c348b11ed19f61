"""
How those are treated who refuse us for a while: the API that limits reads, machines whose guard blocks us.

Fed with each listing that failed and each delete; what a guard does the machines know.
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
"""No more of one process within the window: half of those that a poll of 5 s would bring."""


class Manners:
    """`blocked`: whether a guard of a machine of that node blocks us now, while nothing else is wrong with any."""

    def __init__(self, now: Callable[[], float], blocked: Callable[[NodeLife], bool]) -> None:
        self.now = now
        self.blocked = blocked
        self._limited: deque[float] = deque()

    def process_began(self) -> None:
        self._limited.clear()

    def listing_failed(self, error: Exception) -> str | None:
        """What is wrong with having asked for that listing, if anything is."""
        if not isinstance(error, RateLimited):
            return None
        self._limited.append(self.now())
        while self._limited[0] <= self.now() - LIMITED_WINDOW:
            self._limited.popleft()
        count = len(self._limited)
        minutes = LIMITED_WINDOW / 60
        return f"{count} listings refused for their rate in {minutes:.0f} min" if count > LIMITED_LISTINGS else None

    def deleted(self, record: Mapping[str, Any], life: NodeLife | None, past: NodeMemory, slot: Slot) -> str | None:
        """What is wrong with that delete, if anything is."""
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
