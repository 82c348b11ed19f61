"""The records of the W&B stand-in: sweeps, agents and runs. They are mutable, and only `state` changes them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tpucare.testbed.wandb.search import Point


class WandbRunState(StrEnum):
    """The states in `wandb.sdk.sweeps.run_state` of the client."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CRASHED = "crashed"
    KILLED = "killed"
    PREEMPTED = "preempted"


class SweepState(StrEnum):
    """`wandb sweep --stop` sets FINISHED too: runs go on, and no new one begins."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"


ALIVE = frozenset({WandbRunState.PENDING, WandbRunState.RUNNING})


@dataclass(slots=True)
class Run:
    """
    name:       the run id of the client    point: the values that the sweep drew for it
    agent:      the last agent that got it; empty for runs outside sweeps
    begun:      a process has registered since it was last handed out
    preempting: `mark_preempting` was called since then
    heard:      time of the last sign of life of its process; seconds of the state's clock
    starts:     how often it was handed to an agent, or begun without one
    """

    entity: str
    project: str
    name: str
    created: float
    sweep: str = ""
    number: int = 0
    point: Point = field(default_factory=dict)
    display_name: str = ""
    state: WandbRunState = WandbRunState.PENDING
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    agent: str = ""
    begun: bool = False
    preempting: bool = False
    stop_asked: bool = False
    exit_code: int | None = None
    heard: float = 0.0
    starts: int = 0

    @property
    def id(self) -> str:
        return storage_id("Run", self.name, self.project, self.entity)


@dataclass(slots=True)
class Agent:
    """
    run:  the run that it got and has not reported as over; empty = it asks for work
    left: it was ordered to exit, or gave no sign of life for too long
    """

    id: str
    host: str
    sweep: str
    heard: float
    run: str = ""
    left: bool = False


@dataclass(slots=True)
class Sweep:
    """`ahead`: points not handed out yet; `queue`: runs that wait to be resumed, oldest first."""

    entity: str
    project: str
    name: str
    created: float
    text: str
    config: dict[str, Any]
    ahead: Iterator[Point]
    expected: int | None
    display_name: str = ""
    description: str = ""
    state: SweepState = SweepState.RUNNING
    runs: list[str] = field(default_factory=list)
    queue: list[str] = field(default_factory=list)
    agents: dict[str, Agent] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return storage_id("Sweep", self.name, self.project, self.entity)


def storage_id(kind: str, name: str, project: str, entity: str) -> str:
    """The opaque ids of the API: base64 of `Kind:v1:name:project:entity`."""
    return base64.b64encode(f"{kind}:v1:{name}:{project}:{entity}".encode()).decode()


def parse_storage_id(text: str) -> tuple[str, str, str, str] | None:
    """Kind, name, project, entity; None when *text* is not such an id."""
    try:
        kind, _, name, project, entity = base64.b64decode(text, validate=True).decode().split(":")
    except ValueError:
        return None
    return kind, name, project, entity
