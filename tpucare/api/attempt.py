"""
One launch of a slot's `start_fn` on one node, and its only access to that node.

Threads of users cannot be ended, and a node can vanish at any instant. So every call goes through the `Attempt`: once
it is over, calls in flight and later ones raise `NodeGone`, and a late thread can never act on the next node, even
where that has the same address. Every command has the marks of the run in its environment, by which its processes are
found again. `callback_launcher` decides when an attempt ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from tpucare.model.errors import ConfigError, NodeGone, RemoteError, WorkerSilent
from tpucare.model.ports import Remote
from tpucare.model.resources import Ran, Worker
from tpucare.model.text import worker_range

T = TypeVar("T")

# A call without a deadline may be the training itself.
NO_DEADLINE = timedelta(days=3650)
OUTPUT_LIMIT = 1 << 20
# One connection carries eight commands at once, and heartbeat and stop need theirs.
CALLS_PER_WORKER = 5

# A command that was sent before its run was stopped must not start after it (`templates/worker/stop.py`).
GUARD = 'if [ -e "$HOME/.tpucare/$TPUCARE_RUN/stopped" ]; then echo "this run was stopped" >&2; exit 75; fi'

# After a broken connection: until the worker answers again, or the engine gives the node up (30 minutes at most).
ANSWER_EVERY_SECONDS = 2.0
ANSWER_DEADLINE = timedelta(seconds=10)
ANSWER_TRIES = 1800


class _PendingCall(NamedTuple):
    worker: int
    since: float


class Attempt:
    """
    A slot's node as one launch of its `start_fn` may use it. Thread-safe.

    number: the attempt that users see    token: of the run, `<node>.<n>`    workers: index = worker number
    """

    def __init__(
        self,
        remote: Remote,
        *,
        slot: str,
        token: str,
        number: int,
        workers: tuple[Worker, ...],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        key = workers[0].key
        self.slot, self.token, self.number, self.workers = slot, token, number, workers
        self.project, self.zone, self.node = key.project, key.zone, key.name
        self._remote, self._monotonic = remote, monotonic
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._why = ""
        self._calls: dict[Future[Any], _PendingCall] = {}
        self._places = [threading.Semaphore(CALLS_PER_WORKER) for _ in workers]

    def __repr__(self) -> str:
        return f"<Attempt {self.token}{' (over)' if self.over else ''}>"

    # --- calls of users ---

    def run(
        self,
        worker: int,
        command: str,
        *,
        stdin: bytes = b"",
        deadline: timedelta | None = None,
        limit: int = OUTPUT_LIMIT,
    ) -> Ran:
        """
        Run *command* with bash on that worker and wait for its end; for ever, without a *deadline*.

        `limit` is in bytes per stream; what comes after it is dropped.
        Raises: NodeGone: this attempt is over, or ended meanwhile. WorkerSilent: the connection broke, and the worker
        answers again: nothing is known about the command. ConfigError: there is no such worker.
        """
        text, patience = self._marked(worker, command), deadline or NO_DEADLINE
        return self._call(
            worker, lambda target: self._remote.run(target, text, stdin=stdin, deadline=patience, limit=limit)
        )

    def put(self, worker: int, path: str, content: bytes, mode: int) -> None:
        """Write a file of *mode*, below the login user's home. Raises: as `run`; CommandFailed: a missing folder."""
        self._call(worker, lambda target: self._remote.put(target, path, content, mode))

    def environment(self, worker: int) -> dict[str, str]:
        """The environment of every command on that worker; its processes are found by it."""
        return {
            "TPUCARE_RUN": self.token,
            "TPUCARE_SLOT": self.slot,
            "TPUCARE_NODE": self.node,
            "TPUCARE_ATTEMPT": str(self.number),
            "TPUCARE_WORKER": str(worker),
            "TPUCARE_WORKERS": str(len(self.workers)),
        }

    # --- its end ---

    def end(self, why: str) -> None:
        """From now on every call raises NodeGone, calls in flight included."""
        with self._lock:
            if self._ended.is_set():
                return
            self._why = why
            self._ended.set()
            for call in self._calls:
                call.set_exception(self._gone())
            self._calls.clear()

    @property
    def over(self) -> bool:
        return self._ended.is_set()

    @property
    def why(self) -> str:
        """Why it is over; empty while it is not."""
        return self._why

    def calls_in_flight(self, worker: int) -> int:
        """The number of calls to that worker that have not returned."""
        with self._lock:
            return sum(call.worker == worker for call in self._calls.values())

    def longest_call(self) -> timedelta:
        """The age of the oldest call that has not returned; zero without one."""
        with self._lock:
            since = min((call.since for call in self._calls.values()), default=None)
        return timedelta(seconds=self._monotonic() - since) if since is not None else timedelta()

    # --- inside ---

    def _gone(self) -> NodeGone:
        return NodeGone(f"{self.node} (attempt {self.number} of {self.slot}): {self._why}")

    def _worker(self, number: int) -> Worker:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.workers):
            raise ConfigError(f"{self.slot} has no worker {number!r}: {worker_range(len(self.workers))}")
        return self.workers[number]

    def _marked(self, worker: int, command: str) -> str:
        # Bash itself has the marks from its first instruction on, so a stop always finds it.
        self._worker(worker)
        text = f"{GUARD}\n{command}"
        return f"{marks(self.environment(worker))} exec bash -c {shlex.quote(text)}"

    def _call(self, worker: int, effect: Callable[[Worker], T]) -> T:
        """Call *effect* on a thread of its own, since a node that is gone may not answer for long."""
        target = self._worker(worker)
        call = self._begin(worker)
        try:
            name = f"tpucare-call-{self.token}-w{worker}"
            threading.Thread(target=self._work, args=(call, target, effect), name=name, daemon=True).start()
            return call.result()  # type: ignore[no-any-return]
        finally:
            with self._lock:
                self._calls.pop(call, None)

    def _begin(self, worker: int) -> Future[Any]:
        call: Future[Any] = Future()
        with self._lock:
            if self._ended.is_set():
                raise self._gone()
            self._calls[call] = _PendingCall(worker, self._monotonic())
        return call

    def _work(self, call: Future[Any], target: Worker, effect: Callable[[Worker], Any]) -> None:
        result: object = None
        error: Exception | None = None
        with self._places[target.number]:
            try:
                if not self.over:
                    result = effect(target)
            except WorkerSilent as silence:
                self._await_answer(target)
                error = silence
            except Exception as trouble:
                error = trouble
        with self._lock:
            if call not in self._calls:
                return
            del self._calls[call]
            call.set_exception(error) if error is not None else call.set_result(result)

    def _await_answer(self, target: Worker) -> None:
        """
        Wait until the worker answers again: a connection breaks before the cloud says that the node is gone.

        Without this a preemption would reach users as a broken connection, and count as a failure of their function.
        """
        tries = 0
        while not self.over and tries < ANSWER_TRIES:
            tries += 1
            try:
                self._remote.run(target, "true", deadline=ANSWER_DEADLINE)
                return
            except RemoteError:
                # A changed host key may be that of another node at the same address, so it is no answer either.
                self._ended.wait(ANSWER_EVERY_SECONDS)


