"""
A small HTTP/1.1 server on the loopback, for `api.rest` and `storage.api`.

Each connection has a thread of its own, because a call sleeps its latency there. The server reads whole bodies and
writes answers; the caller's function makes them. `stop` leaves no thread and no connection behind.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl

import structlog

from tpucare.model.errors import ConfigError
from tpucare.testbed.peers import GuardedConnection

IDLE_SECONDS = 120.0
BODY_LIMIT = 1 << 30
BACKLOG = 512

_log = structlog.get_logger("tpucare.emulator")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """
    One request, whole. `path` is still percent-encoded; header names are lower case; `query` keeps its order.

    peer: as gRPC names it, `ipv4:127.0.0.1:40000`
    """

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]
    body: bytes
    peer: str

    def value(self, name: str, default: str = "") -> str:
        """The last value of a query parameter."""
        return next((value for key, value in reversed(self.query) if key == name), default)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answer. The server adds a Content-Length, and leaves the body out for HEAD."""

    status: int
    body: bytes = b""
    content_type: str = "application/json; charset=UTF-8"
    headers: Mapping[str, str] = field(default_factory=dict)


Answerer = Callable[[HttpRequest], HttpAnswer]


class HttpService:
    """Serves from its making until `stop`."""

    def __init__(self, answer: Answerer, port: int = 0) -> None:
        """*port* 0: a free one. Raises: ConfigError: the port is taken."""
        try:
            self._server = _HttpServer(("127.0.0.1", port), _HttpConnection)
        except OSError as error:
            raise ConfigError(f"port {port} cannot be listened on: is another emulator running?") from error
        self._server.answer = answer
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.accept_until_closed, name="emulator-http")
        self._thread.start()

    def stop(self) -> None:
        """Cut open connections, and wait for their threads. May be called twice."""
        self._server.close_connections()
        self._thread.join()
        self._server.server_close()


class _HttpServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = False
    block_on_close = True
    request_queue_size = BACKLOG
    answer: Answerer

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        super().__init__(address, handler)

    def accept_until_closed(self) -> None:
        while True:
            try:
                connection, peer = self.get_request()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            self.process_request(connection, peer)

    def close_connections(self) -> None:
        """Shutting a listening socket down wakes the thread that accepts; closing it would not."""
        with self._lock:
            self._closed = True
            for one in (self.socket, *self._open):
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # closed already

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        with self._lock:
            if isinstance(request, socket.socket):
                self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """A client may leave at any time; errors of an answer have been logged before."""
        _log.debug("a connection broke", peer=str(client_address), error=repr(sys.exception()))


class _HttpConnection(GuardedConnection):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1

    def _serve(self) -> None:
        assert isinstance(self.server, _HttpServer)
        body = self._body()
        if body is None:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        path, _, query = self.path.partition("?")
        request = HttpRequest(
            self.command,
            path,
            tuple(parse_qsl(query, keep_blank_values=True)),
            {name.lower(): value for name, value in self.headers.items()},
            body,
            f"ipv4:{self.client_address[0]}:{self.client_address[1]}",
        )
        try:
            answer = self.server.answer(request)
        except Exception:
            _log.exception("a call failed", method=self.command, path=path)
            answer = HttpAnswer(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._reply(answer)

    # The names under which BaseHTTPRequestHandler looks for a method.
    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _body(self) -> bytes | None:
        """The whole body; None: longer than BODY_LIMIT."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return self._chunks()
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > BODY_LIMIT:
            self.close_connection = True
            return None
        return self.rfile.read(int(length))

    def _chunks(self) -> bytes | None:
        parts, total = [], 0
        while (size := int(self.rfile.readline(64).split(b";")[0] or b"0", 16)) > 0:
            total += size
            if total > BODY_LIMIT:
                self.close_connection = True
                return None
            parts.append(self.rfile.read(size))
            self.rfile.readline(8)
        while self.rfile.readline(1 << 13).strip():
            pass  # trailers
        return b"".join(parts)

    def _reply(self, answer: HttpAnswer) -> None:
        self.send_response_only(answer.status)
        if answer.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Calls are in the audit log."""
