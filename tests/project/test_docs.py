"""What README and docs tell a person to type exists: the program that they install, its commands and flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import tpucare
from tpucare.cli.app import app
from tpucare.testbed.emulator.serve import zones_text
from tpucare.testbed.emulator.world.config import WorldConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "systemd" / "README.md"]
CODE = [path for folder in ("tpucare", "examples", "templates") for path in sorted((ROOT / folder).rglob("*.py"))]
# The index has another program under this name; a path in a clone is ours.
FROM_INDEX = re.compile(r"pip install(?: -\S+)* ['\"]?tpucare\b|pip install.*\./tpucare")
LAST_OF_2022 = (0, 5, 0)


def test_the_version_is_above_every_one_of_the_program_of_2022() -> None:
    assert tuple(map(int, tpucare.__version__.split(".")[:3])) >= (1, 0, 0) > LAST_OF_2022


@pytest.mark.parametrize("path", [*PAGES, *CODE], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_installs_the_program_of_2022(path: Path) -> None:
    found = [line for line in path.read_text("utf-8").splitlines() if FROM_INDEX.search(line)]
    assert not found


def _commands() -> Iterator[tuple[str, str]]:
    """Shape: (page, line), every command line that names no placeholder: in blocks, and in backticks."""
    for path in PAGES:
        text = path.read_text("utf-8")
        blocks = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S))
        for line in [*re.findall(r"^(?:[$#] )?(tpucare .*)$", blocks, re.M), *re.findall(r"`(tpucare [^`\n]*)`", text)]:
            words = re.split(r"  #| \| | >>? | &(?: |$)| \\$", line)[0].strip()
            if not re.search(r"\b[A-Z]{2,}\b|\.\.\.|[{}\[\]…]", words.replace("TIMEOUT", "")):
                yield path.name, words


@pytest.mark.parametrize(("page", "line"), sorted(set(_commands())))
def test_every_command_of_the_docs_is_one(page: str, line: str) -> None:
    command: Any = get_command(app)
    rest, context = shlex.split(line)[1:], None
    try:
        while rest:
            context = command.make_context(command.name, rest, parent=context)
            is_group = hasattr(command, "resolve_command")
            rest = [*context._protected_args, *context.args] if is_group else []
            if rest:
                _, command, rest = command.resolve_command(context, rest)
    except Exception as error:
        # A command that is only named may lack what it is about. Which click the class is of depends on typer.
        if type(error).__name__ not in ("MissingParameter", "Exit"):
            raise


def test_an_emulator_names_the_zones_of_its_world() -> None:
    world = {"zones": {"us-east5-a": {"accelerators": ["v6e-1", "v6e-16", "v4-8"]}, "me-west1-a": {"accelerators": []}}}
    assert zones_text(WorldConfig.fast()) == "us-central1-a (every type), europe-west4-a (every type)"
    assert zones_text(WorldConfig.model_validate(world)) == "us-east5-a (v6e, v4), me-west1-a (no type)"


def test_the_docs_show_commands() -> None:
    assert len(set(_commands())) > 40


@pytest.mark.parametrize("page", ["design.md", "storms.md"])
def test_modules_and_names_of_the_design_are_in_the_code(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / page).read_text("utf-8"), flags=re.M | re.S)
    paths = [path for room in ("tpucare", "tests", "templates", "docs") for path in sorted((ROOT / room).rglob("*.*"))]
    words = {
        word for path in paths if path.suffix in (".py", ".yaml", ".j2") for word in re.findall(r"\w+", _read(path))
    }
    named = {span for span in re.findall(r"`([^`\n]+)`", text) if "<" not in span}
    modules = {span for span in named if re.fullmatch(r"[\w/]+\.(py|md|yaml)", span)}
    assert [span for span in sorted(modules) if not any(f"/{path}".endswith(f"/{span}") for path in paths)] == []
    names = {word for span in named - modules for word in re.findall(r"\w*(?:_\w|[a-z][A-Z])\w*", span)}
    assert sorted(names - words) == []


def _read(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")
