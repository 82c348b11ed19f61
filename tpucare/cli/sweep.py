"""`tpucare sweep`: nodes that work for one W&B sweep."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tpucare.cli.common import Exit, options, print_json, say, warn
from tpucare.model.text import counted


def sweep(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="SWEEP", help="File of a new sweep, or ENTITY/PROJECT/ID.")],
    count: Annotated[int, typer.Option("--count", "-n", help="Number of nodes, with one agent each.", min=1)] = 1,
    fleet: Annotated[Path | None, typer.Option(help="Fleet file: TPU, code, setup, care.", metavar="FILE")] = None,
    name: Annotated[str, typer.Option(help="Name of the fleet; default: the file's, else the sweep's id.")] = "",
    accelerator_type: Annotated[str, typer.Option("--type", help="Without a fleet file: the TPU, such as v4-8.")] = "",
    zone: Annotated[str, typer.Option(help="Without a fleet file: the zone, such as us-central2-b.")] = "",
    check: Annotated[bool, typer.Option("--check", help="Only print the fleet file.")] = False,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """
    Keep N nodes running W&B agents for a sweep until it is over: finished, cancelled, or out of points.

    A running daemon cares for the fleet; without one this command does, until the sweep is over or Ctrl-C, which leaves
    the nodes alive.

    \b
    Example: tpucare sweep sweep.yaml --count 8 --fleet fleet.yaml
    Example: tpucare sweep me/my-project/a1b2c3d4 --count 8 --fleet fleet.yaml
    """
    from tpucare.integrations.wandb import sweep as sweeps

    chosen = options(context)
    prepared = sweeps.prepare(
        what, count, fleet, name=name, accelerator_type=accelerator_type, zone=zone, options=chosen, env=os.environ
    )
    if check:
        typer.echo(prepared.shown(), nl=False)
        return
    path = sweeps.create(prepared, os.environ)
    warn(f"sweep {path} at {prepared.base_url}")
    outcome = sweeps.hand_over(prepared, path, chosen, os.environ, _teller())
    _print_outcome(outcome, json_out)
    # As in `tpucare daemon`: a thread that still waits for a worker must not delay the exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.OK if outcome.daemon or (outcome.over and not outcome.failed) else Exit.FAILED)


def _teller() -> Any:
    from tpucare.service import event_log as events

    events.configure(events.LogForm.CONSOLE, "info")
    return events.teller()


def _print_outcome(outcome: Any, json_out: bool) -> None:
    if json_out:
        row = {"sweep": outcome.sweep, "fleet": outcome.fleet, "slots": list(outcome.slots), "daemon": outcome.daemon}
        print_json({**row, "over": outcome.over, "failed": dict(outcome.failed or {}), "runs": outcome.runs})
    elif outcome.daemon:
        slots = counted(len(outcome.slots), "slot")
        say(f"{outcome.fleet}: accepted, {slots}; `tpucare status {outcome.fleet}` shows the sweep")
    elif outcome.over:
        runs = f" ({outcome.runs})" if outcome.runs else ""
        say(f"{outcome.fleet}: sweep {outcome.sweep} is over{runs}, and all nodes of the fleet are deleted")
    else:
        warn(
            f"{outcome.fleet}: its nodes are still alive; `tpucare daemon` goes on with them, "
            f"`tpucare down {outcome.fleet}` deletes them"
        )
    for slot, why in (outcome.failed or {}).items():
        warn(f"{slot}: {why}")
