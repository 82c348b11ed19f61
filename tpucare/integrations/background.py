"""The thread of a companion: for requests that may take long, beside the loop of the daemon, which never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """
    A thread that runs *run*, from the first `start` until *run* sees `closing`.

    changed: guards all that the two threads share; notified by whoever changes it
    """

    def __init__(self, run: Callable[[], None], *, name: str) -> None:
        self.changed = threading.Condition()
        self.closing = False
        self._run, self._name = run, name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """To be called with `changed` held; a second call changes nothing."""
        if self._thread is None:
            # A daemon thread: waiting for an answer, it must not prevent the end of the process.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self, seconds: float = 1.0) -> None:
        """End the thread; wait at most *seconds* for what is under way."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
