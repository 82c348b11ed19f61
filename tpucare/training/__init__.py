"""
Helpers for a training script that survives preemption: the step to resume at, this process's shards, notices,
when to save, and a W&B run that goes on over attempts.

Imported by the training script on the TPU VM, not by tpucare. The folder needs only the standard library and imports no
other module of tpucare, so it may be copied beside a training script; jax, wandb and etils are imported by the
functions that need them. It runs on Python 3.8 and newer, since the Python of TPU VMs may be too old for tpucare
itself. Saving and restoring are left to orbax or another library.
"""

from __future__ import annotations

from .cadence import daly_interval, daly_steps
from .checkpoints import complete_steps, resume_step
from .notices import TERMINATED, Notice, Requests, Wish, notice
from .prefetch import prefetched
from .processes import Process, split_by_process, this_process
from .saves import SavePolicy, Saves, save_due
from .wandb_runs import init_wandb, wandb_options, wandb_run_id

__all__ = [
    "TERMINATED",
    "Notice",
    "Process",
    "Requests",
    "SavePolicy",
    "Saves",
    "Wish",
    "complete_steps",
    "daly_interval",
    "daly_steps",
    "init_wandb",
    "notice",
    "prefetched",
    "resume_step",
    "save_due",
    "split_by_process",
    "this_process",
    "wandb_options",
    "wandb_run_id",
]
