"""A swarm of four nodes that works for a W&B sweep, offline: a 3x3 grid through three preemptions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.kits import wandb as wandb_kit
from tests.kits.deployment import Deployment, deployment, environment_of
from tpucare.testbed.wandb import WandbServer

pytestmark = [pytest.mark.machines, pytest.mark.timeout(290)]

SLOTS = [f"swarm-{index}" for index in range(4)]
RATES, DEPTHS = (0.1, 0.2, 0.3), (2, 4, 8)


def _declare(home: Deployment) -> tuple[Path, Path]:
    """A sweep file beside its program, and a fleet file that says where it runs."""
    code = home.folder / "code"
    code.mkdir()
    (code / "train.py").write_text(wandb_kit.PROGRAM)
    sweep = {**wandb_kit.grid(Path("train.py"), {"lr": RATES, "depth": DEPTHS}), "project": "p"}
    (code / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    fleet = home.fleet("swarm", count=1, live=False, care={"grace": "20s"})
    own = {"SWEEP_CHECKPOINTS": str(home.bucket), "SWEEP_STEPS": "10", "SWEEP_STEP_SECONDS": "1"}
    # What a TPU VM's image or job.setup brings: a wandb on the PATH.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    fleet["job"] = {"workdir": "code", "env": {**wandb_kit.QUIET, **own, "PATH": path}, "run": "{agent}"}
    (home.folder / "swarm.yaml").write_text(yaml.safe_dump(fleet))
    return code / "sweep.yaml", home.folder / "swarm.yaml"


def _training(home: Deployment, server: WandbServer) -> dict[str, str]:
    """Node by W&B run, of runs that said they are preemptible and are at their first steps: most is still ahead."""
    begun = {row["run"] for row in server.summary()["runs"] if row["state"] == "running" and row["preempting"]}
    stepped = {row["run"] for row in server.summary()["runs"] if 0 < len(row["steps"]) < 4}
    found = {}
    for pid in home.machines.survivors():
        env = environment_of(pid)
        if (run := env.get("WANDB_RUN_ID")) in begun & stepped:
            found[str(run)] = env["TPUCARE_NODE"]
    return found


def test_a_swarm_finishes_a_grid_through_three_preemptions(tmp_path: Path) -> None:
    with (
        WandbServer(lost_after=15, audit_path=tmp_path / "wandb.jsonl") as server,
        deployment(tmp_path / "house", pace={"TPUCARE_SWEEP_POLL": "1"}) as home,
    ):
        home.environment |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": wandb_kit.KEY}
        home.secrets = (wandb_kit.KEY,)
        sweep, fleet = _declare(home)
        home.start()
        said = home.cli("sweep", str(sweep), "--count", "4", "--fleet", str(fleet), "--json").json
        home._known_fleets.add("swarm")
        assert (said["daemon"], said["slots"]) == (True, SLOTS)

        struck: dict[str, str] = {}
        for notice in ("", "15s", ""):
            fresh = home.await_(
                lambda: {run: node for run, node in _training(home, server).items() if run not in struck}, "a run", 120
            )
            run, node = min(fresh.items())
            struck[run] = node
            home.order("preempt", selector=node, **({"notice": notice} if notice else {}))

        def over() -> bool:
            rows = home.ask("status", target="swarm")["slots"]
            return not home.nodes() and all(row["over"] and row["end"] == "done" for row in rows)

        home.await_(over, "the sweep is over and nothing is left", 200)
        # The agents heard of it first; the daemon asks W&B every second.
        (progress,) = home.await_(
            lambda: [row for row in home.ask("status")["sweeps"] if row.get("finished") == 9], "the daemon knows it"
        )
        shown = home.cli("status").out
        for slot in SLOTS:
            home.allow_deletes(slot)

    rows, audit = server.summary()["runs"], server.audit()
    assert sorted((row["point"]["lr"], row["point"]["depth"]) for row in rows) == [
        (rate, depth) for rate in RATES for depth in DEPTHS
    ]
    assert {row["state"] for row in rows} == {"finished"}
    assert wandb_kit.count(audit, "requeue") == 3
    assert wandb_kit.count(audit, "start") == 9 + 3
    assert {row["run"] for row in rows if row["starts"] == 2} == set(struck)
    assert wandb_kit.double_heartbeats(audit) == []
    # Each goes on from its checkpoint. What a sudden death keeps from W&B is missing there, but nothing comes twice.
    assert all(row["steps"] == sorted(set(row["steps"])) and row["steps"][-1] == 9 for row in rows)
    assert {(home.bucket / row["run"]).read_text() for row in rows} == {"10"}
    assert (progress["state"], progress["finished"], progress["expected"]) == ("FINISHED", 9, 9)
    assert "9 of 9 runs finished" in shown
    assert wandb_kit.KEY not in (home.folder / "daemon.log").read_text()
