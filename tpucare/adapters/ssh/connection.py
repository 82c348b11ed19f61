"""
One authenticated SSH connection to one worker: opening it, commands and files on it.

The exceptions of paramiko and the kernel are translated here, once, into WorkerSilent, AuthRefused, HostKeyChanged and
CommandFailed. An error of our own machine (no descriptors, no memory, no threads) is raised unchanged: as WorkerSilent
it would get healthy nodes deleted.
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath

import paramiko
from paramiko.sftp import CMD_HANDLE, CMD_OPEN, SFTP_FLAG_CREATE, SFTP_FLAG_EXCL, SFTP_FLAG_WRITE

from tpucare.adapters.ssh.keys import host_key_text
from tpucare.adapters.ssh.transport import Deadline, LastingEvent, Transport, Watchdog, Wire
from tpucare.model.errors import AuthRefused, CommandFailed, HostKeyChanged, WorkerSilent
from tpucare.model.resources import Ran, Worker

# sshd's default MaxSessions is 10.
CHANNELS = 8

# Up to this size stdin is sent before output is read; sshd buffers 2 MB, so it cannot block on a command that writes.
INLINE_STDIN_BYTES = 1 << 16

# Limit of the bytes that a server may send while no command is under way: rekeying and keepalives need a few KB a day.
UNASKED_BYTES = 1 << 20

# A child in the background may hold stdout open after the command ended: wait this long for more output, then go on.
LINGER_SECONDS = 1.0

# Time for a message to leave this machine after a deadline has passed; then the connection counts as stuck.
STUCK_SECONDS = 1.0

_OURS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM)
)


class NeverSent(WorkerSilent):
    """The connection was dead before a request was sent to the worker: sending it again is safe."""


class Connection:
    """
    An open connection. Thread-safe; several commands may run at a time.

    `host_key` is the key that the server proved to have. `lost` is called once, in paramiko's thread, when the
    connection ends for another reason than `close`. `connected` is an open socket to the worker, if there is one.
    """

    def __init__(
        self,
        worker: Worker,
        port: int,
        watchdog: Watchdog,
        lost: Callable[[Connection], None],
        connected: socket.socket | None = None,
    ) -> None:
        self.worker = worker
        self.host_key = ""
        self._wire = Wire(worker.host, port, connected)
        self._transport = Transport(self._wire, self._ended)
        self._watchdog = watchdog
        self._lost = lost
        self._established = False
        self._ours = False
        self._slots = threading.BoundedSemaphore(CHANNELS)
        self._counting = threading.Lock()
        self._under_way = 0

    # --- life ---

    def open(self, *, user: str, key: paramiko.PKey, pinned: Collection[str], deadline: Deadline) -> Connection:
        """
        Connect, check the host key, log in. An empty *pinned* accepts any host key.

        Raises: WorkerSilent, AuthRefused, HostKeyChanged (before our user name or key was sent).
        """
        try:
            self._dial(deadline)
            with self._watchdog.guard(self._wire, deadline.at):
                self._negotiate(pinned, deadline)
                self._log_in(user, key, deadline)
            self._established = True
            self._wire.limit_unasked(UNASKED_BYTES)
        except BaseException:
            self.close()
            if self._transport.ident is None:
                self._wire.release()  # Otherwise the protocol thread does so.
            raise
        return self

    def close(self) -> None:
        """Close the connection, from any thread, even while it opens. Never blocks."""
        self._ours = True
        self._wire.close()

    def join(self) -> None:
        """Wait until the protocol thread of a closed connection has given its descriptor back."""
        if self._transport.ident is not None:
            self._transport.join()

    @property
    def alive(self) -> bool:
        return self._transport.is_active() and not self._ours

    def _ended(self) -> None:
        if self._established and not self._ours:
            self._lost(self)

    def _dial(self, deadline: Deadline) -> None:
        try:
            self._wire.connect(deadline.remaining)
        except TimeoutError as error:
            raise WorkerSilent(
                f"no answer within {deadline.seconds:g} s (connecting)", host=self.worker.host
            ) from error
        except OSError as error:
            if error.errno in _OURS:
                raise
            raise WorkerSilent(f"{error.strerror or error} (connecting)", host=self.worker.host) from error

    def _negotiate(self, pinned: Collection[str], deadline: Deadline) -> None:
        options = self._transport.get_security_options()
        options.key_types = _preferred(tuple(options.key_types), pinned)
        # GCM first: the MAC of the other ciphers is computed and compared in Python, a tenth of the cost of a probe.
        options.ciphers = tuple(sorted(options.ciphers, key=lambda name: "gcm" not in name))
        done = threading.Event()
        self._transport.start_client(event=done)
        if not done.wait(deadline.remaining) or not self._transport.is_active():
            raise self._silent("the SSH handshake", deadline)
        try:
            self.host_key = host_key_text(self._transport.get_remote_server_key())
        except paramiko.SSHException as error:
            raise self._silent("the SSH handshake", deadline, error) from error
        if pinned and self.host_key not in pinned:
            which = f"worker {self.worker.number} of {self.worker.key.name}"
            raise HostKeyChanged(f"not the pinned host key of {which}", host=self.worker.host)

    def _log_in(self, user: str, key: paramiko.PKey, deadline: Deadline) -> None:
        answered = threading.Event()
        try:
            self._transport.auth_publickey(user, key, answered)
        except (paramiko.SSHException, EOFError) as error:
            raise self._silent("the login", deadline, error) from error
        if not answered.wait(deadline.remaining):
            raise self._silent("the login", deadline)
        if self._transport.is_authenticated():
            return
        if self._transport.is_active() or "authentication" in self._transport.disconnect_text.lower():
            raise AuthRefused(f"the key of {user!r} was refused", host=self.worker.host)
        raise self._silent("the login", deadline)

    def _silent(self, when: str, deadline: Deadline, error: Exception | None = None) -> WorkerSilent:
        host = self.worker.host
        if deadline.passed:
            return WorkerSilent(f"no answer within {deadline.seconds:g} s ({when})", host=host)
        why = self._transport.disconnect_text or _text(error or self._transport.saved_exception)
        return WorkerSilent(f"dropped during {when}{f' ({why})' if why else ''}", host=host)

    # --- commands ---

    def run(self, command: str, *, stdin: bytes, deadline: Deadline, limit: int) -> Ran:
        """
        Raises: NeverSent: the command did not reach the worker. WorkerSilent: it may have run or not.
        """
        with self._session(deadline) as channel:
            self._request(deadline, lambda: channel.exec_command(command))
            with self._watchdog.guard(self._wire, deadline.at + STUCK_SECONDS):
                return self._converse(channel, stdin, deadline, limit)

    @contextmanager
    def _session(self, deadline: Deadline) -> Iterator[paramiko.Channel]:
        """A new channel, closed at the end. sshd opens it without a program, so silence means a dead connection."""
        if not self._slots.acquire(timeout=deadline.remaining):
            raise WorkerSilent(f"{CHANNELS} commands under way for {deadline.seconds:g} s", host=self.worker.host)
        self._count(1)
        try:
            channel = self._open_channel(deadline)
            try:
                yield channel
            finally:
                with self._watchdog.guard(self._wire, time.monotonic() + STUCK_SECONDS):
                    _quietly(channel.close)
        finally:
            self._count(-1)
            self._slots.release()

    def _count(self, change: int) -> None:
        """Count the commands under way; while there is none, the bytes from the server are limited."""
        with self._counting:
            self._under_way += change
            self._wire.limit_unasked(None if self._under_way else UNASKED_BYTES)

    def _open_channel(self, deadline: Deadline) -> paramiko.Channel:
        try:
            with self._watchdog.guard(self._wire, deadline.at):
                channel = self._transport.open_session(timeout=deadline.remaining)
                channel.event = LastingEvent(channel)
                return channel
        except paramiko.ChannelException as error:
            raise NeverSent(f"the server opened no session ({error})", host=self.worker.host) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            silent = self._silent("opening a session", deadline, error)
            self.close()
            raise silent if deadline.passed else NeverSent(silent.message, host=silent.host) from error

    def _request(self, deadline: Deadline, ask: Callable[[], None]) -> None:
        """Request a command or subsystem; paramiko waits for the answer without a limit, the watchdog ends the wait."""
        try:
            with self._watchdog.guard(self._wire, deadline.at):
                ask()
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._silent("the request", deadline, error) from error

    def _converse(self, channel: paramiko.Channel, stdin: bytes, deadline: Deadline, limit: int) -> Ran:
        if len(stdin) <= INLINE_STDIN_BYTES:
            _feed(channel, stdin, deadline)
        else:
            threading.Thread(target=_feed, args=(channel, stdin, deadline), name="tpucare-stdin", daemon=True).start()
        out, err = _Kept(limit), _Kept(limit)
        try:
            complete = _collect(channel, out, err, deadline)
        except (EOFError, paramiko.SSHException) as error:
            # A read sends a window update, which may meet the end of the connection before our reader does.
            raise self._silent("a command", deadline) from error
        if complete and not channel.status_event.wait(deadline.remaining):
            complete = False
        # Closed without an end of file: the connection ended, and the transport may notice it only later.
        if not complete or (not channel.eof_received and channel.closed):
            raise self._silent("a command", deadline)
        if channel.exit_status < 0:
            # Killed by a signal, or dropped between the last output and the status: paramiko returns -1 for both.
            raise WorkerSilent("the command ended without a status", host=self.worker.host)
        return Ran(channel.exit_status, bytes(out.content), bytes(err.content), out.truncated or err.truncated)

    # --- files ---

    def put(self, path: str, content: bytes, mode: int, *, deadline: Deadline) -> None:
        """
        Raises: NeverSent, WorkerSilent; CommandFailed: the worker refused, with its reason.
        """
        with self._session(deadline) as channel:
            self._request(deadline, lambda: channel.invoke_subsystem("sftp"))
            try:
                with self._watchdog.guard(self._wire, deadline.at + STUCK_SECONDS):
                    write_file(channel, path, content, mode, deadline)
                return
            except (EOFError, TimeoutError, paramiko.SSHException) as error:
                raise self._silent("a file transfer", deadline, error) from error
            except paramiko.SFTPError as error:
                why = f"{error}; does a start-up file of the login shell print something?"
                raise CommandFailed(f"put {path}: {why}", 1, why, host=self.worker.host) from error
            except OSError as error:
                if channel.closed or not self._transport.is_active():
                    raise self._silent("a file transfer", deadline, error) from error
                refused = error
        raise self._put_failed(path, refused, deadline)

    def _put_failed(self, path: str, error: OSError, deadline: Deadline) -> CommandFailed:
        """SFTP has no code for a full disk, only "Failure": so `df` of the login user's home is added to the text."""
        reason = error.strerror or str(error) or "refused"
        if error.errno is None:
            try:
                asked = self.run("df -P .", stdin=b"", deadline=deadline, limit=4096)
                reason += "; df: " + " ".join(asked.stdout.decode(errors="replace").splitlines()[-1:])
            except WorkerSilent:
                reason += "; the disk may be full"
        return CommandFailed(f"put {path}: {reason}", 1, reason, host=self.worker.host)


