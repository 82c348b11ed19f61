"""
Small helpers that build evidence and memory for tables: each case then says only what it is about.

The slot is `pod-0`, its nodes have one to four workers in one zone, and now is ten hours of observed time after start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tpucare.model.actions import Action
from tpucare.model.causes import Cause, Reason
from tpucare.model.evidence import Evidence, Mark, Moment, NodeEvidence, Progress, ProjectEvidence, Voucher
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import CreateIntent, DeleteIntent, Memory, NodeMemory, RunMemory
from tpucare.model.resources import (
    LABEL_OWNER,
    Care,
    Endpoint,
    Health,
    Job,
    Node,
    NodeKey,
    NodeState,
    Place,
    Provisioning,
    Slot,
    workers_of,
)
from tpucare.model.runs import Contact, NodeReport, Phase, WorkerReport
from tpucare.planner.decide import decide

PROJECT = "my-project"
US, EU = "us-central1-a", "europe-west4-a"
NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
OBSERVED = timedelta(hours=10)
POLL = timedelta(seconds=5)
PASSES = OBSERVED // POLL
HERE = Moment(NOW, OBSERVED, PASSES, NOW)
OWNER = "us"
WORKERS = 2


def ago(seconds: float = 0, *, minutes: float = 0, hours: float = 0) -> Mark:
    """That long ago in observed time, one pass every five seconds."""
    length = timedelta(seconds=seconds, minutes=minutes, hours=hours)
    return Mark(OBSERVED - length, PASSES - length // POLL)


def before(seconds: float = 0, *, minutes: float = 0, hours: float = 0) -> datetime:
    """That long ago in wall time."""
    return NOW - timedelta(seconds=seconds, minutes=minutes, hours=hours)


def after(seconds: float = 0, *, minutes: float = 0, hours: float = 0) -> datetime:
    return NOW + timedelta(seconds=seconds, minutes=minutes, hours=hours)


def place(zone: str = US, tier: Provisioning = Provisioning.SPOT, kind: str = "v3-16") -> Place:
    return Place(zone, kind, tier, "tpu-ubuntu2204-base", workers=WORKERS)


def slot(*places: Place, job: bool = True, **care: Any) -> Slot:
    todo = Job(run="python3 train.py") if job else None
    return Slot("pod-0", "pod", PROJECT, places or (place(),), todo, Care(**care))


def name_of(number: int) -> str:
    return f"pod-0-a{number}"


def node(
    state: NodeState | int | str = NodeState.READY,
    number: int = 0,
    *,
    zone: str = US,
    tier: Provisioning = Provisioning.SPOT,
    health: Health = Health.UNSPECIFIED,
    born: datetime | None = None,
    owner: str = OWNER,
    endpoints: int = WORKERS,
) -> Node:
    told = NodeState[state] if isinstance(state, str) else NodeState(state)
    return Node(
        NodeKey(PROJECT, zone, name_of(number)),
        id=1000 + number,
        create_time=born or before(hours=6) + timedelta(minutes=number),
        state=told,
        health=health,
        accelerator_type="v3-16",
        provisioning=tier,
        labels={LABEL_OWNER: owner},
        endpoints=tuple(Endpoint(f"10.0.{number}.{index}", f"34.0.{number}.{index}") for index in range(endpoints)),
    )


def token(number: int = 0, run: int = 1) -> str:
    return f"{name_of(number)}.{run}"


QUIET = WorkerReport(Contact.ANSWERED)
SILENT = WorkerReport(Contact.SILENT)
REFUSED = WorkerReport(Contact.AUTH_REFUSED)
CHANGED = WorkerReport(Contact.HOST_KEY_CHANGED)
FOREIGN = WorkerReport(Contact.ANSWERED, alive=True, chips_free=False)


def running(run: str = token(), phase: Phase = Phase.RUN, **more: Any) -> WorkerReport:
    known = {"alive": True, "chips_free": False, "last_number": int(run.rpartition(".")[2])}
    return WorkerReport(Contact.ANSWERED, token=run, phase=phase, **{**known, **more})


def ended(status: int | None, run: str = token(), **more: Any) -> WorkerReport:
    known: dict[str, Any] = {"phase": Phase.EXITED, "last_number": int(run.rpartition(".")[2])}
    return WorkerReport(Contact.ANSWERED, token=run, exit_status=status, **{**known, **more})


def seen(
    what: Node | None = None, workers: Iterable[WorkerReport] | WorkerReport | None = None, **more: Any
) -> NodeEvidence:
    """A node that was first seen an hour ago. One worker's report stands for all workers."""
    what = what or node()
    answers = (workers,) * WORKERS if isinstance(workers, WorkerReport) else tuple(workers or ())
    report = NodeReport(what.key, what.id, answers) if workers is not None else None
    all_answer = report is not None and report.all_answer
    marks: dict[str, Any] = {
        "listed": True,
        "zone_unreachable": False,
        "seen_since": ago(hours=1),
        "state_since": ago(hours=1),
        "workers": workers_of(what, external=True, expected=WORKERS),
        "voucher": Voucher.VOUCHED,
        "answering_since": ago(minutes=50) if all_answer else None,
        "phase_since": ago(minutes=40) if report is not None else None,
        "progress": Progress(token(), 100, ago(20), timedelta(seconds=15), ago(10)),
    }
    return NodeEvidence(what, report=report, **{**marks, **more})


