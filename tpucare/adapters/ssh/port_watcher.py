"""
Who begins to listen? One thread tries a TCP connect to every awaited worker, again and again, until it is taken.

An open port says only that a probe is worth its while now; who listens there is for SSH to find out. The connection
that was taken is handed on, to be the first login: guards such as sshguard count one that is closed without a login as
an attack, and soon drop all packets of its address.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tpucare.model.resources import NodeKey, Worker

INTERVAL_SECONDS = 0.2

# A dark address answers nothing; after this long a new try has the better chance than a third TCP SYN of this one.
PATIENCE_SECONDS = 1.0

_SELECT = selectors.EVENT_READ | selectors.EVENT_WRITE


@dataclass(eq=False, slots=True)
class _Knock:
    """One awaited worker. In one of the two queues at a time, and in the air exactly while `sock` is set."""

    worker: Worker
    at: float
    sock: socket.socket | None = None
    wanted: bool = True


class PortWatcher:
    """
    `heard` is called once per awaited worker, in the knocker's thread, when its port takes a connection: it owns that
    socket, which does not block, from then on.

    At most `in_flight` sockets are open; with more awaited workers than that the tries take turns. The thread starts
    with the first knock and ends with `close`; while nobody is awaited it sleeps.
    """

    def __init__(self, port: int, heard: Callable[[Worker, socket.socket], None], *, in_flight: int = 512) -> None:
        self._port = port
        self._heard = heard
        self._limit = in_flight
        self._lock = threading.Lock()
        self._fresh: list[_Knock] = []
        self._awaited: dict[NodeKey, dict[Worker, _Knock]] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Both are in order of time, since every wait has the same length: no heap is needed.
        self._resting: deque[_Knock] = deque()
        self._flying: deque[_Knock] = deque()

    def knock(self, workers: Iterable[Worker], *, delay_seconds: float = 0.0) -> None:
        """Await *workers*, those awaited already going on as they are. Never blocks."""
        at = time.monotonic() + delay_seconds
        with self._lock:
            if self._closing:
                return
            for worker in workers:
                of_node = self._awaited.setdefault(worker.key, {})
                if worker not in of_node:
                    of_node[worker] = _Knock(worker, at)
                    self._fresh.append(of_node[worker])
            if self._fresh and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tpucare-knocker", daemon=True)
                self._thread.start()
        self._wake()

    def forget(self, key: NodeKey) -> None:
        """Await no worker of that node any more. Never blocks."""
        with self._lock:
            for knock in self._awaited.pop(key, {}).values():
                knock.wanted = False

    @property
    def awaited(self) -> int:
        """Workers that were not heard of yet."""
        with self._lock:
            return sum(map(len, self._awaited.values()))

    def close(self) -> None:
        """End the thread and its sockets; idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake_out)
        os.close(self._wake_in)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # A full pipe wakes it, too.
            os.write(self._wake_in, b".")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_out, selectors.EVENT_READ)
            while not self._closing:
                self._take_fresh()
                self._give_up(selector)
                self._send_out(selector)
                for ready, _ in selector.select(self._pause()):
                    if ready.fileobj == self._wake_out:
                        self._read_wakes()
                    else:
                        self._land(selector, ready.data)
            for knock in self._flying:
                if knock.sock is not None:
                    knock.sock.close()

    def _read_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 1 << 12)

    def _take_fresh(self) -> None:
        with self._lock:
            fresh, self._fresh = self._fresh, []
        now = time.monotonic()
        # What is due now goes first; what came with a delay waits behind those of the same length.
        self._resting.extendleft(knock for knock in reversed(fresh) if knock.at <= now)
        self._resting.extend(knock for knock in fresh if knock.at > now)

    def _pause(self) -> float | None:
        """Seconds until something is due; None = until somebody wakes us."""
        dues = [knock.at for queue in self._queues_with_room() for knock in list(queue)[:1]]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _queues_with_room(self) -> list[deque[_Knock]]:
        return [self._flying] if len(self._flying) >= self._limit else [self._flying, self._resting]

    def _send_out(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        while self._resting and len(self._flying) < self._limit and self._resting[0].at <= now:
            knock = self._resting.popleft()
            if knock.wanted:
                self._try(selector, knock)

    def _try(self, selector: selectors.BaseSelector, knock: _Knock) -> None:
        try:
            family = socket.AF_INET6 if ":" in knock.worker.host else socket.AF_INET
            knock.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            result = knock.sock.connect_ex((knock.worker.host, self._port))
        except OSError:
            # No descriptor left, or an address that is none: a later try may do better.
            self._rest(knock)
            return
        if result == 0:
            self._hear(knock)
        elif result == errno.EINPROGRESS:
            knock.at = time.monotonic() + PATIENCE_SECONDS
            self._flying.append(knock)
            selector.register(knock.sock, _SELECT, knock)
        else:
            self._rest(knock)

    def _land(self, selector: selectors.BaseSelector, knock: _Knock) -> None:
        sock = knock.sock
        assert sock is not None
        selector.unregister(sock)
        self._flying.remove(knock)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            self._hear(knock)
        else:
            self._rest(knock)

    def _give_up(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        while self._flying and (self._flying[0].at <= now or not self._flying[0].wanted):
            knock = self._flying.popleft()
            if knock.sock is not None:
                selector.unregister(knock.sock)
            self._rest(knock)

    def _rest(self, knock: _Knock) -> None:
        if knock.sock is not None:
            knock.sock.close()
            knock.sock = None
        if knock.wanted:
            knock.at = time.monotonic() + INTERVAL_SECONDS
            self._resting.append(knock)

    def _hear(self, knock: _Knock) -> None:
        sock, knock.sock = knock.sock, None
        assert sock is not None
        with self._lock:
            wanted, knock.wanted = knock.wanted, False
            of_node = self._awaited.get(knock.worker.key, {})
            if of_node.get(knock.worker) is knock:
                del of_node[knock.worker]
                if not of_node:
                    del self._awaited[knock.worker.key]
        if wanted:
            self._heard(knock.worker, sock)
        else:
            sock.close()
