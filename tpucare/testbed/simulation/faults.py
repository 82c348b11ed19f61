"""
Every kind of fault in a simulated history, with its rate at each level.

Rates are occurrences per day: for each slot, or for the whole history where a fault concerns a zone or all slots.
Lengths are seconds, drawn between two bounds. `strikes` implements the faults; `scenario.world_of` sets those that the
world draws itself (latencies, lagging lists, failing calls).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from tpucare.model.resources import Provisioning, Slot
from tpucare.testbed.simulation.queues import uses_queue

LEVELS: Mapping[str, float] = MappingProxyType({"none": 0.0, "low": 0.2, "high": 1.0})
"""The share of the faults in `scenario.world_of` at each level."""


class Span(StrEnum):
    """The scope of a fault."""

    SLOT = "slot"
    ZONE = "zone"
    ALL = "all"


def _any(_slot: Slot) -> bool:
    return True


def _gang(slot: Slot) -> bool:
    return all(place.workers > 1 for place in slot.places)


def _stoppable(slot: Slot) -> bool:
    return all(p.provisioning is Provisioning.ON_DEMAND and p.workers == 1 for p in slot.places)


def _preemptible(slot: Slot) -> bool:
    return all(p.provisioning in (Provisioning.SPOT, Provisioning.PREEMPTIBLE) for p in slot.places)


def _own(slot: Slot) -> bool:
    """True for slots whose runs report progress and end; those of a user's function do not."""
    return slot.job is None or not slot.job.foreign


def _own_preemptible(slot: Slot) -> bool:
    return _own(slot) and _preemptible(slot)


@dataclass(frozen=True, slots=True)
class Fault:
    """
    One kind of fault. `low`, `high`: rates per day; `fits`: the slots that it can hit. `enough`: how often a campaign
    has to have it; less for a fault that changes a whole history.
    """

    text: str
    low: float
    high: float
    span: Span = Span.SLOT
    length: tuple[float, float] = (0.0, 0.0)
    fits: Callable[[Slot], bool] = _any
    enough: int = 100

    @property
    def rates(self) -> Mapping[str, float]:
        return {"none": 0.0, "low": self.low, "high": self.high}


