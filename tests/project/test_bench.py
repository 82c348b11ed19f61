"""What the bench counts and tells, and a small part of it: a quiet pass costs its pages, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import child, deadline, lost, ray
from tests.bench.report import BEGIN, END, Measure, percentile, read_json, table, write_docs, write_json


def test_a_percentile_is_one_of_the_samples() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("values", "held"), [((1.0, 2.0, 9.0), True), ((3.0, 3.0), False)])
def test_the_median_is_judged(values: tuple[float, ...], held: bool) -> None:
    assert Measure("1", "what", 2.0, "s", values).held is held


def test_what_must_never_happen_is_judged_by_its_worst() -> None:
    assert not Measure("1", "what", 0, "commits", (0, 0, 1), never=True).held
    assert Measure("1", "what", 95, "%", (96, 97), at_least=True).held


def test_creates_in_any_minute_are_counted() -> None:
    assert lost.most_in_window([0.0, 30.0, 59.9, 60.1]) == 3


def test_rows_replace_rows_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_json(path, [Measure("1", "one", 2.0, "s", (1.0,)), Measure("2", "two", 2.0, "s", (1.0,))])
    write_json(path, [Measure("1", "one", 2.0, "s", (3.0,))])
    assert [(measure.row, measure.values) for measure in read_json(path)] == [("1", (3.0,)), ("2", (1.0,))]


def test_the_page_keeps_what_stands_around_the_table(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    measures = [Measure("1", "one", 2.0, "s", (3.0,))]
    write_docs(page, measures)
    text = page.read_text()
    assert table(measures) in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "**no**" in text


@pytest.mark.parametrize(("nodes", "page_cap", "pages"), [(1, 1000, 1), (150, 100, 2)])
def test_a_quiet_pass_is_one_listing_and_no_commit(nodes: int, page_cap: int, pages: int) -> None:
    found = child.run("passes", "measure", nodes=nodes, page_cap=page_cap, passes=3)
    assert [lists + other for lists, other in zip(found["calls"], found["other"], strict=True)] == [pages] * 3
    assert found["commits"] == [0, 0, 0]


def test_work_by_a_deadline_costs_less_than_on_demand_and_no_less_than_the_optimum() -> None:
    one = deadline.task("gcp-h100-2025", 1)
    lived = deadline.UniformProgress(one, 1).run()
    assert deadline.optimum(one) < lived.cost < 0.3
    assert not lived.late
    assert lived.done == pytest.approx(one.work)


def test_demands_of_ray_are_all_served_and_nothing_is_left() -> None:
    measures = ray.demands(10)
    assert [measure.held for measure in measures] == [True] * 3
    assert measures[0].samples > 10
