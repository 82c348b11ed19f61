"""Stories of queued resources under virtual time: the real engine, and the service's queue as the emulator has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.harness import EU, PROJECT, US, Daemon, place, slots_of
from tpucare.model.causes import Cause
from tpucare.model.lifecycles import RequestState
from tpucare.model.memory import DesiredState, FailureKind
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    Care,
    NodeKey,
    Place,
    Provisioning,
    QueuedRequest,
    QueuedState,
)
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.queued_records import QueuedRecord

EMPTY = [{"amount": 0}]


def queue(zone: str = US, **changes: Any) -> Place:
    return replace(place(zone), queued=True, **changes)


def sold_out(*zones: str, **changes: Any) -> WorldConfig:
    settings = {zone: {"accelerators": ["*"], "capacity": EMPTY if zone in zones else None} for zone in (US, EU)}
    for zone in (US, EU):
        if settings[zone]["capacity"] is None:
            del settings[zone]["capacity"]
    return WorldConfig.calm(zones=settings, **changes)


class Story(Daemon):
    """A daemon, and what a test reads of the queue."""

    def queued(self) -> list[QueuedRecord]:
        return [life.record for _, life in sorted(self.zone.world.state.queue.items())]

    def states(self) -> dict[str, str]:
        return {record.path.queued_id: QueuedState(record.state).name for record in self.queued()}

    def calls(self, method: str) -> int:
        return len([call for call in self.zone.calls(method) if call["applied"]])

    def give(self, zone: str, amount: int | None) -> None:
        self.zone.world.operator.set_capacity(zone, "", "spot", amount, self.clock.true_now())

    def ask_as(self, name: str, owner: str, *, zone: str = US, slot: str = "pod-0", fleet: str = "pod") -> None:
        """Somebody, or we before a lost store, asks for a queued resource of that name."""
        labels = {LABEL_OWNER: owner, LABEL_FLEET: fleet, LABEL_SLOT: slot, LABEL_NUMBER: name.rpartition("-a")[2]}
        key = NodeKey(PROJECT, zone, name)
        self.cloud.create_queued(QueuedRequest(key, queue(zone), labels, {}, f"of-{name}"))

    @property
    def owner(self) -> str:
        assert self.store is not None
        return self.store.owner


@pytest.fixture
def story(tmp_path: Path) -> Callable[..., Story]:
    return lambda config=None, **changes: Story(tmp_path, config=config or sold_out(**changes))


def test_a_slot_stands_in_the_queue_and_trains_when_it_is_granted(story: Callable[..., Story]) -> None:
    told = story(sold_out(US))
    told.care_for("pod", 1, queue())
    told.run(hours=30)
    assert told.states() == {"pod-0-a0": "WAITING_FOR_RESOURCES"}
    assert (told.calls("CreateQueuedResource"), told.calls("CreateNode")) == (1, 0)
    assert told.causes() == {"pod-0": Cause.QUEUED}
    assert f"queued in {US} since" in told.why()["pod-0"]
    told.give(US, 8)
    told.run_until(lambda: told.trains("pod-0"), minutes=60)
    assert told.states() == {"pod-0-a0": "ACTIVE"}
    assert told.node_of("pod-0").queued_resource.endswith("queuedResources/pod-0-a0")
    told.run(hours=5)
    assert told.calls("CreateQueuedResource") == 1
    told.check()


def test_a_preempted_grant_is_booked_once_and_asked_for_again(story: Callable[..., Story]) -> None:
    told = story()
    told.care_for("pod", 1, queue())
    told.run_until(lambda: told.trains("pod-0"), minutes=60)
    told.zone.world.operator.preempt("pod-0-a0", told.clock.true_now())
    told.run_until(lambda: told.memory("pod-0").run is not None and told.trains("pod-0"), minutes=120)
    told.run(hours=1)
    assert told.states() == {"pod-0-a1": "ACTIVE"}
    assert told.memory("pod-0").counter(FailureKind.PREEMPTION).total == 1
    assert told.calls("DeleteQueuedResource") == 1
    assert not told.memory("pod-0").shell
    told.check()


@pytest.mark.parametrize("first", ["direct", "queue"])
def test_the_first_node_holds_the_slot_and_the_other_intent_goes(story: Callable[..., Story], first: str) -> None:
    told = story(sold_out(US, EU))
    told.care_for("pod", 1, queue(US), place(EU))
    told.run(hours=3)
    assert told.states() == {"pod-0-a0": "WAITING_FOR_RESOURCES"}
    assert told.calls("CreateNode") > 20
    assert told.calls("CreateQueuedResource") == 1, "a create that is refused does not cost the place in the queue"
    told.give(US if first == "queue" else EU, 8)
    told.run_until(lambda: told.trains("pod-0"), minutes=60)
    name, holder = told.node_of("pod-0").name, told.node_of("pod-0").key.zone
    assert holder == (US if first == "queue" else EU)
    told.run(minutes=30)
    assert told.states() == ({name: "ACTIVE"} if first == "queue" else {})
    assert [node.path.node_id for node in told.zone.nodes("pod-0")] == [name]
    assert len(told.memory("pod-0").requests) == (first == "queue")
    told.check()


def test_both_at_once_leave_one_node_and_no_second_run(story: Callable[..., Story]) -> None:
    """The queue grants while the direct create succeeds; what comes second is deleted unlaunched."""
    told = story(sold_out(US, EU))
    told.care_for("pod", 8, queue(US), place(EU))
    told.run(hours=1)
    told.give(US, None)
    told.give(EU, None)
    told.run_until(told.all_train, minutes=120)
    told.run(hours=2)
    assert len(told.zone.nodes("pod")) == 8
    assert len(told.states()) == sum(len(told.memory(f"pod-{index}").requests) for index in range(8))
    assert set(told.states().values()) <= {"ACTIVE"}
    told.check()


@pytest.mark.parametrize("stage", ["waiting", "granted", "training"])
def test_down_leaves_neither_request_nor_node(story: Callable[..., Story], stage: str) -> None:
    told = story(sold_out(*([US] if stage == "waiting" else [])))
    told.care_for("pod", 1, queue())
    if stage == "granted":
        told.run_until(lambda: "PROVISIONING" in told.states().values())
    elif stage == "training":
        told.run_until(lambda: told.trains("pod-0"))
    else:
        told.run(minutes=30)
    told.wish("pod-0", DesiredState.DOWN)
    told.run_until(lambda: told.engine.is_over("pod-0"), minutes=60)
    told.give(US, None)
    told.run(hours=5)
    assert (told.states(), told.zone.nodes()) == ({}, [])
    told.check("pod-0-a0")


def test_a_grant_after_down_is_deleted_unlaunched(story: Callable[..., Story]) -> None:
    """The delete of the request is lost for a while, and the service grants it meanwhile."""
    told = story(sold_out(US))
    told.care_for("pod", 1, queue())
    told.run(minutes=30)
    for _ in range(8):
        told.zone.world.operator.fail_next("DeleteQueuedResource", 14, "The service is currently unavailable.")
    told.give(US, None)
    told.wish("pod-0", DesiredState.DOWN)
    told.run_until(lambda: "PROVISIONING" in told.states().values(), minutes=5)
    told.run(minutes=5)
    told.run_until(lambda: told.engine.is_over("pod-0"), minutes=240)
    assert (told.states(), told.zone.nodes()) == ({}, [])
    assert told.launcher.history == []
    told.check()


def test_a_failed_request_is_deleted_and_the_next_place_is_asked(story: Callable[..., Story]) -> None:
    told = story(sold_out(US, EU))
    told.care_for("pod", 1, queue(US), queue(EU))
    told.run(minutes=10)
    told.zone.world.operator.fail_queued("pod-0-a0", 8, "There is no more capacity in the zone", told.clock.true_now())
    told.run(minutes=20)
    ((name, state),) = told.states().items()
    assert (name, state) == ("pod-0-a1", "WAITING_FOR_RESOURCES")
    assert told.queued()[0].path.zone == EU
    assert "no more capacity" in told.memory("pod-0").place(queue(US).key).reason
    told.check()


@pytest.mark.parametrize("lingers", [0, 1])
def test_an_expired_request_is_withdrawn_and_asked_for_anew(story: Callable[..., Story], lingers: int) -> None:
    told = story(sold_out(US, queue={"expired_lingers": lingers}))
    told.care_for("pod", 1, queue(valid_for=timedelta(hours=2)))
    told.run(hours=7)
    assert list(told.states().values()) == ["WAITING_FOR_RESOURCES"]
    assert told.calls("CreateQueuedResource") == 4
    told.check()


def test_a_grant_whose_node_never_comes_is_given_up(story: Callable[..., Story]) -> None:
    told = story(sold_out(US))
    told.care_for("pod", 1, queue(), care=Care(boot_timeout=timedelta(minutes=20)))
    told.run(minutes=10)
    told.zone.world.operator.set_queued_state("pod-0-a0", QueuedState.PROVISIONING, told.clock.true_now())
    told.run(hours=1)
    assert told.states() == {"pod-0-a1": "WAITING_FOR_RESOURCES"}
    told.check()


def test_a_forgotten_request_is_asked_for_again(story: Callable[..., Story]) -> None:
    told = story(sold_out(US))
    told.care_for("pod", 1, queue())
    told.run(minutes=10)
    told.zone.world.operator.forget_queued("pod-0-a0", told.clock.true_now())
    told.run(minutes=30)
    assert told.states() == {"pod-0-a1": "WAITING_FOR_RESOURCES"}
    told.check()


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_a_lost_answer_makes_no_second_request(story: Callable[..., Story], applied: bool, killed: bool) -> None:
    told = story(sold_out(US))
    told.zone.world.operator.lose_next_answer("CreateQueuedResource", applied=applied)
    told.care_for("pod", 1, queue())
    told.run(seconds=20 if killed else 600)
    if killed:
        told.restart()
        told.run(minutes=10)
    assert told.states() == {"pod-0-a0": "WAITING_FOR_RESOURCES"}
    assert told.memory("pod-0").requests[0].state is RequestState.WAITING
    told.check()


def test_a_lost_store_adopts_the_request(tmp_path: Path) -> None:
    told = Story(tmp_path / "old", config=sold_out(US))
    told.care_for("pod", 1, queue())
    told.run(minutes=10)
    told.lose_store()
    assert told.store is not None
    assert told.store.lost
    told.care_for("pod", 1, queue())
    told.run(hours=2)
    assert told.states() == {"pod-0-a0": "WAITING_FOR_RESOURCES"}
    told.give(US, None)
    told.run_until(lambda: told.trains("pod-0"), minutes=60)
    assert told.node_of("pod-0").name == "pod-0-a0"
    told.check()


def test_a_request_of_another_owner_is_left_alone(story: Callable[..., Story]) -> None:
    told = story(sold_out(US))
    told.ask_as("pod-0-a0", "somebody-else")
    told.ask_as("pod-0-a1", "")
    told.care_for("pod", 1, queue())
    told.run(minutes=30)
    assert set(told.states()) == {"pod-0-a0", "pod-0-a1", "pod-0-a2"}
    told.wish("pod-0", DesiredState.DOWN)
    told.run(hours=1)
    assert set(told.states()) == {"pod-0-a0", "pod-0-a1"}
    told.check()


def test_a_request_of_an_unknown_fleet_is_reported_and_kept(story: Callable[..., Story]) -> None:
    told = story(sold_out(US))
    told.care_for("pod", 1, queue())
    told.run(minutes=5)
    told.ask_as("old-0-a4", told.owner, slot="old-0", fleet="old")
    told.run(hours=1)
    assert "old-0-a4" in told.states()
    assert set(told.engine.orphan_requests) == {"old-0-a4"}
    assert any("old-0-a4" in text for text in told.told("stray"))
    told.engine.delete_orphan_request("old-0-a4")
    told.run(minutes=10)
    assert set(told.states()) == {"pod-0-a0"}


def test_of_two_standing_requests_one_goes(story: Callable[..., Story]) -> None:
    """A store that was put back from a backup does not know the newer request; its listing shows both."""
    told = story(sold_out(US))
    told.care_for("pod", 1, queue())
    told.run(minutes=10)
    told.ask_as("pod-0-a7", told.owner)
    told.run(hours=1)
    assert told.states() == {"pod-0-a0": "WAITING_FOR_RESOURCES"}
    assert told.memory("pod-0").next_number == 8


def test_a_withdrawn_queue_is_left_and_the_direct_place_asked(story: Callable[..., Story]) -> None:
    told = story(sold_out(US))
    told.care_for("pod", 1, queue())
    told.run(minutes=10)
    told.edit("pod", slots_of("pod", 1, place(EU)))
    told.run_until(lambda: told.trains("pod-0"), minutes=60)
    told.run(minutes=30)
    assert told.states() == {}
    told.check()


def test_no_queue_is_listed_where_none_is_used(story: Callable[..., Story]) -> None:
    told = story(sold_out(audit_reads=True))
    told.care_for("pod", 2)
    told.run(hours=1)
    assert told.calls("ListQueuedResources") == 0
    told.edit("pod", slots_of("pod", 2, queue()))
    told.run(hours=2)
    assert 20 < told.calls("ListQueuedResources") <= 26, "a sweep each five minutes, while nothing moves"


def test_a_queue_that_cannot_be_listed_is_no_observation(story: Callable[..., Story]) -> None:
    told = story(sold_out())
    for _ in range(30):
        told.zone.world.operator.fail_next("ListQueuedResources", 13, "Internal error. Please try again.")
    told.care_for("pod", 1, queue(US), place(EU))
    told.run_until(lambda: told.trains("pod-0"), minutes=30)
    assert told.node_of("pod-0").key.zone == EU
    assert told.calls("CreateQueuedResource") == 0
    told.check()


def test_a_node_taken_over_by_another_owner_keeps_its_request(story: Callable[..., Story]) -> None:
    told = story()
    told.care_for("pod", 1, queue())
    told.run_until(lambda: told.trains("pod-0"))
    told.cloud.add_labels(NodeKey(PROJECT, US, "pod-0-a0"), {LABEL_OWNER: "somebody-else"})
    told.run(hours=2)
    told.wish("pod-0", DesiredState.DOWN)
    told.run(hours=1)
    assert told.states()["pod-0-a0"] == "ACTIVE"
    assert told.calls("DeleteQueuedResource") == 0


@pytest.mark.parametrize("tier", [Provisioning.ON_DEMAND, Provisioning.RESERVED])
def test_other_terms_stand_in_the_queue_alike(story: Callable[..., Story], tier: Provisioning) -> None:
    told = story()
    told.care_for("pod", 1, queue(provisioning=tier))
    told.run_until(lambda: told.trains("pod-0"), minutes=60)
    assert told.node_of("pod-0").provisioning is tier
    told.check()
