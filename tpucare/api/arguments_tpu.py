"""
Which nodes a call of the Python door asks for: version, slices, zones, tier and `tpu` -> alternatives of a fleet file.

Pure. Whether such nodes exist is checked by the rules of fleet files; what else a call says is read by `arguments`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tpucare.api.arguments_call import Call, text_of, whole, yes_or_no
from tpucare.api.fleet import plain_value
from tpucare.model import accelerators
from tpucare.model.errors import ConfigError
from tpucare.model.resources import Provisioning
from tpucare.model.text import shown

CORES_PER_SLICE = 8
# The generations whose names count cores, eight to a host or slice: `v3-8`, `v4-32`. From v5 on names count otherwise.
SLICE_VERSIONS = (2, 3, 4)
TPU_KEYS = ("runtime", "network", "ssh_keys", "provisioning", "metadata", "os_login", "unlisted")


def alternatives(call: Call) -> Iterator[dict[str, Any]]:
    """As `tpu` of a fleet file: what the positional arguments say first, then what `tpu` says."""
    further = call.more.get("tpu")
    if call.zone is not None or further is None:
        yield plain_value(_primary(call), "tpu")
    entries = further if isinstance(further, list | tuple) else [further]
    for entry in entries if further is not None else ():
        if not isinstance(entry, Mapping):
            raise ConfigError(f"tpu must be a mapping as in a fleet file, or a list of such, not {shown(entry)}")
        yield plain_value(dict(entry), "tpu")


def _primary(call: Call) -> dict[str, Any]:
    word = call.more.get("accelerator_type")
    kind = text_of(word, "accelerator_type") if word is not None else type_of(call.tpu_version, call.slices)
    tpu: dict[str, Any] = {
        "type": kind,
        "zones": _zones(call),
        "provisioning": _tier(kind, yes_or_no(call.preemptible, "preemptible")),
    }
    if call.service_account not in (None, ""):
        tpu["service_account"] = text_of(call.service_account, "service_account")
    return tpu | {key: call.more[key] for key in TPU_KEYS if call.more.get(key) is not None}


def type_of(tpu_version: object, slices: object) -> str:
    """
    `v3-256` of version 3 and 32 slices of 8 cores.

    Raises: ConfigError: no such version, or one whose types are not counted so.
    """
    text = str(tpu_version).lower().removeprefix("v")
    count = whole(slices, "slices")
    if count < 1:
        raise ConfigError(f"slices={count} must be at least 1: slices of {CORES_PER_SLICE} cores")
    if text in {str(version) for version in SLICE_VERSIONS}:
        return f"v{text}-{count * CORES_PER_SLICE}"
    later = text[:1].isdigit() and int(text[0]) > max(SLICE_VERSIONS) and len(text) <= 6
    example = next((kind for kind in accelerators.known_types() if kind.startswith(f"v{text[:1]}")), "v5p-8")
    if later:
        why = "types of v5 and later are not counted in slices of 8 cores"
        raise ConfigError(f"tpu_version={shown(tpu_version)}: {why}; pass accelerator_type= (such as {example!r})")
    raise ConfigError(
        f"tpu_version={shown(tpu_version)} is no known TPU version: 2, 3 or 4; later ones by accelerator_type="
    )


def _zones(call: Call) -> list[Any]:
    """The positional zone first, then `zones` in order."""
    given = call.more.get("zones")
    if given is not None and (isinstance(given, str | Mapping) or not isinstance(given, list | tuple)):
        raise ConfigError(f"zones must be a list of zones in order of preference, not {shown(given)}")
    listed = list(given or ())
    names = [entry.get("zone") if isinstance(entry, Mapping) else entry for entry in listed]
    first = [] if call.zone is None or call.zone in names else [text_of(call.zone, "zone")]
    return first + listed


def _tier(kind: str, preemptible: bool) -> str:
    """Preemptible nodes are asked for as in 2022 where that is offered, else as spot, which took its place."""
    if not preemptible:
        return Provisioning.ON_DEMAND.value
    with contextlib.suppress(ConfigError):
        if Provisioning.PREEMPTIBLE not in accelerators.derive(kind).provisionings:
            return Provisioning.SPOT.value
    return Provisioning.PREEMPTIBLE.value
