"""Timers: what has lasted, what has passed, and when to ask again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.evidence import EU, HERE, NOW, SILENT, US, after, ago, before, evidence, later, node, place, seen
from tpucare.engine.tracking import NodeTrack
from tpucare.model.evidence import (
    CLOCK_SLACK,
    SUPPORTING_OBSERVATIONS,
    Holding,
    Mark,
    Timers,
    holding_of,
    latest,
)
from tpucare.model.resources import Provisioning
from tpucare.model.runs import NodeReport

SECOND = timedelta(seconds=1)
LONGEST = timedelta(hours=2)
FIXED = settings(max_examples=200)

lengths = st.integers(0, 100_000).map(lambda seconds: timedelta(seconds=seconds))
marks = st.builds(Mark, st.integers(0, 36_000).map(lambda seconds: timedelta(seconds=seconds)), st.integers(0, 7200))
instants = st.integers(-100_000, 100_000).map(lambda seconds: NOW + timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("since", "want"),
    [
        (None, False),
        (ago(seconds=59), False),
        (ago(seconds=60), True),
        (Mark(ago(hours=1).observed, HERE.passes - 2), False),
        (Mark(ago(hours=1).observed, HERE.passes - SUPPORTING_OBSERVATIONS), True),
    ],
)
def test_a_timeout_needs_observed_time_and_observations(since: Mark | None, want: bool) -> None:
    assert Timers(HERE).lasted(since, timedelta(seconds=60)) is want


@pytest.mark.parametrize(
    ("instant", "want"),
    [
        (None, True),
        (NOW, True),
        (before(1), True),
        (after(1), False),
        (NOW + LONGEST, False),
        (NOW + LONGEST + CLOCK_SLACK, False),
        (NOW + LONGEST + CLOCK_SLACK + SECOND, True),
    ],
)
def test_a_backoff_is_over_at_its_instant_or_when_no_backoff_can_be_that_long(instant, want) -> None:  # type: ignore[no-untyped-def]
    assert Timers(HERE).passed(instant, LONGEST) is want


def test_the_clouds_clock_may_be_unknown_and_may_differ_from_ours() -> None:
    assert not Timers(replace(HERE, cloud=None)).reached(NOW)
    timers = Timers(replace(HERE, cloud=NOW - timedelta(hours=1)))
    assert not timers.reached(NOW)
    assert timers.wall_due == NOW + timedelta(hours=1)
    assert Timers(HERE).reached(NOW)


def test_nothing_that_waits_gives_no_instant() -> None:
    timers = Timers(HERE)
    assert timers.lasted(ago(hours=1), SECOND)
    assert timers.passed(before(1), LONGEST)
    assert (timers.observed_due, timers.wall_due) == (None, None)


@FIXED
@given(st.lists(st.tuples(marks, lengths), min_size=1, max_size=5))
def test_asking_again_at_the_observed_instant_changes_an_answer_and_not_before(
    asked: list[tuple[Mark, timedelta]],
) -> None:
    timers = Timers(HERE)
    answers = [timers.lasted(*question) for question in asked]
    due = timers.observed_due
    assert (due is None) == all(answers)
    if due is None:
        return
    # Whatever is due, three more passes have seen it by then, unless the instant is now.
    then = replace(HERE, observed=max(due, HERE.observed), passes=HERE.passes + SUPPORTING_OBSERVATIONS)
    assert [Timers(then).lasted(*question) for question in asked] != answers
    if due > HERE.observed:
        too_early = replace(then, observed=due - timedelta(microseconds=1))
        settled = [
            answer
            for answer, (since, length) in zip(answers, asked, strict=True)
            if since.observed + length > HERE.observed
        ]
        assert not any(settled)
        again = [
            Timers(too_early).lasted(since, length)
            for since, length in asked
            if since.observed + length > HERE.observed
        ]
        assert not any(again)


@FIXED
@given(st.lists(instants, min_size=1, max_size=5))
def test_asking_again_at_the_wall_instant_changes_an_answer_and_not_before(asked) -> None:  # type: ignore[no-untyped-def]
    timers = Timers(HERE)
    answers = [timers.passed(instant, LONGEST) for instant in asked]
    due = timers.wall_due
    assert (due is None) == all(answers)
    if due is not None:
        then = replace(HERE, wall=due)
        assert [
            Timers(then).passed(instant, LONGEST) for instant in asked if instant <= NOW + LONGEST + CLOCK_SLACK
        ].count(False) < answers.count(False)
        too_early = replace(HERE, wall=due - timedelta(microseconds=1))
        waiting = [instant for instant, answer in zip(asked, answers, strict=True) if not answer]
        assert not any(Timers(too_early).passed(instant, LONGEST) for instant in waiting)


def test_again_and_lasted_share_the_earliest_instant() -> None:
    timers = Timers(HERE)
    timers.again(timedelta(seconds=30))
    timers.lasted(ago(0), timedelta(seconds=10))
    timers.again(timedelta(seconds=20))
    assert timers.observed_due == HERE.observed + timedelta(seconds=10)


def test_small_words() -> None:
    assert latest(None, ago(5), ago(3), None) == ago(3)
    assert latest(None) is None
    assert later(SECOND).mark == Mark(HERE.observed + SECOND, HERE.passes)
    assert holding_of(place(EU, Provisioning.RESERVED)) == Holding(EU, "v3", True, "pod")
    assert holding_of(place()) == Holding(US, "v3", False, "pod")
    what = evidence(seen(node()))
    assert what.node("pod-0-a0") is what.nodes[0]
    assert what.node("pod-0-a1") is None


def test_a_track_knows_since_when_a_worker_is_missing() -> None:
    track = NodeTrack(node(), ago(hours=1), ago(hours=1))
    track.workers = seen(node()).workers
    track.apply_node(node(), ago(30))
    assert track.freeze().lacking_since is None
    track.apply_node(node(endpoints=1), ago(20))
    track.workers = None
    track.apply_node(node(endpoints=1), ago(10))
    assert track.freeze().lacking_since == ago(20)


def test_silence_of_before_a_darkness_supports_no_verdict_after_it() -> None:
    """Three probes have to find it anew (rule 11): what was counted before is of another time."""
    track = NodeTrack(node(), ago(hours=1), ago(hours=1))
    mute = NodeReport(node().key, node().id, (SILENT, SILENT))
    for seconds in (600, 585, 570):
        track.apply_report(mute, ago(seconds))
    assert (track.freeze().silent_probes, track.freeze().silent_since) == (3, ago(600))
    track.mark_zone_unreachable(ago(560))
    track.mark_zone_reachable(ago(60))
    assert (track.freeze().silent_probes, track.freeze().silent_since) == (0, ago(100))
    track.apply_report(mute, ago(45))
    assert (track.freeze().silent_probes, track.freeze().silent_since) == (1, ago(100))
