"""
Decides about one live node of a slot, up to the launch of a run; `run` decides about the run itself.

Pure. The node's state comes first, then whether its workers answer, then whether an older node of the slot may still be
training (design, rule 1).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tpucare.model.actions import Action, AddSshKey, Delete, EffectKind, Fact, Launch, Record, Stop, Wait
from tpucare.model.causes import Cause, Reason
from tpucare.model.evidence import Case, Mark, NodeEvidence, latest
from tpucare.model.lifecycles import CreateState, RunState
from tpucare.model.memory import FailureKind, Memory, NodeMemory
from tpucare.model.resources import PENDING_STATES, USABLE_STATES, NodeKey, NodeState, Provisioning, Slot
from tpucare.model.runs import Contact
from tpucare.model.text import length
from tpucare.planner.deadline import has_to_leave_spot, may_return, pace_of
from tpucare.planner.placement import is_open
from tpucare.planner.predicates import (
    INFRASTRUCTURE_BUDGET,
    backoff_over,
    deletion,
    effect_under_way,
    furthest,
    get_node_when_due,
    has_advanced,
    is_quiet,
    job_mark,
    keeps_node,
    made_progress_since,
    next_number,
    nothing_moves,
    patience_with_silence,
    run_number,
    some_answer,
    stop_before,
    token_of,
    unlisted_zones,
    usual_pause,
    without_job,
)
from tpucare.planner.run import decide_foreign, decide_run, end_done, is_foreign
from tpucare.planner.trust import decide_changed_key, decide_trust

STOPPED = frozenset({NodeState.STOPPING, NodeState.STOPPED})

FAILED_CREATE_SILENCE = timedelta(seconds=60)
KEY_MAY_BE_LATE = timedelta(seconds=30)
KEY_PUSH_EVERY = timedelta(minutes=1)
KEY_PUSH_SERVES = timedelta(minutes=3)
KEY_REFUSED_BY_SOME = timedelta(minutes=10)
CANARY_FACTOR = 3
NEVER_ANSWERED_FACTOR = 2


def decide_node(case: Case, seen: NodeEvidence) -> Action:
    """The next step for the slot's only live node."""
    node, past = seen.node, case.memory.node(seen.node.name)
    if seen.zone_unreachable and (action := decide_by_workers(case, seen)):
        return action
    if seen.zone_unreachable or (not seen.listed and node.name in case.evidence.failed_reads):
        return decide_hidden(case, node.key.zone, node.name)
    if not seen.listed and EffectKind.GET_NODE.of(node.name) not in case.evidence.ended_effects:
        return Wait(Cause.NODE_ABSENT, f"looking for {node.name} by name")
    if past is None:
        return Wait(Cause.NODE_ABSENT, f"{node.name} is being looked at")
    if wait := effect_under_way(seen, case.evidence):
        return wait
    if case.memory.replace_asked:
        delete = deletion(seen, Cause.REPLACE_ASKED, "replace was asked for", Reason.ASKED)
        return stop_before(case, seen, delete)
    if node.state in PENDING_STATES:
        return _decide_pending(case, seen, past)
    if node.state in USABLE_STATES and (action := _change_tier(case, seen)):
        return action
    if node.state in USABLE_STATES:
        return _decide_usable(case, seen, past)
    if node.state is NodeState.UNKNOWN:
        return _decide_unknown(case, seen)
    return _decide_odd(case.slot, seen)


def _change_tier(case: Case, seen: NodeEvidence) -> Action | None:
    """Leave this node for spot capacity, or for on-demand capacity, where the deadline says so and a place is open."""
    found = pace_of(case)
    if found is None:
        return None
    on_demand = seen.node.provisioning is Provisioning.ON_DEMAND
    others = [place for place in case.slot.places if is_open(case, place, on_demand=not on_demand)]
    if not any(on_demand or not case.memory.place(place.key).kind for place in others):
        # On-demand capacity that was refused last is not worth a node that trains.
        return None
    if on_demand and may_return(found, case.memory):
        delete = deletion(seen, Cause.SPOT_SOUGHT, f"looking for spot capacity: {found.why}", Reason.ASKED)
    elif not on_demand and has_to_leave_spot(found):
        delete = deletion(seen, Cause.DEADLINE_NEAR, f"on to on-demand: {found.why}", Reason.ASKED)
    else:
        return None
    return stop_before(case, seen, delete)


