"""`tpucare simulate`: months of care in minutes, with faults drawn from a seed, or on recorded capacity."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from tpucare.cli.common import print_json, say
from tpucare.model.errors import ConfigError
from tpucare.model.text import counted, length

if TYPE_CHECKING:
    from tpucare.model.resources import Slot
    from tpucare.testbed.replay.account import Account, Saving
    from tpucare.testbed.simulation.campaign import Plan, Sums

SHOWN_EVERY_SECONDS = 0.2
STORM_DAYS = 0.25
_LEVELS = ("none", "low", "high")


def simulate(
    fleet: Annotated[Path | None, typer.Option(help="Fleet file; default: some slots of every kind.")] = None,
    world: Annotated[Path | None, typer.Option(help="World file, as for `tpucare emulator`.")] = None,
    days: Annotated[
        float | None,
        typer.Option(help="Days with faults (0.25); of a recording: the first ones.", min=0.01, max=3660),
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", "--seed", help="Seeds A to B, or one seed.", metavar="A..B")] = "1",
    faults: Annotated[
        str | None, typer.Option(help="none, low or high (docs/storms.md); default: low.", metavar="LEVEL")
    ] = None,
    count: Annotated[int, typer.Option(help="Number of equal slots, instead of some of every kind.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Number of processes; default: one per core.", min=0)] = 0,
    story: Annotated[Path | None, typer.Option(help="Replay the story in this file (from --save).")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the shortest failing story to this file.", metavar="FILE")
    ] = None,
    traces: Annotated[
        str, typer.Option(help="Live on recorded capacity: a shipped dataset, or a folder.", metavar="NAME|DIR")
    ] = "",
    mapped: Annotated[
        list[str] | None,
        typer.Option("--map", help="Recording that stands for a zone of the fleet; repeatable.", metavar="ZONE=TRACE"),
    ] = None,
    first_step: Annotated[
        str, typer.Option(help="On recordings: from an accepted create to the first step.", metavar="TIME")
    ] = "12m",
    save_every: Annotated[
        str, typer.Option(help="On recordings: time between checkpoints, or daly.", metavar="TIME")
    ] = "30m",
    save_cost: Annotated[
        str, typer.Option(help="On recordings: how long a checkpoint stops the training.", metavar="TIME")
    ] = "30s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Simulate days of care, and check every promise after every step.

    The real engine cares for simulated nodes under a virtual clock; one seed gives one history. A broken promise is
    printed with its seed, its step and the shortest story that shows it; then the exit code is 1.

    With --traces there are no faults but the loss of recorded spot capacity, and the answer is how much of the time the
    fleet trains, what an hour of it costs, and how other policies do on the very same capacity (docs/goodput.md).

    \b
    Example: tpucare simulate --faults high --seeds 1..8
    Example: tpucare simulate --fleet pod.yaml --days 90 --faults low
    Example: tpucare simulate --traces gcp-h100-2025 --fleet pod.yaml --seeds 1..5
    """
    chosen = _seeds(seeds)
    processes = jobs or len(os.sched_getaffinity(0))
    if traces:
        _refuse_beside_traces(world=world, faults=faults, story=story, save=save)
        pace = _Training(_length("--first-step", first_step), _saving(save_every, save_cost))
        kept = _replay_fleet(traces, _slots(fleet), count, mapped or [], days, chosen, processes, pace, as_json=as_json)
        if not kept:
            raise typer.Exit(1)
        return
    if mapped:
        raise typer.BadParameter("--map belongs to --traces")
    from tpucare.testbed.simulation.campaign import Plan, Sums, campaign

    plan = Plan(days or STORM_DAYS, _level(faults or "low"), _slots(fleet), count, _world(world))
    if story is not None:
        sums = _replay(plan, chosen[0], story)
    else:
        sums = Sums()
        with _Progress(len(chosen)) as progress:
            for outcome in campaign(plan, chosen, processes, progress.on_way):
                sums.add(outcome)
                progress.lived(len(sums.failed))
    _print_sums(plan, sums, save, as_json=as_json, shrinks=story is None)
    if not sums.clean:
        raise typer.Exit(1)


