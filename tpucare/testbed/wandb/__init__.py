"""
A small W&B server for one machine: runs, sweeps and agents of the real `wandb` client, without an account or network.

It speaks the part of the protocol that `wandb.init`, `wandb agent` and `wandb.Api()` use, so that a whole sweep swarm
runs offline. It is a stand-in: which point a sweep gives out next and when an interrupted run is given out again follow
what W&B documents, not what its service was seen to do. Nothing is kept on disk but the audit log, if one is asked for.

`search` draws points, `state` is the world (no clock, no thread), `answers` shapes it as the client reads it, `graphql`
and `server` serve it.
"""

from __future__ import annotations

from tpucare.testbed.wandb.server import WandbServer
from tpucare.testbed.wandb.state import WandbState

__all__ = ["WandbServer", "WandbState"]
