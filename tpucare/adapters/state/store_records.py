"""
Records as JSON text and back, by the types of `memory` and `model` themselves: a field added there needs nothing here.

A field that this version does not know is dropped, one that is missing takes its default, so that neighbouring versions
read each other's stores. What does not fit the types at all is an error, never a guess.

SQLite notices a damaged page by its form alone: a digit in a memory could become another one, and say that a node was
never launched on. So what decisions rest on begins with a sum over the rest of its text; versions that know of none
drop it as they do any field that they do not know, and a text without one is taken as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from tpucare.adapters.state.schema import REMEDY
from tpucare.model.causes import Cause
from tpucare.model.errors import StoreCorrupt
from tpucare.model.memory import End, FleetRecord, Memory
from tpucare.model.resources import Event

T = TypeVar("T")


class Codec(Generic[T]):
    """
    JSON of one record type. Instants become ISO 8601 text in UTC. `summed`: the text begins with its sum.

    upgrade: what is read as this version would have written it
    """

    def __init__(self, record: type[T], *, summed: bool = False, upgrade: Callable[[T], T] | None = None) -> None:
        self._adapter = TypeAdapter(record)
        self._upgrade = upgrade
        self._noun, self._summed = record.__name__, summed

    def encode(self, record: T) -> str:
        text = self._encode(record)
        return f"{_SUM}{_sum_of(text[1:])}{_AFTER}{text[1:]}" if self._summed else text

    def _encode(self, record: T) -> str:
        try:
            return self._adapter.dump_json(record).decode("utf-8")
        except PydanticSerializationError:
            # Lone surrogates: bytes of a worker that were no UTF-8 and were carried through. Worth keeping readable,
            # and certainly not worth ending the daemon for.
            return to_json(_printable(self._adapter.dump_python(record))).decode("utf-8")

    def decode(self, text: str, where: str) -> T:
        """Raises: StoreCorrupt: naming *where* the text lies and what does not fit."""
        if self._summed and text.startswith(_SUM):
            rest = text[_HEAD:]
            if text[len(_SUM) : _HEAD] != f"{_sum_of(rest)}{_AFTER}":
                raise StoreCorrupt(f"{where}: damaged (its sum does not fit); {REMEDY}")
        try:
            record = self._adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise StoreCorrupt(f"{where}: not a {self._noun} of this version ({key}: {first['msg']})") from error
        return self._upgrade(record) if self._upgrade is not None else record


def _with_causes(memory: Memory) -> Memory:
    """Versions before causes kept that a slot was ended for its sweep's sake in the text alone, by how it begins."""
    if memory.end is End.DONE and memory.end_cause is Cause.UNRECORDED and memory.end_why.startswith("sweep "):
        return replace(memory, end_cause=Cause.SWEEP_OVER)
    return memory


def _sum_of(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


_SUM, _AFTER = '{"sum":"', '",'
_HEAD = len(_SUM) + 8 + len(_AFTER)

MEMORY: Codec[Memory] = Codec(Memory, summed=True, upgrade=_with_causes)
FLEET: Codec[FleetRecord] = Codec(FleetRecord, summed=True)
EVENT: Codec[Event] = Codec(Event)


def _printable(value: object) -> object:
    if isinstance(value, str):
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(entry) for entry in value]
    return value
