"""
The control socket of a running daemon: one JSON object per line in, one per line out, a unix socket of mode 0600.

    {"do": "pause", "target": "pod-0"}   ->   {"ok": true, "changed": ["pod-0"]}
    {"do": "puase"}                      ->   {"ok": false, "error": "no verb 'puase' ...", "kind": "config"}

Each connection has its own thread, but no command is executed there: it goes to the thread of the loop and waits for
its answer, so only that thread touches the engine. `commands` says which commands there are.
Standard library only, since every command of the CLI asks whether a daemon runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpucare.model import errors
from tpucare.model.errors import ConfigError, StoreError, TpuCareError

# A fleet file has at most 256 KB; escaped as JSON it may be six times as long.
LINE_LIMIT = 2 << 20
# Every command but `apply` is a few names.
SMALL_LINE_LIMIT = 64 << 10
# Parsed JSON takes many times its length, so few of the long lines are read at a time.
LONG_LINES = 2
LINE_SECONDS = 30.0
_APPLY = re.compile(rb'\s*\{\s*"do"\s*:\s*"apply"\s*,')
ANSWER_SECONDS = 30.0
IDLE_SECONDS = 60.0
CONNECTIONS_LIMIT = 32
LAST_ANSWERS_SECONDS = 1.0
# A process that is stopped for longer is told of, instead of being waited for like one that is busy.
SUSPENDED_SECONDS = 1.5
_LOOK_SECONDS = 0.25
_PART_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("3i")
# A unix socket's path has 108 bytes. Linux lets a longer one be reached through a descriptor of its folder.
PATH_LIMIT = 100

Command = Mapping[str, Any]
Answer = Mapping[str, Any]


class NoDaemon(TpuCareError):
    """No process listens at the control socket."""


class Refused(TpuCareError):
    """The daemon refused the command; the text is its answer, one line."""


class Suspended(Refused):
    """The process that listens is stopped (SIGSTOP, Ctrl-Z), and answers nothing until it continues."""


class Stopping(Refused):
    """The daemon is stopping, and did nothing for the command."""


def _kinds() -> Iterator[type[TpuCareError]]:
    yield Stopping
    for value in vars(errors).values():
        # An exit status does not cross the socket.
        if isinstance(value, type) and issubclass(value, TpuCareError) and not issubclass(value, errors.CommandFailed):
            yield value


# The name of an error on the socket -> its class on this side, so that the exit code is the same.
_KINDS = {kind.__name__: kind for kind in _kinds()}


@dataclass(frozen=True, slots=True)
class _PendingCommand:
    command: object
    answer: Future[Answer] = field(default_factory=Future)


class Control:
    """
    Serves the socket from `start` to `close`. `serve` executes the waiting commands, on the thread that calls it.

    nudge:    called, on any thread, when a command waits
    on_error: called, on the thread of `serve`, with an error that is no TpuCareError
    """

    def __init__(
        self,
        path: Path,
        nudge: Callable[[], None],
        answer_seconds: float = ANSWER_SECONDS,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.path = path
        self._nudge = nudge
        self._on_error = on_error
        self._answer_seconds = answer_seconds
        self._pending: queue.SimpleQueue[_PendingCommand] = queue.SimpleQueue()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """
        To be called by the holder of the store's lock alone: a socket at the path is left over from a dead process.

        Raises: ConfigError: the socket cannot be made.
        """
        try:
            self.path.unlink(missing_ok=True)
            with _reachable(self.path) as address:
                self._server = _Server(address, _Connection)
        except OSError as error:
            raise ConfigError(f"{self.path}: the control socket cannot be made: {error.strerror or error}") from error
        self._server.submit = self._submit
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="tpucare-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._server is None or self._thread is None:
            return
        server, self._server = self._server, None
        server.shutdown()
        server.server_close()
        self._thread.join()
        # The file system may have turned read-only; the next daemon replaces the dead socket.
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.serve(_refuse_stopping)
        # The last answers, such as the one to `stop`, should still arrive.
        with server.quiet:
            server.quiet.wait_for(lambda: not server.answering, LAST_ANSWERS_SECONDS)

    def serve(self, handle: Callable[[object], Answer]) -> int:
        """
        Execute every waiting command; returns how many.

        A command that fails is answered, passed to `on_error`, and ends nothing else. Raises: StoreError.
        """
        count = 0
        while True:
            try:
                pending = self._pending.get_nowait()
            except queue.Empty:
                return count
            # A client that gave up was told that nothing was done, so nothing may be done.
            if not pending.answer.set_running_or_notify_cancel():
                continue
            count += 1
            try:
                pending.answer.set_result(handle(pending.command))
            except StoreError as error:
                pending.answer.set_exception(error)
                raise
            except TpuCareError as error:
                pending.answer.set_exception(error)
            except Exception as error:
                pending.answer.set_exception(error)
                self._on_error(error)

    def _submit(self, command: object) -> Answer:
        pending = _PendingCommand(command)
        self._pending.put(pending)
        self._nudge()
        try:
            return {"ok": True, **pending.answer.result(self._answer_seconds)}
        except TimeoutError:
            if pending.answer.cancel():
                return _refusal("the daemon is busy and did nothing for this command; ask again", "busy")
            return _refusal("the daemon has begun and is not done; see `tpucare status`", "busy")
        except CancelledError:
            return _refusal("the daemon is stopping", Stopping.__name__)
        except TpuCareError as error:
            return _refusal(str(error), _kind(error))
        except Exception as error:
            return _refusal(f"the daemon failed: {type(error).__name__}: {error}", "internal")


def request(
    path: Path, command: Command, *, seconds: float = ANSWER_SECONDS + 5, suspended_seconds: float = SUSPENDED_SECONDS
) -> dict[str, Any]:
    """
    Send one command to the daemon that listens at *path*; returns its answer without `ok`.

    suspended_seconds: how long a process that is stopped is given to continue
    Raises: NoDaemon: no process listens there. Suspended. The error that the daemon met, of its own class if known,
    else Refused.
    """
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(seconds)
            with _reachable(path) as address:
                channel.connect(address)
            listener = _Listener(channel, suspended_seconds)
            while not listener.is_ready():
                time.sleep(_LOOK_SECONDS)
            # A connection that was refused at once has its answer waiting, and is closed on the other side.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                channel.sendall(json.dumps(command).encode() + b"\n")
            line = listener.read_line(seconds)
    except TimeoutError as error:
        raise Refused(f"the daemon at {path} does not answer within {seconds:.0f} s") from error
    except OSError as error:
        raise NoDaemon(f"no daemon listens at {path}: start one with `tpucare daemon`") from error
    try:
        answer = json.loads(line)
        ok = answer.pop("ok")
    except (ValueError, KeyError, AttributeError) as error:
        raise Refused(f"the daemon at {path} ended before it answered") from error
    if not ok:
        raise _error_of(answer)
    return dict(answer)


class _Listener:
    """The process at the other end of a connection; unlike one that is busy, a stopped one is not waited for."""

    def __init__(self, channel: socket.socket, suspended_seconds: float) -> None:
        self._channel, self._patience = channel, suspended_seconds
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._pid, _, _ = _CREDENTIALS.unpack(credentials)
        self._stopped_at: float | None = None

    def is_ready(self, after: str = "") -> bool:
        """False while it is stopped. Raises: Suspended: for too long; *after* ends the text."""
        if not is_stopped(self._pid):
            self._stopped_at = None
            return True
        now = time.monotonic()
        self._stopped_at = now if self._stopped_at is None else self._stopped_at
        if now - self._stopped_at >= self._patience:
            raise Suspended(suspension_of(self._pid) + after)
        return False

    def read_line(self, seconds: float) -> bytes:
        """Its answer, or what it sent before it ended. Raises: Suspended; TimeoutError: no whole line in *seconds*."""
        line, until = bytearray(), time.monotonic() + seconds
        self._channel.settimeout(_LOOK_SECONDS)
        while not line.endswith(b"\n"):
            try:
                part = self._channel.recv(_PART_BYTES)
            except TimeoutError:
                self.is_ready(", and then it may still execute this command")
                if time.monotonic() > until:
                    raise
                continue
            if not part:
                break
            line += part
        return bytes(line)


def suspension_of(pid: int) -> str:
    """The text of Suspended."""
    return f"process {pid} is suspended (Ctrl-Z or SIGSTOP): `kill -CONT {pid}` (or `fg` in its shell) lets it continue"


def is_stopped(pid: int) -> bool:
    """
    Whether a signal or a debugger has stopped process *pid*; False where it cannot be seen.

    Source: proc_pid_stat(5), `state`.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state in (b"T", b"t")


