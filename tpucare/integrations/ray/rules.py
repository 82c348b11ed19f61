"""
The demand of a Ray cluster -> which slots of its pools wake, which rest, and which demand no pool can satisfy. Pure.

How many slices a demand needs is left to `packing`, asking Ray to `probe`, and applying the plan to `companion`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from tpucare.integrations.ray.demand import Bundle, ClusterState, HostStatus, PendingSlice
from tpucare.integrations.ray.packing import (
    ACCELERATOR,
    GENERATION,
    OF_A_HOST,
    SLICE_NAME,
    BundleKind,
    GangKind,
    KnownHost,
    Lot,
    Packing,
    Slice,
    SlicePool,
    SliceState,
    Unmet,
    bundle_kind,
    pod_type,
)
from tpucare.model.text import counted, length

# A snapshot holds what is pending and what is free from different instants, up to this many seconds apart.
SETTLE_SECONDS: Final = 1.0
# A slice that comes up stays for so long after the demand for it has gone: a retried task asks again within seconds.
UNNEEDED_SECONDS: Final = 60.0
_NOT_ASKED: Final = "nothing asks for it now"


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """
    wake, rest: slot -> why. A slot of `rest` whose slice has joined is drained first, and stays if a host refuses.

    unmet, pending: for `status` and for the report to Ray.
    """

    wake: Mapping[str, str] = field(default_factory=dict)
    rest: Mapping[str, str] = field(default_factory=dict)
    unmet: tuple[Unmet, ...] = ()
    pending: tuple[PendingSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """
    last_needed: slot that comes up -> when demand last needed it
    hosts:       pool -> a host of it
    free:        host -> its free resources that count; `changed`: when this last changed
    doubted:     pool -> (since when, how many slices) demand wants more than there are
    """

    last_needed: Mapping[str, float] = field(default_factory=dict)
    hosts: Mapping[str, KnownHost] = field(default_factory=dict)
    free: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    changed: float = -math.inf
    doubted: Mapping[str, tuple[float, int]] = field(default_factory=dict)


def plan(
    state: ClusterState, slices: Sequence[Slice], pools: Sequence[SlicePool], memory: PlanMemory, now: float
) -> tuple[SlicePlan, PlanMemory]:
    """
    The slots to wake and to rest after the snapshot *state*, which was read at *now* (seconds, any origin).

    To be asked once per snapshot: what two snapshots agree on is believed, and the same one twice agrees with itself.
    """
    ranked = sorted(pools, key=lambda pool: (pool.priority, pool.name))
    mine = {pool.name: [one for one in slices if one.pool == pool.name] for pool in ranked}
    known = {pool.name: host for pool in ranked if (host := _known_host(pool, mine[pool.name], memory))}
    demand = _read_demand(state, {one.slot for one in slices}, ranked)
    packed = _pack(demand, ranked, mine, known)

    free = _free(slices)
    changed = now if free != memory.free else memory.changed
    settled = not free or now - changed >= SETTLE_SECONDS
    wake = dict(packed.certain)
    doubted: dict[str, tuple[float, int]] = {}
    for lot in packed.lots:
        growth = [bay for bay in lot.bays.values() if bay.opened and bay.slot not in wake]
        believed, doubt = _believed(len(growth), memory.doubted.get(lot.pool.name), now, settled=settled)
        wake |= {bay.slot: bay.why for bay in growth[:believed]}
        if doubt is not None:
            doubted[lot.pool.name] = doubt

    needed = {**_awaited(demand, ranked, mine, known), **packed.needed}
    last_needed = {
        one.slot: now if one.slot in needed or _works(one) else memory.last_needed.get(one.slot, now)
        for one in slices
        if one.state is SliceState.COMING
    }
    rest: dict[str, str] = {}
    for lot in packed.lots:
        rest |= _rest(lot, mine[lot.pool.name], needed, last_needed, now)
    pending = tuple(
        PendingSlice(bay.slot, lot.pool.name, pod_type(lot.pool.type), bay.why or needed.get(bay.slot) or _NOT_ASKED)
        for lot in packed.lots
        for bay in lot.bays.values()
        if (bay.slot in wake or bay.state is SliceState.COMING) and bay.slot not in rest
    )
    after = PlanMemory(last_needed, known, free, changed, doubted)
    return SlicePlan(wake, rest, tuple(packed.unmet), pending), after


class _Packed(NamedTuple):
    """
    The demand on slices.

    certain: slot -> why it is opened, whatever is pending    needed: slot that has to be there -> the first reason
    """

    lots: Sequence[Lot]
    certain: Mapping[str, str]
    needed: Mapping[str, str]
    unmet: Sequence[Unmet]


def _pack(
    demand: _Demand,
    pools: Sequence[SlicePool],
    slices: Mapping[str, Sequence[Slice]],
    known: Mapping[str, KnownHost],
) -> _Packed:
    """*slices*: by pool, as `known`."""
    # What is certain: bounds, the floor, and slots that are asked for by name.
    unmet: list[Unmet] = []
    slots = {one.slot: one for of_pool in slices.values() for one in of_pool}
    packing = Packing([Lot(pool, slices[pool.name], known.get(pool.name)) for pool in pools])
    for lot in packing.lots:
        while lot.awake < lot.pool.minimum and lot.open(f"{lot.pool.name} keeps {counted(lot.pool.minimum, 'slice')}"):
            pass
    needed: dict[str, str] = {}
    if demand.floor:
        floor = Packing([Lot(pool, slices[pool.name], known.get(pool.name), floor=True) for pool in pools])
        floor.open_as(packing, slots)
        for kind, count in demand.floor:
            unmet += floor.place_singles(kind, count)
        packing.open_as(floor, slots)
        needed = {bay.slot: bay.why for lot in floor.lots for bay in lot.bays.values() if bay.why}
    for slot, kind, count in demand.pinned:
        unmet += packing.place_pinned(slots.get(slot), slot, kind, count)
    certain = packing.opened()

    # What is pending: the least flexible and the largest first, gangs before what fills the gaps they leave.
    for gang, count in sorted(demand.gangs, key=lambda one: packing.order(one[0])):
        unmet += packing.place_gangs(gang, count)
    for single, count in sorted(demand.singles, key=lambda one: packing.order(GangKind((one[0],)))):
        unmet += packing.place_singles(single, count)
    packing.trim(certain=certain)
    needed |= {bay.slot: bay.why for lot in packing.lots for bay in lot.bays.values() if bay.why or lot.short}
    return _Packed(packing.lots, certain, needed, unmet)


def _awaited(
    demand: _Demand,
    pools: Sequence[SlicePool],
    slices: Mapping[str, Sequence[Slice]],
    known: Mapping[str, KnownHost],
) -> Mapping[str, str]:
    """
    The slices of pools with stuck ones that stay asked for, although other pools grow in their stead, and why.

    Whichever node comes first serves. So in each such pool those that would be needed beside what has joined, if no
    other pool had slices that come up.
    """
    found: dict[str, str] = {}
    for pool in pools:
        if not any(one.stuck for one in slices[pool.name]):
            continue
        there = {
            name: [
                # As if stuck: what has joined serves first.
                replace(one, stuck=one.state is SliceState.COMING)
                for one in of_pool
                if one.state is SliceState.JOINED or (name == pool.name and one.state is SliceState.COMING)
            ]
            for name, of_pool in slices.items()
        }
        needed = _pack(demand, pools, there, known).needed
        found |= {one.slot: needed[one.slot] for one in slices[pool.name] if one.slot in needed}
    return found


# --- memory of hosts, and of what is believed -------------------------------------------------------------------------


def _known_host(pool: SlicePool, slices: Sequence[Slice], memory: PlanMemory) -> KnownHost | None:
    """
    A host of *pool*: of each resource the least that a host has which is there now, else as remembered.

    The least, so that demand which fits this host fits each: else slice after slice would be woken for it.
    """
    hosts = [host for one in slices for host in one.hosts if "TPU" in host.total]
    if not hosts:
        return memory.hosts.get(pool.name)
    names = {one.slot for one in slices}
    totals = [host.total for host in hosts]
    common = [
        name
        for name in totals[0]
        if name not in names and not name.startswith(("node:", "TPU-")) and all(name in total for total in totals)
    ]
    total = {name: min(total[name] for total in totals) for name in common}
    labels = {key: value for key, value in hosts[0].labels.items() if key not in OF_A_HOST}
    return KnownHost(total, labels)


def _free(slices: Iterable[Slice]) -> Mapping[str, tuple[float, ...]]:
    """Chips and heads that are free, by host."""
    return {
        host.id: tuple(amount for name, amount in host.available.items() if name.startswith("TPU"))
        for one in slices
        for host in one.hosts
    }


def _believed(
    growth: int, doubt: tuple[float, int] | None, now: float, *, settled: bool
) -> tuple[int, tuple[float, int] | None]:
    """
    How many of *growth* slices more are believed, and the doubt that is left.

    While hosts join and chips change hands, only what was wanted in all snapshots of SETTLE_SECONDS.
    """
    if settled or not growth:
        return growth, None
    if doubt is None:
        return 0, (now, growth)
    since, count = doubt[0], min(doubt[1], growth)
    if now - since < SETTLE_SECONDS:
        return 0, (since, count)
    return count, (now, growth - count) if growth > count else None


def _rest(
    lot: Lot, slices: Sequence[Slice], needed: Container[str], last_needed: Mapping[str, float], now: float
) -> dict[str, str]:
    """The slots of a pool that rest: those that only come up before those that joined, the highest index first."""
    pool, may = lot.pool, []
    for one in slices:
        if one.slot in needed:
            continue
        if one.state is SliceState.COMING and now - last_needed[one.slot] >= UNNEEDED_SECONDS:
            may.append((one, f"nothing asks for it since {length(UNNEEDED_SECONDS)}"))
        elif one.state is SliceState.JOINED and not lot.wanted and _is_idle(one, pool):
            may.append((one, f"idle for {length(pool.idle)}"))
    may.sort(key=lambda entry: (entry[0].state is SliceState.JOINED, -entry[0].index))
    return {one.slot: why for one, why in may[: max(0, lot.awake - pool.minimum)]}


def _works(one: Slice) -> bool:
    """A host of it has work, also while another one starts Ray anew."""
    return any(host.status is HostStatus.RUNNING for host in one.hosts)


def _is_idle(one: Slice, pool: SlicePool) -> bool:
    return all(host.status is HostStatus.IDLE and host.idle_seconds >= pool.idle for host in one.hosts)


# --- demand -----------------------------------------------------------------------------------------------------------


class _Demand(NamedTuple):
    """`pinned`: name of the slot, what is asked of it, and how often."""

    pinned: Sequence[tuple[str, BundleKind, int]]
    gangs: Sequence[tuple[GangKind, int]]
    singles: Sequence[tuple[BundleKind, int]]
    floor: Sequence[tuple[BundleKind, int]]


def _read_demand(state: ClusterState, slots: Container[str], pools: Sequence[SlicePool]) -> _Demand:
    """The demand for TPUs in *state*; all other is no matter of slices."""
    names = re.compile("|".join(rf"{re.escape(pool.name)}-\d+" for pool in pools) or r"(?!)")
    pinned: Counter[tuple[str, BundleKind]] = Counter()
    gangs: Counter[GangKind] = Counter()
    singles: Counter[BundleKind] = Counter()
    floor: Counter[BundleKind] = Counter()

    def slot_of(kind: BundleKind) -> str | None:
        name = dict(kind.selector).get(SLICE_NAME, "")
        if name and not name.startswith(("!", "in(")):
            return name
        return next((name for name, _ in kind.shape if name in slots or names.fullmatch(name)), None)

    def is_for_tpus(kind: BundleKind) -> bool:
        return (
            any(name.startswith(("TPU", GENERATION)) for name, _ in kind.shape)
            or any(key.startswith("ray.io/tpu-") for key, _ in kind.selector)
            or dict(kind.selector).get(ACCELERATOR, "").startswith("TPU")
            or slot_of(kind) is not None
        )

    def add(kind: BundleKind, count: int, to: Counter[BundleKind]) -> None:
        if (slot := slot_of(kind)) is not None:
            pinned[slot, kind] += count
        elif is_for_tpus(kind):
            to[kind] += count

    for request in state.requests:
        if request.count > 0:
            add(bundle_kind(request.bundle), request.count, singles)
    # `request_resources` repeats one bundle up to ten thousand times.
    for _, same in itertools.groupby(state.floor, key=id):
        bundles = list(same)
        add(bundle_kind(bundles[0]), len(bundles), floor)
    for gang in state.gangs:
        kinds = [bundle_kind(bundle) for bundle in gang.bundles]
        # All on one host: one bundle of the sum.
        if gang.strategy == "STRICT_PACK" and len(kinds) > 1:
            kinds = [_sum(kinds)]
        if not any(map(is_for_tpus, kinds)):
            continue
        free = [kind for kind in kinds if slot_of(kind) is None]
        for kind in kinds:
            if (slot := slot_of(kind)) is not None:
                pinned[slot, kind] += 1
        if len(free) == 1 and is_for_tpus(free[0]):
            singles[free[0]] += 1
        elif tpus := [kind for kind in free if is_for_tpus(kind)]:
            tpus.sort(key=lambda kind: (not kind.has_head, -kind.chips))
            gangs[GangKind(tuple(tpus), gang.strategy)] += 1
    return _Demand(
        [(slot, kind, count) for (slot, kind), count in pinned.items()],
        list(gangs.items()),
        list(singles.items()),
        sorted(floor.items(), key=lambda one: -one[0].chips),
    )


def _sum(kinds: Iterable[BundleKind]) -> BundleKind:
    shape: dict[str, float] = {}
    selector: dict[str, str] = {}
    for kind in kinds:
        for name, amount in kind.shape:
            shape[name] = shape.get(name, 0) + amount
        selector |= dict(kind.selector)
    return bundle_kind(Bundle(shape, selector))
