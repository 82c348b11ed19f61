"""
Logs that survive the node: the tails from probes, kept per slot, attempt and worker in the state folder.

One file per worker of an attempt; the runs of an attempt follow one another, each under a line with its token. Bytes
from a worker are not trusted: their size is limited, and control sequences of terminals are removed. Files have mode
0600, for a job may print secrets. Fetching the bytes is left to `launcher`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from tpucare.model.local_files import replace_file
from tpucare.model.text import plain_lines

DEFAULT_LIMIT_BYTES = 32 << 20
# All slots together, removed ones included: a fifth of the smallest disk that docs/installing.md recommends.
TOTAL_LIMIT_BYTES = 2 << 30
# A token has at most 138 characters, an offset 19. Padded to one length, so that a short text overwrites a longer one.
POSITION_BYTES = 192

_NAME = re.compile(r"a(\d+)-w(\d+)\.log")


class LogPosition(NamedTuple):
    """The end of a worker's kept log: the run, and the offset of the next byte."""

    token: str = ""
    offset: int = 0


class LogKeeper:
    """
    Keeps at most *limit_bytes_per_slot* of each slot, removing the oldest attempts first, and *limit_bytes* of all
    slots, removing the files with the oldest last line first. Thread-safe.

    A full disk loses log lines and nothing else: `append` does not raise then.
    """

    def __init__(
        self, folder: Path, limit_bytes_per_slot: int = DEFAULT_LIMIT_BYTES, limit_bytes: int = TOTAL_LIMIT_BYTES
    ) -> None:
        self._folder, self._limit, self._total_limit = folder, limit_bytes_per_slot, limit_bytes
        self._lock = threading.Lock()
        self._written_in_all = limit_bytes
        self._written: dict[str, int] = {}

    def position(self, slot: str, attempt: int, worker: int) -> LogPosition:
        """The end of that worker's kept log; the next probe asks for the bytes after it."""
        try:
            token, offset = self._position_file(slot, attempt, worker).read_text(encoding="utf-8").split()
            return LogPosition(token, int(offset))
        except (OSError, ValueError):
            return LogPosition()

    def append(self, slot: str, attempt: int, token: str, worker: int, data: bytes, start: int = 0) -> LogPosition:
        """
        Keep *data*, which begins at offset *start* of the log of run *token*, without the bytes that are kept already.

        Returns the position after it. A line marks a gap (the worker wrote more than was fetched).
        """
        end = start + len(data)
        with self._lock:
            before = self.position(slot, attempt, worker)
            text = _continued(before, token, start, data)
            if text is None:
                return before
            with contextlib.suppress(OSError):
                self._write(slot, attempt, worker, text, LogPosition(token, end))
        return LogPosition(token, end)

    def read(self, slot: str, attempt: int, worker: int = 0) -> bytes:
        """The kept log of one worker of an attempt; empty if there is none."""
        try:
            return self._file(slot, attempt, worker).read_bytes()
        except OSError:
            return b""

    def attempts(self, slot: str) -> dict[int, tuple[int, ...]]:
        """Attempts with a kept log -> their workers with one."""
        found: dict[int, list[int]] = {}
        for _, attempt, worker in self._kept(slot):
            found.setdefault(attempt, []).append(worker)
        return {attempt: tuple(sorted(found[attempt])) for attempt in sorted(found)}

    def written_at(self, slot: str, attempt: int) -> float:
        """Unix time of the newest line of any worker of that attempt; 0 without a kept log."""
        stamps = []
        for path, number, _ in self._kept(slot):
            with contextlib.suppress(OSError):
                stamps.append(path.stat().st_mtime if number == attempt else 0.0)
        return max(stamps, default=0.0)

    def _write(self, slot: str, attempt: int, worker: int, text: bytes, position: LogPosition) -> None:
        path = self._file(slot, attempt, worker)
        _write_to(path, os.O_APPEND, text)
        # After the text: a process that is killed between the two fetches some lines twice and loses none. Written in
        # place, since a rename per probe would double the cost of keeping logs.
        padded = f"{position.token} {position.offset}".ljust(POSITION_BYTES)
        _write_to(self._position_file(slot, attempt, worker), 0, padded.encode())
        self._limit_slot(slot, path, len(text))
        self._limit_all(path, len(text))

    def _limit_slot(self, slot: str, newest: Path, added: int) -> None:
        """Cut the slot's logs to its limit; checked once per sixteenth of the limit, since it lists the folder."""
        self._written[slot] = self._written.get(slot, self._limit) + added
        if self._written[slot] < self._limit // 16:
            return
        self._written[slot] = 0
        kept = sorted(self._kept(slot), key=lambda entry: (entry[0] == newest, entry[1]))
        sizes = {path: path.stat().st_size for path, _, _ in kept}
        excess = sum(sizes.values()) - self._limit
        for path, size in sizes.items():
            if excess <= 0:
                return
            keep = max(0, size - excess) // 2 if path == newest else 0
            excess -= size - keep
            _cut(path, keep)

    def _limit_all(self, newest: Path, added: int) -> None:
        """As `_limit_slot`, over all slots; an empty folder stays, since its slot may write again."""
        self._written_in_all += added
        if self._written_in_all < self._total_limit // 16:
            return
        self._written_in_all = 0
        found = [(path, path.stat()) for path in self._folder.glob("slot-*/*.log")]
        excess = sum(status.st_size for _, status in found) - self._total_limit
        for path, status in sorted(found, key=lambda entry: entry[1].st_mtime):
            if excess <= 0:
                return
            if path != newest:
                excess -= status.st_size
                _cut(path, 0)

    def _kept(self, slot: str) -> Iterator[tuple[Path, int, int]]:
        folder = self._slot_folder(slot)
        for path in folder.iterdir() if folder.is_dir() else ():
            if match := _NAME.fullmatch(path.name):
                yield path, int(match[1]), int(match[2])

    def _slot_folder(self, slot: str) -> Path:
        # A name from the Python API may have any character; quoted and prefixed it is neither a path nor `..`.
        return self._folder / f"slot-{quote(slot, safe='')}"

    def _file(self, slot: str, attempt: int, worker: int) -> Path:
        return self._slot_folder(slot) / f"a{attempt}-w{worker}.log"

    def _position_file(self, slot: str, attempt: int, worker: int) -> Path:
        return self._slot_folder(slot) / f"a{attempt}-w{worker}.at"


