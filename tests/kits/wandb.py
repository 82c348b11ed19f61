"""Real programs of the `wandb` client against the stand-in: the environment they get, and a training that resumes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KEY = "k" * 40

# A user's program: marks itself preemptible at once, saves every step, and ends a preempted run with a non-zero status.
# Its last step waits for the file SWEEP_LAST_STEP, where one is named: until then a test knows that it trains.
PROGRAM = """\
import os, pathlib, signal, sys, time
import wandb

run = wandb.init(resume="allow")
run.mark_preempting()
place = pathlib.Path(os.environ["SWEEP_CHECKPOINTS"]) / run.id
step = int(place.read_text()) if place.exists() else 0
steps, last_step = int(os.environ.get("SWEEP_STEPS", "4")), os.environ.get("SWEEP_LAST_STEP", "")
leaving = []
signal.signal(signal.SIGTERM, lambda *_: leaving.append(True))
while step < steps and not leaving:
    if step == steps - 1 and last_step and not os.path.exists(last_step):
        time.sleep(0.05)
        continue
    run.log({"loss": run.config["lr"] / (step + 1)}, step=step)
    step += 1
    place.write_text(str(step))
    print("step", step, flush=True)
    time.sleep(float(os.environ.get("SWEEP_STEP_SECONDS", "0.2")))
run.finish(exit_code=1 if leaving else 0)
sys.exit(1 if leaving else 0)
"""


QUIET = {
    "WANDB_SILENT": "true",
    # Whole seconds: the client takes less than one for none, which means its default of 15.
    "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_CONSOLE": "off",
}


def environment(url: str, folder: Path, **more: str) -> dict[str, str]:
    """Of a client that knows nothing of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ours = {"HOME": str(folder), "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_DIR": str(folder)}
    return {**kept, **QUIET, **ours, "SWEEP_CHECKPOINTS": str(folder), **more}


def grid(program: Path, parameters: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {
        "program": str(program),
        "method": "grid",
        "metric": {"name": "loss", "goal": "minimize"},
        "command": [sys.executable, "${program}"],
        "parameters": {name: {"values": list(values)} for name, values in parameters.items()},
    }


def double_heartbeats(audit: Sequence[Mapping[str, Any]]) -> list[str]:
    """
    Signs that two agents had one run at once: reports of an agent after the run was given to another one, and what the
    server itself noted.
    """
    holder: dict[str, str] = {}
    faults = []
    for note in audit:
        if note["kind"] == "start":
            holder[note["run"]] = note["agent"]
        elif note["kind"] == "heartbeat":
            others = [run for run in note["runs"] if holder.get(run) != note["agent"]]
            faults += [f"{note['agent']} has {run}, which is {holder.get(run)}'s: {note}" for run in others]
        elif note["kind"] in ("conflict", "late"):
            faults.append(json.dumps(note))
    return faults


def count(audit: Sequence[Mapping[str, Any]], kind: str) -> int:
    return sum(note["kind"] == kind for note in audit)
