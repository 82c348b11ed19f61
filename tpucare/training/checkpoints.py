"""
From which step to go on: the newest complete checkpoint in a folder or bucket is the truth.

Saving and restoring are left to orbax, whose two ways of telling a complete checkpoint are known here. The module does
without it, so that a script may ask before it imports JAX.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .processes import from_all_processes

# Orbax puts this file into a complete checkpoint where a folder cannot be renamed at once (buckets).
COMMIT_MARKER = "commit_success.txt"

# What orbax calls a step: digits, perhaps padded with zeros. Anything else beside it (logs_2026) is no checkpoint.
_STEP_NAME = re.compile(r"[0-9]{1,18}")

_log = logging.getLogger(__name__)


def complete_steps(checkpoint: str | os.PathLike[str] | None = None, *, commit_marker: bool | None = None) -> list[int]:
    """
    Steps of the complete checkpoints in a folder or bucket, ascending; empty when it does not exist.

    checkpoint:     default: TPUCARE_CHECKPOINT. `gs://BUCKET/PATH` needs etils (comes with orbax) and gcsfs
    commit_marker:  whether `commit_success.txt` tells a complete one. Default: in buckets yes; on a file system orbax
                    renames the folder when every byte is there. Say True if you chose orbax's commit file yourself, as
                    on a bucket mounted with gcsfuse, where a rename is many copies

    Raises:
        OSError: The folder is there and cannot be read. It is not taken for an empty one: that would begin anew.
    """
    return sorted(_newest_first(checkpoint, commit_marker))


def resume_step(
    checkpoint: str | os.PathLike[str] | None = None, wandb: Any = None, *, commit_marker: bool | None = None
) -> int | None:
    """
    Step of the newest complete checkpoint, from which to go on; None: begin.

    When `jax.distributed` is up, all processes have to call it, and get the same answer.

    wandb:  a W&B run, or its `starting_step`. Only a hint: the server lags behind, and a checkpoint is what there is to
            go on from. What does not fit together is told in the log.

    Raises:
        OSError: as `complete_steps`.
        RuntimeError: Some processes see checkpoints and some see none: the folder is not shared by all.
    """
    own = next(_newest_first(checkpoint, commit_marker), -1)
    steps = from_all_processes(own)
    if min(steps) < 0 <= max(steps):
        raise RuntimeError(
            f"process {steps.index(max(steps))} sees a checkpoint of step {max(steps)} in {_address(checkpoint)}, "
            f"process {steps.index(min(steps))} sees none: all hosts have to share that folder"
        )
    step = min(steps)
    if wandb is not None:
        _compare(step, wandb if isinstance(wandb, int) else wandb.starting_step, _address(checkpoint))
    return step if step >= 0 else None


def _newest_first(checkpoint: str | os.PathLike[str] | None, commit_marker: bool | None) -> Iterator[int]:
    address = _address(checkpoint)
    folder = _folder(address)
    marked = "://" in address if commit_marker is None else commit_marker
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return
    named = [(int(entry.name), entry) for entry in entries if _STEP_NAME.fullmatch(entry.name)]
    for step, entry in sorted(named, key=lambda pair: pair[0], reverse=True):
        if (entry / COMMIT_MARKER).exists() if marked else _holds_something(entry):
            yield step


def _holds_something(folder: Any) -> bool:
    return bool(folder.is_dir()) and next(iter(folder.iterdir()), None) is not None


def _address(checkpoint: str | os.PathLike[str] | None) -> str:
    address = os.environ.get("TPUCARE_CHECKPOINT", "") if checkpoint is None else os.fspath(checkpoint)
    if not address:
        raise ValueError("no checkpoint folder: name one, or give `checkpoint:` in the fleet file (TPUCARE_CHECKPOINT)")
    return address


def _folder(address: str) -> Any:
    """A `pathlib.Path`, or its likeness of etils for a bucket."""
    if "://" not in address:
        return Path(address)
    try:
        from etils import epath  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"reading {address} needs etils: pip install 'etils[epath,epath-gcs]'") from error
    return epath.Path(address)


def _compare(step: int, starting_step: int, address: str) -> None:
    """Say what W&B knows and the checkpoints do not, or the other way round."""
    last = starting_step - 1
    if step < 0 and last > 0:
        _log.warning("W&B has steps up to %d, but %s holds no complete checkpoint: beginning anew", last, address)
    elif last > step:
        _log.info("steps %d to %d are trained again; W&B keeps what it has of them", step + 1, last)
    elif 0 < last < step:
        _log.info("W&B never got steps %d to %d: the run was killed before they were sent", last + 1, step)
