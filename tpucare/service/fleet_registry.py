"""
Fleets as last accepted: from the store into the engine, and from a new text into both.

A declared fleet survives the loss of its file: the store keeps its text and desired state, the state folder the files
that it names. `fleet_folder` reads fleet files, `commands` checks what people ask for. On the thread of the loop only.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tpucare.adapters.state import folder as state_folder
from tpucare.engine.engine import Engine
from tpucare.fleetfile import parse as fleets
from tpucare.fleetfile import python_fleet
from tpucare.fleetfile.parse import FleetSpec
from tpucare.model.errors import ConfigError
from tpucare.model.local_files import EVERYWHERE_PRIVATE, Private
from tpucare.model.memory import DesiredState, End, FleetRecord
from tpucare.model.ports import Clock, Store
from tpucare.model.resources import Event, Job, Slot
from tpucare.planner import desired_state
from tpucare.service.stores import Neighbours

if TYPE_CHECKING:
    from tpucare.service.assembly import Runtime

Outfit = Callable[[FleetSpec, Job], Job | str]
"""Completes the job of a pool's slot for its Ray cluster; a text tells what is missing."""


def no_outfit(fleet: FleetSpec, _job: Job) -> Job | str:
    return f"{fleet.name} is a pool of a Ray cluster, which `tpucare daemon` follows"


ACCEPTED = "accepted"
FOLDER_SUFFIX = ".folder"


