"""
The protocols between the loop and the world. A leaf implements one; tests run the real engine on stand-ins that pass
the same contract tests.

All effects block and are called on the Executor's threads; what the engine calls on its own thread says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol, TypeVar

from tpucare.model.memory import FleetRecord, Memory
from tpucare.model.resources import Event, Listing, Node, NodeKey, NodeRequest, Operation, Ran, Worker
from tpucare.model.runs import LaunchOrder, LaunchResult, NodeReport, NoticeOrder, ProbeOrder, StopOrder, StopResult

T = TypeVar("T")


class Cloud(Protocol):
    """
    The Cloud TPU API, translated into model records. Every method raises `CloudError`s and nothing else.

    Methods are thread-safe but for `list_nodes`, of which one call per project is under way at a time.
    """

    def list_nodes(self, project: str) -> Listing:
        """All nodes of all zones, whoever owns them, with what changed since the last listing that this object gave."""
        ...

    def get_node(self, key: NodeKey) -> Node:
        """Raises: NodeGone: the API says NOT_FOUND, which is the only proof of absence."""
        ...

    def create_node(self, request: NodeRequest) -> Operation:
        """Returns the operation at once; a stockout arrives in the operation, a quota error from the call."""
        ...

    def get_operation(self, name: str) -> Operation:
        """Raises: NodeGone: operations are forgotten after some days."""
        ...

    def delete_node(self, key: NodeKey) -> None:
        """Ask for the deletion of whatever bears that name now. Returning means accepted, not gone."""
        ...

    def add_ssh_key(self, key: NodeKey, line: str) -> None:
        """Append one `user:ssh-… key` line to the node's metadata: read, append, write."""
        ...

    def add_labels(self, key: NodeKey, labels: Mapping[str, str]) -> None:
        """Write *labels* over those the node has: read, merge, write."""
        ...

    def host_keys(self, key: NodeKey) -> Mapping[int, tuple[str, ...]]:
        """Host keys that the guest agent published, per worker number, as `type base64`; may be incomplete or empty."""
        ...


class Remote(Protocol):
    """
    SSH to workers: kept connections, pinned host keys, commands, files. Thread-safe.

    Raises: WorkerSilent, AuthRefused, HostKeyChanged, as the worker gives reason.
    """

    def run(
        self,
        worker: Worker,
        command: str,
        *,
        stdin: bytes = b"",
        deadline: timedelta = timedelta(seconds=10),
        limit: int = 1 << 20,
    ) -> Ran:
        """
        Run *command* in the login user's shell and wait for its end, at most *deadline* in all (connecting included).

        `limit` is in bytes per stream; what comes after it is dropped. A dropped connection is WorkerSilent:
        nothing is known about the command.
        """
        ...

    def put(
        self, worker: Worker, path: str, content: bytes, mode: int, *, deadline: timedelta = timedelta(seconds=30)
    ) -> None:
        """
        Write a file of *mode* over SFTP: a temporary name first, then a rename, so that no half file is ever seen.

        `path` is relative to the login user's home. Missing folders are an error (WorkerSilent does not cover it:
        CommandFailed).
        """
        ...

    def each(self, workers: Sequence[Worker], call: Callable[[Worker], T]) -> list[T | Exception]:
        """Call *call* for all workers in parallel; shape: one result or RemoteError per worker, in order."""
        ...

    def watch_ports(self, workers: Iterable[Worker]) -> None:
        """Try a TCP connect every 0.2 s until each listens; then its node's key appears once in `hints`."""
        ...

    def disconnect(self, key: NodeKey) -> None:
        """Close what is open to a node; knocking ends too. Its pinned host keys stay."""
        ...

    def forget_node(self, key: NodeKey) -> None:
        """The node is proven gone: `disconnect`, and drop its pinned host keys."""
        ...

    def repin(self, worker: Worker, host_keys: Iterable[str]) -> bool:
        """
        Replace the pinned host key of *worker* by those that guest attributes vouch for (`type base64`). False: none
        of them can be read as a host key, and what was pinned stays.
        """
        ...

    def hints(self) -> frozenset[NodeKey]:
        """Nodes of which a connection dropped or a worker began to listen since the last call. Never blocks."""
        ...


