"""
Text of a YAML file -> plain values that know their line, or a problem that names it.

Why not `yaml.safe_load`: it drops positions, lets the second of two equal keys win silently, builds dates and 1.1
booleans out of plain words, and expands aliases without end. Here values follow the core schema of YAML 1.2 (`on` and
`yes` are text), numbers keep the text they were written as, and size, depth and expansion are bounded. The meaning of
the values is left to `schema`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeAlias

import yaml

from tpucare.model.errors import Problem
from tpucare.model.text import shown

KeyPath: TypeAlias = tuple[str | int, ...]

SIZE_LIMIT_BYTES = 256 * 1024
DEPTH_LIMIT = 32
VALUES_LIMIT = 20_000

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNREADABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,4})?")
_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_HARMLESS_TAGS = frozenset({None, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))})
_NEEDS_QUOTES = re.compile(r"""[:\-]\s+[{\[*&!%@`]""")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_-]+")


class Unreadable(Exception):
    """The text cannot be read as YAML; `problem` says why."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(line, "", text)


class WrittenInt(int):
    """A whole number that remembers how it was written: `010` stays `010` in an environment."""

    text: str


class WrittenFloat(float):
    """A number that remembers how it was written: `1e-4` stays `1e-4` in an environment."""

    text: str


@dataclass(slots=True)
class _Node:
    """A value with its line. `size` and `height` count its values and levels, aliases expanded."""

    line: int
    value: object = None
    children: dict[str | int, _Node] = field(default_factory=dict)
    size: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a file: plain values, and the problems that did not stop the reading."""

    value: object
    problems: tuple[Problem, ...]
    root: _Node

    def problem(self, path: KeyPath, text: str) -> Problem:
        """
        *text* at the line and under the dotted name of *path*.

        A path may be longer than the document (a missing key), and may step into index 0 of a mapping that stands for
        a list of one.
        """
        node, name = self.root, ""
        for step in path:
            if step in node.children:
                node, name = node.children[step], _joined(name, step)
            elif isinstance(step, str) and isinstance(node.value, dict):
                return Problem(node.line, _joined(name, step), text)
        return Problem(node.line, name, text)


def read(text: str) -> Document:
    """
    The one document in *text*, at most 256 KB.

    Raises:
        Unreadable: Not YAML, empty, too large, too deep, too many values, or more than one document.
    """
    _refuse_unreadable_text(text)
    composer = _Composer(yaml.parse(text, Loader=_LOADER))
    try:
        root = composer.document()
    except yaml.MarkedYAMLError as error:
        raise _unreadable(error, text) from None
    except yaml.YAMLError as error:
        raise Unreadable(1, f"is not YAML: {shown(str(error).splitlines()[0])}") from None
    return Document(root.value, tuple(composer.problems), root)


class _Composer:
    """
    Composes nodes out of parser events. Recursion is bounded by DEPTH_LIMIT, total work by VALUES_LIMIT.

    Why not `yaml.compose`: in C it recurses without a bound, so that 200 KB of `[` overflow the stack and end the
    process; it makes a cycle of an alias inside its own anchor, and its nodes no longer tell the line of an alias.
    """

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self.problems: list[Problem] = []
        self._events = events
        self._anchors: dict[str, _Node] = {}
        self._values = 0

    def document(self) -> _Node:
        root: _Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise Unreadable(_line(event), "holds more than one document; one fleet per file")
                root = self._node(next(self._events), ())
        if root is None or root.value is None:
            raise Unreadable(1, "is empty")
        return root

    def _node(self, event: yaml.Event, path: KeyPath) -> _Node:
        if len(path) >= DEPTH_LIMIT:
            raise _too_deep(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path)
        self._count(event, 1)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.tag not in _HARMLESS_TAGS:
            self._report(event, path, f"the tag {shown(event.tag)} is not supported; write plain values")
        node = _Node(_line(event))
        if isinstance(event, yaml.ScalarEvent):
            node.value = scalar(event.value) if event.implicit[0] else event.value
        else:
            self._compose_children(node, path, in_mapping=isinstance(event, yaml.MappingStartEvent))
        if event.anchor is not None:
            # Registered only after its content, so that an alias inside its own anchor is an error, not a cycle.
            self._anchors[event.anchor] = node
        return node

    def _compose_children(self, node: _Node, path: KeyPath, *, in_mapping: bool) -> None:
        while not isinstance(event := next(self._events), yaml.CollectionEndEvent):
            step = self._key(event, path) if in_mapping else len(node.children)
            below = (*path, "?" if step is None or step == "" else step)
            child = self._node(next(self._events) if in_mapping else event, below)
            if step in node.children:
                self._report(event, (*path, step), f"is a duplicate, first on line {node.children[step].line}")
            elif step is not None:
                node.children[step] = replace(child, line=_line(event))
                node.size += child.size
                node.height = max(node.height, child.height + 1)
        values = {step: child.value for step, child in node.children.items()}
        node.value = values if in_mapping else list(values.values())

    def _key(self, event: yaml.Event, path: KeyPath) -> str | None:
        """A key as written, or None (after a report) if it is not a word."""
        if isinstance(event, yaml.ScalarEvent):
            self._count(event, 1)
            if event.value != "<<" or not event.implicit[0]:
                return str(event.value)
            self._report(event, path, "merge keys (<<) are not supported; write the keys out")
        else:
            self._node(event, (*path, "?"))
            self._report(event, path, "a key must be a word")
        return None

    def _alias(self, event: yaml.AliasEvent, path: KeyPath) -> _Node:
        target = self._anchors.get(event.anchor or "")
        if target is None:
            raise Unreadable(_line(event), f"*{shown(event.anchor)} does not refer to a complete anchor before it")
        if len(path) + target.height > DEPTH_LIMIT:
            raise _too_deep(event)
        self._count(event, target.size)
        return target

    def _count(self, event: yaml.Event, values: int) -> None:
        self._values += values
        if self._values > VALUES_LIMIT:
            raise Unreadable(_line(event), f"holds more than {VALUES_LIMIT:,} values, aliases expanded")

    def _report(self, event: yaml.Event, path: KeyPath, text: str) -> None:
        self.problems.append(Problem(_line(event), reduce(_joined, path, ""), text))


def named(text: str, key: str) -> str:
    """Value of the top-level *key* as text; empty if the key is missing or *text* cannot be read."""
    try:
        value = read(text).value
    except Unreadable:
        return ""
    return str(value.get(key) or "") if isinstance(value, dict) else ""


def differences(before: str, after: str) -> list[tuple[str, str, str]]:
    """Keys whose values differ, as (dotted key, old, new); an absent value is "-". Empty if a text cannot be read."""
    try:
        old, new = (dict(_leaves(read(text).value)) for text in (before, after))
    except Unreadable:
        return []
    keys = dict.fromkeys((*old, *new))
    return [(key, old.get(key, "-"), new.get(key, "-")) for key in keys if old.get(key, "-") != new.get(key, "-")]


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, _joined(path, str(key)))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, _joined(path, number))
    elif isinstance(value, list):
        yield path, shown("[" + ", ".join(map(str, value)) + "]")
    else:
        yield path, shown(getattr(value, "text", value) if value is not None else "-")


def scalar(text: str) -> object:
    """The value of a plain scalar by the core schema of YAML 1.2, without octal, hexadecimal, infinity and NaN."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    number: WrittenInt | WrittenFloat
    if _INTEGER.fullmatch(text):
        number = WrittenInt(text)
    elif _FLOAT.fullmatch(text):
        number = WrittenFloat(text)
    else:
        return text
    number.text = text
    return number


def _refuse_unreadable_text(text: str) -> None:
    if len(text) > SIZE_LIMIT_BYTES or len(text.encode("utf-8", "surrogatepass")) > SIZE_LIMIT_BYTES:
        raise Unreadable(1, f"is larger than {SIZE_LIMIT_BYTES // 1024} KB")
    bad = _UNREADABLE.search(text)
    if bad is not None:
        line = text.count("\n", 0, bad.start()) + 1
        raise Unreadable(line, f"holds the character U+{ord(bad.group()):04X}, which YAML does not allow")


def _unreadable(error: yaml.MarkedYAMLError, text: str) -> Unreadable:
    mark = error.problem_mark or error.context_mark
    number = mark.line if mark is not None else 0
    lines = text.splitlines()
    line = lines[number] if number < len(lines) else ""
    hint = ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        hint = "; indent with spaces, YAML allows no tabs there"
    elif _NEEDS_QUOTES.search(line):
        hint = "; quote a value that begins with one of { [ * & ! % @ `"
    return Unreadable(number + 1, f"is not YAML: {shown(error.problem or 'unreadable')}{hint}")


def _too_deep(event: yaml.Event) -> Unreadable:
    return Unreadable(_line(event), f"is nested deeper than {DEPTH_LIMIT} levels")


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _joined(name: str, step: str | int) -> str:
    """`tpu.zones[0]` of `tpu.zones` and 0; a key with other characters is in brackets: `job.files[config.yaml]`."""
    if isinstance(step, int):
        return f"{name}[{step}]"
    word = step if _PLAIN_WORD.fullmatch(step) and len(step) <= 60 else f"[{shown(step)}]"
    return f"{name}.{word}" if name and not word.startswith("[") else f"{name}{word}"
