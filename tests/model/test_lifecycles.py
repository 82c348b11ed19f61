"""What may follow what, as docs/design.md draws it, and how stores of earlier versions are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.evidence import NOW
from tpucare.adapters.state.store import MEMORY
from tpucare.model.causes import Cause, Reason
from tpucare.model.lifecycles import (
    CREATES,
    NODES,
    REQUESTS,
    RUNS,
    CreateEvent,
    CreateState,
    NodeEvent,
    NodeStatus,
    RequestEvent,
    RequestState,
    RunEvent,
    RunState,
    after,
)
from tpucare.model.memory import CreateIntent, DeleteIntent, Memory, NodeMemory, RunMemory

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
LIFECYCLES: dict[str, tuple[Any, Any, Any]] = {
    "create": (CreateState, CreateEvent, CREATES),
    "queued request": (RequestState, RequestEvent, REQUESTS),
    "node": (NodeStatus, NodeEvent, NODES),
    "run": (RunState, RunEvent, RUNS),
}


def drawn(name: str) -> str:
    """One line for each event and the state that follows: which states it leads there."""
    _, _, table = LIFECYCLES[name]
    steps: dict[tuple[Any, Any], list[str]] = {}
    for (state, event), to in table.items():
        steps.setdefault((event, to), []).append(state.value)
    width = max(len(event.value) for event, _ in steps)
    return "\n".join(f"{event.value:{width}}  {', '.join(of)} -> {to.value}" for (event, to), of in steps.items())


@pytest.mark.parametrize("name", LIFECYCLES)
def test_the_design_draws_each_lifecycle_as_it_is(name: str) -> None:
    assert f"```\n{drawn(name)}\n```" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", LIFECYCLES)
def test_each_state_can_be_reached_and_each_event_changes_something(name: str) -> None:
    states, events, table = LIFECYCLES[name]
    reached = {next(iter(states))}
    for _ in states:
        reached |= {to for (of, _), to in table.items() if of in reached}
    assert reached == set(states)
    assert {event for _, event in table} == set(events)
    assert all(to is not of for (of, _), to in table.items())


def test_an_event_that_says_nothing_of_a_state_leaves_it() -> None:
    """Answers come late: a call may be cut off after its operation was seen to run."""
    assert after(CREATES, CreateState.RUNNING, CreateEvent.NO_ANSWER) is CreateState.RUNNING
    assert after(NODES, NodeStatus.REVIVED, NodeEvent.SHOWN_DEAD) is NodeStatus.REVIVED, "no proof any more"
    assert after(RUNS, RunState.FINISHED, RunEvent.NODE_GONE) is RunState.FINISHED, "a success is taken back by nothing"


def test_a_run_is_wanted_or_being_stopped_or_past() -> None:
    for state in RunState:
        assert [state.is_wanted, state.is_stopping, state.is_past].count(True) == 1


# --- stores of earlier versions, which had booleans -------------------------------------------------------------------


def read(**old: Any) -> Memory:
    return MEMORY.decode(json.dumps({"fleet": "pod", **old}), "slot pod-0")


@pytest.mark.parametrize(
    ("old", "state"),
    [
        ({}, CreateState.SENT),
        ({"lost": True}, CreateState.ANSWER_LOST),
        ({"lost": True, "refused": "Quota"}, CreateState.IN_DOUBT),
        ({"accepted": True, "operation": "op"}, CreateState.RUNNING),
        ({"accepted": True, "unread": True, "refused": "denied"}, CreateState.UNREADABLE),
        ({"accepted": True}, CreateState.AWAITED),
        ({"accepted": True, "lost": True}, CreateState.AWAITED),
        ({"accepted": True, "refused": "no more capacity"}, CreateState.REFUSED),
        ({"accepted": True, "failed": True, "refused": "no more capacity"}, CreateState.FAILED),
    ],
)
def test_a_create_of_an_old_store(old: dict[str, Any], state: CreateState) -> None:
    told = {"name": "pod-0-a3", "number": 3, "zone": "z", "place": "p", "asked_at": NOW.isoformat(), **old}
    want = CreateIntent("pod-0-a3", 3, "z", "p", NOW, state)
    for abandoned in (False, True):
        (create,) = read(creates=[{**told, "superseded": abandoned}]).creates
        assert (create.state, create.abandoned) == (state, abandoned)
        assert (create.operation, create.refused) == (old.get("operation", ""), old.get("refused", ""))
        assert (create.name, create.number, create.asked_at) == (want.name, want.number, want.asked_at)


@pytest.mark.parametrize(
    ("old", "status", "delete"),
    [
        ({}, NodeStatus.LIVE, None),
        ({"dead": True}, NodeStatus.DEAD, None),
        ({"revived": True}, NodeStatus.REVIVED, None),
        ({"taken": True, "out_of_sight": True}, NodeStatus.TAKEN, None),
        ({"out_of_sight": True}, NodeStatus.OUT_OF_SIGHT, None),
        ({"delete_asked_at": NOW.isoformat()}, NodeStatus.LIVE, DeleteIntent(NOW, Reason.ASKED)),
        (
            {
                "dead": True,
                "delete_asked_at": NOW.isoformat(),
                "delete_reason": "judged",
                "delete_why": "silent",
                "delete_cause": "silent",
                "delete_next_at": NOW.isoformat(),
                "delete_accepted": True,
                "delete_quiet": True,
            },
            NodeStatus.DEAD,
            DeleteIntent(NOW, Reason.JUDGED, Cause.SILENT, "silent", NOW, accepted=True, quiet=True),
        ),
    ],
)
def test_a_node_of_an_old_store(old: dict[str, Any], status: NodeStatus, delete: DeleteIntent | None) -> None:
    told = {"name": "pod-0-a3", "zone": "z", "id": 7, "create_time": NOW.isoformat(), "delete_tries": 2, "asked": True}
    (node,) = read(nodes=[{**told, **old}]).nodes
    want = NodeMemory("pod-0-a3", "z", 7, NOW, status=status, delete=delete, delete_tries=2, requested=True)
    assert node == want


@pytest.mark.parametrize(
    ("old", "state"),
    [
        ({}, RunState.LAUNCHING),
        ({"complete": True}, RunState.RUNNING),
        ({"complete": True, "finished": True}, RunState.FINISHED),
        ({"complete": True, "finished": True, "stopped": True}, RunState.FINISHED),
        ({"complete": True, "over": True}, RunState.OVER),
        ({"complete": True, "over": True, "stop_why": "restart"}, RunState.STOPPING),
        ({"complete": True, "stop_why": "stalled"}, RunState.STOPPING),
        ({"stop_why": "stalled", "stuck": True}, RunState.STUCK),
        ({"complete": True, "stop_why": "stalled", "stopped": True}, RunState.STOPPED),
        ({"complete": True, "stopped": True}, RunState.ENDED),
    ],
)
def test_a_run_of_an_old_store(old: dict[str, Any], state: RunState) -> None:
    told = {"token": "pod-0-a3.1", "node": "pod-0-a3", "number": 1, "launched_at": NOW.isoformat()}
    for then, reason in (("", None), ("judged", Reason.JUDGED)):
        run = read(run={**told, **old, "then_delete": then}).run
        kept = {"complete": old.get("complete", False), "stop_why": old.get("stop_why", "")}
        assert run == RunMemory("pod-0-a3.1", "pod-0-a3", 1, NOW, state, then_delete=reason, **kept)


def test_a_memory_of_this_version_is_read_as_it_is() -> None:
    known = Memory(
        "pod",
        creates=(CreateIntent("pod-0-a4", 4, "z", "p", NOW, CreateState.IN_DOUBT, abandoned=True, refused="Quota"),),
        nodes=(NodeMemory("pod-0-a3", "z", 7, NOW, status=NodeStatus.TAKEN, delete=DeleteIntent(NOW, Reason.DEAD)),),
        run=RunMemory("pod-0-a3.1", "pod-0-a3", 1, NOW, RunState.STUCK, then_delete=Reason.SURPLUS),
    )
    assert MEMORY.decode(MEMORY.encode(known), "slot pod-0") == known
