"""A fleet file becomes slots, or says in one line each what a person has to change."""

from __future__ import annotations

import re
import runpy
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from re import _parser as sre  # type: ignore[attr-defined]  # What Python itself makes of a pattern.
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucare.fleetfile import parse as fleet_files
from tpucare.fleetfile import values
from tpucare.fleetfile.limits import warnings_of
from tpucare.fleetfile.parse import FleetSpec, parse, read_local, read_text, refuse_shared_names
from tpucare.fleetfile.problems import PROBLEMS_LIMIT
from tpucare.fleetfile.schema import SECTIONS, FleetFile, json_schema
from tpucare.model import accelerators
from tpucare.model.errors import ConfigError
from tpucare.model.resources import (
    Care,
    DueWork,
    HostKeys,
    Network,
    OnSuccess,
    Place,
    PlacementOrder,
    Provisioning,
    SaveBounds,
    node_name,
)
from tpucare.planner.markets import VALUE_OF_PRICES

ROOT = Path(__file__).parents[2]
FOLDER = Path("/fleets")
KEY = "me:ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl me@laptop"

EXAMPLE = rf"""
name: big-pod
count: 1
project: my-project                          # default: GOOGLE_CLOUD_PROJECT, gcloud's config file, credentials
tpu:                                         # or a list of alternatives, in order
  type: v3-256
  zones:                                     # in order of preference
    - europe-west4-a
    - {{zone: us-central1-a, service_account: us-trainer@my-project.iam.gserviceaccount.com}}
  provisioning: spot                         # spot | preemptible | on-demand | reserved
  runtime: tpu-ubuntu2204-base               # default: from the catalogue
  service_account: trainer@my-project.iam.gserviceaccount.com
  network: {{external_ips: true}}
  ssh_keys: [{KEY}]
job:
  repository: https://github.com/HomebrewNLP/HomebrewNLP-Jax    # or workdir: .
  branch: main
  setup: bash setup.sh
  run: bash run.sh
  files: {{config.yaml: ./config.yaml}}
  env: {{WANDB_PROJECT: gpt}}
  secrets: [WANDB_API_KEY]
  checkpoint: gs://my-bucket/big-pod
  progress: 'step[ =:]+(\d+)'
care:
  unhealthy_after: 1h
  stalled_after: 30m
  on_success: delete
"""

SMALL: dict[str, Any] = {
    "name": "pod",
    "project": "my-project",
    "tpu": {"type": "v4-8", "zones": ["us-central2-b"]},
    "job": {"run": "python train.py", "checkpoint": "gs://bucket/pod"},
}


def read(text: str, **options: Any) -> FleetSpec:
    options = {
        "file": "pod.yaml",
        "folder": FOLDER,
        "read_file": lambda folder, path: str(folder / path).encode(),
        **options,
    }
    return parse(text, **options)


def fleet(changes: dict[str, Any] | None = None, **options: Any) -> FleetSpec:
    """The small fleet with *changes*: `{"job.run": "x"}` sets a key, a value of None removes it."""
    return read(yaml.safe_dump(changed(changes or {})), **options)


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    document = yaml.safe_load(yaml.safe_dump(SMALL))
    for path, value in changes.items():
        *parents, key = path.split(".")
        section = document
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return dict(document)


def problems(changes: dict[str, Any], **options: Any) -> list[str]:
    """The lines of the ConfigError, without file and line number."""
    with pytest.raises(ConfigError) as caught:
        fleet(changes, **options)
    lines = str(caught.value).split("\n")
    assert all(re.match(r"pod\.yaml:\d+: ", line) for line in lines)
    return [line.split(": ", 1)[1] for line in lines]


# --- what a right file becomes -----------------------------------------------------------------------------------


def test_the_example_of_the_reference_becomes_a_slot() -> None:
    big_pod = read(EXAMPLE, read_file=lambda folder, path: {FOLDER / "config.yaml": b"lr: 1"}[folder / path])
    slot = big_pod.slot(0)
    assert (slot.name, slot.fleet, slot.project, slot.workers) == ("big-pod-0", "big-pod", "my-project", 32)
    assert slot.places == (
        Place(
            "europe-west4-a",
            "v3-256",
            Provisioning.SPOT,
            "tpu-ubuntu2204-base",
            "trainer@my-project.iam.gserviceaccount.com",
            workers=32,
            price=128 * 0.66,
        ),
        Place(
            "us-central1-a",
            "v3-256",
            Provisioning.SPOT,
            "tpu-ubuntu2204-base",
            "us-trainer@my-project.iam.gserviceaccount.com",
            workers=32,
        ),
    )
    assert slot.job is not None
    assert slot.job.files == {"config.yaml": b"lr: 1"}
    assert slot.job.env == {"WANDB_PROJECT": "gpt"}
    assert (slot.job.repository, slot.job.branch) == ("https://github.com/HomebrewNLP/HomebrewNLP-Jax", "main")
    assert (slot.job.setup, slot.job.run, slot.job.secrets) == ("bash setup.sh", "bash run.sh", ("WANDB_API_KEY",))
    assert (slot.job.checkpoint, slot.job.progress) == ("gs://my-bucket/big-pod", r"step[ =:]+(\d+)")
    assert slot.ssh_keys == (KEY,)
    assert slot.care == Care(boot_timeout=timedelta(minutes=60))
    assert big_pod.warnings == (
        "pod.yaml:9: tpu.zones[1].zone: only v3-8 is listed for us-central1-a; v3-256 may be refused there",
    )


def test_a_small_file_takes_every_default() -> None:
    slot = fleet().slot(0)
    assert slot.places == (
        Place(
            "us-central2-b", "v4-8", Provisioning.SPOT, "tpu-ubuntu2204-base", network=Network(), workers=1, price=3.686
        ),
    )
    assert slot.care == Care()
    assert slot.ssh_keys == ()


def test_alternatives_keep_their_order_and_zones_inherit() -> None:
    network = {"external_ips": False, "name": "training", "tags": ["tpu"]}
    declared = fleet(
        {
            "tpu": [
                {
                    "type": "v4-32",
                    "provisioning": "on-demand",
                    "network": network,
                    "zones": [
                        "us-central2-b",
                        {"zone": "us-central2-b", "provisioning": "spot", "network": {"subnetwork": "here"}},
                        {"zone": "us-central2-b", "provisioning": "reserved", "runtime": "tpu-vm-tf-2.17.0-pod-pjrt"},
                    ],
                    "ssh_keys": [KEY],
                },
                {"type": "v6e-64", "zones": ["us-east1-d"], "ssh_keys": [KEY, KEY.replace("me:", "you:")]},
            ]
        }
    )
    first, second, third, other = declared.places
    assert first.network == Network(name="training", tags=("tpu",), external_ips=False)
    assert second.network == Network(name="training", subnetwork="here", tags=("tpu",), external_ips=False)
    assert [place.provisioning.value for place in declared.places] == ["on-demand", "spot", "reserved", "spot"]
    assert (third.runtime, other.runtime) == ("tpu-vm-tf-2.17.0-pod-pjrt", "v2-alpha-tpuv6e")
    assert [place.workers for place in declared.places] == [4, 4, 4, 16]
    assert declared.workers == declared.slot(0).workers == 16
    assert declared.ssh_keys == (KEY, KEY.replace("me:", "you:"))
    assert declared.warnings == ()


def test_metadata_and_reach_arrive_at_every_place() -> None:
    declared = fleet(
        {
            "tpu.metadata": {"startup-script": "#!/bin/sh\nsystemctl stop sshguard\n", "level": 3},
            "tpu.network": {"reach": "internal"},
            "tpu.zones": ["us-central2-b", {"zone": "us-central2-b", "provisioning": "reserved"}],
        }
    )
    for place in declared.places:
        assert dict(place.metadata) == {"startup-script": "#!/bin/sh\nsystemctl stop sshguard\n", "level": "3"}
        assert place.network.external_ips
        assert not place.network.is_reached_externally
        assert not place.os_login
    assert declared.warnings == ()


