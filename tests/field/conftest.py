"""A daemon under virtual time for every story."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.harness import Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path / "state")
