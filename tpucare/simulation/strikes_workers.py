"""
Strikes at workers, and at the runs on them: silence, reboots, host keys, exits and hangs, stops that go unheard.

That nobody reaches any of them is a matter of the network, and in `strikes_api`.
"""

from __future__ import annotations

from datetime import timedelta

from tpucare.orders import Failure
from tpucare.simulation.hand import Act, Hand
from tpucare.simulation.strikes_people import asked_again

# --- workers ---------------------------------------------------------------------------------------------------------


def silence(hand: Hand) -> bool:
    worker = hand.worker()
    if worker is None:
        return False
    name, number = worker.key.name, worker.number
    hand.world.lose_worker(name, number, hand.now, silent=True)
    hand.later(hand.strike.length, lambda: hand.world.restore_worker(name, number, hand.now))
    return True


def lose_worker(hand: Hand) -> bool:
    worker = hand.worker()
    return worker is not None and bool(hand.world.lose_worker(worker.key.name, worker.number, hand.now))


def miss_worker(hand: Hand) -> bool:
    hand.world.miss_worker()
    return True


def reboot(hand: Hand) -> bool:
    life = hand.node()
    return life is not None and bool(hand.world.maintenance(life.path.node_id, hand.now, restart=True))


def next_boot(how: str) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.launcher.boots.append(how)
        return True

    return act


def change_host_key(hand: Hand) -> bool:
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


def end_run(status: int | None, failure: Failure = Failure.CRASH) -> Act:
    def act(hand: Hand) -> bool:
        worker = hand.running()
        if worker is not None:
            hand.daemon.launcher.end(worker, status, failure)
        return worker is not None

    return act


def hang(hand: Hand) -> bool:
    hung = [worker for worker in hand.daemon.launcher.running() if worker.run and worker.run.slot == hand.strike.target]
    for worker in hung:
        hand.daemon.launcher.hang(worker)
    return bool(hung)


def exit_on_notice(hand: Hand) -> bool:
    life, script, slot = hand.node(), hand.daemon.launcher.script, hand.strike.target
    if life is None or hand.running() is None:
        return False
    script.on_notice.add(slot)
    hand.later(120.0, lambda: script.on_notice.discard(slot))
    return bool(hand.world.preempt(life.path.node_id, hand.now, notice=timedelta(seconds=hand.rng.uniform(10, 30))))


def ignore_stop(hand: Hand) -> bool:
    ignored, slot = hand.daemon.launcher.script.ignores_stop, hand.strike.target
    ignored.add(slot)
    hand.later(hand.strike.length, lambda: ignored.discard(slot))
    # Something has to stop it, or nobody would notice.
    return asked_again(hand)


def lose(what: str) -> Act:
    def act(hand: Hand) -> bool:
        hand.daemon.launcher.lost[what] += 1
        return True

    return act
