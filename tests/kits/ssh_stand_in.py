"""
An SSH server inside a Python process, for tests that need a hundred workers, or one that misbehaves at a word.

It logs in anybody who has an authorised key, runs commands with bash in a HOME folder (or answers them itself, for
large numbers) and serves files over SFTP. Real sshd stays the reference: both pass the same contract tests.

    python -m tests.kits.ssh_stand_in AUTHORIZED_KEY_FILE      prints its port, answers every command with its own text
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    MSG_CHANNEL_REQUEST,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
)
from paramiko.sftp import SFTP_OK

from tpucare.model.resources import Ran

Answer = Callable[[str], Ran]


def make_host_key(kind: str = "ed25519") -> paramiko.PKey:
    """A new private key of *kind*: ed25519, ecdsa or rsa."""
    if kind == "ecdsa":
        return paramiko.ECDSAKey.generate()
    if kind == "rsa":
        return paramiko.RSAKey.generate(2048)
    text = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return paramiko.Ed25519Key(file_obj=io.StringIO(text.decode()))


class SshStandIn:
    """
    One listening server on loopback. `home` is where commands run; with `answer` nothing is run at all.

    `hang` takes connections and never says a word; `drop` closes all open connections; `stop` ends everything.
    `logins` counts attempts to log in, successful or not. `overflows`: what commands print is sent whether or not the
    client has room for it.
    """

    def __init__(
        self,
        authorized: str,
        *,
        home: Path | None = None,
        answer: Answer | None = None,
        host_keys: Sequence[paramiko.PKey] = (),
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.authorized = " ".join(authorized.split()[:2])
        self.home = home
        self.answer = answer
        self.host_keys = list(host_keys) or [make_host_key()]
        self.hang = False
        self.overflows = False
        self.logins = 0
        self.accepted = 0
        self.sftp_error = 0
        self._open: set[_ServerTransport] = set()
        self._hung: list[socket.socket] = []
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((address, port), backlog=1024)
        self.address, self.port = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="stand-in-accept", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        with self._lock:
            return len(self._open)

    def drop(self) -> None:
        """Close every open connection, as a preempted VM's kernel would not, and a killed sshd does."""
        with self._lock:
            transports = list(self._open)
        for transport in transports:
            transport.sock.close()

    def say(self, content: bytes) -> None:
        """Send bytes that are no part of the protocol on every open connection."""
        with self._lock:
            transports = list(self._open)
        for transport in transports:
            transport.sock.send(content)

    def stop(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # Stopped already.
        self._thread.join()
        self._listener.close()
        for sock in self._hung:
            sock.close()
        self.drop()
        with self._lock:
            transports = list(self._open)
            processes = list(self._processes)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # With what it left in the background.
        for transport in transports:
            transport.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.hang:
                self._hung.append(sock)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport = _ServerTransport(_BlockingSocket(sock), self._ended)
            with self._lock:
                self._open.add(transport)
            for key in self.host_keys:
                transport.add_server_key(key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files, self)
            transport.start_server(event=threading.Event(), server=_Session(self))

    def _ended(self, transport: _ServerTransport) -> None:
        with self._lock:
            self._open.discard(transport)

    # --- commands ---

    def serve(self, channel: paramiko.Channel, command: str) -> None:
        """Run or answer one command; its end closes the channel."""
        if self.overflows:
            channel.out_window_size = 1 << 50
        try:
            if self.answer is not None:
                ran = self.answer(command)
                channel.sendall(ran.stdout)
                channel.sendall_stderr(ran.stderr)
                channel.send_exit_status(ran.exit_status)
            else:
                self._run(channel, command)
        except (OSError, EOFError, paramiko.SSHException):
            pass  # The client went away.
        finally:
            with contextlib.suppress(OSError, EOFError):
                channel.close()

    def _run(self, channel: paramiko.Channel, command: str) -> None:
        assert self.home is not None
        env = {**os.environ, "HOME": str(self.home)}
        with self._lock:
            process = subprocess.Popen(
                ["/bin/bash", "-c", command],
                cwd=self.home,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._processes.add(process)
        try:
            self._relay(channel, process)
        finally:
            with self._lock:
                self._processes.discard(process)

    def _relay(self, channel: paramiko.Channel, process: subprocess.Popen[bytes]) -> None:
        _thread(_pump_in, channel, process.stdin)
        streams = (
            _thread(_pump_out, process.stdout, channel.sendall),
            _thread(_pump_out, process.stderr, channel.sendall_stderr),
        )
        status = process.wait()
        if status >= 0:
            channel.send_exit_status(status)
        for stream in streams:
            # As sshd does: the channel stays open while a child in the background holds the output.
            stream.join()
        channel.shutdown_write()


class _BlockingSocket:
    """Without paramiko's 0.1 s poll, of which a thousand connections would take a whole core."""

    _closed = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def settimeout(self, seconds: float | None) -> None:
        pass

    def recv(self, size: int) -> bytes:
        return self._sock.recv(size)

    def send(self, content: bytes) -> int:
        return self._sock.send(content)

    def getpeername(self) -> Any:
        return self._sock.getpeername()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self._sock.close()


class _ServerTransport(paramiko.Transport):
    def __init__(self, sock: _BlockingSocket, ended: Callable[[_ServerTransport], None]) -> None:
        super().__init__(sock)  # type: ignore[arg-type]
        self.set_log_channel("tests.kits.ssh_stand_in")
        self.logger.setLevel(60)
        self._ended = ended
        self._socket = sock
        self._accepted: list[Callable[[], object]] = []
        self._channel_handler_table = {**self._channel_handler_table, MSG_CHANNEL_REQUEST: self._handle_request}  # type: ignore[has-type]

    def after_reply(self, action: Callable[[], object]) -> None:
        """Do *action* when the request now being handled was granted: an answer must not overtake that."""
        self._accepted.append(action)

    def _handle_request(self, channel: paramiko.Channel, message: paramiko.Message) -> None:
        channel._handle_request(message)  # type: ignore[attr-defined]
        while self._accepted:
            self._accepted.pop()()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._socket.release()
            self._ended(self)


class _Session(paramiko.ServerInterface):
    def __init__(self, stand_in: SshStandIn) -> None:
        self._stand_in = stand_in

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self._stand_in.logins += 1
        known = f"{key.get_name()} {key.get_base64()}" == self._stand_in.authorized
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED if kind == "session" else OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        transport = channel.get_transport()
        assert isinstance(transport, _ServerTransport)
        transport.after_reply(lambda: _thread(self._stand_in.serve, channel, command.decode()))
        return True


class _Files(paramiko.SFTPServerInterface):
    """The few operations that a put needs, below the stand-in's home."""

    def __init__(self, server: paramiko.ServerInterface, stand_in: SshStandIn) -> None:
        super().__init__(server)
        self._stand_in = stand_in

    def _path(self, path: str) -> Path:
        assert self._stand_in.home is not None
        return self._stand_in.home / path.lstrip("/")

    def open(self, path: str, flags: int, attr: paramiko.SFTPAttributes) -> paramiko.SFTPHandle | int:
        if path.startswith("/"):
            return paramiko.SFTPServer.convert_errno(errno.EACCES)
        try:
            handle = os.open(self._path(path), flags, 0o666 if attr.st_mode is None else attr.st_mode)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or errno.EIO)
        return _File(flags, os.fdopen(handle, "wb"), self._stand_in)

    def chattr(self, path: str, attr: paramiko.SFTPAttributes) -> int:
        return self._try(lambda: os.chmod(self._path(path), attr.st_mode or 0))

    def remove(self, path: str) -> int:
        return self._try(lambda: os.remove(self._path(path)))

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        return self._try(lambda: os.replace(self._path(oldpath), self._path(newpath)))

    @staticmethod
    def _try(action: Callable[[], object]) -> int:
        try:
            action()
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or errno.EIO)
        return SFTP_OK


