"""
What to do about a run on a node, from its launch to its stop: first, what was begun with it and is not at its end.

Pure. A run that lives is decided about in `plan_living`, one that ended in `plan_ended`.
"""

from __future__ import annotations

from datetime import timedelta

from tpucare.model.actions import Action, EffectKind, Fact, Launch, Reason, Settle, Wait
from tpucare.model.causes import Cause
from tpucare.model.evidence import Evidence, Mark, NodeEvidence, Timers
from tpucare.model.memory import BookName, Memory, NodeMemory, RunMemory
from tpucare.model.resources import Slot
from tpucare.model.runs import WorkerReport
from tpucare.planner.plan_ended import decide_ended
from tpucare.planner.plan_living import decide_living
from tpucare.planner.predicates import backoff_over, deletion, ending, job_mark, keeps_node, quiet, without_job
from tpucare.planner.trust import decide_trust

# Stops that some worker did not hear, before its node is given up.
STOPS_UNHEARD = 5
STOP_AGAIN_AFTER = timedelta(seconds=10)
# Somebody may be at work there, and would lose it with the node.
OTHERS_LEFT_ALONE = timedelta(minutes=10)
# On a node that is kept: a person has been told by then.
STOP_AGAIN_SELDOM = timedelta(minutes=15)


def decide_unsettled(
    slot: Slot, seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers
) -> Action | None:
    """What was begun with a run, or asked for, and is not at its end: comes before how the run itself is."""
    assert memory.run is not None
    if memory.run.stop_why:
        return _stop_again(seen, evidence, memory, timers)
    if not memory.run.complete:
        return _decide_incomplete(slot, seen, evidence, memory, timers)
    if memory.restart_asked:
        return ending(seen, memory, Cause.RESTART_ASKED, "restart was asked for")
    return None


def decide_run(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, memory: Memory, timers: Timers
) -> Action:
    """The next step for a run that was launched on this node and is not known to be stopped; all workers answer."""
    run, report = memory.run, seen.report
    assert run is not None
    assert report is not None
    if action := decide_unsettled(slot, seen, evidence, memory, timers):
        return action
    workers = report.workers
    if all(_lives(worker, run) for worker in workers):
        return decide_living(slot, seen, past, memory, timers)
    return decide_ended(slot, seen, memory, timers, workers)


def _lives(worker: WorkerReport, run: RunMemory) -> bool:
    return worker.alive and worker.token == run.token and worker.exit_status is None


def _stop_again(seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers) -> Action:
    """A stop was intended: it is repeated until it is known to have served, or the node goes."""
    run = memory.run
    assert run is not None
    last = evidence.looked.get(EffectKind.STOP.of(seen.node.name))
    if last is None:
        then = Reason(run.then_delete) if run.then_delete else None
        return ending(seen, memory, run.stop_cause, run.stop_why, then=then)
    if run.then_delete:
        return deletion(seen, run.stop_cause, run.stop_why, Reason(run.then_delete))
    if quiet(seen):
        return Settle(Fact.RUN_STOPPED, "its workers are quiet now", seen.node.name, run.token, run.number)
    if not timers.lasted(last, STOP_AGAIN_AFTER, observations=1):
        return Wait(Cause.STOPPING, "the run was stopped; its processes or the chips are not free yet")
    past = memory.node(seen.node.name)
    is_heard = run.stuck or run.stops >= STOPS_UNHEARD
    if is_heard and past is not None and not past.launched:
        return _held_by_others(seen, last, timers)
    if run.stops < STOPS_UNHEARD and (keeps_node(seen) or not is_heard):
        return ending(seen, memory, run.stop_cause, run.stop_why)
    if not keeps_node(seen):
        why = "processes or chips are not free after SIGKILL"
        return deletion(seen, Cause.NOT_FREE_AFTER_KILL, why, Reason.DEAD)
    if timers.lasted(last, STOP_AGAIN_SELDOM, observations=1):
        return ending(seen, memory, run.stop_cause, run.stop_why)
    why = f"processes on {seen.node.name} do not end, or the chips are not free, after SIGKILL"
    why = f"{why}: log in and end them, or `tpucare apply FILE --replace`"
    return Wait(Cause.NOT_FREE_AFTER_KILL, why, needs_person=True)


def _held_by_others(seen: NodeEvidence, since: Mark, timers: Timers) -> Action:
    """Nothing of ours was ever launched there, and what holds the chips or the lock outlived a stop."""
    what = f"something that is not our run holds the chips or the lock of {seen.node.name}, and does not let go"
    if keeps_node(seen):
        return Wait(Cause.HELD_BY_OTHERS, what, needs_person=True)
    if not timers.lasted(since, OTHERS_LEFT_ALONE):
        minutes = OTHERS_LEFT_ALONE.seconds // 60
        why = f"{what}: the node is deleted after {minutes} min of that"
        return Wait(Cause.HELD_BY_OTHERS, why, needs_person=True)
    return deletion(seen, Cause.HELD_BY_OTHERS, what, Reason.DEAD, held=True)


def _decide_incomplete(slot: Slot, seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers) -> Action:
    run, past = memory.run, memory.node(seen.node.name)
    assert run is not None
    assert past is not None
    assert seen.report is not None
    holding = [worker for worker in seen.report.workers if worker.token == run.token]
    if len(holding) == len(seen.report.workers):
        return Settle(Fact.RUN_COMPLETE, "every worker has it", name=seen.node.name, token=run.token)
    book = memory.book(BookName.SETUP)
    if book.failures > slot.care.setup_budget:
        why = f"it cannot be launched: {book.reason}"
        return ending(seen, memory, Cause.LAUNCH_FAILED, why, gives_up=True)
    if holding or not quiet(seen):
        why = f"only {len(holding)} of {len(seen.report.workers)} workers took the run"
        # A launch that is known to have failed is entered already.
        book_name = None if run.launch_book else BookName.INFRASTRUCTURE
        return ending(seen, memory, Cause.LAUNCH_INCOMPLETE, why, book_name)
    if slot.job is None:
        return without_job(slot, "the node is kept")
    if wait := backoff_over(memory, timers):
        return wait
    # What is launched is the job as it is declared now, and that may be another one than was refused.
    if action := decide_trust(slot, seen, past, evidence, timers):
        return action
    why, job = "no worker took the launch: once more", job_mark(slot.job)
    return Launch(seen.node.key, seen.node.id, run.token, run.number, Cause.LAUNCH_INCOMPLETE, why, job)
