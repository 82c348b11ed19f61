"""Decisions: nodes that nobody can look at, and what `confirm` and `care.fence` change of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.kits.decisions import HOUR, NEXT, case, table
from tests.kits.evidence import (
    EU,
    NOW,
    QUIET,
    TRAINS,
    US,
    ago,
    evidence,
    going,
    launched,
    memory,
    node,
    past,
    place,
    seen,
    slot,
)
from tpucare.model.actions import EffectKind
from tpucare.model.errors import NeedsPerson, Transient
from tpucare.model.evidence import FailedRead
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import DesiredState, Memory

BOTH = slot(place(US), place(EU))
PROCEED = slot(place(US), place(EU), fence_proceed=True)
UNREACHABLE, LONG_UNREACHABLE = {US: ago(minutes=29)}, {US: ago(minutes=30)}
SEEN = seen(node(), zone_unreachable=True)
REFUSED = {"pod-0-a0": FailedRead(ago(minutes=30), 99, NeedsPerson, human=True)}
FAILS = {"pod-0-a0": FailedRead(ago(minutes=2), 3, Transient, human=False)}


def known(**more: Any) -> Memory:
    return replace(TRAINS, nodes=(launched(**more),))


LOST = known(status=NodeStatus.OUT_OF_SIGHT)
HIDDEN = [
    case("its zone is unreachable", evidence(SEEN, unreachable_since=UNREACHABLE), TRAINS, "Wait", BOTH),
    case(
        "its zone stays unreachable",
        evidence(SEEN, unreachable_since=LONG_UNREACHABLE),
        TRAINS,
        "Record node out of sight",
        BOTH,
    ),
    case("not seen since the start", evidence(unreachable_since=UNREACHABLE), TRAINS, "Wait", BOTH),
    case(
        "never seen since the start",
        evidence(unreachable_since=LONG_UNREACHABLE),
        TRAINS,
        "Record node out of sight",
        BOTH,
    ),
    case(
        "fence_after counts", evidence(SEEN, unreachable_since=LONG_UNREACHABLE), TRAINS, "Wait", slot(fence_after=HOUR)
    ),
    case(
        "GetNode is refused",
        evidence(failed_reads=REFUSED, ended_effects=dict.fromkeys([EffectKind.GET_NODE.of("pod-0-a0")], ago(9))),
        TRAINS,
        "Record node out of sight",
        BOTH,
    ),
    case("out of sight: a person", evidence(SEEN, unreachable_since=LONG_UNREACHABLE), LOST, "Wait person", BOTH),
    case(
        "out of sight: care.fence is proceed",
        evidence(SEEN, unreachable_since=LONG_UNREACHABLE),
        LOST,
        "Create",
        PROCEED,
    ),
    case(
        "out of sight: a person's word",
        evidence(SEEN, unreachable_since=LONG_UNREACHABLE),
        known(status=NodeStatus.OUT_OF_SIGHT, written_off=True),
        "Create",
        BOTH,
    ),
    case(
        "out of sight: nothing was launched on it",
        evidence(SEEN, unreachable_since=LONG_UNREACHABLE),
        memory(past(status=NodeStatus.OUT_OF_SIGHT)),
        "Create",
        BOTH,
    ),
    case(
        "out of sight, and no other place",
        evidence(SEEN, unreachable_since=LONG_UNREACHABLE),
        known(status=NodeStatus.OUT_OF_SIGHT, written_off=True),
        "Wait person",
        slot(),
    ),
    case(
        "the fence guards the launch",
        evidence(
            SEEN, NEXT, unreachable_since=LONG_UNREACHABLE, ended_effects={EffectKind.GET_NODE.of("pod-0-a0"): ago(1)}
        ),
        memory(launched(status=NodeStatus.OUT_OF_SIGHT), past(1)),
        "Wait",
        PROCEED,
    ),
    case(
        "the fence heeds a person's word",
        evidence(SEEN, NEXT, unreachable_since=LONG_UNREACHABLE),
        memory(launched(status=NodeStatus.OUT_OF_SIGHT, written_off=True), past(1)),
        "Launch",
        BOTH,
    ),
    case(
        "of two, one is hidden for good",
        evidence(SEEN, seen(node(number=1), QUIET), unreachable_since=LONG_UNREACHABLE),
        memory(launched(), past(1)),
        "Record node out of sight",
        BOTH,
    ),
    case("taken: a person", evidence(), known(status=NodeStatus.TAKEN), "GetNode", BOTH),
    case(
        "taken, looked at: a person",
        evidence(ended_effects={EffectKind.GET_NODE.of("pod-0-a0"): ago(1)}),
        known(status=NodeStatus.TAKEN),
        "Wait person",
    ),
    case(
        "taken: a person's word",
        evidence(ended_effects={EffectKind.GET_NODE.of("pod-0-a0"): ago(1)}),
        known(status=NodeStatus.TAKEN, written_off=True),
        "Create",
    ),
    case(
        "down: its zone is unreachable",
        evidence(SEEN, unreachable_since={US: ago(119)}),
        replace(TRAINS, wish=DesiredState.DOWN),
        "Wait",
    ),
    case(
        "down: its zone stays unreachable",
        evidence(SEEN, unreachable_since={US: ago(120)}),
        replace(TRAINS, wish=DesiredState.DOWN),
        "Wait person",
    ),
    case(
        "a look that fails is repeated",
        evidence(failed_reads=FAILS, ended_effects={EffectKind.GET_NODE.of("pod-0-a0"): ago(40)}),
        TRAINS,
        "GetNode",
    ),
    case(
        "ever more seldom",
        evidence(failed_reads=FAILS, ended_effects={EffectKind.GET_NODE.of("pod-0-a0"): ago(39)}),
        TRAINS,
        "Wait",
    ),
    case(
        "at least each 10 min",
        evidence(failed_reads=REFUSED, ended_effects={EffectKind.GET_NODE.of("pod-0-a0"): ago(600)}),
        TRAINS,
        "GetNode",
    ),
    case(
        "a dead one in an unreachable zone holds nothing up",
        evidence(SEEN, unreachable_since=LONG_UNREACHABLE),
        known(status=NodeStatus.DEAD),
        "Create",
        BOTH,
    ),
    case(
        "a delete was asked for: the fence alone",
        evidence(SEEN, unreachable_since=LONG_UNREACHABLE),
        known(delete=going(NOW)),
        "Create",
        BOTH,
    ),
]
test_what_nobody_can_look_at = table(HIDDEN)
