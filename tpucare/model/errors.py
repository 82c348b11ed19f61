"""
The tree of errors: one class per reaction of the loop.

Adapters translate errors of the world into these; planner and engine react to the type in one place; the CLI prints
``str(error)``, one line that says what to change.

    TpuCareError
    ├── ConfigError            stop; a person has to edit the file (or flag, or environment); carries `problems`
    ├── StoreError             the process ends; the next start adopts
    │   ├── StoreLocked        another process holds this store
    │   ├── StoreCorrupt       refused, never replaced by an empty one
    │   ├── StoreForeign       copied from another machine: a person has to confirm
    │   └── StoreFull          the disk is full: nothing was lost, nothing more can be written
    ├── CloudError             the API answered, or did not; carries `code` (gRPC, 0 = none), `advice`
    │   ├── NoCapacity         next place, jittered backoff per place
    │   ├── QuotaExceeded      own quota: retry when it is free; else wait long
    │   ├── RateLimited        wait a minute
    │   ├── Transient          refused for now: retry with jitter
    │   │   └── AnswerLost     the request may have arrived: send it again under the same name
    │   ├── LostRace           another request was first: read again
    │   │   ├── AlreadyExists  a node of that name exists
    │   │   └── NodeGone       the node or operation no longer exists
    │   ├── NotPublished       guest attributes are not there (yet): ask again, the node lives
    │   ├── PreemptedMeanwhile the node was preempted during its create
    │   ├── NeedsPerson        a person has to change something; blocks that place
    │   └── OwnCredentials     our own credentials are refused: no observation
    └── RemoteError            one worker, over SSH
        ├── WorkerSilent       refused, timed out, or dropped
        ├── AuthRefused        it listens and refuses our key
        ├── HostKeyChanged     it listens and shows another host key
        └── CommandFailed      it ran and exited non-zero: `exit_status`, `stderr_tail`
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


class TpuCareError(Exception):
    """Base of the errors that tpucare raises on purpose; ``str()`` is one line for a person."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """
    One mistake in a declaration.

    line: counts from 1; 0 = the text has no lines    key: a dotted path, "" for the whole file
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
    A person has to edit a file, flag or environment variable, which the text names.

    problems: the mistakes of a declaration, one by one; empty for other errors
    """

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems

    @classmethod
    def of(cls, problems: Iterable[Problem], file: str) -> Self:
        """One line per problem. *file*: the name of the text in these lines."""
        found = tuple(problems)
        return cls("\n".join(problem.render(file) for problem in found), found)


class StoreError(TpuCareError):
    """The store cannot be trusted or written: the process ends, the next start adopts."""


class StoreLocked(StoreError):
    """Another process holds the lock of this store."""


class StoreCorrupt(StoreError):
    """The file is not a readable store of a known version; it is left as it is."""


class StoreForeign(StoreError):
    """The store was made on another machine, whose daemon may still use the same owner label."""


class StoreFull(StoreError):
    """The disk is full; the last transaction was not made."""


class CloudError(TpuCareError):
    """
    An error of the Cloud TPU API. `str()` is `message -> advice`, or the message alone.

    code: gRPC status number, 0 = none    advice: the remedy for a person; empty = none known
    """

    def __init__(self, message: str, code: int = 0, *, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message} -> {self.advice}" if self.advice else self.message

    def reworded(self, message: str) -> Self:
        """A copy with another message, without traceback."""
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
    """The service failed for now; the request had no effect, or its effect shows in a listing."""


class AnswerLost(Transient):
    """UNAVAILABLE or DEADLINE_EXCEEDED: the request may or may not have arrived."""


class LostRace(CloudError):
    """Another request was first, or an operation is under way: read again, then decide."""


class AlreadyExists(LostRace):
    """A node of that name exists, in any state."""


class NodeGone(LostRace):
    """NOT_FOUND: the node or operation no longer exists."""


class NotPublished(CloudError):
    """NOT_FOUND from GetGuestAttributes: nothing is published under that path. It says nothing about the node."""


class PreemptedMeanwhile(CloudError):
    """The operation failed because the node was preempted."""


class NeedsPerson(CloudError):
    """Permission, unknown type, service account, unsupported zone: waiting does not help."""


class OwnCredentials(CloudError):
    """UNAUTHENTICATED or a refresh error: nothing was observed."""


class RemoteError(TpuCareError):
    """
    One worker could not be used over SSH. `str()` is `host: message`, or the message alone.

    host: address of the worker; empty when the message names it or concerns no single worker
    """

    def __init__(self, message: str, *, host: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.host = host

    def __str__(self) -> str:
        return f"{self.host}: {self.message}" if self.host else self.message


class WorkerSilent(RemoteError):
    """Connection refused, timed out or dropped: the command may or may not have run."""


class AuthRefused(RemoteError):
    """The SSH server refused our key."""


class HostKeyChanged(RemoteError):
    """The SSH server showed another host key than the pinned one."""


class CommandFailed(RemoteError):
    """The command ran to its end and exited non-zero."""

    def __init__(self, message: str, exit_status: int, stderr_tail: str = "", *, host: str = "") -> None:
        super().__init__(message, host=host)
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail
