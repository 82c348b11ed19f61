"""What memory becomes: by what is seen, by what is about to be done, by what came of it, and after a kill."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evidence_kit import (
    FRESH,
    NOW,
    TRAINS,
    US,
    after,
    before,
    intent,
    launched,
    memory,
    name_of,
    node,
    past,
    place,
    run,
    token,
)
from tpucare.actions import (
    Action,
    Create,
    Delete,
    Fact,
    Launch,
    Look,
    Notice,
    Poll,
    PushKey,
    Reason,
    Settle,
    Stop,
    Vouch,
)
from tpucare.errors import (
    AlreadyExists,
    AnswerLost,
    AuthRefused,
    CommandFailed,
    ConfigError,
    LostRace,
    NeedsPerson,
    NoCapacity,
    NodeGone,
    OwnCredentials,
    PreemptedMeanwhile,
    QuotaExceeded,
    RateLimited,
    Transient,
    WorkerSilent,
)
from tpucare.memory import Book, BookName, CreateIntent, End, Memory, PlaceMemory, Wish
from tpucare.model import LaunchResult, NodeState, Operation, StopResult
from tpucare.remember import absorb, answered, changed_meanwhile, gone, intend, recover, remember

PLACE = place().key
RNG = random.Random(4)


def create(number: int = 10, **more: object) -> Create:
    return Create(name_of(number), number, place(), "why", **more)  # type: ignore[arg-type]


def delete(number: int = 0, reason: Reason = Reason.DEAD, **more: bool) -> Delete:
    what = node(number=number)
    return Delete(what.key, what.id, what.create_time, "why", reason, **more)


def launch(number: int = 0, n: int = 1) -> Launch:
    what = node(number=number)
    return Launch(what.key, what.id, token(number, n), n, "why")


def stop(number: int = 0, n: int = 1, **more: object) -> Stop:
    what = node(number=number)
    return Stop(what.key, what.id, token(number, n), "why", **more)  # type: ignore[arg-type]


def poll(number: int = 10) -> Poll:
    return Poll(name_of(number), "op", "why")


def look(number: int = 0) -> Look:
    return Look(node(number=number).key, "why")


def asked(known: Memory, action: Action, now: datetime = NOW) -> Memory:
    return intend(known, action, now, RNG)


def came(known: Memory, action: Action, result: object = None, error: Exception | None = None) -> Memory:
    return remember(known, action, result, error, NOW, RNG)


def vanished(known: Memory, name: str) -> Memory:
    return gone(known, name, NOW, RNG)


# --- creates: rule 5 -------------------------------------------------------------------------------------------------


def test_a_create_is_on_record_before_it_is_asked_for_and_takes_a_new_number() -> None:
    known = asked(memory(next_number=10), create(10))
    told = known.create(name_of(10))
    assert told is not None
    assert (told.tries, told.accepted, told.lost, told.zone, told.place) == (1, False, False, US, PLACE)
    assert known.next_number == 11
    assert known.recent_creates == (NOW,)


def test_creates_of_the_last_minute_are_kept_for_the_budget() -> None:
    known = asked(memory(recent_creates=(before(61), before(59), after(5))), create(10))
    assert known.recent_creates == (before(59), NOW)


def test_a_resend_keeps_the_number_and_counts_the_tries() -> None:
    known = asked(memory(creates=(intent(10, lost=True),)), create(10, resend=True))
    told = known.create(name_of(10))
    assert told is not None
    assert (told.tries, told.lost) == (2, True)
    assert known.next_number == 11


ACCEPTED = memory(creates=(intent(10, accepted=True, operation="op"),))
OPEN = memory(creates=(intent(10),))


@pytest.mark.parametrize(
    ("error", "closed", "lost"),
    [
        (NoCapacity("x"), True, None),
        (QuotaExceeded("x"), True, None),
        (RateLimited("x"), True, None),
        (NeedsPerson("x"), True, None),
        (OwnCredentials("x"), True, None),
        (LostRace("x"), True, None),
        (AnswerLost("x"), False, True),
        (Transient("x"), False, True),
        (ValueError("x"), False, True),
        (AlreadyExists("x"), False, False),
    ],
)
def test_a_create_closes_when_its_call_is_refused_and_not_when_it_may_have_arrived(
    error: Exception, closed: bool, lost: bool | None
) -> None:
    known = came(OPEN, create(10), error=error)
    told = known.create(name_of(10))
    assert (told is None) == closed
    if told is not None:
        assert told.lost is lost
        assert told.accepted is not lost
    blamed = known.place(PLACE)
    assert (blamed.kind != "") == closed


def test_a_refusal_of_a_resend_leaves_the_first_call_in_doubt() -> None:
    known = came(OPEN, create(10, resend=True), error=QuotaExceeded("quota"))
    told = known.create(name_of(10))
    assert told is not None
    assert told.lost
    assert told.refused == "quota"
    assert known.place(PLACE).kind == "quota"


def test_an_accepted_create_clears_quota_and_person_at_its_place() -> None:
    blamed = OPEN.with_place(PLACE, PlaceMemory(3, after(60), "human", blocked=True, refusals=2))
    known = came(blamed, create(10), Operation("op"))
    told = known.create(name_of(10))
    assert told is not None
    assert (told.accepted, told.operation) == (True, "op")
    assert (known.place(PLACE).kind, known.place(PLACE).refusals, known.place(PLACE).retry_at) == ("", 0, None)


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    assert came(memory(), create(10), Operation("op")) == memory()
    assert came(memory(), poll(), Operation("op", done=True)) == memory()


def test_an_intent_closes_when_the_id_of_its_node_is_seen_beyond_creating() -> None:
    ready = absorb(ACCEPTED, node("READY", 10))
    assert ready.creates == ()
    assert ready.node(name_of(10)) is not None
    assert ready.place(PLACE).last_success is not None
    seen = ready.node(name_of(10))
    assert seen is not None
    assert (seen.launched, seen.place) == (False, PLACE)


def test_while_creating_the_operation_has_still_to_tell() -> None:
    assert absorb(ACCEPTED, node("CREATING", 10)).create(name_of(10)) is not None


def test_a_superseded_intent_stays_until_its_node_is_gone() -> None:
    known = asked(ACCEPTED, Settle(Fact.CREATE_SUPERSEDED, "why", name_of(10)))
    assert known.place(PLACE).retry_at is not None, "another place goes first"
    known = absorb(known, node("READY", 10))
    told = known.create(name_of(10))
    assert told is not None
    assert told.superseded
    over = came(known, poll(), Operation("op", done=True))
    assert over.create(name_of(10)) is None or over.create(name_of(10)).superseded  # type: ignore[union-attr]
    assert asked(memory(), Settle(Fact.CREATE_SUPERSEDED, "why", name_of(10))) == memory()
    down = asked(replace(ACCEPTED, wish=Wish.DOWN), Settle(Fact.CREATE_SUPERSEDED, "taken down", name_of(10)))
    assert down.places == {}, "a person's wish is no fault of the place"


def test_a_create_that_was_given_up_and_serves_first_holds_the_slot() -> None:
    known = absorb(asked(ACCEPTED, Settle(Fact.CREATE_SUPERSEDED, "why", name_of(10))), node("READY", 10))
    known = known.with_create(replace(ACCEPTED.creates[0], name=name_of(11), number=11))
    kept = asked(known, Settle(Fact.CREATE_KEPT, "it came first", name_of(10)))
    assert {intent.name: intent.superseded for intent in kept.creates} == {name_of(10): False, name_of(11): True}
    assert came(kept, poll(), Operation("op", done=True)).create(name_of(10)) is None
    assert kept.node(name_of(10)) == known.node(name_of(10))


@pytest.mark.parametrize("error", [None, NodeGone("forgotten")])
def test_an_operation_that_is_over_closes_the_intent_of_a_node_that_was_seen(error: Exception | None) -> None:
    known = absorb(ACCEPTED, node("CREATING", 10))
    result = Operation("op", done=True) if error is None else None
    assert came(known, poll(), result, error).creates == ()
    unseen = came(ACCEPTED, poll(), result, error).create(name_of(10))
    assert unseen is not None
    assert unseen.operation == ""


def test_an_operation_that_goes_on_or_could_not_be_read_changes_nothing() -> None:
    assert came(ACCEPTED, poll(), Operation("op")) == ACCEPTED
    assert came(ACCEPTED, poll(), None, AnswerLost("x")) == ACCEPTED


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoCapacity("no more capacity"), "no capacity"),
        (Transient("internal"), "transient"),
        (PreemptedMeanwhile("state PREEMPTED"), ""),
        (LostRace("x"), ""),
        (ValueError("x"), ""),
    ],
)
def test_a_failed_operation_is_booked_at_its_place(error: Exception, kind: str) -> None:
    unseen = came(ACCEPTED, poll(), Operation("op", True, error))
    told = unseen.create(name_of(10))
    assert told is not None
    assert (told.failed, told.operation, told.accepted, told.refused) == (False, "", True, str(error))
    assert unseen.place(PLACE).kind == kind
    listed = came(absorb(ACCEPTED, node("CREATING", 10)), poll(), Operation("op", True, error)).create(name_of(10))
    assert listed is not None
    assert listed.failed


@pytest.mark.parametrize("open_intent", [intent(10), intent(10, lost=True), intent(10, accepted=True)])
def test_a_node_that_is_listed_before_its_create_was_answered_leaves_the_intent_open(open_intent: CreateIntent) -> None:
    """Else the operation that says "no capacity" would be nobody's, and the same place asked again at once."""
    known = absorb(memory(creates=(open_intent,)), node("CREATING", 10))
    known = came(known, create(10), Operation("op"))
    told = known.create(name_of(10))
    assert told is not None
    assert told.operation == "op"


