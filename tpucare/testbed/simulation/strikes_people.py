"""
What people do: wishes for a slot, which explain what happens to it, and nodes of their own beside ours.

That somebody stops a node of ours is in `strikes_nodes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpucare.model.errors import StoreError
from tpucare.model.memory import End, Memory, Wish
from tpucare.model.resources import LABEL_FLEET, LABEL_OWNER, LABEL_SLOT
from tpucare.planner import desired_state as wishes
from tpucare.testbed.emulator.world.records import ApiError, NodeSpec
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.daemon import Daemon
from tpucare.testbed.simulation.hand import Act, Hand
from tpucare.testbed.simulation.scenario import PROJECT
from tpucare.testbed.simulation.store import ProcessDied

# In seconds; the world gives them out again after two.
ADDRESSES_FREE_AFTER = 3.0
ASKED_AGAIN_AFTER = 60.0


def wish(wish: Wish) -> Act:
    def act(hand: Hand) -> bool:
        daemon, slot = hand.daemon, hand.strike.target
        if daemon.store is None or slot not in daemon.engine.slots:
            return False
        hand.asked(slot, hand.strike.length + 3600.0)
        # First, since the process may die of the very command.
        hand.later(hand.strike.length, lambda: _back_up(daemon, slot, hand))
        daemon.wish(slot, wish)
        return True

    return act


def _back_up(daemon: Daemon, slot: str, hand: Hand) -> None:
    if daemon.store is None:
        hand.later(ASKED_AGAIN_AFTER, lambda: _back_up(daemon, slot, hand))
        return
    try:
        daemon.wish(slot, Wish.UP)
    except (StoreError, ProcessDied):
        # Whoever saw the command fail gives it once more.
        hand.later(ASKED_AGAIN_AFTER, lambda: _back_up(daemon, slot, hand))
        raise


def want_again(hand: Hand, slot: str) -> None:
    """Whoever has the results of a slot that is done asks for more of them."""
    daemon = hand.daemon
    memory = daemon.disk.memories.get(slot)
    if daemon.store is not None and memory is not None and memory.end is End.DONE and slot in daemon.engine.slots:
        hand.asked(slot, 0.0)
        daemon.engine.change(slot, wishes.up, "up", f"{slot}: wanted again")


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
    """A node vanishes, lists show it for a while longer, and somebody's machines come up under its addresses."""
    life = hand.node()
    if life is None:
        return False
    record, listing = life.record, hand.world.state.listing(PROJECT)
    hand.world.forget(record.path.node_id, hand.now)
    listing.show(record)
    hand.later(hand.strike.length, lambda: listing.hide(record.path, record.id))
    name, kind, zone = f"theirs-{hand.rng.randrange(10**6)}", record.spec.accelerator_type, record.path.zone
    hand.later(ADDRESSES_FREE_AFTER, lambda: _other_node(hand, name, {}, kind, zone))
    return True


def _other_node(hand: Hand, name: str, labels: Mapping[str, str], kind: str = "v2-8", zone: str = "") -> bool:
    """Somebody else's node, which is there for a while and then taken away by whoever made it."""
    world, parent = hand.world, f"projects/{PROJECT}/locations/{zone or hand.zone()}"
    spec = NodeSpec(kind, runtime_version="tpu-ubuntu2204-base", labels=dict(labels))
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
