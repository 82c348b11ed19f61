"""
`start_method="process"`: each call of `start_fn` in a process of its own, ended with SIGINT, as in 2022.

Who forks must have one thread only, and a caretaker has many. So a helper is forked before the first of them; it waits
for tasks and forks a child for each, which therefore knows the callbacks without anybody pickling them; only the
context is pickled. A child reaches its node through the caretaker: each of its calls goes there over a socket and is
made by its attempt, so that a late child can no more act on the next node than a late thread can.

Nothing outlives the caretaker: the kernel ends the helper when its parent's thread ends, and the children with it.
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
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, cast

from tpucare import pipes
from tpucare.attempts import Attempt, Host, bind
from tpucare.errors import ConfigError, NodeGone, TpuCareError
from tpucare.model import Ran, Worker
from tpucare.starters import StartFn, Target, check_call

if TYPE_CHECKING:
    from tpucare.ports import Remote

PR_SET_PDEATHSIG = 1
# A child may be in the middle of saving something; one that swallows every SIGINT is killed after this.
SIGINT_EVERY_SECONDS = 1.0
KILL_AFTER_SECONDS = 60.0
LEAVE_SECONDS = 3.0
LOOK_EVERY_SECONDS = 0.2
REAP_SECONDS = 10.0
KILLED = "killed after it ignored SIGINT"


class ChildEnded(TpuCareError):
    """The process of a call ended without a word: killed, or by os._exit. `exit_status` as a shell has it."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


# --- in the caretaker ------------------------------------------------------------------------------------------------


