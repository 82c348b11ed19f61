"""
A small model of a Ray cluster on slices that come and go, in virtual time; the rules are in charge of the slices.

Ray places greedily and at random where a demand fits, as it comes; slices take their time, hosts join one by one, and
the snapshots of demand and of hosts lag behind, each by its own up to LAG. Half seconds are the unit of time.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.kits.ray_hosts import bundle, group, head_of, host, pinned_to, snapshot, tasks
from tpucare.integrations.ray.companion import SPILL_SECONDS
from tpucare.integrations.ray.demand import Bundle, Gang, HostState, Request
from tpucare.integrations.ray.packing import Slice, SlicePool, SliceState
from tpucare.integrations.ray.rules import UNNEEDED_SECONDS, PlanMemory, SlicePlan, plan

STEP, LAG, POLL = 0.5, 1.0, 1.0
# Demand that a plan saw may be gone by now: what it was right to do, is judged by all instants that it may have seen.
SEEN = 3.0
QUIET = 5.0
FOREVER = 6 * 3600.0


@dataclass(frozen=True)
class Job:
    """
    Bundles that are placed, run for `length` seconds, and go.

    kind: tasks, each by itself; group, all or none, `apart` on hosts of their own; slices, each with a
          SlicePlacementGroup; floor (`request_resources` of heads)
    chips: of each bundle    type: pod type that is asked for, or any    patience: seconds until it is withdrawn
    """

    kind: str
    at: float
    length: float
    chips: tuple[int, ...] = ()
    apart: bool = False
    type: str = ""
    patience: float = FOREVER

    @property
    def selector(self) -> Mapping[str, str]:
        return {"ray.io/tpu-pod-type": self.type} if self.type else {}


@dataclass(frozen=True)
class Preemption:
    at: float
    which: int


@dataclass(frozen=True)
class Dry:
    """No place has a node for the slices of *pool*."""

    pool: str
    at: float
    until: float


@dataclass
class Piece:
    """
    A bundle of a job; placed on `host`.

    pin: only on hosts of this slot    together: what pieces of one group share    had: a head that once had its slice
    """

    job: Job
    chips: int
    head: bool = False
    pin: str = ""
    host: Host | None = None
    began: float = 0.0
    ends: float = FOREVER
    together: object = None
    had: bool = False


@dataclass(eq=False)
class Host:
    slot: Slot
    index: int
    idle_since: float
    pieces: list[Piece] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.slot.pool.chips - sum(piece.chips for piece in self.pieces)

    @property
    def head_free(self) -> bool:
        return self.index == 0 and not any(piece.head for piece in self.pieces)

    def fits(self, piece: Piece) -> bool:
        return (
            (not piece.job.type or piece.job.type == self.slot.pool.type)
            and (not piece.pin or piece.pin == self.slot.name)
            and (self.head_free or not piece.head)
            and self.free >= piece.chips
        )


@dataclass(eq=False)
class Slot:
    pool: SlicePool
    index: int
    state: SliceState = SliceState.RESTING
    returns: bool = False
    until: float = 0.0
    joins: list[float] = field(default_factory=list)
    hosts: dict[int, Host] = field(default_factory=dict)
    nodes: int = 0
    since: float = 0.0
    refused_since: float | None = None

    @property
    def name(self) -> str:
        return f"{self.pool.name}-{self.index}"

    @property
    def awake(self) -> bool:
        return self.state in (SliceState.COMING, SliceState.JOINED) or self.returns


class Broken(AssertionError):
    """The rules did something wrong."""


@dataclass(frozen=True)
class View:
    """What one instant was: the pieces that waited, and the hosts that were there."""

    at: float
    waiting: tuple[tuple[Piece, ...], ...]
    floor: Job | None
    hosts: Mapping[str, tuple[HostState, ...]]
    room: Mapping[str, tuple[tuple[int, int, bool], ...]]


class Cluster:
    """Ray, the slices, and a companion that does at once what the rules say."""

    def __init__(
        self,
        pools: Sequence[SlicePool],
        jobs: Sequence[Job],
        preemptions: Sequence[Preemption],
        seed: int,
        dry: Sequence[Dry] = (),
    ) -> None:
        self.pools, self.rng, self.now = list(pools), random.Random(seed), 0.0
        self.slots = [Slot(pool, index) for pool in pools for index in range(pool.maximum)]
        self.coming_jobs = sorted(jobs, key=lambda job: job.at)
        self.preemptions = sorted(preemptions, key=lambda one: one.at)
        self.dry = list(dry)
        self.stuck: set[str] = set()
        self.waiting: list[list[Piece]] = []
        self.running: list[Piece] = []
        self.floor: list[tuple[float, Job]] = []
        self.views: list[View] = []
        self.memory = PlanMemory()
        nothing = View(0.0, (), None, {}, {})
        self.seen = nothing, nothing
        self.log: list[str] = []
        self.changed = 0.0
        self.demanded = 0.0
        self.rested: dict[str, float] = {}
        self.woken = 0
        self.excess = 0
        self.next_poll = 0.0

    # --- the story ---

    def live(self) -> None:
        """Until all demand was served and nothing changes; raises Broken."""
        while self.now < FOREVER:
            self._happen()
            self._look()
            if self.now >= self.next_poll:
                self._companion()
                self.next_poll = self.now + POLL
            if not self.coming_jobs and not self.running and not self.waiting and not self.floor and self._at_rest():
                return
            self.now += STEP
            if self.now - self.changed > QUIET:
                self.now = max(self.now, min([*self._next_times(), self.now + 20.0]))
        stuck = [[(piece.chips, piece.head, piece.pin) for piece in pieces] for pieces in self.waiting]
        raise Broken(f"not all at rest in the end: waiting {stuck}, {self._states()}")

    def _at_rest(self) -> bool:
        return all(
            sum(slot.awake for slot in self._of(pool)) == pool.minimum
            and all(slot.state in (SliceState.RESTING, SliceState.JOINED) for slot in self._of(pool))
            for pool in self.pools
        )

    def _of(self, pool: SlicePool) -> list[Slot]:
        return [slot for slot in self.slots if slot.pool.name == pool.name]

    def _next_times(self) -> Iterator[float]:
        yield from (job.at for job in self.coming_jobs[:1])
        yield from (one.at for one in self.preemptions[:1])
        yield from (piece.ends for piece in self.running)
        yield from (end for end, _ in self.floor)
        yield from (one.until for one in self.dry if one.until > self.now)
        yield from (pieces[0].job.at + pieces[0].job.patience for pieces in self.waiting)
        for slot in self.slots:
            yield from slot.joins
            if slot.refused_since is not None and slot.refused_since + SPILL_SECONDS > self.now:
                yield slot.refused_since + SPILL_SECONDS
            if slot.state is SliceState.LEAVING:
                yield slot.until

    def _note(self, text: str) -> None:
        self.changed = self.now
        self.log.append(f"{self.now:8.1f} {text}")

    def _states(self) -> str:
        return ", ".join(f"{slot.name} {slot.state}" for slot in self.slots if slot.state is not SliceState.RESTING)

    def _happen(self) -> None:
        while self.preemptions and self.preemptions[0].at <= self.now:
            self._preempt(self.preemptions.pop(0).which)
        for slot in self.slots:
            if slot.state is SliceState.LEAVING and slot.until <= self.now:
                self._note(f"{slot.name} is gone")
                slot.state = SliceState.RESTING
                if slot.returns:
                    self._provision(slot)
            if slot.refused_since is not None:
                self._ask(slot)
            while slot.joins and slot.joins[0] <= self.now:
                slot.joins.pop(0)
                index = next(index for index in self._join_order(slot) if index not in slot.hosts)
                slot.hosts[index] = Host(slot, index, self.now)
                self._note(f"{slot.name}/{index} joins")
        for piece in [piece for piece in self.running if piece.ends <= self.now]:
            self._end(piece)
        self._release_heads()
        self.floor = [(end, job) for end, job in self.floor if end > self.now]
        for pieces in list(self.waiting):
            if pieces[0].job.at + pieces[0].job.patience <= self.now:
                self._withdraw(pieces[0].job)
        while self.coming_jobs and self.coming_jobs[0].at <= self.now:
            self._submit(self.coming_jobs.pop(0))
        self._place()

    def _join_order(self, slot: Slot) -> list[int]:
        return random.Random(slot.nodes).sample(range(slot.pool.hosts), slot.pool.hosts)

    def _provision(self, slot: Slot) -> None:
        slot.state, slot.returns, slot.since = SliceState.COMING, False, slot.since if slot.returns else self.now
        slot.joins, slot.hosts = [], {}
        slot.refused_since = self.now
        self._ask(slot)

    def _ask(self, slot: Slot) -> None:
        if any(one.pool == slot.pool.name and one.at <= self.now < one.until for one in self.dry):
            return
        slot.refused_since = None
        slot.nodes += 1
        up = self.now + self.rng.choice([5.0, 20.0, 90.0, 300.0])
        slot.joins = sorted(up + self.rng.choice([0.0, 0.5, 1.0, 6.0]) for _ in range(slot.pool.hosts))

    def _leave(self, slot: Slot, *, returns: bool) -> None:
        lost = [piece for host in slot.hosts.values() for piece in host.pieces]
        slot.hosts, slot.joins, slot.refused_since = {}, [], None
        # A slice that comes up and is preempted still comes up.
        slot.since = slot.since if returns and slot.state is SliceState.COMING else self.now
        slot.state, slot.returns = SliceState.LEAVING, returns
        slot.until = self.now + self.rng.choice([2.0, 15.0])
        # Ray reschedules the lost bundles of a group together.
        groups: dict[tuple[int, bool], list[Piece]] = {}
        for piece in lost:
            self.running.remove(piece)
            piece.host, piece.ends = None, FOREVER
            groups.setdefault((id(piece.together or piece), piece.head), []).append(piece)
        self.waiting += groups.values()
        if lost:
            self.demanded = self.now

    def _preempt(self, which: int) -> None:
        there = [slot for slot in self.slots if slot.state in (SliceState.COMING, SliceState.JOINED)]
        if there:
            slot = there[which % len(there)]
            self._note(f"{slot.name} is preempted")
            self._leave(slot, returns=True)

    # --- Ray ---

    def _submit(self, job: Job) -> None:
        self._note(f"{job.kind} {job.chips} {job.type} for {job.length:g} s")
        self.demanded = self.now
        if job.kind == "floor":
            self.floor.append((self.now + job.length, job))
        elif job.kind == "tasks":
            self.waiting += [[Piece(job, chips)] for chips in job.chips]
        elif job.kind == "group":
            together = object()
            self.waiting.append([Piece(job, chips, together=together) for chips in job.chips])
        else:
            self.waiting += [[Piece(job, 0, head=True, together=object())] for _ in job.chips]

    def _withdraw(self, job: Job) -> None:
        self._note(f"{job.kind} {job.chips} is withdrawn")
        self.waiting = [pieces for pieces in self.waiting if pieces[0].job is not job]
        for piece in [piece for piece in self.running if piece.job is job]:
            self._drop(piece)

    def _drop(self, piece: Piece) -> None:
        assert piece.host is not None
        self.running.remove(piece)
        piece.host.pieces.remove(piece)
        piece.host.idle_since = self.now

    def _end(self, piece: Piece) -> None:
        self._note(f"{piece.chips} chips on {piece.host and piece.host.slot.name} are free")
        self._drop(piece)

    def _place(self) -> None:
        for pieces in list(self.waiting):
            placed: list[tuple[Piece, Host]] = []
            for piece in pieces:
                apart = [host for _, host in placed] if piece.job.apart else []
                able = [
                    host
                    for slot in self.slots
                    for host in slot.hosts.values()
                    if host not in apart and host.fits(piece) and slot.state in (SliceState.COMING, SliceState.JOINED)
                ]
                if not able:
                    break
                near = {host.slot for _, host in placed}
                chosen = self.rng.choice([host for host in able if host.slot in near] or able)
                chosen.pieces.append(piece)
                placed.append((piece, chosen))
            if len(placed) < len(pieces):
                for piece, chosen in placed:
                    chosen.pieces.remove(piece)
                continue
            self.waiting.remove(pieces)
            self.running += pieces
            # Placed otherwise than packed: what still waits may need more than it seemed.
            self.demanded = self.now if self.waiting else self.demanded
            for piece, chosen in placed:
                piece.host, chosen.idle_since = chosen, self.now
                piece.began, piece.ends = self.now, self.now + piece.job.length
            self._note(f"{[piece.chips for piece in pieces]} runs on {[chosen.slot.name for _, chosen in placed]}")
            if pieces[0].head:
                self._second_step(pieces[0], placed[0][1].slot)

    def _second_step(self, head: Piece, slot: Slot) -> None:
        """A SlicePlacementGroup has its head, and asks for the slice by name, once; the head is held as long."""
        head.ends = FOREVER
        if not head.had:
            chips, hosts = slot.pool.chips, slot.pool.hosts
            self.waiting.append([Piece(head.job, chips, pin=slot.name, together=head.together) for _ in range(hosts)])
            self.demanded = self.now
        head.had = True

    def _release_heads(self) -> None:
        """A head goes with its group."""
        everything = [*self.running, *(piece for pieces in self.waiting for piece in pieces)]
        alive = {id(piece.together) for piece in everything if piece.pin}
        for head in [piece for piece in everything if piece.head and piece.had and id(piece.together) not in alive]:
            if head.host is not None:
                self._end(head)
            else:
                self.waiting.remove([head])

    # --- what the companion sees, and does ---

    def _look(self) -> None:
        hosts, room = {}, {}
        for slot in self.slots:
            hosts[slot.name] = tuple(
                host(
                    slot.pool,
                    slot.name,
                    each.index,
                    free=each.free,
                    head=each.head_free or each.index > 0,
                    idle=None if each.pieces else self.now - each.idle_since,
                    node=f"{slot.name}-a{slot.nodes}",
                )
                for each in slot.hosts.values()
            )
            room[slot.name] = tuple((each.index, each.free, each.head_free) for each in slot.hosts.values())
        waiting = tuple(tuple(replace(piece) for piece in pieces) for pieces in self.waiting)
        # Requests of programs replace each other in Ray; here the largest counts.
        floor = max((job for _, job in self.floor), key=lambda job: len(job.chips), default=None)
        if self.views and floor is not self.views[-1].floor:
            self.demanded = self.now
        self.views.append(View(self.now, waiting, floor, hosts, room))
        while self.views[0].at < self.now - SEEN and len(self.views) > 2:
            self.views.pop(0)

    def _lagging(self, before: View) -> View:
        """What a part of the next snapshot shows: never older than *before*."""
        oldest = max(before.at, self.now - self.rng.choice([0.0, 0.5, LAG]))
        return next(view for view in reversed(self.views) if view.at <= oldest or view is self.views[0])

    def _companion(self) -> None:
        demand, seen = self.seen = self._lagging(self.seen[0]), self._lagging(self.seen[1])
        slices = []
        for slot in self.slots:
            # Hosts of older nodes are known dead.
            now_there = f"{slot.name}-a{slot.nodes}"
            hosts = tuple(each for each in seen.hosts[slot.name] if each.instance == now_there and slot.awake)
            hosts = hosts if slot.state in (SliceState.COMING, SliceState.JOINED) else ()
            if slot.state in (SliceState.COMING, SliceState.JOINED):
                slot.state = SliceState.JOINED if len(hosts) == slot.pool.hosts else SliceState.COMING
            shown = SliceState.COMING if slot.returns else slot.state
            is_stuck = slot.refused_since is not None and self.now - slot.refused_since >= SPILL_SECONDS
            slices.append(Slice(slot.name, slot.pool.name, slot.index, shown, hosts, slot.since, stuck=is_stuck))
        stuck = {one.slot for one in slices if one.stuck}
        if stuck - self.stuck:
            # Its demand is new to the other pools.
            self.demanded = self.now
        self.stuck = stuck
        state = snapshot(
            *_asked(demand.waiting),
            floor=[head_of(demand.floor.type)] * len(demand.floor.chips) if demand.floor else (),
            slices=slices,
        )
        memory = self.memory
        found, self.memory = plan(state, slices, self.pools, memory, self.now)
        self._judge(found)
        by_name = {slot.name: slot for slot in self.slots}
        for name in found.wake:
            self._note(f"wake {name}: {found.wake[name]}")
            self._provision(by_name[name])
            self.woken += 1
        for name in found.rest:
            slot = by_name[name]
            if any(each.pieces for each in slot.hosts.values()) or self.rng.random() < 0.1:
                self._note(f"{name} refuses to rest")
                continue
            self._note(f"rest {name}: {found.rest[name]}")
            self.rested[slot.pool.name] = self.now
            self._leave(slot, returns=False)
        if found.unmet and any(not one.cause.waits for one in found.unmet):
            raise Broken(f"demand that can be served is called never: {found.unmet}")

    def _judge(self, found: SlicePlan) -> None:
        by_name = {slot.name: slot for slot in self.slots}
        for name in found.wake:
            slot = by_name[name]
            if slot.state is not SliceState.RESTING:
                raise Broken(f"{name} is woken while {slot.state}")
            last = self.rested.get(slot.pool.name, -FOREVER)
            if self.now - last < slot.pool.idle and self.demanded < last - LAG:
                raise Broken(f"{name} is woken {self.now - last:g} s after a slice went to rest, without new demand")
        for pool in self.pools:
            awake = sum(slot.awake for slot in self._of(pool)) + sum(by_name[name].pool is pool for name in found.wake)
            after = awake - sum(by_name[name].pool is pool for name in found.rest)
            if after < pool.minimum:
                raise Broken(f"{after} slices of {pool.name} are awake, fewer than {pool.minimum}")
            if sum(slot.state is not SliceState.RESTING for slot in self._of(pool)) > pool.maximum:
                raise Broken(f"more than {pool.maximum} slices of {pool.name}")
        if found.wake:
            woken = [by_name[name] for name in found.wake]
            dry = {slot.pool.name for slot in self.slots if slot.name in self.stuck}
            # Stuck slices do not count for pools that serve in their stead, but for their own.
            stuck = self.stuck if not any(slot.pool.name in dry for slot in woken) else set()
            needed = max(missing(view, self.slots, self.pools, woken, stuck) for view in self.views)
            self.excess += len(woken) - needed
            # Snapshots whose halves disagree twice in a row may cost one.
            if self.excess > 1:
                raise Broken(f"{', '.join(found.wake)} are woken, {needed} of them would do; {self.excess} in all")
        for name in found.rest:
            slot = by_name[name]
            if slot.state is SliceState.COMING and self.now - slot.since < UNNEEDED_SECONDS:
                raise Broken(f"{name} comes up since {self.now - slot.since:g} s only, and is sent to rest")
            busy = [host for host in slot.hosts.values() if host.pieces or self.now - host.idle_since < slot.pool.idle]
            if slot.state is SliceState.JOINED and any(not self._is_fresh(host) for host in busy):
                raise Broken(f"{name} is sent to rest, and was in use in the last {slot.pool.idle:g} s")

    def _is_fresh(self, host: Host) -> bool:
        """Its use changed so shortly ago that a snapshot may not show it."""
        began = max((piece.began for piece in host.pieces), default=host.idle_since)
        return began >= self.now - SEEN


def _asked(waiting: Sequence[Sequence[Piece]]) -> Iterator[Request | Gang]:
    """Tasks of a kind are counted together; groups are groups."""
    single: dict[tuple[int, str], int] = {}
    for pieces in waiting:
        job = pieces[0].job
        if job.kind == "tasks":
            key = (pieces[0].chips, job.type)
            single[key] = single.get(key, 0) + 1
        elif pieces[0].head:
            yield group(head_of(job.type))
        else:
            strategy = "STRICT_SPREAD" if job.apart else "PACK"
            yield group(*(_bundle(piece) for piece in pieces), strategy=strategy)
    for (chips, type), count in single.items():
        yield tasks(count, bundle({"ray.io/tpu-pod-type": type} if type else {}, TPU=chips, CPU=1))


def _bundle(piece: Piece) -> Bundle:
    if piece.pin:
        return pinned_to(piece.pin, TPU=piece.chips, CPU=1)
    return bundle(piece.job.selector, TPU=piece.chips)


# --- an exact packing -------------------------------------------------------------------------------------------------

# For each pool and slice the free chips of each host, then those that a host has, or 0 if the head is taken.
Room = tuple[tuple[tuple[int, ...], ...], ...]


def missing(
    view: View, slots: Sequence[Slot], pools: Sequence[SlicePool], woken: Sequence[Slot], stuck: Container[str]
) -> int:
    """
    How many of *woken* an exact packing needs beside what is awake and not *stuck*; all, if they do not suffice.
    """
    pinned = {piece.pin for pieces in view.waiting for piece in pieces if piece.pin}
    healing = {id(piece.together) for pieces in view.waiting for piece in pieces if piece.pin}
    awake = {slot.name for slot in slots if slot.awake}
    forced = [slot for slot in woken if slot.name in pinned]
    room: list[list[tuple[int, ...]]] = []
    spare = []
    for pool in pools:
        mine = [slot for slot in slots if slot.pool.name == pool.name]
        room.append([])
        for slot in mine:
            if slot.name not in awake or slot.name in pinned or slot.name in stuck:
                continue
            there = {index: (free, head) for index, free, head in view.room[slot.name]}
            free = tuple(there.get(index, (pool.chips, True))[0] for index in range(pool.hosts))
            head = there.get(0, (0, True))[1]
            room[-1].append((*free, pool.chips if head else 0))
        spare.append(sum(slot in mine and slot not in forced for slot in woken))
    items = _items(view, pools, healing)
    least = []
    for index, pool in enumerate(pools):
        wanted = len(view.floor.chips) if view.floor is not None and view.floor.type == pool.type else 0
        open_now = sum(slot.awake for slot in slots if slot.pool.name == pool.name)
        open_now += sum(slot.pool.name == pool.name for slot in forced)
        least.append(min(spare[index], max(0, max(wanted, pool.minimum) - open_now)))
    for total in range(sum(least), sum(spare) + 1):
        for split in itertools.product(*(range(low, most + 1) for low, most in zip(least, spare, strict=True))):
            if sum(split) != total:
                continue
            filled = tuple(
                tuple(sorted([*room[index], *[(pool.chips,) * (pool.hosts + 1)] * split[index]]))
                for index, pool in enumerate(pools)
            )
            if _fits(filled, items):
                return total + len(forced)
    return sum(spare) + len(forced)


Item = tuple[str, tuple[int, ...], bool, tuple[int, ...]]


def _items(view: View, pools: Sequence[SlicePool], healing: set[int]) -> tuple[Item, ...]:
    """(kind, chips, apart, pools) of all that waits, the largest first."""
    items: list[Item] = []
    for pieces in view.waiting:
        job = pieces[0].job
        able = tuple(index for index, pool in enumerate(pools) if job.type in ("", pool.type))
        if pieces[0].head:
            # Its slice comes back, and the head with it.
            if id(pieces[0].together) not in healing:
                items.append(("head", (), False, able))
        elif not pieces[0].pin:
            items.append(
                ("group" if len(pieces) > 1 else "task", tuple(piece.chips for piece in pieces), job.apart, able)
            )
    return tuple(sorted(items, key=lambda item: (item[0] == "task", item[0] == "group", -sum(item[1]), item)))


@functools.lru_cache(maxsize=200_000)
def _fits(room: Room, items: tuple[Item, ...]) -> bool:
    if not items:
        return True
    (kind, chips, apart, able), rest = items[0], items[1:]
    for index in able:
        options: Iterator[tuple[tuple[int, ...], ...]]
        if kind == "head":
            whole = next((one for one in room[index] if {*one} == {one[-1]} and one[-1]), None)
            if whole is None:
                continue
            left = list(room[index])
            left.remove(whole)
            options = iter([tuple(left)])
        else:
            options = iter(set(_placements(room[index], tuple(sorted(chips, reverse=True)), apart)))
        for option in options:
            if _fits((*room[:index], tuple(sorted(option)), *room[index + 1 :]), rest):
                return True
    return False


def _placements(
    room: tuple[tuple[int, ...], ...],
    chips: tuple[int, ...],
    apart: bool,
    used: frozenset[tuple[int, int]] = frozenset(),
) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not chips:
        yield room
        return
    tried = set()
    for number, one in enumerate(room):
        for place, free in enumerate(one[:-1]):
            if free < chips[0] or (apart and (number, place) in used) or (one, free) in tried:
                continue
            if not used:
                tried.add((one, free))
            after = (*room[:number], (*one[:place], free - chips[0], *one[place + 1 :]), *room[number + 1 :])
            yield from _placements(after, chips[1:], apart, used | {(number, place)})
