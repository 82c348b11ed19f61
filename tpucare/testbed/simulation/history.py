"""
One history: runs a scenario step by step, and checks the properties after each step.

The faults last as long as the scenario says; then comes the calm: no further faults, capacity for all, a scripted
person who confirms and repairs, and every slot has to train within its bound.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.errors import CloudError, StoreError
from tpucare.model.evidence import Moment
from tpucare.model.memory import End, Memory
from tpucare.model.ports import Lane
from tpucare.model.resources import LABEL_FLEET, LABEL_OWNER, LABEL_SLOT, Event, Listing, NodeKey, Slot
from tpucare.planner.backoff import DELETE_AGAIN_CAP, PERSON_FIRST, QUOTA_BACKOFF
from tpucare.planner.decide import decide
from tpucare.planner.predicates import STALL_FACTOR
from tpucare.planner.queued import SHELL_PATIENCE, SUSPENSION_PATIENCE
from tpucare.testbed.simulation.daemon import SimulatedDaemon
from tpucare.testbed.simulation.machines import RunMark
from tpucare.testbed.simulation.person import Person
from tpucare.testbed.simulation.properties import Broken, Properties
from tpucare.testbed.simulation.scenario import PERSON_EVERY, PROJECT, Scenario, Strike
from tpucare.testbed.simulation.store import ProcessDied
from tpucare.testbed.simulation.strikes import FOR_EVER, STRIKES, Hand, Undo
from tpucare.testbed.simulation.swarm import Swarm
from tpucare.testbed.simulation.tally import Tally, TallyRecorder
from tpucare.testbed.simulation.workers import Script

SETUP_SECONDS = 20.0
RESTART_SECONDS = 5.0
JUMP_FORGOTTEN = 2 * 3600.0
# Steps between two collections of reference cycles (`campaign` switches the collector off).
COLLECT_EVERY = 50_000
OPERATION_LINGERS, SLOW_CREATE = 300.0, 900.0
_WORKER_TROUBLE = frozenset({"network-dark", "workers-unreachable", "everything-slow", "api-slow", "suspended"})
OWN_QUOTA = re.compile(r"^Quota (limit )?'")
_LASTING = frozenset({"hung", "lost-worker", "host-key-changed", "key-refused"})


@dataclass(slots=True)
class HistoryOutcome:
    """The result of a history; `broken` is empty when every property held. Equal histories have equal `digest`."""

    seed: int
    broken: list[Broken]
    steps: int
    digest: str
    tally: Tally
    strikes: int = 0
    told: list[str] = field(default_factory=list)


class History:
    """
    `run` runs it. An error of the engine is not raised, but is a broken property.

    remember: how many of the last lines of the log to keep for a person
    on_way: called now and then with the share of the history that is over
    """

    def __init__(
        self, scenario: Scenario, remember: int = 400, on_way: Callable[[float], None] = lambda _: None
    ) -> None:
        self.scenario, self._on_way = scenario, on_way
        self.remember = remember
        pace = scenario.pace
        self.rng = random.Random(f"{scenario.seed}/history")
        self.daemon = SimulatedDaemon(
            config=scenario.config,
            seed=scenario.seed,
            script=Script(setup_seconds=SETUP_SECONDS),
            settings=pace.settings,
            delay=self._delay if pace.close else None,
            grain=pace.grain,
        )
        self.slots = {slot.name: slot for slot in scenario.slots}
        self.watch = TallyRecorder(scenario.slots, SETUP_SECONDS)
        self.tally = self.watch.tally
        self.properties = Properties(
            self.daemon.zone.world,
            self.daemon.disk,
            self.slots,
            self.daemon.clock.monotonic,
            wall=self.daemon.clock.now,
            creates_per_minute=pace.settings.creates_per_minute,
            poll=pace.poll,
            probe=pace.probe,
            hangs=lambda life: self.daemon.launcher.hangs_on(NodeKey(*life.path)),
            guarded=lambda life: self.daemon.launcher.guards(NodeKey(*life.path)),
        )
        self.lines: list[str] = []
        self._digest = hashlib.sha256()
        self._timers: list[tuple[float, int, Undo]] = []
        self._timer_count = 0
        self._ready: dict[str, tuple[float, float]] = {}
        self._suspects: dict[str, int] = {}
        self._jumped_at = -math.inf
        self.person = Person(self)
        self.is_calm = False
        self.daemon.launcher.script.saves_alone |= scenario.saves_alone
        self.swarm = Swarm(self)
        self._listen()

    def _listen(self) -> None:
        launcher, daemon = self.daemon.launcher, self.daemon
        launcher.keep_history = False
        launcher.eager = not self.scenario.pace.close
        launcher.on_run = self._ran
        launcher.on_report = self.properties.answered
        launcher.on_trust = self.properties.trusted
        daemon.zone.world.on_audit(self._audited, keep=False)
        daemon.listen = self._told
        daemon.on_edit = self._edited

    def _delay(self, lane: Lane) -> float:
        """Seconds until an effect begins: mostly none, sometimes several."""
        lot = self.rng.random()
        if lane is Lane.PROBE or lot < 0.8:
            return 0.0
        return self.rng.uniform(0.01, 0.3) if lot < 0.98 else self.rng.uniform(0.3, 5.0)

    def _edited(self, slots: list[Slot]) -> None:
        """Declare *slots* from now on, and count their expected creates anew."""
        self.slots.update({slot.name: slot for slot in slots})
        self.properties.edited(slots)

    # --- the log of the history

    @property
    def now(self) -> float:
        return self.daemon.clock.seconds

    def _say(self, line: str) -> None:
        self._digest.update(line.encode())
        if self.remember:
            self.lines.append(f"{self.now:.3f} {line}")
            if len(self.lines) > 2 * self.remember:
                del self.lines[: -self.remember]

    def _ran(self, mark: RunMark) -> None:
        self._say(f"run {mark.what} {mark.token} {mark.worker}")
        self.properties.ran(mark)
        self.swarm.ran(mark)
        self.watch.ran(mark)

    def _told(self, event: Event) -> None:
        self._say(f"{event.kind} {event.slot} {event.text}")
        self.properties.told(event)
        self.swarm.told(event)
        self.watch.told(event, self.now)

    def _audited(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "call":
            self._say(f"call {record['method']} {record['name']} {record['code']} {record['answer']}")
            self.properties.called(record)
            self._count_call(record)
        elif kind == "node":
            self._say(f"node {record['event']} {record['name']}")
            self._count_node(record)
        elif kind == "operation" and record["verb"] == "create" and "code" not in record:
            born = self._ready.get(record["target"])
            if born is not None and self.now - born[1] > OPERATION_LINGERS:
                self.tally.faults["operation-lingers"] += 1

    def _count_call(self, record: Mapping[str, Any]) -> None:
        if record["method"] == "CreateNode":
            self.tally.creates += 1
            if record["peer"]:
                self.swarm.created(record["name"].rpartition("/")[2], record["under_way"])
            if record["code"] == 8 and record["applied"] and OWN_QUOTA.search(record.get("message", "")):
                self.tally.faults["quota-used-up"] += 1
        if record["code"] in (13, 14) and not record["applied"]:
            self.tally.faults["call-unavailable"] += 1
        if record.get("repeated"):
            self.tally.faults["delete-asked-again"] += 1

    def _count_node(self, record: Mapping[str, Any]) -> None:
        name, event = record["name"], record["event"]
        self.watch.node(name, event, str(record.get("labels", {}).get(LABEL_SLOT, "")), self.now)
        if event == "created":
            self._ready[name] = (self.now, self.now)
        elif event == "ready":
            self.properties.came_up(name.rpartition("/")[2])
            if name not in self._ready:
                return
            self._ready[name] = (self._ready[name][0], self.now)
            if self.now - self._ready[name][0] > SLOW_CREATE:
                self.tally.faults["slow-create"] += 1
        elif event == "gone":
            self._ready.pop(name, None)

    # --- the process

    def _start(self) -> None:
        self.daemon.start()
        self._suspects.clear()
        self._jumped_at = -math.inf
        self.properties.process_began()
        self.swarm.process_began()
        listed, cloud = self.daemon.cloud.list_nodes, self.daemon.cloud

        def list_nodes(project: str) -> Listing:
            try:
                listing = listed(project)
            except CloudError as error:
                self.properties.listing_failed(error)
                raise
            self.properties.observed.listed(self.daemon.executor.heard_at)
            self.properties.dark = listing.unreachable
            return listing

        cloud.list_nodes = list_nodes  # type: ignore[method-assign]
        cloud.asked = self.properties.asked
        self.tally.restarts += 1

    def later(self, seconds: float, undo: Undo) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (self.now + seconds, self._timer_count, undo))

    def _down_for(self, seconds: float) -> None:
        self.later(max(1.0, seconds), self._come_back)

    def _come_back(self) -> None:
        if self.daemon.store is None:
            self._start()

    def _die(self, why: str) -> None:
        self._say(f"the process ends: {why}")
        if self.daemon.store is not None:
            self.daemon.kill(lambda: self.rng.random() < 0.5)
            self._down_for(RESTART_SECONDS)

    # --- time

    def live(self, until: float) -> None:
        """Run until then, or until a property breaks."""
        while self.now < until and not self.properties.broken:
            due = min(until, self._timers[0][0]) if self._timers else until
            self._step(max(due, self.now))
            while self._timers and self._timers[0][0] <= self.now:
                self._act(heapq.heappop(self._timers)[2])

    def _act(self, act: Undo) -> None:
        try:
            act()
        except (StoreError, ProcessDied) as error:
            self._die(str(error))

    def _step(self, until: float) -> None:
        daemon = self.daemon
        self.swarm.advance()
        if daemon.store is None:
            daemon.executor.sleep_until(until)
            return
        self.tally.steps += 1
        if self.tally.steps % COLLECT_EVERY == 0:
            gc.collect()
        try:
            idle = daemon.engine.step()
            self.swarm.step()
        except (StoreError, ProcessDied) as error:
            self._die(str(error))
            return
        if self.scenario.pace.close:
            self._check_oversleep()
        daemon.executor.sleep_until(max(self.now + 0.001, min(self.now + idle, until)))

    def _check_oversleep(self) -> None:
        """Check one slot per step: a missed wake-up stays missed for longer than a round over all slots."""
        if self.now - self._jumped_at < JUMP_FORGOTTEN:
            # A process that sleeps for a length sleeps that long, whatever the wall clock says.
            return
        names = list(self.daemon.engine.slots)
        for name in [names[self.tally.steps % len(names)], *self._suspects] if names else ():
            view = self.daemon.engine.projects[PROJECT]
            found = is_overslept(self.daemon, name)
            if found is None:
                self._suspects.pop(name, None)
            elif view.passes > self._suspects.setdefault(name, view.passes) + 2:
                # Decisions that depend on silence or on other slots are made in the next pass.
                self.properties.broken.append(Broken("no-oversleep", self.now, found))

    # --- people

    def person_asks(self, slot: str, seconds: float) -> None:
        """A person gave a command for that slot, which explains verdicts on it for *seconds*."""
        self.properties.explain(slot, seconds)
        self.properties.wanted_anew(slot)
        self.swarm.wanted(slot)

    def _visit(self) -> None:
        """A person who comes rarely visits again and again; one who comes often is there in the calm only."""
        if self.is_calm or self.scenario.person is None:
            return
        self.person.visit(gentle=False)
        self.later(self.scenario.person, self._visit)

    # --- the whole

    def run(self) -> HistoryOutcome:
        daemon, scenario = self.daemon, self.scenario
        self._start()
        daemon.care_for_all(scenario.slots)
        if self.scenario.person is not None and self.scenario.person > PERSON_EVERY:
            self.later(self.scenario.person, self._visit)
        struck = 0
        for strike in scenario.strikes:
            self.live(strike.at)
            if self.properties.broken:
                break
            self._on_way(strike.at / (scenario.days * 86400.0))
            struck += self._strike(strike)
        self.live(scenario.days * 86400.0)
        if not self.properties.broken:
            Calm(self).settle()
        self._close()
        return HistoryOutcome(
            scenario.seed,
            self.properties.broken,
            self.tally.steps,
            self._digest.hexdigest(),
            self.tally,
            struck,
            self.lines[-self.remember :] if self.remember else [],
        )

    def _close(self) -> None:
        self.watch.close(self.now)
        self.tally.slot_seconds = self.now * len(self.slots)
        strangers = self.daemon.launcher.met_strangers
        if strangers:
            self.tally.faults["address-met-another-machine"] += strangers

    def _strike(self, strike: Strike) -> bool:
        rng = random.Random(f"{self.scenario.seed}/{strike.kind}/{strike.at}")
        hand = Hand(self.daemon, self.later, self._down_for, self.person_asks, rng, strike)
        try:
            took = STRIKES[strike.kind](hand)
        except (StoreError, ProcessDied) as error:
            self._die(str(error))
            took = True
        if not took:
            return False
        self._say(f"strike {strike.kind} {strike.target} {strike.length:g}")
        self.tally.faults[strike.kind] += 1
        self._explain(strike)
        if strike.kind in ("clock-forward", "clock-back"):
            self._jumped_at = self.now
        if strike.kind == "clock-back":
            self.properties.time_lost(strike.length)
        elif strike.kind == "taken-back":
            # A readopted run counts as that old.
            self.properties.time_lost(math.inf, strike.target)
        if strike.kind == "suspended":
            self._suspend(strike.length)
        return True

    def _explain(self, strike: Strike) -> None:
        if strike.target in self.slots:
            # Gaps in its steps show that a run hangs; the other faults may involve a person.
            lasting = 3 * 3600.0 if strike.kind in _LASTING else 0.0
            self.properties.explain(strike.target, max(strike.length, lasting))
        elif strike.kind in _WORKER_TROUBLE or strike.kind == "preempted-in-a-burst":
            self.properties.explain("", strike.length)

    def _suspend(self, seconds: float) -> None:
        """Stop the process for *seconds*, while the world goes on."""
        executor, until = self.daemon.executor, self.now + seconds
        self.swarm.woke = until
        self.properties.observed.suspended(until)
        while self.now < until:
            executor.pass_time(until)
            while self._timers and self._timers[0][0] <= self.now:
                self._act(heapq.heappop(self._timers)[2])

    def sleep(self, length: timedelta) -> None:
        self.live(self.now + length.total_seconds())


# --- the calm: every slot has to train within a bound that follows from the world and from the slot's state -----------


IN_THE_DARK = "waits for a zone that never answers again"
UNVISITED = "waits for a person who never comes"
UNSEEN = "stands still, and no run of its job ever told of progress"
SWEEP = timedelta(minutes=10)
# A wake-up may be late by as much as floats and microseconds round.
WAKES_LATE = timedelta(milliseconds=2)
# A person who comes rarely confirms a braked verdict, and comes once more for the verdicts held behind it.
VISITS = 2


class Calm:
    """The end of a history, after its faults: every slot has to train again."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.daemon = history.daemon
        self._next_visit = history.now

    def settle(self) -> None:
        """Run until every slot trains and no orphan is left, or a bound has passed."""
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
            self._check_orphans()

    def _visit(self) -> None:
        every = self.history.scenario.person
        if every is not None and self.history.now >= self._next_visit:
            self.history.person.visit(gentle=True)
            self._next_visit = self.history.now + every

    def _quieten(self) -> None:
        self.history.is_calm = True
        history, world = self.history, self.daemon.zone.world
        now = self.daemon.clock.true_now()
        # Faults that were to end later end now.
        while history._timers:
            undos = [undo for _, _, undo in sorted(history._timers)]
            history._timers.clear()
            for undo in undos:
                history._act(undo)
            if self.daemon.store is None:
                history._start()
        world.operator.end_outages(now)
        for zone in sorted(self.daemon.zone.dark_for_ever):
            world.operator.outage("zone", FOR_EVER, now, zone=zone)
        world.operator.reconfigure(_quiet(history.scenario.world, history.scenario), now)
        world.operator.cancel_orders()
        for pool in list(world.lifecycle.pools.all):
            world.operator.set_capacity(pool.zone, pool.accelerator, pool.tier, None, now)
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
        Twice the world's p95 of delete, create and boot, the cap of the backoffs, the largest timeout in the slot's
        present state, and three polls.
        """
        lengths = self.history.scenario.config.latencies
        create = max(lengths.create_single.p95, lengths.create_single.median)
        if max(place.workers for place in slot.places) > 1:
            create = max(lengths.create_slice.p95, lengths.create_slice.median)
        p95 = lengths.delete.p95 + create + lengths.boot_late.p95 + lengths.boot_skew
        backoff = max(QUOTA_BACKOFF.cap, PERSON_FIRST).total_seconds()
        visits = VISITS * (self.history.scenario.person or 0.0)
        if any(place.queued for place in slot.places):
            queue = self.history.scenario.config.queue
            p95 += queue.grant.p95 + queue.suspend.p95 + queue.delete.p95 + queue.retry_for
            backoff += (SHELL_PATIENCE + 2 * SUSPENSION_PATIENCE + DELETE_AGAIN_CAP).total_seconds()
        return 2 * p95 + backoff + self._timeout(slot) + 3 * self.history.scenario.pace.poll + PERSON_EVERY + visits

    def _timeout(self, slot: Slot) -> float:
        """The largest timeout that may be running in the slot's present state."""
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
            # A run without a step so far is judged by the interval of its predecessors' checkpoints.
            lengths.append(timedelta(seconds=max(run.gap_seconds, track.memory.gap_seconds)) * STALL_FACTOR)
        longest = max(lengths).total_seconds()
        # Only probes show that a run hangs, and three of them have to.
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
        """True when it was given up for no fault of its own: it has to be tried again, with or without a person."""
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
        """True when all its zones never answer again."""
        slots = self.daemon.declared[self.history.slots[name].fleet]
        slot = next((one for one in slots if one.name == name), slots[0])
        return all(place.zone in self.daemon.zone.dark_for_ever for place in slot.places)

    def _check_orphans(self) -> None:
        history = self.history
        for name in sorted(history.slots):
            if apart := self._apart(name):
                history.tally.apart[apart] += 1
        if self._orphans():
            # A call that was held up for hours may bring its node just now: then it is being deleted.
            history.live(history.now + DELETE_AGAIN_CAP.total_seconds())
        history.properties.broken += self._orphans()

    def _orphans(self) -> list[Broken]:
        history, engine, found = self.history, self.daemon.engine, []
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
                found.append(Broken(rule, history.now, text))
        for name in history.properties.queues.left(self.daemon.zone.dark_for_ever):
            found.append(Broken("no-orphan", history.now, f"the queued resource {name} is still there"))
        return found

    def _holds(self, memory: Memory, node_id: int) -> bool:
        if memory.end is End.DONE:
            return False
        if memory.end is End.FAILED:
            return any(past.id == node_id for past in memory.nodes)
        live = [past for past in memory.nodes if past.serves]
        return any(past.id == node_id for past in live)


