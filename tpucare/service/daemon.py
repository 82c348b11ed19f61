"""
`tpucare daemon`: cares for every fleet of a folder until it is stopped, and leaves the nodes alive then.

One loop on one thread: a step of the engine, then the commands of the control socket, then the folder. It can be killed
at any instruction; an orderly stop only stores the results of effects in flight, which the next start finds out anyway.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from tpucare.adapters.state import folder as state_folder
from tpucare.adapters.systemd import Notifier
from tpucare.model.errors import StoreError
from tpucare.model.resources import Event
from tpucare.service.assembly import Runtime, assemble
from tpucare.service.commands import Answer, CommandHandler
from tpucare.service.control_socket import Control
from tpucare.service.fleet_folder import FleetFolder
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.options import FLEETS_NOTE, Options
from tpucare.service.signals import handle_signals

POLL_EVERY_SECONDS = 1.0
STATUS_EVERY_SECONDS = 10.0
SETTLE_SECONDS = 3.0


class Companion(Protocol):
    """
    Follows an outside service that fleets work for, such as W&B sweeps, beside the engine.

    On the thread of the loop only, and nothing blocks. `topic`: the key of its rows in the answer to `status`.
    """

    topic: str

    def poll(self) -> None:
        """Apply the answers of the service that have arrived. Called once a second, and soon after an answer came."""

    def rows(self) -> list[dict[str, Any]]:
        """Rows for `status`, as JSON; each names its `fleet`."""

    def close(self) -> None: ...


Companions = Callable[[Runtime, FleetRegistry, Callable[[], None]], Sequence[Companion]]
"""
Makes the companions of a daemon, which knows none of them by name.

