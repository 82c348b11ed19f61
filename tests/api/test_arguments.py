"""Arguments of the Python API as tables: what each means, and what is told of a wrong one before anything is asked."""

from __future__ import annotations

import functools
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tpucare.api.arguments import Call, Start, read, type_of
from tpucare.fleetfile import python_fleet
from tpucare.model.errors import ConfigError
from tpucare.model.resources import OnExit, PlacementOrder, Provisioning


def start_fn(ctx: object, worker: object) -> None: ...


def creation_callback(host: str, ctx: object) -> object:
    return ctx


def call(**changes: Any) -> Call:
    named: dict[str, Any] = {
        "name": "big-pod",
        "tpu_version": 3,
        "zone": "europe-west4-a",
        "preemptible": True,
        "service_account": None,
        "slices": 1,
        "start_fn": start_fn,
        "creation_callback": creation_callback,
    }
    fields = Call.__dataclass_fields__
    more = {key: value for key, value in changes.items() if key not in fields}
    return Call(**{**named, **{key: value for key, value in changes.items() if key in fields}}, more=more)


def made(**changes: Any) -> Start:
    return read(call(**changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(call(**changes))
    return str(caught.value)


@pytest.mark.parametrize(
    ("version", "slices", "kind"),
    [
        (3, 32, "v3-256"),
        (2, 1, "v2-8"),
        (3, 1, "v3-8"),
        ("3", 4, "v3-32"),
        ("v4", 1, "v4-8"),
        (4, "4", "v4-32"),
    ],
)
def test_slices_of_eight_cores(version: object, slices: object, kind: str) -> None:
    assert type_of(version, slices) == kind


@pytest.mark.parametrize(
    ("version", "slices", "words"),
    [
        (5, 1, "pass accelerator_type= (such as 'v5"),
        (6, 1, "pass accelerator_type= (such as 'v6e"),
        ("v5p", 1, "pass accelerator_type="),
        (1, 1, "tpu_version=1 is no known TPU version: 2, 3 or 4"),
        (17, 1, "no known TPU version"),
        (None, 1, "no known TPU version"),
        ("; rm -rf /", 1, "no known TPU version"),
        (3, 0, "slices=0 must be at least 1"),
        (3, 1.5, "slices must be a whole number"),
        (3, None, "slices must be a whole number"),
    ],
)
def test_versions_that_slices_do_not_fit(version: object, slices: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        type_of(version, slices)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class TestSlots:
    def test_a_host_is_a_slot_of_exactly_that_name(self) -> None:
        fleet = made(name="pod-3").fleet
        assert [slot.name for slot in _slots(fleet)] == ["pod-3"]
        assert fleet.name == "pod-3"
        assert (fleet.index_of("pod-3"), fleet.index_of("pod-3-0"), fleet.index_of("pod")) == (0, None, None)

    def test_a_swarm_counts_from_zero(self) -> None:
        fleet = made(name="tuning", single=False, tpus=3).fleet
        assert [slot.name for slot in _slots(fleet)] == ["tuning-0", "tuning-1", "tuning-2"]
        assert (fleet.index_of("tuning-2"), fleet.index_of("tuning")) == (2, 0)

    def test_the_job_is_the_scripts_own(self) -> None:
        (slot,) = _slots(made().fleet)
        assert slot.job is not None
        assert slot.job.foreign
        assert slot.job.run == ""

    def test_a_price_arrives_at_its_places(self) -> None:
        (slot,) = _slots(made(price=0, zones=["us-central1-a"]).fleet)
        assert [place.price for place in slot.places] == [0, 0]

    def test_bounds_and_order_of_places_arrive(self) -> None:
        (slot,) = _slots(made(max_price=30, placement="ordered").fleet)
        assert (slot.bounds.max_price, slot.order) == (30, PlacementOrder.ORDERED)
        (slot,) = _slots(made(placement=PlacementOrder.WORTH, value=12.5).fleet)
        assert (slot.order, slot.value) == (PlacementOrder.WORTH, 12.5)
        (slot,) = _slots(made(max_cost=100, until="2099-12-31").fleet)
        assert slot.bounds.max_cost == 100
        assert slot.bounds.until is not None
        assert "placement: cheapest is not one of worth, ordered" in refusal(placement="cheapest")

    def test_the_text_in_the_store_means_the_same(self) -> None:
        start = made(
            single=False, tpus=2, zones=["us-central1-a"], boot_timeout=90, on_exit="restart", project="grant", value=3
        )
        assert python_fleet.is_python(start.text)
        assert python_fleet.parse_python(start.text, file="start_multiple") == start.fleet

    @pytest.mark.parametrize("name", ["homebrewnlp-preemptible-tuning", "a", "pod-7", "x" * 33])
    def test_names_of_2022(self, name: str) -> None:
        assert made(name=name).fleet.name == name

    @pytest.mark.parametrize(
        "name",
        ["", "My-Pod", "my pod", "pod;reboot", "$(id)", "pod-", "3pod", "pod_1", "pod.x", "p\nx", "x" * 34, None, 3],
    )
    def test_names_that_no_node_may_bear(self, name: object) -> None:
        text = refusal(name=name)
        assert text.startswith("host=")
        assert "\n" not in text

    def test_a_name_like_a_node_of_another_slot(self) -> None:
        assert "must not end in -a<digits>" in refusal(name="pod-a3")

    @pytest.mark.parametrize(
        ("tpus", "words"), [(0, "tpus=0"), (-1, "tpus=-1"), ("two", "whole number"), (2.0, "whole")]
    )
    def test_numbers_of_tpus(self, tpus: object, words: str) -> None:
        assert words in refusal(single=False, tpus=tpus)

    def test_a_long_prefix_leaves_room_for_the_index(self) -> None:
        assert made(name="x" * 31, single=False, tpus=10).fleet.count == 10
        assert "room for 30" in refusal(name="x" * 31, single=False, tpus=11)


class TestPlaces:
    @pytest.mark.parametrize(
        ("changes", "tier"),
        [
            ({"preemptible": True}, Provisioning.PREEMPTIBLE),
            ({"preemptible": 1}, Provisioning.PREEMPTIBLE),
            ({"preemptible": 0}, Provisioning.ON_DEMAND),
            ({"preemptible": None}, Provisioning.ON_DEMAND),
            ({"preemptible": 1, "provisioning": "spot"}, Provisioning.SPOT),
        ],
    )
    def test_how_it_is_paid_for(self, changes: dict[str, Any], tier: Provisioning) -> None:
        (place,) = made(**changes).fleet.places
        assert place.provisioning is tier

    def test_what_a_place_says(self) -> None:
        account = "trainer@grant.iam.gserviceaccount.com"
        (place,) = made(
            service_account=account, slices=4, network={"external_ips": False}, runtime="v2-alpha"
        ).fleet.places
        assert (place.zone, place.accelerator_type, place.workers) == ("europe-west4-a", "v3-32", 4)
        assert (place.service_account, place.runtime, place.network.external_ips) == (account, "v2-alpha", False)

    def test_zones_come_after_the_first(self) -> None:
        places = made(zones=["us-central1-a", "europe-west4-a"]).fleet.places
        assert [place.zone for place in places] == ["us-central1-a", "europe-west4-a"]
        places = made(zones=["us-central1-a"]).fleet.places
        assert [place.zone for place in places] == ["europe-west4-a", "us-central1-a"]

    def test_other_types_by_their_names(self) -> None:
        (place,) = made(tpu_version=5, accelerator_type="v5p-16", zone="us-east5-a").fleet.places
        assert (place.accelerator_type, place.workers) == ("v5p-16", 2)

    def test_alternatives(self) -> None:
        second = {"type": "v2-8", "zones": ["us-central1-f"], "provisioning": "spot"}
        assert [place.accelerator_type for place in made(tpu=second).fleet.places] == ["v3-8", "v2-8"]
        only = made(tpu=[second], zone=None, tpu_version=None, slices=None)
        assert [place.accelerator_type for place in only.fleet.places] == ["v2-8"]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"zone": "europe-west4-z"}, "start_single: zone: europe-west4-z is not listed"),
            ({"zone": "europe-west4-z"}, "nearest: europe-west4-"),
            (
                {"zone": "us-central2-b"},
                "start_single: zone: v3 is not offered in us-central2-b; it is in us-central1-a",
            ),
            ({"zone": "a b; c"}, "zone: 'a b; c' is not a known zone"),
            ({"zone": None}, "zone"),
            ({"zone": 4}, "zone must be text"),
            (
                {"slices": 3},
                "start_single: tpu_version and slices: v3-24 is not listed (unlisted=True accepts it); nearest",
            ),
            ({"accelerator_type": "v5litepod-9", "zone": "us-west4-a"}, "start_single: accelerator_type: "),
            ({"service_account": "not an account"}, "service_account: 'not an account' is not a service account"),
            ({"preemptible": "maybe"}, "preemptible must be True or False"),
            (
                {"network": {"extrenal_ips": False}},
                "start_single: network.extrenal_ips: unknown key; nearest: external_ips",
            ),
            ({"network": {"external ips": False}}, "start_single: network[external ips]: unknown key; nearest"),
            ({"ssh_keys": ["me"]}, "start_single: ssh_keys[0]: must be USER:KEY"),
            ({"zones": "us-central1-a"}, "zones must be a list"),
            ({"tpu": "v3-8"}, "tpu must be a mapping as in a fleet file, or a list of such, not v3-8"),
            ({"tpu": 5}, "tpu must be a mapping as in a fleet file, or a list of such, not 5"),
            ({"network": {"name": object()}}, "tpu.network.name must be as in a fleet file, not a object"),
        ],
    )
    def test_what_is_wrong_is_told_by_the_names_of_arguments(self, changes: dict[str, Any], words: str) -> None:
        text = refusal(**changes)
        assert words.replace("'", "") in text.replace("'", "")
        assert ":1:" not in text

    def test_problems_are_renamed_one_by_one(self) -> None:
        with pytest.raises(ConfigError) as caught:
            read(call(zone="europe-west4-z", slices=3))
        problems = caught.value.problems
        assert [(problem.line, problem.key) for problem in problems] == [(0, "tpu_version and slices"), (0, "zone")]
        assert str(caught.value).split("\n") == [problem.render("start_single") for problem in problems]


