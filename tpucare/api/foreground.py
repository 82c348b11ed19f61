"""
The loop of every blocking call of the Python API: it cares for one fleet until that is over or a person ends the call.

As in the daemon, one loop on the calling thread: a step of the engine, the commands of the control socket, then the
signals. Ctrl-C takes the fleet down and goes on until no node is left; a second one names the nodes that are left and
ends; SIGTERM and SIGHUP leave the nodes alive. Before anything is created, a node that has the very name of a slot and
is not ours is refused or, with `delete_unowned`, deleted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tpucare.api.progress import ProgressDisplay
from tpucare.engine.state import ProjectView
from tpucare.fleetfile.parse import FleetSpec
from tpucare.model.errors import CloudError, ConfigError, NeedsPerson, NodeGone, OwnCredentials, TpuCareError
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import DesiredState, End, Memory
from tpucare.model.resources import Node, NodeKey, NodeState
from tpucare.model.text import plain
from tpucare.service import status
from tpucare.service.assembly import Runtime
from tpucare.service.client import Takedown
from tpucare.service.commands import CommandHandler
from tpucare.service.control_socket import Control
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.signals import handle_signals

SETTLE_SECONDS = 3.0
# A delete of another process, under the lock of the store, may end a slot without an event that would wake this one.
LONGEST_SLEEP_SECONDS = 5.0


class SlotFailed(TpuCareError):
    """A slot exceeded a failure budget (crash, setup, ...); its node was kept for `keep_failed` and then deleted."""


class LeftEarly(Exception):
    """A signal ended this process before the fleet was over; `status` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class RunSpec:
    """
    The fleet of one call. `text`, `folder`: as `FleetRegistry` stores them.

    begun: called with the memories of the store before the fleet is declared    ended: called with each slot that ended
    """

    fleet: FleetSpec
    text: str
    folder: Path
    delete_unowned: bool = False
    begun: Callable[[dict[str, Memory]], None] = lambda _: None
    ended: Callable[[str], None] = lambda _: None


@dataclass(slots=True)
class _Interrupts:
    """The signals that arrived; written by handlers, read by the loop."""

    count: int = 0
    leave: int = 0