The last argument is for them: called on any thread when an answer has come, it has them polled at once.
"""


def no_companions(_runtime: Runtime, _registry: FleetRegistry, _poll_soon: Callable[[], None]) -> Sequence[Companion]:
    return ()


class CompanionGroup:
    """
    The companions of one daemon. One that fails unexpectedly stops neither the daemon nor the others.

    report: tells of a failure, once for each text in an unbroken row
    """

    def __init__(self, companions: Sequence[Companion], report: Callable[[str], None]) -> None:
        self._companions, self._report = companions, report
        self._failures: dict[str, str] = {}

    def poll(self) -> None:
        """Raises: StoreError: nothing can be remembered, which ends the daemon."""
        for companion in self._companions:
            try:
                companion.poll()
            except StoreError:
                raise
            except Exception as error:
                self._tell(companion.topic, error)
            else:
                self._failures.pop(companion.topic, None)

    def rows(self, fleets: Collection[str] | None) -> dict[str, list[dict[str, Any]]]:
        """Rows for `status` by topic, of these fleets; None: of all."""
        found = {}
        for companion in self._companions:
            try:
                rows = companion.rows()
            except Exception as error:
                self._tell(companion.topic, error)
                rows = []
            found[companion.topic] = [row for row in rows if fleets is None or row["fleet"] in fleets]
        return found

    def close(self) -> None:
        for companion in self._companions:
            companion.close()

    def _tell(self, topic: str, error: Exception) -> None:
        text = f"{topic}: not followed for now, {type(error).__name__}: {error}"
        if self._failures.get(topic) != text:
            self._failures[topic] = text
            self._report(text)


class Daemon:
    """
    The loop. `stop` and `reload` may be called from a signal handler.

    until: called once a second; the daemon stops when it is true    first_commands: executed at the start
    """

    def __init__(
        self, runtime: Runtime, fleets: Path, notifier: Notifier, *, companions: Companions = no_companions
    ) -> None:
        self._runtime, self._notifier = runtime, notifier
        self._engine = runtime.engine
        self._stopping = self._reloading = False
        self._next_poll = self._next_status = self._next_watchdog = 0.0
        self.registry = FleetRegistry.of(runtime)
        self._folder = FleetFolder(fleets, self.registry)
        self._handler = CommandHandler(runtime, self.registry, self._folder, self.stop)
        self._companions = CompanionGroup(
            companions(runtime, self.registry, self._poll_soon),
            lambda text: self.registry.report("error", text, level="error"),
        )
        self.until: Callable[[], bool] = lambda: False
        self.first_commands: Sequence[Mapping[str, Any]] = ()
        self._control = Control(runtime.options.socket, runtime.executor.nudge, on_error=self._report_failed_command)

    def stop(self) -> None:
        self._stopping = True
        self._runtime.executor.nudge()

    def reload(self) -> None:
        self._reloading = True
        self._runtime.executor.nudge()

    def _poll_soon(self) -> None:
        self._next_poll = 0.0
        self._runtime.executor.nudge()

    def limit_to_fleet(self, fleet: str) -> None:
        """Act for the slots of *fleet* alone."""
        self._engine.release(lambda slot: slot.fleet == fleet)

    def status(self, target: str = "") -> Answer:
        """The answer to the command `status`."""
        return self._handle({"do": "status", "target": target})

    def is_over(self, slot: str) -> bool:
        """Whether *slot* has no node left, and will get none by itself."""
        return self._engine.is_over(slot)

    def run(self) -> None:
        """
        Run until `stop`.

        Raises: StoreError: an intent cannot be stored, so nothing may be done. ConfigError: no socket.
        """
        self._begin()
        try:
            while not self._stopping:
                self._run_once()
        finally:
            self._notifier.stopping("stopping; nodes are left alive")
            self._control.close()
            self._companions.close()
        self.registry.report("stop", "the daemon stops; nodes are left alive", level="info")
        self._runtime.settle(SETTLE_SECONDS)

    def _begin(self) -> None:
        options = self._runtime.options
        state_folder.write_private(options.state / FLEETS_NOTE, f"{self._folder.folder}\n")
        self.registry.report("start", f"the daemon starts, process {os.getpid()}", level="info", pid=os.getpid())
        if options.project:
            self._engine.list_project(options.project)
        self.registry.load()
        for command in self.first_commands:
            self._handle(command)
        self._folder.read_changes()
        self._control.start()
        self._notifier.ready(self._summary())

    def _run_once(self) -> None:
        idle = self._engine.step()
        if self._control.serve(self._handle):
            # A command is decided about at once, not after the sleep.
            idle = 0.0
        now = self._runtime.clock.monotonic()
        if now >= self._next_poll or self._reloading:
            self._next_poll = now + POLL_EVERY_SECONDS
            self._poll()
        self._notify_systemd(now)
        if not self._stopping:
            pause = min(idle, max(0.0, self._next_poll - now), max(0.0, self._next_watchdog - now))
            self._runtime.executor.sleep(timedelta(seconds=pause))

    def _poll(self) -> None:
        if self._reloading:
            self._reloading = False
            self._folder.read_all_again()
        self._folder.read_changes()
        self._companions.poll()
        self.registry.remove_finished_slots()
        if self.until():
            self.stop()

    def _handle(self, command: object) -> Answer:
        answer = self._handler.handle(command)
        if isinstance(command, Mapping) and command.get("do") == "status":
            meant = {self._engine.slots[row["slot"]].slot.fleet for row in answer["slots"]}
            answer |= self._companions.rows(meant if command.get("target") else None)
        return answer

    def _report_failed_command(self, error: Exception) -> None:
        self.registry.report("error", f"a command failed: {type(error).__name__}: {error}", level="error")

    def _notify_systemd(self, now: float) -> None:
        every = self._notifier.watchdog_every
        if now >= self._next_watchdog:
            self._next_watchdog = now + (every.total_seconds() if every is not None else STATUS_EVERY_SECONDS)
            if every is not None:
                self._notifier.watchdog()
        if now >= self._next_status:
            self._next_status = now + STATUS_EVERY_SECONDS
            self._notifier.status(self._summary())

    def _summary(self) -> str:
        names = self._engine.slots
        training = sum(self._engine.is_training(name) for name in names)
        blind = [view.name for view in self._engine.projects.values() if not view.fresh]
        return f"{training} of {len(names)} slots train" + (f"; {', '.join(blind)} not seen" if blind else "")


def run(
    options: Options,
    fleets: Path,
    env: Mapping[str, str],
    *,
    listen: Callable[[Event], None],
    companions: Companions = no_companions,
    prepare: Callable[[Daemon], None] = lambda _: None,
) -> bool:
    """
    Care for the fleets in *fleets* until SIGTERM, SIGINT or the command `stop`. Whether everything was closed in time.

    prepare: called with the daemon before its start, to limit what it acts for and until when
    Must be called on the main thread. Raises: TpuCareError: it could not start, or the store failed.
    """
    fleets = fleets.absolute()
    if fleets == options.state / "fleets":
        state_folder.prepare_folder(options.state)
        state_folder.prepare_folder(fleets)
    runtime = assemble(options, env, listen=listen)
    closed = False
    try:
        daemon = Daemon(runtime, fleets, Notifier.from_environment(env, pid=os.getpid()), companions=companions)
        prepare(daemon)
        handlers: dict[int, Callable[[int], object]] = {
            signal.SIGTERM: lambda _: daemon.stop(),
            signal.SIGINT: lambda _: daemon.stop(),
            signal.SIGHUP: lambda _: daemon.reload(),
        }
        with handle_signals(handlers):
            daemon.run()
    finally:
        closed = runtime.close()
    return closed
