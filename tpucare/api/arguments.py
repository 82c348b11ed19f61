"""
Arguments of `start_single` and `start_multiple` -> a fleet and how to care for it, or one line per thing that is wrong.

Pure. The names, orders and meanings of the first tpucare (2022) are kept; everything that a fleet file can say comes
beside them as keywords, and is checked by the same rules. Nothing here asks the environment or the cloud. The nodes
that are asked for are read by `arguments_tpu`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.api.arguments_call import UNHEALTHY_SECONDS, Call, text_of, whole, yes_or_no
from tpucare.api.arguments_tpu import TPU_KEYS, alternatives
from tpucare.api.fleet import plain_value
from tpucare.fleetfile import python_fleet as fleet_python
from tpucare.fleetfile.python_fleet import PythonFleet
from tpucare.fleetfile.schema import CareSection
from tpucare.model.errors import ConfigError, Problem
from tpucare.model.resources import Event, OnExit
from tpucare.model.text import hint, shown

START_METHODS = ("thread", "process")

StartFn = Callable[[Any, Any], object]
CreationCallback = Callable[[str, Any], object]

_CARE_KEYS = tuple(CareSection.model_fields)
_DOOR_KEYS = ("endpoint", "project", "store", "on_event", "start_method", "delete_unowned", "fresh")
_OWN_KEYS = ("accelerator_type", "zones", "tpu", "care", "on_exit")
_ALIASES: Mapping[str, str] = {
    "created_callback": "creation_callback",
    "unhealthy_timeout": "unhealthy_timeout_seconds",
    "type": "accelerator_type",
}
# What people would look for, and why it is not here.
_ELSEWHERE: Mapping[str, str] = {
    "job": "start_fn starts the job; a declared one is run by tpucare.run(tpucare.Fleet(...))",
    "count": "start_multiple takes `tpus`",
    **dict.fromkeys(
        ("run", "setup", "repository", "workdir", "secrets", "files", "env", "checkpoint"),
        "it belongs to a declared job: tpucare.run(tpucare.Fleet(job={...})), or do it in start_fn",
    ),
}
_POSITIONAL = ("tpu_version", "zone", "preemptible", "service_account", "slices")
MORE = (*_DOOR_KEYS, *_OWN_KEYS, *TPU_KEYS, *_CARE_KEYS)


@dataclass(frozen=True, slots=True)
class Door:
    """How to care: where from, and whom to tell. Empty texts are left to the environment."""

    endpoint: str = ""
    project: str = ""
    store: str | Path = ""
    on_event: Callable[[Event], None] | None = None
    start_method: str = "thread"
    delete_unowned: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that was asked for, checked. `text` is what `fleet_python.parse` makes `fleet` of."""

    fleet: PythonFleet
    text: str
    start_fn: StartFn
    creation_callback: CreationCallback
    creation_semaphore: contextlib.AbstractContextManager[Any] | None
    all_workers: bool
    door: Door


def read(call: Call) -> Start:
    """Raises: ConfigError: one line per problem, each naming the argument."""
    call = _without_aliases(call)
    _refuse_unknown(call)
    start_fn = _callback(call.start_fn, "start_fn", "(ctx, worker)")
    created = _callback(call.creation_callback, "creation_callback", "(host, ctx)")
    count = 1 if call.single else whole(call.tpus, "tpus")
    fleet_python.check_name(call.name, count=count, single=call.single)
    door = _door(call)
    care = _care(call)
    on_exit = fleet_python.choice_of(care.pop("on_exit", OnExit.LEAVE.value))
    text = fleet_python.render(
        str(call.name),
        list(alternatives(call)),
        care,
        count=count,
        single=call.single,
        project=door.project,
        on_exit=on_exit.value,
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
        door=door,
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
        return value  # what C made may not tell how it is called
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{name} is called as {name}{form}, and takes {signature}: {error}") from None
    if inspect.iscoroutinefunction(value):
        raise ConfigError(f"{name} is an async function, which nobody would await: give a plain one")
    return value


# --- care, and the fleet ---------------------------------------------------------------------------------------------


def _care(call: Call) -> dict[str, Any]:
    """`care` as a mapping, single keys of it as keywords, and the timeout that has a name of its own."""
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
    """In Python a bare number is a number of seconds; part of one counts as a whole."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not math.isfinite(value) or value <= 0:
        name = "unhealthy_timeout_seconds" if key == "unhealthy_after" else key
        raise ConfigError(f"{name}={value} must be a number of seconds above 0")
    return f"{math.ceil(value)}s"


def _parsed(text: str, call: Call) -> PythonFleet:
    """Problems are told by the names of arguments."""
    try:
        return fleet_python.parse(text, file=call.function)
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


# --- how to care -----------------------------------------------------------------------------------------------------


def _door(call: Call) -> Door:
    more = call.more
    listen = more.get("on_event")
    if listen is not None and not callable(listen):
        raise ConfigError("on_event must be a function that takes an event")
    method = more.get("start_method") or "thread"
    if method not in START_METHODS:
        near = hint(str(method), START_METHODS)
        raise ConfigError(f"start_method={shown(method)} is none of {', '.join(START_METHODS)}{near}")
    return Door(
        endpoint=text_of(more.get("endpoint") or "", "endpoint"),
        project=text_of(more.get("project") or "", "project"),
        store=store_of(more.get("store")),
        on_event=listen,
        start_method=method,
        delete_unowned=yes_or_no(more.get("delete_unowned", False), "delete_unowned"),
        fresh=yes_or_no(more.get("fresh", False), "fresh"),
    )


def store_of(value: object) -> str | Path:
    """Raises: ConfigError: it is none of what `store` may be; None is as good as not given."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, os.PathLike):
        raise ConfigError(f"store must be a folder, a file or a name, not a {type(value).__name__}")
    return Path(value)
