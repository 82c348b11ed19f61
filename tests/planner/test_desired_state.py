"""What a person may ask of a slot, as changes of its memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.kits.evidence import (
    FRESH,
    NOW,
    QUIET,
    TRAINS,
    act,
    after,
    ended,
    evidence,
    intent,
    launched,
    memory,
    node,
    past,
    place,
    run,
    seen,
    slot,
)
from tpucare.model.actions import Create, Fact, Launch, Record, Wait
from tpucare.model.causes import Cause
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import DesiredState, End, FailureCounter, PlaceMemory, Refusal
from tpucare.model.resources import OnSuccess
from tpucare.planner import desired_state
from tpucare.planner.remember import abandon_create

TIRED = replace(
    TRAINS,
    end=End.FAILED,
    end_why="crashes",
    ended_at=NOW,
    step=7,
    books={"crash": FailureCounter(11, 40, after(60), "exit 1")},
    places={place().key: PlaceMemory(3, after(60), Refusal.HUMAN, "no permission", True, 4, NOW, NOW, 2)},
)


@pytest.mark.parametrize("word", ["up", "down", "pause", "resume", "retry", "confirm", "restart", "replace_node"])
def test_a_command_changes_no_node(word: str) -> None:
    assert getattr(desired_state, word)(TRAINS).nodes == TRAINS.nodes


@pytest.mark.parametrize(
    ("word", "wish"),
    [("up", DesiredState.UP), ("down", DesiredState.DOWN), ("pause", DesiredState.PAUSED), ("resume", DesiredState.UP)],
)
def test_what_is_wished_is_kept(word: str, wish: DesiredState) -> None:
    assert getattr(desired_state, word)(replace(TRAINS, wish=DesiredState.PAUSED)).wish is wish


def test_retry_begins_with_clean_books_and_places_and_keeps_what_was_reached() -> None:
    known = desired_state.retry(TIRED)
    assert known.books == {"crash": FailureCounter(total=40)}
    assert known.place(place().key) == PlaceMemory(reason="no permission", last_success=NOW)
    assert (known.end, known.end_why, known.ended_at) == (End.NONE, "", None)
    assert (known.step, known.attempts, known.next_number) == (7, TIRED.attempts, TIRED.next_number)


def test_up_begins_anew_only_where_something_had_ended() -> None:
    assert desired_state.up(TIRED).books == {"crash": FailureCounter(total=40)}
    assert desired_state.up(replace(TIRED, end=End.NONE, wish=DesiredState.DOWN)).books == {
        "crash": FailureCounter(total=40)
    }
    assert desired_state.up(replace(TIRED, end=End.NONE)).books == TIRED.books


def test_a_confirmation_is_about_older_nodes_that_are_in_doubt_now() -> None:
    """
    A `confirm` that found no node in doubt opened the fence of a node that was made days later. It counts only for
    nodes that are in doubt when it is said, and until the next create.
    """
    assert not desired_state.confirm(TRAINS).fence_confirmed, "its only node is the one that trains"
    assert not desired_state.confirm(memory(past(0, launched=False), past(1))).fence_confirmed
    assert desired_state.confirm(memory(launched(), past(1))).fence_confirmed
    assert desired_state.confirm(replace(TRAINS, creates=(intent(10),))).fence_confirmed
    assert not desired_state.confirm(replace(TRAINS, creates=(intent(0),))).fence_confirmed, (
        "the create of that very node"
    )
    assert not desired_state.confirm(replace(TRAINS, creates=(intent(10, abandoned=True),))).fence_confirmed


def test_rest_keeps_what_was_learned_and_down_forgets_that_demand_woke_the_slot() -> None:
    awake = desired_state.wake(TIRED)
    assert awake == replace(TIRED, awake=True)
    assert desired_state.rest(awake) == TIRED
    assert not desired_state.up(desired_state.down(awake)).awake


def test_a_create_that_is_not_wanted_any_more_says_nothing_of_its_place() -> None:
    known = memory(creates=(intent(3),), awake=True)
    record = Record(Fact.CREATE_SUPERSEDED, "nothing asks", name=intent(3).name, cause=Cause.RESTING)
    rested = abandon_create(known, record, NOW, Random(0))
    assert rested.creates[0].abandoned
    assert rested.places == {}


def test_flags_are_raised() -> None:
    assert desired_state.restart(TRAINS).restart_asked
    assert desired_state.replace_node(TRAINS).replace_asked


def test_a_failed_slot_that_is_retried_is_launched_on_the_node_that_was_kept() -> None:
    failed = memory(launched(), run=run(state=RunState.STOPPED, stop_why="crashes"), end=End.FAILED, ended_at=NOW)
    what = evidence(seen(node(), ended(143)))
    assert isinstance(act(what, failed), Wait)
    assert isinstance(act(what, desired_state.retry(failed)), Launch)


def test_a_finished_slot_that_is_applied_again_runs_again_on_the_node_that_was_kept() -> None:
    done, keep = replace(TRAINS, end=End.DONE, ended_at=NOW), slot(on_success=OnSuccess.KEEP)
    what = evidence(seen(node(), ended(0)))
    assert isinstance(act(what, done, keep), Wait)
    again = act(what, desired_state.up(done), keep)
    assert isinstance(again, Launch)
    assert again.number == 2


def test_a_slot_that_was_down_comes_up_with_a_new_node() -> None:
    assert isinstance(act(evidence(), desired_state.up(memory(wish=DesiredState.DOWN))), Create)
    assert isinstance(
        act(evidence(seen(node(), QUIET)), desired_state.up(replace(FRESH, wish=DesiredState.DOWN))), Launch
    )
