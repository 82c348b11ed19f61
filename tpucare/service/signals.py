"""Signals of a process that cares: caught for a while, and what was before them put back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType


@contextlib.contextmanager
def caught(handlers: Mapping[int, Callable[[int], object]], *, spare_ignored: bool = False) -> Iterator[bool]:
    """
    Within it each signal calls its handler. Yields whether that could be: only the main thread may ask for it.

    spare_ignored: a signal that this process was started to ignore stays so: SIGHUP under nohup, SIGINT in a shell's
    background.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        handlers[number](number)

    wanted = [n for n in handlers if not (spare_ignored and signal.getsignal(n) is signal.SIG_IGN)]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield True
    finally:
        for number, handler in before.items():
            # None: it was installed by C code, and nobody can put it back from here.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
