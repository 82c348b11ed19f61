"""
What each kind of fault does to the world, to machines, to runs, to the daemon and to what people ask for.

A strike acts through doors that exist for others too: the operator's hand on the world, the machines, a person's wish.
Each says whether it took hold; what did not (nothing to preempt just now) is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType

from tpucare.emulator.ending import OTHER_ENDS
from tpucare.emulator.records import ApiError, NodeSpec
from tpucare.emulator.state import NodeLife
from tpucare.emulator.world import World
from tpucare.memory import Memory, Wish
from tpucare.model import LABEL_FLEET, LABEL_OWNER, LABEL_SLOT, Failure, Health, NodeState
from tpucare.simulation.daemon import Daemon
from tpucare.simulation.machines import SimulatedWorker
from tpucare.simulation.scenario import PROJECT, Strike
from tpucare.simulation.store import DiskFault

Undo = Callable[[], object]
QUOTA_TEXT = "Quota limit 'TPUV2sPreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 8 in zone {zone}."
RATE_TEXT = "Quota exceeded for quota metric 'Create requests' and limit 'Create requests per minute' of service 'tpu.googleapis.com'."  # noqa: E501


@dataclass
class Hand:
    """What a strike acts with. `later` plays something after so many seconds, whether or not a daemon runs then."""

    daemon: Daemon
    later: Callable[[float, Undo], None]
    down_for: Callable[[float], None]
    """The daemon's process was killed: start the next one after so many seconds."""
    asked: Callable[[str, float], None]
    """A person asks something of that slot, which explains for so many seconds what happens to it."""
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
        return self.rng.choice(sorted(self.world.config.zones))

    def living(self) -> list[NodeLife]:
        return self.world.select(self.strike.target, living=True)

    def node(self, *, ready: bool = True) -> NodeLife | None:
        wanted = NodeState.READY if ready else NodeState.CREATING
        return next((life for life in self.living() if life.record.state == wanted), None)

    def worker(self) -> SimulatedWorker | None:
        """A machine of the slot that is up, by chance."""
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


# --- how nodes end ---------------------------------------------------------------------------------------------------


def _preempt(hand: Hand, *, shown: int | str = int(NodeState.PREEMPTED), silent: bool = False) -> bool:
    life = hand.node()
    if life is None:
        return False
    notice = timedelta(seconds=hand.rng.uniform(5, 30)) if hand.rng.random() < 0.5 else None
    return bool(hand.world.preempt(life.path.node_id, hand.now, notice=notice, silent=silent, shown=shown))


def _preempt_otherwise(hand: Hand) -> bool:
    return _preempt(hand, shown=hand.rng.choice(OTHER_ENDS))


def _preempt_creating(hand: Hand) -> bool:
    life = hand.node(ready=False)
    return life is not None and bool(hand.world.preempt(life.path.node_id, hand.now))


