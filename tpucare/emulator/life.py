"""
The course of a node: from CREATING to 404, with everything that happens to it by itself.

What a caller asks for begins in `calls`, what an operator does in `actions`; both end in the transitions below. Every
scheduled step asks first whether its node still is what it was when the step was planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

from tpucare.accelerators import Accelerator
from tpucare.emulator import errors_text as texts
from tpucare.emulator.capacity import Pool, Supply, supply
from tpucare.emulator.config import Latency, WorldConfig
from tpucare.emulator.errors_text import Status
from tpucare.emulator.faults import Fates
from tpucare.emulator.quota import QuotaBook
from tpucare.emulator.records import (
    INSTANCE_ATTRIBUTES,
    MAINTENANCE_ATTRIBUTE,
    PREEMPTED_ATTRIBUTE,
    AuthorizeKeys,
    Boot,
    Kill,
    NodePath,
    NodeRecord,
    NodeSpec,
    OperationRecord,
    SetAttribute,
    Silence,
)
from tpucare.emulator.state import NodeLife, State, WorkerLife, pair
from tpucare.model import Health, NodeState

CAPACITY_TIERS: Mapping[str, str] = {
    "spot": "spot",
    "preemptible": "spot",
    "on-demand": "on-demand",
    "reserved": "reserved",
}
"""Spot and preemptible nodes draw on one capacity and one quota."""

LARGE_HOSTS = 64
LEFT_OVER_STATES = (NodeState.CREATING, NodeState.TERMINATED, NodeState.UNKNOWN)
"""What a failed create may leave behind; it is 'rarely left in a dead state and must be deleted'."""

OTHER_ENDS: tuple[int | str, ...] = (int(NodeState.REPAIRING), int(NodeState.TERMINATED), "gone")
"""How else the API may show a preemption."""


class Life:
    """Nodes and capacity, and all that moves them."""

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        """Raises: ConfigError: an unreadable trace or network."""
        self.config = config
        kept = timedelta(seconds=config.latencies.operation_kept)
        self.state = State(start, seed, config.addresses.network, kept)
        self.fates = Fates(config, self.state.stream("fates"), start)
        self.quota = QuotaBook(config.quotas)
        self.pools: list[Pool] = []
        self._rng = self.state.stream("life")
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
                self._doom(self.state.by_id[node_id], within=pool.burst_seconds, cause="capacity")

    def pool_of(self, zone: str, accelerator: Accelerator, tier: str) -> Pool | None:
        """The narrowest pool that covers such a node: its type before its generation before the whole zone."""
        fitting = [pool for pool in self.pools if pool.zone == zone and pool.covers(accelerator, tier)]
        narrow = (accelerator.type, accelerator.generation, "")
        return min(fitting, key=lambda pool: narrow.index(pool.accelerator), default=None)

    # --- creation

    def _begin(self, path: NodePath, spec: NodeSpec, accelerator: Accelerator) -> OperationRecord:
        """A create was accepted: the node exists from now on, and its course is drawn."""
        state = self.state
        operation = state.open_operation("create", path)
        record = NodeRecord(path, state.new_id(), state.now, spec)
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
        if left_over:
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
            self._later(life, settings.lifetime, lambda: self._doom(life, cause="lifetime"))
        if spec.preemptible:
            self._after(life, settings.preemptible_limit, lambda: self._terminate(life, cause="24 hours"))

    # --- workers

    def _booting(self, life: NodeLife, worker: WorkerLife) -> Callable[[], None]:
        return lambda: self._boot(life, worker)

    def _boot(self, life: NodeLife, worker: WorkerLife) -> None:
        if worker.missing or worker.up or life.dead or life.killed or life.stopped:
            return
        worker.up, worker.silent = True, False
        peers = tuple("" if other.missing else other.address for other in life.workers)
        self.state.tell(
            Boot(
                self.state.now,
                life.path,
                life.record.id,
                worker.number,
                worker.address,
                f"{life.hostname_stem}-w-{worker.number}",
                worker_attributes(life, worker, peers),
                peers,
            )
        )

    def _kill(self, life: NodeLife) -> None:
        """End everything on all workers, once and for ever."""
        life.dead = True
        if not life.killed:
            life.killed = True
            if any(worker.up for worker in life.workers):
                self.state.tell(Kill(self.state.now, life.path, life.record.id))
        for worker in life.workers:
            worker.up = False
        self._release(life)

    def _kill_worker(self, life: NodeLife, worker: WorkerLife) -> None:
        worker.up = False
        self.state.tell(Kill(self.state.now, life.path, life.record.id, worker.number))

    def _set_attribute(self, life: NodeLife, name: str, value: str) -> None:
        life.attributes[name] = value
        self.state.tell(SetAttribute(self.state.now, life.path, life.record.id, None, name, value))

    def _authorize(self, life: NodeLife) -> None:
        keys = life.record.spec.metadata.get("ssh-keys", "")
        if not life.dead:
            self.state.tell(AuthorizeKeys(self.state.now, life.path, life.record.id, keys))

    # --- preemption

    def _doom(
        self,
        life: NodeLife,
        *,
        within: float = 0.0,
        notice: float | None = -1.0,
        visible_after: float | None = None,
        silent: bool | None = None,
        shown: int | str | None = None,
        cause: str,
    ) -> None:
        """
        Take a node away, at some instant *within* seconds from now. Lengths are seconds; what is left out is drawn
        (*notice* None: none, negative: drawn). Its capacity is free at once: somebody else was promised it.
        """
        if life.doomed or life.deleting or life.gone:
            return
        life.doomed = True
        self._release(life)
        settings, rng = self.config.preemption, self._rng
        wait = rng.random() * within
        drawn_notice = settings.notice.draw(rng) if settings.notice is not None else None
        if notice is not None and notice < 0:
            notice = drawn_notice
        delay = self.config.latencies.preempted_shown.draw(rng)
        falls_silent = rng.random() < settings.silent_share
        how = self._drawn_end()
        self.state.log_node(life, "doomed", cause=cause)
        if notice is not None:
            self._after(life, wait, lambda: self._set_attribute(life, PREEMPTED_ATTRIBUTE, "TRUE"))
        self._after(
            life,
            wait + (notice or 0.0),
            lambda: self._die(
                life,
                falls_silent if silent is None else silent,
                delay if visible_after is None else visible_after,
                how if shown is None else shown,
            ),
        )

    def _drawn_end(self) -> int | str:
        settings, lot = self.config.preemption, self._rng.random()
        other = self._rng.choice(OTHER_ENDS)
        if lot < settings.never_shown:
            return "never"
        return other if lot < settings.never_shown + settings.shown_otherwise else int(NodeState.PREEMPTED)

    def _die(self, life: NodeLife, silent: bool, visible_after: float, shown: int | str) -> None:
        """The machines go first; the API knows later."""
        life.dead = True
        if silent and not life.killed:
            for worker in life.workers:
                worker.silent = True
            self.state.tell(Silence(self.state.now, life.path, life.record.id))
        else:
            self._kill(life)
        self.state.log_node(life, "silent" if silent else "preempted")
        self._after(life, visible_after, lambda: self._show_end(life, shown))

    def _show_end(self, life: NodeLife, shown: int | str) -> None:
        # PREEMPTED is a proof of death to whoever reads it: nothing may run any more when it can first be read.
        self._kill(life)
        if life.deleting:
            return
        if shown == "gone":
            self._vanish(life)
            return
        if isinstance(shown, int):
            self._set_state(life, shown)
            name = NodeState(shown).name
            self.state.close_operation(life.create_operation, error=texts.preempted_meanwhile("create", name))
        self.state.log_node(life, "shown", shown=shown)

    def _terminate(self, life: NodeLife, *, cause: str) -> None:
        self._doom(life, notice=None, visible_after=0.0, silent=False, shown=int(NodeState.TERMINATED), cause=cause)

    # --- deletion

    def _begin_delete(self, life: NodeLife) -> OperationRecord:
        lengths, rng = self.config.latencies, self._rng
        operation = self.state.open_operation("delete", life.path)
        life.deleting = True
        life.delete_operations.append(operation.name)
        self._set_state(life, NodeState.DELETING)
        self.state.close_operation(life.create_operation, error=texts.deleted_meanwhile())
        self.state.log_node(life, "deleting")
        length = lengths.delete.draw(rng)
        if rng.random() < self.config.faults.delete_stuck:
            life.stuck_repeats = max(life.stuck_repeats, 1)
        self._after(life, length * lengths.delete_kills, lambda: self._kill(life))
        self._after(life, length, lambda: self._finish_delete(life))
        return operation

    def _repeat_delete(self, life: NodeLife) -> OperationRecord:
        """A second operation beside the first; it may be what a stuck deletion waits for."""
        operation = self.state.open_operation("delete", life.path)
        life.delete_operations.append(operation.name)
        life.stuck_repeats = max(0, life.stuck_repeats - 1)
        if life.delete_due and life.stuck_repeats == 0:
            self._later(life, self.config.latencies.delete, lambda: self._finish_delete(life))
        return operation

    def _finish_delete(self, life: NodeLife) -> None:
        life.delete_due = True
        if life.stuck_repeats == 0:
            self._vanish(life)

    def _vanish(self, life: NodeLife) -> None:
        """404 from now on; quota and name are free."""
        self._kill(life)
        state, path, record = self.state, life.path, life.record
        life.gone = True
        del state.nodes[path]
        del state.by_id[record.id]
        self.quota.remove(path.project, path.zone, life.accelerator, CAPACITY_TIERS[record.spec.tier])
        state.log_node(life, "gone")
        for name in life.delete_operations:
            state.close_operation(name)
        for name in (life.create_operation, life.update_operation):
            state.close_operation(name, error=texts.gone_meanwhile(record.name))
        for worker in life.workers:
            self._free_later(worker.address)
        self._hide_later(path, record.id)

    def _free_later(self, address: str) -> None:
        self.state.timeline.after(self.config.latencies.address_reuse, lambda: self.state.addresses.free(address))

    def _hide_later(self, path: NodePath, node_id: int) -> None:
        lengths, rng = self.config.latencies, self._rng
        lag = lengths.list_lag.draw(rng)
        listing = self.state.listing(path.project)
        if rng.random() < lengths.list_lag_share:
            self.state.timeline.after(lag, lambda: listing.hide(path, node_id))
        else:
            listing.hide(path, node_id)

    def _release(self, life: NodeLife) -> None:
        if life.pool is not None:
            life.pool.release(life.record.id)

    # --- small steps

    def _set_state(self, life: NodeLife, number: int) -> None:
        self.state.change(life, state=int(number))

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


def worker_attributes(life: NodeLife, worker: WorkerLife, peers: tuple[str, ...]) -> dict[str, str]:
    """What the metadata server of a worker says at boot, path -> value. Source: torch_xla, jax and levanter read it."""
    accelerator, spec = life.accelerator, life.record.spec
    own = {INSTANCE_ATTRIBUTES + key: value for key, value in spec.metadata.items()}
    environment = {
        "ACCELERATOR_TYPE": accelerator.type,
        "ZONE": life.path.zone,
        "WORKER_ID": str(worker.number),
        "NODE_ID": life.path.node_id,
        "RUNTIME_VERSION": spec.runtime_version,
    }
    tpu_env = "".join(f"{key}: '{value}'\n" for key, value in environment.items())
    return {
        **own,
        INSTANCE_ATTRIBUTES + "accelerator-type": accelerator.type,
        INSTANCE_ATTRIBUTES + "agent-worker-number": str(worker.number),
        INSTANCE_ATTRIBUTES + "worker-network-endpoints": ",".join(f"unknown:unknown:{peer}" for peer in peers),
        INSTANCE_ATTRIBUTES + "tpu-env": tpu_env,
        "instance/hostname": f"{life.hostname_stem}-w-{worker.number}",
        "instance/zone": f"projects/{life.path.project}/zones/{life.path.zone}",
        "project/project-id": life.path.project,
        PREEMPTED_ATTRIBUTE: "FALSE",
        MAINTENANCE_ATTRIBUTE: "NONE",
        **life.attributes,
    }
