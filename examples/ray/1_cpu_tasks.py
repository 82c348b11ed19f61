"""Tasks without a TPU: they run on the CPUs of the head, and no slice is made for them."""

from __future__ import annotations

import random
import sys

import ray


@ray.remote
def points_in_circle(seed: int, count: int) -> int:
    """How many of *count* random points of a square lie in its circle."""
    rng = random.Random(seed)
    return sum(rng.random() ** 2 + rng.random() ** 2 <= 1 for _ in range(count))


def main(tasks: int, count: int = 200_000) -> None:
    ray.init()
    inside = ray.get([points_in_circle.remote(seed, count) for seed in range(tasks)])
    print(f"{tasks} tasks: pi is about {4 * sum(inside) / (tasks * count):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
