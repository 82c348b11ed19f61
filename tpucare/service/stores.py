"""
The stores of one state folder side by side: which one is meant, and what the others care for.

The daemon has one store, the Python API one per project and host (or prefix); all bear one owner. So each has to know
whose the other nodes of that owner are, two must not hold slots of one name, and a person who names a slot means the
store that knows it. Reads only, and takes no lock.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpucare.adapters.state import folder as state_folder
from tpucare.adapters.state.store import DEFAULT_NAME, holder, open_reader
from tpucare.model.errors import ConfigError, StoreError
from tpucare.model.memory import DesiredState, FleetRecord, Memory
from tpucare.model.resources import Node
from tpucare.service.options import Options

# New fleets of neighbours are seen this late: by then they have had no time to get a node that could be a stray.
LOOK_AGAIN_SECONDS = 5.0
_NAME_LIMIT = 63
_UNSUITABLE = re.compile(r"[^a-z0-9._-]")


def store_name(fleet: str, project: str) -> str:
    """Of a host or prefix: `<fleet>.<project>`, shortened where a file's name has no room for it."""
    plain = f"{fleet}.{_UNSUITABLE.sub('_', project)}"
    if plain == f"{fleet}.{project}" and len(plain) <= _NAME_LIMIT:
        return plain
    digest = hashlib.blake2b(project.encode(), digest_size=6).hexdigest()
    return f"{plain[: _NAME_LIMIT - len(digest) - 1]}.{digest}"


class Neighbours:
    """What the other stores of a state folder care for. Thread-safe."""

    def __init__(self, folder: Path, own: str, monotonic: Callable[[], float]) -> None:
        self._folder, self._own, self._monotonic = folder, own, monotonic
        self._lock = threading.Lock()
        self._fleets: frozenset[str] = frozenset()
        self._unread = False
        self._again = float("-inf")

    def care_for(self, node: Node) -> bool:
        """Whether *node*, which bears our owner label, is of a fleet that another store has known."""
        with self._lock:
            if self._monotonic() >= self._again:
                self._look()
                self._again = self._monotonic() + LOOK_AGAIN_SECONDS
            # A store that cannot be read now may know any fleet: its nodes are nobody's to sweep.
            return self._unread or node.fleet in self._fleets

    def _look(self) -> None:
        found: set[str] = set()
        self._unread = False
        for name in store_names(self._folder):
            if name == self._own:
                continue
            try:
                with open_reader(self._folder, name=name) as store:
                    found |= store.fleets().keys()
            except StoreError:
                self._unread = True
        self._fleets = frozenset(found)

    def refuse_shared(self, fleet: str, slots: Iterable[str], project: str) -> None:
        """
        Slots are unique over all stores of a folder, since their nodes bear one owner.

        Raises: ConfigError: another store cares for *fleet*, or for one of *slots*. StoreError.
        """
        wanted = frozenset(slots)
        for store in known_stores(self._folder):
            if store.name == self._own or is_of_another_project(store, project):
                continue
            taken = sorted(slot for slot in wanted & store.memories.keys() if _is_alive(self._folder, store, slot))
            if taken or (fleet in store.fleets and _is_wanted(_records(self._folder, store).get(fleet))):
                what = taken[0] if taken else fleet
                raise ConfigError(
                    f"{what} is cared for already, by store {store.name} in {self._folder}: "
                    f"`tpucare down {what}` ends it there, or choose another name"
                )


def is_of_another_project(store: KnownStore, project: str) -> bool:
    """Stores of the Python door are of one project each, and their names say which."""
    homes = {store_name(fleet, project) for fleet in store.fleets}
    return store.name != DEFAULT_NAME and "." in store.name and bool(homes) and store.name not in homes


def _records(folder: Path, store: KnownStore) -> dict[str, FleetRecord]:
    with open_reader(folder, name=store.name) as reader:
        return reader.fleets()


def _is_wanted(record: FleetRecord | None) -> bool:
    return record is not None and record.wish is not DesiredState.DOWN


def _is_alive(folder: Path, store: KnownStore, slot: str) -> bool:
    memory = store.memories[slot]
    return bool(memory.ours or memory.creates) or (
        memory.wish is not DesiredState.DOWN and _is_wanted(_records(folder, store).get(memory.fleet))
    )


# --- which one is meant ----------------------------------------------------------------------------------------------


def store_names(folder: Path) -> list[str]:
    """Names of the stores that lie in *folder*, the daemon's first."""
    found = sorted(path.stem for path in folder.glob("*.sqlite") if path.is_file())
    return sorted(found, key=lambda name: name != DEFAULT_NAME)


def each(options: Options) -> Iterator[Options]:
    """Options of every store in the state folder, the daemon's first; of the one that is named, if one is."""
    if options.store != DEFAULT_NAME:
        yield options
        return
    for name in store_names(options.state) or [DEFAULT_NAME]:
        yield replace(options, store=name)


def meant(options: Options, word: str) -> Options:
    """Options of the store that knows a fleet or slot *word*, else of the daemon's; that which lives goes first."""
    if not word or options.store != DEFAULT_NAME or store_names(options.state) in ([], [DEFAULT_NAME]):
        return options
    known = [store for store in _readable(options.state) if word in store.fleets or word in store.memories]
    known.sort(key=lambda store: (not _has_something(store, word), store.name != DEFAULT_NAME, store.name))
    return replace(options, store=known[0].name) if known else options


def _has_something(store: KnownStore, word: str) -> bool:
    named = [memory for slot, memory in store.memories.items() if word in (slot, memory.fleet)]
    return any(memory.ours or memory.creates or memory.wish is not DesiredState.DOWN for memory in named)


def _readable(folder: Path) -> list[KnownStore]:
    """One store that cannot be read hides no other one; its own commands say what is wrong with it."""
    found = []
    for name in store_names(folder):
        try:
            with open_reader(folder, name=name) as store:
                memories, fleets = store.memories(), store.fleets()
        except StoreError:
            continue
        found.append(KnownStore(name, memories, frozenset(fleets) | {memory.fleet for memory in memories.values()}))
    return found


__all__ = ["Neighbours", "each", "meant", "store_name", "store_names"]


# --- which store knows a node or a slot, and which process cares for it now -------------------------------------------
# A process that deletes for another has to find the right one: the process that cares there is told, and what no store
# ever knew is not touched.


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
    return tuple(_read(folder, name) for name in names if state_folder.is_store_name(name))


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
