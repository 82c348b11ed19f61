"""One seed, one history; the store without a disk keeps the promises of the one on a disk; stories get shorter."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kits.bench_worker import eventually
from tests.kits.harness import ObservedDaemon
from tests.testbed.mutations import MUTATIONS, Mutation
from tpucare.adapters.state.store import SqliteStore, open_store
from tpucare.cli import simulate as cli_simulate
from tpucare.cli.app import app
from tpucare.engine.state import ProjectView
from tpucare.model.errors import AnswerLost, ConfigError, StoreFull
from tpucare.model.lifecycles import CreateState
from tpucare.model.memory import CreateIntent, DesiredState, FailureCounter, FleetRecord, Memory
from tpucare.model.ports import Finished, Lane, Store
from tpucare.model.resources import Event, Listing, NodeKey
from tpucare.model.runs import Contact, NodeReport, Phase, WorkerReport
from tpucare.testbed.simulation.campaign import Plan, live
from tpucare.testbed.simulation.faults import FAULTS
from tpucare.testbed.simulation.history import History
from tpucare.testbed.simulation.machines import RunEnd, RunMark
from tpucare.testbed.simulation.properties import ObservedClock
from tpucare.testbed.simulation.scenario import CLOSE, Strike, draw, storm_slots, told_again
from tpucare.testbed.simulation.shrink import shrink, tell
from tpucare.testbed.simulation.store import Disk, DiskFault, MemoryStore, ProcessDied
from tpucare.testbed.simulation.strikes import STRIKES
from tpucare.testbed.simulation.tally import TallyRecorder
from tpucare.testbed.simulation.time import VirtualClock, VirtualExecutor

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
MEMORY = Memory(
    "pod",
    next_number=3,
    creates=(CreateIntent("pod-0-a2", 2, "us-central1-a", "here", NOW, state=CreateState.ANSWER_LOST),),
    books={"crash": FailureCounter(1, 2, NOW, "it fell")},
)

# --- one seed, one history -------------------------------------------------------------------------------------------

DIGEST = """
import sys
from tpucare.testbed.simulation.campaign import Plan, live
print(live(Plan(days=0.03, level="high"), int(sys.argv[1])).digest)
"""


@pytest.fixture(scope="module")
def digest() -> str:
    """Of the history of seed 4, as lived in this process."""
    return live(Plan(days=0.03, level="high"), 4).digest


def test_a_seed_gives_the_same_history_byte_for_byte(digest: str) -> None:
    plan = Plan(days=0.03, level="high")
    assert live(plan, 4).digest == digest
    assert live(plan, 5).digest != digest


def test_a_seed_gives_the_same_history_in_every_process(digest: str) -> None:
    """What Python draws anew for each process is the order of its sets."""
    hashes = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", DIGEST, "4"]
    told = subprocess.run(run, env=environment, cwd=ROOT, check=True, capture_output=True, text=True, timeout=240)
    assert told.stdout.strip() == digest


def test_one_kind_of_fault_more_leaves_the_others_where_they_are() -> None:
    slots = storm_slots()
    high = draw(9, slots, days=1, level="high", pace=CLOSE)
    without = draw(9, slots[:-1], days=1, level="high", pace=CLOSE)
    shared = {one for one in high.strikes if FAULTS[one.kind].span != "slot"}
    assert shared == {one for one in without.strikes if FAULTS[one.kind].span != "slot"}


def test_every_fault_has_a_strike_and_numbers_for_each_level() -> None:
    assert set(STRIKES) == set(FAULTS)
    assert all(0 < fault.low <= fault.high for fault in FAULTS.values())
    assert draw(1, storm_slots(), days=10, level="none", pace=CLOSE).strikes == ()


# --- the executor ----------------------------------------------------------------------------------------------------


def _executor(delay: Callable[[Lane], float] | None = None, grain: float = 0.0) -> VirtualExecutor:
    return VirtualExecutor(VirtualClock(), lambda: None, lambda: None, delay, grain)


def _tags(finished: list[Finished]) -> list[object]:
    return [one.tag for one in finished]


def test_effects_end_in_the_order_of_their_ends() -> None:
    executor = _executor()
    executor.submit(Lane.CLOUD, "slow", lambda: executor.waiting(5.0))
    executor.submit(Lane.CLOUD, "swift", lambda: executor.waiting(1.0))
    executor.sleep(timedelta(seconds=10))
    assert (_tags(executor.finished()), executor.clock.seconds) == (["swift"], 1.0)
    executor.sleep(timedelta(seconds=10))
    assert (_tags(executor.finished()), executor.clock.seconds) == (["slow"], 5.0)


def test_a_killed_process_hears_of_nothing_and_what_was_on_its_way_may_arrive() -> None:
    executor, arrived = _executor(lambda _lane: 2.0), []
    for name in ("first", "second"):
        executor.submit(Lane.CLOUD, name, lambda name=name: arrived.append(name))  # type: ignore[misc]
    executor.sleep(timedelta(seconds=1))
    answers = iter((False, True))
    executor.die(lambda: next(answers))
    executor.sleep(timedelta(seconds=5))
    assert arrived == ["second"]
    assert executor.finished() == []


def test_with_a_grain_what_happens_meanwhile_is_found_together() -> None:
    executor = _executor(grain=5.0)
    for seconds in (1.0, 3.0, 7.0):
        executor.submit(Lane.PROBE, seconds, lambda seconds=seconds: executor.waiting(seconds))  # type: ignore[misc]
    executor.sleep(timedelta(seconds=60))
    assert (_tags(executor.finished()), executor.clock.seconds) == ([1.0, 3.0], 5.0)


# --- the store: the same promises on a disk and without one ----------------------------------------------------------

Open = Callable[[], Store]


@pytest.fixture(params=["disk", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Each call is the next process on the same store; the one before it is over."""
    disk = Disk()
    before: list[SqliteStore] = []

    def again() -> Store:
        if request.param == "memory":
            return MemoryStore(disk)
        for store in before:
            store.close()
        before.append(open_store(tmp_path / "state", machine_id="here", now=NOW))
        return before[-1]

    return again


