"""What a person sees of a slot at every stage of its life, from the engine and from the store alone."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.kits.service import VirtualService, fleet_text
from tpucare.model import actions
from tpucare.model.text import plain, plain_lines
from tpucare.service import status


@pytest.fixture
def service(tmp_path: Path) -> VirtualService:
    made = VirtualService(tmp_path)
    made.write(fleet_text())
    made.look()
    return made


def row(service: VirtualService, slot: str = "pod-0") -> dict[str, Any]:
    return status.slot_row(service.daemon.engine, service.daemon.engine.slots[slot], service.daemon.clock.now())


def phases(service: VirtualService, minutes: float) -> list[str]:
    """Each phase that shows, once, in the order of its first appearance."""
    seen: dict[str, None] = {}
    for _ in range(int(minutes * 60)):
        service.daemon.run(seconds=1)
        if "pod-0" in service.slots:
            seen[row(service)["phase"]] = None
            json.dumps(row(service))
        service.registry.remove_finished_slots()
    return list(seen)


def test_a_slot_goes_through_its_phases(service: VirtualService) -> None:
    assert row(service)["phase"] == "waiting"
    seen = phases(service, 15)
    assert [phase for phase in seen if phase in ("creating", "booting", "run")] == ["creating", "booting", "run"]
    last = row(service)
    assert (last["node"], last["zone"], last["type"], last["tier"]) == ("pod-0-a0", "us-central1-a", "v2-8", "spot")
    assert last["training"] is True
    assert (last["workers"], last["workers_answering"]) == (1, 1)
    assert last["step"] > 0
    assert 0 <= last["step_age_seconds"] < 60
    assert last["attempt"] == 1


def test_the_step_ages_while_there_is_no_progress(service: VirtualService) -> None:
    service.run(15)
    service.daemon.launcher.deaf = True
    service.daemon.run(seconds=60)
    assert row(service)["step_age_seconds"] >= 45


def test_a_setup_says_for_how_long_it_goes_on(service: VirtualService) -> None:
    while row(service)["phase"] != "setup":
        service.daemon.run(seconds=1)
    service.daemon.run(seconds=10)
    assert re.fullmatch(r"running setup; launched 1\d s ago", row(service)["why"])


def test_a_preempted_node_shows_and_the_next_attempt_stands_for_the_slot(service: VirtualService) -> None:
    service.run(15)
    service.daemon.zone.world.operator.preempt("pod-0", service.daemon.clock.true_now())
    service.run(15)
    after = row(service)
    assert (after["node"], after["attempt"], after["phase"]) == ("pod-0-a1", 2, "run")
    assert after["books"]["preemption"]["total"] == 1


def test_a_stockout_says_where_and_when_it_is_asked_again(service: VirtualService) -> None:
    zone = service.daemon.zone
    zone.world.operator.set_capacity("us-central1-a", "v2-8", "spot", 0, service.daemon.clock.true_now())
    service.run(15)
    places = row(service)["places"]
    (place,) = places.values()
    assert place["failures"] > 0
    assert place["retry_in_seconds"] is not None
    assert row(service)["why"]


def test_down_is_shown_until_nothing_is_left(service: VirtualService) -> None:
    service.run(15)
    service.ask("down", target="pod")
    assert "deleting" in phases(service, 5)
    assert service.slots == []


def test_a_paused_slot_says_so(service: VirtualService) -> None:
    service.run(15)
    service.ask("pause", target="pod")
    service.run(1)
    assert (row(service)["phase"], row(service)["why"]) == ("paused", "paused")


def test_without_a_daemon_the_store_tells_what_was_remembered(service: VirtualService) -> None:
    service.run(15)
    engine_row = row(service)
    store = service.daemon.store
    assert store is not None
    memory = store.memories()["pod-0"]
    remembered = status.remembered_row("pod-0", memory, service.daemon.clock.now())
    assert set(remembered) == set(engine_row), "the same keys, whoever tells"
    for key in ("slot", "fleet", "node", "zone", "type", "tier", "attempt", "run"):
        assert remembered[key] == engine_row[key], key
    assert remembered["phase"] == "unknown"


def test_projects_that_are_not_seen_say_why(service: VirtualService) -> None:
    service.run(1)
    service.daemon.zone.world.operator.outage("api", timedelta(hours=1), service.daemon.clock.true_now())
    service.run(10)
    (project,) = status.project_rows(service.daemon.engine)
    assert project["seen"] is False
    assert "failed" in project["why"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a\x1b[31mred\x1b[0m b", "ared b"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]0;title\x1b\\x", "x"),
        ("a\rb\nc", "a b c"),
        ("x\x9b31my", "x31my"),
        ("left\u202eright", "leftright"),
        ("\ud800half", "half"),
        ("\x1b(0\x1bM", ""),
        ("Grüße 東京 🙂", "Grüße 東京 🙂"),
    ],
)
def test_no_text_from_elsewhere_drives_a_terminal(text: str, want: str) -> None:
    assert plain(text) == want
    assert "\x1b" not in plain_lines(text)


QUEUE = {"enqueue", "dequeue", "look-queue"}


def test_every_action_has_a_word_of_its_own() -> None:
    kinds = get_args(actions.Action)
    words = [actions._WORDS[kind] for kind in kinds]
    assert words[:2] == ["wait", "settle"]
    assert set(words[2:]) == {
        "create",
        "delete",
        "launch",
        "stop",
        "notice",
        "pushkey",
        "vouch",
        "look",
        "poll",
        *QUEUE,
    }
    assert set(actions._WORDS) == set(kinds)
