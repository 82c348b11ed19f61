"""
The scripted person: what somebody who looks at `status` does about what it says, in the weather and in the calm.

Only what a person can do is done here, through the doors that a person has. What is true of the machines a person can
find out (who looks at the old node sees whether anything runs there), and the engine is not told of it.
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
    Who comes now and then.

    gentle: what has ended is left as it is, so that it can be judged
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.daemon = history.daemon
        # What a slot waited for when it was last confirmed.
        self._confirmed: dict[str, str] = {}

    def visit(self, *, gentle: bool) -> None:
        """Lifts the brake, asks again where only a person can, and gives up a node that nobody vouches for."""
        if self.daemon.store is None:
            return
        self._start_what_was_stopped()
        if self.daemon.store.old and any(_needs_person(track) for track in self.daemon.engine.slots.values()):
            # It is no backup, and the person who never put one back knows it.
            self.daemon.store.confirm()
            self.daemon.engine.state.decide_again(self.daemon.engine.slots)
        for name, track in self.daemon.engine.slots.items():
            self._look_after(name, track, gentle=gentle)

    def _look_after(self, name: str, track: SlotTrack, *, gentle: bool) -> None:
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
        Only of what was looked at. A run on an older node is ended first, by hand; one that nobody can look at through
        the API is left alone while it trains, and ended where it stands still.
        """
        launcher = self.daemon.launcher
        newest = max((past.create_time for past in track.memory.nodes), default=None)
        for past in track.memory.nodes:
            machines = launcher.of_node(*NodeKey(track.slot.project, past.zone, past.name))
            living = [worker for worker in machines if worker.node_id == past.id and launcher.lives(worker)]
            hidden = past.zone in self.daemon.zone.dark_for_ever
            trains = any(worker.run is not None and not launcher.stands_still(worker.run) for worker in living)
            if living and (trains if hidden else past.create_time == newest):
                return
            for worker in living:
                launcher.end(worker, status=None)
        self._ask(name, 3600.0)
        self.history.properties.confirmed(name, [past.id for past in track.memory.nodes])
        self.daemon.engine.change(name, desired_state.confirm, "confirm", f"{name}: confirm")

    def _start_what_was_stopped(self) -> None:
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
    """As `tpucare retry` leaves it."""
    return replace(memory, places={key: PlaceMemory() if p.blocked else p for key, p in memory.places.items()})