class TestCare:
    @pytest.mark.parametrize(
        ("changes", "key", "value"),
        [
            ({}, "unhealthy_after", timedelta(hours=1)),
            ({"unhealthy_timeout_seconds": 600}, "unhealthy_after", timedelta(minutes=10)),
            ({"unhealthy_timeout_seconds": 0.2}, "unhealthy_after", timedelta(seconds=1)),
            ({"unhealthy_timeout": 60}, "unhealthy_after", timedelta(minutes=1)),
            ({"unhealthy_after": "2h"}, "unhealthy_after", timedelta(hours=2)),
            ({"boot_timeout": timedelta(minutes=7)}, "boot_timeout", timedelta(minutes=7)),
            ({"care": {"grace": "5s", "crash_budget": 3}}, "grace", timedelta(seconds=5)),
            ({"care": {"grace": "5s"}, "grace": 9}, "grace", timedelta(seconds=9)),
            ({"setup_budget": 2}, "setup_budget", 2),
            ({}, "on_exit", OnExit.LEAVE),
            ({"on_exit": "delete"}, "on_exit", OnExit.DELETE),
            ({"care": {"on_exit": "restart"}}, "on_exit", OnExit.RESTART),
        ],
    )
    def test_what_it_says(self, changes: dict[str, Any], key: str, value: object) -> None:
        assert getattr(made(**changes).fleet.care, key) == value

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"unhealthy_timeout_seconds": 0}, "unhealthy_timeout_seconds=0 must be a number of seconds above 0"),
            ({"unhealthy_timeout_seconds": "soon"}, "start_single: unhealthy_timeout_seconds: soon is not a duration"),
            ({"unhealthy_timeout": 60, "unhealthy_timeout_seconds": 61}, "are the same; give one"),
            ({"unhealthy_after": "1m", "unhealthy_timeout_seconds": 61}, "are the same; give one"),
            ({"boot_timeout": "4x"}, "start_single: boot_timeout: 4x is not a duration such as 90s"),
            ({"care": {"boot_timeot": 3}}, "start_single: boot_timeot: unknown key; nearest: boot_timeout"),
            ({"care": 3}, "care must be a mapping"),
            ({"on_exit": "restrt"}, "on_exit=restrt is not one of leave, restart, delete; nearest: restart"),
            ({"on_exit": True}, "on_exit=True is not one of"),
        ],
    )
    def test_what_is_wrong(self, changes: dict[str, Any], words: str) -> None:
        assert words in refusal(**changes)


