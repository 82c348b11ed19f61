"""
Passes effects from the world to its machines, in order, and events of the machines to the world's audit log.

The protocol `Machines` stands for real workers (`machines`) or those of a test.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Protocol

import structlog

from tpucare.testbed.emulator.world.machine_effects import MachineEffect
from tpucare.testbed.emulator.world.records import NodePath
from tpucare.testbed.emulator.world.world import World

HOST_KEYS = "hostkeys"

_log = structlog.get_logger("tpucare.emulator")


class Machines(Protocol):
    """Applies machine effects. `apply` is called in order, from one thread, and returns at once."""

    @property
    def login_user(self) -> str: ...

    def apply(self, effect: MachineEffect) -> Future[None]: ...

    def close(self) -> None:
        """End every worker."""
        ...


class MakeMachines(Protocol):
    """
    Makes machines with these callbacks, for example `functools.partial(WorkerMachines, folder, ssh_port=…)`.

    on_host_keys: node, worker, host key by type     on_gone: node, worker, why its machine is gone
    """

    def __call__(
        self,
        *,
        on_host_keys: Callable[[NodePath, int, Mapping[str, str]], None],
        on_gone: Callable[[NodePath, int, str], None],
    ) -> Machines: ...


class MachineDriver:
    """
    The queue of effects, and the machines that apply them.

    lock:     held during every access to the world
    stopping: when set, waiting effects are dropped
    machines: None = no worker ever answers
    """

    def __init__(
        self, world: World, lock: threading.RLock, now: Callable[[], datetime], stopping: threading.Event
    ) -> None:
        self._world, self._lock, self._now, self._stopping = world, lock, now, stopping
        self._effects: queue.SimpleQueue[MachineEffect | None] = queue.SimpleQueue()
        self.machines: Machines | None = None

    def make(self, make: MakeMachines) -> None:
        """Make the machines. Raises: MachineError: machines cannot run here."""
        self.machines = make(on_host_keys=self._publish_host_keys, on_gone=self._report_gone)

    @property
    def login_user(self) -> str:
        """The user name for logins on workers; empty without machines."""
        return self.machines.login_user if self.machines is not None else ""

    def queue_effects(self, effects: Iterable[MachineEffect]) -> None:
        for effect in effects:
            self._effects.put(effect)

    def end_effects(self) -> None:
        """Let `run` return after the waiting effects."""
        self._effects.put(None)

    def run(self) -> None:
        """Apply effects until `end_effects`. On a thread of its own."""
        while (effect := self._effects.get()) is not None:
            if self.machines is None or self._stopping.is_set():
                continue
            try:
                self.machines.apply(effect).add_done_callback(partial(self._check_result, effect))
            except Exception as error:
                self._report_failure(effect, error)

    def close(self) -> None:
        """End the machines. Raises: MachineError: a process survives."""
        if self.machines is not None:
            self.machines.close()

    def log_note(self, event: str, **fields: object) -> None:
        """Log a machine's event in the audit log. From any thread."""
        with self._lock:
            self._world.operator.log_note(event, self._now(), **fields)

    def _check_result(self, effect: MachineEffect, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._report_failure(effect, error)

    def _report_failure(self, effect: MachineEffect, error: BaseException) -> None:
        kind = type(effect).__name__
        _log.error("a worker's machine failed", effect=kind, node=str(effect.path), error=str(error))
        self.log_note("machine-error", name=str(effect.path), effect=kind, text=f"{type(error).__name__}: {error}")

    def _publish_host_keys(self, path: NodePath, worker: int, keys: Mapping[str, str]) -> None:
        """Write the host keys of a worker that booted into its guest attributes."""
        with self._lock:
            for kind, key in keys.items():
                self._world.operator.set_guest_attribute(str(path), worker, HOST_KEYS, kind, key)

    def _report_gone(self, path: NodePath, worker: int, why: str) -> None:
        self.log_note("machine-gone", name=str(path), worker=worker, text=why)
