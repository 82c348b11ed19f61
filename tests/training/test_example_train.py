"""
`examples/train` keeps its promise: killed at whatever instants, it ends with the bits of an undisturbed training.

Real JAX, orbax and gloo in real processes. Runs share a cache of compiled programs, as nodes do through their bucket;
the undisturbed training compiles for itself, so that equal hashes also mean that the cache changed nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.kits.reference import undisturbed
from tpucare.adapters.runner.scripts import run_environment
from tpucare.model.resources import Job, NodeKey, Worker
from tpucare.model.runs import LaunchOrder
from tpucare.testbed.demo.examples import example_folder
from tpucare.testbed.demo.reference import free_loopback_endpoint, host_environment

TRAIN = example_folder("train")
SEED, SAVE_EVERY = 7, 10
# Of what is to be killed on its way: who reads of a step may be late, and the rest of the steps must outlast that.
UNHURRIED = 0.2

# Nothing here takes so long; a host that hangs is killed, and the test then says what it printed.
DEADLINE_SECONDS = 100.0


class HostProcess:
    """One host of a training: its output as it comes, and what it left."""

    def __init__(self, environ: dict[str, str], steps: int, save_every: int, step_seconds: float) -> None:
        command = [sys.executable, str(TRAIN / "train.py"), f"--steps={steps}", f"--seed={SEED}"]
        command += [f"--save-every={save_every}", f"--step-seconds={step_seconds}"]
        self.process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self.lines: list[str] = []
        self._watchdog = threading.Timer(DEADLINE_SECONDS, self.process.kill)
        self._watchdog.start()

    def read_until(self, pattern: str) -> str:
        """The first further line that *pattern* is found in."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern!r} did not come:\n{self.output}")

    def read_steps(self, count: int) -> None:
        for _ in range(count):
            self.read_until("^step ")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def exit_status(self) -> int:
        """Wait for the end, keeping what was still printed."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait()

    def end(self) -> None:
        self._watchdog.cancel()
        self.process.kill()
        self.exit_status()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"^step[ =:]+(\d+)", self.output, re.MULTILINE)]


Start = Callable[..., list[HostProcess]]


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def start(tmp_path: Path, compile_cache: Path) -> Iterator[Start]:
    """Starts all hosts of a training whose checkpoints lie in `tmp_path`; ends whatever is left."""
    started: list[HostProcess] = []

    def start_hosts(
        count: int = 1, *, steps: int, save_every: int = SAVE_EVERY, step_seconds: float = 0.02
    ) -> list[HostProcess]:
        coordinator = free_loopback_endpoint()
        for index in range(count):
            environ = host_environment(os.environ, index, count, coordinator, tmp_path / "checkpoints")
            environ |= {"JAX_COMPILATION_CACHE_DIR": str(compile_cache), "TPUCARE_NOTICE": str(tmp_path / "notice")}
            environ["TPUCARE_CADENCE"] = str(tmp_path / "cadence")
            started.append(HostProcess(environ, steps, save_every, step_seconds))
        return started[-count:]

    yield start_hosts
    for host in started:
        host.end()


def complete_steps(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in folder.glob("*") if each.name.isdigit())


def being_saved(folder: Path, step: int) -> bool:
    """True from the first trace of that checkpoint on, so that a killer who is too late for it ends nevertheless."""
    return any(each.name.split(".")[0] == str(step) for each in folder.glob("*"))


@pytest.mark.machines
def test_killed_at_three_moments_a_single_host_ends_with_the_same_parameters(start: Start, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    checkpoints = tmp_path / "checkpoints"

    (first,) = start(steps=50, step_seconds=UNHURRIED)
    first.read_until("^saved step 10")
    first.read_steps(rng.randrange(1, 6))
    first.kill()
    assert first.exit_status() == -signal.SIGKILL
    assert first.lines[0] == "starting from the beginning"
    newest = complete_steps(checkpoints)[-1]

    (second,) = start(steps=50)
    second.read_until(f"^step {newest + SAVE_EVERY} ")
    while not being_saved(checkpoints, newest + SAVE_EVERY):
        assert second.process.poll() is None, second.output
    second.kill()
    second.exit_status()
    newest = complete_steps(checkpoints)[-1]

    (third,) = start(steps=50)
    third.read_until("^resumed")  # the first step is still to be compiled
    third.kill()
    third.exit_status()
    assert f"resumed from step {newest}" in third.lines

    (last,) = start(steps=50)
    assert last.exit_status() == 0, last.output
    assert f"resumed from step {newest}" in last.lines
    assert last.steps == list(range(newest + 1, 51))
    assert complete_steps(checkpoints) == [30, 40, 50]
    assert [each.name for each in checkpoints.glob("*tmp*")] == []
    result = json.loads((checkpoints / "result.json").read_text())
    assert f"params_sha256 {result['params_sha256']}" in last.output
    assert result == undisturbed(
        TRAIN, hosts=1, steps=50, seed=SEED, save_every=SAVE_EVERY, folder=tmp_path / "reference"
    )

    (again,) = start(steps=50)
    assert again.exit_status() == 0
    assert again.steps == []
    assert json.loads((checkpoints / "result.json").read_text()) == result


@pytest.mark.machines
def test_one_of_two_hosts_killed_ends_the_other_and_the_resumed_pair_agrees(start: Start, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    pair = start(2, steps=40, step_seconds=UNHURRIED)
    pair[0].read_until("^saved step 10")
    pair[0].read_steps(rng.randrange(1, 2 * SAVE_EVERY))
    victim = rng.randrange(2)
    pair[victim].kill()
    assert pair[victim].exit_status() == -signal.SIGKILL
    assert pair[1 - victim].exit_status() not in (0, -signal.SIGKILL)
    newest = complete_steps(tmp_path / "checkpoints")[-1]

    pair = start(2, steps=40)
    assert [host.exit_status() for host in pair] == [0, 0], pair[0].output + pair[1].output
    assert f"resumed from step {newest}" in pair[0].lines
    assert pair[0].steps == list(range(newest + 1, 41))
    assert pair[1].steps == []
    assert json.loads((tmp_path / "checkpoints" / "result.json").read_text()) == undisturbed(
        TRAIN, hosts=2, steps=40, seed=SEED, save_every=SAVE_EVERY, folder=tmp_path / "reference"
    )


@pytest.mark.machines
def test_a_notice_saves_and_goes_on_and_sigterm_saves_and_stops(start: Start, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for leftover in ("900.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-1700000000000000"):
        (checkpoints / leftover / "default").mkdir(parents=True)
        (checkpoints / leftover / "default" / "manifest.ocdbt").write_bytes(b"half a checkpo")

    (host,) = start(steps=100_000, save_every=100_000)
    host.read_until("^step 3 ")
    (tmp_path / "notice").touch()
    saved = int(host.read_until("^saved step").split()[-1])
    host.read_steps(3)
    assert host.lines[0] == "starting from the beginning"
    assert complete_steps(checkpoints) == [saved]

    host.kill(signal.SIGTERM)
    assert host.exit_status() == 128 + signal.SIGTERM, host.output
    assert complete_steps(checkpoints) == [saved, host.steps[-1]]


def test_a_notice_counts_once_and_again_when_it_is_written_anew(hosts_module: ModuleType, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    requests = hosts_module.Requests(notice)
    wishes = [requests.wish()]
    for event in (1, 2):
        notice.touch()
        os.utime(notice, ns=(event, event))
        wishes += [requests.wish(), requests.wish()]
    none, save = hosts_module.Wish.NONE, hosts_module.Wish.SAVE
    assert wishes == [none, save, none, save, none]


def test_by_hand_it_is_one_host_and_keeps_its_numerics_pinned(hosts_module: ModuleType) -> None:
    host = hosts_module.Host.from_environment({"TPUCARE_DEMO_CPU": "1"})
    assert (host.index, host.count, host.checkpoint, host.notice) == (0, 1, "checkpoints", None)
    environ = {"XLA_FLAGS": "--xla_something_else=1"}
    hosts_module.prepare_jax(host, environ)
    assert environ["JAX_PLATFORMS"] == "cpu"
    assert environ["XLA_FLAGS"] == hosts_module.CPU_XLA_FLAGS


def test_on_a_tpu_vm_the_platform_and_its_flags_are_left_alone(hosts_module: ModuleType) -> None:
    environ = {"XLA_FLAGS": "--xla_something_else=1"}
    hosts_module.prepare_jax(hosts_module.Host.from_environment(environ), environ)
    assert "JAX_PLATFORMS" not in environ
    assert environ["XLA_FLAGS"] == "--xla_something_else=1"


@pytest.fixture
def hosts_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`hosts.py` of the example, which does without JAX until it is asked to join others."""
    monkeypatch.syspath_prepend(str(TRAIN))
    import hosts  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "hosts")
    module: ModuleType = hosts
    return module


