"""
Strikes at nodes: how they end, and what the API says of those that live.

Whoever makes a node beside ours is in `strikes_people`; whether there is room for a new one, in `strikes_api`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from tpucare.model.memory import Wish
from tpucare.model.resources import Health, NodeState
from tpucare.testbed.emulator.world.ending import OTHER_ENDS
from tpucare.testbed.emulator.world.records import ApiError
from tpucare.testbed.emulator.world.state import NodeLife
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.hand import Act, Hand
from tpucare.testbed.simulation.strikes_api import sold_out
from tpucare.testbed.simulation.strikes_people import wish

# --- how nodes end ---------------------------------------------------------------------------------------------------


def preempt(hand: Hand, *, shown: int | str = int(NodeState.PREEMPTED), silent: bool = False) -> bool:
    life = hand.node()
    if life is None:
        return False
    notice = timedelta(seconds=hand.rng.uniform(5, 30)) if hand.rng.random() < 0.5 else None
    return bool(hand.world.preempt(life.path.node_id, hand.now, notice=notice, silent=silent, shown=shown))


def preempt_otherwise(hand: Hand) -> bool:
    return preempt(hand, shown=hand.rng.choice(OTHER_ENDS))


def preempt_creating(hand: Hand) -> bool:
    life = hand.node(ready=False)
    return life is not None and bool(hand.world.preempt(life.path.node_id, hand.now))


def burst(hand: Hand) -> bool:
    """A third of a zone's nodes; and for a while there is no room for new ones."""
    nodes = [life for life in hand.world.select("*", living=True) if life.path.zone == hand.strike.target]
    spot = [life for life in nodes if life.record.spec.is_preemptible]
    chosen = spot[:: max(1, len(spot) // max(1, len(spot) // 3))][: max(1, len(spot) // 3)] if spot else []
    for life in chosen:
        hand.world.preempt(life.path.node_id, hand.now, shown=None, burst=timedelta(minutes=1))
    if chosen:
        sold_out(hand)
    return bool(chosen)


def terminate(hand: Hand) -> bool:
    life = hand.node()
    return life is not None and bool(hand.world.terminate(life.path.node_id, hand.now))


def forget(hand: Hand) -> bool:
    lives = hand.living()
    return bool(lives) and bool(hand.world.forget(lives[0].path.node_id, hand.now))


# --- what the API shows ----------------------------------------------------------------------------------------------


def unhealthy(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    name, bad = life.path.node_id, hand.rng.choice((0, 3, 4, 5, 99))
    hand.world.set_health(name, bad, hand.now)
    hand.later(hand.strike.length, lambda: hand.world.set_health(name, int(Health.HEALTHY), hand.now))
    return True


def show(*states: int) -> Act:
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


def hide(hand: Hand) -> bool:
    life = hand.node()
    if life is None:
        return False
    hide_for(hand, life, hand.strike.length)
    return True


def hide_for(hand: Hand, life: NodeLife, seconds: float) -> None:
    """Lists leave the node out for so long."""
    listing = hand.world.state.listing(life.path.project)
    listing.hide(life.path, life.record.id)
    hand.later(seconds, lambda: None if life.gone else listing.show(life.record))


def flip_back(hand: Hand) -> bool:
    """
    Dead for a moment, by what the API shows, and READY again; sometimes its slot is paused just then, or its delete
    is answered 14.
    """
    life = hand.node()
    if life is None or not life.record.spec.is_preemptible:
        return False
    if hand.rng.random() < 0.5:
        wish(Wish.PAUSED)(hand)
    if hand.rng.random() < 0.5:
        for _ in range(10):
            hand.world.fail_next("DeleteNode", 14, "The service is currently unavailable.")
    state = hand.rng.choice((int(NodeState.PREEMPTED), int(NodeState.TERMINATED)))
    hand.world.set_state(life.path.node_id, state, hand.now)
    hand.later(hand.rng.uniform(1.0, 30.0), lambda: _show_again(hand.world, life, hand.now))
    return True


def stick(hand: Hand) -> bool:
    return bool(hand.world.stick_deleting(hand.strike.target, hand.now, repeats=hand.rng.randint(1, 2)))


def stop_node(hand: Hand) -> bool:
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
