"""
Every rule broken on purpose: a change of one decision, a short story in which it matters, the property that has to
notice. The same stories with the code as it is are clean, so that it is the change that was noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from tpucare.engine import effects, engine, observer
from tpucare.engine.admission import Brake
from tpucare.engine.engine import Engine
from tpucare.engine.observer import Observer
from tpucare.engine.state import EngineState, ProjectView
from tpucare.engine.tracking import NodeTrack
from tpucare.integrations.wandb import companion
from tpucare.integrations.wandb import rules as sweeps_plan
from tpucare.model.actions import Fact, FetchHostKeys, Record, Wait
from tpucare.model.causes import Cause, Reason
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import FailureKind, Memory, Refusal
from tpucare.model.resources import (
    DEAD_STATES,
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    Care,
    Job,
    Node,
    NodeKey,
)
from tpucare.planner import decide as plan
from tpucare.planner import node as plan_node
from tpucare.planner import placement, remember, run
from tpucare.planner import predicates as plan_words
from tpucare.planner.placement import CreateBudget
from tpucare.planner.predicates import ending
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.simulation.history import History, HistoryOutcome
from tpucare.testbed.simulation.scenario import (
    CLOSE,
    FOREIGN_CARE,
    FOREIGN_JOB,
    MONTHS,
    PERSON_EVERY,
    PROJECT,
    SECRET,
    STORM_CARE,
    STORM_JOB,
    SWEEP_JOB,
    ZONES,
    Scenario,
    Strike,
    place,
    slots_of,
)
from tpucare.testbed.simulation.store import OWNER

Change = Callable[[pytest.MonkeyPatch], None]
Prepare = Callable[[History], None]
HOUR = 3600.0
NINE_ZONES = tuple(f"us-central1-{letter}" for letter in "abcdefghi")


def _nothing(_history: History) -> None: ...


@dataclass(frozen=True)
class Mutation:
    """`hours` of weather; `prepare` orders what no strike does; `zones` in which each slot may be."""

    name: str
    rule: str
    change: Change
    strikes: tuple[Strike, ...] = ()
    hours: float = 1.0
    slots: int = 3
    prepare: Prepare = _nothing
    months: bool = False
    zones: tuple[str, ...] = ZONES
    person: float | None = PERSON_EVERY
    saves_alone: frozenset[str] = frozenset()
    care: Care = STORM_CARE
    job: Job = STORM_JOB

    def scenario(self) -> Scenario:
        pace = MONTHS if self.months else CLOSE
        places = tuple(place(zone, "v2-8", 1) for zone in self.zones)
        slots = slots_of("mini", self.slots, *places, care=self.care, job=self.job)
        world: dict[str, Any] = {
            "zones": {zone: {"accelerators": ["*"]} for zone in self.zones},
            "latencies": {"read": 0.2, "write": 0.4, "list_lag_share": 0.0, "operation_lingers_share": 0.0},
            "preemption": {"silent_share": 0.0},
            "rates": {"create": None},
            "audit_reads": False,
        }
        days = self.hours / 24
        return Scenario(1, slots, world, days, pace, self.strikes, person=self.person, saves_alone=self.saves_alone)

    def tell(self) -> HistoryOutcome:
        history = History(self.scenario())
        self.prepare(history)
        return history.run()


def _swap(target: Any, name: str, value: Any) -> Change:
    return lambda patch: patch.setattr(target, name, value)


# --- the changes -----------------------------------------------------------------------------------------------------


def _believe_the_list(patch: pytest.MonkeyPatch) -> None:
    """What a listing leaves out is gone."""

    def miss(self: Observer, view: ProjectView, key: NodeKey) -> None:
        name = key.name
        if found := self.state.find_node(key):
            track = found[0]
            self.forget_node(track, view, name)
            now, rng = self.state.clock.now(), random.Random(1)
            self.state.update_memory(track, remember.forget_node(track.memory, name, now, rng))
            self.state.dirty[track.slot.name] = None

    patch.setattr(Observer, "_mark_unlisted", miss)


def _act_before_writing(patch: pytest.MonkeyPatch) -> None:
    commit = EngineState.commit

    def hasty(self: EngineState) -> None:
        for lane, tag, effect in self._pending.effects:
            self.executor.submit(lane, tag, effect)
        self._pending.effects.clear()
        commit(self)

    patch.setattr(EngineState, "commit", hasty)


def _count_all_time(patch: pytest.MonkeyPatch) -> None:
    observe = ProjectView.apply_listing

    def uncapped(self: ProjectView, listing: Any, now: float) -> None:
        self.cap = timedelta(days=365)
        observe(self, listing, now)

    patch.setattr(ProjectView, "apply_listing", uncapped)


def _see_stalls_everywhere(patch: pytest.MonkeyPatch) -> None:
    def stalled(case: Any, seen: Any, past: Any) -> Any:
        long = case.timers.lasted(seen.phase_since, timedelta(minutes=10))
        return (
            run._stall(seen, case.memory, past, Cause.STALLED, "it may have stalled", timedelta(minutes=10))
            if long
            else None
        )

    patch.setattr(run, "_stalled", stalled)


def _tell_secrets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "fields_of", lambda _action: {"env": f"TOKEN={SECRET}"})


def _drop_a_label(patch: pytest.MonkeyPatch) -> None:
    labels = effects.labels_of

    def fewer(*arguments: Any) -> dict[str, str]:
        return {key: value for key, value in labels(*arguments).items() if key != LABEL_NUMBER}

    patch.setattr(effects, "labels_of", fewer)


def _stumble(*_arguments: Any) -> Any:
    raise KeyError("no such worker")


def _delete_again_late(patch: pytest.MonkeyPatch) -> None:
    for name in ("DELETE_AGAIN", "DELETE_AGAIN_CAP"):
        patch.setattr(remember, name, timedelta(minutes=110))
    patch.setattr(plan, "DELETE_AGAIN_CAP", timedelta(minutes=110))


def _never_judge_silence(patch: pytest.MonkeyPatch) -> None:
    def wait(_case: Any, seen: Any, *_rest: Any) -> Any:
        return Wait(Cause.SILENT, f"a worker of {seen.node.name} is silent")

    patch.setattr(plan_node, "_decide_silent", wait)


def _judge_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """A node that answers is judged all the same."""
    answering = plan_node._decide_answering

    def fickle(case: Any, seen: Any, past: Any) -> Any:
        if case.timers.lasted(seen.phase_since, timedelta(minutes=10)):
            return plan_words.deletion(seen, Cause.REPORTED_DEAD, "it looks odd", Reason.JUDGED)
        return answering(case, seen, past)

    patch.setattr(plan_node, "_decide_answering", fickle)


def _replace_what_was_edited(patch: pytest.MonkeyPatch) -> None:
    """A live node that is not as declared any more is deleted."""
    answering = plan_node._decide_answering

    def strict(case: Any, seen: Any, past: Any) -> Any:
        if past.place and past.place not in {one.key for one in case.slot.places}:
            return plan_words.deletion(seen, Cause.REPORTED_DEAD, "it is not as declared", Reason.DEAD)
        return answering(case, seen, past)

    patch.setattr(plan_node, "_decide_answering", strict)


def _follow_labels(patch: pytest.MonkeyPatch) -> None:
    """Whose a node is, its labels say, and nobody remembers."""
    home = EngineState.slot_of

    def labelled(self: EngineState, node: Node) -> Any:
        track = home(self, node)
        if track is None or track.slot.name == node.slot:
            return track
        self.update_memory(track, track.memory.without_node(node.name))
        track.forget_node(node.name)
        return None

    patch.setattr(EngineState, "slot_of", labelled)


def _once_dead_for_ever(memory: Memory, node: Node) -> Memory:
    """What the API said once of a node proves its death, whatever it says later."""
    past = memory.node(node.name)
    assert past is not None
    return memory.with_node(replace(past, status=NodeStatus.DEAD if node.state in DEAD_STATES else past.status))


def _write_off_unasked(patch: pytest.MonkeyPatch) -> None:
    """Of what nothing is heard for half an hour trains no more."""
    settle = remember._apply_record

    def rash(memory: Memory, action: Any, now: Any, rng: Any) -> Memory:
        memory = settle(memory, action, now, rng)
        past = memory.node(action.name)
        out_of_sight = past is not None and past.status is NodeStatus.OUT_OF_SIGHT
        return memory.with_node(replace(past, written_off=True)) if past is not None and out_of_sight else memory

    patch.setattr(remember, "_apply_record", rash)


def _forget_what_was_taken(memory: Memory, name: str) -> Memory:
    """A node that bears another owner's label is none of our business, nor is the run on it."""
    return replace(memory.without_node(name), run=None)


