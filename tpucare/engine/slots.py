"""
The registry of slots: declared, or remembered and no longer declared. On the engine's thread only.

No slot is ever forgotten: a removed one keeps its numbers, so that no node name is used twice, and its TAKEN nodes, on
which its run may live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tpucare.engine.admission import CreateAdmission
from tpucare.engine.state import EngineState
from tpucare.engine.tracking import SlotTrack
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import DesiredState, Memory
from tpucare.model.resources import Slot
from tpucare.planner import remember


class SlotRegistry:
    """Adds and removes the engine's slots, by declarations and the memories in the store."""

    def __init__(self, state: EngineState, create_admission: CreateAdmission) -> None:
        self._state = state
        self._create_admission = create_admission
        self._remembered = {name: remember.recover(memory) for name, memory in state.store.memories().items()}
        self._surplus: dict[str, Callable[[str], Slot | None]] = {}
        self._desired: dict[str, DesiredState] = {}

    def declare(
        self, fleet: str, slots: Iterable[Slot], surplus: Callable[[str], Slot | None], desired: DesiredState
    ) -> None:
        """
        Add the slots of *fleet* as last accepted.

        surplus: makes the Slot of a name that is remembered or listed but not declared (rule 3: after a lowered count
                 surplus slots run on); None: not a name of this fleet
        desired: state of a slot without memory; DOWN keeps a late node of a fleet that was taken down
                 from bringing its slot back
        """
        declared = {slot.name: slot for slot in slots}
        self._surplus[fleet] = surplus
        self._desired[fleet] = desired
        for name in self.slot_names(fleet):
            extra = surplus(name) if name not in declared else None
            if extra is not None:
                declared[name] = extra
        for slot in declared.values():
            self._add(slot)

    def slot_names(self, fleet: str) -> list[str]:
        """Names of the declared and the remembered slots of *fleet*."""
        known = [name for name, memory in self._remembered.items() if memory.fleet == fleet]
        return known + [name for name, track in self._state.slots.items() if track.slot.fleet == fleet]

    def removed_memories(self, fleet: str) -> list[Memory]:
        """Memories of slots of *fleet* that are no longer declared: what their nodes cost counts."""
        return [memory for memory in self._remembered.values() if memory.fleet == fleet]

    def restore_slot(self, fleet: str, name: str) -> SlotTrack | None:
        """Add the undeclared slot that labels name. None: its fleet has no such slot."""
        surplus = self._surplus.get(fleet)
        slot = surplus(name) if surplus is not None and name else None
        return self._add(slot) if slot is not None else None

    def has_leftovers(self, fleet: str) -> bool:
        """Whether a node, an open create or a queued request of *fleet* is left."""
        tracks = [track for track in self._state.slots.values() if track.slot.fleet == fleet]
        memories = [*(track.memory for track in tracks), *self.removed_memories(fleet)]
        return any(track.nodes for track in tracks) or any(memory.nodes or memory.asked_for for memory in memories)

    def remove_slot(self, slot: str) -> None:
        """Remove a slot that was taken down, and keep its numbers."""
        track = self._state.slots[slot]
        self._remove(track)
        past = track.memory
        memory = Memory(
            past.fleet,
            past.wish,
            nodes=tuple(node for node in past.nodes if node.status is NodeStatus.TAKEN),
            next_number=past.next_number,
            asked_from=past.asked_from,
            attempts=past.attempts,
            recent_creates=past.recent_creates,
            cost=past.cost,
            unpriced_hours=past.unpriced_hours,
            counted_from=past.counted_from,
            bounds_told=past.bounds_told,
        )
        self._remembered[slot] = memory
        self._state.store.save({slot: memory})

    def _add(self, slot: Slot) -> SlotTrack:
        state = self._state
        track = state.slots.get(slot.name)
        if track is not None and track.slot.project != slot.project:
            # Callers ensure that nothing of the slot is left there. Marks of one project's observed clock mean nothing
            # on another's.
            self._remove(track)
            self._remembered[slot.name] = track.memory
            track = None
        if track is None:
            fresh = Memory(fleet=slot.fleet, wish=self._desired.get(slot.fleet, DesiredState.UP))
            memory = self._remembered.pop(slot.name, None) or fresh
            track = SlotTrack(slot, memory)
            state.add_slot(track)
            state.project(slot.project).add_slot(slot.name)
            self._create_admission.restore_budget(slot.project, memory)
            state.merge_publishing(memory)
            state.merge_archive(memory)
        track.slot = slot
        state.dirty[slot.name] = None
        return track

    def _remove(self, track: SlotTrack) -> None:
        name = track.slot.name
        del self._state.slots[name]
        self._state.project(track.slot.project).slots.discard(name)
        self._state.forget_slot(name)
        self._state.markets.remove_slot(track.slot, track.memory)
