"""
The operator's actions on a world, for tests, demos and `tpucare emulator ACTION`.

A selector is a node's id or path, a prefix of ids (a slot or a fleet: `pod-0` means `pod-0-…`), or `*`. Every action
returns the ids of the nodes that it changed, in the order of listings, and leaves a line in the audit log.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from tpucare.model.errors import ConfigError
from tpucare.model.resources import Health, NodeState, QueuedState
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.config import WorldConfig
from tpucare.testbed.emulator.world.faults import OUTAGE_KINDS, ActiveOutage, Fates
from tpucare.testbed.emulator.world.life import MAINTENANCE_TEXT, Departure, NodeLifecycle
from tpucare.testbed.emulator.world.queued_life import QueuedLifecycle
from tpucare.testbed.emulator.world.queued_records import WAITING, Initiator, QueuedLife
from tpucare.testbed.emulator.world.records import MAINTENANCE_ATTRIBUTE, NO_MAINTENANCE, ApiError, parse_node_path
from tpucare.testbed.emulator.world.state import NodeLife, State


class Operator:
    """Each method is one thing that may happen to real nodes although their owner did not ask for it."""

    def __init__(self, state: State, fates: Fates, nodes: NodeLifecycle, queue: QueuedLifecycle) -> None:
        self._state, self._fates, self._nodes, self._queue = state, fates, nodes, queue

    def select(self, selector: str, *, living: bool = False) -> list[NodeLife]:
        """Nodes that *selector* names; `living`: without those that are preempted already or being deleted."""
        prefix = f"{selector.removesuffix('-')}-"
        named = (life for life in self._state.nodes.values() if _is_named(selector, prefix, life))
        found = sorted(named, key=lambda life: life.path)
        return [life for life in found if not (life.doomed or life.deleting)] if living else found

    def preempt(
        self,
        selector: str,
        now: datetime,
        *,
        notice: timedelta | None = None,
        visible_after: timedelta | None = None,
        silent: bool = False,
        shown: int | str | None = int(NodeState.PREEMPTED),
        burst: timedelta = timedelta(),
    ) -> list[str]:
        """
        Preempt nodes. Workers die *notice* after `preempted` turned TRUE (None: without), the API shows it
        *visible_after* later (None: drawn). `shown`: another state number, `never`, `gone`, or None: drawn. `silent`:
        they stop answering first and die just before it is shown. `burst`: spread by chance over this long.
        """
        lives = self._select_logged("preempt", selector, now, living=True)
        for life in lives:
            drawn = self._nodes.draw_departure()
            how = Departure(
                notice=None if notice is None else notice.total_seconds(),
                visible_after=drawn.visible_after if visible_after is None else visible_after.total_seconds(),
                silent=silent,
                shown=drawn.shown if shown is None else shown,
            )
            self._nodes.preempt(life, "operator", how, within=burst.total_seconds())
        self._state.advance(self._state.now)
        return _ids(lives)

    def terminate(self, selector: str, now: datetime) -> list[str]:
        """Kill the workers and show TERMINATED."""
        lives = self._select_logged("terminate", selector, now, living=True)
        for life in lives:
            self._nodes.terminate(life, cause="operator")
        self._state.advance(self._state.now)
        return _ids(lives)

    def remove(self, selector: str, now: datetime) -> list[str]:
        """Remove the nodes at once: 404."""
        lives = self._select_logged("forget", selector, now)
        for life in lives:
            self._nodes.remove(life)
        return _ids(lives)

    def set_capacity(self, zone: str, accelerator: str, tier: str, amount: int | None, now: datetime) -> None:
        """
        Capacity from now on, in the pool's unit (nodes unless configured); None = unlimited. Ends a process or trace.

        *accelerator*: a type, a generation, or empty for all of the zone. Raises: ConfigError: no such zone or tier.
        """
        self._state.advance(now)
        if zone not in self._state.config.zones or tier not in ("spot", "on-demand", "reserved"):
            raise ConfigError(f"no zone {zone} in this world, or {tier} is none of spot, on-demand, reserved")
        self._nodes.pools.set_capacity(zone, accelerator, tier, amount)
        self._state.advance(self._state.now)

    def set_health(self, selector: str, health: int, now: datetime, description: str = "") -> list[str]:
        """Show any number as their health, with a text beside it."""
        lives = self._select_logged("set-health", selector, now, health=int(health))
        for life in lives:
            self._nodes.set_health(life, health, description)
        return _ids(lives)

    def set_state(self, selector: str, state: int, now: datetime) -> list[str]:
        """Show any number as their state, unknown ones too; machines do not change."""
        lives = self._select_logged("set-state", selector, now, state=int(state))
        for life in lives:
            self._nodes.set_state(life, state)
            self._state.log_node(life, "shown", shown=int(state))
        return _ids(lives)

    def show_unknown_fields(self, selector: str, now: datetime, *, on: bool = True, answers: bool = False) -> list[str]:
        """
        Show nodes with fields that no package knows, as a service does that is newer than its client.

        `answers`: show every answer of the API so, until it is switched off.
        """
        lives = self._select_logged("unknown-fields", selector, now, on=on, answers=answers)
        self._state.unknown_fields = on and (answers or self._state.unknown_fields)
        for life in lives:
            self._state.change(life, unknown_fields=on)
        queued = self._select_queued(selector)
        for one in queued:
            one.record = replace(one.record, unknown_fields=on)
        return _ids(lives) + [one.path.queued_id for one in queued]

    def fail_queued(self, selector: str, code: int, text: str, now: datetime) -> list[str]:
        """Make queued resources FAILED with this error, and remove their nodes."""
        queued = self._select_queued_logged("fail-queued", selector, now)
        queued = [one for one in queued if one.record.state not in (QueuedState.FAILED, QueuedState.DELETING)]
        for one in queued:
            self._queue.fail(one, (code, text))
        return [one.path.queued_id for one in queued]

    def suspend_queued(self, selector: str, now: datetime) -> list[str]:
        """Take their nodes away, as after a preemption that no node shows: SUSPENDING, later SUSPENDED."""
        queued = self._select_queued_logged("suspend-queued", selector, now)
        queued = [one for one in queued if one.record.state in (QueuedState.PROVISIONING, QueuedState.ACTIVE)]
        for one in queued:
            self._queue.suspend(one, Initiator.SERVICE)
        return [one.path.queued_id for one in queued]

    def forget_queued(self, selector: str, now: datetime) -> list[str]:
        """Waiting ones are gone from one moment to the next."""
        queued = self._select_queued_logged("forget-queued", selector, now)
        queued = [one for one in queued if one.record.state in WAITING]
        for one in queued:
            self._queue.forget(one)
        return [one.path.queued_id for one in queued]

    def set_queued_state(self, selector: str, state: int, now: datetime) -> list[str]:
        """Show any number as their state, unknown ones too; nodes do not change."""
        queued = self._select_queued_logged("queued-state", selector, now, state=int(state))
        for one in queued:
            self._queue.set_state(one, state)
        return [one.path.queued_id for one in queued]

    def _select_queued(self, selector: str) -> list[QueuedLife]:
        return [
            life for path, life in sorted(self._state.queue.items()) if selector in ("*", path.queued_id, str(path))
        ]

    def _select_queued_logged(self, action: str, selector: str, now: datetime, **fields: object) -> list[QueuedLife]:
        self._state.advance(now)
        queued = self._select_queued(selector)
        names = [one.record.name for one in queued]
        self._state.log("operator", action=action, selector=selector, names=names, **fields)
        return queued

    def maintenance(
        self,
        selector: str,
        now: datetime,
        *,
        event: str = "TERMINATE_ON_HOST_MAINTENANCE",
        duration: timedelta = timedelta(minutes=5),
        restart: bool = False,
    ) -> list[str]:
        """Show it in `maintenance-event` and health for *duration*; `restart`: all workers reboot in the middle."""
        lives = self._select_logged("maintenance", selector, now, living=True, text=event)
        for life in lives:
            self._nodes.set_attribute(life, MAINTENANCE_ATTRIBUTE, event)
            self._nodes.set_health(life, Health.UNHEALTHY_MAINTENANCE, MAINTENANCE_TEXT)
            if restart:
                everyone = range(len(life.workers))
                self._nodes.after(life, duration.total_seconds() / 2, partial(self._nodes.reboot, life, everyone))
            self._nodes.after(life, duration.total_seconds(), partial(self._end_maintenance, life))
        return _ids(lives)

    def _end_maintenance(self, life: NodeLife) -> None:
        if not life.dead:
            self._nodes.set_attribute(life, MAINTENANCE_ATTRIBUTE, NO_MAINTENANCE)
            self._nodes.set_health(life, Health.HEALTHY)

    def lose_worker(self, selector: str, worker: int, now: datetime, *, silent: bool = False) -> list[str]:
        """Kill or silence one worker of a node; the API does not show it."""
        lives = self._select_logged("lose-worker", selector, now, living=True, worker=worker)
        lives = [life for life in lives if worker < len(life.workers)]
        for life in lives:
            chosen = life.workers[worker]
            if silent:
                self._nodes.silence_worker(life, chosen)
            else:
                self._nodes.kill_worker(life, chosen)
        return _ids(lives)

    def restore_worker(self, selector: str, worker: int, now: datetime) -> list[str]:
        """Boot a worker again, or let a silent one answer again."""
        lives = self._select_logged("restore-worker", selector, now, living=True, worker=worker)
        lives = [life for life in lives if worker < len(life.workers)]
        for life in lives:
            chosen = life.workers[worker]
            if chosen.up and chosen.silent:
                self._nodes.resume_worker(life, chosen)
            else:
                self._nodes.boot(life, chosen)
        return _ids(lives)

    def stick_deleting(self, selector: str, now: datetime, *, repeats: int = 1) -> list[str]:
        """Let the current or next delete hang in DELETING until DeleteNode was called *repeats* more times."""
        lives = self._select_logged("stick-deleting", selector, now)
        for life in lives:
            life.stuck_repeats = repeats
        return _ids(lives)

    def outage(self, kind: str, duration: timedelta, now: datetime, *, zone: str = "", seconds: float = 30.0) -> None:
        """
        `kind`: api (14 for every call), internal (13), zone (unreachable), slow (answers take *seconds* longer).

        Raises: ConfigError: another kind, or a zone outage without a zone of this world.
        """
        self._state.advance(now)
        if kind not in OUTAGE_KINDS or (kind == "zone" and zone not in self._state.config.zones):
            raise ConfigError(f"an outage is one of {', '.join(OUTAGE_KINDS)}, and of a zone only if it is named")
        start = self._state.now
        self._fates.add_outage(ActiveOutage(kind, zone, start, start + duration, seconds))
        self._state.log("operator", action="outage", outage=kind, zone=zone, seconds=duration.total_seconds())

    def end_outages(self, now: datetime) -> None:
        """End all outages."""
        self._state.advance(now)
        self._fates.end_outages()
        self._state.log("operator", action="end-outages")

    def reconfigure(self, config: WorldConfig, now: datetime) -> None:
        """
        Draw lengths, faults and lifetimes by *config* from now on; steps already scheduled stay.

        Quotas can only be lifted (when *config* has none). Capacity does not change: see `set_capacity`.
        """
        self._state.advance(now)
        self._state.config = config
        self._fates.reconfigure(config)
        if not config.quotas:
            self._state.quota.drop_limits()
        self._state.log("operator", action="reconfigure")

    # --- orders for the next call

    def fail_next_create(self, code: int, text: str, *, in_operation: bool = True, zone: str = "") -> None:
        """Fail the next create (in *zone*, or anywhere): in its operation, or in the call, which then has no effect."""
        if in_operation:
            self._nodes.next_create_errors.append((zone, (code, text)))
        else:
            self.fail_next("CreateNode", code, text)

    def cancel_orders(self, method: str = "") -> None:
        """Drop the orders for next calls (of *method*, or of all calls and creates) that have not been used yet."""
        self._fates.cancel_orders(method)
        if method:
            return
        self._nodes.next_create_errors.clear()
        self._nodes.next_missing.clear()

    def miss_worker(self, worker: int = -1, *, zone: str = "") -> None:
        """Let the next node that is created lack this worker for ever (-1: the last)."""
        self._nodes.next_missing.append((zone, worker))

    def lose_next_answer(self, method: str, *, applied: bool = True, code: int = texts.UNAVAILABLE) -> None:
        """Lose the answer of the next call of *method*; `applied`: the call takes effect all the same."""
        self._fates.order(method, ApiError(code, texts.lost().message), applied=applied)

    def delay_next(self, method: str, seconds: float) -> None:
        """Let the next call of *method* take effect after *seconds*, whether or not its caller still waits."""
        self._fates.order_delay(method, seconds)

    def fail_next(self, method: str, code: int, text: str) -> None:
        """Answer the next call of *method* with this error, without effect."""
        self._fates.order(method, ApiError(code, text), applied=False)

    # --- reports of machines

    def set_guest_attribute(self, name: str, worker: int, namespace: str, key: str, value: str) -> None:
        """Set a guest attribute, for example `hostkeys`, `ssh-ed25519` and the key; ignored when the node is gone."""
        life = self._state.nodes.get(parse_node_path(name))
        if life is not None and 0 <= worker < len(life.workers):
            machine = life.workers[worker]
            machine.guest[namespace, key] = value
            machine.guest_since = machine.guest_since or self._state.now

    def log_note(self, event: str, now: datetime, **fields: object) -> None:
        """Log a machine's event: `run-started` or `run-ended` with token=, name= (the node's), worker=, and others."""
        self._state.advance(now)
        self._state.log("note", event=event, **fields)

    def _select_logged(
        self, action: str, selector: str, now: datetime, *, living: bool = False, **fields: object
    ) -> list[NodeLife]:
        self._state.advance(now)
        lives = self.select(selector, living=living)
        names = [life.record.name for life in lives]
        self._state.log("operator", action=action, selector=selector, names=names, **fields)
        return lives


def _is_named(selector: str, prefix: str, life: NodeLife) -> bool:
    node_id = life.record.path.node_id
    if node_id.startswith(prefix) or selector in ("*", node_id):
        return True
    return "/" in selector and selector == life.record.name


def _ids(lives: list[NodeLife]) -> list[str]:
    return [life.path.node_id for life in lives]
