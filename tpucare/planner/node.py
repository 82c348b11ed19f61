"""
What to do about one live node of a slot, up to the launch of a run; the run itself is `plan_run`'s.

Pure. The node's state decides first, then whether its workers answer, then whether an older node of the slot could
still be training (design, rule 1).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tpucare.model.actions import Action, AddSshKey, Delete, EffectKind, Fact, Launch, Record, Stop, Wait
from tpucare.model.causes import Cause, Reason
from tpucare.model.evidence import Evidence, Mark, NodeEvidence, Timers, latest
from tpucare.model.lifecycles import CreateState, RunState
from tpucare.model.memory import BookName, DesiredState, End, Memory, NodeMemory
from tpucare.model.resources import PENDING_STATES, USABLE_STATES, NodeKey, NodeState, Slot
from tpucare.model.runs import Contact
from tpucare.model.text import length
from tpucare.planner.predicates import (
    INFRASTRUCTURE_BUDGET,
    backoff_over,
    busy,
    deletion,
    has_advanced,
    job_mark,
    keeps_node,
    look,
    made_progress_since,
    next_number,
    nothing_moves,
    patience_with_silence,
    quiet,
    some_answer,
    standing,
    stop_before,
    token_of,
    unseen,
    usual_pause,
    without_job,
)
from tpucare.planner.run import decide_foreign, decide_run, done, is_foreign
from tpucare.planner.trust import decide_changed_key, decide_trust

STOPPED = frozenset({NodeState.STOPPING, NodeState.STOPPED})

FAILED_CREATE_SILENCE = timedelta(seconds=60)
KEY_MAY_BE_LATE = timedelta(seconds=30)
KEY_PUSH_EVERY = timedelta(minutes=1)
KEY_PUSH_SERVES = timedelta(minutes=3)
KEY_REFUSED_BY_SOME = timedelta(minutes=10)
CANARY_FACTOR = 3
NEVER_ANSWERED_FACTOR = 2


def decide_node(slot: Slot, seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers) -> Action:
    """The next step for the slot's only live node."""
    node, past = seen.node, memory.node(seen.node.name)
    if seen.dark and (action := decide_by_workers(slot, seen, evidence, memory, timers)):
        return action
    if seen.dark or (not seen.listed and node.name in evidence.failed_looks):
        return decide_hidden(slot, node.key.zone, node.name, evidence, timers)
    if not seen.listed and EffectKind.LOOK.of(node.name) not in evidence.looked:
        return Wait(Cause.NODE_ABSENT, f"looking for {node.name} by name")
    if past is None:
        return Wait(Cause.NODE_ABSENT, f"{node.name} is being looked at")
    if wait := busy(seen, evidence):
        return wait
    if memory.replace_asked:
        delete = deletion(seen, Cause.REPLACE_ASKED, "replace was asked for", Reason.ASKED)
        return stop_before(seen, evidence, memory, delete)
    if node.state in PENDING_STATES:
        return _decide_pending(slot, seen, past, evidence, memory, timers)
    if node.state in USABLE_STATES:
        return _decide_usable(slot, seen, past, evidence, memory, timers)
    if node.state is NodeState.UNKNOWN:
        return _decide_unknown(slot, seen, evidence, memory, timers)
    return _decide_odd(slot, seen)


def _decide_unknown(slot: Slot, seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers) -> Action:
    """By its meaning a repair failed, and it never becomes READY; but one field alone is no proof of that."""
    limit = max(patience_with_silence(slot, seen), usual_pause(seen))
    answers = some_answer(seen)
    life = latest(seen.state_since, seen.progress.last, seen.progress.life) if answers else seen.state_since
    if timers.lasted(life, limit) and nothing_moves(seen):
        what = "nothing moves on it" if answers else "no worker of it answers"
        why = f"UNKNOWN, and {what} for {length(limit)}"
        delete = deletion(seen, Cause.STATE_UNKNOWN, why, Reason.JUDGED)
        return stop_before(seen, evidence, memory, delete)
    past = memory.node(seen.node.name)
    if answers and past is not None and past.launched:
        # What moves may be a log alone: the run is cared for like any, so that one that hangs is found.
        return _decide_usable(slot, seen, past, evidence, memory, timers)
    return Wait(Cause.STATE_UNKNOWN, f"{seen.node.name} is UNKNOWN: waiting whether anything moves on it")


