"""
What differs between two listings of a project. Pure; shared by the client and by stand-ins, so that both mean the same.

A fleet of ten thousand nodes is listed every few seconds and hardly changes, so a node is translated only when its raw
record differs from the one of the last listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Generic, TypeVar

from tpucare.model.resources import Listing, Node, NodeKey

Raw = TypeVar("Raw")


def key_of(name: str, project: str) -> NodeKey | None:
    """
    Key of a resource name `projects/*/locations/ZONE/nodes/NAME`, or None when it is not of that form.

    The service may answer with the project's number where it was asked by id, so *project* is what was asked with.
    """
    parts = name.split("/")
    return NodeKey(project, parts[3], parts[5]) if len(parts) == 6 else None


class SnapshotDiffer(Generic[Raw]):
    """
    The nodes of one project as last listed. Not thread-safe: one listing of a project is under way at a time.

    `translate` makes a Node of a raw record; raw records are compared by ``==``. Every raw record is replaced by its
    newest equal: an old one would keep the whole answer alive that it came with.
    """

    def __init__(self, project: str, translate: Callable[[NodeKey, Raw], Node]) -> None:
        self.project = project
        self._translate = translate
        self._keys: dict[str, NodeKey] = {}
        # Two dicts rather than one of pairs: ten thousand new pairs per listing are what the garbage collector counts.
        self._raws: dict[NodeKey, Raw] = {}
        self._nodes: dict[NodeKey, Node] = {}
        self._dark: frozenset[NodeKey] = frozenset()

    def take(
        self, records: Iterable[tuple[str, Raw]], unreachable: Iterable[str], cloud_time: datetime | None
    ) -> Listing:
        """
        The next listing: *records* are (resource name, raw record) of one complete answer.

        `unreachable`: zones, plain or as resource names. What is known of a node there outlives the darkness, so that
        one that vanished meanwhile is reported as gone once its zone answers; one that is back counts as changed.
        """
        dark_zones = frozenset(name.rsplit("/", 1)[-1] for name in unreachable)
        changed: set[NodeKey] = set()
        raws, nodes = self._read(records, dark_zones, changed)
        missing = self._nodes.keys() - nodes.keys()
        dark = frozenset(key for key in missing if key.zone in dark_zones)
        known = {**nodes, **{key: self._nodes[key] for key in dark}} if dark else nodes
        raws.update((key, self._raws[key]) for key in dark)
        self._raws, self._nodes, self._dark = raws, known, dark
        return Listing(self.project, nodes, frozenset(changed), frozenset(missing - dark), dark_zones, cloud_time)

    def amend(self, changes: Iterable[tuple[str, Raw | None]], cloud_time: datetime | None) -> Listing | None:
        """
        The next listing from what may have changed since the last one: (resource name, raw record or None = not there).

        Every zone answers. None, and nothing done, when the last one left zones out: then only `take` can tell.
        """
        if self._dark:
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
        self, records: Iterable[tuple[str, Raw]], dark_zones: frozenset[str], changed: set[NodeKey]
    ) -> tuple[dict[NodeKey, Raw], dict[NodeKey, Node]]:
        keys: dict[str, NodeKey] = {}
        raws: dict[NodeKey, Raw] = {}
        nodes: dict[NodeKey, Node] = {}
        for name, raw in records:
            key = self._keys.get(name) or key_of(name, self.project)
            if key is None or key.zone in dark_zones:
                continue
            keys[name], raws[key] = key, raw
            nodes[key] = self._refresh(key, raw, changed)
        self._keys = keys
        return raws, nodes

    def _refresh(self, key: NodeKey, raw: Raw, changed: set[NodeKey]) -> Node:
        """*key* as it is from now on; a node whose record says nothing new keeps the old object."""
        before, last = self._nodes.get(key), self._raws.get(key)
        if before is not None and (last is raw or last == raw):
            node = before
        else:
            node = self._translate(key, raw)
            if before is not None and before == node:
                node = before
        if node is not before or key in self._dark:
            changed.add(key)
        return node
