"""
The step to resume at: that of the newest complete checkpoint in a folder or bucket.

Saving and restoring are left to orbax; this module knows its two marks of a complete checkpoint. It does not import
orbax, so that a script may call it before it imports JAX.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .processes import from_all_processes

# Orbax puts this file into a complete checkpoint where a folder cannot be renamed atomically (buckets).
COMMIT_MARKER = "commit_success.txt"

# Orbax' folder of a step: digits, maybe padded with zeros. Another name (logs_2026) is not a checkpoint.
_STEP_NAME = re.compile(r"[0-9]{1,18}")

_log = logging.getLogger(__name__)


def complete_steps(checkpoint: str | os.PathLike[str] | None = None, *, commit_marker: bool | None = None) -> list[int]:
    """
    Steps of the complete checkpoints in a folder or bucket, ascending; empty if it does not exist.

    checkpoint:     default: TPUCARE_CHECKPOINT. `gs://BUCKET/PATH` needs etils (comes with orbax) and gcsfs
    commit_marker:  True if a complete checkpoint has `commit_success.txt`. Default: True for buckets; on a file system
                    orbax renames the folder once it is complete. Pass True if you chose orbax's commit file yourself,
                    as on a bucket mounted with gcsfuse, where a rename is many copies

    Raises:
        OSError: The folder exists and cannot be read. This is an error, since training would begin anew otherwise.
    """
    return sorted(_newest_first(checkpoint, commit_marker))


def resume_step(
    checkpoint: str | os.PathLike[str] | None = None, wandb: Any = None, *, commit_marker: bool | None = None
) -> int | None:
    """
    Step of the newest complete checkpoint, to resume at; None: begin at step 0.

    If `jax.distributed` is initialised, all processes have to call it, and get the same answer.

    wandb:  a W&B run, or its `starting_step`, only to log differences: W&B lags behind, and training can resume only
            at a checkpoint.

    Raises:
        OSError: as `complete_steps`.
        RuntimeError: Some processes see checkpoints and some see none: the hosts do not share the folder.
    """
    own = next(_newest_first(checkpoint, commit_marker), -1)
    steps = from_all_processes(own)
    if min(steps) < 0 <= max(steps):
        raise RuntimeError(
            f"process {steps.index(max(steps))} sees a checkpoint of step {max(steps)} in {_address(checkpoint)}, "
            f"process {steps.index(min(steps))} sees none: all hosts have to share this folder"
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
        if (entry / COMMIT_MARKER).exists() if marked else _is_filled_folder(entry):
            yield step


def _is_filled_folder(folder: Any) -> bool:
    return bool(folder.is_dir()) and next(iter(folder.iterdir()), None) is not None


def _address(checkpoint: str | os.PathLike[str] | None) -> str:
    address = os.environ.get("TPUCARE_CHECKPOINT", "") if checkpoint is None else os.fspath(checkpoint)
    if not address:
        raise ValueError("no checkpoint folder: pass one, or set `checkpoint:` in the fleet file (TPUCARE_CHECKPOINT)")
    return address


def _folder(address: str) -> Any:
    """A `pathlib.Path`, or its counterpart in etils for a bucket."""
    if "://" not in address:
        return Path(address)
    try:
        from etils import epath  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"reading {address} needs etils: pip install 'etils[epath,epath-gcs]'") from error
    return epath.Path(address)


def _compare(step: int, starting_step: int, address: str) -> None:
    """Log the steps that only W&B or only the checkpoints have."""
    last = starting_step - 1
    if step < 0 and last > 0:
        _log.warning("W&B has steps up to %d, but %s has no complete checkpoint: beginning anew", last, address)
    elif last > step:
        _log.info("steps %d to %d are trained again; W&B keeps its values of them", step + 1, last)
    elif 0 < last < step:
        _log.info("W&B never got steps %d to %d: the run was killed before they were sent", last + 1, step)
