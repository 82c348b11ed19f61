"""`tpucare ray demo`, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

pytestmark = [pytest.mark.machines, pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_demo_of_ray_keeps_its_promises_and_leaves_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "tpucare.cli", "ray", "demo", "--json", "--keep", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(kept / 'daemon.log').read_text()[-5000:]}"
    report = json.loads(done.stdout)
    assert (report["ok"], report["faults"], report["tasks"]) == (True, [], 10)
    assert report["slices"] == {"lab-0": ["lab-0-a0", "lab-0-a1"]}
    assert (report["preempted"], report["leaked_nodes"], report["leaked_processes"]) == ("lab-0-a0", [], [])