def _forget_pins_unvouched(patch: pytest.MonkeyPatch) -> None:
    after = Engine._update_trackers

    def trusting(self: Engine, track: Any, view: Any, action: Any, name: Any, finished: Any) -> None:
        if isinstance(action, FetchHostKeys) and finished.error is not None:
            self.ports.launcher.forget_node(action.key)
        after(self, track, view, action, name, finished)

    patch.setattr(Engine, "_update_trackers", trusting)


def _fail_at_a_stall(seen: Any, memory: Any, past: Any, cause: Cause, why: str, lasted: timedelta) -> Any:
    return ending(seen, memory, cause, why, FailureKind.STALL, gives_up=True, stacks=True, lasted=lasted)


def _tell_no_person(patch: pytest.MonkeyPatch) -> None:
    event = EngineState.add_event

    def discreet(self: EngineState, track: Any, kind: str, text: str, **more: Any) -> None:
        if kind != "person":
            event(self, track, kind, text, **more)

    patch.setattr(EngineState, "add_event", discreet)


def _judge_what_was_seen_to_move(patch: pytest.MonkeyPatch) -> None:
    """Only the process that saw a run move finds out that it stands still."""
    stalled = run._stalled

    def forgetful(case: Any, seen: Any, past: Any) -> Any:
        return stalled(case, seen, past) if seen.progress.median_gap is not None else None

    patch.setattr(run, "_stalled", forgetful)


