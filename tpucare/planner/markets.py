"""
How markets are learned from what happens to slots, and what a place there is worth.

Pure. The worth of a place is the rate of renewal theory: what one life of a node yields, over the time that one life
takes, with the asking before it. A life is estimated with the lives that have not ended (a node that lives for a day
and still does says more than one that was preempted after an hour), and with a prior for markets that gave nothing yet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import NamedTuple

from tpucare.model.lifecycles import NodeStatus
from tpucare.model.markets import Experience, Market, market_of
from tpucare.model.memory import Memory, Refusal

# What was seen counts half after so long: capacity of a zone changes with the days of the week and new hardware. On the
# recorded week one to three days are alike, seven are worse.
HALF_LIFE = timedelta(days=2)
# Lives of spot nodes in public traces have medians of one to three hours. It counts as one life that ended.
PRIOR_LIFE_HOURS = 2.0
PRIOR_LIVES = 1.0
# Until a node's first launch and first step were seen: boot of a slice, set-up, restore, compilation.
PRIOR_READY_HOURS, PRIOR_STEP_HOURS = 0.1, 0.2
# Work made since the last checkpoint when a node dies: half of the usual half hour.
LOST_HOURS = 0.25
PRIOR_TOLD_SECONDS = 45.0
# A market that just gave or refused does so again for some hours; after that the last answer tells little.
MEMORY_OF_ANSWERS = timedelta(hours=3)
LEAST_CHANCE = 0.02

# An hour of work is worth what it costs to have it for certain: on-demand prices are two to six times those of spot. A
# higher value looks for long lives, a lower one for cheap places; from four times on there is little between them.
VALUE_OF_PRICES = 5.0
# A place dearer than that many times the cheapest is asked only after all others refused.
DEAR = 4.0

# --- how long to pause at a market without capacity -------------------------------------------------------------------

# While a market moves, capacity lasts for minutes, and every slot asks by itself.
MOVES_FOR = timedelta(minutes=15)
# Then one slot asks for all, after a ninetieth of the time that the drought lasts already: whatever its length, that
# adds about one percent to it, and creates grow with its logarithm only, until the pause is a minute.
DROUGHT_SHARE = 1 / 90
SHORTEST_PAUSE, LONGEST_PAUSE = timedelta(seconds=4), timedelta(seconds=60)
# A create that lives so many times longer than stockouts take to be told found capacity, most likely.
OUTLIVES = 2.0


def drought_pause(experience: Experience, now: datetime, rng: random.Random) -> timedelta:
    """The pause of a market after a stockout that was told *now*."""
    since = moved_at(experience)
    lasted = now - since if since is not None else timedelta()
    ceiling = min(max(lasted * DROUGHT_SHARE, SHORTEST_PAUSE), LONGEST_PAUSE)
    return ceiling * rng.uniform(0.5, 1.0)


def moved_at(experience: Experience) -> datetime | None:
    """When the market gave or lost a node last; before the first, when it was asked first."""
    moves = _given(experience.given_at, experience.lost_at)
    return max(moves) if moves else experience.asked_first


def is_dry(experience: Experience) -> bool:
    """Its last answer was a stockout."""
    refused, given = experience.refused_at, experience.given_at
    return refused is not None and (given is None or given < refused)


def is_drought(experience: Experience, now: datetime) -> bool:
    """Dry for so long that one slot asks for all."""
    since = moved_at(experience)
    return is_dry(experience) and since is not None and now - since > MOVES_FOR


# --- learning ---------------------------------------------------------------------------------------------------------


class Sign(Enum):
    """
    What happened in a market.

    ASKED: a create was sent       REFUSED: its stockout was told      GIVEN: its node came up
    LAUNCHED: its first run        STEPPED: its first progress
    DIED: the cloud took a node    ENDED: we, or another owner, took it: how long it would have lived is not known
    """

    ASKED = auto()
    REFUSED = auto()
    GIVEN = auto()
    LAUNCHED = auto()
    STEPPED = auto()
    DIED = auto()
    ENDED = auto()


class Lesson(NamedTuple):
    """One fact about a market. `hours`: since the create, or of the life that ended."""

    market: str
    sign: Sign
    hours: float = 0.0


def lessons(before: Memory, after: Memory, now: datetime) -> Iterator[Lesson]:
    """What the change of a slot's memory tells of markets."""
    if before.creates is not after.creates:
        for intent in after.creates:
            if intent.place and before.create(intent.name) is None:
                yield Lesson(market_of(intent.place), Sign.ASKED)
    if before.places is not after.places:
        yield from _answers(before, after, now)
    if before.nodes is not after.nodes or before.run is not after.run:
        yield from _lives(before, after, now)


