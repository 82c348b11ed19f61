"""
`start_method="process"`: each call of `start_fn` runs in its own process, which SIGINT ends, as in 2022.

A helper process is forked before this process starts a thread; it forks one child for each call. So scripts without a
`__main__` guard, scripts on standard input, notebooks, closures and lambdas work, which the start methods `spawn` and
`forkserver` of `multiprocessing` import and pickle; only the context is pickled here. A child reaches its node through
this process: `Attempt` makes each of its calls here, so a late child cannot act on the next node.

Two sockets connect the three. `orders` carries what the helper starts and stops, and the exit status of each child.
`calls` is inherited by every child; a child sends one end of a new connection over it for each call, so that threads
and processes of the child's own can call at the same time. The kernel kills the helper when the thread that forked it
ends, and the children when the helper ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from tpucare.api.attempt import Attempt, Host, bind
from tpucare.api.threads import StartFn, Target, check_call
from tpucare.model.errors import ConfigError, NodeGone, TpuCareError
from tpucare.model.resources import Ran, Worker

if TYPE_CHECKING:
    from tpucare.model.ports import Remote

PR_SET_PDEATHSIG = 1
CLOSE_SECONDS = 3.0
# A child may be in the middle of saving something; one that ignores every SIGINT is killed after this.
SIGINT_EVERY_SECONDS = 1.0
KILL_AFTER_SECONDS = 60.0
REAP_EVERY_SECONDS = 0.2

_fork = multiprocessing.get_context("fork")


class ChildEnded(TpuCareError):
    """The process of a call was killed, or called os._exit. `exit_status` as a shell reports it."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class RemoteTraceback(Exception):
    """The traceback of an exception that another process raised; it is set as the cause of that exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Task(NamedTuple):
    """One call of `start_fn`; `context` is pickled for itself, since Hosts in it need the child's Attempt."""

    slot: str
    token: str
    number: int
    workers: tuple[Worker, ...]
    context: bytes
    worker: Target


# --- in this process -------------------------------------------------------------------------------------------------


class ProcessStarter:
    """threads.Starter. A context manager: the helper lives as long as it."""

    def __init__(self, start_fn: StartFn) -> None:
        self._start_fn = start_fn
        self._lock = threading.Lock()
        self._handles: dict[int, ProcessHandle] = {}
        self._next = 0

    def __enter__(self) -> ProcessStarter:
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                "start_method='process' needs child processes, which a daemonic process of multiprocessing may not "
                "have: call from a process with daemon=False, or use start_method='thread'"
            )
        self._orders, orders = Pipe()
        self._calls, calls = socket.socketpair()
        arguments = (orders, calls, self._start_fn, os.getpid(), (self._orders, self._calls))
        self.helper = _fork.Process(target=_run_helper, args=arguments, name="tpucare-helper")
        self.helper.start()
        orders.close()
        calls.close()
        threading.Thread(target=self._listen, name="tpucare-helper", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send SIGINT to every child, give them a moment to end, and kill the rest."""
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            handle.cancel()
        until = time.monotonic() + CLOSE_SECONDS
        for handle in handles:
            with contextlib.suppress(TimeoutError):
                handle.exception(max(0.0, until - time.monotonic()))
        self.order("end")
        self.helper.join()

    def start(self, attempt: Attempt, host: Host, ctx: object, worker: Target) -> ProcessHandle:  # noqa: ARG002
        """Raises: ConfigError: the context cannot be pickled. ChildEnded: the helper has ended."""
        task = _Task(attempt.slot, attempt.token, attempt.number, attempt.workers, _pickled(attempt.slot, ctx), worker)
        with self._lock:
            number, self._next = self._next, self._next + 1
            handle = self._handles[number] = ProcessHandle(self, number, attempt, task)
        if not self.order("start", number):
            self._handles.pop(number, None)
            raise ChildEnded("the helper that starts processes has ended: start the script again")
        return handle

    def order(self, verb: str, number: int = 0) -> bool:
        """False: the helper has ended, and its children with it."""
        try:
            with self._lock:
                self._orders.send((verb, number))
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        """Serve the children's calls, and note their exits, until the helper ends."""
        with self._calls, self._orders:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    ready = wait([self._calls, self._orders])
                    if self._calls in ready and (received := socket.recv_fds(self._calls, 1, 1)[1]):
                        call = (Connection(received[0]),)
                        threading.Thread(target=self._answer, args=call, name="tpucare-child-call", daemon=True).start()
                    elif self._orders in ready:
                        number, status = self._orders.recv()
                        self._handles.pop(number).exited(status)
            with self._lock:
                left, self._handles = self._handles, {}
        for handle in left.values():
            handle.exited(-signal.SIGKILL)

    def _answer(self, call: Connection) -> None:
        with call, contextlib.suppress(EOFError, OSError):
            number, method, *values = call.recv()
            handle = self._handles.get(number)
            if handle is None:
                return
            try:
                answer, failure = getattr(handle, f"call_{method}")(*values), b""
            except Exception as error:
                answer, failure = None, pack_error(error)
            call.send((failure, answer))


class ProcessHandle(Future[Any]):
    """threads.Handle of one child. It is done when the process has ended."""

    def __init__(self, starter: ProcessStarter, number: int, attempt: Attempt, task: _Task) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._starter, self._number, self._attempt, self._task = starter, number, attempt, task
        self._end: bytes | None = None
        self._pid = 0

    def cancel(self) -> bool:
        """Send SIGINT until the process ends."""
        if not self.done():
            self._starter.order("stop", self._number)
        return False

    def where(self) -> str:
        return f"process {self._pid}" if self._pid and not self.done() else ""

    def exited(self, status: int) -> None:
        if self._end is None:
            self.set_exception(_ended_by(status))
        elif self._end:
            self.set_exception(unpack_error(self._end))
        else:
            self.set_result(None)

    # --- what the child calls; what the Attempt raises, such as NodeGone, the child raises too ---

    def call_begin(self, pid: int) -> _Task:
        self._pid = pid
        return self._task

    def call_run(self, worker: int, command: str, values: dict[str, Any]) -> Ran:
        return self._attempt.run(worker, command, **values)

    def call_put(self, worker: int, path: str, content: bytes, mode: int) -> None:
        self._attempt.put(worker, path, content, mode)

    def call_end(self, error: bytes) -> None:
        """error: packed; empty when `start_fn` returned."""
        self._end = error


def _ended_by(status: int) -> ChildEnded:
    if status >= 0:
        return ChildEnded(f"the process of start_fn ended by exit status {status}", status)
    # Most real-time signals have a number and no name.
    names = {int(each): each.name for each in signal.Signals}
    return ChildEnded(f"the process of start_fn ended by signal {names.get(-status, -status)}", 128 - status)


# --- in the helper: one thread, which forks, signals and reaps -------------------------------------------------------


class _Child:
    def __init__(self, process: ForkProcess) -> None:
        self.process = process
        self.stop_since: float | None = None
        self.next_signal = 0.0

    def signal(self, now: float) -> None:
        if self.stop_since is None or now < self.next_signal:
            return
        self.next_signal = now + SIGINT_EVERY_SECONDS
        is_late = now - self.stop_since > KILL_AFTER_SECONDS
        os.kill(self.process.pid or 0, signal.SIGKILL if is_late else signal.SIGINT)


def _run_helper(
    orders: Connection, calls: socket.socket, start_fn: StartFn, parent: int, parents: tuple[Connection, socket.socket]
) -> None:
    """Until it is ordered to end, or the parent closes its end of `orders`; no child is left then."""
    _end_with(parent)
    for end in parents:
        end.close()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Ctrl-C in a terminal is for the parent alone, which then ends the children in its own way.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    children: dict[int, _Child] = {}
    verb = ""
    with contextlib.suppress(EOFError, OSError):
        while verb != "end":
            # A child's own children may hold its sentinel open, so a pause ends the wait too.
            sentinels = [child.process.sentinel for child in children.values()]
            if orders in wait([orders, *sentinels], REAP_EVERY_SECONDS if children else None):
                verb, number = orders.recv()
                if verb == "start":
                    arguments = (orders, calls, number, start_fn, os.getpid())
                    children[number] = _Child(_fork.Process(target=_run_child, args=arguments))
                    children[number].process.start()
                elif verb == "stop" and number in children and children[number].stop_since is None:
                    children[number].stop_since = time.monotonic()
            for number, child in list(children.items()):
                if (status := child.process.exitcode) is not None:
                    del children[number]
                    orders.send((number, status))
                else:
                    child.signal(time.monotonic())
    for child in children.values():
        child.process.kill()


def _end_with(parent: int) -> None:
    """The kernel kills this process when *parent* ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# --- in a child ------------------------------------------------------------------------------------------------------


def _run_child(orders: Connection, calls: socket.socket, number: int, start_fn: StartFn, helper: int) -> NoReturn:
    # A second SIGINT may come before it is ignored below; the call has not returned then either.
    end = pack_error(KeyboardInterrupt())
    parent = _Parent(calls, number)
    try:
        try:
            _end_with(helper)
            orders.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _call(start_fn, parent)
            end = b""
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            end = pack_error(error)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            with contextlib.suppress(NodeGone):
                parent.call("end", end)
    finally:
        # Threads that the user's function left are not waited for.
        os._exit(bool(end))


def _call(start_fn: StartFn, parent: _Parent) -> None:
    task: _Task = parent.call("begin", os.getpid())
    parent.node = task.workers[0].key.name
    remote = cast("Remote", parent)
    attempt = Attempt(remote, slot=task.slot, token=task.token, number=task.number, workers=task.workers)
    ctx = _Unpickler(task.context, attempt).load()
    with bind(attempt):
        check_call(start_fn, "start_fn", "(ctx, worker)", ctx, task.worker)
        start_fn(ctx, task.worker)


class _Parent:
    """As much of ports.Remote as an Attempt uses; the parent's Attempt makes each call."""

    def __init__(self, calls: socket.socket, number: int) -> None:
        self._calls, self._number, self.node = calls, number, "a node"

    def run(self, worker: Worker, command: str, **values: object) -> Ran:
        ran: Ran = self.call("run", worker.number, command, values)
        return ran

    def put(self, worker: Worker, path: str, content: bytes, mode: int) -> None:
        self.call("put", worker.number, path, content, mode)

    def call(self, method: str, *values: object) -> Any:
        """Raises: NodeGone: the parent has ended, or serves this child no more; else what the call raised there."""
        mine, its = Pipe()
        try:
            with mine:
                with its:
                    # One byte and one descriptor: threads and processes may send at the same time.
                    socket.send_fds(self._calls, [b"."], [its.fileno()])
                mine.send((self._number, method, *values))
                failure, answer = mine.recv()
        except (EOFError, OSError) as lost:
            raise NodeGone(f"{self.node}: the process that cares for it has ended") from lost
        if failure:
            raise unpack_error(failure)
        return answer


# --- contexts and exceptions between the processes -------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """A Host stays a Host on the other side, bound to the child's own Attempt."""

    def persistent_id(self, value: Any) -> str | None:
        return str(value) if isinstance(value, Host) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, attempt: Attempt) -> None:
        super().__init__(io.BytesIO(content))
        self._attempt = attempt

    def persistent_load(self, name: str) -> str:
        return Host(self._attempt) if name == self._attempt.slot else name


