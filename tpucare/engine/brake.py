"""
Rule 12, the brake on judgement: many verdicts at once say more about us than about the nodes.

Pure but for its own window of past verdicts; time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta

from tpucare.model.actions import Delete, Effect, Reason, Settle, Stop
from tpucare.model.memory import Memory

WINDOW_SECONDS = 600.0
# Of observed time without that verdict. Longer than a second look at the node takes, shorter than what a new verdict
# takes to come about.
HOLD_LAPSES = timedelta(minutes=1)


@dataclass(slots=True)
class Brake:
    """
    Holds all verdicts of a moment when, with those of the last ten minutes, they are more than
    max(`minimum`, `share` of the live nodes).
    """

    minimum: int = 3
    share: float = 0.2
    _judged: deque[tuple[float, str]] = field(default_factory=deque)

    def counted(self, slots: Collection[str], now: float) -> int:
        """How many slots were or are to be judged, *slots* included."""
        while self._judged and now - self._judged[0][0] > WINDOW_SECONDS:
            self._judged.popleft()
        return len({name for _, name in self._judged} | set(slots))

    def limit(self, live_nodes: int) -> int:
        return max(self.minimum, int(self.share * live_nodes))

    def passed(self, slot: str, now: float) -> None:
        self._judged.append((now, slot))


def is_judged(action: Settle | Effect, memory: Memory) -> bool:
    """Whether *action* is a verdict of ours that the brake has not let pass yet."""
    if isinstance(action, Stop):
        return action.then is Reason.JUDGED
    if not isinstance(action, Delete) or action.reason is not Reason.JUDGED:
        return False
    past, run = memory.node(action.key.name), memory.run
    stopped = run is not None and run.node == action.key.name and run.then_delete == Reason.JUDGED
    # A delete that was asked for has passed the brake; that its node was shown dead lets none pass.
    return not stopped and (past is None or not past.is_being_deleted)
