"""
What a person may ask for, as orders: checked, carried out on engine and roster, answered with plain data.

The daemon hears them at its control socket; a command without a daemon carries them out itself, under the store's lock.
So there is one meaning of each, whoever asks. On the thread of the loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tpucare._version import __version__
from tpucare.fleetfile import yaml_document as yaml_lines
from tpucare.fleetfile.parse import Fleet
from tpucare.model.actions import Wait
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.memory import DesiredState, Memory
from tpucare.model.resources import Node, parse_node_name
from tpucare.model.text import counted, hint, plain, shown
from tpucare.planner import desired_state as wishes
from tpucare.service import status
from tpucare.service.assembly import Runtime
from tpucare.service.fleet_folder import FileProblems, FleetFolder, without_header
from tpucare.service.fleet_registry import FleetRegistry

EVENTS_AT_ONCE = 1000
# SQLite's largest integer.
LAST_NUMBER = 2**63 - 1
Answer = dict[str, Any]


class CannotDo(TpuCareError):
    """What was asked for makes no sense now; the text says why."""


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
    """`carry` takes one order. `stop` is called when somebody orders the daemon to stop."""

    def __init__(
        self,
        caretaker: Runtime,
        roster: FleetRegistry,
        intake: FleetFolder | None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """intake: where applied files go; None: a script declares what is cared for here."""
        self._care, self._engine = caretaker, caretaker.engine
        self._roster, self._intake, self._stop = roster, intake, stop
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

    def carry(self, order: object) -> Answer:
        """
        Carry out one decoded order.

        Raises: ConfigError: it is no order; CannotDo: not now; StoreError.
        """
        if not isinstance(order, Mapping):
            raise ConfigError('an order is a JSON object such as {"do": "status"}')
        do = order.get("do")
        if not isinstance(do, str) or do not in self._verbs:
            near = hint(do, self._verbs) if isinstance(do, str) else ""
            raise ConfigError(f"no verb {shown(do)}{near}; there are {', '.join(self._verbs)}")
        carry, wanted = self._verbs[do]
        return carry(**_arguments(do, order, wanted))

    # --- to look -----------------------------------------------------------------------------------------------------

    def _status(self, target: str) -> Answer:
        now = self._care.clock.now()
        names = self._target(target).slots if target else self._all_slots()
        files = self._intake.problems() if self._intake is not None else FileProblems()
        counts = {name: fleet.count for name, fleet in self._roster.fleets.items()}
        return {
            "version": __version__,
            "at": now.isoformat(),
            "owner": self._care.store.owner,
            "store_lost": self._care.store.lost,
            "projects": status.project_rows(self._engine),
            "fleets": status.fleet_rows(self._roster.records, {**files.of_fleets, **self._roster.unread}, counts),
            "files": [{"file": plain(file), "problem": plain(text)} for file, text in files.others.items()],
            "slots": [self._slot_row(name, now) for name in names],
            "strays": status.stray_rows(self._engine),
        }

    def _slot_row(self, name: str, now: datetime) -> Answer:
        return {
            **status.slot_row(self._engine, self._engine.slots[name], now),
            "surplus": self._roster.is_surplus(name),
        }

    def _plan(self, target: str) -> Answer:
        names = self._target(target).slots if target else self._all_slots()
        return {"projects": status.project_rows(self._engine), "slots": [self._intention(name) for name in names]}

    def _intention(self, name: str) -> Answer:
        track = self._engine.slots[name]
        action = track.action
        return {
            "slot": name,
            "action": status.action_word(track),
            "about": plain(_about(action)),
            "why": plain(action.why),
            "cause": action.cause.value,
            "needs_person": isinstance(action, Wait) and action.needs_person,
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
        store = self._care.store
        found = (
            store.events(slot=slot, after=after, limit=limit)
            if after >= 0
            else store.last_events(slot=slot, limit=limit)
        )
        return {"events": [event_row(number, event) for number, event in found]}

    # --- fleets ------------------------------------------------------------------------------------------------------

    def _apply(self, text: str, folder: str, file: str, restart: bool, replace: bool, paused: bool) -> Answer:
        if self._intake is None:
            raise CannotDo("a Python script declares what is cared for here: change its arguments, and start it again")
        if not Path(folder).is_absolute():
            raise ConfigError(f"folder {shown(folder)} is not an absolute path")
        # A byte order mark is allowed at the very beginning, where the copy says its folder.
        text = text.removeprefix("\ufeff")
        base = self._intake.base_of(text) or Path(folder)
        parsed = self._roster.parse(without_header(text), file=file or "fleet.yaml", folder=base)
        fleet = self._roster.with_project(parsed)
        self._roster.refuse_taken(fleet)
        before = self._roster.fleets.get(fleet.name)
        changes = self._changes(fleet, text)
        lying = self._intake.copy_in(fleet, text, base, file)
        record = self._roster.records.get(fleet.name)
        is_paused = paused or (record is not None and record.wish is DesiredState.PAUSED)
        self._roster.accept(fleet, lying, base, DesiredState.PAUSED if is_paused else DesiredState.UP)
        self._roster.say("fleet", f"{fleet.name} applied: {counted(fleet.count, 'slot')}", fleet.name, "info")
        raised = self._roster.bring_up(fleet.name)
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
            "warnings": [*fleet.warnings, *self._lacking(fleet)],
            "replaced": self._ask_nodes(fleet.name, wishes.replace_node, "replace") if replace else [],
            "restarted": self._ask_nodes(fleet.name, wishes.restart, "restart") if restart and not replace else [],
        }

    def _lacking(self, fleet: Fleet) -> list[str]:
        lacks = self._roster.lacks(fleet)
        return [f"{fleet.name}: {lacks}; until then no node is asked for"] if lacks else []

    def _preview(self, text: str, folder: str, file: str) -> Answer:
        """What `apply` would do. Changes nothing."""
        if self._intake is None:
            raise CannotDo("a Python script declares what is cared for here; no file changes it")
        text = text.removeprefix("\ufeff")
        base = self._intake.base_of(text) or Path(folder)
        parsed = self._roster.parse(without_header(text), file=file or "fleet.yaml", folder=base)
        fleet = self._roster.with_project(parsed)
        self._roster.refuse_taken(fleet)
        known = set(self._roster.slots_of(fleet.name))
        slots = [fleet.slot_name(index) for index in range(fleet.count)]
        return {
            "fleet": fleet.name,
            "is_new": fleet.name not in self._roster.fleets,
            "slots": slots,
            "added": [name for name in slots if name not in known],
            "surplus": [name for name in self._alive(fleet.name) if name not in slots],
            "places": [f"{place.accelerator_type} in {place.zone}" for place in fleet.places],
            "changes": self._changes(fleet, text),
            "warnings": [*fleet.warnings, *self._lacking(fleet)],
        }

    def _changes(self, fleet: Fleet, text: str) -> list[Answer]:
        """What *text* says otherwise than the text that was accepted last, key by key."""
        record, before = self._roster.records.get(fleet.name), self._roster.fleets.get(fleet.name)
        if record is None or before is None:
            return []
        found: list[Answer] = [
            {"key": key, "before": old, "after": new}
            for key, old, new in yaml_lines.differences(without_header(record.text), without_header(text))
        ]
        for path in sorted({*fleet.contents, *before.contents}):
            if path in fleet.contents and path in before.contents and fleet.contents[path] != before.contents[path]:
                found.append({"key": f"job.files: {path}", "before": "its old content", "after": "its new content"})
        return found

    def _surplus_alive(self, fleet: str) -> list[str]:
        return [name for name in self._alive(fleet) if self._roster.is_surplus(name)]

    def _alive(self, fleet: str) -> list[str]:
        """Slots of *fleet* that have a node or ask for one, and were not taken down."""
        return [
            name
            for name in self._roster.slots_of(fleet)
            if (memory := self._engine.slots[name].memory).wish is not DesiredState.DOWN
            and (memory.nodes or memory.creates)
        ]

    def _ask_nodes(self, fleet: str, alter: Callable[[Memory], Memory], kind: str) -> list[str]:
        names = [name for name in self._roster.slots_of(fleet) if self._engine.slots[name].nodes]
        for name in names:
            self._engine.change(name, alter, kind, f"{name}: {kind} asked for")
        return names

    def _down(self, target: str) -> Answer:
        found = self._target(target)
        if found.whole:
            if problem := self._roster.unread.get(found.fleet):
                raise CannotDo(f"{found.fleet}: its text cannot be read, so what it has is not known: {problem}")
            self._roster.wish(found.fleet, DesiredState.DOWN)
            if self._intake is not None:
                self._intake.mark_down(found.fleet)
            self._roster.say("fleet-down", f"{found.fleet}: taken down", found.fleet, "info")
            return {"fleet": found.fleet, "changed": self._roster.take_down(found.fleet)}
        return self._change(found, wishes.down, "down", "taken down")

    def _pause(self, target: str) -> Answer:
        found = self._going(target)
        if found.whole:
            self._roster.wish(found.fleet, DesiredState.PAUSED)
        return self._change(found, wishes.pause, "pause", "paused: observed, and not touched")

    def _resume(self, target: str) -> Answer:
        found = self._going(target)
        if found.whole:
            self._roster.wish(found.fleet, DesiredState.UP)
        return self._change(found, wishes.resume, "resume", "resumed")

    def _retry(self, target: str) -> Answer:
        return self._change(self._going(target), wishes.retry, "retry", "retry: failure counts and backoffs are reset")

    def _confirm(self, target: str) -> Answer:
        if not target:
            self._care.store.confirm()
            for name in self._engine.slots:
                self._engine.lift_brake(name)
            self._roster.say("confirm", "what is listed is all there is: a person confirmed it", level="info")
            return {"changed": self._all_slots(), "store": True}
        found = self._target(target)
        for name in found.slots:
            self._engine.lift_brake(name)
        return self._change(
            found, wishes.confirm, "confirm", "confirmed by a person: held deletes go ahead, and no older node trains"
        )

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _adopt(self, node: str, slot: str) -> Answer:
        name = self.slot_named(slot)
        self._engine.adopt(node, name)
        return {"node": node, "slot": name}

    def _gc(self, apply: bool) -> Answer:
        if apply and self._care.store.lost:
            raise CannotDo(
                "the store was lost, so a node without a fleet may be one that trains: start the daemon, which adopts "
                "what it knows, look at `tpucare gc`, then say `tpucare confirm --store`"
            )
        projects = status.project_rows(self._engine)
        lying = self._intake.fleets_that_lie_here() if self._intake is not None else frozenset()
        left = [node for node in self._engine.strays.values() if not self._is_cared_for(node, lying)]
        strays = {node.name for node in left if _is_our_make(node)}
        for name in strays if apply else ():
            self._engine.collect(name)
        rows = {row["node"]: row for row in status.stray_rows(self._engine)}
        return {
            "strays": [row for name, row in rows.items() if name in strays],
            "adopted": [rows[node.name] for node in left if node.name not in strays],
            "deleting": sorted(strays) if apply else [],
            "projects": [row["project"] for row in projects],
            "unseen_projects": [row["project"] for row in projects if not row["seen"]],
            "unreachable": sorted({zone for row in projects for zone in row["unreachable"]}),
            "store_lost": self._care.store.lost,
        }

    def _is_cared_for(self, node: Node, lying: frozenset[str]) -> bool:
        """Of a fleet that this store knows, or whose file lies in the folder, readable or not: nobody's to sweep."""
        record = self._roster.records.get(node.fleet)
        return node.fleet in lying or (record is not None and record.wish is not DesiredState.DOWN)

    def _stop_daemon(self) -> Answer:
        self._stop()
        return {}

    # --- targets -----------------------------------------------------------------------------------------------------

    def _all_slots(self) -> list[str]:
        known = {track.slot.fleet for track in self._engine.slots.values()}
        return [name for fleet in sorted(known) for name in self._roster.slots_of(fleet)]

    def _target(self, word: str) -> Target:
        if word in self._roster.records:
            return Target(word, tuple(self._roster.slots_of(word)), whole=True)
        track = self._engine.slots.get(word)
        if track is None:
            raise CannotDo(self._unknown(word))
        return Target(track.slot.fleet, (word,), whole=False)

    def _going(self, word: str) -> Target:
        """A target that is not on its way down."""
        found = self._target(word)
        record = self._roster.records.get(found.fleet)
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
        known = [*self._roster.records, *self._engine.slots]
        return f"no fleet or slot {shown(word)}{hint(word, known)}" + ("" if known else "; no fleet is known yet")

    def _change(self, target: Target, alter: Callable[[Memory], Memory], kind: str, text: str) -> Answer:
        for name in target.slots:
            self._engine.change(name, alter, kind, f"{name}: {text}")
        return {"fleet": target.fleet if target.whole else "", "changed": list(target.slots)}


