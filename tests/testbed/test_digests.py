"""Histories are what they were; see `digests` for what to do where a change of behaviour is meant."""

from __future__ import annotations

import json

import pytest

from tests.testbed.digests import KEPT, digest

NAMES = sorted(json.loads(KEPT.read_text(encoding="utf-8")))
QUICK = ("storm 1",)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_a_history_is_what_it_was(name: str) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert digest(name) == kept[name], "meant? `python -m tests.testbed.digests --write`, and say it in the commit"
