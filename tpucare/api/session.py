"""
Access to nodes from a process without an engine: options, project, cloud and SSH, opened when first used.

`current` returns the one `Session` per environment and process, so that a thousand calls share a connection. Calls
inside a `start_fn` use their `Attempt` instead (see `hosts`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.state import folder as state_folder
from tpucare.api.attempt import NO_DEADLINE
from tpucare.model.errors import ConfigError, NeedsPerson, NodeGone, RemoteError, WorkerSilent
from tpucare.model.resources import Node, NodeState, Ran, Worker, workers_of
from tpucare.model.text import hint, shown
from tpucare.service.assembly import project_finder, remote_of
from tpucare.service.options import Options, resolve

if TYPE_CHECKING:
    from tpucare.adapters.google.client import GoogleCloud
    from tpucare.adapters.ssh.remote import ParamikoRemote

T = TypeVar("T")
Described = tuple[Node, dict[str, Any]]

# Scripts list in loops without a pause, and reads have a quota of their own.
LISTING_SECONDS = 1.0
# A command may take days. Its connection is tested in between, since a VM that vanished closes no connection.
ASK_EVERY_SECONDS = 30.0
ASK_DEADLINE = timedelta(seconds=20)
OUTPUT_LIMIT = 16 << 20
# Beside the 30 s of the port: the time of a file of that size on a slow line.
BYTES_PER_SECOND = 256 << 10

UNREACHABLE = frozenset((NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING))

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+(-[a-z0-9]+)+")


def check_name(what: str, name: str) -> None:
    """Raises: ConfigError: no node and no slot can have that name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {shown(name)} is not a name of a TPU: lowercase letters, digits and '-', a letter first, "
            "63 characters at most"
        )


def check_zone(zone: str) -> None:
    """Raises: ConfigError: it has not the form of a zone."""
    if not isinstance(zone, str) or not _ZONE.fullmatch(zone):
        raise ConfigError(f"zone {shown(zone)} is not of the form us-central1-a{_near(zone)}")


class Session:
    """Thread-safe. `close` closes its connections; calls in flight then fail."""

    def __init__(
        self,
        options: Options,
        env: Mapping[str, str],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        listing_seconds: float = LISTING_SECONDS,
    ) -> None:
        self.options = options
        self._find_project = project_finder(options, env)
        self._monotonic = monotonic
        self._listing_seconds = listing_seconds
        self._lock = threading.RLock()
        self._listings: dict[str, tuple[float, list[Described]]] = {}
        self._opened: list[GoogleCloud | ParamikoRemote] = []
        self._stores: dict[str, threading.Lock] = {}

    @property
    def project(self) -> str:
        """Raises: ConfigError: no project is named."""
        with self._lock:
            return self._find_project()

    @property
    def owner(self) -> str:
        """The owner label of our nodes; empty while this state folder never had a store."""
        return state_folder.read_owner(self.options.state) or ""

    @property
    def cloud(self) -> GoogleCloud:
        """Raises: ConfigError: no credentials."""
        with self._lock:
            return self._cloud

    @property
    def remote(self) -> ParamikoRemote:
        with self._lock:
            return self._remote

    @cached_property
    def _cloud(self) -> GoogleCloud:
        # The import costs 200 ms and 50 MB.
        from tpucare.adapters.google.client import connect

        cloud = connect(self.options.endpoint or None, monotonic=self._monotonic)
        self._opened.append(cloud)
        return cloud

    @cached_property
    def _remote(self) -> ParamikoRemote:
        state_folder.prepare_folder(self.options.state)
        remote = remote_of(self.options, load_or_make_key(self.options.key))
        self._opened.append(remote)
        return remote

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, []
        for one in opened:
            one.close()

    def alone_with(self, store: str) -> threading.Lock:
        """A lock to hold while that store is open: two threads of one process would refuse each other."""
        with self._lock:
            return self._stores.setdefault(store, threading.Lock())

    # --- nodes -------------------------------------------------------------------------------------------------------

    def nodes(self, zone: str, *, fresh: bool = False) -> list[Described]:
        """
        All nodes of *zone*, listed within the last second; `fresh`: listed now.

        Raises: ConfigError: no such zone or project, or no permission to list it; CloudError.
        """
        check_zone(zone)
        with self._lock:
            at, known = self._listings.get(zone, (0.0, []))
            if fresh or zone not in self._listings or self._monotonic() - at > self._listing_seconds:
                known = self._list(zone)
                self._listings[zone] = (self._monotonic(), known)
        return known

    def _list(self, zone: str) -> list[Described]:
        project = self.project
        try:
            return self.cloud.list_zone(project, zone)
        except (NeedsPerson, NodeGone) as error:
            # The advice of the error itself is about fleet files.
            raise ConfigError(
                f"zone {zone} of project {project} cannot be seen{_near(zone)}: {error.message} -> check the "
                "zone's name, the project, and what the credentials may do there"
            ) from error

    def forget_listings(self) -> None:
        """Drop the listings: a node was changed."""
        with self._lock:
            self._listings.clear()

    def slot_of(self, node: Node) -> str:
        """The slot that one of our nodes belongs to; the name of any other node."""
        return node.slot if node.slot and node.owner == self.owner else node.name

    def named(self, host: str, zone: str, *, fresh: bool = False) -> list[Node]:
        """Nodes that *host* may mean, oldest first: those of the slot of that name, and the node of that name."""
        check_name("host", host)
        found = [node for node, _ in self.nodes(zone, fresh=fresh) if host in (node.name, self.slot_of(node))]
        return sorted(found, key=lambda node: node.create_time)

    def find(self, host: str, zone: str) -> Node:
        """The newest living node of *host*. Raises: NodeGone: there is none."""
        found = self.named(host, zone)
        living = [node for node in found if node.state not in UNREACHABLE]
        if living:
            return living[-1]
        if found:
            raise NodeGone(f"{host}: its node {found[-1].name} is {found[-1].state.name}")
        raise NodeGone(f"{host}: no TPU of that name in zone {zone} of project {self.project}{self._elsewhere(host)}")

    def _elsewhere(self, host: str) -> str:
        """The zones where *host* is, or the nearest name, for the end of an error."""
        with self._lock:
            nodes = self.cloud.list_nodes(self.project).nodes.values()
        zones = sorted({node.key.zone for node in nodes if host in (node.name, self.slot_of(node))})
        return f"; it is in {', '.join(zones)}" if zones else hint(host, {self.slot_of(node) for node in nodes})

    def reach(self, host: str, zone: str) -> NodeReach:
        """Raises: NodeGone: no such node; WorkerSilent: it lists no workers yet."""
        node = self.find(host, zone)
        external = all(endpoint.external for endpoint in node.endpoints)
        workers = workers_of(node, external=external, expected=1)
        if workers is None:
            self.forget_listings()
            raise WorkerSilent(f"{node.name} lists no workers yet: it is {node.state.name}")
        return NodeReach(self, workers)


