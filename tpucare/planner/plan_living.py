"""
What to do about a run that lives on every worker: a setup that does not end, a stall, bad health, the end of its day.

Pure. How long a pause is usual is told by `plan_words`; a run that ended, on any worker, is `plan_ended`'s.
"""

from __future__ import annotations

from datetime import timedelta

from tpucare.model.actions import Action, Fact, Notice, Reason, Settle, Wait
from tpucare.model.causes import Cause
from tpucare.model.evidence import SUPPORTING_OBSERVATIONS, Mark, NodeEvidence, Timers, latest
from tpucare.model.memory import ENDED_BY_PROGRESS, BookName, Memory, NodeMemory, RunMemory
from tpucare.model.resources import Provisioning, Slot
from tpucare.model.runs import Phase, WorkerReport
from tpucare.model.text import length
from tpucare.planner.plan_ended import booked
from tpucare.planner.predicates import (
    LONG_LIFE,
    STALL_FACTOR,
    ending,
    furthest_of,
    has_advanced,
    keeps_node,
    nothing_moves,
    standing,
    usual_pause,
)

PREEMPTIBLE_LIFE = timedelta(hours=23, minutes=45)
NO_PREEMPTIBLE_LIVES = timedelta(days=2)
CHECKPOINT_LOOK_EVERY = timedelta(seconds=15)
# In a row, over several nodes: then it is the job's own doing.
STALL_BUDGET = 6
FIRST_WAIT_FACTOR = 2
NO_TIME = timedelta()


def decide_living(slot: Slot, seen: NodeEvidence, past: NodeMemory, memory: Memory, timers: Timers) -> Action:
    run = memory.run
    assert run is not None
    if verdict := _overdue_phase(slot, seen, memory, timers):
        return verdict
    if verdict := _stalled(slot, seen, past, memory, timers):
        return verdict
    if seen.unhealthy_since is not None and timers.lasted(seen.unhealthy_since, slot.care.unhealthy_after):
        life = seen.progress.life
        dead = life is None or timers.lasted(life, slot.care.unhealthy_after)
        if dead and nothing_moves(seen) and not keeps_node(seen):
            limit = slot.care.unhealthy_after
            why = f"health {seen.node.health.name} and no progress for {length(limit)}"
            return ending(seen, memory, Cause.UNHEALTHY, why, then=Reason.JUDGED, lasted=limit)
    if action := _end_of_day(seen, past, memory, timers):
        return action
    if memory.book(BookName.SETUP).failures and seen.report is not None and past_setup(seen.report.workers):
        return Settle(Fact.SETUP_DONE, "setup served on every worker: its failures begin anew", seen.node.name)
    if seen.progress.signals >= 2 and not run.progressed:
        return _progressed(seen, memory, "the run makes progress")
    if action := _row_ends(seen, memory, timers):
        return action
    return _course(seen)


def _row_ends(seen: NodeEvidence, memory: Memory, timers: Timers) -> Settle | None:
    """What failed before is no row any more once a run gets further, or lives long where it tells of no step."""
    if not is_row_open(memory):
        return None
    if got_further(seen, memory):
        return _progressed(seen, memory, "the run got further than any before it")
    if seen.progress.told is not None:
        return None
    # By the clock of the wall: it is no verdict, and a daemon may be started again more often than each hour.
    launched_at = memory.run.launched_at if memory.run is not None else None
    lasted = launched_at is not None and timers.passed(launched_at + LONG_LIFE, LONG_LIFE)
    why = f"it tells of no step, and lives for {length(LONG_LIFE)}"
    return Settle(Fact.RUN_LASTED, why, seen.node.name) if lasted else None


def got_further(seen: NodeEvidence, memory: Memory) -> bool:
    """A row of failures ends with what the workers said just now; no timer tells when that will be."""
    run = memory.run
    return run is not None and run.progressed and seen.progress.told is not None and has_advanced(seen, memory)


def is_row_open(memory: Memory) -> bool:
    if memory.failed_since is not None:
        return True
    return bool(memory.books) and any(memory.book(name).failures for name in ENDED_BY_PROGRESS)


def _progressed(seen: NodeEvidence, memory: Memory, why: str) -> Settle:
    far, gap = standing(seen, memory), seen.progress.median_gap
    return Settle(Fact.RUN_PROGRESSED, why, seen.node.name, step=far.step, checkpoint=far.checkpoint, gap=gap)


def _course(seen: NodeEvidence) -> Wait:
    """What the run does now, by the worker that has got least far."""
    phases = {worker.phase for worker in (seen.report.workers if seen.report is not None else ())}
    if phases & {Phase.NONE, Phase.FETCH}:
        return Wait(Cause.SETTING_UP, "fetching the code")
    if Phase.SETUP in phases:
        return Wait(Cause.SETTING_UP, "running setup")
    if seen.progress.signals:
        return Wait(Cause.RUNNING, "running")
    which = "second step" if seen.progress.told is not None else "step"
    return Wait(Cause.RUNNING, f"running; no {which} seen yet")


def past_setup(workers: tuple[WorkerReport, ...]) -> bool:
    return all(worker.phase is Phase.RUN for worker in workers)


