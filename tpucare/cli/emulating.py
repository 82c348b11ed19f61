"""`tpucare emulator run` in the foreground."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tpucare.cli.common import say
from tpucare.emulator.config import WorldConfig, load_world
from tpucare.emulator.machines import Machines
from tpucare.emulator.server import EmulatorServer

WANDB_AUDIT = "wandb-audit.jsonl"
DUMMY_KEY = "0123456789" * 4


def serve(
    folder: Path,
    world: Path | None,
    *,
    port: int,
    seed: int,
    ssh_port: int,
    metadata_port: int,
    audit: Path | None,
    wandb_port: int | None = None,
    wandb_lost_after: float = 60.0,
) -> None:
    """
    Until SIGINT or SIGTERM.

    ssh_port: 0 = no machines    wandb_port: of a W&B stand-in beside the cloud; 0 = any, None = there is none
    Raises: ConfigError, MachineError.
    """
    config = load_world(world) if world is not None else WorldConfig.fast()
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with ExitStack() as open_servers:
        base = _open_wandb(open_servers, folder, wandb_port, seed, wandb_lost_after)
        make = partial(Machines, folder / "machines", ssh_port=ssh_port, metadata_port=metadata_port, **_dress(base))
        server = EmulatorServer(
            config,
            seed=seed,
            port=port,
            machines=make if ssh_port else None,
            state_dir=folder,
            audit_path=audit,
            ssh_port=ssh_port,
        )
        open_servers.enter_context(server)
        say(f"export TPUCARE_EMULATOR={shlex.quote(str(folder))}")
        if base:
            # Any key of 40 characters logs in; a real one would be wasted on a stand-in.
            say(f"export WANDB_BASE_URL={base} WANDB_API_KEY={DUMMY_KEY}")
        say(f"# serving at {server.endpoint}; stop with Ctrl-C")
        # A wait without end cannot be interrupted by a signal on every platform.
        while not stopping.wait(1.0):
            pass


def _open_wandb(open_servers: ExitStack, folder: Path, port: int | None, seed: int, lost_after: float) -> str:
    """The URL of the W&B stand-in; empty without one."""
    if port is None:
        return ""
    from tpucare.emulator.wandb import WandbServer

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = WandbServer(port=port, seed=seed, lost_after=lost_after, audit_path=folder / WANDB_AUDIT)
    open_servers.enter_context(server)
    return server.url


def _dress(base_url: str) -> dict[str, Any]:
    """What workers need for an offline sweep: where W&B is, and the `python` and `wandb` that run this program."""
    return {"extra_env": {"WANDB_BASE_URL": base_url}, "path_prefix": [Path(sys.executable).parent]} if base_url else {}
