"""
Runs the W&B agent of one TPU slice, and says truly how it ended.

Source of the command that stands for {agent} in a sweep fleet's job; standard library only, since it runs on the TPU
VM. The agent itself exits 0 whether W&B told it to exit or it gave up on a program that keeps failing: the second must
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
# What the agent logs, on its standard error, when it stops by itself (wandb/wandb_agent.py).
STOPS_BY_ITSELF = (b"failed runs in the first", b"failed runs in a row", b"consecutive failed runs")


def main() -> int:
    sweep = os.environ["TPUCARE_SWEEP"]
    agent = find_agent()
    if agent is None:
        note("wandb is not installed on this worker: add `pip install wandb` to job.setup")
        return NO_WANDB
    offer_python()
    share_checkpoints()
    # The whole process group is told to stop, the agent too: it passes that on to its run, and waits for it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    command = [*agent, "agent", "--forward-signals", sweep]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    gave_up = threading.Event()
    copying = threading.Thread(target=copy, args=(process.stderr, gave_up), daemon=True)
    copying.start()
    status = process.wait()
    # Not until its end: what a program of the agent left behind holds it open, for as long as it lives.
    copying.join(LAST_WORDS_SECONDS)
    if status == 0 and gave_up.is_set():
        note("the agent gave up on a program that keeps failing")
        return GAVE_UP
    return status if status >= 0 else 128 - status


def copy(said: IO[bytes], gave_up: threading.Event) -> None:
    """What the agent says, as it comes; *gave_up* is set when it says that it stops by itself."""
    for line in said:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        if any(text in line for text in STOPS_BY_ITSELF):
            gave_up.set()


def find_agent() -> Optional[List[str]]:
    """The `wandb` of the PATH, or that of this python."""
    found = shutil.which("wandb")
    if found:
        return [found]
    try:
        import wandb  # noqa: F401
    except ImportError:
        return None
    return [sys.executable, "-m", "wandb"]


def offer_python() -> None:
    """Sweeps begin `python program.py` unless they say otherwise, and images of TPU VMs may have python3 alone."""
    if shutil.which("python") is None:
        folder = tempfile.mkdtemp(prefix="tpucare-python-")
        os.symlink(sys.executable, os.path.join(folder, "python"))
        os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")


def share_checkpoints() -> None:
    """One folder for all slots: a run that was interrupted here goes on elsewhere."""
    shared = os.environ.get("TPUCARE_SWEEP_CHECKPOINT", "").rstrip("/")
    if shared:
        os.environ["TPUCARE_CHECKPOINT"] = shared
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", shared + "/.jax-cache")


def note(text: str) -> None:
    sys.stderr.write(f"[tpucare: {text}]\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
