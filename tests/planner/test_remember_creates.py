"""What memory becomes by creates: rule 5, from the intent to what the operation says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.evidence import FRESH, NOW, TRAINS, US, after, before, intent, memory, name_of, node
from tests.kits.remembering import ACCEPTED, OPEN, PLACE, asked, came, create, delete, look, poll, vanished
from tpucare.model.actions import Fact, Record
from tpucare.model.errors import (
    AlreadyExists,
    AnswerLost,
    LostRace,
    NeedsPerson,
    NoCapacity,
    NodeGone,
    OwnCredentials,
    PreemptedMeanwhile,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import CreateIntent, DesiredState, FailureKind, PlaceMemory, Refusal
from tpucare.model.resources import Operation
from tpucare.planner.remember import apply_node, recover


def test_a_create_is_on_record_before_it_is_asked_for_and_takes_a_new_number() -> None:
    known = asked(memory(next_number=10), create(10))
    told = known.create(name_of(10))
    assert told is not None
    assert (told.tries, told.state, told.zone, told.place) == (1, CreateState.SENT, US, PLACE)
    assert known.next_number == 11
    assert known.recent_creates == (NOW,)


def test_creates_of_the_last_minute_are_kept_for_the_budget() -> None:
    """
    A restart forgot the creates of the last minute, so the create budget could be exceeded. Each slot remembers them
    for a minute.
    """
    known = asked(memory(recent_creates=(before(61), before(59), after(5))), create(10))
    assert known.recent_creates == (before(59), NOW)


def test_a_resend_keeps_the_number_and_counts_the_tries() -> None:
    known = asked(memory(creates=(intent(10, state=CreateState.ANSWER_LOST),)), create(10, resend=True))
    told = known.create(name_of(10))
    assert told is not None
    assert (told.tries, told.state) == (2, CreateState.ANSWER_LOST)
    assert known.next_number == 11


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
    """
    INTERNAL and ABORTED (Transient here) do not say whether the create took effect. Like a lost answer they keep the
    create open, and it is sent again under the same name at the same place.
    """
    known = came(OPEN, create(10), error=error)
    told = known.create(name_of(10))
    assert (told is None) == closed
    if told is not None:
        assert told.state is (CreateState.ANSWER_LOST if lost else CreateState.AWAITED)
    blamed = known.place(PLACE)
    assert (blamed.kind != "") == closed


def test_a_refusal_of_a_resend_leaves_the_first_call_in_doubt() -> None:
    """
    The first call used up the quota and its answer was lost, so the second call was refused for quota, which closed the
    create. Such a refusal closes nothing: GetNode has to answer NOT_FOUND 60 s after the deadline of the first call.
    """
    known = came(OPEN, create(10, resend=True), error=QuotaExceeded("quota"))
    told = known.create(name_of(10))
    assert told is not None
    assert (told.state, told.refused) == (CreateState.IN_DOUBT, "quota")
    assert known.place(PLACE).kind == "quota"


def test_an_accepted_create_clears_quota_and_person_at_its_place() -> None:
    blamed = OPEN.with_place(PLACE, PlaceMemory(3, after(60), Refusal.HUMAN, blocked=True, refusals=2))
    known = came(blamed, create(10), Operation("op"))
    told = known.create(name_of(10))
    assert told is not None
    assert (told.state, told.operation) == (CreateState.RUNNING, "op")
    assert (known.place(PLACE).kind, known.place(PLACE).refusals, known.place(PLACE).retry_at) == ("", 0, None)


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    assert came(memory(), create(10), Operation("op")) == memory()
    assert came(memory(), poll(), Operation("op", done=True)) == memory()


def test_an_intent_closes_when_the_id_of_its_node_is_seen_beyond_creating() -> None:
    ready = apply_node(ACCEPTED, node("READY", 10))
    assert ready.creates == ()
    assert ready.node(name_of(10)) is not None
    assert ready.place(PLACE).last_success is not None
    seen = ready.node(name_of(10))
    assert seen is not None
    assert (seen.launched, seen.place) == (False, PLACE)


def test_while_creating_the_operation_has_still_to_tell() -> None:
    assert apply_node(ACCEPTED, node("CREATING", 10)).create(name_of(10)) is not None


def test_a_superseded_intent_stays_until_its_node_is_gone() -> None:
    known = asked(ACCEPTED, Record(Fact.CREATE_SUPERSEDED, "why", name_of(10)))
    assert known.place(PLACE).retry_at is not None, "another place goes first"
    known = apply_node(known, node("READY", 10))
    told = known.create(name_of(10))
    assert told is not None
    assert told.abandoned
    over = came(known, poll(), Operation("op", done=True))
    assert over.create(name_of(10)) is None or over.create(name_of(10)).abandoned  # type: ignore[union-attr]
    assert asked(memory(), Record(Fact.CREATE_SUPERSEDED, "why", name_of(10))) == memory()
    down = asked(replace(ACCEPTED, wish=DesiredState.DOWN), Record(Fact.CREATE_SUPERSEDED, "taken down", name_of(10)))
    assert down.places == {}, "a person's wish is no fault of the place"


def test_a_create_that_was_given_up_and_serves_first_holds_the_slot() -> None:
    known = apply_node(asked(ACCEPTED, Record(Fact.CREATE_SUPERSEDED, "why", name_of(10))), node("READY", 10))
    known = known.with_create(replace(ACCEPTED.creates[0], name=name_of(11), number=11))
    kept = asked(known, Record(Fact.CREATE_KEPT, "it came first", name_of(10)))
    assert {intent.name: intent.abandoned for intent in kept.creates} == {name_of(10): False, name_of(11): True}
    assert came(kept, poll(), Operation("op", done=True)).create(name_of(10)) is None
    assert kept.node(name_of(10)) == known.node(name_of(10))


@pytest.mark.parametrize("error", [None, NodeGone("forgotten")])
def test_an_operation_that_is_over_closes_the_intent_of_a_node_that_was_seen(error: Exception | None) -> None:
    known = apply_node(ACCEPTED, node("CREATING", 10))
    result = Operation("op", done=True) if error is None else None
    assert came(known, poll(), result, error).creates == ()
    unseen = came(ACCEPTED, poll(), result, error).create(name_of(10))
    assert unseen is not None
    assert unseen.operation == ""


def test_an_operation_that_goes_on_or_could_not_be_read_changes_nothing() -> None:
    assert came(ACCEPTED, poll(), Operation("op")) == ACCEPTED
    assert came(ACCEPTED, poll(), None, AnswerLost("x")) == ACCEPTED


def test_an_operation_that_may_not_be_read_leaves_the_word_to_getnode() -> None:
    """A role without `tpu.operations.get`: the create is not forgotten, and its place waits if nothing comes of it."""
    unread = came(ACCEPTED, poll(), error=NeedsPerson("denied"))
    told = unread.create(name_of(10))
    assert told is not None
    assert (told.operation, told.state) == ("", CreateState.UNREADABLE)
    assert apply_node(unread, node("CREATING", 10)).create(name_of(10)) == told
    assert apply_node(unread, node("READY", 10)).creates == ()
    over = came(unread, look(10), error=NodeGone("x"))
    assert (over.creates, over.place(PLACE).kind) == ((), "no capacity")
    assert "may not be read: denied" in over.place(PLACE).reason
    vanished_again = came(apply_node(unread, node("CREATING", 10)), look(10), error=NodeGone("x"))
    assert (vanished_again.creates, vanished_again.nodes) == ((), ())
    assert vanished_again.place(PLACE).failures == 1
    given_up = unread.with_create(replace(told, abandoned=True))
    assert came(given_up, look(10), error=NodeGone("x")).places == {}, "its place was told when it was given up"


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
    assert (told.state, told.operation, told.refused) == (CreateState.REFUSED, "", str(error))
    assert unseen.place(PLACE).kind == kind
    listed = came(apply_node(ACCEPTED, node("CREATING", 10)), poll(), Operation("op", True, error)).create(name_of(10))
    assert listed is not None
    assert listed.state is CreateState.FAILED


@pytest.mark.parametrize(
    "open_intent", [intent(10), intent(10, state=CreateState.ANSWER_LOST), intent(10, state=CreateState.AWAITED)]
)
def test_a_node_that_is_listed_before_its_create_was_answered_leaves_the_intent_open(open_intent: CreateIntent) -> None:
    """Else the operation that says "no capacity" would be nobody's, and the same place asked again at once."""
    known = apply_node(memory(creates=(open_intent,)), node("CREATING", 10))
    known = came(known, create(10), Operation("op"))
    told = known.create(name_of(10))
    assert told is not None
    assert told.operation == "op"


