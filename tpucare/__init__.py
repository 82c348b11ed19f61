"""
The caretaker of preemptible Google Cloud TPUs: the public names, nothing else.

Each is imported when it is first used, so that `import tpucare` costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from tpucare._version import __version__

if TYPE_CHECKING:
    from tpucare import training
    from tpucare.api.attempt import Host
    from tpucare.api.deletion import NotDeleted, delete_all, delete_one_tpu, synchronous_deletion
    from tpucare.api.exec_command import exec_command
    from tpucare.api.fleet import Fleet
    from tpucare.api.foreground import SlotFailed
    from tpucare.api.hosts import all_tpus, exec_on_tpu, send_to_tpu, tpu_ips, tpu_names
    from tpucare.api.start import All, Context, SliceIndex, run, start_multiple, start_single, status
    from tpucare.integrations.wandb import sweep as sweeps
    from tpucare.model.errors import (
        CloudError,
        CommandFailed,
        ConfigError,
        NodeGone,
        RemoteError,
        StoreError,
        StoreLocked,
        TpuCareError,
        WorkerSilent,
    )
    from tpucare.model.resources import Event

LOG_LEVEL = 20
"""What a blocking call shows: events of this level of `logging` and above; 0 shows everything."""

__all__ = [
    "LOG_LEVEL",
    "All",
    "CloudError",
    "CommandFailed",
    "ConfigError",
    "Context",
    "Event",
    "Fleet",
    "Host",
    "NodeGone",
    "NotDeleted",
    "RemoteError",
    "SliceIndex",
    "SlotFailed",
    "StoreError",
    "StoreLocked",
    "TpuCareError",
    "WorkerSilent",
    "__version__",
    "all_tpus",
    "delete_all",
    "delete_one_tpu",
    "exec_command",
    "exec_on_tpu",
    "run",
    "send_to_tpu",
    "start_multiple",
    "start_single",
    "status",
    "sweeps",
    "synchronous_deletion",
    "tpu_ips",
    "tpu_names",
    "training",
]

_ERRORS = "CloudError CommandFailed ConfigError NodeGone RemoteError StoreError StoreLocked TpuCareError WorkerSilent"
_HOMES = {
    **dict.fromkeys(["All", "Context", "SliceIndex", "run", "start_multiple", "start_single", "status"], "api.start"),
    **dict.fromkeys(["all_tpus", "exec_on_tpu", "send_to_tpu", "tpu_ips", "tpu_names"], "api.hosts"),
    **dict.fromkeys(["NotDeleted", "delete_all", "delete_one_tpu", "synchronous_deletion"], "api.deletion"),
    **dict.fromkeys(_ERRORS.split(), "model.errors"),
    "Event": "model.resources",
    "Fleet": "api.fleet",
    "Host": "api.attempt",
    "SlotFailed": "api.foreground",
    "exec_command": "api.exec_command",
}
_MODULES = {"sweeps": "integrations.wandb.sweep", "training": "training"}
# Scripts import these names and seldom call them; to fail at the import would be to fail at nothing.
_GONE = {
    "create_tpu": "start_single and start_multiple make nodes, and replace them",
    "recreate": "start_single and start_multiple make nodes, and replace them",
    "delete_no_check": "delete_one_tpu deletes what is ours",
    "valid_tpu": "tpu_names says which TPUs are alive",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tpucare.{_MODULES[name]}")
    if name in _GONE:
        return _gone(name)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tpucare' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"tpucare.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _gone(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        from tpucare.model.errors import ConfigError

        raise ConfigError(f"tpucare.{name} is gone: {_GONE[name]}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
