"""Where nobody answers one slot tries first whether a new node does; it has to be one that can."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.field import named, preempt
from tests.kits.harness import EU, US, Daemon, place
from tpucare.model.memory import DesiredState


def paused(daemon: Daemon) -> None:
    """The slot waits for a person, and its dead node stays."""
    daemon.wish("aaa-0", DesiredState.PAUSED)


def unreachable(daemon: Daemon) -> None:
    """Its zone does not answer, so nothing is known of its node."""
    daemon.zone.world.operator.outage("zone", timedelta(hours=10), daemon.clock.true_now(), zone=US)


def lose_the_other(daemon: Daemon) -> None:
    """`bbb` falls silent for good, and is replaced whatever becomes of `aaa`."""
    preempt(daemon, "bbb", shown="never")
    daemon.run(hours=1)
    assert daemon.trains("bbb-0")
    assert named(daemon) == ["aaa-0-a0", "bbb-0-a1"]
    daemon.check()


@pytest.mark.parametrize("hinder", [paused, unreachable])
def test_a_slot_that_cannot_act_is_not_waited_for(tmp_path: Path, hinder: Callable[[Daemon], None]) -> None:
    """
    Where no worker answered, the slot that was silent longest was to go first, and it could be one that cannot: paused,
    done, its zone unreachable, its node dead, its key refused. All others waited for it; the canary is the longest
    silent slot that can act now.
    """
    daemon = Daemon(tmp_path)
    daemon.care_for("aaa", 1, place(US))
    daemon.care_for("bbb", 1, place(EU))
    daemon.run(minutes=15)
    preempt(daemon, "aaa", shown="never")
    daemon.run(seconds=30)
    hinder(daemon)
    daemon.run(minutes=1)
    lose_the_other(daemon)


def test_a_node_that_a_paused_slot_has_lost_for_good_is_not_waited_for(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.care_for("aaa")
    daemon.care_for("bbb")
    daemon.run(minutes=15)
    daemon.zone.world.operator.stick_deleting("aaa", daemon.clock.true_now(), repeats=99)
    preempt(daemon, "aaa")
    daemon.wish("aaa-0", DesiredState.PAUSED)
    daemon.run(minutes=1)
    lose_the_other(daemon)
