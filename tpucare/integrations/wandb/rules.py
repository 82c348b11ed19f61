"""
The state of a W&B sweep -> changes to the slots of its fleet. Pure.

A fleet works for a sweep if its job's environment has TPUCARE_SWEEP: this is part of the fleet's text, so it survives
the loss of everything else. Asking W&B is left to `client`, applying the changes to `companion`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tpucare.model.errors import ConfigError

SWEEP_VARIABLE = "TPUCARE_SWEEP"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,127}")

# States of runs, as `wandb.sdk.sweeps.run_state` names them.
IN_FLIGHT = frozenset({"running", "pending", "preempting"})
QUEUED = frozenset({"preempted"})
BAD = frozenset({"failed", "crashed", "killed"})
CANCELED = frozenset({"CANCELED", "CANCELLED"})
# `wandb sweep --stop` also sets FINISHED: runs under way go on, and no new one begins.
NO_NEW_RUNS = frozenset({"FINISHED", "STOPPED", "FAILED", "CRASHED"})


class SweepPath(NamedTuple):
    """`entity/project/id`, as `wandb agent` takes it."""

    entity: str
    project: str
    name: str

    def __str__(self) -> str:
        return "/".join(self)


def parse_path(text: str) -> SweepPath:
    """Raises: ConfigError: it is not `entity/project/id`."""
    parts = text.split("/")
    if len(parts) != 3 or not all(_WORD.fullmatch(part) for part in parts):
        raise ConfigError(f"{text!r} is not a sweep: write entity/project/id, as `wandb sweep` prints it")
    return SweepPath(*parts)


def is_path(text: str) -> bool:
    """True if `parse_path` accepts *text*."""
    return text.count("/") == 2 and all(_WORD.fullmatch(part) for part in text.split("/"))


@dataclass(frozen=True, slots=True)
class SweepReport:
    """
    A sweep as W&B shows it.

    state:    RUNNING, PENDING, PAUSED, FINISHED, CANCELED, ...
    expected: number of runs of the whole sweep; None if it is open
    runs:     number of runs by state
    """

    state: str
    expected: int | None
    runs: Mapping[str, int]

    def count(self, states: frozenset[str]) -> int:
        return sum(number for state, number in self.runs.items() if state in states)

    @property
    def finished(self) -> int:
        return self.runs.get("finished", 0)

    @property
    def in_flight(self) -> int:
        return self.count(IN_FLIGHT)

    @property
    def queued(self) -> int:
        return self.count(QUEUED)

    @property
    def bad(self) -> int:
        return self.count(BAD)

    def text(self) -> str:
        """For people: `RUNNING, 4 of 9 runs finished, 3 running, 1 requeued`."""
        of = f"{self.finished} of {self.expected}" if self.expected is not None else f"{self.finished}"
        counts = [(self.in_flight, "running"), (self.queued, "requeued"), (self.bad, "failed")]
        return ", ".join([self.state, f"{of} runs finished", *(f"{many} {word}" for many, word in counts if many)])


class Verdict(Enum):
    """
    CARE: keep every slot at work           DRAIN: no new runs; only interrupted runs need nodes
    OVER: no run is left                    END: a person cancelled it: its runs end, too
    """

    CARE = "care"
    DRAIN = "drain"
    OVER = "over"
    END = "end"


def judge(report: SweepReport) -> Verdict:
    """The verdict for *report*. An unknown state is CARE."""
    if report.state in CANCELED:
        return Verdict.END
    unfinished = report.in_flight + report.queued
    if report.state in NO_NEW_RUNS:
        return Verdict.DRAIN if unfinished else Verdict.OVER
    begun = sum(report.runs.values())
    # W&B calls it finished only once an agent asks again; but it has no more runs to give out.
    exhausted = report.expected is not None and begun >= report.expected and not unfinished
    return Verdict.OVER if exhausted and report.state == "RUNNING" else Verdict.CARE


def why(report: SweepReport, verdict: Verdict) -> str:
    """The state of the sweep, for people: why its slots end."""
    words = {Verdict.END: "cancelled", Verdict.OVER: "finished", Verdict.DRAIN: "handing out no new runs"}
    return f"{words.get(verdict, 'running')} ({report.text()})"


@dataclass(frozen=True, slots=True)
class SlotState:
    """
    busy:  a run of the job is alive on its node, as far as tpucare knows
    ended: done, failed or taken down, for any reason
    by_us: the sweep's verdict ended it, so the sweep may bring it back
    done:  its agent exited 0: W&B tells agents to do so when it has no runs to give out
    """

    name: str
    busy: bool = False
    ended: bool = False
    by_us: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class SlotChanges:
    """Slots to end now, and slots to bring back."""

    end: tuple[str, ...] = ()
    revive: tuple[str, ...] = ()


def decide(report: SweepReport, slots: Sequence[SlotState], *, patient: bool = True, again: bool = True) -> SlotChanges:
    """
    The slots to end and to bring back, in the order of *slots*.

    A slot whose agent runs ends by itself, when W&B tells the agent to exit; *patient* False: it had time to do so.
    While interrupted runs wait in the queue of a sweep, as many slots as waiting runs stay or come back: first the
    slots that the sweep's verdict ended, then those whose agents exited; the latter unless *again* is False, because
    their last agents got no run of this queue.
    """
    verdict = judge(report)
    alive = [slot for slot in slots if not slot.ended]
    idle = [slot.name for slot in alive if not slot.busy]
    ours = [slot.name for slot in slots if slot.ended and slot.by_us]
    exited = [slot.name for slot in slots if slot.ended and slot.done] if again else []
    if verdict is Verdict.CARE:
        missing = max(0, report.queued - len(alive) - len(ours))
        return SlotChanges(revive=(*ours, *exited[:missing]))
    if verdict is Verdict.END or (verdict is Verdict.OVER and not patient):
        return SlotChanges(end=tuple(slot.name for slot in alive))
    if verdict is Verdict.OVER:
        return SlotChanges(end=tuple(idle))
    needed = report.queued
    return SlotChanges(end=tuple(idle[needed:]), revive=tuple([*ours, *exited][: max(0, needed - len(idle))]))