class NodeReach:
    """Access to the workers of one node, whatever becomes of its slot; as `Attempt`, outside of a `start_fn`."""

    def __init__(self, session: Session, workers: tuple[Worker, ...]) -> None:
        self.workers = workers
        self._session = session

    def run(self, worker: int, command: str, *, limit: int = OUTPUT_LIMIT) -> Ran:
        """Run *command* with bash and wait for its end, without a limit. Raises: RemoteError."""
        remote, target, text = self._session.remote, self.workers[worker], f"exec bash -c {shlex.quote(command)}"
        call = in_background(lambda: remote.run(target, text, deadline=NO_DEADLINE, limit=limit))
        while True:
            try:
                return call.result(ASK_EVERY_SECONDS)
            except TimeoutError:
                # This closes a dead connection, which ends the call.
                with contextlib.suppress(RemoteError):
                    remote.run(target, "true", deadline=ASK_DEADLINE)

    def put(self, worker: int, path: str, content: bytes, mode: int) -> None:
        """Write a file, whole or not at all. Raises: RemoteError."""
        deadline = timedelta(seconds=30 + len(content) / BYTES_PER_SECOND)
        self._session.remote.put(self.workers[worker], path, content, mode, deadline=deadline)


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run *call* on a daemon thread, so that Ctrl-C and the end of the process need not wait for it."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="tpucare-host-call", daemon=True).start()
    return future


class _Sessions:
    """Sessions of this process by its environment. Guarded by a lock; a forked child starts without any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[object, Session] = {}

    def current(self, env: Mapping[str, str]) -> Session:
        options = resolve(env)
        key = (options, *(env.get(name) for name in ("GOOGLE_CLOUD_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS")))
        with self._lock:
            if key not in self._known:
                self._known[key] = Session(options, dict(env))
            return self._known[key]

    def close(self) -> None:
        with self._lock:
            known, self._known = self._known, {}
        for session in known.values():
            session.close()

    def begin_anew(self) -> None:
        # The threads of the parent are not here: its connections are dead, and its locks may be held for ever.
        self._lock, self._known = threading.Lock(), {}


_SESSIONS = _Sessions()
atexit.register(_SESSIONS.close)
os.register_at_fork(after_in_child=_SESSIONS.begin_anew)


def current() -> Session:
    """The session of this process for its environment as it is now. Raises: ConfigError."""
    return _SESSIONS.current(os.environ)


def close() -> None:
    """Close every session of this process; the next call opens another."""
    _SESSIONS.close()


def _near(zone: object) -> str:
    from tpucare.model.accelerators import known_zones

    zones: Iterable[str] = known_zones()
    return hint(zone, zones) if isinstance(zone, str) and zone not in zones else ""
