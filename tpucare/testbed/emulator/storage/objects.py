"""
The buckets of an emulated project: objects with generations, preconditions, listings. No HTTP: see `api`.

Strongly consistent, as Cloud Storage is: a written object is listed at once. Everything is in memory and is lost when
the emulator ends. Source: the JSON API reference of Cloud Storage, pages on objects and request preconditions.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
NAME_LIMIT = 1024
COMPOSE_LIMIT = 32


class ObjectError(Exception):
    """A refusal: HTTP status and the `reason` of Cloud Storage's error body."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One generation of one object; only the newest is kept. `metadata`: the caller's own keys."""

    bucket: str
    name: str
    generation: int
    content: bytes = field(repr=False)
    content_type: str
    metadata: Mapping[str, str]
    created: datetime
    updated: datetime
    metageneration: int = 1
    components: int = 0

    @property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.content, usedforsecurity=False).digest()).decode()

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}/{self.metageneration}".encode()).decode()


@dataclass(frozen=True, slots=True)
class Conditions:
    """Preconditions of one call; a generation of 0 means that the object must not exist."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None

    def check(self, found: StoredObject | None, *, reading: bool = False) -> None:
        """Raises: ObjectError: 412, or 304 where a read asked for a newer generation."""
        generation = found.generation if found else 0
        metageneration = found.metageneration if found else 0
        if self.generation is not None and self.generation != generation:
            raise _not_met()
        if self.metageneration is not None and self.metageneration != metageneration:
            raise _not_met()
        same = generation == self.not_generation or (found and metageneration == self.not_metageneration)
        if same:
            raise ObjectError(304, "notModified", "Not Modified") if reading and found else _not_met()


NO_CONDITIONS = Conditions()


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """One page of a listing. `prefixes`: the names up to a delimiter, each once."""

    items: tuple[StoredObject, ...]
    prefixes: tuple[str, ...]
    next_token: str = ""


@dataclass(frozen=True, slots=True)
class ObjectQuery:
    """A listing of names with `prefix`, from `start` (inclusive) to `end` (exclusive), cut at `delimiter`."""

    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    end: str = ""
    glob: str = ""
    trailing: bool = False
    size: int = 1000
    after: str = ""


