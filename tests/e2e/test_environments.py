"""A set-up is paid once: the next node restores its environment from the bucket, under the real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.deployment import TRAIN, TWO_HOSTS, deployment

pytestmark = [pytest.mark.machines, pytest.mark.timeout(120)]

SETUP = "sleep 2; mkdir -p venv/bin; printf 'echo tool %s' \"$TPUCARE_ATTEMPT\" >venv/bin/tool"


def test_the_next_node_restores_the_environment_from_the_bucket(tmp_path: Path) -> None:
    with deployment(tmp_path, world={"buckets": ["team"]}) as home:
        job = {"setup": SETUP, "run": f"bash venv/bin/tool\n{TRAIN}", "cache": "gs://team/environments"}
        job["env"] = {"STORAGE_EMULATOR_HOST": home.server.storage_endpoint}  # type: ignore[assignment]
        home.declare("pod", kind=TWO_HOSTS, job=job)
        home.start()
        home.await_training("pod-0", "pod-0-a0")
        home.await_(lambda: (memory := home.memory("pod-0")) is not None and memory.stored, "the environment is kept")
        home.restart()
        home.order("preempt", selector="pod-0")
        home.await_training("pod-0", "pod-0-a1")

        # Made by the first attempt, and run by the second one.
        home.await_(lambda: "tool 1" in home.log("pod-0", attempt=2), "the tool runs")
        assert "environment restored" in home.log("pod-0", attempt=2)
        assert "tool 1" in home.log("pod-0", attempt=2, worker=1) or home.await_(
            lambda: "tool 1" in home.log("pod-0", attempt=2, worker=1), "it does on the other host"
        )
        told = [event.text.partition(": ")[2].partition(" in ")[0] for event in home.events("environment")]
        assert told[0].startswith("the environment is kept") or told[0] == "set up"
        assert told[-1] == "environment restored"
        assert home.row("pod-0")["preparation"]["environment"] == "restored"
