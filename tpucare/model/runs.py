"""
What is asked of the workers of a node, and what they answer: the records that cross the Launcher port.

Frozen, standard library only, no behaviour beyond naming.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from tpucare.model.resources import Job, NodeKey, Worker


class Contact(StrEnum):
    """What a worker answered to the last try."""

    ANSWERED = "answered"
    SILENT = "silent"
    AUTH_REFUSED = "auth-refused"
    HOST_KEY_CHANGED = "host-key-changed"


class Phase(StrEnum):
    """How far a run is on one worker."""

    NONE = "none"
    FETCH = "fetch"
    SETUP = "setup"
    RUN = "run"
    EXITED = "exited"


class Failure(StrEnum):
    """Why a run that exited non-zero did so, as far as the runner could tell."""

    NONE = ""
    FETCH = "fetch"
    SETUP = "setup"
    DISK_FULL = "disk-full"
    SECRET_MISSING = "secret-missing"
    DIRTY_HOST = "dirty-host"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """
    What is known of a run that tpucare's runner did not start, on one worker.

    seen:     something of it lived there after its setup was over
    rebooted: the worker was started anew since the launch
    lost:     its setup is not over, and whoever did it is gone
    status:   exit status that the script of `exec_command` left of it; None: nobody knows
    """

    seen: bool = False
    rebooted: bool = False
    lost: bool = False
    status: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """
    What one worker said at the last probe.

    Two reports are equal when nothing changed that a decision could turn on: step, checkpoint and detail are left out.

    token:       the run that the lock or the newest run folder names; empty when there never was one
    alive:       the lock is held, or processes of a run live, or a foreign process holds the chips
    chips_free:  nobody holds `/dev/accel*` or `/dev/vfio/*`
    last_number: the highest run number that this worker has a folder for
    signalled:   runner or run was sent SIGTERM or a notice; of a maintenance only while it is on, or 5 min after
    exit_status: set only when the run is over and its status is known
    foreign:     set when the run is one that tpucare's runner did not start
    """

    contact: Contact
    token: str = ""
    alive: bool = False
    chips_free: bool = True
    phase: Phase = Phase.NONE
    exit_status: int | None = None
    failure: Failure = Failure.NONE
    signalled: bool = False
    preempted: bool = False
    maintenance: str = ""
    last_number: int = 0
    boot_id: str = ""
    foreign: ForeignRun | None = None
    step: int | None = field(default=None, compare=False)
    checkpoint: int | None = field(default=None, compare=False)
    log_bytes: int = field(default=0, compare=False)
    detail: str = field(default="", compare=False)

    @property
    def is_torn(self) -> bool:
        """A foreign run was here, and went when the worker was started anew."""
        return self.foreign is not None and self.foreign.seen and self.foreign.rebooted and not self.alive


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Answers of all workers of one node; shape: one entry per worker, index = worker number."""

    key: NodeKey
    node_id: int
    workers: tuple[WorkerReport, ...]

    @property
    def all_answer(self) -> bool:
        for worker in self.workers:
            if worker.contact is not Contact.ANSWERED:
                return False
        return bool(self.workers)


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """
    Ask every worker how it is. `progress` is the pattern whose last match in the log is the step.

    `settled`: this foreign run's setup is over on all workers; they write that down.
    """

    workers: tuple[Worker, ...]
    slot: str
    attempt: int
    progress: str = ""
    checkpoint: str = ""
    everything: bool = False
    settled: str = ""


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Start one run, as one gang, on all workers of a node. `token` is `<node>.<n>`."""

    workers: tuple[Worker, ...]
    slot: str
    fleet: str
    token: str
    attempt: int
    job: Job
    coordinator: str
    grace: timedelta = timedelta(seconds=30)
    sigterm_on_preemption: bool = True


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """
    Which workers hold the run now. Shape: one entry per worker; None = started (or found running under this token),
    else the error of that worker.
    """

    workers: tuple[Exception | None, ...]

    @property
    def complete(self) -> bool:
        return all(error is None for error in self.workers)


@dataclass(frozen=True, slots=True)
class StopOrder:
    """
    End whatever runs on the workers: SIGTERM, after `grace` SIGKILL of everything, wait until chips are free.

    `stacks`: collect stack traces of the run into the log first (stalled runs).
    """

    workers: tuple[Worker, ...]
    slot: str
    attempt: int
    grace: timedelta
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class StopResult:
    """Shape: one entry per worker. True: no run and chips free. False: something still holds on. Error: not known."""

    workers: tuple[bool | Exception, ...]

    @property
    def quiet(self) -> bool:
        return all(worker is True for worker in self.workers)


@dataclass(frozen=True, slots=True)
class NoticeOrder:
    """Write *text* into the run's notice file on every worker: please save."""

    workers: tuple[Worker, ...]
    token: str
    text: str
