"""
The newest complete checkpoint of a bucket, copied to this host's disk while the environment is fetched or set up.

The file `state` of the folder says how it goes: `begun STEP`, `done STEP`, or `failed WHY`; `prefetched` of
`tpucare.training` reads it. A run that does not ask restores from the bucket as ever. Standard library only, Python 3.8
and newer: this runs on the TPU VM.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time

import files
from checkpoints import StorageApi, in_bucket, newest

FOLDER, STATE = "prefetch", "state"
THREADS = 8
BLOCK = 1 << 20
# Of the disk has to stay free, for the job.
SPARED_BYTES = 5 << 30


class _Unfit(Exception):
    """Why there is nothing to prefetch."""


def main(arguments: list[str]) -> None:
    """Pairs: `base`, the folder of tpucare; `checkpoint`, `gs://BUCKET/PATH`."""
    order = files.read_pairs(arguments)
    folder = os.path.join(order["base"], FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder, 0o700)
    try:
        said = copy_newest(order["checkpoint"], folder)
    except Exception as error:
        # Any error: the run restores from the bucket.
        said = f"failed {error or type(error).__name__}"
    files.write_whole(os.path.join(folder, STATE), said)


def copy_newest(checkpoint: str, folder: str) -> str:
    """The last state. Raises: OSError, ValueError, http.client.HTTPException, _Unfit."""
    began = time.monotonic()
    step = newest(checkpoint)
    if step is None:
        raise _Unfit("there is no complete checkpoint")
    files.write_whole(os.path.join(folder, STATE), f"begun {step}")
    bucket, path = in_bucket(checkpoint, str(step))
    prefix = path + "/"
    found = StorageApi().objects(bucket, prefix)
    size = sum(found.values())
    if size > shutil.disk_usage(folder).free - SPARED_BYTES:
        raise _Unfit(f"checkpoint {step} has {size >> 20} MiB, and the disk has no room for it")
    _copy_all(bucket, {name: os.path.join(folder, str(step), name[len(prefix) :]) for name in found})
    seconds = time.monotonic() - began
    print(
        f"[tpucare: checkpoint {step} prefetched: {len(found)} files, {size >> 20} MiB in {seconds:.1f} s]", flush=True
    )
    return f"done {step}"


def _copy_all(bucket: str, targets: dict[str, str]) -> None:
    left = sorted(targets)
    errors: list[Exception] = []

    def work() -> None:
        api = StorageApi()
        while not errors:
            try:
                name = left.pop()
            except IndexError:
                return
            try:
                _copy(api, bucket, name, targets[name])
            except Exception as error:
                errors.append(error)  # Raised below, on the main thread.

    for target in targets.values():
        if os.path.normpath(target) != target:
            raise _Unfit("an object's name leaves the folder")
        os.makedirs(os.path.dirname(target), exist_ok=True)
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _copy(api: StorageApi, bucket: str, name: str, target: str) -> None:
    with api.open(bucket, name) as source, open(target, "wb") as out:
        shutil.copyfileobj(source, out, BLOCK)


if __name__ == "__main__":
    main(sys.argv[1:])
