"""What an earlier version left is opened by this one: what lives is adopted, and nothing of it is lost."""

from __future__ import annotations

import json
import lzma
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.bench_worker import NO_METADATA, eventually
from tests.kits.harness import Daemon
from tests.kits.local_remote import LocalRemote
from tests.upgrade import story
from tpucare.adapters.runner.launcher import ScriptLauncher
from tpucare.adapters.state.store import open_store
from tpucare.api.contexts import StoredContexts
from tpucare.model.memory import ENDED_BY_PROGRESS, DesiredState, End, Memory
from tpucare.model.resources import NodeState
from tpucare.model.runs import Phase, ProbeOrder, StopOrder
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NetworkConfig, NodePath, NodeSpec
from tpucare.testbed.simulation.daemon import DataCentre

# Named after the commit that wrote it; see `story`.
LEFT = Path(__file__).parents[1] / "upgrade" / "471f598"
WORLD: dict[str, Any] = json.loads((LEFT / "world.json").read_text())
STAY = ("pod-0", "pod-1", "pod-2", "gang-0", "held-0", "given-0")


def unpack(folder: Path) -> Path:
    """The state folder as it lay on the disk."""
    folder.mkdir(mode=0o700)
    for name in ("owner", "stores"):
        shutil.copy(LEFT / name, folder / name)
    for dump in LEFT.glob("*.sql"):
        with closing(sqlite3.connect(folder / f"{dump.stem}.sqlite")) as connection:
            connection.executescript(dump.read_text())
    return folder


def left_memories() -> dict[str, dict[str, Any]]:
    """What was remembered, as it stands in the file."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((LEFT / "tpucare.sql").read_text())
        return {name: json.loads(text) for name, text in connection.execute("SELECT name, memory FROM slots")}


def build_cloud(zone: DataCentre) -> None:
    """The nodes that existed when the daemon was ended, with their runs; in a world of this version."""
    asked = [node for node in WORLD["nodes"] if node["state"] == NodeState.CREATING]
    for node in WORLD["nodes"]:
        if node not in asked:
            _build_node(zone, node)
    _wait(zone, 600)
    for node in asked:
        _build_node(zone, node)
    _wait(zone, 40)
    for node in WORLD["nodes"]:
        for number, token in enumerate(node["runs"]):
            worker = zone.launcher.of_node(*node["path"])[number]
            if token:
                zone.launcher.start(worker, token, slot_of(token))
            worker.last_number = node["last_numbers"][number]
        if node["state"] == NodeState.DELETING:
            zone.world.operator.stick_deleting(node["path"][2], zone.clock.true_now(), repeats=1)
            zone.world.api.delete_node(str(NodePath(*node["path"])), zone.clock.true_now())
    zone.launcher.launches.clear()


def slot_of(token: str) -> str:
    return next(name for name, memory in left_memories().items() if (memory["run"] or {}).get("token") == token)


def _wait(zone: DataCentre, seconds: float) -> None:
    zone.clock.seconds += seconds
    zone.tick()


def _build_node(zone: DataCentre, node: dict[str, Any]) -> None:
    path, world = NodePath(*node["path"]), zone.world
    network = NetworkConfig(enable_external_ips=node["external_ips"])
    spec = NodeSpec(**node["spec"], network=network, has_network=True)
    world.api.create_node(path.parent, path.node_id, spec, zone.clock.true_now())
    life = world.state.nodes[path]
    del world.state.by_id[life.record.id]
    world.state.by_id[node["id"]] = life
    created = datetime.fromisoformat(node["create_time"])
    world.state.change(life, id=node["id"], create_time=created)


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    """Of this version, not yet started, on the state folder and in the world that the earlier one left."""
    config = WorldConfig.calm(latencies={"list_lag_share": 0.0, "create_single": "2m", "create_slice": "2m"})
    # Another seed than the story's: ids that this world makes must not be those of its nodes.
    made = Daemon(unpack(tmp_path / "state"), config=config, seed=2)
    made.kill()
    made.zone.launcher.bucket.update(WORLD["bucket"])
    made.clock.seconds = WORLD["seconds"] - 640
    build_cloud(made.zone)
    made.declared = story.slots()
    return made


def told_of(memory: Memory) -> dict[str, Any]:
    """What must be the same before and after, in the form of the file."""
    books = {name: (book.failures, book.total, book.reason) for name, book in memory.books.items()}
    nodes = [(node.name, node.id, node.zone, node.attempt, node.launched) for node in memory.nodes]
    return {
        "fleet": memory.fleet,
        "wish": memory.wish.value,
        "end": (memory.end.value, memory.end_why),
        "numbers": (memory.next_number, memory.attempts, memory.asked_from),
        "nodes": nodes,
        "run": memory.run and (memory.run.token, memory.run.job, memory.run.progressed),
        "books": books,
        "step_job": memory.step_job,
        "places": {key: (place.blocked, place.last_success) for key, place in memory.places.items()},
    }


def left_as_told(raw: dict[str, Any]) -> dict[str, Any]:
    run = raw["run"]
    return {
        "fleet": raw["fleet"],
        "wish": raw["wish"],
        "end": (raw["end"], raw["end_why"]),
        "numbers": (raw["next_number"], raw["attempts"], raw["asked_from"]),
        "nodes": [(n["name"], n["id"], n["zone"], n["attempt"], n["launched"]) for n in raw["nodes"]],
        "run": run and (run["token"], run["job"], run["progressed"]),
        "books": {name: (book["failures"], book["total"], book["reason"]) for name, book in raw["books"].items()},
        "step_job": raw["step_job"],
        "places": {
            key: (place["blocked"], datetime.fromisoformat(place["last_success"]) if place["last_success"] else None)
            for key, place in raw["places"].items()
        },
    }


# --- the state folder ------------------------------------------------------------------------------------------------


def after_progress(told: dict[str, Any]) -> dict[str, Any]:
    """A run that got further ends the row of its job's failures; how many there were in all, and why, stays."""
    if told["run"] is None:
        return told
    ended = {name.value for name in ENDED_BY_PROGRESS}
    books = {name: (0 if name in ended else row, total, reason) for name, (row, total, reason) in told["books"].items()}
    return {**told, "books": books}


