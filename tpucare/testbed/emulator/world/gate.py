"""
The gate of the emulated API: the way of every call, and the methods that only look things up.

Every call first lets time catch up, and leaves one line in the audit log, whatever its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.capacity import RateWindow
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.queued_life import QueueLife
from tpucare.testbed.emulator.world.records import (
    PLAIN,
    ApiError,
    CallFate,
    GuestAttribute,
    OperationRecord,
    parse_node_path,
    parse_parent,
)
from tpucare.testbed.emulator.world.requests import offered_runtimes, offered_types
from tpucare.testbed.emulator.world.state import NodeLife, WorkerLife


class Gate(QueueLife):
    """Faults, permissions and the log; operations, guest attributes, catalogues. Methods raise ApiError."""

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        super().__init__(config, seed=seed, start=start)
        self._requests: dict[tuple[str, str, str], str] = {}
        self._read_rate = RateWindow(config.rates.read)

    def limit_reads(self, limit: int | None) -> None:
        """From now on, over whatever the world was made with."""
        self._read_rate.limit = limit

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
        """`answer`: lost when the caller cannot know how it ended; `latency` in seconds, `under_way` before `at`."""
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
            under_way=round(fate.before_seconds, 6) if applied else 0.0,
            **fields,
        )

    def _check_open(self, method: str, name: str) -> None:
        parts = name.split("/")
        project = parts[1] if len(parts) > 1 else ""
        zone = zone_of(name)
        parent = f"projects/{project}/locations/{zone}"
        access = self.config.access
        permission = _permission(method)
        if self.config.project.refuses:
            raise texts.project_refuses(self.config.project.refuses, project)
        is_foreign = access.projects is not None and project not in access.projects
        if is_foreign or permission in access.denied_permissions:
            raise texts.permission(permission, parent)
        if method.startswith(("Get", "List")) and not self._read_rate.admit(project, self.state.now):
            raise texts.read_rate(project, self._read_rate.limit or 0)
        if zone not in ("", "-") and zone not in self.config.zones:
            raise texts.closed_zone(zone)

    def _find(self, name: str) -> NodeLife:
        life = self.state.nodes.get(parse_node_path(name))
        if life is None:
            raise texts.not_found(name)
        return life

    # --- operations

    def of_version(self, operation: OperationRecord, version: str) -> OperationRecord:
        """The operation, from now on in messages of *version*, unless it was begun in another before."""
        if operation.api_version == version or operation.name not in self.state.operations:
            return operation
        self.state.operations[operation.name] = replace(self.state.operations[operation.name], api_version=version)
        return self.state.operations[operation.name]

    def _asked_before(self, method: str, subject: str, request_id: str) -> OperationRecord | None:
        """What the same request, told by its id, began earlier; it must not begin it twice."""
        return self.state.operations.get(self._requests.get((method, subject, request_id), "")) if request_id else None

    def _remember_request(self, method: str, subject: str, request_id: str, operation: OperationRecord) -> None:
        if not request_id:
            return
        # An id is worth as long as its operation can be read.
        self._requests = {key: name for key, name in self._requests.items() if name in self.state.operations}
        self._requests[method, subject, request_id] = operation.name

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
            found = {
                worker.number: tuple(one for one in worker.guest_attributes() if matches(one))
                if self._is_published(worker)
                else ()
                for worker in asked
                if not worker.missing
            }
            if self.config.guest_attributes.unpublished == "not-found" and not any(found.values()):
                raise texts.no_guest_attribute(query_path)
            return found

    def _is_published(self, worker: WorkerLife) -> bool:
        after = self.config.guest_attributes.published_after
        if after is None or worker.guest_since is None:
            return False
        return (self.state.now - worker.guest_since).total_seconds() >= after

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
    if "QueuedResource" in method:
        return f"tpu.queuedresources.{method.replace('QueuedResource', '').removesuffix('s').lower()}"
    if method in ("SimulateMaintenanceEvent", "PerformMaintenance"):
        return f"tpu.nodes.{method[0].lower()}{method[1:]}"
    return f"tpu.nodes.{method.removesuffix('s').removesuffix('Node').lower()}"


def _query(query_path: str) -> Callable[[GuestAttribute], bool]:
    """A namespace, a namespace and a key, or everything."""
    namespace, _, key = query_path.strip("/").partition("/")
    return lambda one: namespace in ("", one.namespace) and key in ("", one.key)
