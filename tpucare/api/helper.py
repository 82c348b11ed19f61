"""
The forked side of `children`: a helper of one thread that forks a child for each task, and what a child does.

A child's attempt is a real one, over a remote whose every call is made by the caretaker. Both are ended by the kernel
when whoever forked them ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, cast

from tpucare.api import pipes
from tpucare.api.attempt import Attempt, Host, bind
from tpucare.api.threads import StartFn, Target, check_call
from tpucare.model.errors import ConfigError, NodeGone
from tpucare.model.resources import Ran, Worker

if TYPE_CHECKING:
    from tpucare.model.ports import Remote

PR_SET_PDEATHSIG = 1
# A child may be in the middle of saving something; one that swallows every SIGINT is killed after this.
SIGINT_EVERY_SECONDS = 1.0
KILL_AFTER_SECONDS = 60.0
LOOK_EVERY_SECONDS = 0.2

# --- a task ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """What a child has to know of its attempt."""

    slot: str
    token: str
    number: int
    workers: tuple[Worker, ...]


class _Pickler(pickle.Pickler):
    """A Host stays one on the other side, bound to the child's own attempt."""

    def persistent_id(self, value: Any) -> str | None:
        return str(value) if isinstance(value, Host) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, attempt_of: Callable[[], Attempt]) -> None:
        super().__init__(io.BytesIO(content))
        self._attempt_of = attempt_of

    def persistent_load(self, name: str) -> Any:
        attempt = self._attempt_of()
        return Host(attempt) if name == attempt.slot else name


def pickled(task: tuple[Facts, object, Target]) -> bytes:
    """Raises: ConfigError: the context cannot be pickled."""
    facts, ctx, worker = task
    try:
        content = io.BytesIO()
        _Pickler(content).dump(ctx)
        return pickle.dumps((facts, content.getvalue(), worker))
    except Exception as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"the context of {facts.slot} cannot be pickled for start_method='process': {why}") from error


# --- in the helper ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Child:
    pid: int
    stop_since: float | None = None
    next_signal: float = 0.0


def in_helper(control: socket.socket, start_fn: StartFn, libc: ctypes.CDLL, parent: int) -> NoReturn:
    """One thread, which forks, signals and reaps until the caretaker's end of the socket closes."""
    status = 1
    try:
        _die_with_parent(libc, parent)
        # Ctrl-C in a terminal is for the caretaker alone, which then ends the children in its own way.
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        _Helper(control, start_fn, libc).run()
        status = 0
    finally:
        os._exit(status)


class _Helper:
    def __init__(self, control: socket.socket, start_fn: StartFn, libc: ctypes.CDLL) -> None:
        self._control, self._start_fn, self._libc = control, start_fn, libc
        self._children: dict[int, _Child] = {}

    def run(self) -> None:
        try:
            while self._turn():
                self._reap()
                self._signal()
        finally:
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            for child in self._children.values():
                os.waitpid(child.pid, 0)

    def _turn(self) -> bool:
        ready, _, _ = select.select([self._control], [], [], LOOK_EVERY_SECONDS if self._children else None)
        if not ready:
            return True
        heard = pipes.receive(self._control)
        if heard is None:
            return False
        what, number = heard[0].decode().split()
        if what == "start" and heard[1] is not None:
            self._start(int(number), heard[1])
        elif what == "stop" and (child := self._children.get(int(number))) is not None and child.stop_since is None:
            child.stop_since = time.monotonic()
        return True

    def _start(self, number: int, descriptor: int) -> None:
        helper = os.getpid()
        pid = os.fork()
        if not pid:
            self._control.close()
            _in_child(socket.socket(fileno=descriptor), self._start_fn, self._libc, helper)
        os.close(descriptor)
        self._children[number] = _Child(pid)

    def _reap(self) -> None:
        for number, child in list(self._children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                del self._children[number]
                pipes.send(self._control, f"{number} {os.waitstatus_to_exitcode(status)}".encode())

    def _signal(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.stop_since is None or now < child.next_signal:
                continue
            child.next_signal = now + SIGINT_EVERY_SECONDS
            late = now - child.stop_since > KILL_AFTER_SECONDS
            os.kill(child.pid, signal.SIGKILL if late else signal.SIGINT)


def _die_with_parent(libc: ctypes.CDLL, parent: int) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# --- in a child ------------------------------------------------------------------------------------------------------


def _in_child(channel: socket.socket, start_fn: StartFn, libc: ctypes.CDLL, helper: int) -> NoReturn:
    """As `multiprocessing` does: what the caretaker registered to run at exit is not this process's to run."""
    # Told when a second SIGINT comes before it is ignored: neither then is the call one that returned, nor does any way
    # lead back into what the helper was doing when it forked.
    status, end = 1, pipes.pack_error(KeyboardInterrupt())
    try:
        try:
            _die_with_parent(libc, helper)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            pipes.send(channel, f"pid {os.getpid()}".encode())
            heard = pipes.receive(channel)
            if heard is not None:
                _call(pickle.loads(heard[0]), channel, start_fn)
            status, end = 0, b""
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            status, end = _status_of(error), pipes.pack_error(error)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            with contextlib.suppress(OSError):
                pipes.send(channel, end)
    finally:
        os._exit(status)


def _status_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    return 1


def _call(task: tuple[Facts, bytes, Target], channel: socket.socket, start_fn: StartFn) -> None:
    facts, content, worker = task
    remote = cast("Remote", _CaretakersRemote(channel))
    attempt = Attempt(remote, slot=facts.slot, token=facts.token, number=facts.number, workers=facts.workers)
    ctx = _Unpickler(content, lambda: attempt).load()
    with bind(attempt):
        check_call(start_fn, "start_fn", "(ctx, worker)", ctx, worker)
        start_fn(ctx, worker)


class _CaretakersRemote:
    """As much of ports.Remote as an attempt uses: each call is made by the caretaker, over a socket of its own."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def run(
        self, worker: Worker, command: str, *, stdin: bytes = b"", deadline: timedelta, limit: int = 1 << 20
    ) -> Ran:
        ran: Ran = self._ask("run", worker, command=command, stdin=stdin, deadline=deadline, limit=limit)
        return ran

    def put(self, worker: Worker, path: str, content: bytes, mode: int) -> None:
        self._ask("put", worker, path=path, content=content, mode=mode)

    def _ask(self, method: str, worker: Worker, **values: object) -> Any:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with mine:
            try:
                with its, self._lock:
                    pipes.send(self._channel, b"call", its.fileno())
                pipes.send(mine, pickle.dumps((method, worker.number, values)))
            except OSError as error:
                raise _orphaned(worker) from error
            heard = pipes.receive(mine)
        if heard is None:
            raise _orphaned(worker)
        answer = heard[0]
        if answer[:1] == b"+":
            return pickle.loads(answer[1:])
        raise pipes.unpack_error(answer[1:])


def _orphaned(worker: Worker) -> NodeGone:
    return NodeGone(f"{worker.key.name}: the process that cares for it is gone")
