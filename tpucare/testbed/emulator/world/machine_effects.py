"""
The effects of a world on its machines: boot, die, fall silent, answer again, change the metadata server.

Plain frozen records, to be applied in their order: by `machines.driver` to real workers, by `testbed.simulation` to
simulated ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tpucare.testbed.emulator.world.records import NodePath


@dataclass(frozen=True, slots=True)
class Boot:
    """
    Start a worker. A second Boot of the same `node_id` and worker is a reboot: same home, same host keys.

    attributes: the metadata server's content, path -> value, for example `instance/attributes/ssh-keys`
    peers:      addresses of all workers of the slice, index = worker number; empty where one is missing
    takes_keys:  its `ssh-keys` log in at once, and not only after an AuthorizeKeys
    holds_chips: a service of the image holds the chips from the boot on
    chips:       number of the worker's chips
    """

    at: datetime
    path: NodePath
    node_id: int
    worker: int
    address: str
    hostname: str
    attributes: Mapping[str, str]
    peers: tuple[str, ...]
    takes_keys: bool = True
    holds_chips: bool = False
    chips: int = 4


@dataclass(frozen=True, slots=True)
class Kill:
    """End every process of a worker at once, its sshd included; worker None = of all workers of that node."""

    at: datetime
    path: NodePath
    node_id: int
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """Stop answering on the network; processes go on running."""

    at: datetime
    path: NodePath
    node_id: int
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Undo a Silence."""

    at: datetime
    path: NodePath
    node_id: int
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class SetAttribute:
    """Change a path of the metadata server, for example `instance/preempted` to TRUE."""

    at: datetime
    path: NodePath
    node_id: int
    worker: int | None
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class AuthorizeKeys:
    """The guest agent has seen new `ssh-keys` metadata (`user:ssh-… key`, one a line): log these in, no others."""

    at: datetime
    path: NodePath
    node_id: int
    ssh_keys: str
    worker: int | None = None


MachineEffect = Boot | Kill | Silence | Resume | SetAttribute | AuthorizeKeys
