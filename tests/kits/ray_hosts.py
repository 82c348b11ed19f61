"""Ray hosts, slices and snapshots of a cluster, in few words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from tpucare.integrations.ray.demand import Bundle, ClusterState, Gang, HostState, HostStatus, Request
from tpucare.integrations.ray.packing import Slice, SlicePool, SliceState, pod_type

CPUS = 240.0


def pool(name: str = "lab", type: str = "v4-16", *, least: int = 0, most: int = 4, priority: int = 0) -> SlicePool:
    """Of v4-8, v4-16, v4-32, ...: 4 chips a host; v6e-8: one host of 8 chips."""
    cores = int(type.rpartition("-")[2])
    hosts, chips = (1, 8) if type == "v6e-8" else (cores // 8, 4)
    return SlicePool(name, type, hosts, chips, least, most, idle=600.0, priority=priority)


def host(
    of: SlicePool,
    slot: str,
    index: int = 0,
    *,
    free: float | None = None,
    cpus: float = CPUS,
    head: bool = True,
    idle: float | None = None,
    status: HostStatus | None = None,
    node: str = "",
    labels: Mapping[str, str] | None = None,
) -> HostState:
    """Host *index* of a slice. `free`: chips, default all; `head`: its head resource is free; `idle`: its seconds."""
    kind = pod_type(of.type)
    generation = "TPU-" + kind.partition("-")[0].upper()
    total = {"CPU": CPUS, "TPU": float(of.chips), slot: 1.0, f"accelerator_type:{generation}": 1.0}
    if index == 0:
        total[f"TPU-{kind}-head"] = 1.0
    available = total | {"CPU": cpus, "TPU": float(of.chips if free is None else free)}
    if not head:
        available.pop(f"TPU-{kind}-head", None)
    busy = available != total
    return HostState(
        id=hashlib.sha256(f"{node or slot}/{index}".encode()).hexdigest()[:56],
        instance=node or f"{slot}-a1",
        pool=of.name,
        status=status or (HostStatus.RUNNING if busy else HostStatus.IDLE),
        idle_seconds=0.0 if busy else idle or 0.0,
        labels={
            "ray.io/tpu-slice-name": slot,
            "ray.io/tpu-worker-id": str(index),
            "ray.io/tpu-pod-type": kind,
            "ray.io/accelerator-type": generation,
            "ray.io/node-group": of.name,
            **(labels or {}),
        },
        total=total,
        available={name: amount for name, amount in available.items() if amount > 0},
        ip=f"10.0.0.{index + 2}",
    )


def slots(of: SlicePool, states: Mapping[int, Slice] | None = None) -> list[Slice]:
    """All slots of a pool; those not named in *states* rest."""
    resting = (Slice(f"{of.name}-{index}", of.name, index, SliceState.RESTING) for index in range(of.maximum))
    return [(states or {}).get(one.index, one) for one in resting]


def a_slice(
    of: SlicePool, index: int, state: SliceState, hosts: Iterable[HostState] = (), *, since: float = 0.0
) -> Slice:
    return Slice(f"{of.name}-{index}", of.name, index, state, tuple(hosts), since)


def joined(
    of: SlicePool, index: int, *, free: float | None = None, idle: float | None = None, head: bool = True
) -> Slice:
    """A slice of which all hosts have joined; `free` chips on each."""
    name = f"{of.name}-{index}"
    hosts = [host(of, name, number, free=free, idle=idle, head=head) for number in range(of.hosts)]
    return a_slice(of, index, SliceState.JOINED, hosts)


def coming(of: SlicePool, index: int, *hosts: HostState, since: float = 0.0) -> Slice:
    return a_slice(of, index, SliceState.COMING, hosts, since=since)


def bundle(selector: Mapping[str, str] | None = None, /, **shape: float) -> Bundle:
    """`bundle(TPU=4)`; other resources as `bundle(**{"TPU-v4-16-head": 1})`."""
    return Bundle(shape, selector or {})


def head_of(type: str = "v4-16") -> Bundle:
    """What a SlicePlacementGroup asks for first."""
    return bundle({"ray.io/tpu-worker-id": "0", "ray.io/tpu-pod-type": type}, **{f"TPU-{type}-head": 1.0})


def pinned_to(slot: str, **shape: float) -> Bundle:
    return bundle({"ray.io/tpu-slice-name": slot}, **shape)


def snapshot(
    *pending: Request | Gang,
    floor: Iterable[Bundle] = (),
    slices: Iterable[Slice] = (),
    hosts: Iterable[HostState] = (),
) -> ClusterState:
    return ClusterState(
        session="session",
        ray="2.60.0",
        python="3.11",
        requests=tuple(one for one in pending if isinstance(one, Request)),
        gangs=tuple(one for one in pending if isinstance(one, Gang)),
        floor=tuple(floor),
        hosts=(*hosts, *(host for one in slices for host in one.hosts)),
        reporter="",
        warnings=(),
    )


def group(*bundles: Bundle, strategy: str = "") -> Gang:
    return Gang(bundles, "group", strategy)


def tasks(count: int, of: Bundle) -> Request:
    return Request(of, count)
