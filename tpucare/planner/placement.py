"""
Chooses the place of the next create, keeps the refusals of places, and limits the creates of a project.

Pure. Places take turns in rounds: each open place once before any of them again, so that none starves. Within a round
the declared order of types and terms counts; among equals the place not asked for longest. Each refusal is recorded at
its place by the class of the error and outlives the process. The node itself is left to `decide`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Protocol

from tpucare.model.accelerators import region_of
from tpucare.model.errors import CloudError, NeedsPerson, NoCapacity, QuotaExceeded, RateLimited, Transient
from tpucare.model.evidence import Case, Evidence, holding_of
from tpucare.model.memory import Memory, PlaceMemory, Refusal
from tpucare.model.resources import Place, Provisioning
from tpucare.planner.backoff import (
    CAPACITY_BACKOFF,
    PERSON_FIRST,
    PERSON_LATER,
    QUOTA_BACKOFF,
    RATE_PAUSE,
    RATE_PAUSE_SPREAD,
    TRANSIENT_BACKOFF,
    Backoff,
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


def choose_place(case: Case) -> Choice:
    """The first open place by turn, else the reasons of all."""
    reasons = []
    for place in in_turn(case.slot.places, case.memory):
        refusal = _closed_why(case, place, case.memory.place(place.key))
        if refusal is None:
            return Choice(place, f"{place.accelerator_type} in {place.zone}")
        reasons.append(f"{place.zone}: {refusal}")
    stopped = all(
        _stopped(case.memory.place(place.key), case.timers.now.wall)
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


def in_turn(places: Sequence[Place], memory: Memory) -> list[Place]:
    """
    *places* by turn: not asked in this round, preferred by the declaration, not asked for longest, declared first.

    By declared order alone the first places would be asked for ever, since their pauses are shorter than a round.
    """
    preference = _preferences(places)

    def turn(index: int) -> tuple[bool, int, int, int]:
        asked = memory.place(places[index].key).asked
        return asked >= memory.round_from, preference[index], asked, index

    return [places[index] for index in sorted(range(len(places)), key=turn)]


def _preferences(places: Sequence[Place]) -> list[int]:
    """Rank of each place; neighbours of one type and terms share a rank."""
    ranks: list[int] = []
    for before, place in zip((None, *places), places, strict=False):
        alike = before is not None and _terms(before) == _terms(place)
        ranks.append((ranks[-1] if ranks else 0) + (not alike))
    return ranks


def _terms(place: Place) -> tuple[str, Provisioning]:
    return place.accelerator_type, place.provisioning


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
        return None
    assert past.retry_at is not None
    kind = "needs you" if past.blocked else past.kind or "refused"
    return f"{kind} ({past.reason}), next try {past.retry_at:%H:%M:%S} UTC"


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
        Refusal.NO_CAPACITY: CAPACITY_BACKOFF.cap,
        Refusal.QUOTA: QUOTA_BACKOFF.cap,
        Refusal.RATE: RATE_PAUSE * RATE_PAUSE_SPREAD,
        Refusal.TRANSIENT: TRANSIENT_BACKOFF.cap,
        Refusal.REFUSED: TRANSIENT_BACKOFF.cap,
    }
)


def record_refusal(
    past: PlaceMemory, error: CloudError, *, held: bool, now: datetime, rng: random.Random, text: str = ""
) -> PlaceMemory:
    """
    The place's memory after it refused a create with *error*.

    `held`: a dead node of ours held that quota, in the error's scope, when the create was decided.
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

    def free_at(self, now: float) -> float | None: ...

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

    def free_at(self, now: float) -> float | None:
        """None when a create may begin now, else the instant when one may."""
        while self._asked and self._asked[0][0] + self.window <= now:
            self._asked.popleft()
        if len(self._asked) < self.limit:
            return None
        return self._asked[len(self._asked) - self.limit][0] + self.window

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
