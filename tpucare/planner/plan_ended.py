"""
What to do about a run that ended, on one worker or all: success, a crash, a preemption not yet told, a lost worker.

Pure. Each end is entered in the book that pays for it; a run that lives is in `plan_living`.
"""

from __future__ import annotations

from datetime import timedelta

from tpucare.model.actions import Action, Fact, Reason, Settle, Wait
from tpucare.model.causes import Cause
from tpucare.model.evidence import NodeEvidence, Timers, latest
from tpucare.model.memory import BookName, End, Memory
from tpucare.model.resources import OnSuccess, Slot
from tpucare.model.runs import Failure, Phase, WorkerReport
from tpucare.model.text import length
from tpucare.planner.predicates import (
    INFRASTRUCTURE_BUDGET,
    Standing,
    ending,
    has_advanced,
    keeps_node,
    nothing_moves,
    standing,
    usual_pause,
)

CLOUD_MAY_BE_LATE = timedelta(minutes=5)
CRASH_IS_OURS_AFTER = timedelta(seconds=30)
GONE_IS_SURE_AFTER = timedelta(seconds=5)
EXIT_IS_SEEN_AFTER = timedelta(seconds=5)
EXIT_IS_SEEN_REPORTS = 2
INFRASTRUCTURE_LIMIT = 3
COMMAND_NOT_FOUND = 127
"""The exit status of a shell that does not find a command."""


def decide_ended(
    slot: Slot,
    seen: NodeEvidence,
    memory: Memory,
    timers: Timers,
    workers: tuple[WorkerReport, ...],
) -> Action:
    run = memory.run
    assert run is not None
    if run.finished:
        return _decide_success(slot, seen, memory, timers)
    own = [worker for worker in workers if worker.token == run.token]
    failed = [worker for worker in own if worker.exit_status not in (None, 0)]
    interrupted = any(w.signalled or w.preempted or (w.alive and w.maintenance) for w in own)
    if interrupted:
        if any(worker.preempted for worker in own) and not timers.lasted(seen.ended_since, CLOUD_MAY_BE_LATE):
            return Wait(Cause.INTERRUPTED, "a preemption was announced on the worker; waiting for the cloud's word")
        if not timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER):
            return Wait(Cause.INTERRUPTED, "the run was interrupted; waiting for the cloud's word")
        return infrastructure(seen, memory, Cause.INTERRUPTED, "the run was interrupted by a signal or a notice")
    if failed:
        return _decide_failed(slot, seen, memory, timers, failed)
    if any(w.exit_status is None and not w.alive for w in workers) or len(own) < len(workers):
        if timers.lasted(seen.ended_since, GONE_IS_SURE_AFTER, observations=1):
            why = "the run is gone without an exit status (reboot, OOM killer)"
            return infrastructure(seen, memory, Cause.RUN_GONE, why)
        return Wait(Cause.RUN_GONE, "the run is gone from a worker; looking once more")
    if workers[0].exit_status == 0:
        return _decide_success(slot, seen, memory, timers)
    return _decide_living_rest(slot, seen, memory, timers)


