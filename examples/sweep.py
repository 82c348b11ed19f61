#!/usr/bin/env python3
"""
Search with a W&B sweep on a swarm of preemptible TPUs, and print the best run when the sweep is over.

    python examples/sweep.py --type v4-8 --zone us-central2-b --count 8 --checkpoint gs://MY-BUCKET/sweep

Each node runs one `wandb agent`. W&B requeues the run of a preempted node, and the run resumes from its checkpoint.
tpucare replaces nodes while points are left, and deletes them when none is. A running daemon (`tpucare daemon`) takes
the swarm over, and this script ends.

The workers get the folder `sweep/` with a copy of `tpucare.training` in it, because their Python may be too old for
tpucare itself. The script assembles it in `--code`, which has to stay while the swarm lives.

The key and the address of W&B come from your login or WANDB_API_KEY and WANDB_BASE_URL.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tpucare import Event, sweeps, training

CODE = Path(__file__).resolve().parent / "sweep"


def assemble_code(folder: Path) -> Path:
    """The code of the trainings with all of its imports except wandb."""
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CODE, folder, ignore=without, dirs_exist_ok=True)
    own = Path(training.__file__).parent
    shutil.copytree(own, folder / "tpucare" / "training", ignore=without, dirs_exist_ok=True)
    return folder.resolve()


def fleet(options: argparse.Namespace) -> dict[str, Any]:
    """The content of a fleet file: which TPUs, which code. A custom `run` may place the agent with `{agent}`."""
    return {
        "name": options.name,
        "tpu": {"type": options.type, "zones": [options.zone], "provisioning": "spot"},
        "job": {
            "workdir": str(assemble_code(options.code)),
            "setup": options.setup,
            "env": pairs(options.env),
            "checkpoint": options.checkpoint,
        },
        # The time after SIGTERM for a run to save and to report its preemption to W&B.
        "care": {"grace": "25s", **pairs(options.care)},
    }


def pairs(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", default=str(CODE / "sweep.yaml"), help="file of a new sweep, or ENTITY/PROJECT/ID")
    parser.add_argument("--name", default="search", help="name of the fleet; its slots are NAME-0, NAME-1, ...")
    parser.add_argument("--type", required=True, help="a TPU type with one host, such as v4-8")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--count", type=int, default=4, help="number of nodes, with one agent each")
    parser.add_argument("--checkpoint", required=True, help="gs://BUCKET/PATH, or a folder that all nodes share")
    parser.add_argument("--setup", default="python3 -m pip install --quiet wandb", help="command on each new node")
    parser.add_argument("--code", type=Path, default=Path("sweep-code"), help="folder to send to the workers")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variables of the trainings")
    parser.add_argument("--care", action="append", default=[], metavar="KEY=VALUE", help="such as boot_timeout=20m")
    return parser.parse_args()


def print_event(event: Event) -> None:
    print(f"{event.at:%H:%M:%S} {event.node or event.slot:12} {event.text}", flush=True)


def best_run(path: str) -> str:
    """The best run of a sweep according to W&B, by the sweep's metric."""
    import wandb

    api: Any = wandb.Api()
    run = api.sweep(path).best_run()
    return f"{run.id}: loss {run.summary['loss']:.4f} with {run.config}" if run else "no run has a loss"


def main() -> None:
    options = parse_arguments()
    outcome = sweeps.sweep(options.sweep, options.count, fleet(options), on_event=print_event)
    for slot, why in (outcome.failed or {}).items():
        print(f"{slot} gave up: {why}", file=sys.stderr)
    if outcome.daemon:
        print(f"the daemon took over {outcome.fleet}; `tpucare status` shows the progress of sweep {outcome.sweep}")
    elif outcome.over:
        print(f"sweep {outcome.sweep} is over; best run {best_run(outcome.sweep)}")
    # A thread that still waits for a worker must not keep the process alive.
    sys.stdout.flush()
    os._exit(0 if outcome.daemon or (outcome.over and not outcome.failed) else 1)


if __name__ == "__main__":
    main()