def decide_by_workers(
    slot: Slot, seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers
) -> Action | None:
    """
    What the API need not be asked for: all workers of the node were heard since it tells nothing, so the run that was
    launched on this very node may be settled, stopped and launched again there. None: nothing of that kind.

    Nothing is deleted, and no node is asked for; where an older one is in doubt, nothing is launched.
    """
    run, past, name = memory.run, memory.node(seen.node.name), seen.node.name
    if memory.wish is not DesiredState.UP or memory.end is not End.NONE or memory.replace_asked:
        return None
    if past is None or past.id != seen.node.id or not past.serves or run is None or run.node != name:
        return None
    if any(other.serves or other.may_be_training for other in memory.nodes if other.name != name):
        return None
    if seen.node.state not in PENDING_STATES | USABLE_STATES or busy(seen, evidence):
        return None
    if not seen.heard_alone or seen.report is None or not seen.report.all_answer:
        return None
    action = _decide_answering(slot, seen, past, evidence, memory, timers)
    # Rule 11: what takes a length of time to judge waits for listings, whose gaps alone count as observed.
    may_stop = isinstance(action, Stop) and action.then is None and action.lasted is None
    return action if may_stop or isinstance(action, Record | Launch) else None


def decide_hidden(slot: Slot, zone: str, name: str, evidence: Evidence, timers: Timers) -> Action:
    """A node that neither the listing nor GetNode tells of; after `fence_after` another may be asked for elsewhere."""
    if timers.lasted(evidence.hidden_since(zone, name), slot.care.fence_after):
        return Record(Fact.NODE_OUT_OF_SIGHT, f"nothing is heard of it for {length(slot.care.fence_after)}", name=name)
    if zone in evidence.project.unreachable_since:
        return Wait(Cause.ZONE_UNREACHABLE, f"{zone} does not answer: what is known of {name} stays")
    why = f"{name} is not in the listing, and may not be looked at: what is known of it stays"
    return Wait(Cause.NODE_HIDDEN, why)


def _decide_odd(slot: Slot, seen: NodeEvidence) -> Action:
    node = seen.node
    if node.state in STOPPED:
        if slot.care.stopped_delete:
            why = f"it is {node.state.name} and care.stopped is delete"
            return deletion(seen, Cause.NODE_STOPPED, why, Reason.ASKED)
        why = f"{node.name} is {node.state.name}: somebody stopped it; start it, or `down`"
        return Wait(Cause.NODE_STOPPED, why, needs_person=True)
    return Wait(Cause.STATE_ODD, f"{node.name} is {node.state.name}: waiting, nothing is known to do about it")


def _decide_pending(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, memory: Memory, timers: Timers
) -> Action:
    """Launch as soon as all workers answer, whatever the operation says; the limit is boot_timeout."""
    if seen.workers is not None and seen.report is not None and seen.report.all_answer:
        return _decide_answering(slot, seen, past, evidence, memory, timers)
    intent = memory.create(seen.node.name)
    if intent is not None and intent.state is CreateState.FAILED:
        failed_since = evidence.looked.get(EffectKind.FAILED.of(seen.node.name)) or seen.seen_since
        if timers.lasted(failed_since, FAILED_CREATE_SILENCE):
            why = f"its create failed ({intent.refused}) and no worker answers"
            return deletion(seen, Cause.CREATE_FAILED, why, Reason.DEAD)
        why = f"create of {seen.node.name} failed: {intent.refused}; waiting until it is gone"
        return Wait(Cause.CREATE_FAILED, why)
    since, limit = seen.state_since, slot.care.boot_timeout
    if past.answered:
        # Its workers came up long ago, whatever the API shows of it: what lasts is that some do not answer now.
        since = latest(since, seen.silent_since, seen.refused_since) or since
    if past.launched and seen.silent_since is not None and made_progress_since(seen, seen.silent_since):
        # It may train for hours while it shows CREATING; a worker that tells of steps vouches for the one that is mute.
        since, limit = latest(since, seen.progress.last) or since, max(limit, usual_pause(seen))
    if timers.lasted(since, limit):
        why = f"still {seen.node.state.name} at boot_timeout"
        never, lasted = not past.answered, slot.care.boot_timeout
        return deletion(seen, Cause.BOOT_TIMEOUT, why, Reason.JUDGED, unanswered=never, lasted=lasted)
    booting = Wait(Cause.BOOTING, f"{seen.node.name} is {seen.node.state.name}")
    return contact_trouble(slot, seen, past, evidence, timers) or booting


