"""Nodes are taken away while they boot, set up and train; the slot comes back and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.deployment import FAR, NEAR, TWO_HOSTS, deployment

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]


def test_preempted_during_training_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", kind=TWO_HOSTS)
        home.start()
        home.await_steps("pod-0", least=4)
        home.order("preempt", selector="pod-0")
        second = home.await_training("pod-0", "pod-0-a1")

        assert home.attempts("pod-0") == 2
        assert home.await_steps("pod-0", attempt=2)[0] > 4
        home.await_(lambda: home.names() == [second], "the old node is gone")


def test_preempted_during_boot(tmp_path: Path) -> None:
    """The workers have not answered yet: no attempt is counted, the next node is asked for at once."""
    with deployment(tmp_path, world={"latencies": {"create_single": 2, "boot_late": 2}}) as home:
        # However late the preemption comes, its worker is not up yet.
        home.order("miss-worker")
        home.declare("pod")
        home.start()
        home.await_event("create-accepted", node="pod-0-a0")
        home.await_(lambda: "pod-0-a0" in home.names(), "it boots")
        home.order("preempt", selector="pod-0")
        home.await_training("pod-0", "pod-0-a1")

        assert home.attempts("pod-0") == 1
        assert home.events("launched", node="pod-0-a0") == []


def test_preempted_during_setup_sets_up_the_next_node(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    setup = f"echo setting up; while [ $TPUCARE_ATTEMPT = 1 ] && [ ! -e {gate} ]; do sleep 0.1; done"
    with deployment(tmp_path / "house") as home:
        home.declare("pod", job={"setup": setup})
        home.start()
        home.await_(lambda: "setting up" in home.log("pod-0"), "setup runs")
        home.order("preempt", selector="pod-0")
        home.await_training("pod-0", "pod-0-a1")

        assert home.attempts("pod-0") == 2
        memory = home.memory("pod-0")
        assert memory is not None
        assert memory.books.get("setup") is None, "a preemption is no failed setup"


def test_a_stockout_sends_the_slot_to_the_next_zone(tmp_path: Path) -> None:
    with deployment(tmp_path) as home:
        home.declare("pod", zones=(NEAR, FAR))
        home.start()
        home.await_training("pod-0")
        # At one instant: no create may come between the two.
        with home.server.lock:
            home.order("preempt", selector="pod-0")
            home.order("capacity", zone=FAR, amount=0)
        home.await_training("pod-0", "pod-0-a2")

        # The zone that was not asked for longest goes first, and it has no room.
        assert home.path("pod-0-a2").zone == NEAR
        assert "no more capacity" in home.await_event("create-failed", node="pod-0-a1").text


def test_a_notice_reaches_the_job_once(tmp_path: Path) -> None:
    """`preempted` turns TRUE some seconds before the end: a file for those who look, SIGTERM for those who listen."""
    job = """\
trap 'echo "told $(cat "$TPUCARE_NOTICE")"' TERM
while :; do echo "step $((++n))"; sleep 0.2 & wait; done
"""
    with deployment(tmp_path) as home:
        home.declare("pod", run=job)
        home.start()
        home.await_training("pod-0")
        # The runner begins to watch the metadata some seconds after its start, and what it says has to be brought.
        home.order("preempt", selector="pod-0", notice=10)
        home.await_(lambda: "told " in home.log("pod-0"), "the job heard of it")
        home.await_training("pod-0", "pod-0-a1")

        log = home.log("pod-0")
        told = [line for line in log.splitlines() if line.startswith("told ")]
        assert len(told) == 1, log
        assert "preempted" in told[0]
        memory = home.memory("pod-0")
        assert memory is not None
        assert "crash" not in memory.books
