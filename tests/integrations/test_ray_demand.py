"""Reading the state of a Ray cluster: what the probe may say, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tpucare.integrations.ray.demand import (
    REPEATED_LIMIT,
    Bundle,
    ClusterState,
    Gang,
    HostState,
    HostStatus,
    ProbeSilent,
    Request,
    read_state,
)

HOST: dict[str, Any] = {
    "id": "0a" * 28,
    "instance": "lab-0-a3",
    "pool": "lab",
    "status": "IDLE",
    "idle_seconds": 12.5,
    "labels": {"ray.io/tpu-slice-name": "lab-0"},
    "total": {"CPU": 2, "TPU": 4},
    "available": {"CPU": 2, "TPU": 0},
    "ip": "10.0.0.3",
}
ANSWER: dict[str, Any] = {
    "session": "session_1",
    "ray": "2.60.0",
    "python": "3.11",
    "requests": [{"shape": {"TPU": 4, "CPU": 0}, "selector": {"ray.io/tpu-pod-type": "v4-16"}, "count": 3}],
    "gangs": [{"bundles": [{"shape": {"TPU": 4}, "selector": {}}] * 2, "name": "ab", "strategy": "STRICT_SPREAD"}],
    "floor": [{"shape": {"TPU-v4-16-head": 1}, "selector": {}, "count": 2}],
    "hosts": [HOST],
    "reporter": "",
    "warnings": ["Ray 2.61.0 was not tried"],
    "unknown": {"of a newer probe": 1},
}


def test_a_whole_answer_becomes_a_state() -> None:
    head = Bundle({"TPU-v4-16-head": 1.0}, {})
    assert read_state(json.loads(json.dumps(ANSWER))) == ClusterState(
        session="session_1",
        ray="2.60.0",
        python="3.11",
        requests=(Request(Bundle({"TPU": 4.0}, {"ray.io/tpu-pod-type": "v4-16"}), 3),),
        gangs=(Gang((Bundle({"TPU": 4.0}, {}),) * 2, "ab", "STRICT_SPREAD"),),
        floor=(head, head),
        hosts=(
            HostState(
                id="0a" * 28,
                instance="lab-0-a3",
                pool="lab",
                status=HostStatus.IDLE,
                idle_seconds=12.5,
                labels={"ray.io/tpu-slice-name": "lab-0"},
                total={"CPU": 2.0, "TPU": 4.0},
                available={"CPU": 2.0},
                ip="10.0.0.3",
            ),
        ),
        reporter="",
        warnings=("Ray 2.61.0 was not tried",),
    )


def test_a_floor_of_a_billion_bundles_stays_small() -> None:
    floor = [{"shape": {"CPU": 1}, "selector": {}, "count": 10**9}]
    assert len(read_state(ANSWER | {"floor": floor}).floor) == REPEATED_LIMIT


@pytest.mark.parametrize("key", sorted(ANSWER.keys() - {"unknown"}))
@pytest.mark.parametrize("value", [None, 7, True, {"a": 1}, [1], ["a", None], "\x1b[2J" * 99, [{}]])
def test_a_field_of_another_kind_is_one_line(key: str, value: Any) -> None:
    fits = {"session": str, "ray": str, "python": str, "reporter": str}.get(key, list)
    if isinstance(value, fits) and (fits is str or not value):
        return
    with pytest.raises(ProbeSilent) as refused:
        read_state(ANSWER | {key: value})
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("key", sorted(ANSWER.keys() - {"unknown"}))
def test_a_missing_field_is_named(key: str) -> None:
    with pytest.raises(ProbeSilent, match=key):
        read_state({name: value for name, value in ANSWER.items() if name != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id", "not hexadecimal"),
        ("id", "0A0A"),
        ("id", ""),
        ("status", "UNSPECIFIED"),
        ("status", 1),
        ("idle_seconds", -1),
        ("idle_seconds", "1"),
        ("idle_seconds", True),
        ("labels", {"a": 1}),
        ("total", {"TPU": float("nan")}),
        ("total", {"TPU": float("inf")}),
        ("total", {"TPU": 10**400}),
        ("available", {"TPU": None}),
        ("available", []),
        ("instance", None),
    ],
)
def test_a_host_with_a_field_of_another_kind_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ProbeSilent, match=key if key not in ("total", "available") else "."):
        read_state(ANSWER | {"hosts": [HOST, HOST | {key: value}]})


@pytest.mark.parametrize("count", [-1, 1.5, True, None, "3"])
def test_a_count_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ProbeSilent, match="count"):
        read_state(ANSWER | {"requests": [{"shape": {"TPU": 1}, "selector": {}, "count": count}]})
