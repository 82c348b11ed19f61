"""Fleets from files: what changes something, and what must not (design, rule 3)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.service import Office, fleet_text
from tpucare.model.errors import ConfigError
from tpucare.model.memory import DesiredState
from tpucare.service.control_socket import Control, request
from tpucare.service.fleet_folder import TEXT_LIMIT, FolderWatcher, folder_of, read_text


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def told(office: Office, kind: str) -> list[str]:
    return office.daemon.told(kind)


def test_a_file_in_the_folder_is_a_fleet(office: Office) -> None:
    office.write(fleet_text(count=2))
    office.look()
    assert office.slots == ["pod-0", "pod-1"]
    assert office.registry.records["pod"].wish is DesiredState.UP
    assert told(office, "fleet") == [f"{office.folder}/pod.yaml: pod accepted, 2 slots"]


# --- the project of a fleet ---


def test_a_changed_default_project_moves_no_fleet(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    With another default project the node of a live run was looked for where it never was: NOT_FOUND counted as its
    death, and a second run began. A fleet keeps the project it was accepted for.
    """
    office.write(fleet_text())
    office.look()
    office.run()
    monkeypatch.setattr("tests.kits.service.PROJECT", "other-project")
    office.again()
    office.look()
    office.write(fleet_text(count=2))
    office.look()
    office.run()
    assert [(node.path.project, node.path.node_id) for node in office.daemon.zone.nodes()] == [
        ("my-project", "pod-0-a0"),
        ("my-project", "pod-1-a0"),
    ]
    assert office.daemon.all_train()
    office.daemon.check()


@pytest.mark.parametrize("restarted", [False, True])
def test_an_edited_project_is_refused_while_nodes_are_left_in_the_one_before(office: Office, restarted: bool) -> None:
    """
    An edited `project:` looked for the node of a live run in the wrong project, as a changed default did. The edit is
    refused while a node or create of the fleet is left.
    """
    office.write(fleet_text())
    office.look()
    office.run()
    moved = fleet_text() + "project: other-project\n"
    office.write(moved)
    if restarted:
        office.again()
    office.look()
    office.run()
    (line,) = told(office, "fleet-refused")
    assert "`tpucare down pod` first" in line
    with pytest.raises(ConfigError, match="cannot move to other-project"):
        office.apply(moved, office.folder)
    assert office.nodes == ["pod-0-a0"]
    assert office.daemon.all_train()
    office.daemon.check()
    office.ask("down", target="pod")
    office.run(10)
    office.apply(moved, office.folder)
    office.run()
    assert [node.path.project for node in office.daemon.zone.nodes()] == ["other-project"]
    assert office.daemon.all_train()


def test_a_fleet_without_a_node_moves_when_its_file_says_so(office: Office) -> None:
    office.daemon.zone.world.operator.set_capacity("us-central1-a", "v2-8", "spot", 0, office.daemon.clock.true_now())
    office.write(fleet_text())
    office.look()
    office.run(60)
    assert office.daemon.memory("pod-0").next_number > 0
    if office.daemon.memory("pod-0").creates:
        office.daemon.run_until(lambda: not office.daemon.memory("pod-0").creates)
    office.write(fleet_text() + "project: other-project\n")
    office.look()
    assert told(office, "fleet-refused") == []
    office.daemon.zone.world.operator.set_capacity(
        "us-central1-a", "v2-8", "spot", None, office.daemon.clock.true_now()
    )
    office.run(90)
    assert [node.path.project for node in office.daemon.zone.nodes()] == ["other-project"]
    assert office.daemon.all_train()


