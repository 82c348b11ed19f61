"""The script that asks the real service ten questions, asked of the emulated one: what it finds, and what it leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kits.bench_worker import eventually
from tpucare.testbed.demo.setup import free_port
from tpucare.testbed.emulator.machines.machines import WorkerMachines
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).parents[2] / "examples" / "first_hour.py"
ZONE = "us-central1-a"
WORLD: dict[str, Any] = {
    "guest": {"python": False, "containers": True, "keys_late": 1},
    "guest_attributes": {"published_after": 1, "unpublished": "not-found"},
    "listing": {"page_refused": 500},
}


class Cloud(NamedTuple):
    """The emulated cloud, and the port of its workers' sshd."""

    server: EmulatorServer
    ssh_port: int

    @property
    def has_nodes(self) -> bool:
        with self.server.lock:
            return bool(self.server.world.nodes())


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    config, ssh_port = WorldConfig.fast(**WORLD), free_port()
    make = partial(WorkerMachines, tmp_path, ssh_port=ssh_port, metadata_port=free_port(), guest=config.guest)
    with EmulatorServer(config, machines=make, ssh_port=ssh_port) as server:
        yield Cloud(server, ssh_port)


def hour(cloud: Cloud, *more: str, user: str | None = None) -> subprocess.Popen[str]:
    assert cloud.server.machines is not None
    words = ["--project", "emulated", "--zone", ZONE, "--endpoint", cloud.server.endpoint, "--minutes", "1"]
    login = ["--user", user or cloud.server.machines.login_user, "--ssh-port", str(cloud.ssh_port)]
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words, *login, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def observed(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for line in text.splitlines():
        note = json.loads(line)
        found.setdefault(note["what"], []).append(note["said"])
    return found


def test_an_hour_answers_its_questions_and_leaves_nothing(cloud: Cloud) -> None:
    out, errors = hour(cloud, "--yes").communicate(timeout=100)
    found = observed(out)
    assert found["page_size 1000"][0]["code"] == "INVALID_ARGUMENT"
    assert found["page_size 100"][0]["taken"]
    assert "Guest Attribute" in found["GetGuestAttributes"][0]["message"]
    assert found["GetGuestAttributes"][-1][0].split()[1] == found["host key that was shown"][0]
    assert found["login"][-1] == "in"
    assert found["inside: python"][0][0] == "no python"
    assert found["100 GetNode"][0]["refused"] == {}
    assert len(found["gone"]) == 2
    assert "USD an hour" in errors
    assert not cloud.has_nodes
    assert not re.search(r"AAAA|ya29|127\.\d+\.\d+\.\d+|@|emulated", out), "no key, token, address, account"


def test_it_is_interrupted_and_deletes_what_it_made_first(cloud: Cloud) -> None:
    process = hour(cloud, "--yes", user="nobody-we-know")
    eventually(lambda: cloud.has_nodes)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert len(observed(out)["gone"]) == 1
    assert not cloud.has_nodes


def test_nothing_is_made_without_a_yes(cloud: Cloud) -> None:
    process = hour(cloud)
    process.communicate("\n", timeout=60)
    assert process.returncode == 2
    assert not any(record.get("method") == "CreateNode" for record in cloud.server.world.audit)
