"""
The control socket of a running emulator: one JSON object per line in, one per line out, on a unix socket of mode 0600.

    {"do": "preempt", "selector": "pod-0"}   ->   {"ok": true, "touched": ["pod-0-a1"]}
    {"do": "premept"}                        ->   {"ok": false, "error": "no action 'premept', did you mean ..."}

`orders` defines the orders.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tpucare.model.errors import ConfigError

LINE_LIMIT = 1 << 16
ANSWER_TIMEOUT_SECONDS = 30.0
IDLE_TIMEOUT_SECONDS = 300.0

ApplyOrder = Callable[[object], Mapping[str, Any]]
"""Applies one decoded order and returns its answer. Raises: ConfigError: the order is wrong."""


class ControlSocket:
    """Serves the socket until it is closed; each connection has a thread of its own."""

    def __init__(self, path: Path, apply: ApplyOrder) -> None:
        """Raises: ConfigError: the socket cannot be made."""
        path.unlink(missing_ok=True)
        try:
            self._server = _OrderServer(str(path), _OrderConnection)
        except OSError as error:
            raise ConfigError(f"cannot make the control socket {path}: {error}") from error
        os.chmod(path, 0o600)
        self._server.apply = apply
        self.path = path
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="emulator-control")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.path.unlink(missing_ok=True)


def request(socket_path: Path | str, order: Mapping[str, Any]) -> dict[str, Any]:
    """
    Send one order to a running emulator and return its answer, without `ok`.

    Raises: ConfigError: no emulator answers there, or the order was wrong; the text is the emulator's one line.
    """
    try:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(ANSWER_TIMEOUT_SECONDS)
            channel.connect(str(socket_path))
            channel.sendall(json.dumps(order).encode() + b"\n")
            line = channel.makefile("rb").readline()
        answer = json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no emulator answers at {socket_path}: {error}") from error
    if not answer.pop("ok", False):
        raise ConfigError(str(answer.get("error", "the emulator refused without a reason")))
    return dict(answer)


class _OrderServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False  # an idle client must not keep the emulator from ending
    apply: ApplyOrder


class _OrderConnection(socketserver.StreamRequestHandler):
    timeout = IDLE_TIMEOUT_SECONDS

    def handle(self) -> None:
        assert isinstance(self.server, _OrderServer)
        try:
            while line := self.rfile.readline(LINE_LIMIT):
                self.wfile.write(json.dumps(_answer(line, self.server.apply)).encode() + b"\n")
        except OSError:
            return  # the client went away


def _answer(line: bytes, apply: ApplyOrder) -> dict[str, Any]:
    """The answer to any line, malformed ones included. Never raises."""
    try:
        return {"ok": True, **apply(json.loads(line))}
    except ConfigError as error:
        return {"ok": False, "error": str(error)}
    except (ValueError, RecursionError):
        return {"ok": False, "error": "an order is one JSON object on one line"}
    except Exception as error:
        return {"ok": False, "error": f"the emulator failed to apply the order: {type(error).__name__}: {error}"}
