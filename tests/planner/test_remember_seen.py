"""What memory becomes by what is seen: nodes, preemptions, answers of workers, what is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.kits.evidence import NOW, TRAINS, going, intent, launched, memory, name_of, node, past
from tests.kits.remembering import PLACE, vanished
from tpucare.model.lifecycles import NodeStatus, RunState
from tpucare.model.memory import FailureCounter, FailureKind, NodeMemory, PlaceMemory
from tpucare.model.resources import LABEL_NUMBER, LABEL_SLOT, NodeState
from tpucare.planner.remember import apply_node, mark_answered, mark_taken


def test_a_node_that_nobody_asked_for_may_have_been_launched() -> None:
    known = apply_node(memory(), node("READY", 12))
    told = known.node(name_of(12))
    assert told is not None
    assert told.launched
    assert known.next_number == 13


def test_a_node_of_another_id_under_the_same_name_is_another_node() -> None:
    known = apply_node(memory(launched(0, status=NodeStatus.DEAD, answered=True)), replace(node(), id=7))
    told = known.node(name_of(0))
    assert told is not None
    assert (told.id, told.status, told.answered, told.launched) == (7, NodeStatus.LIVE, False, True)


@pytest.mark.parametrize("state", [NodeState.PREEMPTED, NodeState.TERMINATED])
def test_a_preemption_is_free_and_proves_the_node_dead_for_good(state: NodeState) -> None:
    known = apply_node(TRAINS, node(state))
    known = apply_node(known, node(NodeState.DELETING))
    told = known.node(name_of(0))
    assert told is not None
    assert told.status is NodeStatus.DEAD
    assert known.counter(FailureKind.PREEMPTION) == FailureCounter(0, 1, None, f"{name_of(0)} {state.name}")
    assert apply_node(known, node(state)).counter(FailureKind.PREEMPTION).total == 1


@pytest.mark.parametrize("state", [NodeState.READY, NodeState.REPAIRING, NodeState.CREATING, NodeState.RESTARTING])
def test_a_node_that_was_shown_dead_and_is_listed_alive_again_proves_nothing_any_more(state: NodeState) -> None:
    known = apply_node(memory(launched(delete=going(NOW, accepted=True, quiet=True))), node("PREEMPTED"))
    for shown in (state, NodeState.PREEMPTED, NodeState.DELETING):
        known = apply_node(known, node(shown))
        (told,) = known.nodes
        assert (told.status, told.may_be_training, told.serves) == (NodeStatus.REVIVED, True, False)
    assert known.counter(FailureKind.PREEMPTION).total == 1


@pytest.mark.parametrize("state", [NodeState.DELETING, NodeState.STOPPED, NodeState.UNKNOWN, NodeState.HIDDEN])
def test_what_runs_nothing_leaves_the_proof_of_death_as_it_is(state: NodeState) -> None:
    (told,) = apply_node(memory(launched(status=NodeStatus.DEAD)), node(state)).nodes
    assert told.status is NodeStatus.DEAD


def test_a_node_that_somebody_took_is_in_doubt_until_it_is_gone_or_given_back() -> None:
    known = mark_taken(replace(TRAINS, creates=(intent(0),)), name_of(0))
    (told,) = known.nodes
    assert (told.status, told.may_be_training, told.serves) == (NodeStatus.TAKEN, True, False)
    assert (known.creates, known.ours) == ((), ())
    assert vanished(known, name_of(0)).nodes == ()
    assert vanished(known, name_of(0)).counter(FailureKind.PREEMPTION).total == 0, "whose end it is, is theirs to count"
    (back,) = apply_node(known, node()).nodes
    assert (back.status, back.serves) == (NodeStatus.LIVE, True)


@pytest.mark.parametrize(
    "past", [past(), launched(status=NodeStatus.DEAD), launched(delete=going(NOW, accepted=True, quiet=True))]
)
def test_a_node_that_somebody_took_and_on_which_none_of_our_runs_lives_is_theirs(past: NodeMemory) -> None:
    assert mark_taken(memory(past), name_of(0)).nodes == ()


def test_a_foreign_name_takes_no_number() -> None:
    strange = replace(node(), key=node().key._replace(name="something"))
    assert apply_node(memory(), strange).next_number == 10


def test_workers_that_answered_acquit_their_place() -> None:
    known = memory(past(answered=False), places={PLACE: PlaceMemory(unanswered_nodes=1)})
    after_all = mark_answered(known, name_of(0))
    assert after_all.place(PLACE).unanswered_nodes == 0
    assert mark_answered(after_all, name_of(0)) is after_all
    assert mark_answered(known, "other") is known
    assert mark_answered(memory(past(answered=False)), name_of(0)).places == {}


def test_gone_ends_the_run_and_books_what_nobody_asked_for() -> None:
    known = vanished(replace(TRAINS, restart_asked=True), name_of(0))
    assert known.nodes == ()
    assert known.run is not None
    assert known.run.state is RunState.ENDED
    assert not known.restart_asked
    assert known.counter(FailureKind.PREEMPTION).total == 1
    ours = vanished(memory(launched(delete=going(NOW))), name_of(0))
    assert ours.counter(FailureKind.PREEMPTION).total == 0
    assert vanished(memory(), "other") == memory()


@pytest.mark.parametrize(
    ("number", "label", "asked"),
    [(3, "3", True), (5, "5", True), (2, "2", False), (6, "6", False), (3, "adopted", False), (3, "", False)],
    ids=["its first", "its last", "of a store before it", "never used", "adopted", "without a number"],
)
def test_the_late_fruit_of_a_closed_create_is_told_from_what_was_given(number: int, label: str, asked: bool) -> None:
    late = node(number=number)
    late = replace(late, labels={**late.labels, LABEL_SLOT: "pod-0", LABEL_NUMBER: label})
    told = apply_node(memory(asked_from=3, next_number=6), late).node(late.name)
    assert told is not None
    assert (told.requested, told.is_adopted) == (asked, not asked)
    assert told.launched, "it may have been, whoever made it"


def test_the_queued_resource_of_a_node_that_is_gone_is_remembered() -> None:
    request = "projects/p/locations/us-central1-a/queuedResources/my-request"
    known = apply_node(memory(), replace(node(), queued_resource=request))
    assert known.shell == ""
    assert vanished(known, name_of(0)).shell == request


@pytest.mark.parametrize(
    ("changes", "is_leaving", "serves"),
    [
        ({}, False, True),
        ({"status": NodeStatus.DEAD}, True, False),
        ({"status": NodeStatus.REVIVED}, True, False),
        ({"delete": going()}, True, False),
        ({"status": NodeStatus.TAKEN}, False, False),
        ({"status": NodeStatus.TAKEN, "delete": going()}, True, False),
        ({"status": NodeStatus.OUT_OF_SIGHT}, False, False),
    ],
)
def test_which_node_is_on_its_way_out_and_which_may_be_the_slots(
    changes: dict[str, Any], is_leaving: bool, serves: bool
) -> None:
    met = replace(NodeMemory("pod-0-a0", "z", 1, NOW), **changes)
    known = memory(met)
    assert (met.is_leaving, met.serves) == (is_leaving, serves)
    assert (known.serves("pod-0-a0"), known.has_given_up("pod-0-a0")) == (serves, not serves)
    assert not known.serves("pod-0-a1"), "it was never met"
    assert not known.has_given_up("pod-0-a1"), "it was never met, so it may be the slot's next"
