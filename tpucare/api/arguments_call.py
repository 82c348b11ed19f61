"""
What `start_single` or `start_multiple` was called with, as it was said, and the reading of single values of it.

Pure. What the values mean together is `arguments`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpucare.model.errors import ConfigError
from tpucare.model.text import shown

UNHEALTHY_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Call:
    """What `start_single` (`single`) or `start_multiple` was called with; `more`: keywords beside the named ones."""

    name: object
    tpu_version: object
    zone: object
    preemptible: object
    service_account: object
    slices: object
    start_fn: object
    creation_callback: object
    creation_semaphore: object = None
    all_workers: object = False
    unhealthy_timeout_seconds: object = UNHEALTHY_SECONDS
    tpus: object = 1
    single: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> str:
        return "start_single" if self.single else "start_multiple"


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not {shown(value)}")
    return value


def whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        raise ConfigError(f"{name} must be a whole number, not {shown(value)}")
    return value


def yes_or_no(value: object, name: str) -> bool:
    if value is None or isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ConfigError(f"{name} must be True or False (or 1 or 0), not {shown(value)}")
