"""
The life of a queued resource: from CREATING through the wait for capacity to ACTIVE, and how it ends.

Its nodes live as others do (`life`); each change of one of them may move the resource (`node_changed`). Requests come
in through `queued_calls`. A preempted resource goes SUSPENDING, its nodes are deleted, and the SUSPENDED shell stays
until it is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from tpucare.model.accelerators import Accelerator
from tpucare.model.resources import NodeState, QueuedState, shared_labels
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.capacity import CAPACITY_TIERS, Pool, units
from tpucare.testbed.emulator.world.error_texts import Status
from tpucare.testbed.emulator.world.latency import Latency
from tpucare.testbed.emulator.world.life import NodeLifecycle
from tpucare.testbed.emulator.world.queued_records import (
    WAITING,
    Initiator,
    Planned,
    QueuedLife,
    QueuedPath,
    QueuedRecord,
)
from tpucare.testbed.emulator.world.records import OperationRecord
from tpucare.testbed.emulator.world.state import NodeLife, State

LOST_STATES = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED})
"""States of a node that end the resource it belongs to."""


class QueuedLifecycle:
    """Moves every queued resource of a world, and makes and removes its nodes."""

    def __init__(self, state: State, nodes: NodeLifecycle) -> None:
        self._state, self._nodes = state, nodes
        self._rng = state.stream("queue")
        nodes.owner = self

    # --- waiting

    def create(self, record: QueuedRecord, planned: Sequence[Planned]) -> OperationRecord:
        """Begin an accepted create. Its operation ends within seconds and says nothing about capacity."""
        operation = self._state.open_operation_on("create", record.path.parent, record.name)
        life = QueuedLife(record, tuple(planned), operation.name)
        self._state.queue[record.path] = life
        self._log(
            life,
            "created",
            nodes=[str(one.path) for one in planned],
            labels=shared_labels([one.spec.labels for one in planned]),
        )
        self._later(life, self._state.config.queue.accept, lambda: self._accept(life))
        return operation

    def _accept(self, life: QueuedLife) -> None:
        if life.record.state != QueuedState.CREATING:
            return
        self._begin_waiting(life)
        self._close(life.create_operation, life)

    def _begin_waiting(self, life: QueuedLife) -> None:
        settings, rng = self._state.config.queue, self._rng
        self._free_quota(life)
        life.tries += 1
        life.begun_at = None
        old = rng.random() < settings.old_name_share
        self.set_state(life, QueuedState.ACCEPTED if old else QueuedState.WAITING_FOR_RESOURCES)
        life.lingers = rng.random() < settings.expired_lingers
        attempt, created = life.tries, life.record.create_time
        if (end := life.record.spec.validity.end(created)) is not None:
            self._at(life, end, lambda: self._expire(life, attempt))
        grant = self._state.now + timedelta(seconds=settings.grant.draw(rng))
        begin = life.record.spec.validity.begin(created) or grant
        self._at(life, max(grant, begin), lambda: self._provision_if_room(life, attempt))

    def _expire(self, life: QueuedLife, attempt: int) -> None:
        """Fail at the end of its validity, unless it lingers."""
        if life.tries == attempt and life.record.state in WAITING:
            life.tries += 1
            if not life.lingers:
                self.fail(life, texts.queue_expired())

    def _provision_if_room(self, life: QueuedLife, attempt: int) -> None:
        """Make its nodes if there is room for all of them together; if not, try again later."""
        if life.tries != attempt or life.record.state not in WAITING:
            return
        taken = next((one for one in life.planned if one.path in self._state.nodes), None)
        if taken is not None:
            self.fail(life, (texts.ALREADY_EXISTS, texts.already_exists(taken.path).message))
            return
        error = self._quota_error(life)
        if error is not None and not self._state.config.queue.quota_waits:
            self.fail(life, error)
        elif error is None and self._fits(life):
            self._provision(life)
        else:
            self._after(life, self._state.config.queue.look_every, lambda: self._provision_if_room(life, attempt))

    def _fits(self, life: QueuedLife) -> bool:
        need: Counter[int] = Counter()
        pools: dict[int, Pool] = {}
        for one in life.planned:
            pool = self._nodes.pools.pool_of(one.path.zone, one.accelerator, CAPACITY_TIERS[one.spec.tier])
            if pool is not None:
                pools[id(pool)] = pool
                need[id(pool)] += units(pool.unit, one.accelerator)
        return all(pool.capacity is None or pool.used + need[key] <= pool.capacity for key, pool in pools.items())

    def _quota_error(self, life: QueuedLife) -> Status | None:
        """The quota error that its nodes together would meet, if any."""
        counted: list[Planned] = []
        error: Status | None = None
        for one in life.planned:
            tier = CAPACITY_TIERS[one.spec.tier]
            exceeded = self._state.quota.exceeded(one.path.project, one.path.zone, one.accelerator, tier)
            if exceeded:
                error = (texts.RESOURCE_EXHAUSTED, texts.quota(exceeded, one.path.project).message)
                break
            self._state.quota.add(one.path.project, one.path.zone, one.accelerator, tier)
            counted.append(one)
        for one in counted:
            self._state.quota.remove(one.path.project, one.path.zone, one.accelerator, CAPACITY_TIERS[one.spec.tier])
        return error

    # --- provisioning

    def _provision(self, life: QueuedLife) -> None:
        life.begun_at = self._state.now
        self.set_state(life, QueuedState.PROVISIONING)
        for one in life.planned:
            self._create_node(life, one)

    def _create_node(self, life: QueuedLife, one: Planned) -> None:
        operation = self._nodes.create(one.path, one.spec, one.accelerator, queued_resource=life.record.name)
        if one.multislice:
            self._state.change(self._state.nodes[one.path], multislice=True)
        # The API never shows this operation: no caller has its name.
        self._state.operations.pop(operation.name, None)

    def node_changed(self, life: NodeLife) -> None:
        """The state of a node changed, or the node is gone: its resource may follow."""
        owner = self._owner(life)
        if owner is None:
            return
        state, node_state = owner.record.state, life.record.state
        if state == QueuedState.PROVISIONING:
            if life.deleting or node_state in LOST_STATES:
                self.suspend(owner, Initiator.USER if life.deleting else Initiator.SERVICE)
            elif life.gone:
                self._retry_node(owner, life)
            elif all(self._is_ready(one) for one in owner.planned):
                self.set_state(owner, QueuedState.ACTIVE)
        elif state == QueuedState.ACTIVE and (life.gone or life.deleting or node_state in LOST_STATES):
            self.suspend(owner, Initiator.USER if life.deleting else Initiator.SERVICE)
        elif state == QueuedState.DELETING:
            self._remove_if_due(owner)

    def _owner(self, life: NodeLife) -> QueuedLife | None:
        name = life.record.queued_resource
        if not name:
            return None
        found = self._state.queue.get(QueuedPath(life.path.project, life.path.zone, name.rpartition("/")[2]))
        return found if found is not None and not found.gone else None

    def megascale_variables(self, life: NodeLife) -> dict[str, str]:
        """Slices are numbered as in their names; the first worker of the first slice coordinates."""
        owner = self._owner(life)
        slices = [one.path for one in owner.planned if one.multislice] if owner is not None else []
        if life.path not in slices:
            return {}
        first = self._state.nodes.get(slices[0], life)
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": first.workers[0].address,
            "MEGASCALE_NUM_SLICES": str(len(slices)),
            "MEGASCALE_SLICE_ID": str(slices.index(life.path)),
        }

    def _is_ready(self, one: Planned) -> bool:
        life = self._state.nodes.get(one.path)
        return life is not None and life.record.state == NodeState.READY

    def _retry_node(self, life: QueuedLife, node: NodeLife) -> None:
        """Create a node again whose create failed; the service does so for a while."""
        planned = next((one for one in life.planned if one.path == node.path), None)
        attempt, since = life.tries, life.begun_at or self._state.now
        if planned is None:
            return

        def create_again() -> None:
            if (
                life.tries != attempt
                or life.record.state != QueuedState.PROVISIONING
                or planned.path in self._state.nodes
            ):
                return
            if self._state.now > since + timedelta(seconds=self._state.config.queue.retry_for):
                self.fail(life, texts.stockout(life.path.zone))
            else:
                self._create_node(life, planned)

        self._later(life, self._state.config.queue.retry_every, create_again)

    def fail(self, life: QueuedLife, error: Status) -> None:
        life.tries += 1
        self.set_state(life, QueuedState.FAILED, error=error)
        self._remove_nodes(life)
        self._hold_quota(life)

    # --- suspension, reset, maintenance

    def begin_reset(self, life: QueuedLife) -> OperationRecord:
        """End all its nodes and let it wait again."""
        operation = self._state.open_operation_on("reset", life.path.parent, life.record.name)
        life.resetting = operation.name
        self.suspend(life, Initiator.USER)
        return operation

    def begin_maintenance(self, life: QueuedLife) -> OperationRecord:
        """The operation on the resource; its nodes have operations of their own."""
        state = self._state
        operation = state.open_operation_on("performMaintenance", life.path.parent, life.record.name)
        self._later(life, state.config.latencies.update, lambda: self._close(operation.name, life))
        return operation

    def suspend(self, life: QueuedLife, initiator: Initiator) -> None:
        """End all its nodes; the SUSPENDED shell stays."""
        life.tries += 1
        self.set_state(life, QueuedState.SUSPENDING, initiator=initiator)
        attempt = life.tries
        self._later(life, self._state.config.queue.suspend, lambda: self._end_suspension(life, attempt))

    def _end_suspension(self, life: QueuedLife, attempt: int) -> None:
        if life.tries != attempt or life.record.state != QueuedState.SUSPENDING:
            return
        self._remove_nodes(life)
        if life.resetting:
            operation, life.resetting = life.resetting, ""
            self._begin_waiting(life)
            self._close(operation, life)
        else:
            self.set_state(life, QueuedState.SUSPENDED, initiator=life.record.initiator)
            self._hold_quota(life)

    def _remove_nodes(self, life: QueuedLife) -> None:
        for node in self.nodes_of(life):
            self._nodes.remove(node)

    def nodes_of(self, life: QueuedLife) -> list[NodeLife]:
        found = (self._state.nodes.get(one.path) for one in life.planned)
        return [node for node in found if node is not None and node.record.queued_resource == life.record.name]

    def _hold_quota(self, life: QueuedLife) -> None:
        if self._state.config.queue.shells_hold_quota and not life.shell:
            life.shell = True
            self._count_quota(life, self._state.quota.add)

    def _free_quota(self, life: QueuedLife) -> None:
        if life.shell:
            life.shell = False
            self._count_quota(life, self._state.quota.remove)

    def _count_quota(self, life: QueuedLife, act: Callable[[str, str, Accelerator, str], None]) -> None:
        for one in life.planned:
            act(one.path.project, one.path.zone, one.accelerator, CAPACITY_TIERS[one.spec.tier])

    # --- deletion

    def begin_delete(self, life: QueuedLife) -> OperationRecord:
        life.tries += 1
        operation = self._state.open_operation_on("delete", life.path.parent, life.record.name)
        life.delete_operations.append(operation.name)
        self._state.close_operation(life.create_operation, error=texts.deleted_meanwhile())
        if self._rng.random() < self._state.config.faults.delete_stuck:
            life.stuck_repeats = 1
        self.set_state(life, QueuedState.DELETING)
        for node in self.nodes_of(life):
            if not node.deleting:
                self._nodes.begin_delete(node)
        self._later(life, self._state.config.queue.delete, lambda: self._delete_is_due(life))
        return operation

    def repeat_delete(self, life: QueuedLife) -> OperationRecord:
        operation = self._state.open_operation_on("delete", life.path.parent, life.record.name)
        life.delete_operations.append(operation.name)
        life.stuck_repeats = max(0, life.stuck_repeats - 1)
        self._later(life, self._state.config.queue.delete, lambda: self._remove_if_due(life))
        return operation

    def _delete_is_due(self, life: QueuedLife) -> None:
        life.delete_due = True
        self._remove_if_due(life)

    def _remove_if_due(self, life: QueuedLife) -> None:
        """Remove it (404 from now on) once its deletion is due and its nodes are gone."""
        if life.gone or not life.delete_due or life.stuck_repeats or self.nodes_of(life):
            return
        self.forget(life)
        for name in life.delete_operations:
            self._close(name, life)
        if life.resetting:
            self._state.close_operation(life.resetting, error=texts.gone_meanwhile(life.record.name))

    def forget(self, life: QueuedLife) -> None:
        """404 from now on."""
        life.gone = True
        del self._state.queue[life.path]
        self._free_quota(life)
        self._log(life, "gone")

    # --- small steps

    def _close(self, operation: str, life: QueuedLife) -> None:
        """End an operation with the resource as it is by now."""
        self._state.close_operation(operation, response=life.record)

    def set_state(
        self, life: QueuedLife, state: int, *, initiator: int = Initiator.UNSPECIFIED, error: Status | None = None
    ) -> None:
        life.record = replace(life.record, state=int(state), initiator=int(initiator), error=error)
        self._log(life, "state", **({"code": error[0], "message": error[1]} if error else {}))

    def _log(self, life: QueuedLife, event: str, **fields: Any) -> None:
        self._state.log("queued", event=event, name=life.record.name, state=int(life.record.state), **fields)

    def _at(self, life: QueuedLife, when: datetime, step: Callable[[], None]) -> None:
        """Schedule a step of a resource's life, which does nothing once the resource is gone."""
        self._state.timeline.at(when, lambda: None if life.gone else step())

    def _after(self, life: QueuedLife, seconds: float, step: Callable[[], None]) -> None:
        self._at(life, self._state.now + timedelta(seconds=seconds), step)

    def _later(self, life: QueuedLife, latency: Latency, step: Callable[[], None]) -> None:
        self._after(life, latency.draw(self._rng), step)
