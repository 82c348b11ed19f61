"""The screen of `tpucare status`: a line per slot at any width, what needs a person first, equal slots folded."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tpucare.cli import render
from tpucare.model.memory import Memory
from tpucare.service import status

NOW = datetime(2026, 11, 22, 7, 0, tzinfo=UTC)
STOCKOUT = (
    'There is no more capacity in the zone "europe-west4-a"; you can try in another zone where Cloud TPU Nodes are '
    "offered (see https://cloud.google.com/tpu/docs/regions)"
)


def row(slot: str, **values: Any) -> dict[str, Any]:
    fleet = slot.rpartition("-")[0]
    return {**status.remembered_row(slot, Memory(fleet=fleet), NOW), "why": "", **values}


def waiting(slot: str, seconds: float = 12.0, **values: Any) -> dict[str, Any]:
    place = {"kind": "no capacity", "failures": 3, "blocked": False, "retry_in_seconds": seconds, "reason": STOCKOUT}
    places = {"europe-west4-a/v6e-1/spot": place}
    return row(slot, phase="waiting", why=f"europe-west4-a: {STOCKOUT}", waits_for_place=True, places=places) | values


def training(slot: str, **values: Any) -> dict[str, Any]:
    known = {"node": f"{slot}-a0", "zone": "us-east5-a", "type": "v6e-16", "tier": "spot", "workers": 4}
    run = {"phase": "run", "training": True, "attempt": 2, "step": 1285, "step_age_seconds": 0.0, "why": "running"}
    return row(slot, workers_answering=4, checkpoint=1200) | known | run | values


def answer(*rows: dict[str, Any], **values: Any) -> dict[str, Any]:
    names = {one["fleet"]: {"fleet": one["fleet"], "wish": "up", "problem": ""} for one in rows}
    known = {"daemon": True, "store_lost": False, "projects": [], "strays": [], "at": NOW.isoformat()}
    return {**known, "fleets": list(names.values()), "slots": list(rows), **values}


def screen(said: dict[str, Any], width: int) -> list[str]:
    return [line.plain for line in render.picture(said, width)]


@pytest.mark.parametrize("width", [60, 80, 100, 150])
def test_a_slot_is_one_line_at_any_width(width: int) -> None:
    said = answer(training("gpt-0"), training("gpt-1", step=None), *(waiting(f"seeds-{n}") for n in (1, 3)))
    said["slots"][3]["places"] = {}
    lines = screen(said, width)
    assert all(len(line) <= max(width, 60) for line in lines[1:])
    assert len(lines) == 2 + 4
    assert lines[2].startswith("gpt-0    run")
    assert ("us-east5-a v6e-16 spot" in lines[2]) is (width >= 150)


def test_slots_that_wait_for_the_same_are_one_line() -> None:
    said = answer(training("gpt-0"), *(waiting(f"seeds-{n}", seconds=40.0 - n) for n in range(1, 40)))
    lines = screen(said, 100)
    assert lines[0].startswith("2 fleets, 40 slots: 1 train, 39 wait   ")
    assert lines[-1].split(maxsplit=3) == [
        "seeds-1..39",
        "waiting",
        "39",
        "no capacity in europe-west4-a, next try in 1 s",
    ]
    assert len(lines) == 4
    assert len(screen(said, 0)) == 42, "a pipe and --wide get every slot, and every reason in full"


def test_what_needs_a_person_stands_first_with_what_to_do() -> None:
    failed = row("crash-0", phase="failed", end="failed", end_why="the run exited with 1", needs_person=True)
    failed |= {"last_line": "RuntimeError: device-side assert", "kept_until": "2026-11-22T07:44:00+00:00"}
    human = {"kind": "human", "failures": 1, "blocked": True, "retry_in_seconds": 600.0, "reason": "Permission denied"}
    blocked = waiting("other-0", needs_person=True, places={"us-east1-d/v6e-1/spot": human})
    lines = screen(answer(training("gpt-0"), failed, blocked), 150)
    assert lines[0].startswith("3 fleets, 3 slots: 1 train, 1 failed, 1 wait, 2 need you")
    kept = datetime.fromisoformat(failed["kept_until"]).astimezone()
    assert lines[1] == (
        "! crash-0 failed: the run exited with 1: RuntimeError: device-side assert; "
        f"node kept until {kept:%H:%M %Z}; `tpucare logs crash-0`, then `tpucare retry crash-0`"
    )
    assert lines[2] == "! other-0 needs you: Permission denied in us-east1-d, next try in 10 min"
    assert [line.split()[0] for line in lines[4:]] == ["crash-0", "other-0", "gpt-0"]


def test_what_needs_a_person_is_named_once_and_before_the_places_that_do_not() -> None:
    both = waiting("pod-0", needs_person=True)
    human = {"kind": "human", "failures": 1, "blocked": True, "retry_in_seconds": 600.0, "reason": "Permission denied"}
    both["places"]["us-east1-d/v6e-1/spot"] = human
    other = row("fence-0", why="needs your key again", needs_person=True)
    lines = screen(answer(both, other), 150)
    refused = "needs you: Permission denied in us-east1-d; no capacity in europe-west4-a, next try in 12 s"
    assert lines[1] == f"! pod-0 {refused}"
    assert lines[2] == "! fence-0 needs you: needs your key again"


def test_slots_that_are_not_as_declared_are_marked() -> None:
    rows = training("gpt-0", behind=["job", "tpu"]), training("gpt-1", surplus=True)
    lines = screen(answer(*rows), 0)
    assert "runs the job before the edit: `apply --restart` changes it now; not the declared TPU" in lines[2]
    assert lines[3].endswith("no longer declared: `tpucare down gpt-1` ends it; running")


def test_no_screen_is_blank() -> None:
    down = answer(fleets=[{"fleet": name, "wish": "down", "problem": ""} for name in ("b", "a")])
    assert screen(down, 80) == ["no fleet is up; down: a, b; `tpucare apply FILE` starts a fleet again"]
    away = answer(daemon=False, last_event=NOW.isoformat(), stopped=False)
    assert screen(away, 80)[0] == (
        f"no daemon runs since {NOW.astimezone():%Y-%m-%d %H:%M %Z} (killed?); the last known state is below. "
        "Start it with `tpucare daemon`"
    )


def test_failures_say_how_many_in_a_row_and_in_all() -> None:
    books = {"crash": {"failures": 2, "total": 5}, "preemption": {"failures": 0, "total": 3}}
    lines = screen(answer(training("gpt-0", books=books)), 0)
    assert "crash 2 (5 in all), preemption 3" in lines[2]


@pytest.mark.parametrize(
    ("slots", "text"),
    [(["a-1"], "a-1"), (["a-1", "a-2"], "a-1..2"), (["a-1", "a-3"], "a-1, 3"), (["a-1", "b-2"], "a-1, b-2")],
)
def test_names_of_slots_are_folded(slots: list[str], text: str) -> None:
    assert render._names([row(slot) for slot in slots]) == text


POOL = {
    "fleet": "lab",
    "cluster": "big",
    "head": "10.0.0.2:6379",
    "problem": "",
    "age_seconds": 2.0,
    "asked": "",
    "min": 0,
    "max": 4,
    "awake": 0,
    "joined": 0,
    "busy_hosts": 0,
    "unmet": [],
}


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({}, ["lab, pool of big: 0 awake of 0 to 4, 0 joined; asked for: nothing (2 s ago)"]),
        (
            {"awake": 3, "joined": 2, "busy_hosts": 1, "asked": "1 placement group", "age_seconds": 0.3},
            ["lab, pool of big: 3 awake of 0 to 4, 2 joined, 1 host at work; asked for: 1 placement group (0 s ago)"],
        ),
        (
            {"min": 4, "awake": 4, "age_seconds": None},
            ["lab, pool of big: 4 awake of 4, 0 joined; the head at 10.0.0.2:6379 has not answered yet"],
        ),
        (
            {"head": "", "age_seconds": None, "problem": "no head of big was started here: `tpucare ray head big`"},
            ["lab, pool of big: 0 awake of 0 to 4, 0 joined; no head of big was started here: `tpucare ray head big`"],
        ),
        (
            {"age_seconds": 150.0, "problem": "the head does not answer", "unmet": ["{TPU: 8}: no host has it"]},
            [
                "lab, pool of big: 0 awake of 0 to 4, 0 joined; asked for: nothing (2 min 30 s ago); "
                "the head does not answer",
                "{TPU: 8}: no host has it",
            ],
        ),
    ],
)
def test_a_pool_is_a_line_and_each_demand_that_it_cannot_meet_another(values: dict[str, Any], lines: list[str]) -> None:
    assert render.ray_pool({**POOL, **values}) == lines
    assert screen(answer(ray=[{**POOL, **values}]), 0)[: len(lines)] == lines


@pytest.mark.parametrize(
    ("state", "slot", "line"),
    [
        ("joined", training("lab-0", why="running"), "lab-0 joined (lab-0-a0 us-east5-a)"),
        (
            "coming",
            training("lab-0", why="waiting for 1 worker"),
            "lab-0 coming (lab-0-a0 us-east5-a): waiting for 1 worker",
        ),
        ("coming", row("lab-0", why="no capacity"), "lab-0 coming: no capacity"),
        ("leaving", {}, "lab-0 leaving"),
    ],
)
def test_a_slice_says_what_its_slot_waits_for_while_hosts_are_missing(
    state: str, slot: dict[str, Any], line: str
) -> None:
    assert render.ray_slice({"slot": "lab-0", "state": state, "stuck": False}, slot) == line


def test_a_slice_that_its_places_refuse_says_that_other_pools_serve() -> None:
    line = "lab-0 coming: no capacity; other pools that fit serve meanwhile"
    one = {"slot": "lab-0", "state": "coming", "stuck": True}
    assert render.ray_slice(one, row("lab-0", why="no capacity")) == line
