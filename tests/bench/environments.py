"""
The row on environments kept over nodes: from "sshd listens" to "the run started", on a node that sets up, and on the
next ones, which restore. Real machines and the real daemon; the set-up is two minutes of sleep and a small venv.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.bench.cloud_process import CloudProcess
from tests.bench.installation import FLEET, Daemon, Installation
from tests.bench.launching import RUN, ZONE, started_after, waking_world
from tests.bench.meter import wait_until
from tests.bench.report import Measure, percentile
from tests.kits import sshd

SETUP_SECONDS = 120
# Two thousand files of 20 KB that compress badly: 40 MB, as of a small venv.
SETUP = (
    f"sleep {SETUP_SECONDS}; mkdir -p venv/lib; head -c 40960000 /dev/urandom | "
    "split -b 20480 -a 4 -d - venv/lib/module-"
)


def kept(samples: int = 5) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="tpucare-bench-") as folder:
        installation, port = Installation(Path(folder)), sshd.free_port()
        cache, machines = Path(folder) / "cache", Path(folder) / "machines"
        installation.declare(1, kind="v3-8", zone=ZONE, run=RUN, job={"setup": SETUP, "cache": str(cache)})
        with CloudProcess(waking_world(), port=port, machines=machines) as cloud:
            env = installation.environment(cloud.endpoint, port, TPUCARE_SSH_USER=cloud.login_user)
            with Daemon(installation, env):
                first = f"{FLEET}-0-a0"
                cold = started_after(cloud, machines, first, 1, patience=SETUP_SECONDS + 180.0)
                wait_until(lambda: _is_kept(installation), 180.0, "the environment is kept", every=0.5)
                cloud.preempt([first])
                warm = []
                for number in range(1, samples + 1):
                    warm.append(started_after(cloud, machines, f"{FLEET}-0-a{number}", 1))
                    cloud.preempt([f"{FLEET}-0-a{number}"])
    how = f"real sshd and screen, each time a new node; a set-up of {SETUP_SECONDS} s, a venv of 2,000 files and 40 MB"
    spread = (min(warm), percentile(warm, 50), max(warm))
    shares = tuple(100 * seconds / cold for seconds in spread)
    return [
        Measure("3c", "environment restored: sshd listens to run started, of that with a set-up", 25, "%", shares,
                len(warm), how),
        Measure("3c", "environment restored: sshd listens to run started", 3, "s", spread, len(warm), how, told=False),
    ]  # fmt: skip


def _is_kept(installation: Installation) -> bool:
    return b'"archive"' in installation.remembered
