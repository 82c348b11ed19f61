"""What differs between two listings, apart from any cloud."""

from __future__ import annotations

from datetime import UTC, datetime

from tpucare.adapters.google.snapshot import SnapshotDiffer, key_of
from tpucare.model.resources import Node, NodeKey, NodeState

START = datetime(2026, 3, 1, tzinfo=UTC)
Raw = tuple[int, NodeState, str]
"""Id, state, and something that a Node does not show."""


def name(node: str, zone: str = "z-a", project: str = "p") -> str:
    return f"projects/{project}/locations/{zone}/nodes/{node}"


def translate(key: NodeKey, raw: Raw) -> Node:
    return Node(key, raw[0], START, raw[1])


def roll() -> SnapshotDiffer[Raw]:
    return SnapshotDiffer("p", translate)


def test_key_of_a_resource_name() -> None:
    assert key_of(name("n"), "p") == NodeKey("p", "z-a", "n")
    assert key_of(name("n", project="4711"), "p") == NodeKey("p", "z-a", "n")
    assert key_of("nodes/n", "p") is None


def test_a_project_number_in_the_answer_changes_nothing() -> None:
    nodes = roll()
    raw = (1, NodeState.READY, "")
    nodes.full([(name("n"), raw)], (), None)
    listing = nodes.full([(name("n", project="4711"), raw)], (), None)
    assert set(listing.nodes) == {NodeKey("p", "z-a", "n")}
    assert (listing.changed, listing.gone) == (frozenset(), frozenset())


def test_what_a_node_does_not_show_is_no_change() -> None:
    nodes = roll()
    first = nodes.full([(name("n"), (1, NodeState.READY, "old"))], (), START)
    listing = nodes.full([(name("n"), (1, NodeState.READY, "new"))], (), START)
    key = NodeKey("p", "z-a", "n")
    assert listing.changed == frozenset()
    assert listing.nodes[key] is first.nodes[key]


def test_darkness_may_last_and_may_cover_names_or_paths() -> None:
    nodes = roll()
    raw = (1, NodeState.READY, "")
    key = NodeKey("p", "z-a", "n")
    nodes.full([(name("n"), raw)], (), None)
    for dark in ("z-a", "projects/p/locations/z-a", "z-a"):
        listing = nodes.full([], (dark,), None)
        assert listing.unreachable == {"z-a"}
        assert (listing.changed, listing.gone, dict(listing.nodes)) == (frozenset(), frozenset(), {})
    assert nodes.full([(name("n"), raw)], (), None).changed == {key}
    assert nodes.full([], (), None).gone == {key}
    assert nodes.full([], (), None).gone == frozenset()


def test_a_node_given_for_a_zone_that_is_called_unreachable_is_not_present() -> None:
    nodes = roll()
    listing = nodes.full([(name("n"), (1, NodeState.READY, ""))], ("z-a",), None)
    assert not listing.nodes
    assert not listing.changed


def test_records_that_are_no_nodes_are_left_out() -> None:
    assert not roll().full([("projects/p/locations/z-a", (1, NodeState.READY, ""))], (), None).nodes
