"""
Ray's own autoscaler and tpucare side by side: the same demands on the same emulated cloud, one after the other.

    python -m tests.bench.ray_autoscaler [--write-docs]

Ray's autoscaler (v2) takes other clouds through an external `NodeProvider`, which is here as well, and is run by the
head's monitor. As Ray's documentation of TPUs does it, a slice is one instance with the resources of its first host;
its hosts share RAY_CLOUD_INSTANCE_ID. It deletes preempted nodes, as Ray's provider for Google Cloud does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml
from ray.autoscaler.node_provider import NodeProvider

from tests.bench.ray import PACE, greets
from tests.bench.report import number, renew
from tests.kits.deployment import Deployment
from tests.kits.ray_cluster import RAY_PYTHON
from tests.kits.ray_lab import SMALL, WORLD, ZONE, RayLab
from tpucare.adapters.google.client import connect
from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.ssh.remote import ParamikoRemote
from tpucare.model.errors import TpuCareError
from tpucare.model.resources import Network, NodeKey, NodeRequest, NodeState, Place, Provisioning, workers_of
from tpucare.service import emulator_address
from tpucare.testbed.demo.setup import free_port

KIND, HOSTS, MOST = "v4-16", 2, 4
IDLE_SECONDS = 8.0
HOLD_SECONDS = 6.0
# For each demand, or from the preemption of its slice on.
PATIENCE_SECONDS = 80.0
BEGIN = "<!-- side by side: begin (python -m tests.bench.ray_autoscaler --write-docs) -->"
END = "<!-- side by side: end -->"

# (kind, number of tasks, pause after it in seconds, slice is preempted)
DEMANDS = (
    ("gang", 2, 15, False),
    ("slice", 2, 3, False),
    ("tasks", 1, 15, False),
    ("gang", 2, 3, False),
    ("slice", 2, 15, True),
    ("tasks", 2, 3, False),
    ("gang", 2, 15, True),
    ("slice", 2, 3, False),
    ("tasks", 2, 3, False),
    ("gang", 2, 15, False),
)

PROGRAM = """
import json, os, sys, threading, time
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
from ray.util.tpu import SlicePlacementGroup

address, demands, hold, patience = json.loads(sys.argv[1])
# Ray writes to standard output as well.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
ray.init(address, log_to_driver=False)

@ray.remote(num_cpus=0, resources={"TPU": 4}, max_retries=-1)
def work():
    time.sleep(hold)

def say(**what):
    print(json.dumps({"at": time.time(), **what}), file=answers, flush=True)

def slices(group):
    names = {node["NodeID"]: node["Labels"].get("ray.io/tpu-slice-name", "") for node in ray.nodes()}
    return sorted({names[host] for host in placement_group_table(group)["bundles_to_node_id"].values()})

def serve(number, kind, count, preempted):
    say(number=number, said="asked")
    until, tasks = time.monotonic() + patience, []
    held = group = None
    try:
        if kind == "slice":
            held = SlicePlacementGroup("2x2x2", "v4", strategy="STRICT_SPREAD", head_reservation_timeout_s=patience)
            group = held.placement_group
        elif kind == "gang":
            group = placement_group([{"TPU": 4}] * count, strategy="STRICT_SPREAD")
        if group is not None:
            ray.get(group.ready(), timeout=until - time.monotonic())
        for index in range(count):
            where = In(group, placement_group_bundle_index=index) if group else "DEFAULT"
            tasks.append(work.options(scheduling_strategy=where).remote())
        if preempted:
            time.sleep(hold / 2)
            say(number=number, said="preempt", slices=slices(group))
            sys.stdin.readline()
            until = time.monotonic() + patience
        ray.get(tasks, timeout=until - time.monotonic())
        say(number=number, said="served")
    except (TimeoutError, ray.exceptions.GetTimeoutError) as error:
        say(number=number, said="stuck", why=repr(error)[:200])
        for task in tasks:
            ray.cancel(task, force=True)
    if held is not None:
        held.shutdown()
    elif group is not None:
        remove_placement_group(group)

