"""Registry, fleet folder and command handler over the real engine in virtual time, and a daemon as a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.kits.harness import PROJECT, Daemon
from tpucare.service.assembly import Runtime
from tpucare.service.commands import CommandHandler
from tpucare.service.control_socket import NoDaemon, request
from tpucare.service.fleet_folder import FleetFolder
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig

REPOSITORY = Path(__file__).parents[2]
QUICK: dict[str, object] = {
    "read": 0,
    "write": 0,
    "visible": 0,
    "list_lag_share": 0,
    "create_single": 0.1,
    "create_slice": 0.1,
    "boot_skew": 0,
    "boot_late": 0.05,
    "delete": 0.1,
    "operation_done": 0,
    "operation_lingers_share": 0,
}
BEAT = {
    "TPUCARE_POLL": "0.3",
    "TPUCARE_FAST_POLL": "0.1",
    "TPUCARE_PROBE": "0.5",
    "TPUCARE_FAST_PROBE": "0.1",
}


def fleet_text(name: str = "pod", count: int = 1, **job: str) -> str:
    lines = {"run": "python3 train.py", "checkpoint": "gs://bucket/{slot}", **job}
    body = "".join(f"  {key}: {value!r}\n" for key, value in lines.items())
    tpu = "tpu: {type: v2-8, zones: [us-central1-a], provisioning: spot}\n"
    return f"name: {name}\ncount: {count}\n{tpu}job:\n{body}"


class VirtualService:
    """The harness's `Daemon` in virtual time, with fleets from files, and commands. `again` is the next process."""

    def __init__(self, tmp_path: Path, config: WorldConfig | None = None) -> None:
        self.folder = tmp_path / "fleets"
        self.folder.mkdir()
        self.state = tmp_path / "state"
        self.daemon = Daemon(self.state, config=config)
        self.secrets: Callable[[str], str | None] | None = None
        self._open()

    def _open(self) -> None:
        daemon = self.daemon
        assert daemon.store is not None
        self.registry = FleetRegistry(
            daemon.engine,
            daemon.store,
            daemon.clock,
            state=self.state,
            find_project=lambda: PROJECT,
            secrets=self.secrets,
        )
        self.registry.load()
        self.fleet_folder = FleetFolder(self.folder, self.registry)
        parts = SimpleNamespace(engine=daemon.engine, store=daemon.store, clock=daemon.clock)
        self.handler = CommandHandler(cast(Runtime, parts), self.registry, self.fleet_folder)

    def again(self) -> None:
        self.daemon.restart()
        self._open()

    def write(self, text: str, name: str = "pod.yaml") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def look(self) -> None:
        """Twice: a changed file has to look the same two times in a row."""
        self.fleet_folder.read_changes()
        self.fleet_folder.read_changes()

    def run(self, minutes: float = 15) -> None:
        """The loop, as the daemon has it."""
        for _ in range(max(1, int(minutes * 6))):
            self.daemon.run(seconds=10)
            self.registry.remove_finished_slots()

    def ask(self, do: str, **values: object) -> dict[str, Any]:
        return self.handler.handle({"do": do, **values})

    def apply(self, text: str, folder: Path, **values: object) -> dict[str, Any]:
        return self.ask("apply", text=text, folder=str(folder), file="", **values)

    @property
    def slots(self) -> list[str]:
        return sorted(self.daemon.engine.slots)

    @property
    def nodes(self) -> list[str]:
        return sorted(node.path.node_id for node in self.daemon.zone.nodes())


# --- a real daemon ---------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """One `tpucare` command that runs for long; its output goes to a file."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    def end(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal to that process alone, and return its exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(seconds)


@dataclass
class MachinelessDeployment:
    """An emulated cloud in this process, and commands and daemons as processes of their own."""

    server: EmulatorServer
    folder: Path
    beat: Mapping[str, str] = field(default_factory=lambda: BEAT)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state, self.fleets = self.folder / "state", self.folder / "fleets"
        self.fleets.mkdir(exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("TPUCARE_", "GOOGLE_"))}
        ours = {
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(self.folder),
            "TPUCARE_STATE": str(self.state),
            "TPUCARE_ENDPOINT": self.server.endpoint,
            "TPUCARE_PROJECT": "emulated",
            "TPUCARE_FLEETS": str(self.fleets),
        }
        return {**kept, **ours, **self.beat}

    def write(self, text: str, name: str = "pod.yaml") -> Path:
        path = self.fleets / name
        path.write_text(text)
        return path

    def daemon(self, *flags: str, **env: str) -> Process:
        log = self.folder / f"daemon-{len(self.processes)}.log"
        command = [sys.executable, "-m", "tpucare.cli", "daemon", *flags]
        with log.open("wb") as out:
            popen = subprocess.Popen(
                command, env={**self.env, **env}, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=self.folder
            )
        self.processes.append(Process(popen, log))
        return self.processes[-1]

    def started(self, *flags: str, **env: str) -> Process:
        """A daemon that answers."""
        process = self.daemon(*flags, **env)
        self.until(lambda: self.status() is not None or process.popen.poll() is not None)
        assert process.popen.poll() is None, process.text
        return process

    def run(self, *words: str, code: int | None = 0, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """One command to its end; `code` None: any exit status."""
        command = [sys.executable, "-m", "tpucare.cli", *words]
        done = subprocess.run(
            command,
            env={**self.env, **env},
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json").stdout)

    @property
    def socket(self) -> Path:
        return self.state / "control.sock"

    def ask(self, do: str, **values: object) -> dict[str, Any]:
        return request(self.socket, {"do": do, **values})

    def status(self) -> dict[str, Any] | None:
        try:
            return self.ask("status")
        except NoDaemon:
            return None

    def slot(self, name: str = "pod-0") -> dict[str, Any]:
        rows = {row["slot"]: row for row in (self.status() or {"slots": []})["slots"]}
        return cast("dict[str, Any]", rows.get(name, {}))

    def nodes(self) -> list[str]:
        with self.server.lock:
            return sorted(node.path.node_id for node in self.server.world.nodes())

    def calls(self, method: str) -> list[str]:
        with self.server.lock:
            audit = list(self.server.world.audit)
        return [str(call["name"]) for call in audit if call["kind"] == "call" and call["method"] == method]

    def until(self, true: Callable[[], object], seconds: float = 60) -> None:
        """Poll the outside of another process: there is nothing to be notified by."""
        deadline = time.monotonic() + seconds
        while not true():
            logs = "\n".join(process.text[-3000:] for process in self.processes)
            assert time.monotonic() < deadline, f"it does not come true; the daemon says:\n{logs}"
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait(10)


@contextlib.contextmanager
def machineless_deployment(folder: Path, config: WorldConfig | None = None) -> Iterator[MachinelessDeployment]:
    """Workers never answer here: there are no machines."""
    with EmulatorServer(config or WorldConfig.fast(latencies=QUICK)) as server:
        made = MachinelessDeployment(server, folder)
        try:
            yield made
        finally:
            made.close()
