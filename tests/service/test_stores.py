"""Stores side by side: their names, what the others care for, and which one a word means."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tpucare.adapters.state.folder import check_store_name
from tpucare.adapters.state.store import open_store
from tpucare.model.errors import ConfigError
from tpucare.model.memory import DesiredState, FleetRecord, Memory, NodeMemory
from tpucare.model.resources import LABEL_FLEET, Node, NodeKey, NodeState
from tpucare.service import stores
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
