"""What systemd hears, over real sockets, and that nothing of it can stop the caretaker."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tpucare.adapters.systemd import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """An address as NOTIFY_SOCKET gives it, and the socket behind it."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@tpucare-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        ear.settimeout(5)
        yield address, ear


def test_each_message_arrives_in_the_form_of_sd_notify(manager: tuple[str, socket.socket]) -> None:
    address, ear = manager
    notifier = Notifier(address)
    assert notifier.ready("caring for 3 slots")
    assert ear.recv(4096) == b"READY=1\nSTATUS=caring for 3 slots"
    assert notifier.status("2 live – 1 waits\nREADY=1")
    assert ear.recv(4096).decode() == "STATUS=2 live – 1 waits READY=1"
    assert notifier.watchdog()
    assert ear.recv(4096) == b"WATCHDOG=1"
    assert notifier.stopping()
    assert ear.recv(4096) == b"STOPPING=1"
    assert notifier.stopping("nodes live on")
    assert ear.recv(4096) == b"STOPPING=1\nSTATUS=nodes live on"


def test_a_status_is_one_bounded_line(manager: tuple[str, socket.socket]) -> None:
    address, ear = manager
    assert Notifier(address).status("x" * 100_000)
    assert len(ear.recv(1 << 20)) < 2000
    assert not Notifier(address).status(" \n ")


@pytest.mark.parametrize("address", ["", "relative/path", "/nowhere/at/all", "@nobody-listens-here", "vsock:2:1"])
def test_nobody_listens(address: str) -> None:
    notifier = Notifier(address)
    assert not notifier.ready()
    assert not notifier.watchdog()


def test_a_deaf_manager_does_not_block(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"))
        assert not all(notifier.watchdog() for _ in range(5000))


@pytest.mark.parametrize(
    ("environ", "address", "every"),
    [
        ({}, "", None),
        ({"NOTIFY_SOCKET": "@a"}, "@a", None),
        ({"NOTIFY_SOCKET": "/a", "WATCHDOG_USEC": "60000000"}, "/a", timedelta(seconds=30)),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, "", timedelta(seconds=30)),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, "", None),
        ({"WATCHDOG_USEC": "0"}, "", None),
        ({"WATCHDOG_USEC": "soon"}, "", None),
    ],
)
def test_what_the_environment_says(environ: dict[str, str], address: str, every: timedelta | None) -> None:
    notifier = Notifier.from_environment(environ, pid=os.getpid())
    assert (notifier.address, notifier.watchdog_every) == (address, every)
