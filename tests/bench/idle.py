"""
Rows on the daemon at rest and in the long run: CPU and memory with a thousand kept connections, and what is left
behind by five hundred recoveries. The real daemon in a process of its own, over real SSH to workers that stand in.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from tests.bench import child
from tests.bench.cloud_process import CloudProcess, world
from tests.bench.installation import FLEET, Daemon, Installation
from tests.bench.meter import Use, use_of, wait_until
from tests.bench.passes import connect_all
from tests.bench.report import Measure
from tests.kits import sshd
from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.ssh.remote import ParamikoRemote
from tpucare.adapters.state.store import EVENTS_KEPT_PER_SLOT, open_store
from tpucare.adapters.system import SystemClock, machine_id
from tpucare.planner.remember import BUDGET_WINDOW

START_SECONDS = 300.0
# After a start every node is asked each second until its run makes progress, and the last commits of that follow.
QUIET_SECONDS = 45.0


def at_rest(nodes: int = 1000, windows: int = 3, window: float = 30.0) -> list[Measure]:
    uses = _rest(nodes, windows, window)
    shares = tuple(after.core_share(before) for before, after in pairwise(uses))
    rss = (uses[-1].rss / 1e6,)
    single = (_rest(1, 1, 15.0)[-1].rss / 1e6,)
    seconds = int(window)
    how = f"the daemon, {nodes:,} slots, poll 5 s, probes over kept connections"
    alone = tuple(child.run("idle", "connections_alone", count=nodes, seconds=seconds) for _ in range(2))
    return [
        Measure("6a", f"idle: {nodes:,} kept connections", 5, "% of a core", alone, seconds, "nothing asked of them"),
        Measure("6b", "idle: daemon in all", 10, "% of a core", shares, seconds, how),
        Measure("7a", "resident memory, 1 node", 120, "MB", single, 1, "the daemon"),
        Measure("7b", f"resident memory, {nodes:,} nodes", 250, "MB", rss, 1, "the daemon, all connections kept"),
    ]


def _rest(nodes: int, windows: int, window: float) -> list[Use]:
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        installation, port = Installation(Path(folder)), sshd.free_port()
        installation.declare(nodes)
        with CloudProcess(world(seconds=0.2), port=port, key=installation.key) as cloud:
            cloud.populate(FLEET, nodes, installation.owner)
            with Daemon(installation, installation.environment(cloud.endpoint, port)) as daemon:
                wait_until(lambda: cloud.workers()["running"] == nodes, START_SECONDS, "every slot trains")
                time.sleep(QUIET_SECONDS)
                uses = [daemon.use()]
                for _ in range(windows):
                    time.sleep(window)
                    uses.append(daemon.use())
                return uses


def connections_alone(count: int, seconds: float) -> float:
    """Percent of a core that *count* open connections cost. To be called in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        installation, port = Installation(Path(folder)), sshd.free_port()
        with CloudProcess(world(seconds=0.1), port=port, key=installation.key) as workers:
            workers.populate(FLEET, count, installation.owner)
            wait_until(lambda: workers.workers()["up"] == count, START_SECONDS, "every worker listens")
            key = load_or_make_key(installation.state / "ssh" / "id_ed25519")
            pins = installation.state / "hostkeys"
            with closing(ParamikoRemote(key, user="tpucare", pins=pins, nudge=lambda: None, port=port)) as remote:
                connect_all(remote, count)
                before = use_of(os.getpid())
                time.sleep(seconds)
                return use_of(os.getpid()).core_share(before)


# --- many recoveries -------------------------------------------------------------------------------------------------

FAST = {
    "TPUCARE_POLL": 0.5,
    "TPUCARE_FAST_POLL": 0.1,
    "TPUCARE_PROBE": 1.0,
    "TPUCARE_FAST_PROBE": 0.2,
    "TPUCARE_CREATES_PER_MINUTE": 60_000,
}


def recoveries(early: int = 100, late: int = 500, slots: int = 4) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        installation, port = Installation(Path(folder)), sshd.free_port()
        installation.declare(slots)
        with (
            CloudProcess(world(seconds=0.05), port=port, key=installation.key) as cloud,
            Daemon(installation, installation.environment(cloud.endpoint, port, **FAST)) as daemon,
        ):
            _recover(cloud, slots, early // slots)
            before = _used(daemon, installation)
            _recover(cloud, slots, (late - early) // slots)
            after = _used(daemon, installation)
        events = _most_events(installation, slots)
    return _kept_measures(
        before, after, f"{late} recoveries against {early}, the daemon and SSH, {slots} slots", events
    )


def _recover(cloud: CloudProcess, slots: int, rounds: int) -> None:
    def settle() -> None:
        wait_until(lambda: _all_run(cloud, slots), START_SECONDS, "every slot trains", every=0.05)

    settle()
    for left in reversed(range(rounds)):
        if not left:
            # Creates of the last minute are remembered for the budget: dozens at this pace, one in life.
            time.sleep(BUDGET_WINDOW.total_seconds() + 1)
        cloud.preempt(cloud.nodes())
        settle()
    time.sleep(5)


def _all_run(cloud: CloudProcess, slots: int) -> bool:
    workers = cloud.workers()
    return workers["running"] == workers["up"] == slots == len(cloud.nodes())


def _used(daemon: Daemon, installation: Installation) -> tuple[Use, int]:
    """What the process uses, and how many bytes the store remembers of its slots."""
    return daemon.use(), installation.remembered_bytes


def _most_events(installation: Installation, slots: int) -> int:
    with closing(open_store(installation.state, machine_id=machine_id(), now=SystemClock().now())) as store:
        return max(len(store.events(slot=f"{FLEET}-{index}", limit=100_000)) for index in range(slots))


def _kept_measures(before: tuple[Use, int], after: tuple[Use, int], how: str, events: int) -> list[Measure]:
    (use, remembered), (later, remembered_later) = before, after
    limit = 1.5 * EVENTS_KEPT_PER_SLOT
    return [
        Measure("8a", "recoveries: resident memory", 1.05, "times", (later.rss / use.rss,), 1, how),
        _equal("8b", "recoveries: threads", later.threads, use.threads, how),
        _equal("8c", "recoveries: descriptors", later.descriptors, use.descriptors, how),
        Measure("8d", "recoveries: remembered bytes", 1.05, "times", (remembered_later / remembered,), 1, how),
        Measure("8e", "recoveries: events kept of a slot", limit, "events", (events,), 1, how),
    ]


def _equal(row: str, what: str, later: int, before: int, how: str) -> Measure:
    return Measure(row, what, before, "", (later,), 1, how)
