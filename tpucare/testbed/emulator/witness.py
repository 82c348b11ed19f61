"""
An independent observer of runs: it reads the process table and logs the runs that it finds in the audit log.

A process belongs to a run if the run's token is in its environment. Two runs of one slot at the same time therefore
reach the audit whichever program started them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tpucare.testbed.emulator.world.records import NodeRecord

SCAN_EVERY_SECONDS = 0.25

Seen = frozenset[tuple[str, str, int]]


class Witness:
    """
    Scans from `start` to `stop` on a thread of its own.

    nodes: the world's nodes now    note: `EmulatorServer.log_note`
    pids:  the processes to scan, for example those of the emulated machines; None = all of this machine
    """

    def __init__(
        self,
        nodes: Callable[[], list[NodeRecord]],
        note: Callable[..., None],
        pids: Callable[[], list[int]] | None = None,
    ) -> None:
        self._nodes = nodes
        self._note = note
        self._pids = pids or _all_pids
        self._seen: Seen = frozenset()
        self._names: dict[str, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._scan_until_stopped, name="witness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Scan once more, and end the thread."""
        self._stopping.set()
        self._thread.join()

    def _scan_until_stopped(self) -> None:
        while not self._stopping.wait(SCAN_EVERY_SECONDS):
            self.scan()
        self.scan()

    def scan(self) -> None:
        """Log the runs that ended and those that began since the last scan; ends first, because they came first."""
        self._names.update({record.path.node_id: record.name for record in self._nodes()})
        seen = frozenset(run for run in map(run_of, self._pids()) if run is not None and run[1] in self._names)
        for event, runs in (("run-ended", self._seen - seen), ("run-started", seen - self._seen)):
            for token, node, worker in sorted(runs):
                self._note(event, token=token, name=self._names[node], worker=worker)
        self._seen = seen


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def run_of(pid: int) -> tuple[str, str, int] | None:
    """Token, node and worker in the environment of a process, or None."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if b"TPUCARE_RUN=" not in raw or b"TPUEMU_" not in raw:
        return None
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0"))
    env = {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
    worker = env.get("TPUCARE_WORKER", "")
    if not env.get("TPUCARE_NODE") or not worker.isdigit():
        return None
    return env["TPUCARE_RUN"], env["TPUCARE_NODE"], int(worker)
