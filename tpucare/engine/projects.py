"""
What the engine knows of one project between listings: its observed clock, its dark zones, its quota, its sleepers.

Mutable, on the deciding thread only. The observed clock is the heart of rule 11: it moves only when a listing
succeeded, and by at most `cap` each time, so that neither an outage nor a suspended machine makes a timeout fire.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpucare.model.errors import CloudError
from tpucare.model.evidence import Holding, Mark, holding
from tpucare.model.resources import Listing, Node, NodeKey, NodeState

HOLDS_QUOTA_DEAD = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING})


@dataclass(slots=True)
class ProjectView:
    """
    One project, as the last listings showed it.

    blind: why the last listing failed, in words that name the project; None when it did not
    failures: listings that failed in a row    decided_blind: slots that were decided since the last one that succeeded
    unanswered: zones that never answered since this process runs; None = nothing was listed yet
    listing_pause: seconds that the last listing was put off since those before it were refused for their rate; 0 = none
    foreign: nodes of other owners, by each slot whose name they bear    lost: whose they were until somebody took them
    """

    name: str
    cap: timedelta
    slots: set[str] = field(default_factory=set)
    fresh: bool = False
    blind: CloudError | None = None
    unreachable: frozenset[str] = frozenset()
    dark_since: dict[str, Mark] = field(default_factory=dict)
    unanswered: frozenset[str] | None = None
    failures: int = 0
    decided_blind: set[str] = field(default_factory=set)
    observed: timedelta = timedelta()
    passes: int = 0
    listing: bool = False
    poll_due: float = 0.0
    listing_pause: float = 0.0
    holdings: frozenset[Holding] = frozenset()
    holdings_changed: bool = False
    nodes: int = 0
    foreign: dict[str, dict[NodeKey, Node]] = field(default_factory=dict)
    lost: dict[NodeKey, str] = field(default_factory=dict)
    _last_pass: float | None = None
    _cloud: tuple[datetime, float] | None = None
    _held: dict[str, Holding] = field(default_factory=dict)
    _wakes: list[tuple[timedelta, str]] = field(default_factory=list)
    _wanted: dict[str, timedelta] = field(default_factory=dict)

    @property
    def blind_why(self) -> str:
        """Why the last listing failed; empty when it did not."""
        return str(self.blind) if self.blind is not None else ""

    @property
    def complete(self) -> bool:
        """Every zone has answered since this process runs."""
        return self.unanswered is not None and not self.unanswered

    @property
    def mark(self) -> Mark:
        return Mark(self.observed, self.passes)

    def adopt(self, slot: str) -> None:
        self.slots.add(slot)

    def observe(self, listing: Listing, now: float) -> None:
        """A listing succeeded at *now* (monotonic seconds)."""
        if self._last_pass is not None:
            self.observed += min(timedelta(seconds=max(0.0, now - self._last_pass)), self.cap)
        self._last_pass = now
        self.passes += 1
        self.fresh, self.blind, self.failures = True, None, 0
        self.unreachable = listing.unreachable
        self.dark_since = {zone: self.dark_since.get(zone, self.mark) for zone in sorted(listing.unreachable)}
        before = listing.unreachable if self.unanswered is None else self.unanswered
        self.unanswered = before & listing.unreachable
        self.nodes = len(listing.nodes)
        if listing.cloud_time is not None:
            self._cloud = (listing.cloud_time, now)

    def listed(self, began: float, pause: float, *, limited: bool) -> None:
        """A listing that *began* then has ended; the next is *pause* seconds later. *limited*: its rate was refused."""
        if limited:
            self.listing_pause = pause
        else:
            # The limit that was met is still near: back to the usual pace by halves.
            self.listing_pause = self.listing_pause / 2 if self.listing_pause > 2 * pause else 0.0
        self.poll_due = began + max(pause, self.listing_pause)

    def look_soon(self, now: float, pause: float) -> None:
        """List as soon as *pause* seconds have passed since the last listing, unless its rate was refused just now."""
        if self.listing_pause:
            return
        since = self._last_pass if self._last_pass is not None else now - pause
        self.poll_due = min(self.poll_due, max(now, since + pause))

    def cloud_now(self, now: float, wall: datetime) -> datetime:
        """The service's clock, carried on by ours since it last told; our wall time where it never did."""
        if self._cloud is None:
            return wall
        told, at = self._cloud
        return told + timedelta(seconds=now - at)

    def hold(self, node: Node) -> None:
        """Whether *node*, which is ours, is dead and still counts against a quota."""
        if node.state not in HOLDS_QUOTA_DEAD:
            self.release(node.name)
            return
        self._held[node.name] = holding(node.key.zone, node.accelerator_type, node.provisioning)
        self._recount()

    def release(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self._recount()

    def _recount(self) -> None:
        holdings = frozenset(self._held.values())
        self.holdings_changed = self.holdings_changed or holdings != self.holdings
        self.holdings = holdings

    def wake(self, observed: timedelta, slot: str) -> None:
        """
        Ask about *slot* again once that much has been observed; what was wanted before for it is void.

        Each decision says anew when the next one is due. Were the older instants kept, every one of them would bring a
        decision that sets another: a slot would be decided more often the longer it lives.
        """
        if self._wanted.get(slot) != observed:
            self._wanted[slot] = observed
            heapq.heappush(self._wakes, (observed, slot))

    def due(self) -> Iterator[str]:
        """Slots whose observed wake-up has come."""
        while self._wakes and self._wakes[0][0] <= self.observed:
            due, slot = heapq.heappop(self._wakes)
            if self._wanted.get(slot) == due:
                del self._wanted[slot]
                yield slot
