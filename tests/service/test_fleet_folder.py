"""Fleets from files: what changes something, and what must not (design, rule 3)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.service import VirtualService, fleet_text
from tpucare.model.errors import ConfigError
from tpucare.model.memory import DesiredState
from tpucare.service.control_socket import Control, request
from tpucare.service.fleet_folder import TEXT_LIMIT, FolderWatcher, folder_of, read_text


@pytest.fixture
def service(tmp_path: Path) -> VirtualService:
    return VirtualService(tmp_path)


def told(service: VirtualService, kind: str) -> list[str]:
    return service.daemon.told(kind)


def test_a_file_in_the_folder_is_a_fleet(service: VirtualService) -> None:
    service.write(fleet_text(count=2))
    service.look()
    assert service.slots == ["pod-0", "pod-1"]
    assert service.registry.records["pod"].wish is DesiredState.UP
    assert told(service, "fleet") == [f"{service.folder}/pod.yaml: pod accepted, 2 slots"]


# --- the project of a fleet ---


def test_a_changed_default_project_moves_no_fleet(service: VirtualService, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    With another default project the node of a live run was looked for where it never was: NOT_FOUND counted as its
    death, and a second run began. A fleet keeps the project it was accepted for.
    """
    service.write(fleet_text())
    service.look()
    service.run()
    monkeypatch.setattr("tests.kits.service.PROJECT", "other-project")
    service.again()
    service.look()
    service.write(fleet_text(count=2))
    service.look()
    service.run()
    assert [(node.path.project, node.path.node_id) for node in service.daemon.zone.nodes()] == [
        ("my-project", "pod-0-a0"),
        ("my-project", "pod-1-a0"),
    ]
    assert service.daemon.all_train()
    service.daemon.check()


@pytest.mark.parametrize("restarted", [False, True])
def test_an_edited_project_is_refused_while_nodes_are_left_in_the_one_before(
    service: VirtualService, restarted: bool
) -> None:
    """
    An edited `project:` looked for the node of a live run in the wrong project, as a changed default did. The edit is
    refused while a node or create of the fleet is left.
    """
    service.write(fleet_text())
    service.look()
    service.run()
    moved = fleet_text() + "project: other-project\n"
    service.write(moved)
    if restarted:
        service.again()
    service.look()
    service.run()
    (line,) = told(service, "fleet-refused")
    assert "`tpucare down pod` first" in line
    with pytest.raises(ConfigError, match="cannot move to other-project"):
        service.apply(moved, service.folder)
    assert service.nodes == ["pod-0-a0"]
    assert service.daemon.all_train()
    service.daemon.check()
    service.ask("down", target="pod")
    service.run(10)
    service.apply(moved, service.folder)
    service.run()
    assert [node.path.project for node in service.daemon.zone.nodes()] == ["other-project"]
    assert service.daemon.all_train()


def test_a_fleet_without_a_node_moves_when_its_file_says_so(service: VirtualService) -> None:
    service.daemon.zone.world.operator.set_capacity("us-central1-a", "v2-8", "spot", 0, service.daemon.clock.true_now())
    service.write(fleet_text())
    service.look()
    service.run(60)
    assert service.daemon.memory("pod-0").next_number > 0
    if service.daemon.memory("pod-0").creates:
        service.daemon.run_until(lambda: not service.daemon.memory("pod-0").creates)
    service.write(fleet_text() + "project: other-project\n")
    service.look()
    assert told(service, "fleet-refused") == []
    service.daemon.zone.world.operator.set_capacity(
        "us-central1-a", "v2-8", "spot", None, service.daemon.clock.true_now()
    )
    service.run(90)
    assert [node.path.project for node in service.daemon.zone.nodes()] == ["other-project"]
    assert service.daemon.all_train()


