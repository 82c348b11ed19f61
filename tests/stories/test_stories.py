"""
Stories: the real engine and the real decisions, in the emulator's world, under virtual time.

They look at the state of the world (nodes, runs) and at what a person is told, never at calls made.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.field import calls
from tests.kits.harness import EU, SELDOM, US, Daemon, place
from tpucare.engine.engine import Settings
from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.memory import DesiredState, End, FailureKind
from tpucare.model.resources import Care, NodeRequest, NodeState, OnSuccess, Operation, Provisioning
from tpucare.model.runs import Failure
from tpucare.planner import desired_state
from tpucare.testbed.emulator.inprocess import InProcessCloud
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.simulation.machines import Script


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state")


def test_a_declared_slot_gets_a_node_and_trains(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    assert daemon.zone.states("pod-0") == ["READY"]
    assert daemon.memory("pod-0").attempts == 1
    daemon.check()


def test_a_preempted_node_returns_when_capacity_does(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.set_capacity(US, "v3-32", "spot", 0, daemon.clock.true_now())
    daemon.run(minutes=60)
    assert "READY" not in daemon.zone.states("pod-0"), "no create got through"
    daemon.run_until(lambda: daemon.zone.nodes("pod-0") == [], minutes=2)
    assert daemon.memory("pod-0").attempts == 1
    daemon.zone.world.operator.set_capacity(US, "v3-32", "spot", 1, daemon.clock.true_now())
    daemon.run(minutes=20)
    assert daemon.trains("pod-0")
    assert daemon.memory("pod-0").attempts == 2
    assert daemon.memory("pod-0").counter(FailureKind.PREEMPTION).total == 1
    daemon.check()


def test_a_worker_that_boots_while_the_others_are_asked_is_asked_at_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, config=WorldConfig.calm(latencies={"boot_skew": 5.0}))
    daemon.care_for("pod")
    # While a worker is not up yet a probe takes 10 s, and here the last one comes up in the course of one.
    daemon.run_until(lambda: len(daemon.launcher.workers) == 4)
    came_up = daemon.clock.seconds
    daemon.run_until(lambda: bool(daemon.launcher.launches))
    daemon.run(seconds=5)
    started = min(seconds for seconds, what, _, _ in daemon.launcher.history if what == "start")
    began = min(at for at in daemon.launcher.probes if at > came_up - 10)
    assert began < came_up < began + 10 < started < began + 10 + daemon.settings.fast_probe


# --- preemption and placement ----------------------------------------------------------------------------------------


def test_a_stockout_in_the_first_zone_sends_the_next_attempt_to_the_second(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    assert daemon.node_of("pod-0").key.zone == US
    daemon.zone.world.operator.set_capacity(US, "v3-32", "spot", 0, daemon.clock.true_now())
    daemon.run(minutes=20)
    assert daemon.node_of("pod-0").key.zone == EU
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_quota_of_exactly_one_slice_is_asked_for_again_the_instant_it_is_free(tmp_path: Path) -> None:
    quota = [{"generation": "v3", "zone": US, "limit": 16, "unit": "chips"}]
    daemon = Daemon(tmp_path, config=WorldConfig.calm(quotas=quota))
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run_until(lambda: daemon.memory("pod-0").counter(FailureKind.PREEMPTION).total == 1, minutes=10)
    daemon.run_until(lambda: not daemon.zone.nodes("pod-0-a0"), minutes=10)
    gone_at = daemon.clock.seconds
    daemon.run_until(lambda: bool(daemon.zone.nodes("pod-0-a")), minutes=5)
    assert daemon.clock.seconds - gone_at <= 10, "no backoff step: the quota was ours"
    daemon.run(minutes=10)
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_preemption_that_the_api_never_reports_is_found_by_silence(daemon: Daemon) -> None:
    daemon.care_for("pod", 4)
    daemon.run(minutes=15)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now(), shown="never")
    daemon.run(minutes=20)
    assert daemon.all_train()
    assert daemon.memory("pod-0").attempts == 2
    daemon.check()


def test_the_only_slot_is_its_own_canary_when_its_workers_fall_silent(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now(), shown="never")
    daemon.run(minutes=8)
    assert daemon.memory("pod-0").attempts == 1, "no worker elsewhere answers: 3x the patience"
    daemon.run(minutes=20)
    assert daemon.trains("pod-0")
    daemon.check()


def test_our_own_network_down_deletes_one_canary_and_no_more(daemon: Daemon) -> None:
    """
    When our own network came back, one answer proved that workers answer elsewhere, and the silence counted during the
    outage condemned all other nodes. Silence is counted anew when a worker answers after a minute without any answer.
    """
    daemon.care_for("pod", 10)
    daemon.run(minutes=15)
    daemon.launcher.deaf = True
    daemon.run(minutes=90)
    survivors = {node.path.node_id for node in daemon.zone.nodes() if node.path.node_id.endswith("-a0")}
    assert len(survivors) == 9
    canary = next(f"pod-{index}" for index in range(10) if f"pod-{index}-a0" not in survivors)
    daemon.launcher.deaf = False
    daemon.run(minutes=30)
    assert daemon.all_train()
    daemon.check(*(f"{canary}-a{number}" for number in range(3)))


def test_many_silent_nodes_at_once_are_held_by_the_brake_until_a_person_confirms(daemon: Daemon) -> None:
    daemon.care_for("pod", 20)
    daemon.run(minutes=15)
    for index in range(10):
        daemon.zone.world.operator.preempt(f"pod-{index}", daemon.clock.true_now(), shown="never")
    daemon.run(minutes=30)
    assert daemon.told("brake")
    first = {node.path.node_id for node in daemon.zone.nodes() if node.path.node_id.endswith("-a0")}
    assert len(first) == 20, "all of them are held"
    for index in range(10):
        daemon.engine.lift_brake(f"pod-{index}")
    daemon.run(minutes=30)
    assert daemon.all_train()
    daemon.check()


def silence(daemon: Daemon, slots: list[str], *, silent: bool = True) -> None:
    for slot in slots:
        key = daemon.node_of(slot).key
        for worker in daemon.launcher.of_node(key.project, key.zone, key.name):
            worker.silent = silent


def held(daemon: Daemon) -> list[str]:
    return sorted(name for name, cause in daemon.causes().items() if cause is Cause.BRAKE)


def test_the_brake_holds_the_stop_before_a_verdict_and_not_the_delete_behind_it(tmp_path: Path) -> None:
    """
    The run was stopped on a verdict, and the brake then held the delete: healthy nodes lay idle. The brake counts the
    stop, and it holds all verdicts of one moment or none.
    """
    script = Script()
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod", 20)
    daemon.run(minutes=15)
    script.stands_still.update(f"pod-{index}" for index in range(10))
    daemon.run(hours=4)
    assert len(daemon.told("brake")) == 10
    assert len(daemon.told("stop")) == 20, "of two runs each that were started again; the third one's stop is held"
    assert daemon.all_train(), "none of the nodes lies idle while a person is waited for"
    script.stands_still.clear()
    for index in range(10):
        daemon.engine.lift_brake(f"pod-{index}")
    daemon.run(minutes=30)
    assert len(daemon.zone.nodes()) == 20
    assert daemon.all_train()


def test_a_confirmation_where_nothing_is_held_lifts_no_brake_of_another_day(tmp_path: Path) -> None:
    """
    `confirm` where nothing was held let the next verdict pass whenever it came; and when a verdict went away by itself,
    its slot stayed braked and the next verdict was not told. `confirm` lets only the held verdict pass, and a minute of
    observed time without a verdict ends both.
    """
    daemon = Daemon(tmp_path, settings=SELDOM)
    daemon.care_for("pod", 20)
    daemon.run(minutes=15)
    for name in daemon.engine.slots:
        daemon.engine.lift_brake(name)
    daemon.run(hours=5)
    silence(daemon, [f"pod-{index}" for index in range(10)])
    daemon.run(minutes=15)
    assert len(held(daemon)) >= 6, "four of twenty pass, if they are judged before the others"
    assert sum(daemon.memory(name).attempts for name in daemon.engine.slots) <= 24


def test_what_is_held_once_more_is_told_once_more(daemon: Daemon) -> None:
    daemon.care_for("pod", 20)
    daemon.run(minutes=15)
    silence(daemon, [f"pod-{index}" for index in range(15)])
    daemon.run(minutes=8)
    first = held(daemon)
    assert len(first) >= 11
    silence(daemon, first, silent=False)
    daemon.run(hours=1)
    assert daemon.all_train()
    assert held(daemon) == []
    daemon.events.clear()
    silence(daemon, first)
    daemon.run(minutes=8)
    assert len(held(daemon)) >= 7
    assert sorted(event.slot for event in daemon.events if event.kind == "brake") == held(daemon)


def test_confirmed_verdicts_pass_when_they_are_judged_only_after_an_outage_of_the_api(daemon: Daemon) -> None:
    daemon.care_for("pod", 20)
    daemon.run(minutes=15)
    ten = [f"pod-{index}" for index in range(10)]
    silence(daemon, ten)
    daemon.run(minutes=8)
    daemon.zone.world.operator.outage("api", timedelta(minutes=20), daemon.clock.true_now())
    daemon.run(minutes=2)
    for name in ten:
        daemon.engine.lift_brake(name)
    told = daemon.told("brake")
    daemon.run(minutes=60)
    assert [daemon.memory(name).attempts for name in ten] == [2] * 10
    assert daemon.told("brake") == told, "none was held again"
    assert daemon.all_train()
    daemon.check(*(f"{name}-a0" for name in ten))


def test_a_confirmation_for_the_brake_opens_no_fence_that_comes_up_days_later(tmp_path: Path) -> None:
    """`confirm` for the brake also opened the fence of a later node. It says nothing about the fence."""
    daemon = Daemon(tmp_path, settings=SELDOM)
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.engine.change("pod-0", desired_state.confirm, "confirm", "pod-0: confirm")
    daemon.run(hours=40)
    daemon.zone.world.operator.stick_deleting("pod-0-a0", daemon.clock.true_now(), repeats=99)
    daemon.zone.world.operator.set_state("pod-0-a0", NodeState.DELETING, daemon.clock.true_now())
    daemon.run(hours=3)
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    waits = daemon.engine.slots["pod-0"].action
    assert isinstance(waits, Wait)
    assert (waits.cause, waits.needs_person) == (Cause.FENCED, True)
    daemon.check()
    daemon.engine.change("pod-0", desired_state.confirm, "confirm", "pod-0: confirm")
    daemon.run(minutes=5)
    assert daemon.trains("pod-0"), "said of the elder that is in doubt now"


# --- absence is not knowledge ----------------------------------------------------------------------------------------


def test_an_api_outage_changes_nothing(daemon: Daemon) -> None:
    daemon.care_for("pod", 3)
    daemon.run(minutes=15)
    before = {(node.path, node.id) for node in daemon.zone.nodes()}
    daemon.zone.world.operator.outage("api", timedelta(hours=2), daemon.clock.true_now())
    daemon.run(hours=3)
    assert {(node.path, node.id) for node in daemon.zone.nodes()} == before
    assert daemon.all_train()
    daemon.check()


def test_a_zone_that_does_not_answer_is_not_an_empty_zone(daemon: Daemon) -> None:
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    before = {(node.path, node.id) for node in daemon.zone.nodes()}
    daemon.zone.world.operator.outage("zone", timedelta(hours=2), daemon.clock.true_now(), zone=US)
    daemon.run(hours=3)
    assert {(node.path, node.id) for node in daemon.zone.nodes()} == before
    daemon.check()


def test_nothing_lasts_while_a_zone_is_unreachable(daemon: Daemon) -> None:
    """
    Observed time goes on while one zone does not answer, because the others do; a node that had been silent, without
    progress or CREATING before the outage was condemned at the first listing after it (storm, seed 39). The marks of a
    node move on by the length of the outage, and a verdict needs new observations.
    """
    daemon.care_for("pod", 1)
    daemon.care_for("far", 1, place(EU))
    daemon.run(minutes=15)
    worker = next(one for one in daemon.launcher.of_node("my-project", US, "pod-0-a0") if one.number == 2)
    worker.silent = True
    daemon.run(minutes=2)
    daemon.zone.world.operator.outage("zone", timedelta(hours=1), daemon.clock.true_now(), zone=US)
    daemon.run(minutes=30)
    worker.silent = False
    daemon.run(hours=2)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["far-0-a0", "pod-0-a0"]
    assert daemon.all_train()
    assert len(daemon.launcher.launches) == 2
    daemon.check()


@pytest.mark.parametrize("jump", [timedelta(days=400), timedelta(days=-400), timedelta(hours=3)])
def test_a_jump_of_the_clock_fires_no_timeout(daemon: Daemon, jump: timedelta) -> None:
    daemon.care_for("pod", 3)
    daemon.run(minutes=15)
    before = {(node.path, node.id) for node in daemon.zone.nodes()}
    daemon.clock.jump(jump)
    daemon.run(minutes=30)
    assert {(node.path, node.id) for node in daemon.zone.nodes()} == before
    daemon.zone.world.operator.preempt("pod-1", daemon.clock.true_now())
    daemon.run(minutes=20)
    assert daemon.all_train()
    daemon.check()


def test_a_node_in_a_state_that_nobody_knows_is_left_alone(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.set_state("pod-0", 99, daemon.clock.true_now())
    daemon.run(hours=5)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["pod-0-a0"]
    assert daemon.causes()["pod-0"] is Cause.STATE_ODD


# --- the process is killed, the store is lost ------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [0.05, 0.1, 1, 3, 4.2, 4.5, 6, 15])
def test_a_daemon_killed_at_any_time_adopts_what_lives(daemon: Daemon, minutes: float) -> None:
    daemon.care_for("pod", 2)
    daemon.run(minutes=minutes)
    daemon.restart()
    daemon.run(minutes=15)
    assert daemon.all_train()
    assert sorted(node.path.node_id for node in daemon.zone.nodes()) == ["pod-0-a0", "pod-1-a0"]
    assert len(set(daemon.launcher.launches)) == 2, "no second run"
    daemon.check()


def test_a_lost_store_adopts_by_labels_and_keeps_the_run(daemon: Daemon) -> None:
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    daemon.lose_store()
    daemon.run(minutes=30)
    assert daemon.store is not None
    assert daemon.store.lost
    assert daemon.all_train()
    assert len(daemon.zone.nodes()) == 2
    assert sorted(daemon.launcher.launches) == ["pod-0-a0.1", "pod-1-a0.1"]
    daemon.check()


def test_a_lost_answer_to_a_create_makes_no_second_node(daemon: Daemon) -> None:
    daemon.zone.world.operator.lose_next_answer("CreateNode", applied=True)
    daemon.care_for("pod")
    daemon.run(minutes=20)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["pod-0-a0"]
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_create_that_never_arrived_is_sent_again_under_the_same_name(daemon: Daemon) -> None:
    daemon.zone.world.operator.lose_next_answer("CreateNode", applied=False)
    daemon.care_for("pod")
    daemon.run(minutes=20)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["pod-0-a0"]
    assert daemon.trains("pod-0")


def test_a_stuck_delete_is_repeated_until_the_node_is_not_found(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.stick_deleting("pod-0", daemon.clock.true_now(), repeats=3)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=60)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["pod-0-a1"]
    assert daemon.trains("pod-0")
    daemon.check()


# --- wishes ----------------------------------------------------------------------------------------------------------


def test_down_stops_the_run_and_leaves_nothing(daemon: Daemon) -> None:
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(minutes=10)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["pod-1-a0"]
    assert daemon.engine.is_over("pod-0")
    assert "pod-0-a0" in daemon.launcher.stops
    daemon.restart()
    daemon.run(minutes=10)
    assert len(daemon.zone.nodes()) == 1, "it stays down although it is still declared"
    daemon.check("pod-0-a0")


def test_down_while_a_create_is_under_way_leaves_nothing(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(seconds=20)
    assert daemon.zone.states() == ["CREATING"]
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(minutes=20)
    assert daemon.zone.nodes() == []
    assert daemon.engine.is_over("pod-0")


def test_replace_is_not_lost_to_the_repeated_delete_of_an_older_node(daemon: Daemon) -> None:
    """
    The repeated delete of an older node used up the `replace` that was meant for the node that trains. Only a create,
    or the first delete of the slot's own node, fulfils a `replace`.
    """
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.stick_deleting("pod-0-a0", daemon.clock.true_now(), repeats=8)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=20)
    daemon.zone.world.operator.outage("api", timedelta(minutes=20), daemon.clock.true_now())
    daemon.run(minutes=2)
    daemon.care_for("pod", 1, place(kind="v3-64", workers=8))
    daemon.engine.change("pod-0", desired_state.replace_node, "replace", "pod-0: replace")
    daemon.run(hours=2)
    assert daemon.node_of("pod-0").accelerator_type == "v3-64"
    assert daemon.trains("pod-0")
    daemon.check("pod-0-a1")


def test_pause_touches_nothing_that_lives_and_survives_a_restart(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.wish("pod-0", DesiredState.PAUSED)
    node = daemon.node_of("pod-0").key
    for worker in daemon.launcher.of_node(*node):
        daemon.launcher.end(worker, 1, Failure.CRASH)
    daemon.zone.world.operator.set_state("pod-0", int(NodeState.STOPPED), daemon.clock.true_now())
    daemon.run(minutes=10)
    daemon.restart()
    daemon.run(minutes=10)
    assert daemon.zone.states() == ["STOPPED"]
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=10)
    daemon.restart()
    daemon.run(minutes=10)
    assert daemon.zone.states() == [], "what is dead is cleared, and nothing is asked for"
    daemon.wish("pod-0", DesiredState.UP)
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    daemon.check()


# --- the run ---------------------------------------------------------------------------------------------------------


def test_the_dead_node_of_a_paused_slot_holds_no_quota_of_others(tmp_path: Path) -> None:
    """
    The dead node of a paused slot was left alone and held the quota of another slot for as long as the pause. A node
    that is proven dead is deleted in a pause, too.
    """
    quota = [{"generation": "v3", "zone": US, "limit": 16, "unit": "chips"}]
    daemon = Daemon(tmp_path, config=WorldConfig.calm(quotas=quota))
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.wish("pod-0", DesiredState.PAUSED)
    daemon.care_for("other")
    daemon.run(minutes=15)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=30)
    assert daemon.trains("other-0")
    assert daemon.zone.nodes("pod-0") == []
    assert daemon.causes()["pod-0"] is Cause.PAUSED
    daemon.check()


@pytest.mark.parametrize("shown", [NodeState.TERMINATED, NodeState.PREEMPTED])
@pytest.mark.parametrize("seconds", [20.0, 120.0])
def test_a_node_that_was_shown_dead_and_is_ready_again_is_deleted_before_the_next_run(
    daemon: Daemon, shown: NodeState, seconds: float
) -> None:
    """It was neither used nor deleted any more, and its run lived beside the next."""
    daemon.care_for("pod")
    daemon.run(minutes=15)
    # Whatever is asked of it meanwhile is not heard.
    daemon.zone.world.operator.stick_deleting("pod-0-a0", daemon.clock.true_now(), repeats=2)
    daemon.zone.world.operator.set_state("pod-0-a0", int(shown), daemon.clock.true_now())
    daemon.run(seconds=seconds)
    daemon.zone.world.operator.set_state("pod-0-a0", int(NodeState.READY), daemon.clock.true_now())
    daemon.run(hours=2)
    assert daemon.trains("pod-0")
    assert [node.path.node_id for node in daemon.zone.nodes("pod-0")] == ["pod-0-a1"]
    daemon.check()


def test_a_node_that_comes_back_while_its_slot_is_paused_is_deleted_after_it(daemon: Daemon) -> None:
    """
    A node that was shown TERMINATED during a pause and READY later was neither used nor deleted: it ran on beside its
    successor, and `down` never ended. Listed alive, it loses the proof of its death and is deleted, and no run begins
    beside it.
    """
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.wish("pod-0", DesiredState.PAUSED)
    daemon.zone.world.operator.stick_deleting("pod-0-a0", daemon.clock.true_now(), repeats=1)
    daemon.zone.world.operator.set_state("pod-0-a0", int(NodeState.TERMINATED), daemon.clock.true_now())
    daemon.run(minutes=1)
    daemon.zone.world.operator.set_state("pod-0-a0", int(NodeState.READY), daemon.clock.true_now())
    daemon.run(hours=1)
    assert daemon.zone.states() == ["READY"], "nothing proves it dead, so it is paused like any"
    daemon.wish("pod-0", DesiredState.UP)
    daemon.run(hours=2)
    assert daemon.trains("pod-0")
    assert [node.path.node_id for node in daemon.zone.nodes("pod-0")] == ["pod-0-a1"]
    daemon.check()


def test_a_finished_run_ends_the_slot_and_deletes_the_node(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, script=Script(steps=300))
    daemon.care_for("pod")
    daemon.run(minutes=30)
    assert daemon.zone.nodes() == []
    assert daemon.memory("pod-0").end is End.DONE
    daemon.restart()
    daemon.run(minutes=10)
    assert daemon.zone.nodes() == []


def test_a_finished_run_may_keep_its_node(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, script=Script(steps=300))
    daemon.care_for("pod", care=Care(on_success=OnSuccess.KEEP))
    daemon.run(minutes=40)
    assert daemon.zone.states() == ["READY"]
    assert daemon.memory("pod-0").end is End.DONE


def test_exit_0_under_a_preemption_notice_is_not_success(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, script=Script(exits={"pod-0-a0.1": (-1, 0, 120.0)}))
    daemon.care_for("pod")
    daemon.run(minutes=6)
    worker = next(iter(daemon.launcher.workers.values()))
    assert worker.run is not None
    worker.run.signalled = True
    daemon.run(minutes=20)
    assert daemon.memory("pod-0").end is End.NONE
    assert daemon.memory("pod-0").counter(FailureKind.INFRASTRUCTURE).total == 1
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_crash_loop_of_the_users_code_burns_no_nodes_and_fails_the_slot(tmp_path: Path) -> None:
    """
    A crash at the same step again and again looked like progress, since each run reached that step. Only a run that
    gets beyond the furthest step of its slot ends the row of crashes.
    """
    daemon = Daemon(tmp_path, script=Script(exits={"pod-0": (-1, 1, 50.0)}))
    daemon.care_for("pod", care=Care(crash_budget=3))
    daemon.run(hours=3)
    assert daemon.memory("pod-0").end is End.FAILED
    assert daemon.memory("pod-0").attempts == 1
    assert daemon.zone.nodes() == [], "the node was kept for a look, for an hour"
    assert len(daemon.launcher.launches) == 4
    daemon.check("pod-0-a0")


def test_a_failing_setup_goes_into_its_own_book(tmp_path: Path) -> None:
    script = Script(exits={"pod-0": (-1, 1, 5.0)}, failures={"pod-0": Failure.SETUP})
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod", care=Care(setup_budget=2))
    daemon.run(hours=3)
    assert daemon.memory("pod-0").end is End.FAILED
    assert daemon.memory("pod-0").counter(FailureKind.SETUP).total == 3
    assert daemon.memory("pod-0").counter(FailureKind.CRASH).total == 0


def test_a_stalled_run_is_relaunched_and_the_second_time_gets_a_new_node(tmp_path: Path) -> None:
    script = Script()
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod", 1)
    daemon.run(minutes=15)
    script.stands_still.add("pod-0")
    daemon.run(minutes=60)
    script.stands_still.clear()
    assert daemon.memory("pod-0").counter(FailureKind.STALL).total >= 1
    daemon.run(minutes=40)
    assert daemon.trains("pod-0")
    daemon.check()


def test_one_worker_of_a_slice_reboots_and_the_gang_starts_again_on_the_same_node(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.maintenance("pod-0", daemon.clock.true_now(), restart=True)
    daemon.run(minutes=30)
    assert daemon.trains("pod-0")
    assert daemon.memory("pod-0").attempts == 1
    daemon.check()


def test_an_on_demand_node_is_not_deleted_for_bad_health(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(tier=Provisioning.ON_DEMAND))
    daemon.run(minutes=15)
    daemon.zone.world.operator.set_health("pod-0", 3, daemon.clock.true_now())
    daemon.run(hours=3)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["pod-0-a0"]


def test_bad_health_with_progress_is_left_alone(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    daemon.zone.world.operator.set_health("pod-0", 3, daemon.clock.true_now())
    daemon.run(hours=3)
    assert [node.path.node_id for node in daemon.zone.nodes()] == ["pod-0-a0"]


def test_a_preemptible_node_is_asked_to_save_and_leaves_with_a_newer_checkpoint(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, script=Script(step_seconds=60, save_every=5), settings=SELDOM)
    daemon.care_for("pod", 1, place(tier=Provisioning.PREEMPTIBLE))
    daemon.run(hours=24, minutes=30)
    assert daemon.launcher.notices == ["pod-0-a0.1"]
    assert daemon.memory("pod-0").attempts == 2
    assert daemon.trains("pod-0")
    daemon.check("pod-0-a0")


def test_a_name_that_another_owners_node_bears_is_skipped_and_that_node_never_touched(daemon: Daemon) -> None:
    """
    A colleague's fleet of the same name, in whatever zone, kept a slot from its next node until a person came. Only the
    same name in the zone that is asked is a clash, and its number is skipped.
    """
    spec = NodeSpec(accelerator_type="v3-32", runtime_version="tpu-ubuntu2204-base", spot=True)
    for zone, name in ((US, "pod-0-a1"), (EU, "pod-0-a2"), (US, "pod-0-a41")):
        daemon.zone.world.api.create_node(f"projects/my-project/locations/{zone}", name, spec, daemon.clock.true_now())
    daemon.care_for("pod")
    daemon.run(minutes=15)
    for number in (0, 2, 3):
        assert daemon.trains("pod-0")
        assert daemon.node_of("pod-0").name == f"pod-0-a{number}"
        daemon.zone.world.operator.preempt(daemon.node_of("pod-0").key.name, daemon.clock.true_now())
        daemon.run(minutes=15)
    assert len(daemon.told("foreign")) == 3
    daemon.check()


def test_a_foreign_node_that_was_listed_before_its_slot_was_declared_is_known_to_the_slot(daemon: Daemon) -> None:
    """
    A slot did not see a foreign node of its name that had been listed before the slot was declared. The project keeps
    foreign nodes by name, whether or not a slot of that name exists.
    """
    daemon.care_for("other")
    spec = NodeSpec(accelerator_type="v3-32", runtime_version="tpu-ubuntu2204-base", spot=True)
    daemon.zone.world.api.create_node(f"projects/my-project/locations/{US}", "pod-0-a0", spec, daemon.clock.true_now())
    daemon.run(minutes=15)
    daemon.care_for("pod")
    daemon.run(minutes=15)
    assert daemon.node_of("pod-0").name == "pod-0-a1"
    asked = [one["node"] for one in calls(daemon, "CreateNode")]
    assert asked == ["pod-0-a0", "other-0-a0", "pod-0-a1"], "the first one is theirs"
    daemon.check()


def test_a_node_of_our_name_that_no_listing_showed_spends_the_name_alone(daemon: Daemon) -> None:
    spec = NodeSpec(accelerator_type="v3-32", runtime_version="tpu-ubuntu2204-base", spot=True)
    daemon.zone.world.api.create_node(f"projects/my-project/locations/{US}", "pod-0-a0", spec, daemon.clock.true_now())
    life = daemon.zone.world.operator.select("pod-0-a0")[0]
    daemon.zone.world.state.listing(life.path.project).hide(life.path, life.record.id)
    daemon.care_for("pod")
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    assert daemon.node_of("pod-0").name == "pod-0-a1"
    daemon.check()


def test_a_node_of_another_owner_is_adopted_when_a_person_says_so(daemon: Daemon) -> None:
    spec = NodeSpec(accelerator_type="v3-32", runtime_version="tpu-ubuntu2204-base", spot=True)
    parent = f"projects/my-project/locations/{US}"
    daemon.zone.world.api.create_node(parent, "pod-0", spec, daemon.clock.true_now())
    daemon.care_for("other")
    daemon.run(minutes=10)
    daemon.care_for("pod")
    daemon.wish("pod-0", DesiredState.PAUSED)
    daemon.run(minutes=1)
    daemon.engine.adopt_node("pod-0", "pod-0")
    daemon.wish("pod-0", DesiredState.UP)
    daemon.run(minutes=10)
    assert [node.path.node_id for node in daemon.zone.nodes("pod-0")] == ["pod-0"]
    assert daemon.trains("pod-0")
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_node_that_somebody_else_labels_as_theirs_is_left_alone(daemon: Daemon) -> None:
    """
    A node that another owner labelled was still used as ours. It is left alone, and the slot waits for a person, since
    our run may live there.
    """
    daemon.care_for("pod")
    daemon.run(minutes=15)
    name = f"projects/my-project/locations/{US}/nodes/pod-0-a0"
    theirs = NodeSpec(labels={"tpucare-owner": "o-else", "tpucare-slot": "pod-0"})
    daemon.zone.world.api.update_node(name, ("labels",), theirs, daemon.clock.true_now())
    daemon.run(minutes=20)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=20)
    assert daemon.zone.states() == ["PREEMPTED"], "not ours to delete, and no second node beside a run that may live"
    assert daemon.causes()["pod-0"] is Cause.NODE_TAKEN


def test_a_glitch_of_the_api_that_shows_unknown_deletes_nothing_that_moves(daemon: Daemon) -> None:
    """
    The API showed UNKNOWN for every node for half a minute, and all of them were deleted while they trained, past the
    brake. UNKNOWN is a verdict like others: reports of workers count against it, and the brake counts it.
    """
    daemon.care_for("pod", 5)
    daemon.run(minutes=20)
    assert daemon.all_train()
    daemon.zone.world.operator.set_state("*", int(NodeState.UNKNOWN), daemon.clock.true_now())
    daemon.run(minutes=30)
    assert daemon.told("brake") == [], "there was nothing to hold"
    assert len(daemon.zone.nodes()) == 5
    daemon.zone.world.operator.set_state("*", int(NodeState.READY), daemon.clock.true_now())
    daemon.run(minutes=1)
    assert daemon.all_train()
    daemon.check()


def test_unknown_nodes_that_are_silent_pass_the_brake_or_wait_for_a_person(daemon: Daemon) -> None:
    daemon.care_for("pod", 8)
    daemon.run(minutes=20)
    daemon.zone.world.operator.set_state("*", int(NodeState.UNKNOWN), daemon.clock.true_now())
    for worker in list(daemon.launcher.workers.values()):
        worker.silent = True
    daemon.run(minutes=30)
    assert len(daemon.told("delete")) == 0
    assert len(daemon.told("brake")) == 8


def test_one_worker_that_refuses_our_key_for_good_is_a_bad_node(daemon: Daemon) -> None:
    """
    The guest agent of one worker was broken and refused our key: the slice was READY, billed and idle for ever, and a
    person was told of OS Login. No setting applies to one worker alone, so the node is bad and is replaced.
    """
    daemon.care_for("pod")
    daemon.care_for("other")
    daemon.run_until(lambda: len([w for w in daemon.launcher.workers.values() if w.key.name == "pod-0-a0"]) == 4)
    broken = daemon.launcher.of_node(*daemon.node_of("pod-0").key)[2]
    obey = daemon.launcher._apply_to

    def stubborn(worker: Any, effect: Any) -> None:
        obey(worker, effect)
        broken.refuses = True

    daemon.launcher._apply_to = stubborn  # type: ignore[method-assign]
    broken.refuses = True
    daemon.run(hours=1)
    assert daemon.trains("pod-0")
    assert daemon.node_of("pod-0").name == "pod-0-a1"


def test_a_node_that_trains_while_it_shows_creating_is_kept_as_long_as_it_makes_progress(daemon: Daemon) -> None:
    """
    A node that trained while it showed CREATING was deleted at `boot_timeout` for one silent worker, though worker 0
    reported steps. Progress keeps the node in that state, too.
    """
    daemon.care_for("pod", 2)
    daemon.run(minutes=20)
    daemon.zone.world.operator.set_state("pod-0", int(NodeState.CREATING), daemon.clock.true_now())
    daemon.launcher.of_node(*daemon.node_of("pod-0").key)[2].silent = True
    daemon.run(hours=2)
    assert daemon.node_of("pod-0").name == "pod-0-a0"
    daemon.launcher.of_node(*daemon.node_of("pod-0").key)[0].silent = True
    daemon.run(hours=1)
    assert daemon.node_of("pod-0").name == "pod-0-a1", "mute, too"


def test_a_create_whose_operation_never_ends_is_closed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A create whose operation never ended was polled every ten seconds for ever, and `down` waited for it. It is closed
    after a day without a node.
    """
    daemon = Daemon(tmp_path, settings=Settings(poll=60.0, fast_poll=60.0))

    def create_node(cloud: InProcessCloud, request: NodeRequest) -> Operation:
        return Operation(f"operations/{request.key.name}", False, None, daemon.clock.true_now())

    def get_operation(cloud: InProcessCloud, name: str) -> Operation:
        return Operation(name, False, None, daemon.clock.true_now())

    monkeypatch.setattr(InProcessCloud, "create_node", create_node)
    monkeypatch.setattr(InProcessCloud, "get_operation", get_operation)
    daemon.care_for("pod", care=Care(boot_timeout=timedelta(hours=5)))
    daemon.run(hours=12)
    assert len(daemon.memory("pod-0").creates) == 3
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(hours=10)
    daemon.restart()
    daemon.run(hours=10)
    assert 0 < len(daemon.memory("pod-0").creates) < 3
    daemon.run(hours=6)
    assert daemon.engine.is_over("pod-0")
    assert daemon.memory("pod-0").next_number == 3, "their names stay spent, and watched"


def test_a_job_that_is_always_killed_without_a_word_fails_the_slot_in_the_end(tmp_path: Path) -> None:
    """
    Stalls and interruptions had no failure budget: a job that the OOM killer ended at every start used up node after
    node. 12 interruptions or 6 stalls in a row without a further step are tried again; one more fails the slot.
    """
    script = Script(exits={"pod-0": (-1, 137, 40.0)}, vanishes={"pod-0"}, tells_progress=False)
    daemon = Daemon(tmp_path, script=script)
    daemon.care_for("pod")
    daemon.run(hours=8)
    assert daemon.memory("pod-0").end is End.FAILED
    assert 2 <= daemon.memory("pod-0").attempts <= 5
