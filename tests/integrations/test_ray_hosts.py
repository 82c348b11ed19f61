"""The job of a pool's slot: what a host runs before and as its Ray."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.test_ray_cluster import HEAD
from tpucare.adapters.runner.scripts import check_job, read_template
from tpucare.integrations.ray.hosts import SCRIPT, outfit
from tpucare.model.resources import Job


def test_a_host_runs_the_users_setup_then_checks_versions_then_joins() -> None:
    job = Job(run="", setup="cd /tmp\nexit 0", env={"A": "b"}, secrets=("WANDB_API_KEY",), files={"f": b"x"})
    done = outfit(job, HEAD, "pool", "venv/bin/python")
    assert done.setup == (
        "bash -ec 'cd /tmp\nexit 0'\n"
        "command -v venv/bin/python >/dev/null || { echo 'job.setup made no venv/bin/python in the job'\"'\"'s folder: "
        "make it, or write its path to ray.python' >&2; exit 1; }\n"
        "venv/bin/python .tpucare-ray/host.py check 2.60.0 3.11"
    )
    assert done.run == "exec venv/bin/python .tpucare-ray/host.py run"
    assert done.env == {
        "A": "b",
        "TPUCARE_RAY_ADDRESS": "10.0.0.2:6379",
        "TPUCARE_RAY_POOL": "pool",
        "TPUCARE_RAY_TOKEN_FROM": "TPUCARE_RAY_TOKEN_LAB",
        "TPUCARE_RAY_VERSION": "2.60.0",
        "TPUCARE_RAY_PYTHON": "3.11",
    }
    assert done.secrets == ("WANDB_API_KEY", "TPUCARE_RAY_TOKEN_LAB")
    assert done.files == {"f": b"x", SCRIPT: read_template("ray/host.py").encode()}
    check_job(done)


def test_an_outfit_changes_with_the_head_alone() -> None:
    """A run that was launched with another job is started again: a head that only came back starts none."""
    job = Job(run="")
    later = dataclasses.replace(HEAD, started_at=HEAD.started_at.replace(hour=9), dashboard="127.0.0.1:9")
    assert outfit(job, later, "pool") == outfit(job, HEAD, "pool")
    assert outfit(outfit(job, HEAD, "pool"), HEAD, "pool").secrets == ("TPUCARE_RAY_TOKEN_LAB",)
    moved = dataclasses.replace(HEAD, address="10.0.0.3:6379")
    assert outfit(job, moved, "pool") != outfit(job, HEAD, "pool")


def test_a_foreign_head_has_a_secret_of_the_users_name() -> None:
    done = outfit(Job(run="", secrets=("RAY_TOKEN",)), HEAD, "pool", token="RAY_TOKEN")
    assert (done.secrets, done.env["TPUCARE_RAY_TOKEN_FROM"]) == (("RAY_TOKEN",), "RAY_TOKEN")


@pytest.mark.parametrize("python", ["a b/python", "$(touch evil)", "a'b", "; touch evil;"])
def test_a_path_is_never_run_as_a_command(python: str, tmp_path: Path) -> None:
    done = outfit(Job(run="", setup="true"), dataclasses.replace(HEAD, ray="2;touch evil"), "p", python)
    for text in (done.setup, done.run):
        ended = subprocess.run(["bash", "-ec", text], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setup", ["exit 0", "cd /", "", "exec true"])
def test_no_setup_skips_the_check_of_versions(setup: str, tmp_path: Path) -> None:
    head = dataclasses.replace(HEAD, ray="2.56.1", python_version="3.8")
    done = outfit(Job(run="", setup=setup), head, "pool", sys.executable)
    for path, content in done.files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    ended = subprocess.run(["bash", "-ec", done.setup], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stdout.splitlines()
    assert "the head has Ray 2.56.1 on Python 3.8, but" in line
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in line


def test_a_setup_that_makes_no_python_is_told(tmp_path: Path) -> None:
    done = outfit(Job(run="", setup="true"), HEAD, "pool")
    ended = subprocess.run(["bash", "-ec", done.setup], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "job.setup made no venv/bin/python" in ended.stderr


def test_a_failing_setup_keeps_its_status(tmp_path: Path) -> None:
    done = outfit(Job(run="", setup="bash -c 'exit 42'"), HEAD, "pool")
    assert subprocess.run(["bash", "-ec", done.setup], cwd=tmp_path, check=False).returncode == 42
