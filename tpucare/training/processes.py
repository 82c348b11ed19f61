"""
This process's number among those of a training, and its share of the data.

JAX is asked only after `jax.distributed.initialize`: an earlier question would start its backend.
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
    """Number of this process (from 0), and number of all processes of the training."""

    index: int
    count: int


def this_process(environ: Mapping[str, str] | None = None) -> Process:
    """
    JAX's own numbers once `jax.distributed` is initialised, else TPUCARE_WORKER of TPUCARE_WORKERS, else 0 of 1.

    JAX is not asked earlier: its answer would start the backend, which `jax.distributed` has to precede.
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
    This process's share of *src*: every count-th item, from its own number on. A sequence gives a list; another
    iterable is read lazily, so that it also serves as a `nodesplitter` of webdataset.

    All processes need the same items in the same order (sort a listing; shuffle with a common seed). Together the
    shares are all of *src*, each item once, and differ in length by one at most.

    even:     leave out the last items that are fewer than the processes, so that all shares have one length: if every
              item takes a step, a process with one more would wait for the others for ever
    process:  instead of `this_process()`
    """
    if isinstance(src, (str, bytes)):
        raise TypeError(f"split_by_process needs a list or an iterable, not one text ({src!r}); pass [{src!r}]")
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
    """*number* of every process, in their order. A collective: all processes have to call it."""
    if this_process().count == 1 or not _jax_is_distributed():
        return [number]
    import numpy as np
    from jax.experimental import multihost_utils

    return [int(each) for each in multihost_utils.process_allgather(np.int32(number)).ravel()]
