"""Stories of host keys: who vouches for the machines of a node, and what is done while nobody does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kits.harness import CARE, Daemon, slots_of
from tpucare.adapters.google.classify import Where, classify
from tpucare.model.causes import Cause
from tpucare.model.errors import NodeGone
from tpucare.model.memory import DesiredState, Trust
from tpucare.model.resources import HostKeys, NodeKey
from tpucare.testbed.emulator.world.config import WorldConfig

NOT_PUBLISHED = "The resource 'hostkeys/' of type 'Guest Attribute' was not found."


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state")


def refuse_guest_attributes(daemon: Daemon, code: int, text: str) -> list[NodeKey]:
    """From now on GetGuestAttributes answers with that status; returns the calls as they come."""
    calls: list[NodeKey] = []

    def host_keys(key: NodeKey) -> Mapping[int, tuple[str, ...]]:
        calls.append(key)
        daemon.executor.waiting(0.1)
        raise classify(code, text, Where.GUEST)

    daemon.cloud.host_keys = host_keys  # type: ignore[method-assign]
    return calls


def change_host_keys(daemon: Daemon, slot: str) -> None:
    for worker in daemon.launcher.of_node(*daemon.node_of(slot).key):
        worker.host_key = "another"


def test_a_404_of_guest_attributes_says_nothing_about_the_node(daemon: Daemon) -> None:
    """
    Guest attributes that are not published answer 404 on a node that lives: the node was forgotten, listed and
    forgotten again several times a second, and never launched on. Only GetNode and DeleteNode prove that a node is
    gone.
    """
    calls = refuse_guest_attributes(daemon, 5, NOT_PUBLISHED)
    daemon.care_for("pod")
    daemon.run(minutes=30)
    assert daemon.trains("pod-0")
    assert daemon.told("gone") == []
    assert len(calls) < 20
    daemon.check()


def test_a_changed_host_key_is_not_trusted_because_nothing_is_published(daemon: Daemon) -> None:
    """
    The 404 of guest attributes made a living node count as gone, which dropped its pinned host keys, and a changed key
    was trusted. NOT_FOUND of GetGuestAttributes says "not published" and nothing else.
    """
    daemon.care_for("pod")
    daemon.run_until(lambda: daemon.trains("pod-0"))
    change_host_keys(daemon, "pod-0")
    refuse_guest_attributes(daemon, 5, NOT_PUBLISHED)
    daemon.run(minutes=10)
    assert daemon.causes()["pod-0"] is Cause.HOST_KEY_CHANGED
    assert not daemon.trains("pod-0")


def test_a_delete_that_did_not_happen_leaves_the_pins(daemon: Daemon) -> None:
    """
    The request for a delete dropped the pinned host keys; where the delete was refused, or met another node, the next
    contact trusted whatever key it met. Pins go after NOT_FOUND, never before.
    """
    daemon.care_for("pod")
    daemon.run_until(lambda: daemon.trains("pod-0"))
    key = daemon.node_of("pod-0").key
    daemon.launcher.disconnect(key)
    change_host_keys(daemon, "pod-0")
    refuse_guest_attributes(daemon, 5, NOT_PUBLISHED)
    daemon.run(minutes=2)
    assert daemon.causes()["pod-0"] is Cause.HOST_KEY_CHANGED


def test_a_delete_that_is_refused_leaves_the_pins_until_the_node_is_gone(daemon: Daemon) -> None:
    """The engine dropped them when it asked for the delete, whatever came of that."""
    daemon.care_for("pod")
    daemon.run_until(lambda: daemon.trains("pod-0"))
    key = daemon.node_of("pod-0").key

    def delete_node(key: NodeKey) -> None:
        raise classify(7, "The caller does not have permission", Where.DELETE)

    daemon.cloud.delete_node = delete_node  # type: ignore[method-assign]
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(minutes=10)
    assert daemon.told("delete")
    assert len(daemon.launcher._pins[key]) == 4
    del daemon.cloud.delete_node
    daemon.run(hours=1)
    assert daemon.engine.is_over("pod-0")
    assert key not in daemon.launcher._pins


def test_an_update_that_misses_its_node_is_a_reason_to_look(daemon: Daemon) -> None:
    """UpdateNode alone does not prove that a node is gone: it stays, is looked at, and is used."""
    daemon.care_for("pod")
    pushed: list[NodeKey] = []

    def add_ssh_key(key: NodeKey, line: str) -> None:
        pushed.append(key)
        raise NodeGone(f"Resource 'projects/p/locations/z/nodes/{key.name}' was not found", 5)

    daemon.cloud.add_ssh_key = add_ssh_key  # type: ignore[method-assign]
    daemon.run_until(lambda: len(daemon.launcher.workers) == 4)
    for worker in daemon.launcher.workers.values():
        worker.refuses_until = daemon.clock.seconds + 600
    daemon.run_until(lambda: bool(pushed))
    looks = len(daemon.zone.calls("GetNode"))
    daemon.run(seconds=8)
    assert len(daemon.zone.calls("GetNode")) == looks + 1
    daemon.run_until(lambda: daemon.trains("pod-0"))
    assert daemon.told("gone") == []
    assert len(daemon.zone.created()) == 1


# --- the policy ----------------------------------------------------------------------------------------------------


def care_for_private(daemon: Daemon, fleet: str = "pod", count: int = 1, **care: Any) -> None:
    """A fleet whose job carries a secret."""
    slots = [
        replace(slot, job=replace(slot.job, secrets=("WANDB_API_KEY",)), care=replace(CARE, **care))
        for slot in slots_of(fleet, count)
        if slot.job is not None
    ]
    daemon.care_for_slots(fleet, slots)


def launched_after(daemon: Daemon, slot: str) -> float:
    """Seconds from "all workers answer" to the launch, for the newest node of *slot*."""
    daemon.run_until(lambda: daemon.trains(slot), minutes=60)
    node = daemon.node_of(slot).name
    of_node = {event.kind: event.at for event in daemon.events if event.node == node}
    return (of_node["launch"] - of_node["answers"]).total_seconds()


def published(after: float | None, unpublished: str = "not-found") -> WorldConfig:
    return WorldConfig.calm(guest_attributes={"published_after": after, "unpublished": unpublished})


@pytest.mark.parametrize("care", [{}, {"host_keys": HostKeys.VOUCHED}], ids=["auto", "vouched"])
def test_keys_that_are_published_late_are_waited_for(tmp_path: Path, care: dict[str, Any]) -> None:
    daemon = Daemon(tmp_path / "state", config=published(40))
    care_for_private(daemon, **care)
    assert 25 < launched_after(daemon, "pod-0") < 60
    assert len(daemon.zone.calls("GetGuestAttributes")) <= 6
    assert daemon.told("host-keys") == daemon.told("person") == []
    assert [node.trust for node in daemon.memory("pod-0").nodes] == [Trust.VOUCHED]
    daemon.check()


@pytest.mark.parametrize("unpublished", ["empty", "not-found"])
def test_where_nothing_is_published_the_first_node_waits_two_minutes_and_later_ones_ten_seconds(
    tmp_path: Path, unpublished: str
) -> None:
    daemon = Daemon(tmp_path / "state", config=published(None, unpublished))
    care_for_private(daemon)
    assert 115 < launched_after(daemon, "pod-0") < 135
    assert len(daemon.zone.calls("GetGuestAttributes")) <= 13
    (said,) = daemon.told("host-keys")
    assert "pod-0-a0" in said
    assert "not published within 2 min" in said
    daemon.restart()
    care_for_private(daemon, "other")
    assert 5 < launched_after(daemon, "other-0") < 25, "what one slot learned, all know, also after a restart"
    daemon.run(hours=25)
    daemon.zone.world.operator.preempt("pod-0", daemon.clock.true_now())
    daemon.run_until(lambda: daemon.memory("pod-0").attempts == 2 and daemon.trains("pod-0"))
    assert launched_after(daemon, "pod-0") > 115, "a day later it is found out anew"
    assert daemon.told("person") == []
    daemon.check()


def test_vouched_fails_closed_until_a_person_has_mended_it(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "state", config=published(None))
    care_for_private(daemon, host_keys=HostKeys.VOUCHED)
    daemon.run(hours=2)
    assert daemon.launcher.launches == []
    (said,) = daemon.told("person")
    assert "care.host_keys is vouched" in said
    daemon.zone.world.operator.reconfigure(published(0), daemon.clock.true_now())
    daemon.run_until(lambda: daemon.trains("pod-0"), minutes=3)


def test_who_may_not_read_guest_attributes_trusts_on_first_use_at_once(tmp_path: Path) -> None:
    access = {"denied_permissions": ["tpu.nodes.getGuestAttributes"]}
    daemon = Daemon(tmp_path / "state", config=WorldConfig.calm(access=access))
    care_for_private(daemon)
    assert launched_after(daemon, "pod-0") < 5
    (said,) = daemon.told("host-keys")
    assert "may not be read" in said
    care_for_private(daemon, "strict", host_keys=HostKeys.VOUCHED)
    daemon.run(minutes=20)
    assert not daemon.trains("strict-0")


def test_no_answer_is_not_taken_for_a_no_and_a_person_is_told(daemon: Daemon) -> None:
    """
    A failed call for guest attributes counted as "nothing published", so secrets went to the first machine that
    answered; an attacker between daemon and node can make that call fail. Only "nothing published" and "not permitted"
    can end in trust on first use, never a missing answer.
    """
    calls = refuse_guest_attributes(daemon, 14, "The service is currently unavailable.")
    care_for_private(daemon)
    daemon.care_for("public")
    daemon.run(hours=1)
    assert daemon.trains("public-0"), "nothing private is told by it"
    assert [token for token in daemon.launcher.launches if token.startswith("pod")] == []
    (said,) = daemon.told("person")
    assert "no answer" in said
    assert len(calls) < 400
    del daemon.cloud.host_keys
    daemon.run_until(lambda: daemon.trains("pod-0"), minutes=1)
    assert daemon.told("host-keys") == []


@pytest.mark.parametrize("code", [4, 13, 8])
def test_a_transient_answer_is_asked_again_before_a_secret_travels(daemon: Daemon, code: int) -> None:
    for _ in range(9):
        daemon.zone.world.operator.fail_next(
            "GetGuestAttributes", code, "Too many requests" if code == 8 else "not now"
        )
    care_for_private(daemon)
    daemon.run_until(lambda: daemon.trains("pod-0"))
    assert [node.trust for node in daemon.memory("pod-0").nodes] == [Trust.VOUCHED]


def test_what_carries_nothing_private_begins_at_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "state", config=published(None))
    daemon.care_for("pod")
    assert launched_after(daemon, "pod-0") < 5
    slots = [replace(slot, care=replace(CARE, host_keys=HostKeys.VOUCHED)) for slot in slots_of("strict")]
    daemon.care_for_slots("strict", slots)
    daemon.run(minutes=20)
    assert not daemon.trains("strict-0")


def test_a_key_that_changes_before_the_first_launch_is_repinned_if_it_is_vouched_for(tmp_path: Path) -> None:
    """cloud-init may make new host keys after sshd has answered once; the agent then publishes these."""
    daemon = Daemon(tmp_path / "state", config=published(30))
    care_for_private(daemon)
    daemon.run_until(lambda: bool(daemon.told("answers")))
    change_host_keys(daemon, "pod-0")
    for worker in daemon.launcher.of_node(*daemon.node_of("pod-0").key):
        daemon.zone._publish(worker)
    assert launched_after(daemon, "pod-0") < 60
    assert daemon.told("person") == []


def test_a_key_that_changes_before_the_first_launch_waits_for_a_person_where_nothing_vouches(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "state", config=published(None))
    care_for_private(daemon)
    daemon.run_until(lambda: bool(daemon.told("answers")))
    change_host_keys(daemon, "pod-0")
    daemon.run(hours=3)
    assert daemon.launcher.launches == []
    (said,) = daemon.told("person")
    assert "shows another host key" in said


def test_what_was_vouched_for_is_not_asked_to_death_after_a_restart(tmp_path: Path) -> None:
    """A run that crashes under the next process is relaunched at once, though nothing is published any more."""
    daemon = Daemon(tmp_path / "state", config=published(0))
    care_for_private(daemon)
    daemon.run_until(lambda: daemon.trains("pod-0"))
    daemon.zone.world.operator.reconfigure(published(None), daemon.clock.true_now())
    daemon.restart()
    care_for_private(daemon)
    daemon.run(minutes=1)
    for worker in daemon.launcher.of_node(*daemon.node_of("pod-0").key):
        daemon.launcher.end(worker, status=1)
    daemon.run_until(lambda: len(daemon.launcher.launches) == 2 and daemon.trains("pod-0"), minutes=3)
    assert daemon.told("host-keys") == []
