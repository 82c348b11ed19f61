"""
The Launcher of fleets: push scripts, start the runner in screen, probe, stop; on all workers of a node at once.

It reaches workers through the Remote port alone. What runs there is made by `scripts` and `bundle` and lies in
`templates/`; what the workers answer is read by `answers`; logs are kept by `logs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from tpucare.adapters.runner import answers, bundle
from tpucare.adapters.runner import scripts as script
from tpucare.adapters.runner.logs import LogKeeper, Place
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

# What a probe brings of the log: enough to follow worker 0, a taste of the others, much of each when the run failed.
FIRST_WORKER_BYTES = 64 << 10
OTHER_WORKER_BYTES = 4 << 10
FIRST_WORKER_FAILED_BYTES = 1 << 20
OTHER_WORKER_FAILED_BYTES = 256 << 10


@dataclass(slots=True)
class _Seen:
    """What earlier probes of a worker said, so that the next one asks only for what is new."""

    place: Place
    token: str = ""
    step: int | None = None
    rescan: bool = True


class ScriptLauncher:
    """
    ports.Launcher over a Remote. Thread-safe as far as its Remote is.

    `secrets` gives the value of a name, or None when it is not set; it is asked at each launch, and nothing is kept.
    Logs go below `state_dir`/logs. No file of a `workdir` that is `private` is sent.
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
        self._known: dict[Worker, _Seen] = {}

    # --- probe ---

    def probe(self, order: ProbeOrder) -> NodeReport:
        heard = self._remote.each(order.workers, lambda worker: self._probe_worker(order, worker))
        reports = tuple(_report_of(answer) for answer in heard)
        first = order.workers[0]
        return NodeReport(first.key, first.node_id, reports)

    def _probe_worker(self, order: ProbeOrder, worker: Worker) -> WorkerReport:
        seen = self._seen(order, worker)
        command = script.tool_command("probe", _question(order, worker, seen))
        try:
            answer = answers.read_probe(self._ask(worker, command, PROBE_DEADLINE))
        except answers.ToolsMissing:
            self.install(worker)
            answer = answers.read_probe(self._ask(worker, command, PROBE_DEADLINE))
        return self._remember(order, worker, seen, answer)

    def _seen(self, order: ProbeOrder, worker: Worker) -> _Seen:
        with self._lock:
            seen = self._known.get(worker)
        if seen is None:
            seen = _Seen(self.logs.place(order.slot, order.attempt, worker.number))
            with self._lock:
                seen = self._known.setdefault(worker, seen)
        return seen

    def _remember(self, order: ProbeOrder, worker: Worker, seen: _Seen, answer: answers.ProbeAnswer) -> WorkerReport:
        report, news = answer.report, answer.log
        if news is not None:
            seen.place = self.logs.append(
                order.slot, order.attempt, news.token, worker.number, news.data, start=news.start
            )
        if report.step is not None or report.token != seen.token:
            seen.token, seen.step = report.token, report.step
        seen.rescan = False
        return replace(report, step=seen.step)

    # --- launch ---

    def launch(self, order: LaunchOrder) -> LaunchResult:
        """Start one run on all workers, as `pusher` says; it has the errors of each."""
        return self._pusher.launch(order)

    # --- stop, notice ---

    def stop(self, order: StopOrder) -> StopResult:
        heard = self._remote.each(order.workers, lambda worker: self._stop_worker(order, worker))
        return StopResult(tuple(heard))

    def _stop_worker(self, order: StopOrder, worker: Worker) -> bool:
        question = {
            "worker": worker.number,
            "grace": order.grace.total_seconds(),
            "patience": STOP_PATIENCE.total_seconds(),
            "stacks": order.stacks,
        }
        deadline = order.grace + STOP_PATIENCE + STOP_MARGIN + (STACKS_MARGIN if order.stacks else timedelta())
        command = script.tool_command("stop", question)
        try:
            return answers.read_stop(self._ask(worker, command, deadline))
        except answers.ToolsMissing:
            self.install(worker)
            return answers.read_stop(self._ask(worker, command, deadline))

    def notice(self, order: NoticeOrder) -> None:
        """A worker that does not answer misses it: a notice is a wish, and the next one may come through."""
        command = script.notice_command(order.token, order.text)
        self._remote.each(order.workers, lambda worker: self._ask(worker, command, PROBE_DEADLINE))

    # --- what the Remote does by itself ---

    def vouch(self, workers: Sequence[Worker], keys: Mapping[int, tuple[str, ...]]) -> frozenset[int]:
        told = [worker for worker in workers if self._remote.repin(worker, keys.get(worker.number, ()))]
        return frozenset(worker.number for worker in told)

    def expect(self, workers: Sequence[Worker]) -> None:
        self._remote.knock(workers)

    def disconnect(self, key: NodeKey) -> None:
        self._drop(key)
        self._remote.disconnect(key)

    def forget(self, key: NodeKey) -> None:
        self._drop(key)
        self._remote.forget(key)

    def _drop(self, key: NodeKey) -> None:
        with self._lock:
            for worker in [worker for worker in self._known if worker.key == key]:
                self._known.pop(worker)
        self._pusher.forget(key)

    def hints(self) -> frozenset[NodeKey]:
        return self._remote.hints()

    # --- inside ---

    def _ask(self, worker: Worker, command: str, deadline: timedelta) -> Ran:
        return self._remote.run(worker, command, deadline=deadline, limit=ANSWER_LIMIT)

    def install(self, worker: Worker) -> None:
        """Tools of this version, for a worker that has none, or those of another. Raises: RemoteError."""
        files = [(file.path, file.content, file.mode) for file in script.tool_files()]
        ran = self._remote.run(
            worker, script.install_command(), stdin=bundle.stream(files), deadline=LAUNCH_DEADLINE, limit=ANSWER_LIMIT
        )
        if ran.exit_status:
            raise answers.failed(ran, f"{name_of(worker)}: the tools could not be installed")


