"""`tpucare emulator run` in the foreground."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tpucare.testbed.emulator.machines.loopback import claim
from tpucare.testbed.emulator.machines.machines import WorkerMachines
from tpucare.testbed.emulator.machines.metadata_server import may_serve_by_name
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import Addresses, WorldConfig, ZoneConfig, load_world
from tpucare.testbed.emulator.world.requests import ANY_TYPE, offered_types

WANDB_AUDIT = "wandb-audit.jsonl"
DUMMY_KEY = "0123456789" * 4


def serve(
    folder: Path,
    world: Path | None,
    say: Callable[[str], None],
    *,
    ports: tuple[int, int, int],
    buckets: Sequence[str],
    seed: int,
    ssh_port: int,
    metadata_port: int,
    audit: Path | None,
    wandb_port: int | None = None,
    wandb_lost_after: float = 60.0,
) -> None:
    """
    Run an emulator until SIGINT or SIGTERM.

    say: prints a line of text   ports: of gRPC, REST and Cloud Storage, each 0 = any
    ssh_port: 0 = no machines    wandb_port: of a W&B stand-in beside the cloud; 0 = any, None = no stand-in
    Raises: ConfigError, MachineError.
    """
    config = load_world(world) if world is not None else WorldConfig.fast()
    config = config.model_copy(update={"buckets": tuple(dict.fromkeys((*config.buckets, *buckets)))})
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with ExitStack() as open_servers:
        if ssh_port and "network" not in config.addresses.model_fields_set:
            part = claim((ssh_port, metadata_port))
            open_servers.callback(part.close)
            config = config.model_copy(update={"addresses": Addresses(network=str(part.network))})
        base = _open_wandb(open_servers, folder, wandb_port, seed, wandb_lost_after)

        def machines(**hooks: Any) -> WorkerMachines:
            setup = {"guest": config.guest, **_worker_environment(base, server.storage_endpoint)}
            return WorkerMachines(folder / "machines", ssh_port=ssh_port, metadata_port=metadata_port, **setup, **hooks)

        server = EmulatorServer(
            config,
            seed=seed,
            port=ports[0],
            rest_port=ports[1],
            storage_port=ports[2],
            machines=machines if ssh_port else None,
            state_dir=folder,
            audit_path=audit,
            ssh_port=ssh_port,
        )
        open_servers.enter_context(server)
        say(f"export TPUCARE_EMULATOR={shlex.quote(str(folder))}")
        if base:
            # Any key of 40 characters logs in, so that no real one need be exposed to a stand-in.
            say(f"export WANDB_BASE_URL={base} WANDB_API_KEY={DUMMY_KEY}")
        say(f"# serving gRPC at {server.endpoint}, REST at {server.rest_endpoint}; stop with Ctrl-C")
        say(f"# Cloud Storage: export STORAGE_EMULATOR_HOST={server.storage_endpoint}")
        if ssh_port and not may_serve_by_name():
            say("# workers cannot ask http://metadata.google.internal, as Ray does: its port 80 needs root")
        say(f"# zones: {zones_text(config)}; name them in a fleet's `zones`")
        # A wait without end cannot be interrupted by a signal on every platform.
        while not stopping.wait(1.0):
            pass


def zones_text(config: WorldConfig) -> str:
    """Each zone with the generations that it offers; any other zone is refused with PERMISSION_DENIED."""
    return ", ".join(f"{name} ({_generations(name, zone)})" for name, zone in config.zones.items())


def _generations(name: str, zone: ZoneConfig) -> str:
    if zone.accelerators is not None and ANY_TYPE in zone.accelerators:
        return "every type"
    return ", ".join(dict.fromkeys(one.partition("-")[0] for one in offered_types(name, zone))) or "no type"


def _open_wandb(open_servers: ExitStack, folder: Path, port: int | None, seed: int, lost_after: float) -> str:
    """The URL of the W&B stand-in; empty without one."""
    if port is None:
        return ""
    from tpucare.testbed.wandb import WandbServer

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = WandbServer(port=port, seed=seed, lost_after=lost_after, audit_path=folder / WANDB_AUDIT)
    open_servers.enter_context(server)
    return server.url


def _worker_environment(base_url: str, storage: str) -> dict[str, Any]:
    """
    The environment of workers: the address of Cloud Storage for Google's clients and tensorstore; for an offline sweep
    the address of W&B, and a PATH with the `python` and `wandb` of this program.
    """
    env = {
        "STORAGE_EMULATOR_HOST": storage,
        "TENSORSTORE_GCS_HTTP_URL": storage,
        # gcsfs (2026.10) asks for the kind of a bucket over gRPC, which is not served here, and waits 60 s for it.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    if not base_url:
        return {"extra_env": env}
    return {"extra_env": {**env, "WANDB_BASE_URL": base_url}, "path_prefix": [Path(sys.executable).parent]}
