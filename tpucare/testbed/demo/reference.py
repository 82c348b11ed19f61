"""
The undisturbed training, with which the demo compares its result.

The same folder, seed and number of hosts, run as plain local processes: no tpucare, no SSH, no emulated cloud, no
checkpoint to resume from. The README of `train.py` says what it promises about bits.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpucare.model.errors import ConfigError, TpuCareError
from tpucare.model.text import length

_LOG_TAIL_BYTES = 2000


@contextmanager
def beginning(
    train_folder: Path, *, hosts: int, steps: int, seed: int, save_every: int, folder: Path, nice: int = 0
) -> Iterator[Callable[[timedelta], dict[str, Any]]]:
    """
    Begin to train from nothing without interruption, and yield a function that waits for the end.

    The function takes a deadline and returns the content of `result.json`. *folder* gets `checkpoints/` and a log of
    each host. *nice*: 19 = the processes use only idle time. Every process is ended at the end of the context.

    Raises:
        ConfigError: *folder* holds checkpoints already, so the run would resume and prove nothing.
        TpuCareError, by the function: a host failed, or the deadline passed; the text ends with the tail of its log.
    """
    checkpoint = folder / "checkpoints"
    if checkpoint.exists():
        raise ConfigError(f"{checkpoint} exists: an undisturbed training starts in an empty folder")
    checkpoint.mkdir(parents=True)
    command = ["nice", "-n", str(nice), sys.executable, str(train_folder / "train.py")]
    command += [f"--steps={steps}", f"--seed={seed}", f"--save-every={save_every}"]
    coordinator = free_loopback_endpoint()
    logs = _logs(folder, hosts)
    with ExitStack() as ended:
        processes = [
            ended.enter_context(
                _host_process(command, host_environment(os.environ, index, hosts, coordinator, checkpoint), log)
            )
            for index, log in enumerate(logs)
        ]

        def finish(deadline: timedelta) -> dict[str, Any]:
            _wait_for_all(processes, logs, deadline)
            return _result(checkpoint, steps)

        yield finish


def host_environment(
    environ: Mapping[str, str], index: int, count: int, coordinator: str, checkpoint: Path
) -> dict[str, str]:
    """
    The environment of one host of a training on local CPUs, with the variables that the runner would set.

    The caller's own settings of JAX, XLA and tpucare are left out, since they could change bits; so are proxies, which
    gRPC would use to reach the coordinator.
    """
    foreign = ("JAX_", "XLA_", "TPUCARE_")
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(foreign) and not name.lower().endswith("_proxy")
    }
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "TPUCARE_WORKER": str(index),
        "TPUCARE_WORKERS": str(count),
        "TPUCARE_COORDINATOR": coordinator,
        "TPUCARE_CHECKPOINT": str(checkpoint),
        "PYTHONUNBUFFERED": "1",
    }


def free_loopback_endpoint() -> str:
    """``host:port`` on a loopback address of this process's own; the port is free at this moment."""
    pid = os.getpid()
    address = f"127.9.{pid // 250 % 250 + 1}.{pid % 250 + 1}"
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


def _logs(folder: Path, hosts: int) -> list[Path]:
    return [folder / f"host-{index}.log" for index in range(hosts)]


@contextmanager
def _host_process(command: Sequence[str], environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        # SIGTERM would make it save a checkpoint first, which is not needed.
        process.kill()
        process.wait()


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: timedelta) -> None:
    """Return when all exited 0; raise at the first other exit, since the rest may wait for that host for minutes."""
    with ExitStack() as closed, selectors.DefaultSelector() as selector:
        for index, process in enumerate(processes):
            descriptor = os.pidfd_open(process.pid)
            closed.callback(os.close, descriptor)
            selector.register(descriptor, selectors.EVENT_READ, index)
        end = time.monotonic() + deadline.total_seconds()
        while selector.get_map():
            events = selector.select(max(0.0, end - time.monotonic()))
            if not events:
                raise TpuCareError(f"the undisturbed training did not end within {length(deadline)}{_tail(logs[0])}")
            for key, _ in events:
                selector.unregister(key.fd)
                if status := processes[key.data].wait():
                    what = f"host {key.data} of the undisturbed training exited with {status}"
                    raise TpuCareError(what + _tail(logs[key.data]))


def _tail(log: Path) -> str:
    text = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return f"; end of {log}:\n{text}"


def _result(checkpoint: Path, steps: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((checkpoint / "result.json").read_text())
    if result["final_step"] != steps:
        raise TpuCareError(f"the undisturbed training ended at step {result['final_step']} instead of {steps}")
    return result
