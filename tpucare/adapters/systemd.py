"""
The service manager's ear: readiness, a status line and the watchdog's sign of life, as sd_notify(3) describes them.

Silent outside of systemd. A message that cannot be sent is dropped: care for the nodes comes first, and a watchdog that
hears nothing does what it is there for.
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
    Where to send messages, and how often the manager wants to hear from us.

    address: `NOTIFY_SOCKET`: a path, or a name that starts with `@` (abstract socket); empty means nobody listens.
    watchdog_every: half of what `WATCHDOG_USEC` allows, as sd_watchdog_enabled(3) recommends; None = no watchdog.
    """

    address: str = ""
    watchdog_every: timedelta | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, pid: int) -> Self:
        """What systemd told this process (*pid*): a watchdog that is meant for another process is none."""
        allowed = _microseconds(environ.get("WATCHDOG_USEC", ""))
        meant = environ.get("WATCHDOG_PID", "") in ("", str(pid))
        return cls(environ.get("NOTIFY_SOCKET", ""), allowed / 2 if allowed and meant else None)

    def ready(self, status: str = "") -> bool:
        """Start-up is complete."""
        return self._send("READY=1", *_status_lines(status))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(*_status_lines(text))

    def watchdog(self) -> bool:
        """We are alive. To be sent from the loop itself, so that a loop that hangs is restarted."""
        return self._send("WATCHDOG=1")

    def stopping(self, status: str = "") -> bool:
        """Shutdown has begun."""
        return self._send("STOPPING=1", *_status_lines(status))

    def _send(self, *lines: str) -> bool:
        """Whether the manager took the message."""
        if not lines or self.address[:1] not in ("/", "@"):
            return False
        address = os.fsencode(self.address)
        if address.startswith(b"@"):
            address = b"\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaker:
                speaker.settimeout(_SEND_TIMEOUT_SECONDS)
                speaker.sendto("\n".join(lines).encode("utf-8", "replace"), address)
        except OSError:
            return False
        return True


def _status_lines(text: str) -> tuple[str, ...]:
    # A line break would begin another assignment of the protocol.
    line = " ".join(text.split())[:_STATUS_LIMIT]
    return (f"STATUS={line}",) if line else ()


def _microseconds(text: str) -> timedelta | None:
    return timedelta(microseconds=int(text)) if text.isascii() and text.isdecimal() and int(text) else None
