"""Quota and rate of a project: what is counted, and what a create would break."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from datetime import datetime, timedelta

from tpucare.model.accelerators import Accelerator, region_of
from tpucare.testbed.emulator.world.capacity import units
from tpucare.testbed.emulator.world.config_zones import Quota

MINUTE = timedelta(minutes=1)


class QuotaBook:
    """
    Use of every limit, per project. A node counts from CREATING to the end of DELETING, dead ones included.

    The book is kept as nodes come and go: a question costs as much as there are limits, not nodes.
    """

    def __init__(self, quotas: Sequence[Quota]) -> None:
        self._quotas = tuple(quotas)
        self._used: Counter[tuple[str, int]] = Counter()

    def lift(self) -> None:
        """There is no limit any more."""
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
    """Calls of the last minute, per project. A call that was refused for the rate is not counted."""

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
