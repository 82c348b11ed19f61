"""
A data centre and a daemon in virtual time: `DataCentre` acts on the emulated world, `SimulatedDaemon` runs the engine.

`SimulatedDaemon.kill` drops the process at that instant: the files stay, the results of effects in flight are lost, and
effects that the world has accepted stay there. `SimulatedDaemon.start` is the next process on the same store.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from tpucare.engine.effects import Ports
from tpucare.engine.engine import Engine, Settings
from tpucare.model.memory import DesiredState, FleetRecord
from tpucare.model.ports import Lane, Store
from tpucare.model.resources import Event, Slot
from tpucare.testbed.emulator.inprocess import InProcessCloud
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NodePath
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.machines import SimulatedWorker
from tpucare.testbed.simulation.store import Disk, DiskMarkets, MemoryStore
from tpucare.testbed.simulation.sweep import SimulatedSweep
from tpucare.testbed.simulation.time import START, VirtualClock, VirtualExecutor
from tpucare.testbed.simulation.workers import Script, VirtualLauncher

SSH_KEY = "tpucare:ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIO"


class DataCentre:
    """The emulated world and its machines, under the virtual clock."""

    def __init__(self, config: WorldConfig, seed: int, clock: VirtualClock, launcher: VirtualLauncher) -> None:
        self.world = World(config, seed=seed, start=START)
        self.clock = clock
        self.launcher = launcher
        self.dark_for_ever: set[str] = set()
        self._told: tuple[datetime | None, float] = (None, 0.0)
        launcher.on_boot = self._publish
        launcher.sshguard = config.guest.sshguard

    def _publish(self, worker: SimulatedWorker) -> None:
        """Publish the host key of a machine that boots, as its guest agent does."""
        name = str(NodePath(*worker.key))
        self.world.operator.set_guest_attribute(name, worker.number, "hostkeys", "ssh-ed25519", worker.host_key)

    def tick(self) -> None:
        world = self.world
        world.advance(self.clock.true_now())
        if world.state.effects:
            for effect in world.take_effects():
                self.launcher.apply(effect)
        self.launcher.ring()

    def next_event(self) -> float | None:
        at = self.world.next_event_at()
        alarm = self.launcher.next_alarm()
        if at is None:
            return alarm
        if self._told[0] is not at:
            self._told = (at, (at - START).total_seconds())
        due = max(self.clock.seconds, self._told[1])
        return due if alarm is None or due < alarm else alarm


class SimulatedDaemon:
    """
    The real engine on a store, under virtual time; `settings` apply from the next start on.

    `own_files`: fleets whose slots have a file each; the file of a slot beyond the count is not read.
    """

    def __init__(
        self,
        *,
        config: WorldConfig | None = None,
        seed: int = 1,
        script: Script | None = None,
        settings: Settings | None = None,
        delay: Callable[[Lane], float] | None = None,
        grain: float = 0.0,
    ) -> None:
        self.clock = VirtualClock()
        self.launcher = VirtualLauncher(self.clock, script or Script())
        self.launcher.key = SSH_KEY
        self.zone = DataCentre(config or WorldConfig.calm(), seed, self.clock, self.launcher)
        self.settings = settings or Settings()
        self.seed = seed
        self.delay = delay
        self.grain = grain
        self.disk = Disk()
        self.events: list[Event] = []
        self.listen: Callable[[Event], None] = self.events.append
        self.declared: dict[str, list[Slot]] = {}
        self.own_files: set[str] = set()
        self.on_edit: Callable[[list[Slot]], None] = lambda _slots: None
        self.store: Store | None = None
        self.restarts: list[datetime] = []
        self.sweeps: dict[str, SimulatedSweep] = {}

    # --- the process

    def open_store(self) -> Store:
        return MemoryStore(self.disk, self.clock.now())

    def close_store(self) -> None: ...

    def start(self) -> None:
        self.executor = VirtualExecutor(self.clock, self.zone.tick, self.zone.next_event, self.delay, self.grain)
        self.launcher.waiting = self.executor.waiting
        self.launcher.nudge = self.executor.nudge
        self.cloud = InProcessCloud(self.zone.world, now=self.clock.true_now, wait=self.executor.waiting)
        self.store = self.open_store()
        ports = Ports(self.cloud, self.launcher, self.store.owner, SSH_KEY)
        self.engine = Engine(
            ports,
            self.store,
            self.clock,
            self.executor,
            random.Random(self.seed),
            self.settings,
            self._tell,
            knowledge=DiskMarkets(self.disk),
        )
        for fleet, slots in self.declared.items():
            self._declare(fleet, slots)

    def _tell(self, event: Event) -> None:
        self.listen(event)

    def kill(self, arrives: Callable[[], bool] = lambda: False) -> None:
        """
        Kill the process at this instant; the world goes on.

        arrives: called for each effect in flight to the cloud or to a worker; True = it arrives there
        """
        assert self.store is not None
        self.executor.die(arrives)
        self.cloud.close()
        self.launcher.process_ended()
        self.close_store()
        self.store = None
        self.restarts.append(self.clock.true_now())

    def care_for_all(self, slots: Iterable[Slot]) -> None:
        """Declare slots of several fleets."""
        fleets: dict[str, list[Slot]] = {}
        for slot in slots:
            fleets.setdefault(slot.fleet, []).append(slot)
        for fleet, of_fleet in fleets.items():
            self.care_for_slots(fleet, of_fleet)

    def care_for_slots(self, fleet: str, slots: list[Slot]) -> None:
        self.declared[fleet] = slots
        assert self.store is not None
        self.store.save_fleet(FleetRecord(fleet, "", "", self.clock.now()))
        self._declare(fleet, slots)

    def edit(self, fleet: str, slots: list[Slot]) -> None:
        """Change the fleet's file; a daemon that does not run reads it at its next start."""
        self.declared[fleet] = slots
        self.on_edit(slots)
        if self.store is not None:
            self._declare(fleet, slots)

    def _declare(self, fleet: str, slots: list[Slot]) -> None:
        known = {slot.name: slot for slot in slots}
        self.engine.declare(fleet, slots, lambda name: known.get(name) or self._surplus(fleet, name))

    def _surplus(self, fleet: str, name: str) -> Slot:
        """A slot beyond the count, as the fleet registry declares it."""
        first = self.declared[fleet][0]
        if fleet not in self.own_files:
            return replace(first, name=name)
        track = self.engine.slots.get(name)
        return track.slot if track is not None else replace(first, name=name, job=None)

    def run_to(self, seconds: float) -> None:
        """Let the engine work until the clock shows so many seconds."""
        while self.clock.seconds < seconds:
            idle = self.engine.step()
            self.executor.sleep(timedelta(seconds=max(0.001, min(idle, seconds - self.clock.seconds))))

    def wish(self, slot: str, wish: DesiredState) -> None:
        self.engine.change(slot, lambda memory: replace(memory, wish=wish), wish.value, f"{slot}: {wish.value}")
