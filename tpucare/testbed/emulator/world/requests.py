"""Checks of requests, which the service refuses in the call: arguments, permissions, types, labels."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace

from tpucare.model import accelerators
from tpucare.model.accelerators import Accelerator
from tpucare.model.errors import ConfigError
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.config import WorldConfig, ZoneConfig
from tpucare.testbed.emulator.world.records import AcceleratorConfig, NodeSpec

ANY_TYPE = "*"
DESCRIPTION_LIMIT = 512
LABELS_LIMIT = 64

_NODE_ID = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_QUEUED_ID = _NODE_ID
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")

GENERATION_NUMBERS: Mapping[int, str] = {2: "v2", 4: "v3", 7: "v4", 9: "v5e", 10: "v5p", 11: "v6e"}
"""`AcceleratorConfig.Type` of Cloud TPU API v2 -> generation of the catalogue."""


def check_spec(zone: str, node_id: str, spec: NodeSpec, config: WorldConfig) -> tuple[NodeSpec, Accelerator]:
    """
    The request as the service keeps it (the type filled in), and the accelerator that it asks for.

    Raises: ApiError: 3 for a malformed or unknown value, 7 for one that this project may not use.
    """
    settings = config.zones[zone]
    if not _NODE_ID.fullmatch(node_id):
        raise texts.bad_argument(f'Invalid node id "{node_id}".')
    _check_words(spec)
    if not settings.supported:
        raise texts.unsupported_zone(zone)
    accelerator = resolve_accelerator(zone, spec, settings)
    if not _has_runtime(spec.runtime_version, accelerator, settings):
        raise texts.unknown_runtime(spec.runtime_version, accelerator.type, zone)
    _check_access(zone, spec, accelerator, config)
    return replace(spec, accelerator_type=accelerator.type), accelerator


def check_queued_id(queued_id: str) -> None:
    """Raises: ApiError (3). The allowed form is not published; this is the one for nodes."""
    if not _QUEUED_ID.fullmatch(queued_id):
        raise texts.bad_argument(f'Invalid queued resource id "{queued_id}".')


def _check_words(spec: NodeSpec) -> None:
    if not spec.runtime_version:
        raise texts.bad_argument("Field runtime_version is required.")
    if sum((spec.preemptible, spec.spot, spec.reserved)) > 1:
        raise texts.bad_argument("At most one of preemptible, spot and reserved may be set in scheduling_config.")
    if spec.networks and spec.has_network:
        raise texts.bad_argument("At most one of network_config and network_configs may be set.")
    check_changeable(spec)


def check_changeable(spec: NodeSpec) -> None:
    """Check the fields that an update may change too. Raises: ApiError (3)."""
    if len(spec.description) > DESCRIPTION_LIMIT:
        raise texts.bad_argument(f"The description is longer than {DESCRIPTION_LIMIT} characters.")
    if len(spec.labels) > LABELS_LIMIT:
        raise texts.bad_argument(f"More than {LABELS_LIMIT} labels.")
    for key, value in spec.labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise texts.bad_argument(f'Invalid label "{key}": "{value}".')


def _check_access(zone: str, spec: NodeSpec, accelerator: Accelerator, config: WorldConfig) -> None:
    if config.access.free_trial:
        raise texts.free_trial()
    if accelerator.type in config.zones[zone].denied_types:
        raise texts.type_not_allowed(accelerator.type, zone)
    allowed = config.access.service_accounts
    if spec.service_account and allowed is not None and spec.service_account not in allowed:
        raise texts.service_account(spec.service_account)


def resolve_accelerator(zone: str, spec: NodeSpec, settings: ZoneConfig) -> Accelerator:
    """Raises: ApiError (3): both or neither of type and config, or *zone* does not offer it."""
    if bool(spec.accelerator_type) == bool(spec.accelerator_config):
        raise texts.bad_argument("Exactly one of accelerator_type and accelerator_config must be set.")
    if spec.accelerator_config is not None:
        wanted = spec.accelerator_config
        found = _of_config(wanted)
        name = f"{GENERATION_NUMBERS.get(wanted.type, wanted.type)} {wanted.topology}"
    else:
        found = _of_type(spec.accelerator_type)
        name = spec.accelerator_type
    if found is None or not _offers(zone, settings, found):
        raise texts.unknown_type(name, zone)
    return found


def _of_type(name: str) -> Accelerator | None:
    try:
        return accelerators.derive(name)
    except ConfigError:
        return None


def _of_config(wanted: AcceleratorConfig) -> Accelerator | None:
    generation = GENERATION_NUMBERS.get(wanted.type)
    every = (accelerators.lookup(name) for name in accelerators.known_types())
    return next((one for one in every if (one.generation, one.topology) == (generation, wanted.topology)), None)


def _offers(zone: str, settings: ZoneConfig, accelerator: Accelerator) -> bool:
    listed = offered_types(zone, settings)
    return accelerator.type in listed or (settings.accelerators is not None and ANY_TYPE in settings.accelerators)


def offered_types(zone: str, settings: ZoneConfig) -> tuple[str, ...]:
    """The answer of ListAcceleratorTypes: as configured, else the catalogue's for the zone, else all of it."""
    if settings.accelerators is not None and ANY_TYPE not in settings.accelerators:
        return settings.accelerators
    return () if settings.accelerators == () else _catalogued(zone, everything=bool(settings.accelerators))


