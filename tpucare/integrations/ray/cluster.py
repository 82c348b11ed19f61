"""
Files of a Ray cluster in the state folder: the record of its head, `ray/NAME/head.json`, and its token.

`tpucare ray head` writes them; the companion, the probe and the commands read them. The token is a secret like any
other: `secrets/TPUCARE_RAY_TOKEN_NAME`, which only the resolver of secrets and Ray itself read.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from tpucare.fleetfile.parse import RayPool
from tpucare.fleetfile.values import fleet_name
from tpucare.model.errors import ConfigError
from tpucare.model.local_files import publish_file, read_private, replace_file
from tpucare.model.text import hint
from tpucare.service.options import RAY_TOKEN_PREFIX

RECORD_LIMIT = 1 << 16

_ADDRESS = re.compile(r"[0-9A-Za-z.:\[\]-]{1,253}:[0-9]{1,5}")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+]{0,63}")
_TOKEN = re.compile(rb"[0-9a-f]{64}\s*")


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """
    The head of a cluster, as it was started last; it may be away.

    address: `HOST:PORT` of its GCS    dashboard: `HOST:PORT` of dashboard and jobs
    python: absolute path of the Python that has Ray    ray, python_version: `2.60.0`, `3.11`
    token: absolute path of the token's file
    """

    cluster: str
    address: str
    dashboard: str
    python: str
    ray: str
    python_version: str
    token: str
    started_at: datetime

    @classmethod
    def of(cls, value: Any) -> Self:
        """Raises: ValueError: *value* is not the content of a record."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, dict) or not names <= value.keys():
            raise ValueError("it lacks a field")
        texts = {name: value[name] for name in names}
        if any(not isinstance(text, str) or not text.isprintable() or len(text) > 4096 for text in texts.values()):
            raise ValueError("a field is no text")
        if not all(_is_address(texts[name]) for name in ("address", "dashboard")):
            raise ValueError("an address is none")
        if not all(_VERSION.fullmatch(texts[name]) for name in ("ray", "python_version")):
            raise ValueError("a version is none")
        if not all(texts[name].startswith("/") for name in ("python", "token")):
            raise ValueError("a path is not absolute")
        started_at = datetime.fromisoformat(texts.pop("started_at"))
        if started_at.tzinfo is None:
            raise ValueError("its time has no zone")
        return cls(**texts, started_at=started_at)

    def as_json(self) -> dict[str, str]:
        return {**dataclasses.asdict(self), "started_at": self.started_at.isoformat()}


def submit_variables(head: HeadRecord) -> dict[str, str]:
    """The variables with which `ray job submit` and Ray's other commands for jobs reach *head*."""
    return {
        "RAY_ADDRESS": f"http://{head.dashboard}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": head.token,
    }


def cluster_folder(state: Path, name: str) -> Path:
    """The folder of a cluster; it may not exist. Raises: ConfigError: *name* is no name for a cluster."""
    return state / "ray" / checked_name(name)


def checked_name(name: str) -> str:
    """*name*, which follows the rule of fleets' names. Raises: ConfigError."""
    try:
        return fleet_name(name)
    except ValueError as error:
        raise ConfigError(f"cluster {error}") from None


def clusters(state: Path) -> tuple[str, ...]:
    """Names of the clusters whose head was started from this state folder."""
    found = []
    for path in (state / "ray").glob("*/head.json"):
        try:
            found.append(fleet_name(path.parent.name))
        except ValueError:
            continue
    return tuple(sorted(found))


def read_head(state: Path, name: str) -> HeadRecord | None:
    """The record of the cluster's head; None: none was ever started. Raises: ConfigError: it cannot be read."""
    path = _record_path(state, name)
    try:
        content = read_private(path, RECORD_LIMIT)
        record = HeadRecord.of(json.loads(content))
        if record.cluster != name:
            raise ValueError("it is another cluster's")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    # Nonsense in a file ends in one of these: bytes that are no text, JSON that nests too deeply, a wrong field.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: is not the record of a head: start it anew with `tpucare ray head {name}`"
        ) from error
    return record


