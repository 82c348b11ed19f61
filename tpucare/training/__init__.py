"""
What a training script needs to survive preemption: where to go on, which shards are mine, has a notice come, how often
to save, and a W&B run that goes on over attempts.

Imported by the training on the TPU VM, not by tpucare. The folder is standard library alone and imports nothing else of
tpucare, so it may be copied beside a training script; jax, wandb and etils are imported by the function that needs
them. It runs on Python 3.8 and newer, for TPU VMs have a Python on which tpucare itself cannot be installed. Saving and
restoring itself is left to orbax, or whatever you use.
"""

from __future__ import annotations

from .cadence import daly_interval, daly_steps
from .checkpoints import complete_steps, resume_step
from .notices import TERMINATED, Notice, Requests, Wish, notice
from .processes import Process, split_by_process, this_process
from .wandb_runs import init_wandb, wandb_options, wandb_run_id

__all__ = [
    "TERMINATED",
    "Notice",
    "Process",
    "Requests",
    "Wish",
    "complete_steps",
    "daly_interval",
    "daly_steps",
    "init_wandb",
    "notice",
    "resume_step",
    "split_by_process",
    "this_process",
    "wandb_options",
    "wandb_run_id",
]