def test_a_node_that_vanishes_while_creating_is_its_places_fault_and_no_preemption() -> None:
    known = vanished(absorb(memory(creates=(intent(10, lost=True),)), node("CREATING", 10)), name_of(10))
    assert (known.creates, known.nodes) == ((), ())
    assert known.book(BookName.PREEMPTION).total == 0
    assert known.place(PLACE).kind == "no capacity"
    refused = intent(10, failed=True, operation="", refused="no more capacity")
    told = vanished(absorb(memory(creates=(refused,)), node("CREATING", 10)), name_of(10))
    assert told.place(PLACE).kind == "", "the operation has told already"
    assert vanished(memory(creates=(intent(10, lost=True),)), name_of(10)).places == {}


@pytest.mark.parametrize(
    ("region_wide", "held", "kind"),
    [
        (False, {"held_in_zone": True}, "own quota"),
        (True, {"held_in_region": True}, "own quota of the region"),
        (True, {"held_in_zone": True}, "quota"),
        (False, {}, "quota"),
    ],
)
def test_a_quota_that_our_own_dead_node_holds_is_known_wherever_the_refusal_arrives(
    region_wide: bool, held: dict[str, bool], kind: str
) -> None:
    error = QuotaExceeded("quota", region_wide=region_wide)
    known = asked(memory(), create(10, **held))
    assert came(known, create(10, **held), error=error).place(PLACE).kind == kind
    accepted = came(known, create(10, **held), Operation("op"))
    assert came(accepted, poll(), Operation("op", True, error)).place(PLACE).kind == kind


