"""
The folder of fleet files: which of them changed, and what that means for the fleets.

A file that is missing or unreadable changes nothing (design, rule 3): its fleet runs on as last accepted, and a person
is told once. A mark does count: `down` renames `pod.yaml` to `pod.yaml.down`, so that a lost store does not bring back
a fleet that was taken down. A changed file is read once it is the same at two polls in a row, and so not half written.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpucare.adapters.state import folder as state_folder
from tpucare.fleetfile import yaml_document
from tpucare.fleetfile.parse import FleetSpec
from tpucare.model.errors import ConfigError, StoreError
from tpucare.model.local_files import open_regular, sync_folder
from tpucare.model.memory import DesiredState
from tpucare.model.text import counted, shown
from tpucare.service.fleet_registry import FleetRegistry

SUFFIXES = (".yaml", ".yml")
DOWN = ".down"
"""The suffix of a file whose fleet was taken down; `apply` removes it."""
TEXT_LIMIT = 256 << 10
_HEADER = "# tpucare: applied; relative paths start at "

Signature = tuple[int, int, int]


@dataclass(slots=True)
class FolderChanges:
    """What a poll found: files to read, files that are gone, and why the folder cannot be listed."""

    changed: list[Path] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class FileProblems:
    """
    The problems of the folder now, one line each.

    of_fleets: by fleet; each runs on as last accepted    others: by file without a fleet, or by the folder
    """

    of_fleets: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)


class FolderWatcher:
    """Signatures (mtime, size, inode) of the files of one folder. Reads no content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._settled: dict[Path, Signature | None] = {}
        self._pending: dict[Path, Signature | None] = {}
        self._first = True

    def report_all(self) -> None:
        """Report every file at the next poll."""
        self._first = True

    def poll(self) -> FolderChanges:
        try:
            found = dict(self._files())
        except OSError as error:
            return FolderChanges(problem=f"{self.folder}: the fleets folder cannot be read: {error.strerror}")
        changes = FolderChanges()
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

    def _settle(self, path: Path, signature: Signature | None, changes: FolderChanges) -> None:
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


def fleet_file_of(path: Path) -> Path:
    """*path*, or the file that it became when `down` renamed it."""
    mark = path.with_name(path.name + DOWN)
    return mark if mark.is_file() and not path.exists() else path