# --- on recorded capacity --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Training:
    """How a run trains: seconds to its first step, and its checkpoints."""

    first_step_seconds: float
    saving: Saving


def _refuse_beside_traces(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise typer.BadParameter(f"{given[0]} does not go with --traces, which has no faults but the loss of capacity")


def _replay_fleet(
    dataset: str,
    slots: tuple[Slot, ...],
    count: int,
    mapped: list[str],
    days: float | None,
    seeds: list[int],
    jobs: int,
    training: _Training,
    *,
    as_json: bool,
) -> bool:
    """Live every seed with the engine and with the policies beside it, and print it. Whether the promise was kept."""
    from tpucare.testbed.replay import report
    from tpucare.testbed.replay.fleets import on_recordings
    from tpucare.testbed.replay.policies import POLICIES
    from tpucare.testbed.replay.recordings import cheapest_first, load_dataset, window_of
    from tpucare.testbed.replay.replays import ENGINE, Replay, gang, live_replays

    traces = load_dataset(dataset)
    if not slots:
        slots = gang(cheapest_first(traces))
    elif count:
        slots = tuple(replace(slots[0], name=f"{slots[0].fleet}-{index}") for index in range(count))
    fleet = on_recordings(slots, dataset, traces, mapped)
    base = Replay(
        fleet.slots,
        fleet.traces,
        hosts_per_unit=fleet.hosts_per_unit,
        days=days,
        first_step_seconds=training.first_step_seconds,
        saving=training.saving,
    )
    policies = (ENGINE, *POLICIES)
    plans = [replace(base, policy=policy, seed=seed) for policy in policies for seed in seeds]
    found: dict[str, list[Account]] = {policy: [] for policy in policies}
    with _Progress(len(plans)) as progress:
        accounts = live_replays(plans, jobs, lambda: progress.lived(0))
    for plan, account in zip(plans, accounts, strict=True):
        found[plan.policy].append(account)
    figures = {policy: report.figures_of(of_policy) for policy, of_policy in found.items()}
    kept, verdict = report.verdict(figures[ENGINE], figures["oracle"], len(base.zones))
    if as_json:
        told = {policy: one.as_json() for policy, one in figures.items()}
        print_json({"clean": kept, "traces": dataset, "seeds": seeds, "notes": list(fleet.notes), "policies": told})
        return kept
    window = window_of(base.traces.values(), base.window, days)
    widest = max(place.workers for slot in fleet.slots for place in slot.places)
    hosts, places = counted(widest, "host"), counted(len(base.zones), "zone")
    say(
        f"{counted(len(fleet.slots), 'slot')} of {hosts} in {places} on {dataset}: {window.judged / 86400:.1f} days, "
        f"{counted(len(seeds), 'history', 'histories')}, first step after {length(training.first_step_seconds)}"
    )
    for note in fleet.notes:
        say(note)
    say()
    for line in (*report.comparison(figures), "", *report.place_lines(figures[ENGINE], str), ""):
        say(line)
    own = figures[ENGINE]
    for line in (report.reaction_line(own), report.cadence_line(own, training.saving.seconds), *verdict):
        if line:
            say(line)
    return kept


def _saving(every: str, cost: str) -> Saving:
    from tpucare.testbed.replay.account import Saving

    stops = _length("--save-cost", cost)
    return Saving(None if every == "daly" else _length("--save-every", every), stops)


def _length(option: str, text: str) -> float:
    from tpucare.fleetfile.values import duration, positive

    try:
        return positive(duration(text)).total_seconds()
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


# --- storms ----------------------------------------------------------------------------------------------------------


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
        broken = f"; {self._failed} broke a promise" if self._failed else ""
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
    if not plan.beat().close:
        say(f"so long a history has a poll each {plan.beat().poll:.0f} s, where a daemon has one each 5 s")


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
