"""
What the end of an effect means: for the memory of its slot, for what is seen of its node, and for the story.

On the deciding thread only. It begins nothing and decides nothing: the slot is decided anew.
"""

from __future__ import annotations

import random

from tpucare.engine.board import Board
from tpucare.engine.effects import ChangedMeanwhile, Ports
from tpucare.engine.observer import Observer
from tpucare.engine.prober import Prober
from tpucare.engine.projects import ProjectView
from tpucare.engine.spending import Spending
from tpucare.engine.tracking import SlotTrack
from tpucare.model.actions import (
    Create,
    Delete,
    Effect,
    EffectKind,
    Launch,
    Look,
    Poll,
    PushKey,
    Stop,
    Vouch,
    end_of,
    failed,
)
from tpucare.model.errors import LostRace, NodeGone, TpuCareError
from tpucare.model.ports import Finished
from tpucare.model.resources import Node
from tpucare.planner import remember
from tpucare.planner import remember as memories
from tpucare.planner.remember import saw


class Outcomes:
    """How effects end."""

    def __init__(
        self,
        board: Board,
        ports: Ports,
        observer: Observer,
        prober: Prober,
        spending: Spending,
        rng: random.Random,
    ) -> None:
        self._board = board
        self._ports = ports
        self._observer = observer
        self._prober = prober
        self._spending = spending
        self._rng = rng

    def ended(self, track: SlotTrack, action: Effect, finished: Finished) -> None:
        """*action*, begun for the slot of *track*, is over, one way or the other."""
        view, error = self._board.project(track.slot.project), finished.error
        name = action.name if isinstance(action, Create | Poll) else action.key.name
        track.looked[action.effect_key] = view.mark
        self._board.dirty[track.slot.name] = None
        if isinstance(action, Create):
            self._spending.answered(track, self._board.clock.monotonic())
        if error is not None and not isinstance(error, TpuCareError):
            self._board.set_aside(track, error)
        if isinstance(error, ChangedMeanwhile):
            self._board.update(track, memories.changed_meanwhile(track.memory, name))
        told = saw(track.memory, *track.last_told())
        memory = memories.remember(told, action, finished.result, error, self._board.clock.now(), self._rng)
        self._board.update(track, memory)
        self._after(track, view, action, name, finished)

    def _after(self, track: SlotTrack, view: ProjectView, action: Effect, name: str, finished: Finished) -> None:
        """What the trackers have to know of an effect that ended."""
        seen, error = track.nodes.get(name), finished.error
        if isinstance(action, Look | Delete) and isinstance(error, NodeGone):
            # GetNode and DeleteNode alone prove that a node is gone; its host keys die with it, and not before.
            self._ports.launcher.forget(action.key)
            if seen is not None or track.memory.create(name) is None:
                self._observer.forget(track, view, name)
        elif isinstance(action, Look) and isinstance(finished.result, Node):
            self._looked(track, view, finished.result)
        elif isinstance(action, Poll) and failed(finished.result):
            track.looked[EffectKind.FAILED.of(name)] = view.mark
        elif isinstance(action, Vouch) and seen is not None:
            seen.hear_voucher(finished.result is True, error, view.mark)
        elif isinstance(action, PushKey) and isinstance(error, LostRace):
            track.looked[EffectKind.MISSED.of(name)] = view.mark
        elif isinstance(action, Launch | Stop) and seen is not None:
            if isinstance(action, Launch):
                track.looked.pop(EffectKind.STOP.of(name), None)
            seen.forget_report()
            self._prober.schedule(track, seen, self._board.clock.monotonic())
        news = not isinstance(action, Look) or track.look_ended(name, error, view.mark)
        told = end_of(action, finished.result, error) if news else None
        if told is not None:
            self._board.event(track, told.kind, told.text, node=name, level=told.level)

    def _looked(self, track: SlotTrack, view: ProjectView, node: Node) -> None:
        track.looked.pop(EffectKind.MISSED.of(node.name), None)
        is_its = node.slot == track.slot.name or self._board.home(node) is track
        if node.owner != self._ports.owner or not is_its:
            self._met_another(track, view, node)
            return
        listed = track.nodes[node.name].listed if node.name in track.nodes else False
        self._observer.see_ours(view, track, node)
        track.nodes[node.name].listed = listed

    def _met_another(self, track: SlotTrack, view: ProjectView, node: Node) -> None:
        past = track.memory.node(node.name)
        if past is not None and past.id == node.id:
            self._observer.lose(view, node, track)
            return
        # Our create met a node of that name that is not ours: the name is spent, and the next one is asked for.
        memory = track.memory.without_create(node.name)
        if past is not None:
            # No two nodes bear one name at a time: the one that was remembered is gone.
            self._ports.launcher.forget(node.key)
            memory = remember.gone(memory, node.name, self._board.clock.now(), self._rng)
            self._observer.forget(track, view, node.name)
        self._board.update(track, memory)
        self._observer.see_foreign(view, node)
