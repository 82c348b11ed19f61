"""A person's fleet on recordings: which one stands for each of its zones, and how large its slices are there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpucare.model.errors import ConfigError
from tpucare.model.resources import UNBOUNDED, Job, Slot
from tpucare.model.text import counted, hint
from tpucare.testbed.emulator.world.capacity import Trace
from tpucare.testbed.replay.engine import spot_zones
from tpucare.testbed.replay.recordings import cheapest_first
from tpucare.testbed.simulation.scenario import as_simulated

TRAINING = Job(run="python3 train.py")
"""What every slot runs, whatever its file says: a replay needs no more of it than that it trains."""


@dataclass(frozen=True, slots=True)
class RecordedFleet:
    """
    Slots, and the recording by zone. `notes`: what a person should know about how one stands for the other.

    hosts_per_unit: as in `replays.Replay`
    """

    slots: tuple[Slot, ...]
    traces: Mapping[str, Trace]
    hosts_per_unit: int
    notes: tuple[str, ...]


def on_recordings(
    slots: Sequence[Slot], dataset: str, traces: Mapping[str, Trace], named: Sequence[str]
) -> RecordedFleet:
    """
    *slots* on the *traces* of *dataset*; *named*: `ZONE=TRACE` for zones that the dataset does not have.

    Raises: ConfigError: no recording for a zone, an unknown one, or no spot place.
    """
    moved = tuple(_training(slot) for slot in as_simulated(slots))
    zones = tuple(dict.fromkeys(place.zone for slot in moved for place in slot.places))
    if not all(spot_zones(slot) for slot in moved):
        raise ConfigError("the fleet has no spot or preemptible place: recorded capacity says nothing about it")
    stands = _stand_ins(zones, dataset, traces, named)
    most_hosts = max(place.workers for slot in moved for place in slot.places)
    most_units = min(trace.maximum for trace in stands.values())
    per_unit = max(1, math.ceil(most_hosts / most_units))
    notes = _notes(zones, stands, most_hosts, most_units, per_unit)
    if any(slot.bounds != UNBOUNDED for slot in slots):
        notes.append("bounds of the fleet (max_price, until, ...) are left out: prices and dates are the recording's")
    return RecordedFleet(moved, stands, per_unit, tuple(notes))


def _training(slot: Slot) -> Slot:
    return replace(slot, job=TRAINING, job_problem="", lacks="", elastic=False, bounds=UNBOUNDED)


def _stand_ins(
    zones: Sequence[str], dataset: str, traces: Mapping[str, Trace], named: Sequence[str]
) -> dict[str, Trace]:
    chosen: dict[str, str] = {}
    for word in named:
        zone, equals, trace = word.partition("=")
        if not equals or not zone or not trace:
            raise ConfigError(f"--map {word}: must be ZONE=TRACE, for example {zones[0]}={next(iter(traces))}")
        if zone not in zones:
            raise ConfigError(f"--map {word}: the fleet has no zone {zone}{hint(zone, zones)}")
        if trace not in traces:
            known = ", ".join(traces)
            raise ConfigError(f"--map {word}: {dataset} has no trace {trace}; it has {known}{hint(trace, traces)}")
        chosen[zone] = trace
    found = {zone: chosen.get(zone, zone) for zone in zones}
    missing = [zone for zone in zones if found[zone] not in traces]
    if missing:
        spare = [zone for zone in cheapest_first(traces) if zone not in found.values()] or list(cheapest_first(traces))
        offer = " ".join(f"--map {zone}={spare[index % len(spare)]}" for index, zone in enumerate(missing))
        lacks = f"{dataset} has no capacity of {', '.join(missing)}"
        raise ConfigError(f"{lacks}: say which recording stands for each, for example {offer}")
    return {zone: traces[trace] for zone, trace in found.items()}


def _notes(
    zones: Sequence[str], stands: Mapping[str, Trace], most_hosts: int, most_units: int, per_unit: int
) -> list[str]:
    notes = []
    renamed = [f"{zone} = {stands[zone].zone}" for zone in zones if stands[zone].zone != zone]
    if renamed:
        notes.append(f"stand-ins: {', '.join(renamed)}")
    if per_unit > 1:
        hosts, units = counted(most_hosts, "host"), counted(most_units, "unit")
        notes.append(
            f"a slice of {hosts} is larger than what was recorded (at most {units}): "
            f"a unit of the recording holds {counted(per_unit, 'host')} here"
        )
    used = [stands[zone].zone for zone in zones]
    if twice := sorted({name for name in used if used.count(name) > 1}):
        notes.append(f"{', '.join(twice)} stands for several zones, whose capacity then moves together")
    if unit := "; ".join(sorted({trace.price_unit for trace in stands.values() if trace.price is not None})):
        notes.append(f"a node costs what its recording says ({unit}): compare the figures, they are no bill")
    return notes