@pytest.mark.contract
def test_the_next_process_finds_what_was_committed(opened: Open) -> None:
    store = opened()
    store.save({"pod-1": Memory("pod"), "pod-0": MEMORY}, [Event(NOW, "create", "asked for", "pod-0")])
    store.save({"pod-0": replace(MEMORY, step=7)})
    store.save_fleet(FleetRecord("pod", "name: pod", "/f", NOW, DesiredState.DOWN))
    again = opened()
    assert again.memories() == {"pod-0": replace(MEMORY, step=7), "pod-1": Memory("pod")}
    assert list(again.memories()) == ["pod-0", "pod-1"]
    assert again.fleets()["pod"].wish is DesiredState.DOWN
    assert not again.lost


@pytest.mark.contract
def test_events_are_told_by_slot_and_by_fleet_oldest_first(opened: Open) -> None:
    store = opened()
    store.save({"pod-0": MEMORY})
    store.save({}, [Event(NOW, "a", "one", "pod-0"), Event(NOW, "b", "two", "pod-1"), Event(NOW, "c", "three")])
    store.save({}, [Event(NOW, "d", "four", "pod-0")])
    assert [event.text for _, event in store.events(slot="pod-0")] == ["one", "four"]
    assert [event.text for _, event in store.events(slot="pod")] == ["one", "two", "four"]
    first = store.events()[0][0]
    assert [event.text for _, event in store.events(after=first, limit=2)] == ["two", "three"]


