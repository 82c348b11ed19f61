"""The methods for queued resources, and those that v2alpha1 adds: what each is refused for, what it sets going."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice

from tpucare.model.resources import Health
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.calls import Calls, page_token_of
from tpucare.testbed.emulator.world.queued_records import (
    SHELLS,
    WAITING,
    Initiator,
    NodeWish,
    Planned,
    QueuedLife,
    QueuedPage,
    QueuedPath,
    QueuedRecord,
    QueuedSpec,
    QueueState,
    parse_queued_path,
)
from tpucare.testbed.emulator.world.records import PLAIN, CallFate, NodePath, NodeSpec, OperationRecord, parse_parent
from tpucare.testbed.emulator.world.requests import check_queued_id, check_spec
from tpucare.testbed.emulator.world.state import NodeLife

MAINTENANCE_LENGTH = timedelta(minutes=5)


class QueueCalls(Calls):
    """Create, get, list, delete and reset; maintenance of nodes. All of them raise ApiError."""

    def create_queued_resource(
        self,
        parent: str,
        queued_id: str,
        spec: QueuedSpec,
        now: datetime,
        fate: CallFate = PLAIN,
        *,
        request_id: str = "",
    ) -> OperationRecord:
        """The operation, open; the resource is there from now on, its nodes are not before it is PROVISIONING."""
        name = f"{parent}/queuedResources/{queued_id}"
        with self._call("CreateQueuedResource", name, now, fate) as said:
            project, zone = parse_parent(parent)
            if (before := self._asked_before("CreateQueuedResource", name, request_id)) is not None:
                return before
            if zone == "-":
                raise texts.bad_argument("A queued resource is created in one zone.")
            check_queued_id(queued_id)
            path = QueuedPath(project, zone, queued_id)
            if path in self.queue:
                raise texts.exists(name)
            planned = self._planned(path, spec)
            said["nodes"] = [str(one.path) for one in planned]
            said["metadata"] = {key: value for one in planned for key, value in one.spec.metadata.items()}
            limit = self.config.queue.limit
            if limit is not None and sum((one.project, one.zone) == (project, zone) for one in self.queue) >= limit:
                raise texts.queue_full(zone)
            operation = self._enqueue(QueuedRecord(path, self.state.now, spec), planned)
            self._remember_request("CreateQueuedResource", name, request_id, operation)
            said["operation"] = operation.name
            if self._call_rng.random() < self.config.queue.spurious_exists:
                raise texts.exists(name)
            return operation

    def _planned(self, path: QueuedPath, spec: QueuedSpec) -> list[Planned]:
        if not spec.wishes:
            raise texts.bad_argument("A queued resource needs a node_spec.")
        planned = []
        for wish in spec.wishes:
            if wish.parent and wish.parent != path.parent:
                raise texts.bad_argument(f"node_spec.parent must be {path.parent}.")
            if bool(wish.node_id) == bool(wish.count):
                raise texts.bad_argument("Exactly one of node_id and multislice_params must be set in node_spec.")
            for node_id in wish.ids(path.queued_id):
                kept, accelerator = check_spec(path.zone, node_id, _with_tier(spec, wish), self.config)
                place = NodePath(path.project, path.zone, node_id)
                planned.append(Planned(place, kept, accelerator, bool(wish.count)))
        if len({one.path for one in planned}) < len(planned):
            raise texts.bad_argument("Two nodes of a queued resource have one name.")
        return planned

    def get_queued_resource(self, name: str, now: datetime, fate: CallFate = PLAIN) -> QueuedRecord:
        with self._call("GetQueuedResource", name, now, fate):
            return self._find_queued(name).record

    def list_queued_resources(
        self, parent: str, page_size: int, page_token: str, now: datetime, fate: CallFate = PLAIN
    ) -> QueuedPage:
        """One page, by zone and name; *parent* may end in `locations/-`."""
        with self._call("ListQueuedResources", parent, now, fate) as said:
            ask = self._page_ask(parent, page_size, page_token)
            after = ask.after or ("", "")
            fitting = (
                life.record
                for path, life in sorted(self.queue.items())
                if path.project == ask.project
                and ask.zone in ("-", path.zone)
                and path.zone not in ask.dark
                and path[1:] > after
            )
            found = list(islice(fitting, ask.size + 1))
            page = found[: ask.size]
            token = page_token_of(*page[-1].path[1:]) if len(found) > ask.size else ""
            said["count"] = len(page)
            return QueuedPage(tuple(page), token, tuple(sorted(ask.dark)))

    def delete_queued_resource(
        self, name: str, force: bool, now: datetime, fate: CallFate = PLAIN, *, request_id: str = ""
    ) -> OperationRecord:
        """*force*: its nodes are deleted first. Without it they must be gone, or the state one that has none."""
        with self._call("DeleteQueuedResource", name, now, fate) as said:
            if (before := self._asked_before("DeleteQueuedResource", name, request_id)) is not None:
                return before
            life = self._find_queued(name)
            said["state"], said["force"] = int(life.record.state), force
            if life.record.state == QueueState.DELETING:
                operation = self._repeat_delete_queued(life)
            else:
                self._check_deletable(life, force)
                operation = self._begin_delete_queued(life)
            self._remember_request("DeleteQueuedResource", name, request_id, operation)
            said["operation"] = operation.name
            return operation

    def _check_deletable(self, life: QueuedLife, force: bool) -> None:
        state = life.record.state
        if force or state in (*WAITING, *SHELLS):
            return
        # With its nodes deleted by hand it is deletable once it shows SUSPENDED, and not before.
        if self._nodes_of(life) or state == QueueState.SUSPENDING:
            raise texts.queued_busy(life.record.name, QueueState(state).name)

    def reset_queued_resource(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """Its nodes go, and it waits again. Only from ACTIVE and SUSPENDED."""
        with self._call("ResetQueuedResource", name, now, fate) as said:
            life = self._find_queued(name)
            state = life.record.state
            if state not in (QueueState.ACTIVE, QueueState.SUSPENDED):
                raise texts.not_resettable(name, QueueState(state).name)
            operation = self.state.open_operation_on("reset", life.path.parent, name)
            life.resetting = operation.name
            self._suspend(life, Initiator.USER)
            said["operation"] = operation.name
            return operation

    def _find_queued(self, name: str) -> QueuedLife:
        life = self.queue.get(parse_queued_path(name))
        if life is None:
            raise texts.not_found(name)
        return life

    # --- what only v2alpha1 has

    def simulate_maintenance(
        self, name: str, worker_ids: Collection[str], now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """The node shows UNHEALTHY_MAINTENANCE, and the named workers restart (none named: worker 0)."""
        with self._call("SimulateMaintenanceEvent", name, now, fate):
            life = self._find(name)
            wanted = {int(one) for one in worker_ids if one.isdigit()} or {0}
            if len(wanted) < len(worker_ids) or max(wanted) >= len(life.workers):
                raise texts.bad_argument(f"worker_ids must be numbers below {len(life.workers)}.")
            return self._maintain(life, "simulateMaintenanceEvent", wanted)

    def perform_maintenance(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """The maintenance that was announced begins now: all workers restart."""
        with self._call("PerformMaintenance", name, now, fate):
            life = self._find(name)
            return self._maintain(life, "performMaintenance", set(range(len(life.workers))))

    def perform_queued_maintenance(
        self, name: str, node_names: Collection[str], now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """The same for nodes of a queued resource; none named: all of them."""
        with self._call("PerformMaintenanceQueuedResource", name, now, fate):
            owner = self._find_queued(name)
            nodes = [node for node in self._nodes_of(owner) if not node_names or node.record.name in node_names]
            if len(nodes) < len(node_names):
                raise texts.bad_argument("node_names has a node that is not of this queued resource.")
            for node in nodes:
                self._maintain(node, "performMaintenance", set(range(len(node.workers))))
            operation = self.state.open_operation_on("performMaintenance", owner.path.parent, name)
            self._queue_later(
                owner,
                self.config.latencies.update,
                lambda: self._close(operation.name, lambda: owner.record),
            )
            return operation

    def _maintain(self, life: NodeLife, verb: str, workers: Collection[int]) -> OperationRecord:
        operation = self.state.open_operation(verb, life.path)
        self._set_health(life, Health.UNHEALTHY_MAINTENANCE, "The TPU is being maintained")
        for worker in life.workers:
            if worker.number in workers and worker.up:
                self._kill_worker(life, worker)
                self._later(life, self.config.latencies.reboot, self._booting(life, worker))
        self._later(life, self.config.latencies.update, lambda: self._close(operation.name, lambda: life.record))
        self._after(life, MAINTENANCE_LENGTH.total_seconds(), lambda: self._get_well(life))
        return operation

    def _get_well(self, life: NodeLife) -> None:
        if not life.dead:
            self._set_health(life, Health.HEALTHY)


def _with_tier(spec: QueuedSpec, wish: NodeWish) -> NodeSpec:
    """The tier of a queued resource is that of its nodes, which say nothing about it themselves."""
    inner = wish.spec
    if (inner.spot or inner.preemptible) and spec.tier == "guaranteed":
        raise texts.bad_argument("scheduling_config of the node contradicts the tier of the queued resource.")
    return replace(
        inner,
        spot=inner.spot or spec.tier == "spot",
        preemptible=inner.preemptible or spec.tier == "best-effort",
        reserved=inner.reserved or spec.reserved or (bool(spec.reservation_name) and spec.tier != "spot"),
    )
