"""The examples as a person runs them, against the emulated cloud, through a preemption each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.kit import NEAR, TWO_HOSTS, House, house

pytestmark = [pytest.mark.machines, pytest.mark.timeout(150)]

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
    half = folder / f"{step}.tmp-{os.getpid()}"
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


# --- pod_scripts -----------------------------------------------------------------------------------------------------


def on_all(home: House, script: str, *words: str, **settings: str) -> str:
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
    with house(tmp_path / "house") as home:
        home.declare("my-pod", yaml.safe_dump(fleet))
        assert home.live_slots is not None
        home.live_slots.add("my-pod-0")
        home.start()
        home.await_(lambda: newest(bucket) >= 3, "the pod trains")
        log = home.await_(lambda: home.log("my-pod-0", worker=1), "the second worker's log")
        assert f"code at {first}" in log
        assert "started; its log" in log

        second = commit(repository, {"train.py": f"VERSION = 2\n{TRAIN}"})
        said = on_all(home, "update.sh", REPOSITORY=settings["REPOSITORY"])
        assert sorted(said.splitlines()) == [f"[{worker}] code at {second}" for worker in (0, 1)]
        assert "is left alone" in on_all(home, "run.sh")
        assert "stopped" in on_all(home, "stop.sh")
        reached = newest(bucket)
        with pytest.raises(AssertionError, match=f"holds step {reached}: resume.sh goes on from there"):
            on_all(home, "run.sh")
        said = on_all(home, "resume.sh")
        assert re.findall(r"started from step (\d+)", said) == [str(reached)] * 2
        for worker in ("0", "1"):
            lines = home.cli("exec", "my-pod", "-w", worker, "--", "grep", "begins after", "pod-run/log").out
            assert lines.splitlines() == ["version 1 begins after step 0", f"version 2 begins after step {reached}"]

        before = newest(bucket)
        home.order("preempt", selector="my-pod-0")
        said = home.await_(
            lambda: "".join(re.findall(r"started from step \d+", home.log("my-pod-0", attempt=2))),
            "the next node resumes",
        )
        resumed = int(said.split()[-1])
        assert resumed >= before > reached
        home.await_(lambda: newest(bucket) >= resumed + 2, "the next node trains")
