"""
paramiko's transport on a socket that costs nothing while idle and can be closed from any thread, and deadlines.

paramiko wakes every 0.1 s per connection to see whether it was closed, and has several waits without a limit. Here the
reading thread blocks in the kernel until something arrives; a shutdown of the socket from any thread wakes all its
readers and writers at once. One watchdog thread enforces deadlines by such a shutdown.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA
from paramiko.packet import Packetizer

LOG_NAME = "tpucare.ssh"

# Before its version a server may send other lines (RFC 4253, 4.2). paramiko accepts 100 lines of any length, and scans
# the whole line again after every 128 bytes.
GREETING_BYTES = 64 << 10

# OpenSSH's limit; paramiko reads any announced length, up to 4 GB, before it checks the checksum.
PACKET_BYTES = 256 << 10


class Deadline:
    """The end of a time limit on the monotonic clock; `seconds` is the whole limit."""

    def __init__(self, length: timedelta) -> None:
        self.seconds = length.total_seconds()
        self.at = time.monotonic() + self.seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


class Wire:
    """
    A TCP socket with the methods that paramiko uses. Reads and writes block without a timeout.

    `close` wakes every thread that waits on it; any thread may call it, at any time and repeatedly. Only `release`
    gives the descriptor back, and the reading thread calls it last: its number, reused by another connection, can then
    never be read or written by mistake.
    """

    def __init__(self, host: str, port: int, connected: socket.socket | None = None) -> None:
        """*connected*: an open socket to that address, if there is one."""
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._address: tuple[Any, ...] = address
        self._is_open = connected is not None
        self._sock = connected or socket.socket(family, socket.SOCK_STREAM)
        # Without it every request waits 40 ms for the delayed acknowledgement of the one before.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._closed = False  # paramiko reads this name
        self._left: int | None = None
        self._unasked: int | None = None
        self._ending = threading.Lock()
        self._sending = threading.Lock()

    def connect(self, seconds: float) -> None:
        """Raises: OSError, TimeoutError; ConnectionAbortedError: closed from our side meanwhile."""
        if not self._is_open:
            self._sock.settimeout(max(seconds, 0.001))
            self._sock.connect(self._address)
        self._sock.settimeout(None)
        if self._closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "closed from our side")

    def settimeout(self, seconds: float | None) -> None:
        """paramiko sets its 0.1 s here; ignored."""

    @contextmanager
    def at_most(self, count: int) -> Iterator[None]:
        """Within it no more than *count* bytes can be received."""
        self._left = count
        try:
            yield
        finally:
            self._left = None

    def limit_unasked(self, limit: int | None) -> None:
        """From now on accept at most *limit* bytes, since no request is under way; None: one is, so no limit."""
        self._unasked = limit

    def recv(self, size: int) -> bytes:
        if self._left is None:
            content = self._sock.recv(size)
            if (unasked := self._unasked) is not None:
                self._unasked = unasked - len(content)
                if unasked < len(content):
                    raise ConnectionAbortedError(errno.ECONNABORTED, "the server sent too much unasked")
            return content
        if self._left <= 0:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the server sent too much")
        content = self._sock.recv(min(size, self._left))
        self._left -= len(content)
        return content

    def send(self, content: bytes) -> int:
        with self._sending:
            return self._sock.send(content)

    def getpeername(self) -> Any:
        return self._sock.getpeername()

    def close(self) -> None:
        with self._ending:
            if self._closed:
                return
            self._closed = True
            with suppress(OSError):  # The other side may have been faster.
                self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self.close()
        with self._ending, self._sending:
            self._sock.close()


class Transport(paramiko.Transport):
    """
    paramiko's protocol thread on a Wire. `ended` is called in that thread when the connection ends, for any reason.

    The kernel wakes the blocked reader of a closed connection at once, so no polling is needed.
    """

    def __init__(self, wire: Wire, ended: Callable[[], None]) -> None:
        super().__init__(wire, packetizer_class=_Packetizer)  # type: ignore[arg-type]
        self.set_log_channel(LOG_NAME)
        self.channels_seen = _SeenChannels()
        self.disconnect_text = ""
        table = self._channel_handler_table  # type: ignore[has-type]
        bounded = {kind: _within_window(table[kind]) for kind in (MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA)}
        closing = {MSG_CHANNEL_CLOSE: _end_of_file_first(table[MSG_CHANNEL_CLOSE])}
        self._channel_handler_table = {**table, **bounded, **closing}
        self._wire = wire
        self._on_ended = ended

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.active: bool = False
            self._wire.release()
            self._on_ended()

    def _check_banner(self) -> None:
        with self._wire.at_most(GREETING_BYTES):
            super()._check_banner()  # type: ignore[misc]

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        """Keep the server's reason for a disconnect (RFC 4253, 11.1), such as sshd's after too many refused keys."""
        message.get_int()
        self.disconnect_text = message.get_text()


def _within_window(
    handler: Callable[[paramiko.Channel, paramiko.Message], None],
) -> Callable[[paramiko.Channel, paramiko.Message], None]:
    """paramiko buffers without a limit: a server that ignores a full window would fill our memory."""

    def handle(channel: paramiko.Channel, message: paramiko.Message) -> None:
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:
            raise paramiko.SSHException("more was sent than the window allows")
        handler(channel, message)

    return handle


def _end_of_file_first(
    close: Callable[[paramiko.Channel, paramiko.Message], None],
) -> Callable[[paramiko.Channel, paramiko.Message], None]:
    """A close implies the end of file; so a closed channel without an end of file lost its connection."""

    def handle(channel: paramiko.Channel, message: paramiko.Message) -> None:
        channel._handle_eof(message)  # type: ignore[attr-defined]
        close(channel, message)

    return handle


class LastingEvent(threading.Event):
    """
    For `Channel.event`: paramiko clears it before it sends a request, and then waits for it without a limit.

    The end of the connection sets it once, maybe just before paramiko clears it; so a closed channel sets it again.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        super().__init__()
        self._channel = channel

    def clear(self) -> None:
        super().clear()
        if self._channel.closed:
            self.set()


