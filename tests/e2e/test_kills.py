"""The daemon is killed with SIGKILL in the middle of what it does and started again: one node, one run, one attempt."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.kits.deployment import FAR, NEAR, TWO_HOSTS, Deployment, deployment
from tpucare.testbed.emulator import witness

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

SLOW_SECONDS = 2.0


def _slow(home: Deployment, seconds: float = SLOW_SECONDS) -> None:
    """Every answer takes longer: a call takes effect in the middle of it, and its answer is still on its way."""
    home.order("outage", kind="slow", seconds=seconds, duration=60)


def _await_sight(home: Deployment) -> None:
    home.await_(lambda: home.ask("status")["projects"][0]["seen"], "the first listing")


def _run_alone(home: Deployment, slot: str) -> None:
    """One node, and on it one run, alive once it is known to train."""
    node = home.await_training(slot)
    home.await_(lambda: home.names() == [node], "one node")
    home.await_(lambda: list(home.runs()) == [home.token(slot)], "one run")


def test_killed_when_a_create_was_decided(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.start()
        _await_sight(home)
        _slow(home)
        home.declare("pod")
        home.await_event("create", node="pod-0-a0")
        home.kill()
        home.order("end-outages")
        home.start()
        _run_alone(home, "pod-0")
        assert home.attempts("pod-0") == 1
        assert home.names() == ["pod-0-a0"], "the same name again"


def test_killed_when_a_create_took_effect_unanswered(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.start()
        _await_sight(home)
        # Half of it is what this test has from the effect to the kill.
        _slow(home, seconds=12)
        home.declare("pod")
        home.await_call("CreateNode", "pod-0-a0")
        home.kill()
        assert home.events("create-accepted") == []
        home.order("end-outages")
        home.start()
        _run_alone(home, "pod-0")
        assert home.attempts("pod-0") == 1


@pytest.mark.parametrize("moment", ["decided", "running"])
def test_killed_while_a_gang_is_launched(tmp_path: Path, moment: str) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", kind=TWO_HOSTS)
        home.start()
        if moment == "decided":
            home.await_event("launch", "pod-0")
        else:
            home.await_(home.runs, "something runs")
        home.restart()
        _run_alone(home, "pod-0")
        assert home.attempts("pod-0") == 1
        assert home.names() == ["pod-0-a0"]


def test_killed_when_a_delete_took_effect_unanswered(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        _slow(home)
        home.order("preempt", selector="pod-0")
        home.await_call("DeleteNode", "pod-0-a0")
        home.kill()
        home.order("end-outages")
        home.start()
        home.await_training("pod-0", "pod-0-a1")
        _run_alone(home, "pod-0")
        assert home.attempts("pod-0") == 2


def test_killed_while_its_node_is_preempted(tmp_path: Path) -> None:
    """Nobody looked when it happened: the next daemon finds out."""
    with deployment(tmp_path) as home:
        home.declare("pod")
        home.start()
        home.await_training("pod-0")
        home.kill()
        home.order("preempt", selector="pod-0")
        home.order("forget", selector="pod-0")
        home.start()
        home.await_training("pod-0", "pod-0-a1")
        _run_alone(home, "pod-0")


def test_killed_again_and_again(tmp_path: Path) -> None:
    """At seeded moments from the first create on, with a preemption in between."""
    rng = random.Random(4711)
    with deployment(tmp_path) as home:
        home.declare("pod", kind=TWO_HOSTS)
        for number in range(6):
            home.start()
            # No event is waited for: that the kill comes at any instant is the point.
            time.sleep(rng.uniform(0.0, 1.2))
            home.kill()
            if number == 3:
                home.order("preempt", selector="pod-0")
        home.start()
        home.await_training("pod-0")
        _run_alone(home, "pod-0")


KILLS = 50
LOST = {"calls": {"lost_before": 0.06, "lost_after": 0.06, "unavailable": 0.02}, "delete_stuck": 0.1}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1])
def test_fifty_kills_at_any_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """
    Preemptions of every kind, lost answers, stuck deletes and dark zones meanwhile; a witness looks every 50 ms.

    What the deployment finds at its end is the verdict: no leak, no run twice, no delete without cause, no traceback.
    """
    monkeypatch.setattr(witness, "SCAN_EVERY_SECONDS", 0.05)
    rng = random.Random(seed)
    with deployment(tmp_path, world={"faults": LOST}) as home:
        home.declare("pod", count=2, zones=(NEAR, FAR))
        home.declare("gang", kind=TWO_HOSTS, zones=(NEAR, FAR))
        for _ in range(KILLS):
            home.start(ready=rng.random() < 0.7)
            _strike(home, rng)
            # As above: that the kill comes at any instant is the point.
            time.sleep(rng.uniform(0.0, 4.0))
            home.kill()
        home.order("end-outages")
        with home.server.lock:
            quiet = home.server.world.state.config.model_copy(
                update={"faults": type(home.server.world.state.config.faults)()}
            )
            home.server.world.operator.reconfigure(quiet, home.server.now())
        home.start()
        for slot in ("pod-0", "pod-1", "gang-0"):
            home.await_training(slot, seconds=240)
        home.await_(lambda: len(home.names()) == 3, "one node for each slot", 240)
        assert len(home.restarts) == KILLS
        assert len(home.audit("CreateNode")) > 5, "nodes were lost, and made anew"


def _strike(home: Deployment, rng: random.Random) -> None:
    """What happens to the fleet while this daemon lives, if anything."""
    slot = rng.choice(("pod-0", "pod-1", "gang-0"))
    match rng.choice(("preempt", "preempt", "silent", "forget", "stick", "dark", "slow", "", "")):
        case "preempt":
            home.order("preempt", selector=slot)
        case "silent":
            home.order("preempt", selector=slot, silent=True, visible_after=3)
        case "forget":
            home.order("forget", selector=slot)
        case "stick":
            home.order("stick-deleting", selector=slot)
        case "dark":
            home.order("outage", kind="zone", zone=rng.choice((NEAR, FAR)), duration=rng.uniform(1, 8))
        case "slow":
            home.order("outage", kind="slow", seconds=rng.uniform(0.5, 3), duration=rng.uniform(1, 8))
