"""
The actions that `decide` can choose, as data, and the event texts about them.

Since actions are data, `tpucare plan` prints exactly what `tpucare daemon` applies. Each has a `why` for people, a
`cause` for code, and the identity (name, id) of the node it was decided about. Frozen, standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import NodeGone
from tpucare.model.memory import End, FailureKind
from tpucare.model.resources import NodeKey, Operation, Place
from tpucare.model.runs import LaunchResult


class EffectKind(StrEnum):
    """Kinds of effects on a node; the last four are facts that the engine records under the same keys."""

    CREATE = "create"
    DELETE = "delete"
    LAUNCH = "launch"
    STOP = "stop"
    NOTICE = "notice"
    ADD_SSH_KEY = "key"
    FETCH_HOST_KEYS = "vouch"
    GET_NODE = "look"
    GET_OPERATION = "poll"
    ENQUEUE = "enqueue"
    DEQUEUE = "dequeue"
    GET_REQUEST = "look-queue"
    # A person asked to label a node as this slot's, and no listing shows that label yet.
    ADOPT = "adopt"
    # This process saw the node and removed it: it is gone, or another owner's.
    GONE = "gone"
    # The operation of the node's create ended with an error.
    FAILED = "failed"
    # A call other than GetNode did not find the node.
    MISSED = "missed"

    def of(self, node: str) -> EffectKey:
        return EffectKey(self, node)


class EffectKey(NamedTuple):
    """
    Identity of an effect within its slot; at most one per key is in flight.

    `node`: name of its node; empty for a create and an adoption, of which a slot has one at a time.
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
    No action before evidence changes, or before `observed` or `wall` time, whichever is reached first.

    `needs_person`: only a person can help. `ended`: the slot was taken down, and nothing is left of it.
    `out_of_reach`: the nodes left of a slot that goes down, when none of them can be read.
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
    CreateNode. `resend`: the same name at the same place again, since the answer was lost.

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
    Re-read the node; if it is still the one decided about, and ours, delete it.

    quiet:      every worker answered "no run, chips free", so an accepted delete proves that nothing trains there
    unanswered: its workers never answered    held: foreign processes held its chips before the first launch; two such
                nodes in a row block their place
    failure, advanced, gives_up, step, checkpoint: as in Stop, for a run that ends with its node
    lasted:     observed time for which the condition had lasted    again: repeats an earlier delete
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
    End all runs on the workers that answer.

    failure:  the counter that this stop adds to; None: it counts as no failure
    advanced: the run got further than any before it, so its failure is the first of a streak
    served:   the run ended well, so every streak of failures ends
    gives_up: the budget is spent, and the slot fails
    stacks:   collect stack traces of the run first
    then:     delete the node for this reason once its workers are quiet    lasted: as in Delete
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
class SendNotice:
    """Write *text* into the notice file of the run: please save."""

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
    """Append our public key to the node's metadata, after a worker refused it."""

    key: NodeKey
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.ADD_SSH_KEY.of(self.key.name)


@dataclass(frozen=True, slots=True)
class FetchHostKeys:
    """Read host keys from guest attributes and pin them. `publisher`: `trust.publisher_of` the node."""

    key: NodeKey
    cause: Cause
    why: str
    publisher: str = ""

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.FETCH_HOST_KEYS.of(self.key.name)


@dataclass(frozen=True, slots=True)
class GetNode:
    """GetNode, whose NOT_FOUND is the only proof of absence."""

    key: NodeKey
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.GET_NODE.of(self.key.name)


@dataclass(frozen=True, slots=True)
class GetOperation:
    """GetOperation of a create."""

    name: str
    operation: str
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.GET_OPERATION.of(self.name)


@dataclass(frozen=True, slots=True)
class Enqueue:
    """CreateQueuedResource at a queued place. `resend`: the same request once more, since its answer was lost."""

    name: str
    number: int
    place: Place
    cause: Cause
    why: str
    resend: bool = False

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.ENQUEUE.of(self.name)


@dataclass(frozen=True, slots=True)
class DeleteRequest:
    """Re-read the queued resource and its node; if both are ours, delete it by force. `again`: repeats a delete."""

    key: NodeKey
    cause: Cause
    why: str
    again: bool = False

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.DEQUEUE.of(self.key.name)


@dataclass(frozen=True, slots=True)
class GetRequest:
    """GetQueuedResource, whose NOT_FOUND is the only proof of absence."""

    key: NodeKey
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.GET_REQUEST.of(self.key.name)


class Fact(StrEnum):
    """Facts that a Record writes into memory."""

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
    REQUEST_ABANDONED = "queued request abandoned"
    NODE_OUT_OF_SIGHT = "node out of sight"
    ENDED = "ended"
    TRIED_AGAIN = "tried again"