def _burst(hand: Hand) -> bool:
    """A third of a zone's nodes; and for a while there is no room for new ones."""
    nodes = [life for life in hand.world.select("*", living=True) if life.path.zone == hand.strike.target]
    spot = [life for life in nodes if life.record.spec.is_preemptible]
    chosen = spot[:: max(1, len(spot) // max(1, len(spot) // 3))][: max(1, len(spot) // 3)] if spot else []
    for life in chosen:
        hand.world.preempt(life.path.node_id, hand.now, shown=None, burst=timedelta(minutes=1))
    if chosen:
        _sold_out(hand)
    return bool(chosen)


def _terminate(hand: Hand) -> bool:
    life = hand.node()
    return life is not None and bool(hand.world.terminate(life.path.node_id, hand.now))


def _forget(hand: Hand) -> bool:
    lives = hand.living()
    return bool(lives) and bool(hand.world.forget(lives[0].path.node_id, hand.now))


# --- workers ---------------------------------------------------------------------------------------------------------


def _silence(hand: Hand) -> bool:
    worker = hand.worker()
    if worker is None:
        return False
    name, number = worker.key.name, worker.number
    hand.world.lose_worker(name, number, hand.now, silent=True)
    hand.later(hand.strike.length, lambda: hand.world.restore_worker(name, number, hand.now))
    return True


def _lose_worker(hand: Hand) -> bool:
    worker = hand.worker()
    return worker is not None and bool(hand.world.lose_worker(worker.key.name, worker.number, hand.now))


def _miss_worker(hand: Hand) -> bool:
    hand.world.miss_worker()
    return True


def _reboot(hand: Hand) -> bool:
    life = hand.node()
    return life is not None and bool(hand.world.maintenance(life.path.node_id, hand.now, restart=True))


def _next_boot(how: str) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.launcher.boots.append(how)
        return True

    return act


def _change_host_key(hand: Hand) -> bool:
    """The guest agent publishes the new one a little later, so that it can be vouched for."""
    worker = hand.worker()
    if worker is None:
        return False
    worker.host_key += "x"
    name = "projects/{}/locations/{}/nodes/{}".format(*worker.key)
    number, key = worker.number, worker.host_key
    delay = hand.rng.uniform(0, 300)
    hand.later(delay, lambda: hand.world.set_guest_attribute(name, number, "hostkeys", "ssh-ed25519", key))
    return True


# --- runs ------------------------------------------------------------------------------------------------------------


def _end_run(status: int | None, failure: Failure = Failure.CRASH) -> Act:
    def act(hand: Hand) -> bool:
        worker = hand.running()
        if worker is not None:
            hand.daemon.launcher.end(worker, status, failure)
        return worker is not None

    return act


def _hang(hand: Hand) -> bool:
    hung = [worker for worker in hand.daemon.launcher.running() if worker.run and worker.run.slot == hand.strike.target]
    for worker in hung:
        hand.daemon.launcher.hang(worker)
    return bool(hung)


def _exit_on_notice(hand: Hand) -> bool:
    life, script, slot = hand.node(), hand.daemon.launcher.script, hand.strike.target
    if life is None or hand.running() is None:
        return False
    script.on_notice.add(slot)
    hand.later(120.0, lambda: script.on_notice.discard(slot))
    return bool(hand.world.preempt(life.path.node_id, hand.now, notice=timedelta(seconds=hand.rng.uniform(10, 30))))


def _ignore_stop(hand: Hand) -> bool:
    ignored, slot = hand.daemon.launcher.script.ignores_stop, hand.strike.target
    ignored.add(slot)
    hand.later(hand.strike.length, lambda: ignored.discard(slot))
    # Something has to stop it, or nobody would notice.
    return _asked_again(hand)


def _lose(what: str) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.launcher.lost[what] += 1
        return True

    return act


# --- what the API shows ----------------------------------------------------------------------------------------------


def _unhealthy(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    name, bad = life.path.node_id, hand.rng.choice((0, 3, 4, 5, 99))
    hand.world.set_health(name, bad, hand.now)
    hand.later(hand.strike.length, lambda: hand.world.set_health(name, int(Health.HEALTHY), hand.now))
    return True


def _show(*states: int) -> Act:
    def act(hand: Hand) -> bool:
        life = hand.node()
        if life is None:
            return False
        hand.world.set_state(life.path.node_id, hand.rng.choice(states), hand.now)
        if hand.strike.length:
            hand.later(hand.strike.length, lambda: _show_again(hand.world, life, hand.now))
        return True

    return act


def _show_again(world: World, life: NodeLife, now: datetime) -> None:
    if not (life.gone or life.deleting or life.dead):
        world.set_state(life.path.node_id, int(NodeState.READY), now)


def _hide(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    listing = hand.world.state.listing(life.path.project)
    listing.hide(life.path, life.record.id)
    hand.later(hand.strike.length, lambda: None if life.gone else listing.show(life.record))
    return True


def _stick(hand: Hand) -> bool:
    return bool(hand.world.stick_deleting(hand.strike.target, hand.now, repeats=hand.rng.randint(1, 2)))


def _stop_node(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    name = life.record.name
    try:
        hand.world.stop_node(name, hand.now)
    except ApiError:
        return False
    hand.later(hand.strike.length + 300.0, lambda: _start_node(hand.world, name, hand.now))
    return True


def _start_node(world: World, name: str, now: datetime) -> None:
    try:
        world.start_node(name, now)
    except ApiError:
        return


# --- creates and answers ---------------------------------------------------------------------------------------------


def _fail_create(code: int, text: str, *, in_operation: bool) -> Act:
    def act(hand: Hand) -> bool:
        zone = hand.zone()
        hand.world.fail_next_create(code, text.format(zone=zone), in_operation=in_operation)
        return True

    return act


def _sold_out(hand: Hand) -> bool:
    """What there is may stay; there is no more of it."""
    world, zone = hand.world, hand.strike.target
    declared = [place for slots in hand.daemon.declared.values() for slot in slots for place in slot.places]
    for kind in sorted({place.accelerator_type for place in declared if place.zone == zone}):
        held = [life for life in world.select("*", living=True) if life.path.zone == zone]
        spot = [life for life in held if life.accelerator.type == kind and life.record.spec.is_preemptible]
        world.set_capacity(zone, kind, "spot", len(spot), hand.now)
        hand.later(hand.strike.length, partial(_open_up, hand, zone, kind))
    return True


def _open_up(hand: Hand, zone: str, kind: str) -> None:
    hand.world.set_capacity(zone, kind, "spot", None, hand.now)


def _late_create(hand: Hand) -> bool:
    hand.world.delay_next("CreateNode", hand.strike.length)
    return True


def _lose_answer(*, applied: bool) -> Act:
    def act(hand: Hand) -> bool:
        method = hand.rng.choice(("CreateNode", "DeleteNode"))
        hand.world.lose_next_answer(method, applied=applied, code=hand.rng.choice((14, 4)))
        return True

    return act


def _fail_listing(hand: Hand) -> bool:
    hand.world.fail_next("ListNodes", hand.rng.choice((14, 13, 16, 8)), "no listing for now")
    return True


def _outage(kind: str) -> Act:
    def act(hand: Hand) -> bool:
        zone = hand.strike.target if kind == "zone" else ""
        hand.world.outage(kind, hand.length, hand.now, zone=zone, seconds=hand.rng.uniform(5, 40))
        return True

    return act


def _all_slow(hand: Hand) -> bool:
    launcher = hand.daemon.launcher
    launcher.slow = hand.rng.uniform(2, 30)
    hand.later(hand.strike.length, lambda: setattr(launcher, "slow", 0.0))
    return _outage("slow")(hand)


def _deafen(hand: Hand) -> bool:
    launcher = hand.daemon.launcher
    launcher.deaf = True
    hand.later(hand.strike.length, lambda: setattr(launcher, "deaf", False))
    return True


def _go_dark(hand: Hand) -> bool:
    return _deafen(hand) and _outage("api")(hand)


# --- the daemon and its machine --------------------------------------------------------------------------------------


def _kill(hand: Hand) -> bool:
    if hand.daemon.store is None:
        return False
    hand.daemon.kill()
    hand.down_for(hand.strike.length)
    return True


def _kill_before_effects(hand: Hand) -> bool:
    """Intents are on the disk, and none of their effects begins."""
    if hand.daemon.store is None:
        return False
    hand.daemon.executor.dead = True
    hand.daemon.engine.step()
    return _kill(hand)


def _kill_under_way(hand: Hand) -> bool:
    """Of the calls that are on their way some arrive, although nobody waits for them any more."""
    if hand.daemon.store is None or not hand.daemon.executor.under_way:
        return False
    hand.daemon.kill(lambda: hand.rng.random() < 0.5)
    hand.down_for(hand.strike.length)
    return True


def _disk(fault: DiskFault) -> Act:
    def act(hand: Hand) -> bool:
        faults = hand.daemon.disk.faults
        faults.append(fault)
        if fault is DiskFault.FULL:
            # Each start and each commit fails until there is room again.
            hand.later(hand.strike.length, faults.clear)
            faults.extend([fault] * 50)
        return True

    return act


def _jump(sign: int) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.clock.jump(sign * hand.length)
        return True

    return act


# --- people ----------------------------------------------------------------------------------------------------------


def _wish(wish: Wish) -> Act:
    def act(hand: Hand) -> bool:
        daemon, slot = hand.daemon, hand.strike.target
        if daemon.store is None or slot not in daemon.engine.slots:
            return False
        hand.asked(slot, hand.strike.length + 3600.0)
        daemon.wish(slot, wish)
        hand.later(hand.strike.length, lambda: _back_up(daemon, slot, hand))
        return True

    return act


def _back_up(daemon: Daemon, slot: str, hand: Hand) -> None:
    if daemon.store is None:
        hand.later(60.0, lambda: _back_up(daemon, slot, hand))
    else:
        daemon.wish(slot, Wish.UP)


def _asked(name: str) -> Act:
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


_asked_again = _asked("restart")


def _foreign(hand: Hand) -> bool:
    memory = hand.daemon.disk.memories.get(hand.strike.target)
    number = memory.next_number if memory is not None else 0
    return _other_node(hand, f"{hand.strike.target}-a{number}", {LABEL_OWNER: "o-somebodyelse"})


def _stray(hand: Hand) -> bool:
    labels = {LABEL_OWNER: hand.daemon.disk.owner, LABEL_FLEET: "forgotten", LABEL_SLOT: "forgotten-0"}
    return _other_node(hand, f"forgotten-0-a{hand.rng.randrange(10**6)}", labels)


def _other_node(hand: Hand, name: str, labels: Mapping[str, str]) -> bool:
    """Somebody else's node, which is there for a while and then taken away by whoever made it."""
    world, parent = hand.world, f"projects/{PROJECT}/locations/{hand.zone()}"
    spec = NodeSpec("v2-8", runtime_version="tpu-ubuntu2204-base", labels=dict(labels))
    try:
        world.create_node(parent, name, spec, hand.now)
    except ApiError:
        return False
    path = f"{parent}/nodes/{name}"
    hand.later(hand.strike.length, lambda: _remove(world, path, hand))
    return True


def _remove(world: World, path: str, hand: Hand) -> None:
    if path in {record.name for record in world.nodes()}:
        world.forget(path, hand.now)


STRIKES: Mapping[str, Act] = MappingProxyType(
    {
        "preempted": _preempt,
        "preempted-in-a-burst": _burst,
        "preempted-unreported": lambda hand: _preempt(hand, shown="never"),
        "preempted-shown-otherwise": _preempt_otherwise,
        "preempted-silently": lambda hand: _preempt(hand, silent=True),
        "preempted-while-creating": _preempt_creating,
        "terminated": _terminate,
        "forgotten": _forget,
        "silent-worker": _silence,
        "lost-worker": _lose_worker,
        "missing-worker": _miss_worker,
        "rebooted": _reboot,
        "key-refused": _next_boot("refuses"),
        "host-key-changed": _change_host_key,
        "dirty-host": _next_boot("dirty"),
        "foreign-process": _next_boot("foreign"),
        "address-reused": _forget,
        "crashed": _end_run(1),
        "out-of-memory": _end_run(None),
        "hung": _hang,
        "exit-0-under-preemption": _exit_on_notice,
        "setup-failed": _end_run(1, Failure.SETUP),
        "stop-ignored": _ignore_stop,
        "launch-lost-before": _lose("launch-before"),
        "launch-lost-after": _lose("launch-after"),
        "stop-lost": _lose("stop"),
        "unhealthy": _unhealthy,
        "repairing": _show(int(NodeState.REPAIRING)),
        "repair-failed": _show(int(NodeState.UNKNOWN)),
        "odd-state": _show(int(NodeState.HIDDEN), int(NodeState.REIMAGING), 0, 77),
        "missing-from-list": _hide,
        "stuck-delete": _stick,
        "stopped-by-somebody": _stop_node,
        "stockout": _fail_create(8, 'There is no more capacity in the zone "{zone}"', in_operation=True),
        "zone-sold-out": _sold_out,
        "quota-refused": _fail_create(8, QUOTA_TEXT, in_operation=False),
        "rate-limited": _fail_create(8, RATE_TEXT, in_operation=False),
        "permission-denied": _fail_create(7, "Permission 'tpu.nodes.create' denied", in_operation=False),
        "create-failed": _fail_create(13, "an internal error has occurred", in_operation=True),
        "create-granted-late": _late_create,
        "answer-lost-before": _lose_answer(applied=False),
        "answer-lost-after": _lose_answer(applied=True),
        "listing-failed": _fail_listing,
        "zone-unreachable": _outage("zone"),
        "api-down": _outage("api"),
        "api-slow": _outage("slow"),
        "everything-slow": _all_slow,
        "network-dark": _go_dark,
        "workers-unreachable": _deafen,
        "killed": _kill,
        "killed-before-effects": _kill_before_effects,
        "killed-with-effects-under-way": _kill_under_way,
        "torn-commit": _disk(DiskFault.TORN),
        "killed-after-commit": _disk(DiskFault.CUT),
        "disk-full": _disk(DiskFault.FULL),
        "clock-forward": _jump(1),
        "clock-back": _jump(-1),
        "suspended": lambda _hand: True,
        "paused": _wish(Wish.PAUSED),
        "taken-down": _wish(Wish.DOWN),
        "replaced": _asked("replace"),
        "restarted": _asked_again,
        "foreign-node": _foreign,
        "stray": _stray,
    }
)
