"""Trainings of examples/ray on slices that are preempted: Ray Train, Ray Tune, and a sweep of hydra."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kits.ray_lab import RayLab, Submitted, ray_lab

pytest.importorskip("hydra_plugins.hydra_ray_launcher")
pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

SECONDS = 240.0


@pytest.mark.slow
def test_a_training_on_two_hosts_ends_through_two_preemptions_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2}, idle="30s")
        storage = f"--storage={lab.home.bucket}"
        disturbed = lab.example("jax_trainer.py", storage, "--steps=60", "--save-every=5")
        for attempt in range(2):
            # Ray knows a checkpoint a moment after its folder is there: the third one proves the second.
            _await_checkpoints(lab, disturbed, lab.home.bucket / "regression", 3)
            assert lab.home.names() == [f"lab-0-a{attempt}"]
            lab.home.order("preempt", selector=f"lab-0-a{attempt}")
        said = lab.await_end(disturbed, seconds=SECONDS)
        begins = sorted({int(step) for step in re.findall(r"begins at step (\d+) on lab-0, host 0 of 2", said)})
        assert len(begins) == 3, begins
        assert begins[0] == 0
        assert begins[1] >= 5
        undisturbed = lab.example("jax_trainer.py", storage, "--name=undisturbed", "--steps=60", "--save-every=5")
        assert _bits(said) == _bits(lab.await_end(undisturbed, seconds=SECONDS))
        lab.await_rest(120)
        assert lab.slices_made() == ["lab-0-a0", "lab-0-a1", "lab-0-a2"]


def _await_checkpoints(lab: RayLab, job: Submitted, folder: Path, number: int) -> None:
    """*number* more checkpoints than there are."""
    before = {path.name for path in folder.glob("checkpoint_*")}

    def look() -> bool:
        return len({path.name for path in folder.glob("checkpoint_*")} - before) >= number

    _await(lab, job, look, f"{number} more checkpoints in {folder}")


def _await(lab: RayLab, job: Submitted, look: Callable[[], bool], what: str) -> None:
    """*look* is true while the job runs."""

    def look_while_it_runs() -> bool:
        assert job.process.poll() is None, job.said()
        return look()

    lab.home.await_(look_while_it_runs, what, SECONDS)


def _bits(said: str) -> str:
    (found,) = re.findall(r"^finished at step 60: loss [\d.]+ params_sha256 ([0-9a-f]{64})$", said, re.MULTILINE)
    return str(found)


@pytest.mark.slow
def test_a_preemption_loses_none_of_eight_trials_on_two_slices(tmp_path: Path) -> None:
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2})
        job = lab.example("tune.py", f"--storage={lab.home.bucket}", "--step-seconds=0.2")
        trials = lab.home.bucket / "rates"
        # All hosts work: two of each slice.
        _await(lab, job, lambda: len({path.parent for path in trials.glob("*/checkpoint_*")}) >= 4, "four trials train")
        assert sorted(lab.home.names()) == ["lab-0-a0", "lab-1-a0"]
        lab.home.order("preempt", selector="lab-0-a0")
        said = lab.await_end(job, seconds=SECONDS)
        assert "8 trials, 0 failed; best lr 0.5" in said
        assert len(re.findall(r"^lr [\d.]+: step 20, loss ", said, re.MULTILINE)) == 8
        lost = re.findall(r"begins at step ([1-9]\d*) on lab-", said)
        assert lost, "a preempted trial goes on from its checkpoint"
        lab.await_rest(120)
        assert sorted(set(lab.slices_made()) - {"lab-0-a1"}) == ["lab-0-a0", "lab-1-a0"]


@pytest.mark.slow
def test_a_sweep_of_hydra_takes_a_host_for_each_combination_or_cpus_alone(tmp_path: Path) -> None:
    with ray_lab(tmp_path) as lab:
        lab.pool({"min": 0, "max": 2}, kind="v4-8")
        sweep = ("--multirun", "hydra/launcher=ray", "model=mlp,cnn", "optimizer.lr=1e-3,1e-4")
        said = lab.await_end(lab.example("train_model.py", *sweep, "device=cpu"), seconds=SECONDS)
        assert _trained(said) == {("mlp", "0.001"), ("mlp", "0.0001"), ("cnn", "0.001"), ("cnn", "0.0001")}
        assert lab.slices_made() == [], "CPUs of the head suffice"
        said = lab.await_end(lab.example("train_model.py", *sweep), seconds=SECONDS)
        assert _trained(said) == {("mlp", "0.001"), ("mlp", "0.0001"), ("cnn", "0.001"), ("cnn", "0.0001")}
        assert set(re.findall(r" on (lab-\d|the head) \(cpu\)", said)) == {"lab-0", "lab-1"}
        lab.await_rest(120)
        assert sorted(lab.slices_made()) == ["lab-0-a0", "lab-1-a0"]


def _trained(said: str) -> set[tuple[str, str]]:
    return set(re.findall(r"model=(\w+) lr=([\d.]+) accuracy=0\.\d+ on ", said))