class _Kept:
    """The first `limit` bytes of a stream; later ones are dropped and set `truncated`."""

    def __init__(self, limit: int) -> None:
        self.content = bytearray()
        self.truncated = False
        self._limit = limit

    def add(self, chunk: bytes) -> None:
        room = self._limit - len(self.content)
        self.content += chunk[:room]
        self.truncated |= len(chunk) > room


def _preferred(offered: tuple[str, ...], pinned: Collection[str]) -> tuple[str, ...]:
    """Host key algorithms, those of the pinned keys first: a server then shows its pinned key."""
    kinds = {line.split(" ", 1)[0] for line in pinned}
    return tuple(sorted(offered, key=lambda name: ("ssh-rsa" if name.startswith("rsa-") else name) not in kinds))


def _feed(channel: paramiko.Channel, stdin: bytes, deadline: Deadline) -> None:
    """Send all of *stdin*, then end of file. The command may exit or close stdin early; that is not an error."""
    view = memoryview(stdin)
    try:
        for start in range(0, len(view), CHUNK_BYTES):
            channel.settimeout(max(deadline.remaining, 0.001))
            channel.sendall(bytes(view[start : start + CHUNK_BYTES]))
        channel.shutdown_write()
    except (OSError, EOFError, paramiko.SSHException):
        return


