"""A thousand demands: whatever comes, goes and is preempted, all of it is placed, on no slice more than it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.kits.ray_hosts import pool
from tests.kits.ray_placement import Broken, Cluster, Dry, Job, Preemption
from tpucare.integrations.ray.packing import SlicePool


def _quick(*pools: SlicePool) -> list[SlicePool]:
    return [replace(one, idle=60.0) for one in pools]


POOLS = [
    _quick(pool("lab", "v4-16", most=3)),
    _quick(pool("one", "v4-8", least=1, most=4)),
    _quick(pool("six", "v6e-8", most=3)),
    _quick(pool("big", "v4-32", most=2)),
    _quick(pool("small", "v4-8", most=2), pool("large", "v4-16", most=2, priority=1)),
    _quick(pool("small", "v4-8", most=3), pool("large", "v4-32", most=1, priority=1)),
    _quick(pool("spot", "v4-16", most=1), pool("demand", "v4-16", most=2, priority=1)),
]


@st.composite
def jobs(draw: st.DrawFn, pools: list[SlicePool]) -> Job:
    of = draw(st.sampled_from(pools))
    kind = draw(st.sampled_from(["tasks", "group", "slices", "floor"]))
    sizes = [chips for chips in (1, 2, 4, 8) if chips <= min(one.chips for one in pools)]
    at = float(draw(st.integers(0, 900)))
    length = draw(st.sampled_from([1.0, 30.0, 200.0, 700.0]))
    patience = draw(st.sampled_from([6 * 3600.0, 6 * 3600.0, 10.0, 100.0]))
    if kind in ("slices", "floor"):
        return Job(kind, at, length, (0,) * draw(st.integers(1, of.maximum)), type=of.type, patience=patience)
    type = draw(st.sampled_from(["", of.type]))
    if kind == "tasks":
        chips = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=6))
        return Job(kind, at, length, tuple(chips), type=type, patience=patience)
    # A bundle for each host at most: so one pool can serve it, however large its bundles are.
    most = min(of.hosts * of.maximum, 5)
    chips = draw(st.lists(st.sampled_from(sizes), min_size=min(2, most), max_size=most))
    return Job(kind, at, length, tuple(chips), apart=draw(st.booleans()), type=type, patience=patience)


@st.composite
def dry_times(draw: st.DrawFn, pools: list[SlicePool]) -> Dry:
    at = float(draw(st.integers(0, 1000)))
    return Dry(draw(st.sampled_from(pools)).name, at, at + draw(st.sampled_from([30.0, 150.0, 500.0, 5000.0])))


@st.composite
def stories(draw: st.DrawFn) -> Cluster:
    pools = draw(st.sampled_from(POOLS))
    asked = draw(st.lists(jobs(pools), max_size=7))
    preempted = draw(st.lists(st.builds(Preemption, st.integers(1, 1500).map(float), st.integers(0, 7)), max_size=4))
    return Cluster(pools, asked, preempted, draw(st.integers(0, 1000)), draw(st.lists(dry_times(pools), max_size=2)))


def _live(story: Cluster) -> None:
    try:
        story.live()
    except Broken:
        note("\n".join(story.log))
        raise


@given(stories())
@settings(max_examples=100)
def test_demands_that_come_and_go(story: Cluster) -> None:
    _live(story)


@pytest.mark.slow
@given(stories())
@settings(max_examples=1000, derandomize=False)
def test_a_thousand_demands(story: Cluster) -> None:
    _live(story)
