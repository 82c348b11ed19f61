"""Pauses between two tries: they double up to a cap, and chance keeps those who wait apart."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from tpucare.planner.backoff import (
    FAILURE_BACKOFF,
    Backoff,
    failure_backoff_cap,
    listing_pause,
    poll_pause,
    refusal_pause,
)

RNG = random.Random(1)


def test_a_pause_doubles_up_to_its_cap_and_is_drawn_by_chance() -> None:
    backoff = Backoff(timedelta(seconds=10), timedelta(minutes=2))
    draws = [backoff.delay(failures, RNG).total_seconds() for failures in range(1, 12)]
    assert all(low <= draw for low, draw in zip((5, 10, 20, 40), draws, strict=False))
    assert all(60 <= draw <= 120 for draw in draws[4:])
    assert len(set(draws)) == len(draws)
    assert Backoff(timedelta(seconds=10), timedelta(hours=1)).delay(0, RNG) <= timedelta(seconds=10)


def test_the_cap_of_a_book_is_that_of_its_pauses() -> None:
    for name, backoff in FAILURE_BACKOFF.items():
        longest = backoff.delay(100, RNG) if backoff is not None else timedelta()
        assert longest <= failure_backoff_cap(name)


@pytest.mark.parametrize(("operations", "seconds"), [(0, 10), (20, 10), (21, 20), (40, 20), (41, 40), (1000, 640)])
def test_open_operations_are_read_at_no_more_than_two_a_second(operations: int, seconds: float) -> None:
    assert poll_pause(operations) == timedelta(seconds=seconds)


def test_a_listing_refused_for_its_rate_is_put_off_up_to_a_minute() -> None:
    pauses = [0.0]
    for _ in range(7):
        pauses.append(listing_pause(pauses[-1], 5.0, RNG))
    assert 7.5 <= pauses[1] <= 10
    assert all(45 <= pause <= 60 for pause in pauses[6:])


def test_a_login_that_was_refused_is_tried_again_at_leisure() -> None:
    assert [refusal_pause(refusals).total_seconds() for refusals in (1, 2, 3, 4, 5, 99)] == [5, 10, 20, 30, 30, 30]
