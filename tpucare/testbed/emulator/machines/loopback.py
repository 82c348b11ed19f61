"""
A network of loopback addresses for the workers of one emulator, so that several emulators can share a machine.

Workers of all emulators listen on the same ports, each on an address of its own. An emulator that uses a part of
127.64.0.0/10 holds a socket of that name in Linux's abstract namespace, which belongs to a network namespace, as the
loopback does, and ends with its process. Other programs that listen there are found by trying to listen.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from tpucare.model.errors import ConfigError

WHOLE = ipaddress.IPv4Network("127.64.0.0/10")
PART_LENGTH = 16
"""Prefix length of each part: 64 parts of 65,000 addresses."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A part of the loopback that belongs to this process until `close`."""

    network: ipaddress.IPv4Network
    _held: socket.socket

    def close(self) -> None:
        self._held.close()


def claim(ports: Iterable[int]) -> Claim:
    """
    The first part of the loopback that no other emulator uses, and where *ports* are free.

    Raises: ConfigError: no part is free.
    """
    ports = tuple(ports)
    taken = 0
    for network in WHOLE.subnets(new_prefix=PART_LENGTH):
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0tpucare-emulator-{network.network_address}")
        except OSError:
            held.close()
            continue
        if (taken := _first_taken(str(network[1]), ports)) == 0:
            return Claim(network, held)
        held.close()
    where = f"port {taken} is taken" if taken else "other emulators use every part"
    raise ConfigError(f"no part of {WHOLE} is free for workers: {where}; name addresses.network in the world's file")


def _first_taken(address: str, ports: Iterable[int]) -> int:
    """The first of *ports* that is in use on *address* or on all addresses; 0: none."""
    for port in ports:
        try:
            socket.create_server((address, port)).close()
        except OSError:
            return port
    return 0
