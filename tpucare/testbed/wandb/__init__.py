"""
A small W&B server for one machine: runs, sweeps and agents of the real `wandb` client, without an account or network.

It implements the part of the protocol that `wandb.init`, `wandb agent` and `wandb.Api()` use, so that a whole sweep
runs offline. The order in which it hands out points and interrupted runs follows the documentation of W&B; its service
was not observed. Only the audit log is written to disk, and only on request.

`search` draws points, `state` holds runs, sweeps and agents (no clock, no thread), `answers` makes answers of them, and
`graphql` and `server` serve these.
"""

from __future__ import annotations

from tpucare.testbed.wandb.server import WandbServer
from tpucare.testbed.wandb.state import WandbState

__all__ = ["WandbServer", "WandbState"]
