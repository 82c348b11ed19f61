"""
One caretaker per store: an flock that lasts as long as the process that took it.

The kernel drops the lock when the process ends, however it ends, so there is no stale lock to clean up. The file stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from tpucare.model.errors import StoreError, StoreLocked

_TRIES = 4
_PAUSE_SECONDS = 0.05


class StoreLock:
    """An exclusive lock on *path*, taken when made and held until `release`."""

    def __init__(self, path: Path) -> None:
        """Raises: StoreLocked: naming the process that holds it; StoreError: the file cannot be made."""
        self._handle = _open(path)
        try:
            _take(self._handle)
            _write_pid(self._handle)
        except BlockingIOError as error:
            pid = _read_pid(self._handle)
            os.close(self._handle)
            holder = f"process {pid}" if pid else "another process"
            raise StoreLocked(
                f"{path.with_suffix('')}: {holder} takes care of this store; stop it, or use another state folder"
            ) from error
        except OSError as error:
            os.close(self._handle)
            raise StoreError(f"{path}: cannot be locked: {error.strerror}") from error

    def release(self) -> None:
        """Give the lock away; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def holder(path: Path) -> int | None:
    """
    The process that holds the lock at *path* now, or None. Creates nothing.

    Asking means to hold a shared lock for a moment, which is why `StoreLock` does not take the first no for an answer.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(handle)
    finally:
        os.close(handle)
    return None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error


def _take(handle: int) -> None:
    for _ in range(_TRIES - 1):
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
    return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write_pid(handle: int) -> None:
    # Only a courtesy to whoever meets the lock: a full disk is told by the store itself.
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)


def _read_pid(handle: int) -> int | None:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None
