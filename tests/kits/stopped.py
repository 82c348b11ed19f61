"""
Processes that are stopped (SIGSTOP) or killed at every line that they come to in the code under test.

A forked child counts the lines that it executes in the files that are named, and stops itself at the n-th; the test
looks at what others can do meanwhile, and lets the child go on. Then the next child is stopped one line later.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tpucare

PACKAGE = Path(tpucare.__file__).parent


class Stopped:
    """A child that stands still at one line."""

    def __init__(self, pid: int, line: int) -> None:
        self.pid, self.line = pid, line
        self._is_there = True

    def go_on(self) -> None:
        """Let it go on to its end, which has to be a good one."""
        os.kill(self.pid, signal.SIGCONT)
        self._reap(expected=0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._reap(expected=-signal.SIGKILL)

    def _reap(self, expected: int | None) -> None:
        if self._is_there:
            self._is_there = False
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            assert expected is None or status == expected, f"stopped at line {self.line} it ended with {status}"

    def close(self) -> None:
        if self._is_there:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(expected=None)


def stopped_at_each_line(act: Callable[[], object], *files: str, step: int = 1) -> Iterator[Stopped]:
    """
    *act* in a child that is stopped at the first line in *files* (paths below the package), then in another one that is
    stopped *step* lines later, and so on until a child comes to its end.
    """
    count = 1
    while (child := _stopped_at(count, act, tuple(str(PACKAGE / file) for file in files))) is not None:
        try:
            yield child
        finally:
            child.close()
        count += step
    assert count > step, "no line of these files was executed"


def _stopped_at(count: int, act: Callable[[], object], files: tuple[str, ...]) -> Stopped | None:
    pid = os.fork()
    if not pid:
        _run(count, act, files)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return Stopped(pid, count)
    assert os.waitstatus_to_exitcode(status) == 0
    return None


def _run(count: int, act: Callable[[], object], files: tuple[str, ...]) -> None:
    left = count

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
        return trace

    status = 1
    try:
        sys.settrace(trace)
        act()
        sys.settrace(None)
        status = 0
    except BaseException:
        sys.settrace(None)
        traceback.print_exc()
    finally:
        os._exit(status)
