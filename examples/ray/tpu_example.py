"""
Tasks on TPUs: each takes all chips of a host. Slices are made for them, and rest when there is no more work.

usage: python tpu_example.py [--chips 4] [--at-once M] [N]
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice

import ray


@ray.remote
def multiply(number: int, seconds: float) -> tuple[int, str, str, int]:
    """A product of two matrices on the chips of this host: number, slice, kind of the devices and how many."""
    import jax  # only here: the driver runs on the head, which has no TPU
    import jax.numpy as jnp

    matrix = jnp.ones((256, 256))
    assert float((matrix @ matrix)[0, 0]) == 256
    time.sleep(seconds)
    return number, os.environ["TPU_NAME"], jax.default_backend(), jax.local_device_count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=int, nargs="?", default=10, metavar="N")
    parser.add_argument("--chips", type=int, default=4, help="chips of a host, which one task takes")
    parser.add_argument(
        "--at-once", type=int, default=0, metavar="M", help="tasks that are asked for at a time; 0: all"
    )
    parser.add_argument("--seconds", type=float, default=0, help="time that each task sleeps")
    wanted = parser.parse_args()
    ray.init()
    # A task that is preempted is done again, as often as it takes.
    task = multiply.options(resources={"TPU": wanted.chips}, max_retries=-1)
    numbers = iter(range(wanted.tasks))
    pending = [task.remote(number, wanted.seconds) for number in islice(numbers, wanted.at_once or None)]
    done = 0
    while pending:
        ready, pending = ray.wait(pending)
        done += 1
        pending += [task.remote(number, wanted.seconds) for number in islice(numbers, 1)]
        number, name, backend, devices = ray.get(ready[0])
        print(f"{done} of {wanted.tasks}: task {number} on slice {name} ({devices} {backend})", flush=True)
    print("all done")


if __name__ == "__main__":
    main()
