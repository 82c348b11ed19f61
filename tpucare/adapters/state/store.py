"""
The store, one SQLite file: the memory of each slot, fleets as last accepted, and the event log.

Intents must be on the disk before the call that they announce, so every write is one transaction in a write-ahead log
that is synced at each commit. A file that cannot be trusted is refused and left unchanged: starting over silently would
lose launches, and two runs of one slot could train at once. `folder` owns the owner id, `schema` the form of the file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from tpucare.adapters.state import folder as state_folder
from tpucare.adapters.state import schema
from tpucare.adapters.state.folder import DEFAULT_NAME, StoreLock, store_path
from tpucare.adapters.state.schema import REMEDY
from tpucare.model.errors import StoreCorrupt, StoreError, StoreForeign
from tpucare.model.local_files import sync_folder
from tpucare.model.memory import FleetRecord, Memory, is_old
from tpucare.model.resources import Event

# --- records as JSON text and back ------------------------------------------------------------------------------------
# By the types of `memory` and `resources` themselves: a field added there needs nothing here. A field that this version
# does not know is dropped, a missing field takes its default, so that neighbouring versions read each other's stores. A
# value that does not fit its type is an error, never a guess.
#
# SQLite notices a damaged page by its form alone: a digit in a memory could become another one, and deny that a node
# was launched on. So the records that decisions rest on begin with a checksum of the rest of their text. Versions that
# know of no checksum drop it like any unknown field, and a text without one is accepted.


T = TypeVar("T")


class Codec(Generic[T]):
    """
    JSON of one record type. Instants become ISO 8601 text in UTC. `summed`: the text begins with its sum.

    upgrade: brings the JSON object of an earlier version up to date, in place, and tells whether anything changed
    """

    def __init__(
        self, record: type[T], *, summed: bool = False, upgrade: Callable[[dict[str, Any]], bool] | None = None
    ) -> None:
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
            # Lone surrogates: bytes of a worker that were not UTF-8. They are kept readable, and do not end the daemon.
            return to_json(_printable(self._adapter.dump_python(record))).decode("utf-8")

    def decode(self, text: str, where: str) -> T:
        """Raises: StoreCorrupt: naming *where* the text lies and what does not fit."""
        if self._summed and text.startswith(_SUM):
            rest = text[_HEAD:]
            if text[len(_SUM) : _HEAD] != f"{_sum_of(rest)}{_AFTER}":
                raise StoreCorrupt(f"{where}: damaged (its sum does not fit); {REMEDY}")
        try:
            return self._adapter.validate_json(self._upgraded(text))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise StoreCorrupt(f"{where}: not a {self._noun} of this version ({key}: {first['msg']})") from error

    def _upgraded(self, text: str) -> str | bytes:
        if self._upgrade is None:
            return text
        try:
            raw = from_json(text)
        except ValueError:
            return text  # the adapter says what is wrong with it
        return to_json(raw) if isinstance(raw, dict) and self._upgrade(raw) else text


def _sum_of(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


_SUM, _AFTER = '{"sum":"', '",'
_HEAD = len(_SUM) + 8 + len(_AFTER)

MEMORY: Codec[Memory] = Codec(Memory, summed=True, upgrade=schema.upgrade_memory)
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


# --- reading: what the daemon and commands that only look (`tpucare status`) have in common ---------------------------
# A reader beside the daemon takes no lock, creates nothing in the folder and sees one consistent moment. Under SQLite's
# own lock of a reader the write-ahead log would grow without bound while a reader is stopped, and a writer that is
# stopped in the wrong place would keep readers out.


# A copy that its writer overtakes is made anew for so long. To be overtaken takes 4 MB of changes during a copy.
OVERTAKEN_SECONDS = 5.0
# A reader may open a file that no writer of this version has migrated yet.
_CONTEXTS_SINCE = 2


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
    """The reading half of reader and writer. Any thread may call; calls are served one at a time."""

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
        """The owner is older than this store, so an earlier store was lost, and no person has confirmed it yet."""
        return bool(self._meta("lost"))

    @property
    def marked(self) -> datetime | None:
        """When a process last cared for it; None: not known, as in stores of versions that did not note it."""
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
        """The context that the Python API keeps for *slot*, as `contexts` wrote it; None: it keeps none."""
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


# Stores that this process has open for writing, by device and inode. Any close of such a file drops all locks of the
# process on it (fcntl(2), record locks), so it is not copied here. `_open_guard` is held while a store is opened,
# closed or copied. A forked child has no store open.
_open_here: set[tuple[int, int]] = set()
_open_guard = threading.RLock()


def _forget_open_stores() -> None:
    global _open_guard
    _open_guard = threading.RLock()
    _open_here.clear()


os.register_at_fork(after_in_child=_forget_open_stores)


class SqliteReader(StoreReading):
    """
    One consistent view of a store, as of when it was opened or last refreshed.

    It reads a copy that is deleted at once; in the process that writes the store it reads the file itself.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._connection = self._open_view()

    def refresh(self) -> None:
        """Open a new view, as of now."""
        with self._guard:
            self._connection.close()
            self._connection = self._open_view()

    def _open_view(self) -> sqlite3.Connection:
        until = time.monotonic() + OVERTAKEN_SECONDS
        while True:
            try:
                with _open_guard:
                    return self._begin()
            except schema.Overtaken:
                if time.monotonic() > until:
                    raise

    def _begin(self) -> sqlite3.Connection:
        if not self.path.exists():
            raise StoreError(f"{self.path}: no store here; has a daemon run with this state folder?")
        if _file_id(self.path) in _open_here:
            return _begun(self.path, self.path)
        schema.check_header(self.path)
        try:
            with schema.copied(self.path) as copy:
                return _begun(copy, self.path)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be copied to be read: {error.strerror}") from error


