"""
Rows of Ray: how soon demand makes a slice, and a slice serves it; how a preempted one heals; the cost of a rest.

A real head, hosts over SSH on the emulated cloud, and the daemon as a process with its usual intervals; the demands of
`ray-demands` are simulated. What Ray itself takes to start is in the times, and both hosts of a slice, the head and the
cloud share the cores of this machine.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from hypothesis import Phase, given, settings

from tests.bench.meter import use_of
from tests.bench.report import Measure
from tests.integrations.test_ray_demands import stories
from tests.kits.deployment import deployment, eventually
from tests.kits.ray_cluster import RAY_PYTHON
from tests.kits.ray_lab import WORLD, RayLab
from tests.kits.ray_placement import Broken, Cluster
from tpucare.integrations.ray.companion import REST_SECONDS
from tpucare.model.resources import NodeState
from tpucare.service import emulator_address

T = TypeVar("T")

POLL_SECONDS = 5.0
# What the daemon takes outside of tests.
PACE = {"TPUCARE_POLL": "5", "TPUCARE_FAST_POLL": "1", "TPUCARE_PROBE": "15", "TPUCARE_FAST_PROBE": "1"}
PATIENCE_SECONDS = 240.0
SLICE = ({"TPU": 4.0},) * 2
IDLE_SECONDS = 5.0
MOVING = 5

# Holds placement groups: one order in JSON a line, each answered by one.
DRIVER = """
import json, os, sys, time
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

# Ray writes to standard output as well.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
ray.init(sys.argv[1], log_to_driver=False)
groups = {}

def ask(name, bundles, strategy):
    began = time.time()
    groups[name] = placement_group(bundles, strategy=strategy)
    return began

def created(name, besides):
    while True:
        table = placement_group_table(groups[name])
        hosts = sorted(set(table["bundles_to_node_id"].values()))
        if table["state"] == "CREATED" and not set(hosts) & set(besides):
            return [time.time(), hosts]
        time.sleep(0.05)

def remove(name):
    remove_placement_group(groups.pop(name))

print(json.dumps(None), file=answers, flush=True)
for line in sys.stdin:
    order = json.loads(line)
    print(json.dumps(globals()[order.pop("do")](**order)), file=answers, flush=True)
"""


class Driver:
    """A program of the cluster that asks for placement groups. Instants are seconds of the epoch."""

    def __init__(self, lab: RayLab) -> None:
        self._process = subprocess.Popen(
            [RAY_PYTHON, "-c", DRIVER, lab.address],
            env=lab.environment,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, name: str, *bundles: Mapping[str, float]) -> float:
        """Ask for a group of *bundles*, each on a host of its own; returns when."""
        return float(self._order("ask", name=name, bundles=bundles, strategy="STRICT_SPREAD"))

    def created(self, name: str, besides: Collection[str] = ()) -> tuple[float, list[str]]:
        """When the group had all its bundles on hosts other than *besides*, and the ids of its hosts."""
        at, hosts = self._order("created", name=name, besides=list(besides))
        return float(at), list(hosts)

    def remove(self, name: str) -> None:
        self._order("remove", name=name)

    def _order(self, do: str, **what: object) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise TimeoutError("the driver does not answer")
        return json.loads(line)


class Cloud:
    """What the cloud of a lab saw. Instants are seconds of the epoch."""

    def __init__(self, lab: RayLab) -> None:
        self.home = lab.home
        self.port = emulator_address.find(lab.home.emulator).ssh_port

    @property
    def records(self) -> int:
        return len(self.home.audit())

    def accepted(self, method: str, slot: str, after: int) -> float:
        """When the first call on a node of *slot* was accepted, beyond the first *after* records of the audit."""

        def look() -> float | None:
            for one in self.home.audit()[after:]:
                if one.get("method") == method and one.get("code") == 0 and slot_of(one) == slot:
                    return datetime.fromisoformat(one["at"]).timestamp()
            return None

        return self._await(look, f"{method} of {slot}")

    def answers(self, slot: str) -> float:
        """When all workers of the slot's newest node answer over SSH."""

        def look() -> bool:
            nodes = [one for one in self.home.nodes() if one.path.node_id.rpartition("-a")[0] == slot]
            pairs = [pair for one in nodes if one.state == NodeState.READY for pair in one.endpoints]
            return bool(pairs) and all(greets(pair.internal, self.port) for pair in pairs)

        self._await(look, f"SSH of {slot}")
        return time.time()

    def preempt(self, slot: str) -> float:
        """Without a notice, and shown at once."""
        server = self.home.server
        with server.lock:
            server.world.operator.preempt(slot, server.now(), notice=None, visible_after=timedelta())
        server.wake()
        return time.time()

    def await_rest(self) -> None:
        self._await(lambda: not self.home.names(), "every slice rests")

    def created_nodes(self) -> list[str]:
        return [str(one["name"]) for one in self.home.audit() if one["kind"] == "node" and one["event"] == "created"]

    def _await(self, look: Callable[[], T | None], what: str) -> T:
        return eventually(look, what, PATIENCE_SECONDS, tell=self.home._told, before_look=self.home.check_daemon)


