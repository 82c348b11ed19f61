"""
The state that the parts of the engine share, on the engine's thread: slots, projects, dirty slots, pending writes.

Memories, events and effects of one step are collected here. `commit` writes them in one transaction, then starts the
effects, then hands out the events.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tpucare.engine.markets import MarketBook
from tpucare.engine.tracking import NodeTrack, SlotTrack
from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.errors import CloudError, StoreError, StoreFull
from tpucare.model.evidence import POLL_FRESH_EVERY, POLL_OPERATION_EVERY, Holding, Mark, ProjectEvidence, holding
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import Memory, Publishing, StoredArchive
from tpucare.model.ports import Clock, Executor, Lane, MarketKnowledge, Store
from tpucare.model.resources import Event, Listing, Node, NodeKey, NodeState, QueuedResource, Slot
from tpucare.planner.backoff import poll_pause
from tpucare.planner.budget import settle_nodes
from tpucare.planner.cadence import Cadence, advise_saves
from tpucare.planner.markets import EMPTY_MARKET, market_at, outlook
from tpucare.planner.placement import Budget

ASIDE_FIRST, ASIDE_CAP = 10.0, 600.0
# After so many seconds without an error the next one is the first of a row.
ERRORS_LAPSE = 3600.0
# Seconds between heartbeats, each a synced commit; a store is old after ten missed ones (`memory.OLD_AFTER`).
MARK_EVERY = 60.0

Begun = tuple[Lane, tuple[Hashable, ...], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Pace and limits of the loop, in seconds unless named otherwise. Fixed for the life of an engine.

    budget:    makes the create budget of a project; None = one of this process, of `creates_per_minute`
    elsewhere: whether another store of our state folder cares for a node or queued resource with our owner label
    sweep_queues: list queued resources also where no slot uses one, for orphans
    """

    poll: float = 5.0
    fast_poll: float = 1.0
    probe: float = 15.0
    fast_probe: float = 1.0
    creates_per_minute: int = 60
    brake_minimum: int = 3
    brake_share: float = 0.2
    budget: Callable[[str], Budget] | None = None
    elsewhere: Callable[[Node | QueuedResource], bool] | None = None
    sweep_queues: bool = False


@dataclass(slots=True)
class _Pending:
    memories: dict[str, Memory] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    effects: list[Begun] = field(default_factory=list)


