"""The probe of Ray's control store, without a Ray: versions, tokens, and who else looks after the cluster."""

from __future__ import annotations

import json
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.hand_clock import START, HandClock
from tpucare.adapters.runner.scripts import read_template

ADDRESS = "127.0.0.9:1"
METRICS, LEGACY = (None, b"AutoscalerMetricsAddress"), (None, b"__autoscaling_status")
HEARTBEAT, V2 = (b"tpucare", b"tpucare:caretaker"), (b"__autoscaler", b"__autoscaler_v2_enabled")
METADATA = (b"cluster", b"CLUSTER_METADATA")
OURS = -1


class Store:
    """The internal KV of a head."""

    def __init__(self) -> None:
        self.values: dict[tuple[bytes | None, bytes], bytes] = {V2: b"1"}

    def internal_kv_get(self, key: bytes, namespace: bytes | None, timeout: float) -> bytes | None:
        return self.values.get((namespace, key))


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def probe(clock: HandClock) -> types.ModuleType:
    module = types.ModuleType("gcs_probe")
    exec(compile(read_template("ray/gcs_probe.py"), "gcs_probe.py", "exec"), module.__dict__)
    module.__dict__["time"] = SimpleNamespace(monotonic=clock.monotonic, time=lambda: clock.now().timestamp())
    return module


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def cluster(probe: types.ModuleType, store: Store) -> Any:
    cluster = probe.Cluster(ADDRESS, probe.Caretaker("me", "vm"))
    cluster.client = store
    return cluster


def ray_is(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__version__=version))


def newest(seen: int, version: int = 3) -> SimpleNamespace:
    """The newest report of an autoscaler; *seen*: the version of the state that it saw, 0 = none has reported."""
    return SimpleNamespace(last_seen_cluster_resource_state_version=seen, autoscaler_state_version=version)


def beat(owner: str, host: str, seconds: float = 0.0) -> bytes:
    at = START.timestamp() + seconds
    return json.dumps({"owner": owner, "host": host, "pid": 7, "at": at}).encode()


