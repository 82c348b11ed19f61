"""
The commands of people (up, down, pause, retry, confirm, ...) as changes of a slot's memory. Pure.

Daemon, CLI and Python API call these through `Engine.change`, which writes the memory before it returns. What follows
from the desired state is left to `decide`.
"""

from __future__ import annotations

from dataclasses import replace

from tpucare.model.lifecycles import NodeStatus, RunEvent
from tpucare.model.memory import DesiredState, End, FailureCounter, Memory, Refusal


def up(memory: Memory) -> Memory:
    """`apply`: UP; a slot that had ended or was down starts without backoffs and failure streaks."""
    if memory.wish is DesiredState.DOWN or memory.end is not End.NONE:
        memory = retry(memory)
    return replace(memory, wish=DesiredState.UP)


def down(memory: Memory) -> Memory:
    """A slot that is wanted again after it does not remember that demand once wanted it."""
    return replace(memory, wish=DesiredState.DOWN, awake=False)


def wake(memory: Memory) -> Memory:
    """Demand wants a node of this elastic slot."""
    return replace(memory, awake=True)


def rest(memory: Memory) -> Memory:
    """No demand wants a node of this elastic slot: its node is deleted, its numbers, failures and places are kept."""
    return replace(memory, awake=False)


def pause(memory: Memory) -> Memory:
    """Observe, change nothing."""
    return replace(memory, wish=DesiredState.PAUSED)


def resume(memory: Memory) -> Memory:
    return replace(memory, wish=DesiredState.UP)


def retry(memory: Memory) -> Memory:
    """End every backoff, blocked place and failure streak. Totals and the furthest step are kept."""
    places = {
        key: replace(
            place,
            failures=0,
            retry_at=None,
            kind=Refusal.NONE,
            blocked=False,
            refusals=0,
            own_quota_since=None,
            unanswered_nodes=0,
            since=None,
            held_nodes=0,
        )
        for key, place in memory.places.items()
    }
    books = {name: FailureCounter(total=counter.total) for name, counter in memory.books.items()}
    run = memory.run
    if run is not None and memory.end is End.DONE:
        # On a kept node the finished run would else end the slot once more.
        run = replace(run.after(RunEvent.WANTED_ANEW), then_delete=None)
    return replace(memory.without_end(), places=places, books=books, run=run, failed_since=None)


def confirm(memory: Memory) -> Memory:
    """
    A person confirms that no older node of this slot trains, of the nodes in doubt now.

    Without such a node the confirmation is about something else (the brake), and opens no later fence. For nodes that
    cannot be read, or have another owner now, it holds until they are seen again.
    """
    away = (NodeStatus.TAKEN, NodeStatus.OUT_OF_SIGHT)
    lost = [past for past in memory.nodes if past.may_be_training and past.status in away]
    for past in lost:
        memory = memory.with_node(replace(past, written_off=True))
    return replace(memory, fence_confirmed=memory.fence_confirmed or memory.has_older_node_in_doubt)


def restart(memory: Memory) -> Memory:
    """`apply --restart`: a new run of the job as declared now, on the present node."""
    return replace(_unfinished(memory), restart_asked=True)


def replace_node(memory: Memory) -> Memory:
    """`apply --replace`: a new node, as declared now."""
    return replace(_unfinished(memory), replace_asked=True)


def _unfinished(memory: Memory) -> Memory:
    """A finished run counts as running again, so that the slot is not done."""
    return replace(memory, run=memory.run.after(RunEvent.WANTED_ON)) if memory.run is not None else memory
