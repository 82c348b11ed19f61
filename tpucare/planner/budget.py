"""
What a fleet has cost, and the bounds at which it ends: `until` and `max_cost`.

Pure. Instants are those of the cloud's clock. A node is billed while it is READY (Cloud TPU pricing: "charges accrue
while your TPU node is in a READY state"). When that began, a process that was off then cannot tell, so hours count from
the creation of a node that came up until it is gone or reported dead: an upper bound, longer by the time to boot. Hours
of nodes that have ended are in the memory of their slot; those of live nodes follow from their creation. So nothing is
written while nothing happens, a killed process loses no hour, and the book does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from tpucare.model.accelerators import node_hour_price
from tpucare.model.causes import Cause
from tpucare.model.errors import ConfigError
from tpucare.model.evidence import Closed
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import Memory, NodeMemory
from tpucare.model.resources import DEAD_STATES, LABEL_SPENT, Bounds, Node, NodeState, Place, Slot

HOUR = timedelta(hours=1)
# A missing create time reads as 1970.
_EARLIEST_YEAR = 2000
# Notices before a bound, the last one first.
NOTICES = (timedelta(hours=1), timedelta(days=1))


class Spending(NamedTuple):
    """What a fleet has cost, in dollars, and what its present nodes cost an hour."""

    dollars: float
    per_hour: float


NOTHING_SPENT = Spending(0.0, 0.0)


# --- the book of one slot ---------------------------------------------------------------------------------------------


def price_of(slot: Slot, past: NodeMemory, node: Node) -> float | None:
    """Dollars an hour of *node*: as stated for the place that it was created at, else for an equal one, else listed."""
    own = slot.place(past.place)
    if own is not None:
        return own.price
    terms = (node.key.zone, node.accelerator_type, node.provisioning)
    for place in slot.places:
        if (place.zone, place.accelerator_type, place.provisioning) == terms:
            return place.price
    try:
        return node_hour_price(node.accelerator_type, node.key.zone, node.provisioning)
    except ConfigError:
        return None


def bill_node(memory: Memory, slot: Slot, node: Node, now: datetime) -> Memory:
    """Memory after *node*, of ours and of this slot, was listed or read: a node that came up is billed."""
    past = memory.node(node.name)
    if past is None or past.id != node.id or past.billed_from is not None or node.state is NodeState.CREATING:
        return memory
    begun = node.create_time if node.create_time.year >= _EARLIEST_YEAR else now
    if memory.counted_from is not None:
        begun = max(begun, memory.counted_from)
    past = replace(past, billed_from=begun, price=price_of(slot, past, node))
    if node.state in DEAD_STATES:
        # It came up and died unseen.
        memory, past = _count_hours(memory, past, now), replace(past, billed_from=now)
    return memory.with_node(past)


def settle_nodes(before: Memory, after: Memory, now: datetime) -> Memory:
    """*after* with the hours of each node that was billed in *before* and is not any more."""
    for past in before.nodes:
        left = after.node(past.name)
        is_left = left is not None and left.id == past.id
        if not _is_billed(past) or (is_left and left is not None and _is_billed(left)):
            continue
        after = _count_hours(after, past, now)
        if is_left and left is not None:
            after = after.with_node(replace(left, billed_from=now))
    return after


def _is_billed(past: NodeMemory) -> bool:
    return past.billed_from is not None and past.status not in (NodeStatus.DEAD, NodeStatus.TAKEN)


def _count_hours(memory: Memory, past: NodeMemory, now: datetime) -> Memory:
    hours = _hours(past.billed_from, now)
    if past.price is None:
        return replace(memory, unpriced_hours=memory.unpriced_hours + hours)
    return replace(memory, cost=memory.cost + hours * past.price)


def _hours(since: datetime | None, now: datetime) -> float:
    return max(0.0, (now - since) / HOUR) if since is not None else 0.0


# --- the book of a fleet ----------------------------------------------------------------------------------------------


def spending_of(memories: Iterable[Memory], places: Sequence[Place], now: datetime) -> Spending:
    """What slots with these memories have cost until *now*; hours of an unknown price cost as the dearest place."""
    dearest, dollars, per_hour = dearest_of(places), 0.0, 0.0
    for memory in memories:
        dollars += memory.cost + memory.unpriced_hours * dearest
        for past in memory.nodes:
            if _is_billed(past):
                price = past.price if past.price is not None else dearest
                dollars += price * _hours(past.billed_from, now)
                per_hour += price
    return Spending(dollars, per_hour)


def dearest_of(places: Iterable[Place]) -> float:
    return max((place.price for place in places if place.price is not None), default=0.0)


def spent_label(dollars: float) -> str:
    """Value of the label `tpucare-spent`: what the fleet had cost when the node was asked for, in cents."""
    return str(math.ceil(dollars * 100))


class ToldByLabel(NamedTuple):
    """What the newest node of a fleet tells: until that instant, the fleet had cost so many dollars."""

    at: datetime
    dollars: float


def told_by_labels(nodes: Iterable[Node]) -> ToldByLabel | None:
    told = [
        ToldByLabel(node.create_time, int(text) / 100)
        for node in nodes
        if (text := node.labels.get(LABEL_SPENT, "")).isascii() and text.isdigit()
    ]
    return max(told, default=None)


def spent_unseen(
    told: ToldByLabel, lives: Mapping[str, Collection[tuple[datetime, float]]], dearest: float, now: datetime
) -> float:
    """
    Dollars that a fleet has cost at most until *now*, after its store was lost.

    lives: of each slot the creation and price of its nodes that live. What the newest label does not tell, and no such
    node explains, counts as spent at the price of the dearest place: a slot had one node at a time.
    """
    dollars = told.dollars
    for nodes in lives.values():
        first = min((begun for begun, _ in nodes), default=now)
        dollars += dearest * _hours(told.at, max(first, told.at))
        dollars += sum(price * _hours(max(begun, told.at), now) for begun, price in nodes)
    return dollars


# --- the bounds -------------------------------------------------------------------------------------------------------


def remaining(bounds: Bounds, spending: Spending, now: datetime) -> timedelta | None:
    """Time until the first bound is reached at the present rate; None: never."""
    left = [bounds.until - now] if bounds.until is not None else []
    if bounds.max_cost is not None:
        dollars = bounds.max_cost - spending.dollars
        if dollars <= 0:
            left.append(timedelta())
        elif spending.per_hour > 0:
            # A grant costs almost nothing, and a timedelta has an end.
            left.append(min(dollars / spending.per_hour, 1e6) * HOUR)
    return min(left, default=None)


def closed_by(bounds: Bounds, spending: Spending, now: datetime) -> Closed | None:
    """The bound that a fleet has reached."""
    if bounds.until is not None and now >= bounds.until:
        return Closed(Cause.UNTIL_REACHED, f"`until` ({bounds.until:%Y-%m-%d %H:%M} UTC) is over")
    if bounds.max_cost is not None and spending.dollars >= bounds.max_cost:
        return Closed(Cause.COST_REACHED, f"the fleet has cost its `max_cost` of {bounds.max_cost:.10g} dollars")
    return None


def notice_due(left: timedelta | None) -> int:
    """How many notices before a bound are due: 0, 1 within a day of it, 2 within an hour."""
    return sum(left is not None and left <= before for before in NOTICES)
