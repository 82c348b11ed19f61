"""
What the parts of the engine share on the deciding thread: slots, projects, what to decide again, what is pending.

Everything that a step wants written is gathered here and goes to disk in one transaction, before any effect of that
step begins and before anybody is told of it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpucare.engine.tracking import NodeTrack, SlotTrack
from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.errors import CloudError, StoreError, StoreFull
from tpucare.model.evidence import POLL_OPERATION_EVERY, Holding, Mark, ProjectEvidence, holding
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import Memory, Publishing
from tpucare.model.ports import Clock, Executor, Lane, Store
from tpucare.model.resources import Event, Listing, Node, NodeKey, NodeState, Slot
from tpucare.planner.backoff import poll_pause
from tpucare.planner.placement import Budget

ASIDE_FIRST, ASIDE_CAP = 10.0, 600.0
# After so long without one, an error is the first of a row again.
ERRORS_LAPSE = 3600.0
# Ten of them are missed before a store counts as old; each is a synced commit.
MARK_EVERY = 60.0

Begun = tuple[Lane, tuple[Hashable, ...], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Settings:
    """
    How the loop beats. Seconds, but for the budget. Fixed for the life of an engine.

    budget: the create budget of a project; None = one of this engine's own, of `creates_per_minute`
    elsewhere: whether a node that bears our owner label is cared for by another store of our state folder
    """

    poll: float = 5.0
    fast_poll: float = 1.0
    probe: float = 15.0
    fast_probe: float = 1.0
    creates_per_minute: int = 60
    brake_minimum: int = 3
    brake_share: float = 0.2
    budget: Callable[[str], Budget] | None = None
    elsewhere: Callable[[Node], bool] | None = None


@dataclass(slots=True)
class _Pending:
    memories: dict[str, Memory] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    effects: list[Begun] = field(default_factory=list)


class EngineState:
    """The shared state of one engine; its methods only keep it consistent, and choose nothing."""

    def __init__(
        self, store: Store, clock: Clock, executor: Executor, settings: Settings, listen: Callable[[Event], None]
    ) -> None:
        self.store = store
        self.clock = clock
        self.executor = executor
        self.settings = settings
        self.listen = listen
        # Set by `Engine.hold` and `Engine.release` alone.
        self.is_held = False
        self.acts_for: Callable[[Slot], bool] | None = None
        self.slots: dict[str, SlotTrack] = {}
        self.projects: dict[str, ProjectView] = {}
        self.orphans: dict[str, Node] = {}
        self.dirty: dict[str, None] = {}
        self.busy: set[str] = set()
        self.braked: set[str] = set()
        self.lacks_quota: set[str] = set()
        self.polling: set[str] = set()
        self.poll_every = POLL_OPERATION_EVERY
        self._homes: dict[NodeKey, str] = {}
        self.publishing: dict[str, Publishing] = {}
        self._wakes: list[tuple[float, str]] = []
        self._pending = _Pending()
        self._marked = -math.inf

    def project(self, name: str) -> ProjectView:
        view = self.projects.get(name)
        if view is None:
            view = self.projects[name] = ProjectView(name, cap=timedelta(seconds=3 * self.settings.poll))
        return view

    def find_node(self, key: NodeKey) -> tuple[SlotTrack, NodeTrack] | None:
        """The tracks of a node. One that was adopted may bear any name."""
        named = [self.slots[slot] for slot in slots_of(key.name) if slot in self.slots]
        for track in itertools.chain(named, self.slots.values()):
            seen = track.nodes.get(key.name)
            if seen is not None and seen.node.key == key:
                return track, seen
        return None

    def slot_of(self, node: Node) -> SlotTrack | None:
        """The slot that remembers *node*, whatever its labels say by now, for anybody may edit them."""
        track = self.slots.get(self._homes.get(node.key, ""))
        past = track.memory.node(node.name) if track is not None else None
        return track if past is not None and (past.id, past.zone) == (node.id, node.key.zone) else None

    def add_slot(self, track: SlotTrack) -> None:
        """A slot has come, with what is remembered of its nodes."""
        self.slots[track.slot.name] = track
        self._homes.update(dict.fromkeys(_keys_of(track, track.memory), track.slot.name))

    def decide_again(self, names: Iterable[str]) -> None:
        """In the order of names: that of a set differs from process to process, and a seed has to give one run."""
        self.dirty.update(dict.fromkeys(sorted(names)))

    def update_slot_sets(self, track: SlotTrack) -> None:
        """A slot has been decided: is something under way, or held by the brake?"""
        name, view = track.slot.name, self.project(track.slot.project)
        if not track.is_busy(view.mark):
            self.busy.discard(name)
        elif name not in self.busy:
            self.busy.add(name)
            view.list_soon(self.clock.monotonic(), self.settings.fast_poll)
        (self.braked.add if track.braked or track.brake_lifted else self.braked.discard)(name)
        lacks = any(place.kind.is_own_quota for place in track.memory.places.values())
        (self.lacks_quota.add if lacks else self.lacks_quota.discard)(name)
        polls = any(intent.state is CreateState.RUNNING for intent in track.memory.creates)
        (self.polling.add if polls else self.polling.discard)(name)
        pause = poll_pause(len(self.polling))
        if pause != self.poll_every:
            self.poll_every = pause
            self.decide_again(self.polling)

    def forget_slot(self, slot: str) -> None:
        for names in (self.busy, self.braked, self.lacks_quota, self.polling):
            names.discard(slot)
        self.dirty.pop(slot, None)

    # --- what is pending

    def update_memory(self, track: SlotTrack, memory: Memory) -> None:
        if memory is not track.memory and memory != track.memory:
            if memory.nodes is not track.memory.nodes:
                for key in _keys_of(track, track.memory):
                    self._homes.pop(key, None)
                self._homes.update(dict.fromkeys(_keys_of(track, memory), track.slot.name))
            track.memory = memory
            self.merge_publishing(memory)
            self._pending.memories[track.slot.name] = memory

    def merge_publishing(self, memory: Memory) -> None:
        """What one slot learns of the host keys of a project and runtime holds for all; the newest word counts."""
        for publisher, told in memory.publishing.items():
            known = self.publishing.get(publisher)
            if known is None or known.at < told.at:
                self.publishing[publisher] = told
                if known is None or known.published is not told.published:
                    # How long a slot waits for host keys there turns on that word.
                    self.decide_again(self.slots)

    def project_evidence(self, view: ProjectView) -> ProjectEvidence:
        """What every slot of that project is decided on now."""
        return ProjectEvidence(
            view.fresh,
            view.blind_why,
            view.complete,
            view.unanswered or frozenset(),
            view.unreachable_since,
            view.holdings,
            self.publishing,
            self.store.lost,
            self.store.old,
            self.poll_every,
        )

    def add_event(
        self,
        track: SlotTrack,
        kind: str,
        text: str,
        *,
        node: str = "",
        level: str = "info",
        **fields: str | int | float | bool | None,
    ) -> None:
        event = Event(self.clock.now(), kind, text, track.slot.name, node, level, fields)
        self._pending.events.append(event)

    def add_engine_event(self, kind: str, text: str, *, node: str = "", level: str = "info") -> None:
        self._pending.events.append(Event(self.clock.now(), kind, text, "", node, level))

    def relay_event(self, event: Event) -> None:
        """What somebody else saw, to be written and told like any event."""
        self._pending.events.append(event)

    def queue_effect(self, effect: Begun) -> None:
        """Start *effect* once everything pending is on disk."""
        self._pending.effects.append(effect)

    def commit(self) -> None:
        """Everything pending on disk in one transaction, then the effects begin, then the events are told."""
        pending = self._pending
        if not (pending.memories or pending.events or pending.effects):
            return
        self._pending = _Pending()
        if pending.memories or pending.events:
            self.store.save(pending.memories, pending.events)
        for lane, tag, effect in pending.effects:
            self.executor.submit(lane, tag, effect)
        for event in pending.events:
            self.listen(event)

    def mark_store(self, now: float) -> None:
        """
        Note in the store that it is cared for, unless the engine is held. One that may be a backup is left as old as it
        is until every zone in which a slot may have a node has answered, so that the next process doubts it, too.
        """
        if self.is_held or now - self._marked < MARK_EVERY:
            return
        if self.store.old and not self._all_zones_answered():
            return
        # Without room it only looks older than it is.
        with contextlib.suppress(StoreFull):
            self.store.mark_current(self.clock.now())
        self._marked = now

    def _all_zones_answered(self) -> bool:
        if any(view.unanswered is None for view in self.projects.values()):
            return False
        slots = [track.slot for track in self.slots.values()]
        dark = {slot.project: self.project(slot.project).unanswered or () for slot in slots}
        return not any(place.zone in dark[slot.project] for slot in slots for place in slot.places)

    # --- when to decide again

    def wake_at(self, track: SlotTrack, due: float) -> None:
        track.wake_wall = due
        heapq.heappush(self._wakes, (due, track.slot.name))

    def wake_due_slots(self, now: float) -> None:
        while self._wakes and self._wakes[0][0] <= now:
            due, name = heapq.heappop(self._wakes)
            track = self.slots.get(name)
            if track is not None and track.wake_wall == due:
                track.wake_wall = None
                self.dirty[name] = None

    def next_wake(self) -> float | None:
        return self._wakes[0][0] if self._wakes else None

    def set_aside(self, track: SlotTrack, error: Exception) -> None:
        """An error nobody named, in one slot's work: that slot waits, loudly; the others go on."""
        if isinstance(error, StoreError):
            raise error
        now = self.clock.monotonic()
        track.errors = 1 if now - track.erred_at > ERRORS_LAPSE else track.errors + 1
        track.erred_at = now
        pause = min(ASIDE_CAP, ASIDE_FIRST * 2 ** min(track.errors - 1, 10))
        track.aside_until = now + pause
        why = f"set aside for {pause:.0f} s: {type(error).__name__}: {error}"
        track.set_action(Wait(Cause.SET_ASIDE, why, needs_person=True))
        self.wake_at(track, track.aside_until)
        self.add_event(track, "error", f"{type(error).__name__}: {error}", level="error", errors=track.errors)


