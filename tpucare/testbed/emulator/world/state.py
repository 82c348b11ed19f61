"""
The state of a world: its instant, scheduled events, nodes, listings, operations, addresses, and the audit log.

Mechanics only; `life`, `queued_life`, `calls` and `operator` decide when and why something happens.
"""

from __future__ import annotations

import heapq
import ipaddress
import random
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from tpucare.model.accelerators import Accelerator
from tpucare.model.errors import ConfigError
from tpucare.testbed.emulator.world.capacity import Pool, QuotaUse
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.machine_effects import MachineEffect
from tpucare.testbed.emulator.world.queued_records import QueuedLife, QueuedPath
from tpucare.testbed.emulator.world.records import (
    AddressPair,
    GuestAttribute,
    NodePath,
    NodeRecord,
    OperationRecord,
    Response,
)

AuditRecord = dict[str, Any]


@dataclass(slots=True)
class WorkerLife:
    """One host VM. `missing`: it is never made. `up`: ordered to boot and not killed since. `silent`: it hangs."""

    number: int
    address: str
    missing: bool = False
    up: bool = False
    silent: bool = False
    guest: dict[tuple[str, str], str] = field(default_factory=dict)
    guest_since: datetime | None = None

    def guest_attributes(self) -> tuple[GuestAttribute, ...]:
        """The attributes that its guest agent wrote, published or not."""
        return tuple(GuestAttribute(space, key, value) for (space, key), value in sorted(self.guest.items()))


@dataclass(eq=False, slots=True)
class NodeLife:
    """
    One incarnation of a node, with the facts that the API does not show.

    doomed: its preemption is decided, its share of capacity is released
    dead:   no worker boots on it any more (its workers may only be silent)
    killed: every process on it was ended
    gone:   it does not exist any more; steps scheduled for it do nothing
    """

    record: NodeRecord
    accelerator: Accelerator
    workers: list[WorkerLife]
    create_operation: str
    hostname_stem: str
    pool: Pool | None = None
    visible: bool = False
    doomed: bool = False
    dead: bool = False
    killed: bool = False
    gone: bool = False
    deleting: bool = False
    stopped: bool = False
    stuck_repeats: int = 0
    delete_due: bool = False
    delete_operations: list[str] = field(default_factory=list)
    update_operation: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> NodePath:
        return self.record.path

    def release_capacity(self) -> None:
        """Give its share of the pool back; harmless when it has none."""
        if self.pool is not None:
            self.pool.release(self.record.id)

    @property
    def is_any_up(self) -> bool:
        """True when some worker was ordered to boot and not killed since: only then do machines get effects."""
        return any(worker.up for worker in self.workers)

    @property
    def is_serving(self) -> bool:
        """True when every worker is up and answers, and the node is neither preempted nor being deleted."""
        return not (self.doomed or self.deleting) and all(worker.up and not worker.silent for worker in self.workers)


