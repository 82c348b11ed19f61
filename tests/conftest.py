"""What all tests share."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.kits.harness")

# Started in the background, as CI may be, Ctrl-C would be ignored here and by every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and none is wrong because the machine is busy; slow tests of test_fuzz draw new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with machines of their own begin first: they wait most, and one that begins last would be waited for."""
    waiting = {item.path for item in items if item.get_closest_marker("machines")}
    items.sort(key=lambda item: item.path not in waiting)
