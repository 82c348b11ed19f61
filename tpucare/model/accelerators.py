"""
The catalogue of Cloud TPU accelerators: the shape of a "v4-32", its zones and its price.

Data and sources are in `accelerators.yaml`, read on the first call, since `tpucare --help` and most of a daemon's life
need none of it. Capacity of a zone and quota of a project are known to the API alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from tpucare.model.errors import ConfigError
from tpucare.model.resources import Provisioning
from tpucare.model.text import naming, nearest, shown

_TYPE = re.compile(r"(?P<prefix>[a-z0-9]+)-(?P<count>[1-9][0-9]{0,5})")

# gcloud's and people's names of v5e, which the API calls v5litepod.
_OTHER_PREFIXES = {"v5e": "v5litepod", "v5lite": "v5litepod", "v6": "v6e", "v7x": "tpu7x"}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """
    One accelerator type, i.e. one shape of slice.

    `hosts` is the number of workers of a node; `topology` is "" for a size that the catalogue does not list.
    """

    type: str
    generation: str
    chips: int
    hosts: int
    chips_per_host: int
    cores_per_chip: int
    topology: str
    default_runtime: str
    runtimes: tuple[str, ...]
    provisionings: tuple[Provisioning, ...]

    @property
    def cores(self) -> int:
        return self.chips * self.cores_per_chip


@dataclass(frozen=True, slots=True)
class ZoneOffer:
    """
    A zone in which a generation was seen. `mark`: D documented, O observed, I derived.

    `only` names the types listed there, when the sources do not list the whole generation.
    """

    zone: str
    mark: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Price:
    """USD per chip-hour as a public catalogue gave it on `date`; spot prices move."""

    usd_per_chip_hour: float
    location: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class _PriceRow:
    location: str
    applies_to: str
    on_demand: float | None
    spot: float | None
    source: str
    date: str

    def covers(self, accelerator: Accelerator) -> bool:
        if self.applies_to == "all":
            return True
        if self.applies_to.endswith("-pods"):
            return accelerator.hosts > 1
        return self.applies_to == accelerator.type


@dataclass(frozen=True, slots=True)
class _Generation:
    name: str
    counts_cores: bool
    served: bool
    status: str
    sizes: tuple[Accelerator, ...]
    zones: tuple[ZoneOffer, ...]
    prices: tuple[_PriceRow, ...]


def lookup(type: str) -> Accelerator:
    """
    The accelerator that the catalogue lists under *type*, e.g. "v4-32".

    Raises:
        ConfigError: Not listed, or not served by the Cloud TPU API; names the nearest listed types.
    """
    if found := _types().get(type):
        return found
    _generation_of(type)  # Raises for a generation that the API does not serve.
    raise ConfigError(f"{shown(type)} is not a known accelerator type{naming(nearest_types(type))}")


def derive(type: str) -> Accelerator:
    """
    As `lookup`, but for any size of a known generation: hosts follow from the name, the topology stays unknown.

    Raises:
        ConfigError: Not `<known generation>-<count>`, or a count that fills no whole number of hosts.
    """
    if listed := _types().get(type):
        return listed
    generation = _generation_of(type)
    if generation is None:
        raise ConfigError(f"{shown(type)} names no known accelerator generation{naming(nearest_types(type))}")
    like = generation.sizes[-1]
    chips, rest = divmod(_count(type), like.cores_per_chip if generation.counts_cores else 1)
    hosts, left = divmod(chips, like.chips_per_host)
    if rest or left or not hosts:
        raise ConfigError(
            f"{type} is no whole number of hosts of {like.chips_per_host} chips{naming(nearest_types(type))}"
        )
    return replace(like, type=type, chips=chips, hosts=hosts, topology="")


def known_types() -> tuple[str, ...]:
    """Every type that the Cloud TPU API serves and the catalogue lists, by generation and size."""
    return tuple(_types())


def nearest_types(type: str) -> tuple[str, ...]:
    """Up to three listed types most similar to *type*: the nearest sizes of its generation first."""
    match = _TYPE.fullmatch(type.lower().strip().replace("_", "-").removeprefix("tpu-"))
    prefix = _OTHER_PREFIXES.get(match["prefix"], match["prefix"]) if match else ""
    generation = _catalogue().get(prefix)
    if match is None or generation is None or not generation.served:
        return nearest(type, known_types(), at_most=3)
    wanted = int(match["count"])
    sizes = sorted(generation.sizes, key=lambda size: abs(_count(size.type) - wanted))
    if _count(sizes[0].type) == wanted:
        return (sizes[0].type,)
    return tuple(size.type for size in sizes[:2])


def known_zones() -> tuple[str, ...]:
    """Every zone in which some generation that the API serves was seen, sorted."""
    return tuple(sorted({offer.zone for generation in _served() for offer in generation.zones}))


def zones_for(type: str) -> tuple[ZoneOffer, ...]:
    """
    Zones in which the generation of *type* was seen, documented ones first; those that list other types only are last.

    Raises:
        ConfigError: No type of a generation that the API serves.
    """
    generation = _served_generation(derive(type).generation)
    return tuple(sorted(generation.zones, key=lambda offer: (bool(offer.only) and type not in offer.only, offer.mark)))


def offer(type: str, zone: str) -> ZoneOffer | None:
    """The offer of *zone* for the generation of *type*; None: never seen there. Raises: ConfigError, as `zones_for`."""
    return next((offer for offer in zones_for(type) if offer.zone == zone), None)


def types_in(zone: str) -> tuple[Accelerator, ...]:
    """Every listed type whose generation was seen in *zone*."""
    offered = [generation for generation in _served() if any(offer.zone == zone for offer in generation.zones)]
    return tuple(size for generation in offered for size in generation.sizes)


def region_of(zone: str) -> str:
    """`us-central2` of `us-central2-b`."""
    return zone.rpartition("-")[0]


def chip_hour_price(type: str, zone: str, provisioning: Provisioning) -> Price | None:
    """
    USD per hour of one chip of *type* in *zone*; None where no source has a price.

    A price of the zone goes before one of its region, a newer source before an older one. Preemptible nodes cost as
    spot; reservations have contracts of their own, so None. Raises: ConfigError, as `zones_for`.
    """
    if provisioning is Provisioning.RESERVED:
        return None
    accelerator = derive(type)
    rows = [row for row in _served_generation(accelerator.generation).prices if row.covers(accelerator)]
    for location in (zone, region_of(zone)):
        for row in rows:
            usd = row.on_demand if provisioning is Provisioning.ON_DEMAND else row.spot
            if row.location == location and usd is not None:
                return Price(usd, row.location, row.source, row.date)
    return None


def node_hour_price(type: str, zone: str, provisioning: Provisioning) -> float | None:
    """USD per hour of a whole node, by `chip_hour_price`."""
    price = chip_hour_price(type, zone, provisioning)
    return None if price is None else price.usd_per_chip_hour * derive(type).chips


# --- reading the catalogue ---------------------------------------------------------------------------------------


@functools.cache
def _catalogue() -> Mapping[str, _Generation]:
    """Every generation by the prefix of its types: `v5litepod` of `v5litepod-32`."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (resources.files("tpucare.model") / "accelerators.yaml").read_text(encoding="utf-8")
    entries = yaml.load(text, Loader=loader)["generations"]
    return {entry["name_prefix"]: _read_generation(name, entry) for name, entry in entries.items()}


