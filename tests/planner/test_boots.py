"""Decisions: nodes that come up, and the fence before a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kits.decisions import (
    HOUR,
    NEXT,
    ON_DEMAND,
    OURS,
    PATIENT,
    case,
    table,
)
from tests.kits.evidence import (
    FOREIGN,
    FRESH,
    QUIET,
    TRAINS,
    US,
    act,
    after,
    ago,
    before,
    evidence,
    going,
    launched,
    memory,
    name_of,
    node,
    past,
    run,
    running,
    seen,
    slot,
)
from tpucare.model.actions import Delete, EffectKind
from tpucare.model.lifecycles import NodeStatus, RunState
from tpucare.model.memory import FailureCounter
from tpucare.model.resources import Health

# What a stop leaves behind on a node on which nothing of ours was ever launched.
HELD = memory(past(launched=False), run=run(0, state=RunState.STUCK, stop_why="held", stops=1))

BOOTS = [
    case("CREATING within boot_timeout", evidence(seen(node("CREATING"), state_since=ago(minutes=29))), FRESH, "Wait"),
    case(
        "CREATING at boot_timeout",
        evidence(seen(node("CREATING"), state_since=ago(minutes=30))),
        FRESH,
        "Delete judged",
    ),
    case(
        "boot_timeout grows with what is declared",
        evidence(seen(node("CREATING"), state_since=ago(minutes=31))),
        FRESH,
        "Wait",
        slot(boot_timeout=HOUR),
    ),
    case(
        "a worker missing within boot_timeout",
        evidence(seen(node(endpoints=1), state_since=ago(minutes=20))),
        FRESH,
        "Wait",
    ),
    case(
        "a worker missing at boot_timeout",
        evidence(seen(node(endpoints=1), state_since=ago(minutes=31))),
        memory(past(answered=False)),
        "Delete judged",
    ),
    # One listing without an endpoint deleted a node. A missing address counts only after `boot_timeout`.
    case(
        "a worker that was listed for hours is missing since a minute",
        evidence(seen(node(endpoints=1), running(), state_since=ago(hours=9), lacking_since=ago(60))),
        TRAINS,
        "Wait",
    ),
    case(
        "RESTARTING, a worker not listed for now: nothing can be launched on it",
        evidence(seen(node("RESTARTING", endpoints=1), QUIET, state_since=ago(60))),
        FRESH,
        "Wait",
    ),
    case("not asked yet", evidence(seen(node())), FRESH, "Wait"),
    case("no job: the node is kept", evidence(seen(node(), QUIET)), FRESH, "Wait", slot(job=False)),
    case(
        "health bad, run not launched: launch",
        evidence(seen(node(health=Health.TIMEOUT), QUIET, unhealthy_since=ago(hours=3))),
        FRESH,
        "Launch",
    ),
    case(
        "the launch is under way",
        evidence(seen(node(), QUIET), in_flight=frozenset({EffectKind.LAUNCH.of(name_of(0))})),
        TRAINS,
        "Wait",
    ),
    case(
        "the backoff after a crash",
        evidence(seen(node(), QUIET)),
        replace(FRESH, books={"crash": FailureCounter(2, 2, after(60), "exit 1")}),
        "Wait",
    ),
    case("something else holds the chips", evidence(seen(node(), (QUIET, FOREIGN))), FRESH, "Stop"),
    case(
        "held again, long after it let go",
        evidence(seen(node(), (QUIET, FOREIGN)), ended_effects={EffectKind.STOP.of(name_of(0)): ago(hours=1)}),
        FRESH,
        "Stop",
    ),
    case(
        "and does not let go: somebody may be at work there",
        evidence(seen(node(), (QUIET, FOREIGN)), ended_effects={EffectKind.STOP.of(name_of(0)): ago(minutes=9)}),
        HELD,
        "Wait person",
    ),
    case(
        "and does not let go for ten minutes",
        evidence(seen(node(), (QUIET, FOREIGN)), ended_effects={EffectKind.STOP.of(name_of(0)): ago(minutes=11)}),
        HELD,
        "Delete dead",
    ),
    case(
        "and does not let go of an on-demand node",
        evidence(
            seen(node(tier=ON_DEMAND), (QUIET, FOREIGN)), ended_effects={EffectKind.STOP.of(name_of(0)): ago(hours=1)}
        ),
        HELD,
        "Wait person",
    ),
    case(
        "some worker did not hear of the stop",
        evidence(seen(node(), (QUIET, FOREIGN)), ended_effects={EffectKind.STOP.of(name_of(0)): ago(minutes=11)}),
        replace(HELD, run=run(0, state=RunState.STOPPING, stop_why="held", stops=1)),
        "Stop",
    ),
    case(
        "it let go",
        evidence(seen(node(), QUIET), ended_effects={EffectKind.STOP.of(name_of(0)): ago(minutes=9)}),
        HELD,
        "Record run stopped",
    ),
]

FENCED = memory(launched(0), past(1))
DELETE = going(before(60), next_at=after(60))
WAITED = replace(NEXT, answering_since=ago(minutes=31))
GONE_ON = memory(launched(0, delete=DELETE), past(1))
LOOKED = {EffectKind.GET_NODE.of(name_of(0)): ago(2)}

FENCES = [
    case("an older node may train: GetNode", evidence(NEXT, unreachable_since={US: ago(60)}), GONE_ON, "GetNode"),
    case("asked just now", evidence(NEXT, unreachable_since={US: ago(60)}, ended_effects=LOOKED), GONE_ON, "Wait"),
    case(
        "its delete was accepted, which proves nothing",
        evidence(NEXT, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        memory(launched(0, delete=replace(DELETE, accepted=True)), past(1)),
        "Wait",
    ),
    case(
        "its delete was accepted after every worker was quiet",
        evidence(NEXT, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        memory(launched(0, delete=replace(DELETE, accepted=True, quiet=True)), past(1)),
        "Launch",
    ),
    case(
        "it was quiet, its delete is not accepted",
        evidence(NEXT, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        memory(launched(0, delete=replace(DELETE, quiet=True)), past(1)),
        "Wait",
    ),
    case(
        "it was once seen PREEMPTED, though its zone is unreachable now",
        evidence(NEXT, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        memory(launched(0, delete=DELETE, status=NodeStatus.DEAD), past(1)),
        "Launch",
    ),
    case(
        "this store wrote no launch for it",
        evidence(NEXT, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        memory(past(0, delete=DELETE), past(1)),
        "Launch",
    ),
    case(
        "no proof after fence_after: loudly",
        evidence(WAITED, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        GONE_ON,
        "Wait person",
    ),
    case(
        "care.fence: proceed, before fence_after",
        evidence(NEXT, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        GONE_ON,
        "Wait",
        slot(fence_proceed=True),
    ),
    case(
        "care.fence: proceed",
        evidence(WAITED, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        GONE_ON,
        "Launch",
        slot(fence_proceed=True),
    ),
    # The store was lost, and an older node could still train in a zone that had not answered since. After a loss
    # nothing is launched before every zone has answered once.
    case(
        "the store was lost, and a zone has never answered",
        evidence(NEXT, store_lost=True, complete=False),
        memory(past(1)),
        "Wait person",
    ),
    case(
        "the store may be a backup, and a zone has never answered",
        evidence(NEXT, store_old=True, unanswered=OURS),
        memory(past(1)),
        "Wait",
        PATIENT,
    ),
    case("the store was lost, and every zone has answered", evidence(NEXT, store_lost=True), memory(past(1)), "Launch"),
    case(
        "a person confirmed",
        evidence(WAITED, unreachable_since={US: ago(60)}, ended_effects=LOOKED),
        replace(GONE_ON, fence_confirmed=True),
        "Launch",
    ),
]


test_what_comes_of_boots = table(BOOTS)


test_the_fence = table(FENCES)


@pytest.mark.parametrize("launched_before", [False, True])
def test_chips_held_before_any_launch_of_ours_speak_against_the_place(launched_before: bool) -> None:
    what = evidence(seen(node(), (QUIET, FOREIGN)), ended_effects={EffectKind.STOP.of(name_of(0)): ago(minutes=11)})
    delete = act(what, replace(HELD, nodes=(past(launched=launched_before),)))
    assert isinstance(delete, Delete)
    assert delete.held is not launched_before
