"""
Kept connections: at most one per worker, at most so many in all, opened by one thread at a time per worker.

A connection in use is never closed to make room. When there are more workers than room, worker 0 of every node stays
before the others, and connections in regular use stay before newcomers: a pure LRU that is walked round and round by
probes would close each connection just before it is needed.
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

# Longer than the usual pause between two probes of one worker; what was idle for so long gives way to any newcomer.
STALE_SECONDS = 60.0

Identity = tuple[NodeKey, int, int]
Connect = Callable[[Worker, Deadline, Callable[[Connection], None]], Connection]


@dataclass(eq=False, slots=True)
class _Line:
    """The way to one worker. `connecting` is held while a connection is opened, the pool's lock for the rest."""

    connecting: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    forgotten: bool = False


@dataclass(slots=True)
class _Use:
    """`visiting`: there was no room; closed after use."""

    users: int = 0
    visiting: bool = False
    idle_since: float = 0.0


class ConnectionPool:
    """
    Leases connections. Thread-safe.

    `connect` opens a connection and promises to call its last argument when it is lost. `lost` hears of connections
    that ended by themselves, in a thread of theirs.
    """

    def __init__(self, connect: Connect, *, limit: int, lost: Callable[[Worker], None]) -> None:
        self._connect = connect
        self._limit = limit
        self._tell_lost = lost
        self._lock = threading.Lock()
        self._lines: dict[Identity, _Line] = {}
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
        A connection for the length of the block; one that was kept may be dead, unnoticed.

        Raises: what `connect` raises; WorkerSilent when another thread tries to connect for the whole deadline.
        """
        connection = self._obtain(worker, deadline)
        try:
            yield connection
        finally:
            self._give_back(connection)

    def knows(self, worker: Worker) -> bool:
        """False: its node was forgotten since its connection was asked for."""
        return identity(worker) in self._lines

    def drop(self, worker: Worker) -> None:
        """Close what is open to *worker*; its next use connects anew."""
        with self._lock:
            line = self._lines.get(identity(worker))
            if line is not None:
                self._detach(line)

    def forget(self, key: NodeKey) -> None:
        """Close what is open to a node, and what is just being opened as soon as it is."""
        with self._lock:
            for one in self._nodes.pop(key, set()):
                line = self._lines.pop(one)
                line.forgotten = True
                self._detach(line)

    def close(self) -> list[Connection]:
        """Close everything; returns what was open."""
        with self._lock:
            self._closed = True
            open_now = list(self._uses)
        for key in list(self._nodes):
            self.forget(key)
        return open_now

    def _obtain(self, worker: Worker, deadline: Deadline) -> Connection:
        line = self._line(worker)
        if (connection := self._take(line, worker)) is not None:
            return connection
        if not line.connecting.acquire(timeout=deadline.remaining):
            raise WorkerSilent(f"no answer within {deadline.seconds:g} s (another thread connects)", host=worker.host)
        try:
            if (connection := self._take(line, worker)) is not None:
                return connection
            connection = self._connect(worker, deadline, self._lost)
            self._enter(line, connection)
            return connection
        finally:
            line.connecting.release()

    def _line(self, worker: Worker) -> _Line:
        with self._lock:
            if self._closed:
                raise WorkerSilent("closed from our side", host=worker.host)
            one = identity(worker)
            self._nodes.setdefault(worker.key, set()).add(one)
            return self._lines.setdefault(one, _Line())

    def _take(self, line: _Line, worker: Worker) -> Connection | None:
        with self._lock:
            connection = line.connection
            if connection is None:
                return None
            if not connection.alive or connection.worker.host != worker.host:
                self._detach(line)
                return None
            self._uses[connection].users += 1
            self._idle(connection).pop(connection, None)
            return connection

    def _enter(self, line: _Line, connection: Connection) -> None:
        with self._lock:
            if line.forgotten or not connection.alive:
                connection.close()
                raise WorkerSilent("dropped right after the login", host=connection.worker.host)
            line.connection = connection
            self._uses[connection] = _Use(users=1)
            if len(self._uses) > self._limit:
                self._make_room(connection)

    def _make_room(self, newcomer: Connection) -> None:
        """Close the idle connection that is missed least, or mark *newcomer* as a visitor."""
        others, first = next(iter(self._idle_others), None), next(iter(self._idle_first), None)
        if others is not None and (newcomer.worker.number == 0 or self._is_stale(others)):
            self._remove(others)
        elif first is not None and self._is_stale(first):
            self._remove(first)
        else:
            self._uses[newcomer].visiting = True

    def _is_stale(self, connection: Connection) -> bool:
        return time.monotonic() - self._uses[connection].idle_since > STALE_SECONDS

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            use = self._uses.get(connection)
            if use is None:
                return  # Lost, dropped or forgotten meanwhile.
            use.users -= 1
            if use.users:
                return
            if not connection.alive or (use.visiting and len(self._uses) > self._limit):
                self._remove(connection)
                return
            use.visiting = False
            use.idle_since = time.monotonic()
            self._idle(connection)[connection] = None

    def _lost(self, connection: Connection) -> None:
        with self._lock:
            self._remove(connection)
            known = identity(connection.worker) in self._lines
        if known:
            self._tell_lost(connection.worker)

    def _detach(self, line: _Line) -> None:
        if line.connection is not None:
            self._remove(line.connection)

    def _remove(self, connection: Connection) -> None:
        """Close *connection* and hold it nowhere any more."""
        # One that is ending by itself is about to be told as lost, and is not once it counts as closed by us.
        if connection.alive:
            connection.close()
        self._uses.pop(connection, None)
        self._idle(connection).pop(connection, None)
        line = self._lines.get(identity(connection.worker))
        if line is not None and line.connection is connection:
            line.connection = None

    def _idle(self, connection: Connection) -> OrderedDict[Connection, None]:
        return self._idle_first if connection.worker.number == 0 else self._idle_others


def identity(worker: Worker) -> Identity:
    """What a worker is, whatever its address is now."""
    return worker.key, worker.node_id, worker.number
