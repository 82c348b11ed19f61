"""
The Launcher of the Python API: a launch calls the user's functions, and the run is every process that they start.

On each new node every worker is claimed (`templates/worker/foreign.py`), `creation_callback` is called once, then
`start_fn` for each worker, each with its own copy of the context. A launch returns at once; probes report its phase:
setup while a call runs, a failed setup when one raised, a run after all have returned. From then on the probe of the
inner launcher finds the live processes. A launch that an earlier process left in its setup is reported as lost, since
no process can end it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Protocol

from tpucare.adapters.runner import answers, scripts
from tpucare.adapters.runner.launcher import LAUNCH_DEADLINE, ScriptLauncher
from tpucare.api.attempt import Attempt, Host
from tpucare.api.threads import CreationCallback, Handle, Starter, Target, ThreadHandle, ThreadStarter, check_call
from tpucare.model.errors import CommandFailed, NodeGone
from tpucare.model.ports import Remote
from tpucare.model.resources import Event, NodeKey, Worker
from tpucare.model.runs import (
    Contact,
    Failure,
    LaunchOrder,
    LaunchResult,
    NodeReport,
    NoticeOrder,
    Phase,
    ProbeOrder,
    StopOrder,
    StopResult,
    WorkerReport,
)

__all__ = ["CallbackLauncher", "Contexts", "Handle", "Starter", "ThreadStarter"]

LATE_AFTER = timedelta(seconds=60)
CREATED = ".tpucare/created"


class Contexts(Protocol):
    """The contexts of callbacks by slot, handed on from node to node."""

    def get(self, slot: str) -> object | None: ...

    def put(self, slot: str, ctx: object) -> None:
        """Raises: ConfigError: it cannot be stored."""
        ...

    def copy(self, ctx: object) -> object: ...


class CallbackLauncher:
    """
    ports.Launcher whose runs are started by `start_fn`. Thread-safe.

    inner:       probes, stops and keeps logs, of the same workers over the same remote
    created:     the user's `creation_callback(host, ctx_or_None) -> ctx`
    all_workers: one call of `start_fn` with worker "all", instead of one per worker
    nudge:       called when a call ended, which the next probe reports
    report:      called on any thread, with an event for people
    """

    def __init__(
        self,
        remote: Remote,
        starter: Starter,
        contexts: Contexts,
        *,
        inner: ScriptLauncher,
        created: CreationCallback,
        all_workers: bool = False,
        nudge: Callable[[], None] = lambda: None,
        report: Callable[[Event], None] = lambda _: None,
        now: Callable[[], datetime],
        late_after: timedelta = LATE_AFTER,
    ) -> None:
        self._remote, self._starter, self._contexts, self._inner = remote, starter, contexts, inner
        self._created, self._all_workers = created, all_workers
        self._nudge, self._report, self._now, self._late_after = nudge, report, now, late_after
        self._lock = threading.Lock()
        self._launches: dict[NodeKey, CallbackRun] = {}
        self._hints: set[NodeKey] = set()
        self._settled: dict[NodeKey, str] = {}

    # --- launch ---

    def launch(self, order: LaunchOrder) -> LaunchResult:
        """
        Claim every worker, then start the callbacks; none is started when a worker could not be claimed.

        Nothing is started for a token whose calls are known, nor for a run that an earlier process started.
        """
        if self._launch_with(order.token) is not None:
            return LaunchResult((None,) * len(order.workers))
        claimed = self._remote.each(order.workers, lambda worker: self._claim(worker, order.token))
        errors = tuple(_problem_of(answer) for answer in claimed)
        claims = [answer for answer in claimed if isinstance(answer, _Claim)]
        if any(errors) or all(claim.is_run for claim in claims):
            return LaunchResult(errors)
        self._begin(order, is_created=claims[0].is_created)
        return LaunchResult(errors)

    def _claim(self, worker: Worker, token: str) -> _Claim:
        command = scripts.tool_command("foreign", {"worker": worker.number, "token": token})
        name = f"{worker.key.name} worker {worker.number}"
        try:
            return _Claim(*answers.read_claim(self._remote.run(worker, command, deadline=LAUNCH_DEADLINE), name))
        except answers.ToolsMissing:
            self._inner.install(worker)
            return _Claim(*answers.read_claim(self._remote.run(worker, command, deadline=LAUNCH_DEADLINE), name))

    def _begin(self, order: LaunchOrder, *, is_created: bool) -> None:
        key = order.workers[0].key
        attempt = Attempt(self._remote, slot=order.slot, token=order.token, number=order.attempt, workers=order.workers)
        launch = CallbackRun(attempt, order)
        self._end(key, "another launch took its place")
        with self._lock:
            self._launches[key] = launch
        prepare = ThreadHandle(
            attempt, f"tpucare-create-{order.token}", lambda: self._prepare(launch, is_created=is_created)
        )
        launch.created = prepare
        prepare.add_done_callback(lambda _: self._hint(key))

    def _prepare(self, launch: CallbackRun, *, is_created: bool) -> None:
        """Make the context, then start every call of `start_fn`; on its own thread, since users' functions block."""
        attempt = launch.attempt
        ctx = self._context(attempt, is_created=is_created)
        targets: Sequence[Target] = ["all"] if self._all_workers else range(len(attempt.workers))
        copies = {target: self._contexts.copy(ctx) for target in targets}
        for target, own in copies.items():
            if attempt.over:
                return
            handle = self._starter.start(attempt, Host(attempt), own, target)
            with self._lock:
                launch.handles[target] = handle
            handle.add_done_callback(lambda _: self._hint(launch.order.workers[0].key))
        launch.all_made = True

    def _context(self, attempt: Attempt, *, is_created: bool) -> object:
        kept = self._contexts.get(attempt.slot)
        if is_created:
            return kept
        before = None if kept is None else self._contexts.copy(kept)
        check_call(self._created, "creation_callback", "(host, ctx)", attempt.slot, before)
        ctx = self._created(Host(attempt), before)
        if attempt.over:
            # The next node starts from the context that was stored before this one.
            raise NodeGone(f"{attempt.node}: {attempt.why}")
        self._contexts.put(attempt.slot, ctx)
        attempt.put(0, CREATED, b"", 0o600)
        return ctx

    # --- probe ---

    def probe(self, order: ProbeOrder) -> NodeReport:
        key = order.workers[0].key
        launch = self._launch_on(key)
        if launch is not None and launch.has_returned:
            self._settled[key] = launch.attempt.token
        report = self._inner.probe(replace(order, settled=self._settled.get(key, "")))
        if launch is None:
            self._find_settled(report)
        if launch is not None:
            self._log_tracebacks(launch, order)
        return replace(
            report, workers=tuple(self._with_calls(launch, number, w) for number, w in enumerate(report.workers))
        )

    def _find_settled(self, report: NodeReport) -> None:
        """Note runs whose setup is over: an earlier process may have ended before it told every worker so."""
        for worker in report.workers:
            if worker.foreign is not None and worker.phase is Phase.RUN:
                self._settled[report.key] = worker.token

    def _with_calls(self, launch: CallbackRun | None, number: int, report: WorkerReport) -> WorkerReport:
        """The worker's report, with what is known here of the calls."""
        if report.contact is not Contact.ANSWERED or report.foreign is None:
            return report
        if launch is None or launch.attempt.token != report.token:
            lost = report.phase is Phase.SETUP and report.token not in self._settled.values()
            return replace(report, foreign=replace(report.foreign, lost=lost))
        return launch.report_of(number, report)

    def _log_tracebacks(self, launch: CallbackRun, order: ProbeOrder) -> None:
        """Write the exception of a callback into the log of the slot, once."""
        for worker, error in launch.failures().items():
            with self._lock:
                if launch.attempt.over or worker in launch.logged:
                    continue
                launch.logged.add(worker)
            text = "".join(traceback.format_exception(error))
            place = self._inner.logs.position(order.slot, order.attempt, worker)
            start = place.offset if place.token == launch.attempt.token else 0
            self._inner.logs.append(
                order.slot, order.attempt, launch.attempt.token, worker, text.encode(errors="replace"), start=start
            )

    # --- the end ---

    def stop(self, order: StopOrder) -> StopResult:
        self._end(order.workers[0].key, "its run was stopped")
        return self._inner.stop(order)

    def disconnect(self, key: NodeKey) -> None:
        self._end(key, "the node is given up")
        self._inner.disconnect(key)

    def forget_node(self, key: NodeKey) -> None:
        self._end(key, "the node is gone")
        self._settled.pop(key, None)
        self._inner.forget_node(key)

    def close(self) -> None:
        """End every attempt, since this process ends; processes on the workers go on."""
        with self._lock:
            keys = list(self._launches)
        for key in keys:
            self._end(key, "the process that cares for it ended")

    def _end(self, key: NodeKey, why: str) -> None:
        with self._lock:
            launch = self._launches.pop(key, None)
        if launch is None:
            return
        launch.attempt.end(why)
        for handle in launch.running_calls():
            handle.cancel()
        late = threading.Timer(self._late_after.total_seconds(), self._report_late, (launch,))
        late.daemon = True
        late.start()

    def _report_late(self, launch: CallbackRun) -> None:
        attempt = launch.attempt
        for handle in launch.running_calls():
            where = handle.where()
            text = (
                f"a callback of attempt {attempt.number} outlives its node ({attempt.why}) by "
                f"{self._late_after.total_seconds():.0f} s: it hangs {f'at {where}' if where else 'somewhere'}; "
                "it can reach no node any more"
            )
            self._report(Event(self._now(), "late", text, attempt.slot, attempt.node, "error"))

    # --- passed on to the inner launcher ---

    def notice(self, order: NoticeOrder) -> None:
        self._inner.notice(order)

    def pin_host_keys(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        return self._inner.pin_host_keys(workers, keys)

    def watch_workers(self, workers: Sequence[Worker]) -> None:
        self._inner.watch_workers(workers)

    def hints(self) -> frozenset[NodeKey]:
        with self._lock:
            hints, self._hints = frozenset(self._hints), set()
        return hints | self._inner.hints()

    # --- inside ---

    def _hint(self, key: NodeKey) -> None:
        with self._lock:
            self._hints.add(key)
        self._nudge()

    def _launch_on(self, key: NodeKey) -> CallbackRun | None:
        with self._lock:
            return self._launches.get(key)

    def _launch_with(self, token: str) -> CallbackRun | None:
        with self._lock:
            return next((known for known in self._launches.values() if known.attempt.token == token), None)


@dataclass(frozen=True, slots=True)
class _Claim:
    """The answer of a worker to its claim. `is_run`: this very run is past its setup there."""

    problem: CommandFailed | None
    is_run: bool
    is_created: bool


def _problem_of(answer: _Claim | Exception) -> Exception | None:
    return answer if isinstance(answer, Exception) else answer.problem


# --- the calls of one launch, and the phase that a probe reports of them: setup, a failed setup, or a run ------------


# A call that blocks for longer is the run itself, and no step of a setup.
LONG_CALL = timedelta(minutes=10)


@dataclass(slots=True)
class CallbackRun:
    """One attempt and its calls. `all_made`: no call will be added; `logged`: calls whose exception is in the log."""

    attempt: Attempt
    order: LaunchOrder
    created: Handle | None = None
    handles: dict[Target, Handle] = field(default_factory=dict)
    all_made: bool = False
    logged: set[Target] = field(default_factory=set)

    def running_calls(self) -> list[Handle]:
        known = [self.created, *self.handles.values()]
        return [handle for handle in known if handle is not None and not handle.done()]

    def failures(self) -> dict[int, BaseException]:
        """Exceptions by worker; one that concerns all workers counts for worker 0."""
        first: dict[Target, Handle] = {0: self.created} if self.created is not None else {}
        found: dict[int, BaseException] = {}
        for target, handle in (*first.items(), *self.handles.items()):
            error = handle.exception() if handle.done() else None
            if error is not None and not (isinstance(error, SystemExit) and not error.code):
                found.setdefault(0 if target == "all" else target, error)
        return found

    @property
    def has_returned(self) -> bool:
        return self.all_made and not self.running_calls() and not self.failures()

    def report_of(self, worker: int, report: WorkerReport) -> WorkerReport:
        """The worker's report of this very attempt, with what is known here of the calls."""
        failures = self.failures()
        if error := failures.get(worker):
            return replace(
                report,
                phase=Phase.EXITED,
                exit_status=_status_of(error),
                failure=Failure.SETUP,
                detail=answers.one_line(self._line_of(worker, error)),
            )
        calls = self.attempt.calls_in_flight(worker) > 0
        if failures or self.has_returned:
            return replace(report, alive=report.alive or calls)
        blocks = self.attempt.longest_call() >= LONG_CALL
        return replace(report, phase=Phase.RUN if blocks else Phase.SETUP, alive=True)

    def _line_of(self, worker: int, error: BaseException) -> str:
        said = " ".join("".join(traceback.format_exception_only(error)).split())
        if not self.handles:
            return f"creation_callback: {said}"
        return f"start_fn of {'all workers' if 'all' in self.handles else f'worker {worker}'}: {said}"


def _status_of(error: BaseException) -> int:
    """The exit status of its command or of `sys.exit`, or that of Python for any other exception."""
    status = error.code if isinstance(error, SystemExit) else getattr(error, "exit_status", 1)
    return status if isinstance(status, int) and 0 < status < 256 else 1
