"""
Strikes at the API and on the way to it: creates refused or granted late, answers lost, listings, outages, no room.

What a listing says of one node is in `strikes_nodes`.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from tpucare.testbed.simulation.hand import Act, Hand

FOR_EVER = timedelta(days=3650)
READS_LEFT = 4

# --- creates and answers ---------------------------------------------------------------------------------------------


def fail_create(code: int, text: str, *, in_operation: bool) -> Act:
    def act(hand: Hand) -> bool:
        zone = hand.zone()
        hand.world.fail_next_create(code, text.format(zone=zone), in_operation=in_operation)
        return True

    return act


def sold_out(hand: Hand) -> bool:
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


def late_create(hand: Hand) -> bool:
    hand.world.delay_next("CreateNode", hand.strike.length)
    return True


def lose_answer(*, applied: bool) -> Act:
    def act(hand: Hand) -> bool:
        method = hand.rng.choice(("CreateNode", "DeleteNode"))
        hand.world.lose_next_answer(method, applied=applied, code=hand.rng.choice((14, 4)))
        return True

    return act


def limit_reads(hand: Hand) -> bool:
    """A project whose other tools use up most of what may be read in a minute."""
    hand.world.limit_reads(READS_LEFT)
    hand.later(hand.strike.length, lambda: hand.world.limit_reads(None))
    return True


def fail_listing(hand: Hand) -> bool:
    hand.world.fail_next("ListNodes", hand.rng.choice((14, 13, 16, 8)), "no listing for now")
    return True


def outage(kind: str) -> Act:
    def act(hand: Hand) -> bool:
        zone = hand.strike.target if kind == "zone" else ""
        hand.world.outage(kind, hand.length, hand.now, zone=zone, seconds=hand.rng.uniform(5, 40))
        return True

    return act


def darken_for_ever(hand: Hand) -> bool:
    """A zone does not answer any more, not in the calm either."""
    dark = hand.daemon.zone.dark_for_ever
    if dark:
        return False
    dark.add(hand.strike.target)
    hand.world.outage("zone", FOR_EVER, hand.now, zone=hand.strike.target)
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