def _decide_unknown(case: Case, seen: NodeEvidence) -> Action:
    """UNKNOWN means a failed repair, but one field is no proof: workers must be silent or stand still, too."""
    limit = max(patience_with_silence(case.slot, seen), usual_pause(seen))
    answers = some_answer(seen)
    life = latest(seen.state_since, seen.progress.last, seen.progress.life) if answers else seen.state_since
    if case.timers.lasted(life, limit) and nothing_moves(seen):
        what = "nothing moves on it" if answers else "no worker of it answers"
        why = f"UNKNOWN, and {what} for {length(limit)}"
        delete = deletion(seen, Cause.STATE_UNKNOWN, why, Reason.JUDGED)
        return stop_before(case, seen, delete)
    past = case.memory.node(seen.node.name)
    if answers and past is not None and past.launched:
        # Only the log may move, so the run is decided about like any other: a hanging one is found.
        return _decide_usable(case, seen, past)
    return Wait(Cause.STATE_UNKNOWN, f"{seen.node.name} is UNKNOWN: watching whether anything moves on it")


def decide_by_workers(case: Case, seen: NodeEvidence) -> Action | None:
    """
    The step that needs no API, while listing or zone do not answer; None where there is none.

    Once all workers of the slot's only node reported since, the run launched on that very node may be recorded, stopped
    and launched again. No Delete, no Create, and no Launch where an older node is in doubt.
    """
    name, past = seen.node.name, case.memory.node(seen.node.name)
    if not case.wants_node or case.memory.replace_asked:
        return None
    if past is None or past.id != seen.node.id or not past.serves or case.memory.run_on(name) is None:
        return None
    if any(other.serves or other.may_be_training for other in case.memory.nodes if other.name != name):
        return None
    if seen.node.state not in PENDING_STATES | USABLE_STATES or effect_under_way(seen, case.evidence):
        return None
    if not seen.reported_while_blind or seen.report is None or not seen.report.all_answer:
        return None
    action = _decide_answering(case, seen, past)
    # Rule 11: only gaps between listings count as observed time, so a verdict over time waits for them.
    may_stop = isinstance(action, Stop) and action.then is None and action.lasted is None
    return action if may_stop or isinstance(action, Record | Launch) else None


def decide_hidden(case: Case, zone: str, name: str) -> Action:
    """A node that neither a listing nor GetNode can show; after `fence_after` the slot may create one elsewhere."""
    if case.timers.lasted(case.evidence.hidden_since(zone, name), case.slot.care.fence_after):
        why = f"neither a listing nor GetNode showed it for {length(case.slot.care.fence_after)}"
        return Record(Fact.NODE_OUT_OF_SIGHT, why, name=name)
    if zone in case.evidence.project.unreachable_since:
        return Wait(Cause.ZONE_UNREACHABLE, f"{zone} does not answer: the last state of {name} stands")
    why = f"{name} is not listed, and GetNode fails: its last state stands"
    return Wait(Cause.NODE_HIDDEN, why)


def _decide_odd(slot: Slot, seen: NodeEvidence) -> Action:
    node = seen.node
    if node.state in STOPPED:
        if slot.care.stopped_delete:
            why = f"it is {node.state.name} and care.stopped is delete"
            return deletion(seen, Cause.NODE_STOPPED, why, Reason.ASKED)
        why = f"{node.name} is {node.state.name}, which tpucare never asks for: start it, or `tpucare down`"
        return Wait(Cause.NODE_STOPPED, why, needs_person=True)
    return Wait(Cause.STATE_ODD, f"{node.name} is {node.state.name}: waiting; tpucare has no action for this state")


