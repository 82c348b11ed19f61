"""How counts and lengths are said."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tpucare.model.text import counted, length, worker_range


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


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.6, "1 min"),
        (60, "1 min"),
        (99, "1 min 39 s"),
        (137.24, "2 min 17 s"),
        (600, "10 min"),
        (617, "10 min"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
        (86400, "1 d"),
        (90000, "1 d 1 h"),
        (86100, "23 h"),
        (9 * 86400, "9 d"),
        (12 * 86400 + 7200, "12 d"),
    ],
)
def test_a_length_is_said_in_its_two_largest_units_at_most(seconds: float, want: str) -> None:
    assert length(seconds) == length(timedelta(seconds=seconds)) == want
