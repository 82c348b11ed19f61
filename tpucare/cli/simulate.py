"""`tpucare simulate`: months of care in minutes, with faults drawn from a seed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from tpucare.cli.common import print_json, say
from tpucare.model.errors import ConfigError
from tpucare.model.text import counted

if TYPE_CHECKING:
    from tpucare.model.resources import Slot
    from tpucare.testbed.simulation.campaign import Plan, Sums

SHOWN_EVERY_SECONDS = 0.2
_LEVELS = ("none", "low", "high")


def simulate(
    fleet: Annotated[Path | None, typer.Option(help="Fleet file; default: some slots of every kind.")] = None,
    world: Annotated[Path | None, typer.Option(help="World file, as for `tpucare emulator`.")] = None,
    days: Annotated[float, typer.Option(help="Days with faults, before it is calm.", min=0.01, max=3660)] = 0.25,
    seeds: Annotated[str, typer.Option(help="Seeds A to B, or one seed.", metavar="A..B")] = "1",
    faults: Annotated[str, typer.Option(help="none, low or high (docs/storms.md).", metavar="LEVEL")] = "low",
    count: Annotated[int, typer.Option(help="Number of equal slots, instead of some of every kind.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Number of processes; default: one per core.", min=0)] = 0,
    story: Annotated[Path | None, typer.Option(help="Replay the story in this file (from --save).")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the shortest failing story to this file.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Simulate days of care, and check every promise after every step.

    The real engine cares for simulated nodes under a virtual clock; one seed gives one history. A broken promise is
    printed with its seed, its step and the shortest story that shows it; then the exit code is 1.

    \b
    Example: tpucare simulate --faults high --seeds 1..8
    Example: tpucare simulate --fleet pod.yaml --days 90 --faults low
    """
    from tpucare.testbed.simulation.campaign import Plan, Sums, campaign

    plan = Plan(days, _level(faults), _slots(fleet), count, _world(world))
    chosen = _seeds(seeds)
    if story is not None:
        sums = _replay(plan, chosen[0], story)
    else:
        sums = Sums()
        with _Progress(len(chosen)) as progress:
            for outcome in campaign(plan, chosen, jobs or len(os.sched_getaffinity(0)), progress.on_way):
                sums.add(outcome)
                progress.lived(len(sums.failed))
    _print_sums(plan, sums, save, as_json=as_json, shrinks=story is None)
    if not sums.clean:
        raise typer.Exit(1)


class _Progress:
    """One line on stderr about the histories so far, if stderr is a terminal."""

    def __init__(self, histories: int) -> None:
        self._histories, self._lived, self._failed, self._part = histories, 0, 0, 0.0
        self._is_shown, self._next = sys.stderr.isatty(), 0.0

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def on_way(self, part: float) -> None:
        self._part = part
        self._show()

    def lived(self, failed: int) -> None:
        self._lived, self._failed, self._part = self._lived + 1, failed, 0.0
        self._show()

    def _show(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SHOWN_EVERY_SECONDS
        part = f", {self._part:.0%} of the next" if self._part else ""
        broken = f"; {self._failed} broke a property" if self._failed else ""
        self._write(f"lived {self._lived} of {counted(self._histories, 'history', 'histories')}{part}{broken}")

    def _write(self, line: str) -> None:
        if self._is_shown:
            with contextlib.suppress(OSError):
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _print_sums(plan: Plan, sums: Sums, save: Path | None, *, as_json: bool, shrinks: bool) -> None:
    failures = _failures(plan, sums, save) if shrinks else [str(b) for o in sums.failed.values() for b in o.broken]
    if as_json:
        print_json({**sums.as_json(), "story": failures})
        return
    for line in (*sums.lines(), *failures):
        say(line)


def _failures(plan: Plan, sums: Sums, save: Path | None) -> list[str]:
    """A line per failed seed, and the shortest story of the first one."""
    from tpucare.testbed.simulation.shrink import shrink, tell

    lines = [f"seed {seed}, step {o.steps}: {o.broken[0]}" for seed, o in sorted(sums.failed.items())]
    if not sums.failed:
        return lines
    seed = min(sums.failed)
    shrunk = shrink(plan.scenario(seed), sums.failed[seed])
    if save is not None:
        save.write_text(json.dumps(shrunk.scenario.story(), indent=1) + "\n", encoding="utf-8")
    head = f"the shortest story of seed {seed} that shows it, of {shrunk.tries} tried: {shrunk.outcome.broken[0]}"
    return [*lines, head, *tell(shrunk)]


def _replay(plan: Plan, seed: int, path: Path) -> Sums:
    from tpucare.testbed.simulation.campaign import Sums
    from tpucare.testbed.simulation.history import History
    from tpucare.testbed.simulation.scenario import told_again

    raw = _read(path)
    scenario = told_again(raw, plan.scenario(int(raw.get("seed", seed))))
    sums = Sums()
    sums.add(History(scenario).run())
    return sums


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a story: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: is not a story: it must be a JSON object")
    return raw


def _level(word: str) -> str:
    if word not in _LEVELS:
        raise typer.BadParameter(f"--faults must be one of {', '.join(_LEVELS)}")
    return word


def _seeds(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise typer.BadParameter("--seeds must be a number or A..B, such as 1..8")
    found = list(range(int(first), int(last if dots else first) + 1))
    if not found:
        raise typer.BadParameter("--seeds A..B: B must not be below A")
    return found


def _slots(path: Path | None) -> tuple[Slot, ...]:
    if path is None:
        return ()
    from tpucare.fleetfile import parse as fleets
    from tpucare.testbed.simulation.scenario import PROJECT, as_simulated

    text = fleets.read_text(path)
    declared = fleets.parse(text, file=str(path), folder=path.absolute().parent, default_project=PROJECT)
    return as_simulated(declared.slots())


def _world(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    from tpucare.testbed.emulator.world.config import load_world

    return load_world(path).model_dump(mode="json")
