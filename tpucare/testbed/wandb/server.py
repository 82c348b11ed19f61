"""
The W&B stand-in over HTTP on loopback: GraphQL, the file stream of runs, uploads, and an inspection API.

`GET /control/state` and `GET /control/audit?after=N` show the state to tests and people. Any key of 40 characters or
more logs in; keys are neither stored nor shown.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO
from urllib.parse import parse_qs, unquote, urlsplit

import structlog

from tpucare.model.errors import ConfigError
from tpucare.testbed.peers import GuardedConnection
from tpucare.testbed.wandb.answers import View
from tpucare.testbed.wandb.graphql import GraphQL
from tpucare.testbed.wandb.records import Run
from tpucare.testbed.wandb.state import Note, NotFound, WandbState

KEY_LENGTH = 40
BODY_LIMIT = 64 << 20
FILE_LIMIT = 1 << 20
IDLE_SECONDS = 60.0

_LINES = {"wandb-history.jsonl": "history", "wandb-events.jsonl": "events", "output.log": "output"}
_log = structlog.get_logger("tpucare.emulator.wandb")


class WandbServer:
    """
    Serves one `WandbState` on loopback from `start` to `stop`; also a context manager.

    lost_after: seconds, see `WandbState`        audit_path: file for every note as a line of JSON, as it happens
    monotonic, wall: the clocks; tests pass their own
    """

    def __init__(
        self,
        *,
        port: int = 0,
        seed: int = 0,
        lost_after: float = 60.0,
        entity: str = "local",
        audit_path: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.world = WandbState(seed=seed, lost_after=lost_after, entity=entity)
        self.lock = threading.RLock()
        begin, wall_begin = monotonic(), wall()
        self.now: Callable[[], float] = lambda: monotonic() - begin
        self.view = View(self.world, lambda seconds: wall_begin + seconds)
        self.graphql = GraphQL(self.world, self.view, lambda: f"{self.url}/storage")
        self._port, self._audit_path = port, audit_path
        self._audit: TextIO | None = None
        self._server: _WandbHttpServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The value for WANDB_BASE_URL, once the server is started."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Raises: ConfigError: the port or the audit file cannot be opened."""
        try:
            if self._audit_path is not None:
                self._audit = self._audit_path.open("a", encoding="utf-8", buffering=1)
                self.world.listen = self._write
            self._server = _WandbHttpServer(("127.0.0.1", self._port), _WandbConnection)
        except OSError as error:
            raise ConfigError(f"the W&B server cannot start on port {self._port}: {error}") from error
        self._server.owner = self
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="emulator-wandb")
        self._thread.start()

    def stop(self) -> None:
        """Stop, and cut open connections. May be called twice."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None
        with self.lock:
            self.world.listen = lambda _: None
            if self._audit is not None:
                self._audit.close()
                self._audit = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def summary(self) -> dict[str, Any]:
        """The state now, as `GET /control/state` shows it."""
        with self.lock:
            self.world.pass_time(self.now())
            return self.world.summary()

    def audit(self, after: int = 0) -> list[Note]:
        """Notes from number *after* on, as `GET /control/audit?after=N` shows them."""
        with self.lock:
            self.world.pass_time(self.now())
            return self.world.audit[after:]

    def _write(self, note: Note) -> None:
        if self._audit is not None:
            self._audit.write(json.dumps(note) + "\n")

    # --- streams and uploads of runs ---------------------------------------------------------------------------------

    def stream(self, entity: str, project: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Store one piece of a run's file stream. Raises: NotFound."""
        now = self.now()
        with self.lock:
            run = self.world.find_run(entity, project, name)
            if run is None:
                raise NotFound(f"run {entity}/{project}/{name} not found")
            for file, part in (body.get("files") or {}).items():
                _store_lines(run, file, int(part.get("offset", 0)), part.get("content") or [])
            code = body.get("exitcode")
            self.world.report_run(
                run,
                now,
                preempting=bool(body.get("preempting")),
                complete=bool(body.get("complete")),
                exit_code=int(code) if code is not None else None,
            )
            return {"exitcode": run.exit_code, "stopped": run.stop_asked}

    def store_file(self, entity: str, project: str, name: str, path: str, content: bytes) -> None:
        """Store an uploaded file, cut to a size that memory can hold. Raises: NotFound."""
        with self.lock:
            run = self.world.find_run(entity, project, name)
            if run is None:
                raise NotFound(f"run {entity}/{project}/{name} not found")
            run.files[path] = content[:FILE_LIMIT]


