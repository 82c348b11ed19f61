"""Work that is due at an instant: which capacity a slot may use, and what counts as work, as tables."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from tests.kits.decisions import told
from tests.kits.evidence import (
    EU,
    HERE,
    NOW,
    US,
    act,
    after,
    evidence,
    launched,
    memory,
    node,
    place,
    run,
    running,
    seen,
    slot,
)
from tpucare.model.actions import Create
from tpucare.model.causes import Cause
from tpucare.model.evidence import Case, Timers
from tpucare.model.memory import Memory, PlaceMemory, Refusal, Work
from tpucare.model.resources import Bounds, DueWork, Place, Provisioning
from tpucare.planner.deadline import (
    HOUR,
    RunSight,
    Tier,
    count_end,
    count_training,
    draw_line,
    hours_done,
    pace,
    pace_of,
)

ON_DEMAND = replace(place(US, Provisioning.ON_DEMAND), price=5.0)
SPOT, OTHER_SPOT = replace(place(US), price=1.0), replace(place(EU), price=1.0)
DUE = DueWork(80, NOW + 50 * HOUR)


def work(hours: float, **more: object) -> Work:
    """Fifty of a hundred hours have passed, in which eighty hours of work are due."""
    line = {"hours_of_work": 80.0, "by": DUE.by, "line_from": NOW - 50 * HOUR, "line_hours": 0.0}
    return Work(job="j", hours=hours, **{**line, **more})  # type: ignore[arg-type]


# --- the line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hours", "tier", "slack"),
    [
        (80, Tier.SPOT, 49.1),
        (45, Tier.SPOT, 14.1),
        (40, Tier.SPOT, 9.1),
        (37, Tier.SPOT, 6.1),
        (36.9, Tier.EITHER, 6.0),
        (31, Tier.EITHER, 0.1),
        (30.9, Tier.ON_DEMAND, 0),
        (0, Tier.ON_DEMAND, -30.9),
    ],
)
def test_the_tier_follows_from_the_line_and_from_the_time_left(hours: float, tier: Tier, slack: float) -> None:
    found = pace(work(hours), DUE, NOW)
    assert (found.tier, found.due) == (tier, 40 * HOUR)
    assert found.slack / HOUR == pytest.approx(slack)
    assert found.why


def test_after_the_deadline_nothing_is_asked_of_on_demand_capacity() -> None:
    assert pace(work(10), DUE, DUE.by).tier is Tier.SPOT


def test_a_run_that_lives_counts_until_now() -> None:
    assert hours_done(work(10, since=NOW - 2 * HOUR), NOW) == 12 * HOUR
    assert hours_done(work(10, since=NOW + 2 * HOUR), NOW) == 10 * HOUR


def test_a_changed_deadline_draws_a_new_line_from_the_work_done() -> None:
    begun = draw_line(None, DUE, NOW)
    assert (begun.line_from, begun.line_hours) == (NOW, 0)
    assert draw_line(begun, DUE, NOW + HOUR) is begun
    moved = draw_line(replace(begun, since=NOW), DueWork(90, DUE.by), NOW + 3 * HOUR)
    assert (moved.line_from, moved.line_hours, moved.hours_of_work) == (NOW + 3 * HOUR, 3, 90)


# --- what counts as work ----------------------------------------------------------------------------------------------


def sight(step: int | None = None, checkpoint: int | None = None, token: str = "a0.1", job: str = "j") -> RunSight:
    return RunSight(token, job, step, checkpoint)


def lived(known: Work, first: RunSight, *later: tuple[float, RunSight], end: float) -> Work:
    """A run that trains from NOW on, is seen at those hours, and was last seen at *end*."""
    known = count_training(known, first, NOW)
    last = first
    for hours, last in later:
        known = count_training(known, last, NOW + hours * HOUR)
    return count_end(known, NOW + end * HOUR, last.step)


def test_a_job_that_tells_nothing_counts_by_the_time_it_runs() -> None:
    known = lived(Work(job="j"), sight(), (1, sight()), end=3)
    assert (known.hours, known.since) == (3, None)
    known = lived(known, sight(token="a1.1"), end=2)
    assert known.hours == 5


def test_what_a_lost_run_did_after_its_last_checkpoint_does_not_count() -> None:
    known = lived(
        Work(job="j"), sight(0), (1, sight(3600, 3600)), (2, sight(7200, 7200)), (2.5, sight(9000, 7200)), end=3
    )
    assert (known.hours, known.reached) == (2, 3)


def test_the_first_step_of_the_next_run_tells_what_was_kept() -> None:
    known = lived(Work(job="j"), sight(0), (3, sight(12000)), end=3)
    assert known.hours == 3
    assert count_training(known, sight(None, token="a1.1"), NOW) is known, "it restores"
    again = count_training(known, sight(8000, token="a1.1"), NOW)
    assert (again.hours, again.since) == (2, NOW)
    assert count_training(known, sight(0, token="a1.1"), NOW).hours == 0
    assert count_training(known, sight(13000, token="a1.1"), NOW).hours == 3


def test_another_job_begins_at_nothing() -> None:
    known = count_training(work(30, saved=5, step=5), sight(1, job="other"), NOW)
    assert (known.hours, known.saved, known.job, known.hours_of_work) == (0, None, "other", 80)


def test_little_is_written_while_a_run_lives() -> None:
    known = count_training(Work(job="j"), sight(0), NOW)
    assert count_training(known, sight(60), NOW + timedelta(minutes=9)) is known
    written = count_training(known, sight(700), NOW + timedelta(minutes=12))
    assert (written.hours, written.since, written.step) == (0.2, NOW + timedelta(minutes=12), 700)


# --- what is decided --------------------------------------------------------------------------------------------------

SLOT = replace(slot(SPOT, OTHER_SPOT, ON_DEMAND), bounds=Bounds(deadline=DUE))
REFUSED = PlaceMemory(1, after(30), Refusal.NO_CAPACITY, asked=0)


def remembering(done: Work, *refused: str, **more: object) -> Memory:
    return memory(places=dict.fromkeys(refused, REFUSED), work=done, next_number=1, **more)


@pytest.mark.parametrize(
    ("known", "wanted", "cause"),
    [
        (remembering(work(45)), SPOT, Cause.NO_NODE),
        (remembering(work(45), SPOT.key), OTHER_SPOT, Cause.NO_NODE),
        (remembering(work(45), SPOT.key, OTHER_SPOT.key), None, Cause.NO_PLACE_OPEN),
        (remembering(work(36)), SPOT, Cause.NO_NODE),
        (remembering(work(36), SPOT.key), OTHER_SPOT, Cause.NO_NODE),
        (remembering(work(36), SPOT.key, OTHER_SPOT.key), ON_DEMAND, Cause.BEHIND_DEADLINE),
        (remembering(work(20)), ON_DEMAND, Cause.DEADLINE_NEAR),
        (remembering(work(20), ON_DEMAND.key), SPOT, Cause.NO_NODE),
    ],
)
def test_the_next_node_is_of_the_tier_that_the_line_asks_for(known: Memory, wanted: object, cause: Cause) -> None:
    action = act(evidence(), known, SLOT)
    assert (action.place if isinstance(action, Create) else None, action.cause) == (wanted, cause)


@pytest.mark.parametrize(
    ("hours", "price", "past", "wanted"),
    [
        (45, 1.2, REFUSED, None),
        (45, 1.1, REFUSED, OTHER_SPOT),
        (45, None, REFUSED, OTHER_SPOT),
        (40.4, 1.2, REFUSED, OTHER_SPOT),
        (45, 1.2, replace(REFUSED, kind=Refusal.HUMAN, blocked=True), OTHER_SPOT),
    ],
)
def test_well_ahead_of_the_line_a_slot_waits_for_the_cheapest_places(
    hours: float, price: float | None, past: PlaceMemory, wanted: Place | None
) -> None:
    declared = replace(SLOT, places=(SPOT, replace(OTHER_SPOT, price=price), ON_DEMAND))
    action = act(evidence(), replace(remembering(work(hours)), places={SPOT.key: past}), declared)
    assert (action.place.key if isinstance(action, Create) else None) == (wanted.key if wanted else None), action.why


def test_no_on_demand_capacity_is_used_that_the_file_does_not_name() -> None:
    action = act(evidence(), remembering(work(0)), replace(SLOT, places=(SPOT,)))
    assert isinstance(action, Create)
    assert action.place is SPOT


def trains(tier: Provisioning, done: Work, *refused: str) -> tuple[str, Cause]:
    what = seen(replace(node(), provisioning=tier), running())
    known = replace(remembering(done, *refused), nodes=(launched(),), run=run())
    action = act(evidence(what), known, SLOT)
    return told(action), action.cause


@pytest.mark.parametrize(
    ("tier", "done", "refused", "want"),
    [
        (Provisioning.SPOT, work(36, since=NOW), (), ("Wait", Cause.RUNNING)),
        (Provisioning.SPOT, work(30.9, since=NOW), (), ("Stop then asked", Cause.DEADLINE_NEAR)),
        (Provisioning.SPOT, work(30.9, since=NOW), (ON_DEMAND.key,), ("Wait", Cause.RUNNING)),
        (Provisioning.SPOT, work(30, since=NOW), (), ("Wait", Cause.RUNNING)),
        (Provisioning.ON_DEMAND, work(36, since=NOW, begun=35.5), (), ("Wait", Cause.RUNNING)),
        (Provisioning.ON_DEMAND, work(36, since=NOW, begun=35), (), ("Stop then asked", Cause.SPOT_SOUGHT)),
        (Provisioning.ON_DEMAND, work(36, since=NOW, saved=1, saved_hours=35.9), (), ("Wait", Cause.RUNNING)),
        (Provisioning.ON_DEMAND, work(36, since=NOW), (SPOT.key, OTHER_SPOT.key), ("Wait", Cause.RUNNING)),
        (Provisioning.ON_DEMAND, work(31.5, since=NOW), (), ("Wait", Cause.RUNNING)),
        (Provisioning.ON_DEMAND, work(36), (), ("Wait", Cause.RUNNING)),
    ],
)
def test_a_node_that_trains_is_left_for_the_other_tier_only_where_that_is_worth_it(
    tier: Provisioning, done: Work, refused: tuple[str, ...], want: tuple[str, Cause]
) -> None:
    assert trains(tier, done, *refused) == want


@pytest.mark.parametrize(
    ("done", "wakes"),
    [
        (work(45), NOW + (5 - 0.45) / 0.8 * HOUR),
        (work(40.4), NOW + (0.4 + 0.5 * 9.5) / 1.3 * HOUR),
        (work(36), NOW + 5.1 * HOUR),
        (work(36, since=NOW, begun=35.5), NOW + 0.5 * HOUR),
    ],
)
def test_a_decision_is_made_again_when_the_tier_may_change(done: Work, wakes: datetime) -> None:
    timers = Timers(HERE)
    pace_of(Case(SLOT, evidence(), memory(work=done), timers))
    assert timers.wall_due is not None
    assert abs(timers.wall_due - wakes) < timedelta(seconds=2)
