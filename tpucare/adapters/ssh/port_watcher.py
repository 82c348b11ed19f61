"""
Finds workers that begin to listen: one thread repeats a TCP connect to every watched worker until it succeeds.

An open port means only that a probe is worth trying; SSH finds out which machine listens. The connection is handed on
for the first login: guards such as sshguard count a connection that is closed without a login as an attack, and soon
drop all packets of its address.
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

# An address without a machine answers nothing; after this time a new connect is likelier to succeed than a third TCP
# SYN of this one.
PATIENCE_SECONDS = 1.0

_SELECT = selectors.EVENT_READ | selectors.EVENT_WRITE


@dataclass(eq=False, slots=True)
class _Target:
    """One watched worker. In one of the two queues at a time; `sock` is set while a connect is in progress."""

    worker: Worker
    at: float
    sock: socket.socket | None = None
    wanted: bool = True


class PortWatcher:
    """
    `opened` is called once per watched worker, in the watcher's thread, when its port accepts a connection: from then
    on it owns that non-blocking socket.

    At most `in_flight` sockets are open; more watched workers take turns. The thread starts with the first `watch` and
    ends with `close`; it sleeps while no worker is watched.
    """

    def __init__(self, port: int, opened: Callable[[Worker, socket.socket], None], *, in_flight: int = 512) -> None:
        self._port = port
        self._opened = opened
        self._limit = in_flight
        self._lock = threading.Lock()
        self._fresh: list[_Target] = []
        self._watched: dict[NodeKey, dict[Worker, _Target]] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Both are in order of time, since every wait has the same length: no heap is needed.
        self._backing_off: deque[_Target] = deque()
        self._in_flight: deque[_Target] = deque()

    def watch(self, workers: Iterable[Worker], *, delay_seconds: float = 0.0) -> None:
        """Watch *workers*; for those already watched nothing changes. Never blocks."""
        at = time.monotonic() + delay_seconds
        with self._lock:
            if self._closing:
                return
            for worker in workers:
                of_node = self._watched.setdefault(worker.key, {})
                if worker not in of_node:
                    of_node[worker] = _Target(worker, at)
                    self._fresh.append(of_node[worker])
            if self._fresh and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tpucare-ports", daemon=True)
                self._thread.start()
        self._wake()

    def unwatch_node(self, key: NodeKey) -> None:
        """Stop watching the workers of that node. Never blocks."""
        with self._lock:
            for target in self._watched.pop(key, {}).values():
                target.wanted = False

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
        with contextlib.suppress(BlockingIOError):  # A full pipe wakes the thread, too.
            os.write(self._wake_in, b".")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_out, selectors.EVENT_READ)
            while not self._closing:
                self._take_fresh()
                self._give_up(selector)
                self._start_due(selector)
                for ready, _ in selector.select(self._pause()):
                    if ready.fileobj == self._wake_out:
                        self._read_wakes()
                    else:
                        self._connected(selector, ready.data)
            for target in self._in_flight:
                if target.sock is not None:
                    target.sock.close()

    def _read_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 1 << 12)

    def _take_fresh(self) -> None:
        with self._lock:
            fresh, self._fresh = self._fresh, []
        now = time.monotonic()
        # Targets that are due now go first; delayed ones go behind those with the same delay.
        self._backing_off.extendleft(target for target in reversed(fresh) if target.at <= now)
        self._backing_off.extend(target for target in fresh if target.at > now)

    def _pause(self) -> float | None:
        """Seconds until something is due; None = until `_wake`."""
        dues = [target.at for queue in self._queues_with_room() for target in list(queue)[:1]]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _queues_with_room(self) -> list[deque[_Target]]:
        return [self._in_flight] if len(self._in_flight) >= self._limit else [self._in_flight, self._backing_off]

    def _start_due(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        while self._backing_off and len(self._in_flight) < self._limit and self._backing_off[0].at <= now:
            target = self._backing_off.popleft()
            if target.wanted:
                self._connect(selector, target)

    def _connect(self, selector: selectors.BaseSelector, target: _Target) -> None:
        try:
            family = socket.AF_INET6 if ":" in target.worker.host else socket.AF_INET
            target.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            result = target.sock.connect_ex((target.worker.host, self._port))
        except OSError:
            # No descriptor left, or a text that is not an address: try again later.
            self._back_off(target)
            return
        if result == 0:
            self._hand_over(target)
        elif result == errno.EINPROGRESS:
            target.at = time.monotonic() + PATIENCE_SECONDS
            self._in_flight.append(target)
            selector.register(target.sock, _SELECT, target)
        else:
            self._back_off(target)

    def _connected(self, selector: selectors.BaseSelector, target: _Target) -> None:
        sock = target.sock
        assert sock is not None
        selector.unregister(sock)
        self._in_flight.remove(target)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            self._hand_over(target)
        else:
            self._back_off(target)

    def _give_up(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        while self._in_flight and (self._in_flight[0].at <= now or not self._in_flight[0].wanted):
            target = self._in_flight.popleft()
            if target.sock is not None:
                selector.unregister(target.sock)
            self._back_off(target)

    def _back_off(self, target: _Target) -> None:
        if target.sock is not None:
            target.sock.close()
            target.sock = None
        if target.wanted:
            target.at = time.monotonic() + INTERVAL_SECONDS
            self._backing_off.append(target)

    def _hand_over(self, target: _Target) -> None:
        sock, target.sock = target.sock, None
        assert sock is not None
        with self._lock:
            wanted, target.wanted = target.wanted, False
            of_node = self._watched.get(target.worker.key, {})
            if of_node.get(target.worker) is target:
                del of_node[target.worker]
                if not of_node:
                    del self._watched[target.worker.key]
        if wanted:
            self._opened(target.worker, sock)
        else:
            sock.close()
