"""
Remote over paramiko: every contact with a worker goes through it.

It joins `connection` (one connection), `pool` (kept connections), `keys` (trust) and `port_watcher` (workers that
begin to listen). The commands on the workers are left to the launcher. Reads the monotonic clock, since it blocks:
every call ends at its deadline, whatever the other side does.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from tpucare.adapters.ssh.connection import Connection, NeverSent
from tpucare.adapters.ssh.keys import LoginKey, PinStore, clean_host_keys
from tpucare.adapters.ssh.pool import ConnectionPool, Identity, identity
from tpucare.adapters.ssh.port_watcher import INTERVAL_SECONDS, PortWatcher
from tpucare.adapters.ssh.transport import Deadline, Watchdog, silence_paramiko
from tpucare.model.errors import AuthRefused, HostKeyChanged, WorkerSilent
from tpucare.model.resources import NodeKey, Ran, Worker
from tpucare.planner.backoff import refusal_pause

T = TypeVar("T")

# Otherwise a server that drops each connection right after a command would be probed without a pause: drop, hint,
# probe, drop.
FLAP_SECONDS = 5.0


class _Refusals(NamedTuple):
    """Logins that a worker refused in a row, and the monotonic time before which none is tried."""

    tries: int
    until: float
    text: str


class ParamikoRemote:
    """
    ports.Remote for real workers.

    `user` is the login name on every worker, `pins` a folder for host keys. `nudge` is called, from any thread, when
    `hints` has news. `parallel` limits the threads of `each` over all its callers together. `max_connections` and the
    sockets of `watch_ports` are limited to half and a quarter of the files that the process may open.
    """

    def __init__(
        self,
        key: LoginKey,
        *,
        user: str,
        pins: Path,
        nudge: Callable[[], None],
        port: int = 22,
        max_connections: int = 1000,
        parallel: int = 64,
    ) -> None:
        silence_paramiko()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._key, self._user, self._port = key, user, port
        self._nudge = nudge
        self._pins = PinStore(pins)
        self._watchdog = Watchdog()
        self._pool = ConnectionPool(self._connect, limit=min(max_connections, files // 2), lost=self._connection_lost)
        self._port_watcher = PortWatcher(port, self._port_opened, in_flight=min(512, files // 4))
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="tpucare-each")
        self._parallel = parallel
        self._lock = threading.Lock()
        self._opening: set[Connection] = set()
        self._hints: set[NodeKey] = set()
        self._answers: dict[NodeKey, dict[Identity, bool]] = {}
        self._drops: dict[Identity, float] = {}
        self._sockets: dict[Worker, socket.socket] = {}
        self._sockets_limit = files // 8
        self._refusals: dict[Identity, _Refusals] = {}

    # --- ports.Remote ---

    def run(
        self,
        worker: Worker,
        command: str,
        *,
        stdin: bytes = b"",
        deadline: timedelta = timedelta(seconds=10),
        limit: int = 1 << 20,
    ) -> Ran:
        """A command that a signal ended is WorkerSilent, too: SSH gives no status, so its end is unknown."""
        until = Deadline(deadline)
        return self._use(
            worker, until, lambda connection: connection.run(command, stdin=stdin, deadline=until, limit=limit)
        )

    def put(
        self, worker: Worker, path: str, content: bytes, mode: int, *, deadline: timedelta = timedelta(seconds=30)
    ) -> None:
        """The file is private until it has all its content and its mode."""
        until = Deadline(deadline)
        self._use(worker, until, lambda connection: connection.put(path, content, mode, deadline=until))

    def each(self, workers: Sequence[Worker], call: Callable[[Worker], T]) -> list[T | Exception]:
        """
        The calling thread works, too, so this ends even if every thread of the pool waits in an `each` of its own.

        Every Exception, expected or not, is a value of the result; the caller handles it.
        """
        return _fan_out(self._threads, workers, call, helpers=self._parallel)

    def watch_ports(self, workers: Iterable[Worker]) -> None:
        """A worker that answered or began to listen is not tried again until it was silent."""
        fresh, again = [], []
        with self._lock:
            for worker in workers:
                answers = self._answers.get(worker.key, {})
                if identity(worker) not in answers:
                    fresh.append(worker)
                elif not answers[identity(worker)]:
                    again.append(worker)
        # They accepted our connect and then did not answer: without a pause, connect, hint and probe would never end.
        self._port_watcher.watch(again, delay_seconds=INTERVAL_SECONDS)
        self._port_watcher.watch(fresh)

    def disconnect(self, key: NodeKey) -> None:
        self._port_watcher.unwatch_node(key)
        self._pool.drop_node(key)
        with self._lock:
            self._hints.discard(key)
            for one in self._answers.pop(key, {}):
                self._drops.pop(one, None)
            for one in [one for one in self._refusals if one[0] == key]:
                del self._refusals[one]
            for worker in [worker for worker in self._sockets if worker.key == key]:
                self._sockets.pop(worker).close()

    def forget_node(self, key: NodeKey) -> None:
        self.disconnect(key)
        self._pins.drop_node(key)

    def repin(self, worker: Worker, host_keys: Iterable[str]) -> bool:
        """A line that is not a host key is left out; without any host key, the pinned ones stay."""
        confirmed = clean_host_keys(host_keys)
        if confirmed and confirmed != self._pins.pinned(worker):
            self._pins.pin(worker, confirmed)
            self._pool.drop_worker(worker)
        return bool(confirmed)

    def hints(self) -> frozenset[NodeKey]:
        with self._lock:
            hints, self._hints = frozenset(self._hints), set()
        return hints

    # --- beyond the port ---

    def known_hosts(self, worker: Worker) -> tuple[Path, str]:
        """For a person's ssh: a UserKnownHostsFile, and the HostKeyAlias of *worker* in it."""
        return self._pins.known_hosts(worker)

    def close(self) -> None:
        """End every connection and thread; calls under way raise WorkerSilent. Idempotent."""
        self._port_watcher.close()
        connections = self._pool.close()
        with self._lock:
            connections += self._opening
            while self._sockets:
                self._sockets.popitem()[1].close()
        for connection in connections:
            connection.close()
        for connection in connections:
            connection.join()
        self._threads.shutdown(cancel_futures=True)
        self._watchdog.close()

    # --- inside ---

    def _use(self, worker: Worker, until: Deadline, act: Callable[[Connection], T]) -> T:
        try:
            try:
                return self._on_connection(worker, until, act)
            except NeverSent:
                return self._on_connection(worker, until, act)
        except WorkerSilent:
            self._mark(worker, answers=False)
            raise

    def _on_connection(self, worker: Worker, until: Deadline, act: Callable[[Connection], T]) -> T:
        with self._pool.lease(worker, until) as connection:
            return act(connection)

    def _connect(self, worker: Worker, until: Deadline, lost: Callable[[Connection], None]) -> Connection:
        with self._lock:
            refused = self._refusals.get(identity(worker))
        if refused is not None and time.monotonic() < refused.until:
            pause = refused.until - time.monotonic()
            raise AuthRefused(f"{refused.text}; not tried again for {pause:.0f} s", host=worker.host)
        with self._lock:
            connected = self._sockets.pop(worker, None)
        if connected is not None:
            with contextlib.suppress(WorkerSilent):
                # The server may have closed a connection that was unused for a while: try a new one.
                return self._log_in(Connection(worker, self._port, self._watchdog, lost, connected), until)
        return self._log_in(Connection(worker, self._port, self._watchdog, lost), until)

    def _log_in(self, connection: Connection, until: Deadline) -> Connection:
        worker = connection.worker
        pinned = self._pins.pinned(worker)
        with self._lock:
            self._opening.add(connection)
        try:
            connection.open(user=self._user, key=self._key.private, pinned=pinned, deadline=until)
            self._trust(connection)
        except AuthRefused as error:
            self._count_refusal(worker, error.message)
            raise
        finally:
            with self._lock:
                self._opening.discard(connection)
        with self._lock:
            self._refusals.pop(identity(worker), None)
        self._mark(worker, answers=True)
        return connection

    def _count_refusal(self, worker: Worker, text: str) -> None:
        """Guards such as sshguard block an address after a few refused logins: pause before the next one."""
        with self._lock:
            before = self._refusals.get(identity(worker))
            tries = before.tries + 1 if before is not None else 1
            until = time.monotonic() + refusal_pause(tries).total_seconds()
            self._refusals[identity(worker)] = _Refusals(tries, until, text)

    def _trust(self, connection: Connection) -> None:
        """Pin on first use, and only after the login: a refusal may come from the last machine at this address."""
        worker = connection.worker
        try:
            if not self._pool.is_known(worker):
                raise WorkerSilent("its node was given up during the login", host=worker.host)
            if not self._pins.check(worker, connection.host_key):
                raise HostKeyChanged("guest attributes confirmed another host key meanwhile", host=worker.host)
        except BaseException:
            connection.close()
            raise

    def _mark(self, worker: Worker, *, answers: bool) -> None:
        with self._lock:
            if answers:
                self._answers.setdefault(worker.key, {})[identity(worker)] = True
            elif identity(worker) in self._answers.get(worker.key, {}):
                self._answers[worker.key][identity(worker)] = False

    def _port_opened(self, worker: Worker, sock: socket.socket) -> None:
        with self._lock:
            if worker in self._sockets or len(self._sockets) >= self._sockets_limit:
                sock.close()
            else:
                self._sockets[worker] = sock
        self._mark(worker, answers=True)
        self._add_hint(worker.key)

    def _connection_lost(self, worker: Worker) -> None:
        now = time.monotonic()
        with self._lock:
            calm = now - self._drops.get(identity(worker), -FLAP_SECONDS) >= FLAP_SECONDS
            self._drops[identity(worker)] = now
        self._mark(worker, answers=False)
        if calm:
            self._add_hint(worker.key)

    def _add_hint(self, key: NodeKey) -> None:
        with self._lock:
            self._hints.add(key)
        self._nudge()


def _fan_out(
    threads: ThreadPoolExecutor, workers: Sequence[Worker], call: Callable[[Worker], T], *, helpers: int
) -> list[T | Exception]:
    """Results in order. A helper that got no thread had nothing left to do and is not waited for."""
    results: list[T | Exception | None] = [None] * len(workers)
    positions = itertools.count()

    def work() -> None:
        while (position := next(positions)) < len(workers):
            try:
                results[position] = call(workers[position])
            except Exception as error:
                results[position] = error

    futures: list[Future[None]] = [threads.submit(work) for _ in range(min(len(workers) - 1, helpers))]
    try:
        work()
    finally:
        for future in futures:
            if not future.cancel():
                future.result()
    return results  # type: ignore[return-value]  # The thread that took a position filled it.
