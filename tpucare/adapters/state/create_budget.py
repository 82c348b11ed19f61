"""
The create budget of a project, shared by all processes of one state folder through a small file.

Scripts and the daemon stand beside each other under one owner, and the API counts their creates together. The file
holds the creates of the last minute by a clock that all processes of the machine share; a lock is held only while it
is read and written, and a process that is killed leaves at most a place that is free again a minute later.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from tpucare.adapters.state import folder as state_folder
from tpucare.model.errors import StoreError

FOLDER = "creates"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Whoever holds the lock does so for less than a millisecond, unless it was stopped in the middle.
_PATIENCE_SECONDS = 0.5
_PAUSE_SECONDS = 0.01
_AGAIN_SECONDS = 1.0

Asked = list[tuple[float, str]]


class SharedBudget:
    """
    placement.Budget over a file. For one thread of each process.

    `free_at` reserves the place that it finds, so that two processes never find the same one; `take` puts the slot's
    name on it. A place that was reserved and not taken counts like a create.
    """

    def __init__(self, path: Path, limit: int, window: float = 60.0) -> None:
        self._path, self.limit, self.window = path, limit, window
        self._boot = _boot_id()
        self._reserved = f"process {os.getpid()}"
        state_folder.prepare_folder(path.parent)
        self._known = self._read()[1]

    def restore(self, asked: Iterable[tuple[float, str]]) -> None:
        """Creates that the store remembers; the file has them already, unless it is new or of an earlier boot."""
        if self._known:
            return
        with self._locked() as held:
            if held:
                self._write(sorted([*self._read()[0], *asked]))

    def free_at(self, now: float) -> float | None:
        """None when a create may be asked for now, else the instant when one may."""
        with self._locked() as held:
            if not held:
                return now + _AGAIN_SECONDS
            asked = self._recent(now)
            if len(asked) >= self.limit:
                return max(now, asked[len(asked) - self.limit][0] + self.window)
            self._write([*asked, (now, self._reserved)])
            return None

    def take(self, slot: str, now: float) -> None:
        self._rename(self._reserved, slot, now)

    def answered(self, slot: str, now: float) -> None:
        """The create of *slot* has ended, in whatever way; it reached the API at some instant until *now*."""
        self._rename(slot, slot, now)

    def shares(self) -> Counter[str]:
        """How many of the creates in the window each slot had: the fewest go first."""
        return Counter(slot for _, slot in self._read()[0])

    def _rename(self, before: str, after: str, now: float) -> None:
        with self._locked() as held:
            asked = self._recent(now)
            taken = next((entry for entry in reversed(asked) if entry[1] == before), None)
            if held and taken is not None:
                asked.remove(taken)
                self._write(sorted([*asked, (now, after)]))

    def _recent(self, now: float) -> Asked:
        return [(at, slot) for at, slot in self._read()[0] if now - self.window < at <= now + self.window]

    # --- the file ----------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[Asked, bool]:
        """Creates by instant, and whether the file is of this boot; one that nobody can read counts as none."""
        try:
            kept = json.loads(self._path.read_text("utf-8"))
            if kept["boot"] != self._boot:
                return [], False
            return [(float(at), str(slot)) for at, slot in kept["asked"]], True
        except (OSError, ValueError, KeyError, TypeError):
            return [], False

    def _write(self, asked: Asked) -> None:
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump({"boot": self._boot, "asked": asked}, stream)
            draft.replace(self._path)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the lock was had; without it nothing may be written."""
        try:
            handle = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be locked: {error.strerror or error}") from error
        try:
            yield _take(handle)
        finally:
            os.close(handle)


def shared_budget(state: Path, project: str, limit: int) -> SharedBudget:
    """The budget of *project* for every process of that state folder. Raises: StoreError."""
    return SharedBudget(state / FOLDER / f"{quote(project, safe='')}.json", limit)


def _take(handle: int) -> bool:
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE_SECONDS)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
