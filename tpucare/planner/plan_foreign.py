"""
What to do about a run that tpucare did not start: it lives or it does not, and nobody knows whether it succeeded.

Pure. Where a script of `exec_command` left its exit status it is told; nothing turns on it, for what else `start_fn`
started has none. What is common to all runs is `plan_run`'s (stops, launches that are not complete) and `plan_living`'s
(standstill, health, the end of a day). The run is over when nothing of it lives on any worker: a worker on which
nothing was ever started is no sign of an end, and of one that was started anew what it had may come back by itself.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tpucare.model.actions import Action, Fact, Settle, Wait
from tpucare.model.causes import Cause
from tpucare.model.evidence import Evidence, NodeEvidence, Timers
from tpucare.model.memory import BookName, End, Memory, NodeMemory, RunMemory
from tpucare.model.resources import OnExit, Slot
from tpucare.model.runs import NodeReport, WorkerReport
from tpucare.planner.plan_ended import CRASH_IS_OURS_AFTER, GONE_IS_SURE_AFTER, booked, infrastructure
from tpucare.planner.plan_living import decide_living, past_setup
from tpucare.planner.plan_run import decide_unsettled
from tpucare.planner.predicates import ending, standing

# A session that begins at boot is up about when sshd is.
MAY_COME_BACK = timedelta(minutes=1)
ENDED = "its run ended; not known to have succeeded"


def is_foreign(report: NodeReport | None, run: RunMemory) -> bool:
    """Whether *run* is one that tpucare's runner did not start, as the workers tell it."""
    workers = report.workers if report is not None else ()
    return any(worker.foreign is not None and worker.token == run.token for worker in workers)


def decide_foreign(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, memory: Memory, timers: Timers
) -> Action:
    """The next step for a foreign run that is not known to be stopped; all workers answer."""
    run, report = memory.run, seen.report
    assert run is not None
    assert report is not None
    if action := decide_unsettled(slot, seen, evidence, memory, timers):
        return action
    workers = report.workers
    if any(worker.foreign is not None and worker.foreign.lost for worker in workers):
        return ending(seen, memory, Cause.SETUP_INTERRUPTED, "its setup was interrupted: whoever did it is gone")
    failed = [worker for worker in workers if worker.exit_status not in (None, 0)]
    if failed:
        return _decide_failed(slot, seen, memory, timers, failed[0])
    if memory.book(BookName.SETUP).failures and past_setup(workers):
        return Settle(Fact.SETUP_DONE, "setup served on every worker: its failures begin anew", seen.node.name)
    if not run.over and (action := _decide_rebooted(seen, memory, timers)):
        return action
    if not any(worker.alive for worker in workers):
        return _decide_ended(slot, seen, memory, timers)
    if run.over:
        return Settle(Fact.RUN_BACK, "something of its run lives again", seen.node.name)
    action = decide_living(slot, seen, past, memory, timers)
    return replace(action, why=_living(workers)) if isinstance(action, Wait) and past_setup(workers) else action


def _living(workers: tuple[WorkerReport, ...]) -> str:
    ended = [n for n, w in enumerate(workers) if w.foreign is not None and w.foreign.seen and not w.alive]
    if ended:
        return f"running; what ran on worker {', '.join(map(str, ended))} has ended"
    return "running (processes that start_fn started are alive)"


def _decide_failed(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers, worst: WorkerReport) -> Action:
    """A node that is preempted fails the functions that use it: the cloud is given time to say so."""
    if not timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER):
        why = f"setup failed; checking for a preemption before it counts ({worst.detail})"
        return Wait(Cause.SETUP_FAILED, why)
    text = worst.detail or f"setup exited with {worst.exit_status}"
    return booked(seen, memory, Cause.SETUP_FAILED, text, BookName.SETUP, slot.care.setup_budget)


def _decide_rebooted(seen: NodeEvidence, memory: Memory, timers: Timers) -> Action | None:
    """A worker was started anew and has nothing of what it had: that was no end of the run's own."""
    assert seen.report is not None
    if not any(worker.is_torn for worker in seen.report.workers):
        return None
    if timers.lasted(seen.ended_since, MAY_COME_BACK):
        why = "a worker was started anew, and its run did not come back"
        return infrastructure(seen, memory, Cause.REBOOTED, why)
    return Wait(Cause.REBOOTED, "a worker was started anew; waiting whether its run comes back by itself")


def _decide_ended(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action:
    run, on_exit = memory.run, slot.care.on_exit
    assert run is not None
    assert seen.report is not None
    why = ended_why(seen.report.workers)
    if run.over and on_exit is OnExit.LEAVE:
        return Wait(Cause.FOREIGN_RUN_ENDED, f"{why} (care.on_exit is leave)")
    if not timers.lasted(seen.ended_since, GONE_IS_SURE_AFTER, observations=1):
        return Wait(Cause.FOREIGN_RUN_ENDED, "nothing of its run lives; looking once more")
    if on_exit is OnExit.RESTART:
        return booked(seen, memory, Cause.FOREIGN_RUN_ENDED, why, BookName.CRASH, slot.care.crash_budget)
    far, name = standing(seen, memory), seen.node.name
    if on_exit is OnExit.DELETE:
        return Settle(
            Fact.ENDED,
            why,
            name,
            end=End.DONE,
            step=far.step,
            checkpoint=far.checkpoint,
            cause=Cause.FOREIGN_RUN_ENDED,
        )
    return Settle(Fact.RUN_OVER, why, name, step=far.step, checkpoint=far.checkpoint)


def ended_why(workers: tuple[WorkerReport, ...]) -> str:
    """How its run ended: by the exit statuses that are known, those of failures first."""
    left: dict[int, list[int]] = {}
    for number, worker in enumerate(workers):
        if worker.foreign is not None and worker.foreign.status is not None:
            left.setdefault(worker.foreign.status, []).append(number)
    if not left:
        return ENDED
    if len(workers) == 1:
        return f"its run ended with exit status {min(left)}"
    parts = [f"{status} on {_named(left[status])}" for status in sorted(left, key=lambda status: (not status, status))]
    silent = len(workers) - sum(map(len, left.values()))
    rest = f"; of {silent} other{'s' * (silent > 1)} it is unknown" if silent else ""
    return f"its run ended with exit status {', '.join(parts)}{rest}"


def _named(numbers: list[int]) -> str:
    return f"worker {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} workers"
