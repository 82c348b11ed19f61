"""Decisions: how runs end, and the end of the 24 hours."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.kits.decisions import (
    ON_DEMAND,
    STALE,
    STOPPED,
    case,
    over,
    table,
)
from tests.kits.evidence import (
    HERE,
    NO_PROGRESS,
    QUIET,
    SILENT,
    TRAINS,
    act,
    after,
    ago,
    before,
    ended,
    evidence,
    launched,
    memory,
    name_of,
    node,
    run,
    running,
    seen,
    slot,
    token,
)
from tpucare.model.actions import EffectKind, Stop, Wait
from tpucare.model.causes import Reason
from tpucare.model.evidence import Progress
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import FailureCounter
from tpucare.model.resources import OnSuccess, Provisioning
from tpucare.model.runs import Failure, Phase
from tpucare.planner.remember import mark_taken

FINISHED = memory(launched(), run=run(state=RunState.FINISHED))
EXITS = [
    case("setup failed, within 30 s", evidence(over(1, 20, failure=Failure.SETUP)), TRAINS, "Wait"),
    case("setup failed", evidence(over(1, failure=Failure.SETUP)), TRAINS, "Stop setup"),
    case("the clone failed", evidence(over(1, failure=Failure.FETCH)), TRAINS, "Stop setup"),
    case("a secret is missing", evidence(over(1, failure=Failure.SECRET_MISSING)), TRAINS, "Stop setup"),
    case("setup failed, said by the phase", evidence(over(1, phase=Phase.SETUP)), TRAINS, "Stop setup"),
    case(
        "setup budget spent",
        evidence(over(1, failure=Failure.SETUP)),
        replace(TRAINS, books={"setup": FailureCounter(5, 5)}),
        "Stop setup gives up",
    ),
    case("crashed", evidence(over(1, failure=Failure.CRASH)), TRAINS, "Stop crash"),
    case(
        "crash budget spent",
        evidence(over(1, failure=Failure.CRASH, progress=NO_PROGRESS)),
        replace(TRAINS, books={"crash": FailureCounter(10, 10)}, step=9),
        "Stop crash gives up",
    ),
    case(
        "crash budget spent, but it got further",
        evidence(over(1, failure=Failure.CRASH, step=20)),
        replace(TRAINS, books={"crash": FailureCounter(10, 10)}, step=9),
        "Stop crash",
    ),
    case("crashed, one worker silent a moment ago", evidence(over(1, answering_since=ago(9))), TRAINS, "Wait"),
    case("a dirty host", evidence(over(1, failure=Failure.DIRTY_HOST)), TRAINS, "Stop infrastructure then dead"),
    case(
        "a dirty host, node after node",
        evidence(over(1, failure=Failure.DIRTY_HOST)),
        replace(TRAINS, books={"infrastructure": FailureCounter(3, 3)}),
        "Stop crash then dead",
    ),
    case(
        "a dirty host, node after node, crash budget spent",
        evidence(over(1, failure=Failure.DIRTY_HOST)),
        replace(TRAINS, books={"infrastructure": FailureCounter(3, 3), "crash": FailureCounter(10, 10)}),
        "Stop crash gives up",
    ),
    case(
        "a dirty host that is on-demand",
        evidence(over(1, failure=Failure.DIRTY_HOST, what=node(tier=ON_DEMAND))),
        TRAINS,
        "Stop crash",
    ),
    case("gone without a status", evidence(over(None)), TRAINS, "Stop infrastructure"),
    case(
        "gone without a status twelve times in a row",
        evidence(over(None)),
        replace(TRAINS, books={"infrastructure": FailureCounter(11, 11)}),
        "Stop infrastructure",
    ),
    case(
        "gone without a status once more",
        evidence(over(None)),
        replace(TRAINS, books={"infrastructure": FailureCounter(12, 12)}),
        "Stop infrastructure gives up",
    ),
    case("gone without a status, seen once", evidence(over(None, 0)), TRAINS, "Wait"),
    case(
        "gone without a status again and again",
        evidence(over(None)),
        memory(launched(infrastructure=3), run=run()),
        "Stop infrastructure then judged",
    ),
    case(
        "one worker knows nothing of the run",
        evidence(seen(node(), (running(), QUIET), ended_since=ago(60))),
        TRAINS,
        "Stop infrastructure",
    ),
    case("signalled: the cloud's word", evidence(over(0, 20, signalled=True)), TRAINS, "Wait"),
    case("signalled, and no word: not done", evidence(over(0, 60, signalled=True)), TRAINS, "Stop infrastructure"),
    case("preempted is TRUE: 5 min for the cloud's word", evidence(over(1, 200, preempted=True)), TRAINS, "Wait"),
    case("preempted is TRUE, and no word", evidence(over(1, 301, preempted=True)), TRAINS, "Stop infrastructure"),
    case(
        "exit 0 beside a worker under maintenance",
        evidence(seen(node(), (ended(0), running(maintenance="MIGRATE")), ended_since=ago(60))),
        TRAINS,
        "Stop infrastructure",
    ),
    case("exit 0 after a maintenance that is over", evidence(over(0, 61, maintenance="")), TRAINS, "Record ended"),
    case("exit 0: sure in a minute", evidence(over(0, 59)), TRAINS, "Wait"),
    case(
        "exit 0 is seen twice: it is noted",
        evidence(seen(node(), ended(0), ended_since=ago(10), phase_since=ago(10), ended_reports=2)),
        TRAINS,
        "Record run finished",
    ),
    case(
        "exit 0 is seen once",
        evidence(seen(node(), ended(0), ended_since=ago(10), phase_since=ago(10), ended_reports=1)),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0, and another worker still runs",
        evidence(seen(node(), (ended(0), running()), ended_since=ago(10), phase_since=ago(10), ended_reports=9)),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0 is seen twice, and another run comes after it",
        evidence(seen(node(), ended(0), ended_since=ago(10), phase_since=ago(10), ended_reports=2)),
        TRAINS,
        "Wait",
        slot(on_success=OnSuccess.RESTART),
    ),
    case("noted, and preempted is TRUE since", evidence(over(0, 61, preempted=True)), FINISHED, "Record ended"),
    case("noted, and its workers were started anew", evidence(over(None, 61)), FINISHED, "Record ended"),
    case("noted, and its node is dead", evidence(seen(node("PREEMPTED"), SILENT)), FINISHED, "Delete dead"),
    case("noted, and its node is gone", evidence(), replace(FINISHED, nodes=()), "Record ended"),
    # A finished run was forgotten with a node that another owner took, and trained once more. A run that is noted as
    # finished stays so, whatever becomes of its node.
    case(
        "noted, and somebody took its node",
        evidence(foreign=(node(),)),
        mark_taken(FINISHED, name_of(0)),
        "Record ended",
    ),
    case(
        "noted, and a worker is silent for a minute",
        evidence(seen(node(), (ended(0), SILENT), silent_since=ago(61), silent_probes=9)),
        FINISHED,
        "Record ended",
    ),
    case(
        "noted, and a worker is silent for less",
        evidence(seen(node(), (ended(0), SILENT), silent_since=ago(50), silent_probes=9)),
        FINISHED,
        "Wait",
    ),
    case("exit 0: done", evidence(over(0, 61)), TRAINS, "Record ended"),
    case(
        "exit 0 just now, a sibling's long ago: sure in a minute",
        evidence(seen(node(), ended(0), ended_since=ago(hours=1), phase_since=ago(10))),
        TRAINS,
        "Wait",
    ),
    case("exit 0: restart", evidence(over(0, 61)), TRAINS, "Stop", slot(on_success=OnSuccess.RESTART)),
    case(
        "exit 0 on worker 0, non-zero elsewhere",
        evidence(seen(node(), (ended(0), ended(1)), ended_since=ago(61))),
        TRAINS,
        "Stop crash",
    ),
    case(
        "exit 0 on worker 0, a sibling is silent at 60 s",
        evidence(
            seen(
                node(), (ended(0), SILENT), ended_since=ago(61), silent_since=ago(50), silent_probes=9, progress=STALE
            ),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0 elsewhere, worker 0 goes on",
        evidence(seen(node(), (running(), ended(0)), ended_since=ago(hours=1))),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0 elsewhere, worker 0 stands still after one last step",
        evidence(
            seen(
                node(),
                (running(), ended(0)),
                ended_since=ago(hours=1),
                progress=Progress(token(), 9, ago(minutes=31), timedelta(seconds=15), ago(minutes=31)),
            )
        ),
        TRAINS,
        "Stop infrastructure",
    ),
    case(
        "exit 0 elsewhere, worker 0 tells of nothing but its log grows",
        evidence(
            seen(node(), (running(), ended(0)), ended_since=ago(hours=1), progress=Progress(token(), 0, life=ago(60)))
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0 elsewhere, worker 0 stands still",
        evidence(seen(node(), (running(), ended(0)), ended_since=ago(hours=1), progress=STALE)),
        TRAINS,
        "Stop infrastructure",
    ),
]

STOPPING = memory(launched(), run=run(state=RunState.STOPPING, stop_why="it crashed"))
LONG_STOPPED = {EffectKind.STOP.of(name_of(0)): ago(11)}
STOPS = [
    case("a stop was intended before a restart", evidence(seen(node(), running())), STOPPING, "Stop"),
    case(
        "a stop is under way",
        evidence(seen(node(), running()), in_flight=frozenset({EffectKind.STOP.of(name_of(0))})),
        STOPPING,
        "Wait",
    ),
    case(
        "stopped and quiet", evidence(seen(node(), ended(143)), ended_effects=STOPPED), STOPPING, "Record run stopped"
    ),
    case("stopped and not quiet yet", evidence(seen(node(), running()), ended_effects=STOPPED), STOPPING, "Wait"),
    case(
        "chips not free after SIGKILL",
        evidence(seen(node(), running()), ended_effects=LONG_STOPPED),
        memory(launched(), run=run(state=RunState.STUCK, stop_why="it crashed", stops=1)),
        "Delete dead",
    ),
    case(
        "a worker did not hear the stop",
        evidence(seen(node(), running()), ended_effects=LONG_STOPPED),
        memory(launched(), run=run(state=RunState.STOPPING, stop_why="it crashed", stops=1)),
        "Stop",
    ),
    case(
        "a worker did not hear the stop, five times",
        evidence(seen(node(), running()), ended_effects=LONG_STOPPED),
        memory(launched(), run=run(state=RunState.STOPPING, stop_why="it crashed", stops=5)),
        "Delete dead",
    ),
    case(
        "chips not free after SIGKILL, on-demand",
        evidence(seen(node(tier=ON_DEMAND), running()), ended_effects=LONG_STOPPED),
        STOPPING,
        "Stop",
    ),
    case(
        "chips not free after five stops, on-demand",
        evidence(seen(node(tier=ON_DEMAND), running()), ended_effects=LONG_STOPPED),
        memory(launched(), run=run(state=RunState.STUCK, stop_why="it crashed", stops=5)),
        "Wait person",
    ),
    case(
        "chips not free for a quarter of an hour more, on-demand",
        evidence(
            seen(node(tier=ON_DEMAND), running()), ended_effects={EffectKind.STOP.of(name_of(0)): ago(minutes=15)}
        ),
        memory(launched(), run=run(state=RunState.STUCK, stop_why="it crashed", stops=5)),
        "Stop",
    ),
    case(
        "stopped to be deleted",
        evidence(seen(node(), running()), ended_effects=STOPPED),
        memory(launched(), run=run(state=RunState.STOPPING, stop_why="sick", then_delete=Reason.JUDGED)),
        "Delete judged",
    ),
    case(
        "stopped, quiet, to be deleted",
        evidence(seen(node(), ended(143))),
        memory(launched(), run=run(state=RunState.STOPPED, stop_why="sick", then_delete=Reason.JUDGED)),
        "Delete judged",
    ),
    case(
        "stopped: launched again",
        evidence(seen(node(), ended(143))),
        memory(launched(), run=run(state=RunState.ENDED)),
        "Launch",
    ),
]

OLD = node(tier=Provisioning.PREEMPTIBLE, born=before(hours=23, minutes=46))
DAY = [
    case(
        "preemptible before 23 h 45",
        evidence(seen(node(tier=Provisioning.PREEMPTIBLE, born=before(hours=23)), running())),
        memory(launched(), run=run()),
        "Wait",
    ),
    # A node without a create time is of 1970, and each preemptible one was stopped at its first checkpoint because "its
    # 24 hours end". An age of more than two days is unknown, and only the cloud ends such a node.
    case(
        "preemptible, and born when nothing was: nobody knows its age",
        evidence(seen(node(tier=Provisioning.PREEMPTIBLE, born=datetime(1970, 1, 1, tzinfo=UTC)), running())),
        TRAINS,
        "Wait",
    ),
    case(
        "preemptible at 23 h 45: a notice",
        evidence(seen(OLD, running(checkpoint=5))),
        memory(launched(), run=run()),
        "SendNotice",
    ),
    case(
        "preemptible, no newer checkpoint",
        evidence(seen(OLD, running(checkpoint=5))),
        memory(launched(noticed_at=before(60), noticed_checkpoint=5), run=run()),
        "Wait",
    ),
    case(
        "preemptible, a newer checkpoint",
        evidence(seen(OLD, running(checkpoint=6))),
        memory(launched(noticed_at=before(60), noticed_checkpoint=5), run=run()),
        "Stop then finished",
    ),
    case(
        "spot lives on",
        evidence(seen(node(born=before(hours=30)), running())),
        memory(launched(), run=run()),
        "Wait",
    ),
]


def test_the_last_quarter_of_a_preemptible_day_is_waited_for() -> None:
    """
    No wake-up was set for 23 h 45, nor for the report of a newer checkpoint. The decision to wait names both instants.
    """
    known = memory(launched(), run=run())
    today = seen(node(tier=Provisioning.PREEMPTIBLE, born=before(hours=23, minutes=40)), running(checkpoint=5))
    waits = act(evidence(today), known)
    assert isinstance(waits, Wait)
    assert waits.wall == after(minutes=5)
    noticed = memory(launched(noticed_at=before(60), noticed_checkpoint=5), run=run())
    waits = act(evidence(seen(OLD, running(checkpoint=5))), noticed)
    assert isinstance(waits, Wait)
    assert waits.observed is not None, "no report says that a newer checkpoint makes a difference"
    assert waits.observed - HERE.observed <= timedelta(seconds=15)


test_what_comes_of_exits = table(EXITS)


test_what_comes_of_stops = table(STOPS)


test_what_comes_of_the_day = table(DAY)


@pytest.mark.parametrize(("status", "hinted"), [(127, True), (1, False)])
def test_a_command_that_was_not_found_is_told(status: int, hinted: bool) -> None:
    stop = act(evidence(over(status, failure=Failure.CRASH)), TRAINS)
    assert isinstance(stop, Stop)
    assert f"exited with {status}" in stop.why
    assert ("python3, not python" in stop.why) is hinted
