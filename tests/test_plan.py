"""
The decision table: evidence and memory in, action out. One case per row of the design's table (§6), and per state.

What a whole course of events does is in the stories; what memory becomes is in `test_remember`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.evidence_kit import (
    CHANGED,
    EU,
    FOREIGN,
    FRESH,
    HERE,
    NO_PROGRESS,
    QUIET,
    REFUSED,
    SILENT,
    TRAINS,
    US,
    act,
    after,
    ago,
    before,
    ended,
    evidence,
    intent,
    launched,
    memory,
    name_of,
    node,
    past,
    place,
    run,
    running,
    seen,
    slot,
    token,
)
from tpucare.actions import (
    Action,
    Create,
    Delete,
    Settle,
    Stop,
    Wait,
)
from tpucare.evidence import Evidence, Progress
from tpucare.memory import Book, End, Memory, PlaceMemory, Wish
from tpucare.model import Failure, Health, NodeState, OnSuccess, Phase, Provisioning, Slot

ON_DEMAND = Provisioning.ON_DEMAND
MUTE = Progress(token(), 0, None, None, ago(hours=2))
STALE = Progress(token(), 100, ago(hours=2), timedelta(seconds=15), ago(hours=2))


def told(action: Action) -> str:
    """What kind of action it is, with the part that tells it from others of its kind."""
    match action:
        case Delete():
            return f"Delete {action.reason.value}"
        case Settle():
            return f"Settle {action.fact.value}"
        case Stop():
            book = f" {action.book.value}" if action.book else ""
            then = f" then {action.then.value}" if action.then else ""
            return f"Stop{book}{then}{' gives up' if action.gives_up else ''}"
        case Wait():
            return "Wait person" if action.needs_person else "Wait"
        case Create():
            return "Create again" if action.resend else "Create"
    return type(action).__name__


# --- every state number, and one unknown -----------------------------------------------------------------------------

ALIVE_AND_TRAINING = {
    NodeState.CREATING: "Wait",
    NodeState.READY: "Wait",
    NodeState.RESTARTING: "Wait",
    NodeState.REPAIRING: "Wait",
    NodeState.STARTING: "Wait",
    NodeState.STOPPED: "Wait person",
    NodeState.STOPPING: "Wait person",
    NodeState.PREEMPTED: "Delete dead",
    NodeState.TERMINATED: "Delete dead",
    NodeState.UNKNOWN: "Delete dead",
    NodeState.DELETING: "Create",
}
ANSWERING_AND_FRESH = {
    **ALIVE_AND_TRAINING,
    NodeState.CREATING: "Launch",
    NodeState.READY: "Launch",
    NodeState.RESTARTING: "Launch",
    NodeState.REPAIRING: "Launch",
    NodeState.STARTING: "Launch",
}
STATES = [*NodeState, NodeState(99)]


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{state.value}-{state.name}")
@pytest.mark.parametrize(
    ("known", "workers", "want"),
    [
        (TRAINS, running(), ALIVE_AND_TRAINING),
        (FRESH, QUIET, ANSWERING_AND_FRESH),
        (FRESH, None, ALIVE_AND_TRAINING),
    ],
    ids=["training", "answering", "not asked yet"],
)
def test_every_state_has_its_action(state: NodeState, known: Memory, workers: Any, want: dict[NodeState, str]) -> None:
    action = act(evidence(seen(node(state), workers, state_since=ago(minutes=5))), known)
    assert told(action) == want.get(state, "Wait")


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{state.value}-{state.name}")
def test_what_is_not_seen_now_is_not_judged(state: NodeState) -> None:
    what = seen(node(state), SILENT, silent_since=ago(hours=5), silent_probes=99, unhealthy_since=ago(hours=5))
    assert told(act(replace(evidence(what), fresh=False, blind_why="HTTP 500"), TRAINS)) == "Wait"
    assert told(act(evidence(replace(what, dark=True), elsewhere_answers=True), TRAINS)) in ("Wait", "Create")
    assert told(act(evidence(what, elsewhere_answers=True), replace(TRAINS, wish=Wish.PAUSED))) == "Wait"


@pytest.mark.parametrize("state", [NodeState.DELETING, NodeState.PREEMPTED, NodeState.TERMINATED])
def test_the_next_create_does_not_wait_for_a_dead_node(state: NodeState) -> None:
    dead = launched(dead=state is not NodeState.DELETING, delete_asked_at=before(10), delete_next_at=after(50))
    action = act(evidence(seen(node(state))), memory(dead, run=run()))
    assert told(action) == "Create"
    assert isinstance(action, Create)
    assert (action.name, action.number) == (name_of(10), 10)


# --- the rows of design §6, by name ----------------------------------------------------------------------------------

HOUR = timedelta(hours=1)
Case = tuple[str, Evidence, Memory, Slot, str]


def case(name: str, what: Evidence, known: Memory, want: str, declared: Slot | None = None) -> Any:
    return pytest.param(what, known, declared or slot(), want, id=name)


def silent(minutes: float, *workers: Any, probes: int = 99, **more: Any) -> Any:
    known: dict[str, Any] = {"silent_since": ago(minutes=minutes), "silent_probes": probes, "progress": STALE}
    return seen(more.pop("what", node()), workers or SILENT, **{**known, **more})


def over(status: int | None = 1, seconds: float = 60, what: Any = None, **more: Any) -> Any:
    """A node on which every worker's run has ended that long ago."""
    known: dict[str, Any] = {"ended_since": ago(seconds), "answering_since": ago(minutes=30)}
    marks = {key: more.pop(key) for key in list(more) if key.endswith("_since") or key in ("progress", "workers")}
    return seen(what or node(), ended(status, **more), **{**known, **marks})


OURS, DARK = frozenset({US}), frozenset({"asia-east1-c"})
# Longer than the ten hours that were observed since the start.
PATIENT = slot(fence_after=timedelta(hours=11))

