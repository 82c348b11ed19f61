"""
The preemptions of the demo: at seeded moments, one of them with a stockout in the zone.

They follow the training as the daemon reports it, and act only on the emulated cloud; the daemon learns of them as it
would from the real one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime

from tpucare.testbed.demo.setup import Stage
from tpucare.testbed.emulator.world.records import NodeRecord

# A fifth of all steps precedes each preemption; the remaining steps are spread by chance.
LEAST_SHARE = 0.2
TIER = "spot"


@dataclass(frozen=True, slots=True)
class Scene:
    """One preemption: after so many steps since the last start, with or without a stockout in the zone."""

    after_steps: int
    stockout: bool


def scenes(preemptions: int, steps: int, rng: random.Random) -> list[Scene]:
    """Seeded moments that leave at least a tenth of all steps for the end; one of them with a stockout."""
    if not preemptions:
        return []
    slack = max(0.0, 0.9 - LEAST_SHARE * preemptions) / (2 * preemptions)
    shares = [LEAST_SHARE + rng.uniform(0, min(slack, 0.15)) for _ in range(preemptions)]
    short = rng.randrange(preemptions)
    return [Scene(-(-int(share * steps * 1000) // 1000), index == short) for index, share in enumerate(shares)]


@dataclass(slots=True)
class Director:
    """Applies the scenes one after the other; `losses` has the node and the time of each."""

    stage: Stage
    plan: list[Scene]
    losses: list[tuple[str, datetime]] = field(default_factory=list)
    _short_zone: str = ""

    def update(self, node: str, step: int | None, started_from: int) -> None:
        """Apply the next scene if it is due. *node* trains at *step*, and began from *started_from*."""
        if self._short_zone and node and self._zone_of(node) not in ("", self._short_zone):
            self._refill()
        if not self.plan or step is None or not node or any(node == lost for lost, _ in self.losses):
            return
        if step - started_from >= self.plan[0].after_steps:
            self.preempt(node, stockout=self.plan.pop(0).stockout)

    def preempt(self, node: str, *, stockout: bool = False) -> None:
        """Preempt *node* now, with or without a stockout in its zone."""
        server = self.stage.server
        assert server is not None
        with server.lock:
            now = server.now()
            zone = self._zone_of(node)
            server.world.operator.preempt(node, now)
            if stockout:
                server.world.operator.set_capacity(zone, self.stage.accelerator, TIER, 0, now)
                self._short_zone = zone
        server.wake()
        self.losses.append((node, now))

    def _refill(self) -> None:
        """Give the capacity back once the failover has happened."""
        server = self.stage.server
        assert server is not None
        with server.lock:
            server.world.operator.set_capacity(self._short_zone, self.stage.accelerator, TIER, None, server.now())
        self._short_zone = ""

    def _zone_of(self, node: str) -> str:
        return next((record.path.zone for record in self.nodes() if record.path.node_id == node), "")

    def nodes(self) -> list[NodeRecord]:
        server = self.stage.server
        assert server is not None
        with server.lock:
            return server.world.nodes()
