"""The unit that is shipped: what `tpucare apply` needs of it, and how little it leaves open."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "tpucare.service"
HEAD = ROOT / "systemd" / "tpucare-ray@.service"
INSTALLING = (ROOT / "docs" / "installing.md").read_text()


def settings(unit: Path = UNIT) -> dict[str, list[str]]:
    """Values of the unit by name, in order; a name may come more than once."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_daemon_may_write_where_apply_has_it_write() -> None:
    """ProtectSystem=strict leaves the rest of the disk read-only: without this line no `tpucare apply` ever worked."""
    unit = settings()
    (start,) = unit["ExecStart"]
    fleets = start.rpartition("--fleets ")[2]
    assert unit["ProtectSystem"] == ["strict"]
    assert fleets in [path.removeprefix("-") for path in unit["ReadWritePaths"]]
    assert f"-o tpucare -g tpucare {fleets}" in INSTALLING
    assert (unit["StateDirectory"], unit["StateDirectoryMode"]) == (["tpucare"], ["0700"])


def test_no_core_holds_secrets_and_no_capability_is_left() -> None:
    unit = settings()
    assert unit["LimitCORE"] == ["0"]
    assert (unit["CapabilityBoundingSet"], unit["NoNewPrivileges"], unit["UMask"]) == ([""], ["yes"], ["0077"])
    assert unit["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]


def test_what_the_daemon_reads_is_not_hidden_from_it() -> None:
    """The create budget reads the boot id below /proc/sys, which `ProcSubset=pid` hides."""
    assert "ProcSubset" not in settings()
    assert set(settings()["RestrictAddressFamilies"][0].split()) >= {"AF_UNIX", "AF_INET", "AF_INET6"}


def test_the_head_is_hardened_as_the_daemon_and_shares_its_state_folder() -> None:
    daemon, head = settings(), settings(HEAD)
    own = {"Type", "ExecStart", "EnvironmentFile", "SystemCallFilter"}
    lacks = {"NotifyAccess", "WatchdogSec", "TimeoutStartSec", "ReadWritePaths", "MemoryMax"}
    others = {"Description", "RestartSec", "TimeoutStopSec", "TasksMax", "LimitNOFILE"}
    assert {name for name in daemon if head.get(name) != daemon[name]} == own | lacks | others
    assert head["ExecStart"] == ["/opt/tpucare/bin/tpucare ray head %i $RAY_HEAD"]
    assert head["Environment"] == daemon["Environment"]
    # `@resources` stays allowed: Ray sets priorities and limits of its workers.
    assert head["SystemCallFilter"] == ["@system-service", "~@privileged"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_exposure_that_systemd_finds() -> None:
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if "unrecognized option" in done.stderr or "not been booted" in done.stderr:
        pytest.skip("this systemd-analyze reads no unit that is not loaded")
    level = re.search(r"Overall exposure level for tpucare\.service: ([0-9.]+)", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= 1.3