def test_not_found_closes_an_intent_whose_operation_is_over_or_unknown() -> None:
    assert vanished(ACCEPTED, name_of(10)).creates == ACCEPTED.creates
    for open_intent in (intent(10, accepted=True), intent(10, lost=True), intent(10, operation="op", failed=True)):
        assert vanished(memory(creates=(open_intent,)), name_of(10)).creates == ()


def test_a_lost_create_that_getnode_finds_is_accepted() -> None:
    known = came(memory(creates=(intent(0, lost=True),)), look(), node("CREATING"))
    told = known.create(name_of(0))
    assert told is not None
    assert (told.lost, told.accepted) == (False, True)
    assert came(ACCEPTED, look(10), node("CREATING", 10)) == ACCEPTED
    assert came(FRESH, look(), node()) == FRESH
    assert came(FRESH, look(), None, AnswerLost("x")) == FRESH


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["create", "accept", "refuse", "lose", "seen", "foreign", "gone", "restart", "delete"]),
            st.integers(0, 30),
        ),
        max_size=40,
    )
)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_no_create_number_comes_twice(events: list[tuple[str, int]]) -> None:
    known, used = memory(next_number=0), set[int]()
    for event, number in events:
        last = max(used, default=0)
        match event:
            case "create":
                assert known.next_number not in used
                used.add(known.next_number)
                known = asked(known, create(known.next_number))
            case "accept":
                known = came(known, create(last), Operation("op"))
            case "refuse":
                known = came(known, create(last), error=NoCapacity("x"))
            case "lose":
                known = came(known, create(last), error=AnswerLost("x"))
            case "seen":
                known = absorb(known, node("READY", last))
            case "foreign":
                known = absorb(known, node("READY", number))
                used.add(number)
            case "gone":
                known = vanished(known, name_of(number))
            case "restart":
                known = recover(known)
            case "delete":
                known = asked(known, delete(number))


