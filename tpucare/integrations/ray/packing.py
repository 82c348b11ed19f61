"""
Packs the demand of a Ray cluster onto the slices that are there or come up, and opens slices for the rest. Pure.

A pool is a fleet of equal slices; a slice is all or nothing. The packing decides a number of slices only, the placement
is Ray's; which slots wake and rest by it is left to `rules`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from tpucare.integrations.ray.demand import Bundle, HostState, HostStatus, Labels, Shape, UnmetDemand
from tpucare.model.text import counted, plain

# Two useless slices without a good one point at the pool, not at the slices.
FAILED_LIMIT: Final = 2

SLICE_NAME, WORKER_ID, NODE_ID = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id", "ray.io/node-id"
POD_TYPE, TOPOLOGY = "ray.io/tpu-pod-type", "ray.io/tpu-topology"
ACCELERATOR, POOL_NAME = "ray.io/accelerator-type", "ray.io/node-group"
OF_A_HOST: Final = frozenset({SLICE_NAME, WORKER_ID, NODE_ID})
_HEAD: Final = re.compile(r"TPU-(?P<type>.+)-head")
GENERATION: Final = "accelerator_type:TPU-"
# Amounts of Ray have four decimals.
_LEAST = 1e-5


def pod_type(accelerator_type: str) -> str:
    """An accelerator type as Ray writes it: `tpu7x-8` of the API is `v7x-8`, others are the same."""
    return re.sub(r"^tpu-?v?", "v", accelerator_type.strip().lower())


@dataclass(frozen=True, slots=True)
class SlicePool:
    """
    type: accelerator type of all its slices    hosts: of a slice    chips: of a host
    minimum, maximum: slices    idle: seconds until an idle slice rests    priority: the lowest number is tried first
    """

    name: str
    type: str
    hosts: int
    chips: int
    minimum: int
    maximum: int
    idle: float
    priority: int = 0


class SliceState(StrEnum):
    """
    RESTING: no node is wanted           COMING: awake, not all hosts have joined, or its node died and comes back
    JOINED: all hosts RUNNING or IDLE    LEAVING: is drained to rest, goes to rest, or a person took it down
    FAILED: needs a person
    """

    RESTING = "RESTING"
    COMING = "COMING"
    JOINED = "JOINED"
    LEAVING = "LEAVING"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Slice:
    """
    hosts: of its living node only, from the same snapshot    since: seconds, when it woke or changed its state
    dying: its node is about to be lost, or seems to be: what its hosts hold comes back, so it is no reason to grow
    stuck: it comes up, but all its places refuse it: supply of last resort
    """

    slot: str
    pool: str
    index: int
    state: SliceState
    hosts: tuple[HostState, ...] = ()
    since: float = 0.0
    dying: bool = False
    stuck: bool = False


class UnmetCause(Enum):
    """Why demand is not met. The last two end by themselves or by a person at the slots; the others never do."""

    NO_SUCH_TYPE = "no pool has slices of this type"
    NO_SUCH_LABEL = "no pool has hosts with these labels"
    NO_SUCH_SLOT = "no pool has a slot of this name"
    HOST_TOO_SMALL = "no host has so many chips"
    NO_RESOURCE = "no host has so much of a resource"
    TOO_MANY_SLICES = "more slices than the pool may have"
    NO_CHIPS_FOUND = "hosts joined without TPUs"
    AT_MAXIMUM = "all slices are in use"
    FAILED = "slices need a person"

    @property
    def waits(self) -> bool:
        return self in (UnmetCause.AT_MAXIMUM, UnmetCause.FAILED)


@dataclass(frozen=True, slots=True)
class Unmet:
    cause: UnmetCause
    demand: UnmetDemand


class KnownHost(NamedTuple):
    """What each host of a pool has, by the hosts that joined last: without names of hosts, slots and heads."""

    total: Shape
    labels: Labels


# --- demand -----------------------------------------------------------------------------------------------------------


class BundleKind(NamedTuple):
    """
    A bundle, hashable: equal ones are counted.

    has_head: it asks for a whole slice by the resource that only the first host has
    """

    shape: tuple[tuple[str, float], ...]
    selector: tuple[tuple[str, str], ...]
    chips: float
    has_head: bool

    @property
    def bundle(self) -> Bundle:
        return Bundle(dict(self.shape), dict(self.selector))

    def __str__(self) -> str:
        amounts = ", ".join(f"{name}: {amount:g}" for name, amount in self.shape)
        where = ", ".join(f"{key}={value}" for key, value in self.selector)
        return plain("{" + amounts + "}" + (f" on {where}" if where else ""))


class GangKind(NamedTuple):
    """A placement group without its name: equal ones are counted."""

    kinds: tuple[BundleKind, ...]
    strategy: str = ""

    @property
    def chips(self) -> float:
        return sum(kind.chips for kind in self.kinds)

    def __str__(self) -> str:
        each = Counter(self.kinds)
        return "group of " + " + ".join(f"{times} x {kind}" if times > 1 else str(kind) for kind, times in each.items())


def bundle_kind(bundle: Bundle) -> BundleKind:
    shape = tuple(sorted((name, amount) for name, amount in bundle.shape.items() if amount > 0))
    has_head = any(_HEAD.fullmatch(name) for name, _ in shape)
    return BundleKind(shape, tuple(sorted(bundle.selector.items())), bundle.shape.get("TPU", 0.0), has_head)


def matches(asked: str, value: str | None) -> bool:
    """Whether *asked* allows *value* of a label, in Ray's notation: `a`, `!a`, `in(a,b)`, `!in(a,b)`."""
    positive = asked.removeprefix("!")
    listed = re.fullmatch(r"in\((.*)\)", positive)
    values = [one.strip() for one in listed[1].split(",")] if listed else [positive]
    return (value in values) == (positive == asked)


