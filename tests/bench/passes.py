"""
Rows on quiet passes: what one costs in API calls, CPU and commits, and what many nodes weigh.

The engine runs step by step under a clock set by hand, its effects on the same thread, the cloud in another process:
the CPU time of this process is that of the listing's decoding and of what the engine makes of it, gRPC included.
"""

from __future__ import annotations

import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Hashable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from tests.bench import child
from tests.bench.cloud_process import PROJECT, CloudProcess, world
from tests.bench.engine_thread import SSH_KEY, EngineThread, slots
from tests.bench.installation import FLEET, Installation
from tests.bench.meter import use_of, wait_until
from tests.bench.report import Measure
from tests.bench.simulated import SteadyLauncher
from tests.kits import sshd
from tpucare.adapters.google.client import connect
from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.ssh.remote import ParamikoRemote
from tpucare.adapters.state.store import open_store
from tpucare.adapters.system import machine_id
from tpucare.engine.effects import Ports
from tpucare.engine.engine import Engine, Settings
from tpucare.model.memory import FleetRecord
from tpucare.model.ports import Finished, Lane
from tpucare.model.resources import NodeKey, Worker
from tpucare.testbed.simulation.time import VirtualClock

CPU_LIMIT_MS = 250
POLL_SECONDS = 5.0
NEVER = 1e9