def _run_what_finished_again(patch: pytest.MonkeyPatch) -> None:
    success = run._decide_success

    def doubtful(case: Any, seen: Any) -> Any:
        action = success(case, seen)
        is_over = isinstance(action, Record) and action.fact is Fact.ENDED
        return (
            run.infrastructure_ending(seen, case.memory, Cause.INTERRUPTED, "nobody knows why") if is_over else action
        )

    patch.setattr(run, "_decide_success", doubtful)


def _forget_nodes_unvouched(patch: pytest.MonkeyPatch) -> None:
    """Guest attributes that are not there prove that the node is gone."""
    after = Engine._update_trackers

    def hasty(self: Engine, track: Any, view: Any, action: Any, name: Any, finished: Any) -> None:
        after(self, track, view, action, name, finished)
        if isinstance(action, FetchHostKeys) and finished.error is not None:
            self.observer.forget_node(track, view, name)

    patch.setattr(Engine, "_update_trackers", hasty)


def _need_a_second_sign(patch: pytest.MonkeyPatch) -> None:
    """A run that gave one sign of progress may take any time for the next."""
    stalled = run._stalled

    def patient(case: Any, seen: Any, past: Any) -> Any:
        if seen.progress.signals == 1 and not case.memory.run.progressed:
            return None
        return stalled(case, seen, past)

    patch.setattr(run, "_stalled", patient)


def _remember_maintenance(patch: pytest.MonkeyPatch) -> None:
    """Whoever was ever told of a maintenance was interrupted, however well it ended."""
    told: set[str] = set()
    hear, ended = NodeTrack.apply_report, run.decide_ended

    def noting(self: NodeTrack, report: Any, mark: Any) -> bool:
        told.update(worker.token for worker in report.workers if worker.maintenance)
        return hear(self, report, mark)

    def doubting(case: Any, seen: Any, workers: Any) -> Any:
        memory = case.memory
        if memory.run is not None and memory.run.token in told:
            if not case.timers.lasted(seen.ended_since, run.CRASH_IS_OURS_AFTER):
                return Wait(Cause.INTERRUPTED, "the run was interrupted; waiting for the cloud's word")
            return run.infrastructure_ending(seen, memory, Cause.INTERRUPTED, "there was a maintenance")
        return ended(case, seen, workers)

    patch.setattr(NodeTrack, "apply_report", noting)
    patch.setattr(run, "decide_ended", doubting)


def _never_try_again(patch: pytest.MonkeyPatch) -> None:
    for module in (plan, engine):
        patch.setattr(module, "tries_again_at", lambda *_: None)


