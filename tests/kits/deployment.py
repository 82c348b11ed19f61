"""
A deployment for end-to-end tests: an emulated cloud with real machines, and the daemon as a process of its own.

`Deployment` orders what happens in the cloud, and types what a person would. `close` then judges, whatever a test did:
the audit log is replayed against the promises, with a witness that saw what really ran, and no process, thread or
folder of ours may outlive it. Jobs are light (a loop in bash) unless a test brings its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from tpucare.adapters.runner.logs import LogKeeper
from tpucare.adapters.state.store import SqliteReader, open_reader
from tpucare.model.memory import Memory
from tpucare.model.resources import Event, NodeState
from tpucare.service import control_socket as control
from tpucare.testbed.audit import Expected, Finding, check
from tpucare.testbed.demo.setup import free_port
from tpucare.testbed.emulator.machines.machines import WorkerMachines
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.witness import Witness
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NodePath, NodeRecord

T = TypeVar("T")

PROJECT = "grant"
NEAR, FAR = "us-east5-a", "europe-west4-b"
ONE_HOST, TWO_HOSTS = "v5p-8", "v5p-16"
PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.05

# Fast heartbeats: what takes a minute against the real cloud takes a second here.
PACE = {"TPUCARE_POLL": "0.5", "TPUCARE_FAST_POLL": "0.25", "TPUCARE_PROBE": "0.5", "TPUCARE_FAST_PROBE": "0.25"}

# Trains in steps of a fifth of a second from its newest checkpoint on, each of which is one.
TRAIN = """\
mkdir -p "$TPUCARE_CHECKPOINT"
step=$(ls "$TPUCARE_CHECKPOINT" | sort -n | tail -1)
echo "resumed from step ${step:-0}"
while [ "${step:-0}" -lt "${STEPS:-100000}" ]; do
  step=$((${step:-0} + 1))
  sleep 0.2
  mkdir -p "$TPUCARE_CHECKPOINT/$step"
  echo "step $step"
