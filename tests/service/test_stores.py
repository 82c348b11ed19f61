"""Stores side by side: their names, what the others care for, and which one a word means."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tpucare.adapters.state.folder import check_store_name
from tpucare.adapters.state.store import open_store
from tpucare.model.errors import ConfigError
from tpucare.model.memory import DesiredState, FleetRecord, Memory, NodeMemory
from tpucare.model.resources import LABEL_FLEET, Node, NodeKey, NodeState
from tpucare.service import stores
from tpucare.service.client import order_down, take_down
from tpucare.service.control_socket import Suspended, request
from tpucare.service.options import Options
from tpucare.service.status import status
from tpucare.service.stores import Neighbours, Stores, store_name

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
NODE = NodeMemory("pod-a1", "us-east5-a", 7, NOW)

Keep = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def keep(folder: Path) -> Keep:
    def write(store: str, fleet: str, *slots: str, wish: DesiredState = DesiredState.UP, nodes: bool = False) -> None:
        with open_store(folder, machine_id="m", now=NOW, name=store) as opened:
            opened.save_fleet(FleetRecord(fleet, f"name: {fleet}", "/", NOW, wish))
            memory = Memory(fleet, wish, nodes=(NODE,) if nodes else ())
            opened.save(dict.fromkeys(slots, memory))

    return write


def node(fleet: str) -> Node:
    return Node(NodeKey("p", "us-east5-a", "x-a1"), 1, NOW, NodeState.READY, labels={LABEL_FLEET: fleet})


@pytest.mark.parametrize(
    ("fleet", "project", "name"),
    [
        ("pod", "my-project", "pod.my-project"),
        ("pod-3", "my-project", "pod-3.my-project"),
    ],
)
def test_names_of_stores(fleet: str, project: str, name: str) -> None:
    assert store_name(fleet, project) == name


@pytest.mark.parametrize("project", ["example.com:grant", "p" * 60, "example.com:" + "p" * 60])
def test_names_that_no_file_could_bear_are_told_apart_all_the_same(project: str) -> None:
    name = store_name("homebrewnlp-preemptible-tuning", project)
    check_store_name(name)
    assert name != store_name("homebrewnlp-preemptible-tuning", project + "x")
    assert name.startswith("homebrewnlp-preemptible-tuning.")


class TestNeighbours:
    def test_nodes_of_their_fleets_are_no_strays(self, folder: Path, keep: Keep) -> None:
        keep("pod.p", "pod", "pod")
        keep("tpucare", "other", "other-0")
        time = [0.0]
        own = Neighbours(Options(folder, store="pod.p"), lambda: time[0])
        assert own.care_for(node("other"))
        assert not own.care_for(node("pod"))
        keep("new.p", "new", "new")
        assert not own.care_for(node("new"))
        time[0] += stores.LOOK_AGAIN_SECONDS
        assert own.care_for(node("new"))

    def test_a_store_that_cannot_be_read_may_know_any_fleet(self, folder: Path, keep: Keep) -> None:
        keep("pod.p", "pod", "pod")
        (folder / "broken.p.sqlite").write_bytes(b"nonsense")
        assert Neighbours(Options(folder, store="pod.p"), lambda: 0.0).care_for(node("whoever"))

    @pytest.mark.parametrize(
        ("kept", "fleet", "slots", "refused"),
        [
            (("tpucare", "pod", "pod-0", "pod-1"), "pod", ("pod",), "pod"),
            (("tpucare", "pod", "pod-0", "pod-1"), "pod-1", ("pod-1",), "pod-1"),
            (("pod.p", "pod", "pod-0"), "pod-0", ("pod-0",), "pod-0"),
            (("pod.q", "pod", "pod-0"), "pod-0", ("pod-0",), ""),
            (("tpucare", "pods", "pods-0"), "pod", ("pod",), ""),
        ],
    )
    def test_no_slot_is_declared_twice(
        self, folder: Path, keep: Keep, kept: tuple[str, ...], fleet: str, slots: tuple[str, ...], refused: str
    ) -> None:
        keep(*kept)
        own = Neighbours(Options(folder, store=f"{fleet}.p-own"), lambda: 0.0)
        if not refused:
            own.refuse_shared(fleet, slots, "p")
            return
        with pytest.raises(ConfigError, match=f"{refused} is cared for already, by store {kept[0]}"):
            own.refuse_shared(fleet, slots, "p")

    def test_what_was_taken_down_is_free_once_its_nodes_are_gone(self, folder: Path, keep: Keep) -> None:
        own = Neighbours(Options(folder, store="pod.p"), lambda: 0.0)
        keep("tpucare", "pod", "pod-0", wish=DesiredState.DOWN, nodes=True)
        with pytest.raises(ConfigError):
            own.refuse_shared("pod", ("pod-0",), "p")
        keep("tpucare", "pod", "pod-0", wish=DesiredState.DOWN)
        own.refuse_shared("pod", ("pod-0",), "p")


class TestMeant:
    def test_the_store_that_knows_the_word(self, folder: Path, keep: Keep) -> None:
        keep("tpucare", "big", "big-0")
        keep("pod.p", "pod", "pod")
        keep("tuning.p", "tuning", "tuning-0", "tuning-1")
        options = Options(folder)
        assert [
            Stores(options).options_for(word).store for word in ("big-0", "pod", "tuning-1", "tuning", "nobody", "")
        ] == [
            "tpucare",
            "pod.p",
            "tuning.p",
            "tuning.p",
            "tpucare",
            "tpucare",
        ]
        assert [one.store for one in Stores(options).all_options()] == ["tpucare", "pod.p", "tuning.p"]

    def test_what_lives_goes_before_what_is_over(self, folder: Path, keep: Keep) -> None:
        keep("tpucare", "pod", "pod", wish=DesiredState.DOWN)
        keep("pod.p", "pod", "pod", nodes=True)
        assert Stores(Options(folder)).options_for("pod").store == "pod.p"

    def test_a_store_that_was_named_is_meant(self, folder: Path, keep: Keep) -> None:
        keep("pod.p", "pod", "pod")
        options = Options(folder, store="other.p")
        assert Stores(options).options_for("pod") is options


CARETAKER = """
import sys, time
from datetime import UTC, datetime
from pathlib import Path
from tpucare.adapters.state.store import open_store
from tpucare.model.memory import FleetRecord, Memory
from tpucare.service.control_socket import Control
from tpucare.service.options import Options

