"""
The companion of `tpucare daemon` that follows Ray clusters: reads what they ask for, and wakes and rests slots for it.

On the thread of the loop only; `poll` never blocks. Which slots wake and rest is decided in `rules`; asking Ray,
draining and reporting to it is left to `probe`, nodes and runs to the engine.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tpucare.engine.engine import Engine
from tpucare.engine.tracking import SlotTrack
from tpucare.fleetfile.parse import FleetSpec, RayPool
from tpucare.integrations.ray import cluster as files
from tpucare.integrations.ray import rules
from tpucare.integrations.ray.cluster import HeadRecord
from tpucare.integrations.ray.demand import (
    ClusterState,
    DrainReason,
    HostState,
    HostStatus,
    PendingSlice,
    ProbeSilent,
    UnmetDemand,
)
from tpucare.integrations.ray.hosts import outfit
from tpucare.integrations.ray.packing import Slice, SlicePool, SliceState, Unmet
from tpucare.integrations.ray.probe import Probe
from tpucare.integrations.ray.rules import PlanMemory, SlicePlan
from tpucare.model import accelerators
from tpucare.model.actions import Wait
from tpucare.model.causes import Cause
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.memory import DesiredState, End, FleetRecord, Refusal
from tpucare.model.resources import Job, NodeState, parse_node_name
from tpucare.model.text import counted, plain
from tpucare.planner import desired_state
from tpucare.planner.predicates import job_mark
from tpucare.service.assembly import Runtime
from tpucare.service.fleet_registry import FleetRegistry, Outfit

# Between two looks at a cluster that asks for something or in which something moves, and at one at rest.
BUSY_SECONDS, REST_SECONDS = 1.0, 5.0
# A head that is away for so long is told of, once.
AWAY_SECONDS = 120.0
# Ray moves what it can off a host that is drained, until then.
NOTICE_SECONDS = 30.0
# A host that refused to be drained works; it is asked again after this time.
REFUSED_SECONDS = 30.0
# From then on other pools serve in the stead of a slice that all its places refuse. A zone tells of a stockout 20 to
# 90 s after the create: it was asked twice by then.
SPILL_SECONDS = 120.0


class Registry(Protocol):
    """The part of `FleetRegistry` that is used here."""

    outfit: Outfit

    @property
    def records(self) -> Mapping[str, FleetRecord]: ...

    @property
    def fleets(self) -> Mapping[str, FleetSpec]: ...

    def slots_of(self, fleet: str) -> list[str]: ...

    def declare_again(self, fleet: str) -> None: ...

    def report(
        self, kind: str, text: str, about: str = "", level: str = "warning", **fields: str | int | float | bool | None
    ) -> None: ...


class Asker(Protocol):
    """The part of `Probe` that is used here. Nothing of it blocks."""

    def follow(self, head: HeadRecord | None, every: float) -> None:
        """From now on look at this head, *every* seconds; None: at none."""

    def newest(self) -> tuple[ClusterState | TpuCareError, float] | None:
        """The last answer, and when it came (monotonic seconds); None: none yet."""

    def drain(self, ids: Sequence[str], reason: DrainReason, deadline: float, text: str) -> int:
        """Ask hosts to take no more work; returns the ticket of the answer."""

    def drained(self) -> Sequence[tuple[int, Mapping[str, bool | str]]]:
        """New answers to drains: by host whether it accepted, or an error."""

    def report(self, pending: Sequence[PendingSlice], unmet: Sequence[UnmetDemand]) -> None:
        """Tell Ray what comes up and what nothing can satisfy, for `ray status`."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Search:
    """
    How a slot that is awake looks for a node. stuck: all its places refused, for SPILL_SECONDS and more.

    since: seconds, when it began    round: the round over its places (`Memory.round_from`) that is known to be over
    """

    since: float
    round: int
    stuck: bool = False