def _begun(file: Path, path: Path) -> sqlite3.Connection:
    """A view of *file*, which errors call *path*."""
    with translated(path):
        connection = schema.connect_to_read(file)
        try:
            connection.execute("BEGIN")
            schema.check_version(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _file_id(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


# --- opening and writing: one process per store, which holds its lock -------------------------------------------------

__all__ = [
    "DEFAULT_NAME",
    "SqliteReader",
    "SqliteStore",
    "accept_move",
    "open_reader",
    "open_store",
]

EVENTS_KEPT = 100_000
EVENTS_KEPT_PER_SLOT = 1_000
# Trimming at each save would cost more than the save; so many events more than the limits are kept for a while.
_TRIM_EVERY = 500


def open_store(
    folder: Path, *, machine_id: str, now: datetime, instance_id: str = "", name: str = DEFAULT_NAME
) -> SqliteStore:
    """
    The store *name* in the state folder *folder*, made when there is none, and locked until it is closed.

    instance_id: of the virtual machine; empty: it has none, or cannot be asked now, which refuses nothing

    Raises:
        StoreLocked: another process holds it.
        StoreForeign: it was made on another machine, or for another owner.
        StoreCorrupt: it is no store of a version that this tpucare knows; the file is left unchanged.
        StoreFull: the disk is full. StoreError: the folder or file cannot be used.
    """
    fingerprint = state_folder.machine_fingerprint(machine_id, instance_id)
    store = _open_locked(folder, name, fingerprint, now)
    try:
        if not state_folder.is_same_machine(store.machine, fingerprint):
            raise StoreForeign(
                f"{store.path}: made on another machine, and two daemons with one owner would fight; "
                "stop the one there for good, then run `tpucare confirm --moved` here"
            )
        if instance_id and store.machine != fingerprint:
            store.note_machine(fingerprint)
    except BaseException:
        store.close()
        raise
    return store


def accept_move(
    folder: Path, *, machine_id: str, now: datetime, instance_id: str = "", name: str = DEFAULT_NAME
) -> None:
    """
    Accept this machine as the home of the store: a person said that no daemon uses it on the old machine any more.

    The store counts as `lost` from then on: the old machine may have launched runs after the copy was made.
    """
    fingerprint = state_folder.machine_fingerprint(machine_id, instance_id)
    with _open_locked(folder, name, fingerprint, now) as store:
        if not state_folder.is_same_machine(store.machine, fingerprint):
            store.take_over(fingerprint, now)


class SqliteStore(StoreReading):
    """ports.Store. Made by `open_store`, which locks and checks the file."""

    def __init__(self, path: Path, lock: StoreLock, now: datetime) -> None:
        super().__init__(path)
        self._lock = lock
        with _open_guard, translated(path):
            self._connection = _connect(path)
            self._file = _file_id(path)
            _open_here.add(self._file)
        self._untrimmed: dict[str, int] = {}
        self._lost: bool | None = None
        self.old = is_old(self.marked, now)

    @property
    def lost(self) -> bool:
        """As in the file, which only this object writes; read once, since every decision asks for it."""
        if self._lost is None:
            self._lost = super().lost
        return self._lost

    def close(self) -> None:
        """Fold the log into the file and give the lock away. A second call does nothing."""
        if self._lock.is_held:
            with _open_guard:
                super().close()
                _open_here.discard(self._file)
            self._lock.release()

    def mark_current(self, now: datetime) -> None:
        """Record a heartbeat: the store was current at *now*."""
        with self._transaction() as write:
            write.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('marked', ?)", (now.isoformat(),))

    def confirm(self) -> None:
        """Record that a person confirmed the listing: no other node of ours exists."""
        with self._transaction() as write:
            write.execute("UPDATE meta SET value = '' WHERE key = 'lost'")
        self._lost, self.old = None, False

    def note_machine(self, fingerprint: str) -> None:
        """Record the fingerprint of the same machine, which now includes its instance id."""
        with self._transaction() as write:
            write.execute("UPDATE meta SET value = ? WHERE key = 'machine'", (fingerprint,))

    def take_over(self, fingerprint: str, now: datetime) -> None:
        """Record another machine as the home of this store; see `accept_move`."""
        with self._transaction() as write:
            write.execute("UPDATE meta SET value = ? WHERE key = 'machine'", (fingerprint,))
            write.execute("UPDATE meta SET value = ? WHERE key = 'lost'", (now.isoformat(),))
        self._lost = None

    def save(self, changes: Mapping[str, Memory], events: Sequence[Event] = ()) -> None:
        """Save the memory of some slots, and the events that report it, in one transaction."""
        slots = [(slot, memory.fleet, MEMORY.encode(memory)) for slot, memory in changes.items()]
        lines = [(event.slot, event.slot, _fleet_of(event.slot), EVENT.encode(event)) for event in events]
        if not slots and not lines:
            return
        with self._transaction() as write:
            write.executemany("INSERT OR REPLACE INTO slots (name, fleet, memory) VALUES (?, ?, ?)", slots)
            write.executemany(
                "INSERT INTO events (slot, fleet, event)"
                " VALUES (?, coalesce((SELECT fleet FROM slots WHERE name = ?), ?), ?)",
                lines,
            )
            untrimmed = _count(self._untrimmed, events)
            if sum(untrimmed.values()) >= _TRIM_EVERY:
                _trim(write, untrimmed)
                untrimmed = {}
        self._untrimmed = untrimmed

    def save_fleet(self, record: FleetRecord) -> None:
        text = FLEET.encode(record)
        with self._transaction() as write:
            write.execute("INSERT OR REPLACE INTO fleets (name, record) VALUES (?, ?)", (record.name, text))

    def save_context(self, slot: str, text: str) -> None:
        """Keep the context of a slot in place of the one before."""
        with self._transaction() as write:
            write.execute("INSERT OR REPLACE INTO contexts (slot, context) VALUES (?, ?)", (slot, text))

    def drop_context(self, slot: str) -> None:
        with self._transaction() as write:
            write.execute("DELETE FROM contexts WHERE slot = ?", (slot,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard, translated(self.path):
            self._check_in_place()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # after some errors SQLite has rolled back by itself
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise

    def _check_in_place(self) -> None:
        # SQLite writes on into a deleted file without an error, and the next start would find nothing of it.
        try:
            in_place = _file_id(self.path) == self._file
        except OSError:
            in_place = False
        if not in_place:
            raise StoreError(f"{self.path}: deleted or replaced while in use; nothing more can be kept in it")


def _open_locked(folder: Path, name: str, fingerprint: str, now: datetime) -> SqliteStore:
    path = store_path(folder, name)
    state_folder.prepare_folder(folder)
    lock = StoreLock(state_folder.lock_path(folder, name))
    try:
        return _open_settled(path, lock, name, fingerprint, now)
    except BaseException:
        lock.release()
        raise


def _open_settled(path: Path, lock: StoreLock, name: str, fingerprint: str, now: datetime) -> SqliteStore:
    if not path.exists():
        _make(path, name, fingerprint, now)
    _check(path)
    store = SqliteStore(path, lock, now)
    try:
        _settle_owner(store, path.parent, name)
    except BaseException:
        store.close()
        raise
    return store


def _check(path: Path) -> None:
    schema.check_header(path)
    with translated(path), contextlib.closing(schema.connect_to_read(path)) as connection:
        schema.check_version(connection, path)
        schema.check_pages(connection, path)


def _make(path: Path, name: str, fingerprint: str, now: datetime) -> None:
    """
    A new store under its name, complete or not at all.

    It is `lost` when the folder had an owner already, and no list of its stores or one that names this store. So a new
    folder gets its list before its owner: a process that is killed or stopped after either has lost nothing. No lock is
    held: a process that is stopped here keeps no other one from its own store.
    """
    folder = path.parent
    owner = state_folder.read_owner(folder)
    known = state_folder.known_stores(folder)
    lost = owner is not None and (known is None or name in known)
    if owner is None:
        state_folder.remember_store(folder)
        owner = state_folder.settle_owner(folder, state_folder.new_owner())
    meta = {
        "owner": owner,
        "machine": fingerprint,
        "lost": now.isoformat() if lost else "",
        "marked": now.isoformat(),
    }
    _set_aside_logs(path, now)
    scratch = path.with_name(path.name + ".new")
    try:
        scratch.unlink(missing_ok=True)
        scratch.touch(mode=0o600, exist_ok=False)
        with translated(path), contextlib.closing(_connect(scratch)) as connection:
            connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta.items())
        scratch.rename(path)
        sync_folder(folder)
    except OSError as error:
        raise StoreError(f"{path}: cannot be made: {error.strerror}") from error


def _set_aside_logs(path: Path, now: datetime) -> None:
    # A write-ahead log whose file is gone would be replayed into the new file.
    for suffix in ("-wal", "-shm"):
        left = path.with_name(path.name + suffix)
        if left.exists():
            left.rename(path.with_name(f"{path.name}{suffix}.left-{now:%Y%m%dT%H%M%S}"))


def _settle_owner(store: SqliteStore, folder: Path, name: str) -> None:
    inside = store.owner
    outside = state_folder.read_owner(folder) or state_folder.settle_owner(folder, inside)
    if outside != inside:
        raise StoreForeign(
            f"{store.path}: made for owner {inside}, but {folder / state_folder.OWNER_FILE} says {outside}; "
            "put the right one of the two files back"
        )
    if name not in (state_folder.known_stores(folder) or ()):
        state_folder.remember_store(folder, name)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=schema.BUSY_SECONDS)
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {16 << 20}")
        schema.migrate(connection)
        # SQLite opens what it may only read without a word: better refused now than at the first intent.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA user_version = {schema.VERSION}")
        connection.execute("ROLLBACK")
    except BaseException:
        connection.close()
        raise
    return connection


def _fleet_of(slot: str) -> str:
    """The fleet by the name of a slot, `<fleet>-<i>`, for events of slots without a memory."""
    fleet, dash, number = slot.rpartition("-")
    return fleet if dash and number.isdecimal() else slot


def _count(counts: Mapping[str, int], events: Sequence[Event]) -> dict[str, int]:
    more = dict(counts)
    for event in events:
        more[event.slot] = more.get(event.slot, 0) + 1
    return more


def _trim(write: sqlite3.Connection, slots: Mapping[str, int]) -> None:
    write.executemany(
        "DELETE FROM events WHERE slot = ?1 AND number <="
        " (SELECT number FROM events WHERE slot = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)",
        [(slot, EVENTS_KEPT_PER_SLOT) for slot in slots],
    )
    write.execute(
        "DELETE FROM events WHERE number <= (SELECT number FROM events ORDER BY number DESC LIMIT 1 OFFSET ?)",
        (EVENTS_KEPT,),
    )
