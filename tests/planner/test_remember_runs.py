"""What memory becomes by launches and stops: runs, failures, attempts."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.kits.evidence import FRESH, NOW, TRAINS, intent, launched, memory, name_of, node, past, run, token
from tests.kits.remembering import PLACE, asked, came, delete, launch, poll, stop, vanished
from tpucare.model.actions import Action, Fact, Record
from tpucare.model.causes import Reason
from tpucare.model.errors import AuthRefused, CommandFailed, ConfigError, WorkerSilent
from tpucare.model.lifecycles import CreateState, RunState
from tpucare.model.memory import End, FailureCounter, FailureKind, PlaceMemory, Refusal
from tpucare.model.resources import Operation
from tpucare.model.runs import LaunchResult, StopResult
from tpucare.planner.desired_state import replace_node, restart, retry
from tpucare.planner.remember import apply_node, record_last_progress, recover


def test_a_launch_is_on_record_before_it_begins_and_counts_nodes_not_runs() -> None:
    first = asked(replace(FRESH, attempts=4, restart_asked=True, fence_confirmed=True), launch())
    assert first.run is not None
    assert (first.run.token, first.run.complete, first.attempts) == (token(), False, 5)
    assert (first.restart_asked, first.fence_confirmed) == (False, False)
    told = first.node(name_of(0))
    assert told is not None
    assert (told.launched, told.attempt) == (True, 5)
    again = asked(first, launch(0, 2))
    assert again.attempts == 5
    assert asked(memory(), launch()).run is not None


def test_a_launch_settles_the_create_of_its_node_however_long_the_operation_goes_on() -> None:
    """
    A node that trained while it showed CREATING, its operation still open, was given up with its create and deleted
    without a stop and its grace. A launch settles the create of its node, which is like any other from then on.
    """
    open_intent, other = (
        intent(0, state=CreateState.RUNNING, operation="op"),
        intent(1, state=CreateState.RUNNING, operation="op"),
    )
    made = memory(past(), creates=(open_intent, other)).with_place(PLACE, PlaceMemory(3, kind=Refusal.NO_CAPACITY))
    for known in (
        asked(made, launch()),
        asked(made, Record(Fact.RUN_ADOPTED, "why", name_of(0), token(), 1)),
        recover(asked(made, launch()).with_create(open_intent)),
        recover(asked(made, launch()).with_create(replace(open_intent, abandoned=True))),
    ):
        assert [one.name for one in known.creates] == [other.name]
        assert (known.place(PLACE).failures, known.place(PLACE).last_success is None) == (0, False)
        assert known.node(name_of(0)) == replace(past(), launched=True, attempt=2)
        assert came(known, poll(0), Operation("op", done=True)) == known


@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        ((None, WorkerSilent("x")), FailureKind.INFRASTRUCTURE),
        ((AuthRefused("x"), None), FailureKind.INFRASTRUCTURE),
        ((None, CommandFailed("x", 1)), FailureKind.SETUP),
        ((ConfigError("no secret"), WorkerSilent("x")), FailureKind.SETUP),
    ],
)
def test_a_launch_that_is_not_whole_is_counted(workers: tuple[Exception | None, ...], kind: FailureKind) -> None:
    known = asked(FRESH, launch())
    failed = came(known, launch(), LaunchResult(workers))
    assert failed.counter(kind).total == 1
    assert failed.run is not None
    assert not failed.run.complete


def test_a_launch_that_is_whole_or_broke_down_or_is_nobodys() -> None:
    known = asked(FRESH, launch())
    whole = came(known, launch(), LaunchResult((None, None)))
    assert whole.run is not None
    assert whole.run.complete
    assert came(known, launch(), None, WorkerSilent("x")).counter(FailureKind.INFRASTRUCTURE).reason == "x"
    assert came(known, launch(), None, None).counter(FailureKind.INFRASTRUCTURE).reason == "launch failed"
    assert came(known, launch(0, 2), LaunchResult((None,))) == known
    assert came(memory(), launch(), LaunchResult((None,))) == memory()


def test_a_stop_books_why_and_keeps_how_far_the_run_got() -> None:
    known = asked(TRAINS, stop(failure=FailureKind.CRASH, step=7, checkpoint=5))
    assert known.run is not None
    assert (known.run.stop_why, known.run.state) == ("why", RunState.STOPPING)
    assert (known.step, known.checkpoint) == (7, 5)
    counter = known.counter(FailureKind.CRASH)
    assert (counter.failures, counter.total) == (1, 1)
    assert counter.retry_at is not None
    assert timedelta(seconds=5) <= counter.retry_at - NOW <= timedelta(seconds=10)
    again = asked(known, stop(failure=FailureKind.CRASH, advanced=True)).counter(FailureKind.CRASH)
    assert (again.failures, again.total) == (1, 2)


def test_a_stop_that_gives_up_ends_the_slot() -> None:
    known = asked(TRAINS, stop(failure=FailureKind.CRASH, gives_up=True))
    assert (known.end, known.end_why, known.ended_at) == (End.FAILED, "why", NOW)


def test_a_stop_of_what_is_not_our_run_is_remembered_as_a_run() -> None:
    known = asked(memory(past()), stop(0, 0, then=Reason.JUDGED))
    assert known.run is not None
    assert (known.run.token, known.run.then_delete) == (token(0, 0), Reason.JUDGED)


def test_stalls_and_infrastructure_are_counted_on_the_node_too() -> None:
    known = asked(TRAINS, stop(failure=FailureKind.STALL))
    known = asked(known, stop(failure=FailureKind.INFRASTRUCTURE))
    told = known.node(name_of(0))
    assert told is not None
    assert (told.stalls, told.infrastructure) == (1, 1)
    assert known.counter(FailureKind.INFRASTRUCTURE).retry_at is None, "the first of a row waits for nothing"
    known = asked(known, stop(failure=FailureKind.INFRASTRUCTURE))
    assert known.counter(FailureKind.INFRASTRUCTURE).retry_at is not None
    known = asked(known, stop(failure=FailureKind.INFRASTRUCTURE, advanced=True))
    told = known.node(name_of(0))
    assert told is not None
    assert told.infrastructure == 1
    assert asked(memory(), stop(failure=FailureKind.STALL)).nodes == ()


def test_what_comes_of_a_stop() -> None:
    known = asked(TRAINS, stop())
    quiet = came(known, stop(), StopResult((True, True)))
    assert quiet.run is not None
    assert quiet.run.state is RunState.STOPPED
    loud = came(known, stop(), StopResult((True, WorkerSilent("x"))))
    assert loud.run is not None
    assert (loud.run.state, loud.run.stops) == (RunState.STOPPING, 1)
    stuck = came(known, stop(), StopResult((True, False)))
    assert stuck.run is not None
    assert stuck.run.state is RunState.STUCK
    assert came(known, stop(), None, WorkerSilent("x")) == known


def test_a_stop_on_one_node_says_nothing_of_the_run_adopted_on_another() -> None:
    known = memory(launched(0), launched(1), run=run(1))
    assert came(known, stop(0), StopResult((True, True))) == known
    assert came(memory(), stop(0), StopResult((True, True))) == memory()


def test_which_job_tells_of_steps_is_known_and_an_edited_one_begins_anew() -> None:
    """
    A job was edited to one whose log tells no step, and its healthy runs were stopped each hour for "no first step"
    until the slot failed. The store remembers which job told of steps, and the limit for the first step holds for runs
    of that job only.
    """
    edited = replace(launch(0, 2), job="new")
    known = asked(
        asked(replace(FRESH, step=None), replace(launch(), job="old")), stop(step=100, failure=FailureKind.CRASH)
    )
    known = record_last_progress(known, 90, 80)
    assert (known.step, known.step_job, known.last_step) == (100, "old", 90)
    again = asked(known, replace(edited, job="old"))
    assert (again.step, again.counter(FailureKind.CRASH).failures) == (100, 1)
    known = asked(known, edited)
    assert known.run is not None
    assert (known.run.job, known.step_job) == ("new", "")
    assert (known.step, known.checkpoint, known.last_step, known.last_checkpoint) == (None, None, None, None)
    assert (known.counter(FailureKind.CRASH).failures, known.counter(FailureKind.CRASH).total) == (0, 1)
    told = asked(known, stop(0, 2, step=7))
    assert (told.step, told.step_job) == (7, "new")
    assert asked(known, Record(Fact.RUN_PROGRESSED, "why", name_of(0))).step_job == "new"


IN_A_ROW = replace(TRAINS, step=100, checkpoint=50, books={name.value: FailureCounter(3, 3) for name in FailureKind})


@pytest.mark.parametrize(
    ("what", "is_over"),
    [
        (Record(Fact.RUN_PROGRESSED, "why", name_of(0), step=101), True),
        (Record(Fact.RUN_PROGRESSED, "why", name_of(0), step=100), False),
        (Record(Fact.RUN_PROGRESSED, "why", name_of(0), checkpoint=100), True),
        (Record(Fact.RUN_PROGRESSED, "why", name_of(0), step=9, checkpoint=51), True),
        (Record(Fact.RUN_PROGRESSED, "why", name_of(0), step=9, checkpoint=50), False),
        (Record(Fact.RUN_LASTED, "why", name_of(0)), True),
        (Record(Fact.ENDED, "why", name_of(0), end=End.DONE), True),
        (stop(served=True), True),
        (stop(), False),
    ],
)
def test_what_ends_a_row_of_failures(what: Action, *, is_over: bool) -> None:
    known = asked(IN_A_ROW, what)
    rows = [known.counter(name) for name in (FailureKind.STALL, FailureKind.CRASH, FailureKind.INFRASTRUCTURE)]
    assert rows == [FailureCounter(0 if is_over else 3, 3)] * 3
    assert known.counter(FailureKind.SETUP).failures == 3, "a setup that serves ends that one"


def test_after_a_success_the_next_run_may_begin_anew() -> None:
    known = asked(replace(IN_A_ROW, checkpoint=100), stop(served=True, step=100))
    assert (known.step, known.checkpoint) == (None, None)


def test_a_run_that_goes_with_its_silent_node_is_booked_once() -> None:
    lost = delete(failure=FailureKind.INFRASTRUCTURE, gives_up=True, step=9)
    known = asked(TRAINS, lost)
    assert (known.counter(FailureKind.INFRASTRUCTURE).failures, known.end, known.step) == (1, End.FAILED, 9)
    assert asked(TRAINS, delete()).counter(FailureKind.INFRASTRUCTURE).failures == 0


def test_a_launch_that_failed_on_a_node_that_died_is_free() -> None:
    failed = came(asked(FRESH, launch()), launch(), LaunchResult((None, WorkerSilent("x"))))
    assert failed.counter(FailureKind.INFRASTRUCTURE).failures == 1
    for known in (apply_node(failed, node("PREEMPTED")), vanished(failed, name_of(0))):
        assert (
            known.counter(FailureKind.INFRASTRUCTURE).failures,
            known.counter(FailureKind.INFRASTRUCTURE).retry_at,
        ) == (0, None)
    assert apply_node(failed, node()).counter(FailureKind.INFRASTRUCTURE).failures == 1
    whole = came(failed, launch(), LaunchResult((None, None)))
    assert apply_node(whole, node("PREEMPTED")).counter(FailureKind.INFRASTRUCTURE).failures == 1, "a later try served"


def test_what_a_person_asks_for_is_done_though_the_run_had_finished() -> None:
    known = replace(TRAINS, run=run(state=RunState.FINISHED))
    for alter in (restart, replace_node, lambda m: retry(replace(m, end=End.DONE))):
        altered = alter(known)
        assert altered.run is not None
        assert altered.run.state is not RunState.FINISHED
    assert asked(known, stop()).run.state is RunState.STOPPING  # type: ignore[union-attr]
    finished = asked(TRAINS, Record(Fact.RUN_FINISHED, "why", name_of(0)))
    assert finished.run is not None
    assert finished.run.state is RunState.FINISHED


def test_a_node_that_was_judged_with_its_run_is_judged_anew_by_the_next_process() -> None:
    """
    A process deleted a node for an hour of bad health seconds after it had begun and seen the node well. After a
    restart the stop goes on, but the verdict behind it is void.
    """
    for then, left in ((Reason.JUDGED, None), (Reason.ASKED, Reason.ASKED), (None, None)):
        run_after = recover(asked(TRAINS, stop(then=then))).run
        assert run_after is not None
        assert (run_after.then_delete, run_after.stop_why) == (left, "why")


def test_what_failed_of_another_job_is_forgotten_though_its_last_run_is_forgotten_too() -> None:
    """
    A job that replaced a broken one inherited its failures, because no run of the broken one was remembered any more.
    The job launched last is remembered apart from its run.
    """
    known = asked(FRESH, replace(launch(), job="old"))
    known = replace(known, run=None, books={"infrastructure": FailureCounter(11, 11), "setup": FailureCounter(3, 3)})
    same = asked(known, replace(launch(1), job="old"))
    assert (same.counter(FailureKind.INFRASTRUCTURE).failures, same.counter(FailureKind.SETUP).failures) == (11, 3)
    other = asked(known, replace(launch(1), job="new"))
    assert (other.counter(FailureKind.INFRASTRUCTURE).failures, other.counter(FailureKind.SETUP).failures) == (0, 0)