@pytest.mark.parametrize(
    ("fault", "error", "kept"),
    [
        (DiskFault.FULL, StoreFull, {}),
        (DiskFault.TORN, ProcessDied, {}),
        (DiskFault.CUT, ProcessDied, {"pod-0": MEMORY}),
    ],
)
def test_a_commit_that_fails_is_made_whole_or_not_at_all(
    fault: DiskFault, error: type[Exception], kept: dict[str, Memory]
) -> None:
    disk = Disk()
    disk.faults.append(fault)
    with pytest.raises(error):
        MemoryStore(disk).save({"pod-0": MEMORY})
    assert MemoryStore(disk).memories() == kept


@pytest.mark.parametrize(
    ("listings", "is_over"),
    [
        (dict.fromkeys(range(0, 26, 5), True), True),
        ({0: True, 5: True, 20: True}, False),
        ({0: True, 5: False, **dict.fromkeys(range(15, 36, 5), True)}, False),
        ({0: True, 5: False, **dict.fromkeys(range(15, 41, 5), True)}, True),
    ],
)
def test_a_finish_is_seen_by_what_was_observed_of_it(listings: dict[int, bool], is_over: bool) -> None:
    """
    A run finished while listings failed for 90 s, and its node was preempted right after they came back: the property
    counted that gap, and the engine, by rule 11, could not.
    """
    history = History(replace(draw(1, storm_slots(), days=0.1, level="none", pace=CLOSE), strikes=()))
    properties, clock = history.properties, history.daemon.clock
    exited = WorkerReport(Contact.ANSWERED, token="mini-0-a0.1", exit_status=0, phase=Phase.EXITED)
    for at, succeeds in listings.items():
        clock.seconds = at
        properties.observed.listed(at) if succeeds else properties.listing_failed(AnswerLost("14"))
        properties.answered(NodeReport(NodeKey("p", "z", "mini-0-a0"), 7, (exited,)))
    properties.ran(RunMark(clock.seconds, "start", "mini-0-a1.1", NodeKey("p", "z", "mini-0-a1"), 8, 0, "mini-0"))
    assert ("finished-once" in {broken.rule for broken in properties.broken}) is is_over


@pytest.mark.parametrize("arrivals", [(0, 30, 60), (0, 70, 110), (0, 10, 150, 160), (40, 41, 200, 230)])
def test_observed_time_from_outside_is_that_of_the_engine(arrivals: tuple[float, ...]) -> None:
    """Counted from the calls, which took up to 40 s at an outage, capped gaps were others: a verdict came too early."""
    now = 0.0
    view, clock = ProjectView("p", timedelta(seconds=90)), ObservedClock(90, lambda: now)
    for at in arrivals:
        clock.listed(at)
    for at in arrivals:
        now = at
        view.apply_listing(Listing("p", {}, frozenset(), frozenset()), at)
        assert clock.seconds == view.observed.total_seconds()


@pytest.mark.parametrize(("stands_still_at", "counted"), [(75.0, 40.0), (80.0, 80.0)])
def test_an_answer_that_comes_while_the_process_stands_still_is_heard_when_it_goes_on(
    stands_still_at: float, counted: float
) -> None:
    """Long storm 9004: the engine counted 90 s for that gap, as rule 11 says, and the property 40."""
    now = 0.0
    clock = ObservedClock(90, lambda: now)
    for at in (0.0, 40.0):
        clock.listed(at)
    now = 40.0
    assert clock.seconds == 40.0
    clock.listed(80.0)
    now = stands_still_at
    assert clock.seconds == counted
    clock.suspended(3000.0)
    now = 3000.0
    assert clock.seconds == 130.0


def test_a_new_run_that_hangs_is_given_as_long_as_checkpoints_of_its_job_usually_take() -> None:
    """A month told of a slot that did not train; what asks workers each four hours sees checkpoints as seldom."""
    hang = Strike(20.5 * 3600, "one-signal-hang", "mini-0", 1500)
    saves_alone = frozenset({"mini-0"})
    hung = Mutation("", "", lambda _: None, (hang,), hours=21, slots=1, months=True, saves_alone=saves_alone)
    outcome = hung.tell()
    assert (outcome.broken, outcome.tally.faults["one-signal-hang"]) == ([], 1)


