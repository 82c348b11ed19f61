"""What all tests share."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.kits.harness")

# Started in the background, as CI may be, Ctrl-C would be ignored here and by every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and none is wrong because the machine is busy; slow tests of test_fuzz draw new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


# Rooms of tests whose files take longest: they begin first, so that none of them is left alone at the end.
LONG_ROOMS = ("e2e", "training", "testbed", "stories")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with machines, whose tests wait most, alternate with the others, so that half of the processes compute."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = sorted(files, key=lambda file: [*LONG_ROOMS, file.parent.name].index(file.parent.name))
    waiting = [file for file in order if any(test.get_closest_marker("machines") for test in files[file])]
    others = [file for file in order if file not in waiting]
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(waiting, others))
    items[:] = [item for file in in_turns if file is not None for item in files[file]]
