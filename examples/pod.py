#!/usr/bin/env python3
"""
Keep one pod training for weeks: every new node is set up, told where to go on, and started on all hosts.

    python examples/pod.py --host my-pod --zone europe-west4-a --tpu-version 3 --slices 4 \\
        --repository https://github.com/YOU/YOUR-TRAINING --checkpoint gs://MY-BUCKET/my-pod -- --batch 512

On each host the repository is cloned, `bash setup.sh` runs, then `bash run.sh --config ~/config.json --batch 512`. The
training reads from config.json which step to go on from, and saves complete checkpoints in folders named by their step.

Ctrl-C deletes the pod. SIGTERM leaves it alive: started again, the script goes on with it, its config and its counter.
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
    """What the training is told. It is written to ~/config.json on every host."""

    checkpoint: str
    steps: int
    start_step: int = 0


@dataclass
class Context:
    """What outlives a node: tpucare keeps it in its store, and hands it to the callback of the next one."""

    host: str
    config: Config
    retry: int = 0


class Pod:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def created(self, host: str, context: Context | None) -> Context:
        """Called once for each new node, before `start`; with None for the very first."""
        if context is None:
            return Context(host, Config(self.options.checkpoint, self.options.steps))
        context.host = host
        context.retry += 1
        return context

    def start(self, context: Context, worker: tpucare.SliceIndex) -> None:
        """
        Called for each new node, and again when the training on it has ended without the node's doing. With
        `all_workers` it is called once, with worker "all", so that all hosts are told the same step.

        It has an end: tpucare sees whether the screen lives that it leaves behind. Once the node is gone, all that is
        called here raises NodeGone, and a new node gets a new call.
        """
        options, host = self.options, context.host
        # Nothing trains now, so what is complete is the newest there will be.
        config = replace(context.config, start_step=resume_step(context.config.checkpoint) or 0)
        print(f"{host}: retry {context.retry}, from step {config.start_step}", flush=True)
        tpucare.send_to_tpu(host, options.zone, "config.json", json.dumps(asdict(config), indent=2), worker)
        script = tpucare.exec_command(
            options.repository,
            # Delivered beside the script, never in it.
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
    parser.add_argument("--service-account", help="that the hosts run as; default: the project's")
    parser.add_argument("--repository", required=True, help="with setup.sh and run.sh")
    parser.add_argument("--branch", default="main")
    parser.add_argument("--checkpoint", required=True, help="gs://BUCKET/PATH; a folder that all hosts share also does")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("arguments", nargs="*", help="behind --: handed to run.sh")
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
