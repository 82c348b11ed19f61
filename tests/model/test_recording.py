"""What a project saw of its places, written as a recording that can be replayed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.kits.harness import SELDOM, ObservedDaemon, place, slots_of
from tpucare.model.recording import Sight, Sighting, recording, sightings_of
from tpucare.model.resources import Event
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.replay.recordings import load_dataset, window_of
from tpucare.testbed.simulation.time import START

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
ZONE, TYPE = "us-central2-b", "v4-32"


def saw(minute: float, sight: Sight, hosts: int = 4) -> Sighting:
    return Sighting(NOON + timedelta(minutes=minute), sight, hosts)


@pytest.mark.parametrize(
    ("sightings", "capacity"),
    [
        ([], [None, None, None]),
        ([saw(5, Sight.REFUSED)], [0, None, None]),
        ([saw(5, Sight.REFUSED), saw(7, Sight.GRANTED)], [4, 4, 4]),
        ([saw(5, Sight.GRANTED), saw(15, Sight.REFUSED)], [4, 4, 4]),
        ([saw(5, Sight.GRANTED), saw(6, Sight.GRANTED), saw(25, Sight.PREEMPTED)], [8, 8, 4]),
        ([saw(5, Sight.GRANTED), saw(12, Sight.PREEMPTED), saw(14, Sight.GRANTED)], [4, 0, 4]),
        ([saw(5, Sight.GRANTED), saw(12, Sight.GIVEN_BACK)], [4, None, None]),
        ([saw(-60, Sight.GRANTED), saw(12, Sight.PREEMPTED)], [4, 0, None]),
        ([saw(-60, Sight.GRANTED), saw(-30, Sight.PREEMPTED)], [None, None, None]),
        ([saw(90, Sight.REFUSED)], [None, None, None]),
    ],
)
def test_what_is_known_of_a_place(sightings: list[Sighting], capacity: list[int | None]) -> None:
    found = recording(ZONE, TYPE, sightings, begins=NOON, ends=NOON + timedelta(minutes=30))
    assert found["capacity"] == capacity


def events(*rows: tuple[float, str, str, dict[str, str]]) -> list[Event]:
    return [Event(NOON + timedelta(minutes=at), kind, "", "pod-0", node, "info", more) for at, kind, node, more in rows]


CREATE = {"zone": ZONE, "accelerator_type": TYPE, "terms": "spot", "hosts": "4"}
READY, PREEMPTED, NO_ROOM = {"state": "READY"}, {"state": "PREEMPTED"}, {"error": "NoCapacity"}


@pytest.mark.parametrize(
    ("told", "want"),
    [
        ([(0, "create", "a", CREATE), (2, "create-failed", "a", NO_ROOM)], [saw(2, Sight.REFUSED)]),
        ([(0, "create", "a", CREATE), (2, "create-failed", "a", {"error": "QuotaExceeded"})], []),
        (
            [(0, "create", "a", CREATE), (5, "state", "a", READY), (9, "state", "a", PREEMPTED), (9, "gone", "a", {})],
            [saw(0, Sight.GRANTED), saw(9, Sight.PREEMPTED)],
        ),
        (
            [(0, "create", "a", CREATE), (5, "state", "a", READY), (9, "delete", "a", {"reason": "unwanted"})],
            [saw(0, Sight.GRANTED), saw(9, Sight.GIVEN_BACK)],
        ),
        ([(0, "create", "a", {**CREATE, "terms": "on-demand"}), (5, "state", "a", READY)], []),
        ([(5, "state", "a", READY), (9, "gone", "a", {})], []),
    ],
)
def test_what_events_tell_of_a_place(told: list[tuple[float, str, str, dict[str, str]]], want: list[Sighting]) -> None:
    assert sightings_of(events(*told)) == ({(ZONE, TYPE): want} if want else {})


def test_what_a_daemon_saw_is_what_there_was() -> None:
    """Four hosts that come and go: the recording of a day agrees with the world where it knows something."""
    schedule = [(0, 4), (3 * 3600, 0), (4 * 3600, 4), (9 * 3600, 0), (12 * 3600, 4)]
    pools = {ZONE: {"accelerators": ["*"], "capacity": [{"schedule": schedule, "unit": "hosts"}]}}
    daemon = ObservedDaemon(config=WorldConfig.calm(zones=pools), settings=SELDOM)
    daemon.start()
    daemon.care_for_slots("pod", slots_of("pod", 1, place(ZONE, TYPE, workers=4)))
    daemon.run(hours=14)
    found = recording(ZONE, TYPE, sightings_of(daemon.events)[ZONE, TYPE], begins=START, ends=daemon.clock.now())
    true = [next(amount for at, amount in reversed(schedule) if at <= (tick + 0.5) * 600) for tick in range(84)]
    known = [(seen, amount) for seen, amount in zip(found["capacity"], true, strict=True) if seen is not None]
    assert len(known) >= 80
    assert sum(seen == amount for seen, amount in known) >= len(known) - 4


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    sightings = [saw(5, Sight.GRANTED), saw(65, Sight.PREEMPTED), saw(66, Sight.REFUSED)]
    found = recording(ZONE, TYPE, sightings, begins=NOON, ends=NOON + timedelta(hours=2), price=12.5)
    (tmp_path / f"{ZONE}.json").write_text(json.dumps(found))
    trace = load_dataset(str(tmp_path))[ZONE]
    assert (trace.maximum, trace.price, trace.on_demand) == (4, 12.5, None)
    assert trace.ticks == (4,) * 6 + (0,) * 6
    assert trace.begins == NOON.timestamp()
    assert window_of([trace]).seconds == 7200.0
