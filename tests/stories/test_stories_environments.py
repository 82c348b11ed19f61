"""Stories of environments that are kept over nodes, under virtual time: who is told of which archive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.kits.harness import Daemon, place, slots_of
from tpucare.model.resources import Job, Slot
from tpucare.model.runs import Archive
from tpucare.testbed.simulation.workers import VirtualLauncher

POD = place(kind="v2-8", workers=1)
JOB = Job(run="python3 train.py", setup="bash setup.sh", cache="gs://bucket/cache")


def slots(fleet: str, count: int = 1, job: Job = JOB) -> list[Slot]:
    return [replace(slot, job=job) for slot in slots_of(fleet, count, POD)]


def archive_of(daemon: Daemon, slot: str) -> Archive | None:
    """The archive that the slot's run was launched with."""
    assert isinstance(daemon.launcher, VirtualLauncher)
    (worker,) = daemon.launcher.of_node(*daemon.node_of(slot).key)
    assert worker.run is not None
    return worker.run.archive


def preempt(daemon: Daemon, slot: str) -> None:
    before = daemon.node_of(slot).name
    daemon.zone.world.operator.preempt(before, daemon.clock.true_now())
    daemon.run_until(
        lambda: (
            daemon.trains(slot) and len(daemon.engine.slots[slot].nodes) == 1 and daemon.node_of(slot).name != before
        )
    )


def ready(tmp_path: Path) -> Daemon:
    daemon = Daemon(tmp_path)
    daemon.care_for_slots("pod", slots("pod"))
    daemon.run(minutes=15)
    assert archive_of(daemon, "pod-0") is None
    return daemon


def test_the_next_node_is_told_of_the_archive_also_by_the_next_process(tmp_path: Path) -> None:
    daemon = ready(tmp_path)
    stored = daemon.memory("pod-0").stored
    assert stored is not None
    daemon.restart()
    daemon.run(minutes=1)
    preempt(daemon, "pod-0")
    assert archive_of(daemon, "pod-0") == stored.archive
    daemon.run(minutes=2)
    told = daemon.told("environment")
    assert told == [
        "pod-0-a0.1: the environment is kept for later nodes (412 MB)",
        "pod-0-a0.1: set up",
        "pod-0-a1.1: environment restored",
    ]


def test_all_slots_of_the_fleet_use_it_and_no_other_fleet(tmp_path: Path) -> None:
    daemon = ready(tmp_path)
    daemon.edit("pod", slots("pod", 2))
    daemon.care_for_slots("other", slots("other"))
    daemon.run(minutes=15)
    assert archive_of(daemon, "pod-1") is not None
    assert archive_of(daemon, "other-0") is None


def test_another_set_up_begins_anew(tmp_path: Path) -> None:
    daemon = ready(tmp_path)
    daemon.edit("pod", slots("pod", job=replace(JOB, setup="bash other.sh")))
    preempt(daemon, "pod-0")
    assert archive_of(daemon, "pod-0") is None


def test_a_worker_that_names_an_archive_of_another_scope_is_not_believed(tmp_path: Path) -> None:
    """A worker speaks for its own fleet: one that was broken into must not choose what others run."""
    daemon = ready(tmp_path)
    daemon.care_for_slots("victim", slots("victim"))
    daemon.run(minutes=15)
    known = daemon.memory("victim-0").stored
    assert known is not None
    preempt(daemon, "pod-0")
    (worker,) = daemon.launcher.of_node(*daemon.node_of("pod-0").key)
    assert worker.run is not None
    worker.run.archive, worker.run.cache_scope = None, known.archive.scope
    daemon.run(minutes=5)
    assert daemon.memory("pod-0").stored != known
    preempt(daemon, "victim-0")
    assert archive_of(daemon, "victim-0") == known.archive
