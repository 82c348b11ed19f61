"""
The effect of each kind of fault on the world, machines, runs, the daemon and people's commands.

A strike uses the operator's actions on the world, the machines, and commands of a person. It returns whether it had an
effect; a strike without one (no node to preempt at the moment) is not counted. `faults` has the rates; `history` knows
how long a fault lasts and which verdicts it explains. `STRIKES`, at the end, lists all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType

from tpucare.model.errors import StoreError
from tpucare.model.memory import DesiredState, End, Memory
from tpucare.model.resources import LABEL_FLEET, LABEL_OWNER, LABEL_SLOT, Health, Job, NodeState, Place, Slot
from tpucare.model.runs import Failure
from tpucare.planner import desired_state
from tpucare.testbed.emulator.world.life import OTHER_ENDS
from tpucare.testbed.emulator.world.queued_records import QueuedNodeSpec, QueuedSpec
from tpucare.testbed.emulator.world.records import ApiError, NodePath, NodeSpec
from tpucare.testbed.emulator.world.state import NodeLife
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.daemon import SimulatedDaemon
from tpucare.testbed.simulation.machines import SimulatedWorker
from tpucare.testbed.simulation.scenario import PROJECT, ZONES, Strike
from tpucare.testbed.simulation.store import DiskFault, ProcessDied
from tpucare.testbed.simulation.sweep import SimulatedSweep

Undo = Callable[[], object]


@dataclass
class Hand:
    """The means of a strike. `later` calls a function after so many seconds, whether or not a daemon runs then."""

    daemon: SimulatedDaemon
    later: Callable[[float, Undo], None]
    down_for: Callable[[float], None]
    """Start the next process after so many seconds; the daemon was killed."""
    asked: Callable[[str, float], None]
    """A person gives a command for that slot, which explains verdicts on it for so many seconds."""
    rng: random.Random
    strike: Strike

    @property
    def world(self) -> World:
        return self.daemon.zone.world

    @property
    def now(self) -> datetime:
        return self.daemon.clock.true_now()

    @property
    def length(self) -> timedelta:
        return timedelta(seconds=self.strike.length)

    def zone(self) -> str:
        return self.rng.choice(sorted(self.world.state.config.zones))

    def living(self) -> list[NodeLife]:
        return self.world.operator.select(self.strike.target, living=True)

    def node(self, *, ready: bool = True) -> NodeLife | None:
        wanted = NodeState.READY if ready else NodeState.CREATING
        return next((life for life in self.living() if life.record.state == wanted), None)

    def worker(self) -> SimulatedWorker | None:
        """A random machine of the slot that is up."""
        found = [
            worker
            for life in self.living()
            for worker in self.daemon.launcher.of_node(*life.path)
            if worker.up and worker.node_id == life.record.id
        ]
        return self.rng.choice(found) if found else None

    def running(self) -> SimulatedWorker | None:
        worker = self.worker()
        return worker if worker is not None and self.daemon.launcher.lives(worker) else None


Act = Callable[[Hand], bool]
"""Applies a strike; False = it had no effect."""


# --- how nodes end ---------------------------------------------------------------------------------------------------


def preempt(hand: Hand, *, shown: int | str = int(NodeState.PREEMPTED), silent: bool = False) -> bool:
    life = hand.node()
    if life is None:
        return False
    notice = timedelta(seconds=hand.rng.uniform(5, 30)) if hand.rng.random() < 0.5 else None
    return bool(hand.world.operator.preempt(life.path.node_id, hand.now, notice=notice, silent=silent, shown=shown))


def preempt_otherwise(hand: Hand) -> bool:
    return preempt(hand, shown=hand.rng.choice(OTHER_ENDS))


def preempt_creating(hand: Hand) -> bool:
    life = hand.node(ready=False)
    return life is not None and bool(hand.world.operator.preempt(life.path.node_id, hand.now))


def burst(hand: Hand) -> bool:
    """Preempt a third of a zone's nodes, and leave no capacity for new ones for a while."""
    nodes = [life for life in hand.world.operator.select("*", living=True) if life.path.zone == hand.strike.target]
    spot = [life for life in nodes if life.record.spec.is_preemptible]
    chosen = spot[:: max(1, len(spot) // max(1, len(spot) // 3))][: max(1, len(spot) // 3)] if spot else []
    for life in chosen:
        hand.world.operator.preempt(life.path.node_id, hand.now, shown=None, burst=timedelta(minutes=1))
    if chosen:
        sold_out(hand)
    return bool(chosen)


def terminate(hand: Hand) -> bool:
    life = hand.node()
    return life is not None and bool(hand.world.operator.terminate(life.path.node_id, hand.now))


def forget(hand: Hand) -> bool:
    lives = hand.living()
    return bool(lives) and bool(hand.world.operator.remove(lives[0].path.node_id, hand.now))


# --- what the API shows ----------------------------------------------------------------------------------------------


def unhealthy(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    name, bad = life.path.node_id, hand.rng.choice((0, 3, 4, 5, 99))
    hand.world.operator.set_health(name, bad, hand.now)
    hand.later(hand.strike.length, lambda: hand.world.operator.set_health(name, int(Health.HEALTHY), hand.now))
    return True


def show(*states: int) -> Act:
    def act(hand: Hand) -> bool:
        life = hand.node()
        if life is None:
            return False
        hand.world.operator.set_state(life.path.node_id, hand.rng.choice(states), hand.now)
        if hand.strike.length:
            hand.later(hand.strike.length, lambda: _show_again(hand.world, life, hand.now))
        return True

    return act


def _show_again(world: World, life: NodeLife, now: datetime) -> None:
    if not (life.gone or life.deleting or life.dead):
        world.operator.set_state(life.path.node_id, int(NodeState.READY), now)


def hide(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    hide_for(hand, life, hand.strike.length)
    return True


def hide_for(hand: Hand, life: NodeLife, seconds: float) -> None:
    """Leave the node out of lists for so long."""
    listing = hand.world.state.listing(life.path.project)
    listing.hide(life.path, life.record.id)
    hand.later(seconds, lambda: None if life.gone else listing.show(life.record))


def flip_back(hand: Hand) -> bool:
    """
    The API shows the node dead for a moment, then READY again; sometimes its slot is paused just then, or its delete is
    answered 14.
    """
    life = hand.node()
    if life is None or not life.record.spec.is_preemptible:
        return False
    if hand.rng.random() < 0.5:
        wish(DesiredState.PAUSED)(hand)
    if hand.rng.random() < 0.5:
        for _ in range(10):
            hand.world.operator.fail_next("DeleteNode", 14, "The service is currently unavailable.")
    state = hand.rng.choice((int(NodeState.PREEMPTED), int(NodeState.TERMINATED)))
    hand.world.operator.set_state(life.path.node_id, state, hand.now)
    hand.later(hand.rng.uniform(1.0, 30.0), lambda: _show_again(hand.world, life, hand.now))
    return True


def stick(hand: Hand) -> bool:
    return bool(hand.world.operator.stick_deleting(hand.strike.target, hand.now, repeats=hand.rng.randint(1, 2)))


def stop_node(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    name = life.record.name
    try:
        hand.world.api.stop_node(name, hand.now)
    except ApiError:
        return False
    hand.later(hand.strike.length + 300.0, lambda: _start_node(hand.world, name, hand.now))
    return True


def _start_node(world: World, name: str, now: datetime) -> None:
    try:
        world.api.start_node(name, now)
    except ApiError:
        return


# --- workers and the runs on them: silence, reboots, host keys, exits and hangs, lost stops ---------------------------


UNPUBLISHED = 1000
WANTED_AGAIN_AFTER = 1800.0
NO_GUEST_ATTRIBUTES = "The resource 'hostkeys/' of type 'Guest Attribute' was not found."

# --- workers ---------------------------------------------------------------------------------------------------------


def silence(hand: Hand) -> bool:
    worker = hand.worker()
    if worker is None:
        return False
    name, number = worker.key.name, worker.number
    hand.world.operator.lose_worker(name, number, hand.now, silent=True)
    hand.later(hand.strike.length, lambda: hand.world.operator.restore_worker(name, number, hand.now))
    return True


def lose_worker(hand: Hand) -> bool:
    worker = hand.worker()
    return worker is not None and bool(hand.world.operator.lose_worker(worker.key.name, worker.number, hand.now))


def miss_worker(hand: Hand) -> bool:
    hand.world.operator.miss_worker()
    return True


def reboot(hand: Hand) -> bool:
    life = hand.node()
    return life is not None and bool(hand.world.operator.maintenance(life.path.node_id, hand.now, restart=True))


def next_boot(how: str) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.launcher.boots.append(how)
        return True

    return act


def change_host_key(hand: Hand) -> bool:
    """Change the host key; the guest agent publishes the new one a little later."""
    worker = hand.worker()
    if worker is None:
        return False
    worker.host_key += "x"
    name = str(NodePath(*worker.key))
    number, key = worker.number, worker.host_key
    delay = hand.rng.uniform(0, 300)
    hand.later(delay, lambda: hand.world.operator.set_guest_attribute(name, number, "hostkeys", "ssh-ed25519", key))
    return True


def change_key_unvouched(hand: Hand) -> bool:
    """Change the host key while guest attributes answer 404, as for a guest that has published none."""
    if not change_host_key(hand):
        return False
    for _ in range(UNPUBLISHED):
        hand.world.operator.fail_next("GetGuestAttributes", 5, NO_GUEST_ATTRIBUTES)
    hand.later(hand.strike.length, lambda: hand.world.operator.cancel_orders("GetGuestAttributes"))
    return True


# --- runs ------------------------------------------------------------------------------------------------------------


def end_run(status: int | None, failure: Failure = Failure.CRASH) -> Act:
    def act(hand: Hand) -> bool:
        worker = hand.running()
        if worker is not None:
            hand.daemon.launcher.end(worker, status, failure)
        return worker is not None

    return act


def leave_container(hand: Hand) -> bool:
    """Leave a container on the chips: it is no child of the run, and only its own daemon ends it."""
    worker = hand.running()
    if worker is None:
        return False
    worker.holds_chips = True
    hand.daemon.launcher.end(worker, 137)
    hand.later(hand.strike.length, lambda: setattr(worker, "holds_chips", False))
    return True


def hang(hand: Hand) -> bool:
    hung = [worker for worker in hand.daemon.launcher.running() if worker.run and worker.run.slot == hand.strike.target]
    for worker in hung:
        hand.daemon.launcher.hang(worker)
    return bool(hung)


def hang_and_restart(hand: Hand) -> bool:
    """Hang a run, and kill the daemon, which has seen its progress."""
    if hand.daemon.store is None or not hang(hand):
        return False
    hand.later(hand.rng.uniform(0.0, 120.0), lambda: _kill(hand))
    return True


def _kill(hand: Hand) -> None:
    if hand.daemon.store is not None:
        hand.daemon.kill()
        hand.down_for(hand.strike.length)


def hang_early(hand: Hand) -> bool:
    """Let the slot's next run hang after its first steps."""
    early, slot = hand.daemon.launcher.script.hangs_early, hand.strike.target
    early[slot] = hand.rng.randint(1, 3)
    hand.later(hand.strike.length, lambda: early.pop(slot, None))
    # A run has to begin for that.
    return asked_again(hand)


def fail_together(hand: Hand) -> bool:
    """Something that all runs need is down: new runs fail, in their setup or after it, and half of the others crash."""
    launcher = hand.daemon.launcher
    in_setup = hand.rng.random() < 0.5
    launcher.script.outage = Failure.SETUP if in_setup else Failure.CRASH
    launcher.script.outage_seconds = 10.0 if in_setup else 40.0
    for worker in list(launcher.running()):
        if worker.number == 0 and worker.run is not None and hand.rng.random() < 0.5:
            worker.run.blameless = True
            launcher.end(worker, status=1)
    hand.later(hand.strike.length, lambda: setattr(launcher.script, "outage", None))
    return True


def _finish(hand: Hand) -> bool:
    launcher = hand.daemon.launcher
    ending = [worker for worker in launcher.running() if worker.run and worker.run.slot == hand.strike.target]
    for worker in ending:
        launcher.end(worker, status=0)
    hand.later(WANTED_AGAIN_AFTER, lambda: want_again(hand, hand.strike.target))
    return bool(ending)


def finish_and_preempt(hand: Hand) -> bool:
    """The run succeeds, and its node is preempted within the minute."""
    life = hand.node()
    if life is None or not _finish(hand):
        return False
    node_id, name = life.record.id, life.path.node_id
    hand.later(hand.rng.uniform(15.0, 55.0), lambda: _preempt_same(hand, name, node_id))
    return True


def _preempt_same(hand: Hand, name: str, node_id: int) -> None:
    if any(life.record.id == node_id for life in hand.world.operator.select(name, living=True)):
        hand.world.operator.preempt(name, hand.now)


def notice_without_end(hand: Hand) -> bool:
    """An announced maintenance does not happen; some time after it, the run succeeds."""
    life = hand.node()
    if life is None or hand.running() is None:
        return False
    hand.world.operator.maintenance(
        life.path.node_id, hand.now, duration=timedelta(seconds=60), event="MIGRATE_ON_HOST_MAINTENANCE"
    )
    hand.later(hand.strike.length, lambda: _finish(hand))
    return True


def exit_on_notice(hand: Hand) -> bool:
    life, script, slot = hand.node(), hand.daemon.launcher.script, hand.strike.target
    if life is None or hand.running() is None:
        return False
    script.on_notice.add(slot)
    hand.later(120.0, lambda: script.on_notice.discard(slot))
    return bool(
        hand.world.operator.preempt(life.path.node_id, hand.now, notice=timedelta(seconds=hand.rng.uniform(10, 30)))
    )


def ignore_stop(hand: Hand) -> bool:
    ignored, slot = hand.daemon.launcher.script.ignores_stop, hand.strike.target
    ignored.add(slot)
    hand.later(hand.strike.length, lambda: ignored.discard(slot))
    # A stop has to be sent for that.
    return asked_again(hand)


def lose(what: str) -> Act:
    def act(hand: Hand) -> bool:
        # One at a time: long storms have more of these strikes than stops, and no stop would ever arrive.
        lost = hand.daemon.launcher.lost
        is_new, lost[what] = not lost[what], 1
        return is_new

    return act


# --- the API: creates, lost answers, listings, outages, capacity ------------------------------------------------------


FOR_EVER = timedelta(days=3650)
READS_LEFT = 4

# --- creates and answers ---------------------------------------------------------------------------------------------


def fail_create(code: int, text: str, *, in_operation: bool) -> Act:
    def act(hand: Hand) -> bool:
        zone = hand.zone()
        hand.world.operator.fail_next_create(code, text.format(zone=zone), in_operation=in_operation)
        return True

    return act


def sold_out(hand: Hand) -> bool:
    """Existing nodes may stay; the zone has no more capacity."""
    world, zone = hand.world, hand.strike.target
    declared = [place for slots in hand.daemon.declared.values() for slot in slots for place in slot.places]
    for kind in sorted({place.accelerator_type for place in declared if place.zone == zone}):
        held = [life for life in world.operator.select("*", living=True) if life.path.zone == zone]
        spot = [life for life in held if life.accelerator.type == kind and life.record.spec.is_preemptible]
        world.operator.set_capacity(zone, kind, "spot", len(spot), hand.now)
        hand.later(hand.strike.length, partial(_restore_capacity, hand, zone, kind))
    return True


def _restore_capacity(hand: Hand, zone: str, kind: str) -> None:
    hand.world.operator.set_capacity(zone, kind, "spot", None, hand.now)


def late_create(hand: Hand) -> bool:
    hand.world.operator.delay_next("CreateNode", hand.strike.length)
    return True


def lose_answer(*, applied: bool) -> Act:
    def act(hand: Hand) -> bool:
        method = hand.rng.choice(("CreateNode", "DeleteNode"))
        hand.world.operator.lose_next_answer(method, applied=applied, code=hand.rng.choice((14, 4)))
        return True

    return act


def limit_reads(hand: Hand) -> bool:
    """Limit reads, as when other tools of the project use most of its read quota."""
    hand.world.calls.limit_reads(READS_LEFT)
    hand.later(hand.strike.length, lambda: hand.world.calls.limit_reads(None))
    return True


def fail_listing(hand: Hand) -> bool:
    hand.world.operator.fail_next("ListNodes", hand.rng.choice((14, 13, 16, 8)), "no listing for now")
    return True


def outage(kind: str) -> Act:
    def act(hand: Hand) -> bool:
        zone = hand.strike.target if kind == "zone" else ""
        hand.world.operator.outage(kind, hand.length, hand.now, zone=zone, seconds=hand.rng.uniform(5, 40))
        return True

    return act


def darken_zone_for_ever(hand: Hand) -> bool:
    """Let a zone never answer again, not in the calm either."""
    dark = hand.daemon.zone.dark_for_ever
    if dark:
        return False
    dark.add(hand.strike.target)
    hand.world.operator.outage("zone", FOR_EVER, hand.now, zone=hand.strike.target)
    return True


def all_slow(hand: Hand) -> bool:
    launcher = hand.daemon.launcher
    launcher.slow = hand.rng.uniform(2, 30)
    hand.later(hand.strike.length, lambda: setattr(launcher, "slow", 0.0))
    return outage("slow")(hand)


def deafen(hand: Hand) -> bool:
    launcher = hand.daemon.launcher
    launcher.deaf = True
    hand.later(hand.strike.length, lambda: setattr(launcher, "deaf", False))
    return True


def go_dark(hand: Hand) -> bool:
    return deafen(hand) and outage("api")(hand)


# --- the daemon's process and its machine: kills, the disk, the clock -------------------------------------------------
# `store` decides which commits a disk keeps.


def kill(hand: Hand) -> bool:
    if hand.daemon.store is None:
        return False
    hand.daemon.kill()
    hand.down_for(hand.strike.length)
    return True


def kill_before_effects(hand: Hand) -> bool:
    """Kill the process when intents are on the disk and none of their effects has begun."""
    if hand.daemon.store is None:
        return False
    hand.daemon.executor.dead = True
    hand.daemon.engine.step()
    return kill(hand)


def kill_under_way(hand: Hand) -> bool:
    """Kill the process; some of its calls in flight still arrive."""
    if hand.daemon.store is None or not hand.daemon.executor.under_way:
        return False
    hand.daemon.kill(lambda: hand.rng.random() < 0.5)
    hand.down_for(hand.strike.length)
    return True


def disk(fault: DiskFault) -> Act:
    def act(hand: Hand) -> bool:
        faults = hand.daemon.disk.faults
        faults.append(fault)
        if fault is DiskFault.FULL:
            # Each start and each commit fails until there is space again.
            hand.later(hand.strike.length, faults.clear)
            faults.extend([fault] * 50)
        return True

    return act


def jump(sign: int) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.clock.jump(sign * hand.length)
        return True

    return act


# --- people: commands for a slot, and nodes of their own --------------------------------------------------------------


# In seconds; the world reuses an address after two.
ADDRESSES_FREE_AFTER = 3.0
ASKED_AGAIN_AFTER = 60.0


def wish(wish: DesiredState) -> Act:
    def act(hand: Hand) -> bool:
        daemon, slot = hand.daemon, hand.strike.target
        if daemon.store is None or slot not in daemon.engine.slots:
            return False
        hand.asked(slot, hand.strike.length + 3600.0)
        # First, because the command may kill the process.
        hand.later(hand.strike.length, lambda: _back_up(daemon, slot, hand))
        daemon.wish(slot, wish)
        return True

    return act


def _back_up(daemon: SimulatedDaemon, slot: str, hand: Hand) -> None:
    if daemon.store is None:
        hand.later(ASKED_AGAIN_AFTER, lambda: _back_up(daemon, slot, hand))
        return
    try:
        daemon.wish(slot, DesiredState.UP)
    except (StoreError, ProcessDied):
        # The person saw the command fail and repeats it.
        hand.later(ASKED_AGAIN_AFTER, lambda: _back_up(daemon, slot, hand))
        raise


def want_again(hand: Hand, slot: str) -> None:
    """A person asks for another run of a slot that is done."""
    daemon = hand.daemon
    memory = daemon.disk.memories.get(slot)
    if daemon.store is not None and memory is not None and memory.end is End.DONE and slot in daemon.engine.slots:
        hand.asked(slot, 0.0)
        daemon.engine.change(slot, desired_state.up, "up", f"{slot}: wanted again")


def asked(name: str) -> Act:
    def act(hand: Hand) -> bool:
        daemon, slot = hand.daemon, hand.strike.target
        if daemon.store is None or slot not in daemon.engine.slots:
            return False
        hand.asked(slot, 7200.0)
        daemon.engine.change(slot, lambda memory: _with(memory, name), name, f"{slot}: {name}")
        return True

    return act


def _with(memory: Memory, name: str) -> Memory:
    return replace(memory, replace_asked=True) if name == "replace" else replace(memory, restart_asked=True)


asked_again = asked("restart")


def foreign(hand: Hand) -> bool:
    memory = hand.daemon.disk.memories.get(hand.strike.target)
    number = memory.next_number if memory is not None else 0
    return _other_node(hand, f"{hand.strike.target}-a{number}", {LABEL_OWNER: "o-somebodyelse"})


def stray(hand: Hand) -> bool:
    labels = {LABEL_OWNER: hand.daemon.disk.owner, LABEL_FLEET: "forgotten", LABEL_SLOT: "forgotten-0"}
    return _other_node(hand, f"forgotten-0-a{hand.rng.randrange(10**6)}", labels)


def take_addresses(hand: Hand) -> bool:
    """A node vanishes, lists still show it for a while, and a foreign node gets its addresses."""
    life = hand.node()
    if life is None:
        return False
    record, listing = life.record, hand.world.state.listing(PROJECT)
    hand.world.operator.remove(record.path.node_id, hand.now)
    listing.show(record)
    hand.later(hand.strike.length, lambda: listing.hide(record.path, record.id))
    name, kind, zone = f"theirs-{hand.rng.randrange(10**6)}", record.spec.accelerator_type, record.path.zone
    hand.later(ADDRESSES_FREE_AFTER, lambda: _other_node(hand, name, {}, kind, zone))
    return True


def _other_node(hand: Hand, name: str, labels: Mapping[str, str], kind: str = "v2-8", zone: str = "") -> bool:
    """Make a node without the daemon; it is removed after a while."""
    world, parent = hand.world, f"projects/{PROJECT}/locations/{zone or hand.zone()}"
    spec = NodeSpec(kind, runtime_version="tpu-ubuntu2204-base", labels=dict(labels))
    try:
        world.api.create_node(parent, name, spec, hand.now)
    except ApiError:
        return False
    path = f"{parent}/nodes/{name}"
    hand.later(hand.strike.length, lambda: _remove(world, path, hand))
    return True


def _remove(world: World, path: str, hand: Hand) -> None:
    if path in {record.name for record in world.nodes()}:
        world.operator.remove(path, hand.now)


# --- people: edits of the fleet file, and of labels -------------------------------------------------------------------


SOMEBODY = "o-somebodyelse"
# Kinds with as many hosts as the other, so that a gang stays as large as it is.
OTHER_KINDS = {"v2-8": "v3-8", "v3-8": "v2-8", "v3-32": "v2-32", "v2-32": "v3-32"}

# --- the fleet's file ------------------------------------------------------------------------------------------------

Edit = Callable[[Hand, list[Slot]], list[Slot]]


def edit(hand: Hand) -> bool:
    """Change one key in the file of the slot's fleet: count, with or without a file per slot, type, zones or job."""
    daemon, fleet = hand.daemon, hand.strike.target.rpartition("-")[0]
    slots = daemon.declared.get(fleet)
    if not slots:
        return False
    name, change = hand.rng.choice(sorted(EDITS.items()))
    edited = change(hand, slots)
    if edited == slots:
        return False
    if name.startswith("count"):
        (daemon.own_files.add if name == "count with own files" else daemon.own_files.discard)(fleet)
        hand.later(hand.strike.length, lambda: _raise_count(hand, fleet, slots[-1]))
    daemon.edit(fleet, edited)
    return True


def _lower_count(_hand: Hand, slots: list[Slot]) -> list[Slot]:
    return slots[:-1] if len(slots) > 1 else slots


def _raise_count(hand: Hand, fleet: str, slot: Slot) -> None:
    slots = hand.daemon.declared[fleet]
    if slot.name not in {one.name for one in slots}:
        hand.daemon.edit(fleet, [*slots, replace(slot, places=slots[0].places, job=slots[0].job)])


def _change_places(change: Callable[[tuple[Place, ...]], tuple[Place, ...]]) -> Edit:
    return lambda _hand, slots: [replace(slot, places=change(slot.places)) for slot in slots]


def _other_kind(places: tuple[Place, ...]) -> tuple[Place, ...]:
    kinds = [OTHER_KINDS.get(place.accelerator_type, place.accelerator_type) for place in places]
    return tuple(replace(place, accelerator_type=kind) for place, kind in zip(places, kinds, strict=True))


def _other_zone(places: tuple[Place, ...]) -> tuple[Place, ...]:
    if len(places) > 1:
        return (*places[1:], places[0])
    other = next((zone for zone in ZONES if zone != places[0].zone), places[0].zone)
    return (replace(places[0], zone=other),)


def _other_job(hand: Hand, slots: list[Slot]) -> list[Slot]:
    job = slots[0].job or Job(run="python3 train.py")
    edited = replace(job, run=f"python3 train.py --edit {hand.rng.randrange(10**6)}")
    return [replace(slot, job=edited) for slot in slots]


EDITS: Mapping[str, Edit] = {
    "count": _lower_count,
    "count with own files": _lower_count,
    "job": _other_job,
    "type": _change_places(_other_kind),
    "zones": _change_places(_other_zone),
}

# --- labels ----------------------------------------------------------------------------------------------------------


def relabel(hand: Hand) -> bool:
    """Change the slot or fleet label of a node, for a while or for good."""
    life = hand.node()
    if life is None:
        return False
    label, value = hand.rng.choice(
        ((LABEL_SLOT, "other-0"), (LABEL_SLOT, ""), (LABEL_FLEET, "other"), (LABEL_FLEET, ""))
    )
    before = dict(life.record.spec.labels)
    _label(hand, life, {**before, label: value})
    if hand.rng.random() < 0.5:
        hide_for(hand, life, hand.rng.uniform(5.0, 300.0))
    if hand.rng.random() < 0.5:
        hand.later(hand.strike.length, lambda: _label(hand, life, before))
    return True


def change_owner(hand: Hand) -> bool:
    """Label a node with another owner; later give it back, or delete it."""
    life = hand.node()
    if life is None or life.record.spec.labels.get(LABEL_OWNER) != hand.daemon.disk.owner:
        return False
    before = dict(life.record.spec.labels)
    _label(hand, life, {**before, LABEL_OWNER: SOMEBODY})
    if hand.rng.random() < 0.5:
        hide_for(hand, life, hand.rng.uniform(5.0, 300.0))
    if hand.rng.random() < 0.5:
        hand.later(hand.strike.length, lambda: _label(hand, life, before))
    else:
        hand.later(hand.strike.length, lambda: _delete(hand, life))
    if hand.daemon.store is not None and hand.rng.random() < 0.3:
        hand.daemon.kill()
        hand.down_for(hand.rng.uniform(1.0, 60.0))
    return True


def _label(hand: Hand, life: NodeLife, labels: Mapping[str, str]) -> None:
    if life.gone or life.deleting:
        return
    spec = NodeSpec(labels={key: value for key, value in labels.items() if value})
    with suppress(ApiError):
        hand.world.api.update_node(life.record.name, ("labels",), spec, hand.now)


def _delete(hand: Hand, life: NodeLife) -> None:
    if not life.gone:
        hand.world.operator.remove(life.record.name, hand.now)


# --- sweeps of W&B ----------------------------------------------------------------------------------------------------
# Without a fleet that works for a sweep these strikes have no effect.


def silence_server(hand: Hand) -> bool:
    sweeps = list(hand.daemon.sweeps.values())
    for sweep in sweeps:
        sweep.down = True
        hand.later(hand.strike.length, lambda sweep=sweep: setattr(sweep, "down", False))  # type: ignore[misc]
    return bool(sweeps)


def stop_interrupted(hand: Hand) -> bool:
    """Preempt the node of an agent with a notice, and stop the sweep around then, in half of the cases for good."""
    for fleet in sorted(hand.daemon.sweeps):
        sweep = hand.daemon.sweeps[fleet]
        working = [agent.worker for agent in sweep.agents.values() if agent.run is not None]
        if not sweep.hands_out or not working:
            continue
        notice = timedelta(seconds=hand.rng.uniform(10.0, 30.0))
        hand.world.operator.preempt(hand.rng.choice(working).key.name, hand.now, notice=notice)
        hand.later(hand.rng.uniform(1.0, 180.0), lambda sweep=sweep: setattr(sweep, "hands_out", False))  # type: ignore[misc]
        if hand.rng.random() < 0.5:
            hand.later(600.0 + hand.strike.length, lambda sweep=sweep: _resume(hand, sweep))  # type: ignore[misc]
        return True
    return False


def _resume(hand: Hand, sweep: SimulatedSweep) -> None:
    """`wandb sweep --resume`, and `up` for slots whose agents had left."""
    sweep.hands_out = True
    for slot in [slot.name for slot in hand.daemon.declared[sweep.fleet]]:
        want_again(hand, slot)


# --- all strikes ------------------------------------------------------------------------------------------------------


QUOTA_TEXT = "Quota limit 'TPUV2sPreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 8 in zone {zone}."
POLICY_TEXT = "Constraint constraints/compute.requireOsLogin violated for project simulated."
RATE_TEXT = "Quota exceeded for quota metric 'Create requests' and limit 'Create requests per minute' of service 'tpu.googleapis.com'."  # noqa: E501

# --- queues ----------------------------------------------------------------------------------------------------------


def _on_requests(hand: Hand, act: Callable[[str, datetime], list[str]]) -> bool:
    found = [path.queued_id for path in sorted(hand.world.state.queue) if _is_of(path.queued_id, hand.strike.target)]
    return [name for name in found if act(name, hand.now)] != []


def _is_of(name: str, slot: str) -> bool:
    return name.rpartition("-a")[0] == slot


def fail_request(hand: Hand) -> bool:
    code, text = hand.rng.choice(
        (
            (8, "There is no more capacity in the zone"),
            (8, "Quota 'TPUSPerZone' exhausted. Limit 4 in zone"),
            (13, "an internal error has occurred"),
        )
    )
    return _on_requests(hand, lambda name, now: hand.world.operator.fail_queued(name, code, text, now))


def lose_queue_answer(hand: Hand) -> bool:
    method = hand.rng.choice(("CreateQueuedResource", "DeleteQueuedResource"))
    applied, code = hand.rng.random() < 0.5, hand.rng.choice((14, 4))
    hand.world.operator.lose_next_answer(method, applied=applied, code=code)
    if method == "CreateQueuedResource" and hand.rng.random() < 0.5:
        # A request that stands is asked for once in hours: here, now.
        fail_request(hand)
    return True


def refuse_request(hand: Hand) -> bool:
    code, text = hand.rng.choice(
        (
            (8, "The project has too many queued resources in location"),
            (8, "Quota exceeded for quota metric 'Create requests' and limit 'per minute'"),
            (13, "Internal error. Please try again."),
        )
    )
    hand.world.operator.fail_next("CreateQueuedResource", code, text)
    return True


def fail_queue_listing(hand: Hand) -> bool:
    for _ in range(hand.rng.randint(1, 30)):
        hand.world.operator.fail_next("ListQueuedResources", hand.rng.choice((14, 13, 8)), "no listing for now")
    return True


def hang_queue_delete(hand: Hand) -> bool:
    for _ in range(hand.rng.randint(1, 12)):
        hand.world.operator.fail_next("DeleteQueuedResource", hand.rng.choice((14, 13, 9)), "not now")
    return True


def foreign_request(hand: Hand) -> bool:
    """Somebody else asks for a queued resource under the slot's next name, and deletes it later."""
    memory, slot = hand.daemon.disk.memories.get(hand.strike.target), hand.strike.target
    declared = [one for slots in hand.daemon.declared.values() for one in slots if one.name == slot]
    if memory is None or not declared:
        return False
    zone, name = declared[0].places[0].zone, f"{slot}-a{memory.next_number}"
    parent = f"projects/{PROJECT}/locations/{zone}"
    spec = NodeSpec(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base", labels={LABEL_OWNER: "another"})
    wish_list = QueuedSpec((QueuedNodeSpec(spec, parent, f"theirs-{name}"),), "spot")
    try:
        hand.world.queued_api.create_queued_resource(parent, name, wish_list, hand.now)
    except ApiError:
        return False
    hand.later(hand.strike.length, lambda: _withdraw(hand.world, f"{parent}/queuedResources/{name}", hand.now))
    return True


def _withdraw(world: World, name: str, now: datetime) -> None:
    with suppress(ApiError):
        world.queued_api.delete_queued_resource(name, True, now)


STRIKES: Mapping[str, Act] = MappingProxyType(
    {
        "preempted": preempt,
        "preempted-in-a-burst": burst,
        "preempted-unreported": lambda hand: preempt(hand, shown="never"),
        "preempted-shown-otherwise": preempt_otherwise,
        "preempted-silently": lambda hand: preempt(hand, silent=True),
        "preempted-while-creating": preempt_creating,
        "terminated": terminate,
        "forgotten": forget,
        "flips-back": flip_back,
        "silent-worker": silence,
        "lost-worker": lose_worker,
        "missing-worker": miss_worker,
        "rebooted": reboot,
        "key-refused": next_boot("refuses"),
        "key-refused-for-good": next_boot("refuses for good"),
        "host-key-changed": change_host_key,
        "guest-404": change_key_unvouched,
        "dirty-host": next_boot("dirty"),
        "foreign-process": next_boot("foreign"),
        "chips-held": next_boot("held"),
        "container-left": leave_container,
        "guarded": next_boot("guarded"),
        "address-reused": take_addresses,
        "crashed": end_run(1),
        "out-of-memory": end_run(None),
        "hung": hang,
        "hang-then-restart": hang_and_restart,
        "one-signal-hang": hang_early,
        "dependency-down": fail_together,
        "finished-then-preempted": finish_and_preempt,
        "notice-without-end": notice_without_end,
        "exit-0-under-preemption": exit_on_notice,
        "setup-failed": end_run(1, Failure.SETUP),
        "stop-ignored": ignore_stop,
        "launch-lost-before": lose("launch-before"),
        "launch-lost-after": lose("launch-after"),
        "stop-lost": lose("stop"),
        "unhealthy": unhealthy,
        "repairing": show(int(NodeState.REPAIRING)),
        "repair-failed": show(int(NodeState.UNKNOWN)),
        "odd-state": show(int(NodeState.HIDDEN), int(NodeState.REIMAGING), 0, 77),
        "missing-from-list": hide,
        "stuck-delete": stick,
        "stopped-by-somebody": stop_node,
        "stockout": fail_create(8, 'There is no more capacity in the zone "{zone}"', in_operation=True),
        "zone-sold-out": sold_out,
        "quota-refused": fail_create(8, QUOTA_TEXT, in_operation=False),
        "rate-limited": fail_create(8, RATE_TEXT, in_operation=False),
        "permission-denied": fail_create(7, "Permission 'tpu.nodes.create' denied", in_operation=False),
        "policy-refused": fail_create(9, POLICY_TEXT, in_operation=True),
        "create-failed": fail_create(13, "an internal error has occurred", in_operation=True),
        "create-granted-late": late_create,
        "answer-lost-before": lose_answer(applied=False),
        "answer-lost-after": lose_answer(applied=True),
        "listing-failed": fail_listing,
        "reads-limited": limit_reads,
        "zone-unreachable": outage("zone"),
        "zone-dark-for-ever": darken_zone_for_ever,
        "api-down": outage("api"),
        "api-slow": outage("slow"),
        "everything-slow": all_slow,
        "network-dark": go_dark,
        "workers-unreachable": deafen,
        "killed": kill,
        "killed-before-effects": kill_before_effects,
        "killed-with-effects-under-way": kill_under_way,
        "torn-commit": disk(DiskFault.TORN),
        "killed-after-commit": disk(DiskFault.CUT),
        "disk-full": disk(DiskFault.FULL),
        "clock-forward": jump(1),
        "clock-back": jump(-1),
        "suspended": lambda _hand: True,
        "paused": wish(DesiredState.PAUSED),
        "taken-down": wish(DesiredState.DOWN),
        "replaced": asked("replace"),
        "restarted": asked_again,
        "edited": edit,
        "relabelled": relabel,
        "taken-back": change_owner,
        "queue-failed": fail_request,
        "queue-suspended": lambda hand: _on_requests(hand, hand.world.operator.suspend_queued),
        "queue-forgotten": lambda hand: _on_requests(hand, hand.world.operator.forget_queued),
        "queue-answer-lost": lose_queue_answer,
        "queue-refused": refuse_request,
        "queue-listing-failed": fail_queue_listing,
        "queue-delete-hangs": hang_queue_delete,
        "queue-foreign": foreign_request,
        "wandb-down": silence_server,
        "sweep-stopped": stop_interrupted,
        "foreign-node": foreign,
        "stray": stray,
    }
)
