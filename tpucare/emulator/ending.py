"""
How nodes end: preemption, termination, deletion; and the capacity whose loss takes them away.
"""

from __future__ import annotations

from tpucare.emulator import errors_text as texts
from tpucare.emulator.machinery import CAPACITY_TIERS, Machinery
from tpucare.emulator.records import (
    PREEMPTED_ATTRIBUTE,
    NodePath,
    OperationRecord,
    Silence,
)
from tpucare.emulator.state import NodeLife
from tpucare.model import NodeState

OTHER_ENDS: tuple[int | str, ...] = (int(NodeState.REPAIRING), int(NodeState.TERMINATED), "gone")
"""How else the API may show a preemption."""


class Ending(Machinery):
    """From the decision that a node must go to 404."""

    def _doom(
        self,
        life: NodeLife,
        *,
        within: float = 0.0,
        notice: float | None = -1.0,
        visible_after: float | None = None,
        silent: bool | None = None,
        shown: int | str | None = None,
        cause: str,
    ) -> None:
        """
        Take a node away, at some instant *within* seconds from now. Lengths are seconds; what is left out is drawn
        (*notice* None: none, negative: drawn). Its capacity is free at once: somebody else was promised it.
        """
        if life.doomed or life.deleting or life.gone:
            return
        life.doomed = True
        self._release(life)
        settings, rng = self.config.preemption, self._rng
        wait = rng.random() * within
        drawn_notice = settings.notice.draw(rng) if settings.notice is not None else None
        if notice is not None and notice < 0:
            notice = drawn_notice
        delay = self.config.latencies.preempted_shown.draw(rng)
        falls_silent = rng.random() < settings.silent_share
        how = self._drawn_end()
        self.state.log_node(life, "doomed", cause=cause)
        if notice is not None:
            self._after(life, wait, lambda: self._set_attribute(life, PREEMPTED_ATTRIBUTE, "TRUE"))
        self._after(
            life,
            wait + (notice or 0.0),
            lambda: self._die(
                life,
                falls_silent if silent is None else silent,
                delay if visible_after is None else visible_after,
                how if shown is None else shown,
            ),
        )

    def _drawn_end(self) -> int | str:
        settings, lot = self.config.preemption, self._rng.random()
        other = self._rng.choice(OTHER_ENDS)
        if lot < settings.never_shown:
            return "never"
        return other if lot < settings.never_shown + settings.shown_otherwise else int(NodeState.PREEMPTED)

    def _die(self, life: NodeLife, silent: bool, visible_after: float, shown: int | str) -> None:
        """The machines go first; the API knows later."""
        life.dead = True
        if silent and not life.killed:
            for worker in life.workers:
                worker.silent = True
            self.state.tell(Silence(self.state.now, life.path, life.record.id))
        else:
            self._kill(life)
        self.state.log_node(life, "silent" if silent else "preempted")
        self._after(life, visible_after, lambda: self._show_end(life, shown))

    def _show_end(self, life: NodeLife, shown: int | str) -> None:
        # PREEMPTED is a proof of death to whoever reads it: nothing may run any more when it can first be read.
        self._kill(life)
        if life.deleting:
            return
        if shown == "gone":
            self._vanish(life)
            return
        if isinstance(shown, int):
            self._set_state(life, shown)
            name = NodeState(shown).name
            self.state.close_operation(life.create_operation, error=texts.preempted_meanwhile("create", name))
        self.state.log_node(life, "shown", shown=shown)

    def _terminate(self, life: NodeLife, *, cause: str) -> None:
        self._doom(life, notice=None, visible_after=0.0, silent=False, shown=int(NodeState.TERMINATED), cause=cause)

    # --- deletion

    def _begin_delete(self, life: NodeLife) -> OperationRecord:
        lengths, rng = self.config.latencies, self._rng
        operation = self.state.open_operation("delete", life.path)
        life.deleting = True
        life.delete_operations.append(operation.name)
        self._set_state(life, NodeState.DELETING)
        self.state.close_operation(life.create_operation, error=texts.deleted_meanwhile())
        self.state.log_node(life, "deleting")
        length = lengths.delete.draw(rng)
        if rng.random() < self.config.faults.delete_stuck:
            life.stuck_repeats = max(life.stuck_repeats, 1)
        self._after(life, length * lengths.delete_kills, lambda: self._kill(life))
        self._after(life, length, lambda: self._finish_delete(life))
        return operation

    def _repeat_delete(self, life: NodeLife) -> OperationRecord:
        """A second operation beside the first; it may be what a stuck deletion waits for."""
        operation = self.state.open_operation("delete", life.path)
        life.delete_operations.append(operation.name)
        life.stuck_repeats = max(0, life.stuck_repeats - 1)
        if life.delete_due and life.stuck_repeats == 0:
            self._later(life, self.config.latencies.delete, lambda: self._finish_delete(life))
        return operation

    def _finish_delete(self, life: NodeLife) -> None:
        life.delete_due = True
        if life.stuck_repeats == 0:
            self._vanish(life)

    def _vanish(self, life: NodeLife) -> None:
        """404 from now on; quota and name are free."""
        self._kill(life)
        state, path, record = self.state, life.path, life.record
        life.gone = True
        del state.nodes[path]
        del state.by_id[record.id]
        self.quota.remove(path.project, path.zone, life.accelerator, CAPACITY_TIERS[record.spec.tier])
        state.log_node(life, "gone")
        for name in life.delete_operations:
            state.close_operation(name)
        for name in (life.create_operation, life.update_operation):
            state.close_operation(name, error=texts.gone_meanwhile(record.name))
        for worker in life.workers:
            self._free_later(worker.address)
        self._hide_later(path, record.id)

    def _free_later(self, address: str) -> None:
        self.state.timeline.after(self.config.latencies.address_reuse, lambda: self.state.addresses.free(address))

    def _hide_later(self, path: NodePath, node_id: int) -> None:
        lengths, rng = self.config.latencies, self._rng
        lag = lengths.list_lag.draw(rng)
        listing = self.state.listing(path.project)
        if rng.random() < lengths.list_lag_share:
            self.state.timeline.after(lag, lambda: listing.hide(path, node_id))
        else:
            listing.hide(path, node_id)
