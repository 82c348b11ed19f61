"""What the Python API's functions delete, what they leave alone, and what they tell whoever cares for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.kits.deployment import deployment, eventually
from tests.kits.local_remote import LocalRemote
from tpucare.adapters.state import folder as state_folder
from tpucare.adapters.state.store import open_reader, open_store
from tpucare.adapters.system import machine_id
from tpucare.api import deletion, hosts, session
from tpucare.api.attempt import Attempt, Host, bind
from tpucare.api.deletion import NotDeleted, delete_all, delete_one_tpu, synchronous_deletion
from tpucare.model.errors import ConfigError, NodeGone
from tpucare.model.lifecycles import CreateState, RequestState
from tpucare.model.memory import CreateIntent, DesiredState, FleetRecord, Memory, NodeMemory, RequestIntent
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    Node,
    NodeKey,
    NodeRequest,
    Operation,
    Place,
    Provisioning,
    QueuedRequest,
    Worker,
)
from tpucare.service import control_socket as control
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig

PROJECT, NEAR, FAR = "grant", "us-east5-a", "europe-west4-b"
PLACE = Place(NEAR, "v5p-8", Provisioning.SPOT, "v2-alpha-tpuv5")
QUEUED = replace(PLACE, queued=True)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Scene:
    """An emulated cloud without machines, and a state folder that a script of the Python API left behind."""

    server: EmulatorServer
    state: Path

    @property
    def owner(self) -> str:
        return state_folder.read_owner(self.state) or ""

    def create(self, name: str, slot: str = "", fleet: str = "", owner: str | None = None) -> Node:
        """`slot` empty: a node of somebody who has never heard of tpucare. Returns it as soon as it is listed."""
        labels = {}
        if slot:
            labels = {LABEL_OWNER: self.owner if owner is None else owner, LABEL_SLOT: slot, LABEL_NUMBER: "1"}
            labels[LABEL_FLEET] = fleet or slot
        self.ask(name, labels)
        return eventually(lambda: self.node(name), f"{name} is listed")

    def ask(self, name: str, labels: dict[str, str]) -> Operation:
        request = NodeRequest(NodeKey(PROJECT, NEAR, name), PLACE, labels, {})
        return session.current().cloud.create_node(request)

    def node(self, name: str) -> Node | None:
        here = session.current()
        here.forget_listings()
        return next((node for node, _ in here.nodes(NEAR) if node.name == name), None)

    def remember(self, store: str, *slots: str, **more: Memory) -> None:
        """A store of that name which cares for *slots* of fleet *store*, one node `<slot>-a1` each."""
        with self.open(store) as opened:
            opened.save_fleet(FleetRecord(store, f"name: {store}\n", "/", NOW))
            for slot in slots:
                node = self.create(f"{slot}-a1", slot, store)
                past = NodeMemory(node.name, NEAR, node.id, node.create_time)
                opened.save({slot: Memory(store, nodes=(past,))})
            for slot, memory in more.items():
                opened.save({slot: memory})

    @contextmanager
    def open(self, store: str):  # type: ignore[no-untyped-def]
        with open_store(self.state, machine_id=machine_id(), now=NOW, name=store) as opened:
            yield opened

    def enqueue(self, name: str, slot: str) -> None:
        """A queued resource of ours that waits."""
        labels = {LABEL_OWNER: self.owner, LABEL_SLOT: slot, LABEL_FLEET: slot, LABEL_NUMBER: "1"}
        request = QueuedRequest(NodeKey(PROJECT, NEAR, name), QUEUED, labels, {}, f"request-{name}")
        session.current().cloud.create_queued(request)

    def queue(self) -> set[str]:
        """Queued resources that are there."""
        return {key.name for key in session.current().cloud.list_queued(PROJECT).resources}

    def wish(self, store: str, slot: str) -> DesiredState:
        with open_reader(self.state, name=store) as reader:
            return reader.memories()[slot].wish

    def names(self) -> set[str]:
        """Nodes that are not on their way out."""
        with self.server.lock:
            return {record.path.node_id for record in self.server.world.nodes() if record.state != 5}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name in [name for name in os.environ if name.startswith("TPUCARE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(deletion, "POLL_EVERY_SECONDS", 0.05)
    server = EmulatorServer(WorldConfig.fast(zones={NEAR: {}, FAR: {}}), project=PROJECT)
    server.start()
    monkeypatch.setenv("TPUCARE_ENDPOINT", server.endpoint)
    monkeypatch.setenv("TPUCARE_PROJECT", PROJECT)
    monkeypatch.setenv("TPUCARE_STATE", str(tmp_path / "state"))
    try:
        yield Scene(server, tmp_path / "state")
    finally:
        session.close()
        server.stop()


def test_a_slot_that_nobody_cares_for_is_deleted_and_stays_down(scene: Scene) -> None:
    scene.remember("pod", "pod")
    scene.remember("other", "other")
    delete_one_tpu("", "pod", NEAR)
    eventually(lambda: scene.names() == {"other-a1"}, "it is being deleted")
    assert scene.wish("pod", "pod") is DesiredState.DOWN
    assert scene.wish("other", "other") is DesiredState.UP
    synchronous_deletion("pod", "pod", NEAR)
    assert scene.node("pod-a1") is None
    assert "pod" not in hosts.tpu_names(NEAR, no_filter=True)
    delete_one_tpu("", "pod", NEAR)


def test_the_prefix_is_a_guard(scene: Scene) -> None:
    scene.remember("pod", "pod")
    delete_one_tpu("sweep", "pod", NEAR)
    synchronous_deletion("sweep", "pod", NEAR)
    assert scene.names() == {"pod-a1"}
    delete_one_tpu("pod", NEAR)
    eventually(lambda: not scene.names(), "host and zone alone are enough")


def test_everything_with_a_prefix_goes_and_the_rest_is_named(scene: Scene) -> None:
    scene.remember("sweep", "sweep-0", "sweep-1")
    scene.remember("pod", "pod")
    scene.create("sweeper", "")
    scene.create("sweep-7-a1", "sweep-7", owner="o-somebodyelse")
    scene.create("sweep-8-a1", "sweep-8", "never-known")
    with pytest.raises(NotDeleted) as refused:
        delete_all("sweep", NEAR)
    assert scene.names() == {"sweeper", "sweep-7-a1", "sweep-8-a1", "pod-a1"}
    assert "sweeper is not ours" in str(refused.value)
    assert "sweep-7-a1 is not ours" in str(refused.value)
    assert "sweep-8-a1 is of a fleet that this state folder never knew" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert "pod" not in str(refused.value)


def test_many_threads_delete_the_slots_of_one_store_at_once(scene: Scene) -> None:
    names = [f"sweep-{number}" for number in range(6)]
    scene.remember("sweep", *names)
    threads = [threading.Thread(target=synchronous_deletion, args=("sweep", name, NEAR)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert scene.names() == set()


def test_a_node_of_a_known_fleet_whose_slot_was_forgotten_is_deleted(scene: Scene) -> None:
    scene.remember("sweep", "sweep-0")
    scene.create("sweep-5-a1", "sweep-5", "sweep")
    synchronous_deletion("", "sweep-5", NEAR)
    assert scene.names() == {"sweep-0-a1"}


def test_by_its_own_name_an_old_node_goes_without_its_successor(scene: Scene) -> None:
    scene.remember("pod", "pod")
    scene.create("pod-a2", "pod")
    synchronous_deletion("", "pod-a1", NEAR)
    assert scene.names() == {"pod-a2"}
    assert scene.wish("pod", "pod") is DesiredState.UP
    synchronous_deletion("", "pod-a2", NEAR)
    assert scene.names() == set()
    assert scene.wish("pod", "pod") is DesiredState.DOWN


def test_what_was_asked_for_and_not_heard_of_is_deleted_when_it_comes(scene: Scene) -> None:
    scene.remember("pod")
    labels = {LABEL_OWNER: scene.owner, LABEL_SLOT: "pod", LABEL_FLEET: "pod"}
    operation = scene.ask("pod-a1", labels)
    intent = CreateIntent("pod-a1", 1, NEAR, PLACE.key, NOW, state=CreateState.RUNNING, operation=operation.name)
    lost = CreateIntent(
        "pod-a2", 2, NEAR, PLACE.key, datetime.now(UTC) - timedelta(seconds=89), state=CreateState.ANSWER_LOST
    )
    scene.remember("pod", pod=Memory("pod", creates=(intent, lost)))
    synchronous_deletion("", "pod", NEAR)
    assert scene.node("pod-a1") is None
    assert session.current().cloud.get_operation(operation.name).done


@pytest.mark.parametrize("state", [RequestState.WAITING, RequestState.SENT], ids=["waits", "no answer was read"])
def test_a_slot_that_only_stands_in_a_queue_is_deleted(scene: Scene, state: RequestState) -> None:
    """No node and no create of it is there; its request would bring a node that nobody cares for."""
    scene.remember("pod", pod=Memory("pod", requests=(RequestIntent("pod-a1", 1, NEAR, QUEUED.key, NOW, state=state),)))
    scene.enqueue("pod-a1", "pod")
    scene.enqueue("pod-a2", "other")
    delete_all("pod", FAR)
    assert scene.queue() == {"pod-a1", "pod-a2"}
    delete_all("pod", NEAR)
    assert scene.queue() == {"pod-a2"}
    assert scene.wish("pod", "pod") is DesiredState.DOWN


def test_a_request_that_was_sent_and_not_heard_of_is_deleted_when_it_comes(scene: Scene) -> None:
    sent_at = datetime.now(UTC) - timedelta(seconds=87)
    sent = RequestIntent("pod-a1", 1, NEAR, QUEUED.key, sent_at, state=RequestState.ANSWER_LOST)
    scene.remember("pod", pod=Memory("pod", requests=(sent,)))
    arrives = threading.Timer(1, scene.enqueue, ("pod-a1", "pod"))
    arrives.start()
    synchronous_deletion("", "pod", NEAR)
    arrives.join()
    assert scene.queue() == set()


def test_whoever_cares_and_takes_no_orders_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "BEGIN_SECONDS", 0.5)
    scene.remember("pod", "pod")
    with scene.open("pod"), pytest.raises(NotDeleted, match=f"pod: process {os.getpid()} cares for it"):
        delete_one_tpu("", "pod", NEAR)
    assert scene.names() == {"pod-a1"}


def test_a_host_of_the_same_name_in_another_project_is_left_alone(scene: Scene) -> None:
    scene.remember("pod.grant", pod=Memory("pod"))
    scene.remember("pod.other", pod=Memory("pod", nodes=(NodeMemory("pod-a1", NEAR, 1, NOW),)))
    for store in ("pod.grant", "pod.other"):
        with scene.open(store) as opened:
            opened.save_fleet(FleetRecord("pod", "name: pod\n", "/", NOW))
    scene.create("pod-a1", "pod")
    synchronous_deletion("", "pod", NEAR)
    assert scene.names() == set()
    assert scene.wish("pod.grant", "pod") is DesiredState.DOWN
    assert scene.wish("pod.other", "pod") is DesiredState.UP


def test_nothing_in_another_zone_is_touched(scene: Scene) -> None:
    scene.remember("pod", "pod")
    synchronous_deletion("", "pod", FAR)
    delete_all("pod", FAR)
    assert scene.names() == {"pod-a1"}
    assert scene.wish("pod", "pod") is DesiredState.UP


def test_without_anything_ever_cared_for_nothing_is_ours(scene: Scene) -> None:
    scene.create("pod-a1", "pod", owner="o-somebodyelse")
    delete_one_tpu("", "pod", NEAR)
    with pytest.raises(NotDeleted, match="pod-a1 is not ours"):
        delete_one_tpu("", "pod-a1", NEAR)
    assert scene.names() == {"pod-a1"}


@pytest.mark.parametrize(
    ("prefix", "host", "zone", "word"),
    [
        ("", "po d", NEAR, "host"),
        ("", "pod", "nowhere", "zone"),
        (7, "pod", NEAR, "prefix"),
        ("", "pod", "us-x1-y", "zone"),
    ],
)
def test_bad_input_is_one_line(scene: Scene, prefix: str, host: str, zone: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        delete_one_tpu(prefix, host, zone)


def test_inside_an_attempt_its_own_node_is_deleted_and_no_other(scene: Scene) -> None:
    scene.remember("pod", "pod")
    first, second = scene.node("pod-a1"), scene.create("pod-a2", "pod")
    assert first is not None
    remote = LocalRemote()
    try:
        attempts = [
            Attempt(remote, slot="pod", token=f"{node.name}.1", number=1, workers=(Worker(node.key, node.id, 0, "x"),))
            for node in (first, second)
        ]
        with bind(attempts[0]):
            synchronous_deletion("pod", "pod", NEAR)
        assert scene.names() == {"pod-a2"}
        assert scene.wish("pod", "pod") is DesiredState.UP
        attempts[0].end("preempted")
        with pytest.raises(NodeGone, match="preempted"):
            delete_one_tpu("", Host(attempts[0]), NEAR)
        assert scene.names() == {"pod-a2"}
    finally:
        remote.close()


def test_a_caretaker_that_ends_before_it_says_so_leaves_the_rest_to_us(scene: Scene) -> None:
    """As `start_single` does, which returns once its slot is over."""
    scene.remember("pod", "pod")
    asked: list[object] = []

    def carry(order: object) -> dict[str, object]:
        asked.append(order)
        if order == {"do": "down", "target": "pod"}:
            return {"changed": ["pod"]}
        raise control.Refused("the daemon is stopping")

    waiting = threading.Event()
    with scene.open("pod"):
        caretaker = control.Control(scene.state / "pod.sock", waiting.set)
        caretaker.start()
        call = session.in_background(lambda: synchronous_deletion("", "pod", NEAR))
        while {"do": "status"} not in asked:
            assert waiting.wait(30)
            waiting.clear()
            caretaker.serve(carry)
        caretaker.close()
    call.result(30)
    assert asked[0] == {"do": "down", "target": "pod"}
    assert scene.names() == set()


# --- under the eyes of a daemon --------------------------------------------------------------------------------------


@pytest.mark.machines
@pytest.mark.timeout(120)
def test_a_daemon_is_ordered_to_take_the_slot_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h").mkdir()
    for name in [name for name in os.environ if name.startswith("TPUCARE_")]:
        monkeypatch.delenv(name)
    with deployment(tmp_path / "h") as home:
        for name in ("TPUCARE_EMULATOR", "TPUCARE_STATE"):
            monkeypatch.setenv(name, home.environment[name])
        home.declare("pod", count=2, run="sleep 600", live=False)
        home.start()
        for slot in ("pod-0", "pod-1"):
            home.await_event("launch", slot)
            home.allow_deletes(slot)
        synchronous_deletion("pod", "pod-0", NEAR)
        assert not [name for name in home.names() if name.startswith("pod-0")]
        assert home.row("pod-1")["wish"] == "up"
        delete_all("pod", NEAR)
        assert home.names() == []
        session.close()
    assert {event.slot for event in home.events("down")} == {"pod-0", "pod-1"}