def test_a_place_has_the_price_of_the_file_or_of_the_catalogue() -> None:
    zones = ["us-central2-b", {"zone": "us-central2-b", "provisioning": "reserved"}]
    listed, reserved = fleet({"tpu.zones": zones}).places
    chip = accelerators.chip_hour_price("v4-8", "us-central2-b", Provisioning.SPOT)
    assert chip is not None
    assert listed.price == 4 * chip.usd_per_chip_hour
    assert reserved.price is None
    zones[1] = {"zone": "us-central2-b", "provisioning": "reserved", "price": 1.5}
    granted = fleet({"tpu.zones": zones, "tpu.price": 0}).places
    assert [place.price for place in granted] == [0, 1.5]
    assert [place.key for place in granted] == [listed.key, reserved.key]


def test_check_names_the_places_above_max_price_and_those_without_a_price() -> None:
    zones = ["us-central2-b", *({"zone": "us-central2-b", "provisioning": tier} for tier in ("on-demand", "reserved"))]
    dear = fleet({"tpu.zones": zones, "max_price": 12.5})
    assert [dear.bounds.excludes(place) for place in dear.places] == [False, True, False]
    assert dear.slot(0).bounds == dear.bounds
    assert dear.warnings == (
        "pod.yaml:4: max_price: cannot exclude v4-8 as reserved in us-central2-b: no price is known; write `price` "
        "there",
        "pod.yaml:4: max_price: excludes: v4-8 as on-demand in us-central2-b at 12.88 dollars an hour",
    )
    [line] = fleet({"max_price": 1}).warnings
    assert line.endswith("max_price: leaves no place: v4-8 as spot in us-central2-b at 3.686 dollars an hour")
    assert fleet({"tpu.price": 0, "max_price": 0}).warnings == ()


def test_places_are_ranked_by_worth_unless_the_file_keeps_its_order() -> None:
    plain, kept = fleet(), fleet({"placement": "ordered"})
    assert (plain.slot(0).order, plain.slot(0).value) == (PlacementOrder.WORTH, None)
    assert kept.slot(0).order is PlacementOrder.ORDERED
    assert fleet({"value": 30}).slot(0).value == 30
    assert f"{VALUE_OF_PRICES:g} times the cheapest" in str(FleetFile.model_fields["value"].description)
    [line] = fleet({"placement": "ordered", "value": 30}).warnings
    assert line.endswith("value: has no effect beside `placement: ordered`")


def test_places_of_one_tpu_entry_bear_its_number() -> None:
    zones = ["us-central2-b", {"zone": "us-central2-b", "provisioning": "on-demand"}]
    entries = [{"type": "v4-8", "zones": zones}, {"type": "v4-16", "zones": ["us-central2-b"]}]
    assert [place.entry for place in fleet({"tpu": entries}).places] == [0, 0, 1]


@pytest.mark.parametrize(
    ("written", "instant"),
    [
        ("2026-12-31", datetime(2026, 12, 31, tzinfo=UTC)),
        ("2026-12-31T18:00", datetime(2026, 12, 31, 18, tzinfo=UTC)),
        ("2026-12-31 18:00:30Z", datetime(2026, 12, 31, 18, 0, 30, tzinfo=UTC)),
        ("2026-12-31T18:00+01:00", datetime(2026, 12, 31, 17, tzinfo=UTC)),
    ],
)
def test_until_is_an_instant_or_the_beginning_of_a_day(written: str, instant: datetime) -> None:
    assert fleet({"until": written}).slot(0).bounds.until == instant


def test_a_deadline_without_an_on_demand_place_is_warned() -> None:
    due = {"deadline": {"hours_of_work": 40, "by": "2026-12-31"}}
    declared = fleet(due)
    assert declared.slot(0).bounds.deadline == DueWork(40, datetime(2026, 12, 31, tzinfo=UTC))
    [line] = declared.warnings
    assert "deadline: has no on-demand place to keep it with" in line
    zones = ["us-central2-b", {"zone": "us-central2-b", "provisioning": "on-demand"}]
    assert fleet({**due, "tpu.zones": zones}).warnings == ()
    [line, _] = fleet({**due, "tpu.zones": zones, "max_price": 5}).warnings
    assert "deadline: has no on-demand place" in line


def test_max_cost_needs_the_price_of_each_place() -> None:
    assert fleet({"max_cost": 500}).slot(0).bounds.max_cost == 500
    reserved = {"tpu.zones": ["us-central2-b", {"zone": "us-central2-b", "provisioning": "reserved"}]}
    [line] = problems({**reserved, "max_cost": 500})
    assert line == (
        "max_cost: needs the price of v4-8 as reserved in us-central2-b, which is not known: write `price` there (0 "
        "for a grant)"
    )
    reserved["tpu.zones"][1]["price"] = 3  # type: ignore[index]
    assert fleet({**reserved, "max_cost": 500}).warnings == ()


@pytest.mark.parametrize(
    ("key", "value", "warning"),
    [
        ("tpu.os_login", True, "tpu.os_login: tpucare does not support OS Login yet"),
        ("tpu.metadata", {"wandb-api-key": "x"}, "tpu.metadata.wandb-api-key: looks like a secret"),
    ],
)
def test_what_keeps_us_out_or_tells_secrets_is_a_warning(key: str, value: object, warning: str) -> None:
    [line] = fleet({key: value}).warnings
    assert warning in line


def test_every_setting_of_care_arrives() -> None:
    lengths = {
        "boot_timeout": "1m",
        "unreachable_after": "2m",
        "unhealthy_after": "1h30m",
        "stalled_after": "4m",
        "setup_timeout": "5m",
        "first_step_timeout": "6m",
        "fence_after": "1d",
        "keep_failed": "0s",
        "grace": "1m30s",
        "success_after": "5s",
    }
    others = {"fence": "proceed", "stopped": "delete", "on_success": "restart", "crash_budget": 3, "setup_budget": 0}
    others["host_keys"] = "vouched"
    others["save_every"] = {"min": "10s", "max": "20m"}
    care = fleet({"care": {**lengths, **others, "sigterm_on_preemption": False}}).care
    minutes = timedelta(minutes=1)
    assert care == Care(
        boot_timeout=minutes,
        unreachable_after=2 * minutes,
        unhealthy_after=90 * minutes,
        stalled_after=4 * minutes,
        setup_timeout=5 * minutes,
        first_step_timeout=6 * minutes,
        fence_after=timedelta(days=1),
        keep_failed=timedelta(0),
        grace=1.5 * minutes,
        success_after=timedelta(seconds=5),
        fence_proceed=True,
        stopped_delete=True,
        host_keys=HostKeys.VOUCHED,
        on_success=OnSuccess.RESTART,
        crash_budget=3,
        setup_budget=0,
        sigterm_on_preemption=False,
        save_every=SaveBounds(timedelta(seconds=10), 20 * minutes),
    )


# Of each key of `tpu` and `job`, and of those on placement, another value than in SMALL. Those of `care` arrive in the
# test above.
OTHER_VALUES: dict[str, Any] = {
    "max_price": 5,
    "until": "2026-12-31",
    "deadline": {"hours_of_work": 40, "by": "2026-12-31"},
    "max_cost": 500,
    "placement": "ordered",
    "value": 20,
    "tpu.type": "v4-16",
    "tpu.zones": [{"zone": "us-central2-b", "provisioning": "reserved"}],
    "tpu.provisioning": "on-demand",
    "tpu.runtime": "tpu-vm-v4-base",
    "tpu.service_account": "trainer@my-project.iam.gserviceaccount.com",
    "tpu.network": {"tags": ["train"]},
    "tpu.ssh_keys": [KEY],
    "tpu.metadata": {"level": 3},
    "tpu.os_login": True,
    "tpu.price": 0,
    "tpu.queued": True,
    "tpu.valid_for": "6h",
    "tpu.unlisted": True,
    "job.run": "python other.py",
    "job.setup": "true",
    "job.repository": "https://github.com/HomebrewNLP/HomebrewNLP-Jax",
    "job.branch": "main",
    "job.follow": True,
    "job.workdir": ".",
    "job.files": {"config.yaml": "config.yaml"},
    "job.env": {"LEVEL": 3},
    "job.secrets": ["WANDB_API_KEY"],
    "job.checkpoint": "gs://bucket/other",
    "job.progress": "at (\\d+)",
    "job.cache": "gs://bucket/cache",
    "job.cache_paths": ["venv", "lib/built"],
    "job.prefetch": True,
}


@pytest.mark.parametrize(("key", "value"), OTHER_VALUES.items())
def test_every_key_arrives_in_the_slot(key: str, value: object) -> None:
    """A key of the schema that `parse` does not hand on would be accepted and have no effect."""
    needed = {"job.branch": "job.repository", "job.follow": "job.repository", "tpu.valid_for": "tpu.queued"}.get(key)
    base = {needed: OTHER_VALUES[needed]} if needed is not None else {}
    base = {"job.setup": "true", "job.cache": "/mnt/cache"} if key.startswith("job.cache") else base
    given = {"tpu.zones": ["us-east5-zz"], "tpu.unlisted": True} if key == "tpu.unlisted" else {**base, key: value}
    assert fleet(given).slot(0) != fleet(base).slot(0)


def test_no_key_is_left_out_of_that() -> None:
    keys = {f"{name}.{key}" for name in ("tpu", "job") for key in SECTIONS[name,].model_fields}
    top = FleetFile.model_fields.keys() - {"name", "count", "project", "tpu", "job", "care", "ray"}
    assert set(OTHER_VALUES) == keys | top


def test_a_queue_and_direct_creates_stand_side_by_side() -> None:
    zones = ["us-east5-a", {"zone": "us-east5-b", "queued": False, "provisioning": "on-demand"}]
    queued = {"type": "v6e-8", "zones": zones, "queued": True, "valid_for": "6h"}
    direct = {"type": "v6e-8", "zones": ["us-east5-a"]}
    places = fleet({"tpu": [queued, direct]}).places
    assert [(place.zone, place.queued, place.valid_for) for place in places] == [
        ("us-east5-a", True, timedelta(hours=6)),
        ("us-east5-b", False, timedelta(hours=6)),
        ("us-east5-a", False, None),
    ]
    assert len({place.key for place in places}) == 3


