"""What counts as a sign of progress of a run, by the reports of its workers."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tpucare.evidence import Mark
from tpucare.tracking import ProgressTrack

Report = tuple[int | None, int | None]


def track(*reports: Report) -> ProgressTrack:
    """A run whose reports, a minute apart, told these steps and checkpoints."""
    made = ProgressTrack()
    for minute, (step, checkpoint) in enumerate(reports):
        made.see("pod-0-a0.1", step, checkpoint, 0, Mark(timedelta(minutes=minute), minute))
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
    assert track(*reports).signals == signals


def test_a_step_that_is_told_first_is_known_with_its_instant() -> None:
    seen = track((None, 7), (None, 7), (100, 7), (100, 7)).freeze()
    assert (seen.begun, seen.told, seen.last) == (Mark(timedelta(), 0), Mark(timedelta(minutes=2), 2), None)
    assert seen.unchanged == 1


def test_nothing_of_one_run_counts_for_the_next() -> None:
    made = track((0, 0), (1, 0), (2, 0))
    made.see("pod-0-a0.2", 3, 3, 0, Mark(timedelta(hours=1), 60))
    seen = made.freeze()
    assert (seen.signals, seen.last, seen.begun) == (0, None, Mark(timedelta(hours=1), 60))