def test_everything_remembered_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = unpack(tmp_path / "state")
    left = left_memories()
    with open_store(folder, machine_id=story.MACHINE, now=datetime.fromisoformat("2026-11-01T03:00:00Z")) as store:
        assert store.owner == (LEFT / "owner").read_text().strip()
        assert not store.lost
        assert {slot: told_of(memory) for slot, memory in store.memories().items()} == {
            slot: left_as_told(raw) for slot, raw in left.items()
        }
        fleets = store.fleets()
        assert {name: record.wish for name, record in fleets.items()} == {
            name: DesiredState.DOWN if name == "going" else DesiredState.UP for name in story.slots()
        }
        assert len(store.events(limit=1000)) == (LEFT / "tpucare.sql").read_text().count('INSERT INTO "events"')


def test_what_a_script_kept_is_given_back_in_its_types(tmp_path: Path) -> None:
    folder, now = unpack(tmp_path / "state"), datetime.fromisoformat("2026-11-01T03:00:00Z")
    with open_store(folder, machine_id=story.MACHINE, now=now, name=story.DOOR) as door:
        assert StoredContexts(door).get("script") == story.context()


def test_what_lives_is_adopted_and_nothing_is_lost(daemon: Daemon) -> None:
    left = left_memories()
    daemon.start()
    daemon.run(minutes=30)
    assert set(daemon.zone.created()) == {str(NodePath(*node["path"])) for node in WORLD["nodes"]}, "no other"
    assert len(daemon.zone.created()) == len(WORLD["nodes"]), "and none again"
    assert daemon.launcher.launches == ["asked-0-a0.1"], "the create that was under way"
    assert daemon.launcher.stops == []
    assert {str(call["name"]).rpartition("/")[2] for call in daemon.zone.calls("DeleteNode")} == {"going-0-a0"}
    assert daemon.zone.states("going") == [], "the delete under way was repeated"
    for slot in STAY:
        assert told_of(daemon.memory(slot)) == after_progress(left_as_told(left[slot]))
    assert all(daemon.trains(slot) for slot in (*STAY, "asked-0") if slot != "held-0")
    assert (daemon.memory("past-0").end, daemon.memory("broke-0").end) == (End.DONE, End.FAILED)
    assert daemon.zone.states("broke") == ["READY"], "kept for a look"
    assert all((daemon.memory(slot).step or 0) >= (left[slot]["step"] or 0) for slot in left)


