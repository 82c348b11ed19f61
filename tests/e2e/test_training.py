"""Real JAX training through preemptions: what the README promises on its first page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpucare.testbed.audit import Expected, check

pytestmark = [pytest.mark.machines, pytest.mark.timeout(480)]

SAVE_EVERY = 20
# A step takes a tenth of a second: the training must not be over before a preemption that comes seconds late.
STEPS = 120


@pytest.mark.slow
def test_a_first_day_with_everything_that_breaks_one(tmp_path: Path) -> None:
    report = _demo(tmp_path / "kept", "--preemptions", "1", "--hosts", "2", "--world", "realistic")
    assert report["ok"] is True, report["faults"]


def _demo(folder: Path, *words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "tpucare.cli", "demo", "--json", "--keep", str(folder), "--steps", str(STEPS), *words],
        env={name: value for name, value in os.environ.items() if not name.startswith("TPUCARE_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report: dict[str, object] = json.loads(done.stdout)
    return report


def _check(folder: Path, report: dict[str, object], preemptions: int) -> None:
    zones, redone, seconds = report["zones"], report["steps_redone"], report["recovery_seconds"]
    resumed = report["resumed_from"]
    assert isinstance(zones, list)
    assert isinstance(redone, list)
    assert isinstance(seconds, list)
    assert isinstance(resumed, list)
    assert report["ok"] is True
    assert report["preemptions"] == preemptions
    assert report["attempts"] == preemptions + 1 == len(zones)
    assert len(set(zones)) == 2, "the stockout sends it to the other zone"
    assert report["final_step"] == STEPS
    assert len(resumed) == len(redone) == len(seconds) == preemptions
    assert all(step % SAVE_EVERY == 0 for step in resumed)
    assert all(0 <= count < 2 * SAVE_EVERY for count in redone)
    assert report["params_match"] is True
    assert report["leaked_nodes"] == report["leaked_processes"] == []
    assert all(length > 0 for length in seconds)
    # What it left for an outside check stands the check.
    last = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    deleted = [one["name"].rpartition("/")[2] for one in last if one.get("method") == "DeleteNode"]
    expected = Expected(fleets=frozenset({"demo"}), live_slots=frozenset(), allowed_deletes=frozenset(deleted[-1:]))
    assert check(folder / "audit.jsonl", expected) == []


@pytest.mark.slow
def test_one_host_through_two_preemptions(tmp_path: Path) -> None:
    report = _demo(tmp_path / "kept", "--preemptions", "2", "--hosts", "1")
    _check(tmp_path / "kept", report, preemptions=2)


def test_a_slice_of_two_hosts_through_a_preemption(tmp_path: Path) -> None:
    report = _demo(tmp_path / "kept", "--preemptions", "1", "--hosts", "2")
    _check(tmp_path / "kept", report, preemptions=1)
