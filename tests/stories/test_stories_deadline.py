"""Stories of work that is due at an instant, in virtual time: when a slot uses on-demand capacity, and when not."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.harness import EU, US, Daemon, place, slots_of
from tpucare.model.causes import Cause
from tpucare.model.resources import Bounds, DueWork, Provisioning
from tpucare.planner.budget import HOUR
from tpucare.planner.deadline import hours_done
from tpucare.testbed.simulation.time import START
from tpucare.testbed.simulation.workers import Script

SPOT = [replace(place(zone, "v2-8", workers=1), price=1.0) for zone in (US, EU)]
ON_DEMAND = replace(place(US, "v2-8", Provisioning.ON_DEMAND, workers=1), price=5.0)


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state", script=Script(save_every=600))


def declare(daemon: Daemon, hours: float, by: float) -> None:
    bounds = Bounds(deadline=DueWork(hours, START + by * HOUR))
    daemon.care_for_slots("pod", [replace(slots_of("pod", 1, *SPOT, ON_DEMAND)[0], bounds=bounds)])


def spot_capacity(daemon: Daemon, amount: int | None) -> None:
    for zone in (US, EU):
        daemon.zone.world.operator.set_capacity(zone, "v2-8", "spot", amount, daemon.clock.true_now())


def preempt_all(daemon: Daemon) -> None:
    for node in daemon.zone.nodes():
        daemon.zone.world.operator.preempt(str(node.path), daemon.clock.true_now())


def tiers(daemon: Daemon) -> list[str]:
    """Of all nodes that were made, in order."""
    records = [record for record in daemon.zone.world.audit if record["kind"] == "node"]
    failed = {record["id"] for record in records if record["event"] == "failed"}
    return [str(record["tier"]) for record in records if record["event"] == "created" and record["id"] not in failed]


def done(daemon: Daemon) -> timedelta:
    work = daemon.memory("pod-0").work
    assert work is not None
    return hours_done(work, daemon.clock.true_now())


def test_spot_capacity_alone_is_used_while_it_suffices(daemon: Daemon) -> None:
    declare(daemon, hours=8, by=10)
    for _ in range(6):
        daemon.run(hours=1.2)
        preempt_all(daemon)
        daemon.run(minutes=5)
    assert set(tiers(daemon)) == {"spot"}


def test_on_demand_capacity_is_used_far_behind_the_line_and_left_for_spot_capacity(daemon: Daemon) -> None:
    declare(daemon, hours=10, by=20)
    daemon.run(hours=2)
    spot_capacity(daemon, 0)
    preempt_all(daemon)
    daemon.run(hours=1)
    assert set(tiers(daemon)) == {"spot"}, "an hour ahead: it waits for spot capacity"
    daemon.run_until(lambda: "on-demand is not needed" in daemon.why()["pod-0"], minutes=5)
    daemon.run(hours=5)
    assert tiers(daemon)[-1] == "on-demand", "the line has passed by, and half of the time to lose is lost"
    assert daemon.trains("pod-0")
    spot_capacity(daemon, 4)
    daemon.run(hours=2)
    assert tiers(daemon)[-1] == "spot", "there was time to look for spot capacity"
    made = len(tiers(daemon))
    daemon.run(hours=6)
    assert len(tiers(daemon)) == made, "and it stays there"
    assert {Cause.BEHIND_DEADLINE.value, Cause.SPOT_SOUGHT.value} <= {
        str(event.fields.get("cause")) for event in daemon.events
    }


def test_the_net_is_on_demand_capacity_until_the_work_is_done(daemon: Daemon) -> None:
    declare(daemon, hours=8, by=12)
    spot_capacity(daemon, 0)
    daemon.run(hours=1)
    daemon.zone.world.operator.set_capacity(US, "v2-8", "on-demand", 0, daemon.clock.true_now())
    preempt_all(daemon)
    daemon.run(hours=2.5)
    assert not any(daemon.trains(name) for name in daemon.engine.slots)
    daemon.zone.world.operator.set_capacity(US, "v2-8", "on-demand", 4, daemon.clock.true_now())
    daemon.run(minutes=20)
    assert tiers(daemon)[-1] == "on-demand"
    spot_capacity(daemon, 4)
    made = len(tiers(daemon))
    daemon.run(hours=12 - daemon.clock.seconds / 3600)
    assert len(tiers(daemon)) == made, "no time is left to look for spot capacity"
    assert done(daemon) >= 7.9 * HOUR


def test_work_is_what_no_later_run_repeats(daemon: Daemon) -> None:
    """Checkpoints come each ten minutes: a run that is lost at 95 minutes has kept 90 of them."""
    declare(daemon, hours=100, by=300)
    daemon.run_until(lambda: daemon.memory("pod-0").work is not None and daemon.trains("pod-0"))
    daemon.run(minutes=95)
    preempt_all(daemon)
    daemon.run(minutes=2)
    assert timedelta(minutes=86) <= done(daemon) <= timedelta(minutes=92)
    daemon.restart()
    daemon.run(minutes=30)
    before = done(daemon)
    daemon.kill()
    daemon.start()
    daemon.run(minutes=1)
    assert timedelta() <= done(daemon) - before <= timedelta(minutes=2), "the run that lives on counts on"