def test_a_new_node_is_what_replace_asked_for() -> None:
    asks = memory(replace_asked=True)
    assert not asked(asks, create(10)).replace_asked
    resent = asked(replace(asks, creates=(intent(10, lost=True),)), create(10, resend=True))
    assert resent.replace_asked, "the request that is sent again may be older than the wish"


# --- what is seen ----------------------------------------------------------------------------------------------------


def test_a_node_that_nobody_asked_for_may_have_been_launched() -> None:
    known = absorb(memory(), node("READY", 12))
    told = known.node(name_of(12))
    assert told is not None
    assert told.launched
    assert known.next_number == 13


def test_a_node_of_another_id_under_the_same_name_is_another_node() -> None:
    known = absorb(memory(launched(0, dead=True, answered=True)), replace(node(), id=7))
    told = known.node(name_of(0))
    assert told is not None
    assert (told.id, told.dead, told.answered, told.launched) == (7, False, False, True)


@pytest.mark.parametrize("state", [NodeState.PREEMPTED, NodeState.TERMINATED])
def test_a_preemption_is_free_and_proves_the_node_dead_for_good(state: NodeState) -> None:
    known = absorb(TRAINS, node(state))
    known = absorb(known, node(NodeState.DELETING))
    told = known.node(name_of(0))
    assert told is not None
    assert told.dead
    assert known.book(BookName.PREEMPTION) == Book(0, 1, None, f"{name_of(0)} {state.name}")
    assert absorb(known, node(state)).book(BookName.PREEMPTION).total == 1


def test_a_foreign_name_takes_no_number() -> None:
    strange = replace(node(), key=node().key._replace(name="something"))
    assert absorb(memory(), strange).next_number == 10


def test_workers_that_answered_acquit_their_place() -> None:
    known = memory(past(answered=False), places={PLACE: PlaceMemory(unanswered_nodes=1)})
    after_all = answered(known, name_of(0))
    assert after_all.place(PLACE).unanswered_nodes == 0
    assert answered(after_all, name_of(0)) is after_all
    assert answered(known, "other") is known
    assert answered(memory(past(answered=False)), name_of(0)).places == {}


def test_gone_ends_the_run_and_books_what_nobody_asked_for() -> None:
    known = vanished(replace(TRAINS, restart_asked=True), name_of(0))
    assert known.nodes == ()
    assert known.run is not None
    assert known.run.stopped
    assert not known.restart_asked
    assert known.book(BookName.PREEMPTION).total == 1
    ours = vanished(memory(launched(delete_asked_at=NOW)), name_of(0))
    assert ours.book(BookName.PREEMPTION).total == 0
    assert vanished(memory(), "other") == memory()


# --- deletes ---------------------------------------------------------------------------------------------------------


def test_a_delete_is_asked_again_after_60_s_then_twice_that() -> None:
    known, waits = TRAINS, []
    for _ in range(7):
        known = asked(known, delete())
        told = known.node(name_of(0))
        assert told is not None
        assert told.delete_next_at is not None
        waits.append((told.delete_next_at - NOW).total_seconds() / 60)
    assert waits == [1, 2, 4, 8, 16, 16, 16]


def test_the_first_reason_of_a_delete_is_kept_and_quiet_once_is_quiet() -> None:
    known = asked(TRAINS, delete(reason=Reason.JUDGED, quiet=True))
    known = asked(known, replace(delete(reason=Reason.JUDGED), why="asked again"))
    told = known.node(name_of(0))
    assert told is not None
    assert (told.delete_why, told.delete_quiet, told.delete_reason) == ("why", True, "judged")


def test_a_confirmation_says_nothing_of_a_node_that_is_deleted_after_it() -> None:
    """`tpucare confirm` lets the brake go too: that is no word on whether what it deletes still trains."""
    known = asked(replace(TRAINS, fence_confirmed=True), delete(reason=Reason.JUDGED))
    assert not known.fence_confirmed
    known = asked(replace(known, fence_confirmed=True), delete(reason=Reason.JUDGED))
    assert known.fence_confirmed, "this one was given while the node was being deleted already"


