"""Environments and checkpoints that are there before the run: real launches and runners, a folder and a bucket."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from tests.kits.bench_worker import Node, eventually, node
from tpucare.model.resources import Job
from tpucare.model.runs import Archive, LaunchOrder, Phase, Preparation
from tpucare.testbed.emulator.storage.api import ObjectServer
from tpucare.testbed.emulator.storage.objects import ObjectStore

pytestmark = pytest.mark.machines

SETUP = (
    'echo setup >>"$HOME/setups"; mkdir -p venv/bin; echo "echo tool $((6*7))" >venv/bin/tool; chmod +x venv/bin/tool'
)
RUN = "./venv/bin/tool; echo step 1; sleep 300"
ROOT = Path(__file__).parents[2]
SCOPE = "5c" * 32


def job(cache: str, **more: object) -> Job:
    return replace(Job(run=RUN, setup=SETUP, cache=cache), **more)  # type: ignore[arg-type]


def order(made: Node, job: Job, archive: Archive | None = None, number: int = 1) -> LaunchOrder:
    return replace(made.order(job, number), fleet="pod", cache_scope=SCOPE, archive=archive)


def launch(made: Node, job: Job, archive: Archive | None = None, number: int = 1) -> None:
    result = made.launcher.launch(order(made, job, archive, number))
    assert result.complete, result


def prepared(made: Node, worker: int = 0) -> Preparation:
    """How the run came to its environment, once it runs."""
    eventually(lambda: made.probe(worker).phase in (Phase.RUN, Phase.EXITED))
    return made.probe(worker).preparation


def setups(made: Node, worker: int = 0) -> int:
    path = made.homes[worker] / "setups"
    return len(path.read_text().split()) if path.exists() else 0


def says_42(made: Node, worker: int) -> bool:
    return "tool 42" in made.log(worker)


def stored(made: Node) -> Archive:
    eventually(lambda: made.probe().preparation.archive or made.probe().preparation.refused)
    archive = made.probe().preparation.archive
    assert archive is not None, made.probe().preparation.refused
    return archive


@contextmanager
def bucket() -> Iterator[tuple[ObjectStore, str]]:
    store = ObjectStore(lambda: datetime(2026, 3, 1, tzinfo=UTC), ["team"])
    service = ObjectServer(store).serve()
    try:
        yield store, f"http://127.0.0.1:{service.port}"
    finally:
        service.stop()


def test_the_second_node_runs_without_a_set_up(tmp_path: Path) -> None:
    with node(workers=2) as cold:
        launch(cold, job(str(tmp_path)))
        assert prepared(cold).environment == "made"
        archive = stored(cold)
        assert prepared(cold, 1).environment == "made"
        # One worker stores it, for all.
        assert [path.name for path in (tmp_path / "pod").iterdir()] == [
            f"{archive.key[:24]}-{archive.sha256[:24]}.tar.gz"
        ]
    with node(workers=2) as warm:
        launch(warm, job(str(tmp_path)), archive)
        for worker in range(2):
            assert prepared(warm, worker).environment == "restored"
            eventually(partial(says_42, warm, worker))
            assert setups(warm, worker) == 0
        assert "environment restored (fetched" in warm.log()
        # The next run on this node needs neither.
        assert warm.stop().quiet
        launch(warm, job(str(tmp_path)), archive, 2)
        assert prepared(warm).environment == ""
        assert "setup was done on this node before" in warm.log()


def test_a_bucket_is_reached_without_any_tool(tmp_path: Path) -> None:
    with bucket() as (store, endpoint):
        with node(STORAGE_EMULATOR_HOST=endpoint) as cold:
            launch(cold, job("gs://team/cache"))
            archive = stored(cold)
        assert len(store.get("team", object_of(archive)).content) == archive.bytes
        with node(STORAGE_EMULATOR_HOST=endpoint) as warm:
            launch(warm, job("gs://team/cache"), archive)
            assert prepared(warm).environment == "restored"
            assert setups(warm) == 0
        store.delete("team", object_of(archive))
        with node(STORAGE_EMULATOR_HOST=endpoint) as missed:
            launch(missed, job("gs://team/cache"), archive)
            told = prepared(missed)
            assert (told.environment, setups(missed)) == ("made", 1)
            assert "404" in told.missed


def object_of(archive: Archive) -> str:
    return f"cache/pod/{archive.key[:24]}-{archive.sha256[:24]}.tar.gz"


def test_a_bucket_that_is_not_there_costs_nothing_but_the_set_up() -> None:
    archive = Archive(SCOPE, "ab" * 32, "cd" * 32, 1000)
    with node(STORAGE_EMULATOR_HOST="http://127.0.0.1:9") as lone:
        launch(lone, job("gs://team/cache"), archive)
        told = prepared(lone)
        assert (told.environment, setups(lone)) == ("made", 1)
        assert told.missed.startswith("not restored: ")
        eventually(lambda: lone.probe().preparation.refused)
        assert lone.probe().alive


def test_a_secret_in_the_environment_is_told_and_nothing_is_stored(tmp_path: Path) -> None:
    leaking = job(str(tmp_path), setup=SETUP + '; echo "token = $HF_TOKEN" >venv/pip.conf', secrets=("HF_TOKEN",))
    with node(secrets={"HF_TOKEN": "hf_very_s3cret"}) as made:
        launch(made, leaking)
        eventually(lambda: made.probe().preparation.refused)
        assert made.probe().preparation.refused == "venv/pip.conf holds the value of the secret HF_TOKEN"
        assert list(tmp_path.iterdir()) == []
        assert "hf_very_s3cret" not in made.log()


def test_a_crash_in_a_restored_environment_is_followed_by_a_set_up(tmp_path: Path) -> None:
    """An archive that breaks the job would otherwise break it on each node."""
    broken = job(str(tmp_path), setup="mkdir -p venv; echo 'exit 1' >venv/tool", run="bash venv/tool; sleep 300")
    with node() as cold:
        launch(cold, replace(broken, run="sleep 300"))
        archive = stored(cold)
    with node() as warm:
        launch(warm, broken, archive)
        report = warm.ended()
        assert (report.exit_status, report.preparation.environment) == (1, "restored")
        launch(warm, broken, archive, 2)
        assert prepared(warm).environment == "made"


def test_a_stop_during_the_restore_ends_the_run_at_once() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with node(STORAGE_EMULATOR_HOST=endpoint) as made:
            launch(made, job("gs://team/cache"), Archive(SCOPE, "ab" * 32, "cd" * 32, 1000))
            eventually(lambda: made.probe().phase is Phase.SETUP)
            began = time.monotonic()
            assert made.stop(grace=20).quiet
            assert time.monotonic() - began < 15
            assert (setups(made), made.ended().signalled) == (0, True)


def test_a_job_without_a_cache_has_none_of_it(tmp_path: Path) -> None:
    with node() as made:
        launch(made, job(""), Archive(SCOPE, "ab" * 32, "cd" * 32, 1000))
        told = prepared(made)
        assert (told.environment, told.missed, told.archive) == ("made", "", None)
        assert not list(made.folder().glob("archive"))


# --- the checkpoint, copied beside the set-up -------------------------------------------------------------------------

RESTORES = """
import os, sys
from tpucare import training
folder = training.prefetched(int(sys.argv[1]), wait_seconds=20)
names = sorted(os.listdir(os.path.join(folder, sys.argv[1]))) if folder else None
print("restored", names, flush=True)
"""


def restoring(step: int) -> Job:
    run = f"cd {ROOT} && exec {sys.executable} -c {shlex.quote(RESTORES)} {step}"
    return Job(run=run, setup="sleep 1", checkpoint="gs://team/run", prefetch=True)


def fill(store: ObjectStore, *steps: int, complete: bool = True) -> None:
    for step in steps:
        for name in ("_METADATA", "d/0", *(("commit_success.txt",) if complete else ())):
            store.insert("team", f"run/{step}/{name}", f"{step} {name}".encode() * 1000)


def test_the_newest_checkpoint_is_there_when_the_run_begins() -> None:
    with bucket() as (store, endpoint), node(STORAGE_EMULATOR_HOST=endpoint) as one:
        fill(store, 4, 12)
        fill(store, 20, complete=False)
        launch(one, restoring(12))
        one.ended()
        assert "restored ['_METADATA', 'commit_success.txt', 'd']" in one.log()
        assert "checkpoint 12 prefetched: 3 files" in one.log()
        copied = one.homes[0] / ".tpucare" / "prefetch" / "12"
        assert (copied / "d/0").read_bytes() == store.get("team", "run/12/d/0").content
        # What a later run of this node finds is of that run.
        fill(store, 16)
        launch(one, restoring(16), number=2)
        one.ended()
        assert "checkpoint 16 prefetched" in one.log()
        assert not copied.exists()


@pytest.mark.parametrize("what", ["another step", "no checkpoint", "no service"])
def test_without_that_checkpoint_the_run_restores_from_the_bucket(what: str) -> None:
    with bucket() as (store, endpoint):
        if what == "another step":
            fill(store, 4)
        with node(STORAGE_EMULATOR_HOST="127.0.0.1:9" if what == "no service" else endpoint) as one:
            launch(one, restoring(12))
            assert one.ended().exit_status == 0
            assert "restored None" in one.log()
