"""Stories of fleets that end at a bound of their file, in virtual time: `until`, `max_cost`."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.kits.field import preempt
from tests.kits.harness import EU, US, Daemon, place, slots_of
from tpucare.model.causes import Cause
from tpucare.model.memory import DesiredState
from tpucare.model.resources import Bounds, NodeState
from tpucare.planner.budget import HOUR
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.simulation.time import START

# Dollars an hour of one node, in all stories.
PRICE = 6.0
SINGLE = replace(place(kind="v2-8", workers=1), price=PRICE)


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state")


def declare(daemon: Daemon, bounds: Bounds, count: int = 1, fleet: str = "pod") -> None:
    daemon.care_for_slots(fleet, [replace(slot, bounds=bounds) for slot in slots_of(fleet, count, SINGLE, EUROPEAN)])


EUROPEAN = replace(place(EU, "v2-8", workers=1), price=PRICE)


def at(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def true_cost(daemon: Daemon) -> float:
    """By the world's own log: nodes that came up, from their creation until they were gone or reported dead."""
    records = [record for record in daemon.zone.world.audit if record["kind"] == "node"]
    came_up = {record["id"] for record in records if record["event"] == "ready"}
    begun: dict[object, datetime] = {}
    hours = 0.0
    for record in records:
        now = datetime.fromisoformat(str(record["at"]))
        if record["event"] == "created" and record["id"] in came_up:
            begun[record["id"]] = now
        elif record["event"] in ("shown", "gone") and record["id"] in begun:
            hours += (now - begun.pop(record["id"])) / HOUR
    return PRICE * (hours + sum((daemon.clock.true_now() - since) / HOUR for since in begun.values()))


def deaths(daemon: Daemon) -> int:
    """How many the cloud has told of so far."""
    return len([one for one in daemon.zone.world.audit if one["kind"] == "node" and one["event"] == "shown"])


def created(daemon: Daemon) -> list[str]:
    return [name.rpartition("/")[2] for name in daemon.zone.created()]


def known_cost(daemon: Daemon) -> float:
    return daemon.engine.bounds.spending("pod").dollars


def bound_events(daemon: Daemon) -> list[str]:
    return daemon.told("bound")


def test_a_fleet_is_taken_down_at_until_and_stays_down_until_a_later_bound(daemon: Daemon) -> None:
    declare(daemon, Bounds(until=at(30)), count=2)
    daemon.run(hours=29.9)
    assert daemon.all_train()
    assert [text.split(", and")[0] for text in bound_events(daemon)] == ["pod: ends in 23 h", "pod: ends in 59 min"]
    daemon.run(minutes=20)
    assert daemon.zone.nodes() == []
    assert set(daemon.causes().values()) == {Cause.UNTIL_REACHED}
    assert len(daemon.told("stop")) == 2, "with grace"
    assert len(bound_events(daemon)) == 3
    daemon.restart()
    daemon.run(hours=20)
    assert len(created(daemon)) == 2
    assert len(bound_events(daemon)) == 3
    declare(daemon, Bounds(until=at(60)), count=2)
    daemon.run(minutes=20)
    assert daemon.all_train()
    daemon.check("pod-0-a0", "pod-1-a0")


def test_a_daemon_that_was_off_at_until_takes_the_fleet_down_when_it_comes_back(daemon: Daemon) -> None:
    declare(daemon, Bounds(until=at(2)))
    daemon.run(hours=1)
    daemon.kill()
    daemon.pass_unseen(hours=5)
    assert len(daemon.zone.nodes()) == 1
    daemon.start()
    daemon.run(minutes=10)
    assert daemon.zone.nodes() == []
    assert created(daemon) == ["pod-0-a0"]


@pytest.mark.parametrize("jump", [timedelta(days=400), -timedelta(days=400)])
def test_a_clock_that_is_set_wrong_moves_no_bound(daemon: Daemon, jump: timedelta) -> None:
    declare(daemon, Bounds(until=at(3), max_cost=1000))
    daemon.run(hours=1)
    daemon.clock.jump(jump)
    daemon.run(minutes=90)
    assert daemon.trains("pod-0")
    daemon.restart()
    daemon.run(minutes=20)
    assert daemon.trains("pod-0")
    assert known_cost(daemon) == pytest.approx(true_cost(daemon), abs=0.05)
    daemon.run(minutes=20)
    assert daemon.zone.nodes() == []


def test_a_fleet_that_is_paused_at_its_bound_is_taken_down(daemon: Daemon) -> None:
    declare(daemon, Bounds(until=at(2)))
    daemon.run(hours=1)
    daemon.wish("pod-0", DesiredState.PAUSED)
    daemon.run(hours=1.2)
    assert daemon.zone.nodes() == []
    assert daemon.causes()["pod-0"] is Cause.UNTIL_REACHED


@pytest.mark.parametrize("lost_at", [1, 3])
def test_a_lost_store_moves_no_until(daemon: Daemon, lost_at: float) -> None:
    declare(daemon, Bounds(until=at(2)))
    daemon.run(hours=1)
    if lost_at > 1:
        daemon.kill()
        daemon.pass_unseen(hours=lost_at - 1)
        daemon.start()
    daemon.lose_store()
    daemon.run(hours=1.5)
    assert daemon.zone.nodes() == []
    assert created(daemon) == ["pod-0-a0"]


def test_a_bound_that_is_over_when_it_is_declared_makes_no_node(daemon: Daemon) -> None:
    declare(daemon, Bounds(max_cost=100), fleet="other")
    daemon.run(hours=1)
    declare(daemon, Bounds(until=at(0.5)))
    daemon.run(hours=1)
    assert created(daemon) == ["other-0-a0"]
    assert daemon.trains("other-0")


