"""
The loop: observe, decide, apply, remember.

It decides on one thread and starts none itself: listings, probes and effects run on the Executor and come back as
finished. Everything that one step writes into memory is one transaction, on disk before any effect of that step begins.
It leaves every choice to `plan`, every effect to `effects`, and the meaning of wishes to the doors.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from tpucare import effects
from tpucare import remember as memories
from tpucare.actions import Create, Delete, Effect, Fact, Launch, Look, Poll, Reason, Settle, Stop, Vouch, Wait
from tpucare.effects import ChangedMeanwhile, Ports, lane_of, prepare
from tpucare.errors import CloudError, NodeGone, OwnCredentials, StoreError, TpuCareError
from tpucare.evidence import Evidence, Moment
from tpucare.memory import End, Memory, PlaceMemory, Wish
from tpucare.model import Contact, Event, Listing, Node, NodeReport, NodeState, Phase, ProbeOrder, Slot, workers_of
from tpucare.placement import CreateBudget
from tpucare.plan import decide
from tpucare.ports import Clock, Executor, Finished, Lane, Store
from tpucare.projects import ProjectView
from tpucare.tracking import NodeTrack, SlotTrack, is_running, newest_checkpoint, newest_step

PROBED = frozenset({NodeState.CREATING, NodeState.READY, NodeState.REPAIRING, NodeState.STARTING, NodeState.RESTARTING})
ANSWER_COUNTS_FOR = 60.0
BRAKE_WINDOW = 600.0
ASIDE_FIRST, ASIDE_CAP = 10.0, 600.0
# One slot cannot ask for more steps in one pass than this: a rule that never comes to rest is an error of that slot.
STEPS_PER_SLOT = 40


@dataclass(frozen=True, slots=True)
class Settings:
    """How the loop beats. Seconds, but for the budget. `dry_run`: observe and decide, begin nothing."""

    poll: float = 5.0
    fast_poll: float = 1.0
    probe: float = 15.0
    fast_probe: float = 1.0
    creates_per_minute: int = 60
    brake_minimum: int = 3
    brake_share: float = 0.2
    dry_run: bool = False


@dataclass(slots=True)
class _Pending:
    """What one step wants written, and what it wants begun once that is on disk."""

    memories: dict[str, Memory] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    effects: list[tuple[Lane, tuple[str, ...], Callable[[], object]]] = field(default_factory=list)


class Engine:
    """
    Keeps every declared slot at what is wished of it.

    Args:
        ports: the cloud, the launcher, our owner label and our public key
        listen: called with every event, after it is on disk; never with a secret
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
    ) -> None:
        self.ports = ports
        self.store = store
        self.clock = clock
        self.executor = executor
        self.rng = rng
        self.settings = settings or Settings()
        self.listen = listen or (lambda _: None)
        self.slots: dict[str, SlotTrack] = {}
        self.projects: dict[str, ProjectView] = {}
        self.strays: dict[str, Node] = {}
        self.passes = 0
        self._remembered = {name: memories.recover(memory) for name, memory in store.memories().items()}
        self._surplus: dict[str, Callable[[str], Slot | None]] = {}
        self._budget: dict[str, CreateBudget] = {}
        self._dirty: dict[str, None] = {}
        self._wakes: list[tuple[float, str]] = []
        self._probes: list[tuple[float, str, str]] = []
        self._pending = _Pending()
        self._answers: deque[tuple[float, str]] = deque()
        self._silent: set[str] = set()
        self._canary: str | None = None
        self._judged: deque[tuple[float, str]] = deque()

    # --- what is declared, and what is wished ------------------------------------------------------------------------

    def declare(self, fleet: str, slots: Iterable[Slot], surplus: Callable[[str], Slot | None]) -> None:
        """
        Slots of *fleet* as last accepted. A live node is never touched for an edit alone.

        `surplus` makes the Slot of a name that is no longer declared and still remembered or listed (rule 3: a lowered
        count lets surplus slots run on).
        """
        declared = {slot.name: slot for slot in slots}
        self._surplus[fleet] = surplus
        known = [name for name, memory in self._remembered.items() if memory.fleet == fleet]
        known += [name for name, track in self.slots.items() if track.slot.fleet == fleet]
        for name in known:
            extra = surplus(name) if name not in declared else None
            if extra is not None:
                declared[name] = extra
        for slot in declared.values():
            self._track(slot)
        # Nodes that bore our label before their fleet was known are seen now.
        for node in [node for node in self.strays.values() if node.fleet == fleet]:
            del self.strays[node.name]
            self._see(self._project(node.key.project), node)

    def _track(self, slot: Slot) -> SlotTrack:
        track = self.slots.get(slot.name)
        if track is None:
            memory = self._remembered.pop(slot.name, None) or Memory(fleet=slot.fleet)
            track = self.slots[slot.name] = SlotTrack(slot, memory)
            self._project(slot.project).adopt(slot.name)
            self._restore_budget(slot.project, memory)
        track.slot = slot
        self._dirty[slot.name] = None
        return track

    def _project(self, name: str) -> ProjectView:
        view = self.projects.get(name)
        if view is None:
            view = self.projects[name] = ProjectView(name, cap=timedelta(seconds=3 * self.settings.poll))
            self._budget[name] = CreateBudget(self.settings.creates_per_minute)
        return view

    def _restore_budget(self, project: str, memory: Memory) -> None:
        wall, now = self.clock.now(), self.clock.monotonic()
        ages = [(wall - intent.asked_at).total_seconds() for intent in memory.creates]
        self._budget[project].restore((now - age, "") for age in ages if 0 <= age < 60)

    def change(self, slot: str, alter: Callable[[Memory], Memory], kind: str, text: str) -> None:
        """Write a person's wish into the memory of a slot, durably, before it returns."""
        track = self.slots[slot]
        self._update(track, alter(track.memory))
        self._event(track, kind, text)
        track.braked = False
        self._dirty[slot] = None
        self.commit()

    def lift_brake(self, slot: str) -> None:
        self.slots[slot].brake_lifted = True
        self._dirty[slot] = None

    def collect(self, name: str) -> None:
        """`gc --apply`: delete a stray node, which bears our owner label and an unknown fleet; the end is an event."""
        node = self.strays[name]
        action = Delete(node.key, node.id, node.create_time, "gc was asked for", Reason.ASKED)
        self._pending.effects.append((Lane.CLOUD, ("collect", name), lambda: effects.delete(action, self.ports)))
        self._say("collect", f"{name}: delete asked for", node=name)
        self.commit()

    def end(self, slot: str) -> None:
        """Forget a slot that was taken down and of which nothing is left."""
        track = self.slots.pop(slot)
        self._project(track.slot.project).slots.discard(slot)
        self._dirty.pop(slot, None)
        self.store.drop(slot)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Step and sleep until *until* says so. Raises: StoreError: nothing may be done that cannot be written."""
        while not until():
            self.executor.sleep(timedelta(seconds=self.step()))

    def step(self) -> float:
        """One turn of the loop; returns for how many seconds there is nothing to do unless something ends."""
        for finished in self.executor.finished():
            self._finish(finished)
        now = self.clock.monotonic()
        for key in self.ports.launcher.hints():
            self._hint(key.name, now)
        self._wake(now)
        self._decide_all()
        self._poll(now)
        self._probe(now)
        self.commit()
        return self._idle_for(self.clock.monotonic())

    def commit(self) -> None:
        """Everything pending on disk in one transaction, then the effects begin, then the events are told."""
        pending, self._pending = self._pending, _Pending()
        if pending.memories or pending.events:
            self.store.save(pending.memories, pending.events)
        for lane, tag, effect in pending.effects:
            self.executor.submit(lane, tag, effect)
        for event in pending.events:
            self.listen(event)

    def settled(self) -> bool:
        """No slot has anything under way: what a door waits for before it leaves."""
        return not any(track.in_flight for track in self.slots.values())

    # --- observe -----------------------------------------------------------------------------------------------------

    def _poll(self, now: float) -> None:
        for view in self.projects.values():
            if view.listing or now < view.poll_due:
                continue
            view.listing = True
            listing = partial(self.ports.cloud.list_nodes, view.name)
            self._pending.effects.append((Lane.LIST, ("list", view.name), listing))

    def _listed(self, view: ProjectView, listing: Listing | None, error: Exception | None) -> None:
        began = self.clock.monotonic()
        view.listing = False
        self.passes += 1
        if listing is None:
            self._blind(view, error)
        else:
            self._observe(view, listing, began)
        fast = any(self.slots[name].is_busy() for name in view.slots)
        # A listing of ten thousand nodes is not free: looking more often must not become the load itself.
        cost = self.clock.monotonic() - began
        pause = max(self.settings.fast_poll, 5 * cost) if fast else self.settings.poll
        view.poll_due = began + (pause if listing is not None else self.settings.poll)

    def _blind(self, view: ProjectView, error: Exception | None) -> None:
        if error is not None and not isinstance(error, CloudError):
            raise error
        why = f"listing {view.name} failed: {error}"
        if view.fresh or why != view.blind_why:
            level = "error" if isinstance(error, OwnCredentials) else "warning"
            self._say("blind", why, level=level)
            self._dirty.update(dict.fromkeys(view.slots))
        view.fresh, view.blind_why = False, why

    def _observe(self, view: ProjectView, listing: Listing, now: float) -> None:
        was_blind, went_dark = not view.fresh, view.unreachable != listing.unreachable
        view.observe(listing, now)
        if was_blind:
            self._say("seeing", f"listing {view.name}: {len(listing.nodes)} nodes", level="debug")
        for key in listing.changed:
            self._see(view, listing.nodes[key])
        for key in listing.gone:
            self._miss(view, key.name)
        if went_dark:
            self._darken(view, listing.unreachable)
        if was_blind or went_dark:
            self._dirty.update(dict.fromkeys(view.slots))
        self._dirty.update(dict.fromkeys(view.due()))
        # Silence and the brake turn on what others do, so these slots are judged anew in each pass.
        self._dirty.update(dict.fromkeys(name for name in self._silent if name in self.slots))
        self._dirty.update(dict.fromkeys(name for name, track in self.slots.items() if track.braked))

    def _darken(self, view: ProjectView, unreachable: frozenset[str]) -> None:
        if unreachable:
            self._say("unreachable", f"zones that do not answer: {', '.join(sorted(unreachable))}", level="warning")
        for name in view.slots:
            for track in self.slots[name].nodes.values():
                track.dark = track.node.key.zone in unreachable

    def _see(self, view: ProjectView, node: Node) -> None:
        if node.owner != self.ports.owner:
            self._see_foreign(view, node)
            return
        track = self.slots.get(node.slot) or self._adopt_slot(node)
        if track is None or track.slot.project != view.name:
            if node.name not in self.strays:
                text = f"{node.name} in {node.key.zone} bears our owner label and an unknown fleet ({node.fleet})"
                self._say("stray", f"{text}: `tpucare gc` lists it", node=node.name, level="warning")
            self.strays[node.name] = node
            return
        self._see_ours(view, track, node)

    def _see_foreign(self, view: ProjectView, node: Node) -> None:
        for slot in _slots_of(node.name):
            view.foreign.setdefault(slot, {})[node.name] = node
            if slot in view.slots:
                self._dirty[slot] = None

    def _adopt_slot(self, node: Node) -> SlotTrack | None:
        surplus = self._surplus.get(node.fleet)
        slot = surplus(node.slot) if surplus is not None and node.slot else None
        return self._track(slot) if slot is not None else None

    def _see_ours(self, view: ProjectView, track: SlotTrack, node: Node) -> None:
        seen = track.nodes.get(node.name)
        if seen is None or seen.node.id != node.id:
            seen = track.nodes[node.name] = NodeTrack(node, view.mark, view.mark)
        before = seen.node.state
        fresh = seen.probe_due is None and seen.workers is None
        seen.see(node, view.mark)
        seen.listed, seen.dark = True, False
        view.hold(node)
        self._update(track, memories.absorb(track.memory, node))
        if before is not node.state or fresh:
            self._event(track, "state", f"{node.name} is {node.state.name}", node=node.name, state=node.state.name)
        self._address(track, seen)
        self._dirty[track.slot.name] = None
        self._release_quota(view)

    def _miss(self, view: ProjectView, name: str) -> None:
        self.strays.pop(name, None)
        view.release(name)
        for slot in _slots_of(name):
            if view.foreign.get(slot, {}).pop(name, None) is not None and slot in view.slots:
                self._dirty[slot] = None
        owner = next((self.slots[s] for s in _slots_of(name) if s in self.slots), None)
        seen = owner.nodes.get(name) if owner is not None else None
        if owner is not None and seen is not None:
            seen.listed = False
            self._dirty[owner.slot.name] = None
        self._release_quota(view)

    def _release_quota(self, view: ProjectView) -> None:
        if view.holdings_changed:
            view.holdings_changed = False
            self._dirty.update(
                dict.fromkeys(n for n in view.slots if any("own quota" in p.kind for p in self._places(n)))
            )

    def _places(self, slot: str) -> Iterable[PlaceMemory]:
        return self.slots[slot].memory.places.values()

    def _address(self, track: SlotTrack, seen: NodeTrack) -> None:
        """Addresses of the workers, once all are listed; then the launcher is told to expect them."""
        past = track.memory.node(seen.node.name)
        place = next((p for p in track.slot.places if past is not None and p.key == past.place), None)
        external = place.network.external_ips if place else any(e.external for e in seen.node.endpoints)
        expected = place.workers if place is not None else max(1, len(seen.node.endpoints))
        workers = workers_of(seen.node, external=external, expected=expected)
        if workers == seen.workers:
            return
        seen.workers = workers
        if workers is not None:
            self.ports.launcher.expect(workers)
            self._schedule(track, seen, self.clock.monotonic())

    # --- probes ------------------------------------------------------------------------------------------------------

    def _hint(self, name: str, now: float) -> None:
        for slot in _slots_of(name):
            track = self.slots.get(slot)
            seen = track.nodes.get(name) if track is not None else None
            if track is not None and seen is not None:
                self._schedule(track, seen, now)

    def _schedule(self, track: SlotTrack, seen: NodeTrack, due: float) -> None:
        seen.probe_due = due
        heapq.heappush(self._probes, (due, track.slot.name, seen.node.name))

    def _probe(self, now: float) -> None:
        while self._probes and self._probes[0][0] <= now:
            due, slot, name = heapq.heappop(self._probes)
            track = self.slots.get(slot)
            seen = track.nodes.get(name) if track is not None else None
            if track is None or seen is None or seen.probe_due != due or seen.probing:
                continue
            past = track.memory.node(name)
            dying = past is None or past.dead or past.delete_asked_at is not None
            if seen.workers is None or seen.dark or seen.node.state not in PROBED or dying:
                seen.probe_due = None
                continue
            self._ask(track, seen, past.attempt if past is not None else 0)

    def _ask(self, track: SlotTrack, seen: NodeTrack, attempt: int) -> None:
        job, run = track.slot.job, track.memory.run
        assert seen.workers is not None
        order = ProbeOrder(
            seen.workers,
            track.slot.name,
            attempt,
            progress=job.progress if job is not None else "",
            checkpoint=job.checkpoint if job is not None else "",
            everything=run is not None and bool(run.stop_why),
        )
        seen.probing = True
        tag = ("probe", track.slot.name, seen.node.name, str(seen.generation))
        self._pending.effects.append((Lane.PROBE, tag, lambda: self.ports.launcher.probe(order)))

    def _probed(self, slot: str, name: str, generation: str, finished: Finished) -> None:
        track = self.slots.get(slot)
        seen = track.nodes.get(name) if track is not None else None
        if track is None or seen is None:
            return
        seen.probing = False
        now = self.clock.monotonic()
        report = finished.result
        if finished.error is not None:
            self._set_aside(track, finished.error)
        elif isinstance(report, NodeReport) and report.node_id == seen.node.id and str(seen.generation) == generation:
            self._hear(track, seen, report, now)
        self._schedule(track, seen, now + self._probe_pause(seen))

    def _probe_pause(self, seen: NodeTrack) -> float:
        report = seen.report
        steady = report is not None and report.all_answer and is_running(report) and seen.progress.signals > 0
        if not steady:
            return self.settings.fast_probe
        return self.settings.probe * self.rng.uniform(0.8, 1.2)

    def _hear(self, track: SlotTrack, seen: NodeTrack, report: NodeReport, now: float) -> None:
        view = self._project(track.slot.project)
        before, signals = seen.report, seen.progress.signals
        if any(worker.contact is Contact.ANSWERED for worker in report.workers):
            if not self._answers or now - self._answers[-1][0] > ANSWER_COUNTS_FOR:
                self._silence_counts_anew()
            self._answers.append((now, seen.node.name))
            self._canary = None
        changed = seen.hear(report, view.mark)
        self._silent.discard(track.slot.name)
        if any(node.silent_since is not None for node in track.nodes.values()):
            self._silent.add(track.slot.name)
        if report.all_answer:
            self._update(track, memories.answered(track.memory, seen.node.name))
        self._tell(track, seen, before, report, signals)
        # Nothing turns on a second signal but the note that this job tells of its progress at all.
        if changed or (seen.progress.signals == 2 and signals < 2):
            self._dirty[track.slot.name] = None

    def _silence_counts_anew(self) -> None:
        """
        Somebody answers after nobody did: the silence until now was ours.

        Without this, the first worker heard after an outage of our own network would condemn all that are asked later.
        """
        for name in self._silent:
            track = self.slots.get(name)
            mark = self._project(track.slot.project).mark if track is not None else None
            for seen in track.nodes.values() if track is not None else ():
                if seen.silent_since is not None and mark is not None:
                    seen.silent_since, seen.silent_probes = mark, 0

    def _tell(
        self, track: SlotTrack, seen: NodeTrack, before: NodeReport | None, report: NodeReport, signals: int
    ) -> None:
        name = seen.node.name
        if report.all_answer and (before is None or not before.all_answer) and track.memory.run is None:
            self._event(track, "answers", f"all workers of {name} answer", node=name)
        run = track.memory.run
        first = report.workers[0] if report.workers else None
        if first is None or run is None or first.token != run.token:
            return
        old = before.workers[0].phase if before is not None and before.workers else None
        if first.phase is not old and first.phase is not Phase.NONE:
            self._event(track, "phase", f"{run.token}: {first.phase.value}", node=name, phase=first.phase.value)
        if signals == 0 and seen.progress.signals > 0:
            step, checkpoint = newest_step(report), newest_checkpoint(report)
            text = f"{run.token}: first sign of progress"
            self._event(track, "progress", text, node=name, step=step, checkpoint=checkpoint)

    # --- decide ------------------------------------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        while self._wakes and self._wakes[0][0] <= now:
            due, name = heapq.heappop(self._wakes)
            track = self.slots.get(name)
            if track is not None and track.wake_wall == due:
                track.wake_wall = None
                self._dirty[name] = None

    def _decide_all(self) -> None:
        """Until every slot says Wait: judged deletions pass the brake together, creates share the budget."""
        judged: dict[str, Delete | Stop] = {}
        creates: dict[str, Create] = {}
        while self._dirty:
            name = next(iter(self._dirty))
            del self._dirty[name]
            track = self.slots.get(name)
            if track is None:
                continue
            try:
                self._decide_slot(track, judged, creates)
            except (StoreError, AssertionError):
                raise
            except Exception as error:
                self._set_aside(track, error)
        self._brake(judged)
        self._spend(creates)

    def moment(self, view: ProjectView) -> Moment:
        now = self.clock.monotonic()
        return Moment(self.clock.now(), view.observed, view.passes, view.cloud_now(now, self.clock.now()))

    def _decide_slot(self, track: SlotTrack, judged: dict[str, Delete | Stop], creates: dict[str, Create]) -> None:
        now = self.clock.monotonic()
        if track.aside_until is not None and now < track.aside_until:
            self._wake_at(track, track.aside_until)
            return
        track.aside_until = None
        view = self._project(track.slot.project)
        for _ in range(STEPS_PER_SLOT):
            track.mark_creates(view.mark)
            moment = self.moment(view)
            action = decide(track.slot, self._evidence(view, track), track.memory, moment)
            track.action = action
            if isinstance(action, Wait):
                self._rest(track, action, moment, now)
                return
            if self.settings.dry_run:
                return
            if isinstance(action, Create):
                creates[track.slot.name] = action
                return
            if _is_judged(action, track.memory):
                assert isinstance(action, Delete | Stop)
                judged[track.slot.name] = action
                return
            self._begin(track, action)
        raise TpuCareError(f"no rest after {STEPS_PER_SLOT} steps, the last was {track.action}")

    def _evidence(self, view: ProjectView, track: SlotTrack) -> Evidence:
        silent = track.slot.name in self._silent
        return track.evidence(
            foreign=tuple(view.foreign.get(track.slot.name, {}).values()),
            fresh=view.fresh,
            blind_why=view.blind_why,
            unreachable=view.unreachable,
            holdings=view.holdings,
            elsewhere_answers=silent and self._elsewhere_answers(track),
            may_be_canary=silent and self._may_be_canary(track),
            store_lost=self.store.lost,
            complete=view.complete,
        )

    def _elsewhere_answers(self, track: SlotTrack) -> bool:
        now = self.clock.monotonic()
        while self._answers and now - self._answers[0][0] > ANSWER_COUNTS_FOR:
            self._answers.popleft()
        silent = {name for name, seen in track.nodes.items() if seen.silent_since is not None}
        if any(name not in silent for _, name in self._answers):
            return True
        # A sibling on the same node that answers shows that our network carries as well as any other worker does.
        reports = [seen.report for name, seen in track.nodes.items() if name in silent and seen.report is not None]
        return any(worker.contact is Contact.ANSWERED for report in reports for worker in report.workers)

    def _may_be_canary(self, track: SlotTrack) -> bool:
        if self._canary is not None:
            return self._canary == track.slot.name
        return track.slot.name == min(self._silent, key=self._silent_since)

    def _silent_since(self, slot: str) -> tuple[timedelta, str]:
        track = self.slots.get(slot)
        marks = [seen.silent_since for seen in track.nodes.values() if seen.silent_since] if track is not None else []
        return (min((mark.observed for mark in marks), default=timedelta.max), slot)

    def _rest(self, track: SlotTrack, action: Wait, moment: Moment, now: float) -> None:
        track.wants_create_since = None
        if action.observed is not None:
            self._project(track.slot.project).wake(action.observed, track.slot.name)
        if action.wall is not None:
            self._wake_at(track, now + max(0.0, (action.wall - moment.wall).total_seconds()))
        if action.needs_person and action.why != track.said:
            self._event(track, "person", action.why, level="warning")
        track.said = action.why if action.needs_person else ""

    def _wake_at(self, track: SlotTrack, due: float) -> None:
        track.wake_wall = due
        heapq.heappush(self._wakes, (due, track.slot.name))

    # --- apply -------------------------------------------------------------------------------------------------------

    def _begin(self, track: SlotTrack, action: Settle | Effect) -> None:
        """The intent into memory, the effect behind it; it starts when `commit` has written the intent."""
        self._update(track, memories.intend(track.memory, action, self.clock.now(), self.rng))
        if not isinstance(action, Look | Poll | Vouch):
            self._event(track, _kind(action), _text(action), node=_node_of(action))
        if isinstance(action, Settle):
            return
        name = action.key.name if not isinstance(action, Create | Poll) else action.name
        seen = track.nodes.get(name)
        coordinator = seen.node.endpoints[0].internal if seen is not None and seen.node.endpoints else ""
        workers = seen.workers if seen is not None else None
        effect = prepare(action, track.slot, track.memory, workers, coordinator, self.ports)
        track.in_flight[action.kind] = action
        tag = ("effect", track.slot.name, action.kind)
        self._pending.effects.append((lane_of(action), tag, effect))

    def _brake(self, judged: Mapping[str, Delete | Stop]) -> None:
        """Rule 12: many verdicts at once say more about us than about the nodes."""
        if not judged:
            return
        now = self.clock.monotonic()
        while self._judged and now - self._judged[0][0] > BRAKE_WINDOW:
            self._judged.popleft()
        lifted = {name for name in judged if self.slots[name].brake_lifted}
        live = sum(len(track.nodes) for track in self.slots.values())
        limit = max(self.settings.brake_minimum, int(self.settings.brake_share * live))
        counted = {name for _, name in self._judged} | (set(judged) - lifted)
        for name, action in judged.items():
            track = self.slots[name]
            if len(counted) > limit and name not in lifted:
                self._hold(track, action, len(counted), live)
                continue
            self._judged.append((now, name))
            track.braked = track.brake_lifted = False
            if isinstance(action, Delete) and track.slot.name in self._silent and not self._elsewhere_answers(track):
                self._canary = name
            self._begin(track, action)
            self._dirty[name] = None
        if self._dirty:
            self._decide_all()

    def _hold(self, track: SlotTrack, action: Delete | Stop, count: int, live: int) -> None:
        why = f"held by the brake: {count} of {live} nodes judged within 10 minutes ({action.why}); `tpucare confirm`"
        if not track.braked:
            self._event(track, "brake", why, node=action.key.name, level="error")
        track.braked = True
        track.action = Wait(why, needs_person=True)

    def _spend(self, creates: Mapping[str, Create]) -> None:
        """The create budget of each project goes to the slots that had the least of it, the longest waiting first."""
        now = self.clock.monotonic()
        for name in creates:
            track = self.slots[name]
            track.wants_create_since = now if track.wants_create_since is None else track.wants_create_since
        shares = {p: b.shares() for p, b in self._budget.items()} if creates else {}
        order = sorted(
            creates,
            key=lambda n: (
                shares[self.slots[n].slot.project].get(n, 0),
                self.slots[n].wants_create_since or 0.0,
                n,
            ),
        )
        for name in order:
            track = self.slots[name]
            budget = self._budget[track.slot.project]
            free_at = budget.free_at(now)
            if free_at is not None:
                track.action = Wait("the create budget of the project is used up for this minute")
                self._wake_at(track, free_at)
                continue
            budget.take(name, now)
            track.wants_create_since = None
            self._begin(track, creates[name])
            self._dirty[name] = None
        if self._dirty:
            self._decide_all()

    # --- remember ----------------------------------------------------------------------------------------------------

    def _finish(self, finished: Finished) -> None:
        assert isinstance(finished.tag, tuple)
        kind, *rest = finished.tag
        if kind == "list":
            result = finished.result if isinstance(finished.result, Listing) else None
            self._listed(self.projects[rest[0]], result, finished.error)
        elif kind == "probe":
            self._probed(rest[0], rest[1], rest[2], finished)
        elif kind == "collect":
            text = f"{rest[0]}: " + (f"{finished.error}" if finished.error is not None else "delete accepted")
            self._say("collected", text, node=rest[0], level="info" if finished.error is None else "warning")
        else:
            track = self.slots.get(rest[0])
            action = track.in_flight.pop(rest[1], None) if track is not None else None
            if track is not None and action is not None and not isinstance(action, Wait | Settle):
                self._ended(track, action, finished)

    def _ended(self, track: SlotTrack, action: Effect, finished: Finished) -> None:
        view, error = self._project(track.slot.project), finished.error
        name = action.name if isinstance(action, Create | Poll) else action.key.name
        track.looked[action.kind] = view.mark
        self._dirty[track.slot.name] = None
        if error is not None and not isinstance(error, TpuCareError):
            self._set_aside(track, error)
        if isinstance(error, ChangedMeanwhile):
            self._update(track, memories.changed_meanwhile(track.memory, name))
        memory = memories.remember(track.memory, action, finished.result, error, self.clock.now(), self.rng)
        self._update(track, memory)
        self._after(track, view, action, name, finished)

    def _after(self, track: SlotTrack, view: ProjectView, action: Effect, name: str, finished: Finished) -> None:
        """What the trackers have to know of an effect that ended."""
        seen, error = track.nodes.get(name), finished.error
        gone = isinstance(error, NodeGone) and not isinstance(action, Poll)
        if gone:
            self._forget(track, view, name)
        elif isinstance(action, Look) and isinstance(finished.result, Node):
            self._looked(track, view, finished.result)
        elif isinstance(action, Poll) and _failed(finished.result):
            track.looked[f"failed:{name}"] = view.mark
        elif isinstance(action, Vouch) and seen is not None:
            seen.vouched = True
        elif isinstance(action, Launch | Stop) and seen is not None:
            if isinstance(action, Launch):
                track.looked.pop(f"stop:{name}", None)
            seen.forget_report()
            self._schedule(track, seen, self.clock.monotonic())
        self._tell_end(track, action, name, finished)

    def _looked(self, track: SlotTrack, view: ProjectView, node: Node) -> None:
        if node.owner != self.ports.owner or node.slot != track.slot.name:
            # Our create met a node of that name that is not ours: the name is spent, and a person has to look.
            self._update(track, track.memory.without_create(node.name))
            self._see_foreign(view, node)
            return
        listed = track.nodes[node.name].listed if node.name in track.nodes else False
        self._see_ours(view, track, node)
        track.nodes[node.name].listed = listed

    def _forget(self, track: SlotTrack, view: ProjectView, name: str) -> None:
        seen = track.nodes.get(name)
        if seen is not None:
            self.ports.launcher.forget(seen.node.key)
        track.forget_node(name)
        track.looked[f"gone:{name}"] = view.mark
        view.release(name)
        if not any(node.silent_since is not None for node in track.nodes.values()):
            self._silent.discard(track.slot.name)
        self._event(track, "gone", f"{name} is gone", node=name)
        self._release_quota(view)

    def _tell_end(self, track: SlotTrack, action: Effect, name: str, finished: Finished) -> None:
        error = finished.error
        if error is not None and not isinstance(error, NodeGone):
            self._event(track, f"{_kind(action)}-failed", f"{name}: {error}", node=name, level="warning")
        elif isinstance(action, Poll) and _failed(finished.result):
            self._event(track, "create-failed", f"{name}: {finished.result.error}", node=name, level="warning")  # type: ignore[attr-defined]
        elif isinstance(action, Create | Delete | Stop):
            self._event(track, f"{_kind(action)}-accepted", f"{name}: {_kind(action)} accepted", node=name)
        elif isinstance(action, Launch):
            whole = getattr(finished.result, "complete", False)
            kind, level = ("launched", "info") if whole else ("launch-failed", "warning")
            errors = [str(e) for e in getattr(finished.result, "workers", ()) if e is not None]
            text = f"{action.token}: " + ("runs on all workers" if whole else "; ".join(sorted(set(errors)))[:500])
            self._event(track, kind, text, node=name, level=level)

    # --- small things ------------------------------------------------------------------------------------------------

    def _update(self, track: SlotTrack, memory: Memory) -> None:
        if memory != track.memory:
            track.memory = memory
            self._pending.memories[track.slot.name] = memory

    def _event(
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

    def _say(self, kind: str, text: str, *, node: str = "", level: str = "info") -> None:
        self._pending.events.append(Event(self.clock.now(), kind, text, "", node, level))

    def _set_aside(self, track: SlotTrack, error: Exception) -> None:
        """An error nobody named, in one slot's work: that slot waits, loudly; the others go on."""
        if isinstance(error, StoreError):
            raise error
        track.errors += 1
        pause = min(ASIDE_CAP, ASIDE_FIRST * 2 ** min(track.errors - 1, 10))
        track.aside_until = self.clock.monotonic() + pause
        track.action = Wait(f"set aside for {pause:.0f} s: {type(error).__name__}: {error}", needs_person=True)
        self._wake_at(track, track.aside_until)
        self._event(track, "error", f"{type(error).__name__}: {error}", level="error", errors=track.errors)

    def _idle_for(self, now: float) -> float:
        dues = [view.poll_due for view in self.projects.values() if not view.listing]
        if self._probes:
            dues.append(self._probes[0][0])
        if self._wakes:
            dues.append(self._wakes[0][0])
        if self._dirty:
            return 0.0
        # Shorter sleeps than a clock can tell apart would be a busy loop.
        return max(0.001, min(dues, default=now + self.settings.poll) - now)

    def is_training(self, slot: str) -> bool:
        """Every worker of the slot's node answers and holds the run that was launched last."""
        track = self.slots[slot]
        run = track.memory.run
        seen = track.nodes.get(run.node) if run is not None else None
        if seen is None or seen.report is None or run is None or not seen.report.all_answer:
            return False
        return all(worker.alive and worker.token == run.token for worker in seen.report.workers)

    def is_over(self, slot: str) -> bool:
        """Nothing more will happen to this slot by itself: done, or taken down, and nothing is left of it."""
        track = self.slots[slot]
        memory = track.memory
        empty = not (memory.nodes or memory.creates or track.in_flight or track.nodes)
        return empty and (memory.wish is Wish.DOWN or memory.end is not End.NONE)


