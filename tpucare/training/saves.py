"""
When to save next: after the interval that tpucare writes into a file of the run, and at once after a notice.

tpucare computes the interval (`daly_interval`) from the lives of nodes where the slot gets them and from the time for
which a save blocks the training, which is measured here and written beside that file. The interval may change while
the run lives. The save itself is left to the training loop.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from types import TracebackType
from typing import Any

from .processes import from_all_processes, this_process

# Without tpucare nothing is known of the node's life; this interval suits a save of 10 s and a life of five hours.
DEFAULT_SECONDS = 600.0
COSTS_KEPT = 20


class Saves:
    """
    Says when a save is due, and measures for how long saves block the training.

        saves = Saves()
        for step in range(first, last + 1):
            ...
            if saves.due() or step == last:
                with saves:
                    manager.save(step, args=...)

    A training that uses `Requests` hands it over instead, `Requests(saves=saves)`, and asks only `requests.look()`.

    default_seconds: interval while no file of tpucare says another one
    """

    def __init__(
        self,
        default_seconds: float = DEFAULT_SECONDS,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._file, self._notice = environ.get("TPUCARE_CADENCE", ""), environ.get("TPUCARE_NOTICE", "")
        self._clock = clock
        self._interval, self._read_at = default_seconds, 0
        self._seen_notice = 0
        self._last = clock()
        self._begun = 0.0
        self._costs: deque[float] = deque(maxlen=COSTS_KEPT)

    @property
    def interval_seconds(self) -> float:
        """The interval now; it changes with the file TPUCARE_CADENCE."""
        written = _written(self._file)
        if written and written != self._read_at:
            self._read_at = written
            self._interval = _interval_in(self._file) or self._interval
        return self._interval

    @property
    def save_seconds(self) -> float | None:
        """Median time for which a save blocked the training; None before the first one."""
        return median(self._costs) if self._costs else None

    def due(self) -> bool:
        """
        Whether to save now: the interval since the last save is over, or a new notice came. True once for each.

        A collective of all processes: all have to call it after the same step, and all get the same answer, since a
        save needs all of them and their clocks differ.
        """
        is_due = max(from_all_processes(int(self.is_due_here()))) > 0
        if is_due:
            self.restart()
        return is_due

    def is_due_here(self) -> bool:
        """As `due`, for this process alone and without a change; cheap enough for every step (two `stat`)."""
        return _written(self._notice) != self._seen_notice or self._clock() - self._last >= self.interval_seconds

    def restart(self) -> None:
        """A save begins or ended: count the interval anew, and the present notice as obeyed."""
        self._last, self._seen_notice = self._clock(), _written(self._notice)

    def __enter__(self) -> None:
        self._begun = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A notice that came during the save asks for one more.
        self._last = self._clock()
        if kind is None:
            self._costs.append(self._last - self._begun)
            self._tell_cost()

    def _tell_cost(self) -> None:
        if not self._file or this_process().index:
            return
        target = os.path.join(os.path.dirname(self._file), "saves")
        # It is only a hint: a full disk must not end the training.
        with contextlib.suppress(OSError):
            with open(f"{target}.new", "w", encoding="utf-8") as stream:
                json.dump({"save_seconds": round(median(self._costs), 3), "saves": len(self._costs)}, stream)
            os.replace(f"{target}.new", target)


class SavePolicy:
    """
    The save decision of orbax: `CheckpointManagerOptions(save_decision_policy=SavePolicy(saves))`.

        if manager.should_save(step):
            with saves:
                manager.save(step, args=...)

    Source: orbax.checkpoint.checkpoint_managers.SaveDecisionPolicy.
    """

    def __init__(self, saves: Saves | None = None) -> None:
        self.saves = saves or Saves()
        self._granted: int | None = None

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:  # noqa: ARG002
        """Whether to save at *step*; `manager.save` asks again for a step that was granted."""
        if step.step == self._granted:
            return True
        # All processes agree on a preemption that orbax noticed, so none of them waits here for another.
        if context.reached_preemption or self.saves.due():
            self.saves.restart()
            self._granted = step.step
            return True
        return False


_of_this_run: Saves | None = None


def save_due() -> bool:
    """
    `Saves.due` of one `Saves` for the whole process, whose interval begins with the first call.

    A collective: all processes have to call it after the same step.
    """
    global _of_this_run
    if _of_this_run is None:
        _of_this_run = Saves()
    return _of_this_run.due()


def _written(path: str) -> int:
    """Time of a file's last change in nanoseconds; 0 without a file."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime_ns if path else 0
    return 0


def _interval_in(path: str) -> float | None:
    try:
        with open(path, encoding="utf-8") as stream:
            seconds = json.load(stream)["interval_seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_length = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    return float(seconds) if is_length and 0 < seconds < math.inf else None
