"""The decision table for runs that tpucare did not start: they live or they do not, and nobody knows how they ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.kits.decisions import told
from tests.kits.evidence import (
    NO_PROGRESS,
    SILENT,
    act,
    after,
    ago,
    before,
    evidence,
    launched,
    memory,
    node,
    run,
    running,
    seen,
    slot,
    token,
)
from tpucare.model.actions import Record, Stop, Wait
from tpucare.model.evidence import NodeEvidence
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import End, FailureCounter, Memory
from tpucare.model.resources import Health, Job, OnExit, OnSuccess, Provisioning, Slot
from tpucare.model.runs import Failure, ForeignRun, Phase, WorkerReport
from tpucare.planner.run import ENDED

HAD, HAD_NOTHING = ForeignRun(seen=True), ForeignRun()
LIVES = running(foreign=HAD)
IDLE = running(alive=False, chips_free=True, foreign=HAD_NOTHING)
GONE = running(alive=False, chips_free=True, foreign=HAD)
SETS_UP = running(phase=Phase.SETUP, foreign=HAD_NOTHING)
LOST = running(phase=Phase.SETUP, foreign=ForeignRun(lost=True))
LOST_QUIET = replace(LOST, alive=False, chips_free=True)
TORN = replace(GONE, foreign=ForeignRun(seen=True, rebooted=True))
BACK = replace(LIVES, foreign=ForeignRun(seen=True, rebooted=True))
RAISED = running(
    alive=False, chips_free=True, phase=Phase.EXITED, exit_status=1, failure=Failure.SETUP, foreign=HAD_NOTHING
)
RUNS = memory(launched(), run=run())
OVER = memory(launched(), run=run(state=RunState.OVER))


def door(on_exit: OnExit = OnExit.LEAVE, **care: Any) -> Slot:
    return replace(slot(on_exit=on_exit, **care), job=Job(run="", foreign=True))


def on(*workers: WorkerReport, **more: Any) -> NodeEvidence:
    return seen(node(), workers, **{"progress": NO_PROGRESS, **more})


RECENT, LONG_AGO = {"ended_since": ago(1)}, {"ended_since": ago(minutes=2)}
SETUP_FAILED_5 = replace(RUNS, books={"setup": FailureCounter(5, 5, None, "no")})
CRASHED_10 = replace(RUNS, books={"crash": FailureCounter(10, 10, None, ENDED)})
INTERRUPTED_12 = replace(RUNS, books={"infrastructure": FailureCounter(12, 12, None, "reboot")})
LEAVE, RESTART, DELETE = door(), door(OnExit.RESTART), door(OnExit.DELETE)


@pytest.mark.parametrize(
    ("what", "known", "declared", "want"),
    [
        # It lives.
        (on(LIVES, LIVES), RUNS, LEAVE, "Wait"),
        (on(LIVES, IDLE), RUNS, RESTART, "Wait"),
        (on(LIVES, GONE), RUNS, RESTART, "Wait"),
        (on(SETS_UP, SETS_UP), RUNS, LEAVE, "Wait"),
        (on(SETS_UP, SETS_UP, phase_since=ago(minutes=61)), RUNS, LEAVE, "Stop setup"),
        (on(LIVES, LIVES, phase_since=ago(hours=20)), RUNS, LEAVE, "Wait"),
        # It does not.
        (on(GONE, GONE, **RECENT), RUNS, LEAVE, "Wait"),
        (on(GONE, GONE, **LONG_AGO), RUNS, LEAVE, "Record run over"),
        (on(GONE, IDLE, **LONG_AGO), RUNS, LEAVE, "Record run over"),
        (on(IDLE, IDLE, **LONG_AGO), RUNS, LEAVE, "Record run over"),
        (on(GONE, GONE, **LONG_AGO), OVER, LEAVE, "Wait"),
        (on(LIVES, GONE), OVER, LEAVE, "Record run back"),
        (on(GONE, GONE, **RECENT), RUNS, RESTART, "Wait"),
        (on(GONE, GONE, **LONG_AGO), RUNS, RESTART, "Stop crash"),
        (on(GONE, GONE, **LONG_AGO), CRASHED_10, RESTART, "Stop crash gives up"),
        (on(GONE, GONE, phase_since=ago(hours=3), **LONG_AGO), CRASHED_10, RESTART, "Stop crash"),
        (on(GONE, GONE, **LONG_AGO), OVER, RESTART, "Stop crash"),
        (on(GONE, GONE, **LONG_AGO), RUNS, DELETE, "Record ended"),
        # Its setup failed, or nobody is there to end it.
        (on(RAISED, SETS_UP, **RECENT), RUNS, LEAVE, "Wait"),
        (on(RAISED, SETS_UP, **LONG_AGO), RUNS, LEAVE, "Stop setup"),
        (on(RAISED, SETS_UP, **LONG_AGO), SETUP_FAILED_5, LEAVE, "Stop setup gives up"),
        (on(LIVES, LIVES), SETUP_FAILED_5, LEAVE, "Record setup done"),
        (on(LOST, LOST), RUNS, LEAVE, "Stop"),
        (on(LOST_QUIET, LOST_QUIET), RUNS, DELETE, "Stop"),
        # A worker was started anew.
        (on(TORN, LIVES, **RECENT), RUNS, LEAVE, "Wait"),
        (on(TORN, LIVES, **LONG_AGO), RUNS, LEAVE, "Stop infrastructure"),
        (on(TORN, TORN, **LONG_AGO), RUNS, DELETE, "Stop infrastructure"),
        (on(TORN, TORN, **LONG_AGO), INTERRUPTED_12, LEAVE, "Stop infrastructure gives up"),
        (on(BACK, LIVES), RUNS, LEAVE, "Wait"),
        (on(TORN, TORN, **LONG_AGO), OVER, LEAVE, "Wait"),
        # What holds for every run holds here.
        (on(LIVES, LIVES), replace(RUNS, restart_asked=True), LEAVE, "Stop"),
        (on(LIVES, SILENT), RUNS, LEAVE, "Wait"),
        (on(LIVES, LIVES, unhealthy_since=ago(hours=2)), RUNS, LEAVE, "Stop then judged"),
    ],
)
def test_a_row_of_the_table(what: NodeEvidence, known: Memory, declared: Slot, want: str) -> None:
    assert told(act(evidence(what), known, declared)) == want


def test_bad_health_is_only_judged_with_the_patience_that_was_asked_for() -> None:
    ill = seen(node(health=Health.UNHEALTHY_MAINTENANCE), (LIVES, LIVES), unhealthy_since=ago(hours=2))
    ill = replace(ill, progress=NO_PROGRESS)
    assert isinstance(act(evidence(ill), RUNS, door(unhealthy_after=timedelta(hours=3))), Wait)
    owned = replace(ill, node=node(tier=Provisioning.ON_DEMAND))
    assert isinstance(act(evidence(owned), RUNS, door()), Wait)


def test_its_end_is_told_as_what_it_is() -> None:
    left = act(evidence(on(GONE, GONE, **LONG_AGO)), OVER, LEAVE)
    assert left.why == "its run ended; not known to have succeeded (care.on_exit is leave)"
    done = act(evidence(on(GONE, GONE, **LONG_AGO)), RUNS, DELETE)
    assert isinstance(done, Record)
    assert (done.end, done.why) == (End.DONE, ENDED)


@pytest.mark.parametrize(
    ("statuses", "want"),
    [
        ((None, None), ENDED),
        ((1,), "its run ended with exit status 1"),
        ((0,), "its run ended with exit status 0"),
        ((0, 1), "its run ended with exit status 1 on worker 1, 0 on worker 0"),
        (
            (0, 137, 137, None),
            "its run ended with exit status 137 on 2 workers, 0 on worker 0; of 1 other it is unknown",
        ),
    ],
)
def test_a_status_that_the_script_left_is_told_and_changes_nothing(statuses: tuple[int | None, ...], want: str) -> None:
    workers = tuple(replace(GONE, foreign=ForeignRun(seen=True, status=status)) for status in statuses)
    left = act(evidence(on(*workers, **LONG_AGO)), RUNS, LEAVE)
    assert (told(left), left.why) == ("Record run over", want)
    assert act(evidence(on(*workers, **LONG_AGO)), OVER, LEAVE).why == f"{want} (care.on_exit is leave)"


def test_a_setup_that_failed_says_what_was_raised() -> None:
    raised = replace(RAISED, detail="start_fn of worker 0: ValueError: no such dataset")
    stop = act(evidence(on(raised, SETS_UP, **LONG_AGO)), RUNS, LEAVE)
    assert isinstance(stop, Stop)
    assert stop.why == "start_fn of worker 0: ValueError: no such dataset"


def test_after_a_run_of_a_long_life_the_next_end_is_the_first_of_a_row() -> None:
    stop = act(evidence(on(GONE, GONE, phase_since=ago(hours=3), **LONG_AGO)), CRASHED_10, RESTART)
    assert isinstance(stop, Stop)
    assert stop.advanced


def test_a_done_slot_lets_its_node_go_whatever_becomes_of_finished_runs() -> None:
    done = replace(RUNS, end=End.DONE, end_why=ENDED, ended_at=before(minutes=1))
    assert told(act(evidence(on(GONE, GONE, **LONG_AGO)), done, door(OnExit.DELETE, on_success=OnSuccess.KEEP))) == (
        "Delete finished"
    )


def test_a_relaunch_waits_for_its_book() -> None:
    stopped = memory(
        launched(), run=run(state=RunState.ENDED), books={"crash": FailureCounter(1, 1, after(seconds=30), ENDED)}
    )
    waits = act(evidence(on(GONE, GONE, **LONG_AGO)), stopped, RESTART)
    assert isinstance(waits, Wait)
    ready = memory(
        launched(), run=run(state=RunState.ENDED), books={"crash": FailureCounter(1, 1, before(seconds=30), ENDED)}
    )
    launch = act(evidence(on(GONE, GONE, **LONG_AGO)), ready, RESTART)
    assert (told(launch), getattr(launch, "token", "")) == ("Launch", token(0, 2))
