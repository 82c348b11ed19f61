"""
Frames, file descriptors and exceptions between a process and its children, over Unix sockets.

Both ends are one program under one user, so values are pickled. Nothing here knows what is said.
"""

from __future__ import annotations

import pickle
import socket
import struct
import traceback
from typing import Any

_LENGTH = struct.Struct(">Q")


class RemoteTraceback(Exception):
    """Where an exception was raised in the other process; stands as its cause."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def send(channel: socket.socket, content: bytes, descriptor: int | None = None) -> None:
    """One frame, and with it a descriptor. Raises: OSError: nobody reads any more."""
    head = _LENGTH.pack(len(content))
    if descriptor is None:
        channel.sendall(head + content)
        return
    sent = socket.send_fds(channel, [head], [descriptor])
    channel.sendall(head[sent:] + content)


def receive(channel: socket.socket) -> tuple[bytes, int | None] | None:
    """The next frame with its descriptor, or None when the other end is closed, in the middle of one too."""
    try:
        head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    except OSError:
        return None
    descriptor = descriptors[0] if descriptors else None
    rest = _read(channel, _LENGTH.size - len(head)) if head else None
    if rest is None:
        return None
    content = _read(channel, _LENGTH.unpack(head + rest)[0])
    return None if content is None else (content, descriptor)


def _read(channel: socket.socket, length: int) -> bytes | None:
    parts = []
    while length > 0:
        try:
            part = channel.recv(min(length, 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def pack_error(error: BaseException) -> bytes:
    """
    An exception that can be raised on the other end with its class, values and place.

    By its parts, since many classes cannot be made again of their arguments alone; and beside them in words alone, for
    the other end may know less than this one.
    """
    text = "".join(traceback.format_exception(error))
    words = " ".join("".join(traceback.format_exception_only(error)).split())
    try:
        parts = pickle.dumps((type(error), error.args, vars(error)))
        _made_of(parts)
    except Exception:
        parts = b""
    return pickle.dumps((words, text, parts))


def unpack_error(packed: bytes) -> BaseException:
    """Never fails: what cannot be made again here, as a class that only the other end can import, is told in words."""
    words, text, parts = pickle.loads(packed)
    try:
        error = _made_of(parts)
    # Making it again imports its module, which may do anything, `sys.exit` included.
    except (Exception, SystemExit):
        error = RuntimeError(words)
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
