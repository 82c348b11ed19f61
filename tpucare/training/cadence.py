"""The best interval of saves, from the mean life of a node and the cost of a save."""

from __future__ import annotations

import math


def daly_interval(save_seconds: float, mean_life_seconds: float) -> float:
    """
    Seconds of training between two saves that waste the least time, both by saving and by repeating lost steps.

    save_seconds:       time that a save blocks the training; of a save in the background only its blocking part, but
                        then keep the interval above its whole duration, since it has to end before the next one begins
    mean_life_seconds:  mean time from the first step of an attempt to its preemption (`tpucare status` shows lives)

    Raises: ValueError: a duration is not positive.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006) 303-312, equation 37.
    """
    if not (save_seconds > 0 and 0 < mean_life_seconds < math.inf):
        raise ValueError(f"both durations have to be positive: {save_seconds=}, {mean_life_seconds=}")
    if save_seconds >= 2 * mean_life_seconds:
        return mean_life_seconds
    ratio = save_seconds / (2 * mean_life_seconds)
    return math.sqrt(2 * save_seconds * mean_life_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def daly_steps(save_seconds: float, mean_life_seconds: float, step_seconds: float) -> int:
    """
    `daly_interval` in steps, at least 1. Steps are the same on every host, unlike the time on their clocks.

    Raises: ValueError: a duration is not positive.
    """
    if not step_seconds > 0:
        raise ValueError(f"the duration of a step has to be positive: {step_seconds=}")
    return max(1, round(daly_interval(save_seconds, mean_life_seconds) / step_seconds))
