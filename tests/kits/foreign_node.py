"""A node of workers that are folders, with callbacks launched on it: what tests of foreign runs have in common."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.kits.bench_worker import NO_METADATA, Node
from tests.kits.local_remote import LocalRemote
from tpucare.adapters.runner.launcher import ScriptLauncher
from tpucare.api.attempt import Attempt, attempt_of
from tpucare.api.callback_launcher import CallbackLauncher
from tpucare.api.threads import ThreadStarter
from tpucare.model.ports import Remote
from tpucare.model.resources import Event, Job
from tpucare.model.runs import LaunchResult, NodeReport, Phase, ProbeOrder, StopOrder, StopResult

FOREIGN = Job(run="", foreign=True)


class KeptContexts:
    """Contexts of one process."""

    def __init__(self) -> None:
        self.kept: dict[str, object] = {}

    def get(self, slot: str) -> object | None:
        return self.kept.get(slot)

    def put(self, slot: str, ctx: object) -> None:
        self.kept[slot] = ctx

    def copy(self, ctx: object) -> object:
        return copy.deepcopy(ctx)


def own_attempt(slot: str) -> Attempt:
    """The attempt of the calling `start_fn`."""
    attempt = attempt_of(slot)
    assert attempt is not None
    return attempt


class ForeignNode(Node):
    """
    `start` is the test's `start_fn(attempt, worker)`; the context is the number of nodes there were.
    """

    def __init__(
        self,
        remote: LocalRemote,
        start: Callable[[Attempt, Any], object],
        *,
        workers: int = 1,
        all_workers: bool = False,
        created: Callable[[str, Any], object] | None = None,
        late_after: float = 60.0,
    ) -> None:
        super().__init__(remote, workers, {})
        self.through: Remote = remote
        self.contexts = KeptContexts()
        self.start_fn, self.all_workers, self.late_after = start, all_workers, late_after
        self.created = created or self.count
        self.started: list[tuple[Any, Any]] = []
        self.prepared: list[str] = []
        self.events: list[Event] = []
        self.callbacks = self.another_process()

    def reach(self, remote: Remote, address: str) -> None:
        """From now on its only worker is that one, over *remote*."""
        self.workers = (self.workers[0]._replace(host=address),)
        self.through = remote
        self.launcher = ScriptLauncher(remote, state_dir=self.remote.root / "state", secrets=lambda _: None)
        self.callbacks = self.another_process()

    def another_process(self) -> CallbackLauncher:
        """A launcher that knows nothing of what this one did."""
        return CallbackLauncher(
            self.through,
            ThreadStarter(self._start),
            self.contexts,
            inner=self.launcher,
            created=self.created,
            all_workers=self.all_workers,
            report=self.events.append,
            now=lambda: datetime.now(UTC),
            late_after=timedelta(seconds=self.late_after),
        )

    def count(self, host: str, ctx: Any) -> Any:
        self.prepared.append(str(host))
        return (ctx or 0) + 1

    def _start(self, ctx: Any, worker: Any) -> None:
        self.started.append((ctx, worker))
        self.start_fn(own_attempt(self.slot), worker)

    def go(self, number: int = 1) -> LaunchResult:
        return self.callbacks.launch(self.order(FOREIGN, number))

    def look(self) -> NodeReport:
        return self.callbacks.probe(ProbeOrder(self.workers, self.slot, 1))

    def end(self, *, grace: float = 5.0) -> StopResult:
        return self.callbacks.stop(StopOrder(self.workers, self.slot, 1, timedelta(seconds=grace)))

    def is_set_up(self) -> bool:
        return {worker.phase for worker in self.look().workers} == {Phase.RUN}

    def has_failed(self) -> bool:
        return any(worker.exit_status is not None for worker in self.look().workers)

    def lives(self) -> list[bool]:
        return [worker.alive for worker in self.look().workers]


@contextmanager
def foreign_node(start: Callable[[Attempt, Any], object], **more: Any) -> Iterator[ForeignNode]:
    remote = LocalRemote(env={**NO_METADATA, **more.pop("env", {})})
    remote._env.setdefault("TMUX_TMPDIR", str(remote.root))
    node = ForeignNode(remote, start, **more)
    try:
        yield node
    finally:
        node.callbacks.close()
        remote.close()


def in_screen(command: str, name: str = "model") -> str:
    return f"screen -dmS {name} bash -c {shlex.quote(command)}"
