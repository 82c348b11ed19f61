"""What the W&B stand-in knows of projects, sweeps, agents and runs. Mutable on purpose: `state` alone changes them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tpucare.testbed.wandb.search import Point


class WandbRunState(StrEnum):
    """As `wandb.sdk.sweeps.run_state` of the client names them."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CRASHED = "crashed"
    KILLED = "killed"
    PREEMPTED = "preempted"


class SweepState(StrEnum):
    """FINISHED is also what `wandb sweep --stop` sets: runs under way go on, no new one begins."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"


ALIVE = frozenset({WandbRunState.PENDING, WandbRunState.RUNNING})


@dataclass(slots=True)
class Run:
    """
    name:       the run id of the client    point: what the sweep drew for it
    agent:      who was last given it; empty for runs outside sweeps
    begun:      a process has registered since it was last given out
    preempting: `mark_preempting` was called since then
    heard:      last sign of life of its process; seconds of the world's clock
    starts:     how often it was given to an agent, or begun by itself
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
    run:  what it was given and has not reported as over; empty = it asks for work
    left: it was told to exit, or was not heard of for too long
    """

    id: str
    host: str
    sweep: str
    heard: float
    run: str = ""
    left: bool = False


@dataclass(slots=True)
class Sweep:
    """`ahead`: points not given out yet; `queue`: runs that wait to be resumed, oldest first."""

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
    """Kind, name, project, entity; None when *text* is no such id."""
    try:
        kind, _, name, project, entity = base64.b64decode(text, validate=True).decode().split(":")
    except ValueError:
        return None
    return kind, name, project, entity