class ObjectStore:
    """All buckets. Thread-safe. Every method raises ObjectError: 404 for a bucket or object that is not there."""

    def __init__(self, now: Callable[[], datetime], buckets: Iterable[str] = ()) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in buckets}
        self._made: dict[str, datetime] = {name: now() for name in self._buckets}
        self._generation = 0

    # --- buckets

    def buckets(self) -> dict[str, datetime]:
        """Names, and the time of each one's creation."""
        with self._lock:
            return dict(sorted(self._made.items()))

    def make_bucket(self, name: str) -> datetime:
        with self._lock:
            if not _BUCKET.fullmatch(name):
                raise ObjectError(400, "invalid", f"Invalid bucket name: '{name}'")
            if name in self._buckets:
                raise ObjectError(409, "conflict", "Your previous request to create the named bucket succeeded.")
            self._buckets[name], self._made[name] = {}, self._now()
            return self._made[name]

    def bucket(self, name: str) -> datetime:
        """The time of its creation."""
        with self._lock:
            self._of(name)
            return self._made[name]

    def delete_bucket(self, name: str) -> None:
        with self._lock:
            if self._of(name):
                raise ObjectError(409, "conflict", "The bucket you tried to delete is not empty.")
            del self._buckets[name], self._made[name]

    def _of(self, bucket: str) -> dict[str, StoredObject]:
        if bucket not in self._buckets:
            raise ObjectError(404, "notFound", "The specified bucket does not exist.")
        return self._buckets[bucket]

    # --- objects

    def insert(
        self,
        bucket: str,
        name: str,
        content: bytes,
        *,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
        conditions: Conditions = NO_CONDITIONS,
        components: int = 0,
    ) -> StoredObject:
        """A new generation, visible whole or not at all."""
        if not name or len(name.encode()) > NAME_LIMIT:
            raise ObjectError(400, "required" if not name else "invalid", "Required object name, at most 1024 bytes")
        with self._lock:
            objects = self._of(bucket)
            conditions.check(objects.get(name))
            now = self._now()
            # As of the real service: microseconds, and never the same number twice.
            self._generation = max(self._generation + 1, int(now.timestamp() * 1_000_000))
            made = StoredObject(
                bucket,
                name,
                self._generation,
                content,
                content_type,
                dict(metadata or {}),
                now,
                now,
                components=components,
            )
            objects[name] = made
            return made

    def get(
        self, bucket: str, name: str, *, generation: int | None = None, conditions: Conditions = NO_CONDITIONS
    ) -> StoredObject:
        with self._lock:
            found = self._of(bucket).get(name)
            if found is None or generation not in (None, found.generation):
                raise ObjectError(404, "notFound", f"No such object: {bucket}/{name}")
            conditions.check(found, reading=True)
            return found

    def delete(
        self, bucket: str, name: str, *, generation: int | None = None, conditions: Conditions = NO_CONDITIONS
    ) -> None:
        with self._lock:
            found = self.get(bucket, name, generation=generation)
            conditions.check(found)
            del self._buckets[bucket][name]

    def patch(
        self, bucket: str, name: str, changes: Mapping[str, object], *, conditions: Conditions = NO_CONDITIONS
    ) -> StoredObject:
        """Change `contentType` and `metadata`, whose keys are removed by null."""
        with self._lock:
            found = self.get(bucket, name)
            conditions.check(found)
            metadata, own = dict(found.metadata), changes.get("metadata")
            if isinstance(own, Mapping):
                metadata = {key: str(value) for key, value in {**metadata, **own}.items() if value is not None}
            changed = replace(
                found,
                content_type=str(changes.get("contentType", found.content_type)),
                metadata=metadata,
                updated=self._now(),
                metageneration=found.metageneration + 1,
            )
            self._buckets[bucket][name] = changed
            return changed

    def copy(
        self,
        source: tuple[str, str],
        target: tuple[str, str],
        *,
        source_conditions: Conditions = NO_CONDITIONS,
        conditions: Conditions = NO_CONDITIONS,
    ) -> StoredObject:
        """*source* and *target*: bucket and name."""
        with self._lock:
            found = self.get(*source)
            source_conditions.check(found)
            return self.insert(
                *target,
                found.content,
                content_type=found.content_type,
                metadata=found.metadata,
                conditions=conditions,
            )

    def compose(
        self, bucket: str, sources: Sequence[str], name: str, content_type: str, conditions: Conditions
    ) -> StoredObject:
        """One object of up to 32 others, in their order."""
        if not 1 <= len(sources) <= COMPOSE_LIMIT:
            raise ObjectError(400, "invalid", f"The number of source components must be between 1 and {COMPOSE_LIMIT}.")
        with self._lock:
            parts = [self.get(bucket, source) for source in sources]
            return self.insert(
                bucket,
                name,
                b"".join(part.content for part in parts),
                content_type=content_type or parts[0].content_type,
                conditions=conditions,
                components=sum(part.components or 1 for part in parts),
            )

    def list(self, bucket: str, asked: ObjectQuery) -> ObjectPage:
        """One page in the order of names; its size counts items and prefixes."""
        with self._lock:
            objects = self._of(bucket)
            names = sorted(objects)
        pattern = Glob(asked.glob) if asked.glob else None
        items: list[StoredObject] = []
        prefixes: list[str] = []
        last = ""
        for name in names[bisect_left(names, max(asked.prefix, asked.start)) :]:
            if not name.startswith(asked.prefix) or (asked.end and name >= asked.end):
                break
            cut = _cut(name, asked)
            entry = cut or name
            if entry <= asked.after or entry == last or (pattern and not pattern.matches(entry)):
                continue
            if len(items) + len(prefixes) >= asked.size:
                return ObjectPage(tuple(items), tuple(prefixes), last)
            last = entry
            if cut:
                prefixes.append(cut)
            if (not cut or (asked.trailing and cut == name)) and (found := objects.get(name)) is not None:
                items.append(found)
        return ObjectPage(tuple(items), tuple(prefixes))


