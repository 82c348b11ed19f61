"""
One tree of errors, a class per reaction of the loop.

Leaves translate what the world throws into these at the edge; `plan` and `engine` react to the type in one place;
a door prints ``str(error)``, which is one line that says what to change.

    TpuCareError
    ├── ConfigError            stop; a person has to edit the file (or flag, or environment); carries `problems`
    ├── StoreError             the process ends; the next start adopts
    │   ├── StoreLocked        another process takes care of this store
    │   ├── StoreCorrupt       refused, never silently started over
    │   ├── StoreForeign       copied from another machine: a person has to confirm
    │   └── StoreFull          the disk is full: nothing was lost, nothing more is promised
    ├── CloudError             the API answered, or did not; carries `code` (gRPC, 0 = none), `advice`
    │   ├── NoCapacity         next place, jittered backoff per place
    │   ├── QuotaExceeded      own quota: retry when it is free; else wait long
    │   ├── RateLimited        wait a minute
    │   ├── Transient          it said no for now: retry with jitter
    │   ├── AnswerLost         it may or may not have happened: ask again under the same name
    │   ├── LostRace           somebody was faster: look again
    │   │   ├── AlreadyExists  a create met its own name
    │   │   └── NodeGone       what this was about no longer exists
    │   ├── NotPublished       guest attributes are not there (yet): ask again, the node lives
    │   ├── PreemptedMeanwhile the operation met a preemption
    │   ├── NeedsPerson        a person has to change something; blocks that place
    │   └── OwnCredentials     our own credentials do not serve: no observation
    └── RemoteError            one worker, over SSH
        ├── WorkerSilent       refused, timed out, or dropped
        ├── AuthRefused        it listens, and does not take our key
        ├── HostKeyChanged     it listens, and is not who it was
        └── CommandFailed      it ran and exited non-zero: `exit_status`, `stderr_tail`
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


class TpuCareError(Exception):
    """Base of everything that tpucare raises on purpose; ``str()`` is one line for a person."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """
    One thing that a person has to change.

    line: counts from 1; 0 = the text has no lines worth naming    key: a dotted path, "" for the whole file
    """

    line: int
    key: str
    text: str

    def render(self, file: str) -> str:
        """`file:line: key.path: what is wrong`, always one line."""
        place = f"{file}:{self.line}" if self.line else file
        return f"{place}: {self.key + ': ' if self.key else ''}{self.text}"


class ConfigError(TpuCareError):
    """
    A person has to edit something: file, line and key are named in the text.

    problems: what the text says, one by one; empty where the error is about no declaration
    """

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems

    @classmethod
    def of(cls, problems: Iterable[Problem], file: str) -> Self:
        """One line per problem, of what errors call *file*."""
        found = tuple(problems)
        return cls("\n".join(problem.render(file) for problem in found), found)


class StoreError(TpuCareError):
    """The store cannot be trusted or written: the process ends, the next start adopts."""


class StoreLocked(StoreError):
    """Another process holds the lock of this store."""


class StoreCorrupt(StoreError):
    """The file is not a readable store of a known version; it is left as it is."""


class StoreForeign(StoreError):
    """The store was made on another machine; two daemons with one owner would fight."""


class StoreFull(StoreError):
    """The disk is full; the last transaction was not made."""


class CloudError(TpuCareError):
    """
    Something the Cloud TPU API said. `str()` is `message -> advice`, or the message alone.

    code: gRPC status number, 0 where there was none    advice: what a person can do about it; empty = none is known
    """

    def __init__(self, message: str, code: int = 0, *, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message} -> {self.advice}" if self.advice else self.message

    def reworded(self, message: str) -> Self:
        """The same error, class, code and advice, with another message; it keeps nothing of the place of the first."""
        twin = copy.copy(self)
        twin.args = (message,)
        twin.message = message
        return twin


# gRPC's number for "your account may not".
PERMISSION_DENIED = 7


class NoCapacity(CloudError):
    """No more capacity in that zone for now."""


class QuotaExceeded(CloudError):
    """
    A quota of the project is used up.

    `region_wide` is true when the text names a region and no zone as the limit's scope.
    """

    def __init__(self, message: str, code: int = 8, *, region_wide: bool = False, advice: str = "") -> None:
        super().__init__(message, code, advice=advice)
        self.region_wide = region_wide


class RateLimited(CloudError):
    """Too many requests of that kind per minute."""


class Transient(CloudError):
    """The service failed for now and says so; the request did not take effect, or its effect shows in a listing."""


class AnswerLost(Transient):
    """UNAVAILABLE or DEADLINE_EXCEEDED: the request may or may not have arrived."""


class LostRace(CloudError):
    """Somebody else acted first, or an operation is under way: look again, then decide."""


class AlreadyExists(LostRace):
    """A create met a node of that name, in whatever state."""


class NodeGone(LostRace):
    """What this was about no longer exists."""


class NotPublished(CloudError):
    """NOT_FOUND from GetGuestAttributes: nothing is published under that path. It says nothing about the node."""


class PreemptedMeanwhile(CloudError):
    """The operation failed since the node was preempted under it."""


class NeedsPerson(CloudError):
    """Permission, unknown type, service account, unsupported zone: waiting does not help."""


class OwnCredentials(CloudError):
    """UNAUTHENTICATED or a refresh error: what we see is no observation."""


class RemoteError(TpuCareError):
    """
    One worker could not be used over SSH. `str()` is `host: message`, or the message alone.

    host: address of the worker; empty where the message names it, or is about no one worker
    """

    def __init__(self, message: str, *, host: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.host = host

    def __str__(self) -> str:
        return f"{self.host}: {self.message}" if self.host else self.message


class WorkerSilent(RemoteError):
    """Refused, timed out, or dropped in the middle: nothing is known about what ran."""


class AuthRefused(RemoteError):
    """An SSH server answered and refused our key."""


class HostKeyChanged(RemoteError):
    """An SSH server answered with another host key than this node had."""


class CommandFailed(RemoteError):
    """The command ran to its end and exited non-zero."""

    def __init__(self, message: str, exit_status: int, stderr_tail: str = "", *, host: str = "") -> None:
        super().__init__(message, host=host)
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail
