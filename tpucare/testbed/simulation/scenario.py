"""
What happens in a history, before it happens: slots, a world, a pace, and a list of strikes of fate.

A scenario is drawn from a seed (`draw`), or written down by hand or by the shrinker; it is data, and the same scenario
gives the same history. What each kind of strike does is in `strikes`.
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

PROJECT = "simulated"
SECRET = "s3cr3t-value-that-nobody-may-see"
PERSON_EVERY = 120.0
PERSON_RARELY = 12 * 3600.0
ZONES = ("us-central1-a", "europe-west4-a")
RUNTIME = "tpu-ubuntu2204-base"
# Who comes, by chance: in histories of hours, and in those of a day or more.
PEOPLE: tuple[float | None, ...] = (PERSON_EVERY, PERSON_EVERY, PERSON_EVERY, None)
PEOPLE_LONG: tuple[float | None, ...] = (PERSON_EVERY, PERSON_RARELY, PERSON_RARELY, None)
LONG = 1.0
# The share of slots whose log tells no step, so that checkpoints are all that is told of their progress.
SAVES_ALONE = 0.2
STORM_CARE = Care(
    boot_timeout=timedelta(minutes=20),
    unhealthy_after=timedelta(minutes=40),
    stalled_after=timedelta(minutes=15),
    first_step_timeout=timedelta(minutes=30),
)


@dataclass(frozen=True, slots=True)
class Strike:
    """What befalls: `at` in seconds from the start, `target` a slot, a zone or nothing, `length` in seconds"""

    at: float
    kind: str
    target: str = ""
    length: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """
    How closely time is followed. Seconds, see `engine.state.Settings`; `grain`, see `time.VirtualExecutor`.

    close: effects begin late and every step is looked at, slot by slot, for wake-ups that were missed.
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


# As the daemon beats, for storms of hours; for those of weeks, where a daemon that is killed every half hour still has
# to see how far its runs come; and what is needed to get many slots through months, where workers tell by themselves.
CLOSE = Pace(5.0, 1.0, 15.0, 1.0)
WEEKS = Pace(30.0, 30.0, 240.0, 30.0, grain=10.0, close=False)
MONTHS = Pace(30.0, 30.0, 4 * 3600.0, 60.0, grain=10.0, close=False)


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    Everything that a history follows from. `days` of weather come before the calm in which it is judged.

    person: how often somebody comes and looks, in seconds; None: nobody ever does. Who comes more rarely than
        PERSON_EVERY comes in the weather, too
    saves_alone: slots whose progress is told by checkpoints alone
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
        """Only these slots, and what befalls them or everybody."""
        wanted = set(names)
        every = {slot.name for slot in self.slots}
        strikes = tuple(one for one in self.strikes if one.target not in every or one.target in wanted)
        return replace(self, slots=tuple(slot for slot in self.slots if slot.name in wanted), strikes=strikes)

    def story(self) -> dict[str, Any]:
        """For people and files: what is needed to tell it again by `tpucare simulate --story FILE`."""
        return {
            "seed": self.seed,
            "days": self.days,
            "level": self.level,
            "slots": [slot.name for slot in self.slots],
            "pace": "close" if self.pace.close else "months",
            "strikes": [asdict(one) for one in self.strikes],
        }


def told_again(story: Mapping[str, Any], scenario: Scenario) -> Scenario:
    """*scenario* with what a written story says of it. Raises: ConfigError: no story."""
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
    Gangs with two zones and with one; single hosts: some with two places, one each of other terms, one with six, one
    whose runs a user's function starts; two that work for a sweep.
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
    """Three ways of asking, in each of two zones."""
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
    """Slots of a fleet as declared, in the project that is simulated."""
    return tuple(replace(slot, project=PROJECT) for slot in slots)


def world_of(
    level: str, rng: random.Random, zones: Iterable[str] = ZONES, *, lifetime: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Zones in which things go wrong by themselves, as often as *level* says; chance makes each world its own."""
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
    """As many nodes of each kind as have their first place there, and not one more: a dead node holds its share."""
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
    The scenario of *seed*. Every kind of fault has a stream of chance of its own: one more leaves the others alone.

    world: as in a file of `tpucare emulator`; drawn where none is given
    """
    zones = sorted({place.zone for slot in slots for place in slot.places})
    drawn = world_of(level, random.Random(f"{seed}/world"), zones, lifetime=lifetime)
    if LEVELS[level] and random.Random(f"{seed}/quotas").random() < 0.5:
        drawn["quotas"] = exact_quotas(slots)
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
    """Between the bounds, short ones more often than long ones."""
    shortest, longest = bounds
    return shortest * (longest / shortest) ** rng.random() if shortest else 0.0
