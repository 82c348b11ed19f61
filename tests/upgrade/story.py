"""
What a version of tpucare leaves on the disk, to be opened by later ones: `python -m tests.upgrade.story FOLDER`.

Run from a checkout of that version (with this file copied into it), it lives through a short story in virtual time and
writes down the state folder as text, the nodes that exist in the cloud, and what a launch sends to a worker. Slots of
every kind are in it: they train, wait for a create or a delete, are paused, done, failed, given or taken down.
"""

from __future__ import annotations

import json
import lzma
import sqlite3
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from tests.kits.harness import CARE, PROJECT, US, Daemon, place, slots_of
from tpucare.adapters.runner import launcher, scripts
from tpucare.adapters.state.store import open_store
from tpucare.api.contexts import StoredContexts
from tpucare.model.memory import DesiredState, FleetRecord, Memory
from tpucare.model.resources import Job, NodeKey, Provisioning, Slot, Worker
from tpucare.model.runs import LaunchOrder
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NodeSpec

MACHINE = "machine"
DOOR = "script.my-project"
SECRET_FREE = {"TOKEN": "no-secret"}
RUN_SLOT = "upgraded-0"
TRAIN = 'for step in $(seq 100000); do echo "step $step"; sleep 0.1; done'


# --- a context as a script of the Python API keeps it ---------------------------------------------------------------


class Point(NamedTuple):
    x: int
    y: int


class Settings(BaseModel):
    rate: float
    layers: list[int]


@dataclass
class Context:
    retry: int
    path: Path
    since: timedelta
    settings: Settings
    point: Point
    seen: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def context() -> Context:
    counts: dict[str, int] = defaultdict(int, pod=3)
    settings = Settings(rate=0.5, layers=[1, 2])
    return Context(4, Path("/data"), timedelta(hours=2), settings, Point(3, 4), {"a", "b"}, counts)


# --- the fleets of the story -----------------------------------------------------------------------------------------


def slots() -> dict[str, list[Slot]]:
    """By fleet, as declared in both versions."""
    single = place(kind="v2-8", workers=1)
    paid = replace(single, provisioning=Provisioning.ON_DEMAND)
    restart = replace(CARE, crash_budget=2, keep_failed=timedelta(days=30))
    return {
        "pod": slots_of("pod", 3, single),
        "gang": slots_of("gang", 1, place()),
        "held": slots_of("held", 1, single),
        "past": slots_of("past", 1, single),
        "broke": slots_of("broke", 1, paid, care=restart),
        "going": slots_of("going", 1, single),
        "asked": slots_of("asked", 1, single),
        "given": slots_of("given", 1, place()),
    }


def live(folder: Path) -> Daemon:
    """The story; it ends with the daemon killed."""
    config = WorldConfig.calm(latencies={"list_lag_share": 0.0, "create_single": "2m"})
    daemon = Daemon(folder, config=config)
    world, launcher = daemon.zone.world, daemon.launcher
    declared = slots()
    late = declared.pop("asked")
    daemon.care_for_slots("given", declared.pop("given"))
    daemon.wish("given-0", DesiredState.PAUSED)
    theirs = NodeSpec(accelerator_type="v3-32", runtime_version="tpu-ubuntu2204-base", spot=True)
    world.api.create_node(f"projects/{PROJECT}/locations/{US}", "mine", theirs, daemon.clock.true_now())
    for fleet, fleet_slots in declared.items():
        daemon.care_for_slots(fleet, fleet_slots)
    daemon.run(minutes=20)
    daemon.engine.adopt_node("mine", "given-0")
    daemon.wish("given-0", DesiredState.UP)
    daemon.wish("held-0", DesiredState.PAUSED)
    world.operator.preempt("pod-1", daemon.clock.true_now())
    daemon.run(minutes=15)
    for _ in range(2):
        _end(daemon, "pod-2", 1)
        daemon.run(minutes=20)
    launcher.script.exits["broke-0"] = (0, 1, 5.0)
    _end(daemon, "past-0", 0)
    daemon.run(minutes=60)
    world.operator.stick_deleting("going", daemon.clock.true_now(), repeats=5)
    assert daemon.store is not None
    daemon.store.save_fleet(replace(daemon.store.fleets()["going"], wish=DesiredState.DOWN))
    daemon.wish("going-0", DesiredState.DOWN)
    daemon.run(minutes=2)
    daemon.care_for_slots("asked", late)
    daemon.run(seconds=40)
    assert [worker.run.token for worker in launcher.running() if worker.run is not None]
    daemon.kill()
    return daemon


