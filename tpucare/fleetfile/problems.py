"""
Pydantic's validation errors -> one line per problem, in the words of a person who edits YAML.

Never quotes the value of a URL, a key or an environment: pydantic's own texts may, so none of them is passed on whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tpucare.fleetfile.schema import COUNT_BOUNDS, COUNT_NUMBER, LATER_KEYS, SECTIONS, SYNONYMS
from tpucare.fleetfile.yaml_document import Document, KeyPath, WrittenFloat, WrittenInt
from tpucare.model.errors import Problem
from tpucare.model.text import hint, nearest, shown

# Nearest words are searched for each problem, so a file of nothing but unknown keys must not cost minutes.
PROBLEMS_LIMIT = 50

_YAML_1_1_WORDS = frozenset({"yes", "no", "on", "off", "y", "n"})
_QUOTED = re.compile(r"'([^']*)'")
# Steps of pydantic's paths that no file has.
_NO_KEYS = ("[key]", COUNT_NUMBER, COUNT_BOUNDS)


def shape_problems(document: Document, error: ValidationError) -> Iterator[Problem]:
    """One problem per finding of *error*, for the first PROBLEMS_LIMIT of them."""
    for finding in islice(error.errors(include_url=False), PROBLEMS_LIMIT):
        yield document.problem(_path(finding), _text(finding))


def _path(finding: ErrorDetails) -> KeyPath:
    return tuple(step for step in finding["loc"] if step not in _NO_KEYS)


def _text(finding: ErrorDetails) -> str:
    kind = finding["type"]
    if kind in _FORMATTERS:
        return _FORMATTERS[kind](finding)
    return _TEXTS.get(kind, "is not valid").format(**finding.get("ctx", {}))


def _unknown_key(finding: ErrorDetails) -> str:
    *path, key = _path(finding)
    section = tuple(step for step in path if isinstance(step, str))
    key = str(key)
    if key in LATER_KEYS:
        return "is not available yet; remove it"
    known = SECTIONS[section].model_fields
    meanings = {word: meant for word, meant in SYNONYMS.items() if meant.partition(":")[0] in known}
    close = nearest(key, [*known, *meanings])
    if close:
        return f"unknown key; nearest: {', '.join(dict.fromkeys(meanings.get(word, word) for word in close))}"
    elsewhere = {name: place for place, model in SECTIONS.items() for name in model.model_fields}
    for name in nearest(key, elsewhere, at_most=1):
        home = ".".join(elsewhere[name])
        return f"unknown key here; {name} belongs {'under ' + home if home else 'to the top level'}"
    return f"unknown key; known are {', '.join(known)}"


def _not_text(finding: ErrorDetails) -> str:
    value = finding["input"]
    if value is None:
        return "is empty; give it a value or remove the key"
    if isinstance(value, WrittenInt | WrittenFloat):
        return f'must be text; quote it: "{shown(value.text)}"'
    if isinstance(value, bool):
        return f'must be text; quote it: "{str(value).lower()}"'
    return f"must be text, not {_kind(value)}; quote a value that begins with {{ or ["


def _not_bool(finding: ErrorDetails) -> str:
    value = finding["input"]
    if isinstance(value, str) and value.lower() in _YAML_1_1_WORDS:
        return f"must be true or false; {value} is text in YAML 1.2"
    return f"must be true or false, not {_kind(value)}"


def _not_a_choice(finding: ErrorDetails) -> str:
    value, choices = finding["input"], _QUOTED.findall(str(finding["ctx"]["expected"]))
    if isinstance(value, str):
        return f"{shown(value)} is not one of {', '.join(choices)}{hint(value, choices)}"
    return f"must be one of {', '.join(choices)}, not {_kind(value)}"


def _not_a_list(finding: ErrorDetails) -> str:
    value = finding["input"]
    example = (
        f"; write [{shown(value)}]" if isinstance(value, str) and finding["loc"][-1] in ("zones", "secrets") else ""
    )
    also = ", or a mapping" if finding["loc"] == ("tpu",) else ""
    return f"must be a list{also}, not {_kind(value)}{example}"


def _not_a_mapping(finding: ErrorDetails) -> str:
    value = finding["input"]
    wanted = "a zone's name or a mapping" if finding["loc"][-2:-1] == ("zones",) else "a mapping"
    if value is None:
        return f"is empty; it must be {wanted}, or removed"
    return f"must be {wanted} (key: value), not {_kind(value)}"


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "text"), (list, "a list"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "a mapping")


_FORMATTERS: Mapping[str, Callable[[ErrorDetails], str]] = {
    "extra_forbidden": _unknown_key,
    "value_error": lambda finding: str(finding["ctx"]["error"]),
    "string_type": _not_text,
    "bool_type": _not_bool,
    "int_type": lambda finding: f"must be a whole number, not {_kind(finding['input'])}",
    "enum": _not_a_choice,
    "list_type": _not_a_list,
    "dict_type": _not_a_mapping,
    "model_type": _not_a_mapping,
}

_TEXTS: Mapping[str, str] = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "too_long": "must not have more than {max_length} entries",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
