"""The undisturbed training: what it returns is in `test_example_train`; here, what it refuses and what it leaves."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from tests.kits.reference import undisturbed
from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.testbed.demo.reference import free_loopback_endpoint, host_environment


def train_folder(tmp_path: Path, script: str) -> Path:
    """A folder with a `train.py` of one's own: how hosts are run and ended does not depend on JAX."""
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "train.py").write_text(f"import json, os, pathlib, sys, time\n{script}\n")
    return folder


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def run(train: Path, tmp_path: Path, hosts: int = 2, deadline: timedelta = timedelta(seconds=60)) -> dict[str, object]:
    return undisturbed(
        train, hosts=hosts, steps=30, seed=4, save_every=10, folder=tmp_path / "reference", deadline=deadline
    )


def test_every_host_gets_its_number_and_the_arguments_and_the_result_comes_back(tmp_path: Path) -> None:
    train = train_folder(
        tmp_path,
        """
worker, folder = os.environ["TPUCARE_WORKER"], pathlib.Path(os.environ["TPUCARE_CHECKPOINT"])
print(worker, os.environ["TPUCARE_WORKERS"], sys.argv[1:])
if worker == "0":
    (folder / "result.json").write_text(json.dumps({"final_step": 30, "params_sha256": "ab", "loss": 1.5}))
""",
    )
    assert run(train, tmp_path) == {"final_step": 30, "params_sha256": "ab", "loss": 1.5}
    for index in range(2):
        log = (tmp_path / "reference" / f"host-{index}.log").read_text()
        assert log.strip() == f"{index} 2 ['--steps=30', '--seed=4', '--save-every=10']"


def test_a_failed_host_is_named_with_its_last_words_and_the_other_is_ended(tmp_path: Path) -> None:
    train = train_folder(
        tmp_path, 'if os.environ["TPUCARE_WORKER"] == "1": sys.exit("no such device")\ntime.sleep(3600)'
    )
    before = children()
    with pytest.raises(TpuCareError, match=r"host 1 .* exited with 1; end of .*host-1\.log:\nno such device"):
        run(train, tmp_path)
    assert children() == before


def test_a_training_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    train = train_folder(tmp_path, 'print("waiting", flush=True)\ntime.sleep(3600)')
    before = children()
    with pytest.raises(TpuCareError, match="did not end within 1 s"):
        run(train, tmp_path, deadline=timedelta(seconds=1))
    assert children() == before


def test_a_result_of_another_step_is_refused(tmp_path: Path) -> None:
    train = train_folder(
        tmp_path,
        'pathlib.Path(os.environ["TPUCARE_CHECKPOINT"], "result.json").write_text(json.dumps({"final_step": 20}))',
    )
    with pytest.raises(TpuCareError, match="ended at step 20 instead of 30"):
        run(train, tmp_path, hosts=1)


def test_checkpoints_that_are_there_already_are_refused(tmp_path: Path) -> None:
    (tmp_path / "reference" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="starts in an empty folder"):
        run(tmp_path, tmp_path)


def test_the_callers_own_settings_do_not_reach_the_training(tmp_path: Path) -> None:
    caller = {"PATH": "/bin", "XLA_FLAGS": "--a", "JAX_ENABLE_X64": "1", "TPUCARE_NOTICE": "/n", "https_proxy": "p"}
    environ = host_environment(caller, 1, 2, "127.9.1.1:99", tmp_path)
    assert not environ.keys() & (caller.keys() - {"PATH"})
    assert (environ["PATH"], environ["TPUCARE_WORKER"], environ["TPUCARE_WORKERS"]) == ("/bin", "1", "2")


def test_the_coordinator_gets_a_loopback_address_where_it_can_listen() -> None:
    host, port = free_loopback_endpoint().split(":")
    assert host.startswith("127.9.")
    with socket.create_server((host, int(port))) as listener:
        assert listener.getsockname() == (host, int(port))
    assert os.getpid() // 250 % 250 + 1 == int(host.split(".")[2])