# --- stories ---------------------------------------------------------------------------------------------------------


def test_a_failing_story_gets_shorter_and_can_be_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = next(one for one in MUTATIONS if one.rule == "no-surprise")
    mutation.change(monkeypatch)
    whole = draw(4, mutation.scenario().slots, days=0.03, level="high", pace=CLOSE, world=mutation.scenario().world)
    crash = Strike(2200, "crashed", "mini-0")
    whole = replace(whole, strikes=tuple(sorted((*whole.strikes, crash), key=lambda one: one.at)))
    outcome = History(whole).run()
    assert outcome.broken[0].rule == "no-surprise"
    shrunk = shrink(whole, outcome, tries=25)
    assert shrunk.outcome.broken[0].rule == "no-surprise"
    assert len(shrunk.scenario.strikes) < len(whole.strikes) / 2
    assert any("no such worker" in line for line in tell(shrunk))
    story = json.loads(json.dumps(shrunk.scenario.story()))
    assert History(told_again(story, whole)).run().broken[0].rule == "no-surprise"


def test_what_is_no_story_is_refused() -> None:
    scenario = draw(3, storm_slots(), days=0.1, level="none", pace=CLOSE)
    for raw in ({}, {"strikes": [{"at": 1, "kind": "flood"}], "slots": ["pod-0"], "days": 1}):
        with pytest.raises(ConfigError, match="not a story"):
            told_again(raw, scenario)


# --- figures ---------------------------------------------------------------------------------------------------------


def mark(what: str, seconds: float, step: int, how: RunEnd = RunEnd.NONE) -> RunMark:
    return RunMark(seconds, what, "mini-0-a0.1", NodeKey("p", "z", "mini-0-a0"), 1, 0, "mini-0", step, how)


def test_goodput_leaves_out_what_is_trained_again_and_what_stands_still() -> None:
    slot = replace(storm_slots()[0], name="mini-0")
    slot = replace(slot, places=(replace(slot.places[0], workers=1),))
    watch = TallyRecorder((slot,), setup_seconds=20.0)
    watch.ran(mark("start", 0, 0))
    watch.ran(mark("end", 1020, 1000, RunEnd.DIED))
    assert (watch.tally.trained_seconds, watch.tally.good_seconds) == (1000, 1000)
    watch.ran(mark("start", 2000, 960))
    assert watch.tally.good_seconds == 960, "40 steps since the last checkpoint went with the node"
    watch.ran(mark("end", 5020, 1960, RunEnd.STOOD_STILL))
    assert (watch.tally.trained_seconds, watch.tally.good_seconds) == (4000, 1960), "of 3,000 s it stood still 2,000"
    watch.ran(mark("start", 6000, 1960))
    watch.close(6120)
    assert (watch.tally.trained_seconds, watch.tally.good_seconds) == (4100, 2060)
    watch.tally.slot_seconds = 8240
    assert watch.tally.goodput == 0.25


def test_another_experiment_loses_nothing_of_the_one_before() -> None:
    slot = replace(storm_slots()[0], name="mini-0")
    slot = replace(slot, places=(replace(slot.places[0], workers=1),))
    watch = TallyRecorder((slot,), setup_seconds=0.0)
    watch.ran(mark("start", 0, 0))
    watch.ran(mark("end", 9000, 9000, RunEnd.STOPPED))
    watch.ran(mark("start", 9000, 0))
    assert watch.tally.good_seconds == 9000


def test_node_hours_are_those_in_which_a_node_of_ours_was_ready() -> None:
    watch = TallyRecorder((replace(storm_slots()[0], name="mini-0"),), setup_seconds=20.0)
    for name, slot in (("mini-0-a0", "mini-0"), ("mini-0-a1", "mini-0"), ("theirs", "")):
        watch.node(name, "created", slot, 0)
        watch.node(name, "ready", "", 600)
    watch.node("mini-0-a0", "preempted", "", 4200)
    watch.node("mini-0-a0", "gone", "", 9000)
    watch.node("theirs", "gone", "", 9000)
    watch.close(7800)
    assert watch.tally.node_hours == 3


