"""
Decides about a run on a node, from its launch to its end.

Pure. First the unfinished launch or stop (`decide_unsettled`), then a run that lives on every worker (`decide_living`),
a run that ended on any worker (`decide_ended`), and a run that tpucare did not start (`decide_foreign`). Each end
counts against a failure budget. Workers that do not answer are the business of `node`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tpucare.model.actions import Action, EffectKind, Fact, Launch, Record, SendNotice, Wait
from tpucare.model.causes import Cause, Reason
from tpucare.model.evidence import SUPPORTING_OBSERVATIONS, Case, Mark, NodeEvidence, Timers, latest
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import ENDED_BY_PROGRESS, End, FailureKind, Memory, NodeMemory, RunMemory
from tpucare.model.resources import OnExit, OnSuccess, Provisioning, Slot
from tpucare.model.runs import Failure, NodeReport, Phase, WorkerReport
from tpucare.model.text import length
from tpucare.planner.predicates import (
    INFRASTRUCTURE_BUDGET,
    LONG_LIFE,
    STALL_FACTOR,
    Furthest,
    backoff_over,
    deletion,
    ending,
    furthest,
    furthest_of,
    has_advanced,
    is_quiet,
    job_mark,
    keeps_node,
    nothing_moves,
    usual_pause,
    without_job,
)
from tpucare.planner.trust import decide_trust

# Stops that did not reach some worker, before its node is deleted.
STOPS_UNHEARD = 5
STOP_AGAIN_AFTER = timedelta(seconds=10)
# A person may be at work there, and would lose it with the node.
OTHERS_LEFT_ALONE = timedelta(minutes=10)
# On a kept node, where a person was told before.
STOP_AGAIN_SELDOM = timedelta(minutes=15)


def decide_unsettled(case: Case, seen: NodeEvidence) -> Action | None:
    """The next step of an unfinished stop, launch or restart; None without one. Comes before the run's own state."""
    assert case.memory.run is not None
    if case.memory.run.state.is_stopping:
        return _stop_again(case, seen)
    if case.memory.run.state is RunState.LAUNCHING:
        return _decide_incomplete(case, seen)
    if case.memory.restart_asked:
        return ending(seen, case.memory, Cause.RESTART_ASKED, "restart was asked for")
    return None