def test_a_record_of_an_older_version_gets_its_project_when_its_nodes_are_seen_there(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.write(fleet_text())
    office.look()
    office.run()
    assert office.daemon.store is not None
    office.daemon.store.save_fleet(replace(office.registry.records["pod"], project=""))
    office.again()
    assert office.registry.records["pod"].project == ""
    office.run(1)
    assert office.daemon.store.fleets()["pod"].project == "my-project"
    monkeypatch.setattr("tests.kits.service.PROJECT", "other-project")
    office.again()
    office.run(5)
    assert office.nodes == ["pod-0-a0"]
    assert office.daemon.all_train()


@pytest.mark.parametrize("harm", ["removed", "emptied", "cut off", "folder gone", "unreadable", "not utf-8"])
def test_what_is_absent_or_unreadable_changes_nothing_and_is_told_once(office: Office, harm: str) -> None:
    path = office.write(fleet_text())
    office.look()
    office.run()
    before = (office.slots, office.nodes, office.registry.records)
    match harm:
        case "removed":
            path.unlink()
        case "emptied":
            path.write_text("")
        case "cut off":
            path.write_text(fleet_text()[:30])
        case "folder gone":
            path.unlink()
            office.folder.rmdir()
        case "unreadable":
            path.unlink()
            path.mkdir()
        case "not utf-8":
            path.write_bytes(b"\xff\xfe\xff")
    for _ in range(5):
        office.look()
    office.run(5)
    assert (office.slots, office.nodes, office.registry.records) == before
    assert office.daemon.all_train()
    warnings = [e.text for e in office.daemon.events if e.kind in ("folder", "fleet-refused", "fleet-missing")]
    assert warnings
    assert len(warnings) == len(set(warnings))


def test_an_unreadable_file_beside_a_good_one(office: Office) -> None:
    office.write("name: [", "bad.yaml")
    office.write(fleet_text())
    office.look()
    assert office.slots == ["pod-0"]
    assert len(told(office, "fleet-refused")) == 1
    assert str(office.folder / "bad.yaml") in told(office, "fleet-refused")[0]


def test_a_file_that_is_being_written_is_not_read_in_the_middle(office: Office) -> None:
    office.fleet_folder.read_changes()
    path = office.write(fleet_text(count=1))
    office.fleet_folder.read_changes()
    path.write_text(fleet_text(count=20))
    office.fleet_folder.read_changes()
    assert office.slots == []
    office.fleet_folder.read_changes()
    assert len(office.slots) == 20


def test_an_edit_is_taken_in_and_touches_no_node(office: Office) -> None:
    path = office.write(fleet_text())
    office.look()
    office.run()
    before = office.nodes
    path.write_text(fleet_text(run="python3 other.py"))
    office.look()
    office.run(5)
    job = office.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.run == "python3 other.py"
    assert office.nodes == before


def test_two_files_of_one_fleet_the_first_stays(office: Office) -> None:
    office.write(fleet_text(run="one"), "a.yaml")
    office.write(fleet_text(run="two"), "b.yaml")
    office.look()
    assert "one" in office.registry.records["pod"].text
    assert "declared in" in told(office, "fleet-refused")[0]


def test_a_file_may_be_renamed(office: Office) -> None:
    path = office.write(fleet_text())
    office.look()
    path.rename(office.folder / "other.yml")
    office.look()
    assert office.slots == ["pod-0"]
    assert told(office, "fleet-refused") == []


def test_a_fleet_whose_file_declares_another_one_runs_on(office: Office) -> None:
    path = office.write(fleet_text())
    office.look()
    path.write_text(fleet_text("cod"))
    office.look()
    assert office.slots == ["cod-0", "pod-0"]
    assert "pod runs on" in told(office, "fleet-missing")[0]


def test_a_restart_begins_with_what_was_accepted_last(office: Office) -> None:
    (office.folder / "conf.txt").write_text("one")
    text = fleet_text() + "  files: {conf.txt: ./conf.txt}\n"
    path = office.write(text)
    office.look()
    office.run()
    path.write_text("name: nonsense: [")
    (office.folder / "conf.txt").unlink()
    office.again()
    office.look()
    office.run(5)
    assert office.slots == ["pod-0"]
    assert office.daemon.all_train()
    job = office.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.files == {"conf.txt": b"one"}, "the files that a fleet names are kept with it"


def test_files_that_a_fleet_names_are_read_again_when_asked(office: Office) -> None:
    (office.folder / "conf.txt").write_text("one")
    office.write(fleet_text() + "  files: {conf.txt: ./conf.txt}\n")
    office.look()
    (office.folder / "conf.txt").write_text("two")
    office.look()
    office.fleet_folder.read_all_again()
    office.look()
    job = office.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.files == {"conf.txt": b"two"}


def test_a_text_that_this_version_cannot_read_leaves_its_nodes_alone(office: Office) -> None:
    path = office.write(fleet_text())
    office.look()
    office.run()
    nodes = office.nodes
    path.unlink()
    store = office.daemon.store
    assert store is not None
    record = office.registry.records["pod"]
    store.save_fleet(type(record)("pod", "name: pod\nfuture: key\n", record.folder, record.accepted_at))
    office.again()
    office.look()
    office.run(10)
    assert office.nodes == nodes
    assert "future" in office.registry.unread["pod"]
    assert office.ask("gc", apply=True)["deleting"] == [], "nodes of a fleet that is known are nobody's to sweep"
    with pytest.raises(Exception, match="cannot be read"):
        office.ask("down", target="pod")
    office.write(fleet_text())
    office.look()
    office.run(10)
    assert office.nodes == nodes
    assert office.daemon.all_train()


def test_an_applied_copy_means_the_same_in_the_folder(office: Office, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "conf.txt").write_text("mine")
    office.apply(fleet_text() + "  files: {conf.txt: ./conf.txt}\n", home)
    copy = office.folder / "pod.yaml"
    assert folder_of(copy.read_text(), office.folder) == home
    office.look()
    office.again()
    office.look()
    job = office.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.files == {"conf.txt": b"mine"}
    assert told(office, "fleet-refused") == []


@pytest.mark.parametrize("again", [False, True], ids=["a person's file", "a copy that was edited"])
def test_a_byte_order_mark_is_lost_and_nothing_else(office: Office, tmp_path: Path, again: bool) -> None:
    path = tmp_path / "pod.yaml"
    if again:
        office.apply(fleet_text(), Path("/elsewhere"))
        path = office.folder / "pod.yaml"
        path.write_text(path.read_text(), encoding="utf-8-sig")
    else:
        path.write_text(fleet_text(), encoding="utf-8-sig")
    text = read_text(path)
    assert folder_of(text, tmp_path) == (Path("/elsewhere") if again else tmp_path)
    office.apply(text, tmp_path)
    office.again()
    assert office.registry.unread == {}
    assert office.slots == ["pod-0"]


def test_a_text_that_no_copy_could_hold_is_refused(office: Office, tmp_path: Path) -> None:
    text = fleet_text()
    with pytest.raises(ConfigError, match="larger than 256 KB as a copy"):
        office.apply(text + "#" * (TEXT_LIMIT - len(text)), tmp_path)
    assert list(office.folder.iterdir()) == []
    assert office.slots == []


def test_an_applied_fleet_replaces_the_file_that_declares_it(office: Office, tmp_path: Path) -> None:
    office.write(fleet_text(run="old"), "mine.yaml")
    office.apply(fleet_text(run="new"), tmp_path)
    assert "new" in (office.folder / "mine.yaml").read_text()
    assert not (office.folder / "pod.yaml").exists()
    office.again()
    office.look()
    assert "new" in office.registry.records["pod"].text


@pytest.mark.parametrize("harm", ["no folder", "no file"])
def test_a_fleets_folder_that_cannot_be_written_is_an_error_of_that_order_alone(
    office: Office, tmp_path: Path, harm: str
) -> None:
    """
    A fleets folder that cannot be written was an error of the store, so each `apply` ended the daemon of a unit with
    ProtectSystem=strict. It is an error of that command.
    """
    if harm == "no folder":
        office.folder.rmdir()
        office.folder.touch()
    else:
        (office.folder / "pod.yaml" / "in-the-way").mkdir(parents=True)
    control = Control(tmp_path / "control.sock", lambda: None)
    control.start()
    try:
        with ThreadPoolExecutor(1) as person:
            order = {"do": "apply", "text": fleet_text(), "folder": str(tmp_path), "file": ""}
            answer = person.submit(request, control.path, order)
            while not answer.done():
                control.serve(office.handler.handle)
            with pytest.raises(ConfigError, match=r"cannot be (made|written)"):
                answer.result()
    finally:
        control.close()
    assert office.slots == []
    office.run(1)


def test_an_applied_fleet_does_not_overwrite_another_one(office: Office, tmp_path: Path) -> None:
    office.write(fleet_text("cod"), "pod.yaml")
    office.look()
    with pytest.raises(ConfigError, match="declares fleet cod"):
        office.apply(fleet_text(), tmp_path)


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
