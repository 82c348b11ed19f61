"""A real Ray cluster on loopback addresses: a head and hosts that say they are TPU hosts, each a process of its own."""

from __future__ import annotations

import functools
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tests.kits.sshd import free_port
from tpucare.integrations.ray.cluster import HeadRecord

# The Python whose Ray is tried, so that all versions that the probe accepts can be.
RAY_PYTHON = os.environ.get("TPUCARE_TEST_RAY_PYTHON", sys.executable)
MARK = "TPUCARE_TEST_RAY"
# Small, since every host believes that the whole machine is its own.
_SMALL = ("--object-store-memory", "80000000", "--num-cpus", "1", "--disable-usage-stats")


@functools.cache
def ray_versions() -> tuple[str, str]:
    """Ray and Python's minor version of RAY_PYTHON."""
    code = "import sys; from importlib import metadata; print(metadata.version('ray'), '%d.%d' % sys.version_info[:2])"
    ray, python = subprocess.run([RAY_PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return ray, python


class RayCluster:
    """
    folder: short and its own, since a path of a socket has 107 bytes

    Ray's control store listens on all addresses, so each cluster has ports of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self.net = f"127.{random.randint(20, 250)}.{random.randint(1, 250)}"
        self.port = free_port()
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"{self.net}.2:{self.port}"

    @property
    def record(self) -> HeadRecord:
        now = datetime.fromtimestamp(0, UTC)
        return HeadRecord("lab", self.address, "127.0.0.1:1", RAY_PYTHON, *ray_versions(), str(self.token), now)

    def start_head(self, *, monitor: bool = False) -> None:
        env = {"RAY_enable_autoscaler_v2": "1", "RAY_NODE_TYPE_NAME": "head", "RAY_CLOUD_INSTANCE_ID": "head"}
        alone = ["--include-dashboard=false", "--include-log-monitor=false", "--ray-client-server-port"]
        alone += [str(free_port())]
        alone += [] if monitor else ["--no-monitor"]
        self._ray("head", 2, ["--head", "--port", str(self.port), *alone], env)
        end = time.monotonic() + 60
        while not self._listens():
            assert self._started[-1].poll() is None, (self.folder / "head" / "output").read_text()
            assert time.monotonic() < end
            time.sleep(0.05)

    def start_host(self, slot: str, worker: int = 0, *, kind: str = "v4-16", topology: str = "2x2x2") -> None:
        """A host of 4 chips, worker *worker* of the slice *slot*."""
        tpu = {"TPU_NAME": slot, "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": kind, "TPU_TOPOLOGY": topology}
        own = {"RAY_NODE_TYPE_NAME": slot.rpartition("-")[0], "RAY_CLOUD_INSTANCE_ID": f"{slot}-a1"}
        self._ray(f"{slot}.{worker}", 10 + worker, ["--address", self.address, "--resources", '{"TPU":4}'], tpu | own)

    def kill(self, name: str) -> None:
        """Kill all processes of the head or of a host, `SLOT.WORKER`."""
        for process in psutil.process_iter(["pid"]):
            try:
                if process.environ().get(MARK) == f"{self.folder}/{name}":
                    process.kill()
            except psutil.Error:
                continue

    def run(self, code: str) -> subprocess.Popen[str]:
        """A driver; `CLUSTER` is its address."""
        code = f"import ray\nCLUSTER = {self.address!r}\n{code}"
        return subprocess.Popen(
            [RAY_PYTHON, "-c", code], env=self._env("driver", {}), stdout=subprocess.PIPE, text=True
        )

    def status(self, *arguments: str) -> str:
        """The output of `ray status`."""
        command = [RAY_PYTHON, "-m", "ray.scripts.scripts", "status", "--address", self.address, *arguments]
        return subprocess.run(command, env=self._env("status", {}), capture_output=True, text=True, check=True).stdout

    def close(self) -> None:
        for process in self._started:
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 5
        while time.monotonic() < end and any(process.poll() is None for process in self._started):
            time.sleep(0.05)
        for name in {path.name for path in self.folder.iterdir()} | {"driver", "status"}:
            self.kill(name)
        for process in self._started:
            process.wait()

    def _listens(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex((f"{self.net}.2", self.port)) == 0

    def _ray(self, name: str, number: int, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        command = [RAY_PYTHON, "-m", "ray.scripts.scripts", "start", "--block", *_SMALL, *arguments]
        command += ["--temp-dir", str(home), "--node-ip-address", f"{self.net}.{number}"]
        env = self._env(name, env)
        with (home / "output").open("ab") as out:
            self._started.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True))

    def _env(self, name: str, more: Mapping[str, str]) -> dict[str, str]:
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token), "RAY_USAGE_STATS_ENABLED": "0"}
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), MARK: f"{self.folder}/{name}", **auth, **more}