def ready_head(state: Path, name: str) -> HeadRecord:
    """The record of a head that was started and has its token. Raises: ConfigError: there is none; as `read_head`."""
    record = read_head(state, name)
    if record is None:
        near = hint(name, clusters(state))
        raise ConfigError(f"cluster {name}: no head was started from {state}; start one: tpucare ray head {name}{near}")
    if not Path(record.token).exists():
        gone = f"cluster {name}: its token, {record.token}, is gone"
        raise ConfigError(f"{gone}; start the head again: tpucare ray head {name}")
    return record


def write_head(state: Path, record: HeadRecord) -> None:
    """Write the record, whole or not at all, for this user alone. Raises: ConfigError: no name; OSError."""
    path = _record_path(state, record.cluster)
    _make_folder(path.parent)
    replace_file(path, f"{json.dumps(record.as_json(), indent=2)}\n".encode())


def foreign_head(state: Path, pool: RayPool, secret: Callable[[str], str | None]) -> HeadRecord:
    """
    The record of a head that somebody else runs, as *pool* names it; its versions are empty until it has answered.

    Its token is written to a file for this user alone, where the probe reads it.
    Raises: ConfigError: the secret with the token is not set, or holds no token; OSError.
    """
    token = secret(pool.token)
    if not token:
        raise ConfigError(
            f"secret {pool.token} is not set, and the head at {pool.address} lets nobody in without it: put it into "
            "the environment of tpucare or into its credentials folder"
        )
    path = cluster_folder(state, pool.cluster) / "token"
    if not _holds(path, token.encode()):
        _make_folder(path.parent)
        replace_file(path, token.encode())
    return HeadRecord(
        pool.cluster, pool.address, "", sys.executable, "", "", str(path), datetime.min.replace(tzinfo=UTC)
    )


def read_followed(state: Path, name: str) -> str:
    """Address and versions of the head for which the cluster's hosts were started last; empty: not known."""
    try:
        return read_private(cluster_folder(state, name) / "followed", RECORD_LIMIT).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def write_followed(state: Path, name: str, head: str) -> None:
    """Write what `read_followed` reads. Raises: OSError."""
    _make_folder(cluster_folder(state, name))
    replace_file(cluster_folder(state, name) / "followed", f"{head}\n".encode())


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_private(path, RECORD_LIMIT) == content
    except OSError:
        return False


def token_variable(name: str) -> str:
    """Name of the secret, and of the file in `secrets/`, that holds the cluster's token. Raises: ConfigError."""
    return RAY_TOKEN_PREFIX + checked_name(name).upper().replace("-", "_")


def make_token(state: Path, name: str) -> Path:
    """
    The file of the cluster's token: 64 hexadecimal digits, made once, for this user alone.

    Two processes that make it at once end up with the same token.
    Raises: ConfigError: no name, or the file is open to others, another user's, or holds no token; OSError.
    """
    path = state / "secrets" / token_variable(name)
    _make_folder(path.parent)
    try:
        content = read_private(path, RECORD_LIMIT)
    except FileNotFoundError:
        publish_file(path, secrets.token_hex(32).encode())
        content = read_private(path, RECORD_LIMIT)
    except OSError as error:
        raise ConfigError(f"{path}: the cluster's token cannot be read: {error.strerror or error}") from error
    if not _TOKEN.fullmatch(content):
        raise ConfigError(f"{path}: is not a token (64 hexadecimal digits); remove it, and start the head anew")
    return path


def _record_path(state: Path, name: str) -> Path:
    return cluster_folder(state, name) / "head.json"


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _is_address(text: str) -> bool:
    return _ADDRESS.fullmatch(text) is not None and 0 < int(text.rpartition(":")[2]) < 1 << 16
