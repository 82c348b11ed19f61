"""Stories of fleets that are edited while things are in flight, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kits.harness import Daemon, place
from tpucare.engine.effects import prepare
from tpucare.model.actions import Effect, Launch
from tpucare.model.causes import Cause
from tpucare.model.resources import Listing

ALL_LISTED_AT = 700.0


def test_a_node_of_a_type_that_is_not_declared_any_more_still_has_all_its_workers(tmp_path: Path) -> None:
    """While a node is CREATING, the API may list one address of four: that is no slice of one host."""
    daemon = Daemon(tmp_path)
    listed = daemon.cloud.list_nodes

    def list_nodes(project: str) -> Listing:
        listing = listed(project)
        few = 1 if daemon.clock.seconds < ALL_LISTED_AT else None
        nodes = {key: replace(node, endpoints=node.endpoints[:few]) for key, node in listing.nodes.items()}
        return replace(listing, nodes=nodes, changed=frozenset(nodes))

    daemon.cloud.list_nodes = list_nodes  # type: ignore[method-assign]
    daemon.care_for("pod")
    daemon.run(seconds=30)
    daemon.care_for("pod", 1, place(kind="v3-64", workers=8))
    daemon.run(minutes=30)
    started = [
        (round(at) >= ALL_LISTED_AT, worker) for at, what, _, worker in daemon.launcher.history if what == "start"
    ]
    assert started == [(True, worker) for worker in range(4)]
    assert daemon.launcher.launches == ["pod-0-a0.1"]


def test_an_edited_price_changes_nothing_on_a_live_node(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    single = place(kind="v2-8", workers=1)
    daemon.care_for("pod", 1, single)
    daemon.run(minutes=15)
    before = list(daemon.launcher.launches), daemon.zone.created()
    daemon.care_for("pod", 1, replace(single, price=12.5))
    daemon.run(minutes=15)
    assert (daemon.launcher.launches, daemon.zone.created()) == before
    assert daemon.trains("pod-0")


def test_a_launch_is_not_repeated_for_a_slot_that_has_no_job_any_more(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    single = place(kind="v2-8", workers=1)
    daemon.care_for("pod", 1, single)
    daemon.run(minutes=15)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.launcher.lost["launch-before"] = 1
    daemon.run_until(lambda: daemon.launcher.lost["launch-before"] == 0)
    daemon.care_for("pod", 1, single, job=False)
    daemon.run(minutes=15)
    assert daemon.launcher.launches == ["pod-0-a0.1", "pod-0-a1.1"]
    assert daemon.causes()["pod-0"] is Cause.JOB_MISSING
    daemon.care_for("pod", 1, single)
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")


def test_an_assertion_that_fails_in_one_slots_work_sets_that_slot_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A failed assertion in the work of one slot ended the process, and each next one, for all fleets. It sets that slot
    aside.
    """

    def fails(action: Effect, *more: Any) -> Any:
        assert not (isinstance(action, Launch) and action.key.name.startswith("pod-"))
        return prepare(action, *more)

    monkeypatch.setattr("tpucare.engine.engine.prepare", fails)
    daemon = Daemon(tmp_path)
    daemon.care_for("pod")
    daemon.care_for("other")
    daemon.run(minutes=15)
    assert daemon.trains("other-0")
    assert daemon.causes()["pod-0"] is Cause.SET_ASIDE
    monkeypatch.setattr("tpucare.engine.engine.prepare", prepare)
    daemon.run(minutes=30)
    assert daemon.trains("pod-0")