def _look_past_the_chips(patch: pytest.MonkeyPatch) -> None:
    """Who runs nothing is quiet."""

    def idle(seen: Any) -> bool:
        return seen.report is not None and seen.report.all_answer and not any(w.alive for w in seen.report.workers)

    for module in (plan, plan_node, run):
        patch.setattr(module, "is_quiet", idle)


def _close_for_good(patch: pytest.MonkeyPatch) -> None:
    """What a person has to change is not asked for again, and nobody is told."""
    far = timedelta(days=3000)

    def blocked(past: Any, reason: str, *, now: Any) -> Any:
        return replace(past, kind=Refusal.HUMAN, reason=reason, retry_at=now + far, refusals=past.refusals + 1)

    patch.setattr(placement, "block_place", blocked)
    patch.setattr(placement, "PERSON_LATER", 2 * far)


def _wait_for_who_is_gone(patch: pytest.MonkeyPatch) -> None:
    """A setup goes on for as long as its run lives."""
    decide = run.decide_foreign

    def patient(case: Any, seen: Any, past: Any) -> Any:
        if any(worker.foreign is not None and worker.foreign.lost for worker in seen.report.workers):
            return Wait(Cause.SETTING_UP, "its setup is not over")
        return decide(case, seen, past)

    patch.setattr(plan_node, "decide_foreign", patient)


def _end_what_is_silent(patch: pytest.MonkeyPatch) -> None:
    """A server that does not answer has no sweep."""
    hear = companion.SweepCare._apply_answer

    def rash(self: companion.SweepCare, asked: Any, answer: Any, fleets: list[str]) -> None:
        known = isinstance(answer, sweeps_plan.SweepReport)
        hear(self, asked, answer if known else sweeps_plan.SweepReport("FINISHED", None, {}), fleets)

    patch.setattr(companion.SweepCare, "_apply_answer", rash)


# --- what the stories need besides strikes ---------------------------------------------------------------------------


def _deletes_get_lost(history: History) -> None:
    for _ in range(12):
        history.later(1600.0, lambda: history.daemon.zone.world.operator.lose_next_answer("DeleteNode", applied=False))


def _lookalike(history: History) -> None:
    """Somebody else's node, with all our labels but the owner's."""
    labels = {LABEL_OWNER: "o-somebodyelse", LABEL_FLEET: "mini", LABEL_SLOT: "mini-0", LABEL_NUMBER: "7"}
    spec = NodeSpec("v2-8", runtime_version="tpu-ubuntu2204-base", labels=labels)
    world, parent = history.daemon.zone.world, f"projects/{PROJECT}/locations/{ZONES[0]}"
    history.later(1600.0, lambda: world.api.create_node(parent, "mini-0-a7", spec, history.daemon.clock.true_now()))
    path = f"{parent}/nodes/mini-0-a7"
    history.later(3000.0, lambda: world.operator.remove(path, history.daemon.clock.true_now()))


def _finish(history: History) -> None:
    launcher = history.daemon.launcher

    def end() -> None:
        for worker in launcher.running():
            if worker.run is not None and worker.run.slot == "mini-0":
                launcher.end(worker, status=0)

    history.later(1600.0, end)


def _killed_in_setup(history: History) -> None:
    """Once, as soon as a function of mini-0 is at work after the strike."""
    launcher = history.daemon.launcher

    def look() -> None:
        runs = [worker.run for worker in launcher.running() if worker.run and worker.run.slot == "mini-0"]
        if history.daemon.store is None or not runs or launcher.elapsed(runs[0]) >= 15.0:
            history.later(2.0, look)
        elif history.daemon.store is not None:
            history.daemon.kill()
            history.later(5.0, history._come_back)

    history.later(1700.0, look)


