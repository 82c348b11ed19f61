"""The examples as a person runs them, against the emulated cloud, through a preemption each."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import yaml

from tests.kits import wandb as wandb_kit
from tests.kits.deployment import NEAR, TWO_HOSTS, Deployment, deployment, environment_of, eventually
from tpucare.testbed.wandb.server import WandbServer

pytestmark = [pytest.mark.machines, pytest.mark.timeout(150)]

T = TypeVar("T")

ZONE = "us-central2-b"
EXAMPLES = Path(__file__).parents[2] / "examples"

# Stands for a training: from START_STEP on, each fifth of a second a step, each step a checkpoint that appears whole.
TRAIN = """\
import os, pathlib, time
folder = pathlib.Path(os.environ["CHECKPOINT"])
step = int(os.environ.get("START_STEP") or 0)
print("version", VERSION, "begins after step", step, flush=True)
while True:
    time.sleep(0.2)
    step += 1
    half = folder / f"{step}.tmp-{os.urandom(8).hex()}"
    half.mkdir(parents=True)
    (half / "state").write_text("x")
    if not (folder / str(step)).exists():
        try:
            half.rename(folder / str(step))
        except OSError:
            pass
"""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, files: dict[str, str]) -> str:
    """Commit *files* to the repository in *folder*, which is made if it is not there; returns the commit."""
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "as a test wants it")
    return git(folder, "rev-parse", "HEAD")


def newest(folder: Path) -> int:
    return max((int(each.name) for each in folder.glob("*") if each.name.isdigit()), default=0)


class Script:
    """An example of the Python API as a process of its own, told where the cloud is by its environment alone."""

    def __init__(self, home: Deployment, name: str, *words: str) -> None:
        handle, log = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=home.folder)
        self.home, self._log = home, Path(log)
        command = [sys.executable, str(EXAMPLES / name), *words]
        self._process = subprocess.Popen(
            command, env=home.environment, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, cwd=home.folder
        )
        os.close(handle)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def await_(self, look: Callable[[], T | None], what: str) -> T:
        """As `eventually`; a script that ends by itself ends the wait."""

        def check() -> None:
            assert self._process.poll() is None, f"it ended with exit status {self._process.returncode}\n{self.said}"

        return eventually(look, what, tell=lambda: f"{self.home._told()}\n{self.said}", before_look=check)

    def await_said(self, pattern: str) -> list[str]:
        return self.await_(lambda: re.findall(pattern, self.said), f"it says {pattern!r}")

    def end(self, number: signal.Signals) -> int:
        """Its exit status after that signal."""
        self._process.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = 60) -> int:
        """Its exit status."""
        try:
            return self._process.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def script(home: Deployment, name: str, *words: str) -> Iterator[Script]:
    started = Script(home, name, *words)
    try:
        yield started
    finally:
        started.kill()


@contextlib.contextmanager
def of_the_door(folder: Path, fleet: str) -> Iterator[Deployment]:
    """A cloud for a script whose slots are deleted at its end, by Ctrl-C."""
    with deployment(folder, world={"zones": {ZONE: {}}}) as home:
        home.live_slots = None
        home._known_fleets.add(fleet)
        yield home


# --- pod.py ----------------------------------------------------------------------------------------------------------

RUN = """\
test "$1" = --config && test "$3 $4" = "--note it's"
echo ready > ~/ready-$TPUCARE_WORKER
export CHECKPOINT=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["checkpoint"])' "$2")
export START_STEP=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["start_step"])' "$2")
exec python3 train.py
"""


def test_a_pod_trains_through_a_preemption_and_a_restart_of_its_script(tmp_path: Path) -> None:
    repository = tmp_path / "training"
    commit(repository, {"train.py": f"VERSION = 1\n{TRAIN}", "run.sh": RUN, "setup.sh": "echo set up\n"})
    with of_the_door(tmp_path / "house", fleet="pod") as home:
        bucket = home.bucket / "pod"
        words = ["--host=pod", f"--zone={ZONE}", "--tpu-version=4", "--slices=2", f"--checkpoint={bucket}"]
        words += [f"--repository=file://{repository}", "--", "--note", "it's"]
        with script(home, "pod.py", *words) as first:
            first.await_said("pod: retry 0, from step 0")
            first.await_(lambda: newest(bucket) >= 3, "the pod trains")
            before = newest(bucket)
            home.order("preempt", selector="pod")
            (step,) = first.await_said(r"pod: retry 1, from step (\d+)")
            assert int(step) >= before
            first.await_(lambda: newest(bucket) >= int(step) + 3, "the next node goes on")
            first.await_(lambda: len(home.names()) == 1, "the first node is gone")
            assert first.end(signal.SIGTERM) == 128 + signal.SIGTERM
        (node,) = home.names()

        with script(home, "pod.py", *words) as second:
            after = newest(bucket)
            second.await_(lambda: newest(bucket) >= after + 3, "it was not disturbed")
            assert "retry" not in second.said
            home.order("preempt", selector=node)
            second.await_said("pod: retry 2, from step")
            home.allow_deletes("pod")
            assert second.end(signal.SIGINT) == 0
        eventually(lambda: home.names() == [], "nothing is left")


# --- inference.py ----------------------------------------------------------------------------------------------------


def servers(home: Deployment) -> dict[str, int]:
    """Pid of each node's server that generates text, by node."""
    found = {}
    for pid in home.machines.survivors():
        # A server that is ended meanwhile hangs up in the middle of its answer, and its environment goes with it.
        node = environment_of(pid).get("TPUCARE_NODE", "")
        with contextlib.suppress(psutil.Error, OSError, http.client.HTTPException):
            words = psutil.Process(pid).cmdline()
            if "--address" in words and words[0].endswith("python3"):
                address = words[words.index("--address") + 1]
                wish = urllib.request.Request(f"http://{address}:8000/generate", b'{"prompt": "The "}')
                with urllib.request.urlopen(wish, timeout=10) as answer:
                    assert json.load(answer)["text"].startswith("The ")
                found[node] = pid
    return found