def _cut(name: str, asked: ObjectQuery) -> str:
    """The name up to the first delimiter behind the prefix, with it; empty when there is none."""
    if not asked.delimiter:
        return ""
    head, found, _ = name[len(asked.prefix) :].partition(asked.delimiter)
    return asked.prefix + head + found if found else ""


class Glob:
    """
    `matchGlob`: `*` and `?` stop at slashes, `**` does not, `**/` may match nothing; `[a-z]`, `{a,b}` as in a shell.

    The time is at most the length of the pattern times that of the name: all possible ends of a match are followed at
    once, where a regular expression would try one after the other.
    """

    def __init__(self, glob: str) -> None:
        """Raises: ObjectError: a malformed set or brace."""
        self._parts, rest = _alternatives(glob, 0, 0)
        assert rest == len(glob)

    def matches(self, name: str) -> bool:
        return len(name) in _ends(self._parts[0], name, {0})


BRACES_LIMIT = 8
_Part = re.Pattern[str] | list["list[_Part]"] | str
"""One character's pattern, alternatives, or `*`, `**` and `**/`."""


def _alternatives(glob: str, place: int, depth: int) -> tuple[list[list[_Part]], int]:
    """The alternatives between commas from *place* to the closing brace or the end, and the place after it."""
    found: list[list[_Part]] = [[]]
    while place < len(glob):
        char = glob[place]
        if depth and char in ",}":
            place += 1
            if char == "}":
                return found, place
            found.append([])
        elif char == "{":
            if depth == BRACES_LIMIT:
                raise ObjectError(400, "invalid", "Invalid matchGlob: braces in braces")
            inner, place = _alternatives(glob, place + 1, depth + 1)
            found[-1].append(inner)
        elif char == "*":
            wild = next(wild for wild in ("**/", "**", "*") if glob.startswith(wild, place))
            found[-1].append(wild)
            place += len(wild)
        elif char == "[" and (end := glob.find("]", place + 2)) > 0:
            found[-1].append(_set_of(glob[place + 1 : end]))
            place = end + 1
        else:
            found[-1].append(re.compile("[^/]" if char == "?" else re.escape(char)))
            place += 1
    if depth:
        raise ObjectError(400, "invalid", "Invalid matchGlob: a brace that is not closed")
    return found, place


def _set_of(inside: str) -> re.Pattern[str]:
    escaped = inside.replace("\\", "\\\\")
    try:
        return re.compile("[" + ("^" + escaped[1:] if escaped[0] in "!^" else escaped) + "]", re.DOTALL)
    except re.error as error:
        raise ObjectError(400, "invalid", f"Invalid matchGlob: {error}") from None


def _ends(parts: Sequence[_Part], name: str, ends: set[int]) -> set[int]:
    """Places in *name* at which a match of *parts* may end that begins at one of *ends*."""
    for part in parts:
        if not ends:
            return ends
        first = min(ends)
        if isinstance(part, re.Pattern):
            ends = {end + 1 for end in ends if part.match(name, end)}
        elif isinstance(part, list):
            ends = {end for inner in part for end in _ends(inner, name, ends)}
        elif part == "**":
            ends = set(range(first, len(name) + 1))
        elif part == "**/":
            ends = ends | {place + 1 for place in range(first, len(name)) if name[place] == "/"}
        else:
            ends = set(ends)
            for place in range(first, len(name)):
                if place in ends and name[place] != "/":
                    ends.add(place + 1)
    return ends


def _not_met() -> ObjectError:
    return ObjectError(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")