def _collect(channel: paramiko.Channel, out: _Kept, err: _Kept, deadline: Deadline) -> bool:
    """Read both streams until their end, whatever their size. False: the deadline came first."""
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    quiet_since = time.monotonic()
    while not deadline.passed:
        over = channel.eof_received or channel.closed  # Before draining: nothing comes after it.
        if _drain(channel, out, err):
            quiet_since = time.monotonic()
            continue
        if over or (channel.exit_status_ready() and time.monotonic() - quiet_since >= LINGER_SECONDS):
            return True
        # The end of a command whose output stays open does not wake the poll; checking every 0.2 s finds it.
        poller.poll(min(deadline.remaining, 0.2) * 1000)
    return False


def _drain(channel: paramiko.Channel, out: _Kept, err: _Kept) -> bool:
    """Read one chunk of each stream that has one; True if there was any."""
    any_read = False
    if channel.recv_ready():
        out.add(channel.recv(CHUNK_BYTES))
        any_read = True
    if channel.recv_stderr_ready():
        err.add(channel.recv_stderr(CHUNK_BYTES))
        any_read = True
    return any_read


def _quietly(action: Callable[[], object]) -> None:
    """Do *action*; ignore the errors of a connection that is gone."""
    try:
        action()
    except (OSError, EOFError, paramiko.SSHException):
        return


