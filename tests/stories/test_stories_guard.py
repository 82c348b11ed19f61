"""Stories of workers that block an address after refused logins, as sshguard on Ubuntu images does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.harness import Daemon
from tpucare.model.resources import NodeKey, Worker
from tpucare.model.runs import Contact, NodeReport, ProbeOrder, WorkerReport
from tpucare.testbed.simulation.machines import SimulatedWorker

ATTACKS, WITHIN = 4, 1800.0


class Guard:
    """On each worker of *fleet*: after four refused logins in half an hour nothing answers for *block* seconds."""

    def __init__(self, daemon: Daemon, fleet: str, block: float) -> None:
        self.daemon = daemon
        self.fleet = fleet
        self.block = block
        self.blocks = 0
        self._attacks: dict[tuple[NodeKey, int], list[float]] = {}
        self._until: dict[tuple[NodeKey, int], float] = {}
        self._probe = daemon.launcher.probe
        daemon.launcher.probe = self.probe  # type: ignore[method-assign]

    def probe(self, order: ProbeOrder) -> NodeReport:
        report = self._probe(order)
        heard = zip(order.workers, report.workers, strict=True)
        return NodeReport(report.key, report.node_id, tuple(self._pass(worker, said) for worker, said in heard))

    def _pass(self, worker: Worker, report: WorkerReport) -> WorkerReport:
        now, known = self.daemon.clock.seconds, (worker.key, worker.number)
        if now < self._until.get(known, 0.0):
            return WorkerReport(Contact.SILENT)
        if report.contact is Contact.AUTH_REFUSED and worker.key.name.startswith(self.fleet):
            attacks = [at for at in self._attacks.get(known, []) if now - at < WITHIN] + [now]
            if len(attacks) >= ATTACKS:
                self._until[known], attacks = now + self.block, []
                self.blocks += 1
            self._attacks[known] = attacks
        return report


@pytest.mark.parametrize(("late", "blocked"), [(25, False), (60, True)])
def test_keys_that_come_late_behind_a_guard_cost_no_node(tmp_path: Path, late: float, blocked: bool) -> None:
    """
    A guard such as sshguard blocked our address, because each knock was closed without a login and each refused login
    was repeated every second; the silence that followed condemned one new node after another. The knock is the first
    login, refused logins have a pause, and a node that refused us and never answered has until `boot_timeout`.
    """
    daemon = Daemon(tmp_path / "state")
    daemon.care_for("old")
    daemon.run_until(lambda: daemon.trains("old-0"))
    publish = daemon.launcher.on_boot

    def boot(worker: SimulatedWorker) -> None:
        if publish is not None:
            publish(worker)
        worker.refuses_until = daemon.clock.seconds + late

    daemon.launcher.on_boot = boot
    guard = Guard(daemon, "pod", block=630)
    daemon.care_for("pod", 2)
    daemon.run(minutes=20)
    assert daemon.all_train()
    assert bool(guard.blocks) is blocked
    assert len(daemon.zone.created()) == 3
    assert daemon.told("delete") == []
    daemon.check()