def _pickled(slot: str, ctx: object) -> bytes:
    content = io.BytesIO()
    try:
        _Pickler(content).dump(ctx)
    except Exception as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"the context of {slot} cannot be pickled for start_method='process': {why}") from error
    return content.getvalue()


def pack_error(error: BaseException) -> bytes:
    """
    An exception that the other process can raise with its class, values and traceback.

    It is packed in parts, since many classes cannot be made again of their arguments alone; and as text beside them,
    since the other process may lack the class.
    """
    text = "".join(traceback.format_exception(error))
    line = " ".join("".join(traceback.format_exception_only(error)).split())
    try:
        parts = pickle.dumps((type(error), error.args, vars(error)))
        _made_of(parts)
    except Exception:
        parts = b""
    return pickle.dumps((line, text, parts))


def unpack_error(packed: bytes) -> BaseException:
    """Never fails: an exception that cannot be made again here becomes a RuntimeError with the same text."""
    line, text, parts = pickle.loads(packed)
    try:
        error = _made_of(parts)
    # Unpickling imports the module of the class, which may do anything, `sys.exit` included.
    except (Exception, SystemExit):
        error = RuntimeError(line)
    error.__cause__ = RemoteTraceback(text)
    return error


def _made_of(parts: bytes) -> BaseException:
    kind, arguments, fields = pickle.loads(parts)
    error: Any = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(fields)
    str(error)
    assert isinstance(error, BaseException)
    return error
