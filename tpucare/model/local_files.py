"""
Files of this machine that a fleet names: which of them may be sent to workers, and their opening without a detour.

Whoever writes a fleet file may not be allowed to read what the daemon can. So what is opened lies below the folder that
was named, whatever links or changes of the folder meanwhile say, and is never one of those that open other doors.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ALWAYS_PRIVATE = ("/proc", "/sys", "/dev", "/run/credentials", "/etc/shadow", "/etc/gshadow", "/etc/ssh")
"""What the kernel says of processes (their environments), what blocks when it is read, and keys of the machine."""

NEVER_SENT = "belongs to tpucare, to its user's logins or to this machine, and is never sent"


def _real(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(path))


@dataclass(frozen=True, slots=True)
class Private:
    """
    Files that are never sent to a worker: those at and below `roots`, but for what lies below `shown`.

    Both hold real paths, absolute and without links.
    """

    roots: tuple[Path, ...]
    shown: Path | None = None

    @classmethod
    def of(cls, roots: Iterable[str | os.PathLike[str]] = (), shown: str | os.PathLike[str] | None = None) -> Private:
        """*roots* beside those that are private everywhere; *shown*: counts only strictly below one of *roots*."""
        real = tuple(_real(root) for root in roots)
        open_part = _real(shown) if shown is not None else None
        inside = open_part is not None and any(root in open_part.parents for root in real)
        return cls((*map(_real, ALWAYS_PRIVATE), *real), open_part if inside else None)

    def holds(self, path: Path) -> bool:
        """Whether a real path is private."""
        if self.shown is not None and path.is_relative_to(self.shown):
            return False
        return any(path.is_relative_to(root) for root in self.roots)

    def refusal(self, path: str | os.PathLike[str]) -> str:
        """Why a file or folder may not be sent, as the end of a line; empty when it may."""
        return NEVER_SENT if self.holds(_real(path)) else ""


EVERYWHERE_PRIVATE = Private.of()


def open_below(folder: Path, path: str, private: Private = EVERYWHERE_PRIVATE) -> BinaryIO:
    """
    A regular file at the relative *path* below *folder*, opened for reading. Links count where they stay below.

    Raises: OSError: missing, not readable, no regular file (a pipe might never end), outside of *folder*, or private.
    """
    base = _real(folder)
    real = _real(base / path)
    if not real.is_relative_to(base) or real == base:
        raise OSError(errno.EPERM, "leads out of the folder", str(real))
    if private.holds(real):
        raise OSError(errno.EPERM, NEVER_SENT, str(real))
    at = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # What became a link since it was resolved is met here, part by part.
        *folders, name = real.relative_to(base).parts
        for part in folders:
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        return _regular(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at))
    finally:
        os.close(at)


def open_regular(path: Path) -> BinaryIO:
    """
    A regular file, opened for reading; links are followed.

    Raises: OSError: missing, not readable, or no regular file, even if it became a pipe a moment ago.
    """
    return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def _regular(handle: int) -> BinaryIO:
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError("no regular file")