def test_servers_are_started_again_and_their_nodes_replaced(tmp_path: Path) -> None:
    with of_the_door(tmp_path / "house", fleet="serve") as home:
        words = [f"--zone={ZONE}", "--accelerator-type=v4-8"]
        with script(home, "inference.py", "serve", "--tpus=2", *words) as serving:
            serving.await_(lambda: set(servers(home)) == {"serve-0-a0", "serve-1-a0"}, "both serve")
            home.order("preempt", selector="serve-0")
            killed = servers(home)["serve-1-a0"]
            os.kill(killed, signal.SIGKILL)
            nodes = {"serve-0-a1", "serve-1-a0"}
            serving.await_(lambda: (now := servers(home)).keys() == nodes and killed not in now.values(), "both again")

            # The health look is another process, which knows no more than a name and a zone.
            with script(home, "inference.py", "health", "--tpus=3", *words) as look:
                assert look.wait() == 1
            said = [line.split()[:2] for line in look.said.splitlines()]
            assert said == [["serve-0", "up"], ["serve-1", "up"], ["serve-2", "down"]], look.said
            home.allow_deletes("serve-0")
            home.allow_deletes("serve-1")
            assert serving.end(signal.SIGINT) == 0
        eventually(lambda: home.names() == [], "nothing is left")


# --- sweep.py --------------------------------------------------------------------------------------------------------


QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",
}


def test_a_sweep_finishes_though_a_node_is_preempted_in_the_middle_of_a_run(tmp_path: Path) -> None:
    with WandbServer(lost_after=15) as server, deployment(tmp_path / "house") as home:
        home._known_fleets.add("search")
        home.live_slots = None
        home.environment |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": wandb_kit.KEY, "TPUCARE_SWEEP_POLL": "1"}
        home.secrets = (wandb_kit.KEY,)
        # What the image of a TPU VM or the setup command brings: wandb.
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        points = yaml.safe_load((EXAMPLES / "sweep" / "sweep.yaml").read_text())
        points["parameters"] = {"lr": {"values": [0.03, 0.3]}, "momentum": {"value": 0.5}}
        (tmp_path / "two.yaml").write_text(yaml.safe_dump(points))
        words = [f"--sweep={tmp_path / 'two.yaml'}", "--type=v5p-8", f"--zone={NEAR}", f"--checkpoint={home.bucket}"]
        words += ["--count=2", "--setup=true", "--care=success_after=1s"]
        words += [f"--env={path}", "--env=STEPS=40", "--env=STEP_SECONDS=0.25"]
        words += [f"--env={name}={value}" for name, value in QUIET.items()]
        with script(home, "sweep.py", *words) as searching:
            # A run that has saved is told of its preemption, and has 15 s to leave.
            run, node = searching.await_(lambda: saved_run(home), "a run saves")
            home.order("preempt", selector=node, notice="15s")
            status = searching.wait(180)
        home.allow_deletes("search-0")
        home.allow_deletes("search-1")
        assert status == 0, searching.said
        rows = {row["run"]: row for row in server.summary()["runs"]}
        assert sorted((row["point"]["lr"], row["state"]) for row in rows.values()) == [
            (0.03, "finished"),
            (0.3, "finished"),
        ]
        assert [name for name, row in rows.items() if row["starts"] > 1] == [run]
        assert [row["steps"] for row in rows.values()] == [list(range(1, 41))] * 2, "each step once, none is missing"
        assert re.search(r"is over; best run \w+: loss 0\.\d+ with .*'lr': 0\.3", searching.said), searching.said
        assert home.names() == []