class FleetRegistry:
    """
    Every fleet that the store has known, by name.

    records: as stored, ended fleets included    fleets: those whose text this version can read
    unread:  why it cannot read the text of the others; such a fleet is cared for again once a new text is accepted
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Clock,
        *,
        state: Path,
        find_project: Callable[[], str],
        saves: bool = True,
        neighbours: Neighbours | None = None,
        private: Private = EVERYWHERE_PRIVATE,
        secrets: Callable[[str], str | None] | None = None,
    ) -> None:
        """
        private:    files that no fleet may send to its workers
        secrets:    value of a secret by name, None = not set; without it missing secrets are not reported
        saves:      False: for a preview; neither the store nor the log of events is written
        neighbours: the other stores of the state folder; a slot of theirs is refused here
        """
        self.records: dict[str, FleetRecord] = store.fleets()
        self.fleets: dict[str, FleetSpec] = {}
        self.unread: dict[str, str] = {}
        self._engine, self._store, self._clock = engine, store, clock
        self._kept = state / ACCEPTED
        self._find_project = find_project
        self.saves = saves
        self._neighbours = neighbours
        self._private, self._secrets = private, secrets
        self._unpinned: set[str] = set()
        self.outfit: Outfit = no_outfit
        """Set by the companion that follows Ray clusters, before `load`."""

    @classmethod
    def of(cls, runtime: Runtime, *, saves: bool = True) -> FleetRegistry:
        """For the parts that `assembly` made; `saves` as in the constructor."""
        return cls(
            runtime.engine,
            runtime.store,
            runtime.clock,
            state=runtime.options.state,
            find_project=runtime.find_project,
            saves=saves,
            neighbours=runtime.neighbours,
            private=runtime.private,
            secrets=runtime.secrets,
        )

    # --- from the store ----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Declare every fleet of the store to the engine; those that are down too, so that their nodes are deleted."""
        for record in list(self.records.values()):
            try:
                fleet = self._read(record)
            except ConfigError as error:
                self.unread[record.name] = str(error)
                self.report(
                    "fleet-unread", f"{record.name}: as last accepted it cannot be read: {error}", record.name, "error"
                )
                continue
            self._declare(fleet, record.wish)
            if not self.records[record.name].project:
                self._unpinned.add(record.name)
            if record.wish is DesiredState.DOWN and self.saves:
                self.take_down(record.name)

    def _read(self, record: FleetRecord) -> FleetSpec:
        contents = self._contents_of(record.name)

        def read(folder: Path, path: str) -> bytes:
            kept = contents.get(str(folder / path))
            if kept is None and record.wish is DesiredState.DOWN:
                return b""  # deleted with the last node of the fleet, and not needed any more
            return kept if kept is not None else fleets.read_local(folder, path, self._private)

        file = f"{record.name}.yaml (as accepted)"
        if python_fleet.is_python(record.text):
            fleet: FleetSpec = python_fleet.parse_python(record.text, file=f"{record.name} (as started)")
        else:
            folder = Path(record.folder)
            fleet = fleets.parse(record.text, file=file, folder=folder, read_file=read, accepted=True)
            fleet = self._with_surplus_files(fleet, lambda path: contents.get(str(folder / path)))
        if fleet.project and not record.project:
            self._pin_project(record.name, fleet.project)
        return replace(fleet, project=fleet.project or record.project or self._find_project())

    def with_project(self, fleet: FleetSpec) -> FleetSpec:
        """
        *fleet* with its project. A new text without one stays in the project of the last text, whatever the default is
        now, until the fleet was taken down and nothing of it is left.

        Raises: ConfigError: the fleet names no project, and nothing else does.
        """
        record = self.records.get(fleet.name)
        is_over = record is None or (
            record.wish is DesiredState.DOWN and not self._engine.registry.has_leftovers(fleet.name)
        )
        before = self.fleets.get(fleet.name)
        kept = before.project if before is not None and not is_over else None
        return replace(fleet, project=fleet.project or kept or self._find_project())

    def _pin_seen_projects(self) -> None:
        """
        Store the project of fleets whose record, of an older version, names none, once their nodes are seen there.

        Before that, a command in a shell with another default project could store the wrong one for good.
        """
        for name in [name for name in self._unpinned if any(self._engine.slots[s].nodes for s in self.slots_of(name))]:
            self._unpinned.discard(name)
            self._pin_project(name, self.fleets[name].project or "")

    def _pin_project(self, fleet: str, project: str) -> None:
        record = self.records[fleet] = replace(self.records[fleet], project=project)
        if self.saves:
            self._store.save_fleet(record)

    # --- a new text --------------------------------------------------------------------------------------------------

    def parse(self, text: str, *, file: str, folder: Path | None) -> FleetSpec:
        """
        The fleet that *text* declares; its relative paths start at *folder*.

        Raises: ConfigError: the text is wrong, or would send a private file to workers.
        """

        def read(base: Path, path: str) -> bytes:
            return fleets.read_local(base, path, self._private)

        fleet = fleets.parse(text, file=file, folder=folder, read_file=read)
        if fleet.job.workdir and (refusal := self._private.refusal(fleet.job.workdir)):
            raise ConfigError(f"{file}: job.workdir: {fleet.job.workdir} {refusal}")
        return fleet

    def was_applied_from(self, fleet: str, folder: Path) -> bool:
        """Whether `tpucare apply` brought *fleet* from *folder*. The text of the fleet alone is no proof of that."""
        record = self.records.get(fleet)
        return (record is not None and record.folder == str(folder)) or self._applied_folder(fleet) == str(folder)

    def note_applied(self, fleet: str, folder: Path) -> None:
        """Write beside the store where *fleet* was applied from: its file has to mean the same after a lost store."""
        if self._applied_folder(fleet) != str(folder):
            state_folder.prepare_folder(self._kept)
            state_folder.write_private(self._kept / f"{fleet}{FOLDER_SUFFIX}", str(folder))

    def _applied_folder(self, fleet: str) -> str:
        try:
            return (self._kept / f"{fleet}{FOLDER_SUFFIX}").read_text("utf-8")
        except (OSError, ValueError):
            return ""

    def refuse_conflicts(self, fleet: FleetSpec) -> None:
        """Raises: ConfigError: another store of the folder has such a slot, or nodes or checkpoints would move."""
        self._refuse_other_project(fleet)
        self._refuse_moved_checkpoint(fleet)
        if self._neighbours is not None and fleet.project:
            names = [fleet.slot_name(index) for index in range(fleet.count)]
            self._neighbours.refuse_shared(fleet.name, names, fleet.project)

    def _refuse_other_project(self, fleet: FleetSpec) -> None:
        """
        Rule 1: an older node is proven dead in its own project only; NOT_FOUND in another proves nothing.

        Raises: ConfigError: the project was changed while nodes of the fleet are, or may be, in the one before.
        """
        record = self.records.get(fleet.name)
        before = record.project if record is not None else ""
        if before and fleet.project != before and self._engine.registry.has_leftovers(fleet.name):
            raise ConfigError(
                f"{fleet.file or fleet.name}: project: {fleet.name} has nodes or open creates in {before} and cannot "
                f"move to {fleet.project}: name {before}, or `tpucare down {fleet.name}` first"
            )

    def _refuse_moved_checkpoint(self, fleet: FleetSpec) -> None:
        """
        A single slot keeps its checkpoints in `checkpoint`; with more slots, each has its own folder below it.

        Raises: ConfigError: slot 0 has trained, and an edit of `count` alone would make it begin anew elsewhere.
        """
        before, record, name = self.fleets.get(fleet.name), self.records.get(fleet.name), fleet.slot_name(0)
        track = self._engine.slots.get(name)
        if (
            before is None
            or track is None
            or record is None
            or record.wish is DesiredState.DOWN
            or not track.memory.attempts
        ):
            return
        old, new = before.checkpoint_of(0), fleet.checkpoint_of(0)
        if old != new and before.job.checkpoint == fleet.job.checkpoint:
            own = f"{fleet.job.checkpoint.rstrip('/')}/{{slot}}"
            raise ConfigError(
                f"{fleet.file or fleet.name}: count: {before.count} -> {fleet.count} would move the "
                f"checkpoints of {name} from {old} to {new}, where it begins anew: copy them there and write "
                f"`checkpoint: {own}`, or `tpucare down {fleet.name}` first"
            )

    def would_change(self, fleet: FleetSpec, text: str, folder: Path) -> bool:
        """Whether `accept` would change anything."""
        record, before = self.records.get(fleet.name), self.fleets.get(fleet.name)
        if record is None or before is None:
            return True
        fleet = self._with_surplus_files(fleet, before.contents.get)
        now = (text, str(folder), fleet.contents, fleet.project)
        return now != (record.text, record.folder, before.contents, before.project)

    def accept(self, fleet: FleetSpec, text: str, folder: Path, wish: DesiredState) -> None:
        """
        Store *fleet* and declare it to the engine; no node is replaced for it.

        Raises: ConfigError: its nodes or checkpoints would move.
        """
        self._refuse_other_project(fleet)
        self._refuse_moved_checkpoint(fleet)
        if (before := self.fleets.get(fleet.name)) is not None:
            fleet = self._with_surplus_files(fleet, before.contents.get)
        contents = {str(folder / path): content for path, content in fleet.contents.items()}
        record = FleetRecord(fleet.name, text, str(folder), self._clock.now(), wish, fleet.project or "")
        if self.saves:
            if wish is not DesiredState.DOWN and contents != self._contents_of(fleet.name):
                self._write_kept_files(fleet.name, contents)
            self._store.save_fleet(record)
        self.records[fleet.name] = record
        self.unread.pop(fleet.name, None)
        self._unpinned.discard(fleet.name)
        self._declare(fleet, wish)

    def _with_surplus_files(self, fleet: FleetSpec, kept: Callable[[str], bytes | None]) -> FleetSpec:
        """*fleet* with the kept files that slots beyond its count need for their next launch."""
        indices = [fleet.index_of(name) for name in self._engine.registry.slot_names(fleet.name)]
        paths = {path for index in indices if index is not None for path in fleet.local_files(index)}
        contents = {path: content for path in paths if (content := kept(path)) is not None}
        return replace(fleet, contents={**contents, **fleet.contents}) if contents else fleet

    def _declare(self, fleet: FleetSpec, wish: DesiredState) -> None:
        self.fleets[fleet.name] = fleet
        missing = cache(self.missing_secrets)
        slots = () if wish is DesiredState.DOWN else [self._complete(fleet, slot, missing) for slot in fleet.slots()]
        if fleet.project:
            self._engine.list_project(fleet.project)
        self._engine.declare(fleet.name, slots, lambda name: self._surplus_slot(fleet, name), wish)

    def declare_again(self, fleet: str) -> None:
        """Declare *fleet* as last accepted, since what its outfit or its secrets depend on has changed."""
        self._declare(self.fleets[fleet], self.records[fleet].wish)

    def _complete(self, fleet: FleetSpec, slot: Slot, missing: Callable[[tuple[str, ...]], str]) -> Slot:
        """*slot* with the job that is launched, or with what it lacks."""
        job = slot.job if fleet.ray is None or slot.job is None else self.outfit(fleet, slot.job)
        if isinstance(job, str):
            return replace(slot, job=None, lacks=job)
        return replace(slot, job=job, lacks=missing(job.secrets) if job is not None else "")

    def missing_secrets(self, names: tuple[str, ...]) -> str:
        """Which of these secrets are not set, and what to do; empty when none is missing or that is not known."""
        if self._secrets is None:
            return ""
        try:
            missing = [name for name in names if self._secrets(name) is None]
        except ConfigError as error:
            return str(error)
        if not missing:
            return ""
        which = f"secret {missing[0]} is" if len(missing) == 1 else f"secrets {', '.join(missing)} are"
        return f"{which} not set: put it into the daemon's environment or credentials folder, and start it again"

    def _surplus_slot(self, fleet: FleetSpec, name: str) -> Slot | None:
        index = fleet.index_of(name)
        if index is None or name != fleet.slot_name(index):
            return None
        try:
            return self._complete(fleet, fleet.slot(index), self.missing_secrets)
        except ConfigError as error:
            # The slot is not declared any more, so a file of it alone was not read: it goes on as it was.
            track = self._engine.slots.get(name)
            if track is not None:
                return track.slot
            return replace(fleet.slot(0), name=name, job=None, job_problem=str(error))

    # --- desired states ----------------------------------------------------------------------------------------------

    def slots_of(self, fleet: str) -> list[str]:
        """Slots of *fleet* that the engine cares for, in order of their index."""
        names = [name for name, track in self._engine.slots.items() if track.slot.fleet == fleet]
        return sorted(names, key=_slot_order)

    def set_desired_state(self, fleet: str, state: DesiredState) -> None:
        """Store the desired state of the whole fleet; its slots are changed one by one after it, and at each start."""
        record = replace(self.records[fleet], wish=state)
        self._store.save_fleet(record)
        self.records[fleet] = record
        if (known := self.fleets.get(fleet)) is not None:
            self._declare(known, state)

    def take_down(self, fleet: str) -> list[str]:
        """Set every slot of *fleet* to down; returns all that are going down, earlier ones included."""
        names = self.slots_of(fleet)
        for name in names:
            if self._engine.slots[name].memory.wish is not DesiredState.DOWN:
                self._engine.change(name, desired_state.down, "down", f"{name}: taken down")
        return names

    def bring_up(self, fleet: str) -> list[str]:
        """Set every declared slot of *fleet* that has ended or was taken down to up; returns those."""
        raised = []
        for slot in self.fleets[fleet].slots():
            memory = self._engine.slots[slot.name].memory
            if memory.wish is DesiredState.DOWN or memory.end is not End.NONE:
                self._engine.change(slot.name, desired_state.up, "up", f"{slot.name}: wanted again")
                raised.append(slot.name)
        return raised

    def remove_finished_slots(self) -> list[str]:
        """Remove slots that were taken down and have nothing left. To be called once per iteration of the loop."""
        if self._unpinned:
            self._pin_seen_projects()
        gone = [name for name in self._going_down() if self._engine.is_over(name) and not self._is_declared(name)]
        fleets_of = {self._engine.slots[name].slot.fleet for name in gone}
        for name in gone:
            self._engine.registry.remove_slot(name)
            self.report("down", f"{name}: nothing is left of it", name, "info")
        for fleet in fleets_of:
            self._delete_kept_files(fleet)
        return gone

    def _going_down(self) -> list[str]:
        return [name for name, track in self._engine.slots.items() if track.memory.wish is DesiredState.DOWN]

    def is_surplus(self, slot: str) -> bool:
        """Whether *slot* is beyond a count that was lowered: it runs on until `tpucare down SLOT`."""
        fleet = self.fleets.get(self._engine.slots[slot].slot.fleet)
        index = fleet.index_of(slot) if fleet is not None else None
        return fleet is not None and index is not None and index >= fleet.count

    def _is_declared(self, slot: str) -> bool:
        name = self._engine.slots[slot].slot.fleet
        fleet, record = self.fleets.get(name), self.records.get(name)
        if fleet is None or record is None or record.wish is DesiredState.DOWN:
            return False
        index = fleet.index_of(slot)
        return index is not None and index < fleet.count

    # --- events and kept files ---------------------------------------------------------------------------------------

    def report(
        self, kind: str, text: str, about: str = "", level: str = "warning", **fields: str | int | float | bool | None
    ) -> None:
        """Store an event of a fleet, a slot, or the daemon itself, and show it."""
        if not self.saves:
            return
        event = Event(self._clock.now(), kind, text, about, "", level, fields)
        self._store.save({}, (event,))
        self._engine.listen(event)

    def _contents_of(self, fleet: str) -> dict[str, bytes]:
        """Contents of the files that a fleet names, by local path, as they were when it was accepted."""
        try:
            raw = json.loads((self._kept / f"{fleet}.json").read_text("utf-8"))
            return {str(path): base64.b64decode(content) for path, content in raw.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _delete_kept_files(self, fleet: str) -> None:
        """Delete the kept files of a fleet that was taken down and has no node left: they may hold secrets."""
        record = self.records.get(fleet)
        if record is not None and record.wish is DesiredState.DOWN and not self._engine.registry.has_leftovers(fleet):
            for suffix in (".json", FOLDER_SUFFIX):
                with contextlib.suppress(OSError):
                    (self._kept / f"{fleet}{suffix}").unlink()

    def _write_kept_files(self, fleet: str, contents: Mapping[str, bytes]) -> None:
        state_folder.prepare_folder(self._kept)
        text = json.dumps({path: base64.b64encode(content).decode("ascii") for path, content in contents.items()})
        state_folder.write_private(self._kept / f"{fleet}.json", text)


def _slot_order(name: str) -> tuple[str, int]:
    fleet, _, index = name.rpartition("-")
    return (fleet, int(index)) if index.isdecimal() else (name, 0)
