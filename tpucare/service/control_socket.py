"""
The control socket of a running daemon: one JSON object per line in, one per line out, a unix socket of mode 0600.

    {"do": "pause", "target": "pod-0"}   ->   {"ok": true, "changed": ["pod-0"]}
    {"do": "puase"}                      ->   {"ok": false, "error": "no verb 'puase' ...", "kind": "config"}

Connections have threads of their own, but nothing is answered there: each order goes to the thread of the loop and
waits for its answer, so that whoever owns the engine is the only one who touches it. What may be ordered is `desk`'s.
Standard library only, since every command may have to ask whether a daemon runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import socketserver
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
# Every order but `apply` is a handful of names.
SMALL_LINE_LIMIT = 64 << 10
# JSON takes many times its length when it is read, so few of the long lines are read at a time.
LONG_LINES = 2
LINE_SECONDS = 30.0
_APPLY = re.compile(rb'\s*\{\s*"do"\s*:\s*"apply"\s*,')
ANSWER_SECONDS = 30.0
IDLE_SECONDS = 60.0
CONNECTIONS_LIMIT = 32
LAST_ANSWERS_SECONDS = 1.0
# A unix socket's path has 108 bytes. Linux lets a longer one be reached through a descriptor of its folder.
PATH_LIMIT = 100

Order = Mapping[str, Any]
Answer = Mapping[str, Any]


class NoDaemon(TpuCareError):
    """Nobody listens at the control socket."""


class Refused(TpuCareError):
    """The daemon would not do it; the text is its one line."""


class Stopping(Refused):
    """It is on its way out, and did nothing of what was asked."""


def _kinds() -> Iterator[type[TpuCareError]]:
    yield Stopping
    for value in vars(errors).values():
        # An exit status does not cross the socket.
        if isinstance(value, type) and issubclass(value, TpuCareError) and not issubclass(value, errors.CommandFailed):
            yield value


# What a refusal is called on the socket -> its class on this side, as which it has the same exit code.
_KINDS = {kind.__name__: kind for kind in _kinds()}


@dataclass(frozen=True, slots=True)
class _Call:
    order: object
    answer: Future[Answer] = field(default_factory=Future)


class Control:
    """
    Serves the socket from `start` to `close`. `serve` carries out what waits, on the thread that calls it.

    nudge:    called, on any thread, when something waits
    stumbled: called, on the thread of `serve`, with an error that nobody named
    """

    def __init__(
        self,
        path: Path,
        nudge: Callable[[], None],
        answer_seconds: float = ANSWER_SECONDS,
        stumbled: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.path = path
        self._nudge = nudge
        self._stumbled = stumbled
        self._answer_seconds = answer_seconds
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """
        To be called by the owner of the store's lock alone: whatever lies at the path is left over from a dead one.

        Raises: ConfigError: the socket cannot be made.
        """
        try:
            self.path.unlink(missing_ok=True)
            with _reachable(self.path) as address:
                self._server = _Server(address, _Conversation)
        except OSError as error:
            raise ConfigError(f"{self.path}: the control socket cannot be made: {error.strerror or error}") from error
        self._server.carry = self._carry
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
        # A file system that turned read-only is what may end the daemon; a dead socket is replaced by the next one.
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.serve(_gone)
        # Whoever was answered a moment ago, as the order to stop is, should hear it.
        with server.quiet:
            server.quiet.wait_for(lambda: not server.answering, LAST_ANSWERS_SECONDS)

    def serve(self, carry: Callable[[object], Answer]) -> int:
        """
        Carry out every order that waits; returns how many.

        An order that stumbles is answered, told to `stumbled`, and ends nothing else. Raises: StoreError.
        """
        count = 0
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return count
            # Whoever asked may have given up meanwhile: then nothing may happen any more.
            if not call.answer.set_running_or_notify_cancel():
                continue
            count += 1
            try:
                call.answer.set_result(carry(call.order))
            except StoreError as error:
                call.answer.set_exception(error)
                raise
            except TpuCareError as error:
                call.answer.set_exception(error)
            except Exception as error:
                call.answer.set_exception(error)
                self._stumbled(error)

    def _carry(self, order: object) -> Answer:
        call = _Call(order)
        self._calls.put(call)
        self._nudge()
        try:
            return {"ok": True, **call.answer.result(self._answer_seconds)}
        except TimeoutError:
            if call.answer.cancel():
                return _refusal("the daemon is busy and did nothing of it; ask again", "busy")
            return _refusal("the daemon began with it and is not done; look at `tpucare status`", "busy")
        except CancelledError:
            return _refusal("the daemon is stopping", Stopping.__name__)
        except TpuCareError as error:
            return _refusal(str(error), _kind(error))
        except Exception as error:
            return _refusal(f"the daemon failed: {type(error).__name__}: {error}", "internal")


def request(path: Path, order: Order, *, seconds: float = ANSWER_SECONDS + 5) -> dict[str, Any]:
    """
    Send one order to the daemon that listens at *path*; returns its answer without `ok`.

    Raises: NoDaemon: nobody listens there. The class of error that the daemon met, or Refused, with its one line.
    """
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(seconds)
            with _reachable(path) as address:
                channel.connect(address)
            # Who is refused before it has spoken has its answer waiting, and nobody to speak to any more.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                channel.sendall(json.dumps(order).encode() + b"\n")
            with channel.makefile("rb") as lines:
                line = lines.readline()
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


def is_running(path: Path) -> bool:
    """Whether somebody listens at *path*. Does not wait for an answer."""
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
    """An address for *path* that fits into a socket's."""
    if len(os.fsencode(path)) <= PATH_LIMIT:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _gone(_: object) -> Answer:
    raise Stopping("the daemon is stopping")


