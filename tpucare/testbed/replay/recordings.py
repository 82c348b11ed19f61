"""
Recorded capacity of places, cut to a window, and the instants at which it changes.

The instant of a change between two ticks is not in a recording: it is drawn from the seed, so that histories of several
seeds show how much it matters. Everybody who lives one seed meets the same instants.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpucare.model.errors import ConfigError
from tpucare.model.recording import RECORDING_FORMAT
from tpucare.model.text import hint
from tpucare.testbed.emulator.world.capacity import Trace, load_trace, shipped_traces

Changes = tuple[tuple[float, int], ...]
"""Pairs of (seconds, units from then on); the first is at 0."""


@dataclass(frozen=True, slots=True)
class Window:
    """
    What of the recordings is lived, and what of that is judged.

    parts:  spans of the dataset's clock in seconds, lived one after another as if they were one
    judged: seconds at the end of all parts that count; what came before is experience
    """

    parts: tuple[tuple[float, float], ...]
    judged: float

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self.parts)

    @property
    def judged_from(self) -> float:
        return self.seconds - self.judged


WINDOWS = ("whole", "first half", "second half", "second half after the first", "first half after the second")
"""Names of the windows of some recordings; after = the other half is lived before it, as experience."""


def window_of(traces: Iterable[Trace], name: str = "whole", days: float | None = None) -> Window:
    """
    The window of that *name* in the time that all *traces* cover; *days*: only so many of the first ones.

    Raises: ConfigError: they have no common time.
    """
    found = list(traces)
    begin, end = max(trace.begins for trace in found), min(trace.ends for trace in found)
    if end <= begin:
        raise ConfigError(f"the traces of {', '.join(trace.zone for trace in found)} have no common time")
    tick = max(trace.interval.total_seconds() for trace in found)
    if days is not None:
        end = min(end, begin + days * 86400.0)
    middle = begin + int((end - begin) / tick) // 2 * tick
    first, second = (begin, middle), (middle, end)
    parts: dict[str, tuple[tuple[float, float], ...]] = {
        "whole": ((begin, end),),
        "first half": (first,),
        "second half": (second,),
        "second half after the first": (first, second),
        "first half after the second": (second, first),
    }
    chosen = parts[name]
    return Window(chosen, chosen[-1][1] - chosen[-1][0])


def changes_of(trace: Trace, window: Window, seed: int, zone: str = "") -> Changes:
    """The changes of a trace in a window. *zone*: where it stands for another one, whose stream of chance is used."""
    rng = random.Random(f"{seed}/capacity/{zone or trace.zone}/0")
    ticks: list[int] = []
    for begin, end in window.parts:
        ticks.extend(trace.ticks[index] for index in _ticks(trace, begin, end))
    before = ticks[0]
    found = [(0.0, before)]
    for index, amount in enumerate(ticks):
        if amount != before:
            at = (index - 1 + rng.random()) * trace.interval
            found.append((at.total_seconds(), amount))
            before = amount
    return tuple(found)


def _ticks(trace: Trace, begin: float, end: float) -> range:
    tick = trace.interval.total_seconds()
    return range(round((begin - trace.begins) / tick), min(len(trace.ticks), round((end - trace.begins) / tick)))


# --- datasets --------------------------------------------------------------------------------------------------------


def shipped_datasets() -> tuple[str, ...]:
    return tuple(sorted({name.partition("/")[0] for name in shipped_traces()}))


@functools.cache
def load_dataset(name: str) -> Mapping[str, Trace]:
    """
    The traces of a shipped dataset, or of a folder, by zone.

    Raises: ConfigError: neither, or the folder has no trace.
    """
    if name in shipped_datasets():
        found = [load_trace(one) for one in shipped_traces() if one.startswith(f"{name}/")]
        return {trace.zone: trace for trace in found}
    folder = Path(name)
    if not folder.is_dir():
        known = shipped_datasets()
        raise ConfigError(f"--traces {name}: neither a folder nor one of {', '.join(known)}{hint(name, known)}")
    files = sorted(path for path in folder.glob("*.json") if path.name != "manifest.json")
    if not files:
        raise ConfigError(f"--traces {name}: the folder has no file ZONE.json in format {RECORDING_FORMAT}")
    traces = [load_trace(str(path)) for path in files]
    unnamed = next((trace.name for trace in traces if not trace.zone), None)
    if unnamed is not None:
        raise ConfigError(f"trace {unnamed}: names no zone")
    return {trace.zone: trace for trace in traces}


def cheapest_first(traces: Mapping[str, Trace]) -> tuple[str, ...]:
    """Zones by price, then by name; those without a price last."""
    return tuple(sorted(traces, key=lambda zone: (_price(traces[zone]), zone)))


def _price(trace: Trace) -> float:
    return trace.price if trace.price is not None else float("inf")


def at_least(changes: Changes, need: int, until: float) -> list[tuple[float, float]]:
    """Spans (from, to) in which there are at least *need* units."""
    spans: list[tuple[float, float]] = []
    begun: float | None = None
    for at, amount in changes:
        if amount >= need and begun is None:
            begun = at
        elif amount < need and begun is not None:
            spans.append((begun, at))
            begun = None
    if begun is not None and begun < until:
        spans.append((begun, until))
    return spans


def less(changes: Changes, used: Iterable[tuple[float, float, int]]) -> Changes:
    """*changes* without the units that others use: (from, to, units)."""
    steps = [(at, amount - before) for (at, amount), (_, before) in zip(changes, ((0.0, 0), *changes), strict=False)]
    for begin, end, units in used:
        steps += [(begin, -units), (end, units)]
    found: list[tuple[float, int]] = []
    amount = 0
    for at, step in sorted(steps):
        amount += step
        if found and found[-1][0] == at:
            found[-1] = (at, amount)
        else:
            found.append((at, amount))
    return tuple(found)
