"""
Strikes at workers, and at the runs on them: silence, reboots, host keys, exits and hangs, stops that go unheard.

That nobody reaches any of them is a matter of the network, and in `strikes_api`.
"""

from __future__ import annotations

from datetime import timedelta

from tpucare.model.runs import Failure
from tpucare.testbed.simulation.hand import Act, Hand
from tpucare.testbed.simulation.strikes_people import asked_again, want_again

UNPUBLISHED = 1000
WANTED_AGAIN_AFTER = 1800.0
NO_GUEST_ATTRIBUTES = "The resource 'hostkeys/' of type 'Guest Attribute' was not found."

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


def change_key_unvouched(hand: Hand) -> bool:
    """Another host key, and guest attributes that answer 404, as those of a guest that has published nothing."""
    if not change_host_key(hand):
        return False
    for _ in range(UNPUBLISHED):
        hand.world.fail_next("GetGuestAttributes", 5, NO_GUEST_ATTRIBUTES)
    hand.later(hand.strike.length, lambda: hand.world.forget_orders("GetGuestAttributes"))
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
    """It is no child of the run, and nobody but its own daemon ends it."""
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
    """It stands still, and whoever saw it move is killed."""
    if hand.daemon.store is None or not hang(hand):
        return False
    hand.later(hand.rng.uniform(0.0, 120.0), lambda: _kill(hand))
    return True


def _kill(hand: Hand) -> None:
    if hand.daemon.store is not None:
        hand.daemon.kill()
        hand.down_for(hand.strike.length)


def hang_early(hand: Hand) -> bool:
    """The slot's next run stands still after its first steps."""
    early, slot = hand.daemon.launcher.script.hangs_early, hand.strike.target
    early[slot] = hand.rng.randint(1, 3)
    hand.later(hand.strike.length, lambda: early.pop(slot, None))
    # Something has to begin it, or nobody would notice.
    return asked_again(hand)


def fail_together(hand: Hand) -> bool:
    """What all runs need is down: those that begin fail, in their setup or after it, and half of the others crash."""
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
    """The run ends well, and within the minute its node is taken."""
    life = hand.node()
    if life is None or not _finish(hand):
        return False
    node_id, name = life.record.id, life.path.node_id
    hand.later(hand.rng.uniform(15.0, 55.0), lambda: _preempt_same(hand, name, node_id))
    return True


def _preempt_same(hand: Hand, name: str, node_id: int) -> None:
    if any(life.record.id == node_id for life in hand.world.select(name, living=True)):
        hand.world.preempt(name, hand.now)


def notice_without_end(hand: Hand) -> bool:
    """A maintenance is announced and comes to nothing; some time after it was over, the run ends well."""
    life = hand.node()
    if life is None or hand.running() is None:
        return False
    hand.world.maintenance(
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
    return bool(hand.world.preempt(life.path.node_id, hand.now, notice=timedelta(seconds=hand.rng.uniform(10, 30))))


def ignore_stop(hand: Hand) -> bool:
    ignored, slot = hand.daemon.launcher.script.ignores_stop, hand.strike.target
    ignored.add(slot)
    hand.later(hand.strike.length, lambda: ignored.discard(slot))
    # Something has to stop it, or nobody would notice.
    return asked_again(hand)


def lose(what: str) -> Act:
    def act(hand: Hand) -> bool:
        # One at a time: in long storms there are more of these strikes than stops, and no stop would ever be heard.
        lost = hand.daemon.launcher.lost
        is_new, lost[what] = not lost[what], 1
        return is_new

    return act
