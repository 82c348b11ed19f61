"""
Reads the daemon's store, as `tpucare events` does, and the logs that it keeps. Read-only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tpucare.adapters.runner.logs import LogKeeper
from tpucare.adapters.state.store import SqliteReader, open_reader
from tpucare.model.errors import StoreError
from tpucare.model.memory import Memory
from tpucare.testbed.demo.setup import SLOT, Stage
from tpucare.testbed.demo.timeline import Life, Told, read_life


@dataclass(slots=True)
class DaemonReader:
    """Events and memory so far; `refresh` brings them up to date."""

    stage: Stage
    events: list[Told] = field(default_factory=list)
    memory: Memory | None = None
    tokens: list[str] = field(default_factory=list)
    _last: int = 0
    _reader: SqliteReader | None = None

    def refresh(self) -> list[Told]:
        """New events; none until the daemon has made its store."""
        if self._reader is None and not self._open():
            return []
        assert self._reader is not None
        self._reader.refresh()
        self.memory = self._reader.memories().get(SLOT)
        new = []
        for number, event in self._reader.events(after=self._last):
            self._last = number
            new.append(Told(event.at, event.kind, event.node, event.text, event.fields))
        self.events += new
        if self.memory is not None and self.memory.run is not None and self.memory.run.token not in self.tokens:
            self.tokens.append(self.memory.run.token)
        return new

    def _open(self) -> bool:
        try:
            self._reader = open_reader(self.stage.state)
        except StoreError:
            return False
        return True

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def current(self) -> Life | None:
        """The run that was launched last, by the log that the daemon keeps."""
        memory = self.memory
        if memory is None or memory.run is None:
            return None
        log = LogKeeper(self.stage.state / "logs").read(SLOT, memory.attempts)
        return read_life(memory.run.token, log.decode(errors="replace"), self.stage.options.save_every)

    def lives(self) -> list[Life]:
        """Every run, by the log on its worker 0, which has steps that the daemon never read."""
        return [read_life(token, self._log_on_worker(token), self.stage.options.save_every) for token in self.tokens]

    def _log_on_worker(self, token: str) -> str:
        folders = [path for path in Path(self.stage.emulator).rglob(token) if path.is_dir()]
        logs = [(folder / "log").read_text(errors="replace") for folder in folders if (folder / "log").is_file()]
        # Only process 0 of the training logs steps.
        return max(logs, key=lambda text: text.count("\nstep "), default="")
