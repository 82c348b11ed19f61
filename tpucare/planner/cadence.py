"""
How often a run should save: Daly's interval, from the life of nodes where the slot gets them and the cost of a save.

Pure. The advice goes to the run's file TPUCARE_CADENCE with a probe, and changes while the run lives; whether to follow
it is the run's business (`tpucare.training.Saves`). What it wins is an estimate by the model of Daly's paper: losses
come at random with a mean life, and cost the training since the last save.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpucare.model.resources import SaveBounds
from tpucare.model.text import length
from tpucare.training.cadence import daly_interval

# A save in the background blocks for the copy off the device, some seconds; one that waits for a bucket, half a minute.
SAVE_COST_UNKNOWN = timedelta(seconds=10)
# What a training without advice is usually set to, to compare with.
USUAL_INTERVAL = timedelta(minutes=30)
# Near the best interval the loss is flat: a smaller change would win less than a minute a day.
NEWS = 0.1


@dataclass(frozen=True, slots=True)
class Cadence:
    """An interval of saves, and what it follows from. `is_measured`: the run told the cost of its saves."""

    interval: timedelta
    node_life: timedelta
    save_cost: timedelta
    is_measured: bool = False

    def lost_minutes_a_day(self, interval: timedelta | None = None) -> float:
        """Expected minutes of a day that saves and repeated steps take; *interval*: instead of the advised one."""
        return 1440.0 * _lost_share(interval or self.interval, self.node_life, self.save_cost)


def save_interval(node_life: timedelta, save_cost: timedelta, bounds: SaveBounds) -> timedelta:
    """Training between two saves that loses least, within *bounds*. Both lengths are positive."""
    best = timedelta(seconds=daly_interval(save_cost.total_seconds(), node_life.total_seconds()))
    return min(max(best, bounds.shortest), bounds.longest)


def advise_saves(node_life: timedelta, save_seconds: float, bounds: SaveBounds) -> Cadence:
    """The advice for a run. `save_seconds`: measured cost of a save; 0: not known."""
    cost = timedelta(seconds=save_seconds) or SAVE_COST_UNKNOWN
    return Cadence(save_interval(node_life, cost, bounds), node_life, cost, save_seconds > 0)


def differs(told: float | None, seconds: float) -> bool:
    """Whether *seconds* is news beside *told*."""
    return not told or abs(seconds - told) > NEWS * told


def cadence_text(cadence: Cadence, now: datetime) -> str:
    """Content of the file TPUCARE_CADENCE."""
    fields = {
        "interval_seconds": round(cadence.interval.total_seconds(), 1),
        "node_life_seconds": round(cadence.node_life.total_seconds()),
        "save_seconds": round(cadence.save_cost.total_seconds(), 3),
        "since": now.isoformat(timespec="seconds"),
    }
    return json.dumps(fields)


def describe_cadence(cadence: Cadence, before: timedelta | None = None) -> str:
    """A line for people: the interval, its reasons, and what it wins beside the interval *before*, or a usual one."""
    other = before or USUAL_INTERVAL
    cost = f"a save blocks {cadence.save_cost.total_seconds():.3g} s" + ("" if cadence.is_measured else " (assumed)")
    lost, at_other = cadence.lost_minutes_a_day(), cadence.lost_minutes_a_day(other)
    return (
        f"save each {length(cadence.interval)}: nodes live {length(cadence.node_life)}, {cost}; about {lost:.0f} min "
        f"a day lost, with saves each {length(other)} {at_other:.0f} min"
    )


def _lost_share(interval: timedelta, node_life: timedelta, save_cost: timedelta) -> float:
    """
    Share of the time that is no progress.

    Source: J. T. Daly (`training.cadence`), equation 20: a segment, an interval and its save, takes
    life x (e^(segment / life) - 1) on average; the restart is left out.
    """
    life = node_life.total_seconds()
    segment = (interval + save_cost).total_seconds() / life
    return 1.0 - interval.total_seconds() / (life * math.expm1(segment)) if segment < 700 else 1.0