@pytest.mark.parametrize(
    ("tpu", "path"),
    [
        ({"queued": True, "provisioning": "preemptible"}, "tpu.provisioning"),
        ({"queued": True, "zones": [{"zone": "us-central1-a", "provisioning": "preemptible"}]}, "tpu.zones[0]"),
        ({"provisioning": "preemptible", "zones": [{"zone": "us-central1-a", "queued": True}]}, "tpu.zones[0]"),
        ({"valid_for": "6h"}, "tpu.valid_for"),
        ({"zones": [{"zone": "us-central1-a", "valid_for": "6h"}]}, "tpu.zones[0].valid_for"),
        ({"queued": True, "valid_for": "0s"}, "tpu.valid_for"),
    ],
)
def test_a_queue_that_the_service_does_not_have(tpu: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fleet({"tpu": {"type": "v2-8", "zones": ["us-central1-a"], **tpu}})
    (line,) = str(refused.value).splitlines()
    assert f" {path}" in line


@pytest.mark.parametrize(
    ("type", "minutes"), [("v6e-8", 30), ("v6e-64", 30), ("v6e-128", 60), ("v6e-256", 120), ("v5p-2048", 180)]
)
def test_the_time_to_boot_grows_with_the_hosts(type: str, minutes: int) -> None:
    tpu = {"type": type, "zones": ["us-east5-a"]}
    assert fleet({"tpu": tpu}).care.boot_timeout == timedelta(minutes=minutes)
    assert fleet({"tpu": tpu, "care": {"boot_timeout": "30m"}}).care.boot_timeout == timedelta(minutes=30)


def test_the_slot_placeholder_expands_and_other_braces_survive() -> None:
    declared = fleet(
        {
            "count": 3,
            "job": {
                "run": "echo {slot} ${slot} ${HOME} {slots} | awk '{print $1}'",
                "setup": "echo {slot}",
                "env": {"NAME": "run-{slot}", "JSON": '{"a": {}}', "LR": 1e-4, "N": 3},
                "files": {"conf/{slot}.yaml": "{slot}/config.yaml", "common": "common"},
                "checkpoint": "gs://bucket/{slot}/ckpt",
            },
        }
    )
    slots = declared.slots()
    assert [slot.name for slot in slots] == ["pod-0", "pod-1", "pod-2"]
    job = slots[1].job
    assert job is not None
    assert job.run == "echo pod-1 $pod-1 ${HOME} {slots} | awk '{print $1}'"
    assert job.setup == "echo {slot}"
    assert job.env == {"NAME": "run-pod-1", "JSON": '{"a": {}}', "LR": "0.0001", "N": "3"}
    assert job.files == {"conf/pod-1.yaml": b"/fleets/pod-1/config.yaml", "common": b"/fleets/common"}
    assert job.checkpoint == "gs://bucket/pod-1/ckpt"
    assert [line.split(": ", 1)[1] for line in declared.warnings] == [
        "job.setup: {slot} is not expanded here; use $TPUCARE_SLOT"
    ]


def test_numbers_in_the_environment_stay_as_written() -> None:
    text = yaml.safe_dump(SMALL) + "  # job follows\n"
    text = text.replace("  run: ", "  env: {LR: 1e-4, N: 010, BIG: 12345678901234567890, ON: yes}\n  run: ")
    job = read(text).slot(0).job
    assert job is not None
    assert job.env == {"LR": "1e-4", "N": "010", "BIG": "12345678901234567890", "ON": "yes"}


@pytest.mark.parametrize(
    ("count", "index", "written", "expanded"),
    [
        (1, 0, "gs://bucket/x", "gs://bucket/x"),
        (2, 0, "gs://bucket/x", "gs://bucket/x/pod-0"),
        (2, 1, "gs://bucket/x/", "gs://bucket/x/pod-1"),
        (1, 1, "gs://bucket/x", "gs://bucket/x/pod-1"),  # a surplus slot of a lowered count
        (2, 1, "gs://bucket/{slot}/x", "gs://bucket/pod-1/x"),
        (1, 0, "/mnt/nfs/{slot}", "/mnt/nfs/pod-0"),
    ],
)
def test_slots_never_share_a_checkpoint(count: int, index: int, written: str, expanded: str) -> None:
    job = fleet({"count": count, "job.checkpoint": written}).slot(index).job
    assert job is not None
    assert job.checkpoint == expanded


def test_a_fleet_without_checkpoint_is_warned() -> None:
    declared = fleet({"job.checkpoint": None})
    job = declared.slot(0).job
    assert job is not None
    assert job.checkpoint == ""
    assert "has no checkpoint" in declared.warnings[0]


def test_names_stay_within_the_limits_of_the_api() -> None:
    declared = fleet({"name": "a" * 24, "count": 10_000})
    assert len(node_name(declared.slot(9_999).name, 999_999_999)) <= 40, "the API takes no longer names of nodes"
    assert len(declared.slots()) == 10_000
    with pytest.raises(ConfigError, match="has no slot 10000"):
        declared.slot(10_000)
    with pytest.raises(ConfigError, match="has no slot -1"):
        declared.slot(-1)


@pytest.mark.parametrize(
    ("word", "index"),
    [("pod", 0), ("pod-0", 0), ("pod-17", 17), ("pod-017", None), ("pod-x", None), ("17", None), ("pod-²", None)],
)
def test_a_slot_is_found_by_its_name(word: str, index: int | None) -> None:
    assert fleet().index_of(word) == index


def test_a_project_comes_from_the_file_or_the_caller() -> None:
    assert fleet(default_project="other").slot(0).project == "my-project"
    assert fleet({"project": None}, default_project="other").slot(0).project == "other"
    homeless = fleet({"project": None})
    assert homeless.project is None
    with pytest.raises(ConfigError, match="GOOGLE_CLOUD_PROJECT"):
        homeless.slots()


def test_workdir_is_resolved_against_the_folder_of_the_file() -> None:
    for written, resolved in ((".", "/fleets"), ("../code/x", "/code/x"), ("/abs/y/", "/abs/y")):
        job = fleet({"job.workdir": written}).slot(0).job
        assert job is not None
        assert job.workdir == resolved
    assert fleet({"job.workdir": "/abs"}, folder=None).job.workdir == "/abs"


def test_two_fleets_of_one_name_are_refused() -> None:
    first, second, third = fleet(file="a.yaml"), fleet(file="b.yaml"), fleet({"name": "other"}, file="c.yaml")
    refuse_shared_names([first, third])
    with pytest.raises(ConfigError, match=r"^b\.yaml: name: pod is declared in a\.yaml already"):
        refuse_shared_names([first, second, third])


def test_unlisted_lets_new_types_zones_and_terms_pass_with_a_warning() -> None:
    tpu = {"type": "v4-640", "zones": ["us-central9-z", "us-east1-d"], "unlisted": True}
    declared = fleet({"tpu": tpu})
    assert (declared.places[0].zone, declared.places[0].workers) == ("us-central9-z", 80)
    assert len(declared.warnings) == 3
    old = {"type": "v3-8", "zones": ["europe-west4-a"], "provisioning": "reserved", "unlisted": True}
    assert "not offered as reserved" in fleet({"tpu": old}).warnings[0]


def test_what_is_unwise_is_a_warning() -> None:
    lines = fleet({"tpu.runtime": "v2-alpha-tpuv6e", "job.env": {"WANDB_API_KEY": "x", "TOKENIZER": "y"}}).warnings
    assert [line.split(": ", 1)[1] for line in lines] == [
        "job.env.WANDB_API_KEY: looks like a secret, and `env` is stored and shown; name it in `job.secrets` instead",
        "tpu.runtime: v2-alpha-tpuv6e is not listed for v4; usual is tpu-ubuntu2204-base",
    ]


@pytest.mark.parametrize(
    ("run", "warned"),
    [
        ("sudo docker run --rm --privileged image python3 train.py", True),
        ("podman container run image", True),
        ("bash docker_run.sh", False),
        ("docker pull image", False),
    ],
)
def test_a_job_in_a_container_is_warned(run: str, warned: bool) -> None:
    assert any("container" in line for line in fleet({"job.run": run}).warnings) is warned


# --- what a wrong file is told -----------------------------------------------------------------------------------


def test_every_problem_is_told_at_once_with_file_line_and_key() -> None:
    text = EXAMPLE.replace("count: 1", "count: 20000\nnotify: true\nzones: x\nprovisoning: spot")
    for right, wrong in (
        ("v3-256", "v3-257"),
        ("europe-west4-a", "europe-west4-q"),
        ("run: bash run.sh", "comand: bash run.sh"),
        ("1h", "90"),
        ("30m", "1.5h"),
        ("delete", "del"),
        ("branch: main", "branch: 1.0\n  branch: 2\n  workdir: ."),
        ("https://", "https://token@"),
        ("[WANDB_API_KEY]", "WANDB_API_KEY"),
    ):
        text = text.replace(right, wrong)
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).split("\n") == [
        "pod.yaml:3: count: must be at most 10000",
        "pod.yaml:4: notify: is not available yet; remove it",
        "pod.yaml:5: zones: unknown key here; zones belongs under tpu",
        "pod.yaml:6: provisoning: unknown key here; provisioning belongs under tpu",
        "pod.yaml:9: tpu.type: v3-257 is not a known accelerator type; nearest: v3-256, v3-128",
        "pod.yaml:11: tpu.zones[0]: europe-west4-q is not listed (`unlisted: true` accepts it); nearest: "
        "europe-west4-b, europe-west4-a",
        "pod.yaml:18: job.run: is missing",
        "pod.yaml:19: job.repository: must hold no credentials, query or fragment; put GIT_TOKEN or GIT_SSH_KEY into "
        "`secrets`",
        'pod.yaml:20: job.branch: must be text; quote it: "1.0"',
        "pod.yaml:21: job.branch: is a duplicate, first on line 20",
        "pod.yaml:22: job.workdir: excludes `repository`; keep one of the two",
        "pod.yaml:24: job.comand: unknown key; nearest: run",
        "pod.yaml:27: job.secrets: must be a list, not text; write [WANDB_API_KEY]",
        "pod.yaml:31: care.unhealthy_after: 90 has no unit; write 90s or 90m",
        "pod.yaml:32: care.stalled_after: 1.5h is not a duration such as 90s, 30m, 1h30m or 2d; write 1h30m rather "
        "than 1.5h",
        "pod.yaml:33: care.on_success: del is not one of delete, keep, restart; nearest: delete",
    ]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("name", None, "name: is missing"),
        ("name", "Pod", "a-z, 0-9 and -"),
        ("name", "a" * 25, "1 to 24"),
        ("name", "pod-3", "must not end in -<digits> or -a<digits>"),
        ("name", "pod-a3", "must not end in -<digits> or -a<digits>"),
        ("name", 123, 'name: must be text; quote it: "123"'),
        ("name", True, 'name: must be text; quote it: "true"'),
        ("name", [], "name: must be text, not a list"),
        ("count", 0, "count: must be at least 1"),
        ("count", "3", "count: must be a whole number, not text"),
        ("count", 1.5, "count: must be a whole number, not a number"),
        ("count", True, "count: must be a whole number, not true or false"),
        ("project", "My Project", "is not a project id"),
        ("project", "123456", "its id"),
        ("tpu", None, "tpu: is missing"),
        ("tpu", "v4-8", "tpu: must be a list, or a mapping, not text"),
        ("tpu", [], "tpu: must not be empty"),
        ("tpu", ["v4-8"], "tpu[0]: must be a mapping (key: value), not text"),
        ("tpu", [SMALL["tpu"]] * 21, "more than 20 entries"),
        ("tpu", [SMALL["tpu"]] * 2, "v4-8 as spot in us-central2-b is listed twice"),
        ("tpu.zone", "us-central2-b", "tpu.zone: unknown key; nearest: zones"),
        ("tpu.spot", True, "tpu.spot: unknown key; nearest: provisioning: spot"),
        ("tpu.accelerator_type", "v4-8", "tpu.accelerator_type: unknown key; nearest: type"),
        ("tpu.type", "v5e-8", "nearest: v5litepod-8"),
        ("tpu.type", "v4-640", "v4-640 is not listed (`unlisted: true` accepts it); nearest: v4-"),
        ("tpu.type", "tpu7x-8", "not served by the Cloud TPU API"),
        ("tpu.zones", "us-central2-b", "tpu.zones: must be a list, not text; write [us-central2-b]"),
        ("tpu.zones", [], "tpu.zones: must not be empty"),
        ("tpu.zones", [1], "tpu.zones[0]: must be a zone's name or a mapping (key: value), not a number"),
        ("tpu.zones", [{}], "tpu.zones[0].zone: is missing"),
        ("tpu.zones", [{"zone": "us-central2-b", "zoone": 1}], "tpu.zones[0].zoone: unknown key; nearest: zone"),
        ("tpu.zones", ["us-central2-b"] * 2, "tpu.zones[1]: v4-8 as spot in us-central2-b is listed twice"),
        ("tpu.zones", ["us-central1-a"], "v4 is not offered in us-central1-a; it is in us-central2-b"),
        ("tpu.zones", ["mars-north1-a"], "mars-north1-a is not listed (`unlisted: true` accepts it)"),
        ("tpu.zones", ["us central"], "is not a zone's name"),
        ("tpu.provisioning", "ondemand", "ondemand is not one of spot, preemptible, on-demand, reserved; nearest"),
        ("tpu.provisioning", ["spot"], "must be one of spot, preemptible, on-demand, reserved, not a list"),
        ("tpu", {"type": "v3-8", "zones": ["europe-west4-a"], "provisioning": "reserved"}, "is not offered as"),
        ("tpu.runtime", "x y", "is not a runtime version"),
        ("tpu.service_account", "me@gmail.com", "is not a service account"),
        ("tpu.network", {"external_ips": "yes"}, "must be true or false; yes is text in YAML 1.2"),
        ("tpu.network", {"external_ips": 1}, "must be true or false, not a number"),
        ("tpu.network", {"external_ip": True}, "tpu.network.external_ip: unknown key; nearest: external_ips"),
        ("tpu.network", {"name": "a b"}, "is not a network"),
        ("tpu.network", {"external_ips": False, "reach": "external"}, "workers have no external address"),
        (
            "tpu",
            {
                **SMALL["tpu"],
                "network": {"reach": "external"},
                "zones": [{"zone": "us-central2-b", "network": {"external_ips": False}}],
            },
            "tpu.zones[0].network.reach: is external",
        ),
        ("tpu.network", {"reach": "iap"}, "iap is not one of external, internal"),
        ("tpu.metadata", {"ssh-keys": "x"}, "ssh-keys is set by tpucare: name people in `tpu.ssh_keys`"),
        ("tpu.metadata", {"enable-oslogin": "TRUE"}, "enable-oslogin is set by tpucare: write `tpu.os_login"),
        ("tpu.metadata", {"a b": "x"}, "is not a key of metadata"),
        ("tpu.metadata", {"a": True}, "must be text or a number; quote what the program expects"),
        ("tpu.metadata", ["a"], "must be a mapping"),
        ("tpu.network", {"subnetwork": "a/b"}, "is not a subnetwork"),
        ("tpu.network", {"tags": ["-x"]}, "tpu.network.tags[0]: -x is not a network tag"),
        ("tpu.ssh_keys", ["ssh-ed25519 AAAA"], "must be USER:KEY"),
        ("tpu.ssh_keys", ["me:ssh-dss AAAA"], "no key of a known type"),
        ("tpu.ssh_keys", ["me:ssh-ed25519 AAAA"], "is not a complete ssh-ed25519 key"),
        ("tpu.ssh_keys", ["me:ssh-ed25519 ????"], "is not a complete ssh-ed25519 key"),
        ("tpu.ssh_keys", ["me:-----BEGIN OPENSSH PRIVATE KEY-----"], "is a private key"),
        ("tpu.ssh_keys", [KEY + "\nroot:" + KEY[3:]], "one line without control characters"),
        ("job", None, "job: is missing"),
        ("job.run", None, "job.run: is missing"),
        ("job.run", "  ", "job.run: must not be empty"),
        ("job.run", "a\0b", "NUL"),
        ("job.run", "x" * 70_000, "longer than 64 KB"),
        ("job.run", ["python", "train.py"], "job.run: must be text, not a list"),
        ("job.run", {"slot": None}, "quote a value that begins with {"),
        ("job.command", "x", "job.command: unknown key; nearest: run"),
        ("job.image", "x", "job.image: is not available yet"),
        ("job.follow", True, "job.follow: needs `repository`"),
        ("job.branch", "main", "job.branch: needs `repository`"),
        ("job.workdir", "~/code", "must not begin with ~"),
        ("job.workdir", " ", "must not be empty"),
        ("job.workdir", "x" * 2000, "longer than 1024"),
        ("job.env", {"A": True}, 'job.env.A: must be text or a number; quote what the program expects: "1" or "true"'),
        ("job.env", {"A": None}, 'quote what the program expects: "" or "0" or "false"'),
        ("job.env", {"A": []}, "job.env.A: must be text or a number"),
        ("job.env", {"A": "x\0"}, "NUL"),
        ("job.env", {"A": "x" * 140_000}, "job.env.A: is longer than 127 KB"),
        ("job.env", {"A-B": "x"}, "A-B is not a name of an environment variable"),
        ("job.env", {"TPUCARE_SLOT": "x"}, "TPUCARE_SLOT is reserved"),
        ("job.env", "A=1", "job.env: must be a mapping (key: value), not text"),
        ("job.secrets", ["A", "A"], "job.secrets[1]: A is listed twice"),
        ("job.secrets", ["a b"], "job.secrets[0]: a b is not a name of an environment variable"),
        ("job.secrets", [1], "job.secrets[0]: must be text"),
        ("job.checkpoint", "ckpt", "must be a URL such as gs://BUCKET/PATH, or an absolute path"),
        ("job.checkpoint", "gs://b/x\ny", "one line"),
        ("job.progress", "step (", "is not a regular expression"),
        ("job.progress", "step", "one group"),
        ("job.progress", "(a)(b)", "it has 2"),
        ("job.progress", r"step (?>(\d+))", "has (?>, which needs Python 3.11"),
        ("job.progress", r"step=*+(\d+)", "has *+, which"),
        ("job.progress", r"\[*+(\d+)", "has *+, which"),
        ("job.progress", r"[]*+]{,2}+(\d+)", "has {,2}+, which"),
        ("job.progress", "(a)" + "b" * 500, "1 to 500 characters"),
        ("job.files", {"../.ssh/authorized_keys": "x"}, "stay below the job's folder"),
        ("job.files", {"/etc/passwd": "x"}, "stay below the job's folder"),
        ("job.files", {"~/x": "x"}, "stay below the job's folder"),
        ("job.files", {"": "x"}, "1 to 255 printable"),
        ("job.files", {".": "x"}, "1 to 255 printable"),
        ("job.files", {"a\nb": "x"}, "1 to 255 printable"),
        ("job.files", {"x" * 256: "x"}, "1 to 255 printable"),
        ("job.files", {".tpucare/lock": "x"}, ".tpucare on the worker"),
        ("job.files", {"a": "../x"}, "must lie in the folder of the fleet file"),
        ("job.files", {"a": "/etc/shadow"}, "must lie in the folder of the fleet file"),
        ("job.files", {"a": "x", "a/b": "y"}, "clashes with a on the worker"),
        ("job.files", {"a": "x", "./a": "y"}, "clashes with"),
        ("job.files", {"a": 1}, 'job.files.a: must be text; quote it: "1"'),
        ("job.files", {str(i): "x" for i in range(101)}, "more than 100 entries"),
        ("placement", "cheapest", "placement: cheapest is not one of worth, ordered"),
        ("value", 0, "value: must be above 0"),
        ("value", "20 $", "value: must be a number of US dollars"),
        ("tpu.price", -1, "tpu.price: must be a number of US dollars, 0 to 1,000,000,000"),
        ("tpu.price", True, "tpu.price: must be a number of US dollars"),
        ("tpu.price", "3 $", "tpu.price: must be a number of US dollars"),
        ("tpu.zones", [{"zone": "us-central2-b", "price": 2e9}], "price: must be a number of US dollars"),
        ("job.cache", "gs://b/c", "job.cache: needs `setup`"),
        ("job.cache", "cache", "must be a URL such as gs://BUCKET/PATH"),
        ("job", {"run": "x", "setup": "y", "cache": "auto"}, "job.cache: is auto, beside the checkpoints, and no"),
        ("job", {"run": "x", "setup": "y", "cache": "s3://b/c"}, "job.cache: s3:// is not supported"),
        ("job", {"run": "x", "setup": "y", "cache": "/c/{slot}"}, "job.cache: has a placeholder"),
        (
            "job",
            {"run": "x", "checkpoint": "/nfs/x", "prefetch": True},
            "job.prefetch: needs a `checkpoint` in a bucket",
        ),
        ("job.cache_paths", ["venv"], "job.cache_paths: needs `cache`"),
        ("job.cache_paths", ["../x"], "../x must stay below the job's folder"),
        ("job.cache_paths", ["/x"], "/x must stay below the job's folder"),
        ("job.cache_paths", ["~/x"], "~/x must stay below the job's folder"),
        ("job.cache_paths", ["x/../../y"], "must stay below the job's folder"),
        ("job.cache_paths", ["."], "must stay below the job's folder"),
        ("job.cache_paths", [".tpucare/x"], ".tpucare/x is not for the cache"),
        ("job.cache_paths", ["a:b"], "a:b is not for the cache"),
        ("job.cache_paths", [], "job.cache_paths"),
        ("care", "x", "care: must be a mapping"),
        ("care.fence", "yes", "yes is not one of wait, proceed"),
        ("care.stopped", "keep", "keep is not one of hold, delete"),
        ("care.crash_budget", -1, "must be at least 0"),
        ("care.save_every", {"max": "30s"}, "care.save_every: `min` (1 min) is above `max` (30 s)"),
        ("care.save_every", {"min": "x", "max": "30s"}, "x is not a duration"),
        ("care.save_every", {"min": "0s"}, "must be longer than 0s"),
        ("care.grace", "-1s", "is not a duration"),
        ("care.grace", "31d", "is longer than 30d"),
        ("care.grace", "", "is not a duration"),
        ("care.grace", True, "must be a duration"),
        ("care.grace", 1.5, "1.5 has no unit; write 1.5s or 1.5m"),
        ("care.boot_timeout", "0s", "must be longer than 0s"),
        ("care.image", "x", "not available yet"),
        ("notify", "x", "notify: is not available yet"),
        ("max_cost", "3", "max_cost: must be a number of US dollars"),
        ("until", "tomorrow", "until: must be an instant such as 2026-12-31T18:00+01:00"),
        ("until", "2026-02-30", "until: must be an instant"),
        ("until", "2026-12-31T18:00 CET", "until: must be an instant"),
        ("until", 2026, "until: must be an instant"),
        ("tpu.image", 3, "tpu.image: is not available yet"),
        ("deadline", {"hours_of_work": 0, "by": "2026-12-31"}, "deadline.hours_of_work: must be a number of hours"),
        ("deadline", {"hours_of_work": 10}, "deadline.by: is missing"),
        ("deadline", {"hours_of_work": 10, "by": "soon"}, "deadline.by: must be an instant"),
        ("xyzzy", 1, "xyzzy: unknown key; known are name, count, project, tpu, max_price, until, "),
        ("nname", 1, "nname: unknown key; nearest: name"),
        ("replicas", 3, "replicas: unknown key; nearest: count"),
        ("tpu.name", "x", "tpu.name: unknown key here; name belongs to the top level"),
    ],
)
def test_a_wrong_value_gets_one_line(key: str, value: object, says: str) -> None:
    found = problems({key: value})
    assert any(says in line for line in found), found
    assert len(found) <= 2, found


