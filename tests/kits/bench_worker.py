"""A node of workers that are folders, with a launcher over it: what the tests of launch and runner have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from tests.kits.local_remote import LocalRemote
from tpucare.adapters.runner.launcher import ScriptLauncher
from tpucare.model.resources import Job, NodeKey, Worker
from tpucare.model.runs import LaunchOrder, LaunchResult, ProbeOrder, StopOrder, StopResult, WorkerReport

# Nobody listens there: a runner that looks for the metadata server of a real cloud would wait for its name.
NO_METADATA = {"GCE_METADATA_HOST": "127.0.0.1:9", "TPUCARE_DEVICE_GLOB": "/nonexistent/*"}


class Node:
    """One node; its slot's name is its own, for the workers of all tests see each other's processes."""

    def __init__(self, remote: LocalRemote, workers: int, secrets: Mapping[str, str]) -> None:
        self.remote = remote
        self.slot = f"t{uuid.uuid4().hex[:8]}"
        self.key = NodeKey("p", "z", f"{self.slot}-a1")
        self.workers = tuple(Worker(self.key, 7, number, f"host-{number}") for number in range(workers))
        self.homes = [remote.home(worker) for worker in self.workers]
        self.launcher = ScriptLauncher(remote, state_dir=remote.root / "state", secrets=secrets.get)

    def token(self, number: int = 1) -> str:
        return f"{self.key.name}.{number}"

    def folder(self, number: int = 1, worker: int = 0) -> Path:
        return self.homes[worker] / ".tpucare" / self.token(number)

    def order(self, job: Job, number: int = 1, *, grace: float = 5.0, sigterm: bool = True) -> LaunchOrder:
        return LaunchOrder(
            workers=self.workers,
            slot=self.slot,
            fleet=self.slot,
            token=self.token(number),
            attempt=1,
            job=job,
            coordinator="127.0.0.1:8476",
            grace=timedelta(seconds=grace),
            sigterm_on_preemption=sigterm,
        )

    def launch(self, job: Job, number: int = 1, *, grace: float = 5.0, sigterm: bool = True) -> LaunchResult:
        return self.launcher.launch(self.order(job, number, grace=grace, sigterm=sigterm))

    def start(self, run: str, number: int = 1, *, grace: float = 5.0) -> None:
        result = self.launch(Job(run=run), number, grace=grace)
        assert result.complete, result

    def probe(self, worker: int = 0, *, progress: str = "", checkpoint: str = "") -> WorkerReport:
        order = ProbeOrder(self.workers, self.slot, 1, progress=progress, checkpoint=checkpoint)
        return self.launcher.probe(order).workers[worker]

    def stop(self, *, grace: float = 5.0, stacks: bool = False) -> StopResult:
        order = StopOrder(self.workers, self.slot, 1, timedelta(seconds=grace), stacks)
        return self.launcher.stop(order)

    def ended(self, worker: int = 0) -> WorkerReport:
        """The report after the run ended."""
        report = self.probe(worker)

        def is_over() -> bool:
            nonlocal report
            report = self.probe(worker)
            return report.exit_status is not None and not report.alive

        eventually(is_over)
        return report

    def log(self, worker: int = 0) -> str:
        self.probe(worker)
        return self.launcher.logs.read(self.slot, 1, worker).decode()


@contextmanager
def node(workers: int = 1, *, secrets: Mapping[str, str] | None = None, **env: str) -> Iterator[Node]:
    remote = LocalRemote(env={**NO_METADATA, **env})
    try:
        yield Node(remote, workers, secrets or {})
    finally:
        remote.close()


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Other processes make it true: there is nothing to wait on but a look, at short intervals."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.03)
