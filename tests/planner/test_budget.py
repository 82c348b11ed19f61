"""What a fleet has cost, and when it ends: tables of `planner.budget`, and the rows of `decide` at a bound."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.kits.decisions import told
from tests.kits.evidence import (
    EU,
    NOW,
    QUIET,
    US,
    act,
    ago,
    evidence,
    intent,
    launched,
    memory,
    node,
    past,
    place,
    seen,
    slot,
)
from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.evidence import Closed
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import DesiredState, End, Memory
from tpucare.model.resources import LABEL_SPENT, Bounds, Node, NodeState, Provisioning
from tpucare.planner.budget import (
    HOUR,
    Spending,
    ToldByLabel,
    bill_node,
    closed_by,
    notice_due,
    remaining,
    settle_nodes,
    spending_of,
    spent_label,
    spent_unseen,
    told_by_labels,
)

DEAR, CHEAP = replace(place(US), price=6.0), replace(place(EU), price=2.0)
SLOT = slot(DEAR, CHEAP)
BORN = NOW - 3 * HOUR


def known(*, status: NodeStatus = NodeStatus.LIVE, **more: Any) -> Memory:
    return memory(past(place=DEAR.key, create_time=BORN, status=status, **more))


# --- the book of one slot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "before", "billed_from", "cost"),
    [
        (NodeState.CREATING, known(), None, 0),
        (NodeState.READY, known(), BORN, 0),
        (NodeState.REPAIRING, known(), BORN, 0),
        (NodeState.READY, known(billed_from=NOW), NOW, 0),
        (NodeState.PREEMPTED, known(status=NodeStatus.DEAD), NOW, 18),
        (NodeState.READY, replace(known(), counted_from=NOW - HOUR), NOW - HOUR, 0),
    ],
)
def test_a_node_is_billed_from_its_creation_once_it_came_up(
    state: NodeState, before: Memory, billed_from: datetime | None, cost: float
) -> None:
    after = bill_node(before, SLOT, node(state, born=BORN), NOW)
    [node_after] = after.nodes
    assert (node_after.billed_from, after.cost) == (billed_from, cost)
    assert bill_node(after, SLOT, node(state, born=BORN), NOW + HOUR) is after


def test_a_missing_create_time_bills_no_years() -> None:
    [after] = bill_node(known(), SLOT, node(born=datetime(1970, 1, 1, tzinfo=UTC)), NOW).nodes
    assert after.billed_from == NOW


def test_a_node_costs_what_was_stated_for_its_place_or_else_an_equal_or_listed_one() -> None:
    def price(where: Node, key: str) -> float | None:
        [after] = bill_node(memory(past(place=key)), SLOT, where, NOW).nodes
        return after.price

    assert price(node(), CHEAP.key) == 2.0
    assert price(node(), "") == 6.0
    assert price(replace(node(), accelerator_type="v4-8"), "") is None
    elsewhere = node(zone="us-central2-b", tier=Provisioning.ON_DEMAND)
    assert price(replace(elsewhere, accelerator_type="v4-8"), "") == 12.88
    assert price(replace(node(), accelerator_type="new-8"), "") is None


BILLED = known(billed_from=BORN, price=6.0)


@pytest.mark.parametrize(
    ("after", "cost", "hours"),
    [
        (BILLED, 0, 0),
        (known(status=NodeStatus.OUT_OF_SIGHT, billed_from=BORN, price=6.0), 0, 0),
        (known(status=NodeStatus.DEAD, billed_from=BORN, price=6.0), 18, 0),
        (known(status=NodeStatus.TAKEN, billed_from=BORN, price=6.0), 18, 0),
        (memory(), 18, 0),
    ],
)
def test_the_hours_of_a_node_are_counted_once_when_it_ends(after: Memory, cost: float, hours: float) -> None:
    settled = settle_nodes(BILLED, after, NOW)
    assert (settled.cost, settled.unpriced_hours) == (cost, hours)
    if cost:
        assert settle_nodes(settled, memory(cost=settled.cost), NOW + HOUR).cost == cost
    assert spending_of([settled], SLOT.places, NOW).dollars == 18


def test_hours_of_an_unknown_price_cost_as_the_dearest_place() -> None:
    unpriced = known(billed_from=BORN)
    assert spending_of([unpriced, BILLED], SLOT.places, NOW) == Spending(36, 12)
    assert settle_nodes(unpriced, memory(), NOW).unpriced_hours == 3
    assert spending_of([settle_nodes(unpriced, memory(), NOW)], SLOT.places, NOW) == Spending(18, 0)


def test_a_node_that_never_came_up_costs_nothing() -> None:
    assert settle_nodes(known(), memory(), NOW) == memory()
    assert spending_of([known()], SLOT.places, NOW) == Spending(0, 0)


# --- after a lost store -----------------------------------------------------------------------------------------------


def test_labels_tell_what_the_fleet_had_cost() -> None:
    def labelled(text: str, hours: float) -> Node:
        return replace(node(), create_time=NOW - hours * HOUR, labels={LABEL_SPENT: text})

    told_at = told_by_labels([labelled(spent_label(12.341), 2), labelled("99999", 5), labelled("x", 1), node()])
    assert told_at == ToldByLabel(NOW - 2 * HOUR, 12.35)
    assert told_by_labels([node(), labelled("-3", 1), labelled("", 1)]) is None


@pytest.mark.parametrize(
    ("lives", "dollars"),
    [
        ({"a": [(NOW - 2 * HOUR, 6.0)]}, 100 + 12),
        ({"a": [(NOW - 9 * HOUR, 2.0)], "b": [(NOW - 2 * HOUR, 6.0)]}, 100 + 4 + 12),
        ({"a": [], "b": [(NOW - 2 * HOUR, 2.0)]}, 100 + 12 + 4),
        ({"a": [(NOW - HOUR, 2.0)], "b": [(NOW - 2 * HOUR, 2.0)]}, 100 + 6 + 2 + 4),
    ],
)
def test_what_nothing_explains_counts_as_spent_at_the_dearest_place(
    lives: dict[str, list[tuple[datetime, float]]], dollars: float
) -> None:
    assert spent_unseen(ToldByLabel(NOW - 2 * HOUR, 100), lives, 6.0, NOW) == dollars


# --- the bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "dollars", "cause"),
    [
        (Bounds(max_price=1), 1000, None),
        (Bounds(until=NOW + HOUR, max_cost=10), 9.99, None),
        (Bounds(until=NOW), 0, Cause.UNTIL_REACHED),
        (Bounds(max_cost=10), 10, Cause.COST_REACHED),
        (Bounds(max_cost=0), 0, Cause.COST_REACHED),
        (Bounds(until=NOW, max_cost=10), 10, Cause.UNTIL_REACHED),
    ],
)
def test_a_bound_is_reached_or_not(bounds: Bounds, dollars: float, cause: Cause | None) -> None:
    closed = closed_by(bounds, Spending(dollars, 1), NOW)
    assert (closed.cause if closed is not None else None) is cause


@pytest.mark.parametrize(
    ("bounds", "per_hour", "left", "notices"),
    [
        (Bounds(), 5, None, 0),
        (Bounds(max_cost=100), 0, None, 0),
        (Bounds(max_cost=100), 2, 25 * HOUR, 0),
        (Bounds(max_cost=100), 5, 10 * HOUR, 1),
        (Bounds(until=NOW + 2 * HOUR, max_cost=100), 5, 2 * HOUR, 1),
        (Bounds(until=NOW + HOUR, max_cost=100), 5, HOUR, 2),
        (Bounds(max_cost=50), 0, timedelta(), 2),
        (Bounds(max_cost=1e9), 1e-9, 1e6 * HOUR, 0),
    ],
)
def test_notices_come_a_day_and_an_hour_before(
    bounds: Bounds, per_hour: float, left: timedelta | None, notices: int
) -> None:
    found = remaining(bounds, Spending(50, per_hour), NOW)
    assert (found, notice_due(found)) == (left, notices)


# --- what is decided at a bound ---------------------------------------------------------------------------------------

CLOSED = Closed(Cause.UNTIL_REACHED, "`until` is over")
SURE = CLOSED._replace(is_sure=True)
QUIET_NODE = seen(node(), QUIET, answering_since=ago(minutes=5))


@pytest.mark.parametrize(
    ("closed", "nodes", "before", "want"),
    [
        (CLOSED, (), memory(), "Wait"),
        (SURE, (), memory(), "Wait"),
        (CLOSED._replace(cause=Cause.COST_UNKNOWN), (), memory(), "Wait person"),
        (SURE, (QUIET_NODE,), memory(launched()), "Delete asked"),
        (SURE, (QUIET_NODE,), memory(launched(), wish=DesiredState.PAUSED), "Delete asked"),
        (SURE, (QUIET_NODE,), memory(launched(), end=End.FAILED), "Delete asked"),
        (SURE, (), memory(creates=(intent(),)), "Record create superseded"),
        (CLOSED, (), memory(wish=DesiredState.PAUSED), "Wait"),
    ],
)
def test_a_bound_takes_down_once_it_is_sure(
    closed: Closed, nodes: tuple[object, ...], before: Memory, want: str
) -> None:
    action = act(replace(evidence(*nodes), closed=closed), before, SLOT)  # type: ignore[arg-type]
    assert told(action) == want
    assert action.cause is (Cause.PAUSED if before.wish is DesiredState.PAUSED and not nodes else closed.cause)


def test_down_goes_before_a_bound() -> None:
    action = act(replace(evidence(), closed=SURE), memory(wish=DesiredState.DOWN))
    assert isinstance(action, Wait)
    assert (action.cause, action.ended) == (Cause.DOWN, True)
