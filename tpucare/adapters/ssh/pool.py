"""
Kept connections: at most one per worker and `limit` in all, opened by one thread at a time per worker.

A connection in use is never closed to make room. With more workers than room, worker 0 of every node stays before the
others, and connections in regular use stay before newcomers: probes go round all workers, so a plain LRU would close
each connection just before it is needed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tpucare.adapters.ssh.connection import Connection
from tpucare.adapters.ssh.transport import Deadline
from tpucare.model.errors import WorkerSilent
from tpucare.model.resources import NodeKey, Worker

# Longer than the usual pause between two probes of one worker; a connection idle for longer makes room for a newcomer.
STALE_SECONDS = 60.0

Identity = tuple[NodeKey, int, int]
Connect = Callable[[Worker, Deadline, Callable[[Connection], None]], Connection]


@dataclass(eq=False, slots=True)
class _Entry:
    """One worker's connection. `connecting` is held while it is opened; the pool's lock guards the other fields."""

    connecting: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    dropped: bool = False


@dataclass(slots=True)
class _Use:
    """`temporary`: there was no room, so the connection is closed after use."""

    users: int = 0
    temporary: bool = False
    idle_since: float = 0.0


class ConnectionPool:
    """
    Leases connections. Thread-safe.

    `connect` opens a connection, which calls the last argument when it is lost. `lost` is called, in the connection's
    thread, for a worker whose connection ended and was not closed by us.
    """

    def __init__(self, connect: Connect, *, limit: int, lost: Callable[[Worker], None]) -> None:
        self._connect = connect
        self._limit = limit
        self._on_lost = lost
        self._lock = threading.Lock()
        self._entries: dict[Identity, _Entry] = {}
        self._nodes: dict[NodeKey, set[Identity]] = {}
        self._uses: dict[Connection, _Use] = {}
        self._idle_first: OrderedDict[Connection, None] = OrderedDict()
        self._idle_others: OrderedDict[Connection, None] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._uses)

    @contextmanager
    def lease(self, worker: Worker, deadline: Deadline) -> Iterator[Connection]:
        """
        A connection for the length of the block; a kept one may be dead without anybody knowing yet.

        Raises: as `connect`; WorkerSilent: another thread tried to connect for the whole deadline.
        """
        connection = self._obtain(worker, deadline)
        try:
            yield connection
        finally:
            self._give_back(connection)

    def is_known(self, worker: Worker) -> bool:
        """False after a `drop_node` of its node, until the next `lease`."""
        return identity(worker) in self._entries

    def drop_worker(self, worker: Worker) -> None:
        """Close the connection to *worker*; its next use connects anew."""
        with self._lock:
            entry = self._entries.get(identity(worker))
            if entry is not None:
                self._detach(entry)

    def drop_node(self, key: NodeKey) -> None:
        """Close the connections to a node; one that is being opened is closed as soon as it is open."""
        with self._lock:
            for one in self._nodes.pop(key, set()):
                entry = self._entries.pop(one)
                entry.dropped = True
                self._detach(entry)

    def close(self) -> list[Connection]:
        """Close every connection; returns those that were open."""
        with self._lock:
            self._closed = True
            open_now = list(self._uses)
        for key in list(self._nodes):
            self.drop_node(key)
        return open_now

    def _obtain(self, worker: Worker, deadline: Deadline) -> Connection:
        entry = self._entry(worker)
        if (connection := self._reuse(entry, worker)) is not None:
            return connection
        if not entry.connecting.acquire(timeout=deadline.remaining):
            raise WorkerSilent(f"no answer within {deadline.seconds:g} s (another thread connects)", host=worker.host)
        try:
            if (connection := self._reuse(entry, worker)) is not None:
                return connection
            connection = self._connect(worker, deadline, self._lost)
            self._add(entry, connection)
            return connection
        finally:
            entry.connecting.release()

    def _entry(self, worker: Worker) -> _Entry:
        with self._lock:
            if self._closed:
                raise WorkerSilent("closed from our side", host=worker.host)
            one = identity(worker)
            self._nodes.setdefault(worker.key, set()).add(one)
            return self._entries.setdefault(one, _Entry())

    def _reuse(self, entry: _Entry, worker: Worker) -> Connection | None:
        with self._lock:
            connection = entry.connection
            if connection is None:
                return None
            if not connection.alive or connection.worker.host != worker.host:
                self._detach(entry)
                return None
            self._uses[connection].users += 1
            self._idle(connection).pop(connection, None)
            return connection

    def _add(self, entry: _Entry, connection: Connection) -> None:
        with self._lock:
            if entry.dropped or not connection.alive:
                connection.close()
                raise WorkerSilent("dropped right after the login", host=connection.worker.host)
            entry.connection = connection
            self._uses[connection] = _Use(users=1)
            if len(self._uses) > self._limit:
                self._make_room(connection)

    def _make_room(self, newcomer: Connection) -> None:
        """Close the idle connection that is needed least, or mark *newcomer* as temporary."""
        others, first = next(iter(self._idle_others), None), next(iter(self._idle_first), None)
        if others is not None and (newcomer.worker.number == 0 or self._is_stale(others)):
            self._remove(others)
        elif first is not None and self._is_stale(first):
            self._remove(first)
        else:
            self._uses[newcomer].temporary = True

    def _is_stale(self, connection: Connection) -> bool:
        return time.monotonic() - self._uses[connection].idle_since > STALE_SECONDS

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            use = self._uses.get(connection)
            if use is None:
                return  # Lost or dropped meanwhile.
            use.users -= 1
            if use.users:
                return
            if not connection.alive or (use.temporary and len(self._uses) > self._limit):
                self._remove(connection)
                return
            use.temporary = False
            use.idle_since = time.monotonic()
            self._idle(connection)[connection] = None

    def _lost(self, connection: Connection) -> None:
        with self._lock:
            self._remove(connection)
            known = identity(connection.worker) in self._entries
        if known:
            self._on_lost(connection.worker)

    def _detach(self, entry: _Entry) -> None:
        if entry.connection is not None:
            self._remove(entry.connection)

    def _remove(self, connection: Connection) -> None:
        """Close *connection* and drop every reference to it."""
        # A connection that is ending by itself is about to call `lost`; after `close` it would not.
        if connection.alive:
            connection.close()
        self._uses.pop(connection, None)
        self._idle(connection).pop(connection, None)
        entry = self._entries.get(identity(connection.worker))
        if entry is not None and entry.connection is connection:
            entry.connection = None

    def _idle(self, connection: Connection) -> OrderedDict[Connection, None]:
        return self._idle_first if connection.worker.number == 0 else self._idle_others


def identity(worker: Worker) -> Identity:
    """Key of a worker, independent of its address."""
    return worker.key, worker.node_id, worker.number
