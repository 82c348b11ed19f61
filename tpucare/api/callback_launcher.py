"""
The Launcher of the Python API: a launch is a call of the user's own functions, the run whatever they start.

Each new node: every worker is claimed (`templates/worker/foreign.py`), `creation_callback` is called once, then
`start_fn` for each worker, each with its own copy of the context. A launch returns at once; how far it is, probes tell:
setup while a call goes on, a failed setup when one raised, a run after all have returned. What lives on the workers
then is told by the probe of fleets, which this launcher stands on. A launch that an earlier process left in its setup
is told as lost, for nobody is there any more to end it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Protocol

from tpucare.adapters.runner import answers
from tpucare.adapters.runner import scripts as script
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
    """What callbacks hand on from node to node, by slot."""

    def get(self, slot: str) -> object | None: ...

    def put(self, slot: str, ctx: object) -> None:
        """Raises: ConfigError: it cannot be stored."""
        ...

    def copy(self, ctx: object) -> object: ...


class CallbackLauncher:
    """
    ports.Launcher whose runs are started by `start_fn`. Thread-safe.

    inner:       probes, stops and keeps logs; the same workers over the same remote
    created:     the user's `creation_callback(host, ctx_or_None) -> ctx`
    all_workers: one call of `start_fn` with worker "all", instead of one per worker
    nudge:       called when something happened that a probe would tell
    report:      called on any thread, with what a person should know
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
        self._launches: dict[NodeKey, CalledLaunch] = {}
        self._hints: set[NodeKey] = set()
        self._settled: dict[NodeKey, str] = {}

    # --- launch ---

    def launch(self, order: LaunchOrder) -> LaunchResult:
        """
        Claim every worker, then let the callbacks begin; none begins when a worker could not be claimed.

        The same token again, with its calls still known, is left alone; so is a run that lives from an earlier process.
        """
        if self._known(order.token) is not None:
            return LaunchResult((None,) * len(order.workers))
        heard = self._remote.each(order.workers, lambda worker: self._claim(worker, order.token))
        errors = tuple(_problem_of(answer) for answer in heard)
        claims = [answer for answer in heard if isinstance(answer, _Claim)]
        if any(errors) or all(claim.is_run for claim in claims):
            return LaunchResult(errors)
        self._begin(order, is_created=claims[0].is_created)
        return LaunchResult(errors)

    def _claim(self, worker: Worker, token: str) -> _Claim:
        command = script.tool_command("foreign", {"worker": worker.number, "token": token})
        name = f"{worker.key.name} worker {worker.number}"
        try:
            return _Claim(*answers.read_claim(self._remote.run(worker, command, deadline=LAUNCH_DEADLINE), name))
        except answers.ToolsMissing:
            self._inner.install(worker)
            return _Claim(*answers.read_claim(self._remote.run(worker, command, deadline=LAUNCH_DEADLINE), name))

    def _begin(self, order: LaunchOrder, *, is_created: bool) -> None:
        key = order.workers[0].key
        attempt = Attempt(self._remote, slot=order.slot, token=order.token, number=order.attempt, workers=order.workers)
        launch = CalledLaunch(attempt, order)
        self._end(key, "another launch took its place")
        with self._lock:
            self._launches[key] = launch
        prepare = ThreadHandle(
            attempt, f"tpucare-create-{order.token}", lambda: self._prepare(launch, is_created=is_created)
        )
        launch.created = prepare
        prepare.add_done_callback(lambda _: self._happened(key))

    def _prepare(self, launch: CalledLaunch, *, is_created: bool) -> None:
        """On a thread of its own, for users' functions may block: the context, then every call of `start_fn`."""
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
            handle.add_done_callback(lambda _: self._happened(launch.order.workers[0].key))
        launch.all_made = True

    def _context(self, attempt: Attempt, *, is_created: bool) -> object:
        kept = self._contexts.get(attempt.slot)
        if is_created:
            return kept
        before = None if kept is None else self._contexts.copy(kept)
        check_call(self._created, "creation_callback", "(host, ctx)", attempt.slot, before)
        ctx = self._created(Host(attempt), before)
        if attempt.over:
            # The next node has been prepared, or will be, from what was kept before this one.
            raise NodeGone(f"{attempt.node}: {attempt.why}")
        self._contexts.put(attempt.slot, ctx)
        attempt.put(0, CREATED, b"", 0o600)
        return ctx

    # --- probe ---

    def probe(self, order: ProbeOrder) -> NodeReport:
        key = order.workers[0].key
        launch = self._of(key)
        if launch is not None and launch.has_returned:
            self._settled[key] = launch.attempt.token
        report = self._inner.probe(replace(order, settled=self._settled.get(key, "")))
        if launch is None:
            self._find_settled(report)
        if launch is not None:
            self._keep_tracebacks(launch, order)
        return replace(report, workers=tuple(self._told(launch, number, w) for number, w in enumerate(report.workers)))

    def _find_settled(self, report: NodeReport) -> None:
        """An earlier process told some workers that setup is over everywhere, and ended before it told the others."""
        for worker in report.workers:
            if worker.foreign is not None and worker.phase is Phase.RUN:
                self._settled[report.key] = worker.token

    def _told(self, launch: CalledLaunch | None, number: int, report: WorkerReport) -> WorkerReport:
        """What the worker said, with what is known here of the calls."""
        if report.contact is not Contact.ANSWERED or report.foreign is None:
            return report
        if launch is None or launch.attempt.token != report.token:
            lost = report.phase is Phase.SETUP and report.token not in self._settled.values()
            return replace(report, foreign=replace(report.foreign, lost=lost))
        return launch.told(number, report)

    def _keep_tracebacks(self, launch: CalledLaunch, order: ProbeOrder) -> None:
        """What a callback raised goes into the slot's log, once."""
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

    def forget(self, key: NodeKey) -> None:
        self._end(key, "the node is gone")
        self._settled.pop(key, None)
        self._inner.forget(key)

    def close(self) -> None:
        """End every attempt, since this process ends; what runs on the workers goes on."""
        with self._lock:
            keys = list(self._launches)
        for key in keys:
            self._end(key, "the caretaker ended")

    def _end(self, key: NodeKey, why: str) -> None:
        with self._lock:
            launch = self._launches.pop(key, None)
        if launch is None:
            return
        launch.attempt.end(why)
        for handle in launch.going_on():
            handle.cancel()
        late = threading.Timer(self._late_after.total_seconds(), self._tell_late, (launch,))
        late.daemon = True
        late.start()

    def _tell_late(self, launch: CalledLaunch) -> None:
        attempt = launch.attempt
        for handle in launch.going_on():
            where = handle.where()
            text = (
                f"a callback of attempt {attempt.number} outlives its node ({attempt.why}) by "
                f"{self._late_after.total_seconds():.0f} s: it hangs {f'at {where}' if where else 'somewhere'}; "
                "it can reach no node any more"
            )
            self._report(Event(self._now(), "late", text, attempt.slot, attempt.node, "error"))

    # --- what the inner launcher does by itself ---

    def notice(self, order: NoticeOrder) -> None:
        self._inner.notice(order)

    def vouch(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        return self._inner.vouch(workers, keys)

    def expect(self, workers: Sequence[Worker]) -> None:
        self._inner.expect(workers)

    def hints(self) -> frozenset[NodeKey]:
        with self._lock:
            hints, self._hints = frozenset(self._hints), set()
        return hints | self._inner.hints()

    # --- inside ---

    def _happened(self, key: NodeKey) -> None:
        with self._lock:
            self._hints.add(key)
        self._nudge()

    def _of(self, key: NodeKey) -> CalledLaunch | None:
        with self._lock:
            return self._launches.get(key)

    def _known(self, token: str) -> CalledLaunch | None:
        with self._lock:
            return next((known for known in self._launches.values() if known.attempt.token == token), None)


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a worker said to its claim. `is_run`: this very run is past its setup there."""

    problem: CommandFailed | None
    is_run: bool
    is_created: bool


def _problem_of(answer: _Claim | Exception) -> Exception | None:
    return answer if isinstance(answer, Exception) else answer.problem


# --- the calls of one launch, and what a probe tells of them: setup, a failed setup, or a run -------------------------


# A call that blocks for longer is no step of a setup any more: it is the run itself.
LONG_CALL = timedelta(minutes=10)


@dataclass(slots=True)
class CalledLaunch:
    """One attempt and the calls made for it. `all_made`: no more of them will be made; `logged`: whose error is."""

    attempt: Attempt
    order: LaunchOrder
    created: Handle | None = None
    handles: dict[Target, Handle] = field(default_factory=dict)
    all_made: bool = False
    logged: set[Target] = field(default_factory=set)

    def going_on(self) -> list[Handle]:
        known = [self.created, *self.handles.values()]
        return [handle for handle in known if handle is not None and not handle.done()]

    def failures(self) -> dict[int, BaseException]:
        """What was raised, by worker; what concerns all workers is told of worker 0."""
        first: dict[Target, Handle] = {0: self.created} if self.created is not None else {}
        found: dict[int, BaseException] = {}
        for target, handle in (*first.items(), *self.handles.items()):
            error = handle.exception() if handle.done() else None
            if error is not None and not (isinstance(error, SystemExit) and not error.code):
                found.setdefault(0 if target == "all" else target, error)
        return found

    @property
    def has_returned(self) -> bool:
        return self.all_made and not self.going_on() and not self.failures()

    def told(self, worker: int, report: WorkerReport) -> WorkerReport:
        """What that worker said of this very attempt, with what is known here of the calls."""
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
    """What the call itself would have exited with: of its command, of `sys.exit`, or Python's own for an exception."""
    status = error.code if isinstance(error, SystemExit) else getattr(error, "exit_status", 1)
    return status if isinstance(status, int) and 0 < status < 256 else 1
