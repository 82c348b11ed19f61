"""
Rows on launches: from "sshd listens" to "the run started", on real machines (sshd, screen, processes), by the real
daemon, over the whole way: a connect that succeeds, the first probe, host keys, the push, the runner, the job.

Every sample is a new node: it is preempted as soon as its run has started on all workers.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.cloud_process import CloudProcess, world
from tests.bench.installation import FLEET, Daemon, Installation
from tests.bench.meter import wait_until
from tests.bench.report import Measure, percentile
from tests.kits import sshd

ZONE = "europe-west4-a"
START_SECONDS = 180.0
# Shell builtins alone, so that what is measured is ours.
RUN = 'read -r up _ </proc/uptime; echo "$up" >"$HOME/started-$TPUCARE_NODE"; exec sleep 100000'


def launches(kind: str, hosts: int, samples: int) -> list[float]:
    """Seconds from the last worker that listens to the last run that starts, for *samples* nodes of *hosts* workers."""
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        installation, port = Installation(Path(folder)), sshd.free_port()
        installation.declare(1, kind=kind, zone=ZONE, run=RUN)
        machines = Path(folder) / "machines"
        with CloudProcess(waking_world(), port=port, machines=machines) as cloud:
            env = installation.environment(cloud.endpoint, port, TPUCARE_SSH_USER=cloud.login_user)
            with Daemon(installation, env):
                seconds = []
                for number in range(samples):
                    seconds.append(started_after(cloud, machines, f"{FLEET}-0-a{number}", hosts))
                    cloud.preempt([f"{FLEET}-0-a{number}"])
                return seconds


def waking_world() -> dict[str, Any]:
    """Workers boot a while after their addresses are listed, as real ones do: nobody has to learn where they are."""
    config = world(seconds=0.2)
    config["latencies"]["boot_late"] = 2.5
    return config


def started_after(
    cloud: CloudProcess, machines: Path, node: str, hosts: int, *, patience: float = START_SECONDS
) -> float:
    """Seconds from the last worker of *node* that listens to the last run that starts."""
    pattern = f"machines/workers/{node}.*/home/started-{node}"
    found: list[Path] = []

    def has_started() -> bool:
        found[:] = [path for path in machines.glob(pattern) if path.read_text().endswith("\n")]
        return len(found) == hosts

    # Looking costs, and must not be what is measured: once the workers listen there is one look at the likely end.
    wait_until(lambda: len(cloud.listening(node)) == hosts, START_SECONDS, f"{node} listens", every=0.1)
    wait_until(has_started, patience, f"{node} runs", every=1.0)
    started = max(float(path.read_text()) for path in found) - _boot_clock_ahead()
    return started - max(cloud.listening(node))


def _boot_clock_ahead() -> float:
    """/proc/uptime counts the time that a machine was suspended, the monotonic clock does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


# --- rows ------------------------------------------------------------------------------------------------------------


def one_host(samples: int = 12) -> list[Measure]:
    return _measures("3a", "v3-8", 1, 0.5, samples)


def many_hosts(samples: int = 5) -> list[Measure]:
    return _measures("3b", "v3-512", 64, 3.0, samples)


def _measures(row: str, kind: str, hosts: int, limit: float, samples: int) -> list[Measure]:
    seconds = launches(kind, hosts, samples)
    what = f"sshd listens to run started, {hosts} host{'s' if hosts > 1 else ''}"
    how = "real sshd and screen, each time a new node; the spread is over nodes"
    median, worst = percentile(seconds, 50), percentile(seconds, 99)
    spread = (min(seconds), median, worst)
    return [Measure(row, what, limit, "s", spread, len(seconds), how, told=False)]
