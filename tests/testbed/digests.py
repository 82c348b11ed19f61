"""
`python -m tests.testbed.digests`: whether histories are what they were, for a change of the form of the code that is
to change nothing of what it does.

The digest of a history is that of every event of it: the instant, the slot, the node, the kind, and the cause or fact;
texts are no part of it, so a better wording changes nothing. With `--write` the digests of now are kept: a change of
behaviour does so, and says in its commit which it is. `NAMES` maps words of now to those that the kept digests know.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tpucare.model.resources import Event
from tpucare.testbed.simulation.campaign import Plan
from tpucare.testbed.simulation.history import History

KEPT = Path(__file__).with_name("digests.json")
PLANS: Mapping[str, Plan] = {"storm": Plan(0.25, "high"), "month": Plan(90.0, "low", count=1000)}
NAMES: Mapping[str, str] = {}


def digest(name: str) -> str:
    """
    *name*: `storm 7`, `month 1`: a plan and a seed.

    Raises: AssertionError: that history broke a promise.
    """
    plan, _, seed = name.partition(" ")
    history, told = History(PLANS[plan].scenario(int(seed))), hashlib.sha256()
    tell = history.daemon.listen

    def listen(event: Event) -> None:
        told.update(line(event).encode())
        tell(event)

    history.daemon.listen = listen
    outcome = history.run()
    assert not outcome.broken, f"{name}: {outcome.broken[0]}"
    return told.hexdigest()[:32]


def line(event: Event) -> str:
    words = (event.kind, str(event.fields.get("cause") or event.fields.get("fact") or ""))
    return " ".join([f"{event.at:%m-%d %H:%M:%S.%f}", event.slot, event.node, *(NAMES.get(w, w) for w in words)]) + "\n"


def lived(names: list[str]) -> Iterator[tuple[str, str]]:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from zip(names, pool.map(digest, names), strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.testbed.digests", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the digests of now")
    parser.add_argument("--storms", type=int, default=24, help="how many, from seed 1 on (default 24)")
    parser.add_argument("--months", type=int, default=2, help="how many, from seed 1 on (default 2)")
    options = parser.parse_args()
    # Months take longest: first.
    names = [f"month {seed + 1}" for seed in range(options.months)]
    names += [f"storm {seed + 1}" for seed in range(options.storms)]
    kept: dict[str, str] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    changed = 0
    for name, of_now in lived(names):
        is_same = kept.get(name) == of_now
        changed += not is_same
        print(f"{name}: {of_now} {'as kept' if is_same else 'CHANGED'}", flush=True)
        kept[name] = of_now
    if options.write:
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    return 0 if options.write or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
