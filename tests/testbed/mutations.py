"""
Every rule broken on purpose: a change of one decision, a short story in which it matters, the property that has to
notice. The same stories with the code as it is are clean, so that it is the change that was noticed.

A change wraps what lies between the parts: the decision that the engine asks for, what memory becomes, a port, or a
public function that one part offers another. How a part works inside is its own matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from tpucare.engine import effects, engine, observer
from tpucare.engine.admission import Brake
from tpucare.engine.engine import Engine
from tpucare.engine.state import EngineState, ProjectView
from tpucare.integrations.wandb import companion
from tpucare.integrations.wandb import rules as sweeps_plan
from tpucare.integrations.wandb.companion import Answer, SweepKey
from tpucare.integrations.wandb.rules import SweepReport
from tpucare.model.actions import Action, Delete, Fact, GetNode, Launch, Record, Stop, Wait
from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import NodeGone
from tpucare.model.evidence import Case, Evidence, Moment, NodeEvidence, Timers
from tpucare.model.lifecycles import NodeStatus
from tpucare.model.memory import FailureKind, Memory, Refusal
from tpucare.model.resources import (
    LABEL_FLEET,
    LABEL_NUMBER,
    LABEL_OWNER,
    LABEL_SLOT,
    Care,
    Job,
    Listing,
    Node,
    NodeKey,
    PlacementOrder,
    Slot,
    Worker,
)
from tpucare.model.runs import NodeReport, ProbeOrder
from tpucare.planner import decide as planner
from tpucare.planner import placement, queued, remember
from tpucare.planner.decide import live_nodes
from tpucare.planner.placement import CreateBudget, in_turn
from tpucare.planner.predicates import deletion, ending, job_mark, next_number
from tpucare.testbed.emulator.inprocess import InProcessCloud
from tpucare.testbed.emulator.world.records import NodeSpec
from tpucare.testbed.simulation import history
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
from tpucare.testbed.simulation.sweep import SimulatedWatch
from tpucare.testbed.simulation.workers import VirtualLauncher

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
    queued: bool = False

    def scenario(self) -> Scenario:
        pace = MONTHS if self.months else CLOSE
        places = tuple(replace(place(zone, "v2-8", 1), queued=self.queued) for zone in self.zones)
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


def _as_declared(slot: Slot, memory: Memory, *known: Any) -> list[placement.Ranked]:
    ranked = {one.place.key: one for one in in_turn(replace(slot, order=PlacementOrder.ORDERED), memory, *known)}
    return [ranked[place.key] for place in slot.places]


def _deciding(choose: Callable[[Case, Action], Action]) -> Change:
    """*choose* has the last word of each decision: it is given what would be done."""

    def change(patch: pytest.MonkeyPatch) -> None:
        decide = planner.decide

        def other(slot: Slot, evidence: Evidence, memory: Memory, now: Moment) -> Action:
            case = Case(slot, evidence, memory, Timers(now))
            action = choose(case, decide(slot, evidence, memory, now))
            due = case.timers.observed_due
            if not isinstance(action, Wait) or due is None:
                return action
            return replace(action, observed=min(due, action.observed or due))

        # The property that nothing is overslept asks for the decision as well.
        for module in (engine, history):
            patch.setattr(module, "decide", other)

    return change


def _remembering(name: str, change: Callable[[Memory, Any, Memory], Memory]) -> Change:
    """*change* has the last word of what memory becomes: it is given memory before, of what, and memory after."""

    def swap(patch: pytest.MonkeyPatch) -> None:
        after = getattr(remember, name)
        patch.setattr(remember, name, lambda memory, what, *more: change(memory, what, after(memory, what, *more)))

    return swap


def _waiting(is_meant: Callable[[Action], bool], cause: Cause) -> Change:
    """What is meant is never done."""
    return _deciding(lambda _case, action: Wait(cause, "it is waited") if is_meant(action) else action)


def _answering_node(case: Case) -> NodeEvidence | None:
    """The slot's only live node, where all its workers answer."""
    live = live_nodes(case.evidence, case.memory)
    seen = live[0] if len(live) == 1 else None
    return seen if seen is not None and seen.report is not None and seen.report.all_answer else None