folder, name = Path(sys.argv[1]), sys.argv[2]
fleet = name.partition(".")[0]
now = datetime.now(UTC)
with open_store(folder, machine_id="m", now=now, name=name) as store:
    store.save_fleet(FleetRecord(fleet, f"name: {fleet}", "/", now))
    store.save({fleet: Memory(fleet)})
    control = Control(Options(folder, store=name).socket, lambda: None)
    if sys.argv[3:]:
        print("ready", flush=True)
        time.sleep(600)
    control.start()
    print("ready", flush=True)
    while True:
        control.serve(lambda command: {"command": command["do"]})
        time.sleep(0.02)
"""


@contextmanager
def caretaker(folder: Path, name: str, *, begins: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a store and takes commands, as a script does; `begins`: it does not listen yet."""
    command = [sys.executable, "-c", CARETAKER, str(folder), name, *(["begins"] if begins else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_suspended_processes_hold_up_nobody_but_what_is_meant_for_them(folder: Path, keep: Keep) -> None:
    """`status` waited for each of them for 35 s, and failed then without a word of the others."""
    keep("tpucare", "big", "big-0", nodes=True)
    with caretaker(folder, "pod.p") as one, caretaker(folder, "tuning.p") as other:
        for process in (one, other):
            process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        answer = status(Options(folder))
        rows = answer["slots"]
        assert time.monotonic() - began < 2.0
        assert all(f"process {process.pid} is suspended" in answer["suspended"] for process in (one, other))
        assert [(row["slot"], row["phase"]) for row in rows] == [
            ("big-0", "unknown"),
            ("pod", "waiting"),
            ("tuning", "waiting"),
        ]
        assert f"process {one.pid} is suspended" in rows[1]["why"]
        assert f"kill -CONT {other.pid}" in rows[2]["why"]
        assert not Neighbours(Options(folder), time.monotonic).care_for(node("nobody"))
        with pytest.raises(ConfigError, match=r"pod is cared for already, by store pod\.p"):
            Neighbours(Options(folder), time.monotonic).refuse_shared("pod", ["pod"], "p")
        assert Stores(Options(folder)).holder("pod.p") == one.pid
        options = Stores(Options(folder)).options_for("pod")
        began = time.monotonic()
        with pytest.raises(Suspended, match=f"process {one.pid} is suspended"):
            take_down(options, ["pod"], lambda _: None, wait=True)
        assert time.monotonic() - began < 2.0
        keep("new.p", "new", "new")
        one.send_signal(signal.SIGCONT)
        assert request(options.socket, {"do": "status"}) == {"command": "status"}


def test_a_process_suspended_before_it_listens_is_not_waited_for(folder: Path) -> None:
    with caretaker(folder, "pod.p", begins=True) as process:
        process.send_signal(signal.SIGSTOP)
        options = Options(folder, store="pod.p")
        began = time.monotonic()
        with pytest.raises(Suspended, match=f"kill -CONT {process.pid}"):
            order_down(
                options,
                ["pod"],
                lambda: open_store(folder, machine_id="m", now=NOW, name="pod.p"),
                wait=True,
                patience_seconds=60.0,
            )
        assert time.monotonic() - began < 2.0
        assert [row["slot"] for row in status(options)["slots"]] == ["pod"]


def test_a_process_suspended_over_a_command_is_told_of(folder: Path) -> None:
    with caretaker(folder, "pod.p") as process:
        socket = Options(folder, store="pod.p").socket
        with pytest.raises(Suspended, match="may still execute this command"):
            request(socket, _Suspending(process), suspended_seconds=0.5)


class _Suspending(dict[str, str]):
    """A command whose last reading stops the process that it is for, behind the look at its state."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(do="status")
        self._process = process

    def items(self) -> Any:
        self._process.send_signal(signal.SIGSTOP)
        return super().items()


def test_status_shows_all_stores_but_scripts_that_are_over(folder: Path, keep: Keep) -> None:
    keep("tpucare", "big", "big-0")
    keep("pod.p", "pod", "pod", nodes=True)
    keep("past.p", "past", "past", wish=DesiredState.DOWN)
    keep("left.p", "left", "left", wish=DesiredState.DOWN, nodes=True)
    rows = status(Options(folder))["slots"]
    assert [(row["slot"], row["store"], row["node"]) for row in rows] == [
        ("big-0", "tpucare", ""),
        ("left", "left.p", "pod-a1"),
        ("pod", "pod.p", "pod-a1"),
    ]
    assert [row["slot"] for row in status(Options(folder), "past")["slots"]] == ["past"]
