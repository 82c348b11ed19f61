"""A state folder, a fleet file, and the real daemon on them in a process of its own, looked at from outside."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.cloud_process import KIND, PROJECT, RUNTIME, ZONE
from tests.bench.meter import Use, use_of
from tpucare.adapters.ssh.keys import load_or_make_key
from tpucare.adapters.state.store import open_store
from tpucare.adapters.system import SystemClock, machine_id

FLEET = "bench"
_FLEET = """\
name: {fleet}
count: {count}
project: {project}
tpu: {{type: {kind}, zones: [{zone}], provisioning: spot, runtime: {runtime}}}
job:
  run: |
    {run}
{job}"""


class Installation:
    """State folder below *folder*; `owner` and `key` (our public key) are made with it."""

    def __init__(self, folder: Path) -> None:
        self.state, self.fleets, self.log = folder / "state", folder / "fleets", folder / "daemon.log"
        self.fleets.mkdir(parents=True)
        with closing(open_store(self.state, machine_id=machine_id(), now=SystemClock().now())) as store:
            self.owner = store.owner
        self.key = load_or_make_key(self.state / "ssh" / "id_ed25519").public

    def declare(
        self,
        count: int,
        *,
        kind: str = KIND,
        zone: str = ZONE,
        run: str = "python3 train.py",
        job: Mapping[str, str] | None = None,
    ) -> None:
        """*run*: one line of shell. *job*: more keys of that section."""
        more = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in (job or {}).items())
        names = {"fleet": FLEET, "project": PROJECT, "runtime": RUNTIME}
        text = _FLEET.format(count=count, kind=kind, zone=zone, run=run, job=more, **names)
        (self.fleets / f"{FLEET}.yaml").write_text(text, encoding="utf-8")

    @property
    def remembered(self) -> bytes:
        """The memory of all slots, as it stands in the store."""
        path = next(self.state.glob("*.sqlite*"))
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            return "".join(row[0] for row in connection.execute("SELECT memory FROM slots")).encode()

    @property
    def remembered_bytes(self) -> int:
        return len(self.remembered)

    def environment(self, endpoint: str, port: int, **more: object) -> dict[str, str]:
        said = {
            "TPUCARE_STATE": self.state,
            "TPUCARE_ENDPOINT": endpoint,
            "TPUCARE_SSH_PORT": port,
            "TPUCARE_SSH_USER": "tpucare",
            **more,
        }
        return {**os.environ, **{name: str(value) for name, value in said.items()}}


class Daemon:
    """`tpucare daemon` on a installation, from start to end; a context manager."""

    def __init__(self, installation: Installation, env: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tpucare.cli", "daemon", "--fleets", str(installation.fleets), "--log", "json"]
        with installation.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)

    def use(self) -> Use:
        assert self._process.poll() is None, "the daemon ended"
        return use_of(self.pid)
