"""
Work that is due at an instant: spot capacity while that suffices, on-demand where it does not.

Pure. The policy follows Uniform Progress (Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines",
NSDI 2024). A straight line leads from the work done when the deadline was declared to all of it at the deadline. Well
ahead of the line a slot waits for the cheapest spot places, and as long as it is not far behind, for any; then it takes
on-demand capacity where no spot place is open; once the time left only just suffices, it stays on on-demand. A node
that serves is kept: spot capacity is left only for that last reason, on-demand capacity now and then, to look for spot
capacity, while there is time for that.

Work is hours of training that no later run repeats, by the cloud's clock. What a lost run did after its last checkpoint
does not count; the first step of the next run tells what was really kept. A job that tells neither steps nor
checkpoints counts by the time that it runs.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from tpucare.model.evidence import Case, Timers
from tpucare.model.memory import Memory, Work
from tpucare.model.resources import DueWork
from tpucare.model.text import length
from tpucare.planner.markets import LOST_HOURS, PRIOR_STEP_HOURS

HOUR = timedelta(hours=1)
# What a change of the node costs: the way to the first step, and the work since the last checkpoint.
CHANGE = (PRIOR_STEP_HOURS + LOST_HOURS) * HOUR
# As in the paper: the last switch comes two changes before it would be too late.
NET = 2 * CHANGE
# A look for spot capacity that fails costs two changes.
LOOK = 2 * CHANGE
# So much of the time that may be lost is lost waiting for spot capacity. The paper waits for none once behind the line;
# with several places, spot capacity comes back within minutes, and an hour on demand costs as much as five of them.
BEHIND_SHARE = 0.5
# On-demand capacity is kept for so long, so that a slot that finds no spot capacity trains most of its time.
STINT = timedelta(hours=1)
# A process that is killed forgets no more work than this.
WRITTEN_EVERY = timedelta(minutes=10)
# Spot capacity is taken again just after a save.
SAVED_WITHIN = timedelta(minutes=3)


class Tier(StrEnum):
    """The capacity that the next node of a slot may use."""

    SPOT = "spot"
    EITHER = "spot, else on-demand"
    ON_DEMAND = "on-demand"


class WorkPace(NamedTuple):
    """
    How the work of a slot stands at one instant.

    done, due: hours done, and hours of the line then    slack: time that may be lost before on-demand has to be used
    """

    tier: Tier
    why: str
    done: timedelta
    due: timedelta
    slack: timedelta

    @property
    def ahead(self) -> timedelta:
        return self.done - self.due

    @property
    def is_well_ahead(self) -> bool:
        """By more than a change costs: there is time to wait for the cheapest spot places."""
        return self.tier is Tier.SPOT and self.ahead > CHANGE


# --- work done --------------------------------------------------------------------------------------------------------


class RunSight(NamedTuple):
    """A run that trains on every worker, with the newest step and checkpoint that it told."""

    token: str
    job: str
    step: int | None
    checkpoint: int | None


def hours_done(work: Work, now: datetime) -> timedelta:
    return work.hours * HOUR + max(timedelta(), now - (work.since or now))


def count_training(work: Work, sight: RunSight, now: datetime) -> Work:
    """Work after *sight*; the same object where nothing has to be written."""
    if sight.job and sight.job != work.job:
        work = replace(work, job=sight.job, hours=0.0, reached=0.0, since=None, step=None, saved=None, saved_hours=0.0)
    if work.since is None:
        if work.step is not None and sight.step is None:
            # It restores; its first step tells how much work was kept.
            return work
        hours = work.hours
        if work.step and sight.step is not None:
            hours = work.reached * min(1.0, sight.step / work.step)
        return replace(work, hours=hours, begun=hours, since=now, token=sight.token, step=sight.step)
    done, counted = hours_done(work, now) / HOUR, now - work.since
    if sight.checkpoint is not None and (work.saved is None or sight.checkpoint > work.saved):
        work = replace(work, saved=sight.checkpoint, saved_hours=done)
    elif counted < WRITTEN_EVERY:
        return work
    return replace(work, hours=done, since=now, step=sight.step if sight.step is not None else work.step)


def count_end(work: Work, lived_until: datetime, step: int | None) -> Work:
    """Work after the run that counted has ended, which was last seen training at *lived_until*, at that step."""
    if work.since is None:
        return work
    reached = hours_done(work, lived_until) / HOUR
    kept = min(reached, work.saved_hours) if work.saved is not None else reached
    return replace(work, hours=kept, reached=reached, since=None, step=step if step is not None else work.step)


def draw_line(work: Work | None, deadline: DueWork, now: datetime) -> Work:
    """Work with the line of *deadline*: a new one begins now, at the work done."""
    work = work or Work()
    if work.line_from is not None and (work.hours_of_work, work.by) == (deadline.hours_of_work, deadline.by):
        return work
    begun = hours_done(work, now) / HOUR
    return replace(work, hours_of_work=deadline.hours_of_work, by=deadline.by, line_from=now, line_hours=begun)


# --- the tier of the next node ----------------------------------------------------------------------------------------


def pace_of(case: Case) -> WorkPace | None:
    """How the slot's work stands, by the cloud's clock; None: it has no deadline. Asks to decide again in time."""
    deadline, cloud = case.slot.bounds.deadline, case.timers.now.cloud
    if deadline is None or cloud is None:
        return None
    work = draw_line(case.memory.work, deadline, cloud)
    found = pace(work, deadline, cloud)
    _decide_again(found, work, deadline, case.timers)
    return found


def pace(work: Work, deadline: DueWork, now: datetime) -> WorkPace:
    """How *work* stands against the line of *deadline*."""
    assert work.line_from is not None
    total, done, left = deadline.hours_of_work * HOUR, hours_done(work, now), deadline.by - now
    span = deadline.by - work.line_from
    share = min(1.0, (now - work.line_from) / span) if span > timedelta() else 1.0
    due = work.line_hours * HOUR + (total - work.line_hours * HOUR) * share
    slack = left - (total - done) - NET
    if done >= total:
        tier, why = Tier.SPOT, "its hours of work are done"
    elif left <= timedelta():
        tier, why = Tier.SPOT, "the deadline is over"
    elif slack <= timedelta():
        tier = Tier.ON_DEMAND
        why = f"{length(total - done)} of work are left, and {length(left)} until the deadline"
    else:
        where = "ahead of" if done >= due else "behind"
        why = f"{length(abs(done - due))} of work {where} the line of the deadline"
        tier = Tier.EITHER if due - done > BEHIND_SHARE * slack else Tier.SPOT
    return WorkPace(tier, why, done, due, slack)


def _decide_again(found: WorkPace, work: Work, deadline: DueWork, timers: Timers) -> None:
    """Set the wake-up at the next instant at which the tier may change."""
    assert work.line_from is not None
    assert timers.now.cloud is not None
    now, total = timers.now.cloud, deadline.hours_of_work * HOUR
    timers.reached(deadline.by)
    if found.slack > timedelta():
        timers.reached(now + found.slack)
    if work.since is None and found.tier is Tier.SPOT:
        # While nothing trains, the line moves on and the slack shrinks.
        slope = (total - work.line_hours * HOUR) / max(deadline.by - work.line_from, timedelta(seconds=1))
        if found.is_well_ahead and slope > 0:
            timers.reached(now + (found.ahead - CHANGE) / slope + timedelta(seconds=1))
        timers.reached(now + (found.ahead + BEHIND_SHARE * found.slack) / (slope + BEHIND_SHARE))
    elif found.done - work.begun * HOUR < STINT:
        timers.reached(now + STINT - (found.done - work.begun * HOUR))


def may_return(found: WorkPace, memory: Memory) -> bool:
    """
    Whether an on-demand node may be left for spot capacity: it trained for STINT, the work was just saved, and there is
    time for a change that fails.
    """
    work = memory.work
    if work is None or work.since is None or found.tier is Tier.ON_DEMAND or found.slack < LOOK:
        return False
    if found.done - work.begun * HOUR < STINT:
        return False
    return work.saved is None or found.done - work.saved_hours * HOUR <= SAVED_WITHIN


def has_to_leave_spot(found: WorkPace) -> bool:
    """Whether a spot node is left for on-demand capacity: what a change costs is still there, and no more than that."""
    return found.tier is Tier.ON_DEMAND and found.slack + CHANGE >= timedelta()
