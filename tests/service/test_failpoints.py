"""Where a test may have the process killed: met in order, counted, and absent when not asked for."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tpucare.adapters.runner.scripts import install_command, launch_command
from tpucare.adapters.state.store import open_store
from tpucare.model.errors import ConfigError
from tpucare.model.memory import Memory
from tpucare.model.ports import Remote
from tpucare.model.resources import Event, Job, NodeKey, Worker
from tpucare.model.runs import LaunchOrder
from tpucare.service.assembly import assemble
from tpucare.service.failpoints import NAMES, Failpoint, failpoint_of
from tpucare.service.options import resolve

NOW = datetime(2026, 11, 21, tzinfo=UTC)


class Killed(BaseException):
    """Stands for SIGKILL where this process has to live on."""


def die() -> None:
    raise Killed


def test_nothing_is_asked_for() -> None:
    assert failpoint_of({}) is None
    assert failpoint_of({"TPUCARE_FAILPOINT": ""}) is None


@pytest.mark.parametrize(
    "asked", ["nonsense", "create", "create.after-intent:0", "create.after-intent:x", "launch.pushed:"]
)
def test_a_wrong_name_is_one_line(asked: str) -> None:
    with pytest.raises(ConfigError, match="no failpoint"):
        failpoint_of({"TPUCARE_FAILPOINT": asked})


def test_it_is_met_the_nth_time_and_at_its_name_alone() -> None:
    point = Failpoint("launch.pushed", 3, die)
    for name in (*NAMES, "launch.pushed"):
        point.reach(name)
    with pytest.raises(Killed):
        point.reach("launch.pushed")


@pytest.mark.parametrize(("moment", "written"), [("before-intent", False), ("after-intent", True)])
def test_an_intent_is_on_disk_or_not(tmp_path: Path, moment: str, written: bool) -> None:
    with open_store(tmp_path, machine_id="m", now=NOW) as real:
        store = Failpoint(f"create.{moment}", 1, die).store(real)
        store.save({"pod-1": Memory("pod")}, [Event(NOW, "delete", "", "pod-1")])
        with pytest.raises(Killed):
            store.save({"pod-0": Memory("pod")}, [Event(NOW, "create", "", "pod-0")])
        assert ("pod-0" in store.memories()) is written


def test_an_effect_took_place() -> None:
    done: list[str] = []
    cloud = SimpleNamespace(create_node=done.append, delete_node=done.append, get_node=done.append)
    port = Failpoint("delete.after-effect", 1, die).port(cloud)
    port.create_node("a")
    port.get_node("b")
    with pytest.raises(Killed):
        port.delete_node("c")
    assert done == ["a", "b", "c"]


def test_what_a_launch_sends_is_told_from_what_a_probe_does() -> None:
    """A probe beside a launch may meet the worker before its tools are there, and sends them."""
    said: list[str] = []
    order = LaunchOrder((Worker(NodeKey("p", "z", "n"), 1, 0, "h"),), "pod-0", "pod", "n.1", 0, Job(run="true"), "")
    remote = Failpoint("launch.pushed", 1, die).remote(
        cast(Remote, SimpleNamespace(run=lambda worker, command, **_: said.append(command)))
    )
    remote.run(order.workers[0], install_command(), stdin=b"tar")
    remote.run(order.workers[0], launch_command(order, 0, start=True))
    with pytest.raises(Killed):
        remote.run(order.workers[0], launch_command(order, 0, push=True), stdin=b"tar")
    assert len(said) == 3


def test_leaves_are_bare_when_nothing_is_asked_for(tmp_path: Path) -> None:
    env = {"TPUCARE_STATE": str(tmp_path), "TPUCARE_ENDPOINT": "127.0.0.1:1", "HOME": str(tmp_path)}
    with assemble(resolve(env), env) as care:
        assert care.engine.store is care.store
        assert care.engine.ports.cloud is care.cloud
        assert care.engine.ports.launcher is care.launcher
