"""
Queued resources in simulated histories: slots that stand in queues, the settings of the service's queue, and the
properties of requests.

What is drawn here comes from random streams of its own, so that histories without queues stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import Any

from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    Place,
    Provisioning,
    QueuedState,
    Slot,
)
from tpucare.testbed.emulator.world.queued_records import IN_QUEUE, QueuedLife
from tpucare.testbed.emulator.world.world import World
from tpucare.testbed.simulation.store import Disk

VALIDITIES = (None, None, timedelta(minutes=20), timedelta(hours=2))


def uses_queue(slot: Slot) -> bool:
    return any(place.queued for place in slot.places)


def with_queues(seed: int, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """The same slots, most fleets of them in queues: alone, beside direct creates there, or with those elsewhere."""
    changed: list[Slot] = []
    for fleet, of_fleet in groupby(slots, key=lambda slot: slot.fleet):
        rng = random.Random(f"{seed}/queues/{fleet}")
        way, valid_for = rng.choice(("alone", "beside", "elsewhere", "direct")), rng.choice(VALIDITIES)
        changed += [replace(slot, places=tuple(_in_queues(way, valid_for, slot.places))) for slot in of_fleet]
    return tuple(changed)


def _in_queues(way: str, valid_for: timedelta | None, places: tuple[Place, ...]) -> Iterable[Place]:
    if way == "direct":
        return places
    queued = [replace(place, queued=True, valid_for=valid_for) for place in places if _has_queue(place)]
    if way == "alone" and len(queued) == len(places):
        return queued
    if way == "elsewhere" and len(places) > 1:
        return [*queued[:1], *places[1:]]
    return [*queued, *places]


def _has_queue(place: Place) -> bool:
    return place.provisioning is not Provisioning.PREEMPTIBLE


def queue_world(seed: int, share: float) -> dict[str, Any]:
    """Settings of the service's queue; *share* of the faults of its own."""
    rng = random.Random(f"{seed}/queues")
    return {
        "grant": {"median": 60 + 600 * rng.random(), "p95": 1200 + 3600 * rng.random()},
        "retry_for": rng.choice((600.0, 2700.0)),
        "old_name_share": rng.random(),
        "expired_lingers": 0.5 * rng.random(),
        "quota_waits": rng.random() < 0.5,
        "shells_hold_quota": rng.random() < 0.7,
        "spurious_exists": 0.1 * share * rng.random(),
    }


class QueueRules:
    """
    The properties of requests, checked at each call about one.

    broke: called with the rule and the text    may_delete_node: whether the end of that node is explained
    """

    def __init__(
        self,
        world: World,
        disk: Disk,
        broke: Callable[[str, str], None],
        dark: Callable[[], frozenset[str]],
        may_delete_node: Callable[[str, str], bool],
    ) -> None:
        self._world, self._disk, self._broke, self._dark = world, disk, broke, dark
        self._may_delete_node = may_delete_node
        self._deleted: set[str] = set()
        # A request in a zone that did not answer may have been given up; then another may stand elsewhere.
        self._hidden: set[str] = set()

    def called(self, record: Mapping[str, Any]) -> None:
        method = record["method"]
        if self._dark():
            self._hidden |= {str(path) for path in self._world.state.queue if path.zone in self._dark()}
        if not record["peer"] or not record["applied"] or record["code"] != 0:
            return
        if method == "CreateQueuedResource":
            self._check_create(record)
        elif method == "DeleteQueuedResource":
            self._check_delete(record)

    def _check_create(self, record: Mapping[str, Any]) -> None:
        name, labels = record["name"], record.get("labels")
        if labels is None:
            # The same request once more.
            return
        if not all(labels.get(key) for key in (LABEL_OWNER, LABEL_FLEET, LABEL_SLOT, LABEL_NUMBER)):
            self._broke("labelled", f"the queued resource {name} was asked for with the labels {sorted(labels)}")
        slot, request = labels.get(LABEL_SLOT, ""), name.rpartition("/")[2]
        memory = self._disk.memories.get(slot)
        number = int(request.rpartition("-a")[2])
        if memory is None or (memory.request(request) is None and memory.next_number <= number):
            self._broke("intent-first", f"the queued resource {request} is asked for, and nothing of it is on the disk")
        for life in self._standing(slot):
            if life.record.name != name and life.record.name not in self._deleted | self._hidden:
                self._broke("one-request", f"{request} is asked for while {life.path.queued_id} stands for {slot}")

    def _standing(self, slot: str) -> list[QueuedLife]:
        ours = (life for life in self._world.state.queue.values() if _label(life, LABEL_OWNER) == self._disk.owner)
        return [life for life in ours if life.record.state in IN_QUEUE and _label(life, LABEL_SLOT) == slot]

    def _check_delete(self, record: Mapping[str, Any]) -> None:
        name, labels = record["name"], record["labels"]
        self._deleted.add(name)
        if labels.get(LABEL_OWNER) != self._disk.owner or labels.get(LABEL_FLEET) not in self._disk.fleets:
            self._broke("ours-only", f"the queued resource {name}, owner {labels.get(LABEL_OWNER)}, is deleted")
            return
        slot = labels.get(LABEL_SLOT, "")
        memory = self._disk.memories.get(slot)
        request = memory.request(name.rpartition("/")[2]) if memory is not None else None
        if request is None or not request.deletes:
            self._broke("intent-first", f"the queued resource {name} is deleted, and nothing of it is on the disk")
        for node in record["nodes"]:
            if not self._may_delete_node(slot, node):
                self._broke("unasked-delete", f"{node} was training and well, and went with its queued resource")

    def left(self, dark_for_ever: Collection[str]) -> list[str]:
        """
        Of our requests in the calm, those that neither brought a node of ours nor stand for their slot; without those
        in zones that never answer again.
        """
        found = []
        for path, life in self._world.state.queue.items():
            ours = _label(life, LABEL_OWNER) == self._disk.owner and _label(life, LABEL_FLEET) in self._disk.fleets
            memory = self._disk.memories.get(_label(life, LABEL_SLOT))
            request = memory.request(path.queued_id) if memory is not None else None
            past = memory.node(path.queued_id) if memory is not None else None
            holds = request is not None and request.stands and (past is None or past.serves)
            if ours and not holds and path.zone not in dark_for_ever:
                found.append(f"{path.queued_id} ({QueuedState(life.record.state).name})")
        return sorted(found)


def _label(life: QueuedLife, key: str) -> str:
    return life.planned[0].spec.labels.get(key, "") if life.planned else ""
