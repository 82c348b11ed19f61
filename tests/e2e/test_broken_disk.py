"""
The state folder on a file system that is read-only: from the start, or all of a sudden.

What cannot be written down is not done, nothing is lost or cleared away, and the nodes live on.
A full disk, and a store that is harmed or gone, are in test_broken.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.e2e.disk import disk
from tests.e2e.test_broken import await_end, last_line
from tests.kits.deployment import Deployment, deployment

pytestmark = [pytest.mark.machines, pytest.mark.timeout(240)]


def content(folder: Path) -> dict[str, str]:
    """Digest of every file below *folder*, by name."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(home: Deployment, *reasons: str) -> None:
    """A daemon that is started now ends at once, with one line that gives one of *reasons*."""
    told_before = home.daemon_log.read_text().splitlines() if home.daemon_log.exists() else []
    home.start(ready=False)
    assert await_end(home) == 5
    told = home.daemon_log.read_text().splitlines()[len(told_before) :]
    assert len(told) == 1, told
    assert str(home.state) in told[0]
    assert any(reason in told[0] for reason in reasons), told


def mutations(home: Deployment) -> list[str]:
    return [str(one["method"]) for one in home.audit() if one.get("method") in ("CreateNode", "DeleteNode")]


@pytest.mark.slow
def test_a_state_folder_that_is_read_only_from_the_start(tmp_path: Path) -> None:
    with disk(tmp_path / "state") as state, deployment(tmp_path) as home:
        home.declare("pod")
        state.remount("ro")
        refused(home, "Read-only file system")
        assert mutations(home) == []
        state.remount("rw")
        home.start()
        home.await_training("pod-0")
        home.kill()
        home.close_reader()
        state.remount("ro")
        before, called = content(home.state), mutations(home)
        refused(home, "Read-only file system")
        assert "pod-0" in home.cli("status", want=None).out
        assert content(home.state) == before
        assert mutations(home) == called
        assert list(home.runs()) == ["pod-0-a0.1"]
        home.close_reader()
        state.remount("rw")
        home.start()
        home.await_(lambda: home.row("pod-0")["phase"] == "run", "the run is adopted")
        assert home.ask("status")["store_lost"] is False
        assert home.token("pod-0") == "pod-0-a0.1"


def test_a_disk_that_turns_read_only_under_the_daemon(tmp_path: Path) -> None:
    with disk(tmp_path / "state") as state, deployment(tmp_path) as home:
        home.declare("pod", count=2)
        home.start()
        home.await_training("pod-0")
        home.await_training("pod-1")
        called = mutations(home)
        state.fail()
        home.order("preempt", selector="pod-0")
        assert await_end(home) == 5
        assert str(home.state) in last_line(home)
        assert mutations(home) == called, "something was done that could not be written down"
        refused(home, "Read-only file system")
        home.await_(lambda: list(home.runs()) == ["pod-1-a0.1"], "the other run lives on, the preempted one ends")
        home.close_reader()
        state.replace()
        home.start()
        home.await_training("pod-0", "pod-0-a1")
        home.await_(lambda: sorted(home.names()) == ["pod-0-a1", "pod-1-a0"], "one node each")
        home.await_(lambda: sorted(home.runs()) == ["pod-0-a1.1", "pod-1-a0.1"], "one run each")
        assert home.attempts("pod-1") == 1