def _end(daemon: Daemon, slot: str, status: int) -> None:
    for worker in list(daemon.launcher.running()):
        if worker.run is not None and worker.run.slot == slot:
            daemon.launcher.end(worker, status)


# --- written down ----------------------------------------------------------------------------------------------------


def _world_of(daemon: Daemon) -> dict[str, Any]:
    """What exists outside of the state folder: nodes, and the runs on them."""
    nodes = []
    for record in daemon.zone.world.nodes():
        workers = daemon.launcher.of_node(*record.path)
        lives = [worker.run if daemon.launcher.lives(worker) else None for worker in workers]
        nodes.append(
            {
                "path": list(record.path),
                "id": record.id,
                "create_time": record.create_time.isoformat(),
                "state": int(record.state),
                "spec": {
                    "accelerator_type": record.spec.accelerator_type,
                    "runtime_version": record.spec.runtime_version,
                    "spot": record.spec.spot,
                    "labels": dict(record.spec.labels),
                    "metadata": dict(record.spec.metadata),
                },
                "external_ips": record.spec.network.enable_external_ips,
                "runs": [run.token if run is not None else "" for run in lives],
                "last_numbers": [worker.last_number for worker in workers],
            }
        )
    return {"seconds": daemon.clock.seconds, "nodes": nodes, "bucket": dict(daemon.launcher.bucket)}


def _dump(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        pragmas = [f"PRAGMA {name} = {connection.execute(f'PRAGMA {name}').fetchone()[0]};" for name in PRAGMAS]
        return "\n".join([*pragmas, *connection.iterdump()]) + "\n"
    finally:
        connection.close()


PRAGMAS = ("application_id", "user_version")


def launch_order() -> LaunchOrder:
    key = NodeKey("p", "z", f"{RUN_SLOT}-a1")
    job = Job(run=TRAIN, files={"config.txt": b"one\n"}, secrets=("TOKEN",))
    worker = Worker(key, 7, 0, "host-0")
    return LaunchOrder(
        workers=(worker,), slot=RUN_SLOT, fleet=RUN_SLOT, token=f"{key.name}.1", attempt=1, job=job,
        coordinator="127.0.0.1:8476", grace=timedelta(seconds=5),
    )  # fmt: skip


def _write_launch(folder: Path) -> None:
    order = launch_order()
    parcel = launcher.payload_of(order, SECRET_FREE)
    (folder / "launch.sh").write_text(scripts.launch_command(order, 0, push=True, start=True))
    (folder / "parcel.tar.xz").write_bytes(lzma.compress(parcel.full))


def write(folder: Path) -> None:
    """Everything, below *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch) / "state"
        daemon = live(state)
        now = daemon.clock.now()
        with open_store(state, machine_id=MACHINE, now=now, name=DOOR) as door:
            door.save_fleet(FleetRecord("script", "", "", now, project=PROJECT))
            door.save({"script": Memory("script", attempts=4, next_number=4)})
            StoredContexts(door).put("script", context())
        for path in sorted(state.glob("*.sqlite")):
            (folder / f"{path.stem}.sql").write_text(_dump(path))
        for name in ("owner", "stores"):
            (folder / name).write_text((state / name).read_text())
        (folder / "world.json").write_text(json.dumps(_world_of(daemon), indent=1) + "\n")
    _write_launch(folder)


if __name__ == "__main__":
    # Under its own name, for that is where the types of the context are looked for.
    from tests.upgrade import story

    story.write(Path(sys.argv[1]))
