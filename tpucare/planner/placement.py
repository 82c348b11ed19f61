"""
Chooses the place of the next create, keeps the refusals of places, and limits the creates of a project.

Pure. Places take turns in rounds: each open place once before any of them again, so that none starves. Within a round
the declared order of types and terms counts; among equals the place not asked for longest. Each refusal is recorded at
its place by the class of the error and outlives the process. The node itself is left to `decide`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tpucare.model.accelerators import region_of
from tpucare.model.causes import Cause
from tpucare.model.errors import CloudError, NeedsPerson, NoCapacity, QuotaExceeded, RateLimited, Transient
from tpucare.model.evidence import Case, Evidence, holding_of
from tpucare.model.markets import Market
from tpucare.model.memory import Memory, PlaceMemory, Refusal
from tpucare.model.resources import Place, PlacementOrder, Provisioning, Slot
from tpucare.planner.backoff import (
    CAPACITY_BACKOFF,
    CREATES_APART,
    PERSON_FIRST,
    PERSON_LATER,
    QUOTA_BACKOFF,
    RATE_PAUSE,
    RATE_PAUSE_SPREAD,
    TRANSIENT_BACKOFF,
    Backoff,
)
from tpucare.planner.deadline import Tier, WorkPace, pace_of
from tpucare.planner.markets import (
    DEAR,
    LONGEST_PAUSE,
    MOVES_FOR,
    OUTLIVES,
    VALUE_OF_PRICES,
    is_dry,
    known,
    market_at,
    moved_at,
    outlook,
    told_seconds,
    worth,
)

# Two useless nodes in a row point at the place, not at the nodes.
UNANSWERED_LIMIT = 2
OWN_QUOTA_PATIENCE = timedelta(minutes=5)

# Quota that others hold is freed within hours; after that only a person can change it.
QUOTA_PATIENCE = timedelta(hours=2)
_QUOTA_PAGE = "https://console.cloud.google.com/iam-admin/quotas"


@dataclass(frozen=True, slots=True)
class Choice:
    """The place of the next create, or `why` there is none; `needs_person`: only a person can open one."""

    place: Place | None
    why: str
    needs_person: bool = False
    cause: Cause = Cause.NO_NODE


def choose_place(case: Case) -> Choice:
    """The first open place by turn, else the reasons of all."""
    reasons, found = [], pace_of(case)
    for one, refusal in open_in_turn(case):
        if refusal is None:
            where = f"{one.place.accelerator_type} in {one.place.zone}"
            if found is None or one.place.provisioning is not Provisioning.ON_DEMAND:
                return Choice(one.place, where)
            return Choice(one.place, f"{where} on demand, since {found.why}", cause=_CAUSES[found.tier])
        reasons.append(f"{one.place.zone}: {refusal}")
    stopped = all(
        case.slot.bounds.excludes(place)
        or _stopped(case.memory.place(place.key), case.timers.now.wall)
        or case.timers.lasted(case.evidence.project.unreachable_since.get(place.zone), case.slot.care.fence_after)
        for place in case.slot.places
    )
    if stopped and any(place.zone in case.evidence.project.unreachable_since for place in case.slot.places):
        reasons.append("a zone that does not answer may be closed for good: declare another zone, or wait")
    lacks_quota = any(case.memory.place(place.key).kind == Refusal.QUOTA for place in case.slot.places)
    if lacks_quota and case.memory.shell:
        reasons.append(_shell_advice(case.memory.shell))
    elif lacks_quota and stopped:
        reasons.append(f"used up for {QUOTA_PATIENCE}: free some, or ask for more on {_QUOTA_PAGE}")
    return Choice(None, "; ".join(reasons) or "no place is declared", needs_person=stopped)


def open_in_turn(case: Case) -> Iterator[tuple[Ranked, str | None]]:
    """The places by turn, each with the reason why it is not asked now; None: it is asked in its turn."""
    found = pace_of(case)
    turns = in_turn(case.slot, case.memory, case.evidence.project.markets, case.timers.now.wall)
    for one in turns:
        refusal = _closed_why(case, one.place, case.memory.place(one.place.key))
        if refusal is None and one.dear and any(_goes_first(other, one) for other in turns):
            refusal = f"more than {DEAR:g} times as dear as the cheapest; asked after all others refused"
        if refusal is None and found is not None:
            refusal = _tier_refusal(case, found, one, turns)
        yield one, refusal


# Spot prices in the catalogue's sources differ by less than this between two readings of one zone.
MUCH_DEARER = 1.15
_CAUSES: Mapping[Tier, Cause] = MappingProxyType(
    {Tier.EITHER: Cause.BEHIND_DEADLINE, Tier.ON_DEMAND: Cause.DEADLINE_NEAR}
)


def _tier_refusal(case: Case, found: WorkPace, one: Ranked, turns: Sequence[Ranked]) -> str | None:
    """Why the deadline does not ask for this place now."""
    on_demand = one.place.provisioning is Provisioning.ON_DEMAND
    match found.tier:
        case Tier.SPOT if on_demand:
            return f"on-demand is not needed: {found.why}"
        case Tier.SPOT if found.is_well_ahead and _is_dearer(case, one, turns):
            return f"waits for a cheaper place: {found.why}"
        case Tier.EITHER if on_demand:
            waits = any(not other.asked and is_open(case, other.place, on_demand=False) for other in turns)
            return "asked once each open spot place has refused" if waits else None
        case Tier.ON_DEMAND if not on_demand:
            asks = any(not other.asked and is_open(case, other.place, on_demand=True) for other in turns)
            return f"on-demand goes first: {found.why}" if asks else None
    return None


def _is_dearer(case: Case, one: Ranked, turns: Sequence[Ranked]) -> bool:
    """Whether an equal place that may open by itself is cheaper by more than prices move from day to day."""
    prices = [
        other.place.price
        for other in turns
        if other.place.price is not None
        and other.preference == one.preference
        and other.place.zone not in case.evidence.project.unreachable_since
        and not case.memory.place(other.place.key).blocked
    ]
    return one.place.price is not None and one.place.price > MUCH_DEARER * min(prices, default=one.place.price)


def is_open(case: Case, place: Place, *, on_demand: bool) -> bool:
    """Whether *place* is of that tier, and may be asked now."""
    is_its = (place.provisioning is Provisioning.ON_DEMAND) is on_demand
    return is_its and _closed_why(case, place, case.memory.place(place.key)) is None


def _goes_first(other: Ranked, dear: Ranked) -> bool:
    return other.preference == dear.preference and not (other.dear or other.asked)


class Ranked(NamedTuple):
    """
    A place in the turn of a slot.

    asked: in this round    preference: of its `tpu` entry and terms, the lowest first
    dear:  more than DEAR times as dear as the cheapest of its preference
    worth: dollars an hour there yields; None: the fleet asked for the declared order
    """

    place: Place
    asked: bool
    preference: int
    dear: bool
    worth: float | None


def in_turn(slot: Slot, memory: Memory, markets: Mapping[str, Market], now: datetime) -> list[Ranked]:
    """
    The places of *slot* by turn: not asked in this round, preferred by the declaration, not dear, of the most worth;
    among equals the one not asked for longest, then the one declared first.

    Rounds keep a place of little worth from being starved by those of more.
    """
    preference = _preferences(slot.places)
    prices = _prices(slot.places, preference)
    value = slot.value if slot.value is not None else VALUE_OF_PRICES * min([p for p in prices if p], default=1.0)
    cheapest: dict[int, float] = {}
    for rank, price in zip(preference, prices, strict=True):
        cheapest[rank] = min(price, cheapest.get(rank, price))
    ranked = []
    for place, rank, price in zip(slot.places, preference, prices, strict=True):
        asked, is_dear, its_worth = memory.place(place.key).asked >= memory.round_from, False, None
        if slot.order is not PlacementOrder.ORDERED:
            is_dear = price > DEAR * cheapest[rank]
            its_worth = worth(outlook(market_at(markets, place.key), now, without=slot.name), price, value)
        ranked.append(Ranked(place, asked, rank, is_dear, its_worth))

    def turn(index: int) -> tuple[bool, int, bool, float, int, int]:
        one = ranked[index]
        asked = memory.place(one.place.key).asked if one.worth is not None else index
        return one.asked, one.preference, one.dear, -(one.worth or 0.0), asked, index

    return [ranked[index] for index in sorted(range(len(ranked)), key=turn)]


def _prices(places: Sequence[Place], preference: Sequence[int]) -> list[float]:
    """Dollars an hour of a node at each place; an unknown price counts as the dearest known one of its preference."""
    prices = []
    for place, rank in zip(places, preference, strict=True):
        known = [
            other.price
            for other, its in zip(places, preference, strict=True)
            if its == rank and other.price is not None
        ]
        prices.append(place.price if place.price is not None else max(known, default=0.0))
    return prices


def _preferences(places: Sequence[Place]) -> list[int]:
    """Rank of each place; neighbours of one `tpu` entry, type and terms share a rank."""
    ranks: list[int] = []
    for before, place in zip((None, *places), places, strict=False):
        alike = before is not None and _terms(before) == _terms(place)
        ranks.append((ranks[-1] if ranks else 0) + (not alike))
    return ranks


def _terms(place: Place) -> tuple[int, str, Provisioning]:
    return place.entry, place.accelerator_type, place.provisioning


def record_create(memory: Memory, key: str, number: int) -> Memory:
    """Record create *number* at the place *key*; the second one of a place in a round begins the next round."""
    past = memory.place(key)
    if past.asked >= memory.round_from:
        memory = replace(memory, round_from=number)
    return memory.with_place(key, replace(past, asked=number))


def record_node_up(memory: Memory, key: str, now: datetime) -> Memory:
    """Record that a node came up at the place *key*, and begin a new round for the slot's next node."""
    memory = memory.with_place(key, end_refusals(memory.place(key), now))
    return replace(memory, round_from=memory.next_number, shell="")


