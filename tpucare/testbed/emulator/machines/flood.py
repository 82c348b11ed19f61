"""
A server in place of a worker's sshd that sends data without end to every client.

It is needed because sshd itself cannot be made to send anything before its greeting.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import socketserver
import threading

_BLOCK_BYTES = 1 << 16


class Flooding(enum.StrEnum):
    """
    Kinds of endless data: `line` and `lines` before the version (RFC 4253, 4.2), `packet` a packet after it that never
    ends, `output` the output of every command.
    """

    LINE = "line"
    LINES = "lines"
    PACKET = "packet"
    OUTPUT = "output"


# The longest length that a packet can announce and that is a whole number of blocks.
_ENDLESS_PACKET = b"SSH-2.0-Flood\r\n" + (2**32 - 4).to_bytes(4, "big")

CONTENTS = {
    Flooding.LINE: (b"", b"x" * _BLOCK_BYTES),
    Flooding.LINES: (b"", b"You are very welcome here\r\n" * (_BLOCK_BYTES // 27)),
    Flooding.PACKET: (_ENDLESS_PACKET, bytes(_BLOCK_BYTES)),
}
"""The bytes that are sent once, and those that are sent again and again after them."""


class Flood(socketserver.ThreadingTCPServer):
    """Sends one of CONTENTS to every client, from the constructor until `close`; `sent` counts bytes."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, what: Flooding) -> None:
        """Raises: OSError: the address and port are in use."""
        self._first, self._block = CONTENTS[what]
        self.sent = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((address, port), _FloodConnection)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="flood", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut all connections, and stop listening."""
        self.shutdown()
        self._thread.join()
        with self._lock:
            for channel in self._open:
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def send_to(self, channel: socket.socket) -> None:
        """Send until the client closes the connection."""
        with self._lock:
            self._open.add(channel)
        try:
            with contextlib.suppress(OSError):
                channel.sendall(self._first)
                while True:
                    sent = channel.send(self._block)
                    with self._lock:
                        self.sent += sent
        finally:
            with self._lock:
                self._open.discard(channel)


class _FloodConnection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Flood)
        self.server.send_to(self.request)
