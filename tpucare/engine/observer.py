"""
Applies listings to slots: which node belongs to which slot, which changed, is missing, foreign or an orphan.

On the engine's thread only. It updates tracks and memories and marks slots for a decision; choices are the planner's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tpucare.engine.effects import Ports
from tpucare.engine.probes import Liveness, Prober
from tpucare.engine.state import EngineState, ProjectView, slots_of
from tpucare.engine.tracking import NodeTrack, SlotTrack
from tpucare.model.accelerators import derive
from tpucare.model.actions import ADOPTING, EffectKind
from tpucare.model.errors import CloudError, ConfigError, NeedsPerson, OwnCredentials, RateLimited
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.ports import Lane
from tpucare.model.resources import Listing, Node, NodeKey, reaches_externally, workers_of
from tpucare.model.text import counted
from tpucare.planner import remember
from tpucare.planner.backoff import listing_pause
from tpucare.planner.budget import bill_node

# After so many failed listings in a row every slot is decided again.
BLIND_AFTER = 2


class Observer:
    """
    Lists projects and applies the listings.

    Args:
        adopt: returns the track of an undeclared slot by fleet and name; None: its fleet is unknown
    """

    def __init__(
        self,
        state: EngineState,
        ports: Ports,
        prober: Prober,
        liveness: Liveness,
        adopt: Callable[[str, str], SlotTrack | None],
        rng: random.Random,
    ) -> None:
        self.state = state
        self.ports = ports
        self.prober = prober
        self.liveness = liveness
        self.adopt = adopt
        self.rng = rng

    def list_due_projects(self, now: float) -> None:
        """Begin a listing of each project that is due, one at a time per project."""
        for view in self.state.projects.values():
            if view.listing or now < view.poll_due:
                continue
            view.listing = True
            listing = partial(self.ports.cloud.list_nodes, view.name)
            self.state.queue_effect((Lane.LIST, ("list", view.name), listing))

    def apply_listing(self, view: ProjectView, listing: Listing | None, error: Exception | None) -> None:
        """Apply a listing that ended, with *listing* or *error*, and schedule the next."""
        began = self.state.clock.monotonic()
        view.listing = False
        if listing is None:
            self._apply_failed_listing(view, error)
        else:
            self._apply_nodes(view, listing, began)
        fast = not view.slots.isdisjoint(self.state.busy)
        # Listing ten thousand nodes costs CPU: at most a fifth of the time goes into it.
        cost = self.state.clock.monotonic() - began
        pause = max(self.state.settings.fast_poll, 5 * cost) if fast else self.state.settings.poll
        if listing is None:
            pause = self.state.settings.poll
            if isinstance(error, RateLimited):
                pause = listing_pause(view.listing_pause, pause, self.rng)
        view.schedule_next(began, pause, limited=isinstance(error, RateLimited))

    def _apply_failed_listing(self, view: ProjectView, error: Exception | None) -> None:
        if not isinstance(error, CloudError):
            raise error or RuntimeError(f"listing {view.name} ended with neither nodes nor an error")
        # A copy without traceback, whose frames hold the response.
        blind = error.reworded(f"listing {view.name} failed: {error.message}")
        if view.fresh or str(blind) != view.blind_why:
            level = "error" if isinstance(blind, OwnCredentials | NeedsPerson) else "warning"
            self.state.add_engine_event("blind", str(blind), level=level)
        if view.fresh:
            for seen in self._tracks_of(view):
                seen.start_own_clock()
        view.fresh, view.blind = False, blind
        view.failures += 1
        # Without listings slots act by probes alone, so one failed listing is not worth two decisions of every slot.
        if view.failures == BLIND_AFTER or view.passes == 0:
            self.state.decide_again(view.slots)

    def _apply_nodes(self, view: ProjectView, listing: Listing, now: float) -> None:
        was_blind, went_dark = not view.fresh, view.unreachable != listing.unreachable
        long_blind = view.failures >= BLIND_AFTER or view.passes == 0
        view.apply_listing(listing, now)
        if was_blind:
            for seen in self._tracks_of(view):
                seen.stop_own_clock(view.mark)
            self.state.add_engine_event(
                "seeing", f"listing {view.name}: {counted(len(listing.nodes), 'node')}", level="debug"
            )
        for key in sorted(listing.changed):
            self.apply_node(view, listing.nodes[key])
        for key in sorted(listing.gone):
            self._mark_unlisted(view, key)
        if went_dark:
            self._apply_unreachable_zones(view, listing.unreachable)
        if (was_blind and long_blind) or went_dark:
            self.state.decide_again(view.slots)
        self.state.decide_again(view.decided_blind & view.slots)
        view.decided_blind.clear()
        self.state.decide_again(view.due_slots())
        # Verdicts on silence and the brake depend on other slots, so these are decided in each pass.
        self.state.decide_again(self.liveness.suspects())
        self.state.decide_again(self.state.braked)

    def _tracks_of(self, view: ProjectView) -> list[NodeTrack]:
        return [seen for name in view.slots for seen in self.state.slots[name].nodes.values()]

    def _apply_unreachable_zones(self, view: ProjectView, unreachable: frozenset[str]) -> None:
        if unreachable:
            self.state.add_engine_event(
                "unreachable", f"zones that do not answer: {', '.join(sorted(unreachable))}", level="warning"
            )
        for name in view.slots:
            track = self.state.slots[name]
            for seen in track.nodes.values():
                if seen.node.key.zone in unreachable:
                    seen.mark_zone_unreachable(view.mark)
                else:
                    if seen.zone_unreachable and seen.listed:
                        self.state.update_memory(track, remember.mark_in_sight(track.memory, seen.node.name))
                    seen.mark_zone_reachable(view.mark)
                    self.prober.resume_probes(track, seen)

    def apply_node(self, view: ProjectView, node: Node) -> None:
        """Apply a listed node to its slot, by memory, else by labels; else it is foreign or an orphan."""
        if node.owner != self.ports.owner:
            self.apply_foreign_node(view, node)
            if (known := self.state.slot_of(node)) is not None:
                view.foreign.setdefault(known.slot.name, {})[node.key] = node
                view.lost[node.key] = known.slot.name
                self.apply_relabelled_node(view, node, known)
            return
        self._forget_foreign_node(view, node.key)
        known = self.state.slot_of(node)
        if known is not None and known.slot.name != node.slot:
            self._warn_of_label(known, node)
        track = known or self.state.slots.get(node.slot) or self.adopt(node.fleet, node.slot)
        if track is None or track.slot.project != view.name:
            elsewhere = self.state.settings.elsewhere
            if elsewhere is not None and elsewhere(node):
                self.state.orphans.pop(node.name, None)
                return
            if node.name not in self.state.orphans:
                text = f"{node.name} in {node.key.zone} has our owner label and an unknown fleet ({node.fleet})"
                self.state.add_engine_event("stray", f"{text}: `tpucare gc` lists it", node=node.name, level="warning")
            self.state.orphans[node.name] = node
            return
        self.apply_own_node(view, track, node)

    def _warn_of_label(self, track: SlotTrack, node: Node) -> None:
        seen = track.nodes.get(node.name)
        if seen is None or seen.node.slot != node.slot:
            text = f"{node.name}: its label says {node.slot or 'no slot'} now; it stays with {track.slot.name}"
            self.state.add_event(track, "label", text, node=node.name, level="warning")

    def apply_foreign_node(self, view: ProjectView, node: Node) -> None:
        """Record a node of another owner for the slots whose name it has."""
        for slot in slots_of(node.name):
            known = view.foreign.setdefault(slot, {})
            if slot in view.slots:
                self.state.dirty[slot] = None
                if node.key not in known and self.state.slot_of(node) is None:
                    whose = f"another owner ({node.owner})" if node.owner else "no owner's label"
                    text = f"{node.name} in {node.key.zone} has the name of {slot} and {whose}: it is left alone"
                    self.state.add_engine_event(
                        "foreign", f"{text}; `tpucare adopt-node` takes it over", node=node.name
                    )
            known[node.key] = node

    def _forget_foreign_node(self, view: ProjectView, key: NodeKey) -> None:
        for slot in (*slots_of(key.name), view.lost.pop(key, "")):
            if view.foreign.get(slot, {}).pop(key, None) is not None and slot in view.slots:
                self.state.dirty[slot] = None

    def apply_relabelled_node(self, view: ProjectView, node: Node, track: SlotTrack) -> None:
        """Let go of a node of ours that has another owner's label now (rule 2)."""
        past = track.memory.node(node.name)
        if past is not None and past.status is NodeStatus.TAKEN:
            return
        self.ports.launcher.disconnect(node.key)
        self.state.dirty[track.slot.name] = None
        self.state.update_memory(track, remember.mark_taken(track.memory, node.name))
        self.forget_node(track, view, node.name, f"{node.name} has another owner's label now: left alone")

    def apply_own_node(self, view: ProjectView, track: SlotTrack, node: Node) -> None:
        """Apply a listed or read node of ours to its slot."""
        seen = track.nodes.get(node.name)
        if seen is None or seen.node.id != node.id:
            seen = track.nodes[node.name] = NodeTrack(node, view.mark, view.mark)
            track.ended_effects.pop(ADOPTING, None)
        before = seen.node.state
        fresh = seen.probe_due is None and seen.workers is None
        seen.mark_zone_reachable(view.mark)
        seen.apply_node(node, view.mark)
        seen.listed = True
        track.failed_reads.pop(node.name, None)
        view.hold_quota(node)
        memory = remember.apply_node(track.memory, node)
        self.state.update_memory(track, bill_node(memory, track.slot, node, self.state.cloud_now(track)))
        if before is not node.state or fresh:
            self.state.add_event(
                track, "state", f"{node.name} is {node.state.name}", node=node.name, state=node.state.name
            )
        self._update_addresses(track, seen)
        self.prober.resume_probes(track, seen)
        self.state.dirty[track.slot.name] = None
        self._decide_quota_waiters(view)

    def _mark_unlisted(self, view: ProjectView, key: NodeKey) -> None:
        name = key.name
        self.state.orphans.pop(name, None)
        view.release_quota(name)
        self._forget_foreign_node(view, key)
        if found := self.state.find_node(key):
            found[1].listed = False
            self.state.dirty[found[0].slot.name] = None
        self._decide_quota_waiters(view)

    def forget_node(self, track: SlotTrack, view: ProjectView, name: str, why: str = "") -> None:
        """Drop the node *name* of the slot's track: it is gone, or *why*. The launcher drops its host keys."""
        track.forget_node(name)
        track.ended_effects[EffectKind.GONE.of(name)] = view.mark
        view.release_quota(name)
        self.liveness.update_silence(track)
        self.state.add_event(track, "lost" if why else "gone", why or f"{name} is gone", node=name)
        self._decide_quota_waiters(view)

    def _decide_quota_waiters(self, view: ProjectView) -> None:
        if view.holdings_changed:
            view.holdings_changed = False
            self.state.decide_again(self.state.lacks_quota & view.slots)

    def _update_addresses(self, track: SlotTrack, seen: NodeTrack) -> None:
        """Set the workers' addresses once all are listed, and watch their ports."""
        past = track.memory.node(seen.node.name)
        place = track.slot.place(past.place) if past is not None else None
        external = reaches_externally(seen.node, place, track.slot.places)
        workers = workers_of(seen.node, external=external, expected=place.workers if place else _hosts_of(seen.node))
        if workers == seen.workers:
            return
        seen.workers = workers
        if workers is not None:
            self.ports.launcher.watch_workers(workers)
            self.prober.schedule_probe(track, seen, self.state.clock.monotonic())


def _hosts_of(node: Node) -> int:
    """Number of workers by the accelerator type; a CREATING node lists its endpoints one by one."""
    try:
        return derive(node.accelerator_type).hosts
    except ConfigError:
        return max(1, len(node.endpoints))
