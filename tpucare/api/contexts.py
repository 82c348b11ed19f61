"""
Contexts, the return values of `creation_callback`: to typed text in the store, and back to the same types.

A context outlives the process that made it. It may hold dataclasses, pydantic models, named tuples, enums, namespaces,
the values of JSON, and those of `FORMS`. Each value is written by its own type and not by its annotation: pydantic's
JSON would drop the fields of a subclass, make a tuple a list and infinity None. Types are found again by module and
name; a type that is gone, or that lacks a value, is an error that says so.

The text is no pickle: stored contexts of earlier versions have to be read, so a restricted `find_class` would come on
top of this reader and not instead of it, and a text that names only data types cannot call a function at all.
"""

from __future__ import annotations

import argparse
import base64
import copy
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from pydantic import AnyHttpUrl, AnyUrl, BaseModel, FileUrl, HttpUrl, Secret, SecretBytes, SecretStr, ValidationError
from pydantic_core import PydanticUndefined

from tpucare.model.errors import ConfigError
from tpucare.model.text import shown

# The key that marks a mapping which stands for something else; a context's own mapping with it is written as pairs.
TAG = "$"
_PLAIN = (bool, int, float, str)
_BAGS = (types.SimpleNamespace, argparse.Namespace)
_SECRETS = (SecretStr, SecretBytes, Secret)
_HOW = "use dataclasses, pydantic models, numbers, text, lists and mappings"


class Unserialisable(Exception):
    """A value, or a type, that cannot be written down or found again; the text names it."""


