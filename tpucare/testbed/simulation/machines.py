"""
Simulated worker machines: they boot, die and fall silent as the world says, and train at a steady pace.

What a run does (steps, checkpoints, exit) follows from when it was started; a bucket per slot outlives the nodes. How
they are reached is `workers`'.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from tpucare.model.resources import NodeKey
from tpucare.model.runs import Failure
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
# As the runner has it: so long after a maintenance was over, a run that ends may have ended of it.
MAINTENANCE_COUNTS = 300.0


@dataclass
class Script:
    """
    What training does in this story. Seconds; `exits` maps a slot or a run to (worker, exit status, after seconds).

    `vanishes`: slots whose runs end without a status, as the OOM killer ends them. `on_notice`: slots whose run ends
    with status 0 as soon as a preemption is announced. `saves_alone`: slots whose log tells no step, so that their
    checkpoints are all that is told. `hangs_early`: slots whose next run stands still after so many steps. `outage`:
    what every run that begins now comes to after `outage_seconds`, since something that all of them need is down.
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


@dataclass(eq=False, slots=True)
class SimulatedRun:
    """
    One run on one worker. `ended` in seconds; `status` None where it ended without one.

    `hung_at`: the step at which it stands still. `fails_after`: seconds after which it exits with 1. `blameless`: for
    want of what every run needs. `foreign`: what a user's function started; `boots` tells that there was a reboot.
    `orphaned`: the process of that function died before its setup was over. `maintenance`: the one that was announced
    and is not over, `maintained_at`: when the last one was.
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


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """
    One host VM. `refuses`: it takes no key of ours, `for_good` whatever is written into the metadata;
    `refuses_until`: not yet, in seconds. `dirty`: the chips are lost
    to whatever ran before us, so that a run exits at once. `foreign_chips`: somebody else's process holds them, until
    it is stopped; `holds_chips`: a service of the image does, for ever.
    `guard`: it blocks us, and is silent then, after too many refused logins.
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
    """How a run ended on a worker, in truth. `DIED`: with its machine; `LOST`: by itself, and nobody can tell how."""

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
    A run of *job* began or ended on a worker, at that second and step. `blameless`: what it needed was down.
    `chips_held`: something else holds them. `signalled`: it was told of its end.
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
    `history`: (seconds, "start" or "end", token, worker), what a checker needs to find two live runs of a slot; nothing
    is kept there when `keep_history` is false. `on_run` is told of the same. `hangs_up`: a worker that dies is missed
    at once. `eager`: what a run does by itself (phases, first steps, its end) is hinted at when it happens.
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

    # --- what the world does to machines

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
        """What is wrong with a machine from its first boot: see `boots`, the orders for the next ones."""
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
        """The others of a gang wait in a collective for the one that died, for ever."""
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
        """The runner of a run that lives keeps what was announced apart from what asks the run for something."""
        worker.maintenance, run = event, worker.run
        if run is not None and self.lives(worker):
            if run.maintenance and not event:
                run.maintained_at = self.clock.seconds
            run.maintenance = event

    def was_signalled(self, worker: SimulatedWorker, run: SimulatedRun) -> bool:
        """As the runner writes it; a maintenance is a part of how a run ended, and no signal while it lives."""
        if run.signalled or self.lives(worker):
            return run.signalled
        ended = run.ended if run.ended is not None else self.clock.seconds
        over = run.maintained_at
        return bool(run.maintenance) or (over is not None and ended - over < MAINTENANCE_COUNTS)

    def forget_dead(self, key: NodeKey) -> None:
        """Let go of machines that are no more."""
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

    # --- what happens by itself

    def next_alarm(self) -> float | None:
        return self._alarms[0][0] if self._alarms else None

    def ring(self) -> None:
        """Hint at what happened by itself until now."""
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
        """*slot* runs *job* from now on: another one than before finds nothing of its own in the bucket."""
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
        """The run on *worker* ends by itself, now; without a *status* nobody can tell how."""
        run = worker.run
        if run is None or not self.lives(worker):
            return
        self.save(run)
        run.failed, run.status, run.failure, run.ended = True, status, failure, self.clock.seconds
        self._mark("end", worker, run)
        self._alarm(self.clock.seconds, worker.key)

    def hang(self, worker: SimulatedWorker) -> None:
        """The run lives on and makes no step any more."""
        if worker.run is not None:
            worker.run.hung_at = self.step(worker.run)

    def process_ended(self) -> None:
        """What a user's function was setting up from there is never begun."""
        for worker in self.running():
            run = worker.run
            if run is not None and run.foreign and self.elapsed(run) < self.script.setup_seconds:
                run.orphaned, run.hung_at = True, run.first_step

    def hangs_on(self, key: NodeKey) -> bool:
        """Whether any run on that node stands still."""
        runs = [worker.run for worker in self._nodes.get(key, {}).values() if worker.run is not None]
        return any(self.stands_still(run) for run in runs if run.ended is None)

    def guards(self, key: NodeKey) -> bool:
        """Whether a guard of that node keeps us out now, where nothing else is wrong with any of its machines."""
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
            # Its folder outlives a reboot, and tells how far it came; nobody can tell how it ended.
            worker.run.failed = True

    def note_end(self, worker: SimulatedWorker, run: SimulatedRun) -> None:
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
            # Of what a user's function started nobody knows that it succeeded.
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
        """Seconds that the run has lived; they end with it."""
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
        """Status with which the run ended by itself; None while it lives, or where nobody can tell."""
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
