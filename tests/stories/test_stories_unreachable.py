"""Stories of nodes that nobody can look at: their zone does not answer, or the project may not look at it any more."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.field import named
from tests.kits.harness import EU, US, Daemon, place
from tpucare.adapters.google.classify import Where, classify
from tpucare.model.actions import Wait
from tpucare.model.memory import DesiredState, End, FailureKind
from tpucare.model.resources import Care
from tpucare.model.runs import Failure
from tpucare.planner import desired_state
from tpucare.service.client import Takedown
from tpucare.testbed.emulator.inprocess import InProcessCloud
from tpucare.testbed.simulation.machines import Script


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state")


def cut_zone(daemon: Daemon, zone: str = US, days: float = 30) -> None:
    daemon.zone.world.operator.outage("zone", timedelta(days=days), daemon.clock.true_now(), zone=zone)


def close(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    """As of now nobody of the project may look at US, and its nodes leave the listing."""
    life = daemon.zone.world.operator.select("pod-0")[0]
    daemon.zone.world.state.listing(life.path.project).hide(life.path, life.record.id)
    get, create = InProcessCloud.get_node, InProcessCloud.create_node

    def refused(where: Where) -> Exception:
        return classify(7, f"Permission denied on 'locations/{US}' (or it may not exist)", where)

    def get_node(cloud: InProcessCloud, key: Any) -> Any:
        if key.zone == US:
            raise refused(Where.GET)
        return get(cloud, key)

    def create_node(cloud: InProcessCloud, request: Any) -> Any:
        if request.key.zone == US:
            raise refused(Where.CREATE)
        return create(cloud, request)

    monkeypatch.setattr(InProcessCloud, "get_node", get_node)
    monkeypatch.setattr(InProcessCloud, "create_node", create_node)


def needs_person(daemon: Daemon) -> bool:
    action = daemon.engine.slots["pod-0"].action
    return isinstance(action, Wait) and action.needs_person


def confirm(daemon: Daemon) -> None:
    daemon.engine.change("pod-0", desired_state.confirm, "confirm", "pod-0: confirm")


@pytest.mark.parametrize("restarts", [False, True])
def test_an_unreachable_zone_holds_its_slot_until_a_person_says_that_nothing_trains_there(
    daemon: Daemon, restarts: bool
) -> None:
    """
    A zone that never answered again held its slots for ever without a word to a person; no command helped, and `down`
    never ended. After `fence_after` its nodes are out of sight: a person is told and may say that nothing trains there.
    """
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    cut_zone(daemon)
    daemon.run(minutes=29)
    if restarts:
        daemon.restart()
        daemon.run(minutes=29)
    assert daemon.told("person") == []
    confirm(daemon)
    daemon.run(hours=1)
    assert needs_person(daemon), "that was said before anybody was asked"
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    confirm(daemon)
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    assert daemon.launcher.launches == ["pod-0-a0.1", "pod-0-a1.1"]
    assert daemon.zone.nodes("pod-0-a1")[0].path.zone == EU


def test_what_was_written_off_is_cleared_when_its_zone_answers_again(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    cut_zone(daemon, days=1 / 8)
    daemon.run(hours=1)
    confirm(daemon)
    daemon.run(hours=3)
    assert daemon.trains("pod-0")
    daemon.run(hours=1)
    assert named(daemon) == ["pod-0-a1"], "of two runs the one that memory knows stays"
    assert daemon.trains("pod-0")


@pytest.mark.parametrize("minutes", [20, 60])
def test_a_zone_that_answers_again_gives_the_slot_its_node_back(daemon: Daemon, minutes: int) -> None:
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    cut_zone(daemon, days=minutes / 1440)
    daemon.run(minutes=minutes + 10)
    assert daemon.trains("pod-0")
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    assert named(daemon) == ["pod-0-a0"]
    daemon.check()


def test_a_listing_that_fails_hides_no_repeated_report_of_workers_in_an_unreachable_zone(daemon: Daemon) -> None:
    """They said it before, so that no report is news; it is news that they are heard again."""
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    cut_zone(daemon)
    daemon.run(minutes=2)
    daemon.launcher.end(next(daemon.launcher.running()), status=1)
    daemon.run(seconds=35)
    # The next report is on its way while a listing fails and the one after it comes.
    daemon.launcher.slow = 12.0
    daemon.run(seconds=2)
    daemon.zone.world.operator.fail_next("ListNodes", 14, "no listing for now")
    daemon.run(seconds=30)
    assert daemon.launcher.stops == ["pod-0-a0"]


def test_with_fence_proceed_a_node_is_made_elsewhere_and_the_launch_still_waits(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US), place(EU), care=Care(fence_proceed=True))
    daemon.run(minutes=15)
    cut_zone(daemon)
    daemon.run(minutes=45)
    assert named(daemon) == ["pod-0-a0", "pod-0-a1"]
    assert daemon.launcher.launches == ["pod-0-a0.1"], "no proof for fence_after from now on"
    daemon.run(minutes=45)
    assert daemon.launcher.launches == ["pod-0-a0.1", "pod-0-a1.1"]


def test_a_node_on_which_nothing_was_launched_needs_no_word_of_a_person(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US), place(EU), job=False)
    daemon.run(minutes=15)
    cut_zone(daemon)
    daemon.run(minutes=45)
    assert named(daemon) == ["pod-0-a0", "pod-0-a1"]
    assert daemon.told("person") == []


def test_nothing_is_asked_for_in_a_zone_that_does_not_answer(daemon: Daemon) -> None:
    """Its answers would be lost, and the same create be asked for again until boot_timeout."""
    daemon.run(minutes=1)
    cut_zone(daemon)
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    assert daemon.trains("pod-0")
    assert daemon.node_of("pod-0").key.zone == EU


def test_down_ends_with_what_it_could_not_look_at_and_remembers_it(daemon: Daemon) -> None:
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    cut_zone(daemon, days=1 / 8)
    daemon.run(minutes=5)
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(minutes=1)
    (key,) = daemon.engine.out_of_reach("pod-0")
    assert (key.zone, key.name) == (US, "pod-0-a0")
    assert "1 node in us-central1-a could not be looked at" in daemon.why()["pod-0"]
    assert not daemon.engine.is_over("pod-0")
    daemon.restart()
    daemon.run(minutes=1)
    assert daemon.engine.out_of_reach("pod-0") == (), "its zone may answer in a moment"
    daemon.run(hours=3)
    assert daemon.engine.is_over("pod-0")
    assert named(daemon) == []
    daemon.check("pod-0-a0")


@pytest.mark.parametrize("zone", [US, EU])
def test_the_end_waits_for_zones_in_which_something_of_the_slots_may_be(daemon: Daemon, zone: str) -> None:
    """
    Any zone of the project that did not answer kept `down` and every Python call waiting for ever without a word. Only
    the zones of places, remembered nodes and open creates count; what is waited for is said, and the wait ends after 2
    minutes.
    """
    daemon.care_for("pod", 1, place(US))
    daemon.run(minutes=15)
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run_until(lambda: daemon.engine.is_over("pod-0"))
    cut_zone(daemon, zone)
    daemon.restart()
    said: list[str] = []
    began = daemon.clock.seconds
    ending = Takedown(daemon.engine, daemon.clock, lambda slot: slot.fleet == "pod", said.append)
    daemon.run_until(ending.is_over, minutes=5)
    waited = daemon.clock.seconds - began
    told = f"waiting for {US}, which did not answer yet; at most 120 s"
    assert (waited >= 120, said) == ((True, [told]) if zone == US else (False, []))


def test_a_zone_that_may_not_be_looked_at_is_asked_ever_more_seldom(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A zone closed to the project refused GetNode every five seconds, and 15,000 events a day pushed out all others. A
    look that fails is repeated with growing pauses and told once.
    """
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    close(monkeypatch, daemon)
    for worker in daemon.launcher.workers.values():
        worker.silent = True
    daemon.run(hours=1)
    assert needs_person(daemon)
    assert len(daemon.told("look-failed")) == 1
    confirm(daemon)
    daemon.run(minutes=30)
    assert daemon.trains("pod-0")
    assert sorted(node.path.zone for node in daemon.zone.nodes("pod-0")) == [EU, US]
    daemon.wish("pod-0", DesiredState.DOWN)
    daemon.run(minutes=30)
    assert [key.name for key in daemon.engine.out_of_reach("pod-0")] == ["pod-0-a0"]
    assert named(daemon) == ["pod-0-a0"], "which is hidden, and there"


