"""
The reading half of the store: what the daemon and those who only look (`tpucare status`) have in common.

A reader stands beside a daemon that writes: it takes no lock, creates nothing and sees one consistent moment.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tpucare.adapters.state import owner as owners
from tpucare.adapters.state import schema as schema
from tpucare.adapters.state.store_records import EVENT, FLEET, MEMORY
from tpucare.model.errors import StoreError
from tpucare.model.memory import FleetRecord, Memory
from tpucare.model.resources import Event

DEFAULT_NAME = "tpucare"
# A reader meets files that no newer writer has opened yet.
_CONTEXTS_SINCE = 2


def store_path(folder: Path, name: str = DEFAULT_NAME) -> Path:
    """The file of a store; its `-wal` and `-shm` and its `.lock` lie beside it."""
    owners.check_store_name(name)
    return folder / f"{name}.sqlite"


def open_reader(folder: Path, *, name: str = DEFAULT_NAME) -> SqliteReader:
    """
    Read a store beside the daemon that writes it, or without one. Takes no lock, creates nothing.

    Raises: StoreError: there is none; StoreCorrupt: it cannot be read.
    """
    return SqliteReader(store_path(folder, name))


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Errors of SQLite leave the block as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise schema.translate(error, path) from error


class StoreReading:
    """What reader and writer have in common. Any thread may call, one at a time is served."""

    _connection: sqlite3.Connection

    def __init__(self, path: Path) -> None:
        self.path = path
        self._guard = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._guard:
            self._connection.close()

    @property
    def owner(self) -> str:
        """Label-safe id of this state folder, as the store noted it when it was made."""
        return self._meta("owner")

    @property
    def lost(self) -> bool:
        """The owner is older than this store: something was lost, and nobody confirmed it yet."""
        return bool(self._meta("lost"))

    @property
    def marked(self) -> datetime | None:
        """When somebody last took care of it; None: not known, as in stores of versions that did not note it."""
        rows = self._rows("SELECT value FROM meta WHERE key = 'marked'")
        try:
            at = datetime.fromisoformat(str(rows[0][0]))
        except (IndexError, ValueError):
            return None
        return at if at.tzinfo is not None else None

    @property
    def machine(self) -> str:
        """Fingerprint of the machine that this store lives on."""
        return self._meta("machine")

    def memories(self) -> dict[str, Memory]:
        """Memory of every slot, by slot name."""
        rows = self._rows("SELECT name, memory FROM slots ORDER BY name")
        return {slot: MEMORY.decode(text, f"{self.path}: slot {slot}") for slot, text in rows}

    def fleets(self) -> dict[str, FleetRecord]:
        """Fleets as last accepted, ended ones included, by name."""
        rows = self._rows("SELECT name, record FROM fleets ORDER BY name")
        records = {fleet: FLEET.decode(text, f"{self.path}: fleet {fleet}") for fleet, text in rows}
        for fleet, record in records.items():
            if record.name != fleet:
                raise schema.corrupt(self.path, f"the record of fleet {fleet} is that of {record.name}")
        return records

    def context(self, slot: str) -> str | None:
        """What the Python door keeps of a slot's context, as `contexts` wrote it."""
        if self._version() < _CONTEXTS_SINCE:
            return None
        rows = self._rows("SELECT context FROM contexts WHERE slot = ?", (slot,))
        return str(rows[0][0]) if rows else None

    def events(self, *, slot: str = "", after: int = 0, limit: int = 1000) -> list[tuple[int, Event]]:
        """Oldest first, with their numbers; *slot* may be a fleet's name."""
        where, names = (" AND (slot = ? OR fleet = ?)", (slot, slot)) if slot else ("", ())
        rows = self._rows(
            f"SELECT number, event FROM events WHERE number > ?{where} ORDER BY number LIMIT ?", (after, *names, limit)
        )
        return [(number, EVENT.decode(text, f"{self.path}: event {number}")) for number, text in rows]

    def last_events(self, *, slot: str = "", limit: int = 100) -> list[tuple[int, Event]]:
        """The newest *limit* events, still oldest first."""
        where, names = (" WHERE slot = ? OR fleet = ?", (slot, slot)) if slot else ("", ())
        rows = self._rows(f"SELECT number FROM events{where} ORDER BY number DESC LIMIT ?", (*names, limit))
        return self.events(slot=slot, after=rows[-1][0] - 1, limit=limit) if rows else []

    def _version(self) -> int:
        return int(self._rows("PRAGMA user_version")[0][0])

    def _meta(self, key: str) -> str:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        if not rows:
            raise schema.corrupt(self.path, f"no {key} is noted in it")
        return str(rows[0][0])

    def _rows(self, query: str, values: tuple[str | int, ...] = ()) -> list[tuple[Any, ...]]:
        with self._guard, translated(self.path):
            return self._connection.execute(query, values).fetchall()


class SqliteReader(StoreReading):
    """
    One consistent view of a store, as of when it was opened or last refreshed.

    Not for keeping open without `refresh`: as long as a view is held, the daemon's write-ahead log cannot shrink.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._connection = self._look()

    def refresh(self) -> None:
        """Look again: from now on the view is of this moment."""
        with self._guard:
            self._connection.close()
            self._connection = self._look()

    def _look(self) -> sqlite3.Connection:
        if not self.path.exists():
            raise StoreError(f"{self.path}: no store here; has a daemon run with this state folder?")
        schema.check_header(self.path)
        with translated(self.path):
            connection = schema.connect_read_only(self.path)
            try:
                connection.execute("BEGIN")
                schema.check_version(connection, self.path)
            except BaseException:
                connection.close()
                raise
        return connection
