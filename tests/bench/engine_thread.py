"""The engine with the real store, executor and gRPC client, and simulated workers, run beside whoever measures."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.cloud_process import KIND, PROJECT, RUNTIME, ZONE
from tests.bench.installation import FLEET
from tests.bench.simulated import SteadyLauncher
from tpucare.adapters.google.client import connect
from tpucare.adapters.state.store import SqliteStore, open_store
from tpucare.adapters.system import SystemClock, ThreadExecutor, machine_id
from tpucare.engine.effects import Ports
from tpucare.engine.engine import Engine, Settings
from tpucare.model.memory import FleetRecord
from tpucare.model.resources import Event, Job, Place, Provisioning, Slot
from tpucare.service.assembly import LANES

SSH_KEY = "tpucare:ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIO"


def slots(count: int) -> list[Slot]:
    place = Place(ZONE, KIND, Provisioning.SPOT, RUNTIME)
    job = Job(run="python3 train.py")
    return [Slot(f"{FLEET}-{index}", FLEET, PROJECT, (place,), job) for index in range(count)]


def declare(engine: Engine, store: SqliteStore, clock: SystemClock, count: int) -> None:
    """A fleet of *count* slots, as the daemon would declare it."""
    store.save_fleet(FleetRecord(FLEET, "", "", clock.now()))
    declared = slots(count)
    engine.declare(FLEET, declared, lambda name: replace(declared[0], name=name))


class EngineThread:
    """An engine on a thread of its own; a context manager. `heard` is told of every event on that thread."""

    def __init__(
        self,
        state: Path,
        endpoint: str,
        count: int,
        settings: Settings,
        heard: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self._ends = ExitStack()
        self.clock = SystemClock()
        self.executor = ThreadExecutor(LANES)
        self._ends.callback(self.executor.close, timedelta(seconds=5))
        store = open_store(state, machine_id=machine_id(), now=self.clock.now())
        self._ends.callback(store.close)
        cloud = connect(endpoint, monotonic=self.clock.monotonic)
        self._ends.callback(cloud.close)
        ports = Ports(cloud, SteadyLauncher(), store.owner, SSH_KEY)
        self.engine = Engine(ports, store, self.clock, self.executor, random.Random(1), settings, heard)
        declare(self.engine, store, self.clock, count)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.engine.run, args=(self._stopping.is_set,), name="engine")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.executor.nudge()
        self._thread.join()
        self._ends.close()

    def is_quiet(self) -> bool:
        """Every slot trains and nothing is under way: the project is polled at the idle interval."""
        tracks = list(self.engine.slots.values())
        return all(self.engine.is_training(track.slot.name) for track in tracks) and not self.engine.state.busy
