"""
End all runs on this worker: SIGTERM, after a grace SIGKILL for all their processes, then wait until the chips are free.

A live runner ends its run itself; processes that survive it are found by their marks and ended here. Prints one line of
JSON: `quiet` (no run, chips free), and the remaining `processes` and `holders` of chips. Never SIGINT: it leaves TPU
chips unusable. Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from typing import Any

import files
import foreign
import processes
import sessions

POLL_SECONDS = 0.02
# Time beyond the grace for the runner to reap its children and write the exit file; then it is ended, too.
RUNNER_SECONDS = 10.0
STACK_BYTES = 1 << 18
STACK_PROCESSES = 32


def main(arguments: list[str]) -> None:
    """Pairs: `worker`, `grace` and `patience` (seconds after SIGKILL), `stacks` (1: write them into the log first)."""
    # Finish even if the connection ends meanwhile.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = files.read_pairs(arguments)
    base, worker = processes.home(), int(order["worker"])
    grace = float(order["grace"])
    if order["stacks"] == "1":
        _record_stacks(base, worker)
    token = processes.lock_token(base)
    if processes.is_foreign(base, token):
        # Now, since the file `stopped`, written next, ends the search for new sessions of the run.
        foreign.inspect_run(base, token, worker, "")
    _forbid_starts(base, grace)
    _ask_to_end(base, worker, grace)
    answer = _make_end(base, worker, float(order["patience"]))
    print(json.dumps(answer))


def _forbid_starts(base: str, grace: float) -> None:
    """Mark all runs as stopped: a launch under way for one of them must not start it after our search."""
    for token in processes.run_tokens(base):
        path = os.path.join(base, token, "stopped")
        if not os.path.exists(path):
            files.write_whole(path, f"{grace:g}")


def _ask_to_end(base: str, worker: int, grace: float) -> None:
    rest = processes.living(base, worker)
    if not rest:
        return
    runner = _runner(base)
    if runner in rest:
        processes.send(runner, signal.SIGTERM)
        _wait(base, worker, grace + RUNNER_SECONDS)
        return
    for pid in rest - sessions.servers(rest) or rest:
        processes.send(pid, signal.SIGTERM)
    _wait(base, worker, grace)


def _make_end(base: str, worker: int, patience: float) -> dict[str, Any]:
    """SIGKILL until no process is found, then wait for the chips; at most *patience* seconds in all."""
    deadline = time.monotonic() + patience
    while True:
        rest = processes.living(base, worker)
        for pid in rest:
            processes.send(pid, signal.SIGKILL)
        holders = {} if rest else processes.chip_holders()
        held = bool(rest or holders or processes.lock_is_held(base))
        if not held or time.monotonic() > deadline:
            return {"quiet": not held, "processes": sorted(rest)[:32], "holders": sorted(holders)[:32]}
        time.sleep(POLL_SECONDS if rest else 0.5)


def _wait(base: str, worker: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    pause = POLL_SECONDS
    while time.monotonic() < deadline and processes.living(base, worker):
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)


def _runner(base: str) -> int:
    token = processes.lock_token(base)
    try:
        pid = json.loads(files.read_text(os.path.join(base, token, "phase"))).get("pid", 0)
    except (ValueError, AttributeError):
        return 0
    return pid if isinstance(pid, int) else 0


def _record_stacks(base: str, worker: int) -> None:
    """Write the stacks of the run's processes into its log: by py-spy if it is installed, else from the kernel."""
    token = processes.lock_token(base)
    rest = processes.living(base, worker) - {_runner(base)}
    if not token or not rest:
        return
    log = files.BoundedLog(os.path.join(base, token), 1 << 30)
    log.write(b"\n[tpucare: the run seems to hang; stacks of its processes]\n")
    for pid in sorted(rest)[:STACK_PROCESSES]:
        log.write(_stack(pid)[:STACK_BYTES])


def _stack(pid: int) -> bytes:
    name = files.read_text(f"/proc/{pid}/cmdline", 200).replace("\0", " ")
    lines = [f"--- process {pid}: {name}"]
    spied = processes.quietly(["py-spy", "dump", "--pid", str(pid)]) if _is_python(pid) else None
    lines += [spied] if spied else [f"{part}: {text}" for part, text in _kernel_view(pid) if text]
    return ("\n".join(lines) + "\n").encode()


def _is_python(pid: int) -> bool:
    try:
        return shutil.which("py-spy") is not None and "python" in os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False


def _kernel_view(pid: int) -> list[tuple[str, str]]:
    state = [
        line for line in files.read_text(f"/proc/{pid}/status").splitlines() if line.startswith(("State", "Threads"))
    ]
    parts = [(part, files.read_text(f"/proc/{pid}/{part}", 4096).strip()) for part in ("wchan", "syscall", "stack")]
    return [("status", ", ".join(state)), *parts]


if __name__ == "__main__":
    main(sys.argv[1:])
