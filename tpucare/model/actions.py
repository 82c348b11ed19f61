"""
What `decide` can choose, as data, and what events say of it: what `tpucare plan` prints is what `tpucare daemon`
applies.

Every action says `why` to people and its `cause` to code, and carries the identity it was decided about. Frozen,
standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import NodeGone
from tpucare.model.memory import End, FailureKind
from tpucare.model.resources import NodeKey, Operation, Place
from tpucare.model.runs import LaunchResult


class EffectKind(StrEnum):
    """What tpucare does about a node, or notes of it (the last four)."""

    CREATE = "create"
    DELETE = "delete"
    LAUNCH = "launch"
    STOP = "stop"
    NOTICE = "notice"
    KEY = "key"
    VOUCH = "vouch"
    LOOK = "look"
    POLL = "poll"
    # A person asked for a node to be labelled as this slot's, and it is not seen as such yet.
    ADOPT = "adopt"
    # This process saw the node, and forgot it: it is gone, or another's.
    GONE = "gone"
    # The operation of the node's create ended with an error.
    FAILED = "failed"
    # A call other than GetNode did not find the node.
    MISSED = "missed"

    def of(self, node: str) -> EffectKey:
        return EffectKey(self, node)


class EffectKey(NamedTuple):
    """
    What one effect of a slot is told from its others by; one of each is in flight at a time.

    `node`: the name of its node; empty for a create and an adoption, of which a slot has one at a time, whatever the
    name.
    """

    kind: EffectKind
    node: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.node}" if self.node else f"{self.kind}"


ANY_CREATE = EffectKey(EffectKind.CREATE)
ADOPTING = EffectKey(EffectKind.ADOPT)


@dataclass(frozen=True, slots=True)
class Wait:
    """
    Nothing to do before something changes, or until an instant: `observed` or `wall`, whichever comes first.

    `needs_person`: waiting alone will not help. `ended`: nothing is left of a slot that was taken down.
    `out_of_reach`: all that is left of it, where none of that can be looked at.
    """

    cause: Cause
    why: str
    observed: timedelta | None = None
    wall: datetime | None = None
    needs_person: bool = False
    ended: bool = False
    out_of_reach: tuple[NodeKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Create:
    """
    Ask for a node. `resend`: the same name at the same place once more, since the answer was lost.

    `held_in_zone`, `held_in_region`: dead nodes of ours held that quota when this was decided.
    """

    name: str
    number: int
    place: Place
    cause: Cause
    why: str
    resend: bool = False
    held_in_zone: bool = False
    held_in_region: bool = False

    @property
    def effect_key(self) -> EffectKey:
        return ANY_CREATE


@dataclass(frozen=True, slots=True)
class Delete:
    """
    Re-read the node; when it is still the one decided about, and ours, delete it.

    `quiet`: every worker answered "no run, chips free", so an accepted delete proves that nothing trains there.
    `unanswered`: its workers never answered. `held`: what is not ours held its chips before any launch. Twice in a row
    blocks the place.
    `failure`, `advanced`, `gives_up`, `step`, `checkpoint`: as of a Stop, for a run that goes with its node.
    `lasted`: for how long, in observed time, what it is judged for had lasted. `again`: it was asked for before.
    """

    key: NodeKey
    id: int
    create_time: datetime
    cause: Cause
    why: str
    reason: Reason
    quiet: bool = False
    unanswered: bool = False
    held: bool = False
    failure: FailureKind | None = None
    advanced: bool = False
    gives_up: bool = False
    step: int | None = None
    checkpoint: int | None = None
    lasted: timedelta | None = None
    again: bool = False

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.DELETE.of(self.key.name)


@dataclass(frozen=True, slots=True)
class Launch:
    """Start run `token` on all workers at once. `job`: which job that is, as `predicates.job_mark` tells jobs apart."""

    key: NodeKey
    id: int
    token: str
    number: int
    cause: Cause
    why: str
    job: str = ""

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.LAUNCH.of(self.key.name)


@dataclass(frozen=True, slots=True)
class Stop:
    """
    End all runs on the workers that answer. `failure`: the counter that this stop adds to; None: no counter.

    `advanced`: the run got further than any before it, so its failure is the first of a row.
    `served`: the run ended well, so every row of failures is over.
    `gives_up`: the budget is spent; the slot has failed once this is done.
    `then`: the node is deleted for this reason once its workers are quiet. `lasted`: as of a Delete.
    """

    key: NodeKey
    id: int
    token: str
    cause: Cause
    why: str
    failure: FailureKind | None = None
    advanced: bool = False
    served: bool = False
    gives_up: bool = False
    stacks: bool = False
    step: int | None = None
    checkpoint: int | None = None
    then: Reason | None = None
    lasted: timedelta | None = None

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.STOP.of(self.key.name)


@dataclass(frozen=True, slots=True)
class Notice:
    """Ask the run to save."""

    key: NodeKey
    token: str
    text: str
    cause: Cause
    why: str
    checkpoint: int | None = None

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.NOTICE.of(self.key.name)


@dataclass(frozen=True, slots=True)
class AddSshKey:
    """Append our public key to the node's metadata, since a worker refuses it."""

    key: NodeKey
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.KEY.of(self.key.name)


@dataclass(frozen=True, slots=True)
class FetchHostKeys:
    """Ask guest attributes for host keys, and pin those. `publisher`: of whose habits the answer tells."""

    key: NodeKey
    cause: Cause
    why: str
    publisher: str = ""

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.VOUCH.of(self.key.name)


