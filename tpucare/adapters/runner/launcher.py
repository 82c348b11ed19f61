"""
The Launcher of fleets: push scripts, start the runner in screen, probe, stop; on all workers of a node at once.

It reaches workers through the Remote port alone. `scripts` and `bundle` make the texts that run there (from
`templates/`), `answers` reads the answers, `logs` keeps the logs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from tpucare.adapters.runner import answers, bundle, scripts
from tpucare.adapters.runner.logs import LogKeeper, LogPosition
from tpucare.model.errors import AuthRefused, CommandFailed, ConfigError, HostKeyChanged, RemoteError
from tpucare.model.local_files import EVERYWHERE_PRIVATE, Private
from tpucare.model.ports import Remote
from tpucare.model.resources import NodeKey, Ran, Worker
from tpucare.model.runs import (
    Contact,
    LaunchOrder,
    LaunchResult,
    NodeReport,
    NoticeOrder,
    ProbeOrder,
    StopOrder,
    StopResult,
    WorkerReport,
)

PROBE_DEADLINE = timedelta(seconds=10)
STOP_PATIENCE = timedelta(minutes=2)
STOP_MARGIN = timedelta(seconds=30)
STACKS_MARGIN = timedelta(minutes=2)
ANSWER_LIMIT = 4 << 20

# Bytes of the log per probe: enough to follow worker 0, a little of the others, much of each after a failed run.
FIRST_WORKER_BYTES = 64 << 10
OTHER_WORKER_BYTES = 4 << 10
FIRST_WORKER_FAILED_BYTES = 1 << 20
OTHER_WORKER_FAILED_BYTES = 256 << 10


@dataclass(slots=True)
class _Probed:
    """Results of earlier probes of a worker, so that the next one asks only for news."""

    position: LogPosition
    token: str = ""
    step: int | None = None
    rescan: bool = True


class ScriptLauncher:
    """
    ports.Launcher over a Remote. Thread-safe as far as its Remote is.

    `secrets` returns the value of a name, or None if it is not set; it is called at each launch, and no value is kept.
    Logs go below `state_dir`/logs. A `private` file of a `workdir` is never sent.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        state_dir: Path,
        secrets: Callable[[str], str | None],
        logs: LogKeeper | None = None,
        private: Private = EVERYWHERE_PRIVATE,
    ) -> None:
        self._remote, self._pusher = remote, Pusher(remote, secrets, private)
        self.logs = logs or LogKeeper(state_dir / "logs")
        # Probes run on many threads.
        self._lock = threading.Lock()
        self._probed: dict[Worker, _Probed] = {}

    # --- probe ---

    def probe(self, order: ProbeOrder) -> NodeReport:
        results = self._remote.each(order.workers, lambda worker: self._probe_worker(order, worker))
        reports = tuple(_report_of(result) for result in results)
        first = order.workers[0]
        return NodeReport(first.key, first.node_id, reports)

    def _probe_worker(self, order: ProbeOrder, worker: Worker) -> WorkerReport:
        probed = self._probed_before(order, worker)
        command = scripts.tool_command("probe", _question(order, worker, probed))
        try:
            answer = answers.read_probe(self._ask(worker, command, PROBE_DEADLINE))
        except answers.ToolsMissing:
            self.install(worker)
            answer = answers.read_probe(self._ask(worker, command, PROBE_DEADLINE))
        return self._keep_news(order, worker, probed, answer)

    def _probed_before(self, order: ProbeOrder, worker: Worker) -> _Probed:
        with self._lock:
            probed = self._probed.get(worker)
        if probed is None:
            probed = _Probed(self.logs.position(order.slot, order.attempt, worker.number))
            with self._lock:
                probed = self._probed.setdefault(worker, probed)
        return probed

    def _keep_news(
        self, order: ProbeOrder, worker: Worker, probed: _Probed, answer: answers.ProbeAnswer
    ) -> WorkerReport:
        report, news = answer.report, answer.log
        if news is not None:
            probed.position = self.logs.append(
                order.slot, order.attempt, news.token, worker.number, news.data, start=news.start
            )
        if report.step is not None or report.token != probed.token:
            probed.token, probed.step = report.token, report.step
        probed.rescan = False
        return replace(report, step=probed.step)

    # --- launch ---

    def launch(self, order: LaunchOrder) -> LaunchResult:
        """As `Pusher.launch`."""
        return self._pusher.launch(order)

    # --- stop, notice ---

    def stop(self, order: StopOrder) -> StopResult:
        return StopResult(tuple(self._remote.each(order.workers, lambda worker: self._stop_worker(order, worker))))

    def _stop_worker(self, order: StopOrder, worker: Worker) -> bool:
        question = {
            "worker": worker.number,
            "grace": order.grace.total_seconds(),
            "patience": STOP_PATIENCE.total_seconds(),
            "stacks": order.stacks,
        }
        deadline = order.grace + STOP_PATIENCE + STOP_MARGIN + (STACKS_MARGIN if order.stacks else timedelta())
        command = scripts.tool_command("stop", question)
        try:
            return answers.read_stop(self._ask(worker, command, deadline))
        except answers.ToolsMissing:
            self.install(worker)
            return answers.read_stop(self._ask(worker, command, deadline))

    def notice(self, order: NoticeOrder) -> None:
        """A worker that does not answer misses the notice: it is only advice, and the next one may arrive."""
        command = scripts.notice_command(order.token, order.text)
        self._remote.each(order.workers, lambda worker: self._ask(worker, command, PROBE_DEADLINE))

    # --- handed on to the Remote ---

    def pin_host_keys(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        pinned = [worker for worker in workers if self._remote.repin(worker, keys.get(worker.number, ()))]
        return frozenset(worker.number for worker in pinned)

    def watch_workers(self, workers: Sequence[Worker]) -> None:
        self._remote.watch_ports(workers)

    def disconnect(self, key: NodeKey) -> None:
        self._drop_node(key)
        self._remote.disconnect(key)

    def forget_node(self, key: NodeKey) -> None:
        self._drop_node(key)
        self._remote.forget_node(key)

    def _drop_node(self, key: NodeKey) -> None:
        with self._lock:
            for worker in [worker for worker in self._probed if worker.key == key]:
                self._probed.pop(worker)
        self._pusher.drop_node(key)

    def hints(self) -> frozenset[NodeKey]:
        return self._remote.hints()

    # --- inside ---

    def _ask(self, worker: Worker, command: str, deadline: timedelta) -> Ran:
        return self._remote.run(worker, command, deadline=deadline, limit=ANSWER_LIMIT)

    def install(self, worker: Worker) -> None:
        """Install the tools of this version on a worker that lacks them. Raises: RemoteError."""
        files = [(file.path, file.content, file.mode) for file in scripts.tool_files()]
        ran = self._remote.run(
            worker, scripts.install_command(), stdin=bundle.stream(files), deadline=LAUNCH_DEADLINE, limit=ANSWER_LIMIT
        )
        if ran.exit_status:
            raise answers.failed(ran, f"{name_of(worker)}: the tools could not be installed")


def _question(order: ProbeOrder, worker: Worker, probed: _Probed) -> dict[str, object]:
    first = worker.number == 0
    failed_bytes = FIRST_WORKER_FAILED_BYTES if first else OTHER_WORKER_FAILED_BYTES
    usual_bytes = FIRST_WORKER_BYTES if first else OTHER_WORKER_BYTES
    return {
        "worker": worker.number,
        "token": probed.position.token,
        "offset": probed.position.offset,
        "bytes": failed_bytes if order.everything else usual_bytes,
        "failed_bytes": failed_bytes,
        "progress": order.progress or scripts.DEFAULT_PROGRESS,
        "checkpoint": order.checkpoint if first else "",
        "rescan": probed.rescan,
        "settled": order.settled,
        "cadence": order.cadence,
        "run": order.run,
    }


def _report_of(answer: WorkerReport | Exception) -> WorkerReport:
    match answer:
        case WorkerReport():
            return answer
        case AuthRefused():
            contact = Contact.AUTH_REFUSED
        case HostKeyChanged():
            contact = Contact.HOST_KEY_CHANGED
        case RemoteError():
            # A malformed answer counts as silence: it does not prove that the worker is free.
            contact = Contact.SILENT
        case _:
            raise answer
    return WorkerReport(contact, detail=answers.one_line(str(answer)))


# --- a launch: the push to each worker, the start, and the answers ----------------------------------------------------
# One command per worker, two if a branch has to be resolved first: while files go to all workers, worker 0 asks the
# repository, and all get the same commit. If the branch cannot be resolved, the run fails in its fetch phase: the next
# probe reports it, and it counts as a failed setup.


LAUNCH_DEADLINE = timedelta(seconds=30)
SLOWEST_BYTES_PER_SECOND = 1 << 20

# Exit statuses of the launch script.
EXIT_UNRESOLVED = 69
EXIT_BUNDLE_MISSING = 75


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of a push. `light` lacks the bundle, for workers that have it; without a bundle both are the same."""

    light: bytes
    full: bytes
    bundle: str = ""


class Pusher:
    """
    Thread-safe as far as its Remote is; it keeps the name of each worker's bundle.

    `secrets` returns the value of a name, or None if it is not set; it is called at each launch, and no value is kept.
    """

    def __init__(
        self, remote: Remote, secrets: Callable[[str], str | None], private: Private = EVERYWHERE_PRIVATE
    ) -> None:
        self._remote, self._secrets, self._private = remote, secrets, private
        self._lock = threading.Lock()
        self._bundles: dict[Worker, str] = {}

    def launch(self, order: LaunchOrder) -> LaunchResult:
        """
        Start one run on all workers. The errors in the result: ConfigError for every worker (no worker started: a
        secret is missing, the workdir is too large), or RemoteErrors. With a branch to resolve, a failed push to one
        worker starts none.
        """
        try:
            secrets = self._secret_values(order)
            payload = payload_of(order, secrets, self._private)
        except ConfigError as error:
            return LaunchResult(tuple(error for _ in order.workers))
        if not scripts.needs_commit(order.job):
            return LaunchResult(self._push_and_start(order, payload))
        pushed = self._remote.each(order.workers, lambda worker: self._push(order, worker, payload, False))
        commit, refusal = _commit_of(pushed, secrets)
        if problem := _first_problem(order.workers, pushed):
            return LaunchResult(tuple(_not_started(answer, problem) for answer in pushed))
        return LaunchResult(self._start(order, commit, refusal))

    def _push_and_start(self, order: LaunchOrder, payload: Payload) -> tuple[Exception | None, ...]:
        results = self._remote.each(order.workers, lambda worker: self._push(order, worker, payload, True))
        return tuple(_started(worker, result) for worker, result in zip(order.workers, results, strict=True))

    def _start(self, order: LaunchOrder, commit: str, refusal: str) -> tuple[Exception | None, ...]:
        def start(worker: Worker) -> Ran:
            command = scripts.launch_command(order, worker.number, start=True, commit=commit, error=refusal)
            return self._remote.run(worker, command, deadline=LAUNCH_DEADLINE)

        results = self._remote.each(order.workers, start)
        return tuple(_started(worker, result) for worker, result in zip(order.workers, results, strict=True))

    def _push(self, order: LaunchOrder, worker: Worker, payload: Payload, start: bool) -> Ran:
        """Send the run's folder; *start*: then start the run; otherwise worker 0 then resolves the branch."""
        command = scripts.launch_command(
            order,
            worker.number,
            push=True,
            start=start,
            resolve=not start and worker == order.workers[0],
            bundle=payload.bundle,
        )
        has_bundle = payload.bundle and self._bundles.get(worker) == payload.bundle
        ran = self._send(worker, command, payload.light if has_bundle else payload.full)
        if ran.exit_status == EXIT_BUNDLE_MISSING and has_bundle:
            ran = self._send(worker, command, payload.full)
        if payload.bundle and not ran.exit_status:
            with self._lock:
                self._bundles[worker] = payload.bundle
        return ran

    def _send(self, worker: Worker, command: str, content: bytes) -> Ran:
        transfer = timedelta(seconds=scripts.RESOLVE_SECONDS + len(content) / SLOWEST_BYTES_PER_SECOND)
        return self._remote.run(worker, command, stdin=content, deadline=LAUNCH_DEADLINE + transfer)

    def _secret_values(self, order: LaunchOrder) -> dict[str, str]:
        values = {}
        for name in order.job.secrets:
            value = self._secrets(name)
            if value is None:
                raise ConfigError(
                    f"secret {name} of fleet {order.fleet or order.slot} is not set: put it into the environment of "
                    "tpucare or into its credentials folder"
                )
            values[name] = value
        return values

    def drop_node(self, key: NodeKey) -> None:
        with self._lock:
            for worker in [worker for worker in self._bundles if worker.key == key]:
                self._bundles.pop(worker)


def payload_of(order: LaunchOrder, secrets: Mapping[str, str], private: Private = EVERYWHERE_PRIVATE) -> Payload:
    packed = bundle.pack(order.job.workdir, private) if order.job.workdir else None
    name = packed.name if packed else ""
    files = [(file.path, file.content, file.mode) for file in scripts.run_files(order, secrets, name)]
    light = bundle.stream(files)
    full = bundle.stream([*files, (packed.name, packed.content, 0o600)]) if packed else light
    return Payload(light, full, name)


def _started(worker: Worker, answer: Ran | Exception) -> Exception | None:
    return answer if isinstance(answer, Exception) else answers.read_start(answer, name_of(worker))


def _commit_of(pushed: Sequence[Ran | Exception], secrets: Mapping[str, str]) -> tuple[str, str]:
    """(commit, error) from worker 0's answer, exactly one of them set; both empty if it did not answer."""
    first = pushed[0]
    if isinstance(first, Exception):
        return "", ""
    if commit := answers.read_commit(first):
        return commit, ""
    text = f"the branch could not be resolved to a commit: {answers.git_failed(first, secrets.keys())}"
    for value in secrets.values():
        text = text.replace(value, "***") if value else text
    return "", text


def _first_problem(workers: Sequence[Worker], pushed: Sequence[Ran | Exception]) -> Exception | None:
    """The first error that forbids a start: a worker was not reached, or its push is incomplete."""
    for worker, answer in zip(workers, pushed, strict=True):
        if isinstance(answer, Exception):
            return answer
        if answer.exit_status not in (0, EXIT_UNRESOLVED):
            return answers.failed(answer, f"{name_of(worker)}: the push failed")
    return None


def _not_started(answer: Ran | Exception, problem: Exception) -> Exception:
    if isinstance(answer, Exception):
        return answer
    return CommandFailed(f"not started, since another worker failed: {problem}", 75)


def name_of(worker: Worker) -> str:
    """The worker's name in errors."""
    return f"{worker.key.name} worker {worker.number}"