def _keys_of(track: SlotTrack, memory: Memory) -> list[NodeKey]:
    return [NodeKey(track.slot.project, past.zone, past.name) for past in memory.nodes]


def slots_of(node: str) -> tuple[str, ...]:
    """Names of the slots that a node of this name may belong to."""
    return (node.rpartition("-a")[0], node)


# --- one project between listings: its observed clock, its unreachable zones, its quota, who sleeps until when --------
# The observed clock is the heart of rule 11: it moves only when a listing succeeded, and by at most `cap` each time, so
# that neither an outage nor a suspended machine makes a timeout fire.


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
    unreachable_since: dict[str, Mark] = field(default_factory=dict)
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

    def add_slot(self, slot: str) -> None:
        self.slots.add(slot)

    def apply_listing(self, listing: Listing, now: float) -> None:
        """A listing succeeded at *now* (monotonic seconds)."""
        if self._last_pass is not None:
            self.observed += min(timedelta(seconds=max(0.0, now - self._last_pass)), self.cap)
        self._last_pass = now
        self.passes += 1
        self.fresh, self.blind, self.failures = True, None, 0
        self.unreachable = listing.unreachable
        self.unreachable_since = {
            zone: self.unreachable_since.get(zone, self.mark) for zone in sorted(listing.unreachable)
        }
        before = listing.unreachable if self.unanswered is None else self.unanswered
        self.unanswered = before & listing.unreachable
        self.nodes = len(listing.nodes)
        if listing.cloud_time is not None:
            self._cloud = (listing.cloud_time, now)

    def schedule_next(self, began: float, pause: float, *, limited: bool) -> None:
        """A listing that *began* then has ended; the next is *pause* seconds later. *limited*: its rate was refused."""
        if limited:
            self.listing_pause = pause
        else:
            # The limit that was met is still near: back to the usual pace by halves.
            self.listing_pause = self.listing_pause / 2 if self.listing_pause > 2 * pause else 0.0
        self.poll_due = began + max(pause, self.listing_pause)

    def list_soon(self, now: float, pause: float) -> None:
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

    def hold_quota(self, node: Node) -> None:
        """Whether *node*, which is ours, is dead and still counts against a quota."""
        if node.state not in HOLDS_QUOTA_DEAD:
            self.release_quota(node.name)
            return
        self._held[node.name] = holding(node.key.zone, node.accelerator_type, node.provisioning)
        self._recount()

    def release_quota(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self._recount()

    def _recount(self) -> None:
        holdings = frozenset(self._held.values())
        self.holdings_changed = self.holdings_changed or holdings != self.holdings
        self.holdings = holdings

    def wake_at(self, observed: timedelta, slot: str) -> None:
        """
        Ask about *slot* again once that much has been observed; what was wanted before for it is void.

        Each decision says anew when the next one is due. Were the older instants kept, every one of them would bring a
        decision that sets another: a slot would be decided more often the longer it lives.
        """
        if self._wanted.get(slot) != observed:
            self._wanted[slot] = observed
            heapq.heappush(self._wakes, (observed, slot))

    def due_slots(self) -> Iterator[str]:
        """Slots whose observed wake-up has come."""
        while self._wakes and self._wakes[0][0] <= self.observed:
            due, slot = heapq.heappop(self._wakes)
            if self._wanted.get(slot) == due:
                del self._wanted[slot]
                yield slot
