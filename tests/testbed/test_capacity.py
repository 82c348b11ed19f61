"""Capacity: what is drawn, what is shipped, who holds it, and whom its loss takes away."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tpucare.model import accelerators
from tpucare.model.errors import ConfigError
from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.world.capacity import Pool, load_trace, shipped_traces, supply
from tpucare.testbed.emulator.world.config import Capacity, WorldConfig
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.emulator.world.world import World

START = datetime(2026, 11, 1, tzinfo=UTC)
ZONE = "us-central1-a"
PARENT = f"projects/p/locations/{ZONE}"


def at(**parts: float) -> datetime:
    return START + timedelta(**parts)


def changes(config: Capacity, count: int, seed: int = 7) -> list[tuple[datetime, int]]:
    return list(islice(supply(config, START, random.Random(seed)), count))


def world_with(*pools: dict[str, Any], seed: int = 1) -> World:
    zones = {ZONE: {"capacity": list(pools), "accelerators": ["*"]}}
    return World(WorldConfig.calm(zones=zones), seed=seed, start=START)


def create(world: World, name: str, now: datetime, *, tier: str = "spot") -> str:
    spot, reserved = tier == "spot", tier == "reserved"
    asked = NodeSpec("v3-8", None, "tpu-ubuntu2204-base", spot=spot, reserved=reserved)
    return world.api.create_node(PARENT, name, asked, now).name


def test_a_constant_amount_never_changes() -> None:
    assert changes(Capacity(amount=3), 5) == [(START, 3)]


def test_a_schedule_begins_with_nothing_unless_it_says_otherwise() -> None:
    assert changes(Capacity(schedule=((60, 2), (30, 5))), 5) == [
        (START, 0),
        (at(seconds=30), 5),
        (at(seconds=60), 2),
    ]


def test_a_process_stays_within_bounds_and_repeats_from_its_seed() -> None:
    config = Capacity.model_validate({"process": {"maximum": 5, "births": 4, "deaths": 2, "bursts": 0.5}})
    drawn = changes(config, 2000)
    assert drawn == changes(config, 2000)
    assert drawn != changes(config, 2000, seed=8)
    assert {amount for _, amount in drawn} == {0, 1, 2, 3, 4, 5}
    assert [instant for instant, _ in drawn] == sorted(instant for instant, _ in drawn)


def test_a_burst_takes_its_share_and_nothing_is_born_for_a_while() -> None:
    process = {"maximum": 8, "births": 60, "deaths": 0, "bursts": 0.2, "burst_share": 1, "stockout": "2h"}
    drawn = changes(Capacity.model_validate({"process": process}), 3000)
    bursts = [index for index in range(1, len(drawn)) if drawn[index][1] == 0 and drawn[index - 1][1] > 0]
    assert len(bursts) > 3
    for index in bursts:
        empty_until = next((instant for instant, amount in drawn[index:] if amount > 0), None)
        assert empty_until is None or empty_until - drawn[index][0] >= timedelta(hours=2)


def test_every_shipped_trace_is_readable() -> None:
    names = shipped_traces()
    assert len([name for name in names if name.startswith("gcp-h100-2025/")]) == 9
    assert len([name for name in names if name.startswith("aws-v100x4-2023/")]) == 3
    for name in names:
        trace = load_trace(name)
        assert len(trace.ticks) > 1000
        assert 0 <= min(trace.ticks) <= max(trace.ticks) <= trace.maximum


def test_a_trace_changes_between_its_ticks_fills_gaps_and_repeats(tmp_path: Path) -> None:
    raw = {"format": "spot-capacity-trace/1", "interval_s": 600, "max_capacity": 4, "capacity": [None, 2, None, 4]}
    path = tmp_path / "zone.json"
    path.write_text(json.dumps(raw))
    assert load_trace(str(path)).ticks == (2, 2, 2, 4)
    drawn = changes(Capacity(trace=str(path)), 5)
    assert [amount for _, amount in drawn] == [2, 4, 2, 4, 2]
    assert at(minutes=20) <= drawn[1][0] <= at(minutes=30)
    assert at(minutes=30) <= drawn[2][0] <= at(minutes=40)
    assert changes(Capacity(trace=str(path), trace_from=3), 1) == [(START, 4)]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": "other"}', '{"format": "spot-capacity-trace/1", "capacity": [1]}']
)
def test_a_bad_trace_is_one_line_at_the_start_of_the_world(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"trace .*bad\.json"):
        world_with({"trace": str(path)})
    with pytest.raises(ConfigError, match=r"neither a file nor one of .*gcp-h100-2025/us-east4-a"):
        world_with({"trace": "nowhere"})


def test_a_pool_takes_a_slice_whole_or_not_at_all() -> None:
    pool = Pool(ZONE, "v3", "spot", "hosts", 5)
    slice_of_four, single = accelerators.lookup("v3-32"), accelerators.lookup("v3-8")
    assert pool.claim(1, slice_of_four)
    assert not pool.claim(2, slice_of_four)
    assert pool.claim(3, single)
    assert not pool.claim(4, single)
    pool.release(1)
    pool.release(1)
    assert pool.used == 1
    assert pool.victims(random.Random(1)) == []
    pool.capacity = 0
    assert pool.victims(random.Random(1)) == [3]


def test_the_narrowest_pool_counts() -> None:
    world = world_with({"amount": 0}, {"type": "v3", "amount": 1}, {"type": "v3-32", "amount": 1})
    chosen = {
        type: world.lifecycle.pools.pool_of(ZONE, accelerators.lookup(type), "spot")
        for type in ("v2-8", "v3-8", "v3-32", "v3-64")
    }
    assert [pool.accelerator if pool else None for pool in chosen.values()] == ["", "v3", "v3-32", "v3"]
    assert world.lifecycle.pools.pool_of(ZONE, accelerators.lookup("v3-8"), "on-demand") is None


def test_a_stockout_arrives_in_the_operation_and_the_node_goes() -> None:
    world = world_with({"amount": 1})
    create(world, "a", at())
    operation = create(world, "b", at())
    assert world.api.get_node(f"{PARENT}/nodes/b", at(seconds=5)).state == NodeState.CREATING
    assert not world.api.get_operation(operation, at(seconds=19)).done
    error = world.api.get_operation(operation, at(seconds=20)).error
    assert error is not None
    assert error[0] == 8
    assert 'There is no more capacity in the zone "us-central1-a"' in error[1]
    assert [node.path.node_id for node in world.nodes()] == ["a"]


def test_short_reservations_have_a_text_of_their_own() -> None:
    world = world_with({"tier": "reserved", "amount": 0})
    operation = create(world, "a", at(), tier="reserved")
    error = world.api.get_operation(operation, at(minutes=1)).error
    assert error is not None
    assert (error[0], error[1][:30]) == (9, "Insufficient reserved capacity")


def test_capacity_below_use_preempts_spot_nodes_within_a_burst() -> None:
    world = world_with({"type": "v3", "schedule": [[0, 10], ["1h", 4]], "burst": "30s"})
    for number in range(10):
        create(world, f"n-{number}", at())
    world.advance(at(minutes=59))
    assert {node.state for node in world.nodes()} == {NodeState.READY}
    world.advance(at(hours=1, seconds=61))
    states = [node.state for node in world.nodes()]
    assert states.count(NodeState.PREEMPTED) == 6
    deaths = [record["at"] for record in world.audit if record.get("event") == "preempted"]
    assert len(set(deaths)) == 6
    assert max(deaths) <= at(hours=1, seconds=30).isoformat(timespec="microseconds")


def test_capacity_of_a_lost_node_is_free_before_the_api_shows_it() -> None:
    world = world_with({"amount": 1})
    create(world, "a", at())
    world.operator.preempt("a", at(hours=1))
    operation = create(world, "b", at(hours=1, seconds=1))
    assert world.api.get_operation(operation, at(hours=2)).error is None


@pytest.mark.parametrize(("tier", "want"), [("on-demand", NodeState.READY), ("spot", NodeState.PREEMPTED)])
def test_only_spot_capacity_is_taken_back(tier: str, want: NodeState) -> None:
    world = world_with({"tier": "on-demand", "amount": 1}, {"tier": "spot", "amount": 1})
    create(world, "a", at(), tier=tier)
    world.operator.set_capacity(ZONE, "", tier, 0, at(hours=1))
    world.advance(at(hours=2))
    assert world.nodes()[0].state == want


def test_an_operator_can_set_a_capacity_that_nobody_configured() -> None:
    world = world_with()
    create(world, "a", at())
    world.operator.set_capacity(ZONE, "v3-8", "spot", 1, at(minutes=10))
    operation = create(world, "b", at(minutes=10))
    assert world.api.get_operation(operation, at(minutes=11)).error is not None
    world.operator.set_capacity(ZONE, "v3-8", "spot", None, at(minutes=12))
    assert world.api.get_operation(create(world, "c", at(minutes=12)), at(minutes=20)).error is None
    world.operator.set_capacity(ZONE, "v3-8", "spot", 0, at(minutes=30))
    world.advance(at(minutes=40))
    assert {node.state for node in world.nodes()} == {NodeState.PREEMPTED}
    with pytest.raises(ConfigError):
        world.operator.set_capacity("nowhere", "v3-8", "spot", 1, at(minutes=41))


def test_an_operator_ends_a_process() -> None:
    world = world_with({"process": {"maximum": 3, "initial": 3, "births": 0, "deaths": 60}})
    world.operator.set_capacity(ZONE, "", "spot", 9, START)
    world.advance(at(days=2))
    assert world.lifecycle.pools.all[0].capacity == 9


def test_callers_do_not_shift_what_a_zone_does() -> None:
    process = {"process": {"maximum": 9, "births": 4, "deaths": 4}}
    quiet, busy = world_with(process), world_with(process)
    for number in range(20):
        create(busy, f"n-{number}", at(hours=number))
    for world in (quiet, busy):
        world.advance(at(days=3))
    amounts = [
        [(one["at"], one["amount"]) for one in world.audit if one["kind"] == "capacity"] for world in (quiet, busy)
    ]
    assert amounts[0] == amounts[1]
    assert len(amounts[0]) > 20
