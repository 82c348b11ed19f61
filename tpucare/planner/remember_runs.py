"""
How memory changes by runs: launched, stopped, how far they got, and the books of what goes wrong with them.

Pure. Whether a run is started again, and when a book is full, is decided by `plan_run`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta

from tpucare.model.actions import Delete, Launch, Stop
from tpucare.model.errors import CommandFailed, ConfigError
from tpucare.model.memory import ENDED_BY_PROGRESS, Book, BookName, End, Memory, RunMemory
from tpucare.model.runs import LaunchResult, StopResult
from tpucare.planner import placement
from tpucare.planner.backoff import BOOK_BACKOFF
from tpucare.planner.remember_creates import served

# A run that lived for as long, by the wall clock, has trained: one that crashes after a minute each time never did.
SERVED_AFTER = timedelta(hours=1)


def intend_launch(memory: Memory, action: Launch, now: datetime) -> Memory:
    memory = attempted(_of_job(_trained(memory, now), action.job), action.key.name)
    run = RunMemory(action.token, action.key.name, action.number, launched_at=now, job=action.job)
    return replace(memory, run=run, restart_asked=False, fence_confirmed=False)


def _of_job(memory: Memory, job: str) -> Memory:
    """How far an older job got, and what failed of it, says nothing of another one."""
    # A store of an earlier version does not know which it launched last.
    known = memory.launched_job or memory.step_job or (memory.run.job if memory.run is not None else "")
    memory = replace(memory, launched_job=job)
    if not known or known == job:
        return memory
    for name in BookName:
        memory = row_over(memory, name)
    return replace(
        memory, step=None, checkpoint=None, step_job="", gap_seconds=0.0, last_step=None, last_checkpoint=None
    )


def intend_stop(memory: Memory, action: Stop, now: datetime, rng: random.Random) -> Memory:
    run = memory.run
    number = int(action.token.rpartition(".")[2])
    memory = _trained(memory, now)
    if run is None or run.node != action.key.name:
        run = RunMemory(action.token, action.key.name, number, launched_at=now)
    then = action.then.value if action.then else run.then_delete
    run = replace(run, stop_why=action.why, stop_cause=action.cause, then_delete=then)
    run = replace(run, stopped=False, stops=run.stops + 1, finished=False)
    memory = far(replace(memory, run=run, restart_asked=False), action.step, action.checkpoint)
    if action.book is not None:
        memory = _enter(memory, action.book, action.why, action.advanced, now, rng)
        memory = _count_on_node(memory, action)
    if action.served:
        # The next run may begin anew: what this one reached is no measure for it.
        memory = replace(has_served(memory), step=None, checkpoint=None)
    if action.gives_up:
        memory = _failed(memory, action, now)
    return memory


def with_a_lost_run(memory: Memory, action: Delete, now: datetime, rng: random.Random) -> Memory:
    """The run goes with its node: what a Stop would book."""
    memory = _trained(memory, now)
    if action.book is not None:
        memory = _enter(far(memory, action.step, action.checkpoint), action.book, action.why, action.advanced, now, rng)
    if action.gives_up:
        memory = _failed(memory, action, now)
    return memory


def _failed(memory: Memory, action: Stop | Delete, now: datetime) -> Memory:
    since, tries = memory.failed_since or now, memory.tries if memory.failed_since is not None else 0
    memory = replace(memory, end=End.FAILED, end_why=action.why, end_cause=action.cause, ended_at=now)
    return replace(memory, failed_since=since, tries=tries)


def saw(memory: Memory, step: int | None, checkpoint: int | None) -> Memory:
    """Where the run of now was seen last, which need not be the furthest."""
    last_step = step if step is not None else memory.last_step
    last_checkpoint = checkpoint if checkpoint is not None else memory.last_checkpoint
    if (last_step, last_checkpoint) == (memory.last_step, memory.last_checkpoint):
        return memory
    return replace(memory, last_step=last_step, last_checkpoint=last_checkpoint)


def far(memory: Memory, step: int | None, checkpoint: int | None) -> Memory:
    """The furthest that training ever got is kept: a crash short of it is one more of the same row."""
    if step is not None and step != memory.step and memory.run is not None:
        memory = replace(memory, step_job=memory.run.job)
    return replace(
        memory,
        step=step if step is not None else memory.step,
        checkpoint=checkpoint if checkpoint is not None else memory.checkpoint,
    )


def _enter(memory: Memory, name: BookName, why: str, advanced: bool, now: datetime, rng: random.Random) -> Memory:
    book = memory.book(name)
    failures = 1 if advanced else book.failures + 1
    if advanced:
        memory = replace(memory, failed_since=None)
    backoff = BOOK_BACKOFF[name]
    retry_at = now + backoff.delay(failures, rng) if backoff is not None else None
    if name is BookName.INFRASTRUCTURE and failures == 1:
        retry_at = None
    return memory.with_book(name, Book(failures, book.total + 1, retry_at, why))


def progress_over(memory: Memory) -> Memory:
    """It got further, lived long or ended well: whatever fails next is the first of its row."""
    for name in ENDED_BY_PROGRESS:
        memory = row_over(memory, name)
    return replace(memory, failed_since=None)


def has_served(memory: Memory) -> Memory:
    """The run of now did what its job is for: where that job fails later, it is tried again."""
    return _of_served(progress_over(memory))


def _of_served(memory: Memory) -> Memory:
    """The job of a run that was taken in is not known: which one trained before is no less true for it."""
    run = memory.run
    return replace(memory, served_job=run.job) if run is not None and run.job else memory


def _trained(memory: Memory, now: datetime) -> Memory:
    """A run that made progress and lived long has trained, however it ends."""
    run = memory.run
    if run is None or run.stop_why or not run.progressed or now - run.launched_at < SERVED_AFTER:
        return memory
    return _of_served(memory)


def row_over(memory: Memory, name: BookName) -> Memory:
    """It went well once: the next failure is the first of a row again."""
    book = memory.book(name)
    return memory.with_book(name, replace(book, failures=0, retry_at=None)) if book.failures else memory


def _count_on_node(memory: Memory, action: Stop) -> Memory:
    past = memory.node(action.key.name)
    if past is None:
        return memory
    if action.book is BookName.STALL:
        return memory.with_node(replace(past, stalls=1 if action.advanced else past.stalls + 1))
    if action.book is BookName.INFRASTRUCTURE:
        count = 1 if action.advanced else past.infrastructure + 1
        return memory.with_node(replace(past, infrastructure=count))
    return memory


def attempted(memory: Memory, name: str) -> Memory:
    """A run is about to be there, or was found there: from now on the node is fenced, and its create is settled."""
    past = memory.node(name)
    if past is None:
        return memory
    attempts = memory.attempts if past.attempt else memory.attempts + 1
    past = replace(past, attempt=past.attempt or attempts, launched=True)
    if past.place and memory.place(past.place).held_nodes:
        memory = memory.with_place(past.place, placement.served(memory.place(past.place)))
    return served(replace(memory.with_node(past), attempts=attempts), past)


def after_launch(
    memory: Memory, action: Launch, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    run = memory.run
    if run is None or run.token != action.token:
        return memory
    if isinstance(result, LaunchResult) and result.complete:
        return replace(memory, run=replace(run, complete=True, launch_book=""))
    errors = [e for e in result.workers if e is not None] if isinstance(result, LaunchResult) else [error]
    reason = next((str(e) for e in errors if e is not None), "launch failed")
    human = any(isinstance(e, CommandFailed | ConfigError) for e in errors)
    book = BookName.SETUP if human else BookName.INFRASTRUCTURE
    memory = replace(memory, run=replace(run, launch_book=book.value))
    return _enter(memory, book, reason, advanced=False, now=now, rng=rng)


def after_stop(memory: Memory, action: Stop, result: object) -> Memory:
    run = memory.run
    # Another node's run may have been adopted meanwhile: it was not stopped.
    if run is None or run.node != action.key.name or not isinstance(result, StopResult):
        return memory
    if result.quiet:
        return replace(memory, run=replace(run, stopped=True))
    # What every worker heard and did not obey is not asked again; what some did not hear is.
    deaf = any(isinstance(worker, Exception) for worker in result.workers)
    return memory if deaf else replace(memory, run=replace(run, stuck=True))
