"""
The input of a history: slots, a world, a pace, and a list of strikes (faults with their times and targets).

A scenario is drawn from a seed (`draw`), or written by hand or by the shrinker; it is data, and the same scenario gives
the same history. `strikes` implements each kind of strike.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from tpucare.engine.engine import Settings
from tpucare.integrations.wandb.rules import SWEEP_VARIABLE
from tpucare.model.errors import ConfigError
from tpucare.model.resources import Care, Job, OnExit, Place, Provisioning, Slot
from tpucare.testbed.emulator.world.capacity import CAPACITY_TIERS
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.simulation.faults import FAULTS, LEVELS, Span
from tpucare.testbed.simulation.queues import queue_world, uses_queue

PROJECT = "simulated"
SECRET = "s3cr3t-value-that-nobody-may-see"
PERSON_EVERY = 120.0
PERSON_RARELY = 12 * 3600.0
ZONES = ("us-central1-a", "europe-west4-a")
RUNTIME = "tpu-ubuntu2204-base"
# How often a person comes, drawn by chance: in histories of hours, and in those of a day or more.
PEOPLE: tuple[float | None, ...] = (PERSON_EVERY, PERSON_EVERY, PERSON_EVERY, None)
PEOPLE_LONG: tuple[float | None, ...] = (PERSON_EVERY, PERSON_RARELY, PERSON_RARELY, None)
LONG = 1.0
# The share of slots whose logs have no steps, so that only checkpoints show their progress.
SAVES_ALONE = 0.2
STORM_CARE = Care(
    boot_timeout=timedelta(minutes=20),
    unhealthy_after=timedelta(minutes=40),
    stalled_after=timedelta(minutes=15),
    first_step_timeout=timedelta(minutes=30),
)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault: `at` in seconds from the start, `target` a slot, a zone or empty, `length` in seconds."""

    at: float
    kind: str
    target: str = ""
    length: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """
    How closely time is followed. Seconds, see `engine.state.Settings`; `grain`, see `time.VirtualExecutor`.

    close: effects begin late, and each step checks a slot for a missed wake-up.
    """

    poll: float
    fast_poll: float
    probe: float
    fast_probe: float
    grain: float = 0.0
    close: bool = True

    @property
    def settings(self) -> Settings:
        return Settings(poll=self.poll, fast_poll=self.fast_poll, probe=self.probe, fast_probe=self.fast_probe)


