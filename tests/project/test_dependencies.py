"""What the package imports is declared, so that a floor can be set for it, and what is private has a ceiling."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Parts of the namespace `google`, longest first.
GOOGLE = {
    "google.cloud.location": "googleapis-common-protos",
    "google.cloud": "google-cloud-tpu",
    "google.api_core": "google-api-core",
    "google.auth": "google-auth",
    "google.longrunning": "googleapis-common-protos",
    "google.rpc": "googleapis-common-protos",
    "google.protobuf": "protobuf",
}
# Brought by what is declared, in the same release, or by the job; or used only where it is there.
COMPANIONS = {"pydantic_core": "pydantic", "numpy": "jax", "etils": "orbax-checkpoint", "google_crc32c": "gcsfs"}


def declared(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=!\[ ]", line)[0].lower() for line in lines}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_what_is_imported_is_declared() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    known = declared(PROJECT["dependencies"])
    of_jobs = declared(extras)
    distributions = packages_distributions()
    missing = set()
    for path in sorted((ROOT / "tpucare").rglob("*.py")):
        for name in imported(path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top == "tpucare":
                continue
            part = next((part for part in GOOGLE if f"{name}.".startswith(f"{part}.")), "")
            given = GOOGLE.get(part) or COMPANIONS.get(top)
            names = {given} if given else {each.lower() for each in distributions.get(top, [top])}
            if not names & (known | of_jobs if "training" in path.parts or top in COMPANIONS else known):
                missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert missing == set()


def test_a_library_whose_private_names_are_overridden_has_a_ceiling() -> None:
    assert "paramiko>=5,<6" in PROJECT["dependencies"]
