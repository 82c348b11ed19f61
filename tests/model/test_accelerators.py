"""The catalogue agrees with itself, and answers a wrong word with a right one."""

from __future__ import annotations

import subprocess
import sys
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucare.model import accelerators
from tpucare.model.errors import ConfigError
from tpucare.model.resources import Provisioning
from tpucare.model.text import hint, nearest, shown


@pytest.mark.parametrize(
    ("type", "hosts", "chips", "cores", "runtime"),
    [
        ("v3-32", 4, 16, 32, "tpu-ubuntu2204-base"),
        ("v4-32", 4, 16, 32, "tpu-ubuntu2204-base"),
        ("v5p-32", 4, 16, 32, "v2-alpha-tpuv5"),
        ("v5litepod-32", 8, 32, 32, "v2-alpha-tpuv5-lite"),
        ("v6e-32", 8, 32, 32, "v2-alpha-tpuv6e"),
        ("v5litepod-8", 1, 8, 8, "v2-alpha-tpuv5-lite"),
        ("v6e-8", 1, 8, 8, "v2-alpha-tpuv6e"),
    ],
)
def test_a_type_says_what_it_is_made_of(type: str, hosts: int, chips: int, cores: int, runtime: str) -> None:
    found = accelerators.lookup(type)
    assert (found.hosts, found.chips, found.cores) == (hosts, chips, cores)
    assert found.default_runtime == runtime
    assert found.runtimes


@pytest.mark.parametrize("type", accelerators.known_types())
def test_every_size_agrees_with_its_name_and_topology(type: str) -> None:
    found = accelerators.lookup(type)
    count = int(type.rpartition("-")[2])
    assert found.hosts * found.chips_per_host == found.chips
    assert prod(int(side) for side in found.topology.split("x")) == found.chips
    assert count in (found.cores, found.chips)
    assert accelerators.zones_for(type)
    assert Provisioning.SPOT in found.provisionings
    assert accelerators.derive(type) is found


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("v4-33", "v4-32"),
        ("V4-32", "v4-32"),
        ("v4_32", "v4-32"),
        ("tpu-v4-32", "v4-32"),
        ("v5e-32", "v5litepod-32"),
        ("v5lite-16", "v5litepod-16"),
        ("v6-8", "v6e-8"),
        ("v5litepod-9", "v5litepod-8"),
        ("v8-32", "v4-32"),
        ("v2-8x", "v2-8"),
    ],
)
def test_an_unknown_type_is_answered_with_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match="nearest") as caught:
        accelerators.lookup(wrong)
    assert right in str(caught.value)


def test_a_word_that_resembles_nothing_gets_no_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        accelerators.lookup("?" * 500)
    assert "nearest" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("ask", [accelerators.lookup, accelerators.derive, accelerators.zones_for])
def test_a_generation_that_the_api_does_not_serve_is_refused(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(ConfigError, match="not served by the Cloud TPU API"):
        ask("tpu7x-8")
    assert not any(type.startswith("tpu7x") for type in accelerators.known_types())


def test_the_size_of_an_unlisted_slice_follows_from_its_name() -> None:
    derived = accelerators.derive("v4-640")
    assert (derived.chips, derived.hosts, derived.topology) == (320, 80, "")
    assert accelerators.derive("v6e-512").hosts == 128


@pytest.mark.parametrize("type", ["v4-33", "v4-0", "v4-4", "v4-08", "v9-8", "v4", "", "v4-9999999"])
def test_a_name_that_makes_no_whole_hosts_is_refused(type: str) -> None:
    with pytest.raises(ConfigError):
        accelerators.derive(type)


def test_zones_come_with_their_mark_and_the_types_they_list() -> None:
    offers = {offer.zone: offer for offer in accelerators.zones_for("v3-256")}
    assert offers["europe-west4-a"].mark == "D"
    assert offers["us-central1-a"].only == ("v3-8",)
    assert accelerators.zones_for("v3-256")[0].zone == "europe-west4-a"
    assert accelerators.offer("v4-8", "us-central2-b") is not None
    assert accelerators.offer("v4-8", "us-central1-a") is None
    assert "us-central2-b" in accelerators.known_zones()
    assert "us-central1-ai1a" not in accelerators.known_zones()  # only tpu7x was seen there
    assert {size.generation for size in accelerators.types_in("us-central2-b")} == {"v4"}
    assert accelerators.types_in("nowhere-1-a") == ()
    assert accelerators.region_of("us-central2-b") == "us-central2"


@pytest.mark.parametrize(
    ("type", "zone", "tier", "usd"),
    [
        ("v4-32", "us-central2-b", Provisioning.ON_DEMAND, 3.22),
        ("v4-32", "us-central2-b", Provisioning.SPOT, 0.9215),
        ("v4-32", "us-central2-b", Provisioning.PREEMPTIBLE, 0.9215),
        ("v4-32", "us-central2-b", Provisioning.RESERVED, None),
        ("v3-8", "europe-west4-a", Provisioning.ON_DEMAND, 2.2),  # the zone's own row is for pods
        ("v3-32", "europe-west4-a", Provisioning.SPOT, 0.66),
        ("v2-8", "us-central1-b", Provisioning.SPOT, 0.3375),
        ("v2-32", "europe-west4-a", Provisioning.SPOT, None),
        ("v6e-8", "southamerica-west1-a", Provisioning.SPOT, None),
        ("v6e-8", "southamerica-west1-a", Provisioning.ON_DEMAND, 2.7),
    ],
)
def test_a_chip_hour_costs_what_the_nearest_row_says(
    type: str, zone: str, tier: Provisioning, usd: float | None
) -> None:
    price = accelerators.chip_hour_price(type, zone, tier)
    assert (price.usd_per_chip_hour if price else None) == usd
    assert price is None or (price.source and price.date)


@settings(max_examples=100)
@given(st.text() | st.from_regex(r"(v[2-6]|v5p|v6e|v5litepod|tpu7x)-[0-9]{1,8}", fullmatch=True))
def test_any_word_is_a_type_or_a_config_error(word: str) -> None:
    for ask in (accelerators.lookup, accelerators.derive):
        try:
            found = ask(word)
        except ConfigError as error:
            line = str(error)
            assert line.isprintable()
        else:
            assert found.type == word
            assert found.hosts * found.chips_per_host == found.chips


def test_importing_the_module_reads_no_catalogue_and_no_yaml() -> None:
    code = (
        "import sys, tpucare.model.accelerators as a; print(a._catalogue.cache_info().currsize, 'yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "False"]


def test_words_are_shown_safely_and_answered_with_the_nearest() -> None:
    assert nearest("comand", ["command", "run", "setup"]) == ("command",)
    assert nearest("ON_DEMAND", ["on-demand", "spot"]) == ("on-demand",)
    assert hint("zzz", ["run"]) == ""
    assert hint("rum", ["run"]) == "; nearest: run"
    assert shown("a\x1b[31m\nb") == "a\\x1b[31m\\nb"
    assert shown("") == "''"
    assert len(shown("x" * 1000)) == 60
    assert shown(["x"]) == "['x']"
