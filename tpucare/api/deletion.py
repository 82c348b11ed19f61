"""
The functions of the Python API that delete nodes.

Inside a `start_fn` the attempt's own node is deleted, and replaced. From anywhere else the slot is down afterwards.
Only nodes with our owner label and a fleet that a store of this state folder has known are deleted; the others are
named in one error, after everything else is done.

A process that holds the store of the slot is ordered to take the slot down. Without one, the lock of the store is taken
for a moment, the slot is stored as down with the intent of each delete, and its nodes are then deleted here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from tpucare.adapters.state.store import SqliteStore, open_store
from tpucare.adapters.system import SystemClock, instance_id, machine_id, random_source
from tpucare.api.attempt import Attempt, attempt_of
from tpucare.api.session import Session, check_name, check_zone, current, in_background
from tpucare.engine.effects import ChangedMeanwhile, delete_ours, delete_own_request
from tpucare.model.actions import Delete
from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import ConfigError, LostRace, NodeGone, StoreLocked, TpuCareError, Transient
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import CreateIntent, Memory, RequestIntent
from tpucare.model.resources import Event, Node, NodeKey, NodeState
from tpucare.planner import desired_state, remember
from tpucare.service.client import order_down
from tpucare.service.control_socket import Refused
from tpucare.service.stores import Stores, StoreSnapshot, store_of_node, store_of_slot

POLL_EVERY_SECONDS = 1.0
# The service may lose a delete that it accepted: it is repeated, with growing pauses.
DELETE_AGAIN_SECONDS = 60.0
# A create or a queued request without an answer has arrived by then, or never will.
LOST_CREATE_AFTER = timedelta(seconds=90)
# A process that has just taken the lock may not listen yet, and a command holds it for a moment.
BEGIN_SECONDS = 15.0


class NotDeleted(TpuCareError):
    """Nodes of that name exist and may not be deleted from here; the text names each, and why."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """
    The part of a deletion in one store: slots to take down, and listed nodes of ours.

    A process that holds the store deletes the nodes of those slots; other nodes are deleted one by one.
    """

    store: str
    slots: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()

    def with_more(self, other: Deletion) -> Deletion:
        slots = dict.fromkeys((*self.slots, *other.slots))
        return Deletion(self.store, tuple(slots), (*self.nodes, *other.nodes))


@dataclass(frozen=True, slots=True)
class _Left:
    """
    What to wait for: nodes whose deletion was requested, creates and queued requests that may still make a node.
    """

    nodes: tuple[NodeKey, ...] = ()
    creates: tuple[CreateIntent, ...] = ()
    requests: tuple[RequestIntent, ...] = ()


def delete_of_store(session: Session, deletion: Deletion, *, wait: bool) -> None:
    """
    Delete slots and nodes of one store. `wait`: return when none is left.

    Raises: NotDeleted: a process holds the store and takes no commands, or refuses this one; CloudError.
    """
    single_nodes = [node for node in deletion.nodes if node.slot not in deletion.slots]
    for node in single_nodes:
        delete(session, node)
    left = _take_down(session, deletion, wait=wait) if deletion.slots else _Left()
    if wait:
        for key in (*left.nodes, *(node.key for node in single_nodes)):
            await_gone(session, key)
        for intent in left.creates:
            _await_create(session, intent)
        for request in left.requests:
            _await_request(session, request)


def _take_down(session: Session, deletion: Deletion, *, wait: bool) -> _Left:
    """Take slots down by the process that holds their store, else here."""
    stores = Stores(session.options)
    try:
        done = order_down(
            stores.options_of(deletion.store),
            deletion.slots,
            lambda: _take_down_here(session, deletion),
            wait=wait,
            patience_seconds=BEGIN_SECONDS,
        )
    except StoreLocked as locked:
        pid = stores.holder(deletion.store)
        whose = f"process {pid}" if pid else "another process"
        why = f"{whose} cares for it and takes no commands: end it there"
        raise NotDeleted(f"{', '.join(deletion.slots)}: {why}") from locked
    except Refused as refusal:
        raise NotDeleted(f"{', '.join(deletion.slots)}: {refusal}") from refusal
    return done if isinstance(done, _Left) else _Left()


# --- here ------------------------------------------------------------------------------------------------------------


def _take_down_here(session: Session, deletion: Deletion) -> _Left:
    """Raises: StoreLocked: another process holds the store."""
    with session.alone_with(deletion.store):
        now = SystemClock().now()
        machine, instance = machine_id(), instance_id()
        with open_store(
            session.options.state, machine_id=machine, instance_id=instance, now=now, name=deletion.store
        ) as store:
            memories = store.memories()
            found = {
                slot: _nodes_of(session, deletion, slot, memories[slot]) for slot in deletion.slots if slot in memories
            }
            _write_down(store, memories, found)
    nodes = {node.key: node for those in found.values() for node in those}
    requests = [request for slot in found for request in memories[slot].requests]
    for request in requests:
        _delete_request(session, NodeKey(session.project, request.zone, request.name))
    for node in nodes.values():
        delete(session, node)
    names = {node.name for node in nodes.values()}
    creates = (intent for slot in found for intent in open_creates(memories[slot]) if intent.name not in names)
    return _Left(tuple(nodes), tuple(creates), tuple(requests))


def _nodes_of(session: Session, deletion: Deletion, slot: str, memory: Memory) -> list[Node]:
    """All our nodes of the slot, remembered or listed, in any zone, as the API shows them now."""
    keys = [node.key for node in deletion.nodes if node.slot == slot]
    keys += [NodeKey(session.project, past.zone, past.name) for past in memory.nodes]
    keys += [NodeKey(session.project, intent.zone, intent.name) for intent in memory.creates]
    found = []
    for key in dict.fromkeys(keys):
        with contextlib.suppress(NodeGone):
            node = session.cloud.get_node(key)
            if node.owner == session.owner:
                found.append(node)
    return found


def _write_down(store: SqliteStore, memories: dict[str, Memory], found: dict[str, list[Node]]) -> None:
    """Store the slots as down, with the intent of every delete, before the first delete is requested."""
    now, rng = SystemClock().now(), random_source()
    for slot, nodes in found.items():
        memory = desired_state.down(memories[slot])
        for node in nodes:
            memory = remember.intend(memory, _action(node), now, rng)
        store.save({slot: memory}, (Event(now, "down", f"{slot}: taken down while no process cared for it", slot),))


def open_creates(memory: Memory) -> list[CreateIntent]:
    """Creates that may still make a node."""
    return [intent for intent in memory.creates if intent.state is not CreateState.FAILED]


def _await_create(session: Session, intent: CreateIntent) -> None:
    """A create of the process that ended may make its node only now."""
    while not _is_settled(session, intent):
        time.sleep(POLL_EVERY_SECONDS)
    await_gone(session, NodeKey(session.project, intent.zone, intent.name))


def _delete_request(session: Session, key: NodeKey) -> None:
    """Request the deletion of a queued resource of ours and of its node; accepted, not gone, when this returns."""
    with contextlib.suppress(NodeGone, ChangedMeanwhile, LostRace):
        delete_own_request(key, session.cloud, session.owner)


def _await_request(session: Session, request: RequestIntent) -> None:
    """Return when the API says NOT_FOUND, or it is another's; repeats a delete that was lost."""
    key = NodeKey(session.project, request.zone, request.name)
    pause, again_at = DELETE_AGAIN_SECONDS, time.monotonic() + DELETE_AGAIN_SECONDS
    if not request.state.is_accepted:
        # It may come only now, as a create may.
        while not _is_late(request.asked_at):
            time.sleep(POLL_EVERY_SECONDS)
        again_at = time.monotonic()
    while True:
        with contextlib.suppress(Transient):
            try:
                if session.cloud.get_queued(key).owner != session.owner:
                    return
            except NodeGone:
                return
            if time.monotonic() >= again_at:
                _delete_request(session, key)
                again_at, pause = time.monotonic() + pause, pause * 2
        time.sleep(POLL_EVERY_SECONDS)


