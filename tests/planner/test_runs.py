"""Decisions: launches, and runs that live."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tests.kits.decisions import ON_DEMAND, STALE, case, table
from tests.kits.evidence import (
    FRESH,
    NO_PROGRESS,
    QUIET,
    TRAINS,
    after,
    ago,
    before,
    ended,
    evidence,
    intent,
    launched,
    memory,
    name_of,
    node,
    run,
    running,
    seen,
    token,
)
from tpucare.model.actions import EffectKind
from tpucare.model.evidence import Progress
from tpucare.model.lifecycles import CreateState, NodeStatus, RunState
from tpucare.model.memory import DesiredState, FailureCounter
from tpucare.model.runs import Phase

# It told its step once, an hour ago: "restored at step 100".
TOLD = Progress(token(), 0, begun=ago(minutes=65), first_step=ago(hours=1))
MOVES = Progress(token(), 9, ago(9), timedelta(seconds=15), ago(9), begun=ago(hours=1), first_step=ago(minutes=59))
LAUNCHING = frozenset({EffectKind.LAUNCH.of(name_of(0))})
IN_FLIGHT = [
    # `replace`, UNKNOWN or a superseded create asked for the delete during a launch: the last probe still said "no
    # run", so the delete passed for a proof of quiet. No decision is taken about a node while a launch or stop is under
    # way on it.
    case(
        "replace is asked for while a launch is under way: its workers are not known to be quiet",
        evidence(seen(node(), QUIET), in_flight=LAUNCHING),
        memory(launched(), run=run(state=RunState.LAUNCHING), replace_asked=True),
        "Wait",
    ),
    case(
        "superseded while a launch is under way",
        evidence(seen(node("CREATING"), QUIET), in_flight=LAUNCHING),
        memory(
            launched(),
            run=run(state=RunState.LAUNCHING),
            wish=DesiredState.DOWN,
            creates=(intent(abandoned=True, state=CreateState.AWAITED),),
        ),
        "Wait",
    ),
    case(
        "PREEMPTED while a launch is under way: dead is dead",
        evidence(seen(node("PREEMPTED"), QUIET), in_flight=LAUNCHING),
        memory(launched(status=NodeStatus.DEAD), run=run(state=RunState.LAUNCHING)),
        "Delete dead",
    ),
    case(
        "UNKNOWN while a launch is under way",
        evidence(seen(node("UNKNOWN"), QUIET), in_flight=LAUNCHING),
        memory(launched(), run=run(state=RunState.LAUNCHING)),
        "Wait",
    ),
    case(
        "REPAIRING for long while a launch is under way",
        evidence(seen(node("REPAIRING"), QUIET, progress=NO_PROGRESS), in_flight=LAUNCHING),
        memory(launched(), run=run(state=RunState.LAUNCHING)),
        "Wait",
    ),
]

PARTIAL = memory(launched(), run=run(state=RunState.LAUNCHING))
RUNS = [
    case("trains", evidence(seen(node(), running())), TRAINS, "Wait"),
    case("trains, unknown to the store", evidence(seen(node(), running())), FRESH, "Record run adopted"),
    case(
        "a newer run than the store knows", evidence(seen(node(), running(token(0, 5)))), TRAINS, "Record run adopted"
    ),
    case("partial launch", evidence(seen(node(), (running(), QUIET))), PARTIAL, "Stop infrastructure"),
    case(
        "partial launch that is counted already",
        evidence(seen(node(), (running(), QUIET))),
        memory(launched(), run=run(state=RunState.LAUNCHING, launch_book="infrastructure")),
        "Stop",
    ),
    case("the whole launch arrived", evidence(seen(node(), running())), PARTIAL, "Record run complete"),
    case("nothing of the launch arrived", evidence(seen(node(), QUIET)), PARTIAL, "Launch"),
    case(
        "a launch that a person has to mend, within the setup budget",
        evidence(seen(node(), QUIET)),
        replace(PARTIAL, books={"setup": FailureCounter(5, 5)}),
        "Launch",
    ),
    case(
        "a launch that a person has to mend, setup budget spent",
        evidence(seen(node(), QUIET)),
        replace(PARTIAL, books={"setup": FailureCounter(6, 6, after(60), "WANDB_API_KEY is not set")}),
        "Stop gives up",
    ),
    case(
        "nothing of the launch arrived, patience",
        evidence(seen(node(), QUIET)),
        replace(PARTIAL, books={"infrastructure": FailureCounter(2, 2, after(9))}),
        "Wait",
    ),
    case("restart is asked for", evidence(seen(node(), running())), replace(TRAINS, restart_asked=True), "Stop"),
    case(
        "replace is asked for",
        evidence(seen(node(), running())),
        replace(TRAINS, replace_asked=True),
        "Stop then asked",
    ),
    case(
        "replace is asked for, and it is stopped",
        evidence(seen(node(), ended(143)), ended_effects={EffectKind.STOP.of(name_of(0)): ago(5)}),
        replace(TRAINS, replace_asked=True),
        "Delete asked",
    ),
    case(
        "first two signals are noted",
        evidence(seen(node(), running(), progress=Progress(token(), 2, ago(5), timedelta(seconds=5), ago(5)))),
        memory(launched(), run=run(progressed=False)),
        "Record run progressed",
    ),
    case(
        "setup served: its failures begin anew",
        evidence(seen(node(), running())),
        replace(TRAINS, books={"setup": FailureCounter(3, 3)}),
        "Record setup done",
    ),
    case(
        "setup goes on on one worker",
        evidence(seen(node(), (running(), running(phase=Phase.SETUP)))),
        replace(TRAINS, books={"setup": FailureCounter(3, 3)}),
        "Wait",
    ),
    case("setup goes on", evidence(seen(node(), running(phase=Phase.SETUP), progress=NO_PROGRESS)), TRAINS, "Wait"),
    case(
        "setup does not end",
        evidence(seen(node(), running(phase=Phase.SETUP), phase_since=ago(hours=1), progress=NO_PROGRESS)),
        TRAINS,
        "Stop setup",
    ),
    case(
        "no first step of a job that was edited, and may tell of none",
        evidence(seen(node(), running(), phase_since=ago(hours=2), progress=NO_PROGRESS)),
        replace(TRAINS, run=run(progressed=False, job="new"), step=100, step_job="old"),
        "Wait",
    ),
    case(
        "no first step of a job that told of steps before",
        evidence(seen(node(), running(), phase_since=ago(hours=2), progress=NO_PROGRESS)),
        replace(TRAINS, run=run(progressed=False, job="old"), step=100, step_job="old"),
        "Stop stall",
    ),
    case(
        "no first step",
        evidence(seen(node(), running(), phase_since=ago(hours=1), progress=NO_PROGRESS)),
        replace(TRAINS, run=run(progressed=False), step=5),
        "Stop stall",
    ),
    case(
        "it told where it begins, and nothing since",
        evidence(seen(node(), running(), phase_since=ago(minutes=65), progress=TOLD)),
        memory(launched(), run=run(progressed=False)),
        "Stop stall",
    ),
    case(
        "it told where it begins less than an hour ago",
        evidence(seen(node(), running(), progress=replace(TOLD, first_step=ago(minutes=50)))),
        memory(launched(), run=run(progressed=False)),
        "Wait",
    ),
    case(
        "its first step came after two hours: the second may take as long",
        evidence(seen(node(), running(), progress=replace(TOLD, begun=ago(hours=4), first_step=ago(hours=2)))),
        memory(launched(), run=run(progressed=False)),
        "Wait",
    ),
    case(
        "setup goes on, of a job that tells of steps",
        evidence(seen(node(), running(phase=Phase.SETUP), progress=replace(NO_PROGRESS, begun=ago(hours=2)))),
        replace(TRAINS, step=5),
        "Wait",
    ),
    case(
        "no checkpoint of a job that is known to save each 20 minutes",
        evidence(seen(node(), running(), phase_since=ago(hours=4), progress=NO_PROGRESS)),
        replace(TRAINS, run=run(progressed=False), gap_seconds=1200.0),
        "Stop stall",
    ),
    case(
        "no checkpoint of a job that is known to save each hour",
        evidence(seen(node(), running(), phase_since=ago(hours=4), progress=NO_PROGRESS)),
        replace(TRAINS, run=run(progressed=False), gap_seconds=3600.0),
        "Wait",
    ),
    case(
        "it stands still since this process met it, and made progress before",
        evidence(seen(node(), running(), progress=replace(NO_PROGRESS, begun=ago(hours=1)))),
        TRAINS,
        "Stop stall",
    ),
    case(
        "three reports have to support a standstill",
        evidence(seen(node(), running(), phase_since=ago(minutes=65), progress=replace(TOLD, unchanged=2))),
        memory(launched(), run=run(progressed=False)),
        "Wait",
    ),
    case(
        "no signal ever: no verdict",
        evidence(seen(node(), running(), phase_since=ago(hours=9), progress=NO_PROGRESS)),
        TRAINS,
        "Wait",
    ),
    case(
        "stalled since before the daemon was started again",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(hours=1), None, ago(hours=1)))),
        TRAINS,
        "Stop stall",
    ),
    case(
        "one signal since the daemon was started again",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(minutes=50), None, ago(minutes=50)))),
        TRAINS,
        "Wait",
    ),
    case(
        "its signals come rarely, as an earlier process saw",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(hours=2), None, ago(hours=2)))),
        memory(launched(), run=run(gap_seconds=1200.0)),
        "Wait",
    ),
    case(
        "one signal only",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(hours=1), None, ago(hours=1)))),
        memory(launched(), run=run(progressed=False)),
        "Stop stall",
    ),
    case(
        "one signal only, less than an hour ago",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(minutes=50), None, ago(minutes=50)))),
        memory(launched(), run=run(progressed=False)),
        "Wait",
    ),
    case(
        "one checkpoint only, after two hours: the second may take as long",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(hours=2), None, begun=ago(hours=4)))),
        memory(launched(), run=run(progressed=False)),
        "Wait",
    ),
    case("stalled", evidence(seen(node(), running(), progress=STALE)), TRAINS, "Stop stall"),
    case(
        "ten times the median gap",
        evidence(
            seen(
                node(),
                running(),
                progress=Progress(token(), 9, ago(minutes=99), timedelta(minutes=10), ago(minutes=99)),
            )
        ),
        memory(launched(), run=run()),
        "Wait",
    ),
    case(
        "stalled six times in a row",
        evidence(seen(node(), running(step=9), progress=STALE)),
        replace(TRAINS, books={"stall": FailureCounter(5, 9)}, step=9),
        "Stop stall",
    ),
    case(
        "stalled once more, and the budget is spent",
        evidence(seen(node(), running(step=9), progress=STALE)),
        replace(TRAINS, books={"stall": FailureCounter(6, 9)}, step=9),
        "Stop stall gives up",
    ),
    case(
        "stalled once more, further than ever",
        evidence(seen(node(), running(step=10), progress=STALE)),
        replace(TRAINS, books={"stall": FailureCounter(6, 9)}, step=9),
        "Stop stall",
    ),
    case(
        "stalled twice on its node, further each time",
        evidence(seen(node(), running(step=10), progress=STALE)),
        memory(launched(stalls=1), run=run(), step=9),
        "Stop stall",
    ),
    case(
        "stalled once more after hours, and tells of no step",
        evidence(seen(node(), running(), progress=replace(STALE, begun=ago(hours=4)))),
        replace(TRAINS, books={"stall": FailureCounter(6, 9)}),
        "Stop stall",
    ),
    case(
        "further than any before it: what failed before is no row",
        evidence(seen(node(), running(step=10), progress=MOVES)),
        replace(TRAINS, books={"crash": FailureCounter(3, 3)}, step=9),
        "Record run progressed",
    ),
    case(
        "steps of an epoch that was reached before, and a newer checkpoint",
        evidence(seen(node(), running(step=8, checkpoint=5), progress=MOVES)),
        replace(TRAINS, books={"crash": FailureCounter(3, 3)}, step=9, checkpoint=4),
        "Record run progressed",
    ),
    case(
        "no further than before",
        evidence(seen(node(), running(step=9, checkpoint=4), progress=MOVES)),
        replace(TRAINS, books={"crash": FailureCounter(3, 3)}, step=9, checkpoint=4),
        "Wait",
    ),
    case(
        "tells of no step, and lives for an hour: what failed before is no row",
        evidence(seen(node(), running(), progress=replace(NO_PROGRESS, begun=ago(hours=1)))),
        memory(launched(), run=run(progressed=False), books={"infrastructure": FailureCounter(3, 3)}),
        "Record run lasted",
    ),
    # The daemon was started again each half hour, and a run that told no step and had lived for hours counted as one
    # more of ten crashes in a row. The life of a run is counted from its launch; it supports no verdict, so the wall
    # clock is good enough.
    case(
        "tells of no step, and lives for an hour, most of it before the daemon was started again",
        evidence(seen(node(), running(), progress=replace(NO_PROGRESS, begun=ago(minutes=20)))),
        memory(launched(), run=run(progressed=False), books={"infrastructure": FailureCounter(3, 3)}),
        "Record run lasted",
    ),
    case(
        "tells of no step, and lives for less",
        evidence(seen(node(), running(), progress=replace(NO_PROGRESS, begun=ago(minutes=59)))),
        memory(
            launched(),
            run=run(progressed=False, launched_at=before(minutes=59)),
            books={"infrastructure": FailureCounter(3, 3)},
        ),
        "Wait",
    ),
    case(
        "stalled twice",
        evidence(seen(node(), running(), progress=STALE)),
        memory(launched(stalls=1), run=run()),
        "Stop stall then judged",
    ),
    case(
        "stalled twice, on-demand",
        evidence(seen(node(tier=ON_DEMAND), running(), progress=STALE)),
        memory(launched(stalls=1), run=run()),
        "Stop stall",
    ),
]


test_what_waits_for_an_effect = table(IN_FLIGHT)


test_what_comes_of_runs = table(RUNS)