COMPILES = """
import jax, jax.monitoring, jax.numpy as jnp
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
print(jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((8, 8))).sum())
print(seen.count("cache_hits"), seen.count("cache_misses"))
"""


def test_a_new_node_compiles_nothing_that_an_earlier_one_did(tmp_path: Path) -> None:
    """The environment of two attempts on two nodes, as tpucare makes it, names one cache, and the second run hits."""
    said = []
    for attempt in (1, 2):
        job = Job(run="x", checkpoint=str(tmp_path / "run"), env={"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})
        workers = (Worker(NodeKey("p", "z", f"pod-0-a{attempt}"), attempt, 0, "host"),)
        order = LaunchOrder(workers, "pod-0", "pod", f"pod-0-a{attempt}.1", attempt, job, "host:1")
        environ = {**os.environ, **run_environment(order, {}), "JAX_PLATFORMS": "cpu"}
        environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        done = subprocess.run([sys.executable, "-c", COMPILES], env=environ, capture_output=True, text=True, check=True)
        said.append(done.stdout.splitlines()[-1].split())
    (hits, misses), (later_hits, later_misses) = said
    assert (hits, later_misses) == ("0", "0")
    assert int(later_hits) == int(misses) > 0


@pytest.mark.machines
def test_it_saves_as_often_as_it_is_told_and_says_what_a_save_costs(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cadence").write_text('{"interval_seconds": 0.5}')
    (host,) = start(steps=100_000, save_every=0, step_seconds=0.02)
    before = 0
    for _ in range(3):
        saved = int(host.read_until("^saved step").split()[-1])
        # Half a second has room for 25 steps at most, however slow the machine is; the last one may begin at its end.
        assert before < saved <= before + 27
        assert saved <= complete_steps(tmp_path / "checkpoints")[-1]
        before = saved
    assert json.loads((tmp_path / "saves").read_text())["save_seconds"] > 0
    host.kill()