@dataclass(slots=True)
class _Cluster:
    """
    One cluster that is followed.

    head:     as last read; `problem`: why it is not followed now, for people
    state:    the last snapshot, `read_at` (monotonic) when it came    silent_since: of an unbroken row of errors
    plan, memory: of the rules, at that snapshot
    drains:   ticket -> slot that goes to rest once all its hosts accept    refused: slot -> asked again then
    warned:   hosts that were told of their preemption
    states:   slot -> state, and since when    searches: of slots that come up and have no node that is up
    """

    asker: Asker
    head: HeadRecord | None = None
    problem: str = ""
    state: ClusterState | None = None
    read_at: float = -math.inf
    silent_since: float | None = None
    told_away: bool = False
    plan: SlicePlan = field(default_factory=SlicePlan)
    memory: PlanMemory = field(default_factory=PlanMemory)
    drains: dict[int, str] = field(default_factory=dict)
    refused: dict[str, float] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    states: dict[str, tuple[SliceState, float]] = field(default_factory=dict)
    searches: dict[str, Search] = field(default_factory=dict)
    unmet: frozenset[str] = frozenset()
    warnings: frozenset[str] = frozenset()


class RayCare:
    """
    A companion of the daemon.

    heads: the record of a cluster's head, by its name. Raises: ConfigError: none was ever started, ...
    foreign: makes the record of a head that somebody else runs    asker: makes the asker of a cluster
    known, note: the address for which a cluster's hosts were started last, kept over restarts of the daemon
    """

    topic = "ray"

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        *,
        heads: Callable[[str], HeadRecord],
        foreign: Callable[[RayPool], HeadRecord],
        asker: Callable[[str], Asker],
        known: Callable[[str], str],
        note: Callable[[str, str], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._engine, self._registry = engine, registry
        self._heads, self._foreign, self._asker = heads, foreign, asker
        self._known, self._note, self._monotonic = known, note, monotonic
        self._clusters: dict[str, _Cluster] = {}
        self._heads_read: dict[str, tuple[HeadRecord | None, str]] = {}
        registry.outfit = self._complete

    @classmethod
    def beside(cls, runtime: Runtime, registry: FleetRegistry, poll_soon: Callable[[], None]) -> RayCare:
        """The companion of a daemon, which *poll_soon* has poll it."""
        state = runtime.options.state

        def foreign(pool: RayPool) -> HeadRecord:
            return files.foreign_head(state, pool, runtime.secrets or (lambda _: None))

        return cls(
            runtime.engine,
            registry,
            heads=lambda name: files.ready_head(state, name),
            foreign=foreign,
            asker=lambda _: Probe(
                owner=runtime.store.owner,
                host=socket.gethostname(),
                on_answer=poll_soon,
                monotonic=runtime.clock.monotonic,
            ),
            known=lambda name: files.read_followed(state, name),
            note=lambda name, address: files.write_followed(state, name, address),
            monotonic=runtime.clock.monotonic,
        )

    def poll(self) -> None:
        """Look at each cluster that has a pool: a new head, a new snapshot, answers to drains."""
        pools = self._pools()
        self._heads_read.clear()
        for name in [name for name in self._clusters if name not in pools]:
            self._clusters.pop(name).asker.close()
        for name, fleets in pools.items():
            cluster = self._clusters.get(name)
            if cluster is None:
                cluster = self._clusters[name] = _Cluster(self._asker(name))
            self._follow(name, cluster, fleets)

    def rows(self) -> list[dict[str, Any]]:
        """A row per pool, for `status` and `ray status`."""
        found = []
        for name, fleets in self._pools().items():
            cluster = self._clusters.get(name)
            if cluster is not None:
                found += [self._row(name, cluster, fleet) for fleet in fleets]
        return found

    def close(self) -> None:
        for cluster in self._clusters.values():
            cluster.asker.close()

    # --- pools and heads ---------------------------------------------------------------------------------------------

    def _pools(self) -> dict[str, list[FleetSpec]]:
        """Pools that are not down, by cluster."""
        found: dict[str, list[FleetSpec]] = {}
        for name, fleet in sorted(self._registry.fleets.items()):
            record = self._registry.records.get(name)
            if fleet.ray is not None and record is not None and record.wish is not DesiredState.DOWN:
                found.setdefault(fleet.ray.cluster, []).append(fleet)
        return found

    def _complete(self, fleet: FleetSpec, job: Job) -> Job | str:
        """The outfit of pools (`FleetRegistry.outfit`)."""
        pool = fleet.ray
        if pool is None:
            return job
        head, problem = self._head_of(pool)
        if head is None:
            return problem
        if not head.ray:
            return f"the head at {head.address} has not answered yet"
        return outfit(job, head, fleet.name, pool.python, token=pool.token)

    def _head_of(self, pool: RayPool) -> tuple[HeadRecord | None, str]:
        """As `_read_head`, once between two polls: a pool may have thousands of slots."""
        if pool.cluster not in self._heads_read:
            self._heads_read[pool.cluster] = self._read_head(pool)
        return self._heads_read[pool.cluster]

    def _read_head(self, pool: RayPool) -> tuple[HeadRecord | None, str]:
        """The head of the cluster, or why its hosts cannot be started."""
        fleets = self._pools().get(pool.cluster, [])
        if len({(fleet.ray.address, fleet.ray.token) for fleet in fleets if fleet.ray is not None}) > 1:
            names = ", ".join(fleet.name for fleet in fleets)
            return (
                None,
                f"pools {names} of {pool.cluster} name different heads: give all the same `ray.address` or none",
            )
        try:
            head = self._foreign(pool) if pool.address else self._heads(pool.cluster)
        except (ConfigError, OSError) as error:
            return None, str(error)
        known = self._clusters.get(pool.cluster)
        if not head.ray and known is not None and known.state is not None:
            # A head of somebody else has no record; it tells its versions itself.
            head = replace(head, ray=known.state.ray, python_version=known.state.python)
        return head, ""

    def _follow(self, name: str, cluster: _Cluster, fleets: list[FleetSpec]) -> None:
        assert fleets[0].ray is not None
        head, problem = self._head_of(fleets[0].ray)
        if head is None and problem != cluster.problem:
            self._say(fleets, "ray-no-head", problem, "warning")
        is_moved = _identity(head) != _identity(cluster.head)
        cluster.head = head
        if head is None or is_moved:
            # Else the last answer of the head still says what is wrong.
            cluster.problem = problem
        if is_moved:
            self._announce(name, head, fleets)
        cluster.asker.follow(head, BUSY_SECONDS if _is_busy(cluster) else REST_SECONDS)
        self._apply_drains(cluster)
        self._hear(name, cluster, fleets)
        self._warn_of_preemptions(cluster, fleets)

    def _announce(self, name: str, head: HeadRecord | None, fleets: list[FleetSpec]) -> None:
        """A head that was not known: declare the pools for it; where it has moved, their hosts have to start anew."""
        for fleet in fleets:
            self._registry.declare_again(fleet.name)
        if head is None:
            return
        before, present = self._known(name), _identity(head)
        if before == present or not head.ray:
            return
        self._note(name, present)
        if not before:
            return
        for track in self._tracks(fleets):
            run = track.memory.run
            if run is not None and run.state.is_wanted and track.slot.job and run.job != job_mark(track.slot.job):
                text = f"{track.slot.name}: its Ray is started again, for the head at {head.address}"
                self._engine.change(
                    track.slot.name, desired_state.restart, "restart", text, cause=Cause.HEAD_MOVED.value
                )

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def _hear(self, name: str, cluster: _Cluster, fleets: list[FleetSpec]) -> None:
        newest = cluster.asker.newest()
        if cluster.head is None or newest is None:
            return
        answer, at = newest
        if not isinstance(answer, ClusterState):
            self._apply_silence(name, cluster, fleets, answer)
            return
        if at <= cluster.read_at:
            return
        if cluster.silent_since is not None and cluster.told_away:
            self._say(fleets, "ray-heard", f"the head of {name} answers again", "info")
        cluster.silent_since, cluster.told_away, cluster.problem = None, False, ""
        cluster.state, cluster.read_at = answer, at
        self._tell_warnings(name, cluster, fleets, answer)
        if answer.reporter:
            cluster.problem = f"{name} has another caretaker, {answer.reporter}: end one of the two"
            cluster.plan = SlicePlan()
            return
        self._apply_plan(cluster, fleets, answer, at)

    def _apply_silence(self, name: str, cluster: _Cluster, fleets: list[FleetSpec], error: TpuCareError) -> None:
        """Not knowing: no slot wakes and none rests; what runs goes on."""
        now = self._monotonic()
        cluster.problem = str(error)
        if cluster.silent_since is None:
            cluster.silent_since = now
        is_for_person = not isinstance(error, ProbeSilent)
        if not cluster.told_away and (is_for_person or now - cluster.silent_since >= AWAY_SECONDS):
            cluster.told_away = True
            self._say(fleets, "ray-away", f"{name}: {error}; no slot wakes or rests meanwhile", "error")

    def _tell_warnings(self, name: str, cluster: _Cluster, fleets: list[FleetSpec], state: ClusterState) -> None:
        told = frozenset((*state.warnings, *([f"another caretaker, {state.reporter}"] if state.reporter else ())))
        for text in sorted(told - cluster.warnings):
            self._say(fleets, "ray-warning", f"{name}: {plain(text)}", "error" if state.reporter else "warning")
        cluster.warnings = told

    def _apply_plan(self, cluster: _Cluster, fleets: list[FleetSpec], state: ClusterState, now: float) -> None:
        slices = self._slices(cluster, fleets, state, now)
        plan, cluster.memory = rules.plan(state, slices, [pool_of(fleet) for fleet in fleets], cluster.memory, now)
        cluster.plan = plan
        for slot, why in plan.wake.items():
            text = f"{slot}: wakes, {plain(why)}"
            self._engine.change(slot, desired_state.wake, "wake", text, cause=Cause.DEMAND.value)
        hosts = {one.slot: one.hosts for one in slices}
        for slot, why in plan.rest.items():
            self._rest(cluster, slot, hosts[slot], why, now)
        self._tell_unmet(cluster, fleets, plan.unmet)
        cluster.asker.report(plan.pending, [one.demand for one in plan.unmet])

    def _tell_unmet(self, cluster: _Cluster, fleets: list[FleetSpec], unmet: tuple[Unmet, ...]) -> None:
        told = frozenset(f"{one.demand.what}: {one.demand.why}" for one in unmet if not one.cause.waits)
        for text in sorted(told - cluster.unmet):
            self._say(fleets, "ray-unmet", plain(text), "warning")
        cluster.unmet = told

    # --- slots as slices ---------------------------------------------------------------------------------------------

    def _slices(self, cluster: _Cluster, fleets: list[FleetSpec], state: ClusterState, now: float) -> list[Slice]:
        by_node: dict[str, list[HostState]] = {}
        for host in state.hosts:
            if host.status is not HostStatus.DEAD:
                by_node.setdefault(host.instance, []).append(host)
        shown: dict[str, set[str]] = {}
        for name in by_node:
            if (parsed := parse_node_name(name)) is not None:
                shown.setdefault(parsed[0], set()).add(name)
        going = set(cluster.drains.values())
        found, states, searches = [], {}, {}
        for fleet in fleets:
            for track in self._tracks([fleet]):
                index = fleet.index_of(track.slot.name)
                node = serving_node(track)
                hosts = tuple(by_node.get(node, ())) if node else ()
                dying = is_dying(track, node)
                # Until Ray misses the hosts of the node before, it takes their work for placed, and asks for nothing.
                heals = dying or not shown.get(track.slot.name, set()) <= {node}
                expected = math.inf if heals else fleet.workers
                one = slice_state(track, hosts, expected, is_leaving=track.slot.name in going)
                before = cluster.states.get(track.slot.name)
                since = before[1] if before is not None and before[0] is one else now
                states[track.slot.name] = (one, since)
                stuck = False
                if one is SliceState.COMING and not (hosts or is_up(track, node)):
                    search = search_of(track, cluster.searches.get(track.slot.name), now, is_new=before is None)
                    searches[track.slot.name], stuck = search, search.stuck
                found.append(Slice(track.slot.name, fleet.name, index or 0, one, hosts, since, dying, stuck))
        cluster.states, cluster.searches = states, searches
        return found

    def _tracks(self, fleets: Sequence[FleetSpec]) -> Iterator[SlotTrack]:
        for fleet in fleets:
            for slot in self._registry.slots_of(fleet.name):
                yield self._engine.slots[slot]

    # --- drains ------------------------------------------------------------------------------------------------------

    def _rest(self, cluster: _Cluster, slot: str, hosts: Collection[HostState], why: str, now: float) -> None:
        """Let *slot* rest: at once without hosts, else once every host has accepted to be drained."""
        if now < cluster.refused.get(slot, -math.inf) or slot in cluster.drains.values():
            return
        if not hosts:
            self._let_rest(slot, why)
            return
        ticket = cluster.asker.drain(
            [host.id for host in hosts], DrainReason.IDLE_TERMINATION, 0.0, f"tpucare: {plain(why)}"
        )
        cluster.drains[ticket] = slot

    def _let_rest(self, slot: str, why: str) -> None:
        self._engine.change(slot, desired_state.rest, "rest", f"{slot}: rests, {plain(why)}", cause=Cause.RESTING.value)

    def _apply_drains(self, cluster: _Cluster) -> None:
        for ticket, answers in cluster.asker.drained():
            slot = cluster.drains.pop(ticket, None)
            if slot is None or slot not in self._engine.slots:
                continue
            if answers and all(answer is True for answer in answers.values()):
                self._let_rest(slot, "none of its hosts has work")
            else:
                # The hosts that accepted start Ray again by themselves, and the slice is whole again.
                cluster.refused[slot] = self._monotonic() + REFUSED_SECONDS

    def _warn_of_preemptions(self, cluster: _Cluster, fleets: list[FleetSpec]) -> None:
        """One announced preemption means all hosts of its slice: Ray shall move what it can before they are silent."""
        if cluster.state is None or cluster.silent_since is not None:
            return
        announced = {node for track in self._tracks(fleets) for node in preempted_nodes(track)}
        living = {host.id: host for host in cluster.state.hosts if host.status is not HostStatus.DEAD}
        cluster.warned &= living.keys()
        ids = sorted(
            host.id
            for host in living.values()
            if host.instance in announced and host.status is not HostStatus.DRAINING and host.id not in cluster.warned
        )
        if ids:
            cluster.warned |= set(ids)
            cluster.asker.drain(ids, DrainReason.PREEMPTION, NOTICE_SECONDS, "tpucare: the cloud takes this slice back")

    # --- for people --------------------------------------------------------------------------------------------------

    def _say(self, fleets: list[FleetSpec], kind: str, text: str, level: str) -> None:
        for fleet in fleets:
            self._registry.report(kind, f"{fleet.name}: {plain(text)}", fleet.name, level)

    def _row(self, name: str, cluster: _Cluster, fleet: FleetSpec) -> dict[str, Any]:
        pool, state = fleet.ray, cluster.state
        assert pool is not None
        mine = {track.slot.name: track for track in self._tracks([fleet])}
        nodes = {node: slot for slot, track in mine.items() if (node := serving_node(track))}
        hosts = [host for host in state.hosts if host.instance in nodes] if state is not None else []
        busy = Counter(nodes[host.instance] for host in hosts if host.status is HostStatus.RUNNING)
        slices = [
            {
                "slot": slot,
                "state": cluster.states[slot][0].value.lower(),
                "why": cluster.plan.wake.get(slot, ""),
                "busy_hosts": busy[slot],
                "stuck": slot in cluster.searches and cluster.searches[slot].stuck,
            }
            for slot in mine
            if slot in cluster.states
        ]
        age = self._monotonic() - cluster.read_at
        return {
            "fleet": fleet.name,
            "cluster": name,
            "type": pool.accelerator,
            "head": cluster.head.address if cluster.head is not None else "",
            "dashboard": cluster.head.dashboard if cluster.head is not None else "",
            "problem": plain(cluster.problem),
            "age_seconds": round(age, 1) if state is not None else None,
            "min": pool.minimum,
            "max": fleet.count,
            "awake": sum(not slot_rests(track) for track in mine.values()),
            "joined": sum(one["state"] == SliceState.JOINED.value.lower() for one in slices),
            "busy_hosts": busy.total(),
            "hosts": sum(host.status is not HostStatus.DEAD for host in hosts),
            "asked": _asked(state) if state is not None else "",
            "unmet": [plain(f"{one.demand.what}: {one.demand.why}") for one in cluster.plan.unmet],
            "pending": [{"slot": one.slot, "why": plain(one.why)} for one in cluster.plan.pending if one.slot in mine],
            "slices": slices,
        }


# --- a slot as the rules see it --------------------------------------------------------------------------------------


def pool_of(fleet: FleetSpec) -> SlicePool:
    assert fleet.ray is not None
    shape = accelerators.derive(fleet.ray.accelerator)
    return SlicePool(
        fleet.name,
        fleet.ray.accelerator,
        shape.hosts,
        shape.chips_per_host,
        fleet.ray.minimum,
        fleet.count,
        fleet.ray.idle.total_seconds(),
        fleet.ray.priority,
    )


def slot_rests(track: SlotTrack) -> bool:
    return not track.memory.wants_node(track.slot)


def serving_node(track: SlotTrack) -> str:
    """Name of the node that serves the slot; empty: none."""
    return next((name for name, seen in track.nodes.items() if seen.listed and track.memory.serves(name)), "")


def slice_state(track: SlotTrack, hosts: Collection[HostState], expected: float, *, is_leaving: bool) -> SliceState:
    """*hosts*: of the slot's serving node that Ray has not seen dead. *is_leaving*: they were asked to be drained."""
    memory = track.memory
    if memory.wish is DesiredState.PAUSED or memory.end is not End.NONE:
        return SliceState.FAILED
    if memory.wish is DesiredState.DOWN or is_leaving:
        return SliceState.LEAVING
    if not memory.awake:
        return SliceState.LEAVING if memory.ours or memory.asked_for else SliceState.RESTING
    if isinstance(track.action, Wait) and track.action.needs_person and not hosts:
        return SliceState.FAILED
    joined = sum(host.status in (HostStatus.RUNNING, HostStatus.IDLE) for host in hosts)
    return SliceState.JOINED if joined >= expected else SliceState.COMING


def is_up(track: SlotTrack, node: str) -> bool:
    """*node* is there for good: one that a stockout ends is listed as CREATING before."""
    seen = track.nodes.get(node)
    return seen is not None and seen.node.state is not NodeState.CREATING


def search_of(track: SlotTrack, before: Search | None, now: float, *, is_new: bool) -> Search:
    """
    The search of a slot without a node that is up. *is_new*: this process looks at the slot for the first time.

    A create under way ends no search. Where there are many places, one of them is always open again before the last
    has refused: then the begin of the next round over them tells that all did.
    """
    memory = track.memory
    if before is None:
        # Else what another pool brings up in its stead would rest after each start of a daemon.
        refused = all(memory.place(place.key).kind is not Refusal.NONE for place in track.slot.places)
        return Search(now, memory.next_number, stuck=is_new and refused)
    refused = track.action.cause is Cause.NO_PLACE_OPEN or memory.round_from > before.round
    stuck = before.stuck or (refused and now - before.since >= SPILL_SECONDS)
    return Search(before.since, max(before.round, memory.round_from), stuck)


def is_dying(track: SlotTrack, node: str) -> bool:
    """
    A worker of *node* is silent, or announced a preemption.

    Ray does the tasks of a lost host again after 1.5 s, and shows the host as running for up to 19 s more; the cloud
    may tell later still.
    """
    seen = track.nodes.get(node)
    return seen is not None and (seen.silent_since is not None or node in preempted_nodes(track))


def preempted_nodes(track: SlotTrack) -> Iterator[str]:
    """Nodes of the slot of which a worker announced a preemption."""
    for name, seen in track.nodes.items():
        if seen.report is not None and any(worker.preempted for worker in seen.report.workers):
            yield name


def _is_busy(cluster: _Cluster) -> bool:
    """Something is asked for, or moves."""
    state = cluster.state
    if state is None or state.requests or state.gangs or cluster.drains or cluster.silent_since is not None:
        return True
    return any(one in (SliceState.COMING, SliceState.LEAVING) for one, _ in cluster.states.values())


def _identity(head: HeadRecord | None) -> str:
    """What a host's Ray depends on: another address or version needs a start anew."""
    return f"{head.address} {head.ray} {head.python_version}" if head is not None else ""


def _asked(state: ClusterState) -> str:
    singles = sum(request.count for request in state.requests)
    parts = [counted(singles, "task or actor", "tasks and actors")] if singles else []
    parts += [counted(len(state.gangs), "placement group")] if state.gangs else []
    return " and ".join(parts)
