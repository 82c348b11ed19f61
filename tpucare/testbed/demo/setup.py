"""
The setup of the demo: the daemon, and a folder with an emulated cloud, a git repository, a bucket and its state.

Every process that is started here is ended here, by its id.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from tpucare.model import accelerators
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.testbed.audit import Expected, check
from tpucare.testbed.demo.examples import example_folder
from tpucare.testbed.emulator.machines.machines import WorkerMachines
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig, ZoneConfig, load_world

FLEET = "demo"
SLOT = f"{FLEET}-0"
PROJECT = "emulated"
ZONES = ("us-east5-a", "europe-west4-b")
GENERATION = "v5p"
MOST_PREEMPTIONS = 4
DAEMON_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """
    The training: `steps` in all, a checkpoint every `save_every` steps, each step takes at least `step_seconds`.

    `keep`: leave all files in this folder, for inspection. `world`: a file, or the name of a shipped world.
    """

    preemptions: int = 2
    hosts: int = 2
    seed: int = 0
    steps: int = 200
    save_every: int = 20
    step_seconds: float = 0.1
    keep: Path | None = None
    world: Path | None = None

    def check(self) -> None:
        """Raises: ConfigError: a number that is not possible."""
        if not 0 <= self.preemptions <= MOST_PREEMPTIONS:
            most = f"0 to {MOST_PREEMPTIONS}: each waits for a fifth of all steps"
            raise ConfigError(f"--preemptions {self.preemptions} is not possible ({most})")
        accelerator_for(self.hosts)
        self.world_config()
        if self.keep is not None and self.keep.exists() and (not self.keep.is_dir() or any(self.keep.iterdir())):
            raise ConfigError(f"--keep {self.keep} is a file or not empty: name a folder that is new")

    def world_config(self) -> WorldConfig:
        """The world, with the zones of the demo added. Raises: ConfigError."""
        if self.world is None:
            return WorldConfig.fast(zones={zone: {} for zone in ZONES})
        config = load_world(self.world)
        return config.model_copy(update={"zones": {**dict.fromkeys(ZONES, ZoneConfig()), **config.zones}})


def accelerator_for(hosts: int) -> str:
    """The accelerator type of the demo with that many hosts. Raises: ConfigError: there is none."""
    sizes = [accelerators.lookup(name) for name in accelerators.known_types() if name.startswith(f"{GENERATION}-")]
    for size in sizes:
        if size.hosts == hosts:
            return size.type
    few = ", ".join(str(size.hosts) for size in sorted(sizes, key=lambda size: size.hosts)[:5])
    raise ConfigError(f"--hosts {hosts} is not possible: {GENERATION} slices have {few}, ... hosts")


class Stage:
    """The folder, the emulated cloud and the daemon, from `__enter__` to `__exit__`."""

    def __init__(self, folder: Path, options: DemoOptions) -> None:
        self.folder = folder
        self.options = options
        self.accelerator = accelerator_for(options.hosts)
        self.rng = random.Random(options.seed)
        self.emulator = folder / "emulator"
        self.bucket = folder / "bucket"
        self.state = folder / "state"
        self.fleets = folder / "fleets"
        self.audit = folder / "audit.jsonl"
        self.server: EmulatorServer | None = None
        self.daemon: subprocess.Popen[bytes] | None = None
        self._make_machines: Callable[..., WorkerMachines] | None = None

    @property
    def checkpoints(self) -> Path:
        return self.bucket / FLEET

    def __enter__(self) -> Self:
        try:
            self._build()
            self._open_cloud()
            self._start_daemon()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the daemon, then the cloud with all its machines."""
        self._stop_daemon()
        if self.server is not None:
            self.server.stop()

    def survivors(self) -> list[int]:
        """Pids of processes of workers, of ended ones too."""
        machines = self.server.machines if self.server is not None else None
        return list(getattr(machines, "survivors", list)())

    def judge(self, fleet: str, allowed_deletes: frozenset[str]) -> list[str]:
        """Every broken rule of the design, by the cloud's audit log. *allowed_deletes*: nodes that may go alive."""
        assert self.server is not None
        expected = Expected(fleets=frozenset({fleet}), allowed_deletes=allowed_deletes, live_slots=frozenset())
        return [str(finding) for finding in check(list(self.server.world.audit), expected)]

    # --- files

    def _build(self) -> None:
        self._make_folders()
        repository = self.folder / "repository"
        copy_example("train", repository)
        for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "the training"]):
            _git(repository, *words)
        self._declare(FLEET, self._fleet(repository))

    def _make_folders(self) -> None:
        for folder in (self.emulator, self.bucket, self.state, self.fleets):
            folder.mkdir(parents=True, mode=0o700)

    def _declare(self, name: str, fleet: Mapping[str, object]) -> None:
        (self.fleets / f"{name}.yaml").write_text(yaml.safe_dump(dict(fleet), sort_keys=False))

    def _fleet(self, repository: Path) -> dict[str, object]:
        chosen = self.options
        arguments = f"--steps {chosen.steps} --save-every {chosen.save_every} --seed {chosen.seed}"
        return {
            "name": FLEET,
            "project": PROJECT,
            "tpu": {"type": self.accelerator, "zones": list(ZONES), "provisioning": "spot"},
            "job": {
                "repository": f"file://{repository}",
                "branch": "main",
                "setup": "bash setup.sh",
                "run": f"bash run.sh {arguments} --step-seconds {chosen.step_seconds}",
                "env": {"JAX_PLATFORMS": "cpu"},
                "checkpoint": str(self.checkpoints),
            },
            # An emulated cloud shows a preemption within a second: no need to wait for a minute.
            "care": {"success_after": "5s"},
        }

    # --- processes

    def _open_cloud(self) -> None:
        ssh_port, config = free_port(), self.options.world_config()
        beside_python = Path(sys.executable).parent
        machines = partial(
            WorkerMachines,
            self.emulator,
            ssh_port=ssh_port,
            metadata_port=free_port(),
            # A python3 with JAX, as the image of a TPU VM has it.
            path_prefix=[beside_python],
            guest=config.guest,
        )
        self.server = EmulatorServer(
            config,
            seed=self.options.seed,
            machines=machines,
            state_dir=self.emulator,
            audit_path=self.audit,
            project=PROJECT,
            ssh_port=ssh_port,
        )
        self.server.start()

    def daemon_environment(self) -> dict[str, str]:
        """The user's environment, pointed at the emulated cloud, with a heartbeat that shows every few steps."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TPUCARE_", "NOTIFY_"))}
        ours = {"TPUCARE_EMULATOR": str(self.emulator), "TPUCARE_STATE": str(self.state), "TPUCARE_PROBE": "1"}
        return {**kept, **ours, "TPUCARE_FAST_PROBE": "0.5"}

    def _start_daemon(self) -> None:
        command = [sys.executable, "-m", "tpucare.cli", "daemon", "--fleets", str(self.fleets), "--log", "json"]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                command, env=self.daemon_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def check_daemon(self) -> None:
        """Raises: TpuCareError: the daemon has ended by itself."""
        if self.daemon is not None and (status := self.daemon.poll()) is not None:
            tail = (self.folder / "daemon.log").read_text(errors="replace").splitlines()[-5:]
            raise TpuCareError(f"the daemon ended with exit status {status}: {' | '.join(tail)}")

    def _stop_daemon(self) -> None:
        if self.daemon is None or self.daemon.poll() is not None:
            return
        self.daemon.send_signal(signal.SIGTERM)
        try:
            self.daemon.wait(DAEMON_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()


def copy_example(name: str, folder: Path) -> None:
    """Copy an example to *folder*, without its virtual environment or compiled files."""
    shutil.copytree(example_folder(name), folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "venv"))


def free_port() -> int:
    """A port that no address of this machine uses now; workers have loopback addresses of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _git(folder: Path, *words: str) -> None:
    author: Mapping[str, str] = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "demo"), ("EMAIL", "demo@example.com"))
    }
    environment = {**os.environ, **author, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    try:
        done = subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("git is not installed: apt-get install git") from None
    if done.returncode:
        raise TpuCareError(f"git {words[0]} failed: {done.stderr.strip()}")
