"""How often the engine decides, probes and tells; what it does in bad weather is for the storms of the simulation."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from tests.kits.harness import Daemon
from tpucare.engine.engine import Settings


def test_a_slot_that_lives_long_is_not_decided_more_often(tmp_path: Path) -> None:
    """
    Each decision set a wake-up in observed time, and each wake-up brought another: the longer a slot lived, the more
    often it was decided. Only the wake-up of the last decision counts.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 5)
    daemon.run(minutes=20)
    view = daemon.engine.projects["my-project"]
    for _ in range(20):
        daemon.engine.change("pod-0", lambda memory: memory, "note", "pod-0: something new")
        daemon.run(seconds=20)
    daemon.run(hours=2)
    assert len(view._wakes) <= 10, "one of each slot, and few that a later decision made void"
    due = [slot for _, slot in view._wakes if view._wanted.get(slot) is not None]
    assert set(due) <= set(daemon.engine.slots)


def test_workers_that_are_asked_seldom_are_not_taken_for_stalled(tmp_path: Path) -> None:
    """
    The three observations that support a stall were listings, so workers that were asked seldom or late were taken for
    stalled. Three reports without a sign of progress are needed.
    """
    daemon = Daemon(tmp_path, settings=Settings(probe=3600))
    daemon.launcher.eager = True
    daemon.care_for("pod", 3)
    daemon.run(hours=8)
    assert daemon.told("stop") == []
    daemon.launcher.script.stands_still.add("pod-0")
    daemon.run(hours=24)
    assert [text.partition(".")[0] for text in daemon.told("stop")][:1] == ["stopping pod-0-a0"]


def test_a_person_is_told_once_however_often_the_api_fails_meanwhile(tmp_path: Path) -> None:
    """
    One failed listing had every slot decided twice, and repeated a warning that only a person could end (storm at high,
    seed 1). Slots are told of the second failure in a row, and the same warning is not repeated.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 2)
    daemon.run_until(lambda: len(daemon.launcher.workers) == 8)
    for worker in daemon.launcher.workers.values():
        worker.refuses = worker.key.name.startswith("pod-0")
    for _ in range(20):
        daemon.run(minutes=2)
        daemon.zone.world.operator.outage("api", timedelta(seconds=30), daemon.clock.true_now())
    [said] = daemon.told("person")
    assert said.startswith("pod-0-a0 refuses our key, though its metadata has it: is OS Login on")
