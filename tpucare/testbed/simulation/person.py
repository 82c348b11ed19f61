"""
The scripted person: reads the state of slots as in `status`, and gives the commands that it calls for.

The person uses only the commands of people. A person can also inspect machines (log in to an old node and see whether a
run lives there), of which the engine learns nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tpucare.engine.tracking import SlotTrack
from tpucare.model.actions import Wait
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import DesiredState, End, Memory, PlaceMemory
from tpucare.model.resources import NodeKey, NodeState
from tpucare.planner import desired_state
from tpucare.testbed.emulator.world.records import ApiError

if TYPE_CHECKING:
    from tpucare.testbed.simulation.history import History


class Person:
    """
    Visits the fleets now and then.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.daemon = history.daemon
        # The reason for which each slot waited at its last confirmation.
        self._confirmed: dict[str, str] = {}

    def visit(self, *, gentle: bool) -> None:
        """
        Lift the brake, retry where only a person can, and replace a node whose host key is not confirmed.

        gentle: leave ended slots as they are, so that the calm can check them
        """
        if self.daemon.store is None:
            return
        self._start_stopped_nodes()
        if self.daemon.store.old and any(_needs_person(track) for track in self.daemon.engine.slots.values()):
            # The store is no backup that was put back, which the person knows.
            self.daemon.store.confirm()
            self.daemon.engine.state.decide_again(self.daemon.engine.slots)
        for name, track in self.daemon.engine.slots.items():
            self._visit_slot(name, track, gentle=gentle)

    def _visit_slot(self, name: str, track: SlotTrack, *, gentle: bool) -> None:
        daemon, memory = self.daemon, track.memory
        if track.braked:
            self.history.properties.lifted.add(name)
            daemon.engine.lift_brake(name)
        if memory.end is not End.NONE and not gentle:
            self._ask(name, 0.0)
            daemon.engine.change(name, desired_state.up, "up", f"{name}: wanted again")
            return
        if memory.wish is not DesiredState.UP and gentle:
            daemon.wish(name, DesiredState.UP)
        if any(place.blocked for place in memory.places.values()):
            daemon.engine.change(name, _unblocked, "retry", f"{name}: retry")
        if not _needs_person(track) or track.braked or memory.end is not End.NONE:
            return
        hidden = any(
            past.may_be_training and past.status in (NodeStatus.OUT_OF_SIGHT, NodeStatus.TAKEN) for past in memory.nodes
        )
        in_doubt, helped = memory.has_older_node_in_doubt or hidden, self._confirmed.get(name) != track.action.why
        if in_doubt and (helped or not track.nodes):
            self._confirmed[name] = track.action.why
            self._confirm(name, track)
        elif track.nodes and not memory.replace_asked:
            self._ask(name, 3600.0)
            daemon.engine.change(name, desired_state.replace_node, "replace", f"{name}: replace")

    def _ask(self, slot: str, seconds: float) -> None:
        self.history.person_asks(slot, seconds)

    def _confirm(self, name: str, track: SlotTrack) -> None:
        """
        Confirm only inspected nodes. A run on an older node is ended first, by hand; a run on a node that the API does
        not show is left alone while it trains, and ended if it hangs.
        """
        launcher = self.daemon.launcher
        newest = max((past.create_time for past in track.memory.nodes), default=None)
        for past in track.memory.nodes:
            machines = launcher.of_node(*NodeKey(track.slot.project, past.zone, past.name))
            living = [worker for worker in machines if worker.node_id == past.id and launcher.lives(worker)]
            hidden = past.zone in self.daemon.zone.dark_for_ever
            # A gang that lost the run of one worker makes no step.
            trains = len(living) == len(machines) and all(
                worker.run is not None and not launcher.stands_still(worker.run) for worker in living
            )
            if living and (trains if hidden else past.create_time == newest):
                return
            for worker in living:
                launcher.end(worker, status=None)
        self._ask(name, 3600.0)
        self.history.properties.confirmed(name, [past.id for past in track.memory.nodes])
        self.daemon.engine.change(name, desired_state.confirm, "confirm", f"{name}: confirm")

    def _start_stopped_nodes(self) -> None:
        world = self.daemon.zone.world
        for life in list(world.state.nodes.values()):
            if life.record.state == NodeState.STOPPED:
                try:
                    world.api.start_node(life.record.name, self.daemon.clock.true_now())
                except ApiError:
                    continue


def _needs_person(track: SlotTrack) -> bool:
    return isinstance(track.action, Wait) and track.action.needs_person


def _unblocked(memory: Memory) -> Memory:
    """The memory after `tpucare retry`."""
    return replace(memory, places={key: PlaceMemory() if p.blocked else p for key, p in memory.places.items()})
