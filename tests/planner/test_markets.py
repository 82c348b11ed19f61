"""What is learned of markets, and what a place there is worth: by order and ratio, for the constants are tuned."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.kits.evidence import NOW, after, before, going, intent, launched, memory, past, place, run
from tests.kits.remembering import RNG
from tpucare.model.lifecycles import CreateState, NodeStatus
from tpucare.model.markets import Experience, Market, market_of
from tpucare.model.memory import Memory, PlaceMemory, Refusal
from tpucare.planner.markets import (
    HALF_LIFE,
    LEAST_CHANCE,
    LONGEST_PAUSE,
    MOVES_FOR,
    SHORTEST_PAUSE,
    Lesson,
    Sign,
    aged,
    asking,
    drought_pause,
    is_drought,
    is_dry,
    known,
    learn,
    lessons,
    living,
    outlook,
    worth,
)

HERE = market_of(place().key)
KEY = place().key


# --- lessons: what each change of a slot's memory tells ---------------------------------------------------------------


def refused(kind: Refusal = Refusal.NO_CAPACITY, seconds: float = 4) -> Memory:
    return memory(places={KEY: PlaceMemory(1, after(seconds), kind)})


OPEN = memory(creates=(intent(5, asked_at=before(20)),))
UP = memory(past(5, create_time=before(hours=3)))
COMING = replace(UP, creates=(intent(5, asked_at=before(20)),))
RUNS = memory(launched(5, create_time=before(hours=3)), run=run(5))


def changed(node: Memory = UP, **more: Any) -> Memory:
    return replace(node, nodes=(replace(node.nodes[0], **more),))


LESSONS = [
    ("nothing", UP, UP, []),
    ("a create was sent", memory(), OPEN, [(Sign.ASKED, 0)]),
    ("it was sent again", OPEN, replace(OPEN, creates=(replace(OPEN.creates[0], tries=2),)), []),
    ("an adopted create has no place", memory(), memory(creates=(intent(5, place=""),)), []),
    ("its stockout was told", OPEN, refused(), [(Sign.REFUSED, 20 / 3600)]),
    ("the second one", refused(), refused(seconds=9), [(Sign.REFUSED, 0)]),
    ("no quota is no fact of the market", OPEN, refused(Refusal.QUOTA), []),
    ("nor is a rate", OPEN, refused(Refusal.RATE), []),
    ("its node came up", OPEN, memory(places={KEY: PlaceMemory(last_success=NOW)}), [(Sign.GIVEN, 0)]),
    ("the first launch", UP, RUNS, [(Sign.LAUNCHED, 3)]),
    ("the second launch", RUNS, replace(RUNS, run=run(5, 2)), []),
    ("the cloud shows it dead", UP, changed(status=NodeStatus.DEAD), [(Sign.DIED, 3)]),
    ("it vanished", UP, memory(), [(Sign.DIED, 3)]),
    ("it vanished after it was shown dead", changed(status=NodeStatus.DEAD), memory(), []),
    ("we delete it", UP, changed(delete=going()), [(Sign.ENDED, 3)]),
    ("what we deleted is gone", changed(delete=going()), memory(), []),
    ("what we deleted is shown dead", changed(delete=going()), changed(delete=going(), status=NodeStatus.DEAD), []),
    ("another owner has it", UP, changed(status=NodeStatus.TAKEN), [(Sign.ENDED, 3)]),
    ("it dies while it is made", COMING, changed(COMING, status=NodeStatus.DEAD), [(Sign.DIED, 3)]),
    ("the node of a failed create was listed and vanished", COMING, OPEN, []),
    ("a create that came up is no life yet", COMING, UP, []),
    ("an adopted node has no market", changed(place=""), memory(), []),
]


@pytest.mark.parametrize(("then", "now", "want"), [row[1:] for row in LESSONS], ids=[row[0] for row in LESSONS])
def test_a_change_of_memory_tells(then: Memory, now: Memory, want: list[tuple[Sign, float]]) -> None:
    told = [*lessons(then, now, NOW)]
    assert [lesson.sign for lesson in told] == [sign for sign, _ in want]
    assert [lesson.hours for lesson in told] == pytest.approx([hours for _, hours in want])
    assert {lesson.market for lesson in lessons(then, now, NOW)} <= {HERE}


def test_the_first_progress_on_a_node_tells_how_long_it_takes_unless_it_was_disturbed() -> None:
    node = launched(5, create_time=before(hours=3))
    starts, goes = (memory(node, run=run(5, progressed=progressed)) for progressed in (False, True))
    assert [*lessons(starts, goes, NOW)] == [Lesson(HERE, Sign.STEPPED, 3.0)]
    before_it, after_it = (replace(one, nodes=(replace(node, infrastructure=1),)) for one in (starts, goes))
    assert [*lessons(before_it, after_it, NOW)] == []
    assert [*lessons(goes, replace(goes, run=run(5, 2)), NOW)] == [], "another run"


def test_who_lives_and_asks_is_read_from_memory() -> None:
    leaving, coming = past(1, delete=going()), past(2)
    known_of = memory(past(0), leaving, coming, past(3, place=""), creates=(intent(2), intent(4)))
    assert [*living(known_of)] == [(HERE, past(0).create_time)]
    assert [name for name, _ in asking(known_of)] == [HERE, HERE]
    closed = (intent(5, abandoned=True), intent(6, state=CreateState.REFUSED), intent(7, place=""))
    assert [*asking(memory(creates=closed))] == []


# --- learning and ageing ----------------------------------------------------------------------------------------------


def taught(*signs: tuple[Sign, float, datetime], market: Market | None = None) -> Market:
    market = market or Market()
    for sign, hours, at in signs:
        market.own = learn(market, Lesson(HERE, sign, hours), at, RNG)
    return market


def test_each_sign_is_counted_and_dated() -> None:
    own = taught(
        (Sign.ASKED, 0, before(hours=5)),
        (Sign.REFUSED, 0.01, before(hours=5)),
        (Sign.GIVEN, 0, before(hours=4)),
        (Sign.DIED, 3, before(hours=1)),
        (Sign.ENDED, 2, NOW),
    ).own
    assert (own.asked_first, own.given_at, own.lost_at) == (before(hours=5), before(hours=4), before(hours=1))
    assert own.as_of == NOW
    assert own.lived_hours == pytest.approx(5, rel=0.05)
    assert own.deaths == pytest.approx(1, rel=0.05), "what we ended did not die"
    assert own.retry_at is None, "a grant ends the pause of a drought"


def test_what_was_seen_counts_half_after_a_half_life() -> None:
    seen = Experience(NOW - HALF_LIFE, asked=8, deaths=2, lived_hours=6, given_at=NOW - HALF_LIFE)
    now = aged(seen, NOW)
    assert (now.asked, now.deaths, now.lived_hours) == (4, 1, 3)
    assert now.given_at == seen.given_at
    assert aged(aged(seen, NOW - HALF_LIFE / 2), NOW).asked == pytest.approx(4)
    assert aged(seen, NOW - 2 * HALF_LIFE) == seen, "a clock that was set back ages nothing"


def test_all_processes_of_the_folder_are_one_experience() -> None:
    own = Experience(NOW, asked=2, given=1, asked_first=before(hours=2), given_at=before(hours=2))
    other = Experience(
        before(hours=0), asked=4, refused=3, asked_first=before(hours=9), refused_at=before(60), lost_at=before(hours=3)
    )
    both = known(Market(own, (other, Experience())), NOW)
    assert (both.asked, both.given, both.refused) == (6, 1, 3)
    assert (both.asked_first, both.given_at, both.refused_at) == (before(hours=9), before(hours=2), before(60))
    assert both.lost_at == before(hours=3)
    old = replace(other, as_of=NOW - HALF_LIFE)
    assert known(Market(own, (old,)), NOW).asked == pytest.approx(2 + 2), "each is aged from its own instant"


# --- the outlook ------------------------------------------------------------------------------------------------------


def life_of(*lives: float, alive: tuple[float, ...] = (), ended: tuple[float, ...] = ()) -> float:
    """Expected hours of a life, where *lives* ended by death, *alive* go on and *ended* were ended by us."""
    own = Experience(NOW, deaths=len(lives), lived_hours=sum(lives) + sum(ended))
    births = sum(int(before(hours=hours).timestamp()) for hours in alive)
    return outlook(Market(own, living=len(alive), births=births), NOW).life


def test_lives_that_have_not_ended_count() -> None:
    unknown = life_of()
    assert life_of(alive=(24,)) > 4 * life_of(1) > 0, "a node that lives for a day beats one that died after an hour"
    assert life_of(0.1) < unknown < life_of(alive=(1,))
    assert life_of(3, ended=(5,)) == pytest.approx(life_of(3, alive=(5,)), rel=1e-3), "what we ended is censored"
    assert life_of(*[3.0] * 500) == pytest.approx(3, rel=0.02), "many lives outweigh the guess"
    assert life_of(2, 2, alive=(8,)) > life_of(2, 2, 8), "a life that goes on tells more than one that has ended"


def chance_of(own: Experience, **more: Any) -> float:
    return outlook(Market(own, **more), NOW).chance


def test_the_last_answer_counts_most_and_fades() -> None:
    gave, refused_now = Experience(NOW, given_at=before(60)), Experience(NOW, refused_at=before(60))
    unknown = chance_of(Experience())
    assert chance_of(gave) > unknown > chance_of(refused_now) >= LEAST_CHANCE
    assert chance_of(Experience(NOW, lost_at=before(60))) < unknown
    long_ago = Experience(NOW, refused_at=before(hours=100))
    assert chance_of(refused_now) < chance_of(replace(gave, refused_at=before(hours=5)))
    assert chance_of(long_ago) == pytest.approx(unknown, rel=0.05)
    assert chance_of(replace(gave, refused_at=before(1))) < unknown < chance_of(replace(gave, refused_at=before(90)))


def test_others_that_ask_there_take_their_share() -> None:
    """Slots that lost their nodes at once would all ask the zone of most worth."""
    asks = {f"pod-{index}": NOW for index in range(4)}
    alone, crowd = chance_of(Experience()), chance_of(Experience(), asking=asks)
    assert crowd < alone / 4
    assert outlook(Market(asking={"pod-0": NOW}), NOW, without="pod-0").chance == alone, "not by its own create"
    generous = Experience(NOW, given=50)
    assert chance_of(generous, asking=asks) > 0.8 * chance_of(generous), "where much was given there is room"


def test_what_was_never_seen_is_guessed_and_what_was_is_not() -> None:
    blank = outlook(Market(), NOW)
    slow = outlook(Market(Experience(NOW, readied=20, ready_hours=20 * 1.0, stepped=20, step_hours=20 * 1.5)), NOW)
    assert slow.start == pytest.approx(1.5, rel=0.1)
    assert slow.start > blank.start > 0
    assert outlook(Market(Experience(NOW, refused=99, told_seconds=99 * 10)), NOW).told < blank.told
    assert 0 < slow.useful < slow.life
    brief = outlook(Market(Experience(NOW, deaths=99, lived_hours=1)), NOW)
    assert brief.useful == 0, "a life shorter than what each end loses yields nothing, not less"


# --- worth ------------------------------------------------------------------------------------------------------------


def worth_of(*, price: float = 2.0, value: float = 10.0, **seen: Any) -> float:
    return worth(outlook(Market(Experience(NOW, **seen)), NOW), price, value)


def test_what_is_worth_less() -> None:
    good = worth_of(deaths=5, lived_hours=50, given_at=before(60))
    assert good > worth_of(deaths=5, lived_hours=50, given_at=before(60), price=4.0), "dearer"
    assert good > worth_of(deaths=5, lived_hours=5, given_at=before(60)), "shorter lives"
    assert good > worth_of(deaths=5, lived_hours=50, refused_at=before(60)), "refused lately"
    slow = worth_of(deaths=5, lived_hours=50, given_at=before(60), stepped=9, step_hours=18)
    assert good > slow, "longer from create to first step"
    assert worth_of(deaths=50, lived_hours=10) < 0, "each hour costs more than it yields"


def test_lives_outweigh_prices_where_work_is_worth_much_and_prices_lives_where_it_is_not() -> None:
    steady: dict[str, Any] = {"deaths": 5, "lived_hours": 100, "price": 3.0}
    cheap: dict[str, Any] = {"deaths": 5, "lived_hours": 15, "price": 1.5}
    assert worth_of(**steady, value=30) > worth_of(**cheap, value=30)
    assert worth_of(**steady, value=3) < worth_of(**cheap, value=3)


def test_at_no_price_lives_alone_count() -> None:
    assert worth_of(price=0, deaths=5, lived_hours=20) > worth_of(price=0, deaths=5, lived_hours=10) > 0


# --- the pause in a drought -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lasted", "ceiling"),
    [
        (timedelta(minutes=1), 4),
        (timedelta(minutes=6), 4),
        (timedelta(minutes=15), 10),
        (timedelta(minutes=45), 30),
        (timedelta(minutes=90), 60),
        (timedelta(days=3), 60),
        (-timedelta(hours=2), 4),
    ],
)
def test_the_pause_is_a_ninetieth_of_the_drought_between_four_and_sixty_seconds(
    lasted: timedelta, ceiling: float
) -> None:
    rng = random.Random(3)
    draws = [drought_pause(Experience(NOW, lost_at=NOW - lasted), NOW, rng).total_seconds() for _ in range(200)]
    assert ceiling / 2 <= min(draws) < max(draws) <= ceiling
    assert max(draws) - min(draws) > ceiling / 3, "by chance, so that stores do not ask together"
    assert SHORTEST_PAUSE.total_seconds() / 2 <= min(draws) <= max(draws) <= LONGEST_PAUSE.total_seconds()


@pytest.mark.parametrize(
    ("seen", "dry", "drought"),
    [
        ({}, False, False),
        ({"asked_first": before(hours=2)}, False, False),
        ({"asked_first": before(hours=2), "refused_at": before(1)}, True, True),
        ({"asked_first": before(60), "refused_at": before(1)}, True, False),
        ({"given_at": before(hours=2), "refused_at": before(1)}, True, True),
        ({"given_at": before(hours=2), "lost_at": before(60), "refused_at": before(1)}, True, False),
        ({"given_at": before(1), "refused_at": before(hours=2)}, False, False),
        ({"refused_at": before(1)}, True, False),
        ({"given_at": before(hours=2), "lost_at": before(hours=1)}, False, False),
    ],
)
def test_a_market_that_gave_or_lost_nothing_for_a_quarter_of_an_hour_is_in_a_drought(
    seen: dict[str, Any], dry: bool, drought: bool
) -> None:
    assert timedelta(minutes=15) == MOVES_FOR
    assert (is_dry(Experience(NOW, **seen)), is_drought(Experience(NOW, **seen), NOW)) == (dry, drought)


def test_a_stockout_pauses_its_market_by_what_all_processes_know() -> None:
    long_dry = Experience(NOW, asked_first=before(hours=9))
    market = taught((Sign.ASKED, 0, before(20)), (Sign.REFUSED, 20 / 3600, NOW), market=Market(others=(long_dry,)))
    assert market.own.retry_at is not None
    assert market.own.retry_at - NOW >= LONGEST_PAUSE / 2
    fresh = taught((Sign.ASKED, 0, before(20)), (Sign.REFUSED, 20 / 3600, NOW))
    assert fresh.own.retry_at is not None
    assert fresh.own.retry_at - NOW <= SHORTEST_PAUSE
