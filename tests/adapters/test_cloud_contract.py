"""
What every Cloud promises, checked on the real client over the real gRPC service and on the stand-in for virtual time.

The world's clock is moved by hand in both; nothing here waits for time to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.kits.hand_clock import START, HandClock
from tpucare.adapters.google.client import Deadlines, connect
from tpucare.model.errors import (
    AlreadyExists,
    AnswerLost,
    LostRace,
    NeedsPerson,
    NoCapacity,
    NodeGone,
    NotPublished,
    OwnCredentials,
    PreemptedMeanwhile,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from tpucare.model.ports import Cloud
from tpucare.model.resources import (
    LABEL_OWNER,
    Endpoint,
    Health,
    Network,
    NodeKey,
    NodeRequest,
    NodeState,
    Place,
    Provisioning,
)
from tpucare.testbed.emulator.inprocess import InProcessCloud, Limits
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.world import World

pytestmark = pytest.mark.contract

PROJECT = "emulated"
ZONE, OTHER_ZONE = "us-central1-a", "europe-west4-a"
KEY_LINE = "me:ssh-ed25519 AAAAC3Nza first"
QUICK: dict[str, object] = {"read": 0, "write": 0, "list_lag_share": 0, "operation_lingers_share": 0}
PATIENCE, LITTLE_PATIENCE = timedelta(seconds=30), timedelta(seconds=0.5)


@dataclass
class CloudSetup:
    """A Cloud, one like it that waits for no answer longer than a moment, the world behind them, and a clock's hand."""

    cloud: Cloud
    impatient: Cloud
    world: World
    clock: HandClock
    lock: AbstractContextManager[Any]

    @property
    def now(self) -> datetime:
        return self.clock.now()

    def play(self, seconds: float) -> None:
        with self.lock:
            self.clock.seconds += seconds
            self.world.advance(self.clock.now())


Build = Callable[..., CloudSetup]


@pytest.fixture(params=["grpc", "in-process"])
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """Makes a setup with changes to the configuration of its world, keys as in YAML."""
    ends: list[Callable[[], None]] = []

    def make(**changes: Any) -> CloudSetup:
        latencies = {**QUICK, **changes.pop("latencies", {})}
        config, clock = WorldConfig.fast(latencies=latencies, **changes), HandClock()
        if request.param == "in-process":
            world = World(config, seed=1, start=clock.now())
            patient, impatient = (
                InProcessCloud(world, now=clock.now, limits=Limits(*[patience] * 3))
                for patience in (PATIENCE, LITTLE_PATIENCE)
            )
            return CloudSetup(patient, impatient, world, clock, nullcontext())
        server = EmulatorServer(config, seed=1, now=clock.now)
        ends.append(server.stop)
        server.start()
        clouds = [
            connect(server.endpoint, monotonic=clock.monotonic, deadlines=Deadlines(*[patience] * 3))
            for patience in (PATIENCE, LITTLE_PATIENCE)
        ]
        ends.extend(cloud.close for cloud in clouds)
        return CloudSetup(clouds[0], clouds[1], server.world, clock, server.lock)

    yield make
    for end in reversed(ends):
        end()


def wanted(name: str, zone: str = ZONE, **changes: Any) -> NodeRequest:
    place = Place(zone, changes.pop("type", "v2-8"), changes.pop("tier", Provisioning.SPOT), "tpu-ubuntu2204-base")
    return NodeRequest(
        NodeKey(PROJECT, zone, name), place, {LABEL_OWNER: "o1"}, {"ssh-keys": KEY_LINE, **changes.pop("metadata", {})}
    )


def ready(setup: CloudSetup, *names: str, zone: str = ZONE, **changes: Any) -> None:
    for name in names:
        setup.cloud.create_node(wanted(name, zone, **changes))
    setup.play(60)


# --- reading -------------------------------------------------------------------------------------------------------


def test_a_node_is_handed_over_whole(build: Build) -> None:
    setup = build()
    place = Place(
        ZONE, "v2-32", Provisioning.PREEMPTIBLE, "tpu-ubuntu2204-base", network=Network("net", "sub", ("tag",), True)
    )
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    setup.cloud.create_node(NodeRequest(key, place, {LABEL_OWNER: "o1", "empty": ""}, {}))
    setup.play(60)
    node = setup.cloud.get_node(key)
    assert (node.key, node.name, node.owner) == (key, "pod-0-a1", "o1")
    assert node.labels == {LABEL_OWNER: "o1", "empty": ""}
    assert (node.state, node.accelerator_type) == (NodeState.READY, "v2-32")
    assert node.provisioning is Provisioning.PREEMPTIBLE
    assert node.id > 1 << 32
    assert START <= node.create_time <= setup.now
    assert len(node.endpoints) == 4
    assert all(one.internal and one.external for one in node.endpoints)
    assert setup.cloud.list_nodes(PROJECT).nodes == {key: node}


