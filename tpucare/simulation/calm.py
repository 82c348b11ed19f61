"""
The calm after the weather: nothing goes wrong by itself any more, there is room for all, and a person does what only a
person can. Then every slot has to train within a bound that follows from the world and from where the slot stood.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tpucare.backoff import DELETE_AGAIN_CAP, PERSON_FIRST, QUOTA_BACKOFF
from tpucare.memory import End, Memory, PlaceMemory, Wish
from tpucare.model import LABEL_FLEET, LABEL_OWNER, NodeState, Slot
from tpucare.plan import decide
from tpucare.plan_words import STALL_FACTOR
from tpucare.simulation.daemon import Daemon
from tpucare.simulation.properties import Broken

if TYPE_CHECKING:
    from tpucare.simulation.history import History

SWEEP = timedelta(minutes=10)
PERSON_EVERY = 120.0


class Calm:
    """What follows the weather of one history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.daemon = history.daemon

    def settle(self) -> None:
        """Until every slot trains and nothing is left over, or a bound has passed."""
        self._quieten()
        history, began = self.history, self.history.now
        history.live(began + 60.0)
        bounds = {name: self._bound(slot) for name, slot in history.slots.items()}
        waiting = set(bounds)
        while waiting and not history.properties.broken:
            self._person()
            history.live(history.now + PERSON_EVERY)
            passed = history.now - began
            for name in sorted(waiting):
                if self._is_well(name):
                    waiting.discard(name)
                    history.tally.settled.append(passed / bounds[name])
                elif passed > bounds[name]:
                    waiting.discard(name)
                    self._late(name, passed)
        if not history.properties.broken:
            history.live(max(history.now, began + DELETE_AGAIN_CAP.total_seconds()) + 2 * SWEEP.total_seconds())
            self._look_for_orphans()

    def _quieten(self) -> None:
        history, world = self.history, self.daemon.zone.world
        now = self.daemon.clock.true_now()
        # Whatever was to be undone later is undone now.
        while history._timers:
            undos = [undo for _, _, undo in sorted(history._timers)]
            history._timers.clear()
            for undo in undos:
                history._act(undo)
            if self.daemon.store is None:
                history._start()
        world.end_outages(now)
        world.reconfigure(_quiet(history.scenario.world, history.scenario), now)
        world.forget_orders()
        for pool in list(world.pools):
            world.set_capacity(pool.zone, pool.accelerator, pool.tier, None, now)
        launcher = self.daemon.launcher
        launcher.deaf, launcher.slow = False, 0.0
        launcher.boots.clear()
        launcher.lost.clear()
        launcher.script.ignores_stop.clear()
        launcher.script.on_notice.clear()
        self.daemon.disk.faults.clear()

    # --- the person

    def _person(self) -> None:
        """Lifts the brake, asks again where only a person can, and gives up a node that nobody vouches for."""
        daemon = self.daemon
        if daemon.store is None:
            return
        self._start_what_was_stopped()
        for name, track in daemon.engine.slots.items():
            memory = track.memory
            if track.braked:
                self.history.properties.lifted.add(name)
                daemon.engine.lift_brake(name)
            if memory.wish is not Wish.UP:
                daemon.wish(name, Wish.UP)
            if any(place.blocked for place in memory.places.values()):
                daemon.engine.change(name, _unblocked, "retry", f"{name}: retry")
            why = track.action.why
            stuck = "host key" in why or "refuses our key" in why
            if stuck and getattr(track.action, "needs_person", False) and not memory.replace_asked:
                daemon.engine.change(name, lambda m: replace(m, replace_asked=True), "replace", f"{name}: replace")

    def _start_what_was_stopped(self) -> None:
        world = self.daemon.zone.world
        for life in list(world.state.nodes.values()):
            if life.record.state == NodeState.STOPPED:
                world.start_node(life.record.name, self.daemon.clock.true_now())

    # --- the bound

    def _bound(self, slot: Slot) -> float:
        """
        Twice the world's p95 of delete, create and boot, the cap of the backoffs, the largest timeout of where the slot
        stands now, and three polls.
        """
        lengths = self.history.scenario.config.latencies
        create = max(lengths.create_single.p95, lengths.create_single.median)
        if max(place.workers for place in slot.places) > 1:
            create = max(lengths.create_slice.p95, lengths.create_slice.median)
        p95 = lengths.delete.p95 + create + lengths.boot_late.p95 + lengths.boot_skew
        backoff = max(QUOTA_BACKOFF.cap, PERSON_FIRST).total_seconds()
        return 2 * p95 + backoff + self._timeout(slot) + 3 * self.history.scenario.pace.poll + PERSON_EVERY

    def _timeout(self, slot: Slot) -> float:
        """Of everything that could be waited for in the state that this slot is in."""
        care, track = slot.care, self.daemon.engine.slots.get(slot.name)
        if track is None:
            return 0.0
        lengths = [care.unreachable_after * 6]
        if track.memory.creates or not track.nodes:
            lengths.append(care.boot_timeout)
        for seen in track.nodes.values():
            gaps = sorted(seen.progress.gaps)
            gap = timedelta(seconds=gaps[len(gaps) // 2]) if gaps else timedelta()
            lengths += [care.boot_timeout, care.unhealthy_after, care.first_step_timeout]
            lengths += [care.stalled_after, gap * STALL_FACTOR, timedelta(minutes=30)]
        longest = max(lengths).total_seconds()
        # That a run stands still is seen by probes only, and three of them have to say so.
        return longest + 3 * self.history.scenario.pace.probe

    # --- judging

    def _is_well(self, name: str) -> bool:
        daemon = self.daemon
        if daemon.store is None or name not in daemon.engine.slots:
            return False
        if self._apart(name):
            return True
        return name in self.history.properties.training()

    def _apart(self, name: str) -> str:
        memory = self.daemon.engine.slots[name].memory
        return "failed" if memory.end is End.FAILED else "done" if memory.end is End.DONE else ""

    def _late(self, name: str, passed: float) -> None:
        track = self.daemon.engine.slots.get(name)
        why = track.action.why if track is not None else "it is not even known"
        text = f"{name} does not train {passed / 60:.0f} min after the calm began: {why}"
        self.history.properties.broken.append(Broken("trains-again", self.history.now, text))

    def _look_for_orphans(self) -> None:
        history, engine = self.history, self.daemon.engine
        for name in sorted(history.slots):
            if apart := self._apart(name):
                history.tally.apart[apart] += 1
        for life in list(self.daemon.zone.world.state.nodes.values()):
            labels = life.record.spec.labels
            ours = (
                labels.get(LABEL_OWNER) == self.daemon.disk.owner and labels.get(LABEL_FLEET) in self.daemon.disk.fleets
            )
            if not ours:
                continue
            slot = life.path.node_id.rpartition("-a")[0]
            track = engine.slots.get(slot)
            held = track is not None and self._holds(track.memory, life.record.id)
            if not held:
                text = f"{life.path.node_id} is still there, and {slot} does not hold it"
                rule = "finished-empty" if track is not None and track.memory.end is End.DONE else "no-orphan"
                history.properties.broken.append(Broken(rule, history.now, text))

    def _holds(self, memory: Memory, node_id: int) -> bool:
        if memory.end is End.DONE:
            return False
        if memory.end is End.FAILED:
            return any(past.id == node_id for past in memory.nodes)
        live = [past for past in memory.nodes if past.serves]
        return any(past.id == node_id for past in live)


def _unblocked(memory: Memory) -> Memory:
    """As `tpucare retry` leaves it."""
    return replace(memory, places={key: PlaceMemory() if p.blocked else p for key, p in memory.places.items()})


def _quiet(world: Any, scenario: Any) -> Any:
    """The same world, in which nothing goes wrong by itself."""
    raw = dict(world)
    raw.pop("quotas", None)
    raw["faults"] = {}
    raw["health"] = {}
    raw["preemption"] = {key: value for key, value in dict(raw.get("preemption", {})).items() if key != "lifetime"}
    raw["zones"] = {zone: {**(settings or {}), "create_errors": 0.0} for zone, settings in dict(raw["zones"]).items()}
    return type(scenario.config).model_validate(raw)


def is_overslept(daemon: Daemon, name: str) -> str | None:
    """What a slot at rest would be decided to do now, when that is something else: a wake-up was missed."""
    engine, track = daemon.engine, daemon.engine.slots[name]
    resting = track.action
    held = track.braked or track.aside_until is not None or "create budget" in resting.why
    if track.in_flight or held or name in engine.board.dirty:
        return None
    view = engine.projects[track.slot.project]
    moment = engine.moment(view)
    # A wake-up may be late by as much as floats and microseconds round.
    moment = replace(moment, wall=moment.wall - timedelta(milliseconds=2))
    action = decide(track.slot, engine._evidence(view, track), track.memory, moment)
    if type(action) is type(resting):
        return None
    return f"{name} rests at {resting}, and would {action}"