def inflated(raw: bytes, encoding: str) -> bytes:
    """The uncompressed body, cut at BODY_LIMIT; empty when it is not compressed in that encoding."""
    # zlib's window; 16 more is a gzip header.
    window = {"gzip": zlib.MAX_WBITS + 16, "deflate": zlib.MAX_WBITS}.get(encoding)
    if window is None:
        return raw
    try:
        return zlib.decompressobj(window).decompress(raw, BODY_LIMIT)
    except zlib.error:
        return b""


def _store_lines(run: Run, file: str, offset: int, content: list[str]) -> None:
    if file == "wandb-summary.json":
        for line in content:
            run.summary.update(json.loads(line))
        return
    if (kept := _LINES.get(file)) is not None:
        lines: list[str] = getattr(run, kept)
        lines.extend([""] * (offset - len(lines)))
        lines[offset : offset + len(content)] = content


class _WandbHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # an idle client must not keep the server from ending
    owner: WandbServer

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Log errors of the server; a reset connection is none, as every killed client leaves one."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.exception("a request failed", client=str(client_address))


class _WandbConnection(GuardedConnection):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    # The answer is sent in two writes; Nagle's algorithm would hold the second for 40 ms.
    disable_nagle_algorithm = True

    @property
    def _owner(self) -> WandbServer:
        assert isinstance(self.server, _WandbHttpServer)
        return self.server.owner

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        if split.path == "/control/state":
            self._answer(200, self._owner.summary())
        elif split.path == "/control/audit":
            after = parse_qs(split.query).get("after", ["0"])[0]
            self._answer(200, {"audit": self._owner.audit(int(after) if after.isdecimal() else 0)})
        else:
            self._answer(200, {"server": "tpucare emulator --wandb", "path": self.path})

    def do_POST(self) -> None:
        body = self._body()
        if self.path.startswith("/sdk/otel/"):
            # The client's telemetry, in another encoding: accepted and ignored.
            self._answer(200, {})
            return
        if not self._is_known():
            self._answer(401, {"errors": [{"message": f"an API key of {KEY_LENGTH} characters or more is needed"}]})
            return
        try:
            self._answer(200, self._handle(json.loads(body)))
        except NotFound as error:
            self._answer(404, {"data": None, "errors": [{"message": str(error)}], "error": str(error)})
        except (ValueError, TypeError, AttributeError) as error:
            _log.warning("a request is malformed", path=self.path, error=str(error))
            self._answer(400, {"errors": [{"message": f"{type(error).__name__}: {error}"}]})

    def _handle(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        owner = self._owner
        path = urlsplit(self.path).path
        if path == "/graphql":
            with owner.lock:
                return owner.graphql.answer(body, owner.now())
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if len(parts) == 5 and parts[0] == "files" and parts[4] == "file_stream":
            return owner.stream(parts[1], parts[2], parts[3], body)
        raise NotFound(f"{path} is not supported by this server")

    def do_PUT(self) -> None:
        body = self._body()
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/", 4)]
        try:
            if len(parts) != 5 or parts[0] != "storage":
                raise NotFound(self.path)
            self._owner.store_file(parts[1], parts[2], parts[3], parts[4], body)
            self._answer(200, {})
        except NotFound as error:
            self._answer(404, {"error": str(error)})

    def _body(self) -> bytes:
        length = min(int(self.headers.get("Content-Length") or 0), BODY_LIMIT)
        raw = self.rfile.read(length)
        return inflated(raw, (self.headers.get("Content-Encoding") or "").lower())

    def _is_known(self) -> bool:
        scheme, _, value = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            return len(value) >= KEY_LENGTH
        try:
            _, _, key = base64.b64decode(value).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        return scheme.lower() == "basic" and len(key) >= KEY_LENGTH

    def _answer(self, status: int, value: Mapping[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not logged: the audit log has their effects."""
