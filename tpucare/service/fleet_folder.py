"""
The folder of fleet files: what changed in it, and what that means for the fleets that are cared for.

Nothing that is absent or unreadable here changes anything (design, rule 3): a fleet runs on as last accepted, and a
person is told once. What does count is a mark: `down` renames `pod.yaml` to `pod.yaml.down`, so that a store that was
lost does not bring back what was taken down. A file counts as changed when it looks the same for two looks in a row, so
that one that is being written is not read in the middle.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpucare.adapters.state import folder as state_folder
from tpucare.fleetfile import yaml_document as yaml_lines
from tpucare.fleetfile.parse import Fleet
from tpucare.model.errors import ConfigError, StoreError
from tpucare.model.local_files import open_regular, sync_folder
from tpucare.model.memory import DesiredState
from tpucare.model.text import counted, shown
from tpucare.service.fleet_registry import FleetRegistry

SUFFIXES = (".yaml", ".yml")
DOWN = ".down"
"""Behind the name of a file whose fleet was taken down; `apply` takes it away."""
TEXT_LIMIT = 256 << 10
_HEADER = "# tpucare: applied; relative paths start at "

Signature = tuple[int, int, int]


@dataclass(slots=True)
class Changes:
    """What a look found: files to read, files that are not there any more, why the folder cannot be listed."""

    changed: list[Path] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class FileProblems:
    """
    What is wrong in the folder now, one line each.

    of_fleets: by fleets, which run on as last accepted    others: by files that declare none, or by the folder
    """

    of_fleets: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)


class Watch:
    """Signatures (mtime, size, inode) of the files of one folder. Reads no content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._settled: dict[Path, Signature | None] = {}
        self._pending: dict[Path, Signature | None] = {}
        self._first = True

    def again(self) -> None:
        """Report every file at the next look."""
        self._first = True

    def look(self) -> Changes:
        try:
            found = dict(self._files())
        except OSError as error:
            return Changes(problem=f"{self.folder}: the fleets folder cannot be read: {error.strerror}")
        changes = Changes()
        known: dict[Path, Signature | None] = dict.fromkeys(self._settled)
        for path, signature in {**known, **found}.items():
            if self._settled.get(path) == signature and not self._first:
                self._pending.pop(path, None)
            elif self._first or (path in self._pending and self._pending[path] == signature):
                self._settle(path, signature, changes)
            else:
                self._pending[path] = signature
        self._first = False
        return changes

    def _settle(self, path: Path, signature: Signature | None, changes: Changes) -> None:
        self._pending.pop(path, None)
        if signature is None:
            del self._settled[path]
            changes.missing.append(path)
        else:
            self._settled[path] = signature
            changes.changed.append(path)

    def _files(self) -> Iterator[tuple[Path, Signature]]:
        with os.scandir(self.folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith(SUFFIXES) and not entry.name.startswith("."):
                    try:
                        status = entry.stat()
                    except OSError:
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield self.folder / entry.name, (status.st_mtime_ns, status.st_size, status.st_ino)


def where_it_lies(path: Path) -> Path:
    """The file that a person means by *path*, also after `down` has renamed it."""
    mark = path.with_name(path.name + DOWN)
    return mark if mark.is_file() and not path.exists() else path


class FleetFolder:
    """Brings changed files into the roster. On the thread of the loop only."""

    def __init__(self, folder: Path, roster: FleetRegistry) -> None:
        self.folder = folder
        self._watch = Watch(folder)
        self._roster = roster
        self._declared: dict[Path, str] = {}
        self._said = ""
        self._refused: dict[Path, str] = {}
        self._unlisted = ""
        self._looked = False

    def again(self) -> None:
        """SIGHUP: read everything anew, the files that fleets name included."""
        self._watch.again()

    def look(self) -> None:
        """Take in what changed since the last look."""
        changes = self._watch.look()
        for path in changes.changed:
            self._take(path)
        for path in changes.missing:
            self._miss(path)
        self._unlisted = changes.problem
        self._complain(changes.problem or self._emptiness())
        if not self._looked and not changes.problem:
            self._looked = True
            self._name_orphans()
            self._mark_what_is_down()

    def problems(self) -> FileProblems:
        """What a person should know of the folder as it was at the last look."""
        if self._unlisted:
            return FileProblems(others={str(self.folder): self._unlisted})
        cared = {name for name, record in self._roster.records.items() if record.wish is not DesiredState.DOWN}
        of_fleets = {}
        if self._looked:
            missing = cared.difference(self._declared.values())
            of_fleets = dict.fromkeys(missing, f"no file in {self.folder} declares it; it runs on as last accepted")
        others = {}
        for path, text in self._refused.items():
            first, *more = text.splitlines()
            line = f"{first} (and {len(more)} more: `tpucare check {path}`)" if more else first
            if (name := self._declared.get(path, "")) in cared:
                of_fleets[name] = f"{line}; it runs on as last accepted"
            else:
                others[str(path)] = line
        return FileProblems(of_fleets, others)

    def path_of(self, fleet: str) -> Path:
        """
        The file that declares *fleet*, or the one that should.

        Raises: ConfigError: a file of that name declares another fleet.
        """
        if not self._looked:
            self._survey()
        for path, name in self._declared.items():
            if name == fleet and path.exists():
                return path
        path = self.folder / f"{fleet}.yaml"
        if self._declared.get(path, fleet) != fleet:
            raise ConfigError(f"{path} declares fleet {self._declared[path]}: rename that file first")
        return path

    def copy_in(self, fleet: Fleet, text: str, folder: Path, file: str) -> str:
        """
        Put the text of an applied file into the folder; returns the text that lies there then.

        A copy says in its first line where its relative paths start, so that it means the same here.
        Raises: ConfigError: too large with that line, too, or the folder cannot be written; StoreError.
        """
        target = self.path_of(fleet.name)
        if file and Path(file).exists() and target.exists() and Path(file).samefile(target):
            self._unmark(fleet.name)
            return text
        whole = _HEADER + json.dumps(str(folder)) + "\n" + without_header(text)
        if len(whole.encode()) > TEXT_LIMIT:
            raise ConfigError(f"{file or target}: larger than {TEXT_LIMIT >> 10} KB as a copy that names its folder")
        self._roster.note_applied(fleet.name, folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.folder}: the fleets folder cannot be made: {error.strerror}") from error
        try:
            state_folder.write_private(target, whole)
        except StoreError as error:
            # The folder may belong to somebody else, and be read-only for good (ProtectSystem=, a ConfigMap).
            raise ConfigError(
                f"{error}: put the file there yourself, and it is taken in; or let tpucare write to {self.folder} "
                "(under systemd: ReadWritePaths=)"
            ) from error
        self._declared[target] = fleet.name
        self._unmark(fleet.name)
        return whole

    # --- what is down ------------------------------------------------------------------------------------------------

    def mark_down(self, fleet: str) -> None:
        """
        Rename the file of a fleet that was taken down, so that no store that does not know of it starts it again.

        A folder that cannot be written is told of: the store alone remembers then.
        """
        if not self._looked:
            self._survey()
        for path in [path for path, name in self._declared.items() if name == fleet]:
            mark = path.with_name(path.name + DOWN)
            if mark.exists() or not path.exists():
                continue
            try:
                path.rename(mark)
                sync_folder(path.parent)
            except OSError as error:
                told = f"{path} cannot be renamed to {mark.name}: {error.strerror}"
                self._roster.say("fleet-down", f"{told}; a store that is lost would start {fleet} again", fleet)
                continue
            del self._declared[path]

    def _mark_what_is_down(self) -> None:
        """Also what a daemon that was killed between the two left undone, and what an older version took down."""
        for record in self._roster.records.values() if self._roster.keeps else ():
            if record.wish is DesiredState.DOWN:
                self.mark_down(record.name)

    def _unmark(self, fleet: str) -> None:
        for mark in self._marks(fleet):
            try:
                mark.unlink()
            except OSError as error:
                raise ConfigError(f"{mark}: cannot be deleted: {error.strerror}; delete it yourself") from error

    def _marks(self, fleet: str) -> list[Path]:
        found = (path for suffix in SUFFIXES for path in self.folder.glob(f"*{suffix}{DOWN}"))
        return [path for path in found if _fleet_named_in(path) == fleet]

    def fleets_that_lie_here(self) -> frozenset[str]:
        """
        Names that the files of the folder declare, those that cannot be accepted included.

        Raises: ConfigError: the folder cannot be listed, so nothing is known of them.
        """
        try:
            paths = [Path(entry) for entry in os.scandir(self.folder) if entry.name.endswith(SUFFIXES)]
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise ConfigError(f"{self.folder}: the fleets folder cannot be read: {error.strerror}") from error
        return frozenset(_fleet_named_in(path) for path in paths)

    def _survey(self) -> None:
        """Which file declares what, without taking anything in."""
        for path in Watch(self.folder).look().changed:
            try:
                _, fleet, _ = self._read(path)
            except ConfigError:
                continue
            self._declared.setdefault(path, fleet.name)

    # --- one file ----------------------------------------------------------------------------------------------------

    def _take(self, path: Path) -> None:
        try:
            text, parsed, folder = self._read(path)
            fleet = self._roster.with_project(parsed)
            self._refuse_double(fleet, path)
            self._roster.refuse_taken(fleet)
        except ConfigError as error:
            self._refused[path] = str(error)
            self._roster.say("fleet-refused", str(error), self._declared.get(path, ""))
            return
        self._refused.pop(path, None)
        before = self._declared.get(path)
        self._declared[path] = fleet.name
        if before not in (None, fleet.name):
            self._orphan(str(before), f"{path} declares {fleet.name} now")
        if self._roster.is_news(fleet, text, folder):
            self._accept(fleet, text, folder, path)

    def _read(self, path: Path) -> tuple[str, Fleet, Path]:
        """Text of a file, its fleet, and where its relative paths start. Raises: ConfigError."""
        text = read_text(path)
        if not text.startswith(_HEADER):
            return text, self._roster.parse(text, file=str(path), folder=path.parent), path.parent
        if (base := self.base_of(text)) is not None:
            return text, self._roster.parse(text, file=str(path), folder=base), base
        # Whoever may write to this folder could name any other in that line.
        try:
            return text, self._roster.parse(text, file=str(path), folder=None), path.parent
        except ConfigError as error:
            told = f"{path}:1: `tpucare apply` did not write this line here, so it counts for nothing: apply the file"
            raise ConfigError(f"{told}, or delete the line\n{error}") from error

    def base_of(self, text: str) -> Path | None:
        """Where an applied copy says that its paths start, if the fleet was applied from there. Raises: ConfigError."""
        if not text.startswith(_HEADER):
            return None
        named = folder_of(text, self.folder)
        return named if self._roster.was_applied_from(yaml_lines.named(text, "name"), named) else None

    def _accept(self, fleet: Fleet, text: str, folder: Path, path: Path) -> None:
        record = self._roster.records.get(fleet.name)
        if record is None and (marks := self._marks(fleet.name)):
            told = (
                f"{path}: {fleet.name} was taken down ({marks[0].name}) and stays so; `tpucare apply {path}` starts it"
            )
            self._roster.say("fleet-down", told, fleet.name)
            return
        wish = record.wish if record is not None else DesiredState.UP
        self._roster.accept(fleet, text, folder, wish)
        for warning in (*fleet.warnings, *filter(None, [self._roster.lacks(fleet)])):
            self._roster.say("fleet-warning", warning, fleet.name)
        if wish is DesiredState.DOWN:
            told = f"{path}: {fleet.name} was taken down and stays so; `tpucare apply {path}` starts it"
            self._roster.say("fleet-down", told, fleet.name)
        else:
            slots = counted(fleet.count, "slot")
            self._roster.say("fleet", f"{path}: {fleet.name} accepted, {slots}", fleet.name, "info")

    def _refuse_double(self, fleet: Fleet, path: Path) -> None:
        for other, name in self._declared.items():
            if name == fleet.name and other != path and other.exists():
                raise ConfigError(f"{path}: name: {name} is declared in {other} already; choose another")

    def _miss(self, path: Path) -> None:
        self._refused.pop(path, None)
        name = self._declared.pop(path, None)
        if name is not None and name not in self._declared.values():
            self._orphan(name, f"{path} is gone")

    def _orphan(self, name: str, why: str) -> None:
        record = self._roster.records.get(name)
        if record is not None and record.wish is not DesiredState.DOWN:
            told = f"{why}: {name} runs on as last accepted; `tpucare down {name}` ends it"
            self._roster.say("fleet-missing", told, name)

    def _name_orphans(self) -> None:
        for name in self._roster.records:
            if name not in self._declared.values():
                self._orphan(name, f"no file in {self.folder} declares it")

    def _emptiness(self) -> str:
        return "" if self._declared else f"{self.folder}: holds no fleet file; `tpucare apply FILE` puts one there"

    def _complain(self, problem: str) -> None:
        if problem and problem != self._said:
            self._roster.say("folder", problem)
        self._said = problem


def read_text(path: Path) -> str:
    """Raises: ConfigError: cannot be read, is too large to be a fleet file, or is no UTF-8."""
    try:
        with open_regular(path) as file:
            content = file.read(TEXT_LIMIT + 1)
        if len(content) > TEXT_LIMIT:
            raise ConfigError(f"{path}: larger than {TEXT_LIMIT >> 10} KB, so no fleet file")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start})") from error


def _fleet_named_in(path: Path) -> str:
    """The name that a file declares, whatever else is wrong with it; without one, that of the file."""
    try:
        return yaml_lines.named(read_text(path), "name") or path.name.partition(".")[0]
    except ConfigError:
        return path.name.partition(".")[0]


def folder_of(text: str, otherwise: Path) -> Path:
    """Where relative paths of *text* start: as its first line says (an applied copy), else in its own folder."""
    first, _, _ = text.partition("\n")
    if not first.startswith(_HEADER):
        return otherwise
    try:
        named = json.loads(first.removeprefix(_HEADER))
    except ValueError:
        named = None
    if not isinstance(named, str) or not os.path.isabs(named):
        raise ConfigError(f"the first line names no folder: {shown(first)}")
    return Path(named)


def without_header(text: str) -> str:
    first, _, rest = text.partition("\n")
    return rest if first.startswith(_HEADER) else text