say(said="begins")
for number, (kind, count, pause, preempted) in enumerate(demands):
    serve(number, kind, count, preempted)
    time.sleep(pause)
say(said="ends")
"""


# --- Ray's side -------------------------------------------------------------------------------------------------------


class SliceProvider(NodeProvider):  # type: ignore[misc]
    """Nodes of the emulated cloud for Ray's autoscaler. It lives in the monitor of the head."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        folder = Path(provider_config["folder"])
        found = emulator_address.find(folder / "emulator")
        self._project, self._head = found.project, provider_config["head"]
        self._cloud = connect(found.endpoint, monotonic=time.monotonic)
        self._key = load_or_make_key(folder / "id_ed25519")
        self._ssh_port = found.ssh_port
        self._remote = ParamikoRemote(
            self._key, user=found.ssh_user, pins=folder / "pins", nudge=lambda: None, port=found.ssh_port
        )
        self._tags: dict[str, dict[str, str]] = {"head": {"ray-node-type": "head", "ray-user-node-type": "head"}}
        self._started: set[str] = set()

    # --- what there is ---

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        there = ["head"]
        for node, _ in self._cloud.list_zone(self._project, ZONE):
            if node.state in (NodeState.PREEMPTED, NodeState.TERMINATED):
                self._delete(node.key.name)
            elif node.state != NodeState.DELETING and node.key.name in self._tags:
                there.append(node.key.name)
        return [name for name in there if tag_filters.items() <= self._tags[name].items()]

    def is_running(self, node_id: str) -> bool:
        return node_id == "head" or node_id in self._started

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self.non_terminated_nodes({})

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags[node_id]

    def set_node_tags(self, node_id: str, tags: Mapping[str, str]) -> None:
        self._tags[node_id].update(tags)

    def internal_ip(self, node_id: str) -> str:
        return str(self._head).rpartition(":")[0] if node_id == "head" else ""

    external_ip = internal_ip

    # --- what is to be ---

    def create_node_with_resources_and_labels(
        self, node_config: object, tags: Mapping[str, str], count: int, resources: object, labels: object
    ) -> None:
        for _ in range(count):
            name = f"ray-{uuid.uuid4().hex[:8]}"
            self._tags[name] = dict(tags)
            user = emulator_address.find(Path(self.provider_config["folder"]) / "emulator").ssh_user
            terms = Place(
                ZONE, KIND, Provisioning.SPOT, "tpu-ubuntu2204-base", network=Network(external_ips=False), workers=HOSTS
            )
            self._cloud.create_node(
                NodeRequest(self._node(name), terms, {}, {"ssh-keys": f"{user}:{self._key.public}"})
            )
            threading.Thread(target=self._bring_up, args=(name,), daemon=True).start()

    def terminate_node(self, node_id: str) -> None:
        self._delete(node_id)

    def terminate_nodes(self, node_ids: list[str]) -> None:
        for node_id in node_ids:
            self._delete(node_id)

    def _node(self, name: str) -> NodeKey:
        return NodeKey(self._project, ZONE, name)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(TpuCareError):
            self._cloud.delete_node(self._node(name))

    def _bring_up(self, name: str) -> None:
        """Start Ray on every host, as soon as the slice is there and its hosts answer."""
        started: set[int] = set()
        while len(started) < HOSTS:
            time.sleep(0.25)
            try:
                node = self._cloud.get_node(self._node(name))
                if node.state in (NodeState.PREEMPTED, NodeState.DELETING):
                    return
                workers = workers_of(node, external=False, expected=HOSTS) or ()
                for worker in workers:
                    if worker.number not in started and greets(worker.host, self._ssh_port):
                        self._remote.run(worker, self._start_ray(name, worker.host), deadline=timedelta(seconds=30))
                        started.add(worker.number)
            except TpuCareError:
                continue
        self._started.add(name)

    def _start_ray(self, name: str, host: str) -> str:
        variables = f"TPU_NAME={name} RAY_CLOUD_INSTANCE_ID={name} RAY_NODE_TYPE_NAME={KIND} RAY_USAGE_STATS_ENABLED=0"
        start = f"{RAY_PYTHON} -m ray.scripts.scripts start --block --address {self._head} --node-ip-address {host}"
        return f"{variables} setsid {start} --temp-dir $TMPDIR/ray-1 {SMALL} >ray.log 2>&1 </dev/null &"


