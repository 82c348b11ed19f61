"""
Builds an Engine with its adapters, for the daemon, the Python API, and commands that act without a daemon.

Reads the environment once, makes the store and the key where the state folder has none, and closes everything in the
order in which nothing is lost: effects first, then the adapters that they use, the store and its lock last.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tpucare.adapters.runner.launcher import ScriptLauncher
from tpucare.adapters.runner.logs import LogKeeper
from tpucare.adapters.semaphore import ContextGate
from tpucare.adapters.ssh.keys import LoginKey, load_or_make_key
from tpucare.adapters.ssh.remote import ParamikoRemote
from tpucare.adapters.state.create_budget import SharedBudget
from tpucare.adapters.state.market_files import MarketFiles
from tpucare.adapters.state.store import SqliteStore, open_store
from tpucare.adapters.system import SystemClock, ThreadExecutor, instance_id, machine_id, random_source
from tpucare.engine.effects import Ports
from tpucare.engine.engine import Engine
from tpucare.engine.state import Settings
from tpucare.model.errors import ConfigError
from tpucare.model.local_files import Private, read_private
from tpucare.model.ports import Lane, Launcher, Store
from tpucare.model.resources import Event
from tpucare.service.failpoints import failpoint_of
from tpucare.service.options import RAY_TOKEN_PREFIX, Options
from tpucare.service.stores import Neighbours

if TYPE_CHECKING:
    from tpucare.adapters.google.client import GoogleCloud

# One listing per project runs at a time. Creates and deletes of a burst must not wait for threads. A launch of a large
# slice takes up to a minute, so many launches run at once. A stop takes as long as its `grace`, up to half an hour, and
# no launch must wait for it.
LANES: Mapping[Lane, int] = {Lane.LIST: 4, Lane.CLOUD: 64, Lane.PROBE: 64, Lane.LAUNCH: 48, Lane.STOP: 48}
CLOSE_SECONDS = 4.0
CREDENTIAL_LIMIT = 1 << 20
_OWN_SECRET = re.compile(re.escape(RAY_TOKEN_PREFIX) + "[A-Z0-9_]{1,64}")


@dataclass(frozen=True, slots=True)
class Leaves:
    """Parts that a launcher may use. `scripts` is the launcher of fleets; `nudge` ends the pause of the loop."""

    options: Options
    store: SqliteStore
    clock: SystemClock
    remote: ParamikoRemote
    scripts: ScriptLauncher
    nudge: Callable[[], None]


MakeLauncher = Callable[[Leaves], Launcher]


@dataclass(slots=True)
class Runtime:
    """The engine and its adapters. `close` it, or use it as a context manager."""

    options: Options
    store: SqliteStore
    clock: SystemClock
    executor: ThreadExecutor
    cloud: GoogleCloud
    remote: ParamikoRemote
    launcher: Launcher
    engine: Engine
    gate: ContextGate | None
    neighbours: Neighbours
    find_project: Callable[[], str]
    """Project for fleets that name none. Raises: ConfigError: nothing names one."""
    private: Private
    secrets: Callable[[str], str | None] | None
    """As `secrets_of`; None for a command without a daemon, whose environment is not the daemon's."""

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settle(self, seconds: float) -> bool:
        """Begin no more effects, and let those in flight end and be remembered, for *seconds* at most."""
        self.engine.hold()
        until = time.monotonic() + seconds
        while not self.engine.is_idle() and (left := until - time.monotonic()) > 0:
            self.executor.sleep(timedelta(seconds=min(left, self.engine.step(), 0.2)))
        return self.engine.is_idle()

    def close(self) -> bool:
        """Return within about CLOSE_SECONDS; False: some threads still run, and end with the process."""
        try:
            if self.gate is not None:
                self.gate.close(CLOSE_SECONDS / 4)
            ended = self.executor.close(timedelta(seconds=CLOSE_SECONDS / 2))
            # Threads of SSH end when their sockets close; one that hangs must keep neither the lock nor the process.
            closing = threading.Thread(target=self._close_leaves, name="tpucare-close", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS / 2)
            return ended and not closing.is_alive()
        finally:
            self.store.close()

    def _close_leaves(self) -> None:
        self.remote.close()
        self.cloud.close()


def assemble(
    options: Options,
    env: Mapping[str, str],
    *,
    listen: Callable[[Event], None] | None = None,
    alone: bool = False,
    launcher: MakeLauncher = lambda leaves: leaves.scripts,
    creation: AbstractContextManager[Any] | None = None,
) -> Runtime:
    """
    Take the lock of the store `options.store` in `options.state` and build the engine on it.

    listen: called with every event, after it is on disk
    alone: for a command without a daemon: begin no effects, and connect to the cloud at the first call only
    launcher: makes the Launcher; default: the launcher of fleets
    creation: held while a node is being created; entering it may block
    Raises: StoreLocked, StoreError: the store cannot be opened; ConfigError: credentials, endpoint or key.
    """
    clock = SystemClock()
    store = open_store(
        options.state, machine_id=machine_id(), instance_id=instance_id(), now=clock.now(), name=options.store
    )
    try:
        cloud = cast("GoogleCloud", _LaterCloud(options, clock)) if alone else _connect(options, clock)
        key = load_or_make_key(options.key)
        executor = ThreadExecutor(LANES)
        remote = remote_of(options, key, nudge=executor.nudge)
        keeper = LogKeeper(options.logs)
        point = failpoint_of(env)
        reached = remote if point is None else point.remote(remote)
        private, secrets = options.private(env), secrets_of(env, options.secrets)
        scripts = ScriptLauncher(reached, state_dir=options.state, secrets=secrets, logs=keeper, private=private)
        made = launcher(Leaves(options, store, clock, remote, scripts, executor.nudge))
        ports = Ports(cloud, made, store.owner, f"{options.ssh_user}:{key.public}")
        kept: Store = store
        if point is not None:
            ports = dataclasses.replace(ports, cloud=point.port(ports.cloud), launcher=point.port(ports.launcher))
            kept = point.store(store)
        neighbours = Neighbours(options, clock.monotonic)
        settings = settings_of(options, neighbours)
        gate = ContextGate(creation, executor.nudge) if creation is not None else None
        knowledge = MarketFiles(options.state, options.store)
        engine = Engine(ports, kept, clock, executor, random_source(), settings, listen, gate, knowledge)
        if alone:
            engine.hold()
    except BaseException:
        store.close()
        raise
    finder = project_finder(options, env)
    return Runtime(
        options,
        store,
        clock,
        executor,
        cloud,
        remote,
        made,
        engine,
        gate,
        neighbours,
        finder,
        private,
        None if alone else secrets,
    )


def _connect(options: Options, clock: SystemClock) -> GoogleCloud:
    # Costs 200 ms and 50 MB, which a command that only records a desired state is spared.
    from tpucare.adapters.google.client import connect

    return connect(options.endpoint or None, monotonic=clock.monotonic)


class _LaterCloud:
    """Connects at the first call: a desired state can be recorded without credentials or network."""

    def __init__(self, options: Options, clock: SystemClock) -> None:
        self._options, self._clock = options, clock
        self._guard = threading.Lock()
        self._cloud: GoogleCloud | None = None

    def __getattr__(self, name: str) -> Any:
        with self._guard:
            self._cloud = self._cloud or _connect(self._options, self._clock)
        return getattr(self._cloud, name)

    def close(self) -> None:
        if self._cloud is not None:
            self._cloud.close()


def remote_of(options: Options, key: LoginKey, *, nudge: Callable[[], None] = lambda: None) -> ParamikoRemote:
    """Reaches workers as *options* say; also for commands that use no engine."""
    return ParamikoRemote(key, user=options.ssh_user, pins=options.host_keys, nudge=nudge, port=options.ssh_port)


def settings_of(options: Options, neighbours: Neighbours | None = None) -> Settings:
    return Settings(
        poll=options.poll,
        fast_poll=min(options.fast_poll, options.poll),
        probe=options.probe,
        fast_probe=min(options.fast_probe, options.probe),
        creates_per_minute=options.creates_per_minute,
        budget=lambda project: SharedBudget(
            options.state, project, options.creates_per_minute, options.store, SystemClock().monotonic
        ),
        elsewhere=neighbours.care_for if neighbours is not None else None,
        sweep_queues=True,
    )


def secrets_of(env: Mapping[str, str], own: Path) -> Callable[[str], str | None]:
    """
    Values of secrets by name: a file in $CREDENTIALS_DIRECTORY (systemd), else the environment; None = not set.

    own: the folder of the secrets that tpucare makes itself, all of one kind of name; no other name is read from it
    """
    folder = env.get("CREDENTIALS_DIRECTORY", "")

    def value(name: str) -> str | None:
        if folder and "/" not in name and name not in ("", ".", ".."):
            try:
                with Path(folder, name).open("rb") as file:
                    return file.read(CREDENTIAL_LIMIT).decode("utf-8").rstrip("\r\n")
            except FileNotFoundError:
                pass
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"secret {name}: its file in the credentials folder cannot be read") from error
        if _OWN_SECRET.fullmatch(name):
            try:
                return read_private(own / name, CREDENTIAL_LIMIT).decode("ascii").strip()
            except FileNotFoundError:
                pass
            except (OSError, UnicodeDecodeError) as error:
                why = (error.strerror if isinstance(error, OSError) else "") or "is no text"
                raise ConfigError(f"secret {name}: {own / name}: cannot be read: {why}") from error
        return env.get(name)

    return value


def project_finder(options: Options, env: Mapping[str, str]) -> Callable[[], str]:
    """A function that finds the default project, once: without a network, credentials take seconds to fail."""
    found: list[str] = []

    def find() -> str:
        if not found:
            from tpucare.adapters.google.client import find_project

            found.append(find_project(options.project or None, env))
        return found[0]

    return find
