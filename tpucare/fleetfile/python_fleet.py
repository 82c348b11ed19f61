"""
A fleet that a Python script declares: TPU and care as in a fleet file, and a job that the script starts itself.

Its text is in the store like that of any fleet, as one JSON object that begins with `{"python": `, so that the CLI can
show it, take it down and adopt its nodes while the script does not run. Pure; the arguments of `start_single` are left
to `api/arguments.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpucare.fleetfile import parse as fleets
from tpucare.fleetfile.parse import FleetSpec
from tpucare.fleetfile.schema import COUNT_LIMIT
from tpucare.model.errors import ConfigError
from tpucare.model.memory import FleetRecord
from tpucare.model.resources import Job, OnExit
from tpucare.model.text import hint, shown

VERSION = 1
# Keys of the fleet itself: what it may cost, and where its nodes are asked for.
FLEET_KEYS = ("max_price", "until", "max_cost", "placement", "value")
# A node is `<slot>-a<number>` in at most 40 characters; five digits last for ten years of an hour each.
SLOT_NAME_LIMIT = 33
_HEAD = '{"python": '
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LIKE_A_NODE = re.compile(r".*-a[0-9]+")
# A fleet file needs a job; `parse_python` replaces this one. Its checkpoint prevents the warning about a missing one.
_NO_JOB = {"run": ":", "checkpoint": "/none"}


@dataclass(frozen=True, slots=True)
class PythonFleet(FleetSpec):
    """`single`: its one slot has the fleet's own name, as the host of `start_single` has."""

    single: bool = False

    def slot_name(self, index: int) -> str:
        return self.name if self.single and index == 0 else f"{self.name}-{index}"

    def index_of(self, word: str) -> int | None:
        if self.single:
            return 0 if word == self.name else None
        # super() fails here: `slots=True` makes the class a second time, and the method refers to the first one.
        return FleetSpec.index_of(self, word)

    def _job_of(self, index: int, name: str) -> Job:  # noqa: ARG002
        return self.job


def parse_accepted(record: FleetRecord) -> FleetSpec:
    """
    The fleet as last accepted, with a job whose files are empty: they may be gone by now.

    Raises: ConfigError: this version cannot read its text.
    """
    file = f"{record.name} (as accepted)"
    if is_python(record.text):
        return parse_python(record.text, file=file)
    return fleets.parse(
        record.text, file=file, folder=Path(record.folder), read_file=lambda _folder, _path: b"", accepted=True
    )


def render(
    name: str,
    tpu: list[dict[str, Any]],
    care: Mapping[str, Any],
    *,
    count: int = 1,
    single: bool = False,
    project: str = "",
    on_exit: str = OnExit.LEAVE.value,
    choices: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """
    The text that `parse_python` reads. `tpu` and `care` are as in a fleet file, durations written as text; `choices`
    are FLEET_KEYS with their values.
    """
    body = {
        "python": VERSION,
        "name": name,
        "single": single,
        "count": count,
        "project": project,
        "on_exit": on_exit,
        "tpu": tpu,
        "care": dict(care),
        **choices,
    }
    return json.dumps(body, ensure_ascii=False)


def with_project(text: str, project: str) -> str:
    """The same fleet in *project*."""
    return json.dumps({**json.loads(text), "project": project}, ensure_ascii=False)


def is_python(text: str) -> bool:
    """True if `render` made *text*."""
    return text.startswith(_HEAD)


def parse_python(text: str, *, file: str = "") -> PythonFleet:
    """
    The fleet of a text that `render` made.

    Raises: ConfigError: lines of the form `file:1: key: problem`, as for a fleet file.
    """
    body = json.loads(text)
    if body["python"] != VERSION:
        raise ConfigError(f"{file}: was written by another version of tpucare; start its script again")
    name, count, single = body["name"], body["count"], body["single"]
    check_name(name, count=count, single=single)
    declared = {"name": "python", "count": count, "tpu": body["tpu"], "job": _NO_JOB, "care": body["care"]}
    declared |= {key: body[key] for key in FLEET_KEYS if key in body}
    if body["project"]:
        declared["project"] = body["project"]
    base = fleets.parse(json.dumps(declared, ensure_ascii=False), file=file or name)
    return PythonFleet(
        name=name,
        count=count,
        project=base.project,
        places=base.places,
        job=Job(run="", foreign=True),
        care=replace(base.care, on_exit=OnExit(body["on_exit"])),
        ssh_keys=base.ssh_keys,
        warnings=base.warnings,
        file=file or name,
        single=single,
        bounds=base.bounds,
        order=base.order,
        value=base.value,
    )


def check_name(name: object, *, count: int, single: bool) -> None:
    """Raises: ConfigError: *name* or *count* gives a slot or a node an invalid name."""
    word = "host" if single else "prefix"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{word}={shown(name)} is not a name for a TPU: a-z, 0-9 and -, beginning with a letter, not ending in -"
        )
    if single and _LIKE_A_NODE.fullmatch(name):
        raise ConfigError(f"{word}={shown(name)} must not end in -a<digits>: nodes of a slot are named so")
    if not 1 <= count <= COUNT_LIMIT:
        raise ConfigError(f"tpus={count} is not a number of TPUs: 1 to {COUNT_LIMIT}")
    longest = name if single else f"{name}-{count - 1}"
    if len(longest) > SLOT_NAME_LIMIT:
        room = SLOT_NAME_LIMIT - (len(longest) - len(name))
        raise ConfigError(f"{word}={shown(name)} has {len(name)} characters, and a node's name has room for {room}")


def choice_of(word: object) -> OnExit:
    """The `OnExit` that *word* names. Raises: ConfigError."""
    if isinstance(word, str) and word in list(OnExit):
        return OnExit(word)
    known = [choice.value for choice in OnExit]
    raise ConfigError(f"on_exit={shown(word)} is not one of {', '.join(known)}{hint(str(word), known)}")