class RayAlone:
    """A head with Ray's autoscaler and the provider above."""

    name = "Ray's autoscaler"

    def __init__(self, home: Deployment, temp: Path) -> None:
        self.home, self._temp = home, temp
        self.address = f"127.78.{os.getpid() % 250}.1:{free_port()}"
        self.environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        self._mark = f"SIDE_BY_SIDE={home.folder}"

    def start(self) -> None:
        host, _, port = self.address.rpartition(":")
        config = self.home.folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(self._config()))
        command = [RAY_PYTHON, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address", host]
        command += ["--port", port, "--temp-dir", str(self._temp), "--autoscaling-config", str(config), *SMALL.split()]
        command += ["--dashboard-port", str(free_port()), "--ray-client-server-port", str(free_port())]
        env = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": "head", "RAY_NODE_TYPE_NAME": "head"}
        env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "SIDE_BY_SIDE": str(self.home.folder)}
        with (self.home.folder / "head.log").open("wb") as log:
            self._head = subprocess.Popen(command, env={**self.environment, **env}, stdout=log, stderr=log, cwd="/")
        self.home.await_(lambda: _listens(host, int(port)), "the head listens")

    def _config(self) -> Mapping[str, Any]:
        """An external provider gets no defaults: each of these keys has to be there."""
        lists = ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands")
        more = ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude")
        labels = {"ray.io/tpu-worker-id": "0", "ray.io/tpu-pod-type": KIND}
        resources = {"CPU": 2, "TPU": 4, f"TPU-{KIND}-head": 1}
        return {
            **{key: [] for key in (*lists, *more, "rsync_filter")},
            "cluster_name": "lab",
            "max_workers": MOST,
            "idle_timeout_minutes": IDLE_SECONDS / 60,
            "provider": {
                "type": "external",
                "module": "tests.bench.ray_autoscaler.SliceProvider",
                "folder": str(self.home.folder),
                "head": self.address,
                "disable_node_updaters": True,
            },
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "head_node_type": "head",
            "available_node_types": {
                "head": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 0},
                KIND: {
                    "resources": resources,
                    "labels": labels,
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": MOST,
                },
            },
        }

    def close(self) -> None:
        self._head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._head.wait(15)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SIDE_BY_SIDE") == str(self.home.folder):
                    process.kill()
        self._head.wait(5)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), 1).close()
        return True
    return False


# --- tpucare's side ---------------------------------------------------------------------------------------------------


class WithTpucare(RayLab):
    name = "tpucare"

    def start(self) -> None:
        self.start_head()
        self.home.start()
        self.pool({"min": 0, "max": MOST}, kind=KIND, idle=f"{IDLE_SECONDS:g}s")