@pytest.mark.parametrize(
    "repository",
    [
        "https://token@github.com/me/x",
        "https://me:token@github.com/me/x",
        "https://github.com/me/x?access_token=token",
        "ssh://git:token@github.com/me/x",
        "http://github.com/me/x",
        "git://github.com/me/x",
        "ext::sh -c token",
        "--upload-pack=token",
        "ssh://-oProxyCommand=token/x",
        "ssh://-l@github.com/x",
        "git@github.com:-token",
        "https://github.com",
        "https:///x",
        "file://host/x",
        "file://",
        "https://[token/x",
        "https://github.com:token/x",
        "https://git hub.com/token",
        "./token",
        "https://github.com/\x1btoken",
    ],
)
def test_a_repository_that_leaks_or_tricks_is_refused_without_quoting_it(repository: str) -> None:
    (line,) = problems({"job.repository": repository})
    assert line.startswith("job.repository: ")
    assert "token" not in line


@pytest.mark.parametrize(
    "repository",
    [
        "https://github.com/me/x.git",
        "ssh://git@github.com:2222/me/x",
        "git@github.com:me/x.git",
        "file:///srv/git/x",
        "https://127.0.0.1:8443/x",
    ],
)
def test_a_repository_may_be_https_ssh_or_file(repository: str) -> None:
    assert fleet({"job.repository": repository, "job.branch": "feature/x-1", "job.follow": True}).job.follow
    (line,) = problems({"job.repository": repository, "job.workdir": "."})
    assert line == "job.workdir: excludes `repository`; keep one of the two"


@pytest.mark.parametrize("branch", ["-x", "a..b", "a b", "a.lock", "a/.b", "a@{1}", "a//b", "a/", "", "x" * 251, "a\n"])
def test_a_branch_that_git_would_misread_is_refused(branch: str) -> None:
    (line,) = problems({"job.repository": "https://github.com/me/x", "job.branch": branch})
    assert "is not a branch, tag or commit" in line


def test_a_name_in_env_and_in_secrets_is_refused() -> None:
    (line,) = problems({"job.env": {"A": "x"}, "job.secrets": ["A"]})
    assert line == "job.secrets[0]: A is in `env` too; keep one of the two"


def test_text_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="Unicode"):
        values.text("\ud800")


def test_relative_paths_need_a_folder() -> None:
    assert "needs a folder" in problems({"job.files": {"a": "b"}}, folder=None)[0]
    assert "absolute path" in problems({"job.workdir": "."}, folder=None)[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "pod.yaml:1: is empty"),
        ("- a", "pod.yaml:1: must be a mapping"),
        ("just text", "pod.yaml:1: must be a mapping"),
        ("\n\nname: {slot", "is not YAML"),
        ("name: !!python/object/apply:os.system [true]", "name: the tag"),
        ("on: 1", "on: unknown key"),
        ("<<: {name: pod}", "merge keys"),
        ("name: pod\njob:\ntpu:\n", "pod.yaml:2: job: is empty; it must be a mapping, or removed"),
        ("name:\n", "pod.yaml:1: name: is empty; give it a value or remove the key"),
    ],
)
def test_a_text_that_is_no_fleet_is_told_so(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert says in str(caught.value)


def test_a_file_of_nothing_but_errors_stays_readable_and_quick() -> None:
    text = "\n".join(f"unknown_{i}: x" for i in range(9_000))
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert len(str(caught.value).split("\n")) <= 51
    assert str(caught.value).split("\n") == [problem.render("pod.yaml") for problem in caught.value.problems]
    zones = {"tpu.zones": ["us-central2-c"] * 9_000, "job.secrets": ["A"] * 4_000}
    found = problems(zones)
    assert len(found) == 51
    assert re.fullmatch(r"and \d+ more", found[-1])


def test_hostile_text_is_not_painted_on_the_terminal() -> None:
    for text in ('"\\e[31mname": x', 'name: "\\e[31m\\n"', 'tpu: {type: "\\e]0;", zones: ["\\e"]}', "? [\u202e]\n: x"):
        with pytest.raises(ConfigError) as caught:
            read(text)
        assert all(line.isprintable() for line in str(caught.value).split("\n"))


# --- files -------------------------------------------------------------------------------------------------------


def test_local_files_are_read_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"lr: 1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b"x" * (fleet_files.FILE_LIMIT_BYTES + 10))
    job = fleet({"job.files": {"a/b": "./config.yaml"}}, folder=tmp_path, read_file=read_local).slot(0).job
    assert job is not None
    assert job.files == {"a/b": b"lr: 1"}
    wrong = {"a": "missing", "b": "folder", "c": "large"}
    assert problems({"job.files": wrong}, folder=tmp_path, read_file=read_local) == [
        "job.files.a: missing cannot be read: No such file or directory",
        "job.files.b: folder cannot be read: no regular file",
        "job.files.c: large is larger than 1 MB; keep it in a bucket",
    ]


def test_the_text_of_a_file_is_utf8_or_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: p\xc3\xb6d\n")
    assert read_text(path) == "name: pöd\n"
    path.write_bytes(b"name: pod\nproject: \xff\n")
    with pytest.raises(ConfigError, match=r"pod\.yaml:2: is not UTF-8"):
        read_text(path)
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_text(wrong)


def test_all_files_together_are_bounded() -> None:
    files = {f"f{i}": f"f{i}" for i in range(20)}
    found = problems({"job.files": files}, read_file=lambda folder, path: b"x" * fleet_files.FILE_LIMIT_BYTES)
    assert "all files together are larger than 16 MB" in found[0]


def test_a_file_is_read_once_for_all_slots() -> None:
    asked: list[Path] = []

    def read_file(folder: Path, path: str) -> bytes:
        asked.append(folder / path)
        return b"x"

    slots = fleet({"count": 50, "job.files": {"{slot}": "one", "b": "one"}}, read_file=read_file).slots()
    assert asked == [FOLDER / "one"]
    assert slots[7].job is not None
    assert slots[7].job.files == {"pod-7": b"x", "b": b"x"}


def test_a_file_per_slot_is_bounded_before_any_is_read() -> None:
    """2 KB of text had a million files opened on the thread of the loop, each miss kept as text."""
    files = {f"f{i}": f"{{slot}}/{i}" for i in range(11)}
    (found,) = problems({"count": 1000, "job.files": files}, read_file=lambda folder, path: pytest.fail(path))
    assert found == "job.files: names 11000 files for 1000 slots, more than 10000; send a folder with `workdir`"


def test_files_that_are_missing_are_looked_for_only_until_a_person_has_enough() -> None:
    asked: list[str] = []

    def missing(folder: Path, path: str) -> bytes:
        asked.append(path)
        raise FileNotFoundError(2, "No such file or directory")

    found = problems({"count": 9000, "job.files": {"a": "{slot}"}}, read_file=missing)
    assert len(asked) == len(found) == PROBLEMS_LIMIT + 1
    assert "and 1 more" in found[-1]


def test_texts_that_name_their_slot_are_bounded_over_all_slots() -> None:
    changes = {"job.run": "{slot} " + "x" * 30_000, "job.env": {"A": "x" * 100_000}}
    assert len(fleet({**changes, "count": 1000}).slots()) == 1000
    (found,) = problems({**changes, "count": 2000})
    assert found.startswith("job: `run` and `env` with {slot} are 57 MB for 2000 slots, more than 32 MB")


def test_a_surplus_slot_whose_file_was_not_read_says_so() -> None:
    declared = fleet({"count": 2, "job.files": {"a": "{slot}.yaml"}})
    with pytest.raises(ConfigError, match=r"pod-2\.yaml was not read for slot pod-2"):
        declared.slot(2)


# --- every input -------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *("name", "count", "project", "tpu", "type", "zones", "zone", "provisioning", "network", "ssh_keys", "job"),
        *("run", "env", "files", "secrets", "workdir", "repository", "branch", "follow", "care", "grace", "fence"),
        *("pod", "v4-8", "us-central2-b", "spot", "1h", "https://x/y", "gs://b/x", "{slot}", "../x", "on", "tags"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=20) | st.dates()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=8) | SCALARS, inner, max_size=4)
    ),
    max_leaves=12,
)