def test_a_record_of_an_older_version_gets_its_project_when_its_nodes_are_seen_there(
    service: VirtualService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.write(fleet_text())
    service.look()
    service.run()
    assert service.daemon.store is not None
    service.daemon.store.save_fleet(replace(service.registry.records["pod"], project=""))
    service.again()
    assert service.registry.records["pod"].project == ""
    service.run(1)
    assert service.daemon.store.fleets()["pod"].project == "my-project"
    monkeypatch.setattr("tests.kits.service.PROJECT", "other-project")
    service.again()
    service.run(5)
    assert service.nodes == ["pod-0-a0"]
    assert service.daemon.all_train()


@pytest.mark.parametrize("harm", ["removed", "emptied", "cut off", "folder gone", "unreadable", "not utf-8"])
def test_what_is_absent_or_unreadable_changes_nothing_and_is_told_once(service: VirtualService, harm: str) -> None:
    path = service.write(fleet_text())
    service.look()
    service.run()
    before = (service.slots, service.nodes, service.registry.records)
    match harm:
        case "removed":
            path.unlink()
        case "emptied":
            path.write_text("")
        case "cut off":
            path.write_text(fleet_text()[:30])
        case "folder gone":
            path.unlink()
            service.folder.rmdir()
        case "unreadable":
            path.unlink()
            path.mkdir()
        case "not utf-8":
            path.write_bytes(b"\xff\xfe\xff")
    for _ in range(5):
        service.look()
    service.run(5)
    assert (service.slots, service.nodes, service.registry.records) == before
    assert service.daemon.all_train()
    warnings = [e.text for e in service.daemon.events if e.kind in ("folder", "fleet-refused", "fleet-missing")]
    assert warnings
    assert len(warnings) == len(set(warnings))


def test_an_unreadable_file_beside_a_good_one(service: VirtualService) -> None:
    service.write("name: [", "bad.yaml")
    service.write(fleet_text())
    service.look()
    assert service.slots == ["pod-0"]
    assert len(told(service, "fleet-refused")) == 1
    assert str(service.folder / "bad.yaml") in told(service, "fleet-refused")[0]


def test_a_file_that_is_being_written_is_not_read_in_the_middle(service: VirtualService) -> None:
    service.fleet_folder.read_changes()
    path = service.write(fleet_text(count=1))
    service.fleet_folder.read_changes()
    path.write_text(fleet_text(count=20))
    service.fleet_folder.read_changes()
    assert service.slots == []
    service.fleet_folder.read_changes()
    assert len(service.slots) == 20


def test_an_edit_is_taken_in_and_touches_no_node(service: VirtualService) -> None:
    path = service.write(fleet_text())
    service.look()
    service.run()
    before = service.nodes
    path.write_text(fleet_text(run="python3 other.py"))
    service.look()
    service.run(5)
    job = service.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.run == "python3 other.py"
    assert service.nodes == before


def test_two_files_of_one_fleet_the_first_stays(service: VirtualService) -> None:
    service.write(fleet_text(run="one"), "a.yaml")
    service.write(fleet_text(run="two"), "b.yaml")
    service.look()
    assert "one" in service.registry.records["pod"].text
    assert "declared in" in told(service, "fleet-refused")[0]


def test_a_file_may_be_renamed(service: VirtualService) -> None:
    path = service.write(fleet_text())
    service.look()
    path.rename(service.folder / "other.yml")
    service.look()
    assert service.slots == ["pod-0"]
    assert told(service, "fleet-refused") == []


def test_a_fleet_whose_file_declares_another_one_runs_on(service: VirtualService) -> None:
    path = service.write(fleet_text())
    service.look()
    path.write_text(fleet_text("cod"))
    service.look()
    assert service.slots == ["cod-0", "pod-0"]
    assert "pod runs on" in told(service, "fleet-missing")[0]


def test_a_restart_begins_with_what_was_accepted_last(service: VirtualService) -> None:
    (service.folder / "conf.txt").write_text("one")
    text = fleet_text() + "  files: {conf.txt: ./conf.txt}\n"
    path = service.write(text)
    service.look()
    service.run()
    path.write_text("name: nonsense: [")
    (service.folder / "conf.txt").unlink()
    service.again()
    service.look()
    service.run(5)
    assert service.slots == ["pod-0"]
    assert service.daemon.all_train()
    job = service.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.files == {"conf.txt": b"one"}, "the files that a fleet names are kept with it"


def test_files_that_a_fleet_names_are_read_again_when_asked(service: VirtualService) -> None:
    (service.folder / "conf.txt").write_text("one")
    service.write(fleet_text() + "  files: {conf.txt: ./conf.txt}\n")
    service.look()
    (service.folder / "conf.txt").write_text("two")
    service.look()
    service.fleet_folder.read_all_again()
    service.look()
    job = service.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.files == {"conf.txt": b"two"}


def test_a_text_that_this_version_cannot_read_leaves_its_nodes_alone(service: VirtualService) -> None:
    path = service.write(fleet_text())
    service.look()
    service.run()
    nodes = service.nodes
    path.unlink()
    store = service.daemon.store
    assert store is not None
    record = service.registry.records["pod"]
    store.save_fleet(type(record)("pod", "name: pod\nfuture: key\n", record.folder, record.accepted_at))
    service.again()
    service.look()
    service.run(10)
    assert service.nodes == nodes
    assert "future" in service.registry.unread["pod"]
    assert service.ask("gc", apply=True)["deleting"] == [], "nodes of a fleet that is known are nobody's to sweep"
    with pytest.raises(Exception, match="cannot be read"):
        service.ask("down", target="pod")
    service.write(fleet_text())
    service.look()
    service.run(10)
    assert service.nodes == nodes
    assert service.daemon.all_train()


def test_an_applied_copy_means_the_same_in_the_folder(service: VirtualService, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "conf.txt").write_text("mine")
    service.apply(fleet_text() + "  files: {conf.txt: ./conf.txt}\n", home)
    copy = service.folder / "pod.yaml"
    assert folder_of(copy.read_text(), service.folder) == home
    service.look()
    service.again()
    service.look()
    job = service.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.files == {"conf.txt": b"mine"}
    assert told(service, "fleet-refused") == []


@pytest.mark.parametrize("again", [False, True], ids=["a person's file", "a copy that was edited"])
def test_a_byte_order_mark_is_lost_and_nothing_else(service: VirtualService, tmp_path: Path, again: bool) -> None:
    path = tmp_path / "pod.yaml"
    if again:
        service.apply(fleet_text(), Path("/elsewhere"))
        path = service.folder / "pod.yaml"
        path.write_text(path.read_text(), encoding="utf-8-sig")
    else:
        path.write_text(fleet_text(), encoding="utf-8-sig")
    text = read_text(path)
    assert folder_of(text, tmp_path) == (Path("/elsewhere") if again else tmp_path)
    service.apply(text, tmp_path)
    service.again()
    assert service.registry.unread == {}
    assert service.slots == ["pod-0"]


def test_a_text_that_no_copy_could_hold_is_refused(service: VirtualService, tmp_path: Path) -> None:
    text = fleet_text()
    with pytest.raises(ConfigError, match="larger than 256 KB as a copy"):
        service.apply(text + "#" * (TEXT_LIMIT - len(text)), tmp_path)
    assert list(service.folder.iterdir()) == []
    assert service.slots == []


def test_an_applied_fleet_replaces_the_file_that_declares_it(service: VirtualService, tmp_path: Path) -> None:
    service.write(fleet_text(run="old"), "mine.yaml")
    service.apply(fleet_text(run="new"), tmp_path)
    assert "new" in (service.folder / "mine.yaml").read_text()
    assert not (service.folder / "pod.yaml").exists()
    service.again()
    service.look()
    assert "new" in service.registry.records["pod"].text


@pytest.mark.parametrize("harm", ["no folder", "no file"])
def test_a_fleets_folder_that_cannot_be_written_is_an_error_of_that_order_alone(
    service: VirtualService, tmp_path: Path, harm: str
) -> None:
    """
    A fleets folder that cannot be written was an error of the store, so each `apply` ended the daemon of a unit with
    ProtectSystem=strict. It is an error of that command.
    """
    if harm == "no folder":
        service.folder.rmdir()
        service.folder.touch()
    else:
        (service.folder / "pod.yaml" / "in-the-way").mkdir(parents=True)
    control = Control(tmp_path / "control.sock", lambda: None)
    control.start()
    try:
        with ThreadPoolExecutor(1) as person:
            order = {"do": "apply", "text": fleet_text(), "folder": str(tmp_path), "file": ""}
            answer = person.submit(request, control.path, order)
            while not answer.done():
                control.serve(service.handler.handle)
            with pytest.raises(ConfigError, match=r"cannot be (made|written)"):
                answer.result()
    finally:
        control.close()
    assert service.slots == []
    service.run(1)


def test_an_applied_fleet_does_not_overwrite_another_one(service: VirtualService, tmp_path: Path) -> None:
    service.write(fleet_text("cod"), "pod.yaml")
    service.look()
    with pytest.raises(ConfigError, match="declares fleet cod"):
        service.apply(fleet_text(), tmp_path)


@pytest.mark.parametrize("said", ["x", '"rel"', "", "5"])
def test_a_first_line_that_names_no_folder_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="names no folder"):
        folder_of(f"# tpucare: applied; relative paths start at {said}\nname: pod\n", Path("/"))


def test_a_file_that_is_too_large_is_no_fleet(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * (300 << 10))
    with pytest.raises(ConfigError, match="256 KB"):
        read_text(path)


def test_hidden_files_and_folders_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / ".pod.yaml").write_text("x")
    (tmp_path / "pod.yaml~").write_text("x")
    (tmp_path / "dir.yaml").mkdir()
    os.symlink("nowhere", tmp_path / "gone.yaml")
    assert FolderWatcher(tmp_path).poll().changed == []
