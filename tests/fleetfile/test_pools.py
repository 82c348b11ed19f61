"""A fleet file with a `ray` section declares a pool: bounds instead of a number, and no job of its own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tpucare.fleetfile.parse import FleetSpec, RayPool, parse
from tpucare.fleetfile.schema import json_schema
from tpucare.model.errors import ConfigError
from tpucare.model.resources import OnSuccess

POOL: dict[str, Any] = {
    "name": "lab",
    "project": "my-project",
    "count": {"min": 1, "max": 4},
    "tpu": {"type": "v4-16", "zones": ["us-central2-b"], "network": {"external_ips": False}},
    "job": {"setup": "bash setup.sh"},
    "ray": {},
}


def pool(**changes: Any) -> FleetSpec:
    """The pool with some top-level keys replaced; None removes one."""
    document = {key: value for key, value in {**POOL, **changes}.items() if value is not None}
    return parse(yaml.safe_dump(document), file="lab.yaml", folder=Path("/fleets"))


def refused(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        pool(**changes)
    return str(caught.value).splitlines()


def test_a_pool_has_as_many_slots_as_it_may_have_nodes() -> None:
    lab = pool()
    assert (lab.count, len(lab.slots())) == (4, 4)
    assert lab.ray == RayPool("lab", "v4-16", minimum=1)
    assert all(slot.elastic for slot in lab.slots())
    assert lab.warnings == ()


def test_every_setting_of_a_pool_arrives() -> None:
    given = {"cluster": "big", "python": "/opt/ray/bin/python", "idle": "90s", "priority": 3}
    head = {"address": "10.128.0.5:6379", "token": "RAY_TOKEN"}
    assert pool(ray={**given, **head}).ray == RayPool(
        "big", "v4-16", 1, "10.128.0.5:6379", "RAY_TOKEN", "/opt/ray/bin/python", timedelta(seconds=90), 3
    )


def test_a_number_is_a_pool_that_is_always_there() -> None:
    lab = pool(count=3)
    assert lab.ray is not None
    assert (lab.count, lab.ray.minimum) == (3, 3)


def test_a_pool_needs_no_job() -> None:
    assert pool(job=None).job.run == ""


def test_ray_on_a_host_never_finishes_and_is_drained_before_a_signal() -> None:
    care = pool().care
    assert care.on_success is OnSuccess.RESTART
    assert not care.sigterm_on_preemption


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("job", {"run": "python train.py"}, "job.run: is not for a pool"),
        ("job", {"checkpoint": "gs://bucket/lab"}, "job.checkpoint: is not for a pool"),
        ("job", {"progress": r"step (\d+)"}, "job.progress: is not for a pool"),
        ("care", {"on_success": "keep"}, "care.on_success: is not for a pool"),
        ("count", {"min": 5, "max": 4}, "count.max: is below `min`: write 5 or more"),
        ("count", {"min": 1}, "count.max: is missing"),
        ("count", {"min": 1, "max": 0}, "count.max: must be at least 1"),
        ("count", {"min": -1, "max": 2}, "count.min: must be at least 0"),
        ("count", {"max": 2, "mim": 1}, "count.mim: unknown key; nearest: min"),
        ("count", {"max": "2"}, "count.max: must be a whole number, not text"),
        ("ray", {"cluster": "Lab"}, "ray.cluster: Lab must be 1 to 24"),
        ("ray", {"address": "10.128.0.5"}, "ray.address: 10.128.0.5 is not an address"),
        ("ray", {"address": "10.128.0.5:6379"}, "ray.address: needs `token`"),
        ("ray", {"token": "RAY_TOKEN"}, "ray.token: is for a head of somebody else"),
        ("ray", {"idle": "0s"}, "ray.idle: must be longer than 0s"),
        ("ray", {"claster": "lab"}, "ray.claster: unknown key; nearest: cluster"),
        ("ray", "lab", "ray: must be a mapping"),
        (
            "tpu",
            [POOL["tpu"], {**POOL["tpu"], "type": "v4-8"}],
            "tpu[1].type: is not that of the first alternative, v4-16",
        ),
        ("tpu", {**POOL["tpu"], "type": "v4-17"}, "tpu.type: v4-17"),
    ],
)
def test_a_wrong_pool_gets_one_line_that_says_what_to_change(key: str, value: object, line: str) -> None:
    assert [found for found in refused(**{key: value}) if line in found], refused(**{key: value})


def test_an_empty_section_is_told_apart_from_none() -> None:
    text = yaml.safe_dump({key: value for key, value in POOL.items() if key != "ray"})
    with pytest.raises(ConfigError, match=r"ray: is empty; write `ray: \{\}`"):
        parse(f"{text}ray:\n", file="lab.yaml")


def test_bounds_are_for_pools() -> None:
    assert any("count: is a number" in line for line in refused(ray=None, job={"run": "python train.py"}))


def test_hosts_that_the_internet_reaches_are_warned_about() -> None:
    told = pool(tpu={"type": "v4-16", "zones": ["us-central2-b"]}).warnings
    assert any("without a firewall tag" in line for line in told)
    assert pool(tpu={**POOL["tpu"], "network": {"tags": ["lab"]}}).warnings == ()


def test_editors_are_told_of_both_forms_of_count() -> None:
    forms = json_schema()["properties"]["count"]["oneOf"]
    assert {form.get("type", form.get("$ref")) for form in forms} == {"integer", "#/$defs/CountSection"}
