"""
The newest complete checkpoint, by looking at the folder in which orbax keeps one folder per step.

Complete means: a folder named by digits only (orbax writes under another name and renames), and in Cloud Storage, where
nothing can be renamed, one that holds `commit_success.txt`. Buckets are asked by the runner on a slow schedule, for the
tools take seconds; a probe reads the last answer. Standard library only, Python 3.8 and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import os
import shutil
import threading
import time

import files

PERIOD_SECONDS = 120
ASK_SECONDS = 60


def newest(path: str) -> int | None:
    """Newest step in a local folder; None when there is none, or when *path* is not a local folder."""
    if not path or "://" in path:
        return None
    try:
        with os.scandir(path) as entries:
            steps = [int(entry.name) for entry in entries if entry.name.isdigit() and entry.is_dir()]
    except (OSError, ValueError):
        return None
    return max(steps, default=None)


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
