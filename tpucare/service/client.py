"""
The client of the CLI and the Python API: a command goes to the running daemon over its socket; where none runs, this
process executes it under the lock of the store.

Without a daemon a command changes what the store remembers, and creates nothing; only `down`, `gc` and `adopt-node`
then run the engine until they are done, and `plan` until everything was observed once.
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
from tpucare.adapters.state import market_files
from tpucare.engine.engine import Engine
from tpucare.model.errors import CloudError, ConfigError, StoreLocked, TpuCareError
from tpucare.model.memory import DesiredState
from tpucare.model.ports import Clock
from tpucare.model.resources import Event, NodeKey, Slot
from tpucare.model.text import shown
from tpucare.planner.decide import DOWN_PATIENCE, unread_nodes
from tpucare.service import status as service_status
from tpucare.service.assembly import Runtime, assemble
from tpucare.service.commands import CommandHandler
from tpucare.service.control_socket import NoDaemon, Refused, Suspended, is_stopped, request, suspension_of
from tpucare.service.fleet_folder import FleetFolder, read_text
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.options import DAEMON_STORE, Options
from tpucare.service.stores import Stores

T = TypeVar("T")

OBSERVE_SECONDS = 60.0
SETTLE_SECONDS = 3.0


class Standalone:
    """Engine and command handler of this process. Made by `standalone`, which holds the lock of the store for it."""

    def __init__(self, runtime: Runtime, *, saves: bool = True) -> None:
        self.runtime = runtime
        options = runtime.options
        self.registry = FleetRegistry.of(runtime, saves=saves)
        self.registry.load()
        if options.project:
            runtime.engine.list_project(options.project)
        is_daemons = options.store == DAEMON_STORE
        self.fleet_folder = FleetFolder(options.fleets(os.environ), self.registry) if is_daemons else None
        self.handler = CommandHandler(runtime, self.registry, self.fleet_folder)

    def run_until(self, is_done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Run the loop, at most *seconds*; whether *is_done* came true."""
        engine, started = self.runtime.engine, time.monotonic()
        while not is_done():
            if seconds is not None and time.monotonic() - started > seconds:
                return False
            self.runtime.executor.sleep(timedelta(seconds=min(engine.step(), 1.0)))
            self.registry.remove_finished_slots()
        return True

    def observe(self) -> None:
        """
        List every project once, and probe each worker once.

        Raises: CloudError: a project could not be listed; of the class of that error.
        """
        engine = self.runtime.engine
        if not self.run_until(
            lambda: all(project.fresh or project.blind for project in engine.projects.values()), OBSERVE_SECONDS
        ):
            raise CloudError(f"the API did not answer within {OBSERVE_SECONDS:.0f} s")
        for project in engine.projects.values():
            if project.blind is not None:
                raise project.blind
        self.run_until(self._all_probed, OBSERVE_SECONDS)

    def _all_probed(self) -> bool:
        tracks = [node for track in self.runtime.engine.slots.values() for node in track.nodes.values()]
        return not any(node.probing or (node.probe_due is not None and node.report is None) for node in tracks)


@contextmanager
def standalone(
    options: Options, *, saves: bool = True, listen: Callable[[Event], None] | None = None
) -> Iterator[Standalone]:
    """
    saves: False: what is declared is not written to the store.

    Raises: StoreLocked: another process holds this store; as `assemble`.
    """
    with assemble(options, os.environ, listen=listen, alone=True) as runtime:
        yield Standalone(runtime, saves=saves)
        runtime.settle(SETTLE_SECONDS)


@contextmanager
def throwaway_state(options: Options) -> Iterator[Options]:
    """
    Options for a command that changes nothing: where there is no store yet, those of a temporary copy of the folder.
    """
    if options.store in Stores(options).names():
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="tpucare-plan-") as folder:
        for name in (
            state_folder.OWNER_FILE,
            state_folder.STORES_FILE,
            market_files.FOLDER,
            options.key.parent.name,
            options.host_keys.name,
        ):
            source = options.state / name
            if source.is_dir():
                shutil.copytree(source, Path(folder, name))
            elif source.exists():
                shutil.copy2(source, Path(folder, name))
        yield replace(options, state=Path(folder), fleets_in=options.fleets(os.environ))