CREATES = [
    case("no node, no open intent: create", evidence(), memory(), "Create"),
    case("a node in DELETING counts as none", evidence(seen(node("DELETING"))), memory(launched()), "Create"),
    case(
        "an open intent: no second create", evidence(), memory(creates=(intent(accepted=True, operation="op"),)), "Poll"
    ),
    case(
        "an open intent that was polled just now",
        evidence(looked={f"poll:{name_of(0)}": ago(3)}),
        memory(creates=(intent(accepted=True, operation="op"),)),
        "Wait",
    ),
    case("the call is under way", evidence(in_flight=frozenset({"create"})), memory(creates=(intent(),)), "Wait"),
    case(
        "its answer was lost: the same name again",
        evidence(),
        memory(creates=(intent(lost=True, retry_at=before(1)),)),
        "Create again",
    ),
    case("its answer was lost: not yet", evidence(), memory(creates=(intent(lost=True, retry_at=after(1)),)), "Wait"),
    case(
        "its answer was lost, and its place is no longer declared",
        evidence(),
        memory(creates=(intent(lost=True),)),
        "Settle create superseded",
        slot(place(EU)),
    ),
    case(
        "refused when it was sent again: it could still arrive",
        evidence(),
        memory(creates=(intent(lost=True, refused="Quota", asked_at=before(60)),)),
        "Wait",
    ),
    case(
        "refused when it was sent again: it could have arrived until now",
        evidence(),
        memory(creates=(intent(lost=True, refused="Quota", asked_at=before(91)),)),
        "Look",
    ),
    case(
        "operation over, node not listed: GetNode tells",
        evidence(),
        memory(creates=(intent(accepted=True, operation=""),)),
        "Look",
    ),
    case(
        "operation not ours to read: its node may not be visible yet",
        evidence(),
        memory(creates=(intent(accepted=True, unread=True, asked_at=before(89)),)),
        "Wait",
    ),
    case(
        "operation not ours to read: GetNode tells",
        evidence(),
        memory(creates=(intent(accepted=True, unread=True, asked_at=before(91)),)),
        "Look",
    ),
    case(
        "unanswered at boot_timeout",
        evidence(creates_since={name_of(0): ago(minutes=31)}, looked={f"poll:{name_of(0)}": ago(1)}),
        memory(creates=(intent(accepted=True, operation="op"),)),
        "Settle create superseded",
    ),
    case(
        "its answers are lost until boot_timeout: another place may serve",
        evidence(creates_since={name_of(0): ago(minutes=31)}),
        memory(creates=(intent(lost=True, retry_at=before(1)),)),
        "Settle create superseded",
    ),
    case(
        "superseded, and comes after all, before any other",
        evidence(seen(node("READY"))),
        memory(past(), creates=(intent(superseded=True, accepted=True), intent(1, accepted=True, operation="op"))),
        "Settle create kept",
    ),
    case(
        "superseded, is being made after all, and no other is",
        evidence(seen(node("CREATING"))),
        memory(past(), creates=(intent(superseded=True, accepted=True),)),
        "Settle create kept",
    ),
    case(
        "superseded, is being made after all, and so is another",
        evidence(seen(node("CREATING")), seen(node("CREATING", 1))),
        memory(
            past(), past(1), creates=(intent(superseded=True, accepted=True), intent(1, accepted=True, operation="op"))
        ),
        "Delete surplus",
    ),
    case(
        "superseded, serves after all, and another is being made",
        evidence(seen(node("READY")), seen(node("CREATING", 1))),
        memory(
            past(), past(1), creates=(intent(superseded=True, accepted=True), intent(1, accepted=True, operation="op"))
        ),
        "Settle create kept",
    ),
    case(
        "superseded, serves after all, and another trains that still shows CREATING",
        evidence(seen(node("READY")), seen(node("CREATING", 1), running(token(1)))),
        memory(past(), launched(1), run=run(1), creates=(intent(superseded=True, accepted=True),)),
        "Delete surplus",
    ),
    case(
        "superseded, and comes after another",
        evidence(seen(node("READY")), seen(node("READY", 1))),
        memory(past(), past(1), creates=(intent(superseded=True, accepted=True),)),
        "Delete surplus",
    ),
    case(
        "superseded, and comes while the slot goes down",
        evidence(seen(node("READY"))),
        memory(past(), creates=(intent(superseded=True, accepted=True),), wish=Wish.DOWN),
        "Delete surplus",
    ),
    case(
        "superseded, and was asked to go",
        evidence(seen(node("READY"))),
        memory(
            past(delete_asked_at=before(90), delete_next_at=before(30)),
            creates=(intent(superseded=True, accepted=True),),
        ),
        "Delete asked",
    ),
    case(
        "superseded and still to come: the next create goes on",
        evidence(looked={f"poll:{name_of(0)}": ago(1)}),
        memory(creates=(intent(superseded=True, accepted=True, operation="op"),)),
        "Create",
    ),
    case(
        "its operation failed, its workers answer: the workers win",
        evidence(seen(node("CREATING"), QUIET)),
        memory(past(), creates=(intent(failed=True, accepted=True, refused="no more capacity"),)),
        "Launch",
    ),
    case(
        "its operation failed, listed CREATING and silent for less than 60 s",
        evidence(seen(node("CREATING")), looked={f"failed:{name_of(0)}": ago(40)}),
        memory(past(), creates=(intent(failed=True, accepted=True, refused="no more capacity"),)),
        "Wait",
    ),
    case(
        "its operation failed, listed CREATING and silent for 60 s",
        evidence(seen(node("CREATING")), looked={f"failed:{name_of(0)}": ago(61)}),
        memory(past(), creates=(intent(failed=True, accepted=True, refused="no more capacity"),)),
        "Delete dead",
    ),
    case(
        "a place in its backoff",
        evidence(),
        memory(places={place().key: PlaceMemory(1, after(30), "no capacity")}),
        "Wait",
    ),
    case(
        "every place refused twice: reported as stopped",
        evidence(),
        memory(places={place().key: PlaceMemory(0, after(30), "human", blocked=True, refusals=2)}),
        "Wait person",
    ),
    case("another owner's node of our name", evidence(foreign=(node(owner="them"),)), memory(), "Wait person"),
    case(
        "a lost store, and a zone that has not answered yet",
        evidence(store_lost=True, complete=False),
        memory(),
        "Wait",
        PATIENT,
    ),
    case("a lost store, and a zone stays dark", evidence(store_lost=True, complete=False), memory(), "Wait person"),
    case("a lost store, all zones seen", evidence(store_lost=True), memory(), "Create"),
    case(
        "maybe a backup, and a dark zone",
        evidence(store_old=True, unanswered=frozenset({US})),
        memory(),
        "Wait",
        PATIENT,
    ),
    case(
        "maybe a backup, and a zone stays dark",
        evidence(store_old=True, unanswered=frozenset({US})),
        memory(),
        "Wait person",
    ),
    case("maybe a backup, and another zone is dark", evidence(store_old=True, unanswered=DARK), memory(), "Create"),
    case("maybe a backup, all zones seen", evidence(store_old=True), memory(), "Create"),
    case("a store in use, and a dark zone", evidence(complete=False), memory(), "Create"),
    case(
        "remembered and not seen, its zone dark",
        evidence(unreachable=frozenset({US})),
        memory(launched()),
        "Wait",
    ),
    case("remembered and not in the listing: GetNode tells", evidence(), memory(launched()), "Look"),
    case("404 for a node that was there", evidence(seen(node(), running(), listed=False)), TRAINS, "Look"),
    case(
        "404 for a node that was there: asked just now",
        evidence(seen(node(), running(), listed=False), looked={f"look:{name_of(0)}": ago(2)}),
        TRAINS,
        "Wait",
    ),
]

