"""The audit check must stay silent on a good history and speak up on each kind of bad one."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tpucare.testbed import audit as rules
from tpucare.testbed.audit import Expected, check
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.queued_records import QueuedNodeSpec, QueuedSpec, Validity
from tpucare.testbed.emulator.world.records import ApiError, CallFate, NodeSpec
from tpucare.testbed.emulator.world.world import World

START = datetime(2026, 11, 1, tzinfo=UTC)
PARENT = "projects/p/locations/us-central1-a"
OURS = Expected(owner="me", fleets=frozenset({"pod"}), live_slots=frozenset())


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def spec(slot: str = "pod-0", owner: str = "me", fleet: str = "pod", **changes: Any) -> NodeSpec:
    labels = {"tpucare-owner": owner, "tpucare-fleet": fleet, "tpucare-slot": slot}
    base: dict[str, Any] = {"accelerator_type": "v3-8", "runtime_version": "tpu-ubuntu2204-base", "spot": True}
    return NodeSpec(**{**base, "labels": labels, **changes})


@pytest.fixture
def world() -> World:
    return World(WorldConfig.calm(), seed=1, start=START)


def start(world: World, node: str, number: int, seconds: float, worker: int = 0) -> None:
    token = f"{node}.{number}"
    world.operator.log_note("run-started", at(seconds), token=token, name=f"{PARENT}/nodes/{node}", worker=worker)


def end(world: World, node: str, number: int, seconds: float, worker: int = 0) -> None:
    token = f"{node}.{number}"
    world.operator.log_note("run-ended", at(seconds), token=token, name=f"{PARENT}/nodes/{node}", worker=worker)


def found(world: World, expected: Expected = OURS) -> list[str]:
    # Through JSON and back: what a server writes must be enough.
    return [finding.rule for finding in check([json.loads(json.dumps(one)) for one in world.audit], expected)]


def test_a_recovery_by_the_book_is_clean(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(0))
    start(world, "pod-0-a1", 1, 130)
    world.operator.preempt("pod-0", at(300))
    world.api.delete_node(f"{PARENT}/nodes/pod-0-a1", at(340))
    world.api.create_node(PARENT, "pod-0-a2", spec(), at(341))
    start(world, "pod-0-a2", 1, 600)
    end(world, "pod-0-a2", 1, 900)
    start(world, "pod-0-a2", 2, 910)
    assert found(world, Expected(owner="me", fleets=frozenset({"pod"}), live_slots=frozenset({"pod-0"}))) == []


def silent_twin(world: World) -> None:
    """The old node fell silent, its run is alive, and the next attempt starts elsewhere."""
    for node in ("pod-0-a1", "pod-0-a2"):
        world.api.create_node(PARENT, node, spec(), at(0))
    start(world, "pod-0-a1", 1, 200)
    world.operator.preempt("pod-0-a1", at(300), silent=True, visible_after=timedelta(minutes=5))
    start(world, "pod-0-a2", 1, 400)


def second_gang(world: World) -> None:
    """Worker 1 of the old run still lives when the new run starts on worker 0."""
    world.api.create_node(PARENT, "pod-0-a1", spec(accelerator_type="v3-32"), at(0))
    for worker in (0, 1):
        start(world, "pod-0-a1", 1, 300, worker)
    end(world, "pod-0-a1", 1, 400, 0)
    start(world, "pod-0-a1", 2, 401, 0)


def started_twice(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(0))
    start(world, "pod-0-a1", 1, 300)
    start(world, "pod-0-a1", 1, 301)


def foreign_owner(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(owner="you"), at(0))
    world.api.delete_node(f"{PARENT}/nodes/pod-0-a1", at(10))


def unknown_fleet(world: World) -> None:
    world.api.create_node(PARENT, "old-0-a1", spec("old-0", fleet="old"), at(0))
    world.api.delete_node(f"{PARENT}/nodes/old-0-a1", at(10))
    world.advance(at(1000))


def name_again(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(0))
    world.api.delete_node(f"{PARENT}/nodes/pod-0-a1", at(10))
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(300))
    world.api.delete_node(f"{PARENT}/nodes/pod-0-a1", at(310))
    world.advance(at(1000))


def too_many_creates(world: World) -> None:
    for number in range(61):
        world.api.create_node(PARENT, f"pod-{number}-a1", spec(f"pod-{number}"), at(number * 0.9))
    world.operator.remove("*", at(100))


def forgotten_node(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(0))
    world.advance(at(10_000))


def healthy_delete(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(0))
    world.api.delete_node(f"{PARENT}/nodes/pod-0-a1", at(1000))
    world.advance(at(10_000))


def ask(world: World, name: str, seconds: float, *, zone: str = PARENT, **labels: str) -> str:
    """A queued resource of ours for slot pod-0, which nobody grants before an hour."""
    node = spec(**labels) if labels else spec()
    queued = QueuedSpec((QueuedNodeSpec(node, node_id=name),), "spot", validity=Validity(after=at(3600)))
    world.queued_api.create_queued_resource(zone, name, queued, at(seconds))
    return f"{zone}/queuedResources/{name}"


def two_requests(world: World) -> None:
    ask(world, "pod-0-a1", 0)
    second = ask(world, "pod-0-a2", 60)
    for name, seconds in ((second, 70), (second.replace("a2", "a1"), 71)):
        world.queued_api.delete_queued_resource(name, True, at(seconds))
    world.advance(at(1000))


def forgotten_request(world: World) -> None:
    ask(world, "pod-0-a1", 0)
    world.advance(at(600))


def request_of_another(world: World) -> None:
    node = NodeSpec(accelerator_type="v3-8", runtime_version="tpu-ubuntu2204-base", labels={"team": "vision"})
    world.queued_api.create_queued_resource(PARENT, "theirs", QueuedSpec((QueuedNodeSpec(node, node_id="x"),)), at(0))
    world.queued_api.delete_queued_resource(f"{PARENT}/queuedResources/theirs", True, at(60))
    world.advance(at(1000))


def granted_and_deleted(world: World) -> None:
    name = ask(world, "pod-0-a1", 0)
    world.advance(at(30_000))
    world.queued_api.delete_queued_resource(name, True, at(30_001))
    world.advance(at(40_000))


def secret_in_metadata(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(metadata={"startup-script": 'export KEY="hunter2 "'}), at(0))
    world.operator.remove("*", at(1))


@pytest.mark.parametrize(
    ("history", "want"),
    [
        (silent_twin, "two-nodes"),
        (second_gang, "doubled-run"),
        (started_twice, "doubled-run"),
        (foreign_owner, "foreign-delete"),
        (unknown_fleet, "foreign-delete"),
        (name_again, "repeated-name"),
        (too_many_creates, "create-burst"),
        (forgotten_node, "leak"),
        (healthy_delete, "unasked-delete"),
        (secret_in_metadata, "shown-secret"),
        (two_requests, "doubled-request"),
        (forgotten_request, "leak"),
        (request_of_another, "foreign-delete"),
        (granted_and_deleted, "unasked-delete"),
    ],
)
def test_a_bad_history_is_caught(world: World, history: Callable[[World], None], want: str) -> None:
    history(world)
    live = frozenset({"pod-0"}) if want in ("two-nodes", "doubled-run") else frozenset[str]()
    expected = Expected("me", frozenset({"pod"}), live_slots=live, secrets=('"hunter2 "',))
    heard = [rule for rule in found(world, expected) if not (want == "two-nodes" and rule == "leak")]
    assert heard == [want]


def test_a_request_after_the_last_one_is_deleted_is_clean(world: World) -> None:
    name = ask(world, "pod-0-a1", 0)
    world.queued_api.delete_queued_resource(name, True, at(60))
    ask(world, "pod-0-a2", 61)
    world.advance(at(30_000))
    assert found(world, Expected("me", frozenset({"pod"}), live_slots=frozenset({"pod-0"}))) == []


def test_a_kill_ends_a_run_and_silence_does_not(world: World) -> None:
    silent_twin(world)
    world.advance(at(700))
    start(world, "pod-0-a2", 2, 800)
    named = {finding.rule: finding.text for finding in check(world.audit, OURS)}
    assert "two-nodes" in named
    assert "pod-0-a2.1" in named["doubled-run"]
    assert "pod-0-a1" not in named["doubled-run"]


@pytest.mark.parametrize("applied", [True, False])
def test_sending_again_after_a_lost_answer_is_no_repetition(world: World, applied: bool) -> None:
    world.operator.lose_next_answer("CreateNode", applied=applied)
    fate = world.calls.fate("CreateNode", f"{PARENT}/nodes/pod-0-a1", at(0))
    assert fate.applied is applied
    if applied:
        world.api.create_node(PARENT, "pod-0-a1", spec(), at(0), fate)
    else:
        world.api.create_node(PARENT, "pod-0-a1", spec(), at(5))
    world.operator.remove("*", at(60))
    if applied:
        world.api.create_node(PARENT, "pod-0-a1", spec(), at(61))
        world.operator.remove("*", at(62))
    assert found(world) == []


@pytest.mark.parametrize(("under_way", "heard"), [(50.0, []), (8.0, ["repeated-name"])])
def test_a_call_that_its_repetition_overtook_is_no_repetition(world: World, under_way: float, heard: list[str]) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(30))
    late = CallFate(under_way, 0.2, peer="daemon")
    with pytest.raises(ApiError, match="already exists"):
        world.api.create_node(PARENT, "pod-0-a1", spec(), at(51), late)
    world.operator.remove("*", at(60))
    assert found(world) == heard


def test_a_daemon_that_was_killed_may_send_again(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(0))
    world.operator.remove("*", at(60))
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(61))
    world.operator.remove("*", at(62))
    assert found(world) == ["repeated-name"]
    assert found(world, Expected("me", live_slots=frozenset(), restarts=(at(1),))) == []


def test_a_call_that_its_process_did_not_outlive_may_be_sent_again(world: World) -> None:
    """It was on its way when the daemon was killed, and arrived after the next one had begun."""
    world.api.create_node(PARENT, "pod-0-a1", spec(), at(10), CallFate(8.0, 0.2, peer="daemon"))
    with pytest.raises(ApiError, match="already exists"):
        world.api.create_node(PARENT, "pod-0-a1", spec(), at(11))
    world.operator.remove("*", at(60))
    assert found(world) == ["repeated-name"]
    assert found(world, Expected("me", live_slots=frozenset(), restarts=(at(5),))) == []
    assert found(world, Expected("me", live_slots=frozenset(), restarts=(at(1),))) == ["repeated-name"]


def test_deletes_that_were_asked_for_are_allowed(world: World) -> None:
    healthy_delete(world)
    assert found(world, Expected("me", live_slots=frozenset(), allowed_deletes=frozenset({"pod-0-a1"}))) == []


def test_what_is_not_ours_is_not_our_leak(world: World) -> None:
    world.api.create_node(PARENT, "pod-0-a1", spec(owner="you"), at(0))
    world.advance(at(1000))
    assert found(world) == []


def test_a_log_is_read_from_a_file_though_its_last_line_is_cut(world: World, tmp_path: Path) -> None:
    foreign_owner(world)
    path = tmp_path / "audit.jsonl"
    lines = [json.dumps(record) for record in world.audit]
    path.write_text("\n".join([*lines, lines[0][:20]]))
    assert [finding.rule for finding in check(path, OURS)] == ["foreign-delete"]
    assert str(check(path, OURS)[0]).startswith("2026-11-01T00:00:10")
    path.write_text("\n".join([lines[0][:20], *lines]))
    with pytest.raises(ValueError, match="line 1: not JSON"):
        rules.load(path)


def test_without_knowledge_nothing_is_claimed(world: World) -> None:
    foreign_owner(world)
    forgotten_node(World(WorldConfig.calm(), seed=1, start=START))
    assert found(world, Expected()) == []
