"""
Fleets that work for a sweep, in a history: the real `SweepCare` beside the engine, and the checks of its effects.

The checks use the state of the sweep's server (`sweep`), never the daemon's knowledge of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tpucare.fleetfile.parse import FleetSpec
from tpucare.integrations.wandb.companion import PATIENCE_SECONDS, TRY_AGAIN_SECONDS, Answer, SweepCare
from tpucare.integrations.wandb.rules import SWEEP_VARIABLE, SweepReport, parse_path
from tpucare.model.memory import End, FleetRecord
from tpucare.model.resources import Event
from tpucare.testbed.simulation.machines import RunMark
from tpucare.testbed.simulation.properties import Broken
from tpucare.testbed.simulation.sweep import HEARTBEAT_SECONDS, SimulatedSweep, SimulatedWatch

if TYPE_CHECKING:
    from tpucare.testbed.simulation.history import History

LOOK_EVERY = 1.0
SERVER = "https://wandb.simulated"
TAKEN_DOWN_AFTER = PATIENCE_SECONDS + 90.0
"""From the first answer that a sweep is over until no slot of its fleet asks for a node any more."""


class Swarm:
    """
    The sweeps of one history; it ignores fleets that do not work for a sweep.

    `SweepCare` belongs to a process; `process_began` makes a new one.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        launcher = history.daemon.launcher
        self.sweeps: dict[str, SimulatedSweep] = {}
        for slot in history.scenario.slots:
            named = slot.job.env.get(SWEEP_VARIABLE) if slot.job is not None else None
            if named is not None and slot.fleet not in self.sweeps:
                self.sweeps[slot.fleet] = SimulatedSweep(parse_path(named), slot.fleet, launcher)
        history.daemon.sweeps = self.sweeps
        self._care: SweepCare | None = None
        self._next_look = 0.0
        self._over_heard: dict[str, float] = {}
        self._ended: set[str] = set()
        self._wanted: dict[str, float] = {}
        # When the process last went on after a suspension.
        self.woke = 0.0

    # --- the part of a fleet registry that `SweepCare` needs

    @property
    def records(self) -> Mapping[str, FleetRecord]:
        return self.history.daemon.disk.fleets

    @property
    def fleets(self) -> Mapping[str, FleetSpec]:
        declared = self.history.daemon.declared
        found = {}
        for name in self.sweeps:
            first = declared[name][0]
            assert first.job is not None
            found[name] = FleetSpec(name, len(declared[name]), first.project, first.places, first.job, first.care)
        return found

    def slots_of(self, fleet: str) -> list[str]:
        return sorted(name for name, track in self.history.daemon.engine.slots.items() if track.slot.fleet == fleet)

    def report(self, kind: str, text: str, about: str = "", level: str = "warning") -> None:
        self.history.daemon.engine.relay_event(Event(self.history.daemon.clock.now(), kind, text, about, "", level))

    # --- events

    def process_began(self) -> None:
        if not self.sweeps:
            return
        clock = self.history.daemon.clock
        by_path = {sweep.path: sweep for sweep in self.sweeps.values()}
        self._over_heard.clear()
        self._care = SweepCare(
            self.history.daemon.engine,
            self,
            SimulatedWatch(by_path, clock.monotonic, self._answered),
            base_url=lambda: SERVER,
            now=clock.now,
            monotonic=clock.monotonic,
        )

    def step(self) -> None:
        """Do a step of `SweepCare`, as the daemon does after each pass. Raises: StoreError: as the engine does."""
        if self._care is not None and self.history.now >= self._next_look:
            self._next_look = self.history.now + LOOK_EVERY
            self._care.poll()

    def advance(self) -> None:
        for sweep in self.sweeps.values():
            sweep.advance(self.history.now)

    def ran(self, mark: RunMark) -> None:
        if sweep := self.sweeps.get(mark.slot.rpartition("-")[0]):
            sweep.ran(mark)

    def wanted(self, slot: str) -> None:
        """A person asks for a run of *slot*, whatever the state of its sweep."""
        self._wanted[slot] = self.history.now
        self._ended.discard(slot)

    # --- checks

    def _answered(self, sweep: SimulatedSweep, answer: Answer) -> None:
        if isinstance(answer, SweepReport) and sweep.is_over:
            self._over_heard.setdefault(sweep.fleet, self.history.now)
        else:
            self._over_heard.pop(sweep.fleet, None)

    def told(self, event: Event) -> None:
        sweep = self.sweeps.get(event.slot.rpartition("-")[0])
        if sweep is None:
            return
        if event.kind == "done" and event.fields.get("sweep") == str(sweep.path):
            self._check_end(sweep, event)
            self.history.properties.explain(event.slot, PATIENCE_SECONDS)
        elif event.kind == "up" and event.fields.get("sweep") == str(sweep.path):
            self._ended.discard(event.slot)
            if sweep.waiting or sweep.hands_out:
                self.history.properties.wanted_anew(event.slot)

    def _check_end(self, sweep: SimulatedSweep, event: Event) -> None:
        if event.slot in self._ended:
            self._break(f"{event.slot} is ended a second time: {event.text}")
        self._ended.add(event.slot)
        memories = self.history.daemon.disk.memories
        left = [name for name in self.slots_of(sweep.fleet) if memories[name].end is End.NONE]
        if sweep.down:
            self._break(f"{event.slot} is ended while nobody knows anything of {sweep.path}")
        elif sweep.hands_out:
            self._break(f"{event.slot} is ended, and {sweep.path} goes on")
        elif sweep.waiting > len(left):
            self._break(f"{event.slot} is ended, and {sweep.waiting} interrupted runs wait for {len(left)} slots")

    def created(self, node: str, under_way: float) -> None:
        """A create reached the API now, *under_way* seconds after it was sent."""
        slot = node.rpartition("-a")[0]
        heard = self._over_heard.get(slot.rpartition("-")[0])
        asked = self.history.now - under_way
        if heard is None:
            return
        # A suspended process could not take slots down.
        if asked - max(heard, self._wanted.get(slot, 0.0), self.woke) > TAKEN_DOWN_AFTER:
            self._break(f"{node} is asked for, and its sweep is over for {asked - heard:.0f} s")

    def settle(self) -> None:
        """In the calm every interrupted run gets an agent; one without a slot gets a slot within half an hour."""
        for sweep in self.sweeps.values():
            if self._is_left_alone(sweep):
                self.history.live(self.history.now + TRY_AGAIN_SECONDS + 2 * HEARTBEAT_SECONDS)
                if self._is_left_alone(sweep) and not self.history.properties.broken:
                    self._break(f"{sweep.waiting} interrupted runs of {sweep.path} wait, and no slot is left for them")

    def _is_left_alone(self, sweep: SimulatedSweep) -> bool:
        slots = self.history.daemon.engine.slots
        return bool(sweep.waiting) and all(
            slots[name].memory.end is not End.NONE for name in self.slots_of(sweep.fleet)
        )

    def _break(self, text: str) -> None:
        self.history.properties.broken.append(Broken("over-once", self.history.now, text))