def paths(value: object, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, child in children for path in paths(child, (*here, key)))]


def with_value(document: Any, path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    copied = dict(document) if isinstance(document, dict) else list(document)
    copied[path[0]] = with_value(document[path[0]], path[1:], value)  # type: ignore[index]
    return copied


def refused_or_usable(text: str) -> None:
    try:
        declared = read(text, default_project="some-project")
    except ConfigError as refused:
        for line in str(refused).split("\n"):
            assert re.match(r"pod\.yaml:\d+: .", line)
            assert line.isprintable()
            assert len(line) < 600
    else:
        for slot in map(declared.slot, range(min(declared.count, 3))):
            assert slot.job
            assert "\0" not in slot.job.run + slot.job.checkpoint + "".join(slot.job.env.values())


@settings(max_examples=100)
@given(VALUES)
def test_any_document_is_a_fleet_or_a_config_error(value: object) -> None:
    refused_or_usable(yaml.safe_dump(value, allow_unicode=True))


@settings(max_examples=100)
@given(st.data())
def test_a_fleet_with_one_value_replaced_is_a_fleet_or_a_config_error(data: st.DataObject) -> None:
    document = yaml.safe_load(EXAMPLE)
    path = data.draw(st.sampled_from(paths(document)))
    refused_or_usable(yaml.safe_dump(with_value(document, path, data.draw(VALUES)), allow_unicode=True))


@settings(max_examples=100)
@given(st.data())
def test_a_fleet_with_a_piece_of_text_inserted_is_a_fleet_or_a_config_error(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(EXAMPLE)))
    piece = data.draw(
        st.text(max_size=6) | st.sampled_from(["&a ", "*a", "[", "}", "\t", "- ", ": ", "\0", "!!int ", "\n"])
    )
    refused_or_usable(EXAMPLE[:place] + piece + EXAMPLE[place + data.draw(st.integers(0, 5)) :])


ONE_LINE = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=30)
SCRIPTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60).map("x".__add__)
DURATIONS = st.integers(1, 86_400)


@st.composite
def valid_fleets(draw: st.DrawFn) -> dict[str, Any]:
    type = draw(st.sampled_from(accelerators.known_types()))
    zones = draw(
        st.lists(st.sampled_from([offer.zone for offer in accelerators.zones_for(type)]), min_size=1, unique=True)
    )
    return {
        "name": draw(st.from_regex(r"[a-z][a-z0-9]{0,23}", fullmatch=True)),
        "count": draw(st.integers(1, 5)),
        "project": "my-project",
        "tpu": {
            "type": type,
            "zones": zones,
            "provisioning": draw(st.sampled_from(["spot", "preemptible", "on-demand"])),
        },
        "job": {
            "run": draw(SCRIPTS),
            "env": draw(st.dictionaries(st.from_regex(r"[A-S_][A-Z0-9_]{0,9}", fullmatch=True), SCRIPTS, max_size=3)),
            "files": {"conf": "./" + draw(st.from_regex(r"[a-z]{1,9}", fullmatch=True))},
            "checkpoint": "gs://bucket/{slot}/" + draw(ONE_LINE).replace("{", ""),
        },
        "care": {"grace": f"{draw(DURATIONS)}s", "on_success": draw(st.sampled_from(["delete", "keep", "restart"]))},
    }


def _expanded(name: str, text: str) -> str:
    return text.replace("{slot}", name)


@settings(max_examples=100)
@given(valid_fleets())
def test_what_a_person_writes_arrives_in_every_slot(written: dict[str, Any]) -> None:
    slots = read(yaml.safe_dump(written)).slots()
    assert len(slots) == written["count"]
    for index, slot in enumerate(slots):
        expand = partial(_expanded, slot.name)
        assert slot.name == f"{written['name']}-{index}"
        assert [place.zone for place in slot.places] == written["tpu"]["zones"]
        assert {place.accelerator_type for place in slot.places} == {written["tpu"]["type"]}
        assert {place.provisioning.value for place in slot.places} == {written["tpu"]["provisioning"]}
        assert slot.workers == accelerators.lookup(written["tpu"]["type"]).hosts
        assert slot.job is not None
        assert slot.job.run == expand(written["job"]["run"])
        assert slot.job.env == {key: expand(value) for key, value in written["job"]["env"].items()}
        assert slot.job.checkpoint == expand(written["job"]["checkpoint"])
        assert slot.care.grace == timedelta(seconds=int(written["care"]["grace"][:-1]))
        assert slot.care.on_success.value == written["care"]["on_success"]


# --- schema, page and ready fleets -------------------------------------------------------------------------------


def test_the_schema_for_editors_knows_every_key_and_suggests_types_and_zones() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    defined = {"FleetFile": schema, **schema["$defs"]}
    for model in SECTIONS.values():
        section = defined[model.__name__]
        assert set(section["properties"]) == set(model.model_fields)
        assert section["additionalProperties"] is False
        assert all("description" in prop for prop in section["properties"].values())
    assert "v4-8" in defined["TpuSection"]["properties"]["type"]["anyOf"][0]["enum"]
    assert "us-central2-b" in defined["ZoneSection"]["properties"]["zone"]["anyOf"][0]["enum"]
    grace = defined["CareSection"]["properties"]["grace"]
    assert (grace["type"], grace["default"]) == ("string", "30s")
    assert re.fullmatch(grace["pattern"], "1h30m")