def _answers(before: Memory, after: Memory, now: datetime) -> Iterator[Lesson]:
    for key, place in after.places.items():
        past = before.place(key)
        if place is past:
            continue
        if place.kind is Refusal.NO_CAPACITY and place.retry_at != past.retry_at:
            asked = [intent.asked_at for intent in before.creates if intent.place == key]
            yield Lesson(market_of(key), Sign.REFUSED, _hours(max(asked, default=now), now))
        if place.last_success is not None and place.last_success != past.last_success:
            yield Lesson(market_of(key), Sign.GIVEN)


def _lives(before: Memory, after: Memory, now: datetime) -> Iterator[Lesson]:
    for past in before.nodes:
        if not past.place:
            continue
        node, market, hours = after.node(past.name), market_of(past.place), _hours(past.create_time, now)
        if node is past:
            continue
        if past.delete is None and past.status is NodeStatus.LIVE:
            was_up = before.create(past.name) is None
            if (node is None and was_up) or (node is not None and node.was_shown_dead):
                yield Lesson(market, Sign.DIED, hours)
            elif node is not None and was_up and (node.delete is not None or node.status is NodeStatus.TAKEN):
                yield Lesson(market, Sign.ENDED, hours)
        if node is not None and node.launched and not past.launched:
            yield Lesson(market, Sign.LAUNCHED, hours)
    run, was = after.run, before.run
    if run is not None and run.progressed and was is not None and was.token == run.token and not was.progressed:
        on = after.node(run.node)
        if on is not None and on.place and not (on.stalls or on.infrastructure):
            yield Lesson(market_of(on.place), Sign.STEPPED, _hours(on.create_time, now))


def learn(market: Market, lesson: Lesson, now: datetime, rng: random.Random) -> Experience:
    """The own experience of *market* after *lesson*."""
    own = aged(market.own, now)
    match lesson.sign:
        case Sign.ASKED:
            return replace(own, asked=own.asked + 1, asked_first=own.asked_first or now)
        case Sign.REFUSED:
            told = own.told_seconds + lesson.hours * 3600
            own = replace(own, refused=own.refused + 1, told_seconds=told, refused_at=now)
            return replace(own, retry_at=now + drought_pause(known(market, now), now, rng))
        case Sign.GIVEN:
            return replace(own, given=own.given + 1, given_at=now, retry_at=None)
        case Sign.DIED:
            return replace(own, deaths=own.deaths + 1, lived_hours=own.lived_hours + lesson.hours, lost_at=now)
        case Sign.ENDED:
            return replace(own, lived_hours=own.lived_hours + lesson.hours)
        case Sign.LAUNCHED:
            return replace(own, readied=own.readied + 1, ready_hours=own.ready_hours + lesson.hours)
        case Sign.STEPPED:
            return replace(own, stepped=own.stepped + 1, step_hours=own.step_hours + lesson.hours)


def aged(experience: Experience, now: datetime) -> Experience:
    """The same experience with all weights as of *now*; a clock that was set back ages nothing."""
    if experience.as_of is None:
        return replace(experience, as_of=now)
    weight = 0.5 ** max(0.0, (now - experience.as_of) / HALF_LIFE)
    if weight == 1.0:
        return experience
    sums = {name: getattr(experience, name) * weight for name in _SUMS}
    return replace(experience, as_of=max(now, experience.as_of), **sums)


def known(market: Market, now: datetime) -> Experience:
    """What all processes of the state folder learned of *market*, as of *now*."""
    one = aged(market.own, now)
    for other in (aged(experience, now) for experience in market.others):
        sums = {name: getattr(one, name) + getattr(other, name) for name in _SUMS}
        one = replace(
            one,
            asked_first=min(_given(one.asked_first, other.asked_first), default=None),
            given_at=max(_given(one.given_at, other.given_at), default=None),
            lost_at=max(_given(one.lost_at, other.lost_at), default=None),
            refused_at=max(_given(one.refused_at, other.refused_at), default=None),
            **sums,
        )
    return one