# --- the command -----------------------------------------------------------------------------------------------------


def test_simulate_tells_figures(tmp_path: Path) -> None:
    fleet = tmp_path / "pod.yaml"
    fleet.write_text("name: pod\ncount: 2\ntpu: {type: v2-8, zones: [us-central1-b]}\njob: {run: python3 train.py}\n")
    ran = CliRunner().invoke(app, ["simulate", "--fleet", str(fleet), "--days", "0.05", "--seeds", "2..3", "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert (told["clean"], told["histories"], told["launches"] >= 4) == (True, 2, True)
    assert 0.5 < told["availability"] <= 1
    assert 0.5 < told["goodput"] <= told["availability"]
    assert 2 < told["node_hours"] < 10
    assert ran.stderr == "", "nobody looks at it"


def test_a_person_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(cli_simulate, "SHOWN_EVERY_SECONDS", 0.0)
    with cli_simulate._Progress(2) as progress:
        progress.on_way(0.25)
        progress.lived(1)
    lines = capsys.readouterr().err.split("\r\x1b[K")
    assert lines == [
        "",
        "lived 0 of 2 histories",
        "lived 0 of 2 histories, 25% of the next",
        "lived 1 of 2 histories; 1 broke a promise",
        "",
    ]


def test_simulate_exits_non_zero_and_tells_the_shortest_story(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutation = next(one for one in MUTATIONS if one.rule == "labelled")
    mutation.change(monkeypatch)
    saved = tmp_path / "story.json"
    ran = CliRunner().invoke(app, ["simulate", "--days", "0.02", "--seeds", "2", "--save", str(saved)])
    assert ran.exit_code == 1, ran.output
    assert "seed 2, step " in ran.stdout
    assert "labelled" in ran.stdout
    assert len(json.loads(saved.read_text())["slots"]) == 1
    again = CliRunner().invoke(app, ["simulate", "--seeds", "2", "--story", str(saved)])
    assert again.exit_code == 1


@pytest.mark.parametrize(
    "flags", [["--seeds", "9..1"], ["--seeds", "x"], ["--faults", "much"], ["--days", "0"], ["--story", "/dev/null"]]
)
def test_simulate_refuses_what_it_cannot_live_through(flags: list[str]) -> None:
    assert CliRunner().invoke(app, ["simulate", *flags]).exit_code != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_its_processes_end_with_it(number: signal.Signals) -> None:
    """A campaign that was stopped lived on without anybody who wanted to hear of it, each history to its end."""
    name, value = "TPUCARE_TEST", str(uuid.uuid4())
    mark = f"{name}={value}"
    command = [sys.executable, "-m", "tpucare.cli", "simulate", "--seeds", "1..50", "--days", "30", "--jobs", "2"]
    environment = {**os.environ, name: value}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            # The command, the tracker and the fork server of multiprocessing, and two that live histories.
            eventually(lambda: len(bearing(mark)) >= 5, 60)
            process.send_signal(number)
            eventually(lambda: not bearing(mark))
        finally:
            for pid in bearing(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def bearing(mark: str) -> list[int]:
    """Processes that have *mark* in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_a_process_that_was_killed_is_told_of_no_change_any_more() -> None:
    """Its listings were followed until the collector came, which is off: each change was noted for each of them."""
    daemon = ObservedDaemon()
    daemon.start()
    daemon.care_for_slots("pod", list(storm_slots()[:1]))
    project = daemon.declared["pod"][0].project
    was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(5):
            daemon.run(minutes=1)
            daemon.restart()
        listing = daemon.zone.world.state.listing(project)
        assert sum(follower() is not None for follower in listing._followers) <= 1
    finally:
        if was_on:
            gc.enable()
