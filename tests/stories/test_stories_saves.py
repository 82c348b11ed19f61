"""Stories of how often runs are told to save, under virtual time."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.harness import SELDOM, Daemon, place
from tpucare.model.resources import Care, SaveBounds
from tpucare.service.status import slot_row
from tpucare.testbed.simulation.machines import Script

POD = place(kind="v2-32", workers=4)


def told(daemon: Daemon, slot: str = "pod-0") -> list[float]:
    """The interval of each worker's run; 0: it was told none."""
    workers = daemon.launcher.of_node(*daemon.node_of(slot).key)
    return [(worker.run.cadence or 0.0) if worker.run is not None else 0.0 for worker in workers]


def test_every_worker_of_a_run_is_told_and_the_advice_follows_what_saves_cost(tmp_path: Path) -> None:
    """The cost was assumed (10 s); once the run measures it (2 s), it is told to save more often."""
    script = Script(save_seconds=2.0)
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod", 1, POD)
    daemon.run_until(lambda: daemon.trains("pod-0"))
    daemon.run(seconds=2)
    assert told(daemon) == pytest.approx([373.5] * 4, rel=0.05)
    daemon.run(minutes=5)
    assert daemon.memory("pod-0").save_seconds == 2.0
    assert told(daemon) == pytest.approx([171.0] * 4, rel=0.1)
    said = daemon.told("cadence")
    assert [text.split(":")[0] for text in said] == ["pod-0-a0.1"] * len(said)
    assert "a save blocks 2 s" in said[-1]


def test_the_next_node_is_told_what_the_last_one_measured(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, script=Script(save_seconds=40.0))
    daemon.care_for("pod", 1, POD)
    daemon.run(minutes=15)
    assert daemon.memory("pod-0").save_seconds == 40.0
    daemon.zone.world.operator.preempt("pod-0-a0", daemon.clock.true_now())
    daemon.run_until(lambda: daemon.trains("pod-0") and daemon.node_of("pod-0").name == "pod-0-a1")
    daemon.run(seconds=2)
    # A life of 15 minutes ended, beside the prior of two hours.
    assert told(daemon) == pytest.approx([553.0] * 4, rel=0.05)


def test_where_nodes_live_long_runs_save_more_seldom_on_every_slot_and_after_a_restart(tmp_path: Path) -> None:
    """The lives of a market are the project's knowledge: a new slot does not begin with the prior of two hours."""
    daemon = Daemon(tmp_path, script=Script(save_seconds=10.0), settings=SELDOM)
    daemon.care_for("pod", 1, POD)
    daemon.run(hours=30)
    daemon.restart()
    daemon.care_for("new", 1, POD)
    daemon.run_until(lambda: daemon.trains("new-0"))
    daemon.run(minutes=2)
    before = told(daemon, "new-0")[0]
    assert before > 1300
    daemon.zone.world.operator.preempt("pod-0-a0", daemon.clock.true_now())
    daemon.run(hours=1)
    # One life of 30 hours that ended, beside the prior.
    assert told(daemon, "new-0")[0] < before / 1.2


def test_the_longer_a_node_lives_the_more_seldom_its_run_saves_within_the_bounds(tmp_path: Path) -> None:
    care = Care(save_every=SaveBounds(timedelta(minutes=5), timedelta(minutes=20)))
    daemon = Daemon(tmp_path, script=Script(save_seconds=10.0), settings=SELDOM)
    daemon.care_for("pod", 1, POD, care=care)
    intervals = []
    for _ in range(30):
        daemon.run(hours=1)
        intervals += told(daemon)[:1]
    assert intervals == sorted(intervals)
    assert intervals[0] > 300
    assert 1200 / 1.1 < intervals[-1] <= 1200
    # An event for each tenth more, not for each probe.
    assert len(daemon.told("cadence")) < 20


def test_a_run_that_does_not_measure_its_saves_is_told_without_a_word_to_people(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, script=Script(save_seconds=3.0, tells_progress=False), settings=SELDOM)
    daemon.care_for("pod", 1, POD)
    daemon.run(hours=6)
    assert min(told(daemon)) > 0
    events = [event for event in daemon.events if event.kind == "cadence"]
    assert {event.level for event in events} == {"debug"}
    row = slot_row(daemon.engine, daemon.engine.slots["pod-0"], daemon.clock.now())
    assert (row["cadence"]["followed"], row["cadence"]["save_seconds"]) == (False, 10.0)
