"""The probe over a real Ray: one head, one host that says it is half of a v4-16."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integrations.test_ray_probe import newest, wait_for
from tests.kits.ray_cluster import RayCluster, ray_versions
from tpucare.integrations.ray.demand import (
    Bundle,
    ClusterState,
    DrainReason,
    HeadAway,
    HostState,
    HostStatus,
    PendingSlice,
    Request,
    UnmetDemand,
)
from tpucare.integrations.ray.probe import REQUEST_SECONDS, Probe
from tpucare.model.errors import ConfigError

pytest.importorskip("ray")
pytestmark = [pytest.mark.machines, pytest.mark.slow]

DEMAND = """
import threading
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup

ray.init(CLUSTER, log_to_driver=False)

@ray.remote(num_cpus=0)
def work(): pass

@ray.remote(num_cpus=0, resources={"TPU": 8})
class Actor: pass

larger = work.options(resources={"TPU": 4}, label_selector={"ray.io/tpu-pod-type": "v4-32"})
tasks = [larger.remote() for _ in range(3)]
other = work.options(resources={"TPU": 1}, label_selector={"ray.io/tpu-pod-type": "!in(v4-16,v4-8)"}).remote()
actor = Actor.remote()
group = placement_group([{"TPU": 4}] * 3, strategy="STRICT_SPREAD")
inside = work.options(resources={"TPU": 1}, scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()
slice_ = dict(topology="2x2x4", accelerator_version="v4", head_reservation_timeout_s=None)
threading.Thread(target=SlicePlacementGroup, kwargs=slice_, daemon=True).start()
heads = [{"TPU-v4-16-head": 1}] * 2
request_resources(bundles=heads, bundle_label_selectors=[{"ray.io/tpu-pod-type": "v4-16"}] * 2)
print("asked", flush=True)
import sys; sys.stdin.read(); import time; time.sleep(60)
"""
BUSY = """
import time
ray.init(CLUSTER, log_to_driver=False)

@ray.remote(num_cpus=0, resources={"TPU": 4})
def work(): time.sleep(600)

task = work.remote()
print("asked", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # The paths of Ray's sockets leave no room for pytest's folders.
    folder = Path(tempfile.mkdtemp(prefix="tr", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        cluster.start_head()
        cluster.start_host("lab-0")
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def probe(cluster: RayCluster) -> Iterator[Probe]:
    probe = Probe(owner="me", host="vm")
    probe.follow(cluster.record, 0.2)
    yield probe
    probe.close()


def when(probe: Probe, holds: Callable[[ClusterState], bool], seconds: float = 90.0) -> ClusterState:
    """The first state for which it holds."""

    def look() -> ClusterState | None:
        found = probe.newest()
        state = found[0] if found is not None else None
        return state if isinstance(state, ClusterState) and holds(state) else None

    return wait_for(look, seconds)


def status(cluster: RayCluster, text: str) -> str:
    """The output of `ray status`, as soon as it has *text*."""

    def look() -> str | None:
        found = cluster.status("-v")
        return found if text in found else None

    return wait_for(look, 60)


def lab(state: ClusterState) -> HostState:
    (host,) = [one for one in state.hosts if one.pool == "lab" and one.status is not HostStatus.DEAD]
    return host


def total(state: ClusterState) -> int:
    return sum(one.count for one in state.requests)


def has_lab(state: ClusterState) -> bool:
    return any(one.pool == "lab" for one in state.hosts)


def test_a_host_that_joined(cluster: RayCluster, probe: Probe) -> None:
    # Until its raylet has sent its first load, a host is RUNNING.
    state = when(probe, lambda seen: has_lab(seen) and lab(seen).status is HostStatus.IDLE)
    host = lab(state)
    assert (host.instance, host.ip) == ("lab-0-a1", f"{cluster.net}.10")
    assert (host.total["TPU"], host.available["TPU"], host.total["TPU-v4-16-head"]) == (4, 4, 1)
    wanted = {"tpu-slice-name": "lab-0", "tpu-worker-id": "0", "tpu-pod-type": "v4-16", "tpu-topology": "2x2x2"}
    assert {f"ray.io/{name}": value for name, value in wanted.items()}.items() <= host.labels.items()
    assert {one.pool for one in state.hosts} == {"head", "lab"}
    assert (state.reporter, state.warnings, state.requests, state.gangs, state.floor) == ("", (), (), (), ())
    assert (state.ray, state.python) == ray_versions()
    assert state.session.startswith("session_")
    when(probe, lambda later: lab(later).idle_seconds > host.idle_seconds)


def test_all_kinds_of_demand_and_the_report(cluster: RayCluster, probe: Probe) -> None:
    driver = cluster.run(DEMAND)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "asked\n"
    try:
        state = when(probe, lambda seen: len(seen.gangs) == 2 and bool(seen.floor) and total(seen) == 5)
    finally:
        driver.kill()
        driver.wait()
    assert sorted(state.requests, key=lambda one: one.count * 10 + one.bundle.shape["TPU"]) == [
        Request(Bundle({"TPU": 1.0}, {"ray.io/tpu-pod-type": "!in(v4-16,v4-8)"}), 1),
        Request(Bundle({"TPU": 8.0}, {}), 1),
        Request(Bundle({"TPU": 4.0}, {"ray.io/tpu-pod-type": "v4-32"}), 3),
    ]
    plain, of_slice = sorted(state.gangs, key=lambda one: one.strategy, reverse=True)
    assert (plain.bundles, plain.strategy) == ((Bundle({"TPU": 4.0}, {}),) * 3, "STRICT_SPREAD")
    selector = {"ray.io/tpu-pod-type": "v4-32", "ray.io/tpu-worker-id": "0"}
    assert of_slice.bundles == (Bundle({"TPU-v4-32-head": 1.0}, selector),)
    assert plain.name != of_slice.name
    assert state.floor == (Bundle({"TPU-v4-16-head": 1.0}, {"ray.io/tpu-pod-type": "v4-16"}),) * 2

    unmet = UnmetDemand("no pool has v4-32", "apply one", (Bundle({"TPU": 4.0}, {}),), 3)
    probe.report([PendingSlice("lab-1", "lab", "v4-16", "waits in us-central2-b")], [unmet])
    shown = status(cluster, "lab-1: lab, waits in us-central2-b")
    assert "no pool has v4-32: LaunchFailed" in shown
    assert "apply one" in shown
    probe.report([], [])
    status(cluster, "(no pending nodes)")


def test_another_tpucare_is_named_and_reports_nothing(cluster: RayCluster, probe: Probe) -> None:
    when(probe, has_lab)
    probe.report([PendingSlice("ours-0", "ours", "v4-16", "queued")], [])
    other = Probe(owner="you", host="vm2")
    try:
        other.follow(cluster.record, 0.2)
        when(other, lambda state: state.reporter == "tpucare me on vm")
        other.report([PendingSlice("theirs-0", "theirs", "v4-16", "queued")], [])
        assert "theirs-0" not in status(cluster, "ours-0")
        assert when(probe, has_lab).reporter == ""
    finally:
        other.close()


def test_a_wrong_token_is_one_line(cluster: RayCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    for path, text in ((wrong, f"refuses the token in {wrong}"), (tmp_path / "none", "No such file")):
        probe = Probe(owner="me", host="vm")
        try:
            probe.follow(dataclasses.replace(cluster.record, token=str(path)), 0.2)
            assert text in str(newest(probe, ConfigError))
        finally:
            probe.close()


def test_a_drain_is_refused_by_a_busy_host_and_accepted_by_an_idle_one(cluster: RayCluster, probe: Probe) -> None:
    driver = cluster.run(BUSY)
    try:
        busy = lab(when(probe, lambda state: has_lab(state) and lab(state).status is HostStatus.RUNNING))
        assert busy.available.get("TPU") is None
        ticket = probe.drain([busy.id], DrainReason.IDLE_TERMINATION, 0, "idle for 10 min")
        (refused,) = wait_for(probe.drained)
        assert refused[0] == ticket
        assert isinstance(refused[1][busy.id], str)
        assert refused[1][busy.id]
    finally:
        driver.kill()
        driver.wait()
    idle = lab(when(probe, lambda state: lab(state).status is HostStatus.IDLE))
    ticket = probe.drain([idle.id], DrainReason.IDLE_TERMINATION, 0, "idle for 10 min")
    assert wait_for(probe.drained) == [(ticket, {idle.id: True})]
    when(probe, lambda state: {one.status for one in state.hosts if one.pool == "lab"} == {HostStatus.DEAD})


def test_a_head_that_is_away_comes_back_with_an_autoscaler_of_its_own(cluster: RayCluster, probe: Probe) -> None:
    before = when(probe, has_lab).session
    cluster.kill("lab-0.0")
    cluster.kill("head")
    began = time.monotonic()
    newest(probe, HeadAway)
    assert time.monotonic() - began < REQUEST_SECONDS + 1
    cluster.start_head(monitor=True)
    state = when(probe, lambda seen: bool(seen.hosts))
    assert state.session != before
    assert state.reporter == "Ray's own autoscaler"
    assert {one.pool for one in state.hosts} == {"head"}
