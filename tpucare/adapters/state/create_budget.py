"""
The create budget of a project, shared by all processes of one state folder through small files.

Scripts and the daemon run side by side under one owner, and the API counts their creates together. The creates of the
last minute are kept by a clock that all processes of the machine share. No lock is held: each change is the next
numbered version of the file, which appears whole, and only if no other process has made that version meanwhile
(`link`). So a process that is stopped at any instruction is passed over at once, and finds out when it continues: its
version is taken, and it reads and asks anew.

An admitted create counts as spent until a minute after its answer, however long that takes, since a stopped process may
send it at any moment. A process is dead once the lock of its store is free; its creates count from when this is seen.
The creates without an answer of one process are at most half of the places that the others leave, so that a process
that is stopped in a burst slows the others down, and stops none.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from tpucare.adapters.state import folder as state_folder
from tpucare.model.errors import StoreError
from tpucare.model.local_files import write_new

FOLDER = "creates"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A version takes a millisecond; only where many processes write at once does one of them try for longer.
_PATIENCE_SECONDS = 0.5
_AGAIN_SECONDS = 1.0
# A version that is this much older than the newest may be deleted. One process would have to read a folder while so
# many versions are made to miss them all.
_VERSIONS_KEPT = 8


class Spent(NamedTuple):
    """
    One create of the budget. `at`: when it was admitted, or answered; seconds of the shared clock.

    token: of a create without an answer; empty: it was answered, or its process is dead
    """

    at: float
    slot: str
    store: str
    token: str


class SharedBudget:
    """
    placement.Budget over the files of *project* in *state*. For one thread of each process.

    `free_at` holds the place that it finds, so that two processes never find the same one; `reserve` puts the slot's
    name on it, and `create_ended` lets it expire a minute later. A place that was held and not reserved counts like a
    create.

    store: the store of this process, which is alive as long as the lock of that store is held
    monotonic: the clock of all instants
    """

    def __init__(
        self, state: Path, project: str, limit: int, store: str, monotonic: Callable[[], float], window: float = 60.0
    ) -> None:
        self._state, self._folder = state, state / FOLDER
        self._project, self._store, self._monotonic = quote(project, safe=""), store, monotonic
        self.limit, self.window = limit, window
        self._boot = _boot_id()
        # By token, of creates without an answer: the slot, and what is to be written of them yet.
        self._slots: dict[str, str] = {}
        self._ended: dict[str, float] = {}
        self._held = ""
        state_folder.prepare_folder(self._folder)
        self._is_known = self._read()[2]

    def restore(self, asked: Iterable[tuple[float, str]]) -> None:
        """Creates that the store remembers; the file has them already, unless it is new or of an earlier boot."""
        if self._is_known:
            return
        restored = [Spent(at, slot, self._store, "") for at, slot in asked]
        for _ in _tries():
            version, spent, _ = self._read()
            if self._write(version, [*spent, *(entry for entry in restored if entry not in spent)]):
                return

    def free_at(self, now: float, spare: int = 0) -> float | None:
        """None when a create may begin now that leaves *spare* others in the window, else the instant when one may."""
        self._give_back(now)
        token = secrets.token_hex(8)
        for _ in _tries():
            version, spent, _ = self._read()
            if any(entry.token == token for entry in spent):
                # Many versions were made after the one of the last try, and they are built on it.
                free_at = None
                break
            current = self._current(spent, now)
            free_at = self._free_at(current, now, max(1, self.limit - spare))
            reserved = [Spent(now, "", self._store, token)] if free_at is None else []
            if (current == spent and not reserved) or self._write(version, [*current, *reserved]):
                break
        else:
            return now + _AGAIN_SECONDS
        if free_at is None:
            self._slots[token], self._held = "", token
        return free_at

    def reserve(self, slot: str, now: float) -> None:
        for token in [token for token, name in self._slots.items() if name == slot]:
            self._ended[token] = now  # A slot has one create at a time: the one before has ended.
        if self._held:
            self._slots[self._held], self._held = slot, ""
        self._save(now)

    def create_ended(self, slot: str, now: float) -> None:
        """The create of *slot* has ended, in whatever way; it reached the API at some instant until *now*."""
        for token in [token for token, name in self._slots.items() if name == slot]:
            self._ended[token] = now
            self._save(now)

    def shares(self) -> Counter[str]:
        """How many of the creates in the window each slot had: the fewest go first."""
        return Counter(entry.slot for entry in self._read()[1])

    # --- what counts -------------------------------------------------------------------------------------------------

    def _free_at(self, current: list[Spent], now: float, limit: int) -> float | None:
        """What has no answer yet is not free before a minute from now."""
        counted = sorted(now if entry.token else entry.at for entry in current)
        if len(counted) >= limit:
            return max(now, counted[len(counted) - limit] + self.window)
        open_here = sum(1 for entry in current if entry.token and entry.store == self._store)
        open_elsewhere = sum(1 for entry in current if entry.token) - open_here
        return None if open_here < max(1, (self.limit - open_elsewhere) // 2) else now + _AGAIN_SECONDS

    def _current(self, spent: list[Spent], now: float) -> list[Spent]:
        """What of *spent* counts at *now*, with what this process knows of its own creates, and of dead processes."""
        alive = {entry.store: self._is_alive(entry.store) for entry in spent if entry.token}
        # Not *now*, which is older where this process was stopped: others may have died, or spent, since.
        latest = max(now, self._monotonic())
        current = []
        for entry in spent:
            if entry.token:
                is_open = alive[entry.store] or entry.token in self._slots
                entry = entry._replace(slot=self._slots.get(entry.token, entry.slot))
                if (at := self._ended.get(entry.token)) is not None or not is_open:
                    entry = entry._replace(at=latest if at is None else at, token="")
            if entry.token or now - self.window < entry.at <= latest + self.window:
                current.append(entry)
        return current

    def _is_alive(self, store: str) -> bool:
        """Another process than this one, which knows its own creates and those that its store's last holder left."""
        try:
            return store != self._store and state_folder.is_held(self._state, store)
        except StoreError:
            return False

    def _give_back(self, now: float) -> None:
        """A place that was reserved and not taken counts from now on."""
        if self._held:
            self._ended[self._held], self._held = now, ""

    def _save(self, now: float) -> None:
        """Write what this process knows of its creates; in a crowd it is written with the next change."""
        for _ in _tries():
            version, spent, _ = self._read()
            current = self._current(spent, now)
            if current == spent or self._write(version, current):
                for token in self._ended:
                    self._slots.pop(token, None)
                self._ended.clear()
                return

    # --- the file ----------------------------------------------------------------------------------------------------

    def _versions(self) -> list[int]:
        try:
            names = [name.rpartition("@") for name in os.listdir(self._folder)]
        except OSError as error:
            raise StoreError(f"{self._folder}: cannot be read: {error.strerror or error}") from error
        return sorted(int(number) for name, _, number in names if name == self._project and number.isdecimal())

    def _path(self, version: int) -> Path:
        return self._folder / f"{self._project}@{version}"

    def _read(self) -> tuple[int, list[Spent], bool]:
        """Newest version, what is in it, and whether it is of this boot; a file that cannot be read counts as none."""
        while True:
            version = max(self._versions(), default=0)
            try:
                kept = json.loads(self._path(version).read_text("utf-8"))
                if kept["boot"] != self._boot:
                    return version, [], False
                return version, [_spent(*entry) for entry in kept["spent"]], True
            except FileNotFoundError:
                if not version:
                    return 0, [], False
            except (OSError, ValueError, KeyError, TypeError):
                return version, [], False

    def _write(self, version: int, spent: list[Spent]) -> bool:
        """
        Make *spent* the version after *version*; False where another process was faster, and nothing is changed.

        False, too, where so many versions were made at once that the next `read` alone tells whether they have it.
        """
        draft, made = self._folder / f".{self._store}", self._path(version + 1)
        try:
            draft.unlink(missing_ok=True)
            content = json.dumps({"boot": self._boot, "spent": sorted(spent)})
            write_new(draft, content.encode(), durable=False)
            try:
                os.link(draft, made)
            except FileExistsError:
                return False
            finally:
                draft.unlink()
            versions = self._versions()
            newest = max(versions, default=version)
            for old in versions:
                if old <= newest - _VERSIONS_KEPT:
                    self._path(old).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{made}: cannot be written: {error.strerror or error}") from error
        # A process that was stopped before its link may have made a version anew that was made and deleted meanwhile.
        return newest - _VERSIONS_KEPT <= version


def _tries() -> Iterable[int]:
    until, tries = time.monotonic() + _PATIENCE_SECONDS, 0
    while not tries or time.monotonic() < until:
        yield tries
        tries += 1


def _spent(at: float, slot: str, store: str, token: str) -> Spent:
    return Spent(float(at), str(slot), str(store), str(token))


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""
