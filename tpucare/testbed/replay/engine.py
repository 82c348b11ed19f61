"""
The real engine on recorded capacity: slots, a world that follows the recordings, and what came of it, as logs.

No fault but the loss of capacity: a create is READY after a constant time, and a stockout is told within 10 to 90 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tpucare.engine.engine import Settings
from tpucare.model.resources import LABEL_SLOT, Slot
from tpucare.testbed.emulator.world.capacity import CAPACITY_TIERS
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.records import NodePath
from tpucare.testbed.replay.account import Ask, Held, SlotLog
from tpucare.testbed.replay.recordings import Changes
from tpucare.testbed.simulation.campaign import collector_off
from tpucare.testbed.simulation.daemon import SimulatedDaemon
from tpucare.testbed.simulation.machines import RunMark
from tpucare.testbed.simulation.time import START
from tpucare.testbed.simulation.workers import Script

SETUP_SECONDS = 20.0
STOCKOUT = {"median": 40, "p95": 90}
"""Seconds until a stockout is told."""
# A quiet gang is looked at each 30 s; a worker that dies hangs up, so that its node is looked at once.
BEAT = Settings(poll=30.0, fast_poll=1.0, probe=600.0, fast_probe=1.0)
_ENDS = frozenset({"preempted", "silent", "deleting", "gone"})


def world_of_changes(capacity: Mapping[str, Changes], first_step_seconds: float) -> WorldConfig:
    """A calm world whose zones have that *capacity*, in hosts."""
    ready = first_step_seconds - SETUP_SECONDS
    lengths = {
        **dict.fromkeys(("create_single", "create_slice", "create_large"), ready),
        "boot_late": 0.0,
        "stockout": STOCKOUT,
    }
    pools = {
        zone: {"accelerators": ["*"], "capacity": [{"schedule": changes, "unit": "hosts"}]}
        for zone, changes in capacity.items()
    }
    return WorldConfig.calm(zones=pools, latencies=lengths, rates={"create": None}, audit_reads=False)


def spot_zones(slot: Slot) -> tuple[str, ...]:
    """The zones of a slot whose capacity is recorded, in declared order."""
    return tuple(dict.fromkeys(place.zone for place in slot.places if CAPACITY_TIERS[place.provisioning] == "spot"))


class _Scribe:
    """Writes down what the world and the machines did for each slot."""

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.logs = {slot.name: SlotLog(spot_zones(slot)) for slot in slots}
        self._places = {
            (slot.name, place.zone, place.accelerator_type, CAPACITY_TIERS[place.provisioning]): place
            for slot in slots
            for place in slot.places
        }
        self._slots: dict[str, str] = {}
        self._open: dict[str, Held] = {}
        self._unseen: dict[str, Held] = {}

    def audited(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "node":
            self._node(record["event"], record["name"], record)

    def _node(self, event: str, name: str, record: Mapping[str, Any]) -> None:
        at = (datetime.fromisoformat(record["at"]) - START).total_seconds()
        if event == "created":
            slot, zone = record["labels"][LABEL_SLOT], name.split("/")[3]
            place = self._places[slot, zone, record["accelerator"], record["tier"]]
            self._slots[name] = slot
            units = place.workers if record["tier"] == "spot" else 0
            held = self._open[name] = Held(zone, at, units, price=place.price)
            self.logs[slot].held.append(held)
        elif event == "shown" and name in self._unseen:
            self._unseen.pop(name).shown = at
        elif (held_now := self._open.get(name)) is None:
            return
        elif event == "failed":
            log = self.logs[self._slots[name]]
            log.held.remove(held_now)
            log.asks.append(Ask(held_now.zone, held_now.at, at))
            del self._open[name]
        elif event == "doomed":
            held_now.freed = at
        elif event in _ENDS:
            held_now.until, held_now.freed = at, min(at, held_now.freed)
            self._unseen[name] = self._open.pop(name)

    def ran(self, mark: RunMark) -> None:
        name = str(NodePath(*mark.key))
        held = self._open.get(name)
        if held is not None and mark.what == "start" and mark.worker == 0:
            held.trains = mark.seconds + SETUP_SECONDS

    def close(self, now: float) -> None:
        for held in self._open.values():
            held.until, held.lost = now, False


def live_with_engine(
    slots: tuple[Slot, ...],
    capacity: Mapping[str, Changes],
    *,
    seconds: float,
    seed: int,
    first_step_seconds: float,
    save_every: float,
) -> dict[str, SlotLog]:
    """Let the engine care for *slots* for so long; the log of each. *save_every*: seconds between two checkpoints."""
    config = world_of_changes(capacity, first_step_seconds)
    script = Script(setup_seconds=SETUP_SECONDS, save_every=round(save_every))
    daemon = SimulatedDaemon(config=config, seed=seed, script=script, settings=BEAT)
    scribe = _Scribe(slots)
    daemon.launcher.keep_history = False
    daemon.launcher.on_run = scribe.ran
    daemon.zone.world.on_audit(scribe.audited, keep=False)
    daemon.listen = lambda _event: None
    daemon.start()
    daemon.care_for_all(slots)
    with collector_off():
        daemon.run_to(seconds)
    scribe.close(daemon.clock.seconds)
    daemon.kill()
    return scribe.logs
