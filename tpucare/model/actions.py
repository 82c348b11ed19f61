"""
What `decide` can choose, as data: `tpucare plan` prints the same actions that `tpucare daemon` applies.

Every action says `why` to people and its `cause` to code, and carries the identity it was decided about. Frozen,
standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from tpucare.model.causes import Cause
from tpucare.model.memory import BookName, End
from tpucare.model.resources import NodeKey, Place


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


class Reason(StrEnum):
    """Why a node is deleted, as far as the brake on judgement (rule 12) has to know."""

    DEAD = "dead"
    JUDGED = "judged"
    ASKED = "asked"
    FINISHED = "finished"
    SURPLUS = "surplus"


@dataclass(frozen=True, slots=True)
class Delete:
    """
    Re-read the node; when it is still the one decided about, and ours, delete it.

    `quiet`: every worker answered "no run, chips free", so an accepted delete proves that nothing trains there.
    `unanswered`: its workers never answered. `held`: what is not ours held its chips before any launch. Twice in a row
    blocks the place.
    `book`, `advanced`, `gives_up`, `step`, `checkpoint`: as of a Stop, for a run that goes with its node.
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
    book: BookName | None = None
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
    """Start run `token` on all workers at once. `job`: which job that is, as `plan_words.job_mark` tells jobs apart."""

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
    End whatever runs on the workers that answer, and book why (`book` None: free).

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
    book: BookName | None = None
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
class PushKey:
    """Append our public key to the node's metadata, since a worker refuses it."""

    key: NodeKey
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.KEY.of(self.key.name)


@dataclass(frozen=True, slots=True)
class Vouch:
    """Ask guest attributes for host keys, and pin those. `publisher`: of whose habits the answer tells."""

    key: NodeKey
    cause: Cause
    why: str
    publisher: str = ""

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.VOUCH.of(self.key.name)


@dataclass(frozen=True, slots=True)
class Look:
    """GetNode: the only proof of absence."""

    key: NodeKey
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.LOOK.of(self.key.name)


@dataclass(frozen=True, slots=True)
class Poll:
    """GetOperation of a create."""

    name: str
    operation: str
    cause: Cause
    why: str

    @property
    def effect_key(self) -> EffectKey:
        return EffectKind.POLL.of(self.name)


class Fact(StrEnum):
    """What a Settle writes into memory."""

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
class Settle:
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


Effect = Create | Delete | Launch | Stop | Notice | PushKey | Vouch | Look | Poll
Action = Wait | Settle | Effect
