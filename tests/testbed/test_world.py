"""The rules of the emulated cloud, one story or table each, in virtual time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from tpucare.model import accelerators
from tpucare.model.errors import ConfigError
from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.world.calls import CallPath
from tpucare.testbed.emulator.world.config import Capacity, Preemption, WorldConfig, load_world, parse_world
from tpucare.testbed.emulator.world.faults import Fates
from tpucare.testbed.emulator.world.life import NodeLifecycle
from tpucare.testbed.emulator.world.machine_effects import (
    AuthorizeKeys,
    Boot,
    Kill,
    MachineEffect,
    Resume,
    SetAttribute,
    Silence,
)
from tpucare.testbed.emulator.world.records import PLAIN, AcceleratorConfig, ApiError, NetworkConfig, NodePath, NodeSpec
from tpucare.testbed.emulator.world.state import State
from tpucare.testbed.emulator.world.world import World

START = datetime(2026, 11, 1, tzinfo=UTC)
ZONE = "us-central1-a"
OTHER_ZONE = "europe-west4-a"
PARENT = f"projects/p/locations/{ZONE}"
EVERYWHERE = "projects/p/locations/-"
RUNTIME = "tpu-ubuntu2204-base"


def at(**parts: float) -> datetime:
    return START + timedelta(**parts)


def name(node: str, zone: str = ZONE) -> str:
    return f"projects/p/locations/{zone}/nodes/{node}"


def spec(type: str = "v3-8", **changes: Any) -> NodeSpec:
    return NodeSpec(**{"accelerator_type": type, "runtime_version": RUNTIME, "spot": True, **changes})


def calm(**changes: Any) -> World:
    zones = {zone: {"accelerators": ["*"]} for zone in (ZONE, OTHER_ZONE)}
    return World(WorldConfig.calm(**{"zones": zones, **changes}), seed=1, start=START)


@pytest.fixture
def world() -> World:
    return calm()


def refusal(call: Any, *args: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args)
    return caught.value


def kinds(effects: list[MachineEffect]) -> Counter[str]:
    return Counter(type(effect).__name__ for effect in effects)


# --- determinism -------------------------------------------------------------------------------------------------


LIVELY = """
zones:
  us-central1-a:
    capacity:
      - {type: v2, unit: hosts, process: {maximum: 24, initial: 16, births: 6, deaths: 3, bursts: 0.2}}
      - {type: v3, unit: hosts, process: {maximum: 16, initial: 8, births: 4, deaths: 2, bursts: 0.2}}
      - {type: v5e, trace: gcp-h100-2025/us-central1-a}
  europe-west4-a:
    capacity:
      - {type: v2, unit: hosts, process: {maximum: 16, initial: 8, births: 4, deaths: 2, bursts: 0.1}}
      - {type: v3, unit: hosts, process: {maximum: 64, initial: 32, births: 8, deaths: 4, bursts: 0.1}}
      - {type: v6e, trace: gcp-h100-2025/europe-west1-c}
faults:
  calls: {unavailable: 0.002, internal: 0.001}
  methods:
    CreateNode: {unavailable: 0.005, lost_before: 0.002, lost_after: 0.005}
    DeleteNode: {unavailable: 0.005, lost_before: 0.002, lost_after: 0.005}
  delete_stuck: 0.01
  failed_create_left: 0.02
  missing_worker: 0.02
preemption: {never_shown: 0.01, shown_otherwise: 0.02}
health: {flap_every: 1d}
"""
"""Two zones where small spot slices come and go, calls fail, and deletes hang."""


def lively_history(seed: int) -> str:
    world = World(parse_world(LIVELY), seed=seed, start=START)
    for minute in range(0, 36 * 60, 7):
        now, zone = at(minutes=minute), (ZONE, OTHER_ZONE)[minute % 2]
        calls: dict[str, Callable[..., object]] = {
            "CreateNode": partial(world.api.create_node, z_parent(zone), f"n-{minute}", spec(), now),
            "ListNodes": partial(world.api.list_nodes, EVERYWHERE, 0, "", now),
            "DeleteNode": partial(world.api.delete_node, name(f"n-{minute - 70}", zone), now),
        }
        for method, call in calls.items():
            fate = world.calls.fate(method, z_parent(zone), now)
            with suppress(ApiError):
                _ = call(fate) if fate.applied else None
    effects = [repr(effect) for effect in world.take_effects()]
    return json.dumps([list(world.audit), effects])


def z_parent(zone: str) -> str:
    return f"projects/p/locations/{zone}"


def test_the_same_seed_and_calls_give_the_same_history_byte_for_byte() -> None:
    first = lively_history(3)
    assert first == lively_history(3)
    assert first != lively_history(4)
    assert '"preempted"' in first


def test_time_does_not_run_backwards(world: World) -> None:
    world.advance(at(minutes=5))
    world.api.create_node(PARENT, "a", spec(), at(minutes=1))
    assert world.nodes()[0].create_time == at(minutes=5)
    assert world.now == at(minutes=5)


def test_next_event_leads_through_a_whole_life(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    seen = 0
    while (due := world.next_event_at()) is not None:
        world.advance(due)
        seen += 1
    assert world.nodes()[0].state == NodeState.READY
    assert 5 <= seen <= 20


# --- the course of a create --------------------------------------------------------------------------------------


def test_a_single_host_from_create_to_login(world: World) -> None:
    operation = world.api.create_node(PARENT, "a", spec(metadata={"ssh-keys": "me:ssh-ed25519 AAAA"}), START)
    assert not operation.done
    assert refusal(world.api.get_node, name("a"), START).code == 5
    seen = world.api.get_node(name("a"), at(seconds=1))
    assert (seen.state, seen.endpoints, seen.health) == (NodeState.CREATING, (), 0)
    assert len(world.api.get_node(name("a"), at(seconds=70)).endpoints) == 1
    ready = world.api.get_node(name("a"), at(seconds=100))
    assert (ready.state, ready.health) == (NodeState.READY, Health.UNSPECIFIED)
    assert not world.api.get_operation(operation.name, at(seconds=100)).done
    assert world.take_effects() == []
    done = world.api.get_operation(operation.name, at(seconds=102))
    assert done.done
    assert done.response == ready
    world.advance(at(seconds=115))
    (boot,) = world.take_effects()
    assert isinstance(boot, Boot)
    assert boot.address == ready.endpoints[0].internal
    assert boot.attributes["instance/attributes/ssh-keys"] == "me:ssh-ed25519 AAAA"
    assert boot.attributes["instance/attributes/accelerator-type"] == "v3-8"
    assert boot.hostname.startswith("t1v-n-")
    assert world.api.get_node(name("a"), at(seconds=200)).health == Health.HEALTHY


def test_a_slice_boots_before_ready_one_host_after_the_other() -> None:
    world = calm(latencies={"create_slice": 240, "boot_early_share": 1.0, "boot_skew": 60, "operation_done": 30})
    world.api.create_node(PARENT, "a", spec("v3-32"), START)
    world.advance(at(seconds=130))
    assert len(world.api.get_node(name("a"), at(seconds=130)).endpoints) == 1
    world.advance(at(seconds=239))
    boots = [effect for effect in world.take_effects() if isinstance(effect, Boot)]
    assert len(boots) == 4
    assert len({boot.at for boot in boots}) == 4
    assert len({boot.peers for boot in boots}) == 1
    assert world.api.get_node(name("a"), at(seconds=239)).state == NodeState.CREATING
    assert [pair.external for pair in world.api.get_node(name("a"), at(seconds=241)).endpoints] == [""] * 4


def test_an_operation_may_stay_open_long_after_ready() -> None:
    world = calm(latencies={"operation_lingers_share": 1.0, "operation_lingers": "2h"})
    operation = world.api.create_node(PARENT, "a", spec(), START)
    assert not world.api.get_operation(operation.name, at(hours=2)).done
    assert world.api.get_operation(operation.name, at(hours=3)).done


def test_external_addresses_only_on_request(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(network=NetworkConfig(enable_external_ips=True)), START)
    (pair,) = world.api.get_node(name("a"), at(minutes=5)).endpoints
    assert pair.external == pair.internal
    assert pair.internal.startswith("127.64.")


def test_addresses_are_unique_and_soon_used_again(world: World) -> None:
    for node in ("a", "b"):
        world.api.create_node(PARENT, node, spec("v3-32"), START)
    world.advance(at(minutes=10))
    of = {node.path.node_id: [pair.internal for pair in node.endpoints] for node in world.nodes()}
    assert len({address for addresses in of.values() for address in addresses}) == 8
    world.operator.remove("a", at(minutes=11))
    world.api.create_node(PARENT, "c", spec("v3-32"), at(minutes=12))
    world.advance(at(minutes=20))
    assert [pair.internal for pair in world.api.get_node(name("c"), at(minutes=20)).endpoints] == of["a"]


@pytest.mark.parametrize("worker", [-1, 1])
def test_a_missing_worker_never_comes_up(world: World, worker: int) -> None:
    world.operator.miss_worker(worker)
    world.api.create_node(PARENT, "a", spec("v3-32"), START)
    world.api.create_node(PARENT, "b", spec("v3-32"), START)
    world.advance(at(hours=5))
    booted = Counter(effect.path.node_id for effect in world.take_effects() if isinstance(effect, Boot))
    assert booted == {"a": 3, "b": 4}
    node = world.api.get_node(name("a"), at(hours=5))
    assert node.state == NodeState.READY
    assert [bool(pair.internal) for pair in node.endpoints].index(False) == worker % 4


def test_large_slices_lack_a_worker_by_chance() -> None:
    world = calm(faults={"missing_worker": 1.0, "missing_worker_hosts": 4})
    world.api.create_node(PARENT, "a", spec("v3-32"), START)
    world.api.create_node(PARENT, "b", spec(), START)
    world.advance(at(hours=1))
    assert kinds(world.take_effects()) == {"Boot": 4}


def test_an_internal_error_ends_the_operation_and_the_node() -> None:
    world = calm(zones={ZONE: {"create_errors": 1.0}})
    operation = world.api.create_node(PARENT, "a", spec(), START)
    assert world.api.get_operation(operation.name, at(minutes=1)).error == (13, "an internal error has occurred")
    assert refusal(world.api.get_node, name("a"), at(minutes=1)).code == 5


def test_a_failed_create_may_leave_a_dead_node_that_must_be_deleted() -> None:
    world = calm(faults={"failed_create_left": 1.0})
    world.operator.fail_next_create(8, "There is no more capacity", zone=OTHER_ZONE)
    world.api.create_node(PARENT, "a", spec(), START)
    operation = world.api.create_node(z_parent(OTHER_ZONE), "b", spec(), START)
    world.advance(at(hours=1))
    assert world.api.get_operation(operation.name, at(hours=1)).error == (8, "There is no more capacity")
    left = world.api.get_node(name("b", OTHER_ZONE), at(hours=1))
    assert left.state in (NodeState.CREATING, NodeState.TERMINATED, NodeState.UNKNOWN)
    assert world.api.get_node(name("a"), at(hours=1)).state == NodeState.READY
    world.api.delete_node(left.name, at(hours=1))
    assert refusal(world.api.get_node, left.name, at(hours=2)).code == 5
    assert all(effect.path.node_id != "b" for effect in world.take_effects())


# --- what a create is refused for --------------------------------------------------------------------------------

ACCESS = {"service_accounts": ["ok@p.iam"], "projects": ["p"]}
FULL = {
    ZONE: {"denied_types": ["v3-64"]},
    OTHER_ZONE: {"supported": False},
    "us-west4-a": {"accelerators": ["v5litepod-4"]},
}


@pytest.mark.parametrize(
    ("where", "node", "asked", "code", "text"),
    [
        (PARENT, "Bad_Name", spec(), 3, "Invalid node id"),
        (PARENT, "a" * 41, spec(), 3, "Invalid node id"),
        (PARENT, "a", spec(runtime_version=""), 3, "runtime_version is required"),
        (PARENT, "a", spec(runtime_version="tpu-ubuntu1804"), 3, 'runtime version "tpu-ubuntu1804" could not be found'),
        (PARENT, "a", spec(preemptible=True), 3, "At most one of"),
        (PARENT, "a", spec(""), 3, "Exactly one of"),
        (PARENT, "a", spec("v3-7"), 3, 'accelerator type, "v3-7", could not be found'),
        (PARENT, "a", spec("v6e-1"), 3, "the accelerator v6e-1 was not found in zone us-central1-a"),
        (PARENT, "a", spec("v3-64"), 7, 'for accelerator type "v3-64" in location us-central1-a'),
        (PARENT, "a", spec(labels={"Upper": "x"}), 3, "Invalid label"),
        (PARENT, "a", spec(labels={f"l{n}": "" for n in range(65)}), 3, "64 labels"),
        (PARENT, "a", spec(description="x" * 513), 3, "512 characters"),
        (PARENT, "a", spec(service_account="no@p.iam"), 7, "service account 'no@p.iam'"),
        (z_parent(OTHER_ZONE), "a", spec(), 3, 'The requested zone "europe-west4-a" is not supported.'),
        (z_parent("us-east1-x"), "a", spec(), 7, "Permission denied on 'locations/us-east1-x' (or it may not exist)"),
        ("projects/q/locations/us-central1-a", "a", spec(), 7, "Permission 'tpu.nodes.create' denied on 'projects/q/"),
        (EVERYWHERE, "a", spec(), 3, "one zone"),
        ("projects/p", "a", spec(), 3, "Invalid parent"),
    ],
)
def test_a_create_is_refused_in_the_call(where: str, node: str, asked: NodeSpec, code: int, text: str) -> None:
    world = calm(zones=FULL, access=ACCESS)
    error = refusal(world.api.create_node, where, node, asked, START)
    assert (error.code, text in error.message) == (code, True), error.message
    assert world.nodes() == []
    assert world.audit[-1]["code"] == code


def test_more_refusals_by_configuration() -> None:
    trial = calm(access={"free_trial": True})
    assert "free-trial billing account" in refusal(trial.api.create_node, PARENT, "a", spec(), START).message
    blind = calm(access={"denied_permissions": ["tpu.nodes.list", "tpu.nodes.getGuestAttributes"]})
    error = refusal(blind.api.list_nodes, EVERYWHERE, 0, "", START)
    assert (error.code, error.message.split(" [")[0]) == (
        7,
        "Permission 'tpu.nodes.list' denied on 'projects/p/locations/-'",
    )
    assert refusal(blind.api.guest_attributes, name("a"), "", (), START).code == 7
    assert refusal(blind.api.list_nodes, z_parent("nowhere-1-a"), 0, "", START).code == 7
    closed = refusal(calm().api.get_node, name("a", "nowhere-1-a"), START)
    assert closed.reason == "LOCATION_POLICY_VIOLATED"


def test_a_type_may_be_asked_for_by_generation_and_topology(world: World) -> None:
    asked = spec("", accelerator_config=AcceleratorConfig(4, "4x4"))
    world.api.create_node(PARENT, "a", asked, START)
    assert world.api.get_node(name("a"), at(minutes=1)).spec.accelerator_type == "v3-32"
    wrong = spec("", accelerator_config=AcceleratorConfig(4, "9x9"))
    assert refusal(world.api.create_node, PARENT, "b", wrong, START).code == 3
    both = spec("v3-8", accelerator_config=AcceleratorConfig(4, "4x4"))
    assert refusal(world.api.create_node, PARENT, "b", both, START).code == 3


@pytest.mark.parametrize("minutes", [0, 1, 30, 61, 65])
def test_a_name_is_taken_in_every_state(world: World, minutes: float) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.advance(at(minutes=min(minutes, 59)))
    if minutes > 60:
        world.operator.preempt("a", at(minutes=60))
    if minutes > 64:
        world.api.delete_node(name("a"), at(minutes=minutes))
    error = refusal(world.api.create_node, PARENT, "a", spec(), at(minutes=minutes))
    assert (error.code, error.resource) == (6, name("a"))
    assert "already exists" in error.message


QUOTA = [
    {"generation": "v3", "region": "us-central1", "limit": 8},
    {"generation": "v3", "zone": ZONE, "limit": 4},
    {"generation": "v2", "zone": ZONE, "limit": 0, "form": "exhausted", "id": "TPUV2sPreemptible"},
    {"tier": "on-demand", "types": ["v3-8"], "zone": ZONE, "limit": 8, "unit": "cores"},
]


def test_quota_is_refused_in_the_call_and_counts_dead_nodes() -> None:
    world = calm(quotas=QUOTA)
    world.api.create_node(PARENT, "a", spec(), START)
    error = refusal(world.api.create_node, PARENT, "b", spec(preemptible=True, spot=False), START)
    assert error.code == 8
    assert error.quota is not None
    assert error.message.startswith(
        "Quota limit 'TPUV3PreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 4 in zone us-central1-a."
    )
    two = refusal(world.api.create_node, PARENT, "b", spec("v3-32"), START)
    assert "'TPUV3PreemptiblePerProjectPerRegionForTPUAPI,TPUV3PreemptiblePerProjectPerZoneForTPUAPI'" in two.message
    assert "Limit: 8,4 in region us-central1,zone us-central1-a." in two.message
    other = refusal(world.api.create_node, PARENT, "b", spec("v2-8"), START)
    assert other.message.startswith("Quota 'TPUV2sPreemptible' exhausted. Limit 0 in zone us-central1-a")
    world.operator.preempt("a", at(hours=1))
    assert refusal(world.api.create_node, PARENT, "b", spec(), at(hours=2)).code == 8
    world.api.delete_node(name("a"), at(hours=2))
    assert refusal(world.api.create_node, PARENT, "b", spec(), at(hours=2, seconds=59)).code == 8
    world.api.create_node(PARENT, "b", spec(), at(hours=2, seconds=61))


def test_quota_of_other_tiers_zones_and_projects_is_apart() -> None:
    world = calm(quotas=QUOTA)
    world.api.create_node(PARENT, "a", spec(), START)
    world.api.create_node(PARENT, "od", spec(spot=False), START)
    assert refusal(world.api.create_node, PARENT, "od2", spec(spot=False), START).code == 8
    world.api.create_node(z_parent(OTHER_ZONE), "a", spec(), START)
    world.api.create_node(f"projects/q/locations/{ZONE}", "a", spec(), START)
    assert len(world.nodes()) == 4


def test_the_rate_of_creates_and_deletes_is_limited_per_project() -> None:
    world = calm(rates={"create": 3, "delete": 1})
    for number in range(3):
        world.api.create_node(PARENT, f"n-{number}", spec(), at(seconds=number))
    error = refusal(world.api.create_node, PARENT, "late", spec(), at(seconds=59))
    assert error.code == 8
    assert "Maximum number of CreateNode requests per minute" in error.message
    world.api.create_node("projects/q/locations/us-central1-a", "other", spec(), at(seconds=59))
    world.api.create_node(PARENT, "late", spec(), at(seconds=60))
    world.api.delete_node(name("late"), at(minutes=5))
    assert "DeleteNode requests per minute" in refusal(world.api.delete_node, name("n-1"), at(minutes=5)).message


# --- deletion ------------------------------------------------------------------------------------------------------


def test_a_delete_takes_time_and_ends_in_404(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.advance(at(minutes=5))
    world.take_effects()
    operation = world.api.delete_node(name("a"), at(minutes=5))
    assert world.api.get_node(name("a"), at(minutes=5)).state == NodeState.DELETING
    world.advance(at(minutes=5, seconds=11))
    assert world.take_effects() == []
    world.advance(at(minutes=5, seconds=13))
    assert kinds(world.take_effects()) == {"Kill": 1}
    assert not world.api.get_operation(operation.name, at(minutes=5, seconds=59)).done
    assert refusal(world.api.get_node, name("a"), at(minutes=6)).code == 5
    ended = world.api.get_operation(operation.name, at(minutes=6))
    assert (ended.done, ended.error, ended.response) == (True, None, None)
    error = refusal(world.api.delete_node, name("a"), at(minutes=7))
    assert (error.code, error.resource) == (5, name("a"))
    assert error.message.startswith(f"Resource '{name('a')}' was not found [EID: 0x")


def test_a_delete_while_creating_ends_the_create(world: World) -> None:
    create = world.api.create_node(PARENT, "a", spec(), START)
    world.api.delete_node(name("a"), at(seconds=30))
    ended = world.api.get_operation(create.name, at(seconds=30))
    assert ended.error is not None
    assert ended.error[0] == 1
    world.advance(at(hours=1))
    assert world.nodes() == []
    assert kinds(world.take_effects()) == {}


def test_a_second_delete_is_answered_in_each_way_that_was_ever_seen() -> None:
    world = calm(faults={"repeated_delete": [0, 9, 10]})
    world.api.create_node(PARENT, "a", spec(), START)
    world.api.delete_node(name("a"), at(seconds=1))
    codes = set()
    for _ in range(30):
        try:
            world.api.delete_node(name("a"), at(seconds=2))
            codes.add(0)
        except ApiError as error:
            codes.add(error.code)
    assert codes == {0, 9, 10}


def test_a_stuck_delete_needs_repeating(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.operator.stick_deleting("a", START, repeats=2)
    operation = world.api.delete_node(name("a"), at(minutes=5))
    assert world.api.get_node(name("a"), at(hours=5)).state == NodeState.DELETING
    for hour in (6, 7):
        assert world.api.get_node(name("a"), at(hours=hour)).state == NodeState.DELETING
        world.api.delete_node(name("a"), at(hours=hour))
    assert refusal(world.api.get_node, name("a"), at(hours=8)).code == 5
    assert world.api.get_operation(operation.name, at(hours=8)).done


def test_deletes_get_stuck_by_chance() -> None:
    world = calm(faults={"delete_stuck": 1.0})
    world.api.create_node(PARENT, "a", spec(), START)
    world.api.delete_node(name("a"), at(minutes=5))
    assert world.api.get_node(name("a"), at(days=1)).state == NodeState.DELETING


# --- preemption ----------------------------------------------------------------------------------------------------


def test_workers_die_first_and_the_api_shows_it_later(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), START)
    world.api.create_node(PARENT, "pod-10-a1", spec(), START)
    world.advance(at(minutes=10))
    world.take_effects()
    assert world.operator.preempt("pod-1", at(minutes=10)) == []
    assert world.operator.preempt("pod-0", at(minutes=10)) == ["pod-0-a1"]
    (kill,) = world.take_effects()
    assert kill == Kill(at(minutes=10), kill.path, world.nodes()[0].id)
    between = world.api.get_node(name("pod-0-a1"), at(minutes=10, seconds=29))
    assert (between.state, between.health) == (NodeState.READY, Health.HEALTHY)
    shown = world.api.get_node(name("pod-0-a1"), at(minutes=10, seconds=30))
    assert shown.state == NodeState.PREEMPTED
    assert shown.endpoints == between.endpoints
    assert world.api.get_node(name("pod-0-a1"), at(days=30)).state == NodeState.PREEMPTED
    assert world.operator.preempt("pod-0", at(days=30)) == []


def test_a_silent_worker_runs_on_until_just_before_it_is_shown(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.advance(at(minutes=10))
    world.take_effects()
    world.operator.preempt("a", at(minutes=10), silent=True, visible_after=timedelta(minutes=3))
    assert kinds(world.take_effects()) == {"Silence": 1}
    world.advance(at(minutes=12))
    assert world.take_effects() == []
    assert world.api.get_node(name("a"), at(minutes=13)).state == NodeState.PREEMPTED
    assert kinds(world.take_effects()) == {"Kill": 1}


def test_a_notice_comes_before_death(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.advance(at(minutes=10))
    world.take_effects()
    world.operator.preempt("a", at(minutes=10), notice=timedelta(seconds=20))
    world.advance(at(minutes=12))
    told, kill = world.take_effects()
    assert isinstance(told, SetAttribute)
    assert (told.name, told.value, told.at) == ("instance/preempted", "TRUE", at(minutes=10))
    assert isinstance(kill, Kill)
    assert kill.at == at(minutes=10, seconds=20)


@pytest.mark.parametrize(("shown", "want"), [("never", 2), (6, 6), (12, 12), ("gone", None), (77, 77)], ids=str)
def test_a_preemption_is_not_always_shown_as_such(world: World, shown: int | str, want: int | None) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.operator.preempt("a", at(minutes=10), shown=shown)
    world.advance(at(hours=10))
    assert [node.state for node in world.nodes()] == ([] if want is None else [want])
    assert kinds(world.take_effects()) == {"Boot": 1, "Kill": 1}


@pytest.mark.parametrize("silent", [True, False])
def test_preempted_while_creating(world: World, silent: bool) -> None:
    operation = world.api.create_node(PARENT, "a", spec("v3-32"), START)
    world.operator.preempt("a", at(seconds=60), silent=silent, notice=timedelta(seconds=5))
    world.advance(at(hours=1))
    assert world.nodes()[0].state == NodeState.PREEMPTED
    error = world.api.get_operation(operation.name, at(hours=1)).error
    assert error is not None
    assert error[0] == 3
    assert error[1].endswith("is not supported while in state PREEMPTED")
    assert world.take_effects() == []


def test_a_burst_spreads_over_its_length_and_spares_other_fleets(world: World) -> None:
    for number in range(30):
        world.api.create_node(PARENT, f"pod-{number}-a1", spec(), START)
    world.api.create_node(PARENT, "other-0-a1", spec(), START)
    world.advance(at(minutes=10))
    assert len(world.operator.preempt("pod", at(minutes=10), burst=timedelta(minutes=2))) == 30
    world.advance(at(minutes=12))
    deaths = {effect.at for effect in world.take_effects() if isinstance(effect, Kill)}
    assert len(deaths) == 30
    assert world.api.get_node(name("other-0-a1"), at(hours=1)).state == NodeState.READY


@pytest.mark.parametrize(
    ("tier", "want"),
    [({"preemptible": True}, NodeState.TERMINATED), ({"spot": True}, NodeState.READY), ({}, NodeState.READY)],
)
def test_only_preemptible_nodes_end_after_24_hours(world: World, tier: dict[str, Any], want: NodeState) -> None:
    world.api.create_node(PARENT, "a", spec(**{"spot": False, **tier}), START)
    assert world.api.get_node(name("a"), at(hours=24)).state == NodeState.READY
    assert world.api.get_node(name("a"), at(hours=24, seconds=101)).state == want


def test_spot_nodes_may_have_a_lifetime() -> None:
    world = calm(preemption={"lifetime": "10m"})
    world.api.create_node(PARENT, "a", spec(), START)
    world.api.create_node(PARENT, "b", spec(spot=False), START)
    world.advance(at(hours=1))
    assert [node.state for node in world.nodes()] == [NodeState.PREEMPTED, NodeState.READY]


def test_preemptions_by_themselves_are_sometimes_silent_noticed_or_hidden() -> None:
    world = calm(
        preemption={
            "lifetime": {"median": "1h", "p95": "3h"},
            "notice": "20s",
            "silent_share": 0.5,
            "never_shown": 0.2,
            "shown_otherwise": 0.5,
        },
        rates={"create": None},
    )
    for number in range(200):
        world.api.create_node(PARENT, f"n-{number}", spec(), START)
    world.advance(at(days=2))
    seen = kinds(world.take_effects())
    assert seen["Kill"] == seen["SetAttribute"] == 200
    assert 60 < seen["Silence"] < 140
    states = Counter(node.state for node in world.nodes())
    assert set(states) == {NodeState.READY, NodeState.PREEMPTED, NodeState.REPAIRING, NodeState.TERMINATED}
    assert len(world.nodes()) < 200


def test_one_worker_of_a_slice_dies_or_falls_silent_and_returns(world: World) -> None:
    world.api.create_node(PARENT, "a", spec("v3-32"), START)
    world.advance(at(minutes=10))
    world.take_effects()
    world.operator.lose_worker("a", 2, at(minutes=10))
    world.operator.lose_worker("a", 3, at(minutes=10), silent=True)
    assert world.operator.lose_worker("a", 9, at(minutes=10)) == []
    for worker in (2, 3):
        world.operator.restore_worker("a", worker, at(minutes=20))
    assert [(type(effect), getattr(effect, "worker", None)) for effect in world.take_effects()] == [
        (Kill, 2),
        (Silence, 3),
        (Boot, 2),
        (Resume, 3),
    ]
    assert world.api.get_node(name("a"), at(minutes=21)).state == NodeState.READY


def test_maintenance_tells_the_machines_and_may_restart_them(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.advance(at(minutes=10))
    world.take_effects()
    world.operator.maintenance("a", at(minutes=10), duration=timedelta(minutes=10), restart=True)
    assert world.api.get_node(name("a"), at(minutes=11)).health == Health.UNHEALTHY_MAINTENANCE
    assert world.api.get_node(name("a"), at(minutes=30)).health == Health.HEALTHY
    effects = world.take_effects()
    assert [type(effect) for effect in effects] == [SetAttribute, Kill, Boot, SetAttribute]
    assert isinstance(effects[2], Boot)
    assert effects[2].attributes["instance/maintenance-event"] == "TERMINATE_ON_HOST_MAINTENANCE"


def test_terminate_forget_and_any_number(world: World) -> None:
    for node in ("a", "b", "c"):
        world.api.create_node(PARENT, node, spec(), START)
    world.operator.terminate("a", at(minutes=10))
    assert world.api.get_node(name("a"), at(minutes=10)).state == NodeState.TERMINATED
    world.operator.remove(name("b"), at(minutes=10))
    assert refusal(world.api.get_node, name("b"), at(minutes=10)).code == 5
    world.operator.set_state("c", 99, at(minutes=10))
    world.operator.set_health("c", 42, at(minutes=10), "odd")
    odd = world.api.get_node(name("c"), at(minutes=10))
    assert (int(odd.state), odd.health, odd.health_description) == (99, 42, "odd")
    assert world.operator.preempt("*", at(minutes=11)) == ["c"]


def test_health_flaps_by_itself() -> None:
    world = calm(health={"flap_every": "1h", "flap_length": "5m"})
    world.api.create_node(PARENT, "a", spec(), START)
    world.advance(at(days=2))
    seen = Counter(record["health"] for record in world.audit if record.get("event") == "health")
    assert set(seen) == {0, 1, 3, 4, 5}
    assert seen[1] > 10


# --- lists ---------------------------------------------------------------------------------------------------------


def test_lists_come_in_small_pages_sorted_by_zone_and_name(world: World) -> None:
    calls = [(z_parent(zone), f"n-{number:03}") for number in range(30) for zone in (ZONE, OTHER_ZONE)]
    for parent, node in calls:
        world.api.create_node(parent, node, spec(), START)
    seen, token, pages = [], "", 0
    while pages == 0 or token:
        page = world.api.list_nodes(EVERYWHERE, 7, token, at(minutes=1))
        seen += [(node.path.zone, node.path.node_id) for node in page.nodes]
        token, pages = page.next_page_token, pages + 1
    assert pages == 9
    assert seen == sorted(seen)
    assert len(set(seen)) == 60
    assert len(world.api.list_nodes(PARENT, 0, "", at(minutes=1)).nodes) == 30
    assert world.api.list_nodes("projects/q/locations/-", 0, "", at(minutes=1)).nodes == ()
    for token in ("%%%", "bm9zbGFzaA=="):
        assert refusal(world.api.list_nodes, EVERYWHERE, 7, token, at(minutes=1)).code == 3
    assert refusal(world.api.list_nodes, EVERYWHERE, -1, "", at(minutes=1)).code == 3


def test_page_sizes_have_a_default_and_a_cap() -> None:
    world = calm(listing={"page_default": 2, "page_cap": 3}, rates={"create": None})
    for number in range(5):
        world.api.create_node(PARENT, f"n-{number}", spec(), START)
    for asked, got in ((0, 2), (1, 1), (1000, 3)):
        assert len(world.api.list_nodes(PARENT, asked, "", at(minutes=1)).nodes) == got


def test_lists_lag_behind() -> None:
    world = calm(latencies={"list_lag_share": 1.0, "list_lag": 5})
    world.api.create_node(PARENT, "a", spec(), START)
    assert world.api.get_node(name("a"), at(seconds=2)).state == NodeState.CREATING
    assert world.api.list_nodes(PARENT, 0, "", at(seconds=5)).nodes == ()
    assert len(world.api.list_nodes(PARENT, 0, "", at(seconds=6)).nodes) == 1
    world.api.delete_node(name("a"), at(minutes=5))
    assert refusal(world.api.get_node, name("a"), at(minutes=6)).code == 5
    (ghost,) = world.api.list_nodes(PARENT, 0, "", at(minutes=6, seconds=4)).nodes
    assert ghost.state == NodeState.DELETING
    world.api.create_node(PARENT, "a", spec(), at(minutes=6, seconds=4.5))
    assert world.api.list_nodes(PARENT, 0, "", at(minutes=6, seconds=6)).nodes == ()
    (new,) = world.api.list_nodes(PARENT, 0, "", at(minutes=6, seconds=20)).nodes
    assert new.id != ghost.id


def test_a_dark_zone_is_named_and_left_out(world: World) -> None:
    for zone in (ZONE, OTHER_ZONE):
        world.api.create_node(z_parent(zone), "a", spec(), START)
    world.operator.outage("zone", timedelta(minutes=5), at(minutes=10), zone=OTHER_ZONE)
    page = world.api.list_nodes(EVERYWHERE, 0, "", at(minutes=11))
    assert [node.path.zone for node in page.nodes] == [ZONE]
    assert page.unreachable == (OTHER_ZONE,)
    fate = world.calls.fate("GetNode", name("a", OTHER_ZONE), at(minutes=11))
    assert fate.error is not None
    assert fate.error.code == 14
    assert world.calls.fate("GetNode", name("a"), at(minutes=11)).error is None
    assert world.calls.fate("ListNodes", EVERYWHERE, at(minutes=11)).error is None
    page = world.api.list_nodes(EVERYWHERE, 0, "", at(minutes=16))
    assert (len(page.nodes), page.unreachable) == (2, ())


def test_ten_thousand_nodes_are_listed_quickly(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.advance(at(hours=1))
    (record,) = world.nodes()
    for number in range(9_999):
        path = record.path._replace(node_id=f"pod-{number}-a1")
        world.state.listing("p").show(replace(record, path=path, id=number))
    began = process_time()
    token, count = "", 0
    while count == 0 or token:
        page = world.api.list_nodes(EVERYWHERE, 1000, token, at(hours=1))
        token, count = page.next_page_token, count + len(page.nodes)
    assert count == 10_000
    assert process_time() - began < 0.5


# --- updates, stops, operations, attributes --------------------------------------------------------------------------


def test_an_update_is_applied_and_its_keys_work_later(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(metadata={"ssh-keys": "old"}), START)
    world.advance(at(minutes=10))
    world.take_effects()
    change = NodeSpec(metadata={"ssh-keys": "new"}, labels={"k": "v"}, network=NetworkConfig(enable_external_ips=True))
    mask = ("metadata", "network_config.enable_external_ips")
    operation = world.api.update_node(name("a"), mask, change, at(minutes=10))
    refused = refusal(world.api.update_node, name("a"), mask, change, at(minutes=10))
    assert "unable to queue the operation" in refused.message
    assert world.api.get_operation(operation.name, at(minutes=10, seconds=3)).done
    node = world.api.get_node(name("a"), at(minutes=10, seconds=3))
    assert (node.spec.metadata, node.spec.labels) == ({"ssh-keys": "new"}, {})
    assert node.endpoints[0].external == node.endpoints[0].internal
    world.advance(at(minutes=11))
    (keys,) = world.take_effects()
    assert isinstance(keys, AuthorizeKeys)
    assert (keys.ssh_keys, keys.at) == ("new", at(minutes=10, seconds=12))
    assert refusal(world.api.update_node, name("a"), ("state",), change, at(minutes=12)).code == 3
    assert refusal(world.api.update_node, name("a"), (), change, at(minutes=12)).code == 3


def test_an_update_of_a_preempted_node_fails_in_its_operation(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(), START)
    world.operator.preempt("a", at(minutes=10))
    operation = world.api.update_node(name("a"), ("labels",), NodeSpec(), at(minutes=20))
    error = world.api.get_operation(operation.name, at(minutes=21)).error
    assert error == (3, "Cloud TPU received a bad request. update is not supported while in state PREEMPTED")


def test_only_single_hosts_on_demand_are_stopped_and_started(world: World) -> None:
    world.api.create_node(PARENT, "a", spec(spot=False), START)
    world.api.create_node(PARENT, "spot", spec(), START)
    world.api.create_node(PARENT, "slice", spec("v3-32", spot=False), START)
    world.advance(at(minutes=10))
    world.take_effects()
    for node in ("spot", "slice"):
        assert refusal(world.api.stop_node, name(node), at(minutes=10)).code == 9
    assert refusal(world.api.start_node, name("a"), at(minutes=10)).code == 9
    world.api.stop_node(name("a"), at(minutes=10))
    assert world.api.get_node(name("a"), at(minutes=10)).state == NodeState.STOPPING
    assert world.api.get_node(name("a"), at(minutes=12)).state == NodeState.STOPPED
    operation = world.api.start_node(name("a"), at(minutes=12))
    assert world.api.get_node(name("a"), at(minutes=12)).state == NodeState.STARTING
    assert world.api.get_node(name("a"), at(minutes=14)).state == NodeState.READY
    assert world.api.get_operation(operation.name, at(minutes=14)).done
    assert kinds(world.take_effects()) == {"Kill": 1, "Boot": 1}


def test_operations_are_listed_cancelled_in_vain_and_forgotten(world: World) -> None:
    operation = world.api.create_node(PARENT, "a", spec(), START)
    assert operation.name.startswith(f"{PARENT}/operations/operation-1793491200000-")
    world.api.create_node(z_parent(OTHER_ZONE), "a", spec(), START)
    world.api.cancel_operation(operation.name, at(seconds=1))
    assert world.api.get_operation(operation.name, at(seconds=1)).cancel_requested
    assert len(world.api.list_operations(EVERYWHERE, at(seconds=1))) == 2
    assert [one.name for one in world.api.list_operations(PARENT, at(seconds=1))] == [operation.name]
    assert world.api.get_node(name("a"), at(minutes=10)).state == NodeState.READY
    assert world.api.get_operation(operation.name, at(days=2)).done
    assert refusal(world.api.get_operation, operation.name, at(days=4)).code == 5
    other = world.api.create_node(PARENT, "b", spec(), at(days=4))
    world.api.delete_operation(other.name, at(days=4))
    assert refusal(world.api.get_operation, other.name, at(days=4)).code == 5
    assert world.api.get_node(name("b"), at(days=5)).state == NodeState.READY


def test_guest_attributes_hold_what_machines_report(world: World) -> None:
    world.api.create_node(PARENT, "a", spec("v3-32"), START)
    for worker in (0, 2):
        world.operator.set_guest_attribute(name("a"), worker, "hostkeys", "ssh-ed25519", f"key{worker}")
    world.operator.set_guest_attribute(name("a"), 0, "other", "x", "y")
    world.operator.set_guest_attribute(name("gone"), 0, "other", "x", "y")
    keys = world.api.guest_attributes(name("a"), "hostkeys/", (), at(minutes=1))
    assert {worker: [one.value for one in found] for worker, found in keys.items()} == {
        0: ["key0"],
        1: [],
        2: ["key2"],
        3: [],
    }
    assert world.api.guest_attributes(name("a"), "hostkeys/ssh-rsa", ("0",), at(minutes=1)) == {0: ()}
    assert len(world.api.guest_attributes(name("a"), "", ("0",), at(minutes=1))[0]) == 2
    assert refusal(world.api.guest_attributes, name("gone"), "", (), at(minutes=1)).code == 5


def test_host_keys_are_published_some_time_after_sshd_or_never() -> None:
    for after, unpublished in ((30, "empty"), (30, "not-found"), (None, "not-found")):
        world = calm(guest_attributes={"published_after": after, "unpublished": unpublished})
        world.api.create_node(PARENT, "a", spec("v3-8"), START)
        world.api.get_node(name("a"), at(minutes=5))
        world.operator.set_guest_attribute(name("a"), 0, "hostkeys", "ssh-ed25519", "key")
        asked = (world.api.guest_attributes, name("a"), "hostkeys/", ())
        if unpublished == "empty":
            assert world.api.guest_attributes(*asked[1:], at(minutes=5, seconds=29)) == {0: ()}
        else:
            assert "The resource 'hostkeys/'" in refusal(*asked, at(minutes=5, seconds=29)).message
        if after is None:
            assert refusal(*asked, at(hours=9)).code == 5
        else:
            assert world.api.guest_attributes(*asked[1:], at(minutes=5, seconds=30))[0][0].value == "key"


def test_what_a_zone_offers() -> None:
    world = calm(zones={ZONE: {}, "us-west4-a": {"accelerators": ["v5litepod-4"]}, "mars-1-a": {}})
    assert world.api.locations() == ["mars-1-a", ZONE, "us-west4-a"]
    assert world.api.accelerator_types("us-west4-a") == ["v5litepod-4"]
    assert world.api.runtime_versions("us-west4-a") == ["v2-alpha-tpuv5-lite"]
    assert "v3-8" in world.api.accelerator_types(ZONE)
    assert "v6e-1" not in world.api.accelerator_types(ZONE)
    assert "v6e-1" in world.api.accelerator_types("mars-1-a")
    assert refusal(world.api.accelerator_types, "nowhere").code == 7
    assert refusal(world.api.runtime_versions, "nowhere").code == 7


# --- fates -----------------------------------------------------------------------------------------------------------


def test_the_latency_of_a_call_is_a_number_to_honour(world: World) -> None:
    assert world.calls.fate("GetNode", name("a"), START).latency_seconds == pytest.approx(0.15)
    assert world.calls.fate("CreateNode", PARENT, START).latency_seconds == pytest.approx(0.4)
    world.operator.outage("slow", timedelta(minutes=1), START, seconds=20)
    assert world.calls.fate("GetNode", name("a"), at(seconds=1)).latency_seconds == pytest.approx(20.15)
    assert world.now == at(seconds=1)


@pytest.mark.parametrize(("kind", "code"), [("api", 14), ("internal", 13)])
def test_an_outage_refuses_every_call_until_it_ends(world: World, kind: str, code: int) -> None:
    world.operator.outage(kind, timedelta(minutes=5), START)
    for method in ("ListNodes", "CreateNode"):
        fate = world.calls.fate(method, EVERYWHERE, at(minutes=1))
        assert fate.error is not None
        assert (fate.error.code, fate.applied) == (code, False)
    assert world.calls.fate("ListNodes", EVERYWHERE, at(minutes=6)).error is None
    world.operator.outage(kind, timedelta(minutes=5), at(minutes=7))
    world.operator.end_outages(at(minutes=8))
    assert world.calls.fate("ListNodes", EVERYWHERE, at(minutes=8)).error is None
    with pytest.raises(ConfigError, match="an outage is one of"):
        world.operator.outage("flood", timedelta(minutes=5), START)
    with pytest.raises(ConfigError, match="of a zone only if"):
        world.operator.outage("zone", timedelta(minutes=5), START)


def test_outages_may_be_planned() -> None:
    outage = {"at": "1h", "duration": "10m", "kind": "zone", "zone": ZONE}
    world = calm(faults={"outages": [outage]})
    assert world.api.list_nodes(EVERYWHERE, 0, "", at(minutes=59)).unreachable == ()
    assert world.api.list_nodes(EVERYWHERE, 0, "", at(minutes=61)).unreachable == (ZONE,)


@pytest.mark.parametrize("applied", [True, False])
def test_an_answer_may_be_lost_before_or_after_its_effect(world: World, applied: bool) -> None:
    world.operator.lose_next_answer("CreateNode", applied=applied, code=4)
    assert world.calls.fate("DeleteNode", name("a"), START).error is None
    fate = world.calls.fate("CreateNode", name("a"), START, "peer")
    assert fate.error is not None
    assert (fate.error.code, fate.applied) == (4, applied)
    if applied:
        world.api.create_node(PARENT, "a", spec(), START, fate)
    record = world.audit[-1]
    assert (record["answer"], record["applied"], record["peer"]) == ("lost", applied, "peer")
    assert world.calls.fate("CreateNode", name("a"), START).error is None


def test_the_next_call_may_be_refused_by_order(world: World) -> None:
    world.operator.fail_next("ListNodes", 16, "no credentials")
    world.operator.fail_next_create(13, "oops", in_operation=False)
    for method, code in (("ListNodes", 16), ("CreateNode", 13), ("ListNodes", 0)):
        fate = world.calls.fate(method, EVERYWHERE, START)
        assert (fate.error.code if fate.error else 0) == code
        assert fate.applied is (code == 0)


def test_calls_fail_at_the_rates_that_were_set() -> None:
    shares = {"unavailable": 0.1, "internal": 0.1, "lost_before": 0.1, "lost_after": 0.1, "slow": 0.1}
    world = calm(faults={"calls": shares, "methods": {"ListNodes": {}}})
    fates = [world.calls.fate("GetNode", name("a"), START) for _ in range(2000)]
    seen = Counter((fate.error.code if fate.error else 0, fate.applied) for fate in fates)
    assert set(seen) == {(14, False), (13, False), (14, True), (0, True)}
    assert 320 < seen[14, False] < 480
    slow = [fate for fate in fates if fate.latency_seconds > 5]
    assert 140 < len(slow) < 260
    assert {fate.before_seconds > 5 for fate in slow} == {True, False}
    assert all(world.calls.fate("ListNodes", EVERYWHERE, START).error is None for _ in range(100))


# --- the log and the configuration -------------------------------------------------------------------------------


def test_the_audit_log_is_json_heard_as_it_grows_and_may_skip_reads() -> None:
    world = calm(audit_reads=False)
    heard: list[dict[str, Any]] = []
    world.on_audit(heard.append)
    world.api.create_node(PARENT, "a", spec(labels={"k": "v"}), START)
    world.api.get_node(name("a"), at(seconds=1))
    world.operator.log_note("run-started", at(minutes=5), token="a.1", name=name("a"), worker=0)
    world.operator.preempt("a", at(minutes=6))
    world.advance(at(minutes=7))
    world.api.delete_node(name("a"), at(minutes=8))
    world.advance(at(minutes=10))
    assert json.loads(json.dumps(heard)) == list(world.audit)
    story = [record.get("event") or record.get("method") or record["kind"] for record in heard]
    assert [step for step in story if step not in ("operation", "operator", "health")] == [
        "created",
        "CreateNode",
        "ready",
        "boot",
        "run-started",
        "doomed",
        "kill",
        "preempted",
        "shown",
        "deleting",
        "DeleteNode",
        "gone",
    ]
    delete = next(record for record in heard if record.get("method") == "DeleteNode")
    assert (delete["labels"], delete["state"], delete["serving"]) == ({"k": "v"}, 11, False)


def test_a_long_simulation_need_not_keep_its_log(world: World) -> None:
    heard: list[dict[str, Any]] = []
    world.on_audit(heard.append, keep=False)
    world.api.create_node(PARENT, "a", spec(), START)
    world.on_audit(None, keep=False)
    world.advance(at(hours=1))
    assert [record["kind"] for record in heard] == ["node", "call"]
    assert list(world.audit) == []


def test_a_world_is_read_from_yaml() -> None:
    config = parse_world("{speed: fast, zones: {us-central1-a: {capacity: [{type: v3, amount: 2}]}}}")
    assert config.latencies.create_single.median < 1
    assert config.preemption.notice is None
    assert config.zones[ZONE].capacity[0].amount == 2
    kept = parse_world("{speed: fast, zones: {a: {}}, latencies: {delete: {median: 2m, p95: 300s}}}").latencies
    assert (kept.delete.median, kept.delete.p95) == (120, 300)


def test_a_world_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_world(tmp_path / "none.yaml")
    (tmp_path / "w.yaml").write_text("zones: {a: {}}")
    assert load_world(tmp_path / "w.yaml").speed == "real"
    with pytest.raises(ConfigError, match=r"addresses\.network"):
        calm(addresses={"network": "here"})
    small = calm(addresses={"network": "127.64.0.0/30"})
    with pytest.raises(ConfigError, match="no address left"):
        small.api.create_node(PARENT, "a", spec("v3-32"), START)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "w.yaml: not YAML"),
        ("[" * 5000, "w.yaml: not YAML"),
        ("zones: 2024-13-13", "w.yaml: not YAML"),
        ("- a", "w.yaml: a world is a mapping"),
        ("{}", "w.yaml: zones: Field required"),
        ("zones: {a: {}}\ncolour: red", "w.yaml: colour: unknown key"),
        ("zones: {a: {capacity: [{amount: 1, trace: x}]}}", "zones.a.capacity.0: give exactly one of"),
        ("zones: {a: {}}\nlatencies: {delete: 5 minutes}", "'5 minutes' is not a length of time"),
        ("zones: {a: {}}\nquotas: [{limit: 3}]", "quotas.0: give either zone or region"),
        ("zones: {a: {}}\nfaults: {calls: {slow: 2}}", "faults.calls.slow: "),
    ],
)
def test_a_bad_world_is_one_line_naming_the_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_world(text, "w.yaml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fast_world_recovers_within_seconds() -> None:
    world = World(WorldConfig.fast(), seed=1, start=START)
    world.api.create_node(PARENT, "a", spec("v3-32"), START)
    world.advance(at(seconds=5))
    assert world.nodes()[0].state == NodeState.READY
    assert kinds(world.take_effects()) == {"Boot": 4}
    world.operator.preempt("a", at(seconds=5))
    assert world.api.get_node(name("a"), at(seconds=8)).state == NodeState.PREEMPTED
    world.api.delete_node(name("a"), at(seconds=8))
    assert refusal(world.api.get_node, name("a"), at(seconds=12)).code == 5


def test_the_page_on_worlds_names_every_key_and_its_example_loads() -> None:
    page = (Path(__file__).parents[2] / "docs" / "emulator-world.md").read_text(encoding="utf-8")
    example = page.split("```yaml\n")[1].split("```")[0]
    config = parse_world(example)
    World(config, seed=1, start=START).advance(at(days=1))
    assert set(WorldConfig.model_fields) <= config.model_fields_set
    for key in (*Capacity.model_fields, *Preemption.model_fields):
        assert key in page or key == "preemptible_limit"


# --- the parts on their own --------------------------------------------------------------------------------------


def test_nodes_live_and_die_without_queued_resources_or_the_api() -> None:
    state = State(calm().state.config, START, seed=1)
    lifecycle = NodeLifecycle(state)
    path = NodePath("p", ZONE, "a")
    lifecycle.create(path, spec("v3-32"), accelerators.lookup("v3-32"))
    state.advance(at(minutes=30))
    life = state.nodes[path]
    assert (life.record.state, life.is_serving) == (NodeState.READY, True)
    assert kinds(state.effects) == {"Boot": 4}
    lifecycle.terminate(life, cause="test")
    state.advance(at(minutes=31))
    assert (life.record.state, life.dead) == (NodeState.TERMINATED, True)
    lifecycle.remove(life)
    assert (state.nodes, state.by_id) == ({}, {})


def test_a_call_is_judged_and_logged_without_any_nodes() -> None:
    state = State(WorldConfig.calm(zones={ZONE: {}}, rates={"create": 1}), START, seed=1)
    path = CallPath(state, Fates(state.config, state.stream("fates"), START))
    with path.call("CreateNode", PARENT, START, PLAIN) as fields:
        path.check_create_rate("p")
        fields["seen"] = True
    with pytest.raises(ApiError) as caught, path.call("CreateNode", PARENT, START, PLAIN):
        path.check_create_rate("p")
    assert caught.value.code == 8
    assert [(line["code"], line.get("seen")) for line in state.records if line["kind"] == "call"] == [
        (0, True),
        (8, None),
    ]
