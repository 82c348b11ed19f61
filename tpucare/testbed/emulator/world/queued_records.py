"""
The records of queued resources: the request, its state, its nodes. No protobuf; `queued_life` moves them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum
from typing import NamedTuple

from tpucare.model.accelerators import Accelerator
from tpucare.model.resources import QueuedState
from tpucare.testbed.emulator.world.records import ApiError, NodePath, NodeSpec


@dataclass(frozen=True, slots=True)
class Planned:
    """One node that a queued resource will have."""

    path: NodePath
    spec: NodeSpec
    accelerator: Accelerator
    multislice: bool = False


@dataclass(eq=False, slots=True)
class QueuedLife:
    """
    One queued resource, with the facts that the API does not show.

    tries:     number of its periods of waiting; steps scheduled in an earlier period do nothing
    resetting: operation of the reset for which it is SUSPENDING; empty: it will be SUSPENDED
    shell:     it uses quota although it has no nodes
    lingers:   it stays waiting after the end of its validity
    """

    record: QueuedRecord
    planned: tuple[Planned, ...]
    create_operation: str
    tries: int = 0
    begun_at: datetime | None = None
    resetting: str = ""
    shell: bool = False
    gone: bool = False
    lingers: bool = False
    delete_due: bool = False
    stuck_repeats: int = 0
    delete_operations: list[str] = field(default_factory=list)

    @property
    def path(self) -> QueuedPath:
        return self.record.path


# --- requests and answers ---------------------------------------------------------------------------------------------


WAITING = (QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)
IN_QUEUE = (QueuedState.CREATING, *WAITING, QueuedState.PROVISIONING)
"""These may still bring a node."""
SHELLS = (QueuedState.FAILED, QueuedState.SUSPENDED)
"""These change no more until a caller deletes or resets them."""


class Initiator(IntEnum):
    """`QueuedResourceState.StateInitiator`: the cause of SUSPENDING; SERVICE means preempted."""

    UNSPECIFIED = 0
    USER = 1
    SERVICE = 2


class QueuedPath(NamedTuple):
    """`projects/<project>/locations/<zone>/queuedResources/<queued_id>`; sorts in the order of listings."""

    project: str
    zone: str
    queued_id: str

    def __str__(self) -> str:
        return f"{self.parent}/queuedResources/{self.queued_id}"

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"


def parse_queued_path(name: str) -> QueuedPath:
    """Raises: ApiError (3): not the name of a queued resource."""
    parts = name.split("/")
    if len(parts) != 6 or parts[0::2] != ["projects", "locations", "queuedResources"] or not all(parts):
        raise ApiError(3, f"Invalid resource name '{name}'; expected projects/*/locations/*/queuedResources/*")
    return QueuedPath(parts[1], parts[3], parts[5])


@dataclass(frozen=True, slots=True)
class QueuedNodeSpec:
    """
    One `node_spec`: a node by its id, or a multislice of `count` nodes called `<prefix>-0`, `<prefix>-1`, ...

    prefix: empty: the id of the queued resource
    """

    spec: NodeSpec
    parent: str = ""
    node_id: str = ""
    count: int = 0
    prefix: str = ""

    def ids(self, queued_id: str) -> tuple[str, ...]:
        if not self.count:
            return (self.node_id,)
        return tuple(f"{self.prefix or queued_id}-{number}" for number in range(self.count))


@dataclass(frozen=True, slots=True)
class Validity:
    """`queueing_policy`: instants, or lengths that count from the create."""

    until: datetime | None = None
    until_after: timedelta | None = None
    after: datetime | None = None
    after_after: timedelta | None = None
    interval: tuple[datetime | None, datetime | None] | None = None

    def begin(self, created: datetime) -> datetime | None:
        """Not served before this."""
        if self.interval is not None:
            return self.interval[0]
        return created + self.after_after if self.after_after is not None else self.after

    def end(self, created: datetime) -> datetime | None:
        """Not served after this."""
        if self.interval is not None:
            return self.interval[1]
        return created + self.until_after if self.until_after is not None else self.until


@dataclass(frozen=True, slots=True)
class QueuedSpec:
    """
    The settings of a queued resource that a caller may choose.

    tier: `spot`, `guaranteed`, `best-effort` (v2alpha1) or empty; min_duration and reserved belong to `guaranteed`
    """

    nodes: tuple[QueuedNodeSpec, ...] = ()
    tier: str = ""
    min_duration: timedelta | None = None
    reserved: bool = False
    reservation_name: str = ""
    validity: Validity = Validity()
    has_policy: bool = False


@dataclass(frozen=True, slots=True)
class QueuedRecord:
    """
    One queued resource as the API shows it at this instant.

    error: (code, message) while it is FAILED     state: a plain number, since an operator may set any
    """

    path: QueuedPath
    create_time: datetime
    spec: QueuedSpec
    state: int = QueuedState.CREATING
    initiator: int = Initiator.UNSPECIFIED
    error: tuple[int, str] | None = None
    unknown_fields: bool = False

    @property
    def name(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class QueuedPage:
    """One page of ListQueuedResources."""

    resources: tuple[QueuedRecord, ...]
    next_page_token: str = ""
    unreachable: tuple[str, ...] = ()
