"""What a world remembers of a queued resource, and of the nodes that it is to have. Mechanics are in `queue_life`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from tpucare.model.accelerators import Accelerator
from tpucare.testbed.emulator.world.queue_records import QueuedPath, QueuedRecord
from tpucare.testbed.emulator.world.records import NodePath, NodeSpec


@dataclass(frozen=True, slots=True)
class Planned:
    """One node that a resource is to have."""

    path: NodePath
    spec: NodeSpec
    accelerator: Accelerator
    multislice: bool = False


@dataclass(eq=False, slots=True)
class QueuedLife:
    """
    One queued resource, with what the API does not show.

    tries:     counts the spells of waiting: what was scheduled in an earlier one must do nothing
    resetting: SUSPENDING on the way back to waiting, and not to SUSPENDED
    shell:     it holds quota though it has no nodes
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
