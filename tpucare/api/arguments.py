"""
Arguments of `start_single` and `start_multiple` -> a fleet and options of the call, or one line per problem.

Pure. Names, order and meaning of the arguments of 2022 are kept; all keys of a fleet file are keywords beside them, and
are checked by the same rules. Nothing here reads the environment or asks the cloud.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.api.fleet import plain_value
from tpucare.api.threads import CreationCallback, StartFn
from tpucare.fleetfile import python_fleet
from tpucare.fleetfile.python_fleet import FLEET_KEYS, PythonFleet
from tpucare.fleetfile.schema import CareSection
from tpucare.model import accelerators
from tpucare.model.errors import ConfigError, Problem
from tpucare.model.resources import Event, OnExit, Provisioning
from tpucare.model.text import hint, shown

START_METHODS = ("thread", "process")

_CARE_KEYS = tuple(CareSection.model_fields)
_CALL_KEYS = ("endpoint", "project", "store", "on_event", "start_method", "delete_unowned", "fresh")
_OWN_KEYS = ("accelerator_type", "zones", "tpu", "care", "on_exit")
_ALIASES: Mapping[str, str] = {
    "created_callback": "creation_callback",
    "unhealthy_timeout": "unhealthy_timeout_seconds",
    "type": "accelerator_type",
}
# Keywords that people may expect, and where they belong.
_ELSEWHERE: Mapping[str, str] = {
    "job": "start_fn starts the job; a declared one is run by tpucare.run(tpucare.Fleet(...))",
    "count": "start_multiple takes `tpus`",
    **dict.fromkeys(
        ("run", "setup", "repository", "workdir", "secrets", "files", "env", "checkpoint"),
        "it belongs to a declared job: tpucare.run(tpucare.Fleet(job={...})), or do it in start_fn",
    ),
}
_POSITIONAL = ("tpu_version", "zone", "preemptible", "service_account", "slices")
TPU_KEYS = ("runtime", "network", "ssh_keys", "provisioning", "metadata", "os_login", "price", "unlisted")
MORE = (*_CALL_KEYS, *_OWN_KEYS, *TPU_KEYS, *FLEET_KEYS, *_CARE_KEYS)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Keywords of a call that are no part of the fleet. An empty text leaves the value to the environment."""

    endpoint: str = ""
    project: str = ""
    store: str | Path = ""
    on_event: Callable[[Event], None] | None = None
    start_method: str = "thread"
    delete_unowned: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """The checked arguments. `python_fleet.parse_python` makes `fleet` of `text`."""

    fleet: PythonFleet
    text: str
    start_fn: StartFn
    creation_callback: CreationCallback
    creation_semaphore: contextlib.AbstractContextManager[Any] | None
    all_workers: bool
    options: CallOptions


def read(call: Call) -> Start:
    """Raises: ConfigError: one line per problem, each naming the argument."""
    call = _without_aliases(call)
    _refuse_unknown(call)
    start_fn = _callback(call.start_fn, "start_fn", "(ctx, worker)")
    created = _callback(call.creation_callback, "creation_callback", "(host, ctx)")
    count = 1 if call.single else whole_number(call.tpus, "tpus")
    python_fleet.check_name(call.name, count=count, single=call.single)
    options = _call_options(call)
    care = _care(call)
    on_exit = python_fleet.choice_of(care.pop("on_exit", OnExit.LEAVE.value))
    text = python_fleet.render(
        str(call.name),
        list(alternatives(call)),
        care,
        count=count,
        single=call.single,
        project=options.project,
        on_exit=on_exit.value,
        choices={key: plain_value(call.more[key], key) for key in FLEET_KEYS if call.more.get(key) is not None},
    )
    semaphore = call.creation_semaphore
    if semaphore is not None and not (hasattr(semaphore, "__enter__") and hasattr(semaphore, "__exit__")):
        raise ConfigError(f"creation_semaphore must be a context manager, not a {type(semaphore).__name__}")
    return Start(
        fleet=_parsed(text, call),
        text=text,
        start_fn=start_fn,
        creation_callback=created,
        creation_semaphore=semaphore,
        all_workers=yes_or_no(call.all_workers, "all_workers"),
        options=options,
    )