def _question(order: ProbeOrder, worker: Worker, seen: _Seen) -> dict[str, object]:
    first = worker.number == 0
    failed_bytes = FIRST_WORKER_FAILED_BYTES if first else OTHER_WORKER_FAILED_BYTES
    usual_bytes = FIRST_WORKER_BYTES if first else OTHER_WORKER_BYTES
    return {
        "worker": worker.number,
        "token": seen.place.token,
        "offset": seen.place.offset,
        "bytes": failed_bytes if order.everything else usual_bytes,
        "failed_bytes": failed_bytes,
        "progress": order.progress or script.DEFAULT_PROGRESS,
        "checkpoint": order.checkpoint if first else "",
        "rescan": seen.rescan,
        "settled": order.settled,
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
            # Nonsense counts as silence: what cannot say how it is has not said that it is free.
            contact = Contact.SILENT
        case _:
            raise answer
    return WorkerReport(contact, detail=answers.one_line(str(answer)))


# --- a launch: what is pushed to which worker, the start, and what each of them answers -------------------------------
# One command per worker, two when a branch has to be resolved first: while files go to all workers, worker 0 asks the
# repository, and all get the same commit. A branch that cannot be resolved is a run that fails in its fetch phase: the
# next probe sees it, and it counts as a failed setup.


LAUNCH_DEADLINE = timedelta(seconds=30)
SLOWEST_BYTES_PER_SECOND = 1 << 20

# Exit statuses of the launch script.
EXIT_UNRESOLVED = 69
EXIT_BUNDLE_MISSING = 75


@dataclass(frozen=True, slots=True)
class Payload:
    """What a launch sends. `light` leaves out the bundle, for workers that have it; both are the same without one."""

    light: bytes
    full: bytes
    bundle: str = ""


class Pusher:
    """
    Thread-safe as far as its Remote is; it remembers which worker has which bundle.

    `secrets` gives the value of a name, or None when it is not set; it is asked at each launch, and nothing is kept.
    """

    def __init__(
        self, remote: Remote, secrets: Callable[[str], str | None], private: Private = EVERYWHERE_PRIVATE
    ) -> None:
        self._remote, self._secrets, self._private = remote, secrets, private
        self._lock = threading.Lock()
        self._bundles: dict[Worker, str] = {}

    def launch(self, order: LaunchOrder) -> LaunchResult:
        """
        Start one run on all workers. An error of a worker: ConfigError (nothing was started anywhere: a secret is
        missing, the workdir is too large), or a RemoteError. When a push fails somewhere before any start, none starts.
        """
        try:
            secrets = self._secret_values(order)
            parcel = parcel_of(order, secrets, self._private)
        except ConfigError as error:
            return LaunchResult(tuple(error for _ in order.workers))
        if not script.needs_commit(order.job):
            return LaunchResult(self._push_and_start(order, parcel))
        pushed = self._remote.each(order.workers, lambda worker: self._push(order, worker, parcel, False))
        commit, refusal = _commit_of(pushed, secrets)
        if problem := _first_problem(order.workers, pushed):
            return LaunchResult(tuple(_not_started(answer, problem) for answer in pushed))
        return LaunchResult(self._start(order, commit, refusal))

    def _push_and_start(self, order: LaunchOrder, parcel: Payload) -> tuple[Exception | None, ...]:
        heard = self._remote.each(order.workers, lambda worker: self._push(order, worker, parcel, True))
        return tuple(_started(worker, answer) for worker, answer in zip(order.workers, heard, strict=True))

    def _start(self, order: LaunchOrder, commit: str, refusal: str) -> tuple[Exception | None, ...]:
        def start(worker: Worker) -> Ran:
            command = script.launch_command(order, worker.number, start=True, commit=commit, error=refusal)
            return self._remote.run(worker, command, deadline=LAUNCH_DEADLINE)

        heard = self._remote.each(order.workers, start)
        return tuple(_started(worker, answer) for worker, answer in zip(order.workers, heard, strict=True))

    def _push(self, order: LaunchOrder, worker: Worker, parcel: Payload, start: bool) -> Ran:
        """Send the run's folder; worker 0 then asks for the commit; without one to ask for, each starts at once."""
        command = script.launch_command(
            order,
            worker.number,
            push=True,
            start=start,
            resolve=not start and worker == order.workers[0],
            bundle=parcel.bundle,
        )
        has_bundle = parcel.bundle and self._bundles.get(worker) == parcel.bundle
        ran = self._send(worker, command, parcel.light if has_bundle else parcel.full)
        if ran.exit_status == EXIT_BUNDLE_MISSING and has_bundle:
            ran = self._send(worker, command, parcel.full)
        if parcel.bundle and not ran.exit_status:
            with self._lock:
                self._bundles[worker] = parcel.bundle
        return ran

    def _send(self, worker: Worker, command: str, content: bytes) -> Ran:
        transfer = timedelta(seconds=script.RESOLVE_SECONDS + len(content) / SLOWEST_BYTES_PER_SECOND)
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

    def forget(self, key: NodeKey) -> None:
        with self._lock:
            for worker in [worker for worker in self._bundles if worker.key == key]:
                self._bundles.pop(worker)


def parcel_of(order: LaunchOrder, secrets: Mapping[str, str], private: Private = EVERYWHERE_PRIVATE) -> Payload:
    packed = bundle.pack(order.job.workdir, private) if order.job.workdir else None
    name = packed.name if packed else ""
    files = [(file.path, file.content, file.mode) for file in script.run_files(order, secrets, name)]
    light = bundle.stream(files)
    full = bundle.stream([*files, (packed.name, packed.content, 0o600)]) if packed else light
    return Payload(light, full, name)


def _started(worker: Worker, answer: Ran | Exception) -> Exception | None:
    return answer if isinstance(answer, Exception) else answers.read_start(answer, name_of(worker))


def _commit_of(pushed: Sequence[Ran | Exception], secrets: Mapping[str, str]) -> tuple[str, str]:
    """The commit that worker 0 was told, or why there is none; exactly one of the two is set when it answered."""
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
    """The first worker's error that forbids a start: not reached, or the push did not arrive whole."""
    for worker, answer in zip(workers, pushed, strict=True):
        if isinstance(answer, Exception):
            return answer
        if answer.exit_status not in (0, EXIT_UNRESOLVED):
            return answers.failed(answer, f"{name_of(worker)}: the push failed")
    return None


def _not_started(answer: Ran | Exception, problem: Exception) -> Exception:
    if isinstance(answer, Exception):
        return answer
    return CommandFailed(f"not started, since the gang is not whole: {problem}", 75)


def name_of(worker: Worker) -> str:
    """As errors call it."""
    return f"{worker.key.name} worker {worker.number}"