def execute(options: Options, command: Mapping[str, Any]) -> dict[str, Any]:
    """Execute one command, in the daemon if one runs. Raises: TpuCareError: the command failed."""
    if (answer := _asked_daemon(options, command)) is not None:
        return answer
    with standalone(options) as here:
        return here.handler.handle(command)


def _asked_daemon(options: Options, command: Mapping[str, Any]) -> dict[str, Any] | None:
    """The daemon's answer; None: no daemon runs."""
    try:
        return request(options.socket, command)
    except NoDaemon:
        return None


def plan(options: Options, target: str) -> dict[str, Any]:
    """The next action of every slot. Without a daemon the cloud and the workers are observed once; nothing changes."""
    command = {"do": "plan", "target": target}
    if (answer := _asked_daemon(options, command)) is not None:
        return answer
    with throwaway_state(options) as kept, standalone(kept, saves=False) as here:
        # A daemon begins with the files of the fleets folder.
        if here.fleet_folder is not None:
            here.fleet_folder.read_changes()
        here.observe()
        return here.handler.handle(command)


def preview(options: Options, file: Path) -> dict[str, Any]:
    """The changes that `apply` of a fleet file would make."""
    text, folder = read_text(file), str(file.absolute().parent)
    command = {"do": "preview", "text": text, "folder": folder, "file": str(file)}
    if (answer := _asked_daemon(options, command)) is not None:
        return answer
    with throwaway_state(options) as kept, standalone(kept, saves=False) as here:
        return here.handler.handle(command)


# --- nodes that belong to no slot: `tpucare gc` deletes them, `tpucare adopt-node` gives one to a slot ----------------


ASK_EVERY_SECONDS = 0.3


class NotListed(CloudError):
    """No project could be listed; "none" would be a guess."""


def find_orphans(options: Options) -> dict[str, Any]:
    return _gc(options, apply=False)


def delete_orphans(options: Options) -> dict[str, Any]:
    """Request the deletion of every orphan; accepted, not gone, when this returns."""
    return _gc(options, apply=True)


def _gc(options: Options, *, apply: bool) -> dict[str, Any]:
    command = {"do": "gc", "apply": apply}
    if (seen := _asked_daemon(options, command)) is not None:
        if not seen["projects"]:
            raise NotListed(
                "nothing was listed: the daemon has no project to list; start it with --project or apply a fleet"
            )
        return seen
    ended: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "collected":
            ended.append(event.node)

    with standalone(options, listen=listen) as here:
        if not here.runtime.engine.projects:
            here.runtime.engine.list_project(_project_of(here))
        try:
            here.observe()
        except CloudError as error:
            raise NotListed(f"nothing was listed: {error.message}", error.code, advice=error.advice) from error
        queues = [view.queue for view in here.runtime.engine.projects.values()]
        here.run_until(lambda: all(queue.fresh or queue.why for queue in queues), OBSERVE_SECONDS)
        answer = here.handler.handle(command)
        here.run_until(lambda: set(answer["deleting"]) <= set(ended), OBSERVE_SECONDS)
        return answer


def _project_of(here: Standalone) -> str:
    """The project to list when no fleet names one. Raises: NotListed: no project is known."""
    try:
        return here.runtime.find_project()
    except ConfigError as error:
        raise NotListed(f"nothing was listed: {error}") from error


def adopt_node(options: Options, node: str, slot: str) -> dict[str, Any]:
    """Returns once the node bears our labels. Raises: TpuCareError: the API refused."""
    command = {"do": "adopt-node", "node": node, "slot": slot}
    newest = _asked_daemon(options, {"do": "events", "limit": 1})
    if newest is None:
        return _adopt_here(options, command)
    answer = request(options.socket, command)
    after = max((row["number"] for row in newest["events"]), default=0)
    until = time.monotonic() + OBSERVE_SECONDS
    while time.monotonic() < until:
        rows = request(options.socket, {"do": "events", "after": after, "limit": 1000})["events"]
        for row in rows:
            if row["kind"] == "adopted" and row["node"] == node:
                _raise_failed(row["level"], row["text"])
                return answer
        after = rows[-1]["number"] if rows else after
        time.sleep(ASK_EVERY_SECONDS)
    raise TpuCareError(f"{node}: the API did not answer within {OBSERVE_SECONDS:.0f} s; see `tpucare events`")


