"""How nodes end: preemption, termination, deletion. What decides that one has to go is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from tpucare.model.resources import NodeState
from tpucare.testbed.emulator.world import error_texts as texts
from tpucare.testbed.emulator.world.machine_effects import Silence
from tpucare.testbed.emulator.world.machinery import CAPACITY_TIERS, Machinery
from tpucare.testbed.emulator.world.records import PREEMPTED_ATTRIBUTE, NodePath, OperationRecord
from tpucare.testbed.emulator.world.state import NodeLife

OTHER_ENDS: tuple[int | str, ...] = (int(NodeState.REPAIRING), int(NodeState.TERMINATED), "gone")
"""How else the API may show a preemption."""


@dataclass(frozen=True, slots=True)
class Departure:
    """
    How a node is taken away. Lengths are seconds.

    notice:        from `preempted` TRUE to the death of the workers; None: without any
    visible_after: from their death until the API shows it
    silent:        they stop answering first, and die just before it is shown
    shown:         a state number, `never` or `gone`
    """

    notice: float | None
    visible_after: float
    silent: bool
    shown: int | str


class Ending(Machinery):
    """From the decision that a node must go to 404."""

    def _doom(self, life: NodeLife, cause: str, departure: Departure | None = None, within: float = 0.0) -> None:
        """
        Take a node away, at some instant *within* seconds from now; without a *departure* chance says how.

        Its capacity is free at once: somebody else was promised it.
        """
        if life.doomed or life.deleting or life.gone:
            return
        life.doomed = True
        self._release(life)
        how = departure or self._drawn_departure()
        wait = self._rng.random() * within
        self.state.log_node(life, "doomed", cause=cause)
        if how.notice is not None:
            self._after(life, wait, lambda: self._set_attribute(life, PREEMPTED_ATTRIBUTE, "TRUE"))
        self._after(life, wait + (how.notice or 0.0), lambda: self._die(life, how))

    def _drawn_departure(self) -> Departure:
        settings, rng = self.config.preemption, self._rng
        return Departure(
            notice=settings.notice.draw(rng) if settings.notice is not None else None,
            visible_after=self.config.latencies.preempted_shown.draw(rng),
            silent=rng.random() < settings.silent_share,
            shown=self._drawn_end(),
        )

    def _drawn_end(self) -> int | str:
        settings, lot = self.config.preemption, self._rng.random()
        other = self._rng.choice(OTHER_ENDS)
        if lot < settings.never_shown:
            return "never"
        return other if lot < settings.never_shown + settings.shown_otherwise else int(NodeState.PREEMPTED)

    def _die(self, life: NodeLife, how: Departure) -> None:
        """The machines go first; the API knows later."""
        life.dead = True
        if how.silent and not life.killed:
            for worker in life.workers:
                worker.silent = True
            if life.is_any_up:
                self.state.tell(Silence(self.state.now, life.path, life.record.id))
        else:
            self._kill(life)
        self.state.log_node(life, "silent" if how.silent else "preempted")
        self._after(life, how.visible_after, lambda: self._show_end(life, how.shown))

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
        at_once = Departure(notice=None, visible_after=0.0, silent=False, shown=int(NodeState.TERMINATED))
        self._doom(life, cause, at_once)

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
        self._moved(life)

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
