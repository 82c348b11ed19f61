"""
    python -m tests.bench [ROW ...] [--write-docs] [--list]

Measures all rows, or those named, one after another; each takes from seconds to some minutes. The answer is put into
bench.json, in the place of what stood there of the same rows, and with --write-docs into docs/performance.md as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.bench import environments, goodput, idle, launching, lost, passes, ray, reaction, virtual_time
from tests.bench.report import Measure, table, write_docs, write_json

ROOT = Path(__file__).parent.parent.parent
ROWS: Mapping[str, Callable[[], list[Measure]]] = {
    "one-lost": lost.one_lost,
    "one-lost-virtual": virtual_time.one_lost,
    "burst": lost.burst,
    "burst-virtual": virtual_time.burst,
    "launch-one-host": launching.one_host,
    "launch-64-hosts": launching.many_hosts,
    "environments": environments.kept,
    "quiet-pass": passes.quiet_passes,
    "idle": idle.at_rest,
    "memory-10000": passes.heavy_memory,
    "recoveries": idle.recoveries,
    "virtual-speed": virtual_time.speed,
    "months": virtual_time.months,
    "reaction": reaction.reaction,
    "goodput": goodput.nine_zones,
    "ray": ray.cluster,
    "ray-demands": ray.demands,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure tpucare against its limits.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--write-docs", action="store_true", help="renew the table in docs/performance.md")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.rows) - set(ROWS)):
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    held = True
    for name in arguments.rows or ROWS:
        held &= _measure(name, arguments.write_docs)
    return 0 if held else 1


def _measure(name: str, docs: bool) -> bool:
    """One row, written down at once: a later one that fails takes nothing away. Whether every limit was held."""
    began = time.monotonic()
    measures = ROWS[name]()
    print(f"{name} ({time.monotonic() - began:.0f} s)\n{table(measures)}\n", flush=True)
    known = write_json(ROOT / "bench.json", measures)
    if docs:
        write_docs(ROOT / "docs" / "performance.md", known)
    return all(measure.held for measure in measures)


if __name__ == "__main__":
    sys.exit(main())
