"""
A running emulator: a world, its servers (gRPC, REST, buckets), machines, control socket and audit log.

The world has no clock and no threads; this module gives it both. One thread advances the world and collects its effects
for the machines, another applies them (`machines.driver`). Every access to the world holds `lock`.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import structlog

from tpucare.model.errors import ConfigError
from tpucare.service import emulator_address
from tpucare.testbed.emulator.api import grpc
from tpucare.testbed.emulator.api.calls import ServedWorld
from tpucare.testbed.emulator.api.rest import RestServer
from tpucare.testbed.emulator.control_socket import ControlSocket, request
from tpucare.testbed.emulator.machines.driver import MachineDriver, Machines, MakeMachines
from tpucare.testbed.emulator.orders import parse_order
from tpucare.testbed.emulator.storage.api import ObjectServer
from tpucare.testbed.emulator.storage.objects import ObjectStore
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.world import World


@dataclass(frozen=True, slots=True)
class ListenPorts:
    """Ports on the loopback; 0 is a free port."""

    api: int = 0
    rest: int = 0
    storage: int = 0


class Listeners:
    """The servers of one emulator, from the constructor until `stop`; `ports` are the actual ones."""

    def __init__(self, served: ServedWorld, objects: ObjectStore, ports: ListenPorts) -> None:
        """Raises: ConfigError: a port is taken."""
        with ExitStack() as opened:
            service = grpc.Service(served, ports.api)
            opened.callback(service.stop)
            rest = RestServer(served).serve(ports.rest)
            opened.callback(rest.stop)
            storage = ObjectServer(objects).serve(ports.storage)
            opened.callback(storage.stop)
            self.ports = ListenPorts(service.port, rest.port, storage.port)
            self._opened = opened.pop_all()

    def stop(self) -> None:
        """Cut calls in flight, and wait for their threads: `ServedWorld.wait` must return by then."""
        self._opened.close()


# --- the cloud --------------------------------------------------------------------------------------------------------


LONGEST_PAUSE_SECONDS = 1.0
SOCKET_NAME = "control.sock"
SOCKET_PATH_LIMIT = 100
"""A unix socket's path is limited to 108 bytes; for a longer one the socket lies in the temporary folder."""

_log = structlog.get_logger("tpucare.emulator")