def test_the_reference_page_is_what_the_models_say() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "gen_fleet.py"))
    page = generator["page"]()
    assert generator["TARGET"].read_text(encoding="utf-8") == page, "stale: run python docs/gen_fleet.py"
    (example,) = re.findall(r"## An example\n\n```yaml\n(.*?)```", page, re.DOTALL)
    assert not read(example).warnings
    wrong = "name: pod\ntpu:\n  type: v5e-8\n\n  zones:\n    - us-central2-b\n\njob:\n  comand: bash run.sh\n"
    with pytest.raises(ConfigError) as caught:
        read(wrong, file="big-pod.yaml")
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert set(shown.splitlines()) <= set(str(caught.value).split("\n"))


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@settings(max_examples=400)
@given(st.lists(st.sampled_from(["(?>", "(?:", "(?#", *"a[]^*+?{}1,)\\|"]), max_size=12).map("".join))
def test_a_pattern_is_refused_for_new_syntax_just_when_it_has_some(pattern: str) -> None:
    pattern += r"(\d)"
    try:
        operations = str(sre.parse(pattern))
    except (re.error, OverflowError):
        return
    is_new = "ATOMIC_GROUP" in operations or "POSSESSIVE_REPEAT" in operations
    said = ""
    try:
        values.progress(pattern)
    except ValueError as error:
        said = str(error)
    assert ("3.11" in said) == is_new


@pytest.mark.parametrize("path", sorted((ROOT / "templates" / "fleets").glob("*.yaml")), ids=lambda path: path.name)
def test_templates_call_programs_that_images_have(path: Path) -> None:
    """Ubuntu 22.04 has `python3` and no `python`; `pip` there may belong to another Python than `python3`."""
    job = yaml.safe_load(path.read_text())["job"]
    words = f"{job.get('setup', '')} {job.get('run', '')}".split()
    assert "python" not in words
    assert all(before == "-m" for before, word in pairwise(["", *words]) if word == "pip")


@pytest.mark.parametrize("path", sorted((ROOT / "templates" / "fleets").glob("*.yaml")), ids=lambda path: path.name)
def test_a_ready_fleet_is_right_as_it_is(path: Path) -> None:
    declared = read(path.read_text(encoding="utf-8"), default_project="my-project")
    assert declared.slots()
    assert declared.warnings == ()


def test_there_are_ready_fleets() -> None:
    assert len(list((ROOT / "templates" / "fleets").glob("*.yaml"))) >= 5


@pytest.mark.parametrize(
    ("kind", "zone", "runtime", "problem"),
    [
        ("v5p-8", "us-east5-a", "tpu-ubuntu2204-base", "not listed for v5p; usual is v2-alpha-tpuv5"),
        ("v5litepod-8", "us-west4-a", "v2-alpha-tpuv6e", "not listed for v5e; usual is v2-alpha-tpuv5-lite"),
        ("v6e-8", "us-east1-d", "tpu-vm-base", "not listed for v6e; usual is v2-alpha-tpuv6e"),
        ("v4-32", "us-central2-b", "tpu-vm-tf-2.17.0-pod", "write tpu-vm-tf-2.17.0-pod-pjrt"),
    ],
)
def test_a_runtime_on_which_no_run_finds_its_chips_is_refused(kind: str, zone: str, runtime: str, problem: str) -> None:
    """Each node of it was made, billed, found dirty and made again."""
    text = f"name: pod\ntpu: {{type: {kind}, zones: [{zone}], runtime: {runtime}}}\njob: {{run: x}}\n"
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse(text, file="pod.yaml")
    assert problem in parse(text, file="pod.yaml", accepted=True).warnings[0], "a fleet that was accepted goes on"
    if "tf" not in runtime:
        new = text.replace("runtime:", "unlisted: true, runtime:")
        assert problem in parse(new, file="pod.yaml").warnings[0]


ACCOUNT = "trainer@my-project.iam.gserviceaccount.com"


@pytest.mark.parametrize(
    ("count", "tpu", "said"),
    [
        (1, "type: v4-64, zones: [us-central2-b]", []),
        (2, "type: v4-64, zones: [us-central2-b]", ["16 hosts with external addresses", "16 hosts in all"]),
        (9, "type: v2-8, zones: [us-central1-b]", ["9 hosts with external addresses may be in us-central1"]),
        (9, "type: v2-8, zones: [us-central1-b], network: {external_ips: false}", []),
        (16, "type: v2-8, zones: [us-central1-b], network: {external_ips: false}", ["16 hosts in all"]),
    ],
)
def test_what_a_fresh_project_has_no_quota_for_is_said_before(count: int, tpu: str, said: list[str]) -> None:
    job = "job: {run: x}\n"
    fleet = parse(
        f"name: pod\ncount: {count}\nproject: my-project\ntpu: {{service_account: {ACCOUNT}, {tpu}}}\n{job}",
        file="pod.yaml",
    )
    lines = warnings_of([fleet])
    assert [part in line for part, line in zip(said, lines, strict=True)] == [True] * len(said)
    assert all("https://console.cloud.google.com/iam-admin/quotas" in line for line in lines)


def test_fleets_of_one_project_share_its_quotas_and_nodes_without_an_account_are_told_of() -> None:
    text = "name: pod-{}\ncount: 5\nproject: my-project\ntpu: {{type: v2-8, zones: [us-central1-b]}}\njob: {{run: x}}\n"
    lines = warnings_of([parse(text.format(index), file=f"{index}.yaml") for index in "ab"])
    assert [line.partition(":")[0] for line in lines] == ["a.yaml", "b.yaml", "project my-project"]
    assert "service_account: is not set" in lines[0]
    assert "10 hosts" in lines[2]


@pytest.mark.parametrize(
    ("checkpoint", "problem"),
    [
        ("s3://bucket/x", "s3:// is not supported; write gs://BUCKET/PATH, or an absolute path that all nodes share"),
        ("gs://bucket/{job}", "{job} is not a placeholder; {slot} is the only one"),
        ("gs://bucket/{slot}/{step}", "{step} is not a placeholder; {slot} is the only one"),
        ("gs://bucket/{slot}", ""),
        ("/mnt/all/{slot}", ""),
    ],
)
def test_a_checkpoint_that_nobody_would_find_is_refused(checkpoint: str, problem: str) -> None:
    text = f"name: pod\ntpu: {{type: v4-8, zones: [us-central2-b]}}\njob: {{run: x, checkpoint: '{checkpoint}'}}\n"
    accepted = parse(text, file="pod.yaml", accepted=True)
    if not problem:
        assert parse(text, file="pod.yaml").warnings == accepted.warnings == ()
        return
    with pytest.raises(ConfigError) as refused:
        parse(text, file="pod.yaml")
    assert str(refused.value) == f"pod.yaml:3: job.checkpoint: {problem}"
    assert len(accepted.warnings) == 1, "a fleet that an older version accepted goes on"


@pytest.mark.parametrize(
    ("checkpoint", "count", "want"),
    [
        ("gs://b/run", 1, "gs://b/run.environments"),
        ("gs://b/run/", 4, "gs://b/run.environments"),
        ("gs://b", 1, "gs://b/environments"),
        ("gs://b/x/{slot}/y", 4, "gs://b/x.environments"),
        ("gs://b/pod-{slot}", 4, "gs://b/environments"),
        ("/nfs/{slot}", 4, "/nfs.environments"),
        ("/{slot}", 4, "/environments"),
    ],
)
def test_the_automatic_cache_is_beside_the_checkpoints_of_all_slots(checkpoint: str, count: int, want: str) -> None:
    """Slots with caches of their own would each make the environment once more."""
    one = fleet({"count": count, "job.setup": "true", "job.cache": "auto", "job.checkpoint": checkpoint})
    caches = {slot.job.cache for slot in one.slots() if slot.job is not None}
    assert caches == {want}
