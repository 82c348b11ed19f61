"""Causes: what scripts, checks and stores read instead of the texts that people read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import tpucare
from tests.kits.evidence import NOW, memory, node
from tests.kits.remembering import asked, delete, stop
from tpucare.adapters.state.store import MEMORY
from tpucare.integrations.wandb.companion import finish
from tpucare.model.actions import fields_of
from tpucare.model.causes import Cause
from tpucare.model.memory import End, Memory

PACKAGE = Path(tpucare.__file__).parent


def test_each_cause_is_a_word_of_its_own_and_is_given_somewhere() -> None:
    values = [cause.value for cause in Cause]
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", value) for value in values if value)
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "causes.py")
    assert [cause for cause in Cause if f"Cause.{cause.name}" not in sources] == []


def test_an_event_of_an_action_tells_its_cause_to_scripts() -> None:
    judged = replace(delete(), cause=Cause.SILENT)
    assert fields_of(judged)["cause"] == "silent"
    assert "again" not in fields_of(judged)
    assert fields_of(replace(judged, again=True))["again"] == "true"


def test_what_a_slot_ended_with_and_what_is_under_way_keep_their_cause() -> None:
    known = asked(memory(), replace(stop(), cause=Cause.CRASHED, gives_up=True))
    assert (known.end, known.end_cause) == (End.FAILED, Cause.CRASHED)
    assert known.run is not None
    assert known.run.stop_cause is Cause.CRASHED
    known = asked(known, replace(delete(), cause=Cause.SLOT_ENDED))
    assert [past.delete and past.delete.cause for past in known.nodes if past.name == node().name] == [Cause.SLOT_ENDED]
    assert (known.without_end().end, known.without_end().end_cause) == (End.NONE, Cause.UNRECORDED)
    assert MEMORY.decode(MEMORY.encode(known), "x") == known


@pytest.mark.parametrize(
    ("ended", "want"),
    [
        (Memory("pod", end=End.DONE, end_why="sweep e/p/s is over (3 runs)"), Cause.SWEEP_OVER),
        (Memory("pod", end=End.DONE, end_why="the run finished with exit status 0"), Cause.UNRECORDED),
        (Memory("pod", end=End.FAILED, end_why="sweep.py exited with 1"), Cause.UNRECORDED),
        (finish(Memory("pod"), "sweep e/p/s is over", NOW), Cause.SWEEP_OVER),
    ],
)
def test_a_store_that_kept_texts_alone_still_tells_what_was_ended_for_its_sweep(ended: Memory, want: Cause) -> None:
    assert MEMORY.decode(MEMORY.encode(ended), "x").end_cause is want
