"""
The newest complete checkpoint in a bucket, where nothing can be renamed: orbax puts `commit_success.txt` into the
folder of a step that is complete.

The tools take seconds to answer, so the runner asks on a slow schedule, and a probe reads the last answer.
Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import shutil
import threading
import time

import files

PERIOD_SECONDS = 120
ASK_SECONDS = 60


def watch(bucket: str, answer: str) -> None:
    """Write the newest step of *bucket* into the file *answer* every two minutes, where gcloud or gsutil is there."""
    for tool in (["gcloud", "storage", "ls"], ["gsutil", "ls"]):
        if shutil.which(tool[0]):
            command = [*tool, bucket.rstrip("/") + "/*/commit_success.txt"]
            threading.Thread(target=_watch, args=(command, answer), daemon=True).start()
            return


def _watch(command: list[str], answer: str) -> None:
    import subprocess

    while True:
        time.sleep(PERIOD_SECONDS)
        try:
            listing = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=ASK_SECONDS,
                check=False,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        names = [line.rsplit("/", 2)[-2] for line in listing.decode(errors="replace").split() if line.count("/") >= 2]
        steps = [int(name) for name in names if name.isdigit()]
        if steps:
            files.write_whole(answer, str(max(steps)))