def _read_generation(name: str, entry: dict[str, Any]) -> _Generation:
    return _Generation(
        name=name,
        counts_cores=entry["name_counts"] == "cores",
        served=entry["api_enum"] is not None,
        status=entry["status"],
        sizes=tuple(_read_size(name, entry, size) for size in entry["sizes"]),
        zones=tuple(ZoneOffer(zone["zone"], zone["mark"], tuple(zone.get("only", ()))) for zone in entry["zones"]),
        prices=tuple(_PriceRow(**row) for row in entry["prices"]),
    )


def _read_size(name: str, entry: dict[str, Any], size: dict[str, Any]) -> Accelerator:
    offered = {word.replace("_", "-") for word in entry["provisioning"]}
    return Accelerator(
        type=size["type"],
        generation=name,
        chips=size["chips"],
        hosts=size["hosts"],
        chips_per_host=size["chips_per_host"],
        cores_per_chip=entry["cores_per_chip"],
        topology=size["topology"],
        default_runtime=entry["default_runtime"] or "",
        runtimes=tuple(entry["runtimes"]),
        provisionings=tuple(tier for tier in Provisioning if tier.value in offered),
    )


@functools.cache
def _types() -> Mapping[str, Accelerator]:
    return {size.type: size for generation in _served() for size in generation.sizes}


def _served() -> tuple[_Generation, ...]:
    return tuple(generation for generation in _catalogue().values() if generation.served)


def _served_generation(name: str) -> _Generation:
    return next(generation for generation in _served() if generation.name == name)


def _generation_of(type: str) -> _Generation | None:
    """The generation that *type* names. Raises: ConfigError: the API does not serve it."""
    match = _TYPE.fullmatch(type)
    generation = _catalogue().get(match["prefix"]) if match else None
    if generation is not None and not generation.served:
        raise ConfigError(f"{generation.name} is {generation.status}")
    return generation


def _count(type: str) -> int:
    return int(type.rpartition("-")[2])
