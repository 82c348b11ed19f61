"""
Access to the servers of the test bed: processes of their own user and of root, and no page in a browser.

The API lets its caller log in to workers, which are processes of the emulator's user. Loopback alone does not protect
it: every user of the machine can connect there, and so can every page that a browser shows. Linux names the user of the
other end of a loopback connection, exactly by its `sock_diag` netlink, else in /proc/net/tcp. Where the system has
neither, every local user is served, and a warning is logged.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import structlog

Address = tuple[str, int]
"""An IPv4 address and a port."""

UidOf = Callable[[Address, Address], int | None]

# Source: linux/sock_diag.h, linux/inet_diag.h, include/net/tcp_states.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 20, 1
_LISTEN = 10
_MESSAGE_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBBI2s2s16s16sI8s")
_ANSWER = struct.Struct("=BBBB2s2s16s16sI8sIIIII")

_log = structlog.get_logger("tpucare.emulator")


def is_ours(peer: Address, served: Address) -> bool:
    """
    True when the process at the other end of a connection belongs to our user or to root.

    peer: the client's end        served: our end
    """
    uid_of = _find_method()
    return uid_of is None or uid_of(peer, served) in (os.geteuid(), 0)


def uid_by_netlink(peer: Address, served: Address) -> int | None:
    """
    The user of the client's end of a connection; None: no process holds it (any more).

    Raises: OSError: the kernel does not support the request.
    """
    ports = [struct.pack("!H", port) for _, port in (peer, served)]
    hosts = [socket.inet_aton(host).ljust(16, b"\0") for host, _ in (peer, served)]
    question = _QUESTION.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF, *ports, *hosts, 0, b"\xff" * 8)
    header = _MESSAGE_HEADER.pack(_MESSAGE_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(header + question)
        answer = kernel.recv(4096)
    if _MESSAGE_HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    _, state, _, _, *found_ports, _, _, _, _, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _MESSAGE_HEADER.size)
    # Without such a connection the kernel names a socket that listens on the client's port. A socket without an inode
    # was closed by its process, and its uid reads 0: that is not root.
    return uid if state != _LISTEN and found_ports == ports and inode else None


def uid_by_table(peer: Address, served: Address) -> int | None:
    """
    As `uid_by_netlink`, from /proc/net/tcp and tcp6; slower, for they list all connections of the machine.

    Raises: OSError: there is no such file.
    """
    for table, prefix in (("tcp", ""), ("tcp6", "0000000000000000FFFF0000")):
        ends = " ".join(f"{prefix}{_in_hexadecimal(host)}:{port:04X}" for host, port in (peer, served))
        for line in Path(f"/proc/thread-self/net/{table}").read_text().splitlines():
            if ends in line:
                fields = line.split()
                # `sl local rem st queues timer retransmits uid timeout inode`
                return int(fields[7]) if fields[9] != "0" else None
    return None


def _in_hexadecimal(host: str) -> str:
    """An address as the kernel prints it: a word in the machine's own byte order."""
    return f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}"


@functools.cache
def _find_method() -> UidOf | None:
    """The first method that finds our own uid on a connection of our own; None: no method works here."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        for method in (uid_by_netlink, uid_by_table):
            try:
                if method(client.getsockname(), listener.getsockname()) == os.geteuid():
                    return method
            except (OSError, AttributeError):
                continue  # AttributeError: `socket.AF_NETLINK` exists on Linux only
    _log.warning("the emulator serves every user of this machine: the system does not name the user of a connection")
    return None


def is_from_a_page(headers: Mapping[str, str], served: Address, *names: str) -> bool:
    """
    True when a request may come from a page in a browser; names of *headers* are in lower case.

    Browsers send the page's origin with requests that change something. A page whose name was made to resolve to this
    machine (DNS rebinding) is recognised by that name in the Host header.
    names: further names of this server, which no other host can have
    """
    if "origin" in headers or any(name.startswith("sec-fetch-") for name in headers):
        return True
    host, port = served
    # Clients leave out HTTP's own port.
    known = rf"(127\.0\.0\.1|localhost|\[::1\]|{re.escape(host)})(:{port}){'?' if port == 80 else ''}"
    asked = headers.get("host", "").lower()
    return not re.fullmatch(known, asked) and asked not in names


class GuardedConnection(BaseHTTPRequestHandler):
    """An HTTP connection of the emulator: requests of other users and of pages are refused before the body is read."""

    def setup(self) -> None:
        super().setup()
        self._served: Address = self.connection.getsockname()
        self._is_ours = is_ours(self.client_address, self._served)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self._is_ours and not is_from_a_page(headers, self._served):
            return True
        why = "for pages in a browser" if self._is_ours else "for other users of this machine"
        self.close_connection = True
        self.send_error(HTTPStatus.FORBIDDEN, explain=f"The emulator is not {why}.")
        return False