# --- what workers tell is enough for ----------------------------------------------------------------------------------


def crash(daemon: Daemon, slot: str = "pod-0") -> None:
    key = daemon.node_of(slot).key
    for worker in daemon.launcher.of_node(*key):
        daemon.launcher.end(worker, 1, Failure.CRASH)
    daemon.launcher.hint(key)


def outage(daemon: Daemon, kind: str, hours: float = 1) -> None:
    daemon.zone.world.operator.outage(
        kind, timedelta(hours=hours), daemon.clock.true_now(), zone=US if kind == "zone" else ""
    )


@pytest.mark.parametrize("kind", ["api", "zone"])
def test_a_run_that_crashes_while_the_api_tells_nothing_is_launched_again_on_its_node(
    daemon: Daemon, kind: str
) -> None:
    """
    A run that crashed during an outage of the API waited for hours to be launched again, though all its workers
    answered over SSH. What concerns that node alone needs no listing: the reports of its workers are enough.
    """
    daemon.care_for("pod", 1, place(US), place(EU))
    daemon.run(minutes=15)
    outage(daemon, kind)
    daemon.run(minutes=20)
    crashed = daemon.clock.seconds
    crash(daemon)
    daemon.run_until(lambda: daemon.launcher.launches[-1] == "pod-0-a0.2", minutes=5)
    assert daemon.clock.seconds - crashed >= 30, "a preemption takes its siblings down first"
    daemon.run(hours=1)
    assert daemon.trains("pod-0")
    assert daemon.launcher.launches == ["pod-0-a0.1", "pod-0-a0.2"]
    assert daemon.memory("pod-0").counter(FailureKind.CRASH).total == 1
    daemon.check()


