"""`tpucare logs`: what jobs printed, from the state folder alone; who ended is asked of the daemon, or of the store."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import typer

from tpucare.adapters.runner.logs import LogKeeper
from tpucare.cli.common import Failure, warn
from tpucare.cli.render import refuse_unknown
from tpucare.model.errors import TpuCareError
from tpucare.model.text import length, plain, plain_lines
from tpucare.service.options import Options

# Of a slot that has ended: its last lines are brought before its end is written down.
ENDS = ("done", "failed", "down")
ASK_EVERY_SECONDS = 3.0
NOTHING = "it has not printed anything yet, or prints into a session of its own (`screen -ls` on the worker)"
_RUN = re.compile(rb"^--- run (\S+) ---$", re.M)


def log_keeper(options: Options, word: str) -> tuple[LogKeeper, str]:
    """
    The kept logs, and the slot that *word* means: itself, or slot 0 of that fleet.

    Raises: Failure: no fleet or slot is called so, and nothing is kept of one.
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
        # Without a store there may be logs still, and nothing to choose from.
        return {"slots": [], "fleets": []}
    return {"slots": [row["slot"] for row in answer["slots"]], "fleets": [row["fleet"] for row in answer["fleets"]]}


def kept(keeper: LogKeeper, slot: str) -> Iterator[str]:
    """A line for each attempt of which something is kept: node, runs, workers, age of the newest line."""
    now = datetime.now(UTC).timestamp()
    found = keeper.attempts(slot)
    for attempt, workers in found.items():
        tokens = [token.decode("utf-8", "replace") for token in _RUN.findall(keeper.read(slot, attempt, workers[0]))]
        nodes = ", ".join(dict.fromkeys(token.rpartition(".")[0] for token in tokens)) or "?"
        age = length(max(0.0, now - keeper.written_at(slot, attempt)))
        runs = f"{len(tokens)} run{'s' if len(tokens) != 1 else ''}"
        yield plain(f"attempt {attempt}: {nodes}, {runs}, {_workers(workers)}, last line {age} ago")
    if not found:
        yield f"{slot}: nothing is kept; {NOTHING}"


def refuse_unkept(keeper: LogKeeper, slot: str, attempt: int | None, worker: int) -> None:
    """Raises: Failure: nothing is kept of that; what is kept instead is said."""
    found = keeper.attempts(slot)
    if not found:
        raise Failure(f"no log of {slot}; {NOTHING}")
    if attempt is not None and attempt not in found:
        raise Failure(f"no log of {slot}, attempt {attempt}; kept are {', '.join(map(str, found))}")
    chosen = attempt or max(found)
    if worker not in found[chosen]:
        raise Failure(f"no log of worker {worker} of {slot}, attempt {chosen}; kept: {_workers(found[chosen])}")


def _workers(numbers: tuple[int, ...]) -> str:
    is_row = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    named = f"{numbers[0]} to {numbers[-1]}" if is_row else ", ".join(map(str, numbers))
    return f"worker{'s' if len(numbers) > 1 else ''} {named}"


class Tail:
    """The log of one worker as it grows; with no attempt named, that of the newest one."""

    def __init__(self, keeper: LogKeeper, slot: str, attempt: int | None, worker: int, lines: int | None) -> None:
        """lines: of what is there at first only the last ones; None: all"""
        self.slot = slot
        self._keeper, self._attempt, self._worker, self._lines = keeper, attempt, worker, lines
        self._current, self._shown = -1, 0

    def show(self) -> None:
        """Print what is new since the last call."""
        newest = self._attempt or max(self._keeper.attempts(self.slot), default=self._current)
        if newest != self._current:
            self._current, self._shown = newest, 0
        content = self._keeper.read(self.slot, newest, self._worker) if newest >= 0 else b""
        # The beginning is dropped when a log outgrows its bound: then only what is new can be told from here on.
        if len(content) > self._shown:
            typer.echo(plain_lines(self._cut(content[self._shown :]).decode("utf-8", "replace")), nl=False)
        self._shown = len(content)

    def _cut(self, content: bytes) -> bytes:
        lines, self._lines = self._lines, None
        if lines is None:
            return content
        return b"".join(content.splitlines(keepends=True)[-lines:]) if lines else b""


def follow(tail: Tail, options: Options, seconds: float) -> None:
    """Until the slot has ended, or Ctrl-C."""
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
    """How the slot ended; empty while it goes on, or where nobody knows."""
    from tpucare.service import status

    try:
        rows = status.status(options, slot)["slots"]
    except (TpuCareError, OSError):
        return ""
    row = next((row for row in rows if row["slot"] == slot), None)
    if row is None or row["phase"] not in ENDS:
        return ""
    return f"{row['phase']}: {row['end_why']}" if row["end_why"] else str(row["phase"])
