"""
Holds all processes of one worker together, so that a preemption ends every one of them at the same instant.

A pid namespace is the best sandbox: the kernel ends all its processes when the first one is killed. It is plain as
root, else inside a user namespace. Where the kernel refuses namespaces (default Docker, some distributions) a subreaper
holds the tree. `choose` tries which works here. Measured: 256 idle workers end within 0.1 s in namespaces, 2 s under
subreapers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from tpucare.model.errors import TpuCareError
from tpucare.testbed.emulator.machines import own_files, proctree
from tpucare.testbed.emulator.machines.proctree import ProcessEntry

_WITH_MOUNTS = 'mount --all --fstab "$0" && exec "$@"'


class MachineError(TpuCareError):
    """A worker, or all emulated machines, cannot be started or ended here; the text says why."""


class Sandbox(StrEnum):
    """The kinds of sandbox, best first. SUBREAPER has no process table and none of `own_files` for itself."""

    PID_NAMESPACE = "pid-namespace"
    USER_NAMESPACE = "user-namespace"
    SUBREAPER = "subreaper"

    @property
    def mounts(self) -> bool:
        """Whether a worker has a mount namespace, with `own_files` in it."""
        return self is not Sandbox.SUBREAPER


def choose(scratch: Path) -> Sandbox:
    """The best kind that works here, by trial. *scratch* is an empty folder for files that stay there."""
    scratch.mkdir(exist_ok=True)
    # As root, sshd inside a user namespace dies at "setgroups: Operation not permitted".
    kind = Sandbox.PID_NAMESPACE if os.geteuid() == 0 else Sandbox.USER_NAMESPACE
    own_files.write(
        scratch, boot_id="probe", chips=1, metadata_address="127.0.0.1", one_group=kind is Sandbox.USER_NAMESPACE
    )
    try:
        tried = subprocess.run(
            command(kind, ["/bin/cat", own_files.BOOT_ID], own_files.mount_table(scratch)),
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Sandbox.SUBREAPER
    return kind if tried.returncode == 0 and tried.stdout == b"probe\n" else Sandbox.SUBREAPER


def command(kind: Sandbox, program: Sequence[str], mount_table: Path) -> list[str]:
    """*program* (absolute path first) inside a sandbox, so that it and all its descendants can be ended at once."""
    if not kind.mounts:
        return [sys.executable, "-I", "-S", proctree.__file__, *program]
    # The namespace must not outlive the emulator, nor the wrapper the thread that started it.
    wrapper = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if kind is Sandbox.PID_NAMESPACE:
        return [*wrapper, "--", "/bin/sh", "-c", _WITH_MOUNTS, str(mount_table), *program]
    # Capabilities are kept for the mounts, and dropped before the worker's first process.
    wrapper += ["--user", "--map-current-user", "--keep-caps", "--", "/bin/sh", "-c", _WITH_MOUNTS, str(mount_table)]
    return [*wrapper, "setpriv", "--inh-caps=-all", "--ambient-caps=-all", "--", *program]


class Cage:
    """
    A running sandbox: the wrapper (outside, our child) and the worker's processes below it.

    Start it on a thread that lives as long as the machines: the parent-death signal fires when the *thread* ends.
    """

    def __init__(
        self, kind: Sandbox, program: Sequence[str], *, mount_table: Path, env: Mapping[str, str], log: BinaryIO
    ) -> None:
        """Raises: MachineError: the wrapper's own program is missing."""
        self._kind = kind
        self._first: ProcessEntry | None = None
        try:
            self._wrapper = subprocess.Popen(
                command(kind, program, mount_table),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"cannot start a worker: {error}") from error

    @property
    def pid(self) -> int:
        """The wrapper's pid."""
        return self._wrapper.pid

    def has_ended(self) -> bool:
        return self._wrapper.poll() is not None

    def first_process(self) -> ProcessEntry | None:
        """The worker's first process (sshd), once there is one."""
        if self._first is None:
            self._first = next(filter(None, map(proctree.read_process, _children(self.pid))), None)
        return self._first

    def begin_end(self) -> None:
        """Begin to end everything, without waiting."""
        if self.has_ended():
            return
        if self._kind is Sandbox.SUBREAPER:
            self._wrapper.terminate()
            return
        for pid in _children(self.pid):
            # The first process, not the wrapper: the wrapper then reaps it and ends by itself.
            _kill(pid)

    def await_end(self, timeout_seconds: float) -> None:
        """Wait until the wrapper ends, as it does after everything inside; at most *timeout_seconds*."""
        deadline = time.monotonic() + timeout_seconds
        while not self._ended_within(0.05) and time.monotonic() < deadline:
            self._end_unforked()

    def remove(self) -> None:
        """Kill the wrapper if it still runs, and reap it."""
        self._wrapper.kill()
        self._wrapper.wait()

    def living(self, table: Mapping[int, ProcessEntry]) -> list[ProcessEntry]:
        """
        All processes inside, by a reading of the process table; sshd first.

        It works after the end of the wrapper too: sshd overwrites its own environment, so its mark cannot be found.
        """
        # A reaped pid may belong to another process by now.
        roots = [] if self.has_ended() else [self.pid]
        first = table.get(self._first.pid) if self._first else None
        if first is None or self._first is None or first.started != self._first.started:
            return proctree.descendants(table, roots)
        below = proctree.descendants(table, {*roots, first.pid})
        return list(dict.fromkeys(process for process in (first, *below) if not process.is_dead))

    def _end_unforked(self) -> None:
        """End a namespace whose end began before it had a first process."""
        if self._kind is not Sandbox.SUBREAPER:
            self.begin_end()
            if not _children(self.pid):
                self._wrapper.kill()

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._wrapper.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def living(cages: Iterable[Cage]) -> list[ProcessEntry]:
    """All processes inside *cages*; one reading of the process table for all."""
    table = proctree.process_table()
    return [process for cage in cages for process in cage.living(table)]


def end(cages: Sequence[Cage], timeout_seconds: float = 10.0) -> None:
    """
    End *cages* together, and check that no process is left in them.

    Raises: MachineError: a process survives SIGKILL.
    """
    for cage in cages:
        cage.begin_end()
    for cage in cages:
        cage.await_end(timeout_seconds / 2)
    left = proctree.kill_all(lambda: living(cages), timeout_seconds)
    for cage in cages:
        cage.remove()
    if left:
        raise MachineError(f"processes survive SIGKILL: {sorted(process.pid for process in left)}")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return [process.pid for process in proctree.process_table().values() if process.parent == pid]
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
