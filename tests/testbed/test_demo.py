"""The demo's own parts: when it preempts, what it reads from logs and events, and what it calls broken."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tpucare.model.errors import ConfigError
from tpucare.testbed.demo.preemptions import scenes
from tpucare.testbed.demo.ray_story import TASKS, RayReport
from tpucare.testbed.demo.run import Report
from tpucare.testbed.demo.setup import MOST_PREEMPTIONS, ZONES, DemoOptions, accelerator_for
from tpucare.testbed.demo.timeline import Life, Recovery, Told, read_life, recoveries

NOW = datetime(2026, 11, 1, tzinfo=UTC)

LOG = """\
resumed from step 40
step 41 loss 2.5000
step 59 loss 2.2000
step 60 loss 2.1000
step 61 loss 2.1000
step 62 loss 2.0900
saved step 60
step 63 loss 2.0800
finished at step 63: loss 2.08 params_sha256 step 999
"""


@pytest.mark.parametrize("preemptions", range(1, MOST_PREEMPTIONS + 1))
@pytest.mark.parametrize("seed", range(20))
def test_each_preemption_comes_after_a_fifth_of_all_steps_and_leaves_an_end(preemptions: int, seed: int) -> None:
    steps = 200
    plan = scenes(preemptions, steps, random.Random(seed))
    assert len(plan) == preemptions
    assert all(scene.after_steps >= steps / 5 for scene in plan)
    assert sum(scene.after_steps for scene in plan) <= 0.95 * steps
    assert sum(scene.stockout for scene in plan) == 1


def test_a_seed_gives_the_same_moments() -> None:
    assert scenes(3, 200, random.Random(7)) == scenes(3, 200, random.Random(7))
    assert scenes(0, 200, random.Random(7)) == []


def test_a_life_is_read_from_the_log_of_worker_0() -> None:
    life = read_life("demo-0-a1.1", LOG, 20)
    assert life == Life("demo-0-a1.1", resumed=40, last=63, saved=60, in_flight=2, loss=2.08)


def test_a_recovery_is_measured_from_the_death_of_the_workers_to_the_first_step() -> None:
    def told(seconds: float, kind: str, node: str, **fields: object) -> Told:
        return Told(NOW + timedelta(seconds=seconds), kind, node, "", fields)

    events = [
        told(-5, "progress", "demo-0-a0"),
        told(1, "state", "demo-0-a0", state="PREEMPTED"),
        told(1.5, "delete-accepted", "demo-0-a0"),
        told(2, "create-accepted", "demo-0-a1"),
        told(5, "answers", "demo-0-a1"),
        told(6, "launched", "demo-0-a1"),
        told(9, "progress", "demo-0-a1"),
    ]
    lives = [Life("demo-0-a0.1", 0, last=63, in_flight=2), Life("demo-0-a1.1", resumed=60, last=70)]
    (found,) = recoveries([("demo-0-a0", NOW)], events, lives, {"demo-0-a1": "here"}, 20)
    assert found.seconds == {"detect": 1, "create": 1, "boot": 3, "launch": 1, "first_step": 3, "delete": 0.5}
    assert (found.total, found.zone, found.resumed_from, found.steps_redone, found.allowed) == (9, "here", 60, 3, 22)


def kept_promises() -> Report:
    recovery = Recovery("demo-0-a0", "demo-0-a1", "here", {"detect": 1.0}, 60, 3, 22)
    return Report(
        DemoOptions(preemptions=1, steps=200),
        final_step=200,
        losses=1,
        recoveries=[recovery],
        params="abc",
        reference="abc",
    )


def test_a_kept_promise_is_ok() -> None:
    assert kept_promises().faults == []
    assert kept_promises().as_json()["ok"] is True


@pytest.mark.parametrize(
    "change",
    [
        {"final_step": 199},
        {"losses": 0},
        {"recoveries": []},
        {"params": "abd"},
        {"params": "", "reference": ""},
        {"leaked_nodes": ["demo-0-a9"]},
        {"leaked_processes": [42]},
        {"findings": ["rule 1 broken"]},
        {"recoveries": [Recovery("demo-0-a0", "demo-0-a1", "here", {}, 0, 23, 22)]},
        {"recoveries": [Recovery("demo-0-a0", "demo-0-a1", "here", {}, 80, -3, 22)]},
    ],
)
def test_every_broken_promise_is_named(change: dict[str, object]) -> None:
    report = kept_promises()
    for name, value in change.items():
        setattr(report, name, value)
    assert report.faults
    assert report.as_json()["ok"] is False


def kept_ray_promises() -> RayReport:
    slices = {"lab-0": ["lab-0-a0", "lab-0-a1"]}
    return RayReport(job_status=0, tasks=TASKS, slices=slices, lost="lab-0-a0", healed_seconds=20.0)


def test_a_kept_promise_of_ray_is_ok() -> None:
    assert kept_ray_promises().faults == []
    assert kept_ray_promises().as_json()["ok"] is True


@pytest.mark.parametrize(
    "change",
    [
        {"job_status": 1},
        {"job_status": None},
        {"tasks": 9},
        {"slices": {}},
        {"slices": {"lab-0": ["lab-0-a0"]}},
        {"slices": {"lab-0": ["lab-0-a0", "lab-0-a1", "lab-0-a2"]}},
        {"slices": {"lab-0": ["lab-0-a0", "lab-0-a1"], "lab-1": ["lab-1-a0"]}},
        {"lost": ""},
        {"healed_seconds": 0.0},
        {"leaked_nodes": ["lab-0-a1"]},
        {"leaked_processes": [42]},
        {"findings": ["rule 1 broken"]},
    ],
)
def test_every_broken_promise_of_ray_is_named(change: dict[str, object]) -> None:
    report = kept_ray_promises()
    for name, value in change.items():
        setattr(report, name, value)
    assert report.faults
    assert report.as_json()["ok"] is False


@pytest.mark.parametrize(("hosts", "kind"), [(1, "v5p-8"), (2, "v5p-16"), (4, "v5p-32")])
def test_hosts_decide_the_accelerator(hosts: int, kind: str) -> None:
    assert accelerator_for(hosts) == kind


@pytest.mark.parametrize("options", [DemoOptions(preemptions=5), DemoOptions(preemptions=-1), DemoOptions(hosts=3)])
def test_what_cannot_be_shown_is_refused_in_one_line(options: DemoOptions) -> None:
    with pytest.raises(ConfigError) as caught:
        options.check()
    assert "\n" not in str(caught.value)


def test_the_demo_has_its_zones_in_whatever_world(tmp_path: Path) -> None:
    realistic = DemoOptions(world=Path("realistic")).world_config()
    assert set(ZONES) < set(realistic.zones)
    assert realistic.guest.sshguard is not None
    (tmp_path / "w.yaml").write_text("zones: {us-central1-a: {}}\nspeed: fast\n")
    assert set(DemoOptions(world=tmp_path / "w.yaml").world_config().zones) == {*ZONES, "us-central1-a"}
    with pytest.raises(ConfigError, match="unrealistic"):
        DemoOptions(world=Path("unrealistic")).check()


def test_the_realistic_world_has_every_trouble_of_a_first_day_on() -> None:
    """Of the options that a node can live with; the others would refuse every create."""
    world = DemoOptions(world=Path("realistic")).world_config()
    for section, left_out in (
        (world.guest, {"chip_holding_runtimes"}),
        (world.project, {"refuses", "external_ips", "health_checks_per_worker"}),
    ):
        defaults = type(section)()
        same = {key for key in type(section).model_fields if getattr(section, key) == getattr(defaults, key)}
        assert same == left_out


def test_a_file_is_no_folder_to_keep_things_in(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        DemoOptions(keep=tmp_path / "file").check()


def test_a_folder_that_holds_something_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("three years of work")
    with pytest.raises(ConfigError, match="not empty"):
        DemoOptions(keep=tmp_path).check()
