"""Strikes at the daemon's process and its machine: kills, the disk, the clock. `store` says what a disk keeps of it."""

from __future__ import annotations

from tpucare.testbed.simulation.hand import Act, Hand
from tpucare.testbed.simulation.store import DiskFault


def kill(hand: Hand) -> bool:
    if hand.daemon.store is None:
        return False
    hand.daemon.kill()
    hand.down_for(hand.strike.length)
    return True


def kill_before_effects(hand: Hand) -> bool:
    """Intents are on the disk, and none of their effects begins."""
    if hand.daemon.store is None:
        return False
    hand.daemon.executor.dead = True
    hand.daemon.engine.step()
    return kill(hand)


def kill_under_way(hand: Hand) -> bool:
    """Of the calls that are on their way some arrive, although nobody waits for them any more."""
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
            # Each start and each commit fails until there is room again.
            hand.later(hand.strike.length, faults.clear)
            faults.extend([fault] * 50)
        return True

    return act


def jump(sign: int) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.clock.jump(sign * hand.length)
        return True

    return act
