"""
The state folder: its owner id, the names of its stores, the lock of each store, and the machine that it lives on.

Nodes bear the owner id as a label, so it must outlive the store: it lies in a file of its own, made once. Databases are
opened by `store`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import pwd
import re
import secrets
import struct
import weakref
from pathlib import Path

from tpucare.model.errors import StoreCorrupt, StoreError, StoreLocked
from tpucare.model.local_files import publish_file, replace_file, sync_folder

OWNER_FILE = "owner"
# Names of all stores that were ever made beside this owner: a store that is listed here and missing was lost, and one
# that is not listed is new (each host of the Python API has a store of its own beside the daemon's).
STORES_FILE = "stores"
DEFAULT_NAME = "tpucare"
STORE_SUFFIX = ".sqlite"

_OWNER = re.compile(r"o-[a-z0-9]{12}")
_STORE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
# machine-id(5) asks applications to hash the id with a salt of their own, so that it cannot be followed across them.
_MACHINE_SALT = b"tpucare machine 1\0"


def new_owner() -> str:
    """A fresh owner id, 60 random bits; fits a label value (`[a-z0-9_-]{1,63}`)."""
    return "o-" + base64.b32encode(secrets.token_bytes(8)).decode("ascii").lower()[:12]


def machine_fingerprint(machine_id: str, instance_id: str = "") -> str:
    """
    The text by which a store knows its machine; machines without a machine id (bare containers) cannot be told apart.

    A cloned disk (a snapshot, a machine image) has the machine id of its original; the instance id tells them apart,
    where there is one. Stores of earlier versions have the first part alone.
    """
    parts = [machine_id.strip(), *filter(None, [instance_id.strip()])]
    return ".".join(hashlib.blake2b(p.encode(), digest_size=16, key=_MACHINE_SALT).hexdigest() for p in parts)


def is_same_machine(stored: str, here: str) -> bool:
    """Compare two fingerprints; an instance id that only one of them has is ignored."""
    machines, instances = zip(stored.partition(".")[::2], here.partition(".")[::2], strict=True)
    return machines[0] == machines[1] and ("" in instances or instances[0] == instances[1])


def is_store_name(name: str) -> bool:
    return _STORE_NAME.fullmatch(name) is not None


def check_store_name(name: str) -> None:
    """Raises: StoreError: *name* would not be a plain file name."""
    if not is_store_name(name):
        raise StoreError(f"{name!r} is no name for a store: use lowercase letters, digits, '.', '_' and '-'")


def store_path(folder: Path, name: str = DEFAULT_NAME) -> Path:
    """The file of a store; its `-wal` and `-shm` and its `.lock` lie beside it. Raises: StoreError: no such name."""
    check_store_name(name)
    return folder / f"{name}{STORE_SUFFIX}"


def lock_path(folder: Path, name: str = DEFAULT_NAME) -> Path:
    return store_path(folder, name).with_suffix(".lock")


def store_names(folder: Path) -> list[str]:
    """Names of the stores that lie in *folder*."""
    found = (path.name.removesuffix(STORE_SUFFIX) for path in folder.glob(f"*{STORE_SUFFIX}") if path.is_file())
    return sorted(name for name in found if is_store_name(name))


def prepare_folder(folder: Path) -> None:
    """
    Make the state folder, or close it to others: mode 0700, owned by the user who runs this.

    Raises: StoreError: not a folder, another user's, or not writable.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        # Files that root would leave in a service's folder lock the service out of its own store.
        if status.st_uid != os.geteuid():
            user = _user_name(status.st_uid)
            raise StoreError(f"{folder}: belongs to user {user}, not to {_user_name(os.geteuid())}; run this as {user}")
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise StoreError(f"{folder}: the state folder cannot be used: {error.strerror}") from error


def read_owner(folder: Path) -> str | None:
    """
    The owner id that lies in *folder*, or None when there is none yet.

    Raises: StoreCorrupt: the file holds something else; StoreError: it cannot be read.
    """
    path = folder / OWNER_FILE
    text = _read_text(path)
    if text is None:
        return None
    owner = text.strip()
    if not _OWNER.fullmatch(owner):
        raise StoreCorrupt(f"{path}: not an owner id (o- and 12 letters or digits); put back the one your nodes bear")
    return owner


