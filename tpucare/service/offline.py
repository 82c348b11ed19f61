"""
Orders to whoever cares: the running daemon over its socket, or, when none runs, this process under the store's lock.

Without a daemon an order is carried out on what the store remembers, and nothing is begun; `down` and `gc` alone then
run the engine until they are done, and `plan` for one look.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.adapters.state import owner
from tpucare.model.errors import CloudError
from tpucare.model.resources import Event
from tpucare.service.assembly import Caretaker, assemble
from tpucare.service.commands import Desk
from tpucare.service.control_socket import NoDaemon, request
from tpucare.service.fleet_folder import Intake
from tpucare.service.fleet_registry import Roster
from tpucare.service.options import DAEMON_STORE, Options

LOOK_SECONDS = 60.0
SETTLE_SECONDS = 3.0


class Alone:
    """A desk without a daemon. Made by `alone`, which holds the store's lock for it."""

    def __init__(self, caretaker: Caretaker, *, keeps: bool = True) -> None:
        self.care = caretaker
        options = caretaker.options
        self.roster = Roster.of(caretaker, keeps=keeps)
        self.roster.load()
        if options.project:
            caretaker.engine.watch(options.project)
        is_daemons = options.store == DAEMON_STORE
        self.intake = Intake(options.fleets(os.environ), self.roster) if is_daemons else None
        self.desk = Desk(caretaker, self.roster, self.intake)

    def run(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Run the loop until *until*, at most *seconds*; whether it came true."""
        engine, started = self.care.engine, time.monotonic()
        while not until():
            if seconds is not None and time.monotonic() - started > seconds:
                return False
            self.care.executor.sleep(timedelta(seconds=min(engine.step(), 1.0)))
            self.roster.bury()
        return True

    def look(self) -> None:
        """
        Observe every project once, and each worker once.

        Raises: CloudError: a project could not be listed; of the class that its listing failed with.
        """
        engine = self.care.engine
        if not self.run(lambda: all(view.fresh or view.blind for view in engine.projects.values()), LOOK_SECONDS):
            raise CloudError(f"the API did not answer within {LOOK_SECONDS:.0f} s")
        for view in engine.projects.values():
            if view.blind is not None:
                raise view.blind
        self.run(self._all_probed, LOOK_SECONDS)

    def _all_probed(self) -> bool:
        tracks = [node for track in self.care.engine.slots.values() for node in track.nodes.values()]
        return not any(node.probing or (node.probe_due is not None and node.report is None) for node in tracks)


@contextmanager
def alone(options: Options, *, keeps: bool = True, listen: Callable[[Event], None] | None = None) -> Iterator[Alone]:
    """
    keeps: False: what is declared is not written down.

    Raises: StoreLocked: somebody cares for this store already; as `assemble`.
    """
    with assemble(options, os.environ, listen=listen, alone=True) as caretaker:
        yield Alone(caretaker, keeps=keeps)
        caretaker.settle(SETTLE_SECONDS)


@contextmanager
def untouched(options: Options) -> Iterator[Options]:
    """
    Options for a look that makes nothing: where there is no store yet, one that is thrown away, with what is beside it.
    """
    if (options.state / f"{options.store}.sqlite").exists():
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="tpucare-plan-") as folder:
        for name in (owner.OWNER_FILE, owner.STORES_FILE, options.key.parent.name, options.host_keys.name):
            source = options.state / name
            if source.is_dir():
                shutil.copytree(source, Path(folder, name))
            elif source.exists():
                shutil.copy2(source, Path(folder, name))
        yield replace(options, state=Path(folder), fleets_in=options.fleets(os.environ))


def order(options: Options, what: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out one order, by the daemon if one runs. Raises: whatever was wrong with it."""
    try:
        return request(options.socket, what)
    except NoDaemon:
        with alone(options) as here:
            return here.desk.carry(what)