def test_a_delete_of_a_node_that_memory_does_not_know() -> None:
    known = asked(memory(creates=(intent(0),)), delete())
    told = known.node(name_of(0))
    assert told is not None
    assert told.launched
    assert known.creates == ()


@pytest.mark.parametrize(
    ("error", "accepted", "wait"),
    [
        (None, True, 60),
        (LostRace("queue the operation"), False, 60),
        (RateLimited("per minute"), False, 60),
        (AnswerLost("x"), False, 5),
        (NeedsPerson("x"), False, 5),
    ],
)
def test_what_comes_of_a_delete(error: Exception | None, accepted: bool, wait: float) -> None:
    known = came(asked(TRAINS, delete()), delete(), None, error)
    told = known.node(name_of(0))
    assert told is not None
    assert told.delete_accepted is accepted
    assert told.delete_next_at == after(wait)


def test_a_delete_that_was_accepted_once_is_not_hurried_by_a_failure() -> None:
    known = came(asked(TRAINS, delete()), delete())
    assert came(known, delete(), None, AnswerLost("x")) == known
    assert came(memory(), delete()) == memory()
    assert came(known, delete(), None, NodeGone("404")).nodes == ()


def test_a_delete_of_another_node_is_void() -> None:
    known = changed_meanwhile(asked(TRAINS, delete(reason=Reason.JUDGED)), name_of(0))
    told = known.node(name_of(0))
    assert told is not None
    assert (told.delete_asked_at, told.delete_why, told.delete_next_at) == (None, "", None)
    assert changed_meanwhile(memory(), "other") == memory()


