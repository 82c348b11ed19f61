"""
Strikes of a pen: the fleet's file says something else, and labels of our nodes are changed by somebody.

What people ask of a slot by a command is in `strikes_people`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from tpucare.model.resources import LABEL_FLEET, LABEL_OWNER, LABEL_SLOT, Job, Place, Slot
from tpucare.testbed.emulator.world.records import ApiError, NodeSpec
from tpucare.testbed.emulator.world.state import NodeLife
from tpucare.testbed.simulation.hand import Hand
from tpucare.testbed.simulation.scenario import ZONES
from tpucare.testbed.simulation.strikes_nodes import hide_for

SOMEBODY = "o-somebodyelse"
# Kinds with as many hosts as the other, so that a gang stays as large as it is.
OTHER_KINDS = {"v2-8": "v3-8", "v3-8": "v2-8", "v3-32": "v2-32", "v2-32": "v3-32"}

# --- the fleet's file ------------------------------------------------------------------------------------------------

Edit = Callable[[Hand, list[Slot]], list[Slot]]


def edit(hand: Hand) -> bool:
    """One key of the file of the slot's fleet: its count, with or without a file per slot, type, zones or job."""
    daemon, fleet = hand.daemon, hand.strike.target.rpartition("-")[0]
    slots = daemon.declared.get(fleet)
    if not slots:
        return False
    name, change = hand.rng.choice(sorted(EDITS.items()))
    edited = change(hand, slots)
    if edited == slots:
        return False
    if name.startswith("count"):
        (daemon.own_files.add if name == "count with own files" else daemon.own_files.discard)(fleet)
        hand.later(hand.strike.length, lambda: _raise_count(hand, fleet, slots[-1]))
    daemon.edit(fleet, edited)
    return True


def _lower_count(_hand: Hand, slots: list[Slot]) -> list[Slot]:
    return slots[:-1] if len(slots) > 1 else slots


def _raise_count(hand: Hand, fleet: str, slot: Slot) -> None:
    slots = hand.daemon.declared[fleet]
    if slot.name not in {one.name for one in slots}:
        hand.daemon.edit(fleet, [*slots, replace(slot, places=slots[0].places, job=slots[0].job)])


def _change_places(change: Callable[[tuple[Place, ...]], tuple[Place, ...]]) -> Edit:
    return lambda _hand, slots: [replace(slot, places=change(slot.places)) for slot in slots]


def _other_kind(places: tuple[Place, ...]) -> tuple[Place, ...]:
    kinds = [OTHER_KINDS.get(place.accelerator_type, place.accelerator_type) for place in places]
    return tuple(replace(place, accelerator_type=kind) for place, kind in zip(places, kinds, strict=True))


def _other_zone(places: tuple[Place, ...]) -> tuple[Place, ...]:
    if len(places) > 1:
        return (*places[1:], places[0])
    other = next((zone for zone in ZONES if zone != places[0].zone), places[0].zone)
    return (replace(places[0], zone=other),)


def _other_job(hand: Hand, slots: list[Slot]) -> list[Slot]:
    job = slots[0].job or Job(run="python3 train.py")
    edited = replace(job, run=f"python3 train.py --edit {hand.rng.randrange(10**6)}")
    return [replace(slot, job=edited) for slot in slots]


EDITS: Mapping[str, Edit] = {
    "count": _lower_count,
    "count with own files": _lower_count,
    "job": _other_job,
    "type": _change_places(_other_kind),
    "zones": _change_places(_other_zone),
}

# --- labels ----------------------------------------------------------------------------------------------------------


def relabel(hand: Hand) -> bool:
    """The slot's or the fleet's label of a node says something else for a while, or from now on."""
    life = hand.node()
    if life is None:
        return False
    label, value = hand.rng.choice(
        ((LABEL_SLOT, "other-0"), (LABEL_SLOT, ""), (LABEL_FLEET, "other"), (LABEL_FLEET, ""))
    )
    before = dict(life.record.spec.labels)
    _label(hand, life, {**before, label: value})
    if hand.rng.random() < 0.5:
        hide_for(hand, life, hand.rng.uniform(5.0, 300.0))
    if hand.rng.random() < 0.5:
        hand.later(hand.strike.length, lambda: _label(hand, life, before))
    return True


def take_back(hand: Hand) -> bool:
    """A node bears another owner's label; later it is given back, or its new owner deletes it."""
    life = hand.node()
    if life is None or life.record.spec.labels.get(LABEL_OWNER) != hand.daemon.disk.owner:
        return False
    before = dict(life.record.spec.labels)
    _label(hand, life, {**before, LABEL_OWNER: SOMEBODY})
    if hand.rng.random() < 0.5:
        hide_for(hand, life, hand.rng.uniform(5.0, 300.0))
    if hand.rng.random() < 0.5:
        hand.later(hand.strike.length, lambda: _label(hand, life, before))
    else:
        hand.later(hand.strike.length, lambda: _delete(hand, life))
    if hand.daemon.store is not None and hand.rng.random() < 0.3:
        hand.daemon.kill()
        hand.down_for(hand.rng.uniform(1.0, 60.0))
    return True


def _label(hand: Hand, life: NodeLife, labels: Mapping[str, str]) -> None:
    if life.gone or life.deleting:
        return
    spec = NodeSpec(labels={key: value for key, value in labels.items() if value})
    with suppress(ApiError):
        hand.world.update_node(life.record.name, ("labels",), spec, hand.now)


def _delete(hand: Hand, life: NodeLife) -> None:
    if not life.gone:
        hand.world.forget(life.record.name, hand.now)
