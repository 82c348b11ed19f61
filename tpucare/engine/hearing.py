"""
Who answers over SSH, and what silence is worth: a verdict on a node only where our own network is known to carry.

On the deciding thread only. When no worker anywhere answers, one slot at a time may be the canary whose node is
replaced to find out; the others wait.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta

from tpucare.engine.board import Board
from tpucare.engine.tracking import NodeTrack, SlotTrack
from tpucare.model.memory import End, Wish
from tpucare.model.resources import USABLE_STATES, NodeState
from tpucare.model.runs import Contact, NodeReport

ANSWER_COUNTS_FOR = 60.0


class Hearing:
    """Answers and silences of all workers of all slots."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.silent: set[str] = set()
        self.canary: str | None = None
        self._answers: deque[tuple[float, str]] = deque()

    def hear(self, node: str, report: NodeReport) -> None:
        """A node was probed; to be called before its own track hears of it."""
        if not any(worker.contact is Contact.ANSWERED for worker in report.workers):
            return
        now = self.board.clock.monotonic()
        if not self._answers or now - self._answers[-1][0] > ANSWER_COUNTS_FOR:
            self._count_anew()
        self._answers.append((now, node))
        self.canary = None

    def note(self, track: SlotTrack) -> None:
        """Whether any node of the slot is silent now."""
        if any(seen.silent_since is not None for seen in track.nodes.values()):
            self.silent.add(track.slot.name)
        else:
            self.silent.discard(track.slot.name)

    def judged(self) -> list[str]:
        """Slots whose silence is judged by who else answers; workers that were never there yet are only booting."""
        tracks = ((name, self.board.slots.get(name)) for name in self.silent)
        return [name for name, track in tracks if track is not None and any(map(_is_suspect, track.nodes.values()))]

    def _count_anew(self) -> None:
        """
        Somebody answers after nobody did: the silence until now was ours.

        Without this, the first worker heard after an outage of our own network would condemn all that are asked later.
        """
        for name in self.silent:
            track = self.board.slots.get(name)
            mark = self.board.project(track.slot.project).mark if track is not None else None
            for seen in track.nodes.values() if track is not None else ():
                if seen.silent_since is not None and mark is not None:
                    seen.silent_since, seen.silent_probes = mark, 0

    def elsewhere_answers(self, track: SlotTrack) -> bool:
        """Some other worker answered within the last minute."""
        now = self.board.clock.monotonic()
        while self._answers and now - self._answers[0][0] > ANSWER_COUNTS_FOR:
            self._answers.popleft()
        silent = {name for name, seen in track.nodes.items() if seen.silent_since is not None}
        if any(name not in silent for _, name in self._answers):
            return True
        # A sibling on the same node that answers shows that our network carries as well as any other worker does.
        reports = [seen.report for name, seen in track.nodes.items() if name in silent and seen.report is not None]
        return any(worker.contact is Contact.ANSWERED for report in reports for worker in report.workers)

    def may_be_canary(self, track: SlotTrack) -> bool:
        """This slot is the one to go first: the canary already, or the longest silent of those that can go."""
        canary = self.board.slots.get(self.canary) if self.canary is not None else None
        if canary is not None and canary.memory.wish is Wish.UP and canary.memory.end is End.NONE:
            return canary is track
        return track.slot.name == min(filter(None, map(self._could_go, self.silent)), default=(None, ""))[1]

    def _could_go(self, slot: str) -> tuple[timedelta, str] | None:
        """Since when a node of *slot* is silent that `decide` may replace now; all others would wait for any other."""
        track = self.board.slots.get(slot)
        if track is None or track.memory.wish is not Wish.UP or track.memory.end is not End.NONE:
            return None
        if not self.board.project(track.slot.project).fresh:
            return None
        marks = [
            seen.silent_since.observed for seen in track.nodes.values() if seen.silent_since and _may_go(track, seen)
        ]
        return (min(marks), slot) if marks else None


def _is_suspect(seen: NodeTrack) -> bool:
    return seen.silent_since is not None and seen.node.state is not NodeState.CREATING


def _may_go(track: SlotTrack, seen: NodeTrack) -> bool:
    past = track.memory.node(seen.node.name)
    if past is None or not past.serves or not past.answered:
        return False
    return seen.node.state in USABLE_STATES and not seen.dark
