"""
What to do about a run on a node: is it alive, did it finish, crash, stall, or lose a worker; and in which book it goes.

Pure. Also the few words about nodes and runs that `plan` and `plan_node` share.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from tpucare.actions import Action, Delete, Fact, Launch, Notice, Reason, Settle, Stop, Wait
from tpucare.backoff import book_cap
from tpucare.evidence import SUPPORTING_OBSERVATIONS, Evidence, Mark, NodeEvidence, Timers, latest
from tpucare.memory import BookName, End, Memory, NodeMemory, RunMemory
from tpucare.model import Failure, OnSuccess, Phase, Provisioning, Slot, WorkerReport

CLOUD_MAY_BE_LATE = timedelta(minutes=5)
CRASH_IS_OURS_AFTER = timedelta(seconds=30)
GONE_IS_SURE_AFTER = timedelta(seconds=5)
ON_DEMAND_SILENCE = timedelta(minutes=30)
LONG_LIFE = timedelta(hours=1)
PREEMPTIBLE_LIFE = timedelta(hours=23, minutes=45)
CHECKPOINT_LOOK_EVERY = timedelta(seconds=15)
STALL_FACTOR = 10
INFRASTRUCTURE_LIMIT = 3
# In a row, over several nodes, without a step beyond the furthest: then it is the job's own doing (an OOM, a deadlock).
INFRASTRUCTURE_BUDGET = 12
STALL_BUDGET = 6
# Stops that some worker did not hear, before its node is given up.
STOPS_UNHEARD = 5
STOP_AGAIN_AFTER = timedelta(seconds=10)


# --- words about nodes -----------------------------------------------------------------------------------------------


def deletion(seen: NodeEvidence, why: str, reason: Reason, *, unanswered: bool = False) -> Delete:
    """A Delete of this node, with the proof of quiet that the last probe gives, if it gives one."""
    node = seen.node
    return Delete(node.key, node.id, node.create_time, why, reason, quiet=quiet(seen), unanswered=unanswered)


def quiet(seen: NodeEvidence) -> bool:
    """Every worker answered, and none of them runs anything of ours or holds chips."""
    report = seen.report
    return report is not None and report.all_answer and all(not w.alive and w.chips_free for w in report.workers)


def busy(seen: NodeEvidence, evidence: Evidence) -> Wait | None:
    """
    What is under way on this node, if anything is.

    Nothing is decided about a node meanwhile: what its workers said before a launch ended is no proof of quiet.
    """
    name = seen.node.name
    for kind in (f"launch:{name}", f"stop:{name}", f"delete:{name}"):
        if kind in evidence.in_flight:
            return Wait(f"{kind.partition(':')[0]} of {name} is under way")
    return None


def stop_before(seen: NodeEvidence, evidence: Evidence, memory: Memory, delete: Delete) -> Stop | Delete:
    """Stop the gang first where workers answer and something runs; a stop that was tried is not tried again."""
    tried = f"stop:{seen.node.name}" in evidence.looked
    if tried or seen.workers is None or not _may_run(seen, memory):
        return delete
    return ending(seen, memory, delete.why, then=delete.reason)


def _may_run(seen: NodeEvidence, memory: Memory) -> bool:
    if seen.report is not None:
        return any(worker.alive for worker in seen.report.workers)
    # Not asked since the launch, or since this process runs.
    run = memory.run
    return run is not None and run.node == seen.node.name and not run.stopped


def ending(
    seen: NodeEvidence,
    memory: Memory,
    why: str,
    book: BookName | None = None,
    *,
    then: Reason | None = None,
    gives_up: bool = False,
    advanced: bool = False,
    stacks: bool = False,
) -> Stop:
    """A Stop of whatever runs on this node, with how far it got."""
    node, far = seen.node, standing(seen, memory)
    token = token_of(seen) or (memory.run.token if memory.run and memory.run.node == node.name else f"{node.name}.0")
    return Stop(node.key, node.id, token, why, book, advanced, gives_up, stacks, far.step, far.checkpoint, then)


class Standing(NamedTuple):
    """How far a slot's training ever got, as the workers tell it."""

    step: int | None
    checkpoint: int | None


def standing(seen: NodeEvidence, memory: Memory) -> Standing:
    return Standing(_furthest(seen, "step", memory.step), _furthest(seen, "checkpoint", memory.checkpoint))


def _furthest(seen: NodeEvidence, what: str, known: int | None) -> int | None:
    told = [getattr(worker, what) for worker in (seen.report.workers if seen.report else ())]
    return max((value for value in [*told, known] if value is not None), default=None)


def token_of(seen: NodeEvidence) -> str:
    """The newest run of this very node that its workers know of; empty when there never was one."""
    tokens = {worker.token for worker in (seen.report.workers if seen.report else ())}
    own = [token for token in tokens if _belongs(token, seen.node.name)]
    return max(own, key=lambda token: int(token.rpartition(".")[2]), default="")


