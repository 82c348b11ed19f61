"""Golden texts in variants: the first is kept whole, and of each other one what differs from it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def assert_golden(folder: str, variants: Mapping[str, Mapping[str, str]], name: str) -> None:
    """
    Variant *name* (texts by file name) is as it was agreed. After a change that is meant: TPUCARE_GOLDEN=write, then
    read the difference. The first variant's files are whole, so that of another one its difference says every line.
    """
    base = next(iter(variants))
    texts = variants[name]
    differs = {f"{name}.diff": "".join(_difference(variants[base], texts))}
    wanted = {f"{base}/{path}": text for path, text in texts.items()} if name == base else differs
    for path, text in wanted.items():
        golden = GOLDEN / folder / path
        if os.environ.get("TPUCARE_GOLDEN") == "write":
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text)
        assert text == golden.read_text(), path


def _difference(base: Mapping[str, str], texts: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for path in sorted({*base, *texts}):
        before, after = (one.get(path, "").splitlines(keepends=True) for one in (base, texts))
        lines += difflib.unified_diff(before, after, path, path, n=1)
    return lines
