"""Signals of a process that runs an engine: handled for a while, with the earlier handlers restored after it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType


@contextlib.contextmanager
def handle_signals(handlers: Mapping[int, Callable[[int], object]], *, keep_ignored: bool = False) -> Iterator[bool]:
    """
    Within it each signal calls its handler. Yields False where that is impossible: outside of the main thread.

    keep_ignored: signals that this process was started to ignore stay ignored: SIGHUP under nohup, SIGINT in the
    background of a shell.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        handlers[number](number)

    wanted = [n for n in handlers if not (keep_ignored and signal.getsignal(n) is signal.SIG_IGN)]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield True
    finally:
        for number, handler in before.items():
            # None: C code installed it, and Python cannot restore it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
