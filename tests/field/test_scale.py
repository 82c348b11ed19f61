"""Complaints about the caretaker itself: what it costs, and what it takes with it when it goes."""

from __future__ import annotations

from pathlib import Path

from tests.virtual.harness import Daemon
from tests.virtual.workers import Script


def test_a_job_that_tells_no_progress_is_asked_all_the_time(tmp_path: Path) -> None:
    """Hundreds of jobs without a progress bar were asked every second how they were, for months."""
    daemon = Daemon(tmp_path, script=Script(tells_progress=False))
    daemon.care_for("pod")
    daemon.run(minutes=30)
    before = daemon.clock.seconds
    daemon.run(minutes=30)
    asked = [at for at in daemon.launcher.probes if at > before]
    assert 90 <= len(asked) <= 160, "every 15 s or so"
    daemon.check()