# --- supply -----------------------------------------------------------------------------------------------------------


class _Host:
    """A host that is there, or will be. `known` False: it has enough of every resource that `free` does not name."""

    __slots__ = ("bay", "free", "known", "labels", "order")

    def __init__(self, bay: _Bay, free: dict[str, float], labels: Labels, *, known: bool, order: int) -> None:
        self.bay, self.free, self.labels, self.known, self.order = bay, free, labels, known, order

    @property
    def chips(self) -> float:
        return self.free.get("TPU", 0.0)

    def fits(self, kind: BundleKind) -> bool:
        for name, amount in kind.shape:
            free = self.free.get(name)
            if self.known if free is None else free + _LEAST < amount:
                return False
        return all(key not in OF_A_HOST or matches(asked, self.labels.get(key)) for key, asked in kind.selector)

    def room(self, kind: BundleKind) -> int:
        """How many of *kind* fit here."""
        if not self.fits(kind):
            return 0
        named = [(self.free[name] + _LEAST) // amount for name, amount in kind.shape if name in self.free]
        return int(min(named, default=1 << 30))


class _Bay:
    """
    A slice as the packing sees it.

    whole: nothing is on it    why: the first demand that was put on it    tasks: that were put on it; None: and others
    """

    __slots__ = ("hosts", "opened", "slot", "state", "stuck", "tasks", "whole", "why")

    def __init__(self, one: Slice, *, opened: bool) -> None:
        self.slot, self.state, self.stuck, self.opened = one.slot, one.state, one.stuck, opened
        self.hosts: list[_Host] = []
        self.tasks: list[tuple[BundleKind, int]] | None = []
        self.whole, self.why = True, ""


class Lot:
    """
    The slices of a pool, and which of them may still be opened.

    wanted:  something pending that a slice of this pool can serve    floor: count what hosts have, not what is free
    healing: slices that are asked for by name    short: something waits until slices of this pool are free
    dry:     a slice of it is stuck
    """

    def __init__(
        self,
        pool: SlicePool,
        slices: Sequence[Slice],
        known: KnownHost | None,
        *,
        floor: bool = False,
    ) -> None:
        self.pool, self.known, self.floor, self.wanted = pool, known, floor, False
        self.short = False
        self.type = pod_type(pool.type)
        self.generation = f"TPU-{self.type.partition('-')[0].upper()}"
        self.chips = known.total["TPU"] if known else float(pool.chips)
        self.bays: dict[str, _Bay] = {}
        self.healing: list[_Bay] = []
        self.levels: dict[float, list[tuple[int, _Host]]] = {}
        self._orders = itertools.count()
        self.states = Counter(one.state for one in slices)
        joined = [one for one in slices if one.state is SliceState.JOINED]
        # Ray found no chips on their hosts, as it does where it cannot read devices or metadata.
        self.barren = [one.slot for one in joined if not any("TPU" in host.total for host in one.hosts)]
        useless = self.states[SliceState.FAILED] + len(self.barren)
        self.broken = useless >= FAILED_LIMIT and len(self.barren) == len(joined)
        restful = sorted((one for one in slices if one.state is SliceState.RESTING), key=lambda one: -one.index)
        self._restful = {one.slot: one for one in restful}
        self._allowed = pool.maximum - (len(slices) - len(self._restful))
        supply = [one for one in slices if one.state in (SliceState.COMING, SliceState.JOINED)]
        self.awake, self.dry = len(supply), any(one.stuck for one in supply)
        for one in sorted(supply, key=self._preference):
            self._add(one, opened=False)

    @property
    def size(self) -> str:
        """For people."""
        return f"{self.pool.name}: {self.type}, {counted(self.pool.hosts, 'host')} of {self.pool.chips} chips"

    def _preference(self, one: Slice) -> tuple[bool, bool, int, float, int]:
        """The order in which slices are packed; the last ones are those that may go."""
        busy = any(host.status is not HostStatus.IDLE for host in one.hosts)
        joined = one.state is SliceState.JOINED
        return (
            not joined,
            joined and self.floor and not busy,
            -len(one.hosts),
            one.since if not joined else 0,
            one.index,
        )

    def _add(self, one: Slice, *, opened: bool) -> _Bay:
        bay = _Bay(one, opened=opened)
        self.bays[one.slot] = bay
        missing = list(range(self.pool.hosts))
        for host in one.hosts if not one.dying else ():
            number = host.labels.get(WORKER_ID, "")
            missing.remove(int(number) if number.isdecimal() and int(number) in missing else missing[-1])
            if host.status in (HostStatus.RUNNING, HostStatus.IDLE):
                self._add_joined(bay, host)
            if not missing:
                break
        for index in missing:
            self._add_missing(bay, index)
        return bay

    def _add_joined(self, bay: _Bay, host: HostState) -> None:
        whole = all(host.available.get(name, 0) >= has for name, has in host.total.items() if name.startswith("TPU"))
        bay.whole = bay.whole and (whole or self.floor)
        free = dict(host.total if self.floor else host.available)
        self._stow(_Host(bay, free, host.labels, known=True, order=next(self._orders)), new=True)

    def _add_missing(self, bay: _Bay, index: int) -> None:
        free = dict(self.known.total) if self.known else {"TPU": self.chips}
        free |= {f"accelerator_type:{self.generation}": 1.0, bay.slot: 1.0}
        free[f"TPU-{self.type}-head"] = float(index == 0)
        labels = {SLICE_NAME: bay.slot, WORKER_ID: str(index)}
        self._stow(_Host(bay, free, labels, known=self.known is not None, order=next(self._orders)), new=True)

    def _stow(self, host: _Host, *, new: bool = False) -> None:
        if new:
            host.bay.hosts.append(host)
        heapq.heappush(self.levels.setdefault(host.chips, []), (host.order, host))

    def open(self, why: str, one: Slice | None = None) -> _Bay | None:
        """Another slice: *one*, else the resting one with the lowest index; None if there is none."""
        if not self._restful or self._allowed <= 0 or (one is None and self.broken):
            return None
        if one is None:
            _, one = self._restful.popitem()
        else:
            del self._restful[one.slot]
        self._allowed -= 1
        self.awake += 1
        bay = self._add(one, opened=True)
        bay.why = why
        return bay

    def close(self, bay: _Bay) -> None:
        """Undo `open`; the slot is not tried again in this plan."""
        del self.bays[bay.slot]
        self._allowed += 1
        self.awake -= 1
        self.claim(bay)

    def find(self, kind: BundleKind, without: Container[_Host] = (), *, resort: bool = False) -> _Host | None:
        """
        The host for one of *kind*: with the fewest free chips that suffice, so that gaps are filled first.

        Of a stuck slice only as the last *resort*.
        """
        if kind.has_head:
            # A SlicePlacementGroup that lost its slice asks for the hosts by name, and for any head again.
            for host in (host for bay in self.healing for host in bay.hosts):
                if host not in without and host.fits(kind):
                    return host
        need = self.chips if kind.has_head else kind.chips
        for level in sorted(level for level in self.levels if level + _LEAST >= need):
            heap, passed, found = self.levels[level], [], None
            while heap and found is None:
                order, host = heapq.heappop(heap)
                if host.chips != level:
                    continue  # it has moved to another level since
                passed.append((order, host))
                if host in without or (host.bay.stuck and not resort):
                    continue
                if (host.bay.whole or not kind.has_head) and host.fits(kind):
                    found = host
            for entry in passed:
                heapq.heappush(heap, entry)
            if found is not None:
                return found
        return None

    def place(self, gang: GangKind, why: str, *, may_open: bool, resort: bool = False) -> bool:
        """Place all of *gang* or nothing, on open slices first."""
        used: set[_Host] = set()
        undo: list[Callable[[], None]] = []
        heads: list[_Bay] = []
        for kind in gang.kinds:
            apart = used if gang.strategy == "STRICT_SPREAD" else ()
            host = self.find(kind, apart, resort=resort)
            if host is None and may_open and (bay := self.open(why)):
                undo.append(functools.partial(self.close, bay))
                host = self.find(kind, apart, resort=resort)
            if host is None:
                for step in reversed(undo):
                    step()
                return False
            undo.append(self.put(kind, host, 1, why))
            host.bay.tasks = None
            used.add(host)
            if kind.has_head:
                heads.append(host.bay)
        for bay in heads:
            self.claim(bay)
        return True

    def put(self, kind: BundleKind, host: _Host, times: int, why: str) -> Callable[[], None]:
        """Place *times* of *kind* on *host*. Returns how to take them away again."""
        free, whole, was = host.free, host.bay.whole, host.bay.why
        host.free = free | {name: free[name] - times * amount for name, amount in kind.shape if name in free}
        host.bay.whole = False
        host.bay.why = was or why
        self._stow(host)

        def undo() -> None:
            host.bay.whole, host.bay.why = whole, was
            self.restore(host, free)

        return undo

    def restore(self, host: _Host, free: dict[str, float]) -> None:
        host.free = free
        self._stow(host)

    def claim(self, bay: _Bay) -> None:
        """Leave nothing of *bay* to others: the hosts are asked for when the head is given."""
        for host in bay.hosts:
            host.free = dict.fromkeys(host.free, 0.0)

    # --- what a slice of this pool can ever serve ---

    def refusal(self, kind: BundleKind, slot: str = "") -> tuple[UnmetCause, str] | None:
        """Why no host of this pool, or of its *slot*, ever serves *kind*: what the pool lacks."""
        for name, amount in kind.shape:
            head = _HEAD.fullmatch(name)
            if head and head["type"] != self.type:
                return UnmetCause.NO_SUCH_TYPE, f"{head['type']} slices"
            if name.startswith(GENERATION) and name != f"accelerator_type:{self.generation}":
                return UnmetCause.NO_SUCH_TYPE, f"{name.removeprefix('accelerator_type:')} slices"
            if head and amount > 1:
                return UnmetCause.NO_RESOURCE, f"more than one {name} per host"
        for key, asked in kind.selector:
            if not self._has_label(key, asked):
                about_type = key in (POD_TYPE, TOPOLOGY, ACCELERATOR)
                cause = UnmetCause.NO_SUCH_TYPE if about_type else UnmetCause.NO_SUCH_LABEL
                return cause, f"slices with {key}={asked}" if about_type else f"hosts with {key}={asked}"
        if kind.chips > self.chips + _LEAST:
            return UnmetCause.HOST_TOO_SMALL, f"hosts with {kind.chips:g} chips"
        for name, amount in kind.shape:
            if name in ("TPU", slot) or name.startswith(("TPU-", GENERATION)) or self.known is None:
                continue
            if (has := self.known.total.get(name, 0.0)) + _LEAST < amount:
                return UnmetCause.NO_RESOURCE, f"hosts with {amount:g} {name} (a host of {self.pool.name} has {has:g})"
        return None

    def _has_label(self, key: str, asked: str) -> bool:
        if key == WORKER_ID:
            return any(matches(asked, str(index)) for index in range(self.pool.hosts))
        if key == SLICE_NAME:
            return True
        # A host of this id exists already, or never again.
        if key == NODE_ID:
            return asked.startswith("!")
        ours = {POD_TYPE: self.type, ACCELERATOR: self.generation, POOL_NAME: self.pool.name}
        if key in ours:
            return matches(asked, ours[key])
        if self.known is not None:
            return matches(asked, self.known.labels.get(key))
        if key == TOPOLOGY and re.fullmatch(r"\d+(x\d+)+", asked):
            return math.prod(map(int, asked.split("x"))) == self.pool.hosts * self.pool.chips
        return True

    def slices_for(self, gang: GangKind) -> int:
        """How many empty slices of this pool hold *gang*, each bundle of which a host can serve."""
        size, heads = len(gang.kinds), sum(kind.has_head for kind in gang.kinds)
        if size <= self.pool.hosts and heads <= 1:
            return 1  # each bundle has a host to itself
        apart = size if gang.strategy == "STRICT_SPREAD" else 0
        least = max(heads, math.ceil(max(gang.chips / self.chips - _LEAST, apart) / self.pool.hosts))
        if least > self.pool.maximum:
            return least
        slots = [Slice(str(index), self.pool.name, index, SliceState.RESTING) for index in range(size)]
        empty = Lot(replace(self.pool, maximum=size), slots, self.known)
        return len(empty.bays) if empty.place(gang, "", may_open=True) else size + 1


class Packing:
    """
    All pools, in the order in which they are tried, and the demand that is put on their slices one by one.

    Where slices of a pool are stuck, the other pools serve what they can, and grow for it; what is left falls back on
    the stuck slices and the growth of their pool.
    """

    def __init__(self, lots: Sequence[Lot]) -> None:
        self.lots = lots
        self._resorts = (False, True) if any(lot.dry for lot in lots) else (False,)
        self._refusals: dict[BundleKind, list[tuple[Lot, tuple[UnmetCause, str] | None]]] = {}

    def opened(self) -> dict[str, str]:
        """Slot -> why it was opened."""
        return {bay.slot: bay.why for lot in self.lots for bay in lot.bays.values() if bay.opened}

    def open_as(self, other: Packing, slots: Mapping[str, Slice]) -> None:
        """Open the slots that are open in *other* only."""
        lots, ours = {lot.pool.name: lot for lot in self.lots}, self.opened()
        for slot, why in other.opened().items():
            if slot not in ours:
                lots[slots[slot].pool].open(why, slots[slot])

    def order(self, gang: GangKind) -> tuple[int, float, GangKind]:
        """The demand with the fewest pools first, then the largest."""
        able = [lot for lot, refused in self._refused(gang.kinds) if refused is None]
        heads = sum(kind.has_head for kind in gang.kinds)
        size = max((heads * lot.chips * lot.pool.hosts for lot in able), default=0.0)
        return len(able), -max(size, gang.chips), gang

    def _refused(self, kinds: Sequence[BundleKind]) -> list[tuple[Lot, tuple[UnmetCause, str] | None]]:
        """Each pool, and why it never serves all of *kinds*."""
        for kind in kinds:
            if kind not in self._refusals:
                self._refusals[kind] = [(lot, lot.refusal(kind)) for lot in self.lots]
        of_each = zip(*(self._refusals[kind] for kind in kinds), strict=True)
        return [(each[0][0], next((refused for _, refused in each if refused), None)) for each in of_each]

    def place_pinned(self, one: Slice | None, slot: str, kind: BundleKind, count: int) -> list[Unmet]:
        """Wake the very slot that is asked for by name: a placement group, or a task of it, waits for its return."""
        if one is None:
            why = f"no pool has a slot {plain(slot)}: raise `count.max`, or ask for slices without their names"
            return [_unmet(UnmetCause.NO_SUCH_SLOT, (kind,), count, why)]
        lot = next(lot for lot in self.lots if lot.pool.name == one.pool)
        if refused := lot.refusal(kind, slot):
            return [self._never((kind,), count, [refused])]
        if one.state is SliceState.FAILED:
            why = f"slot {slot} needs you: see `tpucare status`"
            return [_unmet(UnmetCause.FAILED, (kind,), count, why)]
        why = f"{counted(count, 'request')} for {slot} by name: {kind}"
        bay = lot.bays.get(slot)
        if bay is None and one.state is SliceState.RESTING and (bay := lot.open(why, one)) is None:
            return [self._waiting((kind,), count, [lot])]
        if bay is not None:
            bay.why = bay.why or why
            if bay not in lot.healing:
                lot.healing.append(bay)
            for host in bay.hosts:
                if times := min(count, host.room(kind)):
                    lot.put(kind, host, times, why)
                    count -= times
        return []

    def place_gangs(self, gang: GangKind, count: int) -> list[Unmet]:
        """Place *count* groups like *gang*, each in one pool: where one slice holds it before where several do."""
        refusals = self._refused(gang.kinds)
        able = [lot for lot, refused in refusals if refused is None]
        if not able:
            return [self._never(gang.kinds, count, [refused for _, refused in refusals if refused])]
        sizes = {lot: lot.slices_for(gang) for lot in able}
        small = sorted((lot for lot in able if sizes[lot] <= lot.pool.maximum), key=lambda lot: sizes[lot] > 1)
        if not small:
            best = min(able, key=lambda lot: sizes[lot] - lot.pool.maximum)
            needs, name, most = counted(sizes[best], "slice"), best.pool.name, best.pool.maximum
            why = f"it needs {needs} of one pool, and {name} may have {most}: raise `count.max` of {name}"
            return [_unmet(UnmetCause.TOO_MANY_SLICES, gang.kinds, count, why)]
        why = _reason(str(gang), count, small)
        for lot in small:
            lot.wanted = True
        ways = [(resort, opens) for resort in self._resorts for opens in (False, True)]
        for left in range(count, 0, -1):
            if not any(
                lot.place(gang, why, may_open=opens and (resort or not lot.dry), resort=resort)
                for resort, opens in ways
                for lot in small
            ):
                return [self._waiting(gang.kinds, left, small)]
        return []

    def place_singles(self, kind: BundleKind, count: int) -> list[Unmet]:
        """Place *count* tasks like *kind* on free chips, then on slices that are opened for them."""
        refusals = self._refused((kind,))
        able = [lot for lot, refused in refusals if refused is None]
        if not able:
            return [self._never((kind,), count, [refused for _, refused in refusals if refused])]
        why = _reason(str(kind), count, able)
        for lot in able:
            lot.wanted = True
        for resort in self._resorts:
            for lot in able:
                count = self._fill(lot, kind, count, why, resort=resort)
            for lot in able:
                while count and (resort or not lot.dry) and (bay := lot.open(why)):
                    left = self._fill(lot, kind, count, why, resort=resort)
                    if left == count:  # a selector excludes this very slot
                        lot.close(bay)
                    count = left
        return [self._waiting((kind,), count, able)] if count else []

    def _fill(self, lot: Lot, kind: BundleKind, count: int, why: str, *, resort: bool) -> int:
        """Place *kind* on open slices of *lot*. Returns how many of *count* are left."""
        while count and (host := lot.find(kind, resort=resort)):
            times = 1 if kind.has_head else min(count, host.room(kind))
            lot.put(kind, host, times, why)
            if kind.has_head:
                lot.claim(host.bay)
                host.bay.tasks = None
            elif host.bay.tasks is not None:
                host.bay.tasks.append((kind, times))
            count -= times
        return count

    def trim(self, certain: Container[str]) -> None:
        """
        Close slices again, not the *certain*, whose tasks fit beside others on slices of later pools.

        Pools are filled in their order, and the slice that is opened last may be larger than all before it.
        """
        for place, lot in enumerate(self.lots):
            if not any(bay.opened for later in self.lots[place + 1 :] for bay in later.bays.values()):
                return
            for bay in reversed([bay for bay in lot.bays.values() if bay.opened and bay.slot not in certain]):
                if bay.tasks and self._move(bay.tasks, lot, bay):
                    lot.close(bay)

    def _move(self, tasks: Iterable[tuple[BundleKind, int]], lot: Lot, bay: _Bay) -> bool:
        """Place all *tasks* of *bay* on other slices that are open, or nothing."""
        undo: list[Callable[[], None]] = [functools.partial(lot.restore, host, host.free) for host in bay.hosts]
        lot.claim(bay)
        for kind, count in tasks:
            able = [other for other, refused in self._refused((kind,)) if refused is None]
            for other in able:
                while count and (host := other.find(kind)):
                    times = min(count, host.room(kind))
                    undo.append(other.put(kind, host, times, bay.why))
                    host.bay.tasks = None
                    count -= times
            if count:
                for step in reversed(undo):
                    step()
                return False
        return True

    def _never(self, kinds: Sequence[BundleKind], count: int, refusals: Sequence[tuple[UnmetCause, str]]) -> Unmet:
        """The refusal of the pool that came closest."""
        cause, lacking = max(refusals, key=lambda one: list(UnmetCause).index(one[0]), default=_NO_POOL)
        pools = "; ".join(lot.size for lot in self.lots)
        return _unmet(cause, kinds, count, plain(f"no pool has {lacking}: {_ADVICE[cause]} (pools: {pools or 'none'})"))

    def _waiting(self, kinds: Sequence[BundleKind], count: int, able: Sequence[Lot]) -> Unmet:
        for lot in able:
            lot.short = True
        names = ", ".join(lot.pool.name for lot in able)
        if barren := [slot for lot in able for slot in lot.barren]:
            why = f"hosts of {', '.join(barren)} joined without TPUs: Ray found no chips there (docs/ray.md)"
            return _unmet(UnmetCause.NO_CHIPS_FOUND, kinds, count, why)
        if all(lot.broken for lot in able):
            return _unmet(UnmetCause.FAILED, kinds, count, f"slices of {names} need you: see `tpucare status`")
        most = sum(lot.pool.maximum for lot in able)
        why = f"{names} may have {counted(most, 'slice')}, all in use or leaving: wait, or raise `count.max`"
        return _unmet(UnmetCause.AT_MAXIMUM, kinds, count, why)


_NO_POOL = (UnmetCause.NO_SUCH_TYPE, "TPUs")
_ADVICE: Final[Mapping[UnmetCause, str]] = {
    UnmetCause.NO_SUCH_TYPE: "apply a fleet of that type for this cluster, or ask for the type of a pool",
    UnmetCause.NO_SUCH_LABEL: "change the label selector",
    UnmetCause.HOST_TOO_SMALL: "ask for fewer chips per task, or for a placement group with a bundle per host",
    UnmetCause.NO_RESOURCE: "ask for less of it",
}


def _reason(what: str, count: int, able: Sequence[Lot]) -> str:
    """Why a slice of one of the pools *able* is wanted, for people."""
    why = f"{count} x {what}" if count > 1 else what
    dry = ", ".join(lot.pool.name for lot in able if lot.dry)
    return f"{why}; {dry} waits for a place" if dry else why


def _unmet(cause: UnmetCause, kinds: Sequence[BundleKind], count: int, why: str) -> Unmet:
    what = str(kinds[0]) if len(kinds) == 1 else str(GangKind(tuple(kinds)))
    return Unmet(cause, UnmetDemand(what, why, tuple(kind.bundle for kind in kinds), count))
