"""Complaints about training itself: dead while all looks well, looping, or begun from the wrong place."""

from __future__ import annotations

import shutil
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tests.kits.bench_worker import eventually, node
from tests.kits.field import calls, launches_on, named, preempt
from tests.kits.harness import Daemon
from tpucare.engine.engine import Settings
from tpucare.model.memory import DesiredState, End, FailureKind
from tpucare.model.resources import Care, Job
from tpucare.model.runs import Failure
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.latency import around
from tpucare.testbed.simulation.machines import Script


def test_a_failed_node_is_kept_for_a_look(tmp_path: Path) -> None:
    """The node of a failed run was deleted at once, and with it what would have told why; or it was kept for ever."""
    daemon = Daemon(tmp_path, script=Script(exits={"pod-0": (-1, 1, 50.0)}))
    daemon.care_for("pod", care=Care(crash_budget=1, keep_failed=timedelta(hours=2)))
    daemon.run_until(lambda: daemon.memory("pod-0").end is End.FAILED)
    daemon.run(minutes=110)
    assert named(daemon) == ["pod-0-a0"], "there is still something to look at"
    assert not any(daemon.launcher.lives(worker) for worker in daemon.launcher.workers.values())
    daemon.run(minutes=20)
    assert named(daemon) == [], "and nobody pays for it for ever"
    assert daemon.told("failed") or daemon.told("person")
    daemon.check("pod-0-a0")


def test_a_failed_node_goes_at_once_when_asked(tmp_path: Path) -> None:
    """Whoever had looked at the failed node could not get rid of it before its time."""
    daemon = Daemon(tmp_path, script=Script(exits={"pod-0": (-1, 1, 50.0)}))
    daemon.care_for("pod", care=Care(crash_budget=0, keep_failed=timedelta(days=2)))
    daemon.run_until(lambda: daemon.memory("pod-0").end is End.FAILED)
    daemon.run(minutes=5)
    assert named(daemon) == ["pod-0-a0"]
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(minutes=5)
    assert named(daemon) == []
    daemon.check("pod-0-a0")


def test_a_busy_device_on_a_dirty_host(tmp_path: Path) -> None:
    """The last user's process held the chips of the host; the job was restarted there all night."""
    script = Script(exits={"pod-0-a0.1": (2, 1, 25.0)}, failures={"pod-0": Failure.DIRTY_HOST})
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod", care=Care(crash_budget=0))
    daemon.run(minutes=30)
    assert daemon.trains("pod-0")
    assert named(daemon) == ["pod-0-a1"]
    assert launches_on(daemon, "pod-0-a0") == ["pod-0-a0.1"]
    memory = daemon.memory("pod-0")
    assert (memory.counter(FailureKind.CRASH).total, memory.counter(FailureKind.INFRASTRUCTURE).total) == (0, 1)
    daemon.check("pod-0-a0")


def test_a_restart_of_the_caretaker_loses_tasks(daemon: Daemon) -> None:
    """The caretaker was restarted in the middle of twenty jobs, and afterwards knew nothing of half of them."""
    daemon.care_for("pod", 10)
    daemon.run(minutes=6)
    daemon.restart()
    daemon.run(minutes=10)
    preempt(daemon, "pod-3")
    preempt(daemon, "pod-7")
    daemon.run(seconds=40)
    daemon.restart()
    daemon.run(seconds=2)
    daemon.restart()
    daemon.run(minutes=20)
    assert daemon.all_train()
    lost = {"pod-3": 1, "pod-7": 1}
    assert named(daemon) == sorted(f"pod-{i}-a{lost.get(f'pod-{i}', 0)}" for i in range(10))
    assert len(set(daemon.launcher.launches)) == 12
    assert [daemon.memory(f"pod-{i}").attempts for i in (0, 3, 7)] == [1, 2, 2]
    daemon.check()


