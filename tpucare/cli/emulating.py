"""`tpucare emulator run` in the foreground."""

from __future__ import annotations

import shlex
import signal
import threading
from functools import partial
from pathlib import Path

from tpucare.cli.common import say
from tpucare.emulator.config import WorldConfig, load_world
from tpucare.emulator.machines import Machines
from tpucare.emulator.server import EmulatorServer


def serve(
    folder: Path, world: Path | None, *, port: int, seed: int, ssh_port: int, metadata_port: int, audit: Path | None
) -> None:
    """Until SIGINT or SIGTERM. ssh_port: 0 = no machines. Raises: ConfigError, MachineError."""
    config = load_world(world) if world is not None else WorldConfig.fast()
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    make = partial(Machines, folder / "machines", ssh_port=ssh_port, metadata_port=metadata_port)
    server = EmulatorServer(
        config,
        seed=seed,
        port=port,
        machines=make if ssh_port else None,
        state_dir=folder,
        audit_path=audit,
        ssh_port=ssh_port,
    )
    with server:
        say(f"export TPUCARE_EMULATOR={shlex.quote(str(folder))}")
        say(f"# serving at {server.endpoint}; stop with Ctrl-C")
        # A wait without end cannot be interrupted by a signal on every platform.
        while not stopping.wait(1.0):
            pass
