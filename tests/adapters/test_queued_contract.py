"""
What every Cloud promises about queued resources: the real client over gRPC and over REST, and the stand-in for virtual
time. The world's clock is moved by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud.tpu_v2 import TpuClient
from google.cloud.tpu_v2.services.tpu.transports.rest import TpuRestTransport

from tests.kits.hand_clock import START, HandClock
from tpucare.adapters.google.client import CloudClock, GoogleCloud, connect
from tpucare.model.errors import (
    AlreadyExists,
    AnswerLost,
    CloudError,
    NeedsPerson,
    NoCapacity,
    NodeGone,
    QuotaExceeded,
    Transient,
)
from tpucare.model.ports import Cloud
from tpucare.model.resources import (
    LABEL_OWNER,
    LABEL_SLOT,
    NodeKey,
    NodeRequest,
    NodeState,
    Place,
    Provisioning,
    QueuedRequest,
    QueuedState,
)
from tpucare.testbed.emulator.inprocess import InProcessCloud
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.world import World

pytestmark = pytest.mark.contract

PROJECT, ZONE, OTHER_ZONE = "emulated", "us-central1-a", "europe-west4-a"
KEY = NodeKey(PROJECT, ZONE, "pod-0-a1")
SPENT = frozenset({QueuedState.SUSPENDING, QueuedState.SUSPENDED})
QUICK: dict[str, object] = {"read": 0, "write": 0, "list_lag_share": 0, "operation_lingers_share": 0}


@dataclass
class QueueSetup:
    """A Cloud, the world behind it, and a clock's hand."""

    cloud: Cloud
    world: World
    clock: HandClock
    lock: AbstractContextManager[Any]
    tells_status: bool = True
    """False over REST: google-api-core has no gRPC status for HTTP 403 and 409. tpucare itself speaks gRPC."""

    def play(self, seconds: float) -> None:
        with self.lock:
            self.clock.seconds += seconds
            self.world.advance(self.clock.now())

    def until(self, *states: QueuedState, key: NodeKey = KEY) -> None:
        for _ in range(3000):
            if self.cloud.get_queued(key).state in states:
                return
            self.play(5)
        raise AssertionError(f"{self.cloud.get_queued(key).state!r} for hours")


Build = Callable[..., QueueSetup]


@pytest.fixture(params=["grpc", "rest", "in-process"])
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """Makes a setup with changes to the configuration of its world, keys as in YAML."""
    ends: list[Callable[[], None]] = []

    def make(**changes: Any) -> QueueSetup:
        latencies = {**QUICK, **changes.pop("latencies", {})}
        config, clock = WorldConfig.calm(latencies=latencies, **changes), HandClock()
        if request.param == "in-process":
            world = World(config, seed=1, start=clock.now())
            return QueueSetup(InProcessCloud(world, now=clock.now), world, clock, nullcontext())
        server = EmulatorServer(config, seed=1, now=clock.now)
        ends.append(server.stop)
        server.start()
        cloud = connect(server.endpoint, monotonic=clock.monotonic) if request.param == "grpc" else by_rest(server)
        ends.append(cloud.close)
        return QueueSetup(cloud, server.world, clock, server.lock, tells_status=request.param == "grpc")

    yield make
    for end in reversed(ends):
        end()


def by_rest(server: EmulatorServer) -> GoogleCloud:
    transport = TpuRestTransport(
        host=server.rest_endpoint.removeprefix("http://"),
        url_scheme="http",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
    )
    return GoogleCloud(TpuClient(transport=transport), CloudClock(lambda: 0.0))


def wanted(key: NodeKey = KEY, tier: Provisioning = Provisioning.SPOT, **changes: Any) -> QueuedRequest:
    place = Place(key.zone, "v2-8", tier, "tpu-ubuntu2204-base", queued=True, **changes)
    return QueuedRequest(key, place, {LABEL_OWNER: "o1", LABEL_SLOT: "pod-0"}, {"own": "value"}, f"id-of-{key.name}")


def test_the_life_of_a_queued_resource(build: Build) -> None:
    setup = build()
    with pytest.raises(NodeGone):
        setup.cloud.get_queued(KEY)
    setup.cloud.create_queued(wanted())
    asked = setup.cloud.get_queued(KEY)
    assert (asked.state, asked.key, asked.nodes) == (QueuedState.CREATING, KEY, ("pod-0-a1",))
    assert asked.create_time == START
    assert (asked.owner, asked.slot, asked.error) == ("o1", "pod-0", None)
    setup.until(QueuedState.WAITING_FOR_RESOURCES)
    with pytest.raises(NodeGone):
        setup.cloud.get_node(KEY)
    setup.until(QueuedState.PROVISIONING)
    setup.until(QueuedState.ACTIVE)
    node = setup.cloud.get_node(KEY)
    assert (node.state, node.owner, node.provisioning) == (NodeState.READY, "o1", Provisioning.SPOT)
    assert node.queued_resource == f"projects/{PROJECT}/locations/{ZONE}/queuedResources/pod-0-a1"
    setup.cloud.delete_queued(KEY)
    assert setup.cloud.get_queued(KEY).state is QueuedState.DELETING
    setup.play(3600)
    for act in (setup.cloud.get_queued, setup.cloud.get_node, setup.cloud.delete_queued):
        with pytest.raises(NodeGone):
            act(KEY)


@pytest.mark.parametrize("tier", [Provisioning.SPOT, Provisioning.ON_DEMAND, Provisioning.RESERVED])
def test_every_tier_arrives_as_asked(build: Build, tier: Provisioning) -> None:
    setup = build()
    setup.cloud.create_queued(wanted(tier=tier))
    setup.until(QueuedState.ACTIVE)
    assert setup.cloud.get_node(KEY).provisioning is tier


