"""
Checkpoints that survive a kill at any instant, and the result of a finished training.

Orbax writes a checkpoint in the background under a temporary name and renames it when every byte is there. So on a
file system a folder named by digits only is complete, and other folders beside it are remains of killed saves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

KEPT_CHECKPOINTS = 3


class Checkpoints:
    """The checkpoints of one training in one folder (or bucket) that all hosts share."""

    def __init__(self, folder: epath.Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._unreported: int | None = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT_CHECKPOINTS,
            enable_async_checkpointing=True,
            # Remains of killed saves would fill the bucket; only one run at a time uses this folder.
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(folder, options=options)

    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0 if there is none."""
        return self._manager.latest_step() or 0

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at *step*; *like* gives each array's shape, type and sharding."""
        return self._manager.restore(step, args=ocp.args.StandardRestore(like))

    def save(self, step: int, state: Any) -> None:
        """Start saving; returns once the arrays are copied. Waits first until the previous save is done."""
        self.wait()
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)
        self._unreported = step

    def report(self) -> None:
        """Print once that the last save is complete; cheap enough for every step."""
        if self._unreported is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Return when no save is in progress; raises the error of the background save."""
        self._manager.wait_until_finished()
        if self._unreported is not None:
            self._say(f"saved step {self._unreported}")
            self._unreported = None

    def close(self) -> None:
        self.wait()
        self._manager.close()


def params_sha256(params: Any) -> str:
    """SHA-256 over the bytes of all leaves, in the order of their sorted paths: equal only if every bit is equal."""
    leaves = sorted((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params))
    digest = hashlib.sha256()
    for _, leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def write_result(folder: epath.Path, result: dict[str, Any]) -> None:
    """Write `result.json` atomically: a reader sees all of it or none."""
    temporary = folder / "result.json.tmp"
    temporary.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    temporary.replace(folder / "result.json")
