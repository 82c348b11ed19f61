"""Decisions: creates, wherever they stand, and deletes that were begun."""

from __future__ import annotations

from dataclasses import replace

from tests.kits.decisions import (
    PATIENT,
    UNREACHABLE,
    case,
    table,
)
from tests.kits.evidence import (
    EU,
    QUIET,
    TRAINS,
    US,
    after,
    ago,
    before,
    evidence,
    going,
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
from tpucare.model.actions import ANY_CREATE, EffectKind
from tpucare.model.causes import Reason
from tpucare.model.lifecycles import CreateState, NodeStatus
from tpucare.model.memory import DesiredState, PlaceMemory, Refusal

POOR = replace(slot(), lacks="secret WANDB_API_KEY is not set")

CREATES = [
    case("no node, no open intent: create", evidence(), memory(), "Create"),
    case("a secret is not set: no node that would lie idle", evidence(), memory(), "Wait person", POOR),
    case("a secret is not set: what trains is left alone", evidence(seen(node(), running())), TRAINS, "Wait", POOR),
    case(
        "a node in DELETING counts as none",
        evidence(seen(node("DELETING"), state_since=ago(minutes=5))),
        memory(launched()),
        "Create",
    ),
    case(
        "an open intent: no second create",
        evidence(),
        memory(creates=(intent(state=CreateState.RUNNING, operation="op"),)),
        "GetOperation",
    ),
    case(
        "an open intent that was polled just now",
        evidence(ended_effects={EffectKind.GET_OPERATION.of(name_of(0)): ago(1)}),
        memory(creates=(intent(state=CreateState.RUNNING, operation="op"),)),
        "Wait",
    ),
    case(
        "an open intent that is fresh: a stockout comes within two minutes, and is polled for often",
        evidence(ended_effects={EffectKind.GET_OPERATION.of(name_of(0)): ago(3)}),
        memory(creates=(intent(state=CreateState.RUNNING, operation="op"),)),
        "GetOperation",
    ),
    case(
        "an open intent that is not fresh",
        evidence(ended_effects={EffectKind.GET_OPERATION.of(name_of(0)): ago(3)}),
        memory(creates=(intent(state=CreateState.RUNNING, operation="op", asked_at=before(minutes=3)),)),
        "Wait",
    ),
    case("the call is under way", evidence(in_flight=frozenset({ANY_CREATE})), memory(creates=(intent(),)), "Wait"),
    case(
        "its answer was lost: the same name again",
        evidence(),
        memory(creates=(intent(state=CreateState.ANSWER_LOST, retry_at=before(1)),)),
        "Create again",
    ),
    case(
        "its answer was lost: not yet",
        evidence(),
        memory(creates=(intent(state=CreateState.ANSWER_LOST, retry_at=after(1)),)),
        "Wait",
    ),
    case(
        "its answer was lost, and its place is no longer declared",
        evidence(),
        memory(creates=(intent(state=CreateState.ANSWER_LOST),)),
        "Record create superseded",
        slot(place(EU)),
    ),
    case(
        "refused when it was sent again: it could still arrive",
        evidence(),
        memory(creates=(intent(state=CreateState.IN_DOUBT, refused="Quota", asked_at=before(60)),)),
        "Wait",
    ),
    case(
        "refused when it was sent again: it could have arrived until now",
        evidence(),
        memory(creates=(intent(state=CreateState.IN_DOUBT, refused="Quota", asked_at=before(91)),)),
        "GetNode",
    ),
    case(
        "operation over, node not listed: GetNode tells",
        evidence(),
        memory(creates=(intent(state=CreateState.AWAITED),)),
        "GetNode",
    ),
    case(
        "operation not ours to read: its node may not be visible yet",
        evidence(),
        memory(creates=(intent(state=CreateState.UNREADABLE, asked_at=before(89)),)),
        "Wait",
    ),
    case(
        "operation not ours to read: GetNode tells",
        evidence(),
        memory(creates=(intent(state=CreateState.UNREADABLE, asked_at=before(91)),)),
        "GetNode",
    ),
    case(
        "unanswered at boot_timeout",
        evidence(
            creates_since={name_of(0): ago(minutes=31)}, ended_effects={EffectKind.GET_OPERATION.of(name_of(0)): ago(1)}
        ),
        memory(creates=(intent(state=CreateState.RUNNING, operation="op"),)),
        "Record create superseded",
    ),
    case(
        "its answers are lost until boot_timeout: another place may serve",
        evidence(creates_since={name_of(0): ago(minutes=31)}),
        memory(creates=(intent(state=CreateState.ANSWER_LOST, retry_at=before(1)),)),
        "Record create superseded",
    ),
    case(
        "superseded, and comes after all, before any other",
        evidence(seen(node("READY"))),
        memory(
            past(),
            creates=(
                intent(abandoned=True, state=CreateState.AWAITED),
                intent(1, state=CreateState.RUNNING, operation="op"),
            ),
        ),
        "Record create kept",
    ),
    case(
        "superseded, is being made after all, and no other is",
        evidence(seen(node("CREATING"))),
        memory(past(), creates=(intent(abandoned=True, state=CreateState.AWAITED),)),
        "Record create kept",
    ),
    case(
        "superseded, is being made after all, and so is another",
        evidence(seen(node("CREATING")), seen(node("CREATING", 1))),
        memory(
            past(),
            past(1),
            creates=(
                intent(abandoned=True, state=CreateState.AWAITED),
                intent(1, state=CreateState.RUNNING, operation="op"),
            ),
        ),
        "Delete surplus",
    ),
    case(
        "superseded, serves after all, and another is being made",
        evidence(seen(node("READY")), seen(node("CREATING", 1))),
        memory(
            past(),
            past(1),
            creates=(
                intent(abandoned=True, state=CreateState.AWAITED),
                intent(1, state=CreateState.RUNNING, operation="op"),
            ),
        ),
        "Record create kept",
    ),
    case(
        "superseded, serves after all, and another trains that still shows CREATING",
        evidence(seen(node("READY")), seen(node("CREATING", 1), running(token(1)))),
        memory(past(), launched(1), run=run(1), creates=(intent(abandoned=True, state=CreateState.AWAITED),)),
        "Delete surplus",
    ),
    case(
        "superseded, and comes after another",
        evidence(seen(node("READY")), seen(node("READY", 1))),
        memory(past(), past(1), creates=(intent(abandoned=True, state=CreateState.AWAITED),)),
        "Delete surplus",
    ),
    case(
        "superseded, and comes while the slot goes down",
        evidence(seen(node("READY"))),
        memory(past(), creates=(intent(abandoned=True, state=CreateState.AWAITED),), wish=DesiredState.DOWN),
        "Delete surplus",
    ),
    case(
        "superseded, and was asked to go",
        evidence(seen(node("READY"))),
        memory(
            past(delete=going(before(90), next_at=before(30))),
            creates=(intent(abandoned=True, state=CreateState.AWAITED),),
        ),
        "Delete asked",
    ),
    case(
        "superseded and still to come: the next create goes on",
        evidence(
            ended_effects={EffectKind.GET_OPERATION.of(name_of(0)): ago(1)}, creates_since={name_of(0): ago(minutes=40)}
        ),
        memory(creates=(intent(abandoned=True, state=CreateState.RUNNING, operation="op"),)),
        "Create",
    ),
    case(
        "superseded for an hour: is its node there?",
        evidence(
            ended_effects={EffectKind.GET_OPERATION.of(name_of(0)): ago(1)}, creates_since={name_of(0): ago(minutes=60)}
        ),
        memory(creates=(intent(abandoned=True, state=CreateState.RUNNING, operation="op"),)),
        "GetNode",
    ),
    case(
        "its operation failed, its workers answer: the workers win",
        evidence(seen(node("CREATING"), QUIET)),
        memory(past(), creates=(intent(state=CreateState.FAILED, refused="no more capacity"),)),
        "Launch",
    ),
    case(
        "its operation failed, listed CREATING and silent for less than 60 s",
        evidence(seen(node("CREATING")), ended_effects={EffectKind.FAILED.of(name_of(0)): ago(40)}),
        memory(past(), creates=(intent(state=CreateState.FAILED, refused="no more capacity"),)),
        "Wait",
    ),
    case(
        "its operation failed, listed CREATING and silent for 60 s",
        evidence(seen(node("CREATING")), ended_effects={EffectKind.FAILED.of(name_of(0)): ago(61)}),
        memory(past(), creates=(intent(state=CreateState.FAILED, refused="no more capacity"),)),
        "Delete dead",
    ),
    case(
        "a place in its backoff",
        evidence(),
        memory(places={place().key: PlaceMemory(1, after(30), Refusal.NO_CAPACITY)}),
        "Wait",
    ),
    case(
        "every place refused twice: reported as stopped",
        evidence(),
        memory(places={place().key: PlaceMemory(0, after(30), Refusal.HUMAN, blocked=True, refusals=2)}),
        "Wait person",
    ),
    case("another owner's node of our name", evidence(foreign=(node(owner="them"),)), memory(), "Create"),
    case(
        "a lost store, and a zone that has not answered yet",
        evidence(store_lost=True, complete=False),
        memory(),
        "Wait",
        PATIENT,
    ),
    case(
        "a lost store, and a zone stays unreachable", evidence(store_lost=True, complete=False), memory(), "Wait person"
    ),
    case("a lost store, all zones seen", evidence(store_lost=True), memory(), "Create"),
    case(
        "maybe a backup, and an unreachable zone",
        evidence(store_old=True, unanswered=frozenset({US})),
        memory(),
        "Wait",
        PATIENT,
    ),
    case(
        "maybe a backup, and a zone stays unreachable",
        evidence(store_old=True, unanswered=frozenset({US})),
        memory(),
        "Wait person",
    ),
    case(
        "maybe a backup, and another zone is unreachable",
        evidence(store_old=True, unanswered=UNREACHABLE),
        memory(),
        "Create",
    ),
    case("maybe a backup, all zones seen", evidence(store_old=True), memory(), "Create"),
    case("a store in use, and an unreachable zone", evidence(complete=False), memory(), "Create"),
    case(
        "remembered and not seen, its zone unreachable",
        evidence(unreachable_since={US: ago(60)}),
        memory(launched()),
        "Wait",
    ),
    case("remembered and not in the listing: GetNode tells", evidence(), memory(launched()), "GetNode"),
    case("404 for a node that was there", evidence(seen(node(), running(), listed=False)), TRAINS, "GetNode"),
    case(
        "404 for a node that was there: asked just now",
        evidence(seen(node(), running(), listed=False), ended_effects={EffectKind.GET_NODE.of(name_of(0)): ago(2)}),
        TRAINS,
        "Wait",
    ),
]

DELETES = [
    case(
        "a delete is repeated until the node is not found",
        evidence(seen(node("DELETING"))),
        memory(launched(delete=going(before(99), next_at=before(1), reason=Reason.ASKED))),
        "Delete asked",
    ),
    case(
        "and not before its time",
        evidence(seen(node("DELETING"))),
        memory(launched(delete=going(before(9), next_at=after(51))), creates=(intent(3, state=CreateState.AWAITED),)),
        "GetNode",
    ),
    case(
        "nor while it is under way",
        evidence(seen(node("PREEMPTED")), in_flight=frozenset({EffectKind.DELETE.of(name_of(0)), ANY_CREATE})),
        memory(launched(status=NodeStatus.DEAD)),
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


test_what_comes_of_creates = table(CREATES)


test_what_comes_of_deletes = table(DELETES)
