"""Ray over the emulated cloud: demand makes slices, preempted ones heal, and in the end everything rests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.ray_lab import ray_lab

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

TEN_TASKS = """\
import os, socket, sys
import ray

ray.init()

@ray.remote(resources={"TPU": 4}, max_retries=-1)
def task(number):
    return number, os.environ["TPU_NAME"]

found = ray.get([task.remote(number) for number in range(int(sys.argv[1]))])
print("done", len(found), sorted({name for _, name in found}))
"""


def test_a_cold_cluster_runs_ten_tasks_on_tpu_hosts_and_rests_again(tmp_path: Path) -> None:
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 1})
        said = lab.submit(TEN_TASKS, "10")
        assert "done 10 ['lab-0']" in said
        lab.await_rest()
        assert lab.slices_made() == ["lab-0-a0"]