# --- both -------------------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """
    What came of the demands.

    made: slices created    paid: seconds of READY slices, summed    healed: seconds from a preemption until its demand
    was served, None: not within PATIENCE_SECONDS; by kind    waits: of the others, beyond HOLD_SECONDS
    left: slices in the end
    """

    made: int = 0
    paid: float = 0.0
    served: int = 0
    healed: dict[str, float | None] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    left: int = 0


def live(side: type[RayAlone] | type[WithTpucare]) -> Story:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as temp:
        world = {**WORLD, "latencies": {"create_single": 5.0, "create_slice": 5.0}}
        folder = Path(temp) / "home"
        folder.mkdir()
        home = Deployment(folder, world=world, pace=PACE)
        lab = side(home, Path(temp) / "t")
        try:
            lab.start()
            with _metered(home) as story:
                _tell(lab, story)
                time.sleep(IDLE_SECONDS * 2)
            story.left = len(home.names())
            story.made = sum(one["kind"] == "node" and one["event"] == "created" for one in home.audit())
            return story
        finally:
            lab.close()
            home.close(judge=False)


@contextlib.contextmanager
def _metered(home: Deployment) -> Iterator[Story]:
    story, ends = Story(), threading.Event()

    def meter() -> None:
        last = time.monotonic()
        while not ends.wait(0.1):
            now = time.monotonic()
            story.paid += (now - last) * sum(one.state == NodeState.READY for one in home.nodes())
            last = now

    thread = threading.Thread(target=meter, daemon=True)
    thread.start()
    try:
        yield story
    finally:
        ends.set()
        thread.join()


def _tell(lab: RayAlone | WithTpucare, story: Story) -> None:
    words = json.dumps([lab.address, DEMANDS, HOLD_SECONDS, PATIENCE_SECONDS])
    command = [RAY_PYTHON, "-c", PROGRAM, words]
    with subprocess.Popen(
        command, env=lab.environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin
        assert program.stdout
        asked = gone = 0.0
        for line in program.stdout:
            said = json.loads(line)
            print(lab.name, line.strip(), lab.home.names(), file=sys.stderr, flush=True)
            match said["said"]:
                case "asked":
                    asked, gone = said["at"], 0.0
                case "preempt":
                    gone = time.time()
                    lab.home.order("preempt", selector=_node_of(lab.home, said["slices"][0]))
                    program.stdin.write("\n")
                    program.stdin.flush()
                case "served" | "stuck" as end:
                    kind = DEMANDS[said["number"]][0]
                    story.served += end == "served"
                    if gone:
                        story.healed[kind] = said["at"] - gone if end == "served" else None
                    elif end == "served":
                        story.waits.append(said["at"] - asked - HOLD_SECONDS)
    assert program.returncode == 0, f"the program ended with exit status {program.returncode}"


def _node_of(home: Deployment, name: str) -> str:
    """The node that Ray knows as *name*: a node, or a slot of tpucare."""
    return next(node for node in home.names() if node == name or node.rpartition("-a")[0] == name)


def table(ours: Story, theirs: Story) -> str:
    work = len(DEMANDS) * HOLD_SECONDS
    rows = [
        ("slices created", *(str(one.made) for one in (ours, theirs))),
        ("demands served", *(f"{one.served} of {len(DEMANDS)}" for one in (ours, theirs))),
        ("slice-minutes paid for one of work", *(number(one.paid / work) for one in (ours, theirs))),
        ("median wait of the other demands", "1", f"{number(median(theirs.waits) / median(ours.waits))} × as long"),
        *(
            (f"slice preempted under a {what}", _healed(ours.healed[kind], 1.0), _healed(theirs.healed[kind], ratio))
            for kind, what in (("slice", "`SlicePlacementGroup`"), ("gang", "plain placement group"))
            for ratio in [(theirs.healed[kind] or 0) / (ours.healed[kind] or 1)]
        ),
        ("slices left in the end", *(str(one.left) for one in (ours, theirs))),
    ]
    lines = ["| | tpucare | Ray's autoscaler |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _healed(seconds: float | None, ratio: float) -> str:
    if seconds is None:
        return f"never (waited for {PATIENCE_SECONDS:g} s)"
    return f"by itself, after {number(ratio)} × the time"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ray_autoscaler")
    parser.add_argument("--write-docs", action="store_true", help="renew the table in docs/ray.md")
    arguments = parser.parse_args()
    ours, theirs = live(WithTpucare), live(RayAlone)
    print(f"{ours}\n{theirs}")
    found = table(ours, theirs)
    print(found)
    if arguments.write_docs:
        renew(Path(__file__).parents[2] / "docs" / "ray.md", BEGIN, END, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