def _belongs(token: str, node: str) -> bool:
    name, _, number = token.rpartition(".")
    return name == node and number.isascii() and number.isdigit()


def next_number(seen: NodeEvidence, memory: Memory) -> int:
    """Run numbers continue from what the workers have, when the store does not know (rule 4)."""
    known = memory.run.number if memory.run is not None and memory.run.node == seen.node.name else 0
    told = max((worker.last_number for worker in (seen.report.workers if seen.report else ())), default=0)
    return max(known, told) + 1


def keeps_node(seen: NodeEvidence) -> bool:
    """On-demand and reserved nodes are never deleted for stall, crash or health."""
    return seen.node.provisioning in (Provisioning.ON_DEMAND, Provisioning.RESERVED)


def patience_with_silence(slot: Slot, seen: NodeEvidence) -> timedelta:
    limit = slot.care.unreachable_after
    return max(limit, ON_DEMAND_SILENCE) if keeps_node(seen) else limit


def usual_pause(seen: NodeEvidence) -> timedelta:
    """How long this run may be without a sign of progress and still be going on, by what it showed until now."""
    return (seen.progress.median_gap or timedelta()) * STALL_FACTOR


def made_progress_since(seen: NodeEvidence, mark: Mark) -> bool:
    last = seen.progress.last
    return last is not None and last.observed > mark.observed


def backoff_over(memory: Memory, timers: Timers) -> Wait | None:
    """None when no book asks for patience before the next launch."""
    for name, book in memory.books.items():
        if not timers.passed(book.retry_at, book_cap(BookName(name))):
            assert book.retry_at is not None
            return Wait(f"{name} {book.failures} in a row ({book.reason}); next launch at {book.retry_at:%H:%M:%S}")
    return None


# --- the run ---------------------------------------------------------------------------------------------------------


def decide_unsettled(
    slot: Slot, seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers
) -> Action | None:
    """What was begun with a run, or asked for, and is not at its end: comes before how the run itself is."""
    assert memory.run is not None
    if memory.run.stop_why:
        return _stop_again(seen, evidence, memory, timers)
    if not memory.run.complete:
        return _decide_incomplete(slot, seen, memory, timers)
    if memory.restart_asked:
        return ending(seen, memory, "restart was asked for", None)
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
    return _decide_ended(slot, seen, memory, timers, workers)


def _lives(worker: WorkerReport, run: RunMemory) -> bool:
    return worker.alive and worker.token == run.token and worker.exit_status is None


def _stop_again(seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers) -> Action:
    """A stop was intended: it is repeated until it is known to have served, or the node goes."""
    run = memory.run
    assert run is not None
    last = evidence.looked.get(f"stop:{seen.node.name}")
    if last is None:
        return ending(seen, memory, run.stop_why, then=Reason(run.then_delete) if run.then_delete else None)
    if run.then_delete:
        return deletion(seen, run.stop_why, Reason(run.then_delete))
    if quiet(seen):
        return Settle(Fact.RUN_STOPPED, "its workers are quiet now", seen.node.name, run.token, run.number)
    if not timers.lasted(last, STOP_AGAIN_AFTER, observations=1):
        return Wait("the run was stopped; its processes or the chips are not free yet")
    if keeps_node(seen) or (not run.stuck and run.stops < STOPS_UNHEARD):
        return ending(seen, memory, run.stop_why)
    return deletion(seen, "processes or chips are not free after SIGKILL", Reason.DEAD)


def _decide_incomplete(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action:
    run = memory.run
    assert run is not None
    assert seen.report is not None
    holding = [worker for worker in seen.report.workers if worker.token == run.token]
    if len(holding) == len(seen.report.workers):
        return Settle(Fact.RUN_COMPLETE, "every worker has it", name=seen.node.name, token=run.token)
    book = memory.book(BookName.SETUP)
    if book.failures > slot.care.setup_budget:
        return ending(seen, memory, f"it cannot be launched: {book.reason}", gives_up=True)
    if holding or not quiet(seen):
        why = f"only {len(holding)} of {len(seen.report.workers)} workers took the run"
        return ending(seen, memory, why, BookName.INFRASTRUCTURE)
    if wait := backoff_over(memory, timers):
        return wait
    return Launch(seen.node.key, seen.node.id, run.token, run.number, why="no worker took the launch: once more")


def _decide_ended(
    slot: Slot,
    seen: NodeEvidence,
    memory: Memory,
    timers: Timers,
    workers: tuple[WorkerReport, ...],
) -> Action:
    run = memory.run
    assert run is not None
    own = [worker for worker in workers if worker.token == run.token]
    failed = [worker for worker in own if worker.exit_status not in (None, 0)]
    interrupted = any(worker.signalled or worker.preempted for worker in own)
    if interrupted:
        if any(worker.preempted for worker in own) and not timers.lasted(seen.ended_since, CLOUD_MAY_BE_LATE):
            return Wait("a preemption was announced on the worker; waiting for the cloud's word")
        if not timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER):
            return Wait("the run was interrupted; waiting for the cloud's word")
        return infrastructure(seen, memory, "the run was interrupted by a signal or a notice")
    if failed:
        return _decide_failed(slot, seen, memory, timers, failed)
    if any(w.exit_status is None and not w.alive for w in workers) or len(own) < len(workers):
        if timers.lasted(seen.ended_since, GONE_IS_SURE_AFTER, observations=1):
            return infrastructure(seen, memory, "the run is gone without an exit status (reboot, OOM killer)")
        return Wait("the run is gone from a worker; looking once more")
    if workers[0].exit_status == 0:
        return _decide_success(slot, seen, memory, timers)
    return _decide_living_rest(slot, seen, memory, timers)


