"""
The stores of one state folder: which of them lie there, which one a word means, and which process holds each.

The daemon has one store, the Python API one per project and host (or prefix); all bear one owner. So each process has
to know which other nodes of that owner are cared for, two stores must not hold slots of one name, and a person who
names a slot means the store that knows it. Everything that concerns more than one store is here; whatever reads several
of them (`status`, `plan`, sweeps, deletions) asks `Stores`. Reads only, and takes no lock.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpucare.adapters.state import folder as state_folder
from tpucare.model.errors import ConfigError, StoreError
from tpucare.model.memory import DesiredState, FleetRecord, Memory
from tpucare.model.resources import Node, QueuedResource
from tpucare.service.options import DAEMON_STORE, Options

# A new fleet of another store is seen this late: by then it has had no time to get a node that could be an orphan.
LOOK_AGAIN_SECONDS = 5.0
_NAME_LIMIT = 63
_UNSUITABLE = re.compile(r"[^a-z0-9._-]")


def store_name(fleet: str, project: str) -> str:
    """The store of a host or prefix: `<fleet>.<project>`, shortened where a file name has no room for it."""
    plain = f"{fleet}.{_UNSUITABLE.sub('_', project)}"
    if plain == f"{fleet}.{project}" and len(plain) <= _NAME_LIMIT:
        return plain
    digest = hashlib.blake2b(project.encode(), digest_size=6).hexdigest()
    return f"{plain[: _NAME_LIMIT - len(digest) - 1]}.{digest}"


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """One store as it was a moment ago. `records`: fleets as last accepted, ended ones included."""

    name: str
    memories: Mapping[str, Memory]
    records: Mapping[str, FleetRecord]

    @property
    def fleets(self) -> frozenset[str]:
        """Every fleet that this store has known."""
        return frozenset(self.records) | {memory.fleet for memory in self.memories.values()}

    def is_of_another_project(self, project: str) -> bool:
        """Stores of the Python API are of one project each, and their names say which."""
        homes = {store_name(fleet, project) for fleet in self.fleets}
        return self.name != DAEMON_STORE and "." in self.name and bool(homes) and self.name not in homes

    def wants_fleet(self, fleet: str) -> bool:
        """Whether *fleet* was accepted here and not taken down since."""
        record = self.records.get(fleet)
        return record is not None and record.wish is not DesiredState.DOWN

    def holds_slot(self, slot: str) -> bool:
        """Whether something of *slot* exists or may come to exist by this store."""
        memory = self.memories.get(slot)
        if memory is None:
            return False
        is_wanted = memory.wish is not DesiredState.DOWN and self.wants_fleet(memory.fleet)
        return bool(memory.ours or memory.asked_for) or is_wanted

    def is_live(self, word: str) -> bool:
        """Whether any slot that the fleet or slot *word* means has a node, an open create, or is to have one."""
        named = [memory for slot, memory in self.memories.items() if word in (slot, memory.fleet)]
        return any(memory.ours or memory.asked_for or memory.wish is not DesiredState.DOWN for memory in named)


class Stores:
    """
    The stores of the folder `options.state`.

    Where `options.store` names a store of the Python API, that one is meant whatever lies beside it.
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def names(self) -> list[str]:
        """Names of all stores in the folder, the daemon's first."""
        found = state_folder.store_names(self._options.state)
        return sorted(found, key=lambda name: (name != DAEMON_STORE, name))

    def is_unused(self) -> bool:
        """Whether nothing was ever cared for from this folder."""
        return not self.names() and not (self._options.state / state_folder.OWNER_FILE).exists()

    def options_of(self, name: str) -> Options:
        """The options for store *name*: its `socket` is where the process that holds it takes commands."""
        return replace(self._options, store=name)

    def holder(self, name: str) -> int | None:
        """Id of the process that holds store *name* now; None: no process does, or its id is unknown."""
        try:
            return state_folder.holder(self._options.state, name)
        except StoreError:
            return None

    # --- which one is meant ------------------------------------------------------------------------------------------

    def all_options(self) -> list[Options]:
        """Options of every store, the daemon's first; of the daemon's where there is none yet."""
        if self._options.store != DAEMON_STORE:
            return [self._options]
        return [self.options_of(name) for name in self.names()] or [self._options]

    def options_for(self, word: str) -> Options:
        """Options of the store that knows the fleet or slot *word*, a live one first; else of the daemon's."""
        if not word or self._options.store != DAEMON_STORE or self.names() in ([], [DAEMON_STORE]):
            return self._options
        known = [store for store in self.readable() if word in store.memories or word in store.fleets]
        found = min(known, key=lambda store: not store.is_live(word), default=None)
        return self.options_of(found.name) if found is not None else self._options

    # --- what they hold ----------------------------------------------------------------------------------------------

    def read(self, name: str) -> StoreSnapshot:
        """Raises: StoreError: there is none, or it cannot be read."""
        # 100 ms that a command without stores to read does without.
        from tpucare.adapters.state.store import open_reader

        with open_reader(self._options.state, name=name) as store:
            return StoreSnapshot(name, store.memories(), store.fleets())

    def read_all(self) -> tuple[StoreSnapshot, ...]:
        """Raises: StoreError: one of them cannot be read."""
        return tuple(self.read(name) for name in self.names())

    def readable(self) -> list[StoreSnapshot]:
        """All that can be read; a command for one of the others says what is wrong with it."""
        found = []
        for name in self.names():
            try:
                found.append(self.read(name))
            except StoreError:
                continue
        return found

    def known_fleets(self, name: str) -> frozenset[str]:
        """Fleets that store *name* has accepted; cheap, for memories are not read. Raises: StoreError."""
        from tpucare.adapters.state.store import open_reader

        with open_reader(self._options.state, name=name) as store:
            return frozenset(store.fleets())


