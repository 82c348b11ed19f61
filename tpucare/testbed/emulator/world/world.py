"""
The emulated cloud: its parts, put together, and the passing of its time.

No threads, no clock, no I/O: time is an argument of every call, chance comes from the seed. The same seed with the
same calls at the same instants gives the same history, byte for byte. The caller (a server, a virtual clock) supplies
the lock, the waiting and the machines.

    fate = world.calls.fate("CreateNode", name, now)      # then wait fate.before_seconds
    operation = world.api.create_node(parent, node_id, spec, now, fate)
    effects = world.take_effects()                        # for the machines, in order
    world.next_event_at()                                 # when to advance() next, if no call comes before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from tpucare.testbed.emulator.world.calls import CallPath, NodeApi
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.faults import Fates
from tpucare.testbed.emulator.world.life import NodeLifecycle
from tpucare.testbed.emulator.world.machine_effects import MachineEffect
from tpucare.testbed.emulator.world.operator import Operator
from tpucare.testbed.emulator.world.queued_calls import QueuedApi
from tpucare.testbed.emulator.world.queued_life import QueuedLifecycle
from tpucare.testbed.emulator.world.queued_records import QueuedRecord
from tpucare.testbed.emulator.world.records import NodeRecord
from tpucare.testbed.emulator.world.state import AuditRecord, State


class World:
    """
    The parts of one emulated cloud, which share one `state`.

    lifecycle:  moves nodes, and knows their capacity     queue: the same for queued resources
    calls:      the way of every call of the API: faults, permissions, rate limits, the audit log
    api:        the methods for nodes and operations     queued_api: those for queued resources
    operator:   the actions of tests, demos and `tpucare emulator ACTION` on the cloud

    Every method that takes `now` first runs the events until then. API methods raise ApiError. `fate` is the result of
    `calls.fate` for this call (peer, latency, lost answer: for the audit log); leave it out in tests without faults.
    """

    def __init__(self, config: WorldConfig, *, seed: int, start: datetime) -> None:
        """Raises: ConfigError: an unreadable trace or network in *config*."""
        self.state = State(config, start, seed)
        fates = Fates(config, self.state.stream("fates"), start)
        self.lifecycle = NodeLifecycle(self.state)
        self.queue = QueuedLifecycle(self.state, self.lifecycle)
        self.calls = CallPath(self.state, fates)
        self.api = NodeApi(self.state, self.calls, self.lifecycle)
        self.queued_api = QueuedApi(self.state, self.calls, self.lifecycle, self.queue)
        self.operator = Operator(self.state, fates, self.lifecycle, self.queue)

    def advance(self, now: datetime) -> None:
        """Run all events up to *now*, in order. An instant before the last one counts as the last one."""
        self.state.advance(now)

    def next_event_at(self) -> datetime | None:
        """Instant of the next scheduled event; None when nothing is scheduled."""
        return self.state.timeline.next_at()

    def take_effects(self) -> list[MachineEffect]:
        """The effects for the machines since the last call, in order."""
        effects, self.state.effects = self.state.effects, []
        return effects

    @property
    def now(self) -> datetime:
        """The instant that this world has reached."""
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
        return [life.record for _, life in sorted(self.state.queue.items())]