def _records(action: Action, fact: Fact) -> bool:
    return isinstance(action, Record) and action.fact is fact


def _is_stall(action: Action) -> bool:
    return isinstance(action, Stop) and action.failure is FailureKind.STALL


# --- the changes -----------------------------------------------------------------------------------------------------


def _believe_the_list(patch: pytest.MonkeyPatch) -> None:
    """What a listing leaves out is gone."""
    listed: dict[str, Listing] = {}
    list_nodes, get_node = InProcessCloud.list_nodes, InProcessCloud.get_node

    def noting(self: InProcessCloud, project: str) -> Listing:
        listed[project] = list_nodes(self, project)
        return listed[project]

    def believing(self: InProcessCloud, key: NodeKey) -> Node:
        if key.project in listed and key not in listed[key.project].nodes:
            raise NodeGone(f"{key.name} is not listed")
        return get_node(self, key)

    patch.setattr(InProcessCloud, "list_nodes", noting)
    patch.setattr(InProcessCloud, "get_node", believing)


def _count_all_time(patch: pytest.MonkeyPatch) -> None:
    observe = ProjectView.apply_listing

    def uncapped(self: ProjectView, listing: Any, now: float) -> None:
        self.cap = timedelta(days=365)
        observe(self, listing, now)

    patch.setattr(ProjectView, "apply_listing", uncapped)


def _launch_unfenced(case: Case, action: Action) -> Action:
    seen = _answering_node(case)
    if (
        seen is None
        or case.slot.job is None
        or not isinstance(action, Wait | GetNode)
        or action.cause is not Cause.FENCED
    ):
        return action
    node, number = seen.node, next_number(seen, case.memory)
    job = job_mark(case.slot.job)
    return Launch(node.key, node.id, f"{node.name}.{number}", number, Cause.QUIET, "nothing runs there", job)


def _see_a_stall(case: Case, action: Action) -> Action:
    seen, long = _answering_node(case), timedelta(minutes=10)
    if seen is None or action.cause is not Cause.RUNNING or not case.timers.lasted(seen.phase_since, long):
        return action
    return ending(seen, case.memory, Cause.STALLED, "it may have stalled", FailureKind.STALL, stacks=True, lasted=long)


def _judge_for_nothing(case: Case, action: Action) -> Action:
    """A node that answers is judged all the same."""
    seen = _answering_node(case)
    if seen is None or not case.timers.lasted(seen.phase_since, timedelta(minutes=10)):
        return action
    return deletion(seen, Cause.REPORTED_DEAD, "it looks odd", Reason.JUDGED)


def _replace_what_was_edited(case: Case, action: Action) -> Action:
    """A live node that is not as declared any more is deleted."""
    seen = _answering_node(case)
    past = case.memory.node(seen.node.name) if seen is not None else None
    if seen is None or past is None or not past.place or past.place in {one.key for one in case.slot.places}:
        return action
    return deletion(seen, Cause.REPORTED_DEAD, "it is not as declared", Reason.DEAD)


def _delete_again_late(case: Case, action: Action) -> Action:
    past = case.memory.node(action.key.name) if isinstance(action, Delete) and action.again else None
    seen = case.evidence.node(past.name) if past is not None else None
    if seen is None or past is None or past.delete is None:
        return action
    if case.timers.lasted(seen.state_since, timedelta(minutes=110)):
        return action
    delete = replace(past.delete, next_at=case.timers.now.wall + timedelta(minutes=1))
    memory = case.memory.with_node(replace(past, delete=delete))
    return planner.decide(case.slot, case.evidence, memory, case.timers.now)


