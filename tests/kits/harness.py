"""The simulated daemon on a real store, and a check of its history at the end of a story."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from tpucare.adapters.state.store import SqliteStore, open_store
from tpucare.engine.engine import Settings
from tpucare.model.causes import Cause
from tpucare.model.memory import Memory
from tpucare.model.resources import Care, Job, Node, NodeState, Place, Provisioning, Slot
from tpucare.testbed.audit import Expected, check
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NodeRecord
from tpucare.testbed.simulation.daemon import SSH_KEY, DataCentre, SimulatedDaemon
from tpucare.testbed.simulation.workers import Script

__all__ = [
    "CARE",
    "EU",
    "PROJECT",
    "SELDOM",
    "SSH_KEY",
    "US",
    "Daemon",
    "DataCentre",
    "ObservedDaemon",
    "place",
    "slots_of",
    "two_runs_at_once",
]

PROJECT = "my-project"
US, EU = "us-central1-a", "europe-west4-a"
CARE = Care()
# For stories of many slots or days that do not depend on how soon a thing is noticed: a quarter of the passes.
SELDOM = Settings(poll=20.0, probe=60.0)


def place(zone: str = US, kind: str = "v3-32", tier: Provisioning = Provisioning.SPOT, workers: int = 4) -> Place:
    return Place(zone, kind, tier, "tpu-ubuntu2204-base", workers=workers)


def slots_of(fleet: str, count: int = 1, *places: Place, care: Care = CARE, job: bool = True) -> list[Slot]:
    names = [f"{fleet}-{index}" for index in range(count)]
    todo = Job(run="python3 train.py") if job else None
    return [Slot(name, fleet, PROJECT, places or (place(),), todo, care) for name in names]


class ObservedDataCentre(DataCentre):
    """A data centre, and what a test reads of it."""

    def nodes(self, slot: str = "") -> list[NodeRecord]:
        return [node for node in self.world.nodes() if node.path.node_id.startswith(slot)]

    def states(self, slot: str = "") -> list[str]:
        return [NodeState(node.state).name for node in self.nodes(slot)]

    def calls(self, method: str) -> list[dict[str, object]]:
        return [dict(r) for r in self.world.audit if r["kind"] == "call" and r["method"] == method]

    def created(self) -> list[str]:
        return [str(call.get("node_id", call["name"])) for call in self.calls("CreateNode")]


class ObservedDaemon(SimulatedDaemon):
    """A simulated daemon that a test lets run, restarts and reads."""

    zone: ObservedDataCentre

    def __init__(
        self,
        *,
        config: WorldConfig | None = None,
        seed: int = 1,
        script: Script | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(config=config, seed=seed, script=script, settings=settings)
        self.zone = ObservedDataCentre(config or WorldConfig.calm(), seed, self.clock, self.launcher)

    def restart(self) -> None:
        self.kill()
        self.start()

    def pass_unseen(self, *, hours: float) -> None:
        """The world goes on, and no daemon runs."""
        until = self.clock.seconds + hours * 3600
        while self.clock.seconds < until:
            self.executor.pass_time(until)

    def run(self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        self.run_to(self.clock.seconds + length.total_seconds())

    def run_until(self, condition: Callable[[], bool], *, minutes: float = 120) -> None:
        until = self.clock.seconds + minutes * 60
        while not condition():
            assert self.clock.seconds < until, f"still not after {minutes} min: {self.why()}"
            self.executor.sleep(timedelta(seconds=min(1.0, self.engine.step())))

    def memory(self, slot: str) -> Memory:
        return self.engine.slots[slot].memory

    def why(self, slot: str = "") -> dict[str, str]:
        return {name: track.action.why for name, track in self.engine.slots.items() if name.startswith(slot)}

    def causes(self, slot: str = "") -> dict[str, Cause]:
        return {name: track.action.cause for name, track in self.engine.slots.items() if name.startswith(slot)}

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


class Daemon(ObservedDaemon):
    """The real engine on a real store, under virtual time."""

    store: SqliteStore | None

    def __init__(
        self,
        folder: Path,
        *,
        config: WorldConfig | None = None,
        seed: int = 1,
        script: Script | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(config=config, seed=seed, script=script, settings=settings)
        self.folder = folder
        self.start()

    def open_store(self) -> SqliteStore:
        store = open_store(self.folder, machine_id="machine", now=self.clock.now())
        # A story kills its process, never the machine: to wait for the disk at each commit would be most of its time.
        store._connection.execute("PRAGMA synchronous = OFF")
        return store

    def close_store(self) -> None:
        assert self.store is not None
        self.store.close()

    def lose_store(self) -> None:
        """As if its file had been moved away: the next process begins with an empty one."""
        self.kill()
        for path in self.folder.glob("tpucare.sqlite*"):
            path.unlink()
        self.start()

    def care_for(self, fleet: str, count: int = 1, *places: Place, care: Care = CARE, job: bool = True) -> None:
        self.care_for_slots(fleet, slots_of(fleet, count, *places, care=care, job=job))

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
