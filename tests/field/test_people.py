"""Complaints about what people and machines around the caretaker did to it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.field import calls, named, preempt
from tests.kits.harness import PROJECT, US, Daemon
from tests.kits.service import VirtualService, fleet_text
from tpucare.model.causes import Cause
from tpucare.model.memory import DesiredState
from tpucare.testbed.emulator.world.records import NodeSpec


def neighbour(first: Daemon, folder: Path) -> Daemon:
    """Another person's daemon with a state folder of its own, in the same project and at the same time."""
    second = Daemon(folder)
    second.kill()
    second.clock, second.launcher, second.zone = first.clock, first.launcher, first.zone
    second.restarts.clear()
    second.start()
    return second


def run_both(first: Daemon, second: Daemon, minutes: float) -> None:
    until = first.clock.seconds + minutes * 60
    while first.clock.seconds < until:
        for one in (first, second):
            first.launcher.waiting = one.executor.waiting
            one.engine.step()
        first.executor.sleep(timedelta(seconds=0.5))


def test_two_people_two_daemons_one_project(tmp_path: Path) -> None:
    """Two of us ran a caretaker in one project: each deleted what it did not know, and both fought for one name."""
    first = Daemon(tmp_path / "mine")
    second = neighbour(first, tmp_path / "theirs")
    first.care_for("pod", 2)
    second.care_for("other", 2)
    run_both(first, second, 15)
    # Both of them call a fleet "same".
    first.care_for("same")
    run_both(first, second, 15)
    second.care_for("same")
    run_both(first, second, 10)
    preempt(first, "pod-0")
    preempt(first, "other-1")
    run_both(first, second, 20)
    assert named(first) == ["other-0-a0", "other-1-a1", "pod-0-a1", "pod-1-a0", "same-0-a0", "same-0-a1"]
    assert all(first.trains(slot) for slot in ("pod-0", "pod-1", "same-0"))
    assert all(second.trains(slot) for slot in ("other-0", "other-1", "same-0")), "the next number is free"
    assert [event for event in second.events if event.kind == "person"] == []
    deleted = {call["node"]: call["labels"]["tpucare-owner"] for call in calls(first, "DeleteNode")}
    assert first.store is not None
    assert second.store is not None
    assert deleted == {"pod-0-a0": first.store.owner, "other-1-a0": second.store.owner}
    assert first.engine.orphans == second.engine.orphans == {}


def test_the_fleet_folder_is_unmounted(tmp_path: Path) -> None:
    """The folder of the fleets lay on a share that was unmounted; it looked empty, and everything was deleted."""
    service = VirtualService(tmp_path)
    service.write(fleet_text(count=2))
    service.write(fleet_text("other"), "other.yaml")
    service.look()
    service.run()
    before = service.nodes
    assert before == ["other-0-a0", "pod-0-a0", "pod-1-a0"]
    shutil.move(service.folder, tmp_path / "share")
    service.folder.mkdir()
    service.look()
    service.run(30)
    service.again()
    service.look()
    service.run(30)
    assert service.nodes == before
    preempt(service.daemon, "pod-1")
    service.run(20)
    assert service.nodes == ["other-0-a0", "pod-0-a0", "pod-1-a1"], "they are cared for as before"
    assert service.daemon.all_train()
    assert service.daemon.told("fleet-missing")
    service.folder.rmdir()
    service.look()
    shutil.move(tmp_path / "share", service.folder)
    service.look()
    service.run(10)
    assert service.nodes == ["other-0-a0", "pod-0-a0", "pod-1-a1"]
    assert len(service.daemon.launcher.launches) == 4
    assert PROJECT in service.daemon.engine.projects
    service.daemon.check()


@pytest.mark.parametrize("trained", [False, True])
def test_a_node_is_handed_over_with_what_works_on_it(daemon: Daemon, trained: bool) -> None:
    """
    `adopt-node` gave a person's machine to a slot that had trained before, and the person's processes were stopped or
    the node deleted. A node that no create of ours made, and on which no run of ours was launched, is adopted, whatever
    the slot did before.
    """
    daemon.care_for("pod")
    if trained:
        daemon.run(minutes=15)
        preempt(daemon, "pod-0")
    daemon.wish("pod-0", DesiredState.PAUSED)
    daemon.run(minutes=1)
    daemon.launcher.boots.extend(["foreign"] * 4)
    spec = NodeSpec(accelerator_type="v3-32", runtime_version="tpu-ubuntu2204-base", spot=True)
    daemon.zone.world.api.create_node(f"projects/{PROJECT}/locations/{US}", "mine", spec, daemon.clock.true_now())
    daemon.run(minutes=8)
    daemon.engine.adopt_node("mine", "pod-0")
    daemon.run(minutes=1)
    daemon.wish("pod-0", DesiredState.UP)
    daemon.run(minutes=20)
    workers = daemon.launcher.of_node(PROJECT, US, "mine")
    assert [worker.foreign_chips for worker in workers] == [True] * 4
    assert daemon.causes()["pod-0"] is Cause.HELD_BY_OTHERS
    for worker in workers:
        worker.foreign_chips = False
    daemon.run(minutes=5)
    assert daemon.trains("pod-0")
    assert named(daemon) == ["mine"]
    # From the first launch on it is a node like any other: what our run left in the way has to go.
    daemon.run(minutes=5)
    daemon.launcher.of_node(PROJECT, US, "mine")[0].foreign_chips = True
    daemon.engine.change("pod-0", lambda memory: replace(memory, restart_asked=True), "restart", "asked for")
    daemon.run(minutes=20)
    assert daemon.trains("pod-0")
    daemon.check("mine")
