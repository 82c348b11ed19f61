"""
Asks W&B about sweeps on a thread of its own, again and again, and keeps the newest answers for the loop to fetch.

A server that hangs costs this thread its time and nobody else's. What an answer means is left to `sweeps_plan`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Set

from tpucare.integrations.wandb.client import SweepService, SweepSilent
from tpucare.integrations.wandb.rules import SweepPath, SweepReport
from tpucare.model.errors import TpuCareError

Answer = SweepReport | TpuCareError
# A sweep and the base URL of its W&B: what one server says of a path is nothing to a fleet that names another.
Asked = tuple[SweepPath, str]


class SweepWatch:
    """
    service:   for the base URL of a sweep; made once per look, so that a key which was replaced is taken
    every:     seconds between two looks at one sweep
    monotonic: seconds of a clock that never jumps
    """

    def __init__(self, service: Callable[[str], SweepService], *, every: float, monotonic: Callable[[], float]) -> None:
        self._service, self._every, self._monotonic = service, every, monotonic
        self._changed = threading.Condition()
        self._wanted: frozenset[Asked] = frozenset()
        self._due: dict[Asked, float] = {}
        self._news: dict[Asked, Answer] = {}
        self._closing = False
        self._thread: threading.Thread | None = None

    def follow(self, wanted: Set[Asked]) -> None:
        """From now on these sweeps and no others; a new one is looked at at once. Never blocks."""
        with self._changed:
            if wanted == self._wanted:
                return
            self._wanted = frozenset(wanted)
            self._due = {asked: self._due.get(asked, self._monotonic()) for asked in sorted(wanted)}
            if wanted and self._thread is None:
                # It may hang in a request; it must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name="tpucare-sweeps", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> dict[Asked, Answer]:
        """Newest answers since the last call. Never blocks."""
        with self._changed:
            news, self._news = self._news, {}
        return news

    def close(self, seconds: float = 1.0) -> None:
        """Waits at most *seconds* for a look that is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            answer = self._look(*turn)
            with self._changed:
                if turn in self._wanted:
                    self._news[turn] = answer
                    self._due[turn] = self._monotonic() + self._every

    def _next(self) -> Asked | None:
        """The sweep whose time has come, waited for; None at the end."""
        with self._changed:
            while not self._closing:
                asked = min(self._due, key=lambda one: self._due[one], default=None)
                left = self._due[asked] - self._monotonic() if asked is not None else None
                if asked is not None and left is not None and left <= 0:
                    return asked
                self._changed.wait(left)
        return None

    def _look(self, path: SweepPath, url: str) -> Answer:
        try:
            return self._service(url).look(path)
        except TpuCareError as error:
            return error
        except Exception as error:
            return SweepSilent(f"W&B's answer about {path} cannot be read: {type(error).__name__}: {error}")