class Launcher(Protocol):
    """Runs on workers: push, start, probe, stop. A worker out of reach is part of the answer, not an error."""

    def probe(self, order: ProbeOrder) -> NodeReport: ...

    def launch(self, order: LaunchOrder) -> LaunchResult: ...

    def stop(self, order: StopOrder) -> StopResult: ...

    def notice(self, order: NoticeOrder) -> None: ...

    def pin_host_keys(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        """Host keys as guest attributes give them: pin, or re-pin, those workers. Returns the numbers of these."""
        ...

    def watch_workers(self, workers: Sequence[Worker]) -> None:
        """These workers will begin to answer soon; `hints` tells when. Never blocks; engine's thread."""
        ...

    def disconnect(self, key: NodeKey) -> None:
        """
        Nobody asks its workers any more, for it is to be deleted or is no longer ours. Whom its workers were is
        remembered: it may live. Never blocks; engine's thread.
        """
        ...

    def forget_node(self, key: NodeKey) -> None:
        """The API said NOT_FOUND of the node: nothing of it is kept. Never blocks; engine's thread."""
        ...

    def hints(self) -> frozenset[NodeKey]:
        """Nodes worth a probe now. Never blocks; engine's thread."""
        ...


class Store(Protocol):
    """
    What must be remembered, in one file. Every write is one transaction, durable when it returns.

    Raises: StoreFull, StoreCorrupt.
    """

    @property
    def owner(self) -> str:
        """Label-safe id of this state folder."""
        ...

    @property
    def lost(self) -> bool:
        """The owner is older than this store: something was lost, and nobody confirmed it yet."""
        ...

    @property
    def old(self) -> bool:
        """Nobody had it open for a while before it was opened: it may be a backup, and not know of newer nodes."""
        ...

    def mark_current(self, now: datetime) -> None:
        """It is cared for at that moment, and what it holds is what was done."""
        ...

    def confirm(self) -> None:
        """A person said that what is listed is all there is."""
        ...

    def memories(self) -> dict[str, Memory]:
        """Memory of every slot, by slot name."""
        ...

    def save(self, changes: Mapping[str, Memory], events: Sequence[Event] = ()) -> None:
        """Memory of some slots, and the events that tell of it, in one transaction."""
        ...

    def drop(self, slot: str) -> None:
        """Forget a slot that ended."""
        ...

    def fleets(self) -> dict[str, FleetRecord]:
        """Fleets as last accepted, ended ones included, by name."""
        ...

    def save_fleet(self, record: FleetRecord) -> None: ...

    def events(self, *, slot: str = "", after: int = 0, limit: int = 1000) -> list[tuple[int, Event]]:
        """Oldest first, with their numbers; `slot` may be a fleet's name."""
        ...


class Gate(Protocol):
    """Leave to create, one slot at a time or some: a user's semaphore. Never blocks; engine's thread."""

    def acquire(self, slot: str) -> bool:
        """
        True: *slot* holds it. False: it is being acquired elsewhere; `news` tells when, and the executor is nudged.

        Raises: whatever acquiring it raised, once.
        """
        ...

    def release(self, slot: str) -> None:
        """*slot* holds it no more, nor waits for it."""
        ...

    def changed_slots(self) -> frozenset[str]:
        """Slots that got it since the last call, or for which acquiring it failed."""
        ...


class Clock(Protocol):
    """The only source of time."""

    def now(self) -> datetime:
        """Wall time, aware, UTC; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since some start; never jumps, and counts the time that the machine was suspended."""
        ...


class Lane(StrEnum):
    """Effects of different lanes do not wait for each other's threads."""

    LIST = "list"
    CLOUD = "cloud"
    PROBE = "probe"
    LAUNCH = "launch"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Finished:
    """An effect that ended: exactly one of `result` and `error` tells how."""

    tag: Hashable
    result: object = None
    error: Exception | None = None


class Executor(Protocol):
    """Runs effects beside the deciding thread and hands their ends back to it."""

    def submit(self, lane: Lane, tag: Hashable, effect: Callable[[], object]) -> None: ...

    def finished(self) -> list[Finished]:
        """Everything that ended since the last call. Never blocks."""
        ...

    def sleep(self, timeout: timedelta) -> None:
        """Return when *timeout* has passed, an effect ended, or somebody nudged; the earliest of them."""
        ...

    def nudge(self) -> None:
        """Let the current or next `sleep` return at once. From any thread."""
        ...
