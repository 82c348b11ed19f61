"""
Remote over paramiko: the one way by which tpucare reaches workers.

The door to the parts below it: connections (`ssh_connection`), how many are kept (`ssh_pool`), whom to trust
(`ssh_keys`), who begins to listen (`knocker`). What runs on the workers is the launcher's business.
Reads the monotonic clock, since it blocks: every call is bounded by its deadline, whatever the other side does.
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

# A server that drops each connection right after a command would otherwise be probed without a pause: drop, hint,
# probe, drop.
FLAP_SECONDS = 5.0


class _Refusals(NamedTuple):
    """Logins that a worker refused in a row, and until when (monotonic) the next one waits."""

    tries: int
    until: float
    text: str


class ParamikoRemote:
    """
    ports.Remote for real workers.

    `user` is the login name on every worker, `pins` a folder for host keys. `nudge` is called, from any thread, when
    `hints` has news. `parallel` bounds the threads of `each` over all its callers together. `max_connections` and the
    sockets of `knock` are lowered when the process may not open that many files (half and a quarter of its limit).
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
        self._pool = ConnectionPool(self._connect, limit=min(max_connections, files // 2), lost=self._dropped)
        self._knocker = PortWatcher(port, self._listens, in_flight=min(512, files // 4))
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="tpucare-each")
        self._parallel = parallel
        self._lock = threading.Lock()
        self._opening: set[Connection] = set()
        self._hints: set[NodeKey] = set()
        self._heard: dict[NodeKey, dict[Identity, bool]] = {}
        self._drops: dict[Identity, float] = {}
        self._knocked: dict[Worker, socket.socket] = {}
        self._knocked_limit = files // 8
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
        """A command that a signal ended is WorkerSilent, too: SSH gives no status, so nothing is known."""
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
        The calling thread works, too, so this ends even when every thread of the pool waits in an `each` of its own.

        Any Exception is a value of the answer, expected or not; only the caller knows what to make of it.
        """
        return _fan_out(self._threads, workers, call, helpers=self._parallel)

    def knock(self, workers: Iterable[Worker]) -> None:
        """Workers that answered, or were heard of, are not knocked at again before they were silent."""
        fresh, again = [], []
        with self._lock:
            for worker in workers:
                heard = self._heard.get(worker.key, {})
                if identity(worker) not in heard:
                    fresh.append(worker)
                elif not heard[identity(worker)]:
                    again.append(worker)
        # It took our connect and then did not answer: with a pause, or knock, hint and probe would chase each other.
        self._knocker.knock(again, delay_seconds=INTERVAL_SECONDS)
        self._knocker.knock(fresh)

    def disconnect(self, key: NodeKey) -> None:
        self._knocker.forget(key)
        self._pool.forget(key)
        with self._lock:
            self._hints.discard(key)
            for one in self._heard.pop(key, {}):
                self._drops.pop(one, None)
            for one in [one for one in self._refusals if one[0] == key]:
                del self._refusals[one]
            for worker in [worker for worker in self._knocked if worker.key == key]:
                self._knocked.pop(worker).close()

    def forget(self, key: NodeKey) -> None:
        self.disconnect(key)
        self._pins.forget(key)

    def repin(self, worker: Worker, host_keys: Iterable[str]) -> bool:
        """What cannot be read as a host key is left out; when nothing is left, what was pinned stays."""
        vouched = clean_host_keys(host_keys)
        if vouched and vouched != self._pins.pinned(worker):
            self._pins.pin(worker, vouched)
            self._pool.drop(worker)
        return bool(vouched)

    def hints(self) -> frozenset[NodeKey]:
        with self._lock:
            hints, self._hints = frozenset(self._hints), set()
        return hints

    # --- beyond the port ---

    @property
    def connections(self) -> int:
        """Open connections now."""
        return len(self._pool)

    def known_hosts(self, worker: Worker) -> tuple[Path, str]:
        """For a person's ssh: a UserKnownHostsFile, and the HostKeyAlias under which it knows *worker*."""
        return self._pins.known_hosts(worker)

    def close(self) -> None:
        """End every connection and thread; what still runs in them raises WorkerSilent. Idempotent."""
        self._knocker.close()
        connections = self._pool.close()
        with self._lock:
            connections += self._opening
            while self._knocked:
                self._knocked.popitem()[1].close()
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
            taken = self._knocked.pop(worker, None)
        if taken is not None:
            with contextlib.suppress(WorkerSilent):
                # The server may have hung up on a connection that nobody used for a while: a new one says more.
                return self._log_in(Connection(worker, self._port, self._watchdog, lost, taken), until)
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
            self._note_refusal(worker, error.message)
            raise
        finally:
            with self._lock:
                self._opening.discard(connection)
        with self._lock:
            self._refusals.pop(identity(worker), None)
        self._mark(worker, answers=True)
        return connection

    def _note_refusal(self, worker: Worker, text: str) -> None:
        """Guards such as sshguard block an address after a few refused logins: the next one comes after a pause."""
        with self._lock:
            before = self._refusals.get(identity(worker))
            tries = before.tries + 1 if before is not None else 1
            until = time.monotonic() + refusal_pause(tries).total_seconds()
            self._refusals[identity(worker)] = _Refusals(tries, until, text)

    def _trust(self, connection: Connection) -> None:
        """Pin on first use, and only after the login: who refused our key may be whoever had the address before."""
        worker = connection.worker
        try:
            if not self._pool.knows(worker):
                raise WorkerSilent("forgotten while it was being connected to", host=worker.host)
            if not self._pins.check(worker, connection.host_key):
                raise HostKeyChanged("another host key was vouched for meanwhile", host=worker.host)
        except BaseException:
            connection.close()
            raise

    def _mark(self, worker: Worker, *, answers: bool) -> None:
        with self._lock:
            if answers:
                self._heard.setdefault(worker.key, {})[identity(worker)] = True
            elif identity(worker) in self._heard.get(worker.key, {}):
                self._heard[worker.key][identity(worker)] = False

    def _listens(self, worker: Worker, sock: socket.socket) -> None:
        with self._lock:
            if worker in self._knocked or len(self._knocked) >= self._knocked_limit:
                sock.close()
            else:
                self._knocked[worker] = sock
        self._mark(worker, answers=True)
        self._hint(worker.key)

    def _dropped(self, worker: Worker) -> None:
        now = time.monotonic()
        with self._lock:
            calm = now - self._drops.get(identity(worker), -FLAP_SECONDS) >= FLAP_SECONDS
            self._drops[identity(worker)] = now
        self._mark(worker, answers=False)
        if calm:
            self._hint(worker.key)

    def _hint(self, key: NodeKey) -> None:
        with self._lock:
            self._hints.add(key)
        self._nudge()


def _fan_out(
    threads: ThreadPoolExecutor, workers: Sequence[Worker], call: Callable[[Worker], T], *, helpers: int
) -> list[T | Exception]:
    """Results in order. Helpers that never got a thread had nothing left to do, and are not waited for."""
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
    return results  # type: ignore[return-value]  # Every position was filled by whoever took its number.
