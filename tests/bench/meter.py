"""What a process uses, as /proc tells it: the process itself need not know that it is looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Use:
    """`cpu`: seconds of user and system time of all threads; `rss`: bytes; `at`: monotonic seconds."""

    cpu: float
    rss: int
    threads: int
    descriptors: int
    at: float

    def core_share(self, earlier: Use) -> float:
        """Percent of one core between two looks."""
        return 100 * (self.cpu - earlier.cpu) / (self.at - earlier.at)


def use_of(pid: int) -> Use:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    return Use(
        cpu=time.clock_gettime(_cpu_clock(pid)),
        rss=int(status["VmRSS"].split()[0]) * 1024,
        threads=int(status["Threads"]),
        descriptors=len(os.listdir(process / "fd")),
        at=time.monotonic(),
    )


def _cpu_clock(pid: int) -> int:
    """The CPU clock of another process, exact where /proc/PID/stat samples; see clock_getcpuclockid(3) in Linux."""
    return (~pid << 3) | 2


def wait_until(condition: Callable[[], bool], seconds: float, what: str, every: float = 0.1) -> None:
    """Another process makes it true. Raises: TimeoutError."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(every)