DELETES = [
    case(
        "a delete is repeated until the node is not found",
        evidence(seen(node("DELETING"))),
        memory(launched(delete_asked_at=before(99), delete_next_at=before(1), delete_reason="asked")),
        "Delete asked",
    ),
    case(
        "and not before its time",
        evidence(seen(node("DELETING"))),
        memory(launched(delete_asked_at=before(9), delete_next_at=after(51)), creates=(intent(3, accepted=True),)),
        "Look",
    ),
    case(
        "nor while it is under way",
        evidence(seen(node("PREEMPTED")), in_flight=frozenset({f"delete:{name_of(0)}", "create"})),
        memory(launched(dead=True)),
        "Wait",
    ),
    case(
        "somebody stopped it, and care.stopped is delete",
        evidence(seen(node("STOPPED"))),
        TRAINS,
        "Delete asked",
        slot(stopped_delete=True),
    ),
]

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
    case("host keys first", evidence(seen(node(), QUIET, vouched=False)), FRESH, "Vouch"),
    case(
        "host keys are asked for",
        evidence(seen(node(), QUIET, vouched=False), in_flight=frozenset({f"vouch:{name_of(0)}"})),
        FRESH,
        "Wait",
    ),
    case("no job: the node is kept", evidence(seen(node(), QUIET)), FRESH, "Wait", slot(job=False)),
    case(
        "health bad, run not launched: launch",
        evidence(seen(node(health=Health.TIMEOUT), QUIET, unhealthy_since=ago(hours=3))),
        FRESH,
        "Launch",
    ),
    case(
        "the launch is under way",
        evidence(seen(node(), QUIET), in_flight=frozenset({f"launch:{name_of(0)}"})),
        TRAINS,
        "Wait",
    ),
    case(
        "a book asks for patience",
        evidence(seen(node(), QUIET)),
        replace(FRESH, books={"crash": Book(2, 2, after(60), "exit 1")}),
        "Wait",
    ),
    case("something else holds the chips", evidence(seen(node(), (QUIET, FOREIGN))), FRESH, "Stop"),
    case(
        "and does not let go",
        evidence(seen(node(), (QUIET, FOREIGN)), looked={f"stop:{name_of(0)}": ago(20)}),
        FRESH,
        "Delete dead",
    ),
    case(
        "and does not let go of an on-demand node",
        evidence(seen(node(tier=ON_DEMAND), (QUIET, FOREIGN)), looked={f"stop:{name_of(0)}": ago(20)}),
        FRESH,
        "Wait person",
    ),
]

FENCED = memory(launched(0), past(1))
DELETED = {"delete_asked_at": before(60), "delete_next_at": after(60)}
NEXT = seen(node(number=1), QUIET, answering_since=ago(minutes=1))
WAITED = replace(NEXT, answering_since=ago(minutes=31))
GONE_ON = memory(launched(0, **DELETED), past(1))
LOOKED = {f"look:{name_of(0)}": ago(2)}

FENCES = [
    case("an older node may train: GetNode", evidence(NEXT, unreachable=frozenset({US})), GONE_ON, "Look"),
    case("asked just now", evidence(NEXT, unreachable=frozenset({US}), looked=LOOKED), GONE_ON, "Wait"),
    case(
        "its delete was accepted, which proves nothing",
        evidence(NEXT, unreachable=frozenset({US}), looked=LOOKED),
        memory(launched(0, **DELETED, delete_accepted=True), past(1)),
        "Wait",
    ),
    case(
        "its delete was accepted after every worker was quiet",
        evidence(NEXT, unreachable=frozenset({US}), looked=LOOKED),
        memory(launched(0, **DELETED, delete_accepted=True, delete_quiet=True), past(1)),
        "Launch",
    ),
    case(
        "it was quiet, its delete is not accepted",
        evidence(NEXT, unreachable=frozenset({US}), looked=LOOKED),
        memory(launched(0, **DELETED, delete_quiet=True), past(1)),
        "Wait",
    ),
    case(
        "it was once seen PREEMPTED, however dark its zone is now",
        evidence(NEXT, unreachable=frozenset({US}), looked=LOOKED),
        memory(launched(0, **DELETED, dead=True), past(1)),
        "Launch",
    ),
    case(
        "this store wrote no launch for it",
        evidence(NEXT, unreachable=frozenset({US}), looked=LOOKED),
        memory(past(0, **DELETED), past(1)),
        "Launch",
    ),
    case(
        "no proof after fence_after: loudly",
        evidence(WAITED, unreachable=frozenset({US}), looked=LOOKED),
        GONE_ON,
        "Wait person",
    ),
    case(
        "care.fence: proceed, before fence_after",
        evidence(NEXT, unreachable=frozenset({US}), looked=LOOKED),
        GONE_ON,
        "Wait",
        slot(fence_proceed=True),
    ),
    case(
        "care.fence: proceed",
        evidence(WAITED, unreachable=frozenset({US}), looked=LOOKED),
        GONE_ON,
        "Launch",
        slot(fence_proceed=True),
    ),
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
        evidence(WAITED, unreachable=frozenset({US}), looked=LOOKED),
        replace(GONE_ON, fence_confirmed=True),
        "Launch",
    ),
]

