"""
What a `creation_callback` hands on from node to node, as text in the store and back to the same type.

A context outlives the process, so it has to be made of what can be written down: dataclasses, pydantic models, values
of JSON, and a few more that people put into them (tuples, sets, instants, paths, enums, bytes, namespaces). It is
written by what each value is, not by its annotation: `None` in a field that says `str` comes back as `None`. Types are
found again by module and name; one that is gone, or lacks a value that was never saved, is an error that says so, never
a guess. How single values are taken apart is `context_values`'; when contexts are read and written is `callbacks`'; the
file is the store's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import importlib
import json
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from tpucare.api.context_values import BY_NAME, SECRETS, Unserialisable, form_of, model_of, parts_of_model
from tpucare.model.errors import ConfigError
from tpucare.model.text import shown

# The key that marks a mapping which stands for something else; a context's own mapping with it is written as pairs.
TAG = "$"
_PLAIN = (bool, int, float, str)
_BAGS = (types.SimpleNamespace, argparse.Namespace)
_HOW = "use dataclasses, pydantic models, numbers, text, lists and mappings"


class ContextStore(Protocol):
    """Where texts are kept by slot: the store."""

    def context(self, slot: str) -> str | None: ...

    def save_context(self, slot: str, text: str) -> None: ...

    def drop_context(self, slot: str) -> None: ...


class StoredContexts:
    """
    Contexts by slot. As thread-safe as its shelf.

    homes: modules in which types are looked for that are not where they were, such as those of the callbacks: a script
    that is run one day and imported the next has its types in `__main__` first, and elsewhere then.
    """

    def __init__(self, shelf: ContextStore, homes: Iterable[str] = ()) -> None:
        self._shelf, self._homes = shelf, tuple(homes)

    def get(self, slot: str) -> object | None:
        """Raises: ConfigError: what was kept is of a type that is gone or changed."""
        text = self._shelf.context(slot)
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
        self._shelf.save_context(slot, text)

    def copy(self, ctx: object) -> object:
        """A copy that shares nothing with *ctx*. Raises: ConfigError."""
        try:
            return copy.deepcopy(ctx)
        except Exception as error:
            raise ConfigError(f"the context ({type(ctx).__name__}) cannot be copied: {error}") from error

    def drop(self, slot: str) -> None:
        """The next node of *slot* begins without one."""
        self._shelf.drop_context(slot)


# --- to text ---------------------------------------------------------------------------------------------------------


def encode(ctx: object) -> str:
    """Raises: Misfit: naming the part that cannot be written down. RecursionError: it contains itself."""
    return json.dumps(_written(ctx, "ctx"))


def _written(value: Any, path: str) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return {TAG: "enum", "type": _name_of(type(value), path), "name": value.name}
    for kind in (str, int, float):
        # Numbers of numpy, a host's name that is bound to an attempt: their plain value is what lasts.
        if isinstance(value, kind):
            return kind(value)
    if type(value) is list:
        return [_written(entry, f"{path}[{index}]") for index, entry in enumerate(value)]
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
    if isinstance(value, tuple):
        return _written_tuple(value, path)
    if type(value) is defaultdict:
        return _written_defaultdict(value, path)
    if named := form_of(value):
        name, form = named
        return {TAG: name, "value": _written(form.write(value), path)}
    if isinstance(value, SECRETS):
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
    parts = {part: _written_fields(held, path) for part, held in parts_of_model(value).items()}
    return {TAG: "model", "type": _model_name(type(value), path), **parts, "set": sorted(value.model_fields_set)}


def _written_defaultdict(value: defaultdict[Any, Any], path: str) -> dict[str, Any]:
    makes = value.default_factory
    if not (makes is None or isinstance(makes, type)):
        raise Unserialisable(
            f"{path} is a defaultdict of a function, which cannot be written down: give it a class, as int"
        )
    name = None if makes is None else _name_of(makes, path)
    return {TAG: "defaultdict", "makes": name, "items": _written(dict(value), path)}


def _written_tuple(value: tuple[Any, ...], path: str) -> dict[str, Any]:
    items = [_written(entry, f"{path}[{index}]") for index, entry in enumerate(value)]
    if type(value) is tuple:
        return {TAG: "tuple", "items": items}
    if not hasattr(value, "_fields"):
        raise Unserialisable(f"{path} is a {type(value).__name__}, a tuple of its own kind: use a NamedTuple")
    return {TAG: "namedtuple", "type": _name_of(type(value), path), "items": items}


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
    """Of a generic model with parameters: the names of the model and of each of them, since it has none of its own."""
    generic = getattr(kind, "__pydantic_generic_metadata__", None)
    if generic and generic["origin"] is not None:
        return [_name_of(generic["origin"], path), *(_model_name(each, path) for each in generic["args"])]
    if not isinstance(kind, type) or isinstance(kind, types.GenericAlias):
        raise Unserialisable(
            f"{path} is a model with the parameter {kind}, which has no name: make a subclass of it that has"
        )
    return _name_of(kind, path)


# --- from text -------------------------------------------------------------------------------------------------------


def decode(text: str, homes: Iterable[str] = ()) -> object:
    """Raises: Misfit: a type that is gone or changed, or a text that nobody here wrote."""
    try:
        return _Reader(tuple(homes)).read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unserialisable(f"it cannot be read ({type(error).__name__}: {_first_line(error)})") from error


class _Reader:
    def __init__(self, homes: tuple[str, ...]) -> None:
        self._homes = homes

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.read(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.read(entry) for key, entry in value.items()}
        tag = value[TAG]
        if tag in BY_NAME:
            return BY_NAME[tag].read(self.read(value["value"]))
        return getattr(self, f"_read_{tag}")(value)

    def _read_mapping(self, written: dict[str, Any]) -> dict[Any, Any]:
        return {self.read(key): self.read(entry) for key, entry in written["pairs"]}

    def _read_tuple(self, written: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self.read(entry) for entry in written["items"])

    def _read_namedtuple(self, written: dict[str, Any]) -> Any:
        items, kind = [self.read(entry) for entry in written["items"]], self._type(written)
        # The text names a class, and this calls it: nothing but what was written may be made so.
        if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise Unserialisable(f"{written['type']} is no named tuple any more")
        return kind(*items)

    def _read_enum(self, written: dict[str, Any]) -> Any:
        kind = self._type(written)
        if not issubclass(kind, enum.Enum) or written["name"] not in kind.__members__:
            raise Unserialisable(f"{written['type']} has no member {shown(written['name'])} any more")
        return kind[written["name"]]

    def _read_bag(self, written: dict[str, Any]) -> Any:
        kind = self._type(written)
        if kind not in _BAGS:
            raise Unserialisable(f"{written['type']} is no namespace")
        return kind(**{name: self.read(entry) for name, entry in written["fields"].items()})

    def _read_defaultdict(self, written: dict[str, Any]) -> Any:
        makes = None if written["makes"] is None else self._named(written["makes"])
        return defaultdict(makes, self.read(written["items"]))

    def _read_model(self, written: dict[str, Any]) -> Any:
        kind = self._type(written)
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            raise Unserialisable(f"{written['type']} is no model any more")
        if "text" in written:
            return self._read_model_text(kind, written)
        parts = {
            part: {name: self.read(entry) for name, entry in written[part].items()}
            for part in ("fields", "more", "extra", "private")
        }
        return model_of(kind, parts, written["set"])

    def _read_model_text(self, kind: type[BaseModel], written: dict[str, Any]) -> Any:
        """As it was written at first, in pydantic's own JSON."""
        try:
            return kind.model_validate_json(written["text"])
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise Unserialisable(f"{written['type']} has changed ({key}: {first['msg']})") from error

    def _read_dataclass(self, written: dict[str, Any]) -> Any:
        """As pickle does: values as they were; `__init__` and `__post_init__` have had their turn."""
        kind = self._type(written)
        if not dataclasses.is_dataclass(kind):
            raise Unserialisable(f"{written['type']} is no dataclass any more")
        made: Any = object.__new__(kind)  # type: ignore[arg-type]
        for field in dataclasses.fields(kind):
            if field.name in written["fields"]:
                entry = self.read(written["fields"][field.name])
            elif (fallback := _default_of(field)) is not None:
                entry = fallback()
            elif field.init:
                raise Unserialisable(f"{written['type']} has a field {field.name} now, of which no value was kept")
            else:
                continue
            object.__setattr__(made, field.name, entry)
        if hasattr(made, "__dict__"):
            made.__dict__.update({name: self.read(entry) for name, entry in written["more"].items()})
        return made

    def _type(self, written: dict[str, Any]) -> Any:
        return self._named(written["type"])

    def _named(self, name: Any) -> Any:
        if isinstance(name, list):
            model, *parameters = map(self._named, name)
            return model[tuple(parameters)]
        found = _find(name, self._homes)
        if found is None:
            raise Unserialisable(f"its type {shown(name)} is not there any more")
        return found


def _default_of(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is not dataclasses.MISSING:
        default = field.default
        return lambda: default
    return None


def _find(name: str, homes: tuple[str, ...]) -> type | None:
    """The class under `module:qualname`; where it is not there any more, under that name in one of *homes*."""
    module, _, qualname = name.partition(":")
    for home in dict.fromkeys((module, *homes)):
        found: Any = _module(home)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type):
            return found
    return None


def _module(name: str) -> types.ModuleType | None:
    # Only modules of the user's own environment: the text lies in a folder that nobody else can write to.
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def _first_line(error: Exception) -> str:
    return shown((str(error).splitlines() or [""])[0])