def store_of_slot(stores: Sequence[StoreSnapshot], slot: str) -> StoreSnapshot | None:
    """The store that knows *slot*; of several, one where it has a node or an open create."""
    known = [store for store in stores if slot in store.memories]
    return max(
        known, key=lambda store: bool(store.memories[slot].nodes or store.memories[slot].asked_for), default=None
    )


def store_of_node(stores: Sequence[StoreSnapshot], node: Node) -> StoreSnapshot | None:
    """The store that knows the slot of *node*, else one that has known its fleet."""
    by_fleet = next((store for store in stores if node.fleet in store.fleets), None)
    return store_of_slot(stores, node.slot) or by_fleet


class Neighbours:
    """What the other stores of the folder care for, beside the one that `options` name. Thread-safe."""

    def __init__(self, options: Options, monotonic: Callable[[], float]) -> None:
        self._stores, self._own, self._monotonic = Stores(options), options.store, monotonic
        self._folder = options.state
        self._lock = threading.Lock()
        self._fleets: frozenset[str] = frozenset()
        self._all_read = True
        self._read_again_at = float("-inf")

    def care_for(self, node: Node | QueuedResource) -> bool:
        """Whether *node*, which bears our owner label, is of a fleet that another store has known."""
        with self._lock:
            if self._monotonic() >= self._read_again_at:
                self._read_fleets()
                self._read_again_at = self._monotonic() + LOOK_AGAIN_SECONDS
            # A store that cannot be read now may know any fleet, so no node may be swept.
            return not self._all_read or node.fleet in self._fleets

    def _read_fleets(self) -> None:
        found: set[str] = set()
        self._all_read = True
        for name in self._stores.names():
            if name == self._own:
                continue
            try:
                found |= self._stores.known_fleets(name)
            except StoreError:
                self._all_read = False
        self._fleets = frozenset(found)

    def refuse_shared(self, fleet: str, slots: Iterable[str], project: str) -> None:
        """
        Slots are unique over all stores of a folder, since their nodes bear one owner.

        Raises: ConfigError: another store cares for *fleet*, or for one of *slots*. StoreError.
        """
        wanted = sorted(slots)
        for store in self._stores.read_all():
            if store.name == self._own or store.is_of_another_project(project):
                continue
            taken = [*filter(store.holds_slot, wanted), *filter(store.wants_fleet, [fleet])]
            if taken:
                raise ConfigError(
                    f"{taken[0]} is cared for already, by store {store.name} in {self._folder}: "
                    f"`tpucare down {taken[0]}` ends it there, or choose another name"
                )