@pytest.mark.parametrize("kind", ["api", "zone"])
def test_with_one_mute_worker_nothing_is_launched_while_the_api_tells_nothing(daemon: Daemon, kind: str) -> None:
    daemon.care_for("pod", 1, place(US), place(EU), care=Care(fence_after=timedelta(hours=9)))
    daemon.run(minutes=15)
    outage(daemon, kind)
    daemon.launcher.of_node(*daemon.node_of("pod-0").key)[2].silent = True
    daemon.run(minutes=5)
    crash(daemon)
    daemon.run(minutes=50)
    assert daemon.launcher.launches == ["pod-0-a0.1"]
    assert named(daemon) == ["pod-0-a0"]


def test_a_finished_run_is_settled_and_its_node_kept_while_the_api_tells_nothing(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, script=Script(exits={"pod-0": (-1, 0, 1800.0)}))
    daemon.care_for("pod", 1)
    daemon.run(minutes=15)
    outage(daemon, "api")
    daemon.run(minutes=45)
    assert daemon.memory("pod-0").end is End.DONE
    assert named(daemon) == ["pod-0-a0"]
    daemon.run(hours=1)
    assert named(daemon) == []
    daemon.check("pod-0-a0")


def test_what_was_noted_while_no_listing_came_condemns_nobody_after_it(daemon: Daemon) -> None:
    """The clock of a node that is heard alone runs ahead of the observed one, and is set back to it."""
    daemon.care_for("pod", 4)
    daemon.run(minutes=15)
    outage(daemon, "api", hours=1)
    daemon.run(minutes=30)
    daemon.launcher.of_node(*daemon.node_of("pod-0").key)[2].silent = True
    daemon.run(minutes=31)
    told = daemon.clock.seconds
    daemon.run_until(lambda: len(daemon.told("delete")) > 0 or daemon.clock.seconds - told > 900, minutes=30)
    seen = daemon.engine.slots["pod-1"].nodes["pod-1-a0"]
    mark = daemon.engine.projects["my-project"].mark
    assert all(value <= mark for value in (seen.state_since, seen.answering_since, seen.progress.last) if value)
    assert daemon.trains("pod-1")
