"""How often to save, when the mean life of a node and the cost of a save are known."""

from __future__ import annotations

import math


def daly_interval(save_seconds: float, mean_life_seconds: float) -> float:
    """
    Seconds of training between two saves that waste least: the optimum between saving too often and redoing too much.

    save_seconds:       how long a save holds the training up. Of a save in the background only the part that blocks;
                        but a save has to be complete before the next, so stay above its whole length
    mean_life_seconds:  from the first step of an attempt to its preemption, on average (`tpucare status` shows lives)

    Raises: ValueError: one of them is not positive.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006) 303-312, equation 37.
    """
    if not (save_seconds > 0 and 0 < mean_life_seconds < math.inf):
        raise ValueError(f"both lengths have to be positive: {save_seconds=}, {mean_life_seconds=}")
    if save_seconds >= 2 * mean_life_seconds:
        return mean_life_seconds
    ratio = save_seconds / (2 * mean_life_seconds)
    return math.sqrt(2 * save_seconds * mean_life_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def daly_steps(save_seconds: float, mean_life_seconds: float, step_seconds: float) -> int:
    """
    `daly_interval` in steps, at least 1: the same number on every host, which their clocks would not give.

    Raises: ValueError: a length is not positive.
    """
    if not step_seconds > 0:
        raise ValueError(f"a step takes some time: {step_seconds=}")
    return max(1, round(daly_interval(save_seconds, mean_life_seconds) / step_seconds))