def is_running(path: Path) -> bool:
    """Whether a process listens at *path*. Does not wait for an answer."""
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(1.0)
            with _reachable(path) as address:
                channel.connect(address)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """An address for *path* that is short enough for a socket."""
    if len(os.fsencode(path)) <= PATH_LIMIT:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _refuse_stopping(_: object) -> Answer:
    raise Stopping("the daemon is stopping")


def _refusal(text: str, kind: str) -> Answer:
    return {"ok": False, "error": text, "kind": kind}


def _kind(error: TpuCareError) -> str:
    return type(error).__name__


def _error_of(answer: Mapping[str, Any]) -> TpuCareError:
    """The error of the same class on this side, if both know it."""
    text = str(answer.get("error", "the daemon refused without a reason"))
    return _KINDS.get(str(answer.get("kind", "")), Refused)(text)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # an idle client must not keep the daemon from ending
    request_queue_size = 64
    submit: Callable[[object], Answer]

    def __init__(self, path: str, conversation: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(path, conversation)
        self.places = threading.BoundedSemaphore(CONNECTIONS_LIMIT)
        self.long_lines = threading.BoundedSemaphore(LONG_LINES)
        self.quiet = threading.Condition()
        self.answering = 0

    def server_bind(self) -> None:
        """Linux gives the file the mode of its socket; a umask would apply to all threads of this process."""
        os.fchmod(self.fileno(), 0o600)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up needs no traceback on stderr."""


def _limit_of(line: bytes | bytearray) -> int:
    """The longest line with this beginning that is read."""
    return LINE_LIMIT if _APPLY.match(line) else SMALL_LINE_LIMIT


class _Connection(socketserver.StreamRequestHandler):
    timeout = IDLE_SECONDS

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        if not self.server.places.acquire(blocking=False):
            self._write(_refusal("too many connections at once; ask again", "busy"))
            return
        try:
            with contextlib.suppress(OSError):
                self._serve_lines(self.server)
        finally:
            self.server.places.release()

    def _serve_lines(self, server: _Server) -> None:
        while line := self._read_line():
            if len(line) > _limit_of(line):
                self._write(_refusal(f"a line has at most {_limit_of(line)} bytes", "config"))
                return
            if not line.strip():
                continue
            with server.long_lines if len(line) > SMALL_LINE_LIMIT else contextlib.nullcontext():
                self._answer(server, line)

    def _answer(self, server: _Server, line: bytes) -> None:
        try:
            command = json.loads(line)
        except (ValueError, RecursionError):
            self._write(_refusal("not a line of JSON", "config"))
            return
        with server.quiet:
            server.answering += 1
        try:
            self._write(server.submit(command))
        finally:
            with server.quiet:
                server.answering -= 1
                server.quiet.notify_all()

    def _read_line(self) -> bytes:
        """
        The next line, or the beginning of one that is too long; empty at the end.

        Raises: TimeoutError: nothing arrived for IDLE_SECONDS, or the rest of a line not within LINE_SECONDS.
        """
        line, until = bytearray(), time.monotonic() + IDLE_SECONDS
        while b"\n" not in line and len(line) <= _limit_of(line):
            self.connection.settimeout(max(until - time.monotonic(), 0.001))
            # `peek` does not consume the bytes: those after the line are left for the next one.
            arrived = self.rfile.peek(1)  # type: ignore[attr-defined]
            if not arrived:
                break
            if not line:
                until = time.monotonic() + LINE_SECONDS
            end = arrived.find(b"\n") + 1
            line += self.rfile.read(end or len(arrived))
        self.connection.settimeout(IDLE_SECONDS)
        return bytes(line)

    def _write(self, answer: Answer) -> None:
        self.wfile.write(json.dumps(answer, default=str).encode() + b"\n")
