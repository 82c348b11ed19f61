"""How often a run is told to save: Daly's interval within the bounds of the file, and what it is expected to win."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.evidence import NOW
from tpucare.model.resources import SaveBounds
from tpucare.planner.cadence import (
    SAVE_COST_UNKNOWN,
    Cadence,
    advise_saves,
    cadence_text,
    describe_cadence,
    differs,
    save_interval,
)

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
BOUNDS = SaveBounds(MINUTE, HOUR)
WIDE = SaveBounds(timedelta(microseconds=1), timedelta(days=1000))


@pytest.mark.parametrize(
    ("life", "cost", "want"),
    [
        (2 * HOUR, timedelta(seconds=10), timedelta(minutes=6, seconds=13)),
        (24 * HOUR, timedelta(seconds=1), timedelta(minutes=6, seconds=55)),
        (2 * HOUR, timedelta(milliseconds=1), MINUTE),
        (24 * HOUR, timedelta(minutes=5), HOUR),
    ],
    ids=["usual", "cheap save", "shortest", "longest"],
)
def test_the_interval_is_dalys_within_the_bounds(life: timedelta, cost: timedelta, want: timedelta) -> None:
    assert abs(save_interval(life, cost, BOUNDS) - want) < timedelta(seconds=1)


@given(life=st.floats(600, 1e6), cost=st.floats(0.01, 60), factor=st.floats(0.05, 20))
def test_no_other_interval_loses_noticeably_less(life: float, cost: float, factor: float) -> None:
    advice = advise_saves(timedelta(seconds=life), cost, WIDE)
    best = advice.lost_minutes_a_day()
    assert 0 < best < 1440
    assert advice.lost_minutes_a_day(advice.interval * factor) >= best * 0.999


def test_a_cost_that_no_run_measured_is_assumed_and_said_so() -> None:
    assumed, measured = advise_saves(2 * HOUR, 0.0, BOUNDS), advise_saves(2 * HOUR, 30.0, BOUNDS)
    assert (assumed.save_cost, assumed.is_measured) == (SAVE_COST_UNKNOWN, False)
    assert describe_cadence(assumed) == (
        "save each 6 min 13 s: nodes live 2 h, a save blocks 10 s (assumed); about 75 min a day lost, with saves each "
        "30 min 180 min"
    )
    assert describe_cadence(measured, 6 * MINUTE) == (
        "save each 10 min: nodes live 2 h, a save blocks 30 s; about 127 min a day lost, with saves each 6 min 146 min"
    )


def test_a_life_so_short_that_nothing_is_ever_saved_loses_all() -> None:
    hopeless = Cadence(HOUR, timedelta(seconds=1), MINUTE)
    assert hopeless.lost_minutes_a_day() == 1440


@pytest.mark.parametrize(
    ("told", "seconds", "want"), [(None, 60, True), (0.0, 60, True), (60, 66, False), (60, 67, True), (60, 53, True)]
)
def test_a_change_by_a_tenth_is_no_news(told: float | None, seconds: float, want: bool) -> None:
    assert differs(told, seconds) is want


def test_the_file_says_what_the_interval_follows_from() -> None:
    assert json.loads(cadence_text(advise_saves(2 * HOUR, 2.5, BOUNDS), NOW)) == {
        "interval_seconds": 188.1,
        "node_life_seconds": 7200,
        "save_seconds": 2.5,
        "since": NOW.isoformat(timespec="seconds"),
    }
