"""Storms: a short fixed part of the campaign, and proof that each property notices when its rule is broken."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.storm import __main__ as storm
from tests.testbed.mutations import MUTATIONS, Mutation
from tpucare.testbed.simulation.campaign import Plan, campaign
from tpucare.testbed.simulation.properties import PROPERTIES


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_broken_rule_is_noticed_by_its_property(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(broken) for broken in mutation.tell().broken] == []
    mutation.change(monkeypatch)
    assert mutation.rule in {broken.rule for broken in mutation.tell().broken}


def test_every_property_has_a_mutation() -> None:
    assert {mutation.rule for mutation in MUTATIONS} == set(PROPERTIES)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_short_storm_breaks_no_promise(seed: int, queued: bool) -> None:
    (outcome,) = campaign(Plan(days=0.12, level="high", queued=queued), [seed])
    assert [str(broken) for broken in outcome.broken] == []
    assert outcome.tally.launches >= 10


def test_a_campaign_goes_on_where_it_was_and_only_there(tmp_path: Path) -> None:
    """Outcomes that other sources lived were taken for those of this campaign."""
    sources, plan, path = tmp_path / "sources", Plan(days=0.01, level="low"), tmp_path / "kept.jsonl"
    sources.mkdir()
    (sources / "one.py").write_text("1")
    first = storm.live("storms", plan, range(1, 3), 1, storm.Kept(path, plan, sources))
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    path.write_text("".join([*lines[:-1], lines[-1][:50]]))
    again = storm.live("storms", plan, range(1, 3), 1, storm.Kept(path, plan, sources))
    assert (again.digests, path.read_text().splitlines(keepends=True)) == (first.digests, lines)
    for other in (storm.Kept(path, Plan(days=0.02, level="low"), sources), storm.Kept(path, plan, tmp_path)):
        with pytest.raises(storm.OtherSources, match="other sources"):
            other.outcomes()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "queued"), [*product(range(100, 140), [False]), *product(range(100, 120), [True])])
def test_a_storm_breaks_no_promise(seed: int, queued: bool) -> None:
    (outcome,) = campaign(Plan(days=0.25, level="high", queued=queued), [seed])
    assert [str(broken) for broken in outcome.broken] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", ["low", "high"])
def test_a_month_of_a_hundred_slots_breaks_no_promise(level: str) -> None:
    (outcome,) = campaign(Plan(days=30, level=level, count=100), [7])
    assert [str(broken) for broken in outcome.broken] == []
