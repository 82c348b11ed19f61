"""`tpucare demo`: the main job on an emulated cloud, in about two minutes."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from tpucare.cli.common import Exit, print_json
from tpucare.model.errors import ConfigError
from tpucare.service.options import expanded

if TYPE_CHECKING:
    from rich.console import Console

_NEEDED = ("jax", "optax", "orbax.checkpoint")


def demo(
    preemptions: Annotated[int, typer.Option(help="Number of preemptions (0 to 4).")] = 2,
    hosts: Annotated[int, typer.Option(help="Hosts of the slice, each an emulated machine.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the preemptions' moments and the training data.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the training.", min=50)] = 200,
    json: Annotated[bool, typer.Option("--json", help="Print only one JSON object.")] = False,
    world: Annotated[
        str, typer.Option(help="Another emulated cloud: a world file, or realistic.", metavar="NAME|FILE")
    ] = "",
    keep: Annotated[str, typer.Option(help="Keep all files in this new folder.", metavar="DIR")] = "",
) -> int:
    """
    Train a real model through preemptions on an emulated cloud, and prove that nothing was lost.

    The demo runs an emulated cloud of two zones, TPU workers that are small real machines (sshd, screen), a git
    repository with a JAX training, and `tpucare daemon`. It preempts the node at seeded moments, once with a stockout
    in its zone. Exit 0 only if every promise was kept.

    \b
    Example:
      tpucare demo
      tpucare demo --world realistic
      tpucare demo --preemptions 3 --hosts 1 --seed 7 --keep /tmp/demo
    """
    require(_NEEDED, "make demo", "demo")
    from rich.console import Console

    from tpucare.testbed.demo import screen as demo_screen
    from tpucare.testbed.demo.run import run_demo
    from tpucare.testbed.demo.setup import DemoOptions

    end_on_signals()
    options = DemoOptions(
        preemptions, hosts, seed, steps, keep=expanded(keep) if keep else None, world=Path(world) if world else None
    )
    options.check()
    console = Console(stderr=json, quiet=json)
    screen, show = demo_screen.watch(console, options)
    with screen:
        report = run_demo(options, show)
    return tell(report, console, lambda: demo_screen.show_report(console, report), json=json, keep=options.keep)


class DemoReport(Protocol):
    """The part that the reports of all demos have."""

    @property
    def faults(self) -> list[str]: ...

    def as_json(self) -> dict[str, Any]: ...


def tell(report: DemoReport, console: Console, show: Callable[[], object], *, json: bool, keep: Path | None) -> int:
    """Print the report of a demo, by *show* unless as JSON. Returns the exit status that follows from it."""
    if json:
        print_json(report.as_json())
    else:
        show()
        if keep:
            console.print(f"kept in {keep}", highlight=False)
    return Exit.OK if not report.faults else Exit.FAILED


def end_on_signals() -> None:
    """After the SIGTERM of a service manager or the SIGHUP of a closed terminal a demo still ends its processes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def require(modules: Iterable[str], target: str, extra: str) -> None:
    """Raises: ConfigError: a module is not installed; it names the make target and the extra that bring it."""
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            advice = f"run `{target}`, or `pip install '.[{extra}]'` in the clone of tpucare"
            raise ConfigError(f"the demo needs {name.partition('.')[0]}, which is not installed: {advice}")
