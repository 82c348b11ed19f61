"""
Care for one fleet in the foreground, until it is over or a person leaves: what every blocking call of the Python API
does.

One loop on the calling thread, as the daemon has: a step of the engine, orders at the store's control socket, then a
look at what a person wants. Ctrl-C takes the fleet down and goes on until nothing is left; a second one names what is
left and leaves; SIGTERM and SIGHUP leave the nodes alive. Before anything is created, a node that bears a slot's own
name and is not ours is refused or, if that was asked for, deleted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path

from tpucare.api.progress import Progress
from tpucare.engine.state import ProjectView
from tpucare.fleetfile.parse import Fleet
from tpucare.model.errors import CloudError, ConfigError, NeedsPerson, NodeGone, OwnCredentials, TpuCareError
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import DesiredState, End, Memory
from tpucare.model.resources import Node, NodeKey, NodeState
from tpucare.model.text import plain
from tpucare.service import status
from tpucare.service.assembly import Runtime
from tpucare.service.client import Takedown
from tpucare.service.commands import Answer, CommandHandler
from tpucare.service.control_socket import Control
from tpucare.service.fleet_registry import FleetRegistry
from tpucare.service.signals import handle_signals

SETTLE_SECONDS = 3.0
# Without a reason to wake earlier: the lock of a neighbour's delete may end a slot, and no event tells of it.
LONGEST_SLEEP_SECONDS = 5.0


class SlotFailed(TpuCareError):
    """A slot spent the budget of one of its books, and its node has been kept for `keep_failed` and is gone."""


class Left(Exception):
    """A person or the system asked this process to leave before the fleet was over; `status` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class How(Enum):
    """How a fleet's care ended."""

    OVER = "over"
    TAKEN_DOWN = "taken down"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What is to be cared for. `text`, `folder`: as `FleetRegistry` keeps them; `ended`: told of each slot's end."""

    fleet: Fleet
    text: str
    folder: Path
    delete_unowned: bool = False
    begun: Callable[[dict[str, Memory]], None] = lambda _: None
    ended: Callable[[str], None] = lambda _: None


@dataclass(slots=True)
class _Asked:
    """What signals asked for; written by handlers, read by the loop."""

    interrupts: int = 0
    leave: int = 0


