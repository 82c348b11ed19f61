"""The node methods of the emulated API: what each is refused for, what it answers, and what it sets going."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.capacity import RateWindow
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.gate import Gate
from tpucare.testbed.emulator.world.machine_effects import Kill
from tpucare.testbed.emulator.world.machinery import CAPACITY_TIERS
from tpucare.testbed.emulator.world.policies import check_network
from tpucare.testbed.emulator.world.records import (
    PLAIN,
    CallFate,
    NodePage,
    NodePath,
    NodeRecord,
    NodeSpec,
    OperationRecord,
    parse_parent,
)
from tpucare.testbed.emulator.world.requests import check_changeable, check_spec
from tpucare.testbed.emulator.world.state import NodeLife, pair

UPDATABLE = ("description", "tags", "labels", "metadata", "network_config.enable_external_ips")


class PageAsk(NamedTuple):
    """What a page of a listing is made of. zone: `-` is all but the *dark* ones; after: zone and name, if any."""

    project: str
    zone: str
    size: int
    dark: frozenset[str]
    after: tuple[str, str] | None


class Calls(Gate):
    """Create, get, list, delete, update, stop and start. All of them raise ApiError."""

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        super().__init__(config, seed=seed, start=start)
        self._create_rate = RateWindow(config.rates.create)
        self._delete_rate = RateWindow(config.rates.delete)
        self._call_rng = self.state.stream("calls")

    # --- nodes

    def create_node(
        self, parent: str, node_id: str, spec: NodeSpec, now: datetime, fate: CallFate = PLAIN, *, request_id: str = ""
    ) -> OperationRecord:
        """The operation, open; the node is there from now on, and visible within about a second."""
        with self._call("CreateNode", f"{parent}/nodes/{node_id}", now, fate) as said:
            said["labels"] = dict(spec.labels)
            said["metadata"] = dict(spec.metadata)
            said["accelerator"] = spec.accelerator_type
            project, zone = parse_parent(parent)
            path = NodePath(project, zone, node_id)
            if (before := self._asked_before("CreateNode", str(path), request_id)) is not None:
                return before
            if not self._create_rate.admit(project, self.state.now):
                raise texts.rate_limit("create", project, self._create_rate.limit or 0)
            if zone == "-":
                raise texts.bad_argument("A node is created in one zone.")
            kept, accelerator = check_spec(zone, node_id, spec, self.config)
            check_network(project, kept, self.config.project)
            if path in self.state.nodes:
                raise texts.already_exists(path)
            exceeded = self.quota.exceeded(project, zone, accelerator, CAPACITY_TIERS[kept.tier])
            if exceeded:
                raise texts.quota(exceeded, project)
            operation = self._begin(path, kept, accelerator)
            self._remember_request("CreateNode", str(path), request_id, operation)
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
            ask = self._page_ask(parent, page_size, page_token)
            found = list(islice(self.state.listing(ask.project).after(ask.zone, ask.after, ask.dark), ask.size + 1))
            page = found[: ask.size]
            token = page_token_of(page[-1].path.zone, page[-1].path.node_id) if len(found) > ask.size else ""
            said["count"] = len(page)
            return NodePage(tuple(page), token, tuple(sorted(ask.dark)))

    def _page_ask(self, parent: str, page_size: int, page_token: str) -> PageAsk:
        """Raises: ApiError (3): no parent, no size or no token of ours."""
        project, zone = parse_parent(parent)
        settings = self.config.listing
        if settings.page_refused is not None and page_size > settings.page_refused:
            raise texts.page_too_large(settings.page_refused)
        size = min(page_size or settings.page_default, settings.page_cap)
        if size < 0:
            raise texts.bad_argument("page_size must not be negative.")
        dark = self.fates.dark_zones(self.state.now) if zone == "-" else frozenset()
        return PageAsk(project, zone, size, dark, last_key(page_token))

    def look_at_list(self, project: str, now: datetime, fate: CallFate = PLAIN) -> frozenset[str]:
        """
        One ListNodes call over all zones whose page is left to the caller to read (`state.listing`); gives dark zones.

        For callers in the same process, to whom a page of a thousand nodes that did not change should cost nothing.
        """
        with self._call("ListNodes", f"projects/{project}/locations/-", now, fate):
            return self.fates.dark_zones(self.state.now)

    def delete_node(self, name: str, now: datetime, fate: CallFate = PLAIN, *, request_id: str = "") -> OperationRecord:
        """Accepted in every state; DELETING for a while, then 404."""
        with self._call("DeleteNode", name, now, fate) as said:
            if (before := self._asked_before("DeleteNode", name, request_id)) is not None:
                return before
            life = self._find(name)
            if not self._delete_rate.admit(life.path.project, self.state.now):
                raise texts.rate_limit("delete", life.path.project, self._delete_rate.limit or 0)
            said |= self._as_deleted(life)
            if not life.deleting:
                operation = self._begin_delete(life)
            else:
                said["repeated"] = True
                operation = self._repeat_delete(life)
                code = self._call_rng.choice(self.config.faults.repeated_delete)
                if code:
                    raise texts.deleting_already(life.path, code)
            said["operation"] = operation.name
            self._remember_request("DeleteNode", name, request_id, operation)
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


def _merged(spec: NodeSpec, mask: tuple[str, ...], new: NodeSpec) -> NodeSpec:
    changes: dict[str, Any] = {path: getattr(new, path) for path in mask if path in UPDATABLE[:4]}
    if UPDATABLE[4] in mask:
        changes["network"] = replace(spec.network, enable_external_ips=new.network.enable_external_ips)
    return replace(spec, **changes)


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