def _is_settled(session: Session, intent: CreateIntent) -> bool:
    if intent.state is not CreateState.RUNNING:
        return _is_late(intent.asked_at)
    try:
        return session.cloud.get_operation(intent.operation).done
    except Transient:
        return False
    except LostRace:
        return True


def _is_late(asked_at: datetime) -> bool:
    """A call of that instant without an answer has arrived, or never will."""
    return SystemClock().now() - asked_at > LOST_CREATE_AFTER


# --- one node --------------------------------------------------------------------------------------------------------


def delete(session: Session, node: Node) -> None:
    """
    Request the deletion of exactly that node, again if need be; accepted, not gone, when this returns.

    No error: the node is gone, is being deleted or created at this moment, or another node has its name.
    """
    with contextlib.suppress(NodeGone, ChangedMeanwhile, LostRace):
        delete_ours(_action(node), session.cloud, session.owner)
    session.forget_listings()


def await_gone(session: Session, key: NodeKey) -> None:
    """Return when the API says NOT_FOUND, or another node has that name; repeats a delete that was lost."""
    pause, again_at = DELETE_AGAIN_SECONDS, time.monotonic()
    first: Node | None = None
    while True:
        with contextlib.suppress(Transient):
            try:
                node = session.cloud.get_node(key)
            except NodeGone:
                return session.forget_listings()
            first = first or node
            if node.id != first.id or node.owner != session.owner:
                return session.forget_listings()
            if node.state is not NodeState.DELETING and time.monotonic() >= again_at:
                delete(session, node)
                again_at, pause = time.monotonic() + pause, pause * 2
        time.sleep(POLL_EVERY_SECONDS)