def _quiet(world: Any, scenario: Any) -> Any:
    """The same world without faults of its own."""
    raw = dict(world)
    raw.pop("quotas", None)
    raw["faults"] = {}
    raw["health"] = {}
    raw["preemption"] = {key: value for key, value in dict(raw.get("preemption", {})).items() if key != "lifetime"}
    raw["zones"] = {zone: {**(settings or {}), "create_errors": 0.0} for zone, settings in dict(raw["zones"]).items()}
    return type(scenario.config).model_validate(raw)


def is_overslept(daemon: SimulatedDaemon, name: str) -> str | None:
    """The decision about a slot at rest, if it is another one now: a wake-up was missed. None: no change."""
    engine, track = daemon.engine, daemon.engine.slots[name]
    resting = track.action
    held = track.braked or track.aside_until is not None or resting.cause is Cause.CREATE_BUDGET
    if track.in_flight or held or name in engine.state.dirty:
        return None
    view = engine.projects[track.slot.project]
    moment = engine.moment(track)
    moment = Moment(moment.wall - WAKES_LATE, moment.observed, moment.passes, moment.cloud)
    action = decide(track.slot, engine._evidence(view, track), track.memory, moment)
    if type(action) is type(resting):
        return None
    return f"{name} rests at {resting}, and would {action}"
