"""
The output of a blocking call of the Python API: events as lines, and on a terminal a status line that is updated.

Texts may come from a worker, a label or the API, so they may not control the terminal. Never raises: a stream that
cannot be written to must not end the call.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tpucare.model.actions import event_line
from tpucare.model.resources import Event
from tpucare.model.text import plain

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_STYLES: Mapping[str, str] = {"debug": "dim", "warning": "yellow", "error": "red"}
Row = Mapping[str, Any]


class ProgressDisplay(Protocol):
    """`level`: events below it are not shown."""

    level: int
    # How often `show` is worth calling; None = it shows nothing.
    every_seconds: float | None

    def event(self, event: Event) -> None: ...

    def say(self, text: str) -> None:
        """Show a line of the call itself."""
        ...

    def show(self, rows: Sequence[Row]) -> None:
        """Update the status line; *rows* as of `service.status.slot_rows`."""
        ...

    def close(self) -> None: ...


def progress_on(stream: TextIO | None = None, level: int = logging.INFO) -> ProgressDisplay:
    """The display that fits *stream*, by default stderr. Only a call on the main thread may have the status line."""
    out = stream or sys.stderr
    try:
        is_terminal = out.isatty() and threading.current_thread() is threading.main_thread()
    except (OSError, ValueError):
        is_terminal = False
    return LiveDisplay(out, level) if is_terminal else PlainDisplay(out, level)


class PlainDisplay:
    """A line for each event, and nothing else."""

    every_seconds: float | None = None

    def __init__(self, stream: TextIO, level: int = logging.INFO) -> None:
        self._stream, self.level = stream, level

    def event(self, event: Event) -> None:
        if LEVELS.get(event.level, logging.INFO) >= self.level:
            self.say(line_of(event))

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{plain(text)}\n")
            self._stream.flush()

    def show(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader is gone. Rich would end the process."""
        self.quiet = True


class LiveDisplay:
    """As PlainDisplay, with a status line below."""

    every_seconds: float | None = 1.0

    def __init__(self, stream: TextIO, level: int = logging.INFO) -> None:
        self.level = level
        self._console = _Console(file=stream, highlight=False, soft_wrap=True)
        # Output of the user's own code goes above the status line, too, if it goes to a terminal.
        self._live = Live(
            Text(""),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        with contextlib.suppress(OSError, ValueError):
            self._live.start()

    def event(self, event: Event) -> None:
        if LEVELS.get(event.level, logging.INFO) >= self.level:
            self._print(Text(line_of(event), style=_STYLES.get(event.level, "")))

    def say(self, text: str) -> None:
        self._print(Text(plain(text), style="bold"))

    def show(self, rows: Sequence[Row]) -> None:
        with contextlib.suppress(OSError, ValueError):
            line = Text(summary(rows), no_wrap=True, overflow="ellipsis", style="cyan")
            self._live.update(line, refresh=True)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()

    def _print(self, text: Text) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._console.print(text)


def line_of(event: Event) -> str:
    return event_line(event.at.astimezone(), event.level, event.slot, event.text)


def summary(rows: Sequence[Row]) -> str:
    """All slots on one line: a single slot in full, several as counts by phase."""
    if len(rows) == 1:
        return _one(rows[0])
    training = sum(bool(row["training"]) for row in rows)
    phases = Counter(str(row["phase"]) for row in rows if not row["training"])
    parts = [f"{training} of {len(rows)} slots run", *(f"{count} {phase}" for phase, count in phases.most_common())]
    person = next((row for row in rows if row["needs_person"]), None)
    return " · ".join([*parts, *([f"{person['slot']}: {person['why']}"] if person is not None else [])])


def _one(row: Row) -> str:
    where = " ".join(str(part) for part in (row["node"], row["zone"], row["type"]) if part)
    step = f"step {row['step']}" if row["step"] is not None else ""
    workers = f"{row['workers_answering']}/{row['workers']} workers" if row["workers"] > 1 else ""
    parts = [f"{row['slot']}: {row['phase']}", where, f"attempt {row['attempt']}", workers, step, str(row["why"])]
    return plain(" · ".join(part for part in parts if part))
