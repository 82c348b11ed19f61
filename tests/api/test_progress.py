"""What a person sees while a call blocks: lines for events, and on a terminal one that lives."""

from __future__ import annotations

import io
import os
import pty
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from tpucare.api.progress import LiveDisplay, PlainDisplay, progress_on, summary
from tpucare.model.resources import Event
from tpucare.service import event_log as events

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def row(slot: str = "pod", **changes: Any) -> dict[str, Any]:
    return {
        "slot": slot,
        "phase": "run",
        "node": f"{slot}-a3",
        "zone": "us-east5-a",
        "type": "v5p-8",
        "attempt": 3,
        "workers": 1,
        "workers_answering": 1,
        "step": 120,
        "why": "running",
        "training": True,
        "needs_person": False,
        **changes,
    }


def event(text: str, level: str = "info") -> Event:
    return Event(NOW, "test", text, "pod", level=level)


def test_one_slot_is_told_in_full() -> None:
    assert summary([row()]) == "pod: run · pod-a3 us-east5-a v5p-8 · attempt 3 · step 120 · running"
    assert "3/4 workers" in summary([row(workers=4, workers_answering=3)])


def test_many_are_counted_and_who_needs_a_person_is_named() -> None:
    rows = [row(f"pod-{n}") for n in range(3)]
    rows += [row("pod-3", phase="creating", training=False), row("pod-4", phase="failed", training=False)]
    rows[-1].update(needs_person=True, why="spent its budget")
    assert summary(rows) == "3 of 5 slots run · 1 creating · 1 failed · pod-4: spent its budget"


def test_a_pipe_gets_plain_lines_of_the_wanted_level() -> None:
    out = io.StringIO()
    progress = progress_on(out, level=20)
    assert isinstance(progress, PlainDisplay)
    for level in ("debug", "info", "error"):
        progress.event(event(f"{level} \x1b[31mline\n", level))
    progress.show([row()])
    progress.close()
    here = f"{NOW.astimezone():%Y-%m-%d %H:%M:%S %Z}"
    assert out.getvalue() == (f"{here} pod          info line\n{here} pod          ERROR error line\n")


def test_a_terminal_gets_a_line_that_lives() -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        progress = progress_on(terminal)
        assert isinstance(progress, LiveDisplay)
        progress.event(event("a node is made"))
        progress.show([row()])
        progress.say("SIGTERM: left alive")
        progress.close()
    shown = b""
    while b"left alive" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    assert b"a node is made" in shown
    assert "pod: run · pod-a3".encode() in shown
    assert sys.stderr is not terminal


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("make", [PlainDisplay, LiveDisplay])
def test_a_stream_that_is_gone_stops_nobody(make: Any) -> None:
    progress = make(Gone())
    progress.event(event("x"))
    progress.show([row()])
    progress.close()


def test_the_log_for_people_says_nothing_twice() -> None:
    out = io.StringIO()
    events.configure(events.LogForm.CONSOLE, "info", out)
    tell = events.teller()
    fields = {"state": "READY", "zone": "us-east1-d"}
    tell(Event(NOW, "state", "pod-0-a0 is READY", "pod-0", "pod-0-a0", "info", fields))
    tell(Event(NOW, "gone", "pod-0-a0 is gone", "pod-0", "pod-0-a0", "warning"))
    structlog.reset_defaults()
    said = [line.split(" ", 3)[3] for line in out.getvalue().splitlines()]
    assert said == ["pod-0        pod-0-a0 is READY zone=us-east1-d", "pod-0        WARNING pod-0-a0 is gone"]
