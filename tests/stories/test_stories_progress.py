"""Stories of runs that stand still, and of how their progress is told, under virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.harness import Daemon, place
from tpucare.model.memory import FailureKind
from tpucare.model.runs import WorkerReport
from tpucare.testbed.simulation.machines import Script, SimulatedRun, SimulatedWorker
from tpucare.testbed.simulation.workers import VirtualLauncher

SINGLE = place(kind="v2-8", workers=1)


def hang(daemon: Daemon, slot: str = "pod-0") -> None:
    for worker in daemon.launcher.of_node(*daemon.node_of(slot).key):
        daemon.launcher.hang(worker)


def stalls(daemon: Daemon, slot: str = "pod-0") -> int:
    return daemon.memory(slot).counter(FailureKind.STALL).total


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told by checkpoints alone."""
    report_run = VirtualLauncher._report_run

    def without_step(self: VirtualLauncher, worker: SimulatedWorker, run: SimulatedRun) -> WorkerReport:
        return replace(report_run(self, worker, run), step=None)

    monkeypatch.setattr(VirtualLauncher, "_report_run", without_step)


@pytest.mark.usefixtures("no_steps")
@pytest.mark.parametrize("restarts", [False, True], ids=["one daemon", "a restart after the hang"])
def test_a_hang_is_found_where_checkpoints_alone_tell_of_progress(tmp_path: Path, *, restarts: bool) -> None:
    """
    Checkpoints alone told of progress, the run hung, and a new process that never saw a sign missed none. A run that is
    known to have made progress stands still since the process met it.
    """
    daemon = Daemon(tmp_path, script=Script(save_every=30))
    daemon.care_for("pod", 1, SINGLE)
    daemon.run(hours=3)
    assert daemon.trains("pod-0")
    hang(daemon)
    daemon.run(minutes=5)
    if restarts:
        daemon.restart()
    daemon.run(hours=3)
    assert stalls(daemon) == 1
    assert daemon.trains("pod-0")


def test_a_run_that_hangs_after_its_first_sign_is_found(tmp_path: Path) -> None:
    """
    A run that hung after "begin at step 0", "restored at step N" or one step fell under no limit. The first step and
    checkpoint are where the run begins and no sign of progress; `first_step_timeout` limits the wait for the next one,
    and `stalled_after` applies once something moved.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 1, SINGLE)
    daemon.run_until(lambda: daemon.trains("pod-0"))
    hang(daemon)
    daemon.run(minutes=55)
    assert stalls(daemon) == 0
    daemon.run(minutes=15)
    assert stalls(daemon) == 1


def test_a_hang_at_the_restart_is_found_though_an_old_checkpoint_is_read_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The bucket's answer came after the first report: the checkpoint of the run before passed for progress of this one.
    The first checkpoint of a run is where it begins.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 1, SINGLE)
    daemon.run(hours=3)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    report_run = VirtualLauncher._report_run

    def late(self: VirtualLauncher, worker: SimulatedWorker, run: SimulatedRun) -> WorkerReport:
        report = report_run(self, worker, run)
        is_early = self.elapsed(run) < self.script.setup_seconds + 120
        return replace(report, step=None, checkpoint=None if is_early else report.checkpoint)

    monkeypatch.setattr(VirtualLauncher, "_report_run", late)
    daemon.run_until(lambda: len(daemon.launcher.launches) == 2 and daemon.trains("pod-0"))
    hang(daemon)
    daemon.run(minutes=75)
    assert stalls(daemon) == 1
