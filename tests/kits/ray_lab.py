"""A Ray cluster over the emulated cloud: a real head, real hosts over SSH and screen, real jobs, and the daemon."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import yaml

from tests.kits.deployment import PATIENCE_SECONDS, Deployment, deployment, eventually
from tests.kits.ray_cluster import RAY_PYTHON
from tpucare.integrations.ray.cluster import read_head
from tpucare.model.memory import FailureKind
from tpucare.testbed.demo.setup import copy_example, free_port

T = TypeVar("T")

ZONE = "us-central2-b"
HEAD_STARTS = 3
# Ray takes its sizes from the whole machine, which all emulated hosts share.
SMALL = "--num-cpus=2 --memory=1000000000 --object-store-memory=80000000"
WORLD: Mapping[str, Any] = {"zones": {ZONE: {}}, "latencies": {"create_single": 0.5, "create_slice": 0.5}}


# `talk.py` beside each job. The test hears `say` of the driver and `tell` of tasks, too; `await_` waits for its words.
TALK = """\
import pathlib, time

WORDS = pathlib.Path({folder!r})

def say(word, *rest):
    print("#", word, time.time(), *rest, flush=True)

def tell(word):
    (WORDS / word).touch()

def await_(word):
    while not (WORDS / word).exists():
        time.sleep(0.05)
"""

# Holds a slice, and trains on both hosts until told to finish; a task that is lost is started again in the same group.
HOLD = """\
import os, sys, threading, time
import ray
from ray._private.state import state
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
from ray.util.tpu import SlicePlacementGroup
from talk import await_, say, tell

ray.init()

@ray.remote(num_cpus=0, resources={"TPU": 4}, max_retries=0)
def train(bundle, attempt):
    tell(f"trains-{bundle}-{attempt}")
    await_("finish")
    return os.environ["TPU_NAME"]

def watch():
    before, drained = None, 0
    while True:
        if (now := placement_group_table(group)["state"]) != before:
            say("group", now)
            before = now
        if (now := len(state.get_draining_nodes())) > drained:
            say("draining", now)
            drained = now
        time.sleep(0.02)

def start(bundle, attempt):
    strategy = In(group, placement_group_bundle_index=bundle)
    pending[train.options(scheduling_strategy=strategy).remote(bundle, attempt)] = bundle, attempt

group = SlicePlacementGroup("2x2x2", "v4", strategy="STRICT_SPREAD", head_reservation_timeout_s=None).placement_group
threading.Thread(target=watch, daemon=True).start()
ray.get(group.ready())
pending = {}
for bundle in range(2):
    start(bundle, 1)
while pending:
    (task,), _ = ray.wait(list(pending))
    bundle, attempt = pending.pop(task)
    try:
        say("result", bundle, ray.get(task))
    except RayError as error:
        say("lost", bundle, type(error).__name__)
        start(bundle, attempt + 1)
