"""Demand of real Ray jobs makes the right slices, one at a time or several at once, and preempted ones heal."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.kits.ray_lab import HOLD, ray_lab

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

FAST_SECONDS, HEALED_SECONDS = 10.0, 20.0
TURNS = 3
# Ray asks for nothing in the 14 s in which it does not miss the old hosts; new ones must not rest meanwhile.
PATIENT = "20s"

# Says on which slice each bundle of a group works.
GANG = """\
import os
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
from talk import say

ray.init()

@ray.remote(num_cpus=0, resources={"TPU": 4})
def where():
    return os.environ["TPU_NAME"], ray.get_runtime_context().get_node_id()

group = placement_group([{"TPU": 4}] * 2, strategy="STRICT_SPREAD")
ray.get(group.ready())
tasks = [where.options(scheduling_strategy=In(group, placement_group_bundle_index=n)).remote() for n in range(2)]
found = ray.get(tasks)
say("done", sorted({name for name, _ in found}), len(set(found)))
"""

# Three slices, each asked for by a thread, and held until the test says its number.
THREE = """\
import sys, threading
import ray
from ray.util.tpu import SlicePlacementGroup
from talk import await_, say

ray.init()

def hold(number):
    group = SlicePlacementGroup("2x2x2", "v4", head_reservation_timeout_s=None)
    ray.get(group.placement_group.ready())
    (slice_,) = {one["ray.io/tpu-slice-name"] for one in group.bundle_label_selector}
    say("held", number, slice_)
    await_("release")
    group.shutdown()

threads = [threading.Thread(target=hold, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


# Two hosts of v4-8, the second when told, and a slice of v4-16.
POOLS = """\
import os
import ray
from ray.util.tpu import SlicePlacementGroup
from talk import await_, say, tell

ray.init()

@ray.remote(num_cpus=0, resources={"TPU": 4}, label_selector={"ray.io/tpu-pod-type": "v4-8"}, max_retries=0)
def hold(name):
    tell(f"holds-{name}")
    await_("finish")
    return os.environ["TPU_NAME"]

tasks = [hold.remote("first")]
await_("more")
tasks.append(hold.remote("second"))
group = SlicePlacementGroup("2x2x2", "v4", head_reservation_timeout_s=None)
ray.get(group.placement_group.ready())
tell("holds-slice")
found = ray.get(tasks)
say("done", *found, group.bundle_label_selector[0]["ray.io/tpu-slice-name"])
"""


@pytest.mark.slow
def test_a_group_of_two_hosts_makes_one_slice(tmp_path: Path) -> None:
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2})
        job = lab.begin(GANG)
        lab.await_end(job)
        assert [line.rest for line in job.lines("done")] == ["['lab-0'] 2"]
        lab.await_rest()
        assert lab.slices_made() == ["lab-0-a0"]


@pytest.mark.slow
def test_three_slices_of_two_are_asked_for(tmp_path: Path) -> None:
    """Two are made at once, and one waits until another is given back, which both kinds of status tell."""
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2})
        job = lab.begin(THREE)
        lab.await_said(job, "held", 2)
        assert {line.rest.split()[1] for line in job.lines("held")} == {"lab-0", "lab-1"}
        assert sorted(lab.slices_made()) == ["lab-0-a0", "lab-1-a0"]
        accepted, joined = lab.home.events("create-accepted"), lab.home.events("answers")
        assert max(one.at for one in accepted) < min(one.at for one in joined), "at once"
        why = "lab may have 2 slices, all in use or leaving"
        lab.home.await_(lambda: why in lab.home.cli("ray", "status", "lab").out, "tpucare ray status says why")
        lab.home.await_(lambda: why in lab.ray_status(), "ray status says why")
        job.tell("release")
        lab.await_end(job)
        assert len(job.lines("held")) == 3
        lab.await_rest()
        assert sorted(lab.slices_made()) == ["lab-0-a0", "lab-1-a0"]