@pytest.mark.machines
@pytest.mark.skipif(shutil.which("screen") is None, reason="screen is not installed")
def test_the_newest_checkpoint_is_incomplete() -> None:
    """The node died while it saved, and every later attempt tried to restore the half of a checkpoint."""
    resume = f"{sys.executable} -c 'from tpucare.training import resume_step; print(\"from\", resume_step())'"
    save = "mkdir -p $1.orbax-checkpoint-tmp-7; echo w > $1.orbax-checkpoint-tmp-7/array"
    run = f"""
    {resume}
    mkdir -p "$TPUCARE_CHECKPOINT" && cd "$TPUCARE_CHECKPOINT"
    save() {{ {save}; }}
    save 100; mv 100.orbax-checkpoint-tmp-7 100
    save 200
    echo saving; sleep 300
    """
    with node() as one:
        job = Job(run=run, checkpoint=str(one.homes[0] / "checkpoints"))
        for number, want in ((1, "from None"), (2, "from 100")):
            assert one.launch(job, number).complete
            eventually(lambda: one.log().count("saving") == number)  # noqa: B023
            assert want in one.log()
            assert one.probe(checkpoint=job.checkpoint).checkpoint == 100, "the half of 200 does not count"
            assert one.stop(grace=0.2).quiet


@pytest.mark.parametrize("how", ["hangs", "vanished", "exited", "lost on one worker"])
def test_ready_and_healthy_while_training_is_dead(tmp_path: Path, how: str) -> None:
    """The console said READY and HEALTHY the whole weekend; nothing had trained since Friday."""
    script = Script()
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod", care=Care(stalled_after=timedelta(minutes=30)))
    daemon.run(minutes=20)
    workers = {worker.number: worker for worker in daemon.launcher.workers.values()}
    if how == "hangs":
        for worker in workers.values():
            daemon.launcher.hang(worker)
    else:
        for number in [0, 1, 2, 3] if how != "lost on one worker" else [2]:
            daemon.launcher.end(workers[number], status=1 if how == "exited" else None)
    reached = daemon.launcher.bucket["pod-0"]
    daemon.run(minutes=60)
    assert daemon.trains("pod-0")
    assert daemon.zone.states() == ["READY"]
    assert named(daemon) == ["pod-0-a0"], "the node was as well as it looked"
    assert launches_on(daemon, "pod-0-a0") == ["pod-0-a0.1", "pod-0-a0.2"]
    assert daemon.launcher.bucket["pod-0"] > reached + 600
    daemon.check()


def test_health_that_flaps(tmp_path: Path) -> None:
    """Health changed for minutes every hour, and each time a node that trained well was recreated."""
    health = {"flap_every": 1800.0, "flap_length": around(900), "values": (0, 2, 3, 4, 5, 99)}
    daemon = Daemon(tmp_path, config=WorldConfig.calm(health=health), settings=Settings(probe=60))
    daemon.care_for("pod", 2)
    shown = set()
    for _ in range(8 * 6):
        daemon.run(minutes=10)
        shown |= {node.health for node in daemon.zone.nodes()}
    assert len(shown) >= 4, "it did flap"
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a0", "pod-1-a0"]
    assert len(daemon.launcher.launches) == 2
    assert calls(daemon, "DeleteNode") == []
    daemon.check()


def test_a_crash_loop_of_the_users_code_burns_no_nodes(tmp_path: Path) -> None:
    """A typo in the script made the caretaker recreate the node all night; in the morning the grant was used up."""
    daemon = Daemon(tmp_path, script=Script(exits={"pod-0": (-1, 2, 40.0)}))
    daemon.care_for("pod", care=Care(crash_budget=4, keep_failed=timedelta(minutes=30)))
    daemon.run(hours=3)
    memory = daemon.memory("pod-0")
    assert memory.end is End.FAILED
    assert memory.counter(FailureKind.CRASH).total == 5
    assert len(calls(daemon, "CreateNode")) == 1
    assert launches_on(daemon, "pod-0-a0") == [f"pod-0-a0.{number}" for number in range(1, 6)]
    starts = [seconds for seconds, what, _, worker in daemon.launcher.history if what == "start" and worker == 0]
    pauses = [later - sooner for sooner, later in pairwise(starts)]
    assert pauses == sorted(pauses), "it waits longer each time"
    assert named(daemon) == []
    daemon.check("pod-0-a0")


def test_training_is_dead_while_workers_are_asked_seldom(tmp_path: Path) -> None:
    """With slow heartbeats the watcher's own patience ran out before it had seen enough, and it never looked again."""
    daemon = Daemon(tmp_path, settings=Settings(probe=1800))
    daemon.launcher.eager = True
    daemon.care_for("pod")
    daemon.run(minutes=10)
    for worker in daemon.launcher.workers.values():
        daemon.launcher.hang(worker)
    daemon.run(hours=5)
    assert launches_on(daemon, "pod-0-a0")[1:2] == ["pod-0-a0.2"]
    assert daemon.trains("pod-0")
    daemon.check()
