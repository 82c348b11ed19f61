"""
How values that JSON does not know are taken apart into those that it does, and made again of them.

Pydantic's own JSON follows the annotation of a field and not its value: a subclass loses its fields, a tuple becomes a
list, infinity None, a secret ten stars, and nobody is told. So models are taken apart by what they hold, as pickle
does. The text, and how types are found again by name, are `contexts`'.
"""

from __future__ import annotations

import base64
import functools
import inspect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path
from typing import Any
from uuid import UUID

from pydantic import AnyHttpUrl, AnyUrl, BaseModel, FileUrl, HttpUrl, Secret, SecretBytes, SecretStr
from pydantic_core import PydanticUndefined

SECRETS = (SecretStr, SecretBytes, Secret)


class Unserialisable(Exception):
    """A value, or a type, that cannot be written down or found again; the text names it."""


# --- values of one type each -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """Of what a value is made again: `write` takes it apart, and `read` of that is equal to it."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, entry] for key, entry in value.items()]


FORMS: Mapping[type, Form] = {
    set: Form(lambda value: sorted(value, key=repr), set),
    frozenset: Form(lambda value: sorted(value, key=repr), frozenset),
    deque: Form(lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    OrderedDict: Form(_pairs, OrderedDict),
    Counter: Form(_pairs, lambda pairs: Counter(dict(pairs))),
    bytes: Form(lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    datetime: Form(datetime.isoformat, datetime.fromisoformat),
    date: Form(date.isoformat, date.fromisoformat),
    time: Form(time.isoformat, time.fromisoformat),
    timedelta: Form(lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)),
    Path: Form(str, Path),
    **{
        kind: Form(str, kind)
        for kind in (
            UUID,
            Decimal,
            IPv4Address,
            IPv4Interface,
            IPv4Network,
            IPv6Address,
            IPv6Interface,
            IPv6Network,
            AnyUrl,
            AnyHttpUrl,
            HttpUrl,
            FileUrl,
        )
    },
}
BY_NAME: Mapping[str, Form] = {kind.__name__: form for kind, form in FORMS.items()}


def form_of(value: object) -> tuple[str, Form] | None:
    """The form of exactly its type, with the name that the form is written under; a path's own type is its system's."""
    kind = Path if isinstance(value, Path) else type(value)
    return (kind.__name__, FORMS[kind]) if kind in FORMS else None


# --- pydantic models -------------------------------------------------------------------------------------------------


def parts_of_model(value: BaseModel) -> dict[str, Mapping[str, Any]]:
    """
    What *value* holds, in its own values: fields, extra fields, private attributes, and attributes that are neither.

    Left out is what a `cached_property` remembers: it is computed again when it is asked for.
    """
    kind = type(value)
    held = {
        name: entry
        for name, entry in vars(value).items()
        if not isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)
    }
    private = value.__pydantic_private__ or {}
    return {
        "fields": {name: entry for name, entry in held.items() if name in kind.model_fields},
        "more": {name: entry for name, entry in held.items() if name not in kind.model_fields},
        "extra": value.__pydantic_extra__ or {},
        "private": {name: entry for name, entry in private.items() if entry is not PydanticUndefined},
    }


def model_of(kind: type[BaseModel], parts: Mapping[str, Mapping[str, Any]], was_set: list[str]) -> BaseModel:
    """
    As pickle does: values as they were; validators and `__init__` have had their turn.

    Raises: Misfit: a field of today without a default, of which no value was kept.
    """
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if name in parts["fields"]:
            fields[name] = parts["fields"][name]
        elif field.is_required():
            raise Unserialisable(
                f"{kind.__module__}:{kind.__qualname__} has a field {name} now, of which no value was kept"
            )
        else:
            fields[name] = field.get_default(call_default_factory=True, validated_data=fields)
    made = kind.__new__(kind)
    made.__setstate__(
        {
            "__dict__": {**parts["more"], **fields},
            "__pydantic_fields_set__": {name for name in was_set if name in fields or name in parts["extra"]},
            "__pydantic_extra__": dict(parts["extra"]) if kind.model_config.get("extra") == "allow" else None,
            "__pydantic_private__": _private(kind, parts["private"]),
        }
    )
    return made


def _private(kind: type[BaseModel], kept: Mapping[str, Any]) -> dict[str, Any] | None:
    known = kind.__private_attributes__
    defaults = {name: known[name].get_default() for name in known if name not in kept}
    private = {name: entry for name, entry in {**kept, **defaults}.items() if name in known}
    return {name: entry for name, entry in private.items() if entry is not PydanticUndefined} if known else None
