"""
Runs the W&B agent of one TPU slice, and exits with a status that tells its end.

Its source is in the command that replaces {agent} in a sweep fleet's job; standard library only, since it runs on the
TPU VM. The agent itself exits 0 both when W&B told it to exit and when it gave up on a failing program: the second must
count as a crash, or a broken program would look like a finished sweep.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO, List, Optional

GAVE_UP = 70
NO_WANDB = 69
LAST_WORDS_SECONDS = 5
# Texts on the agent's standard error when it stops by itself (wandb/wandb_agent.py).
STOPS_BY_ITSELF = (b"failed runs in the first", b"failed runs in a row", b"consecutive failed runs")


def main() -> int:
    sweep = os.environ["TPUCARE_SWEEP"]
    agent = find_agent()
    if agent is None:
        note("wandb is not installed on this worker: add `pip install wandb` to job.setup")
        return NO_WANDB
    offer_python()
    share_checkpoints()
    # The whole process group gets SIGTERM, the agent too: it passes the signal on to its run, and waits for it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    command = [*agent, "agent", "--forward-signals", sweep]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    gave_up = threading.Event()
    copying = threading.Thread(target=copy, args=(process.stderr, gave_up), daemon=True)
    copying.start()
    status = process.wait()
    # Not until the end of stderr: a process that the agent's program left behind keeps it open.
    copying.join(LAST_WORDS_SECONDS)
    if status == 0 and gave_up.is_set():
        note("the agent gave up on a program that keeps failing")
        return GAVE_UP
    return status if status >= 0 else 128 - status


def copy(output: IO[bytes], gave_up: threading.Event) -> None:
    """Copy the agent's *output* line by line; set *gave_up* at a line of STOPS_BY_ITSELF."""
    for line in output:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        if any(text in line for text in STOPS_BY_ITSELF):
            gave_up.set()


def find_agent() -> Optional[List[str]]:
    """The `wandb` of PATH, else that of this python."""
    found = shutil.which("wandb")
    if found:
        return [found]
    try:
        import wandb  # noqa: F401
    except ImportError:
        return None
    return [sys.executable, "-m", "wandb"]


def offer_python() -> None:
    """Put a `python` on PATH: sweeps run `python program.py` by default, and TPU VM images may have only python3."""
    if shutil.which("python") is None:
        folder = tempfile.mkdtemp(prefix="tpucare-python-")
        os.symlink(sys.executable, os.path.join(folder, "python"))
        os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")


def share_checkpoints() -> None:
    """Use one folder for all slots: an interrupted run goes on in another one."""
    shared = os.environ.get("TPUCARE_SWEEP_CHECKPOINT", "").rstrip("/")
    if shared:
        os.environ["TPUCARE_CHECKPOINT"] = shared
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", shared + "/.jax-cache")


def note(text: str) -> None:
    sys.stderr.write(f"[tpucare: {text}]\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