def _adopt_here(options: Options, command: Mapping[str, str]) -> dict[str, Any]:
    ended: list[Event] = []

    def listen(event: Event) -> None:
        if event.kind == "adopted" and event.node == command["node"]:
            ended.append(event)

    with standalone(options, listen=listen) as here:
        here.observe()
        answer = here.handler.handle(command)
        if not here.run_until(lambda: bool(ended), OBSERVE_SECONDS):
            raise TpuCareError(f"{command['node']}: the API did not answer within {OBSERVE_SECONDS:.0f} s")
        _raise_failed(ended[0].level, ended[0].text)
        return answer


def _raise_failed(level: str, text: str) -> None:
    if level != "info":
        raise TpuCareError(text)


# --- `tpucare down` to its end: by the daemon, whose status is polled, or here when no daemon runs --------------------


POLL_EVERY_SECONDS = 0.5
# A process that stops releases its store within this.
END_SECONDS = 20.0


def fleets_that_are_up(options: Options) -> list[str]:
    """Fleets of the chosen store that are not down. Raises: StoreError: there is no store."""
    rows = service_status.of_store(options, "")["fleets"]
    return [row["fleet"] for row in rows if row["wish"] != DesiredState.DOWN.value]


def pools_that_are_up(options: Options, cluster: str) -> list[str]:
    """
    Pools of a Ray cluster that are not down. Raises: StoreError: there is no store. ConfigError: no such cluster.
    """
    rows = [row for row in service_status.of_store(options, "")["fleets"] if row.get("cluster")]
    if cluster not in (known := sorted({row["cluster"] for row in rows})):
        names = f"there are {', '.join(known)}" if known else "no fleet is a pool of a cluster"
        raise ConfigError(f"no pool belongs to a cluster {shown(cluster)}; {names}")
    of_cluster = [row for row in rows if row["cluster"] == cluster]
    return [row["fleet"] for row in of_cluster if row["wish"] != DesiredState.DOWN.value]


def running_status(options: Options, target: str) -> dict[str, Any]:
    """The status of the chosen store. Raises: StoreError: there is no store. TpuCareError: no such target."""
    return service_status.of_store(options, target)


def refuse_unknown(options: Options, target: str) -> None:
    """To be called before a person is asked to confirm. Raises: TpuCareError: no fleet or slot has that name."""
    if Stores(options).is_unused():
        raise TpuCareError(f"no fleet or slot {shown(target)}; no fleet is known yet")
    service_status.status(options, target)


def take_down(
    options: Options, targets: Sequence[str], report: Callable[[str], None], *, wait: bool
) -> dict[str, dict[str, Any]]:
    """
    By target: `changed`; `left`: slots that still had nodes when this returned; `out_of_reach`: nodes of them that
    could not be seen. *report* is called with each line of progress.
    """
    return order_down(
        options,
        targets,
        lambda: {target: _take_down_here(options, target, report, wait=wait) for target in targets},
        wait=wait,
    )