"""


class Line(NamedTuple):
    """What a job said by `say`: when (seconds of the epoch), and what beside its word."""

    at: float
    rest: str


@dataclass(frozen=True, slots=True)
class Submitted:
    """
    A job under way.

    process: `ray job submit`, which shows the output of the job    folder: its files, words and output
    """

    process: subprocess.Popen[bytes]
    folder: Path

    def said(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def lines(self, word: str) -> list[Line]:
        """All that it said with `say(word, ...)`."""
        found = re.findall(rf"^# {word} ([\d.]+) ?(.*)$", self.said(), re.MULTILINE)
        return [Line(float(at), rest) for at, rest in found]

    def told(self) -> set[str]:
        """The words of its `tell`, and of ours."""
        return set(os.listdir(self.folder / "words"))

    def tell(self, word: str) -> None:
        """Let it go on from `await_(word)`."""
        (self.folder / "words" / word).touch()


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
        self._head_command: list[str] = []
        self._starts_left = 0
        self.head: subprocess.Popen[bytes] | None = None
        self.address = f"127.77.{os.getpid() % 250}.1:{free_port()}"
        self.dashboard_port = free_port()

    # --- the head ----------------------------------------------------------------------------------------------------

    def start_head(self) -> None:
        """`tpucare ray head lab`; returns when it takes jobs."""
        command = [sys.executable, "-m", "tpucare.cli", "ray", "head", "lab", "--address", self.address]
        command += ["--dashboard-port", str(self.dashboard_port), "--temp-dir", str(self.temp), "--python", RAY_PYTHON]
        self._head_command = [*command, "--", *SMALL.split()]
        self._starts_left = HEAD_STARTS
        self._spawn_head()
        self.home.await_(self._takes_jobs, f"the head takes jobs; {self.head_log} has what it says", 120)

    def _spawn_head(self) -> None:
        self._starts_left -= 1
        with self.head_log.open("ab") as log:
            self.head = subprocess.Popen(
                self._head_command, env=self.home.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )

    def kill_head(self) -> None:
        """SIGKILL to `ray start --head` alone; what it started is left to itself."""
        assert self.head is not None
        self.head.kill()
        self.head.wait()
        self.head = None

    def _takes_jobs(self) -> bool:
        """A job that does nothing is accepted, in 16 s at worst: the head answers before it has an agent for jobs."""
        assert self.head is not None
        if self.head.poll() is not None:
            # On a busy machine its raylet may need longer than the 30 s that Ray waits; its service starts it again.
            assert self._starts_left, self.head_log.read_text()[-3000:]
            self._spawn_head()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.dashboard_port}/api/jobs/",
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
            data=b'{"entrypoint": "true"}',
        )
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(request, timeout=60):
            return True
        return False

    @property
    def _mark(self) -> str:
        return f"TPUCARE_RAY_HEAD={self.home.state / 'ray' / 'lab'}"

    @property
    def token(self) -> str:
        record = read_head(self.home.state, "lab")
        return Path(record.token).read_text() if record is not None else ""

    # --- the person --------------------------------------------------------------------------------------------------

    def pool(
        self,
        count: Any = None,
        *,
        name: str = "lab",
        kind: str = "v4-16",
        tier: str = "spot",
        idle: str = "5s",
        **ray: Any,
    ) -> None:
        """Apply a pool; all emulated hosts share this Python."""
        self.home.live_slots = None
        document = {
            "name": name,
            "count": count or {"min": 0, "max": 2},
            "tpu": {"type": kind, "zones": [ZONE], "provisioning": tier, "network": {"external_ips": False}},
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
        **files: str | bytes,
    ) -> str:
        """`ray job submit` of a script to its end; its output."""
        return self.await_end(self.begin(script, *words, options=options, **files), want=want, seconds=seconds)

    def begin(self, script: str, *words: str, options: tuple[str, ...] = (), **files: str | bytes) -> Submitted:
        """`ray job submit`, not awaited."""
        folder = self._job_folder()
        (folder / "files").mkdir()
        talk = TALK.format(folder=str(folder / "words"))
        for file, content in {"job.py": script, "talk.py": talk, **files}.items():
            path = folder / "files" / file
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return self._begin(folder, "job.py", *words, options=options)

    def example(self, name: str, *words: str, options: tuple[str, ...] = ()) -> Submitted:
        """`ray job submit` of a program of examples/ray, not awaited."""
        folder = self._job_folder()
        copy_example("ray", folder / "files")
        return self._begin(folder, name, *words, options=options)

    def _job_folder(self) -> Path:
        folder = self.jobs / str(len(list(self.jobs.iterdir())))
        (folder / "words").mkdir(parents=True)
        return folder

    def _begin(self, folder: Path, program: str, *words: str, options: tuple[str, ...]) -> Submitted:
        command = [self.ray, "job", "submit", "--working-dir", ".", *options, "--", "python", program, *words]
        with (folder / "output").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=folder / "files", env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return Submitted(process, folder)

    def await_end(self, job: Submitted, *, want: int | None = 0, seconds: float = 180.0) -> str:
        """The job's whole output. `want`: the exit status that `ray job submit` must have; None: any."""
        self._await(job, lambda: job.process.poll() is not None, "the job ends", seconds)
        said, status = job.said(), job.process.returncode
        assert want is None or status == want, f"exit {status}\n{said}\n{self.home._told()}"
        return said

    def await_said(self, job: Submitted, word: str, times: int = 1, seconds: float = 120.0) -> list[Line]:
        """The first *times* lines `WORD SECONDS REST` of the job."""
        job_ends = f"the job ends before it says {word}"

        def look() -> list[Line]:
            lines = job.lines(word)
            assert len(lines) >= times or job.process.poll() is None, f"{job_ends}\n{job.said()}\n{self.home._told()}"
            return lines[:times] if len(lines) >= times else []

        return self._await(job, look, f"the job says {word}", seconds)

    def await_told(self, job: Submitted, *words: str, seconds: float = 120.0) -> float:
        """When the last of *words* was told first (seconds of the epoch)."""
        self._await(job, lambda: job.told().issuperset(words), f"the job tells {words}", seconds)
        return max((job.folder / "words" / word).stat().st_mtime for word in words)

    def _await(self, job: Submitted, look: Callable[[], T | None], what: str, seconds: float) -> T:
        def tell() -> str:
            return f"{job.said()}\n{self.home._told()}"

        return eventually(look, what, seconds, tell=tell, before_look=self.home.check_daemon)

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

    def ray_status(self) -> str:
        """What Ray's own `ray status -v` prints."""
        command = [self.ray, "status", "-v", "--address", self.address]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def crashes(self) -> dict[str, int]:
        """Slots with a crash in their books."""
        found = {slot: self.home.memory(slot) for slot in self._slots()}
        totals = {slot: memory.counter(FailureKind.CRASH).total for slot, memory in found.items() if memory}
        return {slot: total for slot, total in totals.items() if total}

    def probes(self) -> list[int]:
        """Processes of the daemon's probe, of killed daemons too."""
        words = [(one.pid, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        return [pid for pid, line in words if self.address in line and "tpucare-gcs-probe" in " ".join(line)]

    def of_head(self, word: str) -> list[int]:
        """Processes of the head, of killed ones too, whose command line has *word*."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()) and self._mark in _environment(process):
                    found.append(process.pid)
        return found

    def await_pids(self, node: str, worker: int, word: str) -> list[int]:
        """Processes of a host whose command line has *word*, as soon as there are some."""

        def look() -> list[int]:
            found = []
            for pid in self.home.machines.processes(self.home.path(node), worker):
                with contextlib.suppress(psutil.Error):
                    if word in " ".join(psutil.Process(pid).cmdline()):
                        found.append(pid)
            return found

        return self.home.await_(look, f"{word} on worker {worker} of {node}")

    def slices_made(self) -> list[str]:
        """Names of all nodes that were ever created."""
        created = [one for one in self.home.audit() if one["kind"] == "node" and one["event"] == "created"]
        return [str(one["name"]).rpartition("/")[2] for one in created]

    def await_rest(self, seconds: float = PATIENCE_SECONDS) -> None:
        """No node, and no process of a host."""
        self._allow_deletes()
        self.home.await_(lambda: not self.home.names(), "every slice rests", seconds)
        self.home.await_(lambda: not self.home.machines.survivors(), "no process of a host is left")

    def _allow_deletes(self) -> None:
        """Nodes of a pool may rest, and go for it."""
        for slot in self._slots():
            self.home.allow_deletes(slot)

    def _slots(self) -> set[str]:
        """Slots that ever had a node."""
        return {name.rpartition("-a")[0] for name in self.slices_made()}

    def close(self) -> None:
        self._allow_deletes()
        if self.head is not None:
            self.head.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.head.wait(15)
        left = [process for process in psutil.process_iter() if self._mark in _environment(process)]
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
def ray_lab(folder: Path, world: Mapping[str, Any] | None = None) -> Iterator[RayLab]:
    """A cluster with its head and the daemon, and nothing declared; its turn is waited for, each fills two cores."""
    with Path(__file__).open() as turn, contextlib.ExitStack() as stack:
        fcntl.flock(turn, fcntl.LOCK_EX)
        # Short: the head's sockets lie below it.
        temp = stack.enter_context(tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True))
        home = stack.enter_context(deployment(folder, world={**WORLD, **(world or {})}))
        lab = RayLab(home, Path(temp))
        try:
            lab.start_head()
            home.start()
            yield lab
        finally:
            lab.close()
