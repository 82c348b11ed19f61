"""
Store in one SQLite file: what is remembered of slots, fleets as last accepted, and the event log.

Intents must be on the disk before the call they announce, so every write is one transaction in a write-ahead log that
is synced at each commit. A file that cannot be trusted is refused and left alone: starting over silently would forget
launches and let two runs of one slot train at once. Who owns the folder is `owner`'s, the file's form `store_schema`'s.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from tpucare.adapters.state import owner as owners
from tpucare.adapters.state import schema as schema
from tpucare.adapters.state.store_lock import StoreLock
from tpucare.adapters.state.store_lock import holder as lock_holder
from tpucare.adapters.state.store_reading import (
    DEFAULT_NAME,
    SqliteReader,
    StoreReading,
    open_reader,
    store_path,
    translated,
)
from tpucare.adapters.state.store_records import EVENT, FLEET, MEMORY
from tpucare.model.errors import StoreError, StoreForeign
from tpucare.model.memory import FleetRecord, Memory, is_old
from tpucare.model.resources import Event

__all__ = [
    "DEFAULT_NAME",
    "SqliteReader",
    "SqliteStore",
    "accept_move",
    "holder",
    "open_reader",
    "open_store",
    "store_path",
]

EVENTS_KEPT = 100_000
EVENTS_KEPT_PER_SLOT = 1_000
# Trimming at each save would cost more than the save; so many events more than the limits are kept for a while.
_TRIM_EVERY = 500


def holder(folder: Path, name: str = DEFAULT_NAME) -> int | None:
    """Process id of whoever takes care of that store now, or None. Creates nothing."""
    return lock_holder(_lock_path(folder, name))


def open_store(
    folder: Path, *, machine_id: str, now: datetime, instance_id: str = "", name: str = DEFAULT_NAME
) -> SqliteStore:
    """
    The store *name* in the state folder *folder*, made when there is none, and locked until it is closed.

    instance_id: of the virtual machine; empty: there is none, or it is not told now, which refuses nothing

    Raises:
        StoreLocked: another process takes care of it.
        StoreForeign: made on another machine, or for another owner.
        StoreCorrupt: not a store of a version that this tpucare knows; left untouched.
        StoreFull: no room. StoreError: folder or file cannot be used.
    """
    fingerprint = owners.machine_fingerprint(machine_id, instance_id)
    store = _open_locked(folder, name, fingerprint, now)
    try:
        if not owners.is_same_machine(store.machine, fingerprint):
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
    A person said that the store moved to this machine, and that nobody uses it on the old one any more.

    The store counts as `lost` from then on: the old machine may have launched runs after the copy was taken.
    """
    fingerprint = owners.machine_fingerprint(machine_id, instance_id)
    with _open_locked(folder, name, fingerprint, now) as store:
        if not owners.is_same_machine(store.machine, fingerprint):
            store.take_over(fingerprint, now)


class SqliteStore(StoreReading):
    """ports.Store. Made by `open_store`, which has locked and checked the file."""

    def __init__(self, path: Path, lock: StoreLock, now: datetime) -> None:
        super().__init__(path)
        self._lock = lock
        with translated(path):
            self._connection = _connect(path)
        self._file = path.stat().st_ino
        self._untrimmed: dict[str, int] = {}
        self._lost: bool | None = None
        self.old = is_old(self.marked, now)

    @property
    def lost(self) -> bool:
        """As in the file, which only this object writes: asked for with every decision, it is read once."""
        if self._lost is None:
            self._lost = super().lost
        return self._lost

    def close(self) -> None:
        """Fold the log into the file and give the lock away. A second call does nothing."""
        super().close()
        self._lock.release()

    def mark(self, now: datetime) -> None:
        """It is cared for at that moment, and what it holds is what was done."""
        with self._transaction() as write:
            write.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('marked', ?)", (now.isoformat(),))

    def confirm(self) -> None:
        """A person said that what is listed is all there is."""
        with self._transaction() as write:
            write.execute("UPDATE meta SET value = '' WHERE key = 'lost'")
        self._lost, self.old = None, False

    def note_machine(self, fingerprint: str) -> None:
        """It lives where it did, of which more is known now than when that was written."""
        with self._transaction() as write:
            write.execute("UPDATE meta SET value = ? WHERE key = 'machine'", (fingerprint,))

    def take_over(self, fingerprint: str, now: datetime) -> None:
        """From now on this store lives on the machine of that fingerprint; see `accept_move`."""
        with self._transaction() as write:
            write.execute("UPDATE meta SET value = ? WHERE key = 'machine'", (fingerprint,))
            write.execute("UPDATE meta SET value = ? WHERE key = 'lost'", (now.isoformat(),))
        self._lost = None

    def save(self, changes: Mapping[str, Memory], events: Sequence[Event] = ()) -> None:
        """Memory of some slots, and the events that tell of it, in one transaction."""
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

    def drop(self, slot: str) -> None:
        """Forget a slot that ended; its events stay."""
        with self._transaction() as write:
            write.execute("DELETE FROM slots WHERE name = ?", (slot,))

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
        # SQLite goes on writing into a deleted file without a word; nothing of it would be there at the next start.
        try:
            in_place = self.path.stat().st_ino == self._file
        except OSError:
            in_place = False
        if not in_place:
            raise StoreError(f"{self.path}: deleted or replaced while in use; nothing more can be kept in it")


def _open_locked(folder: Path, name: str, fingerprint: str, now: datetime) -> SqliteStore:
    path = store_path(folder, name)
    owners.prepare_folder(folder)
    lock = StoreLock(_lock_path(folder, name))
    try:
        # Two first stores of one folder that are made at once must not each have an owner of its own.
        with owners.one_at_a_time(folder):
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
    with translated(path), contextlib.closing(schema.connect_read_only(path)) as connection:
        schema.check_version(connection, path)
        schema.check_pages(connection, path)


def _make(path: Path, name: str, fingerprint: str, now: datetime) -> None:
    """
    A new store under its name, complete or not at all.

    It is `lost` when its owner is older than it. The owner's file is written after the store (`_settle_owner`), so that
    a kill in between is not taken for a loss.
    """
    folder = path.parent
    owner = owners.read_owner(folder)
    known = owners.known_stores(folder)
    lost = owner is not None and (known is None or name in known)
    meta = {
        "owner": owner or owners.new_owner(),
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
        owners.sync_folder(folder)
    except OSError as error:
        raise StoreError(f"{path}: cannot be made: {error.strerror}") from error


def _set_aside_logs(path: Path, now: datetime) -> None:
    # A write-ahead log whose file is gone would be replayed into the new file.
    for suffix in ("-wal", "-shm"):
        left = path.with_name(path.name + suffix)
        if left.exists():
            left.rename(path.with_name(f"{path.name}{suffix}.left-{now:%Y%m%dT%H%M%S}"))


def _settle_owner(store: SqliteStore, folder: Path, name: str) -> None:
    inside, outside = store.owner, owners.read_owner(folder)
    if outside is None:
        owners.write_owner(folder, inside)
    elif outside != inside:
        raise StoreForeign(
            f"{store.path}: made for owner {inside}, but {folder / owners.OWNER_FILE} says {outside}; "
            "put the right one of the two files back"
        )
    owners.remember_store(folder, name)


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


def _lock_path(folder: Path, name: str) -> Path:
    return store_path(folder, name).with_suffix(".lock")


def _fleet_of(slot: str) -> str:
    """The fleet that a slot's name tells, for events of slots that are not (or no longer) remembered: `<fleet>-<i>`."""
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
