"""Stories of failures in a row: what ends a row, and what is never one, under virtual time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.harness import SELDOM, Daemon, place, slots_of
from tpucare.model.causes import Cause
from tpucare.model.memory import End, FailureKind
from tpucare.model.resources import LABEL_OWNER, Care, OnSuccess, Provisioning
from tpucare.model.runs import Failure, NodeReport, ProbeOrder
from tpucare.planner import desired_state
from tpucare.planner.decide import tries_again_at
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.simulation.machines import Script

SINGLE = place(kind="v2-8", workers=1)


def end_all(daemon: Daemon, status: int | None = 1) -> None:
    node = daemon.node_of("pod-0")
    for worker in daemon.launcher.of_node(*node.key):
        daemon.launcher.end(worker, status, Failure.CRASH)
    daemon.launcher.hint(node.key)


def await_training(daemon: Daemon) -> None:
    """On whatever node; its run has made progress."""
    daemon.run_until(lambda: daemon.trains("pod-0") and daemon.memory("pod-0").run.progressed)  # type: ignore[union-attr]


def test_stalls_that_lie_far_apart_are_no_row(tmp_path: Path) -> None:
    """
    The seventh stall in the life of a slot failed it, whatever it had trained in between. Progress in this job, a
    success, or an hour of life where no step is told ends the row.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 1, SINGLE)
    for _ in range(8):
        await_training(daemon)
        daemon.run(minutes=10)
        for worker in daemon.launcher.of_node(*daemon.node_of("pod-0").key):
            daemon.launcher.hang(worker)
        daemon.run(minutes=45)
    counter = daemon.memory("pod-0").counter(FailureKind.STALL)
    assert (counter.total, daemon.memory("pod-0").end) == (8, End.NONE)


def test_crashes_between_successes_are_no_row(tmp_path: Path) -> None:
    """
    Each trial of an agent begins at step 0, so none got beyond the furthest step, and its crashes were one row for
    ever. A success ends the row.
    """
    daemon = Daemon(tmp_path, script=Script(steps=600, save_every=10**9))
    daemon.care_for("pod", 1, SINGLE, care=Care(on_success=OnSuccess.RESTART, crash_budget=2))
    for _ in range(4):
        await_training(daemon)
        end_all(daemon)
        daemon.run(minutes=30)
    memory = daemon.memory("pod-0")
    assert (memory.counter(FailureKind.CRASH).total, memory.end) == (4, End.NONE)


def test_what_an_older_experiment_reached_is_no_measure_for_the_next(tmp_path: Path) -> None:
    """
    The furthest step of an older experiment made a failure of each run of the next one. Only progress in the same job
    is compared.
    """
    daemon = Daemon(tmp_path, script=Script(save_every=10))
    daemon.care_for("pod", 1, SINGLE, care=Care(crash_budget=2))
    daemon.run(hours=2)
    (slot,) = slots_of("pod", 1, SINGLE, care=Care(crash_budget=2))
    assert slot.job is not None
    daemon.care_for_slots("pod", [replace(slot, job=replace(slot.job, checkpoint="gs://bucket/other"))])
    end_all(daemon)
    daemon.launcher.bucket.clear()
    for _ in range(5):
        await_training(daemon)
        daemon.run(minutes=3)
        end_all(daemon)
        daemon.run(minutes=2)
    memory = daemon.memory("pod-0")
    assert (memory.end, memory.counter(FailureKind.CRASH).failures <= 1) == (End.NONE, True)
    assert memory.step is not None
    assert memory.step < 3600