# The daemon's own pace, for storms of hours; one for storms of weeks, in which a daemon that is killed every half hour
# must still see the progress of its runs; and one for many slots over months, where workers report by themselves.
CLOSE = Pace(5.0, 1.0, 15.0, 1.0)
WEEKS = Pace(30.0, 30.0, 240.0, 30.0, grain=10.0, close=False)
MONTHS = Pace(30.0, 30.0, 4 * 3600.0, 60.0, grain=10.0, close=False)


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    The complete input of a history: `days` with faults, then the calm.

    person: seconds between the visits of a person; None: no visits. One who comes more rarely than PERSON_EVERY comes
        before the calm too
    saves_alone: slots whose progress only checkpoints show
    """

    seed: int
    slots: tuple[Slot, ...]
    world: Mapping[str, Any]
    days: float
    pace: Pace
    strikes: tuple[Strike, ...] = ()
    level: str = "none"
    person: float | None = PERSON_EVERY
    saves_alone: frozenset[str] = frozenset()

    @property
    def config(self) -> WorldConfig:
        return WorldConfig.model_validate(self.world)

    def without(self, strikes: Iterable[int]) -> Scenario:
        left_out = set(strikes)
        kept = tuple(one for index, one in enumerate(self.strikes) if index not in left_out)
        return replace(self, strikes=kept)

    def of_slots(self, names: Iterable[str]) -> Scenario:
        """Only these slots, and the strikes on them or on all slots."""
        wanted = set(names)
        every = {slot.name for slot in self.slots}
        strikes = tuple(one for one in self.strikes if one.target not in every or one.target in wanted)
        return replace(self, slots=tuple(slot for slot in self.slots if slot.name in wanted), strikes=strikes)

    def story(self) -> dict[str, Any]:
        """The scenario as data for `tpucare simulate --story FILE`."""
        return {
            "seed": self.seed,
            "days": self.days,
            "level": self.level,
            "slots": [slot.name for slot in self.slots],
            "pace": "close" if self.pace.close else "months",
            "strikes": [asdict(one) for one in self.strikes],
        }


def told_again(story: Mapping[str, Any], scenario: Scenario) -> Scenario:
    """*scenario* with the changes in a written story. Raises: ConfigError: not a story."""
    try:
        strikes = tuple(Strike(**one) for one in story["strikes"])
        kept = scenario.of_slots(story["slots"])
        days = float(story["days"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a story: {error}") from error
    unknown = sorted({one.kind for one in strikes} - set(FAULTS))
    if unknown or not kept.slots:
        raise ConfigError(f"not a story of these slots: {', '.join(unknown) or 'none of its slots is declared'}")
    return replace(kept, strikes=strikes, days=days)


# --- drawing one -----------------------------------------------------------------------------------------------------


def place(zone: str, kind: str, workers: int, tier: Provisioning = Provisioning.SPOT) -> Place:
    return Place(zone, kind, tier, RUNTIME, workers=workers)


STORM_JOB = Job(run="python3 train.py", secrets=("TOKEN",))
FOREIGN_JOB = Job(run="", foreign=True)
SWEEP_JOB = replace(STORM_JOB, run="exec wandb agent", env={SWEEP_VARIABLE: "lab/storms/sweep"})
FOREIGN_CARE = replace(STORM_CARE, on_exit=OnExit.RESTART)


def slots_of(fleet: str, count: int, *places: Place, care: Care, job: Job = STORM_JOB) -> tuple[Slot, ...]:
    return tuple(Slot(f"{fleet}-{index}", fleet, PROJECT, places, job, care) for index in range(count))


def storm_slots() -> tuple[Slot, ...]:
    """
    Gangs with two zones and with one; single hosts: some with two places, one each of other tiers, one with six places,
    one whose runs a user's function starts; two that work for a sweep.
    """
    us, eu = ZONES
    return (
        *slots_of("pod", 3, place(us, "v3-32", 4), place(eu, "v3-32", 4), care=STORM_CARE),
        *slots_of("solo", 2, place(eu, "v3-32", 4), care=STORM_CARE),
        *slots_of("mini", 3, place(us, "v2-8", 1), place(eu, "v2-8", 1), care=STORM_CARE),
        *slots_of("old", 1, place(us, "v2-8", 1, Provisioning.PREEMPTIBLE), care=STORM_CARE),
        *slots_of("paid", 1, place(us, "v2-8", 1, Provisioning.ON_DEMAND), care=STORM_CARE),
        *slots_of("wide", 1, *_many_places(), care=STORM_CARE),
        *slots_of("door", 1, place(us, "v2-8", 1), place(eu, "v2-8", 1), care=FOREIGN_CARE, job=FOREIGN_JOB),
        *slots_of("swarm", 2, place(us, "v2-8", 1), place(eu, "v2-8", 1), care=STORM_CARE, job=SWEEP_JOB),
    )


def _many_places() -> Iterable[Place]:
    """Three tiers in each of two zones."""
    for kind, tier in (
        ("v2-8", Provisioning.SPOT),
        ("v3-8", Provisioning.SPOT),
        ("v2-8", Provisioning.PREEMPTIBLE),
    ):
        yield from (place(zone, kind, 1, tier) for zone in ZONES)


def month_slots(count: int) -> tuple[Slot, ...]:
    us, eu = ZONES
    return slots_of("farm", count, place(us, "v2-8", 1), place(eu, "v2-8", 1), care=Care())


def as_simulated(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Slots of a declared fleet, moved to the simulated project."""
    return tuple(replace(slot, project=PROJECT) for slot in slots)


