"""
The difference between two listings of a project. Pure; the client and the emulator share it, so both mean the same.

A fleet of ten thousand nodes is listed every few seconds and hardly changes, so a node is translated only when its raw
record differs from that of the last listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Generic, TypeVar

from tpucare.model.resources import Listing, Node, NodeKey

Raw = TypeVar("Raw")


def key_of(name: str, project: str) -> NodeKey | None:
    """
    Key of a resource name `projects/*/locations/ZONE/nodes/NAME`, or None for a name of another form.

    The key gets *project*, the id of the request: the name in the answer may have the project's number instead.
    """
    parts = name.split("/")
    return NodeKey(project, parts[3], parts[5]) if len(parts) == 6 else None


class SnapshotDiffer(Generic[Raw]):
    """
    The nodes of one project as last listed. Not thread-safe: one listing of a project is under way at a time.

    `translate` turns a raw record into a Node; raw records are compared by ``==``. A new raw record replaces an equal
    old one: the old one would keep the whole answer that it came with in memory.
    """

    def __init__(self, project: str, translate: Callable[[NodeKey, Raw], Node]) -> None:
        self.project = project
        self._translate = translate
        self._keys: dict[str, NodeKey] = {}
        # Two dicts, not one of pairs: ten thousand new pairs per listing would start the garbage collector.
        self._raws: dict[NodeKey, Raw] = {}
        self._nodes: dict[NodeKey, Node] = {}
        self._unreachable: frozenset[NodeKey] = frozenset()

    def full(
        self, records: Iterable[tuple[str, Raw]], unreachable: Iterable[str], cloud_time: datetime | None
    ) -> Listing:
        """
        The next listing: *records* are (resource name, raw record) of one complete answer.

        `unreachable`: zones, plain or as resource names. The record of a node there is kept, so that a node that
        vanished meanwhile is reported as gone once its zone answers; a node that is back counts as changed.
        """
        silent_zones = frozenset(name.rsplit("/", 1)[-1] for name in unreachable)
        changed: set[NodeKey] = set()
        raws, nodes = self._read(records, silent_zones, changed)
        missing = self._nodes.keys() - nodes.keys()
        hidden = frozenset(key for key in missing if key.zone in silent_zones)
        known = {**nodes, **{key: self._nodes[key] for key in hidden}} if hidden else nodes
        raws.update((key, self._raws[key]) for key in hidden)
        self._raws, self._nodes, self._unreachable = raws, known, hidden
        return Listing(self.project, nodes, frozenset(changed), frozenset(missing - hidden), silent_zones, cloud_time)

    def incremental(self, changes: Iterable[tuple[str, Raw | None]], cloud_time: datetime | None) -> Listing | None:
        """
        The next listing from the records that may have changed: (resource name, raw record, or None for no such node).

        Every zone answers. Returns None and changes nothing if the last listing left zones out: then call `full`.
        """
        if self._unreachable:
            return None
        changed: set[NodeKey] = set()
        gone: set[NodeKey] = set()
        nodes = self._nodes
        for name, raw in changes:
            key = self._keys.get(name) or key_of(name, self.project)
            if key is None:
                continue
            if nodes is self._nodes:
                nodes = dict(nodes)
            if raw is None:
                self._keys.pop(name, None)
                self._raws.pop(key, None)
                if nodes.pop(key, None) is not None:
                    gone.add(key)
                continue
            nodes[key] = self._refresh(key, raw, changed)
            self._keys[name], self._raws[key] = key, raw
        self._nodes = nodes
        return Listing(self.project, nodes, frozenset(changed), frozenset(gone), frozenset(), cloud_time)

    def _read(
        self, records: Iterable[tuple[str, Raw]], silent_zones: frozenset[str], changed: set[NodeKey]
    ) -> tuple[dict[NodeKey, Raw], dict[NodeKey, Node]]:
        keys: dict[str, NodeKey] = {}
        raws: dict[NodeKey, Raw] = {}
        nodes: dict[NodeKey, Node] = {}
        for name, raw in records:
            key = self._keys.get(name) or key_of(name, self.project)
            if key is None or key.zone in silent_zones:
                continue
            keys[name], raws[key] = key, raw
            nodes[key] = self._refresh(key, raw, changed)
        self._keys = keys
        return raws, nodes

    def _refresh(self, key: NodeKey, raw: Raw, changed: set[NodeKey]) -> Node:
        """The node of *key* from now on, added to *changed* if it differs; an equal record keeps the old object."""
        before, last = self._nodes.get(key), self._raws.get(key)
        if before is not None and (last is raw or last == raw):
            node = before
        else:
            node = self._translate(key, raw)
            if before is not None and before == node:
                node = before
        if node is not before or key in self._unreachable:
            changed.add(key)
        return node
