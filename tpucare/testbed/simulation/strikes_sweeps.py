"""
Strikes at sweeps of W&B: its server is away, or somebody stops a sweep of which a run was just interrupted.

Where no fleet works for a sweep there is nothing to take hold of.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from tpucare.testbed.simulation.hand import Hand
from tpucare.testbed.simulation.strikes_people import want_again

if TYPE_CHECKING:
    from tpucare.testbed.simulation.sweep import SimulatedSweep


def silence_server(hand: Hand) -> bool:
    sweeps = list(hand.daemon.sweeps.values())
    for sweep in sweeps:
        sweep.down = True
        hand.later(hand.strike.length, lambda sweep=sweep: setattr(sweep, "down", False))  # type: ignore[misc]
    return bool(sweeps)


def stop_interrupted(hand: Hand) -> bool:
    """The node of an agent is taken with a notice; around then the sweep is stopped, in half of the cases for good."""
    for fleet in sorted(hand.daemon.sweeps):
        sweep = hand.daemon.sweeps[fleet]
        working = [agent.worker for agent in sweep.agents.values() if agent.run is not None]
        if not sweep.hands_out or not working:
            continue
        notice = timedelta(seconds=hand.rng.uniform(10.0, 30.0))
        hand.world.preempt(hand.rng.choice(working).key.name, hand.now, notice=notice)
        hand.later(hand.rng.uniform(1.0, 180.0), lambda sweep=sweep: setattr(sweep, "hands_out", False))  # type: ignore[misc]
        if hand.rng.random() < 0.5:
            hand.later(600.0 + hand.strike.length, lambda sweep=sweep: _resume(hand, sweep))  # type: ignore[misc]
        return True
    return False


def _resume(hand: Hand, sweep: SimulatedSweep) -> None:
    """`wandb sweep --resume`, and `up` for those whose agents had left."""
    sweep.hands_out = True
    for slot in [slot.name for slot in hand.daemon.declared[sweep.fleet]]:
        want_again(hand, slot)
