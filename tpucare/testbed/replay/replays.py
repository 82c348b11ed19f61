"""Replays: histories of slots on recorded capacity, by the engine or by a policy beside it; many over processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpucare.model.resources import Care, Provisioning, Slot
from tpucare.testbed.emulator.world.capacity import CAPACITY_TIERS, Trace
from tpucare.testbed.replay.account import Account, Saving, SlotLog, settle
from tpucare.testbed.replay.engine import live_with_engine
from tpucare.testbed.replay.policies import POLICIES, PolicyLife
from tpucare.testbed.replay.recordings import Changes, Window, changes_of, load_dataset, window_of
from tpucare.testbed.simulation.campaign import workers
from tpucare.testbed.simulation.scenario import place, slots_of

ENGINE = "tpucare"
HALF_HOURLY = Saving()


@dataclass(frozen=True, slots=True)
class Replay:
    """
    All that one history needs, so that it can run in another process.

    traces:         the recording that stands for each zone of the slots
    hosts_per_unit: how many hosts of a slice a unit of the recordings holds
    window, days:   see `recordings.window_of`
    policy:         ENGINE, or one of `policies.POLICIES`
    """

    slots: tuple[Slot, ...]
    traces: Mapping[str, Trace]
    seed: int = 1
    hosts_per_unit: int = 1
    window: str = "whole"
    days: float | None = None
    policy: str = ENGINE
    first_step_seconds: float = 12 * 60.0
    saving: Saving = HALF_HOURLY

    @property
    def zones(self) -> tuple[str, ...]:
        """In declared order."""
        return tuple(dict.fromkeys(place.zone for slot in self.slots for place in slot.places))

    def lived_window(self) -> Window:
        return window_of((self.traces[zone] for zone in self.zones), self.window, self.days)

    def capacity(self, window: Window) -> dict[str, Changes]:
        """Hosts that there are in *window*, by zone."""
        found = {}
        for zone in self.zones:
            changes = changes_of(self.traces[zone], window, self.seed, zone)
            found[zone] = tuple((at, amount * self.hosts_per_unit) for at, amount in changes)
        return found


def live_replay(replay: Replay) -> Account:
    """Live it, and settle the account."""
    window = replay.lived_window()
    capacity = replay.capacity(window)
    return settle(
        _live(replay, capacity, window.seconds),
        capacity,
        until=window.seconds,
        judged_from=window.judged_from,
        units=min(place.workers for slot in replay.slots for place in slot.places),
        first_step_seconds=replay.first_step_seconds,
        saving=replay.saving,
    )


def _live(replay: Replay, capacity: Mapping[str, Changes], seconds: float) -> dict[str, SlotLog]:
    """What each slot asked for and held in so many seconds on that *capacity*."""
    if replay.policy == ENGINE:
        return live_with_engine(
            tuple(_priced(slot, replay.traces) for slot in replay.slots),
            capacity,
            seconds=seconds,
            seed=replay.seed,
            first_step_seconds=replay.first_step_seconds,
            save_every=replay.saving.interval(()),
        )
    return PolicyLife(
        POLICIES[replay.policy],
        replay.slots,
        capacity,
        {zone: replay.traces[zone].price for zone in replay.zones},
        seconds=seconds,
        seed=replay.seed,
        first_step_seconds=replay.first_step_seconds,
    ).run()


def _priced(slot: Slot, traces: Mapping[str, Trace]) -> Slot:
    """A slot whose places cost what their recordings say; those of a reservation what they did."""
    places = []
    for one in slot.places:
        trace = traces[one.zone]
        on_demand = one.price if one.provisioning is Provisioning.RESERVED else trace.on_demand
        is_spot = CAPACITY_TIERS[one.provisioning] == "spot"
        places.append(replace(one, price=trace.price if is_spot else on_demand))
    return replace(slot, places=tuple(places))


def live_replays(replays: Sequence[Replay], jobs: int = 1, lived: Callable[[], None] = lambda: None) -> list[Account]:
    """Their accounts, in the same order; *lived* is called after each."""
    if jobs <= 1 or len(replays) == 1:
        return [_told(live_replay(replay), lived) for replay in replays]
    with workers(jobs) as pool:
        return [_told(account, lived) for account in pool.map(live_replay, replays)]


def _told(account: Account, lived: Callable[[], None]) -> Account:
    lived()
    return account


def gang(zones: Sequence[str], kind: str = "v4-128", hosts: int = 16, count: int = 1) -> tuple[Slot, ...]:
    """Slots of one spot gang, which may live in each of *zones*, in that order."""
    return slots_of("gang", count, *(place(zone, kind, hosts) for zone in zones), care=Care())


def recorded_gang(dataset: str, zones: Sequence[str], **settings: object) -> Replay:
    """A gang on zones of a dataset by their own names."""
    traces = load_dataset(dataset)
    return Replay(gang(zones), {zone: traces[zone] for zone in zones}, **settings)  # type: ignore[arg-type]
