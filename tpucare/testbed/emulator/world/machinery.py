"""
The workers of nodes, and the small steps that every part of a node's life is made of.

Every scheduled step asks first whether its node still is there.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta

from tpucare.testbed.emulator.world.capacity import QuotaBook
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.faults import Fates
from tpucare.testbed.emulator.world.instance_metadata import worker_attributes
from tpucare.testbed.emulator.world.latency import Latency
from tpucare.testbed.emulator.world.machine_effects import AuthorizeKeys, Boot, Kill, SetAttribute
from tpucare.testbed.emulator.world.policies import has_os_login
from tpucare.testbed.emulator.world.records import Response
from tpucare.testbed.emulator.world.state import NodeLife, State, WorkerLife

CAPACITY_TIERS: Mapping[str, str] = {
    "spot": "spot",
    "preemptible": "spot",
    "on-demand": "on-demand",
    "reserved": "reserved",
}
"""Spot and preemptible nodes draw on one capacity and one quota."""


class Machinery:
    """State, chance, and what moves workers."""

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        """Raises: ConfigError: an unreadable trace or network."""
        self.config = config
        kept = timedelta(seconds=config.latencies.operation_kept)
        self.state = State(start, seed, config.addresses.network, kept)
        self.fates = Fates(config, self.state.stream("fates"), start)
        self.quota = QuotaBook(config.quotas)
        self._rng = self.state.stream("life")
        self.unknown_fields = False

    # --- workers

    def _booting(self, life: NodeLife, worker: WorkerLife) -> Callable[[], None]:
        return lambda: self._boot(life, worker)

    def _boot(self, life: NodeLife, worker: WorkerLife) -> None:
        if worker.missing or worker.up or life.dead or life.killed or life.stopped:
            return
        worker.up, worker.silent = True, False
        late = self.config.guest.keys_late
        peers = tuple("" if other.missing else other.address for other in life.workers)
        self.state.tell(
            Boot(
                self.state.now,
                life.path,
                life.record.id,
                worker.number,
                worker.address,
                f"{life.hostname_stem}-w-{worker.number}",
                worker_attributes(life, worker, peers, self._megascale(life)),
                peers,
                takes_keys=late is None and not self._ignores_keys(life),
                holds_chips=_matches(life.record.spec.runtime_version, self.config.guest.chip_holding_runtimes),
            )
        )
        if late is not None:
            self._later(life, late, lambda: self._authorize(life, worker.number))

    def _kill(self, life: NodeLife) -> None:
        """End everything on all workers, once and for ever."""
        life.dead = True
        if not life.killed:
            life.killed = True
            if life.is_any_up:
                self.state.tell(Kill(self.state.now, life.path, life.record.id))
        for worker in life.workers:
            worker.up = False
        self._release(life)

    def _kill_worker(self, life: NodeLife, worker: WorkerLife) -> None:
        worker.up = False
        self.state.tell(Kill(self.state.now, life.path, life.record.id, worker.number))

    def _set_attribute(self, life: NodeLife, name: str, value: str) -> None:
        life.attributes[name] = value
        if life.is_any_up:
            self.state.tell(SetAttribute(self.state.now, life.path, life.record.id, None, name, value))

    def _authorize(self, life: NodeLife, worker: int | None = None) -> None:
        keys = life.record.spec.metadata.get("ssh-keys", "")
        if not life.dead and not self._ignores_keys(life):
            self.state.tell(AuthorizeKeys(self.state.now, life.path, life.record.id, keys, worker))

    def _ignores_keys(self, life: NodeLife) -> bool:
        return has_os_login(life.record.spec, self.config.project)

    # --- small steps

    def _moved(self, life: NodeLife) -> None:
        """A node's state changed, or it is gone: for whoever owns nodes (`queue_life`)."""

    def _megascale(self, life: NodeLife) -> dict[str, str]:  # noqa: ARG002
        """MEGASCALE_* variables of a node that is a slice among several (`queue_life`)."""
        return {}

    def _close(self, operation: str, response: Callable[[], Response]) -> None:
        """End an operation with what its resource is by then."""
        self.state.close_operation(operation, response=response())

    def _release(self, life: NodeLife) -> None:
        if life.pool is not None:
            life.pool.release(life.record.id)

    def _set_state(self, life: NodeLife, number: int) -> None:
        self.state.change(life, state=int(number))
        self._moved(life)

    def _set_health(self, life: NodeLife, health: int, description: str = "") -> None:
        if life.record.health == health and life.record.health_description == description:
            return
        self.state.change(life, health=int(health), health_description=description)
        self.state.log_node(life, "health", health=int(health))

    def _after(self, life: NodeLife, seconds: float, step: Callable[[], None]) -> None:
        """Schedule a step of a node's life, which does nothing once the node is gone."""
        self.state.timeline.after(seconds, lambda: None if life.gone else step())

    def _later(self, life: NodeLife, latency: Latency, step: Callable[[], None]) -> None:
        self._after(life, latency.draw(self._rng), step)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