def order_down(
    options: Options, targets: Sequence[str], here: Callable[[], T], *, wait: bool, patience_seconds: float = 0.0
) -> T | dict[str, dict[str, Any]]:
    """
    Order the process that holds the store to take *targets* down; without one, or when it ends first, call *here*.

    here: does it in this process under the lock of the store; raises StoreLocked while another process holds it
    patience_seconds: how long a process may hold the store without taking commands: it may start or end at this moment
    Raises: StoreLocked, Refused: it still does. Suspended: it is stopped, and its nodes are left to it.
    """
    until = time.monotonic() + patience_seconds
    while True:
        answers: dict[str, dict[str, Any]] = {}
        try:
            # All orders are sent before the first is waited for.
            answers = {target: request(options.socket, {"do": "down", "target": target}) for target in targets}
            rows = _await_over(options, {slot for answer in answers.values() for slot in answer["changed"]}, wait=wait)
            return {target: _with_rows(answer, rows) for target, answer in answers.items()}
        except Suspended:
            raise
        except (NoDaemon, Refused) as refusal:
            if answers:
                until = time.monotonic() + END_SECONDS
            try:
                return here()
            except StoreLocked as locked:
                pid = Stores(options).holder(options.store)
                if pid is not None and is_stopped(pid):
                    raise Suspended(suspension_of(pid)) from None
                if time.monotonic() > until:
                    raise refusal if isinstance(refusal, Refused) else locked from None
        time.sleep(POLL_EVERY_SECONDS)


def _await_over(options: Options, slots: Collection[str], *, wait: bool) -> dict[str, service_status.Row] | None:
    """Status rows of those *slots* that the daemon still knows, once no node is left that it can reach."""
    while wait:
        status = request(options.socket, {"do": "status"})
        rows = {row["slot"]: row for row in status["slots"] if row["slot"] in slots}
        if all(row["over"] or row["out_of_reach"] for row in rows.values()):
            return rows
        time.sleep(POLL_EVERY_SECONDS)
    return None


def _with_rows(answer: dict[str, Any], rows: Mapping[str, service_status.Row] | None) -> dict[str, Any]:
    slots = list(answer["changed"])
    if rows is None:
        return {**answer, "left": slots, "out_of_reach": []}
    known = [rows[slot] for slot in slots if slot in rows]
    left = [row["slot"] for row in known if not row["over"]]
    return {**answer, "left": left, "out_of_reach": [key for row in known for key in row["out_of_reach"]]}


def _take_down_here(options: Options, target: str, report: Callable[[str], None], *, wait: bool) -> dict[str, Any]:
    def listen(event: Event) -> None:
        if event.level != "debug":
            report(event.text)

    with standalone(options, listen=listen) as here:
        answer = here.handler.handle({"do": "down", "target": target})
        engine, fleet, slots = here.runtime.engine, answer["fleet"], list(answer["changed"])

        def is_meant(slot: Slot) -> bool:
            return slot.fleet == fleet if fleet else slot.name in slots

        takedown = Takedown(engine, here.runtime.clock, is_meant, report)
        if wait:
            # This process ends soon: it acts for no other slots.
            engine.release(is_meant)
            here.run_until(takedown.is_over)
        left = [name for name, track in engine.slots.items() if is_meant(track.slot) and not engine.is_over(name)]
        return {**answer, "left": left, "out_of_reach": service_status.key_rows(takedown.left)}


# --- when a command or call that took slots down may end: no node of them is left, as far as can be seen --------------
# A zone that does not answer is waited for only where nodes of those slots are, or may be; and not for ever, since it
# may never answer again. Nodes that could not be seen stay in memory. On the thread of the loop only.


class Takedown:
    """
    The end of the slots for which *is_meant* is true.

    say:  called with the zones that are waited for, whenever they change
    left: nodes that could not be seen, once it is over
    """

    def __init__(self, engine: Engine, clock: Clock, is_meant: Callable[[Slot], bool], say: Callable[[str], None]):
        self._engine, self._clock, self._is_meant, self._say = engine, clock, is_meant, say
        self._zones: dict[str, set[str]] = {}
        self._silent_since: float | None = None
        self._told: frozenset[str] = frozenset()

    @property
    def left(self) -> tuple[NodeKey, ...]:
        return tuple(key for name in self._slots() for key in self._engine.out_of_reach(name))

    def report_left(self, name: str) -> None:
        if left := self.left:
            nodes = ", ".join(key.name for key in left)
            self._say(f"{unread_nodes(left)}: {nodes}: remembered; `tpucare down {name}` again once that is possible")

    def is_over(self) -> bool:
        """Whether no node is left that can be seen. To be called after each step of the engine."""
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
        """Whether the listings covered every zone where nodes may be, or DOWN_PATIENCE is over."""
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
