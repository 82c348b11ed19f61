"""
`tpucare ray demo`: the story of docs/ray.md on an emulated cloud.

A real Ray head, a pool of two-host slices, a job of ten TPU tasks, one preemption in the middle of it, and rest.
The job says in its log on which slice each task ran. One Python environment serves the head and all emulated hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.integrations.ray.cluster import cluster_folder, read_head, submit_variables
from tpucare.integrations.ray.head import end_leftovers
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.text import length
from tpucare.testbed.demo.preemptions import Director
from tpucare.testbed.demo.reader import DaemonReader
from tpucare.testbed.demo.run import await_empty, demo_folder, leftovers
from tpucare.testbed.demo.setup import PROJECT, ZONES, DemoOptions, Stage, copy_example, free_port
from tpucare.testbed.demo.timeline import Told
from tpucare.testbed.emulator.machines.metadata_server import may_serve_by_name
from tpucare.testbed.emulator.witness import Witness

CLUSTER = "lab"
TASKS = 10
# As many tasks at a time as one slice has hosts, while the pool has more slices: one too many would show.
AT_ONCE, MOST_SLICES = 2, 3
LOSE_AFTER_TASKS = 3
TASK_SECONDS = 1.0
LOOK_SECONDS = 0.1
PATIENCE = timedelta(minutes=10)
# Ray takes its sizes from the whole machine, which all emulated hosts share, and so is the usual port of its agents on
# 127.0.0.1, for which each would wait three seconds.
SIZES = "--num-cpus=2 --memory=1000000000 --object-store-memory=80000000 --dashboard-agent-listen-port=0"

_TASK = re.compile(r"(?P<done>\d+) of \d+: task \d+ on slice (?P<slice>\S+)")


class RayStage(Stage):
    """
    A stage with a Ray head and a pool.

    temp: folder for the head's sockets, with a short path
    """

    def __init__(self, folder: Path, options: DemoOptions, temp: Path) -> None:
        super().__init__(folder, options)
        self.jobs = folder / "jobs"
        self._temp = temp
        self._head: subprocess.Popen[bytes] | None = None
        self._job: subprocess.Popen[bytes] | None = None

    def _build(self) -> None:
        self._make_folders()
        copy_example("ray", self.jobs)
        pool = {
            "name": CLUSTER,
            "project": PROJECT,
            "count": {"min": 0, "max": MOST_SLICES},
            "tpu": {"type": self.accelerator, "zones": [ZONES[0]], "network": {"external_ips": False}},
            "job": {"env": {"JAX_PLATFORMS": "cpu", "TPUCARE_RAY_ARGS": SIZES}},
            "care": {"grace": "5s"},
            # Ray may take 19 s to miss hosts that were killed; until then, those in their place have no work.
            "ray": {"python": sys.executable, "idle": "20s"},
        }
        self._declare(CLUSTER, pool)
        self._start_head()

    def daemon_environment(self) -> dict[str, str]:
        """Until the cloud's word of a preemption is known, tasks that Ray does again look like new demand."""
        return {**super().daemon_environment(), "TPUCARE_POLL": "0.5", "TPUCARE_FAST_POLL": "0.25"}

    def _start_head(self) -> None:
        """Beside the machines of another demo, Ray's own ports are free on an address of its own."""
        address = f"127.77.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}:{free_port()}"
        command = [sys.executable, "-m", "tpucare.cli", "ray", "head", CLUSTER, f"--address={address}"]
        command += [f"--dashboard-port={free_port()}", f"--temp-dir={self._temp}", "--", *SIZES.split()]
        with (self.folder / "head.log").open("ab") as log:
            self._head = subprocess.Popen(
                command, env=self.daemon_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def await_head(self) -> None:
        """Return when the head takes jobs. Raises: TpuCareError: it ended, or took too long."""
        assert self._head is not None
        until = time.monotonic() + PATIENCE.total_seconds()
        while not self._takes_jobs():
            if (status := self._head.poll()) is not None:
                raise TpuCareError(f"the head ended with exit status {status}: {self._tail('head.log')}")
            if time.monotonic() > until:
                raise TpuCareError(f"the head did not answer within {length(PATIENCE)}: {self._tail('head.log')}")
            time.sleep(LOOK_SECONDS)

    def _takes_jobs(self) -> bool:
        head = read_head(self.state, CLUSTER)
        if head is None:
            return False
        wanted = {"Authorization": f"Bearer {Path(head.token).read_text()}"}
        request = urllib.request.Request(f"http://{head.dashboard}/api/jobs/", headers=wanted)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
            return True
        return False

    def submit(self) -> None:
        """`ray job submit`, whose output goes to `job.log`."""
        head = read_head(self.state, CLUSTER)
        assert head is not None
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", str(self.jobs), "--"]
        command += ["python", "tpu_example.py", str(TASKS), f"--at-once={AT_ONCE}", f"--seconds={TASK_SECONDS}"]
        environment = {**os.environ, **submit_variables(head), "PYTHONUNBUFFERED": "1"}
        with self.job_log.open("ab") as log:
            self._job = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.jobs
            )

    @property
    def job_log(self) -> Path:
        return self.folder / "job.log"

    def job_status(self) -> int | None:
        """Exit status of the job; None: it runs."""
        assert self._job is not None
        return self._job.poll()

    def _tail(self, file: str) -> str:
        return " | ".join((self.folder / file).read_text(errors="replace").splitlines()[-5:])

    def close(self) -> None:
        """End the job's client and the head, then the daemon and the cloud."""
        for process in (self._job, self._head):
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._head is not None:
            end_leftovers(CLUSTER, cluster_folder(self.state, CLUSTER))
        super().close()


