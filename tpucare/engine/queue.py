"""
Lists the queued resources of projects that use them, and applies the listings to slots.

On the engine's thread only. A resource belongs to a slot by memory, else by the labels in its node_spec (rule 2);
choices are the planner's. Where no slot uses a queue nothing is listed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tpucare.engine.effects import Ports
from tpucare.engine.state import EngineState, ProjectView, slots_of
from tpucare.engine.tracking import QUEUE_SWEEP, SlotTrack
from tpucare.model.errors import PERMISSION_DENIED, CloudError, NeedsPerson, RateLimited
from tpucare.model.evidence import QueueEvidence
from tpucare.model.ports import Lane
from tpucare.model.resources import NodeKey, QueuedResource, QueueListing, parse_node_name
from tpucare.planner import remember
from tpucare.planner.backoff import listing_pause

FAILED_PAUSE = 10.0


class QueueObserver:
    """
    Lists queued resources and applies the listings.

    adopt: returns the track of an undeclared slot by fleet and name; None: its fleet is unknown
    """

    def __init__(
        self,
        state: EngineState,
        ports: Ports,
        adopt: Callable[[str, str], SlotTrack | None],
        rng: random.Random,
    ) -> None:
        self.state = state
        self.ports = ports
        self.adopt = adopt
        self.rng = rng

    def list_due_queues(self, now: float) -> None:
        """Begin a listing of each project that uses queues and is due, one at a time per project."""
        for view in self.state.projects.values():
            if not view.queue.listing and self.is_listed(view) and now >= view.queue.due:
                view.queue.listing = True
                listing = partial(self.ports.cloud.list_queued, view.name)
                self.state.queue_effect((Lane.LIST, ("queue", view.name), listing))

    def is_listed(self, view: ProjectView) -> bool:
        return bool(view.queue.users) or self.state.settings.sweep_queues

    def next_due(self) -> float | None:
        """When the next listing is due; None: none is, or it is under way."""
        queues = [view.queue for view in self.state.projects.values() if self.is_listed(view)]
        return min((queue.due for queue in queues if not queue.listing), default=None)

    def apply_listing(self, view: ProjectView, listing: QueueListing | None, error: Exception | None) -> None:
        """Apply a listing that ended, with *listing* or *error*, and schedule the next."""
        queue, now = view.queue, self.state.clock.monotonic()
        queue.listing = False
        if listing is None:
            if not isinstance(error, CloudError):
                raise error or RuntimeError(f"listing the queue of {view.name} ended with neither resources nor error")
            if queue.fresh or queue.why != str(error):
                text = f"listing the queued resources of {view.name} failed: {error}"
                level = "warning" if queue.users else "debug"
                self.state.add_engine_event("queue-blind", text, level=level)
            queue.fresh, queue.why = False, str(error)
            queue.forbidden = isinstance(error, NeedsPerson) and error.code == PERMISSION_DENIED
            pause = max(FAILED_PAUSE, self.state.settings.poll)
            limited = isinstance(error, RateLimited)
            queue.pause = listing_pause(queue.pause, pause, self.rng) if limited else pause
            if not queue.users:
                queue.pause = QUEUE_SWEEP
        else:
            self._apply_resources(view, listing)
            queue.pause = max(self._pause(view), self.state.settings.poll)
        queue.due = now + queue.pause

    def _pause(self, view: ProjectView) -> float:
        return min((self.state.slots[name].queue_pause for name in view.queue.users), default=QUEUE_SWEEP)

    def _apply_resources(self, view: ProjectView, listing: QueueListing) -> None:
        queue = view.queue
        was_blind, went_dark = not queue.fresh, queue.unreachable != listing.unreachable
        queue.fresh, queue.why, queue.unreachable = True, "", listing.unreachable
        queue.foreign = {}
        known = {resource.name for resource in listing.resources.values()}
        for name in [name for name, one in self.state.orphan_requests.items() if one.key.project == view.name]:
            if name not in known:
                del self.state.orphan_requests[name]
        for key in sorted(listing.resources):
            self.apply_resource(view, listing.resources[key])
        for name in sorted(queue.users):
            self._mark_missing(view, self.state.slots[name], listing)
        if was_blind or went_dark:
            self.state.decide_again(queue.users)

    def _mark_missing(self, view: ProjectView, track: SlotTrack, listing: QueueListing) -> None:
        project, slot = track.slot.project, track.slot.name
        missing = frozenset(
            request.name
            for request in track.memory.requests
            if NodeKey(project, request.zone, request.name) not in listing.resources
            and request.zone not in listing.unreachable
        )
        if missing or view.queue.missing.get(slot):
            # What is missing is asked for again and again, until its absence is proven.
            self.state.dirty[slot] = None
        view.queue.missing[slot] = missing

    def apply_resource(self, view: ProjectView, resource: QueuedResource) -> None:
        """Apply a listed or read queued resource to its slot, by memory, else by labels; else it is reported."""
        if resource.owner != self.ports.owner:
            self._apply_foreign(view, resource)
            return
        track = self._slot_of(resource)
        if track is None or track.slot.project != view.name:
            self._report(resource)
            return
        self.state.orphan_requests.pop(resource.name, None)
        if track.memory.request(resource.name) is None and self._is_anothers(view, resource):
            return
        memory = remember.apply_request(track.memory, resource, self.state.clock.now(), self.rng)
        if memory != track.memory:
            self.state.update_memory(track, memory)
            view.queue.users.add(track.slot.name)
            text = f"the queued resource {resource.name} in {resource.key.zone} is {resource.state.name}"
            self.state.add_event(track, "queue", text, node=resource.name, state=resource.state.name)
            self.state.dirty[track.slot.name] = None

    def _slot_of(self, resource: QueuedResource) -> SlotTrack | None:
        for name in slots_of(resource.name):
            track = self.state.slots.get(name)
            if track is not None and track.memory.request(resource.name) is not None:
                # A name is used once: one of it in another zone is none that this store asked for.
                return track if _is_known(track, resource) else None
        parsed = parse_node_name(resource.name)
        if parsed is None or parsed[0] != resource.slot or resource.nodes != (resource.name,):
            # Not of the form that this program asks for.
            return None
        return self.state.slots.get(resource.slot) or self.adopt(resource.fleet, resource.slot)

    def _is_anothers(self, view: ProjectView, resource: QueuedResource) -> bool:
        """Its node bears another owner's label by now: then the resource is left alone, too (rule 2)."""
        theirs = (key for nodes in view.foreign.values() for key in nodes)
        return any(key == resource.key for key in theirs)

    def _apply_foreign(self, view: ProjectView, resource: QueuedResource) -> None:
        for slot in slots_of(resource.name):
            view.queue.foreign.setdefault(slot, set()).add((resource.key.zone, resource.name))
            track = self.state.slots.get(slot)
            if track is not None and _is_known(track, resource):
                self.drop(track, resource.key)

    def drop(self, track: SlotTrack, key: NodeKey) -> None:
        """The queued resource of that name is not ours: the next request takes the next number."""
        self.state.update_memory(track, track.memory.without_request(key.name))
        text = f"the queued resource {key.name} in {key.zone} does not bear our owner label: it is left alone"
        self.state.add_event(track, "foreign", text, node=key.name, level="warning")
        self.state.dirty[track.slot.name] = None

    def _report(self, resource: QueuedResource) -> None:
        elsewhere = self.state.settings.elsewhere
        if elsewhere is not None and elsewhere(resource):
            self.state.orphan_requests.pop(resource.name, None)
            return
        if resource.name not in self.state.orphan_requests:
            what = f"the queued resource {resource.name} in {resource.key.zone}"
            text = f"{what} has our owner label and an unknown fleet ({resource.fleet}): `tpucare gc` lists it"
            self.state.add_engine_event("stray", text, node=resource.name, level="warning")
        self.state.orphan_requests[resource.name] = resource

    def evidence(self, view: ProjectView, track: SlotTrack) -> QueueEvidence:
        queue = view.queue
        if not queue.users:
            return _UNUSED
        name = track.slot.name
        return QueueEvidence(
            queue.fresh,
            queue.unreachable,
            queue.missing.get(name, frozenset()),
            frozenset(queue.foreign.get(name, ())),
            {request: since for request, (_, since) in track.requests_since.items()},
        )


def _is_known(track: SlotTrack, resource: QueuedResource) -> bool:
    request = track.memory.request(resource.name)
    return request is not None and request.zone == resource.key.zone


_UNUSED = QueueEvidence()
