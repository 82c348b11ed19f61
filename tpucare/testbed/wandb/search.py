"""
The points of a sweep: a grid in its written order, or seeded random draws. Pure.

Shape of a sweep's `parameters`: https://docs.wandb.ai/models/sweeps/sweep-config-keys. `bayes` draws at random here: no
model is fitted to the results of runs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

Point = dict[str, Any]
Space = Mapping[str, Mapping[str, Any]]


class BadSweep(Exception):
    """The configuration of a sweep is wrong; the text names the key."""


def points(config: Mapping[str, Any], rng: random.Random) -> Iterator[Point]:
    """
    Every point of the sweep, in the order in which agents get them; without an end for random search.

    Raises: BadSweep: at the first point.
    """
    space = config.get("parameters")
    if not isinstance(space, Mapping) or not space:
        raise BadSweep("parameters: is missing")
    if config.get("method") == "grid":
        yield from _grid(space)
        return
    while True:
        yield {name: _draw(name, parameter, rng) for name, parameter in space.items()}


def expected_runs(config: Mapping[str, Any]) -> int | None:
    """The number of runs of a sweep; None where only `run_cap` or a person ends it."""
    cap = config.get("run_cap")
    size: int | None = None
    if config.get("method") == "grid":
        size = math.prod(len(_choices(name, one)) for name, one in config.get("parameters", {}).items())
    known = [number for number in (size, cap) if isinstance(number, int)]
    return min(known) if known else None


def check_sweep(config: Mapping[str, Any]) -> None:
    """Raises: BadSweep."""
    if config.get("method") not in ("grid", "random", "bayes"):
        raise BadSweep(f"method: {config.get('method')!r} is not one of grid, random, bayes")
    next(points(config, random.Random(0)), None)


def _grid(space: Space) -> Iterator[Point]:
    names = list(space)
    for values in itertools.product(*(_choices(name, space[name]) for name in names)):
        yield dict(zip(names, values, strict=True))


def _choices(name: str, parameter: Mapping[str, Any]) -> list[Any]:
    if "value" in parameter:
        return [parameter["value"]]
    if isinstance(values := parameter.get("values"), list) and values:
        return values
    if isinstance(nested := parameter.get("parameters"), Mapping):
        return list(_grid(nested))
    if isinstance(parameter.get("min"), int) and isinstance(parameter.get("max"), int):
        return list(range(parameter["min"], parameter["max"] + 1))
    raise BadSweep(f"parameters.{name}: a grid needs value, values, or whole numbers min and max")


def _draw(name: str, parameter: Mapping[str, Any], rng: random.Random) -> Any:
    if "value" in parameter:
        return parameter["value"]
    if isinstance(values := parameter.get("values"), list) and values:
        return rng.choices(values, parameter.get("probabilities"))[0]
    if isinstance(nested := parameter.get("parameters"), Mapping):
        return {key: _draw(f"{name}.{key}", one, rng) for key, one in nested.items()}
    try:
        return _number(str(parameter.get("distribution", "")), parameter, rng)
    except (KeyError, TypeError, ValueError) as error:
        raise BadSweep(f"parameters.{name}: {type(error).__name__}: {error}") from None


def _number(distribution: str, parameter: Mapping[str, Any], rng: random.Random) -> float:
    kind = distribution.removeprefix("q_").removeprefix("inv_")
    if kind == "int_uniform" or (not kind and isinstance(parameter["min"], int) and isinstance(parameter["max"], int)):
        return rng.randint(parameter["min"], parameter["max"])
    if kind in ("", "uniform"):
        value = rng.uniform(parameter["min"], parameter["max"])
    elif kind == "log_uniform_values":
        value = math.exp(rng.uniform(math.log(parameter["min"]), math.log(parameter["max"])))
    elif kind == "log_uniform":
        value = math.exp(rng.uniform(parameter["min"], parameter["max"]))
    elif kind in ("normal", "log_normal"):
        value = rng.gauss(parameter.get("mu", 0.0), parameter.get("sigma", 1.0))
        value = math.exp(value) if kind == "log_normal" else value
    elif kind == "beta":
        value = rng.betavariate(parameter["a"], parameter["b"])
    else:
        raise ValueError(f"this server does not know the distribution {distribution!r}")
    step = parameter.get("q", 1) if distribution.startswith("q_") else None
    return round(value / step) * step if step else value
