"""
Fleets that work for a W&B sweep: what its state means for their slots is carried out here, on the thread of the loop.

A fleet whose sweep is over ends like a fleet whose jobs finished: its slots are done, their nodes go, none is made
again. As long as W&B does not answer nothing is known, and everything goes on (design, rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from tpucare import wishes
from tpucare.engine import Engine
from tpucare.errors import ConfigError
from tpucare.fleet import Fleet
from tpucare.memory import End, FleetRecord, Memory, Wish
from tpucare.plain import plain
from tpucare.sweeps_plan import (
    SWEEP_VARIABLE,
    SlotState,
    SweepPath,
    SweepReport,
    Verdict,
    decide,
    judge,
    parse_path,
    why,
)
from tpucare.sweeps_watch import Answer
from tpucare.tracking import SlotTrack

# An agent asks every few seconds and is told to exit; one that does not for so long is ended with its node.
PATIENCE_SECONDS = 300.0
END_MARK = "sweep "


class Fleets(Protocol):
    """What is needed of `fleets.Roster`."""

    @property
    def records(self) -> Mapping[str, FleetRecord]: ...

    @property
    def fleets(self) -> Mapping[str, Fleet]: ...

    def slots_of(self, fleet: str) -> list[str]: ...

    def say(self, kind: str, text: str, about: str = "", level: str = "warning") -> None: ...


class Watch(Protocol):
    """What is needed of `sweeps_watch.SweepWatch`."""

    def follow(self, wanted: Mapping[SweepPath, str]) -> None: ...

    def news(self) -> Mapping[SweepPath, Answer]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Known:
    """What is known of one sweep; `over_since` on the steady clock, from the first of an unbroken row of answers on."""

    report: SweepReport | None = None
    heard_at: datetime | None = None
    problem: str = ""
    over_since: float | None = None
    verdict: Verdict = Verdict.CARE


class SweepCare:
    """
    base_url: of sweeps whose fleet names none    now, monotonic: the clocks

    On the thread of the loop only; `look` never blocks.
    """

    def __init__(
        self,
        engine: Engine,
        roster: Fleets,
        watch: Watch,
        *,
        base_url: Callable[[], str],
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self._engine, self._roster, self._watch = engine, roster, watch
        self._base_url, self._now, self._monotonic = base_url, now, monotonic
        self._known: dict[SweepPath, _Known] = {}
        self._misread: dict[str, str] = {}

    def look(self) -> None:
        """Follow the sweeps of all fleets that are not down, and carry out what was heard of them."""
        sweeps = self._sweeps()
        self._known = {path: self._known.get(path, _Known()) for path, _ in sweeps.values()}
        self._watch.follow(dict(sweeps.values()))
        for path, answer in self._watch.news().items():
            names = [name for name, (one, _) in sweeps.items() if one == path]
            if path in self._known and names:
                self._hear(path, answer, names)

    def rows(self) -> list[dict[str, Any]]:
        """Progress for `status`, one row per fleet."""
        found = []
        for name, (path, _) in self._sweeps().items():
            known = self._known.get(path, _Known())
            row: dict[str, Any] = {"fleet": name, "sweep": plain(str(path)), "problem": plain(known.problem)}
            if known.report is not None and known.heard_at is not None:
                report = known.report
                row |= {"state": plain(report.state), "expected": report.expected, "verdict": known.verdict.value}
                row |= {"finished": report.finished, "running": report.in_flight}
                row |= {"requeued": report.queued, "failed": report.bad, "text": plain(report.text())}
                row["age_seconds"] = round(max(0.0, (self._now() - known.heard_at).total_seconds()), 1)
            found.append(row)
        return found

    def holds_back(self, slots: Iterable[str]) -> bool:
        """Whether some of them were ended for the sweep's sake, so that it may bring them back."""
        return any(slot_state(self._engine.slots[name]).by_us for name in slots)

    def close(self) -> None:
        self._watch.close()

    # --- which sweeps ------------------------------------------------------------------------------------------------

    def _sweeps(self) -> dict[str, tuple[SweepPath, str]]:
        """By fleet: the sweep, and where its W&B is."""
        found = {}
        for name, fleet in self._roster.fleets.items():
            record, named = self._roster.records.get(name), fleet.job.env.get(SWEEP_VARIABLE)
            if named is None or record is None or record.wish is Wish.DOWN:
                continue
            try:
                found[name] = (parse_path(named), fleet.job.env.get("WANDB_BASE_URL") or self._base_url())
            except ConfigError as error:
                self._misreads(name, str(error))
        return found

    def _misreads(self, fleet: str, problem: str) -> None:
        if self._misread.get(fleet) != problem:
            self._misread[fleet] = problem
            self._roster.say("sweep-unknown", f"{fleet}: {problem}", fleet)

    # --- what was heard ----------------------------------------------------------------------------------------------

    def _hear(self, path: SweepPath, answer: Answer, fleets: list[str]) -> None:
        known = self._known[path]
        if not isinstance(answer, SweepReport):
            if known.problem != str(answer):
                self._tell(fleets, "sweep-silent", f"sweep {path}: {answer}; its fleet goes on", "warning")
            known.problem, known.over_since = str(answer), None
            return
        if known.problem:
            self._tell(fleets, "sweep-heard", f"sweep {path}: W&B answers again", "info")
        verdict = judge(answer)
        known.report, known.heard_at, known.problem = answer, self._now(), ""
        if verdict is not known.verdict:
            self._tell(fleets, "sweep", f"sweep {path} is {why(answer, verdict)}", "info")
        known.verdict = verdict
        if verdict is not Verdict.OVER:
            known.over_since = None
        elif known.over_since is None:
            known.over_since = self._monotonic()
        for fleet in fleets:
            self._carry_out(path, answer, fleet, known)

    def _carry_out(self, path: SweepPath, report: SweepReport, fleet: str, known: _Known) -> None:
        patient = known.over_since is None or self._monotonic() - known.over_since < PATIENCE_SECONDS
        tracks = self._engine.slots
        states = [slot_state(tracks[name]) for name in self._roster.slots_of(fleet)]
        changes = decide(report, states, patient=patient)
        text = f"{END_MARK}{path} is {why(report, known.verdict)}"
        for name in changes.end:
            self._engine.change(name, lambda memory: finish(memory, text, self._now()), "done", f"{name}: {text}")
        for name in changes.revive:
            self._engine.change(name, wishes.up, "up", f"{name}: wanted again, {text}")

    def _tell(self, fleets: list[str], kind: str, text: str, level: str) -> None:
        for fleet in fleets:
            self._roster.say(kind, text, fleet, level)


def slot_state(track: SlotTrack) -> SlotState:
    """What the sweep's rules have to know of a slot."""
    memory = track.memory
    by_us = memory.end is End.DONE and memory.end_why.startswith(END_MARK) and memory.wish is Wish.UP
    ended = memory.end is not End.NONE or memory.wish is Wish.DOWN
    return SlotState(track.slot.name, busy=_is_busy(track), ended=ended, by_us=by_us)


def _is_busy(track: SlotTrack) -> bool:
    """A run was launched on a node that is still there, and nobody has ended either."""
    run = track.memory.run
    if run is None or run.stopped or run.stop_why or run.node not in track.nodes:
        return False
    past = track.memory.node(run.node)
    return past is None or past.serves


def finish(memory: Memory, why: str, now: datetime) -> Memory:
    """Done, though no run of the slot said so: nothing is left for it to do."""
    return replace(memory, end=End.DONE, end_why=why, ended_at=now)