done
"""


def eventually(
    look: Callable[[], T | None],
    what: str,
    seconds: float = PATIENCE_SECONDS,
    *,
    tell: Callable[[], str] = str,
    before_look: Callable[[], None] = lambda: None,
) -> T:
    """The first true answer of *look*. Raises: AssertionError: none within *seconds*, with what *tell* knows."""
    until = time.monotonic() + seconds
    while True:
        before_look()
        if found := look():
            return found
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds:.0f} s: {what}\n{tell()}")
        time.sleep(LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Deployment:
    """
    The cloud is up from the start; `start` begins the care.

    world:  keys of a WorldConfig in fast mode    pace: changes to the daemon's environment
    """

    def __init__(self, folder: Path, world: Mapping[str, Any] | None = None, pace: Mapping[str, str] | None = None):
        self.folder = folder
        self.emulator, self.state, self.fleets = folder / "emulator", folder / "state", folder / "fleets"
        self.bucket, self.audit_file, self.daemon_log = folder / "bucket", folder / "audit.jsonl", folder / "daemon.log"
        for one in (self.emulator, self.fleets, self.bucket):
            one.mkdir(mode=0o700)
        self.environment = {**_clean_environment(), **PACE, **(pace or {})}
        self.environment |= {"TPUCARE_EMULATOR": str(self.emulator), "TPUCARE_STATE": str(self.state)}
        self.allowed_deletes: set[str] = set()
        self.live_slots: set[str] | None = set()
        self.restarts: list[datetime] = []
        self.secrets: tuple[str, ...] = ()
        self.daemon: subprocess.Popen[bytes] | None = None
        self._known_fleets: set[str] = set()
        self._threads_before = set(threading.enumerate())
        self._reader: SqliteReader | None = None
        self.server = self._open_cloud(world or {})
        self._witness = Witness(self.nodes, self.server.log_note, self.machines.survivors)
        self._witness.start()

    def _open_cloud(self, world: Mapping[str, Any]) -> EmulatorServer:
        ssh_port = free_port()
        machines = partial(WorkerMachines, self.emulator, ssh_port=ssh_port, metadata_port=free_port())
        settings = {"zones": {NEAR: {}, FAR: {}}, "addresses": {"network": own_network()}, **world}
        server = EmulatorServer(
            WorldConfig.fast(**settings),
            machines=machines,
            state_dir=self.emulator,
            audit_path=self.audit_file,
            project=PROJECT,
            ssh_port=ssh_port,
        )
        server.start()
        return server

    # --- the data centre ---------------------------------------------------------------------------------------------

    @property
    def machines(self) -> WorkerMachines:
        machines = self.server.machines
        assert isinstance(machines, WorkerMachines)
        return machines

    def nodes(self) -> list[NodeRecord]:
        """Every node that exists, whether or not the API shows it yet."""
        with self.server.lock:
            return self.server.world.nodes()

    def names(self) -> list[str]:
        return [record.path.node_id for record in self.nodes()]

    def path(self, node: str) -> NodePath:
        return next(record.path for record in self.nodes() if record.path.node_id == node)

    def order(self, do: str, **what: Any) -> Mapping[str, Any]:
        """What an operator orders of the emulated cloud: `order("preempt", selector="pod-0")`."""
        return self.server.apply_order({"do": do, **what})

    def audit(self, method: str = "") -> list[Mapping[str, Any]]:
        with self.server.lock:
            records = list(self.server.world.audit)
        return [record for record in records if not method or record.get("method") == method]

    def await_call(self, method: str, name: str, after: int = 0) -> Mapping[str, Any]:
        """The first call of *method* on the node of that name, beyond the first *after* records, that took effect."""

        def look() -> Mapping[str, Any] | None:
            calls = (one for one in self.audit()[after:] if one.get("method") == method and one["applied"])
            return next((one for one in calls if str(one["name"]).endswith(f"/{name}")), None)

        return self.await_(look, f"{method} of {name}")

    def cut_connections(self, node: str) -> None:
        """End every SSH session with the workers of *node*; what runs goes on, and new sessions may begin."""
        path = self.path(node)
        for worker in range(len(next(one for one in self.nodes() if one.path == path).endpoints)):
            _, *others = self.machines.processes(path, worker)
            for pid in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if process.name().startswith("sshd") and "listener" not in " ".join(process.cmdline()):
                        process.kill()

    # --- the person --------------------------------------------------------------------------------------------------

    def declare(self, name: str, text: str = "", **changes: Any) -> str:
        """Put a fleet file into the folder. Keyword arguments go into its sections by their names; returns *name*."""
        declared = text or yaml.safe_dump(self.fleet(name, **changes), sort_keys=False)
        draft = self.fleets / f".{name}"
        draft.write_text(declared)
        draft.rename(self.fleets / f"{name}.yaml")
        self._known_fleets.add(name)
        return name

    def fleet(
        self,
        name: str,
        *,
        count: int = 1,
        kind: str = ONE_HOST,
        zones: tuple[str, ...] = (NEAR,),
        run: str = TRAIN,
        live: bool = True,
        tpu: Mapping[str, Any] | None = None,
        job: Mapping[str, Any] | None = None,
        care: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`live`: its slots must hold one node each when the test ends."""
        if live and self.live_slots is not None:
            self.live_slots |= {f"{name}-{index}" for index in range(count)}
        return {
            "name": name,
            "count": count,
            # Equal prices: of places alike the first declared one is asked first.
            "tpu": {"type": kind, "zones": list(zones), "provisioning": "spot", "price": 1, **(tpu or {})},
            "job": {"run": run, "checkpoint": str(self.bucket / name), **(job or {})},
            "care": {"success_after": "1s", "grace": "2s", **(care or {})},
        }

    def cli(self, *words: str, want: int | None = 0, environment: Mapping[str, str] | None = None) -> Said:
        """Run `tpucare *words*` to its end. `want`: the exit status that it must have; None: any."""
        done = subprocess.run(
            [sys.executable, "-m", "tpucare.cli", *words],
            env={**self.environment, "TPUCARE_FLEETS": str(self.fleets), **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        said = Said(done.returncode, done.stdout, done.stderr)
        assert want is None or said.status == want, f"tpucare {' '.join(words)}: {said}"
        return said

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """An order at the control socket, as every command sends it."""
        return control.request(self.state / "control.sock", {"do": do, **what})

    def row(self, slot: str) -> dict[str, Any]:
        """The slot as `status` shows it."""
        found: dict[str, Any] = self.ask("status", target=slot)["slots"][0]
        return found

    # --- the daemon --------------------------------------------------------------------------------------------------

    def start(self, *words: str, ready: bool = True) -> None:
        """`ready`: return when it answers at its socket."""
        assert self.daemon is None
        command = [sys.executable, "-m", "tpucare.cli", "daemon", "--fleets", str(self.fleets), "--log", "json", *words]
        with self.daemon_log.open("ab") as log:
            self.daemon = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        if ready:
            self.await_(lambda: control.is_running(self.state / "control.sock"), "the daemon answers")

    def kill(self) -> None:
        """SIGKILL: nothing is put in order."""
        self._end_daemon(signal.SIGKILL)
        self.restarts.append(self.server.now())

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        status = self._end_daemon(signal.SIGTERM)
        self.restarts.append(self.server.now())
        return status

    def restart(self) -> None:
        self.kill()
        self.start()

    def _end_daemon(self, number: signal.Signals) -> int:
        assert self.daemon is not None
        self.daemon.send_signal(number)
        try:
            return self.daemon.wait(20)
        finally:
            if self.daemon.poll() is None:
                self.daemon.kill()
                self.daemon.wait()
            self.daemon = None

    def check_daemon(self) -> None:
        if self.daemon is not None and (status := self.daemon.poll()) is not None:
            self.daemon = None
            raise AssertionError(f"the daemon ended with exit status {status}\n{self._log_tail()}")

    # --- what the daemon knows ---------------------------------------------------------------------------------------

    def _store(self) -> SqliteReader | None:
        try:
            if self._reader is None:
                self._reader = open_reader(self.state)
            else:
                self._reader.refresh()
        except Exception:
            self.close_reader()
        return self._reader

    def close_reader(self) -> None:
        """Let go of the files of the store until something of it is asked for again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def memory(self, slot: str) -> Memory | None:
        store = self._store()
        return store.memories().get(slot) if store is not None else None

    @property
    def owner(self) -> str:
        return (self.state / "owner").read_text().strip()

    def events(self, kind: str = "", slot: str = "", node: str = "") -> list[Event]:
        store = self._store()
        found = [event for _, event in store.events(slot=slot, limit=10_000)] if store is not None else []
        return [one for one in found if kind in ("", one.kind) and node in ("", one.node)]

    def log(self, slot: str, attempt: int = 1, worker: int = 0) -> str:
        """The log that the daemon keeps."""
        return LogKeeper(self.state / "logs").read(slot, attempt, worker).decode(errors="replace")

    # --- to wait -----------------------------------------------------------------------------------------------------

    def await_(self, look: Callable[[], T | None], what: str, seconds: float = PATIENCE_SECONDS) -> T:
        """As `eventually`; a daemon that ends by itself ends the wait."""
        return eventually(look, what, seconds, tell=self._told, before_look=self.check_daemon)

    def await_event(self, kind: str, slot: str = "", node: str = "", seconds: float = PATIENCE_SECONDS) -> Event:
        found = self.await_(lambda: self.events(kind, slot, node), f"{kind} of {node or slot}", seconds)
        return found[0]

    def await_training(self, slot: str, node: str = "", seconds: float = PATIENCE_SECONDS) -> str:
        """The slot's job said that it makes progress, on *node* if one is named; returns the node."""

        def look() -> str:
            memory = self.memory(slot)
            run = memory.run if memory is not None else None
            if run is None or run.state.is_past or (node and run.node != node):
                return ""
            began = [one for one in self.events("progress", slot, run.node) if run.token in one.text]
            return run.node if began else ""

        return self.await_(look, f"{slot} trains{f' on {node}' if node else ''}", seconds)

    def await_steps(self, slot: str, attempt: int = 1, least: int = 1) -> list[int]:
        """Steps of an attempt that the daemon has in its log, once the last is *least* or more."""

        def look() -> list[int]:
            steps = steps_in(self.log(slot, attempt))
            return steps if steps and steps[-1] >= least else []

        return self.await_(look, f"{slot} reached step {least} in attempt {attempt}")

    def token(self, slot: str) -> str:
        memory = self.memory(slot)
        assert memory is not None
        assert memory.run is not None
        return memory.run.token

    def attempts(self, slot: str) -> int:
        memory = self.memory(slot)
        assert memory is not None
        return memory.attempts

    def runs(self) -> dict[str, set[int]]:
        """Pids of every run that lives on the machines now, by token."""
        found: dict[str, set[int]] = {}
        for pid in self.machines.survivors():
            if token := environment_of(pid).get("TPUCARE_RUN"):
                found.setdefault(token, set()).add(pid)
        return found

    def _told(self) -> str:
        """What a person would look at when something does not happen."""
        lines = [f"{one.at:%H:%M:%S.%f} {one.level} {one.kind} {one.text}" for one in self.events()[-60:]]
        lines += [f"{one.path.node_id} {NodeState(one.state).name}" for one in self.nodes()]
        with contextlib.suppress(Exception):
            lines += [f"{row['slot']}: {row['phase']}: {row['why']}" for row in self.ask("status")["slots"]]
        return "\n".join([*lines, self._log_tail()])

    def _log_tail(self) -> str:
        """Nothing where no daemon was started."""
        known = self.daemon_log.read_text(errors="replace") if self.daemon_log.exists() else ""
        return "\n".join(known.splitlines()[-5:])

    # --- the end -----------------------------------------------------------------------------------------------------

    def allow_deletes(self, slot: str) -> None:
        """A person, or the end of its job, asked for the delete of every node that *slot* has had until now."""
        created = (str(one["name"]) for one in self.audit() if one["kind"] == "node" and one["event"] == "created")
        ids = (name.rpartition("/")[2] for name in created)
        self.allowed_deletes |= {one for one in ids if one.startswith(f"{slot}-a")}

    def findings(self) -> list[Finding]:
        owner = self.owner if (self.state / "owner").exists() else ""
        expected = Expected(
            owner=owner,
            fleets=frozenset(self._known_fleets),
            live_slots=None if self.live_slots is None else frozenset(self.live_slots),
            allowed_deletes=frozenset(self.allowed_deletes),
            restarts=tuple(self.restarts),
            secrets=self.secrets,
        )
        return check(self.audit(), expected)

    def close(self, *, judge: bool = True) -> None:
        """
        End everything, and see that every promise was kept. `judge`: False: only end everything, the test failed.

        Raises: AssertionError: one line for each promise that was not.
        """
        faults: list[str] = []
        try:
            if judge:
                with contextlib.suppress(AssertionError):
                    # A delete that was accepted needs a moment.
                    eventually(lambda: not any(one.rule == "leak" for one in self.findings()), "nothing leaks", 10)
                faults += self._foreign_connections()
            if self.daemon is not None and (status := self.stop()):
                faults.append(f"the daemon ended with exit status {status}")
        finally:
            self.close_reader()
            self._witness.stop()
            faults += [] if self.machines.escaped == 0 else [f"{self.machines.escaped} processes left their machine"]
            self.server.stop()
        faults += [f"process {pid} is left" for pid in self.machines.survivors()]
        faults += [str(finding) for finding in self.findings()]
        faults += self._unexpected()
        faults += self._left_threads()
        assert not (judge and faults), "\n".join(faults)

    def _foreign_connections(self) -> list[str]:
        """Nothing of a test may leave this machine."""
        if self.daemon is None:
            return []
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(self.daemon.pid).net_connections("inet")
            ends = [end for one in connections for end in (one.laddr, one.raddr) if end]
            return [f"the daemon talks to {end}" for end in ends if not end.ip.startswith(("127.", "::ffff:127."))]
        return []

    def _unexpected(self) -> list[str]:
        """Errors that nobody named: in the engine, and in the emulator."""
        log = self.daemon_log.read_text(errors="replace") if self.daemon_log.exists() else ""
        faults = [f"the daemon's log has a traceback: {log[-2000:]}"] if "Traceback" in log else []
        lines = [line for line in log.splitlines() if '"kind": "error"' in line]
        return [*faults, *lines]

    def _left_threads(self) -> list[str]:
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self._new_threads(), "threads end", 5)
        return [f"thread {thread.name} is left" for thread in self._new_threads()]

    def _new_threads(self) -> list[threading.Thread]:
        # Executors of gRPC's server keep a worker for a while; it is no thread of ours.
        return [one for one in threading.enumerate() if one not in self._threads_before and not one.daemon]


def _clean_environment() -> dict[str, str]:
    dropped = ("TPUCARE_", "NOTIFY_", "WATCHDOG_", "GOOGLE_", "CLOUDSDK_", "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def own_network(length: int = 24) -> str:
    """Loopback addresses that no other test process of this machine uses at the same time."""
    pid = os.getpid()
    return f"127.{128 + pid // 256 % 64}.{pid % 256}.0/{length}"


def environment_of(pid: int) -> dict[str, str]:
    """Empty when the process is gone."""
    try:
        return environment_in(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return {}


def environment_in(raw: bytes) -> dict[str, str]:
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


@contextlib.contextmanager
def deployment(folder: Path, **settings: Any) -> Iterator[Deployment]:
    """A deployment that is closed, and judged unless the test failed already."""
    folder.mkdir(parents=True, exist_ok=True)
    built = Deployment(folder.resolve(), **settings)
    try:
        yield built
    except BaseException:
        built.close(judge=False)
        raise
    built.close()


def steps_in(log: str) -> list[int]:
    return [int(found) for found in re.findall(r"^step (\d+)$", log, re.MULTILINE)]
