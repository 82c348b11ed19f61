"""
Nodes of the old kind: one that bears exactly a slot's name, as the first tpucare named them, and is not ours.

Who asked for it has that very node deleted before anything is created; everybody else is told the two ways out.
"""

from __future__ import annotations

from tpucare.fleetfile.fleet import Fleet
from tpucare.model.errors import CloudError, ConfigError, NodeGone
from tpucare.model.memory import Wish
from tpucare.model.resources import Node, NodeKey, NodeState
from tpucare.service.assembly import Caretaker
from tpucare.service.fleet_registry import Roster

ASK_AGAIN_SECONDS = 5.0


class UnownedNodes:
    """
    Those of one fleet. On the thread of the loop only; the calls that delete one block it, before anything else began.
    """

    def __init__(self, caretaker: Caretaker, roster: Roster, fleet: Fleet, *, delete: bool) -> None:
        self._care, self._engine, self._roster, self._fleet = caretaker, caretaker.engine, roster, fleet
        self._delete = delete
        # The ones that were there when this was asked for: whatever bears their names later is another node.
        self._meant: dict[NodeKey, int] = {}
        self._ask_at = float("-inf")

    def are_gone(self) -> bool:
        """
        Whether the project was listed, and none is there.

        Raises: ConfigError: one is, and may not be deleted.
        """
        view = self._engine.projects.get(str(self._fleet.project))
        if view is None or not view.fresh:
            return False
        found = [node for name in self._roster.slots_of(self._fleet.name) for node in self._of(name)]
        for node in found:
            if not self._delete or self._meant.setdefault(node.key, node.id) != node.id:
                raise ConfigError(_line(node))
        now = self._care.clock.monotonic()
        if found and now >= self._ask_at:
            self._ask_at = now + ASK_AGAIN_SECONDS
            for node in found:
                self._ask(node)
        return not found

    def _of(self, slot: str) -> list[Node]:
        """A slot that has nodes of its own, or is going down, asks for no new one that could meet another's."""
        memory = self._engine.slots[slot].memory
        if memory.ours or memory.creates or memory.wish is Wish.DOWN:
            return []
        nodes = self._engine.projects[str(self._fleet.project)].foreign.get(slot, {}).values()
        return [node for node in nodes if node.name == slot]

    def _ask(self, node: Node) -> None:
        if node.state is NodeState.DELETING:
            return
        try:
            there = self._care.cloud.get_node(node.key)
            if (there.id, there.create_time, there.owner) != (node.id, node.create_time, node.owner):
                return
            self._care.cloud.delete_node(node.key)
        except NodeGone:
            return
        except CloudError as error:
            self._roster.say("delete-unowned", f"{node.name} could not be deleted: {error}", self._fleet.name)
            return
        self._roster.say("delete-unowned", f"{node.name} in {node.key.zone}: delete asked for", self._fleet.name)


def _line(node: Node) -> str:
    whose = f"owner {node.owner}" if node.owner else "no owner's label"
    return (
        f"a node {node.name} is there in {node.key.zone} ({node.state.name}), bears {whose} and is not ours: "
        f"`tpucare adopt-node {node.name} {node.name}` takes it over, delete_unowned=True deletes it first"
    )
