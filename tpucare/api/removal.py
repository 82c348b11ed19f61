"""
The functions of the Python door that delete: what is ours, under the eyes of whoever cares for it.

Inside a `start_fn` the attempt's own node is deleted, and its caretaker makes the next one. From anywhere else a
deletion is meant for good, and the slot is down after it. Nothing is deleted that does not bear our owner label and a
fleet that a store of this state folder has known; what may not be is named in one error, after everything else is
done. How it is carried out is in `deletion`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial

from tpucare.api.attempt import Attempt, attempt_of
from tpucare.api.deletion import NotDeleted, Order, await_gone, carry_out, delete, open_creates
from tpucare.api.session import Session, check_name, check_zone, current, in_background
from tpucare.model.errors import ConfigError, NodeGone
from tpucare.model.memory import Memory
from tpucare.model.resources import Node, NodeKey
from tpucare.service.stores import (
    KnownStore,
    caretaker_of,
    is_of_another_project,
    known_stores,
    store_of_node,
    store_of_slot,
)

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


def _stores(session: Session) -> tuple[KnownStore, ...]:
    """Those that may know a node of this project: scripts of two projects may have a host of one name each."""
    found = known_stores(session.options.state)
    return tuple(store for store in found if not is_of_another_project(store, session.project))


def _orders(session: Session, stores: tuple[KnownStore, ...], host: str, zone: str, refused: list[str]) -> list[Order]:
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


def _concerns(session: Session, store: KnownStore, slot: str, zone: str) -> bool:
    """Whether that slot has, or may get, something in *zone*. Without a caretaker nothing new comes."""
    zones = _zones(store.memories[slot])
    return zone in zones or (not zones and caretaker_of(session.options, store.name) is not None)


def _zones(memory: Memory) -> set[str]:
    return {node.zone for node in memory.ours} | {intent.zone for intent in open_creates(memory)}
