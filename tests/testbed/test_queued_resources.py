"""Queued resources: every state and how it is reached, in virtual time; both versions on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.tpu_v2.services.tpu.transports.grpc import TpuGrpcTransport
from google.cloud.tpu_v2alpha1.services.tpu.transports.grpc import TpuGrpcTransport as TpuAlphaTransport
from googleapiclient.discovery import build as discover  # type: ignore[import-untyped]

from tests.kits.hand_clock import HandClock
from tpucare.model import accelerators
from tpucare.model.resources import NodeState, QueuedState
from tpucare.testbed.audit import Expected, check
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.life import NodeLifecycle
from tpucare.testbed.emulator.world.queued_life import QueuedLifecycle
from tpucare.testbed.emulator.world.queued_records import (
    Initiator,
    Planned,
    QueuedNodeSpec,
    QueuedPath,
    QueuedRecord,
    QueuedSpec,
    Validity,
)
from tpucare.testbed.emulator.world.records import ApiError, NodePath, NodeSpec, OperationRecord
from tpucare.testbed.emulator.world.state import State
from tpucare.testbed.emulator.world.world import World

PROJECT, ZONE = "emulated", "us-central1-a"
PARENT = f"projects/{PROJECT}/locations/{ZONE}"
NAME = f"{PARENT}/queuedResources/q-0"
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
NODE = NodeSpec(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base", labels={"team": "vision"})
ONE = (QueuedNodeSpec(NODE, node_id="pod-0-a1"),)
SLICES = (QueuedNodeSpec(NODE, count=3, prefix="part"),)
EXHAUSTED, FAILED_PRECONDITION, EXPIRED, NOT_FOUND, EXISTS = 8, 9, 4, 5, 6


class Box:
    """A world with a hand on its clock."""

    def __init__(self, **changes: Any) -> None:
        self.world = World(WorldConfig.calm(**changes), seed=7, start=START)
        self.now = START

    def play(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.world.advance(self.now)

    def ask(self, wishes: tuple[QueuedNodeSpec, ...] = ONE, tier: str = "spot", **more: Any) -> OperationRecord:
        return self.world.queued_api.create_queued_resource(PARENT, "q-0", QueuedSpec(wishes, tier, **more), self.now)

    @property
    def record(self) -> QueuedRecord:
        return self.world.queued_api.get_queued_resource(NAME, self.now)

    @property
    def state(self) -> QueuedState:
        return QueuedState(self.record.state)

    def until(self, state: QueuedState, hours: float = 12) -> QueuedRecord:
        """Play second by second; an order of states that was not passed fails here."""
        for _ in range(int(hours * 3600)):
            if self.state == state:
                return self.record
            self.play(1)
        raise AssertionError(f"{self.state.name}, never {state.name}")

    def delete(self, *, force: bool = False) -> OperationRecord:
        return self.world.queued_api.delete_queued_resource(NAME, force, self.now)

    def nodes(self) -> list[str]:
        return [record.path.node_id for record in self.world.nodes()]


def refusal(act: Any) -> int:
    with pytest.raises(ApiError) as refused:
        act()
    return refused.value.code


# --- the course of one that is granted ---------------------------------------------------------------------------


def test_from_the_request_to_its_nodes() -> None:
    box = Box()
    operation = box.ask()
    assert box.state is QueuedState.CREATING
    box.until(QueuedState.WAITING_FOR_RESOURCES)
    ended = box.world.api.get_operation(operation.name, box.now)
    assert (ended.done, ended.error, ended.response) == (True, None, box.record)
    assert box.nodes() == []
    assert refusal(lambda: box.world.api.get_node(f"{PARENT}/nodes/pod-0-a1", box.now)) == NOT_FOUND
    box.until(QueuedState.PROVISIONING)
    box.play(1)
    young = box.world.api.get_node(f"{PARENT}/nodes/pod-0-a1", box.now)
    assert (young.state, young.queued_resource, young.spec.spot) == (NodeState.CREATING, NAME, True)
    box.until(QueuedState.ACTIVE)
    assert box.world.api.get_node(f"{PARENT}/nodes/pod-0-a1", box.now).state == NodeState.READY


def test_a_multislice_is_granted_whole() -> None:
    box = Box(zones={ZONE: {"accelerators": ["*"], "capacity": [{"amount": 2}]}})
    box.ask(SLICES)
    box.until(QueuedState.WAITING_FOR_RESOURCES)
    box.play(3600)
    assert (box.state, box.nodes()) == (QueuedState.WAITING_FOR_RESOURCES, [])
    box.world.operator.set_capacity(ZONE, "", "spot", 3, box.now)
    box.until(QueuedState.ACTIVE)
    assert box.nodes() == ["part-0", "part-1", "part-2"]
    assert all(record.multislice for record in box.world.nodes())


def test_slices_without_a_prefix_bear_the_id_of_the_resource() -> None:
    box = Box()
    box.ask((QueuedNodeSpec(NODE, count=2),))
    box.until(QueuedState.ACTIVE)
    assert box.nodes() == ["q-0-0", "q-0-1"]


def test_some_wait_under_the_old_name() -> None:
    box = Box(queue={"old_name_share": 1})
    box.ask()
    box.until(QueuedState.ACCEPTED)
    box.until(QueuedState.ACTIVE)


@pytest.mark.parametrize(
    ("tier", "more", "want"),
    [
        ("spot", {}, "spot"),
        ("best-effort", {}, "preemptible"),
        ("guaranteed", {}, "on-demand"),
        ("guaranteed", {"reserved": True}, "reserved"),
        ("", {"reservation_name": "projects/p/reservations/r"}, "reserved"),
        ("", {}, "on-demand"),
    ],
)
def test_the_tier_is_that_of_its_nodes(tier: str, more: dict[str, Any], want: str) -> None:
    box = Box()
    box.ask(tier=tier, **more)
    box.until(QueuedState.ACTIVE)
    assert box.world.nodes()[0].spec.tier == want


def test_a_request_that_was_given_up_is_granted_late_nevertheless() -> None:
    box = Box(queue={"grant": 4200})
    box.ask()
    box.play(4000)
    assert box.nodes() == []
    box.until(QueuedState.ACTIVE)
    assert box.nodes() == ["pod-0-a1"]


# --- those that are not ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "validity",
    [
        Validity(until_after=timedelta(hours=1)),
        Validity(until=START + timedelta(hours=1)),
        Validity(interval=(None, START + timedelta(hours=1))),
    ],
)
def test_a_request_expires(validity: Validity) -> None:
    box = Box(zones={ZONE: {"capacity": [{"amount": 0}]}})
    box.ask(validity=validity)
    box.play(3590)
    assert box.state == QueuedState.WAITING_FOR_RESOURCES
    failed = box.until(QueuedState.FAILED, hours=0.1)
    assert failed.error is not None
    assert failed.error[0] == EXPIRED
    box.play(7 * 86400)
    assert box.record.state == QueuedState.FAILED


def test_an_expired_request_may_linger_and_gets_nothing() -> None:
    box = Box(zones={ZONE: {"capacity": [{"amount": 0}]}}, queue={"expired_lingers": 1})
    box.ask(validity=Validity(until_after=timedelta(hours=1)))
    box.play(7200)
    box.world.operator.set_capacity(ZONE, "", "spot", 5, box.now)
    box.play(7200)
    assert (box.state, box.nodes()) == (QueuedState.WAITING_FOR_RESOURCES, [])


def test_a_request_is_not_served_before_its_time() -> None:
    box = Box()
    box.ask(validity=Validity(after=START + timedelta(hours=5)))
    box.play(5 * 3600 - 10)
    assert box.state is QueuedState.WAITING_FOR_RESOURCES
    box.until(QueuedState.ACTIVE, hours=1)


def test_a_failed_node_is_tried_again_for_a_while() -> None:
    box = Box()
    box.ask()
    box.until(QueuedState.WAITING_FOR_RESOURCES)
    box.world.operator.fail_next_create(13, "an internal error has occurred")
    box.until(QueuedState.PROVISIONING)
    ids = {box.world.nodes()[0].id}
    box.play(30)
    assert (box.state, box.nodes()) == (QueuedState.PROVISIONING, [])
    box.until(QueuedState.ACTIVE)
    assert {box.world.nodes()[0].id}.isdisjoint(ids)


def test_after_45_minutes_of_failures_it_is_failed() -> None:
    box = Box(zones={ZONE: {"create_errors": 1.0}})
    box.ask(SLICES)
    box.until(QueuedState.PROVISIONING)
    begun = box.now
    failed = box.until(QueuedState.FAILED, hours=2)
    assert box.now - begun > timedelta(minutes=45)
    assert failed.error is not None
    assert box.nodes() == []


def test_without_quota_it_fails_or_waits() -> None:
    quota = [{"generation": "v2", "zone": ZONE, "limit": 4}]
    box = Box(quotas=quota)
    box.ask(SLICES)
    failed = box.until(QueuedState.FAILED)
    assert failed.error is not None
    assert (failed.error[0], "Quota limit" in failed.error[1]) == (EXHAUSTED, True)
    box = Box(quotas=quota, queue={"quota_waits": True})
    box.ask(SLICES)
    box.play(86400)
    assert box.state is QueuedState.WAITING_FOR_RESOURCES


def test_a_name_that_is_taken_shows_late() -> None:
    box = Box()
    box.world.api.create_node(PARENT, "pod-0-a1", NODE, box.now)
    box.ask()
    failed = box.until(QueuedState.FAILED)
    assert failed.error is not None
    assert failed.error[0] == EXISTS
    assert box.nodes() == ["pod-0-a1"]


def test_a_person_lets_one_fail_late() -> None:
    box = Box()
    box.ask()
    box.until(QueuedState.ACTIVE)
    assert box.world.operator.fail_queued("q-0", 13, "late", box.now) == ["q-0"]
    assert (box.record.error, box.nodes()) == ((13, "late"), [])


# --- preemption ------------------------------------------------------------------------------------------------------


def test_a_preemption_suspends_it_and_takes_all_its_nodes() -> None:
    box = Box()
    box.ask(SLICES)
    box.until(QueuedState.ACTIVE)
    box.world.operator.preempt("part-1", box.now)
    suspending = box.until(QueuedState.SUSPENDING)
    assert suspending.initiator == Initiator.SERVICE
    assert box.world.api.get_node(f"{PARENT}/nodes/part-1", box.now).state == NodeState.PREEMPTED
    suspended = box.until(QueuedState.SUSPENDED)
    assert (suspended.initiator, box.nodes()) == (Initiator.SERVICE, [])
    box.play(30 * 86400)
    assert box.state is QueuedState.SUSPENDED
    box.delete()
    box.play(600)
    assert refusal(lambda: box.record) == NOT_FOUND


def test_the_shell_of_a_suspended_one_holds_quota_until_it_is_deleted() -> None:
    box = Box(quotas=[{"generation": "v2", "zone": ZONE, "limit": 4}])
    box.ask()
    box.until(QueuedState.ACTIVE)
    box.world.operator.preempt("pod-0-a1", box.now)
    box.until(QueuedState.SUSPENDED)
    plain = NodeSpec(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base", spot=True)
    assert refusal(lambda: box.world.api.create_node(PARENT, "pod-1-a1", plain, box.now)) == EXHAUSTED
    box.delete()
    assert refusal(lambda: box.world.api.create_node(PARENT, "pod-1-a1", plain, box.now)) == EXHAUSTED
    box.play(600)
    box.world.api.create_node(PARENT, "pod-1-a1", plain, box.now)


def test_preempted_while_it_is_provisioned() -> None:
    box = Box()
    box.ask()
    box.until(QueuedState.PROVISIONING)
    box.world.operator.preempt("pod-0-a1", box.now)
    box.until(QueuedState.SUSPENDED)
    assert box.nodes() == []


def test_capacity_that_goes_takes_queued_nodes_like_others() -> None:
    box = Box(zones={ZONE: {"accelerators": ["*"], "capacity": [{"amount": 1}]}})
    box.ask()
    box.until(QueuedState.ACTIVE)
    box.world.operator.set_capacity(ZONE, "", "spot", 0, box.now)
    box.until(QueuedState.SUSPENDED)


# --- people ----------------------------------------------------------------------------------------------------------


def test_deleting_needs_force_while_there_are_nodes() -> None:
    box = Box()
    box.ask()
    box.until(QueuedState.PROVISIONING)
    assert refusal(box.delete) == FAILED_PRECONDITION
    box.until(QueuedState.ACTIVE)
    assert refusal(box.delete) == FAILED_PRECONDITION
    operation = box.delete(force=True)
    assert box.state is QueuedState.DELETING
    assert box.world.nodes()[0].state == NodeState.DELETING
    box.play(600)
    assert refusal(lambda: box.record) == NOT_FOUND
    assert box.nodes() == []
    assert box.world.api.get_operation(operation.name, box.now).done
    assert refusal(box.delete) == NOT_FOUND


def test_after_its_nodes_were_deleted_by_hand_it_is_deletable_once_suspended() -> None:
    box = Box()
    box.ask()
    box.until(QueuedState.ACTIVE)
    box.world.api.delete_node(f"{PARENT}/nodes/pod-0-a1", box.now)
    assert (box.state, box.record.initiator) == (QueuedState.SUSPENDING, Initiator.USER)
    assert refusal(box.delete) == FAILED_PRECONDITION
    box.until(QueuedState.SUSPENDED)
    box.delete()


@pytest.mark.parametrize("state", [QueuedState.CREATING, QueuedState.WAITING_FOR_RESOURCES, QueuedState.FAILED])
def test_without_nodes_it_is_deletable(state: QueuedState) -> None:
    box = Box(zones={ZONE: {"capacity": [{"amount": 0}]}})
    box.ask(validity=Validity(until_after=timedelta(hours=1)))
    box.until(state)
    box.delete()
    box.play(600)
    assert refusal(lambda: box.record) == NOT_FOUND
    box.play(86400)
    assert box.nodes() == []


def test_a_delete_that_is_stuck_has_to_be_repeated() -> None:
    box = Box(faults={"delete_stuck": 1.0, "repeated_delete": (0,)})
    box.ask()
    box.until(QueuedState.WAITING_FOR_RESOURCES)
    box.delete()
    box.play(86400)
    assert box.state is QueuedState.DELETING
    box.delete()
    box.play(600)
    assert refusal(lambda: box.record) == NOT_FOUND


def test_a_reset_lets_it_wait_again() -> None:
    box = Box()
    box.ask()
    assert refusal(lambda: box.world.queued_api.reset_queued_resource(NAME, box.now)) == FAILED_PRECONDITION
    box.until(QueuedState.ACTIVE)
    before = box.world.nodes()[0].id
    operation = box.world.queued_api.reset_queued_resource(NAME, box.now)
    box.until(QueuedState.WAITING_FOR_RESOURCES)
    assert box.world.api.get_operation(operation.name, box.now).done
    box.until(QueuedState.ACTIVE)
    assert box.world.nodes()[0].id != before
    box.world.operator.preempt("pod-0-a1", box.now)
    box.until(QueuedState.SUSPENDED)
    box.world.queued_api.reset_queued_resource(NAME, box.now)
    box.until(QueuedState.ACTIVE)


def test_what_the_create_refuses_at_once() -> None:
    box = Box(queue={"limit": 1})
    wrong = NodeSpec(accelerator_type="v9-8", runtime_version="tpu-ubuntu2204-base")
    for wishes in (
        (),
        (QueuedNodeSpec(NODE),),
        (QueuedNodeSpec(NODE, node_id="a", count=2),),
        (QueuedNodeSpec(wrong, node_id="a"),),
        (QueuedNodeSpec(NODE, node_id="a"), QueuedNodeSpec(NODE, node_id="a")),
        (QueuedNodeSpec(NODE, parent=f"projects/{PROJECT}/locations/elsewhere", node_id="a"),),
    ):
        assert refusal(lambda wishes=wishes: box.ask(wishes)) == 3
    box.ask()
    assert refusal(box.ask) == EXISTS
    other = QueuedSpec(ONE, "spot")
    assert refusal(lambda: box.world.queued_api.create_queued_resource(PARENT, "q-1", other, box.now)) == EXHAUSTED


def test_a_spurious_refusal_of_one_that_was_made() -> None:
    box = Box(queue={"spurious_exists": 1.0})
    assert refusal(box.ask) == EXISTS
    box.until(QueuedState.ACTIVE)


def test_the_audit_log_tells_of_it_and_of_the_delete_of_what_is_not_ours() -> None:
    box = Box()
    box.ask()
    box.until(QueuedState.ACTIVE)
    box.world.operator.preempt("pod-0-a1", box.now)
    box.until(QueuedState.SUSPENDED)
    box.delete()
    box.play(600)
    told = [record for record in box.world.audit if record["kind"] == "queued"]
    assert [record["event"] for record in told] == ["created", *["state"] * 6, "gone"]
    assert [QueuedState(record["state"]).name for record in told][1:-2] == [
        "WAITING_FOR_RESOURCES",
        "PROVISIONING",
        "ACTIVE",
        "SUSPENDING",
        "SUSPENDED",
    ]
    found = check(box.world.audit, Expected(owner="o-1", fleets=frozenset()))
    assert [finding.rule for finding in found] == ["foreign-delete"]


# --- on the wire -----------------------------------------------------------------------------------------------------


class Place:
    """A server whose clock is moved by hand."""

    def __init__(self, server: EmulatorServer, clock: HandClock) -> None:
        self.server, self._clock = server, clock

    def play(self, seconds: float) -> None:
        for _ in range(int(seconds / 10)):
            self._clock.seconds += 10
            with self.server.lock:
                self.server.world.advance(self.server.now())


@pytest.fixture
def place() -> Iterator[Place]:
    clock = HandClock()
    config = WorldConfig.calm(latencies={"read": 0, "write": 0, "visible": 0})
    with EmulatorServer(config, now=clock.now) as server:
        yield Place(server, clock)


def node_spec(version: str) -> dict[str, Any]:
    node = {"accelerator_type": "v2-8", "runtime_version": "tpu-ubuntu2204-base"}
    many = {"v2": "multislice_params", "v2alpha1": "multi_node_params"}[version]
    return {"parent": PARENT, many: {"node_count": 2, "node_id_prefix": "part"}, "node": node}


@pytest.mark.contract
@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_the_official_clients_see_one_through_its_life(place: Place, version: str) -> None:
    package, transport = {
        "v2": (tpu_v2, TpuGrpcTransport),
        "v2alpha1": (tpu_v2alpha1, TpuAlphaTransport),
    }[version]
    types: Any = package.types
    with grpc.insecure_channel(place.server.endpoint) as channel:
        client: Any = package.TpuClient(transport=transport(channel=channel))
        wanted = types.QueuedResource(
            tpu={"node_spec": [node_spec(version)]},
            spot={},
            queueing_policy={"valid_until_duration": timedelta(hours=9)},
        )
        begun = client.create_queued_resource(parent=PARENT, queued_resource_id="q-0", queued_resource=wanted)
        assert (begun.metadata.verb, begun.metadata.target) == ("create", NAME)
        place.play(3600)
        assert begun.result(timeout=30).name == NAME
        (seen,) = client.list_queued_resources(parent=PARENT)
        states = types.QueuedResourceState.State
        assert (seen.state.state, "active_data" in seen.state) == (states.ACTIVE, True)
        assert (seen.tpu.node_spec[0].parent, seen.queueing_policy.valid_until_duration.seconds) == (PARENT, 9 * 3600)
        nodes = {node.name.rpartition("/")[2]: node for node in client.list_nodes(parent=PARENT)}
        assert set(nodes) == {"part-0", "part-1"}
        assert (nodes["part-0"].queued_resource, nodes["part-0"].multislice_node) == (NAME, True)
        place.server.apply_order({"do": "preempt", "selector": "part-0"})
        place.play(600)
        suspended = client.get_queued_resource(name=NAME)
        assert suspended.state.state == states.SUSPENDED
        assert suspended.state.state_initiator == types.QueuedResourceState.StateInitiator.SERVICE
        ended = client.delete_queued_resource(name=NAME)
        place.play(600)
        answer = client.get_operation({"name": ended.operation.name}).response
        kind = "google.protobuf.Empty" if version == "v2" else "google.cloud.tpu.v2alpha1.QueuedResource"
        assert answer.TypeName() == kind


@pytest.mark.contract
@pytest.mark.parametrize("version", ["v2", "v2alpha1"])
def test_the_discovery_client_sees_the_same(place: Place, version: str) -> None:
    client = discover(
        "tpu",
        version,
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        client_options={"api_endpoint": place.server.rest_endpoint},
        static_discovery=True,
    )
    queued = client.projects().locations().queuedResources()
    node = {"acceleratorType": "v2-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    body = {
        "tpu": {"nodeSpec": [{"parent": PARENT, "nodeId": "pod-0-a1", "node": node}]},
        "guaranteed": {"minDuration": "3600s"},
        "queueingPolicy": {"validUntilTime": "2026-12-31T00:00:00Z"},
    }
    queued.create(parent=PARENT, queuedResourceId="q-0", requestId="r-1", body=body).execute()
    queued.create(parent=PARENT, queuedResourceId="q-0", requestId="r-1", body=body).execute()
    place.play(3600)
    (seen,) = queued.list(parent=PARENT).execute()["queuedResources"]
    assert (seen["state"], seen["guaranteed"]) == ({"state": "ACTIVE", "activeData": {}}, {"minDuration": "3600s"})
    place.server.apply_order({"do": "queued-state", "selector": "q-0", "state": 42})
    place.server.apply_order({"do": "unknown-fields", "selector": "q-0"})
    strange = queued.get(name=NAME).execute()
    assert (strange["state"]["state"], strange["laterCount"]) == ("STATE_42", 7)
    place.server.apply_order({"do": "fail-queued", "selector": "q-0", "code": 8, "text": "no room"})
    failed = queued.get(name=NAME).execute()["state"]
    assert failed == {"state": "FAILED", "failedData": {"error": {"code": 8, "message": "no room"}}}
    queued.delete(name=NAME, force=True).execute()
    place.play(600)
    assert queued.list(parent=PARENT).execute() == {}


@pytest.mark.contract
def test_maintenance_at_will_is_alphas_own(place: Place) -> None:
    with grpc.insecure_channel(place.server.endpoint) as channel:
        client: Any = tpu_v2alpha1.TpuClient(transport=TpuAlphaTransport(channel=channel))
        types: Any = tpu_v2alpha1.types
        wanted = types.QueuedResource(tpu={"node_spec": [node_spec("v2alpha1")]}, best_effort={})
        client.create_queued_resource(parent=PARENT, queued_resource_id="q-0", queued_resource=wanted)
        place.play(3600)
        name = f"{PARENT}/nodes/part-0"
        client.simulate_maintenance_event({"name": name, "worker_ids": ["0"]})
        assert client.get_node(name=name).health == types.Node.Health.UNHEALTHY_MAINTENANCE
        place.play(600)
        assert client.get_node(name=name).health == types.Node.Health.HEALTHY
        client.perform_maintenance({"name": name})
        done = client.perform_maintenance_queued_resource({"name": NAME, "node_names": [f"{PARENT}/nodes/part-1"]})
        place.play(60)
        assert client.get_operation({"name": done.operation.name}).done
        assert list(client.list_reservations({"parent": PARENT})) == []
        restarted = [
            record["worker"]
            for record in place.server.world.audit
            if record["kind"] == "machine" and record["event"] == "boot" and record["name"] == name
        ]
        assert restarted == [0, 0, 0]


def test_a_queued_resource_lives_without_the_api() -> None:
    state = State(WorldConfig.calm(), START, seed=7)
    nodes = NodeLifecycle(state)
    queue = QueuedLifecycle(state, nodes)
    path, place = QueuedPath(PROJECT, ZONE, "q-0"), NodePath(PROJECT, ZONE, "pod-0-a1")
    queue.create(QueuedRecord(path, START, QueuedSpec(ONE)), [Planned(place, NODE, accelerators.lookup("v2-8"))])
    state.advance(START + timedelta(hours=1))
    life = state.queue[path]
    assert (life.record.state, queue.nodes_of(life)) == (QueuedState.ACTIVE, [state.nodes[place]])
    nodes.terminate(state.nodes[place], cause="test")
    state.advance(START + timedelta(hours=2))
    assert (life.record.state, life.record.initiator) == (QueuedState.SUSPENDED, Initiator.SERVICE)
    assert state.nodes == {}