def _decide_living_rest(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action:
    # A worker other than 0 finished with 0 and the rest goes on: frameworks do that; only a standstill is a fault.
    since = latest(seen.ended_since, seen.progress.life)
    if timers.lasted(since, max(slot.care.stalled_after, usual_pause(seen))):
        return infrastructure(seen, memory, "some workers finished and the others stand still")
    return Wait("some workers have finished; the others go on")


def infrastructure(seen: NodeEvidence, memory: Memory, why: str) -> Action:
    past, advanced = memory.node(seen.node.name), _advanced(seen, memory)
    if not advanced and memory.book(BookName.INFRASTRUCTURE).failures >= INFRASTRUCTURE_BUDGET:
        return ending(seen, memory, why, BookName.INFRASTRUCTURE, gives_up=True)
    if past is not None and past.infrastructure >= INFRASTRUCTURE_LIMIT and not keeps_node(seen):
        text = f"{why}, {past.infrastructure + 1} times on this node"
        return ending(seen, memory, text, BookName.INFRASTRUCTURE, then=Reason.JUDGED)
    return ending(seen, memory, why, BookName.INFRASTRUCTURE, advanced=advanced)


def _advanced(seen: NodeEvidence, memory: Memory) -> bool:
    """The run got further than any before it; or it cannot be told, and it lived long."""
    furthest = _furthest(seen, "step", None)
    if furthest is not None:
        return memory.step is None or furthest > memory.step
    start, end = seen.phase_since, seen.ended_since
    return start is not None and end is not None and end.observed - start.observed >= LONG_LIFE


def _decide_failed(
    slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers, failed: list[WorkerReport]
) -> Action:
    """A sibling may have been preempted and taken this one with it: the cloud is given time to say so."""
    if not timers.lasted(seen.ended_since, CRASH_IS_OURS_AFTER) or not timers.lasted(
        seen.answering_since, CRASH_IS_OURS_AFTER
    ):
        return Wait("the run failed; waiting whether the cloud reports a preemption")
    worst = failed[0]
    kinds = {worker.failure for worker in failed}
    if Failure.DIRTY_HOST in kinds and not keeps_node(seen):
        return _decide_dirty(slot, seen, memory)
    what = "the run" if worst.phase is Phase.EXITED else worst.phase.value
    text = f"{what} exited with {worst.exit_status}"
    if worst.detail:
        text = f"{text}: {worst.detail}"
    if kinds & {Failure.FETCH, Failure.SETUP, Failure.SECRET_MISSING, Failure.DISK_FULL} or any(
        worker.phase in (Phase.FETCH, Phase.SETUP) for worker in failed
    ):
        return booked(seen, memory, text, BookName.SETUP, slot.care.setup_budget)
    return booked(seen, memory, text, BookName.CRASH, slot.care.crash_budget)


def _decide_dirty(slot: Slot, seen: NodeEvidence, memory: Memory) -> Action:
    """A new node; but where new nodes do not help either, it is the job that finds no TPU, and its budget counts."""
    text = "the host is dirty: device busy, or no TPU found"
    if memory.book(BookName.INFRASTRUCTURE).failures < INFRASTRUCTURE_LIMIT:
        return ending(seen, memory, text, BookName.INFRASTRUCTURE, then=Reason.DEAD)
    if memory.book(BookName.CRASH).failures >= slot.care.crash_budget:
        return ending(seen, memory, f"{text}, on node after node", BookName.CRASH, gives_up=True)
    return ending(seen, memory, text, BookName.CRASH, then=Reason.DEAD)


def booked(seen: NodeEvidence, memory: Memory, why: str, book: BookName, budget: int) -> Action:
    advanced = _advanced(seen, memory) and book is BookName.CRASH
    failures = 1 if advanced else memory.book(book).failures + 1
    return ending(seen, memory, why, book, gives_up=failures > budget, advanced=advanced)


def _decide_success(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action:
    # From the end of the last worker that ended, not of the first.
    if not timers.lasted(latest(seen.ended_since, seen.phase_since), slot.care.success_after):
        return Wait(f"worker 0 finished with exit status 0; sure after {slot.care.success_after}")
    if slot.care.on_success is OnSuccess.RESTART:
        return ending(seen, memory, "finished; on_success is restart", None)
    far = standing(seen, memory)
    why = "the run finished with exit status 0"
    return Settle(Fact.ENDED, why, seen.node.name, end=End.DONE, step=far.step, checkpoint=far.checkpoint)


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
        if dead and not keeps_node(seen):
            why = f"health {seen.node.health.name} and no progress for {slot.care.unhealthy_after}"
            return ending(seen, memory, why, then=Reason.JUDGED)
    if action := _end_of_day(seen, past, memory, timers):
        return action
    if memory.book(BookName.SETUP).failures and seen.report is not None and past_setup(seen.report.workers):
        return Settle(Fact.SETUP_DONE, "setup served on every worker: its failures begin anew", seen.node.name)
    if seen.progress.signals >= 2 and not run.progressed:
        far = standing(seen, memory)
        why, gap = "the run makes progress", seen.progress.median_gap
        return Settle(Fact.RUN_PROGRESSED, why, seen.node.name, step=far.step, checkpoint=far.checkpoint, gap=gap)
    return Wait("running" if seen.progress.signals else "running; no progress signal")


def past_setup(workers: tuple[WorkerReport, ...]) -> bool:
    return all(worker.phase is Phase.RUN for worker in workers)


def _overdue_phase(slot: Slot, seen: NodeEvidence, memory: Memory, timers: Timers) -> Action | None:
    assert seen.report is not None
    phases = {worker.phase for worker in seen.report.workers}
    if phases & {Phase.FETCH, Phase.SETUP, Phase.NONE}:
        if timers.lasted(seen.phase_since, slot.care.setup_timeout):
            return booked(seen, memory, "setup does not end", BookName.SETUP, slot.care.setup_budget)
        return None
    # Only a job that is known to tell of its progress can be late with its first step.
    tells = memory.step is not None
    if tells and seen.progress.signals == 0 and timers.lasted(seen.phase_since, slot.care.first_step_timeout):
        return _stall(seen, memory, memory.node(seen.node.name), "no first step")
    return None


def _stalled(slot: Slot, seen: NodeEvidence, past: NodeMemory, memory: Memory, timers: Timers) -> Action | None:
    progress, run = seen.progress, memory.run
    if run is None or (progress.signals < 2 and not run.progressed):
        return None
    limit = max(slot.care.stalled_after, usual_pause(seen))
    if progress.median_gap is None:
        # An earlier process saw its progress; how often it comes is known from its beginning only.
        limit = max(limit, slot.care.first_step_timeout, timedelta(seconds=run.gap_seconds) * STALL_FACTOR)
    # Time alone is no observation: workers that are asked seldom, or late, have not been seen to stand still.
    stood_still = progress.unchanged >= SUPPORTING_OBSERVATIONS
    if timers.lasted(progress.last, limit) and stood_still:
        return _stall(seen, memory, past, f"no progress for {limit}")
    return None


def _stall(seen: NodeEvidence, memory: Memory, past: NodeMemory | None, why: str) -> Action:
    if memory.book(BookName.STALL).failures >= STALL_BUDGET:
        return ending(seen, memory, why, BookName.STALL, gives_up=True, stacks=True)
    if past is not None and past.stalls >= 1 and not keeps_node(seen):
        text = f"{why}, for the second time on this node"
        return ending(seen, memory, text, BookName.STALL, then=Reason.JUDGED, stacks=True)
    return ending(seen, memory, why, BookName.STALL, stacks=True)


def _end_of_day(seen: NodeEvidence, past: NodeMemory, memory: Memory, timers: Timers) -> Action | None:
    """A preemptible node lives 24 h: ask to save in time, and use the moment when a newer checkpoint is there."""
    node, run = seen.node, memory.run
    if node.provisioning is not Provisioning.PREEMPTIBLE or run is None:
        return None
    if not timers.reached(node.create_time + PREEMPTIBLE_LIFE):
        return None
    checkpoint = _furthest(seen, "checkpoint", None)
    if past.noticed_at is None:
        text = "a preemptible node ends after 24 hours: please save\n"
        return Notice(node.key, run.token, text, "its 24 hours end soon", checkpoint)
    if checkpoint is not None and (past.noticed_checkpoint is None or checkpoint > past.noticed_checkpoint):
        return ending(seen, memory, "its 24 hours end, and a newer checkpoint is complete", then=Reason.FINISHED)
    timers.again(CHECKPOINT_LOOK_EVERY)
    return None
