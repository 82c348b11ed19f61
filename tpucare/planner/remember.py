"""
How memory changes: by what is about to be done, by what came of it, and by the death of a process.

Pure. `intend` is written to disk before the effect, `remember` after it, `recover` once at start, for what a killed
process left half done. Here is what each action comes to; the parts are `remember_creates`, `remember_deletes`,
`remember_runs`, and for what listings and probes show `remember_seen`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime

from tpucare.model.actions import (
    Action,
    Create,
    Delete,
    Fact,
    Launch,
    Look,
    Notice,
    Poll,
    PushKey,
    Reason,
    Settle,
    Stop,
    Vouch,
)
from tpucare.model.memory import BookName, End, Memory, RunMemory, Trust
from tpucare.planner.remember_creates import (
    after_create,
    after_look,
    after_poll,
    intend_create,
    keep,
    served,
    supersede,
)
from tpucare.planner.remember_deletes import after_delete, intend_delete, undelete
from tpucare.planner.remember_runs import (
    after_launch,
    after_stop,
    attempted,
    far,
    has_served,
    intend_launch,
    intend_stop,
    progress_over,
    row_over,
    with_a_lost_run,
)
from tpucare.planner.remember_seen import believed


def intend(memory: Memory, action: Action, now: datetime, rng: random.Random) -> Memory:
    """Memory with the intent of *action*, to be on disk before the effect begins."""
    match action:
        case Create():
            return intend_create(memory, action, now)
        case Delete():
            return with_a_lost_run(intend_delete(memory, action, now), action, now, rng)
        case Launch():
            return intend_launch(memory, action, now)
        case Stop():
            return intend_stop(memory, action, now, rng)
        case Notice():
            past = memory.node(action.key.name)
            if past is not None:
                memory = memory.with_node(replace(past, noticed_at=now, noticed_checkpoint=action.checkpoint))
            return memory
        case Settle():
            return _settle(memory, action, now, rng)
    return memory


def _settle(memory: Memory, action: Settle, now: datetime, rng: random.Random) -> Memory:
    further = _is_further(memory, action)
    memory, run = far(memory, action.step, action.checkpoint), memory.run
    match action.fact:
        case Fact.CREATE_SUPERSEDED:
            return supersede(memory, action, now, rng)
        case Fact.CREATE_KEPT:
            return keep(memory, action.name)
        case Fact.NODE_OUT_OF_SIGHT:
            past = memory.node(action.name)
            return memory.with_node(replace(past, out_of_sight=True)) if past is not None else memory
        case Fact.RUN_ADOPTED:
            run = RunMemory(action.token, action.name, action.number, launched_at=now, complete=True)
            return attempted(replace(memory, run=run), action.name)
        case Fact.RUN_COMPLETE:
            return replace(memory, run=replace(run, complete=True)) if run is not None else memory
        case Fact.RUN_STOPPED:
            return replace(memory, run=replace(run, stopped=True)) if run is not None else memory
        case Fact.RUN_OVER | Fact.RUN_BACK:
            return replace(memory, run=replace(run, over=action.fact is Fact.RUN_OVER)) if run is not None else memory
        case Fact.FIRST_USE:
            return believed(memory, action.name, Trust.FIRST_USE, action.publisher, now)
        case Fact.SETUP_DONE:
            return row_over(memory, BookName.SETUP)
        case Fact.RUN_PROGRESSED:
            if further:
                memory = progress_over(memory)
            if run is None:
                return memory
            gap = action.gap.total_seconds() if action.gap is not None else run.gap_seconds
            memory = replace(memory, step_job=run.job, gap_seconds=gap)
            return replace(memory, run=replace(run, progressed=True, gap_seconds=gap))
        case Fact.RUN_FINISHED:
            return replace(memory, run=replace(run, finished=True)) if run is not None else memory
        case Fact.RUN_LASTED:
            return has_served(memory)
        case Fact.TRIED_AGAIN:
            return replace(memory.without_end(), tries=memory.tries + 1)
        case Fact.ENDED:
            if action.end is End.DONE:
                memory = has_served(memory)
            return replace(memory, end=action.end, end_why=action.why, end_cause=action.cause, ended_at=now)


def _is_further(memory: Memory, action: Settle) -> bool:
    """A step that an epoch counts anew gets no further; a newer checkpoint does."""
    if action.step is not None and (memory.step is None or action.step > memory.step):
        return True
    if memory.checkpoint is None:
        return action.step is None and action.checkpoint is not None
    return action.checkpoint is not None and action.checkpoint > memory.checkpoint


def remember(
    memory: Memory, action: Action, result: object, error: Exception | None, now: datetime, rng: random.Random
) -> Memory:
    """Memory after *action* ended with *result* or *error*."""
    match action:
        case Create():
            return after_create(memory, action, result, error, now, rng)
        case Delete():
            return after_delete(memory, action, error, now, rng)
        case Launch():
            return after_launch(memory, action, result, error, now, rng)
        case Stop():
            return after_stop(memory, action, result)
        case Look():
            return after_look(memory, action, result, error, now, rng)
        case Poll():
            return after_poll(memory, action, result, error, now, rng)
        case Vouch():
            # The result is whether guest attributes vouch for every worker.
            if error is None and result is True:
                return believed(memory, action.key.name, Trust.VOUCHED, action.publisher, now)
            return memory
        case PushKey():
            past = memory.node(action.key.name)
            return memory.with_node(replace(past, keyed=True)) if past is not None and error is None else memory
    return memory


def changed_meanwhile(memory: Memory, name: str) -> Memory:
    """The node that was to be deleted is not the one decided about: the intent is void."""
    past = memory.node(name)
    return memory.with_node(undelete(past)) if past is not None else memory


def recover(memory: Memory) -> Memory:
    """
    What a killed process left half done, as the next one has to see it.

    A create without an answer may have arrived. A delete that was judged, and not accepted, is judged anew: the node
    may be well again; unless its successor is there or asked for, which the slot has by now. A stop or launch under way
    is found out by the next probe.
    """
    succeeded = any(not intent.superseded for intent in memory.creates)
    succeeded = succeeded or any(past.serves for past in memory.nodes)
    for intent in memory.creates:
        if not intent.accepted:
            memory = memory.with_create(replace(intent, lost=True, retry_at=None))
    if memory.run is not None and memory.run.then_delete == Reason.JUDGED:
        # As of a delete: its run is stopped, and whether its node is well is found out anew.
        memory = replace(memory, run=replace(memory.run, then_delete=""))
    for past in memory.nodes:
        if past.launched:
            # Stores of before kept the create open until its operation was over.
            memory = served(memory, past)
        judged = past.delete_reason == Reason.JUDGED and not past.delete_accepted
        if past.is_being_deleted and judged and not succeeded:
            memory = memory.with_node(undelete(past))
        elif past.is_being_deleted:
            memory = memory.with_node(replace(past, delete_next_at=None))
    return memory