def _given(*instants: datetime | None) -> list[datetime]:
    return [at for at in instants if at is not None]


_SUMS = (
    *("asked", "refused", "given", "lived_hours", "deaths"),
    *("told_seconds", "ready_hours", "readied", "step_hours", "stepped"),
)


def living(memory: Memory) -> Iterator[tuple[str, datetime]]:
    """Market and birth of each node of a slot that serves."""
    for node in memory.nodes:
        if node.place and node.serves and memory.create(node.name) is None:
            yield market_of(node.place), node.create_time


def asking(memory: Memory) -> Iterator[tuple[str, datetime]]:
    """Market and instant of each open create of a slot."""
    for intent in memory.creates:
        if intent.place and not intent.abandoned and not intent.state.has_refusal:
            yield market_of(intent.place), intent.asked_at


def count_slot(markets: dict[str, Market], slot: str, memory: Memory, sign: int = 1) -> None:
    """Add who lives and asks by the memory of *slot* to the markets of its project; *sign* -1: take it away."""
    for name, born in living(memory):
        market = markets.setdefault(name, Market())
        market.living += sign
        market.births += sign * int(born.timestamp())
    for name, since in asking(memory):
        market = markets.setdefault(name, Market())
        if sign > 0:
            market.asking[slot] = since
        else:
            market.asking.pop(slot, None)


def _hours(since: datetime, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds()) / 3600


# --- reading ----------------------------------------------------------------------------------------------------------


class Outlook(NamedTuple):
    """
    What may be expected of the next node in a market.

    life, start: hours a node lives, and from its create to its first step    chance: that a create is granted now
    told: hours until a stockout is told
    """

    life: float
    start: float
    chance: float
    told: float

    @property
    def useful(self) -> float:
        """Hours of a life that are kept: after the start, and saved before its end. Lives are exponential."""
        return max(0.0, (self.life - LOST_HOURS) * math.exp(-self.start / self.life))


def outlook(market: Market, now: datetime, *, without: str = "") -> Outlook:
    """The outlook of *market*; creates that other slots than *without* have open there take their share."""
    learned = known(market, now)
    alive = max(0.0, market.living * now.timestamp() - market.births) / 3600
    life = (PRIOR_LIFE_HOURS * PRIOR_LIVES + learned.lived_hours + alive) / (PRIOR_LIVES + learned.deaths)
    ready = (PRIOR_READY_HOURS + learned.ready_hours) / (1 + learned.readied)
    start = (PRIOR_STEP_HOURS + learned.step_hours) / (1 + learned.stepped)
    told = told_seconds(learned) / 3600
    others = sum(1 for slot in market.asking if slot != without)
    return Outlook(life, max(ready, start), _chance(learned, others, now), told)


def told_seconds(learned: Experience) -> float:
    """Seconds until a stockout is told."""
    return (PRIOR_TOLD_SECONDS + learned.told_seconds) / (1 + learned.refused)


def _chance(learned: Experience, others: int, now: datetime) -> float:
    """The chance that a create is granted now, by the market's last sign and by *others* that are asked there."""
    signs = [(at, given) for at, given in _signs(learned) if at is not None]
    sign = 0.5
    if signs:
        at, given = max(signs)
        sign += (0.5 if given else -0.5) * math.exp(-max(0.0, (now - at) / MEMORY_OF_ANSWERS))
    return max(LEAST_CHANCE, sign) * ((1 + learned.given) / (2 + learned.given)) ** others


def _signs(learned: Experience) -> Iterator[tuple[datetime | None, bool]]:
    yield learned.refused_at, False
    yield learned.lost_at, False
    yield learned.given_at, True


def worth(view: Outlook, price: float, value: float) -> float:
    """
    Dollars an hour of waiting and living there yields, where an hour of useful work is worth *value*.

    A renewal reward: the yield of a life over its length and the asking before it.
    """
    asks = view.told / view.chance
    return (value * view.useful - price * view.life) / (view.life + asks)


EMPTY_MARKET = Market()


def market_at(markets: Mapping[str, Market], place_key: str) -> Market:
    return markets.get(market_of(place_key), EMPTY_MARKET)
