"""
Failpoints: a test kills the process at a boundary between writing an intent, its effect, and writing its outcome.

`TPUCARE_FAILPOINT=create.after-intent` ends the process with SIGKILL when it first reaches that boundary, and
`launch.pushed:3` when it reaches it for the third time. The variable is read once, in `assemble`: without it the
adapters are used as they are, at no cost. For tests of crashes only; a unit that restarts would be killed again.
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
"""Kinds of events that announce an intent, and the methods of the ports that execute it."""
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
    """SIGKILL: no handler and no `finally` runs, as when the machine loses power."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its SIGKILL")


class Failpoint:
    """
    One boundary; its `count`-th passing ends the process. Thread-safe: effects end on many threads.

    before-intent: the intent is decided and not written    after-intent: it is on disk, no effect has begun
    after-effect: the effect has happened, and the loop has not heard of it    after-outcome: the outcome is on disk
    launch.pushed: a worker has received the files of a launch, and begun where it waits for no other worker
    """

    def __init__(self, name: str, count: int = 1, end: Callable[[], object] = kill_this_process) -> None:
        self.name = name
        self._left = count
        self._end = end
        self._guard = threading.Lock()

    def reach(self, name: str) -> None:
        """Count a passing of boundary *name*, and end the process at the last one."""
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
        """*port* (a Cloud or a Launcher), with a boundary after each effect."""
        return cast(P, _Port(port, self))

    def remote(self, remote: Remote) -> Remote:
        return cast(Remote, _Remote(remote, self))


def failpoint_of(env: Mapping[str, str]) -> Failpoint | None:
    """The failpoint that *env* names; None: it names none. Raises: ConfigError: no failpoint has that name."""
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
    """Boundaries around each transaction; the kinds of its events say which intents and outcomes it holds."""

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
    """A boundary after each effect, on the thread that executed it."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        verb = next((verb for verb, method in VERBS.items() if method == name), None)
        if verb is None:
            return real

        def execute(order: object) -> object:
            done = real(order)
            self._point.reach(f"{verb}.after-effect")
            return done

        return execute


class _Remote(_Proxy):
    """A boundary after the files of a launch; probes send files, too, to a worker that lacks its tools."""

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