def marks(environment: Mapping[str, str]) -> str:
    """Assignments before a command, quoted for the shell."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())


# --- the attempt of a thread -----------------------------------------------------------------------------------------

_bound: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("tpucare_attempt", default=None)


@contextlib.contextmanager
def bind(attempt: Attempt) -> Iterator[None]:
    """Within it, calls of this thread about the slot of *attempt* belong to *attempt*."""
    known = _bound.set(attempt)
    try:
        yield
    finally:
        _bound.reset(known)


class Host(str):
    """
    The name of the slot that callbacks get, bound to one attempt. Pickled, or written as JSON, it is plain text.

    A copy made under `bind` is bound to the attempt of the thread: contexts outlive nodes.
    """

    __slots__ = ("attempt",)
    attempt: Attempt

    def __new__(cls, attempt: Attempt) -> Host:
        host = super().__new__(cls, attempt.slot)
        host.attempt = attempt
        return host

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __copy__(self) -> Host:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Host:
        here = _bound.get()
        return Host(here) if here is not None and here.slot == self else self


def attempt_of(host: str) -> Attempt | None:
    """
    The attempt of a call about *host*: that of the calling thread, else that of the Host; None: there is none.

    The thread comes first: a context may hold the Host of an earlier node, and a thread never acts for a later attempt
    than its own. `host` is the name of the slot, or of the node of the attempt.
    """
    here = _bound.get()
    if here is not None and host in (here.slot, here.node):
        return here
    return host.attempt if isinstance(host, Host) else None
