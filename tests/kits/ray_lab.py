"""A Ray cluster over the emulated cloud: a real head, real hosts over SSH and screen, real jobs, and the daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.kits.deployment import PATIENCE_SECONDS, Deployment, deployment
from tests.kits.ray_cluster import RAY_PYTHON
from tpucare.integrations.ray.cluster import read_head
from tpucare.testbed.demo.setup import copy_example, free_port

ZONE = "us-central2-b"
# Ray takes its sizes from the whole machine, which all emulated hosts share.
SMALL = "--num-cpus=2 --memory=1000000000 --object-store-memory=80000000"
WORLD: Mapping[str, Any] = {"zones": {ZONE: {}}, "latencies": {"create_single": 0.5, "create_slice": 0.5}}


class RayLab:
    """
    A deployment with the cluster `lab`. `close` ends the head and everything of it.

    temp: short, since Ray's sockets lie below it
    """

    def __init__(self, home: Deployment, temp: Path) -> None:
        self.home, self.temp = home, temp
        self.jobs = home.folder / "jobs"
        self.jobs.mkdir()
        self.head_log = home.folder / "head.log"
        self.head: subprocess.Popen[bytes] | None = None
        self.address = f"127.77.{os.getpid() % 250}.1:{free_port()}"
        self.dashboard_port = free_port()

    # --- the head ----------------------------------------------------------------------------------------------------

    def start_head(self) -> None:
        """`tpucare ray head lab`; returns when it takes jobs."""
        command = [sys.executable, "-m", "tpucare.cli", "ray", "head", "lab", "--address", self.address]
        command += ["--dashboard-port", str(self.dashboard_port), "--temp-dir", str(self.temp), "--python", RAY_PYTHON]
        command += ["--", *SMALL.split()]
        with self.head_log.open("ab") as log:
            self.head = subprocess.Popen(
                command, env=self.home.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        self.home.await_(self._takes_jobs, f"the head takes jobs\n{self.head_log.read_text()[-2000:]}")

    def kill_head(self) -> None:
        """SIGKILL to `ray start --head` alone; what it started is left to itself."""
        assert self.head is not None
        self.head.kill()
        self.head.wait()
        self.head = None

    def _takes_jobs(self) -> bool:
        assert self.head is not None
        assert self.head.poll() is None, self.head_log.read_text()[-3000:]
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.dashboard_port}/api/jobs/", headers={"Authorization": f"Bearer {self.token}"}
        )
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(request, timeout=5):
            return True
        return False

    @property
    def token(self) -> str:
        record = read_head(self.home.state, "lab")
        return Path(record.token).read_text() if record is not None else ""

    # --- the person --------------------------------------------------------------------------------------------------

    def pool(self, count: Any = None, *, name: str = "lab", kind: str = "v4-16", idle: str = "5s", **ray: Any) -> None:
        """Apply a pool; all emulated hosts share this Python."""
        self.home.live_slots = None
        document = {
            "name": name,
            "count": count or {"min": 0, "max": 2},
            "tpu": {"type": kind, "zones": [ZONE], "network": {"external_ips": False}},
            "job": {"env": {"TPUCARE_RAY_ARGS": SMALL, "JAX_PLATFORMS": "cpu"}},
            "care": {"grace": "10s"},
            "ray": {"cluster": "lab", "python": RAY_PYTHON, "idle": idle, **ray},
        }
        self.home.declare(name, yaml.safe_dump(document, sort_keys=False))

    def submit(
        self,
        script: str,
        *words: str,
        want: int | None = 0,
        seconds: float = 180.0,
        options: tuple[str, ...] = (),
        **files: str,
    ) -> str:
        """`ray job submit` of a script to its end; its output."""
        process = self.begin(script, *words, options=options, **files)
        out, _ = process.communicate(timeout=seconds)
        assert want is None or process.returncode == want, f"exit {process.returncode}\n{out}\n{self.home._told()}"
        return out

    def begin(self, script: str, *words: str, options: tuple[str, ...] = (), **files: str) -> subprocess.Popen[str]:
        """`ray job submit`, not awaited."""
        folder = self.jobs / str(len(list(self.jobs.iterdir())))
        folder.mkdir()
        for file, content in {"job.py": script, **files}.items():
            (folder / file).write_text(content)
        return self.begin_in(folder, "job.py", *words, options=options)

    def example(self, name: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """`ray job submit` of a program of examples/ray, not awaited."""
        folder = self.jobs / f"{len(list(self.jobs.iterdir()))}-ray"
        copy_example("ray", folder)
        return self.begin_in(folder, name, *words, options=options)

    def begin_in(self, folder: Path, program: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [self.ray, "job", "submit", "--working-dir", ".", *options, "--", "python", program, *words]
        return subprocess.Popen(
            command, cwd=folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def ray(self) -> str:
        return str(Path(RAY_PYTHON).with_name("ray"))

    @property
    def environment(self) -> dict[str, str]:
        """What `eval "$(tpucare ray env lab)"` makes of the environment."""
        lines = self.home.cli("ray", "env", "lab").out.splitlines()
        pairs = (line.removeprefix("export ").split("=", 1) for line in lines)
        ours = os.path.dirname(RAY_PYTHON)
        return {**self.home.environment, **dict(pairs), "PATH": f"{ours}:{os.environ['PATH']}"}

    def slices_made(self) -> list[str]:
        """Names of all nodes that were ever created."""
        created = [one for one in self.home.audit() if one["kind"] == "node" and one["event"] == "created"]
        return [str(one["name"]).rpartition("/")[2] for one in created]

    def await_rest(self, seconds: float = PATIENCE_SECONDS) -> None:
        """No node, and no process of a host."""
        for slot in ("lab-0", "lab-1", "lab-2", "lab-3"):
            self.home.allow_deletes(slot)
        self.home.await_(lambda: not self.home.names(), "every slice rests", seconds)
        self.home.await_(lambda: not self.home.machines.survivors(), "no process of a host is left")

    def close(self) -> None:
        for slot in ("lab-0", "lab-1", "lab-2", "lab-3"):
            self.home.allow_deletes(slot)
        mark = f"TPUCARE_RAY_HEAD={self.home.state / 'ray' / 'lab'}"
        if self.head is not None:
            self.head.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.head.wait(15)
        left = [process for process in psutil.process_iter() if mark in _environment(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)
        if self.head is not None:
            self.head.wait(5)


def _environment(process: psutil.Process) -> list[str]:
    try:
        return [f"{name}={value}" for name, value in process.environ().items() if name.startswith("TPUCARE_RAY_HEAD")]
    except psutil.Error:
        return []


@contextlib.contextmanager
def ray_lab(folder: Path, temp: Path, world: Mapping[str, Any] | None = None) -> Iterator[RayLab]:
    """*temp*: a short path for the head's sockets."""
    with deployment(folder, world={**WORLD, **(world or {})}) as home:
        lab = RayLab(home, temp)
        try:
            lab.start_head()
            home.start()
            yield lab
        finally:
            lab.close()
