"""
How soon creates are accepted once capacity is there, and what the asking costs, in virtual time.

One place loses all nodes at once, is dry for a while, and has room for all slots again at an instant of chance. From
each wait the time is subtracted in which the cloud had yet to tell that the create before found none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from tests.kits.harness import US, ObservedDaemon, place, slots_of
from tpucare.engine.engine import Settings
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.simulation.machines import Script

KIND = "v2-8"
# From the create call to the error in its operation.
TOLD = timedelta(seconds=20)
SETTLES = timedelta(minutes=20)


@dataclass(frozen=True, slots=True)
class Drought:
    """
    One episode. *reactions*: of each slot, seconds; *asked*: instants of the creates while dry, since it began.

    most_open: the most creates that one slot had open at once    askers: the most slots with an open create at once,
    once the market had moved for `MOVES_FOR` no more
    """

    lasted: timedelta
    reactions: tuple[float, ...]
    asked: tuple[float, ...]
    most_open: int
    askers: int


def droughts(
    slots: int, *, at_least: timedelta, at_most: timedelta, count: int, seed: int = 1, learned: timedelta = timedelta()
) -> Iterator[Drought]:
    """*count* droughts of lengths by chance, one after the other; askers are counted after *learned* of each."""
    rng = random.Random(seed)
    zones = {US: {"accelerators": ["*"], "capacity": [{"type": KIND, "amount": slots}]}}
    lengths = {"stockout": TOLD.total_seconds(), "create_single": 5.0, "operation_done": 1.0, "visible": 0.0}
    config = WorldConfig.calm(zones=zones, latencies=lengths, rates={"create": None}, audit_reads=False)
    daemon = ObservedDaemon(config=config, seed=seed, script=Script(setup_seconds=1.0), settings=Settings(probe=60.0))
    daemon.start()
    daemon.care_for_slots("pod", slots_of("pod", slots, place(US, KIND, workers=1)))
    daemon.run_until(daemon.all_train)
    for _ in range(count):
        daemon.run(seconds=rng.uniform(60, 120))
        yield _drought(daemon, at_least + rng.random() * (at_most - at_least), learned)
        daemon.run_until(daemon.all_train)


def lose_all(daemon: ObservedDaemon) -> datetime:
    """Preempt every node; the cloud tells at once. Returns the instant."""
    now = daemon.clock.true_now()
    for node in daemon.zone.nodes():
        daemon.zone.world.operator.preempt(node.path.node_id, now, notice=None, visible_after=timedelta())
    return now


def _drought(daemon: ObservedDaemon, lasts: timedelta, learned: timedelta) -> Drought:
    operator, mark, began = daemon.zone.world.operator, len(daemon.zone.calls("CreateNode")), lose_all(daemon)
    operator.set_capacity(US, KIND, "spot", 0, began)
    most_open = askers = 0
    while (now := daemon.clock.true_now()) < began + lasts:
        open_by_slot = [sum(not one.abandoned for one in daemon.memory(name).creates) for name in daemon.engine.slots]
        most_open = max(most_open, *open_by_slot)
        if learned and now > began + learned:
            askers = max(askers, sum(map(bool, open_by_slot)))
        idle = daemon.engine.step()
        left = (began + lasts - daemon.clock.true_now()).total_seconds()
        daemon.executor.sleep(timedelta(seconds=max(0.001, min(idle, left))))
    now = daemon.clock.true_now()
    operator.set_capacity(US, KIND, "spot", len(daemon.engine.slots), now)
    daemon.run(minutes=2)
    calls = [(str(call["name"]), _instant(call)) for call in daemon.zone.calls("CreateNode")[mark:]]
    before = [(name, at) for name, at in calls if at < now]
    reactions = [_reaction(slot, calls, now) for slot in daemon.engine.slots]
    return Drought(lasts, tuple(reactions), tuple((at - began).total_seconds() for _, at in before), most_open, askers)


def _reaction(slot: str, calls: list[tuple[str, datetime]], there: datetime) -> float:
    """Seconds from "capacity is there" to the slot's create; infinite where it asked no more."""
    own = [at for name, at in calls if f"/{slot}-a" in f"/{name}"]
    told = max((at + TOLD for at in own if at < there), default=there)
    asks = [at for at in own if at >= there]
    return (min(asks) - max(there, told)).total_seconds() if asks else float("inf")


def _instant(call: dict[str, object]) -> datetime:
    return datetime.fromisoformat(str(call["at"]))
