"""
Watches what fleets cost and how long they may run, so that `decide` knows when one has reached its bounds.

On the engine's thread only. A bound counts by the cloud's clock, and a fleet is taken down once three listings in a row
have shown that it is reached: neither a wrong clock of this machine nor one wrong answer ends a fleet (design, rule
11). Prices, hours and bounds are computed in `planner.budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto

from tpucare.engine.state import EngineState, ProjectView
from tpucare.engine.tracking import SlotTrack
from tpucare.model.causes import Cause
from tpucare.model.evidence import SUPPORTING_OBSERVATIONS, Closed
from tpucare.model.lifecycles import RunState
from tpucare.model.memory import BoundsTold, Memory
from tpucare.model.resources import Bounds, DueWork
from tpucare.model.runs import Phase
from tpucare.model.text import length
from tpucare.planner.budget import (
    NOTHING_SPENT,
    Spending,
    closed_by,
    dearest_of,
    notice_due,
    remaining,
    spending_of,
    spent_unseen,
    told_by_labels,
)
from tpucare.planner.deadline import RunSight, count_end, count_training, draw_line


@dataclass(slots=True)
class _FleetWatch:
    """`reached`: listings in a row that showed the bound as reached. `passes`: of the last one counted."""

    bounds: Bounds
    tracks: list[SlotTrack] = field(default_factory=list)
    closed: Closed | None = None
    reached: int = 0
    passes: int = -1


class BoundsWatch:
    """
    The fleets with a bound in time or money.

    removed: memories of slots of a fleet that are no longer declared
    """

    def __init__(self, state: EngineState, removed: Callable[[str], Iterable[Memory]]) -> None:
        self._state = state
        self._removed = removed
        self._fleets: dict[str, _FleetWatch] = {}
        self._passes = 0
        self._trained: dict[str, tuple[str, datetime, int | None]] = {}

    def closed(self, track: SlotTrack, view: ProjectView) -> Closed | None:
        """The bound that the fleet of this slot has reached."""
        if not track.slot.bounds.is_finite or not view.fresh or not view.knows_cloud_clock:
            return None
        known = self._fleets.get(track.slot.fleet)
        if known is None or known.bounds != known.tracks[0].slot.bounds:
            # Declared since the last listing: a bound that is reached already keeps the first node from being made.
            self._look()
        return self._fleets[track.slot.fleet].closed

    def spent(self, track: SlotTrack) -> float | None:
        """Dollars that the fleet of this slot has cost, if it has a `max_cost`."""
        return self.spending(track.slot.fleet).dollars if track.slot.bounds.max_cost is not None else None

    def spending(self, fleet: str) -> Spending:
        tracks = [track for track in self._state.slots.values() if track.slot.fleet == fleet]
        return self._spending(fleet, tracks)

    def spendings(self) -> dict[str, Spending]:
        """What each fleet has cost that has slots."""
        tracks: dict[str, list[SlotTrack]] = {}
        for track in self._state.slots.values():
            tracks.setdefault(track.slot.fleet, []).append(track)
        return {fleet: self._spending(fleet, its) for fleet, its in tracks.items()}

    def _spending(self, fleet: str, tracks: list[SlotTrack]) -> Spending:
        if not tracks:
            return NOTHING_SPENT
        memories = [*(track.memory for track in tracks), *self._removed(fleet)]
        return spending_of(memories, tracks[0].slot.places, self._state.cloud_now(tracks[0]))

    def watch(self) -> None:
        """Look at each bounded fleet once per listing; decide its slots again where that changes anything."""
        passes = sum(view.passes for view in self._state.projects.values())
        if passes != self._passes:
            self._passes = passes
            self._look()

    def _look(self) -> None:
        found: dict[str, _FleetWatch] = {}
        for track in self._state.slots.values():
            slot = track.slot
            if slot.bounds.deadline is not None:
                self._count_work(track, slot.bounds.deadline)
            if not slot.bounds.is_finite:
                continue
            if slot.fleet not in found:
                known = self._fleets.get(slot.fleet)
                is_same = known is not None and known.bounds == slot.bounds
                found[slot.fleet] = known if known is not None and is_same else _FleetWatch(slot.bounds)
                found[slot.fleet].tracks = []
            found[slot.fleet].tracks.append(track)
        opened = [name for name, past in self._fleets.items() if past.closed is not None and name not in found]
        self._fleets = found
        for fleet, watched in found.items():
            view = self._state.project(watched.tracks[0].slot.project)
            if view.fresh and view.knows_cloud_clock and view.passes != watched.passes:
                watched.passes = view.passes
                self._look_at(fleet, watched, view)
        for fleet in opened:
            self._decide_again(fleet)

    def _look_at(self, fleet: str, watched: _FleetWatch, view: ProjectView) -> None:
        now, bounds = self._state.cloud_now(watched.tracks[0]), watched.bounds
        is_unknown = bounds.max_cost is not None and self._state.store.lost and not self._recover(watched, view, now)
        spending = self._spending(fleet, watched.tracks)
        closed = closed_by(bounds, spending, now)
        watched.reached = watched.reached + 1 if closed is not None else 0
        if closed is not None:
            closed = closed._replace(is_sure=watched.reached >= SUPPORTING_OBSERVATIONS)
        elif is_unknown:
            why = f"the store was lost, so what {fleet} has cost is not known"
            closed = Closed(Cause.COST_UNKNOWN, f"{why}: `tpucare confirm --store` counts it from now on")
        self._notify(fleet, watched, spending, closed, now)
        if closed != watched.closed:
            watched.closed = closed
            self._decide_again(fleet)

    def _count_work(self, track: SlotTrack, deadline: DueWork) -> None:
        """Count what the slot's run trained since the last listing; written where a killed process would forget it."""
        view, name = self._state.project(track.slot.project), track.slot.name
        if not view.fresh or not view.knows_cloud_clock:
            return
        now = self._state.cloud_now(track)
        work = draw_line(track.memory.work, deadline, now)
        state, sight = _training(track)
        if work.since is not None and (state is _Training.OVER or (sight is not None and sight.token != work.token)):
            # What a run did after this process saw it last, nobody knows.
            token, lived_until, step = self._trained.pop(name, ("", now, None))
            seen = token == work.token
            work = count_end(work, lived_until if seen else work.since, step if seen else None)
        if sight is not None:
            work = count_training(work, sight, now)
            self._trained[name] = (sight.token, now, sight.step)
        if work != track.memory.work:
            self._state.update_memory(track, replace(track.memory, work=work))
            self._state.dirty[name] = None

    def _decide_again(self, fleet: str) -> None:
        self._state.decide_again(name for name, track in self._state.slots.items() if track.slot.fleet == fleet)

    def _recover(self, watched: _FleetWatch, view: ProjectView, now: datetime) -> bool:
        """After a lost store: count once what labels tell, and the rest as spent. False: they tell nothing."""
        if any(track.memory.counted_from is not None for track in watched.tracks):
            return True
        nodes = [seen for track in watched.tracks for seen in track.nodes.values()]
        told = told_by_labels(seen.node for seen in nodes)
        if not view.complete or told is None:
            return False
        dearest = dearest_of(watched.tracks[0].slot.places)
        lives = {
            track.slot.name: [
                (past.create_time, past.price if past.price is not None else dearest) for past in track.memory.nodes
            ]
            for track in watched.tracks
        }
        dollars = spent_unseen(told, lives, dearest, now)
        for number, track in enumerate(watched.tracks):
            past = [node if node.billed_from is None else replace(node, billed_from=now) for node in track.memory.nodes]
            memory = replace(track.memory, nodes=tuple(past), counted_from=now)
            # All in one transaction: a process that is killed here counts it once.
            self._state.update_memory(track, replace(memory, cost=dollars) if number == 0 else memory)
        first = watched.tracks[0]
        text = f"{first.slot.fleet}: the store was lost; by its labels it has cost at most {dollars:.2f} dollars"
        self._state.add_event(first, "bound", text, level="warning", dollars=round(dollars, 2))
        return True

    def _notify(
        self, fleet: str, watched: _FleetWatch, spending: Spending, closed: Closed | None, now: datetime
    ) -> None:
        """Tell a day and an hour before a bound, and at it, once for these bounds, over restarts too."""
        left, bounds, first = remaining(watched.bounds, spending, now), watched.bounds, watched.tracks[0]
        is_over = closed is not None and closed.is_sure
        due = notice_due(left) + is_over
        told = first.memory.bounds_told
        is_same = told is not None and (told.until, told.max_cost) == (bounds.until, bounds.max_cost)
        if due <= (told.notices if told is not None and is_same else 0):
            return
        self._state.update_memory(
            first, replace(first.memory, bounds_told=BoundsTold(bounds.until, bounds.max_cost, due))
        )
        if closed is not None and is_over:
            text = f"{closed.why}: its nodes are deleted, and no new one is made"
        else:
            cost = f", {spending.dollars:.2f} dollars spent" if bounds.max_cost is not None else ""
            text = f"ends in {length(left.total_seconds() if left is not None else 0.0)}{cost}, and is then taken down"
        cause = closed.cause.value if closed is not None else ""
        self._state.add_event(first, "bound", f"{fleet}: {text}", level="warning", cause=cause, notice=due)


class _Training(Enum):
    """Whether the slot's last run trains; UNKNOWN: some worker does not answer."""

    TRAINS = auto()
    OVER = auto()
    UNKNOWN = auto()


def _training(track: SlotTrack) -> tuple[_Training, RunSight | None]:
    run = track.memory.run
    if run is None or run.state not in (RunState.LAUNCHING, RunState.RUNNING) or not track.memory.serves(run.node):
        return _Training.OVER, None
    seen = track.nodes.get(run.node)
    report = seen.report if seen is not None else None
    if seen is None or report is None or not report.all_answer:
        return _Training.UNKNOWN, None
    if not all(one.token == run.token and one.alive and one.phase is Phase.RUN for one in report.workers):
        return _Training.OVER, None
    is_its = seen.progress.token == run.token
    step, checkpoint = (seen.progress.step, seen.progress.checkpoint) if is_its else (None, None)
    return _Training.TRAINS, RunSight(run.token, run.job, step, checkpoint)