class _SeenChannels(dict[int, bool]):
    """
    The channels that ever existed, as their highest number: paramiko numbers channels in order.

    paramiko itself keeps every number for the life of a connection, to tell late messages to a closed channel from
    invalid ones. With a probe every 15 s that is most of a megabyte per day and kept connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self._highest = -1

    def __setitem__(self, channel: int, seen: bool) -> None:
        self._highest = max(self._highest, channel)

    def __contains__(self, channel: object) -> bool:
        return isinstance(channel, int) and channel <= self._highest


class _Packetizer(Packetizer):
    """
    With a limit for packets, and without the timer thread (not a daemon) that paramiko starts per handshake: the
    watchdog limits the handshake, too.
    """

    def start_handshake(self, timeout: float) -> None:
        pass

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if n > PACKET_BYTES:
            raise paramiko.SSHException(f"a packet of {n} bytes was announced")
        content: bytes = super().read_all(n, check_rekey)
        return content


class Watchdog:
    """Closes a wire at the end of a guard's time. One thread, started with the first guard."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._guards: list[tuple[float, int, list[Wire]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closing = False

    @contextmanager
    def guard(self, wire: Wire, at: float) -> Iterator[None]:
        """Close *wire* at *at* (monotonic) if the block is still running."""
        held = [wire]
        with self._wake:
            heapq.heappush(self._guards, (at, next(self._numbers), held))
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._watch, name="tpucare-ssh-watchdog", daemon=True)
                self._thread.start()
            if self._guards[0][2] is held:
                self._wake.notify()
        try:
            yield
        finally:
            held.clear()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while (due := self._next_due()) is not None:
            for wire in due:
                wire.close()

    def _next_due(self) -> list[Wire] | None:
        """Wait for the next guard whose time is over, and return its wire; None after `close`."""
        with self._wake:
            while not self._closing:
                while self._guards and not self._guards[0][2]:
                    heapq.heappop(self._guards)
                if not self._guards:
                    self._wake.wait()
                    continue
                left = self._guards[0][0] - time.monotonic()
                if left <= 0:
                    return heapq.heappop(self._guards)[2][:]
                self._wake.wait(left)
        return None


def silence_paramiko() -> None:
    """
    Keep paramiko's tracebacks out of our log: every end of a connection is translated into one of our errors.

    Idempotent. Set the level of the logger `tpucare.ssh` to DEBUG to see them.
    """
    logger = logging.getLogger(LOG_NAME)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL + 1)
