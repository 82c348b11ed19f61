"""How counts and lengths are said."""

from __future__ import annotations

import pytest

from tpucare.words import counted, worker_range


@pytest.mark.parametrize(
    ("told", "want"),
    [
        (counted(1, "node"), "1 node"),
        (counted(0, "node"), "0 nodes"),
        (counted(1200, "slot"), "1,200 slots"),
        (counted(1, "process", "processes"), "1 process"),
        (counted(2, "process", "processes"), "2 processes"),
        (worker_range(1), "its only worker is 0"),
        (worker_range(4), "its workers are 0 to 3"),
    ],
)
def test_counts_are_said_as_a_person_would(told: str, want: str) -> None:
    assert told == want