def _action(node: Node) -> Delete:
    return Delete(node.key, node.id, node.create_time, Cause.DOWN, "a person asked for it", Reason.ASKED)


# --- the functions that delete ----------------------------------------------------------------------------------------


__all__ = ["NotDeleted", "delete_all", "delete_one_tpu", "synchronous_deletion"]


def delete_one_tpu(prefix: str, host: str, zone: str | None = None, asynchronous: bool = True) -> None:
    """
    Delete every node of *host*, a slot or a node's name, in *zone*. Does nothing when there is none.

    prefix: a guard: nothing happens unless *host* contains it; "" guards nothing. Also `delete_one_tpu(host, zone)`.
    asynchronous: return when the deletion was requested; False: when nothing is left.
    Inside a `start_fn` the attempt's own node is deleted, and replaced. Elsewhere the slot is down from then on, until
    it is started again: a process that cares for it now is ordered to take it down.
    Raises: NotDeleted, NodeGone (the attempt is over), CloudError, StoreError, ConfigError.
    """
    if zone is None:
        prefix, host, zone = "", prefix, host
    _check(prefix, host, zone)
    if prefix not in host:
        return
    attempt = attempt_of(host)
    if attempt is not None:
        _delete_own(attempt, wait=not asynchronous)
    else:
        _delete_all(current(), [host], zone, wait=not asynchronous)


def synchronous_deletion(prefix: str, host: str, zone: str) -> None:
    """As `delete_one_tpu`, and return only when nothing of *host* is left."""
    delete_one_tpu(prefix, host, zone, asynchronous=False)


def delete_all(prefix: str, zone: str) -> None:
    """
    Delete every slot in *zone* whose name begins with *prefix*, and return when none of our nodes is left.

    Other nodes whose name begins so are left alone, and named in the error at the end.
    Raises: as `delete_one_tpu`.
    """
    _check(prefix, "any", zone)
    session = current()
    names = {session.slot_of(node) for node, _ in session.nodes(zone, fresh=True)}
    for store in _stores(session):
        names |= {slot for slot in store.memories if _has_nodes_in(session, store, slot, zone)}
    _delete_all(session, sorted(name for name in names if name.startswith(prefix)), zone, wait=True)


