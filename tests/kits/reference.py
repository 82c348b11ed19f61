"""A training without interruption, as the one that others are compared with."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.testbed.demo.reference import beginning

# Several times the length of 1,000 steps on two busy cores.
DEADLINE = timedelta(minutes=10)


def undisturbed(
    train_folder: Path,
    *,
    hosts: int,
    steps: int,
    seed: int,
    save_every: int,
    folder: Path,
    deadline: timedelta = DEADLINE,
) -> dict[str, Any]:
    """The content of `result.json`. No process outlives the call. Raises: as `beginning`."""
    with beginning(train_folder, hosts=hosts, steps=steps, seed=seed, save_every=save_every, folder=folder) as finish:
        return finish(deadline)
