"""Jobs on a cluster whose slices come for them: packages they bring, their logs, and their end by a person."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.kits.ray_lab import RayLab, ray_lab

pytestmark = [pytest.mark.machines, pytest.mark.timeout(400)]

WHEEL = "tiny_words-1.0-py3-none-any.whl"
USES_PACKAGE = """\
import os
import ray

ray.init()

@ray.remote(resources={"TPU": 4}, max_retries=-1)
def task():
    import tiny_words
    print("the task says", tiny_words.WORD, os.environ["FLAVOUR"], flush=True)
    return os.environ["TPU_NAME"]

print("ran on", ray.get(task.remote()))
"""
SLEEPS = """\
import time
import ray

ray.init()

@ray.remote(resources={"TPU": 4}, max_retries=-1)
def sleep():
    print("asleep", flush=True)
    time.sleep(3600)

ray.get([sleep.remote() for _ in range(8)])
"""


def make_wheel(folder: Path) -> None:
    """A wheel of one module, which pip installs without an index."""
    about = "tiny_words-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_words.py", "WORD = 'hello'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny_words\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", f"tiny_words.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")


@pytest.mark.slow
def test_a_job_brings_a_package_another_is_stopped_and_both_have_logs(tmp_path: Path) -> None:
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 1}, idle="10s")
        make_wheel(tmp_path)
        wheel = f"${{RAY_RUNTIME_ENV_CREATE_WORKING_DIR}}/{WHEEL}"
        environment = json.dumps({"pip": [wheel], "env_vars": {"FLAVOUR": "vanilla"}})
        options = ("--submission-id=brings", "--runtime-env-json", environment)
        job = lab.begin(USES_PACKAGE, options=options, **{WHEEL: (tmp_path / WHEEL).read_bytes()})
        said = lab.await_end(job)
        assert "the task says hello vanilla" in said
        assert "ran on lab-0" in said

        lab.begin(SLEEPS, options=("--submission-id=sleeps", "--no-wait"))
        lab.home.await_(lambda: "asleep" in _ray(lab, "logs", "sleeps"), "a task sleeps", 120)
        assert "ran on lab-0" in _ray(lab, "logs", "brings")
        assert "stopped" in _ray(lab, "stop", "sleeps")
        lab.await_rest(120)
        assert "STOPPED" in _ray(lab, "list")
        assert set(lab.slices_made()) <= {"lab-0-a0", "lab-0-a1"}


def _ray(lab: RayLab, *words: str) -> str:
    """`ray job *words*` to its end; its output."""
    done = subprocess.run(
        [lab.ray, "job", *words], env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
