"""
The checkpoint that tpucare copied to this host while it fetched or made the environment (`job.prefetch`).

Restoring is left to orbax: it reads the copy like any folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .processes import from_all_processes

LOOK_SECONDS = 0.1
# The copy begins with the run; a tool that says nothing for so long says nothing any more.
WORDLESS_SECONDS = 60.0


def prefetched(
    step: int | None,
    *,
    wait_seconds: float = 600.0,
    environ: Mapping[str, str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """
    Folder on this host with a copy of the checkpoint of *step*; None: restore from where it was saved.

        manager.restore(step, args=..., directory=prefetched(step))

    Waits for a copy that is under way. A collective of all processes, which all get a folder or all None.
    """
    folder = (os.environ if environ is None else environ).get("TPUCARE_PREFETCH", "")
    is_there = bool(folder) and step is not None and _is_done(Path(folder), step, wait_seconds, sleep)
    return folder if min(from_all_processes(int(is_there))) else None


def _is_done(folder: Path, step: int, wait_seconds: float, sleep: Callable[[float], None]) -> bool:
    """The copy of *step* is complete."""
    waited = 0.0
    while True:
        try:
            word, _, rest = (folder / "state").read_text().partition(" ")
        except OSError:
            word, rest = "", ""
        if word == "done":
            return rest == str(step)
        if word == "failed" or (word == "begun" and rest != str(step)):
            return False
        if waited >= (wait_seconds if word else min(wait_seconds, WORDLESS_SECONDS)):
            return False
        sleep(LOOK_SECONDS)
        waited += LOOK_SECONDS