NO_PROGRESS = Progress()


_OF_PROJECT = {one.name for one in fields(ProjectEvidence)}


def evidence(*nodes: NodeEvidence, **more: Any) -> Evidence:
    """What a slot is decided on; keywords of its project's evidence, too, which is fresh and complete."""
    common = {"fresh": True, "complete": True} | {key: more.pop(key) for key in _OF_PROJECT & more.keys()}
    return Evidence(ProjectEvidence(**common), nodes=nodes, **more)


def past(number: int = 0, **more: Any) -> NodeMemory:
    what = node(number=number)
    known: dict[str, Any] = {
        "zone": US,
        "id": what.id,
        "create_time": what.create_time,
        "place": place().key,
        "answered": True,
    }
    return NodeMemory(name_of(number), **{**known, **more})


def going(asked_at: datetime = NOW, **more: Any) -> DeleteIntent:
    """A delete of ours that was asked for."""
    return DeleteIntent(asked_at, **{"reason": Reason.ASKED, "cause": Cause.REPORTED_DEAD, **more})


def launched(number: int = 0, **more: Any) -> NodeMemory:
    return past(number, **{"launched": True, "attempt": number + 1, **more})


def run(number: int = 0, n: int = 1, **more: Any) -> RunMemory:
    return RunMemory(
        token(number, n),
        name_of(number),
        n,
        **{
            "launched_at": before(hours=1),
            "state": RunState.RUNNING,
            "complete": more.get("state") is not RunState.LAUNCHING,
            "progressed": True,
            "stop_cause": Cause.STALLED if more.get("stop_why") else Cause.UNRECORDED,
            **more,
        },
    )


def intent(number: int = 0, **more: Any) -> CreateIntent:
    known: dict[str, Any] = {"zone": US, "place": place().key, "asked_at": before(minutes=1)}
    return CreateIntent(name_of(number), number, **{**known, **more})


def memory(*nodes: NodeMemory, **more: Any) -> Memory:
    return Memory(**{"fleet": "pod", "nodes": nodes, "next_number": 10, "attempts": len(nodes), **more})


TRAINS = memory(launched(), run=run())
FRESH = memory(past())


def act(what: Evidence, known: Memory, declared: Slot | None = None, now: Moment = HERE) -> Action:
    return decide(declared or slot(), what, known, now)


def later(length: timedelta, now: Moment = HERE) -> Moment:
    """That much later, everything observed."""
    cloud = now.cloud + length if now.cloud is not None else None
    return replace(
        now, wall=now.wall + length, observed=now.observed + length, passes=now.passes + length // POLL, cloud=cloud
    )