def _slots_of(node: str) -> tuple[str, ...]:
    return (node.rpartition("-a")[0], node)


def _failed(result: object) -> bool:
    return getattr(result, "done", False) and getattr(result, "error", None) is not None


def _is_judged(action: Settle | Effect, memory: Memory) -> bool:
    if isinstance(action, Stop):
        return action.then is Reason.JUDGED
    if not isinstance(action, Delete) or action.reason is not Reason.JUDGED:
        return False
    past, run = memory.node(action.key.name), memory.run
    # What passed the brake once (a delete asked for, a gang stopped to be deleted) is not judged again.
    stopped = run is not None and run.node == action.key.name and run.then_delete == Reason.JUDGED
    return not stopped and (past is None or past.delete_asked_at is None)


def _kind(action: Settle | Effect) -> str:
    if isinstance(action, Settle):
        return "done" if action.fact is Fact.ENDED else "settle"
    return type(action).__name__.lower()


def _text(action: Settle | Effect) -> str:
    match action:
        case Create():
            return f"{action.name}: {action.why}"
        case Launch() | Stop():
            return f"{action.token}: {action.why}"
        case Settle():
            return f"{action.fact.value}: {action.why}"
    return f"{_node_of(action)}: {action.why}"


def _node_of(action: Settle | Effect) -> str:
    return action.name if isinstance(action, Create | Poll | Settle) else action.key.name
