"""A Launcher whose workers only exist as answers: for rows that ask what everything but SSH costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tpucare.model.resources import NodeKey, Worker
from tpucare.model.runs import (
    Contact,
    LaunchOrder,
    LaunchResult,
    NodeReport,
    NoticeOrder,
    Phase,
    ProbeOrder,
    StopOrder,
    StopResult,
    WorkerReport,
)


class SteadyLauncher:
    """Every worker answers at once, and what was launched trains a step a second. No hint is ever given."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._runs: dict[NodeKey, tuple[str, float]] = {}

    def probe(self, order: ProbeOrder) -> NodeReport:
        first = order.workers[0]
        return NodeReport(first.key, first.node_id, tuple(self._report(worker) for worker in order.workers))

    def _report(self, worker: Worker) -> WorkerReport:
        token, since = self._runs.get(worker.key, ("", 0.0))
        if not token:
            return WorkerReport(Contact.ANSWERED, boot_id="1")
        step = int(self._seconds() - since)
        number = int(token.rpartition(".")[2])
        return WorkerReport(
            Contact.ANSWERED,
            token=token,
            alive=True,
            chips_free=False,
            phase=Phase.RUN,
            last_number=number,
            boot_id="1",
            step=step,
            log_bytes=100 * step,
        )

    def launch(self, order: LaunchOrder) -> LaunchResult:
        self._runs[order.workers[0].key] = (order.token, self._seconds())
        return LaunchResult(tuple(None for _ in order.workers))

    def stop(self, order: StopOrder) -> StopResult:
        self._runs.pop(order.workers[0].key, None)
        return StopResult(tuple(True for _ in order.workers))

    def notice(self, order: NoticeOrder) -> None: ...

    def pin_host_keys(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        return frozenset(worker.number for worker in workers)

    def watch_workers(self, workers: Sequence[Worker]) -> None: ...

    def disconnect(self, key: NodeKey) -> None:
        self._runs.pop(key, None)

    def forget_node(self, key: NodeKey) -> None:
        self._runs.pop(key, None)

    def hints(self) -> frozenset[NodeKey]:
        return frozenset()