def world_of(
    level: str, rng: random.Random, zones: Iterable[str] = ZONES, *, lifetime: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Zones with faults of their own, at the rates of *level*; other settings are drawn too."""
    share = LEVELS[level]
    some = rng.random
    latencies = {
        "create_single": {"median": 100 + 100 * some(), "p95": 400 + 800 * some() * share},
        "list_lag_share": 0.1 + 0.4 * some() * share,
        "boot_early_share": some(),
        "operation_lingers_share": 0.02 + 0.2 * share,
    }
    calls = {"unavailable": 0.002 + 0.01 * share, "internal": 0.005 * share}
    raw: dict[str, Any] = {
        "zones": {zone: {"accelerators": ["*"], "create_errors": 0.02 * share} for zone in zones},
        "latencies": latencies,
        "faults": {"calls": calls, "delete_stuck": 0.05 * share, "failed_create_left": 0.2 * share},
        "preemption": {"silent_share": 0.1 + 0.3 * share},
        "audit_reads": False,
    }
    if lifetime is not None:
        raw["preemption"]["lifetime"] = dict(lifetime)
    return raw


def exact_quotas(slots: Iterable[Slot]) -> list[dict[str, Any]]:
    """Quotas for exactly as many nodes of each kind as have their first place there: a dead node uses its share."""
    places = [slot.places[0] for slot in slots]
    firsts = Counter((place.zone, place.accelerator_type, CAPACITY_TIERS[place.provisioning]) for place in places)
    return [
        {"zone": zone, "types": [kind], "tier": tier, "unit": "nodes", "limit": count}
        for (zone, kind, tier), count in sorted(firsts.items())
    ]


def draw(
    seed: int,
    slots: tuple[Slot, ...],
    *,
    days: float,
    level: str,
    pace: Pace,
    world: Mapping[str, Any] | None = None,
    lifetime: Mapping[str, str] | None = None,
) -> Scenario:
    """
    The scenario of *seed*. Every kind of fault has a random stream of its own: a new kind does not shift others.

    world: as in a file of `tpucare emulator`; None: drawn
    """
    zones = sorted({place.zone for slot in slots for place in slot.places})
    drawn = world_of(level, random.Random(f"{seed}/world"), zones, lifetime=lifetime)
    if LEVELS[level] and random.Random(f"{seed}/quotas").random() < 0.5:
        drawn["quotas"] = exact_quotas(slots)
    if any(map(uses_queue, slots)):
        drawn["queue"] = queue_world(seed, LEVELS[level])
    chosen = dict(world) if world is not None else drawn
    chosen["audit_reads"] = False
    strikes = [one for kind in FAULTS for one in _drawn(seed, kind, slots, chosen["zones"], days, level)]
    strikes.sort(key=lambda one: (one.at, one.kind, one.target))
    person = (
        random.Random(f"{seed}/person").choice(PEOPLE_LONG if days >= LONG else PEOPLE) if LEVELS[level] else PEOPLE[0]
    )
    telling = random.Random(f"{seed}/telling")
    quiet = frozenset(slot.name for slot in slots if LEVELS[level] and telling.random() < SAVES_ALONE)
    return Scenario(seed, slots, chosen, days, pace, tuple(strikes), level, person, quiet)


def _drawn(
    seed: int, kind: str, slots: tuple[Slot, ...], zones: Iterable[str], days: float, level: str
) -> Iterable[Strike]:
    fault, rng = FAULTS[kind], random.Random(f"{seed}/{kind}")
    rate = fault.rates[level]
    names = {
        Span.SLOT: [slot.name for slot in slots if fault.fits(slot)],
        Span.ZONE: sorted(zones),
        Span.ALL: [""],
    }[fault.span]
    each = rate * (len(names) if fault.span is Span.SLOT else 1)
    at = rng.expovariate(each) if each and names else days
    while at < days:
        yield Strike(round(at * 86400.0, 3), kind, rng.choice(names), round(_length(fault.length, rng), 1))
        at += rng.expovariate(each)


def _length(bounds: tuple[float, float], rng: random.Random) -> float:
    """A length between the bounds; short ones are more frequent."""
    shortest, longest = bounds
    return shortest * (longest / shortest) ** rng.random() if shortest else 0.0
