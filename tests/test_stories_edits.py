"""Stories of fleets that are edited while things are in flight, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.virtual.harness import Daemon, place
from tpucare.model import Listing

ALL_LISTED_AT = 700.0


def test_a_node_of_a_type_that_is_not_declared_any_more_still_has_all_its_workers(tmp_path: Path) -> None:
    """While a node is CREATING, the API may list one address of four: that is no slice of one host."""
    daemon = Daemon(tmp_path)
    listed = daemon.cloud.list_nodes

    def list_nodes(project: str) -> Listing:
        listing = listed(project)
        few = 1 if daemon.clock.seconds < ALL_LISTED_AT else None
        nodes = {key: replace(node, endpoints=node.endpoints[:few]) for key, node in listing.nodes.items()}
        return replace(listing, nodes=nodes, changed=frozenset(nodes))

    daemon.cloud.list_nodes = list_nodes  # type: ignore[method-assign]
    daemon.care_for("pod")
    daemon.run(seconds=30)
    daemon.care_for("pod", 1, place(kind="v3-64", workers=8))
    daemon.run(minutes=30)
    started = [
        (round(at) >= ALL_LISTED_AT, worker) for at, what, _, worker in daemon.launcher.history if what == "start"
    ]
    assert started == [(True, worker) for worker in range(4)]
    assert daemon.launcher.launches == ["pod-0-a0.1"]
