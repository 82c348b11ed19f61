"""
How long to leave alone what failed: the pauses between two tries, with their caps.

Pure. Instants of backoffs are of the machine's clock, so that they outlive the process; a clock that was set back
meanwhile would stretch them, which is why whoever waits for one says the cap (`evidence.Timers.passed`).
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
    """Grows from `first` by doubling up to `cap`; the upper half of each step is drawn by chance."""

    first: timedelta
    cap: timedelta

    def delay(self, failures: int, rng: random.Random) -> timedelta:
        ceiling = min(self.cap, self.first * 2 ** min(max(failures - 1, 0), 20))
        return timedelta(seconds=ceiling.total_seconds() * rng.uniform(0.5, 1.0))


# --- places ----------------------------------------------------------------------------------------------------------

# A stockout ends without notice, and asking costs one call of the create budget: stay close.
CAPACITY_BACKOFF = Backoff(timedelta(seconds=10), timedelta(minutes=2))
QUOTA_BACKOFF = Backoff(timedelta(minutes=5), timedelta(minutes=30))
TRANSIENT_BACKOFF = Backoff(timedelta(seconds=4), timedelta(minutes=1))
RATE_PAUSE = timedelta(minutes=1)
RATE_PAUSE_SPREAD = 1.25
PERSON_FIRST = timedelta(minutes=10)
PERSON_LATER = timedelta(hours=1)

# --- calls -----------------------------------------------------------------------------------------------------------

# After this many resends the same name is tried only as often as a place in a stockout.
RESEND_BACKOFF = Backoff(timedelta(seconds=2), timedelta(minutes=1))
MISSING_LOOK_EVERY = timedelta(hours=1)
DELETE_AGAIN = timedelta(seconds=60)
DELETE_AGAIN_CAP = timedelta(minutes=16)

# No limit of reads is published; others list every 3 s, so a few more a second than that were never complained of.
POLLS_PER_SECOND = 2.0


def poll_pause(operations: int) -> timedelta:
    """Between two GetOperation calls of one create while so many are open; it doubles, so that it seldom changes."""
    pause = POLL_OPERATION_EVERY
    while operations > POLLS_PER_SECOND * pause.total_seconds():
        pause *= 2
    return pause


# LIST refused for its rate: every slot is blind until it succeeds, so it is not left alone for long.
LISTING_PAUSE_CAP = 60.0


def listing_pause(before: float, poll: float, rng: random.Random) -> float:
    """Seconds until the next listing after one that was refused for its rate; `before`: the pause before that one."""
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
    Before the next login where *refusals* in a row were refused: 5, 10, 20, then 30 s.

    Source: sshguard on Ubuntu images of Compute Engine blocked an address after "4 attacks over 15 seconds".
    """
    return timedelta(seconds=min(30, 5 * 2 ** min(max(refusals - 1, 0), 3)))
