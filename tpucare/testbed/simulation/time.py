"""
Virtual Clock and Executor: effects take virtual time, begin late and end out of order, without any real waiting.

An effect runs at one instant: when it is submitted, or `delay` seconds later where the executor has a delay. Its end
is delivered after the lengths that its calls wait (`VirtualExecutor.waiting`). So a killed process loses effects before
and after they are carried out, and both kinds of loss come from the seed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta

from tpucare.model.ports import Finished, Lane

START = datetime(2026, 11, 1, tzinfo=UTC)


class VirtualClock:
    """Time that passes, and a wall clock that may be set apart from it (`jump`)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.offset = timedelta()
        self._told: tuple[float, datetime] = (0.0, START)

    def now(self) -> datetime:
        return self.true_now() + self.offset if self.offset else self.true_now()

    def monotonic(self) -> float:
        return self.seconds

    def true_now(self) -> datetime:
        """The cloud's time: never jumps."""
        # Called several times in every step: making an instant costs more than comparing it with the last one.
        if self._told[0] != self.seconds:
            self._told = (self.seconds, START + timedelta(seconds=self.seconds))
        return self._told[1]

    def jump(self, by: timedelta) -> None:
        self.offset += by


class VirtualExecutor:
    """
    `tick()` advances the world to now; `next_event()` is the time of its next scheduled event.

    delay: seconds from submitting an effect until it takes effect, as by a slow thread or network; None: at once
    grain: the process wakes up only at multiples of so many seconds, as on a busy machine, and then finds all events
        since together. For histories of months.
    """

    def __init__(
        self,
        clock: VirtualClock,
        tick: Callable[[], None],
        next_event: Callable[[], float | None],
        delay: Callable[[Lane], float] | None = None,
        grain: float = 0.0,
    ) -> None:
        self.clock = clock
        self._tick = tick
        self._next_event = next_event
        self._delay = delay
        self._grain = grain
        self._begins: list[tuple[float, int, Hashable, Callable[[], object]]] = []
        self._ends: list[tuple[float, int, Finished]] = []
        self._done: list[Finished] = []
        self._count = 0
        self._waited = 0.0
        self._nudged = False
        self.dead = False

    @property
    def under_way(self) -> int:
        """Number of effects that were submitted and whose end is not delivered yet."""
        return len(self._begins) + len(self._ends) + len(self._done)

    def die(self, arrives: Callable[[], bool]) -> None:
        """Kill the process: no end is delivered. *arrives*: whether an effect in flight still takes effect."""
        self.dead = True
        self._begins = [begin for begin in self._begins if arrives()]
        heapq.heapify(self._begins)
        self._ends.clear()
        self._done.clear()

    def waiting(self, seconds: float) -> None:
        """Let the call in flight take *seconds*."""
        self._waited += seconds

    @property
    def heard_at(self) -> float:
        """When the process gets the answer of the call in flight, if that call waits no more."""
        return self._wakes_at(self.clock.seconds + self._waited)

    def _wakes_at(self, due: float) -> float:
        return math.ceil(due / self._grain) * self._grain if self._grain else due

    def submit(self, lane: Lane, tag: Hashable, effect: Callable[[], object]) -> None:
        if self.dead:
            return
        self._count += 1
        late = self._delay(lane) if self._delay is not None else 0.0
        if late > 0.0:
            heapq.heappush(self._begins, (self.clock.seconds + late, self._count, tag, effect))
        else:
            self._run(tag, effect)

    def _run(self, tag: Hashable, effect: Callable[[], object]) -> None:
        self._waited = 0.0
        try:
            finished = Finished(tag, result=effect())
        except Exception as error:
            finished = Finished(tag, error=error)
        if self.dead:
            return
        self._count += 1
        heapq.heappush(self._ends, (self.clock.seconds + self._waited, self._count, finished))

    def finished(self) -> list[Finished]:
        self._deliver()
        done, self._done = self._done, []
        return done

    def nudge(self) -> None:
        self._nudged = True

    def sleep(self, timeout: timedelta) -> None:
        self.sleep_until(self.clock.seconds + timeout.total_seconds())

    def sleep_until(self, until: float) -> None:
        """As `sleep`, with the instant at which it ends."""
        while not self._nudged and not self._done:
            due = self._next_due()
            if due is None or due > until:
                break
            self._live_until(due)
        if self._grain:
            until = self._wakes_at(self.clock.seconds if self._nudged or self._done else until)
            while (due := self._next_due()) is not None and due <= until:
                self._live_until(due)
            self._live_until(until)
        elif not self._nudged and not self._done and until > self.clock.seconds:
            self._live_until(until)
        self._nudged = False

    def pass_time(self, until: float) -> None:
        """Let time pass until then, or until the next event, without waking the process."""
        due = self._next_due()
        self._live_until(until if due is None else min(due, until))

    def _live_until(self, due: float) -> None:
        if due > self.clock.seconds:
            self.clock.seconds = due
        self._tick()
        self._deliver()

    def _next_due(self) -> float | None:
        due = self._next_event()
        for heap in (self._begins, self._ends):
            if heap and (due is None or heap[0][0] < due):
                due = heap[0][0]
        return due

    def _deliver(self) -> None:
        now = self.clock.seconds
        while self._begins and self._begins[0][0] <= now:
            _, _, tag, effect = heapq.heappop(self._begins)
            self._run(tag, effect)
        while self._ends and self._ends[0][0] <= now:
            self._done.append(heapq.heappop(self._ends)[2])
