"""
Workers whose SSH server says more than anybody can hear: before the greeting, in a packet, or out of every command.

Such a worker is as one that says nothing: its node is judged and replaced, or goes on where it is heard again in time;
the daemon stays as small as it was, and other slots do not notice. Floods in the log of a job are in test_broken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.kits.deployment import Deployment, deployment
from tpucare.testbed.emulator.machines.flood import Flooding

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

# All that may be heard of one worker at a time, for each of several at once: windows, answers, kept output.
GROWTH_BYTES = 64 << 20
PACE = {"TPUCARE_PROBE": "1"}


def weighed(home: Deployment, until: Callable[[], object]) -> int:
    """The most that the daemon took while `until` was not true yet: resident bytes."""
    assert home.daemon is not None
    process, most = psutil.Process(home.daemon.pid), 0

    def look() -> object:
        nonlocal most
        most = max(most, process.memory_info().rss)
        return until()

    home.await_(look, "the flood is over", 150)
    return most


def flood(home: Deployment, node: str, what: Flooding) -> None:
    """Kept connections end, too, so that new ones meet the flood."""
    home.machines.flood(home.path(node), 0, what).result(10)
    home.cut_connections(node)


@pytest.mark.slow
def test_workers_that_flood_are_replaced_or_heard_again_and_nobody_else_notices(tmp_path: Path) -> None:
    floods = {"pod-0": Flooding.LINE, "pod-1": Flooding.PACKET, "pod-2": Flooding.OUTPUT}
    with deployment(tmp_path, pace=PACE) as home:
        home.declare("pod", count=4, care={"unreachable_after": "8s"})
        home.declare("patient", care={"unreachable_after": "10m"})
        home.start()
        for slot in (*floods, "pod-3", "patient-0"):
            home.await_training(slot)
        before = weighed(home, lambda: True)
        steps = home.await_steps("pod-3")[-1]
        for slot, what in floods.items():
            flood(home, f"{slot}-a0", what)
        flood(home, "patient-0-a0", Flooding.LINES)
        most = weighed(home, lambda: all(home.events("delete", slot) for slot in floods))
        assert most - before < GROWTH_BYTES
        home.await_steps("pod-3", least=steps + 20)
        for slot in floods:
            assert "silent" in home.await_event("delete", node=f"{slot}-a0").text
            home.await_training(slot, f"{slot}-a1", 120)
            home.allow_deletes(slot)
        assert home.row("patient-0")["phase"] == "connecting"
        home.machines.resume(home.path("patient-0-a0"), 0).result(10)
        home.await_(lambda: home.row("patient-0")["phase"] == "run", "it is heard again")
        assert home.token("patient-0") == "patient-0-a0.1"
        assert home.token("pod-3") == "pod-3-a0.1"
