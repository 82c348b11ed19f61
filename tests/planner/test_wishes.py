"""Decisions: what a person wants, and several nodes of one slot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kits.decisions import (
    NEXT,
    STOPPED,
    case,
    silent,
    table,
)
from tests.kits.evidence import (
    FRESH,
    QUIET,
    REFUSED,
    TRAINS,
    US,
    act,
    after,
    ago,
    before,
    ended,
    evidence,
    going,
    intent,
    launched,
    memory,
    name_of,
    node,
    past,
    run,
    running,
    seen,
    slot,
    token,
)
from tpucare.model.actions import Delete, EffectKind, Stop
from tpucare.model.causes import Reason
from tpucare.model.lifecycles import CreateState, NodeStatus, RunState
from tpucare.model.memory import DesiredState, End, RunMemory
from tpucare.model.resources import Job, OnSuccess, Provisioning
from tpucare.planner.predicates import job_mark
from tpucare.planner.remember import apply_node

ASKED = replace(TRAINS, wish=DesiredState.DOWN)
PAUSED = replace(TRAINS, wish=DesiredState.PAUSED)
PAUSED_DEAD = replace(PAUSED, nodes=(launched(status=NodeStatus.DEAD),))
DONE = replace(TRAINS, end=End.DONE, end_why="exit 0", ended_at=before(60))
MARK = job_mark(slot().job or Job(run=""))
HAD_TRAINED = memory(
    run=run(job=MARK, state=RunState.ENDED),
    end=End.FAILED,
    end_why="it crashed",
    ended_at=before(hours=1),
    failed_since=before(hours=1),
    served_job=MARK,
)
GOING = memory(
    launched(delete=going(before(60), next_at=after(60), accepted=True, quiet=True)),
    run=run(state=RunState.STOPPED),
    awake=True,
)
FAILED = replace(
    TRAINS, end=End.FAILED, end_why="crashes", ended_at=before(60), run=run(state=RunState.STOPPED, stop_why="crashes")
)
WISHES = [
    case("paused", evidence(seen(node(), running())), replace(TRAINS, wish=DesiredState.PAUSED), "Wait"),
    case("paused: stopped by somebody", evidence(seen(node("STOPPED"))), PAUSED, "Wait"),
    case("paused: what is proven dead holds quota", evidence(seen(node("PREEMPTED"))), PAUSED_DEAD, "Delete dead"),
    case(
        "paused: in an unreachable zone", evidence(seen(node("PREEMPTED"), zone_unreachable=True)), PAUSED_DEAD, "Wait"
    ),
    case(
        "paused: a delete that was lost is repeated",
        evidence(seen(node("PREEMPTED"))),
        replace(PAUSED, nodes=(launched(status=NodeStatus.DEAD, delete=going(before(60), reason=Reason.DEAD)),)),
        "Delete dead",
    ),
    case(
        "paused: a delete is not repeated for a node that is not proven dead",
        evidence(seen(node())),
        replace(PAUSED, nodes=(launched(delete=going(before(60), next_at=before(1))),)),
        "Wait",
    ),
    case(
        "paused: shown dead, and alive again",
        evidence(seen(node())),
        replace(PAUSED, nodes=(launched(status=NodeStatus.REVIVED),)),
        "Wait",
    ),
    case("down: stop first", evidence(seen(node(), running())), ASKED, "Stop then asked"),
    case("down: then delete", evidence(seen(node(), ended(143)), ended_effects=STOPPED), ASKED, "Delete asked"),
    case(
        "down while a launch is under way",
        evidence(seen(node(), QUIET), in_flight=frozenset({EffectKind.LAUNCH.of(name_of(0))})),
        ASKED,
        "Wait",
    ),
    case("down before its workers were asked: stop first", evidence(seen(node())), ASKED, "Stop then asked"),
    case(
        "down before anything was launched",
        evidence(seen(node())),
        replace(FRESH, wish=DesiredState.DOWN),
        "Delete asked",
    ),
    case(
        "down while its workers are not listed",
        evidence(seen(node(endpoints=1), running())),
        ASKED,
        "Delete asked",
    ),
    case(
        "down while a create is under way",
        evidence(ended_effects={EffectKind.GET_OPERATION.of(name_of(3)): ago(1)}),
        memory(creates=(intent(3, state=CreateState.RUNNING, operation="op"),), wish=DesiredState.DOWN),
        "Record create superseded",
    ),
    case(
        "down, its zone is unreachable",
        evidence(seen(node(), running(), zone_unreachable=True), unreachable_since={US: ago(60)}),
        ASKED,
        "Wait",
    ),
    case("down, nothing is left", evidence(), memory(wish=DesiredState.DOWN), "Wait"),
    case("done: delete", evidence(seen(node(), ended(0))), DONE, "Delete finished"),
    case("done: siblings are stopped first", evidence(seen(node(), (ended(0), running()))), DONE, "Stop then finished"),
    case("done: keep", evidence(seen(node(), ended(0))), DONE, "Wait", slot(on_success=OnSuccess.KEEP)),
    case(
        "done: keep, siblings are stopped, and nothing is to be deleted",
        evidence(seen(node(), (ended(0), running()))),
        DONE,
        "Stop",
        slot(on_success=OnSuccess.KEEP),
    ),
    case(
        "done: keep, siblings were told to stop",
        evidence(seen(node(), (ended(0), running())), ended_effects=STOPPED),
        DONE,
        "Wait",
        slot(on_success=OnSuccess.KEEP),
    ),
    case("failed: what still runs is stopped", evidence(seen(node(), running())), FAILED, "Stop"),
    case("done: not asked since a restart", evidence(seen(node())), DONE, "Wait", slot(on_success=OnSuccess.KEEP)),
    case(
        "done: under way",
        evidence(seen(node(), ended(0)), in_flight=frozenset({EffectKind.STOP.of(name_of(0))})),
        DONE,
        "Wait",
    ),
    case("done: no new node", evidence(), memory(end=End.DONE), "Wait"),
    case("done: its zone is unreachable", evidence(seen(node(), ended(0), zone_unreachable=True)), DONE, "Wait"),
    case("failed: kept for a look", evidence(seen(node(), ended(143))), FAILED, "Wait person"),
    case(
        "failed: looked at",
        evidence(seen(node(), ended(143))),
        replace(FAILED, ended_at=before(hours=1)),
        "Delete finished",
    ),
    # The on-demand node of a failed slot was deleted after `keep_failed`. A node that is not preemptible is kept until
    # a person looked.
    case(
        "failed: an on-demand node is kept until somebody looked",
        evidence(seen(node(tier=Provisioning.ON_DEMAND), ended(143))),
        replace(FAILED, ended_at=before(hours=99)),
        "Wait person",
    ),
    case("failed though it had trained: tried an hour later", evidence(), HAD_TRAINED, "Record tried again"),
    case(
        "failed though it had trained: on the node that was kept",
        evidence(seen(node(), ended(143))),
        replace(HAD_TRAINED, nodes=(launched(),)),
        "Record tried again",
    ),
    case(
        "failed though it had trained: its node bears another owner since",
        evidence(),
        replace(HAD_TRAINED, run=None),
        "Record tried again",
    ),
    case(
        "failed though it had trained: less than an hour ago",
        evidence(),
        replace(HAD_TRAINED, ended_at=before(minutes=59)),
        "Wait person",
    ),
    case(
        "failed though it had trained: a clock that leapt, or a daemon that was off, has tried nothing",
        evidence(),
        replace(HAD_TRAINED, failed_since=before(hours=25)),
        "Record tried again",
    ),
    case(
        "failed though it had trained: tried 24 times",
        evidence(),
        replace(HAD_TRAINED, tries=24),
        "Wait person",
    ),
    case(
        "failed, and it was another job that had trained",
        evidence(),
        replace(HAD_TRAINED, served_job="another"),
        "Wait person",
    ),
    case("failed, and it never trained", evidence(), replace(HAD_TRAINED, served_job=None), "Wait person"),
    case(
        "failed though it had trained: the job was edited since",
        evidence(),
        HAD_TRAINED,
        "Wait person",
        replace(slot(), job=Job(run="python3 other.py")),
    ),
    case(
        "done while a create is open",
        evidence(ended_effects={EffectKind.GET_OPERATION.of(name_of(3)): ago(1)}),
        memory(creates=(intent(3, state=CreateState.RUNNING, operation="op"),), end=End.DONE),
        "Record create superseded",
    ),
]

ELASTIC = replace(slot(), elastic=True)
AWAKE = replace(TRAINS, awake=True)
RESTING = [
    case("awake: as any other slot", evidence(seen(node(), running())), AWAKE, "Wait", ELASTIC),
    case("awake, no node", evidence(), memory(awake=True), "Create", ELASTIC),
    case("at rest: no node is made", evidence(), memory(), "Wait", ELASTIC),
    case("a slot that is not elastic never rests", evidence(), memory(), "Create"),
    case("going to rest: stop first", evidence(seen(node(), running())), TRAINS, "Stop then asked", ELASTIC),
    case(
        "going to rest: then delete",
        evidence(seen(node(), ended(143)), ended_effects=STOPPED),
        TRAINS,
        "Delete asked",
        ELASTIC,
    ),
    case("going to rest before anything was launched", evidence(seen(node())), FRESH, "Delete asked", ELASTIC),
    case(
        "going to rest while a create is under way",
        evidence(ended_effects={EffectKind.GET_OPERATION.of(name_of(3)): ago(1)}),
        memory(creates=(intent(3, state=CreateState.RUNNING, operation="op"),)),
        "Record create superseded",
        ELASTIC,
    ),
    case(
        "at rest, the node of a create that was given up came",
        evidence(seen(node(number=3))),
        memory(creates=(intent(3, state=CreateState.RUNNING, operation="op", abandoned=True),)),
        "Delete surplus",
        ELASTIC,
    ),
    case(
        "woken, the node of a create that was given up came",
        evidence(seen(node(number=3))),
        memory(creates=(intent(3, state=CreateState.RUNNING, operation="op", abandoned=True),), awake=True),
        "Record create kept",
        ELASTIC,
    ),
    case("woken while its last node goes", evidence(seen(node("DELETING"), QUIET)), GOING, "Create", ELASTIC),
    case(
        "a node that a lost store forgot is not at rest",
        evidence(seen(node(), running())),
        apply_node(memory(), node()),
        "Record run adopted",
        ELASTIC,
    ),
    case("paused at rest", evidence(), memory(wish=DesiredState.PAUSED), "Wait", ELASTIC),
    case("down at rest", evidence(), memory(wish=DesiredState.DOWN), "Wait", ELASTIC),
    case("failed, and nothing asks for it", evidence(seen(node(), ended(143))), FAILED, "Wait person", ELASTIC),
]

BOTH = memory(launched(0), launched(1), run=run(1))
SEVERAL = [
    case(
        "both train: the older launch stays",
        evidence(seen(node(), running()), seen(node(number=1), running(token(1)))),
        replace(BOTH, run=None),
        "Stop then surplus",
    ),
    case(
        "one trains: it stays",
        evidence(seen(node(), running()), seen(node(number=1), QUIET)),
        BOTH,
        "Delete surplus",
    ),
    case(
        "none trains: the newest stays",
        evidence(seen(node(), QUIET), seen(node(number=1), QUIET)),
        BOTH,
        "Delete surplus",
    ),
    case(
        "both train, and the stop of the younger was not heard by all: the older still stays",
        evidence(
            seen(node(), running()),
            seen(node(number=1), running(token(1))),
            ended_effects={EffectKind.STOP.of(name_of(1)): ago(9)},
        ),
        replace(
            BOTH, run=run(1, state=RunState.STOPPING, stop_why="pod-0-a0 holds this slot", then_delete=Reason.SURPLUS)
        ),
        "Delete surplus",
    ),
    case(
        "one never answers, others do",
        evidence(seen(node(number=1), running(token(1))), silent(7), elsewhere_answers=True),
        memory(launched(0, answered=False), launched(1), run=run(1)),
        "Delete judged",
    ),
    case(
        "one is silent for a moment",
        evidence(seen(node(number=1), running(token(1))), silent(1), elsewhere_answers=True),
        BOTH,
        "Wait",
    ),
    case("one refuses our key", evidence(seen(node(), REFUSED, refused_since=ago(99)), NEXT), BOTH, "AddSshKey"),
    case(
        "one half of which refuses our key, and a person asks for another: it is stopped, not waited for",
        evidence(seen(node(), (running(), REFUSED), refused_since=ago(99)), NEXT),
        replace(BOTH, replace_asked=True),
        "Stop then asked",
    ),
    case(
        "one refuses our key and was never launched on, and our run lives on the other",
        evidence(seen(node(), REFUSED, refused_since=ago(99)), seen(node(number=1), running(token(1)))),
        memory(past(0), launched(1), run=run(1)),
        "Delete surplus",
    ),
    case(
        "one refuses our key, and was launched on: its run may live",
        evidence(seen(node(), REFUSED, refused_since=ago(99)), seen(node(number=1), running(token(1)))),
        memory(launched(0), launched(1), run=run(1)),
        "AddSshKey",
    ),
    case(
        "one is in an unreachable zone",
        evidence(seen(node(), running(), zone_unreachable=True), seen(node(number=1), QUIET)),
        BOTH,
        "Wait",
    ),
    case("one was not asked yet", evidence(seen(node(), running()), seen(node(number=1))), BOTH, "Wait"),
    case(
        "after a lost store a person confirms",
        evidence(seen(node(), QUIET), seen(node(number=1), QUIET), store_lost=True),
        BOTH,
        "Wait person",
    ),
    case(
        "something is under way on one",
        evidence(
            seen(node(), QUIET), seen(node(number=1), QUIET), in_flight=frozenset({EffectKind.LAUNCH.of(name_of(0))})
        ),
        BOTH,
        "Wait",
    ),
]


def test_of_two_runs_the_one_whose_stop_failed_is_deleted() -> None:
    younger = replace(BOTH, run=run(1, state=RunState.STOPPING, stop_why="surplus", then_delete=Reason.SURPLUS))
    both = evidence(
        seen(node(), running()),
        seen(node(number=1), running(token(1))),
        ended_effects={EffectKind.STOP.of(name_of(1)): ago(9)},
    )
    action = act(both, younger)
    assert isinstance(action, Delete)
    assert action.key.name == name_of(1)


test_what_comes_of_wishes = table(WISHES)


test_an_elastic_slot_has_a_node_while_demand_wants_one = table(RESTING)


test_one_of_several_stays = table(SEVERAL)


@pytest.mark.parametrize(
    ("known", "goes"),
    [
        (run(1), 0),
        (run(0), 1),
        (None, 1),
        (run(1, state=RunState.ENDED), 1),
        (run(1, state=RunState.STOPPING, stop_why="stall"), 1),
    ],
    ids=["the younger is known", "the older is known", "neither", "the younger was stopped", "it is being stopped"],
)
def test_of_two_live_runs_the_one_that_memory_knows_stays_else_the_older_launch(
    known: RunMemory | None, goes: int
) -> None:
    both = evidence(seen(node(), running()), seen(node(number=1), running(token(1))))
    action = act(both, replace(BOTH, run=known))
    assert isinstance(action, Stop)
    assert (action.key.name, action.then) == (name_of(goes), Reason.SURPLUS)
