"""
Orders to the workers of a node and their reports: the records that cross the Launcher port.

Scripts and SSH are the adapters' business, decisions the planner's. Frozen, standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from tpucare.model.resources import Job, NodeKey, Worker
from tpucare.model.text import length


class Contact(StrEnum):
    """Outcome of the last try to reach a worker."""

    ANSWERED = "answered"
    SILENT = "silent"
    AUTH_REFUSED = "auth-refused"
    HOST_KEY_CHANGED = "host-key-changed"


class Phase(StrEnum):
    """Phase of a run on one worker."""

    NONE = "none"
    FETCH = "fetch"
    SETUP = "setup"
    RUN = "run"
    EXITED = "exited"


class Failure(StrEnum):
    """Reason of a non-zero exit, as classified by the runner."""

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
    State on one worker of a run that tpucare's runner did not start.

    seen:     a process or session of it lived there after its setup
    rebooted: the worker booted since the launch
    lost:     its setup is not over, and the process that did it is gone
    status:   exit status left by the script of `exec_command`; None: unknown
    """

    seen: bool = False
    rebooted: bool = False
    lost: bool = False
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Archive:
    """
    A stored environment, as the set-up of a job made it; only its SHA-256 makes it believed.

    scope: digest of project, fleet, image and set-up (`predicates.cache_scope`)
    key:   digest of the scope, lock files and the worker's Python, by the worker
    """

    scope: str
    key: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """
    How a run came to its environment: `restored` from an archive, or `made` by the set-up; empty: not yet, or neither.

    missed:  why an archive was not used    refused: why the environment is not kept for later nodes
    archive: the environment that this run stored
    """

    environment: str = ""
    fetch_seconds: float | None = None
    setup_seconds: float | None = None
    missed: str = ""
    refused: str = ""
    archive: Archive | None = None


UNPREPARED = Preparation()


def preparation_text(made: Preparation) -> str:
    """`environment restored in 3 s`, `set up in 2 min 1 s (lock files changed)`; empty before that."""
    if not made.environment:
        return ""
    took = f" in {length(made.setup_seconds)}" if made.setup_seconds is not None else ""
    fetched = f", code fetched in {length(made.fetch_seconds)}" if made.fetch_seconds is not None else ""
    why = f" ({made.missed})" if made.missed else ""
    return ("environment restored" if made.environment == "restored" else "set up") + took + why + fetched


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """
    The report of one worker to the last probe.

    Reports compare without step, checkpoint, log size, saves and detail: these change no decision by themselves.

    token:       the run named by the lock or the newest run folder; empty when there was none
    alive:       the lock is held, processes of a run live, or a foreign process holds the chips
    chips_free:  no process holds `/dev/accel*` or `/dev/vfio/*`
    last_number: the highest run number with a folder on this worker
    signalled:   runner or run got SIGTERM or a notice; for a maintenance, until 5 min after it
    exit_status: of the run, once it ended and the status is known
    foreign:     set for a run that tpucare's runner did not start
    log_bytes:   length of the run's log
    cadence_seconds: the interval of saves that the run was told    save_seconds: cost of a save as the run measured it
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
    cadence_seconds: float | None = field(default=None, compare=False)
    save_seconds: float | None = field(default=None, compare=False)
    preparation: Preparation = field(default=UNPREPARED, compare=False)
    detail: str = field(default="", compare=False)

    @property
    def is_torn(self) -> bool:
        """A foreign run was here and ended with a reboot of the worker."""
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
    Probe every worker. `progress`: pattern whose last match in the log is the step. `everything`: long log tails.

    `settled`: token of the foreign run whose setup is over on all workers, to be recorded there.
    `cadence`: new content of the file TPUCARE_CADENCE of the run `run`; empty: it stays as it is.
    """

    workers: tuple[Worker, ...]
    slot: str
    attempt: int
    progress: str = ""
    checkpoint: str = ""
    everything: bool = False
    settled: str = ""
    cadence: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """
    Start one run, as one gang, on all workers of a node. `token` is `<node>.<n>`.

    cache_scope: `predicates.cache_scope`    archive: an environment of that scope, to be used instead of the set-up
    """

    workers: tuple[Worker, ...]
    slot: str
    fleet: str
    token: str
    attempt: int
    job: Job
    coordinator: str
    grace: timedelta = timedelta(seconds=30)
    sigterm_on_preemption: bool = True
    cache_scope: str = ""
    archive: Archive | None = None


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """
    Shape: one entry per worker; None = the run was started there, or found running under this token; else the error.
    """

    workers: tuple[Exception | None, ...]

    @property
    def complete(self) -> bool:
        return all(error is None for error in self.workers)


@dataclass(frozen=True, slots=True)
class StopOrder:
    """
    End all runs on the workers: SIGTERM, after `grace` SIGKILL to everything, then wait until the chips are free.

    `stacks`: first collect stack traces of the run into its log (stalled runs).
    """

    workers: tuple[Worker, ...]
    slot: str
    attempt: int
    grace: timedelta
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class StopResult:
    """Shape: one entry per worker. True: no run, chips free. False: processes or chips busy. Error: unknown."""

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
