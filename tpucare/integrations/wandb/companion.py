"""
Fleets that work for a W&B sweep: W&B is asked on a thread of its own, and what its answers mean for the slots is
carried out on the thread of the loop.

A server that hangs costs that thread its time and nobody else's. A fleet whose sweep is over ends like a fleet whose
jobs finished: its slots are done, their nodes go, none is made again. As long as W&B does not answer nothing is known,
and everything goes on (design, rule 3). What an answer means is told by `rules`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from tpucare.engine.engine import Engine
from tpucare.engine.tracking import SlotTrack
from tpucare.fleetfile.parse import Fleet
from tpucare.integrations.wandb.account import KEY_VARIABLE, api_key, base_url, key_refusal
from tpucare.integrations.wandb.client import GraphqlSweeps, SweepService, SweepSilent
from tpucare.integrations.wandb.rules import (
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
from tpucare.model.causes import Cause
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.memory import DesiredState, End, FleetRecord, Memory
from tpucare.model.text import plain
from tpucare.planner import desired_state as wishes
from tpucare.service.assembly import Runtime, secrets_of
from tpucare.service.fleet_registry import FleetRegistry

Answer = SweepReport | TpuCareError
# A sweep and the base URL of its W&B: what one server says of a path is nothing to a fleet that names another.
Asked = tuple[SweepPath, str]


class SweepWatch:
    """
    service:   for the base URL of a sweep; made once per look, so that a key which was replaced is taken
    every:     seconds between two looks at one sweep
    monotonic: seconds of a clock that never jumps
    """

    def __init__(self, service: Callable[[str], SweepService], *, every: float, monotonic: Callable[[], float]) -> None:
        self._service, self._every, self._monotonic = service, every, monotonic
        self._changed = threading.Condition()
        self._wanted: frozenset[Asked] = frozenset()
        self._due: dict[Asked, float] = {}
        self._news: dict[Asked, Answer] = {}
        self._closing = False
        self._thread: threading.Thread | None = None

    def follow(self, wanted: Set[Asked]) -> None:
        """From now on these sweeps and no others; a new one is looked at at once. Never blocks."""
        with self._changed:
            if wanted == self._wanted:
                return
            self._wanted = frozenset(wanted)
            self._due = {asked: self._due.get(asked, self._monotonic()) for asked in sorted(wanted)}
            if wanted and self._thread is None:
                # It may hang in a request; it must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name="tpucare-sweeps", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> dict[Asked, Answer]:
        """Newest answers since the last call. Never blocks."""
        with self._changed:
            news, self._news = self._news, {}
        return news

    def close(self, seconds: float = 1.0) -> None:
        """Waits at most *seconds* for a look that is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            answer = self._look(*turn)
            with self._changed:
                if turn in self._wanted:
                    self._news[turn] = answer
                    self._due[turn] = self._monotonic() + self._every

    def _next(self) -> Asked | None:
        """The sweep whose time has come, waited for; None at the end."""
        with self._changed:
            while not self._closing:
                asked = min(self._due, key=lambda one: self._due[one], default=None)
                left = self._due[asked] - self._monotonic() if asked is not None else None
                if asked is not None and left is not None and left <= 0:
                    return asked
                self._changed.wait(left)
        return None

    def _look(self, path: SweepPath, url: str) -> Answer:
        try:
            return self._service(url).look(path)
        except TpuCareError as error:
            return error
        except Exception as error:
            return SweepSilent(f"W&B's answer about {path} cannot be read: {type(error).__name__}: {error}")


# --- the companion of the daemon: what is heard of a sweep is carried out ---------------------------------------------


# An agent asks every few seconds and is told to exit; one that does not for so long is ended with its node.
PATIENCE_SECONDS = 300.0
# For the same runs in the queue, after the agents that came back for them exited.
TRY_AGAIN_SECONDS = 1800.0


class Fleets(Protocol):
    """What is needed of `fleets.FleetRegistry`."""

    @property
    def records(self) -> Mapping[str, FleetRecord]: ...

    @property
    def fleets(self) -> Mapping[str, Fleet]: ...

    def slots_of(self, fleet: str) -> list[str]: ...

    def say(self, kind: str, text: str, about: str = "", level: str = "warning") -> None: ...