class FleetFolder:
    """Brings changed files into the registry. On the thread of the loop only."""

    def __init__(self, folder: Path, registry: FleetRegistry) -> None:
        self.folder = folder
        self._watcher = FolderWatcher(folder)
        self._registry = registry
        self._declared: dict[Path, str] = {}
        self._reported = ""
        self._refused: dict[Path, str] = {}
        self._unlisted = ""
        self._was_read = False

    def read_all_again(self) -> None:
        """Read every fleet file at the next call of `read_changes`, and the files that they name."""
        self._watcher.report_all()

    def read_changes(self) -> None:
        """Accept the fleets of files that changed since the last call."""
        changes = self._watcher.poll()
        for path in changes.changed:
            self._read_file(path)
        for path in changes.missing:
            self._drop_missing_file(path)
        self._unlisted = changes.problem
        self._report_problem(changes.problem or self._problem_if_empty())
        if not self._was_read and not changes.problem:
            self._was_read = True
            self._report_undeclared_fleets()
            self._mark_fleets_down()

    def problems(self) -> FileProblems:
        """The problems of the folder as it was when it was read last."""
        if self._unlisted:
            return FileProblems(others={str(self.folder): self._unlisted})
        cared = {name for name, record in self._registry.records.items() if record.wish is not DesiredState.DOWN}
        of_fleets = {}
        if self._was_read:
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
        The file that declares *fleet*, or the one where it is to be written.

        Raises: ConfigError: that file declares another fleet.
        """
        if not self._was_read:
            self._find_declared()
        for path, name in self._declared.items():
            if name == fleet and path.exists():
                return path
        path = self.folder / f"{fleet}.yaml"
        if self._declared.get(path, fleet) != fleet:
            raise ConfigError(f"{path} declares fleet {self._declared[path]}: rename that file first")
        return path

    def copy_in(self, fleet: FleetSpec, text: str, folder: Path, file: str) -> str:
        """
        Copy the text of an applied file into the folder; returns the text of the copy.

        Its first line names the folder where its relative paths start, so that it means the same here.
        Raises: ConfigError: too large with that line, or the folder cannot be written; StoreError.
        """
        target = self.path_of(fleet.name)
        if file and Path(file).exists() and target.exists() and Path(file).samefile(target):
            self._unmark(fleet.name)
            return text
        whole = _HEADER + json.dumps(str(folder)) + "\n" + without_header(text)
        if len(whole.encode()) > TEXT_LIMIT:
            raise ConfigError(f"{file or target}: larger than {TEXT_LIMIT >> 10} KB as a copy that names its folder")
        self._registry.note_applied(fleet.name, folder)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.folder}: the fleets folder cannot be made: {error.strerror}") from error
        try:
            state_folder.write_private(target, whole)
        except StoreError as error:
            # The folder may belong to another user, and be read-only on purpose (ProtectSystem=, a ConfigMap).
            raise ConfigError(
                f"{error}: put the file there yourself, and the daemon reads it; or let tpucare write to {self.folder} "
                "(under systemd: ReadWritePaths=)"
            ) from error
        self._declared[target] = fleet.name
        self._unmark(fleet.name)
        return whole

    # --- fleets that are down ----------------------------------------------------------------------------------------

    def mark_down(self, fleet: str) -> None:
        """
        Rename the file of a fleet that was taken down, so that a new store does not start it again.

        A folder that cannot be written is reported: only the store remembers the end of the fleet then.
        """
        if not self._was_read:
            self._find_declared()
        for path in [path for path, name in self._declared.items() if name == fleet]:
            mark = path.with_name(path.name + DOWN)
            if mark.exists() or not path.exists():
                continue
            try:
                path.rename(mark)
                sync_folder(path.parent)
            except OSError as error:
                message = f"{path} cannot be renamed to {mark.name}: {error.strerror}"
                self._registry.report("fleet-down", f"{message}; a store that is lost would start {fleet} again", fleet)
                continue
            del self._declared[path]

    def _mark_fleets_down(self) -> None:
        """Mark fleets of the store: a daemon may have been killed before it did, and older versions did not."""
        for record in self._registry.records.values() if self._registry.saves else ():
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

    def named_fleets(self) -> frozenset[str]:
        """
        Names of fleets in the files of the folder, also in those that cannot be accepted.

        Raises: ConfigError: the folder cannot be listed.
        """
        try:
            paths = [Path(entry) for entry in os.scandir(self.folder) if entry.name.endswith(SUFFIXES)]
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise ConfigError(f"{self.folder}: the fleets folder cannot be read: {error.strerror}") from error
        return frozenset(_fleet_named_in(path) for path in paths)

    def _find_declared(self) -> None:
        """Note which file declares which fleet, and accept none of them."""
        for path in FolderWatcher(self.folder).poll().changed:
            try:
                _, fleet, _ = self._read(path)
            except ConfigError:
                continue
            self._declared.setdefault(path, fleet.name)

    # --- one file ----------------------------------------------------------------------------------------------------

    def _read_file(self, path: Path) -> None:
        try:
            text, parsed, folder = self._read(path)
            fleet = self._registry.with_project(parsed)
            self._refuse_second_file(fleet, path)
            self._registry.refuse_conflicts(fleet)
        except ConfigError as error:
            self._refused[path] = str(error)
            self._registry.report("fleet-refused", str(error), self._declared.get(path, ""))
            return
        self._refused.pop(path, None)
        before = self._declared.get(path)
        self._declared[path] = fleet.name
        if before not in (None, fleet.name):
            self._report_undeclared(str(before), f"{path} declares {fleet.name} now")
        if self._registry.would_change(fleet, text, folder):
            self._accept(fleet, text, folder, path)

    def _read(self, path: Path) -> tuple[str, FleetSpec, Path]:
        """Text of a file, its fleet, and where its relative paths start. Raises: ConfigError."""
        text = read_text(path)
        if not text.startswith(_HEADER):
            return text, self._registry.parse(text, file=str(path), folder=path.parent), path.parent
        if (base := self.base_of(text)) is not None:
            return text, self._registry.parse(text, file=str(path), folder=base), base
        # Any writer of this folder could name any other folder in that line.
        try:
            return text, self._registry.parse(text, file=str(path), folder=None), path.parent
        except ConfigError as error:
            message = f"{path}:1: `tpucare apply` did not write this line here, so it is not used: apply the file"
            raise ConfigError(f"{message}, or delete the line\n{error}") from error

    def base_of(self, text: str) -> Path | None:
        """The folder that an applied copy names, if the fleet was applied from there. Raises: ConfigError."""
        if not text.startswith(_HEADER):
            return None
        named = folder_of(text, self.folder)
        return named if self._registry.was_applied_from(yaml_document.named(text, "name"), named) else None

    def _accept(self, fleet: FleetSpec, text: str, folder: Path, path: Path) -> None:
        record = self._registry.records.get(fleet.name)
        if record is None and (marks := self._marks(fleet.name)):
            message = (
                f"{path}: {fleet.name} was taken down ({marks[0].name}) and stays so; `tpucare apply {path}` starts it"
            )
            self._registry.report("fleet-down", message, fleet.name)
            return
        wish = record.wish if record is not None else DesiredState.UP
        self._registry.accept(fleet, text, folder, wish)
        for warning in (*fleet.warnings, *filter(None, [self._registry.missing_secrets(fleet.job.secrets)])):
            self._registry.report("fleet-warning", warning, fleet.name)
        if wish is DesiredState.DOWN:
            message = f"{path}: {fleet.name} was taken down and stays so; `tpucare apply {path}` starts it"
            self._registry.report("fleet-down", message, fleet.name)
        else:
            slots = counted(fleet.count, "slot")
            self._registry.report("fleet", f"{path}: {fleet.name} accepted, {slots}", fleet.name, "info")

    def _refuse_second_file(self, fleet: FleetSpec, path: Path) -> None:
        for other, name in self._declared.items():
            if name == fleet.name and other != path and other.exists():
                raise ConfigError(f"{path}: name: {name} is declared in {other} already; choose another")

    def _drop_missing_file(self, path: Path) -> None:
        self._refused.pop(path, None)
        name = self._declared.pop(path, None)
        if name is not None and name not in self._declared.values():
            self._report_undeclared(name, f"{path} is gone")

    def _report_undeclared(self, name: str, why: str) -> None:
        record = self._registry.records.get(name)
        if record is not None and record.wish is not DesiredState.DOWN:
            message = f"{why}: {name} runs on as last accepted; `tpucare down {name}` ends it"
            self._registry.report("fleet-missing", message, name)

    def _report_undeclared_fleets(self) -> None:
        for name in self._registry.records:
            if name not in self._declared.values():
                self._report_undeclared(name, f"no file in {self.folder} declares it")

    def _problem_if_empty(self) -> str:
        return "" if self._declared else f"{self.folder}: holds no fleet file; `tpucare apply FILE` puts one there"

    def _report_problem(self, problem: str) -> None:
        if problem and problem != self._reported:
            self._registry.report("folder", problem)
        self._reported = problem


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
    """The name of the fleet in a file, even if the rest is wrong; without one, the name of the file."""
    try:
        return yaml_document.named(read_text(path), "name") or path.name.partition(".")[0]
    except ConfigError:
        return path.name.partition(".")[0]


def folder_of(text: str, otherwise: Path) -> Path:
    """The folder where relative paths of *text* start: named by its first line in an applied copy, else *otherwise*."""
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
