"""
What the state of a W&B sweep means for the slots of its fleet. Pure.

A fleet is a sweep's when its job's environment names one in TPUCARE_SWEEP: that travels with the fleet's text, so it
survives whatever else is lost. Asking W&B is `sweeps_client`'s work, carrying the changes out `sweeps_care`'s.
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
# `wandb sweep --stop` sets FINISHED as well: runs under way go on, and no new one begins.
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
        raise ConfigError(f"{text!r} is no sweep: write entity/project/id, as `wandb sweep` prints it")
    return SweepPath(*parts)


def is_path(text: str) -> bool:
    return text.count("/") == 2 and all(_WORD.fullmatch(part) for part in text.split("/"))


@dataclass(frozen=True, slots=True)
class SweepReport:
    """
    A sweep as W&B shows it.

    state: RUNNING, PENDING, PAUSED, FINISHED, CANCELED, ...    expected: None where nobody knows how many runs there
    will be    runs: how many there are, by state
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
    CARE: keep every slot at work.    DRAIN: no new runs; only what was interrupted needs nodes
    OVER: nothing is left to run      END: a person cancelled it: runs end too
    """

    CARE = "care"
    DRAIN = "drain"
    OVER = "over"
    END = "end"


def judge(report: SweepReport) -> Verdict:
    """What *report* says of the fleet. A state that is not known here means that nothing is known: care goes on."""
    if report.state in CANCELED:
        return Verdict.END
    unfinished = report.in_flight + report.queued
    if report.state in NO_NEW_RUNS:
        return Verdict.DRAIN if unfinished else Verdict.OVER
    begun = sum(report.runs.values())
    # No agent has asked yet, so W&B does not call it finished; but nothing is left that it could give out.
    exhausted = report.expected is not None and begun >= report.expected and not unfinished
    return Verdict.OVER if exhausted and report.state == "RUNNING" else Verdict.CARE


def why(report: SweepReport, verdict: Verdict) -> str:
    """Why slots end, for people."""
    words = {Verdict.END: "cancelled", Verdict.OVER: "finished", Verdict.DRAIN: "handing out no new runs"}
    return f"{words.get(verdict, 'running')} ({report.text()})"


@dataclass(frozen=True, slots=True)
class SlotState:
    """
    busy:  a run of the job lives on its node, as far as is known    ended: done or failed, whoever said so
    by_us: it was ended for the sweep's sake, so the sweep may bring it back
    done:  its agent exited 0, as W&B tells agents when it has nothing to hand out
    """

    name: str
    busy: bool = False
    ended: bool = False
    by_us: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """Slots to end now, and slots to bring back."""

    end: tuple[str, ...] = ()
    revive: tuple[str, ...] = ()


def decide(report: SweepReport, slots: Sequence[SlotState], *, patient: bool = True, again: bool = True) -> Changes:
    """
    What must change, in the order of *slots*.

    A slot whose agent runs ends by itself, when W&B tells the agent to exit; *patient* False: it was given the time.
    While interrupted runs wait in the queue of a sweep, as many slots as runs wait stay, or come back: those that were
    ended for its sake first, then those whose agents exited; the latter unless *again* is False, since their last
    agents got nothing of this very queue.
    """
    verdict = judge(report)
    alive = [slot for slot in slots if not slot.ended]
    idle = [slot.name for slot in alive if not slot.busy]
    ours = [slot.name for slot in slots if slot.ended and slot.by_us]
    exited = [slot.name for slot in slots if slot.ended and slot.done] if again else []
    if verdict is Verdict.CARE:
        missing = max(0, report.queued - len(alive) - len(ours))
        return Changes(revive=(*ours, *exited[:missing]))
    if verdict is Verdict.END or (verdict is Verdict.OVER and not patient):
        return Changes(end=tuple(slot.name for slot in alive))
    if verdict is Verdict.OVER:
        return Changes(end=tuple(idle))
    needed = report.queued
    return Changes(end=tuple(idle[needed:]), revive=tuple([*ours, *exited][: max(0, needed - len(idle))]))