def test_a_node_that_vanishes_while_creating_is_its_places_fault_and_no_preemption() -> None:
    """
    A stockout that was reported after its node had been listed counted as a preemption, without a pause. The result of
    the operation counts, whenever the node was seen.
    """
    known = vanished(
        apply_node(memory(creates=(intent(10, state=CreateState.ANSWER_LOST),)), node("CREATING", 10)), name_of(10)
    )
    assert (known.creates, known.nodes) == ((), ())
    assert known.counter(FailureKind.PREEMPTION).total == 0
    assert known.place(PLACE).kind == "no capacity"
    refused = intent(10, state=CreateState.FAILED, refused="no more capacity")
    told = vanished(apply_node(memory(creates=(refused,)), node("CREATING", 10)), name_of(10))
    assert told.place(PLACE).kind == "", "the operation has told already"
    assert vanished(memory(creates=(intent(10, state=CreateState.ANSWER_LOST),)), name_of(10)).places == {}


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
    for open_intent in (
        intent(10, state=CreateState.AWAITED),
        intent(10, state=CreateState.ANSWER_LOST),
        intent(10, state=CreateState.FAILED),
    ):
        assert vanished(memory(creates=(open_intent,)), name_of(10)).creates == ()


def test_a_lost_create_that_getnode_finds_is_accepted() -> None:
    known = came(memory(creates=(intent(0, state=CreateState.ANSWER_LOST),)), look(), node("CREATING"))
    told = known.create(name_of(0))
    assert told is not None
    assert told.state is CreateState.AWAITED
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
@settings(max_examples=150)
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
                known = apply_node(known, node("READY", last))
            case "foreign":
                known = apply_node(known, node("READY", number))
                used.add(number)
            case "gone":
                known = vanished(known, name_of(number))
            case "restart":
                known = recover(known)
            case "delete":
                known = asked(known, delete(number))


def test_a_confirmation_says_nothing_of_a_node_that_has_become_an_elder_since() -> None:
    said = replace(TRAINS, fence_confirmed=True)
    assert not asked(said, create(10)).fence_confirmed
    open_before = replace(said, creates=(intent(10, state=CreateState.ANSWER_LOST),))
    assert asked(open_before, create(10, resend=True)).fence_confirmed, "it was asked for before that was said"


def test_a_new_node_is_what_replace_asked_for() -> None:
    asks = memory(replace_asked=True)
    assert not asked(asks, create(10)).replace_asked
    resent = asked(replace(asks, creates=(intent(10, state=CreateState.ANSWER_LOST),)), create(10, resend=True))
    assert resent.replace_asked, "the request that is sent again may be older than the wish"
