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
import os
import pickle
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from tpucare.api import pipes
from tpucare.api.attempt import Attempt, Host
from tpucare.api.helper import Facts, in_helper, pickled
from tpucare.api.threads import StartFn, Target
from tpucare.model.errors import TpuCareError

LEAVE_SECONDS = 3.0
REAP_SECONDS = 10.0


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
            in_helper(its, self._start_fn, libc, parent)
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
        facts = Facts(attempt.slot, attempt.token, attempt.number, attempt.workers)
        task = pickled((facts, ctx, worker))
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
            self.set_exception(_ended_by(self._status))
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


def _ended_by(status: int) -> ChildEnded:
    if status >= 0:
        return ChildEnded(f"the process of start_fn ended by exit status {status}", status)
    # Most real-time signals have a number and no name.
    names = {int(each): each.name for each in signal.Signals}
    return ChildEnded(f"the process of start_fn ended by signal {names.get(-status, -status)}", 128 - status)
