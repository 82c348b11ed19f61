"""
The address of a running emulator: a small file in its state folder, written when it serves and removed when it ends.

Nothing heavy is imported, so that a command can look for an emulator without loading one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tpucare.model.errors import ConfigError
from tpucare.model.local_files import replace_file

FILE_NAME = "emulator.json"


@dataclass(frozen=True, slots=True)
class Running:
    """
    The addresses of a running emulator.

    endpoint: `127.0.0.1:PORT` of the API     control: path of the unix socket that operator actions go to
    ssh_port: of every worker, 0 = no machines ssh_user: who logs in there
    rest:     `http://127.0.0.1:PORT` of the API as JSON
    storage:  `http://127.0.0.1:PORT` of the buckets
    """

    endpoint: str
    control: str
    project: str
    pid: int
    ssh_port: int = 0
    ssh_user: str = ""
    rest: str = ""
    storage: str = ""


def announce(folder: Path, running: Running) -> None:
    """Write the file, whole or not at all, readable by its owner only."""
    replace_file(folder / FILE_NAME, json.dumps(asdict(running), indent=1).encode(), durable=False)


def withdraw(folder: Path) -> None:
    (folder / FILE_NAME).unlink(missing_ok=True)


def find(folder: Path) -> Running:
    """Raises: ConfigError: no emulator has written its file there. Whether it still runs shows when it is spoken to."""
    path = folder / FILE_NAME
    try:
        return Running(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"no emulator runs in {folder}: start one with `tpucare emulator`") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not readable as an emulator's file: {' '.join(str(error).split())}") from error
