"""
Leave to create: who asked for it, who has it, and when it is given back. On the deciding thread only.

It is held from before a create is intended until nothing of that create is open: its operation ended, or its node is
READY, gone, given up or being deleted; and while the create budget is all that the slot still waits for. How leave is
acquired is the gate's business (`ports.Gate`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tpucare.engine.tracking import SlotTrack
from tpucare.model.actions import ANY_CREATE, Wait
from tpucare.model.causes import Cause
from tpucare.model.ports import Gate
from tpucare.model.resources import NodeState

WAITS = Wait(Cause.CREATE_SEMAPHORE, "waiting for the creation semaphore")
WAITS_FOR_BUDGET = Wait(Cause.CREATE_BUDGET, "the create budget of the project is used up for this minute")


class Leave:
    """Without a gate everybody has leave, always."""

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate
        self._holds: dict[str, str] = {}
        self._waits: set[str] = set()

    def may_create(self, track: SlotTrack, name: str) -> bool:
        """Whether *name* may be created now; else the slot waits. Raises: whatever acquiring it raised."""
        if self._gate is None:
            return True
        slot = track.slot.name
        self._waits.discard(slot)
        if not self._gate.ask(slot):
            self._waits.add(slot)
            track.decided(WAITS)
            return False
        self._holds[slot] = name
        return True

    def news(self) -> frozenset[str]:
        """Slots that are to be decided again, since their leave was given or refused."""
        return self._gate.news() if self._gate is not None else frozenset()

    def sweep(self, slots: Mapping[str, SlotTrack]) -> None:
        """Give back what is not needed any more."""
        if self._gate is None:
            return
        for slot in [slot for slot in self._waits if slot not in slots or not _waits(slots[slot])]:
            self._waits.discard(slot)
            self._gate.release(slot)
        for slot, name in [*self._holds.items()]:
            if slot not in slots or not _needs(slots[slot], name):
                del self._holds[slot]
                self._gate.release(slot)


def _waits(track: SlotTrack) -> bool:
    return track.action.cause is Cause.CREATE_SEMAPHORE


def _needs(track: SlotTrack, name: str) -> bool:
    if ANY_CREATE in track.in_flight or track.action.cause is Cause.CREATE_BUDGET:
        return True
    intent, seen = track.memory.create(name), track.nodes.get(name)
    if intent is None or intent.superseded or intent.failed or track.memory.has_given_up(name):
        return False
    return seen is None or seen.node.state is NodeState.CREATING