def _stumble(_case: Case, action: Action) -> Action:
    if action.cause is Cause.CRASHED:
        raise KeyError("no such worker")
    return action


def _tell_secrets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "fields_of", lambda _action: {"env": f"TOKEN={SECRET}"})


def _drop_a_label(patch: pytest.MonkeyPatch) -> None:
    labels = effects.labels_of

    def fewer(*arguments: Any) -> dict[str, str]:
        return {key: value for key, value in labels(*arguments).items() if key != LABEL_NUMBER}

    patch.setattr(effects, "labels_of", fewer)


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


def _once_dead_for_ever(before: Memory, node: Node, after: Memory) -> Memory:
    """What the API said once of a node proves its death, whatever it says later."""
    past, now = before.node(node.name), after.node(node.name)
    is_dead = past is not None and past.status is NodeStatus.DEAD and now is not None
    return after.with_node(replace(now, status=NodeStatus.DEAD)) if is_dead and now is not None else after


def _write_off_unasked(_before: Memory, action: Any, after: Memory) -> Memory:
    """Of what nothing is heard for half an hour trains no more."""
    if not _records(action, Fact.NODE_OUT_OF_SIGHT):
        return after
    past = after.node(action.name)
    return after.with_node(replace(past, written_off=True)) if past is not None else after


def _forget_what_was_taken(memory: Memory, name: str) -> Memory:
    """A node that bears another owner's label is none of our business, nor is the run on it."""
    return replace(memory.without_node(name), run=None)


def _forget_pins_unvouched(patch: pytest.MonkeyPatch) -> None:
    vouch = effects.pin_published_keys

    def trusting(key: NodeKey, workers: tuple[Worker, ...], ports: effects.Ports) -> bool:
        try:
            return vouch(key, workers, ports)
        except Exception:
            ports.launcher.forget_node(key)
            raise

    patch.setattr(effects, "pin_published_keys", trusting)


def _forget_nodes_unvouched(patch: pytest.MonkeyPatch) -> None:
    """Guest attributes that are not there prove that the node is gone."""
    step = Engine.step

    def hasty(self: Engine) -> float:
        pause = step(self)
        for track in self.slots.values():
            for name in [name for name, seen in track.nodes.items() if seen.voucher_why]:
                self.observer.forget_node(track, self.state.project(track.slot.project), name)
                self.state.decide_again([track.slot.name])
        return 0.0 if self.state.dirty else pause

    patch.setattr(Engine, "step", hasty)


def _fail_at_a_stall(_case: Case, action: Action) -> Action:
    return replace(action, gives_up=True, then=None) if isinstance(action, Stop) and _is_stall(action) else action


def _tell_no_person(patch: pytest.MonkeyPatch) -> None:
    event = EngineState.add_event

    def discreet(self: EngineState, track: Any, kind: str, text: str, **more: Any) -> None:
        if kind != "person":
            event(self, track, kind, text, **more)

    patch.setattr(EngineState, "add_event", discreet)


def _judge_what_was_seen_to_move(case: Case, action: Action) -> Action:
    """Only the process that saw a run move finds out that it stands still."""
    seen = _answering_node(case)
    never_moved = seen is not None and seen.progress.median_gap is None
    return Wait(Cause.RUNNING, "running") if _is_stall(action) and never_moved else action


def _run_what_finished_again(case: Case, action: Action) -> Action:
    seen = _answering_node(case)
    if seen is None or not _records(action, Fact.ENDED):
        return action
    return ending(seen, case.memory, Cause.INTERRUPTED, "nobody knows why", FailureKind.INFRASTRUCTURE)


def _need_a_second_sign(case: Case, action: Action) -> Action:
    """A run that gave one sign of progress may take any time for the next."""
    seen, run = _answering_node(case), case.memory.run
    gave_one = seen is not None and run is not None and seen.progress.signals == 1 and not run.progressed
    return Wait(Cause.RUNNING, "running") if _is_stall(action) and gave_one else action


