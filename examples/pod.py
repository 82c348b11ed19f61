#!/usr/bin/env python3
"""
Keep one pod training for weeks: set up every new node, resume from the newest checkpoint, start it on all hosts.

    python examples/pod.py --host my-pod --zone europe-west4-a --tpu-version 3 --slices 4 \\
        --repository https://github.com/YOU/YOUR-TRAINING --checkpoint gs://MY-BUCKET/my-pod -- --batch 512

Each host clones the repository, runs `bash setup.sh`, then `bash run.sh --config ~/config.json --batch 512`. The
training reads the step to resume from in config.json, and saves complete checkpoints in folders named by their step.

Ctrl-C deletes the pod. SIGTERM leaves it alive: the next start of the script adopts it with its config and counter.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import asdict, dataclass, replace

import tpucare
from tpucare.training import resume_step


@dataclass
class Config:
    """The settings of the training, written to ~/config.json on every host."""

    checkpoint: str
    steps: int
    start_step: int = 0


@dataclass
class Context:
    """The state that outlives a node: tpucare stores it and passes it to the callback of the next node."""

    host: str
    config: Config
    retry: int = 0


class Pod:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def created(self, host: str, context: Context | None) -> Context:
        """Called once for each new node, before `start`; *context* is None for the first node."""
        if context is None:
            return Context(host, Config(self.options.checkpoint, self.options.steps))
        context.host = host
        context.retry += 1
        return context

    def start(self, context: Context, worker: tpucare.SliceIndex) -> None:
        """
        Called for each new node, and again when the training has ended while the node lives. With `all_workers` there
        is one call, with worker "all", so that all hosts get the same step.

        The call returns: tpucare watches the screen that it leaves behind. Once the node is gone, every function called
        here raises NodeGone, and a new node gets a new call.
        """
        options, host = self.options, context.host
        # No training runs now, so the newest complete checkpoint is final.
        config = replace(context.config, start_step=resume_step(context.config.checkpoint) or 0)
        print(f"{host}: retry {context.retry}, from step {config.start_step}", flush=True)
        tpucare.send_to_tpu(host, options.zone, "config.json", json.dumps(asdict(config), indent=2), worker)
        script = tpucare.exec_command(
            options.repository,
            # tpucare delivers the key beside the script, never in it.
            wandb_key=os.environ.get("WANDB_API_KEY"),
            branch=options.branch,
            setup_command="bash setup.sh",
            run_command=f"bash run.sh --config ~/config.json {shlex.join(options.arguments)}",
        )
        tpucare.send_to_tpu(host, options.zone, "start.sh", script, worker)
        print(tpucare.exec_on_tpu(host, options.zone, "bash start.sh", worker), end="", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="my-pod", help="name of the slot; its nodes are HOST-a0, HOST-a1, ...")
    parser.add_argument("--zone", required=True)
    parser.add_argument("--tpu-version", type=int, default=3)
    parser.add_argument("--slices", type=int, default=4, help="in units of 8 cores: 4 of version 3 are a v3-32")
    parser.add_argument("--preemptible", type=int, default=1, choices=(0, 1))
    parser.add_argument("--service-account", help="account of the hosts; default: the project's")
    parser.add_argument("--repository", required=True, help="contains setup.sh and run.sh")
    parser.add_argument("--branch", default="main")
    parser.add_argument("--checkpoint", required=True, help="gs://BUCKET/PATH, or a folder that all hosts share")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("arguments", nargs="*", help="after --: arguments for run.sh")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    pod = Pod(options)
    tpucare.start_single(
        options.host,
        options.tpu_version,
        options.zone,
        options.preemptible,
        options.service_account,
        options.slices,
        pod.start,
        pod.created,
        all_workers=True,
        on_exit="restart",
    )


if __name__ == "__main__":
    main()
