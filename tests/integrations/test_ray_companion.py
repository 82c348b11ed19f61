"""The companion that follows Ray clusters: real engine, fleets and cloud in virtual time, and a stand-in for Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.harness import EU, US
from tests.kits.ray_care import GANG, HEAD, Lab, pool
from tpucare.integrations.ray.companion import (
    AWAY_SECONDS,
    BUSY_SECONDS,
    REFUSED_SECONDS,
    REST_SECONDS,
    SPILL_SECONDS,
    is_dying,
    serving_node,
)
from tpucare.integrations.ray.demand import Bundle, DrainReason, Gang, ProbeSilent, Request
from tpucare.model.causes import Cause
from tpucare.testbed.emulator.world.config import WorldConfig


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    made = Lab(tmp_path)
    made.service.apply(pool(), tmp_path)
    return made


def test_a_pool_at_rest_costs_nothing(lab: Lab) -> None:
    lab.run(300)
    assert lab.nodes == []
    assert lab.ray.every == REST_SECONDS
    assert [row["awake"] for row in lab.care.rows()] == [0]


def test_demand_makes_one_slice_and_its_end_lets_it_rest(lab: Lab) -> None:
    lab.run(10)
    lab.ray.gangs = (GANG,)
    lab.run(2)
    assert lab.ray.every == BUSY_SECONDS
    node = lab.up()
    assert lab.nodes == [node]
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    lab.run(600)
    assert lab.nodes == [node], "it works"
    (row,) = lab.care.rows()
    assert [row["busy_hosts"], *(one["busy_hosts"] for one in row["slices"])] == [4, 4, 0, 0]
    lab.ray.join(node, idle=119.0)
    lab.run(5)
    assert lab.nodes == [node]
    lab.ray.join(node, idle=121.0)
    lab.run(1)
    del lab.ray.hosts[node]
    lab.run(300)
    assert lab.nodes == []
    ids, reason = lab.ray.asked[0]
    assert (len(ids), reason) == (4, DrainReason.IDLE_TERMINATION)
    assert lab.events("wake")
    assert lab.events("rest")


def test_what_is_asked_for_by_name_or_not_at_all_makes_no_node(lab: Lab) -> None:
    lab.ray.requests = (Request(Bundle({"CPU": 1.0}, {}), 50),)
    lab.run(60)
    assert lab.nodes == []


def test_a_pool_keeps_its_minimum_from_the_start(lab: Lab, tmp_path: Path) -> None:
    lab.service.apply(pool("{min: 2, max: 3}"), tmp_path)
    lab.run(300)
    assert sorted({node.rpartition("-a")[0] for node in lab.nodes}) == ["lab-0", "lab-1"]


def test_without_a_head_no_node_is_made_and_the_reason_is_told(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.head = None
    lab.service.apply(pool("2"), tmp_path)
    lab.run(60)
    assert lab.nodes == []
    assert "`tpucare ray head lab`" in lab.care.rows()[0]["problem"]
    assert len(lab.events("ray-no-head")) == 1
    lab.head = HEAD
    lab.run(300)
    assert len(lab.nodes) == 2


def test_not_knowing_wakes_nothing_and_rests_nothing_and_is_told_once(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.join(node, idle=9999.0)
    lab.ray.error = ProbeSilent("the head does not answer")
    lab.run(AWAY_SECONDS * 3)
    assert lab.nodes == [node]
    assert len(lab.events("ray-away")) == 1
    assert "does not answer" in lab.care.rows()[0]["problem"]
    lab.ray.error, lab.ray.gangs = None, ()
    lab.run(300)
    assert len(lab.events("ray-heard")) == 1
    assert lab.nodes == []


def test_a_second_caretaker_is_named_and_nothing_is_done_beside_it(lab: Lab) -> None:
    lab.ray.reporter = "Ray's own autoscaler"
    lab.ray.gangs = (GANG,)
    lab.run(60)
    assert lab.nodes == []
    assert any("Ray's own autoscaler" in text for text in lab.events("ray-warning"))
    assert "Ray's own autoscaler" in lab.care.rows()[0]["problem"]
    lab.care.poll()
    assert "Ray's own autoscaler" in lab.care.rows()[0]["problem"], "also between two snapshots"


def test_a_host_that_refuses_to_be_drained_keeps_its_slice(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.gangs, lab.ray.refuses = (), {node}
    lab.ray.join(node, idle=300.0)
    lab.run(REFUSED_SECONDS * 3 + 5)
    assert lab.nodes == [node]
    assert 3 <= len(lab.ray.asked) <= 4, "asked again from time to time"
    lab.ray.refuses = set()
    lab.run(300)
    assert lab.nodes == []


def test_a_slice_that_the_cloud_takes_comes_back_under_its_name(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.join(node, used=4.0)
    # The group is pending again, pinned to the slice: its hosts still show as running for a while.
    pinned = Bundle({"TPU": 4.0}, {"ray.io/tpu-slice-name": "lab-0"})
    lab.ray.gangs = (Gang((pinned,) * 4),)
    lab.service.daemon.zone.world.operator.preempt("lab-0", lab.service.daemon.clock.true_now())
    lab.run_until(lambda: serving_node(lab.service.daemon.engine.slots["lab-0"]) != node, 300)
    lab.run(13)
    del lab.ray.hosts[node]
    healed = lab.up()
    assert healed.rpartition("-a")[0] == "lab-0"
    assert healed != node
    assert lab.nodes == [healed]
    lab.service.daemon.check()


def test_tasks_that_a_preemption_lost_are_no_growth_before_the_cloud_tells_of_it(lab: Lab) -> None:
    """
    Ray, whose connections end with those of SSH, does them again after 1.5 s, and shows their hosts for 13 s more;
    the next listing is seconds away, and the cloud tells later still.
    """
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    lab.run(60)
    lab.service.daemon.zone.world.operator.preempt("lab-0", lab.service.daemon.clock.true_now())
    track = lab.service.daemon.engine.slots["lab-0"]
    lab.run_until(lambda: is_dying(track, node), 60)
    lab.ray.requests = (Request(Bundle({"TPU": 4.0}, {}), 4),)
    lab.run(13)
    assert serving_node(track) == node, "the cloud has not told yet"
    del lab.ray.hosts[node]
    lab.run(300)
    assert {name.rpartition("-a")[0] for name in lab.nodes} == {"lab-0"}
    assert [text for text in lab.events("wake") if text.startswith("lab-1")] == []


def test_a_slice_that_has_just_healed_does_not_rest_before_ray_misses_its_last_hosts(lab: Lab) -> None:
    """Until then Ray shows the group as placed on hosts that are gone, and asks for nothing."""
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.gangs = ()
    lab.ray.join(node, idle=600.0)
    lab.ray.join("lab-0-a99", used=4.0)
    lab.run(30)
    assert lab.nodes == [node]
    del lab.ray.hosts["lab-0-a99"]
    lab.run(120)
    assert lab.nodes == []


def test_an_announced_preemption_reaches_every_host_of_the_slice_once(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    track = lab.service.daemon.engine.slots["lab-0"]
    seen = track.nodes[node]
    assert seen.report is not None
    first, *others = seen.report.workers
    seen.report = replace(seen.report, workers=(replace(first, preempted=True), *others))
    lab.care.poll()
    lab.care.poll()
    ids, reason = lab.ray.asked[-1]
    assert (len(ids), reason, len(lab.ray.asked)) == (4, DrainReason.PREEMPTION, 1)


def test_hosts_start_anew_for_a_head_that_moved_and_nothing_is_booked(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    lab.head = replace(HEAD, address="127.0.0.3:6379")
    lab.run(120)
    memory = lab.service.daemon.memory("lab-0")
    assert lab.nodes == [node]
    assert memory.run is not None
    assert memory.run.token == f"{node}.2"
    assert memory.run.complete
    assert all(counter.total == 0 for counter in memory.books.values())


def test_hosts_start_anew_for_a_head_that_moved_while_the_daemon_was_away(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    lab.head = replace(HEAD, address="127.0.0.3:6379")
    lab.again()
    lab.run(120)
    run = lab.service.daemon.memory("lab-0").run
    assert run is not None
    assert run.token == f"{node}.2"


def test_a_restart_of_the_daemon_changes_nothing(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    lab.again()
    lab.run(120)
    run = lab.service.daemon.memory("lab-0").run
    assert run is not None
    assert (lab.nodes, run.token) == ([node], f"{node}.1")


def test_a_pool_that_is_taken_down_is_gone_and_its_cluster_is_followed_no_more(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    lab.up()
    lab.service.ask("down", target="lab")
    lab.run(300)
    assert lab.nodes == []
    assert lab.ray.closed
    assert lab.care.rows() == []


def test_a_head_of_somebody_else_tells_its_versions_before_a_host_starts(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    text = pool("1", more=", address: '10.0.0.9:6379', token: RAY_TOKEN")
    lab.service.apply(text, tmp_path)
    lab.ray.error = ProbeSilent("not yet")
    lab.run(10)
    assert lab.nodes == []
    lab.ray.error = None
    node = lab.up()
    job = lab.service.daemon.engine.slots["lab-0"].slot.job
    assert job is not None
    assert job.env["TPUCARE_RAY_ADDRESS"] == "10.0.0.9:6379"
    assert "RAY_TOKEN" in job.secrets
    assert lab.nodes == [node]


def test_pools_of_one_cluster_that_name_different_heads_wake_nothing_and_end_nothing(lab: Lab, tmp_path: Path) -> None:
    """The head of the pool that came first by name was taken for all."""
    lab.ray.gangs = (GANG,)
    node = lab.up()
    more = ", address: '10.0.0.9:6379', token: RAY_TOKEN"
    lab.service.apply(pool("1", name="big", more=more), tmp_path)
    lab.ray.gangs = (GANG,) * 3
    lab.run(120)
    assert lab.nodes == [node]
    assert "pools big, lab of lab name different heads" in lab.care.rows()[0]["problem"]
    lab.service.ask("down", target="big")
    lab.run(120)
    run = lab.service.daemon.memory("lab-0").run
    assert run is not None
    assert (len(lab.nodes), run.token) == (3, f"{node}.1")


def test_ray_is_told_what_comes_up_and_what_nothing_can_satisfy(lab: Lab) -> None:
    huge = Bundle({"TPU": 8.0}, {})
    lab.ray.gangs = (GANG,)
    lab.ray.requests = (Request(huge, 1),)
    lab.run(30)
    pending, unmet = lab.ray.reports[-1]
    assert [one.slot for one in pending] == ["lab-0"]
    assert [one.bundles for one in unmet] == [(huge,)]
    assert len(lab.events("ray-unmet")) == 1
    assert lab.care.rows()[0]["unmet"]


def test_a_paused_slot_is_left_alone(lab: Lab) -> None:
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.service.ask("pause", target="lab-0")
    lab.ray.gangs = ()
    lab.ray.join(node, idle=9999.0)
    lab.run(120)
    assert lab.nodes == [node]
    assert lab.ray.asked == []


# --- a pool that is dry, and one that serves in its stead -------------------------------------------------------------


def paid(lab: Lab, folder: Path) -> None:
    """A pool after `lab`, on demand."""
    tpu = "zones: [us-central1-a], provisioning: on-demand"
    lab.service.apply(pool("{min: 0, max: 2}", name="paid", more=", priority: 1", tpu=tpu), folder)


def has_capacity(lab: Lab, amount: int | None, zones: Sequence[str] = (US,)) -> None:
    daemon = lab.service.daemon
    for zone in zones:
        daemon.zone.world.operator.set_capacity(zone, "v3-32", "spot", amount, daemon.clock.true_now())


@pytest.mark.parametrize(("zones", "stockout"), [([US], 20.0), ([US, EU], 20.0), ([US, EU], 90.0)])
def test_an_on_demand_pool_serves_while_the_spot_pool_is_dry(zones: list[str], stockout: float, tmp_path: Path) -> None:
    """Where refusals take long, one of several zones is always open again before the last one has refused."""
    lab = Lab(tmp_path, WorldConfig.calm(latencies={"stockout": {"median": stockout, "p95": stockout}}))
    lab.service.apply(pool(tpu=f"zones: [{', '.join(zones)}]"), tmp_path)
    paid(lab, tmp_path)
    has_capacity(lab, 0, zones)
    lab.ray.gangs = (GANG,)
    # Each refusal is seen up to 10 s late, and the pauses between creates grow to 2 min.
    waited = lab.run_until(lambda: lab.service.daemon.memory("paid-0").awake)
    assert SPILL_SECONDS < waited <= SPILL_SECONDS + (stockout + 10) * len(zones) + 60
    assert not lab.service.daemon.memory("paid-1").awake
    assert not lab.service.daemon.memory("lab-1").awake
    assert [text for text in lab.events("wake") if text.endswith("; lab waits for a place")]
    spot, _ = lab.care.rows()
    assert [one["slot"] for one in spot["slices"] if one["stuck"]] == ["lab-0"]
    node = lab.up()
    assert node.startswith("paid-0-")
    # It serves; the other one is asked for no more.
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    lab.run(180)
    assert [track.slot.name for track in lab.service.daemon.engine.slots.values() if track.memory.awake] == ["paid-0"]
    assert not any(one["stuck"] for row in lab.care.rows() for one in row["slices"])
    # Capacity is back, for the next demand: spot first.
    has_capacity(lab, None, zones)
    lab.ray.gangs = (GANG,)
    node = lab.up()
    assert node.startswith("lab-")
    lab.ray.gangs = ()
    for each in list(lab.ray.hosts):
        lab.ray.join(each, idle=121.0)
    lab.run(2)
    lab.ray.hosts.clear()
    asked_for = lab.nodes
    lab.run(300)
    assert lab.nodes == []
    lab.service.daemon.check(*asked_for)


def test_whichever_comes_first_serves_and_the_other_one_rests(lab: Lab, tmp_path: Path) -> None:
    paid(lab, tmp_path)
    has_capacity(lab, 0)
    lab.ray.gangs = (GANG,)
    lab.run_until(lambda: lab.service.daemon.memory("paid-0").awake)
    has_capacity(lab, None)
    node = lab.up()
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    lab.run(300)
    assert [name.rpartition("-a")[0] for name in lab.nodes] == [node.rpartition("-a")[0]]


def test_a_pool_whose_node_takes_its_time_is_not_dry(lab: Lab, tmp_path: Path) -> None:
    """Refused once, and then accepted: only a refusal after two minutes makes demand pass on."""
    paid(lab, tmp_path)
    has_capacity(lab, 0)
    lab.ray.gangs = (GANG,)
    lab.run_until(lambda: lab.service.daemon.engine.slots["lab-0"].action.cause is Cause.NO_PLACE_OPEN, 120)
    has_capacity(lab, None)
    assert lab.up().startswith("lab-0-")
    assert not lab.service.daemon.memory("paid-0").awake


def test_a_new_daemon_goes_on_where_demand_had_passed_on(lab: Lab, tmp_path: Path) -> None:
    paid(lab, tmp_path)
    has_capacity(lab, 0)
    lab.ray.gangs = (GANG,)
    lab.run_until(lambda: lab.service.daemon.memory("paid-0").awake)
    lab.again()
    rests = len(lab.events("rest"))
    node = lab.up()
    assert node.startswith("paid-0-")
    assert len(lab.events("rest")) == rests
    assert lab.service.daemon.memory("lab-0").awake


def test_a_preempted_slice_whose_zone_ran_dry_is_asked_for_by_name_beside_the_other_pool(
    lab: Lab, tmp_path: Path
) -> None:
    """A group that is pinned to it waits; tasks that it served go on elsewhere."""
    paid(lab, tmp_path)
    lab.ray.gangs = (GANG,)
    node = lab.up()
    lab.ray.gangs = ()
    lab.ray.join(node, used=4.0)
    has_capacity(lab, 0)
    lab.run(30)
    del lab.ray.hosts[node]
    pinned = Bundle({"TPU": 4.0}, {"ray.io/tpu-slice-name": "lab-0"})
    lab.ray.gangs = (Gang((pinned,) * 4),)
    lab.run(600)
    assert not lab.service.daemon.memory("paid-0").awake
    lab.ray.gangs = (GANG,)
    lab.run(10)
    assert lab.service.daemon.memory("paid-0").awake
    assert lab.service.daemon.memory("lab-0").awake
