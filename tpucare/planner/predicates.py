"""
Questions about a node and its run (is it quiet? how far did it get?), and the Stop and Delete that answers lead to.

Pure. Shared by `decide`, `node` and `run`, which choose the next step.
"""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import NamedTuple

from tpucare.model.actions import Delete, EffectKind, GetNode, Stop, Wait
from tpucare.model.causes import Cause, Reason
from tpucare.model.evidence import SUPPORTING_OBSERVATIONS, Case, Evidence, Mark, NodeEvidence
from tpucare.model.memory import FailureKind, Memory
from tpucare.model.resources import Job, NodeKey, Provisioning, Slot
from tpucare.model.runs import Contact
from tpucare.planner.backoff import failure_backoff_cap

ON_DEMAND_SILENCE = timedelta(minutes=30)
STALL_FACTOR = 10
LONG_LIFE = timedelta(hours=1)
# In a row, over several nodes, without a step beyond the furthest: then the job itself is at fault (OOM, deadlock).
INFRASTRUCTURE_BUDGET = 12
READ_EVERY = timedelta(seconds=5)
READ_CAP, READ_CAP_HUMAN = timedelta(minutes=1), timedelta(minutes=10)


def get_node_when_due(case: Case, key: NodeKey, cause: Cause, why: str) -> GetNode | None:
    """GetNode, unless one is in flight or ended just now; after failures with growing pauses."""
    this = EffectKind.GET_NODE.of(key.name)
    last, failed, every = case.evidence.ended_effects.get(this), case.evidence.failed_reads.get(key.name), READ_EVERY
    if failed is not None:
        every = min(READ_EVERY * 2 ** min(failed.times, 10), READ_CAP_HUMAN if failed.human else READ_CAP)
    if this in case.evidence.in_flight or not (last is None or case.timers.lasted(last, every, observations=0)):
        return None
    return GetNode(key, cause, why)


def deletion(
    seen: NodeEvidence,
    cause: Cause,
    why: str,
    reason: Reason,
    *,
    unanswered: bool = False,
    held: bool = False,
    lasted: timedelta | None = None,
) -> Delete:
    """A Delete of this node; `quiet` by its last report."""
    node, quiet = seen.node, is_quiet(seen)
    identity = (node.key, node.id, node.create_time)
    return Delete(*identity, cause, why, reason, quiet=quiet, unanswered=unanswered, held=held, lasted=lasted)


def is_quiet(seen: NodeEvidence) -> bool:
    """Every worker answered, and none of them runs anything of ours or holds chips."""
    report = seen.report
    return report is not None and report.all_answer and all(not w.alive and w.chips_free for w in report.workers)


def effect_under_way(seen: NodeEvidence, evidence: Evidence) -> Wait | None:
    """
    A Wait while a launch, stop or delete of this node is in flight.

    Reports from before the end of a launch prove no quiet, so nothing is decided about the node meanwhile.
    """
    name = seen.node.name
    for kind in (EffectKind.LAUNCH, EffectKind.STOP, EffectKind.DELETE):
        if kind.of(name) in evidence.in_flight:
            return Wait(Cause.UNDER_WAY, f"{kind} of {name} is under way")
    return None


def unlisted_zones(case: Case) -> Wait | None:
    """
    A Wait, by rule 1, while memory is lost or may be a backup's, and zones have not answered once.

    After a lost store: any zone; after an old one: the zones of this slot's places.
    """
    places = {place.zone for place in case.slot.places} & case.evidence.project.unanswered
    if case.evidence.project.store_lost and not case.evidence.project.complete:
        cause, what = Cause.STORE_LOST, "the store was lost, and a zone that has not answered yet"
    elif case.evidence.project.store_old and places:
        cause = Cause.STORE_OLD
        what = f"the store lay idle and may be a backup, and {min(places)}, which has not answered yet,"
    else:
        return None
    why = f"{what} may hold a node that it does not know"
    loud = case.timers.lasted(Mark(timedelta(), 0), case.slot.care.fence_after)
    return Wait(cause, f"{why} (`tpucare confirm --store` to go on)" if loud else why, needs_person=loud)


def without_job(slot: Slot, then: str) -> Wait:
    """The Wait of a slot whose job is unknown or was never declared."""
    if slot.job_problem:
        advice = f"raise `count` and apply its file, or `tpucare down {slot.name}`"
        why = f"its job is not known ({slot.job_problem}): {advice}; {then}"
        return Wait(Cause.JOB_UNKNOWN, why, needs_person=True)
    if slot.lacks:
        return Wait(Cause.DECLARATION_INCOMPLETE, f"{slot.lacks}; until then {then}", needs_person=True)
    return Wait(Cause.JOB_MISSING, f"no job is declared; {then}")


def stop_before(case: Case, seen: NodeEvidence, delete: Delete) -> Stop | Delete:
    """A Stop where a run may live and none was tried yet, else *delete*."""
    tried = EffectKind.STOP.of(seen.node.name) in case.evidence.ended_effects
    if tried or seen.workers is None or not _may_run(seen, case.memory):
        return delete
    return ending(seen, case.memory, delete.cause, delete.why, then=delete.reason, lasted=delete.lasted)


def _may_run(seen: NodeEvidence, memory: Memory) -> bool:
    if seen.report is not None:
        return any(worker.alive for worker in seen.report.workers)
    # Not probed since the launch, or since this process started.
    run = memory.run_on(seen.node.name)
    return run is not None and not run.state.is_past


