"""
Stories of runs that tpucare did not start, in virtual time: preemption, ends of which nobody knows how, failed setups.

What the callbacks themselves do is `test_callback_launcher`'; here they are as long as a script says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.harness import Daemon, place, slots_of
from tpucare.model.memory import End
from tpucare.model.resources import Care, Job, OnExit
from tpucare.model.runs import Failure
from tpucare.planner.run import ENDED
from tpucare.service import status
from tpucare.testbed.emulator.world.machine_effects import Boot, Kill
from tpucare.testbed.simulation.machines import Script

MINUTE = 60.0
Made = Callable[..., Daemon]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Made]:
    """Makes the daemon of a story whose slots are a user's own: `start_fn` takes 20 s, its run ends after *ends*."""
    made: list[Daemon] = []

    def make(
        *, on_exit: OnExit = OnExit.LEAVE, ends: tuple[int, int, float] | None = None, count: int = 1, **care: int
    ) -> Daemon:
        script = Script(exits={"pod-0": ends} if ends else {})
        daemon = Daemon(tmp_path, script=script)
        job = Job(run="", foreign=True)
        known = Care(
            on_exit=on_exit, crash_budget=care.get("crash_budget", 10), setup_budget=care.get("setup_budget", 5)
        )
        slots = [replace(slot, job=job) for slot in slots_of("pod", count, place(), care=known)]
        daemon.care_for_slots("pod", slots)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        ended = daemon.memory("pod-0").end is not End.NONE
        daemon.check(*(["pod-0-a0"] if ended else []))


def row(daemon: Daemon) -> dict[str, object]:
    return status.slot_row(daemon.engine, daemon.engine.slots["pod-0"], daemon.clock.now())


def test_a_node_that_is_preempted_is_replaced_and_the_functions_are_called_there(door: Made) -> None:
    daemon = door()
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    assert daemon.launcher.launches == ["pod-0-a0.1", "pod-0-a1.1"]
    assert row(daemon)["phase"] == "run"


def test_a_run_that_ends_is_left_alone_and_told_once(door: Made) -> None:
    daemon = door(ends=(-1, 0, 20 * MINUTE))
    daemon.run(hours=8)
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    assert (daemon.launcher.stops, daemon.memory("pod-0").end) == ([], End.NONE)
    shown = row(daemon)
    assert (shown["phase"], shown["training"]) == ("ended", False)
    assert shown["why"] == f"{ENDED} (care.on_exit is leave)"
    assert daemon.told("settle").count(f"run over: {ENDED}") == 1


def test_a_node_that_was_left_is_still_replaced_when_it_is_preempted(door: Made) -> None:
    daemon = door(ends=(-1, 0, 20 * MINUTE))
    daemon.run(hours=1)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    assert daemon.memory("pod-0").attempts == 2


def test_the_node_that_is_left_costs_no_haste(door: Made) -> None:
    daemon = door(ends=(-1, 0, 20 * MINUTE))
    daemon.run(hours=2)
    calls, probes = len(daemon.zone.calls("ListNodes")), list(daemon.launcher.probes)[-1]
    daemon.run(minutes=10)
    assert len(daemon.zone.calls("ListNodes")) - calls <= 10 * MINUTE / daemon.settings.poll + 2
    later = [at for at in daemon.launcher.probes if at > probes]
    assert len(later) <= 10 * MINUTE / (0.8 * daemon.settings.probe) + 2


def test_a_restart_of_the_caretaker_keeps_to_what_was_said(door: Made) -> None:
    daemon = door(ends=(-1, 0, 20 * MINUTE))
    daemon.run(hours=1)
    daemon.restart()
    daemon.run(hours=1)
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    assert daemon.told("settle").count(f"run over: {ENDED}") == 1
    assert row(daemon)["phase"] == "ended"
    assert daemon.told("phase")[-2:] == ["pod-0-a0.1: run", "pod-0-a0.1: ended"]


def test_on_exit_restart_calls_the_functions_again_until_its_budget_is_spent(door: Made) -> None:
    daemon = door(on_exit=OnExit.RESTART, ends=(-1, 0, 5 * MINUTE), crash_budget=3)
    daemon.run(hours=12)
    assert [token.rpartition(".")[2] for token in daemon.launcher.launches] == ["1", "2", "3", "4"]
    memory = daemon.memory("pod-0")
    assert (memory.end, memory.end_why) == (End.FAILED, ENDED)
    assert memory.attempts == 1, "the same node"


def test_runs_that_live_long_are_restarted_for_ever(door: Made) -> None:
    daemon = door(on_exit=OnExit.RESTART, ends=(-1, 0, 90 * MINUTE), crash_budget=1)
    daemon.run(hours=12)
    assert len(daemon.launcher.launches) >= 6
    assert daemon.memory("pod-0").end is End.NONE


def test_on_exit_delete_ends_the_slot(door: Made) -> None:
    daemon = door(on_exit=OnExit.DELETE, ends=(-1, 0, 5 * MINUTE))
    daemon.run(hours=1)
    memory = daemon.memory("pod-0")
    assert (memory.end, memory.end_why) == (End.DONE, ENDED)
    assert daemon.zone.nodes("pod-0") == []
    assert row(daemon)["phase"] == "done"
    assert daemon.told("done") == [f"ended: {ENDED}"]


def test_a_worker_that_ends_alone_is_no_end(door: Made) -> None:
    daemon = door(on_exit=OnExit.RESTART, ends=(2, 0, 5 * MINUTE))
    daemon.run(hours=2)
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    assert row(daemon)["why"] == "running; what ran on worker 2 has ended"


def test_a_setup_that_fails_is_tried_again_with_patience_and_then_given_up(door: Made) -> None:
    daemon = door(ends=(1, 1, 5.0), setup_budget=2)
    daemon.launcher.script.failures["pod-0"] = Failure.SETUP
    daemon.run(hours=2)
    memory = daemon.memory("pod-0")
    assert [token.rpartition(".")[2] for token in daemon.launcher.launches] == ["1", "2", "3"]
    assert memory.end is End.FAILED
    assert memory.books["setup"].total == 3


def test_a_worker_that_is_started_anew_gets_its_run_again(door: Made) -> None:
    daemon = door()
    daemon.run(minutes=15)
    key = daemon.node_of("pod-0").key
    worker = daemon.launcher.workers[key, 1]
    path = next(node.path for node in daemon.zone.nodes("pod-0"))
    daemon.launcher.apply(Kill(daemon.clock.true_now(), path, worker.node_id, 1))
    daemon.run(seconds=30)
    daemon.launcher.apply(Boot(daemon.clock.true_now(), path, worker.node_id, 1, worker.address, "", {}, ()))
    daemon.run(minutes=10)
    assert daemon.trains("pod-0")
    assert daemon.launcher.launches == ["pod-0-a0.1", "pod-0-a0.2"]
    assert daemon.memory("pod-0").books["infrastructure"].total == 1