def _decide_living_rest(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action:
    # A worker other than 0 finished with 0 and the rest goes on: frameworks do that; only a standstill is a fault.
    since = latest(seen.ended_since, seen.progress.life)
    if timers.lasted(since, max(slot.care.stalled_after, usual_pause(seen))) and nothing_moves(seen):
        return infrastructure(seen, memory, Cause.STALLED, "some workers finished and the others stand still")
    workers = seen.report.workers if seen.report is not None else ()
    finished = sum(worker.phase is Phase.EXITED for worker in workers)
    return Wait(Cause.PARTLY_FINISHED, f"{finished} of {len(workers)} workers finished")


def infrastructure(seen: NodeEvidence, memory: Memory, cause: Cause, why: str) -> Action:
    past, advanced = memory.node(seen.node.name), has_advanced(seen, memory)
    if not advanced and memory.book(BookName.INFRASTRUCTURE).failures >= INFRASTRUCTURE_BUDGET:
        return ending(seen, memory, cause, why, BookName.INFRASTRUCTURE, gives_up=True)
    if past is not None and past.infrastructure >= INFRASTRUCTURE_LIMIT and not keeps_node(seen):
        text = f"{why}, {past.infrastructure + 1} times on this node"
        return ending(seen, memory, cause, text, BookName.INFRASTRUCTURE, then=Reason.JUDGED)
    return ending(seen, memory, cause, why, BookName.INFRASTRUCTURE, advanced=advanced)


def _decide_failed(
    slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers, failed: list[WorkerReport]
) -> Action:
    """A sibling may have been preempted and taken this one with it: the cloud is given time to say so."""
    if not timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER) or not timers.lasted(
        seen.answering_since, CRASH_IS_OURS_AFTER
    ):
        return Wait(Cause.CRASHED, "run failed; checking for a preemption before it counts as a crash")
    worst = failed[0]
    kinds = {worker.failure for worker in failed}
    if Failure.DIRTY_HOST in kinds and not keeps_node(seen):
        return _decide_dirty(slot, seen, memory)
    what = "the run" if worst.phase is Phase.EXITED else worst.phase.value
    text = f"{what} exited with {worst.exit_status}"
    if worst.exit_status == COMMAND_NOT_FOUND:
        text = f"{text} (a command was not found; images have python3, not python)"
    if worst.detail:
        text = f"{text}: {worst.detail}"
    if kinds & {Failure.FETCH, Failure.SETUP, Failure.SECRET_MISSING, Failure.DISK_FULL} or any(
        worker.phase in (Phase.FETCH, Phase.SETUP) for worker in failed
    ):
        return booked(seen, memory, Cause.SETUP_FAILED, text, BookName.SETUP, slot.care.setup_budget)
    return booked(seen, memory, Cause.CRASHED, text, BookName.CRASH, slot.care.crash_budget)


def _decide_dirty(slot: Slot, seen: NodeEvidence, memory: Memory) -> Action:
    """A new node; but where new nodes do not help either, it is the job that finds no TPU, and its budget counts."""
    text = "the host is dirty: device busy, or no TPU found"
    if memory.book(BookName.INFRASTRUCTURE).failures < INFRASTRUCTURE_LIMIT:
        return ending(seen, memory, Cause.DIRTY_HOST, text, BookName.INFRASTRUCTURE, then=Reason.DEAD)
    if memory.book(BookName.CRASH).failures >= slot.care.crash_budget:
        text = f"{text}, on node after node"
        return ending(seen, memory, Cause.DIRTY_HOST, text, BookName.CRASH, gives_up=True)
    return ending(seen, memory, Cause.DIRTY_HOST, text, BookName.CRASH, then=Reason.DEAD)


def booked(seen: NodeEvidence, memory: Memory, cause: Cause, why: str, book: BookName, budget: int) -> Action:
    advanced = has_advanced(seen, memory) and book is BookName.CRASH
    failures = 1 if advanced else memory.book(book).failures + 1
    return ending(seen, memory, cause, why, book, gives_up=failures > budget, advanced=advanced)


def _decide_success(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action:
    # From the end of the last worker that ended, not of the first.
    since = latest(seen.ended_since, seen.phase_since)
    if not timers.lasted(since, slot.care.success_after):
        if _may_be_noted(slot, seen, memory) and timers.lasted(since, EXIT_IS_SEEN_AFTER, observations=1):
            return Settle(Fact.RUN_FINISHED, "every worker exited 0, and nothing had asked it to", seen.node.name)
        return Wait(Cause.RUN_FINISHED, f"finished; confirming for {length(slot.care.success_after)}")
    if slot.care.on_success is OnSuccess.RESTART:
        return ending(seen, memory, Cause.RUN_FINISHED, "finished; on_success is restart", None, served=True)
    return done(seen.node.name, standing(seen, memory))


def _may_be_noted(slot: Slot, seen: NodeEvidence, memory: Memory) -> bool:
    """All workers said so, and more than once; while one still runs, the node's death may yet cost something."""
    assert memory.run is not None
    assert seen.report is not None
    if memory.run.finished or slot.care.on_success is OnSuccess.RESTART or seen.ended_reports < EXIT_IS_SEEN_REPORTS:
        return False
    return all(worker.exit_status == 0 for worker in seen.report.workers)


def done(node: str, far: Standing) -> Settle:
    """The run on that node finished, and the slot with it."""
    why = "the run finished with exit status 0"
    return Settle(
        Fact.ENDED,
        why,
        node,
        end=End.DONE,
        step=far.step,
        checkpoint=far.checkpoint,
        cause=Cause.RUN_FINISHED,
    )
