"""
What each process learned of markets, one file per store in the folder `markets` of the state folder.

Each file is replaced as a whole and written by the holder of its store alone; others read it. It is advice, not memory:
a file that is missing, damaged or of another version costs knowledge, never a node, so none of this is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, unquote

from pydantic import TypeAdapter, ValidationError

from tpucare.adapters.state import folder as state_folder
from tpucare.model.errors import StoreError
from tpucare.model.local_files import replace_file
from tpucare.model.markets import Experience

FOLDER = "markets"
# Of one store: the catalogue has fewer than a thousand markets of some hundred bytes each.
FILE_LIMIT_BYTES = 4 << 20
Markets = Mapping[str, Mapping[str, Experience]]
_ADAPTER: TypeAdapter[dict[str, dict[str, Experience]]] = TypeAdapter(dict[str, dict[str, Experience]])


class MarketFiles:
    """`ports.MarketKnowledge` of the store *store* in *state*. Projects, then markets, by name."""

    def __init__(self, state: Path, store: str) -> None:
        self._folder, self._own = state / FOLDER, f"{quote(store, safe='')}.json"

    def own(self) -> Markets:
        """What this store learned."""
        return _read(self._folder / self._own)

    def of_others(self) -> list[Markets]:
        """What the other stores of the folder learned."""
        return [_read(path) for path in _files(self._folder) if path.name != self._own]

    def save(self, markets: Markets) -> None:
        """Replace what this store learned. A full disk loses the newest of it."""
        try:
            state_folder.prepare_folder(self._folder)
            replace_file(self._folder / self._own, encode_markets(markets), durable=False)
        except (OSError, StoreError):
            return


def read_markets(state: Path) -> dict[str, Markets]:
    """What each store of *state* learned, by the store's name."""
    return {unquote(path.stem): _read(path) for path in _files(state / FOLDER)}


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    except OSError:
        return []


def _read(path: Path) -> Markets:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_LIMIT_BYTES + 1)
    except OSError:
        return {}
    return decode_markets(content) if len(content) <= FILE_LIMIT_BYTES else {}


def encode_markets(markets: Markets) -> bytes:
    return _ADAPTER.dump_json({project: dict(known) for project, known in markets.items()})


def decode_markets(content: bytes) -> Markets:
    """Nothing, where *content* is no such file of this version; without markets whose values nothing can have given."""
    try:
        read = _ADAPTER.validate_json(content)
    except ValidationError:
        return {}
    return {
        project: {name: one for name, one in learned.items() if _is_possible(one)} for project, learned in read.items()
    }


def _is_possible(experience: Experience) -> bool:
    """Whether each sum is a number of at least 0, and each instant has a time zone."""
    values = [getattr(experience, field.name) for field in fields(experience)]
    sums = [value for value in values if isinstance(value, float)]
    instants = [value for value in values if isinstance(value, datetime)]
    return all(math.isfinite(value) and value >= 0 for value in sums) and all(at.tzinfo is not None for at in instants)