def test_an_hour_of_bad_spot_is_no_row_of_a_job_that_tells_no_step(tmp_path: Path) -> None:
    """
    Nodes preempted during their launch counted as infrastructure failures, and a job that tells no step never reset
    that count. The failure is taken back where the node died, and one launch counts once.
    """
    daemon = Daemon(tmp_path, script=Script(tells_progress=False))
    daemon.care_for("pod", 1, SINGLE)
    daemon.run(minutes=20)
    for _ in range(13):
        daemon.launcher.lost["launch-before"] = 1
        daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
        daemon.run_until(lambda: daemon.launcher.lost["launch-before"] == 0)
    daemon.run(minutes=20)
    assert daemon.trains("pod-0")
    end_all(daemon, None)
    daemon.run(minutes=10)
    memory = daemon.memory("pod-0")
    assert memory.counter(FailureKind.INFRASTRUCTURE).failures <= 2
    assert daemon.trains("pod-0")
    daemon.run(minutes=70)
    assert daemon.memory("pod-0").counter(FailureKind.INFRASTRUCTURE).failures == 0, "it lives for an hour"


def test_a_job_that_cuts_off_its_own_nodes_fails_in_the_end(tmp_path: Path) -> None:
    """
    A job that cut off its own nodes used up node after node, because silence counted as no failure. The silence of a
    node with a run on it is an interruption, and the failure budget of interruptions limits it.
    """
    daemon = Daemon(tmp_path, script=Script(tells_progress=False))
    daemon.care_for("pod", 1, SINGLE)
    daemon.care_for("other", 1, SINGLE)
    cut: set[str] = set()
    while daemon.clock.seconds < 86400 and daemon.memory("pod-0").end is End.NONE:
        if daemon.trains("pod-0"):
            for worker in daemon.launcher.of_node(*daemon.node_of("pod-0").key):
                worker.silent = True
            cut.add(daemon.node_of("pod-0").key.name)
        daemon.run(minutes=1)
    assert len(cut) == 13
    assert "silent" in daemon.memory("pod-0").end_why


@pytest.mark.parametrize("fate", ["preempted", "one worker silent"])
def test_a_run_that_finished_is_not_run_again_for_what_becomes_of_its_node(tmp_path: Path, fate: str) -> None:
    """
    The run ended with 0 on all workers, its node went within the minute that makes the end sure, and all was trained
    again. Two such reports 5 s apart are remembered, and the death or silence of the node takes nothing back.
    """
    daemon = Daemon(tmp_path, script=Script(steps=600, save_every=10**9))
    daemon.care_for("pod")
    daemon.care_for("other", 1, SINGLE, care=Care(on_success=OnSuccess.RESTART))
    daemon.run_until(lambda: daemon.causes()["pod-0"] is Cause.RUN_FINISHED)
    daemon.run(seconds=40)
    if fate == "preempted":
        daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now(), visible_after=timedelta(seconds=15))
    else:
        daemon.launcher.of_node(*daemon.node_of("pod-0").key)[3].silent = True
    daemon.run(minutes=30)
    assert daemon.memory("pod-0").end is End.DONE
    assert [token for token in daemon.launcher.launches if token.startswith("pod-")] == ["pod-0-a0.1"]
    assert daemon.zone.states("pod-0") == []


