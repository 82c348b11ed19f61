"""Stories of creates whose operation tells nothing, under virtual time."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.kits.harness import PROJECT, US, Daemon
from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.errors import NeedsPerson, RateLimited
from tpucare.model.evidence import POLL_OPERATION_EVERY
from tpucare.model.memory import Refusal
from tpucare.model.resources import Care, Listing, NodeState, Operation
from tpucare.testbed.emulator.inprocess import InProcessCloud
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.error_texts import RESOURCE_EXHAUSTED


def test_a_role_that_may_not_read_operations_costs_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Without `tpu.operations.get` every poll was refused: a stockout took `boot_timeout`, and at forty open creates the
    slot was set aside for good. A refused operation is not asked for again; GetNode answers instead, 90 s after the
    call at the earliest, and absence counts as no capacity.
    """

    def denied(*_: object) -> Operation:
        raise NeedsPerson("Permission 'tpu.operations.get' denied")

    config = WorldConfig.calm(zones={US: {"accelerators": ["*"], "capacity": [{"type": "v3", "amount": 0}]}})

    def caring(folder: Path) -> Daemon:
        daemon = Daemon(folder, config=config)
        daemon.care_for("pod", care=Care(boot_timeout=timedelta(minutes=5)))
        daemon.run(hours=4)
        return daemon

    usual = len(caring(tmp_path / "usual").zone.created())
    monkeypatch.setattr(InProcessCloud, "get_operation", denied)
    daemon = caring(tmp_path / "denied")
    assert 60 < len(daemon.zone.created()) <= 1.1 * usual, "as often as when the operation tells of the stockout"
    assert len(daemon.memory("pod-0").creates) <= 1
    assert not daemon.told("error")
    assert "tpu.operations.get" in daemon.told("poll-failed")[0]
    daemon.zone.world.operator.set_capacity(US, "v3", "spot", 4, daemon.clock.true_now())
    daemon.run(hours=1)
    assert daemon.trains("pod-0")
    daemon.check()


def test_a_node_that_trains_while_it_shows_creating_is_not_ended_for_a_moment_of_silence(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    daemon.zone.world.operator.set_state("pod-0", int(NodeState.CREATING), daemon.clock.true_now())
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
    """
    A create took effect after it had been closed (its answer lost, its repetition refused, NOT_FOUND at 90 s): its node
    was taken for an adopted one, and with a process on its chips the slot waited for a person (storm at high, seed
    154). The store remembers which numbers it used; an adopted node bears none of them.
    """
    daemon = Daemon(tmp_path)
    world = daemon.zone.world
    world.operator.delay_next("CreateNode", 150)
    world.operator.fail_next(
        "CreateNode", RESOURCE_EXHAUSTED, "Quota limit 'TPUV3' has been exceeded. Limit: 8 in zone x."
    )
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
    daemon.run(hours=6)
    action = daemon.engine.slots["pod-0"].action
    assert isinstance(action, Wait)
    assert action.needs_person
    assert action.cause is Cause.NO_PLACE_OPEN
    assert {past.kind for past in daemon.memory("pod-0").places.values()} == {Refusal.HUMAN}
    assert len(daemon.zone.created()) <= 8
    daemon.check()


def test_a_listing_that_is_refused_for_its_rate_is_asked_for_less_often_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each 5 s without end, it could use up the very quota that it waited for."""
    daemon = Daemon(tmp_path)
    daemon.care_for("pod")
    daemon.run(minutes=15)
    asked, listed = [], InProcessCloud.list_nodes

    def limited(*_: object) -> Listing:
        asked.append(daemon.clock.seconds)
        raise RateLimited("Quota exceeded for quota metric 'ListNodes requests' per minute")

    monkeypatch.setattr(InProcessCloud, "list_nodes", limited)
    daemon.run(minutes=20)
    assert 15 <= len(asked) <= 40
    monkeypatch.setattr(InProcessCloud, "list_nodes", listed)
    daemon.run(minutes=3)
    assert daemon.engine.projects[PROJECT].fresh
    assert daemon.engine.projects[PROJECT].listing_pause == 0.0, "as often as ever"
    assert daemon.trains("pod-0")
    daemon.check()


def test_operations_of_many_creates_are_read_at_a_bounded_rate(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, config=WorldConfig.calm(latencies={"create_slice": 600}, rates={"create": None}))
    daemon.care_for("pod", 40)
    daemon.run(minutes=2)
    mark = len(daemon.zone.calls("GetOperation"))
    daemon.run(minutes=5)
    assert 60 * 5 <= len(daemon.zone.calls("GetOperation")) - mark <= 130 * 5, "240 a minute at one each 10 s"
    daemon.run(minutes=20)
    assert daemon.all_train()
    assert daemon.engine.state.poll_every == POLL_OPERATION_EVERY
