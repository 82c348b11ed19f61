"""
The pauses after failures, with their caps: for places, calls and runs.

Pure. A backoff ends at an instant of the machine's clock, so that it outlives the process. A clock that is set back
would stretch it, so every wait also names the cap (`evidence.Timers.passed`). Which failure pauses what is decided in
`placement`, `remember` and `predicates`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

from tpucare.model.evidence import POLL_OPERATION_EVERY
from tpucare.model.memory import FailureKind


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles from `first` up to `cap`; each delay is drawn from the upper half of its step."""

    first: timedelta
    cap: timedelta

    def delay(self, failures: int, rng: random.Random) -> timedelta:
        ceiling = min(self.cap, self.first * 2 ** min(max(failures - 1, 0), 20))
        return timedelta(seconds=ceiling.total_seconds() * rng.uniform(0.5, 1.0))


# --- places ----------------------------------------------------------------------------------------------------------

# A stockout ends without notice, and a try costs one create of the budget. In a long drought the market's own pause is
# longer (`markets.drought_pause`).
CAPACITY_BACKOFF = Backoff(timedelta(seconds=4), timedelta(seconds=4))
# Where stockouts are told at once, creates would take the whole budget: they are so far apart at least.
CREATES_APART = timedelta(seconds=8)
QUOTA_BACKOFF = Backoff(timedelta(minutes=5), timedelta(minutes=30))
TRANSIENT_BACKOFF = Backoff(timedelta(seconds=4), timedelta(minutes=1))
RATE_PAUSE = timedelta(minutes=1)
RATE_PAUSE_SPREAD = 1.25
PERSON_FIRST = timedelta(minutes=10)
PERSON_LATER = timedelta(hours=1)

# --- calls -----------------------------------------------------------------------------------------------------------

RESEND_BACKOFF = Backoff(timedelta(seconds=2), timedelta(minutes=1))
MISSING_READ_EVERY = timedelta(hours=1)
DELETE_AGAIN = timedelta(seconds=60)
DELETE_AGAIN_CAP = timedelta(minutes=16)

# No limit for reads is published; other tools list every 3 s, and two reads a second were never refused.
POLLS_PER_SECOND = 2.0


def poll_pause(operations: int, pause: timedelta = POLL_OPERATION_EVERY) -> timedelta:
    """*pause* between two GetOperation calls of a create, doubled while too many are open; so it seldom changes."""
    while operations > POLLS_PER_SECOND * pause.total_seconds():
        pause *= 2
    return pause


# Every slot is blind while LIST is refused for its rate, so the pause stays short.
LISTING_PAUSE_CAP = 60.0


def listing_pause(before: float, poll: float, rng: random.Random) -> float:
    """Seconds until the next listing after a RateLimited one. `before`: seconds of the pause before that one."""
    return min(LISTING_PAUSE_CAP, 2 * max(before, poll)) * rng.uniform(0.75, 1.0)


# --- runs ------------------------------------------------------------------------------------------------------------

FAILURE_BACKOFF: Mapping[FailureKind, Backoff | None] = MappingProxyType(
    {
        FailureKind.PREEMPTION: None,
        FailureKind.INFRASTRUCTURE: Backoff(timedelta(seconds=5), timedelta(minutes=5)),
        FailureKind.SETUP: Backoff(timedelta(seconds=30), timedelta(minutes=15)),
        FailureKind.CRASH: Backoff(timedelta(seconds=10), timedelta(minutes=15)),
        FailureKind.STALL: None,
    }
)


def failure_backoff_cap(kind: FailureKind) -> timedelta:
    """The longest pause after a failure of that kind."""
    backoff = FAILURE_BACKOFF[kind]
    return backoff.cap if backoff is not None else timedelta()


def refusal_pause(refusals: int) -> timedelta:
    """
    Pause before the next login after that many refusals of our key in a row: 5, 10, 20, then 30 s.

    Source: sshguard on Ubuntu images of Compute Engine blocked an address after "4 attacks over 15 seconds".
    """
    return timedelta(seconds=min(30, 5 * 2 ** min(max(refusals - 1, 0), 3)))
