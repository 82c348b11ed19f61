"""
The protocols between the engine and the world. An adapter implements one; tests run the real engine on stand-ins that
pass the same contract tests.

Methods block and are called on the Executor's threads, unless they say that they are called on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol, TypeVar

from tpucare.model.markets import Experience
from tpucare.model.memory import FleetRecord, Memory
from tpucare.model.resources import (
    Event,
    Listing,
    Node,
    NodeKey,
    NodeRequest,
    Operation,
    QueuedRequest,
    QueuedResource,
    QueueListing,
    Ran,
    Worker,
)
from tpucare.model.runs import LaunchOrder, LaunchResult, NodeReport, NoticeOrder, ProbeOrder, StopOrder, StopResult

T = TypeVar("T")


class Cloud(Protocol):
    """
    The Cloud TPU API, translated into model records. Every method raises `CloudError`s and nothing else.

    Methods are thread-safe but for `list_nodes`, of which one call per project is under way at a time. A key given to
    a method of queued resources is that of the resource with this name.
    """

    def list_nodes(self, project: str) -> Listing:
        """All nodes of all zones and owners, with the changes since the last listing that this object returned."""
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
        """Ask to delete the node that has this name now. Returning means accepted, not gone."""
        ...

    def add_ssh_key(self, key: NodeKey, line: str) -> None:
        """Append one `user:ssh-… key` line to the node's metadata: read, append, write."""
        ...

    def add_labels(self, key: NodeKey, labels: Mapping[str, str]) -> None:
        """Merge *labels* into the node's labels: read, merge, write."""
        ...

    def host_keys(self, key: NodeKey) -> Mapping[int, tuple[str, ...]]:
        """Host keys that the guest agent published, per worker number, as `type base64`; may be incomplete or empty."""
        ...

    def list_queued(self, project: str) -> QueueListing:
        """All queued resources of all zones and owners."""
        ...

    def get_queued(self, key: NodeKey) -> QueuedResource:
        """Raises: NodeGone: the API says NOT_FOUND, which is the only proof of absence."""
        ...

    def create_queued(self, request: QueuedRequest) -> None:
        """
        Ask for a node that is made once there is capacity. Returning means accepted: it says nothing about capacity.

        A repeated call with the same request id changes nothing. AlreadyExists may be spurious: `get_queued` decides.
        """
        ...

    def delete_queued(self, key: NodeKey) -> None:
        """Ask to delete it together with its nodes (force). Returning means accepted, not gone."""
        ...


class Remote(Protocol):
    """
    SSH to workers: kept connections, pinned host keys, commands, files. Thread-safe.

    Raises: WorkerSilent, AuthRefused, HostKeyChanged.
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

        `limit`: bytes per stream; the rest is dropped. After a dropped connection (WorkerSilent) the command may or may
        not have run.
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
        """Close all connections to the node and stop watching its ports. Its pinned host keys stay."""
        ...

    def forget_node(self, key: NodeKey) -> None:
        """`disconnect`, and drop the pinned host keys of a node that is proven gone."""
        ...

    def repin(self, worker: Worker, host_keys: Iterable[str]) -> bool:
        """
        Replace the pinned host key of *worker* by those of guest attributes (`type base64`). False: none of them is a
        readable host key, and the pinned one stays.
        """
        ...

    def hints(self) -> frozenset[NodeKey]:
        """Nodes with a dropped connection or a newly open port since the last call. Never blocks."""
        ...


class Launcher(Protocol):
    """Runs on workers: push, start, probe, stop. An unreachable worker is an entry in the result, not an exception."""

    def probe(self, order: ProbeOrder) -> NodeReport: ...

    def launch(self, order: LaunchOrder) -> LaunchResult: ...

    def stop(self, order: StopOrder) -> StopResult: ...

    def notice(self, order: NoticeOrder) -> None: ...

    def pin_host_keys(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        """Pin *keys* (by worker number, from guest attributes), over earlier pins. Returns the numbers pinned."""
        ...

    def watch_workers(self, workers: Sequence[Worker]) -> None:
        """Watch the SSH ports of *workers*; `hints` names the node once one opens. Never blocks; engine's thread."""
        ...

    def disconnect(self, key: NodeKey) -> None:
        """
        Close all connections to a node that is to be deleted or is no longer ours; its pinned host keys stay, since it
        may live. Never blocks; engine's thread.
        """
        ...

    def forget_node(self, key: NodeKey) -> None:
        """Drop all state of a node that GetNode reported NOT_FOUND. Never blocks; engine's thread."""
        ...

    def hints(self) -> frozenset[NodeKey]:
        """Nodes worth a probe now. Never blocks; engine's thread."""
        ...


