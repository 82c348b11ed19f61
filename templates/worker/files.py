"""
Files of a run, written so that neither a full disk nor a flood of output ends it: the log in segments, small files
atomically.

Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

RESERVE = "reserve"
# In a run's folder: how often to save, as tpucare advises, and what a save costs, as the run measured it.
CADENCE, SAVES = "cadence", "saves"
# The environment that this run stored for later nodes, or why it did not.
ARCHIVE = "archive"
# The beginning of the runner's own notice of a maintenance.
MAINTENANCE = "maintenance: "


def write_whole(path: str, content: str, durable: bool = False) -> bool:
    """
    Write a file so that a reader sees the old or the new content. False: it could not be written.

    A run's folder has a reserve file; the first write on a full disk deletes it and tries again.
    """
    for attempt in (1, 2):
        temporary = f"{path}.{os.getpid()}"
        try:
            with open(temporary, "w", encoding="utf-8") as stream:
                stream.write(content)
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())
            os.replace(temporary, path)
        except OSError as error:
            remove(temporary)
            reserve = os.path.join(os.path.dirname(path), RESERVE)
            if attempt == 1 and error.errno in (errno.ENOSPC, errno.EDQUOT) and remove(reserve):
                continue
            return False
        return True
    return False


def read_text(path: str, limit: int = 1 << 16) -> str:
    """The first *limit* bytes as text; empty if there is no such file."""
    try:
        with open(path, "rb") as stream:
            return stream.read(limit).decode(errors="replace")
    except OSError:
        return ""


def was_asked_to_end(folder: str) -> bool:
    """True if the run was asked to end, or to save because its end is near. A notice of maintenance does not count."""
    notices = [line.partition(" ")[2] for line in read_text(os.path.join(folder, "notice")).splitlines()]
    return os.path.exists(os.path.join(folder, "stopped")) or any(not n.startswith(MAINTENANCE) for n in notices)


def read_pairs(arguments: list[str]) -> dict[str, str]:
    """Arguments of the form `name=value`, tpucare's orders: reading JSON would take a third of a start."""
    return dict(argument.split("=", 1) for argument in arguments)


def read_environment(folder: str) -> dict[str, str]:
    """The job's variables and secrets, from the file `env`, where NULs separate them."""
    with open(os.path.join(folder, "env"), "rb") as stream:
        return read_pairs([os.fsdecode(pair) for pair in stream.read().split(b"\0") if pair])


def to_json(values: Mapping[str, str | int | float | bool | None]) -> str:
    """One flat object as JSON, without importing `json`. The caller inserts nested objects."""
    return "{" + ", ".join(f"{_quoted(name)}: {_literal(value)}" for name, value in values.items()) + "}"


def _literal(value: str | int | float | bool | None) -> str:
    if isinstance(value, str):
        return _quoted(value)
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else repr(value)
    )


def _quoted(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")
    codes = [units[place] << 8 | units[place + 1] for place in range(0, len(units), 2)]
    return (
        '"'
        + "".join(chr(code) if 32 <= code < 127 and code not in (34, 92) else f"\\u{code:04x}" for code in codes)
        + '"'
    )


def newest_checkpoint(path: str) -> int | None:
    """Newest complete step in a local folder: orbax renames a complete one to its number, digits alone."""
    try:
        names = os.listdir(path) if path else []
    except OSError:
        return None
    steps = [(int(name), name) for name in names if name.isdigit() and name.isascii() and len(name) < 19]
    return next((step for step, name in sorted(steps, reverse=True) if os.path.isdir(os.path.join(path, name))), None)


def segments(folder: str) -> list[tuple[int, str, int]]:
    """Parts of a log, oldest first: offset in the whole log, path, size. `log` is a link to the last one."""
    found = []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        stem, _, start = entry.name.partition(".")
        if stem == "log" and start.isdigit():
            try:
                found.append((int(start), entry.path, entry.stat().st_size))
            except OSError:
                continue  # The runner dropped it since the folder was read.
    return sorted(found)


def log_end(folder: str) -> int:
    """Number of bytes ever written to the log."""
    parts = segments(folder)
    return parts[-1][0] + parts[-1][2] if parts else 0


def read_log(folder: str, start: int, end: int) -> tuple[int, bytes]:
    """(real start, bytes) of the log between two of its offsets; the oldest bytes may be dropped already."""
    pieces: list[bytes] = []
    begin: int | None = None
    for first, path, size in segments(folder):
        low, high = max(start, first), min(end, first + size)
        if low >= high:
            continue
        try:
            with open(path, "rb") as stream:
                stream.seek(low - first)
                pieces.append(stream.read(high - low))
        except OSError:
            continue
        begin = low if begin is None else begin
    return (start if begin is None else begin), b"".join(pieces)


class BoundedLog:
    """
    An append-only log of at most two segments, each of half the limit; it never raises and never blocks on a full disk.

    A segment's name has its offset, so a reader's offset stays valid when an old segment is dropped.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._folder, self._half = folder, max(limit // 2, 4096)
        self._handle: int | None = None
        parts = segments(folder)
        self._start = parts[-1][0] if parts else 0
        self._lost = 0
        self.disk_was_full = False

    def write(self, data: bytes) -> None:
        if self._lost and self._append(b"\n[tpucare: %d bytes of the log were lost, the disk was full]\n" % self._lost):
            self._lost = 0
        if not self._append(data):
            self._lost += len(data)

    def _append(self, data: bytes) -> bool:
        try:
            handle = self._open()
            while data:
                data = data[os.write(handle, data) :]
            if os.fstat(handle).st_size >= self._half:
                self._rotate()
        except OSError as error:
            self.disk_was_full |= error.errno in (errno.ENOSPC, errno.EDQUOT)
            return False
        return True

    def _open(self) -> int:
        if self._handle is None:
            name = f"log.{self._start}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._handle = os.open(os.path.join(self._folder, name), flags, 0o600)
            link = os.path.join(self._folder, "log")
            remove(link + ".new")
            os.symlink(name, link + ".new")
            os.replace(link + ".new", link)
        return self._handle

    def _rotate(self) -> None:
        assert self._handle is not None
        self._start += os.fstat(self._handle).st_size
        os.close(self._handle)
        self._handle = None
        for _, path, _ in segments(self._folder)[:-1]:
            remove(path)


def remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
