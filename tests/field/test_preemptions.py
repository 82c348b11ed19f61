"""Complaints about nodes that are taken away: how it shows, when it comes, and what is left behind."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.field import calls, launches_on, named, preempt
from tests.kits.harness import EU, US, Daemon, place
from tpucare.engine.engine import Settings
from tpucare.model.memory import End, FailureKind
from tpucare.model.resources import Care, NodeState, Provisioning
from tpucare.model.runs import Failure
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.simulation.machines import Script


@pytest.mark.parametrize("shown", [NodeState.TERMINATED, NodeState.REPAIRING, NodeState.UNKNOWN, "gone"])
def test_state_is_not_preempted_after_a_preemption(daemon: Daemon, shown: NodeState | str) -> None:
    """The node was preempted, but the API said something else, and the watcher waited for the one word it knew."""
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    preempt(daemon, "pod-0", shown=shown if isinstance(shown, str) else int(shown))
    daemon.run(minutes=25)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a1", "pod-1-a0"]
    daemon.check()


@pytest.mark.parametrize("stage", ["create asked for", "creating", "just up", "just launched", "setting up"])
def test_preempted_again_during_recovery(daemon: Daemon, stage: str) -> None:
    """The replacement was preempted before it trained, and nobody looked at it again."""
    daemon.launcher.script.setup_seconds = 120
    daemon.care_for("pod")
    daemon.run(minutes=15)
    preempt(daemon, "pod-0")
    reached = {
        "create asked for": lambda: bool(calls(daemon, "CreateNode")[1:]),
        "creating": lambda: bool(daemon.zone.nodes("pod-0-a1")),
        "just up": lambda: NodeState.READY in [node.state for node in daemon.zone.nodes("pod-0-a1")],
        "just launched": lambda: bool(launches_on(daemon, "pod-0-a1")),
        "setting up": lambda: daemon.trains("pod-0") and bool(launches_on(daemon, "pod-0-a1")),
    }[stage]
    daemon.run_until(reached)
    daemon.run(seconds=1)
    preempt(daemon, "pod-0-a1")
    daemon.run(minutes=25)
    assert daemon.trains("pod-0")
    assert named(daemon) == ["pod-0-a2"]
    assert daemon.memory("pod-0").counter(FailureKind.CRASH).total == 0
    daemon.check()


def test_setup_retried_on_a_node_that_is_gone(tmp_path: Path) -> None:
    """The set-up failed because the node had died, and was tried again and again on the dead node."""
    script = Script(exits={"pod-0-a0.1": (-1, 1, 5.0)}, failures={"pod-0": Failure.SETUP})
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod")
    daemon.run_until(lambda: bool(launches_on(daemon, "pod-0-a0")))
    daemon.run(seconds=4)
    preempt(daemon, "pod-0", visible_after=timedelta(minutes=2))
    daemon.run(minutes=30)
    assert launches_on(daemon, "pod-0-a0") == ["pod-0-a0.1"]
    assert daemon.memory("pod-0").counter(FailureKind.SETUP).total <= 1
    assert daemon.trains("pod-0")
    assert named(daemon) == ["pod-0-a1"]
    daemon.check()


def test_a_preemption_that_nobody_reports_hangs(daemon: Daemon) -> None:
    """The machines were gone, the connection never closed, the API said READY, and the run hung for a day."""
    daemon.launcher.hangs_up = False
    daemon.care_for("pod", 4)
    daemon.run(minutes=15)
    preempt(daemon, "pod-2", shown="never", silent=True)
    daemon.run(minutes=11)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a0", "pod-1-a0", "pod-2-a1", "pod-3-a0"]
    daemon.check()


@pytest.mark.parametrize("how", ["forgotten", "terminated", "silent"])
def test_an_on_demand_node_is_lost(daemon: Daemon, how: str) -> None:
    """Only preemptible nodes were looked after: one paid for in full was lost, and stayed lost."""
    daemon.care_for("pod", 2, place(tier=Provisioning.ON_DEMAND))
    daemon.run(minutes=15)
    now = daemon.clock.true_now()
    if how == "forgotten":
        daemon.zone.world.operator.remove("pod-0", now)
    elif how == "terminated":
        daemon.zone.world.operator.terminate("pod-0", now)
    else:
        for worker in range(4):
            daemon.zone.world.operator.lose_worker("pod-0", worker, now, silent=True)
        daemon.run(minutes=20)
        assert named(daemon) == ["pod-0-a0", "pod-1-a0"], "what was paid for gets more patience"
    daemon.run(minutes=40)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a1", "pod-1-a0"]
    daemon.check()


def test_a_node_that_the_api_forgot(daemon: Daemon) -> None:
    """The node answered 404 from one moment to the next, which the watcher took for its own mistake and gave up."""
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    daemon.zone.world.operator.remove("pod-1", daemon.clock.true_now())
    daemon.run(minutes=15)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a0", "pod-1-a1"]
    assert "pod-1-a0" not in [call["node"] for call in calls(daemon, "DeleteNode")]
    daemon.check()


def test_a_node_dies_during_setup_and_scheduling_stops(daemon: Daemon) -> None:
    """One node died while it was set up; the exception ended the loop, and no other node was ever replaced again."""
    daemon.launcher.script.setup_seconds = 600
    daemon.care_for("pod", 3)
    daemon.run_until(lambda: len(daemon.launcher.launches) == 3)
    daemon.run(minutes=2)
    preempt(daemon, "pod-1")
    daemon.run(minutes=15)
    preempt(daemon, "pod-2")
    daemon.run(minutes=30)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a0", "pod-1-a1", "pod-2-a1"]
    assert {token.rpartition("-a")[0] for token in daemon.launcher.launches} == {"pod-0", "pod-1", "pod-2"}
    daemon.check()


def test_a_siblings_exit_after_a_preemption_is_booked_as_a_crash(tmp_path: Path) -> None:
    """A slice died worker by worker; the survivors' error exits were counted as the user's crashes until it failed."""
    script = Script()
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod", care=Care(crash_budget=0))
    for number in range(4):
        daemon.run_until(lambda number=number: bool(launches_on(daemon, f"pod-0-a{number}")))  # type: ignore[misc]
        daemon.run(minutes=5)
        # The collective breaks when a neighbour's process is gone; its machine may answer for some seconds more.
        if number % 2:
            daemon.zone.world.operator.lose_worker("pod-0", 3, daemon.clock.true_now())
        run = next(worker.run for worker in daemon.launcher.workers.values() if worker.run is not None)
        script.exits[run.token] = (0, 1, daemon.clock.seconds - run.since + 2)
        daemon.run(seconds=20)
        preempt(daemon, "pod-0", visible_after=timedelta(seconds=45))
        daemon.run(minutes=3)
    daemon.run(minutes=20)
    memory = daemon.memory("pod-0")
    assert memory.end is End.NONE
    assert memory.counter(FailureKind.CRASH).total == 0
    assert memory.counter(FailureKind.PREEMPTION).total == 4
    assert daemon.trains("pod-0")
    daemon.check()


def test_the_24_hour_end_of_preemptible_nodes(tmp_path: Path) -> None:
    """Every day at the same hour the node ended in the middle of an epoch, and hours of training with it."""
    daemon = Daemon(tmp_path, script=Script(step_seconds=60, save_every=5), settings=Settings(poll=15, probe=60))
    daemon.care_for("pod", 1, place(tier=Provisioning.PREEMPTIBLE))
    daemon.run(hours=24, minutes=30)
    assert daemon.launcher.notices == ["pod-0-a0.1"], "it was asked to save"
    assert named(daemon) == ["pod-0-a1"]
    assert daemon.trains("pod-0")
    resumed = next(w.run for w in daemon.launcher.workers.values() if w.run and w.run.token == "pod-0-a1.1")
    assert resumed.first_step >= 23 * 60 + 30, "at most a quarter of an hour is lost"
    daemon.check("pod-0-a0")


@pytest.mark.slow
def test_the_24_hour_end_of_a_job_that_cannot_save(tmp_path: Path) -> None:
    """A job without checkpoints was ended early by a watcher that meant well: it must get its full day."""
    daemon = Daemon(tmp_path, script=Script(tells_progress=False), settings=Settings(probe=60))
    daemon.care_for("pod", 1, place(tier=Provisioning.PREEMPTIBLE))
    daemon.run(hours=23, minutes=58)
    assert named(daemon) == ["pod-0-a0"]
    daemon.run(hours=1)
    assert named(daemon) == ["pod-0-a1"]
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_zone_that_is_unreachable_is_read_as_empty(daemon: Daemon) -> None:
    """A listing came back without one zone, and every node of that zone was made a second time."""
    daemon.care_for("pod", 2, place(US), place(EU))
    daemon.run(minutes=15)
    before = sorted((str(node.path), node.id) for node in daemon.zone.nodes())
    daemon.zone.world.operator.outage("zone", timedelta(hours=2), daemon.clock.true_now(), zone=US)
    daemon.run(hours=1)
    daemon.restart()
    daemon.run(hours=2)
    assert sorted((str(node.path), node.id) for node in daemon.zone.nodes()) == before
    assert len(daemon.launcher.launches) == 2
    assert daemon.all_train()
    daemon.check()


def test_rate_limit_during_a_mass_preemption(tmp_path: Path) -> None:
    """Half of the nodes went at once, the creates ran into the limit per minute, and most were given up."""
    daemon = Daemon(tmp_path, config=WorldConfig.calm(rates={"create": 6}))
    daemon.care_for("pod", 16)
    daemon.run(minutes=25)
    assert daemon.all_train()
    preempt(daemon, "pod", burst=timedelta(seconds=30))
    daemon.run(minutes=25)
    assert daemon.all_train()
    assert len(named(daemon)) == 16
    assert {daemon.memory(f"pod-{index}").attempts for index in range(16)} == {2}
    refused = [call for call in calls(daemon, "CreateNode") if call["code"] == 8]
    assert 0 < len(refused) < 60, "the limit was met, and not run against"
    daemon.check()
