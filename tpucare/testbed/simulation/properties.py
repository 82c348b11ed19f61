"""
The properties that must hold at every step of a history: one for each rule that a history can show.

They get calls and lives of nodes from the world's audit log, runs from the machines, commits and events from the
daemon, and keep just enough to check the next of them. They never use the engine's own view: the state of the world and
of the machines is the truth.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tpucare.engine.tracking import newest_checkpoint, newest_step
from tpucare.model.causes import Cause, Reason
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import DeleteIntent, End, Memory, PlaceMemory
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    Event,
    Health,
    NodeState,
    OnSuccess,
    Slot,
)
from tpucare.model.runs import NodeReport, Phase
from tpucare.testbed.emulator.world.records import parse_node_path
from tpucare.testbed.emulator.world.state import NodeLife
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.lives import Lives
from tpucare.testbed.simulation.machines import RunMark, SimulatedWorker
from tpucare.testbed.simulation.manners import Manners
from tpucare.testbed.simulation.queues import QueueRules
from tpucare.testbed.simulation.scenario import SECRET
from tpucare.testbed.simulation.store import Disk

PROPERTIES: Mapping[str, str] = {
    "one-run": "rule 1: never two live runs of one slot",
    "dead-elders": "rule 1: at a launch each older node with a launch is dead, deleted when quiet, or confirmed",
    "ours-only": "rule 2: no node without our owner label and a known fleet is changed or deleted",
    "unasked-delete": "rules 3 and 6: no healthy node with a live run is deleted",
    "unasked-stop": "rule 6: no healthy run is stopped unless a person asked for it",
    "intent-first": "rule 5: the intent is on the disk before the call",
    "labelled": "rule 5: every create has our labels",
    "one-request": "rule 5: never two standing queued resources of one slot",
    "fresh-numbers": "rule 5: a create number is never used again",
    "no-starved-place": "while a slot has no node, no open place is left out for more than two rounds",
    "create-budget": "no minute has more creates than the budget",
    "brake": "rule 12: no more verdicts within ten minutes than the brake allows",
    "observed-time": "rule 11: a timeout has counted as much observed time as it claims",
    "pinned-key": "rule 8: a changed host key is trusted only where guest attributes confirm it",
    "no-secret": "rule 8: no secret in any event, label or metadata",
    "no-surprise": "no unexpected error in the work of a slot",
    "no-flood": "no node or operation is asked for more often than once a second",
    "failed-rightly": "a slot fails only when its runs spent a failure budget without any progress",
    "free-chips": "a run starts only where no other process holds the chips",
    "guard-outwaited": "a new machine whose guard blocks us is not given up before boot_timeout",
    "rate-heeded": "while listings are refused for their rate, fewer are sent",
    "finished-once": "a run that was seen to finish by itself is not run again",
    "over-once": "a slot is ended for its sweep once, and only when no interrupted run waits for it",
    "no-oversleep": "the decision about a slot at rest is still the same",
    "trains-again": "in the calm every slot trains within its bound, unless it waits for a person who never comes",
    "says-so": "a slot that waits for a person has reported it",
    "no-orphan": "in the calm no orphan is left after two sweeps",
    "finished-empty": "a finished slot has no node",
}

STEADY_SECONDS = 120.0
"""The age of a run that several probes have seen."""
TROUBLE_LASTS = 900.0
"""A fault of a node may explain a verdict for so long after its end."""
BRAKE_WINDOW = 540.0
GIVEN_UP_AFTER = 30.0
LATEST_CREATE = 2 * 3600.0
"""Longer than any create that was given up stays in flight."""
FLOOD = 60
"""Calls of one method on one resource in a minute."""
POLLS_FOR_SURE = 2 + 3
"""
Time between two reports of a run's end; a verdict counts observed time, which polls advance. A report in flight may
arrive after the next listing only, whose gap counts as three polls at most.
"""
LATEST_ANSWER = 45.0
"""The longest delay of an answer to the engine; its observed time may differ from ours by so much."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A property that does not hold, when, and why."""

    rule: str
    seconds: float
    text: str

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s {self.rule}: {self.text}"


