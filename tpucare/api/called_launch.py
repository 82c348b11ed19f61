"""
The calls that one launch of the Python door made, and what a probe tells of them: setup, a failed setup, or a run.

`callbacks` makes the calls and keeps the launches; what lives on the workers after them is told by the probe of fleets.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta

from tpucare.adapters.runner import answers
from tpucare.api.attempt import Attempt
from tpucare.api.threads import Handle, Target
from tpucare.model.runs import Failure, LaunchOrder, Phase, WorkerReport

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
