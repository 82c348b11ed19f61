"""
The Launcher port over simulated workers: the results of launches, stops and probes.

A worker is found by its address, as over the network: an address may lead to another machine by now, which shows
another host key than the one pinned for the node.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tpucare.model.errors import WorkerSilent
from tpucare.model.resources import NodeKey, Worker
from tpucare.model.runs import (
    UNPREPARED,
    Archive,
    Contact,
    Failure,
    ForeignRun,
    LaunchOrder,
    LaunchResult,
    NodeReport,
    NoticeOrder,
    Phase,
    Preparation,
    ProbeOrder,
    StopOrder,
    StopResult,
    WorkerReport,
)
from tpucare.testbed.simulation.machines import Script, SimulatedMachines, SimulatedRun, SimulatedWorker
from tpucare.testbed.simulation.time import VirtualClock

__all__ = ["Script", "SimulatedRun", "SimulatedWorker", "VirtualLauncher"]

_SILENT = WorkerReport(Contact.SILENT)
_REFUSED = WorkerReport(Contact.AUTH_REFUSED)
_CHANGED = WorkerReport(Contact.HOST_KEY_CHANGED)


class VirtualLauncher(SimulatedMachines):
    """
    `probes`: time of each node's last probe, in seconds. `lost`: how many of the next launches and stops lose one
    worker's answer, by "launch-before", "launch-after" (it took effect) and "stop". `slow`: additional seconds of every
    answer. `met_strangers`: how often an address led to another node's machine.
    """

    def __init__(self, clock: VirtualClock, script: Script) -> None:
        super().__init__(clock, script)
        self.probes: deque[float] = deque(maxlen=1000)
        self.launches: list[str] = []
        self.stops: list[str] = []
        self.notices: list[str] = []
        self.waiting: Callable[[float], None] = lambda _: None
        self.on_report: Callable[[NodeReport], None] | None = None
        self.lost: Counter[str] = Counter()
        self.slow = 0.0
        self.met_strangers = 0
        self.on_trust: Callable[[SimulatedWorker], None] | None = None
        self._trusted: dict[tuple[int, int], str] = {}
        self._pins: dict[NodeKey, dict[tuple[int, int], str]] = {}

    def _connect(self, address: Worker) -> SimulatedWorker | WorkerReport:
        """The machine at that address, or the report of a failed login."""
        found = self._at.get(address.host)
        if self.deaf or found is None or not found.up or found.silent:
            return _SILENT
        if found.guard is not None and found.guard.is_blocked(self.clock.seconds):
            return _SILENT
        if found.node_id != address.node_id:
            self.met_strangers += 1
        pins, machine = self._pins.setdefault(address.key, {}), (address.node_id, address.number)
        if machine not in pins:
            self._trust(machine, found)
        pin = pins.setdefault(machine, found.host_key)
        if pin != found.host_key:
            return _CHANGED
        if not found.refuses and found.refuses_until <= self.clock.seconds:
            return found
        if found.guard is not None:
            found.guard.count_attack(self.clock.seconds)
        return _REFUSED

    def _trust(self, machine: tuple[int, int], found: SimulatedWorker) -> None:
        """Pin the first key of a machine; a later login to another key is reported as trust in that key."""
        if self._trusted.setdefault(machine, found.host_key) != found.host_key and self.on_trust is not None:
            self.on_trust(found)

    def probe(self, order: ProbeOrder) -> NodeReport:
        self.probes.append(self.clock.seconds)
        if order.cadence and self.script.save_seconds is not None:
            self._write_cadence(order)
        reports = tuple(self._report(worker) for worker in order.workers)
        silent = any(report.contact is Contact.SILENT for report in reports)
        self.waiting((10.0 if silent else 0.05) + self.slow)
        first = order.workers[0]
        report = NodeReport(first.key, first.node_id, reports)
        if self.on_report is not None:
            self.on_report(report)
        return report

    def _write_cadence(self, order: ProbeOrder) -> None:
        for address in order.workers:
            worker = self._connect(address)
            if isinstance(worker, SimulatedWorker) and worker.run is not None and worker.run.token == order.run:
                worker.run.cadence = json.loads(order.cadence)["interval_seconds"]

    def _report(self, address: Worker) -> WorkerReport:
        worker = self._connect(address)
        if isinstance(worker, WorkerReport):
            return worker
        if worker.run is None:
            return WorkerReport(
                Contact.ANSWERED,
                alive=worker.foreign_chips,
                chips_free=not (worker.foreign_chips or worker.holds_chips),
                preempted=worker.preempted,
                last_number=worker.last_number,
            )
        return self._report_run(worker, worker.run)

    def _report_run(self, worker: SimulatedWorker, run: SimulatedRun) -> WorkerReport:
        lives = self.lives(worker)
        if not lives:
            self.record_end(worker, run)
        status = None if lives else (143 if run.stopped else self.exit_of(worker))
        if run.slot in self.script.vanishes:
            status = None
        elapsed = self.elapsed(run)
        in_setup = elapsed < self.script.setup_seconds or run.orphaned
        if lives:
            self.save(run)
        tells = self.script.tells_progress and worker.number == 0 and not in_setup
        tells_steps = tells and run.slot not in self.script.saves_alone
        report = WorkerReport(
            Contact.ANSWERED,
            token=run.token,
            alive=lives,
            chips_free=not lives and not worker.foreign_chips and not worker.holds_chips,
            phase=Phase.EXITED if not lives else Phase.SETUP if in_setup else Phase.RUN,
            exit_status=status,
            failure=self._failure(run, status),
            signalled=self.was_signalled(worker, run),
            preempted=worker.preempted,
            maintenance=run.maintenance,
            last_number=worker.last_number,
            boot_id=str(worker.boots),
            step=self.step(run) if tells_steps else None,
            checkpoint=self.bucket.get(run.slot) if tells else None,
            log_bytes=int(elapsed),
            cadence_seconds=run.cadence,
            save_seconds=self.script.save_seconds if tells else None,
            preparation=_preparation_of(run) if run.cache_scope and not in_setup else UNPREPARED,
        )
        return _as_foreign(report, run, worker, was_set_up=not in_setup) if run.foreign else report

    def _failure(self, run: SimulatedRun, status: int | None) -> Failure:
        if status in (None, 0):
            return Failure.NONE
        own = run.failed or run.fails_after is not None
        return run.failure if own else self.script.failures.get(run.slot, Failure.CRASH)

    def launch(self, order: LaunchOrder) -> LaunchResult:
        self.launches.append(order.token)
        self.waiting(1.0 + self.slow)
        return LaunchResult(tuple(self._launch(worker, order) for worker in order.workers))

    def _launch(self, address: Worker, order: LaunchOrder) -> Exception | None:
        worker = self._connect(address)
        if isinstance(worker, WorkerReport) or self._loses("launch-before"):
            return WorkerSilent(f"worker {address.number} does not answer")
        if worker.run is not None and worker.run.token == order.token:
            return None
        if worker.run is not None and self.lives(worker):
            return WorkerSilent("another run lives here")
        self.begins(order.slot, order.job.run)
        run = self.start(worker, order.token, order.slot)
        run.foreign, run.cache_scope, run.archive = order.job.foreign, order.cache_scope, order.archive
        return WorkerSilent("the connection dropped") if self._loses("launch-after") else None

    def _loses(self, what: str) -> bool:
        if not self.lost[what]:
            return False
        self.lost[what] -= 1
        return True

    def stop(self, order: StopOrder) -> StopResult:
        self.stops.append(order.workers[0].key.name)
        self.waiting(2.0 + self.slow)
        return StopResult(tuple(self._stop(worker) for worker in order.workers))

    def _stop(self, address: Worker) -> bool | Exception:
        worker = self._connect(address)
        if isinstance(worker, WorkerReport) or self._loses("stop"):
            return WorkerSilent(f"worker {address.number} does not answer")
        run = worker.run
        if run is not None and run.slot in self.script.ignores_stop:
            return False
        if run is not None and self.lives(worker):
            self.save(run)
            run.stopped = run.signalled = True
            self.record_end(worker, run)
        worker.foreign_chips = False
        return not worker.holds_chips

    def notice(self, order: NoticeOrder) -> None:
        self.notices.append(order.token)
        for address in order.workers:
            worker = self._connect(address)
            if isinstance(worker, SimulatedWorker) and worker.run is not None and worker.run.token == order.token:
                # A later end of the run may be due to the notice.
                worker.run.signalled = worker.run.signalled or self.lives(worker)

    def pin_host_keys(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        vouched = set()
        for worker in workers:
            told = [line.partition(" ")[2] for line in keys.get(worker.number, ())]
            if told:
                machine = (worker.node_id, worker.number)
                self._pins.setdefault(worker.key, {})[machine] = self._trusted[machine] = told[0]
                vouched.add(worker.number)
        return frozenset(vouched)

    def watch_workers(self, workers: Sequence[Worker]) -> None: ...

    def disconnect(self, key: NodeKey) -> None:
        self.remove_dead(key)

    def forget_node(self, key: NodeKey) -> None:
        for machine in self._pins.pop(key, {}):
            worker = self.workers.get((key, machine[1]))
            if worker is None or worker.node_id != machine[0] or not worker.up:
                self._trusted.pop(machine, None)
        self.remove_dead(key)

    def hints(self) -> frozenset[NodeKey]:
        if not self._hints:
            return frozenset()
        hints, self._hints = frozenset(self._hints), set()
        return hints


def _preparation_of(run: SimulatedRun) -> Preparation:
    if run.archive is not None:
        return Preparation("restored")
    content = hashlib.sha256(run.token.encode()).hexdigest()
    return Preparation("made", archive=Archive(run.cache_scope, run.cache_scope, content, 412_000_000))


def _as_foreign(report: WorkerReport, run: SimulatedRun, worker: SimulatedWorker, *, was_set_up: bool) -> WorkerReport:
    """The report of a run that a user's function started: no progress, and no end except a failed setup."""
    foreign = ForeignRun(seen=was_set_up, rebooted=worker.boots != run.boots, lost=run.orphaned)
    report = replace(report, foreign=foreign, step=None, checkpoint=None, log_bytes=0)
    if report.alive or (not was_set_up and report.exit_status is not None and not run.stopped):
        return report
    return replace(report, phase=Phase.RUN, exit_status=None, failure=Failure.NONE, signalled=False, maintenance="")
