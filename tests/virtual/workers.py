"""
Simulated workers behind the Launcher port: they boot, die, fall silent as the world says, and train at a steady pace.

What a run does (steps, checkpoints, exit) follows from when it was started; a bucket per slot outlives the nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.virtual.time import VirtualClock
from tpucare.emulator.records import PREEMPTED_ATTRIBUTE, Boot, Kill, MachineEffect, Resume, SetAttribute, Silence
from tpucare.errors import WorkerSilent
from tpucare.model import (
    Contact,
    Failure,
    LaunchOrder,
    LaunchResult,
    NodeKey,
    NodeReport,
    NoticeOrder,
    Phase,
    ProbeOrder,
    StopOrder,
    StopResult,
    Worker,
    WorkerReport,
)


@dataclass
class Script:
    """
    What training does in this story. Seconds; `exits` maps a slot or a run to (worker, exit status, after seconds).

    `vanishes`: slots whose runs end without a status, as the OOM killer ends them.
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
    tells_progress: bool = True


@dataclass
class SimulatedRun:
    token: str
    slot: str
    since: float
    first_step: int
    stopped: bool = False
    signalled: bool = False
    ended: float | None = None


@dataclass
class SimulatedWorker:
    node_id: int
    number: int
    up: bool = True
    silent: bool = False
    preempted: bool = False
    refuses: bool = False
    foreign_chips: bool = False
    run: SimulatedRun | None = None
    last_number: int = 0
    boots: int = 1