@pytest.mark.slow
def test_a_held_slice_is_preempted_again_and_again(tmp_path: Path) -> None:
    """Its tasks fail fast, and the same group is whole again on the next node, which has the slice's name."""
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2}, idle=PATIENT)
        job = lab.begin(HOLD)
        lab.await_told(job, "trains-0-1", "trains-1-1")
        healed = []
        for turn in range(1, TURNS + 1):
            preempted = time.time()
            lab.home.order("preempt", selector="lab-0")
            lost = lab.await_said(job, "lost", 2 * turn)
            assert lost[-1].at - preempted < FAST_SECONDS
            works = lab.await_told(job, f"trains-0-{turn + 1}", f"trains-1-{turn + 1}")
            answers = lab.home.await_event("answers", "lab-0", f"lab-0-a{turn}")
            created = [line.at for line in job.lines("group") if line.rest == "CREATED" and line.at > lost[-1].at]
            # Where the new hosts joined before Ray missed the old ones, the group shows CREATED all the time.
            healed.append((created or [works])[-1] - answers.at.timestamp())
        ratios = " ".join(f"{one / HEALED_SECONDS:.2f}" for one in healed)
        print(f"last host answers -> group CREATED again, as parts of {HEALED_SECONDS:.0f} s: {ratios}")
        # Each under the limit on an idle machine; most of it is the time after which Ray misses the old hosts, 14 s.
        assert min(healed) < HEALED_SECONDS, ratios
        job.tell("finish")
        lab.await_end(job)
        assert sorted(line.rest for line in job.lines("result")) == ["0 lab-0", "1 lab-0"]
        lab.await_rest()
        assert lab.slices_made() == [f"lab-0-a{number}" for number in range(TURNS + 1)]
        assert not lab.crashes()


@pytest.mark.slow
def test_one_host_of_a_held_slice_loses_its_ray(tmp_path: Path) -> None:
    """Ray starts again on the same node; the other host trains on meanwhile."""
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2})
        job = lab.begin(HOLD)
        lab.await_told(job, "trains-0-1", "trains-1-1")
        (raylet,) = lab.await_pids("lab-0-a0", 1, "/raylet/raylet ")
        os.kill(raylet, signal.SIGKILL)
        (lost,) = lab.await_said(job, "lost")
        bundle = lost.rest.split()[0]
        lab.await_told(job, f"trains-{bundle}-2")
        job.tell("finish")
        lab.await_end(job)
        assert sorted(line.rest for line in job.lines("result")) == ["0 lab-0", "1 lab-0"]
        assert len(job.lines("lost")) == 1
        lab.await_rest()
        assert lab.slices_made() == ["lab-0-a0"]
        assert not lab.crashes()


@pytest.mark.slow
def test_a_held_slice_has_a_notice_of_its_preemption(tmp_path: Path) -> None:
    """The job learns before the end that both hosts are taken back."""
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2}, idle=PATIENT)
        job = lab.begin(HOLD)
        lab.await_told(job, "trains-0-1", "trains-1-1")
        lab.home.order("preempt", selector="lab-0", notice="30s")
        lab.await_said(job, "lost", 2)
        (*_, drained) = job.lines("draining")
        killed = next(one for one in lab.home.audit() if one["kind"] == "machine" and one["event"] == "kill")
        assert drained.rest == "2"
        assert drained.at < datetime.fromisoformat(killed["at"]).timestamp()
        lab.await_told(job, "trains-0-2", "trains-1-2")
        job.tell("finish")
        lab.await_end(job)
        lab.await_rest()
        assert lab.slices_made() == ["lab-0-a0", "lab-0-a1"]
        assert not lab.crashes()


@pytest.mark.slow
def test_pools_of_one_cluster(tmp_path: Path) -> None:
    """Each type has its pool, and of two pools with one type the first in order is filled first."""
    with ray_lab(tmp_path) as lab:
        one = {"min": 0, "max": 1}
        lab.pool(one, name="paid", kind="v4-8", tier="on-demand", priority=2)
        lab.pool(one, name="spot", kind="v4-8", priority=1)
        lab.pool(one, name="large", kind="v4-16")
        job = lab.begin(POOLS)
        lab.await_told(job, "holds-first")
        assert lab.slices_made() == ["spot-0-a0"]
        job.tell("more")
        lab.await_told(job, "holds-second", "holds-slice")
        tiers = {record.path.node_id: record.spec.tier for record in lab.home.nodes()}
        assert tiers == {"spot-0-a0": "spot", "paid-0-a0": "on-demand", "large-0-a0": "spot"}
        job.tell("finish")
        lab.await_end(job)
        assert [line.rest for line in job.lines("done")] == ["spot-0 paid-0 large-0"]
        lab.await_rest()
        assert len(lab.slices_made()) == 3
        assert not lab.crashes()
