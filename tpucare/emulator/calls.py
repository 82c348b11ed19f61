"""
The API of the emulated cloud: what each call is refused for, what it answers, and what it sets going.

Every call first lets time catch up, and leaves one line in the audit log, whatever its end.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any

from tpucare.emulator import errors_text as texts
from tpucare.emulator.config import WorldConfig
from tpucare.emulator.life import CAPACITY_TIERS, Life
from tpucare.emulator.quota import RateWindow
from tpucare.emulator.records import (
    PLAIN,
    ApiError,
    CallFate,
    GuestAttribute,
    Kill,
    NodePage,
    NodePath,
    NodeRecord,
    NodeSpec,
    OperationRecord,
    parse_node_path,
    parse_parent,
)
from tpucare.emulator.requests import check_changeable, check_spec, offered_runtimes, offered_types
from tpucare.emulator.state import NodeLife, pair
from tpucare.model import Health, NodeState

UPDATABLE = ("description", "tags", "labels", "metadata", "network_config.enable_external_ips")
REPEATED_DELETE_ANSWERS = (0, texts.FAILED_PRECONDITION, texts.ABORTED)
"""A delete of a node in DELETING: a second operation, or one of these codes. Not documented, so each is met."""


class Calls(Life):
    """The methods of the Tpu, Operations and Locations services. All of them raise ApiError."""

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        super().__init__(config, seed=seed, start=start)
        self._create_rate = RateWindow(config.rates.create)
        self._delete_rate = RateWindow(config.rates.delete)
        self._call_rng = self.state.stream("calls")

    # --- the way of a call

    def fate(self, method: str, name: str, now: datetime, peer: str = "") -> CallFate:
        """Draw what becomes of one call of *method* (`CreateNode`, ...) on resource or parent *name*."""
        self.state.advance(now)
        fate = self.fates.draw(method, zone_of(name), self.state.now, peer)
        if not fate.applied and fate.error is not None:
            self._log_call(method, name, fate, code=fate.error.code, message=fate.error.message, applied=False)
        return fate

    @contextmanager
    def _call(self, method: str, name: str, now: datetime, fate: CallFate) -> Iterator[dict[str, Any]]:
        """Let time catch up, check that the place is open, log the end; the body adds fields to what is logged."""
        self.state.advance(now)
        said: dict[str, Any] = {}
        try:
            self._check_open(method, name)
            yield said
        except ApiError as error:
            self._log_call(method, name, fate, code=error.code, message=error.message, applied=True, **said)
            raise texts.with_event_id(error, self.state.event_id()) from None
        self._log_call(method, name, fate, code=0, applied=True, **said)

    def _log_call(self, method: str, name: str, fate: CallFate, *, applied: bool, **fields: Any) -> None:
        """`answer`: lost when the caller cannot know how it ended; `latency` in seconds."""
        if not self.config.audit_reads and method.startswith(("Get", "List")):
            return
        lost = fate.error is not None and fate.error.code in (texts.UNAVAILABLE, 4)
        answer = "lost" if lost else "given"
        latency = round(fate.latency_seconds, 6)
        self.state.log(
            "call",
            method=method,
            name=name,
            peer=fate.peer,
            applied=applied,
            answer=answer,
            latency=latency,
            **fields,
        )

    def _check_open(self, method: str, name: str) -> None:
        parts = name.split("/")
        project = parts[1] if len(parts) > 1 else ""
        zone = zone_of(name)
        parent = f"projects/{project}/locations/{zone}"
        access = self.config.access
        permission = _permission(method)
        is_foreign = access.projects is not None and project not in access.projects
        if is_foreign or permission in access.denied_permissions:
            raise texts.permission(permission, parent)
        if zone not in ("", "-") and zone not in self.config.zones:
            raise texts.closed_zone(zone)

    def _find(self, name: str) -> NodeLife:
        life = self.state.nodes.get(parse_node_path(name))
        if life is None:
            raise texts.not_found(name)
        return life

    # --- nodes

    def create_node(
        self, parent: str, node_id: str, spec: NodeSpec, now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """The operation, open; the node is there from now on, and visible within about a second."""
        with self._call("CreateNode", f"{parent}/nodes/{node_id}", now, fate) as said:
            said["labels"] = dict(spec.labels)
            said["metadata"] = dict(spec.metadata)
            said["accelerator"] = spec.accelerator_type
            project, zone = parse_parent(parent)
            path = NodePath(project, zone, node_id)
            if not self._create_rate.admit(project, self.state.now):
                raise texts.rate_limit("create", project, self._create_rate.limit or 0)
            if zone == "-":
                raise texts.bad_argument("A node is created in one zone.")
            kept, accelerator = check_spec(zone, node_id, spec, self.config)
            if path in self.state.nodes:
                raise texts.already_exists(path)
            exceeded = self.quota.exceeded(project, zone, accelerator, CAPACITY_TIERS[kept.tier])
            if exceeded:
                raise texts.quota(exceeded, project)
            operation = self._begin(path, kept, accelerator)
            said["operation"] = operation.name
            said["id"] = self.state.nodes[path].record.id
            return operation

    def get_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> NodeRecord:
        """Raises: ApiError (5): no such node, or not yet visible."""
        with self._call("GetNode", name, now, fate):
            life = self._find(name)
            if not life.visible:
                raise texts.not_found(name)
            return life.record

    def list_nodes(
        self, parent: str, page_size: int, page_token: str, now: datetime, fate: CallFate = PLAIN
    ) -> NodePage:
        """One page, by zone and name. *parent* may end in `locations/-`; then dark zones are named in the answer."""
        with self._call("ListNodes", parent, now, fate) as said:
            project, zone = parse_parent(parent)
            settings = self.config.listing
            size = min(page_size or settings.page_default, settings.page_cap)
            if size < 0:
                raise texts.bad_argument("page_size must not be negative.")
            dark = self.fates.dark_zones(self.state.now) if zone == "-" else frozenset()
            found = list(islice(self.state.listing(project).after(zone, _last_key(page_token), dark), size + 1))
            page = found[:size]
            token = _token(page[-1].path) if len(found) > size else ""
            said["count"] = len(page)
            return NodePage(tuple(page), token, tuple(sorted(dark)))

    def delete_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """Accepted in every state; DELETING for a while, then 404."""
        with self._call("DeleteNode", name, now, fate) as said:
            life = self._find(name)
            if not self._delete_rate.admit(life.path.project, self.state.now):
                raise texts.rate_limit("delete", life.path.project, self._delete_rate.limit or 0)
            said |= self._as_deleted(life)
            if not life.deleting:
                operation = self._begin_delete(life)
            else:
                said["repeated"] = True
                operation = self._repeat_delete(life)
                code = self._call_rng.choice(REPEATED_DELETE_ANSWERS)
                if code:
                    raise texts.deleting_already(life.path, code)
            said["operation"] = operation.name
            return operation

    def _as_deleted(self, life: NodeLife) -> dict[str, Any]:
        """What the audit log says of the node that a delete meets, so that a check need not replay its life."""
        record = life.record
        return {
            "id": record.id,
            "labels": dict(record.spec.labels),
            "state": int(record.state),
            "health": int(record.health),
            "serving": life.is_serving,
        }

    def update_node(
        self, name: str, mask: Sequence[str], spec: NodeSpec, now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """*mask*: of description, tags, labels, metadata, network_config.enable_external_ips; values from *spec*."""
        with self._call("UpdateNode", name, now, fate) as said:
            said["mask"] = list(mask)
            life = self._find(name)
            unknown = [path for path in mask if path not in UPDATABLE]
            if unknown or not mask:
                raise texts.bad_argument(f"Invalid update_mask: {', '.join(unknown) or 'empty'}.")
            check_changeable(spec)
            if life.update_operation or life.deleting:
                raise texts.busy(life.path)
            operation = self.state.open_operation("update", life.path)
            life.update_operation = operation.name
            self._later(life, self.config.latencies.update, lambda: self._end_update(life, tuple(mask), spec))
            return operation

    def _end_update(self, life: NodeLife, mask: tuple[str, ...], spec: NodeSpec) -> None:
        name, life.update_operation = life.update_operation, ""
        state = NodeState(life.record.state)
        if state in (NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING):
            self.state.close_operation(name, error=texts.preempted_meanwhile("update", state.name))
            return
        self.state.change(life, spec=_merged(life.record.spec, mask, spec))
        if "network_config.enable_external_ips" in mask:
            external = spec.network.enable_external_ips
            endpoints = tuple(pair(one.internal, external) for one in life.record.endpoints)
            self.state.change(life, endpoints=endpoints)
        if "metadata" in mask:
            self._later(life, self.config.latencies.keys_usable, lambda: self._authorize(life))
        self.state.close_operation(name, response=life.record)

    def stop_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """Single-host nodes on demand only; their share of capacity stays theirs."""
        with self._call("StopNode", name, now, fate):
            life = self._stoppable(name, "stop", NodeState.READY)
            self._set_state(life, NodeState.STOPPING)
            operation = self.state.open_operation("stop", life.path)
            self._later(life, self.config.latencies.stop, lambda: self._end_stop(life, operation.name))
            return operation

    def start_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        with self._call("StartNode", name, now, fate):
            life = self._stoppable(name, "start", NodeState.STOPPED)
            self._set_state(life, NodeState.STARTING)
            life.stopped = False
            operation = self.state.open_operation("start", life.path)
            self._later(life, self.config.latencies.stop, lambda: self._end_start(life, operation.name))
            return operation

    def _stoppable(self, name: str, verb: str, wanted: NodeState) -> NodeLife:
        life = self._find(name)
        if life.record.spec.is_preemptible:
            raise texts.not_stoppable(verb, "it is preemptible")
        if len(life.workers) > 1:
            raise texts.not_stoppable(verb, "it has more than one host")
        if life.record.state != wanted:
            raise texts.not_stoppable(verb, f"it is in state {NodeState(life.record.state).name}")
        return life

    def _end_stop(self, life: NodeLife, operation: str) -> None:
        if life.record.state != NodeState.STOPPING:
            return
        life.stopped = True
        for worker in life.workers:
            worker.up = False
        self.state.tell(Kill(self.state.now, life.path, life.record.id))
        self._set_state(life, NodeState.STOPPED)
        self.state.log_node(life, "stopped")
        self.state.close_operation(operation, response=life.record)

    def _end_start(self, life: NodeLife, operation: str) -> None:
        if life.record.state != NodeState.STARTING:
            return
        self._set_state(life, NodeState.READY)
        self._set_health(life, Health.UNSPECIFIED)
        for worker in life.workers:
            self._later(life, self.config.latencies.boot_late, self._booting(life, worker))
        self.state.log_node(life, "ready")
        self.state.close_operation(operation, response=life.record)

    # --- operations

    def get_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        """Raises: ApiError (5): unknown, or finished some days ago."""
        with self._call("GetOperation", name, now, fate):
            return self._operation(name)

    def list_operations(self, parent: str, now: datetime, fate: CallFate = PLAIN) -> list[OperationRecord]:
        with self._call("ListOperations", parent, now, fate):
            project, zone = parse_parent(parent)
            prefix = f"projects/{project}/locations/"
            of_project = [one for name, one in self.state.operations.items() if name.startswith(prefix)]
            return [one for one in of_project if zone in ("-", zone_of(one.name))]

    def cancel_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> None:
        """Best effort: noted, and nothing else."""
        with self._call("CancelOperation", name, now, fate):
            operation = self._operation(name)
            if not operation.done:
                self.state.operations[name] = replace(operation, cancel_requested=True)

    def delete_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> None:
        with self._call("DeleteOperation", name, now, fate):
            self._operation(name)
            del self.state.operations[name]

    def _operation(self, name: str) -> OperationRecord:
        found = self.state.operations.get(name)
        if found is None:
            raise texts.not_found(name)
        return found

    # --- the rest

    def guest_attributes(
        self, name: str, query_path: str, worker_ids: Collection[str], now: datetime, fate: CallFate = PLAIN
    ) -> dict[int, tuple[GuestAttribute, ...]]:
        """Per worker number; *query_path* is `` or `hostkeys/` or `hostkeys/ssh-ed25519`; no *worker_ids* = all."""
        with self._call("GetGuestAttributes", name, now, fate):
            life = self._find(name)
            asked = [worker for worker in life.workers if not worker_ids or str(worker.number) in worker_ids]
            matches = _query(query_path)
            return {
                worker.number: tuple(one for one in worker.guest_attributes() if matches(one))
                for worker in asked
                if not worker.missing
            }

    def locations(self) -> list[str]:
        """Names of the zones, sorted."""
        return sorted(self.config.zones)

    def accelerator_types(self, zone: str) -> list[str]:
        """Raises: ApiError (7): a zone that is not open."""
        if zone not in self.config.zones:
            raise texts.closed_zone(zone)
        return list(offered_types(zone, self.config.zones[zone]))

    def runtime_versions(self, zone: str) -> list[str]:
        """Raises: ApiError (7): a zone that is not open."""
        if zone not in self.config.zones:
            raise texts.closed_zone(zone)
        return list(offered_runtimes(zone, self.config.zones[zone]))


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
    return f"tpu.nodes.{method.removesuffix('s').removesuffix('Node').lower()}"


def _merged(spec: NodeSpec, mask: tuple[str, ...], new: NodeSpec) -> NodeSpec:
    changes: dict[str, Any] = {path: getattr(new, path) for path in mask if path in UPDATABLE[:4]}
    if UPDATABLE[4] in mask:
        changes["network"] = replace(spec.network, enable_external_ips=new.network.enable_external_ips)
    return replace(spec, **changes)


def _query(query_path: str) -> Callable[[GuestAttribute], bool]:
    """A namespace, a namespace and a key, or everything."""
    namespace, _, key = query_path.strip("/").partition("/")
    return lambda one: namespace in ("", one.namespace) and key in ("", one.key)


def _token(last: NodePath) -> str:
    return base64.urlsafe_b64encode(f"{last.zone}/{last.node_id}".encode()).decode()


def _last_key(token: str) -> tuple[str, str] | None:
    if not token:
        return None
    try:
        zone, slash, node_id = base64.urlsafe_b64decode(token.encode()).decode().partition("/")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        slash = ""
    if not slash:
        raise texts.bad_argument("Invalid page_token.")
    return zone, node_id
