"""
Fleets that work for a W&B sweep: one thread asks W&B, and the thread of the loop applies the answers to the slots.

A server that hangs blocks only the first thread. A fleet whose sweep is over ends like a fleet whose jobs finished: its
slots are done, their nodes are deleted, and no node is made again. While W&B does not answer, the fleet goes on
(design, rule 3). The meaning of an answer is left to `rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from tpucare.engine.engine import Engine
from tpucare.engine.tracking import SlotTrack
from tpucare.fleetfile.parse import FleetSpec
from tpucare.integrations.background import Background
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
from tpucare.planner import desired_state
from tpucare.service.assembly import Runtime, secrets_of
from tpucare.service.fleet_registry import FleetRegistry

Answer = SweepReport | TpuCareError
# A sweep and the base URL of its W&B: two servers may have the same path for different sweeps.
SweepKey = tuple[SweepPath, str]


class SweepPoller:
    """
    Asks W&B for the reports of sweeps, on a thread of its own.

    service:   base URL -> service; called before each request, so that a replaced key is used
    every:     seconds between two requests about one sweep
    monotonic: seconds of a clock that never jumps
    """

    def __init__(self, service: Callable[[str], SweepService], *, every: float, monotonic: Callable[[], float]) -> None:
        self._service, self._every, self._monotonic = service, every, monotonic
        self._thread = Background(self._run, name="tpucare-sweeps")
        self._changed = self._thread.changed
        self._wanted: frozenset[SweepKey] = frozenset()
        self._due: dict[SweepKey, float] = {}
        self._news: dict[SweepKey, Answer] = {}

    def follow(self, wanted: Set[SweepKey]) -> None:
        """From now on ask about these sweeps and no others; about a new one at once. Never blocks."""
        with self._changed:
            if wanted == self._wanted:
                return
            self._wanted = frozenset(wanted)
            self._due = {key: self._due.get(key, self._monotonic()) for key in sorted(wanted)}
            if wanted:
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> dict[SweepKey, Answer]:
        """Newest answers since the last call. Never blocks."""
        with self._changed:
            news, self._news = self._news, {}
        return news

    def close(self, seconds: float = 1.0) -> None:
        """Wait at most *seconds* for a request that is under way."""
        self._thread.close(seconds)

    def _run(self) -> None:
        while (key := self._next()) is not None:
            answer = self._ask(*key)
            with self._changed:
                if key in self._wanted:
                    self._news[key] = answer
                    self._due[key] = self._monotonic() + self._every

    def _next(self) -> SweepKey | None:
        """Wait for the next sweep that is due; None after `close`."""
        with self._changed:
            while not self._thread.closing:
                key = min(self._due, key=lambda one: self._due[one], default=None)
                left = self._due[key] - self._monotonic() if key is not None else None
                if key is not None and left is not None and left <= 0:
                    return key
                self._changed.wait(left)
        return None

    def _ask(self, path: SweepPath, url: str) -> Answer:
        try:
            return self._service(url).report(path)
        except TpuCareError as error:
            return error
        except Exception as error:
            return SweepSilent(f"W&B's answer about {path} cannot be read: {type(error).__name__}: {error}")


# --- the companion of the daemon: applies the answers about a sweep to its slots --------------------------------------


# W&B tells an agent to exit at its next request, within seconds; an agent that runs on for so long is ended.
PATIENCE_SECONDS = 300.0
# Pause before slots come back again for the same queued runs, after their agents exited without one.
TRY_AGAIN_SECONDS = 1800.0


class Fleets(Protocol):
    """The part of `FleetRegistry` that is used here."""

    @property
    def records(self) -> Mapping[str, FleetRecord]: ...

    @property
    def fleets(self) -> Mapping[str, FleetSpec]: ...

    def slots_of(self, fleet: str) -> list[str]: ...

    def report(self, kind: str, text: str, about: str = "", level: str = "warning") -> None: ...


class Poller(Protocol):
    """The part of `SweepPoller` that is used here."""

    def follow(self, wanted: Set[SweepKey]) -> None: ...

    def news(self) -> Mapping[SweepKey, Answer]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _SweepState:
    """
    One sweep. `report`, `answered_at` (wall time): its newest report; `problem`: the newest answer, if it was an error.

    `over_since` (monotonic): the first of an unbroken row of answers with the verdict OVER. `tried`, `tried_at`
    (monotonic): the counts of runs when slots whose agents had exited came back last.
    """

    report: SweepReport | None = None
    answered_at: datetime | None = None
    problem: str = ""
    over_since: float | None = None
    verdict: Verdict = Verdict.CARE
    tried: Mapping[str, int] | None = None
    tried_at: float = 0.0


class SweepCare:
    """
    A companion of the daemon: on the thread of the loop only; `poll` never blocks.

    base_url: address of W&B for fleets that name none    now, monotonic: the clocks
    refusal:  why our key is not sent to the base URL that a fleet names; empty if it is sent
    """

    topic = "sweeps"

    def __init__(
        self,
        engine: Engine,
        registry: Fleets,
        poller: Poller,
        *,
        base_url: Callable[[], str],
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        refusal: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._engine, self._registry, self._poller = engine, registry, poller
        self._refusal = refusal
        self._base_url, self._now, self._monotonic = base_url, now, monotonic
        self._states: dict[SweepKey, _SweepState] = {}
        self._problems: dict[str, str] = {}

    @classmethod
    def beside(cls, runtime: Runtime, registry: FleetRegistry, env: Mapping[str, str]) -> SweepCare:
        """
        The companion of a daemon; *env* names W&B and its key.

        The key is the secret of the jobs, else netrc's key; both are read anew before each request.
        """
        clock, secret = runtime.clock, secrets_of(env, runtime.options.secrets)

        def service(url: str) -> SweepService:
            return GraphqlSweeps(url, secret(KEY_VARIABLE) or api_key(env, url))

        return cls(
            runtime.engine,
            registry,
            SweepPoller(service, every=runtime.options.sweep_poll, monotonic=clock.monotonic),
            base_url=lambda: base_url(env),
            now=clock.now,
            monotonic=clock.monotonic,
            refusal=lambda url: key_refusal(env, url),
        )

    def poll(self) -> None:
        """Follow the sweeps of all fleets that are not down, and apply the new answers to their slots."""
        sweeps = self._sweeps()
        self._states = {key: self._states.get(key, _SweepState()) for key in sweeps.values()}
        self._poller.follow(set(sweeps.values()))
        for key, answer in self._poller.news().items():
            if names := [name for name, one in sweeps.items() if one == key]:
                self._apply_answer(key, answer, names)

    def rows(self) -> list[dict[str, Any]]:
        """Progress for `status`, one row per fleet."""
        found = []
        for name, key in self._sweeps().items():
            path, state = key[0], self._states.get(key, _SweepState())
            row: dict[str, Any] = {"fleet": name, "sweep": plain(str(path)), "problem": plain(state.problem)}
            if state.report is not None and state.answered_at is not None:
                report = state.report
                row |= {"state": plain(report.state), "expected": report.expected, "verdict": state.verdict.value}
                row |= {"finished": report.finished, "running": report.in_flight}
                row |= {"requeued": report.queued, "failed": report.bad, "text": plain(report.text())}
                row["age_seconds"] = round(max(0.0, (self._now() - state.answered_at).total_seconds()), 1)
            found.append(row)
        return found

    def may_come_back(self, fleet: str) -> bool:
        """
        True if the sweep may still need slots of *fleet*, although all of them ended: since then W&B has not answered
        that no run is left. An interrupted run may be queued minutes after the last agent was told to exit.
        """
        key = self._sweeps().get(fleet)
        sweep = self._states.get(key, _SweepState()) if key is not None else None
        tracks = [self._engine.slots[name] for name in self._registry.slots_of(fleet)]
        slots = [slot_state(track) for track in tracks]
        if sweep is None or not any(slot.by_us or slot.done for slot in slots):
            return False
        ended = max((track.memory.ended_at for track in tracks if track.memory.ended_at is not None), default=None)
        if sweep.answered_at is None or (ended is not None and sweep.answered_at < ended):
            return True
        if sweep.verdict is Verdict.CARE:
            queued = sweep.report.queued if sweep.report is not None else 0
            return bool(queued) or any(slot.by_us for slot in slots)
        return sweep.verdict is Verdict.DRAIN

    def summary_of(self, fleet: str) -> str:
        """The newest report about its sweep, for people; empty without one."""
        key = self._sweeps().get(fleet)
        state = self._states.get(key) if key is not None else None
        return plain(state.report.text()) if state is not None and state.report is not None else ""

    def close(self) -> None:
        self._poller.close()

    # --- the sweeps of fleets ----------------------------------------------------------------------------------------

    def _sweeps(self) -> dict[str, SweepKey]:
        """By fleet: its sweep and its W&B; without the fleets whose W&B must not get our key."""
        found = {}
        for name, fleet in self._registry.fleets.items():
            record, named = self._registry.records.get(name), fleet.job.env.get(SWEEP_VARIABLE)
            if named is None or record is None or record.wish is DesiredState.DOWN:
                continue
            try:
                url = (fleet.job.env.get("WANDB_BASE_URL") or self._base_url()).rstrip("/")
                if refusal := self._refusal(url):
                    raise ConfigError(f"its sweep is not followed: {refusal}")
                found[name] = (parse_path(named), url)
            except ConfigError as error:
                self._say_problem(name, str(error))
        return found

    def _say_problem(self, fleet: str, problem: str) -> None:
        if self._problems.get(fleet) != problem:
            self._problems[fleet] = problem
            self._registry.report("sweep-unknown", f"{fleet}: {problem}", fleet)

    # --- answers of W&B ----------------------------------------------------------------------------------------------

    def _apply_answer(self, key: SweepKey, answer: Answer, fleets: list[str]) -> None:
        path, state = key[0], self._states[key]
        if not isinstance(answer, SweepReport):
            if state.problem != str(answer):
                self._say(fleets, "sweep-silent", f"sweep {path}: {answer}; its fleet goes on", "warning")
            state.problem, state.over_since = str(answer), None
            return
        if state.problem:
            self._say(fleets, "sweep-heard", f"sweep {path}: W&B answers again", "info")
        verdict = judge(answer)
        state.report, state.answered_at, state.problem = answer, self._now(), ""
        if verdict is not state.verdict:
            self._say(fleets, "sweep", f"sweep {path} is {why(answer, verdict)}", "info")
        state.verdict = verdict
        if verdict is not Verdict.OVER:
            state.over_since = None
        elif state.over_since is None:
            state.over_since = self._monotonic()
        for fleet in fleets:
            self._change_slots(path, answer, fleet, state)

    def _change_slots(self, path: SweepPath, report: SweepReport, fleet: str, sweep: _SweepState) -> None:
        patient = sweep.over_since is None or self._monotonic() - sweep.over_since < PATIENCE_SECONDS
        tracks = self._engine.slots
        slots = [slot_state(tracks[name]) for name in self._registry.slots_of(fleet)]
        changes = decide(report, slots, patient=patient, again=self._may_try_again(report, sweep))
        text = f"sweep {path} is {why(report, sweep.verdict)}"
        fields = {"cause": Cause.SWEEP_OVER.value, "sweep": str(path)}
        for name in changes.end:
            end = partial(finish, why=text, now=self._now())
            self._engine.change(name, end, "done", f"{name}: {text}", **fields)
        exited = {slot.name for slot in slots if slot.done}
        if exited & set(changes.revive):
            sweep.tried, sweep.tried_at = dict(report.runs), self._monotonic()
        for name in changes.revive:
            self._engine.change(name, desired_state.up, "up", f"{name}: wanted again, {text}", **fields)

    def _may_try_again(self, report: SweepReport, sweep: _SweepState) -> bool:
        """An agent that came back for a run and got none exits at once: its node must not be made again at once."""
        if sweep.tried is not None and sweep.tried != report.runs:
            sweep.tried = None
        return sweep.tried is None or self._monotonic() - sweep.tried_at >= TRY_AGAIN_SECONDS

    def _say(self, fleets: list[str], kind: str, text: str, level: str) -> None:
        for fleet in fleets:
            self._registry.report(kind, text, fleet, level)


def slot_state(track: SlotTrack) -> SlotState:
    """The slot as the sweep's rules see it."""
    memory = track.memory
    by_us = memory.end is End.DONE and memory.end_cause is Cause.SWEEP_OVER and memory.wish is DesiredState.UP
    ended = memory.end is not End.NONE or memory.wish is DesiredState.DOWN
    done = memory.end is End.DONE and not by_us and memory.wish is DesiredState.UP
    return SlotState(track.slot.name, busy=_is_busy(track), ended=ended, by_us=by_us, done=done)


def _is_busy(track: SlotTrack) -> bool:
    """True if a run was launched on a node that still exists, and neither was ended."""
    run = track.memory.run
    if run is None or not run.state.is_wanted or run.node not in track.nodes:
        return False
    return not track.memory.has_given_up(run.node)


def finish(memory: Memory, why: str, now: datetime) -> Memory:
    """The slot is done by the sweep's verdict, without an exit of its run."""
    return replace(memory, end=End.DONE, end_why=why, end_cause=Cause.SWEEP_OVER, ended_at=now)