def saved_run(home: Deployment) -> tuple[str, str] | None:
    """A run of W&B that has a checkpoint and lives, and its node."""
    for pid in home.machines.survivors():
        env = environment_of(pid)
        if (run := env.get("WANDB_RUN_ID")) and newest(home.bucket / run):
            return run, env["TPUCARE_NODE"]
    return None


# --- pod_scripts -----------------------------------------------------------------------------------------------------


def on_all(home: Deployment, script: str, *words: str, **settings: str) -> str:
    """Run a script of the example on all workers, as its README says; what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", EXAMPLES / "pod_scripts" / "on_all.sh", "my-pod", script, *words],
        env={**home.environment, "PATH": path, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def begun(home: Deployment) -> list[str]:
    """What the trainings of both workers said when they began; a run that has started is not yet there."""
    return sorted(home.cli("exec", "my-pod", "--", "grep", "begins after", "pod-run/log", want=None).out.splitlines())


def test_a_pod_is_prepared_updated_and_resumed_by_its_scripts(tmp_path: Path) -> None:
    repository, bucket = tmp_path / "training", tmp_path / "house" / "bucket" / "my-pod"
    first = commit(repository, {"train.py": f"VERSION = 1\n{TRAIN}"})
    settings = {
        "REPOSITORY": f"file://{repository}",
        "INSTALL": "echo installed > ~/installed",
        "TEST": "test -s ~/installed",
        "TRAIN": "python3 train.py",
    }
    fleet = yaml.safe_load((EXAMPLES / "pod_scripts" / "pod.yaml").read_text())
    fleet["tpu"] |= {"type": TWO_HOSTS, "zones": [NEAR]}
    fleet["job"] |= {"workdir": str(EXAMPLES / "pod_scripts"), "env": settings, "checkpoint": str(bucket)}
    with deployment(tmp_path / "house") as home:
        home.declare("my-pod", yaml.safe_dump(fleet))
        assert home.live_slots is not None
        home.live_slots.add("my-pod-0")
        home.start()
        home.await_(lambda: newest(bucket) >= 3, "the pod trains")
        home.await_(lambda: "started; its log" in home.log("my-pod-0", worker=1), "the second worker trains, too")
        assert f"code at {first}" in home.log("my-pod-0", worker=1)
        home.await_(lambda: len(begun(home)) == 2, "both workers train")

        second = commit(repository, {"train.py": f"VERSION = 2\n{TRAIN}"})
        said = on_all(home, "update.sh", REPOSITORY=settings["REPOSITORY"])
        assert sorted(said.splitlines()) == [f"[{worker}] code at {second}" for worker in (0, 1)]
        assert "was left unchanged" in on_all(home, "run.sh")
        assert "stopped" in on_all(home, "stop.sh")
        reached = newest(bucket)
        with pytest.raises(AssertionError, match=f"has step {reached}: resume.sh resumes from there"):
            on_all(home, "run.sh")
        said = on_all(home, "resume.sh")
        assert re.findall(r"started from step (\d+)", said) == [str(reached)] * 2
        # "Started" says that the screen lives; Python takes its time.
        home.await_(lambda: len(begun(home)) == 4, "the new code has begun on both workers")
        lines = ["version 1 begins after step 0", f"version 2 begins after step {reached}"]
        assert begun(home) == [f"[{worker}] {line}" for worker in (0, 1) for line in lines]

        home.await_(lambda: newest(bucket) > reached, "the new code makes steps")
        before = newest(bucket)
        home.order("preempt", selector="my-pod-0")
        steps = home.await_(
            lambda: re.findall(r"started from step (\d+);", home.log("my-pod-0", attempt=2)), "the next node resumes"
        )
        resumed = int(steps[-1])
        assert resumed >= before > reached
        home.await_(lambda: newest(bucket) >= resumed + 2, "the next node trains")
