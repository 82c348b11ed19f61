"""What all tests share."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

pytest.register_assert_rewrite("tests.kits.harness")

# Started in the background, as CI may be, Ctrl-C would be ignored here and by every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and none is wrong because the machine is busy; slow tests of test_fuzz draw new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")

ROOT = Path(__file__).parents[1]


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """
    For `-n 2`: files whose tests have machines of their own, which share loopback addresses and ports, one after the
    other on one process; the others beside them, each as a whole, since its tests share what it builds.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _lane(nodeid.partition("::")[0])


# Their processes share nothing with those of others: trainings that meet at free ports, workers that are folders.
ALONE = frozenset(
    f"tests/{name}.py"
    for name in (
        "adapters/test_launch",
        "api/test_callbacks",
        "api/test_commands",
        "templates/test_runner",
        "training/test_example_train",
        "training/test_training",
    )
)


@cache
def _lane(path: str) -> str:
    return "machines" if path not in ALONE and "mark.machines" in (ROOT / path).read_text("utf-8") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return Lanes(config, log)