def _decide_usable(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, memory: Memory, timers: Timers
) -> Action:
    node = seen.node
    repairing = node.state is NodeState.REPAIRING and not keeps_node(seen)
    life = latest(seen.state_since, seen.progress.last, seen.progress.life)
    if repairing and timers.lasted(life, slot.care.unhealthy_after) and nothing_moves(seen):
        why = "REPAIRING for too long without progress"
        delete = deletion(seen, Cause.REPAIRING, why, Reason.JUDGED, lasted=slot.care.unhealthy_after)
        return stop_before(seen, evidence, memory, delete)
    if seen.workers is None:
        if timers.lasted(latest(seen.state_since, seen.lacking_since), slot.care.boot_timeout):
            why = "its list of workers is incomplete at boot_timeout"
            never, lasted = not past.answered, slot.care.boot_timeout
            return deletion(seen, Cause.WORKERS_MISSING, why, Reason.JUDGED, unanswered=never, lasted=lasted)
        return Wait(Cause.WORKERS_MISSING, f"{node.name} does not list all its workers yet")
    if seen.report is None:
        return Wait(Cause.BOOTING, f"asking the workers of {node.name}")
    if trouble := contact_trouble(slot, seen, past, evidence, timers):
        return _silence_beside(trouble, slot, seen, past, evidence, memory, timers)
    if not seen.report.all_answer:
        return _decide_silent(slot, seen, past, evidence, memory, timers)
    return _decide_answering(slot, seen, past, evidence, memory, timers)


def _silence_beside(
    trouble: Action,
    slot: Slot,
    seen: NodeEvidence,
    past: NodeMemory,
    evidence: Evidence,
    memory: Memory,
    timers: Timers,
) -> Action:
    """A reused address, or one worker without our key, does not hide that others of the node are silent."""
    if not isinstance(trouble, Wait) or seen.silent_since is None:
        return trouble
    verdict = _decide_silent(slot, seen, past, evidence, memory, timers)
    return verdict if isinstance(verdict, Delete) else trouble


def contact_trouble(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, timers: Timers
) -> Action | None:
    """Workers that listen and will not have us: a key that is not there yet, a host key that changed."""
    if seen.report is None:
        return None
    contacts = {worker.contact for worker in seen.report.workers}
    if Contact.HOST_KEY_CHANGED in contacts:
        return decide_changed_key(slot, seen, past, evidence, timers)
    if Contact.AUTH_REFUSED in contacts:
        return _decide_refused(seen, past, evidence, timers, some_accept=Contact.ANSWERED in contacts)
    return None


def _decide_refused(
    seen: NodeEvidence, past: NodeMemory, evidence: Evidence, timers: Timers, *, some_accept: bool
) -> Action:
    name = seen.node.name
    if not past.keyed:
        # The guest agent writes the key some seconds after sshd listens; UpdateNode too early is a call for nothing.
        last = evidence.looked.get(EffectKind.KEY.of(name))
        pause_over = last is None or timers.lasted(last, KEY_PUSH_EVERY)
        late = timers.lasted(seen.refused_since, KEY_MAY_BE_LATE)
        if late and pause_over and EffectKind.KEY.of(name) not in evidence.in_flight:
            return AddSshKey(seen.node.key, Cause.KEY_REFUSED, "a worker refuses our key")
        why = f"a worker of {name} does not know our key yet"
        return Wait(Cause.KEY_REFUSED, why, needs_person=last is not None)
    if some_accept and not (past.launched or keeps_node(seen)):
        # No setting of the project tells workers of one node apart: the guest agent of that one is broken.
        if timers.lasted(seen.refused_since, KEY_REFUSED_BY_SOME):
            why = f"a worker refuses our key for {length(KEY_REFUSED_BY_SOME)}, others take it"
            return deletion(seen, Cause.KEY_REFUSED, why, Reason.JUDGED, unanswered=True)
        why = f"a worker of {name} refuses our key, and others take it: waiting until it does"
        return Wait(Cause.KEY_REFUSED, why)
    if timers.lasted(seen.refused_since, KEY_PUSH_SERVES):
        why = "is OS Login on, by policy (requireOsLogin) or for want of enable-oslogin: FALSE, or is a key blocked?"
        return Wait(Cause.KEY_REFUSED, f"{name} refuses our key, though its metadata has it: {why}", needs_person=True)
    return Wait(Cause.KEY_REFUSED, f"our key was written to the metadata of {name}; waiting until its workers take it")