def test_two_nodes_that_never_answered_block_their_place() -> None:
    known = memory(past(0, answered=False), past(1, answered=False))
    known = asked(known, delete(0, Reason.JUDGED, unanswered=True))
    assert not known.place(PLACE).blocked
    known = asked(known, delete(1, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).blocked
    assert "OS Login" in known.place(PLACE).reason


def test_a_place_whose_nodes_never_answer_is_asked_hourly_though_its_creates_succeed() -> None:
    known = memory(*(past(number, answered=False) for number in range(4)))
    for number in range(3):
        known = asked(known, delete(number, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).refusals == 2
    assert known.place(PLACE).retry_at == after(hours=1)
    known = came(known.with_create(intent(10)), create(10), Operation("op"))
    known = absorb(known, node("READY", 10))
    known = asked(known, delete(3, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).refusals == 3
    assert known.place(PLACE).retry_at == after(hours=1)
    assert answered(known, name_of(10)).place(PLACE).refusals == 0


def test_a_verdict_given_again_after_a_restart_counts_one_node_once() -> None:
    known = asked(memory(past(answered=False)), delete(0, Reason.JUDGED, unanswered=True))
    known = asked(recover(known), delete(0, Reason.JUDGED, unanswered=True))
    assert known.place(PLACE).unanswered_nodes == 1


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_launch_is_on_record_before_it_begins_and_counts_nodes_not_runs() -> None:
    first = asked(replace(FRESH, attempts=4, restart_asked=True, fence_confirmed=True), launch())
    assert first.run is not None
    assert (first.run.token, first.run.complete, first.attempts) == (token(), False, 5)
    assert (first.restart_asked, first.fence_confirmed) == (False, False)
    told = first.node(name_of(0))
    assert told is not None
    assert (told.launched, told.attempt) == (True, 5)
    again = asked(first, launch(0, 2))
    assert again.attempts == 5
    assert asked(memory(), launch()).run is not None


@pytest.mark.parametrize(
    ("workers", "book"),
    [
        ((None, WorkerSilent("x")), BookName.INFRASTRUCTURE),
        ((AuthRefused("x"), None), BookName.INFRASTRUCTURE),
        ((None, CommandFailed("x", 1)), BookName.SETUP),
        ((ConfigError("no secret"), WorkerSilent("x")), BookName.SETUP),
    ],
)
def test_a_launch_that_is_not_whole_is_booked(workers: tuple[Exception | None, ...], book: BookName) -> None:
    known = asked(FRESH, launch())
    failed = came(known, launch(), LaunchResult(workers))
    assert failed.book(book).total == 1
    assert failed.run is not None
    assert not failed.run.complete


def test_a_launch_that_is_whole_or_broke_down_or_is_nobodys() -> None:
    known = asked(FRESH, launch())
    whole = came(known, launch(), LaunchResult((None, None)))
    assert whole.run is not None
    assert whole.run.complete
    assert came(known, launch(), None, WorkerSilent("x")).book(BookName.INFRASTRUCTURE).reason == "x"
    assert came(known, launch(), None, None).book(BookName.INFRASTRUCTURE).reason == "launch failed"
    assert came(known, launch(0, 2), LaunchResult((None,))) == known
    assert came(memory(), launch(), LaunchResult((None,))) == memory()


def test_a_stop_books_why_and_keeps_how_far_the_run_got() -> None:
    known = asked(TRAINS, stop(book=BookName.CRASH, step=7, checkpoint=5))
    assert known.run is not None
    assert (known.run.stop_why, known.run.stopped) == ("why", False)
    assert (known.step, known.checkpoint) == (7, 5)
    book = known.book(BookName.CRASH)
    assert (book.failures, book.total) == (1, 1)
    assert book.retry_at is not None
    assert timedelta(seconds=5) <= book.retry_at - NOW <= timedelta(seconds=10)
    again = asked(known, stop(book=BookName.CRASH, advanced=True)).book(BookName.CRASH)
    assert (again.failures, again.total) == (1, 2)


def test_a_stop_that_gives_up_ends_the_slot() -> None:
    known = asked(TRAINS, stop(book=BookName.CRASH, gives_up=True))
    assert (known.end, known.end_why, known.ended_at) == (End.FAILED, "why", NOW)


def test_a_stop_of_what_is_not_our_run_is_remembered_as_a_run() -> None:
    known = asked(memory(past()), stop(0, 0, then=Reason.JUDGED))
    assert known.run is not None
    assert (known.run.token, known.run.then_delete) == (token(0, 0), "judged")


def test_stalls_and_infrastructure_are_counted_on_the_node_too() -> None:
    known = asked(TRAINS, stop(book=BookName.STALL))
    known = asked(known, stop(book=BookName.INFRASTRUCTURE))
    told = known.node(name_of(0))
    assert told is not None
    assert (told.stalls, told.infrastructure) == (1, 1)
    assert known.book(BookName.INFRASTRUCTURE).retry_at is None, "the first of a row waits for nothing"
    known = asked(known, stop(book=BookName.INFRASTRUCTURE))
    assert known.book(BookName.INFRASTRUCTURE).retry_at is not None
    known = asked(known, stop(book=BookName.INFRASTRUCTURE, advanced=True))
    told = known.node(name_of(0))
    assert told is not None
    assert told.infrastructure == 1
    assert asked(memory(), stop(book=BookName.STALL)).nodes == ()


def test_what_comes_of_a_stop() -> None:
    known = asked(TRAINS, stop())
    quiet = came(known, stop(), StopResult((True, True)))
    assert quiet.run is not None
    assert quiet.run.stopped
    loud = came(known, stop(), StopResult((True, WorkerSilent("x"))))
    assert loud.run is not None
    assert (loud.run.stopped, loud.run.stuck, loud.run.stops) == (False, False, 1)
    stuck = came(known, stop(), StopResult((True, False)))
    assert stuck.run is not None
    assert (stuck.run.stopped, stuck.run.stuck) == (False, True)
    assert came(known, stop(), None, WorkerSilent("x")) == known


def test_a_stop_on_one_node_says_nothing_of_the_run_adopted_on_another() -> None:
    known = memory(launched(0), launched(1), run=run(1))
    assert came(known, stop(0), StopResult((True, True))) == known
    assert came(memory(), stop(0), StopResult((True, True))) == memory()


def test_facts_are_written_down() -> None:
    adopted = asked(FRESH, Settle(Fact.RUN_ADOPTED, "why", name_of(0), token(0, 3), 3))
    assert adopted.run is not None
    assert (adopted.run.token, adopted.run.complete, adopted.attempts) == (token(0, 3), True, 2)
    again = asked(adopted, Settle(Fact.RUN_ADOPTED, "why", name_of(0), token(0, 4), 4))
    assert again.attempts == 2
    assert asked(memory(), Settle(Fact.RUN_ADOPTED, "why", name_of(0), token(), 1)).attempts == 0
    for fact, field in (
        (Fact.RUN_COMPLETE, "complete"),
        (Fact.RUN_STOPPED, "stopped"),
        (Fact.RUN_PROGRESSED, "progressed"),
    ):
        known = memory(past(), run=run(complete=False, progressed=False))
        told = asked(known, Settle(fact, "why", name_of(0), token())).run
        assert told is not None
        assert getattr(told, field)
        assert asked(memory(), Settle(fact, "why")).run is None
    tired = replace(
        TRAINS, step=5, books={name: Book(3, 9, after(60)) for name in ("setup", "infrastructure", "crash")}
    )
    rested = asked(tired, Settle(Fact.SETUP_DONE, "why", name_of(0)))
    assert rested.book(BookName.SETUP) == Book(0, 9)
    assert rested.book(BookName.INFRASTRUCTURE).failures == 3
    assert asked(rested, Settle(Fact.SETUP_DONE, "why", name_of(0))) == rested
    for step, failures in ((5, 3), (6, 0)):
        further = asked(tired, Settle(Fact.RUN_PROGRESSED, "why", name_of(0), step=step))
        assert further.book(BookName.INFRASTRUCTURE).failures == failures
    slow = asked(TRAINS, Settle(Fact.RUN_PROGRESSED, "why", name_of(0), gap=timedelta(minutes=2))).run
    assert slow is not None
    assert slow.gap_seconds == 120
    ended = asked(TRAINS, Settle(Fact.ENDED, "exit 0", end=End.DONE, step=9))
    assert (ended.end, ended.end_why, ended.ended_at, ended.step) == (End.DONE, "exit 0", NOW, 9)


def test_a_notice_and_a_key_are_noted_on_the_node() -> None:
    notice = Notice(node().key, token(), "save", "why", checkpoint=5)
    told = asked(TRAINS, notice).node(name_of(0))
    assert told is not None
    assert (told.noticed_at, told.noticed_checkpoint) == (NOW, 5)
    assert asked(memory(), notice) == memory()
    key = PushKey(node().key, "why")
    told = came(TRAINS, key).node(name_of(0))
    assert told is not None
    assert told.keyed
    assert came(TRAINS, key, None, AnswerLost("x")) == TRAINS
    assert came(TRAINS, key, None, NodeGone("x")).nodes == ()
    assert came(memory(), key) == memory()


@pytest.mark.parametrize("action", [look(), poll(), Vouch(node().key, "why"), PushKey(node().key, "why")])
def test_what_only_asks_has_no_intent(action: Action) -> None:
    assert asked(TRAINS, action) is TRAINS


def test_what_only_tells_leaves_nothing() -> None:
    assert came(TRAINS, Vouch(node().key, "why"), {}) is TRAINS
    assert came(TRAINS, Notice(node().key, token(), "save", "why")) is TRAINS


# --- a killed process ------------------------------------------------------------------------------------------------


def test_after_a_kill_an_unanswered_create_may_have_arrived() -> None:
    told = recover(OPEN).create(name_of(10))
    assert told is not None
    assert told.lost
    assert recover(ACCEPTED) == ACCEPTED


def test_after_a_kill_a_verdict_that_was_not_accepted_is_judged_anew() -> None:
    known = asked(TRAINS, delete(reason=Reason.JUDGED))
    told = recover(known).node(name_of(0))
    assert told is not None
    assert told.delete_asked_at is None
    accepted = recover(came(known, delete())).node(name_of(0))
    assert accepted is not None
    assert accepted.delete_asked_at == NOW
    assert accepted.delete_next_at is None


@pytest.mark.parametrize(
    "successor",
    [{"creates": (intent(1, accepted=True),)}, {"nodes": (launched(0), past(1))}],
    ids=["asked for", "there"],
)
def test_after_a_kill_a_verdict_stands_when_the_slot_has_gone_on(successor: dict[str, Any]) -> None:
    known = recover(asked(replace(TRAINS, **successor), delete(reason=Reason.JUDGED)))
    told = known.node(name_of(0))
    assert told is not None
    assert told.delete_asked_at == NOW
    assert told.delete_next_at is None


def test_after_a_kill_what_a_person_asked_for_goes_on() -> None:
    told = recover(asked(TRAINS, delete(reason=Reason.ASKED))).node(name_of(0))
    assert told is not None
    assert told.delete_asked_at == NOW
    assert recover(TRAINS) == TRAINS
