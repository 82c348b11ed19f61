"""
Requests to a run while it trains: notices of preemption and maintenance, and SIGTERM.

The runner on the worker writes the notices; saving and stopping are left to the training loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import IntEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

from .processes import from_all_processes
from .saves import Saves

TERMINATED = 128 + signal.SIGTERM

T = TypeVar("T", bound="Requests")

# Google gives a preempted VM 30 s; the checkpoint comes first, W&B gets the rest.
FINISH_SECONDS = 10.0


@dataclass(frozen=True)
class Notice:
    """The last line of the notice file. `at`: UTC; None if it cannot be read."""

    at: datetime | None
    text: str

    @property
    def preempted(self) -> bool:
        """True: the cloud takes this machine back in about 30 s. False: save, since an interruption may come."""
        return self.text.startswith("preempted")


def notice(environ: Mapping[str, str] | None = None) -> Notice | None:
    """
    The newest notice of preemption or maintenance to this run; None if there is none.

    Cheap enough for every step (one `stat` without a notice). A notice stays; to save once for each, use `Requests`.
    Source: the file TPUCARE_NOTICE; the runner appends to it on news from the metadata server.
    """
    path = (os.environ if environ is None else environ).get("TPUCARE_NOTICE", "")
    if not path or not os.path.exists(path):
        return None
    lines = Path(path).read_text(errors="replace").splitlines()
    if not lines:
        return Notice(None, "")
    stamp, _, text = lines[-1].partition(" ")
    try:
        return Notice(datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc), text)
    except ValueError:
        return Notice(None, lines[-1])


class Wish(IntEnum):
    """The request to the run; of several processes the largest one counts."""

    NONE = 0
    SAVE = 1
    SAVE_AND_STOP = 2


class Requests:
    """
    Watches for SIGTERM and notices inside its `with` block, and returns them to the training loop as a `Wish`.

    Enter it after `jax.distributed.initialize`, which installs a SIGTERM handler that swallows the signal.

        with Requests(wandb=run) as requests:
            for step in range(first, last + 1):
                ...
                wish = requests.look()
                if wish or step % save_every == 0:
                    save(step)
                if wish is Wish.SAVE_AND_STOP:
                    requests.stop()

    saves: a `Saves`; the wish is then SAVE also when its interval is over, so that one question decides on a step
    """

    def __init__(
        self, wandb: Any = None, *, saves: Saves | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._wandb, self._saves = wandb, saves
        self._notice = (os.environ if environ is None else environ).get("TPUCARE_NOTICE", "")
        self._terminated = False
        self._marked = False
        self._seen = 0
        self._before: Any = None

    def __enter__(self: T) -> T:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Requests handles a signal: enter it in the main thread")
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def look(self) -> Wish:
        """
        The wish now: SAVE once for each notice, and when `saves` says so; SAVE_AND_STOP from SIGTERM on.

        A collective of all processes: all have to call it after the same step, and all get the same answer, since a
        save needs all of them.
        """
        own = self._own_wish()
        wish = Wish(max(from_all_processes(own)))
        if wish and self._saves is not None:
            self._saves.restart()
        if wish is Wish.SAVE_AND_STOP:
            self._mark()
        return wish

    def stop(self, status: int = TERMINATED) -> NoReturn:
        """
        Exit with a non-zero *status*, which tells W&B and tpucare that the work is not done. Save before.

        A run of W&B is finished first, for at most 10 s: its unsent rest is lost with the host.
        """
        self._mark()
        if self._wandb is not None and not _finish(self._wandb, status):
            # At an ordinary exit the client would wait for its server, and the host has no time left.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        sys.exit(status)

    def _own_wish(self) -> Wish:
        if self._terminated:
            return Wish.SAVE_AND_STOP
        written = self._written()
        if written == self._seen:
            return Wish.SAVE if self._saves is not None and self._saves.is_due_here() else Wish.NONE
        self._seen = written
        return Wish.SAVE if written else Wish.NONE

    def _written(self) -> int:
        """Time of the notice file's last change in nanoseconds; 0 without a file."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self._notice).st_mtime_ns if self._notice else 0
        return 0

    def _mark(self) -> None:
        if self._wandb is not None and not self._marked:
            self._marked = True
            self._wandb.mark_preempting()

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        # Only a flag: the signal may have come while the W&B client holds one of its locks.
        self._terminated = True


def _finish(run: Any, status: int) -> bool:
    """True if W&B accepted the end of the run in time."""
    finishing = threading.Thread(target=lambda: run.finish(exit_code=status), daemon=True)
    finishing.start()
    finishing.join(FINISH_SECONDS)
    return not finishing.is_alive()