class VirtualLauncher:
    """
    The Launcher port over simulated workers.

    `history`: (seconds, "start" or "end", token, worker), what a checker needs to find two live runs of a slot.
    `probes`: when nodes were last asked how they are, in seconds. `hangs_up`: a worker that dies is missed at once.
    """

    def __init__(self, clock: VirtualClock, script: Script) -> None:
        self.clock = clock
        self.script = script
        self.workers: dict[tuple[NodeKey, int], SimulatedWorker] = {}
        self.bucket: dict[str, int] = {}
        self.history: list[tuple[float, str, str, int]] = []
        self.probes: deque[float] = deque(maxlen=1000)
        self.launches: list[str] = []
        self.stops: list[str] = []
        self.notices: list[str] = []
        self.waiting: Callable[[float], None] = lambda _: None
        self.nudge: Callable[[], None] = lambda: None
        self._hints: set[NodeKey] = set()
        self.deaf = False
        self.hangs_up = True

    # --- what the world does to machines

    def apply(self, effect: MachineEffect) -> None:
        key = NodeKey(*effect.path)
        if isinstance(effect, Boot):
            old = self.workers.get((key, effect.worker))
            boots = old.boots + 1 if old is not None and old.node_id == effect.node_id else 1
            number = old.last_number if old is not None and boots > 1 else 0
            self._end_run(old)
            self.workers[key, effect.worker] = SimulatedWorker(
                effect.node_id, effect.worker, boots=boots, last_number=number
            )
            self._hints.add(key)
            self.nudge()
            return
        for (node, number), worker in list(self.workers.items()):
            addressed = node == key and worker.node_id == effect.node_id
            if not addressed or getattr(effect, "worker", None) not in (None, number):
                continue
            self._apply_to(node, number, worker, effect)

    def _apply_to(self, node: NodeKey, number: int, worker: SimulatedWorker, effect: MachineEffect) -> None:
        if isinstance(effect, Kill):
            self._end_run(worker)
            worker.up = False
            if self.hangs_up:
                self._hints.add(node)
                self.nudge()
        elif isinstance(effect, Silence):
            worker.silent = True
        elif isinstance(effect, Resume):
            worker.silent = False
        elif isinstance(effect, SetAttribute) and effect.name == PREEMPTED_ATTRIBUTE:
            worker.preempted = effect.value == "TRUE"
            if worker.run is not None:
                worker.run.signalled = True

    def _end_run(self, worker: SimulatedWorker | None) -> None:
        if worker is not None and worker.run is not None and worker.run.ended is None:
            self._save(worker.run)
            self.history.append((self.clock.seconds, "end", worker.run.token, worker.number))
        if worker is not None:
            worker.run = None

    # --- what a run does by itself

    def _elapsed(self, run: SimulatedRun) -> float:
        """Seconds that the run has lived; they end with it."""
        planned = self.script.exits.get(run.token) or self.script.exits.get(run.slot)
        end = run.ended if run.ended is not None else self.clock.seconds
        lived = end - run.since
        return min(lived, planned[2]) if planned is not None and planned[0] == -1 else lived

    def _step(self, run: SimulatedRun) -> int:
        if run.slot in self.script.stands_still:
            return run.first_step + 3
        trained = max(0.0, self._elapsed(run) - self.script.setup_seconds)
        return min(self.script.steps, run.first_step + int(trained / self.script.step_seconds))

    def _save(self, run: SimulatedRun) -> None:
        saved = self._step(run) // self.script.save_every * self.script.save_every
        self.bucket[run.slot] = max(self.bucket.get(run.slot, 0), saved)

    def _exit(self, worker: SimulatedWorker) -> int | None:
        run = worker.run
        assert run is not None
        planned = self.script.exits.get(run.token) or self.script.exits.get(run.slot)
        if planned is not None and planned[0] in (-1, worker.number) and self._elapsed(run) >= planned[2]:
            return planned[1]
        return 0 if self._step(run) >= self.script.steps else None

    def _lives(self, worker: SimulatedWorker) -> bool:
        return worker.run is not None and not worker.run.stopped and self._exit(worker) is None

    # --- the Launcher port

    def _find(self, worker: Worker) -> SimulatedWorker | None:
        found = self.workers.get((worker.key, worker.number))
        if found is None or found.node_id != worker.node_id or not found.up or self.deaf:
            return None
        return found

    def probe(self, order: ProbeOrder) -> NodeReport:
        self.probes.append(self.clock.seconds)
        reports = tuple(self._report(worker) for worker in order.workers)
        silent = any(report.contact is Contact.SILENT for report in reports)
        self.waiting(10.0 if silent else 0.05)
        first = order.workers[0]
        return NodeReport(first.key, first.node_id, reports)

    def _report(self, address: Worker) -> WorkerReport:
        worker = self._find(address)
        if worker is None or worker.silent:
            return WorkerReport(Contact.SILENT)
        if worker.refuses:
            return WorkerReport(Contact.AUTH_REFUSED)
        run = worker.run
        if run is None:
            return WorkerReport(
                Contact.ANSWERED,
                alive=worker.foreign_chips,
                chips_free=not worker.foreign_chips,
                preempted=worker.preempted,
                last_number=worker.last_number,
            )
        lives = self._lives(worker)
        if not lives and run.ended is None:
            run.ended = self.clock.seconds
            self.history.append((self.clock.seconds, "end", run.token, worker.number))
        status = None if lives else (143 if run.stopped else self._exit(worker))
        if run.slot in self.script.vanishes:
            status = None
        in_setup = self._elapsed(run) < self.script.setup_seconds
        phase = Phase.EXITED if not lives else Phase.SETUP if in_setup else Phase.RUN
        if lives:
            self._save(run)
        tells = self.script.tells_progress and worker.number == 0 and not in_setup
        failed = status not in (None, 0)
        return WorkerReport(
            Contact.ANSWERED,
            token=run.token,
            alive=lives,
            chips_free=not lives and not worker.foreign_chips,
            phase=phase,
            exit_status=status,
            failure=self.script.failures.get(run.slot, Failure.CRASH) if failed else Failure.NONE,
            signalled=run.signalled,
            preempted=worker.preempted,
            last_number=worker.last_number,
            boot_id=str(worker.boots),
            step=self._step(run) if tells else None,
            checkpoint=self.bucket.get(run.slot) if tells else None,
            log_bytes=int(self._elapsed(run)),
        )

    def launch(self, order: LaunchOrder) -> LaunchResult:
        self.launches.append(order.token)
        self.waiting(1.0)
        return LaunchResult(tuple(self._launch(worker, order) for worker in order.workers))

    def _launch(self, address: Worker, order: LaunchOrder) -> Exception | None:
        worker = self._find(address)
        if worker is None or worker.silent:
            return WorkerSilent(f"worker {address.number} does not answer")
        if worker.run is not None and worker.run.token == order.token:
            return None
        if worker.run is not None and self._lives(worker):
            return WorkerSilent("another run lives here")
        first = self.bucket.get(order.slot, 0)
        worker.run = SimulatedRun(order.token, order.slot, self.clock.seconds, first)
        worker.last_number = int(order.token.rpartition(".")[2])
        self.history.append((self.clock.seconds, "start", order.token, worker.number))
        return None

    def stop(self, order: StopOrder) -> StopResult:
        self.stops.append(order.workers[0].key.name)
        self.waiting(2.0)
        return StopResult(tuple(self._stop(worker) for worker in order.workers))

    def _stop(self, address: Worker) -> bool | Exception:
        worker = self._find(address)
        if worker is None or worker.silent:
            return WorkerSilent(f"worker {address.number} does not answer")
        if worker.run is not None and worker.run.slot in self.script.ignores_stop:
            return False
        if worker.run is not None and self._lives(worker):
            self._save(worker.run)
            self.history.append((self.clock.seconds, "end", worker.run.token, worker.number))
            worker.run.stopped = worker.run.signalled = True
            worker.run.ended = self.clock.seconds
        worker.foreign_chips = False
        return True

    def notice(self, order: NoticeOrder) -> None:
        self.notices.append(order.token)

    def vouch(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> None: ...

    def expect(self, workers: Sequence[Worker]) -> None: ...

    def forget(self, key: NodeKey) -> None: ...

    def hints(self) -> frozenset[NodeKey]:
        hints, self._hints = frozenset(self._hints), set()
        return hints
