"""`tpucare logs`: the kept output of jobs, from the state folder; the end of a slot, from the daemon or the store."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import typer

from tpucare.adapters.runner.logs import LogKeeper
from tpucare.cli.common import CommandError, warn
from tpucare.cli.render import refuse_unknown
from tpucare.model.errors import TpuCareError
from tpucare.model.text import length, plain, plain_lines
from tpucare.service.options import Options

# Phases of a slot that has ended: its last lines are fetched before its end is saved.
ENDS = ("done", "failed", "down")
ASK_EVERY_SECONDS = 3.0
NOTHING = "it has not printed anything yet, or prints into a session of its own (`screen -ls` on the worker)"
_RUN = re.compile(rb"^--- run (\S+) ---$", re.M)


def log_keeper(options: Options, word: str) -> tuple[LogKeeper, str]:
    """
    The kept logs, and the slot that *word* names: itself, or slot 0 of that fleet.

    Raises: CommandError: there is no such fleet or slot, and no log of one.
    """
    keeper = LogKeeper(options.logs)
    if keeper.attempts(word):
        return keeper, word
    known = _known(options)
    if word in known["slots"]:
        return keeper, word
    if not keeper.attempts(f"{word}-0") and f"{word}-0" not in known["slots"]:
        refuse_unknown(word, [*known["slots"], *known["fleets"]])
    return keeper, f"{word}-0"


def _known(options: Options) -> dict[str, list[str]]:
    from tpucare.service import status

    try:
        answer = status.status(options)
    except TpuCareError:
        # Without a store the logs may still be there.
        return {"slots": [], "fleets": []}
    return {"slots": [row["slot"] for row in answer["slots"]], "fleets": [row["fleet"] for row in answer["fleets"]]}


def kept(keeper: LogKeeper, slot: str) -> Iterator[str]:
    """A line for each attempt with a kept log: node, runs, workers, age of the newest line."""
    now = datetime.now(UTC).timestamp()
    found = keeper.attempts(slot)
    for attempt, workers in found.items():
        tokens = [token.decode("utf-8", "replace") for token in _RUN.findall(keeper.read(slot, attempt, workers[0]))]
        nodes = ", ".join(dict.fromkeys(token.rpartition(".")[0] for token in tokens)) or "?"
        age = length(max(0.0, now - keeper.written_at(slot, attempt)))
        runs = f"{len(tokens)} run{'s' if len(tokens) != 1 else ''}"
        yield plain(f"attempt {attempt}: {nodes}, {runs}, {_workers(workers)}, last line {age} ago")
    if not found:
        yield f"{slot} has no kept log; {NOTHING}"


def refuse_unkept(keeper: LogKeeper, slot: str, attempt: int | None, worker: int) -> None:
    """Raises: CommandError: there is no such log; the text names the kept ones."""
    found = keeper.attempts(slot)
    if not found:
        raise CommandError(f"{slot} has no kept log; {NOTHING}")
    if attempt is not None and attempt not in found:
        raise CommandError(f"{slot} has no kept log of attempt {attempt}; kept: {', '.join(map(str, found))}")
    chosen = attempt or max(found)
    if worker not in found[chosen]:
        text = f"{slot} has no kept log of worker {worker} in attempt {chosen}; kept: {_workers(found[chosen])}"
        raise CommandError(text)


def _workers(numbers: tuple[int, ...]) -> str:
    is_row = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    named = f"{numbers[0]} to {numbers[-1]}" if is_row else ", ".join(map(str, numbers))
    return f"worker{'s' if len(numbers) > 1 else ''} {named}"


class Tail:
    """The growing log of one worker, of *attempt* or else of the newest attempt."""

    def __init__(self, keeper: LogKeeper, slot: str, attempt: int | None, worker: int, lines: int | None) -> None:
        """lines: how many of the last lines the first `show` prints; None: all"""
        self.slot = slot
        self._keeper, self._attempt, self._worker, self._lines = keeper, attempt, worker, lines
        self._current, self._shown = -1, 0

    def show(self) -> None:
        """Print the bytes that are new since the last call."""
        newest = self._attempt or max(self._keeper.attempts(self.slot), default=self._current)
        if newest != self._current:
            self._current, self._shown = newest, 0
        content = self._keeper.read(self.slot, newest, self._worker) if newest >= 0 else b""
        # A log that outgrows its limit loses its beginning: then only later bytes are printed.
        if len(content) > self._shown:
            typer.echo(plain_lines(self._cut(content[self._shown :]).decode("utf-8", "replace")), nl=False)
        self._shown = len(content)

    def _cut(self, content: bytes) -> bytes:
        lines, self._lines = self._lines, None
        if lines is None:
            return content
        return b"".join(content.splitlines(keepends=True)[-lines:]) if lines else b""


def follow(tail: Tail, options: Options, seconds: float) -> None:
    """Print the log as it grows, until the slot has ended or Ctrl-C."""
    ask_at = 0.0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            ended = ""
            if time.monotonic() >= ask_at:
                ended, ask_at = _end_of(options, tail.slot), time.monotonic() + ASK_EVERY_SECONDS
            tail.show()
            if ended:
                warn(f"{tail.slot}: {ended}")
                return
            time.sleep(seconds)


def _end_of(options: Options, slot: str) -> str:
    """How the slot ended; empty if it goes on, or its state cannot be read."""
    from tpucare.service import status

    try:
        rows = status.status(options, slot)["slots"]
    except (TpuCareError, OSError):
        return ""
    row = next((row for row in rows if row["slot"] == slot), None)
    if row is None or row["phase"] not in ENDS:
        return ""
    return f"{row['phase']}: {row['end_why']}" if row["end_why"] else str(row["phase"])
