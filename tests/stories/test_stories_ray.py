"""
Hours of a Ray cluster in virtual time: gangs come and go, slices are preempted, zones run dry, head and daemon die.
Every other seed has a pool on demand beside the one of spot slices.

The stand-in for Ray places a gang on one free slice, forgets a silent host only after 13 s as Ray does, and keeps a
group whose slice died pinned to that slice's name. Whatever happens, all work ends, no slice is there without a reason,
and in the end nothing is left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.ray_care import GANG, Lab, pool
from tpucare.integrations.ray.companion import serving_node
from tpucare.integrations.ray.demand import Bundle, Gang, ProbeSilent
from tpucare.model.memory import FailureKind

SLICES, PAID = 3, 2
# GCS shows the hosts of a node that went silent for so long.
FORGETS_SECONDS = 13
JOINS_SECONDS = 8
HOURS = 3
# All demand has ended by then; what is left of the story lets it be served, and the slices rest.
LAST_DEMAND = (HOURS - 1) * 3600


@dataclass
class Work:
    """A gang that needs a whole slice for `left` seconds. `slot`: its group is held by that slice's name."""

    at: float
    left: float
    slot: str = ""
    node: str = ""


class Story:
    """A lab, and work for it. `now`: seconds of the story."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.lab, self.now = random.Random(seed), Lab(folder), 0.0
        self.lab.service.apply(pool(f"{{min: 0, max: {SLICES}}}"), folder)
        self.most = SLICES
        if seed % 2:
            tpu = "zones: [us-central1-a], provisioning: on-demand"
            paid = pool(f"{{min: 0, max: {PAID}}}", name="paid", more=", priority: 1", tpu=tpu)
            self.lab.service.apply(paid, folder)
            self.most += PAID
        count = self.rng.randint(4, 8)
        self.work = [Work(self.rng.uniform(0, LAST_DEMAND), self.rng.uniform(30, 900)) for _ in range(count)]
        self.joins: dict[str, float] = {}
        self.forgets: dict[str, float] = {}
        self.silent_until = self.dry_until = 0.0
        # Nodes of slots that rest: Ray's agreement is what asked for their deletes.
        self.rested: set[str] = set()
        self.troubles = sorted(self.rng.uniform(0, LAST_DEMAND) for _ in range(8))

    def live(self) -> None:
        while self.now < HOURS * 3600:
            while self.troubles and self.troubles[0] <= self.now:
                self.troubles.pop(0)
                self._trouble()
            self._place()
            self.lab.ray.error = ProbeSilent("away") if self.now < self.silent_until else None
            self.lab.run(1)
            self.now += 1
            self._check()

    # --- Ray ---------------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """One second of Ray: hosts join and are forgotten, gangs take slices, work ends."""
        engine, ray = self.lab.service.daemon.engine, self.lab.ray
        living = {}
        for slot, track in engine.slots.items():
            node, run = serving_node(track), track.memory.run
            if node and run is not None and run.node == node and run.complete and run.state.is_wanted:
                living[node] = slot
        for node in living:
            if self.now >= self.joins.setdefault(node, self.now + JOINS_SECONDS) and node not in ray.hosts:
                ray.join(node)
        for node in [node for node in ray.hosts if node not in living]:
            if self.now >= self.forgets.setdefault(node, self.now + FORGETS_SECONDS):
                del ray.hosts[node]
        for one in self.work:
            if one.node and one.node not in living:
                one.node = ""
            if one.node:
                one.left -= 1
                if one.left <= 0:
                    ray.join(one.node)
                    one.slot = one.node = ""
        self.work = [one for one in self.work if one.left > 0]
        waiting = [one for one in self.work if one.at <= self.now and not one.node]
        used = {one.node for one in self.work if one.node}
        # A drained host takes no work: the companion has been told that it agreed.
        for one in waiting:
            free = [
                node
                for node, slot in living.items()
                if node in ray.hosts and node not in used and one.slot in ("", slot) and not self._rests(slot)
            ]
            if free:
                one.node = min(free)
                one.slot = living[one.node]
                used.add(one.node)
                ray.join(one.node, used=4.0)
        pinned = [one for one in waiting if not one.node and one.slot]
        ray.gangs = tuple(Gang((Bundle({"TPU": 4.0}, {"ray.io/tpu-slice-name": one.slot}),) * 4) for one in pinned) + (
            GANG,
        ) * sum(not one.node and not one.slot for one in waiting)
        for node, hosts in list(ray.hosts.items()):
            if node not in used and node in living:
                ray.join(node, idle=hosts[0].idle_seconds + 1)

    def _rests(self, slot: str) -> bool:
        track = self.lab.service.daemon.engine.slots[slot]
        return not track.memory.awake or any(slot == going for going in self._draining())

    def _draining(self) -> list[str]:
        return [slot for cluster in self.lab.care._clusters.values() for slot in cluster.drains.values()]

    # --- trouble -----------------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        daemon, choice = self.lab.service.daemon, self.rng.randrange(5)
        now, operator = daemon.clock.true_now(), daemon.zone.world.operator
        nodes = self.lab.nodes
        if choice == 0 and nodes:
            how: dict[str, Any] = {"shown": "never"} if self.rng.random() < 0.3 else {}
            operator.preempt(self.rng.choice(nodes), now, **how)
        elif choice == 1:
            operator.set_capacity("us-central1-a", "v3-32", "spot", 0, now)
            self.dry_until = self.now + self.rng.uniform(60, 900)
        elif choice == 2:
            self.silent_until = self.now + self.rng.uniform(5, 600)
        elif choice == 3:
            self.lab.again()
        else:
            operator.outage("api", timedelta(seconds=self.rng.uniform(10, 300)), now)

    # --- promises ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        daemon = self.lab.service.daemon
        if self.dry_until and self.now >= self.dry_until:
            self.dry_until = 0.0
            daemon.zone.world.operator.set_capacity("us-central1-a", "v3-32", "spot", None, daemon.clock.true_now())
        tracks = daemon.engine.slots.values()
        assert sum(track.memory.awake for track in tracks) <= self.most
        resting = [track.memory for track in tracks if not track.memory.awake]
        self.rested |= {node.name for memory in resting for node in memory.nodes}
        self.rested |= {intent.name for memory in resting for intent in memory.creates}
        working = {one.node for one in self.work if one.node}
        assert not working & self.rested, "a slice with work never rests"


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 3 else pytest.mark.slow) for seed in range(40)])
def test_all_work_ends_and_nothing_is_left(seed: int, tmp_path: Path) -> None:
    story = Story(tmp_path, seed)
    story.live()
    daemon = story.lab.service.daemon
    assert story.work == [], story.lab.why()
    assert story.lab.nodes == [], story.lab.why()
    crashes = [track.memory.counter(FailureKind.CRASH).total for track in daemon.engine.slots.values()]
    assert crashes == [0] * story.most
    daemon.check(*story.rested)