class Timeline:
    """Scheduled events in order of time; events of the same instant keep the order in which they were scheduled."""

    def __init__(self, start: datetime) -> None:
        self.now = start
        self._heap: list[tuple[datetime, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: datetime, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + timedelta(seconds=seconds), event)

    def next_at(self) -> datetime | None:
        return self._heap[0][0] if self._heap else None

    def advance(self, now: datetime) -> None:
        while self._heap and self._heap[0][0] <= now:
            when, _, event = heapq.heappop(self._heap)
            self.now = when
            event()
        self.now = max(self.now, now)


class ChangedKeys(dict[tuple[str, str], None]):
    """Keys (zone, node id) of changed nodes that a reader has not read yet, in order; the reader empties it."""


class Listings:
    """
    The nodes that ListNodes shows for one project, sorted by zone and name: a page costs as much as it holds.

    Separate from the nodes themselves, because lists lag behind them. `follow` returns the keys that changed, so that a
    listing costs its reader as much as it changed.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[str, str]] = []
        self._records: dict[tuple[str, str], NodeRecord] = {}
        self._followers: list[weakref.ref[ChangedKeys]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: tuple[str, str]) -> NodeRecord | None:
        return self._records.get(key)

    def follow(self) -> ChangedKeys:
        """A record of every key that is shown, changed or hidden from now on; kept up while the caller holds it."""
        touched = ChangedKeys(dict.fromkeys(self._keys))
        self._followers = [one for one in self._followers if one() is not None]
        self._followers.append(weakref.ref(touched))
        return touched

    def _touch(self, key: tuple[str, str]) -> None:
        for follower in self._followers:
            if (touched := follower()) is not None:
                touched[key] = None

    def show(self, record: NodeRecord) -> None:
        key = (record.path.zone, record.path.node_id)
        if key not in self._records:
            insort(self._keys, key)
        self._records[key] = record
        self._touch(key)

    def update(self, record: NodeRecord) -> None:
        """Show the new record of a node, if this incarnation is shown at all."""
        key = (record.path.zone, record.path.node_id)
        shown = self._records.get(key)
        if shown is not None and shown.id == record.id:
            self._records[key] = record
            self._touch(key)

    def hide(self, path: NodePath, node_id: int) -> None:
        key = (path.zone, path.node_id)
        shown = self._records.get(key)
        if shown is not None and shown.id == node_id:
            del self._records[key]
            del self._keys[bisect_left(self._keys, key)]
            self._touch(key)

    def after(self, zone: str, last: tuple[str, str] | None, dark: frozenset[str]) -> Iterator[NodeRecord]:
        """Records of *zone* (`-`: of all) behind *last*, those of *dark* zones left out."""
        index = bisect_right(self._keys, last) if last else bisect_left(self._keys, ("" if zone == "-" else zone, ""))
        while index < len(self._keys):
            key = self._keys[index]
            if zone not in ("-", key[0]):
                return
            if key[0] in dark:
                index = bisect_left(self._keys, (key[0] + "\0", ""))
                continue
            yield self._records[key]
            index += 1


class AddressPool:
    """Unique addresses; a freed address is used again before any fresh one, as in the real world."""

    def __init__(self, network: str) -> None:
        try:
            self._network = ipaddress.IPv4Network(network)
        except ValueError as error:
            raise ConfigError(f"addresses.network: {error}") from error
        self._fresh = (str(address) for address in self._network.hosts() if int(address) & 0xFF not in (0, 255))
        self._freed: list[int] = []

    def allocate(self) -> str:
        """Raises: ConfigError: the network is used up."""
        if self._freed:
            return str(ipaddress.IPv4Address(heapq.heappop(self._freed)))
        address = next(self._fresh, None)
        if address is None:
            raise ConfigError(f"addresses.network: {self._network} has no address left")
        return address

    def free(self, address: str) -> None:
        heapq.heappush(self._freed, int(ipaddress.IPv4Address(address)))


class State:
    """
    Everything that a world remembers, shared by all its parts.

    config:         the settings in force; the operator may replace them
    unknown_fields: show every answer of the API with fields that no package knows
    """

    def __init__(self, config: WorldConfig, start: datetime, seed: int) -> None:
        """Raises: ConfigError: *config* has an unreadable network."""
        self.config = config
        self.unknown_fields = False
        self.timeline = Timeline(start)
        self.nodes: dict[NodePath, NodeLife] = {}
        self.by_id: dict[int, NodeLife] = {}
        self.queue: dict[QueuedPath, QueuedLife] = {}
        self.listings: dict[str, Listings] = {}
        self.operations: dict[str, OperationRecord] = {}
        self.addresses = AddressPool(config.addresses.network)
        self.quota = QuotaUse(config.quotas)
        self.effects: list[MachineEffect] = []
        self.records: list[AuditRecord] = []
        self.keep_records = True
        self.on_record: Callable[[AuditRecord], None] | None = None
        self._seed = seed
        self._operation_kept = timedelta(seconds=config.latencies.operation_kept)
        self._ended: deque[tuple[datetime, str]] = deque()
        self._ids = self.stream("ids")

    @property
    def now(self) -> datetime:
        return self.timeline.now

    def stream(self, name: str) -> random.Random:
        """A random stream of its own, so that draws of one part of a world do not shift those of another."""
        return random.Random(f"{self._seed}/{name}")

    def log(self, kind: str, **fields: object) -> None:
        """Append to the audit log; JSON values only."""
        if not self.keep_records and self.on_record is None:
            return
        record: AuditRecord = {"at": stamp(self.now), "kind": kind, **fields}
        if self.keep_records:
            self.records.append(record)
        if self.on_record is not None:
            self.on_record(record)

    def log_node(self, life: NodeLife, event: str, **fields: object) -> None:
        """Log an event in the life of a node."""
        record = life.record
        self.log("node", event=event, name=record.name, id=record.id, state=int(record.state), **fields)

    def order_effect(self, effect: MachineEffect) -> None:
        """Queue an effect for the machines, and log it."""
        self.effects.append(effect)
        kind = type(effect).__name__.lower()
        fields: dict[str, object] = {"name": str(effect.path), "id": effect.node_id}
        for name in ("worker", "address"):
            if hasattr(effect, name):
                fields[name] = getattr(effect, name)
        self.log("machine", event=kind, **fields)

    # --- nodes

    def listing(self, project: str) -> Listings:
        return self.listings.setdefault(project, Listings())

    def change(self, life: NodeLife, **changes: Any) -> None:
        """Change the record of a node, which the API shows; *changes* are fields of NodeRecord."""
        life.record = replace(life.record, **changes)
        self.listing(life.path.project).update(life.record)

    def new_id(self) -> int:
        return self._ids.getrandbits(62) | (1 << 61)

    def new_stem(self) -> str:
        """First part of the host names of one incarnation: `t1v-n-<8 hex>`."""
        return f"t1v-n-{self._ids.getrandbits(32):08x}"

    def event_id(self) -> int:
        return self._ids.getrandbits(64)

    # --- operations

    def open_operation(self, verb: str, path: NodePath) -> OperationRecord:
        """Begin an operation on a node."""
        return self.open_operation_on(verb, path.parent, str(path))

    def open_operation_on(self, verb: str, parent: str, target: str) -> OperationRecord:
        """Begin an operation on the resource called *target*."""
        ids = self._ids
        millis = int(self.now.timestamp() * 1000)
        tail = f"{ids.getrandbits(52):013x}-{ids.getrandbits(32):08x}-{ids.getrandbits(32):08x}"
        operation = OperationRecord(f"{parent}/operations/operation-{millis}-{tail}", verb, target, self.now)
        self.operations[operation.name] = operation
        return operation

    def close_operation(
        self, name: str, *, error: tuple[int, str] | None = None, response: Response | None = None
    ) -> bool:
        """End an operation, once; False when it has ended before or was dropped."""
        operation = self.operations.get(name)
        if operation is None or operation.done:
            return False
        self.operations[name] = replace(operation, done=True, end_time=self.now, error=error, response=response)
        self._ended.append((self.now, name))
        fields: dict[str, object] = {"verb": operation.verb, "target": operation.target}
        if error is not None:
            fields |= {"code": error[0], "message": error[1]}
        self.log("operation", name=name, **fields)
        return True

    def advance(self, now: datetime) -> None:
        """Run the events that are due, and drop operations that ended too long ago."""
        self.timeline.advance(now)
        while self._ended and self._ended[0][0] + self._operation_kept < self.now:
            self.operations.pop(self._ended.popleft()[1], None)


def stamp(instant: datetime) -> str:
    """An instant as the audit log writes it."""
    return instant.isoformat(timespec="microseconds")


def pair(address: str, external: bool) -> AddressPair:
    """The endpoint of a worker: both addresses are the same loopback address."""
    return AddressPair(address, address if external and address else "")
