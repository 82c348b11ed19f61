"""`tpucare demo`: the main job on an emulated cloud, in about two minutes."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Annotated

import typer

from tpucare.cli.common import Exit, print_json
from tpucare.model.errors import ConfigError
from tpucare.service.options import expanded

_NEEDED = ("jax", "optax", "orbax.checkpoint")


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    preemptions: Annotated[int, typer.Option(help="How often the node is taken away (0 to 4).")] = 2,
    hosts: Annotated[int, typer.Option(help="Hosts of the slice; each is a machine of its own.")] = 2,
    seed: Annotated[int, typer.Option(help="Decides the moments, and the training's data.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the training.", min=50)] = 200,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
    world: Annotated[
        str, typer.Option(help="Another emulated cloud: a world file, or realistic.", metavar="NAME|FILE")
    ] = "",
    keep: Annotated[str, typer.Option(help="Leave everything in this new folder.", metavar="DIR")] = "",
) -> int:
    """
    Train a real model through preemptions on an emulated cloud, and prove that nothing was lost.

    An emulated cloud of two zones, TPU workers that are small real machines (sshd, screen), a git repository with a JAX
    training, and `tpucare daemon` caring for it. The node is taken away at seeded moments, once with a stockout in its
    zone. Exit 0 only if every promise was kept.

    \b
    Example:
      tpucare demo
      tpucare demo --world realistic
      tpucare demo --preemptions 3 --hosts 1 --seed 7 --keep /tmp/demo
    """
    _require_training()
    from rich.console import Console

    from tpucare.testbed.demo import screen as live
    from tpucare.testbed.demo.run import play
    from tpucare.testbed.demo.setup import DemoOptions

    # Ended by a service manager or by a terminal that closes, the demo still ends everything that it started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    options = DemoOptions(
        preemptions, hosts, seed, steps, keep=expanded(keep) if keep else None, world=Path(world) if world else None
    )
    options.check()
    console = Console(stderr=json, quiet=json)
    screen, show = live.watch(console, options)
    with screen:
        report = play(options, show)
    if json:
        print_json(report.as_json())
    else:
        live.show_report(console, report)
        if keep:
            console.print(f"kept in {options.keep}", highlight=False)
    return Exit.OK if not report.faults else Exit.FAILED


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _require_training() -> None:
    for name in _NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            cure = "`make demo`, or `pip install '.[demo]'` in the clone of tpucare"
            raise ConfigError(f"the demo trains with JAX, which is not installed: {cure}")
