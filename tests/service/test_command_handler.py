"""What a person may ask for: each order changes what it says, durably, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kits.harness import PROJECT
from tests.kits.service import Office, fleet_text
from tpucare.model.actions import ANY_CREATE, EffectKind
from tpucare.model.errors import ConfigError
from tpucare.model.memory import DesiredState
from tpucare.service.commands import CannotDo
from tpucare.testbed.emulator.world.records import NodeSpec


@pytest.fixture
def office(tmp_path: Path) -> Office:
    made = Office(tmp_path)
    made.write(fleet_text(count=2))
    made.look()
    made.run()
    return made


def make_node(office: Office, name: str, labels: Mapping[str, str]) -> None:
    """Somebody else's create, or a late one of our own, as the labels have it."""
    spec = NodeSpec(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base", spot=True, labels=labels)
    parent = "projects/my-project/locations/us-central1-a"
    office.daemon.zone.world.api.create_node(parent, name, spec, office.daemon.clock.true_now())


def test_down_ends_a_fleet_for_good_and_apply_brings_it_back(office: Office, tmp_path: Path) -> None:
    assert office.ask("down", target="pod")["changed"] == ["pod-0", "pod-1"]
    office.run(10)
    assert office.nodes == []
    assert office.slots == []
    office.again()
    office.look()
    office.run(10)
    assert office.nodes == []
    assert office.registry.records["pod"].wish is DesiredState.DOWN
    answer = office.apply(fleet_text(count=2), office.folder)
    assert answer["started_again"] == ["pod-0", "pod-1"]
    office.run()
    assert office.nodes == ["pod-0-a1", "pod-1-a1"], "no name is used twice"
    assert office.daemon.all_train()
    office.daemon.check(*(f"pod-{index}-a0" for index in range(2)))


def test_an_edit_of_a_fleet_that_is_down_does_not_start_it(office: Office) -> None:
    office.ask("down", target="pod")
    office.run(10)
    office.write(fleet_text(count=3))
    office.look()
    office.run(10)
    assert office.nodes == []
    assert "tpucare apply" in office.daemon.told("fleet-down")[-1]


def test_a_daemon_that_is_killed_after_down_carries_it_out(office: Office) -> None:
    office.ask("down", target="pod")
    office.again()
    office.run(10)
    assert office.nodes == []


def test_a_kill_between_the_wish_of_a_fleet_and_those_of_its_slots_is_made_good(office: Office) -> None:
    office.registry.set_desired_state("pod", DesiredState.DOWN)
    office.again()
    office.run(10)
    assert office.nodes == []


def test_a_node_that_comes_late_does_not_bring_back_a_fleet_that_is_down(office: Office) -> None:
    labels = office.daemon.zone.nodes("pod-0")[0].spec.labels
    office.ask("down", target="pod")
    office.run(10)
    make_node(office, "pod-0-a9", labels)
    office.run(10)
    assert office.nodes == []


def test_one_slot_taken_down_stays_so_while_its_fleet_goes_on(office: Office) -> None:
    office.ask("down", target="pod-1")
    office.run(10)
    office.again()
    office.look()
    office.run(10)
    assert office.nodes == ["pod-0-a0"]
    assert office.ask("status")["slots"][1]["phase"] == "down"


def test_a_lowered_count_lets_surplus_slots_run_on_until_they_are_taken_down(office: Office) -> None:
    office.write(fleet_text(count=1))
    office.look()
    office.again()
    office.look()
    office.run(10)
    assert office.nodes == ["pod-0-a0", "pod-1-a0"]
    assert office.daemon.all_train()
    office.ask("down", target="pod-1")
    office.run(10)
    assert office.slots == ["pod-0"]
    assert office.nodes == ["pod-0-a0"]


def test_what_is_not_as_declared_is_marked_and_what_is_gone_does_not_run(office: Office) -> None:
    office.apply(fleet_text(count=1, run="python3 other.py").replace("v2-8", "v3-8"), office.folder)
    office.run(1)
    rows = {row["slot"]: row for row in office.ask("status")["slots"]}
    assert (rows["pod-0"]["behind"], rows["pod-0"]["surplus"]) == (["job", "tpu"], False)
    assert rows["pod-1"]["surplus"] is True
    answer = office.apply(fleet_text(count=1), office.folder)
    assert (answer["surplus"], answer["is_new"]) == (["pod-1"], False)
    assert {row["key"]: (row["before"], row["after"]) for row in answer["changes"]} == {
        "tpu.type": ("v3-8", "v2-8"),
        "job.run": ("python3 other.py", "python3 train.py"),
    }
    office.run(1)
    assert office.ask("status")["slots"][0]["behind"] == []
    office.ask("down", target="pod")
    office.run(10)
    assert office.apply(fleet_text(count=1), office.folder)["surplus"] == [], "what is gone does not run on"


def test_a_slot_whose_places_all_need_a_person_says_so_at_once(office: Office) -> None:
    office.apply(fleet_text("other").replace("v2-8", "v2-8").replace("us-central1-a", "us-central1-b"), office.folder)
    office.run(2)
    row = next(row for row in office.ask("status")["slots"] if row["slot"] == "other-0")
    assert (row["phase"], row["waits_for_place"], row["needs_person"]) == ("waiting", True, True)


def test_pause_observes_and_touches_nothing_over_a_restart(office: Office) -> None:
    office.ask("pause", target="pod")
    office.again()
    office.daemon.zone.world.operator.preempt("pod-0", office.daemon.clock.true_now())
    office.run(20)
    assert office.nodes == ["pod-1-a0"], "a dead node of ours is deleted, and none is asked for"
    answer = office.apply(fleet_text(count=3), office.folder)
    assert answer["paused"] is True
    office.run(10)
    assert "pod-2-a0" not in office.nodes, "a new slot of a paused fleet is paused, too"
    office.ask("resume", target="pod")
    office.run(20)
    assert office.daemon.all_train()
    assert len(office.nodes) == 3


@pytest.mark.parametrize("verb", ["pause", "resume", "retry"])
def test_nothing_but_apply_brings_back_what_was_taken_down(office: Office, verb: str) -> None:
    office.ask("down", target="pod")
    with pytest.raises(CannotDo, match="tpucare apply"):
        office.ask(verb, target="pod")
    with pytest.raises(CannotDo, match="tpucare apply"):
        office.ask(verb, target="pod-0")
    office.run(10)
    assert office.nodes == []


def test_apply_with_replace_makes_new_nodes_and_with_restart_new_runs(office: Office) -> None:
    assert office.apply(fleet_text(count=2), office.folder, restart=True)["restarted"] == ["pod-0", "pod-1"]
    office.run(10)
    assert office.nodes == ["pod-0-a0", "pod-1-a0"]
    assert {office.daemon.memory(slot).run.number for slot in office.slots if office.daemon.memory(slot).run} == {2}  # type: ignore[union-attr]
    assert office.apply(fleet_text(count=2), office.folder, replace=True)["replaced"] == ["pod-0", "pod-1"]
    office.run(20)
    assert office.nodes == ["pod-0-a1", "pod-1-a1"]


def test_apply_paused_asks_for_no_node_so_that_one_can_be_adopted(office: Office) -> None:
    text = fleet_text("new", count=2)
    answer = office.apply(text, office.folder.parent, paused=True)
    assert (answer["is_new"], answer["paused"], answer["slots"]) == (True, True, ["new-0", "new-1"])
    office.look()
    office.run(30)
    assert office.nodes == ["pod-0-a0", "pod-1-a0"], "of the paused fleet there is none"
    make_node(office, "mine", {})
    office.run(1)
    office.ask("adopt-node", node="mine", slot="new-0")
    office.run(2)
    assert office.daemon.memory("new-0").node("mine") is not None
    office.ask("resume", target="new")
    office.run(15)
    assert office.nodes == ["mine", "new-1-a0", "pod-0-a0", "pod-1-a0"]
    assert office.daemon.trains("new-0")


def test_apply_paused_pauses_what_is_up_and_what_was_taken_down(office: Office) -> None:
    office.ask("down", target="pod-1")
    office.run(10)
    assert office.apply(fleet_text(count=3), office.folder, paused=True)["paused"]
    office.run(10)
    assert office.nodes == ["pod-0-a0"]
    assert [row["phase"] for row in office.ask("status")["slots"]] == ["paused"] * 3
    office.ask("resume", target="pod")
    office.run(10)
    assert office.nodes == ["pod-0-a0", "pod-1-a1", "pod-2-a0"]


def test_apply_refuses_a_bad_text_and_changes_nothing(office: Office) -> None:
    before = (office.folder / "pod.yaml").read_text()
    with pytest.raises(ConfigError, match="unknown key"):
        office.apply(fleet_text() + "comand: x\n", office.folder)
    assert (office.folder / "pod.yaml").read_text() == before


def test_an_applied_text_may_begin_with_a_byte_order_mark(office: Office, tmp_path: Path) -> None:
    office.apply("\ufeff" + fleet_text(count=2), tmp_path)
    office.run()
    office.again()
    office.look()
    assert office.registry.unread == {}
    assert office.slots == ["pod-0", "pod-1"]
    assert office.ask("down", target="pod")["changed"] == ["pod-0", "pod-1"]


def test_confirm_without_a_target_ends_the_mourning_of_a_lost_store(office: Office) -> None:
    assert office.ask("confirm")["store"] is True
    assert office.daemon.store is not None
    assert office.daemon.store.lost is False
    assert office.ask("confirm", target="pod-0")["changed"] == ["pod-0"]


def test_strays_are_listed_and_swept_only_when_asked(office: Office) -> None:
    labels = {**office.daemon.zone.nodes("pod-0")[0].spec.labels, "tpucare-fleet": "old", "tpucare-slot": "old-0"}
    make_node(office, "old-0-a0", labels)
    office.run(10)
    found = office.ask("gc")
    assert [row["node"] for row in found["strays"]] == ["old-0-a0"]
    assert found["deleting"] == []
    office.run(5)
    assert "old-0-a0" in office.nodes
    assert office.ask("gc", apply=True)["deleting"] == ["old-0-a0"]
    office.run(5)
    assert office.nodes == ["pod-0-a0", "pod-1-a0"]


def lose_the_store(office: Office) -> None:
    """As if its file had been moved away: the next process begins with an empty one."""
    office.daemon.kill()
    for path in office.state.glob("tpucare.sqlite*"):
        path.unlink()
    office.daemon.start()
    office._open()


def test_a_lost_store_brings_back_no_fleet_that_was_taken_down(office: Office, tmp_path: Path) -> None:
    """
    A lost store brought back every fleet that was down, because their files lay in the folder. `down` renames the file
    to NAME.yaml.down, and a store that does not know the fleet heeds that mark.
    """
    office.ask("down", target="pod")
    office.run(10)
    assert [path.name for path in office.folder.iterdir()] == ["pod.yaml.down"]
    lose_the_store(office)
    office.look()
    office.run(10)
    assert office.nodes == []
    assert office.slots == []
    # Somebody puts the file back, and no order says that it is wanted.
    office.write(fleet_text(count=2))
    office.look()
    office.run(10)
    assert office.nodes == []
    assert "tpucare apply" in office.daemon.told("fleet-down")[-1]
    office.apply(fleet_text(count=1), tmp_path)
    office.run()
    assert office.nodes == ["pod-0-a0"]
    assert [path.name for path in office.folder.iterdir()] == ["pod.yaml"]
    lose_the_store(office)
    office.look()
    office.run()
    assert office.nodes == ["pod-0-a0"], "a fleet that is wanted is adopted as ever"


def test_a_kill_between_a_down_and_its_mark_is_made_good(office: Office) -> None:
    office.registry.set_desired_state("pod", DesiredState.DOWN)
    office.again()
    office.look()
    assert [path.name for path in office.folder.iterdir()] == ["pod.yaml.down"]


def test_a_folder_that_cannot_be_written_keeps_no_fleet_up(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    office.ask("down", target="pod")
    office.run(10)
    assert office.nodes == []
    assert "cannot be renamed to pod.yaml.down: Permission denied" in office.daemon.told("fleet-down")[0]


def test_gc_lists_no_fleet_whose_file_lies_in_the_folder_and_no_adopted_node(office: Office) -> None:
    """`gc --apply` deleted nodes of fleets that were only not read yet, and adopted nodes. Both are left out."""
    labels = dict(office.daemon.zone.nodes("pod-0")[0].spec.labels)
    make_node(office, "hand-made", {**labels, "tpucare-fleet": "old", "tpucare-slot": "old-0"})
    make_node(office, "old-1-a0", {**labels, "tpucare-fleet": "old", "tpucare-slot": "old-1"})
    make_node(office, "broken-0-a0", {**labels, "tpucare-fleet": "broken", "tpucare-slot": "broken-0"})
    office.write("name: broken\njobb: 1\n", "broken.yaml")
    office.look()
    office.run(10)
    found = office.ask("gc")
    assert [row["node"] for row in found["strays"]] == ["old-1-a0"]
    assert [row["node"] for row in found["adopted"]] == ["hand-made"]
    assert office.ask("gc", apply=True)["deleting"] == ["old-1-a0"]
    office.run(5)
    assert office.nodes == ["broken-0-a0", "hand-made", "pod-0-a0", "pod-1-a0"]


def test_gc_deletes_nothing_while_the_store_is_lost(office: Office) -> None:
    """After a lost store `gc --apply` deleted nodes that trained. It is refused until a person confirms."""
    lose_the_store(office)
    office.daemon.engine.watch(PROJECT)
    office.run(5)
    assert office.ask("gc")["strays"] == [], "the file of the fleet lies in the folder, though nobody read it yet"
    with pytest.raises(CannotDo, match="the store was lost"):
        office.ask("gc", apply=True)
    (office.folder / "pod.yaml").unlink()
    assert [row["node"] for row in office.ask("gc")["strays"]] == ["pod-0-a0", "pod-1-a0"]
    office.ask("confirm")
    assert office.ask("gc", apply=True)["deleting"] == ["pod-0-a0", "pod-1-a0"]


def test_a_node_of_another_owner_is_adopted_when_a_person_says_so(office: Office) -> None:
    office.ask("down", target="pod-1")
    office.run(10)
    make_node(office, "pod-1", {})
    office.run(1)
    assert office.ask("adopt-node", node="pod-1", slot="pod-1") == {"node": "pod-1", "slot": "pod-1"}
    with pytest.raises(ConfigError, match="no node"):
        office.ask("adopt-node", node="nobody", slot="pod-1")


def test_a_slot_may_be_called_by_its_fleet_where_one_slot_is_meant(office: Office) -> None:
    assert office.ask("workers", slot="pod")["slot"] == "pod-0"
    with pytest.raises(CannotDo, match="no fleet or slot pot-0; nearest: pod-0"):
        office.ask("workers", slot="pot-0")


def test_plan_says_what_and_why(office: Office) -> None:
    row = office.ask("plan", target="pod-0")["slots"][0]
    assert (row["slot"], row["action"]) == ("pod-0", "wait")
    assert row["why"]


def test_events_are_told_from_the_newest_or_after_a_number(office: Office) -> None:
    newest = office.ask("events", limit=3)["events"]
    assert len(newest) == 3
    after = office.ask("events", after=newest[0]["number"], limit=10)["events"]
    assert [row["number"] for row in after] == [row["number"] for row in newest[1:]]
    assert all(row["slot"] in ("pod", "pod-1") for row in office.ask("events", slot="pod-1")["events"])


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ([], "a command is a JSON object"),
        ({}, "no verb"),
        ({"do": 5}, "no verb"),
        ({"do": "staus"}, "nearest: status"),
        ({"do": "status", "targt": "pod"}, "unknown key targt; nearest: target"),
        ({"do": "down"}, "target must be text"),
        ({"do": "down", "target": ["pod"]}, "target must be text"),
        ({"do": "gc", "apply": 1}, "apply must be true or false"),
        ({"do": "events", "limit": True}, "limit must be a whole number"),
        ({"do": "events", "after": 2**63}, "after must be the number of an event"),
        ({"do": "down", "target": "a\0b"}, "target must be text"),
        ({"do": "apply", "text": "", "folder": "/a\udcff"}, "folder must be text in UTF-8, without NUL: "),
        ({"do": "down", "target": "\ud800"}, "target must be text"),
        ({"do": "apply", "text": "", "folder": "rel"}, "not an absolute path"),
    ],
)
def test_a_wrong_order_is_one_line_and_changes_nothing(office: Office, order: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        office.handler.handle(order)
    assert "\n" not in str(caught.value)


def test_every_answer_is_json(office: Office) -> None:
    for do in ("status", "plan", "gc", "events", "confirm"):
        json.dumps(office.ask(do))


def with_a_file_per_slot(count: int) -> str:
    return fleet_text(count=count) + "  files: {config.txt: './config-{slot}.txt'}\n"


def lower_the_count(office: Office) -> None:
    for index in range(2):
        (office.folder / f"config-pod-{index}.txt").write_text(f"slot {index}")
    office.write(with_a_file_per_slot(2))
    office.look()
    office.write(with_a_file_per_slot(1))
    office.look()
    assert office.registry.is_surplus("pod-1")


def preempt(office: Office, slot: str) -> None:
    office.daemon.zone.world.operator.preempt(slot, office.daemon.clock.true_now())


def test_a_surplus_slot_keeps_its_own_file_over_a_restart(office: Office) -> None:
    """
    The file of a surplus slot was not read after a restart: its launch was repeated without a job, and the assertion
    ended the process for all fleets at each start. The files of surplus slots are kept with the fleet.
    """
    lower_the_count(office)
    office.look()
    accepted = [event for event in office.daemon.events if event.kind.startswith("fleet")]
    office.look()
    assert [e for e in office.daemon.events if e.kind.startswith("fleet")] == accepted, "the same text is no news"
    office.again()
    office.look()
    preempt(office, "pod-1")
    office.run()
    assert office.daemon.all_train()
    job = office.daemon.engine.slots["pod-1"].slot.job
    assert job is not None
    assert job.files == {"config.txt": b"slot 1"}


def test_a_surplus_slot_whose_file_is_lost_gets_no_node_that_would_lie_idle(office: Office) -> None:
    """
    A surplus slot whose job was not known got a node that stayed READY and idle for ever. Without a job nothing is
    created or launched, and a person is told.
    """
    lower_the_count(office)
    (kept,) = (office.state / "accepted").glob("pod.json")
    kept.unlink()
    office.again()
    office.look()
    preempt(office, "pod-1")
    office.run()
    assert office.nodes == ["pod-0-a0"]
    row = office.ask("status")["slots"][1]
    assert row["needs_person"]
    assert "config-pod-1.txt" in row["why"]
    office.ask("down", target="pod-1")
    office.run(10)
    assert office.slots == ["pod-0"]


def test_files_of_a_fleet_that_was_taken_down_are_let_go(office: Office, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "conf").write_text("s3cr3t")
    text = fleet_text("cod") + "  files: {conf: conf}\n"
    office.apply(text, home)
    office.run(5)
    kept = office.state / "accepted"
    assert {path.name for path in kept.iterdir()} >= {"cod.json", "cod.folder"}
    office.ask("down", target="cod")
    office.run(10)
    assert [path.name for path in kept.iterdir() if path.name.startswith("cod")] == []
    (home / "conf").unlink()
    office.again()
    office.look()
    assert office.registry.unread == {}
    assert [path.name for path in kept.iterdir() if path.name.startswith("cod")] == []
    (home / "conf").write_text("new")
    office.apply(text, home)
    job = office.daemon.engine.slots["cod-0"].slot.job
    assert job is not None
    assert job.files == {"conf": b"new"}


def test_a_secret_that_is_not_set_costs_no_node(office: Office, tmp_path: Path) -> None:
    """The node was made, booted, and stood idle and paid for through the whole setup budget."""
    known = {"HF_TOKEN": "x"}
    office.secrets = known.get
    office.again()
    text = fleet_text("cod") + "  secrets: [HF_TOKEN, WANDB_API_KEY]\n"
    answer = office.apply(text, tmp_path)
    (warning,) = answer["warnings"]
    assert warning.startswith("cod: secret WANDB_API_KEY is not set: put it into the daemon's environment")
    office.run(30)
    assert "cod-0-a0" not in office.nodes
    (row,) = office.ask("status", target="cod")["slots"]
    assert row["needs_person"]
    assert "WANDB_API_KEY is not set" in row["why"]
    known["WANDB_API_KEY"] = "y"
    office.again()
    office.look()
    office.run(30)
    assert "cod-0-a0" in office.nodes
    del known["WANDB_API_KEY"]
    office.again()
    office.run(30)
    assert "cod-0-a0" in office.nodes, "what trains is left alone"


@pytest.mark.parametrize("harm", ["broken", "gone"])
def test_a_file_that_does_not_count_is_seen_in_status(office: Office, harm: str) -> None:
    """One warning in the events, hours ago, and `status` said that all is well."""
    path = office.folder / "pod.yaml"
    good = path.read_text()
    if harm == "broken":
        path.write_text(good.replace("job:", "jobb:"))
        (office.folder / "new.yaml").write_text("name: new\n")
    else:
        path.unlink()
    office.look()
    answer = office.ask("status")
    (row,) = answer["fleets"]
    assert {"broken": "job: is missing (and 1 more", "gone": "no file in"}[harm] in row["problem"]
    assert row["problem"].endswith("it runs on as last accepted")
    if harm == "broken":
        (other,) = answer["files"]
        assert other["file"].endswith("new.yaml")
        assert f"and 1 more: `tpucare check {other['file']}`" in other["problem"]
        (office.folder / "new.yaml").unlink()
    path.write_text(good)
    office.look()
    answer = office.ask("status")
    assert (answer["fleets"][0]["problem"], answer["files"]) == ("", [])
    office.folder.rename(office.folder.with_name("elsewhere"))
    office.look()
    (row,) = office.ask("status")["files"]
    assert "cannot be read" in row["problem"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_an_edit_of_count_alone_does_not_move_the_checkpoints_of_slot_0(
    tmp_path: Path, before: int, after: int
) -> None:
    """
    `count: 1 -> 2` moved the checkpoints of slot 0, which began anew at its next preemption. Such an edit is refused,
    and the error says what to write instead.
    """
    office = Office(tmp_path)
    path = office.write(fleet_text(count=before, checkpoint="gs://bucket/pod"))
    office.look()
    office.write(fleet_text(count=after, checkpoint="gs://bucket/pod"))
    office.look()
    assert len(office.slots) == 2, "it has not run yet"
    office.write(fleet_text(count=before, checkpoint="gs://bucket/pod"))
    office.look()
    office.run()
    path.write_text(fleet_text(count=after, checkpoint="gs://bucket/pod"))
    office.look()
    (told,) = office.daemon.told("fleet-refused")
    assert "gs://bucket/pod/pod-0" in told
    assert "{slot}" in told
    job = office.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.checkpoint == ("gs://bucket/pod" if before == 1 else "gs://bucket/pod/pod-0")
    with pytest.raises(ConfigError, match="begins anew"):
        office.apply(fleet_text(count=after, checkpoint="gs://bucket/pod"), office.folder)
    office.apply(fleet_text(count=after, checkpoint="gs://bucket/pod/{slot}"), office.folder)


def test_what_is_under_way_is_told_as_text(office: Office) -> None:
    track = office.daemon.engine.slots["pod-0"]
    resting = track.action
    for key in (EffectKind.STOP.of("pod-0-a0"), ANY_CREATE, EffectKind.DELETE.of("pod-0-a0")):
        track.in_flight[key] = resting
    row = office.ask("plan", target="pod-0")["slots"][0]
    assert row["in_flight"] == ["create", "delete:pod-0-a0", "stop:pod-0-a0"]
    assert json.loads(json.dumps(row)) == row
