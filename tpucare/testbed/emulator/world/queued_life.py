"""
The life of a queued resource: from CREATING through the wait for capacity to ACTIVE, and how it ends.

Its nodes live as others do (`life`, `ending`); what happens to them moves the resource (`_moved`). What a caller may
ask is in `queue_calls`. A preempted resource goes SUSPENDING, its nodes are deleted, and the SUSPENDED shell stays
until somebody deletes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from tpucare.model.accelerators import Accelerator
from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.capacity import Pool, units
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.error_texts import Status
from tpucare.testbed.emulator.world.latency import Latency
from tpucare.testbed.emulator.world.life import Life
from tpucare.testbed.emulator.world.machinery import CAPACITY_TIERS
from tpucare.testbed.emulator.world.queued_records import (
    WAITING,
    Initiator,
    Planned,
    QueuedLife,
    QueuedPath,
    QueuedRecord,
    QueueState,
)
from tpucare.testbed.emulator.world.records import OperationRecord
from tpucare.testbed.emulator.world.state import NodeLife

LOST_STATES = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED})
"""States of a node that end the resource it belongs to."""


class QueueLife(Life):
    """Queued resources, and all that moves them."""

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        super().__init__(config, seed=seed, start=start)
        self.queue: dict[QueuedPath, QueuedLife] = {}
        self._queue_rng = self.state.stream("queue")

    # --- waiting

    def _enqueue(self, record: QueuedRecord, planned: Sequence[Planned]) -> OperationRecord:
        """A create was accepted. Its operation ends in seconds and says nothing about capacity."""
        operation = self.state.open_operation_on("create", record.path.parent, record.name)
        life = QueuedLife(record, tuple(planned), operation.name)
        self.queue[record.path] = life
        self._log_queued(life, "created", nodes=[str(one.path) for one in planned])
        self._queue_later(life, self.config.queue.accept, lambda: self._accept(life))
        return operation

    def _accept(self, life: QueuedLife) -> None:
        if life.record.state != QueueState.CREATING:
            return
        self._wait_for_resources(life)
        self.state.close_operation(life.create_operation, response=life.record)

    def _wait_for_resources(self, life: QueuedLife) -> None:
        settings, rng = self.config.queue, self._queue_rng
        self._free_quota(life)
        life.tries += 1
        life.begun_at = None
        old = rng.random() < settings.old_name_share
        self._set_queued(life, QueueState.ACCEPTED if old else QueueState.WAITING_FOR_RESOURCES)
        life.lingers = rng.random() < settings.expired_lingers
        attempt, created = life.tries, life.record.create_time
        if (end := life.record.spec.validity.end(created)) is not None:
            self._queue_at(life, end, lambda: self._expire(life, attempt))
        grant = self.state.now + timedelta(seconds=settings.grant.draw(rng))
        begin = life.record.spec.validity.begin(created) or grant
        self._queue_at(life, max(grant, begin), lambda: self._look(life, attempt))

    def _expire(self, life: QueuedLife, attempt: int) -> None:
        """`valid_until` has passed; it may linger as if it still waited."""
        if life.tries == attempt and life.record.state in WAITING:
            life.tries += 1
            if not life.lingers:
                self._fail_queued(life, texts.queue_expired())

    def _look(self, life: QueuedLife, attempt: int) -> None:
        """Is there room for all its nodes together? If not, look again later."""
        if life.tries != attempt or life.record.state not in WAITING:
            return
        taken = next((one for one in life.planned if one.path in self.state.nodes), None)
        if taken is not None:
            self._fail_queued(life, (texts.ALREADY_EXISTS, texts.already_exists(taken.path).message))
            return
        error = self._over_quota(life)
        if error is not None and not self.config.queue.quota_waits:
            self._fail_queued(life, error)
        elif error is None and self._fits(life):
            self._provision(life)
        else:
            self._queue_after(life, self.config.queue.look_every, lambda: self._look(life, attempt))

    def _fits(self, life: QueuedLife) -> bool:
        need: Counter[int] = Counter()
        pools: dict[int, Pool] = {}
        for one in life.planned:
            pool = self.pool_of(one.path.zone, one.accelerator, CAPACITY_TIERS[one.spec.tier])
            if pool is not None:
                pools[id(pool)] = pool
                need[id(pool)] += units(pool.unit, one.accelerator)
        return all(pool.capacity is None or pool.used + need[key] <= pool.capacity for key, pool in pools.items())

    def _over_quota(self, life: QueuedLife) -> Status | None:
        """The refusal that its nodes together would meet, if any."""
        booked: list[Planned] = []
        error: Status | None = None
        for one in life.planned:
            tier = CAPACITY_TIERS[one.spec.tier]
            exceeded = self.quota.exceeded(one.path.project, one.path.zone, one.accelerator, tier)
            if exceeded:
                error = (texts.RESOURCE_EXHAUSTED, texts.quota(exceeded, one.path.project).message)
                break
            self.quota.add(one.path.project, one.path.zone, one.accelerator, tier)
            booked.append(one)
        for one in booked:
            self.quota.remove(one.path.project, one.path.zone, one.accelerator, CAPACITY_TIERS[one.spec.tier])
        return error

    # --- provisioning

    def _provision(self, life: QueuedLife) -> None:
        life.begun_at = self.state.now
        self._set_queued(life, QueueState.PROVISIONING)
        for one in life.planned:
            self._begin_planned(life, one)

    def _begin_planned(self, life: QueuedLife, one: Planned) -> None:
        operation = self._begin(one.path, one.spec, one.accelerator, queued_resource=life.record.name)
        if one.multislice:
            self.state.change(self.state.nodes[one.path], multislice=True)
        # Nobody was told the name of this operation.
        self.state.operations.pop(operation.name, None)

    def _moved(self, life: NodeLife) -> None:
        """A node's state changed, or it is gone."""
        owner = self._owner(life)
        if owner is None:
            return
        state, node_state = owner.record.state, life.record.state
        if state == QueueState.PROVISIONING:
            if life.deleting or node_state in LOST_STATES:
                self._suspend(owner, Initiator.USER if life.deleting else Initiator.SERVICE)
            elif life.gone:
                self._retry(owner, life)
            elif all(self._is_ready(one) for one in owner.planned):
                self._set_queued(owner, QueueState.ACTIVE)
        elif state == QueueState.ACTIVE and (life.gone or life.deleting or node_state in LOST_STATES):
            self._suspend(owner, Initiator.USER if life.deleting else Initiator.SERVICE)
        elif state == QueueState.DELETING:
            self._end_queued_if_due(owner)

    def _owner(self, life: NodeLife) -> QueuedLife | None:
        name = life.record.queued_resource
        if not name:
            return None
        found = self.queue.get(QueuedPath(life.path.project, life.path.zone, name.rpartition("/")[2]))
        return found if found is not None and not found.gone else None

    def _megascale(self, life: NodeLife) -> dict[str, str]:
        """Slices are numbered in the order of their names' numbers; the first worker of the first one coordinates."""
        owner = self._owner(life)
        slices = [one.path for one in owner.planned if one.multislice] if owner is not None else []
        if life.path not in slices:
            return {}
        first = self.state.nodes.get(slices[0], life)
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": first.workers[0].address,
            "MEGASCALE_NUM_SLICES": str(len(slices)),
            "MEGASCALE_SLICE_ID": str(slices.index(life.path)),
        }

    def _is_ready(self, one: Planned) -> bool:
        life = self.state.nodes.get(one.path)
        return life is not None and life.record.state == NodeState.READY

    def _retry(self, life: QueuedLife, node: NodeLife) -> None:
        """A create that failed is tried again by the service itself, for a while."""
        planned = next((one for one in life.planned if one.path == node.path), None)
        attempt, since = life.tries, life.begun_at or self.state.now
        if planned is None:
            return

        def again() -> None:
            if (
                life.tries != attempt
                or life.record.state != QueueState.PROVISIONING
                or planned.path in self.state.nodes
            ):
                return
            if self.state.now > since + timedelta(seconds=self.config.queue.retry_for):
                self._fail_queued(life, texts.stockout(life.path.zone))
            else:
                self._begin_planned(life, planned)

        self._queue_later(life, self.config.queue.retry_every, again)

    def _fail_queued(self, life: QueuedLife, error: Status) -> None:
        life.tries += 1
        self._set_queued(life, QueueState.FAILED, error=error)
        self._remove_nodes(life)
        self._hold_quota(life)

    # --- suspension

    def _suspend(self, life: QueuedLife, initiator: Initiator) -> None:
        """All its nodes go, and the shell stays."""
        life.tries += 1
        self._set_queued(life, QueueState.SUSPENDING, initiator=initiator)
        attempt = life.tries
        self._queue_later(life, self.config.queue.suspend, lambda: self._end_suspension(life, attempt))

    def _end_suspension(self, life: QueuedLife, attempt: int) -> None:
        if life.tries != attempt or life.record.state != QueueState.SUSPENDING:
            return
        self._remove_nodes(life)
        if life.resetting:
            operation, life.resetting = life.resetting, ""
            self._wait_for_resources(life)
            self.state.close_operation(operation, response=life.record)
        else:
            self._set_queued(life, QueueState.SUSPENDED, initiator=life.record.initiator)
            self._hold_quota(life)

    def _remove_nodes(self, life: QueuedLife) -> None:
        for node in self._nodes_of(life):
            self._vanish(node)

    def _nodes_of(self, life: QueuedLife) -> list[NodeLife]:
        found = (self.state.nodes.get(one.path) for one in life.planned)
        return [node for node in found if node is not None and node.record.queued_resource == life.record.name]

    def _hold_quota(self, life: QueuedLife) -> None:
        if self.config.queue.shells_hold_quota and not life.shell:
            life.shell = True
            self._book(life, self.quota.add)

    def _free_quota(self, life: QueuedLife) -> None:
        if life.shell:
            life.shell = False
            self._book(life, self.quota.remove)

    def _book(self, life: QueuedLife, act: Callable[[str, str, Accelerator, str], None]) -> None:
        for one in life.planned:
            act(one.path.project, one.path.zone, one.accelerator, CAPACITY_TIERS[one.spec.tier])

    # --- deletion

    def _begin_delete_queued(self, life: QueuedLife) -> OperationRecord:
        life.tries += 1
        operation = self.state.open_operation_on("delete", life.path.parent, life.record.name)
        life.delete_operations.append(operation.name)
        self.state.close_operation(life.create_operation, error=texts.deleted_meanwhile())
        if self._queue_rng.random() < self.config.faults.delete_stuck:
            life.stuck_repeats = 1
        self._set_queued(life, QueueState.DELETING)
        for node in self._nodes_of(life):
            if not node.deleting:
                self._begin_delete(node)
        self._queue_later(life, self.config.queue.delete, lambda: self._delete_is_due(life))
        return operation

    def _repeat_delete_queued(self, life: QueuedLife) -> OperationRecord:
        operation = self.state.open_operation_on("delete", life.path.parent, life.record.name)
        life.delete_operations.append(operation.name)
        life.stuck_repeats = max(0, life.stuck_repeats - 1)
        self._queue_later(life, self.config.queue.delete, lambda: self._end_queued_if_due(life))
        return operation

    def _delete_is_due(self, life: QueuedLife) -> None:
        life.delete_due = True
        self._end_queued_if_due(life)

    def _end_queued_if_due(self, life: QueuedLife) -> None:
        """404 from now on, once its nodes are gone."""
        if life.gone or not life.delete_due or life.stuck_repeats or self._nodes_of(life):
            return
        life.gone = True
        del self.queue[life.path]
        self._free_quota(life)
        self._log_queued(life, "gone")
        for name in life.delete_operations:
            self.state.close_operation(name, response=life.record)
        if life.resetting:
            self.state.close_operation(life.resetting, error=texts.gone_meanwhile(life.record.name))

    # --- small steps

    def _set_queued(
        self, life: QueuedLife, state: int, *, initiator: int = Initiator.UNSPECIFIED, error: Status | None = None
    ) -> None:
        life.record = replace(life.record, state=int(state), initiator=int(initiator), error=error)
        self._log_queued(life, "state", **({"code": error[0], "message": error[1]} if error else {}))

    def _log_queued(self, life: QueuedLife, event: str, **fields: Any) -> None:
        self.state.log("queued", event=event, name=life.record.name, state=int(life.record.state), **fields)

    def _queue_at(self, life: QueuedLife, when: datetime, step: Callable[[], None]) -> None:
        """Schedule a step of a resource's life, which does nothing once it is gone."""
        self.state.timeline.at(when, lambda: None if life.gone else step())

    def _queue_after(self, life: QueuedLife, seconds: float, step: Callable[[], None]) -> None:
        self._queue_at(life, self.state.now + timedelta(seconds=seconds), step)

    def _queue_later(self, life: QueuedLife, latency: Latency, step: Callable[[], None]) -> None:
        self._queue_after(life, latency.draw(self._queue_rng), step)
