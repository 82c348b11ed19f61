"""What memory becomes by facts, by what only asks or tells, and after a kill."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.kits.evidence import FRESH, NOW, TRAINS, after, intent, launched, memory, name_of, node, past, run, token
from tests.kits.remembering import ACCEPTED, OPEN, asked, came, delete, look, poll
from tpucare.model.actions import Action, AddSshKey, Fact, FetchHostKeys, Record, SendNotice
from tpucare.model.causes import Cause, Reason
from tpucare.model.errors import AnswerLost, NodeGone
from tpucare.model.lifecycles import CreateState, RunState
from tpucare.model.memory import End, FailureCounter, FailureKind, Publishing, Trust
from tpucare.planner.remember import recover


def test_facts_are_written_down() -> None:
    adopted = asked(FRESH, Record(Fact.RUN_ADOPTED, "why", name_of(0), token(0, 3), 3))
    assert adopted.run is not None
    assert (adopted.run.token, adopted.run.complete, adopted.attempts) == (token(0, 3), True, 2)
    again = asked(adopted, Record(Fact.RUN_ADOPTED, "why", name_of(0), token(0, 4), 4))
    assert again.attempts == 2
    assert asked(memory(), Record(Fact.RUN_ADOPTED, "why", name_of(0), token(), 1)).attempts == 0
    for fact, field, want in (
        (Fact.RUN_COMPLETE, "complete", True),
        (Fact.RUN_COMPLETE, "state", RunState.RUNNING),
        (Fact.RUN_STOPPED, "state", RunState.STOPPED),
        (Fact.RUN_PROGRESSED, "progressed", True),
    ):
        known = memory(past(), run=run(state=RunState.LAUNCHING, progressed=False))
        told = asked(known, Record(fact, "why", name_of(0), token())).run
        assert told is not None
        assert getattr(told, field) == want
        assert asked(memory(), Record(fact, "why")).run is None
    tired = replace(
        TRAINS, step=5, books={name: FailureCounter(3, 9, after(60)) for name in ("setup", "infrastructure", "crash")}
    )
    rested = asked(tired, Record(Fact.SETUP_DONE, "why", name_of(0)))
    assert rested.counter(FailureKind.SETUP) == FailureCounter(0, 9)
    assert rested.counter(FailureKind.INFRASTRUCTURE).failures == 3
    assert asked(rested, Record(Fact.SETUP_DONE, "why", name_of(0))) == rested
    for step, failures in ((5, 3), (6, 0)):
        further = asked(tired, Record(Fact.RUN_PROGRESSED, "why", name_of(0), step=step))
        assert further.counter(FailureKind.INFRASTRUCTURE).failures == failures
    slow = asked(TRAINS, Record(Fact.RUN_PROGRESSED, "why", name_of(0), gap=timedelta(minutes=2))).run
    assert slow is not None
    assert slow.gap_seconds == 120
    ended = asked(TRAINS, Record(Fact.ENDED, "exit 0", end=End.DONE, step=9))
    assert (ended.end, ended.end_why, ended.ended_at, ended.step) == (End.DONE, "exit 0", NOW, 9)


def test_a_notice_and_a_key_are_noted_on_the_node() -> None:
    notice = SendNotice(node().key, token(), "save", Cause.UNRECORDED, "why", checkpoint=5)
    told = asked(TRAINS, notice).node(name_of(0))
    assert told is not None
    assert (told.noticed_at, told.noticed_checkpoint) == (NOW, 5)
    assert asked(memory(), notice) == memory()
    key = AddSshKey(node().key, Cause.UNRECORDED, "why")
    told = came(TRAINS, key).node(name_of(0))
    assert told is not None
    assert told.keyed
    assert came(TRAINS, key, None, AnswerLost("x")) == TRAINS
    assert came(TRAINS, key, None, NodeGone("x")) == TRAINS, "GetNode and DeleteNode alone prove that a node is gone"
    assert came(memory(), key) == memory()


def test_why_host_keys_are_believed_is_remembered_and_of_whom_it_tells() -> None:
    vouch = FetchHostKeys(node().key, Cause.UNRECORDED, "why", "p/runtime")
    known = came(TRAINS, vouch, True)
    told = known.node(name_of(0))
    assert told is not None
    assert told.trust is Trust.VOUCHED
    assert known.publishing == {"p/runtime": Publishing(NOW, published=True)}
    for result, error in ((False, None), (None, AnswerLost("x")), (True, AnswerLost("x"))):
        assert came(TRAINS, vouch, result, error) == TRAINS
    first = asked(known, Record(Fact.FIRST_USE, "why", name=name_of(0), publisher="p/runtime"))
    told = first.node(name_of(0))
    assert told is not None
    assert told.trust is Trust.FIRST_USE
    assert first.publishing == {"p/runtime": Publishing(NOW, published=False)}
    forbidden = asked(TRAINS, Record(Fact.FIRST_USE, "why", name=name_of(0)))
    assert forbidden.publishing == {}


@pytest.mark.parametrize(
    "action",
    [
        look(),
        poll(),
        FetchHostKeys(node().key, Cause.UNRECORDED, "why"),
        AddSshKey(node().key, Cause.UNRECORDED, "why"),
    ],
)
def test_what_only_asks_has_no_intent(action: Action) -> None:
    assert asked(TRAINS, action) is TRAINS


def test_what_only_tells_leaves_nothing() -> None:
    assert came(TRAINS, FetchHostKeys(node().key, Cause.UNRECORDED, "why"), {}) is TRAINS
    assert came(TRAINS, SendNotice(node().key, token(), "save", Cause.UNRECORDED, "why")) is TRAINS


def test_after_a_kill_an_unanswered_create_may_have_arrived() -> None:
    told = recover(OPEN).create(name_of(10))
    assert told is not None
    assert told.state is CreateState.ANSWER_LOST
    assert recover(ACCEPTED) == ACCEPTED


def test_after_a_kill_a_verdict_that_was_not_accepted_is_judged_anew() -> None:
    """
    The daemon was killed between its verdict on a node and the accepted delete; the next process repeated the delete
    though the node was well again. Such an intent is void after a restart; deletes of dead nodes and deletes that a
    person asked for are repeated.
    """
    known = asked(TRAINS, delete(reason=Reason.JUDGED))
    told = recover(known).node(name_of(0))
    assert told is not None
    assert told.delete is None
    accepted = recover(came(known, delete())).node(name_of(0))
    assert accepted is not None
    assert accepted.delete is not None
    assert (accepted.delete.asked_at, accepted.delete.next_at) == (NOW, None)


@pytest.mark.parametrize(
    "successor",
    [{"creates": (intent(1, state=CreateState.AWAITED),)}, {"nodes": (launched(0), past(1))}],
    ids=["asked for", "there"],
)
def test_after_a_kill_a_verdict_stands_when_the_slot_has_gone_on(successor: dict[str, Any]) -> None:
    known = recover(asked(replace(TRAINS, **successor), delete(reason=Reason.JUDGED)))
    told = known.node(name_of(0))
    assert told is not None
    assert told.delete is not None
    assert (told.delete.asked_at, told.delete.next_at) == (NOW, None)


def test_after_a_kill_what_a_person_asked_for_goes_on() -> None:
    told = recover(asked(TRAINS, delete(reason=Reason.ASKED))).node(name_of(0))
    assert told is not None
    assert told.delete is not None
    assert told.delete.asked_at == NOW
    assert recover(TRAINS) == TRAINS