# --- names -----------------------------------------------------------------------------------------------------------


def _without_aliases(call: Call) -> Call:
    more, changes = dict(call.more), {}
    for alias, name in _ALIASES.items():
        if alias not in more:
            continue
        value = more.pop(alias)
        if name in more or (name != "accelerator_type" and getattr(call, name) not in (None, UNHEALTHY_SECONDS)):
            raise ConfigError(f"{call.function}: {alias} and {name} are the same; give one of them")
        if name == "accelerator_type":
            more[name] = value
        else:
            changes[name] = value
    return replace(call, more=more, **changes)


def _refuse_unknown(call: Call) -> None:
    named = ("host" if call.single else "prefix", *_POSITIONAL, "start_fn", "creation_callback", "creation_semaphore")
    named += ("all_workers", "unhealthy_timeout_seconds", *(() if call.single else ("tpus",)))
    for word in call.more:
        if word in _ELSEWHERE:
            raise ConfigError(f"{call.function} has no argument {word}: {_ELSEWHERE[word]}")
        if word not in MORE:
            near = hint(word, [*named, *MORE, *_ALIASES])
            raise ConfigError(f"{call.function} has no argument {shown(word)}{near}")


def _callback(value: object, name: str, form: str) -> Callable[..., Any]:
    """A function, bound method, class, partial or any object that can be called with two values."""
    if not callable(value):
        what = "is missing" if value is None else f"must be a function, not a {type(value).__name__}"
        raise ConfigError(f"{name} {what}: it is called as {name}{form}")
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return value  # some callables of C have no signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{name} is called as {name}{form}, and takes {signature}: {error}") from None
    if inspect.iscoroutinefunction(value):
        raise ConfigError(f"{name} is an async function, which is never awaited: give a plain one")
    return value


# --- care, and the fleet ---------------------------------------------------------------------------------------------


def _care(call: Call) -> dict[str, Any]:
    """The mapping `care`, the keywords that are keys of it, and the timeout with its name of 2022, as one mapping."""
    whole = call.more.get("care")
    if whole is not None and not isinstance(whole, Mapping):
        raise ConfigError(f"care must be a mapping as in a fleet file, not {shown(whole)}")
    care = {**(whole or {}), **{key: call.more[key] for key in (*_CARE_KEYS, "on_exit") if key in call.more}}
    if "unhealthy_after" not in care:
        care["unhealthy_after"] = call.unhealthy_timeout_seconds
    elif call.unhealthy_timeout_seconds != UNHEALTHY_SECONDS:
        raise ConfigError("unhealthy_timeout_seconds and unhealthy_after are the same; give one of them")
    plain = plain_value(care, "care")
    return {key: _seconds(value, key) if _is_length(key) else value for key, value in plain.items()}


def _is_length(key: str) -> bool:
    known = CareSection.model_fields.get(key)
    return known is not None and isinstance(known.default, timedelta)