def _remember_maintenance(patch: pytest.MonkeyPatch) -> None:
    """Whoever was ever told of a maintenance was interrupted, however well it ended."""
    told: set[str] = set()

    def doubt(case: Case, action: Action) -> Action:
        seen, run = _answering_node(case), case.memory.run
        if seen is None or seen.report is None or run is None:
            return action
        told.update(worker.token for worker in seen.report.workers if worker.maintenance)
        has_finished = action.cause is Cause.RUN_FINISHED or _records(action, Fact.RUN_FINISHED)
        if run.token not in told or not has_finished:
            return action
        if not case.timers.lasted(seen.ended_since, timedelta(seconds=30)):
            return Wait(Cause.INTERRUPTED, "the run was interrupted; waiting for the cloud's word")
        return ending(seen, case.memory, Cause.INTERRUPTED, "there was a maintenance", FailureKind.INFRASTRUCTURE)

    _deciding(doubt)(patch)


def _look_past_the_chips(patch: pytest.MonkeyPatch) -> None:
    """Who runs nothing is quiet."""
    probe = VirtualLauncher.probe

    def idle(self: VirtualLauncher, order: ProbeOrder) -> NodeReport:
        report = probe(self, order)
        return replace(report, workers=tuple(replace(worker, chips_free=True) for worker in report.workers))

    patch.setattr(VirtualLauncher, "probe", idle)


def _close_for_good(patch: pytest.MonkeyPatch) -> None:
    """What a person has to change is not asked for again, and nobody is told."""
    far = timedelta(days=3000)

    def blocked(past: Any, reason: str, *, now: Any) -> Any:
        return replace(past, kind=Refusal.HUMAN, reason=reason, retry_at=now + far, refusals=past.refusals + 1)

    patch.setattr(placement, "block_place", blocked)
    patch.setattr(placement, "PERSON_LATER", 2 * far)


def _wait_for_who_is_gone(case: Case, action: Action) -> Action:
    """A setup goes on for as long as its run lives."""
    seen = _answering_node(case)
    workers = seen.report.workers if seen is not None and seen.report is not None else ()
    is_lost = any(worker.foreign is not None and worker.foreign.lost for worker in workers)
    return Wait(Cause.SETTING_UP, "its setup is not over") if is_lost else action


def _end_what_is_silent(patch: pytest.MonkeyPatch) -> None:
    """A server that does not answer has no sweep."""
    news = SimulatedWatch.news

    def rash(self: SimulatedWatch) -> Mapping[SweepKey, Answer]:
        finished = SweepReport("FINISHED", None, {})
        return {key: one if isinstance(one, SweepReport) else finished for key, one in news(self).items()}

    patch.setattr(SimulatedWatch, "news", rash)


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