class InlineExecutor:
    """`ports.Executor` that runs every effect at once, on the thread that submits it."""

    def __init__(self) -> None:
        self._ended: list[Finished] = []

    def submit(self, lane: Lane, tag: Hashable, effect: Callable[[], object]) -> None:
        try:
            self._ended.append(Finished(tag, result=effect()))
        except Exception as error:
            self._ended.append(Finished(tag, error=error))

    def finished(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended

    def sleep(self, timeout: timedelta) -> None: ...

    def nudge(self) -> None: ...


def measure(nodes: int, page_cap: int, passes: int) -> dict[str, list[float]]:
    """Per quiet pass: milliseconds of CPU, commits, and API calls. To be called in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        installation = Installation(Path(folder))
        with CloudProcess(world(page_cap=page_cap)) as cloud:
            cloud.populate(FLEET, nodes, installation.owner)
            return _measure(installation, cloud, nodes, passes)


def _measure(installation: Installation, cloud: CloudProcess, nodes: int, passes: int) -> dict[str, list[float]]:
    clock = VirtualClock()
    found: dict[str, list[float]] = {"cpu": [], "commits": [], "calls": [], "other": []}
    with (
        closing(open_store(installation.state, machine_id=machine_id(), now=clock.now())) as store,
        closing(connect(cloud.endpoint, monotonic=clock.monotonic)) as client,
        closing(sqlite3.connect(store.path)) as watcher,
    ):
        ports = Ports(client, SteadyLauncher(clock.monotonic), store.owner, SSH_KEY)
        # After the first ones probes stay away: they are no part of a pass.
        settings = Settings(poll=POLL_SECONDS, probe=NEVER, creates_per_minute=6000)
        engine = Engine(ports, store, clock, InlineExecutor(), random.Random(1), settings)
        store.save_fleet(FleetRecord(FLEET, "", "", clock.now()))
        engine.declare(FLEET, slots(nodes), lambda _: None)
        _settle(engine, clock)
        for _ in range(passes):
            cloud.counts()
            before = watcher.execute("PRAGMA data_version").fetchone()[0]
            found["cpu"].append(1000 * _pass(engine, clock))
            found["commits"].append(watcher.execute("PRAGMA data_version").fetchone()[0] - before)
            counts = cloud.counts()
            found["calls"].append(counts.pop("ListNodes", 0))
            found["other"].append(sum(counts.values()))
    return found


def _settle(engine: Engine, clock: VirtualClock) -> None:
    """Until every slot trains and has told of progress: from then on nobody is probed."""
    for _ in range(60):
        clock.seconds += 1.0
        while engine.step() <= 0.001:
            pass
        if all(_is_steady(engine, name) for name in engine.slots):
            break
    else:
        raise AssertionError([name for name in engine.slots if not _is_steady(engine, name)])
    for _ in range(3):
        _pass(engine, clock)


def _is_steady(engine: Engine, slot: str) -> bool:
    nodes = engine.slots[slot].nodes.values()
    return engine.is_training(slot) and all(seen.progress.first_step is not None for seen in nodes)


def _pass(engine: Engine, clock: VirtualClock) -> float:
    """Seconds of CPU of one pass: list, decode, decide."""
    view = engine.projects[PROJECT]
    clock.seconds += POLL_SECONDS
    passes, began = view.passes, time.process_time()
    while view.passes == passes or engine.state.dirty:
        engine.step()
    return time.process_time() - began


def memory(nodes: int, connections: int) -> int:
    """Resident bytes with *nodes* nodes and *connections* kept connections. To be called in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        installation, port = Installation(Path(folder)), sshd.free_port()
        with (
            CloudProcess(world()) as cloud,
            CloudProcess(world(seconds=0.1), port=port, key=installation.key) as workers,
        ):
            cloud.populate(FLEET, nodes, installation.owner)
            workers.populate(FLEET, connections, installation.owner)
            with EngineThread(installation.state, cloud.endpoint, nodes, Settings()) as engine_thread:
                wait_until(engine_thread.is_quiet, 600, "all slots train", every=1.0)
                key = load_or_make_key(installation.state / "ssh" / "id_ed25519")
                pins = installation.state / "hostkeys"
                with closing(ParamikoRemote(key, user="tpucare", pins=pins, nudge=lambda: None, port=port)) as remote:
                    connect_all(remote, connections)
                    # A round of probes, so that every part has been used.
                    time.sleep(20)
                    return use_of(os.getpid()).rss


def connect_all(remote: ParamikoRemote, count: int) -> None:
    """Open a kept connection to each of the first *count* workers of a data centre."""
    addresses = [f"127.{64 + index // 65536}.{index // 254 % 256}.{index % 254 + 1}" for index in range(count)]
    workers = [Worker(NodeKey("p", "z", f"n{index}"), 1, 0, address) for index, address in enumerate(addresses)]
    errors = [
        heard
        for heard in remote.each(workers, lambda worker: remote.run(worker, "true"))
        if isinstance(heard, Exception)
    ]
    if errors:
        raise errors[0]


# --- rows ------------------------------------------------------------------------------------------------------------


def quiet_passes(nodes: int = 10_000, passes: int = 8, repeats: int = 3) -> list[Measure]:
    few = child.run("passes", "measure", nodes=1, page_cap=1000, passes=passes)
    many = [child.run("passes", "measure", nodes=nodes, page_cap=1000, passes=passes) for _ in range(repeats)]
    small = child.run("passes", "measure", nodes=nodes, page_cap=100, passes=passes)
    rows = [
        _calls("4a", few, 1, 1, passes),
        _calls("4b", many[0], nodes, -(-nodes // 1000), passes),
        _calls("4c", small, nodes, -(-nodes // 100), passes),
    ]
    how = f"{nodes:,} nodes, pages of 1,000, CPU of the caretaker's process alone"
    medians = tuple(sorted(found["cpu"])[passes // 2] for found in many)
    rows.append(Measure("5a", "quiet pass: CPU", CPU_LIMIT_MS, "ms", medians, passes, how, told=False))
    commits = tuple(max(found["commits"]) for found in many)
    rows.append(Measure("5b", "quiet pass: commits", 0, "commits", commits, passes, f"{nodes:,} nodes", never=True))
    return rows


def _calls(row: str, found: dict[str, list[float]], nodes: int, pages: int, passes: int) -> Measure:
    calls = max(lists + other for lists, other in zip(found["calls"], found["other"], strict=True))
    how = f"{nodes:,} nodes, {pages} page{'s' if pages > 1 else ''}"
    return Measure(row, "quiet pass: API calls", pages, "calls", (calls,), passes, how, never=True)


def heavy_memory(nodes: int = 10_000, connections: int = 1000) -> list[Measure]:
    rss = child.run("passes", "memory", nodes=nodes, connections=connections)
    how = f"simulated workers, {connections:,} kept connections beside them"
    return [Measure("7c", f"resident memory, {nodes:,} nodes", 600, "MB", (rss / 1e6,), 1, how)]