@functools.cache
def _catalogued(zone: str, everything: bool) -> tuple[str, ...]:
    of_zone = () if everything else tuple(one.type for one in accelerators.types_in(zone))
    return of_zone or accelerators.known_types()


def offered_configs(name: str) -> tuple[AcceleratorConfig, ...]:
    """Generation and topology of an accelerator type, as `AcceleratorType.accelerator_configs`; empty if unlisted."""
    found = _of_type(name)
    number = next((one for one, of in GENERATION_NUMBERS.items() if found and of == found.generation), None)
    return (AcceleratorConfig(number, found.topology),) if found and found.topology and number else ()


def offered_runtimes(zone: str, settings: ZoneConfig) -> tuple[str, ...]:
    """The answer of ListRuntimeVersions."""
    if settings.runtimes is not None:
        return settings.runtimes
    types = [_of_type(name) for name in offered_types(zone, settings)]
    return tuple(
        sorted({runtime for one in types if one is not None for runtime in one.runtimes if "<" not in runtime})
    )


def _has_runtime(runtime: str, accelerator: Accelerator, settings: ZoneConfig) -> bool:
    former = FORMER_RUNTIMES.get(accelerator.generation, ())
    known = settings.runtimes if settings.runtimes is not None else (*accelerator.runtimes, *former)
    return any(_runtime_pattern(one).fullmatch(runtime) for one in known)


FORMER_RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "v2": ("v2-alpha", "v2-nightly", "tpu-vm-base"),
    "v3": ("v2-alpha", "v2-nightly", "tpu-vm-base"),
    "v4": ("v2-alpha-tpuv4", "v2-alpha-tpuv4-pod", "v2-nightly-tpuv4", "tpu-vm-v4-base"),
}
"""
Accepted, although no longer listed: gcloud scripts of 2022 name them.

Source: the first tpucare (`v2-alpha`), and Google's pages on TPU software versions of 2021 to 2023.
"""


@functools.cache
def _runtime_pattern(runtime: str) -> re.Pattern[str]:
    """The catalogue writes `tpu-vm-tf-<version>[-pod][-pjrt]`: a placeholder, then optional parts in brackets."""
    pattern = re.escape(runtime).replace(r"\[", "(").replace(r"\]", ")?")
    return re.compile(re.sub(r"<[a-z]+>", r"[0-9][0-9a-z.]*", pattern))