@dataclass(slots=True)
class RayReport:
    """
    The report at the end; `as_json` is the output of `--json`.

    slices: every slot that had a node, and its nodes in order    lost: the node that was preempted
    healed_seconds: from the preemption to the next task on the slice of the same name; 0: there was none
    setup_seconds: until the head takes jobs    story_seconds: from the job's submission until all is at rest
    """

    job_status: int | None = None
    tasks: int = 0
    slices: dict[str, list[str]] = field(default_factory=dict)
    lost: str = ""
    healed_seconds: float = 0.0
    leaked_nodes: list[str] = field(default_factory=list)
    leaked_processes: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    setup_seconds: float = 0.0
    story_seconds: float = 0.0

    @property
    def asked(self) -> int:
        """Slices that the job asks for: all tasks that it asks for at a time find place on one."""
        return 1

    @property
    def faults(self) -> list[str]:
        """Every broken promise, one line each."""
        found = list(self.findings)
        if self.job_status != 0 or self.tasks != TASKS:
            found.append(f"the job ended with exit status {self.job_status} after {self.tasks} of {TASKS} tasks")
        if len(self.slices) != self.asked:
            found.append(f"{len(self.slices)} slices were created, {self.asked} was asked for")
        if not self.lost or not self.healed_seconds:
            found.append("no task ran on the preempted slice again" if self.lost else "no slice was preempted")
        for slot, nodes in self.slices.items():
            wanted = 1 + sum(node == self.lost for node in nodes)
            if len(nodes) != wanted:
                found.append(f"{slot} had {len(nodes)} nodes, {wanted} wanted: {', '.join(nodes)}")
        return [*found, *leftovers(self.leaked_nodes, self.leaked_processes)]

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.faults,
            "faults": self.faults,
            "tasks": self.tasks,
            "slices_asked_for": self.asked,
            "slices": self.slices,
            "preempted": self.lost,
            "healed_seconds": round(self.healed_seconds, 1),
            "leaked_nodes": self.leaked_nodes,
            "leaked_processes": self.leaked_processes,
            "setup_seconds": round(self.setup_seconds, 1),
            "story_seconds": round(self.story_seconds, 1),
        }