@pytest.mark.parametrize("phase", [Failure.CRASH, Failure.SETUP])
def test_a_dependency_that_is_away_for_hours_fails_no_slot_that_had_trained_for_good(
    tmp_path: Path, phase: Failure
) -> None:
    """
    A bucket, a package index or W&B was away for two hours, and every slot failed for good. A failed slot whose job had
    trained is tried again each hour, 24 times; tries are counted, because a daemon that was off, or a clock that
    jumped, has tried nothing.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 2, SINGLE)
    daemon.run(minutes=75)
    for slot in daemon.engine.slots:
        daemon.launcher.script.exits[slot], daemon.launcher.script.failures[slot] = (-1, 1, 10.0), phase
    end_all(daemon)
    daemon.zone.world.operator.preempt("pod-1", daemon.clock.true_now())
    daemon.run(hours=4)
    assert [daemon.memory(slot).end for slot in daemon.engine.slots] == [End.FAILED] * 2
    assert tries_again_at(daemon.engine.slots["pod-0"].slot, daemon.memory("pod-0"))
    assert not daemon.engine.is_over("pod-0")
    daemon.launcher.script.exits.clear()
    daemon.run(minutes=75)
    assert daemon.all_train()
    daemon.run(minutes=10)
    assert daemon.memory("pod-0").failed_since is None


def test_of_a_run_that_was_taken_in_again_the_job_is_not_known_and_what_had_trained_still_is(tmp_path: Path) -> None:
    """Somebody writes another owner on the node for a while; its run trains for hours more, and then all runs fail."""
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 1, SINGLE)
    daemon.run(minutes=75)
    daemon.engine.change("pod-0", desired_state.restart, "restart", "restart")
    daemon.run(minutes=10)
    name, world = daemon.node_of("pod-0").key, daemon.zone.world
    path = f"projects/{name.project}/locations/{name.zone}/nodes/{name.name}"
    labels = dict(daemon.node_of("pod-0").labels)
    for owner in ("o-somebodyelse", labels[LABEL_OWNER]):
        world.api.update_node(
            path, ("labels",), NodeSpec(labels={**labels, LABEL_OWNER: owner}), daemon.clock.true_now()
        )
        daemon.run(minutes=75)
    daemon.launcher.script.exits["pod-0"] = (-1, 1, 10.0)
    end_all(daemon)
    daemon.run(hours=3)
    assert tries_again_at(daemon.engine.slots["pod-0"].slot, daemon.memory("pod-0"))


def test_a_job_that_cannot_serve_any_more_is_given_up_after_a_day(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, settings=SELDOM)
    daemon.care_for("pod", 1, SINGLE, care=Care(crash_budget=1))
    daemon.run(minutes=75)
    daemon.launcher.script.exits["pod-0"] = (-1, 1, 10.0)
    end_all(daemon)
    daemon.run(hours=3, minutes=30)
    assert daemon.zone.nodes() == [], "what failed first is kept for a look, for an hour; what was tried since is not"
    daemon.run(hours=22, minutes=30)
    tried = len(daemon.launcher.launches)
    daemon.run(hours=5)
    assert 20 <= len(daemon.launcher.launches) == tried <= 30
    assert daemon.memory("pod-0").end_cause is Cause.CRASHED
    assert not tries_again_at(daemon.engine.slots["pod-0"].slot, daemon.memory("pod-0"))
    assert daemon.engine.is_over("pod-0")


def test_a_person_is_told_of_processes_that_do_not_end_on_a_node_that_is_kept(tmp_path: Path) -> None:
    """
    Processes on an on-demand node did not end and were stopped 13,715 times in two days without a word to a person.
    After five stops a person is told, and the stop is repeated every 15 min.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 1, place(kind="v2-8", tier=Provisioning.ON_DEMAND, workers=1))
    await_training(daemon)
    daemon.launcher.script.ignores_stop.add("pod-0")
    daemon.engine.change("pod-0", desired_state.restart, "restart", "restart")
    daemon.run(hours=5)
    assert len(daemon.launcher.stops) <= 5 + 4 * 5
    assert "do not end" in daemon.told("person")[-1]
    daemon.launcher.script.ignores_stop.clear()
    daemon.run(minutes=20)
    assert daemon.trains("pod-0")


def test_errors_that_lie_hours_apart_are_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    After seven unexpected errors in the life of a process, each further one set the slot aside for ten minutes. An hour
    without an error ends the row.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 1, SINGLE)
    daemon.run(minutes=15)
    probe = daemon.launcher.probe

    def fails(order: ProbeOrder) -> NodeReport:
        monkeypatch.setattr(daemon.launcher, "probe", probe)
        raise ValueError("a fault in one probe")

    for _ in range(5):
        monkeypatch.setattr(daemon.launcher, "probe", fails)
        daemon.run(minutes=1)
        assert daemon.engine.slots["pod-0"].errors == 1
        daemon.run(minutes=70)
    assert daemon.trains("pod-0")