def slot_of(record: Mapping[str, Any]) -> str:
    return str(record["name"]).rpartition("/")[2].rpartition("-a")[0]


def greets(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 1) as connection:
        connection.settimeout(1)
        return connection.recv(4).startswith(b"SSH")
    return False


@dataclass
class Samples:
    """Seconds; `creates`: of slices for one group each."""

    at_rest: list[float] = field(default_factory=list)
    moving: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    replaced: list[float] = field(default_factory=list)
    healed: list[float] = field(default_factory=list)
    creates: list[int] = field(default_factory=list)
    probe: list[float] = field(default_factory=list)
    nodes: int = 0


def cluster(cycles: int = 5, preemptions: int = 3, rest_seconds: float = 60.0, seed: int = 1) -> list[Measure]:
    found, rng = Samples(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as temp:
        folder = Path(temp)
        with deployment(folder / "home", world=WORLD, pace=PACE) as home:
            lab = RayLab(home, folder / "t")
            try:
                lab.start_head()
                home.start()
                lab.pool({"min": 0, "max": 4}, idle=f"{IDLE_SECONDS:g}s")
                lab.pool({"min": 0, "max": MOVING + 1}, name="one", kind="v4-8", idle="10m")
                with Driver(lab) as driver:
                    cloud = Cloud(lab)
                    _look_at_rest(lab, cloud, found, rest_seconds)
                    for cycle in range(cycles):
                        _one_group(cloud, driver, found, rng, f"g{cycle}", preempted=cycle < preemptions)
                    _while_moving(cloud, driver, found, rng)
                home.allowed_deletes |= {name.rpartition("/")[2] for name in cloud.created_nodes()}
            finally:
                lab.close()
    return _measures(found)


def _look_at_rest(lab: RayLab, cloud: Cloud, found: Samples, seconds: float) -> None:
    """What the probe uses while nothing is asked for."""
    daemon = lab.home.daemon
    assert daemon is not None
    probe = eventually(
        lambda: next((one.pid for one in psutil.Process(daemon.pid).children() if lab.address in one.cmdline()), None),
        "the probe runs",
    )
    time.sleep(15)
    for _ in range(3):
        before = use_of(probe)
        time.sleep(seconds / 3)
        found.probe.append(use_of(probe).core_share(before))
    found.nodes = len(cloud.created_nodes())


def _one_group(cloud: Cloud, driver: Driver, found: Samples, rng: random.Random, name: str, *, preempted: bool) -> None:
    """From rest to a group and back; its slice is preempted once, if so."""
    # Anywhere between two looks at a cluster at rest.
    time.sleep(REST_SECONDS * (1 + rng.random()) + 1)
    before, nodes = cloud.records, len(cloud.created_nodes())
    asked = driver.ask(name, *SLICE)
    found.at_rest.append(cloud.accepted("CreateNode", "lab-0", before) - asked)
    answers = cloud.answers("lab-0")
    at, hosts = driver.created(name)
    found.served.append(at - answers)
    if preempted:
        time.sleep(POLL_SECONDS * (1.2 + rng.random()))
        before = cloud.records
        gone = cloud.preempt("lab-0")
        calls = [cloud.accepted(method, "lab-0", before) for method in ("DeleteNode", "CreateNode")]
        found.replaced.append((max(calls) - gone) / POLL_SECONDS)
        answers = cloud.answers("lab-0")
        at, _ = driver.created(name, besides=hosts)
        found.healed.append(at - answers)
    found.creates.append(len(cloud.created_nodes()) - nodes - preempted)
    driver.remove(name)
    cloud.await_rest()


def _while_moving(cloud: Cloud, driver: Driver, found: Samples, rng: random.Random) -> None:
    """One slice after the other, each asked for while those before it come up."""
    time.sleep(REST_SECONDS * (1 + rng.random()) + 1)
    for number in range(MOVING + 1):
        before = cloud.records
        asked = driver.ask(f"m{number}", {"TPU-v4-8-head": 1})
        took = cloud.accepted("CreateNode", f"one-{number}", before) - asked
        (found.moving if number else found.at_rest).append(took)
        time.sleep(0.5 + rng.random())


def _measures(found: Samples) -> list[Measure]:
    how = "real head and hosts, emulated cloud"

    def seconds(row: str, what: str, limit: float, values: Sequence[float]) -> Measure:
        return Measure(row, f"Ray: {what}", limit, "s", tuple(values), 1, how, told=False)

    return [
        seconds("9e", "demand to create accepted, from rest", 10, found.at_rest),
        seconds("9f", "demand to create accepted, while slices come up", 2, found.moving),
        seconds("9g", "last host answers over SSH to group CREATED", 15, found.served),
        Measure(
            *("9h", "Ray: lost slice: delete and create accepted after it shows", 0.6, "poll intervals"),
            *(tuple(found.replaced), 1, f"{how}; poll {POLL_SECONDS:g} s, the dying workers hang up"),
        ),
        seconds("9i", "preempted: last new host answers to group CREATED again", 20, found.healed),
        Measure(
            *("9j", "Ray: slices for [{TPU: 4}] * 2, STRICT_SPREAD, of v4-16", 1, "slices"),
            *(tuple(map(float, found.creates)), 1, f"{how}; the next of a preempted one not counted"),
            never=True,
        ),
        Measure("9k", "Ray: nodes of a cluster at rest", 0, "nodes", (found.nodes,), 1, how, never=True),
        Measure("9l", "Ray: the probe at rest", 1, "% of a core", tuple(found.probe), 20, how),
    ]


def demands(stories_wanted: int = 400) -> list[Measure]:
    """Random demands on a simulated Ray, with the real rules; `live` checks each of their plans."""
    asked, excess, shortage, left = 0, 0, 0, 0

    @settings(max_examples=stories_wanted, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(stories())
    def live(story: Cluster) -> None:
        nonlocal asked, excess, shortage, left
        asked += len(story.coming_jobs)
        try:
            story.live()
        except Broken:
            shortage += 1
        excess = max(excess, story.excess)
        left += sum(slot.awake for slot in story.slots) - sum(pool.minimum for pool in story.pools)

    live()
    how = f"{asked:,} demands with preemptions in {stories_wanted} clusters, virtual time"
    return [
        Measure(
            "9m", "Ray: slices beyond an exact packing, worst cluster", 1, "slices", (excess,), asked, how, never=True
        ),
        Measure(
            "9n", "Ray: clusters with a rule broken or demand not served", 0, "", (shortage,), asked, how, never=True
        ),
        Measure("9o", "Ray: slices left after all demand", 0, "slices", (left,), asked, how, never=True),
    ]
