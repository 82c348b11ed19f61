"""
Measures in a process that did nothing before: `python -m tests.bench.child MODULE FUNCTION '{"argument": …}'`.

What a process has once used it rarely gives back, so memory can be measured only once in each.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any


def run(module: str, function: str, **arguments: object) -> Any:
    """The answer of *function* of `tests.bench.*module*`, called in a fresh process; arguments and answer are JSON."""
    command = [sys.executable, "-m", "tests.bench.child", module, function, json.dumps(arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    module, function, arguments = sys.argv[1:4]
    called = getattr(importlib.import_module(f"tests.bench.{module}"), function)
    print(json.dumps(called(**json.loads(arguments))))


if __name__ == "__main__":
    main()
