"""
The commands of people, as decoded JSON: checked, executed on engine and registry, answered with plain data.

The daemon receives them at its control socket; without a daemon the CLI executes them itself, under the lock of the
store. So each command has one meaning. On the thread of the loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tpucare._version import __version__
from tpucare.fleetfile import yaml_document
from tpucare.fleetfile.parse import FleetSpec
from tpucare.model.actions import Wait
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.evidence import ProjectEvidence
from tpucare.model.memory import DesiredState, Memory
from tpucare.model.resources import Node, QueuedResource, Slot, parse_node_name
from tpucare.model.text import counted, hint, plain, shown
from tpucare.planner import desired_state
from tpucare.planner.budget import NOTHING_SPENT, closed_by
from tpucare.service import status
from tpucare.service.assembly import Runtime
from tpucare.service.fleet_folder import FileProblems, FleetFolder, without_header
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.places import order_rows

EVENTS_AT_ONCE = 1000
# SQLite's largest integer.
LAST_NUMBER = 2**63 - 1
Answer = dict[str, Any]


class CannotDo(TpuCareError):
    """The command makes no sense now; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A fleet with all its slots, or one slot."""

    fleet: str
    slots: tuple[str, ...]
    whole: bool

    @property
    def word(self) -> str:
        return self.fleet if self.whole else self.slots[0]


class CommandHandler:
    """Executes one command at a time. `stop` is called when the daemon is to stop."""

    def __init__(
        self,
        runtime: Runtime,
        registry: FleetRegistry,
        fleet_folder: FleetFolder | None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """fleet_folder: where applied files go; None: a Python script declares the fleet, and takes no files."""
        self._runtime, self._engine = runtime, runtime.engine
        self._registry, self._folder, self._stop = registry, fleet_folder, stop
        self._verbs: Mapping[str, tuple[Callable[..., Answer], Mapping[str, Any]]] = {
            "status": (self._status, {"target": ""}),
            "plan": (self._plan, {"target": ""}),
            "workers": (self._workers, {"slot": str}),
            "apply": (
                self._apply,
                {"text": str, "folder": str, "file": "", "restart": False, "replace": False, "paused": False},
            ),
            "preview": (self._preview, {"text": str, "folder": str, "file": ""}),
            "down": (self._down, {"target": str}),
            "pause": (self._pause, {"target": str}),
            "resume": (self._resume, {"target": str}),
            "retry": (self._retry, {"target": str}),
            "confirm": (self._confirm, {"target": ""}),
            "adopt-node": (self._adopt, {"node": str, "slot": str}),
            "gc": (self._gc, {"apply": False}),
            "events": (self._events, {"slot": "", "after": -1, "limit": 100}),
            "stop": (self._stop_daemon, {}),
        }

    def handle(self, command: object) -> Answer:
        """
        Execute one decoded command, such as {"do": "status"}.

        Raises: ConfigError: it is no command; CannotDo: not now; StoreError.
        """
        if not isinstance(command, Mapping):
            raise ConfigError('a command is a JSON object such as {"do": "status"}')
        do = command.get("do")
        if not isinstance(do, str) or do not in self._verbs:
            near = hint(do, self._verbs) if isinstance(do, str) else ""
            raise ConfigError(f"no verb {shown(do)}{near}; there are {', '.join(self._verbs)}")
        execute, wanted = self._verbs[do]
        return execute(**_arguments(do, command, wanted))

    # --- reading -----------------------------------------------------------------------------------------------------

    def _status(self, target: str) -> Answer:
        now = self._runtime.clock.now()
        names = self._target(target).slots if target else self._all_slots()
        files = self._folder.problems() if self._folder is not None else FileProblems()
        counts = {name: fleet.count for name, fleet in self._registry.fleets.items()}
        problems = {**files.of_fleets, **self._registry.unread}
        return {
            "version": __version__,
            "at": now.isoformat(),
            "owner": self._runtime.store.owner,
            "store_lost": self._runtime.store.lost,
            "projects": status.project_rows(self._engine),
            "fleets": status.fleet_rows(self._registry.records, problems, counts, self._costs()),
            "files": [{"file": plain(file), "problem": plain(text)} for file, text in files.others.items()],
            "slots": [self._slot_row(name, now) for name in names],
            "strays": status.stray_rows(self._engine),
        }

    def _costs(self) -> dict[str, Answer]:
        spent = self._engine.bounds.spendings()
        return {
            name: status.cost_row(fleet.bounds, spent.get(name, NOTHING_SPENT))
            for name, fleet in self._registry.fleets.items()
        }

    def _slot_row(self, name: str, now: datetime) -> Answer:
        return {
            **status.slot_row(self._engine, self._engine.slots[name], now),
            "surplus": self._registry.is_surplus(name),
        }

    def _plan(self, target: str) -> Answer:
        names = self._target(target).slots if target else self._all_slots()
        meant = {self._engine.slots[name].slot.fleet for name in names}
        return {
            "projects": status.project_rows(self._engine),
            "slots": [self._planned_action(name) for name in names],
            "costs": {name: row for name, row in self._costs().items() if name in meant},
            "places": [row for fleet in sorted(meant) for row in self._order_of(fleet, names)],
        }

    def _order_of(self, fleet: str, names: Sequence[str]) -> list[Answer]:
        """In which order the slots of *fleet* among *names* ask its places; a fleet that is down asks none."""
        tracks = [self._engine.slots[name] for name in names if self._engine.slots[name].slot.fleet == fleet]
        if all(track.memory.wish is DesiredState.DOWN for track in tracks):
            return []
        return self._order_rows(tracks[0].slot, [track.memory for track in tracks])

    def _order_rows(self, slot: Slot, memories: Sequence[Memory]) -> list[Answer]:
        state, view = self._engine.state, self._engine.projects.get(slot.project)
        evidence = (
            state.project_evidence(view)
            if view is not None
            else ProjectEvidence(fresh=False, markets=state.markets.of(slot.project))
        )
        return order_rows(slot, memories, evidence, self._runtime.clock.now())

    def _planned_action(self, name: str) -> Answer:
        track = self._engine.slots[name]
        action = track.action
        return {
            "slot": name,
            "action": status.action_word(track),
            "about": plain(_node_of(action)),
            "why": plain(action.why),
            "cause": action.cause.value,
            "needs_person": isinstance(action, Wait) and action.needs_person,
            "work": status.work_row(self._engine, track),
            "in_flight": sorted(str(key) for key in track.in_flight),
        }

    def _workers(self, slot: str) -> Answer:
        name = self.slot_named(slot)
        track = self._engine.slots[name]
        seen = status.newest(track)
        if seen is None or seen.workers is None:
            raise CannotDo(f"{name} has no node that lists its workers now: {plain(track.action.why)}")
        return {"slot": name, "workers": status.worker_rows(seen.node, seen.workers)}

    def _events(self, slot: str, after: int, limit: int) -> Answer:
        if after > LAST_NUMBER:
            raise ConfigError(f"after must be the number of an event, at most {LAST_NUMBER}")
        limit = max(1, min(limit, EVENTS_AT_ONCE))
        store = self._runtime.store
        found = (
            store.events(slot=slot, after=after, limit=limit)
            if after >= 0
            else store.last_events(slot=slot, limit=limit)
        )
        return {"events": [event_row(number, event) for number, event in found]}

    # --- fleets ------------------------------------------------------------------------------------------------------

    def _apply(self, text: str, folder: str, file: str, restart: bool, replace: bool, paused: bool) -> Answer:
        if self._folder is None:
            raise CannotDo("a Python script declares this fleet: change its arguments, and start it again")
        if not Path(folder).is_absolute():
            raise ConfigError(f"folder {shown(folder)} is not an absolute path")
        # A byte order mark is allowed at the very beginning, where the copy names its folder.
        text = text.removeprefix("\ufeff")
        base = self._folder.base_of(text) or Path(folder)
        parsed = self._registry.parse(without_header(text), file=file or "fleet.yaml", folder=base)
        fleet = self._registry.with_project(parsed)
        self._registry.refuse_conflicts(fleet)
        before = self._registry.fleets.get(fleet.name)
        changes = self._changes(fleet, text)
        copied = self._folder.copy_in(fleet, text, base, file)
        record = self._registry.records.get(fleet.name)
        is_paused = paused or (record is not None and record.wish is DesiredState.PAUSED)
        self._registry.accept(fleet, copied, base, DesiredState.PAUSED if is_paused else DesiredState.UP)
        self._registry.report("fleet", f"{fleet.name} applied: {counted(fleet.count, 'slot')}", fleet.name, "info")
        raised = self._registry.bring_up(fleet.name)
        if paused:
            # Before anything is decided about them: a paused slot asks for no node.
            self._pause(fleet.name)
        return {
            "fleet": fleet.name,
            "slots": [fleet.slot_name(index) for index in range(fleet.count)],
            "surplus": self._surplus_alive(fleet.name),
            "is_new": before is None,
            "changes": changes,
            "started_again": raised,
            "paused": is_paused,
            "order": self._order_rows(fleet.slot(0), self._memories(fleet.name)),
            "warnings": [*fleet.warnings, *self._missing_secrets(fleet), *self._bounds_over(fleet)],
            "replaced": self._change_live(fleet.name, desired_state.replace_node, "replace") if replace else [],
            "restarted": self._change_live(fleet.name, desired_state.restart, "restart")
            if restart and not replace
            else [],
        }

    def _missing_secrets(self, fleet: FleetSpec) -> list[str]:
        lacks = self._registry.missing_secrets(fleet.job.secrets)
        return [f"{fleet.name}: {lacks}; until then no node is created"] if lacks else []

    def _bounds_over(self, fleet: FleetSpec) -> list[str]:
        closed = closed_by(fleet.bounds, self._engine.bounds.spending(fleet.name), self._runtime.clock.now())
        return [f"{fleet.name}: {closed.why}: no node is made before the bound is moved"] if closed else []

    def _preview(self, text: str, folder: str, file: str) -> Answer:
        """The changes that `apply` would make; makes none."""
        if self._folder is None:
            raise CannotDo("a Python script declares this fleet; no file changes it")
        text = text.removeprefix("\ufeff")
        base = self._folder.base_of(text) or Path(folder)
        parsed = self._registry.parse(without_header(text), file=file or "fleet.yaml", folder=base)
        fleet = self._registry.with_project(parsed)
        self._registry.refuse_conflicts(fleet)
        known = set(self._registry.slots_of(fleet.name))
        slots = [fleet.slot_name(index) for index in range(fleet.count)]
        return {
            "fleet": fleet.name,
            "is_new": fleet.name not in self._registry.fleets,
            "slots": slots,
            "added": [name for name in slots if name not in known],
            "surplus": [name for name in self._alive(fleet.name) if name not in slots],
            "places": [
                f"{place.accelerator_type} in {place.zone}"
                for place in fleet.places
                if not fleet.bounds.excludes(place)
            ],
            "order": self._order_rows(fleet.slot(0), self._memories(fleet.name)),
            "changes": self._changes(fleet, text),
            "warnings": [*fleet.warnings, *self._missing_secrets(fleet), *self._bounds_over(fleet)],
        }

    def _changes(self, fleet: FleetSpec, text: str) -> list[Answer]:
        """How *text* differs from the text that was accepted last, key by key."""
        record, before = self._registry.records.get(fleet.name), self._registry.fleets.get(fleet.name)
        if record is None or before is None:
            return []
        found: list[Answer] = [
            {"key": key, "before": old, "after": new}
            for key, old, new in yaml_document.differences(without_header(record.text), without_header(text))
        ]
        for path in sorted({*fleet.contents, *before.contents}):
            if path in fleet.contents and path in before.contents and fleet.contents[path] != before.contents[path]:
                found.append({"key": f"job.files: {path}", "before": "its old content", "after": "its new content"})
        return found

    def _memories(self, fleet: str) -> list[Memory]:
        return [self._engine.slots[name].memory for name in self._registry.slots_of(fleet)]

    def _surplus_alive(self, fleet: str) -> list[str]:
        return [name for name in self._alive(fleet) if self._registry.is_surplus(name)]

    def _alive(self, fleet: str) -> list[str]:
        """Slots of *fleet* that have a node or ask for one, and were not taken down."""
        return [
            name
            for name in self._registry.slots_of(fleet)
            if (memory := self._engine.slots[name].memory).wish is not DesiredState.DOWN
            and (memory.nodes or memory.asked_for)
        ]

    def _change_live(self, fleet: str, alter: Callable[[Memory], Memory], kind: str) -> list[str]:
        names = [name for name in self._registry.slots_of(fleet) if self._engine.slots[name].nodes]
        for name in names:
            self._engine.change(name, alter, kind, f"{name}: {kind} asked for")
        return names

    def _down(self, target: str) -> Answer:
        found = self._target(target)
        if found.whole:
            if problem := self._registry.unread.get(found.fleet):
                raise CannotDo(f"{found.fleet}: its text cannot be read, so its slots are not known: {problem}")
            self._registry.set_desired_state(found.fleet, DesiredState.DOWN)
            if self._folder is not None:
                self._folder.mark_down(found.fleet)
            self._registry.report("fleet-down", f"{found.fleet}: taken down", found.fleet, "info")
            return {"fleet": found.fleet, "changed": self._registry.take_down(found.fleet)}
        return self._change(found, desired_state.down, "down", "taken down")

    def _pause(self, target: str) -> Answer:
        found = self._target_up(target)
        if found.whole:
            self._registry.set_desired_state(found.fleet, DesiredState.PAUSED)
        return self._change(found, desired_state.pause, "pause", "paused: observed, and not touched")

    def _resume(self, target: str) -> Answer:
        found = self._target_up(target)
        if found.whole:
            self._registry.set_desired_state(found.fleet, DesiredState.UP)
        return self._change(found, desired_state.resume, "resume", "resumed")

    def _retry(self, target: str) -> Answer:
        return self._change(
            self._target_up(target), desired_state.retry, "retry", "retry: failure counts and backoffs are reset"
        )

    def _confirm(self, target: str) -> Answer:
        if not target:
            self._runtime.store.confirm()
            for name in self._engine.slots:
                self._engine.lift_brake(name)
            self._registry.report("confirm", "a person confirmed that the listed nodes are all nodes", level="info")
            return {"changed": self._all_slots(), "store": True}
        found = self._target(target)
        for name in found.slots:
            self._engine.lift_brake(name)
        return self._change(
            found,
            desired_state.confirm,
            "confirm",
            "a person confirmed: held deletes go ahead, and no older node trains",
        )

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _adopt(self, node: str, slot: str) -> Answer:
        name = self.slot_named(slot)
        self._engine.adopt_node(node, name)
        return {"node": node, "slot": name}

    def _gc(self, apply: bool) -> Answer:
        if apply and self._runtime.store.lost:
            raise CannotDo(
                "the store was lost, so a node without a fleet may be one that trains: start the daemon, which adopts "
                "the nodes of known fleets, check the list of `tpucare gc`, then run `tpucare confirm --store`"
            )
        projects = status.project_rows(self._engine)
        declared = self._folder.named_fleets() if self._folder is not None else frozenset()
        found: list[Node | QueuedResource] = [*self._engine.orphans.values(), *self._engine.orphan_requests.values()]
        left = [one for one in found if not self._is_cared_for(one, declared)]
        strays = {one.name for one in left if _is_named_by_us(one)}
        for name in strays if apply else ():
            if name in self._engine.orphans:
                self._engine.delete_orphan(name)
            if name in self._engine.orphan_requests:
                self._engine.delete_orphan_request(name)
        rows = {row["node"]: row for row in status.stray_rows(self._engine)}
        return {
            "strays": [row for name, row in rows.items() if name in strays],
            "adopted": [rows[node.name] for node in left if node.name not in strays],
            "deleting": sorted(strays) if apply else [],
            "projects": [row["project"] for row in projects],
            "unseen_projects": [row["project"] for row in projects if not row["seen"]],
            "unseen_queues": sorted(name for name, view in self._engine.projects.items() if not view.queue.is_known),
            "unreachable": sorted(
                {zone for row in projects for zone in row["unreachable"]}
                | {zone for view in self._engine.projects.values() for zone in view.queue.unreachable}
            ),
            "store_lost": self._runtime.store.lost,
        }

    def _is_cared_for(self, node: Node | QueuedResource, declared: frozenset[str]) -> bool:
        """Whether a file of the folder, readable or not, declares its fleet, or this store knows it as not down."""
        record = self._registry.records.get(node.fleet)
        return node.fleet in declared or (record is not None and record.wish is not DesiredState.DOWN)

    def _stop_daemon(self) -> Answer:
        self._stop()
        return {}

    # --- targets -----------------------------------------------------------------------------------------------------

    def _all_slots(self) -> list[str]:
        known = {track.slot.fleet for track in self._engine.slots.values()}
        return [name for fleet in sorted(known) for name in self._registry.slots_of(fleet)]

    def _target(self, word: str) -> Target:
        if word in self._registry.records:
            return Target(word, tuple(self._registry.slots_of(word)), whole=True)
        track = self._engine.slots.get(word)
        if track is None:
            raise CannotDo(self._unknown(word))
        return Target(track.slot.fleet, (word,), whole=False)

    def _target_up(self, word: str) -> Target:
        """The target *word*, without slots that are going down. Raises: CannotDo: all of it is."""
        found = self._target(word)
        record = self._registry.records.get(found.fleet)
        states = [self._engine.slots[name].memory.wish for name in found.slots]
        is_down = found.whole and record is not None and record.wish is DesiredState.DOWN
        if is_down or (states and all(wish is DesiredState.DOWN for wish in states)):
            raise CannotDo(f"{word} was taken down; `tpucare apply` of its fleet file starts it again")
        kept = tuple(n for n in found.slots if self._engine.slots[n].memory.wish is not DesiredState.DOWN)
        return Target(found.fleet, kept, found.whole)

    def slot_named(self, word: str) -> str:
        """The slot that *word* means: itself, or slot 0 of that fleet."""
        name = word if word in self._engine.slots else f"{word}-0"
        if name not in self._engine.slots:
            raise CannotDo(self._unknown(word))
        return name

    def _unknown(self, word: str) -> str:
        known = [*self._registry.records, *self._engine.slots]
        return f"no fleet or slot {shown(word)}{hint(word, known)}" + ("" if known else "; no fleet is known yet")

    def _change(self, target: Target, alter: Callable[[Memory], Memory], kind: str, text: str) -> Answer:
        for name in target.slots:
            self._engine.change(name, alter, kind, f"{name}: {text}")
        return {"fleet": target.fleet if target.whole else "", "changed": list(target.slots)}


def _is_named_by_us(node: Node | QueuedResource) -> bool:
    """Whether its name is a create of its slot. Any other node with our label was made by a person, and adopted."""
    made_for = parse_node_name(node.name)
    return made_for is not None and made_for[0] == node.slot


def event_row(number: int, event: Any) -> Answer:
    return {
        "number": number,
        "at": event.at.isoformat(),
        "level": event.level,
        "kind": event.kind,
        "slot": plain(event.slot),
        "node": plain(event.node),
        "text": plain(event.text),
        "fields": {key: plain(value) if isinstance(value, str) else value for key, value in event.fields.items()},
    }


def _node_of(action: object) -> str:
    """The node that an action concerns, with the place for a create; empty for an action without one."""
    place = getattr(action, "place", None)
    name = getattr(action, "name", "") or getattr(getattr(action, "key", None), "name", "")
    return f"{name} in {place.zone} as {place.accelerator_type} {place.provisioning.value}" if place else str(name)


def _arguments(do: str, command: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Values of *command* by the names of *wanted*, whose values are defaults, or a type where there is none."""
    unknown = [key for key in command if key != "do" and key not in wanted]
    if unknown:
        raise ConfigError(f"{do}: unknown key {shown(unknown[0])}{hint(str(unknown[0]), wanted)}")
    values = {}
    for key, default in wanted.items():
        kind = default if isinstance(default, type) else type(default)
        value = command.get(key, None if isinstance(default, type) else default)
        if type(value) is not kind:
            raise ConfigError(f"{do}: {key} must be {_KINDS[kind]}")
        if isinstance(value, str) and not _is_valid_text(value):
            raise ConfigError(f"{do}: {key} must be text in UTF-8, without NUL: {value[:200]!r}")
        values[key] = value
    return values


def _is_valid_text(text: str) -> bool:
    """Without NUL and without half a character, which paths and the store cannot hold."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


_KINDS: Mapping[type, str] = {str: "text", bool: "true or false", int: "a whole number"}
