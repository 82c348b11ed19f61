"""
The life of a node from CREATING to READY, what is planned for it then, and the capacity it lives on.

What a caller asks for begins in `calls`, what an operator does in `actions`; how a node ends is in `ending`.
"""

from __future__ import annotations

import math
from datetime import datetime

from tpucare.model.accelerators import Accelerator
from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world import policies
from tpucare.testbed.emulator.world.capacity import Pool, Supply, supply
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.ending import Ending
from tpucare.testbed.emulator.world.error_texts import Status
from tpucare.testbed.emulator.world.latency import Latency
from tpucare.testbed.emulator.world.machinery import CAPACITY_TIERS
from tpucare.testbed.emulator.world.records import NodePath, NodeRecord, NodeSpec, OperationRecord
from tpucare.testbed.emulator.world.state import NodeLife, WorkerLife, pair

LARGE_HOSTS = 64
LEFT_OVER_STATES = (NodeState.CREATING, NodeState.TERMINATED, NodeState.UNKNOWN)
"""What a failed create may leave behind; it is 'rarely left in a dead state and must be deleted'."""


class Life(Ending):
    """Nodes and capacity, and all that moves them."""

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        """Raises: ConfigError: an unreadable trace or network."""
        super().__init__(config, seed=seed, start=start)
        self.pools: list[Pool] = []
        self._supplies: dict[int, Supply] = {}
        self._next_create_errors: list[tuple[str, Status]] = []
        self._next_missing: list[tuple[str, int]] = []
        self._open_pools(start)

    # --- capacity

    def _open_pools(self, start: datetime) -> None:
        for zone, settings in self.config.zones.items():
            for number, one in enumerate(settings.capacity):
                unit = one.unit or ("hosts" if one.trace else "nodes")
                stream = supply(one, start, self.state.stream(f"capacity/{zone}/{number}"))
                pool = Pool(zone, one.type, one.tier, unit, None, one.burst)
                self.pools.append(pool)
                self._supplies[id(pool)] = stream
                self._follow(pool)

    def _follow(self, pool: Pool) -> None:
        """Schedule the next change of a pool's supply."""
        stream = self._supplies.get(id(pool))
        change = next(stream, None) if stream is not None else None
        if change is None:
            return
        at, amount = change

        def turn() -> None:
            if self._supplies.get(id(pool)) is stream:
                self._set_amount(pool, amount)
                self._follow(pool)

        if pool.capacity is None and at <= self.state.now:
            turn()
        else:
            self.state.timeline.at(at, turn)

    def _set_amount(self, pool: Pool, amount: int | None) -> None:
        if pool.capacity == amount:
            return
        pool.capacity = amount
        self.state.log(
            "capacity", zone=pool.zone, accelerator=pool.accelerator, tier=pool.tier, amount=amount, used=pool.used
        )
        # Only spot capacity is taken back from those who hold it.
        if pool.tier == "spot":
            for node_id in pool.victims(self._rng):
                self._doom(self.state.by_id[node_id], "capacity", within=pool.burst_seconds)

    def pool_of(self, zone: str, accelerator: Accelerator, tier: str) -> Pool | None:
        """The narrowest pool that covers such a node: its type before its generation before the whole zone."""
        fitting = [pool for pool in self.pools if pool.zone == zone and pool.covers(accelerator, tier)]
        narrow = (accelerator.type, accelerator.generation, "")
        return min(fitting, key=lambda pool: narrow.index(pool.accelerator), default=None)

    # --- creation

    def _begin(
        self, path: NodePath, spec: NodeSpec, accelerator: Accelerator, queued_resource: str = ""
    ) -> OperationRecord:
        """A create was accepted: the node exists from now on, and its course is drawn."""
        state = self.state
        operation = state.open_operation("create", path)
        record = NodeRecord(path, state.new_id(), state.now, spec, queued_resource=queued_resource)
        workers = [WorkerLife(number, state.addresses.take()) for number in range(accelerator.hosts)]
        life = NodeLife(record, accelerator, workers, operation.name, state.new_stem())
        state.nodes[path] = life
        state.by_id[record.id] = life
        self.quota.add(path.project, path.zone, accelerator, CAPACITY_TIERS[spec.tier])
        state.log_node(life, "created", labels=dict(spec.labels), accelerator=accelerator.type, tier=spec.tier)
        self._plan_visible(life)
        error = self._create_error(life)
        if error is None:
            self._plan_ready(life)
        else:
            self._later(life, self.config.latencies.stockout, lambda: self._fail_create(life, error))
        return operation

    def _plan_visible(self, life: NodeLife) -> None:
        lengths = self.config.latencies
        visible = lengths.visible.draw(self._rng)
        lag = lengths.list_lag.draw(self._rng)
        lags = self._rng.random() < lengths.list_lag_share

        def show() -> None:
            life.visible = True

        def show_in_lists() -> None:
            self.state.listing(life.path.project).show(life.record)

        self._after(life, visible, show)
        self._after(life, visible + (lag if lags else 0.0), show_in_lists)

    def _create_error(self, life: NodeLife) -> Status | None:
        """What will go wrong with this create, if anything. Claims the capacity when nothing does."""
        zone, tier = life.path.zone, CAPACITY_TIERS[life.record.spec.tier]
        for index, (of_zone, status) in enumerate(self._next_create_errors):
            if of_zone in ("", zone):
                del self._next_create_errors[index]
                return status
        if (refused := policies.refusal(life, self.state.nodes.values(), self.config.project)) is not None:
            return refused
        pool = self.pool_of(zone, life.accelerator, tier)
        if pool is not None and not pool.claim(life.record.id, life.accelerator):
            return texts.reservation_short() if tier == "reserved" else texts.stockout(zone)
        life.pool = pool
        if self._rng.random() < self.config.zones[zone].create_errors:
            return texts.internal_status()
        return None

    def _fail_create(self, life: NodeLife, error: Status) -> None:
        self._release(life)
        if life.deleting:
            return
        life.doomed = life.dead = True
        self.state.close_operation(life.create_operation, error=error)
        self.state.log_node(life, "failed", code=error[0], message=error[1])
        left_over = self._rng.random() < self.config.faults.failed_create_left
        if left_over and not life.record.queued_resource:
            self.state.change(life, state=int(self._rng.choice(LEFT_OVER_STATES)))
        else:
            self._vanish(life)

    def _plan_ready(self, life: NodeLife) -> None:
        """Draw when it becomes READY, and when its workers come up: before it or after it."""
        lengths, rng = self.config.latencies, self._rng
        ready = self._create_length(len(life.workers)).draw(rng)
        early = rng.random() < lengths.boot_early_share
        late = lengths.boot_late.draw(rng)
        self._choose_missing(life)
        self._after(life, ready * 0.5, lambda: self._show_endpoints(life, math.ceil(len(life.workers) / 2) - 1))
        self._after(life, ready * 0.65, lambda: self._show_endpoints(life, len(life.workers)))
        for worker in life.workers:
            skew = rng.random() * (lengths.boot_skew if len(life.workers) > 1 else 0.0)
            boot = ready - min(skew, ready * 0.3) if early else ready + late + skew
            self._after(life, boot, self._booting(life, worker))
        self._after(life, ready, lambda: self._become_ready(life))

    def _create_length(self, hosts: int) -> Latency:
        lengths = self.config.latencies
        if hosts == 1:
            return lengths.create_single
        return lengths.create_slice if hosts <= LARGE_HOSTS else lengths.create_large

    def _choose_missing(self, life: NodeLife) -> None:
        """A worker that will never be made: ordered by an operator, or by chance in large slices."""
        faults, count = self.config.faults, len(life.workers)
        chosen: int | None = None
        for index, (zone, number) in enumerate(self._next_missing):
            if zone in ("", life.path.zone):
                del self._next_missing[index]
                chosen = number % count
                break
        by_chance = self._rng.random() < faults.missing_worker
        if chosen is None and by_chance and count >= faults.missing_worker_hosts:
            chosen = self._rng.randrange(count)
        if chosen is not None:
            life.workers[chosen].missing = True
            self.state.log_node(life, "worker-missing", worker=chosen)

    def _show_endpoints(self, life: NodeLife, count: int) -> None:
        """The first *count* workers have addresses now; one that is missing has none."""
        external = life.record.spec.network.enable_external_ips
        workers = life.workers[:count]
        endpoints = tuple(pair("" if worker.missing else worker.address, external) for worker in workers)
        self.state.change(life, endpoints=endpoints)

    def _become_ready(self, life: NodeLife) -> None:
        if life.deleting or life.dead:
            return
        life.was_ready = True
        self._set_state(life, NodeState.READY)
        self.state.log_node(life, "ready")
        self._plan_operation_end(life)
        self._plan_health(life)
        self._plan_end(life)

    def _plan_operation_end(self, life: NodeLife) -> None:
        lengths, rng = self.config.latencies, self._rng
        usual, lingering = lengths.operation_done.draw(rng), lengths.operation_lingers.draw(rng)
        lingers = rng.random() < lengths.operation_lingers_share
        self._after(life, lingering if lingers else usual, lambda: self._end_create(life))

    def _end_create(self, life: NodeLife) -> None:
        self.state.close_operation(life.create_operation, response=life.record)

    def _plan_health(self, life: NodeLife) -> None:
        self._later(life, self.config.latencies.health_known, lambda: self._set_health(life, Health.HEALTHY))
        if self.config.health.flap_every:
            self._plan_flap(life, self.config.health.flap_every)

    def _plan_flap(self, life: NodeLife, mean_seconds: float) -> None:
        def flap() -> None:
            if life.record.state != NodeState.READY:
                return
            self._set_health(life, self._rng.choice(self.config.health.values))
            self._later(life, self.config.health.flap_length, lambda: self._set_health(life, Health.HEALTHY))
            self._plan_flap(life, mean_seconds)

        self._after(life, self._rng.expovariate(1 / mean_seconds), flap)

    def _plan_end(self, life: NodeLife) -> None:
        """A preemptible node ends after 24 hours at the latest; both kinds may have a lifetime of their own."""
        spec, settings = life.record.spec, self.config.preemption
        if spec.is_preemptible and settings.lifetime is not None:
            self._later(life, settings.lifetime, lambda: self._end_of_lifetime(life))
        if spec.preemptible:
            self._after(life, settings.preemptible_limit, lambda: self._terminate(life, cause="24 hours"))

    def _end_of_lifetime(self, life: NodeLife) -> None:
        # A world that was told to be calm takes no node away by itself any more.
        if self.config.preemption.lifetime is not None:
            self._doom(life, "lifetime")
