"""What a person may ask for: each order changes what it says, durably, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kits.harness import PROJECT
from tests.kits.service import VirtualService, fleet_text
from tpucare.model.actions import ANY_CREATE, EffectKind
from tpucare.model.errors import ConfigError
from tpucare.model.memory import DesiredState
from tpucare.service.commands import CannotDo
from tpucare.testbed.emulator.world.records import NodeSpec


@pytest.fixture
def service(tmp_path: Path) -> VirtualService:
    made = VirtualService(tmp_path)
    made.write(fleet_text(count=2))
    made.look()
    made.run()
    return made


def make_node(service: VirtualService, name: str, labels: Mapping[str, str]) -> None:
    """Somebody else's create, or a late one of our own, as the labels have it."""
    spec = NodeSpec(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base", spot=True, labels=labels)
    parent = "projects/my-project/locations/us-central1-a"
    service.daemon.zone.world.api.create_node(parent, name, spec, service.daemon.clock.true_now())


def test_down_ends_a_fleet_for_good_and_apply_brings_it_back(service: VirtualService, tmp_path: Path) -> None:
    assert service.ask("down", target="pod")["changed"] == ["pod-0", "pod-1"]
    service.run(10)
    assert service.nodes == []
    assert service.slots == []
    service.again()
    service.look()
    service.run(10)
    assert service.nodes == []
    assert service.registry.records["pod"].wish is DesiredState.DOWN
    answer = service.apply(fleet_text(count=2), service.folder)
    assert answer["started_again"] == ["pod-0", "pod-1"]
    service.run()
    assert service.nodes == ["pod-0-a1", "pod-1-a1"], "no name is used twice"
    assert service.daemon.all_train()
    service.daemon.check(*(f"pod-{index}-a0" for index in range(2)))


def test_an_edit_of_a_fleet_that_is_down_does_not_start_it(service: VirtualService) -> None:
    service.ask("down", target="pod")
    service.run(10)
    service.write(fleet_text(count=3))
    service.look()
    service.run(10)
    assert service.nodes == []
    assert "tpucare apply" in service.daemon.told("fleet-down")[-1]


def test_a_daemon_that_is_killed_after_down_carries_it_out(service: VirtualService) -> None:
    service.ask("down", target="pod")
    service.again()
    service.run(10)
    assert service.nodes == []


def test_a_kill_between_the_wish_of_a_fleet_and_those_of_its_slots_is_made_good(service: VirtualService) -> None:
    service.registry.set_desired_state("pod", DesiredState.DOWN)
    service.again()
    service.run(10)
    assert service.nodes == []


def test_a_node_that_comes_late_does_not_bring_back_a_fleet_that_is_down(service: VirtualService) -> None:
    labels = service.daemon.zone.nodes("pod-0")[0].spec.labels
    service.ask("down", target="pod")
    service.run(10)
    make_node(service, "pod-0-a9", labels)
    service.run(10)
    assert service.nodes == []


def test_one_slot_taken_down_stays_so_while_its_fleet_goes_on(service: VirtualService) -> None:
    service.ask("down", target="pod-1")
    service.run(10)
    service.again()
    service.look()
    service.run(10)
    assert service.nodes == ["pod-0-a0"]
    assert service.ask("status")["slots"][1]["phase"] == "down"


def test_a_lowered_count_lets_surplus_slots_run_on_until_they_are_taken_down(service: VirtualService) -> None:
    service.write(fleet_text(count=1))
    service.look()
    service.again()
    service.look()
    service.run(10)
    assert service.nodes == ["pod-0-a0", "pod-1-a0"]
    assert service.daemon.all_train()
    service.ask("down", target="pod-1")
    service.run(10)
    assert service.slots == ["pod-0"]
    assert service.nodes == ["pod-0-a0"]


def test_what_is_not_as_declared_is_marked_and_what_is_gone_does_not_run(service: VirtualService) -> None:
    service.apply(fleet_text(count=1, run="python3 other.py").replace("v2-8", "v3-8"), service.folder)
    service.run(1)
    rows = {row["slot"]: row for row in service.ask("status")["slots"]}
    assert (rows["pod-0"]["behind"], rows["pod-0"]["surplus"]) == (["job", "tpu"], False)
    assert rows["pod-1"]["surplus"] is True
    answer = service.apply(fleet_text(count=1), service.folder)
    assert (answer["surplus"], answer["is_new"]) == (["pod-1"], False)
    assert {row["key"]: (row["before"], row["after"]) for row in answer["changes"]} == {
        "tpu.type": ("v3-8", "v2-8"),
        "job.run": ("python3 other.py", "python3 train.py"),
    }
    service.run(1)
    assert service.ask("status")["slots"][0]["behind"] == []
    service.ask("down", target="pod")
    service.run(10)
    assert service.apply(fleet_text(count=1), service.folder)["surplus"] == [], "what is gone does not run on"


def test_a_slot_whose_places_all_need_a_person_says_so_at_once(service: VirtualService) -> None:
    service.apply(fleet_text("other").replace("v2-8", "v2-8").replace("us-central1-a", "us-central1-b"), service.folder)
    service.run(2)
    row = next(row for row in service.ask("status")["slots"] if row["slot"] == "other-0")
    assert (row["phase"], row["waits_for_place"], row["needs_person"]) == ("waiting", True, True)


def test_pause_observes_and_touches_nothing_over_a_restart(service: VirtualService) -> None:
    service.ask("pause", target="pod")
    service.again()
    service.daemon.zone.world.operator.preempt("pod-0", service.daemon.clock.true_now())
    service.run(20)
    assert service.nodes == ["pod-1-a0"], "a dead node of ours is deleted, and none is asked for"
    answer = service.apply(fleet_text(count=3), service.folder)
    assert answer["paused"] is True
    service.run(10)
    assert "pod-2-a0" not in service.nodes, "a new slot of a paused fleet is paused, too"
    service.ask("resume", target="pod")
    service.run(20)
    assert service.daemon.all_train()
    assert len(service.nodes) == 3


@pytest.mark.parametrize("verb", ["pause", "resume", "retry"])
def test_nothing_but_apply_brings_back_what_was_taken_down(service: VirtualService, verb: str) -> None:
    service.ask("down", target="pod")
    with pytest.raises(CannotDo, match="tpucare apply"):
        service.ask(verb, target="pod")
    with pytest.raises(CannotDo, match="tpucare apply"):
        service.ask(verb, target="pod-0")
    service.run(10)
    assert service.nodes == []


def test_apply_with_replace_makes_new_nodes_and_with_restart_new_runs(service: VirtualService) -> None:
    assert service.apply(fleet_text(count=2), service.folder, restart=True)["restarted"] == ["pod-0", "pod-1"]
    service.run(10)
    assert service.nodes == ["pod-0-a0", "pod-1-a0"]
    assert {service.daemon.memory(slot).run.number for slot in service.slots if service.daemon.memory(slot).run} == {2}  # type: ignore[union-attr]
    assert service.apply(fleet_text(count=2), service.folder, replace=True)["replaced"] == ["pod-0", "pod-1"]
    service.run(20)
    assert service.nodes == ["pod-0-a1", "pod-1-a1"]


def test_apply_paused_asks_for_no_node_so_that_one_can_be_adopted(service: VirtualService) -> None:
    text = fleet_text("new", count=2)
    answer = service.apply(text, service.folder.parent, paused=True)
    assert (answer["is_new"], answer["paused"], answer["slots"]) == (True, True, ["new-0", "new-1"])
    service.look()
    service.run(30)
    assert service.nodes == ["pod-0-a0", "pod-1-a0"], "of the paused fleet there is none"
    make_node(service, "mine", {})
    service.run(1)
    service.ask("adopt-node", node="mine", slot="new-0")
    service.run(2)
    assert service.daemon.memory("new-0").node("mine") is not None
    service.ask("resume", target="new")
    service.run(15)
    assert service.nodes == ["mine", "new-1-a0", "pod-0-a0", "pod-1-a0"]
    assert service.daemon.trains("new-0")


def test_apply_paused_pauses_what_is_up_and_what_was_taken_down(service: VirtualService) -> None:
    service.ask("down", target="pod-1")
    service.run(10)
    assert service.apply(fleet_text(count=3), service.folder, paused=True)["paused"]
    service.run(10)
    assert service.nodes == ["pod-0-a0"]
    assert [row["phase"] for row in service.ask("status")["slots"]] == ["paused"] * 3
    service.ask("resume", target="pod")
    service.run(10)
    assert service.nodes == ["pod-0-a0", "pod-1-a1", "pod-2-a0"]


def test_apply_refuses_a_bad_text_and_changes_nothing(service: VirtualService) -> None:
    before = (service.folder / "pod.yaml").read_text()
    with pytest.raises(ConfigError, match="unknown key"):
        service.apply(fleet_text() + "comand: x\n", service.folder)
    assert (service.folder / "pod.yaml").read_text() == before


def test_an_applied_text_may_begin_with_a_byte_order_mark(service: VirtualService, tmp_path: Path) -> None:
    service.apply("\ufeff" + fleet_text(count=2), tmp_path)
    service.run()
    service.again()
    service.look()
    assert service.registry.unread == {}
    assert service.slots == ["pod-0", "pod-1"]
    assert service.ask("down", target="pod")["changed"] == ["pod-0", "pod-1"]


def test_confirm_without_a_target_ends_the_mourning_of_a_lost_store(service: VirtualService) -> None:
    assert service.ask("confirm")["store"] is True
    assert service.daemon.store is not None
    assert service.daemon.store.lost is False
    assert service.ask("confirm", target="pod-0")["changed"] == ["pod-0"]


def test_strays_are_listed_and_swept_only_when_asked(service: VirtualService) -> None:
    labels = {**service.daemon.zone.nodes("pod-0")[0].spec.labels, "tpucare-fleet": "old", "tpucare-slot": "old-0"}
    make_node(service, "old-0-a0", labels)
    service.run(10)
    found = service.ask("gc")
    assert [row["node"] for row in found["strays"]] == ["old-0-a0"]
    assert found["deleting"] == []
    service.run(5)
    assert "old-0-a0" in service.nodes
    assert service.ask("gc", apply=True)["deleting"] == ["old-0-a0"]
    service.run(5)
    assert service.nodes == ["pod-0-a0", "pod-1-a0"]


def lose_the_store(service: VirtualService) -> None:
    service.daemon.lose_store()
    service._open()


def test_a_lost_store_brings_back_no_fleet_that_was_taken_down(service: VirtualService, tmp_path: Path) -> None:
    """
    A lost store brought back every fleet that was down, because their files lay in the folder. `down` renames the file
    to NAME.yaml.down, and a store that does not know the fleet heeds that mark.
    """
    service.ask("down", target="pod")
    service.run(10)
    assert [path.name for path in service.folder.iterdir()] == ["pod.yaml.down"]
    lose_the_store(service)
    service.look()
    service.run(10)
    assert service.nodes == []
    assert service.slots == []
    # Somebody puts the file back, and no order says that it is wanted.
    service.write(fleet_text(count=2))
    service.look()
    service.run(10)
    assert service.nodes == []
    assert "tpucare apply" in service.daemon.told("fleet-down")[-1]
    service.apply(fleet_text(count=1), tmp_path)
    service.run()
    assert service.nodes == ["pod-0-a0"]
    assert [path.name for path in service.folder.iterdir()] == ["pod.yaml"]
    lose_the_store(service)
    service.look()
    service.run()
    assert service.nodes == ["pod-0-a0"], "a fleet that is wanted is adopted as ever"


def test_a_kill_between_a_down_and_its_mark_is_made_good(service: VirtualService) -> None:
    service.registry.set_desired_state("pod", DesiredState.DOWN)
    service.again()
    service.look()
    assert [path.name for path in service.folder.iterdir()] == ["pod.yaml.down"]


def test_a_folder_that_cannot_be_written_keeps_no_fleet_up(
    service: VirtualService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    service.ask("down", target="pod")
    service.run(10)
    assert service.nodes == []
    assert "cannot be renamed to pod.yaml.down: Permission denied" in service.daemon.told("fleet-down")[0]


def test_gc_lists_no_fleet_whose_file_lies_in_the_folder_and_no_adopted_node(service: VirtualService) -> None:
    """`gc --apply` deleted nodes of fleets that were only not read yet, and adopted nodes. Both are left out."""
    labels = dict(service.daemon.zone.nodes("pod-0")[0].spec.labels)
    make_node(service, "hand-made", {**labels, "tpucare-fleet": "old", "tpucare-slot": "old-0"})
    make_node(service, "old-1-a0", {**labels, "tpucare-fleet": "old", "tpucare-slot": "old-1"})
    make_node(service, "broken-0-a0", {**labels, "tpucare-fleet": "broken", "tpucare-slot": "broken-0"})
    service.write("name: broken\njobb: 1\n", "broken.yaml")
    service.look()
    service.run(10)
    found = service.ask("gc")
    assert [row["node"] for row in found["strays"]] == ["old-1-a0"]
    assert [row["node"] for row in found["adopted"]] == ["hand-made"]
    assert service.ask("gc", apply=True)["deleting"] == ["old-1-a0"]
    service.run(5)
    assert service.nodes == ["broken-0-a0", "hand-made", "pod-0-a0", "pod-1-a0"]


def test_gc_deletes_nothing_while_the_store_is_lost(service: VirtualService) -> None:
    """After a lost store `gc --apply` deleted nodes that trained. It is refused until a person confirms."""
    lose_the_store(service)
    service.daemon.engine.list_project(PROJECT)
    service.run(5)
    assert service.ask("gc")["strays"] == [], "the file of the fleet lies in the folder, though nobody read it yet"
    with pytest.raises(CannotDo, match="the store was lost"):
        service.ask("gc", apply=True)
    (service.folder / "pod.yaml").unlink()
    assert [row["node"] for row in service.ask("gc")["strays"]] == ["pod-0-a0", "pod-1-a0"]
    service.ask("confirm")
    assert service.ask("gc", apply=True)["deleting"] == ["pod-0-a0", "pod-1-a0"]


def test_a_node_of_another_owner_is_adopted_when_a_person_says_so(service: VirtualService) -> None:
    service.ask("down", target="pod-1")
    service.run(10)
    make_node(service, "pod-1", {})
    service.run(1)
    assert service.ask("adopt-node", node="pod-1", slot="pod-1") == {"node": "pod-1", "slot": "pod-1"}
    with pytest.raises(ConfigError, match="no node"):
        service.ask("adopt-node", node="nobody", slot="pod-1")


def test_a_slot_may_be_called_by_its_fleet_where_one_slot_is_meant(service: VirtualService) -> None:
    assert service.ask("workers", slot="pod")["slot"] == "pod-0"
    with pytest.raises(CannotDo, match="no fleet or slot pot-0; nearest: pod-0"):
        service.ask("workers", slot="pot-0")


def test_plan_says_what_and_why(service: VirtualService) -> None:
    row = service.ask("plan", target="pod-0")["slots"][0]
    assert (row["slot"], row["action"]) == ("pod-0", "wait")
    assert row["why"]


def test_events_are_told_from_the_newest_or_after_a_number(service: VirtualService) -> None:
    newest = service.ask("events", limit=3)["events"]
    assert len(newest) == 3
    after = service.ask("events", after=newest[0]["number"], limit=10)["events"]
    assert [row["number"] for row in after] == [row["number"] for row in newest[1:]]
    assert all(row["slot"] in ("pod", "pod-1") for row in service.ask("events", slot="pod-1")["events"])


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
def test_a_wrong_order_is_one_line_and_changes_nothing(service: VirtualService, order: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        service.handler.handle(order)
    assert "\n" not in str(caught.value)


def test_every_answer_is_json(service: VirtualService) -> None:
    for do in ("status", "plan", "gc", "events", "confirm"):
        json.dumps(service.ask(do))


def with_a_file_per_slot(count: int) -> str:
    return fleet_text(count=count) + "  files: {config.txt: './config-{slot}.txt'}\n"


def lower_the_count(service: VirtualService) -> None:
    for index in range(2):
        (service.folder / f"config-pod-{index}.txt").write_text(f"slot {index}")
    service.write(with_a_file_per_slot(2))
    service.look()
    service.write(with_a_file_per_slot(1))
    service.look()
    assert service.registry.is_surplus("pod-1")


def preempt(service: VirtualService, slot: str) -> None:
    service.daemon.zone.world.operator.preempt(slot, service.daemon.clock.true_now())


def test_a_surplus_slot_keeps_its_own_file_over_a_restart(service: VirtualService) -> None:
    """
    The file of a surplus slot was not read after a restart: its launch was repeated without a job, and the assertion
    ended the process for all fleets at each start. The files of surplus slots are kept with the fleet.
    """
    lower_the_count(service)
    service.look()
    accepted = [event for event in service.daemon.events if event.kind.startswith("fleet")]
    service.look()
    assert [e for e in service.daemon.events if e.kind.startswith("fleet")] == accepted, "the same text is no news"
    service.again()
    service.look()
    preempt(service, "pod-1")
    service.run()
    assert service.daemon.all_train()
    job = service.daemon.engine.slots["pod-1"].slot.job
    assert job is not None
    assert job.files == {"config.txt": b"slot 1"}


def test_a_surplus_slot_whose_file_is_lost_gets_no_node_that_would_lie_idle(service: VirtualService) -> None:
    """
    A surplus slot whose job was not known got a node that stayed READY and idle for ever. Without a job nothing is
    created or launched, and a person is told.
    """
    lower_the_count(service)
    (kept,) = (service.state / "accepted").glob("pod.json")
    kept.unlink()
    service.again()
    service.look()
    preempt(service, "pod-1")
    service.run()
    assert service.nodes == ["pod-0-a0"]
    row = service.ask("status")["slots"][1]
    assert row["needs_person"]
    assert "config-pod-1.txt" in row["why"]
    service.ask("down", target="pod-1")
    service.run(10)
    assert service.slots == ["pod-0"]


def test_files_of_a_fleet_that_was_taken_down_are_let_go(service: VirtualService, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "conf").write_text("s3cr3t")
    text = fleet_text("cod") + "  files: {conf: conf}\n"
    service.apply(text, home)
    service.run(5)
    kept = service.state / "accepted"
    assert {path.name for path in kept.iterdir()} >= {"cod.json", "cod.folder"}
    service.ask("down", target="cod")
    service.run(10)
    assert [path.name for path in kept.iterdir() if path.name.startswith("cod")] == []
    (home / "conf").unlink()
    service.again()
    service.look()
    assert service.registry.unread == {}
    assert [path.name for path in kept.iterdir() if path.name.startswith("cod")] == []
    (home / "conf").write_text("new")
    service.apply(text, home)
    job = service.daemon.engine.slots["cod-0"].slot.job
    assert job is not None
    assert job.files == {"conf": b"new"}


def test_a_secret_that_is_not_set_costs_no_node(service: VirtualService, tmp_path: Path) -> None:
    """The node was made, booted, and stood idle and paid for through the whole setup budget."""
    known = {"HF_TOKEN": "x"}
    service.secrets = known.get
    service.again()
    text = fleet_text("cod") + "  secrets: [HF_TOKEN, WANDB_API_KEY]\n"
    answer = service.apply(text, tmp_path)
    (warning,) = answer["warnings"]
    assert warning.startswith("cod: secret WANDB_API_KEY is not set: put it into the daemon's environment")
    service.run(30)
    assert "cod-0-a0" not in service.nodes
    (row,) = service.ask("status", target="cod")["slots"]
    assert row["needs_person"]
    assert "WANDB_API_KEY is not set" in row["why"]
    known["WANDB_API_KEY"] = "y"
    service.again()
    service.look()
    service.run(30)
    assert "cod-0-a0" in service.nodes
    del known["WANDB_API_KEY"]
    service.again()
    service.run(30)
    assert "cod-0-a0" in service.nodes, "what trains is left alone"


@pytest.mark.parametrize("harm", ["broken", "gone"])
def test_a_file_that_does_not_count_is_seen_in_status(service: VirtualService, harm: str) -> None:
    """One warning in the events, hours ago, and `status` said that all is well."""
    path = service.folder / "pod.yaml"
    good = path.read_text()
    if harm == "broken":
        path.write_text(good.replace("job:", "jobb:"))
        (service.folder / "new.yaml").write_text("name: new\n")
    else:
        path.unlink()
    service.look()
    answer = service.ask("status")
    (row,) = answer["fleets"]
    assert {"broken": "job: is missing (and 1 more", "gone": "no file in"}[harm] in row["problem"]
    assert row["problem"].endswith("it runs on as last accepted")
    if harm == "broken":
        (other,) = answer["files"]
        assert other["file"].endswith("new.yaml")
        assert f"and 1 more: `tpucare check {other['file']}`" in other["problem"]
        (service.folder / "new.yaml").unlink()
    path.write_text(good)
    service.look()
    answer = service.ask("status")
    assert (answer["fleets"][0]["problem"], answer["files"]) == ("", [])
    service.folder.rename(service.folder.with_name("elsewhere"))
    service.look()
    (row,) = service.ask("status")["files"]
    assert "cannot be read" in row["problem"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_an_edit_of_count_alone_does_not_move_the_checkpoints_of_slot_0(
    tmp_path: Path, before: int, after: int
) -> None:
    """
    `count: 1 -> 2` moved the checkpoints of slot 0, which began anew at its next preemption. Such an edit is refused,
    and the error says what to write instead.
    """
    service = VirtualService(tmp_path)
    path = service.write(fleet_text(count=before, checkpoint="gs://bucket/pod"))
    service.look()
    service.write(fleet_text(count=after, checkpoint="gs://bucket/pod"))
    service.look()
    assert len(service.slots) == 2, "it has not run yet"
    service.write(fleet_text(count=before, checkpoint="gs://bucket/pod"))
    service.look()
    service.run()
    path.write_text(fleet_text(count=after, checkpoint="gs://bucket/pod"))
    service.look()
    (told,) = service.daemon.told("fleet-refused")
    assert "gs://bucket/pod/pod-0" in told
    assert "{slot}" in told
    job = service.daemon.engine.slots["pod-0"].slot.job
    assert job is not None
    assert job.checkpoint == ("gs://bucket/pod" if before == 1 else "gs://bucket/pod/pod-0")
    with pytest.raises(ConfigError, match="begins anew"):
        service.apply(fleet_text(count=after, checkpoint="gs://bucket/pod"), service.folder)
    service.apply(fleet_text(count=after, checkpoint="gs://bucket/pod/{slot}"), service.folder)


def test_what_is_under_way_is_told_as_text(service: VirtualService) -> None:
    track = service.daemon.engine.slots["pod-0"]
    resting = track.action
    for key in (EffectKind.STOP.of("pod-0-a0"), ANY_CREATE, EffectKind.DELETE.of("pod-0-a0")):
        track.in_flight[key] = resting
    row = service.ask("plan", target="pod-0")["slots"][0]
    assert row["in_flight"] == ["create", "delete:pod-0-a0", "stop:pod-0-a0"]
    assert json.loads(json.dumps(row)) == row
