"""The methods for queued resources: checks each request, begins its effect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from itertools import islice

from tpucare.model.resources import QueuedState, shared_labels
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.calls import MAINTENANCE_SECONDS, CallPath, page_token_of
from tpucare.testbed.emulator.world.life import NodeLifecycle
from tpucare.testbed.emulator.world.queued_life import QueuedLifecycle
from tpucare.testbed.emulator.world.queued_records import (
    SHELLS,
    WAITING,
    Planned,
    QueuedLife,
    QueuedNodeSpec,
    QueuedPage,
    QueuedPath,
    QueuedRecord,
    QueuedSpec,
    parse_queued_path,
)
from tpucare.testbed.emulator.world.records import PLAIN, CallFate, NodePath, NodeSpec, OperationRecord, parse_parent
from tpucare.testbed.emulator.world.requests import check_queued_id, check_spec
from tpucare.testbed.emulator.world.state import State


class QueuedApi:
    """Create, get, list, delete, reset and maintain queued resources. All methods raise ApiError."""

    def __init__(self, state: State, path: CallPath, lifecycle: NodeLifecycle, queue: QueuedLifecycle) -> None:
        self._state, self._path, self._lifecycle, self._queue = state, path, lifecycle, queue

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
        """The operation, open; the resource exists from now on, its nodes only once it is PROVISIONING."""
        name = f"{parent}/queuedResources/{queued_id}"
        with self._path.call("CreateQueuedResource", name, now, fate) as fields:
            project, zone = parse_parent(parent)
            if (before := self._path.begun_before("CreateQueuedResource", name, request_id)) is not None:
                return before
            if zone == "-":
                raise texts.bad_argument("A queued resource is created in one zone.")
            check_queued_id(queued_id)
            path = QueuedPath(project, zone, queued_id)
            if path in self._state.queue:
                raise texts.exists(name)
            planned = self._planned(path, spec)
            fields["nodes"] = [str(one.path) for one in planned]
            fields["labels"] = shared_labels([one.spec.labels for one in planned])
            fields["metadata"] = {key: value for one in planned for key, value in one.spec.metadata.items()}
            limit = self._state.config.queue.limit
            in_zone = sum((one.project, one.zone) == (project, zone) for one in self._state.queue)
            if limit is not None and in_zone >= limit:
                raise texts.queue_full(zone)
            operation = self._queue.create(QueuedRecord(path, self._state.now, spec), planned)
            self._path.remember_request("CreateQueuedResource", name, request_id, operation)
            fields["operation"] = operation.name
            if self._path.rng.random() < self._state.config.queue.spurious_exists:
                raise texts.exists(name)
            return operation

    def _planned(self, path: QueuedPath, spec: QueuedSpec) -> list[Planned]:
        if not spec.nodes:
            raise texts.bad_argument("A queued resource needs a node_spec.")
        planned = []
        for node in spec.nodes:
            if node.parent and node.parent != path.parent:
                raise texts.bad_argument(f"node_spec.parent must be {path.parent}.")
            if bool(node.node_id) == bool(node.count):
                raise texts.bad_argument("Exactly one of node_id and multislice_params must be set in node_spec.")
            for node_id in node.ids(path.queued_id):
                kept, accelerator = check_spec(path.zone, node_id, _with_tier(spec, node), self._state.config)
                place = NodePath(path.project, path.zone, node_id)
                planned.append(Planned(place, kept, accelerator, bool(node.count)))
        if len({one.path for one in planned}) < len(planned):
            raise texts.bad_argument("Two nodes of a queued resource have one name.")
        return planned

    def get_queued_resource(self, name: str, now: datetime, fate: CallFate = PLAIN) -> QueuedRecord:
        with self._path.call("GetQueuedResource", name, now, fate):
            return self._find_queued(name).record

    def list_queued_resources(
        self, parent: str, page_size: int, page_token: str, now: datetime, fate: CallFate = PLAIN
    ) -> QueuedPage:
        """One page, by zone and name; *parent* may end in `locations/-`."""
        with self._path.call("ListQueuedResources", parent, now, fate) as fields:
            wanted = self._path.page_request(parent, page_size, page_token)
            after = wanted.after or ("", "")
            fitting = (
                life.record
                for path, life in sorted(self._state.queue.items())
                if path.project == wanted.project
                and wanted.zone in ("-", path.zone)
                and path.zone not in wanted.dark
                and path[1:] > after
            )
            found = list(islice(fitting, wanted.size + 1))
            page = found[: wanted.size]
            token = page_token_of(*page[-1].path[1:]) if len(found) > wanted.size else ""
            fields["count"] = len(page)
            return QueuedPage(tuple(page), token, tuple(sorted(wanted.dark)))

    def delete_queued_resource(
        self, name: str, force: bool, now: datetime, fate: CallFate = PLAIN, *, request_id: str = ""
    ) -> OperationRecord:
        """*force*: delete its nodes first. Without it they must be gone, or the state must be one without nodes."""
        with self._path.call("DeleteQueuedResource", name, now, fate) as fields:
            if (before := self._path.begun_before("DeleteQueuedResource", name, request_id)) is not None:
                return before
            life = self._find_queued(name)
            fields["state"], fields["force"] = int(life.record.state), force
            fields["labels"] = shared_labels([one.spec.labels for one in life.planned])
            nodes = self._queue.nodes_of(life)
            fields["nodes"] = [str(node.path) for node in nodes]
            is_well = [node.is_serving and not node.deleting for node in nodes]
            fields["serving"] = [str(node.path) for node, well in zip(nodes, is_well, strict=True) if well]
            if life.record.state == QueuedState.DELETING:
                operation = self._queue.repeat_delete(life)
                fields["repeated"] = True
            else:
                self._check_deletable(life, force)
                operation = self._queue.begin_delete(life)
            self._path.remember_request("DeleteQueuedResource", name, request_id, operation)
            fields["operation"] = operation.name
            return operation

    def _check_deletable(self, life: QueuedLife, force: bool) -> None:
        state = life.record.state
        if force or state in (*WAITING, *SHELLS):
            return
        # After a caller has deleted its nodes one by one, it can be deleted once it shows SUSPENDED, not before.
        if self._queue.nodes_of(life) or state == QueuedState.SUSPENDING:
            raise texts.queued_busy(life.record.name, QueuedState(state).name)

    def reset_queued_resource(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """Its nodes go, and it waits again. Only from ACTIVE and SUSPENDED."""
        with self._path.call("ResetQueuedResource", name, now, fate) as fields:
            life = self._find_queued(name)
            state = life.record.state
            if state not in (QueuedState.ACTIVE, QueuedState.SUSPENDED):
                raise texts.not_resettable(name, QueuedState(state).name)
            operation = self._queue.begin_reset(life)
            fields["operation"] = operation.name
            return operation

    def _find_queued(self, name: str) -> QueuedLife:
        life = self._state.queue.get(parse_queued_path(name))
        if life is None:
            raise texts.not_found(name)
        return life

    def perform_queued_maintenance(
        self, name: str, node_names: Collection[str], now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """v2alpha1: `perform_maintenance` for nodes of a queued resource; none named: all of them."""
        with self._path.call("PerformMaintenanceQueuedResource", name, now, fate):
            owner = self._find_queued(name)
            nodes = [node for node in self._queue.nodes_of(owner) if not node_names or node.record.name in node_names]
            if len(nodes) < len(node_names):
                raise texts.bad_argument("node_names has a node that is not of this queued resource.")
            for node in nodes:
                everyone = range(len(node.workers))
                self._lifecycle.begin_maintenance(node, "performMaintenance", everyone, MAINTENANCE_SECONDS)
            return self._queue.begin_maintenance(owner)


def _with_tier(spec: QueuedSpec, node: QueuedNodeSpec) -> NodeSpec:
    """The settings of a node with the tier of its queued resource."""
    inner = node.spec
    if (inner.spot or inner.preemptible) and spec.tier == "guaranteed":
        raise texts.bad_argument("scheduling_config of the node contradicts the tier of the queued resource.")
    return replace(
        inner,
        spot=inner.spot or spec.tier == "spot",
        preemptible=inner.preemptible or spec.tier == "best-effort",
        reserved=inner.reserved or spec.reserved or (bool(spec.reservation_name) and spec.tier != "spot"),
    )
