"""The W&B stand-in: its policy as a world without time, and the real client, agents and `wandb.Api()` against it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.kits import wandb as wandb_kit
from tests.kits.bench_worker import eventually
from tpucare.model.errors import ConfigError
from tpucare.testbed.wandb import WandbServer, WandbState, filters, search
from tpucare.testbed.wandb.records import Agent, Run, Sweep, SweepState, WandbRunState
from tpucare.testbed.wandb.search import BadSweep
from tpucare.testbed.wandb.server import BODY_LIMIT, inflated
from tpucare.testbed.wandb.state import NotFound

LOST = 10.0
GRID = {"method": "grid", "program": "t.py", "parameters": {"a": {"values": [1, 2]}, "b": {"value": 3}}}


class Story:
    """A world with one sweep, told by seconds."""

    def __init__(self, config: dict[str, Any] | None = None, seed: int = 0) -> None:
        self.world = WandbState(seed=seed, lost_after=LOST)
        self.now = 0.0
        self.sweep: Sweep = self.world.create_sweep("me", "p", yaml.safe_dump(config or GRID), self.now)

    def agent(self) -> Agent:
        return self.world.create_agent(self.sweep, "host", self.now)

    def beat(self, agent: Agent, *runs: str) -> list[tuple[str, str]]:
        commands = self.world.heartbeat(agent.id, dict.fromkeys(runs, True), self.now)
        return [(one["type"], one.get("run_id", "")) for one in commands]

    def work(self, agent: Agent) -> Run:
        """The agent is given a run, whose process begins."""
        ((kind, name),) = self.beat(agent)
        assert kind in ("run", "resume")
        return self.begin(name)

    def begin(self, name: str) -> Run:
        return self.world.begin_run("me", "p", name, self.sweep.name, self.now)[0]

    def says(self, run: Run, *, marked: bool = False, status: int | None = None) -> None:
        done = status is not None
        self.world.report_run(run, self.now, preempting=marked, complete=done, exit_code=status)

    def pass_seconds(self, seconds: float, *beating: tuple[Agent, str]) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            for agent, run in beating:
                self.beat(agent, run)
            self.world.pass_time(self.now)

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in self.world.audit if note["kind"] == kind]


def test_a_grid_gives_each_point_once_and_then_lets_agents_go() -> None:
    story = Story()
    one, other = story.agent(), story.agent()
    runs = [story.work(one), story.work(other)]
    assert [run.point for run in runs] == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert story.beat(one, runs[0].name) == []
    story.says(runs[0], status=0)
    assert story.beat(one) == [("exit", "")]
    assert story.sweep.state is SweepState.FINISHED
    assert (runs[0].state, runs[1].state) == (WandbRunState.FINISHED, WandbRunState.RUNNING)


def test_a_marked_run_that_ends_non_zero_is_resumed_before_new_points() -> None:
    story = Story()
    first, second = story.agent(), story.agent()
    run = story.work(first)
    story.says(run, marked=True)
    story.says(run, status=1)
    assert run.state is WandbRunState.PREEMPTED
    # Its agent has not said yet that the process is over: nobody else may have it.
    assert story.beat(second)[0][0] == "run"
    assert story.beat(first) == [("resume", run.name)]
    assert (run.starts, len(story.kinds("requeue"))) == (2, 1)


def test_an_agent_waits_for_a_queued_run_that_another_still_holds() -> None:
    story = Story({**GRID, "parameters": {"a": {"value": 1}}})
    holder, waiting = story.agent(), story.agent()
    run = story.work(holder)
    story.says(run, marked=True)
    story.says(run, status=1)
    assert story.beat(waiting) == []
    story.pass_seconds(LOST + 2)
    assert story.beat(waiting) == [("resume", run.name)]
    assert wandb_kit.double_heartbeats(story.world.audit) == []


@pytest.mark.parametrize(
    ("marked", "begun", "state"),
    [
        (True, True, WandbRunState.PREEMPTED),
        (False, True, WandbRunState.CRASHED),
        (False, False, WandbRunState.PREEMPTED),
    ],
)
def test_what_silence_of_agent_and_run_means(marked: bool, begun: bool, state: WandbRunState) -> None:
    story = Story()
    ((_, name),) = story.beat(story.agent())
    run = story.begin(name) if begun else story.world.runs["me", "p", name]
    if marked:
        story.says(run, marked=True)
    story.pass_seconds(LOST)
    assert story.kinds("end") == []
    story.pass_seconds(2)
    assert run.state is state
    assert (name in story.sweep.queue) is (state is WandbRunState.PREEMPTED)


def test_a_living_agent_vouches_for_a_run_that_streams_seldom() -> None:
    story = Story()
    agent = story.agent()
    run = story.work(agent)
    story.pass_seconds(5 * LOST, (agent, run.name))
    assert run.state is WandbRunState.RUNNING


@pytest.mark.parametrize(("status", "state"), [(0, WandbRunState.FINISHED), (3, WandbRunState.FAILED)])
def test_an_unmarked_run_is_over_however_it_ends(status: int, state: WandbRunState) -> None:
    story = Story()
    run = story.work(story.agent())
    story.says(run, status=status)
    assert run.state is state
    assert story.sweep.queue == []


def test_a_process_that_dies_before_it_begins_has_failed_where_its_agent_says_so() -> None:
    story = Story()
    agent = story.agent()
    ((_, name),) = story.beat(agent)
    assert story.beat(agent)[0][0] == "run"
    assert story.world.runs["me", "p", name].state is WandbRunState.FAILED


def test_a_marked_run_that_exits_zero_is_finished() -> None:
    story = Story()
    run = story.work(story.agent())
    story.says(run, marked=True)
    story.says(run, status=0)
    assert run.state is WandbRunState.FINISHED


def test_a_cancelled_sweep_stops_runs_and_queues_none() -> None:
    story = Story()
    agent = story.agent()
    run = story.work(agent)
    story.says(run, marked=True)
    story.world.set_sweep_state(story.sweep, SweepState.CANCELED, story.now)
    assert story.beat(agent, run.name) == [("stop", run.name)]
    story.says(run, status=1)
    assert run.state is WandbRunState.KILLED
    assert story.beat(agent) == [("exit", "")]
    assert story.sweep.queue == []


def test_a_paused_sweep_gives_nothing_new_and_keeps_its_agents() -> None:
    story = Story()
    agent = story.agent()
    story.world.set_sweep_state(story.sweep, SweepState.PAUSED, story.now)
    assert story.beat(agent) == []
    story.world.set_sweep_state(story.sweep, SweepState.RUNNING, story.now)
    assert story.beat(agent)[0][0] == "run"


def test_a_stopped_sweep_lets_runs_finish() -> None:
    story = Story()
    agent = story.agent()
    run = story.work(agent)
    story.world.set_sweep_state(story.sweep, SweepState.FINISHED, story.now)
    assert story.beat(agent, run.name) == []
    story.says(run, status=0)
    assert story.beat(agent) == [("exit", "")]


def test_the_queue_is_served_after_the_last_point_too() -> None:
    story = Story({**GRID, "parameters": {"a": {"value": 1}}})
    lost, done = story.agent(), story.agent()
    run = story.work(lost)
    assert story.beat(done) == [("exit", "")]
    story.says(run, marked=True)
    story.pass_seconds(LOST + 2)
    assert story.beat(story.agent()) == [("resume", run.name)]


def test_one_run_stopped_by_a_person_is_not_queued() -> None:
    story = Story()
    agent = story.agent()
    run = story.work(agent)
    story.says(run, marked=True)
    story.world.stop_run(run, story.now)
    assert story.beat(agent, run.name) == [("stop", run.name)]
    story.says(run, status=1)
    assert run.state is WandbRunState.KILLED


def test_two_agents_with_one_run_do_not_go_unnoticed() -> None:
    story = Story()
    holder, other = story.agent(), story.agent()
    run = story.work(holder)
    story.beat(other, run.name)
    assert [note["run"] for note in story.kinds("conflict")] == [run.name]
    assert wandb_kit.double_heartbeats(story.world.audit)


def test_a_late_process_of_an_earlier_start_changes_nothing() -> None:
    story = Story()
    run = story.work(story.agent())
    story.says(run, marked=True)
    story.pass_seconds(LOST + 2)
    story.says(run, status=0)
    assert run.state is WandbRunState.PREEMPTED
    assert len(story.kinds("late")) == 1


def test_agents_of_a_deleted_sweep_are_not_found() -> None:
    story = Story()
    agent = story.agent()
    story.world.delete_sweep(story.sweep, story.now)
    with pytest.raises(NotFound):
        story.beat(agent)


def test_run_cap_ends_a_random_sweep_and_the_seed_decides_its_points() -> None:
    config = {"method": "random", "run_cap": 3, "parameters": {"lr": {"min": 0.0, "max": 1.0}}}

    def drawn(seed: int) -> list[Any]:
        story = Story(config, seed)
        points = []
        agent = story.agent()
        for _ in range(3):
            run = story.work(agent)
            points.append((run.name, run.point))
            story.says(run, status=0)
        assert story.beat(agent) == [("exit", "")]
        return points

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_every_distribution_draws_within_its_bounds() -> None:
    space = {
        "choice": {"values": ["x", "y"], "probabilities": [0.0, 1.0]},
        "whole": {"min": 2, "max": 4},
        "even": {"distribution": "q_uniform", "min": 0, "max": 10, "q": 2},
        "log": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
        "deep": {"parameters": {"inner": {"min": 0.5, "max": 0.6}}},
    }
    for point in islice(search.points({"method": "random", "parameters": space}, random.Random(1)), 50):
        assert point["choice"] == "y"
        assert point["whole"] in (2, 3, 4)
        assert point["even"] % 2 == 0
        assert 1e-5 <= point["log"] <= 1e-1
        assert 0.5 <= point["deep"]["inner"] <= 0.6


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"method": "hyper", "parameters": {"a": {"value": 1}}}, "method"),
        ({"method": "grid"}, "parameters"),
        ({"method": "grid", "parameters": {"a": {"min": 0.0, "max": 1.0}}}, "parameters.a"),
        ({"method": "random", "parameters": {"a": {"distribution": "odd", "min": 0.0, "max": 1.0}}}, "parameters.a"),
    ],
)
def test_a_sweep_that_cannot_be_searched_is_refused_with_its_key(config: dict[str, Any], word: str) -> None:
    with pytest.raises(BadSweep, match=word):
        WandbState().create_sweep("me", "p", yaml.safe_dump(config), 0.0)


def test_filters_and_orders_of_the_api() -> None:
    rows = [{"name": f"r{at}", "state": "finished", "config": {"lr": {"value": at}}, "tags": ["x"]} for at in range(4)]
    chosen = filters.select(rows, {"$and": [{"config.lr": {"$gt": 0}}, {"config.lr.value": {"$in": [1, 3]}}]})
    assert [row["name"] for row in chosen] == []
    chosen = filters.select(rows, {"config.lr.value": {"$gte": 1, "$lt": 3}, "tags": "x"})
    assert [row["name"] for row in filters.sort(chosen, "-config.lr.value")] == ["r2", "r1"]
    assert filters.select(rows, {"$not": {"state": "finished"}}) == []
    assert len(filters.select(rows, {"missing": {"$exists": False}})) == 4
    with pytest.raises(ValueError, match=r"\$near"):
        filters.select(rows, {"name": {"$near": 1}})


# --- over HTTP -------------------------------------------------------------------------------------------------------


# An agent lets itself be heard of every 5 s: on a busy machine that may take several times as long.
LOST_AFTER = 60.0


class Clock:
    """Time as it passes, and what a test skips of it."""

    skipped = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[WandbServer]:
    before = threading.active_count()
    with WandbServer(lost_after=LOST_AFTER, monotonic=clock.monotonic) as running:
        yield running
    # Threads of connections end by themselves, a moment after their clients.
    eventually(lambda: threading.active_count() <= before + 1)


def ask(server: WandbServer, query: str, key: str = wandb_kit.KEY) -> Any:
    secret = b64encode(f"api:{key}".encode()).decode()
    body = json.dumps({"query": query, "variables": {}}).encode()
    request = urllib.request.Request(f"{server.url}/graphql", body, {"Authorization": f"Basic {secret}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_a_short_key_is_refused_and_an_unknown_operation_named(server: WandbServer) -> None:
    assert ask(server, "query Viewer { viewer { entity } }")["data"]["viewer"]["entity"] == "local"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(server, "query Viewer { viewer { entity } }", key="short")
    answer = ask(server, "mutation Fly { launchRocket(input: {}) { id } }")
    assert "launchRocket" in answer["errors"][0]["message"]
    with urllib.request.urlopen(f"{server.url}/control/audit?after=0", timeout=10) as window:
        assert [note["kind"] for note in json.load(window)["audit"]] == ["unknown"]
    with urllib.request.urlopen(f"{server.url}/control/state", timeout=10) as window:
        assert json.load(window) == {"sweeps": [], "runs": []}


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_is_inflated_only_as_far_as_one_may_be(encoding: str) -> None:
    """400 KB of zeros, packed, took 800 MB."""
    window = zlib.MAX_WBITS + (16 if encoding == "gzip" else 0)
    packer = zlib.compressobj(wbits=window)
    packed = b"".join([packer.compress(bytes(1 << 20)) for _ in range(BODY_LIMIT // (1 << 20) + 2)] + [packer.flush()])
    assert len(inflated(packed, encoding)) == BODY_LIMIT
    small = zlib.compressobj(wbits=window)
    assert inflated(small.compress(b"{}") + small.flush(), encoding) == b"{}"
    assert inflated(b"{}", encoding) == b""
    assert inflated(b"{}", "") == b"{}"


def test_a_port_that_is_taken_is_one_clear_line(server: WandbServer) -> None:
    with pytest.raises(ConfigError, match="W&B server"):
        WandbServer(port=int(server.url.rpartition(":")[2])).start()


# --- the real client -------------------------------------------------------------------------------------------------

READ = """\
import json, sys, wandb
api = wandb.Api()
sweep = api.sweep(sys.argv[1])
runs = api.runs("local/p", filters={"state": "finished"}, order="+created_at")
best = sweep.best_run()
best.summary["judged"] = True
best.summary.update()
said = {
    "state": sweep.state,
    "expected": sweep.expected_run_count,
    "steps": [[row["_step"] for row in run.history(pandas=False)] for run in runs],
    "scanned": [[row["loss"] for row in run.scan_history(keys=["loss"])] for run in runs],
    "last": [run.lastHistoryStep for run in runs],
    "rates": [run.config["lr"] for run in runs],
    "best": best.config["lr"],
    "judged": api.run("local/p/" + best.id).summary["judged"],
    "agents": len(sweep.agents()),
}
print("READ", json.dumps(said))
"""


def run_python(code: str, env: dict[str, str], folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=env, cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Clients:
    """Agents as processes of their own; each is ended by its pid."""

    def __init__(self, server: WandbServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.env = wandb_kit.environment(
            server.url, folder, SWEEP_STEPS="8", SWEEP_STEP_SECONDS="0.2", SWEEP_LAST_STEP=str(folder / "last-step")
        )
        self.agents: list[subprocess.Popen[bytes]] = []

    def sweep(self, config: dict[str, Any]) -> str:
        code = f"import wandb; wandb.sweep({config!r}, project='p')"
        run_python(code, self.env, self.folder)
        return f"local/p/{self.server.summary()['sweeps'][0]['sweep']}"

    def agent(self, path: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "wandb", "agent", "--forward-signals", path]
        with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
            process = subprocess.Popen(
                words, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.agents.append(process)
        return process

    def await_(self, look: Callable[[], Any], seconds: float = 240) -> Any:
        until = time.monotonic() + seconds
        while not (found := look()):
            logs = "\n".join(path.read_text(errors="replace") for path in self.folder.glob("agent-*.log"))
            assert time.monotonic() < until, f"{self.server.summary()}\n{logs}"
            time.sleep(0.1)
        return found

    def training(self) -> list[dict[str, Any]]:
        rows = self.server.summary()["runs"]
        return [row for row in rows if row["state"] == "running" and row["preempting"] and row["steps"]]

    def close(self) -> None:
        for process in self.agents:
            end_tree(process.pid)
            process.wait()


def end_tree(pid: int) -> None:
    try:
        family = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.timeout(600)
def test_the_real_client_through_a_signal_and_a_sudden_death(server: WandbServer, clock: Clock, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(wandb_kit.PROGRAM)
    clients = Clients(server, tmp_path)
    try:
        path = clients.sweep(wandb_kit.grid(program, {"lr": [0.5, 1.0]}))
        told = clients.agent(path)
        clients.await_(lambda: len(clients.training()) == 1)
        os.kill(told.pid, signal.SIGTERM)
        assert told.wait(240) == 0
        clients.await_(lambda: wandb_kit.count(server.audit(), "requeue") == 1)
        clock.skipped += LOST_AFTER + 1  # Until then the agent that left holds its run.

        struck = clients.agent(path)
        clients.await_(lambda: any(row["starts"] == 2 for row in clients.training()))
        end_tree(struck.pid)
        clock.skipped += LOST_AFTER + 1
        clients.await_(lambda: wandb_kit.count(server.audit(), "requeue") == 2)

        (tmp_path / "last-step").touch()
        last = clients.agent(path)
        assert clients.await_(lambda: last.poll() is not None)
        assert last.returncode == 0
    finally:
        clients.close()

    audit, rows = server.audit(), server.summary()["runs"]
    assert sorted((row["point"]["lr"], row["state"], row["starts"]) for row in rows) == [
        (0.5, "finished", 3),
        (1.0, "finished", 1),
    ]
    assert wandb_kit.count(audit, "start") == 2 + 2
    assert wandb_kit.double_heartbeats(audit) == []
    assert [note for note in audit if note["kind"] == "unknown"] == []
    told_by = run_python(READ, clients.env, tmp_path, path).partition("READ ")[2]
    said = json.loads(told_by)
    assert (said["state"], said["expected"], said["agents"]) == ("FINISHED", 2, 3)
    assert said["rates"] == [0.5, 1.0]
    assert said["last"] == [7, 7]
    assert all(steps == sorted(set(steps)) and steps[-1] == 7 for steps in said["steps"])
    assert all(len(scanned) == len(steps) for scanned, steps in zip(said["scanned"], said["steps"], strict=True))
    assert said["best"] == 0.5
    assert said["judged"] is True
