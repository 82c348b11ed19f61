"""Selects the runs of a query of `wandb.Api()` by its Mongo-like filters and its order. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
_MISSING = object()


def select(rows: Iterable[Row], filters: Mapping[str, Any]) -> list[Row]:
    """The rows that match. Raises: ValueError: an unknown operator."""
    return [row for row in rows if _matches(row, filters)]


def sort(rows: list[Row], order: str) -> list[Row]:
    """*order*: `+key` or `-key`; rows without the key come last."""
    key, falling = order.lstrip("+-"), order.startswith("-")
    known = [row for row in rows if _is_number(_value(row, key)) or isinstance(_value(row, key), str)]
    others = [row for row in rows if row not in known]
    return [*sorted(known, key=lambda row: _sortable(_value(row, key)), reverse=falling), *others]


def _sortable(value: Any) -> tuple[bool, float, str]:
    return (isinstance(value, str), value if _is_number(value) else 0.0, value if isinstance(value, str) else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _matches(row: Row, filters: Mapping[str, Any]) -> bool:
    return all(_matches_key(row, key, wanted) for key, wanted in filters.items())


def _matches_key(row: Row, key: str, wanted: Any) -> bool:
    if key == "$and":
        return all(_matches(row, one) for one in wanted)
    if key == "$or":
        return any(_matches(row, one) for one in wanted)
    if key in ("$not", "$nor"):
        parts = wanted if isinstance(wanted, list) else [wanted]
        return not any(_matches(row, one) for one in parts)
    value = _value(row, key)
    if not isinstance(wanted, Mapping):
        return _equal(value, wanted)
    return all(_compare(value, operator, other) for operator, other in wanted.items())


def _equal(value: Any, wanted: Any) -> bool:
    return wanted in value if isinstance(value, list) and not isinstance(wanted, list) else value == wanted


def _compare(value: Any, operator: str, other: Any) -> bool:
    if operator not in _OPERATORS:
        raise ValueError(f"this server does not know the filter {operator}")
    try:
        return _OPERATORS[operator](value, other)
    except TypeError:
        return False


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$eq": _equal,
    "$ne": lambda value, other: not _equal(value, other),
    "$gt": lambda value, other: value > other,
    "$gte": lambda value, other: value >= other,
    "$lt": lambda value, other: value < other,
    "$lte": lambda value, other: value <= other,
    "$in": lambda value, other: any(_equal(value, one) for one in other),
    "$nin": lambda value, other: not any(_equal(value, one) for one in other),
    "$exists": lambda value, other: (value is not _MISSING) is bool(other),
    "$regex": lambda value, other: re.search(other, value) is not None,
    "$not": lambda value, other: not all(_compare(value, key, one) for key, one in other.items()),
}


def _value(row: Row, key: str) -> Any:
    """`config.lr`, `config.lr.value`, `summary_metrics.loss`, or a field of the run."""
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return value if part == "value" and value is not row else _MISSING
        value = value[part]
    return value
