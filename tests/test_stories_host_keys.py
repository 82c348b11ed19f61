"""Stories of host keys: who vouches for the machines of a node, and what is done while nobody does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.virtual.harness import Daemon
from tpucare.errors import NodeGone
from tpucare.failures import Where, classify
from tpucare.model import NodeKey

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
    calls = refuse_guest_attributes(daemon, 5, NOT_PUBLISHED)
    daemon.care_for("pod")
    daemon.run(minutes=30)
    assert daemon.trains("pod-0")
    assert daemon.told("gone") == []
    assert len(calls) < 20
    daemon.check()


def test_a_changed_host_key_is_not_trusted_because_nothing_is_published(daemon: Daemon) -> None:
    daemon.care_for("pod")
    daemon.run_until(lambda: daemon.trains("pod-0"))
    change_host_keys(daemon, "pod-0")
    refuse_guest_attributes(daemon, 5, NOT_PUBLISHED)
    daemon.run(minutes=10)
    assert "shows another host key" in daemon.why("pod-0")["pod-0"]
    assert not daemon.trains("pod-0")


def test_a_delete_that_did_not_happen_leaves_the_pins(daemon: Daemon) -> None:
    """Until the API says NOT_FOUND the node may live, and be somebody else's machine by its looks."""
    daemon.care_for("pod")
    daemon.run_until(lambda: daemon.trains("pod-0"))
    key = daemon.node_of("pod-0").key
    daemon.launcher.disconnect(key)
    change_host_keys(daemon, "pod-0")
    refuse_guest_attributes(daemon, 5, NOT_PUBLISHED)
    daemon.run(minutes=2)
    assert "shows another host key" in daemon.why("pod-0")["pod-0"]


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
