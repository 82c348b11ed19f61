"""
Files over SFTP such that nobody ever sees half of one, or one that was meant to be private.

What an error of it means for a worker is decided by the connection that it came over.
"""

from __future__ import annotations

import secrets
import stat
from contextlib import suppress
from pathlib import PurePosixPath

import paramiko
from paramiko.sftp import CMD_HANDLE, CMD_OPEN, SFTP_FLAG_CREATE, SFTP_FLAG_EXCL, SFTP_FLAG_WRITE

from tpucare.adapters.ssh.transport import Deadline

CHUNK_BYTES = 1 << 15  # What one SSH packet and one SFTP request hold.


class _Sftp(paramiko.SFTPClient):
    """SFTP whose new files are never readable by others, not even while they are empty."""

    def create_private(self, path: str) -> paramiko.SFTPFile:
        """`SFTPClient.open` cannot pass attributes, and a server creates files without them as its umask likes."""
        private = paramiko.SFTPAttributes()
        private.st_mode = stat.S_IRUSR | stat.S_IWUSR
        flags = SFTP_FLAG_WRITE | SFTP_FLAG_CREATE | SFTP_FLAG_EXCL
        kind, answer = self._request(CMD_OPEN, path.encode(), flags, private)  # type: ignore[attr-defined]
        if kind != CMD_HANDLE:
            raise paramiko.SFTPError("Expected handle")
        return paramiko.SFTPFile(self, answer.get_binary(), "wx")


def write_file(channel: paramiko.Channel, path: str, content: bytes, mode: int, deadline: Deadline) -> None:
    """
    Write under a name of its own, private; then, complete, give it its mode; then put it in its place.

    *channel* has the `sftp` subsystem. Raises what paramiko raises: OSError with the server's reason (without `errno`
    when it has none), TimeoutError, EOFError, SSHException.
    """
    channel.settimeout(deadline.remaining)
    sftp = _Sftp(channel)
    target = PurePosixPath(path)
    scratch = str(target.with_name(f".{target.name}.{secrets.token_hex(4)}"))
    file = sftp.create_private(scratch)
    try:
        _send(file, content, deadline)
        for step in (file.close, lambda: sftp.chmod(scratch, mode), lambda: sftp.posix_rename(scratch, str(target))):
            _be_patient(sftp, deadline)
            step()
    except TimeoutError:
        raise  # Tidying up would wait, too.
    except OSError:
        with suppress(OSError, EOFError, paramiko.SSHException):
            file.close()
            sftp.remove(scratch)
        raise


def _send(file: paramiko.SFTPFile, content: bytes, deadline: Deadline) -> None:
    """
    All requests at once, then their answers.

    paramiko forgets to look at the answers of pipelined writes (a full disk would go unseen); the last write goes
    without pipelining, and that collects them all.
    """
    starts = range(0, max(len(content), 1), CHUNK_BYTES)
    for start in starts:
        _be_patient(file.sftp, deadline)
        file.set_pipelined(start != starts[-1])
        file.write(content[start : start + CHUNK_BYTES])


def _be_patient(sftp: paramiko.SFTPClient, deadline: Deadline) -> None:
    channel = sftp.get_channel()
    if deadline.passed:
        raise TimeoutError
    if channel is not None:
        channel.settimeout(deadline.remaining)
