"""Stories of labels that somebody edits, and of nodes that were adopted under a name of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kits.field import calls, named
from tests.kits.harness import PROJECT, US, Daemon
from tpucare.model.causes import Cause
from tpucare.model.errors import ConfigError
from tpucare.model.memory import DesiredState
from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.world.records import NodeSpec


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state")


def full_name(node: str) -> str:
    return f"projects/{PROJECT}/locations/{US}/nodes/{node}"


def label(daemon: Daemon, node: str, labels: Mapping[str, str]) -> None:
    daemon.zone.world.api.update_node(full_name(node), ("labels",), NodeSpec(labels=labels), daemon.clock.true_now())


@pytest.fixture
def adopted(daemon: Daemon) -> Daemon:
    """`mine` was made by somebody, and trains in pod-0 since it was adopted."""
    daemon.care_for("pod")
    daemon.wish("pod-0", DesiredState.PAUSED)
    somebodys(daemon)
    daemon.run(minutes=8)
    daemon.engine.adopt_node("mine", "pod-0")
    daemon.wish("pod-0", DesiredState.UP)
    daemon.run(minutes=10)
    assert daemon.trains("pod-0")
    assert named(daemon) == ["mine"]
    return daemon


def somebodys(daemon: Daemon, name: str = "mine") -> None:
    spec = NodeSpec(accelerator_type="v3-32", runtime_version="tpu-ubuntu2204-base", spot=True)
    daemon.zone.world.api.create_node(f"projects/{PROJECT}/locations/{US}", name, spec, daemon.clock.true_now())


@pytest.mark.parametrize("edit", [{"tpucare-slot": "pod-1"}, {"tpucare-slot": ""}, {"tpucare-fleet": "other"}])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_slot_keeps_the_node_it_made_whatever_its_labels_say(
    daemon: Daemon, edit: dict[str, str], restarts: bool
) -> None:
    """
    A training node whose slot label was edited became the second node of the slot on the label and was deleted; without
    the label `gc --apply` deleted it. A node stays with the slot that remembers it; only the owner label can take it
    away.
    """
    daemon.care_for("pod", 2)
    daemon.run(minutes=15)
    labels = {**daemon.node_of("pod-0").labels, **edit}
    label(daemon, "pod-0-a0", {name: text for name, text in labels.items() if text})
    daemon.run(minutes=5)
    if restarts:
        daemon.restart()
        daemon.run(minutes=5)
    assert daemon.all_train()
    assert (named(daemon), daemon.engine.orphans) == (["pod-0-a0", "pod-1-a0"], {})
    assert len(daemon.told("label")) == (1 + restarts if "tpucare-slot" in edit else 0)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run(minutes=15)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a1", "pod-1-a0"]
    daemon.check()


def test_an_adopted_node_that_somebody_takes_back_is_left_alone_until_it_is_gone(adopted: Daemon) -> None:
    """
    An adopted node bears any name, and events about it (gone, taken back, connection lost) were looked up by the slot's
    name: a node that was no longer ours was still cared for. The node's key finds its track, and a node that was taken
    back holds its slot until it is gone.
    """
    label(adopted, "mine", {})
    adopted.run(minutes=1)
    assert adopted.causes()["pod-0"] is Cause.NODE_TAKEN
    adopted.zone.world.operator.preempt(full_name("mine"), adopted.clock.true_now())
    adopted.run(minutes=20)
    assert adopted.zone.states() == [NodeState.PREEMPTED.name]
    assert named(adopted) == ["mine"]
    adopted.check()
    adopted.zone.world.api.delete_node(full_name("mine"), adopted.clock.true_now())
    adopted.run(minutes=15)
    assert adopted.trains("pod-0")
    assert named(adopted) == ["pod-0-a0"]


@pytest.mark.parametrize("restarts", [False, True])
def test_an_adopted_node_that_was_taken_back_is_remembered_over_a_restart(adopted: Daemon, restarts: bool) -> None:
    """It bears any name, and was remembered in the process alone: the next one began a second run."""
    label(adopted, "mine", {})
    adopted.run(minutes=5)
    if restarts:
        adopted.restart()
    adopted.run(hours=1)
    assert adopted.causes()["pod-0"] is Cause.NODE_TAKEN
    assert [text for text in adopted.told("person") if "bears this slot's name" in text] == []
    assert named(adopted) == ["mine"]
    adopted.engine.adopt_node("mine", "pod-0")
    adopted.run(minutes=5)
    assert adopted.trains("pod-0")
    assert adopted.launcher.launches == ["mine.1"]
    adopted.check()


def take(daemon: Daemon, node: str) -> None:
    label(daemon, node, {**daemon.node_of("pod-0").labels, "tpucare-owner": "somebody"})


@pytest.mark.parametrize("restarts", [False, True])
def test_a_node_that_was_taken_and_that_one_listing_leaves_out_is_not_gone(daemon: Daemon, restarts: bool) -> None:
    """
    A node that its owner took back was forgotten and held its slot only while it was listed: one listing without it
    brought a second run beside ours. It stays in memory, in doubt, until GetNode says NOT_FOUND.
    """
    daemon.care_for("pod")
    daemon.run(minutes=15)
    take(daemon, "pod-0-a0")
    daemon.run(minutes=5)
    life = daemon.zone.world.operator.select("pod-0-a0")[0]
    listing = daemon.zone.world.state.listing(life.path.project)
    listing.hide(life.path, life.record.id)
    if restarts:
        daemon.restart()
    daemon.run(seconds=20)
    listing.show(life.record)
    daemon.run(hours=1)
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    assert daemon.causes()["pod-0"] is Cause.NODE_TAKEN
    daemon.check()
    daemon.zone.world.api.delete_node(full_name("pod-0-a0"), daemon.clock.true_now())
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    assert named(daemon) == ["pod-0-a1"]


def test_a_node_that_was_taken_outlives_down_and_apply(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    take(daemon, "pod-0-a0")
    daemon.run(minutes=5)
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(minutes=5)
    assert daemon.engine.is_over("pod-0"), "it is no business of ours"
    daemon.engine.registry.remove_slot("pod-0")
    daemon.care_for("pod")
    daemon.wish("pod-0", DesiredState.UP)
    daemon.run(minutes=15)
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    assert daemon.causes()["pod-0"] is Cause.NODE_TAKEN
    daemon.check()


def test_a_taken_node_whose_name_another_bears_by_now_is_gone(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run(minutes=15)
    take(daemon, "pod-0-a0")
    daemon.run(minutes=5)
    daemon.zone.world.api.delete_node(full_name("pod-0-a0"), daemon.clock.true_now())
    daemon.run_until(lambda: not daemon.zone.nodes("pod-0"))
    somebodys(daemon, "pod-0-a0")
    daemon.run(minutes=1)
    assert daemon.memory("pod-0").node("pod-0-a0") is None
    assert named(daemon) == ["pod-0-a0", "pod-0-a1"]


def test_an_adopted_node_that_hangs_up_is_asked_at_once(adopted: Daemon) -> None:
    adopted.run_until(lambda: adopted.clock.seconds - adopted.launcher.probes[-1] > 3)
    adopted.launcher.probes.clear()
    before = adopted.clock.seconds
    adopted.launcher.hint(adopted.node_of("pod-0").key)
    adopted.run(seconds=5)
    assert [at for at in adopted.launcher.probes if at - before <= 1]


def test_an_adopted_node_that_is_preempted_is_replaced(adopted: Daemon) -> None:
    adopted.zone.world.operator.preempt(full_name("mine"), adopted.clock.true_now())
    adopted.run(minutes=15)
    assert adopted.trains("pod-0")
    assert named(adopted) == ["pod-0-a0"]
    adopted.check("mine")


def test_a_node_that_is_given_goes_before_one_that_is_being_made(daemon: Daemon) -> None:
    """
    A slot that waited for capacity was given a node by `adopt-node`, got its own as well, and deleted the person's. No
    create begins before the label is seen, and of the two nodes the adopted one stays.
    """
    somebodys(daemon)
    daemon.care_for("other")
    daemon.run(minutes=8)
    daemon.care_for("pod")
    daemon.run(seconds=0.5)
    assert daemon.memory("pod-0").creates
    daemon.engine.adopt_node("mine", "pod-0")
    daemon.run(minutes=30)
    assert daemon.all_train()
    assert named(daemon) == ["mine", "other-0-a0"]
    daemon.check("mine", "pod-0-a0")


def test_no_create_begins_while_a_node_is_being_adopted(daemon: Daemon) -> None:
    """The slot asked for a node of its own at the same moment, which was made and deleted for nothing."""
    somebodys(daemon)
    daemon.care_for("other")
    daemon.run(minutes=8)
    daemon.care_for("pod")
    daemon.engine.adopt_node("mine", "pod-0")
    daemon.run(minutes=15)
    assert daemon.all_train()
    assert named(daemon) == ["mine", "other-0-a0"]
    assert [one["node"] for one in calls(daemon, "CreateNode")] == ["mine", "other-0-a0"]


def test_a_label_that_is_refused_holds_no_create_back(daemon: Daemon) -> None:
    somebodys(daemon)
    daemon.care_for("other")
    daemon.run(minutes=8)
    daemon.care_for("pod")
    daemon.zone.world.api.delete_node(full_name("mine"), daemon.clock.true_now())
    daemon.engine.adopt_node("mine", "pod-0")
    daemon.run(minutes=15)
    assert daemon.all_train()
    assert named(daemon) == ["other-0-a0", "pod-0-a0"]


def test_no_node_is_adopted_into_a_slot_that_has_one(daemon: Daemon) -> None:
    """The person's node would have been the second one of the slot and deleted. `adopt-node` is refused there."""
    somebodys(daemon)
    daemon.care_for("pod")
    daemon.run(minutes=15)
    with pytest.raises(ConfigError, match="pod-0 has a node, pod-0-a0"):
        daemon.engine.adopt_node("mine", "pod-0")
    daemon.run(minutes=5)
    assert named(daemon) == ["mine", "pod-0-a0"]
    assert daemon.trains("pod-0")
    daemon.check()
