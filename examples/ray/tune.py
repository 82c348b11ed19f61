"""
Ray Tune: eight trials, each on one host. A preempted trial goes on from its checkpoint; none is lost.

usage: python tune.py --storage FOLDER [--trials 8] [--steps 20] [--chips 4]
"""

from __future__ import annotations

import argparse
import os
from typing import Any


def trial(config: dict[str, Any]) -> None:
    """Fits a line with the learning rate of the trial, a checkpoint each step."""
    import json
    import tempfile
    import time
    from pathlib import Path

    import jax
    import jax.numpy as jnp
    from ray import tune

    inputs = jnp.linspace(-1, 1, 64)
    slope = jax.jit(jax.value_and_grad(lambda weight: jnp.mean((inputs * weight - 3 * inputs) ** 2)))
    start, weight = 0, 0.0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = json.loads((Path(folder) / "state.json").read_text())
            start, weight = saved["step"], saved["weight"]
    print(f"trial with lr {config['lr']} begins at step {start} on {os.environ.get('TPU_NAME')}", flush=True)
    for step in range(start + 1, config["steps"] + 1):
        loss, change = slope(weight)
        weight -= config["lr"] * float(change)
        time.sleep(config["step_seconds"])
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps({"step": step, "weight": weight}))
            tune.report({"step": step, "loss": float(loss)}, checkpoint=tune.Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="folder or address that all hosts share")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--chips", type=int, default=4, help="chips of a host, which one trial takes")
    parser.add_argument("--step-seconds", type=float, default=0, help="time that each step waits, for tests")
    wanted = parser.parse_args()
    # Before Ray is imported: what two hosts say is no repetition.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")

    import ray
    from ray import tune

    ray.init()
    rates = [0.5 / 2**number for number in range(wanted.trials)]
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 1, "TPU": wanted.chips}),
        param_space={"lr": tune.grid_search(rates), "steps": wanted.steps, "step_seconds": wanted.step_seconds},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(
            name="rates",
            storage_path=wanted.storage,
            # A preemption is a failure: as many as there are.
            failure_config=tune.FailureConfig(max_failures=-1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    )
    results = tuner.fit()
    for result in results:
        print(f"lr {result.config['lr']:.4f}: step {result.metrics['step']}, loss {result.metrics['loss']:.3e}")
    best = results.get_best_result()
    print(f"{len(results)} trials, {results.num_errors} failed; best lr {best.config['lr']}")


if __name__ == "__main__":
    main()
