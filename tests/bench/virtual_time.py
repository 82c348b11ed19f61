"""
Rows in virtual time: the same engine over the emulator's world without a network, so that many samples cost little,
and every one of them falls at an instant drawn from a seed. And how fast that is, for whoever simulates months.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.bench.lost import BUDGET, BURST, NODES, budget_measures, one_lost_measures
from tests.bench.report import Measure
from tests.kits.harness import US, Daemon, place
from tpucare.engine.engine import Settings
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.simulation.campaign import Plan, live
from tpucare.testbed.simulation.machines import Script
from tpucare.testbed.simulation.time import START

READ_SECONDS, WRITE_SECONDS = 0.15, 0.4


@contextmanager
def _daemon(nodes: int, settings: Settings, seed: int = 1) -> Iterator[Daemon]:
    """A daemon whose *nodes* slots all train; deaths and births of nodes take seconds, calls what real ones take."""
    lengths: dict[str, Any] = dict.fromkeys(("create_single", "operation_done", "boot_late", "delete"), 2.0)
    lengths |= {"read": READ_SECONDS, "write": WRITE_SECONDS, "visible": 0.0}
    config = WorldConfig.calm(latencies=lengths, rates={"create": None}, audit_reads=False)
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        start = Settings(creates_per_minute=10**6)
        daemon = Daemon(Path(folder), config=config, seed=seed, script=Script(setup_seconds=1.0), settings=start)
        daemon.care_for("bench", nodes, place(US, "v2-8", workers=1))
        daemon.run_until(daemon.all_train)
        # The store is closed while the world goes on, as by a restart: the budget of what is measured begins anew.
        daemon.settings = settings
        daemon.run(minutes=2)
        daemon.restart()
        daemon.run_until(daemon.all_train)
        daemon.run(minutes=1)
        yield daemon
        daemon.kill()


def one_lost(losses: int = 200, nodes: int = NODES, seed: int = 1) -> list[Measure]:
    how = f"one of {nodes:,} nodes at a time, virtual time, poll 5 s"
    silent = _lose_one_by_one(losses, nodes, seed, hangs_up=False)
    missed = _lose_one_by_one(losses, nodes, seed, hangs_up=True)
    return [
        *one_lost_measures("1b", silent, f"{how}, no hint from workers"),
        *one_lost_measures("1c", missed, f"{how}, the dying worker hangs up"),
    ]


def _lose_one_by_one(losses: int, nodes: int, seed: int, *, hangs_up: bool) -> list[float]:
    """Poll intervals from "the API shows PREEMPTED" to delete and create accepted."""
    rng, settings = random.Random(seed), Settings(creates_per_minute=6000)
    found = []
    with _daemon(nodes, settings) as daemon:
        daemon.launcher.hangs_up = hangs_up
        for _ in range(losses):
            daemon.run(seconds=20 + rng.uniform(0, settings.poll))
            found.append(_lose(daemon, rng.randrange(nodes)) / settings.poll)
    return found


def _lose(daemon: Daemon, index: int) -> float:
    """Seconds until delete and create were accepted; the answers on the way there are subtracted."""
    slot, now = f"bench-{index}", daemon.clock.true_now()
    mark = len(daemon.zone.world.audit)
    daemon.zone.world.operator.preempt(daemon.node_of(slot).name, now, notice=None, visible_after=timedelta())
    daemon.run(seconds=20)
    at = {
        str(call["method"]): (_instant(call) - now).total_seconds()
        for call in reversed(list(daemon.zone.world.audit)[mark:])
        if call["kind"] == "call" and call.get("code") == 0
    }
    # Of a call in virtual time the world hears at once; its answer takes the time. Before a delete the node is read.
    return max(at["DeleteNode"] - 2 * READ_SECONDS, at["CreateNode"] - READ_SECONDS)


def burst(lost: int = BURST, nodes: int = NODES, seeds: int = 3) -> list[Measure]:
    runs = []
    for seed in range(1, seeds + 1):
        with _daemon(nodes, Settings(creates_per_minute=BUDGET), seed) as daemon:
            mark = len(daemon.zone.world.audit)
            _preempt(daemon, lost)
            daemon.run(minutes=lost / BUDGET + 2)
            runs.append(_creates(daemon, mark))
    return budget_measures("2c", runs, BUDGET, lost, "virtual time")


def _preempt(daemon: Daemon, lost: int) -> None:
    for index in range(lost):
        name = daemon.node_of(f"bench-{index}").name
        daemon.zone.world.operator.preempt(name, daemon.clock.true_now(), notice=None, visible_after=timedelta())


def _creates(daemon: Daemon, mark: int) -> list[float]:
    calls = [call for call in list(daemon.zone.world.audit)[mark:] if call["kind"] == "call"]
    return [(_instant(call) - START).total_seconds() for call in calls if call["method"] == "CreateNode"]


def _instant(call: Any) -> datetime:
    return datetime.fromisoformat(str(call["at"]))


def speed(nodes: int = NODES, minutes: float = 20.0, repeats: int = 2) -> list[Measure]:
    """How much life of nodes a second of CPU simulates while nothing happens. There is no limit to it yet."""
    found = []
    for pause in (60.0, 300.0):
        with _daemon(nodes, Settings(poll=30.0, fast_poll=30.0, probe=pause)) as daemon:
            lived = [_live(daemon, minutes) for _ in range(repeats)]
        how = f"{nodes:,} slots, nothing happens, poll 30 s, a probe each {pause:g} s"
        unit = "node-days per CPU second"
        days = tuple(nodes * minutes / (24 * 60) / seconds for seconds in lived)
        found.append(Measure("9", "virtual time", None, unit, days, 1, how))
    return found


def _live(daemon: Daemon, minutes: float) -> float:
    began = time.process_time()
    daemon.run(minutes=minutes)
    return time.process_time() - began


# --- months with faults ----------------------------------------------------------------------------------------------

MONTHS_LIMIT_SECONDS, CORES = 300.0, 2


def months(days: float = 9.0, slots: int = NODES) -> list[Measure]:
    """What 90 days of bad weather cost: as many histories at once as cores, each of which is counted as its share."""
    plan = Plan(days, "low", count=slots)
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("forkserver")) as pool:
        seconds = tuple(pool.map(_month, [plan] * CORES, range(1, CORES + 1)))
    values = tuple(each * 90.0 / days / CORES for each in seconds)
    how = f"{slots:,} slots, poll 30 s, low faults, scaled from {days:g} days; {CORES} histories on {CORES} cores"
    return [Measure("9c", "90 days simulated, with faults", MONTHS_LIMIT_SECONDS, "s", values, 1, how, told=False)]


def _month(plan: Plan, seed: int) -> float:
    """Seconds of CPU that one history takes. Raises: AssertionError: a property broke."""
    began = time.process_time()
    outcome = live(plan, seed)
    assert not outcome.broken, outcome.broken
    return time.process_time() - began
