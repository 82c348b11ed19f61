"""
Workers of which a thousand fit into one process: an SSH server each, no home, no processes, a run that only exists as
a token. They answer what the launcher's scripts would, so the caretaker's side is the real one down to the socket.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
import time
from concurrent.futures import Future

import paramiko

from tests.kits.ssh_stand_in import SshStandIn, make_host_key
from tpucare.model.resources import Ran
from tpucare.testbed.emulator.world.machine_effects import Boot, Kill, MachineEffect

LAUNCH = re.compile(r"\bTPUCARE_LAUNCH='?([^' ]+)")
OFFSET = re.compile(r"\boffset=(\d+)")
VERB = re.compile(r'"\$tools" (probe|stop)\b')
LINE = b"step %d: loss 0.123456789, 1.234 s, 123,456 tokens/s\n"
BOOT_ID = "01234567-89ab-cdef-0123-456789abcdef"


class StandInWorker:
    """What one worker says: fresh, then a run that makes a step a second and logs it."""

    def __init__(self, address: str, port: int, authorized: str, host_key: paramiko.PKey) -> None:
        self._token = ""
        self._since = 0.0
        self.server = SshStandIn(authorized, answer=self._answer, host_keys=[host_key], address=address, port=port)

    @property
    def is_running(self) -> bool:
        return bool(self._token)

    def _answer(self, command: str) -> Ran:
        if launch := LAUNCH.search(command):
            self._token, self._since = launch[1], time.monotonic()
            return Ran(0, b"started\n", b"")
        verb = VERB.search(command)
        if verb is None:
            return Ran(0, b"", b"")
        if verb[1] == "stop":
            self._token = ""
            return Ran(0, b'{"quiet": true}\n', b"")
        return Ran(0, json.dumps(self._report(command)).encode() + b"\n", b"")

    def _report(self, command: str) -> dict[str, object]:
        if not self._token:
            return {"fresh": True, "boot_id": BOOT_ID}
        step = int(time.monotonic() - self._since)
        log = b"".join(LINE % number for number in range(step + 1))
        offset = OFFSET.search(command)
        start = min(int(offset[1]) if offset else 0, len(log))
        return {
            "token": self._token,
            "last_number": int(self._token.rpartition(".")[2]),
            "boot_id": BOOT_ID,
            "alive": True,
            "chips_free": False,
            "detail": "",
            "state": {"phase": "run"},
            "exit": None,
            "log": {"token": self._token, "start": start, "data": base64.b64encode(log[start:]).decode()},
            "told": False,
            "step": step,
            "checkpoint": None,
            "log_bytes": len(log),
        }


class StandInMachines:
    """`machine_driver.Machines` over them: a Boot listens on the worker's own address, a Kill hangs up at once."""

    login_user = "tpucare"

    def __init__(self, port: int, authorized: str) -> None:
        self._port, self._authorized = port, authorized
        self._host_key = make_host_key()
        self._workers: dict[tuple[int, int], StandInWorker] = {}
        self._lock = threading.Lock()

    def apply(self, effect: MachineEffect) -> Future[None]:
        match effect:
            case Boot(node_id=node, worker=number, address=address):
                worker = StandInWorker(address, self._port, self._authorized, self._host_key)
                with self._lock:
                    self._workers[node, number] = worker
            case Kill(node_id=node, worker=number):
                self._end(node, number)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def count(self) -> dict[str, int]:
        """Workers that are up, runs on them, connections that are open."""
        with self._lock:
            workers = list(self._workers.values())
        running = sum(worker.is_running for worker in workers)
        return {"up": len(workers), "running": running, "open": sum(worker.server.open for worker in workers)}

    def close(self) -> None:
        for node in {node for node, _ in self._workers}:
            self._end(node, None)

    def _end(self, node: int, number: int | None) -> None:
        with self._lock:
            doomed = [key for key in self._workers if key[0] == node and number in (None, key[1])]
            ended = [self._workers.pop(key) for key in doomed]
        for worker in ended:
            with contextlib.suppress(OSError):
                worker.server.stop()
