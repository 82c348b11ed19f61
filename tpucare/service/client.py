"""
Orders to the process that cares: the running daemon over its socket, or, where none runs, this process under the lock
of the store.

Without a daemon an order is carried out on what the store remembers, and nothing is begun; `down` and `gc` alone then
run the engine until they are done, and `plan` for one look.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tpucare.adapters.state import folder as state_folder
from tpucare.engine.engine import Engine
from tpucare.model.errors import CloudError, ConfigError, StoreLocked, TpuCareError
from tpucare.model.memory import DesiredState
from tpucare.model.ports import Clock
from tpucare.model.resources import Event, NodeKey, Slot
from tpucare.model.text import shown
from tpucare.planner.decide import DOWN_PATIENCE, not_looked_at
from tpucare.service import status as service_status
from tpucare.service.assembly import Runtime, assemble
from tpucare.service.commands import CommandHandler
from tpucare.service.control_socket import NoDaemon, Refused, request
from tpucare.service.fleet_folder import FleetFolder, read_text
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.options import DAEMON_STORE, Options
from tpucare.service.stores import Stores

T = TypeVar("T")

LOOK_SECONDS = 60.0
SETTLE_SECONDS = 3.0


class Alone:
    """A desk without a daemon. Made by `alone`, which holds the store's lock for it."""

    def __init__(self, caretaker: Runtime, *, keeps: bool = True) -> None:
        self.care = caretaker
        options = caretaker.options
        self.roster = FleetRegistry.of(caretaker, keeps=keeps)
        self.roster.load()
        if options.project:
            caretaker.engine.watch(options.project)
        is_daemons = options.store == DAEMON_STORE
        self.intake = FleetFolder(options.fleets(os.environ), self.roster) if is_daemons else None
        self.desk = CommandHandler(caretaker, self.roster, self.intake)

    def run(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Run the loop until *until*, at most *seconds*; whether it came true."""
        engine, started = self.care.engine, time.monotonic()
        while not until():
            if seconds is not None and time.monotonic() - started > seconds:
                return False
            self.care.executor.sleep(timedelta(seconds=min(engine.step(), 1.0)))
            self.roster.bury()
        return True

    def look(self) -> None:
        """
        Observe every project once, and each worker once.

        Raises: CloudError: a project could not be listed; of the class that its listing failed with.
        """
        engine = self.care.engine
        if not self.run(
            lambda: all(project.fresh or project.blind for project in engine.projects.values()), LOOK_SECONDS
        ):
            raise CloudError(f"the API did not answer within {LOOK_SECONDS:.0f} s")
        for project in engine.projects.values():
            if project.blind is not None:
                raise project.blind
        self.run(self._all_probed, LOOK_SECONDS)

    def _all_probed(self) -> bool:
        tracks = [node for track in self.care.engine.slots.values() for node in track.nodes.values()]
        return not any(node.probing or (node.probe_due is not None and node.report is None) for node in tracks)


@contextmanager
def alone(options: Options, *, keeps: bool = True, listen: Callable[[Event], None] | None = None) -> Iterator[Alone]:
    """
    keeps: False: what is declared is not written down.

    Raises: StoreLocked: somebody cares for this store already; as `assemble`.
    """
    with assemble(options, os.environ, listen=listen, alone=True) as caretaker:
        yield Alone(caretaker, keeps=keeps)
        caretaker.settle(SETTLE_SECONDS)


@contextmanager
def untouched(options: Options) -> Iterator[Options]:
    """
    Options for a look that makes nothing: where there is no store yet, one that is thrown away, with what is beside it.
    """
    if options.store in Stores(options).names():
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="tpucare-plan-") as folder:
        for name in (
            state_folder.OWNER_FILE,
            state_folder.STORES_FILE,
            options.key.parent.name,
            options.host_keys.name,
        ):
            source = options.state / name
            if source.is_dir():
                shutil.copytree(source, Path(folder, name))
            elif source.exists():
                shutil.copy2(source, Path(folder, name))
        yield replace(options, state=Path(folder), fleets_in=options.fleets(os.environ))


def order(options: Options, what: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out one order, by the daemon if one runs. Raises: whatever was wrong with it."""
    if (answer := _asked_daemon(options, what)) is not None:
        return answer
    with alone(options) as here:
        return here.desk.carry(what)


def _asked_daemon(options: Options, what: Mapping[str, Any]) -> dict[str, Any] | None:
    """The daemon's answer; None: no daemon runs."""
    try:
        return request(options.socket, what)
    except NoDaemon:
        return None


def plan(options: Options, target: str) -> dict[str, Any]:
    """What the daemon would do next. Without one: after one look at the cloud and the workers; nothing is changed."""
    what = {"do": "plan", "target": target}
    if (answer := _asked_daemon(options, what)) is not None:
        return answer
    with untouched(options) as kept, alone(kept, keeps=False) as here:
        # A daemon would begin with the files of the fleets folder.
        if here.intake is not None:
            here.intake.look()
        here.look()
        return here.desk.carry(what)


def preview(options: Options, file: Path) -> dict[str, Any]:
    """What `apply` of a fleet file would change."""
    text, folder = read_text(file), str(file.absolute().parent)
    what = {"do": "preview", "text": text, "folder": folder, "file": str(file)}
    if (answer := _asked_daemon(options, what)) is not None:
        return answer
    with untouched(options) as kept, alone(kept, keeps=False) as here:
        return here.desk.carry(what)


# --- nodes that belong to no slot: `tpucare gc` deletes them, `tpucare adopt-node` gives one to a slot ----------------


ASK_EVERY_SECONDS = 0.3


class NotLooked(CloudError):
    """What is there is not known; "none" would be a guess."""


def find_orphans(options: Options) -> dict[str, Any]:
    return _gc(options, apply=False)


def delete_orphans(options: Options) -> dict[str, Any]:
    """Ask for the deletion of every stray; accepted, not gone, when this returns."""
    return _gc(options, apply=True)


def _gc(options: Options, *, apply: bool) -> dict[str, Any]:
    order = {"do": "gc", "apply": apply}
    if (seen := _asked_daemon(options, order)) is not None:
        if not seen["projects"]:
            raise NotLooked("not looked: the daemon has no project to list; start it with --project or apply a fleet")
        return seen
    ended: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "collected":
            ended.append(event.node)

    with alone(options, listen=listen) as here:
        if not here.care.engine.projects:
            here.care.engine.watch(_project_of(here))
        try:
            here.look()
        except CloudError as error:
            raise NotLooked(f"not looked: {error.message}", error.code, advice=error.advice) from error
        answer = here.desk.carry(order)
        here.run(lambda: set(answer["deleting"]) <= set(ended), LOOK_SECONDS)
        return answer


def _project_of(here: Alone) -> str:
    """Where a caretaker without fleets looks. Raises: NotLooked: no project is known."""
    try:
        return here.care.find_project()
    except ConfigError as error:
        raise NotLooked(f"not looked: {error}") from error


def adopt_node(options: Options, node: str, slot: str) -> dict[str, Any]:
    """Returns once the node bears our labels. Raises: TpuCareError: the API refused."""
    order = {"do": "adopt-node", "node": node, "slot": slot}
    newest = _asked_daemon(options, {"do": "events", "limit": 1})
    if newest is None:
        return _adopt_here(options, order)
    answer = request(options.socket, order)
    after = max((row["number"] for row in newest["events"]), default=0)
    until = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < until:
        rows = request(options.socket, {"do": "events", "after": after, "limit": 1000})["events"]
        for row in rows:
            if row["kind"] == "adopted" and row["node"] == node:
                _refuse(row["level"], row["text"])
                return answer
        after = rows[-1]["number"] if rows else after
        time.sleep(ASK_EVERY_SECONDS)
    raise TpuCareError(f"{node}: the API did not answer within {LOOK_SECONDS:.0f} s; look at `tpucare events`")


def _adopt_here(options: Options, order: Mapping[str, str]) -> dict[str, Any]:
    ended: list[Event] = []

    def listen(event: Event) -> None:
        if event.kind == "adopted" and event.node == order["node"]:
            ended.append(event)

    with alone(options, listen=listen) as here:
        here.look()
        answer = here.desk.carry(order)
        if not here.run(lambda: bool(ended), LOOK_SECONDS):
            raise TpuCareError(f"{order['node']}: the API did not answer within {LOOK_SECONDS:.0f} s")
        _refuse(ended[0].level, ended[0].text)
        return answer


def _refuse(level: str, text: str) -> None:
    if level != "info":
        raise TpuCareError(text)


# --- `tpucare down` to its end: asked of the daemon and watched, or done here when no daemon runs ---------------------


LOOK_EVERY_SECONDS = 0.5
# A process that stops releases its store within this.
END_SECONDS = 20.0


def fleets_that_are_up(options: Options) -> list[str]:
    """Of the daemon's own store. Raises: StoreError: there is none."""
    rows = service_status.of_store(options, "")["fleets"]
    return [row["fleet"] for row in rows if row["wish"] != DesiredState.DOWN.value]


def refuse_unknown(options: Options, target: str) -> None:
    """Before a person is asked. Raises: TpuCareError: no fleet or slot is called so."""
    if Stores(options).is_unused():
        raise TpuCareError(f"no fleet or slot {shown(target)}; no fleet is known yet")
    service_status.status(options, target)


def take_down(
    options: Options, targets: Sequence[str], tell: Callable[[str], None], *, wait: bool
) -> dict[str, dict[str, Any]]:
    """
    By target: `changed`; `left`: slots of which something was there when this returned; `out_of_reach`: what of that
    could not be looked at. *tell* is given a line of text at a time of what goes on here.
    """
    return order_down(
        options,
        targets,
        lambda: {target: _here(options, {"do": "down", "target": target}, tell, wait=wait) for target in targets},
        wait=wait,
    )


def order_down(
    options: Options, targets: Sequence[str], here: Callable[[], T], *, wait: bool, patience_seconds: float = 0.0
) -> T | dict[str, dict[str, Any]]:
    """
    Order the process that cares to take *targets* down; where none does, or it ends before all is done, call *here*.

    here: does it in this process under the lock of the store; raises StoreLocked where another process holds that
    patience_seconds: for a process that holds the store and takes no orders, since it may begin or end at this moment
    Raises: StoreLocked, Refused: it still does.
    """
    until = time.monotonic() + patience_seconds
    while True:
        answers: dict[str, dict[str, Any]] = {}
        try:
            # All are ordered before one is waited for.
            answers = {target: request(options.socket, {"do": "down", "target": target}) for target in targets}
            rows = _await_over(options, {slot for answer in answers.values() for slot in answer["changed"]}, wait=wait)
            return {target: _with_rows(answer, rows) for target, answer in answers.items()}
        except (NoDaemon, Refused) as refusal:
            if answers:
                until = time.monotonic() + END_SECONDS
            try:
                return here()
            except StoreLocked as locked:
                if time.monotonic() > until:
                    raise refusal if isinstance(refusal, Refused) else locked from None
        time.sleep(LOOK_EVERY_SECONDS)


def _await_over(options: Options, slots: Collection[str], *, wait: bool) -> dict[str, service_status.Row] | None:
    """What the daemon says of those of *slots* that it still knows, once nothing is left that it can reach."""
    while wait:
        status = request(options.socket, {"do": "status"})
        rows = {row["slot"]: row for row in status["slots"] if row["slot"] in slots}
        if all(row["over"] or row["out_of_reach"] for row in rows.values()):
            return rows
        time.sleep(LOOK_EVERY_SECONDS)
    return None


def _with_rows(answer: dict[str, Any], rows: Mapping[str, service_status.Row] | None) -> dict[str, Any]:
    slots = list(answer["changed"])
    if rows is None:
        return {**answer, "left": slots, "out_of_reach": []}
    known = [rows[slot] for slot in slots if slot in rows]
    left = [row["slot"] for row in known if not row["over"]]
    return {**answer, "left": left, "out_of_reach": [key for row in known for key in row["out_of_reach"]]}


def _here(options: Options, order: dict[str, str], tell: Callable[[str], None], *, wait: bool) -> dict[str, Any]:
    def listen(event: Event) -> None:
        if event.level != "debug":
            tell(event.text)

    with alone(options, listen=listen) as here:
        answer = here.desk.carry(order)
        engine, fleet, slots = here.care.engine, answer["fleet"], list(answer["changed"])

        def is_meant(slot: Slot) -> bool:
            return slot.fleet == fleet if fleet else slot.name in slots

        ending = Ending(engine, here.care.clock, is_meant, tell)
        if wait:
            # This process ends soon: it begins nothing for slots that it was not asked about.
            engine.release(is_meant)
            here.run(ending.is_over)
        left = [name for name, track in engine.slots.items() if is_meant(track.slot) and not engine.is_over(name)]
        return {**answer, "left": left, "out_of_reach": service_status.key_rows(ending.left)}


# --- when a command or call that took slots down may end: nothing is left of them, as far as can be seen --------------
# A zone that does not answer is waited for only where something of those slots is, or may be; and not for ever, since
# it may never answer again. What could not be looked at stays in memory. On the thread of the loop only.


class Ending:
    """
    Of the slots that are meant.

    say:  told once what is waited for, whenever that changes
    left: what could not be looked at, once it is over
    """

    def __init__(self, engine: Engine, clock: Clock, is_meant: Callable[[Slot], bool], say: Callable[[str], None]):
        self._engine, self._clock, self._is_meant, self._say = engine, clock, is_meant, say
        self._zones: dict[str, set[str]] = {}
        self._silent_since: float | None = None
        self._told: frozenset[str] = frozenset()

    @property
    def left(self) -> tuple[NodeKey, ...]:
        return tuple(key for name in self._slots() for key in self._engine.out_of_reach(name))

    def tell_left(self, name: str) -> None:
        if left := self.left:
            nodes = ", ".join(key.name for key in left)
            self._say(f"{not_looked_at(left)}: {nodes}: remembered; `tpucare down {name}` again once that is possible")

    def is_over(self) -> bool:
        """To be asked after each step of the engine."""
        engine = self._engine
        names = self._slots()
        for name in names:
            track = engine.slots[name]
            self._zones.setdefault(track.slot.project, set()).update(engine.zones_of(name))
        projects = self._zones.keys() or engine.projects.keys()
        views = [engine.projects[project] for project in projects]
        if not all(engine.is_over(name) or engine.out_of_reach(name) for name in names):
            self._silent_since = None
            return False
        if not views or not all(view.fresh for view in views):
            return False
        return self._have_answered()

    def _slots(self) -> list[str]:
        return [name for name, track in self._engine.slots.items() if self._is_meant(track.slot)]

    def _have_answered(self) -> bool:
        """Only a listing that saw a zone can say that nothing is left there, whatever its labels."""
        engine, silent = self._engine, set[str]()
        for project, seen in engine.projects.items():
            zones = seen.unanswered or frozenset()
            # Where memory was lost a node may be anywhere.
            silent |= zones if engine.store.lost else zones & self._zones.get(project, set())
        waits, now = frozenset(silent), self._clock.monotonic()
        if waits and waits != self._told:
            longest = f"{DOWN_PATIENCE.total_seconds():.0f} s"
            self._say(f"waiting for {', '.join(sorted(waits))}, which did not answer yet; at most {longest}")
        self._told = waits
        self._silent_since = now if self._silent_since is None else self._silent_since
        return not waits or now - self._silent_since >= DOWN_PATIENCE.total_seconds()
