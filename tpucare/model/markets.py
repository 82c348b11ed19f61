"""
What tpucare knows of markets: zone, accelerator type and terms, in which capacity comes and goes for all alike.

A stockout, a grant and a preemption are facts of the market, whichever slot met them, so that every slot, fleet and
script of a project learns from all. Ended lives are kept as sums whose weight halves with age, so that a market takes
the same few bytes for ever. How they are learned and read is left to `planner.markets`. Frozen but for `Market`;
standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


def market_of(place_key: str) -> str:
    """Name of the market of the place with that key: `ZONE/TYPE/TERMS`; network and service account play no part."""
    return "/".join(place_key.split("/", 3)[:3])


@dataclass(frozen=True, slots=True)
class Experience:
    """
    What creates and nodes of all slots came to in one market.

    as_of:     instant to which the sums are aged; None: nothing was ever learned
    asked, refused, given: creates sent, stockouts told, nodes that came up
    lived_hours, deaths: of nodes that ended; one that we deleted lived, and did not die
    told_seconds:  from a create to its stockout, summed over `refused`
    ready_hours, readied: from a create to the launch, summed, and of how many nodes
    step_hours, stepped:  from a create to the first sign of progress
    asked_first:   when a create was sent there for the first time
    given_at, lost_at, refused_at: the last such event; lost: the cloud took a node
    retry_at:      while the market is dry for long, no slot asks before then
    """

    as_of: datetime | None = None
    asked: float = 0.0
    refused: float = 0.0
    given: float = 0.0
    lived_hours: float = 0.0
    deaths: float = 0.0
    told_seconds: float = 0.0
    ready_hours: float = 0.0
    readied: float = 0.0
    step_hours: float = 0.0
    stepped: float = 0.0
    asked_first: datetime | None = None
    given_at: datetime | None = None
    lost_at: datetime | None = None
    refused_at: datetime | None = None
    retry_at: datetime | None = None


NOTHING_LEARNED = Experience()


@dataclass(slots=True)
class Market:
    """
    One market as it is now.

    own:    what the slots of this process learned    others: what other processes of the state folder did
    living: our nodes that serve there, and the sum of their births in seconds since the epoch
    asking: slots whose create is open there, and since when
    """

    own: Experience = NOTHING_LEARNED
    others: tuple[Experience, ...] = ()
    living: int = 0
    births: int = 0
    asking: dict[str, datetime] = field(default_factory=dict)