class _File(paramiko.SFTPHandle):
    """`sftp_error` of the stand-in, when set, is the error number of every write: a full disk, for one."""

    def __init__(self, flags: int, stream: Any, stand_in: SshStandIn) -> None:
        super().__init__(flags)
        self.writefile = stream
        self._stand_in = stand_in

    def write(self, offset: int, data: Any) -> int:
        if self._stand_in.sftp_error:
            return paramiko.SFTPServer.convert_errno(self._stand_in.sftp_error)
        return super().write(offset, data)


def _thread(target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _pump_in(channel: paramiko.Channel, stream: Any) -> None:
    try:
        with stream:
            while chunk := channel.recv(1 << 15):
                stream.write(chunk)
    except (OSError, EOFError, ValueError):
        pass  # The command did not want all of it.


def _pump_out(stream: Any, send: Callable[[bytes], object]) -> None:
    with stream:
        try:
            while chunk := stream.read1(1 << 15):
                send(chunk)
        except (OSError, EOFError, ValueError):
            pass  # The client went away; SIGPIPE tells the command.


def main() -> None:
    stand_in = SshStandIn(
        Path(sys.argv[1]).read_text(), answer=lambda command: Ran(0, command.encode(), b""), host_keys=[make_host_key()]
    )
    print(stand_in.port, flush=True)
    sys.stdin.read()
    stand_in.stop()


if __name__ == "__main__":
    main()
