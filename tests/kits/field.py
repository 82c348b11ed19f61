"""What the stories of the field have in common: a preemption, the names of nodes, the calls that the cloud saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.kits.harness import Daemon


def preempt(daemon: Daemon, selector: str, **how: Any) -> None:
    """As `World.preempt`, now."""
    daemon.zone.world.operator.preempt(selector, daemon.clock.true_now(), **how)


def named(daemon: Daemon) -> list[str]:
    """Every node that exists, whoever's it is."""
    return sorted(node.path.node_id for node in daemon.zone.nodes())


def launches_on(daemon: Daemon, node: str) -> list[str]:
    return [token for token in daemon.launcher.launches if token.startswith(f"{node}.")]


def calls(daemon: Daemon, method: str) -> list[Mapping[str, Any]]:
    """Calls as the cloud's audit log has them, oldest first; `node` is the id of the node that each was about."""
    found = [one for one in daemon.zone.world.audit if one["kind"] == "call" and one["method"] == method]
    return [{**one, "node": str(one["name"]).rpartition("/")[2]} for one in found]