@dataclass(frozen=True, slots=True)
class GetNode:
    """GetNode: the only proof of absence."""

    key: NodeKey
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.LOOK.of(self.key.name)


@dataclass(frozen=True, slots=True)
class GetOperation:
    """GetOperation of a create."""

    name: str
    operation: str
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.POLL.of(self.name)


class Fact(StrEnum):
    """What a Record writes into memory."""

    RUN_ADOPTED = "run adopted"
    RUN_COMPLETE = "run complete"
    RUN_STOPPED = "run stopped"
    RUN_PROGRESSED = "run progressed"
    RUN_LASTED = "run lasted"
    RUN_FINISHED = "run finished"
    RUN_OVER = "run over"
    RUN_BACK = "run back"
    SETUP_DONE = "setup done"
    FIRST_USE = "host keys trusted on first use"
    CREATE_SUPERSEDED = "create superseded"
    CREATE_KEPT = "create kept"
    NODE_OUT_OF_SIGHT = "node out of sight"
    ENDED = "ended"
    TRIED_AGAIN = "tried again"


@dataclass(frozen=True, slots=True)
class Record:
    """
    No effect in the world: write down what is known now, and decide again.

    `cause`: of an end, and of a create that is given up; every other fact says it all.
    """

    fact: Fact
    why: str
    name: str = ""
    token: str = ""
    number: int = 0
    end: End = End.NONE
    step: int | None = None
    checkpoint: int | None = None
    gap: timedelta | None = None
    publisher: str = ""
    cause: Cause = Cause.UNRECORDED


Effect = Create | Delete | Launch | Stop | Notice | AddSshKey | FetchHostKeys | GetNode | GetOperation
Action = Wait | Record | Effect


# --- what events say of actions and of how they ended; texts are for people, kinds for scripts -----------------------


class EventText(NamedTuple):
    """Kind, text and level of an event."""

    kind: str
    text: str
    level: str = "info"


# What events, `status` and failpoints call an action. Scripts read these words, so they are no names of classes.
_WORDS: Mapping[type[Action], str] = {
    Wait: "wait",
    Record: "settle",
    Create: "create",
    Delete: "delete",
    Launch: "launch",
    Stop: "stop",
    Notice: "notice",
    AddSshKey: "pushkey",
    FetchHostKeys: "vouch",
    GetNode: "look",
    GetOperation: "poll",
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


def kind_of(action: Record | Effect) -> str:
    if isinstance(action, Record):
        return {Fact.ENDED: "done", Fact.FIRST_USE: "host-keys"}.get(action.fact, "settle")
    return word_of(action)


def text_of(action: Record | Effect) -> str:
    match action:
        case Create():
            return f"{action.name}: {action.why}"
        case Launch():
            return f"launching {action.token}: {action.why}"
        case Stop():
            return f"stopping {action.token}: {action.why}"
        case Delete():
            return f"deleting {action.key.name}: {action.why}"
        case Record():
            return f"{action.fact.value}: {action.why}"
    return f"{node_of(action)}: {action.why}"


def level_of(action: Record | Effect) -> str:
    """That a run makes progress is a mark for the store, and no news to a person."""
    return "debug" if isinstance(action, Record) and action.fact is Fact.RUN_PROGRESSED else "info"


def node_of(action: Record | Effect) -> str:
    return action.name if isinstance(action, Create | GetOperation | Record) else action.key.name


def failed(result: object) -> bool:
    """Whether *result* is an operation that ended with an error."""
    return isinstance(result, Operation) and result.done and result.error is not None


def end_of(action: Effect, result: object, error: Exception | None) -> EventText | None:
    """What to tell when an effect has ended; None where nobody wants to know."""
    name, kind = node_of(action), kind_of(action)
    if error is not None:
        return None if isinstance(error, NodeGone) else EventText(f"{kind}-failed", f"{name}: {error}", "warning")
    if isinstance(action, GetOperation):
        failure = result.error if isinstance(result, Operation) else None
        return EventText("create-failed", f"{name}: {failure}", "warning") if failure is not None else None
    if isinstance(action, Launch) and isinstance(result, LaunchResult):
        return _end_of_launch(action, result)
    if isinstance(action, Create | Delete | Stop):
        return EventText(f"{kind}-accepted", f"{name}: {kind} accepted")
    return None


def _end_of_launch(action: Launch, result: LaunchResult) -> EventText:
    if result.complete:
        return EventText("launched", f"{action.token}: launched on all workers")
    errors = sorted({str(error) for error in result.workers if error is not None})
    return EventText("launch-failed", f"{action.token}: {'; '.join(errors)[:500]}", "warning")


def fields_of(action: Record | Effect) -> dict[str, str]:
    """What a script would look for in the event of an action that begins: its cause, and what it is about."""
    fields = _names(action)
    if action.cause is not Cause.UNRECORDED:
        fields["cause"] = action.cause.value
    if isinstance(action, Delete | Stop) and action.lasted is not None:
        fields["lasted_seconds"] = f"{action.lasted.total_seconds():.0f}"
    if isinstance(action, Delete) and action.again:
        fields["again"] = "true"
    return fields


def _names(action: Record | Effect) -> dict[str, str]:
    if isinstance(action, Record):
        return {"fact": action.fact.name.lower().replace("_", "-")}
    if isinstance(action, Create):
        return {"zone": action.place.zone, "accelerator_type": action.place.accelerator_type}
    if isinstance(action, Delete):
        return {"zone": action.key.zone, "reason": action.reason.value}
    if isinstance(action, Launch | Stop):
        return {"run": action.token}
    return {}
