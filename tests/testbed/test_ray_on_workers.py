"""The real Ray on emulated workers finds chips, type, topology and worker by itself, as on a TPU VM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.bench_worker import eventually
from tests.kits.deployment import own_network
from tests.kits.sshd import free_port
from tests.testbed.test_machines import Zone, need_mounts, need_port_80
from tpucare.testbed.emulator.machines import proctree
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.machine_effects import Boot
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.emulator.world.world import World

pytest.importorskip("ray")

pytestmark = [pytest.mark.machines, pytest.mark.slow, pytest.mark.timeout(240)]

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
JOIN_SECONDS = 120.0
SMALL = "--num-cpus 1 --object-store-memory 80000000"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
# In a process of its own: Ray's client waits for minutes where no head is.
HOSTS = """\
import json, sys
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
states = get_cluster_resource_state(GcsClient(address=sys.argv[1])).node_states
print(json.dumps({one.node_ip_address: [dict(one.total_resources), dict(one.labels)] for one in states}))
"""
METADATA_IP = """\
from urllib.request import Request, urlopen
url = 'http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/ip'
print(urlopen(Request(url, headers={'Metadata-Flavor': 'Google'})).read().decode())
"""


class Slice(Zone):
    """The workers of one node of the emulated cloud."""

    def __init__(self, folder: Path, accelerator_type: str) -> None:
        # `ray` stands beside this Python.
        super().__init__(folder, path_prefix=[Path(sys.executable).parent])
        zones = {"us-central2-b": {"accelerators": ["*"]}}
        world = World(WorldConfig.calm(zones=zones, addresses={"network": own_network()}), seed=3, start=START)
        spec = NodeSpec(
            accelerator_type=accelerator_type,
            runtime_version="tpu-ubuntu2204-base",
            metadata={"ssh-keys": self.public},
        )
        world.api.create_node("projects/emulated/locations/us-central2-b", "pod-0-a1", spec, world.now)
        world.advance(world.now + timedelta(hours=1))
        boots = [effect for effect in world.take_effects() if isinstance(effect, Boot)]
        self.boots = sorted(boots, key=lambda boot: boot.worker)

    def boot_all(self) -> None:
        for booted in [self.machines.apply(boot) for boot in self.boots]:
            booted.result(timeout=30)

    def address(self, worker: int = 0) -> str:
        return self.boots[worker].address


@pytest.fixture
def head() -> Iterator[str]:
    """A head without chips, on the machine itself."""
    host, port = own_network().replace(".0/24", ".250"), free_port()
    with tempfile.TemporaryDirectory(prefix="rh-", dir="/tmp") as folder, Path(folder, "log").open("wb") as log:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"]
        ray += ["--include-dashboard=false", "--node-ip-address", host, "--port", str(port), "--temp-dir", folder]
        command = [sys.executable, "-I", "-S", proctree.__file__, *ray, *SMALL.split()]
        process = subprocess.Popen(
            command, env={**os.environ, **QUIET}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            eventually(lambda: _answers(host, port), seconds=60)
            yield f"{host}:{port}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def hosts(head: str) -> dict[str, Any]:
    """Resources and labels by address; empty while the head does not answer."""
    try:
        asked = subprocess.run([sys.executable, "-c", HOSTS, head], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return {}
    return dict(json.loads(asked.stdout.splitlines()[-1])) if asked.returncode == 0 else {}


def test_ray_finds_the_slice_with_nothing_but_its_name(tmp_path: Path, head: str) -> None:
    slice_ = Slice(tmp_path, "v4-16")
    try:
        need_mounts(slice_)
        need_port_80()
        slice_.boot_all()
        variables = " ".join(f"{name}={value}" for name, value in {**QUIET, "TPU_NAME": "pod-0"}.items())
        for worker in range(2):
            slice_.run(
                f'ip=$(python3 -c "{METADATA_IP}")\n'
                f"{variables} setsid ray start --block --address {head} --node-ip-address $ip --temp-dir $TMPDIR/ray-1 "
                f"{SMALL} >ray.log 2>&1 </dev/null &",
                worker,
            )
        addresses = [slice_.address(worker) for worker in range(2)]
        deadline = time.monotonic() + JOIN_SECONDS
        while not set(addresses) <= (found := hosts(head)).keys():
            logs = [slice_.run("cat ray.log", worker) for worker in range(2)]
            assert time.monotonic() < deadline, (found, logs)
            time.sleep(0.5)
        for worker, address in enumerate(addresses):
            total, labels = found[address]
            assert (total["TPU"], total["accelerator_type:TPU-V4"], total["pod-0"]) == (4, 1, 1)
            assert total.get("TPU-v4-16-head") == (1 if worker == 0 else None)
            about_tpu = {name: value for name, value in labels.items() if name.startswith("ray.io/tpu-")}
            assert about_tpu == {
                "ray.io/tpu-slice-name": "pod-0",
                "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-topology": "2x2x2",
                "ray.io/tpu-pod-type": "v4-16",
            }
    finally:
        slice_.machines.close()
    assert slice_.machines.survivors() == []
