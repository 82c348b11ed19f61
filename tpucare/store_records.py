"""
Records as JSON text and back, by the types of `memory` and `model` themselves: a field added there needs nothing here.

A field that this version does not know is dropped, one that is missing takes its default, so that neighbouring versions
read each other's stores. What does not fit the types at all is an error, never a guess.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from tpucare.errors import StoreCorrupt
from tpucare.memory import FleetRecord, Memory
from tpucare.model import Event

T = TypeVar("T")


class Codec(Generic[T]):
    """JSON of one record type. Instants become ISO 8601 text in UTC."""

    def __init__(self, record: type[T]) -> None:
        self._adapter = TypeAdapter(record)
        self._noun = record.__name__

    def encode(self, record: T) -> str:
        try:
            return self._adapter.dump_json(record).decode("utf-8")
        except PydanticSerializationError:
            # Lone surrogates: bytes of a worker that were no UTF-8 and were carried through. Worth keeping readable,
            # and certainly not worth ending the daemon for.
            return to_json(_printable(self._adapter.dump_python(record))).decode("utf-8")

    def decode(self, text: str, where: str) -> T:
        """Raises: StoreCorrupt: naming *where* the text lies and what does not fit."""
        try:
            return self._adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise StoreCorrupt(f"{where}: not a {self._noun} of this version ({key}: {first['msg']})") from error


MEMORY: Codec[Memory] = Codec(Memory)
FLEET: Codec[FleetRecord] = Codec(FleetRecord)
EVENT: Codec[Event] = Codec(Event)


def _printable(value: object) -> object:
    if isinstance(value, str):
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(entry) for entry in value]
    return value
