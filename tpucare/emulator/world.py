"""
The rules of the emulated cloud: one door to everything a caller, a machine or an operator can do.

No threads, no clock, no I/O: time is an argument of every call, chance comes from the seed. The same seed with the
same calls at the same instants gives the same history, byte for byte. Whoever carries it (a server, a virtual clock)
supplies the lock, the waiting and the machines.

    fate = world.fate("CreateNode", name, now)      # then wait fate.before_seconds
    operation = world.create_node(parent, node_id, spec, now, fate)
    effects = world.take_effects()                  # for the machines, in order
    world.next_event_at()                           # when to advance() next, if nobody calls before
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from tpucare.emulator.records import (
    PLAIN,
    CallFate,
    GuestAttribute,
    MachineEffect,
    NodePage,
    NodeRecord,
    NodeSpec,
    OperationRecord,
)


class World:
    """
    The emulated cloud. Every method that takes `now` first plays what was due until then.

    API methods raise ApiError. `fate` is what `World.fate` gave for this call (peer, latency, lost answer: for the
    audit log); leave it out in tests that want no faults.
    """

    def __init__(self, config: Any, *, seed: int, start: datetime) -> None: ...

    # --- time and machines

    def advance(self, now: datetime) -> None:
        """Play everything scheduled up to *now*, in order. An instant before the last one counts as the last one."""
        raise NotImplementedError

    def next_event_at(self) -> datetime | None:
        """Instant of the next thing that happens by itself; None when nothing is scheduled."""
        raise NotImplementedError

    def take_effects(self) -> list[MachineEffect]:
        """What machines must do since the last call, in order."""
        raise NotImplementedError

    def set_guest_attribute(self, name: str, worker: int, namespace: str, key: str, value: str) -> None:
        """A machine reports, for example hostkeys/ssh-ed25519. Ignored when the node is gone."""
        raise NotImplementedError

    def note(self, event: str, now: datetime, **fields: object) -> None:
        """A machine's word for the audit log: `run-started`, `run-ended` with token=, name=, worker=."""
        raise NotImplementedError

    # --- the API

    def fate(self, method: str, name: str, now: datetime, peer: str = "") -> CallFate:
        """Draw what becomes of one call of *method* (`CreateNode`, ...) on resource or parent *name*."""
        raise NotImplementedError

    def create_node(
        self, parent: str, node_id: str, spec: NodeSpec, now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        raise NotImplementedError

    def get_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> NodeRecord:
        raise NotImplementedError

    def list_nodes(
        self, parent: str, page_size: int, page_token: str, now: datetime, fate: CallFate = PLAIN
    ) -> NodePage:
        """*parent* may end in `locations/-`."""
        raise NotImplementedError

    def delete_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        raise NotImplementedError

    def update_node(
        self, name: str, mask: Sequence[str], spec: NodeSpec, now: datetime, fate: CallFate = PLAIN
    ) -> OperationRecord:
        """*mask*: of description, tags, labels, metadata, network_config.enable_external_ips; values from *spec*."""
        raise NotImplementedError

    def stop_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        raise NotImplementedError

    def start_node(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        raise NotImplementedError

    def get_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> OperationRecord:
        raise NotImplementedError

    def list_operations(self, parent: str, now: datetime, fate: CallFate = PLAIN) -> list[OperationRecord]:
        raise NotImplementedError

    def cancel_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> None:
        raise NotImplementedError

    def delete_operation(self, name: str, now: datetime, fate: CallFate = PLAIN) -> None:
        raise NotImplementedError

    def guest_attributes(
        self, name: str, query_path: str, worker_ids: Collection[str], now: datetime, fate: CallFate = PLAIN
    ) -> dict[int, tuple[GuestAttribute, ...]]:
        """Per worker number; *query_path* is `` or `hostkeys/` or `hostkeys/ssh-ed25519`; no *worker_ids* = all."""
        raise NotImplementedError

    def locations(self) -> list[str]:
        """Names of the zones."""
        raise NotImplementedError

    def accelerator_types(self, zone: str) -> list[str]:
        raise NotImplementedError

    def runtime_versions(self, zone: str) -> list[str]:
        raise NotImplementedError

    # --- operator actions. `selector`: a node's id or path, or a prefix (slot or fleet), or `*`.
    #     All return the ids of the nodes that were touched.

    def preempt(
        self,
        selector: str,
        now: datetime,
        *,
        notice: timedelta | None = None,
        visible_after: timedelta | None = None,
        silent: bool = False,
        shown: int | str | None = None,
        burst: timedelta = timedelta(),
    ) -> list[str]:
        """
        Take nodes away. Workers die *notice* after `preempted` turned TRUE (None: no notice), the API shows it
        *visible_after* later (None: drawn). `shown`: another state number, `never`, or `gone`. `silent`: they stop
        answering first and die just before it is shown. `burst`: spread over this long.
        """
        raise NotImplementedError

    def set_capacity(self, zone: str, accelerator: str, tier: str, amount: int | None, now: datetime) -> None:
        """Capacity from now on, in the pool's unit (nodes unless configured); None = unlimited. Ends a process."""
        raise NotImplementedError

    def set_health(self, selector: str, health: int, now: datetime, description: str = "") -> list[str]:
        raise NotImplementedError

    def set_state(self, selector: str, state: int, now: datetime) -> list[str]:
        """Show any number, unknown ones too; machines are not touched."""
        raise NotImplementedError

    def maintenance(
        self,
        selector: str,
        now: datetime,
        *,
        event: str = "TERMINATE_ON_HOST_MAINTENANCE",
        duration: timedelta = timedelta(minutes=5),
        restart: bool = False,
    ) -> list[str]:
        raise NotImplementedError

    def outage(self, kind: str, duration: timedelta, now: datetime, *, zone: str = "", seconds: float = 30.0) -> None:
        """`kind`: api (14 for all), internal (13 for all), zone (unreachable), slow (answers take *seconds*)."""
        raise NotImplementedError

    def end_outages(self, now: datetime) -> None:
        raise NotImplementedError

    def stick_deleting(self, selector: str, now: datetime, *, repeats: int = 1) -> list[str]:
        """The next or current delete hangs in DELETING until DeleteNode was called *repeats* more times."""
        raise NotImplementedError

    def lose_worker(self, selector: str, worker: int, now: datetime, *, silent: bool = False) -> list[str]:
        """One worker of a node dies (or falls silent); the API shows nothing."""
        raise NotImplementedError

    def restore_worker(self, selector: str, worker: int, now: datetime) -> list[str]:
        """Boot it again, or let it answer again."""
        raise NotImplementedError

    def terminate(self, selector: str, now: datetime) -> list[str]:
        """Workers die and the node shows TERMINATED."""
        raise NotImplementedError

    def forget(self, selector: str, now: datetime) -> list[str]:
        """The node is gone at once: 404."""
        raise NotImplementedError

    def fail_next_create(self, code: int, text: str, *, in_operation: bool = True, zone: str = "") -> None:
        raise NotImplementedError

    def miss_worker(self, worker: int = -1, *, zone: str = "") -> None:
        """The next node created lacks this worker for ever (-1: the last)."""
        raise NotImplementedError

    def lose_next_answer(self, method: str, *, applied: bool = True, code: int = 14) -> None:
        raise NotImplementedError

    def fail_next(self, method: str, code: int, text: str) -> None:
        """The next call of *method* is answered with this error and has no effect."""
        raise NotImplementedError

    # --- looking in

    @property
    def audit(self) -> Sequence[Mapping[str, Any]]:
        """Every call, life event and machine event so far (see docs/emulator-world.md)."""
        raise NotImplementedError