def settle_owner(folder: Path, candidate: str) -> str:
    """
    The owner of *folder*: the one it has, else *candidate*, durably from then on.

    Of two processes that begin with a new folder at once the slower one takes the owner that the faster one published,
    whatever either of them is stopped at. Raises: StoreCorrupt, StoreError.
    """
    path = folder / OWNER_FILE
    try:
        publish_file(path, f"{candidate}\n".encode())
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
    return read_owner(folder) or candidate


def known_stores(folder: Path) -> frozenset[str] | None:
    """Names of the stores ever made here; None: the folder has no list of them."""
    text = _read_text(folder / STORES_FILE)
    return None if text is None else frozenset(text.split())


def remember_store(folder: Path, *names: str) -> None:
    """
    Note, durably, that stores of these *names* were made here; without any: that none is known to have been lost.

    One append, so two processes that note their stores at once lose neither. Raises: StoreError.
    """
    path = folder / STORES_FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, "".join(f"{name}\n" for name in names).encode("ascii"))
            os.fsync(handle)
        finally:
            os.close(handle)
        sync_folder(folder)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def write_private(path: Path, text: str) -> None:
    """
    Replace *path* by *text*, mode 0600: whole or not at all, and on the disk when this returns.

    Raises: StoreError.
    """
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"number {uid}"


# --- one process per store: a lock that lasts as long as the process that took it ------------------------------------
# The kernel drops the lock when the process ends, however it ends, so there is no stale lock to clean up. The file
# stays. It is locked twice: by flock, which earlier versions check, and by a lock of the open file description
# (fcntl(2), F_OFD_SETLK), which another process can check without taking it: a process that is stopped while it checks
# keeps no other one out.

# struct flock of fcntl(2): type, whence, start, length (0: the whole file), pid (0 where a lock is asked for).
_WHOLE_FILE = "hhqqi"
_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


class StoreLock:
    """An exclusive lock on *path*, taken when made and held until `release`."""

    def __init__(self, path: Path) -> None:
        """Raises: StoreLocked: naming the process that holds it; StoreError: the file cannot be made."""
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, _file_lock(fcntl.F_WRLCK))
            _write_pid(self._handle)
        except BlockingIOError as error:
            pid = _read_pid(self._handle)
            os.close(self._handle)
            owner = f"process {pid}" if pid else "another process"
            raise StoreLocked(
                f"{path.with_suffix('')}: {owner} takes care of this store; stop it, or use another state folder"
            ) from error
        except OSError as error:
            os.close(self._handle)
            raise StoreError(f"{path}: cannot be locked: {error.strerror}") from error
        _held.add(self)

    @property
    def is_held(self) -> bool:
        return self._handle >= 0

    def release(self) -> None:
        """Give the lock away; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _close_in_child() -> None:
    # A forked child shares the lock as long as it has the file open, and would keep it beyond the death of its parent.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


def is_held(folder: Path, name: str = DEFAULT_NAME) -> bool:
    """Whether a process holds the lock of store *name* now. Creates and takes nothing. Raises: StoreError: no name."""
    return _asked(folder, name)[0]


def holder(folder: Path, name: str = DEFAULT_NAME) -> int | None:
    """The process that holds the lock of store *name* now; None: no process does, or its id cannot be read."""
    return _asked(folder, name)[1]


def _asked(folder: Path, name: str) -> tuple[bool, int | None]:
    try:
        handle = os.open(lock_path(folder, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False, None
    try:
        found = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _file_lock(fcntl.F_RDLCK))
        (kind,) = struct.unpack_from("h", found)
        return (False, None) if kind == fcntl.F_UNLCK else (True, _read_pid(handle))
    finally:
        os.close(handle)


def _file_lock(kind: int) -> bytes:
    return struct.pack(_WHOLE_FILE, kind, os.SEEK_SET, 0, 0, 0)


def _write_pid(handle: int) -> None:
    # Only for the message of a process that finds the lock taken; a full disk is reported by the store itself.
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)


def _read_pid(handle: int) -> int | None:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None