def ending(
    seen: NodeEvidence,
    memory: Memory,
    cause: Cause,
    why: str,
    failure: FailureKind | None = None,
    *,
    then: Reason | None = None,
    gives_up: bool = False,
    advanced: bool = False,
    served: bool = False,
    stacks: bool = False,
    lasted: timedelta | None = None,
) -> Stop:
    """A Stop of all runs on this node, with the furthest step and checkpoint."""
    node, far = seen.node, furthest(seen, memory)
    run = memory.run_on(node.name)
    token = token_of(seen) or (run.token if run is not None else f"{node.name}.0")
    return Stop(
        node.key,
        node.id,
        token,
        cause,
        why,
        failure,
        advanced=advanced,
        served=served,
        gives_up=gives_up,
        stacks=stacks,
        step=far.step,
        checkpoint=far.checkpoint,
        then=then,
        lasted=lasted,
    )


class Furthest(NamedTuple):
    """The furthest step and checkpoint of a slot's training, by reports and memory."""

    step: int | None
    checkpoint: int | None


def furthest(seen: NodeEvidence, memory: Memory) -> Furthest:
    return Furthest(furthest_of(seen, "step", memory.step), furthest_of(seen, "checkpoint", memory.checkpoint))


def has_advanced(seen: NodeEvidence, memory: Memory) -> bool:
    """
    The run got further than any earlier run of its job, so its failure starts a new streak; without a step signal: it
    lived for LONG_LIFE.
    """
    step, checkpoint = furthest_of(seen, "step", None), furthest_of(seen, "checkpoint", None)
    if checkpoint is not None and memory.checkpoint is not None and checkpoint > memory.checkpoint:
        return True
    if step is not None:
        return memory.step is None or step > memory.step
    # A stalled run lived until its last sign of progress.
    begun, ended = seen.progress.begun or seen.phase_since, seen.ended_since or seen.progress.last
    return begun is not None and ended is not None and ended.observed - begun.observed >= LONG_LIFE


def furthest_of(seen: NodeEvidence, what: str, known: int | None) -> int | None:
    reported = [getattr(worker, what) for worker in (seen.report.workers if seen.report else ())]
    return max((value for value in [*reported, known] if value is not None), default=None)


def token_of(seen: NodeEvidence) -> str:
    """Token of the newest run of this very node by its workers' reports; empty: none."""
    tokens = {worker.token for worker in (seen.report.workers if seen.report else ())}
    own = [token for token in tokens if _belongs(token, seen.node.name)]
    return max(own, key=run_number, default="")


def run_number(token: str) -> int:
    """2 of `pod-0-a3.2`."""
    return int(token.rpartition(".")[2])


def _belongs(token: str, node: str) -> bool:
    name, _, number = token.rpartition(".")
    return name == node and number.isascii() and number.isdigit()


def next_number(seen: NodeEvidence, memory: Memory) -> int:
    """Number of the next run; continues from the workers' where the store does not know them (rule 4)."""
    run = memory.run_on(seen.node.name)
    reported = max((worker.last_number for worker in (seen.report.workers if seen.report else ())), default=0)
    return max(run.number if run is not None else 0, reported) + 1


def job_mark(job: Job) -> str:
    """Digest of the parts of a job that its steps depend on: equal for runs whose progress can be compared."""
    parts = (job.run, job.setup, job.repository, job.branch, job.workdir, sorted(job.env.items()), job.checkpoint)
    return hashlib.sha256(json.dumps((*parts, job.progress, job.foreign)).encode()).hexdigest()[:16]


def cache_scope(slot: Slot, memory: Memory, node: str) -> str:
    """
    Digest of all that the daemon knows of an environment: project, fleet, image, set-up; empty: it is kept nowhere.

    Another project's or fleet's archive has another scope, so it is never used.
    """
    job, past = slot.job, memory.node(node)
    if job is None or not job.cache or not job.setup:
        return ""
    place = slot.place(past.place) if past is not None else None
    runtime = place.runtime if place is not None else ""
    parts = (slot.project, slot.fleet, runtime, job.setup_mark, job.cache, job.cache_paths)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def keeps_node(seen: NodeEvidence) -> bool:
    """On-demand and reserved nodes are never deleted for stall, crash or health."""
    return seen.node.provisioning in (Provisioning.ON_DEMAND, Provisioning.RESERVED)


def patience_with_silence(slot: Slot, seen: NodeEvidence) -> timedelta:
    limit = slot.care.unreachable_after
    return max(limit, ON_DEMAND_SILENCE) if keeps_node(seen) else limit


def usual_pause(seen: NodeEvidence) -> timedelta:
    """STALL_FACTOR times the median gap between signs: a pause so long is usual for this run."""
    return (seen.progress.median_gap or timedelta()) * STALL_FACTOR


def nothing_moves(seen: NodeEvidence) -> bool:
    """
    Enough reports without change, or no worker that answers; required beside the length of a standstill.

    Time alone is no observation: workers that are probed seldom have not been seen to stand still.
    """
    return not some_answer(seen) or seen.progress.still >= SUPPORTING_OBSERVATIONS


def some_answer(seen: NodeEvidence) -> bool:
    workers = seen.report.workers if seen.report is not None else ()
    return any(worker.contact is Contact.ANSWERED for worker in workers)


def made_progress_since(seen: NodeEvidence, mark: Mark) -> bool:
    last = seen.progress.last
    return last is not None and last.observed > mark.observed


def backoff_over(case: Case) -> Wait | None:
    """None when the pause after the last failure of each kind is over."""
    for name, counter in case.memory.books.items():
        if not case.timers.passed(counter.retry_at, failure_backoff_cap(FailureKind(name))):
            assert counter.retry_at is not None
            row = f"{name} {counter.failures} in a row ({counter.reason})"
            return Wait(Cause.BACKOFF, f"{row}; next launch at {counter.retry_at:%H:%M:%S} UTC")
    return None