MUTATIONS = (
    Mutation(
        "what a listing leaves out is gone",
        "one-run",
        _believe_the_list,
        (Strike(1600, "missing-from-list", "mini-0", 1500),),
        hours=0.9,
    ),
    Mutation(
        "no fence",
        "dead-elders",
        _swap(plan_node, "_fence", lambda *_: None),
        (Strike(1610, "silent-worker", "mini-0", 1800),),
        prepare=_deletes_get_lost,
    ),
    Mutation(
        "every owner is ours",
        "ours-only",
        _swap(Node, "owner", property(lambda _node: OWNER)),
        prepare=_lookalike,
    ),
    Mutation("a stall is seen everywhere", "unasked-stop", _see_stalls_everywhere),
    Mutation("nodes that answer are judged", "unasked-delete", _judge_for_nothing),
    Mutation("the effect before the intent", "intent-first", _act_before_writing, hours=0.5),
    Mutation("a label is missing", "labelled", _drop_a_label, hours=0.5),
    Mutation(
        "numbers begin anew",
        "fresh-numbers",
        _swap(remember, "number_after", lambda memory, _name: memory),
        (Strike(1600, "preempted", "mini-0"),),
    ),
    Mutation(
        "places in declared order",
        "no-starved-place",
        _swap(placement, "by_turn", lambda places, _memory: list(places)),
        tuple(Strike(0, "zone-sold-out", zone, 3000) for zone in NINE_ZONES),
        slots=1,
        zones=NINE_ZONES,
    ),
    Mutation(
        "no create budget",
        "create-budget",
        _swap(CreateBudget, "free_at", lambda _self, _now: None),
        slots=80,
        months=True,
    ),
    Mutation(
        "no brake",
        "brake",
        _swap(Brake, "limit", lambda _self, _live: 10**9),
        tuple(Strike(1600, "silent-worker", f"mini-{index}", 1500) for index in range(5)),
        slots=9,
    ),
    Mutation(
        "suspended time counts",
        "observed-time",
        _count_all_time,
        (Strike(1600, "silent-worker", "mini-0", 3 * HOUR), Strike(1630, "suspended", "", 2 * HOUR)),
        hours=3.0,
    ),
    Mutation("events tell secrets", "no-secret", _tell_secrets, hours=0.5),
    Mutation(
        "an error that nobody named",
        "no-surprise",
        _swap(run, "decide_ended", _stumble),
        (Strike(1600, "crashed", "mini-0"),),
    ),
    Mutation(
        "wake-ups get lost",
        "no-oversleep",
        _swap(EngineState, "wake_at", lambda *_: None),
        (Strike(1600, "crashed", "mini-0"), Strike(1700, "crashed", "mini-0"), Strike(1800, "crashed", "mini-0")),
    ),
    Mutation(
        "silence is never judged",
        "trains-again",
        _never_judge_silence,
        (Strike(1600, "preempted-unreported", "mini-0"),),
    ),
    Mutation(
        "deletes are not repeated",
        "no-orphan",
        _delete_again_late,
        (Strike(3300, "stuck-delete", "mini-0"), Strike(3301, "preempted", "mini-0")),
    ),
    Mutation(
        "an edit deletes what lives",
        "unasked-delete",
        _replace_what_was_edited,
        (Strike(1602, "edited", "mini-0", 600),),
    ),
    Mutation(
        "labels say whose a node is",
        "one-run",
        _follow_labels,
        (Strike(1602, "relabelled", "mini-0", 1500),),
    ),
    Mutation(
        "what was taken is forgotten",
        "one-run",
        _swap(remember, "taken", _forget_what_was_taken),
        (Strike(1602, "taken-back", "mini-0", 1500),),
    ),
    Mutation(
        "once dead, dead for ever",
        "dead-elders",
        _swap(remember, "_live_or_dead", _once_dead_for_ever),
        (Strike(1604, "flips-back", "mini-0", 600),),
    ),
    Mutation(
        "who is not heard of is dead",
        "one-run",
        _write_off_unasked,
        (Strike(1600, "zone-dark-for-ever", ZONES[0]),),
        hours=1.5,
        person=None,
    ),
    Mutation(
        "who cannot vouch is trusted",
        "pinned-key",
        _forget_pins_unvouched,
        (Strike(1600, "guest-404", "mini-0", 1500),),
    ),
    Mutation(
        "who cannot vouch is gone",
        "no-flood",
        _forget_nodes_unvouched,
        (Strike(1600, "guest-404", "mini-0", 1500),),
    ),
    Mutation(
        "a hang of another process is none",
        "trains-again",
        _judge_what_was_seen_to_move,
        (Strike(1600, "hang-then-restart", "mini-0", 30),),
    ),
    Mutation(
        "one stall is too many",
        "failed-rightly",
        _swap(run, "_stall", _fail_at_a_stall),
        (Strike(1600, "hung", "mini-0"),),
    ),
    Mutation(
        "a person is told nothing",
        "says-so",
        _tell_no_person,
        (Strike(1600, "key-refused-for-good"), Strike(1601, "preempted", "mini-0")),
        person=None,
    ),
    Mutation(
        "what a user's function started is over",
        "trains-again",
        _swap(run, "_decide_foreign_end", lambda *_: Wait(Cause.FOREIGN_RUN_ENDED, run.ENDED)),
        (Strike(1600, "crashed", "mini-0"),),
        care=FOREIGN_CARE,
        job=FOREIGN_JOB,
    ),
    Mutation(
        "who did the setup is gone, and is waited for",
        "trains-again",
        _wait_for_who_is_gone,
        (Strike(1600, "preempted", "mini-0"),),
        prepare=_killed_in_setup,
        care=FOREIGN_CARE,
        job=FOREIGN_JOB,
    ),
    Mutation(
        "who does not hear of a sweep ends it",
        "over-once",
        _end_what_is_silent,
        (Strike(1600, "wandb-down", "", 1500),),
        job=SWEEP_JOB,
    ),
    Mutation(
        "interrupted runs of a sweep are nobody's",
        "over-once",
        _swap(sweeps_plan, "QUEUED", frozenset()),
        # An instant at which chance has it that nobody resumes the sweep.
        (Strike(1605, "sweep-stopped", "", 1500),),
        hours=2.0,
        slots=1,
        job=SWEEP_JOB,
    ),
    Mutation(
        "who is ended for a sweep's sake is not done",
        "over-once",
        _swap(companion, "finish", lambda memory, **_: memory),
        # An instant at which chance has it that nobody resumes the sweep.
        (Strike(1605, "sweep-stopped", "", 1500),),
        hours=2.0,
        job=SWEEP_JOB,
    ),
    Mutation(
        "what finished runs again",
        "finished-once",
        _run_what_finished_again,
        prepare=_finish,
    ),
    Mutation(
        "a hang after one sign is none",
        "trains-again",
        _need_a_second_sign,
        (Strike(1600, "one-signal-hang", "mini-0", 1500),),
    ),
    Mutation(
        "that it finished is not noted",
        "finished-once",
        _swap(run, "_may_be_noted", lambda *_: False),
        (Strike(1600, "finished-then-preempted", "mini-0"),),
    ),
    Mutation(
        "a maintenance counts for ever",
        "finished-once",
        _remember_maintenance,
        (Strike(1600, "notice-without-end", "mini-0", 600),),
    ),
    Mutation(
        "what failed is not tried again",
        "trains-again",
        _never_try_again,
        (Strike(2.5 * HOUR, "dependency-down", "", 2 * HOUR),),
        hours=4.6,
        slots=1,
        person=None,
    ),
    Mutation(
        "held chips are waited for",
        "trains-again",
        _swap(run, "_held_by_others", lambda *_: Wait(Cause.HELD_BY_OTHERS, "something holds the chips")),
        (Strike(1600, "chips-held"), Strike(1601, "preempted", "mini-0")),
    ),
    Mutation(
        "held chips are looked past",
        "free-chips",
        _look_past_the_chips,
        (Strike(1600, "container-left", "mini-0", 1500),),
    ),
    Mutation(
        "who refused us may not be a guard",
        "guard-outwaited",
        _swap(remember, "refused", lambda memory, _name: memory),
        (Strike(1600, "guarded"), Strike(1601, "preempted", "mini-0")),
    ),
    Mutation(
        "a policy closes a place for good",
        "trains-again",
        _close_for_good,
        (Strike(1600, "policy-refused"), Strike(1601, "preempted", "mini-0")),
        zones=ZONES[:1],
        person=None,
    ),
    Mutation(
        "a limit of reads is not heeded",
        "rate-heeded",
        _swap(observer, "listing_pause", lambda _before, poll, _rng: poll),
        (Strike(1600, "reads-limited", "", 1800),),
    ),
    Mutation("what finished is kept", "finished-empty", _swap(plan, "_end_node", lambda *_: None), prepare=_finish),
)