class ForegroundRun:
    """One call. Use `care`."""

    def __init__(self, runtime: Runtime, declared: RunSpec, progress: Progress) -> None:
        self._runtime, self._engine, self._progress = runtime, runtime.engine, progress
        self._declared, self._fleet = declared, declared.fleet
        self._asked = _Asked()
        self._going_down = self._may_begin = False
        self._next_show = 0.0
        self._known: set[str] = set()
        self.registry = FleetRegistry.of(runtime)
        self._unowned = UnownedNodes(runtime, self.registry, self._fleet, delete=declared.delete_unowned)
        self._takedown = Takedown(
            self._engine, runtime.clock, lambda slot: slot.fleet == self._fleet.name, progress.say
        )
        self._handler = CommandHandler(runtime, self.registry, None, self._stop)
        self._control = Control(runtime.options.socket, runtime.executor.nudge, on_error=self._report_failed_command)

    # --- what others ask for, from handlers and orders ---

    def interrupt(self, number: int = signal.SIGINT) -> None:  # noqa: ARG002
        self._asked.interrupts += 1
        self._runtime.executor.nudge()

    def leave(self, number: int) -> None:
        self._asked.leave = number
        self._runtime.executor.nudge()

    def _stop(self) -> None:
        self.leave(signal.SIGTERM)

    # --- the call ---

    def run(self) -> How:
        """
        Until every slot is over.

        Raises: Left: it had to leave before. SlotFailed: a slot gave up. ConfigError: refused before anything was
        created. OwnCredentials, NeedsPerson: as `refuse_blindness`. StoreError: nothing may be done that cannot be
        written.
        """
        try:
            self._begin()
            while not self._is_over():
                self._run_once()
        finally:
            self._control.close()
        return self._finish()

    def _begin(self) -> None:
        self._refuse_others()
        self.registry.refuse_conflicts(self._fleet)
        self._declared.begun(self._runtime.store.memories())
        self._engine.hold()
        self.registry.load()
        record = self.registry.records.get(self._fleet.name)
        wish = DesiredState.PAUSED if record is not None and record.wish is DesiredState.PAUSED else DesiredState.UP
        self.registry.accept(self._fleet, self._declared.text, self._declared.folder, wish)
        self.registry.bring_up(self._fleet.name)
        self._control.start()
        text = f"caring for {self._names()} in project {self._fleet.project}, process {os.getpid()}"
        self.registry.report("start", text, self._fleet.name, "info", pid=os.getpid())
        if wish is DesiredState.PAUSED:
            self._progress.say(f"{self._fleet.name} is paused: `tpucare resume {self._fleet.name}`")

    def _refuse_others(self) -> None:
        """One store, one host or prefix: the callbacks of this script must not serve another's slots."""
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
        refuse_blindness(self._engine.projects.values())
        if self._control.serve(self._carry):
            idle = 0.0
        self._obey()
        if not self._may_begin and self._unowned.are_gone():
            self._let_begin()
            idle = 0.0
        self._known.update(self.registry.slots_of(self._fleet.name))
        self.registry.remove_finished_slots()
        now = self._runtime.clock.monotonic()
        self._show(now)
        pause = min(
            idle, LONGEST_SLEEP_SECONDS, *([self._progress.every_seconds] if self._progress.every_seconds else [])
        )
        self._runtime.executor.sleep(timedelta(seconds=pause))

    def _carry(self, order: object) -> Answer:
        return self._handler.handle(order)

    def _show(self, now: float) -> None:
        if self._progress.every_seconds is not None and now >= self._next_show:
            self._next_show = now + self._progress.every_seconds
            names = self.registry.slots_of(self._fleet.name)
            if names:
                self._progress.show(status.slot_rows(self._engine, names, self._runtime.clock.now()))

    def _report_failed_command(self, error: Exception) -> None:
        self.registry.report("error", f"a command failed: {type(error).__name__}: {error}", level="error")

    # --- what a person wants ---

    def _obey(self) -> None:
        """Raises: Left."""
        if self._asked.interrupts and not self._going_down:
            self._take_down()
        if self._asked.leave and not self._going_down:
            self._leave_alive(self._asked.leave)
        if self._asked.interrupts > 1 or self._asked.leave:
            self._leave_behind(self._asked.leave or signal.SIGINT)

    def _take_down(self) -> None:
        self._going_down = True
        name = self._fleet.name
        self._progress.say(f"interrupted: deleting every node of {name}; once more to leave at once")
        self._handler.handle({"do": "down", "target": name})
        self._let_begin()

    def _let_begin(self) -> None:
        self._may_begin = True
        self._engine.release()

    def _leave_behind(self, number: int) -> None:
        left = self._nodes()
        what = ", ".join(left) if left else "nothing that is known of"
        self._progress.say(f"left behind: {what}; `tpucare down {self._fleet.name}` deletes it")
        self.registry.report(
            "stop", f"{signal.Signals(number).name} while it was taken down: {what} left", self._fleet.name
        )
        self._runtime.settle(SETTLE_SECONDS / 3)
        raise Left(128 + number)

    def _leave_alive(self, number: int) -> None:
        name = signal.Signals(number).name
        left = self._nodes(living=True)
        count = f"{len(left)} nodes are" if len(left) != 1 else "1 node is"
        alive = f"{count} left alive ({', '.join(left)})" if left else "no node is there"
        again = "the same call goes on where this one stopped"
        self._progress.say(f"{name}: {alive}; {again}, `tpucare down {self._fleet.name}` deletes them")
        self.registry.report("stop", f"{name}: {alive}", self._fleet.name, "info")
        self._runtime.settle(SETTLE_SECONDS)
        raise Left(128 + number)

    def _nodes(self, *, living: bool = False) -> list[str]:
        """`living`: without those that are given up."""
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
        return self._may_begin and self._takedown.is_over()

    def _finish(self) -> How:
        """Tell how it ended. Raises: SlotFailed."""
        failures = []
        for name in sorted(self._known):
            track = self._engine.slots.get(name)
            memory = track.memory if track is not None else None
            if memory is not None and memory.wish is not DesiredState.DOWN and memory.end is End.FAILED:
                failures.append(f"{name} failed: {plain(memory.end_why)}")
            else:
                self._declared.ended(name)
        self._takedown.report_left(self._fleet.name)
        record = self.registry.records[self._fleet.name]
        self.registry.report("stop", f"{self._fleet.name} is over", self._fleet.name, "info")
        self._runtime.settle(SETTLE_SECONDS)
        if failures:
            raise SlotFailed("; ".join(failures))
        return How.TAKEN_DOWN if record.wish is DesiredState.DOWN else How.OVER


def care(runtime: Runtime, declared: RunSpec, progress: Progress) -> How:
    """
    Care for *declared* on the calling thread until it is over; signals are caught if that is the main thread.

    Raises: as `ForegroundRun.run`.
    """
    foreground = ForegroundRun(runtime, declared, progress)
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


def refuse_blindness(projects: Collection[ProjectView]) -> None:
    """
    To be asked until the first listing has come: a call would wait for ever for a cloud that will never answer it.

    Raises: OwnCredentials, NeedsPerson: a person has to act before anything can be listed.
    """
    if any(project.passes for project in projects):
        return
    for project in projects:
        if isinstance(project.blind, OwnCredentials | NeedsPerson):
            raise project.blind


# --- nodes of the old kind: one that bears exactly a slot's name and is not ours --------------------------------------
# The caller that asked for it has that very node deleted before anything is created; any other is told the two ways
# out.


ASK_AGAIN_SECONDS = 5.0


class UnownedNodes:
    """
    Those of one fleet. On the thread of the loop only; the calls that delete one block it, before anything else began.
    """

    def __init__(self, runtime: Runtime, registry: FleetRegistry, fleet: Fleet, *, delete: bool) -> None:
        self._runtime, self._engine, self._registry, self._fleet = runtime, runtime.engine, registry, fleet
        self._delete = delete
        # The ones that were there when this was asked for: whatever bears their names later is another node.
        self._meant: dict[NodeKey, int] = {}
        self._ask_at = float("-inf")

    def are_gone(self) -> bool:
        """
        Whether the project was listed, and none is there.

        Raises: ConfigError: one is, and may not be deleted.
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
        """A slot that has nodes of its own, or is going down, asks for no new one that could meet another's."""
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
