"""Decisions: every state number, and one unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.kits.decisions import NEXT, told
from tests.kits.evidence import (
    FRESH,
    NO_PROGRESS,
    QUIET,
    SILENT,
    TRAINS,
    act,
    after,
    ago,
    before,
    evidence,
    going,
    launched,
    memory,
    name_of,
    node,
    past,
    run,
    running,
    seen,
)
from tpucare.model.actions import Create, EffectKind
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import DesiredState, Memory
from tpucare.model.resources import NodeState

ALIVE_AND_TRAINING = {
    NodeState.CREATING: "Wait",
    NodeState.READY: "Wait",
    NodeState.RESTARTING: "Wait",
    NodeState.REPAIRING: "Wait",
    NodeState.STARTING: "Wait",
    NodeState.STOPPED: "Wait person",
    NodeState.STOPPING: "Wait person",
    NodeState.PREEMPTED: "Delete dead",
    NodeState.TERMINATED: "Delete dead",
    NodeState.DELETING: "Create",
}
ANSWERING_AND_FRESH = {
    **ALIVE_AND_TRAINING,
    NodeState.CREATING: "Launch",
    NodeState.READY: "Launch",
    NodeState.RESTARTING: "Launch",
    NodeState.REPAIRING: "Launch",
    NodeState.STARTING: "Launch",
}
STATES = [*NodeState, NodeState(99)]


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{state.value}-{state.name}")
@pytest.mark.parametrize(
    ("known", "workers", "want"),
    [
        (TRAINS, running(), ALIVE_AND_TRAINING),
        (FRESH, QUIET, ANSWERING_AND_FRESH),
        (FRESH, None, {**ALIVE_AND_TRAINING, NodeState.UNKNOWN: "Delete judged"}),
    ],
    ids=["training", "answering", "not asked yet"],
)
def test_every_state_has_its_action(state: NodeState, known: Memory, workers: Any, want: dict[NodeState, str]) -> None:
    action = act(evidence(seen(node(state), workers, state_since=ago(minutes=5))), known)
    assert told(action) == want.get(state, "Wait")


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{state.value}-{state.name}")
def test_what_is_not_seen_now_is_not_judged(state: NodeState) -> None:
    what = seen(node(state), SILENT, silent_since=ago(hours=5), silent_probes=99, unhealthy_since=ago(hours=5))
    assert told(act(evidence(what, fresh=False, blind_why="HTTP 500"), TRAINS)) == "Wait"
    assert told(act(evidence(replace(what, zone_unreachable=True), elsewhere_answers=True), TRAINS)) in (
        "Wait",
        "Create",
    )
    assert told(act(evidence(what, elsewhere_answers=True), replace(TRAINS, wish=DesiredState.PAUSED))) == "Wait"


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{state.value}-{state.name}")
def test_a_node_that_was_shown_dead_is_deleted_whatever_it_is_listed_as(state: NodeState) -> None:
    want = "Create" if state is NodeState.DELETING else "Delete dead"
    for known in (launched(status=NodeStatus.DEAD), launched(status=NodeStatus.REVIVED)):
        what = evidence(seen(node(state), running(), state_since=ago(minutes=5)))
        assert told(act(what, memory(known, run=run()))) == want


def test_a_delete_that_hangs_is_repeated_whoever_asked_for_it() -> None:
    """
    The delete on a verdict was accepted and hung, but the daemon was killed before it knew, and the verdict was void
    after the restart: the delete was not repeated, and the node held the fence until a person came (long storm at high,
    seed 9005). Our node that shows DELETING for 10 minutes is deleted again, also where no delete is remembered.
    """
    for minutes, want in ((9, "Create"), (10, "Delete surplus")):
        assert told(act(evidence(seen(node("DELETING"), state_since=ago(minutes=minutes))), TRAINS)) == want


def test_beside_a_node_that_was_shown_dead_and_lives_nothing_is_launched() -> None:
    old = launched(status=NodeStatus.REVIVED, delete=going(before(10), next_at=after(50)))
    both = evidence(seen(node(), running()), NEXT, ended_effects={EffectKind.GET_NODE.of(name_of(0)): ago(1)})
    assert told(act(both, memory(old, past(1), run=run()))) == "Wait"
    assert told(act(both, memory(replace(old, status=NodeStatus.DEAD), past(1), run=run()))) == "Launch"


@pytest.mark.parametrize("state", [NodeState.DELETING, NodeState.PREEMPTED, NodeState.TERMINATED])
def test_the_next_create_does_not_wait_for_a_dead_node(state: NodeState) -> None:
    dead = launched(
        status=NodeStatus.LIVE if state is NodeState.DELETING else NodeStatus.DEAD,
        delete=going(before(10), next_at=after(50)),
    )
    action = act(evidence(seen(node(state))), memory(dead, run=run()))
    assert told(action) == "Create"
    assert isinstance(action, Create)
    assert (action.name, action.number) == (name_of(10), 10)


@pytest.mark.parametrize(
    ("still", "expected"), [(2, "Wait"), (3, "Stop then judged")], ids=["asked seldom", "seen to stand still"]
)
def test_minutes_between_two_questions_are_no_standstill(still: int, expected: str) -> None:
    """
    A training node that showed UNKNOWN was deleted after three minutes in which its workers had not been asked. A
    verdict needs three reports in which nothing moved; time alone is no observation.
    """
    progress = replace(
        NO_PROGRESS, signals=9, last=ago(minutes=4), life=ago(minutes=4), begun=ago(hours=1), still=still
    )
    shown = evidence(seen(node("UNKNOWN"), running(), state_since=ago(hours=1), progress=progress))
    assert told(act(shown, TRAINS)) == expected
