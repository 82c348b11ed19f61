"""
A sweep of W&B in virtual time: the server's record of runs, the work of agents, and a poller for the daemon.

The run that tpucare starts on a slot is an agent. It works on interrupted runs first, then on new ones as long as the
sweep hands them out, and exits 0 when there is no more. A run that was notified of its end is queued again; one whose
machine died without notice has crashed, which the server finds by its silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from tpucare.integrations.wandb.client import SweepSilent
from tpucare.integrations.wandb.companion import Answer, SweepKey
from tpucare.integrations.wandb.rules import SweepPath, SweepReport
from tpucare.model.errors import TpuCareError
from tpucare.testbed.simulation.machines import RunEnd, RunMark, SimulatedWorker
from tpucare.testbed.simulation.workers import VirtualLauncher

HEARTBEAT_SECONDS = 300.0
"""Silence after which the server regards a run as dead."""
RUN_STEPS = 1500
LOOK_SECONDS = 30.0


@dataclass(eq=False, slots=True)
class _Run:
    """`done`: steps made by earlier agents. `lost`: time of its last sign of life, once its agent is gone."""

    state: str = "running"
    done: int = 0
    lost: float | None = None


@dataclass(eq=False, slots=True)
class _Agent:
    """`began`: the step of its worker at which it began the run."""

    worker: SimulatedWorker
    run: _Run | None = None
    began: int = 0


@dataclass
class SimulatedSweep:
    """
    The server of a sweep: `hands_out` new runs until a person stops the sweep; `down`: it does not answer.

    runs: unfinished ones    ended: number of finished ones, by state
    """

    path: SweepPath
    fleet: str
    launcher: VirtualLauncher
    hands_out: bool = True
    down: bool = False
    runs: list[_Run] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    agents: dict[str, _Agent] = field(default_factory=dict)

    # --- events of workers

    def ran(self, mark: RunMark) -> None:
        if mark.what == "start":
            worker = self.launcher.workers[mark.key, mark.worker]
            self.agents[mark.token] = _Agent(worker)
            return
        agent = self.agents.pop(mark.token, None)
        if agent is None or agent.run is None:
            return
        run = agent.run
        run.done += max(0, mark.step - agent.began)
        told = mark.signalled or mark.how in (RunEnd.STOPPED, RunEnd.STOOD_STILL)
        run.state, run.lost = ("preempting" if told else "running"), mark.seconds

    def advance(self, now: float) -> None:
        """Advance the server and all agents to now, reachable or not."""
        for run in list(self.runs):
            if run.lost is None or now - run.lost < HEARTBEAT_SECONDS:
                continue
            if run.state == "preempting":
                run.state, run.lost = "preempted", None
            else:
                self._close(run, "crashed")
        for token, agent in list(self.agents.items()):
            self._work(token, agent)

    def _work(self, token: str, agent: _Agent) -> None:
        current = agent.worker.run
        if current is None or current.token != token or not self.launcher.lives(agent.worker) or self.down:
            return
        if self.launcher.elapsed(current) < self.launcher.script.setup_seconds:
            return
        step = self.launcher.step(current)
        if agent.run is not None:
            if agent.run.done + step - agent.began < RUN_STEPS:
                return
            self._close(agent.run, "finished")
        agent.run, agent.began = self._next(), step
        if agent.run is None:
            self.launcher.end(agent.worker, status=0)

    def _close(self, run: _Run, state: str) -> None:
        self.runs.remove(run)
        self.ended[state] += 1

    def _next(self) -> _Run | None:
        queued = next((run for run in self.runs if run.state == "preempted"), None)
        if queued is not None:
            queued.state = "running"
            return queued
        if not self.hands_out:
            return None
        self.runs.append(_Run())
        return self.runs[-1]

    # --- answers

    def answer(self) -> Answer:
        if self.down:
            return SweepSilent("W&B does not answer")
        counts = self.ended + Counter(run.state for run in self.runs)
        return SweepReport("RUNNING" if self.hands_out else "FINISHED", None, dict(counts))

    @property
    def waiting(self) -> int:
        """Number of interrupted runs that wait for an agent."""
        return sum(run.state == "preempted" for run in self.runs)

    @property
    def is_over(self) -> bool:
        """True when no new run is handed out and no run is unfinished."""
        return not self.hands_out and not self.runs


class SimulatedWatch:
    """`SweepPoller` without a thread: asks when `news` is called. `listen` is called with every answer."""

    def __init__(
        self,
        sweeps: Mapping[SweepPath, SimulatedSweep],
        now: Callable[[], float],
        listen: Callable[[SimulatedSweep, Answer], None],
    ) -> None:
        self._sweeps, self._now, self._listen = sweeps, now, listen
        self._due: dict[SweepKey, float] = {}

    def follow(self, wanted: Set[SweepKey]) -> None:
        self._due = {key: self._due.get(key, self._now()) for key in sorted(wanted)}

    def news(self) -> Mapping[SweepKey, Answer]:
        now, found = self._now(), {}
        for key, due in list(self._due.items()):
            sweep = self._sweeps.get(key[0])
            if due > now:
                continue
            self._due[key] = now + LOOK_SECONDS
            answer: Answer = sweep.answer() if sweep is not None else TpuCareError("no such sweep")
            if sweep is not None:
                self._listen(sweep, answer)
            found[key] = answer
        return found

    def close(self) -> None:
        self._due.clear()
