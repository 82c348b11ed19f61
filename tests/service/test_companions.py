"""How the daemon polls companions, and what it makes of those that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpucare.model.errors import StoreError
from tpucare.service import daemon
from tpucare.service.assembly import Runtime
from tpucare.service.daemon import CompanionGroup
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.options import Options


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


class Hearer(Companion):
    """An answer comes for it soon after each poll, on another thread."""

    def __init__(self, poll_soon: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__("hearer")
        self._poll_soon, self._stop = poll_soon, stop

    def poll(self) -> None:
        super().poll()
        if self.polls == 10:
            self._stop()
        else:
            threading.Timer(0.02, self._poll_soon).start()


def test_one_is_polled_as_soon_as_an_answer_has_come(tmp_path: Path) -> None:
    (tmp_path / "fleets").mkdir()
    made: list[Hearer] = []
    stops: list[Callable[[], None]] = []

    def companions(_: Runtime, _registry: FleetRegistry, poll_soon: Callable[[], None]) -> list[Hearer]:
        made.append(Hearer(poll_soon, lambda: stops[0]()))
        return made

    began = time.monotonic()
    daemon.run(
        Options(state=tmp_path / "state", endpoint="127.0.0.1:1"),  # no fleet is declared, so nothing is asked there
        tmp_path / "fleets",
        {},
        listen=lambda _: None,
        companions=companions,
        prepare=lambda made: stops.append(made.stop),
    )
    assert made[0].polls == 10
    assert time.monotonic() - began < 9 * daemon.POLL_EVERY_SECONDS, "they waited for the second to pass"
