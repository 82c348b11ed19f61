"""Complaints about the way to the workers: addresses, keys, logins, routes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.kits.field import calls, named, preempt
from tests.kits.harness import PROJECT, SSH_KEY, US, Daemon
from tpucare.model.memory import DesiredState
from tpucare.planner import desired_state
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.latency import around
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.simulation.machines import SimulatedWorker

OLD_KEY = "tpucare:ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOld"
PERSON = "me:ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMe"


def path_of(node: str) -> str:
    return f"projects/my-project/locations/{US}/nodes/{node}"


@pytest.mark.parametrize("lag", [5.0, 900.0])
def test_a_reused_address_answers_for_the_wrong_node(tmp_path: Path, lag: float) -> None:
    """The address of a lost node was given to a colleague's; we went on to ask it, and worked on the colleague's."""
    lengths = {"create_slice": around(15), "boot_late": around(5), "list_lag": around(lag), "list_lag_share": 1.0}
    config = WorldConfig.calm(latencies=lengths, addresses={"network": "127.64.0.0/28"})
    daemon = Daemon(tmp_path, config=config)
    daemon.care_for("pod", 2)
    daemon.run(minutes=45)
    assert daemon.all_train()
    # Lists show the lost node and its addresses for a while, and others get them at once.
    daemon.zone.world.operator.remove("pod-0", daemon.clock.true_now())
    daemon.run(seconds=4)
    daemon.care_for("colleague", job=False)
    daemon.run(minutes=60)
    assert lag < 60 or daemon.launcher.met_strangers, "an address did lead to another machine"
    assert daemon.trains("pod-0")
    assert daemon.trains("pod-1")
    assert named(daemon) == ["colleague-0-a0", "pod-0-a1", "pod-1-a0"]
    assert sorted(daemon.launcher.launches) == ["pod-0-a0.1", "pod-0-a1.1", "pod-1-a0.1"]
    for worker in daemon.launcher.workers.values():
        assert (worker.run is None) == (worker.key.name == "colleague-0-a0"), "a run on another's machine"
    assert "colleague-0-a0" not in daemon.launcher.stops
    daemon.check()


def test_the_key_is_replaced_when_the_daemons_vm_is_rebuilt(daemon: Daemon) -> None:
    """The VM was rebuilt with a new login key; no worker let it in, and all nodes were judged dead and recreated."""
    daemon.care_for("pod", 3)
    daemon.run(minutes=15)
    daemon.kill()
    for node in named(daemon):
        theirs = NodeSpec(metadata={"ssh-keys": f"{PERSON}\n{OLD_KEY}"})
        daemon.zone.world.api.update_node(path_of(node), ("metadata",), theirs, daemon.clock.true_now())
    for worker in daemon.launcher.workers.values():
        worker.refuses = True
    daemon.clock.seconds += 60
    daemon.zone.tick()
    daemon.start()
    daemon.run(minutes=15)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a0", "pod-1-a0", "pod-2-a0"]
    assert sorted(daemon.launcher.launches) == ["pod-0-a0.1", "pod-1-a0.1", "pod-2-a0.1"], "the same runs go on"
    for record in daemon.zone.nodes():
        keys = record.spec.metadata["ssh-keys"]
        assert SSH_KEY in keys
        assert PERSON in keys, "what a person put there stays"
        assert set(record.spec.metadata) == {"ssh-keys"}, "OS Login is a matter of the create, never of an update"
    daemon.check()


def test_os_login_was_switched_on(daemon: Daemon) -> None:
    """The organisation switched OS Login on; keys in metadata count for nothing, and node after node was made."""
    daemon.launcher.key = "no key counts"
    publish = daemon.launcher.on_boot

    def boot(worker: SimulatedWorker) -> None:
        assert publish is not None
        publish(worker)
        worker.refuses = True

    daemon.launcher.on_boot = boot
    daemon.care_for("pod", 2)
    daemon.run(hours=3)
    assert named(daemon) == ["pod-0-a0", "pod-1-a0"], "another node would refuse us as well"
    assert len(calls(daemon, "CreateNode")) == 2
    assert calls(daemon, "UpdateNode") == [], "the key is there already"
    said = [event for event in daemon.events if event.kind == "person" and "enable-oslogin" in event.text]
    assert {event.slot for event in said} == {"pod-0", "pod-1"}
    assert len(said) < 10, "it is said, and not every minute"
    for worker in daemon.launcher.workers.values():
        worker.refuses = False
    daemon.run(minutes=10)
    assert daemon.all_train()
    assert named(daemon) == ["pod-0-a0", "pod-1-a0"]
    daemon.check()


def test_no_route_to_any_worker(daemon: Daemon) -> None:
    """A firewall rule was missing: nodes were created, never reached, deleted and created again for a month."""
    daemon.launcher.deaf = True
    daemon.care_for("pod", 3)
    daemon.run(hours=5)
    created = len(calls(daemon, "CreateNode"))
    assert created <= 3 * (2 + 5), "two, and then not more than one an hour"
    said = " ".join(event.text for event in daemon.events if event.kind == "person")
    assert "network" in said or "firewall" in said
    daemon.launcher.deaf = False
    for slot in ("pod-0", "pod-1", "pod-2"):
        daemon.engine.change(slot, desired_state.retry, "retry", "asked again now")
    daemon.run(minutes=90)
    assert daemon.all_train()
    assert len(named(daemon)) == 3
    daemon.check(*(f"pod-{slot}-a{number}" for slot in range(3) for number in range(60)))


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("others", [1, 0])
def test_one_address_of_a_lost_node_leads_to_a_stranger(daemon: Daemon, key: bool, others: int) -> None:
    """
    Three workers were silent and the address of the fourth led to another machine: the refused key hid that the node
    was lost, and it was never replaced. Silence beside a refused key is judged like any silence.
    """
    daemon.care_for("pod")
    daemon.care_for("other", others or 1, job=bool(others))
    daemon.run(minutes=15)
    address = daemon.launcher.of_node(PROJECT, US, "pod-0-a0")[2].address
    stranger = copy.copy(daemon.launcher.of_node(PROJECT, US, "other-0-a0")[1])
    stranger.node_id, stranger.run, stranger.refuses = 999, None, not key
    if key:
        stranger.host_key = "a stranger's"
    preempt(daemon, "pod-0", shown="never")
    if not others:
        preempt(daemon, "other-0")
        daemon.wish("other-0", DesiredState.DOWN)
    daemon.launcher.key = "no key counts there" if not key else daemon.launcher.key
    daemon.launcher._at[address] = stranger
    daemon.run(minutes=10)
    daemon.launcher.key = SSH_KEY
    daemon.run(minutes=40)
    assert daemon.trains("pod-0")
    assert [name for name in named(daemon) if name.startswith("pod")] == ["pod-0-a1"]
    daemon.check()
