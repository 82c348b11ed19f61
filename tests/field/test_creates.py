"""Complaints about creates and deletes: quota, slow answers, late grants, deletes that do not end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.field import calls, named, preempt
from tests.kits.harness import EU, US, Daemon, place
from tpucare.model.memory import FailureKind
from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.latency import around


def test_one_worker_of_many_never_comes_up(daemon: Daemon) -> None:
    """A slice of sixteen hosts was READY with fifteen of them, and the launch waited for the last one for ever."""
    daemon.zone.world.operator.miss_worker(5)
    daemon.care_for("pod", 1, place(kind="v3-128", workers=16))
    daemon.run(hours=3)
    assert daemon.trains("pod-0")
    assert named(daemon) == ["pod-0-a1"]
    assert {token.partition(".")[0] for token in daemon.launcher.launches} == {"pod-0-a1"}
    daemon.check("pod-0-a0")


def test_a_create_operation_stays_open_although_the_node_serves(tmp_path: Path) -> None:
    """The node trained already when its create operation ran into a time limit of ours, and was deleted for it."""
    lengths = {"operation_lingers_share": 1.0, "operation_lingers": around(8 * 3600)}
    daemon = Daemon(tmp_path, config=WorldConfig.calm(latencies=lengths))
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    assert daemon.all_train(), "no need to wait for the operation"
    daemon.run(hours=6)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a0", "pod-1-a0"]
    assert len(daemon.launcher.launches) == 2
    daemon.run(hours=4)
    assert named(daemon) == ["pod-0-a0", "pod-1-a0"]
    daemon.check()


def test_a_create_was_given_up_and_granted_70_minutes_later(tmp_path: Path) -> None:
    """Nobody remembered the create that had been given up: it was granted after all, and billed for weeks."""
    daemon = Daemon(tmp_path, config=WorldConfig.calm(latencies={"visible": around(70 * 60)}))
    world = daemon.zone.world
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=2)
    world.state.config = world.state.config.model_copy(
        update={"latencies": world.state.config.latencies.model_copy(update={"visible": around(0.3)})}
    )
    daemon.run(minutes=66)
    assert daemon.trains("pod-0"), "asked for again long before"
    assert daemon.node_of("pod-0").name == "pod-0-a1"
    daemon.restart()
    daemon.run(minutes=30)
    assert named(daemon) == ["pod-0-a1"]
    assert [call["node"] for call in calls(daemon, "DeleteNode")] == ["pod-0-a0"]
    assert daemon.launcher.launches == ["pod-0-a1.1"]
    daemon.check("pod-0-a0")


def test_every_create_takes_longer_than_anybody_waits(tmp_path: Path) -> None:
    """
    Every create took longer than `boot_timeout`: each node came after its create was given up, was deleted, and the
    slot never trained. The first node that appears holds the slot, and the later creates are given up instead.
    """
    slow = {"visible": around(69 * 60), "create_slice": around(70 * 60)}
    daemon = Daemon(tmp_path, config=WorldConfig.calm(latencies=slow))
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(hours=5)
    assert daemon.trains("pod-0")
    assert daemon.launcher.launches == ["pod-0-a0.1"], "the first that was granted"
    assert named(daemon) == ["pod-0-a0"], "those that came after it are gone"
    daemon.check(*(f"pod-0-a{number}" for number in range(1, 10)))


def test_quota_is_held_by_dead_nodes(tmp_path: Path) -> None:
    """Preempted nodes lay about undeleted, used up the quota, and every create was refused."""
    quota = [{"generation": "v3", "zone": US, "limit": 4 * 16, "unit": "chips"}]
    daemon = Daemon(tmp_path, config=WorldConfig.calm(quotas=quota))
    daemon.care_for("pod", 4)
    daemon.run(minutes=15)
    for _ in range(3):
        preempt(daemon, "pod")
        daemon.run(minutes=20)
        assert daemon.all_train()
        assert len(named(daemon)) == 4
    assert daemon.memory("pod-0").counter(FailureKind.PREEMPTION).total == 3
    daemon.check()


def test_a_grant_of_exactly_one_slice(tmp_path: Path) -> None:
    """With quota for one slice the create was refused while the dead one was deleted; the backoff cost half an hour."""
    quota = [{"generation": "v3", "zone": US, "limit": 16, "unit": "chips"}]
    lengths = {"delete": around(180)}
    daemon = Daemon(tmp_path, config=WorldConfig.calm(quotas=quota, latencies=lengths))
    daemon.care_for("pod")
    daemon.run(minutes=15)
    for attempt in range(1, 4):
        (node,) = named(daemon)
        preempt(daemon, node)
        daemon.run_until(lambda node=node: node not in named(daemon))  # type: ignore[misc]
        gone = daemon.clock.seconds
        daemon.run_until(lambda: bool(named(daemon)))
        assert daemon.clock.seconds - gone <= 15, "asked for the instant the quota was free"
        daemon.run(minutes=12)
        assert daemon.trains("pod-0")
        assert daemon.memory("pod-0").attempts == attempt + 1
    daemon.check()


def test_stuck_in_deleting(daemon: Daemon) -> None:
    """The node stayed in DELETING for hours, and its slot waited for it."""
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.stick_deleting("pod-0", daemon.clock.true_now(), repeats=4)
    preempt(daemon, "pod-0")
    daemon.run(minutes=10)
    assert daemon.trains("pod-0"), "the next node does not wait for the last one to be gone"
    assert sorted(daemon.zone.states()) == ["DELETING", "READY"]
    daemon.run(hours=2)
    assert named(daemon) == ["pod-0-a1"]
    daemon.check()


@pytest.mark.parametrize("shown", [NodeState.READY, NodeState.PREEMPTED])
def test_a_delete_is_answered_and_the_node_stays(daemon: Daemon, shown: NodeState) -> None:
    """The delete was answered with success, the node stayed, and it was paid for until somebody looked."""
    daemon.care_for("pod")
    daemon.run(minutes=15)
    world = daemon.zone.world
    world.operator.stick_deleting("pod-0", daemon.clock.true_now(), repeats=2)
    preempt(daemon, "pod-0")
    daemon.run_until(lambda: bool(calls(daemon, "DeleteNode")))
    world.operator.set_state("pod-0-a0", int(shown), daemon.clock.true_now())
    daemon.run(hours=2)
    assert named(daemon) == ["pod-0-a1"]
    deletes = [call["node"] for call in calls(daemon, "DeleteNode")]
    assert set(deletes) == {"pod-0-a0"}
    assert len(deletes) >= 3
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_stockout_of_hours(tmp_path: Path) -> None:
    """During a night without capacity the creates came in storms or stopped, and nothing came back with capacity."""
    capacity = [{"type": "v3", "amount": 0}]
    zones = {US: {"accelerators": ["*"], "capacity": capacity}, EU: {"accelerators": ["*"], "capacity": capacity}}
    daemon = Daemon(tmp_path, config=WorldConfig.calm(zones=zones))
    daemon.care_for("pod", 2, place(US), place(EU))
    daemon.run(hours=1)
    assert set(daemon.zone.states()) <= {"CREATING"}
    asked = len(calls(daemon, "CreateNode"))
    assert 2 * 2 * 20 < asked < 2 * 2 * 90, "each zone within about two minutes, and not all the time"
    daemon.zone.world.operator.set_capacity(EU, "v3", "spot", 2, daemon.clock.true_now())
    daemon.run(minutes=20)
    assert daemon.all_train()
    assert {node.path.zone for node in daemon.zone.nodes()} == {EU}
    daemon.check()
