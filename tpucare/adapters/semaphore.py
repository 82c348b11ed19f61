"""
ports.Gate over any context manager, such as a semaphore or a lock: a user's limit of concurrent creates.

Entering may block, and some context managers have to be left on the thread that entered them; so every slot that waits
or holds has a thread of its own, which enters, waits until the create is over, and leaves. The end of a create is
decided in `engine/admission.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any


class ContextGate:
    """Thread-safe. `nudge` is called when a slot has entered the context, or failed to."""

    def __init__(self, context: contextlib.AbstractContextManager[Any], nudge: Callable[[], None]) -> None:
        self._context, self._nudge = context, nudge
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}
        self._leaving: set[_Turn] = set()
        self._news: set[str] = set()
        self._errors: dict[str, Exception] = {}

    def acquire(self, slot: str) -> bool:
        with self._lock:
            if (error := self._errors.pop(slot, None)) is not None:
                raise error
            turn = self._turns.get(slot)
            if turn is None:
                turn = self._turns[slot] = _Turn(slot, self)
                turn.start()
            return turn.holds

    def release(self, slot: str) -> None:
        with self._lock:
            self._errors.pop(slot, None)
            turn = self._turns.pop(slot, None)
            if turn is not None:
                self._leaving.add(turn)
                turn.over.set()

    def changed_slots(self) -> frozenset[str]:
        with self._lock:
            news, self._news = frozenset(self._news), set()
        return news

    def close(self, seconds: float = 2.0) -> None:
        """Leave the context for every slot; a thread that blocks for longer than *seconds* ends with the process."""
        for slot in [*self._turns]:
            self.release(slot)
        until = time.monotonic() + seconds
        with self._lock:
            leaving = [turn for turn in self._leaving if turn.holds]
        for turn in leaving:
            turn.join(max(0.0, until - time.monotonic()))

    # --- on the threads of turns ---

    def _hold(self, turn: _Turn) -> None:
        try:
            self._context.__enter__()
        except BaseException as error:
            self._fail(turn, error)
            return
        turn.holds = True
        self._add_news(turn.slot)
        turn.over.wait()
        try:
            self._context.__exit__(None, None, None)
        except BaseException as error:
            self._fail(turn, error)
        finally:
            with self._lock:
                self._leaving.discard(turn)

    def _fail(self, turn: _Turn, error: BaseException) -> None:
        """Keep *error* for the slot's next `ask`, which raises it."""
        wrapped = RuntimeError(f"creation_semaphore: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        with self._lock:
            self._leaving.discard(turn)
            if self._turns.get(turn.slot) is turn:
                del self._turns[turn.slot]
            self._errors[turn.slot] = wrapped
        self._add_news(turn.slot)

    def _add_news(self, slot: str) -> None:
        with self._lock:
            self._news.add(slot)
        self._nudge()


class _Turn(threading.Thread):
    """One slot's turn, from the first `ask` to `release`."""

    def __init__(self, slot: str, gate: ContextGate) -> None:
        super().__init__(name=f"tpucare-create-{slot}", daemon=True)
        self.slot, self.gate = slot, gate
        self.holds = False
        self.over = threading.Event()

    def run(self) -> None:
        self.gate._hold(self)
