"""Emulated workers as a real image has them: guarded, without `python`, with services of their own and Docker."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paramiko import SSHException

from tests.kits.bench_worker import eventually
from tests.testbed.test_machines import SSH_PORT, Zone
from tpucare.testbed.emulator.world.config import Guest

pytestmark = [pytest.mark.machines, pytest.mark.timeout(60)]

IMAGE: dict[str, Any] = {"python": False, "dpkg_locked": 3, "containers": True, "sshd_limits": "default"}
TEMPLATES = Path(__file__).parents[2] / "templates" / "worker"
HOLDERS = f"PYTHONPATH='{TEMPLATES}' python3 -c 'import processes; print(processes.chip_holders())'"
CONTAINER = "TPUCARE_RUN=pod-0-a0.1 setsid docker run --privileged --name train image sleep 600"


@contextmanager
def image(folder: Path, *, holds_chips: bool = False, **guest: Any) -> Iterator[Zone]:
    """One worker that is up."""
    zone = Zone(folder, guest=Guest.model_validate(guest))
    try:
        zone.machines.apply(replace(zone.order(), holds_chips=holds_chips)).result(timeout=30)
        yield zone
    finally:
        zone.machines.close()
    assert zone.machines.survivors() == []


def holders(zone: Zone) -> str:
    return zone.run(HOLDERS)


def test_an_image_of_its_own_kind(tmp_path: Path) -> None:
    with image(tmp_path, **IMAGE) as zone:
        assert zone.run("python -c 1; echo $?") == "127"
        assert zone.run("apt-get install -y screen; echo $?") == "100"
        assert zone.run("sudo apt-get -o DPkg::Lock::Timeout=60 install -y screen; echo $?") == "0"
        assert zone.run("apt-get install -y screen; echo $?") == "0"
        assert "vbarcontrolagent" in zone.run("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
        assert holders(zone) == "{}", "the image's own services hold no chip"
        _docker(zone)


def _docker(zone: Zone) -> None:
    """A container outlives its client, has none of its environment, and holds the chip until it is ended itself."""
    assert zone.run("docker run --rm image echo hello; echo $?").split() == ["hello", "0"]
    zone.run(f"{CONTAINER} </dev/null >/dev/null 2>&1 & sleep 0.3")
    eventually(lambda: "accel0" in holders(zone))
    zone.run("pkill -KILL -f 'docker run'")
    assert "accel0" in holders(zone)
    assert zone.run("docker ps") == "train"
    assert zone.run("cat /proc/$(cat ~/../docker/train.pid)/environ | tr '\\0' '\\n' | grep -c TPUCARE_RUN || :") == "0"
    zone.run("docker stop train")
    eventually(lambda: holders(zone) == "{}")


def test_a_service_of_the_image_that_holds_the_chips(tmp_path: Path) -> None:
    with image(tmp_path, holds_chips=True) as zone:
        assert "accel0" in holders(zone)


def test_sshguard_blocks_who_knocks_and_lets_in_again(tmp_path: Path) -> None:
    guard = {"attacks": 4, "block": 3}
    with image(tmp_path, sshguard=guard, sshd_limits="default") as zone:
        with zone.connect() as session:
            for _ in range(4):
                socket.create_connection((zone.address(), SSH_PORT), timeout=5).close()
            eventually(lambda: _is_blocked(zone))
            assert session.exec_command("echo still there")[1].read() == b"still there\n"
            began = time.monotonic()
            eventually(lambda: not _is_blocked(zone), seconds=20)
            assert time.monotonic() - began > 1
        # Who looks whether it is blocked knocks as well, and may be shut out once more for it.
        eventually(lambda: _gets_in(zone), seconds=20)


def _gets_in(zone: Zone) -> bool:
    try:
        return zone.run("echo in") == "in"
    except (OSError, SSHException):
        return False


def _is_blocked(zone: Zone) -> bool:
    try:
        with socket.create_connection((zone.address(), SSH_PORT), timeout=0.5) as probe:
            probe.settimeout(2)
            return not probe.recv(4)
    except OSError:
        return True
