"""
Messages to the service manager: readiness, a status line and the watchdog's keepalive, as sd_notify(3) describes them.

Outside of systemd nothing is sent. A message that cannot be sent is dropped: the care for nodes must go on, and
without keepalives the watchdog restarts the service, which is its purpose.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

# The manager reads at most 4 KiB per message; a status line is one line.
_STATUS_LIMIT = 1000
# A full queue of the manager must not stop the loop.
_SEND_TIMEOUT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Notifier:
    """
    The manager's address, and the interval of keepalives.

    address: `NOTIFY_SOCKET`: a path, or a name that starts with `@` (abstract socket); empty = no manager.
    watchdog_every: half of `WATCHDOG_USEC`, as sd_watchdog_enabled(3) recommends; None = no watchdog.
    """

    address: str = ""
    watchdog_every: timedelta | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, pid: int) -> Self:
        """From systemd's variables for this process (*pid*); a watchdog of another process is ignored."""
        allowed = _microseconds(environ.get("WATCHDOG_USEC", ""))
        ours = environ.get("WATCHDOG_PID", "") in ("", str(pid))
        return cls(environ.get("NOTIFY_SOCKET", ""), allowed / 2 if allowed and ours else None)

    def ready(self, status: str = "") -> bool:
        """Start-up is complete."""
        return self._send("READY=1", *_status_lines(status))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(*_status_lines(text))

    def watchdog(self) -> bool:
        """Keepalive. The loop itself sends it, so that a hanging loop is restarted."""
        return self._send("WATCHDOG=1")

    def stopping(self, status: str = "") -> bool:
        """Shutdown has begun."""
        return self._send("STOPPING=1", *_status_lines(status))

    def _send(self, *lines: str) -> bool:
        """True if the manager accepted the message."""
        if not lines or self.address[:1] not in ("/", "@"):
            return False
        address = os.fsencode(self.address)
        if address.startswith(b"@"):
            address = b"\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
                manager.settimeout(_SEND_TIMEOUT_SECONDS)
                manager.sendto("\n".join(lines).encode("utf-8", "replace"), address)
        except OSError:
            return False
        return True


def _status_lines(text: str) -> tuple[str, ...]:
    # A line break would begin another assignment of the protocol.
    line = " ".join(text.split())[:_STATUS_LIMIT]
    return (f"STATUS={line}",) if line else ()


def _microseconds(text: str) -> timedelta | None:
    return timedelta(microseconds=int(text)) if text.isascii() and text.isdecimal() and int(text) else None