SILENCE = [
    case("silent for less than unreachable_after", evidence(silent(2), elsewhere_answers=True), TRAINS, "Wait"),
    case(
        "silent for unreachable_after, others answer",
        evidence(silent(3), elsewhere_answers=True),
        TRAINS,
        "Delete judged",
    ),
    case("two probes are too few", evidence(silent(60, probes=2), elsewhere_answers=True), TRAINS, "Wait"),
    case("nobody else answers", evidence(silent(60)), TRAINS, "Wait"),
    case(
        "nobody answers for 3x the time: the canary", evidence(silent(9), may_be_canary=True), TRAINS, "Delete judged"
    ),
    case("nobody answers: the canary waits", evidence(silent(8), may_be_canary=True), TRAINS, "Wait"),
    case(
        "never answered: twice the patience",
        evidence(silent(5, seen_since=ago(minutes=20)), elsewhere_answers=True),
        memory(past(answered=False)),
        "Wait",
    ),
    case(
        "never answered, others do",
        evidence(silent(6), elsewhere_answers=True),
        memory(past(answered=False)),
        "Delete judged",
    ),
    case(
        "never all answered, and the last of those that did came just now: it boots",
        evidence(
            silent(9, QUIET, SILENT, arrived_since=ago(minutes=1), seen_since=ago(minutes=20)), elsewhere_answers=True
        ),
        memory(past(answered=False)),
        "Wait",
    ),
    case(
        "never all answered, and nobody came for twice the patience",
        evidence(silent(16, QUIET, SILENT, arrived_since=ago(minutes=6)), elsewhere_answers=True),
        memory(past(answered=False)),
        "Delete judged",
    ),
    case(
        "a worker that answers no more is no booting one, whoever came just now",
        evidence(silent(3, QUIET, SILENT, arrived_since=ago(minutes=1)), elsewhere_answers=True),
        TRAINS,
        "Delete judged",
    ),
    case(
        "never answered, nobody does: boot_timeout ends the wait",
        evidence(silent(25, seen_since=ago(minutes=31))),
        memory(past(answered=False)),
        "Delete judged",
    ),
    case(
        "on-demand: never for silence under 30 min",
        evidence(silent(29, what=node(tier=ON_DEMAND)), elsewhere_answers=True),
        TRAINS,
        "Wait",
    ),
    case(
        "on-demand: after 30 min",
        evidence(silent(30, what=node(tier=ON_DEMAND)), elsewhere_answers=True),
        TRAINS,
        "Delete judged",
    ),
    case(
        "a worker is silent, progress goes on",
        evidence(
            silent(5, running(), SILENT, progress=Progress(token(), 9, ago(10), timedelta(seconds=15), ago(10))),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "a worker fell silent, then one last step was seen",
        evidence(
            silent(9, running(), SILENT, progress=Progress(token(), 9, ago(minutes=8), timedelta(seconds=15), ago(10))),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Delete judged",
    ),
    case(
        "a worker is silent, and steps take long",
        evidence(
            silent(9, running(), SILENT, progress=Progress(token(), 9, ago(minutes=8), timedelta(minutes=1), ago(10))),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "silent since long before it was READY: it was booting",
        evidence(
            silent(10, QUIET, SILENT, seen_since=ago(minutes=20), state_since=ago(minutes=5)), elsewhere_answers=True
        ),
        memory(past(answered=False)),
        "Wait",
    ),
    case("some workers silent for 30 s", evidence(silent(0.5, running(), SILENT)), TRAINS, "Wait"),
    case("some workers silent, no progress: stop the rest", evidence(silent(1, running(), SILENT)), TRAINS, "Stop"),
    case(
        "the rest was stopped already",
        evidence(silent(1, running(), SILENT), looked={f"stop:{name_of(0)}": ago(30)}),
        TRAINS,
        "Wait",
    ),
    case(
        "worker 0 never told of progress",
        evidence(silent(1, running(), SILENT, progress=NO_PROGRESS)),
        TRAINS,
        "Wait",
    ),
    case("our key is refused: it may be late", evidence(seen(node(), REFUSED, refused_since=ago(20))), FRESH, "Wait"),
    case("our key is refused", evidence(seen(node(), REFUSED, refused_since=ago(31))), FRESH, "PushKey"),
    case(
        "our key could not be written: not at once again",
        evidence(seen(node(), REFUSED, refused_since=ago(99)), looked={f"key:{name_of(0)}": ago(50)}),
        FRESH,
        "Wait person",
    ),
    case(
        "our key could not be written: again",
        evidence(seen(node(), REFUSED, refused_since=ago(99)), looked={f"key:{name_of(0)}": ago(61)}),
        FRESH,
        "PushKey",
    ),
    case(
        "our key was written",
        evidence(seen(node(), REFUSED, refused_since=ago(60))),
        memory(past(keyed=True)),
        "Wait",
    ),
    case(
        "our key was written and does not serve",
        evidence(seen(node(), REFUSED, refused_since=ago(minutes=3))),
        memory(past(keyed=True)),
        "Wait person",
    ),
    case("a host key changed: guest attributes", evidence(seen(node(), (QUIET, CHANGED))), TRAINS, "Vouch"),
    case(
        "guest attributes do not vouch",
        evidence(seen(node(), (QUIET, CHANGED)), looked={f"vouch:{name_of(0)}": ago(30)}),
        TRAINS,
        "Wait person",
    ),
    case(
        "guest attributes are asked again",
        evidence(seen(node(), (QUIET, CHANGED)), looked={f"vouch:{name_of(0)}": ago(61)}),
        TRAINS,
        "Vouch",
    ),
]

SICK = node(health=Health.TIMEOUT)
HEALTH = [
    case("health bad, progress goes on", evidence(seen(SICK, running(), unhealthy_since=ago(hours=5))), TRAINS, "Wait"),
    case(
        "health bad, no progress for unhealthy_after",
        evidence(seen(SICK, running(), unhealthy_since=ago(hours=2), progress=MUTE)),
        TRAINS,
        "Stop then judged",
    ),
    case(
        "health bad for less than that",
        evidence(seen(SICK, running(), unhealthy_since=ago(minutes=50), progress=MUTE)),
        TRAINS,
        "Wait",
    ),
    case(
        "health bad, on-demand",
        evidence(
            seen(
                node(health=Health.TIMEOUT, tier=ON_DEMAND),
                running(),
                unhealthy_since=ago(hours=2),
                progress=MUTE,
            )
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "REPAIRING beyond unhealthy_after without progress",
        evidence(seen(node("REPAIRING"), running(), state_since=ago(hours=1), progress=STALE)),
        TRAINS,
        "Stop then judged",
    ),
    case(
        "REPAIRING, no step is told and the log moves",
        evidence(
            seen(
                node("REPAIRING"),
                running(),
                state_since=ago(hours=1),
                progress=Progress(token(), 0, None, None, ago(10)),
            )
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "REPAIRING, and one last step was seen",
        evidence(
            seen(
                node("REPAIRING"),
                running(),
                state_since=ago(hours=2),
                progress=Progress(token(), 9, ago(minutes=61), timedelta(seconds=15), ago(minutes=61)),
            )
        ),
        TRAINS,
        "Stop then judged",
    ),
    case(
        "REPAIRING, on-demand: never deleted for health",
        evidence(seen(node("REPAIRING", tier=ON_DEMAND), QUIET, state_since=ago(hours=2), progress=NO_PROGRESS)),
        memory(launched(), run=run(stopped=True)),
        "Launch",
    ),
    case(
        "REPAIRING, stopped",
        evidence(
            seen(node("REPAIRING"), QUIET, state_since=ago(hours=1), progress=STALE),
            looked={f"stop:{name_of(0)}": ago(9)},
        ),
        TRAINS,
        "Delete judged",
    ),
    case(
        "REPAIRING with progress",
        evidence(seen(node("REPAIRING"), running(), state_since=ago(hours=1))),
        TRAINS,
        "Wait",
    ),
]

LAUNCHING = frozenset({f"launch:{name_of(0)}"})
IN_FLIGHT = [
    case(
        "replace is asked for while a launch is under way: its workers are not known to be quiet",
        evidence(seen(node(), QUIET), in_flight=LAUNCHING),
        memory(launched(), run=run(complete=False), replace_asked=True),
        "Wait",
    ),
    case(
        "superseded while a launch is under way",
        evidence(seen(node("CREATING"), QUIET), in_flight=LAUNCHING),
        memory(launched(), run=run(complete=False), wish=Wish.DOWN, creates=(intent(superseded=True, accepted=True),)),
        "Wait",
    ),
    case(
        "PREEMPTED while a launch is under way: dead is dead",
        evidence(seen(node("PREEMPTED"), QUIET), in_flight=LAUNCHING),
        memory(launched(dead=True), run=run(complete=False)),
        "Delete dead",
    ),
    case(
        "UNKNOWN while a launch is under way",
        evidence(seen(node("UNKNOWN"), QUIET), in_flight=LAUNCHING),
        memory(launched(), run=run(complete=False)),
        "Wait",
    ),
    case(
        "REPAIRING for long while a launch is under way",
        evidence(seen(node("REPAIRING"), QUIET, progress=NO_PROGRESS), in_flight=LAUNCHING),
        memory(launched(), run=run(complete=False)),
        "Wait",
    ),
]

PARTIAL = memory(launched(), run=run(complete=False))
RUNS = [
    case("trains", evidence(seen(node(), running())), TRAINS, "Wait"),
    case("trains, unknown to the store", evidence(seen(node(), running())), FRESH, "Settle run adopted"),
    case(
        "a newer run than the store knows", evidence(seen(node(), running(token(0, 5)))), TRAINS, "Settle run adopted"
    ),
    case("partial launch", evidence(seen(node(), (running(), QUIET))), PARTIAL, "Stop infrastructure"),
    case("the whole launch arrived", evidence(seen(node(), running())), PARTIAL, "Settle run complete"),
    case("nothing of the launch arrived", evidence(seen(node(), QUIET)), PARTIAL, "Launch"),
    case(
        "a launch that a person has to mend, within the setup budget",
        evidence(seen(node(), QUIET)),
        replace(PARTIAL, books={"setup": Book(5, 5)}),
        "Launch",
    ),
    case(
        "a launch that a person has to mend, setup budget spent",
        evidence(seen(node(), QUIET)),
        replace(PARTIAL, books={"setup": Book(6, 6, after(60), "WANDB_API_KEY is not set")}),
        "Stop gives up",
    ),
    case(
        "nothing of the launch arrived, patience",
        evidence(seen(node(), QUIET)),
        replace(PARTIAL, books={"infrastructure": Book(2, 2, after(9))}),
        "Wait",
    ),
    case("restart is asked for", evidence(seen(node(), running())), replace(TRAINS, restart_asked=True), "Stop"),
    case(
        "replace is asked for",
        evidence(seen(node(), running())),
        replace(TRAINS, replace_asked=True),
        "Stop then asked",
    ),
    case(
        "replace is asked for, and it is stopped",
        evidence(seen(node(), ended(143)), looked={f"stop:{name_of(0)}": ago(5)}),
        replace(TRAINS, replace_asked=True),
        "Delete asked",
    ),
    case(
        "first two signals are noted",
        evidence(seen(node(), running(), progress=Progress(token(), 2, ago(5), timedelta(seconds=5), ago(5)))),
        memory(launched(), run=run(progressed=False)),
        "Settle run progressed",
    ),
    case(
        "setup served: its book begins anew",
        evidence(seen(node(), running())),
        replace(TRAINS, books={"setup": Book(3, 3)}),
        "Settle setup done",
    ),
    case(
        "setup goes on on one worker",
        evidence(seen(node(), (running(), running(phase=Phase.SETUP)))),
        replace(TRAINS, books={"setup": Book(3, 3)}),
        "Wait",
    ),
    case("setup goes on", evidence(seen(node(), running(phase=Phase.SETUP), progress=NO_PROGRESS)), TRAINS, "Wait"),
    case(
        "setup does not end",
        evidence(seen(node(), running(phase=Phase.SETUP), phase_since=ago(hours=1), progress=NO_PROGRESS)),
        TRAINS,
        "Stop setup",
    ),
    case(
        "no first step of a job that was edited, and may tell of none",
        evidence(seen(node(), running(), phase_since=ago(hours=2), progress=NO_PROGRESS)),
        replace(TRAINS, run=run(progressed=False, job="new"), step=100, step_job="old"),
        "Wait",
    ),
    case(
        "no first step of a job that told of steps before",
        evidence(seen(node(), running(), phase_since=ago(hours=2), progress=NO_PROGRESS)),
        replace(TRAINS, run=run(progressed=False, job="old"), step=100, step_job="old"),
        "Stop stall",
    ),
    case(
        "no first step",
        evidence(seen(node(), running(), phase_since=ago(hours=1), progress=NO_PROGRESS)),
        replace(TRAINS, step=5),
        "Stop stall",
    ),
    case(
        "no signal ever: no verdict",
        evidence(seen(node(), running(), phase_since=ago(hours=9), progress=NO_PROGRESS)),
        TRAINS,
        "Wait",
    ),
    case(
        "stalled since before the daemon was started again",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(hours=1), None, ago(hours=1)))),
        TRAINS,
        "Stop stall",
    ),
    case(
        "one signal since the daemon was started again",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(minutes=50), None, ago(minutes=50)))),
        TRAINS,
        "Wait",
    ),
    case(
        "its signals come rarely, as an earlier process saw",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(hours=2), None, ago(hours=2)))),
        memory(launched(), run=run(gap_seconds=1200.0)),
        "Wait",
    ),
    case(
        "one signal only, and no earlier process saw two",
        evidence(seen(node(), running(), progress=Progress(token(), 1, ago(hours=2), None, ago(hours=2)))),
        memory(launched(), run=run(progressed=False)),
        "Wait",
    ),
    case("stalled", evidence(seen(node(), running(), progress=STALE)), TRAINS, "Stop stall"),
    case(
        "ten times the median gap",
        evidence(
            seen(
                node(),
                running(),
                progress=Progress(token(), 9, ago(minutes=99), timedelta(minutes=10), ago(minutes=99)),
            )
        ),
        memory(launched(), run=run()),
        "Wait",
    ),
    case(
        "stalled twice",
        evidence(seen(node(), running(), progress=STALE)),
        memory(launched(stalls=1), run=run()),
        "Stop stall then judged",
    ),
    case(
        "stalled twice, on-demand",
        evidence(seen(node(tier=ON_DEMAND), running(), progress=STALE)),
        memory(launched(stalls=1), run=run()),
        "Stop stall",
    ),
]

