"""What events say of actions and of how they ended. Pure; texts are for people, kinds for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from tpucare.model.actions import (
    Action,
    Create,
    Delete,
    Effect,
    Fact,
    Launch,
    Look,
    Notice,
    Poll,
    PushKey,
    Settle,
    Stop,
    Vouch,
    Wait,
)
from tpucare.model.causes import Cause
from tpucare.model.errors import NodeGone
from tpucare.model.resources import Operation
from tpucare.model.runs import LaunchResult


class Told(NamedTuple):
    """Kind, text and level of an event."""

    kind: str
    text: str
    level: str = "info"


# What events, `status` and failpoints call an action. Scripts read these words, so they are no names of classes.
_WORDS: Mapping[type[Action], str] = {
    Wait: "wait",
    Settle: "settle",
    Create: "create",
    Delete: "delete",
    Launch: "launch",
    Stop: "stop",
    Notice: "notice",
    PushKey: "pushkey",
    Vouch: "vouch",
    Look: "look",
    Poll: "poll",
}


def event_line(at: datetime, level: str, slot: str, text: str) -> str:
    """
    One event as a line for people, wherever it is shown; its text is to be made `plain` by whoever shows it.

    at: in the zone of whoever reads it
    """
    mark = "" if level in ("info", "debug") else f"{level.upper()} "
    return f"{at:%Y-%m-%d %H:%M:%S %Z} {slot or '-':12} {mark}{text}"


def word_of(action: Action) -> str:
    return _WORDS[type(action)]


def kind_of(action: Settle | Effect) -> str:
    if isinstance(action, Settle):
        return {Fact.ENDED: "done", Fact.FIRST_USE: "host-keys"}.get(action.fact, "settle")
    return word_of(action)


def text_of(action: Settle | Effect) -> str:
    match action:
        case Create():
            return f"{action.name}: {action.why}"
        case Launch():
            return f"launching {action.token}: {action.why}"
        case Stop():
            return f"stopping {action.token}: {action.why}"
        case Delete():
            return f"deleting {action.key.name}: {action.why}"
        case Settle():
            return f"{action.fact.value}: {action.why}"
    return f"{node_of(action)}: {action.why}"


def level_of(action: Settle | Effect) -> str:
    """That a run makes progress is a mark for the store, and no news to a person."""
    return "debug" if isinstance(action, Settle) and action.fact is Fact.RUN_PROGRESSED else "info"


def node_of(action: Settle | Effect) -> str:
    return action.name if isinstance(action, Create | Poll | Settle) else action.key.name


def failed(result: object) -> bool:
    """Whether *result* is an operation that ended with an error."""
    return isinstance(result, Operation) and result.done and result.error is not None


def end_of(action: Effect, result: object, error: Exception | None) -> Told | None:
    """What to tell when an effect has ended; None where nobody wants to know."""
    name, kind = node_of(action), kind_of(action)
    if error is not None:
        return None if isinstance(error, NodeGone) else Told(f"{kind}-failed", f"{name}: {error}", "warning")
    if isinstance(action, Poll):
        failure = result.error if isinstance(result, Operation) else None
        return Told("create-failed", f"{name}: {failure}", "warning") if failure is not None else None
    if isinstance(action, Launch) and isinstance(result, LaunchResult):
        return _end_of_launch(action, result)
    if isinstance(action, Create | Delete | Stop):
        return Told(f"{kind}-accepted", f"{name}: {kind} accepted")
    return None


def _end_of_launch(action: Launch, result: LaunchResult) -> Told:
    if result.complete:
        return Told("launched", f"{action.token}: launched on all workers")
    errors = sorted({str(error) for error in result.workers if error is not None})
    return Told("launch-failed", f"{action.token}: {'; '.join(errors)[:500]}", "warning")


def fields_of(action: Settle | Effect) -> dict[str, str]:
    """What a script would look for in the event of an action that begins: its cause, and what it is about."""
    fields = _names(action)
    if action.cause is not Cause.UNRECORDED:
        fields["cause"] = action.cause.value
    if isinstance(action, Delete | Stop) and action.lasted is not None:
        fields["lasted_seconds"] = f"{action.lasted.total_seconds():.0f}"
    if isinstance(action, Delete) and action.again:
        fields["again"] = "true"
    return fields


def _names(action: Settle | Effect) -> dict[str, str]:
    if isinstance(action, Settle):
        return {"fact": action.fact.name.lower().replace("_", "-")}
    if isinstance(action, Create):
        return {"zone": action.place.zone, "accelerator_type": action.place.accelerator_type}
    if isinstance(action, Delete):
        return {"zone": action.key.zone, "reason": action.reason.value}
    if isinstance(action, Launch | Stop):
        return {"run": action.token}
    return {}
