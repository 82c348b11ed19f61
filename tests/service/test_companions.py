"""What the daemon makes of companions that fail."""

from __future__ import annotations

from typing import Any

import pytest

from tpucare.model.errors import StoreError
from tpucare.service.daemon import CompanionGroup


class Companion:
    """Fails while `error` is set."""

    def __init__(self, topic: str, error: Exception | None = None) -> None:
        self.topic, self.error = topic, error
        self.polls = 0

    def poll(self) -> None:
        self.polls += 1
        if self.error is not None:
            raise self.error

    def rows(self) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        return [{"fleet": "pod"}, {"fleet": "lab"}]

    def close(self) -> None:
        return None


def test_one_that_fails_is_told_of_once_and_stops_no_other() -> None:
    bad, good = Companion("sweeps", KeyError("x")), Companion("ray")
    told: list[str] = []
    group = CompanionGroup([bad, good], told.append)
    for _ in range(3):
        group.poll()
    assert good.polls == 3
    assert told == ["sweeps: not followed for now, KeyError: 'x'"]
    assert group.rows({"lab"}) == {"sweeps": [], "ray": [{"fleet": "lab"}]}
    bad.error = None
    group.poll()
    assert len(group.rows(None)["sweeps"]) == 2
    bad.error = KeyError("x")
    group.poll()
    assert len(told) == 2, "a failure after a success is news"


def test_a_store_that_fails_ends_the_daemon() -> None:
    with pytest.raises(StoreError):
        CompanionGroup([Companion("ray", StoreError("disk full"))], print).poll()