def _decide_silent(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, memory: Memory, timers: Timers
) -> Action:
    """Silence is a verdict only when the network is known to carry, or for one canary at a time."""
    name, limit = seen.node.name, patience_with_silence(slot, seen)
    run = memory.run
    if (
        run is not None
        and run.state is RunState.FINISHED
        and run.node == name
        and timers.lasted(seen.silent_since, slot.care.success_after)
    ):
        return done(name, standing(seen, memory))
    if not past.answered:
        limit = limit * NEVER_ANSWERED_FACTOR
    # Workers that are silent while the node is CREATING are booting, whichever of them answer early.
    since = latest(seen.silent_since, seen.state_since)
    if not past.answered:
        # A slice whose workers come up one after the other is booting; boot_timeout ends that.
        since = latest(since, seen.arrived_since)
    if seen.silent_since is not None and made_progress_since(seen, seen.silent_since):
        # The last step before a gang hangs may be seen after a worker fell silent: progress has to go on to count.
        since, limit = latest(since, seen.progress.last), max(limit, usual_pause(seen))
        if not timers.lasted(since, limit):
            return Wait(Cause.SILENT, f"a worker of {name} is silent, progress goes on")
    supported = seen.silent_probes >= 3
    # Who refused our key may be a guard that drops our packets by now, and lets us in minutes later.
    guarded = past.refused and not past.answered
    if supported and not guarded and timers.lasted(since, limit) and evidence.elsewhere_answers:
        return _silence_ends(seen, past, memory, f"a worker is silent for {length(limit)}, others answer", limit)
    if not past.answered:
        # Where nobody answers, or a guard may be at work, only boot_timeout ends the wait for a node that never did.
        if supported and timers.lasted(seen.seen_since, slot.care.boot_timeout):
            why = "its workers never answered until boot_timeout"
            return deletion(
                seen, Cause.NEVER_ANSWERED, why, Reason.JUDGED, unanswered=True, lasted=slot.care.boot_timeout
            )
    elif supported and timers.lasted(since, limit * CANARY_FACTOR) and evidence.may_be_canary:
        for_so_long = length(limit * CANARY_FACTOR)
        why = f"no worker anywhere answers for {for_so_long}; this slot tries first whether a new node does"
        return deletion(seen, Cause.CANARY, why, Reason.JUDGED, lasted=limit * CANARY_FACTOR)
    if stop := _stop_half_gang(slot, seen, since, evidence, memory, timers):
        return stop
    return Wait(Cause.SILENT, f"a worker of {name} is silent")


def _silence_ends(seen: NodeEvidence, past: NodeMemory, memory: Memory, why: str, lasted: timedelta) -> Delete:
    """
    A job may cut off its own nodes (memory, firewall, sshd): what a run was on when it fell silent is an interruption.

    Preemptions that the cloud never tells of look alike; progress between them ends the row.
    """
    delete = deletion(seen, Cause.SILENT, why, Reason.JUDGED, unanswered=not past.answered, lasted=lasted)
    run = memory.run
    if not past.answered or run is None or run.node != past.name or not run.complete or run.state.is_past:
        return delete
    advanced, far = has_advanced(seen, memory), standing(seen, memory)
    spent = not advanced and memory.book(BookName.INFRASTRUCTURE).failures >= INFRASTRUCTURE_BUDGET
    return replace(
        delete,
        book=BookName.INFRASTRUCTURE,
        advanced=advanced,
        gives_up=spent,
        step=far.step,
        checkpoint=far.checkpoint,
    )


