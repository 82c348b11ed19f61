"""
`start_method="thread"`: each call of `start_fn` runs on its own thread.

Threads cannot be ended, so a call that outlives its node goes on until it uses the node again (`attempt`); the place
where it hangs is known. `callback_launcher` decides which calls are made and what their ends mean.
"""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol

from tpucare.api.attempt import Attempt, Host, bind
from tpucare.model.errors import ConfigError

StartFn = Callable[[Any, Any], object]
CreationCallback = Callable[[str, Any], object]
Target = int | Literal["all"]


class Handle(Protocol):
    """One call, running or ended: part of `concurrent.futures.Future`, and the place where it hangs."""

    def done(self) -> bool: ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the call; the exception that it raised, or None."""
        ...

    def cancel(self) -> object:
        """Request its end, where that is possible. Never blocks."""
        ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call *fn* once the call has ended, on any thread; at once if it has."""
        ...

    def where(self) -> str:
        """The place where it hangs, in one line; empty when that is unknown."""
        ...


class Starter(Protocol):
    """Starts calls of `start_fn`."""

    def start(self, attempt: Attempt, host: Host, ctx: object, worker: Target) -> Handle:
        """Start `start_fn(ctx, worker)`. Returns promptly; errors of the call itself are in the handle."""
        ...


class ThreadHandle(Future[Any]):
    """A call on its own thread, a daemon thread: it must not keep the process alive."""

    def __init__(self, attempt: Attempt, name: str, call: Callable[[], object]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._attempt, self._call = attempt, call
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def cancel(self) -> bool:
        """A thread cannot be ended."""
        return False

    def where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        # The last place in the user's own code is more useful than the lock that it waits for.
        own = [place for place in stack if not place.filename.startswith(_OWN_AND_STANDARD)] or stack
        place = own[-1]
        return f"{place.filename}:{place.lineno} in {place.name}"

    def _work(self) -> None:
        try:
            with bind(self._attempt):
                result = self._call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


_OWN_AND_STANDARD = (f"{Path(__file__).parents[1]}/", threading.__file__.rpartition("/")[0] + "/")


class ThreadStarter:
    """Starter in threads of this process."""

    def __init__(self, start_fn: StartFn) -> None:
        self._start_fn = start_fn

    def start(self, attempt: Attempt, host: Host, ctx: object, worker: Target) -> ThreadHandle:  # noqa: ARG002
        # A thread knows its attempt by `bind`; a child process needs the host for that.
        def call() -> object:
            check_call(self._start_fn, "start_fn", "(ctx, worker)", ctx, worker)
            return self._start_fn(ctx, worker)

        return ThreadHandle(attempt, f"tpucare-start-{attempt.token}-w{worker}", call)


def check_call(function: Callable[..., object], name: str, form: str, *arguments: object) -> None:
    """Raises: ConfigError: *function* cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # Some built-in callables have none.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{name} has to take {form}: {error}") from None
