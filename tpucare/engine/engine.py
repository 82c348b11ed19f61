"""
The loop: observe, decide, apply, remember.

The engine decides on one thread and starts none: listings, probes and effects run on the Executor and come back as
`Finished`. The memories that one step changes are one transaction, on disk before any effect of that step begins. The
planner makes the choices, `effects` the calls, `observer` and `probes` the observations; `change` writes the commands
of people.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta

from tpucare.engine import effects
from tpucare.engine.admission import HOLD_LAPSES, CreateAdmission, CreateSemaphore, VerdictAdmission, is_judged
from tpucare.engine.bounds import BoundsWatch
from tpucare.engine.effects import ChangedMeanwhile, Ports, lane_of, prepare
from tpucare.engine.observer import Observer
from tpucare.engine.probes import Liveness, Prober
from tpucare.engine.queue import QueueObserver
from tpucare.engine.slots import SlotRegistry
from tpucare.engine.state import EngineState, ProjectView, Settings
from tpucare.engine.tracking import SlotTrack
from tpucare.model.actions import (
    ADOPTING,
    AddSshKey,
    Create,
    Delete,
    DeleteRequest,
    Effect,
    EffectKind,
    Enqueue,
    FetchHostKeys,
    GetNode,
    GetOperation,
    GetRequest,
    Launch,
    Record,
    Stop,
    Wait,
    end_of,
    failed,
    fields_of,
    kind_of,
    level_of,
    node_of,
    text_of,
)
from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import ConfigError, LostRace, NodeGone, TpuCareError
from tpucare.model.evidence import Evidence, Moment, request_read
from tpucare.model.memory import DesiredState, End, Memory
from tpucare.model.ports import Clock, Executor, Finished, Gate, Lane, MarketKnowledge, Store
from tpucare.model.resources import Event, Listing, Node, NodeKey, QueuedResource, QueueListing, Slot
from tpucare.planner import remember
from tpucare.planner.decide import decide, live_nodes, tries_again_at
from tpucare.planner.run import is_foreign

__all__ = ["Engine", "Settings"]

# Decisions of one slot in one pass; more mean a rule that never waits, which is an error of that slot.
STEPS_PER_SLOT = 40
# Further decisions for each of its creates and nodes.
STEPS_PER_THING = 2


class Engine:
    """
    Keeps every declared slot in its desired state.

    Args:
        ports: the cloud, the launcher, our owner label and our public key
        listen: called with every event, after it is on disk; never with a secret
        gate: the user's creation semaphore; None = every create is allowed
        knowledge: what was learned of markets, over processes; None = it ends with the engine
    """

    def __init__(
        self,
        ports: Ports,
        store: Store,
        clock: Clock,
        executor: Executor,
        rng: random.Random,
        settings: Settings | None = None,
        listen: Callable[[Event], None] | None = None,
        gate: Gate | None = None,
        knowledge: MarketKnowledge | None = None,
    ) -> None:
        self.ports = ports
        self.store = store
        self.clock = clock
        self.executor = executor
        self.rng = rng
        self.state = EngineState(
            store, clock, executor, rng, settings or Settings(), listen or (lambda _: None), knowledge
        )
        self.liveness = Liveness(self.state)
        self.prober = Prober(self.state, ports, self.liveness, rng)
        self.create_admission = CreateAdmission(self.state, CreateSemaphore(gate))
        self.registry = SlotRegistry(self.state, self.create_admission)
        self.observer = Observer(self.state, ports, self.prober, self.liveness, self.registry.restore_slot, rng)
        self.queue_observer = QueueObserver(self.state, ports, self.registry.restore_slot, rng)
        self.bounds = BoundsWatch(self.state, self.registry.removed_memories)
        self.verdict_admission = VerdictAdmission(self.state, self.liveness)
        self._relayed: deque[Event] = deque()

    @property
    def slots(self) -> dict[str, SlotTrack]:
        return self.state.slots

    @property
    def projects(self) -> dict[str, ProjectView]:
        return self.state.projects

    @property
    def listen(self) -> Callable[[Event], None]:
        """The receiver of events."""
        return self.state.listen

    @property
    def orphans(self) -> dict[str, Node]:
        """Nodes that bear our owner label and a fleet that this store has never known."""
        return self.state.orphans

    @property
    def orphan_requests(self) -> dict[str, QueuedResource]:
        """Queued resources with our owner label in their node_spec, and a fleet that this store has never known."""
        return self.state.orphan_requests

    # --- declarations and commands -----------------------------------------------------------------------------------

    def declare(
        self,
        fleet: str,
        slots: Iterable[Slot],
        surplus: Callable[[str], Slot | None],
        desired: DesiredState = DesiredState.UP,
    ) -> None:
        """
        Set the slots of *fleet* as last accepted (`SlotRegistry.declare`). An edit alone never touches a live node.
        """
        self.registry.declare(fleet, slots, surplus, desired)
        # Nodes with our label whose fleet was unknown until now.
        for node in [node for node in self.orphans.values() if node.fleet == fleet]:
            del self.orphans[node.name]
            self.observer.apply_node(self.state.project(node.key.project), node)
        for one in [one for one in self.orphan_requests.values() if one.fleet == fleet]:
            del self.orphan_requests[one.name]
            self.queue_observer.apply_resource(self.state.project(one.key.project), one)

    def list_project(self, project: str) -> None:
        """List *project* even without a declared slot, for orphans and late nodes."""
        self.state.project(project)

    def change(self, slot: str, alter: Callable[[Memory], Memory], kind: str, text: str, **fields: str) -> None:
        """Apply a command to the memory of *slot*; on disk when this returns. *fields*: of its event."""
        track = self.slots[slot]
        self.state.update_memory(track, alter(track.memory))
        self.state.add_event(track, kind, text, **fields)
        track.braked = False
        self.state.dirty[slot] = None
        self.state.commit()

    def lift_brake(self, slot: str) -> None:
        """Admit the verdict held now. Without one this changes nothing for later verdicts."""
        track = self.slots[slot]
        track.brake_lifted = track.brake_lifted or track.braked
        self.state.dirty[slot] = None

    def delete_orphan(self, name: str) -> None:
        """`gc --apply`: delete the orphan *name* (our owner label, unknown fleet); its end is an event."""
        node = self.orphans[name]
        action = Delete(node.key, node.id, node.create_time, Cause.GC_ASKED, "gc was asked for", Reason.ASKED)
        self.state.queue_effect(
            (Lane.CLOUD, ("collect", name), lambda: effects.delete_ours(action, self.ports.cloud, self.ports.owner))
        )
        self.state.add_engine_event("collect", f"{name}: deleting the orphan", node=name)
        self.state.commit()

    def delete_orphan_request(self, name: str) -> None:
        """`gc --apply`: delete the queued resource *name* (our owner label, unknown fleet); its end is an event."""
        key = self.orphan_requests[name].key
        self.state.queue_effect(
            (
                Lane.CLOUD,
                ("collect", name),
                lambda: effects.delete_own_request(key, self.ports.cloud, self.ports.owner),
            )
        )
        self.state.add_engine_event("collect", f"{name}: deleting the orphan queued resource", node=name)
        self.state.commit()

    def adopt_node(self, node: str, slot: str) -> None:
        """
        `adopt-node`: label *node* of any owner as ours and this slot's; the end is an event.

        Raises: ConfigError: no such node of another owner is listed, or the slot has a node.
        """
        track = self.slots[slot]
        view = self.state.project(track.slot.project)
        if live := live_nodes(self._evidence(view, track), track.memory):
            advice = "choose a slot without a node; the slots of a fleet declared with `apply --paused` have none"
            raise ConfigError(f"{slot} has a node, {live[0].node.name}: {advice}")
        known = view.foreign.values()
        found = [seen for nodes in known for seen in nodes.values() if seen.name == node]
        if not found:
            raise ConfigError(f"no node {node} of another owner is listed in {track.slot.project}")
        key, labels = found[0].key, effects.labels_of(track.slot, None, self.ports)
        self.state.queue_effect((Lane.CLOUD, ("adopt", node, slot), lambda: self.ports.cloud.add_labels(key, labels)))
        track.ended_effects[ADOPTING] = view.mark
        self.state.dirty[slot] = None
        self.state.add_event(track, "adopt", f"{node}: labelling it as ours", node=node)
        self.state.commit()

    def relay_event(self, event: Event) -> None:
        """Write *event* to disk, then hand it to `listen`. From any thread."""
        self._relayed.append(event)
        self.executor.nudge()

    def hold(self) -> None:
        """Observe and decide, but begin nothing and write no heartbeat, until `release`."""
        self.state.is_held = True

    def release(self, acts_for: Callable[[Slot], bool] | None = None) -> None:
        """Begin the decided actions of the slots that *acts_for* accepts; None = all."""
        self.state.is_held = False
        self.state.acts_for = acts_for or (lambda _: True)
        self.state.decide_again(self.slots)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Step and sleep until *until* is true. Raises: StoreError: intents cannot be written any more."""
        while not until():
            self.executor.sleep(timedelta(seconds=self.step()))

    def step(self) -> float:
        """One turn of the loop. Returns the seconds to sleep unless an effect ends."""
        for finished in self.executor.finished():
            self._apply_finished(finished)
        now = self.clock.monotonic()
        self.prober.apply_hints(now)
        self.state.wake_due_slots(now)
        self.state.decide_again(self.create_admission.semaphore.changed_slots() & self.slots.keys())
        self.bounds.watch()
        self._decide_all()
        self.create_admission.semaphore.release_unneeded(self.slots)
        while self._relayed:
            self.state.relay_event(self._relayed.popleft())
        self.observer.list_due_projects(now)
        self.queue_observer.list_due_queues(now)
        self.prober.probe_due_nodes(now)
        self.state.commit()
        self.state.mark_store(now)
        return self._idle_for(self.clock.monotonic())

    def _idle_for(self, now: float) -> float:
        if self.state.dirty:
            return 0.0
        dues = [view.poll_due for view in self.projects.values() if not view.listing]
        dues += [due for due in (self.prober.next_due(), self.queue_observer.next_due()) if due is not None]
        if (due := self.state.next_wake()) is not None:
            dues.append(due)
        # Sleeps below the clock's resolution would be a busy loop.
        return max(0.001, min(dues, default=now + self.state.settings.poll) - now)

    def is_idle(self) -> bool:
        """True when no effect is in flight; callers wait for this before they exit."""
        return not any(track.in_flight for track in self.slots.values())

    def is_training(self, slot: str) -> bool:
        """Every worker of the slot's node reports its last run as live; of a foreign run, some worker."""
        track = self.slots[slot]
        run = track.memory.run
        seen = track.nodes.get(run.node) if run is not None else None
        if seen is None or seen.report is None or run is None or not seen.report.all_answer:
            return False
        workers = seen.report.workers
        lives = any if is_foreign(seen.report, run) else all
        return all(w.token == run.token for w in workers) and lives(w.alive for w in workers)

    def is_over(self, slot: str) -> bool:
        """The slot is done, failed for good, down or closed, and no node, create or effect of it is left."""
        track = self.slots[slot]
        memory = track.memory
        empty = not (memory.ours or memory.asked_for or track.in_flight or track.nodes)
        ended = memory.end is not End.NONE and tries_again_at(track.slot, memory) is None
        closed = self.bounds.closed(track, self.state.project(track.slot.project))
        is_closed = closed is not None and closed.is_sure
        return empty and (memory.wish is DesiredState.DOWN or ended or is_closed)

    def out_of_reach(self, slot: str) -> tuple[NodeKey, ...]:
        """The remaining nodes of a slot that goes down, when none of them can be read."""
        action = self.slots[slot].action
        return action.out_of_reach if isinstance(action, Wait) else ()

    def zones_of(self, slot: str) -> frozenset[str]:
        """Zones with a place, node or create of the slot."""
        track = self.slots[slot]
        places = {place.zone for place in track.slot.places}
        return frozenset(places | {part.zone for part in track.memory.ours} | {*track.memory.asked_for.values()})

    # --- decide ------------------------------------------------------------------------------------------------------

    def _decide_all(self) -> None:
        """Decide all dirty slots until each waits; verdicts pass the brake together, creates share the budget."""
        while self.state.dirty:
            judged, creates = self._decide_dirty()
            now = self.clock.monotonic()
            for track, verdict in self.verdict_admission.admitted(judged, now):
                self._try_to_begin(track, verdict)
            if judged:
                # Deletes free quota and places: creates are chosen after them.
                self.state.decide_again(creates)
                continue
            for track, create in self.create_admission.admitted(creates, now):
                self._try_to_begin(track, create)

    def _decide_dirty(self) -> tuple[dict[str, Delete | Stop], dict[str, Create]]:
        """Decide dirty slots until none is; the verdicts and creates that wait for their admission."""
        judged: dict[str, Delete | Stop] = {}
        creates: dict[str, Create] = {}
        while self.state.dirty:
            name = next(iter(self.state.dirty))
            del self.state.dirty[name]
            track = self.slots.get(name)
            if track is None:
                continue
            try:
                self._decide_slot(track, judged, creates)
            except Exception as error:
                # Raises StoreError again: no effect may begin without its intent on disk.
                self.state.set_aside(track, error)
            self.state.update_slot_sets(track)
        return judged, creates

    def moment(self, track: SlotTrack) -> Moment:
        """Now, for this slot; without listings by the own clock of a node that reports."""
        view, now = self.state.project(track.slot.project), self.clock.monotonic()
        mark, wall = view.mark, self.clock.now()
        if track.nodes:
            mark = max([seen.own_mark(mark, view.cap) for seen in track.nodes.values()])
        return Moment(wall, mark.observed, mark.passes, view.cloud_now(now, wall))

    def _decide_slot(self, track: SlotTrack, judged: dict[str, Delete | Stop], creates: dict[str, Create]) -> None:
        now = self.clock.monotonic()
        if track.aside_until is not None and now < track.aside_until:
            self.state.wake_at(track, track.aside_until)
            return
        track.aside_until = None
        view = self.state.project(track.slot.project)
        steps = STEPS_PER_SLOT + STEPS_PER_THING * (len(track.memory.asked_for) + len(track.memory.nodes))
        for _ in range(steps):
            track.mark_creates(view.mark)
            moment = self.moment(track)
            action = decide(track.slot, self._evidence(view, track), track.memory, moment)
            track.set_action(action)
            if isinstance(action, Wait):
                self._apply_wait(track, action, moment, now)
                return
            if self.state.is_held or not self.state.acts_for(track.slot):
                return
            if isinstance(action, Create):
                creates[track.slot.name] = action
                return
            if isinstance(action, Enqueue) and not self.create_admission.admits_request(track, now):
                return
            if is_judged(action, track.memory):
                assert isinstance(action, Delete | Stop)
                judged[track.slot.name] = action
                return
            self._begin(track, action)
        raise TpuCareError(f"no wait after {steps} decisions, the last was {track.action}")

    def _evidence(self, view: ProjectView, track: SlotTrack) -> Evidence:
        silent = track.slot.name in self.liveness.silent
        elsewhere = silent and self.liveness.elsewhere_answers(track)
        return track.evidence(
            self.state.project_evidence(view),
            tuple(view.foreign.get(track.slot.name, {}).values()),
            self.bounds.closed(track, view),
            self.queue_observer.evidence(view, track),
            elsewhere_answers=elsewhere,
            # Computed only where no worker answers, since it is expensive.
            may_be_canary=silent and not elsewhere and self.liveness.may_be_canary(track),
        )

    def _apply_wait(self, track: SlotTrack, action: Wait, moment: Moment, now: float) -> None:
        track.wants_create_since = None
        view = self.state.project(track.slot.project)
        # A verdict may pause while its node is read once more, or while listings fail.
        if view.observed - track.held_at > HOLD_LAPSES:
            track.release_verdict()
        if action.observed is not None:
            view.wake_at(action.observed, track.slot.name)
        if not view.fresh:
            view.decided_blind.add(track.slot.name)
        if action.wall is not None:
            self.state.wake_at(track, now + max(0.0, (action.wall - moment.wall).total_seconds()))
        if action.needs_person and action.why != track.told_person:
            self.state.add_event(track, "person", action.why, level="warning", cause=action.cause.value)
        # A failed listing must not make the same event appear once more.
        if action.needs_person or view.fresh:
            track.told_person = action.why if action.needs_person else ""

    # --- apply -------------------------------------------------------------------------------------------------------

    def _try_to_begin(self, track: SlotTrack, action: Effect) -> None:
        """Begin *action*; an unexpected error sets this slot aside alone."""
        try:
            self._begin(track, action)
        except Exception as error:
            if isinstance(action, Create):
                self.create_admission.create_ended(track, self.clock.monotonic())
            self.state.set_aside(track, error)
        self.state.dirty[track.slot.name] = None

    def _begin(self, track: SlotTrack, action: Record | Effect) -> None:
        """Write the intent into memory and queue the effect, which `commit` starts once the intent is on disk."""
        self.state.update_memory(track, remember.record_last_progress(track.memory, *track.last_progress()))
        self.state.update_memory(track, remember.intend(track.memory, action, self.clock.now(), self.rng))
        if not isinstance(action, GetNode | GetOperation | FetchHostKeys | GetRequest):
            name, level = node_of(action), level_of(action)
            self.state.add_event(track, kind_of(action), text_of(action), node=name, level=level, **fields_of(action))
        if isinstance(action, Record):
            return
        if isinstance(action, Delete):
            # Its workers are not probed any more, and calls that wait for them end.
            self.ports.launcher.disconnect(action.key)
        name = node_of(action)
        seen = track.nodes.get(name)
        coordinator = seen.node.endpoints[0].internal if seen is not None and seen.node.endpoints else ""
        workers = seen.workers if seen is not None else None
        spent = self.bounds.spent(track) if isinstance(action, Create) else None
        effect = prepare(action, track.slot, track.memory, workers, coordinator, self.ports, spent, self.state.archives)
        track.in_flight[action.effect_key] = action
        tag = ("effect", track.slot.name, action.effect_key)
        self.state.queue_effect((lane_of(action), tag, effect))

    # --- remember ----------------------------------------------------------------------------------------------------

    def _apply_finished(self, finished: Finished) -> None:
        assert isinstance(finished.tag, tuple)
        kind, *rest = finished.tag
        if kind == "list":
            result = finished.result if isinstance(finished.result, Listing) else None
            self.observer.apply_listing(self.projects[rest[0]], result, finished.error)
        elif kind == "queue":
            queue = finished.result if isinstance(finished.result, QueueListing) else None
            self.queue_observer.apply_listing(self.projects[rest[0]], queue, finished.error)
        elif kind == "probe":
            self.prober.apply_probe(rest[0], rest[1], rest[2], finished)
        elif kind in ("collect", "adopt"):
            text = f"{rest[0]}: " + (f"{finished.error}" if finished.error is not None else "accepted")
            level = "info" if finished.error is None else "warning"
            self.state.add_engine_event(f"{kind}ed", text, node=rest[0], level=level)
            if kind == "adopt" and finished.error is not None and rest[1] in self.slots:
                self.slots[rest[1]].ended_effects.pop(ADOPTING, None)
                self.state.dirty[rest[1]] = None
        else:
            track = self.slots.get(rest[0])
            action = track.in_flight.pop(rest[1], None) if track is not None else None
            if track is not None and action is not None and not isinstance(action, Wait | Record):
                self._effect_ended(track, action, finished)

    def _effect_ended(self, track: SlotTrack, action: Effect, finished: Finished) -> None:
        """Apply the end of *action*, an effect of this slot, to memory and trackers."""
        view, error = self.state.project(track.slot.project), finished.error
        name = node_of(action)
        track.ended_effects[action.effect_key] = view.mark
        self.state.dirty[track.slot.name] = None
        if isinstance(action, Create | Enqueue):
            self.create_admission.create_ended(track, self.state.clock.monotonic())
        if error is not None and not isinstance(error, TpuCareError):
            self.state.set_aside(track, error)
        if isinstance(error, ChangedMeanwhile) and isinstance(action, DeleteRequest):
            self.queue_observer.drop(track, action.key)
        elif isinstance(error, ChangedMeanwhile):
            self.state.update_memory(track, remember.void_delete(track.memory, name))
        memory = remember.record_last_progress(track.memory, *track.last_progress())
        memory = remember.remember(memory, action, finished.result, error, self.state.clock.now(), self.rng)
        self.state.update_memory(track, memory)
        self._update_trackers(track, view, action, name, finished)

    def _update_trackers(
        self, track: SlotTrack, view: ProjectView, action: Effect, name: str, finished: Finished
    ) -> None:
        """Apply the end of an effect to the slot's trackers, and add its event."""
        seen, error = track.nodes.get(name), finished.error
        if isinstance(action, GetNode | Delete) and isinstance(error, NodeGone):
            # Only GetNode and DeleteNode prove that a node is gone; then its pinned host keys are dropped.
            self.ports.launcher.forget_node(action.key)
            if seen is not None or track.memory.create(name) is None:
                self.observer.forget_node(track, view, name)
        elif isinstance(action, GetNode) and isinstance(finished.result, Node):
            self._apply_found_node(track, view, finished.result)
        elif isinstance(action, GetOperation) and failed(finished.result):
            track.ended_effects[EffectKind.FAILED.of(name)] = view.mark
        elif isinstance(action, FetchHostKeys) and seen is not None:
            seen.apply_voucher(finished.result is True, error, view.mark)
        elif isinstance(action, AddSshKey) and isinstance(error, LostRace):
            track.ended_effects[EffectKind.MISSED.of(name)] = view.mark
        elif isinstance(action, Launch | Stop) and seen is not None:
            if isinstance(action, Launch):
                track.ended_effects.pop(EffectKind.STOP.of(name), None)
            seen.discard_report()
            self.prober.schedule_probe(track, seen, self.state.clock.monotonic())
        elif isinstance(action, GetRequest):
            track.record_read(request_read(name), error, view.mark)
            if isinstance(finished.result, QueuedResource):
                self.queue_observer.apply_resource(view, finished.result)
        news = not isinstance(action, GetNode) or track.record_read(name, error, view.mark)
        event = end_of(action, finished.result, error) if news else None
        if event is not None:
            self.state.add_event(track, event.kind, event.text, node=name, level=event.level, **event.fields)

    def _apply_found_node(self, track: SlotTrack, view: ProjectView, node: Node) -> None:
        track.ended_effects.pop(EffectKind.MISSED.of(node.name), None)
        is_its = node.slot == track.slot.name or self.state.slot_of(node) is track
        if node.owner != self.ports.owner or not is_its:
            self._apply_namesake(track, view, node)
            return
        listed = track.nodes[node.name].listed if node.name in track.nodes else False
        self.observer.apply_own_node(view, track, node)
        track.nodes[node.name].listed = listed

    def _apply_namesake(self, track: SlotTrack, view: ProjectView, node: Node) -> None:
        past = track.memory.node(node.name)
        if past is not None and past.id == node.id:
            self.observer.apply_relabelled_node(view, node, track)
            return
        # A foreign node has the name of our create: the next create takes the next number.
        memory = track.memory.without_create(node.name)
        if past is not None:
            # A name belongs to one node at a time: the remembered one is gone.
            self.ports.launcher.forget_node(node.key)
            memory = remember.forget_node(memory, node.name, self.state.clock.now(), self.rng)
            self.observer.forget_node(track, view, node.name)
        self.state.update_memory(track, memory)
        self.observer.apply_foreign_node(view, node)
