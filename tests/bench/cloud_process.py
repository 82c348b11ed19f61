"""
The emulated cloud in a process of its own, so that what the caretaker costs is the caretaker's alone.

    python -m tests.bench.cloud_process '{"config": {...}, "port": 0, "key": "", "machines": ""}'

Orders come as lines of JSON on standard input, each answered by one on standard output; the end of input ends it.
Instants are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.bench.meter import wait_until
from tests.bench.stand_in_workers import StandInMachines
from tests.kits.sshd import free_port
from tpucare.model.resources import LABEL_FLEET, LABEL_NUMBER, LABEL_OWNER, LABEL_SLOT, NodeState
from tpucare.testbed.emulator.machines.driver import MakeMachines
from tpucare.testbed.emulator.machines.machines import OnGone, OnHostKeys, WorkerMachines
from tpucare.testbed.emulator.server import EmulatorServer
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NetworkConfig, NodePath, NodeSpec

PROJECT, ZONE, KIND, RUNTIME = "bench", "us-central1-a", "v2-8", "tpu-ubuntu2204-base"
POPULATE_SECONDS = 120.0
READ_SECONDS, WRITE_SECONDS = 0.15, 0.4
"""Latencies of the API when there are any: the medians that are known of the real one."""


def world(*, latency: bool = False, page_cap: int = 1000, seconds: float = 0.5, **changes: Any) -> dict[str, Any]:
    """
    Configuration of a world in which nothing happens by itself, and everything else takes *seconds*.

    Latencies are constant, so that they can be subtracted to the millisecond.
    """
    read, write = (READ_SECONDS, WRITE_SECONDS) if latency else (0.0, 0.0)
    names = ("create_single", "boot_late", "operation_done", "delete", "visible", "health_known")
    lengths = dict.fromkeys(names, seconds)
    latencies = {
        **lengths,
        "read": read,
        "write": write,
        "list_lag_share": 0.0,
        "boot_skew": 0.0,
        "boot_early_share": 0,
    }
    latencies |= {"operation_lingers_share": 0.0, "visible": 0.0}
    listing = {"page_default": min(100, page_cap), "page_cap": page_cap}
    rates = {"create": None, "delete": None}
    return {"latencies": latencies, "listing": listing, "rates": rates, "faults": {"repeated_delete": (0,)}, **changes}


class CloudProcess:
    """
    The process, from the side of who measures. With `port`, workers listen there: real machines below the folder
    `machines`, or else those that stand in, which let the public `key` in.
    """

    def __init__(
        self, config: Mapping[str, Any], *, port: int = 0, key: str = "", machines: Path | None = None
    ) -> None:
        said = json.dumps({"config": config, "port": port, "key": key, "machines": str(machines or "")})
        command = [sys.executable, "-m", "tests.bench.cloud_process", said]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        began = self._read()
        self.endpoint, self.login_user = str(began["endpoint"]), str(began["user"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def order(self, verb: str, **fields: object) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": verb, **fields}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def populate(self, fleet: str, count: int, owner: str) -> None:
        """READY nodes of *owner*, one for each slot of *fleet*; returns when all are, which the world decides."""
        self.order("populate", fleet=fleet, count=count, owner=owner)
        wait_until(lambda: self.order("ready")["nodes"] >= count, POPULATE_SECONDS, "all nodes are READY", every=0.05)

    def preempt(self, nodes: list[str]) -> float:
        """The API shows them PREEMPTED, and their workers are gone, from the instant that is returned."""
        return float(self.order("preempt", nodes=nodes)["at"])

    def calls(self) -> list[tuple[float, str, str]]:
        """Accepted calls that write since the last time: instant, method, node."""
        return [tuple(call) for call in self.order("calls")["calls"]]

    def listed_after(self, at: float) -> float:
        """When the first listing after *at* was answered from what there was. Raises: ValueError: there was none."""
        return float(min(instant for instant in self.order("listings")["at"] if instant > at))

    def workers(self) -> dict[str, int]:
        """How many are up, how many run something, and how many connections to them are open."""
        return self.order("workers")

    def listening(self, node: str) -> list[float]:
        """Since when each of the real machines of *node* listens, as far as they do."""
        return list(self.order("listening", node=node)["at"])

    def nodes(self) -> list[str]:
        return list(self.order("nodes")["nodes"])

    def counts(self) -> Counter[str]:
        """Calls by method since the last time."""
        return Counter(self.order("counts")["counts"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the data centre ended"
        return dict(json.loads(line))


class _Service:
    """The same from within."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self._stand_ins: StandInMachines | None = None
        self._listening: dict[str, list[float]] = defaultdict(list)
        make: MakeMachines | None = None
        if said["machines"]:
            make = partial(self._real_machines, Path(said["machines"]), said["port"])
        elif said["port"]:
            make = partial(self._make_stand_ins, said["port"], said["key"])
        self.server = EmulatorServer(WorldConfig.fast(**said["config"]), seed=1, machines=make)
        self._writes: list[tuple[float, str, str]] = []
        self._listings: deque[float] = deque(maxlen=1000)
        self._counts: Counter[str] = Counter()
        self.server.world.on_audit(self._hear, keep=False)

    def _make_stand_ins(self, port: int, key: str, **_: object) -> StandInMachines:
        self._stand_ins = StandInMachines(port, key)
        return self._stand_ins

    def _real_machines(self, folder: Path, port: int, *, on_host_keys: OnHostKeys, on_gone: OnGone) -> WorkerMachines:
        def listens(path: NodePath, worker: int, keys: Mapping[str, str]) -> None:
            self._listening[path.node_id].append(time.monotonic())
            on_host_keys(path, worker, keys)

        folder.mkdir(parents=True)
        web = free_port()
        return WorkerMachines(folder, ssh_port=port, metadata_port=web, on_host_keys=listens, on_gone=on_gone)

    def _hear(self, record: Mapping[str, Any]) -> None:
        if record["kind"] != "call":
            return
        method = record["method"]
        self._counts[method] += 1
        if method == "ListNodes":
            self._listings.append(time.monotonic())
        if method in ("CreateNode", "DeleteNode") and record.get("code") == 0:
            self._writes.append((time.monotonic(), method, str(record["name"]).rpartition("/")[2]))

    def carry(self, order: Mapping[str, Any]) -> dict[str, Any]:
        with self.server.lock:
            answer = self._carry(order)
        self.server.wake()
        return answer

    def _carry(self, order: Mapping[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "populate":
                self._populate(order["fleet"], order["count"], order["owner"])
            case "preempt":
                for node in order["nodes"]:
                    self.server.world.operator.preempt(node, self.server.now(), notice=None, visible_after=timedelta())
                return {"at": time.monotonic()}
            case "calls":
                calls, self._writes = self._writes, []
                return {"calls": calls}
            case "listings":
                return {"at": list(self._listings)}
            case "counts":
                counts, self._counts = self._counts, Counter()
                return {"counts": counts}
            case "workers":
                return dict(self._stand_ins.count()) if self._stand_ins is not None else {}
            case "listening":
                return {"at": self._listening[order["node"]]}
            case "ready":
                return {"nodes": sum(record.state == NodeState.READY for record in self.server.world.nodes())}
            case "nodes":
                return {"nodes": [record.path.node_id for record in self.server.world.nodes()]}
            case other:
                raise ValueError(other)
        return {}

    def _populate(self, fleet: str, count: int, owner: str) -> None:
        for index in range(count):
            slot = f"{fleet}-{index}"
            labels = {LABEL_OWNER: owner, LABEL_FLEET: fleet, LABEL_SLOT: slot, LABEL_NUMBER: "0"}
            network = NetworkConfig(enable_external_ips=True)
            spec = NodeSpec(KIND, None, RUNTIME, spot=True, network=network, labels=labels)
            parent = f"projects/{PROJECT}/locations/{ZONE}"
            self.server.world.api.create_node(parent, f"{slot}-a0", spec, self.server.now())
        self._writes.clear()
        self._counts.clear()


def main() -> None:
    # Warnings of the emulator go to standard output, too, and are no answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    service = _Service(json.loads(sys.argv[1]))
    with service.server as server:
        user = server.machines.login_user if server.machines is not None else ""
        print(json.dumps({"endpoint": server.endpoint, "user": user}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(service.carry(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
