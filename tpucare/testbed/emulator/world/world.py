"""
The rules of the emulated cloud: one door to everything a caller, a machine or an operator can do.

No threads, no clock, no I/O: time is an argument of every call, chance comes from the seed. The same seed with the
same calls at the same instants gives the same history, byte for byte. Whoever carries it (a server, a virtual clock)
supplies the lock, the waiting and the machines.

    fate = world.fate("CreateNode", name, now)      # then wait fate.before_seconds
    operation = world.create_node(parent, node_id, spec, now, fate)
    effects = world.take_effects()                  # for the machines, in order
    world.next_event_at()                           # when to advance() next, if nobody calls before

The API is in `gate`, `calls` and `queue_calls`, the operator's hand in `actions`, what happens by itself in `life`,
`ending` and `queue_life`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.machine_effects import MachineEffect
from tpucare.testbed.emulator.world.operator import Actions
from tpucare.testbed.emulator.world.queued_calls import QueueCalls
from tpucare.testbed.emulator.world.queued_records import QueuedRecord
from tpucare.testbed.emulator.world.records import NodeRecord, parse_node_path
from tpucare.testbed.emulator.world.state import AuditRecord


class World(QueueCalls, Actions):
    """
    The emulated cloud. Every method that takes `now` first plays what was due until then.

    API methods raise ApiError. `fate` is what `World.fate` gave for this call (peer, latency, lost answer: for the
    audit log); leave it out in tests that want no faults.
    """

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        """Raises: ConfigError: an unreadable trace or network in *config*."""
        super().__init__(config, seed=seed, start=start)

    def advance(self, now: datetime) -> None:
        """Play everything scheduled up to *now*, in order. An instant before the last one counts as the last one."""
        self.state.advance(now)

    def next_event_at(self) -> datetime | None:
        """Instant of the next thing that may happen by itself; None when nothing is scheduled."""
        return self.state.timeline.next_at()

    def take_effects(self) -> list[MachineEffect]:
        """What machines must do since the last call, in order."""
        effects, self.state.effects = self.state.effects, []
        return effects

    @property
    def now(self) -> datetime:
        """The last instant that this world was brought to."""
        return self.state.now

    @property
    def audit(self) -> Sequence[AuditRecord]:
        """Every call, life event and machine event so far, oldest first: dicts of JSON values."""
        return self.state.records

    def on_audit(self, listener: Callable[[AuditRecord], None] | None, *, keep: bool = True) -> None:
        """
        Hand every further record to *listener* as it is made, for example to write it as a line of JSON.

        `keep` False: `audit` grows no further, for simulations of months.
        """
        self.state.on_record = listener
        self.state.keep_records = keep

    def nodes(self) -> list[NodeRecord]:
        """Every node that exists, in the order of listings, whether or not the API shows it yet."""
        return [life.record for _, life in sorted(self.state.nodes.items())]

    def queued_resources(self) -> list[QueuedRecord]:
        """Every queued resource that exists, in the order of listings."""
        return [life.record for _, life in sorted(self.queue.items())]

    def expected_workers(self, name: str) -> int:
        """How many hosts a node has, 0 when it is gone."""
        life = self.state.nodes.get(parse_node_path(name))
        return len(life.workers) if life is not None else 0