def _decide_pending(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    """Launch as soon as all workers answer, in any state of the operation; the limit is boot_timeout."""
    if seen.workers is not None and seen.report is not None and seen.report.all_answer:
        return _decide_answering(case, seen, past)
    intent = case.memory.create(seen.node.name)
    if intent is not None and intent.state is CreateState.FAILED:
        failed_since = case.evidence.ended_effects.get(EffectKind.FAILED.of(seen.node.name)) or seen.seen_since
        if case.timers.lasted(failed_since, FAILED_CREATE_SILENCE):
            why = f"its create failed ({intent.refused}) and no worker answers"
            return deletion(seen, Cause.CREATE_FAILED, why, Reason.DEAD)
        why = f"create of {seen.node.name} failed: {intent.refused}; waiting until it is gone"
        return Wait(Cause.CREATE_FAILED, why)
    since, limit = seen.state_since, case.slot.care.boot_timeout
    if past.answered:
        # Its workers came up long ago, whatever state the API shows: the timeout is for those silent now.
        since = latest(since, seen.silent_since, seen.refused_since) or since
    if past.launched and seen.silent_since is not None and made_progress_since(seen, seen.silent_since):
        # It may train for hours in state CREATING; the steps of one worker show that a silent one works, too.
        since, limit = latest(since, seen.progress.last) or since, max(limit, usual_pause(seen))
    if case.timers.lasted(since, limit):
        why = f"still {seen.node.state.name} at boot_timeout"
        never, lasted = not past.answered, case.slot.care.boot_timeout
        return deletion(seen, Cause.BOOT_TIMEOUT, why, Reason.JUDGED, unanswered=never, lasted=lasted)
    booting = Wait(Cause.BOOTING, f"{seen.node.name} is {seen.node.state.name}")
    return contact_trouble(case, seen, past) or booting


def _decide_usable(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    node = seen.node
    repairing = node.state is NodeState.REPAIRING and not keeps_node(seen)
    life = latest(seen.state_since, seen.progress.last, seen.progress.life)
    if repairing and case.timers.lasted(life, case.slot.care.unhealthy_after) and nothing_moves(seen):
        why = "REPAIRING for too long without progress"
        delete = deletion(seen, Cause.REPAIRING, why, Reason.JUDGED, lasted=case.slot.care.unhealthy_after)
        return stop_before(case, seen, delete)
    if seen.workers is None:
        if case.timers.lasted(latest(seen.state_since, seen.lacking_since), case.slot.care.boot_timeout):
            why = "its list of workers is incomplete at boot_timeout"
            never, lasted = not past.answered, case.slot.care.boot_timeout
            return deletion(seen, Cause.WORKERS_MISSING, why, Reason.JUDGED, unanswered=never, lasted=lasted)
        return Wait(Cause.WORKERS_MISSING, f"{node.name} does not list all its workers yet")
    if seen.report is None:
        return Wait(Cause.BOOTING, f"asking the workers of {node.name}")
    if trouble := contact_trouble(case, seen, past):
        return _silence_beside(case, trouble, seen, past)
    if not seen.report.all_answer:
        return _decide_silent(case, seen, past)
    return _decide_answering(case, seen, past)


def _silence_beside(case: Case, trouble: Action, seen: NodeEvidence, past: NodeMemory) -> Action:
    """Silent workers count even while another worker refuses our key or has a changed host key."""
    if not isinstance(trouble, Wait) or seen.silent_since is None:
        return trouble
    verdict = _decide_silent(case, seen, past)
    return verdict if isinstance(verdict, Delete) else trouble


def contact_trouble(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action | None:
    """The step for workers that listen and refuse our key, or show a changed host key; None without such workers."""
    if seen.report is None:
        return None
    contacts = {worker.contact for worker in seen.report.workers}
    if Contact.HOST_KEY_CHANGED in contacts:
        return decide_changed_key(case, seen, past)
    if Contact.AUTH_REFUSED in contacts:
        return _decide_refused(case, seen, past, some_accept=Contact.ANSWERED in contacts)
    return None


def _decide_refused(case: Case, seen: NodeEvidence, past: NodeMemory, *, some_accept: bool) -> Action:
    name = seen.node.name
    if not past.keyed:
        # The guest agent writes the key some seconds after sshd listens, so UpdateNode waits for that.
        last = case.evidence.ended_effects.get(EffectKind.ADD_SSH_KEY.of(name))
        pause_over = last is None or case.timers.lasted(last, KEY_PUSH_EVERY)
        late = case.timers.lasted(seen.refused_since, KEY_MAY_BE_LATE)
        if late and pause_over and EffectKind.ADD_SSH_KEY.of(name) not in case.evidence.in_flight:
            return AddSshKey(seen.node.key, Cause.KEY_REFUSED, "a worker refuses our key")
        why = f"a worker of {name} does not know our key yet"
        return Wait(Cause.KEY_REFUSED, why, needs_person=last is not None)
    if some_accept and not (past.launched or keeps_node(seen)):
        # No setting differs between workers of one node: the guest agent of that worker is broken.
        if case.timers.lasted(seen.refused_since, KEY_REFUSED_BY_SOME):
            why = f"one worker has refused our key for {length(KEY_REFUSED_BY_SOME)}, the others accept it"
            return deletion(seen, Cause.KEY_REFUSED, why, Reason.JUDGED, unanswered=True)
        why = f"a worker of {name} refuses our key, the others accept it: trying again"
        return Wait(Cause.KEY_REFUSED, why)
    if case.timers.lasted(seen.refused_since, KEY_PUSH_SERVES):
        why = "is OS Login on, by policy (requireOsLogin) or for want of enable-oslogin: FALSE, or is a key blocked?"
        return Wait(Cause.KEY_REFUSED, f"{name} refuses our key, though its metadata has it: {why}", needs_person=True)
    return Wait(
        Cause.KEY_REFUSED, f"our key was written to the metadata of {name}; waiting until its workers accept it"
    )


def _decide_silent(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    """Silence is a verdict only while our own network is known to work, or for one canary at a time."""
    name, limit = seen.node.name, patience_with_silence(case.slot, seen)
    run = case.memory.run_on(name)
    is_finished = run is not None and run.state is RunState.FINISHED
    if is_finished and case.timers.lasted(seen.silent_since, case.slot.care.success_after):
        return end_done(name, furthest(seen, case.memory))
    if not past.answered:
        limit = limit * NEVER_ANSWERED_FACTOR
    # Silent workers of a CREATING node are booting, even if some answer early.
    since = latest(seen.silent_since, seen.state_since)
    if not past.answered:
        # Workers that come up one after the other are booting; boot_timeout is the limit.
        since = latest(since, seen.arrived_since)
    if seen.silent_since is not None and made_progress_since(seen, seen.silent_since):
        # The last step before a gang hangs may be reported after a worker fell silent, so progress has to go on.
        since, limit = latest(since, seen.progress.last), max(limit, usual_pause(seen))
        if not case.timers.lasted(since, limit):
            return Wait(Cause.SILENT, f"a worker of {name} is silent, progress goes on")
    supported = seen.silent_probes >= 3
    # A guard (sshguard) that refused our key may drop our packets for some minutes.
    guarded = past.refused and not past.answered
    if supported and not guarded and case.timers.lasted(since, limit) and case.evidence.elsewhere_answers:
        return _silence_ends(seen, past, case.memory, f"a worker is silent for {length(limit)}, others answer", limit)
    if not past.answered:
        # Where no worker answers anywhere, or a guard may drop packets, a node that never answered gets boot_timeout.
        if supported and case.timers.lasted(seen.seen_since, case.slot.care.boot_timeout):
            why = "its workers never answered until boot_timeout"
            return deletion(
                seen, Cause.NEVER_ANSWERED, why, Reason.JUDGED, unanswered=True, lasted=case.slot.care.boot_timeout
            )
    elif supported and case.timers.lasted(since, limit * CANARY_FACTOR) and case.evidence.may_be_canary:
        for_so_long = length(limit * CANARY_FACTOR)
        why = f"no worker anywhere answers for {for_so_long}; this slot is the canary and tries a new node"
        return deletion(seen, Cause.CANARY, why, Reason.JUDGED, lasted=limit * CANARY_FACTOR)
    if stop := _stop_half_gang(case, seen, since):
        return stop
    return Wait(Cause.SILENT, f"a worker of {name} is silent")


def _silence_ends(seen: NodeEvidence, past: NodeMemory, memory: Memory, why: str, lasted: timedelta) -> Delete:
    """
    A Delete for silence, which counts as an infrastructure failure of the run on that node.

    A job may cut off its own nodes (memory, firewall, sshd). Unreported preemptions look alike, but progress between
    them ends the streak.
    """
    delete = deletion(seen, Cause.SILENT, why, Reason.JUDGED, unanswered=not past.answered, lasted=lasted)
    run = memory.run_on(past.name)
    if not past.answered or run is None or not run.complete or run.state.is_past:
        return delete
    advanced, far = has_advanced(seen, memory), furthest(seen, memory)
    spent = not advanced and memory.counter(FailureKind.INFRASTRUCTURE).failures >= INFRASTRUCTURE_BUDGET
    return replace(
        delete,
        failure=FailureKind.INFRASTRUCTURE,
        advanced=advanced,
        gives_up=spent,
        step=far.step,
        checkpoint=far.checkpoint,
    )


def _stop_half_gang(case: Case, seen: NodeEvidence, since: Mark | None) -> Stop | None:
    """A Stop where some workers are silent and progress ended: the others would wait in a collective for ever."""
    run, report = case.memory.run_on(seen.node.name), seen.report
    if run is None or run.state.is_past or report is None:
        return None
    if report.workers[0].contact is not Contact.ANSWERED or not any(w.alive for w in report.workers):
        return None
    # Worker 0 reports progress; without such reports, silence of another worker proves no standstill.
    if seen.progress.signals < 2 or EffectKind.STOP.of(seen.node.name) in case.evidence.ended_effects:
        return None
    if case.timers.lasted(since, case.slot.care.unreachable_after / 3):
        why, step, checkpoint = "a worker is silent and the run stands still", case.memory.step, case.memory.checkpoint
        return Stop(seen.node.key, seen.node.id, run.token, Cause.SILENT, why, step=step, checkpoint=checkpoint)
    return None


def _decide_answering(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    name, token = seen.node.name, token_of(seen)
    run = case.memory.run_on(name)
    if token and (run is None or run_number(token) > run_number(run.token)):
        why, number = f"the workers run {token}", run_number(token)
        return Record(Fact.RUN_ADOPTED, why, name=name, token=token, number=number)
    if run is not None and run.state.is_past and run.then_delete is not None:
        return deletion(seen, run.stop_cause, run.stop_why, run.then_delete)
    if run is not None and not run.state.is_past:
        decide_own = decide_foreign if is_foreign(seen.report, run) else decide_run
        return decide_own(case, seen, past)
    return _decide_launch(case, seen, past)


def _decide_launch(case: Case, seen: NodeEvidence, past: NodeMemory) -> Action:
    node = seen.node
    if case.slot.job is None:
        return without_job(case.slot, "the node is kept")
    if action := decide_trust(case, seen, past):
        return action
    if not is_quiet(seen):
        return _decide_not_quiet(seen, case.memory)
    if wait := backoff_over(case):
        return wait
    if blocked := _fence(case, seen):
        return blocked
    number, why = next_number(seen, case.memory), "all workers answer and nothing runs"
    return Launch(node.key, node.id, f"{node.name}.{number}", number, Cause.QUIET, why, job_mark(case.slot.job))


def _decide_not_quiet(seen: NodeEvidence, memory: Memory) -> Action:
    """A Stop, or on an adopted node a person; `run` decides about its outcome."""
    why = "a process that is not our run holds the chips or the lock"
    past = memory.node(seen.node.name)
    if past is not None and past.is_adopted and memory.run_on(seen.node.name) is None:
        why = f"{why} of {seen.node.name}, which is adopted: stop it, or `apply --replace`"
        return Wait(Cause.HELD_BY_OTHERS, why, needs_person=True)
    token, step, checkpoint = token_of(seen) or f"{seen.node.name}.0", memory.step, memory.checkpoint
    return Stop(seen.node.key, seen.node.id, token, Cause.HELD_BY_OTHERS, why, step=step, checkpoint=checkpoint)


def _fence(case: Case, seen: NodeEvidence) -> Action | None:
    """Rule 1: the wait before a launch for each older node not proven dead; None: none is left."""
    if wait := unlisted_zones(case):
        return wait
    for older in case.memory.nodes:
        if older.name == seen.node.name or not older.may_be_training:
            continue
        waited = case.timers.lasted(seen.answering_since, case.slot.care.fence_after)
        if waited and (case.slot.care.fence_proceed or case.memory.fence_confirmed):
            continue
        key = NodeKey(case.slot.project, older.zone, older.name)
        if action := get_node_when_due(case, key, Cause.FENCED, "is it proven dead?"):
            return action
        why = f"{older.name} may still be training"
        return Wait(Cause.FENCED, f"{why} (`tpucare confirm` to go on)" if waited else why, needs_person=waited)
    return None