class Store(Protocol):
    """
    Memories, fleets and events, in one file. Every write is one transaction, durable when it returns.

    Raises: StoreFull, StoreCorrupt.
    """

    @property
    def owner(self) -> str:
        """Label-safe id of this state folder."""
        ...

    @property
    def lost(self) -> bool:
        """The state folder is older than this store, so a store was lost; until a person confirms."""
        ...

    @property
    def old(self) -> bool:
        """Its last heartbeat is old: it may be a backup that does not know newer nodes."""
        ...

    def mark_current(self, now: datetime) -> None:
        """Write the heartbeat: the store is complete and cared for at *now*."""
        ...

    def confirm(self) -> None:
        """A person confirmed that the listed nodes are all nodes: `lost` and `old` end."""
        ...

    def memories(self) -> dict[str, Memory]:
        """Memory of every slot, by slot name."""
        ...

    def save(self, changes: Mapping[str, Memory], events: Sequence[Event] = ()) -> None:
        """Write memories by slot, and the events about them, in one transaction."""
        ...

    def fleets(self) -> dict[str, FleetRecord]:
        """Fleets as last accepted, ended ones included, by name."""
        ...

    def save_fleet(self, record: FleetRecord) -> None: ...

    def events(self, *, slot: str = "", after: int = 0, limit: int = 1000) -> list[tuple[int, Event]]:
        """Events with their numbers, oldest first; `slot` may be a fleet's name."""
        ...


class MarketKnowledge(Protocol):
    """
    What the processes of a state folder learned of markets: by project, then by market. Engine's thread; never raises.

    It is advice: what is lost of it costs no node.
    """

    def own(self) -> Mapping[str, Mapping[str, Experience]]:
        """What earlier processes of this store learned."""
        ...

    def of_others(self) -> Sequence[Mapping[str, Mapping[str, Experience]]]:
        """What each other store learned."""
        ...

    def save(self, markets: Mapping[str, Mapping[str, Experience]]) -> None:
        """Keep what this store learned, in place of what it kept before."""
        ...


class Gate(Protocol):
    """A user's semaphore that limits how many slots create at once. Never blocks; engine's thread."""

    def acquire(self, slot: str) -> bool:
        """
        True: *slot* holds it. False: it is being acquired; `changed_slots` names *slot* later (with a nudge).

        Raises: the error of acquiring it, once.
        """
        ...

    def release(self, slot: str) -> None:
        """Release it, or stop waiting for it."""
        ...

    def changed_slots(self) -> frozenset[str]:
        """Slots that acquired it, or failed to, since the last call."""
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
    """Lanes have threads of their own: an effect waits only for effects of its lane."""

    LIST = "list"
    CLOUD = "cloud"
    PROBE = "probe"
    LAUNCH = "launch"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Finished:
    """An effect that ended, with its `result` or its `error`."""

    tag: Hashable
    result: object = None
    error: Exception | None = None


class Executor(Protocol):
    """Runs effects beside the deciding thread and hands their ends back to it."""

    def submit(self, lane: Lane, tag: Hashable, effect: Callable[[], object]) -> None: ...

    def finished(self) -> list[Finished]:
        """Effects that ended since the last call. Never blocks."""
        ...

    def sleep(self, timeout: timedelta) -> None:
        """Return when *timeout* has passed, an effect ended, or `nudge` was called."""
        ...

    def nudge(self) -> None:
        """Make the current or next `sleep` return at once. From any thread."""
        ...
