"""
Local files: which may be sent to workers, how they are opened safely, and how private files are written whole.

The daemon may read more than the author of a fleet file may. So a file that is sent lies below the folder the author
named, whatever symbolic links or renames say meanwhile, and is never a credential.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ALWAYS_PRIVATE = ("/proc", "/sys", "/dev", "/run/credentials", "/etc/shadow", "/etc/gshadow", "/etc/ssh")
"""Environments of processes, files that block when read, and keys of the machine."""

NEVER_SENT = "belongs to tpucare, to its user's logins or to this machine, and is never sent"


def _real(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(path))


@dataclass(frozen=True, slots=True)
class Private:
    """
    Files that are never sent to a worker: those at and below `roots`, except those below `shown`.

    Both are real paths, absolute and without links.
    """

    roots: tuple[Path, ...]
    shown: Path | None = None

    @classmethod
    def of(cls, roots: Iterable[str | os.PathLike[str]] = (), shown: str | os.PathLike[str] | None = None) -> Private:
        """*roots* and `ALWAYS_PRIVATE`; *shown* counts only strictly below one of *roots*."""
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
        # Opened part by part without following links: a folder may have become a link since it was resolved.
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


def read_private(path: Path, limit: int) -> bytes:
    """
    Up to *limit* bytes of a file that only this process's user can have written, and only that user may read.

    Raises: OSError: missing, a link, no regular file, another user's, or open to others.
    """
    with _regular(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as stream:
        status = os.fstat(stream.fileno())
        if status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "belongs to another user", str(path))
        if status.st_mode & 0o077:
            raise OSError(errno.EPERM, "is open to other users: run chmod 600 on it", str(path))
        return stream.read(limit)


def write_new(path: Path, content: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Make the file *path*. `durable`: it is on the disk when this returns. Raises: OSError: one is there; others."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode & 0o700)
    with os.fdopen(handle, "wb") as stream:
        os.fchmod(handle, mode)
        stream.write(content)
        if durable:
            stream.flush()
            os.fsync(handle)


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """
    Make *path* a file with *content*, whole or not at all. `durable`: it is on the disk when this returns.

    Raises: OSError.
    """
    # The name is random: another writer of the folder could place a link under a known one.
    scratch = scratch_of(path)
    try:
        write_new(scratch, content, mode=mode, durable=durable)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def publish_file(path: Path, content: bytes) -> None:
    """
    Make the file *path*, whole and on the disk, unless it exists: the file of the first process stays.

    Raises: OSError.
    """
    scratch = scratch_of(path)
    write_new(scratch, content)
    try:
        os.link(scratch, path)
    except FileExistsError:
        pass
    finally:
        scratch.unlink()
    sync_folder(path.parent)


def scratch_of(path: Path) -> Path:
    """Path of a new hidden file beside *path*, with a random name."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def sync_folder(folder: Path) -> None:
    """Make renames in *folder* durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _regular(handle: int) -> BinaryIO:
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError("no regular file")