def _refusal(text: str, kind: str) -> Answer:
    return {"ok": False, "error": text, "kind": kind}


def _kind(error: TpuCareError) -> str:
    return type(error).__name__


def _error_of(answer: Mapping[str, Any]) -> TpuCareError:
    """Of the same class on this side, if both know it."""
    text = str(answer.get("error", "the daemon refused without a reason"))
    return _KINDS.get(str(answer.get("kind", "")), Refused)(text)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # an idle client must not keep the daemon from ending
    request_queue_size = 64
    carry: Callable[[object], Answer]

    def __init__(self, path: str, conversation: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(path, conversation)
        self.places = threading.BoundedSemaphore(CONNECTIONS_LIMIT)
        self.long_lines = threading.BoundedSemaphore(LONG_LINES)
        self.quiet = threading.Condition()
        self.answering = 0

    def server_bind(self) -> None:
        """Linux gives the file the mode of its socket; a umask would be that of all threads of this process."""
        os.fchmod(self.fileno(), 0o600)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up: its loss. The usual traceback on stderr helps nobody."""


def _limit_of(line: bytes | bytearray) -> int:
    """How long a line that begins so may be."""
    return LINE_LIMIT if _APPLY.match(line) else SMALL_LINE_LIMIT


class _Conversation(socketserver.StreamRequestHandler):
    timeout = IDLE_SECONDS

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        if not self.server.places.acquire(blocking=False):
            self._write(_refusal("too many connections at once; ask again", "busy"))
            return
        try:
            with contextlib.suppress(OSError):
                self._converse(self.server)
        finally:
            self.server.places.release()

    def _converse(self, server: _Server) -> None:
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
            order = json.loads(line)
        except (ValueError, RecursionError):
            self._write(_refusal("not a line of JSON", "config"))
            return
        with server.quiet:
            server.answering += 1
        try:
            self._write(server.carry(order))
        finally:
            with server.quiet:
                server.answering -= 1
                server.quiet.notify_all()

    def _read_line(self) -> bytes:
        """
        The next line, or what there is of one that is too long; empty at the end.

        Raises: TimeoutError: nothing came for IDLE_SECONDS, or a line that was begun is not ended in LINE_SECONDS.
        """
        line, until = bytearray(), time.monotonic() + IDLE_SECONDS
        while b"\n" not in line and len(line) <= _limit_of(line):
            self.connection.settimeout(max(until - time.monotonic(), 0.001))
            # `peek` gives what has arrived, and takes it not: what follows the line is left for the next one.
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
