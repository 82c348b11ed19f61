"""
What a strike acts with: the operator's hand on the world, the machines, the daemon, a person's wish.

How long something lasts and what explains it is kept by `history`; what a strike does is in `strikes` and its parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.world.state import NodeLife
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.daemon import Daemon
from tpucare.testbed.simulation.machines import SimulatedWorker
from tpucare.testbed.simulation.scenario import Strike

Undo = Callable[[], object]


@dataclass
class Hand:
    """What a strike acts with. `later` plays something after so many seconds, whether or not a daemon runs then."""

    daemon: Daemon
    later: Callable[[float, Undo], None]
    down_for: Callable[[float], None]
    """The daemon's process was killed: start the next one after so many seconds."""
    asked: Callable[[str, float], None]
    """A person asks something of that slot, which explains for so many seconds what happens to it."""
    rng: random.Random
    strike: Strike

    @property
    def world(self) -> World:
        return self.daemon.zone.world

    @property
    def now(self) -> datetime:
        return self.daemon.clock.true_now()

    @property
    def length(self) -> timedelta:
        return timedelta(seconds=self.strike.length)

    def zone(self) -> str:
        return self.rng.choice(sorted(self.world.config.zones))

    def living(self) -> list[NodeLife]:
        return self.world.select(self.strike.target, living=True)

    def node(self, *, ready: bool = True) -> NodeLife | None:
        wanted = NodeState.READY if ready else NodeState.CREATING
        return next((life for life in self.living() if life.record.state == wanted), None)

    def worker(self) -> SimulatedWorker | None:
        """A machine of the slot that is up, by chance."""
        found = [
            worker
            for life in self.living()
            for worker in self.daemon.launcher.of_node(*life.path)
            if worker.up and worker.node_id == life.record.id
        ]
        return self.rng.choice(found) if found else None

    def running(self) -> SimulatedWorker | None:
        worker = self.worker()
        return worker if worker is not None and self.daemon.launcher.lives(worker) else None


Act = Callable[[Hand], bool]
"""It takes hold, or says that there was nothing to take hold of."""
