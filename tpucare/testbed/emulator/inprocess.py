"""
`ports.Cloud` directly over a World, without gRPC: for stories and simulations in virtual time.

It passes the same contract tests as the real client over the real service, shares its classification of errors and
its differ of snapshots, and honours the fate that `CallPath.fate` draws: latency, deadlines, lost answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TypeVar

from tpucare.adapters.google.classify import DEADLINE_EXCEEDED, READ_TRIES, Where, classify, is_worth_repeating
from tpucare.adapters.google.snapshot import SnapshotDiffer
from tpucare.model.errors import Transient
from tpucare.model.resources import (
    Endpoint,
    Health,
    Listing,
    Node,
    NodeKey,
    NodeRequest,
    NodeState,
    Operation,
    Place,
    Provisioning,
    QueuedRequest,
    QueuedResource,
    QueuedState,
    QueueListing,
    shared_labels,
)
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.queued_records import (
    Initiator,
    QueuedNodeSpec,
    QueuedPage,
    QueuedPath,
    QueuedRecord,
    QueuedSpec,
    Validity,
)
from tpucare.testbed.emulator.world.records import (
    ApiError,
    CallFate,
    NetworkConfig,
    NodePath,
    NodeRecord,
    NodeSpec,
    OperationRecord,
)
from tpucare.testbed.emulator.world.state import ChangedKeys, Listings
from tpucare.testbed.emulator.world.world import World

T = TypeVar("T")

PAGE_SIZE = 1000
PEER = "in-process"
SSH_KEYS = "ssh-keys"


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest wait for one answer, as the real client has them. `listing` is per page."""

    listing: timedelta = timedelta(seconds=30)
    read: timedelta = timedelta(seconds=10)
    write: timedelta = timedelta(seconds=30)