def _stand_twice(patch: pytest.MonkeyPatch) -> None:
    """A request that waits for a minute stands no more, as far as the next one is concerned."""

    def standing(memory: Memory) -> None:
        return None

    patch.setattr(Memory, "standing_request", property(standing))
    patch.setattr(queued, "_holds_back", lambda *_: False)
    patch.setattr(queued, "_is_hidden", lambda *_: True)


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
        _deciding(_launch_unfenced),
        (Strike(1610, "silent-worker", "mini-0", 1800),),
        prepare=_deletes_get_lost,
    ),
    Mutation(
        "every owner is ours",
        "ours-only",
        _swap(Node, "owner", property(lambda _node: OWNER)),
        prepare=_lookalike,
    ),
    Mutation("a stall is seen everywhere", "unasked-stop", _deciding(_see_a_stall)),
    Mutation("nodes that answer are judged", "unasked-delete", _deciding(_judge_for_nothing)),
    Mutation(
        "the effect before the intent",
        "intent-first",
        _swap(EngineState, "queue_effect", lambda self, effect: self.executor.submit(*effect)),
        hours=0.5,
    ),
    Mutation("a label is missing", "labelled", _drop_a_label, hours=0.5),
    Mutation(
        "numbers begin anew",
        "fresh-numbers",
        _swap(remember, "raise_next_number", lambda memory, _name: memory),
        (Strike(1600, "preempted", "mini-0"),),
    ),
    Mutation(
        "places in declared order",
        "no-starved-place",
        _swap(placement, "in_turn", _as_declared),
        tuple(Strike(0, "zone-sold-out", zone, 3000) for zone in NINE_ZONES),
        slots=1,
        zones=NINE_ZONES,
    ),
    Mutation(
        "no create budget",
        "create-budget",
        _swap(CreateBudget, "free_at", lambda _self, _now, _spare=0: None),
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
        _deciding(_stumble),
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
        _waiting(lambda action: isinstance(action, Delete) and action.reason is Reason.JUDGED, Cause.SILENT),
        (Strike(1600, "preempted-unreported", "mini-0"),),
    ),
    Mutation(
        "deletes are not repeated",
        "no-orphan",
        _deciding(_delete_again_late),
        (Strike(3300, "stuck-delete", "mini-0"), Strike(3301, "preempted", "mini-0")),
    ),
    Mutation(
        "an edit deletes what lives",
        "unasked-delete",
        _deciding(_replace_what_was_edited),
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
        _swap(remember, "mark_taken", _forget_what_was_taken),
        (Strike(1602, "taken-back", "mini-0", 1500),),
    ),
    Mutation(
        "once dead, dead for ever",
        "dead-elders",
        _remembering("apply_node", _once_dead_for_ever),
        (Strike(1750, "flips-back", "mini-0", 600),),
    ),
    Mutation(
        "who is not heard of is dead",
        "one-run",
        _remembering("intend", _write_off_unasked),
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
        _deciding(_judge_what_was_seen_to_move),
        (Strike(1600, "hang-then-restart", "mini-0", 30),),
    ),
    Mutation(
        "one stall is too many",
        "failed-rightly",
        _deciding(_fail_at_a_stall),
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
        _waiting(lambda action: action.cause is Cause.FOREIGN_RUN_ENDED, Cause.FOREIGN_RUN_ENDED),
        (Strike(1600, "crashed", "mini-0"),),
        care=FOREIGN_CARE,
        job=FOREIGN_JOB,
    ),
    Mutation(
        "who did the setup is gone, and is waited for",
        "trains-again",
        _deciding(_wait_for_who_is_gone),
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
        _deciding(_run_what_finished_again),
        prepare=_finish,
    ),
    Mutation(
        "a hang after one sign is none",
        "trains-again",
        _deciding(_need_a_second_sign),
        (Strike(1600, "one-signal-hang", "mini-0", 1500),),
    ),
    Mutation(
        "that it finished is not noted",
        "finished-once",
        _waiting(lambda action: _records(action, Fact.RUN_FINISHED), Cause.RUN_FINISHED),
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
        _waiting(lambda action: _records(action, Fact.TRIED_AGAIN), Cause.SLOT_ENDED),
        (Strike(2.5 * HOUR, "dependency-down", "", 2 * HOUR),),
        hours=4.6,
        slots=1,
        person=None,
    ),
    Mutation(
        "held chips are waited for",
        "trains-again",
        _waiting(lambda action: isinstance(action, Delete) and action.held, Cause.HELD_BY_OTHERS),
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
        _swap(remember, "mark_key_refused", lambda memory, _name: memory),
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
    Mutation(
        "what stands in one queue stands in another, too",
        "one-request",
        _stand_twice,
        (Strike(1600, "zone-sold-out", ZONES[0], 3000), Strike(1601, "preempted", "mini-0")),
        zones=ZONES,
        queued=True,
    ),
    Mutation(
        "what finished is kept",
        "finished-empty",
        _waiting(lambda action: action.cause is Cause.SLOT_ENDED, Cause.SLOT_ENDED),
        prepare=_finish,
    ),
)
