"""What the tables of decisions have in common: how a row is written, and what an action comes down to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest

from tests.kits.evidence import (
    QUIET,
    SILENT,
    US,
    act,
    ago,
    ended,
    name_of,
    node,
    seen,
    slot,
    token,
)
from tpucare.model.actions import Action, Create, Delete, EffectKind, Record, Stop, Wait
from tpucare.model.evidence import Evidence, Progress
from tpucare.model.memory import Memory
from tpucare.model.resources import Provisioning, Slot

HOUR = timedelta(hours=1)
ON_DEMAND = Provisioning.ON_DEMAND
MUTE = Progress(token(), 0, None, None, ago(hours=2))
STALE = Progress(token(), 100, ago(hours=2), timedelta(seconds=15), ago(hours=2))

OURS, UNREACHABLE = frozenset({US}), frozenset({"asia-east1-c"})
# Longer than the ten hours that were observed since the start.
PATIENT = slot(fence_after=timedelta(hours=11))
NEXT = seen(node(number=1), QUIET, answering_since=ago(minutes=1))
STOPPED = {EffectKind.STOP.of(name_of(0)): ago(5)}


def told(action: Action) -> str:
    """What kind of action it is, with the part that tells it from others of its kind."""
    match action:
        case Delete():
            return f"Delete {action.reason.value}{' gives up' if action.gives_up else ''}"
        case Record():
            return f"Record {action.fact.value}"
        case Stop():
            failure = f" {action.failure.value}" if action.failure else ""
            then = f" then {action.then.value}" if action.then else ""
            return f"Stop{failure}{then}{' gives up' if action.gives_up else ''}"
        case Wait():
            return "Wait person" if action.needs_person else "Wait"
        case Create():
            return "Create again" if action.resend else "Create"
    return type(action).__name__


def case(name: str, what: Evidence, known: Memory, want: str, declared: Slot | None = None) -> Any:
    """A row: what is seen and remembered, and what comes of it."""
    return pytest.param(what, known, declared or slot(), want, id=name)


def table(rows: Iterable[Any]) -> Callable[..., None]:
    """The test of a table: to be given a name that begins with `test_`."""

    @pytest.mark.parametrize(("what", "known", "declared", "want"), rows)
    def row(what: Evidence, known: Memory, declared: Slot, want: str) -> None:
        action = act(what, known, declared)
        assert told(action) == want, action
        assert action.why
        assert isinstance(action, Record) or action.cause

    return row


def silent(minutes: float, *workers: Any, probes: int = 99, **more: Any) -> Any:
    known: dict[str, Any] = {"silent_since": ago(minutes=minutes), "silent_probes": probes, "progress": STALE}
    return seen(more.pop("what", node()), workers or SILENT, **{**known, **more})


def over(status: int | None = 1, seconds: float = 60, what: Any = None, **more: Any) -> Any:
    """A node on which every worker's run has ended that long ago."""
    known: dict[str, Any] = {"ended_since": ago(seconds), "answering_since": ago(minutes=30)}
    marks = {key: more.pop(key) for key in list(more) if key.endswith("_since") or key in ("progress", "workers")}
    return seen(what or node(), ended(status, **more), **{**known, **marks})
