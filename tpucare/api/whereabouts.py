"""
Where a call of the Python door keeps what it remembers: the state folder, the store in it, and the project.

Explicit arguments go before the environment. Nothing is made or asked for yet, but a project that nobody named.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tpucare.adapters.state.folder import check_store_name
from tpucare.api.arguments import Door
from tpucare.fleetfile.fleet import Fleet
from tpucare.model.errors import ConfigError
from tpucare.service.assembly import project_finder
from tpucare.service.options import DAEMON_STORE, Options, resolve
from tpucare.service.stores import store_name

AnyFleet = TypeVar("AnyFleet", bound=Fleet)


def place_of(door: Door, fleet: AnyFleet) -> tuple[Options, AnyFleet]:
    """
    Options with the store of *fleet*, and *fleet* with its project.

    Raises: ConfigError: no project is named anywhere, or no emulator runs where one was named.
    """
    options = options_of(door)
    project = fleet.project or project_finder(options, os.environ)()
    if options.store == DAEMON_STORE:
        options = replace(options, store=store_name(fleet.name, project))
    return options, replace(fleet, project=project)


def options_of(door: Door) -> Options:
    """`store`: a folder, a file `<folder>/<name>.sqlite`, or a name beside the others; else as the environment says."""
    store, state, name = door.store, "", ""
    if isinstance(store, Path) and store.suffix == ".sqlite":
        state, name = str(store.parent), store.stem
    elif isinstance(store, Path) or "/" in store or store in (".", ".."):
        path = Path(store)
        state, name = (str(path.parent), path.stem) if path.suffix == ".sqlite" else (str(path), "")
    else:
        name = store.removesuffix(".sqlite")
    options = resolve(os.environ, state=state, endpoint=door.endpoint, project=door.project)
    if not name:
        return options
    if name == DAEMON_STORE:
        raise ConfigError(f"store={name!r} is the daemon's; choose another name")
    check_store_name(name)
    return replace(options, store=name)
