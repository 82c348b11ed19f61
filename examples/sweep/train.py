#!/usr/bin/env python3
"""
One training of the sweep: W&B's agent starts it with a point of the search, `train.py --lr=0.1 --momentum=0.9`.

It stands in for your training: a logistic regression in plain Python, so it starts at once. The point is the code
around it: a preempted run marks itself, saves and exits with a non-zero status; W&B then requeues it, and it resumes
from its checkpoint on the node that asks next.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

from tpucare.training import Requests, Wish, init_wandb, resume_step

SAVE_EVERY = 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "100")))
    parser.add_argument("--step-seconds", type=float, default=float(os.environ.get("STEP_SECONDS", "0")))
    return parser.parse_args()


def batch(step: int, size: int = 64) -> list[tuple[list[float], float]]:
    """Points of a plane and, with some noise, their side of a line; the same for the same step."""
    rng = random.Random(step)
    points = [[1.0, rng.uniform(-1, 1), rng.uniform(-1, 1)] for _ in range(size)]
    return [(point, float(0.2 + 2 * point[1] - 3 * point[2] + rng.gauss(0, 0.3) > 0)) for point in points]


def loss_and_gradient(weights: list[float], step: int) -> tuple[float, list[float]]:
    loss, gradient, data = 0.0, [0.0] * len(weights), batch(step)
    for point, label in data:
        guess = 1 / (1 + math.exp(-sum(w * x for w, x in zip(weights, point))))
        loss -= math.log(max(1e-9, guess if label else 1 - guess)) / len(data)
        for index, x in enumerate(point):
            gradient[index] += (guess - label) * x / len(data)
    return loss, gradient


def save(folder: Path, step: int, state: dict[str, list[float]]) -> None:
    """Save completely or not at all: write under another name, then rename. In a bucket, let orbax do it."""
    half = folder / f"{step}.half-{os.getpid()}"
    half.mkdir(parents=True)
    (half / "state.json").write_text(json.dumps(state))
    half.replace(folder / str(step))


def main() -> None:
    options = parse_arguments()
    run = init_wandb(config=vars(options))
    # Runs of a sweep move between nodes, so each run has its own folder below the shared one.
    folder = Path(os.environ.get("TPUCARE_CHECKPOINT") or "checkpoints", run.id)
    state = {"weights": [0.0] * 3, "velocity": [0.0] * 3}
    step = resume_step(folder, wandb=run) or 0
    if step:
        state = json.loads((folder / str(step) / "state.json").read_text())
    print(f"run {run.id} goes on after step {step}", flush=True)
    with Requests(wandb=run) as requests:
        while step < options.steps:
            loss, gradient = loss_and_gradient(state["weights"], step)
            velocity = [options.momentum * v - options.lr * g for v, g in zip(state["velocity"], gradient)]
            weights = [w + v for w, v in zip(state["weights"], velocity)]
            state = {"weights": weights, "velocity": velocity}
            step += 1
            run.log({"loss": loss}, step=step)
            wish = requests.look()
            if wish or step % SAVE_EVERY == 0 or step == options.steps:
                save(folder, step, state)
            if wish is Wish.SAVE_AND_STOP:
                print(f"run {run.id} was asked to stop after step {step}", flush=True)
                requests.stop()
            time.sleep(options.step_seconds)
    run.finish()


if __name__ == "__main__":
    main()
