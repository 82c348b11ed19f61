"""
The demand and the hosts of a Ray cluster, as `templates/ray/probe.py` reads them, and the reports that go back to it.

Records and their reading, pure. Decisions are left to `rules`, asking to `probe`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tpucare.model.errors import TpuCareError
from tpucare.model.text import plain

# A resource -> its amount, without the resources that are asked for with amount 0.
Shape = Mapping[str, float]
# A label -> the value that a host must have, in Ray's own notation: `v4-16`, `in(a,b)`, `!v4-8`, `!in(a,b)`.
Labels = Mapping[str, str]

# More bundles of one kind than any pool could serve; `request_resources(num_cpus=10**9)` is one bundle 10**9 times.
REPEATED_LIMIT: Final = 10_000
_HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}")


class ProbeSilent(TpuCareError):
    """The state of a Ray cluster is not known for now: no slot wakes and none rests because of it."""


class HeadAway(ProbeSilent):
    """Nothing listens at the address of the head."""


class HostStatus(StrEnum):
    """State of one host in Ray's control store, under Ray's names."""

    RUNNING = "RUNNING"
    IDLE = "IDLE"
    DRAINING = "DRAINING"
    DEAD = "DEAD"


class DrainReason(StrEnum):
    """Ray may refuse the first while the host works; the second is final."""

    IDLE_TERMINATION = "IDLE_TERMINATION"
    PREEMPTION = "PREEMPTION"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one host. `selector`: the first alternative that was asked for; empty: any host."""

    shape: Shape
    selector: Labels


@dataclass(frozen=True, slots=True)
class Request:
    """Pending tasks and actors of one kind."""

    bundle: Bundle
    count: int


@dataclass(frozen=True, slots=True)
class Gang:
    """A pending placement group. `name`: its id in Ray; `strategy`: as STRICT_SPREAD; both may be empty."""

    bundles: tuple[Bundle, ...]
    name: str = ""
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class HostState:
    """
    One host of the cluster, the head included.

    id: hexadecimal, changes with each start of Ray    instance: name of the node    pool: Ray's node type name
    idle_seconds: 0 unless IDLE    total, available: a resource without any left is missing in `available`
    """

    id: str
    instance: str
    pool: str
    status: HostStatus
    idle_seconds: float
    labels: Labels
    total: Shape
    available: Shape
    ip: str


@dataclass(frozen=True, slots=True)
class ClusterState:
    """
    One snapshot of a Ray cluster.

    session:  changes when the head starts with an empty control store    ray, python: `2.60.0`, `3.11`, of the head
    floor:    `request_resources`, each bundle as often as asked, at most REPEATED_LIMIT times
    reporter: the other caretaker of this cluster, for people; empty = none    warnings: for people
    """

    session: str
    ray: str
    python: str
    requests: tuple[Request, ...]
    gangs: tuple[Gang, ...]
    floor: tuple[Bundle, ...]
    hosts: tuple[HostState, ...]
    reporter: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PendingSlice:
    """A slice that comes up; `ray status` prints `slot: pool, why` under Pending. `type`: as v4-16."""

    slot: str
    pool: str
    type: str
    why: str


@dataclass(frozen=True, slots=True)
class UnmetDemand:
    """
    Demand that no pool can satisfy; `ray status` prints `what` under Recent failures, and `why` with `-v`.

    bundles: what is asked for together; one bundle of a task or actor, all of a placement group
    """

    what: str
    why: str
    bundles: tuple[Bundle, ...]
    count: int


def read_state(answer: Mapping[str, Any]) -> ClusterState:
    """
    The snapshot in the probe's *answer* to `state`.

    Raises: ProbeSilent: a field is missing or of another kind.
    """
    return ClusterState(
        session=_text(answer, "session"),
        ray=_text(answer, "ray"),
        python=_text(answer, "python"),
        requests=tuple(Request(_bundle(one), _count(one)) for one in _objects(answer, "requests")),
        gangs=tuple(
            Gang(tuple(map(_bundle, _objects(one, "bundles"))), _text(one, "name"), _text(one, "strategy"))
            for one in _objects(answer, "gangs")
        ),
        floor=tuple(_repeated(_objects(answer, "floor"))),
        hosts=tuple(map(_host, _objects(answer, "hosts"))),
        reporter=_text(answer, "reporter"),
        warnings=tuple(_texts(answer, "warnings")),
    )


def _repeated(floor: Iterable[Mapping[str, Any]]) -> Iterable[Bundle]:
    for one in floor:
        yield from (_bundle(one),) * min(_count(one), REPEATED_LIMIT)


def _bundle(found: Mapping[str, Any]) -> Bundle:
    return Bundle(_shape(found, "shape"), _labels(found, "selector"))


def _host(found: Mapping[str, Any]) -> HostState:
    status = _text(found, "status")
    if status not in HostStatus.__members__:
        raise _nonsense("status", status)
    # The id is sent back in a drain, where Ray accepts any bytes and drains nothing.
    if not _HEX.fullmatch(_text(found, "id")):
        raise _nonsense("id", found["id"])
    return HostState(
        id=_text(found, "id"),
        instance=_text(found, "instance"),
        pool=_text(found, "pool"),
        status=HostStatus(status),
        idle_seconds=_amount("idle_seconds", found.get("idle_seconds")),
        labels=_labels(found, "labels"),
        total=_shape(found, "total"),
        available=_shape(found, "available"),
        ip=_text(found, "ip"),
    )


def _text(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str):
        raise _nonsense(key, value)
    return value


def _texts(found: Mapping[str, Any], key: str) -> list[str]:
    values = found.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _nonsense(key, values)
    return values


def _objects(found: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    values = found.get(key)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise _nonsense(key, values)
    return values


def _labels(found: Mapping[str, Any], key: str) -> Labels:
    labels = found.get(key)
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise _nonsense(key, labels)
    return labels


def _shape(found: Mapping[str, Any], key: str) -> Shape:
    shape = found.get(key)
    if not isinstance(shape, dict):
        raise _nonsense(key, shape)
    amounts = {name: _amount(key, value) for name, value in shape.items()}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def _count(found: Mapping[str, Any]) -> int:
    count = found.get("count")
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise _nonsense("count", count)
    return count


def _amount(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise _nonsense(key, value)
    return float(value)


def _nonsense(key: str, value: object) -> ProbeSilent:
    return ProbeSilent(f"the answer of Ray's probe cannot be read: {key} is {plain(repr(value)[:60])}")
