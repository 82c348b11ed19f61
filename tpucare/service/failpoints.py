"""
Where a test may have the process killed: the boundaries between writing an intent, its effect, and writing its outcome.

`TPUCARE_FAILPOINT=create.after-intent` ends the process with SIGKILL the first time that it gets there, and
`launch.pushed:3` the third time. It is read once, when the leaves are put together: a process without it runs on the
bare leaves, and nothing is asked at any call. For tests of crashes only; a unit that restarts would be killed again.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

from tpucare.adapters.runner.scripts import LAUNCH_MARK
from tpucare.model.errors import ConfigError
from tpucare.model.memory import Memory
from tpucare.model.ports import Remote, Store
from tpucare.model.resources import Event, Ran, Worker

VARIABLE = "TPUCARE_FAILPOINT"
VERBS: Mapping[str, str] = {
    "create": "create_node",
    "delete": "delete_node",
    "launch": "launch",
    "stop": "stop",
}
"""Kinds of events that tell of an intent, and the methods of the ports that carry it out."""
OUTCOMES: Mapping[str, str] = {
    "create-accepted": "create",
    "delete-accepted": "delete",
    "launched": "launch",
    "stop-accepted": "stop",
}
MOMENTS = ("before-intent", "after-intent", "after-effect", "after-outcome")
PUSHED = "launch.pushed"
NAMES: tuple[str, ...] = (*(f"{verb}.{moment}" for verb in VERBS for moment in MOMENTS), PUSHED)

P = TypeVar("P")


def kill_this_process() -> NoReturn:
    """SIGKILL: nothing is put in order, as when the machine loses its power."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its SIGKILL")


class Failpoint:
    """
    One boundary, to be met `count` times. Thread-safe: effects end on many threads.

    before-intent: the intent is decided, nothing is written    after-intent: it is on disk, no effect has begun
    after-effect: the world has done it, the loop does not know  after-outcome: that, too, is on disk
    launch.pushed: what a launch sends to a worker has arrived there, and has begun where nothing else is waited for
    """

    def __init__(self, name: str, count: int = 1, end: Callable[[], object] = kill_this_process) -> None:
        self.name = name
        self._left = count
        self._end = end
        self._guard = threading.Lock()

    def reach(self, name: str) -> None:
        """The process is at boundary *name*."""
        if name != self.name:
            return
        with self._guard:
            self._left -= 1
            met = self._left == 0
        if met:
            os.write(2, f"failpoint {name}: killed\n".encode())
            self._end()

    def store(self, store: Store) -> Store:
        return cast(Store, _Store(store, self))

    def port(self, port: P) -> P:
        """*port* (a Cloud or a Launcher) with the boundaries behind its effects."""
        return cast(P, _Port(port, self))

    def remote(self, remote: Remote) -> Remote:
        return cast(Remote, _Remote(remote, self))


def failpoint_of(env: Mapping[str, str]) -> Failpoint | None:
    """The one that *env* asks for. Raises: ConfigError: there is none of that name."""
    asked = env.get(VARIABLE, "")
    if not asked:
        return None
    match = re.fullmatch(r"([a-z.-]+)(?::([1-9]\d{0,5}))?", asked)
    if match is None or match[1] not in NAMES:
        raise ConfigError(f"{VARIABLE}: {asked!r} is no failpoint; write NAME or NAME:COUNT of {', '.join(NAMES)}")
    return Failpoint(match[1], int(match[2] or 1))


class _Proxy:
    def __init__(self, real: object, point: Failpoint) -> None:
        self._real, self._point = real, point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Store(_Proxy):
    """Around the transaction: which effects it is about is told by its events."""

    def save(self, changes: Mapping[str, Memory], events: Sequence[Event] = ()) -> None:
        kinds = [event.kind for event in events]
        for kind in kinds:
            if kind in VERBS:
                self._point.reach(f"{kind}.before-intent")
        self._real.save(changes, events)  # type: ignore[attr-defined]
        for kind in kinds:
            if kind in VERBS:
                self._point.reach(f"{kind}.after-intent")
            elif kind in OUTCOMES:
                self._point.reach(f"{OUTCOMES[kind]}.after-outcome")


class _Port(_Proxy):
    """Behind each effect, on the thread that carried it out."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        verb = next((verb for verb, method in VERBS.items() if method == name), None)
        if verb is None:
            return real

        def carry(order: object) -> object:
            done = real(order)
            self._point.reach(f"{verb}.after-effect")
            return done

        return carry


class _Remote(_Proxy):
    """Behind what a launch sends; a probe that finds a worker without its tools sends those."""

    def run(
        self,
        worker: Worker,
        command: str,
        *,
        stdin: bytes = b"",
        deadline: timedelta = timedelta(seconds=10),
        limit: int = 1 << 20,
    ) -> Ran:
        ran: Ran = self._real.run(worker, command, stdin=stdin, deadline=deadline, limit=limit)  # type: ignore[attr-defined]
        if stdin and command.startswith(f"{LAUNCH_MARK}="):
            self._point.reach(PUSHED)
        return ran