def _shell_advice(path: str) -> str:
    """Advice to delete the queued resource *path*, which outlives its node and holds the quota."""
    _, project, _, zone, _, name = path.split("/") if path.count("/") == 5 else ("", "", "", "", "", path)
    order = f"gcloud compute tpus queued-resources delete {name} --zone={zone} --project={project} --force"
    return f"the queued resource {name} of the last node may still hold the quota: `{order}`"


def _closed_why(case: Case, place: Place, past: PlaceMemory) -> str | None:
    if case.slot.bounds.excludes(place):
        return f"{place.price:.4g} dollars an hour, above `max_price`"
    if place.zone in case.evidence.project.unreachable_since:
        return "the zone does not answer"
    if past.kind.is_own_quota:
        # A PREEMPTED node holds its quota until DELETING has ended: the create can succeed the instant it is gone.
        if not holds_quota(place, case.evidence, region_wide=past.kind == Refusal.OWN_REGION_QUOTA):
            return None
        if past.own_quota_since and not case.timers.passed(
            past.own_quota_since + OWN_QUOTA_PATIENCE, OWN_QUOTA_PATIENCE
        ):
            return "our own dead node still holds the quota"
    if case.timers.passed(past.retry_at, _LONGEST.get(past.kind, PERSON_LATER)):
        return _drought(case, place) if past.kind in (Refusal.NONE, Refusal.NO_CAPACITY) else None
    assert past.retry_at is not None
    kind = "needs you" if past.blocked else past.kind or "refused"
    return f"{kind} ({past.reason}), next try {past.retry_at:%H:%M:%S} UTC"