class InProcessCloud:
    """
    `ports.Cloud`. Not thread-safe: virtual time has one thread.

    now:  the virtual clock
    wait: called with every length (seconds) that a caller of the real service would wait for an answer; a virtual
          executor lets the effect end so much later. The world sees a call at the instant at which it is made.
    `asked` is called with method and name of every call, also of reads, which an audit log may leave out.
    """

    def __init__(
        self,
        world: World,
        *,
        now: Callable[[], datetime],
        wait: Callable[[float], object] = lambda _seconds: None,
        limits: Limits = Limits(),
    ) -> None:
        self._world = world
        self._now = now
        self._wait = wait
        self._limits = limits
        self.asked: Callable[[str, str], object] = lambda _method, _name: None
        self._followed: dict[str, _Followed] = {}

    def list_nodes(self, project: str) -> Listing:
        shown = self._world.state.listing(project)
        followed = self._followed.get(project)
        if followed is None:
            followed = self._followed[project] = _Followed(SnapshotDiffer(project, node_of), shown.follow())
        parent = f"projects/{project}/locations/-"
        pages = max(1, -(-len(shown) // PAGE_SIZE))
        dark: frozenset[str] = frozenset()
        for _ in range(pages):
            dark = self._call(Where.LIST, "ListNodes", parent, self._limits.listing, self._list_call(project))
        return followed.listing(shown, dark, self._now())

    def close(self) -> None:
        """Stop following listings; else each of their changes would be recorded for a reader that is gone."""
        self._followed.clear()

    def _list_call(self, project: str) -> Callable[[CallFate], frozenset[str]]:
        return lambda fate: self._world.api.list_in_place(project, self._now(), fate)

    def get_node(self, key: NodeKey) -> Node:
        return node_of(key, self._get(key))

    def create_node(self, request: NodeRequest) -> Operation:
        parent = f"projects/{request.key.project}/locations/{request.key.zone}"
        spec = spec_of(request)
        record = self._call(
            Where.CREATE,
            "CreateNode",
            _path(request.key),
            self._limits.write,
            lambda fate: self._world.api.create_node(parent, request.key.name, spec, self._now(), fate),
        )
        return operation_of(record)

    def get_operation(self, name: str) -> Operation:
        record = self._read(
            Where.GET_OPERATION,
            "GetOperation",
            name,
            lambda fate: self._world.api.get_operation(name, self._now(), fate),
        )
        return operation_of(record)

    def delete_node(self, key: NodeKey) -> None:
        name = _path(key)
        self._call(
            Where.DELETE,
            "DeleteNode",
            name,
            self._limits.write,
            lambda fate: self._world.api.delete_node(name, self._now(), fate),
        )

    def add_ssh_key(self, key: NodeKey, line: str) -> None:
        name, metadata = _path(key), self._get(key).spec.metadata
        lines = [known.strip() for known in metadata.get(SSH_KEYS, "").splitlines() if known.strip()]
        if line.strip() in lines:
            return
        self._update(name, "metadata", NodeSpec(metadata={**metadata, SSH_KEYS: "\n".join([*lines, line.strip()])}))

    def add_labels(self, key: NodeKey, labels: Mapping[str, str]) -> None:
        self._update(_path(key), "labels", NodeSpec(labels={**self._get(key).spec.labels, **labels}))

    def _update(self, name: str, path: str, spec: NodeSpec) -> None:
        self._call(
            Where.UPDATE,
            "UpdateNode",
            name,
            self._limits.write,
            lambda fate: self._world.api.update_node(name, (path,), spec, self._now(), fate),
        )

    def host_keys(self, key: NodeKey) -> Mapping[int, tuple[str, ...]]:
        name = _path(key)
        found = self._read(
            Where.GUEST,
            "GetGuestAttributes",
            name,
            lambda fate: self._world.api.guest_attributes(name, "hostkeys/", (), self._now(), fate),
        )
        keys = {number: tuple(f"{item.key} {item.value}" for item in items) for number, items in found.items()}
        return {number: lines for number, lines in keys.items() if lines}

    def list_queued(self, project: str) -> QueueListing:
        parent, token = f"projects/{project}/locations/-", ""
        records: list[QueuedRecord] = []
        dark: set[str] = set()
        while True:
            call = self._queue_call(parent, token)
            page = self._call(Where.LIST, "ListQueuedResources", parent, self._limits.listing, call)
            records += page.resources
            dark.update(zone.rsplit("/", 1)[-1] for zone in page.unreachable)
            token = page.next_page_token
            if not token:
                break
        keyed = ((NodeKey(project, record.path.zone, record.path.queued_id), record) for record in records)
        return QueueListing(project, {key: queued_of(key, record) for key, record in keyed}, frozenset(dark))

    def _queue_call(self, parent: str, token: str) -> Callable[[CallFate], QueuedPage]:
        return lambda fate: self._world.queued_api.list_queued_resources(parent, PAGE_SIZE, token, self._now(), fate)

    def get_queued(self, key: NodeKey) -> QueuedResource:
        name = _queued_path(key)
        record = self._read(
            Where.GET,
            "GetQueuedResource",
            name,
            lambda fate: self._world.queued_api.get_queued_resource(name, self._now(), fate),
        )
        return queued_of(key, record)

    def create_queued(self, request: QueuedRequest) -> None:
        parent, spec = f"projects/{request.key.project}/locations/{request.key.zone}", queue_spec_of(request)
        self._call(
            Where.CREATE,
            "CreateQueuedResource",
            _queued_path(request.key),
            self._limits.write,
            lambda fate: self._world.queued_api.create_queued_resource(
                parent, request.key.name, spec, self._now(), fate, request_id=request.request_id
            ),
        )

    def delete_queued(self, key: NodeKey) -> None:
        name = _queued_path(key)
        self._call(
            Where.DELETE,
            "DeleteQueuedResource",
            name,
            self._limits.write,
            lambda fate: self._world.queued_api.delete_queued_resource(name, True, self._now(), fate),
        )

    def _get(self, key: NodeKey) -> NodeRecord:
        name = _path(key)
        return self._read(Where.GET, "GetNode", name, lambda fate: self._world.api.get_node(name, self._now(), fate))

    def _read(self, where: Where, method: str, name: str, act: Callable[[CallFate], T]) -> T:
        """A read, repeated as the real client repeats it."""
        for _ in range(READ_TRIES - 1):
            try:
                return self._call(where, method, name, self._limits.read, act)
            except Transient as error:
                if not is_worth_repeating(error):
                    raise
        return self._call(where, method, name, self._limits.read, act)

    def _call(self, where: Where, method: str, name: str, deadline: timedelta, act: Callable[[CallFate], T]) -> T:
        """One call with the fate that the world draws for it; after its deadline the caller gets no answer."""
        self.asked(method, name)
        fate = self._world.calls.fate(method, name, self._now(), PEER)
        limit = deadline.total_seconds()
        with _translated(where):
            result: T | None = None
            refusal = fate.error
            if fate.before_seconds > limit:
                # It takes effect after its caller has given up.
                self._world.state.timeline.after(fate.before_seconds, lambda: self._apply_late(act, fate))
            elif fate.applied:
                try:
                    result = act(fate)
                except ApiError as error:
                    refusal = refusal or error
            self._wait(min(fate.latency_seconds, limit))
            if fate.latency_seconds > limit:
                raise ApiError(DEADLINE_EXCEEDED, "Deadline Exceeded")
            if refusal is not None:
                raise refusal
        assert result is not None
        return result

    def _apply_late(self, act: Callable[[CallFate], object], fate: CallFate) -> None:
        """Apply a call whose caller has given up; its answer is lost."""
        with suppress(ApiError):
            act(replace(fate, error=texts.lost()))


@dataclass(slots=True)
class _Followed:
    """One project as last listed, and the nodes that may have changed since."""

    differ: SnapshotDiffer[NodeRecord]
    touched: ChangedKeys
    was_dark: bool = False

    def listing(self, shown: Listings, dark: frozenset[str], now: datetime) -> Listing:
        """Costs as much as changed; where zones are dark, or were at the last listing, as much as all nodes."""
        touched = list(self.touched)
        self.touched.clear()
        # Nodes that a dark zone hid from the last listing have not changed, and are new to the caller all the same.
        was_dark, self.was_dark = self.was_dark, bool(dark)
        if not (dark or was_dark):
            project = self.differ.project
            changes = ((str(NodePath(project, *key)), shown.get(key)) for key in touched)
            if (listing := self.differ.incremental(changes, now)) is not None:
                return listing
        records = [(record.name, record) for record in shown.after("-", None, dark)]
        return self.differ.full(records, dark, now)


@contextmanager
def _translated(where: Where) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise classify(error.code, error.message, where) from error


def node_of(key: NodeKey, record: NodeRecord) -> Node:
    """The record as the real client would hand it over."""
    spec = record.spec
    return Node(
        key=key,
        id=record.id,
        create_time=record.create_time,
        state=NodeState(record.state),
        health=Health(record.health),
        accelerator_type=spec.accelerator_type,
        provisioning=Provisioning(spec.tier),
        labels=spec.labels,
        endpoints=tuple(Endpoint(pair.internal, pair.external) for pair in record.endpoints),
        queued_resource=record.queued_resource,
    )


def operation_of(record: OperationRecord) -> Operation:
    error = classify(*record.error, Where.OPERATION) if record.done and record.error is not None else None
    return Operation(record.name, record.done, error, record.create_time)


def queued_of(key: NodeKey, record: QueuedRecord) -> QueuedResource:
    """The record as the real client would hand it over."""
    specs = record.spec.nodes
    return QueuedResource(
        key=key,
        create_time=record.create_time,
        state=QueuedState(record.state),
        labels=shared_labels([one.spec.labels for one in specs]),
        nodes=tuple(name for one in specs for name in one.ids(record.path.queued_id)),
        error=classify(*record.error, Where.OPERATION) if record.error is not None else None,
        suspended_by_service=record.initiator == Initiator.SERVICE,
    )


def queue_spec_of(request: QueuedRequest) -> QueuedSpec:
    """The settings that the real client sends in CreateQueuedResource."""
    place, parent = request.place, f"projects/{request.key.project}/locations/{request.key.zone}"
    node = QueuedNodeSpec(_settings(request), parent, request.key.name)
    is_reserved = place.provisioning is Provisioning.RESERVED
    return QueuedSpec(
        (node,),
        "spot" if place.provisioning is Provisioning.SPOT else "guaranteed",
        reservation_name=f"{parent}/reservations/-" if is_reserved else "",
        validity=Validity(until_after=place.valid_for),
        has_policy=place.valid_for is not None,
    )


def spec_of(request: NodeRequest) -> NodeSpec:
    """The settings that the real client sends in CreateNode."""
    tier = request.place.provisioning
    return replace(
        _settings(request),
        preemptible=tier is Provisioning.PREEMPTIBLE,
        spot=tier is Provisioning.SPOT,
        reserved=tier is Provisioning.RESERVED,
    )


def _settings(request: NodeRequest | QueuedRequest) -> NodeSpec:
    place = request.place
    return NodeSpec(
        accelerator_type=place.accelerator_type,
        runtime_version=place.runtime,
        network=_network(place),
        service_account=place.service_account,
        labels=dict(request.labels),
        metadata=dict(request.metadata),
        tags=place.network.tags,
    )


def _network(place: Place) -> NetworkConfig:
    network = place.network
    return NetworkConfig(network.name, network.subnetwork, enable_external_ips=network.external_ips)


def _queued_path(key: NodeKey) -> str:
    return str(QueuedPath(*key))


def _path(key: NodeKey) -> str:
    return str(NodePath(*key))
