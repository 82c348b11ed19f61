"""
How a run comes to the workers of a node and starts there: what is pushed, to whom, and what each of them answers.

A launch is one command per worker, two when a branch has to be resolved first: while files go to all workers, worker 0
asks the repository, and all get the same commit. A branch that cannot be resolved is a run that fails in its fetch
phase: the next probe sees it, and it counts as a failed setup. What is pushed is made by `script` and `bundle`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from tpucare.adapters.runner import answers, bundle
from tpucare.adapters.runner import scripts as script
from tpucare.model.errors import CommandFailed, ConfigError
from tpucare.model.local_files import EVERYWHERE_PRIVATE, Private
from tpucare.model.ports import Remote
from tpucare.model.resources import NodeKey, Ran, Worker
from tpucare.model.runs import LaunchOrder, LaunchResult

LAUNCH_DEADLINE = timedelta(seconds=30)
SLOWEST_BYTES_PER_SECOND = 1 << 20

# Exit statuses of the launch script.
EXIT_UNRESOLVED = 69
EXIT_BUNDLE_MISSING = 75


@dataclass(frozen=True, slots=True)
class Parcel:
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

    def _push_and_start(self, order: LaunchOrder, parcel: Parcel) -> tuple[Exception | None, ...]:
        heard = self._remote.each(order.workers, lambda worker: self._push(order, worker, parcel, True))
        return tuple(_started(worker, answer) for worker, answer in zip(order.workers, heard, strict=True))

    def _start(self, order: LaunchOrder, commit: str, refusal: str) -> tuple[Exception | None, ...]:
        def start(worker: Worker) -> Ran:
            command = script.launch_command(order, worker.number, start=True, commit=commit, error=refusal)
            return self._remote.run(worker, command, deadline=LAUNCH_DEADLINE)

        heard = self._remote.each(order.workers, start)
        return tuple(_started(worker, answer) for worker, answer in zip(order.workers, heard, strict=True))

    def _push(self, order: LaunchOrder, worker: Worker, parcel: Parcel, start: bool) -> Ran:
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


def parcel_of(order: LaunchOrder, secrets: Mapping[str, str], private: Private = EVERYWHERE_PRIVATE) -> Parcel:
    packed = bundle.pack(order.job.workdir, private) if order.job.workdir else None
    name = packed.name if packed else ""
    files = [(file.path, file.content, file.mode) for file in script.run_files(order, secrets, name)]
    light = bundle.stream(files)
    full = bundle.stream([*files, (packed.name, packed.content, 0o600)]) if packed else light
    return Parcel(light, full, name)


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