class ForegroundRun:
    """One call. Use `run_foreground`."""

    def __init__(self, runtime: Runtime, spec: RunSpec, progress: ProgressDisplay) -> None:
        self._runtime, self._engine, self._progress = runtime, runtime.engine, progress
        self._spec, self._fleet = spec, spec.fleet
        self._interrupts = _Interrupts()
        self._going_down = self._may_create = False
        self._next_show = 0.0
        self._known: set[str] = set()
        self.registry = FleetRegistry.of(runtime)
        self._unowned = UnownedNodes(runtime, self.registry, self._fleet, delete=spec.delete_unowned)
        self._takedown = Takedown(
            self._engine, runtime.clock, lambda slot: slot.fleet == self._fleet.name, progress.say
        )
        self._handler = CommandHandler(runtime, self.registry, None, self._stop)
        self._control = Control(runtime.options.socket, runtime.executor.nudge, on_error=self._report_failed_command)

    # --- called by signal handlers and the command `stop` ---

    def interrupt(self, number: int = signal.SIGINT) -> None:  # noqa: ARG002
        self._interrupts.count += 1
        self._runtime.executor.nudge()

    def leave(self, number: int) -> None:
        self._interrupts.leave = number
        self._runtime.executor.nudge()

    def _stop(self) -> None:
        self.leave(signal.SIGTERM)

    # --- the call ---

    def run(self) -> None:
        """
        Run until every slot is over.

        Raises: LeftEarly: a signal ended it before. SlotFailed: a slot gave up. ConfigError: refused before anything
        was created. OwnCredentials, NeedsPerson: as `raise_if_refused`. StoreError: an intent cannot be stored.
        """
        try:
            self._begin()
            while not self._is_over():
                self._run_once()
        finally:
            self._control.close()
        self._finish()

    def _begin(self) -> None:
        self._refuse_other_fleets()
        self.registry.refuse_conflicts(self._fleet)
        self._spec.begun(self._runtime.store.memories())
        self._engine.hold()
        self.registry.load()
        record = self.registry.records.get(self._fleet.name)
        wish = DesiredState.PAUSED if record is not None and record.wish is DesiredState.PAUSED else DesiredState.UP
        self.registry.accept(self._fleet, self._spec.text, self._spec.folder, wish)
        self.registry.bring_up(self._fleet.name)
        self._control.start()
        text = f"caring for {self._names()} in project {self._fleet.project}, process {os.getpid()}"
        self.registry.report("start", text, self._fleet.name, "info", pid=os.getpid())
        if wish is DesiredState.PAUSED:
            self._progress.say(f"{self._fleet.name} is paused: `tpucare resume {self._fleet.name}`")

    def _refuse_other_fleets(self) -> None:
        """One store has one host or prefix: the callbacks of this script must not serve slots of another."""
        for name, record in self._runtime.store.fleets().items():
            if name != self._fleet.name and record.wish is not DesiredState.DOWN:
                raise ConfigError(
                    f"store {self._runtime.store.path} cares for {name}: give another store=, or `tpucare down {name}`"
                )

    def _names(self) -> str:
        count = self._fleet.count
        return self._fleet.slot_name(0) + (f" to {self._fleet.slot_name(count - 1)}" if count > 1 else "")

    def _run_once(self) -> None:
        idle = self._engine.step()
        raise_if_refused(self._engine.projects.values())
        if self._control.serve(self._handler.handle):
            idle = 0.0
        self._handle_interrupts()
        if not self._may_create and self._unowned.are_gone():
            self._allow_creates()
            idle = 0.0
        self._known.update(self.registry.slots_of(self._fleet.name))
        self.registry.remove_finished_slots()
        now = self._runtime.clock.monotonic()
        self._show(now)
        pause = min(
            idle, LONGEST_SLEEP_SECONDS, *([self._progress.every_seconds] if self._progress.every_seconds else [])
        )
        self._runtime.executor.sleep(timedelta(seconds=pause))

    def _show(self, now: float) -> None:
        if self._progress.every_seconds is not None and now >= self._next_show:
            self._next_show = now + self._progress.every_seconds
            names = self.registry.slots_of(self._fleet.name)
            if names:
                self._progress.show(status.slot_rows(self._engine, names, self._runtime.clock.now()))

    def _report_failed_command(self, error: Exception) -> None:
        self.registry.report("error", f"a command failed: {type(error).__name__}: {error}", level="error")

    # --- signals ---

    def _handle_interrupts(self) -> None:
        """Raises: LeftEarly."""
        if self._interrupts.count and not self._going_down:
            self._take_down()
        if self._interrupts.leave and not self._going_down:
            self._leave_alive(self._interrupts.leave)
        if self._interrupts.count > 1 or self._interrupts.leave:
            self._leave_behind(self._interrupts.leave or signal.SIGINT)

    def _take_down(self) -> None:
        self._going_down = True
        name = self._fleet.name
        self._progress.say(f"interrupted: deleting every node of {name}; Ctrl-C again leaves them and ends at once")
        self._handler.handle({"do": "down", "target": name})
        self._allow_creates()

    def _allow_creates(self) -> None:
        self._may_create = True
        self._engine.release()

    def _leave_behind(self, number: int) -> None:
        left = self._nodes()
        what = ", ".join(left) if left else "no known node"
        self._progress.say(f"left behind: {what}; `tpucare down {self._fleet.name}` deletes it")
        self.registry.report(
            "stop", f"{signal.Signals(number).name} while it was taken down: {what} left", self._fleet.name
        )
        self._runtime.settle(SETTLE_SECONDS / 3)
        raise LeftEarly(128 + number)

    def _leave_alive(self, number: int) -> None:
        name = signal.Signals(number).name
        left = self._nodes(living=True)
        count = f"{len(left)} nodes are" if len(left) != 1 else "1 node is"
        alive = f"{count} left alive ({', '.join(left)})" if left else "no node is there"
        again = "the same call goes on where this one stopped"
        self._progress.say(f"{name}: {alive}; {again}, `tpucare down {self._fleet.name}` deletes them")
        self.registry.report("stop", f"{name}: {alive}", self._fleet.name, "info")
        self._runtime.settle(SETTLE_SECONDS)
        raise LeftEarly(128 + number)

    def _nodes(self, *, living: bool = False) -> list[str]:
        """Nodes of the fleet, with zones; *living*: without those that are being replaced."""
        found: dict[str, str] = {}
        for name in self.registry.slots_of(self._fleet.name):
            track = self._engine.slots[name]
            found |= {
                intent.name: intent.zone for intent in track.memory.creates if intent.state is not CreateState.FAILED
            }
            for seen in track.nodes.values():
                if living and status.is_given_up(seen, track.memory):
                    found.pop(seen.node.name, None)
                else:
                    found[seen.node.name] = seen.node.key.zone
        return [plain(f"{node} in {zone}") for node, zone in found.items()]

    # --- the end ---

    def _is_over(self) -> bool:
        return self._may_create and self._takedown.is_over()

    def _finish(self) -> None:
        """Report how it ended. Raises: SlotFailed."""
        failures = []
        for name in sorted(self._known):
            track = self._engine.slots.get(name)
            memory = track.memory if track is not None else None
            if memory is not None and memory.wish is not DesiredState.DOWN and memory.end is End.FAILED:
                failures.append(f"{name} failed: {plain(memory.end_why)}")
            else:
                self._spec.ended(name)
        self._takedown.report_left(self._fleet.name)
        self.registry.report("stop", f"{self._fleet.name} is over", self._fleet.name, "info")
        self._runtime.settle(SETTLE_SECONDS)
        if failures:
            raise SlotFailed("; ".join(failures))


