"""
The functions of the Python API that delete, and how a deletion is carried out from a process that cares for nothing.

Inside a `start_fn` the attempt's own node is deleted, and its caretaker makes the next one. From anywhere else a
deletion is meant for good, and the slot is down after it. Nothing is deleted that does not bear our owner label and a
fleet that a store of this state folder has known; what may not be is named in one error, after everything else is
done.

Where a process cares for the slot now, it is ordered to take it down, and does so in its own way. Where none does, the
store's lock is taken for a moment, the slot is written down as down, with the intent of each delete, and then deleted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from tpucare.adapters.state.store import SqliteStore, open_store
from tpucare.adapters.system import SystemClock, instance_id, machine_id, random_source
from tpucare.api.attempt import Attempt, attempt_of
from tpucare.api.session import Session, check_name, check_zone, current, in_background
from tpucare.engine.effects import ChangedMeanwhile, delete_ours
from tpucare.model.actions import Delete
from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import ConfigError, LostRace, NodeGone, StoreLocked, TpuCareError, Transient
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import CreateIntent, Memory
from tpucare.model.resources import Event, Node, NodeKey, NodeState
from tpucare.planner import desired_state as wishes
from tpucare.planner import remember
from tpucare.service.client import order_down
from tpucare.service.control_socket import Refused
from tpucare.service.stores import Stores, StoreSnapshot, store_of_node, store_of_slot

LOOK_EVERY_SECONDS = 1.0
# A delete that was accepted may be forgotten by the service: say it again, ever more seldom.
DELETE_AGAIN_SECONDS = 60.0
# A create whose answer nobody heard has arrived by then, or never will.
LOST_CREATE_AFTER = timedelta(seconds=90)
# Whoever has just taken the lock may not listen yet, and a command holds it for a moment.
BEGIN_SECONDS = 15.0


class NotDeleted(TpuCareError):
    """Something of that name is there and may not be deleted from here; the text names all of it, and why."""


@dataclass(frozen=True, slots=True)
class Order:
    """
    What one store has to do with it: slots to take down, and the listed nodes of ours that this is about.

    Nodes of those slots are their caretaker's, if there is one; others are deleted one by one.
    """

    store: str
    slots: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()

    def with_more(self, other: Order) -> Order:
        slots = dict.fromkeys((*self.slots, *other.slots))
        return Order(self.store, tuple(slots), (*self.nodes, *other.nodes))


@dataclass(frozen=True, slots=True)
class _Left:
    """What is to be awaited: nodes whose deletion was asked for, and creates that may still come to be."""

    nodes: tuple[NodeKey, ...] = ()
    creates: tuple[CreateIntent, ...] = ()


def carry_out(session: Session, order: Order, *, wait: bool) -> None:
    """
    `wait`: until nothing of it is left.

    Raises: NotDeleted: somebody cares for it, and takes no orders; what the caretaker has against it; CloudError.
    """
    strays = [node for node in order.nodes if node.slot not in order.slots]
    for node in strays:
        delete(session, node)
    left = _take_down(session, order, wait=wait) if order.slots else _Left()
    if wait:
        for key in (*left.nodes, *(node.key for node in strays)):
            await_gone(session, key)
        for intent in left.creates:
            _await_create(session, intent)


def _take_down(session: Session, order: Order, *, wait: bool) -> _Left:
    """By the process that cares for the slots, else here. What is left to be awaited then."""
    stores = Stores(session.options)
    try:
        done = order_down(
            stores.options_of(order.store),
            order.slots,
            lambda: _here(session, order),
            wait=wait,
            patience_seconds=BEGIN_SECONDS,
        )
    except StoreLocked as locked:
        pid = stores.holder(order.store)
        whose = f"process {pid}" if pid else "another process"
        why = f"{whose} cares for it and takes no orders: end it there"
        raise NotDeleted(f"{', '.join(order.slots)}: {why}") from locked
    except Refused as refusal:
        raise NotDeleted(f"{', '.join(order.slots)}: {refusal}") from refusal
    return done if isinstance(done, _Left) else _Left()


# --- here ------------------------------------------------------------------------------------------------------------


def _here(session: Session, order: Order) -> _Left:
    """Raises: StoreLocked: somebody cares for it."""
    with session.alone_with(order.store):
        now = SystemClock().now()
        machine, instance = machine_id(), instance_id()
        with open_store(
            session.options.state, machine_id=machine, instance_id=instance, now=now, name=order.store
        ) as store:
            memories = store.memories()
            found = {slot: _nodes_of(session, order, slot, memories[slot]) for slot in order.slots if slot in memories}
            _write_down(store, memories, found)
    nodes = {node.key: node for those in found.values() for node in those}
    for node in nodes.values():
        delete(session, node)
    names = {node.name for node in nodes.values()}
    creates = (intent for slot in found for intent in open_creates(memories[slot]) if intent.name not in names)
    return _Left(tuple(nodes), tuple(creates))


def _nodes_of(session: Session, order: Order, slot: str, memory: Memory) -> list[Node]:
    """Everything of ours that the slot has, remembered or listed, wherever that is, as the API shows it now."""
    keys = [node.key for node in order.nodes if node.slot == slot]
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
    """The wish, and the intent of every delete, before the first of them is asked for."""
    now, rng = SystemClock().now(), random_source()
    for slot, nodes in found.items():
        memory = wishes.down(memories[slot])
        for node in nodes:
            memory = remember.intend(memory, _action(node), now, rng)
        store.save({slot: memory}, (Event(now, "down", f"{slot}: taken down, and nobody cares for it now", slot),))


def open_creates(memory: Memory) -> list[CreateIntent]:
    """Creates of which a node may still come."""
    return [intent for intent in memory.creates if intent.state is not CreateState.FAILED]


def _await_create(session: Session, intent: CreateIntent) -> None:
    """What was asked for when the last caretaker ended may come to be only now."""
    while not _is_settled(session, intent):
        time.sleep(LOOK_EVERY_SECONDS)
    await_gone(session, NodeKey(session.project, intent.zone, intent.name))


def _is_settled(session: Session, intent: CreateIntent) -> bool:
    if intent.state is not CreateState.RUNNING:
        return SystemClock().now() - intent.asked_at > LOST_CREATE_AFTER
    try:
        return session.cloud.get_operation(intent.operation).done
    except Transient:
        return False
    except LostRace:
        return True


# --- one node --------------------------------------------------------------------------------------------------------


def delete(session: Session, node: Node) -> None:
    """
    Ask for the deletion of exactly that node, once more if need be; accepted, not gone, when this returns.

    One that is gone, or being deleted or created at this moment, or whose name another bears, is no error.
    """
    with contextlib.suppress(NodeGone, ChangedMeanwhile, LostRace):
        delete_ours(_action(node), session.cloud, session.owner)
    session.forget_listings()


def await_gone(session: Session, key: NodeKey) -> None:
    """Return when the API says NOT_FOUND, or what bears that name is another node; asks again for a lost deletion."""
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
        time.sleep(LOOK_EVERY_SECONDS)


def _action(node: Node) -> Delete:
    return Delete(node.key, node.id, node.create_time, Cause.DOWN, "a person asked for it", Reason.ASKED)


# --- the functions that delete ----------------------------------------------------------------------------------------


__all__ = ["NotDeleted", "delete_all", "delete_one_tpu", "synchronous_deletion"]


def delete_one_tpu(prefix: str, host: str, zone: str | None = None, asynchronous: bool = True) -> None:
    """
    Delete every node of *host*, a slot or a node's name, in *zone*. Does nothing when there is none.

    prefix: a guard, as it always was: nothing happens unless *host* contains it; "" guards nothing. Also
    `delete_one_tpu(host, zone)`.    asynchronous: return when it is under way; False: when nothing is left.
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
    Delete everything in *zone* whose name begins with *prefix*, and return when nothing that is ours is left.

    Names are slots, and names of nodes that are not ours: those are left alone, and named in the error at the end.
    Raises: as `delete_one_tpu`.
    """
    _check(prefix, "any", zone)
    session = current()
    names = {session.slot_of(node) for node, _ in session.nodes(zone, fresh=True)}
    for store in _stores(session):
        names |= {slot for slot in store.memories if _concerns(session, store, slot, zone)}
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
    orders: dict[str, Order] = {}
    for host in hosts:
        for order in _orders(session, stores, host, zone, refused):
            known = orders.get(order.store)
            orders[order.store] = known.with_more(order) if known else order
    calls = [in_background(partial(carry_out, session, order, wait=wait)) for order in orders.values()]
    errors = [error for call in calls if (error := call.exception()) is not None]
    for error in errors:
        if not isinstance(error, NotDeleted):
            raise error
    if lines := [*map(str, errors), *refused]:
        raise NotDeleted("; ".join(lines))


def _stores(session: Session) -> tuple[StoreSnapshot, ...]:
    """Those that may know a node of this project: scripts of two projects may have a host of one name each."""
    found = Stores(session.options).read_all()
    return tuple(store for store in found if not store.is_of_another_project(session.project))


def _orders(
    session: Session, stores: tuple[StoreSnapshot, ...], host: str, zone: str, refused: list[str]
) -> list[Order]:
    """What *host* means, by store; what may not be deleted goes into *refused*, a line each."""
    nodes = session.named(host, zone, fresh=True)
    store = store_of_slot(stores, host)
    orders = []
    if store is not None and (nodes or _concerns(session, store, host, zone)):
        orders.append(Order(store.name, slots=(host,)))
    for node in nodes:
        known = store_of_node(stores, node)
        if not session.owner or node.owner != session.owner:
            refused.append(f"{node.name} is not ours: delete it with gcloud, or `tpucare adopt-node` it first")
        elif known is None:
            refused.append(f"{node.name} is of a fleet that this state folder never knew: `tpucare gc`")
        elif host == node.name and node.slot in known.memories and _is_newest(session, node):
            orders.append(Order(known.name, slots=(node.slot,), nodes=(node,)))
        else:
            orders.append(Order(known.name, nodes=(node,)))
    return orders


def _is_newest(session: Session, node: Node) -> bool:
    """Otherwise its slot has a successor, which a late order must not hit."""
    others = [other for other in session.named(node.slot, node.key.zone) if other.owner == node.owner]
    return all(other.create_time <= node.create_time for other in others)


def _concerns(session: Session, store: StoreSnapshot, slot: str, zone: str) -> bool:
    """Whether that slot has, or may get, something in *zone*. Without a caretaker nothing new comes."""
    zones = _zones(store.memories[slot])
    return zone in zones or (not zones and Stores(session.options).holder(store.name) is not None)


def _zones(memory: Memory) -> set[str]:
    return {node.zone for node in memory.ours} | {intent.zone for intent in open_creates(memory)}