@pytest.mark.parametrize("tier", list(Provisioning))
def test_every_tier_arrives_as_asked(build: Build, tier: Provisioning) -> None:
    setup = build()
    ready(setup, "pod-0-a1", tier=tier)
    assert setup.cloud.get_node(NodeKey(PROJECT, ZONE, "pod-0-a1")).provisioning is tier


def test_external_addresses_only_when_asked_for(build: Build) -> None:
    setup = build()
    place = Place(ZONE, "v2-8", Provisioning.SPOT, "tpu-ubuntu2204-base", network=Network(external_ips=False))
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    setup.cloud.create_node(NodeRequest(key, place, {}, {}))
    setup.play(60)
    (endpoint,) = setup.cloud.get_node(key).endpoints
    assert endpoint == Endpoint(endpoint.internal, "")
    assert endpoint.internal


def test_one_listing_follows_every_page_of_every_zone(build: Build) -> None:
    setup = build(listing={"page_default": 2, "page_cap": 2})
    names = [f"pod-{number}-a1" for number in range(5)]
    ready(setup, *names)
    ready(setup, "far-0-a1", zone=OTHER_ZONE)
    listing = setup.cloud.list_nodes(PROJECT)
    assert {key.name for key in listing.nodes} == {*names, "far-0-a1"}
    assert {key.zone for key in listing.nodes} == {ZONE, OTHER_ZONE}
    assert {key.project for key in listing.nodes} == {PROJECT}
    assert listing.unreachable == frozenset()


def test_a_page_that_failed_fails_the_listing_and_changes_nothing(build: Build) -> None:
    setup = build(listing={"page_default": 1, "page_cap": 1})
    ready(setup, "pod-0-a1", "pod-1-a1")
    setup.cloud.list_nodes(PROJECT)
    with setup.lock:
        setup.world.operator.fail_next("ListNodes", 13, "Internal error. Please try again.")
    with pytest.raises(Transient):
        setup.cloud.list_nodes(PROJECT)
    listing = setup.cloud.list_nodes(PROJECT)
    assert (listing.changed, listing.gone) == (frozenset(), frozenset())
    assert len(listing.nodes) == 2


