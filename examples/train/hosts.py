"""
One host of the slice: its identity, joining the other hosts, and requests to save or stop.

tpucare sets TPUCARE_* variables on each host; without them this is a single host, so the training also runs
by hand. Imports of JAX stay inside the functions, because JAX reads its environment at import.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from statistics import median
from types import FrameType

# The others notice a silent host after this long (JAX's default is 100 s).
HEARTBEAT_TIMEOUT_SECONDS = 10

# All hosts start together. A host that has not joined after this long is dead (JAX's default is 300 s).
JOIN_TIMEOUT_SECONDS = 60

# Between two saves while tpucare advises nothing.
UNADVISED_INTERVAL_SECONDS = 600.0

# XLA's order of additions depends on its threads. Both flags together give the same bits on every machine of one kind,
# and prevent several hosts on one small machine from competing for its cores.
CPU_XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Wish(IntEnum):
    """A request from outside; the largest wish of any host applies to all."""

    NONE = 0
    SAVE = 1
    SAVE_AND_STOP = 2


@dataclass(frozen=True)
class Host:
    """One process of the training, one per worker of the slice."""

    index: int
    count: int
    coordinator: str
    checkpoint: str
    notice: Path | None
    cadence: Path | None
    on_cpu: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Host:
        notice, cadence = environ.get("TPUCARE_NOTICE", ""), environ.get("TPUCARE_CADENCE", "")
        return cls(
            index=int(environ.get("TPUCARE_WORKER", "0")),
            count=int(environ.get("TPUCARE_WORKERS", "1")),
            coordinator=environ.get("TPUCARE_COORDINATOR", ""),
            checkpoint=environ.get("TPUCARE_CHECKPOINT", "checkpoints"),
            notice=Path(notice) if notice else None,
            cadence=Path(cadence) if cadence else None,
            on_cpu=environ.get("JAX_PLATFORMS") == "cpu" or environ.get("TPUCARE_DEMO_CPU", "0") not in ("", "0"),
        )


def prepare_jax(host: Host, environ: MutableMapping[str, str]) -> None:
    """Set the variables that JAX and XLA read at import; call it before the first import of JAX."""
    # With the compilation cache beside the checkpoints, a new node reaches its first step in about a second.
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # In a bucket, tensorstore writes without gcsfs's knowledge. From a listing kept by gcsfs, orbax would conclude on
    # a resume that the folder it saves to does not exist ("Checkpoint directory does not exist").
    environ.setdefault("FSSPEC_GCS", '{"use_listings_cache": false}')
    if host.on_cpu:
        environ["JAX_PLATFORMS"] = "cpu"
        environ["XLA_FLAGS"] = CPU_XLA_FLAGS


def join(host: Host) -> None:
    """Connect this process with those on the other hosts; returns when all have joined."""
    import jax

    if host.count == 1:
        return
    if not host.on_cpu:
        jax.distributed.initialize()  # a TPU VM knows its slice
        return
    _require_resolvable_hostname()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        host.coordinator,
        host.count,
        host.index,
        coordinator_bind_address=host.coordinator,
        initialization_timeout=JOIN_TIMEOUT_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
    )


def leave(host: Host) -> None:
    """Leave the other hosts in order: a sudden exit of the coordinator would abort those that still work."""
    import jax
    from jax.experimental import multihost_utils

    if host.count > 1:
        multihost_utils.sync_global_devices("training ended")
        jax.distributed.shutdown()


def agree(host: Host, wish: Wish) -> Wish:
    """The largest wish of all hosts. All must call it at the same step, since a save needs every host."""
    return Wish(max(_from_all_hosts(host, wish)))


def agree_on_step(host: Host, step: int) -> int:
    """The step of host 0: two hosts may list a shared folder at different moments."""
    return _from_all_hosts(host, step)[0]


def _from_all_hosts(host: Host, number: int) -> list[int]:
    import numpy as np
    from jax.experimental import multihost_utils

    if host.count == 1:
        return [number]
    return [int(each) for each in multihost_utils.process_allgather(np.int32(number)).ravel()]


@dataclass
class Requests:
    """Watches for SIGTERM and the notice file, and returns the current wish at each step."""

    notice: Path | None
    _terminated: bool = False
    _seen_notice: int = field(default=0)

    def listen(self) -> None:
        """Call it after `join`: jax.distributed installs its own SIGTERM handler, which swallows the signal."""
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def wish(self) -> Wish:
        """A notice counts once; a changed file (another event) counts again."""
        if self._terminated:
            return Wish.SAVE_AND_STOP
        written = self._notice_written()
        if written == self._seen_notice:
            return Wish.NONE
        self._seen_notice = written
        return Wish.SAVE if written else Wish.NONE

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def _notice_written(self) -> int:
        """Time of the notice file's last change in nanoseconds; 0 if there is none."""
        try:
            return os.stat(self.notice).st_mtime_ns if self.notice else 0
        except FileNotFoundError:
            return 0


@dataclass
class Cadence:
    """
    Asks for a save after the interval that tpucare advises in a file, and tells tpucare beside it what a save costs.

    This host's wish alone: `agree` makes it that of all hosts, whose clocks differ.
    """

    file: Path | None
    interval_seconds: float = UNADVISED_INTERVAL_SECONDS
    _read_at: int = 0
    _last: float = field(default_factory=time.monotonic)
    _costs: list[float] = field(default_factory=list)

    def wish(self) -> Wish:
        self._read()
        return Wish.SAVE if time.monotonic() - self._last >= self.interval_seconds else Wish.NONE

    def saved(self, began: float) -> None:
        """A save that began at *began* (monotonic) no longer blocks the training."""
        self._last = time.monotonic()
        self._costs = [*self._costs[-19:], self._last - began]
        if self.file is None:
            return
        beside = self.file.with_name("saves")
        try:
            beside.with_name("saves.new").write_text(json.dumps({"save_seconds": round(median(self._costs), 3)}))
            beside.with_name("saves.new").replace(beside)
        except OSError:
            pass  # It is only a hint: a full disk must not end the training.

    def _read(self) -> None:
        try:
            written = os.stat(self.file).st_mtime_ns if self.file else 0
            if written != self._read_at:
                self._read_at = written
                self.interval_seconds = float(json.loads(self.file.read_text())["interval_seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # Not written yet: the last interval stays.


def _require_resolvable_hostname() -> None:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except socket.gaierror as error:
        # Gloo resolves its own host name; its only error would be "Unable to initialize backend 'cpu'".
        raise RuntimeError(f"this host's name {socket.gethostname()!r} has to resolve: add it to /etc/hosts") from error
