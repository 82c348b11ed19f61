"""
`tpucare.Fleet`: a fleet declared in Python, with the fields and rules of a fleet file.

Problems are raised when the fleet is made. Pure but for reading the files that a job names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from tpucare.fleetfile import parse as fleets
from tpucare.fleetfile.python_fleet import FLEET_KEYS
from tpucare.fleetfile.schema import duration_text
from tpucare.model.errors import ConfigError

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Fleet:
    """
    `Fleet("pod", tpu={"type": "v4-32", "zones": ["us-central2-b"]}, job={"run": "python3 train.py"})`.

    tpu, job, care: as in a fleet file; lengths of time as `timedelta` or as text (`"30m"`)
    max_price, until, max_cost, placement, value: as in a fleet file; None or empty: its default
    folder: where relative paths of the job start; by default where this process works
    Raises: ConfigError: one line per problem.
    """

    name: str
    tpu: Section | Sequence[Section]
    job: Section
    _: KW_ONLY
    count: int = 1
    project: str = ""
    care: Section = field(default_factory=dict)
    max_price: float | None = None
    until: str = ""
    max_cost: float | None = None
    placement: str = ""
    value: float | None = None
    folder: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        _ = self.parsed

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Fleet:
        """The fleet of a fleet file. Raises: ConfigError."""
        file = Path(path).absolute()
        text = fleets.read_text(file)
        fleets.parse(text, file=str(path), folder=file.parent)
        return cls(**_values(text), folder=file.parent)

    @property
    def text(self) -> str:
        """The text of a fleet file of this fleet; JSON, which is YAML."""
        fields = {"name": self.name, "count": self.count, "tpu": self.tpu, "job": self.job, "care": self.care}
        chosen = {name: getattr(self, name) for name in ("project", *FLEET_KEYS)}
        fields |= {name: value for name, value in chosen.items() if value not in (None, "")}
        return json.dumps({key: plain_value(value, key) for key, value in fields.items()}, ensure_ascii=False)

    @property
    def home(self) -> Path:
        """Where relative paths of the job start."""
        return Path(self.folder or Path.cwd()).absolute()

    @cached_property
    def parsed(self) -> fleets.FleetSpec:
        """The fleet as daemon and engine use it."""
        file = f"Fleet({self.name!r})"
        try:
            return fleets.parse(self.text, file=file, folder=self.home)
        except ConfigError as error:
            if not error.problems:
                raise
            # No person wrote these lines, so their numbers mean nothing.
            raise ConfigError.of((replace(problem, line=0) for problem in error.problems), file) from None


def _values(text: str) -> dict[str, Any]:
    from tpucare.fleetfile import yaml_document

    value = yaml_document.read(text).value
    assert isinstance(value, dict)
    known = ("name", "tpu", "job", "count", "project", "care", *FLEET_KEYS)
    return {key: value[key] for key in known if value.get(key) is not None}


def plain_value(value: Any, name: str) -> Any:
    """Values of Python as values of a fleet file. Raises: ConfigError: a value that no file can hold."""
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(entry, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(entry, name) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float) and ".env." in name and (written := getattr(value, "text", None)) is not None:
        return str(written)  # `010` of a file stays `010`
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ConfigError(f"{name} must be as in a fleet file, not a {type(value).__name__}")
