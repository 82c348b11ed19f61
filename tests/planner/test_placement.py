"""Where to ask next, how long to stay away, and how many creates a minute: rules of the design's §6, as tables."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

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
from tpucare.model.markets import Experience, Market, market_of
from tpucare.model.memory import Memory, PlaceMemory, Refusal
from tpucare.model.resources import Bounds, Place, PlacementOrder, Provisioning, Slot
from tpucare.planner.markets import DEAR
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


def test_a_place_above_max_price_is_never_asked() -> None:
    dear, unpriced = replace(FIRST, price=9.0), SECOND
    bounded = replace(slot(dear, unpriced), bounds=Bounds(max_price=8.99))

    def choice(of: Slot, known: Memory) -> Choice:
        return choose_place(Case(of, evidence(), known, Timers(HERE)))

    assert choice(bounded, memory()).place is unpriced
    closed = choice(bounded, remembering((unpriced, PlaceMemory(1, after(1), Refusal.NO_CAPACITY))))
    assert (closed.place, closed.needs_person) == (None, False)
    assert "us-central1-a: 9 dollars an hour, above `max_price`" in closed.why
    only = choice(replace(bounded, places=(dear,)), memory())
    assert (only.place, only.needs_person) == (None, True)
    assert choice(replace(bounded, bounds=Bounds(max_price=9.0)), memory()).place is dear


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
    turns = in_turn(slot(*alike), memory(places=pasts, round_from=round_from), {}, NOW)
    assert "".join(one.place.zone[-1] for one in turns) == want


def test_what_the_declaration_prefers_goes_first_in_each_round_and_what_it_does_not_still_has_its_turn() -> None:
    spot, paid = [place(US), place(EU)], [place(US, Provisioning.ON_DEMAND)]
    known, turns = memory(), []
    for number in range(6):
        first = in_turn(slot(*spot, *paid), known, {}, NOW)[0].place
        known = record_create(known, first.key, number)
        turns.append("paid" if first in paid else first.zone)
    assert turns == [US, EU, "paid", US, EU, "paid"]
    known = record_node_up(replace(known, next_number=6), paid[0].key, NOW)
    assert in_turn(slot(*spot, *paid), known, {}, NOW)[0].place is spot[0], "a node that came up ends the round"


# --- the order by worth ----------------------------------------------------------------------------------------------

ZONES = [replace(place(f"us-central1-{letter}"), price=2.0) for letter in "abcd"]


def lived(hours: float, deaths: int = 3, **more: Any) -> Market:
    """A market whose nodes lived for so many hours each, and that just gave one."""
    return Market(Experience(NOW, given=deaths, deaths=deaths, lived_hours=hours * deaths, given_at=NOW), **more)


def markets_of(*learned: tuple[Place, Market]) -> dict[str, Market]:
    return {market_of(where.key): market for where, market in learned}


def order(of: Slot, *learned: tuple[Place, Market], known: Memory | None = None) -> str:
    """Last letters of the zones by turn; capital: as another tier or type than the first place's."""
    first = of.places[0]
    turns = [one.place for one in in_turn(of, known or memory(), markets_of(*learned), NOW)]
    return "".join(
        where.zone[-1]
        if (where.accelerator_type, where.provisioning) == (first.accelerator_type, first.provisioning)
        else where.zone[-1].upper()
        for where in turns
    )


def test_the_place_of_most_worth_goes_first() -> None:
    a, b, c, d = ZONES
    learned = ((a, lived(0.5)), (b, lived(2)), (c, lived(20)))
    assert order(slot(*ZONES), *learned)[0] == "c"
    assert order(slot(*ZONES), *learned)[-1] == "a"
    assert order(replace(slot(*ZONES), order=PlacementOrder.ORDERED), *learned) == "abcd"
    cheap = replace(d, price=0.7)
    assert order(slot(a, b, cheap)) == "dab", "where nothing is known the cheapest goes first, then as declared"
    taken = lived(20, asking={f"pod-{index}": NOW for index in range(1, 5)})
    assert order(slot(*ZONES), (b, lived(20)), (c, taken))[0] == "b", "four others ask there"
    assert order(slot(a)) == "a", "one place is asked whatever it is worth"


@pytest.mark.parametrize("which", list(PlacementOrder))
def test_entries_types_and_terms_keep_the_declared_order(which: PlacementOrder) -> None:
    a, b, *_ = ZONES
    paid = replace(place("us-central1-c", Provisioning.ON_DEMAND), price=6.0)
    larger = replace(place("us-central1-d", kind="v3-32"), price=0.1)
    second = replace(b, entry=1, price=0.1)
    learned = ((paid, lived(900)), (larger, lived(900)), (b, lived(50)))
    whole = replace(slot(a, paid, larger), order=which)
    assert order(whole, *learned) == "aCD"
    assert order(replace(slot(a, second), order=which), *learned) == "ab", "an entry of its own"
    assert order(replace(slot(paid, a, b), order=which), *learned)[0] == "c", "on-demand first, where the file says so"