@dataclass(frozen=True, slots=True)
class Record:
    """
    Write *fact* into memory and decide again; no effect in the world.

    `cause`: of an end, and of an abandoned create or request; UNRECORDED for every other fact.
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


Effect = (
    Create
    | Delete
    | Launch
    | Stop
    | SendNotice
    | AddSshKey
    | FetchHostKeys
    | GetNode
    | GetOperation
    | Enqueue
    | DeleteRequest
    | GetRequest
)
Action = Wait | Record | Effect


# --- events about actions and their ends: texts for people, kinds for scripts ----------------------------------------


class EventText(NamedTuple):
    """Kind, text, level and fields of an event."""

    kind: str
    text: str
    level: str = "info"
    fields: Mapping[str, str] = MappingProxyType({})


# The word for an action in events, `status` and failpoints. Scripts read these words, so they outlive class names.
_WORDS: Mapping[type[Action], str] = {
    Wait: "wait",
    Record: "settle",
    Create: "create",
    Delete: "delete",
    Launch: "launch",
    Stop: "stop",
    SendNotice: "notice",
    AddSshKey: "pushkey",
    FetchHostKeys: "vouch",
    GetNode: "look",
    GetOperation: "poll",
    Enqueue: "enqueue",
    DeleteRequest: "dequeue",
    GetRequest: "look-queue",
}


def event_line(at: datetime, level: str, slot: str, text: str) -> str:
    """
    One event as a line for people. The caller makes *text* `plain` first.

    at: in the time zone of the reader
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
        case DeleteRequest():
            return f"deleting the queued resource {action.key.name}: {action.why}"
        case Record():
            return f"{action.fact.value}: {action.why}"
    return f"{node_of(action)}: {action.why}"


def level_of(action: Record | Effect) -> str:
    """`debug` for a sign of progress, which the store keeps and people need not read."""
    return "debug" if isinstance(action, Record) and action.fact is Fact.RUN_PROGRESSED else "info"


def node_of(action: Record | Effect) -> str:
    return action.name if isinstance(action, Create | Enqueue | GetOperation | Record) else action.key.name


def failed(result: object) -> bool:
    """Whether *result* is an operation that ended with an error."""
    return isinstance(result, Operation) and result.done and result.error is not None


def end_of(action: Effect, result: object, error: Exception | None) -> EventText | None:
    """The event of an effect that ended; None for effects that end without one."""
    name, kind = node_of(action), kind_of(action)
    if error is not None:
        if isinstance(error, NodeGone):
            return None
        return EventText(f"{kind}-failed", f"{name}: {error}", "warning", {"error": type(error).__name__})
    if isinstance(action, GetOperation):
        failure = result.error if isinstance(result, Operation) else None
        if failure is None:
            return None
        return EventText("create-failed", f"{name}: {failure}", "warning", {"error": type(failure).__name__})
    if isinstance(action, Launch) and isinstance(result, LaunchResult):
        return _end_of_launch(action, result)
    if isinstance(action, Create | Delete | Stop | Enqueue | DeleteRequest):
        return EventText(f"{kind}-accepted", f"{name}: {kind} accepted")
    return None


def _end_of_launch(action: Launch, result: LaunchResult) -> EventText:
    if result.complete:
        return EventText("launched", f"{action.token}: launched on all workers")
    errors = sorted({str(error) for error in result.workers if error is not None})
    return EventText("launch-failed", f"{action.token}: {'; '.join(errors)[:500]}", "warning")


def fields_of(action: Record | Effect) -> dict[str, str]:
    """Fields of the event of an action that begins: its cause, and the object it acts on."""
    fields = _names(action)
    if action.cause is not Cause.UNRECORDED:
        fields["cause"] = action.cause.value
    if isinstance(action, Delete | Stop) and action.lasted is not None:
        fields["lasted_seconds"] = f"{action.lasted.total_seconds():.0f}"
    if isinstance(action, Delete | DeleteRequest) and action.again:
        fields["again"] = "true"
    return fields


def _names(action: Record | Effect) -> dict[str, str]:
    if isinstance(action, Record):
        return {"fact": action.fact.name.lower().replace("_", "-")}
    if isinstance(action, DeleteRequest):
        return {"zone": action.key.zone}
    if isinstance(action, Create | Enqueue):
        place = action.place
        return {
            "zone": place.zone,
            "accelerator_type": place.accelerator_type,
            "terms": place.provisioning.value,
            "hosts": str(place.workers),
        }
    if isinstance(action, Delete):
        return {"zone": action.key.zone, "reason": action.reason.value}
    if isinstance(action, Launch | Stop):
        return {"run": action.token}
    return {}
