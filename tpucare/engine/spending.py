"""Who may create now: leave first, then the create budget of the project. On the deciding thread only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpucare.engine.board import Board
from tpucare.engine.leave import WAITS_FOR_BUDGET, Leave
from tpucare.engine.tracking import SlotTrack
from tpucare.model.actions import Create
from tpucare.model.memory import Memory
from tpucare.planner.placement import Budget, CreateBudget


class Spending:
    """
    The creates that all slots of one moment want, and which of them begin.

    begin: writes the intent of a create and lets it start
    """

    def __init__(self, board: Board, leave: Leave, begin: Callable[[SlotTrack, Create], None]) -> None:
        self._board = board
        self.leave = leave
        self._begin = begin
        self._budgets: dict[str, Budget] = {}

    def spend(self, creates: Mapping[str, Create], now: float) -> None:
        """The create budget of each project goes to the slots that had the least of it, the longest waiting first."""
        shares = {project: budget.shares() for project, budget in self._budgets.items()}
        order: list[tuple[int, float, str]] = []
        for name in creates:
            track = self._board.slots[name]
            track.wants_create_since = now if track.wants_create_since is None else track.wants_create_since
            share = shares[track.slot.project][name] if track.slot.project in shares else 0
            order.append((share, track.wants_create_since, name))
        for _, _, name in sorted(order):
            self._spend_on(self._board.slots[name], creates[name], now)

    def _spend_on(self, track: SlotTrack, create: Create, now: float) -> None:
        try:
            if not self.leave.may_create(track, create.name):
                return
        except Exception as error:
            self._board.set_aside(track, error)
            return
        # Asked for last: a place that is found is reserved, and is lost to all processes if no create follows.
        budget = self._budget_of(track.slot.project)
        free_at = budget.free_at(now)
        if free_at is not None:
            track.decided(WAITS_FOR_BUDGET)
            self._board.wake_at(track, free_at)
            return
        budget.take(track.slot.name, now)
        track.wants_create_since = None
        self._begin(track, create)
        self._board.dirty[track.slot.name] = None

    def answered(self, track: SlotTrack, now: float) -> None:
        """A create of that slot ended."""
        self._budget_of(track.slot.project).answered(track.slot.name, now)

    def restore(self, project: str, memory: Memory) -> None:
        """What the process before this one spent within the last minute."""
        clock = self._board.clock
        wall, now = clock.now(), clock.monotonic()
        ages = [(wall - asked).total_seconds() for asked in memory.recent_creates]
        self._budget_of(project).restore((now - age, "") for age in ages if 0 <= age < 60)

    def _budget_of(self, project: str) -> Budget:
        budget = self._budgets.get(project)
        if budget is None:
            settings = self._board.settings
            shared = settings.budget
            budget = shared(project) if shared is not None else CreateBudget(settings.creates_per_minute)
            self._budgets[project] = budget
        return budget
