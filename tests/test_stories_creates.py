"""Stories of creates whose operation tells nothing, under virtual time."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.virtual.harness import PROJECT, US, Daemon
from tpucare.actions import Wait
from tpucare.emulator.config import WorldConfig
from tpucare.emulator.errors_text import RESOURCE_EXHAUSTED
from tpucare.emulator.inprocess import InProcessCloud
from tpucare.errors import NeedsPerson
from tpucare.model import Care, NodeState, Operation


def test_a_role_that_may_not_read_operations_costs_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every poll was refused: half an hour per stockout, and at forty creates the slot was set aside for good."""

    def denied(*_: object) -> Operation:
        raise NeedsPerson("Permission 'tpu.operations.get' denied")

    monkeypatch.setattr(InProcessCloud, "get_operation", denied)
    capacity = [{"type": "v3", "amount": 0}]
    daemon = Daemon(tmp_path, config=WorldConfig.calm(zones={US: {"accelerators": ["*"], "capacity": capacity}}))
    daemon.care_for("pod", care=Care(boot_timeout=timedelta(minutes=5)))
    daemon.run(hours=4)
    assert 60 < len(daemon.zone.created()) < 200, "as often as when the operation tells of the stockout"
    assert len(daemon.memory("pod-0").creates) <= 1
    assert not daemon.told("error")
    assert "tpu.operations.get" in daemon.told("poll-failed")[0]
    daemon.zone.world.set_capacity(US, "v3", "spot", 4, daemon.clock.true_now())
    daemon.run(hours=1)
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_node_that_trains_while_it_shows_creating_is_not_ended_for_a_moment_of_silence(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    daemon.zone.world.set_state("pod-0", int(NodeState.CREATING), daemon.clock.true_now())
    daemon.run(hours=2)
    worker = daemon.launcher.of_node(PROJECT, US, "pod-0-a0")[2]
    worker.silent = True
    daemon.run(minutes=1)
    worker.silent = False
    daemon.run(minutes=10)
    assert daemon.node_of("pod-0").name == "pod-0-a0"
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_node_that_came_after_its_create_was_closed_is_ours_to_clear(tmp_path: Path) -> None:
    """It was taken for one that a person had adopted: with something on its chips the slot waited for that person."""
    daemon = Daemon(tmp_path)
    world = daemon.zone.world
    world.delay_next("CreateNode", 150)
    world.fail_next("CreateNode", RESOURCE_EXHAUSTED, "Quota limit 'TPUV3' has been exceeded. Limit: 8 in zone x.")
    daemon.launcher.boots.extend(["foreign"] * 4)
    daemon.care_for("pod")
    daemon.run(minutes=2)
    assert daemon.told("create-failed"), "lost, then refused"
    daemon.run(minutes=20)
    assert daemon.told("person") == []
    assert daemon.trains("pod-0")
    assert len(daemon.zone.nodes()) == 1
    daemon.check("pod-0-a0")


@pytest.mark.parametrize("form", ["limit", "exhausted"])
def test_a_project_without_any_quota_is_told_to_a_person_and_hardly_asked_for(tmp_path: Path, form: str) -> None:
    """A grant that is over: 196 creates in three days, and nobody was told."""
    none = [{"generation": "v3", "zone": US, "limit": 0, "unit": "chips", "form": form}]
    daemon = Daemon(tmp_path, config=WorldConfig.calm(quotas=none))
    daemon.care_for("pod")
    daemon.run(hours=24)
    action = daemon.engine.slots["pod-0"].action
    assert isinstance(action, Wait)
    assert action.needs_person
    assert "no quota for this" in action.why
    assert len(daemon.zone.created()) <= 26
    daemon.check()
