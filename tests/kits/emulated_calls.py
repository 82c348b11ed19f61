"""What an emulated cloud is asked, for a test that waits for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tpucare.testbed.emulator.world.records import CallFate
from tpucare.testbed.emulator.world.world import World


def next_call(world: World, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when *world* has met a call, before the latency of its answer is spent."""
    arrived, fate = threading.Event(), world.calls.fate

    def met(method: str, *more: Any) -> CallFate:
        found = fate(method, *more)
        arrived.set()
        return found

    monkeypatch.setattr(world.calls, "fate", met)
    return arrived