def decide_run(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    """The next step for a run of ours on this node that is not stopped; all workers answer."""
    run, report = case.memory.run, seen.report
    assert run is not None
    assert report is not None
    if action := decide_unsettled(case, seen):
        return action
    if all(worker.alive and worker.token == run.token and worker.exit_status is None for worker in report.workers):
        return decide_living(case, seen, past)
    return decide_ended(case, seen, report.workers)


def _stop_again(case: Case, seen: NodeEvidence) -> Action:
    """Repeat an intended stop until the workers are quiet, or delete the node."""
    run = case.memory.run
    assert run is not None
    last = case.evidence.ended_effects.get(EffectKind.STOP.of(seen.node.name))
    if last is None:
        return ending(seen, case.memory, run.stop_cause, run.stop_why, then=run.then_delete)
    if run.then_delete is not None:
        return deletion(seen, run.stop_cause, run.stop_why, run.then_delete)
    if is_quiet(seen):
        return Record(Fact.RUN_STOPPED, "its workers are quiet", seen.node.name, run.token, run.number)
    if not case.timers.lasted(last, STOP_AGAIN_AFTER, observations=1):
        return Wait(Cause.STOPPING, "the run was stopped; its processes or the chips are not free yet")
    past = case.memory.node(seen.node.name)
    is_heard = run.state is RunState.STUCK or run.stops >= STOPS_UNHEARD
    if is_heard and past is not None and not past.launched:
        return _held_by_others(seen, last, case.timers)
    if run.stops < STOPS_UNHEARD and (keeps_node(seen) or not is_heard):
        return ending(seen, case.memory, run.stop_cause, run.stop_why)
    if not keeps_node(seen):
        why = "processes or chips are not free after SIGKILL"
        return deletion(seen, Cause.NOT_FREE_AFTER_KILL, why, Reason.DEAD)
    if case.timers.lasted(last, STOP_AGAIN_SELDOM, observations=1):
        return ending(seen, case.memory, run.stop_cause, run.stop_why)
    why = f"processes on {seen.node.name} do not end, or the chips are not free, after SIGKILL"
    why = f"{why}: log in and end them, or `tpucare apply FILE --replace`"
    return Wait(Cause.NOT_FREE_AFTER_KILL, why, needs_person=True)


def _held_by_others(seen: NodeEvidence, since: Mark, timers: Timers) -> Action:
    """A foreign process outlived a stop, on a node on which nothing of ours was launched."""
    what = f"a process that is not our run holds the chips or the lock of {seen.node.name} and does not end"
    if keeps_node(seen):
        return Wait(Cause.HELD_BY_OTHERS, what, needs_person=True)
    if not timers.lasted(since, OTHERS_LEFT_ALONE):
        why = f"{what}: after {length(OTHERS_LEFT_ALONE)} of that the node is deleted"
        return Wait(Cause.HELD_BY_OTHERS, why, needs_person=True)
    return deletion(seen, Cause.HELD_BY_OTHERS, what, Reason.DEAD, held=True)


def _decide_incomplete(case: Case, seen: NodeEvidence) -> Action:
    run, past = case.memory.run, case.memory.node(seen.node.name)
    assert run is not None
    assert past is not None
    assert seen.report is not None
    holding = [worker for worker in seen.report.workers if worker.token == run.token]
    if len(holding) == len(seen.report.workers):
        return Record(Fact.RUN_COMPLETE, "every worker accepted it", name=seen.node.name, token=run.token)
    counter = case.memory.counter(FailureKind.SETUP)
    if counter.failures > case.slot.care.setup_budget:
        why = f"it cannot be launched: {counter.reason}"
        return ending(seen, case.memory, Cause.LAUNCH_FAILED, why, gives_up=True)
    if holding or not is_quiet(seen):
        why = f"only {len(holding)} of {len(seen.report.workers)} workers accepted the run"
        # A launch that is known to have failed is counted already.
        kind = None if run.launch_book else FailureKind.INFRASTRUCTURE
        return ending(seen, case.memory, Cause.LAUNCH_INCOMPLETE, why, kind)
    if case.slot.job is None:
        return without_job(case.slot, "the node is kept")
    if wait := backoff_over(case):
        return wait
    # The launch is of the job as declared now, which may be another than at the first try.
    if action := decide_trust(case, seen, past):
        return action
    why, job = "no worker accepted the launch: trying again", job_mark(case.slot.job)
    return Launch(seen.node.key, seen.node.id, run.token, run.number, Cause.LAUNCH_INCOMPLETE, why, job)


# --- a run that lives: an endless setup, a stall, bad health, the end of a preemptible node's day ---------------------


PREEMPTIBLE_LIFE = timedelta(hours=23, minutes=45)
NO_PREEMPTIBLE_LIVES = timedelta(days=2)
CHECKPOINT_READ_EVERY = timedelta(seconds=15)
# In a row, over several nodes: then the job itself is at fault.
STALL_BUDGET = 6
FIRST_WAIT_FACTOR = 2
NO_TIME = timedelta()


def decide_living(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    """The next step for a run that lives on every worker."""
    run = case.memory.run
    assert run is not None
    assert seen.report is not None
    phases = {worker.phase for worker in seen.report.workers}
    is_setup = bool(phases & {Phase.FETCH, Phase.SETUP, Phase.NONE})
    if is_setup and case.timers.lasted(seen.phase_since, case.slot.care.setup_timeout):
        return failure_ending(case, seen, Cause.SETUP_TIMEOUT, "setup does not end", FailureKind.SETUP)
    if verdict := _stalled(case, seen, past):
        return verdict
    if seen.unhealthy_since is not None and case.timers.lasted(seen.unhealthy_since, case.slot.care.unhealthy_after):
        life = seen.progress.life
        dead = life is None or case.timers.lasted(life, case.slot.care.unhealthy_after)
        if dead and nothing_moves(seen) and not keeps_node(seen):
            limit = case.slot.care.unhealthy_after
            why = f"health {seen.node.health.name} and no progress for {length(limit)}"
            return ending(seen, case.memory, Cause.UNHEALTHY, why, then=Reason.JUDGED, lasted=limit)
    if action := _end_of_day(case, seen, past):
        return action
    if case.memory.counter(FailureKind.SETUP).failures and past_setup(seen.report.workers):
        return Record(Fact.SETUP_DONE, "setup served on every worker: its failures begin anew", seen.node.name)
    if seen.progress.signals >= 2 and not run.progressed:
        return _progressed(seen, case.memory, "the run makes progress")
    if action := _row_ends(case, seen):
        return action
    return _phase_now(seen)


def _row_ends(case: Case, seen: NodeEvidence) -> Record | None:
    """End the failure streaks once a run gets further, or lives for LONG_LIFE without a step signal."""
    if not is_row_open(case.memory):
        return None
    if got_further(seen, case.memory):
        return _progressed(seen, case.memory, "the run got further than any before it")
    if seen.progress.first_step is not None:
        return None
    # By wall time, since this is no verdict, and a daemon may restart more often than hourly.
    launched_at = case.memory.run.launched_at if case.memory.run is not None else None
    lasted = launched_at is not None and case.timers.passed(launched_at + LONG_LIFE, LONG_LIFE)
    why = f"it reports no steps, and has lived for {length(LONG_LIFE)}"
    return Record(Fact.RUN_LASTED, why, seen.node.name) if lasted else None


def got_further(seen: NodeEvidence, memory: Memory) -> bool:
    """The newest reports show a step beyond the furthest of this job."""
    run = memory.run
    return run is not None and run.progressed and seen.progress.first_step is not None and has_advanced(seen, memory)


def is_row_open(memory: Memory) -> bool:
    if memory.failed_since is not None:
        return True
    return bool(memory.books) and any(memory.counter(name).failures for name in ENDED_BY_PROGRESS)


def _progressed(seen: NodeEvidence, memory: Memory, why: str) -> Record:
    far, gap = furthest(seen, memory), seen.progress.median_gap
    return Record(Fact.RUN_PROGRESSED, why, seen.node.name, step=far.step, checkpoint=far.checkpoint, gap=gap)


def _phase_now(seen: NodeEvidence) -> Wait:
    """The phase of the slowest worker."""
    phases = {worker.phase for worker in (seen.report.workers if seen.report is not None else ())}
    if phases & {Phase.NONE, Phase.FETCH}:
        return Wait(Cause.SETTING_UP, "fetching the code")
    if Phase.SETUP in phases:
        return Wait(Cause.SETTING_UP, "running setup")
    if seen.progress.signals:
        return Wait(Cause.RUNNING, "running")
    which = "second step" if seen.progress.first_step is not None else "step"
    return Wait(Cause.RUNNING, f"running; no {which} seen yet")


def past_setup(workers: tuple[WorkerReport, ...]) -> bool:
    return all(worker.phase is Phase.RUN for worker in workers)


def _stalled(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action | None:
    progress, run = seen.progress, case.memory.run
    assert run is not None
    assert seen.report is not None
    if not past_setup(seen.report.workers):
        return None
    if progress.signals or run.progressed:
        # Signs that an earlier process saw are unknown here, so the stall is counted from the first report.
        since = progress.last or progress.begun
        limit = _patience(case.slot, seen, run)
        cause, why = Cause.STALLED, f"no progress for {length(limit)}"
        if limit > case.slot.care.stalled_after:
            why = f"{why} (longer than stalled_after, since its signs come seldom)"
    elif progress.first_step is not None or _job_tells(case.memory):
        since = latest(seen.phase_since, progress.first_step)
        cause, why = Cause.NO_FIRST_STEP, "no first step"
        limit = max(case.slot.care.first_step_timeout, _wait_for_the_next(seen, progress.first_step))
        if case.memory.step is None:
            # This job reports checkpoints alone, which may come more seldom than steps.
            limit = max(limit, timedelta(seconds=case.memory.gap_seconds) * STALL_FACTOR)
    else:
        return None
    stood_still = progress.unchanged >= SUPPORTING_OBSERVATIONS
    if not case.timers.lasted(since, limit) or not stood_still:
        return None
    return _stall(seen, case.memory, past, cause, why, limit)


def _job_tells(memory: Memory) -> bool:
    """Whether an earlier run of this job reported progress, so that this one is expected to."""
    run = memory.run
    return run is not None and run.job == memory.step_job and (memory.step is not None or memory.gap_seconds > 0)


def _patience(slot: Slot, seen: NodeEvidence, run: RunMemory) -> timedelta:
    """How long a run that made progress may stand still."""
    limit = max(slot.care.stalled_after, usual_pause(seen))
    if seen.progress.median_gap is not None:
        return limit
    # Without a gap of its own: that of an earlier process, or the time until its first sign.
    known = timedelta(seconds=run.gap_seconds) * STALL_FACTOR
    return max(limit, slot.care.first_step_timeout, known, _wait_for_the_next(seen, seen.progress.last))


def _wait_for_the_next(seen: NodeEvidence, first: Mark | None) -> timedelta:
    """FIRST_WAIT_FACTOR times the wait for the first step or checkpoint; the next may take as long."""
    begun = seen.progress.begun
    return (first.observed - begun.observed) * FIRST_WAIT_FACTOR if first is not None and begun is not None else NO_TIME


def _stall(seen: NodeEvidence, memory: Memory, past: NodeMemory, cause: Cause, why: str, lasted: timedelta) -> Action:
    if has_advanced(seen, memory):
        return ending(seen, memory, cause, why, FailureKind.STALL, advanced=True, stacks=True, lasted=lasted)
    if memory.counter(FailureKind.STALL).failures >= STALL_BUDGET:
        return ending(seen, memory, cause, why, FailureKind.STALL, gives_up=True, stacks=True, lasted=lasted)
    if past.stalls >= 1 and not keeps_node(seen):
        text = f"{why}, for the second time on this node"
        return ending(seen, memory, cause, text, FailureKind.STALL, then=Reason.JUDGED, stacks=True, lasted=lasted)
    return ending(seen, memory, cause, why, FailureKind.STALL, stacks=True, lasted=lasted)


def _end_of_day(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action | None:
    """A preemptible node lives 24 h: ask the run to save, and delete the node after a newer checkpoint."""
    node, run = seen.node, case.memory.run
    if node.provisioning is not Provisioning.PREEMPTIBLE or run is None:
        return None
    if not case.timers.reached(node.create_time + PREEMPTIBLE_LIFE):
        return None
    if case.timers.reached(node.create_time + NO_PREEMPTIBLE_LIVES):
        # A missing create time reads as 1970.
        return None
    checkpoint = furthest_of(seen, "checkpoint", None)
    if past.noticed_at is None:
        text = "a preemptible node ends after 24 hours: please save\n"
        return SendNotice(node.key, run.token, text, Cause.END_OF_DAY, "its 24 hours end soon", checkpoint)
    if checkpoint is not None and (past.noticed_checkpoint is None or checkpoint > past.noticed_checkpoint):
        why = "its 24 hours end, and a newer checkpoint is complete"
        return ending(seen, case.memory, Cause.END_OF_DAY, why, then=Reason.FINISHED)
    case.timers.again(CHECKPOINT_READ_EVERY)
    return None


# --- a run that ended on one worker or all: success, crash, unreported preemption, lost worker ------------------------


CLOUD_MAY_BE_LATE = timedelta(minutes=5)
CRASH_IS_OURS_AFTER = timedelta(seconds=30)
GONE_IS_SURE_AFTER = timedelta(seconds=5)
EXIT_IS_SEEN_AFTER = timedelta(seconds=5)
EXIT_IS_SEEN_REPORTS = 2
INFRASTRUCTURE_LIMIT = 3
COMMAND_NOT_FOUND = 127
"""Exit status of a shell that does not find a command (POSIX sh)."""


def decide_ended(case: Case, seen: NodeEvidence, workers: tuple[WorkerReport, ...]) -> Action:
    """The next step for a run that ended on some worker."""
    run = case.memory.run
    assert run is not None
    if run.state is RunState.FINISHED:
        return _decide_success(case, seen)
    own = [worker for worker in workers if worker.token == run.token]
    failed = [worker for worker in own if worker.exit_status not in (None, 0)]
    interrupted = any(w.signalled or w.preempted or (w.alive and w.maintenance) for w in own)
    if interrupted:
        if any(worker.preempted for worker in own) and not case.timers.lasted(seen.ended_since, CLOUD_MAY_BE_LATE):
            return Wait(Cause.INTERRUPTED, "the worker announced a preemption; waiting until the cloud reports it")
        if not case.timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER):
            return Wait(Cause.INTERRUPTED, "the run was interrupted; waiting whether the cloud reports a preemption")
        return infrastructure_ending(
            seen, case.memory, Cause.INTERRUPTED, "the run was interrupted by a signal or a notice"
        )
    if failed:
        return _decide_failed(case, seen, failed)
    if any(w.exit_status is None and not w.alive for w in workers) or len(own) < len(workers):
        if case.timers.lasted(seen.ended_since, GONE_IS_SURE_AFTER, observations=1):
            why = "the run is gone without an exit status (reboot, OOM killer)"
            return infrastructure_ending(seen, case.memory, Cause.RUN_GONE, why)
        return Wait(Cause.RUN_GONE, "the run is gone from a worker; probing once more")
    if workers[0].exit_status == 0:
        return _decide_success(case, seen)
    return _decide_living_rest(case, seen)


def _decide_living_rest(case: Case, seen: NodeEvidence) -> Action:
    # Frameworks may end workers other than 0 early with status 0; only a standstill of the rest is a fault.
    since = latest(seen.ended_since, seen.progress.life)
    if case.timers.lasted(since, max(case.slot.care.stalled_after, usual_pause(seen))) and nothing_moves(seen):
        return infrastructure_ending(
            seen, case.memory, Cause.STALLED, "some workers finished and the others stand still"
        )
    workers = seen.report.workers if seen.report is not None else ()
    finished = sum(worker.phase is Phase.EXITED for worker in workers)
    return Wait(Cause.PARTLY_FINISHED, f"{finished} of {len(workers)} workers finished")


def infrastructure_ending(seen: NodeEvidence, memory: Memory, cause: Cause, why: str) -> Action:
    """A Stop that counts an infrastructure failure; too many fail the slot, or replace the node."""
    past, advanced = memory.node(seen.node.name), has_advanced(seen, memory)
    if not advanced and memory.counter(FailureKind.INFRASTRUCTURE).failures >= INFRASTRUCTURE_BUDGET:
        return ending(seen, memory, cause, why, FailureKind.INFRASTRUCTURE, gives_up=True)
    if past is not None and past.infrastructure >= INFRASTRUCTURE_LIMIT and not keeps_node(seen):
        text = f"{why}, {past.infrastructure + 1} times on this node"
        return ending(seen, memory, cause, text, FailureKind.INFRASTRUCTURE, then=Reason.JUDGED)
    return ending(seen, memory, cause, why, FailureKind.INFRASTRUCTURE, advanced=advanced)


def _decide_failed(case: Case, seen: NodeEvidence, failed: list[WorkerReport]) -> Action:
    """A sibling's preemption may have ended this worker's run, so the cloud gets time to report it."""
    if not case.timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER) or not case.timers.lasted(
        seen.answering_since, CRASH_IS_OURS_AFTER
    ):
        return Wait(Cause.CRASHED, "run failed; checking for a preemption before it counts as a crash")
    worst = failed[0]
    kinds = {worker.failure for worker in failed}
    if Failure.DIRTY_HOST in kinds and not keeps_node(seen):
        return _decide_dirty(case, seen)
    what = "the run" if worst.phase is Phase.EXITED else worst.phase.value
    text = f"{what} exited with {worst.exit_status}"
    if worst.exit_status == COMMAND_NOT_FOUND:
        text = f"{text} (a command was not found; images have python3, not python)"
    if worst.detail:
        text = f"{text}: {worst.detail}"
    if kinds & {Failure.FETCH, Failure.SETUP, Failure.SECRET_MISSING, Failure.DISK_FULL} or any(
        worker.phase in (Phase.FETCH, Phase.SETUP) for worker in failed
    ):
        return failure_ending(case, seen, Cause.SETUP_FAILED, text, FailureKind.SETUP)
    return failure_ending(case, seen, Cause.CRASHED, text, FailureKind.CRASH)


def _decide_dirty(case: Case, seen: NodeEvidence) -> Action:
    """A new node; after INFRASTRUCTURE_LIMIT of them the job itself finds no TPU, which counts as a crash."""
    text = "the host is dirty: device busy, or no TPU found"
    if case.memory.counter(FailureKind.INFRASTRUCTURE).failures < INFRASTRUCTURE_LIMIT:
        return ending(seen, case.memory, Cause.DIRTY_HOST, text, FailureKind.INFRASTRUCTURE, then=Reason.DEAD)
    if case.memory.counter(FailureKind.CRASH).failures >= case.slot.care.crash_budget:
        text = f"{text}, on node after node"
        return ending(seen, case.memory, Cause.DIRTY_HOST, text, FailureKind.CRASH, gives_up=True)
    return ending(seen, case.memory, Cause.DIRTY_HOST, text, FailureKind.CRASH, then=Reason.DEAD)


def failure_ending(case: Case, seen: NodeEvidence, cause: Cause, why: str, kind: FailureKind) -> Action:
    """A Stop that counts a failure of *kind* (SETUP or CRASH); beyond its budget the slot fails."""
    care = case.slot.care
    budget = care.setup_budget if kind is FailureKind.SETUP else care.crash_budget
    advanced = kind is FailureKind.CRASH and has_advanced(seen, case.memory)
    failures = 1 if advanced else case.memory.counter(kind).failures + 1
    return ending(seen, case.memory, cause, why, kind, gives_up=failures > budget, advanced=advanced)


def _decide_success(case: Case, seen: NodeEvidence) -> Action:
    # Counted from the end of the last worker.
    since = latest(seen.ended_since, seen.phase_since)
    if not case.timers.lasted(since, case.slot.care.success_after):
        if _may_be_noted(case, seen) and case.timers.lasted(since, EXIT_IS_SEEN_AFTER, observations=1):
            return Record(Fact.RUN_FINISHED, "every worker exited 0, unasked", seen.node.name)
        return Wait(Cause.RUN_FINISHED, f"finished; confirming for {length(case.slot.care.success_after)}")
    if case.slot.care.on_success is OnSuccess.RESTART:
        return ending(seen, case.memory, Cause.RUN_FINISHED, "finished; on_success is restart", None, served=True)
    return end_done(seen.node.name, furthest(seen, case.memory))


def _may_be_noted(case: Case, seen: NodeEvidence) -> bool:
    """All workers exited 0, in EXIT_IS_SEEN_REPORTS reports; while one runs, a lost node still loses work."""
    assert case.memory.run is not None
    assert seen.report is not None
    if (
        case.memory.run.state is RunState.FINISHED
        or case.slot.care.on_success is OnSuccess.RESTART
        or seen.ended_reports < EXIT_IS_SEEN_REPORTS
    ):
        return False
    return all(worker.exit_status == 0 for worker in seen.report.workers)


def end_done(
    node: str, far: Furthest, why: str = "the run finished with exit status 0", cause: Cause = Cause.RUN_FINISHED
) -> Record:
    """End the slot as done, with the run on that node."""
    return Record(Fact.ENDED, why, node, end=End.DONE, step=far.step, checkpoint=far.checkpoint, cause=cause)


# --- a run that tpucare did not start, whose success is unknown -------------------------------------------------------
# Exit statuses that scripts of `exec_command` left are shown and decide nothing, since other processes of `start_fn`
# have none. The run is over when none of its processes or sessions lives on any worker. A worker on which nothing was
# started is no sign of an end, and sessions may come back by themselves after a reboot.


# A session that starts at boot is up about as soon as sshd.
MAY_COME_BACK = timedelta(minutes=1)
ENDED = "its run ended; not known to have succeeded"


def is_foreign(report: NodeReport | None, run: RunMemory) -> bool:
    """Whether tpucare's runner did not start *run*, by the workers' reports."""
    workers = report.workers if report is not None else ()
    return any(worker.foreign is not None and worker.token == run.token for worker in workers)


def decide_foreign(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    """The next step for a foreign run that is not known to be stopped; all workers answer."""
    run, report = case.memory.run, seen.report
    assert run is not None
    assert report is not None
    if action := decide_unsettled(case, seen):
        return action
    workers = report.workers
    if any(worker.foreign is not None and worker.foreign.lost for worker in workers):
        return ending(
            seen, case.memory, Cause.SETUP_INTERRUPTED, "its setup was interrupted: the process that did it is gone"
        )
    failed = [worker for worker in workers if worker.exit_status not in (None, 0)]
    if failed:
        return _decide_failed_setup(case, seen, failed[0])
    if case.memory.counter(FailureKind.SETUP).failures and past_setup(workers):
        return Record(Fact.SETUP_DONE, "setup served on every worker: its failures begin anew", seen.node.name)
    if run.state is not RunState.OVER and (action := _decide_rebooted(case, seen)):
        return action
    if not any(worker.alive for worker in workers):
        return _decide_foreign_end(case, seen)
    if run.state is RunState.OVER:
        return Record(Fact.RUN_BACK, "a process of its run lives again", seen.node.name)
    action = decide_living(case, seen, past)
    return replace(action, why=_living_rest(workers)) if isinstance(action, Wait) and past_setup(workers) else action


def _living_rest(workers: tuple[WorkerReport, ...]) -> str:
    ended = [n for n, w in enumerate(workers) if w.foreign is not None and w.foreign.seen and not w.alive]
    if ended:
        return f"running; what ran on worker {', '.join(map(str, ended))} has ended"
    return "running (processes that start_fn started are alive)"


def _decide_failed_setup(case: Case, seen: NodeEvidence, worst: WorkerReport) -> Action:
    """A preemption makes the functions that use the node fail, so the cloud gets time to report it."""
    if not case.timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER):
        why = f"setup failed; checking for a preemption before it counts ({worst.detail})"
        return Wait(Cause.SETUP_FAILED, why)
    text = worst.detail or f"setup exited with {worst.exit_status}"
    return failure_ending(case, seen, Cause.SETUP_FAILED, text, FailureKind.SETUP)


def _decide_rebooted(case: Case, seen: NodeEvidence) -> Action | None:
    """A reboot of a worker ended the run there, which is no end of its own."""
    assert seen.report is not None
    if not any(worker.is_torn for worker in seen.report.workers):
        return None
    if case.timers.lasted(seen.ended_since, MAY_COME_BACK):
        why = "a worker rebooted, and its run did not come back"
        return infrastructure_ending(seen, case.memory, Cause.REBOOTED, why)
    return Wait(Cause.REBOOTED, "a worker rebooted; waiting whether its run comes back by itself")


def _decide_foreign_end(case: Case, seen: NodeEvidence) -> Action:
    run, on_exit = case.memory.run, case.slot.care.on_exit
    assert run is not None
    assert seen.report is not None
    why = ended_why(seen.report.workers)
    if run.state is RunState.OVER and on_exit is OnExit.LEAVE:
        return Wait(Cause.FOREIGN_RUN_ENDED, f"{why} (care.on_exit is leave)")
    if not case.timers.lasted(seen.ended_since, GONE_IS_SURE_AFTER, observations=1):
        return Wait(Cause.FOREIGN_RUN_ENDED, "no process of its run lives; probing once more")
    if on_exit is OnExit.RESTART:
        return failure_ending(case, seen, Cause.FOREIGN_RUN_ENDED, why, FailureKind.CRASH)
    far, name = furthest(seen, case.memory), seen.node.name
    if on_exit is OnExit.DELETE:
        return end_done(name, far, why, Cause.FOREIGN_RUN_ENDED)
    return Record(Fact.RUN_OVER, why, name, step=far.step, checkpoint=far.checkpoint)


def ended_why(workers: tuple[WorkerReport, ...]) -> str:
    """The known exit statuses of a foreign run, failures first."""
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