def run_foreground(runtime: Runtime, spec: RunSpec, progress: ProgressDisplay) -> None:
    """
    Care for the fleet of *spec* on the calling thread until it is over; on the main thread signals are handled.

    Raises: as `ForegroundRun.run`.
    """
    foreground = ForegroundRun(runtime, spec, progress)
    with _signals(foreground):
        return foreground.run()


@contextmanager
def _signals(foreground: ForegroundRun) -> Iterator[None]:
    handlers: dict[int, Callable[[int], object]] = {
        signal.SIGINT: foreground.interrupt,
        signal.SIGTERM: foreground.leave,
        signal.SIGHUP: foreground.leave,
    }
    with handle_signals(handlers, keep_ignored=True):
        yield


def raise_if_refused(projects: Collection[ProjectView]) -> None:
    """
    Raises: OwnCredentials, NeedsPerson: the first listing was refused, so a person has to act before it can succeed.

    A later refusal is only reported: credentials may be replaced while the call runs.
    """
    if any(project.passes for project in projects):
        return
    for project in projects:
        if isinstance(project.blind, OwnCredentials | NeedsPerson):
            raise project.blind


# --- nodes of 2022: they have the very name of a slot and are not ours ------------------------------------------------
# With `delete_unowned` such a node is deleted before anything is created; otherwise the error names the two ways out.


ASK_AGAIN_SECONDS = 5.0


class UnownedNodes:
    """
    Those of one fleet. On the thread of the loop only; deleting one blocks it, which harms nothing before the start.
    """

    def __init__(self, runtime: Runtime, registry: FleetRegistry, fleet: FleetSpec, *, delete: bool) -> None:
        self._runtime, self._engine, self._registry, self._fleet = runtime, runtime.engine, registry, fleet
        self._delete = delete
        # The nodes that were there at the start: a later node of the same name is another one.
        self._meant: dict[NodeKey, int] = {}
        self._ask_at = float("-inf")

    def are_gone(self) -> bool:
        """
        Whether the project was listed without such a node.

        Raises: ConfigError: there is one, and it may not be deleted.
        """
        view = self._engine.projects.get(str(self._fleet.project))
        if view is None or not view.fresh:
            return False
        found = [node for name in self._registry.slots_of(self._fleet.name) for node in self._of(name)]
        for node in found:
            if not self._delete or self._meant.setdefault(node.key, node.id) != node.id:
                raise ConfigError(_line(node))
        now = self._runtime.clock.monotonic()
        if found and now >= self._ask_at:
            self._ask_at = now + ASK_AGAIN_SECONDS
            for node in found:
                self._ask(node)
        return not found

    def _of(self, slot: str) -> list[Node]:
        """Such nodes of *slot*; a slot that has nodes of its own, or is going down, creates none of that name."""
        memory = self._engine.slots[slot].memory
        if memory.ours or memory.creates or memory.wish is DesiredState.DOWN:
            return []
        nodes = self._engine.projects[str(self._fleet.project)].foreign.get(slot, {}).values()
        return [node for node in nodes if node.name == slot]

    def _ask(self, node: Node) -> None:
        if node.state is NodeState.DELETING:
            return
        try:
            there = self._runtime.cloud.get_node(node.key)
            if (there.id, there.create_time, there.owner) != (node.id, node.create_time, node.owner):
                return
            self._runtime.cloud.delete_node(node.key)
        except NodeGone:
            return
        except CloudError as error:
            self._registry.report("delete-unowned", f"{node.name} could not be deleted: {error}", self._fleet.name)
            return
        self._registry.report("delete-unowned", f"{node.name} in {node.key.zone}: delete asked for", self._fleet.name)


def _line(node: Node) -> str:
    whose = f"owner {node.owner}" if node.owner else "no owner's label"
    return (
        f"a node {node.name} is there in {node.key.zone} ({node.state.name}), bears {whose} and is not ours: "
        f"`tpucare adopt-node {node.name} {node.name}` takes it over, delete_unowned=True deletes it first"
    )