@dataclass(slots=True)
class _SlotRuns:
    """Runs of one slot. `alive`: token by (node id, worker)."""

    workers: int
    alive: dict[tuple[int, int], str] = field(default_factory=dict)
    launched_on: set[int] = field(default_factory=set)
    node: int = 0
    since: float | None = None


@dataclass(slots=True)
class Turns:
    """
    The turns of the places of one slot with so many `places`.

    unasked: by place, the number of creates elsewhere since its last one, since it was closed, or since a node came up
    """

    places: int
    unasked: dict[str, int] = field(default_factory=dict)

    def asked(self, place: str, open_places: Collection[str]) -> list[str]:
        """Record a create at *place*. Returns the starved places: left out for more than two rounds over all places."""
        others = [other for other in open_places if other != place]
        self.unasked = {other: self.unasked.get(other, 0) + 1 for other in others}
        return sorted(other for other, count in self.unasked.items() if count > 2 * self.places)

    def served(self) -> None:
        self.unasked.clear()


class ObservedClock:
    """
    The observed time of one process, counted from outside: gaps between listings that succeeded, each capped.

    A listing counts when the process gets its answer: slow calls, and a suspended process, make other gaps.
    """

    def __init__(self, cap: float, now: Callable[[], float]) -> None:
        self.cap = cap
        self.started = 0.0
        self._now = now
        self._seconds = 0.0
        self._last: float | None = None
        self._before: tuple[float, float | None] = (0.0, None)
        self._arriving: deque[float] = deque()
        self._blind = False

    @property
    def seconds(self) -> float:
        self._count_arrived()
        return self._seconds

    @property
    def is_blind(self) -> bool:
        """True when a listing failed and none has succeeded since."""
        self._count_arrived()
        return self._blind

    def _count_arrived(self) -> None:
        """Count the listings that have arrived by now."""
        while self._arriving and self._arriving[0] <= self._now():
            arrived, self._blind = self._arriving.popleft(), False
            self._before = (self._seconds, self._last)
            if self._last is not None:
                self._seconds += min(self.cap, max(0.0, arrived - self._last))
            self._last = arrived

    def begin(self) -> None:
        self.started, self._last, self._blind = self.seconds, None, False
        self._arriving.clear()

    def listed(self, arrives: float) -> None:
        self._arriving.append(arrives)

    def failed(self) -> None:
        self._blind = True

    def suspended(self, until: float) -> None:
        """The process is suspended from now until then; it gets answers that arrive meanwhile when it goes on."""
        self._count_arrived()
        if self._last == self._now():
            # It had arrived, and the process has not read it yet.
            self._arriving.appendleft(self._last)
            self._seconds, self._last = self._before
        self._arriving = deque(max(at, until) for at in self._arriving)


