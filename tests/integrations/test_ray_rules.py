"""The rules of a Ray cluster, one row each: demand and slices in, slots to wake and to rest out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kits.ray_hosts import (
    a_slice,
    bundle,
    coming,
    group,
    head_of,
    host,
    joined,
    pinned_to,
    pool,
    slots,
    snapshot,
    tasks,
)
from tpucare.integrations.ray.demand import Bundle, Gang, HostStatus, Request
from tpucare.integrations.ray.packing import Slice, SlicePool, SliceState, UnmetCause, pod_type
from tpucare.integrations.ray.rules import PlanMemory, SlicePlan, plan

LAB = pool()  # v4-16: two hosts of four chips
NOW = 10_000.0
WHOLE_IDLE = LAB.idle + 1
# Hosts have been as they are for longer than a snapshot may lag.
OLD = PlanMemory()


def planned(
    *pending: Request | Gang,
    slices: list[Slice] | None = None,
    pools: list[SlicePool] | None = None,
    floor: tuple[Bundle, ...] = (),
    memory: PlanMemory = OLD,
    now: float = NOW,
) -> SlicePlan:
    """The plan once nothing has changed for a while."""
    pools = [LAB] if pools is None else pools
    slices = [one for each in pools for one in slots(each)] if slices is None else slices
    state = snapshot(*pending, floor=floor, slices=slices)
    _, memory = plan(snapshot(slices=slices), slices, pools, memory, now - 5)
    return plan(state, slices, pools, memory, now)[0]


def causes(found: SlicePlan) -> list[UnmetCause]:
    return [one.cause for one in found.unmet]


def of_lab(**states: Slice) -> list[Slice]:
    return slots(LAB, {one.index: one for one in states.values()})


# --- units: how many slices a demand is -------------------------------------------------------------------------------

UNITS = {
    "nothing asked, nothing woken": ((), 0),
    "tasks without TPU create nothing": ((tasks(50, bundle(CPU=1)),), 0),
    "a group without TPU creates nothing": ((group(bundle(CPU=1), bundle(CPU=8)),), 0),
    "one head is one slice": ((tasks(1, head_of()),), 1),
    "three heads are three slices": ((tasks(3, head_of()),), 3),
    "a head as a group of one bundle, as SlicePlacementGroup asks": ((group(head_of()),), 1),
    "groups of heads are a slice each": ((group(head_of()), group(head_of())), 2),
    "nothing else fits on a slice that a head is for": ((tasks(1, head_of()), tasks(1, bundle(TPU=1))), 2),
    "two heads in one group are two slices": ((group(head_of(), head_of()),), 2),
    "a head and the other host in one group are one slice": (
        (group(bundle(**{"TPU-v4-16-head": 1, "TPU": 4}), bundle(TPU=4)),),
        1,
    ),
    "the pod type alone is a slice": ((tasks(1, bundle({"ray.io/tpu-pod-type": "v4-16"}, CPU=1)),), 1),
    "tasks with the pod type share a slice": ((tasks(2, bundle({"ray.io/tpu-pod-type": "v4-16"}, TPU=4)),), 1),
    "a group that fills a slice": ((group(bundle(TPU=4), bundle(TPU=4), strategy="STRICT_SPREAD"),), 1),
    "a group of three hosts is two slices": ((group(*[bundle(TPU=4)] * 3),), 2),
    "a group of small bundles is one slice": ((group(*[bundle(TPU=1)] * 8),), 1),
    "small bundles that must be apart need hosts": ((group(*[bundle(TPU=1)] * 3, strategy="STRICT_SPREAD"),), 2),
    "bundles that must be together need one host": ((group(*[bundle(TPU=1)] * 4, strategy="STRICT_PACK"),), 1),
    "a bundle is never cut": ((group(bundle(TPU=3), bundle(TPU=3), bundle(TPU=2)),), 2),
    "two small groups share a slice": ((group(*[bundle(TPU=2)] * 2), group(*[bundle(TPU=2)] * 2)), 1),
    "eight single chips are one slice": ((tasks(8, bundle(TPU=1)),), 1),
    "nine single chips are two": ((tasks(9, bundle(TPU=1)),), 2),
    "large and small tasks fill the gaps": ((tasks(4, bundle(TPU=1)), tasks(1, bundle(TPU=4))), 1),
    "a task with CPUs beside": ((tasks(2, bundle(TPU=4, CPU=1)),), 1),
    "the version of the TPU": ((tasks(1, bundle(**{"TPU": 4, "accelerator_type:TPU-V4": 0.001})),), 1),
    "the version as a label": ((tasks(1, bundle({"ray.io/accelerator-type": "TPU-V4"}, TPU=4)),), 1),
    "the topology as a label": ((tasks(1, bundle({"ray.io/tpu-topology": "2x2x2"}, TPU=4)),), 1),
    "a group and tasks that fit no gap of it": ((group(*[bundle(TPU=4)] * 2), tasks(1, bundle(TPU=1))), 2),
}


@pytest.mark.parametrize(("pending", "slices"), UNITS.values(), ids=UNITS.keys())
def test_slices_for_a_demand(pending: tuple[Request | Gang, ...], slices: int) -> None:
    found = planned(*pending)
    assert list(found.wake) == [f"lab-{index}" for index in range(slices)]
    assert not found.unmet
    assert not found.rest


def test_floor_holds_while_it_is_asked_for() -> None:
    assert len(planned(floor=(head_of(), head_of())).wake) == 2
    assert len(planned(floor=(bundle(TPU=4),) * 3).wake) == 2


def test_floor_counts_what_hosts_have_not_what_is_free() -> None:
    busy = of_lab(a=joined(LAB, 0, free=0, head=False))
    assert not planned(floor=(head_of(),), slices=busy).wake
    assert len(planned(tasks(1, head_of()), floor=(head_of(),), slices=busy).wake) == 1


def test_floor_keeps_an_idle_slice() -> None:
    idle = of_lab(a=joined(LAB, 0, idle=WHOLE_IDLE), b=joined(LAB, 1, idle=WHOLE_IDLE))
    assert list(planned(floor=(head_of(),), slices=idle).rest) == ["lab-1"]


# --- subtract before you create ---------------------------------------------------------------------------------------

PAIR = group(*[bundle(TPU=4)] * 2, strategy="STRICT_SPREAD")
SUBTRACTED = {
    "a slice that comes up": ((PAIR,), coming(LAB, 0), 0),
    "a slice of which one host has joined": ((PAIR,), coming(LAB, 0, host(LAB, "lab-0")), 0),
    "a slice of which a busy host has joined": ((PAIR, PAIR), coming(LAB, 0, host(LAB, "lab-0", free=0)), 2),
    "a slice that is wholly free": ((PAIR,), joined(LAB, 0), 0),
    "a head for a slice that comes up": ((group(head_of()),), coming(LAB, 0), 0),
    "a head for a slice that is wholly free": ((group(head_of()),), joined(LAB, 0), 0),
    "no head on a slice with work": ((group(head_of()),), joined(LAB, 0, free=1), 1),
    "no head on a slice with a head": ((group(head_of()),), joined(LAB, 0, head=False), 1),
    "free chips": ((tasks(4, bundle(TPU=1)),), joined(LAB, 0, free=2), 0),
    "free chips, and one more task": ((tasks(5, bundle(TPU=1)),), joined(LAB, 0, free=2), 1),
    "free chips in pieces that are too small": ((tasks(1, bundle(TPU=4)),), joined(LAB, 0, free=2), 1),
    "no chips of a slice that failed": ((PAIR,), a_slice(LAB, 0, SliceState.FAILED), 1),
    "no chips of a slice that leaves": ((PAIR,), replace(joined(LAB, 0), state=SliceState.LEAVING), 1),
    "no chips of a host that drains": (
        (PAIR,),
        coming(LAB, 0, host(LAB, "lab-0"), host(LAB, "lab-0", 1, status=HostStatus.DRAINING)),
        1,
    ),
}


@pytest.mark.parametrize(("pending", "there", "more"), SUBTRACTED.values(), ids=SUBTRACTED.keys())
def test_slices_that_are_there_are_subtracted(pending: tuple[Gang, ...], there: Slice, more: int) -> None:
    assert len(planned(*pending, slices=slots(LAB, {0: there})).wake) == more


# --- bounds, and the order of pools -----------------------------------------------------------------------------------


def test_never_above_the_maximum() -> None:
    found = planned(tasks(9, head_of()))
    assert list(found.wake) == ["lab-0", "lab-1", "lab-2", "lab-3"]
    assert causes(found) == [UnmetCause.AT_MAXIMUM]
    assert found.unmet[0].demand.count == 5
    assert "raise `count.max`" in found.unmet[0].demand.why


def test_slices_that_leave_count_until_they_are_gone() -> None:
    states = {index: a_slice(LAB, index, SliceState.LEAVING) for index in range(3)}
    assert list(planned(tasks(4, head_of()), slices=slots(LAB, states)).wake) == ["lab-3"]


def test_never_below_the_minimum() -> None:
    two = pool(least=2)
    assert list(planned(pools=[two]).wake) == ["lab-0", "lab-1"]
    idle = slots(two, {index: joined(two, index, idle=WHOLE_IDLE) for index in range(3)})
    assert list(planned(slices=idle, pools=[two]).rest) == ["lab-2"]


def test_minimum_serves_demand() -> None:
    assert len(planned(tasks(3, head_of()), pools=[pool(least=2)]).wake) == 3


def test_pools_in_the_order_of_priority_then_name() -> None:
    pools = [pool("b", most=1), pool("c", most=1), pool("a", most=1, priority=1)]
    assert list(planned(tasks(2, head_of()), pools=pools).wake) == ["b-0", "c-0"]
    assert list(planned(tasks(3, head_of()), pools=pools).wake) == ["b-0", "c-0", "a-0"]


def test_one_slice_of_another_pool_before_two_of_the_first() -> None:
    pools = [pool("a", "v4-8"), pool("b", "v4-16")]
    assert list(planned(PAIR, pools=pools).wake) == ["b-0"]


def test_small_slices_of_the_first_pool_are_not_woken_beside_a_large_one_that_suffices() -> None:
    pools = [pool("a", "v4-8", most=2), pool("b", "v4-32")]
    assert list(planned(tasks(8, bundle(TPU=1)), pools=pools).wake) == ["a-0", "a-1"]
    assert list(planned(tasks(9, bundle(TPU=1)), pools=pools).wake) == ["b-0"]
    assert list(planned(tasks(5, bundle(TPU=4)), pools=pools).wake) == ["a-0", "b-0"]


def test_demand_for_one_pool_goes_before_demand_for_any() -> None:
    pools = [pool("a", "v4-8"), pool("b", "v4-16")]
    slices = [*slots(pools[0], {0: coming(pools[0], 0)}), *slots(pools[1], {0: coming(pools[1], 0)})]
    narrow = bundle({"ray.io/tpu-pod-type": "v4-8"}, TPU=4)
    assert not planned(tasks(1, bundle(TPU=4)), tasks(1, narrow), slices=slices, pools=pools).wake


NARROWED = {
    "by the head": head_of("v4-32"),
    "by the pod type": bundle({"ray.io/tpu-pod-type": "v4-32"}, TPU=4),
    "by one of several pod types": bundle({"ray.io/tpu-pod-type": "in(v4-32,v4-64)"}, TPU=4),
    "by a pod type that it must not be": bundle({"ray.io/tpu-pod-type": "!v4-16"}, TPU=4),
    "by the topology": bundle({"ray.io/tpu-topology": "2x2x4"}, TPU=4),
    "by the pool": bundle({"ray.io/node-group": "big"}, TPU=4),
    "by the worker": bundle({"ray.io/tpu-worker-id": "3"}, TPU=4),
}


@pytest.mark.parametrize("asked", NARROWED.values(), ids=NARROWED.keys())
def test_demand_is_narrowed_to_a_pool(asked: Bundle) -> None:
    assert list(planned(tasks(1, asked), pools=[LAB, pool("big", "v4-32", priority=1)]).wake) == ["big-0"]


NEVER = {
    "a type": (tasks(1, head_of("v4-32")), UnmetCause.NO_SUCH_TYPE, "apply a fleet of that type"),
    "a generation": (
        tasks(1, bundle(**{"TPU": 4, "accelerator_type:TPU-V6E": 0.001})),
        UnmetCause.NO_SUCH_TYPE,
        "TPU-V6E",
    ),
    "a topology": (tasks(1, bundle({"ray.io/tpu-topology": "4x4x4"}, TPU=4)), UnmetCause.NO_SUCH_TYPE, "4x4x4"),
    "chips of a host": (tasks(2, bundle(TPU=8)), UnmetCause.HOST_TOO_SMALL, "fewer chips per task"),
    "chips of a host in a group that must be together": (
        group(bundle(TPU=4), bundle(TPU=4), strategy="STRICT_PACK"),
        UnmetCause.HOST_TOO_SMALL,
        "fewer chips per task",
    ),
    "slices": (group(*[head_of()] * 5), UnmetCause.TOO_MANY_SLICES, "needs 5 slices of one pool, and lab may have 4"),
    "slices for bundles that must be apart": (
        group(*[bundle(TPU=1)] * 9, strategy="STRICT_SPREAD"),
        UnmetCause.TOO_MANY_SLICES,
        "needs 5 slices",
    ),
    "slices for more bundles than there are hosts": (
        group(*[bundle(TPU=4)] * 10_000),
        UnmetCause.TOO_MANY_SLICES,
        "needs 5,000 slices",
    ),
    "a worker": (
        tasks(1, bundle({"ray.io/tpu-worker-id": "2"}, TPU=4)),
        UnmetCause.NO_SUCH_LABEL,
        "change the label selector",
    ),
    "a host by its id": (tasks(1, bundle({"ray.io/node-id": "ab"}, TPU=4)), UnmetCause.NO_SUCH_LABEL, "node-id=ab"),
    "a slot": (tasks(1, pinned_to("lab-7", TPU=4)), UnmetCause.NO_SUCH_SLOT, "no pool has a slot lab-7"),
}


@pytest.mark.parametrize(("asked", "cause", "words"), NEVER.values(), ids=NEVER.keys())
def test_demand_that_no_pool_ever_serves_is_told(asked: Request | Gang, cause: UnmetCause, words: str) -> None:
    found = planned(asked)
    assert not found.wake
    assert causes(found) == [cause]
    assert not cause.waits
    assert words in found.unmet[0].demand.why


def test_resources_of_hosts_are_assumed_to_suffice_until_one_has_joined() -> None:
    asked = tasks(1, bundle(TPU=4, CPU=500))
    assert len(planned(asked).wake) == 1
    seen = of_lab(a=joined(LAB, 0, free=0))
    found = planned(asked, slices=seen)
    assert not found.wake
    assert causes(found) == [UnmetCause.NO_RESOURCE]
    assert "a host of lab has 240" in found.unmet[0].demand.why
    _, memory = plan(snapshot(slices=seen), seen, [LAB], OLD, NOW)
    assert causes(planned(asked, memory=memory)) == [UnmetCause.NO_RESOURCE]


def test_labels_of_hosts_are_assumed_until_one_has_joined() -> None:
    asked = tasks(1, bundle({"team": "vision"}, TPU=4))
    assert len(planned(asked).wake) == 1
    assert causes(planned(asked, slices=of_lab(a=joined(LAB, 0, free=0)))) == [UnmetCause.NO_SUCH_LABEL]


def test_chips_that_a_host_really_has_count() -> None:
    odd = replace(LAB, chips=8)  # the catalogue is wrong
    there = slots(odd, {0: a_slice(odd, 0, SliceState.JOINED, [host(LAB, "lab-0", n, free=0) for n in (0, 1)])})
    assert causes(planned(tasks(1, bundle(TPU=8)), slices=there, pools=[odd])) == [UnmetCause.HOST_TOO_SMALL]


def test_pool_whose_slices_fail_stops_growing() -> None:
    one = slots(LAB, {0: a_slice(LAB, 0, SliceState.FAILED)})
    assert list(planned(tasks(1, head_of()), slices=one).wake) == ["lab-1"]
    two = slots(LAB, {index: a_slice(LAB, index, SliceState.FAILED) for index in range(2)})
    assert not planned(tasks(1, head_of()), slices=two).wake
    assert causes(planned(tasks(1, head_of()), slices=two)) == [UnmetCause.FAILED]


@pytest.mark.parametrize("demand", [PAIR, tasks(1, bundle(TPU=4)), tasks(1, head_of())])
def test_slices_whose_hosts_have_no_chips_stop_the_growth_of_their_pool(demand: Request | Gang) -> None:
    """Each slice more would be as useless: where Ray finds no chips, a pool grew to its maximum, and none rested."""

    def barren(index: int) -> Slice:
        one = joined(LAB, index, idle=1.0)
        without = {name: amount for name, amount in one.hosts[0].total.items() if not name.startswith("TPU")}
        return replace(one, hosts=tuple(replace(host, total=without, available=without) for host in one.hosts))

    assert list(planned(demand, slices=slots(LAB, {0: barren(0)})).wake) == ["lab-1"]
    two = planned(demand, slices=slots(LAB, {0: barren(0), 1: barren(1)}))
    assert (list(two.wake), causes(two)) == ([], [UnmetCause.NO_CHIPS_FOUND])
    assert "hosts of lab-0, lab-1 joined without TPUs" in two.unmet[0].demand.why
    assert not UnmetCause.NO_CHIPS_FOUND.waits
    good = slots(LAB, {0: barren(0), 1: barren(1), 2: joined(LAB, 2, free=0)})
    assert list(planned(demand, slices=good).wake) == ["lab-3"]


# --- slices that all their places refuse ------------------------------------------------------------------------------

SPOT, DEMAND = pool("spot", most=3), pool("demand", most=2, priority=1)
BOTH = [SPOT, DEMAND]
V4_8, V4_32 = pool("small", "v4-8"), pool("large", "v4-32")


def stuck(of: SlicePool, *indices: int) -> list[Slice]:
    return slots(of, {index: replace(coming(of, index), stuck=True) for index in indices})


def in_use(of: SlicePool, *indices: int) -> list[Slice]:
    return slots(of, {index: joined(of, index, free=0, head=False) for index in indices})


TWO = group(*[bundle(TPU=4)] * 4, strategy="STRICT_SPREAD")  # two slices of one pool
STUCK = {
    "another pool grows in its stead": ((tasks(1, head_of()),), (*stuck(SPOT, 0), *slots(DEMAND)), ["demand-0"]),
    "for tasks, too": ((tasks(3, bundle(TPU=4)),), (*stuck(SPOT, 0), *slots(DEMAND)), ["demand-0", "demand-1"]),
    "for groups, too": ((PAIR, PAIR), (*stuck(SPOT, 0, 1), *slots(DEMAND)), ["demand-0", "demand-1"]),
    "for a group of two slices": ((TWO,), (*stuck(SPOT, 0, 1), *slots(DEMAND)), ["demand-0", "demand-1"]),
    "for a group of which one slice has joined": (
        (TWO,),
        (*slots(SPOT, {0: joined(SPOT, 0), 1: replace(coming(SPOT, 1), stuck=True)}), *slots(DEMAND)),
        ["demand-0", "demand-1"],
    ),
    "its own pool wakes nothing more": (
        (tasks(2, head_of()),),
        (*stuck(SPOT, 0), *slots(DEMAND)),
        ["demand-0", "demand-1"],
    ),
    "what the other pool brings up is subtracted": (
        (tasks(1, head_of()),),
        (*stuck(SPOT, 0), *slots(DEMAND, {0: coming(DEMAND, 0)})),
        [],
    ),
    "what comes up in its own pool is subtracted": (
        (tasks(1, head_of()),),
        (*slots(SPOT, {0: replace(coming(SPOT, 0), stuck=True), 1: coming(SPOT, 1)}), *slots(DEMAND)),
        [],
    ),
    "where the other pool is full, it serves": ((tasks(1, head_of()),), (*stuck(SPOT, 0), *in_use(DEMAND, 0, 1)), []),
    "where the other pool is full, its own grows": (
        (tasks(3, head_of()),),
        (*stuck(SPOT, 0), *in_use(DEMAND, 0)[:1], *slots(DEMAND)[1:]),
        ["demand-1", "spot-1"],
    ),
    "where both are stuck, the first grows for more": (
        (tasks(3, head_of()),),
        (*stuck(SPOT, 0), *stuck(DEMAND, 0)),
        ["spot-1"],
    ),
    "a request for its name is for nobody else": (
        (group(*[pinned_to("spot-0", TPU=4)] * 2), group(head_of())),
        (*stuck(SPOT, 0), *slots(DEMAND)),
        [],
    ),
    "demand for its pool alone is for nobody else": (
        (tasks(1, bundle({"ray.io/node-group": "spot"}, TPU=4)),),
        (*stuck(SPOT, 0), *slots(DEMAND)),
        [],
    ),
    "nothing asked, nothing woken": ((), (*stuck(SPOT, 0), *slots(DEMAND)), []),
}


@pytest.mark.parametrize(("pending", "there", "woken"), STUCK.values(), ids=STUCK.keys())
def test_other_pools_serve_in_the_stead_of_a_stuck_slice(
    pending: tuple[Request | Gang, ...], there: tuple[Slice, ...], woken: list[str]
) -> None:
    found = planned(*pending, slices=list(there), pools=BOTH)
    assert sorted(found.wake) == woken
    assert not found.unmet


def test_a_floor_is_served_by_other_pools_and_only_as_long_as_nothing_has_joined_for_it() -> None:
    there = [*stuck(SPOT, 0), *slots(DEMAND)]
    assert list(planned(floor=(head_of(),), slices=there, pools=BOTH).wake) == ["demand-0"]
    served = [*stuck(SPOT, 0), *in_use(DEMAND, 0)]
    assert not planned(floor=(head_of(),), slices=served, pools=BOTH).wake
    assert rested(floor=(head_of(),), slices=served) == ["spot-0"]


def test_the_reason_names_the_pool_that_waits() -> None:
    found = planned(tasks(1, head_of()), slices=[*stuck(SPOT, 0), *slots(DEMAND)], pools=BOTH)
    assert found.wake["demand-0"].endswith("; spot waits for a place")
    assert [one.slot for one in found.pending] == ["spot-0", "demand-0"]
    assert all("TPU-v4-16-head: 1" in one.why for one in found.pending)


def test_a_larger_type_serves_where_its_slices_fit_the_demand() -> None:
    there = [*stuck(V4_8, 0), *slots(V4_32)]
    assert list(planned(tasks(1, bundle(TPU=4)), slices=there, pools=[V4_8, V4_32]).wake) == ["large-0"]
    assert not planned(tasks(1, head_of("v4-8")), slices=there, pools=[V4_8, V4_32]).wake


def rested(*pending: Request | Gang, slices: list[Slice], floor: tuple[Bundle, ...] = ()) -> list[str]:
    """The slots that rest after a minute of the same."""
    state = snapshot(*pending, floor=floor, slices=slices)
    _, memory = plan(state, slices, BOTH, OLD, NOW)
    return list(plan(state, slices, BOTH, memory, NOW + 61)[0].rest)


AWAITED = {
    "both come up: the first one serves": ([*stuck(SPOT, 0), *slots(DEMAND, {0: coming(DEMAND, 0)})], []),
    "neither does: both are asked for": ([*stuck(SPOT, 0), *stuck(DEMAND, 0)], []),
    "a free one has joined": ([*stuck(SPOT, 0), *slots(DEMAND, {0: joined(DEMAND, 0)})], ["spot-0"]),
    "its node is up": (
        [*slots(SPOT, {0: coming(SPOT, 0)}), *slots(DEMAND, {0: coming(DEMAND, 0)})],
        ["demand-0"],
    ),
    "more of them than the demand needs": (
        [*stuck(SPOT, 0, 1), *slots(DEMAND, {0: coming(DEMAND, 0)})],
        ["spot-1"],
    ),
}


@pytest.mark.parametrize(("there", "rest"), AWAITED.values(), ids=AWAITED.keys())
def test_what_is_asked_for_until_a_slice_has_come(there: list[Slice], rest: list[str]) -> None:
    assert rested(tasks(1, head_of()), slices=there) == rest


def test_stuck_slices_rest_once_their_demand_is_served_elsewhere() -> None:
    assert rested(slices=[*stuck(SPOT, 0), *in_use(DEMAND, 0)]) == ["spot-0"]


# --- repair -----------------------------------------------------------------------------------------------------------

PINNED: dict[str, Request | Gang] = {
    "by the label": tasks(2, pinned_to("lab-2", TPU=4, CPU=1)),
    "by the resource": tasks(2, bundle(**{"lab-2": 0.5, "TPU": 4})),
    "by the resource alone": tasks(1, bundle(**{"lab-2": 1})),
    "in a group": group(*[pinned_to("lab-2", TPU=4)] * 2),
}


@pytest.mark.parametrize("asked", PINNED.values(), ids=PINNED.keys())
def test_request_for_a_slot_wakes_that_very_slot(asked: Request | Gang) -> None:
    assert list(planned(asked).wake) == ["lab-2"]


@pytest.mark.parametrize("state", [SliceState.COMING, SliceState.LEAVING, SliceState.JOINED])
def test_request_for_a_slot_is_never_growth(state: SliceState) -> None:
    there = joined(LAB, 2, free=0) if state is SliceState.JOINED else a_slice(LAB, 2, state)
    assert not planned(PINNED["in a group"], slices=slots(LAB, {2: there})).wake


def test_request_for_a_slot_takes_its_chips_from_others() -> None:
    assert list(planned(PINNED["in a group"], tasks(1, bundle(TPU=4)), slices=of_lab(a=coming(LAB, 2))).wake) == [
        "lab-0"
    ]


@pytest.mark.parametrize("state", [SliceState.COMING, SliceState.RESTING])
def test_head_of_a_group_whose_slice_comes_back_is_no_growth(state: SliceState) -> None:
    healing = (PINNED["in a group"], group(head_of()))
    there = slots(LAB, {2: a_slice(LAB, 2, state)})
    assert list(planned(*healing, slices=there).wake) == (["lab-2"] if state is SliceState.RESTING else [])
    assert len(planned(*healing, group(head_of()), slices=there).wake) == 1 + (state is SliceState.RESTING)


def test_slot_that_is_asked_for_does_not_rest() -> None:
    idle = of_lab(a=joined(LAB, 1, idle=WHOLE_IDLE), b=joined(LAB, 2, idle=WHOLE_IDLE))
    assert list(planned(PINNED["by the label"], slices=idle).rest) == ["lab-1"]


def test_request_for_a_slot_that_needs_a_person_is_told() -> None:
    failed = slots(LAB, {2: a_slice(LAB, 2, SliceState.FAILED)})
    assert causes(planned(PINNED["by the label"], slices=failed)) == [UnmetCause.FAILED]


# --- rest -------------------------------------------------------------------------------------------------------------


def test_idle_slices_rest_all_of_them() -> None:
    idle = slots(LAB, {index: joined(LAB, index, idle=WHOLE_IDLE) for index in range(3)})
    assert list(planned(slices=idle).rest) == ["lab-2", "lab-1", "lab-0"]


STAYS = {
    "idle for too short a time": joined(LAB, 0, idle=LAB.idle - 1),
    "with work on one host": a_slice(
        LAB, 0, SliceState.JOINED, [host(LAB, "lab-0", idle=WHOLE_IDLE), host(LAB, "lab-0", 1, free=3)]
    ),
    "with its head taken": joined(LAB, 0, idle=WHOLE_IDLE, head=False),
}


@pytest.mark.parametrize("there", STAYS.values(), ids=STAYS.keys())
def test_slice_stays(there: Slice) -> None:
    assert not planned(slices=of_lab(a=there)).rest


def test_slice_that_pending_demand_could_use_never_rests() -> None:
    idle = of_lab(a=joined(LAB, 0, idle=WHOLE_IDLE), b=joined(LAB, 1, idle=WHOLE_IDLE))
    assert not planned(tasks(1, bundle(TPU=1)), slices=idle).rest
    assert len(planned(tasks(1, bundle(CPU=1)), slices=idle).rest) == 2
    assert len(planned(tasks(1, bundle(TPU=8)), slices=idle).rest) == 2


def test_slice_that_comes_up_rests_a_minute_after_the_demand_went() -> None:
    there = of_lab(a=coming(LAB, 0), b=coming(LAB, 1))
    _, memory = plan(snapshot(tasks(2, head_of())), there, [LAB], OLD, NOW)
    _, memory = plan(snapshot(tasks(1, head_of())), there, [LAB], memory, NOW + 1)
    assert not plan(snapshot(tasks(1, head_of())), there, [LAB], memory, NOW + 59)[0].rest
    assert list(plan(snapshot(tasks(1, head_of())), there, [LAB], memory, NOW + 60)[0].rest) == ["lab-1"]


def test_slice_with_work_does_not_rest_while_another_host_starts_ray_anew() -> None:
    half = of_lab(a=a_slice(LAB, 0, SliceState.COMING, [host(LAB, "lab-0", free=0)]))
    _, memory = plan(snapshot(slices=half), half, [LAB], OLD, NOW)
    assert not plan(snapshot(slices=half), half, [LAB], memory, NOW + 600)[0].rest


def test_slice_that_comes_up_stays_for_a_group_that_waits_for_others() -> None:
    there = slots(LAB, {0: coming(LAB, 0), **{index: joined(LAB, index, free=0) for index in (1, 2, 3)}})
    waiting = group(*[bundle(TPU=4)] * 8)
    _, memory = plan(snapshot(waiting), there, [LAB], OLD, NOW)
    assert not plan(snapshot(waiting), there, [LAB], memory, NOW + 61)[0].rest


def test_slice_that_comes_up_rests_before_one_that_joined() -> None:
    one = pool(least=1)
    there = slots(one, {0: coming(one, 0), 1: joined(one, 1, idle=WHOLE_IDLE)})
    _, memory = plan(snapshot(), there, [one], OLD, NOW)
    assert list(plan(snapshot(), there, [one], memory, NOW + 61)[0].rest) == ["lab-0"]


# --- settling ---------------------------------------------------------------------------------------------------------


def test_cluster_at_rest_wakes_at_once() -> None:
    assert plan(snapshot(tasks(1, head_of())), slots(LAB), [LAB], PlanMemory(), NOW)[0].wake


def test_growth_right_after_a_change_is_believed_when_two_snapshots_agree() -> None:
    there = of_lab(a=joined(LAB, 0, free=0))  # what just joined has its task, which is still pending in the snapshot
    state = snapshot(tasks(1, bundle(TPU=4)), slices=there)
    first, memory = plan(state, there, [LAB], PlanMemory(), NOW)
    early, memory = plan(state, there, [LAB], memory, NOW + 0.9)
    later, _ = plan(state, there, [LAB], memory, NOW + 1)
    assert not first.wake
    assert not early.wake
    assert list(later.wake) == ["lab-1"]


def test_growth_among_tasks_that_come_and_go_is_believed_when_it_lasts() -> None:
    memory, woken = PlanMemory(), []
    for second in range(3):
        there = of_lab(a=joined(LAB, 0, free=second % 2))  # changes all the time
        found, memory = plan(snapshot(tasks(9, bundle(TPU=4)), slices=there), there, [LAB], memory, NOW + second)
        woken.append(len(found.wake))
    assert woken[0] == 0
    assert woken[1] == 3


def test_demand_that_was_gone_in_between_is_not_believed() -> None:
    memory = PlanMemory()
    for second, count in enumerate((1, 0, 1)):
        there = of_lab(a=joined(LAB, 0, free=second % 2))
        found, memory = plan(
            snapshot(tasks(count, bundle(TPU=4)), slices=there), there, [LAB], memory, NOW + 0.6 * second
        )
        assert not found.wake


# --- for people -------------------------------------------------------------------------------------------------------


def test_slices_that_come_up_are_told_with_their_reason() -> None:
    found = planned(tasks(2, head_of()), slices=of_lab(a=coming(LAB, 3)))
    assert [(one.slot, one.type) for one in found.pending] == [("lab-3", "v4-16"), ("lab-0", "v4-16")]
    assert all("TPU-v4-16-head: 1" in one.why for one in found.pending)


@pytest.mark.parametrize(
    ("asked", "rays"),
    [("v4-16", "v4-16"), ("v5litepod-8", "v5litepod-8"), ("v6e-8", "v6e-8"), ("tpu7x-8", "v7x-8"), ("v5p-8", "v5p-8")],
)
def test_type_under_the_name_of_ray(asked: str, rays: str) -> None:
    assert pod_type(asked) == rays


def test_pool_of_tpu7x_serves_its_head() -> None:
    seven = SlicePool("seven", "tpu7x-16", hosts=2, chips=4, minimum=0, maximum=2, idle=600.0)
    assert list(planned(tasks(1, head_of("v7x-16")), pools=[seven]).wake) == ["seven-0"]
