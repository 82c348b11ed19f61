"""
Virtual Clock and Executor: effects take virtual time, finish in the order of their ends, and nothing ever waits.

An effect takes hold at the instant it is submitted plus what its call waits before, and its end is delivered after
what the call waits behind it: see `VirtualExecutor.waiting`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta

from tpucare.ports import Finished, Lane

START = datetime(2026, 11, 1, tzinfo=UTC)


class VirtualClock:
    """Wall time may be set apart from the time that passes (`jump`)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.offset = timedelta()

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds) + self.offset

    def monotonic(self) -> float:
        return self.seconds

    def true_now(self) -> datetime:
        """The cloud's time: never jumps."""
        return START + timedelta(seconds=self.seconds)

    def jump(self, by: timedelta) -> None:
        self.offset += by


class VirtualExecutor:
    """`tick(now)` lets the world live until an instant; `next_event()` tells when it will next act by itself."""

    def __init__(self, clock: VirtualClock, tick: Callable[[], None], next_event: Callable[[], float | None]) -> None:
        self.clock = clock
        self._tick = tick
        self._next_event = next_event
        self._ends: list[tuple[float, int, Finished]] = []
        self._done: list[Finished] = []
        self._count = 0
        self._waited = 0.0
        self._nudged = False
        self.dead = False

    def waiting(self, seconds: float) -> None:
        """A call that is under way takes that long."""
        self._waited += seconds

    def submit(self, lane: Lane, tag: Hashable, effect: Callable[[], object]) -> None:
        if self.dead:
            return
        self._waited = 0.0
        try:
            finished = Finished(tag, result=effect())
        except Exception as error:
            finished = Finished(tag, error=error)
        self._count += 1
        heapq.heappush(self._ends, (self.clock.seconds + self._waited, self._count, finished))

    def finished(self) -> list[Finished]:
        self._deliver()
        done, self._done = self._done, []
        return done

    def nudge(self) -> None:
        self._nudged = True

    def sleep(self, timeout: timedelta) -> None:
        until = self.clock.seconds + timeout.total_seconds()
        while not self._nudged and not self._done:
            event, end = self._next_event(), self._ends[0][0] if self._ends else None
            due = min(at for at in (until, event, end) if at is not None)
            if due > until or (due == until and event != due and end != due):
                break
            self.clock.seconds = max(self.clock.seconds, due)
            self._tick()
            self._deliver()
            if self.clock.seconds >= until:
                break
        if not self._nudged and not self._done:
            self.clock.seconds = max(self.clock.seconds, until)
            self._tick()
        self._nudged = False

    def _deliver(self) -> None:
        while self._ends and self._ends[0][0] <= self.clock.seconds:
            self._done.append(heapq.heappop(self._ends)[2])