class Properties:
    """
    `broken` has the findings. `trouble`: until when a fault explains a verdict on a slot ("": on every slot).
    `said`: the last report to a person about a slot.

    now: seconds of virtual time    wall: the wall clock of the daemon's machine
    hangs: whether a run on that node really hangs    guarded: whether a guard of it blocks us
    """

    def __init__(
        self,
        world: World,
        disk: Disk,
        slots: Mapping[str, Slot],
        now: Callable[[], float],
        *,
        wall: Callable[[], datetime],
        creates_per_minute: int,
        poll: float,
        probe: float,
        hangs: Callable[[NodeLife], bool] = lambda _life: False,
        guarded: Callable[[NodeLife], bool] = lambda _life: False,
    ) -> None:
        self.world = world
        self.disk = disk
        self.slots = slots
        self.now = now
        self.wall = wall
        self.creates_per_minute = creates_per_minute
        self.hangs = hangs
        self.broken: list[Broken] = []
        self.observed = ObservedClock(3 * poll, now)
        self.sure = POLLS_FOR_SURE * poll
        self.trouble: dict[str, float] = {}
        self.restarted = 0.0
        self.lifted: set[str] = set()
        self._runs = {name: _SlotRuns(max(place.workers for place in slot.places)) for name, slot in slots.items()}
        self._answered: dict[int, list[tuple[float, float]]] = {}
        self._made: dict[str, tuple[float, bool]] = {}
        self._creates: list[float] = []
        self._turns: dict[str, Turns] = {}
        self.dark: frozenset[str] = frozenset()
        self._judged: deque[tuple[float, str]] = deque()
        self.said: dict[str, str] = {}
        self._lives = Lives(probe)
        self._manners = Manners(now, guarded)
        self.queues = QueueRules(world, disk, self._break, lambda: self.dark, self._may_lose)
        self._failed: set[str] = set()
        self._asked: tuple[int, Counter[tuple[str, str]]] = (0, Counter())
        self._finished: dict[str, tuple[str, float, float]] = {}
        self._over: dict[str, str] = {}
        self._outdated: dict[str, str] = {}
        self._newest: dict[str, str] = {}
        self._jobs: dict[str, str] = {}
        self._checkpoints: dict[str, tuple[str, int | None]] = {}
        self._tells: set[tuple[str, str]] = set()
        self._runs_now: dict[str, bool] = {}
        self._stops: dict[str, tuple[str, float]] = {}

    def _break(self, rule: str, text: str) -> None:
        self.broken.append(Broken(rule, self.now(), text))

    # --- faults and people that explain verdicts

    def explain(self, slot: str, seconds: float) -> None:
        """A fault of *slot* (of all, when empty) explains verdicts for *seconds*."""
        until = self.now() + seconds + TROUBLE_LASTS
        self.trouble[slot] = max(until, self.trouble.get(slot, 0.0))

    def _explained(self, slot: str) -> bool:
        now = self.now()
        return self.trouble.get(slot, 0.0) >= now or self.trouble.get("", 0.0) >= now

    def wanted_anew(self, slot: str) -> None:
        """A person asks for a new run of *slot*, although the last one may have finished, and be reported again."""
        finished, memory = self._finished.pop(slot, None), self.disk.memories.get(slot)
        over = self._over.pop(slot, None) or (finished[0] if finished is not None else None)
        if over is None and memory is not None and memory.end is End.DONE and memory.run is not None:
            over = memory.run.token
        if over is not None:
            self._outdated[slot] = over

    def confirmed(self, slot: str, nodes: Collection[int]) -> None:
        """A person confirmed that nothing trains on *nodes*; whether that is true, one-run checks."""
        if runs := self._runs.get(slot):
            runs.launched_on.difference_update(nodes)

    def edited(self, slots: Collection[Slot]) -> None:
        """Their places may have changed: turns begin anew."""
        for slot in slots:
            self._turns.pop(slot.name, None)

    def process_began(self) -> None:
        self.restarted = self.now()
        self._finished.clear()
        self.observed.begin()
        self._judged.clear()
        self._manners.process_began()

    # --- runs

    def ran(self, mark: RunMark) -> None:
        runs = self._runs.get(mark.slot)
        if runs is None:
            return
        self._lives.ran(mark)
        place = (mark.node_id, mark.worker)
        if mark.what == "end":
            runs.alive.pop(place, None)
            runs.since = None
            return
        others = sorted({token for token in runs.alive.values() if token != mark.token})
        if others or place in runs.alive:
            self._break("one-run", f"{mark.token} starts on worker {mark.worker} beside {others or [mark.token]}")
        if mark.chips_held:
            self._break("free-chips", f"{mark.token} starts on worker {mark.worker}, whose chips something else holds")
        self._check_elders(mark, runs)
        if self._over.get(mark.slot, mark.token) != mark.token:
            self._break("finished-once", f"{mark.token} starts, and {self._over[mark.slot]} was seen to finish")
        memory = self.disk.memories.get(mark.slot)
        if memory is None or not _knows_launch(memory, mark):
            self._break("intent-first", f"{mark.token} starts, and no launch of it is on the disk")
        runs.alive[place] = self._newest[mark.slot] = mark.token
        self._jobs[mark.slot] = mark.job
        self._turns.pop(mark.slot, None)
        runs.launched_on.add(mark.node_id)
        runs.node = mark.node_id
        runs.since = mark.seconds if len(runs.alive) >= runs.workers else None

    def _check_elders(self, mark: RunMark, runs: _SlotRuns) -> None:
        for node_id in sorted(runs.launched_on - {mark.node_id}):
            life = self.world.state.by_id.get(node_id)
            if life is None or life.killed:
                runs.launched_on.discard(node_id)
            elif not life.deleting:
                name = life.path.node_id
                self._break("dead-elders", f"{mark.token} starts while {name}, launched on before, is not dead")

    def answered(self, report: NodeReport) -> None:
        if not report.all_answer:
            return
        self._answered.setdefault(report.node_id, []).append((self.now(), self.observed.seconds))
        self._last_answer_at(report.node_id)
        first = report.workers[0]
        self._record_progress(report)
        if first.exit_status == 0 and not first.alive:
            self._record_finish(report)

    def _record_progress(self, report: NodeReport) -> None:
        token = report.workers[0].token
        slot = token.rpartition("-a")[0]
        checkpoint = newest_checkpoint(report)
        known, before = self._checkpoints.get(slot, ("", None))
        moved = known == token and None not in (before, checkpoint) and checkpoint != before
        if moved or newest_step(report) is not None:
            self._tells.add((slot, self._jobs.get(slot, "")))
        self._checkpoints[slot] = (token, checkpoint)
        self._runs_now[slot] = all(worker.phase is Phase.RUN for worker in report.workers)

    def stands_unseen(self, slot: str) -> bool:
        """
        True when its run really hangs, and no run of its job ever reported a step or two checkpoints: probes cannot
        tell such a run from one without reports. A setup that does not end is noticed.
        """
        runs = self._runs.get(slot)
        if not self._runs_now.get(slot) or runs is None or runs.since is None or not self._stands(runs):
            return False
        return (slot, self._jobs.get(slot, "")) not in self._tells

    def _record_finish(self, report: NodeReport) -> None:
        """Record a finish that two reports to the same process, some seconds apart, have shown for all workers."""
        token, now = report.workers[0].token, self.now()
        slot = token.rpartition("-a")[0]
        interrupted = any(worker.signalled or worker.preempted for worker in report.workers)
        whole = all((worker.token, worker.exit_status, worker.alive) == (token, 0, False) for worker in report.workers)
        declared = self.slots.get(slot)
        if declared is None or interrupted or not whole or declared.care.on_success is OnSuccess.RESTART:
            return
        if self._outdated.get(slot) == token:
            return
        if self.observed.is_blind:
            # Reports while no listing succeeds count from the next listing, by observed time (rule 11).
            self._finished.pop(slot, None)
            return
        observed = self.observed.seconds
        seen, since, at = self._finished.setdefault(slot, (token, now, observed))
        if seen != token:
            self._finished[slot] = (token, now, observed)
        elif observed - at >= self.sure and not self._was_stopped(slot, token, since + self.sure):
            self._over[slot] = token

    def _was_stopped(self, slot: str, token: str, until: float) -> bool:
        """True when we stopped it ourselves before its finish was certain."""
        stopped, at = self._stops.get(slot, ("", 0.0))
        return stopped == token and at <= until

    def trusted(self, worker: SimulatedWorker) -> None:
        self._break("pinned-key", f"worker {worker.number} of {worker.key.name} shows another key, and is trusted")

    def listing_failed(self, error: Exception) -> None:
        self.observed.failed()
        if wrong := self._manners.listing_failed(error):
            self._break("rate-heeded", wrong)

    def asked(self, method: str, name: str) -> None:
        """Count a call to the cloud, reads too."""
        minute = int(self.now() // 60)
        if minute != self._asked[0]:
            self._asked = (minute, Counter())
        counts = self._asked[1]
        counts[method, name] += 1
        if counts[method, name] == FLOOD and not method.startswith("List"):
            self._break("no-flood", f"{method} of {name} was asked for {FLOOD} times within a minute")

    def _trains(self, slot: str, node_id: int) -> bool:
        """True when every worker of that node really runs the slot's job, and has for a while."""
        runs = self._runs.get(slot)
        if runs is None or runs.since is None or runs.node != node_id:
            return False
        life = self.world.state.by_id.get(node_id)
        return life is not None and not self.hangs(life) and self.now() - runs.since >= STEADY_SECONDS

    def is_training(self, slot: str) -> bool:
        """True when every worker of one node really runs the slot's job now, and its steps advance."""
        runs = self._runs.get(slot)
        return runs is not None and runs.since is not None and not self._stands(runs)

    def _stands(self, runs: _SlotRuns) -> bool:
        life = self.world.state.by_id.get(runs.node)
        return life is None or self.hangs(life)

    def time_lost(self, seconds: float, slot: str = "") -> None:
        """See `Lives.lose_time`."""
        self._lives.lose_time(seconds, slot)

    def is_blameless(self, slot: str, job: str) -> bool:
        """True when its runs of *job* failed because something that every run needs was down."""
        return self._lives.is_blameless(slot, job)

    # --- calls

    def called(self, record: Mapping[str, Any]) -> None:
        method = record["method"]
        self.queues.called(record)
        if method == "CreateNode":
            self._check_create(record)
        elif record["applied"] and record["code"] == 0:
            if method == "DeleteNode" and not record.get("repeated"):
                self._check_delete(record)
            elif method == "UpdateNode" and record["peer"]:
                life = self._life(record["name"])
                self._check_ours("UpdateNode", record["name"], life.record.spec.labels if life is not None else {})

    def _life(self, name: str) -> NodeLife | None:
        return self.world.state.nodes.get(parse_node_path(name))

    def _check_create(self, record: Mapping[str, Any]) -> None:
        now, labels = self.now(), record.get("labels")
        if not record["peer"]:
            # A foreign node, made by a strike: no property concerns it.
            return
        self._check_budget(record, now)
        if labels is None:
            return
        name = record["name"]
        if not all(labels.get(key) for key in (LABEL_OWNER, LABEL_FLEET, LABEL_SLOT, LABEL_NUMBER)):
            self._break("labelled", f"{name} was asked for with the labels {sorted(labels)}")
        if SECRET in f"{labels} {record.get('metadata')}":
            self._break("no-secret", f"in labels or metadata of {name}")
        self._check_intent(name, labels.get(LABEL_SLOT, ""))
        self._check_turns(name.rpartition("/")[2], labels.get(LABEL_SLOT, ""))
        self._check_number(record, name, now)

    def _check_budget(self, record: Mapping[str, Any], now: float) -> None:
        # A call that was given up may arrive much later; the budget counts when it was sent. Calls that arrive in time
        # are counted at their arrival: at the pace of months that is at once.
        asked = now - record["under_way"] if _arrives_late(record) else now
        insort(self._creates, asked)
        del self._creates[: bisect_right(self._creates, now - LATEST_CREATE)]
        first = bisect_left(self._creates, asked)
        for index in range(first, bisect_right(self._creates, asked + 60.0)):
            count = index + 1 - bisect_right(self._creates, self._creates[index] - 60.0)
            if count > self.creates_per_minute:
                self._break("create-budget", f"{count} creates within a minute")
                return

    def _check_intent(self, name: str, slot: str) -> None:
        node, memory = name.rpartition("/")[2], self.disk.memories.get(slot)
        if memory is None or (memory.create(node) is None and memory.node(node) is None):
            # The intent of a late call may be closed by now; its number stays used all the same.
            number = int(node.rpartition("-a")[2])
            if memory is None or memory.next_number <= number:
                self._break("intent-first", f"{node} is asked for, and nothing of it is on the disk")

    def _check_turns(self, node: str, slot: str) -> None:
        memory, declared = self.disk.memories.get(slot), self.slots.get(slot)
        intent = memory.create(node) if memory is not None else None
        if memory is None or declared is None or intent is None or intent.tries > 1:
            # A late call, or a repeated one, is not a turn.
            return
        now = self.wall()
        # In a zone that does not answer no create is expected.
        lit = [place for place in declared.places if place.zone not in self.dark and not place.queued]
        open_places = [place.key for place in lit if _is_open(memory.place(place.key), now)]
        for starved in self._turns.setdefault(slot, Turns(len(declared.places))).asked(intent.place, open_places):
            self._break("no-starved-place", f"{slot} asks at {intent.place} again, and never at {starved}")

    def came_up(self, node: str) -> None:
        """A node is READY: the turns of its slot begin anew."""
        if turns := self._turns.get(node.rpartition("-a")[0]):
            turns.served()

    def _check_number(self, record: Mapping[str, Any], name: str, now: float) -> None:
        before = self._made.get(name)
        if _arrives_late(record):
            # An old call arrives only now; it was not sent again.
            return
        if before is not None and not before[1] and self.restarted < before[0]:
            self._break("fresh-numbers", f"{name} was accepted at {before[0]:.0f} s, and is asked for again")
        if record["applied"] and record["code"] == 0:
            self._made[name] = (now, record["answer"] == "lost" or record["latency"] >= 10.0)

    def _check_ours(self, what: str, name: str, labels: Mapping[str, str]) -> bool:
        owner, fleet = labels.get(LABEL_OWNER), labels.get(LABEL_FLEET)
        if owner != self.disk.owner or fleet not in self.disk.fleets:
            self._break("ours-only", f"{what} of {name}, owner {owner}, fleet {fleet}")
            return False
        return True

    def _check_delete(self, record: Mapping[str, Any]) -> None:
        labels, name = record["labels"], record["name"]
        node = name.rpartition("/")[2]
        # A node stays with the slot that made it, whatever its labels say; only a changed owner label takes it away.
        home = self.disk.memories.get(node.rpartition("-a")[0])
        known = home is not None and any((one.name, one.id) == (node, record["id"]) for one in home.nodes)
        ours = {**labels, LABEL_FLEET: home.fleet} if known and home is not None else labels
        if not self._check_ours("DeleteNode", name, ours):
            return
        slot = node.rpartition("-a")[0] if known else labels.get(LABEL_SLOT, "")
        memory = self.disk.memories.get(slot)
        past = memory.node(node) if memory is not None else None
        if memory is None or past is None or past.delete is None:
            self._break("intent-first", f"{node} is deleted, and nothing of it is on the disk")
            return
        declared = self.slots.get(slot)
        if declared is not None and (wrong := self._manners.deleted(record, self._life(name), past, declared)):
            self._break("guard-outwaited", wrong)
        healthy = record["state"] == NodeState.READY and record["health"] in (Health.UNSPECIFIED, Health.HEALTHY)
        if (
            healthy
            and record["serving"]
            and self._trains(slot, record["id"])
            and not self._may_go(slot, past.delete, memory)
        ):
            self._break("unasked-delete", f"{node} was training and well: {past.delete.why}")

    def _may_lose(self, slot: str, name: str) -> bool:
        """Whether the end of that node together with its queued resource is explained: it does not train, or goes."""
        life, memory = self._life(name), self.disk.memories.get(slot)
        past = memory.node(name.rpartition("/")[2]) if memory is not None else None
        if life is None or not self._trains(slot, life.record.id) or life.record.state != NodeState.READY:
            return True
        return past is not None and past.is_leaving

    def _may_go(self, slot: str, delete: DeleteIntent, memory: Memory) -> bool:
        if delete.reason in (Reason.ASKED, Reason.FINISHED):
            return True
        if delete.reason is Reason.SURPLUS and len(memory.nodes) > 1:
            return True
        return self._explained(slot)

    # --- events

    def told(self, event: Event) -> None:
        if SECRET in event.text or SECRET in f"{event.fields}":
            self._break("no-secret", f"in the event {event.kind} of {event.slot}")
        if event.kind in ("person", "brake"):
            self.said[event.slot] = event.text
        if event.kind in ("restart", "replace"):
            # Until that is done the present run may end in any way: another one is wanted.
            self._outdated[event.slot] = self._newest.get(event.slot, "")
        if event.slot in self.slots:
            self._check_end(event.slot)
        if event.kind == "error":
            self._break("no-surprise", f"{event.slot}: {event.text}")
        elif event.kind == "delete" and event.fields.get("reason") == Reason.JUDGED and "again" not in event.fields:
            self._check_brake(event)
            self._check_observed(event)
        elif event.kind == "stop":
            self._check_observed(event)
            token, before = self._newest.get(event.slot, ""), self._stops.get(event.slot, ("", 0.0))[0]
            if token != before:
                # A stop whose answer was lost is sent again, for its first reason.
                self._stops[event.slot] = (token, self.now())
                self._check_stop(event)

    def _check_end(self, slot: str) -> None:
        memory = self.disk.memories.get(slot)
        if memory is None or memory.end is not End.FAILED:
            self._failed.discard(slot)
        elif slot not in self._failed:
            self._failed.add(slot)
            if wrong := self._lives.wronged(slot, memory, self.slots[slot].care):
                self._break("failed-rightly", f"{slot} failed ({memory.end_why}): {wrong}")

    def _check_brake(self, event: Event) -> None:
        now = self.now()
        if event.slot in self.lifted:
            self.lifted.discard(event.slot)
            return
        self._judged.append((now, event.slot))
        while self._judged[0][0] <= now - BRAKE_WINDOW:
            self._judged.popleft()
        slots = {slot for _, slot in self._judged}
        allowed = max(3, int(0.2 * (len(self.world.state.nodes) + 5)))
        if len(slots) > allowed:
            self._break("brake", f"{len(slots)} slots judged within ten minutes, {allowed} allowed ({event.text})")

    def _check_observed(self, event: Event) -> None:
        claimed, since = self._claim(event)
        lasted = self.observed.seconds - max(since, self.observed.started)
        if lasted < claimed - LATEST_ANSWER:
            self._break("observed-time", f"{event.text}: only {lasted:.0f} s were observed")

    def _claim(self, event: Event) -> tuple[float, float]:
        """The observed time that a verdict claims, and its earliest start in observed time."""
        claimed = event.fields.get("lasted_seconds")
        if not isinstance(claimed, str):
            return 0.0, 0.0
        life = self._life_of(event) if event.fields.get("cause") == Cause.SILENT else None
        return float(claimed), self._last_answer_at(life.record.id) if life is not None else 0.0

    def _last_answer_at(self, node_id: int) -> float:
        """Observed time of a node's last answer; an answer that may still be in flight does not count."""
        answers = self._answered.get(node_id, [])
        while len(answers) > 1 and answers[1][0] <= self.now() - LATEST_ANSWER:
            del answers[0]
        return answers[0][1] if answers else 0.0

    def _life_of(self, event: Event) -> NodeLife | None:
        return next((life for path, life in self.world.state.nodes.items() if path.node_id == event.node), None)

    def _check_stop(self, event: Event) -> None:
        runs = self._runs.get(event.slot)
        if runs is None or runs.since is None or self._explained(event.slot):
            return
        life = self.world.state.by_id.get(runs.node)
        if life is None or life.path.node_id != event.node or life.doomed or not life.is_serving:
            return
        if self._trains(event.slot, runs.node):
            self._break("unasked-stop", f"{event.text}: it was training and well")


def _arrives_late(record: Mapping[str, Any]) -> bool:
    return bool(record["answer"] == "lost" and record["latency"] >= GIVEN_UP_AFTER)


def _knows_launch(memory: Memory, mark: RunMark) -> bool:
    """
    The launch is on the disk. One that was under way when its node got another owner's label is no run of the slot any
    more; the node is remembered as launched on (rule 1).
    """
    if memory.run is not None and memory.run.token == mark.token:
        return True
    taken = [past for past in memory.nodes if past.id == mark.node_id and past.status is NodeStatus.TAKEN]
    return any(past.launched for past in taken)


def _is_open(past: PlaceMemory, now: datetime) -> bool:
    # A place that waits for a dead node of ours may be open too; only the engine's evidence could show it.
    return not past.kind.is_own_quota and (past.retry_at is None or past.retry_at <= now)