class Watch(Protocol):
    """What is needed of `sweeps_watch.SweepWatch`."""

    def follow(self, wanted: Set[Asked]) -> None: ...

    def news(self) -> Mapping[Asked, Answer]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Known:
    """
    What is known of one sweep; `over_since` on the steady clock, from the first of an unbroken row of answers on.

    `tried`: the counts of runs for which slots whose agents had exited came back last, and when (steady clock).
    """

    report: SweepReport | None = None
    heard_at: datetime | None = None
    problem: str = ""
    over_since: float | None = None
    verdict: Verdict = Verdict.CARE
    tried: Mapping[str, int] | None = None
    tried_at: float = 0.0


class SweepCare:
    """
    base_url: of sweeps whose fleet names none    now, monotonic: the clocks
    refusal: why no key of ours is sent to a base URL that a fleet names; empty where it is

    A companion of the daemon: on the thread of the loop only; `look` never blocks.
    """

    topic = "sweeps"

    def __init__(
        self,
        engine: Engine,
        roster: Fleets,
        watch: Watch,
        *,
        base_url: Callable[[], str],
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        refusal: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._engine, self._roster, self._watch = engine, roster, watch
        self._refusal = refusal
        self._base_url, self._now, self._monotonic = base_url, now, monotonic
        self._known: dict[Asked, _Known] = {}
        self._misread: dict[str, str] = {}

    @classmethod
    def beside(cls, caretaker: Runtime, roster: FleetRegistry, env: Mapping[str, str]) -> SweepCare:
        """
        The one of a daemon; *env*: where W&B and its key are looked for.

        The key is the one that jobs get, else that of netrc; both are read anew each time.
        """
        clock, secret = caretaker.clock, secrets_of(env)

        def service(url: str) -> SweepService:
            return GraphqlSweeps(url, secret(KEY_VARIABLE) or api_key(env, url))

        return cls(
            caretaker.engine,
            roster,
            SweepWatch(service, every=caretaker.options.sweep_poll, monotonic=clock.monotonic),
            base_url=lambda: base_url(env),
            now=clock.now,
            monotonic=clock.monotonic,
            refusal=lambda url: key_refusal(env, url),
        )

    def look(self) -> None:
        """Follow the sweeps of all fleets that are not down, and carry out what was heard of them."""
        sweeps = self._sweeps()
        self._known = {asked: self._known.get(asked, _Known()) for asked in sweeps.values()}
        self._watch.follow(set(sweeps.values()))
        for asked, answer in self._watch.news().items():
            if names := [name for name, one in sweeps.items() if one == asked]:
                self._hear(asked, answer, names)

    def rows(self) -> list[dict[str, Any]]:
        """Progress for `status`, one row per fleet."""
        found = []
        for name, asked in self._sweeps().items():
            path, known = asked[0], self._known.get(asked, _Known())
            row: dict[str, Any] = {"fleet": name, "sweep": plain(str(path)), "problem": plain(known.problem)}
            if known.report is not None and known.heard_at is not None:
                report = known.report
                row |= {"state": plain(report.state), "expected": report.expected, "verdict": known.verdict.value}
                row |= {"finished": report.finished, "running": report.in_flight}
                row |= {"requeued": report.queued, "failed": report.bad, "text": plain(report.text())}
                row["age_seconds"] = round(max(0.0, (self._now() - known.heard_at).total_seconds()), 1)
            found.append(row)
        return found

    def may_come_back(self, fleet: str) -> bool:
        """
        Whether the sweep may still ask for slots of *fleet*, all of which ended: W&B has not said since that nothing is
        left to run. A run that was interrupted may be queued minutes after the last agent was told to exit.
        """
        asked = self._sweeps().get(fleet)
        known = self._known.get(asked, _Known()) if asked is not None else None
        tracks = [self._engine.slots[name] for name in self._roster.slots_of(fleet)]
        states = [slot_state(track) for track in tracks]
        if known is None or not any(state.by_us or state.done for state in states):
            return False
        ended = max((track.memory.ended_at for track in tracks if track.memory.ended_at is not None), default=None)
        if known.heard_at is None or (ended is not None and known.heard_at < ended):
            return True
        if known.verdict is Verdict.CARE:
            queued = known.report.queued if known.report is not None else 0
            return bool(queued) or any(state.by_us for state in states)
        return known.verdict is Verdict.DRAIN

    def sum_of(self, fleet: str) -> str:
        """How far its sweep is, as W&B said last; empty where it has not."""
        asked = self._sweeps().get(fleet)
        known = self._known.get(asked) if asked is not None else None
        return plain(known.report.text()) if known is not None and known.report is not None else ""

    def close(self) -> None:
        self._watch.close()

    # --- which sweeps ------------------------------------------------------------------------------------------------

    def _sweeps(self) -> dict[str, Asked]:
        """By fleet: the sweep, and where its W&B is; those left out whose W&B must not have our key."""
        found = {}
        for name, fleet in self._roster.fleets.items():
            record, named = self._roster.records.get(name), fleet.job.env.get(SWEEP_VARIABLE)
            if named is None or record is None or record.wish is DesiredState.DOWN:
                continue
            try:
                url = (fleet.job.env.get("WANDB_BASE_URL") or self._base_url()).rstrip("/")
                if refusal := self._refusal(url):
                    raise ConfigError(f"its sweep is not followed: {refusal}")
                found[name] = (parse_path(named), url)
            except ConfigError as error:
                self._misreads(name, str(error))
        return found

    def _misreads(self, fleet: str, problem: str) -> None:
        if self._misread.get(fleet) != problem:
            self._misread[fleet] = problem
            self._roster.say("sweep-unknown", f"{fleet}: {problem}", fleet)

    # --- what was heard ----------------------------------------------------------------------------------------------

    def _hear(self, asked: Asked, answer: Answer, fleets: list[str]) -> None:
        path, known = asked[0], self._known[asked]
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
        changes = decide(report, states, patient=patient, again=self._may_try_again(report, known))
        text, told = (
            f"sweep {path} is {why(report, known.verdict)}",
            {"cause": Cause.SWEEP_OVER.value, "sweep": str(path)},
        )
        for name in changes.end:
            end = partial(finish, why=text, now=self._now())
            self._engine.change(name, end, "done", f"{name}: {text}", **told)
        exited = {state.name for state in states if state.done}
        if exited & set(changes.revive):
            known.tried, known.tried_at = dict(report.runs), self._monotonic()
        for name in changes.revive:
            self._engine.change(name, wishes.up, "up", f"{name}: wanted again, {text}", **told)

    def _may_try_again(self, report: SweepReport, known: _Known) -> bool:
        """An agent that came back for a run and was given none exits at once: its node is not made again at once."""
        if known.tried is not None and known.tried != report.runs:
            known.tried = None
        return known.tried is None or self._monotonic() - known.tried_at >= TRY_AGAIN_SECONDS

    def _tell(self, fleets: list[str], kind: str, text: str, level: str) -> None:
        for fleet in fleets:
            self._roster.say(kind, text, fleet, level)


def slot_state(track: SlotTrack) -> SlotState:
    """What the sweep's rules have to know of a slot."""
    memory = track.memory
    by_us = memory.end is End.DONE and memory.end_cause is Cause.SWEEP_OVER and memory.wish is DesiredState.UP
    ended = memory.end is not End.NONE or memory.wish is DesiredState.DOWN
    done = memory.end is End.DONE and not by_us and memory.wish is DesiredState.UP
    return SlotState(track.slot.name, busy=_is_busy(track), ended=ended, by_us=by_us, done=done)


def _is_busy(track: SlotTrack) -> bool:
    """A run was launched on a node that is still there, and nobody has ended either."""
    run = track.memory.run
    if run is None or run.stopped or run.stop_why or run.node not in track.nodes:
        return False
    return not track.memory.has_given_up(run.node)


def finish(memory: Memory, why: str, now: datetime) -> Memory:
    """Done, though no run of the slot said so: nothing is left for it to do."""
    return replace(memory, end=End.DONE, end_why=why, end_cause=Cause.SWEEP_OVER, ended_at=now)