def _overdue_phase(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action | None:
    assert seen.report is not None
    phases = {worker.phase for worker in seen.report.workers}
    if phases & {Phase.FETCH, Phase.SETUP, Phase.NONE} and timers.lasted(seen.phase_since, slot.care.setup_timeout):
        return booked(seen, memory, Cause.SETUP_TIMEOUT, "setup does not end", BookName.SETUP, slot.care.setup_budget)
    return None


def _stalled(slot: Slot, seen: NodeEvidence, past: NodeMemory, memory: Memory, timers: Timers) -> Action | None:
    progress, run = seen.progress, memory.run
    assert run is not None
    assert seen.report is not None
    if not past_setup(seen.report.workers):
        return None
    if progress.signals or run.progressed:
        # Signs that an earlier process saw are not known here: it stands still since it was met.
        since = progress.last or progress.begun
        limit = _patience(slot, seen, run)
        cause, why = Cause.STALLED, f"no progress for {length(limit)}"
        if limit > slot.care.stalled_after:
            why = f"{why} (longer than stalled_after, by how often its signs come)"
    elif progress.told is not None or _job_tells(memory):
        since = latest(seen.phase_since, progress.told)
        cause, why = Cause.NO_FIRST_STEP, "no first step"
        limit = max(slot.care.first_step_timeout, _wait_for_the_next(seen, progress.told))
        if memory.step is None:
            # Checkpoints alone tell of this job, and may come more seldom than a step.
            limit = max(limit, timedelta(seconds=memory.gap_seconds) * STALL_FACTOR)
    else:
        return None
    # Time alone is no observation: workers that are asked seldom, or late, have not been seen to stand still.
    stood_still = progress.unchanged >= SUPPORTING_OBSERVATIONS
    return _stall(seen, memory, past, cause, why, limit) if timers.lasted(since, limit) and stood_still else None


def _job_tells(memory: Memory) -> bool:
    """Whether runs of this job are known to tell of their progress; one that told nothing yet is not late with it."""
    run = memory.run
    return run is not None and run.job == memory.step_job and (memory.step is not None or memory.gap_seconds > 0)


def _patience(slot: Slot, seen: NodeEvidence, run: RunMemory) -> timedelta:
    """How long a run that makes progress may stand still."""
    limit = max(slot.care.stalled_after, usual_pause(seen))
    if seen.progress.median_gap is not None:
        return limit
    # How often its signs come is known from its beginning only, or from the time until the first one.
    known = timedelta(seconds=run.gap_seconds) * STALL_FACTOR
    return max(limit, slot.care.first_step_timeout, known, _wait_for_the_next(seen, seen.progress.last))


def _wait_for_the_next(seen: NodeEvidence, first: Mark | None) -> timedelta:
    """A step or checkpoint that took long to come for the first time may take as long again, and some more."""
    begun = seen.progress.begun
    return (first.observed - begun.observed) * FIRST_WAIT_FACTOR if first is not None and begun is not None else NO_TIME


def _stall(seen: NodeEvidence, memory: Memory, past: NodeMemory, cause: Cause, why: str, lasted: timedelta) -> Action:
    if has_advanced(seen, memory):
        return ending(seen, memory, cause, why, BookName.STALL, advanced=True, stacks=True, lasted=lasted)
    if memory.book(BookName.STALL).failures >= STALL_BUDGET:
        return ending(seen, memory, cause, why, BookName.STALL, gives_up=True, stacks=True, lasted=lasted)
    if past.stalls >= 1 and not keeps_node(seen):
        text = f"{why}, for the second time on this node"
        return ending(seen, memory, cause, text, BookName.STALL, then=Reason.JUDGED, stacks=True, lasted=lasted)
    return ending(seen, memory, cause, why, BookName.STALL, stacks=True, lasted=lasted)


def _end_of_day(seen: NodeEvidence, past: NodeMemory, memory: Memory, timers: Timers) -> Action | None:
    """A preemptible node lives 24 h: ask to save in time, and use the moment when a newer checkpoint is there."""
    node, run = seen.node, memory.run
    if node.provisioning is not Provisioning.PREEMPTIBLE or run is None:
        return None
    if not timers.reached(node.create_time + PREEMPTIBLE_LIFE):
        return None
    if timers.reached(node.create_time + NO_PREEMPTIBLE_LIVES):
        # An instant that is missing reads as 1970, and no node that is as old as that could be here.
        return None
    checkpoint = furthest_of(seen, "checkpoint", None)
    if past.noticed_at is None:
        text = "a preemptible node ends after 24 hours: please save\n"
        return Notice(node.key, run.token, text, Cause.END_OF_DAY, "its 24 hours end soon", checkpoint)
    if checkpoint is not None and (past.noticed_checkpoint is None or checkpoint > past.noticed_checkpoint):
        why = "its 24 hours end, and a newer checkpoint is complete"
        return ending(seen, memory, Cause.END_OF_DAY, why, then=Reason.FINISHED)
    timers.again(CHECKPOINT_LOOK_EVERY)
    return None
