"""What a person sees of places: the order in which a fleet asks them and why, and what all stores learned of each."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kits.evidence import NOW, after, before, intent, memory, past, place, slot
from tpucare.adapters.state.market_files import MarketFiles
from tpucare.adapters.state.store import open_store
from tpucare.adapters.system import SystemClock
from tpucare.model.errors import TpuCareError
from tpucare.model.evidence import ProjectEvidence
from tpucare.model.markets import Experience, Market, market_of
from tpucare.model.memory import DesiredState, FleetRecord, Memory, PlaceMemory, Refusal
from tpucare.model.resources import Place, PlacementOrder, Provisioning
from tpucare.service.options import Options
from tpucare.service.places import OTHERS_AT_MOST, order_rows, places

A, B, C = (replace(place(f"us-central1-{letter}"), price=2.0) for letter in "abc")
PAID = replace(place("us-central1-a", Provisioning.ON_DEMAND), price=6.0)


def rows(*known: Memory, markets: dict[Place, Market] | None = None, **more: Any) -> list[dict[str, Any]]:
    learned = {market_of(where.key): market for where, market in (markets or {}).items()}
    declared = replace(slot(A, B, C, PAID), **more)
    return order_rows(declared, known, ProjectEvidence(fresh=True, markets=learned), NOW)


def told(found: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(row["zone"][-1], row["terms"], row["turn"]) for row in found]


def lived(hours: float, deaths: int, **more: Any) -> Market:
    return Market(Experience(NOW, asked=deaths, given=deaths, deaths=deaths, lived_hours=hours, given_at=NOW, **more))


def test_the_order_goes_by_worth_within_the_terms_and_says_what_it_rests_on() -> None:
    found = rows(memory(), markets={A: lived(1, 4), B: lived(90, 3), PAID: lived(900, 1)})
    assert told(found) == [
        ("b", "spot", "next"),
        ("c", "spot", "later"),
        ("a", "spot", "later"),
        ("a", "on-demand", "later"),
    ]
    assert [row["rank"] for row in found] == [1, 2, 3, 4]
    assert [row["why"] for row in found] == ["most worth", "less worth", "less worth", "declared as an alternative"]
    worths = [row["worth"] for row in found[:3]]
    assert worths == sorted(worths, reverse=True)
    assert found[0]["life_hours"] > 20 > 1 > found[2]["life_hours"]
    assert found[1]["life_hours"] is None, "nothing is known of it"
    json.dumps(found)


def test_the_declared_order_is_told_without_worth() -> None:
    found = rows(memory(), markets={B: lived(90, 3)}, order=PlacementOrder.ORDERED)
    assert [zone for zone, _, _ in told(found)] == ["a", "b", "c", "a"]
    assert {row["worth"] for row in found} == {None}
    assert [row["why"] for row in found][:2] == ["declared first", "declared later"]


def test_a_place_that_is_closed_says_until_when_and_one_that_was_asked_that_it_was() -> None:
    refused = PlaceMemory(1, after(minutes=4), Refusal.QUOTA, "no quota left", since=before(minutes=1))
    waiting = memory(places={A.key: refused, B.key: PlaceMemory(asked=5)}, round_from=5)
    found = {(row["zone"][-1], row["terms"]): row for row in rows(memory(past()), waiting)}
    assert found["a", "spot"]["turn"] == "closed"
    assert found["a", "spot"]["why"].startswith("quota (no quota left), next try 12:04:00 UTC")
    assert found["b", "spot"]["turn"] == "asked"
    assert found["c", "spot"]["turn"] == "next"
    anew = rows(memory(past()), replace(waiting, creates=(intent(),)))
    assert [row["turn"] for row in anew] == ["next", "later", "later", "later"], "no slot waits: as one that begins"


def test_a_dear_place_is_told_to_be_last() -> None:
    dear = replace(B, price=9.0)
    found = rows(memory(), places=(dear, A, C))
    assert told(found)[-1] == ("b", "spot", "dear")
    assert "times as dear" in found[-1]["why"]


def test_drought_and_stockouts_of_a_market_are_told() -> None:
    dry = Experience(NOW, asked=9, refused=8, told_seconds=80, given=1, given_at=before(hours=3), refused_at=before(5))
    found = rows(memory(), markets={A: Market(replace(dry, retry_at=after(20)))})
    row = next(one for one in found if (one["zone"], one["terms"]) == (A.zone, "spot"))
    assert (row["asked"], row["refused"], row["given"]) == (9, 8, 1)
    assert row["dry_seconds"] == 3 * 3600
    assert 10 < row["told_seconds"] < 30, "80 s in eight stockouts, and a guess that fades"
    assert "no capacity since 09:00 UTC" in row["why"]


# --- from the state folder -------------------------------------------------------------------------------------------

TEXT = """\
name: {name}
project: grant
tpu: {{type: v3-16, zones: [us-central1-a, europe-west4-a], provisioning: spot, unlisted: true, price: 2}}
job: {{run: train, checkpoint: gs://b/x, files: {{a: ./gone.txt}}}}
"""
MARKET = "us-central1-a/v3-16/spot"


def keep(state: Path, store: str, fleet: str, known: Memory, learned: Experience, **more: Any) -> None:
    now = SystemClock().now()
    with open_store(state, machine_id="m", now=now, name=store) as opened:
        opened.save_fleet(FleetRecord(fleet, TEXT.format(name=fleet), "/nowhere", now, **more))
        opened.save({f"{fleet}-0": replace(known, fleet=fleet)})
    MarketFiles(state, store).save({"grant": {MARKET: learned}})


def seen(now: datetime) -> Experience:
    return Experience(now, asked=4, given=2, deaths=1, lived_hours=3, given_at=now - timedelta(hours=1))


def test_all_stores_of_the_folder_count_and_no_process_has_to_run(tmp_path: Path) -> None:
    now = SystemClock().now()
    alive = past(create_time=now - timedelta(hours=30), place=replace(A, price=None).key)
    keep(tmp_path, "daemon", "pod", memory(alive), seen(now))
    keep(tmp_path, "script.grant", "lab", memory(), seen(now))
    found = places(Options(state=tmp_path))
    assert [row["fleet"] for row in found["places"]] == ["lab", "lab", "pod", "pod"]
    row = next(row for row in found["places"] if row["fleet"] == "lab" and row["zone"] == "us-central1-a")
    assert (row["asked"], row["given"], row["living"]) == (pytest.approx(8, rel=0.01), pytest.approx(4, rel=0.01), 1)
    assert row["life_hours"] > 10, "the node that lives for thirty hours counts"
    assert {row["fleet"] for row in places(Options(state=tmp_path), "pod")["places"]} == {"pod"}
    with pytest.raises(TpuCareError, match="no fleet pot; nearest: pod"):
        places(Options(state=tmp_path), "pot")


def test_a_fleet_that_is_down_leaves_its_markets_and_hostile_names_are_text(tmp_path: Path) -> None:
    now = SystemClock().now()
    keep(tmp_path, "daemon", "pod", memory(), seen(now), wish=DesiredState.DOWN)
    hostile = {"\x1b[2Jx/\x07v/ünter/more": seen(now), "": seen(now), **{f"z{i}/v/spot": seen(now) for i in range(500)}}
    MarketFiles(tmp_path, "other").save({"grant": hostile, "\x1bp": {"a/b/c": seen(now)}})
    found = places(Options(state=tmp_path))
    assert found["places"] == []
    assert len(found["others"]) == OTHERS_AT_MOST
    assert found["left_out"] == 504 - OTHERS_AT_MOST
    assert "\x1b" not in json.dumps(found, ensure_ascii=False)
    assert len(places(Options(state=tmp_path), "pod")["places"]) == 2, "by name it is shown"


def test_an_empty_folder_has_no_places(tmp_path: Path) -> None:
    assert places(Options(state=tmp_path / "none"))["places"] == []
