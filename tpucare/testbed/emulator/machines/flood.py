"""
What stands in the place of a worker's sshd when that floods: whoever connects is told more than anybody can hear.

What it says is for the caller to choose; sshd itself cannot be made to talk before its greeting.
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
    What is flooded: `line` and `lines` come before the version (RFC 4253, 4.2), `packet` is one that never ends after
    it, `output` comes out of every command.
    """

    LINE = "line"
    LINES = "lines"
    PACKET = "packet"
    OUTPUT = "output"


# The longest length that a packet can announce and that is a whole number of blocks.
_ENDLESS_PACKET = b"SSH-2.0-Flood\r\n" + (2**32 - 4).to_bytes(4, "big")

SPEECHES = {
    Flooding.LINE: (b"", b"x" * _BLOCK_BYTES),
    Flooding.LINES: (b"", b"You are very welcome here\r\n" * (_BLOCK_BYTES // 27)),
    Flooding.PACKET: (_ENDLESS_PACKET, bytes(_BLOCK_BYTES)),
}
"""What is said once before the login, and what again and again after that."""


class Flood(socketserver.ThreadingTCPServer):
    """Makes one of SPEECHES to everybody who connects, from when it is made until `close`; `said` counts bytes."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, port: int, what: Flooding) -> None:
        """Raises: OSError: somebody else listens there."""
        self._first, self._block = SPEECHES[what]
        self.said = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((address, port), _Talker)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="flood", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody, and listen no more."""
        self.shutdown()
        self._thread.join()
        with self._lock:
            for channel in self._open:
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def talk(self, channel: socket.socket) -> None:
        """Until whoever listens has had enough."""
        with self._lock:
            self._open.add(channel)
        try:
            with contextlib.suppress(OSError):
                channel.sendall(self._first)
                while True:
                    said = channel.send(self._block)
                    with self._lock:
                        self.said += said
        finally:
            with self._lock:
                self._open.discard(channel)


class _Talker(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Flood)
        self.server.talk(self.request)