def _is_our_make(node: Node) -> bool:
    """Named after a create of its slot; any other node that bears our label was made by somebody else, and adopted."""
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


def _about(action: object) -> str:
    """What an action is about: a node's name, with the place for a create."""
    place = getattr(action, "place", None)
    name = getattr(action, "name", "") or getattr(getattr(action, "key", None), "name", "")
    return f"{name} in {place.zone} as {place.accelerator_type} {place.provisioning.value}" if place else str(name)


def _arguments(do: str, order: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Values of *order* by the names of *wanted*, whose values are defaults, or a type where there is none."""
    unknown = [key for key in order if key != "do" and key not in wanted]
    if unknown:
        raise ConfigError(f"{do}: unknown key {shown(unknown[0])}{hint(str(unknown[0]), wanted)}")
    values = {}
    for key, default in wanted.items():
        kind = default if isinstance(default, type) else type(default)
        value = order.get(key, None if isinstance(default, type) else default)
        if type(value) is not kind:
            raise ConfigError(f"{do}: {key} must be {_KINDS[kind]}")
        if isinstance(value, str) and not _is_sound(value):
            raise ConfigError(f"{do}: {key} must be text in UTF-8, without NUL: {value[:200]!r}")
        values[key] = value
    return values


def _is_sound(text: str) -> bool:
    """Neither NUL nor half a character, at which paths and the store would stumble."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


_KINDS: Mapping[type, str] = {str: "text", bool: "true or false", int: "a whole number"}