class _Form(NamedTuple):
    """How values of one type are written; `read` of that equals the value."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, entry] for key, entry in value.items()]


_ADDRESSES = (IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
FORMS: Mapping[type, _Form] = {
    set: _Form(lambda value: sorted(value, key=repr), set),
    frozenset: _Form(lambda value: sorted(value, key=repr), frozenset),
    deque: _Form(lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    OrderedDict: _Form(_pairs, OrderedDict),
    Counter: _Form(_pairs, lambda pairs: Counter(dict(pairs))),
    bytes: _Form(lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    datetime: _Form(datetime.isoformat, datetime.fromisoformat),
    date: _Form(date.isoformat, date.fromisoformat),
    time: _Form(time.isoformat, time.fromisoformat),
    timedelta: _Form(lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)),
    **{kind: _Form(str, kind) for kind in (Path, UUID, Decimal, *_ADDRESSES, AnyUrl, AnyHttpUrl, HttpUrl, FileUrl)},
}
_BY_NAME = {kind.__name__: form for kind, form in FORMS.items()}
# Factories of a defaultdict, beside classes of the caller's own modules: the next missing key calls the factory.
_FACTORIES = frozenset((*FORMS, *_PLAIN, *_BAGS, complex, list, dict, tuple, defaultdict))


class ContextStore(Protocol):
    """Keeps a text for each slot."""

    def context(self, slot: str) -> str | None: ...

    def save_context(self, slot: str, text: str) -> None: ...

    def drop_context(self, slot: str) -> None: ...


class StoredContexts:
    """
    Contexts by slot. As thread-safe as its store.

    homes: modules to search for types that are not where they were, such as the callbacks' modules: a script that is
    run one day and imported the next has its types in `__main__` first, and elsewhere then.
    """

    def __init__(self, store: ContextStore, homes: Iterable[str] = ()) -> None:
        self._store, self._homes = store, tuple(homes)

    def get(self, slot: str) -> object | None:
        """Raises: ConfigError: the stored context has a type that is gone or changed."""
        text = self._store.context(slot)
        if text is None:
            return None
        try:
            return decode(text, self._homes)
        except Unserialisable as problem:
            raise ConfigError(
                f"the context of {slot} is kept, and does not fit this script: {problem}; "
                "give back what is missing, or begin anew with fresh=True"
            ) from problem

    def put(self, slot: str, ctx: object) -> None:
        """Durable when it returns. Raises: ConfigError: it cannot be stored; StoreError."""
        try:
            text = encode(ctx)
            decode(text)
        except (Unserialisable, RecursionError) as problem:
            why = str(problem) if isinstance(problem, Unserialisable) else "it contains itself"
            raise ConfigError(f"the context of {slot} cannot be stored: {why}") from problem
        self._store.save_context(slot, text)

    def copy(self, ctx: object) -> object:
        """A copy that shares nothing with *ctx*. Raises: ConfigError."""
        try:
            return copy.deepcopy(ctx)
        except Exception as error:
            raise ConfigError(f"the context ({type(ctx).__name__}) cannot be copied: {error}") from error

    def drop(self, slot: str) -> None:
        """The next node of *slot* starts without a context."""
        self._store.drop_context(slot)


# --- to text ---------------------------------------------------------------------------------------------------------


def encode(ctx: object) -> str:
    """Raises: Unserialisable: names the part that cannot be written down. RecursionError: it contains itself."""
    return json.dumps(_written(ctx, "ctx"))


def _written(value: Any, path: str) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return {TAG: "enum", "type": _name_of(type(value), path), "name": value.name}
    for kind in (str, int, float):
        # Numbers of numpy, a host's name that is bound to an attempt: only their plain value lasts.
        if isinstance(value, kind):
            return kind(value)
    if type(value) is list:
        return _written_items(value, path)
    if type(value) is dict:
        return _written_mapping(value, path)
    return _written_object(value, path)


def _written_mapping(value: dict[Any, Any], path: str) -> Any:
    if all(type(key) is str for key in value) and TAG not in value:
        return {key: _written(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    pairs = [[_written(key, f"a key of {path}"), _written(entry, f"{path}[{key!r}]")] for key, entry in value.items()]
    return {TAG: "mapping", "pairs": pairs}


def _written_object(value: Any, path: str) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _written_dataclass(value, path)
    if isinstance(value, BaseModel):
        return _written_model(value, path)
    if type(value) in _BAGS:
        return {TAG: "bag", "type": _name_of(type(value), path), "fields": _written_fields(vars(value), path)}
    if type(value) is tuple:
        return {TAG: "tuple", "items": _written_items(value, path)}
    if isinstance(value, tuple):
        if not hasattr(value, "_fields"):
            raise Unserialisable(f"{path} is a {type(value).__name__}, a tuple of its own kind: use a NamedTuple")
        return {TAG: "namedtuple", "type": _name_of(type(value), path), "items": _written_items(value, path)}
    if type(value) is defaultdict:
        return _written_defaultdict(value, path)
    kind = Path if isinstance(value, Path) else type(value)
    if kind in FORMS:
        return {TAG: kind.__name__, "value": _written(FORMS[kind].write(value), path)}
    if isinstance(value, _SECRETS):
        raise Unserialisable(
            f"{path} is a {type(value).__name__}, and secrets are not written down: read it where it is used"
        )
    raise Unserialisable(f"{path} is a {type(value).__name__}, which cannot be written down; {_HOW}")


def _written_dataclass(value: Any, path: str) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    more = {name: entry for name, entry in getattr(value, "__dict__", {}).items() if name not in names}
    return {
        TAG: "dataclass",
        "type": _name_of(type(value), path),
        "fields": _written_fields(fields, path),
        "more": _written_fields({name: entry for name, entry in more.items() if not name.startswith("__")}, path),
    }


def _written_model(value: BaseModel, path: str) -> dict[str, Any]:
    """Fields, other attributes, extra fields and private attributes; a `cached_property` is computed again instead."""
    kind = type(value)
    held = {
        name: entry
        for name, entry in vars(value).items()
        if not isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)
    }
    private = value.__pydantic_private__ or {}
    parts: dict[str, Mapping[str, Any]] = {
        "fields": {name: entry for name, entry in held.items() if name in kind.model_fields},
        "more": {name: entry for name, entry in held.items() if name not in kind.model_fields},
        "extra": value.__pydantic_extra__ or {},
        "private": {name: entry for name, entry in private.items() if entry is not PydanticUndefined},
    }
    written = {part: _written_fields(entries, path) for part, entries in parts.items()}
    return {TAG: "model", "type": _model_name(kind, path), **written, "set": sorted(value.model_fields_set)}


def _written_defaultdict(value: defaultdict[Any, Any], path: str) -> dict[str, Any]:
    makes = value.default_factory
    if not (makes is None or isinstance(makes, type)):
        raise Unserialisable(
            f"{path} is a defaultdict of a function, which cannot be written down: give it a class, as int"
        )
    name = None if makes is None else _name_of(makes, path)
    return {TAG: "defaultdict", "makes": name, "items": _written(dict(value), path)}


def _written_items(value: Iterable[Any], path: str) -> list[Any]:
    return [_written(entry, f"{path}[{index}]") for index, entry in enumerate(value)]


def _written_fields(fields: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {name: _written(entry, f"{path}.{name}") for name, entry in fields.items()}


def _name_of(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in kind.__qualname__:
        raise Unserialisable(
            f"{path} is a {kind.__name__}, a class made inside a function: move it to the top of its module"
        )
    if _find(name, ()) is not kind:
        raise Unserialisable(f"{path} is a {kind.__name__}, and {name} is not that class: it could not be found again")
    return name


def _model_name(kind: Any, path: str) -> Any:
    """A generic model with parameters has no name of its own: a list of the model's name and those of each of them."""
    generic = getattr(kind, "__pydantic_generic_metadata__", None)
    if generic and generic["origin"] is not None:
        return [_name_of(generic["origin"], path), *(_model_name(each, path) for each in generic["args"])]
    if not isinstance(kind, type) or isinstance(kind, types.GenericAlias):
        raise Unserialisable(
            f"{path} is a model with the parameter {kind}, which has no name: make a subclass of it that has"
        )
    return _name_of(kind, path)


