"""A fleet said in Python means what its file would, and tells what is wrong with it when it is made."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tpucare import Fleet
from tpucare.fleetfile import parse as fleets
from tpucare.model.errors import ConfigError

TPU = {"type": "v3-8", "zones": ["europe-west4-a"], "provisioning": "spot"}
JOB = {"run": "python3 train.py", "checkpoint": "gs://b/pod"}

FILE = """\
name: pod
count: 2
project: grant
max_price: 9
until: 2099-12-31
max_cost: 500
placement: ordered
tpu: {type: v3-8, zones: [europe-west4-a]}
job:
  run: python3 train.py
  checkpoint: gs://b/{slot}
  env: {SEED: 010, RATE: 1e-4}
  files: {config.yaml: ./config.yaml}
care: {grace: 5s}
"""


def test_fields_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "pod.yaml").write_text(FILE)
    fleet = Fleet.from_file(tmp_path / "pod.yaml")
    read = fleets.parse(FILE, file="x", folder=tmp_path)
    assert fleet.parsed.slots() == read.slots()
    assert (fleet.until, fleet.max_cost) == ("2099-12-31", 500)
    assert (fleet.max_price, fleet.placement, fleet.value) == (9, "ordered", None)
    (_, second) = fleet.parsed.slots()
    assert second.job is not None
    assert second.job.env == {"SEED": "010", "RATE": "1e-4"}
    assert second.job.files == {"config.yaml": b"a: 1\n"}


def test_lengths_may_be_timedeltas(tmp_path: Path) -> None:
    fleet = Fleet("pod", [TPU], JOB, care={"grace": timedelta(seconds=7), "boot_timeout": "20m"}, folder=tmp_path)
    assert fleet.parsed.care.grace == timedelta(seconds=7)
    assert fleet.parsed.care.boot_timeout == timedelta(minutes=20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "pod-1"}, "name: pod-1 must not end in -<digits>"),
        ({"tpu": {**TPU, "typ": "v3-8"}}, "tpu.typ: unknown key; nearest: type"),
        ({"job": {"rnu": "x"}}, "job.rnu: unknown key; nearest: run"),
        ({"care": {"grace": 7}}, "care.grace: 7 has no unit; write 7s"),
        ({"count": 0}, "count: must be at least 1"),
        ({"job": {"run": object()}}, "job.run must be as in a fleet file, not a object"),
    ],
)
def test_what_is_wrong_is_told_when_it_is_made(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fleet(**{"name": "pod", "tpu": TPU, "job": JOB, **changes})
    assert words in str(caught.value)
    assert ":1:" not in str(caught.value)


def test_problems_have_keys_and_no_lines() -> None:
    # U+2028 ends a line of YAML.
    with pytest.raises(ConfigError) as caught:
        Fleet("pod", tpu=TPU, job={**JOB, "run": "echo \u2028", "setup": 5, "env": {"A B": "x"}})
    assert [(problem.line, problem.key) for problem in caught.value.problems] == [
        (0, "job.env[A B]"),
        (0, "job.setup"),
    ]
    assert [line.partition(": ")[0] for line in str(caught.value).split("\n")] == ["Fleet('pod')"] * 2
