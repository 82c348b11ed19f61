"""
Rows on lost nodes: how soon delete and create are accepted, one node at a time and 200 at once.

The workers of a lost node give no sign: what is measured is the way over the API alone, which is the slowest. Instants
are those at which the cloud accepts a call; its constant latencies on the way there (half a listing, a GetNode before
a delete, half a write) are subtracted, waiting for a thread is not.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.cloud_process import READ_SECONDS, WRITE_SECONDS, CloudProcess, world
from tests.bench.engine_thread import EngineThread
from tests.bench.installation import FLEET, Installation
from tests.bench.meter import wait_until
from tests.bench.report import Measure, percentile
from tpucare.engine.engine import Settings

SETTLE_SECONDS = 120.0
DELETE_LATENCY = READ_SECONDS / 2 + READ_SECONDS + WRITE_SECONDS / 2
CREATE_LATENCY = READ_SECONDS / 2 + WRITE_SECONDS / 2
NODES = 1000
POLL_SECONDS = 2.0
"""A shorter interval than the daemon's 5 s makes every delay of our own count more."""


def one_lost(losses: int = 40, nodes: int = NODES, poll: float = POLL_SECONDS, seed: int = 1) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        intervals = _lose_one_by_one(Path(folder), losses, nodes, poll, random.Random(seed))
    how = f"one of {nodes:,} nodes at a time, gRPC, poll {poll:g} s, no hint from workers"
    return one_lost_measures("1a", intervals, how)


def one_lost_measures(row: str, intervals: Sequence[float], how: str) -> list[Measure]:
    """Median and 99th percentile of *intervals*, from "shown PREEMPTED" to both calls accepted."""
    what = "lost node: delete and create accepted after it shows"
    figures = (("median", 0.6, 50), ("p99", 1.2, 99))
    return [
        Measure(row, f"{what}, {name}", limit, "poll intervals", (percentile(intervals, cut),), len(intervals), how)
        for name, limit, cut in figures
    ]


def _lose_one_by_one(folder: Path, losses: int, nodes: int, poll: float, rng: random.Random) -> list[float]:
    installation = Installation(folder)
    settings = Settings(poll=poll, fast_poll=min(1.0, poll), creates_per_minute=6000)
    with CloudProcess(world(latency=True)) as cloud:
        cloud.populate(FLEET, nodes, installation.owner)
        with EngineThread(installation.state, cloud.endpoint, nodes, settings) as engine_thread:
            found = []
            for _ in range(losses):
                wait_until(engine_thread.is_quiet, SETTLE_SECONDS, "all slots train")
                # Fast polls end with a last one; the loss must fall anywhere between two idle ones.
                time.sleep(poll * (1.2 + rng.random()))
                slot = f"{FLEET}-{rng.randrange(nodes)}"
                found.append(_lose(cloud, engine_thread, slot) / poll)
    return found


def _lose(cloud: CloudProcess, engine_thread: EngineThread, slot: str) -> float:
    """Seconds from "the API shows PREEMPTED" until delete and create were accepted, latencies subtracted."""
    node = next(iter(engine_thread.engine.slots[slot].nodes))
    cloud.calls()
    at = cloud.preempt([node])
    accepted: dict[str, float] = {}

    def is_accepted() -> bool:
        for instant, method, name in cloud.calls():
            if name == node or name.rpartition("-a")[0] == slot:
                accepted.setdefault(method, instant)
        return len(accepted) == 2

    wait_until(is_accepted, SETTLE_SECONDS, f"{slot} is replaced", every=0.02)
    return max(accepted["DeleteNode"] - at - DELETE_LATENCY, accepted["CreateNode"] - at - CREATE_LATENCY)


# --- a burst ---------------------------------------------------------------------------------------------------------

BURST = 200
BUDGET = 60
WINDOW = 60.0
ACCEPTED_LIMIT_SECONDS = 3.0


def burst(lost: int = BURST, nodes: int = NODES, budget: int = BUDGET, repeats: int = 2) -> list[Measure]:
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
            runs.append(_lose_at_once(Path(folder), lost, nodes, budget))
    seen = tuple(percentile(deletes, 99) for deletes, _ in runs)
    how = f"{lost} of {nodes:,} nodes at once, gRPC; from the listing that shows them, latency of calls subtracted"
    deletes = Measure("2a", "burst: deletes accepted, p99", ACCEPTED_LIMIT_SECONDS, "s", seen, lost, how, told=False)
    return [deletes, *budget_measures("2b", [creates for _, creates in runs], budget, lost, "gRPC")]


def _lose_at_once(folder: Path, lost: int, nodes: int, budget: int) -> tuple[list[float], list[float]]:
    """Seconds until each delete was accepted, since the first listing that showed the nodes; instants of creates."""
    installation = Installation(folder)
    with CloudProcess(world(latency=True)) as cloud:
        cloud.populate(FLEET, nodes, installation.owner)
        with EngineThread(
            installation.state, cloud.endpoint, nodes, Settings(creates_per_minute=budget)
        ) as engine_thread:
            wait_until(engine_thread.is_quiet, SETTLE_SECONDS, "all slots train")
            time.sleep(2 * WINDOW / budget)
            doomed = {f"{FLEET}-{index}-a0" for index in range(lost)}
            cloud.calls()
            at = cloud.preempt(sorted(doomed))
            calls: list[tuple[float, str, str]] = []

            def is_over() -> bool:
                calls.extend(cloud.calls())
                return sum(method == "CreateNode" for _, method, _ in calls) >= lost

            wait_until(is_over, lost / budget * WINDOW + SETTLE_SECONDS, "every node is replaced", every=0.5)
            listed = cloud.listed_after(at)
    deletes = [instant - listed for instant, method, name in calls if method == "DeleteNode" and name in doomed]
    creates = [instant for instant, method, _ in calls if method == "CreateNode"]
    return [seconds - DELETE_LATENCY for seconds in deletes], creates


def budget_measures(row: str, runs: Sequence[Sequence[float]], budget: int, creates: int, how: str) -> list[Measure]:
    """How well the create budget is used: the share of it that is taken from the first to the last create."""
    used = tuple(100 * budget_use(sorted(run), budget) for run in runs)
    most = tuple(float(most_in_window(sorted(run))) for run in runs)
    how = f"{creates} creates at {budget} a minute, {how}"
    return [
        Measure(row, "burst: create budget used until done", 95, "%", used, creates, how, at_least=True),
        Measure(row, "burst: creates in any 60 s", budget, "creates", most, creates, how, never=True),
    ]


def budget_use(instants: Sequence[float], budget: int) -> float:
    """Each create takes one of *budget* places for 60 s; the mean share of places taken, first to last create."""
    first, last = instants[0], instants[-1]
    if last <= first:
        return 1.0
    taken = sum(min(instant + WINDOW, last) - instant for instant in instants)
    return taken / (budget * (last - first))


def most_in_window(instants: Sequence[float]) -> int:
    """The most creates that any 60 s held."""
    begin, most = 0, 0
    for end, instant in enumerate(instants):
        while instant - instants[begin] >= WINDOW:
            begin += 1
        most = max(most, end - begin + 1)
    return most