# --- from text: the classes that it names are restored without a call of `__init__` or a validator, as by pickle ------


def decode(text: str, homes: Iterable[str] = ()) -> object:
    """Raises: Unserialisable: a type that is gone or changed, or a text that `encode` did not write."""
    try:
        return _Reader(tuple(homes)).read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        line = shown((str(error).splitlines() or [""])[0])
        raise Unserialisable(f"it cannot be read ({type(error).__name__}: {line})") from error


class _Reader:
    def __init__(self, homes: tuple[str, ...]) -> None:
        self._homes = homes

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.read(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return self._fields(value)
        tag = value[TAG]
        if tag in _BY_NAME:
            return _BY_NAME[tag].read(self.read(value["value"]))
        return getattr(self, f"_read_{tag}")(value)

    def _fields(self, written: dict[str, Any]) -> dict[str, Any]:
        return {name: self.read(entry) for name, entry in written.items()}

    def _read_mapping(self, written: dict[str, Any]) -> dict[Any, Any]:
        return {self.read(key): self.read(entry) for key, entry in written["pairs"]}

    def _read_tuple(self, written: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self.read(written["items"]))

    def _read_namedtuple(self, written: dict[str, Any]) -> Any:
        kind = self._type(written["type"])
        # The text names a class, and this calls it: only what `encode` writes may be made.
        if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise Unserialisable(f"{written['type']} is no named tuple any more")
        return kind(*self.read(written["items"]))

    def _read_enum(self, written: dict[str, Any]) -> Any:
        kind = self._type(written["type"])
        if not issubclass(kind, enum.Enum) or written["name"] not in kind.__members__:
            raise Unserialisable(f"{written['type']} has no member {shown(written['name'])} any more")
        return kind[written["name"]]

    def _read_bag(self, written: dict[str, Any]) -> Any:
        kind = self._type(written["type"])
        if kind not in _BAGS:
            raise Unserialisable(f"{written['type']} is no namespace")
        return kind(**self._fields(written["fields"]))

    def _read_defaultdict(self, written: dict[str, Any]) -> Any:
        makes = None if written["makes"] is None else self._type(written["makes"])
        if makes is not None and makes not in _FACTORIES and not self._is_callers(makes, written["makes"]):
            raise Unserialisable(f"{written['makes']} is no class that a defaultdict may make")
        return defaultdict(makes, self.read(written["items"]))

    def _is_callers(self, kind: type, name: str) -> bool:
        homes = (name.partition(":")[0], *self._homes)
        return kind.__module__ in homes and not _is_standard(kind.__module__)

    def _read_dataclass(self, written: dict[str, Any]) -> Any:
        kind = self._type(written["type"])
        if not dataclasses.is_dataclass(kind):
            raise Unserialisable(f"{written['type']} is no dataclass any more")
        made: Any = object.__new__(kind)  # type: ignore[arg-type]
        for field in dataclasses.fields(kind):
            if field.name in written["fields"]:
                entry = self.read(written["fields"][field.name])
            elif field.default_factory is not dataclasses.MISSING:
                entry = field.default_factory()
            elif field.default is not dataclasses.MISSING:
                entry = field.default
            elif field.init:
                raise Unserialisable(f"{written['type']} has a field {field.name} now, and no value was kept for it")
            else:
                continue
            object.__setattr__(made, field.name, entry)
        if hasattr(made, "__dict__"):
            made.__dict__.update(self._fields(written["more"]))
        return made

    def _read_model(self, written: dict[str, Any]) -> Any:
        kind = self._type(written["type"])
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            raise Unserialisable(f"{written['type']} is no model any more")
        if "text" in written:
            return _model_of_json(kind, written)
        kept, extra, private = (self._fields(written[part]) for part in ("fields", "extra", "private"))
        fields: dict[str, Any] = {}
        for name, field in kind.model_fields.items():
            if name in kept:
                fields[name] = kept[name]
            elif field.is_required():
                raise Unserialisable(
                    f"{kind.__module__}:{kind.__qualname__} has a field {name} now, and no value was kept for it"
                )
            else:
                fields[name] = field.get_default(call_default_factory=True, validated_data=fields)
        made = kind.__new__(kind)
        made.__setstate__(
            {
                "__dict__": {**self._fields(written["more"]), **fields},
                "__pydantic_fields_set__": {name for name in written["set"] if name in fields or name in extra},
                "__pydantic_extra__": extra if kind.model_config.get("extra") == "allow" else None,
                "__pydantic_private__": _private_of(kind, private),
            }
        )
        return made

    def _type(self, name: Any) -> Any:
        if isinstance(name, list):
            model, *parameters = map(self._type, name)
            return model[tuple(parameters)]
        found = _find(name, self._homes)
        if found is None:
            raise Unserialisable(f"its type {shown(name)} is not there any more")
        return found


def _model_of_json(kind: type[BaseModel], written: dict[str, Any]) -> BaseModel:
    """The first versions wrote pydantic's own JSON."""
    try:
        return kind.model_validate_json(written["text"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise Unserialisable(f"{written['type']} has changed ({key}: {first['msg']})") from error


def _private_of(kind: type[BaseModel], kept: Mapping[str, Any]) -> dict[str, Any] | None:
    known = kind.__private_attributes__
    private = {name: kept[name] if name in kept else known[name].get_default() for name in known}
    return {name: entry for name, entry in private.items() if entry is not PydanticUndefined} if known else None


# --- classes by name -------------------------------------------------------------------------------------------------


def _find(name: str, homes: tuple[str, ...]) -> type | None:
    """
    The class `module:qualname`; where it is not there any more, the class of that name in one of *homes*.

    A dotted name means a nested class and nothing else that can be reached from the module, such as its own imports.
    """
    module, _, qualname = name.partition(":")
    for home in dict.fromkeys((module, *homes)):
        found: Any = _module(home)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and found.__qualname__ == qualname:
            return found
    return None


def _module(name: str) -> types.ModuleType | None:
    if name in sys.modules:
        return sys.modules[name]
    # A text imports no program, and of the standard library nothing that the script did not import itself.
    if _is_standard(name) or name.endswith("__main__"):
        return None
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names
