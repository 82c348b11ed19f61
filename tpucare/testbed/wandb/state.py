"""
The state of the W&B stand-in: moves sweeps, agents and runs by their signs of life, or the lack of them.

No clock, no thread, no socket: `now` is an argument in seconds of any steady clock, chance comes from a seed. The audit
log has every change, so that a check can find which agent had which run when.

Policy, after https://docs.wandb.ai/models/sweeps/resume-sweeps and the pages on preemptible sweep runs: a run that
called `mark_preempting` and ended with a non-zero status, or fell silent, waits in a queue, from which agents get runs
before new points. A run that was handed out and never began is handed out again. Any other run that falls silent has
crashed, and is over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from tpucare.testbed.wandb import search
from tpucare.testbed.wandb.records import ALIVE, Agent, Run, Sweep, SweepState, WandbRunState
from tpucare.testbed.wandb.search import BadSweep, Point

AUDIT_LIMIT = 200_000
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"

Note = dict[str, Any]
Command = dict[str, Any]


class NotFound(Exception):
    """The named sweep, agent or run does not exist."""


class WandbState:
    """
    Every sweep, agent and run.

    lost_after: seconds without a sign of life after which an agent, or a run without a living agent, is lost
    entity:     owner of sweeps and runs for which a client names none
    """

    def __init__(self, *, seed: int = 0, lost_after: float = 60.0, entity: str = "local") -> None:
        self.entity = entity
        self.lost_after = lost_after
        self.sweeps: dict[tuple[str, str, str], Sweep] = {}
        self.runs: dict[tuple[str, str, str], Run] = {}
        self.audit: list[Note] = []
        self.listen: Callable[[Note], None] = lambda _: None
        self._rng = random.Random(f"names {seed}")
        self._seed = seed
        self._agents: dict[str, Agent] = {}

    def note(self, now: float, kind: str, **fields: Any) -> None:
        record = {"number": len(self.audit), "at": round(now, 3), "kind": kind, **fields}
        if len(self.audit) < AUDIT_LIMIT:
            self.audit.append(record)
        self.listen(record)

    # --- sweeps ------------------------------------------------------------------------------------------------------

    def create_sweep(self, entity: str, project: str, text: str, now: float, display_name: str = "") -> Sweep:
        """Raises: BadSweep: its configuration is wrong."""
        try:
            config = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise BadSweep(f"not YAML: {error}") from None
        if not isinstance(config, dict):
            raise BadSweep("must be a mapping")
        search.check_sweep(config)
        name = self._new_name()
        ahead = search.points(config, random.Random(f"points {self._seed} {len(self.sweeps)}"))
        sweep = Sweep(entity, project, name, now, text, config, ahead, search.expected_runs(config), display_name)
        self.sweeps[entity, project, name] = sweep
        self.note(now, "sweep", sweep=name, expected=sweep.expected, method=config["method"])
        return sweep

    def sweep(self, entity: str, project: str, name: str) -> Sweep:
        """Raises: NotFound."""
        found = self.sweeps.get((entity, project, name))
        if found is None:
            raise NotFound(f"sweep {entity}/{project}/{name} not found")
        return found

    def set_sweep_state(self, sweep: Sweep, state: SweepState, now: float) -> None:
        if sweep.state is not state:
            sweep.state = state
            self.note(now, "sweep-state", sweep=sweep.name, state=state.value)
        if state is SweepState.CANCELED:
            sweep.queue.clear()

    def delete_sweep(self, sweep: Sweep, now: float) -> None:
        del self.sweeps[sweep.entity, sweep.project, sweep.name]
        for agent in sweep.agents:
            self._agents.pop(agent, None)
        self.note(now, "sweep-deleted", sweep=sweep.name)

    def runs_of(self, sweep: Sweep) -> list[Run]:
        return [self.runs[sweep.entity, sweep.project, name] for name in sweep.runs]

    # --- agents ------------------------------------------------------------------------------------------------------

    def create_agent(self, sweep: Sweep, host: str, now: float) -> Agent:
        self.pass_time(now)
        agent = Agent(self._new_name(), host, sweep.name, now)
        sweep.agents[agent.id] = self._agents[agent.id] = agent
        self.note(now, "agent", agent=agent.id, host=host, sweep=sweep.name)
        return agent

    def heartbeat(self, agent_id: str, reported: Mapping[str, Any], now: float) -> list[Command]:
        """The commands for an agent, given the runs that it reports. Raises: NotFound: the sweep was deleted."""
        self.pass_time(now)
        agent = self._agents.get(agent_id)
        sweep = self._sweep_of(agent) if agent is not None else None
        if agent is None or sweep is None:
            raise NotFound(f"agent {agent_id} not found")
        alive = [name for name, lives in reported.items() if lives]
        agent.heard, agent.left = now, False
        self.note(now, "heartbeat", agent=agent.id, runs=alive, sweep=sweep.name)
        self._compare(sweep, agent, alive, now)
        return self._commands(sweep, agent, alive, now)

    def _compare(self, sweep: Sweep, agent: Agent, alive: list[str], now: float) -> None:
        for name in alive:
            run = self.runs.get((sweep.entity, sweep.project, name))
            if run is None or run.agent != agent.id:
                self.note(now, "conflict", agent=agent.id, run=name, holder=run.agent if run is not None else "")
        # It began the commands of its last heartbeat before this one.
        if agent.run and agent.run not in alive:
            self._end_unreported(sweep, agent, now)

    def _end_unreported(self, sweep: Sweep, agent: Agent, now: float) -> None:
        """End a run whose agent reports that its process is over, unless the process itself has reported its end."""
        run = self.runs[sweep.entity, sweep.project, agent.run]
        agent.run = ""
        if run.state in ALIVE and run.agent == agent.id:
            self._end_run(run, 1, now, "its process ended without reporting a status")

    def _commands(self, sweep: Sweep, agent: Agent, alive: list[str], now: float) -> list[Command]:
        if sweep.state is SweepState.CANCELED:
            commands = [self._stop(agent, name, now) for name in alive]
            return commands or [self._exit(agent, now)]
        stops = [self._stop(agent, name, now) for name in alive if self._is_stopped(sweep, name)]
        if agent.run or stops:
            return stops
        waiting = next((name for name in sweep.queue if not self._is_held(sweep, name)), None)
        if waiting is not None:
            sweep.queue.remove(waiting)
            return [self._hand_out(sweep, agent, waiting, "resume", now)]
        if sweep.state is SweepState.RUNNING and (point := self._next_point(sweep)) is not None:
            run = self._new_run(sweep, point, now)
            return [self._hand_out(sweep, agent, run.name, "run", now)]
        if sweep.state is SweepState.PAUSED or sweep.queue:
            return []
        self.set_sweep_state(sweep, SweepState.FINISHED, now)
        return [self._exit(agent, now)]

    def _hand_out(self, sweep: Sweep, agent: Agent, name: str, kind: str, now: float) -> Command:
        run = self.runs[sweep.entity, sweep.project, name]
        run.agent, run.state, run.begun, run.preempting = agent.id, WandbRunState.PENDING, False, False
        run.exit_code, run.heard, run.stop_asked = None, now, False
        run.starts += 1
        agent.run = name
        self.note(now, "start", agent=agent.id, run=name, how=kind, sweep=sweep.name, start=run.starts)
        arguments = {key: {"value": value} for key, value in run.point.items()}
        return {"type": kind, "run_id": name, "program": sweep.config.get("program", ""), "args": arguments}

    def _stop(self, agent: Agent, name: str, now: float) -> Command:
        self.note(now, "stop", agent=agent.id, run=name)
        return {"type": "stop", "run_id": name}

    def _exit(self, agent: Agent, now: float) -> Command:
        agent.left = True
        self.note(now, "exit", agent=agent.id, sweep=agent.sweep)
        return {"type": "exit"}

    def _is_held(self, sweep: Sweep, name: str) -> bool:
        """True when a living agent still has its process: two processes must never have one run."""
        return self._has_living_agent(self.runs[sweep.entity, sweep.project, name])

    def _is_stopped(self, sweep: Sweep, name: str) -> bool:
        run = self.runs.get((sweep.entity, sweep.project, name))
        return run is not None and run.stop_asked

    def _next_point(self, sweep: Sweep) -> Point | None:
        if sweep.expected is not None and len(sweep.runs) >= sweep.expected:
            return None
        return next(sweep.ahead, None)

    def _new_run(self, sweep: Sweep, point: Point, now: float) -> Run:
        run = Run(sweep.entity, sweep.project, self._new_name(), now, sweep.name, len(sweep.runs) + 1)
        run.display_name, run.point = f"sweep-{run.number}", point
        run.config = {key: {"value": value} for key, value in point.items()}
        self.runs[run.entity, run.project, run.name] = run
        sweep.runs.append(run.name)
        self.note(now, "point", run=run.name, sweep=sweep.name, point=point)
        return run

    # --- runs --------------------------------------------------------------------------------------------------------

    def begin_run(self, entity: str, project: str, name: str, sweep: str, now: float) -> tuple[Run, bool]:
        """Register a process, perhaps not the first of the run; returns the run, and whether it is new."""
        self.pass_time(now)
        run = self.runs.get((entity, project, name))
        if run is not None and not run.sweep and run.state not in ALIVE:
            run.begun = False
        inserted = run is None
        if run is None:
            run = Run(entity, project, name or self._new_name(), now, sweep)
            self.runs[entity, project, run.name] = run
        self._begin(run, now)
        run.heard = now
        return run, inserted

    def _begin(self, run: Run, now: float) -> bool:
        """Mark a run as begun at the first request of its process; False when its process may not report now."""
        # A process of an earlier start may still send requests for a run that waits in the queue.
        if not run.begun and (not run.sweep or run.state is WandbRunState.PENDING):
            run.begun, run.state, run.exit_code = True, WandbRunState.RUNNING, None
            if not run.sweep:
                run.starts += 1
            self.note(now, "begin", run=run.name, agent=run.agent, start=run.starts)
        return run.begun

    def find_run(self, entity: str, project: str, name: str) -> Run | None:
        return self.runs.get((entity, project, name))

    def report_run(self, run: Run, now: float, *, preempting: bool, complete: bool, exit_code: int | None) -> None:
        """Record a sign of life of the run's process; `complete`: its last one."""
        self.pass_time(now)
        # A client that resumes streams before it registers.
        if not self._begin(run, now):
            self.note(now, "late", run=run.name, agent=run.agent)
            return
        run.heard = now
        if preempting and not run.preempting:
            run.preempting = True
            self.note(now, "preempting", run=run.name, agent=run.agent)
        if complete and run.state in ALIVE:
            self._end_run(run, exit_code if exit_code is not None else 0, now, "its process reported its end")

    def stop_run(self, run: Run, now: float) -> None:
        run.stop_asked = True
        self.note(now, "stop-asked", run=run.name)

    def pass_time(self, now: float) -> None:
        """Give up agents and runs without a sign of life for too long."""
        for agent in self._agents.values():
            if agent.run and now - agent.heard > self.lost_after and not agent.left:
                agent.left = True
                self.note(now, "agent-lost", agent=agent.id, run=agent.run)
        for run in list(self.runs.values()):
            if (
                run.state in ALIVE
                and run.agent
                and now - run.heard > self.lost_after
                and not self._has_living_agent(run)
            ):
                self._end_run(run, None, now, f"no sign of life for {now - run.heard:.1f} s")

    def _has_living_agent(self, run: Run) -> bool:
        """True when its agent lives and has not reported its end; the client itself may be silent for half a minute."""
        agent = self._agents.get(run.agent)
        return agent is not None and agent.run == run.name and not agent.left

    def _end_run(self, run: Run, status: int | None, now: float, why: str) -> None:
        """End a run. *status*: of its process; None: unknown."""
        run.exit_code = status
        sweep = self.sweeps.get((run.entity, run.project, run.sweep))
        # An agent that vanished before its run began leaves no process that could have failed.
        never_began = status is None and not run.begun
        if status == 0:
            run.state = WandbRunState.FINISHED
        elif run.stop_asked or (sweep is not None and sweep.state is SweepState.CANCELED):
            run.state = WandbRunState.KILLED
        elif run.preempting or never_began:
            run.state = WandbRunState.PREEMPTED
        else:
            run.state = WandbRunState.FAILED if status is not None else WandbRunState.CRASHED
        self.note(now, "end", run=run.name, agent=run.agent, state=run.state.value, why=why, status=status)
        if run.state is WandbRunState.PREEMPTED and sweep is not None:
            run.begun = False
            sweep.queue.append(run.name)
            self.note(now, "requeue", run=run.name, sweep=sweep.name)

    # --- names -------------------------------------------------------------------------------------------------------

    def _sweep_of(self, agent: Agent) -> Sweep | None:
        return next((sweep for sweep in self.sweeps.values() if agent.id in sweep.agents), None)

    def _new_name(self) -> str:
        """Eight characters, a letter first: some clients read digits as a number."""
        return self._rng.choice(_LETTERS[:26]) + "".join(self._rng.choices(_LETTERS, k=7))

    def summary(self) -> dict[str, Any]:
        """The state for people and tests, as plain data."""
        sweeps = [_sweep_row(sweep, self.runs_of(sweep)) for sweep in self.sweeps.values()]
        return {"sweeps": sweeps, "runs": [_run_row(run) for run in self.runs.values()]}


def _sweep_row(sweep: Sweep, runs: list[Run]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.state.value] = counts.get(run.state.value, 0) + 1
    row: dict[str, Any] = {"sweep": sweep.name, "entity": sweep.entity, "project": sweep.project}
    agents = [{"agent": one.id, "host": one.host, "run": one.run, "left": one.left} for one in sweep.agents.values()]
    return {**row, "state": sweep.state.value, "expected": sweep.expected, "runs": counts, "agents": agents}


def _run_row(run: Run) -> dict[str, Any]:
    steps = list(_steps(run))
    return {
        "run": run.name,
        "project": run.project,
        "sweep": run.sweep,
        "state": run.state.value,
        "starts": run.starts,
        "agent": run.agent,
        "point": run.point,
        "preempting": run.preempting,
        "steps": steps,
    }


def _steps(run: Run) -> Iterator[int]:
    for line in run.history:
        step = json.loads(line).get("_step") if line else None
        if isinstance(step, int):
            yield step
