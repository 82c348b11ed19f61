"""
What a store file looks like, how an older one becomes a current one, and how a file that is none is told apart.

A file is judged without being touched: read-only, before anything opens it for writing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from tpucare.model.errors import StoreCorrupt, StoreError, StoreFull

APPLICATION_ID = 0x54505543  # "TPUC", shown by file(1)

# Entry n makes version n+1 out of version n. Never edited once released; a change of the schema is a new entry.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE slots (name TEXT PRIMARY KEY, fleet TEXT NOT NULL, memory TEXT NOT NULL)",
        "CREATE TABLE fleets (name TEXT PRIMARY KEY, record TEXT NOT NULL)",
        # AUTOINCREMENT: the number of a trimmed event is never given again, since readers ask for "after number n".
        "CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, slot TEXT NOT NULL, fleet TEXT NOT NULL,"
        " event TEXT NOT NULL)",
        "CREATE INDEX events_by_slot ON events (slot, number)",
        "CREATE INDEX events_by_fleet ON events (fleet, number)",
    ),
    # What the Python door's callbacks hand on from node to node, by slot; see `contexts`.
    ("CREATE TABLE contexts (slot TEXT PRIMARY KEY, context TEXT NOT NULL)",),
)

VERSION = len(MIGRATIONS)

# Only a person with a SQLite shell on the file makes anybody wait: readers and the writer never block each other.
BUSY_SECONDS = 5.0

# A quota (EDQUOT) or a file size limit (EFBIG) arrives as a failed write, not as SQLITE_FULL.
_NO_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
REMEDY = "it is left as it is: move it (with its -wal and -shm) away and start again; nodes are adopted by their labels"


def corrupt(path: Path, what: str) -> StoreCorrupt:
    """The one line that a person reads about a file that is refused."""
    return StoreCorrupt(f"{path}: {what}; {REMEDY}")


def check_header(path: Path) -> None:
    """
    Tell a store from any other file by its first 100 bytes.

    Raises: StoreCorrupt: another kind of file, another program's database, or cut short.
    Source: sqlite.org/fileformat2.html, "The Database Header": magic at 0, application id at 68, both big-endian.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    if len(header) < _HEADER_BYTES:
        raise corrupt(path, f"cut short, {len(header)} bytes are left")
    if not header.startswith(_MAGIC):
        raise corrupt(path, "not a SQLite file")
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise corrupt(path, "a SQLite file, but not a store of tpucare")


def connect_read_only(path: Path) -> sqlite3.Connection:
    """
    A connection that writes nothing and creates nothing.

    Without a write-ahead log nobody has the file open: SQLite is then told that it is immutable, since it would
    otherwise make a log of its own beside it. With one, the log is read too, and its writer is not disturbed.
    """
    log = path.with_name(path.name + "-wal")
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro{'' if log.exists() else '&immutable=1'}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_SECONDS,
    )


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of a store. Raises: StoreCorrupt: none that this version knows."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise StoreCorrupt(
            f"{path}: schema version {version} of a newer tpucare, and this one knows up to {VERSION}; use the newer "
            "one, or move the file (with its -wal and -shm) away: nodes are then adopted by their labels"
        )
    if version < 1:
        raise corrupt(path, f"schema version {version} never existed")
    return version


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Raises: StoreCorrupt: SQLite finds the file damaged; a full walk, about 0.1 s per 100 MB."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise corrupt(path, f"damaged ({' '.join(str(verdict).split())})")


def migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Bring the schema to the newest version, each step in a transaction: a kill leaves a whole version."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    for number, statements in enumerate(migrations[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def translate(error: sqlite3.Error, path: Path) -> StoreError:
    """The error of ours that tells a person what to do about SQLite's."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    if code in _NO_ROOM:
        return StoreFull(
            f"{path}: no room to write ({error}): disk full, over quota or failing; the change was not made"
        )
    if code & 0xFF in _DAMAGED or code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return corrupt(path, f"damaged ({error})")
    if code & 0xFF == sqlite3.SQLITE_BUSY:
        return StoreError(f"{path}: another program keeps the store locked ({error}); close it")
    return StoreError(f"{path}: {error}")
