"""Stories of capacity in virtual time: what slots learn of places from each other, and how soon they ask."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.kits.harness import PROJECT, Daemon, place
from tests.kits.reaction import KIND, TOLD, droughts, lose_all
from tpucare.adapters.state.market_files import MarketFiles
from tpucare.engine.markets import MarketBook
from tpucare.model.markets import Market
from tpucare.model.resources import Place
from tpucare.planner.markets import LONGEST_PAUSE, known, living
from tpucare.testbed.emulator.world.config import WorldConfig

ZONES = ("us-central1-a", "us-central1-b", "us-east1-c", "europe-west4-a")
LENGTHS = {"stockout": 20.0, "create_single": 20.0, "visible": 0.0}


def world() -> WorldConfig:
    room = {"accelerators": ["*"], "capacity": [{"type": KIND, "amount": 8}]}
    return WorldConfig.calm(zones=dict.fromkeys(ZONES, room), latencies=LENGTHS)


def places() -> list[Place]:
    """The later ones are a little dearer."""
    zones = enumerate(ZONES)
    return [replace(place(zone, KIND, workers=1), price=2.0 + 0.1 * index) for index, zone in zones]


def asked(daemon: Daemon, since: datetime) -> list[tuple[datetime, str]]:
    """Instant and zone of each create since then."""
    calls = daemon.zone.calls("CreateNode")
    told = [(datetime.fromisoformat(str(call["at"])), str(call["name"] or call["parent"])) for call in calls]
    return [(at, next(zone for zone in ZONES if zone in name)) for at, name in told if at >= since]


def set_capacity(daemon: Daemon, zone: str, amount: int) -> None:
    daemon.zone.world.operator.set_capacity(zone, KIND, "spot", amount, daemon.clock.true_now())


def test_slots_that_lose_their_nodes_at_once_do_not_all_ask_one_zone(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, config=world())
    daemon.care_for("pod", 8, *places())
    daemon.run_until(daemon.all_train)
    daemon.run(hours=3)
    since = lose_all(daemon)
    for zone in ZONES:
        set_capacity(daemon, zone, 0)
    daemon.run(seconds=19)
    first = Counter(zone for _, zone in asked(daemon, since))
    assert sum(first.values()) == 8
    assert max(first.values()) <= 4, first
    assert len(first) >= 3, first
    daemon.run(minutes=5)
    assert set(Counter(zone for _, zone in asked(daemon, since))) == set(ZONES), "then the others"


def test_a_zone_that_holds_its_nodes_is_asked_first_after_the_next_loss_by_all_slots(tmp_path: Path) -> None:
    """Only the slot that had lived there knew of it, and only until its process ended."""
    daemon = Daemon(tmp_path, config=world())
    steady, *others = reversed(ZONES)
    for zone in others:
        set_capacity(daemon, zone, 0)
    daemon.care_for("pod", 1, *places())
    daemon.run_until(daemon.all_train)
    daemon.run(hours=20)
    for zone in others:
        set_capacity(daemon, zone, 8)
    since = daemon.clock.true_now()
    daemon.care_for("lab", 1, *places())
    daemon.run_until(daemon.all_train)
    assert [zone for _, zone in asked(daemon, since)] == [steady], "another fleet"
    daemon.restart()
    daemon.run_until(daemon.all_train)
    since = daemon.clock.true_now()
    daemon.zone.world.operator.preempt("pod-0", since, notice=None, visible_after=timedelta())
    daemon.run_until(lambda: bool(asked(daemon, since)), minutes=2)
    assert [zone for _, zone in asked(daemon, since)] == [steady], "after a restart"
    daemon.check()


def test_what_was_learned_outlives_the_process_and_reaches_another_store_of_the_folder(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, config=world())
    daemon.care_for("pod", 3, *places())
    daemon.run_until(daemon.all_train)
    daemon.run(hours=2)
    lose_all(daemon)
    daemon.run_until(daemon.all_train)
    daemon.run(minutes=5)
    before = {name: market.own for name, market in daemon.engine.state.markets.of(PROJECT).items()}
    assert sum(own.given for own in before.values()) == pytest.approx(6, rel=0.05)
    assert sum(own.deaths for own in before.values()) == pytest.approx(3, rel=0.05)
    daemon.restart()
    markets = daemon.engine.state.markets.of(PROJECT)
    assert {name: market.own for name, market in markets.items() if market.own.asked} == before
    alive = Counter(name for track in daemon.engine.slots.values() for name, _ in living(track.memory))
    assert {name: market.living for name, market in markets.items() if market.living} == dict(alive)
    MarketFiles(tmp_path, "daemon").save({PROJECT: before})
    early = MarketBook(daemon.clock, random.Random(1), MarketFiles(tmp_path / "later", "script"))
    MarketFiles(tmp_path / "later", "daemon").save({PROJECT: before})
    for _ in range(2):
        early.exchange()
    other = MarketBook(daemon.clock, random.Random(1), MarketFiles(tmp_path, "script")).of(PROJECT)
    now = daemon.clock.now()
    for name, own in before.items():
        assert known(other[name], now).given == known(Market(own), now).given
        assert known(early.of(PROJECT)[name], now).given == known(Market(own), now).given, "it ran already"


# --- capacity is there -> a create is accepted -----------------------------------------------------------------------

MOVES = {"at_least": timedelta(seconds=5), "at_most": timedelta(minutes=14)}


def test_capacity_that_comes_back_within_minutes_is_asked_for_within_seconds() -> None:
    seen = [*droughts(1, **MOVES, count=20, seed=3)]
    waits = sorted(wait for drought in seen for wait in drought.reactions)
    assert statistics.median(waits) <= 5
    assert waits[-1] <= 10
    assert max(drought.most_open for drought in seen) == 1, "never two open intents of one slot"


def test_eight_slots_that_wait_for_one_place_have_all_asked_within_fifteen_seconds() -> None:
    seen = [*droughts(8, **MOVES, count=4, seed=4)]
    assert max(wait for drought in seen for wait in drought.reactions) <= 15
    assert max(drought.most_open for drought in seen) == 1


def test_in_a_drought_of_hours_one_slot_asks_for_all_and_its_success_wakes_the_others() -> None:
    hours = {"at_least": timedelta(hours=2), "at_most": timedelta(hours=3)}
    seen = [*droughts(8, **hours, count=1, seed=5, learned=timedelta(minutes=16))]
    for drought in seen:
        assert (drought.askers, drought.most_open) == (1, 1)
        late = [at for at in drought.asked if at > 2 * 3600 * 0.8]
        gaps = [later - at for at, later in itertools.pairwise(late)]
        assert max(gaps) <= LONGEST_PAUSE.total_seconds() + TOLD.total_seconds() + 5
        assert min(drought.reactions) <= LONGEST_PAUSE.total_seconds() + 5
        assert max(drought.reactions) - min(drought.reactions) <= 30, "the others ask at once"