def _seconds(value: Any, key: str) -> Any:
    """A bare number means seconds, rounded up."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not math.isfinite(value) or value <= 0:
        name = "unhealthy_timeout_seconds" if key == "unhealthy_after" else key
        raise ConfigError(f"{name}={value} must be a number of seconds above 0")
    return f"{math.ceil(value)}s"


def _parsed(text: str, call: Call) -> PythonFleet:
    """Raises: ConfigError: its problems name arguments, and not keys of a fleet file."""
    try:
        return python_fleet.parse_python(text, file=call.function)
    except ConfigError as error:
        if not error.problems:
            raise
        renamed = dict.fromkeys(_renamed(problem, call) for problem in error.problems)
        raise ConfigError.of(renamed, call.function) from None


def _renamed(problem: Problem, call: Call) -> Problem:
    """`tpu[0].zones[0]: us-x is no known zone` -> `zone: us-x is no known zone`."""
    text = problem.text.replace("`unlisted: true`", "unlisted=True")
    return Problem(0, _argument(problem.key, call), text)


def _argument(key: str, call: Call) -> str:
    if key == "care.unhealthy_after" and "unhealthy_after" not in call.more:
        return "unhealthy_timeout_seconds"
    if key.startswith("care."):
        return key.removeprefix("care.")
    for start in ("tpu[0].", "tpu."):
        if key.startswith(start) and call.zone is not None:
            rest = key.removeprefix(start)
            if rest == "type" and "accelerator_type" not in call.more:
                return "tpu_version and slices"
            if rest == "provisioning" and "provisioning" not in call.more:
                return "preemptible"
            if rest.startswith("zones") and "zones" not in call.more:
                return "zone"
            return "accelerator_type" if rest == "type" else rest
    return key


# --- options of the call ---------------------------------------------------------------------------------------------


def _call_options(call: Call) -> CallOptions:
    more = call.more
    listen = more.get("on_event")
    if listen is not None and not callable(listen):
        raise ConfigError("on_event must be a function that takes an event")
    method = more.get("start_method") or "thread"
    if method not in START_METHODS:
        near = hint(str(method), START_METHODS)
        raise ConfigError(f"start_method={shown(method)} is none of {', '.join(START_METHODS)}{near}")
    return CallOptions(
        endpoint=text_of(more.get("endpoint") or "", "endpoint"),
        project=text_of(more.get("project") or "", "project"),
        store=store_of(more.get("store")),
        on_event=listen,
        start_method=method,
        delete_unowned=yes_or_no(more.get("delete_unowned", False), "delete_unowned"),
        fresh=yes_or_no(more.get("fresh", False), "fresh"),
    )


def store_of(value: object) -> str | Path:
    """The argument `store`; None counts as not given. Raises: ConfigError: neither text nor a path."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, os.PathLike):
        raise ConfigError(f"store must be a folder, a file or a name, not a {type(value).__name__}")
    return Path(value)


# --- one call, and the checks of its single values -------------------------------------------------------------------


UNHEALTHY_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of `start_single` (`single`) or `start_multiple`, unchecked; `more`: keywords without a field here."""

    name: object
    tpu_version: object
    zone: object
    preemptible: object
    service_account: object
    slices: object
    start_fn: object
    creation_callback: object
    creation_semaphore: object = None
    all_workers: object = False
    unhealthy_timeout_seconds: object = UNHEALTHY_SECONDS
    tpus: object = 1
    single: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> str:
        return "start_single" if self.single else "start_multiple"


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not {shown(value)}")
    return value


def whole_number(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        raise ConfigError(f"{name} must be a whole number, not {shown(value)}")
    return value


def yes_or_no(value: object, name: str) -> bool:
    if value is None or isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ConfigError(f"{name} must be True or False (or 1 or 0), not {shown(value)}")


# --- version, slices, zones, tier and `tpu` -> alternatives of a fleet file ------------------------------------------
# Whether such nodes exist is checked by the rules of fleet files.


CORES_PER_SLICE = 8
# The generations whose names count cores, eight to a host or slice: `v3-8`, `v4-32`. From v5 on names count otherwise.
SLICE_VERSIONS = (2, 3, 4)


def alternatives(call: Call) -> Iterator[dict[str, Any]]:
    """Entries of `tpu` as in a fleet file: the positional arguments first, then the keyword `tpu`."""
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

    Raises: ConfigError: no such version, or one whose types are not counted in slices.
    """
    text = str(tpu_version).lower().removeprefix("v")
    count = whole_number(slices, "slices")
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
    """Preemptible where the type offers it, as in 2022, else spot, its successor."""
    if not preemptible:
        return Provisioning.ON_DEMAND.value
    with contextlib.suppress(ConfigError):
        if Provisioning.PREEMPTIBLE not in accelerators.derive(kind).provisionings:
            return Provisioning.SPOT.value
    return Provisioning.PREEMPTIBLE.value
