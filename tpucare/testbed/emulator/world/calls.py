"""
The calls of the emulated API: the way of every call, and the methods for nodes and operations.

Every call first lets time catch up, and leaves one line in the audit log, however it ends.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.capacity import CAPACITY_TIERS, RateWindow
from tpucare.testbed.emulator.world.faults import Fates
from tpucare.testbed.emulator.world.life import UPDATABLE, NodeLifecycle
from tpucare.testbed.emulator.world.policies import check_network
from tpucare.testbed.emulator.world.records import (
    PLAIN,
    ApiError,
    CallFate,
    GuestAttribute,
    NodePage,
    NodePath,
    NodeRecord,
    NodeSpec,
    OperationRecord,
    parse_node_path,
    parse_parent,
)
from tpucare.testbed.emulator.world.requests import check_changeable, check_spec, offered_runtimes, offered_types
from tpucare.testbed.emulator.world.state import NodeLife, State, WorkerLife

MAINTENANCE_SECONDS = timedelta(minutes=5).total_seconds()


class PageRequest(NamedTuple):
    """
    One page of a list.

    zone: `-` is all but the *dark* ones     after: zone and name of the last entry of the page before, None at first
    """

    project: str
    zone: str
    size: int
    dark: frozenset[str]
    after: tuple[str, str] | None


class CallPath:
    """
    The way of every call: its fate, permissions and rate limits, the audit log, repeated requests.

    rng: chance for the methods themselves
    """

    def __init__(self, state: State, fates: Fates) -> None:
        self.rng = state.stream("calls")
        self._state, self._fates = state, fates
        self._requests: dict[tuple[str, str, str], str] = {}
        rates = state.config.rates
        self._read_rate, self._create_rate, self._delete_rate = map(
            RateWindow, (rates.read, rates.create, rates.delete)
        )

    def limit_reads(self, limit: int | None) -> None:
        """Calls of Get and List methods a minute from now on, instead of the configured limit; None = unlimited."""
        self._read_rate.limit = limit

    def fate(self, method: str, name: str, now: datetime, peer: str = "") -> CallFate:
        """Draw the fate of one call of *method* (`CreateNode`, ...) on resource or parent *name*."""
        self._state.advance(now)
        fate = self._fates.draw(method, zone_of(name), self._state.now, peer)
        if not fate.applied and fate.error is not None:
            self._log_call(method, name, fate, code=fate.error.code, message=fate.error.message, applied=False)
        return fate

    @contextmanager
    def call(self, method: str, name: str, now: datetime, fate: CallFate) -> Iterator[dict[str, Any]]:
        """Let time catch up, check that the place is open, log the end; the body adds fields to the logged line."""
        self._state.advance(now)
        fields: dict[str, Any] = {}
        try:
            self._check_open(method, name)
            yield fields
        except ApiError as error:
            self._log_call(method, name, fate, code=error.code, message=error.message, applied=True, **fields)
            raise texts.with_event_id(error, self._state.event_id()) from None
        self._log_call(method, name, fate, code=0, applied=True, **fields)

    def _log_call(self, method: str, name: str, fate: CallFate, *, applied: bool, **fields: Any) -> None:
        """`answer`: lost when the caller cannot know how it ended; `latency` in seconds, `under_way` before `at`."""
        if not self._state.config.audit_reads and method.startswith(("Get", "List")):
            return
        lost = fate.error is not None and fate.error.code in (texts.UNAVAILABLE, 4)
        answer = "lost" if lost else "given"
        latency = round(fate.latency_seconds, 6)
        self._state.log(
            "call",
            method=method,
            name=name,
            peer=fate.peer,
            applied=applied,
            answer=answer,
            latency=latency,
            under_way=round(fate.before_seconds, 6) if applied else 0.0,
            **fields,
        )

    def _check_open(self, method: str, name: str) -> None:
        parts = name.split("/")
        project = parts[1] if len(parts) > 1 else ""
        zone = zone_of(name)
        parent = f"projects/{project}/locations/{zone}"
        config = self._state.config
        permission = _permission(method)
        if config.project.refuses:
            raise texts.project_refuses(config.project.refuses, project)
        is_foreign = config.access.projects is not None and project not in config.access.projects
        if is_foreign or permission in config.access.denied_permissions:
            raise texts.permission(permission, parent)
        if method.startswith(("Get", "List")) and not self._read_rate.admit(project, self._state.now):
            raise texts.read_rate(project, self._read_rate.limit or 0)
        if zone not in ("", "-") and zone not in config.zones:
            raise texts.closed_zone(zone)

    def check_create_rate(self, project: str) -> None:
        """Count a create. Raises: ApiError (8): too many in the last minute."""
        if not self._create_rate.admit(project, self._state.now):
            raise texts.rate_limit("create", project, self._create_rate.limit or 0)

    def check_delete_rate(self, project: str) -> None:
        """Count a delete. Raises: ApiError (8): too many in the last minute."""
        if not self._delete_rate.admit(project, self._state.now):
            raise texts.rate_limit("delete", project, self._delete_rate.limit or 0)

    def begun_before(self, method: str, subject: str, request_id: str) -> OperationRecord | None:
        """The operation that the same request, by its id, began earlier; it must not begin it twice."""
        if not request_id:
            return None
        return self._state.operations.get(self._requests.get((method, subject, request_id), ""))

    def remember_request(self, method: str, subject: str, request_id: str, operation: OperationRecord) -> None:
        if not request_id:
            return
        # An id is valid as long as its operation can be read.
        self._requests = {key: name for key, name in self._requests.items() if name in self._state.operations}
        self._requests[method, subject, request_id] = operation.name

    def dark_zones(self) -> frozenset[str]:
        """Zones that the API cannot reach now."""
        return self._fates.dark_zones(self._state.now)

    def page_request(self, parent: str, page_size: int, page_token: str) -> PageRequest:
        """Raises: ApiError (3): a malformed parent, size or token."""
        project, zone = parse_parent(parent)
        settings = self._state.config.listing
        if settings.page_refused is not None and page_size > settings.page_refused:
            raise texts.page_too_large(settings.page_refused)
        size = min(page_size or settings.page_default, settings.page_cap)
        if size < 0:
            raise texts.bad_argument("page_size must not be negative.")
        dark = self.dark_zones() if zone == "-" else frozenset()
        return PageRequest(project, zone, size, dark, last_key(page_token))


class NodeApi:
    """Nodes, operations, guest attributes, catalogues: checks each request and begins its effect. Raises ApiError."""

    def __init__(self, state: State, path: CallPath, lifecycle: NodeLifecycle) -> None:
        self._state, self._path, self._lifecycle = state, path, lifecycle

    # --- nodes

    def create_node(
        self, parent: str, node_id: str, spec: NodeSpec, now: datetime, fate: CallFate = PLAIN, *, request_id: str = ""
    ) -> OperationRecord:
        """The operation, open; the node exists from now on, and is visible within about a second."""
        with self._path.call("CreateNode", f"{parent}/nodes/{node_id}", now, fate) as fields:
            fields["labels"] = dict(spec.labels)
            fields["metadata"] = dict(spec.metadata)
            fields["accelerator"] = spec.accelerator_type
            project, zone = parse_parent(parent)
            path = NodePath(project, zone, node_id)
            if (before := self._path.begun_before("CreateNode", str(path), request_id)) is not None:
                return before
            self._path.check_create_rate(project)
            if zone == "-":
                raise texts.bad_argument("A node is created in one zone.")
            kept, accelerator = check_spec(zone, node_id, spec, self._state.config)
            check_network(project, kept, self._state.config.project)
            if path in self._state.nodes:
                raise texts.already_exists(path)
            exceeded = self._state.quota.exceeded(project, zone, accelerator, CAPACITY_TIERS[kept.tier])
            if exceeded:
                raise texts.quota(exceeded, project)
            operation = self._lifecycle.create(path, kept, accelerator)
            self._path.remember_request("CreateNode", str(path), request_id, operation)
            fields["operation"] = operation.name
            fields["id"] = self._state.nodes[path].record.id
            return operation

    def get_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> NodeRecord:
        """Raises: ApiError (5): no such node, or not yet visible."""
        with self._path.call("GetNode", name, now, fate):
            life = self._find(name)
            if not life.visible:
                raise texts.not_found(name)
            return life.record

    def list_nodes(
        self, parent: str, page_size: int, page_token: str, now: datetime, fate: CallFate = PLAIN
    ) -> NodePage:
        """One page, by zone and name. *parent* may end in `locations/-`; then dark zones are named in the answer."""
        with self._path.call("ListNodes", parent, now, fate) as fields:
            wanted = self._path.page_request(parent, page_size, page_token)
            shown = self._state.listing(wanted.project).after(wanted.zone, wanted.after, wanted.dark)
            found = list(islice(shown, wanted.size + 1))
            page = found[: wanted.size]
            token = page_token_of(page[-1].path.zone, page[-1].path.node_id) if len(found) > wanted.size else ""
            fields["count"] = len(page)
            return NodePage(tuple(page), token, tuple(sorted(wanted.dark)))

    def list_in_place(self, project: str, now: datetime, fate: CallFate = PLAIN) -> frozenset[str]:
        """
        One ListNodes call over all zones whose caller reads the page from `state.listing`; returns the dark zones.

        For callers in the same process: a page of a thousand nodes that did not change then costs nothing.
        """
        with self._path.call("ListNodes", f"projects/{project}/locations/-", now, fate):
            return self._path.dark_zones()

    def delete_node(self, name: str, now: datetime, fate: CallFate = PLAIN, *, request_id: str = "") -> OperationRecord:
        """Accepted in every state; DELETING for a while, then 404."""
        with self._path.call("DeleteNode", name, now, fate) as fields:
            if (before := self._path.begun_before("DeleteNode", name, request_id)) is not None:
                return before
            life = self._find(name)
            self._path.check_delete_rate(life.path.project)
            fields |= _as_deleted(life)
            if not life.deleting:
                operation = self._lifecycle.begin_delete(life)
            else:
                fields["repeated"] = True
                operation = self._lifecycle.repeat_delete(life)
                code = self._path.rng.choice(self._state.config.faults.repeated_delete)
                if code:
                    raise texts.deleting_already(life.path, code)
            fields["operation"] = operation.name
            self._path.remember_request("DeleteNode", name, request_id, operation)
            return operation

    def update_node(
        self, name: str, mask: Sequence[str], spec: NodeSpec, now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """*mask*: of description, tags, labels, metadata, network_config.enable_external_ips; values from *spec*."""
        with self._path.call("UpdateNode", name, now, fate) as fields:
            fields["mask"] = list(mask)
            life = self._find(name)
            unknown = [path for path in mask if path not in UPDATABLE]
            if unknown or not mask:
                raise texts.bad_argument(f"Invalid update_mask: {', '.join(unknown) or 'empty'}.")
            check_changeable(spec)
            if life.update_operation or life.deleting:
                raise texts.busy(life.path)
            return self._lifecycle.begin_update(life, tuple(mask), spec)

    def stop_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """Single-host nodes on demand only; they keep their share of capacity."""
        with self._path.call("StopNode", name, now, fate):
            return self._lifecycle.begin_stop(self._find_stoppable(name, "stop", NodeState.READY))

    def start_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        with self._path.call("StartNode", name, now, fate):
            return self._lifecycle.begin_start(self._find_stoppable(name, "start", NodeState.STOPPED))

    def _find_stoppable(self, name: str, verb: str, wanted: NodeState) -> NodeLife:
        life = self._find(name)
        if life.record.spec.is_preemptible:
            raise texts.not_stoppable(verb, "it is preemptible")
        if len(life.workers) > 1:
            raise texts.not_stoppable(verb, "it has more than one host")
        if life.record.state != wanted:
            raise texts.not_stoppable(verb, f"it is in state {NodeState(life.record.state).name}")
        return life

    def simulate_maintenance(
        self, name: str, worker_ids: Collection[str], now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """v2alpha1: the node shows UNHEALTHY_MAINTENANCE, the named workers restart (none named: worker 0)."""
        with self._path.call("SimulateMaintenanceEvent", name, now, fate):
            life = self._find(name)
            wanted = {int(one) for one in worker_ids if one.isdigit()} or {0}
            if len(wanted) < len(worker_ids) or max(wanted) >= len(life.workers):
                raise texts.bad_argument(f"worker_ids must be numbers below {len(life.workers)}.")
            return self._lifecycle.begin_maintenance(life, "simulateMaintenanceEvent", wanted, MAINTENANCE_SECONDS)

    def perform_maintenance(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """v2alpha1: the maintenance that was announced begins now: all workers restart."""
        with self._path.call("PerformMaintenance", name, now, fate):
            life = self._find(name)
            everyone = range(len(life.workers))
            return self._lifecycle.begin_maintenance(life, "performMaintenance", everyone, MAINTENANCE_SECONDS)

    def _find(self, name: str) -> NodeLife:
        life = self._state.nodes.get(parse_node_path(name))
        if life is None:
            raise texts.not_found(name)
        return life

    # --- operations

    def set_operation_version(self, operation: OperationRecord, version: str) -> OperationRecord:
        """The operation, from now on in messages of *version*, unless it was begun in another before."""
        if operation.api_version == version or operation.name not in self._state.operations:
            return operation
        changed = replace(self._state.operations[operation.name], api_version=version)
        self._state.operations[operation.name] = changed
        return changed

    def get_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """Raises: ApiError (5): unknown, or finished some days ago."""
        with self._path.call("GetOperation", name, now, fate):
            return self._find_operation(name)

    def list_operations(self, parent: str, now: datetime, fate: CallFate = PLAIN) -> list[OperationRecord]:
        with self._path.call("ListOperations", parent, now, fate):
            project, zone = parse_parent(parent)
            prefix = f"projects/{project}/locations/"
            of_project = [one for name, one in self._state.operations.items() if name.startswith(prefix)]
            return [one for one in of_project if zone in ("-", zone_of(one.name))]

    def cancel_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> None:
        """Best effort: it is recorded on the operation, and has no other effect."""
        with self._path.call("CancelOperation", name, now, fate):
            operation = self._find_operation(name)
            if not operation.done:
                self._state.operations[name] = replace(operation, cancel_requested=True)

    def delete_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> None:
        with self._path.call("DeleteOperation", name, now, fate):
            self._find_operation(name)
            del self._state.operations[name]

    def _find_operation(self, name: str) -> OperationRecord:
        found = self._state.operations.get(name)
        if found is None:
            raise texts.not_found(name)
        return found

    # --- guest attributes, catalogues

    def guest_attributes(
        self, name: str, query_path: str, worker_ids: Collection[str], now: datetime, fate: CallFate = PLAIN
    ) -> dict[int, tuple[GuestAttribute, ...]]:
        """Per worker number; *query_path* is `` or `hostkeys/` or `hostkeys/ssh-ed25519`; no *worker_ids* = all."""
        with self._path.call("GetGuestAttributes", name, now, fate):
            life = self._find(name)
            asked = [worker for worker in life.workers if not worker_ids or str(worker.number) in worker_ids]
            matches = _query(query_path)
            found = {
                worker.number: tuple(one for one in worker.guest_attributes() if matches(one))
                if self._is_published(worker)
                else ()
                for worker in asked
                if not worker.missing
            }
            if self._state.config.guest_attributes.unpublished == "not-found" and not any(found.values()):
                raise texts.no_guest_attribute(query_path)
            return found

    def _is_published(self, worker: WorkerLife) -> bool:
        after = self._state.config.guest_attributes.published_after
        if after is None or worker.guest_since is None:
            return False
        return (self._state.now - worker.guest_since).total_seconds() >= after

    def locations(self) -> list[str]:
        """Names of the zones, sorted."""
        return sorted(self._state.config.zones)

    def accelerator_types(self, zone: str) -> list[str]:
        """Raises: ApiError (7): a zone that is not open."""
        if zone not in self._state.config.zones:
            raise texts.closed_zone(zone)
        return list(offered_types(zone, self._state.config.zones[zone]))

    def runtime_versions(self, zone: str) -> list[str]:
        """Raises: ApiError (7): a zone that is not open."""
        if zone not in self._state.config.zones:
            raise texts.closed_zone(zone)
        return list(offered_runtimes(zone, self._state.config.zones[zone]))


def zone_of(name: str) -> str:
    """The location in a resource name; empty when it has none."""
    parts = name.split("/")
    return parts[3] if len(parts) > 3 and parts[2] == "locations" else ""


def _permission(method: str) -> str:
    """`tpu.nodes.create` of `CreateNode`."""
    for ending, kind in (("Operations", "operations"), ("Operation", "operations"), ("GuestAttributes", "nodes")):
        if method.endswith(ending):
            verb = "getGuestAttributes" if kind == "nodes" else method.removesuffix(ending).lower()
            return f"tpu.{kind}.{verb}"
    if "QueuedResource" in method:
        return f"tpu.queuedresources.{method.replace('QueuedResource', '').removesuffix('s').lower()}"
    if method in ("SimulateMaintenanceEvent", "PerformMaintenance"):
        return f"tpu.nodes.{method[0].lower()}{method[1:]}"
    return f"tpu.nodes.{method.removesuffix('s').removesuffix('Node').lower()}"


def _query(query_path: str) -> Callable[[GuestAttribute], bool]:
    """A namespace, a namespace and a key, or everything."""
    namespace, _, key = query_path.strip("/").partition("/")
    return lambda one: namespace in ("", one.namespace) and key in ("", one.key)


def _as_deleted(life: NodeLife) -> dict[str, Any]:
    """The node at its delete, for the audit log, so that a check need not replay its life."""
    record = life.record
    return {
        "id": record.id,
        "labels": dict(record.spec.labels),
        "state": int(record.state),
        "health": int(record.health),
        "serving": life.is_serving,
    }


def page_token_of(zone: str, last_id: str) -> str:
    """The token of the page after that entry."""
    return base64.urlsafe_b64encode(f"{zone}/{last_id}".encode()).decode()


def last_key(token: str) -> tuple[str, str] | None:
    """Zone and id of the last entry of the page before. Raises: ApiError (3)."""
    if not token:
        return None
    try:
        zone, slash, node_id = base64.urlsafe_b64decode(token.encode()).decode().partition("/")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        slash = ""
    if not slash:
        raise texts.bad_argument("Invalid page_token.")
    return zone, node_id