class EngineState:
    """The shared state of one engine; its methods keep it consistent and choose nothing."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        executor: Executor,
        rng: random.Random,
        settings: Settings,
        listen: Callable[[Event], None],
        knowledge: MarketKnowledge | None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.executor = executor
        self.settings = settings
        self.listen = listen
        # Set by `Engine.hold` and `Engine.release` alone.
        self.is_held = False
        self.acts_for: Callable[[Slot], bool] = lambda _: True
        self.slots: dict[str, SlotTrack] = {}
        self.projects: dict[str, ProjectView] = {}
        self.orphans: dict[str, Node] = {}
        self.orphan_requests: dict[str, QueuedResource] = {}
        self.dirty: dict[str, None] = {}
        self.busy: set[str] = set()
        self.braked: set[str] = set()
        self.lacks_quota: set[str] = set()
        self.polling: set[str] = set()
        self.poll_every, self.poll_fresh_every = POLL_OPERATION_EVERY, POLL_FRESH_EVERY
        self._slots_by_node: dict[NodeKey, str] = {}
        self.publishing: dict[str, Publishing] = {}
        self.archives: dict[str, StoredArchive] = {}
        self.markets = MarketBook(clock, rng, knowledge)
        self.waits_for_place: set[str] = set()
        self._wakes: list[tuple[float, str]] = []
        self._pending = _Pending()
        self._marked = -math.inf

    def project(self, name: str) -> ProjectView:
        view = self.projects.get(name)
        if view is None:
            view = self.projects[name] = ProjectView(name, cap=timedelta(seconds=3 * self.settings.poll))
        return view

    def find_node(self, key: NodeKey) -> tuple[SlotTrack, NodeTrack] | None:
        """The tracks of a node, by its name, else among all slots: an adopted node has any name."""
        named = [self.slots[slot] for slot in slots_of(key.name) if slot in self.slots]
        for track in itertools.chain(named, self.slots.values()):
            seen = track.nodes.get(key.name)
            if seen is not None and seen.node.key == key:
                return track, seen
        return None

    def slot_of(self, node: Node) -> SlotTrack | None:
        """The slot that remembers *node*, whatever its labels say, since people may edit those."""
        track = self.slots.get(self._slots_by_node.get(node.key, ""))
        past = track.memory.node(node.name) if track is not None else None
        return track if past is not None and (past.id, past.zone) == (node.id, node.key.zone) else None

    def add_slot(self, track: SlotTrack) -> None:
        """Add a slot, and index the nodes in its memory."""
        self.slots[track.slot.name] = track
        self.markets.restore_slot(track.slot, track.memory)
        self._slots_by_node.update(dict.fromkeys(_keys_of(track, track.memory), track.slot.name))

    def decide_again(self, names: Iterable[str]) -> None:
        """Mark slots dirty, sorted by name: sets differ in order between processes, and a seed must give one run."""
        self.dirty.update(dict.fromkeys(sorted(names)))

    def update_slot_sets(self, track: SlotTrack) -> None:
        """Update the sets of busy, braked, quota-waiting and polling slots after a decision."""
        name, view = track.slot.name, self.project(track.slot.project)
        if not track.is_busy(view.mark):
            self.busy.discard(name)
        elif name not in self.busy:
            self.busy.add(name)
            view.list_soon(self.clock.monotonic(), self.settings.fast_poll)
        (self.braked.add if track.braked or track.brake_lifted else self.braked.discard)(name)
        lacks = any(place.kind.is_own_quota for place in track.memory.places.values())
        (self.lacks_quota.add if lacks else self.lacks_quota.discard)(name)
        waits = track.action.cause is Cause.NO_PLACE_OPEN
        (self.waits_for_place.add if waits else self.waits_for_place.discard)(name)
        if track.uses_queue:
            view.queue.users.add(name)
            view.queue.due = min(view.queue.due, self.clock.monotonic() + track.queue_pause)
        else:
            view.queue.users.discard(name)
        polls = any(intent.state is CreateState.RUNNING for intent in track.memory.creates)
        (self.polling.add if polls else self.polling.discard)(name)
        pauses = poll_pause(len(self.polling)), poll_pause(len(self.polling), POLL_FRESH_EVERY)
        if pauses != (self.poll_every, self.poll_fresh_every):
            self.poll_every, self.poll_fresh_every = pauses
            self.decide_again(self.polling)

    def forget_slot(self, slot: str) -> None:
        for view in self.projects.values():
            view.queue.users.discard(slot)
            view.queue.missing.pop(slot, None)
        for names in (self.busy, self.braked, self.lacks_quota, self.polling, self.waits_for_place):
            names.discard(slot)
        self.dirty.pop(slot, None)

    # --- pending writes, events and effects

    def update_memory(self, track: SlotTrack, memory: Memory) -> None:
        """Set the slot's memory, to be written by the next `commit`."""
        if memory is not track.memory and memory != track.memory:
            if memory.nodes is not track.memory.nodes:
                for key in _keys_of(track, track.memory):
                    self._slots_by_node.pop(key, None)
                self._slots_by_node.update(dict.fromkeys(_keys_of(track, memory), track.slot.name))
                memory = settle_nodes(track.memory, memory, self.cloud_now(track))
            before, track.memory = track.memory, memory
            self._pending.memories[track.slot.name] = memory
            if self.markets.change_slot(track.slot, before, memory):
                # What one slot learned of a market opens or closes it for all that wait.
                self.decide_again(self.waits_for_place & self.project(track.slot.project).slots)
            self.merge_publishing(memory)
            self.merge_archive(memory)

    def cloud_now(self, track: SlotTrack) -> datetime:
        """The service's clock, by which the lives of nodes are counted."""
        return self.project(track.slot.project).cloud_now(self.clock.monotonic(), self.clock.now())

    def merge_publishing(self, memory: Memory) -> None:
        """Share what one slot learned about published host keys with all; the newest observation counts."""
        for publisher, newest in memory.publishing.items():
            known = self.publishing.get(publisher)
            if known is None or known.at < newest.at:
                self.publishing[publisher] = newest
                if known is None or known.published is not newest.published:
                    # The time that slots wait for host keys there depends on it.
                    self.decide_again(self.slots)

    def merge_archive(self, memory: Memory) -> None:
        """Share the environment that one slot stored with all of its scope; the newest counts."""
        stored = memory.stored
        if stored is None:
            return
        known = self.archives.get(stored.archive.scope)
        if known is None or known.at < stored.at:
            self.archives[stored.archive.scope] = stored

    def project_evidence(self, view: ProjectView) -> ProjectEvidence:
        """The evidence that all slots of the project share now."""
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
            self.poll_fresh_every,
            self.markets.of(view.name),
        )

    def cadence_of(self, track: SlotTrack) -> Cadence:
        """How often the slot's run should save, by the lives of all nodes where its node lives."""
        memory, slot = track.memory, track.slot
        past = memory.node(memory.run.node) if memory.run is not None else None
        market = market_at(self.markets.of(slot.project), past.place) if past is not None and past.place else None
        life = outlook(market or EMPTY_MARKET, self.clock.now()).life
        return advise_saves(timedelta(hours=life), memory.save_seconds, slot.care.save_every)

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
        """Add an event of another part of the process."""
        self._pending.events.append(event)

    def queue_effect(self, effect: Begun) -> None:
        """Start *effect* once everything pending is on disk."""
        self._pending.effects.append(effect)

    def commit(self) -> None:
        """Write everything pending in one transaction, then start the effects, then hand out the events."""
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
        Write the store's heartbeat each MARK_EVERY, unless the engine is held.

        An old store gets none before every zone of its slots' places has answered, so that the next process doubts it,
        too.
        """
        if self.is_held or now - self._marked < MARK_EVERY:
            return
        if self.store.old and not self._all_zones_answered():
            return
        # On a full disk the store only looks older than it is.
        with contextlib.suppress(StoreFull):
            self.store.mark_current(self.clock.now())
        self.markets.exchange()
        self._marked = now

    def _all_zones_answered(self) -> bool:
        if any(view.unanswered is None for view in self.projects.values()):
            return False
        slots = [track.slot for track in self.slots.values()]
        silent = {slot.project: self.project(slot.project).unanswered or () for slot in slots}
        return not any(place.zone in silent[slot.project] for slot in slots for place in slot.places)

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
        """Suspend one slot after an unexpected error, with an event; other slots go on. Raises: StoreError again."""
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


# --- one project between listings: observed clock, unreachable zones, quota, wake-ups ---------------------------------
# The observed clock (rule 11) moves only with a successful listing, and by at most `cap`, so that neither an outage nor
# a suspended machine makes a timeout fire.


HOLDS_QUOTA_DEAD = frozenset({NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING})


@dataclass(slots=True)
class QueueView:
    """
    The queued resources of one project, as of their last listing.

    users:  slots that use a queue    forbidden: we may not list them
    why:    error of the last listing; empty: it succeeded    pause, due: seconds until the next one, and its instant
    missing: by slot, its requests that the last listing left out    foreign: by slot, zone and name of others'
    """

    users: set[str] = field(default_factory=set)
    fresh: bool = False
    forbidden: bool = False
    why: str = ""
    unreachable: frozenset[str] = frozenset()
    listing: bool = False
    pause: float = 0.0
    due: float = 0.0
    missing: dict[str, frozenset[str]] = field(default_factory=dict)
    foreign: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """They were listed, or this program can have none, since it may not even list them."""
        return self.fresh or (self.forbidden and not self.users)


@dataclass(slots=True)
class ProjectView:
    """
    One project, as of its last listings.

    cap:           longest step of the observed clock per listing
    blind:         error of the last listing, naming the project; None: it succeeded    failures: failed ones in a row
    decided_blind: slots decided since the last successful listing
    unanswered:    zones that have not answered since this process started; None = no listing yet
    listing_pause: seconds of the pause after RateLimited listings; 0 = none
    foreign:       nodes of other owners, by the slot names they use    lost: slots of nodes relabelled by others
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
    queue: QueueView = field(default_factory=QueueView)
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
        """Advance the observed clock; apply zones, clock and node count of a listing at *now* (monotonic seconds)."""
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
        """Schedule the listing after one that *began* then, *pause* seconds later. *limited*: RateLimited."""
        if limited:
            self.listing_pause = pause
        else:
            # The rate limit is still near: halve the pause with each success.
            self.listing_pause = self.listing_pause / 2 if self.listing_pause > 2 * pause else 0.0
        self.poll_due = began + max(pause, self.listing_pause)

    def list_soon(self, now: float, pause: float) -> None:
        """List *pause* seconds after the last listing, unless that was RateLimited."""
        if self.listing_pause:
            return
        since = self._last_pass if self._last_pass is not None else now - pause
        self.poll_due = min(self.poll_due, max(now, since + pause))

    @property
    def knows_cloud_clock(self) -> bool:
        return self._cloud is not None

    def cloud_now(self, now: float, wall: datetime) -> datetime:
        """The service's clock, advanced by ours since its last answer; our wall time before the first."""
        if self._cloud is None:
            return wall
        answered, at = self._cloud
        return answered + timedelta(seconds=now - at)

    def hold_quota(self, node: Node) -> None:
        """Record whether *node*, of ours, is dead and still holds quota."""
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
        Decide *slot* again at that observed time, in place of an earlier request.

        Each decision sets the next one. If earlier requests stayed, each would cause a decision that sets another, and
        decisions of a slot would grow with its age.
        """
        if self._wanted.get(slot) != observed:
            self._wanted[slot] = observed
            heapq.heappush(self._wakes, (observed, slot))

    def due_slots(self) -> Iterator[str]:
        """Slots whose wake-up in observed time is due."""
        while self._wakes and self._wakes[0][0] <= self.observed:
            due, slot = heapq.heappop(self._wakes)
            if self._wanted.get(slot) == due:
                del self._wanted[slot]
                yield slot