def test_one_listing_follows_every_page_of_every_zone(build: Build) -> None:
    setup = build(listing={"page_default": 2, "page_cap": 2})
    keys = [NodeKey(PROJECT, zone, f"pod-{index}-a0") for index in range(3) for zone in (ZONE, OTHER_ZONE)]
    for key in keys:
        setup.cloud.create_queued(wanted(key))
    listing = setup.cloud.list_queued(PROJECT)
    assert (set(listing.resources), listing.unreachable) == (set(keys), frozenset())
    assert listing.resources[keys[0]] == setup.cloud.get_queued(keys[0])


def test_a_zone_that_does_not_answer_is_named(build: Build) -> None:
    setup = build()
    far = NodeKey(PROJECT, OTHER_ZONE, "far-0-a0")
    setup.cloud.create_queued(wanted())
    setup.cloud.create_queued(wanted(far))
    with setup.lock:
        setup.world.operator.outage("zone", timedelta(minutes=5), setup.clock.now(), zone=ZONE)
    listing = setup.cloud.list_queued(PROJECT)
    assert (set(listing.resources), listing.unreachable) == ({far}, frozenset({ZONE}))


def test_the_same_request_is_made_once(build: Build) -> None:
    setup = build()
    setup.cloud.create_queued(wanted())
    setup.cloud.create_queued(wanted())
    assert list(setup.cloud.list_queued(PROJECT).resources) == [KEY]
    with pytest.raises(AlreadyExists if setup.tells_status else CloudError):
        setup.cloud.create_queued(replace(wanted(), request_id="another"))


@pytest.mark.parametrize("applied", [True, False])
def test_an_answer_that_was_lost(build: Build, applied: bool) -> None:
    setup = build()
    with setup.lock:
        setup.world.operator.lose_next_answer("CreateQueuedResource", applied=applied)
    with pytest.raises(AnswerLost):
        setup.cloud.create_queued(wanted())
    setup.cloud.create_queued(wanted())
    assert list(setup.cloud.list_queued(PROJECT).resources) == [KEY]


def test_a_granted_request_that_is_preempted_leaves_a_shell(build: Build) -> None:
    setup = build()
    setup.cloud.create_queued(wanted())
    setup.until(QueuedState.ACTIVE)
    with setup.lock:
        setup.world.operator.preempt("pod-0-a1", setup.clock.now())
    setup.until(QueuedState.SUSPENDING)
    assert setup.cloud.get_queued(KEY).suspended_by_service
    setup.until(QueuedState.SUSPENDED)
    with pytest.raises(NodeGone):
        setup.cloud.get_node(KEY)
    setup.cloud.delete_queued(KEY)
    setup.play(600)
    assert setup.cloud.list_queued(PROJECT).resources == {}


def test_its_node_can_be_deleted_by_itself(build: Build) -> None:
    setup = build()
    setup.cloud.create_queued(wanted())
    setup.until(QueuedState.ACTIVE)
    setup.cloud.delete_node(KEY)
    setup.until(*SPENT)
    assert not setup.cloud.get_queued(KEY).suspended_by_service


def test_why_one_failed(build: Build) -> None:
    setup = build()
    setup.cloud.create_queued(wanted())
    with setup.lock:
        text = "There is no more capacity in the zone"
        setup.world.operator.fail_queued("pod-0-a1", 8, text, setup.clock.now())
    failed = setup.cloud.get_queued(KEY)
    assert (failed.state, type(failed.error)) == (QueuedState.FAILED, NoCapacity)
    assert text in str(failed.error)


def test_one_that_is_not_served_in_time_fails(build: Build) -> None:
    setup = build(zones={ZONE: {"capacity": [{"amount": 0}]}}, queue={"expired_lingers": 0})
    setup.cloud.create_queued(wanted(valid_for=timedelta(minutes=10)))
    setup.until(QueuedState.WAITING_FOR_RESOURCES)
    setup.play(300)
    assert setup.cloud.get_queued(KEY).state is QueuedState.WAITING_FOR_RESOURCES
    setup.play(600)
    failed = setup.cloud.get_queued(KEY)
    assert (failed.state, type(failed.error)) == (QueuedState.FAILED, Transient)


def test_too_many_requests_in_a_zone_are_a_quota(build: Build) -> None:
    setup = build(queue={"limit": 1})
    setup.cloud.create_queued(wanted())
    with pytest.raises(QuotaExceeded):
        setup.cloud.create_queued(wanted(NodeKey(PROJECT, ZONE, "pod-1-a0")))
    setup.cloud.create_queued(wanted(NodeKey(PROJECT, OTHER_ZONE, "pod-1-a0")))


def test_what_only_a_person_can_mend(build: Build) -> None:
    setup = build()
    with pytest.raises(NeedsPerson if setup.tells_status else CloudError):
        setup.cloud.create_queued(wanted(NodeKey(PROJECT, "mars-north1-a", "pod-0-a1")))


@pytest.mark.parametrize("number", [0, 77])
def test_an_unknown_state_keeps_its_number(build: Build, number: int) -> None:
    setup = build()
    setup.cloud.create_queued(wanted())
    with setup.lock:
        setup.world.operator.set_queued_state("pod-0-a1", number, setup.clock.now())
    assert int(setup.cloud.get_queued(KEY).state) == number


def test_a_direct_node_has_no_queued_resource(build: Build) -> None:
    setup = build()
    place = Place(ZONE, "v2-8", Provisioning.SPOT, "tpu-ubuntu2204-base")
    setup.cloud.create_node(NodeRequest(KEY, place, {}, {}))
    setup.play(600)
    assert setup.cloud.get_node(KEY).queued_resource == ""
