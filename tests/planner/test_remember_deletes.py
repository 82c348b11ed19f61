"""What memory becomes by deletes: asked for, asked for again, void; and places whose nodes never answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kits.evidence import NOW, TRAINS, after, intent, memory, name_of, node, past
from tests.kits.remembering import PLACE, asked, came, create, delete
from tpucare.model.causes import Reason
from tpucare.model.errors import AnswerLost, LostRace, NeedsPerson, NodeGone, RateLimited
from tpucare.model.resources import Operation
from tpucare.planner.remember import apply_node, mark_answered, mark_launched, recover, void_delete


def test_a_delete_is_asked_again_after_60_s_then_twice_that() -> None:
    known, waits = TRAINS, []
    for _ in range(7):
        known = asked(known, delete())
        told = known.node(name_of(0))
        assert told is not None
        assert told.delete is not None
        assert told.delete.next_at is not None
        waits.append((told.delete.next_at - NOW).total_seconds() / 60)
    assert waits == [1, 2, 4, 8, 16, 16, 16]


def test_the_first_reason_of_a_delete_is_kept_and_quiet_once_is_quiet() -> None:
    known = asked(TRAINS, delete(reason=Reason.JUDGED, quiet=True))
    known = asked(known, replace(delete(reason=Reason.JUDGED), why="asked again"))
    told = known.node(name_of(0))
    assert told is not None
    assert told.delete is not None
    assert (told.delete.why, told.delete.quiet, told.delete.reason) == ("why", True, Reason.JUDGED)


def test_a_confirmation_says_nothing_of_a_node_that_is_deleted_after_it() -> None:
    """`tpucare confirm` lets the brake go too: that is no word on whether what it deletes still trains."""
    known = asked(replace(TRAINS, fence_confirmed=True), delete(reason=Reason.JUDGED))
    assert not known.fence_confirmed
    known = asked(replace(known, fence_confirmed=True), delete(reason=Reason.JUDGED))
    assert known.fence_confirmed, "this one was given while the node was being deleted already"


def test_replace_is_done_by_a_first_delete_of_the_slots_own_node() -> None:
    asks = replace(TRAINS, replace_asked=True)
    assert not asked(asks, delete(reason=Reason.ASKED)).replace_asked
    again = replace(asked(TRAINS, delete()), replace_asked=True)
    assert asked(again, delete()).replace_asked, "an elder's delete that is repeated"
    assert asked(asks.with_node(past(1)), delete(1, Reason.SURPLUS)).replace_asked, "another node than the slot's"


def test_a_delete_of_a_node_that_memory_does_not_know() -> None:
    known = asked(memory(creates=(intent(0),)), delete())
    told = known.node(name_of(0))
    assert told is not None
    assert told.launched
    assert known.creates == ()


@pytest.mark.parametrize(
    ("error", "accepted", "wait"),
    [
        (None, True, 60),
        (LostRace("queue the operation"), False, 60),
        (RateLimited("per minute"), False, 60),
        (AnswerLost("x"), False, 5),
        (NeedsPerson("x"), False, 5),
    ],
)
def test_what_comes_of_a_delete(error: Exception | None, accepted: bool, wait: float) -> None:
    known = came(asked(TRAINS, delete()), delete(), None, error)
    told = known.node(name_of(0))
    assert told is not None
    assert told.delete is not None
    assert told.delete.accepted is accepted
    assert told.delete.next_at == after(wait)


def test_a_delete_that_was_accepted_once_is_not_hurried_by_a_failure() -> None:
    known = came(asked(TRAINS, delete()), delete())
    assert came(known, delete(), None, AnswerLost("x")) == known
    assert came(memory(), delete()) == memory()
    assert came(known, delete(), None, NodeGone("404")).nodes == ()


def test_a_delete_of_another_node_is_void() -> None:
    known = void_delete(asked(TRAINS, delete(reason=Reason.JUDGED)), name_of(0))
    told = known.node(name_of(0))
    assert told is not None
    assert told.delete is None
    assert void_delete(memory(), "other") == memory()


def test_a_delete_that_is_taken_back_takes_its_proof_of_quiet_along() -> None:
    """What the workers said then is of then: a run may be launched on the node, and the proof opened the fence."""
    known = asked(TRAINS, delete(reason=Reason.JUDGED, quiet=True))
    for back in (void_delete(known, name_of(0)), recover(known)):
        (told,) = back.nodes
        assert told.delete is None
        (again,) = came(asked(back, delete(reason=Reason.JUDGED)), delete(), None).nodes
        assert again.delete is not None
        assert (again.delete.accepted, again.may_be_training) == (True, True)


def test_two_nodes_that_never_answered_block_their_place() -> None:
    known = memory(past(0, answered=False), past(1, answered=False))
    known = asked(known, delete(0, Reason.JUDGED, unanswered=True))
    assert not known.place(PLACE).blocked
    known = asked(known, delete(1, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).blocked
    assert "OS Login" in known.place(PLACE).reason


def test_two_nodes_whose_chips_were_held_block_their_place_until_a_launch() -> None:
    known = memory(past(0), past(1), past(2))
    known = asked(known, delete(0, Reason.DEAD, held=True))
    assert not known.place(PLACE).blocked
    known = asked(known, delete(1, Reason.DEAD, held=True))
    assert known.place(PLACE).blocked
    assert "`runtime`" in known.place(PLACE).reason
    known = came(known.with_create(intent(10)), create(10), Operation("op"))
    known = apply_node(known, node("READY", 10))
    assert known.place(PLACE).held_nodes == 2, "that a node came up says nothing about its chips"
    known = mark_launched(known, name_of(2))
    assert (known.place(PLACE).held_nodes, known.place(PLACE).refusals) == (0, 0)


def test_a_place_whose_nodes_never_answer_is_asked_hourly_though_its_creates_succeed() -> None:
    known = memory(*(past(number, answered=False) for number in range(4)))
    for number in range(3):
        known = asked(known, delete(number, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).refusals == 2
    assert known.place(PLACE).retry_at == after(hours=1)
    known = came(known.with_create(intent(10)), create(10), Operation("op"))
    known = apply_node(known, node("READY", 10))
    known = asked(known, delete(3, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).refusals == 3
    assert known.place(PLACE).retry_at == after(hours=1)
    assert mark_answered(known, name_of(10)).place(PLACE).refusals == 0


def test_a_verdict_given_again_after_a_restart_counts_one_node_once() -> None:
    known = asked(memory(past(answered=False)), delete(0, Reason.JUDGED, unanswered=True))
    known = asked(recover(known), delete(0, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).unanswered_nodes == 1
