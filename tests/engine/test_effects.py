"""What is checked at the last moment, and whose threads an effect takes."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from typing import cast

import pytest

from tests.kits.bench_worker import eventually
from tests.kits.evidence import node
from tpucare.adapters.system import DEFAULT_LANES, ThreadExecutor
from tpucare.engine.effects import ChangedMeanwhile, delete_ours, lane_of
from tpucare.model.actions import Delete, Launch, Stop
from tpucare.model.causes import Cause, Reason
from tpucare.model.ports import Cloud, Lane
from tpucare.model.resources import Node, NodeKey
from tpucare.service.assembly import LANES


class OneNode:
    """A cloud that has one node."""

    def __init__(self, there: Node) -> None:
        self.there = there
        self.deleted: list[NodeKey] = []

    def get_node(self, _: NodeKey) -> Node:
        return self.there

    def delete_node(self, key: NodeKey) -> None:
        self.deleted.append(key)


SEEN = replace(node(), create_time=node().create_time.replace(microsecond=123_456))
DELETE = Delete(SEEN.key, SEEN.id, SEEN.create_time, Cause.UNRECORDED, "a test", Reason.ASKED)


@pytest.mark.parametrize(
    ("there", "is_deleted"),
    [
        (SEEN, True),
        (replace(SEEN, create_time=SEEN.create_time.replace(microsecond=0)), True),
        (replace(SEEN, create_time=SEEN.create_time + timedelta(seconds=1)), False),
        (replace(SEEN, create_time=SEEN.create_time - timedelta(hours=1)), False),
        (replace(SEEN, id=SEEN.id + 1), False),
        (replace(SEEN, labels={}), False),
    ],
)
def test_a_node_is_deleted_only_if_it_is_the_one_that_was_listed(there: Node, is_deleted: bool) -> None:
    """GetNode may write the create time with fewer digits than ListNodes: then nothing could ever be deleted."""
    cloud = OneNode(there)
    try:
        delete_ours(DELETE, cast("Cloud", cloud), SEEN.owner)
    except ChangedMeanwhile:
        assert not is_deleted
    assert cloud.deleted == ([SEEN.key] if is_deleted else [])


def test_stops_with_a_long_grace_keep_no_launch_waiting() -> None:
    executor, over, launched = ThreadExecutor(LANES), threading.Event(), threading.Event()
    stop = Stop(SEEN.key, SEEN.id, "pod-0-a0.1", Cause.UNRECORDED, "a test")
    launch = Launch(SEEN.key, SEEN.id, "pod-0-a0.2", 1, Cause.UNRECORDED, "a test")
    try:
        for number in range(200):
            executor.submit(lane_of(stop), number, over.wait)
        executor.submit(lane_of(launch), "launch", launched.set)
        eventually(launched.is_set)
    finally:
        over.set()
        executor.close()


@pytest.mark.parametrize("lanes", [LANES, DEFAULT_LANES])
def test_every_lane_has_threads(lanes: dict[Lane, int]) -> None:
    assert set(lanes) == set(Lane)
