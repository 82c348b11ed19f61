"""What counts as a sign of progress of a run, by the reports of its workers."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.kits.evidence import SILENT, node, running, token
from tpucare.engine.tracking import NodeTrack, ProgressTrack
from tpucare.model.evidence import Mark
from tpucare.model.runs import NodeReport, WorkerReport

Report = tuple[int | None, int | None]


def track(*reports: Report) -> ProgressTrack:
    """A run whose reports, a minute apart, told these steps and checkpoints."""
    made = ProgressTrack()
    for minute, (step, checkpoint) in enumerate(reports):
        made.apply_report("pod-0-a0.1", step, checkpoint, 0, Mark(timedelta(minutes=minute), minute))
    return made


@pytest.mark.parametrize(
    ("reports", "signals"),
    [
        ([], 0),
        ([(None, None)], 0),
        ([(None, 246)], 0),
        ([(None, None), (None, 246)], 0),  # the checkpoint of an older run, read late from its bucket
        ([(None, None), (0, None)], 0),  # begin at step 0
        ([(None, 246), (246, 246)], 0),  # restored at step 246
        ([(None, None), (None, 246), (246, None), (None, None)], 0),
        ([(0, None), (1, None)], 1),
        ([(0, None), (1, None), (1, None), (None, None), (1, None)], 1),
        ([(None, 246), (None, 300)], 1),
        ([(0, None), (1, None), (1, 1)], 1),
        ([(0, 0), (1, 0), (1, 1)], 2),
        ([(900, None), (0, None), (1, None)], 2),  # each epoch counts anew
    ],
)
def test_a_sign_is_what_differs_from_what_the_run_began_with(reports: list[Report], signals: int) -> None:
    """
    The checkpoint that a run starts from was taken for its first sign of progress. Only a change after the first report
    is a sign.
    """
    assert track(*reports).signals == signals


def test_a_step_that_is_told_first_is_known_with_its_instant() -> None:
    seen = track((None, 7), (None, 7), (100, 7), (100, 7)).freeze()
    assert (seen.begun, seen.first_step, seen.last) == (Mark(timedelta(), 0), Mark(timedelta(minutes=2), 2), None)
    assert seen.unchanged == 1


def test_nothing_of_one_run_counts_for_the_next() -> None:
    made = track((0, 0), (1, 0), (2, 0))
    made.apply_report("pod-0-a0.2", 3, 3, 0, Mark(timedelta(hours=1), 60))
    seen = made.freeze()
    assert (seen.signals, seen.last, seen.begun) == (0, None, Mark(timedelta(hours=1), 60))


def _report(*workers: WorkerReport) -> NodeReport:
    return NodeReport(node().key, node().id, workers)


def at(minute: int) -> Mark:
    return Mark(timedelta(minutes=minute), minute)


def test_while_the_first_worker_is_silent_the_others_tell_of_progress() -> None:
    """
    Progress was read from worker 0 alone, and a gang that trained was deleted when that host was too busy to answer for
    three minutes. While worker 0 is silent, steps of the others count, each compared with its own earlier step.
    """
    seen = NodeTrack(node(), at(0), at(0))
    seen.apply_report(_report(running(step=10), running(step=7)), at(1))
    seen.apply_report(_report(SILENT, running(step=7)), at(2))
    assert seen.progress.last is None, "the other's count is held against its own, not against the first one's"
    seen.apply_report(_report(SILENT, running(step=8)), at(3))
    assert seen.freeze().progress.last == at(3)
    assert seen.silent_since == at(2)
    assert seen.progress.step == 10
    seen.apply_report(_report(SILENT, running(step=8)), at(4))
    seen.apply_report(_report(SILENT, SILENT), at(5))
    seen.apply_report(_report(SILENT, replace(running(step=99), token="other-a0.1")), at(6))
    assert seen.freeze().progress.last == at(3), "another run's step is no sign of this one's"
    seen.apply_report(_report(running(step=10), running(step=8)), at(7))
    assert seen.freeze().progress.last == at(3)


def test_steps_of_the_run_before_are_not_held_against_those_of_now() -> None:
    seen = NodeTrack(node(), at(0), at(0))
    seen.apply_report(_report(running(step=10), running(step=7)), at(1))
    seen.apply_report(_report(running(token(run=2)), running(token(run=2))), at(2))
    seen.apply_report(_report(SILENT, running(token(run=2), step=1)), at(3))
    assert seen.freeze().progress.last is None
