"""
Decides whether a node's host keys are trusted, before anything private is sent to its workers.

Pure. The first login pins a worker's host key. The guest attributes of the node vouch for it: the API serves them over
TLS, and only the machine itself can write them. They may come late or never, and the call may fail; each case has its
own row. `care.host_keys` decides only where guest attributes never vouch. Pinning is left to the adapters.
"""

from __future__ import annotations

from datetime import timedelta

from tpucare.model.actions import Action, EffectKind, Fact, FetchHostKeys, Record, Wait
from tpucare.model.causes import Cause
from tpucare.model.evidence import Case, NodeEvidence, Timers, Voucher
from tpucare.model.memory import NodeMemory, Trust
from tpucare.model.resources import HostKeys, Job, Slot
from tpucare.model.text import length

ASK_EVERY = timedelta(seconds=10)
# The guest agent publishes some time after sshd answers; the longest that was seen elsewhere is about a minute.
PUBLISHED_WITHIN = timedelta(minutes=2)
# The same where this project and runtime published nothing within REMEMBERED_FOR.
USUALLY_UNPUBLISHED = timedelta(seconds=10)
REMEMBERED_FOR = timedelta(days=1)
# A person may have mended the cause meanwhile.
ASK_LATER_EVERY = timedelta(minutes=1)
UNANSWERED_TOLD_AFTER = timedelta(minutes=10)

_FIRST = "its workers answer for the first time"


def publisher_of(slot: Slot, past: NodeMemory) -> str:
    """`PROJECT/RUNTIME`, whose nodes publish host keys alike; empty runtime when the node's place is unknown."""
    place = slot.place(past.place)
    return f"{slot.project}/{place.runtime if place is not None else ''}"


def decide_trust(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action | None:
    """The step before a launch on workers that all answer; None when the job may be sent to them."""
    name, strict = seen.node.name, case.slot.care.host_keys is HostKeys.VOUCHED
    asking = EffectKind.FETCH_HOST_KEYS.of(name) in case.evidence.in_flight
    asked = Wait(Cause.UNDER_WAY, f"asking for the host keys of {name}")
    if seen.voucher is Voucher.UNASKED:
        return asked if asking else _ask(case.slot, seen, past, Cause.HOST_KEYS_UNVOUCHED, _FIRST)
    if seen.voucher is Voucher.VOUCHED or past.trust is Trust.VOUCHED:
        return None
    if not strict and (past.trust is Trust.FIRST_USE or not is_private(case.slot.job)):
        return None
    limit = _patience(case, past)
    if seen.voucher is Voucher.UNANSWERED:
        return _ask_again(case, seen, past) or _unanswered(seen, case.timers)
    if seen.voucher is Voucher.UNPUBLISHED and not case.timers.lasted(seen.arrived_since, limit):
        why = f"waiting until {name} publishes its host keys, for {length(limit)} from the first answer of its workers"
        return _ask_again(case, seen, past) or Wait(Cause.HOST_KEYS_UNPUBLISHED, why)
    if strict:
        why = f"nothing vouches for the host keys of {name} ({_reason(seen, limit)}) and care.host_keys is vouched"
        advice = "let guest attributes be published and read, or set care.host_keys: auto"
        again = _ask_again(case, seen, past, every=ASK_LATER_EVERY)
        return again or Wait(Cause.HOST_KEYS_UNVOUCHED, f"{why}: {advice}", needs_person=True)
    if asking:
        return asked
    publisher = publisher_of(case.slot, past) if seen.voucher is Voucher.UNPUBLISHED else ""
    why = f"nothing vouches for {name} ({_reason(seen, limit)})"
    return Record(Fact.FIRST_USE, why, name=name, publisher=publisher)


def is_private(job: Job | None) -> bool:
    """
    Whether a launch of *job* sends private content to its workers.

    `env` is private, since people put keys there, and so is a foreign run, since a user's function may send anything.
    """
    return job is not None and bool(job.secrets or job.files or job.workdir or job.env or job.foreign)


def decide_changed_key(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    """A worker shows another host key than the pinned one: only guest attributes or a person can vouch for it."""
    name, last = seen.node.name, case.evidence.ended_effects.get(EffectKind.FETCH_HOST_KEYS.of(seen.node.name))
    asked = last is not None and seen.changed_since is not None and last.observed >= seen.changed_since.observed
    long = case.timers.lasted(seen.changed_since, PUBLISHED_WITHIN)
    if not asked and EffectKind.FETCH_HOST_KEYS.of(name) not in case.evidence.in_flight:
        return _ask(case.slot, seen, past, Cause.HOST_KEY_CHANGED, "a host key changed on the same node")
    if again := _ask_again(case, seen, past, every=ASK_LATER_EVERY if long else ASK_EVERY):
        return again
    if seen.voucher is Voucher.UNANSWERED:
        return _unanswered(seen, case.timers, f"a worker of {name} shows another host key; ")
    why = f"a worker of {name} shows another host key, and guest attributes do not vouch for it"
    advice = "look at it; `tpucare apply FILE --replace` gives the slot a new node, `tpucare down` ends it"
    return Wait(Cause.HOST_KEY_CHANGED, f"{why}: {advice}", needs_person=long)


def _ask(slot: Slot, seen: NodeEvidence, past: NodeMemory, cause: Cause, why: str) -> FetchHostKeys:
    return FetchHostKeys(seen.node.key, cause, why, publisher_of(slot, past))


def _ask_again(
    case: Case, seen: NodeEvidence, past: NodeMemory, *, every: timedelta = ASK_EVERY
) -> FetchHostKeys | None:
    """FetchHostKeys each *every*; None while one is in flight, so that a person is told once."""
    kind = EffectKind.FETCH_HOST_KEYS.of(seen.node.name)
    last = case.evidence.ended_effects.get(kind)
    due = kind not in case.evidence.in_flight and (last is None or case.timers.lasted(last, every, observations=0))
    if not due:
        return None
    return _ask(case.slot, seen, past, Cause.HOST_KEYS_UNVOUCHED, "nothing vouches for its host keys yet")


def _unanswered(seen: NodeEvidence, timers: Timers, before: str = "") -> Wait:
    """No answer never means "nothing vouches": an attacker between us and a node may block the API, too."""
    why = f"{before}guest attributes of {seen.node.name} give no answer ({seen.voucher_why}): asked again"
    long = timers.lasted(seen.unanswered_since, UNANSWERED_TOLD_AFTER)
    return Wait(Cause.HOST_KEYS_UNANSWERED, why, needs_person=long)


def _patience(case: Case, past: NodeMemory) -> timedelta:
    known = case.evidence.project.publishing.get(publisher_of(case.slot, past))
    if known is None or known.published or abs(case.timers.now.wall - known.at) > REMEMBERED_FOR:
        return PUBLISHED_WITHIN
    return USUALLY_UNPUBLISHED if case.slot.care.host_keys is HostKeys.AUTO else PUBLISHED_WITHIN


def _reason(seen: NodeEvidence, limit: timedelta) -> str:
    if seen.voucher is Voucher.FORBIDDEN:
        return f"guest attributes may not be read: {seen.voucher_why}"
    return f"its host keys were not published within {length(limit)}" + (
        f": {seen.voucher_why}" if seen.voucher_why else ""
    )
