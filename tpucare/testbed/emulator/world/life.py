"""
The life of nodes: made, booted, READY, changed, preempted, stopped, deleted, gone; and the capacity they live on.

Callers come in through `calls`, operators through `operator`; both check their requests first. A scheduled step does
nothing once its node is gone.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tpucare.model.accelerators import Accelerator
from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world import policies
from tpucare.testbed.emulator.world.capacity import CAPACITY_TIERS, Pool
from tpucare.testbed.emulator.world.error_texts import Status
from tpucare.testbed.emulator.world.instance_metadata import worker_attributes
from tpucare.testbed.emulator.world.latency import Latency
from tpucare.testbed.emulator.world.machine_effects import AuthorizeKeys, Boot, Kill, Resume, SetAttribute, Silence
from tpucare.testbed.emulator.world.pools import CapacityPools
from tpucare.testbed.emulator.world.records import (
    PREEMPTED_ATTRIBUTE,
    NodePath,
    NodeRecord,
    NodeSpec,
    OperationRecord,
)
from tpucare.testbed.emulator.world.state import NodeLife, State, WorkerLife, pair

LARGE_HOSTS = 64
LEFT_OVER_STATES = (NodeState.CREATING, NodeState.TERMINATED, NodeState.UNKNOWN)
"""States of a node that a failed create may leave; it is 'rarely left in a dead state and must be deleted'."""
OTHER_ENDS: tuple[int | str, ...] = (int(NodeState.REPAIRING), int(NodeState.TERMINATED), "gone")
"""Other ways in which the API may show a preemption."""
MAINTENANCE_TEXT = "The TPU is being maintained"
UPDATABLE = ("description", "tags", "labels", "metadata", "network_config.enable_external_ips")


@dataclass(frozen=True, slots=True)
class Departure:
    """
    How a node is taken away. Lengths are seconds.

    notice:        from `preempted` TRUE to the death of the workers; None: without any
    visible_after: from their death until the API shows it
    silent:        they stop answering first, and die just before it is shown
    shown:         a state number, `never` or `gone`
    """

    notice: float | None
    visible_after: float
    silent: bool
    shown: int | str


class NodeOwner(Protocol):
    """The queued resources, as nodes see them."""

    def node_changed(self, life: NodeLife) -> None:
        """The state of a node changed, or the node is gone."""

    def megascale_variables(self, life: NodeLife) -> Mapping[str, str]:
        """MEGASCALE_* variables of a node that is one slice of several; empty for any other."""


class NodeLifecycle:
    """
    Moves every node of a world from its create to 404, and draws how long each step takes.

    owner:              called with every node that changed; None = no queued resources
    next_create_errors: (zone or "", status): the next create there fails so in its operation
    next_missing:       (zone or "", worker): the next node made there lacks that worker
    """

    def __init__(self, state: State) -> None:
        """Raises: ConfigError: a trace in the configuration cannot be read."""
        self.owner: NodeOwner | None = None
        self.next_create_errors: list[tuple[str, Status]] = []
        self.next_missing: list[tuple[str, int]] = []
        self._state = state
        self._rng = state.stream("life")
        self.pools = CapacityPools(state, self._preempt_victims)

    def _preempt_victims(self, pool: Pool) -> None:
        for node_id in pool.victims(self._rng):
            self.preempt(self._state.by_id[node_id], "capacity", within=pool.burst_seconds)

    # --- creation

    def create(
        self, path: NodePath, spec: NodeSpec, accelerator: Accelerator, queued_resource: str = ""
    ) -> OperationRecord:
        """Begin an accepted create: the node exists from now on, and its course is drawn."""
        state = self._state
        operation = state.open_operation("create", path)
        record = NodeRecord(path, state.new_id(), state.now, spec, queued_resource=queued_resource)
        workers = [WorkerLife(number, state.addresses.allocate()) for number in range(accelerator.hosts)]
        life = NodeLife(record, accelerator, workers, operation.name, state.new_stem())
        state.nodes[path] = life
        state.by_id[record.id] = life
        state.quota.add(path.project, path.zone, accelerator, CAPACITY_TIERS[spec.tier])
        state.log_node(life, "created", labels=dict(spec.labels), accelerator=accelerator.type, tier=spec.tier)
        self._plan_visible(life)
        error = self._create_error(life)
        if error is None:
            self._plan_ready(life)
        else:
            self.later(life, state.config.latencies.stockout, lambda: self._fail_create(life, error))
        return operation

    def _plan_visible(self, life: NodeLife) -> None:
        lengths = self._state.config.latencies
        visible = lengths.visible.draw(self._rng)
        lag = lengths.list_lag.draw(self._rng)
        lags = self._rng.random() < lengths.list_lag_share

        def show() -> None:
            life.visible = True

        def show_in_lists() -> None:
            self._state.listing(life.path.project).show(life.record)

        self.after(life, visible, show)
        self.after(life, visible + (lag if lags else 0.0), show_in_lists)

    def _create_error(self, life: NodeLife) -> Status | None:
        """The error that this create will meet, if any. Claims the capacity when there is none."""
        zone, tier = life.path.zone, CAPACITY_TIERS[life.record.spec.tier]
        for index, (of_zone, status) in enumerate(self.next_create_errors):
            if of_zone in ("", zone):
                del self.next_create_errors[index]
                return status
        config = self._state.config
        if (refused := policies.refusal(life, self._state.nodes.values(), config.project)) is not None:
            return refused
        pool = self.pools.pool_of(zone, life.accelerator, tier)
        if pool is not None and not pool.claim(life.record.id, life.accelerator):
            return texts.reservation_short() if tier == "reserved" else texts.stockout(zone)
        life.pool = pool
        return texts.internal_status() if self._rng.random() < config.zones[zone].create_errors else None

    def _fail_create(self, life: NodeLife, error: Status) -> None:
        life.release_capacity()
        if life.deleting:
            return
        life.doomed = life.dead = True
        self._state.close_operation(life.create_operation, error=error)
        self._state.log_node(life, "failed", code=error[0], message=error[1])
        left_over = self._rng.random() < self._state.config.faults.failed_create_left
        if left_over and not life.record.queued_resource:
            self._state.change(life, state=int(self._rng.choice(LEFT_OVER_STATES)))
        else:
            self.remove(life)

    def _plan_ready(self, life: NodeLife) -> None:
        """Draw when it becomes READY, and when its workers come up: before it or after it."""
        lengths, rng = self._state.config.latencies, self._rng
        ready = self._create_length(len(life.workers)).draw(rng)
        early = rng.random() < lengths.boot_early_share
        late = lengths.boot_late.draw(rng)
        self._choose_missing(life)
        self.after(life, ready * 0.5, lambda: self._show_endpoints(life, math.ceil(len(life.workers) / 2) - 1))
        self.after(life, ready * 0.65, lambda: self._show_endpoints(life, len(life.workers)))
        for worker in life.workers:
            skew = rng.random() * (lengths.boot_skew if len(life.workers) > 1 else 0.0)
            boot = ready - min(skew, ready * 0.3) if early else ready + late + skew
            self.after(life, boot, self._booting(life, worker))
        self.after(life, ready, lambda: self._become_ready(life))

    def _create_length(self, hosts: int) -> Latency:
        lengths = self._state.config.latencies
        if hosts == 1:
            return lengths.create_single
        return lengths.create_slice if hosts <= LARGE_HOSTS else lengths.create_large

    def _choose_missing(self, life: NodeLife) -> None:
        """Mark a worker that will never be made: by an operator's order, or by chance in large slices."""
        faults, count = self._state.config.faults, len(life.workers)
        chosen: int | None = None
        for index, (zone, number) in enumerate(self.next_missing):
            if zone in ("", life.path.zone):
                del self.next_missing[index]
                chosen = number % count
                break
        by_chance = self._rng.random() < faults.missing_worker
        if chosen is None and by_chance and count >= faults.missing_worker_hosts:
            chosen = self._rng.randrange(count)
        if chosen is not None:
            life.workers[chosen].missing = True
            self._state.log_node(life, "worker-missing", worker=chosen)

    def _show_endpoints(self, life: NodeLife, count: int) -> None:
        """Show addresses of the first *count* workers; a missing worker has none."""
        external = life.record.spec.network.enable_external_ips
        workers = life.workers[:count]
        endpoints = tuple(pair("" if worker.missing else worker.address, external) for worker in workers)
        self._state.change(life, endpoints=endpoints)

    def _become_ready(self, life: NodeLife) -> None:
        if life.deleting or life.dead:
            return
        self.set_state(life, NodeState.READY)
        self._state.log_node(life, "ready")
        self._plan_operation_end(life)
        self._plan_health(life)
        self._plan_end(life)

    def _plan_operation_end(self, life: NodeLife) -> None:
        lengths, rng = self._state.config.latencies, self._rng
        usual, lingering = lengths.operation_done.draw(rng), lengths.operation_lingers.draw(rng)
        lingers = rng.random() < lengths.operation_lingers_share
        self.after(life, lingering if lingers else usual, lambda: self._close(life.create_operation, life))

    def _plan_health(self, life: NodeLife) -> None:
        config = self._state.config
        self.later(life, config.latencies.health_known, lambda: self.set_health(life, Health.HEALTHY))
        if config.health.flap_every:
            self._plan_flap(life, config.health.flap_every)

    def _plan_flap(self, life: NodeLife, mean_seconds: float) -> None:
        def flap() -> None:
            if life.record.state != NodeState.READY:
                return
            health = self._state.config.health
            self.set_health(life, self._rng.choice(health.values))
            self.later(life, health.flap_length, lambda: self.set_health(life, Health.HEALTHY))
            self._plan_flap(life, mean_seconds)

        self.after(life, self._rng.expovariate(1 / mean_seconds), flap)

    def _plan_end(self, life: NodeLife) -> None:
        """Schedule the end of its lifetime, if it has one; a preemptible node ends after 24 hours at the latest."""
        spec, settings = life.record.spec, self._state.config.preemption
        if spec.is_preemptible and settings.lifetime is not None:
            self.later(life, settings.lifetime, lambda: self._end_lifetime(life))
        if spec.preemptible:
            self.after(life, settings.preemptible_limit, lambda: self.terminate(life, cause="24 hours"))

    def _end_lifetime(self, life: NodeLife) -> None:
        # An operator may have ended all lifetimes since this one was drawn.
        if self._state.config.preemption.lifetime is not None:
            self.preempt(life, "lifetime")

    # --- preemption

    def preempt(self, life: NodeLife, cause: str, departure: Departure | None = None, within: float = 0.0) -> None:
        """
        Take a node away, at some instant *within* seconds from now; *departure* None is drawn.

        Its capacity is free at once, because the service has promised it to another customer.
        """
        if life.doomed or life.deleting or life.gone:
            return
        life.doomed = True
        life.release_capacity()
        how = departure or self.draw_departure()
        wait = self._rng.random() * within
        self._state.log_node(life, "doomed", cause=cause)
        if how.notice is not None:
            self.after(life, wait, lambda: self.set_attribute(life, PREEMPTED_ATTRIBUTE, "TRUE"))
        self.after(life, wait + (how.notice or 0.0), lambda: self._die(life, how))

    def draw_departure(self) -> Departure:
        """Draw how a preempted node ends."""
        settings, rng = self._state.config.preemption, self._rng
        return Departure(
            notice=settings.notice.draw(rng) if settings.notice is not None else None,
            visible_after=self._state.config.latencies.preempted_shown.draw(rng),
            silent=rng.random() < settings.silent_share,
            shown=self._draw_end(),
        )

    def _draw_end(self) -> int | str:
        settings, lot = self._state.config.preemption, self._rng.random()
        other = self._rng.choice(OTHER_ENDS)
        if lot < settings.never_shown:
            return "never"
        return other if lot < settings.never_shown + settings.shown_otherwise else int(NodeState.PREEMPTED)

    def _die(self, life: NodeLife, how: Departure) -> None:
        """End or silence the workers; the API shows it later."""
        life.dead = True
        if how.silent and not life.killed:
            for worker in life.workers:
                worker.silent = True
            if life.is_any_up:
                self._state.order_effect(Silence(self._state.now, life.path, life.record.id))
        else:
            self._kill(life)
        self._state.log_node(life, "silent" if how.silent else "preempted")
        self.after(life, how.visible_after, lambda: self._show_end(life, how.shown))

    def _show_end(self, life: NodeLife, shown: int | str) -> None:
        # PREEMPTED proves to its reader that the workers are dead: nothing may run any more when it can first be read.
        self._kill(life)
        if life.deleting:
            return
        if shown == "gone":
            self.remove(life)
            return
        if isinstance(shown, int):
            self.set_state(life, shown)
            name = NodeState(shown).name
            self._state.close_operation(life.create_operation, error=texts.preempted_meanwhile("create", name))
        self._state.log_node(life, "shown", shown=shown)

    def terminate(self, life: NodeLife, *, cause: str) -> None:
        """The workers die now, and the API shows TERMINATED at once."""
        at_once = Departure(notice=None, visible_after=0.0, silent=False, shown=int(NodeState.TERMINATED))
        self.preempt(life, cause, at_once)

    # --- deletion

    def begin_delete(self, life: NodeLife) -> OperationRecord:
        lengths, rng = self._state.config.latencies, self._rng
        operation = self._state.open_operation("delete", life.path)
        life.deleting = True
        life.delete_operations.append(operation.name)
        self.set_state(life, NodeState.DELETING)
        self._state.close_operation(life.create_operation, error=texts.deleted_meanwhile())
        self._state.log_node(life, "deleting")
        length = lengths.delete.draw(rng)
        if rng.random() < self._state.config.faults.delete_stuck:
            life.stuck_repeats = max(life.stuck_repeats, 1)
        self.after(life, length * lengths.delete_kills, lambda: self._kill(life))
        self.after(life, length, lambda: self._finish_delete(life))
        return operation

    def repeat_delete(self, life: NodeLife) -> OperationRecord:
        """A second operation beside the first; a stuck deletion may be waiting for it."""
        operation = self._state.open_operation("delete", life.path)
        life.delete_operations.append(operation.name)
        life.stuck_repeats = max(0, life.stuck_repeats - 1)
        if life.delete_due and life.stuck_repeats == 0:
            self.later(life, self._state.config.latencies.delete, lambda: self._finish_delete(life))
        return operation

    def _finish_delete(self, life: NodeLife) -> None:
        life.delete_due = True
        if life.stuck_repeats == 0:
            self.remove(life)

    def remove(self, life: NodeLife) -> None:
        """404 from now on; quota and name are free."""
        self._kill(life)
        state, path, record = self._state, life.path, life.record
        life.gone = True
        del state.nodes[path]
        del state.by_id[record.id]
        state.quota.remove(path.project, path.zone, life.accelerator, CAPACITY_TIERS[record.spec.tier])
        state.log_node(life, "gone")
        for name in life.delete_operations:
            state.close_operation(name)
        for name in (life.create_operation, life.update_operation):
            state.close_operation(name, error=texts.gone_meanwhile(record.name))
        for worker in life.workers:
            self._free_later(worker.address)
        self._hide_later(path, record.id)
        self._report_change(life)

    def _free_later(self, address: str) -> None:
        state = self._state
        state.timeline.after(state.config.latencies.address_reuse, lambda: state.addresses.free(address))

    def _hide_later(self, path: NodePath, node_id: int) -> None:
        lengths, rng = self._state.config.latencies, self._rng
        lag = lengths.list_lag.draw(rng)
        listing = self._state.listing(path.project)
        if rng.random() < lengths.list_lag_share:
            self._state.timeline.after(lag, lambda: listing.hide(path, node_id))
        else:
            listing.hide(path, node_id)

    # --- update, stop, start, maintenance

    def begin_update(self, life: NodeLife, mask: tuple[str, ...], spec: NodeSpec) -> OperationRecord:
        operation = self._state.open_operation("update", life.path)
        life.update_operation = operation.name
        self.later(life, self._state.config.latencies.update, lambda: self._end_update(life, mask, spec))
        return operation

    def _end_update(self, life: NodeLife, mask: tuple[str, ...], spec: NodeSpec) -> None:
        name, life.update_operation = life.update_operation, ""
        state = NodeState(life.record.state)
        if state in (NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING):
            self._state.close_operation(name, error=texts.preempted_meanwhile("update", state.name))
            return
        self._state.change(life, spec=_merged(life.record.spec, mask, spec))
        if "network_config.enable_external_ips" in mask:
            external = spec.network.enable_external_ips
            endpoints = tuple(pair(one.internal, external) for one in life.record.endpoints)
            self._state.change(life, endpoints=endpoints)
        if "metadata" in mask:
            self.later(life, self._state.config.latencies.keys_usable, lambda: self._authorize(life))
        self._close(name, life)

    def begin_stop(self, life: NodeLife) -> OperationRecord:
        self.set_state(life, NodeState.STOPPING)
        operation = self._state.open_operation("stop", life.path)
        self.later(life, self._state.config.latencies.stop, lambda: self._end_stop(life, operation.name))
        return operation

    def _end_stop(self, life: NodeLife, operation: str) -> None:
        if life.record.state != NodeState.STOPPING:
            return
        life.stopped = True
        for worker in life.workers:
            worker.up = False
        self._state.order_effect(Kill(self._state.now, life.path, life.record.id))
        self.set_state(life, NodeState.STOPPED)
        self._state.log_node(life, "stopped")
        self._close(operation, life)

    def begin_start(self, life: NodeLife) -> OperationRecord:
        self.set_state(life, NodeState.STARTING)
        life.stopped = False
        operation = self._state.open_operation("start", life.path)
        self.later(life, self._state.config.latencies.stop, lambda: self._end_start(life, operation.name))
        return operation

    def _end_start(self, life: NodeLife, operation: str) -> None:
        if life.record.state != NodeState.STARTING:
            return
        self.set_state(life, NodeState.READY)
        self.set_health(life, Health.UNSPECIFIED)
        for worker in life.workers:
            self.later(life, self._state.config.latencies.boot_late, self._booting(life, worker))
        self._state.log_node(life, "ready")
        self._close(operation, life)

    def begin_maintenance(self, life: NodeLife, verb: str, workers: Collection[int], length: float) -> OperationRecord:
        """Those workers restart, and the node is unhealthy for *length* seconds."""
        operation = self._state.open_operation(verb, life.path)
        self.set_health(life, Health.UNHEALTHY_MAINTENANCE, MAINTENANCE_TEXT)
        self.reboot(life, workers)
        self.later(life, self._state.config.latencies.update, lambda: self._close(operation.name, life))
        self.after(life, length, lambda: None if life.dead else self.set_health(life, Health.HEALTHY))
        return operation

    # --- workers

    def boot(self, life: NodeLife, worker: WorkerLife) -> None:
        """Boot a worker that is down, unless it will never be made or its node has ended."""
        if worker.missing or worker.up or life.dead or life.killed or life.stopped:
            return
        worker.up, worker.silent = True, False
        guest = self._state.config.guest
        peers = tuple("" if other.missing else other.address for other in life.workers)
        megascale = self.owner.megascale_variables(life) if self.owner is not None else {}
        self._state.order_effect(
            Boot(
                self._state.now,
                life.path,
                life.record.id,
                worker.number,
                worker.address,
                f"{life.hostname_stem}-w-{worker.number}",
                worker_attributes(life, worker, peers, megascale),
                peers,
                takes_keys=guest.keys_late is None and not self._ignores_keys(life),
                holds_chips=_matches(life.record.spec.runtime_version, guest.chip_holding_runtimes),
                chips=life.accelerator.chips_per_host,
            )
        )
        if guest.keys_late is not None:
            self.later(life, guest.keys_late, lambda: self._authorize(life, worker.number))

    def _booting(self, life: NodeLife, worker: WorkerLife) -> Callable[[], None]:
        return lambda: self.boot(life, worker)

    def reboot(self, life: NodeLife, workers: Collection[int]) -> None:
        """Kill those of *workers* that are up; each boots again after a while."""
        for worker in life.workers:
            if worker.number in workers and worker.up:
                self.kill_worker(life, worker)
                self.later(life, self._state.config.latencies.reboot, self._booting(life, worker))

    def _kill(self, life: NodeLife) -> None:
        """End everything on all workers, once and for ever."""
        life.dead = True
        if not life.killed:
            life.killed = True
            if life.is_any_up:
                self._state.order_effect(Kill(self._state.now, life.path, life.record.id))
        for worker in life.workers:
            worker.up = False
        life.release_capacity()

    def kill_worker(self, life: NodeLife, worker: WorkerLife) -> None:
        worker.up = False
        self._state.order_effect(Kill(self._state.now, life.path, life.record.id, worker.number))

    def silence_worker(self, life: NodeLife, worker: WorkerLife) -> None:
        worker.silent = True
        self._state.order_effect(Silence(self._state.now, life.path, life.record.id, worker.number))

    def resume_worker(self, life: NodeLife, worker: WorkerLife) -> None:
        worker.silent = False
        self._state.order_effect(Resume(self._state.now, life.path, life.record.id, worker.number))

    def set_attribute(self, life: NodeLife, name: str, value: str) -> None:
        """Change a path of the metadata server of all workers."""
        life.attributes[name] = value
        if life.is_any_up:
            self._state.order_effect(SetAttribute(self._state.now, life.path, life.record.id, None, name, value))

    def _authorize(self, life: NodeLife, worker: int | None = None) -> None:
        keys = life.record.spec.metadata.get("ssh-keys", "")
        if not life.dead and not self._ignores_keys(life):
            self._state.order_effect(AuthorizeKeys(self._state.now, life.path, life.record.id, keys, worker))

    def _ignores_keys(self, life: NodeLife) -> bool:
        return policies.has_os_login(life.record.spec, self._state.config.project)

    # --- small steps

    def _report_change(self, life: NodeLife) -> None:
        if self.owner is not None:
            self.owner.node_changed(life)

    def _close(self, operation: str, life: NodeLife) -> None:
        """End an operation with the node as it is by now."""
        self._state.close_operation(operation, response=life.record)

    def set_state(self, life: NodeLife, number: int) -> None:
        self._state.change(life, state=int(number))
        self._report_change(life)

    def set_health(self, life: NodeLife, health: int, description: str = "") -> None:
        if life.record.health == health and life.record.health_description == description:
            return
        self._state.change(life, health=int(health), health_description=description)
        self._state.log_node(life, "health", health=int(health))

    def after(self, life: NodeLife, seconds: float, step: Callable[[], None]) -> None:
        """Schedule a step of a node's life, which does nothing once the node is gone."""
        self._state.timeline.after(seconds, lambda: None if life.gone else step())

    def later(self, life: NodeLife, latency: Latency, step: Callable[[], None]) -> None:
        """Schedule a step after a drawn length."""
        self.after(life, latency.draw(self._rng), step)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _merged(spec: NodeSpec, mask: tuple[str, ...], new: NodeSpec) -> NodeSpec:
    changes: dict[str, Any] = {path: getattr(new, path) for path in mask if path in UPDATABLE[:4]}
    if UPDATABLE[4] in mask:
        changes["network"] = replace(spec.network, enable_external_ips=new.network.enable_external_ips)
    return replace(spec, **changes)