def test_a_listing_says_what_changed_and_what_is_gone(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1", "pod-1-a1", "pod-2-a1")
    zero, one, two = (NodeKey(PROJECT, ZONE, f"pod-{number}-a1") for number in range(3))
    assert setup.cloud.list_nodes(PROJECT).changed == {zero, one, two}
    quiet = setup.cloud.list_nodes(PROJECT)
    assert (quiet.changed, quiet.gone, set(quiet.nodes)) == (frozenset(), frozenset(), {zero, one, two})
    with setup.lock:
        setup.world.operator.set_health("pod-1-a1", Health.TIMEOUT, setup.now)
        setup.world.operator.remove("pod-2-a1", setup.now)
    listing = setup.cloud.list_nodes(PROJECT)
    assert listing.changed == {one}
    assert listing.gone == {two}
    assert listing.nodes[one].health is Health.TIMEOUT
    assert listing.nodes[zero] is quiet.nodes[zero]


def test_a_node_of_the_same_name_made_anew_is_a_change(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    before = setup.cloud.list_nodes(PROJECT).nodes[key]
    with setup.lock:
        setup.world.operator.remove("pod-0-a1", setup.now)
    ready(setup, "pod-0-a1")
    listing = setup.cloud.list_nodes(PROJECT)
    assert listing.changed == {key}
    assert listing.gone == frozenset()
    assert listing.nodes[key].id != before.id


def test_nodes_of_an_unreachable_zone_are_neither_gone_nor_present(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1", "pod-1-a1")
    ready(setup, "far-0-a1", zone=OTHER_ZONE)
    kept, lost = NodeKey(PROJECT, ZONE, "pod-0-a1"), NodeKey(PROJECT, ZONE, "pod-1-a1")
    far = NodeKey(PROJECT, OTHER_ZONE, "far-0-a1")
    setup.cloud.list_nodes(PROJECT)
    with setup.lock:
        setup.world.operator.outage("zone", timedelta(minutes=5), setup.now, zone=ZONE)
    dark = setup.cloud.list_nodes(PROJECT)
    assert set(dark.nodes) == {far}
    assert dark.unreachable == {ZONE}
    assert (dark.changed, dark.gone) == (frozenset(), frozenset())
    with pytest.raises(AnswerLost):
        setup.cloud.get_node(kept)
    with setup.lock:
        setup.world.operator.remove("pod-1-a1", setup.now)
        setup.world.operator.end_outages(setup.now)
    light = setup.cloud.list_nodes(PROJECT)
    assert light.changed == {kept}
    assert light.gone == {lost}
    assert light.unreachable == frozenset()


@pytest.mark.parametrize("number", [0, 77])
def test_an_unknown_state_keeps_its_number(build: Build, number: int) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    with setup.lock:
        setup.world.operator.set_state("pod-0-a1", number, setup.now)
        setup.world.operator.set_health("pod-0-a1", 42, setup.now)
        # A service newer than its client: fields that nobody knows, in nodes and around them.
        setup.world.operator.show_unknown_fields("*", setup.now, answers=True)
    (node,) = setup.cloud.list_nodes(PROJECT).nodes.values()
    assert (int(node.state), int(node.health)) == (number, 42)
    assert node == setup.cloud.get_node(node.key)


def test_a_listing_bears_the_clock_of_the_cloud(build: Build) -> None:
    setup = build()
    setup.cloud.list_nodes(PROJECT)
    setup.play(1000)
    seen = setup.cloud.list_nodes(PROJECT).cloud_time
    assert seen is not None
    assert abs(seen - setup.now) < timedelta(seconds=2)


def test_reads_ride_out_a_short_failure(build: Build) -> None:
    setup = build()
    operation = setup.cloud.create_node(wanted("pod-0-a1"))
    setup.play(60)
    with setup.lock:
        for method in ("GetNode", "GetOperation"):
            setup.world.operator.fail_next(method, 14, "The service is currently unavailable.")
            setup.world.operator.fail_next(method, 13, "Internal error. Please try again.")
    assert setup.cloud.get_node(NodeKey(PROJECT, ZONE, "pod-0-a1")).state is NodeState.READY
    assert setup.cloud.get_operation(operation.name).done


def test_reads_give_up_after_three_tries(build: Build) -> None:
    setup = build()
    with setup.lock:
        for _ in range(3):
            setup.world.operator.fail_next("GetNode", 14, "The service is currently unavailable.")
    with pytest.raises(AnswerLost):
        setup.cloud.get_node(NodeKey(PROJECT, ZONE, "pod-0-a1"))
    with pytest.raises(NodeGone):
        setup.cloud.get_node(NodeKey(PROJECT, ZONE, "pod-0-a1"))


# --- creating and deleting -----------------------------------------------------------------------------------------


def test_the_life_of_a_node(build: Build) -> None:
    setup = build()
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    with pytest.raises(NodeGone):
        setup.cloud.get_node(key)
    operation = setup.cloud.create_node(wanted("pod-0-a1"))
    assert not operation.done
    assert operation.create_time is not None
    assert abs(operation.create_time - setup.now) < timedelta(seconds=1)
    with pytest.raises(AlreadyExists):
        setup.cloud.create_node(wanted("pod-0-a1"))
    setup.play(60)
    ended = setup.cloud.get_operation(operation.name)
    assert (ended.done, ended.error) == (True, None)
    setup.cloud.delete_node(key)
    assert setup.cloud.get_node(key).state is NodeState.DELETING
    with pytest.raises(AlreadyExists):
        setup.cloud.create_node(wanted("pod-0-a1"))
    setup.play(60)
    for act in (setup.cloud.get_node, setup.cloud.delete_node):
        with pytest.raises(NodeGone):
            act(key)
    with pytest.raises(NotPublished):
        setup.cloud.host_keys(key)


def test_a_second_delete_is_accepted_or_a_lost_race(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    for _ in range(8):
        with suppress(LostRace):
            setup.cloud.delete_node(key)
    assert setup.cloud.get_node(key).state is NodeState.DELETING


def test_a_stockout_arrives_in_the_operation(build: Build) -> None:
    setup = build(zones={ZONE: {"capacity": [{"amount": 0}]}})
    operation = setup.cloud.create_node(wanted("pod-0-a1"))
    setup.play(5)
    ended = setup.cloud.get_operation(operation.name)
    assert ended.done
    assert isinstance(ended.error, NoCapacity)
    assert "no more capacity" in str(ended.error)


def test_a_quota_arrives_from_the_call(build: Build) -> None:
    setup = build(
        quotas=[
            {"generation": "v2", "zone": ZONE, "limit": 4},
            {"generation": "v2", "region": "europe-west4", "limit": 4, "form": "limit"},
        ]
    )
    setup.cloud.create_node(wanted("pod-0-a1"))
    setup.cloud.create_node(wanted("pod-2-a1", OTHER_ZONE))
    with pytest.raises(QuotaExceeded) as zonal:
        setup.cloud.create_node(wanted("pod-1-a1"))
    assert not zonal.value.region_wide
    with pytest.raises(QuotaExceeded) as regional:
        setup.cloud.create_node(wanted("pod-1-a1", OTHER_ZONE))
    assert regional.value.region_wide
    assert regional.value.code == 8


def test_too_many_creates_a_minute(build: Build) -> None:
    setup = build(rates={"create": 2})
    setup.cloud.create_node(wanted("pod-0-a1"))
    setup.cloud.create_node(wanted("pod-1-a1"))
    with pytest.raises(RateLimited):
        setup.cloud.create_node(wanted("pod-2-a1"))


@pytest.mark.parametrize(
    ("changes", "want"),
    [({"type": "v9-8"}, NeedsPerson), ({"zone": "mars-north1-a"}, NeedsPerson)],
)
def test_what_only_a_person_can_mend(build: Build, changes: dict[str, str], want: type[Exception]) -> None:
    setup = build()
    with pytest.raises(want):
        setup.cloud.create_node(wanted("pod-0-a1", **changes))


def test_credentials_that_do_not_serve(build: Build) -> None:
    setup = build()
    with setup.lock:
        setup.world.operator.fail_next("ListNodes", 16, "Request had invalid authentication credentials.")
    with pytest.raises(OwnCredentials):
        setup.cloud.list_nodes(PROJECT)


@pytest.mark.parametrize("code", [14, 4])
@pytest.mark.parametrize("applied", [True, False])
def test_an_answer_to_a_create_that_was_lost(build: Build, code: int, applied: bool) -> None:
    setup = build()
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    with setup.lock:
        setup.world.operator.lose_next_answer("CreateNode", applied=applied, code=code)
    with pytest.raises(AnswerLost):
        setup.cloud.create_node(wanted("pod-0-a1"))
    setup.play(60)
    if applied:
        assert setup.cloud.get_node(key).state is NodeState.READY
        with pytest.raises(AlreadyExists):
            setup.cloud.create_node(wanted("pod-0-a1"))
    else:
        with pytest.raises(NodeGone):
            setup.cloud.get_node(key)


def test_a_create_and_a_delete_are_sent_once(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    with setup.lock:
        for method in ("CreateNode", "DeleteNode", "ListNodes"):
            setup.world.operator.fail_next(method, 14, "The service is currently unavailable.")
    with pytest.raises(AnswerLost):
        setup.cloud.create_node(wanted("pod-1-a1"))
    with pytest.raises(AnswerLost):
        setup.cloud.delete_node(NodeKey(PROJECT, ZONE, "pod-0-a1"))
    with pytest.raises(AnswerLost):
        setup.cloud.list_nodes(PROJECT)
    assert {key.name for key in setup.cloud.list_nodes(PROJECT).nodes} == {"pod-0-a1"}


def test_every_call_has_a_deadline(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    with setup.lock:
        setup.world.operator.outage("slow", timedelta(minutes=5), setup.now, seconds=60)
    cloud = setup.impatient
    calls: list[Callable[[], object]] = [
        lambda: cloud.list_nodes(PROJECT),
        lambda: cloud.get_node(key),
        lambda: cloud.create_node(wanted("pod-1-a1")),
        lambda: cloud.get_operation(f"projects/{PROJECT}/locations/{ZONE}/operations/operation-1"),
        lambda: cloud.delete_node(key),
        lambda: cloud.add_ssh_key(key, KEY_LINE),
        lambda: cloud.host_keys(key),
    ]

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(1 if isinstance(setup.cloud, InProcessCloud) else len(calls)) as pool:
        ended = list(pool.map(outcome, calls))
    assert [(type(error), getattr(error, "code", None)) for error in ended] == [(AnswerLost, 4)] * len(calls)


# --- operations, metadata, guest attributes ------------------------------------------------------------------------


def test_an_operation_nobody_knows(build: Build) -> None:
    with pytest.raises(NodeGone):
        build().cloud.get_operation(f"projects/{PROJECT}/locations/{ZONE}/operations/operation-1")


def test_a_create_that_met_a_preemption(build: Build) -> None:
    setup = build()
    with setup.lock:
        setup.world.operator.fail_next_create(
            3, "Cloud TPU received a bad request. create is not supported in state PREEMPTED"
        )
    operation = setup.cloud.create_node(wanted("pod-0-a1"))
    setup.play(5)
    assert isinstance(setup.cloud.get_operation(operation.name).error, PreemptedMeanwhile)


def test_a_preempted_node_stays_and_keeps_its_addresses(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    with setup.lock:
        setup.world.operator.preempt("pod-0-a1", setup.now)
    setup.play(60)
    (node,) = setup.cloud.list_nodes(PROJECT).nodes.values()
    assert node.state is NodeState.PREEMPTED
    assert node.endpoints


def test_a_key_is_appended_once_to_the_keys_that_are_there(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1", metadata={"own": "value"})
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    for _ in range(2):
        setup.cloud.add_ssh_key(key, "tpucare:ssh-ed25519 AAAAB second\n")
        setup.play(10)
    with setup.lock:
        (record,) = setup.world.nodes()
    assert record.spec.metadata["ssh-keys"].splitlines() == [KEY_LINE, "tpucare:ssh-ed25519 AAAAB second"]
    assert record.spec.metadata["own"] == "value"
    with pytest.raises(NodeGone):
        setup.cloud.add_ssh_key(NodeKey(PROJECT, ZONE, "pod-9-a1"), KEY_LINE)


def test_labels_are_added_to_those_that_are_there(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    before = dict(setup.cloud.get_node(key).labels)
    setup.cloud.add_labels(key, {"tpucare-owner": "o-else", "team": "vision"})
    setup.play(10)
    assert setup.cloud.get_node(key).labels == {**before, "tpucare-owner": "o-else", "team": "vision"}
    with pytest.raises(NodeGone):
        setup.cloud.add_labels(NodeKey(PROJECT, ZONE, "pod-9-a1"), {"a": "b"})


def test_two_updates_at_once_are_a_lost_race(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1")
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    setup.cloud.add_ssh_key(key, "tpucare:ssh-ed25519 AAAAB second")
    with pytest.raises(LostRace):
        setup.cloud.add_ssh_key(key, "tpucare:ssh-ed25519 AAAAB third")


def test_host_keys_per_worker_may_be_incomplete(build: Build) -> None:
    setup = build()
    ready(setup, "pod-0-a1", type="v2-32")
    key = NodeKey(PROJECT, ZONE, "pod-0-a1")
    assert setup.cloud.host_keys(key) == {}
    name = f"projects/{PROJECT}/locations/{ZONE}/nodes/pod-0-a1"
    with setup.lock:
        for worker in (0, 2):
            setup.world.operator.set_guest_attribute(name, worker, "hostkeys", "ssh-ed25519", f"AAAA{worker}")
        setup.world.operator.set_guest_attribute(name, 0, "other", "ssh-ed25519", "no host key")
    assert setup.cloud.host_keys(key) == {0: ("ssh-ed25519 AAAA0",), 2: ("ssh-ed25519 AAAA2",)}


def test_a_node_whose_zone_was_dark_at_the_first_listing_is_seen_when_it_answers(build: Build) -> None:
    """Storm seed 3 left dead nodes listed for ever: what did not change while its zone was dark was never read."""
    setup = build()
    ready(setup, "pod-0-a0")
    with setup.lock:
        setup.world.operator.outage("zone", timedelta(seconds=60), setup.now, zone=ZONE)
    assert setup.cloud.list_nodes(PROJECT).nodes == {}
    setup.play(120)
    seen = setup.cloud.list_nodes(PROJECT)
    assert [key.name for key in seen.changed] == ["pod-0-a0"]
    assert len(seen.nodes) == 1