class EmulatorServer:
    """
    Serves one world on `endpoint` from `start` to `stop`; also a context manager.

    machines:   makes the machines at the start; None = no worker ever answers
    state_dir:  folder of the discovery file and the control socket; None = neither
    audit_path: file for every audit record as a line of JSON, written as it happens
    now:        the world's clock (aware, UTC); default: wall time at the start, continued by the monotonic clock, so
                that setting the wall clock does not move the world
    project, ssh_port: only written into the discovery file; the world accepts any project
    dated:      whether answers have the `date` header of the real service
    """

    def __init__(
        self,
        config: WorldConfig,
        *,
        seed: int = 0,
        port: int = 0,
        rest_port: int = 0,
        storage_port: int = 0,
        machines: MakeMachines | None = None,
        state_dir: Path | None = None,
        audit_path: Path | None = None,
        project: str = "emulated",
        ssh_port: int = 0,
        now: Callable[[], datetime] | None = None,
        dated: bool = True,
    ) -> None:
        """Raises: ConfigError: an unreadable trace or network in *config*."""
        self.now = now or _steady_clock()
        self.lock = threading.RLock()
        self.world = World(config, seed=seed, start=self.now())
        self.objects = ObjectStore(self.now, config.buckets)
        self._changed = threading.Condition(self.lock)
        self._stopping = threading.Event()
        self._make_machines = machines
        self._driver = MachineDriver(self.world, self.lock, self.now, self._stopping)
        self._ports, self._dated = ListenPorts(port, rest_port, storage_port), dated
        self._project, self._ssh_port = project, ssh_port
        self._state_dir, self._audit_path = state_dir, audit_path
        self._audit: TextIO | None = None
        self._control: ControlSocket | None = None
        self._listeners: Listeners | None = None
        self._threads: list[threading.Thread] = []

    @property
    def endpoint(self) -> str:
        """`127.0.0.1:PORT` of gRPC, once it is started."""
        return f"127.0.0.1:{self._ports.api}"

    @property
    def rest_endpoint(self) -> str:
        """`http://127.0.0.1:PORT` of REST, once it is started."""
        return f"http://127.0.0.1:{self._ports.rest}"

    @property
    def storage_endpoint(self) -> str:
        """`http://127.0.0.1:PORT` of the buckets, once it is started: what STORAGE_EMULATOR_HOST should say."""
        return f"http://127.0.0.1:{self._ports.storage}"

    @property
    def machines(self) -> Machines | None:
        """The machines, once it is started, if there are any."""
        return self._driver.machines

    def start(self) -> None:
        """
        Raises: ConfigError: the port or the state folder is in use by another emulator, or cannot be written.
        MachineError: machines cannot run here.
        """
        try:
            self._open_files()
            served = ServedWorld(self.world, self.lock, self.now, self._stopping.wait, self.wake, self._dated)
            self._listeners = Listeners(served, self.objects, self._ports)
            self._ports = self._listeners.ports
            # Machines are made after the servers, since they may need their addresses; effects of early calls wait.
            if self._make_machines is not None:
                self._driver.make(self._make_machines)
            for name, work in (("emulator_play", self._advance_until_stopped), ("emulator_machines", self._driver.run)):
                thread = threading.Thread(target=work, name=name)
                thread.start()
                self._threads.append(thread)
            self._announce()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """
        Stop the servers, end the machines, remove the discovery file. Calls in flight are cut. May be called twice.

        Raises: MachineError: a process of a machine survives.
        """
        self._stopping.set()
        with ExitStack() as ends:
            ends.callback(self._close_audit)
            ends.callback(self._driver.close)
            ends.callback(self._join)
            if self._listeners is not None:
                ends.callback(self._listeners.stop)
            ends.callback(self._withdraw)

    def __enter__(self) -> EmulatorServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wake(self) -> None:
        """Advance the world now: the clock or the world was changed."""
        with self._changed:
            self._changed.notify_all()

    def apply_order(self, raw: object) -> Mapping[str, Any]:
        """Apply one order, as `control_socket.request` sends it. Raises: ConfigError: the order is wrong."""
        order = parse_order(raw)
        with self.lock:
            answer = order.apply(self.world, self.now())
        self.wake()
        return answer

    def log_note(self, event: str, **fields: object) -> None:
        """Log a machine's event in the audit log. From any thread."""
        self._driver.log_note(event, **fields)

    # --- threads

    def _advance_until_stopped(self) -> None:
        """Advance the world whenever an event of it is due, and collect its effects for the machines."""
        with self._changed:
            while not self._stopping.is_set():
                try:
                    self.world.advance(self.now())
                except Exception:
                    _log.exception("an event of the world failed")
                self._driver.queue_effects(self.world.take_effects())
                self._changed.wait(self._pause())
        self._driver.end_effects()

    def _pause(self) -> float:
        """Seconds until the next event; never long, so that a test's change of the clock is noticed."""
        due = self.world.next_event_at()
        if due is None:
            return LONGEST_PAUSE_SECONDS
        return min(LONGEST_PAUSE_SECONDS, max(0.001, (due - self.now()).total_seconds()))

    def _join(self) -> None:
        self.wake()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # --- files

    def _open_files(self) -> None:
        try:
            if self._state_dir is not None:
                self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                _refuse_second(self._state_dir)
            if self._audit_path is not None:
                self._audit_path.parent.mkdir(parents=True, exist_ok=True)
                self._audit = self._audit_path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"the emulator cannot write its files: {error}") from error
        if self._audit is not None:
            file = self._audit
            for record in self.world.audit:
                _write_line(file, record)
            self.world.on_audit(lambda record: _write_line(file, record))

    def _close_audit(self) -> None:
        with self.lock:
            self.world.on_audit(None)
            if self._audit is not None:
                self._audit.close()
                self._audit = None

    def _announce(self) -> None:
        if self._state_dir is None:
            return
        path = self._state_dir / SOCKET_NAME
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            path = Path(tempfile.mkdtemp(prefix="tpucare-")) / SOCKET_NAME
        self._control = ControlSocket(path, self.apply_order)
        self._control.start()
        found = emulator_address.Running(
            self.endpoint,
            str(path),
            self._project,
            os.getpid(),
            self._ssh_port,
            self._driver.login_user,
            self.rest_endpoint,
            self.storage_endpoint,
        )
        emulator_address.announce(self._state_dir, found)

    def _withdraw(self) -> None:
        if self._control is None or self._state_dir is None:
            return
        self._control.close()
        if self._control.path.parent != self._state_dir:
            self._control.path.parent.rmdir()
        self._control = None
        emulator_address.withdraw(self._state_dir)


def _write_line(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record) + "\n")


def _refuse_second(folder: Path) -> None:
    """Raises: ConfigError: a running emulator uses this folder."""
    try:
        found = emulator_address.find(folder)
        request(found.control, {"do": "status"})
    except ConfigError:
        return
    raise ConfigError(f"an emulator already runs in {folder} (pid {found.pid}); stop it, or choose another folder")


def _steady_clock() -> Callable[[], datetime]:
    begin, at = datetime.now(UTC), time.monotonic()
    return lambda: begin + timedelta(seconds=time.monotonic() - at)