def test_what_comes_next_goes_on_from_it(daemon: Daemon) -> None:
    left = left_memories()
    daemon.start()
    daemon.run(minutes=5)
    daemon.zone.world.operator.preempt("pod-1", daemon.clock.true_now())
    daemon.zone.world.operator.preempt("gang", daemon.clock.true_now())
    daemon.run(minutes=15)
    assert daemon.zone.states("pod-1") == ["READY"]
    assert [daemon.node_of(slot).key.name for slot in ("pod-1", "gang-0")] == ["pod-1-a2", "gang-0-a1"]
    for slot in ("pod-1", "gang-0"):
        assert daemon.memory(slot).attempts == left[slot]["attempts"] + 1
    assert daemon.memory("pod-1").books["preemption"].total == left["pod-1"]["books"]["preemption"]["total"] + 1


# --- a worker --------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Iterator[LocalRemote]:
    """A worker on which the earlier version launched a run."""
    made = LocalRemote(env=NO_METADATA)
    try:
        order = story.launch_order()
        parcel = lzma.decompress((LEFT / "parcel.tar.xz").read_bytes())
        ran = made.run(order.workers[0], (LEFT / "launch.sh").read_text(), stdin=parcel, deadline=timedelta(seconds=60))
        assert (ran.exit_status, ran.stdout.strip()) == (0, b"started"), ran
        yield made
    finally:
        made.close()


@pytest.mark.machines
@pytest.mark.skipif(shutil.which("screen") is None, reason="screen is not installed")
def test_a_run_that_an_earlier_version_launched_is_probed_kept_and_stopped(remote: LocalRemote) -> None:
    order = story.launch_order()
    launcher = ScriptLauncher(remote, state_dir=remote.root / "state", secrets=story.SECRET_FREE.get)
    ask = ProbeOrder(order.workers, order.slot, 1)
    eventually(lambda: (launcher.probe(ask).workers[0].step or 0) >= 2)
    (report,) = launcher.probe(ask).workers
    assert (report.token, report.alive, report.phase, report.last_number) == (order.token, True, Phase.RUN, 1)
    assert "step 1\n" in launcher.logs.read(order.slot, 1, 0).decode()
    # The same launch said again, and one that does not know of it, leave it alone.
    assert launcher.launch(order).complete
    other = launcher.launch(replace(order, token=f"{order.token[:-1]}2"))
    assert not other.complete
    assert launcher.probe(ask).workers[0].token == order.token
    assert launcher.stop(StopOrder(order.workers, order.slot, 1, timedelta(seconds=5))).quiet
    eventually(lambda: not launcher.probe(ask).workers[0].alive)
    (report,) = launcher.probe(ask).workers
    assert (report.token, report.signalled) == (order.token, True)
    # And the next run of it, by this version, begins.
    assert launcher.launch(replace(order, token=f"{order.token[:-1]}3")).complete
    eventually(lambda: (launcher.probe(ask).workers[0].step or 0) >= 2)
    assert launcher.probe(ask).workers[0].last_number == 3
    assert launcher.stop(StopOrder(order.workers, order.slot, 1, timedelta(seconds=5))).quiet
