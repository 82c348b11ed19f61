"""
Process trees, read from `/proc`: finds descendants and marked processes, and stops or ends all of them.

Also a program: `python proctree.py COMMAND…` supervises COMMAND as the subreaper of everything that it starts, so that
no daemon can leave the tree; `sandbox` uses it where the kernel refuses a pid namespace. Therefore this file imports
only the standard library and can be run by its path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ProcessEntry(NamedTuple):
    """One line of the process table. `started` (clock ticks since boot) tells two users of one pid apart."""

    pid: int
    parent: int
    state: str
    started: int
    name: str

    @property
    def is_dead(self) -> bool:
        """Zombies are dead: in a container, pid 1 may never reap those that it inherits."""
        return self.state in "ZX"


def process_table() -> dict[int, ProcessEntry]:
    """Every process of this pid namespace and of those below it, by pid."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read_process(int(entry))):
            table[process.pid] = process
    return table


def read_process(pid: int) -> ProcessEntry | None:
    """One process, or None when there is none of that pid (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself, so the last one ends it.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessEntry(pid, int(fields[1]), fields[0], int(fields[19]), name)


def descendants(table: Mapping[int, ProcessEntry], roots: Iterable[int]) -> list[ProcessEntry]:
    """All living descendants of *roots*, without the roots; parents before children."""
    children: dict[int, list[ProcessEntry]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    found: list[ProcessEntry] = []
    queue = list(roots)
    while queue:
        below = children.get(queue.pop(), ())
        found += [process for process in below if not process.is_dead]
        queue += [process.pid for process in below]
    return found


def marks(variable: str) -> dict[ProcessEntry, str]:
    """
    All living processes that were started with *variable* in their environment, and its value.

    Environments of other users' processes cannot be read, nor those of processes that made themselves undumpable.
    """
    wanted = f"{variable}=".encode()
    found = {}
    for entry in os.listdir("/proc"):
        value = _environment_value(entry, wanted) if entry.isdigit() else None
        if value is not None and (process := read_process(int(entry))) and not process.is_dead:
            found[process] = value
    return found


def _environment_value(pid: str, wanted: bytes) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return None
    if wanted not in environment:
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(wanted):
            return entry.removeprefix(wanted).decode(errors="replace")
    return None


def send(process: ProcessEntry, signal_number: int) -> None:
    """Signal exactly this process: one that ended, or a later user of its pid, is left alone."""
    now = read_process(process.pid)
    if now is not None and now.started == process.started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal_number)


def stop_all(find: Callable[[], Iterable[ProcessEntry]]) -> list[ProcessEntry]:
    """
    SIGSTOP the processes that *find* returns, until a pass finds no new one. Returns those that were running.

    One pass is not enough: a process may fork between being listed and being stopped.
    """
    seen: set[tuple[int, int]] = set()
    stopped: list[ProcessEntry] = []
    while fresh := [process for process in find() if (process.pid, process.started) not in seen]:
        for process in fresh:
            send(process, signal.SIGSTOP)
            seen.add((process.pid, process.started))
        stopped += [process for process in fresh if process.state not in "Tt"]
    return stopped


def kill_all(find: Callable[[], Iterable[ProcessEntry]], timeout_seconds: float = 10.0) -> list[ProcessEntry]:
    """Stop and SIGKILL the processes that *find* returns until there are none. Returns those left at the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while found := list(find()):
        if time.monotonic() > deadline:
            return found
        # Stopped first: a process that forks faster than it is killed would otherwise survive.
        for process in {*found, *stop_all(find)}:
            send(process, signal.SIGKILL)
        time.sleep(0.002)
    return []


def supervise(command: list[str]) -> int:
    """Run *command* as the subreaper of its descendants; at its end, or at SIGTERM, end all of them."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getppid()
    # Waited for rather than handled: an exception raised by a second SIGTERM would leave everything running.
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) or prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        return 71
    if os.getppid() != parent:
        return 0
    first = os.posix_spawn(command[0], command, os.environ, setsigmask=[])
    while first not in _reap()[0] and signal.sigwait(awaited) != signal.SIGTERM:
        pass
    while kill_all(_living_children) or _reap()[1]:
        pass
    return 0


def _living_children() -> list[ProcessEntry]:
    _reap()
    return descendants(process_table(), [os.getpid()])


def _reap() -> tuple[set[int], bool]:
    """Reap dead children: their pids, and whether any child is left."""
    dead: set[int] = set()
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            dead.add(pid)
    except ChildProcessError:
        return dead, False
    return dead, True


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