MINUTE, HOUR = 60.0, 3600.0

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        # How nodes end.
        "preempted": Fault("the workers die, later the API shows it", 0.02, 3.0, fits=_preemptible),
        "preempted-in-a-burst": Fault(
            "a third of a zone is preempted within a minute", 0.02, 8.0, Span.ZONE, (10 * MINUTE, 2 * HOUR)
        ),
        "preempted-unreported": Fault("the API shows READY for ever", 0.002, 0.5, fits=_preemptible),
        "preempted-shown-otherwise": Fault("the API shows REPAIRING, TERMINATED or 404", 0.002, 0.6, fits=_preemptible),
        "preempted-silently": Fault("the workers fall silent first and die later", 0.002, 0.6, fits=_preemptible),
        "preempted-while-creating": Fault("a node is preempted before it is READY", 0.002, 10.0, fits=_preemptible),
        "terminated": Fault("the end of 24 hours", 0.002, 0.8, fits=_preemptible),
        "forgotten": Fault("the API answers 404 from one moment to the next", 0.001, 0.5),
        "flips-back": Fault(
            "PREEMPTED or TERMINATED is shown for a moment, then READY",
            0.001,
            0.5,
            length=(MINUTE, 10 * MINUTE),
            fits=_preemptible,
        ),
        # Workers.
        "silent-worker": Fault("one worker does not answer for a while", 0.01, 1.0, length=(30.0, HOUR)),
        "lost-worker": Fault("one worker dies and the API shows nothing", 0.002, 0.5),
        "missing-worker": Fault("a slice comes up without one of its workers", 0.002, 1.2, fits=_gang),
        "rebooted": Fault("maintenance restarts all workers", 0.002, 0.6),
        "key-refused": Fault("a new machine does not know our key yet", 0.002, 0.8),
        "key-refused-for-good": Fault("a new machine never accepts our key", 0.0005, 0.5),
        "guest-404": Fault(
            "the same machine shows another host key, and guest attributes answer 404",
            0.0005,
            0.5,
            length=(MINUTE, HOUR),
        ),
        "host-key-changed": Fault("the same machine shows another host key", 0.001, 0.6),
        "dirty-host": Fault("the chips of a new machine are lost to an earlier run", 0.001, 0.6),
        "foreign-process": Fault("another user's process holds the chips of a new machine", 0.001, 0.6),
        "chips-held": Fault("a service of the image holds the chips of a new machine", 0.0005, 0.5),
        "container-left": Fault(
            "a run ends, and its container still holds the chips", 0.001, 0.5, length=(MINUTE, HOUR)
        ),
        "guarded": Fault("a new machine accepts our key late, and blocks refused addresses", 0.001, 0.6),
        "address-reused": Fault(
            "a node vanishes, lists lag, and another node gets its addresses",
            0.001,
            0.6,
            length=(MINUTE, 10 * MINUTE),
        ),
        # Runs.
        "crashed": Fault("the run exits with 1 on one worker", 0.01, 0.8),
        "out-of-memory": Fault("the run is gone without an exit status", 0.005, 0.8),
        "hung": Fault("the run lives on and makes no step", 0.005, 0.6, fits=_own),
        "hang-then-restart": Fault(
            "the run makes no step any more, and the daemon is killed", 0.0005, 0.5, length=(1.0, 2 * MINUTE), fits=_own
        ),
        "one-signal-hang": Fault(
            "the next run makes no step after its first ones", 0.0005, 0.5, length=(20 * MINUTE, HOUR), fits=_own
        ),
        "dependency-down": Fault(
            "something that every run needs is down", 0.005, 2.5, Span.ALL, (10 * MINUTE, 2 * HOUR)
        ),
        "finished-then-preempted": Fault(
            "the run succeeds, and its node is preempted within the minute", 0.0005, 0.4, fits=_own_preemptible
        ),
        "notice-without-end": Fault(
            "an announced maintenance does not happen, and later the run succeeds",
            0.0005,
            0.4,
            length=(10 * MINUTE, HOUR),
            fits=_own,
        ),
        "exit-0-under-preemption": Fault(
            "the run exits with 0 at the notice of a preemption", 0.002, 0.6, fits=_preemptible
        ),
        "setup-failed": Fault("the set-up exits with 1", 0.002, 0.6),
        "stop-ignored": Fault("the run does not end when it is stopped", 0.001, 0.5, length=(60.0, 10 * MINUTE)),
        "launch-lost-before": Fault("a worker drops the next launch", 0.002, 1.0),
        "launch-lost-after": Fault("a worker runs the next launch, and the answer is lost", 0.002, 1.0),
        "stop-lost": Fault("a worker does not get the next stop", 0.002, 1.0),
        # What the API shows.
        "unhealthy": Fault("health turns bad for a while", 0.005, 1.0, length=(MINUTE, 2 * HOUR)),
        "repairing": Fault("REPAIRING for a while", 0.002, 0.8, length=(MINUTE, 2 * HOUR)),
        "repair-failed": Fault("UNKNOWN(16)", 0.0005, 0.6),
        "odd-state": Fault("HIDDEN, or an unknown number", 0.001, 0.8, length=(MINUTE, HOUR)),
        "missing-from-list": Fault("lists leave a node out", 0.005, 1.0, length=(5.0, 10 * MINUTE)),
        "stuck-delete": Fault("DELETING until it is asked for again", 0.005, 1.0),
        "stopped-by-somebody": Fault(
            "STOPPED, and started again later", 0.01, 12.0, length=(5 * MINUTE, HOUR), fits=_stoppable
        ),
        # Creates.
        "stockout": Fault("the operation says: no more capacity", 0.01, 1.0),
        "zone-sold-out": Fault("no capacity in a zone", 0.05, 5.0, Span.ZONE, (10 * MINUTE, 3 * HOUR)),
        "quota-refused": Fault("the call says: quota", 0.002, 0.6),
        "rate-limited": Fault("the call says: too many a minute", 0.002, 0.6),
        "permission-denied": Fault("the call says: 7", 0.0005, 0.5),
        "policy-refused": Fault("the operation says: a policy of the organisation", 0.0005, 0.5),
        "create-failed": Fault("the operation says: internal error", 0.002, 0.6),
        "create-granted-late": Fault(
            "the call takes effect long after its caller gave up", 0.001, 0.8, length=(40.0, 90 * MINUTE)
        ),
        # Answers.
        "answer-lost-before": Fault("a create or delete never arrives, and its answer is lost", 0.005, 1.2),
        "answer-lost-after": Fault("a create or delete takes effect, and its answer is lost", 0.005, 1.2),
        "listing-failed": Fault("a listing fails", 0.5, 20.0, Span.ALL),
        "reads-limited": Fault("reads are refused: too many a minute", 0.02, 4.0, Span.ALL, (MINUTE, 20 * MINUTE)),
        "zone-unreachable": Fault("a zone does not answer", 0.1, 6.0, Span.ZONE, (MINUTE, 40 * MINUTE)),
        "zone-dark-for-ever": Fault("a zone never answers again", 0.001, 0.4, Span.ZONE, enough=10),
        "api-down": Fault("no call is answered", 0.05, 6.0, Span.ALL, (20.0, 30 * MINUTE)),
        "api-slow": Fault("every call takes 5 to 40 s longer", 0.05, 6.0, Span.ALL, (MINUTE, 30 * MINUTE)),
        "everything-slow": Fault("calls and workers alike are slow", 0.02, 5.0, Span.ALL, (MINUTE, 30 * MINUTE)),
        "network-dark": Fault("our own network is down", 0.02, 5.0, Span.ALL, (MINUTE, 40 * MINUTE)),
        "workers-unreachable": Fault("no worker answers, the API does", 0.01, 4.0, Span.ALL, (MINUTE, 40 * MINUTE)),
        # The daemon and its machine.
        "killed": Fault("killed, and started again later", 0.05, 8.0, Span.ALL, (1.0, 20 * MINUTE)),
        "killed-before-effects": Fault("killed between intents and their effects", 0.02, 8.0, Span.ALL, (1.0, MINUTE)),
        "killed-with-effects-under-way": Fault("killed while calls are in flight", 0.02, 24.0, Span.ALL, (1.0, MINUTE)),
        "torn-commit": Fault("killed in the middle of a commit", 0.02, 8.0, Span.ALL, (1.0, MINUTE)),
        "killed-after-commit": Fault("killed right after a commit", 0.02, 8.0, Span.ALL, (1.0, MINUTE)),
        "disk-full": Fault("the disk is full for a while", 0.01, 6.0, Span.ALL, (10.0, 20 * MINUTE)),
        "clock-forward": Fault("the clock jumps forward", 0.01, 6.0, Span.ALL, (30.0, 24 * HOUR)),
        "clock-back": Fault("the clock jumps back", 0.01, 6.0, Span.ALL, (30.0, 3 * HOUR)),
        "suspended": Fault("the process stands still", 0.02, 5.0, Span.ALL, (MINUTE, 2 * HOUR)),
        # People.
        "paused": Fault("pause, and resume later", 0.002, 0.6, length=(MINUTE, 30 * MINUTE)),
        "taken-down": Fault("down, and up again later", 0.002, 0.6, length=(MINUTE, 30 * MINUTE)),
        "replaced": Fault("a person asks for a new node", 0.001, 0.6),
        "restarted": Fault("a person asks for a new run", 0.001, 0.6),
        "edited": Fault(
            "the fleet file gets another count, type, zone or job, or a file per slot",
            0.001,
            0.6,
            length=(5 * MINUTE, 2 * HOUR),
            fits=_own,
        ),
        "relabelled": Fault("a person edits the slot or fleet label of a node", 0.001, 0.5, length=(MINUTE, HOUR)),
        "taken-back": Fault(
            "a person labels a node with another owner, and gives it back or deletes it",
            0.001,
            0.5,
            length=(5 * MINUTE, HOUR),
        ),
        # Queues.
        "queue-failed": Fault("a queued resource is FAILED", 0.01, 2.0, fits=uses_queue),
        "queue-suspended": Fault(
            "a granted queued resource is suspended, and no node shows it", 0.01, 3.0, fits=uses_queue
        ),
        "queue-forgotten": Fault("a waiting queued resource is gone", 0.005, 1.0, fits=uses_queue),
        "queue-answer-lost": Fault(
            "the answer to a create or delete of a queued resource is lost", 0.02, 4.0, fits=uses_queue
        ),
        "queue-refused": Fault("the create of a queued resource is refused", 0.01, 1.5, fits=uses_queue),
        "queue-listing-failed": Fault("listings of queued resources fail", 0.02, 3.0, fits=uses_queue),
        "queue-delete-hangs": Fault("deletes of queued resources are refused for a while", 0.01, 1.5, fits=uses_queue),
        "queue-foreign": Fault(
            "a foreign queued resource has our next name", 0.005, 0.8, length=(MINUTE, HOUR), fits=uses_queue
        ),
        # Sweeps.
        "wandb-down": Fault("the server of the sweeps does not answer", 0.01, 3.0, Span.ALL, (MINUTE, 2 * HOUR)),
        "sweep-stopped": Fault(
            "a sweep is stopped while a run of it is interrupted", 0.005, 3.0, Span.ALL, (20 * MINUTE, 2 * HOUR)
        ),
        "foreign-node": Fault("a foreign node has our next name", 0.001, 0.6, length=(MINUTE, HOUR)),
        "stray": Fault("a node with our owner label and an unknown fleet", 0.001, 0.6, length=(MINUTE, 3 * HOUR)),
    }
)

EMERGENT: Mapping[str, str] = MappingProxyType(
    {
        "slow-create": "a create takes more than 15 minutes to READY",
        "operation-lingers": "the operation of a create stays open 5 minutes after READY",
        "address-met-another-machine": "an address led to another node's machine",
        "call-unavailable": "a call answered 14 or 13 by chance",
        "quota-used-up": "a create met the project's own quota, which other nodes held, dead ones included",
        "delete-asked-again": "a delete was sent during another delete",
    }
)
"""Faults that are not drawn but follow from others; they are counted when they occur."""