def _drought(case: Case, place: Place) -> str | None:
    """Why the slot leaves it to another slot, or to later, to ask a market that has been dry for long."""
    market, now = market_at(case.evidence.project.markets, place.key), case.timers.now.wall
    learned = known(market, now)
    moved = moved_at(learned)
    if not is_dry(learned) or moved is None or not case.timers.passed(moved + MOVES_FOR, MOVES_FOR):
        return None
    told = told_seconds(learned)
    for slot, since in market.asking.items():
        if slot != case.slot.name and not case.timers.passed(since + timedelta(seconds=OUTLIVES * told), MOVES_FOR):
            return f"{slot} asks for all"
    if not case.timers.passed(learned.retry_at, LONGEST_PAUSE):
        assert learned.retry_at is not None
        return f"no capacity since {moved:%H:%M} UTC, next try {learned.retry_at:%H:%M:%S} UTC"
    return None


def _stopped(past: PlaceMemory, now: datetime) -> bool:
    """Only a person can open that place: blocked twice, or out of quota for longer than QUOTA_PATIENCE."""
    if past.kind == Refusal.QUOTA:
        return past.since is not None and now - past.since > QUOTA_PATIENCE
    return past.blocked and past.refusals >= 2


def holds_quota(place: Place, evidence: Evidence, *, region_wide: bool) -> bool:
    """Whether a dead or DELETING node of ours holds the quota that a create at *place* needs."""
    wanted = holding_of(place)
    for held in evidence.project.holdings:
        same_scope = region_of(held.zone) == region_of(wanted.zone) if region_wide else held.zone == wanted.zone
        if same_scope and held._replace(zone=wanted.zone) == wanted:
            return True
    return False


# The longest pause of a place after each kind of refusal.
_LONGEST: Mapping[Refusal, timedelta] = MappingProxyType(
    {
        # Stores of earlier versions hold such pauses.
        Refusal.NO_CAPACITY: timedelta(minutes=2),
        Refusal.QUOTA: QUOTA_BACKOFF.cap,
        Refusal.RATE: RATE_PAUSE * RATE_PAUSE_SPREAD,
        Refusal.TRANSIENT: TRANSIENT_BACKOFF.cap,
        Refusal.REFUSED: TRANSIENT_BACKOFF.cap,
    }
)


def record_refusal(
    past: PlaceMemory,
    error: CloudError,
    *,
    held: bool,
    now: datetime,
    rng: random.Random,
    asked_at: datetime | None = None,
    text: str = "",
) -> PlaceMemory:
    """
    The place's memory after it refused a create with *error*.

    `held`: a dead node of ours held that quota, in the error's scope, when the create was decided. `asked_at`: when it
    was sent; None: just now.
    """
    reason = text or str(error)
    if isinstance(error, QuotaExceeded) and held and not _out_of_patience(past, now):
        since = past.own_quota_since or now
        kind = Refusal.OWN_REGION_QUOTA if error.region_wide else Refusal.OWN_QUOTA
        return replace(past, kind=kind, reason=reason, own_quota_since=since, retry_at=None, blocked=False)
    if isinstance(error, NeedsPerson):
        return block_place(past, reason, now=now)
    kind, backoff = _reaction_to(error)
    # Failures in a row are of one kind: after an hour of stockouts the first refusal for quota counts as the first.
    again = past.kind == kind
    failures = past.failures + 1 if again else 1
    pause = backoff.delay(failures, rng) if backoff is not None else RATE_PAUSE * rng.uniform(1.0, RATE_PAUSE_SPREAD)
    if kind is Refusal.NO_CAPACITY:
        pause = max(pause, CREATES_APART * rng.uniform(0.5, 1.0) - (now - (asked_at or now)))
    return replace(
        past,
        failures=failures,
        kind=kind,
        reason=reason,
        retry_at=now + pause,
        blocked=False,
        own_quota_since=None,
        since=past.since if again else now,
    )


def block_place(past: PlaceMemory, reason: str, *, now: datetime) -> PlaceMemory:
    """Block the place until a person acts: the next tries come after ten minutes, then hourly, without end."""
    refusals = past.refusals + 1
    delay = PERSON_FIRST if refusals == 1 else PERSON_LATER
    return replace(past, kind=Refusal.HUMAN, reason=reason, retry_at=now + delay, blocked=True, refusals=refusals)


def _out_of_patience(past: PlaceMemory, now: datetime) -> bool:
    return past.own_quota_since is not None and not (timedelta() <= now - past.own_quota_since < OWN_QUOTA_PATIENCE)


def _reaction_to(error: CloudError) -> tuple[Refusal, Backoff | None]:
    """The kind of refusal and its backoff; None: the fixed pause after RateLimited."""
    if isinstance(error, NoCapacity):
        return Refusal.NO_CAPACITY, CAPACITY_BACKOFF
    if isinstance(error, QuotaExceeded):
        return Refusal.QUOTA, QUOTA_BACKOFF
    if isinstance(error, RateLimited):
        return Refusal.RATE, None
    return Refusal.TRANSIENT if isinstance(error, Transient) else Refusal.REFUSED, TRANSIENT_BACKOFF


def end_refusals(past: PlaceMemory, now: datetime) -> PlaceMemory:
    """
    End the refusals of a place where a node came up.

    The counts of useless nodes stay, and so does `asked`: a place that preempted its node has no first turn.
    """
    return PlaceMemory(
        last_success=now,
        unanswered_nodes=past.unanswered_nodes,
        held_nodes=past.held_nodes,
        refusals=past.refusals if _is_useless(past) else 0,
        asked=past.asked,
    )


def reset_unanswered(past: PlaceMemory) -> PlaceMemory:
    """End the streak of unanswered nodes: workers of a node at this place answered."""
    return replace(past, unanswered_nodes=0, refusals=0, blocked=False)


def reset_held(past: PlaceMemory) -> PlaceMemory:
    """End the streak of held nodes: a run was launched at this place, so the chips were free."""
    return replace(past, held_nodes=0, refusals=0, blocked=False)


def _is_useless(past: PlaceMemory) -> bool:
    return max(past.unanswered_nodes, past.held_nodes) >= UNANSWERED_LIMIT


def end_quota_refusal(past: PlaceMemory) -> PlaceMemory:
    """End refusals for quota, rate and people after an accepted call; capacity may still lack."""
    if past.kind.is_own_quota or past.kind in (Refusal.QUOTA, Refusal.HUMAN, Refusal.RATE):
        kept = past.refusals if _is_useless(past) else 0
        past = replace(past, kind=Refusal.NONE, reason="", retry_at=None, blocked=False, refusals=kept)
        return replace(past, own_quota_since=None, since=None)
    return past


class Budget(Protocol):
    """The create budget of one process (`CreateBudget`) or of all processes of a state folder (`SharedBudget`)."""

    def restore(self, asked: Iterable[tuple[float, str]]) -> None: ...

    def free_at(self, now: float, spare: int = 0) -> float | None: ...

    def reserve(self, slot: str, now: float) -> None: ...

    def create_ended(self, slot: str, now: float) -> None: ...

    def shares(self) -> Counter[str]: ...


@dataclass(slots=True)
class CreateBudget:
    """
    At most `limit` creates in any `window` seconds, over all slots of a project.

    A call counts until a window after its answer, since it may wait for a thread: counted from its start, a slow burst
    and a fast one after it would reach the API together, at twice the limit. Instants are seconds of a monotonic clock.
    Source of the default: the quota `qps/create` is not documented; it was 91 a minute in one large project, and other
    tools keep to 60.
    """

    limit: int = 60
    window: float = 60.0
    _asked: deque[tuple[float, str]] = field(default_factory=deque)

    def restore(self, asked: Iterable[tuple[float, str]]) -> None:
        """Add creates of an earlier process, as (instant, slot)."""
        self._asked = deque(sorted([*self._asked, *asked]))

    def free_at(self, now: float, spare: int = 0) -> float | None:
        """None when a create may begin now that leaves *spare* others in the window, else the instant when one may."""
        while self._asked and self._asked[0][0] + self.window <= now:
            self._asked.popleft()
        limit = max(1, self.limit - spare)
        if len(self._asked) < limit:
            return None
        return self._asked[len(self._asked) - limit][0] + self.window

    def reserve(self, slot: str, now: float) -> None:
        self._asked.append((now, slot))

    def create_ended(self, slot: str, now: float) -> None:
        """Count the ended create of *slot* from *now*: it reached the API at some instant until then."""
        taken = next((entry for entry in reversed(self._asked) if entry[1] == slot), None)
        if taken is not None:
            self._asked.remove(taken)
            self._asked.append((now, slot))

    def shares(self) -> Counter[str]:
        """Creates of each slot in the window; slots with the fewest go first."""
        return Counter(slot for _, slot in self._asked)
