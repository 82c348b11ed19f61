"""Replays: what a window is, what a second counts as, and who does better on the same recorded capacity."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tpucare.cli.app import app
from tpucare.model.errors import ConfigError
from tpucare.testbed.emulator.world.capacity import Trace, supply
from tpucare.testbed.emulator.world.config import Capacity
from tpucare.testbed.replay.account import Account, Ask, Held, Saving, SlotLog, TimeKind, settle
from tpucare.testbed.replay.fleets import on_recordings
from tpucare.testbed.replay.policies import POLICIES
from tpucare.testbed.replay.recordings import (
    WINDOWS,
    at_least,
    changes_of,
    cheapest_first,
    less,
    load_dataset,
    window_of,
)
from tpucare.testbed.replay.replays import Replay, gang, live_replay, live_replays, recorded_gang
from tpucare.testbed.replay.report import cadence_line, figures_of, verdict

H100 = "gcp-h100-2025"
START = datetime(2026, 11, 1, tzinfo=UTC)
MINUTE, HOUR = 60.0, 3600.0
DAY = 24 * HOUR


def trace(*ticks: int, zone: str = "z", begins: float = 0.0, price: float | None = 10.0) -> Trace:
    return Trace(zone, timedelta(seconds=600), 16, ticks, zone, begins, price)


def held(at: float, until: float, **fields: Any) -> Held:
    return Held("z", at, 1, until=until, **{"price": 10.0, **fields})


def settled(log: SlotLog, *spans: tuple[float, int], until: float = DAY, judged_from: float = 0.0) -> Account:
    """One slot, which takes one unit of the only zone, with saves of 30 s each 30 min and 12 min to the first step."""
    return settle(
        {"pod-0": log},
        {"z": spans},
        until=until,
        judged_from=judged_from,
        units=1,
        first_step_seconds=12 * MINUTE,
        saving=Saving(),
    )


# --- recordings ------------------------------------------------------------------------------------------------------


def test_a_window_has_the_very_changes_that_a_world_makes_of_the_trace() -> None:
    name, seed = "us-central1-b", 3
    whole = window_of(load_dataset(H100).values())
    config = Capacity(trace=f"{H100}/{name}")
    made = supply(config, START, random.Random(f"{seed}/capacity/{name}/0"))
    until = START + timedelta(seconds=whole.seconds - 600)  # the world's trace begins anew after its last tick
    wanted = tuple(((at - START).total_seconds(), amount) for at, amount in takewhile(lambda one: one[0] < until, made))
    assert changes_of(load_dataset(H100)[name], whole, seed) == wanted


@pytest.mark.parametrize(
    ("name", "amounts", "judged_from"),
    [
        ("whole", [1, 2, 3, 4], 0.0),
        ("first half", [1, 2], 0.0),
        ("second half", [3, 4], 0.0),
        ("second half after the first", [1, 2, 3, 4], 1200.0),
        ("first half after the second", [3, 4, 1, 2], 1200.0),
    ],
)
def test_windows(name: str, amounts: list[int], judged_from: float) -> None:
    window = window_of([trace(1, 2, 3, 4)], name)
    assert [amount for _, amount in changes_of(trace(1, 2, 3, 4), window, 1)] == amounts
    assert window.judged_from == judged_from


def test_every_window_has_a_name() -> None:
    assert [window_of([trace(1, 2)], name).judged for name in WINDOWS] == [1200.0, 600.0, 600.0, 600.0, 600.0]


def test_traces_are_aligned_by_the_clock_that_they_share() -> None:
    early, late = trace(1, 2, 3, 4, zone="a"), trace(5, 6, 7, 8, zone="b", begins=1200.0)
    window = window_of([early, late])
    assert window.parts == ((1200.0, 2400.0),)
    assert [amount for _, amount in changes_of(early, window, 1)] == [3, 4]
    assert [amount for _, amount in changes_of(late, window, 1)] == [5, 6]
    with pytest.raises(ConfigError, match="no common time"):
        window_of([early, trace(1, begins=9000.0)])


def test_room_is_where_enough_is_left_by_others() -> None:
    changes = ((0.0, 16), (100.0, 8), (200.0, 16))
    assert at_least(changes, 16, 300.0) == [(0.0, 100.0), (200.0, 300.0)]
    assert at_least(less(changes, [(50.0, 250.0, 8)]), 8, 300.0) == [(0.0, 100.0), (200.0, 300.0)]


def test_an_unknown_dataset_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"gcp-h100: neither a folder nor one of .*gcp-h100-2025; nearest: gcp-h100"):
        load_dataset("gcp-h100")


# --- the account -----------------------------------------------------------------------------------------------------


def test_a_run_that_is_lost_has_what_it_saved_and_one_that_lives_has_all() -> None:
    lost = held(0.0, 20.0 + 2 * 1830.0 + 1000.0, trains=20.0)
    lives = held(5000.0, 5020.0 + 1830.0 + 100.0, trains=5020.0, lost=False)
    found = settled(SlotLog(("z",), held=[lost, lives]), (0.0, 1), until=lives.until)
    assert found.spent[TimeKind.USEFUL] == 3600.0 + 1800.0 + 100.0
    assert found.spent[TimeKind.REDONE] == 1000.0
    assert found.spent[TimeKind.BOOT] == 40.0


def test_every_second_counts_once() -> None:
    """An hour with room that nobody asks for, one with a refused create, none, a node; the last room is too short."""
    capacity = ((0.0, 1), (2 * HOUR, 0), (3 * HOUR, 1), (5 * HOUR, 0), (6 * HOUR, 1), (6 * HOUR + 60, 0))
    node = held(3 * HOUR, 5 * HOUR + 30, trains=3 * HOUR + 720, freed=5 * HOUR, shown=5 * HOUR + 60)
    found = settled(SlotLog(("z",), [Ask("z", 0.0, HOUR)], [node]), *capacity, until=7 * HOUR)
    assert found.spent[TimeKind.WAITING] == HOUR
    assert found.spent[TimeKind.PAUSING] == pytest.approx(HOUR - 720)
    assert found.spent[TimeKind.TOO_SHORT] == pytest.approx(720 + 60)
    assert found.spent[TimeKind.NO_ROOM] == pytest.approx(HOUR + HOUR - 30 + HOUR - 60)
    assert sum(found.spent.values()) == pytest.approx(7 * HOUR)
    assert (found.creates, found.granted) == ({"z": 2}, {"z": 1})
    assert found.waits[0].open == pytest.approx(2 * HOUR)
    assert found.waits[0].idle == pytest.approx(HOUR)


def test_only_the_judged_part_counts_and_its_dollars() -> None:
    node = held(0.0, 4 * HOUR, trains=720.0, lost=False)
    found = settled(SlotLog(("z",), held=[node]), (0.0, 1), until=4 * HOUR, judged_from=2 * HOUR)
    assert found.slot_seconds == 2 * HOUR
    assert sum(found.creates.values()) == 0
    assert found.paid == pytest.approx(20.0)
    assert found.dollars == pytest.approx(10.0 * 2 * HOUR / found.spent[TimeKind.USEFUL])


def test_dollars_are_unknown_without_a_price_and_endless_without_a_useful_hour() -> None:
    assert settled(SlotLog(("z",), held=[held(0.0, 60.0)]), (0.0, 1)).dollars == math.inf
    assert settled(SlotLog(("z",), held=[held(0.0, HOUR, price=None)]), (0.0, 1)).dollars is None


def test_a_place_with_room_is_left_out_for_as_many_creates_as_went_elsewhere() -> None:
    """Room in `b` all the while, in `c` only between two creates: those count anew."""
    asks = [Ask("a", 600.0 * number, 600.0 * number + 30) for number in range(6)]
    capacity = {"a": ((0.0, 0),), "b": ((0.0, 1),), "c": ((0.0, 1), (1500.0, 0), (1700.0, 1))}

    def left_out(*zones: str) -> int:
        logs, saving = {"pod-0": SlotLog(zones, asks)}, Saving()
        found = settle(logs, capacity, until=DAY, judged_from=0.0, units=1, first_step_seconds=60.0, saving=saving)
        return found.left_out

    assert left_out("a", "b", "c") == 6
    assert left_out("a", "c") == 3


@pytest.mark.parametrize(
    ("saving", "lives", "seconds"),
    [
        (Saving(), [60.0], 1800.0),
        (Saving(every=None, seconds=30.0), [], 637.6),
        (Saving(every=None, seconds=30.0), [1800.0] * 99, 313.9),
        (Saving(every=None, seconds=0.1), [1.0] * 999, 60.0),
    ],
)
def test_interval_between_saves(saving: Saving, lives: Sequence[float], seconds: float) -> None:
    assert saving.interval(lives) == pytest.approx(seconds, rel=0.001)


# --- the engine, and policies beside it ------------------------------------------------------------------------------


def test_a_gang_finds_the_zone_that_has_room_among_nine() -> None:
    """A day of measured capacity. In declared order it waited beside free zones: 52 %, and four of them never asked."""
    zones = cheapest_first(load_dataset(H100))
    found = live_replay(recorded_gang(H100, zones, days=1.0))
    assert found.goodput >= 85.0
    assert set(found.creates) == set(zones)
    assert sum(found.spent.values()) == pytest.approx(DAY)


def test_foresight_beats_every_policy_without_it() -> None:
    zones = cheapest_first(load_dataset(H100))
    replays = [recorded_gang(H100, zones, policy=policy) for policy in POLICIES]
    found = dict(zip(POLICIES, live_replays(replays), strict=True))
    assert found["oracle"].goodput > found["round robin"].goodput > found["ordered"].goodput
    assert found["oracle"].goodput > found["EAGER"].goodput
    assert found["oracle"].spent.get(TimeKind.WAITING, 0.0) == 0.0
    for account in found.values():
        assert sum(account.spent.values()) == pytest.approx(account.slot_seconds)


@pytest.mark.parametrize("policy", ["tpucare", *POLICIES])
def test_slots_share_the_capacity_of_a_zone(policy: str) -> None:
    """Room for two nodes of four hosts: the third slot never has one."""
    traces = {"us-east4-a": trace(*[8] * 12, zone="us-east4-a")}
    found = live_replay(Replay(gang(("us-east4-a",), "v4-32", 4, count=3), traces, policy=policy))
    assert found.granted == {"us-east4-a": 2}
    assert found.spent[TimeKind.NO_ROOM] == pytest.approx(7200.0, rel=0.01)


def test_one_seed_is_one_history() -> None:
    zones = cheapest_first(load_dataset(H100))[:3]
    one, again, other = (live_replay(recorded_gang(H100, zones, seed=seed, days=0.5)) for seed in (1, 1, 2))
    assert one == again != other


# --- the command -----------------------------------------------------------------------------------------------------

FLEET = "name: pod\ncount: 2\ntpu: {type: v4-64, zones: [us-central2-b]}\njob: {run: python3 train.py}\n"


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    file = tmp_path / "pod.yaml"
    file.write_text(FLEET)
    return file


def simulate(*words: str) -> Result:
    return CliRunner().invoke(app, ["simulate", "--traces", *words])


def test_a_fleet_of_ones_own_on_recorded_capacity(fleet: Path) -> None:
    words = (H100, "--fleet", str(fleet), "--map", "us-central2-b=us-east4-a", "--days", "0.5", "--jobs", "1")
    ran = simulate(*words, "--seed", "3", "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert (told["clean"], told["traces"], told["seeds"]) == (True, H100, [3])
    assert set(told["policies"]) == {"tpucare", *POLICIES}
    own = told["policies"]["tpucare"]
    assert own["goodput_percent"]["mean"] + sum(own["lost_percent"].values()) == pytest.approx(100, abs=0.1)
    assert own["dollars_per_productive_hour"]["mean"] > 14
    assert set(own["places"]) == {"us-central2-b"}
    assert simulate(*words, "--seed", "3", "--json").stdout == ran.stdout


def test_a_person_reads_a_table_and_a_verdict(fleet: Path) -> None:
    ran = simulate(H100, "--fleet", str(fleet), "--map", "us-central2-b=us-east4-a", "--days", "0.2", "--jobs", "1")
    assert ran.exit_code == 0, ran.output
    assert "2 slots of 8 hosts in 1 zone on gcp-h100-2025: 0.2 days, 1 history" in ran.stdout
    assert "stand-ins: us-central2-b = us-east4-a" in ran.stdout
    assert "goodput %" in ran.stdout
    assert "no-starved-place kept" in ran.stdout


def test_a_person_reads_how_often_to_save() -> None:
    """Two nodes of two hours, one of them lost: a life of four hours."""
    nodes = [held(0.0, 2 * HOUR, trains=MINUTE), held(3 * HOUR, 5 * HOUR, trains=3 * HOUR, lost=False)]
    found = figures_of([settled(SlotLog(("z",), held=nodes), (0.0, 1))])
    assert cadence_line(found, 30.0).startswith("a node lives for 4 h on average: with saves of 30 s the least is lost")
    assert cadence_line(figures_of([settled(SlotLog(("z",)), (0.0, 1))]), 30.0) == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("gcp-h100",), "one of aws-v100x4-2023, gcp-h100-2025; nearest: gcp-h100-2025"),
        ((H100, "--fleet", "{fleet}"), "for example --map us-central2-b=us-east4-a"),
        ((H100, "--fleet", "{fleet}", "--map", "us-central2-b"), "must be ZONE=TRACE"),
        (
            (H100, "--fleet", "{fleet}", "--map", "us-central2-a=us-east4-a"),
            "no zone us-central2-a; nearest: us-central2",
        ),
        ((H100, "--fleet", "{fleet}", "--map", "us-central2-b=us-east4-b"), "no trace us-east4-b"),
        ((H100, "--faults", "low"), "--faults does not go with --traces"),
        ((H100, "--first-step", "12"), "--first-step: 12 is not a duration"),
        ((H100, "--save-cost", "0s"), "--save-cost: must be longer than 0s"),
        (("{folder}",), "has no file ZONE.json"),
    ],
)
def test_an_error_says_what_to_change(words: tuple[str, ...], text: str, fleet: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    ran = simulate(*(word.format(fleet=fleet, folder=empty) for word in words))
    assert ran.exit_code != 0
    assert text in " ".join(f"{ran.output} {ran.exception}".replace("│", " ").split())


def test_a_slice_larger_than_what_was_recorded_fills_all_of_it() -> None:
    traces = {"us-east4-a": trace(*[16] * 12, zone="us-east4-a")}
    found = on_recordings(gang(("us-east4-a",), "v4-512", 64), H100, traces, [])
    assert found.hosts_per_unit == 4
    assert "a unit of the recording holds 4 hosts here" in found.notes[0]
    account = live_replay(Replay(found.slots, found.traces, hosts_per_unit=found.hosts_per_unit))
    assert account.granted == {"us-east4-a": 1}


@pytest.mark.parametrize(("left_out", "kept"), [(6, True), (7, False)])
def test_a_place_with_room_may_be_left_out_for_two_rounds(left_out: int, kept: bool) -> None:
    account = settled(SlotLog(("z",), held=[held(0.0, HOUR, trains=MINUTE)]), (0.0, 1))
    found = figures_of([replace(account, left_out=left_out)])
    assert verdict(found, found, 3)[0] is kept
