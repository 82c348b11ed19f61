"""
The schema of a store file: its tables, its migrations, the checks before it is opened, and the copy that readers open.

A file is checked without a change to it: read-only, before it is opened for writing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import StoreCorrupt, StoreError, StoreFull
from tpucare.model.lifecycles import CreateState, NodeStatus, RunState

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
    # What the Python API's callbacks hand on from node to node, by slot; see `contexts`.
    ("CREATE TABLE contexts (slot TEXT PRIMARY KEY, context TEXT NOT NULL)",),
    # Memories tell of lifecycles (`upgrade_memory`): an earlier version would take a finished run for one that lives.
    (),
)

VERSION = len(MIGRATIONS)

# Only a person with a SQLite shell on the file keeps the writer waiting; readers open a copy.
BUSY_SECONDS = 5.0

# A quota (EDQUOT) or a file size limit (EFBIG) arrives as a failed write, not as SQLITE_FULL.
_NO_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_MEMORY = "/dev/shm"
_LOG_HEAD_BYTES, _INDEX_BYTES, _FOLDED_AT = 32, 132, 128
REMEDY = "it is left as it is: move it (with its -wal and -shm) away and start again; nodes are adopted by their labels"


def corrupt(path: Path, what: str) -> StoreCorrupt:
    """The error for a file that is refused: one line for a person."""
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


@contextlib.contextmanager
def copied(path: Path) -> Iterator[Path]:
    """
    A copy of a store as of one moment, deleted at the end of the block; an open connection to it stays valid.

    No lock is taken and no file made beside the store, so that a reader that is stopped at any instruction hinders no
    writer: under a reader's lock the log would grow without bound. Raises: Overtaken; OSError.
    """
    try:
        folder = _copy(path, None)
    except OSError:
        # The folder for temporary files may be full or read-only, and `status` is wanted then all the more.
        folder = _copy(path, _MEMORY)
    with folder:
        yield Path(folder.name, path.name)


def _copy(path: Path, parent: str | None) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="tpucare-read-", dir=parent)
    try:
        copy = Path(folder.name, path.name)
        before = _overwrites(path)
        shutil.copyfile(path, copy)
        # After the file: the log still holds every page that the writer folds into the file meanwhile.
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(_beside(path, "-wal"), _beside(copy, "-wal"))
        if _overwrites(path) != before:
            raise Overtaken(f"{path}: it is written to faster than it can be read; try again")
    except BaseException:
        folder.cleanup()
        raise
    return folder


class Overtaken(StoreError):
    """The writer overwrote what was being copied."""


def _overwrites(path: Path) -> object:
    """
    A value that changes before a writer overwrites anything that a copy begun now may need.

    A writer appends to its log, which harms no copy, until it folds the log into the file, or begins the log anew.
    Before it folds, it notes in the index of the log how far; before it begins anew, it writes another head.
    Source: sqlite.org/walformat.html: head of the log, 32 bytes; nBackfillAttempted at byte 128 of the index.
    """
    status = path.stat()
    try:
        with _beside(path, "-wal").open("rb") as log, _beside(path, "-shm").open("rb") as index:
            inodes = [os.fstat(file.fileno()).st_ino for file in (log, index)]
            return status.st_ino, *inodes, log.read(_LOG_HEAD_BYTES), index.read(_INDEX_BYTES)[_FOLDED_AT:]
    except FileNotFoundError:
        return status.st_ino, status.st_mtime_ns, status.st_size


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """
    A read-only connection: to a copy, or in the process that has the lock of the store.

    Without a log no process has the file open. It is then opened as immutable, since SQLite would otherwise make a log
    beside it.
    """
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro{'' if _beside(path, '-wal').exists() else '&immutable=1'}",
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
    """Our error for an error of SQLite, with what a person can do about it."""
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


# --- memories of earlier versions -------------------------------------------------------------------------------------
# They are JSON text, so no SQL statement brings them up to date: each is read as this version would have written it.


def upgrade_memory(memory: dict[str, Any]) -> bool:
    """
    Bring the JSON object of a Memory up to date, in place. Returns: whether anything had to change.

    Before version 3 of the schema creates, nodes and runs had booleans where they have a state now. Before causes were
    kept, only the beginning of a text told that a slot had been ended for its sweep's sake.
    """
    changed = False
    if memory.get("end") == "done" and not memory.get("end_cause") and memory.get("end_why", "").startswith("sweep "):
        memory["end_cause"], changed = Cause.SWEEP_OVER, True
    creates = [create for create in memory.get("creates", ()) if "state" not in create]
    nodes = [node for node in memory.get("nodes", ()) if "status" not in node]
    runs = [run for run in (memory.get("run"),) if run is not None and "state" not in run]
    for create in creates:
        create["state"] = _create_state(create)
        create["abandoned"] = create.get("superseded", False)
    for node in nodes:
        node["status"] = _node_status(node)
        node["requested"] = node.get("asked", False)
        node["delete"] = _delete_intent(node)
    for run in runs:
        run["state"] = _run_state(run)
        run["then_delete"] = run.get("then_delete") or None
    return changed or bool(creates or nodes or runs)


def _create_state(create: Mapping[str, Any]) -> CreateState:
    has_refusal = bool(create.get("refused"))
    if create.get("failed"):
        return CreateState.FAILED
    if create.get("unread"):
        return CreateState.UNREADABLE
    if create.get("accepted"):
        if create.get("operation"):
            return CreateState.RUNNING
        return CreateState.REFUSED if has_refusal else CreateState.AWAITED
    if create.get("lost"):
        return CreateState.IN_DOUBT if has_refusal else CreateState.ANSWER_LOST
    return CreateState.SENT


def _node_status(node: Mapping[str, Any]) -> NodeStatus:
    told = {
        "taken": NodeStatus.TAKEN,
        "revived": NodeStatus.REVIVED,
        "dead": NodeStatus.DEAD,
        "out_of_sight": NodeStatus.OUT_OF_SIGHT,
    }
    return next((status for name, status in told.items() if node.get(name)), NodeStatus.LIVE)


def _delete_intent(node: Mapping[str, Any]) -> dict[str, Any] | None:
    if node.get("delete_asked_at") is None:
        return None
    told = {"asked_at": "delete_asked_at", "why": "delete_why", "cause": "delete_cause", "next_at": "delete_next_at"}
    told |= {"accepted": "delete_accepted", "quiet": "delete_quiet"}
    delete = {name: node[old] for name, old in told.items() if old in node}
    return {**delete, "reason": node.get("delete_reason") or Reason.ASKED}


def _run_state(run: Mapping[str, Any]) -> RunState:
    is_asked_to_end = bool(run.get("stop_why"))
    if run.get("finished"):
        return RunState.FINISHED
    if run.get("stopped"):
        return RunState.STOPPED if is_asked_to_end else RunState.ENDED
    if is_asked_to_end:
        return RunState.STUCK if run.get("stuck") else RunState.STOPPING
    if run.get("over"):
        return RunState.OVER
    return RunState.RUNNING if run.get("complete") else RunState.LAUNCHING
