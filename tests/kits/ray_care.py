"""The companion that follows Ray clusters, over the real engine and cloud in virtual time, and a Ray in hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.kits.service import VirtualService
from tpucare.integrations.ray.cluster import HeadRecord
from tpucare.integrations.ray.companion import RayCare, serving_node
from tpucare.integrations.ray.demand import (
    Bundle,
    ClusterState,
    DrainReason,
    Gang,
    HostState,
    HostStatus,
    PendingSlice,
    Request,
    UnmetDemand,
)
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.testbed.emulator.world.config import WorldConfig

HEAD = HeadRecord(
    "lab",
    "127.0.0.2:6379",
    "127.0.0.1:8265",
    "/opt/ray/bin/python",
    "2.60.0",
    "3.11",
    "/state/token",
    datetime(2026, 11, 1, tzinfo=UTC),
)
TPU = Bundle({"TPU": 4.0}, {})
GANG = Gang((TPU,) * 4)


def pool(count: str = "{min: 0, max: 3}", name: str = "lab", more: str = "", tpu: str = "") -> str:
    """*tpu*: of the section, instead of one zone."""
    tpu = f"{{type: v3-32, {tpu or 'zones: [us-central1-a]'}, network: {{external_ips: false}}}}"
    return f"name: {name}\ncount: {count}\ntpu: {tpu}\nray: {{cluster: lab, idle: 2m{more}}}\n"


@dataclass
class HandRay:
    """
    A cluster in the test's hand.

    hosts: by node; they join and leave as the test says    refuses: nodes whose hosts refuse an idle drain
    """

    monotonic: object = None
    requests: tuple[Request, ...] = ()
    gangs: tuple[Gang, ...] = ()
    floor: tuple[Bundle, ...] = ()
    hosts: dict[str, list[HostState]] = field(default_factory=dict)
    error: TpuCareError | None = None
    reporter: str = ""
    refuses: set[str] = field(default_factory=set)
    followed: HeadRecord | None = None
    every: float = 0.0
    asked: list[tuple[tuple[str, ...], DrainReason]] = field(default_factory=list)
    reports: list[tuple[Sequence[PendingSlice], Sequence[UnmetDemand]]] = field(default_factory=list)
    closed: bool = False
    now: float = 0.0
    _answers: list[tuple[int, Mapping[str, bool | str]]] = field(default_factory=list)

    def follow(self, head: HeadRecord | None, every: float) -> None:
        self.followed, self.every = head, every

    def newest(self) -> tuple[ClusterState | TpuCareError, float] | None:
        if self.followed is None:
            return None
        if self.error is not None:
            return self.error, self.now
        hosts = tuple(host for group in self.hosts.values() for host in group)
        state = ClusterState(
            "session", "2.60.0", "3.11", self.requests, self.gangs, self.floor, hosts, self.reporter, ()
        )
        return state, self.now

    def drain(self, ids: Sequence[str], reason: DrainReason, deadline: float, text: str) -> int:
        self.asked.append((tuple(ids), reason))
        owners = {host.id: node for node, group in self.hosts.items() for host in group}
        accepted = {one: reason is DrainReason.PREEMPTION or owners[one] not in self.refuses for one in ids}
        self._answers.append((len(self.asked), dict(accepted)))
        return len(self.asked)

    def drained(self) -> Sequence[tuple[int, Mapping[str, bool | str]]]:
        answers, self._answers = self._answers, []
        return answers

    def report(self, pending: Sequence[PendingSlice], unmet: Sequence[UnmetDemand]) -> None:
        self.reports.append((pending, unmet))

    def close(self) -> None:
        self.closed = True

    def join(self, node: str, count: int = 4, *, used: float = 0.0, idle: float = 0.0) -> None:
        """*count* hosts of *node* are there, with *used* chips each."""
        status = HostStatus.RUNNING if used else HostStatus.IDLE
        slot = node.rpartition("-a")[0]

        def total(number: int) -> dict[str, float]:
            head = {"TPU-v3-32-head": 1.0} if number == 0 else {}
            return {"TPU": 4.0, "CPU": 8.0, slot: 1.0, **head}

        self.hosts[node] = [
            HostState(
                f"{abs(hash((node, number))) % 2**32:08x}",
                node,
                "lab",
                status,
                idle,
                {"ray.io/tpu-slice-name": slot, "ray.io/tpu-worker-id": str(number), "ray.io/tpu-pod-type": "v3-32"},
                total(number),
                {**total(number), "TPU": 4.0 - used},
                f"10.0.0.{number}",
            )
            for number in range(count)
        ]


class Lab:
    """A daemon with its companion in virtual time; `again` is the next process."""

    def __init__(self, tmp_path: Path, config: WorldConfig | None = None) -> None:
        self.service = VirtualService(tmp_path, config)
        self.ray = HandRay()
        self.head: HeadRecord | None = HEAD
        self.known: dict[str, str] = {}
        self._follow()

    def _follow(self) -> None:
        daemon = self.service.daemon
        self.care = RayCare(
            daemon.engine,
            self.service.registry,
            heads=self._head_of,
            foreign=lambda pool: replace(HEAD, address=pool.address, ray="", python_version=""),
            asker=lambda _: self.ray,
            known=lambda name: self.known.get(name, ""),
            note=self.known.__setitem__,
            monotonic=daemon.clock.monotonic,
        )

    def _head_of(self, name: str) -> HeadRecord:
        if self.head is None:
            raise ConfigError(f"no head of {name}: `tpucare ray head {name}`")
        return self.head

    def again(self) -> None:
        self.service.again()
        self._follow()
        for fleet in self.service.registry.fleets:
            self.service.registry.declare_again(fleet)

    def run(self, seconds: float = 60.0) -> None:
        """The loop as the daemon has it: a step of the engine, then the companion once a second."""
        for _ in range(int(seconds)):
            self.service.daemon.run(seconds=1)
            self.ray.now = self.service.daemon.clock.monotonic()
            self.care.poll()
            self.service.registry.remove_finished_slots()

    def run_until(self, condition: Callable[[], bool], seconds: float = 900.0) -> float:
        """The seconds that went by until it was true."""
        for second in range(1, int(seconds) + 1):
            self.run(1)
            if condition():
                return second
        raise AssertionError(self.why())

    def up(self, seconds: float = 600.0) -> str:
        """Run until the pool's only living node is up and its run was launched; its hosts join. Returns its name."""
        for _ in range(int(seconds)):
            self.run(1)
            for track in self.service.daemon.engine.slots.values():
                run, node = track.memory.run, serving_node(track)
                if run is not None and run.complete and run.node == node and node not in self.ray.hosts:
                    self.ray.join(node)
                    self.run(2)
                    return node
        raise AssertionError(self.why())

    def why(self) -> str:
        return "; ".join(f"{name}: {track.action}" for name, track in self.service.daemon.engine.slots.items())

    @property
    def nodes(self) -> list[str]:
        return self.service.nodes

    def events(self, kind: str) -> list[str]:
        return self.service.daemon.told(kind)
