"""
`tpucare daemon`: cares for every fleet of a folder until it is told to stop, and leaves the nodes alive then.

One loop on one thread: a step of the engine, then whatever was ordered at the control socket, then the folder. It can
be killed at any instruction; what an orderly stop adds is that effects under way are remembered instead of found out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from tpucare.adapters.state import folder as state_folder
from tpucare.adapters.systemd import Notifier
from tpucare.model.resources import Event
from tpucare.service.assembly import Runtime, assemble
from tpucare.service.commands import Answer, CommandHandler
from tpucare.service.control_socket import Control
from tpucare.service.fleet_folder import FleetFolder
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.options import FLEETS_NOTE, Options
from tpucare.service.signals import caught

LOOK_EVERY_SECONDS = 1.0
STATUS_EVERY_SECONDS = 10.0
SETTLE_SECONDS = 3.0


class Companion(Protocol):
    """
    Something elsewhere that fleets work for, followed beside the engine: a W&B sweep, say.

    On the thread of the loop only, and nothing here blocks. `topic`: the key of its rows in the answer to `status`.
    """

    topic: str

    def look(self) -> None:
        """Once a second: fetch what was heard, and carry it out."""

    def rows(self) -> list[dict[str, Any]]:
        """For `status`, as JSON; each names its `fleet`."""

    def close(self) -> None: ...


Companions = Callable[[Runtime, FleetRegistry], Sequence[Companion]]
"""Makes what the daemon takes along; the daemon knows none of them by name."""


def no_companions(_caretaker: Runtime, _roster: FleetRegistry) -> Sequence[Companion]:
    return ()


class Daemon:
    """
    The loop. `stop` and `reload` may be called from a signal handler.

    until: asked once a second; when it says so, the daemon stops    first_orders: carried out when it begins
    """

    def __init__(
        self, caretaker: Runtime, fleets: Path, notifier: Notifier, *, companions: Companions = no_companions
    ) -> None:
        self._care, self._notifier = caretaker, notifier
        self._engine = caretaker.engine
        self._stopping = self._reloading = False
        self._next_look = self._next_status = self._next_sign = 0.0
        self.roster = FleetRegistry.of(caretaker)
        self._intake = FleetFolder(fleets, self.roster)
        self._desk = CommandHandler(caretaker, self.roster, self._intake, self.stop)
        self._companions = companions(caretaker, self.roster)
        self.until: Callable[[], bool] = lambda: False
        self.first_orders: Sequence[Mapping[str, Any]] = ()
        self._control = Control(caretaker.options.socket, caretaker.executor.nudge, stumbled=self._tell_stumble)

    def stop(self) -> None:
        self._stopping = True
        self._care.executor.nudge()

    def reload(self) -> None:
        self._reloading = True
        self._care.executor.nudge()

    def act_only_for(self, fleet: str) -> None:
        """Begin nothing for slots of other fleets."""
        self._engine.release(lambda slot: slot.fleet == fleet)

    def status(self, target: str = "") -> Answer:
        """As the order `status`."""
        return self._carry({"do": "status", "target": target})

    def is_over(self, slot: str) -> bool:
        """Nothing more will happen to *slot* by itself, and nothing is left of it."""
        return self._engine.is_over(slot)

    def run(self) -> None:
        """
        Until `stop`. Raises: StoreError: nothing may be done that cannot be written. ConfigError: no socket.
        """
        self._begin()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._notifier.stopping("stopping; nodes are left alive")
            self._control.close()
            for companion in self._companions:
                companion.close()
        self.roster.say("stop", "the daemon stops; nodes are left alive", level="info")
        self._care.settle(SETTLE_SECONDS)

    def _begin(self) -> None:
        options = self._care.options
        state_folder.write_private(options.state / FLEETS_NOTE, f"{self._intake.folder}\n")
        self.roster.say("start", f"the daemon starts, process {os.getpid()}", level="info", pid=os.getpid())
        if options.project:
            self._engine.watch(options.project)
        self.roster.load()
        for order in self.first_orders:
            self._carry(order)
        self._intake.look()
        self._control.start()
        self._notifier.ready(self._summary())

    def _turn(self) -> None:
        idle = self._engine.step()
        if self._control.serve(self._carry):
            # What was ordered is decided about now, not after the nap.
            idle = 0.0
        now = self._care.clock.monotonic()
        if now >= self._next_look or self._reloading:
            self._next_look = now + LOOK_EVERY_SECONDS
            self._look()
        self._signal_life(now)
        if not self._stopping:
            pause = min(idle, max(0.0, self._next_look - now), max(0.0, self._next_sign - now))
            self._care.executor.sleep(timedelta(seconds=pause))

    def _look(self) -> None:
        if self._reloading:
            self._reloading = False
            self._intake.again()
        self._intake.look()
        for companion in self._companions:
            companion.look()
        self.roster.bury()
        if self.until():
            self.stop()

    def _carry(self, order: object) -> Answer:
        answer = self._desk.carry(order)
        if isinstance(order, Mapping) and order.get("do") == "status":
            meant = {self._engine.slots[row["slot"]].slot.fleet for row in answer["slots"]}
            for one in self._companions:
                answer[one.topic] = [row for row in one.rows() if not order.get("target") or row["fleet"] in meant]
        return answer

    def _tell_stumble(self, error: Exception) -> None:
        self.roster.say("error", f"an order failed: {type(error).__name__}: {error}", level="error")

    def _signal_life(self, now: float) -> None:
        every = self._notifier.watchdog_every
        if now >= self._next_sign:
            self._next_sign = now + (every.total_seconds() if every is not None else STATUS_EVERY_SECONDS)
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
    Care for the fleets in *fleets* until SIGTERM, SIGINT or an order to stop. Whether everything was closed in time.

    prepare: called before it begins, to narrow what it acts for and until when
    Must be called on the main thread. Raises: TpuCareError: it could not begin, or the store failed.
    """
    fleets = fleets.absolute()
    if fleets == options.state / "fleets":
        state_folder.prepare_folder(options.state)
        state_folder.prepare_folder(fleets)
    caretaker = assemble(options, env, listen=listen)
    closed = False
    try:
        daemon = Daemon(caretaker, fleets, Notifier.from_environment(env, pid=os.getpid()), companions=companions)
        prepare(daemon)
        handlers: dict[int, Callable[[int], object]] = {
            signal.SIGTERM: lambda _: daemon.stop(),
            signal.SIGINT: lambda _: daemon.stop(),
            signal.SIGHUP: lambda _: daemon.reload(),
        }
        with caught(handlers):
            daemon.run()
    finally:
        closed = caretaker.close()
    return closed