class Callable2:
    def __call__(self, first: object, second: object) -> object:
        return first

    def method(self, first: object, second: object) -> object:
        return first


class Task:
    def __init__(self, ctx: object, worker: object) -> None: ...


def three(one: object, two: object, three: object) -> None: ...


async def later(ctx: object, worker: object) -> None: ...


class TestCallbacks:
    @pytest.mark.parametrize(
        "function",
        [
            start_fn,
            lambda *a: None,
            Callable2(),
            Callable2().method,
            Task,
            functools.partial(three, three=3),
            functools.partial(three, 1),
            max,
        ],
    )
    def test_whatever_takes_two_values(self, function: object) -> None:
        start = made(start_fn=function, creation_callback=function)
        assert start.start_fn is function
        assert start.creation_callback is function

    @pytest.mark.parametrize(
        ("function", "words"),
        [
            (None, "is missing"),
            ("start", "must be a function, not a str"),
            (lambda ctx: None, "and takes (ctx): too many positional arguments"),
            (three, "missing a required argument: 'three'"),
            (lambda *, ctx, worker: None, "too many positional arguments"),
            (Callable2, "takes ()"),
            (later, "async"),
        ],
    )
    @pytest.mark.parametrize("name", ["start_fn", "creation_callback"])
    def test_whatever_does_not(self, name: str, function: object, words: str) -> None:
        text = refusal(**{name: function})
        assert text.startswith(name)
        assert words in text

    def test_the_other_name_of_2022(self) -> None:
        assert made(creation_callback=None, created_callback=start_fn).creation_callback is start_fn
        assert "are the same" in refusal(created_callback=start_fn)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"retires": 3}, "start_single has no argument retires"),
        ({"zonse": []}, "start_single has no argument zonse; nearest: zone"),
        ({"start_methd": "x"}, "nearest: start_method"),
        ({"single": False, "name": "p", "tpu_s": 2}, "start_multiple has no argument tpu_s; nearest: tpus"),
        ({"repository": "x"}, "it belongs to a declared job: tpucare.run(tpucare.Fleet("),
        ({"count": 4}, "start_multiple takes `tpus`"),
        ({"start_method": "fork"}, "start_method=fork is none of thread, process"),
        ({"on_event": 3}, "on_event must be a function"),
        ({"store": 3}, "store must be a folder"),
        ({"delete_unowned": "yes"}, "delete_unowned must be True or False"),
        ({"all_workers": "all"}, "all_workers must be True or False"),
        ({"creation_semaphore": 2}, "creation_semaphore must be a context manager, not a int"),
        ({"project": "12345"}, "project"),
    ],
)
def test_unknown_and_wrong_arguments(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_how_to_care_is_taken_as_it_was_given(tmp_path: Path) -> None:
    events: list[object] = []
    semaphore = threading.Semaphore(2)
    start = made(
        creation_semaphore=semaphore,
        all_workers=1,
        endpoint="127.0.0.1:1",
        project="grant",
        store=tmp_path,
        on_event=events.append,
        start_method="process",
        delete_unowned=True,
        fresh=True,
    )
    options = start.options
    assert start.creation_semaphore is semaphore
    assert start.all_workers
    assert (options.endpoint, options.project, options.store) == ("127.0.0.1:1", "grant", tmp_path)
    assert (options.start_method, options.delete_unowned, options.fresh) == ("process", True, True)
    assert start.fleet.project == "grant"


def _slots(fleet: python_fleet.PythonFleet) -> Any:
    from dataclasses import replace

    return replace(fleet, project=fleet.project or "grant").slots()


def test_every_problem_is_told_at_once() -> None:
    text = refusal(zone="europe-west4-z", boot_timeout="4x", care={"graec": 1})
    assert len(text.splitlines()) == 3
