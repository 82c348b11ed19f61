"""
An outside witness of what runs: it looks at processes, asks nobody, and writes what it sees into the audit log.

A run is what carries its token in the environment; so two runs of one slot at the same time cannot hide from the
checker, whoever started them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tpucare.testbed.emulator.world.records import NodeRecord

LOOK_EVERY_SECONDS = 0.25

Seen = frozenset[tuple[str, str, int]]


class Witness:
    """
    Looks from `start` to `stop` on a thread of its own.

    nodes: the world's nodes now    note: `EmulatorServer.log_note`
    below: the processes to look at, for example those of the emulated machines; None = all of this machine
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
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """One last look, then no more."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_SECONDS):
            self.scan()
        self.scan()

    def scan(self) -> None:
        """Note what began and what ended since the last look; ends first, as they came first."""
        self._names.update({record.path.node_id: record.name for record in self._nodes()})
        seen = frozenset(run for run in map(run_of, self._pids()) if run is not None and run[1] in self._names)
        for event, runs in (("run-ended", self._seen - seen), ("run-started", seen - self._seen)):
            for token, node, worker in sorted(runs):
                self._note(event, token=token, name=self._names[node], worker=worker)
        self._seen = seen


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def run_of(pid: int) -> tuple[str, str, int] | None:
    """Token, node and worker that a process carries in its environment, or None."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if b"TPUCARE_RUN=" not in raw or b"TPUEMU_" not in raw:
        return None
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0"))
    words = {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
    worker = words.get("TPUCARE_WORKER", "")
    if not words.get("TPUCARE_NODE") or not worker.isdigit():
        return None
    return words["TPUCARE_RUN"], words["TPUCARE_NODE"], int(worker)