def run_ray_demo(options: DemoOptions, show: Callable[[Sequence[Told], str], None]) -> RayReport:
    """
    Run the demo, and leave nothing but the kept folder. *show* gets what is new, and what is under way.

    Raises: ConfigError: not possible here. TpuCareError: the head or the daemon ended, or the demo took too long.
    """
    options.check()
    if not may_serve_by_name():
        raise ConfigError("Ray asks http://metadata.google.internal on emulated hosts, and its port 80 needs root")
    report, began = RayReport(), time.monotonic()
    with demo_folder(options.keep) as folder, _short_folder() as temp:
        show([], "starting the cloud, the daemon and the head")
        with RayStage(folder, options, temp) as stage:
            _require_mounts(stage)
            stage.await_head()
            report.setup_seconds, began = time.monotonic() - began, time.monotonic()
            _perform(stage, report, show)
            report.story_seconds = time.monotonic() - began
        report.leaked_processes += stage.survivors()
        created = frozenset(node for nodes in report.slices.values() for node in nodes)
        report.findings += stage.judge(CLUSTER, created)
    return report


@contextlib.contextmanager
def _short_folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_mounts(stage: RayStage) -> None:
    assert stage.server is not None
    sandbox = getattr(stage.server.machines, "sandbox", None)
    if sandbox is None or not sandbox.mounts:
        raise ConfigError("Ray counts chips in /dev, and this system gives emulated hosts none of their own")


def _perform(stage: RayStage, report: RayReport, show: Callable[[Sequence[Told], str], None]) -> None:
    assert stage.server is not None
    director, watch = Director(stage, []), DaemonReader(stage)
    witness = Witness(director.nodes, stage.server.log_note, stage.survivors)
    witness.start()
    try:
        stage.submit()
        _watch_the_job(stage, director, watch, report, show)
        report.leaked_nodes = await_empty(stage, lambda: show(watch.refresh(), "waiting for the slices to rest"))
        report.leaked_processes = stage.survivors()
    finally:
        witness.stop()
        watch.close()
    created = [str(one["name"]) for one in stage.server.world.audit if one.get("event") == "created"]
    for node in (name.rpartition("/")[2] for name in created):
        report.slices.setdefault(node.rpartition("-")[0], []).append(node)


def _watch_the_job(
    stage: RayStage,
    director: Director,
    watch: DaemonReader,
    report: RayReport,
    show: Callable[[Sequence[Told], str], None],
) -> None:
    assert stage.server is not None
    lost_slice, lost_at, told, is_again = "", 0.0, 0, False
    until = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < until:
        stage.check_daemon()
        # Read before the log, so that nothing that it wrote is missed.
        report.job_status = stage.job_status()
        lines = stage.job_log.read_text(errors="replace").splitlines(keepends=True)
        tasks = [found for line in lines if line.endswith("\n") and (found := _TASK.search(line))]
        new = [Told(stage.server.now(), "task", found["slice"], found[0], {}) for found in tasks[told:]]
        told = report.tasks = len(tasks)
        # The log comes late: a task that ended before the loss may be read after it.
        if is_again and not report.healed_seconds and any(one.node == lost_slice for one in new):
            report.healed_seconds = time.monotonic() - lost_at
        show([*watch.refresh(), *new], "the job runs")
        is_again = is_again or (bool(lost_slice) and _is_launched_again(watch, lost_slice, report.lost))
        if not lost_slice and told >= LOSE_AFTER_TASKS:
            lost_slice, lost_at = tasks[-1]["slice"], time.monotonic()
            report.lost = next(
                record.path.node_id for record in director.nodes() if record.path.node_id.startswith(f"{lost_slice}-a")
            )
            director.preempt(report.lost)
        if report.job_status is not None:
            return
        time.sleep(LOOK_SECONDS)
    raise TpuCareError(f"the job did not end within {length(PATIENCE)}")


def _is_launched_again(watch: DaemonReader, slot: str, lost: str) -> bool:
    return any(one.kind == "launched" and one.node.startswith(f"{slot}-a") and one.node != lost for one in watch.events)