def test_within_a_round_each_place_is_asked_once_whatever_it_is_worth() -> None:
    learned = tuple((where, lived(hours)) for where, hours in zip(ZONES, (1, 4, 16, 64), strict=True))
    known, asks = memory(), ""
    for number in range(8):
        first = order(slot(*ZONES), *learned, known=known)[0]
        asks += first
        known = record_create(known, next(one.key for one in ZONES if one.zone[-1] == first), number)
    assert asks == "dcbadcba"


def test_unknown_prices_and_no_prices_break_nothing() -> None:
    a, b, c, _ = ZONES
    unknown = replace(c, price=None)
    assert order(slot(a, replace(b, price=9.0), unknown))[0] == "a", "no price counts as the dearest"
    for price in (None, 0.0):
        places = [replace(where, price=price) for where in ZONES]
        assert order(slot(*places), (places[2], lived(20)))[0] == "c"
        assert order(replace(slot(*places), value=3.0), (places[2], lived(20)))[0] == "c"


def test_a_dear_place_is_asked_once_every_other_one_refused_in_this_round() -> None:
    """A policy that learns would stay for ever in a dear zone that holds its nodes for long."""
    a, b, c, _ = ZONES
    dear = replace(c, price=2.0 * DEAR * 1.01)
    declared = replace(slot(a, b, dear), value=1e6)
    learned = markets_of((dear, lived(1000)))

    def choice(*pasts: tuple[Place, PlaceMemory], round_from: int = 0) -> Choice:
        known = replace(remembering(*pasts), round_from=round_from)
        return choose_place(Case(declared, evidence(markets=learned), known, Timers(HERE)))

    assert order(declared, (dear, lived(1000))) == "abc"
    shut = PlaceMemory(1, after(4), Refusal.NO_CAPACITY)
    assert choice().place is a
    assert choice((a, replace(shut, asked=3))).place is b
    waits = choice((a, replace(shut, asked=3)), (b, shut))
    assert waits.place is None, "b refused in an earlier round"
    assert f"more than {DEAR:g} times as dear" in waits.why
    assert choice((a, replace(shut, asked=3)), (b, replace(shut, asked=4))).place is dear
    assert not waits.needs_person
    cheaper = replace(dear, price=2.0 * DEAR * 0.99)
    assert order(replace(declared, places=(a, b, cheaper)), (cheaper, lived(1000)))[0] == "c", "not dear enough"
    alone = replace(declared, places=(replace(dear, price=100.0),))
    assert choose_place(Case(alone, evidence(), memory(), Timers(HERE))).place is alone.places[0]


# --- one slot asks for all in a drought ------------------------------------------------------------------------------


def dry(minutes: float = 60, *, retry_in: float = -1, **more: Any) -> Market:
    """A market that gave its last node so long ago, and told a stockout just now."""
    seen = Experience(NOW, refused=9, told_seconds=9 * 20, given_at=before(minutes=minutes), refused_at=before(1))
    return Market(replace(seen, retry_at=after(retry_in)), **more)


def asked_in(market: Market, of: Slot | None = None, name: str = "pod-0") -> Choice:
    declared = replace(of or slot(ZONES[0]), name=name)
    known = evidence(markets=markets_of((ZONES[0], market)))
    return choose_place(Case(declared, known, memory(), Timers(HERE)))


def test_in_a_drought_one_slot_asks_for_all() -> None:
    held = {"pod-0": before(2)}
    assert asked_in(dry()).place is not None
    assert asked_in(dry(asking=held)).place is not None, "the one that asks goes on"
    other = asked_in(dry(asking=held), name="pod-1")
    assert (other.place, other.needs_person) == (None, False)
    assert "pod-0 asks for all" in other.why
    assert asked_in(dry(asking={"pod-0": before(120)}), name="pod-1").place is not None, "its create found capacity"
    assert asked_in(dry(minutes=14, asking=held), name="pod-1").place is not None, "a market that moves: each asks"
    both = replace(slot(ZONES[0], ZONES[1]))
    assert asked_in(dry(asking=held), both, name="pod-1").place is ZONES[1], "another market is no part of it"


def test_the_pause_of_a_drought_holds_for_all_slots() -> None:
    assert asked_in(dry(retry_in=30)).place is None
    assert "no capacity since 11:00 UTC, next try 12:00:30 UTC" in asked_in(dry(retry_in=30), name="pod-7").why
    assert asked_in(dry(minutes=14, retry_in=30)).place is not None
    assert asked_in(dry(retry_in=7200)).place is not None, "the clock was set back"


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