# --- versions and the token -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.55.1", "1.13.0", "2.9.3"])
def test_an_old_ray_is_an_error_that_says_what_to_install(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    ray_is(monkeypatch, version)
    answer = cluster.answer({"op": "state"})
    assert (answer["ok"], answer["cause"]) == (False, "version")
    assert f"has Ray {version}; on head and hosts install ray>=2.56,<2.61" in answer["error"]


def test_no_ray_is_an_error_that_says_what_to_install(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answer = cluster.answer({"op": "state"})
    assert (answer["cause"], answer["error"]) == (
        "version",
        f"{sys.executable} cannot import Ray; install ray>=2.56,<2.61",
    )


@pytest.mark.parametrize(
    ("own", "head", "v2", "warnings"),
    [
        ("2.56.0", "2.56.0", True, []),
        ("2.60.3", "2.60.3", True, []),
        ("2.61.0", "2.61.0", True, ["Ray 2.61.0 was not tried"]),
        ("3.0.0.dev0", "3.0.0.dev0", True, ["Ray 3.0.0.dev0 was not tried"]),
        ("2.60.0", "2.59.1", True, ["the head has Ray 2.59.1"]),
        ("2.60.0", "2.60.0", False, ["without RAY_enable_autoscaler_v2=1"]),
    ],
)
def test_what_may_go_wrong_is_a_warning(
    cluster: Any, store: Store, monkeypatch: pytest.MonkeyPatch, own: str, head: str, v2: bool, warnings: list[str]
) -> None:
    ray_is(monkeypatch, own)
    python = f"{sys.version_info.major}.{sys.version_info.minor}.9"
    store.values[METADATA] = json.dumps({"ray_version": head, "python_version": python}).encode()
    cluster.has_v2 = v2
    facts = cluster.read_facts()
    assert (facts["ray"], facts["python"]) == (head, python[:-2])
    assert len(facts["warnings"]) == len(warnings)
    assert all(text in found for text, found in zip(warnings, facts["warnings"], strict=True))


@pytest.mark.parametrize("content", [None, b"", b" \n"])
def test_without_a_token_ray_is_not_called(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    ray_is(monkeypatch, "2.60.0")
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    answer = cluster.answer({"op": "state"})
    assert answer["cause"] == "token"
    assert str(path) in answer["error"]


# --- two caretakers ---------------------------------------------------------------------------------------------------


def test_alone(cluster: Any, store: Store, clock: HandClock) -> None:
    for seen in (0, OURS, OURS):
        assert cluster.reporter(newest(seen)) == ""
        clock.seconds += 5
    store.values[HEARTBEAT] = beat("me", "vm")
    assert cluster.reporter(newest(OURS)) == ""


def test_a_monitor_counts_from_its_start_and_while_it_reports(cluster: Any, store: Store, clock: HandClock) -> None:
    store.values[METRICS] = b"10.0.0.2:44217"
    for seen in range(5, 100, 5):
        assert cluster.reporter(newest(seen)) == "Ray's own autoscaler"
        clock.seconds += 5
    # It ended; its last report stays.
    clock.seconds += 31
    assert cluster.reporter(newest(95)) == ""


def test_a_monitor_that_ended_before_is_none_after_half_a_minute(cluster: Any, store: Store, clock: HandClock) -> None:
    store.values[METRICS] = b"10.0.0.2:44217"
    assert cluster.reporter(newest(95)) == "Ray's own autoscaler"
    clock.seconds += 31
    assert cluster.reporter(newest(95)) == ""
    assert cluster.reporter(newest(OURS)) == ""


def test_an_autoscaler_beside_the_head_shows_by_its_reports(cluster: Any, clock: HandClock) -> None:
    assert cluster.reporter(newest(5)) == ""
    clock.seconds += 5
    assert cluster.reporter(newest(10)) == "Ray's own autoscaler"
    clock.seconds += 5
    assert cluster.reporter(newest(OURS)) == ""


def test_the_first_autoscaler_writes_a_key(cluster: Any, store: Store, clock: HandClock) -> None:
    cluster.has_v2 = False
    store.values[LEGACY] = b'{"time": 1}'
    assert cluster.reporter(newest(0)) == ""
    clock.seconds += 5
    store.values[LEGACY] = b'{"time": 6}'
    assert cluster.reporter(newest(0)) == "Ray's own autoscaler"
    clock.seconds += 31
    assert cluster.reporter(newest(0)) == ""


@pytest.mark.parametrize(("owner", "host"), [("you", "vm"), ("me", "vm2")])
def test_another_tpucare_counts_while_its_heart_beats(
    cluster: Any, store: Store, clock: HandClock, owner: str, host: str
) -> None:
    store.values[HEARTBEAT] = beat(owner, host)
    assert cluster.reporter(newest(OURS)) == f"tpucare {owner} on {host}"
    clock.seconds += 61
    assert cluster.reporter(newest(OURS)) == ""
    # Its clock may be another: a change is what counts.
    store.values[HEARTBEAT] = beat(owner, host, seconds=-99999)
    assert cluster.reporter(newest(OURS)) == f"tpucare {owner} on {host}"


def test_an_old_heartbeat_is_nobody(cluster: Any, store: Store) -> None:
    store.values[HEARTBEAT] = beat("you", "vm2", seconds=-120)
    assert cluster.reporter(newest(OURS)) == ""


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b'{"owner": "you"}', b'{"owner": 1, "host": 2, "at": "x"}'])
def test_a_heartbeat_that_is_none(cluster: Any, store: Store, text: bytes) -> None:
    store.values[HEARTBEAT] = text
    assert cluster.reporter(newest(OURS)) == ""


def test_two_tpucares_never_report_at_once(cluster: Any, store: Store) -> None:
    store.values[HEARTBEAT] = beat("you", "vm2")
    cluster.status = lambda: SimpleNamespace(autoscaling_state=newest(OURS))
    with pytest.raises(Exception, match="tpucare you on vm2 reports for this cluster"):
        cluster.report({"pending": [], "unmet": []})


# --- demand and drains ------------------------------------------------------------------------------------------------


def test_a_condition_reads_the_same_in_any_order_of_its_values(probe: Any) -> None:
    assert probe.condition(1, ["b", "a"]) == probe.condition(1, ["a", "b"]) == "in(a,b)"
    assert probe.condition(2, ["b", "a"]) == "!in(a,b)"
    assert (probe.condition(1, ["a"]), probe.condition(2, ["a"])) == ("a", "!a")


def test_a_host_that_does_not_answer_holds_up_no_other_drain(cluster: Any, probe: Any) -> None:
    silent = threading.Event()
    limits: list[float] = []

    class Ray256:
        def drain_node(self, node_id: str, reason: int, message: str, deadline_ms: int) -> tuple[bool, str]:
            return (node_id != "aa" or silent.wait(30)), ""

    class Ray260(Ray256):
        def drain_node(
            self, node_id: str, reason: int, message: str, deadline_ms: int, timeout: float = 0.0
        ) -> tuple[bool, str]:
            limits.append(timeout)
            return super().drain_node(node_id, reason, message, deadline_ms)

    probe.ALL_DRAINS_SECONDS = 0.2
    question = {"ids": ["aa", "bb"], "reason": "PREEMPTION", "seconds": 30, "text": "why"}
    try:
        for client in (Ray256(), Ray260()):
            cluster.client = client
            assert cluster.drain(question) == {"drained": {"aa": "no answer in time", "bb": True}}
        assert limits == [probe.DRAIN_SECONDS] * 2
    finally:
        silent.set()
