"""
A data centre, a project and a daemon in virtual time: `Zone` is the hand that acts on the world, `Daemon` the engine.

`Daemon.kill` drops the process at that instant: what is on disk stays, effects under way are lost to it, and those
that took hold in the world stay there. `Daemon.start` is the next process on the same store.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from tests.virtual.time import START, VirtualClock, VirtualExecutor
from tests.virtual.workers import Script, VirtualLauncher
from tpucare.effects import Ports
from tpucare.emulator.check import Expected, check
from tpucare.emulator.config import WorldConfig
from tpucare.emulator.inprocess import InProcessCloud
from tpucare.emulator.records import NodeRecord
from tpucare.emulator.world import World
from tpucare.engine import Engine, Settings
from tpucare.memory import FleetRecord, Memory, Wish
from tpucare.model import Care, Event, Job, Node, NodeState, Place, Provisioning, Slot
from tpucare.store import SqliteStore, open_store

PROJECT = "my-project"
US, EU = "us-central1-a", "europe-west4-a"
CARE = Care()
SSH_KEY = "tpucare:ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIO"


def place(zone: str = US, kind: str = "v3-32", tier: Provisioning = Provisioning.SPOT, workers: int = 4) -> Place:
    return Place(zone, kind, tier, "tpu-ubuntu2204-base", workers=workers)


def slots_of(fleet: str, count: int = 1, *places: Place, care: Care = CARE, job: bool = True) -> list[Slot]:
    names = [f"{fleet}-{index}" for index in range(count)]
    todo = Job(run="python3 train.py") if job else None
    return [Slot(name, fleet, PROJECT, places or (place(),), todo, care) for name in names]


class Zone:
    """The world, and what a person in the data centre would do to it."""

    def __init__(self, config: WorldConfig, seed: int, clock: VirtualClock, launcher: VirtualLauncher) -> None:
        self.world = World(config, seed=seed, start=START)
        self.clock = clock
        self.launcher = launcher

    def tick(self) -> None:
        self.world.advance(self.clock.true_now())
        for effect in self.world.take_effects():
            self.launcher.apply(effect)

    def next_event(self) -> float | None:
        at = self.world.next_event_at()
        return None if at is None else max(self.clock.seconds, (at - START).total_seconds())

    def nodes(self, slot: str = "") -> list[NodeRecord]:
        return [node for node in self.world.nodes() if node.path.node_id.startswith(slot)]

    def states(self, slot: str = "") -> list[str]:
        return [NodeState(node.state).name for node in self.nodes(slot)]

    def calls(self, method: str) -> list[dict[str, object]]:
        return [dict(r) for r in self.world.audit if r["event"] == "call" and r["method"] == method]

    def created(self) -> list[str]:
        return [str(call.get("node_id", call["name"])) for call in self.calls("CreateNode")]


class Daemon:
    """The real engine on a real store, under virtual time."""

    def __init__(
        self,
        folder: Path,
        *,
        config: WorldConfig | None = None,
        seed: int = 1,
        script: Script | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.folder = folder
        self.clock = VirtualClock()
        self.launcher = VirtualLauncher(self.clock, script or Script())
        self.zone = Zone(config or WorldConfig.calm(), seed, self.clock, self.launcher)
        self.settings = settings or Settings()
        self.seed = seed
        self.events: list[Event] = []
        self.declared: dict[str, list[Slot]] = {}
        self.store: SqliteStore | None = None
        self.restarts: list[datetime] = []
        self.start()

    # --- the process

    def start(self) -> None:
        self.executor = VirtualExecutor(self.clock, self.zone.tick, self.zone.next_event)
        self.launcher.waiting = self.executor.waiting
        self.launcher.nudge = self.executor.nudge
        self.cloud = InProcessCloud(self.zone.world, now=self.clock.true_now, wait=self.executor.waiting)
        self.store = open_store(self.folder, machine_id="machine", now=self.clock.now())
        ports = Ports(self.cloud, self.launcher, self.store.owner, SSH_KEY)
        self.engine = Engine(
            ports, self.store, self.clock, self.executor, random.Random(self.seed), self.settings, self.events.append
        )
        for fleet, slots in self.declared.items():
            self._declare(fleet, slots)

    def kill(self) -> None:
        """SIGKILL: nothing of this process happens any more; the world goes on."""
        assert self.store is not None
        self.executor.dead = True
        self.store.close()
        self.store = None
        self.restarts.append(self.clock.true_now())

    def restart(self) -> None:
        self.kill()
        self.start()

    def care_for(self, fleet: str, count: int = 1, *places: Place, care: Care = CARE, job: bool = True) -> None:
        self.declared[fleet] = slots_of(fleet, count, *places, care=care, job=job)
        assert self.store is not None
        self.store.save_fleet(FleetRecord(fleet, "", "", self.clock.now()))
        self._declare(fleet, self.declared[fleet])

    def _declare(self, fleet: str, slots: list[Slot]) -> None:
        known = {slot.name: slot for slot in slots}
        self.engine.declare(fleet, slots, lambda name: known.get(name) or replace(slots[0], name=name))

    def wish(self, slot: str, wish: Wish) -> None:
        self.engine.change(slot, lambda memory: replace(memory, wish=wish), wish.value, f"{slot}: {wish.value}")

    # --- time

    def run(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        until = self.clock.seconds + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
        while self.clock.seconds < until:
            idle = self.engine.step()
            self.executor.sleep(timedelta(seconds=max(0.001, min(idle, until - self.clock.seconds))))

    def run_until(self, condition: Callable[[], bool], *, minutes: float = 120) -> None:
        until = self.clock.seconds + minutes * 60
        while not condition():
            assert self.clock.seconds < until, f"still not after {minutes} min: {self.why()}"
            self.executor.sleep(timedelta(seconds=min(1.0, self.engine.step())))

    # --- what there is to see

    def memory(self, slot: str) -> Memory:
        return self.engine.slots[slot].memory

    def why(self, slot: str = "") -> dict[str, str]:
        return {name: track.action.why for name, track in self.engine.slots.items() if name.startswith(slot)}

    def trains(self, slot: str) -> bool:
        return self.engine.is_training(slot)

    def all_train(self) -> bool:
        return all(self.trains(name) for name in self.engine.slots)

    def told(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    def node_of(self, slot: str) -> Node:
        tracks = self.engine.slots[slot].nodes
        assert len(tracks) == 1, f"{slot} has {sorted(tracks)}"
        return next(iter(tracks.values())).node

    def check(self, *allowed: str) -> None:
        """The rules that a history can show: two live runs of one slot, creates over budget, foreign deletes, ..."""
        assert two_runs_at_once(self.launcher.history) == []
        assert self.store is not None
        expected = Expected(owner=self.store.owner, restarts=tuple(self.restarts), allowed_deletes=frozenset(allowed))
        assert [str(finding) for finding in check(list(self.zone.world.audit), expected)] == []


def two_runs_at_once(history: list[tuple[float, str, str, int]]) -> list[str]:
    """Rule 1, from the starts and ends of runs on simulated workers: what is wrong with it, empty when nothing is."""
    alive: dict[str, set[tuple[str, int]]] = {}
    found = []
    for seconds, what, token, worker in history:
        slot = token.rpartition("-a")[0]
        runs = alive.setdefault(slot, set())
        if what == "start":
            others = {other for other, _ in runs if other != token}
            if others:
                found.append(f"{seconds:.0f} s: {token} starts while {sorted(others)} live")
            runs.add((token, worker))
        else:
            runs.discard((token, worker))
    return found