def test_a_create_under_way_at_the_bound_leaves_no_node(daemon: Daemon) -> None:
    declare(daemon, Bounds(until=at(30 / 3600)))
    daemon.run(hours=1)
    assert created(daemon) == ["pod-0-a0"]
    assert daemon.zone.nodes() == []


# --- max_cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_fleet_costs_no_more_than_its_bound_through_preemptions_and_kills(daemon: Daemon, seed: int) -> None:
    chance = random.Random(seed)
    declare(daemon, Bounds(max_cost=60), count=2)
    unsure = 0.0
    for _ in range(40):
        daemon.run(minutes=chance.uniform(1, 20))
        if (nodes := daemon.zone.nodes()) and chance.random() < 0.5:
            lost = chance.choice(nodes)
            preempt(daemon, str(lost.path))
            if lost.state == NodeState.CREATING:
                # It may have come up unseen, so it counts until its death is seen: the cloud tells after 30 s.
                unsure += PRICE * (daemon.clock.true_now() + timedelta(seconds=35) - lost.create_time) / HOUR
        if chance.random() < 0.5:
            daemon.kill()
            hours, so_far = chance.choice([0.001, 0.3]), deaths(daemon)
            daemon.pass_unseen(hours=hours)
            # A death that nobody saw counts until the daemon is back.
            unsure += PRICE * hours * (deaths(daemon) - so_far)
            daemon.start()
            daemon.run(seconds=30)
        # A poll more or less, beside that.
        assert true_cost(daemon) - 0.1 <= known_cost(daemon) <= true_cost(daemon) + 0.1 + unsure
    daemon.run(hours=10)
    assert daemon.zone.nodes() == []
    assert set(daemon.causes().values()) == {Cause.COST_REACHED}
    # While no daemon ran, two nodes lived on for 18 minutes at most.
    assert 30 < true_cost(daemon) <= 60 + 0.5 + 2 * 0.3 * PRICE
    before = known_cost(daemon)
    declare(daemon, Bounds(max_cost=before + 30), count=2)
    daemon.run(hours=1)
    assert daemon.all_train()
    assert known_cost(daemon) == pytest.approx(before + 2 * PRICE, abs=0.5)


def test_hours_that_a_running_daemon_sees_are_counted_to_the_poll(daemon: Daemon) -> None:
    declare(daemon, Bounds(max_cost=1000), count=3)
    for number in range(20):
        daemon.run(minutes=37)
        preempt(daemon, str(daemon.zone.nodes()[number % 3].path))
        if number % 4 == 0:
            daemon.restart()
    assert known_cost(daemon) == pytest.approx(true_cost(daemon), abs=20 * 60 / 3600 * PRICE)
    assert len(daemon.memory("pod-0").nodes) <= 2, "the book of hours does not grow"


def test_what_a_fleet_has_cost_outlives_its_store_by_the_labels_of_its_nodes(daemon: Daemon) -> None:
    declare(daemon, Bounds(max_cost=100), count=2)
    daemon.run(hours=3)
    preempt(daemon, "pod-0-a0")
    daemon.run(hours=2)
    daemon.lose_store()
    daemon.run(minutes=10)
    assert daemon.all_train()
    assert true_cost(daemon) - 0.1 <= known_cost(daemon) <= true_cost(daemon) + 1
    daemon.restart()
    daemon.run(minutes=10)
    assert true_cost(daemon) - 0.1 <= known_cost(daemon) <= true_cost(daemon) + 1
    daemon.run(hours=6)
    assert daemon.zone.nodes() == []
    assert 97 < true_cost(daemon) <= 100.5


def test_a_node_that_stood_in_the_queue_for_hours_hides_no_cost_after_a_lost_store(tmp_path: Path) -> None:
    """What its fleet had cost when it was asked for is told by no label: hours later the other slot has cost more."""
    amounts = {US: 0, EU: 1}
    zones = {zone: {"accelerators": ["*"], "capacity": [{"amount": amount}]} for zone, amount in amounts.items()}
    daemon = Daemon(tmp_path / "state", config=WorldConfig.calm(zones=zones))
    places = (replace(SINGLE, queued=True), EUROPEAN)
    daemon.care_for_slots("pod", [replace(slot, bounds=Bounds(max_cost=1000)) for slot in slots_of("pod", 2, *places)])
    daemon.run(hours=6)
    daemon.zone.world.operator.set_capacity(US, "", "spot", 8, daemon.clock.true_now())
    daemon.run(hours=1)
    assert daemon.all_train()
    daemon.lose_store()
    daemon.run(minutes=10)
    assert daemon.all_train()
    assert true_cost(daemon) > 40
    assert true_cost(daemon) - 0.1 <= known_cost(daemon)


def test_what_labels_do_not_tell_counts_as_spent_until_a_person_says_so(daemon: Daemon) -> None:
    """A fleet whose store and nodes are both gone may have cost anything: it makes no node before `confirm --store`."""
    declare(daemon, Bounds(max_cost=100))
    daemon.run(hours=2)
    daemon.kill()
    preempt(daemon, "pod-0-a0")
    daemon.zone.world.operator.remove("pod-0-a0", daemon.clock.true_now())
    daemon.pass_unseen(hours=1)
    daemon.start()
    daemon.lose_store()
    daemon.run(hours=2)
    assert created(daemon) == ["pod-0-a0"]
    assert daemon.causes()["pod-0"] is Cause.COST_UNKNOWN
    assert daemon.store is not None
    daemon.store.confirm()
    daemon.engine.release()
    daemon.run(minutes=10)
    assert daemon.trains("pod-0")