EXITS = [
    case("setup failed, within 30 s", evidence(over(1, 20, failure=Failure.SETUP)), TRAINS, "Wait"),
    case("setup failed", evidence(over(1, failure=Failure.SETUP)), TRAINS, "Stop setup"),
    case("the clone failed", evidence(over(1, failure=Failure.FETCH)), TRAINS, "Stop setup"),
    case("a secret is missing", evidence(over(1, failure=Failure.SECRET_MISSING)), TRAINS, "Stop setup"),
    case("setup failed, said by the phase", evidence(over(1, phase=Phase.SETUP)), TRAINS, "Stop setup"),
    case(
        "setup budget spent",
        evidence(over(1, failure=Failure.SETUP)),
        replace(TRAINS, books={"setup": Book(5, 5)}),
        "Stop setup gives up",
    ),
    case("crashed", evidence(over(1, failure=Failure.CRASH)), TRAINS, "Stop crash"),
    case(
        "crash budget spent",
        evidence(over(1, failure=Failure.CRASH, progress=NO_PROGRESS)),
        replace(TRAINS, books={"crash": Book(10, 10)}, step=9),
        "Stop crash gives up",
    ),
    case(
        "crash budget spent, but it got further",
        evidence(over(1, failure=Failure.CRASH, step=20)),
        replace(TRAINS, books={"crash": Book(10, 10)}, step=9),
        "Stop crash",
    ),
    case("crashed, one worker silent a moment ago", evidence(over(1, answering_since=ago(9))), TRAINS, "Wait"),
    case("a dirty host", evidence(over(1, failure=Failure.DIRTY_HOST)), TRAINS, "Stop infrastructure then dead"),
    case(
        "a dirty host, node after node",
        evidence(over(1, failure=Failure.DIRTY_HOST)),
        replace(TRAINS, books={"infrastructure": Book(3, 3)}),
        "Stop crash then dead",
    ),
    case(
        "a dirty host, node after node, crash budget spent",
        evidence(over(1, failure=Failure.DIRTY_HOST)),
        replace(TRAINS, books={"infrastructure": Book(3, 3), "crash": Book(10, 10)}),
        "Stop crash gives up",
    ),
    case(
        "a dirty host that is on-demand",
        evidence(over(1, failure=Failure.DIRTY_HOST, what=node(tier=ON_DEMAND))),
        TRAINS,
        "Stop crash",
    ),
    case("gone without a status", evidence(over(None)), TRAINS, "Stop infrastructure"),
    case("gone without a status, seen once", evidence(over(None, 0)), TRAINS, "Wait"),
    case(
        "gone without a status again and again",
        evidence(over(None)),
        memory(launched(infrastructure=3), run=run()),
        "Stop infrastructure then judged",
    ),
    case(
        "one worker knows nothing of the run",
        evidence(seen(node(), (running(), QUIET), ended_since=ago(60))),
        TRAINS,
        "Stop infrastructure",
    ),
    case("signalled: the cloud's word", evidence(over(0, 20, signalled=True)), TRAINS, "Wait"),
    case("signalled, and no word: not done", evidence(over(0, 60, signalled=True)), TRAINS, "Stop infrastructure"),
    case("preempted is TRUE: 5 min for the cloud's word", evidence(over(1, 200, preempted=True)), TRAINS, "Wait"),
    case("preempted is TRUE, and no word", evidence(over(1, 301, preempted=True)), TRAINS, "Stop infrastructure"),
    case("exit 0: sure in a minute", evidence(over(0, 59)), TRAINS, "Wait"),
    case("exit 0: done", evidence(over(0, 61)), TRAINS, "Settle ended"),
    case(
        "exit 0 just now, a sibling's long ago: sure in a minute",
        evidence(seen(node(), ended(0), ended_since=ago(hours=1), phase_since=ago(10))),
        TRAINS,
        "Wait",
    ),
    case("exit 0: restart", evidence(over(0, 61)), TRAINS, "Stop", slot(on_success=OnSuccess.RESTART)),
    case(
        "exit 0 on worker 0, non-zero elsewhere",
        evidence(seen(node(), (ended(0), ended(1)), ended_since=ago(61))),
        TRAINS,
        "Stop crash",
    ),
    case(
        "exit 0 on worker 0, a sibling is silent at 60 s",
        evidence(
            seen(
                node(), (ended(0), SILENT), ended_since=ago(61), silent_since=ago(50), silent_probes=9, progress=STALE
            ),
            elsewhere_answers=True,
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0 elsewhere, worker 0 goes on",
        evidence(seen(node(), (running(), ended(0)), ended_since=ago(hours=1))),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0 elsewhere, worker 0 stands still after one last step",
        evidence(
            seen(
                node(),
                (running(), ended(0)),
                ended_since=ago(hours=1),
                progress=Progress(token(), 9, ago(minutes=31), timedelta(seconds=15), ago(minutes=31)),
            )
        ),
        TRAINS,
        "Stop infrastructure",
    ),
    case(
        "exit 0 elsewhere, worker 0 tells of nothing but its log grows",
        evidence(
            seen(node(), (running(), ended(0)), ended_since=ago(hours=1), progress=Progress(token(), 0, life=ago(60)))
        ),
        TRAINS,
        "Wait",
    ),
    case(
        "exit 0 elsewhere, worker 0 stands still",
        evidence(seen(node(), (running(), ended(0)), ended_since=ago(hours=1), progress=STALE)),
        TRAINS,
        "Stop infrastructure",
    ),
]

STOPPING = memory(launched(), run=run(stop_why="it crashed"))
STOPPED = {f"stop:{name_of(0)}": ago(5)}
LONG_STOPPED = {f"stop:{name_of(0)}": ago(11)}
STOPS = [
    case("a stop was intended before a restart", evidence(seen(node(), running())), STOPPING, "Stop"),
    case(
        "a stop is under way",
        evidence(seen(node(), running()), in_flight=frozenset({f"stop:{name_of(0)}"})),
        STOPPING,
        "Wait",
    ),
    case("stopped and quiet", evidence(seen(node(), ended(143)), looked=STOPPED), STOPPING, "Settle run stopped"),
    case("stopped and not quiet yet", evidence(seen(node(), running()), looked=STOPPED), STOPPING, "Wait"),
    case(
        "chips not free after SIGKILL",
        evidence(seen(node(), running()), looked=LONG_STOPPED),
        memory(launched(), run=run(stop_why="it crashed", stops=1, stuck=True)),
        "Delete dead",
    ),
    case(
        "a worker did not hear the stop",
        evidence(seen(node(), running()), looked=LONG_STOPPED),
        memory(launched(), run=run(stop_why="it crashed", stops=1)),
        "Stop",
    ),
    case(
        "a worker did not hear the stop, five times",
        evidence(seen(node(), running()), looked=LONG_STOPPED),
        memory(launched(), run=run(stop_why="it crashed", stops=5)),
        "Delete dead",
    ),
    case(
        "chips not free after SIGKILL, on-demand",
        evidence(seen(node(tier=ON_DEMAND), running()), looked=LONG_STOPPED),
        STOPPING,
        "Stop",
    ),
    case(
        "stopped to be deleted",
        evidence(seen(node(), running()), looked=STOPPED),
        memory(launched(), run=run(stop_why="sick", then_delete="judged")),
        "Delete judged",
    ),
    case(
        "stopped, quiet, to be deleted",
        evidence(seen(node(), ended(143))),
        memory(launched(), run=run(stop_why="sick", then_delete="judged", stopped=True)),
        "Delete judged",
    ),
    case(
        "stopped: launched again",
        evidence(seen(node(), ended(143))),
        memory(launched(), run=run(stopped=True)),
        "Launch",
    ),
]

OLD = node(tier=Provisioning.PREEMPTIBLE, born=before(hours=23, minutes=46))
DAY = [
    case(
        "preemptible before 23 h 45",
        evidence(seen(node(tier=Provisioning.PREEMPTIBLE, born=before(hours=23)), running())),
        memory(launched(), run=run()),
        "Wait",
    ),
    case(
        "preemptible, and born when nothing was: nobody knows its age",
        evidence(seen(node(tier=Provisioning.PREEMPTIBLE, born=datetime(1970, 1, 1, tzinfo=UTC)), running())),
        TRAINS,
        "Wait",
    ),
    case(
        "preemptible at 23 h 45: a notice",
        evidence(seen(OLD, running(checkpoint=5))),
        memory(launched(), run=run()),
        "Notice",
    ),
    case(
        "preemptible, no newer checkpoint",
        evidence(seen(OLD, running(checkpoint=5))),
        memory(launched(noticed_at=before(60), noticed_checkpoint=5), run=run()),
        "Wait",
    ),
    case(
        "preemptible, a newer checkpoint",
        evidence(seen(OLD, running(checkpoint=6))),
        memory(launched(noticed_at=before(60), noticed_checkpoint=5), run=run()),
        "Stop then finished",
    ),
    case(
        "spot lives on",
        evidence(seen(node(born=before(hours=30)), running())),
        memory(launched(), run=run()),
        "Wait",
    ),
]

ASKED = replace(TRAINS, wish=Wish.DOWN)
DONE = replace(TRAINS, end=End.DONE, end_why="exit 0", ended_at=before(60))
FAILED = replace(
    TRAINS, end=End.FAILED, end_why="crashes", ended_at=before(60), run=run(stop_why="crashes", stopped=True)
)
WISHES = [
    case("paused", evidence(seen(node("PREEMPTED"))), replace(TRAINS, wish=Wish.PAUSED), "Wait"),
    case("down: stop first", evidence(seen(node(), running())), ASKED, "Stop then asked"),
    case("down: then delete", evidence(seen(node(), ended(143)), looked=STOPPED), ASKED, "Delete asked"),
    case(
        "down while a launch is under way",
        evidence(seen(node(), QUIET), in_flight=frozenset({f"launch:{name_of(0)}"})),
        ASKED,
        "Wait",
    ),
    case("down before its workers were asked: stop first", evidence(seen(node())), ASKED, "Stop then asked"),
    case("down before anything was launched", evidence(seen(node())), replace(FRESH, wish=Wish.DOWN), "Delete asked"),
    case(
        "down while its workers are not listed",
        evidence(seen(node(endpoints=1), running())),
        ASKED,
        "Delete asked",
    ),
    case(
        "down while a create is under way",
        evidence(looked={f"poll:{name_of(3)}": ago(1)}),
        memory(creates=(intent(3, accepted=True, operation="op"),), wish=Wish.DOWN),
        "Settle create superseded",
    ),
    case(
        "down, its zone is dark",
        evidence(seen(node(), running(), dark=True), unreachable=frozenset({US})),
        ASKED,
        "Wait",
    ),
    case("down, nothing is left", evidence(), memory(wish=Wish.DOWN), "Wait"),
    case("done: delete", evidence(seen(node(), ended(0))), DONE, "Delete finished"),
    case("done: siblings are stopped first", evidence(seen(node(), (ended(0), running()))), DONE, "Stop then finished"),
    case("done: keep", evidence(seen(node(), ended(0))), DONE, "Wait", slot(on_success=OnSuccess.KEEP)),
    case(
        "done: keep, siblings are stopped, and nothing is to be deleted",
        evidence(seen(node(), (ended(0), running()))),
        DONE,
        "Stop",
        slot(on_success=OnSuccess.KEEP),
    ),
    case(
        "done: keep, siblings were told to stop",
        evidence(seen(node(), (ended(0), running())), looked=STOPPED),
        DONE,
        "Wait",
        slot(on_success=OnSuccess.KEEP),
    ),
    case("failed: what still runs is stopped", evidence(seen(node(), running())), FAILED, "Stop"),
    case("done: not asked since a restart", evidence(seen(node())), DONE, "Wait", slot(on_success=OnSuccess.KEEP)),
    case(
        "done: under way", evidence(seen(node(), ended(0)), in_flight=frozenset({f"stop:{name_of(0)}"})), DONE, "Wait"
    ),
    case("done: no new node", evidence(), memory(end=End.DONE), "Wait"),
    case("done: its zone is dark", evidence(seen(node(), ended(0), dark=True)), DONE, "Wait"),
    case("failed: kept for a look", evidence(seen(node(), ended(143))), FAILED, "Wait person"),
    case(
        "failed: looked at",
        evidence(seen(node(), ended(143))),
        replace(FAILED, ended_at=before(hours=1)),
        "Delete finished",
    ),
    case(
        "done while a create is open",
        evidence(looked={f"poll:{name_of(3)}": ago(1)}),
        memory(creates=(intent(3, accepted=True, operation="op"),), end=End.DONE),
        "Settle create superseded",
    ),
]

BOTH = memory(launched(0), launched(1), run=run(1))
SEVERAL = [
    case(
        "both train: the older launch stays",
        evidence(seen(node(), running()), seen(node(number=1), running(token(1)))),
        replace(BOTH, run=None),
        "Stop then surplus",
    ),
    case(
        "one trains: it stays",
        evidence(seen(node(), running()), seen(node(number=1), QUIET)),
        BOTH,
        "Delete surplus",
    ),
    case(
        "none trains: the newest stays",
        evidence(seen(node(), QUIET), seen(node(number=1), QUIET)),
        BOTH,
        "Delete surplus",
    ),
    case(
        "both train, and the stop of the younger was not heard by all: the older still stays",
        evidence(
            seen(node(), running()), seen(node(number=1), running(token(1))), looked={f"stop:{name_of(1)}": ago(9)}
        ),
        replace(BOTH, run=run(1, stop_why="pod-0-a0 holds this slot", then_delete="surplus")),
        "Delete surplus",
    ),
    case(
        "one never answers, others do",
        evidence(seen(node(number=1), running(token(1))), silent(7), elsewhere_answers=True),
        memory(launched(0, answered=False), launched(1), run=run(1)),
        "Delete judged",
    ),
    case(
        "one is silent for a moment",
        evidence(seen(node(number=1), running(token(1))), silent(1), elsewhere_answers=True),
        BOTH,
        "Wait",
    ),
    case("one refuses our key", evidence(seen(node(), REFUSED, refused_since=ago(99)), NEXT), BOTH, "PushKey"),
    case("one is dark", evidence(seen(node(), running(), dark=True), seen(node(number=1), QUIET)), BOTH, "Wait"),
    case("one was not asked yet", evidence(seen(node(), running()), seen(node(number=1))), BOTH, "Wait"),
    case(
        "after a lost store a person confirms",
        evidence(seen(node(), QUIET), seen(node(number=1), QUIET), store_lost=True),
        BOTH,
        "Wait person",
    ),
    case(
        "something is under way on one",
        evidence(seen(node(), QUIET), seen(node(number=1), QUIET), in_flight=frozenset({f"launch:{name_of(0)}"})),
        BOTH,
        "Wait",
    ),
]


@pytest.mark.parametrize(
    ("what", "known", "declared", "want"),
    [
        *CREATES,
        *DELETES,
        *BOOTS,
        *FENCES,
        *SILENCE,
        *HEALTH,
        *IN_FLIGHT,
        *RUNS,
        *EXITS,
        *STOPS,
        *DAY,
        *WISHES,
        *SEVERAL,
    ],
)
def test_a_row_of_the_table(what: Evidence, known: Memory, declared: Slot, want: str) -> None:
    action = act(what, known, declared)
    assert told(action) == want, action
    assert action.why


def test_the_last_quarter_of_a_preemptible_day_is_waited_for() -> None:
    known = memory(launched(), run=run())
    today = seen(node(tier=Provisioning.PREEMPTIBLE, born=before(hours=23, minutes=40)), running(checkpoint=5))
    waits = act(evidence(today), known)
    assert isinstance(waits, Wait)
    assert waits.wall == after(minutes=5)
    noticed = memory(launched(noticed_at=before(60), noticed_checkpoint=5), run=run())
    waits = act(evidence(seen(OLD, running(checkpoint=5))), noticed)
    assert isinstance(waits, Wait)
    assert waits.observed is not None, "no report says that a newer checkpoint makes a difference"
    assert waits.observed - HERE.observed <= timedelta(seconds=15)


def test_of_two_runs_the_one_whose_stop_failed_is_deleted() -> None:
    younger = replace(BOTH, run=run(1, stop_why="surplus", then_delete="surplus"))
    both = evidence(
        seen(node(), running()), seen(node(number=1), running(token(1))), looked={f"stop:{name_of(1)}": ago(9)}
    )
    action = act(both, younger)
    assert isinstance(action, Delete)
    assert action.key.name == name_of(1)
