"""
Which process of a training this is, and the part of the data that is its own.

JAX is asked only once `jax.distributed` is up: an earlier question would start its backend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """Which process of the training this is, and of how many."""

    index: int
    count: int


def this_process(environ: Mapping[str, str] | None = None) -> Process:
    """
    JAX's own numbers once `jax.distributed` is up, else TPUCARE_WORKER of TPUCARE_WORKERS, else 0 of 1.

    JAX is not asked before, since its answer would start the backend, and `jax.distributed` has to come first.
    """
    environ = os.environ if environ is None else environ
    if _jax_is_distributed():
        import jax

        return Process(jax.process_index(), jax.process_count())
    return Process(int(environ.get("TPUCARE_WORKER") or 0), int(environ.get("TPUCARE_WORKERS") or 1))


@overload
def split_by_process(src: Sequence[T], *, even: bool = False, process: Process | None = None) -> list[T]: ...  # type: ignore[overload-overlap]
@overload
def split_by_process(src: Iterable[T], *, even: bool = False, process: Process | None = None) -> Iterator[T]: ...
def split_by_process(
    src: Sequence[T] | Iterable[T], *, even: bool = False, process: Process | None = None
) -> list[T] | Iterator[T]:
    """
    This process's share of *src*: every count-th item, from its own number on. A list gives a list; anything else is
    read lazily, so that it also serves as a `nodesplitter` of webdataset.

    All processes must be given the same items in the same order (sort what a listing returned; shuffle by a common
    seed). Together the shares are all of *src*, each item once, and differ in length by one at most.

    even:     leave out the last items that do not suffice for all, so that all shares are equally long: where every
              item takes a step, a process with one more would wait for the others for ever
    process:  instead of `this_process()`
    """
    if isinstance(src, (str, bytes)):
        raise TypeError(f"split_by_process shares out a list or an iterable, not one text ({src!r}); give [{src!r}]")
    process = process or this_process()
    index, count = process.index, process.count
    if not 0 <= index < count:
        raise ValueError(f"there is no process {index} of {count}")
    if isinstance(src, Sequence):
        return list(src[index : len(src) - len(src) % count if even else None : count])
    return _whole_rounds(src, index, count) if even else islice(src, index, None, count)


def _whole_rounds(src: Iterable[T], index: int, count: int) -> Iterator[T]:
    items = iter(src)
    while len(turn := list(islice(items, count))) == count:
        yield turn[index]


def _jax_is_distributed() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and bool(jax.distributed.is_initialized())


def from_all_processes(number: int) -> list[int]:
    """*number* of every process, in their order. A collective: all of them have to call it."""
    if this_process().count == 1 or not _jax_is_distributed():
        return [number]
    import numpy as np
    from jax.experimental import multihost_utils

    return [int(each) for each in multihost_utils.process_allgather(np.int32(number)).ravel()]