def _stop_half_gang(
    slot: Slot, seen: NodeEvidence, since: Mark | None, evidence: Evidence, memory: Memory, timers: Timers
) -> Stop | None:
    """Some but not all workers silent and no progress: those that answer would wait in a collective for ever."""
    run, report = memory.run, seen.report
    if run is None or run.node != seen.node.name or run.state.is_past or report is None:
        return None
    if report.workers[0].contact is not Contact.ANSWERED or not any(w.alive for w in report.workers):
        return None
    # Worker 0 tells of progress; where it never told of any, silence elsewhere is no proof of a standstill.
    if seen.progress.signals < 2 or EffectKind.STOP.of(seen.node.name) in evidence.looked:
        return None
    if timers.lasted(since, slot.care.unreachable_after / 3):
        why, step, checkpoint = "a worker is silent and the run stands still", memory.step, memory.checkpoint
        return Stop(seen.node.key, seen.node.id, run.token, Cause.SILENT, why, step=step, checkpoint=checkpoint)
    return None


def _decide_answering(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, memory: Memory, timers: Timers
) -> Action:
    run, node = memory.run, seen.node
    token = token_of(seen)
    ours = run is not None and run.node == node.name
    if token and (run is None or not ours or _newer(token, run.token)):
        number = int(token.rpartition(".")[2])
        return Record(Fact.RUN_ADOPTED, f"{token} is what the workers have", name=node.name, token=token, number=number)
    if run is not None and ours and run.state.is_past and run.then_delete is not None:
        return deletion(seen, run.stop_cause, run.stop_why, run.then_delete)
    if run is not None and ours and not run.state.is_past:
        decide_own = decide_foreign if is_foreign(seen.report, run) else decide_run
        return decide_own(slot, seen, past, evidence, memory, timers)
    return _decide_launch(slot, seen, past, evidence, memory, timers)


def _newer(token: str, known: str) -> bool:
    return int(token.rpartition(".")[2]) > int(known.rpartition(".")[2])


def _decide_launch(
    slot: Slot, seen: NodeEvidence, past: NodeMemory, evidence: Evidence, memory: Memory, timers: Timers
) -> Action:
    node = seen.node
    if slot.job is None:
        return without_job(slot, "the node is kept")
    if action := decide_trust(slot, seen, past, evidence, timers):
        return action
    if not quiet(seen):
        return _decide_not_quiet(seen, memory)
    if wait := backoff_over(memory, timers):
        return wait
    if blocked := _fence(slot, seen, evidence, memory, timers):
        return blocked
    number, why = next_number(seen, memory), "all workers answer and nothing runs"
    return Launch(node.key, node.id, f"{node.name}.{number}", number, Cause.QUIET, why, job_mark(slot.job))


def _decide_not_quiet(seen: NodeEvidence, memory: Memory) -> Action:
    """A stop, or a person; whether it served, and what follows if not, is for `plan_run` to say."""
    why = "something that is not our run holds the chips or the lock"
    past = memory.node(seen.node.name)
    launched_by_us = memory.run is not None and memory.run.node == seen.node.name
    if past is not None and past.is_adopted and not launched_by_us:
        why = f"{why} of {seen.node.name}, which is adopted: stop it, or `apply --replace`"
        return Wait(Cause.HELD_BY_OTHERS, why, needs_person=True)
    token, step, checkpoint = token_of(seen) or f"{seen.node.name}.0", memory.step, memory.checkpoint
    return Stop(seen.node.key, seen.node.id, token, Cause.HELD_BY_OTHERS, why, step=step, checkpoint=checkpoint)


def _fence(slot: Slot, seen: NodeEvidence, evidence: Evidence, memory: Memory, timers: Timers) -> Action | None:
    """Rule 1: no launch before each older node of the slot is proven dead. None when the way is free."""
    if wait := unseen(slot, evidence, timers):
        return wait
    for older in memory.nodes:
        if older.name == seen.node.name or not older.may_be_training:
            continue
        waited = timers.lasted(seen.answering_since, slot.care.fence_after)
        if waited and (slot.care.fence_proceed or memory.fence_confirmed):
            continue
        key = NodeKey(slot.project, older.zone, older.name)
        if action := look(key, evidence, timers, Cause.FENCED, "is it proven dead?"):
            return action
        why = f"{older.name} may still be training"
        return Wait(Cause.FENCED, f"{why} (`tpucare confirm` to go on)" if waited else why, needs_person=waited)
    return None