def _continued(before: LogPosition, token: str, start: int, data: bytes) -> bytes | None:
    """The text to append, or None if all of *data* is kept already."""
    if before.token != token:
        skipped = start
        header = b"--- run %s ---\n" % token.encode()
    else:
        skipped = start - before.offset
        header = b""
    if skipped < 0:
        data, skipped = data[-skipped:], 0
    if not data:
        return None
    gap = b"\n[tpucare: %d bytes of the log were not fetched]\n" % skipped if skipped else b""
    return header + gap + plain_lines(data.decode(errors="replace")).encode()


def _write_to(path: Path, flag: int, content: bytes) -> None:
    """Write into a file of mode 0600; the file and its folder are made if missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag
    try:
        handle = os.open(path, flags, 0o600)
    except FileNotFoundError:
        # One after the other: the mode of folders made by `parents` depends on the umask.
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(path, flags, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)


def _cut(path: Path, keep: int) -> None:
    """Keep the last *keep* bytes of a log; with 0 the log and its position are removed."""
    if not keep:
        path.unlink(missing_ok=True)
        path.with_suffix(".at").unlink(missing_ok=True)
        return
    with path.open("rb") as stream:
        stream.seek(-keep, os.SEEK_END)
        tail = stream.read()
    replace_file(path, b"[tpucare: the beginning was dropped]\n" + tail, durable=False)
