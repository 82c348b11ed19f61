"""Rule 12 in the loop: the verdicts of one moment pass the brake together, or are held together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpucare.engine.board import Board
from tpucare.engine.brake import Brake
from tpucare.engine.hearing import Hearing
from tpucare.engine.tracking import SlotTrack
from tpucare.model.actions import Delete, Stop, Wait
from tpucare.model.causes import Cause


class Verdicts:
    """
    What becomes of the nodes that were judged.

    begin: writes the intent of a stop or delete and lets it start
    """

    def __init__(self, board: Board, hearing: Hearing, begin: Callable[[SlotTrack, Delete | Stop], None]) -> None:
        self._board = board
        self._hearing = hearing
        self._begin = begin
        self.brake = Brake(board.settings.brake_minimum, board.settings.brake_share)

    def judge(self, judged: Mapping[str, Delete | Stop], now: float) -> None:
        """Let them pass, or hold those that no person lifted the brake for."""
        slots = self._board.slots
        lifted = {name for name, action in judged.items() if slots[name].may_pass(action.key.name)}
        live = sum(len(track.nodes) for track in slots.values())
        count = self.brake.counted(judged.keys() - lifted, now)
        for name, action in judged.items():
            if count > self.brake.limit(live) and name not in lifted:
                self._hold(slots[name], action, count, live)
            else:
                self._pass(slots[name], action, now)

    def _pass(self, track: SlotTrack, action: Delete | Stop, now: float) -> None:
        name = track.slot.name
        self.brake.passed(name, now)
        track.release()
        silent = isinstance(action, Delete) and name in self._hearing.silent
        if silent and not self._hearing.elsewhere_answers(track):
            self._hearing.canary = name
        self._begin(track, action)
        self._board.dirty[name] = None

    def _hold(self, track: SlotTrack, action: Delete | Stop, count: int, live: int) -> None:
        why = f"held by the brake: {count} of {live} nodes judged within 10 minutes ({action.why}); `tpucare confirm`"
        if track.hold(action.key.name, self._board.project(track.slot.project).observed):
            self._board.event(track, "brake", why, node=action.key.name, level="error")
        self._board.rest(track)
        track.decided(Wait(Cause.BRAKE, why, needs_person=True))
