"""
Simulated worker machines: they boot, die and fall silent by the effects of the world, and train at a steady pace.

Steps, checkpoints and exit of a run follow from its start time; a bucket per slot outlives the nodes. `workers` reaches
the machines.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from tpucare.model.resources import NodeKey
from tpucare.model.runs import Archive, Failure
from tpucare.testbed.emulator.machines.guard import Guard
from tpucare.testbed.emulator.world.config import SshGuard
from tpucare.testbed.emulator.world.machine_effects import (
    AuthorizeKeys,
    Boot,
    Kill,
    MachineEffect,
    Resume,
    SetAttribute,
    Silence,
)
from tpucare.testbed.emulator.world.records import MAINTENANCE_ATTRIBUTE, NO_MAINTENANCE, PREEMPTED_ATTRIBUTE
from tpucare.testbed.simulation.time import VirtualClock

KEYS_LATE = 150.0
# As in the runner: for so long after a maintenance, the end of a run may be due to it.
MAINTENANCE_COUNTS = 300.0


@dataclass
class Script:
    """
    The behaviour of trainings. Seconds; `exits` maps a slot or a run to (worker, exit status, after seconds).

    `vanishes`: slots whose runs end without a status, as by the OOM killer. `on_notice`: slots whose run ends with
    status 0 as soon as a preemption is announced. `saves_alone`: slots whose logs have no steps, so that only their
    checkpoints show progress. `hangs_early`: slots whose next run hangs after so many steps. `outage`: the end, after
    `outage_seconds`, of every run that begins while something that all runs need is down. `save_seconds`: the cost of
    a save, measured by runs that read how often to save; None: runs that do not. A job with a cache stores its
    environment, and restores one that it is told of.
    """

    setup_seconds: float = 20.0
    step_seconds: float = 1.0
    save_every: int = 60
    steps: int = 10**9
    stands_still: set[str] = field(default_factory=set)
    exits: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    ignores_stop: set[str] = field(default_factory=set)
    vanishes: set[str] = field(default_factory=set)
    on_notice: set[str] = field(default_factory=set)
    saves_alone: set[str] = field(default_factory=set)
    hangs_early: dict[str, int] = field(default_factory=dict)
    outage: Failure | None = None
    outage_seconds: float = 30.0
    tells_progress: bool = True
    save_seconds: float | None = None


@dataclass(eq=False, slots=True)
class SimulatedRun:
    """
    One run on one worker. `ended` in seconds; `status` None where it ended without one.

    `hung_at`: the step at which it hangs. `fails_after`: seconds after which it exits with 1. `blameless`: because
    something that every run needs is down. `foreign`: started by a user's function; `boots` shows whether there was a
    reboot. `orphaned`: the process of that function died before its setup was over. `maintenance`: the announced one
    that is not over, `maintained_at`: the time of the last one. `cadence`: how often it was told to save.
    `cache_scope`, `archive`: of its launch.
    """

    token: str
    slot: str
    since: float
    first_step: int
    stopped: bool = False
    signalled: bool = False
    maintenance: str = ""
    maintained_at: float | None = None
    ended: float | None = None
    failed: bool = False
    status: int | None = None
    failure: Failure = Failure.CRASH
    hung_at: int | None = None
    fails_after: float | None = None
    blameless: bool = False
    foreign: bool = False
    orphaned: bool = False
    boots: int = 1
    cadence: float | None = None
    cache_scope: str = ""
    archive: Archive | None = None


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """
    One host VM. `refuses`: it refuses our key, `for_good` whatever the metadata says; `refuses_until`: until then, in
    seconds. `dirty`: an earlier process left the chips unusable, so that a run exits at once. `foreign_chips`: another
    user's process holds the chips until it is stopped; `holds_chips`: a service of the image holds them for ever.
    `guard`: sshguard, which blocks us after too many refused logins; the machine is silent then.
    """

    node_id: int
    number: int
    key: NodeKey
    address: str
    up: bool = True
    silent: bool = False
    preempted: bool = False
    maintenance: str = ""
    refuses: bool = False
    for_good: bool = False
    refuses_until: float = 0.0
    foreign_chips: bool = False
    holds_chips: bool = False
    guard: Guard | None = None
    dirty: bool = False
    run: SimulatedRun | None = None
    last_number: int = 0
    boots: int = 1
    host_key: str = ""


class RunEnd(StrEnum):
    """How a run really ended on a worker. `DIED`: with its machine; `LOST`: by itself, in an unknown way."""

    NONE = ""
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"
    INTERRUPTED = "finished because it was told of its end"
    STOOD_STILL = "stopped while it stood still"
    DIED = "died"


@dataclass(frozen=True, slots=True)
class RunMark:
    """
    A run of *job* began or ended on a worker, at that second and step. `blameless`: something that it needed was down.
    `chips_held`: another process holds the chips. `signalled`: it was notified of its end.
    """

    seconds: float
    what: str
    token: str
    key: NodeKey
    node_id: int
    worker: int
    slot: str
    step: int = 0
    how: RunEnd = RunEnd.NONE
    blameless: bool = False
    job: str = ""
    chips_held: bool = False
    signalled: bool = False


class SimulatedMachines:
    """
    Every machine of a history.

    `history`: (seconds, "start" or "end", token, worker), from which two live runs of a slot can be found; empty when
    `keep_history` is false. `on_run` is called with the same. `hangs_up`: the death of a worker gives a hint at once.
    `eager`: changes of a run by itself (phases, first steps, its end) give a hint when they happen.
    """

    def __init__(self, clock: VirtualClock, script: Script) -> None:
        self.clock = clock
        self.script = script
        self.workers: dict[tuple[NodeKey, int], SimulatedWorker] = {}
        self.bucket: dict[str, int] = {}
        self.jobs: dict[str, str] = {}
        self.history: list[tuple[float, str, str, int]] = []
        self.keep_history = True
        self.on_run: Callable[[RunMark], None] | None = None
        self.on_boot: Callable[[SimulatedWorker], None] | None = None
        self.nudge: Callable[[], None] = lambda: None
        self.boots: deque[str] = deque()
        self.deaf = False
        self.hangs_up = True
        self.eager = False
        self.key = ""
        self.sshguard: SshGuard | None = None
        self._nodes: dict[NodeKey, dict[int, SimulatedWorker]] = {}
        self._at: dict[str, SimulatedWorker] = {}
        self._hints: set[NodeKey] = set()
        self._alarms: list[tuple[float, int, NodeKey]] = []
        self._count = 0

    # --- effects of the world

    def apply(self, effect: MachineEffect) -> None:
        key = NodeKey(*effect.path)
        if isinstance(effect, Boot):
            self._boot(key, effect)
            return
        number = getattr(effect, "worker", None)
        for worker in self._of(key, effect.node_id):
            if number in (None, worker.number):
                self._apply_to(worker, effect)

    def of_node(self, project: str, zone: str, name: str) -> list[SimulatedWorker]:
        """Machines of every node of that name, by number; dead ones too."""
        workers = self._nodes.get(NodeKey(project, zone, name), {})
        return [workers[number] for number in sorted(workers)]

    def _of(self, key: NodeKey, node_id: int) -> list[SimulatedWorker]:
        return [worker for worker in self._nodes.get(key, {}).values() if worker.node_id == node_id]

    def _boot(self, key: NodeKey, effect: Boot) -> None:
        old = self.workers.get((key, effect.worker))
        again = old is not None and old.node_id == effect.node_id
        self._end_run(old)
        worker = SimulatedWorker(effect.node_id, effect.worker, key, effect.address)
        worker.host_key = f"AAAA{effect.node_id:x}-{effect.worker}"
        worker.refuses, worker.holds_chips = not effect.takes_keys, effect.holds_chips
        worker.guard = Guard(self.sshguard) if self.sshguard is not None else None
        if again and old is not None:
            worker.boots, worker.last_number = old.boots + 1, old.last_number
            worker.host_key, worker.refuses, worker.for_good = old.host_key, old.refuses, old.for_good
            worker.run, worker.maintenance = old.run, old.maintenance
        elif self.boots:
            self._spoil(worker, self.boots.popleft())
        self.workers[key, effect.worker] = worker
        self._nodes.setdefault(key, {})[effect.worker] = worker
        self._at[effect.address] = worker
        if self.on_boot is not None:
            self.on_boot(worker)
        self.hint(key)

    def _spoil(self, worker: SimulatedWorker, how: str) -> None:
        """Give a new machine the fault *how*, from `boots`, the orders for the next ones."""
        if how == "refuses":
            # The guest agent writes the keys of the metadata some time after sshd listens.
            worker.refuses_until = self.clock.seconds + KEYS_LATE
        worker.refuses = worker.refuses or how == "refuses for good"
        worker.for_good = how == "refuses for good"
        worker.holds_chips = worker.holds_chips or how == "held"
        if how == "guarded":
            worker.refuses_until = self.clock.seconds + KEYS_LATE
            worker.guard = Guard(SshGuard(block=630))
        worker.foreign_chips = how == "foreign"
        worker.dirty = how == "dirty"

    def _apply_to(self, worker: SimulatedWorker, effect: MachineEffect) -> None:
        if isinstance(effect, Kill):
            self._end_run(worker)
            worker.up = False
            if effect.worker is not None:
                self._bereave(worker)
            if self.hangs_up:
                self.hint(worker.key)
        elif isinstance(effect, Silence):
            worker.silent = True
        elif isinstance(effect, Resume):
            worker.silent = False
        elif isinstance(effect, AuthorizeKeys):
            if self.key in effect.ssh_keys and not worker.for_good:
                worker.refuses = False
        elif isinstance(effect, SetAttribute) and effect.name == PREEMPTED_ATTRIBUTE:
            self._announce(worker, preempted=effect.value == "TRUE")
        elif isinstance(effect, SetAttribute) and effect.name == MAINTENANCE_ATTRIBUTE:
            self._maintain(worker, "" if effect.value == NO_MAINTENANCE else effect.value)

    def _bereave(self, lost: SimulatedWorker) -> None:
        """Let the other workers of a gang hang: they wait in a collective for the dead one for ever."""
        for worker in self._of(lost.key, lost.node_id):
            if worker is not lost and worker.run is not None:
                self.hang(worker)

    def _announce(self, worker: SimulatedWorker, *, preempted: bool) -> None:
        worker.preempted = preempted
        run = worker.run
        if run is None or not preempted or not self.lives(worker):
            return
        run.signalled = True
        if run.slot in self.script.on_notice:
            self.end(worker, status=0)

    def _maintain(self, worker: SimulatedWorker, event: str) -> None:
        """Record an announced maintenance in a live run; its runner does not treat it as a signal."""
        worker.maintenance, run = event, worker.run
        if run is not None and self.lives(worker):
            if run.maintenance and not event:
                run.maintained_at = self.clock.seconds
            run.maintenance = event

    def was_signalled(self, worker: SimulatedWorker, run: SimulatedRun) -> bool:
        """True if the runner writes so: a maintenance explains the end of a run, and is no signal while it lives."""
        if run.signalled or self.lives(worker):
            return run.signalled
        ended = run.ended if run.ended is not None else self.clock.seconds
        over = run.maintained_at
        return bool(run.maintenance) or (over is not None and ended - over < MAINTENANCE_COUNTS)

    def remove_dead(self, key: NodeKey) -> None:
        """Drop machines that are dead."""
        workers = self._nodes.get(key, {})
        if workers and not any(worker.up for worker in workers.values()):
            del self._nodes[key]
            for number, worker in workers.items():
                del self.workers[key, number]
                if self._at.get(worker.address) is worker:
                    del self._at[worker.address]

    def hint(self, key: NodeKey) -> None:
        self._hints.add(key)
        self.nudge()

    # --- hints

    def next_alarm(self) -> float | None:
        return self._alarms[0][0] if self._alarms else None

    def ring(self) -> None:
        """Give hints for the changes of runs until now."""
        now = self.clock.seconds
        while self._alarms and self._alarms[0][0] <= now:
            self.hint(heapq.heappop(self._alarms)[2])

    def _alarm(self, at: float, key: NodeKey) -> None:
        if self.eager:
            self._count += 1
            heapq.heappush(self._alarms, (at, self._count, key))

    # --- runs

    def running(self) -> Iterator[SimulatedWorker]:
        """Machines on which a run lives, in the order of their nodes."""
        for key in sorted(self._nodes):
            for number in sorted(self._nodes[key]):
                worker = self._nodes[key][number]
                if self.lives(worker):
                    yield worker

    def begins(self, slot: str, job: str) -> None:
        """*slot* runs *job* from now on; a changed job has no checkpoints of its own in the bucket."""
        if self.jobs.setdefault(slot, job) != job:
            self.jobs[slot] = job
            self.bucket.pop(slot, None)

    def start(self, worker: SimulatedWorker, token: str, slot: str) -> SimulatedRun:
        now, script = self.clock.seconds, self.script
        run = worker.run = SimulatedRun(token, slot, now, self.bucket.get(slot, 0))
        if slot in script.hangs_early:
            run.hung_at = run.first_step + script.hangs_early[slot]
        if script.outage is not None:
            run.failure, run.fails_after, run.blameless = script.outage, script.outage_seconds, True
        worker.last_number, run.boots = int(token.rpartition(".")[2]), worker.boots
        run.maintenance = worker.maintenance
        self._mark("start", worker, run)
        if worker.dirty:
            self.end(worker, status=1, failure=Failure.DIRTY_HOST)
        elif worker.number == 0:
            trains = now + script.setup_seconds
            for steps in (0, 1, 2):
                self._alarm(trains + steps * script.step_seconds + 0.001, worker.key)
            if script.steps < 10**9:
                self._alarm(trains + (script.steps - run.first_step) * script.step_seconds + 0.001, worker.key)
        planned = self._planned(run)
        if planned is not None and planned[0] in (-1, worker.number):
            self._alarm(now + planned[2] + 0.001, worker.key)
        return run

    def end(self, worker: SimulatedWorker, status: int | None, failure: Failure = Failure.CRASH) -> None:
        """End the run on *worker* by itself, now; without a *status* its end is unknown."""
        run = worker.run
        if run is None or not self.lives(worker):
            return
        self.save(run)
        run.failed, run.status, run.failure, run.ended = True, status, failure, self.clock.seconds
        self._mark("end", worker, run)
        self._alarm(self.clock.seconds, worker.key)

    def hang(self, worker: SimulatedWorker) -> None:
        """Let the run live on without further steps."""
        if worker.run is not None:
            worker.run.hung_at = self.step(worker.run)

    def process_ended(self) -> None:
        """Orphan the runs that a user's function was setting up: they never begin."""
        for worker in self.running():
            run = worker.run
            if run is not None and run.foreign and self.elapsed(run) < self.script.setup_seconds:
                run.orphaned, run.hung_at = True, run.first_step

    def hangs_on(self, key: NodeKey) -> bool:
        """True when a run on that node hangs."""
        runs = [worker.run for worker in self._nodes.get(key, {}).values() if worker.run is not None]
        return any(self.stands_still(run) for run in runs if run.ended is None)

    def guards(self, key: NodeKey) -> bool:
        """True when a guard of that node blocks us now, and its machines have no other fault."""
        workers = self._nodes.get(key, {}).values()
        if self.deaf or not all(worker.up and not worker.silent and not worker.refuses for worker in workers):
            return False
        return any(worker.guard is not None and worker.guard.is_blocked(self.clock.seconds) for worker in workers)

    def stands_still(self, run: SimulatedRun) -> bool:
        if run.slot in self.script.stands_still:
            return True
        return run.hung_at is not None and self.step(run) >= run.hung_at

    def _end_run(self, worker: SimulatedWorker | None) -> None:
        if worker is None:
            return
        if worker.run is not None and worker.run.ended is None:
            self.save(worker.run)
            worker.run.ended = self.clock.seconds
            self._mark("end", worker, worker.run)
        if worker.run is not None:
            # Its folder outlives a reboot and shows its progress, but not how it ended.
            worker.run.failed = True

    def record_end(self, worker: SimulatedWorker, run: SimulatedRun) -> None:
        if run.ended is None:
            run.ended = self.clock.seconds
            self._mark("end", worker, run)

    def _mark(self, what: str, worker: SimulatedWorker, run: SimulatedRun) -> None:
        if self.keep_history:
            self.history.append((self.clock.seconds, what, run.token, worker.number))
        if self.on_run is None:
            return
        seconds, key, how = self.clock.seconds, worker.key, RunEnd.NONE
        if what == "end":
            how = self._how(worker, run)
        place = (key, worker.node_id, worker.number, run.slot)
        job = self.jobs.get(run.slot, "")
        held = worker.holds_chips or worker.foreign_chips
        self.on_run(
            RunMark(seconds, what, run.token, *place, self.step(run), how, run.blameless, job, held, run.signalled)
        )

    def _how(self, worker: SimulatedWorker, run: SimulatedRun) -> RunEnd:
        if run.stopped:
            return RunEnd.STOOD_STILL if self.stands_still(run) else RunEnd.STOPPED
        status = self.exit_of(worker)
        if run.foreign and run.failed:
            # A run that a user's function started never reports success.
            return RunEnd.FAILED
        if status == 0:
            return RunEnd.INTERRUPTED if self.was_signalled(worker, run) else RunEnd.FINISHED
        if status is not None:
            return RunEnd.FAILED
        return RunEnd.LOST if run.failed else RunEnd.DIED

    def _planned(self, run: SimulatedRun) -> tuple[int, int, float] | None:
        if run.fails_after is not None:
            return (0, 1, run.fails_after)
        exits = self.script.exits
        return exits.get(run.token) or exits.get(run.slot) if exits else None

    def elapsed(self, run: SimulatedRun) -> float:
        """Seconds from the start of the run to now or to its end."""
        planned = self._planned(run)
        end = run.ended if run.ended is not None else self.clock.seconds
        lived = end - run.since
        return min(lived, planned[2]) if planned is not None and planned[0] == -1 else lived

    def step(self, run: SimulatedRun) -> int:
        if run.slot in self.script.stands_still:
            return run.first_step + 3
        trained = max(0.0, self.elapsed(run) - self.script.setup_seconds)
        step = min(self.script.steps, run.first_step + int(trained / self.script.step_seconds))
        return step if run.hung_at is None else min(step, run.hung_at)

    def save(self, run: SimulatedRun) -> None:
        saved = self.step(run) // self.script.save_every * self.script.save_every
        if saved > self.bucket.get(run.slot, 0):
            self.bucket[run.slot] = saved

    def exit_of(self, worker: SimulatedWorker) -> int | None:
        """Status with which the run ended by itself; None while it lives, or when it is unknown."""
        run = worker.run
        assert run is not None
        if run.failed:
            return run.status
        planned = self._planned(run)
        if planned is not None and planned[0] in (-1, worker.number) and self.elapsed(run) >= planned[2]:
            return planned[1]
        return 0 if self.step(run) >= self.script.steps else None

    def lives(self, worker: SimulatedWorker) -> bool:
        run = worker.run
        return run is not None and not run.stopped and not run.failed and self.exit_of(worker) is None