def _text(error: BaseException | None) -> str:
    if error is None or isinstance(error, EOFError):
        return ""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# --- files over SFTP: never visible half written, never readable by others while private ------------------------------


CHUNK_BYTES = 1 << 15  # Size of one SSH packet and of one SFTP request.


class _Sftp(paramiko.SFTPClient):
    """SFTP whose new files are never readable by others, not even while they are empty."""

    def create_private(self, path: str) -> paramiko.SFTPFile:
        """`SFTPClient.open` cannot pass attributes, and without them the server's umask decides about a file's mode."""
        private = paramiko.SFTPAttributes()
        private.st_mode = stat.S_IRUSR | stat.S_IWUSR
        flags = SFTP_FLAG_WRITE | SFTP_FLAG_CREATE | SFTP_FLAG_EXCL
        kind, answer = self._request(CMD_OPEN, path.encode(), flags, private)  # type: ignore[attr-defined]
        if kind != CMD_HANDLE:
            raise paramiko.SFTPError("Expected handle")
        return paramiko.SFTPFile(self, answer.get_binary(), "wx")


def write_file(channel: paramiko.Channel, path: str, content: bytes, mode: int, deadline: Deadline) -> None:
    """
    Write a private file under a temporary name; once it is complete, set its mode and rename it to *path*.

    *channel* has the `sftp` subsystem. Raises as paramiko: OSError with the server's reason (without `errno` if the
    server gave none), TimeoutError, EOFError, SSHException.
    """
    channel.settimeout(deadline.remaining)
    sftp = _Sftp(channel)
    target = PurePosixPath(path)
    scratch = str(target.with_name(f".{target.name}.{secrets.token_hex(4)}"))
    file = sftp.create_private(scratch)
    try:
        _send(file, content, deadline)
        for step in (file.close, lambda: sftp.chmod(scratch, mode), lambda: sftp.posix_rename(scratch, str(target))):
            _set_timeout(sftp, deadline)
            step()
    except TimeoutError:
        raise  # Removing the temporary file would wait, too.
    except OSError:
        with suppress(OSError, EOFError, paramiko.SSHException):
            file.close()
            sftp.remove(scratch)
        raise


def _send(file: paramiko.SFTPFile, content: bytes, deadline: Deadline) -> None:
    """
    Send all requests at once, then read their answers.

    paramiko does not check the answers of pipelined writes (a full disk would go unnoticed); the last write is not
    pipelined, and reads all answers.
    """
    starts = range(0, max(len(content), 1), CHUNK_BYTES)
    for start in starts:
        _set_timeout(file.sftp, deadline)
        file.set_pipelined(start != starts[-1])
        file.write(content[start : start + CHUNK_BYTES])


def _set_timeout(sftp: paramiko.SFTPClient, deadline: Deadline) -> None:
    """Limit the next answer of *sftp* to the rest of *deadline*. Raises: TimeoutError: it has passed."""
    channel = sftp.get_channel()
    if deadline.passed:
        raise TimeoutError
    if channel is not None:
        channel.settimeout(deadline.remaining)