class ProcessStarter:
    """starters.Starter. A context manager: the helper lives as long as it."""

    def __init__(self, start_fn: StartFn) -> None:
        self._start_fn = start_fn
        self._lock = threading.Lock()
        self._handles: dict[int, ProcessHandle] = {}
        self._next = 0
        self._closing = False

    def __enter__(self) -> ProcessStarter:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        libc = ctypes.CDLL(None, use_errno=True)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._helper = os.fork()
        if not self._helper:
            mine.close()
            _in_helper(its, self._start_fn, libc, parent)
        its.close()
        self._control = mine
        threading.Thread(target=self._listen, name="tpucare-helper", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """SIGINT for every child, a moment for each to end, and then nothing of them is left."""
        with self._lock:
            self._closing = True
            handles = list(self._handles.values())
        for handle in handles:
            handle.cancel()
        until = time.monotonic() + LEAVE_SECONDS
        for handle in handles:
            with contextlib.suppress(TimeoutError):
                handle.exception(max(0.0, until - time.monotonic()))
        # The helper kills what is left when its socket closes.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        os.waitpid(self._helper, 0)
        self._control.close()

    def start(self, attempt: Attempt, host: Host, ctx: object, worker: Target) -> ProcessHandle:  # noqa: ARG002
        """Raises: ConfigError: the context cannot be pickled. ChildEnded: there is no helper any more."""
        task = _pickled((_facts(attempt), ctx, worker), attempt.slot)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock:
            number, self._next = self._next, self._next + 1
            handle = self._handles[number] = ProcessHandle(self, number, attempt, mine)
        try:
            self._order("start", number, its.fileno())
        except OSError as error:
            self._forget(number)
            mine.close()
            raise ChildEnded("the helper that starts processes is gone: start the script again") from error
        finally:
            its.close()
        handle.serve(task)
        return handle

    def stop(self, number: int) -> None:
        """SIGINT until it ends. Never blocks for long; a helper that is gone has no children."""
        with contextlib.suppress(OSError):
            self._order("stop", number)

    def _order(self, what: str, number: int, descriptor: int | None = None) -> None:
        with self._lock:
            pipes.send(self._control, f"{what} {number}".encode(), descriptor)

    def _listen(self) -> None:
        """The helper tells the end of every child."""
        while (heard := pipes.receive(self._control)) is not None:
            number, status = map(int, heard[0].split())
            if (handle := self._forget(number)) is not None:
                handle.exited(status)
        with self._lock:
            left, self._handles = list(self._handles.values()), {}
        for handle in left:
            handle.exited(-signal.SIGKILL)

    def _forget(self, number: int) -> ProcessHandle | None:
        with self._lock:
            return self._handles.pop(number, None)


class ProcessHandle(Future[Any]):
    """starters.Handle of one child: serves its calls, and ends when the process did."""

    def __init__(self, starter: ProcessStarter, number: int, attempt: Attempt, channel: socket.socket) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._starter, self._number, self._attempt, self._channel = starter, number, attempt, channel
        self._end: bytes | None = None
        self._status, self._exited = 0, threading.Event()
        self._pid = 0

    def cancel(self) -> bool:
        """SIGINT, again and again until it ends."""
        if not self.done():
            self._starter.stop(self._number)
        return False

    def where(self) -> str:
        return f"process {self._pid}" if self._pid and not self.done() else ""

    def serve(self, task: bytes) -> None:
        name = f"tpucare-child-{self._attempt.token}-{self._number}"
        threading.Thread(target=self._serve, args=(task,), name=name, daemon=True).start()

    def exited(self, status: int) -> None:
        """What it said is still read; somebody who was forked by it may hold the other end, and says nothing."""
        self._status = status
        self._exited.set()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RD)

    def _serve(self, task: bytes) -> None:
        with contextlib.suppress(OSError):
            pipes.send(self._channel, task)
        while (heard := pipes.receive(self._channel)) is not None:
            content, descriptor = heard
            if descriptor is not None:
                call = socket.socket(fileno=descriptor)
                threading.Thread(target=self._answer, args=(call,), name="tpucare-child-call", daemon=True).start()
            elif content.startswith(b"pid "):
                self._pid = int(content[4:])
            else:
                self._end = content
        self._channel.close()
        self._tell()

    def _tell(self) -> None:
        if self._end is None:
            # Its end of the socket closes before the helper has reaped it.
            self._exited.wait(REAP_SECONDS)
            code = -self._status if self._status < 0 else self._status
            how = f"signal {signal.Signals(code).name}" if self._status < 0 else f"exit status {code}"
            self.set_exception(
                ChildEnded(f"the process of start_fn ended by {how}", 128 + code if self._status < 0 else code)
            )
        elif self._end:
            self.set_exception(pipes.unpack_error(self._end))
        else:
            self.set_result(None)

    def _answer(self, call: socket.socket) -> None:
        """One call of the child, made by its attempt: a NodeGone of that reaches the child as its own."""
        with call:
            asked = pipes.receive(call)
            if asked is None:
                return
            method, worker, values = pickle.loads(asked[0])
            try:
                answer = b"+" + pickle.dumps(getattr(self._attempt, method)(worker, **values))
            except Exception as error:
                answer = b"-" + pipes.pack_error(error)
            with contextlib.suppress(OSError):
                pipes.send(call, answer)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a child has to know of its attempt."""

    slot: str
    token: str
    number: int
    workers: tuple[Worker, ...]


def _facts(attempt: Attempt) -> _Facts:
    return _Facts(attempt.slot, attempt.token, attempt.number, attempt.workers)


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


def _pickled(task: tuple[_Facts, object, Target], slot: str) -> bytes:
    facts, ctx, worker = task
    try:
        content = io.BytesIO()
        _Pickler(content).dump(ctx)
        return pickle.dumps((facts, content.getvalue(), worker))
    except Exception as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"the context of {slot} cannot be pickled for start_method='process': {why}") from error


# --- in the helper ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Child:
    pid: int
    stop_since: float | None = None
    next_signal: float = 0.0


def _in_helper(control: socket.socket, start_fn: StartFn, libc: ctypes.CDLL, parent: int) -> NoReturn:
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
    status = 0
    end = b""
    try:
        _die_with_parent(libc, helper)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pipes.send(channel, f"pid {os.getpid()}".encode())
        heard = pipes.receive(channel)
        if heard is not None:
            _call(pickle.loads(heard[0]), channel, start_fn)
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
        os._exit(status)


def _status_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    return 1


def _call(task: tuple[_Facts, bytes, Target], channel: socket.socket, start_fn: StartFn) -> None:
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
