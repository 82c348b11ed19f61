"""
Keys of both sides: tpucare's login key, made once, and the pinned host keys of workers.

Host keys are pinned per node (path and id) and worker number, never per address: the next node reuses an address within
minutes, and its key differs. The reaction to a key that is not pinned is left to `remote`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tpucare.model.errors import ConfigError
from tpucare.model.local_files import publish_file, replace_file
from tpucare.model.resources import NodeKey, Worker

_SEPARATOR = "@"  # `quote` escapes it, so it cannot be part of a field.


@dataclass(frozen=True, slots=True)
class LoginKey:
    """The private key for paramiko, and its public half as one `type base64 comment` line for node metadata."""

    private: paramiko.PKey = field(repr=False)
    public: str


def load_or_make_key(path: Path) -> LoginKey:
    """
    The key at *path*; if there is none, a new ed25519 key is written there first, with mode 0600 from its first byte.

    Two processes that start at once end up with the same key: the slower one reads the key of the faster one.
    Raises: ConfigError: the file is readable by others, has no private key without a passphrase, or cannot be used.
    """
    with _named(path, "the private key"):
        return _load_or_make_key(path)


def _load_or_make_key(path: Path) -> LoginKey:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        _make_key(path)
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: is not a file, so not a private key")
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path}: others may read this private key; run: chmod 600 {path}")
    try:
        private = paramiko.PKey.from_path(path)
    except (paramiko.SSHException, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is not a private key without a passphrase ({error})") from error
    return LoginKey(private, f"{private.get_name()} {private.get_base64()} tpucare")


@contextlib.contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Raises: ConfigError: the file system refused *path*; the text says that *what* cannot be used, and why."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{path}: {what} cannot be used: {why}") from error


def _make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    publish_file(path, text)


class PinStore:
    """
    Host keys by node and worker, one small file of mode 0600 per node, so that a restart does not trust anew.

    The files have OpenSSH's known_hosts format with an alias as host name, so that `ssh -o HostKeyAlias=…` can use them
    too (`known_hosts`). A host key is a text `type base64`. Thread-safe. Every method raises ConfigError if a file of
    the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigError: *folder* is not a folder, or cannot be made or read."""
        self._folder = folder
        self._lock = threading.Lock()
        with _named(folder, "the folder of host keys"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._ids = self._list_nodes()
        self._pins: dict[Path, dict[int, frozenset[str]]] = {}

    def pinned(self, worker: Worker) -> frozenset[str]:
        """Pinned host keys of *worker*; empty before its first use."""
        with self._lock:
            return self._of_node(worker).get(worker.number, frozenset())

    def pin(self, worker: Worker, host_keys: Iterable[str]) -> None:
        """Pin *host_keys* for *worker* in place of its pinned ones."""
        with self._lock:
            self._set(worker, frozenset(host_keys))

    def check(self, worker: Worker, host_key: str) -> bool:
        """True if *host_key* is pinned for *worker*. Pins the first key of a worker."""
        with self._lock:
            pins = self._of_node(worker)
            if worker.number in pins:
                return host_key in pins[worker.number]
            self._set(worker, frozenset({host_key}))
            return True

    def drop_node(self, key: NodeKey) -> None:
        """Drop the pins of every node that ever had this path."""
        with self._lock:
            for node_id in self._ids.pop(key, set()):
                path = self._path(key, node_id)
                self._pins.pop(path, None)
                path.unlink(missing_ok=True)

    def known_hosts(self, worker: Worker) -> tuple[Path, str]:
        """A known_hosts file, and the `HostKeyAlias` of *worker* in it."""
        return self._path(worker.key, worker.node_id), _alias(worker, worker.number)

    def _of_node(self, worker: Worker) -> dict[int, frozenset[str]]:
        path = self._path(worker.key, worker.node_id)
        if path not in self._pins:
            known = worker.node_id in self._ids.get(worker.key, ())
            self._pins[path] = _read_pins(path) if known else {}
        return self._pins[path]

    def _set(self, worker: Worker, host_keys: frozenset[str]) -> None:
        pins = self._of_node(worker)
        pins[worker.number] = host_keys
        self._ids.setdefault(worker.key, set()).add(worker.node_id)
        self._write(worker, pins)

    def _write(self, worker: Worker, pins: dict[int, frozenset[str]]) -> None:
        # Without fsync: only a power cut can lose a pin, and fsync for 64 workers at once would delay a launch.
        lines = [f"{_alias(worker, number)} {key}\n" for number in sorted(pins) for key in sorted(pins[number])]
        replace_file(self._path(worker.key, worker.node_id), "".join(lines).encode(), durable=False)

    def _path(self, key: NodeKey, node_id: int) -> Path:
        return self._folder / _SEPARATOR.join((*(quote(part, safe="") for part in key), str(node_id)))

    def _list_nodes(self) -> dict[NodeKey, set[int]]:
        nodes: dict[NodeKey, set[int]] = {}
        for name in os.listdir(self._folder):
            parts = name.split(_SEPARATOR)
            if len(parts) == 4 and parts[3].isascii() and parts[3].isdigit():
                nodes.setdefault(NodeKey(*map(unquote, parts[:3])), set()).add(int(parts[3]))
        return nodes


def clean_host_keys(lines: Iterable[str]) -> frozenset[str]:
    """The host keys among *lines*, as `type base64`; comments and unreadable lines are dropped."""
    return frozenset(" ".join(parts[:2]) for line in lines if _is_key(parts := line.split()))


def host_key_text(key: paramiko.PKey) -> str:
    """A server's key as `type base64`."""
    return f"{key.get_name()} {key.get_base64()}"


def _is_key(parts: list[str]) -> bool:
    """True if *parts* begin with a type and a base64 blob that begins with that type as a string (RFC 4253, 6.6)."""
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except (IndexError, ValueError):
        return False
    name = parts[0].encode()
    return bool(name) and blob.startswith(len(name).to_bytes(4, "big") + name)


def _alias(worker: Worker, number: int) -> str:
    return f"{worker.key.name}.{worker.node_id}.{number}"


def _read_pins(path: Path) -> dict[int, frozenset[str]]:
    pins: dict[int, frozenset[str]] = {}
    text = ""
    # A file that cannot be read is an error, not an absent file: otherwise any host key would be trusted.
    with _named(path, "the file of host keys"), contextlib.suppress(FileNotFoundError):
        text = path.read_text("utf-8")
    for line in text.splitlines():
        alias, _, key = line.partition(" ")
        number = alias.rpartition(".")[2]
        if number.isascii() and number.isdigit() and key:
            pins[int(number)] = pins.get(int(number), frozenset()) | {key}
    return pins