def _check(prefix: object, host: str, zone: str) -> None:
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix must be a text, not {type(prefix).__name__}")
    check_name("host", host)
    check_zone(zone)


def _delete_own(attempt: Attempt, *, wait: bool) -> None:
    if attempt.over:
        raise NodeGone(f"{attempt.node} (attempt {attempt.number} of {attempt.slot}): {attempt.why}")
    session = current()
    key = NodeKey(attempt.project, attempt.zone, attempt.node)
    with contextlib.suppress(NodeGone):
        node = session.cloud.get_node(key)
        if node.id == attempt.workers[0].node_id:
            delete(session, node)
            if wait:
                await_gone(session, key)


def _delete_all(session: Session, hosts: Iterable[str], zone: str, *, wait: bool) -> None:
    stores = _stores(session)
    refused: list[str] = []
    deletions: dict[str, Deletion] = {}
    for host in hosts:
        for deletion in _deletions(session, stores, host, zone, refused):
            known = deletions.get(deletion.store)
            deletions[deletion.store] = known.with_more(deletion) if known else deletion
    calls = [in_background(partial(delete_of_store, session, deletion, wait=wait)) for deletion in deletions.values()]
    errors = [error for call in calls if (error := call.exception()) is not None]
    for error in errors:
        if not isinstance(error, NotDeleted):
            raise error
    if lines := [*map(str, errors), *refused]:
        raise NotDeleted("; ".join(lines))


def _stores(session: Session) -> tuple[StoreSnapshot, ...]:
    """Stores that may know a node of this project: scripts of two projects may have hosts of the same name."""
    found = Stores(session.options).read_all()
    return tuple(store for store in found if not store.is_of_another_project(session.project))


def _deletions(
    session: Session, stores: tuple[StoreSnapshot, ...], host: str, zone: str, refused: list[str]
) -> list[Deletion]:
    """Slots and nodes that *host* means, by store; for nodes that may not be deleted a line is added to *refused*."""
    nodes = session.named(host, zone, fresh=True)
    store = store_of_slot(stores, host)
    deletions = []
    if store is not None and (nodes or _has_nodes_in(session, store, host, zone)):
        deletions.append(Deletion(store.name, slots=(host,)))
    for node in nodes:
        known = store_of_node(stores, node)
        if not session.owner or node.owner != session.owner:
            refused.append(f"{node.name} is not ours: delete it with gcloud, or `tpucare adopt-node` it first")
        elif known is None:
            refused.append(f"{node.name} is of a fleet that this state folder never knew: `tpucare gc`")
        elif host == node.name and node.slot in known.memories and _is_newest(session, node):
            deletions.append(Deletion(known.name, slots=(node.slot,), nodes=(node,)))
        else:
            deletions.append(Deletion(known.name, nodes=(node,)))
    return deletions


def _is_newest(session: Session, node: Node) -> bool:
    """Whether its slot has no newer node, which must not be deleted by the name of an older one."""
    others = [other for other in session.named(node.slot, node.key.zone) if other.owner == node.owner]
    return all(other.create_time <= node.create_time for other in others)


def _has_nodes_in(session: Session, store: StoreSnapshot, slot: str, zone: str) -> bool:
    """Whether that slot has, or may get, a node in *zone*. Without a process that holds the store it gets none."""
    zones = _zones(store.memories[slot])
    return zone in zones or (not zones and Stores(session.options).holder(store.name) is not None)


def _zones(memory: Memory) -> set[str]:
    zones = {node.zone for node in memory.ours} | {intent.zone for intent in open_creates(memory)}
    return zones | {request.zone for request in memory.requests}
