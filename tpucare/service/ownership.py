"""
Which store of a state folder knows a node or a slot, and who cares for it now.

The daemon has one store, and the Python door one per host or prefix, all under one owner. Who deletes from another
process must find the right one: whoever cares there is told, and what no store ever knew is not touched. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpucare.adapters.state import owner as owners
from tpucare.adapters.state.store import holder, open_reader
from tpucare.model.errors import StoreError
from tpucare.model.memory import Memory
from tpucare.model.resources import Node
from tpucare.service.options import Options

SUFFIX = ".sqlite"


@dataclass(frozen=True, slots=True)
class KnownStore:
    """One store as it was a moment ago. `fleets`: every fleet that it has known, ended ones included."""

    name: str
    memories: Mapping[str, Memory]
    fleets: frozenset[str]


def known_stores(folder: Path) -> tuple[KnownStore, ...]:
    """Every store in the state folder *folder*. Raises: StoreError: one of them cannot be read."""
    names = sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
    return tuple(_read(folder, name) for name in names if owners.is_store_name(name))


def _read(folder: Path, name: str) -> KnownStore:
    with open_reader(folder, name=name) as store:
        memories = store.memories()
        fleets = frozenset(store.fleets()) | {memory.fleet for memory in memories.values()}
    return KnownStore(name, memories, fleets)


def store_of_slot(stores: tuple[KnownStore, ...], slot: str) -> KnownStore | None:
    """The one that has something of it, where several have known a slot of that name."""
    known = [store for store in stores if slot in store.memories]
    return max(known, key=lambda store: bool(store.memories[slot].nodes or store.memories[slot].creates), default=None)


def store_of_node(stores: tuple[KnownStore, ...], node: Node) -> KnownStore | None:
    """The store that knows the node's slot, else one that has known its fleet."""
    by_fleet = next((store for store in stores if node.fleet in store.fleets), None)
    return store_of_slot(stores, node.slot) or by_fleet


def socket_of(options: Options, store: str) -> Path:
    """Where the caretaker of that store takes orders."""
    return replace(options, store=store).socket


def caretaker_of(options: Options, store: str) -> int | None:
    """Process id of whoever takes care of that store now, or None."""
    try:
        return holder(options.state, store)
    except StoreError:
        return None
