"""
The calm after the weather: nothing goes wrong by itself any more, there is room for all, and a person does what only a
person can. Then every slot has to train within a bound that follows from the world and from where the slot stood.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.evidence import Moment
from tpucare.model.memory import End, Memory
from tpucare.model.resources import LABEL_FLEET, LABEL_OWNER, Slot
from tpucare.planner.backoff import DELETE_AGAIN_CAP, PERSON_FIRST, QUOTA_BACKOFF
from tpucare.planner.decide import decide
from tpucare.planner.predicates import STALL_FACTOR
from tpucare.testbed.simulation.daemon import Daemon
from tpucare.testbed.simulation.properties import Broken
from tpucare.testbed.simulation.scenario import PERSON_EVERY
from tpucare.testbed.simulation.strikes_api import FOR_EVER

if TYPE_CHECKING:
    from tpucare.testbed.simulation.history import History

IN_THE_DARK = "waits for a zone that never answers again"
UNVISITED = "waits for a person who never comes"
UNSEEN = "stands still, and no run of its job ever told of progress"
SWEEP = timedelta(minutes=10)
# A wake-up may be late by as much as floats and microseconds round.
WAKES_LATE = timedelta(milliseconds=2)
# Who comes rarely lets a verdict pass that the brake held, and comes once more for what is held behind it.
VISITS = 2


class Calm:
    """What follows the weather of one history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.daemon = history.daemon
        self._next_visit = history.now

    def settle(self) -> None:
        """Until every slot trains and nothing is left over, or a bound has passed."""
        self._quieten()
        history, began = self.history, self.history.now
        history.live(began + 60.0)
        bounds = {name: self._bound(slot) for name, slot in history.slots.items()}
        waiting = set(bounds)
        while waiting and not history.properties.broken:
            self._visit()
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
            self.history.swarm.settle()
            self._look_for_orphans()

    def _visit(self) -> None:
        every = self.history.scenario.person
        if every is not None and self.history.now >= self._next_visit:
            self.history.person.visit(gentle=True)
            self._next_visit = self.history.now + every

    def _quieten(self) -> None:
        self.history.is_calm = True
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
        for zone in sorted(self.daemon.zone.dark_for_ever):
            world.outage("zone", FOR_EVER, now, zone=zone)
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
        launcher.script.hangs_early.clear()
        launcher.script.outage = None
        self.daemon.disk.faults.clear()

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
        visits = VISITS * (self.history.scenario.person or 0.0)
        return 2 * p95 + backoff + self._timeout(slot) + 3 * self.history.scenario.pace.poll + PERSON_EVERY + visits

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
        if (run := track.memory.run) is not None:
            # A run that has shown no step yet is measured by how often the checkpoints of those before it came.
            lengths.append(timedelta(seconds=max(run.gap_seconds, track.memory.gap_seconds)) * STALL_FACTOR)
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
        return self.history.properties.is_training(name)

    def _apart(self, name: str) -> str:
        return "" if self._is_wronged(name) else self.daemon.engine.slots[name].memory.end.value

    def _is_wronged(self, name: str) -> bool:
        """It was given up for what was not its own doing: it is to be tried again, whether or not a person comes."""
        end, job = self.daemon.engine.slots[name].memory.end, self.history.slots[name].job
        is_foreign = job is not None and job.foreign
        return (
            end is End.FAILED
            and not is_foreign
            and self.history.properties.is_blameless(name, job.run if job is not None else "")
        )

    def _late(self, name: str, passed: float) -> None:
        track, properties = self.daemon.engine.slots.get(name), self.history.properties
        why = track.action.why if track is not None else "it is not even known"
        text = f"{name} does not train {passed / 60:.0f} min after the calm began: {why}"
        waits = track is not None and isinstance(track.action, Wait) and track.action.needs_person
        waits = waits and not self._is_wronged(name)
        if properties.stands_unseen(name):
            self.history.tally.apart[UNSEEN] += 1
            return
        if not waits or (self.history.scenario.person is not None and not self._is_in_the_dark(name)):
            properties.broken.append(Broken("trains-again", self.history.now, text))
        elif properties.said.get(name) != why:
            properties.broken.append(
                Broken("says-so", self.history.now, f"{text}; told last: {properties.said.get(name)}")
            )
        else:
            self.history.tally.apart[IN_THE_DARK if self._is_in_the_dark(name) else UNVISITED] += 1

    def _is_in_the_dark(self, name: str) -> bool:
        """There is no other zone for it than one that never answers again."""
        slots = self.daemon.declared[self.history.slots[name].fleet]
        slot = next((one for one in slots if one.name == name), slots[0])
        return all(place.zone in self.daemon.zone.dark_for_ever for place in slot.places)

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
            if not ours or life.path.zone in self.daemon.zone.dark_for_ever:
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
    held = track.braked or track.aside_until is not None or resting.cause is Cause.CREATE_BUDGET
    if track.in_flight or held or name in engine.board.dirty:
        return None
    view = engine.projects[track.slot.project]
    moment = engine.moment(track)
    moment = Moment(moment.wall - WAKES_LATE, moment.observed, moment.passes, moment.cloud)
    action = decide(track.slot, engine._evidence(view, track), track.memory, moment)
    if type(action) is type(resting):
        return None
    return f"{name} rests at {resting}, and would {action}"
