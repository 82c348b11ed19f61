"""Each part of a Ray cluster is killed with SIGKILL while a slice comes up or trains: the work ends, nothing stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.kits.ray_lab import HOLD, RayLab, Submitted, ray_lab

pytestmark = [pytest.mark.machines, pytest.mark.slow, pytest.mark.timeout(600)]

NODE = "lab-0-a0"


def _kill_head(lab: RayLab) -> None:
    lab.kill_head()
    lab.start_head()
    assert len(lab.of_head("/gcs_server ")) == 1


def _kill_daemon(lab: RayLab) -> None:
    lab.home.restart()


def _kill_probe(lab: RayLab) -> None:
    (probe,) = lab.probes()
    os.kill(probe, signal.SIGKILL)
    lab.home.await_(lambda: lab.probes() not in ([], [probe]), "another probe")


def _kill_raylet(lab: RayLab) -> None:
    (raylet,) = lab.await_pids(NODE, 1, "/raylet/raylet ")
    os.kill(raylet, signal.SIGKILL)


def _kill_runner(lab: RayLab) -> None:
    """Above the host script, which goes on."""
    (script,) = lab.await_pids(NODE, 1, "host.py run")
    os.kill(psutil.Process(script).ppid(), signal.SIGKILL)


HERE, ON_HOST = [_kill_daemon, _kill_probe], [_kill_raylet, _kill_runner]


def _end(lab: RayLab, job: Submitted) -> None:
    """The job finishes on the node that was made first, and all rests."""
    job.tell("finish")
    lab.await_end(job)
    assert sorted(line.rest for line in job.lines("result")) == ["0 lab-0", "1 lab-0"]
    assert len(lab.probes()) == 1
    lab.await_rest()
    assert lab.slices_made() == [NODE]
    assert not lab.crashes()


def _name(kill: Callable[[RayLab], None]) -> str:
    return kill.__name__.removeprefix("_kill_")


@pytest.mark.parametrize("kill", [*HERE, *ON_HOST], ids=_name)
def test_killed_while_a_slice_comes_up(tmp_path: Path, kill: Callable[[RayLab], None]) -> None:
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2})
        job = lab.begin(HOLD)
        lab.home.await_event("create-accepted", node=NODE)
        if kill in ON_HOST:
            lab.home.await_event("launched", "lab-0")
        kill(lab)
        _end(lab, job)


@pytest.mark.parametrize("kill", [*HERE, _kill_runner], ids=_name)
def test_killed_while_a_slice_trains(tmp_path: Path, kill: Callable[[RayLab], None]) -> None:
    """What trains goes on."""
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2})
        job = lab.begin(HOLD)
        lab.await_told(job, "trains-0-1", "trains-1-1")
        kill(lab)
        _end(lab, job)
        assert not job.lines("lost")


@pytest.mark.parametrize("moment", ["comes up", "trains"])
def test_the_head_is_killed(tmp_path: Path, moment: str) -> None:
    """Its jobs die with it. The hosts join the next one on the same node, and the job is submitted again."""
    with ray_lab(tmp_path) as lab:
        # Without a job the hosts are idle, and must not rest before the next one.
        lab.pool({"min": 1, "max": 2})
        job = lab.begin(HOLD)
        if moment == "trains":
            lab.await_told(job, "trains-0-1", "trains-1-1")
        else:
            lab.home.await_event("create-accepted", node=NODE)
        _kill_head(lab)
        lab.await_end(job, want=None)
        assert not job.lines("result")
        again = lab.begin(HOLD)
        lab.await_told(again, "trains-0-1", "trains-1-1")
        lab.pool({"min": 0, "max": 2})
        _end(lab, again)
