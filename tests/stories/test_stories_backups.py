"""Stories of a store that is older than what was done: a backup was put back, or the daemon lay idle for long."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.harness import EU, US, Daemon, place
from tpucare.model.causes import Cause
from tpucare.model.resources import Care


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state")


def preempt(daemon: Daemon, zone: str) -> None:
    node = next(str(node.path) for node in daemon.zone.nodes() if node.path.zone == zone)
    daemon.zone.world.operator.preempt(node, daemon.clock.true_now())


def put_back_an_older_store(daemon: Daemon) -> None:
    """A backup is made while the slot trains in US; then its node is preempted, and the next one trains in EU."""
    backup = daemon.folder.with_name("backup")
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run_until(daemon.all_train)
    daemon.kill()
    shutil.copytree(daemon.folder, backup)
    daemon.start()
    daemon.run(minutes=1)
    daemon.zone.world.operator.set_capacity(US, "v3-32", "spot", 0, daemon.clock.true_now())
    preempt(daemon, US)
    daemon.run(minutes=30)
    assert daemon.node_of("pod-0").key.zone == EU
    daemon.zone.world.operator.set_capacity(US, "v3-32", "spot", 4, daemon.clock.true_now())
    daemon.kill()
    shutil.rmtree(daemon.folder)
    shutil.copytree(backup, daemon.folder)


def lie_idle_while_the_node_goes(daemon: Daemon) -> None:
    """Half an hour without a daemon, in which the node in US is preempted; EU is unreachable from then on."""
    daemon.kill()
    preempt(daemon, US)
    daemon.zone.world.operator.outage("zone", timedelta(hours=5), daemon.clock.true_now(), zone=EU)
    daemon.pass_unseen(hours=0.5)
    daemon.start()


def test_a_backup_makes_no_second_run_while_the_newer_node_is_unreachable(daemon: Daemon) -> None:
    """
    A backup of the store was put back while the zone of a newer node did not answer: the slot was taken for empty, and
    a second run began. After ten minutes without a daemon the store counts as old: no create or launch before every
    zone of the slot's places has answered once, even over restarts, or a person says `confirm --store`.
    """
    put_back_an_older_store(daemon)
    daemon.zone.world.operator.outage("zone", timedelta(hours=1), daemon.clock.true_now(), zone=EU)
    daemon.start()
    daemon.run(minutes=20)
    # What it waits for outlives a process.
    daemon.restart()
    daemon.run(minutes=20)
    assert daemon.causes()["pod-0"] is Cause.STORE_OLD
    assert [node.path.zone for node in daemon.zone.nodes()] == [EU]
    daemon.run(hours=1)
    assert daemon.all_train()
    assert len(daemon.launcher.launches) == 2, "the run in EU was adopted"
    daemon.check()


def test_a_person_who_knows_better_lets_it_go_on(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US), place(EU), care=Care(fence_after=timedelta(minutes=5)))
    daemon.run_until(daemon.all_train)
    lie_idle_while_the_node_goes(daemon)
    daemon.run(minutes=4)
    assert daemon.told("person") == []
    daemon.run(minutes=5)
    assert any("tpucare confirm --store" in text for text in daemon.told("person"))
    assert not daemon.all_train()
    assert daemon.store is not None
    daemon.store.confirm()
    daemon.engine.lift_brake("pod-0")
    daemon.run(minutes=30)
    assert daemon.all_train()
    daemon.check()


def test_a_zone_in_which_no_slot_may_be_holds_nothing_up(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US))
    daemon.run_until(daemon.all_train)
    lie_idle_while_the_node_goes(daemon)
    daemon.run(minutes=30)
    assert daemon.all_train()
    daemon.restart()
    assert daemon.store is not None
    assert not daemon.store.old
    daemon.check()


def test_a_daemon_that_was_away_for_a_moment_waits_for_no_unreachable_zone(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=30)
    preempt(daemon, US)
    daemon.zone.world.operator.outage("zone", timedelta(hours=2), daemon.clock.true_now(), zone=EU)
    daemon.restart()
    daemon.run(minutes=30)
    assert daemon.all_train()
    daemon.check()
