"""Where to ask next, how long to stay away, and how many creates a minute: rules of the design's §6, as tables."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.evidence import EU, HERE, NOW, US, after, ago, before, evidence, later, memory, place, slot
from tpucare.model.errors import (
    AnswerLost,
    CloudError,
    LostRace,
    NeedsPerson,
    NoCapacity,
    OwnCredentials,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from tpucare.model.evidence import Case, Evidence, Holding, Moment, Timers, holding_of
from tpucare.model.memory import Memory, PlaceMemory, Refusal
from tpucare.model.resources import Place, Provisioning
from tpucare.planner.placement import (
    Choice,
    CreateBudget,
    block_place,
    choose_place,
    end_quota_refusal,
    end_refusals,
    holds_quota,
    in_turn,
    record_create,
    record_node_up,
    record_refusal,
    reset_unanswered,
)

FIRST, SECOND = place(US), place(EU)
SISTER = place("us-central1-b")
DEAD_IN_US = frozenset({Holding(US, "v3", False, "pod")})
NOTHING = PlaceMemory()
RNG = random.Random(5)


def remembering(*pasts: tuple[Place, PlaceMemory]) -> Memory:
    return memory(places={where.key: past for where, past in pasts})


def chosen(known: Memory, what: Evidence | None = None, *places: Place) -> Choice:
    return choose_place(Case(slot(*(places or (FIRST, SECOND))), what or evidence(), known, Timers(HERE)))


def turned_down(error: CloudError, past: PlaceMemory = NOTHING, *, held: bool = False) -> PlaceMemory:
    return record_refusal(past, error, held=held, now=NOW, rng=RNG)


# --- which place -----------------------------------------------------------------------------------------------------


def test_the_first_place_in_order_that_may_be_asked() -> None:
    assert chosen(memory()).place is FIRST
    assert chosen(remembering((FIRST, PlaceMemory(1, after(1), Refusal.NO_CAPACITY)))).place is SECOND
    assert chosen(remembering((FIRST, PlaceMemory(1, before(1), Refusal.NO_CAPACITY)))).place is FIRST


@pytest.mark.parametrize(
    ("asked", "round_from", "want"),
    [
        ([-1, -1, -1], 0, "abc"),
        ([5, 3, 4], 6, "bca"),
        ([5, -1, 4], 6, "bca"),
        ([5, 4, 2], 4, "cba"),
        ([-1, 2, -1], 0, "acb"),
    ],
    ids=["declared order breaks ties", "longest ago", "never", "asked in this round", "the round goes on"],
)
def test_of_alike_places_the_one_not_asked_for_longest_goes_first(asked: list[int], round_from: int, want: str) -> None:
    alike = [place(f"us-central1-{letter}") for letter in "abc"]
    pasts = {where.key: PlaceMemory(asked=number) for where, number in zip(alike, asked, strict=True)}
    turns = in_turn(alike, memory(places=pasts, round_from=round_from))
    assert "".join(where.zone[-1] for where in turns) == want


def test_what_the_declaration_prefers_goes_first_in_each_round_and_what_it_does_not_still_has_its_turn() -> None:
    spot, paid = [place(US), place(EU)], [place(US, Provisioning.ON_DEMAND)]
    known, turns = memory(), []
    for number in range(6):
        (first, *_) = in_turn([*spot, *paid], known)
        known = record_create(known, first.key, number)
        turns.append("paid" if first in paid else first.zone)
    assert turns == [US, EU, "paid", US, EU, "paid"]
    known = record_node_up(replace(known, next_number=6), paid[0].key, NOW)
    assert in_turn([*spot, *paid], known)[0] is spot[0], "a node that came up ends the round"


@settings(max_examples=200)
@given(st.data(), st.integers(2, 9))
def test_no_open_place_starves_while_a_slot_has_no_node(data: st.DataObject, count: int) -> None:
    """
    Places were asked in declared order, and a pause after a stockout is shorter than a round over more than four
    places: the later ones were never asked, for days. Places take turns by the numbers of creates, which no clock can
    set back.
    """
    kinds = data.draw(st.lists(st.sampled_from(Provisioning), min_size=count, max_size=count))
    places = tuple(place(f"us-central1-{'abcdefghi'[index]}", kind) for index, kind in enumerate(kinds))
    known, now, waiting, rng = memory(), HERE, Counter[str](), random.Random(count)
    for number in range(6 * count):
        now = later(timedelta(seconds=data.draw(st.sampled_from([1, 15, 45, 300]))), now)
        choice = choose_place(Case(slot(*places), evidence(), known, Timers(now)))
        if choice.place is None:
            continue
        key = choice.place.key
        opened = [one.key for one in places if known.place(one.key).retry_at in (None, *before_or_at(now, known))]
        waiting = Counter({other: waiting[other] + 1 for other in opened if other != key})
        assert all(asks <= 2 * count for asks in waiting.values())
        known = record_create(known, key, number)
        error = data.draw(st.sampled_from([NoCapacity("8"), Transient("13"), QuotaExceeded("8"), None]))
        if error is not None:
            past = record_refusal(known.place(key), error, held=False, now=now.wall, rng=rng)
            known = known.with_place(key, past)


def before_or_at(now: Moment, known: Memory) -> list[datetime]:
    instants = [past.retry_at for past in known.places.values() if past.retry_at is not None]
    return [instant for instant in instants if instant <= now.wall]


def test_where_no_place_may_be_asked_each_says_why() -> None:
    choice = chosen(
        remembering((FIRST, PlaceMemory(1, after(9), Refusal.NO_CAPACITY, "gone")), (SECOND, PlaceMemory(1, after(5))))
    )
    assert choice.place is None
    assert US in choice.why
    assert EU in choice.why
    assert not choice.needs_person
    assert (
        choose_place(Case(replace(slot(), places=()), evidence(), memory(), Timers(HERE))).why == "no place is declared"
    )


@pytest.mark.parametrize(("refusals", "other", "person"), [(1, True, False), (2, True, True), (2, False, False)])
def test_a_slot_whose_places_all_refused_twice_is_reported(refusals: int, other: bool, person: bool) -> None:
    human = PlaceMemory(0, after(60), Refusal.HUMAN, "no permission", blocked=True, refusals=refusals)
    capacity = PlaceMemory(1, after(60), Refusal.NO_CAPACITY)
    choice = chosen(remembering((FIRST, human), (SECOND, human if other else capacity)))
    assert choice.place is None
    assert choice.needs_person is person


def test_waiting_says_when_to_ask_again() -> None:
    timers = Timers(HERE)
    known = remembering((FIRST, PlaceMemory(1, after(30))), (SECOND, PlaceMemory(1, after(20))))
    choose_place(Case(slot(FIRST, SECOND), evidence(), known, timers))
    assert timers.wall_due == after(20)


# --- what a refusal does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "least", "most"),
    [
        (NoCapacity("no more capacity"), "no capacity", 5, 10),
        (QuotaExceeded("quota"), "quota", 150, 300),
        (RateLimited("per minute"), "rate", 60, 75),
        (Transient("13"), "transient", 2, 4),
        (AnswerLost("14"), "transient", 2, 4),
        (LostRace("queue the operation"), "refused", 2, 4),
        (OwnCredentials("16"), "refused", 2, 4),
    ],
)
def test_each_class_of_error_has_its_pause(error: CloudError, kind: str, least: float, most: float) -> None:
    past = turned_down(error)
    assert (past.kind, past.reason, past.failures, past.blocked) == (kind, str(error), 1, False)
    assert past.retry_at is not None
    assert least <= (past.retry_at - NOW).total_seconds() <= most


@pytest.mark.parametrize(
    "error",
    [NoCapacity("8"), QuotaExceeded("8"), RateLimited("8"), Transient("13"), LostRace("9"), OwnCredentials("16")],
)
def test_a_clock_that_was_set_back_stretches_no_pause(error: CloudError) -> None:
    """
    After the clock was set back by 108 minutes, a pause of two minutes lasted as long (storm at high, seed 26). A pause
    that ends later than any pause can be is over.
    """
    past = turned_down(error, replace(NOTHING, failures=30))
    assert past.retry_at is not None
    known = memory(places={FIRST.key: past})
    assert choose_place(Case(slot(FIRST), evidence(), known, Timers(HERE))).place is None
    set_back = replace(HERE, wall=NOW - timedelta(minutes=108))
    assert choose_place(Case(slot(FIRST), evidence(), known, Timers(set_back))).place == FIRST


def test_a_row_of_refusals_is_of_one_kind() -> None:
    """Once three stockouts had passed, the first refusal for quota waited up to half an hour."""
    stockouts = replace(NOTHING, failures=40, kind=Refusal.NO_CAPACITY, since=before(hours=1))
    first = turned_down(QuotaExceeded("8"), stockouts)
    assert (first.failures, first.since) == (1, NOW)
    assert first.retry_at is not None
    assert first.retry_at - NOW <= timedelta(minutes=5)
    again = record_refusal(first, QuotaExceeded("8"), held=False, now=after(minutes=9), rng=RNG)
    assert (again.failures, again.since) == (2, NOW)


@pytest.mark.parametrize(
    ("kinds", "hours", "person"),
    [
        (("quota", "quota"), 2.1, True),
        (("quota", "human"), 2.1, True),
        (("quota", "quota"), 1.9, False),
        (("quota", "no capacity"), 9.0, False),
    ],
)
def test_where_quota_stays_used_up_everywhere_a_person_is_told(
    kinds: tuple[str, str], hours: float, person: bool
) -> None:
    """Found on a grant that was over: 196 creates in three days, and nobody was told."""
    pasts = [
        PlaceMemory(9, after(60), Refusal(kind), "x", kind == "human", 2, since=before(hours=hours)) for kind in kinds
    ]
    choice = chosen(remembering((FIRST, pasts[0]), (SECOND, pasts[1])))
    assert (choice.place, choice.needs_person) == (None, person)
    assert ("ask for more" in choice.why) is person


def test_where_quota_lacks_the_shell_that_may_hold_it_is_named() -> None:
    """A queued resource whose node was preempted is left SUSPENDED, and counts until it is deleted."""
    quota, stockout = PlaceMemory(1, after(60), Refusal.QUOTA, "x"), PlaceMemory(1, after(60), Refusal.NO_CAPACITY, "x")
    shell = "projects/p/locations/us-central1-a/queuedResources/my-request"
    for past, named in ((quota, True), (stockout, False)):
        known = replace(remembering((FIRST, past)), shell=shell)
        why = chosen(known, None, FIRST).why
        assert ("queued-resources delete my-request --zone=us-central1-a --project=p --force" in why) is named
    assert record_node_up(replace(memory(), shell=shell), FIRST.key, NOW).shell == ""


def test_failover_goes_through_all_places_and_returns() -> None:
    known, now, turns = memory(), HERE, []
    for _ in range(6):
        choice = choose_place(Case(slot(FIRST, SECOND), evidence(), known, Timers(now)))
        if choice.place is not None:
            turns.append(choice.place.zone)
            past = record_refusal(known.place(choice.place.key), NoCapacity("x"), held=False, now=now.wall, rng=RNG)
            known = known.with_place(choice.place.key, past)
        now = later(timedelta(seconds=4), now)
    assert turns[:2] == [US, EU]
    assert US in turns[2:], "the first is asked again when its pause is over"


def test_a_person_is_needed_after_ten_minutes_then_hourly() -> None:
    past = turned_down(NeedsPerson("grant tpu.nodes.create"))
    assert (past.kind, past.blocked, past.refusals, past.retry_at) == ("human", True, 1, after(minutes=10))
    for refusals in (2, 3, 9):
        past = block_place(replace(past, refusals=refusals - 1), "still", now=NOW)
        assert past.retry_at == after(hours=1)


@pytest.mark.parametrize(
    ("minutes_unreachable", "past", "person"),
    [
        ({US: 60}, NOTHING, False),
        ({US: 60, EU: 60}, NOTHING, True),
        ({US: 60, EU: 10}, NOTHING, False),
        ({US: 60}, PlaceMemory(2, after(10), Refusal.HUMAN, blocked=True, refusals=2), True),
    ],
    ids=[
        "another zone answers",
        "no zone for half an hour",
        "one became unreachable just now",
        "the other only a person opens",
    ],
)
def test_where_no_zone_answers_for_half_an_hour_a_person_is_told(
    minutes_unreachable: dict[str, int], past: PlaceMemory, person: bool
) -> None:
    """
    A slot without a node, all of whose zones were closed or silent, waited for ever without a word to a person (storm
    at high, seed 22). A person is told once no place can be asked for `fence_after`.
    """
    since = {zone: ago(minutes=minutes) for zone, minutes in minutes_unreachable.items()}
    choice = chosen(remembering((SECOND, past)), evidence(unreachable_since=since))
    assert choice.needs_person is person
    assert ("declare another zone" in choice.why) is person


# --- own quota -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "held", "region_wide", "want"),
    [
        (FIRST, Holding(US, "v3", False, "pod"), False, True),
        (SISTER, Holding(US, "v3", False, "pod"), False, False),
        (SISTER, Holding(US, "v3", False, "pod"), True, True),
        (SECOND, Holding(US, "v3", False, "pod"), True, False),
        (FIRST, Holding(US, "v2", False, "pod"), True, False),
        (FIRST, Holding(US, "v3", True, "pod"), False, False),
        (place(US, Provisioning.RESERVED), Holding(US, "v3", True, "pod"), False, True),
        (place(US, Provisioning.PREEMPTIBLE), Holding(US, "v3", False, "pod"), False, True),
        (FIRST, holding_of(place(kind="v3-8")), True, False),
        (place(kind="v2-8"), holding_of(place(kind="v2-8")), False, True),
        (place(kind="v5litepod-8"), holding_of(place(kind="v5litepod-16")), True, False),
        (place(kind="v5litepod-8"), holding_of(place(kind="v5litepod-4")), False, True),
        (place(kind="v4-8"), holding_of(place(kind="v4-64")), False, True),
    ],
)
def test_which_dead_node_holds_whose_quota(where: Place, held: Holding, region_wide: bool, want: bool) -> None:
    assert holds_quota(where, evidence(holdings=frozenset({held})), region_wide=region_wide) is want


@pytest.mark.parametrize(("region_wide", "kind"), [(False, Refusal.OWN_QUOTA), (True, Refusal.OWN_REGION_QUOTA)])
def test_own_quota_takes_no_step_of_backoff(region_wide: bool, kind: Refusal) -> None:
    past = turned_down(QuotaExceeded("quota", region_wide=region_wide), held=True)
    assert (past.kind, past.failures, past.retry_at, past.own_quota_since) == (kind, 0, None, NOW)


def test_own_quota_is_asked_for_again_the_instant_it_is_free_and_other_places_meanwhile() -> None:
    past = turned_down(QuotaExceeded("quota"), held=True)
    known = remembering((FIRST, past))
    assert chosen(known, evidence(holdings=DEAD_IN_US)).place is SECOND
    assert chosen(known, evidence(holdings=DEAD_IN_US), FIRST).place is None
    assert chosen(known, evidence()).place is FIRST


def test_own_quota_of_a_region_waits_for_dead_nodes_of_all_its_zones() -> None:
    past = turned_down(QuotaExceeded("quota", region_wide=True), held=True)
    known = remembering((SISTER, past))
    assert chosen(known, evidence(holdings=DEAD_IN_US), SISTER).place is None
    assert chosen(known, evidence(), SISTER).place is SISTER


def test_after_five_minutes_own_quota_is_ordinary_quota() -> None:
    past = replace(turned_down(QuotaExceeded("quota"), held=True), own_quota_since=before(minutes=5))
    assert chosen(remembering((FIRST, past)), evidence(holdings=DEAD_IN_US)).place is FIRST, "asked once more"
    again = turned_down(QuotaExceeded("quota"), past, held=True)
    assert again.kind == "quota"
    assert again.retry_at is not None
    assert again.retry_at - NOW >= timedelta(minutes=2)
    still = turned_down(QuotaExceeded("quota"), replace(past, own_quota_since=before(minutes=4)), held=True)
    assert still.own_quota_since == before(minutes=4)
    jumped = turned_down(QuotaExceeded("quota"), replace(past, own_quota_since=after(hours=9)), held=True)
    assert jumped.kind == "quota", "a clock that was set back does not hold it for ever"


# --- success ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [Refusal.OWN_QUOTA, Refusal.OWN_REGION_QUOTA, Refusal.QUOTA, Refusal.HUMAN, Refusal.RATE]
)
def test_an_accepted_call_clears_what_it_disproves(kind: Refusal) -> None:
    past = end_quota_refusal(PlaceMemory(3, after(9), kind, "x", blocked=True, refusals=2, own_quota_since=NOW))
    assert (past.kind, past.retry_at, past.blocked, past.refusals, past.own_quota_since) == ("", None, False, 0, None)


def test_an_accepted_call_says_nothing_of_capacity() -> None:
    past = PlaceMemory(3, after(9), Refusal.NO_CAPACITY)
    assert end_quota_refusal(past) is past


def test_a_node_that_came_up_ends_the_row_of_refusals_but_not_of_silence_and_its_turn_is_remembered() -> None:
    past = end_refusals(PlaceMemory(9, after(9), Refusal.NO_CAPACITY, "x", unanswered_nodes=1, asked=7), NOW)
    assert past == PlaceMemory(last_success=NOW, unanswered_nodes=1, asked=7)
    mute = PlaceMemory(kind=Refusal.HUMAN, blocked=True, refusals=3, unanswered_nodes=2)
    assert end_refusals(mute, NOW).refusals == 3
    assert end_quota_refusal(mute).refusals == 3
    assert (
        reset_unanswered(mute).unanswered_nodes,
        reset_unanswered(mute).refusals,
        reset_unanswered(mute).blocked,
    ) == (0, 0, False)


# --- the budget of creates -------------------------------------------------------------------------------------------


def spend(budget: CreateBudget, until: float, pause: float) -> Iterator[float]:
    """Instants of creates, of an engine that wants as many as it may have and sleeps as it is told."""
    now = 0.0
    while now < until:
        free_at = budget.free_at(now)
        if free_at is None:
            budget.reserve("pod-0", now)
            yield now
            now += pause
        else:
            assert free_at > now
            now = free_at


def most_in_a_window(asked: list[float], window: float) -> int:
    return max(sum(1 for other in asked if at <= other < at + window) for at in asked)


@settings(max_examples=60)
@given(st.integers(1, 90), st.floats(1.0, 120.0), st.floats(0.0, 0.3), st.integers(0, 100))
def test_the_budget_is_never_exceeded_and_used(limit: int, window: float, pause: float, earlier: int) -> None:
    budget = CreateBudget(limit, window)
    before_restart = [(-window * index / 101, "") for index in range(min(earlier, limit))]
    budget.restore(before_restart)
    until = window * 4
    asked = list(spend(budget, until, pause))
    known = [at for at, _ in before_restart]
    assert most_in_a_window([*known, *asked], window) <= limit
    possible = min(limit, int(window / pause) if pause else limit)
    assert len(asked) >= 0.95 * (possible * 3) - 1


def test_the_budget_is_shared_by_what_each_slot_had() -> None:
    budget = CreateBudget(3)
    for name, at in (("a", 0.0), ("b", 1.0), ("a", 2.0)):
        assert budget.free_at(at) is None
        budget.reserve(name, at)
    assert budget.shares() == {"a": 2, "b": 1}
    assert budget.free_at(59.0) == 60.0
    assert budget.free_at(60.0) is None


def test_a_slow_answer_keeps_its_place_of_the_budget_for_longer() -> None:
    budget = CreateBudget(1)
    budget.reserve("a", 0.0)
    budget.create_ended("a", 2.5)
    assert budget.free_at(60.0) == 62.5
    budget.create_ended("unknown", 3.0)
    assert budget.free_at(62.5) is None


def test_more_creates_than_allowed_in_an_earlier_process_are_waited_out() -> None:
    budget = CreateBudget(2)
    budget.restore([(-50.0, ""), (-40.0, ""), (-30.0, ""), (-20.0, "")])
    assert budget.free_at(0.0) == 30.0
